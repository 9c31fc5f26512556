#include "router/http_internal.h"

#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MIN_BODY_ROOM = 4096, MAX_CLIENT_ID_BYTES = 64, MAX_REFUSED_CONNECTIONS = 64 };

// ---- Requests ----
const char *http_request_method(const http_request *request) {
    return request->head.method;
}

const char *http_request_path(const http_request *request) {
    return request->head.path;
}

const char *http_request_query(const http_request *request) {
    return request->head.query;
}

const char *http_request_header(const http_request *request, const char *name) {
    return http_head_find(&request->head, name);
}

const char *http_request_body(const http_request *request, size_t *n) {
    *n = request->n_body;
    return request->body ? request->body : "";
}

const char *http_request_id(const http_request *request) {
    return request->id;
}

void http_request_watch(http_request *request, void (*on_abort)(void *user), void *user) {
    request->on_abort = on_abort;
    request->user = user;
}

void http_request_drop_body(http_request *request) {
    request->conn->server->body_bytes -= request->body_room;
    free(request->body);
    request->body = NULL;
    request->n_body = request->body_room = 0;
}

void http_request_free(http_request *request) {
    if (!request)
        return;
    http_request_drop_body(request);
    free(request->head_text);
    free(request);
}

// Only an id that is safe in a header, a log line and a shell is taken over.
static void choose_id(http_request *request) {
    const char *given = http_head_find(&request->head, "x-request-id");
    size_t n = 0;
    while (given && (isalnum((unsigned char)given[n]) || (given[n] && strchr("-_.:", given[n]))))
        n++;
    if (n && n <= MAX_CLIENT_ID_BYTES && given[n] == '\0') {
        memcpy(request->id, given, n + 1);
        return;
    }
    uint64_t random[2] = {0};
    uv_random(NULL, NULL, random, sizeof random, 0, NULL);
    snprintf(request->id, sizeof request->id, "req-%016llx%016llx", (unsigned long long)random[0],
             (unsigned long long)random[1]);
}

// ---- Closing ----
static void on_handle_closed(uv_handle_t *handle) {
    http_conn *conn = handle->data;
    if (--conn->n_handles)
        return;
    http_request *request = conn->request;
    if (request && request->on_abort)
        request->on_abort(request->user);
    http_request_free(request);
    http_server_forget(conn);
    free(conn->in);
    free(conn);
}

void http_conn_close(http_conn *conn) {
    if (conn->state == CONN_CLOSING)
        return;
    conn->state = CONN_CLOSING;
    uv_close((uv_handle_t *)&conn->tcp, on_handle_closed);
    uv_close((uv_handle_t *)&conn->timer, on_handle_closed);
    uv_close((uv_handle_t *)&conn->write_timer, on_handle_closed);
}

static void process(http_conn *conn);
static void fail(http_conn *conn, int status, const char *why);

static void on_timer(uv_timer_t *timer) {
    http_conn *conn = timer->data;
    if (conn->resume) {
        process(conn);
    } else if (conn->state == CONN_HEAD && conn->in_end > conn->in_start) {
        fail(conn, 408, "the request's headers took too long to arrive");
    } else if (conn->state == CONN_BODY) {
        fail(conn, 408, "the request's body took too long to arrive");
    } else {
        http_conn_close(conn);
    }
}

static void set_deadline(http_conn *conn, uint32_t ms) {
    if (conn->state != CONN_CLOSING)
        uv_timer_start(&conn->timer, on_timer, ms, 0);
}

static void on_shutdown(uv_shutdown_t *shutdown, int status) {
    http_conn *conn = shutdown->data;
    if (status < 0 || conn->peer_eof)
        http_conn_close(conn);
    else
        set_deadline(conn, HTTP_LINGER_MS);
}

static void on_read(uv_stream_t *stream, ssize_t n, const uv_buf_t *buffer);
static void on_alloc(uv_handle_t *handle, size_t suggested, uv_buf_t *buffer);

