// The HTTP server over real loopback sockets: framing, limits, order, abort, draining.
#include "router/http.h"
#include "router/http_chunked.h"
#include "router/http_head.h"
#include "tests/support/http_client.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <cmocka.h>

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

static void on_abort(void *user) {
    fx->n_aborts++;
    *(http_request **)user = NULL;
}

static void on_request(void *user, http_request *request) {
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

static void start(http_limits limits) {
    fx = calloc(1, sizeof *fx);
    uv_loop_init(&fx->loop);
    error err = {0};
    http_server_args args = {&fx->loop, "127.0.0.1", 0, limits, on_request, NULL};
    assert_int_equal(http_server_open(&args, &fx->server, &err), E_OK);
    fx->port = http_server_port(fx->server);
    assert_true(fx->port > 0);
}

static void on_server_closed(void *user) {
    ((fixture *)user)->closed = true;
}

static int setup(void **state) {
    (void)state;
    start(http_limits_default());
    return 0;
}

static int teardown(void **state) {
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

static void restart(http_limits limits) {
    teardown(NULL);
    start(limits);
}

static client *dial(void) {
    return client_open(&fx->loop, fx->port);
}

// Sends text on a fresh connection and expects expected in the answer and, where asked, the end.
static void expect(const char *text, const char *expected, bool end) {
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

static http_request *wait_held(int i) {
    for (int turn = 0; turn < 20000 && fx->n_held <= i; turn++)
        client_turn(&fx->loop);
    assert_true(fx->n_held > i);
    return fx->held[i];
}

static void wait_aborts(int n) {
    for (int turn = 0; turn < 20000 && fx->n_aborts < n; turn++)
        client_turn(&fx->loop);
    assert_int_equal(fx->n_aborts, n);
}

#define HOST "Host: x\r\n"

static void test_simple(void **state) {
    (void)state;
    client *c = dial();
    client_send(c, "GET /a%20b?x=1&y HTTP/1.1\r\n" HOST "X-Request-Id: abc-1\r\n\r\n");
    assert_non_null(client_wait(c, "<GET /a b?x=1&y 0 >"));
    assert_non_null(strstr(c->in, "HTTP/1.1 200 OK\r\n"));
    assert_non_null(strstr(c->in, "Content-Type: text/plain\r\n"));
    assert_non_null(strstr(c->in, "x-request-id: abc-1\r\n"));
    assert_non_null(strstr(c->in, "Connection: keep-alive\r\n"));
    assert_non_null(strstr(c->in, "X-Extra: yes\r\n"));
    size_t n = c->n_in;
    client_send(c, "POST /p HTTP/1.1\r\n" HOST "Content-Length: 5\r\n\r\nhello");
    assert_non_null(client_wait_from(c, n, "<POST /p? 5 hello>"));
    client_close(c);
}

static void test_request_id_is_sanitised(void **state) {
    (void)state;
    expect("GET / HTTP/1.1\r\n" HOST "x-request-id: a b\"\r\n\r\n", "x-request-id: req-", false);
    expect("GET / HTTP/1.1\r\n" HOST "\r\n", "x-request-id: req-", false);
}

static void test_byte_by_byte(void **state) {
    (void)state;
    static const char text[] = "POST /s HTTP/1.1\r\n" HOST "Transfer-Encoding: chunked\r\n\r\n"
                               "5;ext=1\r\nhello\r\n00A\r\n, chunked!\r\n0\r\nTrailer: t\r\n\r\n"
                               "GET /next HTTP/1.1\r\n" HOST "\r\n";
    client *c = dial();
    for (size_t i = 0; i + 1 < sizeof text; i++) {
        assert_true(client_send_n(c, text + i, 1));
        client_turn(&fx->loop);
    }
    assert_non_null(client_wait(c, "<POST /s? 15 hello, chunked!>"));
    assert_non_null(client_wait(c, "<GET /next? 0 >"));
    client_close(c);
}

static void test_pipelining_keeps_order(void **state) {
    (void)state;
    client *c = dial();
    client_send(c, "GET /1 HTTP/1.1\r\n" HOST "\r\nGET /later HTTP/1.1\r\n" HOST "\r\n"
                   "POST /3 HTTP/1.1\r\n" HOST
                   "Content-Length: 2\r\n\r\nokGET /later HTTP/1.1\r\n" HOST
                   "\r\nGET /5 HTTP/1.1\r\n" HOST "\r\n");
    assert_non_null(client_wait(c, "<GET /1? 0 >"));
    http_request *second = wait_held(0);
    client_run_ms(&fx->loop, 20);
    client_poll(c);
    assert_null(strstr(c->in, "/3"));
    assert_int_equal(fx->n_requests, 2);
    http_respond(second, 200, "text/plain", NULL, "<second>", 8);
    assert_int_equal(fx->n_requests, 2); // the next one is not taken up inside the call
    http_request *fourth = wait_held(1);
    http_respond(fourth, 200, "text/plain", NULL, "<fourth>", 8);
    assert_non_null(client_wait(c, "<GET /5? 0 >"));
    const char *a = strstr(c->in, "<second>"), *b = strstr(c->in, "<POST /3"),
               *d = strstr(c->in, "<fourth>"), *e = strstr(c->in, "<GET /5");
    assert_true(a && b && d && e && a < b && b < d && d < e);
    client_close(c);
}

// Many requests in one go, more than a read's worth, behind one that waits.
static void test_pipelining_is_bounded(void **state) {
    (void)state;
    client *c = dial();
    client_send(c, "GET /later HTTP/1.1\r\n" HOST "\r\n");
    http_request *first = wait_held(0);
    static const char one[] = "GET /x HTTP/1.1\r\n" HOST "\r\n";
    enum { N = 6000 };
    for (int i = 0; i < N; i++)
        assert_true(client_send(c, one));
    client_run_ms(&fx->loop, 20);
    assert_int_equal(fx->n_requests, 1);
    http_respond(first, 200, "text/plain", NULL, "", 0);
    for (int turn = 0; turn < 20000 && fx->n_requests < N + 1; turn++) {
        client_turn(&fx->loop);
        client_poll(c);
    }
    assert_int_equal(fx->n_requests, N + 1);
    client_close(c);
}

static void test_bad_requests(void **state) {
    (void)state;
    static const struct {
        const char *text, *status;
    } cases[] = {
        {"GARBAGE\r\n\r\n", "400"},
        {"GET / HTTP/1.1\r\n\r\n", "400"},                            // no Host
        {"GET / HTTP/1.1\r\n" HOST HOST "\r\n", "400"},               // two
        {"GET / HTTP/1.1\nHost: x\n\n", "400"},                       // bare LF
        {"GET / HTTP/1.1\r\n" HOST "A: b\rc\r\n\r\n", "400"},         // bare CR
        {"GET / HTTP/1.1\r\n" HOST "A: b\r\n folded\r\n\r\n", "400"}, // obs-fold
        {"GET / HTTP/1.1\r\n" HOST "A: b\x01\r\n\r\n", "400"},        // control byte
        {"GET / HTTP/1.1\r\n" HOST "A : b\r\n\r\n", "400"},           // blank before the colon
        {"GET / HTTP/1.1\r\n" HOST ": b\r\n\r\n", "400"},             // no name
        {"GET / HTTP/1.1\r\n" HOST "Ab\r\n\r\n", "400"},              // no colon
        {" GET / HTTP/1.1\r\n" HOST "\r\n", "400"},
        {"GET /%zz HTTP/1.1\r\n" HOST "\r\n", "400"},
        {"GET /%00 HTTP/1.1\r\n" HOST "\r\n", "400"},
        {"GET / HTTP/2.0\r\n" HOST "\r\n", "505"},
        {"GET / HTTP/9.9\r\n" HOST "\r\n", "505"},
        {"GET /\r\n\r\n", "HTTP/1.1"},
        {"POST / HTTP/1.1\r\n" HOST "Content-Length: -1\r\n\r\n", "400"},
        {"POST / HTTP/1.1\r\n" HOST "Content-Length: 1x\r\n\r\n", "400"},
        {"POST / HTTP/1.1\r\n" HOST "Content-Length:\r\n\r\n", "400"},
        {"POST / HTTP/1.1\r\n" HOST "Content-Length: 99999999999999999999\r\n\r\n", "4"},
        {"POST / HTTP/1.1\r\n" HOST "Content-Length: 1\r\nContent-Length: 1\r\n\r\na", "400"},
        {"POST / HTTP/1.1\r\n" HOST "Content-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n",
         "400"},
        {"POST / HTTP/1.1\r\n" HOST "Transfer-Encoding: chunked\r\nContent-Length: 1\r\n\r\n",
         "400"},
        {"POST / HTTP/1.1\r\n" HOST "Transfer-Encoding: gzip, chunked\r\n\r\n", "501"},
        {"POST / HTTP/1.1\r\n" HOST "Transfer-Encoding : chunked\r\n\r\n", "400"},
        {"POST / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n", "400"},
        {"POST / HTTP/1.1\r\n" HOST "Expect: a miracle\r\nContent-Length: 1\r\n\r\n", "417"},
        {"\x16\x03\x01\x02", "400"}, // a TLS client
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        char status[32];
        snprintf(status, sizeof status, "HTTP/1.1 %s", cases[i].status);
        if (cases[i].status[0] == 'H')
            expect(cases[i].text, cases[i].status, true);
        else
            expect(cases[i].text, status, true);
    }
    assert_int_equal(fx->n_requests, 0);
    expect("GET / HTTP/1.1\r\n\r\n",
           "{\"error\":{\"message\":\"exactly one Host header is needed\","
           "\"type\":\"invalid_request_error\",\"param\":null,\"code\":null}}",
           true);
}

static void test_bad_chunks(void **state) {
    (void)state;
    static const char *const bodies[] = {
        "5\nhello\r\n0\r\n\r\n",
        "5\r\nhelloXX0\r\n\r\n",
        "5\r\nhello\n0\r\n\r\n",
        "x\r\n",
        "\r\n",
        "-1\r\n",
        "1000000000000000\r\n",
        "5 \r\nhello\r\n",
        "0\r\n folded\r\n\r\n",
        "0\r\nA: b\n\r\n",
        "5\r\nhello\r\n0\r\n\rX",
    };
    for (size_t i = 0; i < sizeof bodies / sizeof bodies[0]; i++) {
        char text[256];
        snprintf(text, sizeof text,
                 "POST / HTTP/1.1\r\n" HOST "Transfer-Encoding: chunked\r\n\r\n%s", bodies[i]);
        expect(text, "HTTP/1.1 400", true);
    }
    assert_int_equal(fx->n_requests, 0);
}

static void test_oversize(void **state) {
    (void)state;
    http_limits limits = http_limits_default();
    limits.max_header_bytes = 1000;
    limits.max_body_bytes = 2000;
    restart(limits);
    char *big = malloc(5000);
    int n = snprintf(big, 5000, "GET / HTTP/1.1\r\n" HOST "A: %01500d\r\n\r\n", 0);
    assert_true(n > 1500);
    expect(big, "HTTP/1.1 431", true);
    memset(big, 'a', 4000);
    big[4000] = '\0';
    expect(big, "HTTP/1.1 431", true);
    expect("POST / HTTP/1.1\r\n" HOST "Content-Length: 2001\r\n\r\n", "HTTP/1.1 413", true);
    // With 100-continue the body is refused before it is sent.
    expect("POST / HTTP/1.1\r\n" HOST "Expect: 100-continue\r\nContent-Length: 2001\r\n\r\n",
           "HTTP/1.1 413", true);
    snprintf(big, 5000,
             "POST / HTTP/1.1\r\n" HOST "Transfer-Encoding: chunked\r\n\r\n"
             "3e8\r\n%01000d\r\n3e8\r\n%01000d\r\n1\r\nx",
             0, 0);
    expect(big, "HTTP/1.1 413", true);
    n = snprintf(big, 5000, "POST / HTTP/1.1\r\n" HOST "Content-Length: 2000\r\n\r\n%02000d", 0);
    expect(big, "<POST /? 2000 0000", false);
    free(big);
    char many[4000] = "GET / HTTP/1.1\r\n" HOST;
    restart(http_limits_default());
    for (int i = 0; i < HTTP_MAX_HEADERS; i++)
        strcat(many, "A: b\r\n");
    strcat(many, "\r\n");
    expect(many, "HTTP/1.1 431", true);
}

static void test_total_body_cap(void **state) {
    (void)state;
    http_limits limits = http_limits_default();
    limits.max_total_body_bytes = 10000;
    restart(limits);
    client *c = dial();
    client_send(c, "POST /later HTTP/1.1\r\n" HOST "Content-Length: 9000\r\n\r\n");
    char zeros[9001];
    memset(zeros, '0', sizeof zeros);
    client_send_n(c, zeros, 9000);
    http_request *first = wait_held(0);
    expect("POST / HTTP/1.1\r\n" HOST "Content-Length: 5000\r\n\r\nab", "HTTP/1.1 503", true);
    http_request_drop_body(first);
    expect("POST / HTTP/1.1\r\n" HOST "Content-Length: 2\r\n\r\nab", "<POST /? 2 ab>", false);
    http_respond(first, 200, NULL, NULL, NULL, 0);
    client_close(c);
}

static void test_expect_continue(void **state) {
    (void)state;
    client *c = dial();
    client_send(c, "POST / HTTP/1.1\r\n" HOST "Expect: 100-continue\r\nContent-Length: 2\r\n\r\n");
    assert_non_null(client_wait(c, "HTTP/1.1 100 Continue\r\n\r\n"));
    client_send(c, "ok");
    assert_non_null(client_wait(c, "<POST /? 2 ok>"));
    client_close(c);
}

static void test_http_1_0(void **state) {
    (void)state;
    expect("GET /old HTTP/1.0\r\n\r\n", "<GET /old? 0 >", true);
    expect("GET /old HTTP/1.0\r\nConnection: keep-alive\r\n\r\nGET /two HTTP/1.0\r\n\r\n",
           "<GET /two? 0 >", true);
    // A stream to HTTP/1.0 has no chunks and ends with the connection.
    client *c = dial();
    client_send(c, "GET /stream HTTP/1.0\r\nConnection: keep-alive\r\n\r\n");
    http_request *request = wait_held(0);
    assert_int_equal(http_stream_write(request, "data: 1\n\n", 9), E_OK);
    http_stream_end(request);
    assert_true(client_wait_eof(c));
    assert_non_null(strstr(c->in, "\r\n\r\ndata: 1\n\n"));
    assert_null(strstr(c->in, "chunked"));
    client_close(c);
}

static void test_head_and_close(void **state) {
    (void)state;
    client *c = dial();
    client_send(c, "HEAD /h HTTP/1.1\r\n" HOST "\r\nGET /g HTTP/1.1\r\n" HOST
                   "Connection: close\r\n\r\n");
    assert_true(client_wait_eof(c));
    assert_null(strstr(c->in, "<HEAD"));
    assert_non_null(strstr(c->in, "Content-Length: 13\r\n"));
    assert_non_null(strstr(c->in, "<GET /g? 0 >"));
    assert_non_null(strstr(c->in, "Connection: close\r\n"));
    client_close(c);
}

static void test_targets(void **state) {
    (void)state;
    expect("GET http://h:1/abs?q HTTP/1.1\r\n" HOST "\r\n", "<GET /abs?q 0 >", false);
    expect("OPTIONS * HTTP/1.1\r\n" HOST "\r\n", "<OPTIONS *? 0 >", false);
    expect("\r\n\r\nGET /blank HTTP/1.1\r\n" HOST "\r\n", "<GET /blank? 0 >", false);
    expect("GET /up HTTP/1.1\r\n" HOST "Connection: Upgrade\r\nUpgrade: websocket\r\n\r\n",
           "<GET /up? 0 >", false);
    expect("CONNECT h:1 HTTP/1.1\r\n" HOST "\r\n", "<CONNECT h:1", false);
}

static void test_slow_clients(void **state) {
    (void)state;
    http_limits limits = http_limits_default();
    limits.header_timeout_ms = 60;
    limits.body_timeout_ms = 60;
    limits.idle_timeout_ms = 120;
    restart(limits);
    expect("GET / HTTP/1.1\r\nHos", "HTTP/1.1 408", true);
    expect("POST / HTTP/1.1\r\n" HOST "Content-Length: 5\r\n\r\nabc", "HTTP/1.1 408", true);
    client *c = dial(); // idle: closed without a word
    uint64_t begin = client_now_ms();
    assert_true(client_wait_eof(c));
    assert_true(client_now_ms() - begin >= 100);
    assert_int_equal(c->n_in, 0);
    client_close(c);
    c = dial(); // a request in service is not idle
    client_send(c, "GET /later HTTP/1.1\r\n" HOST "\r\n");
    http_request *request = wait_held(0);
    client_run_ms(&fx->loop, 200);
    http_respond(request, 200, "text/plain", NULL, "patience", 8);
    assert_non_null(client_wait(c, "patience"));
    client_close(c);
}

static void test_stream(void **state) {
    (void)state;
    client *c = dial();
    client_send(c, "GET /stream HTTP/1.1\r\n" HOST "\r\n");
    http_request *request = wait_held(0);
    assert_non_null(client_wait(c, "Transfer-Encoding: chunked\r\n"));
    assert_int_equal(http_stream_write(request, "data: 1\n\n", 9), E_OK);
    assert_non_null(client_wait(c, "9\r\ndata: 1\n\n\r\n"));
    http_stream_end(request);
    assert_non_null(client_wait(c, "\r\n0\r\n\r\n"));
    size_t n = c->n_in;
    client_send(c, "GET /after HTTP/1.1\r\n" HOST "\r\n");
    assert_non_null(client_wait_from(c, n, "<GET /after? 0 >"));
    assert_int_equal(fx->n_aborts, 0);
    client_close(c);
}

static void test_abort(void **state) {
    (void)state;
    static const char *const paths[] = {"/stream", "/later"};
    int n = 0;
    for (int i = 0; i < 6; i++) {
        client *c = dial();
        char text[64];
        snprintf(text, sizeof text, "GET %s HTTP/1.1\r\n" HOST "\r\n", paths[i % 2]);
        client_send(c, text);
        http_request *request = wait_held(n);
        if (i % 2 == 0)
            http_stream_write(request, "data\n\n", 6);
        if (i < 2) {
            client_close(c); // unread data: a reset or an end, as the kernel likes
        } else if (i < 4) {
            client_reset(c);
        } else {
            shutdown(c->fd, SHUT_WR); // counts as gone
            wait_aborts(n + 1);
            client_close(c);
        }
        wait_aborts(++n);
        assert_null(fx->held[i]);
    }
    client_run_ms(&fx->loop, 5);
    assert_int_equal(http_server_connections(fx->server), 0);
}

// The end of the client's side right behind requests that need no wait: all are answered.
static void test_half_close_after_requests(void **state) {
    (void)state;
    client *c = dial();
    client_send(c, "GET /1 HTTP/1.1\r\n" HOST "\r\nGET /2 HTTP/1.1\r\n" HOST "\r\n");
    shutdown(c->fd, SHUT_WR);
    assert_true(client_wait_eof(c));
    assert_non_null(strstr(c->in, "<GET /1? 0 >"));
    assert_non_null(strstr(c->in, "<GET /2? 0 >"));
    client_close(c);
}

static void test_reader_that_does_not_read(void **state) {
    (void)state;
    http_limits limits = http_limits_default();
    limits.max_write_queue_bytes = 50000;
    restart(limits);
    client *c = dial();
    client_send(c, "GET /stream HTTP/1.1\r\n" HOST "\r\n");
    http_request *request = wait_held(0);
    static char block[65536];
    memset(block, 'b', sizeof block);
    int rc = E_OK, n;
    for (n = 0; n < 1000 && rc == E_OK; n++) {
        rc = http_stream_write(request, block, sizeof block);
        assert_int_equal(fx->n_aborts, 0); // never inside the call
        if (rc == E_OK)
            client_turn(&fx->loop);
    }
    assert_int_equal(rc, E_CLOSED);
    assert_int_equal(http_stream_write(request, block, 1), E_CLOSED);
    wait_aborts(1);
    client_close(c);
}

static void test_write_stall(void **state) {
    (void)state;
    http_limits limits = http_limits_default();
    limits.write_timeout_ms = 60;
    restart(limits);
    client *c = dial();
    client_send(c, "GET /stream HTTP/1.1\r\n" HOST "\r\n");
    http_request *request = wait_held(0);
    size_t n = 16 * 1024 * 1024;
    char *block = calloc(1, n);
    http_stream_write(request, block, n);
    free(block);
    wait_aborts(1);
    client_close(c);
}

static void test_too_many_connections(void **state) {
    (void)state;
    http_limits limits = http_limits_default();
    limits.max_connections = 2;
    restart(limits);
    client *a = dial(), *b = dial();
    client_send(a, "GET /a HTTP/1.1\r\n" HOST "\r\n");
    client_send(b, "GET /b HTTP/1.1\r\n" HOST "\r\n");
    assert_non_null(client_wait(a, "<GET /a"));
    assert_non_null(client_wait(b, "<GET /b"));
    expect("", "HTTP/1.1 503", true);
    client_close(a);
    client_run_ms(&fx->loop, 10);
    expect("GET /c HTTP/1.1\r\n" HOST "\r\n", "<GET /c? 0 >", false);
    client_close(b);
}

static void test_graceful_close(void **state) {
    (void)state;
    client *idle = dial(), *busy = dial(), *stuck = dial();
    client_send(busy, "GET /stream HTTP/1.1\r\n" HOST "\r\n");
    http_request *request = wait_held(0);
    client_send(stuck, "GET /later HTTP/1.1\r\n" HOST "\r\n");
    wait_held(1);
    http_server_close(fx->server, 150, on_server_closed, fx);
    assert_true(client_wait_eof(idle));
    assert_int_equal(http_stream_write(request, "data: x\n\n", 9), E_OK);
    http_stream_end(request);
    assert_true(client_wait_eof(busy));
    assert_non_null(strstr(busy->in, "data: x\n\n\r\n0\r\n\r\n"));
    assert_int_equal(fx->n_aborts, 0);
    wait_aborts(1); // the one that did not end in time
    client_close(idle);
    client_close(busy);
    client_close(stuck);
}

static void test_open_errors(void **state) {
    (void)state;
    error err = {0};
    http_server *server = NULL;
    http_server_args args = {&fx->loop,  "127.0.0.1", fx->port, http_limits_default(),
                             on_request, NULL};
    assert_int_equal(http_server_open(&args, &server, &err), E_IO);
    assert_non_null(strstr(err.text, "127.0.0.1 port"));
    args.host = "no such host";
    assert_int_equal(http_server_open(&args, &server, &err), E_IO);
    args.host = "127.0.0.1";
    args.port = 70000;
    assert_int_equal(http_server_open(&args, &server, &err), E_INVALID);
    assert_null(server);
}

static void test_ipv6(void **state) {
    (void)state;
    error err = {0};
    http_server *server = NULL;
    http_server_args args = {&fx->loop, "::1", 0, http_limits_default(), on_request, NULL};
    if (http_server_open(&args, &server, &err) != E_OK) {
        print_message("SKIPPED: no IPv6 loopback here: %s\n", err.text);
        skip();
    }
    int fd = socket(AF_INET6, SOCK_STREAM, 0);
    struct sockaddr_in6 to = {.sin6_family = AF_INET6, .sin6_addr = in6addr_loopback};
    to.sin6_port = htons((uint16_t)http_server_port(server));
    assert_int_equal(connect(fd, (struct sockaddr *)&to, sizeof to), 0);
    close(fd);
    client_run_ms(&fx->loop, 5);
    http_server_close(server, 0, NULL, NULL);
}

// The scanner and the chunk decoder say the same whatever the split.
static void test_split_independence(void **state) {
    (void)state;
    static const char head[] = "GET / HTTP/1.1\r\nHost: x\r\n\r\nrest";
    for (size_t cut = 0; cut < sizeof head; cut++) {
        size_t position = 0;
        int rc = http_head_scan(head, cut, &position);
        if (rc == E_AGAIN)
            rc = http_head_scan(head, sizeof head - 1, &position);
        assert_int_equal(rc, E_OK);
        assert_int_equal(position, sizeof head - 5);
    }
    static const char body[] = "3\r\nabc\r\n2\r\nde\r\n0\r\nT: x\r\n\r\nrest";
    for (size_t piece = 1; piece < sizeof body; piece++) {
        http_chunked decoder = {0};
        char out[16] = "";
        size_t n_out = 0, at = 0;
        int rc = E_AGAIN;
        while (rc == E_AGAIN && at < sizeof body - 1) {
            size_t n = sizeof body - 1 - at < piece ? sizeof body - 1 - at : piece, used, n_body;
            const char *run = NULL;
            rc = http_chunked_next(&decoder, body + at, n, &used, &run, &n_body);
            if (n_body)
                memcpy(out + n_out, run, n_body);
            n_out += n_body;
            at += used;
        }
        assert_int_equal(rc, E_OK);
        assert_string_equal(out, "abcde");
        assert_int_equal(at, sizeof body - 5);
    }
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, setup, teardown)

int main(void) {
    const struct CMUnitTest tests[] = {
        TEST(test_simple),
        TEST(test_request_id_is_sanitised),
        TEST(test_byte_by_byte),
        TEST(test_pipelining_keeps_order),
        TEST(test_pipelining_is_bounded),
        TEST(test_bad_requests),
        TEST(test_bad_chunks),
        TEST(test_oversize),
        TEST(test_total_body_cap),
        TEST(test_expect_continue),
        TEST(test_http_1_0),
        TEST(test_head_and_close),
        TEST(test_targets),
        TEST(test_slow_clients),
        TEST(test_stream),
        TEST(test_abort),
        TEST(test_half_close_after_requests),
        TEST(test_reader_that_does_not_read),
        TEST(test_write_stall),
        TEST(test_too_many_connections),
        TEST(test_graceful_close),
        TEST(test_open_errors),
        TEST(test_ipv6),
        TEST(test_split_independence),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
