// The transport within one process: a ring of borrowed payloads per peer and one memcpy from the
// sender's buffer into the receiver's, made by the loop in an idle handle that is active only
// while a ring holds something.
#include "engine/transport_ops.h"

#include <stdlib.h>

enum { DELIVER_PER_TURN = 8 }; // frames of one peer in one turn of the loop

typedef struct inproc_frame {
    frame_header header;
    const void *payload; // (bytes), owned by the sender until its token is back
    size_t bytes;
    void *token;
} inproc_frame;

typedef struct inproc_transport inproc_transport;

typedef struct inproc_peer {
    transport_peer base;
    inproc_transport *target;         // NULL once the other end is closed
    struct inproc_peer *next_inbound; // in target->inbound
    bool lost_told;
    unsigned head, count; // of ring
    inproc_frame ring[TRANSPORT_MAX_PENDING];
} inproc_peer;

struct inproc_transport {
    transport base;
    uv_idle_t idle;
    inproc_peer *inbound; // peers of other transports that send to this one; not owned
};

// What an address holds. It is checked against the handles of the loop before it is followed.
typedef struct inproc_body {
    uv_handle_t *handle;
    inproc_transport *t;
} inproc_body;

static void inproc_turn(uv_idle_t *idle);

static void inproc_wake(inproc_transport *t) {
    uv_idle_start(&t->idle, inproc_turn); // on an initialized handle it cannot fail
}

static int inproc_open(const transport_args *args, transport **out, error *err) {
    inproc_transport *t = calloc(1, sizeof *t);
    if (!t)
        return error_set(err, E_NO_MEMORY, "transport inproc: out of memory");
    int rc = transport_init(&t->base, &transport_inproc_ops, args, err);
    inproc_body body;
    memset(&body, 0, sizeof body);
    body.handle = (uv_handle_t *)&t->idle;
    body.t = t;
    if (!rc)
        rc = transport_set_address(&t->base, &body, sizeof body, err);
    if (rc) {
        free(t);
        return rc;
    }
    uv_idle_init(args->loop, &t->idle);
    t->idle.data = t;
    *out = &t->base;
    return E_OK;
}

typedef struct handle_search {
    uv_handle_t *wanted;
    bool found;
} handle_search;

static void compare_handle(uv_handle_t *handle, void *arg) {
    handle_search *search = arg;
    search->found = search->found || (handle == search->wanted && !uv_is_closing(handle));
}

// The transport that body names, if it is alive and on the same loop. The loop's list of handles
// is the registry: a stale or foreign address is found out without following its pointers.
static inproc_transport *find_target(uv_loop_t *loop, uint64_t id, const inproc_body *body) {
    handle_search search = {.wanted = body->handle};
    uv_walk(loop, compare_handle, &search);
    if (!search.found || body->handle->type != UV_IDLE || body->handle->data != body->t)
        return NULL;
    inproc_transport *target = body->t;
    bool alive =
        target->base.ops == &transport_inproc_ops && target->base.id == id && !target->base.closing;
    return alive ? target : NULL;
}

static int inproc_connect(transport *base, uint64_t id, const void *data, size_t n,
                          transport_peer **out, error *err) {
    inproc_body body;
    if (n != sizeof body)
        return error_set(err, E_INVALID, "transport inproc: an address body of %zu bytes", n);
    memcpy(&body, data, sizeof body);
    inproc_transport *target = find_target(base->loop, id, &body);
    if (!target)
        return error_set(err, E_NOT_FOUND,
                         "transport inproc: the address is of no open transport on this loop");
    inproc_peer *peer = calloc(1, sizeof *peer);
    if (!peer)
        return error_set(err, E_NO_MEMORY, "transport inproc: out of memory");
    peer->target = target;
    peer->next_inbound = target->inbound;
    target->inbound = peer;
    transport_add_peer(base, &peer->base);
    *out = &peer->base;
    return E_OK;
}

static int inproc_send(transport_peer *base, const frame_header *header, const void *payload,
                       size_t bytes, void *token) {
    inproc_peer *peer = (inproc_peer *)base;
    if (peer->count == TRANSPORT_MAX_PENDING)
        return E_FULL;
    inproc_frame *frame = &peer->ring[(peer->head + peer->count) % TRANSPORT_MAX_PENDING];
    peer->count++;
    *frame = (inproc_frame){*header, payload, bytes, token};
    inproc_wake((inproc_transport *)base->owner);
    return E_OK;
}

