#include "router/api_internal.h"

#include "engine/utf8.h"

#include <string.h>

// ---- Logprobs ----
typedef struct token_text {
    const char *bytes;
    size_t n;
} token_text;

static token_text text_of(const api *a, int32_t id) {
    token_text text = {"", 0};
    tokenizer_token_bytes(a->tokenizer, id, &text.bytes, &text.n);
    return text;
}

// A token that is no whole UTF-8 is named by its bytes, so that two of them stay distinct.
static void put_token(json_writer *out, token_text text) {
    if (utf8_is_valid(text.bytes, text.n)) {
        json_put_string_n(out, text.bytes, text.n);
        return;
    }
    json_put(out, "\"bytes:");
    for (size_t i = 0; i < text.n; i++)
        json_putf(out, "\\\\x%02x", (unsigned char)text.bytes[i]);
    json_put(out, "\"");
}

static void put_bytes(json_writer *out, token_text text) {
    json_put(out, ",\"bytes\":[");
    for (size_t i = 0; i < text.n; i++)
        json_putf(out, "%s%u", i ? "," : "", (unsigned char)text.bytes[i]);
    json_put(out, "]");
}

static int32_t count_top(const api_choice *choice, const token_event *event) {
    int32_t asked = choice->job->params.sampling.logprobs, n = event->n_top;
    if (n > REQUEST_MAX_TOP_LOGPROBS)
        n = REQUEST_MAX_TOP_LOGPROBS;
    return n < asked ? n : asked;
}

static void put_chat_logprob(json_writer *out, const api *a, int32_t id, float logprob) {
    token_text text = text_of(a, id);
    json_put(out, "{\"token\":");
    put_token(out, text);
    json_put(out, ",\"logprob\":");
    json_put_float(out, logprob);
    put_bytes(out, text);
}

static void add_chat_token(api_choice *choice, const token_event *event) {
    const api *a = choice->job->api;
    json_writer *out = &choice->tokens;
    json_put(out, choice->n_logprobs ? "," : "");
    put_chat_logprob(out, a, event->id, event->logprob);
    json_put(out, ",\"top_logprobs\":[");
    for (int32_t i = 0; i < count_top(choice, event); i++) {
        json_put(out, i ? "," : "");
        put_chat_logprob(out, a, event->top[i].id, event->top[i].logprob);
        json_put(out, "}");
    }
    json_put(out, "]}");
}

static bool same_text(token_text a, token_text b) {
    return a.n == b.n && memcmp(a.bytes, b.bytes, a.n) == 0;
}

// An object of the top tokens and the chosen one. Ids with equal text would make one key twice:
// the likelier one, which comes first, stays.
static void put_top_object(json_writer *out, const api_choice *choice, const token_event *event) {
    const api *a = choice->job->api;
    token_text seen[REQUEST_MAX_TOP_LOGPROBS + 1];
    int32_t n_seen = 0, n_top = count_top(choice, event);
    json_put(out, "{");
    for (int32_t i = 0; i <= n_top; i++) {
        bool chosen = i == n_top;
        token_text text = text_of(a, chosen ? event->id : event->top[i].id);
        bool twice = false;
        for (int32_t j = 0; j < n_seen && !twice; j++)
            twice = same_text(seen[j], text);
        if (twice)
            continue;
        json_put(out, n_seen ? "," : "");
        seen[n_seen++] = text;
        put_token(out, text);
        json_put(out, ":");
        json_put_float(out, chosen ? event->logprob : event->top[i].logprob);
    }
    json_put(out, "}");
}

static size_t count_codepoints(token_text text) {
    size_t n = 0;
    for (size_t i = 0, length; i < text.n; i += length, n++) {
        uint32_t codepoint;
        utf8_next(text.bytes + i, text.n - i, &length, &codepoint);
    }
    return n;
}

static void add_completion_token(api_choice *choice, const token_event *event) {
    const char *comma = choice->n_logprobs ? "," : "";
    token_text text = text_of(choice->job->api, event->id);
    json_put(&choice->tokens, comma);
    put_token(&choice->tokens, text);
    json_put(&choice->token_logprobs, comma);
    json_put(&choice->top_logprobs, comma);
    if (event->n_top < 0) { // the first token of a prompt
        json_put(&choice->token_logprobs, "null");
        json_put(&choice->top_logprobs, "null");
    } else {
        json_put_float(&choice->token_logprobs, event->logprob);
        put_top_object(&choice->top_logprobs, choice, event);
    }
    json_putf(&choice->text_offsets, "%s%zu", comma, choice->text_offset);
    choice->text_offset += count_codepoints(text);
}

void api_output_token(api_choice *choice, const token_event *event) {
    if (choice->job->params.chat)
        add_chat_token(choice, event);
    else
        add_completion_token(choice, event);
    choice->n_logprobs++;
}

