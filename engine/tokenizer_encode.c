// The whole way from text to ids, and the post-processor's template.
#include "engine/tokenizer_internal.h"
#include "engine/utf8.h"

#include <stdlib.h>
#include <string.h>

typedef struct encode_run {
    const tokenizer *t;
    encode_scratch scratch;
    text_buf text;      // the parts, joined and repaired; unused for one valid part
    text_span *trusted; // (n_trusted) spans of the text in which special tokens count
    size_t n_trusted;
    text_buf joined;       // normalized parts of a stretch
    text_span *normalized; // (n_trusted) trusted spans of the normalized stretch
    token_ids *out;
    error *err;
} encode_run;

static int fail(const encode_run *run, int rc) {
    return error_set(run->err, rc, "%s: %s", run->t->name, status_text(rc));
}

// Joins the parts; *text is the result.
static int join_parts(encode_run *run, const tokenizer_part *parts, size_t n_parts,
                      const char **text, size_t *n) {
    size_t total = 0;
    for (size_t i = 0; i < n_parts; i++) {
        if (parts[i].n_bytes > TOKENIZER_TEXT_MAX || total > TOKENIZER_TEXT_MAX - parts[i].n_bytes)
            return error_set(run->err, E_TOO_LARGE, "a text of more than %zu bytes",
                             TOKENIZER_TEXT_MAX);
        total += parts[i].n_bytes;
    }
    run->trusted = malloc(2 * (n_parts + 1) * sizeof *run->trusted);
    if (!run->trusted)
        return fail(run, E_NO_MEMORY);
    run->normalized = run->trusted + n_parts + 1;
    bool as_is = n_parts == 1 && utf8_is_valid(parts[0].text, parts[0].n_bytes);
    size_t end = 0;
    for (size_t i = 0; i < n_parts; i++) {
        size_t start = end;
        if (as_is) {
            end += parts[i].n_bytes;
        } else if (parts[i].n_bytes > 0) {
            size_t n_part = utf8_repaired_bytes(parts[i].text, parts[i].n_bytes);
            if (text_buf_reserve(&run->text, n_part) != E_OK)
                return fail(run, E_NO_MEMORY);
            utf8_repair(parts[i].text, parts[i].n_bytes, run->text.data + start);
            end = run->text.n += n_part;
        }
        if (!parts[i].parse_special || start == end)
            continue;
        if (run->n_trusted > 0 && run->trusted[run->n_trusted - 1].end == start)
            run->trusted[run->n_trusted - 1].end = end;
        else
            run->trusted[run->n_trusted++] = (text_span){start, end};
    }
    *text = as_is ? parts[0].text : run->text.data;
    *n = end;
    return E_OK;
}

static int normalize_part(encode_run *run, const char *text, text_span part, size_t start) {
    encode_scratch *scratch = &run->scratch;
    int rc =
        norm_run(run->t, scratch, text + part.start, part.end - part.start, part.start == start);
    return rc == E_OK ? text_buf_add(&run->joined, scratch->normalized.data, scratch->normalized.n)
                      : rc;
}

// Normalizes a stretch and finds its trusted spans behind that: each part is normalized by itself,
// and where the parts joined are not the whole (a mark of one part combines with a letter of
// another) nothing is trusted.
static int normalize_stretch(encode_run *run, const char *text, text_span stretch, size_t *k,
                             size_t *n_spans) {
    encode_scratch *scratch = &run->scratch;
    size_t at = stretch.start;
    int rc = E_OK;
    *n_spans = 0;
    run->joined.n = 0;
    while (*k < run->n_trusted && run->trusted[*k].end <= stretch.start)
        ++*k;
    for (size_t i = *k; run->t->tries[1].special && rc == E_OK && i < run->n_trusted &&
                        run->trusted[i].start < stretch.end;
         i++) {
        text_span part = run->trusted[i];
        part.start = part.start < stretch.start ? stretch.start : part.start;
        part.end = part.end > stretch.end ? stretch.end : part.end;
        if (at < part.start)
            rc = normalize_part(run, text, (text_span){at, part.start}, stretch.start);
        size_t n_before = run->joined.n;
        if (rc == E_OK)
            rc = normalize_part(run, text, part, stretch.start);
        run->normalized[(*n_spans)++] = (text_span){n_before, run->joined.n};
        at = part.end;
    }
    if (rc == E_OK && *n_spans > 0 && at < stretch.end)
        rc = normalize_part(run, text, (text_span){at, stretch.end}, stretch.start);
    if (rc == E_OK)
        rc = norm_run(run->t, scratch, text + stretch.start, stretch.end - stretch.start, true);
    if (rc == E_OK && *n_spans > 0 &&
        (run->joined.n != scratch->normalized.n ||
         memcmp(run->joined.data, scratch->normalized.data, run->joined.n) != 0))
        *n_spans = 0;
    return rc;
}

