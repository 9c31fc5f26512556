// Ids to text: the decoder chain, as a whole and as a stream.
#include "engine/tokenizer_internal.h"
#include "engine/utf8.h"

#include <stdlib.h>
#include <string.h>

struct detok {
    const tokenizer *t; // borrowed
    bool skip_special;
    text_buf out;      // piece handed to the caller
    text_buf held;     // bytes that may still become part of a character or of a byte run
    size_t n_tokens;   // that contributed
    size_t n_stripped; // characters dropped by Strip
    bool strip_done;
};

// --- running -------------------------------------------------------------------------------------

// Moves what is settled from the held bytes to out; at the end everything is.
static int drain_bytes(detok *d, text_buf *out, bool at_end) {
    size_t from = 0, at = 0; // between them stands text that is valid and not yet moved
    int rc = E_OK;
    if (d->held.n == 0) // perhaps without memory yet
        return E_OK;
    while (at < d->held.n && rc == E_OK) {
        size_t length;
        uint32_t c;
        utf8_status status = utf8_next(d->held.data + at, d->held.n - at, &length, &c);
        if (status == UTF8_INCOMPLETE && !at_end)
            break;
        if (status != UTF8_VALID) {
            rc = text_buf_add(out, d->held.data + from, at - from);
            if (rc == E_OK)
                rc = text_buf_add(out, UTF8_REPLACEMENT, UTF8_REPLACEMENT_BYTES);
            from = at + length;
        }
        at += length;
    }
    if (rc == E_OK)
        rc = text_buf_add(out, d->held.data + from, at - from);
    d->held.n -= at;
    if (d->held.n > 0 && at > 0)
        memmove(d->held.data, d->held.data + at, d->held.n);
    return rc;
}

// A run of byte tokens is text when all of it is valid, else one U+FFFD per byte.
static int drain_run(detok *d, text_buf *out) {
    int rc = E_OK;
    if (d->held.n == 0)
        return E_OK;
    if (utf8_is_valid(d->held.data, d->held.n))
        rc = text_buf_add(out, d->held.data, d->held.n);
    else
        for (size_t i = 0; i < d->held.n && rc == E_OK; i++)
            rc = text_buf_add(out, UTF8_REPLACEMENT, UTF8_REPLACEMENT_BYTES);
    d->held.n = 0;
    return rc;
}

// Strip drops up to strip_max characters at the start of the whole text; from is where the text
// produced just now starts in out.
static void strip_start(detok *d, text_buf *out, size_t from) {
    const decode_plan *plan = &d->t->decode;
    if (!plan->strip || d->strip_done)
        return;
    size_t n_strip = strlen(plan->strip), at = from;
    while (out->n - at >= n_strip && d->n_stripped < plan->strip_max &&
           memcmp(out->data + at, plan->strip, n_strip) == 0) {
        at += n_strip;
        d->n_stripped++;
    }
    d->strip_done = at < out->n || d->n_stripped == plan->strip_max;
    if (at > from)
        memmove(out->data + from, out->data + at, out->n - at);
    out->n -= at - from;
}

static int decode_push(detok *d, int32_t id, text_buf *out) {
    const tokenizer *t = d->t;
    const decode_plan *plan = &t->decode;
    if (id < 0 || (size_t)id >= t->n_tokens || !t->tokens[id].flags)
        return E_OK;
    const token *tok = &t->tokens[id];
    if (d->skip_special && (tok->flags & TOKEN_SPECIAL))
        return E_OK;
    size_t from = out->n;
    bool first = d->n_tokens++ == 0;
    int rc = E_OK;
    if (plan->byte_level) {
        rc = text_buf_add(&d->held, tok->piece, tok->n_piece);
        if (rc == E_OK)
            rc = drain_bytes(d, out, false);
    } else if (tok->flags & TOKEN_BYTE) {
        rc = text_buf_add(&d->held, tok->piece, tok->n_piece);
    } else {
        rc = drain_run(d, out);
        if (rc == E_OK && plan->join_space && !first)
            rc = text_buf_add(out, " ", 1);
        if (rc == E_OK && plan->first_drop && first)
            rc = text_buf_add_replaced(out, tok->text, tok->n_text, plan->first_drop, "");
        else if (rc == E_OK)
            rc = text_buf_add(out, tok->piece, tok->n_piece);
    }
    strip_start(d, out, from);
    return rc;
}

