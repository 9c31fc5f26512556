// The BPE model: merges of tokenizer.json, applied to one word at a time.
#include "engine/tokenizer_internal.h"
#include "engine/utf8.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define SHORT_WORD 48 // symbols up to which a scan for the best pair beats the heap

// The byte-level alphabet of GPT-2: printable Latin-1 stands for itself, the other 68 bytes are
// U+0100 and on, in order.
static bool stands_for_itself(uint32_t byte) {
    return (byte >= 0x21 && byte <= 0x7E) || (byte >= 0xA1 && byte <= 0xAC) ||
           (byte >= 0xAE && byte <= 0xFF);
}

uint32_t level_char_of_byte(uint8_t byte) {
    if (stands_for_itself(byte))
        return byte;
    if (byte <= 0x20)
        return 0x100u + byte;
    return byte == 0xAD ? 0x143 : 0x121u + (byte - 0x7Fu);
}

int byte_of_level_char(uint32_t c) {
    if (c < 0x100)
        return stands_for_itself(c) ? (int)c : -1;
    if (c <= 0x120)
        return (int)(c - 0x100);
    if (c <= 0x142)
        return (int)(c - 0x121 + 0x7F);
    return c == 0x143 ? 0xAD : -1;
}

static size_t merge_slot_of(const bpe_model *bpe, uint64_t pair) {
    uint64_t hash = pair * 0x9E3779B97F4A7C15u;
    size_t at = (size_t)(hash >> 32 ^ hash) & (bpe->merge_size - 1);
    while (bpe->merges[at].pair != pair && bpe->merges[at].pair != UINT64_MAX)
        at = (at + 1) & (bpe->merge_size - 1);
    return at;
}

static const merge_slot *find_merge(const bpe_model *bpe, int32_t left, int32_t right) {
    uint64_t pair = (uint64_t)(uint32_t)left << 32 | (uint32_t)right;
    const merge_slot *slot = &bpe->merges[merge_slot_of(bpe, pair)];
    return slot->pair == pair ? slot : NULL;
}

// --- encoding ------------------------------------------------------------------------------------

static int add_symbol(encode_scratch *s, size_t *n, int32_t id) {
    if (*n == s->symbol_capacity) {
        size_t capacity = s->symbol_capacity ? 2 * s->symbol_capacity : 256;
        bpe_symbol *symbols = realloc(s->symbols, capacity * sizeof *symbols);
        if (!symbols)
            return E_NO_MEMORY;
        s->symbols = symbols;
        s->symbol_capacity = capacity;
    }
    s->symbols[*n] = (bpe_symbol){.id = id, .prev = (int32_t)*n - 1, .next = (int32_t)*n + 1};
    ++*n;
    return E_OK;
}

static bool has_all_bytes(const bpe_model *bpe, const char *text, size_t n) {
    for (size_t i = 0; i < n; i++)
        if (bpe->byte_ids[(uint8_t)text[i]] < 0)
            return false;
    return true;
}

// The token of one character of the word before any merge, or -1.
static int32_t initial_id(const tokenizer *t, const char *text, size_t n) {
    const bpe_model *bpe = &t->bpe;
    if (bpe->byte_level)
        return bpe->byte_ids[(uint8_t)*text];
    int32_t id = id_map_find(&bpe->vocab, text, n);
    return id >= 0 && (t->tokens[id].flags & TOKEN_SPECIAL) ? -1 : id;
}

static int start_symbols(const tokenizer *t, encode_scratch *s, const char *word, size_t n,
                         size_t *n_symbols) {
    const bpe_model *bpe = &t->bpe;
    bool unk_open = false; // the last symbol is an unk that the next unknown character joins
    int rc = E_OK;
    *n_symbols = 0;
    for (size_t i = 0, length = 1; i < n && rc == E_OK; i += length) {
        uint32_t c;
        if (!bpe->byte_level)
            utf8_next(word + i, n - i, &length, &c);
        int32_t id = initial_id(t, word + i, length);
        if (id >= 0) {
            rc = add_symbol(s, n_symbols, id);
            unk_open = false;
        } else if (bpe->byte_fallback && !bpe->byte_level && has_all_bytes(bpe, word + i, length)) {
            for (size_t k = 0; k < length && rc == E_OK; k++)
                rc = add_symbol(s, n_symbols, bpe->byte_ids[(uint8_t)word[i + k]]);
            unk_open = false;
        } else if (bpe->unk_id >= 0) {
            if (!unk_open || !bpe->fuse_unk)
                rc = add_symbol(s, n_symbols, bpe->unk_id);
            unk_open = true;
        }
    }
    if (*n_symbols > 0)
        s->symbols[*n_symbols - 1].next = -1;
    return rc;
}