// A stretch of raw text in which no token that matches raw text is left.
static int encode_stretch(encode_run *run, const char *text, text_span stretch, size_t *k) {
    const tokenizer *t = run->t;
    if (stretch.start == stretch.end)
        return E_OK;
    bool first = stretch.start == 0;
    if (t->n_norms == 0 && !t->tries[1].any)
        return pretok_run(t, &run->scratch, text + stretch.start, stretch.end - stretch.start,
                          first, run->out, run->err);
    size_t n_spans;
    int rc = normalize_stretch(run, text, stretch, k, &n_spans);
    if (rc != E_OK)
        return fail(run, rc);
    const char *normal = run->scratch.normalized.data;
    size_t n = run->scratch.normalized.n, from = 0;
    added_cursor cursor = {.trusted = run->normalized, .n_trusted = n_spans};
    for (;;) {
        text_span match = {n, n};
        const added_token *added = added_find(t, &t->tries[1], normal, n, &cursor, &match);
        rc = pretok_run(t, &run->scratch, normal + from, match.start - from, first && from == 0,
                        run->out, run->err);
        if (rc != E_OK || !added)
            return rc;
        if (token_ids_push(run->out, added->id) != E_OK)
            return fail(run, E_NO_MEMORY);
        from = match.end;
    }
}

static int encode_text(encode_run *run, const char *text, size_t n) {
    const tokenizer *t = run->t;
    added_cursor cursor = {.trusted = run->trusted, .n_trusted = run->n_trusted};
    size_t from = 0, k = 0;
    for (;;) {
        text_span match = {n, n};
        const added_token *added = added_find(t, &t->tries[0], text, n, &cursor, &match);
        int rc = encode_stretch(run, text, (text_span){from, match.start}, &k);
        if (rc != E_OK || !added)
            return rc;
        if (token_ids_push(run->out, added->id) != E_OK)
            return fail(run, E_NO_MEMORY);
        from = match.end;
    }
}

static int push_all(encode_run *run, const int32_t *ids, size_t n) {
    for (size_t i = 0; i < n; i++)
        if (token_ids_push(run->out, ids[i]) != E_OK)
            return fail(run, E_NO_MEMORY);
    return E_OK;
}

int tokenizer_encode_parts(const tokenizer *t, const tokenizer_part *parts, size_t n_parts,
                           bool add_special, token_ids *out, error *err) {
    encode_run run = {.t = t, .out = out, .err = err};
    size_t n_before = out->n, n = 0;
    const char *text = NULL;
    int rc = join_parts(&run, parts, n_parts, &text, &n);
    if (rc == E_OK && add_special)
        rc = push_all(&run, t->prefix_ids, t->n_prefix);
    if (rc == E_OK && n > 0)
        rc = encode_text(&run, text, n);
    if (rc == E_OK && add_special)
        rc = push_all(&run, t->suffix_ids, t->n_suffix);
    if (rc != E_OK)
        out->n = n_before;
    encode_scratch_free(&run.scratch);
    text_buf_free(&run.text);
    text_buf_free(&run.joined);
    free(run.trusted);
    return rc;
}

