// request.h: one generation request as the router hands it to an attention worker, and what comes
// back. Shared by router and attn_node; the messages that carry them are in engine/messages.h.
#ifndef TANDEM_ENGINE_REQUEST_H
#define TANDEM_ENGINE_REQUEST_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { REQUEST_MAX_TOP_LOGPROBS = 20, REQUEST_MAX_STOP_IDS = 16, REQUEST_MAX_LOGIT_BIAS = 300 };

typedef struct logit_bias {
    int32_t id;
    float bias;
} logit_bias;

typedef struct sampling_params {
    float temperature;                         // 0: greedy
    float top_p;                               // 1: off
    float min_p;                               // 0: off
    int32_t top_k;                             // 0: off
    float presence_penalty, frequency_penalty; // 0: off
    float repetition_penalty;                  // 1: off
    uint64_t seed;
    int32_t max_tokens;   // new tokens at most, >= 1 (0 only with prompt_logprobs: score alone)
    int32_t min_tokens;   // stop ids are masked before this many
    int32_t logprobs;     // -1: none; 0..20: chosen token and this many top tokens
    bool prompt_logprobs; // logprobs of the prompt's own tokens too (echo)
    int32_t n_stop_ids;   // ids that end the request with "stop"; the id itself is reported
    int32_t stop_ids[REQUEST_MAX_STOP_IDS];
    int32_t n_logit_bias;
    const logit_bias *logit_bias; // owned by the holder of the params
} sampling_params;

typedef struct token_logprob {
    int32_t id;
    float logprob;
} token_logprob;

#define FINISH_MAP(X)                                                                              \
    X(NONE, "")                                                                                    \
    X(STOP, "stop")                                                                                \
    X(LENGTH, "length")                                                                            \
    X(ABORT, "abort")                                                                              \
    X(ERROR, "error")

typedef enum finish_reason {
#define X(name, text) FINISH_##name,
    FINISH_MAP(X)
#undef X
} finish_reason;

static inline const char *finish_reason_name(finish_reason reason) {
    static const char *const names[] = {
#define X(name, text) text,
        FINISH_MAP(X)
#undef X
    };
    return names[reason];
}

// One token of a request. position counts prompt and generated tokens from 0; with
// prompt_logprobs the prompt's tokens come first, as events with is_prompt (the first token of a
// prompt has n_top = -1: it has no logprob).
typedef struct token_event {
    uint64_t request;
    int32_t id;
    int32_t position;
    bool is_prompt;
    finish_reason finish; // not NONE: the request has ended with this token
    float logprob;
    int32_t n_top; // -1: no logprobs asked
    token_logprob top[REQUEST_MAX_TOP_LOGPROBS];
} token_event;

#endif
