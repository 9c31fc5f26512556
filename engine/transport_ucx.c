// The transport between processes: UCX active messages, over shared memory or TCP.
//
// The loop's side is four handles. prepare, which runs right before the loop sleeps, makes UCX
// progress until nothing is left, tells the user, and arms UCX's event descriptor; poll on that
// descriptor only wakes the loop; idle keeps the loop from sleeping while there is work or frames
// are expected; tick bounds how long a peer takes to close.
// User callbacks run from the turn in prepare, place and arrived even within UCX's progress, where
// endpoints must not be closed; so closing is only marked by a call, and done by the turn.
#include "engine/transport_ucx.h"

#include "engine/transport_ucx_config.h"

#include <sched.h>
#include <stdlib.h>

enum {
    TURN_BUDGET = 256,
    TICK_MS = 10,
    STUCK_MS = 10,
    STUCK_LOOK_MS = 1,
    STUCK_BUDGET = 4,
    N_HANDLES = 5
};

typedef struct ucx_peer ucx_peer;

typedef struct ucx_slot {
    ucx_peer *peer;
    ucx_wire_header header; // UCX reads it until the send completes
    void *token;
    ucs_status_t status;
    bool complete; // UCX is done with it
    bool told;     // the user has the token back
} ucx_slot;

struct ucx_peer {
    transport_peer base;
    ucp_ep_h ep;
    uint64_t remote; // id of the other transport
    uint32_t channel;
    uint32_t head, tail;  // sequences: next to send, first whose slot is taken
    unsigned n_flying;    // slots that UCX has
    ucs_status_t failure; // what UCX reported of the endpoint
    bool lost_told, ep_closed;
    uint64_t closed_at;                    // ms
    ucx_slot slots[TRANSPORT_MAX_PENDING]; // by sequence
};

typedef struct ucx_transport {
    transport base;
    ucp_context_h context;
    ucp_worker_h worker;
    ucx_receiver receiver;
    uv_prepare_t prepare;
    uv_idle_t idle;
    uv_poll_t poll;
    uv_timer_t tick, look;
    int n_handles; // not closed yet
    bool in_turn, ending, expecting;
    uint64_t active_at;   // ns, of the last work
    uint64_t awake_since; // ns, of the first turn in a row without work or sleep; 0: none
    uint32_t n_channels;
    ucx_peer *zombies; // told and closed, but UCX still has requests of theirs; owned
} ucx_transport;

static void on_idle(uv_idle_t *idle) {
    (void)idle;
}

static void on_poll(uv_poll_t *poll, int status, int events) {
    (void)poll;
    (void)status;
    (void)events;
}

static void on_tick(uv_timer_t *tick) {
    (void)tick;
}

// The loop does not sleep before a turn has looked.
static void ucx_wake(ucx_transport *t) {
    if (!t->in_turn && !t->ending)
        uv_idle_start(&t->idle, on_idle);
}

static void on_ep_error(void *arg, ucp_ep_h ep, ucs_status_t status) {
    (void)ep;
    ucx_peer *peer = arg;
    peer->failure = status;
    peer->base.lost = true;
}

// ---- Sends

static void on_send_done(void *request, ucs_status_t status, void *user_data) {
    ucx_slot *slot = user_data;
    slot->status = status;
    slot->complete = true;
    slot->peer->n_flying--;
    ucp_request_free(request);
}

