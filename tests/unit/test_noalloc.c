// No step allocates: from the first step on, whatever the requests ask for. The linker hands the
// allocations of all that is linked here to the functions below; libuv's come by its own hook.
#include "engine/control.h"
#include "router/synth.h"
#include "tests/support/rig.h"
#include "tests/support/tempdir.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <uv.h>

#include <cmocka.h>

static bool counting;
static size_t n_allocations;

void *__real_malloc(size_t n);
void *__real_calloc(size_t n, size_t size);
void *__real_realloc(void *old, size_t n);
void *__real_aligned_alloc(size_t alignment, size_t n);
int __real_posix_memalign(void **out, size_t alignment, size_t n);

void *__wrap_malloc(size_t n);
void *__wrap_calloc(size_t n, size_t size);
void *__wrap_realloc(void *old, size_t n);
void *__wrap_aligned_alloc(size_t alignment, size_t n);
int __wrap_posix_memalign(void **out, size_t alignment, size_t n);

void *__wrap_malloc(size_t n) {
    n_allocations += counting;
    return __real_malloc(n);
}

void *__wrap_calloc(size_t n, size_t size) {
    n_allocations += counting;
    return __real_calloc(n, size);
}

void *__wrap_realloc(void *old, size_t n) {
    n_allocations += counting;
    return __real_realloc(old, n);
}

void *__wrap_aligned_alloc(size_t alignment, size_t n) {
    n_allocations += counting;
    return __real_aligned_alloc(alignment, n);
}

int __wrap_posix_memalign(void **out, size_t alignment, size_t n) {
    n_allocations += counting;
    return __real_posix_memalign(out, alignment, n);
}

enum { N_REQUESTS = 10, VOCAB = 280 };

static tempdir make_model(void) {
    tempdir dir = tempdir_make();
    synth_args args = {.arch = MODEL_ARCH_QWEN2_MOE,
                       .hidden = 32,
                       .layers = 3,
                       .heads = 4,
                       .kv_heads = 2,
                       .experts = 7,
                       .top_k = 3,
                       .intermediate = 24,
                       .shared_intermediate = 40,
                       .vocab = VOCAB,
                       .context = 128,
                       .type = DTYPE_BF16,
                       .seed = 5,
                       .dir = dir.path};
    error err;
    if (synth_write(&args, NULL, NULL, &err))
        fail_msg("%s", err.text);
    return dir;
}

// Every parameter that has code of its own in a step.
static void submit(rig *r, size_t i) {
    static const logit_bias bias = {3, 2.5f};
    int32_t prompt[60];
    sampling_params p = rig_greedy(5 + (int32_t)i);
    for (int32_t k = 0; k < 60; k++)
        prompt[k] = (k * 37 + (int32_t)i) % VOCAB;
    p.temperature = i % 2 ? 0.8f : 0;
    p.top_k = i % 3 ? 20 : 0;
    p.top_p = i % 4 ? 0.9f : 1;
    p.min_p = 0.01f;
    p.frequency_penalty = 0.5f;
    p.repetition_penalty = 1.1f;
    p.min_tokens = 3;
    p.n_stop_ids = 1;
    p.stop_ids[0] = 7;
    p.logprobs = (int32_t)i * 2;
    p.prompt_logprobs = i % 2;
    p.seed = i;
    p.logit_bias = &bias;
    p.n_logit_bias = 1;
    rig_submit(r, i % rig_plan(r)->n_attention, prompt, 1 + 6 * i, &p);
}

static void run(const config *c) {
    rig *r = rig_open(c);
    for (size_t i = 0; i < N_REQUESTS; i++)
        submit(r, i);
    n_allocations = 0;
    counting = true;
    rig_run(r);
    counting = false;
    assert_int_equal(n_allocations, 0);
    assert_true(rig_load(r, 0)->steps > 10);
    rig_close(r);
}

