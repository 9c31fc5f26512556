// http.h: a small HTTP/1.1 server on libuv and llhttp, for one handler.
//
// A connection has one request in service at a time; pipelined ones wait their turn, so answers
// keep their order. on_request comes when a request is whole (body included). The handler answers
// now or later with http_respond, or with http_stream_begin, _write..., _end; the request is gone
// after http_respond and http_stream_end. If the client goes away first (its end of the connection
// closed or reset, or it does not read), on_abort comes instead, once, and the request is gone
// after it. Broken or oversized input is answered here (400, 408, 413, 417, 431, 501, 503, 505)
// with a body in the OpenAI error shape.
// A client that closes only its sending half counts as gone: the two cannot be told apart.
// Ownership: a request and its strings belong to the server and live until it is gone.
// The program ignores SIGPIPE: libuv's writes raise it when the client has gone.
// Thread: the loop's. Callbacks come from the loop; on_request never comes inside a call of this
// header, on_abort neither.
#ifndef TANDEM_ROUTER_HTTP_H
#define TANDEM_ROUTER_HTTP_H

#include "engine/status.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <uv.h>

typedef struct http_server http_server;
typedef struct http_request http_request;

typedef struct http_limits {
    size_t max_header_bytes;      // request line and headers; 431
    size_t max_body_bytes;        // 413
    size_t max_total_body_bytes;  // request bodies of all connections; 503
    size_t max_connections;       // 503
    size_t max_write_queue_bytes; // unsent stream bytes after which the client counts as gone
    uint32_t header_timeout_ms;   // from a request's first byte to its last header; 408
    uint32_t body_timeout_ms;     // for a request's body; 408
    uint32_t idle_timeout_ms;     // between requests; closed silently
    uint32_t write_timeout_ms;    // without progress of a write; the client counts as gone
} http_limits;
http_limits http_limits_default(void);

typedef struct http_server_args {
    uv_loop_t *loop;
    const char *host; // a name or an IPv4 or IPv6 literal
    int port;         // 0: any, see http_server_port
    http_limits limits;
    void (*on_request)(void *user, http_request *request);
    void *user;
} http_server_args;

// Listens when it returns. E_IO names host, port and reason.
int http_server_open(const http_server_args *args, http_server **out, error *err);
int http_server_port(const http_server *server);
size_t http_server_connections(const http_server *server);
// Two phases: listens no more, closes idle connections, lets requests in service end for at most
// grace_ms, aborts the rest; then on_closed (may be NULL) and the server is gone. Accepts NULL.
void http_server_close(http_server *server, uint32_t grace_ms, void (*on_closed)(void *user),
                       void *user);

// ---- A request ----
const char *http_request_method(const http_request *request); // "GET"
const char *http_request_path(const http_request *request);   // percent-decoded, no query
const char *http_request_query(const http_request *request);  // as sent, without '?'; may be ""
// The first header of that name (any case), or NULL.
const char *http_request_header(const http_request *request, const char *name);
// n bytes, then a NUL that is not counted.
const char *http_request_body(const http_request *request, size_t *n);
// Frees the body early, for a request that is served for long.
void http_request_drop_body(http_request *request);
// The client's x-request-id where it is harmless, else a made one; every response carries it.
const char *http_request_id(const http_request *request);
// Who hears that the client has gone; called at most once.
void http_request_watch(http_request *request, void (*on_abort)(void *user), void *user);

// headers: "Name: value\r\n"... or NULL. body is copied. HEAD gets the headers alone.
void http_respond(http_request *request, int status, const char *content_type, const char *headers,
                  const char *body, size_t n);

void http_stream_begin(http_request *request, int status, const char *content_type,
                       const char *headers);
// One write, copied. E_CLOSED: the client has gone or does not read; on_abort follows from the
// loop unless http_stream_end comes first.
int http_stream_write(http_request *request, const char *data, size_t n);
void http_stream_end(http_request *request);

#endif
