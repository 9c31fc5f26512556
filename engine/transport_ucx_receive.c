// The receiving half of the UCX transport: the handler of active messages puts payloads into placed
// buffers; a window per channel gives them to the user in the order they were sent.
#include "engine/transport_ucx.h"

#include "engine/log.h"

#include <stdlib.h>

typedef enum entry_state {
    ENTRY_FREE,
    ENTRY_COMING, // UCX fills the buffer
    ENTRY_WHOLE,
    ENTRY_DROPPED, // by place
    ENTRY_TORN     // UCX gave up
} entry_state;

typedef struct entry {
    ucx_channel *channel;
    entry_state state;
    bool abandoned; // the user was told; UCX may still complete
    frame_header header;
    void *buffer; // (bytes), owned by the user
    size_t bytes;
} entry;

struct ucx_channel {
    ucx_channel *next;
    uint64_t sender;
    uint32_t number;
    uint32_t first; // sequence of the first frame not told yet
    unsigned n_coming;
    bool closed;
    uint64_t closed_at; // ms
    entry *window;      // (UCX_WINDOW), by sequence; NULL when closed and settled
};

static ucx_channel *find_channel(ucx_receiver *r, const ucx_wire_header *h) {
    for (ucx_channel *c = r->channels; c; c = c->next)
        if (c->sender == h->sender && c->number == h->channel)
            return c;
    // A sender that is not known begins at the beginning.
    if (h->sequence >= UCX_WINDOW)
        return NULL;
    ucx_channel *c = calloc(1, sizeof *c);
    entry *window = calloc(UCX_WINDOW, sizeof *window);
    if (!c || !window) {
        free(c);
        free(window);
        return NULL;
    }
    for (int i = 0; i < UCX_WINDOW; i++)
        window[i].channel = c;
    c->sender = h->sender;
    c->number = h->channel;
    c->window = window;
    c->next = r->channels;
    r->channels = c;
    return c;
}

static void close_channel(ucx_channel *c, uint64_t now) {
    if (c->closed)
        return;
    c->closed = true;
    c->closed_at = now;
}

// Arrivals of an open channel, in order.
static bool tell_arrivals(ucx_receiver *r, ucx_channel *c, uint64_t now) {
    transport *t = r->owner;
    bool told = false;
    while (!c->closed) {
        entry *e = &c->window[c->first % UCX_WINDOW];
        if (e->state == ENTRY_TORN) {
            close_channel(c, now);
            break;
        }
        if (e->state != ENTRY_WHOLE && e->state != ENTRY_DROPPED)
            break;
        bool whole = e->state == ENTRY_WHOLE;
        e->state = ENTRY_FREE;
        c->first++;
        if (!whole)
            continue;
        told = true;
        t->stats.frames_received++;
        t->stats.bytes_received += e->bytes;
        frame_header header = e->header;
        t->callbacks.arrived(t->callbacks.user, &header, e->buffer, e->bytes);
    }
    return told;
}

static void on_received(void *request, ucs_status_t status, size_t length, void *user_data) {
    (void)length;
    entry *e = user_data;
    e->channel->n_coming--;
    e->state = status == UCS_OK ? ENTRY_WHOLE : ENTRY_TORN;
    ucp_request_free(request);
}

// Where a frame of sequence goes, or NULL when it is to be dropped.
static entry *find_entry(ucx_receiver *r, const ucx_wire_header *h) {
    ucx_channel *c = find_channel(r, h);
    if (!c || c->closed)
        return NULL;
    entry *e = &c->window[h->sequence % UCX_WINDOW];
    if (h->sequence - c->first < UCX_WINDOW && e->state == ENTRY_FREE)
        return e;
    // What follows a lost frame is of no use: its sender must connect again.
    log_error("transport %s: frame %u of a peer is out of order, its connection is dropped",
              r->owner->ops->kind, (unsigned)h->sequence);
    close_channel(c, uv_now(r->owner->loop));
    return NULL;
}

// Takes the payload; e says what became of it.
static ucs_status_t take_payload(ucx_receiver *r, entry *e, void *data, bool rendezvous) {
    if (!e->bytes || !rendezvous) {
        if (e->bytes)
            memcpy(e->buffer, data, e->bytes);
        e->state = ENTRY_WHOLE;
        return UCS_OK;
    }
    // The request may complete, and be freed by on_received, before the call returns.
    e->state = ENTRY_COMING;
    e->channel->n_coming++;
    ucp_request_param_t receive = {.op_attr_mask =
                                       UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA,
                                   .cb.recv_am = on_received,
                                   .user_data = e};
    ucs_status_ptr_t request = ucp_am_recv_data_nbx(r->worker, data, e->buffer, e->bytes, &receive);
    if (UCS_PTR_IS_PTR(request))
        return UCS_INPROGRESS;
    e->channel->n_coming--;
    e->state = request ? ENTRY_TORN : ENTRY_WHOLE;
    return UCS_OK;
}

