// tokenizer_internal.h: what the tokenizer_*.c files share; not for other modules.
//
// The way of a text (tokenizer_encode.c): added tokens that match raw text are cut out (added), the
// stretches between are normalized (norm), added tokens that match normalized text are cut out, the
// rest goes through the pre-tokenizer's steps (pretok, regex) word by word into the merges (bpe).
// Everything in struct tokenizer is set while loading and read-only afterwards.
#ifndef TANDEM_ENGINE_TOKENIZER_INTERNAL_H
#define TANDEM_ENGINE_TOKENIZER_INTERNAL_H

#include "engine/json.h"
#include "engine/text_buf.h"
#include "engine/tokenizer.h"

#define TOKENIZER_FILE_MAX ((size_t)256 << 20)
#define TOKENIZER_ID_MAX ((int64_t)1 << 22)
#define TOKENIZER_STEPS_MAX 16         // steps of a normalizer, pre-tokenizer or decoder
#define TOKENIZER_ADDED_BYTES_MAX 1024 // length of an added token

#define METASPACE "\xE2\x96\x81" // U+2581, which stands for a space in SentencePiece vocabularies

// A hash from byte strings to ids. The bytes live in an arena of the owner.
typedef struct id_map_slot {
    uint32_t hash;
    int32_t id; // -1: free
    const char *key;
    size_t n_key;
} id_map_slot;

typedef struct id_map {
    id_map_slot *slots; // (size), a power of two, at most half full
    size_t size;
} id_map;

int id_map_create(id_map *map, size_t n_max);
int32_t id_map_find(const id_map *map, const char *key, size_t n_key); // -1 when absent
// Returns the id already under the key, else -1 after the insertion. At most n_max insertions.
int32_t id_map_insert(id_map *map, const char *key, size_t n_key, int32_t id);

enum { TOKEN_EXISTS = 1, TOKEN_ADDED = 2, TOKEN_SPECIAL = 4, TOKEN_BYTE = 8 };

typedef struct token {
    const char *text;  // as in the vocabulary; in tokenizer.strings
    const char *piece; // what it contributes when decoded, set by decode_load
    uint32_t n_text, n_piece;
    uint32_t flags;
} token;

typedef struct merge_slot {
    uint64_t pair; // left id << 32 | right id; UINT64_MAX: free
    uint32_t rank;
    int32_t id; // of the joined token
} merge_slot;

typedef struct bpe_model {
    id_map vocab;       // texts of the model's vocabulary
    id_map words;       // raw words that are one token as they stand
    merge_slot *merges; // (merge_size), a power of two
    size_t merge_size;
    int32_t byte_ids[256]; // byte-level: initial token of each byte; else the <0xXX> tokens
    int32_t unk_id;        // -1: unknown characters vanish
    bool byte_level;       // words are bytes in the byte-level alphabet
    bool byte_fallback, fuse_unk, ignore_merges;
    bool cut_at_metaspace; // no token holds U+2581 behind another character
} bpe_model;

typedef struct added_node {
    int32_t child, sibling; // -1: none
    int32_t token;          // index into added_set.tokens; -1: no token ends here
    uint8_t byte;
} added_node;

typedef struct added_token {
    int32_t id;
    bool special, lstrip, rstrip, single_word, normalized;
} added_token;

// Added tokens in a trie; [0] match raw text, [1] normalized text.
typedef struct added_trie {
    added_node *nodes;
    size_t n_nodes, capacity;
    int32_t root[256];
    bool any, special; // whether it has tokens, and special ones
} added_trie;

typedef struct text_span {
    size_t start, end;
} text_span;

typedef enum norm_kind { NORM_FORM, NORM_PREPEND, NORM_REPLACE } norm_kind;

typedef struct norm_step {
    norm_kind kind;
    int form;                // NORM_FORM: utf8proc options
    char *pattern, *content; // owned; PREPEND uses content
} norm_step;

typedef enum split_behavior {
    SPLIT_ISOLATED,
    SPLIT_REMOVED,
    SPLIT_MERGED_WITH_PREVIOUS,
    SPLIT_MERGED_WITH_NEXT,
    SPLIT_CONTIGUOUS,
} split_behavior;

typedef enum prepend_scheme { PREPEND_NEVER, PREPEND_FIRST, PREPEND_ALWAYS } prepend_scheme;

typedef enum pretok_kind { PRETOK_SPLIT, PRETOK_METASPACE, PRETOK_PREFIX_SPACE } pretok_kind;

typedef struct regex regex;

typedef struct pretok_step {
    pretok_kind kind;
    regex *pattern; // SPLIT; owned
    split_behavior behavior;
    bool invert;
    char *replacement; // METASPACE; owned
    prepend_scheme scheme;
    bool split;
} pretok_step;

