#include "engine/tokenizer_internal.h"

#include "engine/log.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// --- lists -------------------------------------------------------------------------------------

void token_ids_free(token_ids *list) {
    free(list->ids);
    *list = (token_ids){0};
}

int token_ids_push(token_ids *list, int32_t id) {
    if (list->n == list->capacity) {
        size_t capacity = list->capacity ? 2 * list->capacity : 64;
        int32_t *ids = realloc(list->ids, capacity * sizeof *ids);
        if (!ids)
            return E_NO_MEMORY;
        list->ids = ids;
        list->capacity = capacity;
    }
    list->ids[list->n++] = id;
    return E_OK;
}

void encode_scratch_free(encode_scratch *scratch) {
    pcre2_match_data_free(scratch->match_data);
    text_buf_free(&scratch->normalized);
    text_buf_free(&scratch->norm_tmp);
    for (size_t i = 0; i < TOKENIZER_STEPS_MAX; i++)
        text_buf_free(&scratch->steps[i]);
    free(scratch->symbols);
    free(scratch->heap);
    *scratch = (encode_scratch){0};
}

// --- loading -------------------------------------------------------------------------------------

char *tokenizer_arena(tokenizer *t, size_t n) {
    char **strings = realloc(t->strings, (t->n_strings + 1) * sizeof *strings);
    if (!strings)
        return NULL;
    t->strings = strings;
    char *arena = malloc(n ? n : 1);
    if (arena)
        t->strings[t->n_strings++] = arena;
    return arena;
}

// A token named by tokenizer_config.json is special whatever tokenizer.json says of it, as it is in
// the transformers library; one that was not an added token becomes one. A name that is not in the
// vocabulary is only reported, since ends of text may also come from generation_config.json.
static int load_named(tokenizer *t, const json *config, const char *key, int32_t *out, error *err) {
    const json_value *node = json_get(json_root(config), key);
    const char *text;
    if (json_is_null(node))
        return E_OK;
    if (!json_as_string(node, &text) && !json_as_string(json_get(node, "content"), &text))
        return error_set(err, E_INVALID, "%s: %s: expected a string or an object with content",
                         json_name(config), key);
    int32_t id = tokenizer_token_id(t, text);
    if (id < 0) {
        log_warn("%s: %s: '%.60s' is not in the vocabulary", json_name(config), key, text);
        return E_OK;
    }
    *out = id;
    if (!*text || t->tokens[id].flags & TOKEN_SPECIAL)
        return E_OK;
    size_t i = 0;
    while (i < t->n_added && t->added[i].id != id)
        i++;
    if (i == t->n_added) // vocab_load left room
        t->added[t->n_added++] = (added_token){.id = id};
    t->added[i].special = true;
    t->tokens[id].flags |= TOKEN_ADDED | TOKEN_SPECIAL;
    return E_OK;
}

static int load_all(tokenizer *t, const json *doc, const json *config, error *err) {
    encode_scratch scratch = {0};
    int rc = vocab_load(t, doc, err);
    if (rc == E_OK && config)
        rc = load_named(t, config, "bos_token", &t->bos_id, err);
    if (rc == E_OK && config)
        rc = load_named(t, config, "eos_token", &t->eos_id, err);
    if (rc == E_OK)
        rc = norm_load(t, doc, err);
    if (rc == E_OK)
        rc = pretok_load(t, doc, err);
    if (rc == E_OK)
        rc = bpe_load(t, doc, err);
    if (rc == E_OK)
        rc = added_load(t, &scratch, err);
    if (rc == E_OK)
        rc = postproc_load(t, doc, err);
    if (rc == E_OK)
        rc = decode_load(t, doc, err);
    encode_scratch_free(&scratch);
    return rc;
}

