// The FFN node: gathers DISPATCH frames, runs the experts, answers with RETURN frames.
//
// One group is computed at a time: its rows are joined behind each other in the order of the
// attention ranks, sorted by expert, multiplied, and handed back frame by frame.
#include "engine/log.h"
#include "engine/node.h"
#include "engine/transport.h"
#include "ffn_node/ffn_model.h"
#include "ffn_node/gather.h"

#include <stdlib.h>

// What one lane of one attention worker sends and gets. Two RETURN payloads used in turn, because
// the transport may give one back only after the next DISPATCH has arrived.
typedef struct ffn_slot {
    bool taken; // a frame is arriving, waits or is computed here
    kernel_mem *received;
    frame_header header;
    struct ffn_return {
        kernel_mem *mem;
        bool sending;
    } returns[2];
} ffn_slot;

typedef struct ffn_node {
    const node_env *env;
    const plan *plan;
    kernel_backend *backend;
    kernel_queue *queue;
    ffn_model model;
    gather *gather;
    transport *transport;
    transport_peer *peers[CONFIG_MAX_WORKERS]; // by attention rank; NULL: not joined
    frame_expect expect;
    uint32_t epoch;
    ffn_slot *slots; // (n_lanes, n_attention)
    uint64_t frames_refused;

    // The group under way; its slots are taken from the gather.
    bool computing;
    gather_group group;
    kernel_mark mark;
    uint16_t *experts;   // (max rows of a group, top_k)
    float *weights;      // the same
    int32_t *group_rows; // (n_local)
    int32_t *slot_row;   // (max rows * top_k)
    float *slot_weight;
    kernel_mem *rows; // (max rows, hidden) act
    kernel_mem *mid;  // (max rows * top_k, intermediate) act
    kernel_mem *out;  // (max rows, hidden) f32

    uv_idle_t work;  // runs while something can be done
    uv_timer_t due;  // when a gather's wait ends
    uv_async_t wake; // a mark has completed
    int n_open_handles;
    void (*closed)(void *user);
    void *closed_user;
} ffn_node;

static kernel_ref whole(kernel_mem *mem) {
    return (kernel_ref){mem, 0};
}

static ffn_slot *slot_at(ffn_node *n, size_t lane, size_t attention) {
    return &n->slots[lane * n->plan->n_attention + attention];
}

static void work_soon(ffn_node *n);

// ---- frames ----

// Counted; logged as far as it is somebody's fault, and not for ever.
static void refuse(ffn_node *n, const char *reason) {
    if (++n->frames_refused <= 10 && reason)
        log_warn("frame refused: %s", reason);
}

static bool names_own_experts(const ffn_node *n, const frame_header *header, const void *payload) {
    const model_config *m = &n->plan->model;
    const uint16_t *experts = payload; // the first section of a DISPATCH
    for (size_t i = 0; i < (size_t)header->rows * m->top_k; i++)
        if (experts[i] != FRAME_NO_EXPERT &&
            (experts[i] >= m->n_experts || n->model.local_group[experts[i]] < 0))
            return false;
    return true;
}

static void *place(void *user, const frame_header *header, size_t bytes) {
    ffn_node *n = user;
    error err;
    int code = frame_check(header, FRAME_DISPATCH, bytes, &n->expect, &err);
    if (!code && (header->attention >= n->plan->n_attention || !n->peers[header->attention]))
        code = error_set(&err, E_PROTOCOL, "frame of attention worker %u, which has not joined",
                         header->attention);
    if (!code && header->epoch != n->epoch)
        code = E_STATE; // a frame of an old epoch is nobody's fault
    if (!code && slot_at(n, header->lane, header->attention)->taken)
        code = error_set(&err, E_PROTOCOL, "attention worker %u sent lane %u twice",
                         header->attention, header->lane);
    if (code) {
        refuse(n, code == E_STATE ? NULL : err.text);
        return NULL;
    }
    ffn_slot *slot = slot_at(n, header->lane, header->attention);
    slot->taken = true;
    return kernel_mem_host(slot->received);
}

