#include "router/http_internal.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define STATUS_TEXT_MAP(X)                                                                         \
    X(200, "OK")                                                                                   \
    X(204, "No Content")                                                                           \
    X(400, "Bad Request")                                                                          \
    X(401, "Unauthorized")                                                                         \
    X(403, "Forbidden")                                                                            \
    X(404, "Not Found")                                                                            \
    X(405, "Method Not Allowed")                                                                   \
    X(408, "Request Timeout")                                                                      \
    X(413, "Content Too Large")                                                                    \
    X(417, "Expectation Failed")                                                                   \
    X(429, "Too Many Requests")                                                                    \
    X(431, "Request Header Fields Too Large")                                                      \
    X(500, "Internal Server Error")                                                                \
    X(501, "Not Implemented")                                                                      \
    X(503, "Service Unavailable")                                                                  \
    X(505, "HTTP Version Not Supported")

static const char *reason_text(int status) {
    switch (status) {
#define X(code, text)                                                                              \
    case code:                                                                                     \
        return text;
        STATUS_TEXT_MAP(X)
#undef X
    }
    return "Status";
}

// One write with the bytes behind it, so that a write costs one allocation.
typedef struct write_op {
    uv_write_t write;
    http_conn *conn;
    char bytes[];
} write_op;

size_t http_unsent(const http_conn *conn) {
    return uv_stream_get_write_queue_size((const uv_stream_t *)&conn->tcp);
}

// A single large write reports no progress of its own, and a stream's queue may grow while it is
// sent: what counts is that some byte has gone since the last look.
static void on_write_timer(uv_timer_t *timer) {
    http_conn *conn = timer->data;
    uint64_t sent = conn->n_queued - http_unsent(conn);
    if (sent == conn->sent_before)
        http_conn_close(conn);
    conn->sent_before = sent;
}

static void on_written(uv_write_t *write, int status) {
    write_op *op = (write_op *)write;
    http_conn *conn = op->conn;
    free(op);
    conn->n_writes--;
    if (status < 0) {
        http_conn_close(conn);
        return;
    }
    if (conn->n_writes == 0)
        uv_timer_stop(&conn->write_timer);
    http_conn_after_write(conn);
}

int http_write(http_conn *conn, const http_part *parts, size_t n_parts) {
    if (conn->state == CONN_CLOSING)
        return E_CLOSED;
    size_t n = 0;
    for (size_t i = 0; i < n_parts; i++)
        n += parts[i].n;
    write_op *op = malloc(sizeof *op + n);
    if (!op) {
        http_conn_close(conn);
        return E_CLOSED;
    }
    op->conn = conn;
    char *to = op->bytes;
    for (size_t i = 0; i < n_parts; i++) {
        if (parts[i].n)
            memcpy(to, parts[i].data, parts[i].n);
        to += parts[i].n;
    }
    uv_buf_t buffer = uv_buf_init(op->bytes, (unsigned)n);
    if (n > UINT32_MAX ||
        uv_write(&op->write, (uv_stream_t *)&conn->tcp, &buffer, 1, on_written) < 0) {
        free(op);
        http_conn_close(conn);
        return E_CLOSED;
    }
    if (conn->n_writes++ == 0) {
        uint32_t timeout = conn->server->limits.write_timeout_ms;
        conn->sent_before = conn->n_queued;
        uv_timer_start(&conn->write_timer, on_write_timer, timeout, timeout);
    }
    conn->n_queued += n;
    return E_OK;
}

static const char *date_header(http_server *server) {
    time_t now = time(NULL);
    if (now != server->date_second) {
        struct tm utc;
        gmtime_r(&now, &utc);
        strftime(server->date, sizeof server->date, "%a, %d %b %Y %H:%M:%S GMT", &utc);
        server->date_second = now;
    }
    return server->date;
}

static bool is_head(const http_request *request) {
    return strcmp(request->head.method, "HEAD") == 0;
}

enum { RESPONSE_HEAD_BYTES = 2048 };