static int build(const json *doc, const json *config, tokenizer **out, error *err) {
    tokenizer *t = calloc(1, sizeof *t);
    if (!t || !(t->name = strdup(json_name(doc)))) {
        tokenizer_close(t);
        return error_set(err, E_NO_MEMORY, "%s: out of memory", json_name(doc));
    }
    t->bos_id = t->eos_id = -1;
    int rc = load_all(t, doc, config, err);
    if (rc != E_OK) {
        tokenizer_close(t);
        return rc;
    }
    *out = t;
    return E_OK;
}

int tokenizer_parse(const char *name, const char *text, size_t n, const char *config_name,
                    const char *config_text, size_t n_config, tokenizer **out, error *err) {
    json *doc = NULL, *config = NULL;
    error ignored;
    err = err ? err : &ignored;
    int rc = json_parse(name, text, n, &doc, err);
    if (rc == E_OK && config_text)
        rc = json_parse(config_name, config_text, n_config, &config, err);
    if (rc == E_OK)
        rc = build(doc, config, out, err);
    json_close(doc);
    json_close(config);
    return rc;
}

static int open_in(const char *model_dir, const char *file, json **out, error *err) {
    char path[4096];
    int n = snprintf(path, sizeof path, "%s/%s", model_dir, file);
    if (n < 0 || (size_t)n >= sizeof path)
        return error_set(err, E_INVALID, "%.60s...: the path is too long", model_dir);
    return json_open(path, TOKENIZER_FILE_MAX, out, err);
}

int tokenizer_open(const char *model_dir, tokenizer **out, error *err) {
    json *doc = NULL, *config = NULL;
    error ignored;
    err = err ? err : &ignored;
    int rc = open_in(model_dir, "tokenizer.json", &doc, err);
    if (rc == E_OK) {
        rc = open_in(model_dir, "tokenizer_config.json", &config, err);
        rc = rc == E_NOT_FOUND ? E_OK : rc;
    }
    if (rc == E_OK)
        rc = build(doc, config, out, err);
    json_close(doc);
    json_close(config);
    return rc;
}

void tokenizer_close(tokenizer *t) {
    if (!t)
        return;
    for (size_t i = 0; i < t->n_strings; i++)
        free(t->strings[i]);
    free(t->strings);
    free(t->tokens);
    free(t->added);
    free(t->added_ids.slots);
    free(t->bpe.vocab.slots);
    free(t->bpe.words.slots);
    free(t->bpe.merges);
    free(t->tries[0].nodes);
    free(t->tries[1].nodes);
    norm_free(t);
    pretok_free(t);
    free(t->decode.first_drop);
    free(t->decode.strip);
    free(t->prefix_ids);
    free(t->suffix_ids);
    free(t->name);
    free(t);
}

// --- looking up ----------------------------------------------------------------------------------

size_t tokenizer_vocab_size(const tokenizer *t) {
    return t->n_tokens;
}

int32_t tokenizer_token_id(const tokenizer *t, const char *text) {
    size_t n = strlen(text);
    int32_t id = id_map_find(&t->bpe.vocab, text, n);
    return id >= 0 ? id : id_map_find(&t->added_ids, text, n);
}

static const token *token_of(const tokenizer *t, int32_t id) {
    return id >= 0 && (size_t)id < t->n_tokens && t->tokens[id].flags ? &t->tokens[id] : NULL;
}

bool tokenizer_is_special(const tokenizer *t, int32_t id) {
    const token *tok = token_of(t, id);
    return tok && tok->flags & TOKEN_SPECIAL;
}

int32_t tokenizer_bos_id(const tokenizer *t) {
    return t->bos_id;
}

int32_t tokenizer_eos_id(const tokenizer *t) {
    return t->eos_id;
}

int tokenizer_token_bytes(const tokenizer *t, int32_t id, const char **bytes, size_t *n) {
    const token *tok = token_of(t, id);
    if (!tok)
        return E_NOT_FOUND;
    *bytes = tok->piece;
    *n = tok->n_piece;
    return E_OK;
}
