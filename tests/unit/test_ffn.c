// One FFN node against two attention workers that the test plays: what a hostile frame costs.
#include "engine/node.h"
#include "engine/transport.h"
#include "tests/support/rig.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

#include <cmocka.h>

enum { N_ATTENTION = 2, ROWS = 1, PAYLOAD_BYTES = 4096, LIMIT_MS = 20000 };

typedef struct player {
    struct scene *scene;
    transport *transport;
    transport_peer *ffn;
    uint8_t payload[PAYLOAD_BYTES], received[PAYLOAD_BYTES];
    bool answered;
} player;

typedef struct scene {
    uv_loop_t loop;
    uv_timer_t limit;
    config config;
    plan plan;
    node_env env;
    void *node;
    player players[N_ATTENTION];
    bool timed_out;
    int n_closing;
} scene;

static void *place(void *user, const frame_header *header, size_t bytes) {
    (void)header;
    return bytes <= PAYLOAD_BYTES ? ((player *)user)->received : NULL;
}

static void arrived(void *user, const frame_header *header, void *payload, size_t bytes) {
    (void)payload, (void)bytes;
    ((player *)user)->answered |= header->kind == FRAME_RETURN;
}

static void abandoned(void *user, const frame_header *header, void *payload, size_t bytes) {
    (void)user, (void)header, (void)payload, (void)bytes;
}

static void sent(void *user, void *token, int status) {
    (void)user, (void)token, (void)status;
}

static void lost(void *user, transport_peer *peer, const char *reason) {
    (void)user, (void)peer;
    fail_msg("lost the FFN node: %s", reason);
}

static void on_progress(void *user, size_t bytes) {
    (void)user, (void)bytes;
}

static void on_fail(void *user, const error *err) {
    (void)user;
    fail_msg("the node failed: %s", err->text);
}

static void on_limit(uv_timer_t *timer) {
    ((scene *)timer->data)->timed_out = true;
}

static void open_players(scene *s, message_topology *topology, const message_ready *ready) {
    error err;
    for (uint32_t a = 0; a < N_ATTENTION; a++) {
        player *p = &s->players[a];
        const void *address;
        size_t n;
        *p = (player){.scene = s};
        transport_args args = {.kind = "inproc",
                               .loop = &s->loop,
                               .callbacks = {p, place, arrived, abandoned, sent, lost}};
        assert_int_equal(transport_open(&args, &p->transport, &err), 0);
        assert_int_equal(transport_address(p->transport, &address, &n), 0);
        assert_int_equal(
            transport_connect(p->transport, ready->address, ready->n_address, &p->ffn, &err), 0);
        topology->peers[a].rank = a;
        topology->peers[a].n_address = (uint32_t)n;
        memcpy(topology->peers[a].address, address, n);
    }
    topology->epoch = 1;
    topology->n_peers = N_ATTENTION;
}

// Rank 0 of two FFN workers: the upper half of the experts is another worker's.
static scene *open_scene(void) {
    scene *s = calloc(1, sizeof *s);
    message_topology *topology = calloc(1, sizeof *topology);
    message_ready ready;
    error err;
    assert_true(s && topology);
    uv_loop_init(&s->loop);
    uv_timer_init(&s->loop, &s->limit);
    s->limit.data = s;
    uv_timer_start(&s->limit, on_limit, LIMIT_MS, 0);
    s->config = rig_config(TESTS_DIR "/fixtures/golden/qwen3_tied_bf16");
    s->config.attention.workers = N_ATTENTION;
    s->config.ffn.workers = 2;
    s->config.ffn.member_deadline_ms = 20; // the members of a pass here do not go on
    assert_int_equal(plan_make(&s->config, &s->plan, &err), 0);
    s->env = (node_env){.loop = &s->loop,
                        .config = &s->config,
                        .plan = &s->plan,
                        .transport = "inproc",
                        .threads = 1,
                        .progress = on_progress,
                        .fail = on_fail};
    assert_int_equal(ffn_node_type.open(&s->env, &s->node, &err), 0);
    ffn_node_type.describe(s->node, &ready);
    open_players(s, topology, &ready);
    assert_int_equal(ffn_node_type.join(s->node, topology, &err), 0);
    free(topology);
    return s;
}

