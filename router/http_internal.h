// http_internal.h: what the files of the HTTP server share; nobody else includes it.
//
// A connection owns its request in service, its input buffer and three libuv handles; it is freed
// when the last of the handles has closed. State changes happen in http_conn.c, bytes out in
// http_write.c, listening and closing in http_server.c. Thread: the loop's.
#ifndef TANDEM_ROUTER_HTTP_INTERNAL_H
#define TANDEM_ROUTER_HTTP_INTERNAL_H

#include "router/http.h"
#include "router/http_chunked.h"
#include "router/http_head.h"

#include <time.h>

enum { HTTP_READ_BYTES = 64 * 1024, HTTP_ID_BYTES = 72, HTTP_LINGER_MS = 1000 };

typedef struct http_conn http_conn;

struct http_request {
    http_conn *conn;
    http_head head;
    char *head_text; // owned; head points into it
    char *body;      // owned, NUL-terminated; NULL while empty
    size_t n_body, body_room;
    char id[HTTP_ID_BYTES];
    bool streaming;
    bool chunk_stream; // the stream is chunked (HTTP/1.1), else it ends with the connection
    void (*on_abort)(void *user);
    void *user;
};

typedef enum http_conn_state {
    CONN_HEAD,    // waiting for a request or reading its head
    CONN_BODY,    // reading its body
    CONN_SERVING, // the handler has it
    CONN_LINGER,  // the last answer is going out; input is dropped
    CONN_CLOSING  // handles are closing
} http_conn_state;

struct http_conn {
    http_server *server;
    http_conn *previous, *next; // in the server's list
    uv_tcp_t tcp;
    uv_timer_t timer;       // deadline of the state
    uv_timer_t write_timer; // runs while bytes are unsent
    uv_shutdown_t shutdown;
    int n_handles; // not yet closed
    http_conn_state state;
    bool reading, processing, resume, peer_eof;
    char *in; // (in_room) owned; bytes from in_start to in_end are unread
    size_t in_start, in_end, in_room;
    size_t scanned;       // of the head that begins at in_start
    uint64_t n_queued;    // bytes ever given to the socket
    uint64_t sent_before; // of them sent at the write timer's last look
    size_t n_writes;      // not yet completed
    uint64_t body_left;   // of a body with Content-Length
    http_chunked chunked;
    http_request *request; // in CONN_BODY and CONN_SERVING
};

struct http_server {
    uv_loop_t *loop;
    http_limits limits;
    void (*on_request)(void *user, http_request *request);
    void *user;
    uv_tcp_t listener;
    uv_timer_t close_timer;
    int n_handles; // listener and close_timer, while not closed
    int port;
    http_conn *conns;
    size_t n_conns, body_bytes;
    bool closing, accept_failed;
    void (*on_closed)(void *user);
    void *closed_user;
    time_t date_second;
    char date[40];
    char read_buffer[HTTP_READ_BYTES];
};

// http_conn.c
void http_conn_accept(http_server *server);
void http_conn_close(http_conn *conn);
void http_conn_drain(http_conn *conn);       // closes it when it is idle
void http_conn_after_write(http_conn *conn); // a write has completed
void http_conn_answered(http_conn *conn);    // the request in service has its whole answer queued
void http_request_free(http_request *request);

// http_server.c
void http_server_forget(http_conn *conn); // the connection's last handle has closed

// http_write.c
// Sends n bytes of up to three parts in one write, copied. E_CLOSED when that cannot be done.
typedef struct http_part {
    const char *data;
    size_t n;
} http_part;
int http_write(http_conn *conn, const http_part *parts, size_t n_parts);
size_t http_unsent(const http_conn *conn);
// An answer of the server itself, in the OpenAI error shape; the connection ends after it.
void http_write_failure(http_conn *conn, int status, const char *why);

#endif