// The decoder chain in the only shapes that occur: a function of each token, then one of the
// sequence.
typedef struct decode_plan {
    bool byte_level;    // bytes of all tokens together are repaired to UTF-8
    bool byte_fallback; // runs of <0xXX> tokens become text, or one U+FFFD each
    bool join_space;    // no decoder: tokens are joined with spaces
    char *first_drop;   // Metaspace: dropped from the first token instead of replaced; owned
    char *strip;        // Strip behind Fuse: dropped from the start of the text; owned
    size_t strip_max;
} decode_plan;

struct tokenizer {
    char *name;     // path of tokenizer.json, for error lines
    char **strings; // arenas of token texts and pieces
    size_t n_strings;
    token *tokens; // (n_tokens), indexed by id
    size_t n_tokens;
    bpe_model bpe;
    added_token *added; // (n_added)
    size_t n_added;
    id_map added_ids; // texts of the added tokens that are not in the model's vocabulary
    added_trie tries[2];
    norm_step norms[TOKENIZER_STEPS_MAX];
    size_t n_norms;
    pretok_step pretoks[TOKENIZER_STEPS_MAX];
    size_t n_pretoks;
    decode_plan decode;
    int32_t *prefix_ids, *suffix_ids; // of the post-processor's template
    size_t n_prefix, n_suffix;
    int32_t bos_id, eos_id;
};

typedef struct bpe_symbol {
    int32_t id, prev, next; // prev and next are indices, -1: none
} bpe_symbol;

// Memory of one encode call.
typedef struct encode_scratch {
    void *match_data;                    // pcre2_match_data
    text_buf normalized, norm_tmp;       // of norm_run
    text_buf steps[TOKENIZER_STEPS_MAX]; // text written by pre-tokenizer steps
    bpe_symbol *symbols;
    size_t symbol_capacity;
    uint64_t *heap; // rank << 32 | position
    size_t n_heap, heap_capacity;
} encode_scratch;

void encode_scratch_free(encode_scratch *scratch);

// tokenizer.c: an arena of n bytes that lives as long as the tokenizer, or NULL.
char *tokenizer_arena(tokenizer *t, size_t n);
// Builds a tokenizer from texts; config_text may be NULL.
int tokenizer_parse(const char *name, const char *text, size_t n, const char *config_name,
                    const char *config_text, size_t n_config, tokenizer **out, error *err);

// tokenizer_vocab.c
int vocab_load(tokenizer *t, const json *doc, error *err); // vocabulary and added tokens

// tokenizer_bpe.c
int bpe_load(tokenizer *t, const json *doc, error *err); // behind pretok_load
int bpe_encode_word(const tokenizer *t, encode_scratch *scratch, const char *word, size_t n,
                    token_ids *out);
int byte_of_level_char(uint32_t codepoint); // -1: not in the byte-level alphabet
uint32_t level_char_of_byte(uint8_t byte);

// tokenizer_added.c
int added_load(tokenizer *t, encode_scratch *scratch, error *err); // behind norm_load
typedef struct added_cursor {
    size_t at;                // where to look on; a match's blanks do not reach before it
    const text_span *trusted; // (n_trusted) spans in which special tokens count, in order
    size_t n_trusted, at_trusted;
} added_cursor;

// Finds the next added token and moves the cursor behind it. *match is the span it takes, with the
// blanks that lstrip and rstrip add; NULL when there is none.
const added_token *added_find(const tokenizer *t, const added_trie *trie, const char *text,
                              size_t n, added_cursor *cursor, text_span *match);

// tokenizer_norm.c
int norm_load(tokenizer *t, const json *doc, error *err);
// Normalizes into scratch->normalized (emptied first). first is false for text that continues.
int norm_run(const tokenizer *t, encode_scratch *scratch, const char *text, size_t n, bool first);

// tokenizer_regex.c
int regex_compile(const char *where, const char *pattern, bool literal, regex **out, error *err);
void regex_free(regex *re);
// 0 and the match at or behind from; E_NOT_FOUND; else a failure such as a limit reached.
int regex_find(const regex *re, encode_scratch *scratch, const char *text, size_t n, size_t from,
               text_span *match);

// tokenizer_pretok.c
int pretok_load(tokenizer *t, const json *doc, error *err);
// Cuts text into words and encodes each. first: the text stands at the start of the input.
int pretok_run(const tokenizer *t, encode_scratch *scratch, const char *text, size_t n, bool first,
               token_ids *out, error *err);
void pretok_free(tokenizer *t);
void norm_free(tokenizer *t);

// tokenizer_encode.c
int postproc_load(tokenizer *t, const json *doc, error *err);

// tokenizer_decode.c
int decode_load(tokenizer *t, const json *doc, error *err);

#endif
