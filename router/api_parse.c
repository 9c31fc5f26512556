#include "router/api_internal.h"

#include "engine/log.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

// ---- Plain fields, one row each ----
typedef enum field_type { FIELD_FLOAT, FIELD_INT, FIELD_BOOL } field_type;
enum { IN_COMPLETIONS = 1, IN_CHAT = 2, IN_BOTH = 3 };

typedef struct field_row {
    const char *key;
    field_type type;
    int where;
    double min, max;
    bool above_min; // min itself is refused
    size_t offset;
} field_row;

#define AT(field) offsetof(api_params, field)
static const field_row fields[] = {
    {"temperature", FIELD_FLOAT, IN_BOTH, 0, 2, false, AT(sampling.temperature)},
    {"top_p", FIELD_FLOAT, IN_BOTH, 0, 1, true, AT(sampling.top_p)},
    {"min_p", FIELD_FLOAT, IN_BOTH, 0, 1, false, AT(sampling.min_p)},
    {"top_k", FIELD_INT, IN_BOTH, -1, INT32_MAX, false, AT(top_k)},
    {"presence_penalty", FIELD_FLOAT, IN_BOTH, -2, 2, false, AT(sampling.presence_penalty)},
    {"frequency_penalty", FIELD_FLOAT, IN_BOTH, -2, 2, false, AT(sampling.frequency_penalty)},
    {"repetition_penalty", FIELD_FLOAT, IN_BOTH, 0, 10, true, AT(sampling.repetition_penalty)},
    {"n", FIELD_INT, IN_BOTH, 1, API_MAX_N, false, AT(n)},
    {"max_tokens", FIELD_INT, IN_BOTH, 0, INT32_MAX, false, AT(max_tokens)},
    {"max_completion_tokens", FIELD_INT, IN_CHAT, 1, INT32_MAX, false, AT(max_completion_tokens)},
    {"min_tokens", FIELD_INT, IN_BOTH, 0, INT32_MAX, false, AT(min_tokens)},
    {"ignore_eos", FIELD_BOOL, IN_BOTH, 0, 1, false, AT(ignore_eos)},
    {"logprobs", FIELD_INT, IN_COMPLETIONS, 0, API_MAX_COMPLETION_LOGPROBS, false, AT(logprobs)},
    {"logprobs", FIELD_BOOL, IN_CHAT, 0, 1, false, AT(want_logprobs)},
    {"top_logprobs", FIELD_INT, IN_CHAT, 0, REQUEST_MAX_TOP_LOGPROBS, false, AT(top_logprobs)},
    {"echo", FIELD_BOOL, IN_COMPLETIONS, 0, 1, false, AT(echo)},
    {"stream", FIELD_BOOL, IN_BOTH, 0, 1, false, AT(stream)},
};
#undef AT
enum { N_FIELDS = sizeof fields / sizeof fields[0] };

// Fields that are read elsewhere, or known and of no effect.
static const char *const other_fields[] = {"model",
                                           "prompt",
                                           "seed",
                                           "stop",
                                           "user",
                                           "stream_options",
                                           "stop_token_ids",
                                           "logit_bias",
                                           "priority",
                                           "best_of",
                                           "suffix",
                                           "tools",
                                           "functions",
                                           "response_format",
                                           "add_special_tokens",
                                           "skip_special_tokens",
                                           "tool_choice",
                                           "messages",
                                           "add_generation_prompt"};
enum { N_OTHER_FIELDS = sizeof other_fields / sizeof other_fields[0] };

static int read_float(const field_row *row, const json_value *value, float *out, api_error *e) {
    double number;
    // The comparison is made on the float, since that is what the worker gets.
    if (json_as_double(value, &number) && (float)number >= (float)row->min &&
        (float)number <= (float)row->max && !(row->above_min && (float)number <= (float)row->min)) {
        *out = (float)number;
        return 0;
    }
    return api_error_set(e, 400, NULL, row->key, "%s must be a number %s %g and at most %g",
                         row->key, row->above_min ? "above" : "of at least", row->min, row->max);
}

