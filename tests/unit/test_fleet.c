// A bundle with its real worker processes, which stand beside this program: starting, serving,
// failing to start, dying.
#include "router/bundle.h"
#include "tests/support/golden.h"
#include "tests/support/tempdir.h"

#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#define MODEL TESTS_DIR "/fixtures/golden/olmoe_f32"

typedef struct bench {
    config config;
    plan plan;
    uv_loop_t loop;
    uv_timer_t limit;
    bundle *bundle;
    bool timed_out;
    size_t n_ready, n_failed, n_done, n_errors;
    char reason[700];
    int32_t ids[40];
    size_t n_ids;
    finish_reason finish;
} bench;

static void on_limit(uv_timer_t *timer) {
    ((bench *)timer->data)->timed_out = true;
}

#define WAIT_UNTIL(b, condition)                                                                   \
    for (; !(condition); uv_run(&(b)->loop, UV_RUN_ONCE))                                          \
        if ((b)->timed_out)                                                                        \
    fail_msg("never: %s (the bundle said: %s)", #condition, (b)->reason)

static void on_ready(void *user) {
    ((bench *)user)->n_ready++;
}

static void on_failed(void *user, const char *reason) {
    bench *b = user;
    b->n_failed++;
    snprintf(b->reason, sizeof b->reason, "%s", reason);
}

static void on_done(void *user) {
    ((bench *)user)->n_done++;
}

static void on_token(void *user, const token_event *event) {
    bench *b = user;
    assert_true(b->n_ids < 40 && b->finish == FINISH_NONE);
    b->ids[b->n_ids++] = event->id;
    b->finish = event->finish;
}

static void on_error(void *user, int code, const char *message) {
    (void)code, (void)message;
    ((bench *)user)->n_errors++;
}

// weights: the model's directory as the workers see it.
static bench *bench_open(config_mode mode, int64_t n_attention, int64_t n_ffn,
                         const char *weights) {
    bench *b = calloc(1, sizeof *b);
    char text[512];
    error err;
    assert_non_null(b);
    snprintf(text, sizeof text, "{\"model\": \"%s\", \"log\": {\"level\": \"error\"}}", MODEL);
    assert_int_equal(config_parse_json("test", text, strlen(text), &b->config, &err), E_OK);
    log_set_level(LOG_LEVEL_ERROR);
    b->config.mode = mode;
    b->config.attention.workers = b->config.attention.launch = n_attention;
    b->config.ffn.workers = b->config.ffn.launch = n_ffn;
    b->config.attention.kv_tokens = 256;
    if (plan_make(&b->config, &b->plan, &err))
        fail_msg("%s", err.text);
    snprintf(b->config.model, sizeof b->config.model, "%s", weights);
    uv_loop_init(&b->loop);
    uv_timer_init(&b->loop, &b->limit);
    b->limit.data = b;
    uv_timer_start(&b->limit, on_limit, 60000, 0);
    bundle_args args = {.loop = &b->loop,
                        .config = &b->config,
                        .plan = &b->plan,
                        .user = b,
                        .on_ready = on_ready,
                        .on_failed = on_failed};
    if (bundle_open(&args, &b->bundle, &err))
        fail_msg("%s", err.text);
    return b;
}

// Children of this process, as the kernel lists them.
static size_t children(int32_t *pids, size_t n_max) {
    char path[64];
    size_t n = 0;
    snprintf(path, sizeof path, "/proc/self/task/%d/children", (int)uv_os_getpid());
    FILE *list = fopen(path, "r");
    assert_non_null(list);
    while (n < n_max && fscanf(list, "%d", &pids[n]) == 1)
        n++;
    fclose(list);
    return n;
}

static void bench_close(bench *b, bool now) {
    int32_t pids[8];
    bundle_close(b->bundle, now, on_done, b);
    WAIT_UNTIL(b, b->n_done);
    assert_int_equal(children(pids, 8), 0); // nobody is left behind
    uv_close((uv_handle_t *)&b->limit, NULL);
    uv_run(&b->loop, UV_RUN_DEFAULT);
    assert_int_equal(uv_loop_close(&b->loop), 0);
    free(b);
}

static void serve_one(bench *b) {
    golden g;
    error err;
    uint64_t id;
    if (golden_open(MODEL, &g, &err))
        fail_msg("%s", err.text);
    const golden_prompt *p = &g.prompts[1];
    sampling_params params = {
        .top_p = 1, .repetition_penalty = 1, .max_tokens = (int32_t)g.n_greedy, .logprobs = -1};
    bundle_submit_args args = {.prompt = p->ids,
                               .n_prompt = p->n_tokens,
                               .params = &params,
                               .user = b,
                               .on_token = on_token,
                               .on_error = on_error};
    if (bundle_submit(b->bundle, &args, &id, &err))
        fail_msg("%s", err.text);
    WAIT_UNTIL(b, b->finish != FINISH_NONE || b->n_errors || b->n_failed);
    assert_int_equal(b->finish, FINISH_LENGTH);
    assert_int_equal(b->n_ids, g.n_greedy);
    assert_memory_equal(b->ids, p->greedy, g.n_greedy * sizeof *b->ids);
    golden_close(&g);
}

static void test_processes_serve(void **state) {
    (void)state;
    int32_t pids[8];
    bench *b = bench_open(CONFIG_MODE_DISAGGREGATED, 2, 1, MODEL);
    WAIT_UNTIL(b, b->n_ready || b->n_failed);
    assert_int_equal(b->n_failed, 0);
    assert_int_equal(children(pids, 8), 3);
    serve_one(b);
    bench_close(b, false);
}

static void test_a_colocated_process_serves(void **state) {
    (void)state;
    int32_t pids[8];
    bench *b = bench_open(CONFIG_MODE_COLOCATED, 1, 1, MODEL);
    WAIT_UNTIL(b, b->n_ready || b->n_failed);
    assert_int_equal(b->n_failed, 0);
    assert_int_equal(children(pids, 8), 1);
    serve_one(b);
    bench_close(b, false);
}

static void test_a_worker_that_cannot_load_says_why(void **state) {
    (void)state;
    tempdir empty = tempdir_make();
    bench *b = bench_open(CONFIG_MODE_DISAGGREGATED, 1, 1, empty.path);
    WAIT_UNTIL(b, b->n_failed);
    if (!strstr(b->reason, empty.path) || !strstr(b->reason, "config.json"))
        fail_msg("'%s' does not name the file", b->reason);
    bench_close(b, false);
    tempdir_remove(&empty);
}

static void test_a_killed_worker_ends_the_bundle(void **state) {
    (void)state;
    int32_t pids[8];
    bench *b = bench_open(CONFIG_MODE_DISAGGREGATED, 1, 1, MODEL);
    WAIT_UNTIL(b, b->n_ready || b->n_failed);
    assert_int_equal(children(pids, 8), 2);
    assert_int_equal(kill(pids[1], SIGKILL), 0);
    WAIT_UNTIL(b, b->n_failed);
    assert_non_null(strstr(b->reason, "signal 9"));
    bench_close(b, false);
}

static void test_a_close_while_workers_start(void **state) {
    (void)state;
    for (int now = 0; now < 2; now++) {
        bench *b = bench_open(CONFIG_MODE_DISAGGREGATED, 1, 1, MODEL);
        bench_close(b, now);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_processes_serve),
        cmocka_unit_test(test_a_colocated_process_serves),
        cmocka_unit_test(test_a_worker_that_cannot_load_says_why),
        cmocka_unit_test(test_a_killed_worker_ends_the_bundle),
        cmocka_unit_test(test_a_close_while_workers_start),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