// Merges the leftmost pair of lowest rank until there is none; returns the symbols left, whose ids
// then stand at the front.
static size_t merge_short(const bpe_model *bpe, bpe_symbol *symbols, size_t n) {
    uint32_t ranks[SHORT_WORD];
    int32_t ids[SHORT_WORD];
    for (size_t i = 0; i + 1 < n; i++) {
        const merge_slot *merge = find_merge(bpe, symbols[i].id, symbols[i + 1].id);
        ranks[i] = merge ? merge->rank : UINT32_MAX;
        ids[i] = merge ? merge->id : -1;
    }
    while (n > 1) {
        size_t best = 0;
        for (size_t i = 1; i + 1 < n; i++)
            if (ranks[i] < ranks[best])
                best = i;
        if (ranks[best] == UINT32_MAX)
            break;
        symbols[best].id = ids[best];
        n--;
        for (size_t i = best + 1; i < n; i++) {
            symbols[i].id = symbols[i + 1].id;
            ranks[i - 1] = ranks[i];
            ids[i - 1] = ids[i];
        }
        for (size_t i = best > 0 ? best - 1 : 0; i <= best && i + 1 < n; i++) {
            const merge_slot *merge = find_merge(bpe, symbols[i].id, symbols[i + 1].id);
            ranks[i] = merge ? merge->rank : UINT32_MAX;
            ids[i] = merge ? merge->id : -1;
        }
    }
    return n;
}

static int heap_push(encode_scratch *s, uint64_t entry) {
    if (s->n_heap == s->heap_capacity) {
        size_t capacity = s->heap_capacity ? 2 * s->heap_capacity : 256;
        uint64_t *heap = realloc(s->heap, capacity * sizeof *heap);
        if (!heap)
            return E_NO_MEMORY;
        s->heap = heap;
        s->heap_capacity = capacity;
    }
    size_t at = s->n_heap++;
    for (; at > 0 && s->heap[(at - 1) / 2] > entry; at = (at - 1) / 2)
        s->heap[at] = s->heap[(at - 1) / 2];
    s->heap[at] = entry;
    return E_OK;
}

static uint64_t heap_pop(encode_scratch *s) {
    uint64_t top = s->heap[0], last = s->heap[--s->n_heap];
    size_t at = 0;
    for (size_t child; (child = 2 * at + 1) < s->n_heap; at = child) {
        if (child + 1 < s->n_heap && s->heap[child + 1] < s->heap[child])
            child++;
        if (s->heap[child] >= last)
            break;
        s->heap[at] = s->heap[child];
    }
    s->heap[at] = last;
    return top;
}

static int push_pair(const bpe_model *bpe, encode_scratch *s, int32_t left) {
    if (left < 0 || s->symbols[left].next < 0)
        return E_OK;
    const merge_slot *merge =
        find_merge(bpe, s->symbols[left].id, s->symbols[s->symbols[left].next].id);
    return merge ? heap_push(s, (uint64_t)merge->rank << 32 | (uint32_t)left) : E_OK;
}

