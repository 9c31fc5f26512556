// api_internal.h: what the files of the API share; nobody else includes it.
//
// A request is parsed into api_params and prompts (api_parse.c, api_completions.c, api_chat.c),
// runs as an api_job with one api_choice per submission to the bundle (api_job.c), and is put into
// words by api_output.c. Thread: the loop's.
#ifndef TANDEM_ROUTER_API_INTERNAL_H
#define TANDEM_ROUTER_API_INTERNAL_H

#include "engine/json.h"
#include "router/api.h"
#include "router/api_stop.h"
#include "router/json_writer.h"

#include <time.h>

enum {
    API_MAX_N = 16,
    API_MAX_CHOICES = 256, // prompts times n of one request
    API_MAX_COMPLETION_LOGPROBS = REQUEST_MAX_TOP_LOGPROBS,
    API_DEFAULT_MAX_TOKENS = 16,
    API_ID_BYTES = 48,
    API_ECHO_BYTES = 64 // of the client's own words in an error
};

// ---- Errors, in the OpenAI shape ----
typedef struct api_error {
    int status;
    char message[400];
    char param[64];   // "": null
    const char *code; // NULL: null
} api_error;

// Fills e and returns status.
int api_error_set(api_error *e, int status, const char *code, const char *param, const char *format,
                  ...) __attribute__((format(printf, 5, 6)));
void api_error_body(const api_error *e, json_writer *out);
// For what bundle_submit or on_error say.
int api_error_from_bundle(api_error *e, int code, const char *text);

// ---- A generation request ----
typedef struct api_params {
    bool chat;
    sampling_params sampling; // logit_bias points to bias below
    logit_bias bias[REQUEST_MAX_LOGIT_BIAS];
    stop_strings stops;
    int64_t n, seed, top_k, min_tokens;
    int64_t max_tokens, max_completion_tokens; // -1: not given
    int64_t logprobs, top_logprobs;            // -1: not given
    bool has_seed, want_logprobs;              // want_logprobs: chat's "logprobs": true
    bool stream, include_usage, continuous_usage, echo;
    bool ignore_eos;   // the model's and the format's end tokens do not stop
    bool keep_special; // special tokens stay in the text
} api_params;

typedef struct api_prompt {
    token_ids ids;
    char *text; // what echo repeats; owned, NULL without echo
    size_t n_text;
} api_prompt;

typedef struct api_prompts {
    api_prompt *list; // (n) owned
    size_t n;
} api_prompts;

// Each returns 0 or the status of the error it filled.
int api_parse_params(const api *a, const json_value *body, api_params *out, api_error *e);
// Turns max_tokens and the model's context into sampling.max_tokens, for the longest prompt.
int api_limit_tokens(const api *a, api_params *params, size_t n_prompt, api_error *e);
int api_check_model(const api *a, const json_value *body, api_error *e);
// Refuses a text that cannot fit before it is tokenized.
int api_check_text(const api *a, size_t n_bytes, const char *param, api_error *e);
// A text field that must be an array of token ids of this model.
int api_parse_ids(const api *a, const json_value *array, const char *param, token_ids *out,
                  api_error *e);
int api_completion_prompts(const api *a, const json_value *body, const api_params *params,
                           api_prompts *out, api_error *e);
int api_chat_prompts(const api *a, const json_value *body, api_prompts *out, api_error *e);
void api_params_free(api_params *params);
void api_prompts_free(api_prompts *prompts);

// ---- A running generation ----
typedef struct api_job api_job;

typedef struct api_choice {
    api_job *job;
    size_t index;
    size_t n_prompt;  // tokens
    uint64_t request; // in the bundle, while running
    bool running;
    finish_reason finish; // NONE until its end
    detok *detok;
    json_writer held; // text that may become a stop string
    json_writer text; // of a stream: not yet sent; else: all
    // Elements of the arrays of logprobs, not yet sent or all; chat uses the first alone.
    json_writer tokens, token_logprobs, top_logprobs, text_offsets;
    size_t n_logprobs;  // elements in them
    size_t text_offset; // code points of all tokens so far
    int32_t n_generated;
    bool sent; // a chunk of it has gone out
} api_choice;

struct api_job {
    api *api;
    api_job *previous, *next;
    http_request *http; // NULL once answered or aborted
    api_params params;
    char id[API_ID_BYTES];
    time_t created;
    size_t n_prompt_tokens;
    bool stream_begun;
    uint64_t last_write_ms; // of the loop's clock
    size_t n_choices, n_running;
    api_choice *choices; // (n_choices) owned
};

void api_job_start(api *a, http_request *request, api_params *params, api_prompts *prompts);
void api_job_keep_alive(api_job *job, uint64_t now_ms); // a comment line after a long silence
void api_job_stop(api_job *job); // ends it with an error: the server shuts down

// ---- Words (api_output.c) ----
void api_output_token(api_choice *choice, const token_event *event); // logprobs of one token
void api_output_chunk(api_choice *choice, json_writer *out);         // an SSE event
void api_output_usage_chunk(const api_job *job, json_writer *out);   // an SSE event
void api_output_response(const api_job *job, json_writer *out);

// ---- The API ----
struct api {
    uv_loop_t *loop;
    http_server *http;
    bundle *bundle;
    const tokenizer *tokenizer;
    const chat_format *chat;
    char *name, *root; // owned
    char *key;         // owned; NULL: open
    char fingerprint[24];
    time_t created;
    size_t max_token_bytes; // of the longest token
    token_ids chat_stops;   // ids that end a chat turn
    uint32_t keep_alive_ms;
    uv_timer_t timer;       // runs while there are jobs
    uv_timer_t close_timer; // the end of the grace of api_close
    int n_timers;           // not yet closed
    api_job *jobs;
    size_t n_jobs;
    bool draining;
    json_writer scratch;                 // of the event being written
    uint64_t finished[FINISH_ERROR + 1]; // submissions by their end
    uint64_t responses[6];               // by status / 100
    uint64_t client_gone;
    void (*on_closed)(void *user);
    void *closed_user;
};

// Answers and counts.
void api_respond(api *a, http_request *request, int status, const char *headers,
                 const json_writer *body);
void api_respond_error(api *a, http_request *request, const api_error *e);
// 0, or 503 while the bundle cannot take a generation.
int api_check_ready(const api *a, api_error *e);
void api_make_id(const char *prefix, char out[API_ID_BYTES]);
void api_jobs_changed(api *a); // starts or stops the timer

// api_info.c
void api_get_models(api *a, http_request *request);
void api_get_model(api *a, http_request *request, const char *id);
void api_get_version(api *a, http_request *request);
void api_get_health(api *a, http_request *request);
void api_get_ready(api *a, http_request *request);
void api_get_metrics(api *a, http_request *request);
// api_tokens.c
void api_post_tokenize(api *a, http_request *request, const json_value *body);
void api_post_detokenize(api *a, http_request *request, const json_value *body);

#endif
