// The prompt field of /v1/completions: a string, a list of strings, a list of token ids, or a list
// of such lists.
#include "router/api_internal.h"

#include <stdlib.h>
#include <string.h>

void api_prompts_free(api_prompts *prompts) {
    for (size_t i = 0; i < prompts->n; i++) {
        token_ids_free(&prompts->list[i].ids);
        free(prompts->list[i].text);
    }
    free(prompts->list);
    *prompts = (api_prompts){0};
}

static int no_memory(api_error *e) {
    return api_error_set(e, 500, NULL, NULL, "out of memory");
}

static int copy_text(const char *text, size_t n, api_prompt *out, api_error *e) {
    out->text = malloc(n + 1);
    if (!out->text)
        return no_memory(e);
    memcpy(out->text, text, n + 1);
    out->n_text = n;
    return 0;
}

static int encode_text(const api *a, const char *text, bool add_special, bool echo, api_prompt *out,
                       api_error *e) {
    size_t n = strlen(text);
    int rc = api_check_text(a, n, "prompt", e);
    if (rc)
        return rc;
    error err = {0};
    rc = tokenizer_encode(a->tokenizer, text, n, add_special, true, &out->ids, &err);
    if (rc != E_OK)
        return api_error_set(e, rc == E_NO_MEMORY ? 500 : 400, NULL, "prompt", "%.200s", err.text);
    return echo ? copy_text(text, n, out, e) : 0;
}

static int take_ids(const api *a, const json_value *array, bool echo, api_prompt *out,
                    api_error *e) {
    int rc = api_parse_ids(a, array, "prompt", &out->ids, e);
    if (rc || !echo)
        return rc;
    error err = {0};
    rc = tokenizer_decode(a->tokenizer, out->ids.ids, out->ids.n, false, &out->text, &out->n_text,
                          &err);
    return rc == E_OK ? 0 : api_error_set(e, 500, NULL, "prompt", "%.200s", err.text);
}

static bool is_number(const json_value *value) {
    double number;
    return json_as_double(value, &number);
}

// True for a string or a list of token ids: one prompt, not a list of them.
static bool is_single(const json_value *prompt) {
    const char *text;
    return json_as_string(prompt, &text) || is_number(json_first(prompt));
}

static int read_prompt(const api *a, const json_value *value, bool add_special, bool echo,
                       api_prompt *out, api_error *e) {
    const char *text;
    if (json_as_string(value, &text))
        return encode_text(a, text, add_special, echo, out, e);
    if (json_is_array(value))
        return take_ids(a, value, echo, out, e);
    return api_error_set(e, 400, NULL, "prompt",
                         "prompt must be a string, a list of strings, a list of token ids or a "
                         "list of such lists");
}

int api_completion_prompts(const api *a, const json_value *body, const api_params *params,
                           api_prompts *out, api_error *e) {
    const json_value *prompt = json_get(body, "prompt"),
                     *value = json_get(body, "add_special_tokens");
    bool add_special = true;
    if (json_is_null(prompt))
        return api_error_set(e, 400, NULL, "prompt", "prompt is missing");
    if (!json_is_null(value) && !json_as_bool(value, &add_special))
        return api_error_set(e, 400, NULL, "add_special_tokens",
                             "add_special_tokens must be true or false");
    bool single = is_single(prompt) || !json_is_array(prompt);
    size_t n = single ? 1 : json_count(prompt);
    if (n == 0)
        return api_error_set(e, 400, NULL, "prompt", "prompt is an empty list");
    if (n * (size_t)params->n > API_MAX_CHOICES)
        return api_error_set(e, 400, NULL, "prompt", "prompts times n is %zu; at most %d are taken",
                             n * (size_t)params->n, API_MAX_CHOICES);
    out->list = calloc(n, sizeof *out->list);
    if (!out->list)
        return no_memory(e);
    out->n = n;
    int rc = 0;
    const json_value *item = single ? prompt : json_first(prompt);
    for (size_t i = 0; i < n && rc == 0; i++, item = json_next(item))
        rc = read_prompt(a, item, add_special, params->echo, &out->list[i], e);
    return rc;
}