// The same result as merge_short in n log n. A heap entry is out of date when the pair at its
// position no longer has its rank.
static int merge_long(const bpe_model *bpe, encode_scratch *s, size_t n) {
    bpe_symbol *symbols = s->symbols;
    int rc = E_OK;
    s->n_heap = 0;
    for (size_t i = 0; i + 1 < n && rc == E_OK; i++)
        rc = push_pair(bpe, s, (int32_t)i);
    while (s->n_heap > 0 && rc == E_OK) {
        uint64_t entry = heap_pop(s);
        int32_t left = (int32_t)(uint32_t)entry, right = symbols[left].next;
        if (symbols[left].id < 0 || right < 0)
            continue;
        const merge_slot *merge = find_merge(bpe, symbols[left].id, symbols[right].id);
        if (!merge || merge->rank != entry >> 32)
            continue;
        symbols[left].id = merge->id;
        symbols[left].next = symbols[right].next;
        symbols[right].id = -1;
        if (symbols[right].next >= 0)
            symbols[symbols[right].next].prev = left;
        rc = push_pair(bpe, s, symbols[left].prev);
        if (rc == E_OK)
            rc = push_pair(bpe, s, left);
    }
    return rc;
}

static int encode_by_merges(const tokenizer *t, encode_scratch *s, const char *word, size_t n,
                            token_ids *out) {
    size_t n_symbols;
    int rc = start_symbols(t, s, word, n, &n_symbols);
    if (rc != E_OK || n_symbols == 0)
        return rc;
    if (n_symbols <= SHORT_WORD) {
        n_symbols = merge_short(&t->bpe, s->symbols, n_symbols);
        for (size_t i = 0; i < n_symbols && rc == E_OK; i++)
            rc = token_ids_push(out, s->symbols[i].id);
        return rc;
    }
    rc = merge_long(&t->bpe, s, n_symbols);
    for (int32_t i = 0; i >= 0 && rc == E_OK; i = s->symbols[i].next)
        rc = token_ids_push(out, s->symbols[i].id);
    return rc;
}

static int encode_piece(const tokenizer *t, encode_scratch *s, const char *word, size_t n,
                        token_ids *out) {
    int32_t whole = id_map_find(&t->bpe.words, word, n);
    return whole >= 0 ? token_ids_push(out, whole) : encode_by_merges(t, s, word, n, out);
}

int bpe_encode_word(const tokenizer *t, encode_scratch *s, const char *word, size_t n,
                    token_ids *out) {
    size_t n_mark = strlen(METASPACE), start = 0;
    if (n > INT32_MAX)
        return E_TOO_LARGE;
    if (!t->bpe.cut_at_metaspace)
        return n ? encode_piece(t, s, word, n, out) : E_OK;
    int rc = E_OK;
    bool in_mark = true;
    for (size_t i = 0; i < n && rc == E_OK;) {
        bool mark = n - i >= n_mark && memcmp(word + i, METASPACE, n_mark) == 0;
        if (mark && !in_mark) {
            rc = encode_piece(t, s, word + start, i - start, out);
            start = i;
        }
        in_mark = mark;
        i += mark ? n_mark : 1;
    }
    return rc == E_OK && n > start ? encode_piece(t, s, word + start, n - start, out) : rc;
}

// --- loading -------------------------------------------------------------------------------------

static int unsupported_option(const tokenizer *t, const char *key, error *err) {
    return error_set(err, E_UNSUPPORTED, "%s: model: %s is not supported", t->name, key);
}

static int load_options(tokenizer *t, const json *doc, const json_value *model, error *err) {
    bpe_model *bpe = &t->bpe;
    const char *type = "BPE", *prefix = "", *suffix = "", *unk = NULL;
    double dropout = 0;
    int rc = json_opt_string(doc, model, "type", &type, err);
    if (rc == E_OK && strcmp(type, "BPE") != 0)
        return error_set(err, E_UNSUPPORTED, "%s: model: type '%.60s' is not supported, only BPE",
                         t->name, type);
    if (rc == E_OK)
        rc = json_opt_string(doc, model, "continuing_subword_prefix", &prefix, err);
    if (rc == E_OK)
        rc = json_opt_string(doc, model, "end_of_word_suffix", &suffix, err);
    if (rc == E_OK)
        rc = json_opt_double(doc, model, "dropout", 0, 1, &dropout, err);
    if (rc == E_OK)
        rc = json_opt_bool(doc, model, "byte_fallback", &bpe->byte_fallback, err);
    if (rc == E_OK)
        rc = json_opt_bool(doc, model, "fuse_unk", &bpe->fuse_unk, err);
    if (rc == E_OK)
        rc = json_opt_bool(doc, model, "ignore_merges", &bpe->ignore_merges, err);
    if (rc == E_OK)
        rc = json_opt_string(doc, model, "unk_token", &unk, err);
    if (rc != E_OK)
        return error_prefix(err, "model");
    if (*prefix)
        return unsupported_option(t, "continuing_subword_prefix", err);
    if (*suffix)
        return unsupported_option(t, "end_of_word_suffix", err);
    if (dropout != 0)
        return unsupported_option(t, "dropout", err);
    bpe->unk_id = unk ? tokenizer_token_id(t, unk) : -1;
    if (unk && bpe->unk_id < 0)
        return error_set(err, E_INVALID, "%s: model: unk_token '%.60s' is not in the vocabulary",
                         t->name, unk);
    return E_OK;
}

