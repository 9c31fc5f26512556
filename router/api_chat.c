// The messages field of /v1/chat/completions: checked, joined, rendered by the chat format.
#include "router/api_internal.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// The texts of a content list, joined by line ends as the peers do. *joined is for free().
static int join_texts(const json_value *list, const char *param, char **joined, api_error *e) {
    json_writer text = {0};
    const char *piece, *type;
    for (const json_value *item = json_first(list); item; item = json_next(item)) {
        if (!json_as_string(json_get(item, "type"), &type) || strcmp(type, "text") != 0 ||
            !json_as_string(json_get(item, "text"), &piece)) {
            json_writer_free(&text);
            return api_error_set(e, 400, NULL, param,
                                 "%s: only parts {\"type\": \"text\", \"text\": ...} are supported",
                                 param);
        }
        json_put(&text, item == json_first(list) ? "" : "\n");
        json_put(&text, piece);
    }
    if (text.failed) {
        json_writer_free(&text);
        return api_error_set(e, 500, NULL, NULL, "out of memory");
    }
    *joined = text.text; // NULL when all of it is empty
    return 0;
}

// *joined is for free() where the content was a list.
static int read_message(const json_value *item, size_t index, chat_message *out, char **joined,
                        api_error *e) {
    char param[48];
    const json_value *content = json_get(item, "content"), *calls = json_get(item, "tool_calls");
    snprintf(param, sizeof param, "messages[%zu].content", index);
    if (!json_is_object(item) || !json_as_string(json_get(item, "role"), &out->role))
        return api_error_set(e, 400, NULL, "messages",
                             "messages[%zu] must be an object with a role and a content", index);
    if (!json_is_null(calls) && json_count(calls) > 0)
        return api_error_set(e, 400, NULL, "messages",
                             "messages[%zu]: tool_calls are not supported", index);
    out->content = "";
    if (json_is_array(content)) {
        int rc = join_texts(content, param, joined, e);
        if (rc)
            return rc;
        out->content = *joined ? *joined : "";
    } else if (!json_as_string(content, &out->content) &&
               !(json_is_null(content) && strcmp(out->role, "assistant") == 0)) {
        return api_error_set(e, 400, NULL, param, "%s must be a string or a list of parts", param);
    }
    out->n_bytes = strlen(out->content);
    return 0;
}

static int encode_messages(const api *a, const json_value *body, const chat_message *messages,
                           size_t n, api_prompts *out, api_error *e) {
    size_t n_bytes = 0;
    bool generation = true;
    const json_value *value = json_get(body, "add_generation_prompt");
    if (!json_is_null(value) && !json_as_bool(value, &generation))
        return api_error_set(e, 400, NULL, "add_generation_prompt",
                             "add_generation_prompt must be true or false");
    for (size_t i = 0; i < n; i++)
        n_bytes += messages[i].n_bytes;
    int rc = api_check_text(a, n_bytes, "messages", e);
    if (rc)
        return rc;
    out->list = calloc(1, sizeof *out->list);
    if (!out->list)
        return api_error_set(e, 500, NULL, NULL, "out of memory");
    out->n = 1;
    error err = {0};
    rc = chat_encode(a->chat, a->tokenizer, messages, n, generation, &out->list[0].ids, &err);
    return rc == E_OK ? 0
                      : api_error_set(e, rc == E_NO_MEMORY ? 500 : 400, NULL, "messages", "%.200s",
                                      err.text);
}

int api_chat_prompts(const api *a, const json_value *body, api_prompts *out, api_error *e) {
    const json_value *list = json_get(body, "messages");
    size_t n = json_count(list);
    if (!a->chat)
        return api_error_set(
            e, 400, NULL, "messages",
            "this model has no chat template; use /v1/completions or set chat.format");
    if (!json_is_array(list) || n == 0)
        return api_error_set(e, 400, NULL, "messages", "messages must be a list of messages");
    chat_message *messages = calloc(n, sizeof *messages);
    char **joined = calloc(n, sizeof *joined);
    int rc = 0;
    if (!messages || !joined)
        rc = api_error_set(e, 500, NULL, NULL, "out of memory");
    const json_value *item = json_first(list);
    for (size_t i = 0; i < n && rc == 0; i++, item = json_next(item))
        rc = read_message(item, i, &messages[i], &joined[i], e);
    if (rc == 0)
        rc = encode_messages(a, body, messages, n, out, e);
    for (size_t i = 0; i < n && joined; i++)
        free(joined[i]);
    free(joined);
    free(messages);
    return rc;
}