static ucs_status_t on_frame(void *arg, const void *header, size_t header_bytes, void *data,
                             size_t bytes, const ucp_am_recv_param_t *param) {
    ucx_receiver *r = arg;
    transport *t = r->owner;
    ucx_wire_header h;
    entry *e = NULL;
    if (header_bytes == sizeof h) {
        memcpy(&h, header, sizeof h); // UCX does not align it
        e = find_entry(r, &h);
    }
    if (!e) {
        t->stats.frames_dropped++;
        return UCS_OK;
    }
    ucs_status_t status = UCS_OK;
    *e = (entry){.channel = e->channel, .header = h.frame, .bytes = bytes};
    e->buffer = t->callbacks.place(t->callbacks.user, &h.frame, bytes);
    if (!e->buffer) {
        t->stats.frames_dropped++;
        e->state = ENTRY_DROPPED;
    } else {
        status = take_payload(r, e, data, param->recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV);
    }
    // One call of UCX's progress may bring more frames than the window holds.
    tell_arrivals(r, e->channel, uv_now(t->loop));
    return status;
}

int ucx_receiver_open(ucx_receiver *r, transport *owner, ucp_worker_h worker, error *err) {
    *r = (ucx_receiver){.owner = owner, .worker = worker};
    ucp_am_handler_param_t handler = {
        .field_mask = UCP_AM_HANDLER_PARAM_FIELD_ID | UCP_AM_HANDLER_PARAM_FIELD_FLAGS |
                      UCP_AM_HANDLER_PARAM_FIELD_CB | UCP_AM_HANDLER_PARAM_FIELD_ARG,
        .id = UCX_AM_ID,
        .flags = UCP_AM_FLAG_WHOLE_MSG,
        .cb = on_frame,
        .arg = r};
    ucs_status_t status = ucp_worker_set_am_recv_handler(worker, &handler);
    if (status != UCS_OK)
        return error_set(err, E_IO, "transport: UCX takes no message handler: %s",
                         ucs_status_string(status));
    return E_OK;
}

void ucx_receiver_free(ucx_receiver *r) {
    while (r->channels) {
        ucx_channel *c = r->channels;
        r->channels = c->next;
        free(c->window);
        free(c);
    }
}

// Gives back the buffers of a closed channel. UCX drops what it was filling when the endpoint is
// closed; a dead peer's request that never ends holds a buffer for TRANSPORT_CLOSE_MS at most.
static bool settle_closed(ucx_receiver *r, ucx_channel *c, uint64_t now) {
    transport *t = r->owner;
    bool told = false;
    bool late = now - c->closed_at >= TRANSPORT_CLOSE_MS;
    for (uint32_t i = 0; i < UCX_WINDOW; i++) {
        entry *e = &c->window[(c->first + i) % UCX_WINDOW];
        bool mine =
            e->state == ENTRY_WHOLE || e->state == ENTRY_TORN || (e->state == ENTRY_COMING && late);
        if (mine && !e->abandoned) {
            e->abandoned = true;
            told = true;
            frame_header header = e->header;
            t->callbacks.abandoned(t->callbacks.user, &header, e->buffer, e->bytes);
        }
        if (e->state != ENTRY_COMING)
            e->state = ENTRY_FREE;
    }
    if (!c->n_coming) {
        free(c->window);
        c->window = NULL;
    }
    return told;
}

bool ucx_receiver_turn(ucx_receiver *r, uint64_t now) {
    bool told = false;
    for (ucx_channel *c = r->channels; c; c = c->next) {
        told = tell_arrivals(r, c, now) || told;
        if (c->closed && c->window)
            told = settle_closed(r, c, now) || told;
    }
    return told;
}

void ucx_receiver_close_sender(ucx_receiver *r, uint64_t sender, uint64_t now) {
    for (ucx_channel *c = r->channels; c; c = c->next)
        if (!sender || c->sender == sender)
            close_channel(c, now);
}

bool ucx_receiver_closing(const ucx_receiver *r) {
    for (ucx_channel *c = r->channels; c; c = c->next)
        for (int i = 0; c->closed && c->window && i < UCX_WINDOW; i++)
            if (c->window[i].state != ENTRY_FREE && !c->window[i].abandoned)
                return true;
    return false;
}