static int decode_end(detok *d, text_buf *out) {
    size_t from = out->n;
    int rc = d->t->decode.byte_level ? drain_bytes(d, out, true) : drain_run(d, out);
    strip_start(d, out, from);
    d->n_tokens = 0;
    d->n_stripped = 0;
    d->strip_done = false;
    return rc;
}

int tokenizer_decode(const tokenizer *t, const int32_t *ids, size_t n_ids, bool skip_special,
                     char **text, size_t *n, error *err) {
    detok d = {.t = t, .skip_special = skip_special};
    text_buf out = {0};
    int rc = text_buf_reserve(&out, 1);
    for (size_t i = 0; i < n_ids && rc == E_OK; i++)
        rc = decode_push(&d, ids[i], &out);
    if (rc == E_OK)
        rc = decode_end(&d, &out);
    if (rc == E_OK)
        rc = text_buf_reserve(&out, 1);
    text_buf_free(&d.held);
    if (rc != E_OK) {
        text_buf_free(&out);
        return error_set(err, rc, "%s: %s", t->name, status_text(rc));
    }
    out.data[out.n] = '\0';
    *text = out.data;
    *n = out.n;
    return E_OK;
}

int detok_open(const tokenizer *t, bool skip_special, detok **out) {
    detok *d = calloc(1, sizeof *d);
    if (!d)
        return E_NO_MEMORY;
    d->t = t;
    d->skip_special = skip_special;
    *out = d;
    return E_OK;
}

void detok_close(detok *d) {
    if (!d)
        return;
    text_buf_free(&d->out);
    text_buf_free(&d->held);
    free(d);
}

static int hand_out(detok *d, int rc, const char **text, size_t *n) {
    if (rc != E_OK)
        return rc;
    *text = d->out.n ? d->out.data : "";
    *n = d->out.n;
    return E_OK;
}

int detok_push(detok *d, int32_t id, const char **text, size_t *n) {
    d->out.n = 0;
    return hand_out(d, decode_push(d, id, &d->out), text, n);
}

int detok_flush(detok *d, const char **text, size_t *n) {
    d->out.n = 0;
    return hand_out(d, decode_end(d, &d->out), text, n);
}

// --- loading -------------------------------------------------------------------------------------

typedef enum chain_stage { STAGE_TOKENS, STAGE_BYTE_LEVEL, STAGE_RUNS, STAGE_FUSED } chain_stage;

typedef struct chain_loader {
    tokenizer *t;
    const json *doc;
    chain_stage stage;
    const char *patterns[TOKENIZER_STEPS_MAX], *contents[TOKENIZER_STEPS_MAX]; // of the Replaces
    size_t n_replaces;
    error *err;
} chain_loader;

static int out_of_order(const chain_loader *chain, const char *type) {
    return error_set(chain->err, E_UNSUPPORTED, "%s: decoder: %s at this place of the chain",
                     chain->t->name, type);
}

static int add_replace(chain_loader *chain, const char *pattern, const char *content) {
    if (chain->stage != STAGE_TOKENS || chain->n_replaces == TOKENIZER_STEPS_MAX)
        return out_of_order(chain, "Replace");
    chain->patterns[chain->n_replaces] = pattern;
    chain->contents[chain->n_replaces++] = content;
    return E_OK;
}

static int load_replace(chain_loader *chain, const json_value *node) {
    const json_value *pattern_node = json_get(node, "pattern");
    const char *pattern, *content;
    int rc = json_need_string(chain->doc, node, "content", &content, chain->err);
    if (rc != E_OK)
        return error_prefix(chain->err, "decoder");
    if (!json_as_string(json_get(pattern_node, "String"), &pattern) || !*pattern)
        return error_set(chain->err, E_UNSUPPORTED,
                         "%s: decoder: Replace is supported for a String pattern only",
                         chain->t->name);
    return add_replace(chain, pattern, content);
}

