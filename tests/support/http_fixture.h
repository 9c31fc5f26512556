// http_fixture.h: a server with a handler that a test drives.
//
// /later and /stream are held for the test to answer; every other path is answered at once with
// what was asked. Include it in one file of a program, after cmocka.h.
#ifndef TANDEM_TESTS_SUPPORT_HTTP_FIXTURE_H
#define TANDEM_TESTS_SUPPORT_HTTP_FIXTURE_H

#include "router/http.h"
#include "router/http_head.h"
#include "tests/support/http_client.h"

enum { MAX_HELD = 16 };

typedef struct fixture {
    uv_loop_t loop;
    http_server *server;
    int port;
    bool closed;
    int n_requests, n_aborts, n_held;
    http_request *held[MAX_HELD]; // of /later and /stream, in order of arrival
} fixture;

static fixture *fx;

static inline void on_abort(void *user) {
    fx->n_aborts++;
    *(http_request **)user = NULL;
}

static inline void on_request(void *user, http_request *request) {
    (void)user;
    fx->n_requests++;
    const char *path = http_request_path(request);
    if (strcmp(path, "/later") == 0 || strcmp(path, "/stream") == 0) {
        assert_true(fx->n_held < MAX_HELD);
        fx->held[fx->n_held] = request;
        http_request_watch(request, on_abort, &fx->held[fx->n_held++]);
        if (path[1] == 's')
            http_stream_begin(request, 200, "text/event-stream", NULL);
        return;
    }
    size_t n;
    const char *body = http_request_body(request, &n);
    char out[1024];
    int n_out = snprintf(out, sizeof out, "<%s %s?%s %zu %.100s>", http_request_method(request),
                         path, http_request_query(request), n, body);
    http_respond(request, 200, "text/plain", "X-Extra: yes\r\n", out, (size_t)n_out);
}

static inline void start(http_limits limits) {
    fx = calloc(1, sizeof *fx);
    uv_loop_init(&fx->loop);
    error err = {0};
    http_server_args args = {&fx->loop, "127.0.0.1", 0, limits, on_request, NULL};
    assert_int_equal(http_server_open(&args, &fx->server, &err), E_OK);
    fx->port = http_server_port(fx->server);
    assert_true(fx->port > 0);
}

static inline void on_server_closed(void *user) {
    ((fixture *)user)->closed = true;
}

static inline int setup(void **state) {
    (void)state;
    start(http_limits_default());
    return 0;
}

static inline int teardown(void **state) {
    (void)state;
    if (!fx->closed)
        http_server_close(fx->server, 0, on_server_closed, fx);
    for (int i = 0; i < 20000 && !fx->closed; i++)
        client_turn(&fx->loop);
    assert_true(fx->closed);
    uv_run(&fx->loop, UV_RUN_NOWAIT);
    assert_int_equal(uv_loop_close(&fx->loop), 0);
    free(fx);
    return 0;
}

static inline void restart(http_limits limits) {
    teardown(NULL);
    start(limits);
}

static inline client *dial(void) {
    return client_open(&fx->loop, fx->port);
}

// Sends text on a fresh connection and expects expected in the answer and, where asked, the end.
static inline void expect(const char *text, const char *expected, bool end) {
    client *c = dial();
    assert_true(client_send(c, text));
    if (!client_wait(c, expected)) {
        print_error("sent: %s\nwanted: %s\ngot: %s\n", text, expected, c->in);
        fail();
    }
    if (end)
        assert_true(client_wait_eof(c));
    client_close(c);
}

static inline http_request *wait_held(int i) {
    for (int turn = 0; turn < 20000 && fx->n_held <= i; turn++)
        client_turn(&fx->loop);
    assert_true(fx->n_held > i);
    return fx->held[i];
}

static inline void wait_aborts(int n) {
    for (int turn = 0; turn < 20000 && fx->n_aborts < n; turn++)
        client_turn(&fx->loop);
    assert_int_equal(fx->n_aborts, n);
}

#define HOST "Host: x\r\n"

#define TEST(name) cmocka_unit_test_setup_teardown(name, setup, teardown)

#endif