// The two texts of a merge, "a b" or ["a", "b"].
static bool merge_texts(const json_value *node, const char *texts[2], size_t lengths[2]) {
    const char *line;
    if (json_as_string(node, &line)) {
        const char *space = strchr(line, ' ');
        if (!space || strchr(space + 1, ' '))
            return false;
        texts[0] = line;
        lengths[0] = (size_t)(space - line);
        texts[1] = space + 1;
        lengths[1] = strlen(space + 1);
        return true;
    }
    const json_value *left = json_first(node), *right = json_next(left);
    if (!json_is_array(node) || !json_as_string(left, &texts[0]) ||
        !json_as_string(right, &texts[1]) || json_next(right))
        return false;
    lengths[0] = strlen(texts[0]);
    lengths[1] = strlen(texts[1]);
    return true;
}

static int load_merge(tokenizer *t, const json_value *node, uint32_t rank, text_buf *joined,
                      error *err) {
    bpe_model *bpe = &t->bpe;
    const char *texts[2];
    size_t lengths[2];
    int32_t ids[2], id = -1;
    if (!merge_texts(node, texts, lengths))
        return error_set(err, E_INVALID, "%s: model.merges: entry %u is not a pair of tokens",
                         t->name, rank);
    joined->n = 0;
    if (text_buf_add(joined, texts[0], lengths[0]) != E_OK ||
        text_buf_add(joined, texts[1], lengths[1]) != E_OK)
        return error_set(err, E_NO_MEMORY, "%s: out of memory", t->name);
    for (int k = 0; k < 2; k++)
        ids[k] = id_map_find(&bpe->vocab, texts[k], lengths[k]);
    if (joined->n > 0)
        id = id_map_find(&bpe->vocab, joined->data, joined->n);
    if (ids[0] < 0 || ids[1] < 0 || id < 0)
        return error_set(err, E_INVALID,
                         "%s: model.merges: entry %u: '%.60s' with '%.60s' is not in model.vocab",
                         t->name, rank, texts[0], texts[1]);
    // Plain text never becomes a special token, not even by merges.
    if (t->tokens[id].flags & TOKEN_SPECIAL)
        return E_OK;
    uint64_t pair = (uint64_t)(uint32_t)ids[0] << 32 | (uint32_t)ids[1];
    bpe->merges[merge_slot_of(bpe, pair)] = (merge_slot){.pair = pair, .rank = rank, .id = id};
    return E_OK;
}

static int load_merges(tokenizer *t, const json *doc, const json_value *model, error *err) {
    bpe_model *bpe = &t->bpe;
    const json_value *list = NULL;
    text_buf joined = {0};
    uint32_t rank = 0;
    int rc = json_need_array(doc, model, "merges", &list, err);
    if (rc != E_OK)
        return rc;
    size_t n = json_count(list), size = 16;
    while (size < n + n / 2)
        size *= 2;
    bpe->merges = malloc(size * sizeof *bpe->merges);
    if (!bpe->merges)
        return error_set(err, E_NO_MEMORY, "%s: out of memory", t->name);
    bpe->merge_size = size;
    for (size_t i = 0; i < size; i++)
        bpe->merges[i].pair = UINT64_MAX;
    for (const json_value *v = json_first(list); v && rc == E_OK; v = json_next(v))
        rc = load_merge(t, v, rank++, &joined, err);
    text_buf_free(&joined);
    return rc;
}