static int load_byte_level(chain_loader *chain, const json_value *node) {
    (void)node;
    if (chain->stage != STAGE_TOKENS)
        return out_of_order(chain, "ByteLevel");
    chain->stage = STAGE_BYTE_LEVEL;
    chain->t->decode.byte_level = true;
    return E_OK;
}

static int load_byte_fallback(chain_loader *chain, const json_value *node) {
    (void)node;
    if (chain->stage != STAGE_TOKENS || chain->t->decode.first_drop)
        return out_of_order(chain, "ByteFallback");
    chain->stage = STAGE_RUNS;
    chain->t->decode.byte_fallback = true;
    return E_OK;
}

static int load_fuse(chain_loader *chain, const json_value *node) {
    (void)node;
    chain->stage = STAGE_FUSED;
    return E_OK;
}

static int load_strip(chain_loader *chain, const json_value *node) {
    decode_plan *plan = &chain->t->decode;
    const char *content;
    int64_t start = 0, stop = 0;
    int rc = json_need_string(chain->doc, node, "content", &content, chain->err);
    if (rc == E_OK)
        rc = json_opt_int(chain->doc, node, "start", 0, 1 << 20, &start, chain->err);
    if (rc == E_OK)
        rc = json_opt_int(chain->doc, node, "stop", 0, 1 << 20, &stop, chain->err);
    if (rc != E_OK)
        return error_prefix(chain->err, "decoder");
    if (chain->stage != STAGE_FUSED || plan->strip || stop != 0 || !*content)
        return out_of_order(chain, "Strip, other than at the start of the fused text,");
    plan->strip = strdup(content);
    plan->strip_max = (size_t)start;
    return plan->strip ? E_OK
                       : error_set(chain->err, E_NO_MEMORY, "%s: out of memory", chain->t->name);
}

static int load_metaspace(chain_loader *chain, const json_value *node) {
    const char *mark = METASPACE, *scheme = "always";
    bool legacy_prefix = true;
    int rc = json_opt_string(chain->doc, node, "replacement", &mark, chain->err);
    if (rc == E_OK)
        rc = json_opt_string(chain->doc, node, "prepend_scheme", &scheme, chain->err);
    if (rc == E_OK)
        rc = json_opt_bool(chain->doc, node, "add_prefix_space", &legacy_prefix, chain->err);
    if (rc != E_OK)
        return error_prefix(chain->err, "decoder");
    if (chain->stage != STAGE_TOKENS || chain->n_replaces > 0 || !*mark)
        return out_of_order(chain, "Metaspace");
    if (legacy_prefix && strcmp(scheme, "never") != 0) {
        chain->t->decode.first_drop = strdup(mark);
        if (!chain->t->decode.first_drop)
            return error_set(chain->err, E_NO_MEMORY, "%s: out of memory", chain->t->name);
    }
    return add_replace(chain, mark, " ");
}

static int load_decoder(chain_loader *chain, const json_value *node, int depth) {
    static const struct {
        const char *type;
        int (*load)(chain_loader *chain, const json_value *node);
    } types[] = {
        {"ByteLevel", load_byte_level},
        {"Replace", load_replace},
        {"ByteFallback", load_byte_fallback},
        {"Fuse", load_fuse},
        {"Strip", load_strip},
        {"Metaspace", load_metaspace},
    };
    const char *type = "";
    const json_value *list = NULL;
    int rc = json_need_string(chain->doc, node, "type", &type, chain->err);
    if (rc != E_OK)
        return error_prefix(chain->err, "decoder");
    if (strcmp(type, "Sequence") == 0 && depth < 4) {
        rc = json_need_array(chain->doc, node, "decoders", &list, chain->err);
        for (const json_value *v = json_first(list); v && rc == E_OK; v = json_next(v))
            rc = load_decoder(chain, v, depth + 1);
        return rc;
    }
    for (size_t i = 0; i < sizeof types / sizeof *types; i++)
        if (strcmp(type, types[i].type) == 0)
            return types[i].load(chain, node);
    return error_set(chain->err, E_UNSUPPORTED, "%s: decoder: type '%.60s' is not supported",
                     chain->t->name, type);
}