static int ucx_send(transport_peer *base, const frame_header *header, const void *payload,
                    size_t bytes, void *token) {
    ucx_peer *peer = (ucx_peer *)base;
    ucx_transport *t = (ucx_transport *)base->owner;
    if (peer->head - peer->tail == TRANSPORT_MAX_PENDING)
        return E_FULL;
    ucx_slot *slot = &peer->slots[peer->head % TRANSPORT_MAX_PENDING];
    *slot = (ucx_slot){.peer = peer,
                       .header = {.sender = t->base.id,
                                  .channel = peer->channel,
                                  .sequence = peer->head,
                                  .frame = *header},
                       .token = token};
    ucp_request_param_t param = {.op_attr_mask =
                                     UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA,
                                 .cb.send = on_send_done,
                                 .user_data = slot};
    ucs_status_ptr_t request = ucp_am_send_nbx(peer->ep, UCX_AM_ID, &slot->header,
                                               sizeof slot->header, payload, bytes, &param);
    if (UCS_PTR_IS_ERR(request))
        return E_CLOSED; // what is wrong comes through the endpoint's error, and lost
    if (request)
        peer->n_flying++;
    else
        slot->complete = true;
    peer->head++;
    t->base.stats.bytes_sent += bytes;
    t->active_at = uv_hrtime();
    ucx_wake(t);
    return E_OK;
}

static void advance_tail(ucx_peer *peer) {
    while (peer->tail != peer->head) {
        const ucx_slot *slot = &peer->slots[peer->tail % TRANSPORT_MAX_PENDING];
        if (!slot->told || !slot->complete)
            return;
        peer->tail++;
    }
}

// Gives back the tokens of complete sends (of all, when the peer is given up). A callback may send
// at once into the place that its own token left.
static bool tell_sent(ucx_peer *peer, bool give_up) {
    transport *t = peer->base.owner;
    bool told = false;
    uint32_t end = peer->head;
    for (uint32_t s = peer->tail; s != end; s++) {
        ucx_slot *slot = &peer->slots[s % TRANSPORT_MAX_PENDING];
        if (slot->told || (!slot->complete && !give_up))
            continue;
        told = true;
        slot->told = true;
        void *token = slot->token;
        bool good = slot->complete && slot->status == UCS_OK;
        advance_tail(peer);
        t->stats.frames_sent += good;
        t->callbacks.sent(t->callbacks.user, token, good ? E_OK : E_CLOSED);
    }
    advance_tail(peer); // past those told before UCX was done with them
    return told;
}

// ---- Peers

static int ucx_connect(transport *base, uint64_t id, const void *body, size_t body_bytes,
                       transport_peer **out, error *err) {
    (void)body_bytes;
    ucx_transport *t = (ucx_transport *)base;
    ucx_peer *peer = calloc(1, sizeof *peer);
    if (!peer)
        return error_set(err, E_NO_MEMORY, "transport %s: out of memory", base->ops->kind);
    ucp_ep_params_t params = {.field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS |
                                            UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE |
                                            UCP_EP_PARAM_FIELD_ERR_HANDLER,
                              .address = body,
                              .err_mode = UCP_ERR_HANDLING_MODE_PEER,
                              .err_handler = {.cb = on_ep_error, .arg = peer}};
    ucs_status_t status = ucp_ep_create(t->worker, &params, &peer->ep);
    if (status != UCS_OK) {
        free(peer);
        return error_set(err, E_IO, "transport %s: UCX cannot reach the peer: %s", base->ops->kind,
                         ucs_status_string(status));
    }
    peer->remote = id;
    peer->channel = t->n_channels++;
    transport_add_peer(base, &peer->base);
    ucx_wake(t);
    *out = &peer->base;
    return E_OK;
}

static void ucx_peer_close(transport_peer *peer) {
    ucx_wake((ucx_transport *)peer->owner);
}

// UCX completes what it can of a force-closed endpoint in the turns that follow.
static void close_endpoint(ucx_transport *t, ucx_peer *peer) {
    uint64_t now = uv_now(t->base.loop);
    ucp_request_param_t param = {.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS,
                                 .flags = UCP_EP_CLOSE_FLAG_FORCE};
    ucs_status_ptr_t request = ucp_ep_close_nbx(peer->ep, &param);
    if (UCS_PTR_IS_PTR(request))
        ucp_request_free(request);
    peer->ep_closed = true;
    peer->closed_at = now;
    ucx_receiver_close_sender(&t->receiver, peer->remote, now);
}

