// /tokenize and /detokenize.
#include "router/api_internal.h"

#include <stdlib.h>
#include <string.h>

static void put_token_strings(const api *a, const token_ids *ids, json_writer *out) {
    json_put(out, ",\"token_strs\":[");
    for (size_t i = 0; i < ids->n; i++) {
        const char *bytes = "";
        size_t n = 0;
        tokenizer_token_bytes(a->tokenizer, ids->ids[i], &bytes, &n);
        json_put(out, i ? "," : "");
        json_put_string_n(out, bytes, n);
    }
    json_put(out, "]");
}

static int read_flag(const json_value *body, const char *key, bool *out, api_error *e) {
    const json_value *value = json_get(body, key);
    if (json_is_null(value) || json_as_bool(value, out))
        return 0;
    return api_error_set(e, 400, NULL, key, "%s must be true or false", key);
}

static int encode_prompt(const api *a, const json_value *body, token_ids *out, api_error *e) {
    const char *text;
    bool add_special = true;
    if (!json_as_string(json_get(body, "prompt"), &text))
        return api_error_set(e, 400, NULL, "prompt", "prompt must be a string, or messages a list");
    int rc = read_flag(body, "add_special_tokens", &add_special, e);
    size_t n = strlen(text);
    if (rc == 0)
        rc = api_check_text(a, n, "prompt", e);
    if (rc)
        return rc;
    error err = {0};
    rc = tokenizer_encode(a->tokenizer, text, n, add_special, true, out, &err);
    return rc == E_OK ? 0 : api_error_set(e, 500, NULL, "prompt", "%.200s", err.text);
}

void api_post_tokenize(api *a, http_request *request, const json_value *body) {
    api_error e;
    api_prompts prompts = {0};
    token_ids ids = {0}; // of a prompt; owned
    bool want_strings = false;
    bool chat = !json_is_null(json_get(body, "messages"));
    int rc = api_check_model(a, body, &e);
    if (rc == 0)
        rc = read_flag(body, "return_token_strs", &want_strings, &e);
    if (rc == 0)
        rc = chat ? api_chat_prompts(a, body, &prompts, &e) : encode_prompt(a, body, &ids, &e);
    if (rc) {
        api_respond_error(a, request, &e);
    } else {
        const token_ids *list = chat ? &prompts.list[0].ids : &ids;
        json_writer out = {0};
        json_putf(&out, "{\"count\":%zu,\"max_model_len\":%zu,\"tokens\":[", list->n,
                  bundle_max_model_len(a->bundle));
        for (size_t i = 0; i < list->n; i++)
            json_putf(&out, "%s%d", i ? "," : "", list->ids[i]);
        json_put(&out, "]");
        if (want_strings)
            put_token_strings(a, list, &out);
        json_put(&out, "}");
        api_respond(a, request, 200, NULL, &out);
        json_writer_free(&out);
    }
    token_ids_free(&ids);
    api_prompts_free(&prompts);
}

void api_post_detokenize(api *a, http_request *request, const json_value *body) {
    api_error e;
    token_ids ids = {0};
    char *text = NULL;
    size_t n = 0;
    error err = {0};
    const json_value *tokens = json_get(body, "tokens");
    int rc = api_check_model(a, body, &e);
    if (rc == 0 && !json_is_array(tokens))
        rc = api_error_set(&e, 400, NULL, "tokens", "tokens must be a list of token ids");
    if (rc == 0)
        rc = api_parse_ids(a, tokens, "tokens", &ids, &e);
    if (rc == 0 && tokenizer_decode(a->tokenizer, ids.ids, ids.n, false, &text, &n, &err) != E_OK)
        rc = api_error_set(&e, 500, NULL, "tokens", "%.200s", err.text);
    if (rc) {
        api_respond_error(a, request, &e);
    } else {
        json_writer out = {0};
        json_put(&out, "{\"prompt\":");
        json_put_string_n(&out, text, n);
        json_put(&out, "}");
        api_respond(a, request, 200, NULL, &out);
        json_writer_free(&out);
    }
    free(text);
    token_ids_free(&ids);
}