static void test_the_count_counts(void **state) {
    (void)state;
    uv_loop_t loop;
    bytes_writer w = {0};
    n_allocations = 0;
    counting = true;
    bytes_write_u8(&w, 1); // allocates inside of our library
    assert_int_equal(n_allocations, 1);
    uv_loop_init(&loop); // allocates inside of libuv
    counting = false;
    assert_true(n_allocations > 1);
    uv_loop_close(&loop);
    bytes_writer_free(&w);
}

static void test_no_step_allocates(void **state) {
    (void)state;
    tempdir dir = make_model();
    config c = rig_config(dir.path);
    for (int lanes = 1; lanes <= 3; lanes++) {
        c.attention.lanes = lanes;
        run(&c);
    }
    c.attention.workers = 2;
    c.ffn.workers = 3;
    c.attention.token_budget = 16;
    c.attention.max_seqs = 4;
    run(&c);
    c.ffn.gather = CONFIG_GATHER_NONE;
    c.dtype = CONFIG_DTYPE_F32;
    run(&c);
    tempdir_remove(&dir);
}

static void test_no_preemption_allocates(void **state) {
    (void)state;
    tempdir dir = make_model();
    config c = rig_config(dir.path);
    c.attention.kv_tokens = 96;
    run(&c);
    tempdir_remove(&dir);
}

typedef struct wire_end {
    control_conn *conn; // of the accepting side
    unsigned n_messages;
} wire_end;

static void on_message(void *user, control_conn *conn, uint16_t type, const void *payload,
                       size_t n) {
    (void)conn, (void)type, (void)payload, (void)n;
    ((wire_end *)user)->n_messages++;
}

static void on_closed(void *user, control_conn *conn, const char *reason) {
    (void)user, (void)conn, (void)reason;
}

static void on_accept(void *user, control_conn *conn, control_callbacks *callbacks) {
    ((wire_end *)user)->conn = conn;
    *callbacks = (control_callbacks){user, on_message, on_closed};
}

// The message that ends a step does not either, while the router reads.
static void test_no_control_message_allocates(void **state) {
    (void)state;
    enum { N_MESSAGES = 40, BYTES = 200 };
    static const uint8_t payload[BYTES];
    tempdir dir = tempdir_make();
    char address[sizeof dir.path + 16];
    snprintf(address, sizeof address, "unix:%s/socket", dir.path);
    uv_loop_t loop;
    uv_loop_init(&loop);
    wire_end end = {0};
    control_callbacks callbacks = {&end, on_message, on_closed};
    control_listen_args args = {
        .loop = &loop, .address = address, .user = &end, .on_accept = on_accept};
    control_listener *listener;
    control_conn *conn;
    error err;
    assert_int_equal(control_listen(&args, &listener, &err), 0);
    assert_int_equal(control_connect(&loop, address, &callbacks, &conn, &err), 0);
    while (!end.conn)
        uv_run(&loop, UV_RUN_ONCE);
    uv_run(&loop, UV_RUN_NOWAIT);
    n_allocations = 0;
    counting = true;
    for (int i = 0; i < N_MESSAGES; i++)
        assert_int_equal(control_send(conn, 1, payload, i % 2 ? BYTES : 0), 0);
    counting = false;
    assert_int_equal(n_allocations, 0);
    while (end.n_messages < N_MESSAGES)
        uv_run(&loop, UV_RUN_ONCE);
    control_close(conn);
    control_close(end.conn);
    control_listener_close(listener);
    uv_run(&loop, UV_RUN_DEFAULT);
    assert_int_equal(uv_loop_close(&loop), 0);
    tempdir_remove(&dir);
}

int main(void) {
    uv_replace_allocator(__wrap_malloc, __wrap_realloc, __wrap_calloc, free);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_the_count_counts),
        cmocka_unit_test(test_no_step_allocates),
        cmocka_unit_test(test_no_preemption_allocates),
        cmocka_unit_test(test_no_control_message_allocates),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
