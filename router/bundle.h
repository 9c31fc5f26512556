// bundle.h: the running bundle as the HTTP side sees it: submit, cancel, events, state.
//
// The bundle owns launching, choice of worker, preemption-safe delivery. A request ends exactly
// once: by an event with finish != NONE or by on_error, whichever comes; nothing is called after
// it, nor after bundle_cancel returns.
// Thread: the router's loop. Callbacks come from the loop, never inside bundle_submit or
// bundle_cancel.
#ifndef TANDEM_ROUTER_BUNDLE_H
#define TANDEM_ROUTER_BUNDLE_H

#include "engine/plan.h"
#include "engine/request.h"

#include <uv.h>

typedef struct bundle bundle;

typedef enum bundle_state {
    BUNDLE_STARTING,
    BUNDLE_READY,
    BUNDLE_DRAINING,
    BUNDLE_FAILED
} bundle_state;

typedef struct bundle_submit_args {
    const int32_t *prompt; // (n_prompt) copied
    size_t n_prompt;
    const sampling_params *params; // copied
    void *user;
    void (*on_token)(void *user, const token_event *event);
    void (*on_error)(void *user, int code, const char *message);
} bundle_submit_args;

// E_FULL: the queue is full (say 503 with Retry-After). E_STATE: starting, draining or failed.
// E_TOO_LARGE: prompt plus max_tokens beyond what a worker's KV cache or the context holds.
int bundle_submit(bundle *b, const bundle_submit_args *args, uint64_t *request, error *err);
// The caller is no longer interested: pages are freed within one step.
void bundle_cancel(bundle *b, uint64_t request);

bundle_state bundle_state_get(const bundle *b);
const model_config *bundle_model(const bundle *b);
size_t bundle_max_model_len(const bundle *b); // tokens, prompt and output, of one request

typedef struct bundle_args {
    uv_loop_t *loop;
    const config *config; // outlive the bundle
    const plan *plan;
    void *user;
    void (*on_ready)(void *user);
    void (*on_failed)(void *user, const char *reason); // once; requests have ended with an error
} bundle_args;

// Launches the workers. on_ready or on_failed follows from the loop.
int bundle_open(const bundle_args *args, bundle **out, error *err);
// New requests are refused from now on; on_drained comes when no request is left.
void bundle_drain(bundle *b, void (*on_drained)(void *user), void *user);
// Ends what still runs with an error, then the workers; done, and the bundle is gone. A second
// call with `now` kills what has not ended yet.
void bundle_close(bundle *b, bool now, void (*done)(void *user), void *user);

typedef struct bundle_stats {
    size_t running, waiting;       // requests
    size_t kv_tokens, kv_capacity; // over all attention workers
    uint64_t prompt_tokens, generated_tokens, preemptions;
    uint64_t steps, wire_bytes; // over all attention workers; bytes of frames sent and received
} bundle_stats;
bundle_stats bundle_stats_get(const bundle *b);

#endif