static void put_array(json_writer *out, const char *name, const json_writer *elements) {
    json_put(out, name);
    json_put(out, "[");
    json_put_n(out, elements->text, elements->n);
    json_put(out, "]");
}

static void put_logprobs(json_writer *out, const api_choice *choice) {
    const api_params *params = &choice->job->params;
    json_put(out, ",\"logprobs\":");
    if (params->sampling.logprobs < 0 || (params->stream && choice->n_logprobs == 0)) {
        json_put(out, "null");
    } else if (params->chat) {
        put_array(out, "{\"content\":", &choice->tokens);
        json_put(out, ",\"refusal\":null}");
    } else {
        put_array(out, "{\"tokens\":", &choice->tokens);
        put_array(out, ",\"token_logprobs\":", &choice->token_logprobs);
        put_array(out, ",\"top_logprobs\":", &choice->top_logprobs);
        put_array(out, ",\"text_offset\":", &choice->text_offsets);
        json_put(out, "}");
    }
}

// ---- Shared pieces ----
static void put_opening(json_writer *out, const api_job *job, const char *object) {
    json_putf(out, "{\"id\":\"%s\",\"object\":\"%s\",\"created\":%lld,\"model\":", job->id, object,
              (long long)job->created);
    json_put_string(out, job->api->name);
    json_putf(out, ",\"system_fingerprint\":\"%s\",\"choices\":[", job->api->fingerprint);
}

static void put_finish(json_writer *out, const api_choice *choice) {
    if (choice->finish == FINISH_NONE)
        json_put(out, ",\"finish_reason\":null}");
    else
        json_putf(out, ",\"finish_reason\":\"%s\"}", finish_reason_name(choice->finish));
}

static void put_usage(json_writer *out, size_t n_prompt, size_t n_completion) {
    json_putf(out,
              ",\"usage\":{\"prompt_tokens\":%zu,\"completion_tokens\":%zu,\"total_tokens\":%zu}",
              n_prompt, n_completion, n_prompt + n_completion);
}

static void put_job_usage(json_writer *out, const api_job *job) {
    size_t n_completion = 0;
    for (size_t i = 0; i < job->n_choices; i++)
        n_completion += (size_t)job->choices[i].n_generated;
    put_usage(out, job->n_prompt_tokens, n_completion);
}

// ---- Streams ----
static const char *chunk_object(const api_job *job) {
    return job->params.chat ? "chat.completion.chunk" : "text_completion";
}

static void put_delta(json_writer *out, const api_choice *choice) {
    json_putf(out, "{\"index\":%zu,\"delta\":{", choice->index);
    if (!choice->sent)
        json_put(out, "\"role\":\"assistant\",");
    if (!choice->sent || choice->text.n || choice->n_logprobs) {
        json_put(out, "\"content\":");
        json_put_string_n(out, choice->text.text, choice->text.n);
    }
    json_put(out, "}");
}

void api_output_chunk(api_choice *choice, json_writer *out) {
    const api_job *job = choice->job;
    json_put(out, "data: ");
    put_opening(out, job, chunk_object(job));
    if (job->params.chat) {
        put_delta(out, choice);
    } else {
        json_putf(out, "{\"index\":%zu,\"text\":", choice->index);
        json_put_string_n(out, choice->text.text, choice->text.n);
    }
    put_logprobs(out, choice);
    put_finish(out, choice);
    json_put(out, "]");
    if (job->params.continuous_usage)
        put_usage(out, choice->n_prompt, (size_t)choice->n_generated);
    else if (job->params.include_usage)
        json_put(out, ",\"usage\":null");
    json_put(out, "}\n\n");
}

void api_output_usage_chunk(const api_job *job, json_writer *out) {
    json_put(out, "data: ");
    put_opening(out, job, chunk_object(job));
    json_put(out, "]");
    put_job_usage(out, job);
    json_put(out, "}\n\n");
}

// ---- Whole answers ----
void api_output_response(const api_job *job, json_writer *out) {
    put_opening(out, job, job->params.chat ? "chat.completion" : "text_completion");
    for (size_t i = 0; i < job->n_choices; i++) {
        const api_choice *choice = &job->choices[i];
        json_putf(out, "%s{\"index\":%zu,", i ? "," : "", choice->index);
        json_put(out, job->params.chat ? "\"message\":{\"role\":\"assistant\",\"content\":"
                                       : "\"text\":");
        json_put_string_n(out, choice->text.text, choice->text.n);
        json_put(out, job->params.chat ? ",\"refusal\":null}" : "");
        put_logprobs(out, choice);
        put_finish(out, choice);
    }
    json_put(out, "]");
    put_job_usage(out, job);
    json_put(out, "}");
}
