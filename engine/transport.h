// transport.h: moves frames between workers; UCX between processes, inproc within one.
//
// The receiver owns the memory frames land in: for every arriving frame the transport asks
// callbacks.place for a buffer of the payload's size (NULL drops the frame), fills it, then calls
// callbacks.arrived. The sender keeps a payload unchanged until callbacks.sent gives its token
// back (also when the peer died: each token comes back exactly once, status < 0 then; a peer that
// lives may still receive such a frame, with what the payload's memory holds by then).
// Frames of one peer arrive in the order of the sends. A token that comes back with 0 says that
// the payload is free again, not that the frame arrived.
// Callbacks run on the loop's thread, from the loop, never inside a call of this header. They may
// make any call of this header; place may only send. The loop must not be run from inside one.
// Thread: all calls from the thread of the uv loop given at open. Nothing here blocks; sends
// allocate nothing after the peer is connected.
// Idle costs nothing: the loop sleeps until a frame arrives (wake-up by file descriptor).
// Known limit of shm: a sender killed while it copies a frame into this process's queue (about a
// microsecond per small frame, most of the time of a large one) may block that queue; then nothing
// arrives from anybody until the transport is opened anew.
#ifndef TANDEM_ENGINE_TRANSPORT_H
#define TANDEM_ENGINE_TRANSPORT_H

#include "engine/frame.h"

#include <stdbool.h>
#include <uv.h>

typedef struct transport transport;
typedef struct transport_peer transport_peer;

typedef struct transport_callbacks {
    void *user;
    // header is valid during the call only. Returns a buffer of bytes, or NULL to drop the frame
    // (also one of 0 bytes, which any other pointer accepts).
    void *(*place)(void *user, const frame_header *header, size_t bytes);
    // payload is the buffer that place gave (not read or written for 0 bytes).
    void (*arrived)(void *user, const frame_header *header, void *payload, size_t bytes);
    // The frame that place accepted will not come, its sender is gone: payload is free again.
    // Exactly one of arrived and abandoned follows a place that did not return NULL.
    void (*abandoned)(void *user, const frame_header *header, void *payload, size_t bytes);
    void (*sent)(void *user, void *token, int status);
    // The transport lost the peer (not called after transport_peer_close). The control socket
    // usually says so earlier. The peer is still to be closed by the caller.
    void (*lost)(void *user, transport_peer *peer, const char *reason);
} transport_callbacks;

// kind: "inproc"; "shm": UCX over shared memory (all peers on this host); "tcp": UCX over TCP.
typedef struct transport_args {
    const char *kind;
    const char *bind; // tcp: local address whose interface is used, or NULL for UCX's choice
    uint32_t spin_us; // see transport_expect; 0: sleep at once
    uv_loop_t *loop;
    transport_callbacks callbacks;
} transport_args;

int transport_open(const transport_args *args, transport **out, error *err);
// Two-phase: closes every peer, then calls done (from the loop; may be NULL) when nothing of it
// is in use. The other callbacks may still run until then.
void transport_close(transport *t, void (*done)(void *user), void *user);

// Opaque address for the peers, owned by the transport; at most TRANSPORT_MAX_ADDRESS bytes.
enum { TRANSPORT_MAX_ADDRESS = 2048 };
int transport_address(transport *t, const void **out, size_t *n_bytes);

int transport_connect(transport *t, const void *address, size_t n_bytes, transport_peer **out,
                      error *err);
// Pending tokens come back through sent within TRANSPORT_CLOSE_MS, frames half received are
// abandoned, then the peer is freed; it is not to be used after the call. What was not delivered
// yet is lost. Closing the transport closes its peers.
enum { TRANSPORT_CLOSE_MS = 250 };
void transport_peer_close(transport_peer *peer);

// Sends header and payload. E_FULL when TRANSPORT_MAX_PENDING sends are outstanding.
enum { TRANSPORT_MAX_PENDING = 32 };
int transport_send(transport_peer *peer, const frame_header *header, const void *payload,
                   size_t bytes, void *token);

// While on, frames are expected soon: after each piece of work the loop polls for spin_us before
// it sleeps. Only worth it where the process has a core to itself. Off at the start.
void transport_expect(transport *t, bool on);

typedef struct transport_stats {
    uint64_t frames_sent, frames_received, frames_dropped, bytes_sent, bytes_received;
} transport_stats;
transport_stats transport_stats_get(const transport *t);

#endif
