// sampler.h: from a row of logits to a token and its log-probabilities.
//
// The draw depends on (seed, position) and the row alone, never on the batch. Log-probabilities are
// those of the model's own distribution, before penalties, temperature and truncation.
// Thread: one thread; the scratch is made at open and nothing allocates afterwards.
#ifndef TANDEM_ATTN_NODE_SAMPLER_H
#define TANDEM_ATTN_NODE_SAMPLER_H

#include "engine/request.h"
#include "engine/status.h"

typedef struct sampler sampler;

int sampler_open(size_t vocab, sampler **out, error *err);
void sampler_close(sampler *s);

typedef struct sampler_args {
    const sampling_params *params;
    const float *logits;   // (vocab)
    const int32_t *tokens; // (n_tokens) prompt, then generated: what penalties look at
    size_t n_tokens, n_prompt;
    size_t n_generated; // before this token, for min_tokens
} sampler_args;

// Fills id, logprob, n_top and top of the event.
void sampler_sample(sampler *s, const sampler_args *args, token_event *event);

// Log-probability of a given token (a prompt's own) with the top list; fills the same fields.
void sampler_score(sampler *s, const float *logits, int32_t id, int32_t n_top, token_event *event);

#endif