static int read_int(const field_row *row, const json_value *value, int64_t *out, api_error *e) {
    int64_t number;
    if (json_as_int(value, &number) && (double)number >= row->min && (double)number <= row->max) {
        *out = number;
        return 0;
    }
    return api_error_set(e, 400, NULL, row->key, "%s must be an integer from %.0f to %.0f",
                         row->key, row->min, row->max);
}

static int read_bool(const char *key, const json_value *value, bool *out, api_error *e) {
    if (json_as_bool(value, out))
        return 0;
    return api_error_set(e, 400, NULL, key, "%s must be true or false", key);
}

static int read_field(const field_row *row, const json_value *value, api_params *out,
                      api_error *e) {
    void *to = (char *)out + row->offset;
    switch (row->type) {
    case FIELD_FLOAT:
        return read_float(row, value, to, e);
    case FIELD_INT:
        return read_int(row, value, to, e);
    case FIELD_BOOL:
        return read_bool(row->key, value, to, e);
    }
    return 0;
}

// ---- Fields with a shape of their own ----
static int read_stop(const json_value *value, api_params *out, api_error *e) {
    const char *text;
    bool single = json_as_string(value, &text);
    if (!single && !json_is_array(value))
        return api_error_set(e, 400, NULL, "stop", "stop must be a string or a list of strings");
    for (const json_value *item = single ? value : json_first(value); item;
         item = single ? NULL : json_next(item)) {
        if (!json_as_string(item, &text) || !*text || strlen(text) > API_MAX_STOP_BYTES)
            return api_error_set(e, 400, NULL, "stop",
                                 "a stop string must be a string of 1 to %d bytes",
                                 API_MAX_STOP_BYTES);
        if (out->stops.n == API_MAX_STOPS)
            return api_error_set(e, 400, NULL, "stop", "stop takes at most %d strings",
                                 API_MAX_STOPS);
        char *copy = strdup(text);
        if (!copy)
            return api_error_set(e, 500, NULL, NULL, "out of memory");
        out->stops.texts[out->stops.n++] = copy;
    }
    return 0;
}

// Clients send seeds of 64 bits. JSON numbers are read as doubles, so that neighbours above 2^53
// may be one seed; a seed still gives the same text every time.
static int read_seed(const json_value *value, int64_t *out, api_error *e) {
    const double limit = 0x1p63;
    double number;
    if (json_as_double(value, &number) && floor(number) == number && fabs(number) <= limit) {
        *out = number < limit ? (int64_t)number : INT64_MAX;
        return 0;
    }
    return api_error_set(e, 400, NULL, "seed", "seed must be an integer of 64 bits");
}

static bool is_token(const api *a, int64_t id) {
    return id >= 0 && (uint64_t)id < bundle_model(a->bundle)->vocab;
}

static bool add_stop_id(sampling_params *sampling, int32_t id) {
    for (int32_t i = 0; i < sampling->n_stop_ids; i++)
        if (sampling->stop_ids[i] == id)
            return true;
    if (sampling->n_stop_ids == REQUEST_MAX_STOP_IDS)
        return false;
    sampling->stop_ids[sampling->n_stop_ids++] = id;
    return true;
}