static int hex_digit(char c) {
    if (c >= '0' && c <= '9')
        return c - '0';
    c |= 32;
    return c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

// The byte of a <0xXX> token, or -1.
static int fallback_byte(const char *text, size_t n) {
    if (n != 6 || memcmp(text, "<0x", 3) != 0 || text[5] != '>')
        return -1;
    int high = hex_digit(text[3]), low = hex_digit(text[4]);
    return high < 0 || low < 0 ? -1 : high << 4 | low;
}

// In the byte-level alphabet a token is the bytes its characters stand for; a token with another
// character in it is its own text.
static int add_level_bytes(text_buf *out, const char *text, size_t n) {
    size_t before = out->n;
    int rc = text_buf_reserve(out, n);
    for (size_t i = 0, length; i < n && rc == E_OK; i += length) {
        uint32_t c = 0;
        utf8_next(text + i, n - i, &length, &c);
        int byte = byte_of_level_char(c);
        if (byte < 0) {
            out->n = before;
            return text_buf_add(out, text, n);
        }
        out->data[out->n++] = (char)byte;
    }
    return rc;
}

static int add_piece(const chain_loader *chain, token *tok, text_buf *out, text_buf *a,
                     text_buf *b) {
    const decode_plan *plan = &chain->t->decode;
    size_t before = out->n;
    a->n = 0;
    int rc = text_buf_add(a, tok->text, tok->n_text);
    for (size_t i = 0; i < chain->n_replaces && rc == E_OK; i++) {
        b->n = 0;
        rc = text_buf_add_replaced(b, a->data, a->n, chain->patterns[i], chain->contents[i]);
        text_buf swap = *a;
        *a = *b;
        *b = swap;
    }
    if (rc != E_OK)
        return rc;
    int byte = plan->byte_fallback ? fallback_byte(a->data, a->n) : -1;
    if (byte >= 0) {
        char c = (char)byte;
        tok->flags |= TOKEN_BYTE;
        rc = text_buf_add(out, &c, 1);
    } else if (plan->byte_level) {
        rc = add_level_bytes(out, a->data, a->n);
    } else {
        rc = text_buf_add(out, a->data, a->n);
    }
    if (out->n - before > UINT32_MAX)
        return E_TOO_LARGE;
    tok->n_piece = (uint32_t)(out->n - before);
    return rc;
}

static int load_pieces(const chain_loader *chain) {
    tokenizer *t = chain->t;
    text_buf pieces = {0}, a = {0}, b = {0};
    int rc = E_OK;
    for (size_t id = 0; id < t->n_tokens && rc == E_OK; id++)
        if (t->tokens[id].flags)
            rc = add_piece(chain, &t->tokens[id], &pieces, &a, &b);
    char *arena = rc == E_OK ? tokenizer_arena(t, pieces.n + 1) : NULL;
    if (arena && pieces.n > 0)
        memcpy(arena, pieces.data, pieces.n);
    for (size_t id = 0; arena && id < t->n_tokens; id++) {
        t->tokens[id].piece = arena;
        arena += t->tokens[id].n_piece;
    }
    text_buf_free(&pieces);
    text_buf_free(&a);
    text_buf_free(&b);
    return rc == E_OK && !arena ? E_NO_MEMORY : rc;
}

int decode_load(tokenizer *t, const json *doc, error *err) {
    const json_value *node = json_get(json_root(doc), "decoder");
    chain_loader chain = {.t = t, .doc = doc, .err = err};
    int rc = E_OK;
    if (json_is_null(node))
        t->decode.join_space = true;
    else
        rc = load_decoder(&chain, node, 0);
    if (rc != E_OK)
        return rc;
    rc = load_pieces(&chain);
    return rc == E_OK ? rc : error_set(err, rc, "%s: %s", t->name, status_text(rc));
}
