// Pre-tokenizers, compiled to a list of steps; each step cuts or rewrites a stretch of text and
// gives its pieces to the next, the last gives words to the model.
#include "engine/tokenizer_internal.h"
#include "engine/utf8.h"

#include <stdlib.h>
#include <string.h>

static const char gpt2_pattern[] =
    "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+";
static const char punctuation_pattern[] = "[\\x21-\\x2F\\x3A-\\x40\\x5B-\\x60\\x7B-\\x7E\\p{P}]";
// Rust's \w, which is not quite Oniguruma's.
#define RUST_WORD "\\p{Alphabetic}\\p{M}\\p{Nd}\\p{Pc}\\x{200C}\\x{200D}"
static const char word_pattern[] = "[" RUST_WORD "]+|[^" RUST_WORD "\\s]+";

typedef struct run_state {
    const tokenizer *t;
    encode_scratch *scratch;
    token_ids *out;
    error *err;
} run_state;

// --- running -------------------------------------------------------------------------------------

static int run_step(const run_state *run, size_t k, const char *text, size_t n, bool first);

// Whether a segment joins the one before it; previous and current tell which of them are matches.
static bool joins(split_behavior behavior, bool previous, bool current) {
    switch (behavior) {
    case SPLIT_MERGED_WITH_PREVIOUS:
        return current && !previous;
    case SPLIT_MERGED_WITH_NEXT:
        return previous && !current;
    case SPLIT_CONTIGUOUS:
        return previous == current;
    default:
        return false;
    }
}

typedef struct splitter {
    const run_state *run;
    size_t k; // step that takes the pieces
    const char *text;
    bool first;
    const pretok_step *step;
    text_span piece; // not yet given on
    bool is_match;   // of the last segment in piece
} splitter;

static int split_flush(splitter *sp) {
    text_span piece = sp->piece;
    sp->piece.start = piece.end;
    if (piece.start == piece.end)
        return E_OK;
    return run_step(sp->run, sp->k, sp->text + piece.start, piece.end - piece.start,
                    sp->first && piece.start == 0);
}

static int split_segment(splitter *sp, text_span segment, bool is_match) {
    is_match ^= sp->step->invert;
    bool open = sp->piece.start < sp->piece.end;
    if (sp->step->behavior == SPLIT_REMOVED && is_match) {
        int rc = split_flush(sp);
        sp->piece = (text_span){segment.end, segment.end};
        return rc;
    }
    bool join = open && joins(sp->step->behavior, sp->is_match, is_match);
    sp->is_match = is_match;
    if (join) {
        sp->piece.end = segment.end;
        return E_OK;
    }
    int rc = split_flush(sp);
    sp->piece = segment;
    return rc;
}

static int run_split(const run_state *run, size_t k, const char *text, size_t n, bool first) {
    splitter sp = {.run = run, .k = k + 1, .text = text, .first = first};
    sp.step = &run->t->pretoks[k];
    size_t from = 0, gap = 0; // gap: end of the last match
    bool any = false;
    int rc = E_OK;
    while (rc == E_OK && from <= n) {
        text_span match;
        rc = regex_find(sp.step->pattern, run->scratch, text, n, from, &match);
        if (rc == E_NOT_FOUND) {
            rc = E_OK;
            break;
        }
        if (rc != E_OK)
            return error_set(run->err, rc, "%s: pre_tokenizer: the expression gave up on the text",
                             run->t->name);
        bool empty = match.start == match.end;
        from = match.end;
        if (empty && from < n) { // look on behind the next character
            size_t length;
            uint32_t c;
            utf8_next(text + from, n - from, &length, &c);
            from += length;
        } else if (empty) {
            from++;
        }
        if (empty && any && match.start == gap)
            continue;
        any = true;
        if (match.start > gap)
            rc = split_segment(&sp, (text_span){gap, match.start}, false);
        if (rc == E_OK)
            rc = split_segment(&sp, match, true);
        gap = match.end;
    }
    if (rc == E_OK && gap < n)
        rc = split_segment(&sp, (text_span){gap, n}, false);
    return rc == E_OK ? split_flush(&sp) : rc;
}

static int run_metaspace(const run_state *run, size_t k, const char *text, size_t n, bool first) {
    const pretok_step *step = &run->t->pretoks[k];
    text_buf *buf = &run->scratch->steps[k];
    const char *mark = step->replacement;
    size_t n_mark = strlen(mark);
    int rc = E_OK;
    buf->n = 0;
    bool marked = *text == ' ' || (n >= n_mark && memcmp(text, mark, n_mark) == 0);
    bool wanted = step->scheme == PREPEND_ALWAYS || (step->scheme == PREPEND_FIRST && first);
    if (wanted && !marked)
        rc = text_buf_add(buf, mark, n_mark);
    if (rc == E_OK)
        rc = text_buf_add_replaced(buf, text, n, " ", mark);
    if (rc != E_OK)
        return error_set(run->err, rc, "%s: %s", run->t->name, status_text(rc));
    if (!step->split)
        return run_step(run, k + 1, buf->data, buf->n, first);
    size_t start = 0;
    for (size_t i = 1; i < buf->n && rc == E_OK; i++) {
        if (buf->n - i < n_mark || memcmp(buf->data + i, mark, n_mark) != 0)
            continue;
        rc = run_step(run, k + 1, buf->data + start, i - start, first && start == 0);
        start = i;
    }
    if (rc == E_OK)
        rc = run_step(run, k + 1, buf->data + start, buf->n - start, first && start == 0);
    return rc;
}

