// The bundle and its fleet against workers that this test plays itself, on the same loop: joining,
// hostile connections, requests, limits and every way to end.
#include "engine/control.h"
#include "router/bundle.h"
#include "engine/messages.h"
#include "tests/support/tempdir.h"

#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cmocka.h>

enum { MAX_FAKES = 48, KV_TOKENS = 100, CONTEXT = 128 };

typedef struct bench bench;

typedef struct fake {
    bench *bench;
    control_conn *conn; // NULL: closed
    worker_kind kind;
    uint32_t rank;
    bool closed, has_config, has_topology, told_to_go;
    message_topology topology;
    size_t n_submits, n_cancels;
    message_submit submit; // the newest one; its arrays are freed
    uint64_t cancelled;    // the newest one
} fake;

struct bench {
    tempdir dir;
    config config;
    plan plan;
    uv_loop_t loop;
    uv_timer_t tick; // wakes the loop, so that no wait of a test is without end
    size_t ticks;
    bundle *bundle;
    size_t n_ready, n_failed, n_drained, n_done;
    char reason[700];
    fake fakes[MAX_FAKES];
    size_t n_fakes;
    bytes_writer out;
};

// ---- the loop ----

static void on_tick(uv_timer_t *timer) {
    ((bench *)timer->data)->ticks++;
}

