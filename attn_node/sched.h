// sched.h: continuous batching: which rows a lane computes in its next step.
//
// A request is a sequence. It waits until a slot is free, then belongs to one lane until it ends or
// is preempted. Every step of a lane has one decode row for each of its sequences that is past its
// prompt, and prefill chunks of the others up to the token budget. KV pages are taken on demand;
// when they run out the youngest running sequence is preempted: its pages are freed, it waits at
// its old place and recomputes later. Nothing is failed for want of pages: a sequence that could
// never fit is refused at submit.
// Cancelling a sequence whose lane is in a step marks it; it goes at the end of that step.
// Thread: the worker's. Submit and cancel may allocate and free; planning never does.
#ifndef TANDEM_ATTN_NODE_SCHED_H
#define TANDEM_ATTN_NODE_SCHED_H

#include "engine/request.h"
#include "engine/status.h"
#include "kernels/kernels.h"

typedef struct sched sched;

typedef struct sched_args {
    size_t n_lanes;
    size_t max_sequences; // running, over all lanes
    size_t token_budget;  // rows of one step of one lane
    size_t lane_rows;     // rows from which a further lane is opened, >= 1
    size_t n_pages;
    size_t max_tokens; // of one sequence, prompt and output
} sched_args;

typedef struct sequence {
    uint64_t request;
    uint64_t order; // arrival; the youngest has the largest
    sampling_params params;
    logit_bias *bias;
    int32_t *tokens; // (n_prompt + max_tokens)
    size_t n_tokens, n_prompt;
    size_t n_computed; // tokens whose K and V are in the cache
    size_t n_scored;   // prompt tokens already reported, with prompt_logprobs
    int32_t *pages;    // (pages for n_prompt + max_tokens)
    size_t n_pages;
    int lane;       // -1: waiting
    bool in_step;   // its lane's current step has rows of it
    bool cancelled; // goes at the end of the step
    bool evict;     // is to be preempted at the end of the step
    struct sequence *next;
} sequence;

// Rows of a step. Arrays are the plan's own, of the scheduler's sizes.
typedef struct step_part {
    sequence *seq;
    size_t row0, n_rows; // rows of this step
    size_t first_token;  // token index of row0
    bool ended;          // its last token came in this step
} step_part;
typedef struct step_plan {
    size_t n_rows, n_parts;
    int32_t *ids, *positions, *kv_slot; // (token_budget)
    step_part *parts;                   // (max_sequences)
    kernel_sequence *sequences;         // (max_sequences), one for each part
} step_plan;

int sched_open(const sched_args *args, sched **out, error *err);
void sched_close(sched *s);
int step_plan_init(step_plan *plan, const sched_args *args, error *err);
void step_plan_free(step_plan *plan);

// Takes prompt (n_prompt, copied) and params (bias list copied). E_TOO_LARGE: can never fit.
int sched_submit(sched *s, uint64_t request, const int32_t *prompt, size_t n_prompt,
                 const sampling_params *params, error *err);
// Unknown requests are fine: they have ended already.
void sched_cancel(sched *s, uint64_t request);

// Fills the plan of a lane that is not in a step. n_rows 0: nothing to do now.
void sched_plan(sched *s, int lane, step_plan *plan);
// Appends the token that a step sampled for a sequence.
void sched_append(sequence *seq, int32_t token);
// Accounts for the computed rows of the plan; sequences that ended, or were cancelled meanwhile,
// are freed with their pages.
void sched_step_done(sched *s, step_plan *plan);

typedef struct sched_stats {
    size_t running, waiting, kv_tokens;
    uint64_t preemptions;
} sched_stats;
sched_stats sched_stats_get(const sched *s);

#endif