static void arrived(void *user, const frame_header *header, void *payload, size_t bytes) {
    ffn_node *n = user;
    ffn_slot *slot = slot_at(n, header->lane, header->attention);
    (void)bytes;
    if (!names_own_experts(n, header, payload)) { // refused alone: its pass goes on without it
        slot->taken = false;
        refuse(n, "it names an expert of another FFN worker, or none that there is");
        return;
    }
    slot->header = *header;
    gather_arrived(n->gather, header, uv_hrtime() / 1000);
    work_soon(n);
}

static void abandoned(void *user, const frame_header *header, void *payload, size_t bytes) {
    (void)payload, (void)bytes;
    slot_at(user, header->lane, header->attention)->taken = false;
}

static void sent(void *user, void *token, int status) {
    (void)status; // a lost peer is told by its control socket
    ((struct ffn_return *)token)->sending = false;
    work_soon(user);
}

static void lost(void *user, transport_peer *peer, const char *reason) {
    ffn_node *n = user;
    for (size_t a = 0; a < n->plan->n_attention; a++) {
        if (n->peers[a] == peer) {
            log_warn("lost attention worker %zu: %s", a, reason);
            n->peers[a] = NULL;
        }
    }
    transport_peer_close(peer);
}

// ---- a group ----

static int join_rows(ffn_node *n, size_t *n_rows) {
    const model_config *m = &n->plan->model;
    size_t rows = 0;
    for (size_t i = 0; i < n->group.n; i++) {
        ffn_slot *slot = slot_at(n, n->group.lane, n->group.attention[i]);
        const char *payload = kernel_mem_host(slot->received);
        size_t count = slot->header.rows;
        frame_layout layout;
        int code =
            frame_layout_make(FRAME_DISPATCH, count, m->top_k, m->hidden, n->plan->wire, &layout);
        if (!code && count)
            code = kernel_convert(
                n->queue, &(kernel_convert_args){
                              .rows = count,
                              .columns = m->hidden,
                              .host_in = payload + layout.rows_at,
                              .in_type = n->plan->wire,
                              .out = {n->rows, rows * m->hidden * dtype_bytes(n->plan->compute)},
                              .out_type = n->plan->compute});
        if (code)
            return code;
        memcpy(n->experts + rows * m->top_k, payload + layout.experts_at,
               count * m->top_k * sizeof *n->experts);
        memcpy(n->weights + rows * m->top_k, payload + layout.weights_at,
               count * m->top_k * sizeof *n->weights);
        rows += count;
    }
    *n_rows = rows;
    return E_OK;
}

static int queue_experts(ffn_node *n, size_t rows) {
    const model_config *m = &n->plan->model;
    const ffn_model *model = &n->model;
    size_t first = n->group.layer * model->n_local, n_slots;
    int code = kernel_sort(n->queue, &(kernel_sort_args){.rows = rows,
                                                         .top_k = m->top_k,
                                                         .n_experts = m->n_experts,
                                                         .n_groups = model->n_local,
                                                         .experts = n->experts,
                                                         .weights = n->weights,
                                                         .local_group = model->local_group,
                                                         .group_rows = n->group_rows,
                                                         .slot_row = n->slot_row,
                                                         .slot_weight = n->slot_weight,
                                                         .n_slots = &n_slots});
    if (!code)
        code = kernel_zero(n->queue, whole(n->out), rows * m->hidden * sizeof(float));
    kernel_gemm_args gate_up = {.n_groups = model->n_local,
                                .group_rows = n->group_rows,
                                .matrices = (const kernel_matrix *const *)&model->gate_up[first],
                                .a = whole(n->rows),
                                .a_index = n->slot_row,
                                .epilogue = KERNEL_EPILOGUE_SWIGLU,
                                .out = whole(n->mid)};
    if (!code)
        code = kernel_gemm(n->queue, &gate_up);
    kernel_gemm_args down = {.n_groups = model->n_local,
                             .group_rows = n->group_rows,
                             .matrices = (const kernel_matrix *const *)&model->down[first],
                             .a = whole(n->mid),
                             .scale = n->slot_weight,
                             .epilogue = KERNEL_EPILOGUE_ADD,
                             .out = whole(n->out),
                             .out_index = n->slot_row};
    return code ? code : kernel_gemm(n->queue, &down);
}