int tokenizer_encode(const tokenizer *t, const char *text, size_t n_bytes, bool add_special,
                     bool parse_special, token_ids *out, error *err) {
    tokenizer_part part = {text, n_bytes, parse_special};
    return tokenizer_encode_parts(t, &part, 1, add_special, out, err);
}

// --- post-processor ------------------------------------------------------------------------------

typedef struct template_ids {
    token_ids before, after;
} template_ids;

static int add_template_token(const tokenizer *t, const json *doc, const json_value *node,
                              const json_value *item, token_ids *list, error *err) {
    const char *name = "";
    const json_value *table = NULL, *ids = NULL;
    int rc = json_need_string(doc, item, "id", &name, err);
    if (rc == E_OK)
        rc = json_need_object(doc, node, "special_tokens", &table, err);
    if (rc == E_OK)
        rc = json_need_array(doc, json_get(table, name), "ids", &ids, err);
    if (rc != E_OK)
        return error_prefix(err, "post_processor");
    for (const json_value *v = json_first(ids); v; v = json_next(v)) {
        int64_t id;
        if (!json_as_int(v, &id) || id < 0 || (size_t)id >= t->n_tokens)
            return error_set(err, E_INVALID, "%s: post_processor: '%.60s' has no valid id", t->name,
                             name);
        if (token_ids_push(list, (int32_t)id) != E_OK)
            return error_set(err, E_NO_MEMORY, "%s: out of memory", t->name);
    }
    return E_OK;
}

static int load_template(const tokenizer *t, const json *doc, const json_value *node,
                         template_ids *ids, error *err) {
    const json_value *single;
    bool seen = false;
    int rc = json_need_array(doc, node, "single", &single, err);
    for (const json_value *v = rc == E_OK ? json_first(single) : NULL; v && rc == E_OK;
         v = json_next(v)) {
        const json_value *item = json_get(v, "SpecialToken");
        if (item)
            rc = add_template_token(t, doc, node, item, seen ? &ids->after : &ids->before, err);
        else if (json_get(v, "Sequence") && !seen)
            seen = true;
        else
            rc = error_set(err, E_UNSUPPORTED,
                           "%s: post_processor: a template that is not special "
                           "tokens around one Sequence",
                           t->name);
    }
    if (rc == E_OK && !seen)
        rc = error_set(err, E_INVALID, "%s: post_processor: a template without Sequence", t->name);
    return rc;
}

static int load_postproc(const tokenizer *t, const json *doc, const json_value *node, int depth,
                         template_ids *ids, error *err) {
    const char *type = "";
    const json_value *list = NULL;
    int rc = json_need_string(doc, node, "type", &type, err);
    if (rc != E_OK)
        return error_prefix(err, "post_processor");
    if (strcmp(type, "ByteLevel") == 0)
        return E_OK; // changes offsets only
    if (strcmp(type, "TemplateProcessing") == 0) {
        if (ids->before.n || ids->after.n)
            return error_set(err, E_UNSUPPORTED, "%s: post_processor: two templates", t->name);
        return load_template(t, doc, node, ids, err);
    }
    if (strcmp(type, "Sequence") == 0 && depth < 4) {
        rc = json_need_array(doc, node, "processors", &list, err);
        for (const json_value *v = json_first(list); v && rc == E_OK; v = json_next(v))
            rc = load_postproc(t, doc, v, depth + 1, ids, err);
        return rc;
    }
    return error_set(err, E_UNSUPPORTED, "%s: post_processor: type '%.60s' is not supported",
                     t->name, type);
}

int postproc_load(tokenizer *t, const json *doc, error *err) {
    const json_value *node = json_get(json_root(doc), "post_processor");
    template_ids ids = {0};
    int rc = json_is_null(node) ? E_OK : load_postproc(t, doc, node, 0, &ids, err);
    t->prefix_ids = ids.before.ids; // freed with the tokenizer, also on failure
    t->n_prefix = ids.before.n;
    t->suffix_ids = ids.after.ids;
    t->n_suffix = ids.after.n;
    return rc;
}
