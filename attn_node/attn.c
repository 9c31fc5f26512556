// The attention node: requests, KV cache and lanes of one attention worker.
#include "attn_node/attn_model.h"
#include "attn_node/lane.h"
#include "attn_node/sampler.h"
#include "attn_node/sched.h"
#include "engine/log.h"
#include "engine/node.h"
#include "engine/transport.h"

#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

// How long the router may take to see for itself that a lost FFN worker has died.
enum { LOST_MS = 3000 };

typedef struct attn_node {
    const node_env *env;
    const plan *plan;
    kernel_backend *backend;
    kernel_kv *kv;
    attn_model model;
    sched *sched;
    sampler *sampler;
    size_t kv_tokens;
    transport *transport;
    transport_peer *peers[CONFIG_MAX_WORKERS]; // by FFN rank
    frame_expect expect;
    uint32_t epoch;
    uint64_t steps, frames_refused;
    lane *lanes[CONFIG_MAX_LANES]; // opened at join
    bytes_writer events;           // TOKENS of the steps since the last flush

    uv_idle_t work;  // runs while a lane can move
    uv_async_t wake; // a mark has completed
    uv_timer_t lost; // LOST_MS after an FFN worker was lost
    size_t lost_rank;
    int n_open_handles;
    void (*closed)(void *user);
    void *closed_user;
} attn_node;

static void work_soon(attn_node *n);

// ---- towards the router ----

static message_load load_now(const attn_node *n) {
    sched_stats stats = sched_stats_get(n->sched);
    transport_stats wire = transport_stats_get(n->transport);
    return (message_load){.running = (uint32_t)stats.running,
                          .waiting = (uint32_t)stats.waiting,
                          .kv_tokens = stats.kv_tokens,
                          .preemptions = stats.preemptions,
                          .steps = n->steps,
                          .wire_bytes = wire.bytes_sent + wire.bytes_received};
}

static void flush_events(attn_node *n) {
    message_load load = load_now(n);
    message_tokens_finish(&n->events, &load);
    n->env->send(n->env->user, MESSAGE_TOKENS, n->events.data, n->events.n);
    message_tokens_begin(&n->events);
}

static void emit(void *user, const token_event *event) {
    message_tokens_add(&((attn_node *)user)->events, event);
}

static void step_done(void *user) {
    attn_node *n = user;
    n->steps++;
    flush_events(n);
}

// ---- frames ----

static void *place(void *user, const frame_header *header, size_t bytes) {
    attn_node *n = user;
    error err;
    int code = frame_check(header, FRAME_RETURN, bytes, &n->expect, &err);
    if (code || header->attention != n->env->rank) {
        if (n->frames_refused++ < 10)
            log_warn("frame refused: %s", code ? err.text : "it is another attention worker's");
        return NULL;
    }
    lane *l = n->lanes[header->lane];
    return l && header->epoch == n->epoch ? lane_place(l, header, bytes) : NULL;
}

static void arrived(void *user, const frame_header *header, void *payload, size_t bytes) {
    attn_node *n = user;
    (void)payload, (void)bytes;
    lane_arrived(n->lanes[header->lane], header);
    work_soon(n);
}

static void abandoned(void *user, const frame_header *header, void *payload, size_t bytes) {
    (void)user, (void)header, (void)payload, (void)bytes; // the lane goes on waiting
}

static void sent(void *user, void *token, int status) {
    (void)status; // a lost peer is told by its control socket
    lane_sent(token);
    work_soon(user);
}

// The worker is still wanted, so the FFN worker lives and only the way to it is cut: no lane would
// ever go on.
static void on_lost(uv_timer_t *timer) {
    attn_node *n = timer->data;
    error err;
    error_set(&err, E_CLOSED, "the connection to FFN worker %zu broke", n->lost_rank);
    n->env->fail(n->env->user, &err);
}

static void lost(void *user, transport_peer *peer, const char *reason) {
    attn_node *n = user;
    for (size_t f = 0; f < n->plan->n_ffn; f++) {
        if (n->peers[f] != peer)
            continue;
        log_warn("lost FFN worker %zu: %s", f, reason);
        n->peers[f] = NULL;
        n->lost_rank = f;
        if (!n->closed && !uv_is_active((uv_handle_t *)&n->lost))
            uv_timer_start(&n->lost, on_lost, LOST_MS, 0);
    }
    transport_peer_close(peer);
}

