// Any bytes, cut anywhere, on a control connection: the messages are exactly those that a plain
// walk over the bytes finds, and the connection ends once.
#include "engine/bytes.h"
#include "engine/control.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

typedef struct seen {
    unsigned n_accepted, n_messages, n_closed;
    uint64_t hash;
} seen;

static uv_loop_t *loop;
static struct sockaddr_un server = {.sun_family = AF_UNIX};
static seen got;

static uint64_t mix(uint64_t hash, uint16_t type, const uint8_t *payload, size_t n) {
    hash = (hash ^ type ^ (uint64_t)n << 20) * 0x100000001b3ull;
    for (size_t i = 0; i < n; i++)
        hash = (hash ^ payload[i]) * 0x100000001b3ull;
    return hash;
}

static void on_message(void *user, control_conn *conn, uint16_t type, const void *payload,
                       size_t n) {
    (void)user, (void)conn;
    got.n_messages++;
    got.hash = mix(got.hash, type, payload, n);
}

static void on_closed(void *user, control_conn *conn, const char *reason) {
    (void)user, (void)conn, (void)reason;
    got.n_closed++;
}

static void on_accept(void *user, control_conn *conn, control_callbacks *callbacks) {
    (void)user, (void)conn;
    got.n_accepted++;
    *callbacks = (control_callbacks){.on_message = on_message, .on_closed = on_closed};
}

static void remove_file(void) {
    unlink(server.sun_path);
}

static void listen_once(void) {
    loop = uv_default_loop();
    snprintf(server.sun_path, sizeof server.sun_path, "/tmp/tandem_fuzz_%d", (int)getpid());
    char address[sizeof server.sun_path + 8];
    snprintf(address, sizeof address, "unix:%s", server.sun_path);
    control_listen_args args = {.loop = loop, .address = address, .on_accept = on_accept};
    control_listener *listener;
    error err;
    if (control_listen(&args, &listener, &err))
        abort();
    atexit(remove_file);
}

static seen expected_of(const uint8_t *data, size_t size) {
    seen want = {0};
    for (bytes_reader r = bytes_reader_make(data, size);;) {
        uint32_t n = bytes_read_u32(&r);
        uint16_t type = bytes_read_u16(&r);
        uint16_t version = bytes_read_u16(&r);
        if (r.failed || version != CONTROL_VERSION || n > CONTROL_MAX_PAYLOAD)
            return want;
        const uint8_t *payload = bytes_read_blob(&r, n);
        if (r.failed)
            return want;
        want.n_messages++;
        want.hash = mix(want.hash, type, payload, n);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    if (!loop)
        listen_once();
    if (!size)
        return 0;
    size_t piece = data[0] ? data[0] : size;
    data++;
    size--;
    got = (seen){0};
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd < 0 || connect(fd, (struct sockaddr *)&server, sizeof server))
        abort();
    while (!got.n_accepted)
        uv_run(loop, UV_RUN_NOWAIT);
    for (size_t at = 0; at < size && !got.n_closed; at += piece) {
        size_t n = size - at < piece ? size - at : piece;
        if (send(fd, data + at, n, MSG_NOSIGNAL) != (ssize_t)n)
            break; // refused already
        uv_run(loop, UV_RUN_NOWAIT);
    }
    close(fd);
    while (!got.n_closed)
        uv_run(loop, UV_RUN_ONCE);
    seen want = expected_of(data, size);
    if (got.n_closed != 1 || got.n_messages != want.n_messages || got.hash != want.hash)
        abort();
    return 0;
}