static struct ffn_return *return_of(ffn_node *n, size_t i) {
    return &slot_at(n, n->group.lane, n->group.attention[i])->returns[n->group.layer & 1];
}

static int queue_returns(ffn_node *n) {
    const model_config *m = &n->plan->model;
    size_t row = 0;
    for (size_t i = 0; i < n->group.n; i++) {
        size_t count = slot_at(n, n->group.lane, n->group.attention[i])->header.rows;
        int code = E_OK;
        if (count)
            code = kernel_convert(
                n->queue, &(kernel_convert_args){.rows = count,
                                                 .columns = m->hidden,
                                                 .in = {n->out, row * m->hidden * sizeof(float)},
                                                 .in_type = DTYPE_F32,
                                                 .host_out = kernel_mem_host(return_of(n, i)->mem),
                                                 .out_type = n->plan->wire});
        if (code)
            return code;
        row += count;
    }
    return kernel_queue_mark(n->queue, &n->mark);
}

// Takes the next group. The RETURN payloads of two layers ago have normally long been sent; the
// group waits for the rare one that has not.
static int begin_group(ffn_node *n, bool *began) {
    size_t rows;
    *began = false;
    if (!n->group.n && !gather_next(n->gather, uv_hrtime() / 1000, &n->group))
        return E_OK;
    for (size_t i = 0; i < n->group.n; i++)
        if (return_of(n, i)->sending)
            return E_OK;
    int code = join_rows(n, &rows);
    if (!code && rows)
        code = queue_experts(n, rows);
    if (!code)
        code = queue_returns(n);
    n->computing = *began = !code;
    return code;
}

static int send_returns(ffn_node *n) {
    const plan *p = n->plan;
    for (size_t i = 0; i < n->group.n; i++) {
        size_t a = n->group.attention[i];
        ffn_slot *slot = slot_at(n, n->group.lane, a);
        frame_header header = slot->header;
        frame_layout layout;
        slot->taken = false;
        header.kind = FRAME_RETURN;
        header.flags = 0;
        header.pass = n->group.pass;
        header.members = n->group.members;
        int code = frame_layout_make(FRAME_RETURN, header.rows, p->model.top_k, p->model.hidden,
                                     p->wire, &layout);
        if (code)
            return code;
        if (!n->peers[a])
            continue; // gone meanwhile
        struct ffn_return *ret = return_of(n, i);
        ret->sending = true;
        code = transport_send(n->peers[a], &header, kernel_mem_host(ret->mem), layout.bytes, ret);
        if (code) { // a peer that takes nothing any more is as good as lost
            ret->sending = false;
            log_warn("attention worker %zu takes no frames: %s", a, status_text(code));
        }
    }
    n->group.n = 0;
    n->computing = false;
    return E_OK;
}

// ---- the loop ----

static void on_due(uv_timer_t *timer) {
    work_soon(timer->data);
}

static void sleep_until_due(ffn_node *n) {
    uv_idle_stop(&n->work);
    uint64_t due = gather_due(n->gather), now = uv_hrtime() / 1000;
    if (due == UINT64_MAX)
        uv_timer_stop(&n->due);
    else
        uv_timer_start(&n->due, on_due, due > now ? (due - now + 999) / 1000 : 1, 0);
}

static void on_work(uv_idle_t *idle) {
    ffn_node *n = idle->data;
    bool moved = false;
    int code = E_OK;
    if (!n->computing)
        code = begin_group(n, &moved);
    if (!code && n->computing && kernel_mark_done(n->queue, n->mark)) {
        code = send_returns(n);
        moved = true;
    }
    if (code) {
        error err;
        error_set(&err, code, "ffn step: %s", status_text(code));
        uv_idle_stop(&n->work);
        n->env->fail(n->env->user, &err);
    } else if (!moved) {
        sleep_until_due(n);
    }
}

static void work_soon(ffn_node *n) {
    if (!n->closed)
        uv_idle_start(&n->work, on_work);
}