// A frame for a peer that has gone is given up: the lane waits, and the control socket, or on_lost,
// tells the router, which knows what to do about a dead worker.
static int send_frame(void *user, size_t ffn_rank, const frame_header *header, const void *payload,
                      size_t bytes, void *token) {
    attn_node *n = user;
    transport_peer *peer = n->peers[ffn_rank];
    int code = peer ? transport_send(peer, header, payload, bytes, token) : E_CLOSED;
    if (code != E_CLOSED)
        return code;
    lane_sent(token);
    return E_OK;
}

// ---- the loop ----

// One move of every lane, in turn; frames are sent and received between the turns.
static void on_work(uv_idle_t *idle) {
    attn_node *n = idle->data;
    bool moved = false;
    for (size_t i = 0; i < n->plan->n_lanes && n->lanes[i]; i++) {
        int code = lane_advance(n->lanes[i]);
        if (code < 0) {
            error err;
            error_set(&err, code, "lane %zu: %s", i, status_text(code));
            uv_idle_stop(&n->work);
            n->env->fail(n->env->user, &err);
            return;
        }
        moved |= code > 0;
    }
    if (!moved)
        uv_idle_stop(&n->work);
}

static void work_soon(attn_node *n) {
    if (!n->closed)
        uv_idle_start(&n->work, on_work);
}

static void on_wake(uv_async_t *async) {
    work_soon(async->data);
}

static void wake(void *user) {
    uv_async_send(&((attn_node *)user)->wake);
}

// ---- open ----

// Without attention.kv_tokens: a cache for every slot at full length, within a quarter of this
// worker's share of the machine's memory.
static size_t kv_pages(const attn_node *n, const kernel_kv_args *args) {
    const config *c = n->env->config;
    size_t per_sequence = (n->plan->max_tokens + KERNEL_PAGE_TOKENS - 1) / KERNEL_PAGE_TOKENS;
    if (c->attention.kv_tokens)
        return ((size_t)c->attention.kv_tokens + KERNEL_PAGE_TOKENS - 1) / KERNEL_PAGE_TOKENS;
    size_t memory = (size_t)sysconf(_SC_PHYS_PAGES) * (size_t)sysconf(_SC_PAGESIZE);
    size_t fits = memory / 4 / n->plan->n_attention / kernel_kv_page_bytes(n->backend, args);
    size_t all = per_sequence * n->plan->max_sequences;
    return fits < all ? fits : all;
}

static int open_kv(attn_node *n, error *err) {
    const model_config *m = &n->plan->model;
    kernel_kv_args args = {
        .n_layers = m->n_layers, .n_kv_heads = m->n_kv_heads, .head_dim = m->head_dim};
    args.n_pages = kv_pages(n, &args);
    if (!args.n_pages)
        return error_set(err, E_NO_MEMORY,
                         "attention.kv_tokens: no memory for one KV page of %d tokens; set it or "
                         "lower attention.workers",
                         KERNEL_PAGE_TOKENS);
    n->kv_tokens = args.n_pages * KERNEL_PAGE_TOKENS;
    return kernel_kv_create(n->backend, &args, &n->kv, err);
}

static sched_args scheduler_sizes(const attn_node *n) {
    const model_config *m = &n->plan->model;
    size_t lane_rows = (size_t)n->env->config->attention.lane_rows;
    if (!lane_rows)
        lane_rows = (4 * m->n_experts + m->top_k - 1) / m->top_k;
    return (sched_args){.n_lanes = n->plan->n_lanes,
                        .max_sequences = n->plan->max_sequences,
                        .token_budget = n->plan->max_rows,
                        .lane_rows = lane_rows,
                        .n_pages = n->kv_tokens / KERNEL_PAGE_TOKENS,
                        .max_tokens = n->plan->max_tokens};
}

