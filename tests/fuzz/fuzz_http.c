// Any bytes at an HTTP connection, in pieces: nothing breaks, each request ends exactly once, and
// the framing does not depend on how the bytes were cut.
#include "router/http.h"
#include "router/http_chunked.h"
#include "router/http_head.h"
#include "tests/support/http_client.h"

#include <signal.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static uv_loop_t loop;
static http_server *server;
static http_request *held;
static size_t n_begun, n_ended;

static void on_abort(void *user) {
    (void)user;
    held = NULL;
    n_ended++;
}

static void on_request(void *user, http_request *request) {
    (void)user;
    n_begun++;
    size_t n;
    const char *body = http_request_body(request, &n);
    if (strcmp(http_request_path(request), "/s") == 0) {
        http_stream_begin(request, 200, "text/event-stream", NULL);
        http_request_watch(request, on_abort, NULL);
        held = request;
        return;
    }
    http_respond(request, 200, "text/plain", NULL, body, n);
    n_ended++;
}

static void start(void) {
    signal(SIGPIPE, SIG_IGN);
    uv_loop_init(&loop);
    http_limits limits = http_limits_default();
    limits.max_header_bytes = 512;
    limits.max_body_bytes = 1024;
    error err = {0};
    http_server_args args = {&loop, "127.0.0.1", 0, limits, on_request, NULL};
    if (http_server_open(&args, &server, &err) != E_OK)
        abort();
}

// The body that comes out when data is fed in pieces of n bytes; -1 when the framing is broken.
static long decode(const uint8_t *data, size_t size, size_t piece, char *out) {
    http_chunked decoder = {0};
    long n_out = 0;
    for (size_t at = 0; at < size;) {
        size_t n = size - at < piece ? size - at : piece, used, n_body;
        const char *run = NULL;
        int rc = http_chunked_next(&decoder, (const char *)data + at, n, &used, &run, &n_body);
        if (rc == E_INVALID)
            return -1;
        if (n_body)
            memcpy(out + n_out, run, n_body);
        n_out += (long)n_body;
        at += used;
        if (rc == E_OK)
            break;
    }
    return n_out;
}

static void check_chunks(const uint8_t *data, size_t size, size_t piece) {
    char *whole = malloc(size + 1), *cut = malloc(size + 1);
    long n = decode(data, size, size, whole);
    if (decode(data, size, piece, cut) != n || (n > 0 && memcmp(whole, cut, (size_t)n) != 0))
        abort();
    free(whole);
    free(cut);
}

// Beginnings that an input can ask for, so that it reaches depth without a corpus.
static const char *const beginnings[] = {
    "",
    "GET / HTTP/1.1\r\nHost: x\r\n",
    "POST /s HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n",
    "POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n",
    "GET /s HTTP/1.1\r\nHost: x\r\n\r\n",
};

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    if (size < 3)
        return 0;
    const char *beginning = beginnings[data[1] % (sizeof beginnings / sizeof beginnings[0])];
    if (!server)
        start();
    size_t piece = (size_t)data[0] % 64 + 1;
    bool answer = data[0] & 0x40;
    data += 2;
    size -= 2;
    check_chunks(data, size, piece);
    client *c = client_open(&loop, http_server_port(server));
    client_send(c, beginning);
    for (size_t at = 0; at < size; at += piece) {
        size_t n = size - at < piece ? size - at : piece;
        if (send(c->fd, data + at, n, MSG_NOSIGNAL | MSG_DONTWAIT) < 0)
            break;
        if (at < 8 * piece)
            uv_run(&loop, UV_RUN_NOWAIT);
    }
    uv_run(&loop, UV_RUN_NOWAIT);
    if (held && answer) {
        http_request *request = held;
        held = NULL;
        n_ended++;
        http_stream_write(request, "data: 1\n\n", 9);
        http_stream_end(request);
    }
    uv_run(&loop, UV_RUN_NOWAIT);
    client_reset(c);
    for (int turn = 0; turn < 10000 && http_server_connections(server); turn++)
        uv_run(&loop, UV_RUN_NOWAIT);
    if (http_server_connections(server) || n_begun != n_ended)
        abort();
    return 0;
}