static int run_prefix_space(const run_state *run, size_t k, const char *text, size_t n,
                            bool first) {
    text_buf *buf = &run->scratch->steps[k];
    if (*text == ' ')
        return run_step(run, k + 1, text, n, first);
    buf->n = 0;
    int rc = text_buf_add(buf, " ", 1);
    if (rc == E_OK)
        rc = text_buf_add(buf, text, n);
    if (rc != E_OK)
        return error_set(run->err, rc, "%s: %s", run->t->name, status_text(rc));
    return run_step(run, k + 1, buf->data, buf->n, first);
}

// Recursion goes one level per step, of which there are at most TOKENIZER_STEPS_MAX. A step's own
// buffer is in use while the steps behind it run.
static int run_step(const run_state *run, size_t k, const char *text, size_t n, bool first) {
    if (k == run->t->n_pretoks) {
        int rc = bpe_encode_word(run->t, run->scratch, text, n, run->out);
        return rc == E_OK ? rc : error_set(run->err, rc, "%s: %s", run->t->name, status_text(rc));
    }
    switch (run->t->pretoks[k].kind) {
    case PRETOK_SPLIT:
        return run_split(run, k, text, n, first);
    case PRETOK_METASPACE:
        return run_metaspace(run, k, text, n, first);
    default:
        return run_prefix_space(run, k, text, n, first);
    }
}

int pretok_run(const tokenizer *t, encode_scratch *scratch, const char *text, size_t n, bool first,
               token_ids *out, error *err) {
    run_state run = {t, scratch, out, err};
    return n ? run_step(&run, 0, text, n, first) : E_OK;
}

// --- loading -------------------------------------------------------------------------------------

static int new_step(tokenizer *t, pretok_kind kind, pretok_step **out, error *err) {
    if (t->bpe.byte_level)
        return error_set(err, E_UNSUPPORTED, "%s: pre_tokenizer: a step behind ByteLevel", t->name);
    if (t->n_pretoks == TOKENIZER_STEPS_MAX)
        return error_set(err, E_TOO_LARGE, "%s: pre_tokenizer: more than %d steps", t->name,
                         TOKENIZER_STEPS_MAX);
    *out = &t->pretoks[t->n_pretoks++];
    **out = (pretok_step){.kind = kind};
    return E_OK;
}

static int add_split(tokenizer *t, const char *pattern, bool literal, split_behavior behavior,
                     bool invert, error *err) {
    pretok_step *step = NULL;
    int rc = new_step(t, PRETOK_SPLIT, &step, err);
    if (rc != E_OK)
        return rc;
    step->behavior = behavior;
    step->invert = invert;
    rc = regex_compile(t->name, pattern, literal, &step->pattern, err);
    return rc == E_OK ? rc : error_prefix(err, "pre_tokenizer");
}

static int read_behavior(const tokenizer *t, const json *doc, const json_value *node,
                         const char *preset, split_behavior *out, error *err) {
    static const char *const names[] = {"Isolated", "Removed", "MergedWithPrevious",
                                        "MergedWithNext", "Contiguous"};
    const char *name = preset;
    int rc = json_opt_string(doc, node, "behavior", &name, err);
    if (rc != E_OK)
        return error_prefix(err, "pre_tokenizer");
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        if (strcmp(name, names[i]) == 0) {
            *out = (split_behavior)i;
            return E_OK;
        }
    }
    return error_set(err, E_UNSUPPORTED, "%s: pre_tokenizer: behavior '%.60s' is not supported",
                     t->name, name);
}

static int load_split(tokenizer *t, const json *doc, const json_value *node, error *err) {
    const json_value *pattern;
    const char *text = NULL;
    split_behavior behavior = SPLIT_ISOLATED;
    bool invert = false;
    int rc = json_need_object(doc, node, "pattern", &pattern, err);
    if (rc == E_OK)
        rc = json_opt_bool(doc, node, "invert", &invert, err);
    if (rc != E_OK)
        return error_prefix(err, "pre_tokenizer");
    rc = read_behavior(t, doc, node, "", &behavior, err);
    if (rc != E_OK)
        return rc;
    bool literal = json_as_string(json_get(pattern, "String"), &text);
    if (!literal && !json_as_string(json_get(pattern, "Regex"), &text))
        return error_set(err, E_INVALID, "%s: pre_tokenizer: Split needs a Regex or a String",
                         t->name);
    if (literal && !*text)
        return E_OK; // cuts nothing
    return add_split(t, text, literal, behavior, invert, err);
}