static bool peer_turn(ucx_transport *t, ucx_peer *peer) {
    const transport_callbacks *cb = &t->base.callbacks;
    bool told = tell_sent(peer, false);
    if (peer->base.closing) {
        if (!peer->ep_closed)
            close_endpoint(t, peer);
        else if (uv_now(t->base.loop) - peer->closed_at >= TRANSPORT_CLOSE_MS)
            told = tell_sent(peer, true) || told;
    } else if (peer->base.lost && !peer->lost_told) {
        peer->lost_told = true;
        told = true;
        ucx_receiver_close_sender(&t->receiver, peer->remote, uv_now(t->base.loop));
        cb->lost(cb->user, &peer->base, ucs_status_string(peer->failure));
    }
    return told;
}

static bool all_told(const ucx_peer *peer) {
    for (uint32_t s = peer->tail; s != peer->head; s++)
        if (!peer->slots[s % TRANSPORT_MAX_PENDING].told)
            return false;
    return true;
}

// Moves closed peers out of the list, and frees those that UCX has nothing of any more.
static void reap_peers(ucx_transport *t) {
    for (transport_peer **link = &t->base.peers; *link;) {
        ucx_peer *peer = (ucx_peer *)*link;
        if (!peer->ep_closed || !all_told(peer)) {
            link = &peer->base.next;
            continue;
        }
        *link = peer->base.next;
        peer->base.next = (transport_peer *)t->zombies;
        t->zombies = peer;
    }
    for (ucx_peer **link = &t->zombies; *link;) {
        ucx_peer *peer = *link;
        if (peer->n_flying) {
            link = (ucx_peer **)&peer->base.next;
            continue;
        }
        *link = (ucx_peer *)peer->base.next;
        free(peer);
    }
}

// ---- The loop

static void ucx_finish(ucx_transport *t) {
    void (*done)(void *) = t->base.done;
    void *user = t->base.done_user;
    ucp_worker_destroy(t->worker);
    ucp_cleanup(t->context);
    while (t->zombies) {
        ucx_peer *peer = t->zombies;
        t->zombies = (ucx_peer *)peer->base.next;
        free(peer);
    }
    ucx_receiver_free(&t->receiver);
    free(t);
    if (done)
        done(user);
}

static void on_handle_closed(uv_handle_t *handle) {
    ucx_transport *t = handle->data;
    if (!--t->n_handles)
        ucx_finish(t);
}

static void end_handles(ucx_transport *t) {
    t->ending = true;
    // The poll handle must be stopped while UCX's descriptor still exists.
    uv_poll_stop(&t->poll);
    uv_close((uv_handle_t *)&t->poll, on_handle_closed);
    uv_close((uv_handle_t *)&t->prepare, on_handle_closed);
    uv_close((uv_handle_t *)&t->idle, on_handle_closed);
    uv_close((uv_handle_t *)&t->tick, on_handle_closed);
    uv_close((uv_handle_t *)&t->look, on_handle_closed);
}

static bool any_closing(const ucx_transport *t) {
    for (const transport_peer *peer = t->base.peers; peer; peer = peer->next)
        if (peer->closing)
            return true;
    return ucx_receiver_closing(&t->receiver);
}

// One round after UCX's progress: tells the user what happened and carries closing forward.
static bool tell(ucx_transport *t) {
    uv_loop_t *loop = t->base.loop;
    bool told = ucx_receiver_turn(&t->receiver, uv_now(loop));
    for (transport_peer *peer = t->base.peers; peer; peer = peer->next)
        told = peer_turn(t, (ucx_peer *)peer) || told;
    reap_peers(t);
    bool closing = any_closing(t);
    if (closing && !uv_is_active((uv_handle_t *)&t->tick))
        uv_timer_start(&t->tick, on_tick, TICK_MS, TICK_MS);
    else if (!closing)
        uv_timer_stop(&t->tick);
    return told;
}