static void load_byte_ids(tokenizer *t) {
    for (unsigned byte = 0; byte < 256; byte++) {
        char text[8];
        size_t n;
        if (t->bpe.byte_level)
            n = utf8_put(level_char_of_byte((uint8_t)byte), text);
        else
            n = (size_t)snprintf(text, sizeof text, "<0x%02X>", byte);
        int32_t id = id_map_find(&t->bpe.vocab, text, n);
        bool plain = id >= 0 && !(t->tokens[id].flags & TOKEN_SPECIAL);
        t->bpe.byte_ids[byte] = plain ? id : -1;
    }
}

// The raw word that a token of the vocabulary stands for, written to raw; 0 when there is none.
static size_t raw_word(const tokenizer *t, const token *tok, char *raw) {
    if (!t->bpe.byte_level) {
        memcpy(raw, tok->text, tok->n_text);
        return tok->n_text;
    }
    size_t n = 0;
    for (size_t i = 0, length; i < tok->n_text; i += length) {
        uint32_t c = 0;
        utf8_next(tok->text + i, tok->n_text - i, &length, &c);
        int byte = byte_of_level_char(c);
        if (byte < 0)
            return 0;
        raw[n++] = (char)byte;
    }
    return n;
}

// Collects the words that need no merging: with ignore_merges every token, else the tokens whose
// own text is merged into just themselves.
static int load_words(tokenizer *t, error *err) {
    encode_scratch scratch = {0};
    token_ids ids = {0};
    size_t n_bytes = 0;
    for (size_t id = 0; id < t->n_tokens; id++)
        n_bytes += t->tokens[id].n_text;
    char *raw = tokenizer_arena(t, n_bytes + 1);
    int rc = raw ? id_map_create(&t->bpe.words, t->n_tokens) : E_NO_MEMORY;
    for (size_t id = 0; id < t->n_tokens && rc == E_OK; id++) {
        const token *tok = &t->tokens[id];
        bool in_model = id_map_find(&t->bpe.vocab, tok->text ? tok->text : "", tok->n_text) >= 0;
        if (!in_model || tok->flags & TOKEN_SPECIAL)
            continue;
        size_t n = raw_word(t, tok, raw);
        if (n == 0)
            continue;
        ids.n = 0;
        if (!t->bpe.ignore_merges)
            rc = encode_by_merges(t, &scratch, raw, n, &ids);
        if (rc == E_OK && (t->bpe.ignore_merges || (ids.n == 1 && ids.ids[0] == (int32_t)id))) {
            id_map_insert(&t->bpe.words, raw, n, (int32_t)id);
            raw += n;
        }
    }
    encode_scratch_free(&scratch);
    token_ids_free(&ids);
    return rc == E_OK ? rc : error_set(err, rc, "%s: %s", t->name, status_text(rc));
}

// A text may be cut before each U+2581 that follows another character when no merge can reach over
// that place. Whole SentencePiece-style texts come as one word; cut, they take linear time.
static bool may_cut_at_metaspace(const tokenizer *t) {
    size_t n_mark = strlen(METASPACE);
    if (t->bpe.byte_level || id_map_find(&t->bpe.vocab, METASPACE, n_mark) < 0)
        return false;
    for (size_t id = 0; id < t->n_tokens; id++) {
        const token *tok = &t->tokens[id];
        bool in_mark = true;
        for (size_t i = 0; i < tok->n_text;) {
            bool mark = tok->n_text - i >= n_mark && memcmp(tok->text + i, METASPACE, n_mark) == 0;
            if (mark && !in_mark)
                return false;
            in_mark = mark;
            i += mark ? n_mark : 1;
        }
    }
    return true;
}

int bpe_load(tokenizer *t, const json *doc, error *err) {
    const json_value *model = json_get(json_root(doc), "model");
    int rc = load_options(t, doc, model, err);
    if (rc == E_OK)
        rc = load_merges(t, doc, model, err);
    if (rc != E_OK)
        return rc;
    load_byte_ids(t);
    t->bpe.cut_at_metaspace = !t->bpe.ignore_merges && may_cut_at_metaspace(t);
    return load_words(t, err);
}