static int load_byte_level(tokenizer *t, const json *doc, const json_value *node, error *err) {
    bool prefix = true, use_regex = true;
    int rc = json_opt_bool(doc, node, "add_prefix_space", &prefix, err);
    if (rc == E_OK)
        rc = json_opt_bool(doc, node, "use_regex", &use_regex, err);
    if (rc != E_OK)
        return error_prefix(err, "pre_tokenizer");
    pretok_step *step = NULL;
    if (prefix)
        rc = new_step(t, PRETOK_PREFIX_SPACE, &step, err);
    if (rc == E_OK && use_regex)
        rc = add_split(t, gpt2_pattern, false, SPLIT_ISOLATED, false, err);
    t->bpe.byte_level = true;
    return rc;
}

static int load_metaspace(tokenizer *t, const json *doc, const json_value *node, error *err) {
    const char *replacement = METASPACE, *scheme = "always";
    bool split = true, legacy_prefix = true;
    int rc = json_opt_string(doc, node, "replacement", &replacement, err);
    if (rc == E_OK)
        rc = json_opt_bool(doc, node, "add_prefix_space", &legacy_prefix, err);
    if (rc == E_OK)
        rc = json_opt_string(doc, node, "prepend_scheme", &scheme, err);
    if (rc == E_OK)
        rc = json_opt_bool(doc, node, "split", &split, err);
    if (rc != E_OK)
        return error_prefix(err, "pre_tokenizer");
    static const char *const names[] = {"never", "first", "always"};
    size_t kind = 0;
    while (kind < 3 && strcmp(scheme, names[kind]) != 0)
        kind++;
    if (kind == 3 || !*replacement)
        return error_set(err, E_UNSUPPORTED,
                         "%s: pre_tokenizer: Metaspace with prepend_scheme "
                         "'%.20s' and replacement '%.20s' is not supported",
                         t->name, scheme, replacement);
    pretok_step *step = NULL;
    rc = new_step(t, PRETOK_METASPACE, &step, err);
    if (rc != E_OK)
        return rc;
    step->scheme = legacy_prefix ? (prepend_scheme)kind : PREPEND_NEVER;
    step->split = split;
    step->replacement = strdup(replacement);
    return step->replacement ? E_OK : error_set(err, E_NO_MEMORY, "%s: out of memory", t->name);
}

static int load_digits(tokenizer *t, const json *doc, const json_value *node, error *err) {
    bool individual = false;
    int rc = json_opt_bool(doc, node, "individual_digits", &individual, err);
    if (rc != E_OK)
        return error_prefix(err, "pre_tokenizer");
    return add_split(t, individual ? "\\p{N}" : "\\p{N}+", false, SPLIT_ISOLATED, false, err);
}

static int load_punctuation(tokenizer *t, const json *doc, const json_value *node, error *err) {
    split_behavior behavior;
    int rc = read_behavior(t, doc, node, "Isolated", &behavior, err);
    return rc == E_OK ? add_split(t, punctuation_pattern, false, behavior, false, err) : rc;
}

static int load_whitespace(tokenizer *t, const json *doc, const json_value *node, error *err) {
    (void)doc, (void)node;
    return add_split(t, word_pattern, false, SPLIT_REMOVED, true, err);
}

static int load_whitespace_split(tokenizer *t, const json *doc, const json_value *node,
                                 error *err) {
    (void)doc, (void)node;
    return add_split(t, "\\s", false, SPLIT_REMOVED, false, err);
}

static int load_step(tokenizer *t, const json *doc, const json_value *node, int depth, error *err) {
    static const struct {
        const char *type;
        int (*load)(tokenizer *t, const json *doc, const json_value *node, error *err);
    } types[] = {
        {"ByteLevel", load_byte_level},
        {"Split", load_split},
        {"Metaspace", load_metaspace},
        {"Digits", load_digits},
        {"Punctuation", load_punctuation},
        {"Whitespace", load_whitespace},
        {"WhitespaceSplit", load_whitespace_split},
    };
    const char *type = "";
    const json_value *list = NULL;
    int rc = json_need_string(doc, node, "type", &type, err);
    if (rc != E_OK)
        return error_prefix(err, "pre_tokenizer");
    if (strcmp(type, "Sequence") == 0 && depth < 4) {
        rc = json_need_array(doc, node, "pretokenizers", &list, err);
        for (const json_value *v = json_first(list); v && rc == E_OK; v = json_next(v))
            rc = load_step(t, doc, v, depth + 1, err);
        return rc;
    }
    for (size_t i = 0; i < sizeof types / sizeof *types; i++)
        if (strcmp(type, types[i].type) == 0)
            return types[i].load(t, doc, node, err);
    return error_set(err, E_UNSUPPORTED, "%s: pre_tokenizer: type '%.60s' is not supported",
                     t->name, type);
}

int pretok_load(tokenizer *t, const json *doc, error *err) {
    const json_value *node = json_get(json_root(doc), "pre_tokenizer");
    return json_is_null(node) ? E_OK : load_step(t, doc, node, 0, err);
}

void pretok_free(tokenizer *t) {
    for (size_t i = 0; i < t->n_pretoks; i++) {
        regex_free(t->pretoks[i].pattern);
        free(t->pretoks[i].replacement);
    }
}
