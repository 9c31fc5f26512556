#include "router/bundle.h"

#include "engine/log.h"
#include "router/fleet.h"

#include <stdlib.h>

enum { SLOT_BITS = 20 }; // of a request's id; the rest counts submits, so that ids never return

typedef struct request {
    uint64_t id; // 0: the slot is free
    uint32_t worker;
    size_t weight; // predicted KV load: prompt and half of the tokens it may generate
    bool seen;     // a token has come: its prompt has been computed
    size_t n_prompt;
    void *user;
    void (*on_token)(void *user, const token_event *event);
    void (*on_error)(void *user, int code, const char *message);
} request;

typedef struct attention_worker {
    size_t n_requests, weight;
    message_load load;
} attention_worker;

struct bundle {
    bundle_args args;
    fleet *fleet; // NULL once it is gone
    bundle_state state;
    char failure[512];
    request *requests; // (n_slots)
    size_t n_slots, n_requests, max_requests;
    uint64_t n_submitted;
    attention_worker workers[CONFIG_MAX_WORKERS];
    uint64_t prompt_tokens, generated_tokens;
    bytes_writer out;
    uv_idle_t ended; // tells from the loop that the last request has gone
    void (*on_drained)(void *user);
    void *drained_user;
    void (*done)(void *user);
    void *done_user;
};

// ---- requests ----

static request *find_request(bundle *b, uint64_t id) {
    size_t slot = id & ((1u << SLOT_BITS) - 1);
    if (!id || slot >= b->n_slots || b->requests[slot].id != id)
        return NULL;
    return &b->requests[slot];
}

static request *free_slot(bundle *b) {
    for (size_t i = 0; i < b->n_slots; i++) {
        size_t slot = (b->n_submitted + i) % b->n_slots;
        if (!b->requests[slot].id)
            return &b->requests[slot];
    }
    return NULL;
}

static void on_ended_idle(uv_idle_t *idle) {
    bundle *b = idle->data;
    uv_idle_stop(idle);
    if (b->on_drained && !b->n_requests) {
        void (*on_drained)(void *) = b->on_drained;
        b->on_drained = NULL;
        on_drained(b->drained_user);
    }
}

static void check_drained(bundle *b) {
    if (b->on_drained && !b->n_requests)
        uv_idle_start(&b->ended, on_ended_idle);
}

// Takes the request out of the books; its callbacks stay in the caller's copy.
static void forget(bundle *b, request *r) {
    attention_worker *w = &b->workers[r->worker];
    w->n_requests--;
    w->weight -= r->weight;
    r->id = 0;
    b->n_requests--;
    check_drained(b);
}

static void end_all(bundle *b, int code, const char *message) {
    for (size_t i = 0; i < b->n_slots; i++) {
        request r = b->requests[i];
        if (!r.id)
            continue;
        forget(b, &b->requests[i]);
        r.on_error(r.user, code, message);
    }
}

static void take_event(void *user, const token_event *event) {
    bundle *b = user;
    request *r = find_request(b, event->request);
    if (!r)
        return; // cancelled meanwhile
    request copy = *r;
    if (!r->seen) {
        r->seen = true;
        b->prompt_tokens += r->n_prompt;
    }
    if (event->finish == FINISH_ERROR) {
        forget(b, r);
        copy.on_error(copy.user, E_INVALID, "the attention worker refused the request");
        return;
    }
    b->generated_tokens += !event->is_prompt;
    if (event->finish != FINISH_NONE)
        forget(b, r);
    copy.on_token(copy.user, event);
}

static void on_worker_message(void *user, uint32_t rank, uint16_t type, const void *payload,
                              size_t n) {
    bundle *b = user;
    if (type != MESSAGE_TOKENS ||
        message_tokens_decode(payload, n, &b->workers[rank].load, take_event, b))
        log_warn("attn%u sent a message of type %u that cannot be read; ignored", rank, type);
}

static uint32_t least_loaded(const bundle *b) {
    uint32_t best = 0;
    for (uint32_t i = 1; i < b->args.plan->n_attention; i++)
        if (b->workers[i].weight < b->workers[best].weight)
            best = i;
    return best;
}

static int check_submit(const bundle *b, const bundle_submit_args *args, error *err) {
    size_t most = args->n_prompt + (size_t)args->params->max_tokens;
    uint64_t kv = b->state == BUNDLE_READY ? fleet_kv_tokens(b->fleet) : 0;
    if (b->state == BUNDLE_STARTING)
        return error_set(err, E_STATE, "the bundle is still loading");
    if (b->state == BUNDLE_DRAINING)
        return error_set(err, E_STATE, "the bundle is shutting down");
    if (b->state == BUNDLE_FAILED)
        return error_set(err, E_STATE, "the bundle has failed: %s", b->failure);
    if (!args->n_prompt)
        return error_set(err, E_INVALID, "the prompt has no tokens");
    if (most > b->args.plan->max_tokens)
        return error_set(err, E_TOO_LARGE,
                         "%zu prompt tokens and max_tokens %d exceed the context of %zu tokens",
                         args->n_prompt, args->params->max_tokens, b->args.plan->max_tokens);
    if (most > kv)
        return error_set(err, E_TOO_LARGE,
                         "%zu prompt tokens and max_tokens %d exceed the KV cache of %llu tokens",
                         args->n_prompt, args->params->max_tokens, (unsigned long long)kv);
    if (b->n_requests >= b->max_requests)
        return error_set(err, E_FULL, "%zu requests are in service or waiting; try again later",
                         b->n_requests);
    return E_OK;
}