static void set_reading(http_conn *conn, bool on) {
    on = on && !conn->peer_eof && conn->state != CONN_CLOSING;
    if (on && !conn->reading)
        uv_read_start((uv_stream_t *)&conn->tcp, on_alloc, on_read);
    else if (!on && conn->reading)
        uv_read_stop((uv_stream_t *)&conn->tcp);
    conn->reading = on;
}

// Sends what is queued, then the end of our side, and reads on for a moment: closing with unread
// input would reset the connection and could cost the client our last answer.
static void linger(http_conn *conn) {
    if (conn->state == CONN_CLOSING || conn->state == CONN_LINGER)
        return;
    conn->state = CONN_LINGER;
    conn->resume = false;
    uv_timer_stop(&conn->timer);
    conn->shutdown.data = conn;
    if (uv_shutdown(&conn->shutdown, (uv_stream_t *)&conn->tcp, on_shutdown) < 0)
        http_conn_close(conn);
    set_reading(conn, true);
}

// Answers for the server itself; the request, if there is one, has not reached the handler.
static void fail(http_conn *conn, int status, const char *why) {
    http_write_failure(conn, status, why);
    http_request_free(conn->request);
    conn->request = NULL;
    linger(conn);
}

// ---- Input ----
static size_t unread(const http_conn *conn) {
    return conn->in_end - conn->in_start;
}

static void begin_head(http_conn *conn) {
    conn->state = CONN_HEAD;
    conn->scanned = 0;
    set_deadline(conn, conn->server->limits.idle_timeout_ms);
}

void http_conn_answered(http_conn *conn) {
    bool keep_alive = conn->request->head.keep_alive && !conn->server->closing;
    http_request_free(conn->request);
    conn->request = NULL;
    if (conn->state == CONN_CLOSING)
        return;
    if (!keep_alive) {
        linger(conn);
        return;
    }
    begin_head(conn);
    // The next request is taken up from the loop, not inside the handler's call.
    if (!conn->processing && (unread(conn) || !conn->reading)) {
        conn->resume = true;
        set_deadline(conn, 0);
    }
}

static void dispatch(http_conn *conn) {
    conn->state = CONN_SERVING;
    uv_timer_stop(&conn->timer);
    conn->server->on_request(conn->server->user, conn->request);
}

// Returns 0 or the status to answer with.
static int append_body(http_conn *conn, const char *data, size_t n) {
    http_request *request = conn->request;
    const http_limits *limits = &conn->server->limits;
    if (n > limits->max_body_bytes - request->n_body)
        return 413;
    size_t need = request->n_body + n + 1;
    if (need > request->body_room) {
        size_t room = request->body_room ? request->body_room * 2 : MIN_BODY_ROOM;
        if (room < need)
            room = need;
        size_t more = room - request->body_room;
        if (conn->server->body_bytes + more > limits->max_total_body_bytes)
            return 503;
        char *grown = realloc(request->body, room);
        if (!grown)
            return 503;
        conn->server->body_bytes += more;
        request->body = grown;
        request->body_room = room;
    }
    memcpy(request->body + request->n_body, data, n);
    request->n_body += n;
    request->body[request->n_body] = '\0';
    return 0;
}

static const char *append_failure(int status) {
    return status == 413 ? "the request body is larger than this server takes"
                         : "too many request bodies at once; try again";
}