// The model's own end tokens come first, then the chat format's, then the request's.
static int read_stop_ids(const api *a, const json_value *value, api_params *out, api_error *e) {
    const model_config *model = bundle_model(a->bundle);
    sampling_params *sampling = &out->sampling;
    if (!out->ignore_eos) {
        for (int i = 0; i < model->n_eos; i++)
            add_stop_id(sampling, model->eos[i]);
        for (size_t i = 0; i < a->chat_stops.n && out->chat; i++)
            add_stop_id(sampling, a->chat_stops.ids[i]);
    }
    int n_own = sampling->n_stop_ids;
    if (json_is_null(value))
        return 0;
    if (!json_is_array(value))
        return api_error_set(e, 400, NULL, "stop_token_ids",
                             "stop_token_ids must be a list of token ids");
    for (const json_value *item = json_first(value); item; item = json_next(item)) {
        int64_t id;
        if (!json_as_int(item, &id) || !is_token(a, id))
            return api_error_set(
                e, 400, NULL, "stop_token_ids",
                "stop_token_ids has something that is not a token id of this model");
        if (!add_stop_id(sampling, (int32_t)id))
            return api_error_set(e, 400, NULL, "stop_token_ids",
                                 "stop_token_ids takes at most %d ids beside the model's own",
                                 REQUEST_MAX_STOP_IDS - n_own);
    }
    return 0;
}

static int read_logit_bias(const api *a, const json_value *value, api_params *out, api_error *e) {
    if (!json_is_object(value))
        return api_error_set(e, 400, NULL, "logit_bias",
                             "logit_bias must be an object of token ids and numbers");
    for (const json_value *item = json_first(value); item; item = json_next(item)) {
        const char *key = json_key(item);
        size_t n_digits = strspn(key, "0123456789");
        double bias;
        if (n_digits == 0 || n_digits > 9 || key[n_digits] || !is_token(a, atoi(key)))
            return api_error_set(e, 400, NULL, "logit_bias",
                                 "logit_bias has a key that is not a token id of this model: %.*s",
                                 API_ECHO_BYTES, key);
        if (!json_as_double(item, &bias) || bias < -100 || bias > 100)
            return api_error_set(e, 400, NULL, "logit_bias",
                                 "logit_bias of token %.*s must be a number from -100 to 100",
                                 API_ECHO_BYTES, key);
        if (out->sampling.n_logit_bias == REQUEST_MAX_LOGIT_BIAS)
            return api_error_set(e, 400, NULL, "logit_bias", "logit_bias takes at most %d tokens",
                                 REQUEST_MAX_LOGIT_BIAS);
        out->bias[out->sampling.n_logit_bias++] = (logit_bias){atoi(key), (float)bias};
    }
    return 0;
}

static int read_stream_options(const json_value *value, api_params *out, api_error *e) {
    if (!json_is_object(value))
        return api_error_set(e, 400, NULL, "stream_options", "stream_options must be an object");
    if (!out->stream)
        return api_error_set(e, 400, NULL, "stream_options",
                             "stream_options is only allowed when stream is true");
    const json_value *item = json_get(value, "include_usage");
    int rc = json_is_null(item) ? 0 : read_bool("stream_options", item, &out->include_usage, e);
    item = json_get(value, "continuous_usage_stats");
    if (rc == 0 && !json_is_null(item))
        rc = read_bool("stream_options", item, &out->continuous_usage, e);
    out->continuous_usage &= out->include_usage;
    return rc;
}

// What belongs to the OpenAI API and is not served here is refused, not dropped.
static int refuse_unserved(const json_value *body, api_error *e) {
    int64_t best_of;
    const json_value *value = json_get(body, "best_of");
    if (!json_is_null(value) && (!json_as_int(value, &best_of) || best_of != 1))
        return api_error_set(e, 400, NULL, "best_of", "best_of other than 1 is not supported");
    const char *text;
    value = json_get(body, "suffix");
    if (!json_is_null(value) && (!json_as_string(value, &text) || *text))
        return api_error_set(e, 400, NULL, "suffix", "suffix is not supported");
    static const char *const tools[] = {"tools", "functions"};
    for (size_t i = 0; i < sizeof tools / sizeof tools[0]; i++) {
        value = json_get(body, tools[i]);
        if (!json_is_null(value) && !(json_is_array(value) && json_count(value) == 0))
            return api_error_set(e, 400, NULL, tools[i], "%s are not supported", tools[i]);
    }
    value = json_get(body, "response_format");
    if (json_is_null(value))
        return 0;
    if (!json_is_object(value) || !json_as_string(json_get(value, "type"), &text) ||
        strcmp(text, "text") != 0)
        return api_error_set(e, 400, NULL, "response_format",
                             "response_format other than {\"type\": \"text\"} is not supported");
    return 0;
}

