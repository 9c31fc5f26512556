// One attention node against an FFN worker that the test plays: what becomes of a broken
// connection.
#include "engine/node.h"
#include "engine/transport.h"
#include "tests/support/rig.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

#include <cmocka.h>

enum { LIMIT_MS = 20000 };

typedef struct scene {
    uv_loop_t loop;
    uv_timer_t limit;
    config config;
    plan plan;
    node_env env;
    void *node;
    transport *ffn;
    size_t n_closing;
    bool timed_out;
    error failure;
} scene;

// The played worker takes nothing: a lane that has sent to it waits.
static void *place(void *user, const frame_header *header, size_t bytes) {
    (void)user, (void)header, (void)bytes;
    return NULL;
}

static void arrived(void *user, const frame_header *header, void *payload, size_t bytes) {
    (void)user, (void)header, (void)payload, (void)bytes;
}

static void sent(void *user, void *token, int status) {
    (void)user, (void)token, (void)status;
}

static void lost(void *user, transport_peer *peer, const char *reason) {
    (void)user, (void)peer, (void)reason;
}

static void on_progress(void *user, size_t bytes) {
    (void)user, (void)bytes;
}

static void on_send(void *user, uint16_t type, const void *payload, size_t n) {
    (void)user, (void)type, (void)payload, (void)n;
}

static void on_fail(void *user, const error *err) {
    scene *s = user;
    assert_string_equal(s->failure.text, ""); // once
    s->failure = *err;
}

static void on_limit(uv_timer_t *timer) {
    ((scene *)timer->data)->timed_out = true;
}

static void on_closed(void *user) {
    ((scene *)user)->n_closing--;
}

static scene *open_scene(void) {
    scene *s = calloc(1, sizeof *s);
    message_topology *topology = calloc(1, sizeof *topology);
    const void *address;
    size_t n;
    error err;
    assert_true(s && topology);
    uv_loop_init(&s->loop);
    uv_timer_init(&s->loop, &s->limit);
    s->limit.data = s;
    uv_timer_start(&s->limit, on_limit, LIMIT_MS, 0);
    s->config = rig_config(TESTS_DIR "/fixtures/golden/qwen3_tied_bf16");
    assert_int_equal(plan_make(&s->config, &s->plan, &err), 0);
    s->env = (node_env){.loop = &s->loop,
                        .config = &s->config,
                        .plan = &s->plan,
                        .transport = "inproc",
                        .threads = 1,
                        .user = s,
                        .progress = on_progress,
                        .send = on_send,
                        .fail = on_fail};
    assert_int_equal(attn_node_type.open(&s->env, &s->node, &err), 0);
    transport_args args = {
        .kind = "inproc", .loop = &s->loop, .callbacks = {s, place, arrived, arrived, sent, lost}};
    assert_int_equal(transport_open(&args, &s->ffn, &err), 0);
    assert_int_equal(transport_address(s->ffn, &address, &n), 0);
    topology->epoch = 1;
    topology->n_peers = 1;
    topology->peers[0].n_address = (uint32_t)n;
    memcpy(topology->peers[0].address, address, n);
    assert_int_equal(attn_node_type.join(s->node, topology, &err), 0);
    free(topology);
    return s;
}

static void submit(scene *s) {
    static const int32_t prompt[] = {1, 2, 3};
    sampling_params params = rig_greedy(4);
    bytes_writer w = {0};
    message_submit_encode(&w, 1, &params, prompt, 3);
    attn_node_type.message(s->node, MESSAGE_SUBMIT, w.data, w.n);
    bytes_writer_free(&w);
}

static void run_for(scene *s, unsigned ms) {
    uint64_t end = uv_hrtime() + ms * 1000000ull;
    while (uv_hrtime() < end) {
        uv_run(&s->loop, UV_RUN_NOWAIT);
        uv_sleep(1);
    }
}

static void close_scene(scene *s, bool ffn_too) {
    s->n_closing += 1 + ffn_too;
    attn_node_type.close(s->node, on_closed, s);
    if (ffn_too)
        transport_close(s->ffn, on_closed, s);
    uv_close((uv_handle_t *)&s->limit, NULL);
    uv_run(&s->loop, UV_RUN_DEFAULT);
    assert_int_equal(s->n_closing, 0);
    assert_int_equal(uv_loop_close(&s->loop), 0);
    free(s);
}

// The node says that it cannot go on, and no lane waits for ever; it leaves the router the time to
// name the dead worker first.
static void broken_connection_is_told(void **state) {
    (void)state;
    scene *s = open_scene();
    submit(s);
    run_for(s, 50);
    s->n_closing++;
    transport_close(s->ffn, on_closed, s);
    run_for(s, 500);
    assert_string_equal(s->failure.text, "");
    while (!s->failure.text[0] && !s->timed_out)
        uv_run(&s->loop, UV_RUN_ONCE);
    assert_string_equal(s->failure.text, "the connection to FFN worker 0 broke");
    close_scene(s, false);
}

static void end_of_both_is_no_failure(void **state) {
    (void)state;
    scene *s = open_scene();
    submit(s);
    run_for(s, 50);
    s->n_closing++;
    transport_close(s->ffn, on_closed, s);
    run_for(s, 100);
    close_scene(s, false); // while the timer runs
    s = open_scene();
    submit(s);
    close_scene(s, true);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(broken_connection_is_told),
        cmocka_unit_test(end_of_both_is_no_failure),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