// Takes what is there of the body. True when the request was dispatched.
static bool process_body(http_conn *conn) {
    while (unread(conn) || (!conn->request->head.chunked && conn->body_left == 0)) {
        const char *data = conn->in + conn->in_start, *body = data;
        size_t used = unread(conn), n_body;
        int rc;
        if (conn->request->head.chunked) {
            rc = http_chunked_next(&conn->chunked, data, used, &used, &body, &n_body);
        } else {
            n_body = used = conn->body_left < used ? (size_t)conn->body_left : used;
            conn->body_left -= used;
            rc = conn->body_left ? E_AGAIN : E_OK;
        }
        int status = rc == E_INVALID ? 400 : n_body ? append_body(conn, body, n_body) : 0;
        conn->in_start += used;
        if (status) {
            fail(conn, status, status == 400 ? "broken chunked body" : append_failure(status));
            return false;
        }
        if (rc == E_OK) {
            dispatch(conn);
            return true;
        }
    }
    return false;
}

static bool begin_body(http_conn *conn) {
    const http_head *head = &conn->request->head;
    if (head->content_length > conn->server->limits.max_body_bytes) {
        fail(conn, 413, append_failure(413));
        return false;
    }
    bool has_body = head->chunked || head->content_length;
    if (head->expect_continue && has_body && unread(conn) == 0)
        http_write(conn, &(http_part){"HTTP/1.1 100 Continue\r\n\r\n", 25}, 1);
    if (conn->state == CONN_CLOSING)
        return false;
    conn->state = CONN_BODY;
    conn->body_left = head->content_length;
    conn->chunked = (http_chunked){0};
    set_deadline(conn, conn->server->limits.body_timeout_ms);
    return true;
}

// Moves the head's bytes out of the input into a request of its own.
static bool begin_request(http_conn *conn, size_t n) {
    http_request *request = calloc(1, sizeof *request);
    char *text = malloc(n);
    if (!request || !text) {
        free(request);
        free(text);
        fail(conn, 503, "out of memory");
        return false;
    }
    memcpy(text, conn->in + conn->in_start, n);
    conn->in_start += n;
    request->conn = conn;
    request->head_text = text;
    const char *why = "";
    int status = http_head_parse(text, n, &request->head, &why);
    if (status) {
        free(text);
        free(request);
        fail(conn, status, why);
        return false;
    }
    conn->request = request;
    choose_id(request);
    return begin_body(conn);
}

// True when a whole head was there and its body comes next.
static bool process_head(http_conn *conn) {
    const http_limits *limits = &conn->server->limits;
    if (conn->server->closing) {
        linger(conn);
        return false;
    }
    if (http_unsent(conn) > limits->max_write_queue_bytes)
        return false; // http_conn_after_write resumes
    while (conn->scanned == 0 && unread(conn) >= 2 &&
           memcmp(conn->in + conn->in_start, "\r\n", 2) == 0)
        conn->in_start += 2; // RFC 9112, 2.2: empty lines before a request
    size_t n = unread(conn);
    if (n == 0)
        return false;
    if (conn->scanned == 0)
        set_deadline(conn, limits->header_timeout_ms);
    size_t n_scan = n < limits->max_header_bytes ? n : limits->max_header_bytes;
    int rc = http_head_scan(conn->in + conn->in_start, n_scan, &conn->scanned);
    if (rc == E_AGAIN && n_scan == limits->max_header_bytes)
        fail(conn, 431, "the request's headers are larger than this server takes");
    else if (rc == E_INVALID)
        fail(conn, 400, "not a valid HTTP request");
    return rc == E_OK && begin_request(conn, conn->scanned);
}

static void finish_after_eof(http_conn *conn) {
    if (conn->state == CONN_SERVING || conn->state == CONN_BODY)
        http_conn_close(conn);
    else if (conn->state == CONN_HEAD && !conn->resume)
        linger(conn);
}

static void process(http_conn *conn) {
    conn->processing = true;
    conn->resume = false;
    bool more = true;
    while (more) {
        if (conn->state == CONN_HEAD)
            more = process_head(conn);
        else if (conn->state == CONN_BODY)
            more = process_body(conn);
        else
            more = false;
    }
    conn->processing = false;
    if (conn->in_start == conn->in_end)
        conn->in_start = conn->in_end = 0;
    if (conn->peer_eof)
        finish_after_eof(conn);
    // The timer may have been spent on taking up a waiting request.
    if (conn->state == CONN_HEAD && !uv_is_active((uv_handle_t *)&conn->timer))
        set_deadline(conn, conn->server->limits.idle_timeout_ms);
    // A client may pipeline, but what waits for its turn is bounded. A body is always taken.
    set_reading(conn, conn->state == CONN_LINGER || unread(conn) < HTTP_READ_BYTES);
}