static bool is_known(const char *key) {
    for (size_t i = 0; i < N_FIELDS; i++)
        if (strcmp(fields[i].key, key) == 0)
            return true;
    for (size_t i = 0; i < N_OTHER_FIELDS; i++)
        if (strcmp(other_fields[i], key) == 0)
            return true;
    return false;
}

static void log_unknown(const json_value *body) {
    const char *first = NULL;
    size_t n = 0;
    for (const json_value *item = json_first(body); item; item = json_next(item)) {
        if (is_known(json_key(item)))
            continue;
        first = first ? first : json_key(item);
        n++;
    }
    if (n) {
        error line;
        error_set(&line, E_OK, "%.*s", API_ECHO_BYTES, first);
        log_debug("api: %zu unknown field(s) ignored, the first is '%s'", n, line.text);
    }
}

static void set_defaults(const api *a, api_params *out) {
    const model_config *model = bundle_model(a->bundle);
    out->n = 1;
    out->max_tokens = out->max_completion_tokens = out->logprobs = out->top_logprobs = -1;
    sampling_params *sampling = &out->sampling;
    // The model's own advice, where generation_config.json gives one (NAN or -1 where not).
    sampling->temperature = model->temperature >= 0 ? model->temperature : 1;
    sampling->top_p = model->top_p > 0 ? model->top_p : 1;
    sampling->repetition_penalty = model->repetition_penalty > 0 ? model->repetition_penalty : 1;
    out->top_k = model->top_k_sampling > 0 ? model->top_k_sampling : 0;
    sampling->logit_bias = out->bias;
}

static int read_shaped(const api *a, const json_value *body, api_params *out, api_error *e) {
    const json_value *value = json_get(body, "stop");
    int rc = json_is_null(value) ? 0 : read_stop(value, out, e);
    if (rc == 0)
        rc = read_stop_ids(a, json_get(body, "stop_token_ids"), out, e);
    if (rc == 0 && !json_is_null(value = json_get(body, "logit_bias")))
        rc = read_logit_bias(a, value, out, e);
    if (rc == 0 && !json_is_null(value = json_get(body, "stream_options")))
        rc = read_stream_options(value, out, e);
    if (rc == 0 && !json_is_null(value = json_get(body, "seed"))) {
        out->has_seed = true;
        rc = read_seed(value, &out->seed, e);
    }
    if (rc == 0 && !json_is_null(value = json_get(body, "skip_special_tokens"))) {
        bool skip = true;
        rc = read_bool("skip_special_tokens", value, &skip, e);
        out->keep_special = !skip;
    }
    return rc;
}

static int finish_params(api_params *out, api_error *e) {
    sampling_params *sampling = &out->sampling;
    sampling->top_k = out->top_k < 0 ? 0 : (int32_t)out->top_k;
    sampling->min_tokens = (int32_t)out->min_tokens;
    sampling->logprobs = (int32_t)out->logprobs;
    if (out->chat) {
        if (out->top_logprobs >= 0 && !out->want_logprobs)
            return api_error_set(e, 400, NULL, "top_logprobs", "top_logprobs needs logprobs true");
        sampling->logprobs = !out->want_logprobs      ? -1
                             : out->top_logprobs >= 0 ? (int32_t)out->top_logprobs
                                                      : 0;
        if (out->max_completion_tokens >= 0)
            out->max_tokens = out->max_completion_tokens;
    }
    sampling->prompt_logprobs = out->echo && sampling->logprobs >= 0;
    if (out->max_tokens == 0 && !out->echo)
        return api_error_set(e, 400, NULL, "max_tokens", "max_tokens must be at least 1%s",
                             out->chat ? "" : " (0 is for echo)");
    return 0;
}