static int open_parts(attn_node *n, error *err) {
    const config *c = n->env->config;
    kernel_backend_args backend = {.device = c->attention.device,
                                   .threads = n->env->threads,
                                   .compute = n->plan->compute,
                                   .max_rows = n->plan->max_rows,
                                   .max_groups = 1};
    transport_args wire = {.kind = n->env->transport,
                           .bind = n->env->bind,
                           .spin_us = n->env->spin_us,
                           .loop = n->env->loop,
                           .callbacks = {n, place, arrived, abandoned, sent, lost}};
    int code = kernel_backend_open(&backend, &n->backend, err);
    if (!code)
        code = attn_model_load(n->backend, n->plan, c->model, n->env->progress, n->env->user,
                               &n->model, err);
    if (!code)
        code = open_kv(n, err);
    if (!code) {
        sched_args sizes = scheduler_sizes(n);
        code = sched_open(&sizes, &n->sched, err);
    }
    if (!code)
        code = sampler_open(n->plan->model.vocab, &n->sampler, err);
    if (!code)
        code = transport_open(&wire, &n->transport, err);
    return code;
}

static void free_node(attn_node *n) {
    for (size_t i = 0; i < CONFIG_MAX_LANES; i++)
        lane_close(n->lanes[i]);
    sampler_close(n->sampler);
    sched_close(n->sched);
    kernel_kv_free(n->kv);
    attn_model_free(&n->model);
    kernel_backend_close(n->backend);
    bytes_writer_free(&n->events);
    free(n);
}

// Room for the events of one step of every lane, so that no step allocates: an event for each row,
// and one for the first token of each prompt.
static int reserve_events(attn_node *n, error *err) {
    size_t events = n->plan->n_lanes * (n->plan->max_rows + n->plan->max_sequences);
    message_tokens_begin(&n->events);
    bytes_writer_reserve(&n->events, MESSAGE_LOAD_BYTES + events * MESSAGE_EVENT_MAX_BYTES);
    return n->events.failed
               ? error_set(err, E_NO_MEMORY, "attention: no memory for %zu events", events)
               : E_OK;
}

static int attn_open(const node_env *env, void **out, error *err) {
    attn_node *n = calloc(1, sizeof *n);
    if (!n)
        return error_set(err, E_NO_MEMORY, "attention: out of memory");
    n->env = env;
    n->plan = env->plan;
    n->expect = plan_frame_expect(env->plan);
    int code = reserve_events(n, err);
    if (!code)
        code = open_parts(n, err);
    if (code) {
        free_node(n);
        return code;
    }
    uv_idle_init(env->loop, &n->work);
    uv_async_init(env->loop, &n->wake, on_wake);
    uv_timer_init(env->loop, &n->lost);
    n->work.data = n->wake.data = n->lost.data = n;
    n->n_open_handles = 3;
    log_info("attention rank %u: %s; %.1f MB of weights; KV cache of %zu tokens", env->rank,
             kernel_backend_describe(n->backend), (double)n->model.weight_bytes / 1e6,
             n->kv_tokens);
    *out = n;
    return E_OK;
}

static void attn_describe(void *node, message_ready *out) {
    attn_node *n = node;
    const void *address;
    size_t n_bytes;
    *out = (message_ready){.plan_hash = n->plan->hash,
                           .weight_bytes = n->model.weight_bytes,
                           .kv_tokens = n->kv_tokens};
    if (!transport_address(n->transport, &address, &n_bytes)) {
        memcpy(out->address, address, n_bytes);
        out->n_address = (uint32_t)n_bytes;
    }
}

// ---- join, requests, close ----

static int open_lanes(attn_node *n, error *err) {
    sched_args sizes = scheduler_sizes(n);
    lane_env env = {.plan = n->plan,
                    .model = &n->model,
                    .backend = n->backend,
                    .kv = n->kv,
                    .sched = n->sched,
                    .sampler = n->sampler,
                    .rank = (uint16_t)n->env->rank,
                    .epoch = n->epoch,
                    .user = n,
                    .wake = wake,
                    .send = send_frame,
                    .emit = emit,
                    .step_done = step_done};
    int code = E_OK;
    for (size_t i = 0; i < n->plan->n_lanes && !code; i++)
        code = lane_open(&env, (int)i, &sizes, &n->lanes[i], err);
    return code;
}