int bundle_submit(bundle *b, const bundle_submit_args *args, uint64_t *out, error *err) {
    int code = check_submit(b, args, err);
    if (code)
        return code;
    request *r = free_slot(b);
    uint32_t worker = least_loaded(b);
    uint64_t id = ++b->n_submitted << SLOT_BITS | (uint64_t)(r - b->requests);
    bytes_writer_reset(&b->out);
    message_submit_encode(&b->out, id, args->params, args->prompt, args->n_prompt);
    code = b->out.failed ? E_NO_MEMORY
                         : fleet_send(b->fleet, worker, MESSAGE_SUBMIT, b->out.data, b->out.n);
    if (code)
        return error_set(err, code, "attn%u takes no request: %s", worker, status_text(code));
    *r = (request){.id = id,
                   .worker = worker,
                   .weight = args->n_prompt + (size_t)args->params->max_tokens / 2 + 1,
                   .n_prompt = args->n_prompt,
                   .user = args->user,
                   .on_token = args->on_token,
                   .on_error = args->on_error};
    b->workers[worker].n_requests++;
    b->workers[worker].weight += r->weight;
    b->n_requests++;
    *out = id;
    return E_OK;
}

void bundle_cancel(bundle *b, uint64_t id) {
    request *r = find_request(b, id);
    if (!r)
        return;
    bytes_writer_reset(&b->out);
    message_cancel_encode(&b->out, id);
    if (b->fleet && !b->out.failed)
        fleet_send(b->fleet, r->worker, MESSAGE_CANCEL, b->out.data, b->out.n);
    forget(b, r);
}

// ---- state ----

static void on_fleet_ready(void *user) {
    bundle *b = user;
    if (b->state != BUNDLE_STARTING)
        return; // told to drain meanwhile
    b->state = BUNDLE_READY;
    b->args.on_ready(b->args.user);
}

static void on_fleet_failed(void *user, const char *reason) {
    bundle *b = user;
    b->state = BUNDLE_FAILED;
    snprintf(b->failure, sizeof b->failure, "%s", reason);
    end_all(b, E_CLOSED, "a worker of the bundle has failed");
    b->args.on_failed(b->args.user, reason);
}

bundle_state bundle_state_get(const bundle *b) {
    return b->state;
}

const model_config *bundle_model(const bundle *b) {
    return &b->args.plan->model;
}

size_t bundle_max_model_len(const bundle *b) {
    size_t most = b->args.plan->max_tokens;
    uint64_t kv = b->state == BUNDLE_READY ? fleet_kv_tokens(b->fleet) : most;
    return kv < most ? (size_t)kv : most;
}

bundle_stats bundle_stats_get(const bundle *b) {
    bundle_stats stats = {.prompt_tokens = b->prompt_tokens,
                          .generated_tokens = b->generated_tokens};
    for (size_t i = 0; i < b->args.plan->n_attention; i++) {
        const message_load *load = &b->workers[i].load;
        size_t known = b->workers[i].n_requests;
        stats.running += load->running < known ? load->running : known;
        stats.kv_tokens += load->kv_tokens;
        stats.preemptions += load->preemptions;
        stats.steps += load->steps;
        stats.wire_bytes += load->wire_bytes;
    }
    stats.waiting = b->n_requests - stats.running;
    if (b->state == BUNDLE_READY || b->state == BUNDLE_DRAINING)
        stats.kv_capacity = fleet_kv_tokens(b->fleet) * b->args.plan->n_attention;
    return stats;
}

// ---- open, drain, close ----

int bundle_open(const bundle_args *args, bundle **out, error *err) {
    const config *c = args->config;
    bundle *b = calloc(1, sizeof *b);
    if (!b)
        return error_set(err, E_NO_MEMORY, "bundle: out of memory");
    b->args = *args;
    b->max_requests =
        args->plan->n_attention * args->plan->max_sequences + (size_t)c->router.max_waiting;
    if (b->max_requests > (size_t)1 << SLOT_BITS)
        b->max_requests = (size_t)1 << SLOT_BITS;
    b->n_slots = b->max_requests;
    b->requests = calloc(b->n_slots, sizeof *b->requests);
    fleet_args workers = {args->loop,       c, args->plan, b, on_fleet_ready, on_fleet_failed,
                          on_worker_message};
    int code = b->requests ? fleet_open(&workers, &b->fleet, err)
                           : error_set(err, E_NO_MEMORY, "bundle: out of memory");
    if (code) {
        free(b->requests);
        free(b);
        return code;
    }
    uv_idle_init(args->loop, &b->ended);
    b->ended.data = b;
    *out = b;
    return E_OK;
}

void bundle_drain(bundle *b, void (*on_drained)(void *user), void *user) {
    if (b->state != BUNDLE_FAILED)
        b->state = BUNDLE_DRAINING;
    b->on_drained = on_drained;
    b->drained_user = user;
    check_drained(b);
}

static void on_idle_closed(uv_handle_t *handle) {
    bundle *b = handle->data;
    void (*done)(void *) = b->done;
    void *user = b->done_user;
    bytes_writer_free(&b->out);
    free(b->requests);
    free(b);
    done(user);
}

static void on_fleet_closed(void *user) {
    bundle *b = user;
    b->fleet = NULL;
    uv_close((uv_handle_t *)&b->ended, on_idle_closed);
}

void bundle_close(bundle *b, bool now, void (*done)(void *user), void *user) {
    b->done = done;
    b->done_user = user;
    b->on_drained = NULL;
    if (b->state != BUNDLE_FAILED)
        b->state = BUNDLE_DRAINING;
    end_all(b, E_CLOSED, "the server is shutting down");
    if (b->fleet)
        fleet_close(b->fleet, now, on_fleet_closed, b);
}