static void on_wake(uv_async_t *async) {
    work_soon(async->data);
}

static void on_mark(void *user) {
    uv_async_send(&((ffn_node *)user)->wake);
}

// ---- open, join, close ----

static int open_buffers(ffn_node *n, error *err) {
    const plan *p = n->plan;
    const model_config *m = &p->model;
    size_t rows = p->max_rows * p->n_attention, entries = rows * m->top_k;
    size_t act = dtype_bytes(p->compute);
    n->experts = calloc(entries, sizeof *n->experts);
    n->weights = calloc(entries, sizeof *n->weights);
    n->slot_row = calloc(entries, sizeof *n->slot_row);
    n->slot_weight = calloc(entries, sizeof *n->slot_weight);
    n->group_rows = calloc(n->model.n_local, sizeof *n->group_rows);
    n->slots = calloc(p->n_lanes * p->n_attention, sizeof *n->slots);
    if (!n->experts || !n->weights || !n->slot_row || !n->slot_weight || !n->group_rows ||
        !n->slots)
        return error_set(err, E_NO_MEMORY, "ffn: no memory for %zu rows", rows);
    frame_layout dispatch, ret;
    int code =
        frame_layout_make(FRAME_DISPATCH, p->max_rows, m->top_k, m->hidden, p->wire, &dispatch);
    if (!code)
        code = frame_layout_make(FRAME_RETURN, p->max_rows, m->top_k, m->hidden, p->wire, &ret);
    if (!code)
        code =
            kernel_mem_alloc(n->backend, KERNEL_MEM_DEVICE, rows * m->hidden * act, &n->rows, err);
    if (!code)
        code = kernel_mem_alloc(n->backend, KERNEL_MEM_DEVICE,
                                entries * m->expert_intermediate * act, &n->mid, err);
    if (!code)
        code = kernel_mem_alloc(n->backend, KERNEL_MEM_DEVICE, rows * m->hidden * sizeof(float),
                                &n->out, err);
    for (size_t i = 0; !code && i < p->n_lanes * p->n_attention; i++) {
        ffn_slot *slot = &n->slots[i];
        code = kernel_mem_alloc(n->backend, KERNEL_MEM_HOST, dispatch.bytes, &slot->received, err);
        for (int half = 0; half < 2 && !code; half++)
            code = kernel_mem_alloc(n->backend, KERNEL_MEM_HOST, ret.bytes,
                                    &slot->returns[half].mem, err);
    }
    return code;
}

static void free_node(ffn_node *n) {
    for (size_t i = 0; n->slots && i < n->plan->n_lanes * n->plan->n_attention; i++) {
        kernel_mem_free(n->slots[i].received);
        kernel_mem_free(n->slots[i].returns[0].mem);
        kernel_mem_free(n->slots[i].returns[1].mem);
    }
    kernel_mem_free(n->rows);
    kernel_mem_free(n->mid);
    kernel_mem_free(n->out);
    ffn_model_free(&n->model);
    gather_close(n->gather);
    kernel_queue_free(n->queue);
    kernel_backend_close(n->backend);
    free(n->experts);
    free(n->weights);
    free(n->slot_row);
    free(n->slot_weight);
    free(n->group_rows);
    free(n->slots);
    free(n);
}

static void open_handles(ffn_node *n) {
    uv_idle_init(n->env->loop, &n->work);
    uv_timer_init(n->env->loop, &n->due);
    uv_async_init(n->env->loop, &n->wake, on_wake);
    n->work.data = n->due.data = n->wake.data = n;
    n->n_open_handles = 3;
}

static int open_backend(ffn_node *n, error *err) {
    const plan *p = n->plan;
    kernel_backend_args args = {
        .device = n->env->config->ffn.device,
        .threads = n->env->threads,
        .compute = p->compute,
        .max_rows = p->max_rows * p->n_attention * p->model.top_k,
        .max_groups = p->model.n_experts,
    };
    int code = kernel_backend_open(&args, &n->backend, err);
    if (!code)
        code = kernel_queue_create(n->backend, on_mark, n, &n->queue, err);
    return code;
}