static bool spinning(const ucx_transport *t) {
    return t->expecting && t->base.spin_us &&
           uv_hrtime() - t->active_at < (uint64_t)t->base.spin_us * 1000;
}

// UCX has no work and does not let its descriptor be armed either: something waits for a peer that
// takes nothing, a stopped or a dead one. The loop then looks now and then, not all the time.
static bool is_stuck(const ucx_transport *t) {
    return t->awake_since && uv_hrtime() - t->awake_since > (uint64_t)STUCK_MS * 1000000;
}

static void note_work(ucx_transport *t) {
    t->active_at = uv_hrtime();
    t->awake_since = 0;
}

// Progress until nothing is left, then arm; a descriptor that cannot be armed has an event
// already. Returns whether the loop may sleep.
static bool turn(ucx_transport *t) {
    bool worked = false;
    int budget = is_stuck(t) ? STUCK_BUDGET : TURN_BUDGET;
    for (int i = 0; i < budget; i++) {
        bool progressed = ucp_worker_progress(t->worker) > 0;
        if (tell(t) || progressed) {
            worked = true;
            continue;
        }
        // After work the loop goes round once more: the callbacks may have changed what its owner
        // waits for.
        if (worked)
            note_work(t);
        if (worked || spinning(t))
            return false;
        if (ucp_worker_arm(t->worker) == UCS_OK) {
            t->awake_since = 0;
            return true;
        }
    }
    if (worked) {
        note_work(t);
        return false;
    }
    if (!t->awake_since)
        t->awake_since = uv_hrtime();
    sched_yield(); // whoever is to make room for what waits here may be waiting for this core
    return false;
}

static void on_prepare(uv_prepare_t *prepare) {
    ucx_transport *t = prepare->data;
    t->in_turn = true;
    bool sleep = turn(t);
    t->in_turn = false;
    if (t->base.closing && !t->base.peers && !ucx_receiver_closing(&t->receiver)) {
        end_handles(t);
        return;
    }
    if (is_stuck(t)) {
        uv_idle_stop(&t->idle);
        uv_poll_stop(&t->poll);
        uv_timer_start(&t->look, on_tick, STUCK_LOOK_MS, 0);
        return;
    }
    if (!uv_is_active((uv_handle_t *)&t->poll))
        uv_poll_start(&t->poll, UV_READABLE, on_poll);
    if (sleep)
        uv_idle_stop(&t->idle);
    else
        uv_idle_start(&t->idle, on_idle);
}

static void ucx_close(transport *base) {
    ucx_transport *t = (ucx_transport *)base;
    for (transport_peer *peer = base->peers; peer; peer = peer->next)
        peer->closing = true;
    ucx_receiver_close_sender(&t->receiver, 0, uv_now(base->loop));
    ucx_wake(t);
}

static void ucx_expect(transport *base, bool on) {
    ucx_transport *t = (ucx_transport *)base;
    t->expecting = on;
    t->active_at = uv_hrtime();
    if (on && base->spin_us)
        ucx_wake(t);
}

// ---- Opening

static int open_worker(ucx_transport *t, bool shared_memory, const char *bind, error *err) {
    ucp_config_t *config;
    int rc = ucx_config_make(shared_memory, bind, &config, err);
    if (rc)
        return rc;
    ucp_params_t params = {.field_mask = UCP_PARAM_FIELD_FEATURES,
                           .features = UCP_FEATURE_AM | UCP_FEATURE_WAKEUP};
    ucs_status_t status = ucp_init(&params, config, &t->context);
    ucp_config_release(config);
    if (status != UCS_OK)
        return error_set(err, E_IO, "transport %s: UCX does not start: %s", t->base.ops->kind,
                         ucs_status_string(status));
    ucp_worker_params_t worker = {.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE,
                                  .thread_mode = UCS_THREAD_MODE_SINGLE};
    status = ucp_worker_create(t->context, &worker, &t->worker);
    if (status != UCS_OK) {
        ucp_cleanup(t->context);
        return error_set(err, E_IO, "transport %s: UCX opens no device: %s", t->base.ops->kind,
                         ucs_status_string(status));
    }
    return E_OK;
}

