// control.h: framed messages between router and workers over a stream socket of libuv.
//
// A frame is u32 length | u16 type | u16 version, little endian, then length bytes of payload
// (engine/messages.h). Addresses are "unix:/path", "host:port" or "[ipv6]:port"; a host's name is
// looked up within the call. A closed control socket is how a dead peer is known at once.
// Ownership: a connection copies what it sends; payloads given to on_message are valid during the
// call. on_closed comes exactly once for every connection, from the loop; the connection is gone
// after it.
// Thread: the loop's.
#ifndef TANDEM_ENGINE_CONTROL_H
#define TANDEM_ENGINE_CONTROL_H

#include "engine/status.h"

#include <stdint.h>
#include <uv.h>

enum {
    CONTROL_VERSION = 1,
    CONTROL_MAX_PAYLOAD = 64 << 20, // bytes of one message
    CONTROL_MAX_QUEUED = 256 << 20, // bytes a peer may lag behind before it counts as gone
    CONTROL_CONNECT_MS = 10000,     // a connection that is not made by then closes
    CONTROL_LINGER_MS = 1000        // for what is queued when a connection is closed
};

typedef struct control_conn control_conn;
typedef struct control_listener control_listener;

typedef struct control_callbacks {
    void *user;
    void (*on_message)(void *user, control_conn *conn, uint16_t type, const void *payload,
                       size_t n);
    // reason is one line: "closed by the peer", an error, "closed here".
    void (*on_closed)(void *user, control_conn *conn, const char *reason);
} control_callbacks;

// Connects; messages may be sent at once. A connection that cannot be made closes with the reason.
int control_connect(uv_loop_t *loop, const char *address, const control_callbacks *callbacks,
                    control_conn **out, error *err);

// Sends what the socket takes at once, and copies and queues the rest. E_TOO_LARGE; E_FULL and
// E_CLOSED: the connection closes.
int control_send(control_conn *conn, uint16_t type, const void *payload, size_t n);
// Numeric address of this end of a connected TCP connection into out; "" for a unix socket.
void control_local_host(const control_conn *conn, char *out, size_t n);
// What is queued is still sent, for CONTROL_LINGER_MS at most; then on_closed.
void control_close(control_conn *conn);

// Listens. on_accept gives the new connection's callbacks in *callbacks.
typedef struct control_listen_args {
    uv_loop_t *loop;
    const char *address; // port 0: any, see control_listener_address
    void *user;
    void (*on_accept)(void *user, control_conn *conn, control_callbacks *callbacks);
} control_listen_args;
// A socket file left by a dead process is replaced.
int control_listen(const control_listen_args *args, control_listener **out, error *err);
const char *control_listener_address(const control_listener *listener);
void control_listener_close(control_listener *listener); // accepts NULL; removes a unix socket

#endif
