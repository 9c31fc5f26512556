// The HTTP server over real loopback sockets: framing, order, streams, abort, draining.
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <cmocka.h>

#include "tests/support/http_fixture.h"

#include <signal.h>

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

// Writes that meet a reset before the loop has seen it.
static void test_write_after_reset(void **state) {
    (void)state;
    for (int i = 0; i < 2; i++) {
        client *c = dial();
        client_send(c, "GET /stream HTTP/1.1\r\n" HOST "\r\n");
        http_request *request = wait_held(i);
        client_run_ms(&fx->loop, 5);
        client_reset(c);
        for (int k = 0; k < 3; k++)
            http_stream_write(request, "data: x\n\n", 9);
        assert_int_equal(fx->n_aborts, 0); // never inside the call
        if (i == 0)
            wait_aborts(1);
        else
            http_stream_end(request); // ends first: no abort follows
        fx->n_aborts = 0;
        client_run_ms(&fx->loop, 10);
        assert_int_equal(fx->n_aborts, 0);
        assert_int_equal(http_server_connections(fx->server), 0);
    }
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

static void test_graceful_close(void **state) {
    (void)state;
    client *idle = dial(), *busy = dial(), *stuck = dial();
    client_send(busy, "GET /stream HTTP/1.1\r\n" HOST "\r\n");
    http_request *request = wait_held(0);
    client_send(stuck, "GET /later HTTP/1.1\r\n" HOST "\r\n");
    wait_held(1);
    http_server_close(fx->server, 500, on_server_closed, fx);
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

int main(void) {
    signal(SIGPIPE, SIG_IGN);
    const struct CMUnitTest tests[] = {
        TEST(test_simple),
        TEST(test_request_id_is_sanitised),
        TEST(test_byte_by_byte),
        TEST(test_pipelining_keeps_order),
        TEST(test_pipelining_is_bounded),
        TEST(test_bad_requests),
        TEST(test_bad_chunks),
        TEST(test_expect_continue),
        TEST(test_http_1_0),
        TEST(test_head_and_close),
        TEST(test_targets),
        TEST(test_stream),
        TEST(test_abort),
        TEST(test_write_after_reset),
        TEST(test_half_close_after_requests),
        TEST(test_graceful_close),
        TEST(test_open_errors),
        TEST(test_ipv6),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
