#include "engine/control.h"

#include "engine/bytes.h"

#include <errno.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

// The backlog holds every worker of a bundle: all may connect before the router reads a thing.
enum { HEADER_BYTES = 8, READ_BYTES = 64 << 10, KEEP_BYTES = 1 << 20, LISTEN_BACKLOG = 256 };

typedef union any_stream {
    uv_handle_t handle;
    uv_stream_t stream;
    uv_tcp_t tcp;
    uv_pipe_t pipe;
} any_stream;

struct control_conn {
    any_stream socket;
    uv_timer_t deadline; // of connecting, then of sending the rest at the end
    int n_handles;       // not closed yet
    control_callbacks callbacks;
    bool connected; // until then reading has not begun
    bool closing;
    char reason[128];
    bytes_writer received; // bytes of a frame that is not whole yet
    size_t consumed;
    uv_connect_t connect;
    uv_shutdown_t shutdown;
};

struct control_listener {
    any_stream socket;
    control_listen_args args;
    char address[160];
};

typedef struct queued_write {
    uv_write_t request;
    control_conn *conn;
    uint8_t bytes[];
} queued_write;

// ---- addresses ----

static bool is_unix(const char *address, const char **path) {
    *path = address + strlen("unix:");
    return strncmp(address, "unix:", strlen("unix:")) == 0;
}

static int parse_tcp(uv_loop_t *loop, const char *address, struct sockaddr_storage *out,
                     error *err) {
    char host[128];
    const char *colon = strrchr(address, ':');
    bool brackets = address[0] == '[' && colon > address && colon[-1] == ']'; // [ipv6]:port
    const char *from = address + brackets;
    ptrdiff_t n = colon ? colon - from - brackets : 0;
    char *end = NULL;
    unsigned long port = colon && colon[1] >= '0' && colon[1] <= '9' ? strtoul(colon + 1, &end, 10)
                                                                     : UINT16_MAX + 1ul;
    if (n <= 0 || n >= (ptrdiff_t)sizeof host || port > UINT16_MAX || *end)
        return error_set(err, E_INVALID, "control address '%s' is not HOST:PORT or unix:PATH",
                         address);
    memcpy(host, from, (size_t)n);
    host[n] = 0;
    struct addrinfo hints = {.ai_socktype = SOCK_STREAM};
    uv_getaddrinfo_t request;
    int code = uv_getaddrinfo(loop, &request, NULL, host, colon + 1, &hints);
    if (code)
        return error_set(err, E_INVALID, "control address '%s': %s", address, uv_strerror(code));
    memcpy(out, request.addrinfo->ai_addr, request.addrinfo->ai_addrlen);
    uv_freeaddrinfo(request.addrinfo);
    return E_OK;
}

// ---- a connection ----

static void on_handle_closed(uv_handle_t *handle) {
    control_conn *conn = handle->data;
    if (--conn->n_handles)
        return;
    if (conn->callbacks.on_closed)
        conn->callbacks.on_closed(conn->callbacks.user, conn, conn->reason);
    bytes_writer_free(&conn->received);
    free(conn);
}

static void close_handles(control_conn *conn) {
    if (uv_is_closing(&conn->socket.handle))
        return;
    uv_close(&conn->socket.handle, on_handle_closed);
    uv_close((uv_handle_t *)&conn->deadline, on_handle_closed);
}

static void drop(control_conn *conn, const char *reason) {
    if (!conn->closing)
        snprintf(conn->reason, sizeof conn->reason, "%s", reason);
    conn->closing = true;
    close_handles(conn);
}

static void on_deadline(uv_timer_t *deadline) {
    drop(deadline->data, "connecting took too long");
}

static void on_alloc(uv_handle_t *handle, size_t suggested, uv_buf_t *buffer) {
    (void)handle, (void)suggested;
    buffer->base = malloc(READ_BYTES);
    buffer->len = buffer->base ? READ_BYTES : 0;
}

