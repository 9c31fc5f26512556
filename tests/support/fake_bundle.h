// fake_bundle.h: a bundle without workers, for tests of the HTTP API.
//
// Every request gets the same script of token ids, one per step, and ends as a worker would: at a
// stop id, at max_tokens, or with "length" at the script's end. Steps are made by the test
// (fake_step) or, with fake_run_on, by the loop. Include it in one file of a program: it defines
// the functions of router/bundle.h.
#ifndef TANDEM_TESTS_SUPPORT_FAKE_BUNDLE_H
#define TANDEM_TESTS_SUPPORT_FAKE_BUNDLE_H

#include "router/bundle.h"

#include <stdlib.h>
#include <string.h>
#include <uv.h>

enum { FAKE_MAX_REQUESTS = 1024 };

typedef struct fake_request {
    bool live, cancelled;
    sampling_params params;
    logit_bias bias[REQUEST_MAX_LOGIT_BIAS];
    int32_t *prompt; // (n_prompt) owned
    size_t n_prompt, prompt_sent, n_sent;
    void *user;
    void (*on_token)(void *user, const token_event *event);
    void (*on_error)(void *user, int code, const char *message);
} fake_request;

struct bundle {
    model_config model;
    size_t max_model_len;
    bundle_state state;
    int submit_rc; // not E_OK: what the next submissions give
    const int32_t *script;
    size_t n_script;
    size_t n_requests; // since the last fake_reset
    fake_request requests[FAKE_MAX_REQUESTS];
    uv_idle_t idle;
};

int bundle_submit(bundle *b, const bundle_submit_args *args, uint64_t *request, error *err) {
    if (b->submit_rc != E_OK)
        return error_set(err, b->submit_rc, "the fake says: %s", status_text(b->submit_rc));
    if (b->n_requests == FAKE_MAX_REQUESTS)
        return error_set(err, E_FULL, "the fake is full");
    fake_request *r = &b->requests[b->n_requests];
    *r = (fake_request){.live = true, .params = *args->params, .n_prompt = args->n_prompt};
    memcpy(r->bias, args->params->logit_bias,
           (size_t)args->params->n_logit_bias * sizeof r->bias[0]);
    r->params.logit_bias = r->bias;
    r->prompt = malloc(args->n_prompt * sizeof *r->prompt);
    memcpy(r->prompt, args->prompt, args->n_prompt * sizeof *r->prompt);
    r->user = args->user;
    r->on_token = args->on_token;
    r->on_error = args->on_error;
    *request = ++b->n_requests;
    return E_OK;
}

void bundle_cancel(bundle *b, uint64_t request) {
    fake_request *r = &b->requests[request - 1];
    if (!r->live)
        abort(); // it has ended already
    r->live = false;
    r->cancelled = true;
}

bundle_state bundle_state_get(const bundle *b) {
    return b->state;
}

const model_config *bundle_model(const bundle *b) {
    return &b->model;
}

size_t bundle_max_model_len(const bundle *b) {
    return b->max_model_len;
}

bundle_stats bundle_stats_get(const bundle *b) {
    bundle_stats stats = {.kv_tokens = 5, .kv_capacity = 10, .preemptions = 3};
    for (size_t i = 0; i < b->n_requests; i++) {
        stats.running += b->requests[i].live;
        stats.prompt_tokens += b->requests[i].n_prompt;
        stats.generated_tokens += b->requests[i].n_sent;
    }
    return stats;
}

static inline void fake_fill_top(token_event *event, int32_t n_top) {
    event->logprob = -0.5f;
    event->n_top = n_top;
    for (int32_t i = 0; i < n_top; i++)
        event->top[i] = (token_logprob){event->id + i, -0.5f - (float)i};
}

// One token for one request; false when it has none left to give.
static inline bool fake_step_one(bundle *b, size_t i) {
    fake_request *r = &b->requests[i];
    if (!r->live)
        return false;
    token_event event = {.request = i + 1, .n_top = -1};
    if (r->params.prompt_logprobs && r->prompt_sent < r->n_prompt) {
        event.is_prompt = true;
        event.id = r->prompt[r->prompt_sent];
        event.position = (int32_t)r->prompt_sent;
        if (r->prompt_sent++)
            fake_fill_top(&event, r->params.logprobs);
        if (r->prompt_sent == r->n_prompt && r->params.max_tokens == 0)
            event.finish = FINISH_LENGTH;
    } else {
        event.id = r->n_sent < b->n_script ? b->script[r->n_sent] : 0;
        event.position = (int32_t)(r->n_prompt + r->n_sent++);
        if (r->params.logprobs >= 0)
            fake_fill_top(&event, r->params.logprobs);
        if (r->n_sent == (size_t)r->params.max_tokens || r->n_sent >= b->n_script)
            event.finish = FINISH_LENGTH;
        for (int32_t k = 0; k < r->params.n_stop_ids; k++)
            if (r->params.stop_ids[k] == event.id && r->n_sent > (size_t)r->params.min_tokens)
                event.finish = FINISH_STOP;
    }
    r->live = event.finish == FINISH_NONE;
    r->on_token(r->user, &event);
    return true;
}

static inline bool fake_step(bundle *b) {
    bool any = false;
    for (size_t i = 0; i < b->n_requests; i++)
        any |= fake_step_one(b, i);
    return any;
}

static inline void fake_fail(bundle *b, size_t i, int code, const char *message) {
    b->requests[i].live = false;
    b->requests[i].on_error(b->requests[i].user, code, message);
}

static inline size_t fake_n_live(const bundle *b) {
    size_t n = 0;
    for (size_t i = 0; i < b->n_requests; i++)
        n += b->requests[i].live;
    return n;
}

static inline void fake_on_idle(uv_idle_t *idle) {
    fake_step(idle->data);
}

// Steps once per turn of the loop, until fake_run_off.
static inline void fake_run_on(bundle *b, uv_loop_t *loop) {
    uv_idle_init(loop, &b->idle);
    b->idle.data = b;
    uv_idle_start(&b->idle, fake_on_idle);
}

static inline void fake_run_off(bundle *b) {
    uv_close((uv_handle_t *)&b->idle, NULL);
}

static inline void fake_reset(bundle *b) {
    for (size_t i = 0; i < b->n_requests; i++)
        free(b->requests[i].prompt);
    b->n_requests = 0;
}

#endif