// Turns the loop until the condition holds; a minute of nothing fails the test.
#define WAIT_UNTIL(b, condition)                                                                   \
    for ((b)->ticks = 0; !(condition); uv_run(&(b)->loop, UV_RUN_ONCE))                            \
        if ((b)->ticks > 3000)                                                                     \
    fail_msg("never: %s (the bundle said: %s)", #condition, (b)->reason)

// Long enough for whatever is under way on these sockets.
static void settle(bench *b) {
    WAIT_UNTIL(b, b->ticks >= 3);
}

// ---- the bundle ----

static void on_ready(void *user) {
    ((bench *)user)->n_ready++;
}

static void on_failed(void *user, const char *reason) {
    bench *b = user;
    b->n_failed++;
    snprintf(b->reason, sizeof b->reason, "%s", reason);
}

static void on_drained(void *user) {
    ((bench *)user)->n_drained++;
}

static void on_done(void *user) {
    ((bench *)user)->n_done++;
}

// A port that nobody listens on at this moment.
static uint16_t free_port(void) {
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t n = sizeof address;
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    assert_int_equal(bind(fd, (struct sockaddr *)&address, sizeof address), 0);
    assert_int_equal(getsockname(fd, (struct sockaddr *)&address, &n), 0);
    close(fd);
    return ntohs(address.sin_port);
}

static bench *bench_open(int64_t n_attention, int64_t n_ffn) {
    static const char model[] = "{\"model_type\": \"olmoe\", \"hidden_size\": 32,"
                                " \"architectures\": [\"OlmoeForCausalLM\"],"
                                " \"num_hidden_layers\": 2, \"num_attention_heads\": 4,"
                                " \"num_experts\": 64, \"num_experts_per_tok\": 2,"
                                " \"intermediate_size\": 24, \"vocab_size\": 270,"
                                " \"max_position_embeddings\": 128, \"torch_dtype\": \"float32\"}";
    bench *b = calloc(1, sizeof *b);
    char text[512];
    error err;
    assert_non_null(b);
    b->dir = tempdir_make();
    tempdir_write_text(&b->dir, "config.json", model);
    snprintf(text, sizeof text, "{\"model\": \"%s\"}", b->dir.path);
    assert_int_equal(config_parse_json("test", text, strlen(text), &b->config, &err), E_OK);
    b->config.attention.workers = n_attention;
    b->config.ffn.workers = n_ffn;
    b->config.attention.launch = b->config.ffn.launch = 0;
    b->config.attention.max_seqs = 3;
    b->config.router.max_waiting = 2;
    snprintf(b->config.router.control, sizeof b->config.router.control, "127.0.0.1:%u",
             (unsigned)free_port());
    if (plan_make(&b->config, &b->plan, &err))
        fail_msg("%s", err.text);
    uv_loop_init(&b->loop);
    uv_timer_init(&b->loop, &b->tick);
    b->tick.data = b;
    uv_timer_start(&b->tick, on_tick, 20, 20);
    return b;
}

static void open_bundle(bench *b) {
    error err;
    bundle_args args = {.loop = &b->loop,
                        .config = &b->config,
                        .plan = &b->plan,
                        .user = b,
                        .on_ready = on_ready,
                        .on_failed = on_failed};
    if (bundle_open(&args, &b->bundle, &err))
        fail_msg("%s", err.text);
}

static void bench_close(bench *b, bool now) {
    bundle_close(b->bundle, now, on_done, b);
    WAIT_UNTIL(b, b->n_done);
    for (size_t i = 0; i < b->n_fakes; i++)
        if (b->fakes[i].conn)
            control_close(b->fakes[i].conn);
    uv_close((uv_handle_t *)&b->tick, NULL);
    uv_run(&b->loop, UV_RUN_DEFAULT);
    assert_int_equal(uv_loop_close(&b->loop), 0);
    assert_int_equal(b->n_done, 1);
    bytes_writer_free(&b->out);
    tempdir_remove(&b->dir);
    free(b);
}

// ---- workers ----

static void on_message(void *user, control_conn *conn, uint16_t type, const void *payload,
                       size_t n) {
    fake *f = user;
    const char *text;
    size_t n_text;
    config c;
    error err;
    (void)conn;
    switch (type) {
    case MESSAGE_CONFIG:
        assert_int_equal(message_config_decode(payload, n, &f->rank, &text, &n_text), E_OK);
        assert_int_equal(config_parse_json("sent", text, n_text, &c, &err), E_OK);
        assert_string_equal(c.model, f->bench->config.model);
        f->has_config = true;
        break;
    case MESSAGE_TOPOLOGY:
        assert_int_equal(message_topology_decode(payload, n, &f->topology), E_OK);
        f->has_topology = true;
        break;
    case MESSAGE_SUBMIT:
        assert_int_equal(message_submit_decode(payload, n, &f->submit), E_OK);
        f->n_submits++;
        message_submit_free(&f->submit);
        break;
    case MESSAGE_CANCEL:
        assert_int_equal(message_cancel_decode(payload, n, &f->cancelled), E_OK);
        f->n_cancels++;
        break;
    case MESSAGE_SHUTDOWN:
        f->told_to_go = true;
        control_close(f->conn);
        f->conn = NULL;
        break;
    default:
        fail_msg("a worker was sent a message of type %u", type);
    }
}

static void on_closed(void *user, control_conn *conn, const char *reason) {
    fake *f = user;
    (void)conn, (void)reason;
    f->conn = NULL;
    f->closed = true;
}

static fake *connect_fake(bench *b, worker_kind kind) {
    assert_true(b->n_fakes < MAX_FAKES);
    fake *f = &b->fakes[b->n_fakes++];
    error err;
    *f = (fake){.bench = b, .kind = kind, .rank = UINT32_MAX};
    control_callbacks callbacks = {f, on_message, on_closed};
    assert_int_equal(
        control_connect(&b->loop, b->config.router.control, &callbacks, &f->conn, &err), E_OK);
    return f;
}

static void say(fake *f, uint16_t type) {
    bytes_writer *out = &f->bench->out;
    assert_int_equal(control_send(f->conn, type, out->data, out->n), E_OK);
    bytes_writer_reset(out);
}

static void say_hello(fake *f, uint32_t protocol, int32_t rank) {
    message_hello_encode(&f->bench->out, &(message_hello){protocol, f->kind, rank, 1});
    say(f, MESSAGE_HELLO);
}

static void say_ready(fake *f, uint64_t plan_hash) {
    static message_ready ready;
    ready = (message_ready){.plan_hash = plan_hash, .kv_tokens = KV_TOKENS + 10 * f->rank};
    ready.n_address = (uint32_t)snprintf((char *)ready.address, sizeof ready.address, "%d/%u",
                                         (int)f->kind, f->rank);
    message_ready_encode(&f->bench->out, &ready);
    say(f, MESSAGE_READY);
}

static fake *join_fake(bench *b, worker_kind kind) {
    fake *f = connect_fake(b, kind);
    say_hello(f, MESSAGE_PROTOCOL, -1);
    WAIT_UNTIL(b, f->has_config);
    return f;
}

// A bundle whose workers have all joined; attention workers come first among the fakes.
static bench *ready_bundle(int64_t n_attention, int64_t n_ffn) {
    bench *b = bench_open(n_attention, n_ffn);
    open_bundle(b);
    for (int64_t i = 0; i < n_attention + n_ffn; i++)
        say_ready(join_fake(b, i < n_attention ? WORKER_ATTENTION : WORKER_FFN), b->plan.hash);
    for (size_t i = 0; i < b->n_fakes; i++) {
        WAIT_UNTIL(b, b->fakes[i].has_topology);
        say(&b->fakes[i], MESSAGE_JOINED);
    }
    WAIT_UNTIL(b, b->n_ready);
    return b;
}

// ---- requests ----

typedef struct client {
    uint64_t id;
    size_t n_tokens, n_errors;
    token_event last;
    int code;
} client;

static void on_token(void *user, const token_event *event) {
    client *c = user;
    c->n_tokens++;
    c->last = *event;
}

static void on_error(void *user, int code, const char *message) {
    client *c = user;
    assert_true(message[0]);
    c->n_errors++;
    c->code = code;
}

static int try_submit(bench *b, client *c, size_t n_prompt, int32_t max_tokens, error *err) {
    static const int32_t prompt[CONTEXT + 1];
    sampling_params params = {
        .top_p = 1, .repetition_penalty = 1, .max_tokens = max_tokens, .logprobs = -1};
    *c = (client){0};
    bundle_submit_args args = {.prompt = prompt,
                               .n_prompt = n_prompt,
                               .params = &params,
                               .user = c,
                               .on_token = on_token,
                               .on_error = on_error};
    return bundle_submit(b->bundle, &args, &c->id, err);
}

static void submit(bench *b, client *c) {
    error err;
    if (try_submit(b, c, 5, 10, &err))
        fail_msg("%s", err.text);
}

static void say_token(fake *f, uint64_t request, int32_t position, finish_reason finish) {
    bytes_writer *out = &f->bench->out;
    message_tokens_begin(out);
    message_tokens_add(out, &(token_event){.request = request,
                                           .id = position * 2,
                                           .position = position,
                                           .finish = finish,
                                           .n_top = -1});
    message_tokens_finish(out, &(message_load){.running = 1, .kv_tokens = 16, .steps = 3});
    say(f, MESSAGE_TOKENS);
}

// ---- joining ----

static void test_workers_join(void **state) {
    (void)state;
    bench *b = bench_open(2, 1);
    client c;
    error err;
    open_bundle(b);
    assert_int_equal(try_submit(b, &c, 1, 1, &err), E_STATE);
    fake *ffn = join_fake(b, WORKER_FFN);
    fake *second = connect_fake(b, WORKER_ATTENTION);
    say_hello(second, MESSAGE_PROTOCOL, -1);
    WAIT_UNTIL(b, second->has_config);
    fake *first = join_fake(b, WORKER_ATTENTION);
    assert_true(ffn->rank == 0 && second->rank == 0 && first->rank == 1);
    message_progress_encode(&b->out, 50, 100);
    say(ffn, MESSAGE_PROGRESS);
    say_ready(ffn, b->plan.hash);
    say_ready(first, b->plan.hash);
    settle(b);
    assert_false(ffn->has_topology); // not all have loaded
    say_ready(second, b->plan.hash);
    for (size_t i = 0; i < 3; i++)
        WAIT_UNTIL(b, b->fakes[i].has_topology);
    assert_int_equal(ffn->topology.n_peers, 2);
    assert_int_equal(ffn->topology.peers[1].rank, 1);
    assert_memory_equal(ffn->topology.peers[1].address, "0/1", 3);
    assert_int_equal(first->topology.n_peers, 1);
    assert_memory_equal(first->topology.peers[0].address, "1/0", 3);
    say(first, MESSAGE_JOINED);
    say(ffn, MESSAGE_JOINED);
    settle(b);
    assert_int_equal(b->n_ready, 0);
    assert_int_equal(bundle_state_get(b->bundle), BUNDLE_STARTING);
    say(second, MESSAGE_JOINED);
    WAIT_UNTIL(b, b->n_ready == 1);
    assert_int_equal(bundle_state_get(b->bundle), BUNDLE_READY);
    assert_int_equal(bundle_stats_get(b->bundle).kv_capacity, 2 * KV_TOKENS); // of the smallest
    bench_close(b, false);
}

static void test_many_workers_at_once(void **state) {
    (void)state;
    bench *b = bench_open(20, 20);
    open_bundle(b);
    for (int i = 0; i < 40; i++) // all are there before the router has time for one
        say_hello(connect_fake(b, i < 20 ? WORKER_ATTENTION : WORKER_FFN), MESSAGE_PROTOCOL,
                  i % 20);
    for (size_t i = 0; i < 40; i++) {
        WAIT_UNTIL(b, b->fakes[i].has_config || b->fakes[i].closed);
        assert_true(b->fakes[i].has_config);
        assert_int_equal(b->fakes[i].rank, i % 20);
    }
    bench_close(b, true);
}

static void test_a_hello_that_does_not_fit_is_closed(void **state) {
    (void)state;
    bench *b = bench_open(1, 1);
    open_bundle(b);
    fake *member = join_fake(b, WORKER_ATTENTION);
    static const struct {
        uint32_t protocol;
        int32_t rank;
        worker_kind kind;
    } hellos[] = {{MESSAGE_PROTOCOL + 1, -1, WORKER_FFN},   // another version
                  {MESSAGE_PROTOCOL, 1, WORKER_FFN},        // no such rank
                  {MESSAGE_PROTOCOL, 0, WORKER_ATTENTION},  // is there already
                  {MESSAGE_PROTOCOL, -1, WORKER_ATTENTION}, // none is awaited
                  {MESSAGE_PROTOCOL, -7, WORKER_FFN}};
    for (size_t i = 0; i < sizeof hellos / sizeof *hellos; i++) {
        fake *f = connect_fake(b, hellos[i].kind);
        say_hello(f, hellos[i].protocol, hellos[i].rank);
        WAIT_UNTIL(b, f->closed);
        assert_false(f->has_config);
    }
    fake *f = connect_fake(b, WORKER_FFN);
    say(f, MESSAGE_JOINED); // no HELLO first
    WAIT_UNTIL(b, f->closed);
    assert_true(member->conn && !b->n_failed);
    join_fake(b, WORKER_FFN);
    bench_close(b, false);
}

// ---- hostile connections ----

static int connect_raw(const bench *b) {
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    const char *port = strrchr(b->config.router.control, ':') + 1;
    address.sin_port = htons((uint16_t)atoi(port));
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    assert_true(fd >= 0);
    assert_int_equal(connect(fd, (struct sockaddr *)&address, sizeof address), 0);
    return fd;
}

static bool is_closed(int fd) {
    char byte;
    ssize_t n = recv(fd, &byte, 1, MSG_DONTWAIT);
    return n == 0 || (n < 0 && errno == ECONNRESET);
}

static size_t count_closed(const int *fds, size_t n) {
    size_t n_closed = 0;
    for (size_t i = 0; i < n; i++)
        n_closed += is_closed(fds[i]);
    return n_closed;
}

static void test_garbage_of_strangers(void **state) {
    (void)state;
    static const char *const garbage[] = {
        "GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        "\xff\xff\xff\xff\x01\x00\x01\x00 a length beyond the limit",
        "\x00\x00\x00\x00\x00\x00\x00\x00",
    };
    static const size_t lengths[] = {27, 20, 8};
    bench *b = bench_open(1, 1);
    open_bundle(b);
    for (size_t i = 0; i < 3; i++) {
        int fd = connect_raw(b);
        assert_int_equal(send(fd, garbage[i], lengths[i], MSG_NOSIGNAL), lengths[i]);
        WAIT_UNTIL(b, is_closed(fd));
        close(fd);
    }
    int fd = connect_raw(b); // half a frame, then gone
    assert_int_equal(send(fd, "\x10\x00\x00\x00\x01", 5, MSG_NOSIGNAL), 5);
    settle(b);
    close(fd);
    settle(b);
    assert_int_equal(b->n_failed, 0);
    join_fake(b, WORKER_FFN);
    bench_close(b, true);
}

static void test_strangers_are_bounded(void **state) {
    (void)state;
    enum { MANY = 40 };
    int fds[MANY];
    bench *b = bench_open(1, 1);
    open_bundle(b);
    for (int i = 0; i < MANY; i++)
        fds[i] = connect_raw(b);
    WAIT_UNTIL(b, count_closed(fds, MANY) >= MANY - 20);
    settle(b);
    assert_true(count_closed(fds, MANY) < MANY);
    for (int i = 0; i < MANY; i++)
        close(fds[i]);
    settle(b);
    join_fake(b, WORKER_FFN); // there is room again
    bench_close(b, true);
}

// ---- workers that fail ----

static void expect_failure(bench *b, const char *who, const char *what) {
    WAIT_UNTIL(b, b->n_failed);
    settle(b);
    assert_int_equal(b->n_failed, 1);
    if (strncmp(b->reason, who, strlen(who)) != 0 || !strstr(b->reason, what))
        fail_msg("'%s' does not say %s ... %s", b->reason, who, what);
    assert_int_equal(bundle_state_get(b->bundle), BUNDLE_FAILED);
    client c;
    error err;
    assert_int_equal(try_submit(b, &c, 1, 1, &err), E_STATE);
    assert_non_null(strstr(err.text, what));
    bench_close(b, false);
}

static void test_another_plan(void **state) {
    (void)state;
    bench *b = bench_open(1, 1);
    open_bundle(b);
    say_ready(join_fake(b, WORKER_FFN), b->plan.hash ^ 1);
    expect_failure(b, "ffn0: ", "plan hash");
}

static void test_a_ready_that_cannot_be_read(void **state) {
    (void)state;
    bench *b = bench_open(1, 1);
    open_bundle(b);
    fake *f = join_fake(b, WORKER_ATTENTION);
    bytes_write_u32(&b->out, 1);
    say(f, MESSAGE_READY);
    expect_failure(b, "attn0: ", "READY");
}

static void test_the_reason_of_a_worker_is_passed_on(void **state) {
    (void)state;
    static const char reason[] = "/models/x/config.json: no such file; give the model's directory";
    bench *b = bench_open(1, 2);
    open_bundle(b);
    join_fake(b, WORKER_FFN);
    fake *f = join_fake(b, WORKER_FFN);
    bytes_write_blob(&b->out, reason, strlen(reason));
    say(f, MESSAGE_FAILED);
    control_close(f->conn);
    expect_failure(b, "ffn1: ", reason);
}

static void test_a_long_reason_is_cut(void **state) {
    (void)state;
    bench *b = bench_open(1, 1);
    open_bundle(b);
    fake *f = join_fake(b, WORKER_FFN);
    for (int i = 0; i < 100000; i++)
        bytes_write_u8(&b->out, 'x');
    say(f, MESSAGE_FAILED);
    control_close(f->conn);
    expect_failure(b, "ffn0: ", "xxxxxxxx");
}

static void test_a_worker_that_goes_at_once(void **state) {
    (void)state;
    bench *b = bench_open(1, 1);
    open_bundle(b);
    control_close(join_fake(b, WORKER_FFN)->conn);
    expect_failure(b, "ffn0: ", "before it was ready");
}

static void test_a_worker_that_sends_garbage(void **state) {
    (void)state;
    bench *b = bench_open(1, 1);
    open_bundle(b);
    int fd = connect_raw(b);
    bytes_write_u32(&b->out, 13); // HELLO by hand
    bytes_write_u16(&b->out, MESSAGE_HELLO);
    bytes_write_u16(&b->out, CONTROL_VERSION);
    message_hello_encode(&b->out, &(message_hello){MESSAGE_PROTOCOL, WORKER_FFN, 0, 1});
    bytes_write_blob(&b->out, "this is no frame", 16);
    assert_int_equal(send(fd, b->out.data, b->out.n, MSG_NOSIGNAL), b->out.n);
    bytes_writer_reset(&b->out);
    WAIT_UNTIL(b, b->n_failed);
    close(fd);
    expect_failure(b, "ffn0: ", "not a control message");
}

static void test_workers_that_never_come(void **state) {
    (void)state;
    bench *b = bench_open(1, 1);
    b->config.router.start_timeout_s = 1;
    open_bundle(b);
    join_fake(b, WORKER_ATTENTION); // is loading; who has not come is named
    expect_failure(b, "ffn0: ", "start_timeout_s");
}

static void test_a_lost_worker_ends_the_requests(void **state) {
    (void)state;
    bench *b = ready_bundle(2, 1);
    client c[3];
    for (int i = 0; i < 3; i++)
        submit(b, &c[i]);
    WAIT_UNTIL(b, b->fakes[0].n_submits == 2 && b->fakes[1].n_submits == 1);
    say_token(&b->fakes[0], c[0].id, 5, FINISH_STOP);
    WAIT_UNTIL(b, c[0].n_tokens);
    control_close(b->fakes[2].conn); // the FFN worker
    WAIT_UNTIL(b, b->n_failed);
    assert_true(c[0].n_errors == 0 && c[1].n_errors == 1 && c[2].n_errors == 1);
    expect_failure(b, "ffn0: ", "control connection ended");
}

// ---- requests ----

static void test_requests_end_once(void **state) {
    (void)state;
    bench *b = ready_bundle(2, 1);
    client c[4];
    for (int i = 0; i < 4; i++)
        submit(b, &c[i]);
    WAIT_UNTIL(b, b->fakes[0].n_submits == 2 && b->fakes[1].n_submits == 2); // spread by load
    assert_int_equal(b->fakes[1].submit.request, c[3].id);
    assert_int_equal(b->fakes[1].submit.params.max_tokens, 10);
    assert_int_equal(b->fakes[1].submit.n_prompt, 5);
    say_token(&b->fakes[0], c[0].id, 5, FINISH_NONE);
    say_token(&b->fakes[0], c[0].id, 6, FINISH_LENGTH);
    say_token(&b->fakes[0], c[0].id, 7, FINISH_NONE);  // after its end
    say_token(&b->fakes[0], 12345, 7, FINISH_NONE);    // never was
    say_token(&b->fakes[0], 0, 7, FINISH_STOP);        // no id at all
    say_token(&b->fakes[1], c[1].id, 0, FINISH_ERROR); // the worker refuses it
    bytes_write_u8(&b->out, 3);
    say(&b->fakes[1], MESSAGE_TOKENS); // cannot be read
    say(&b->fakes[1], 999);            // of no known type
    say_token(&b->fakes[1], c[3].id, 5, FINISH_NONE);
    WAIT_UNTIL(b, c[0].n_tokens == 2 && c[1].n_errors && c[3].n_tokens);
    settle(b);
    assert_int_equal(c[0].n_tokens, 2);
    assert_true(c[0].last.finish == FINISH_LENGTH && c[0].last.id == 12);
    assert_true(c[1].n_tokens == 0 && c[1].n_errors == 1 && c[1].code == E_INVALID);
    bundle_stats stats = bundle_stats_get(b->bundle);
    assert_int_equal(stats.running + stats.waiting, 2);
    assert_int_equal(stats.prompt_tokens, 10 + 5);
    assert_int_equal(stats.generated_tokens, 3);
    assert_int_equal(stats.kv_tokens, 32);
    // A cancelled one is told to its worker and heard of no more.
    bundle_cancel(b->bundle, c[3].id);
    bundle_cancel(b->bundle, c[3].id);
    bundle_cancel(b->bundle, c[0].id);
    say_token(&b->fakes[1], c[3].id, 6, FINISH_NONE);
    WAIT_UNTIL(b, b->fakes[1].n_cancels);
    settle(b);
    assert_int_equal(b->fakes[1].cancelled, c[3].id);
    assert_true(b->fakes[1].n_cancels == 1 && b->fakes[0].n_cancels == 0);
    assert_true(c[3].n_tokens == 1 && c[3].n_errors == 0);
    bench_close(b, false); // the one that is left hears of it
    assert_true(c[2].n_errors == 1 && c[2].n_tokens == 0 && c[3].n_errors == 0);
}

static void test_limits(void **state) {
    (void)state;
    bench *b = ready_bundle(2, 1);
    client c[8], extra;
    error err;
    assert_int_equal(try_submit(b, &extra, 0, 1, &err), E_INVALID);
    assert_int_equal(try_submit(b, &extra, CONTEXT, 1, &err), E_TOO_LARGE);
    assert_non_null(strstr(err.text, "context of 128"));
    assert_int_equal(try_submit(b, &extra, 1, INT32_MAX, &err), E_TOO_LARGE);
    assert_int_equal(try_submit(b, &extra, KV_TOKENS, 1, &err), E_TOO_LARGE);
    assert_non_null(strstr(err.text, "KV cache of 100"));
    assert_int_equal(bundle_max_model_len(b->bundle), KV_TOKENS);
    for (int i = 0; i < 8; i++) // 2 workers of 3 slots, and 2 that wait
        assert_int_equal(try_submit(b, &c[i], KV_TOKENS - 1, 1, &err), E_OK);
    assert_int_equal(try_submit(b, &extra, 1, 1, &err), E_FULL);
    bundle_cancel(b->bundle, c[4].id);
    assert_int_equal(try_submit(b, &extra, 1, 1, &err), E_OK);
    assert_int_not_equal(extra.id, c[4].id); // ids never come back
    assert_int_equal(try_submit(b, &c[4], 1, 1, &err), E_FULL);
    bench_close(b, false);
    assert_int_equal(c[0].n_errors, 1);
}

// ---- the end ----

static void test_drain(void **state) {
    (void)state;
    bench *b = ready_bundle(1, 1);
    client c[2], refused;
    error err;
    submit(b, &c[0]);
    submit(b, &c[1]);
    bundle_drain(b->bundle, on_drained, b);
    assert_int_equal(bundle_state_get(b->bundle), BUNDLE_DRAINING);
    assert_int_equal(try_submit(b, &refused, 1, 1, &err), E_STATE);
    say_token(&b->fakes[0], c[0].id, 5, FINISH_STOP);
    WAIT_UNTIL(b, c[0].n_tokens);
    settle(b);
    assert_int_equal(b->n_drained, 0);
    say_token(&b->fakes[0], c[1].id, 5, FINISH_NONE); // goes on while it drains
    say_token(&b->fakes[0], c[1].id, 6, FINISH_STOP);
    WAIT_UNTIL(b, b->n_drained);
    assert_true(c[1].n_tokens == 2 && c[1].n_errors == 0);
    bench_close(b, false);
}

static void test_drain_of_nothing(void **state) {
    (void)state;
    bench *b = ready_bundle(1, 1);
    bundle_drain(b->bundle, on_drained, b);
    assert_int_equal(b->n_drained, 0); // from the loop, not from inside
    WAIT_UNTIL(b, b->n_drained == 1);
    fake *attention = &b->fakes[0], *ffn = &b->fakes[1];
    bundle_close(b->bundle, false, on_done, b);
    WAIT_UNTIL(b, attention->told_to_go && ffn->told_to_go);
    bench_close(b, true); // a second close makes it quick
}

static void test_close_before_anything_joined(void **state) {
    (void)state;
    for (int now = 0; now < 2; now++) {
        bench *b = bench_open(1, 1);
        open_bundle(b);
        connect_fake(b, WORKER_ATTENTION);
        if (now)
            join_fake(b, WORKER_FFN);
        bench_close(b, now);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_workers_join),
        cmocka_unit_test(test_many_workers_at_once),
        cmocka_unit_test(test_a_hello_that_does_not_fit_is_closed),
        cmocka_unit_test(test_garbage_of_strangers),
        cmocka_unit_test(test_strangers_are_bounded),
        cmocka_unit_test(test_another_plan),
        cmocka_unit_test(test_a_ready_that_cannot_be_read),
        cmocka_unit_test(test_the_reason_of_a_worker_is_passed_on),
        cmocka_unit_test(test_a_long_reason_is_cut),
        cmocka_unit_test(test_a_worker_that_goes_at_once),
        cmocka_unit_test(test_a_worker_that_sends_garbage),
        cmocka_unit_test(test_workers_that_never_come),
        cmocka_unit_test(test_a_lost_worker_ends_the_requests),
        cmocka_unit_test(test_requests_end_once),
        cmocka_unit_test(test_limits),
        cmocka_unit_test(test_drain),
        cmocka_unit_test(test_drain_of_nothing),
        cmocka_unit_test(test_close_before_anything_joined),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
