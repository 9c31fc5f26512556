// The HTTP server against clients that send too much, too slowly, or do not read.
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <cmocka.h>

#include "tests/support/http_fixture.h"

#include <signal.h>

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

static void test_slow_clients(void **state) {
    (void)state;
    http_limits limits = http_limits_default();
    limits.header_timeout_ms = 60;
    limits.body_timeout_ms = 60;
    limits.idle_timeout_ms = 300;
    restart(limits);
    expect("GET / HTTP/1.1\r\nHos", "HTTP/1.1 408", true);
    expect("POST / HTTP/1.1\r\n" HOST "Content-Length: 5\r\n\r\nabc", "HTTP/1.1 408", true);
    client *c = dial(); // idle: closed without a word
    uint64_t begin = client_now_ms();
    assert_true(client_wait_eof(c));
    assert_true(client_now_ms() - begin >= 250);
    assert_int_equal(c->n_in, 0);
    client_close(c);
    c = dial(); // a request in service is not idle
    client_send(c, "GET /later HTTP/1.1\r\n" HOST "\r\n");
    http_request *request = wait_held(0);
    client_run_ms(&fx->loop, 400);
    http_respond(request, 200, "text/plain", NULL, "patience", 8);
    assert_non_null(client_wait(c, "patience"));
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

// Slow is not stalled, even while the queue does not shrink.
static void test_slow_reader_lives(void **state) {
    (void)state;
    http_limits limits = http_limits_default();
    limits.write_timeout_ms = 250;
    limits.max_write_queue_bytes = (size_t)64 << 20;
    restart(limits);
    client *c = dial();
    client_send(c, "GET /stream HTTP/1.1\r\n" HOST "\r\n");
    http_request *request = wait_held(0);
    size_t n = (size_t)16 << 20;
    char *block = calloc(1, n);
    http_stream_write(request, block, n);
    for (int turn = 0; turn < 70; turn++) {
        ssize_t got = recv(c->fd, block, 400000, MSG_DONTWAIT);
        if (got > 0)
            assert_int_equal(http_stream_write(request, block, 2 * (size_t)got), E_OK);
        client_run_ms(&fx->loop, 10);
    }
    free(block);
    assert_int_equal(fx->n_aborts, 0);
    client_close(c);
    wait_aborts(1);
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

int main(void) {
    signal(SIGPIPE, SIG_IGN);
    const struct CMUnitTest tests[] = {
        TEST(test_oversize),
        TEST(test_total_body_cap),
        TEST(test_slow_clients),
        TEST(test_reader_that_does_not_read),
        TEST(test_write_stall),
        TEST(test_slow_reader_lives),
        TEST(test_too_many_connections),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