// Hands out every whole frame; false: the stream is broken.
static bool take_frames(control_conn *conn) {
    while (!conn->closing && conn->received.n - conn->consumed >= HEADER_BYTES) {
        const uint8_t *at = conn->received.data + conn->consumed;
        bytes_reader header = bytes_reader_make(at, HEADER_BYTES);
        uint32_t length = bytes_read_u32(&header);
        uint16_t type = bytes_read_u16(&header);
        if (length > CONTROL_MAX_PAYLOAD || bytes_read_u16(&header) != CONTROL_VERSION)
            return false;
        if (conn->received.n - conn->consumed - HEADER_BYTES < length)
            break;
        conn->consumed += HEADER_BYTES + length;
        conn->callbacks.on_message(conn->callbacks.user, conn, type, at + HEADER_BYTES, length);
    }
    size_t left = conn->received.n - conn->consumed;
    if (left && conn->consumed)
        memmove(conn->received.data, conn->received.data + conn->consumed, left);
    conn->received.n = left;
    conn->consumed = 0;
    if (!left && conn->received.capacity > KEEP_BYTES)
        bytes_writer_free(&conn->received); // one large message does not hold memory for ever
    return true;
}

static void on_read(uv_stream_t *stream, ssize_t n, const uv_buf_t *buffer) {
    control_conn *conn = stream->data;
    if (n > 0 && !conn->closing) {
        bytes_write_blob(&conn->received, buffer->base, (size_t)n);
        if (conn->received.failed)
            drop(conn, "out of memory");
        else if (!take_frames(conn))
            drop(conn, "the peer sent something that is not a control message");
    }
    free(buffer->base);
    if (n == UV_EOF)
        drop(conn, "closed by the peer");
    else if (n < 0)
        drop(conn, uv_strerror((int)n));
}

static void start_reading(control_conn *conn) {
    conn->connected = true;
    int code = uv_read_start(&conn->socket.stream, on_alloc, on_read);
    if (code)
        drop(conn, uv_strerror(code));
}

static void on_shutdown(uv_shutdown_t *request, int status) {
    (void)status; // a peer that has gone is closed all the same
    close_handles(request->data);
}

// The end after what is queued is sent, or at the deadline.
static void send_rest(control_conn *conn) {
    conn->shutdown.data = conn;
    if (uv_shutdown(&conn->shutdown, &conn->socket.stream, on_shutdown))
        close_handles(conn);
}

static void on_connected(uv_connect_t *request, int status) {
    control_conn *conn = request->data;
    if (status == UV_ECANCELED)
        return;
    if (status) {
        drop(conn, uv_strerror(status));
    } else if (conn->closing) {
        send_rest(conn);
    } else {
        uv_timer_stop(&conn->deadline);
        start_reading(conn);
    }
}

static int init_socket(uv_loop_t *loop, bool pipe, any_stream *socket) {
    return pipe ? uv_pipe_init(loop, &socket->pipe, 0) : uv_tcp_init(loop, &socket->tcp);
}

static control_conn *make_conn(uv_loop_t *loop, bool pipe) {
    control_conn *conn = calloc(1, sizeof *conn);
    if (!conn || init_socket(loop, pipe, &conn->socket)) {
        free(conn);
        return NULL;
    }
    uv_timer_init(loop, &conn->deadline);
    conn->n_handles = 2;
    conn->socket.handle.data = conn->deadline.data = conn->connect.data = conn;
    return conn;
}

int control_connect(uv_loop_t *loop, const char *address, const control_callbacks *callbacks,
                    control_conn **out, error *err) {
    const char *path;
    bool pipe = is_unix(address, &path);
    struct sockaddr_storage tcp = {0};
    if (!pipe) {
        int code = parse_tcp(loop, address, &tcp, err);
        if (code)
            return code;
    } else if (strlen(path) >= sizeof((struct sockaddr_un *)0)->sun_path) {
        return error_set(err, E_INVALID, "the path of '%s' is too long for a unix socket", address);
    }
    control_conn *conn = make_conn(loop, pipe);
    if (!conn)
        return error_set(err, E_NO_MEMORY, "control: no memory for a connection");
    conn->callbacks = *callbacks;
    uv_timer_start(&conn->deadline, on_deadline, CONTROL_CONNECT_MS, 0);
    int code = 0;
    if (pipe)
        uv_pipe_connect(&conn->connect, &conn->socket.pipe, path, on_connected);
    else
        code = uv_tcp_connect(&conn->connect, &conn->socket.tcp, (const struct sockaddr *)&tcp,
                              on_connected);
    if (!pipe)
        uv_tcp_nodelay(&conn->socket.tcp, 1);
    if (code)
        drop(conn, uv_strerror(code));
    *out = conn;
    return E_OK;
}

