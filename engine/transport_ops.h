// transport_ops.h: what a kind of transport implements; included by transport*.c only.
//
// Every kind embeds struct transport and struct transport_peer as the first member of its own
// structs and allocates both. transport.c checks arguments, builds and checks addresses, and
// forwards; a kind never sees an address that is malformed, of another kind or of another host.
// Rules for a kind: nothing blocks; callbacks of the user run from the loop only, never inside an
// operation; anything that destroys (a peer, the transport) only marks, and the loop does it when
// no callback of the user is on the stack.
// Thread: the thread of the loop.
#ifndef TANDEM_ENGINE_TRANSPORT_OPS_H
#define TANDEM_ENGINE_TRANSPORT_OPS_H

#include "engine/transport.h"

typedef struct transport_ops {
    const char *kind;
    uint8_t kind_id; // in addresses
    bool same_host;  // peers must share host, pid and network namespace
    // Allocates and starts a transport. Calls transport_init and transport_set_address. May block
    // for the time of opening devices (milliseconds): the only operation that may.
    int (*open)(const transport_args *args, transport **out, error *err);
    // Begins the end: every peer is marked closed, done runs later and frees t.
    void (*close)(transport *t);
    // body is what the other end gave transport_set_address; read during the call only.
    int (*connect)(transport *t, uint64_t id, const void *body, size_t body_bytes,
                   transport_peer **out, error *err);
    void (*peer_close)(transport_peer *peer); // marks; the loop frees the peer
    // The sender's payload is borrowed until sent gives the token back; header is copied.
    int (*send)(transport_peer *peer, const frame_header *header, const void *payload, size_t bytes,
                void *token);
    void (*expect)(transport *t, bool on);
} transport_ops;

extern const transport_ops transport_inproc_ops;
extern const transport_ops transport_shm_ops;
extern const transport_ops transport_tcp_ops;

struct transport {
    const transport_ops *ops;
    uv_loop_t *loop; // owned by the caller
    transport_callbacks callbacks;
    uint32_t spin_us;
    uint64_t id; // random; names this transport to its peers
    transport_stats stats;
    transport_peer *peers; // list, owned
    bool closing;
    void (*done)(void *user);
    void *done_user;
    size_t address_bytes;
    uint8_t address[TRANSPORT_MAX_ADDRESS];
};

struct transport_peer {
    transport *owner;
    transport_peer *next; // in owner->peers
    bool closing;         // by the caller: to be freed by the loop
    bool lost;            // the other end is gone
};

// Fills the common part from args and draws the id.
int transport_init(transport *t, const transport_ops *ops, const transport_args *args, error *err);
// Builds the address that peers are given: a checked prefix and the body of the kind.
int transport_set_address(transport *t, const void *body, size_t body_bytes, error *err);

static inline void transport_add_peer(transport *t, transport_peer *peer) {
    peer->owner = t;
    peer->next = t->peers;
    t->peers = peer;
}

#endif