static inproc_frame pop_frame(inproc_peer *peer) {
    inproc_frame frame = peer->ring[peer->head];
    peer->head = (peer->head + 1) % TRANSPORT_MAX_PENDING;
    peer->count--;
    return frame;
}

static void deliver(transport *to, const inproc_frame *frame) {
    const transport_callbacks *cb = &to->callbacks;
    void *buffer = cb->place(cb->user, &frame->header, frame->bytes);
    if (!buffer) {
        to->stats.frames_dropped++;
        return;
    }
    if (frame->bytes)
        memcpy(buffer, frame->payload, frame->bytes);
    to->stats.frames_received++;
    to->stats.bytes_received += frame->bytes;
    cb->arrived(cb->user, &frame->header, buffer, frame->bytes);
}

// The callbacks may send, connect and mark anything closed; they free nothing, so peer stays valid.
// Returns whether a callback ran.
static bool peer_turn(inproc_peer *peer) {
    transport *t = peer->base.owner;
    const transport_callbacks *cb = &t->callbacks;
    bool worked = peer->count > 0;
    for (int i = 0; i < DELIVER_PER_TURN && peer->count && peer->target && !peer->base.closing;
         i++) {
        inproc_frame frame = pop_frame(peer);
        deliver(&peer->target->base, &frame);
        t->stats.frames_sent++;
        t->stats.bytes_sent += frame.bytes;
        cb->sent(cb->user, frame.token, E_OK);
    }
    while (peer->count && (!peer->target || peer->base.closing)) {
        inproc_frame frame = pop_frame(peer);
        cb->sent(cb->user, frame.token, E_CLOSED);
    }
    if (peer->base.lost && !peer->base.closing && !peer->lost_told) {
        peer->lost_told = true;
        cb->lost(cb->user, &peer->base, "the other end closed its transport");
        worked = true;
    }
    return worked;
}

static void unlink_inbound(inproc_peer *peer) {
    if (!peer->target)
        return;
    inproc_peer **link = &peer->target->inbound;
    while (*link != peer)
        link = &(*link)->next_inbound;
    *link = peer->next_inbound;
}

// Frees the peers that are marked closed and drained.
static void reap_peers(inproc_transport *t) {
    transport_peer **link = &t->base.peers;
    while (*link) {
        inproc_peer *peer = (inproc_peer *)*link;
        if (peer->base.closing && !peer->count) {
            *link = peer->base.next;
            unlink_inbound(peer);
            free(peer);
        } else {
            link = &peer->base.next;
        }
    }
}

static void inproc_closed(uv_handle_t *handle) {
    inproc_transport *t = handle->data;
    void (*done)(void *) = t->base.done;
    void *user = t->base.done_user;
    free(t);
    if (done)
        done(user);
}

// The handle stays active until a turn found nothing to do, so that the loop does not sleep on what
// the callbacks of this turn may have changed.
static void inproc_turn(uv_idle_t *idle) {
    inproc_transport *t = idle->data;
    bool worked = false;
    for (transport_peer *peer = t->base.peers; peer; peer = peer->next)
        worked = peer_turn((inproc_peer *)peer) || worked;
    reap_peers(t);
    if (worked || (t->base.closing && t->base.peers))
        return;
    uv_idle_stop(idle);
    if (t->base.closing)
        uv_close((uv_handle_t *)idle, inproc_closed);
}

static void inproc_peer_close(transport_peer *peer) {
    inproc_wake((inproc_transport *)peer->owner);
}

static void inproc_close(transport *base) {
    inproc_transport *t = (inproc_transport *)base;
    for (transport_peer *peer = base->peers; peer; peer = peer->next)
        peer->closing = true;
    // From here on nothing is delivered to this transport; its senders hear of it from the loop.
    for (inproc_peer *peer = t->inbound; peer; peer = peer->next_inbound) {
        peer->target = NULL;
        peer->base.lost = true;
        inproc_wake((inproc_transport *)peer->base.owner);
    }
    t->inbound = NULL;
    inproc_wake(t);
}

// Nothing to do: a frame on its way keeps the idle handle active.
static void inproc_expect(transport *t, bool on) {
    (void)t;
    (void)on;
}

const transport_ops transport_inproc_ops = {
    .kind = "inproc",
    .kind_id = 1,
    .same_host = true,
    .open = inproc_open,
    .close = inproc_close,
    .connect = inproc_connect,
    .peer_close = inproc_peer_close,
    .send = inproc_send,
    .expect = inproc_expect,
};
