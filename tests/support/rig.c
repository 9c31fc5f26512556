#include "tests/support/rig.h"

#include "engine/node.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

#include <cmocka.h>

enum { MAX_REQUESTS = 256, RUN_LIMIT_S = 60 };

typedef struct rig_node {
    rig *rig;
    const node_type *type;
    void *node;
    node_env env;
    message_ready ready;
    message_load load;
} rig_node;

struct rig {
    config config;
    plan plan;
    uv_loop_t loop;
    rig_node nodes[2 * CONFIG_MAX_WORKERS]; // attention workers by rank, then FFN workers
    size_t n_nodes, n_open;
    rig_request requests[MAX_REQUESTS];
    size_t n_requests, n_ended;
    uv_timer_t limit;
    bool timed_out;
    char failure[600]; // the first thing that went wrong; told outside of callbacks
    bytes_writer out;
    message_topology topology;
};

static void note_failure(rig *r, const char *text) {
    if (!r->failure[0])
        snprintf(r->failure, sizeof r->failure, "%s", text);
}

static void check_ok(rig *r) {
    if (r->failure[0])
        fail_msg("%s", r->failure);
}

// ---- what nodes call ----

static void on_progress(void *user, size_t done) {
    (void)user, (void)done;
}

static void on_event(void *user, const token_event *event) {
    rig *r = user;
    rig_request *q =
        event->request && event->request <= r->n_requests ? &r->requests[event->request - 1] : NULL;
    if (!q || q->finish != FINISH_NONE) {
        if (!q || !q->cancelled) // what was under way at a cancel is no error
            note_failure(r, "an event of a request that is unknown or has ended");
        return;
    }
    if (event->finish != FINISH_ERROR && q->n_events &&
        event->position != q->events[q->n_events - 1].position + 1)
        note_failure(r, "positions of a request are not consecutive");
    if (q->n_events == q->n_room) {
        note_failure(r, "more events than prompt and max_tokens allow");
        return;
    }
    q->events[q->n_events++] = *event;
    q->finish = event->finish;
    r->n_ended += event->finish != FINISH_NONE;
}

static void on_send(void *user, uint16_t type, const void *payload, size_t n) {
    rig_node *node = user;
    if (type != MESSAGE_TOKENS ||
        message_tokens_decode(payload, n, &node->load, on_event, node->rig))
        note_failure(node->rig, "a node sent a message that cannot be read");
}

static void on_fail(void *user, const error *err) {
    note_failure(((rig_node *)user)->rig, err->text);
}

// ---- open ----

config rig_config(const char *dir) {
    char text[CONFIG_PATH_BYTES + 64];
    config c;
    error err;
    snprintf(text, sizeof text, "{\"model\": \"%s\", \"log\": {\"level\": \"error\"}}", dir);
    if (config_parse_json("rig", text, strlen(text), &c, &err))
        fail_msg("%s", err.text);
    c.attention.lane_rows = 1; // few requests are to use every lane
    return c;
}

static void open_node(rig *r, const node_type *type, size_t rank) {
    rig_node *n = &r->nodes[r->n_nodes];
    error err;
    *n = (rig_node){.rig = r, .type = type};
    n->env = (node_env){.loop = &r->loop,
                        .config = &r->config,
                        .plan = &r->plan,
                        .rank = (uint32_t)rank,
                        .transport = "inproc",
                        .threads = 1,
                        .user = n,
                        .progress = on_progress,
                        .send = on_send,
                        .fail = on_fail};
    if (type->open(&n->env, &n->node, &err))
        fail_msg("%s%zu: %s", type->name, rank, err.text);
    type->describe(n->node, &n->ready);
    assert_true(n->ready.plan_hash == r->plan.hash);
    r->n_nodes++;
}

static void join_node(rig *r, rig_node *n) {
    message_topology *t = &r->topology;
    error err;
    t->epoch = 1;
    t->n_peers = 0;
    for (size_t i = 0; i < r->n_nodes; i++) {
        const rig_node *other = &r->nodes[i];
        if (other->type->kind == n->type->kind)
            continue;
        message_peer *peer = &t->peers[t->n_peers++];
        peer->rank = other->env.rank;
        peer->n_address = other->ready.n_address;
        memcpy(peer->address, other->ready.address, other->ready.n_address);
    }
    if (n->type->join(n->node, t, &err))
        fail_msg("%s%u: %s", n->type->name, n->env.rank, err.text);
}

