// Added tokens: found in the text as the longest match at the leftmost place, before anything else.
#include "engine/tokenizer_internal.h"
#include "engine/utf8.h"

#include <utf8proc.h>

#include <stdlib.h>
#include <string.h>

static int new_node(added_trie *trie, uint8_t byte, int32_t *out) {
    if (trie->n_nodes == trie->capacity) {
        size_t capacity = trie->capacity ? 2 * trie->capacity : 256;
        added_node *nodes = realloc(trie->nodes, capacity * sizeof *nodes);
        if (!nodes)
            return E_NO_MEMORY;
        trie->nodes = nodes;
        trie->capacity = capacity;
    }
    trie->nodes[trie->n_nodes] =
        (added_node){.child = -1, .sibling = -1, .token = -1, .byte = byte};
    *out = (int32_t)trie->n_nodes++;
    return E_OK;
}

static int32_t find_child(const added_trie *trie, int32_t node, uint8_t byte) {
    int32_t child = trie->nodes[node].child;
    while (child >= 0 && trie->nodes[child].byte != byte)
        child = trie->nodes[child].sibling;
    return child;
}

static int trie_insert(added_trie *trie, const char *text, size_t n, int32_t index) {
    int32_t *root = &trie->root[(uint8_t)text[0]], node = *root;
    int rc = E_OK;
    if (node < 0) {
        rc = new_node(trie, (uint8_t)text[0], &node);
        if (rc == E_OK)
            *root = node;
    }
    for (size_t i = 1; i < n && rc == E_OK; i++) {
        int32_t child = find_child(trie, node, (uint8_t)text[i]);
        if (child < 0) {
            rc = new_node(trie, (uint8_t)text[i], &child);
            if (rc != E_OK)
                break;
            trie->nodes[child].sibling = trie->nodes[node].child;
            trie->nodes[node].child = child;
        }
        node = child;
    }
    if (rc == E_OK) {
        trie->nodes[node].token = index;
        trie->any = true;
    }
    return rc;
}

int added_load(tokenizer *t, encode_scratch *scratch, error *err) {
    for (int k = 0; k < 2; k++)
        memset(t->tries[k].root, 0xff, sizeof t->tries[k].root);
    for (size_t i = 0; i < t->n_added; i++) {
        const added_token *added = &t->added[i];
        const token *tok = &t->tokens[added->id];
        const char *text = tok->text;
        size_t n = tok->n_text;
        int rc = E_OK;
        if (added->normalized) { // it is looked for in normalized text
            rc = norm_run(t, scratch, text, n, true);
            text = scratch->normalized.data;
            n = scratch->normalized.n;
        }
        if (rc == E_OK && n > 0)
            rc = trie_insert(&t->tries[added->normalized], text, n, (int32_t)i);
        t->tries[added->normalized].special |= added->special;
        if (rc != E_OK)
            return error_set(err, rc, "%s: added_tokens: %s", t->name, status_text(rc));
    }
    return E_OK;
}

// Words as Rust's \w has them.
static bool is_word(uint32_t c) {
    switch (utf8proc_category((utf8proc_int32_t)c)) {
    case UTF8PROC_CATEGORY_LU:
    case UTF8PROC_CATEGORY_LL:
    case UTF8PROC_CATEGORY_LT:
    case UTF8PROC_CATEGORY_LM:
    case UTF8PROC_CATEGORY_LO:
    case UTF8PROC_CATEGORY_NL:
    case UTF8PROC_CATEGORY_ND:
    case UTF8PROC_CATEGORY_MN:
    case UTF8PROC_CATEGORY_MC:
    case UTF8PROC_CATEGORY_ME:
    case UTF8PROC_CATEGORY_PC:
        return true;
    default:
        return c == 0x200C || c == 0x200D; // Join_Control
    }
}

static bool is_blank(uint32_t c) {
    return (c >= 9 && c <= 13) || c == 0x20 || c == 0x85 || c == 0xA0 || c == 0x1680 ||
           (c >= 0x2000 && c <= 0x200A) || c == 0x2028 || c == 0x2029 || c == 0x202F ||
           c == 0x205F || c == 0x3000;
}

// The character that ends before end; its start in *start.
static uint32_t char_before(const char *text, size_t end, size_t *start) {
    size_t at = end - 1, length;
    uint32_t c = 0;
    while (at > 0 && ((uint8_t)text[at] & 0xC0) == 0x80)
        at--;
    utf8_next(text + at, end - at, &length, &c);
    *start = at;
    return c;
}

static uint32_t char_at(const char *text, size_t n, size_t at, size_t *length) {
    uint32_t c = 0;
    utf8_next(text + at, n - at, length, &c);
    return c;
}

static bool touches_word(const char *text, size_t n, text_span span) {
    size_t other;
    return (span.start > 0 && is_word(char_before(text, span.start, &other))) ||
           (span.end < n && is_word(char_at(text, n, span.end, &other)));
}

static text_span take_blanks(const added_token *added, const char *text, size_t n, size_t floor,
                             text_span span) {
    size_t start, length;
    while (added->lstrip && span.start > floor && is_blank(char_before(text, span.start, &start)))
        span.start = start < floor ? floor : start;
    while (added->rstrip && span.end < n && is_blank(char_at(text, n, span.end, &length)))
        span.end += length;
    return span;
}

// The longest token at a place. special_end bounds special tokens in a trusted span; outside of
// one (special_end 0) any may match, for the caller to discard.
static const added_token *longest_at(const tokenizer *t, const added_trie *trie, const char *text,
                                     size_t n, size_t at, size_t special_end, size_t *end) {
    const added_token *best = NULL;
    int32_t node = trie->root[(uint8_t)text[at]];
    for (size_t i = at + 1; node >= 0; i++) {
        int32_t index = trie->nodes[node].token;
        if (index >= 0) {
            const added_token *added = &t->added[index];
            if (!added->special || special_end == 0 || i <= special_end) {
                best = added;
                *end = i;
            }
        }
        if (i >= n)
            break;
        node = find_child(trie, node, (uint8_t)text[i]);
    }
    return best;
}

const added_token *added_find(const tokenizer *t, const added_trie *trie, const char *text,
                              size_t n, added_cursor *cursor, text_span *match) {
    if (!trie->any)
        return NULL;
    size_t *k = &cursor->at_trusted;
    for (size_t i = cursor->at; i < n; i++) {
        if (trie->root[(uint8_t)text[i]] < 0)
            continue;
        while (*k < cursor->n_trusted && cursor->trusted[*k].end <= i)
            ++*k;
        const text_span *near = *k < cursor->n_trusted ? &cursor->trusted[*k] : NULL;
        bool inside = near && near->start <= i;
        text_span span = {i, i};
        const added_token *added =
            longest_at(t, trie, text, n, i, inside ? near->end : 0, &span.end);
        if (!added)
            continue;
        if (added->special && !inside) {
            // The library, told to treat special tokens as text, goes on behind the match; here
            // not beyond the start of a span in which a special token may stand.
            if (near && span.end > near->start)
                span.end = near->start;
        } else if (!added->single_word || !touches_word(text, n, span)) {
            *match = take_blanks(added, text, n, cursor->at, span);
            cursor->at = match->end;
            return added;
        }
        i = span.end - 1;
    }
    return NULL;
}