int api_parse_params(const api *a, const json_value *body, api_params *out, api_error *e) {
    int where = out->chat ? IN_CHAT : IN_COMPLETIONS;
    set_defaults(a, out);
    int rc = refuse_unserved(body, e);
    for (size_t i = 0; i < N_FIELDS && rc == 0; i++) {
        const json_value *value = json_get(body, fields[i].key);
        if ((fields[i].where & where) && !json_is_null(value))
            rc = read_field(&fields[i], value, out, e);
    }
    if (rc == 0)
        rc = read_shaped(a, body, out, e);
    if (rc == 0)
        rc = finish_params(out, e);
    if (rc == 0)
        log_unknown(body);
    return rc;
}

void api_params_free(api_params *params) {
    stop_strings_free(&params->stops);
}

// ---- Checks that need the model ----
int api_limit_tokens(const api *a, api_params *params, size_t n_prompt, api_error *e) {
    size_t context = bundle_max_model_len(a->bundle);
    const char *param = params->chat ? "messages" : "prompt";
    bool given = params->max_tokens >= 0;
    size_t n_new = given ? (size_t)params->max_tokens : 1;
    if (n_prompt == 0)
        return api_error_set(e, 400, NULL, param, "the prompt has no tokens");
    if (n_prompt + n_new > context)
        return api_error_set(e, 400, "context_length_exceeded", param,
                             "This model's maximum context length is %zu tokens. The request needs "
                             "%zu (%zu in the %s, %zu in the completion); shorten the %s%s.",
                             context, n_prompt + n_new, n_prompt, param, n_new, param,
                             given ? " or max_tokens" : "");
    if (!given) {
        n_new = context - n_prompt;
        if (!params->chat && n_new > API_DEFAULT_MAX_TOKENS)
            n_new = API_DEFAULT_MAX_TOKENS;
    }
    if (params->min_tokens > (int64_t)n_new)
        return api_error_set(e, 400, NULL, "min_tokens", "min_tokens is above max_tokens (%zu)",
                             n_new);
    params->sampling.max_tokens = (int32_t)n_new;
    return 0;
}

int api_check_model(const api *a, const json_value *body, api_error *e) {
    const json_value *value = json_get(body, "model");
    const char *name;
    if (json_is_null(value))
        return 0; // there is only one
    if (!json_as_string(value, &name))
        return api_error_set(e, 400, NULL, "model", "model must be a string");
    if (strcmp(name, a->name) == 0)
        return 0;
    return api_error_set(e, 404, "model_not_found", "model",
                         "The model '%.*s' does not exist; this server has '%.*s'", API_ECHO_BYTES,
                         name, API_ECHO_BYTES, a->name);
}

int api_check_text(const api *a, size_t n_bytes, const char *param, api_error *e) {
    // Normalisation composes at most three code points of equal length into one.
    size_t max_bytes = 3 * a->max_token_bytes * bundle_max_model_len(a->bundle);
    if (n_bytes <= max_bytes && n_bytes <= TOKENIZER_TEXT_MAX)
        return 0;
    return api_error_set(e, 400, "context_length_exceeded", param,
                         "This model's maximum context length is %zu tokens; %zu bytes of text "
                         "cannot fit. Shorten the %s.",
                         bundle_max_model_len(a->bundle), n_bytes, param);
}

int api_parse_ids(const api *a, const json_value *array, const char *param, token_ids *out,
                  api_error *e) {
    for (const json_value *item = json_first(array); item; item = json_next(item)) {
        int64_t id;
        if (!json_as_int(item, &id) || !is_token(a, id))
            return api_error_set(e, 400, NULL, param,
                                 "%s: element %zu is not a token id of this model (0 to %zu)",
                                 param, out->n, bundle_model(a->bundle)->vocab - 1);
        if (token_ids_push(out, (int32_t)id) != E_OK)
            return api_error_set(e, 500, NULL, NULL, "out of memory");
    }
    return 0;
}