static void on_limit(uv_timer_t *timer) {
    ((rig *)timer->data)->timed_out = true;
}

rig *rig_open(const config *c) {
    rig *r = calloc(1, sizeof *r);
    error err;
    assert_non_null(r);
    r->config = *c;
    log_set_level(c->log.level);
    if (plan_make(&r->config, &r->plan, &err))
        fail_msg("%s", err.text);
    assert_int_equal(uv_loop_init(&r->loop), 0);
    uv_timer_init(&r->loop, &r->limit);
    r->limit.data = r;
    for (size_t i = 0; i < r->plan.n_attention; i++)
        open_node(r, &attn_node_type, i);
    for (size_t i = 0; i < r->plan.n_ffn; i++)
        open_node(r, &ffn_node_type, i);
    r->n_open = r->n_nodes;
    for (size_t i = 0; i < r->n_nodes; i++)
        join_node(r, &r->nodes[i]);
    return r;
}

const plan *rig_plan(const rig *r) {
    return &r->plan;
}

// ---- close ----

static void on_node_closed(void *user) {
    ((rig_node *)user)->rig->n_open--;
}

void rig_close(rig *r) {
    for (size_t i = 0; i < r->n_nodes; i++)
        r->nodes[i].type->close(r->nodes[i].node, on_node_closed, &r->nodes[i]);
    uv_close((uv_handle_t *)&r->limit, NULL);
    uv_run(&r->loop, UV_RUN_DEFAULT);
    assert_int_equal(r->n_open, 0);
    assert_int_equal(uv_loop_close(&r->loop), 0);
    check_ok(r);
    for (size_t i = 0; i < r->n_requests; i++)
        free(r->requests[i].events);
    bytes_writer_free(&r->out);
    free(r);
}

// ---- requests ----

sampling_params rig_greedy(int32_t max_tokens) {
    return (sampling_params){
        .top_p = 1, .repetition_penalty = 1, .max_tokens = max_tokens, .logprobs = -1};
}

static void send_message(rig *r, size_t worker, uint16_t type) {
    rig_node *n = &r->nodes[worker];
    assert_false(r->out.failed);
    n->type->message(n->node, type, r->out.data, r->out.n);
    bytes_writer_reset(&r->out);
}

size_t rig_submit(rig *r, size_t worker, const int32_t *prompt, size_t n_prompt,
                  const sampling_params *params) {
    assert_true(r->n_requests < MAX_REQUESTS && worker < r->plan.n_attention);
    size_t index = r->n_requests++, n_new = (size_t)params->max_tokens;
    if (n_new > r->plan.max_tokens) // will be refused
        n_new = 0;
    rig_request *q = &r->requests[index];
    *q = (rig_request){
        .id = index + 1, .worker = worker, .n_prompt = n_prompt, .n_room = n_prompt + n_new};
    q->events = calloc(q->n_room, sizeof *q->events);
    assert_non_null(q->events);
    message_submit_encode(&r->out, q->id, params, prompt, n_prompt);
    send_message(r, worker, MESSAGE_SUBMIT);
    return index;
}

void rig_cancel(rig *r, size_t request) {
    rig_request *q = &r->requests[request];
    r->n_ended += q->finish == FINISH_NONE;
    q->cancelled = true;
    q->finish = FINISH_ABORT;
    message_cancel_encode(&r->out, q->id);
    send_message(r, q->worker, MESSAGE_CANCEL);
}

const rig_request *rig_request_at(const rig *r, size_t request) {
    return &r->requests[request];
}

void rig_turn(rig *r) {
    uv_run(&r->loop, UV_RUN_ONCE);
    check_ok(r);
}

void rig_run(rig *r) {
    r->timed_out = false;
    uv_timer_start(&r->limit, on_limit, RUN_LIMIT_S * 1000, 0);
    while (r->n_ended < r->n_requests) {
        rig_turn(r);
        if (r->timed_out)
            fail_msg("%zu of %zu requests had ended after %d s", r->n_ended, r->n_requests,
                     RUN_LIMIT_S);
    }
    uv_timer_stop(&r->limit);
}

const message_load *rig_load(const rig *r, size_t worker) {
    return &r->nodes[worker].load;
}
