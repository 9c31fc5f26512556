// transport_ucx.h: what transport_ucx.c (the loop, peers, sends) and transport_ucx_receive.c share.
#ifndef TANDEM_ENGINE_TRANSPORT_UCX_H
#define TANDEM_ENGINE_TRANSPORT_UCX_H

#include "engine/transport_ops.h"

#include <ucp/api/ucp.h>

// The active-message header. A channel is one connection of a sender; its frames are counted, so
// that the receiver restores the order that eager and rendezvous frames lose between them.
typedef struct ucx_wire_header {
    uint64_t sender; // transport id
    uint32_t channel;
    uint32_t sequence; // from 0
    frame_header frame;
} ucx_wire_header;
_Static_assert(sizeof(ucx_wire_header) == 80, "the active-message header is 80 bytes");

// A sender reuses the place of a frame only when all before it are complete, so that at most
// TRANSPORT_MAX_PENDING frames are under way; twice that is never reached by a sane sender.
enum { UCX_WINDOW = 2 * TRANSPORT_MAX_PENDING, UCX_AM_ID = 1 };

typedef struct ucx_channel ucx_channel;

typedef struct ucx_receiver {
    transport *owner;
    ucp_worker_h worker;
    ucx_channel *channels; // list, owned; closed ones stay as marks against late frames
} ucx_receiver;

// Registers the handler of frames. place and arrived are called from within UCX's progress, where
// sends and new endpoints are allowed.
int ucx_receiver_open(ucx_receiver *r, transport *owner, ucp_worker_h worker, error *err);
// After the worker is destroyed.
void ucx_receiver_free(ucx_receiver *r);
// Tells the user what arrived and what is abandoned. now is in ms. Returns whether it told
// something. Never within UCX's progress.
bool ucx_receiver_turn(ucx_receiver *r, uint64_t now);
// No frame of this sender's present channels arrives any more (sender 0: of any sender).
void ucx_receiver_close_sender(ucx_receiver *r, uint64_t sender, uint64_t now);
// A closed channel still has a buffer of the user.
bool ucx_receiver_closing(const ucx_receiver *r);

#endif