static int attn_join(void *node, const message_topology *topology, error *err) {
    attn_node *n = node;
    if (n->lanes[0])
        return error_set(err, E_STATE, "a second topology; an attention worker joins once");
    n->epoch = topology->epoch;
    for (uint32_t i = 0; i < topology->n_peers; i++) {
        const message_peer *peer = &topology->peers[i];
        if (peer->rank >= n->plan->n_ffn)
            return error_set(err, E_PROTOCOL, "topology names FFN worker %u of %zu", peer->rank,
                             n->plan->n_ffn);
        int code = transport_connect(n->transport, peer->address, peer->n_address,
                                     &n->peers[peer->rank], err);
        if (code)
            return code;
    }
    for (size_t f = 0; f < n->plan->n_ffn; f++)
        if (!n->peers[f])
            return error_set(err, E_PROTOCOL, "topology lacks FFN worker %zu", f);
    transport_expect(n->transport, true);
    return open_lanes(n, err);
}

static bool ids_in_vocabulary(const attn_node *n, const message_submit *submit) {
    int32_t vocab = (int32_t)n->plan->model.vocab;
    const sampling_params *p = &submit->params;
    for (int32_t i = 0; i < submit->n_prompt; i++)
        if (submit->prompt[i] < 0 || submit->prompt[i] >= vocab)
            return false;
    for (int32_t i = 0; i < p->n_stop_ids; i++)
        if (p->stop_ids[i] < 0 || p->stop_ids[i] >= vocab)
            return false;
    for (int32_t i = 0; i < p->n_logit_bias; i++)
        if (submit->bias[i].id < 0 || submit->bias[i].id >= vocab)
            return false;
    return true;
}

static void submit(attn_node *n, const void *payload, size_t n_bytes) {
    message_submit request;
    error err;
    int code = message_submit_decode(payload, n_bytes, &request);
    if (code) {
        log_error("a SUBMIT message cannot be read; ignored");
        return;
    }
    if (!n->lanes[0])
        code = error_set(&err, E_STATE, "not joined yet");
    else if (!ids_in_vocabulary(n, &request))
        code = error_set(&err, E_INVALID, "a token id is outside the vocabulary of %zu",
                         n->plan->model.vocab);
    else
        code = sched_submit(n->sched, request.request, request.prompt, (size_t)request.n_prompt,
                            &request.params, &err);
    if (code) { // the router checks before it submits; what it missed ends the request
        log_warn("request %llu refused: %s", (unsigned long long)request.request, err.text);
        emit(n, &(token_event){
                    .request = request.request, .id = -1, .n_top = -1, .finish = FINISH_ERROR});
        flush_events(n);
    }
    message_submit_free(&request);
    work_soon(n);
}

static void attn_message(void *node, uint16_t type, const void *payload, size_t n_bytes) {
    attn_node *n = node;
    uint64_t request;
    if (type == MESSAGE_SUBMIT) {
        submit(n, payload, n_bytes);
    } else if (type == MESSAGE_CANCEL && !message_cancel_decode(payload, n_bytes, &request)) {
        sched_cancel(n->sched, request);
        flush_events(n); // the router's gauges follow at once
        work_soon(n);
    } else {
        log_warn("message of type %u is not for an attention worker; ignored", type);
    }
}

static void on_handle_closed(uv_handle_t *handle) {
    attn_node *n = handle->data;
    if (--n->n_open_handles)
        return;
    void (*closed)(void *) = n->closed;
    void *user = n->closed_user;
    free_node(n);
    closed(user);
}

static void on_transport_closed(void *user) {
    attn_node *n = user;
    uv_close((uv_handle_t *)&n->work, on_handle_closed);
    uv_close((uv_handle_t *)&n->wake, on_handle_closed);
    uv_close((uv_handle_t *)&n->lost, on_handle_closed);
}

static void attn_close(void *node, void (*done)(void *user), void *user) {
    attn_node *n = node;
    n->closed = done;
    n->closed_user = user;
    uv_idle_stop(&n->work);
    uv_timer_stop(&n->lost);
    transport_close(n->transport, on_transport_closed, n);
}

const node_type attn_node_type = {WORKER_ATTENTION, "attn",       attn_open, attn_describe,
                                  attn_join,        attn_message, attn_close};