static void on_written(uv_write_t *request, int status) {
    queued_write *write = request->data;
    control_conn *conn = write->conn;
    free(write);
    if (status && status != UV_ECANCELED)
        drop(conn, uv_strerror(status));
}

// Copies what of the buffers the socket did not take.
static int queue_rest(control_conn *conn, const uv_buf_t *buffers, size_t skip) {
    size_t n = buffers[0].len + buffers[1].len - skip, at = 0;
    queued_write *write = malloc(sizeof *write + n);
    if (!write)
        return UV_ENOMEM; // a message may be half sent: the connection ends
    write->request.data = write;
    write->conn = conn;
    for (int i = 0; i < 2; i++) {
        size_t from = skip < buffers[i].len ? skip : buffers[i].len;
        skip -= from;
        if (buffers[i].len > from)
            memcpy(write->bytes + at, buffers[i].base + from, buffers[i].len - from);
        at += buffers[i].len - from;
    }
    uv_buf_t rest = uv_buf_init((char *)write->bytes, (unsigned)n);
    int code = uv_write(&write->request, &conn->socket.stream, &rest, 1, on_written);
    if (code)
        free(write);
    return code;
}

// A worker tells its tokens at the end of every step: what the socket takes at once, as it nearly
// always does, is neither copied nor queued.
int control_send(control_conn *conn, uint16_t type, const void *payload, size_t n) {
    if (conn->closing)
        return E_CLOSED;
    if (n > CONTROL_MAX_PAYLOAD)
        return E_TOO_LARGE;
    if (conn->socket.stream.write_queue_size + n > CONTROL_MAX_QUEUED) {
        drop(conn, "the peer does not read");
        return E_FULL;
    }
    uint8_t header[HEADER_BYTES] = {
        (uint8_t)n,    (uint8_t)(n >> 8),    (uint8_t)(n >> 16), (uint8_t)(n >> 24),
        (uint8_t)type, (uint8_t)(type >> 8), CONTROL_VERSION,    0};
    const uv_buf_t buffers[2] = {uv_buf_init((char *)header, HEADER_BYTES),
                                 uv_buf_init((char *)(uintptr_t)payload, (unsigned)n)};
    int taken = uv_try_write(&conn->socket.stream, buffers, n ? 2 : 1);
    int code = taken < 0 && taken != UV_EAGAIN ? taken : 0;
    size_t skip = taken > 0 ? (size_t)taken : 0;
    if (!code && skip < HEADER_BYTES + n)
        code = queue_rest(conn, buffers, skip);
    if (code) {
        drop(conn, uv_strerror(code));
        return E_CLOSED;
    }
    return E_OK;
}

void control_local_host(const control_conn *conn, char *out, size_t n) {
    struct sockaddr_storage local;
    int n_local = sizeof local;
    out[0] = 0;
    if (conn->socket.handle.type == UV_TCP &&
        !uv_tcp_getsockname(&conn->socket.tcp, (struct sockaddr *)&local, &n_local))
        uv_ip_name((const struct sockaddr *)&local, out, n);
}

void control_close(control_conn *conn) {
    if (conn->closing)
        return;
    snprintf(conn->reason, sizeof conn->reason, "closed here");
    conn->closing = true;
    uv_timer_start(&conn->deadline, on_deadline, CONTROL_LINGER_MS, 0);
    if (conn->connected)
        send_rest(conn); // else when it is connected
}

// ---- listening ----