static int publish_address(ucx_transport *t, error *err) {
    ucp_address_t *address;
    size_t n;
    ucs_status_t status = ucp_worker_get_address(t->worker, &address, &n);
    if (status != UCS_OK)
        return error_set(err, E_IO, "transport %s: UCX has no address: %s", t->base.ops->kind,
                         ucs_status_string(status));
    int rc = transport_set_address(&t->base, address, n, err);
    ucp_worker_release_address(t->worker, address);
    return rc;
}

static int start_handles(ucx_transport *t, error *err) {
    int fd;
    ucs_status_t status = ucp_worker_get_efd(t->worker, &fd);
    if (status != UCS_OK)
        return error_set(err, E_UNSUPPORTED, "transport %s: UCX gives no wake-up descriptor: %s",
                         t->base.ops->kind, ucs_status_string(status));
    int rc = uv_poll_init(t->base.loop, &t->poll, fd);
    if (rc)
        return error_set(err, E_IO, "transport %s: cannot watch UCX's descriptor: %s",
                         t->base.ops->kind, uv_strerror(rc));
    uv_prepare_init(t->base.loop, &t->prepare);
    uv_idle_init(t->base.loop, &t->idle);
    uv_timer_init(t->base.loop, &t->tick);
    uv_timer_init(t->base.loop, &t->look);
    t->poll.data = t->prepare.data = t->idle.data = t->tick.data = t->look.data = t;
    t->n_handles = N_HANDLES;
    uv_poll_start(&t->poll, UV_READABLE, on_poll);
    uv_prepare_start(&t->prepare, on_prepare);
    uv_idle_start(&t->idle, on_idle);
    return E_OK;
}

static int ucx_open(const transport_ops *ops, const transport_args *args, transport **out,
                    error *err) {
    ucx_transport *t = calloc(1, sizeof *t);
    if (!t)
        return error_set(err, E_NO_MEMORY, "transport %s: out of memory", ops->kind);
    int rc = transport_init(&t->base, ops, args, err);
    if (rc)
        goto undo_memory;
    rc = open_worker(t, ops->same_host, args->bind, err);
    if (rc)
        goto undo_memory;
    rc = ucx_receiver_open(&t->receiver, &t->base, t->worker, err);
    if (rc)
        goto undo_worker;
    rc = publish_address(t, err);
    if (rc)
        goto undo_worker;
    rc = start_handles(t, err);
    if (rc)
        goto undo_worker;
    *out = &t->base;
    return E_OK;

undo_worker:
    ucp_worker_destroy(t->worker);
    ucp_cleanup(t->context);
undo_memory:
    free(t);
    return rc;
}

static int shm_open_transport(const transport_args *args, transport **out, error *err) {
    return ucx_open(&transport_shm_ops, args, out, err);
}

static int tcp_open_transport(const transport_args *args, transport **out, error *err) {
    return ucx_open(&transport_tcp_ops, args, out, err);
}

const transport_ops transport_shm_ops = {
    .kind = "shm",
    .kind_id = 2,
    .same_host = true,
    .open = shm_open_transport,
    .close = ucx_close,
    .connect = ucx_connect,
    .peer_close = ucx_peer_close,
    .send = ucx_send,
    .expect = ucx_expect,
};

const transport_ops transport_tcp_ops = {
    .kind = "tcp",
    .kind_id = 3,
    .same_host = false,
    .open = tcp_open_transport,
    .close = ucx_close,
    .connect = ucx_connect,
    .peer_close = ucx_peer_close,
    .send = ucx_send,
    .expect = ucx_expect,
};