void http_conn_after_write(http_conn *conn) {
    if (conn->state == CONN_HEAD && conn->n_writes == 0 && (unread(conn) || !conn->reading))
        process(conn);
}

static void on_alloc(uv_handle_t *handle, size_t suggested, uv_buf_t *buffer) {
    (void)suggested;
    http_conn *conn = handle->data;
    *buffer = uv_buf_init(conn->server->read_buffer, HTTP_READ_BYTES);
}

static bool append_input(http_conn *conn, const char *data, size_t n) {
    if (conn->in_start && conn->in_end + n > conn->in_room) {
        memmove(conn->in, conn->in + conn->in_start, unread(conn));
        conn->in_end -= conn->in_start;
        conn->in_start = 0;
    }
    if (conn->in_end + n > conn->in_room) {
        size_t room = conn->in_end + n;
        char *grown = realloc(conn->in, room);
        if (!grown)
            return false;
        conn->in = grown;
        conn->in_room = room;
    }
    memcpy(conn->in + conn->in_end, data, n);
    conn->in_end += n;
    return true;
}

static void on_read(uv_stream_t *stream, ssize_t n, const uv_buf_t *buffer) {
    http_conn *conn = stream->data;
    if (n == UV_EOF) {
        conn->peer_eof = true;
        set_reading(conn, false);
        if (conn->state == CONN_LINGER) {
            if (conn->n_writes == 0)
                http_conn_close(conn);
        } else {
            finish_after_eof(conn);
        }
    } else if (n < 0 || (conn->state != CONN_LINGER && n > 0 &&
                         !append_input(conn, buffer->base, (size_t)n))) {
        http_conn_close(conn);
    } else if (conn->state == CONN_HEAD || conn->state == CONN_BODY) {
        if (!conn->resume)
            process(conn);
    } else if (conn->state == CONN_SERVING && unread(conn) >= HTTP_READ_BYTES) {
        set_reading(conn, false);
    }
}

// ---- Accepting and draining ----
void http_conn_accept(http_server *server) {
    http_conn *conn = calloc(1, sizeof *conn);
    if (!conn)
        return;
    conn->server = server;
    uv_tcp_init(server->loop, &conn->tcp);
    uv_timer_init(server->loop, &conn->timer);
    uv_timer_init(server->loop, &conn->write_timer);
    conn->tcp.data = conn->timer.data = conn->write_timer.data = conn;
    conn->n_handles = 3;
    conn->next = server->conns;
    if (server->conns)
        server->conns->previous = conn;
    server->conns = conn;
    server->n_conns++;
    if (uv_accept((uv_stream_t *)&server->listener, (uv_stream_t *)&conn->tcp) < 0 ||
        server->n_conns > server->limits.max_connections + MAX_REFUSED_CONNECTIONS) {
        http_conn_close(conn);
        return;
    }
    uv_tcp_nodelay(&conn->tcp, 1);
    if (server->n_conns > server->limits.max_connections) {
        fail(conn, 503, "too many connections");
        return;
    }
    begin_head(conn);
    set_reading(conn, true);
}

void http_conn_drain(http_conn *conn) {
    if (conn->state == CONN_HEAD && conn->n_writes == 0 && unread(conn) == 0) {
        http_conn_close(conn); // idle: nothing can be lost
    } else if (conn->state == CONN_HEAD || conn->state == CONN_BODY) {
        http_request_free(conn->request);
        conn->request = NULL;
        linger(conn);
    }
}
