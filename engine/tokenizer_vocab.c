// The vocabulary and the added tokens of tokenizer.json.
#include "engine/tokenizer_internal.h"

#include <stdlib.h>
#include <string.h>

static uint32_t hash_bytes(const char *key, size_t n) {
    uint64_t hash = 0x9E3779B97F4A7C15u ^ n, word;
    for (; n >= 8; n -= 8, key += 8) {
        memcpy(&word, key, 8);
        hash = (hash ^ word) * 0xff51afd7ed558ccdu;
        hash ^= hash >> 32;
    }
    word = 0;
    memcpy(&word, key, n);
    hash = (hash ^ word) * 0xff51afd7ed558ccdu;
    return (uint32_t)(hash ^ hash >> 32);
}

int id_map_create(id_map *map, size_t n_max) {
    size_t size = 16;
    while (size < 2 * n_max)
        size *= 2;
    map->slots = malloc(size * sizeof *map->slots);
    if (!map->slots)
        return E_NO_MEMORY;
    map->size = size;
    for (size_t i = 0; i < size; i++)
        map->slots[i].id = -1;
    return E_OK;
}

static id_map_slot *find_slot(const id_map *map, const char *key, size_t n_key, uint32_t hash) {
    size_t at = hash & (map->size - 1);
    for (;; at = (at + 1) & (map->size - 1)) {
        id_map_slot *slot = &map->slots[at];
        if (slot->id < 0 ||
            (slot->hash == hash && slot->n_key == n_key && memcmp(slot->key, key, n_key) == 0))
            return slot;
    }
}

int32_t id_map_find(const id_map *map, const char *key, size_t n_key) {
    return map->size ? find_slot(map, key, n_key, hash_bytes(key, n_key))->id : -1;
}

int32_t id_map_insert(id_map *map, const char *key, size_t n_key, int32_t id) {
    uint32_t hash = hash_bytes(key, n_key);
    id_map_slot *slot = find_slot(map, key, n_key, hash);
    if (slot->id >= 0)
        return slot->id;
    *slot = (id_map_slot){.hash = hash, .id = id, .key = key, .n_key = n_key};
    return -1;
}

// What is counted before the tables are allocated.
typedef struct vocab_size {
    size_t n_entries, n_bytes;
    int64_t max_id;
} vocab_size;

static int count_entry(const tokenizer *t, const char *where, const char *text,
                       const json_value *id_node, vocab_size *size, error *err) {
    int64_t id;
    if (!json_as_int(id_node, &id) || id < 0 || id >= TOKENIZER_ID_MAX)
        return error_set(err, E_INVALID, "%s: %s: the id of '%.60s' is not an integer below %lld",
                         t->name, where, text, (long long)TOKENIZER_ID_MAX);
    size->n_entries++;
    size->n_bytes += strlen(text) + 1;
    if (id > size->max_id)
        size->max_id = id;
    return E_OK;
}

static int count_all(const tokenizer *t, const json_value *vocab, const json_value *added,
                     vocab_size *size, error *err) {
    int rc = E_OK;
    for (const json_value *v = json_first(vocab); v && rc == E_OK; v = json_next(v))
        rc = count_entry(t, "model.vocab", json_key(v), v, size, err);
    for (const json_value *v = json_first(added); v && rc == E_OK; v = json_next(v)) {
        const char *content;
        if (!json_as_string(json_get(v, "content"), &content))
            return error_set(err, E_INVALID, "%s: added_tokens: content: expected a string",
                             t->name);
        if (strlen(content) > TOKENIZER_ADDED_BYTES_MAX)
            return error_set(err, E_TOO_LARGE, "%s: added_tokens: '%.60s...' has over %d bytes",
                             t->name, content, TOKENIZER_ADDED_BYTES_MAX);
        rc = count_entry(t, "added_tokens", content, json_get(v, "id"), size, err);
    }
    if (rc == E_OK && size->n_entries == 0)
        rc = error_set(err, E_INVALID, "%s: model.vocab: no token at all", t->name);
    return rc;
}