// length_header is "Content-Length: n\r\n", "Transfer-Encoding: chunked\r\n" or "". Returns the
// bytes written; headers too long to fit are left out whole, since half of one would be worse.
static size_t format_head(http_conn *conn, const http_request *request, int status,
                          const char *content_type, const char *headers, const char *length_header,
                          bool keep_alive, char *out) {
    const char *form = "HTTP/1.1 %d %s\r\nDate: %s\r\n%s%s%s%s%s%s%sConnection: %s\r\n%s\r\n";
    for (int attempt = 0; attempt < 2; attempt++) {
        int n = snprintf(out, RESPONSE_HEAD_BYTES, form, status, reason_text(status),
                         date_header(conn->server), content_type ? "Content-Type: " : "",
                         content_type ? content_type : "", content_type ? "\r\n" : "",
                         length_header, request ? "x-request-id: " : "", request ? request->id : "",
                         request ? "\r\n" : "", keep_alive ? "keep-alive" : "close",
                         headers ? headers : "");
        if (n >= 0 && n < RESPONSE_HEAD_BYTES)
            return (size_t)n;
        headers = NULL;
    }
    return 0;
}

void http_respond(http_request *request, int status, const char *content_type, const char *headers,
                  const char *body, size_t n) {
    http_conn *conn = request->conn;
    char head[RESPONSE_HEAD_BYTES], length[48] = "";
    if (status != 204)
        snprintf(length, sizeof length, "Content-Length: %zu\r\n", n);
    request->head.keep_alive &= !conn->server->closing;
    size_t n_head = format_head(conn, request, status, content_type, headers, length,
                                request->head.keep_alive, head);
    http_part parts[] = {{head, n_head}, {body, is_head(request) || status == 204 ? 0 : n}};
    http_write(conn, parts, 2);
    http_conn_answered(conn);
}

void http_stream_begin(http_request *request, int status, const char *content_type,
                       const char *headers) {
    http_conn *conn = request->conn;
    char head[RESPONSE_HEAD_BYTES];
    request->streaming = true;
    request->chunk_stream = request->head.http_1_1;
    request->head.keep_alive &= request->chunk_stream && !conn->server->closing;
    size_t n = format_head(conn, request, status, content_type, headers,
                           request->chunk_stream ? "Transfer-Encoding: chunked\r\n" : "",
                           request->head.keep_alive, head);
    http_write(conn, &(http_part){head, n}, 1);
}

int http_stream_write(http_request *request, const char *data, size_t n) {
    http_conn *conn = request->conn;
    if (conn->state == CONN_CLOSING)
        return E_CLOSED;
    if (n == 0 || is_head(request))
        return E_OK;
    if (http_unsent(conn) > conn->server->limits.max_write_queue_bytes) {
        http_conn_close(conn);
        return E_CLOSED;
    }
    if (!request->chunk_stream)
        return http_write(conn, &(http_part){data, n}, 1);
    char size[24];
    int n_size = snprintf(size, sizeof size, "%zx\r\n", n);
    http_part parts[] = {{size, (size_t)n_size}, {data, n}, {"\r\n", 2}};
    return http_write(conn, parts, 3);
}

void http_stream_end(http_request *request) {
    if (request->chunk_stream && !is_head(request))
        http_write(request->conn, &(http_part){"0\r\n\r\n", 5}, 1);
    http_conn_answered(request->conn);
}

void http_write_failure(http_conn *conn, int status, const char *why) {
    char head[RESPONSE_HEAD_BYTES], body[512], length[48];
    const char *type = status >= 500 ? "server_error" : "invalid_request_error";
    int n = snprintf(
        body, sizeof body,
        "{\"error\":{\"message\":\"%s\",\"type\":\"%s\",\"param\":null,\"code\":null}}", why, type);
    snprintf(length, sizeof length, "Content-Length: %d\r\n", n);
    size_t n_head = format_head(conn, conn->request, status, "application/json",
                                status == 503 ? "Retry-After: 1\r\n" : NULL, length, false, head);
    http_part parts[] = {{head, n_head}, {body, (size_t)n}};
    http_write(conn, parts, 2);
}