static void on_connection(uv_stream_t *server, int status) {
    control_listener *listener = server->data;
    bool pipe = listener->socket.handle.type == UV_NAMED_PIPE;
    control_conn *conn = status ? NULL : make_conn(listener->args.loop, pipe);
    if (!conn)
        return;
    if (uv_accept(server, &conn->socket.stream)) {
        drop(conn, "cannot accept");
        return;
    }
    if (!pipe)
        uv_tcp_nodelay(&conn->socket.tcp, 1);
    listener->args.on_accept(listener->args.user, conn, &conn->callbacks);
    start_reading(conn);
}

static void on_listener_closed(uv_handle_t *handle) {
    free(handle->data);
}

// The file of a socket outlives a killed process; one that nobody accepts on is removed.
static void remove_stale(const char *path) {
    struct stat st;
    struct sockaddr_un to = {.sun_family = AF_UNIX};
    if (strlen(path) >= sizeof to.sun_path || lstat(path, &st) || !S_ISSOCK(st.st_mode))
        return;
    memcpy(to.sun_path, path, strlen(path));
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0)
        return;
    if (connect(fd, (struct sockaddr *)&to, sizeof to) && errno == ECONNREFUSED)
        unlink(path);
    close(fd);
}

static int bind_listener(control_listener *listener, const char *path,
                         const struct sockaddr_storage *tcp) {
    if (listener->socket.handle.type == UV_NAMED_PIPE) {
        remove_stale(path);
        return uv_pipe_bind(&listener->socket.pipe, path);
    }
    return uv_tcp_bind(&listener->socket.tcp, (const struct sockaddr *)tcp, 0);
}

static void name_listener(control_listener *listener) {
    struct sockaddr_storage bound = {0};
    int n = sizeof bound;
    char host[64] = "";
    snprintf(listener->address, sizeof listener->address, "%s", listener->args.address);
    if (listener->socket.handle.type == UV_NAMED_PIPE ||
        uv_tcp_getsockname(&listener->socket.tcp, (struct sockaddr *)&bound, &n))
        return;
    uv_ip_name((const struct sockaddr *)&bound, host, sizeof host);
    unsigned port = bound.ss_family == AF_INET6 ? ((struct sockaddr_in6 *)&bound)->sin6_port
                                                : ((struct sockaddr_in *)&bound)->sin_port;
    const char *form = bound.ss_family == AF_INET6 ? "[%s]:%u" : "%s:%u";
    snprintf(listener->address, sizeof listener->address, form, host,
             (unsigned)ntohs((uint16_t)port));
}

int control_listen(const control_listen_args *args, control_listener **out, error *err) {
    const char *path;
    bool pipe = is_unix(args->address, &path);
    struct sockaddr_storage tcp = {0};
    int code = pipe ? E_OK : parse_tcp(args->loop, args->address, &tcp, err);
    if (code)
        return code;
    if (pipe && strlen(path) >= sizeof((struct sockaddr_un *)0)->sun_path)
        return error_set(err, E_INVALID, "the path of '%s' is too long for a unix socket",
                         args->address);
    control_listener *listener = calloc(1, sizeof *listener);
    if (!listener || init_socket(args->loop, pipe, &listener->socket)) {
        free(listener);
        return error_set(err, E_NO_MEMORY, "control: no memory for a listener");
    }
    listener->args = *args;
    listener->socket.handle.data = listener;
    code = bind_listener(listener, path, &tcp);
    if (!code)
        code = uv_listen(&listener->socket.stream, LISTEN_BACKLOG, on_connection);
    if (code) {
        error_set(err, E_IO, "cannot listen on %s: %s", args->address, uv_strerror(code));
        uv_close(&listener->socket.handle, on_listener_closed);
        return E_IO;
    }
    name_listener(listener);
    *out = listener;
    return E_OK;
}

const char *control_listener_address(const control_listener *listener) {
    return listener->address;
}

void control_listener_close(control_listener *listener) {
    if (!listener)
        return;
    uv_close(&listener->socket.handle, on_listener_closed); // removes the file of a unix socket
}