// Copies text behind *arena and makes it the token of an id that is still free.
static int add_token(tokenizer *t, char **arena, const char *text, int64_t id, uint32_t flags,
                     error *err) {
    token *tok = &t->tokens[id];
    if (tok->flags)
        return error_set(err, E_INVALID, "%s: id %lld is given to '%.60s' and to '%.60s'", t->name,
                         (long long)id, tok->text, text);
    size_t n = strlen(text);
    memcpy(*arena, text, n + 1);
    *tok = (token){.text = *arena, .n_text = (uint32_t)n, .flags = TOKEN_EXISTS | flags};
    *arena += n + 1;
    return E_OK;
}

static int load_entries(tokenizer *t, const json_value *vocab, char **arena, error *err) {
    for (const json_value *v = json_first(vocab); v; v = json_next(v)) {
        int64_t id = 0;
        json_as_int(v, &id);
        int rc = add_token(t, arena, json_key(v), id, 0, err);
        if (rc != E_OK)
            return rc;
        id_map_insert(&t->bpe.vocab, t->tokens[id].text, t->tokens[id].n_text, (int32_t)id);
    }
    return E_OK;
}

static int load_added_one(tokenizer *t, const json *doc, const json_value *node, char **arena,
                          error *err) {
    int64_t id = 0;
    const char *content = "";
    added_token added = {0};
    const struct {
        const char *key;
        bool *value;
    } options[] = {{"special", &added.special},
                   {"lstrip", &added.lstrip},
                   {"rstrip", &added.rstrip},
                   {"single_word", &added.single_word},
                   {"normalized", &added.normalized}};
    for (size_t i = 0; i < sizeof options / sizeof *options; i++)
        if (json_opt_bool(doc, node, options[i].key, options[i].value, err) != E_OK)
            return error_prefix(err, "added_tokens");
    json_as_int(json_get(node, "id"), &id);
    json_as_string(json_get(node, "content"), &content);
    if (!*content)
        return E_OK; // the library ignores these
    size_t n = strlen(content);
    int32_t in_vocab = id_map_find(&t->bpe.vocab, content, n);
    if (in_vocab >= 0 && in_vocab != id)
        return error_set(err, E_INVALID,
                         "%s: added_tokens: '%.60s' has id %lld, but %d in model.vocab", t->name,
                         content, (long long)id, in_vocab);
    if (t->tokens[id].flags & TOKEN_ADDED && strcmp(t->tokens[id].text, content) == 0)
        return E_OK; // a repetition
    if (in_vocab < 0) {
        if (id_map_find(&t->added_ids, content, n) >= 0)
            return error_set(err, E_INVALID, "%s: added_tokens: '%.60s' has two ids", t->name,
                             content);
        int rc = add_token(t, arena, content, id, 0, err);
        if (rc != E_OK)
            return rc;
        id_map_insert(&t->added_ids, t->tokens[id].text, n, (int32_t)id);
    }
    t->tokens[id].flags |= TOKEN_ADDED | (added.special ? TOKEN_SPECIAL : 0);
    added.id = (int32_t)id;
    t->added[t->n_added++] = added;
    return E_OK;
}

int vocab_load(tokenizer *t, const json *doc, error *err) {
    const json_value *root = json_root(doc), *model, *vocab;
    const json_value *added = json_get(root, "added_tokens");
    vocab_size size = {.max_id = -1};
    int rc = json_need_object(doc, root, "model", &model, err);
    if (rc == E_OK)
        rc = json_need_object(doc, model, "vocab", &vocab, err);
    if (rc == E_OK && !json_is_null(added) && !json_is_array(added))
        rc = error_set(err, E_INVALID, "%s: added_tokens: expected an array", t->name);
    if (rc == E_OK)
        rc = count_all(t, vocab, added, &size, err);
    if (rc != E_OK)
        return rc;
    char *arena = tokenizer_arena(t, size.n_bytes);
    t->n_tokens = (size_t)size.max_id + 1;
    t->tokens = calloc(t->n_tokens, sizeof *t->tokens);
    size_t n_added = json_count(added);
    t->added = calloc(n_added + 2, sizeof *t->added); // two named ones may follow
    if (!arena || !t->tokens || !t->added || id_map_create(&t->added_ids, n_added) != E_OK ||
        id_map_create(&t->bpe.vocab, size.n_entries) != E_OK)
        return error_set(err, E_NO_MEMORY, "%s: out of memory", t->name);
    rc = load_entries(t, vocab, &arena, err);
    for (const json_value *v = json_first(added); v && rc == E_OK; v = json_next(v))
        rc = load_added_one(t, doc, v, &arena, err);
    return rc;
}