static void on_closed(void *user) {
    ((scene *)user)->n_closing--;
}

static void close_scene(scene *s) {
    s->n_closing = 1 + N_ATTENTION;
    ffn_node_type.close(s->node, on_closed, s);
    for (size_t a = 0; a < N_ATTENTION; a++)
        transport_close(s->players[a].transport, on_closed, s);
    uv_close((uv_handle_t *)&s->limit, NULL);
    uv_run(&s->loop, UV_RUN_DEFAULT);
    assert_int_equal(s->n_closing, 0);
    assert_int_equal(uv_loop_close(&s->loop), 0);
    free(s);
}

static frame_header make_header(const scene *s, uint16_t attention) {
    const model_config *m = &s->plan.model;
    return (frame_header){.magic = FRAME_MAGIC,
                          .version = FRAME_VERSION,
                          .kind = FRAME_DISPATCH,
                          .plan_hash = s->plan.hash,
                          .epoch = 1,
                          .step = 1,
                          .attention = attention,
                          .top_k = (uint16_t)m->top_k,
                          .rows = ROWS,
                          .hidden = (uint32_t)m->hidden,
                          .placement = s->plan.placement,
                          .dtype = (uint8_t)s->plan.wire,
                          .flags = FRAME_FLAG_MORE};
}

static void send_row(scene *s, uint16_t attention, uint16_t expert) {
    player *p = &s->players[attention];
    const model_config *m = &s->plan.model;
    frame_layout layout;
    assert_int_equal(
        frame_layout_make(FRAME_DISPATCH, ROWS, m->top_k, m->hidden, s->plan.wire, &layout), 0);
    assert_true(layout.bytes <= PAYLOAD_BYTES);
    uint16_t *experts = (uint16_t *)(void *)p->payload;
    for (size_t k = 0; k < m->top_k; k++)
        experts[k] = k ? FRAME_NO_EXPERT : expert;
    frame_header header = make_header(s, attention);
    assert_int_equal(transport_send(p->ffn, &header, p->payload, layout.bytes, p), 0);
}

static void run_until_answered(scene *s, size_t attention) {
    while (!s->players[attention].answered && !s->timed_out)
        uv_run(&s->loop, UV_RUN_ONCE);
    assert_false(s->timed_out);
}

static void own_experts_are_answered(void **state) {
    (void)state;
    scene *s = open_scene();
    send_row(s, 0, 0);
    send_row(s, 1, 3);
    run_until_answered(s, 0);
    run_until_answered(s, 1);
    close_scene(s);
}

// The frame of another worker's expert, or of none, is refused alone: the other member of the same
// gather gets its RETURN, and the refused lane may send again.
static void foreign_expert_costs_its_sender_alone(void **state) {
    (void)state;
    static const uint16_t foreign[] = {4, 7, 8, 0xfffe};
    for (size_t i = 0; i < sizeof foreign / sizeof *foreign; i++) {
        scene *s = open_scene();
        send_row(s, 0, foreign[i]);
        send_row(s, 1, 1);
        run_until_answered(s, 1);
        assert_false(s->players[0].answered);
        send_row(s, 0, 2);
        run_until_answered(s, 0);
        close_scene(s);
    }
}

// A frame without rows has no payload, but what is wrong in its header is refused all the same.
static void frame_without_rows_is_checked(void **state) {
    (void)state;
    scene *s = open_scene();
    frame_header good = make_header(s, 0);
    good.rows = 0;
    frame_header bad[4] = {good, good, good, good};
    bad[0].lane = 0xffff;
    bad[1].attention = 0xffff;
    bad[2].plan_hash++;
    bad[3].epoch++;
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        assert_int_equal(transport_send(s->players[0].ffn, &bad[i], NULL, 0, &s->players[0]), 0);
    send_row(s, 1, 1);
    run_until_answered(s, 1);
    assert_false(s->players[0].answered);
    assert_int_equal(transport_send(s->players[0].ffn, &good, NULL, 0, &s->players[0]), 0);
    run_until_answered(s, 0);
    close_scene(s);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(own_experts_are_answered),
        cmocka_unit_test(frame_without_rows_is_checked),
        cmocka_unit_test(foreign_expert_costs_its_sender_alone),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
