// control.h: framed messages between router and workers over TCP or UNIX sockets.
//
// Frame: u32 payload bytes | u16 type | u16 version (little endian), then the payload. A frame of
// another version, or over the cap of the connection, ends the connection. The payload of a
// message is read with bytes.h; it has no alignment.
// Every connection ends with exactly one on_closed, whatever ended it (the peer, an error, a
// refused frame, control_close); it is freed after that call.
// Thread: all calls from the loop's thread; callbacks run from the loop, never inside a call of
// this header, and may make any call of it. Nothing blocks but control_listen (a name look-up).
#ifndef TANDEM_ENGINE_CONTROL_H
#define TANDEM_ENGINE_CONTROL_H

#include "engine/status.h"

#include <stdint.h>
#include <uv.h>

enum { CONTROL_VERSION = 1, CONTROL_HEADER_BYTES = 8 };
enum { CONTROL_CONNECT_MS = 10000, CONTROL_LINGER_MS = 1000, CONTROL_MAX_ADDRESS = 256 };
#define CONTROL_MAX_MESSAGE ((size_t)64 << 20) // the default cap of a payload
#define CONTROL_MAX_QUEUED ((size_t)128 << 20) // the default cap of what waits to be sent

typedef struct control_conn control_conn;
typedef struct control_listener control_listener;

typedef struct control_callbacks {
    void *user;
    // payload is valid during the call only.
    void (*on_message)(void *user, control_conn *conn, uint16_t type, const void *payload,
                       size_t n);
    void (*on_closed)(void *user, control_conn *conn, const char *reason);
} control_callbacks;

typedef struct control_args {
    uv_loop_t *loop;
    size_t max_message; // 0: CONTROL_MAX_MESSAGE
    size_t max_queued;  // 0: CONTROL_MAX_QUEUED
    control_callbacks callbacks;
} control_args;

// Begins to connect to "unix:/path", "host:port" or "[ipv6]:port". Messages may be sent at once:
// they wait for the connection. A connection that fails (or takes CONTROL_CONNECT_MS) ends with
// on_closed.
int control_connect(const control_args *args, const char *address, control_conn **out, error *err);

// Makes a connection of a connected stream (uv_tcp_t or uv_pipe_t from malloc, as on_accept gives
// it). Takes the stream in any case: on failure it is closed and freed.
int control_open(const control_args *args, uv_stream_t *stream, control_conn **out, error *err);

// Copies and queues. E_FULL when the queue is at its cap, E_TOO_LARGE over the cap of a message,
// E_CLOSED once the connection is ending.
int control_send(control_conn *conn, uint16_t type, const void *payload, size_t n);

// Bytes queued and not yet handed to the kernel.
size_t control_queued(const control_conn *conn);

// Two-phase: no message is received any more, what is queued is still sent (CONTROL_LINGER_MS at
// most), then on_closed.
void control_close(control_conn *conn);

// Accepts connections at an address; port 0 takes a free one. A UNIX socket file left by a dead
// process is replaced. on_accept owns the stream: control_open, or control_refuse.
int control_listen(uv_loop_t *loop, const char *address,
                   void (*on_accept)(void *user, uv_stream_t *stream), void *user,
                   control_listener **out, error *err);
void control_refuse(uv_stream_t *stream);
// The address to connect to, with the port taken. Owned by the listener.
const char *control_listener_address(const control_listener *listener);
void control_listener_close(control_listener *listener); // freed later, from the loop

#endif