static int ffn_open(const node_env *env, void **out, error *err) {
    const config *c = env->config;
    const plan *p = env->plan;
    ffn_node *n = calloc(1, sizeof *n);
    if (!n)
        return error_set(err, E_NO_MEMORY, "ffn: out of memory");
    n->env = env;
    n->plan = p;
    n->expect = plan_frame_expect(p);
    gather_args args = {.n_attention = p->n_attention,
                        .n_lanes = p->n_lanes,
                        .n_layers = p->model.n_layers,
                        .rank = env->rank,
                        .alone = c->ffn.gather == CONFIG_GATHER_NONE,
                        .wait_us = (uint64_t)c->ffn.gather_wait_us,
                        .deadline_us = (uint64_t)c->ffn.member_deadline_ms * 1000};
    int code = gather_open(&args, &n->gather, err);
    if (!code)
        code = open_backend(n, err);
    if (!code)
        code = ffn_model_load(n->backend, p, env->rank, c->model, env->progress, env->user,
                              &n->model, err);
    if (!code)
        code = open_buffers(n, err);
    transport_args wire = {.kind = env->transport,
                           .bind = env->bind,
                           .spin_us = env->spin_us,
                           .loop = env->loop,
                           .callbacks = {n, place, arrived, abandoned, sent, lost}};
    if (!code)
        code = transport_open(&wire, &n->transport, err);
    if (code) {
        free_node(n);
        return code;
    }
    open_handles(n);
    log_info("ffn rank %u: %s; %zu of %zu experts a layer, %.1f MB of weights", env->rank,
             kernel_backend_describe(n->backend), n->model.n_local, p->model.n_experts,
             (double)n->model.weight_bytes / 1e6);
    *out = n;
    return E_OK;
}

static void ffn_describe(void *node, message_ready *out) {
    ffn_node *n = node;
    const void *address;
    size_t n_bytes;
    *out = (message_ready){.plan_hash = n->plan->hash, .weight_bytes = n->model.weight_bytes};
    if (!transport_address(n->transport, &address, &n_bytes)) {
        memcpy(out->address, address, n_bytes);
        out->n_address = (uint32_t)n_bytes;
    }
}

static int ffn_join(void *node, const message_topology *topology, error *err) {
    ffn_node *n = node;
    n->epoch = topology->epoch;
    for (uint32_t i = 0; i < topology->n_peers; i++) {
        const message_peer *peer = &topology->peers[i];
        if (peer->rank >= n->plan->n_attention)
            return error_set(err, E_PROTOCOL, "topology names attention worker %u of %zu",
                             peer->rank, n->plan->n_attention);
        int code = transport_connect(n->transport, peer->address, peer->n_address,
                                     &n->peers[peer->rank], err);
        if (code)
            return code;
    }
    transport_expect(n->transport, true);
    return E_OK;
}

static void ffn_message(void *node, uint16_t type, const void *payload, size_t n_bytes) {
    (void)node, (void)payload, (void)n_bytes;
    log_warn("message of type %u is not for an FFN worker; ignored", type);
}

static void on_handle_closed(uv_handle_t *handle) {
    ffn_node *n = handle->data;
    if (--n->n_open_handles)
        return;
    void (*closed)(void *) = n->closed;
    void *user = n->closed_user;
    free_node(n);
    closed(user);
}

static void on_transport_closed(void *user) {
    ffn_node *n = user;
    uv_close((uv_handle_t *)&n->work, on_handle_closed);
    uv_close((uv_handle_t *)&n->due, on_handle_closed);
    uv_close((uv_handle_t *)&n->wake, on_handle_closed);
}

static void ffn_close(void *node, void (*done)(void *user), void *user) {
    ffn_node *n = node;
    n->closed = done;
    n->closed_user = user;
    uv_idle_stop(&n->work);
    uv_timer_stop(&n->due);
    transport_close(n->transport, on_transport_closed, n);
}

const node_type ffn_node_type = {WORKER_FFN, "ffn",       ffn_open, ffn_describe,
                                 ffn_join,   ffn_message, ffn_close};
