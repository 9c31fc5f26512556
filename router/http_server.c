#include "router/http_internal.h"

#include "engine/log.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>

// SPARE_FILES: what the process has open beside connections.
enum { LISTEN_BACKLOG = 511, SPARE_FILES = 128 };

http_limits http_limits_default(void) {
    return (http_limits){.max_header_bytes = 32 * 1024,
                         .max_body_bytes = 8 * 1024 * 1024,
                         .max_total_body_bytes = 256 * 1024 * 1024,
                         .max_connections = 1000,
                         .max_write_queue_bytes = 1024 * 1024,
                         .header_timeout_ms = 15 * 1000,
                         .body_timeout_ms = 60 * 1000,
                         .idle_timeout_ms = 75 * 1000,
                         .write_timeout_ms = 30 * 1000};
}

static void on_connection(uv_stream_t *listener, int status) {
    http_server *server = listener->data;
    if (status < 0) {
        if (!server->accept_failed)
            log_warn("http: a connection could not be accepted: %s; said once",
                     uv_strerror(status));
        server->accept_failed = true;
        return;
    }
    http_conn_accept(server);
}

static int bound_port(const uv_tcp_t *tcp) {
    struct sockaddr_storage address;
    int n = sizeof address;
    if (uv_tcp_getsockname(tcp, (struct sockaddr *)&address, &n) < 0)
        return 0;
    if (address.ss_family == AF_INET6)
        return ntohs(((struct sockaddr_in6 *)&address)->sin6_port);
    return ntohs(((struct sockaddr_in *)&address)->sin_port);
}

// A name with both kinds of address gets the IPv4 one, where clients look first.
static const struct addrinfo *choose_address(const struct addrinfo *list) {
    for (const struct addrinfo *entry = list; entry; entry = entry->ai_next)
        if (entry->ai_family == AF_INET)
            return entry;
    return list;
}

static int listen_at(http_server *server, const char *host, int port, error *err) {
    char service[16];
    snprintf(service, sizeof service, "%d", port);
    struct addrinfo hints = {.ai_family = AF_UNSPEC,
                             .ai_socktype = SOCK_STREAM,
                             .ai_flags = AI_PASSIVE | AI_NUMERICSERV};
    uv_getaddrinfo_t lookup;
    int rc = uv_getaddrinfo(server->loop, &lookup, NULL, host, service, &hints);
    if (rc == 0) {
        const struct sockaddr *address = choose_address(lookup.addrinfo)->ai_addr;
        rc = uv_tcp_bind(&server->listener, address, 0);
        if (rc == 0)
            rc = uv_listen((uv_stream_t *)&server->listener, LISTEN_BACKLOG, on_connection);
        uv_freeaddrinfo(lookup.addrinfo);
    }
    if (rc < 0)
        return error_set(err, E_IO, "cannot listen on %s port %d: %s", host, port, uv_strerror(rc));
    server->port = bound_port(&server->listener);
    return E_OK;
}

// The usual soft limit of 1024 open files is below what max_connections may need.
static void raise_file_limit(size_t max_connections) {
    struct rlimit limit;
    rlim_t need = max_connections + SPARE_FILES;
    if (getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur >= need)
        return;
    limit.rlim_cur = limit.rlim_max < need ? limit.rlim_max : need;
    if (setrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur < need)
        log_warn("http: %zu connections need %llu open files and the limit is %llu",
                 max_connections, (unsigned long long)need, (unsigned long long)limit.rlim_cur);
}

int http_server_open(const http_server_args *args, http_server **out, error *err) {
    if (!args->host || args->port < 0 || args->port > 65535)
        return error_set(err, E_INVALID, "cannot listen on %s port %d: no such port",
                         args->host ? args->host : "(no host)", args->port);
    http_server *server = calloc(1, sizeof *server);
    if (!server)
        return error_set(err, E_NO_MEMORY, "http server: out of memory");
    server->loop = args->loop;
    server->limits = args->limits;
    server->on_request = args->on_request;
    server->user = args->user;
    uv_timer_init(args->loop, &server->close_timer);
    uv_tcp_init(args->loop, &server->listener);
    server->close_timer.data = server->listener.data = server;
    server->n_handles = 2;
    int rc = listen_at(server, args->host, args->port, err);
    if (rc != E_OK) {
        http_server_close(server, 0, NULL, NULL);
        return rc;
    }
    raise_file_limit(args->limits.max_connections);
    *out = server;
    return E_OK;
}

int http_server_port(const http_server *server) {
    return server->port;
}

size_t http_server_connections(const http_server *server) {
    return server->n_conns;
}

static void on_handle_closed(uv_handle_t *handle) {
    http_server *server = handle->data;
    if (--server->n_handles)
        return;
    if (server->on_closed)
        server->on_closed(server->closed_user);
    free(server);
}

// The timer is the last handle to go: it waits for the connections.
static void finish_if_empty(http_server *server) {
    if (server->closing && server->n_conns == 0)
        uv_close((uv_handle_t *)&server->close_timer, on_handle_closed);
}

void http_server_forget(http_conn *conn) {
    http_server *server = conn->server;
    if (conn->previous)
        conn->previous->next = conn->next;
    else
        server->conns = conn->next;
    if (conn->next)
        conn->next->previous = conn->previous;
    server->n_conns--;
    finish_if_empty(server);
}

static void abort_connections(uv_timer_t *timer) {
    http_server *server = timer->data;
    for (http_conn *conn = server->conns; conn; conn = conn->next)
        http_conn_close(conn);
}

void http_server_close(http_server *server, uint32_t grace_ms, void (*on_closed)(void *user),
                       void *user) {
    if (!server || server->closing)
        return;
    server->closing = true;
    server->on_closed = on_closed;
    server->closed_user = user;
    uv_close((uv_handle_t *)&server->listener, on_handle_closed);
    for (http_conn *conn = server->conns; conn; conn = conn->next)
        http_conn_drain(conn);
    if (server->conns)
        uv_timer_start(&server->close_timer, abort_connections, grace_ms, 0);
    finish_if_empty(server);
}
