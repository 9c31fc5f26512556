#include "attn_node/lane.h"

#include <math.h>
#include <stdlib.h>

enum { LOGIT_ROWS = 32 }; // rows of one block of logits

typedef enum lane_state {
    LANE_IDLE,
    LANE_LAYER,
    LANE_GATE,
    LANE_AWAY,
    LANE_HEAD,
    LANE_SAMPLE
} lane_state;

// A DISPATCH payload. Two a rank, used in turn, because the transport may give one back only after
// the RETURN has arrived.
typedef struct payload {
    kernel_mem *mem;
    bool sending;
} payload;

// A row whose logits are needed: to sample the next token, or to score a token of the prompt.
typedef struct logit_row {
    int32_t row;
    uint32_t part;
    bool score;
} logit_row;

struct lane {
    lane_env env;
    int index;
    lane_state state;
    uint32_t step, pass;
    uint16_t members;
    size_t layer;
    kernel_queue *queue;
    kernel_mark mark;
    step_plan plan;

    kernel_mem *x;                 // (max_rows, hidden) f32: the residual stream
    kernel_mem *h;                 // (max_rows, hidden) act
    kernel_mem *qkv;               // (max_rows, (heads + 2 kv_heads) head_dim) f32
    kernel_mem *q, *attended;      // (max_rows, heads * head_dim) act
    kernel_mem *rope;              // (max_rows, head_dim) f32
    kernel_mem *gate;              // (max_rows, experts) f32
    kernel_mem *experts, *weights; // (max_rows, top_k) u16, f32
    kernel_mem *shared;            // (max_rows, shared_intermediate) act, or NULL
    kernel_mem *shared_gate;       // (max_rows) f32, or NULL
    kernel_mem *logits;            // (LOGIT_ROWS, vocab) f32

    payload payloads[2][CONFIG_MAX_WORKERS];
    kernel_mem *returns[CONFIG_MAX_WORKERS]; // (max_rows, hidden) wire
    bool returned[CONFIG_MAX_WORKERS];
    size_t n_returned;
    int32_t frame_rows[CONFIG_MAX_WORKERS];
    int32_t *row_index; // (n_ffn, max_rows)

    logit_row *logit_rows; // (max_rows)
    int32_t *select;       // (LOGIT_ROWS)
    size_t n_logit_rows, logit_at, n_block;
};

static kernel_ref whole(kernel_mem *mem) {
    return (kernel_ref){mem, 0};
}

// ---- open, close ----

static int alloc(lane *l, kernel_mem_kind kind, size_t rows, size_t columns, size_t element,
                 kernel_mem **out, error *err) {
    return kernel_mem_alloc(l->env.backend, kind, rows * columns * element, out, err);
}

static int open_activations(lane *l, error *err) {
    const plan *p = l->env.plan;
    const model_config *m = &p->model;
    size_t rows = p->max_rows, act = dtype_bytes(p->compute), f32 = sizeof(float);
    size_t q = m->n_heads * m->head_dim;
    size_t qkv = q + 2 * m->n_kv_heads * m->head_dim;
    const struct {
        kernel_mem **out;
        size_t columns, element;
        kernel_mem_kind kind;
    } list[] = {
        {&l->x, m->hidden, f32, KERNEL_MEM_DEVICE},
        {&l->h, m->hidden, act, KERNEL_MEM_DEVICE},
        {&l->qkv, qkv, f32, KERNEL_MEM_DEVICE},
        {&l->q, q, act, KERNEL_MEM_DEVICE},
        {&l->attended, q, act, KERNEL_MEM_DEVICE},
        {&l->rope, m->head_dim, f32, KERNEL_MEM_DEVICE},
        {&l->gate, m->n_experts, f32, KERNEL_MEM_DEVICE},
        {&l->experts, m->top_k, sizeof(uint16_t), KERNEL_MEM_HOST},
        {&l->weights, m->top_k, f32, KERNEL_MEM_HOST},
        {&l->shared, m->shared_intermediate, act, KERNEL_MEM_DEVICE},
        {&l->shared_gate, m->shared_intermediate ? 1 : 0, f32, KERNEL_MEM_HOST},
    };
    for (size_t i = 0; i < sizeof list / sizeof *list; i++) {
        if (!list[i].columns)
            continue;
        int code = alloc(l, list[i].kind, rows, list[i].columns, list[i].element, list[i].out, err);
        if (code)
            return code;
    }
    return alloc(l, KERNEL_MEM_HOST, LOGIT_ROWS, m->vocab, f32, &l->logits, err);
}

static int open_frames(lane *l, error *err) {
    const plan *p = l->env.plan;
    frame_layout dispatch, ret;
    int code = frame_layout_make(FRAME_DISPATCH, p->max_rows, p->model.top_k, p->model.hidden,
                                 p->wire, &dispatch);
    if (!code)
        code = frame_layout_make(FRAME_RETURN, p->max_rows, p->model.top_k, p->model.hidden,
                                 p->wire, &ret);
    if (code)
        return error_set(err, code, "frames of %zu rows are too large", p->max_rows);
    for (size_t rank = 0; rank < p->n_ffn && !code; rank++) {
        for (int half = 0; half < 2 && !code; half++)
            code = kernel_mem_alloc(l->env.backend, KERNEL_MEM_HOST, dispatch.bytes,
                                    &l->payloads[half][rank].mem, err);
        if (!code)
            code = kernel_mem_alloc(l->env.backend, KERNEL_MEM_HOST, ret.bytes, &l->returns[rank],
                                    err);
    }
    return code;
}

int lane_open(const lane_env *env, int index, const sched_args *sizes, lane **out, error *err) {
    lane *l = calloc(1, sizeof *l);
    if (!l)
        return error_set(err, E_NO_MEMORY, "lane: out of memory");
    l->env = *env;
    l->index = index;
    size_t rows = env->plan->max_rows;
    l->row_index = calloc(rows * env->plan->n_ffn, sizeof *l->row_index);
    l->logit_rows = calloc(rows, sizeof *l->logit_rows);
    l->select = calloc(LOGIT_ROWS, sizeof *l->select);
    int code = E_OK;
    if (!l->row_index || !l->logit_rows || !l->select)
        code = error_set(err, E_NO_MEMORY, "lane: out of memory");
    if (!code)
        code = step_plan_init(&l->plan, sizes, err);
    if (!code)
        code = kernel_queue_create(env->backend, env->wake, env->user, &l->queue, err);
    if (!code)
        code = open_activations(l, err);
    if (!code)
        code = open_frames(l, err);
    if (code) {
        lane_close(l);
        return code;
    }
    *out = l;
    return E_OK;
}

void lane_close(lane *l) {
    if (!l)
        return;
    kernel_mem *const list[] = {l->x,        l->h,      l->qkv,         l->q,
                                l->attended, l->rope,   l->gate,        l->experts,
                                l->weights,  l->shared, l->shared_gate, l->logits};
    for (size_t i = 0; i < sizeof list / sizeof *list; i++)
        kernel_mem_free(list[i]);
    for (size_t rank = 0; rank < CONFIG_MAX_WORKERS; rank++) {
        kernel_mem_free(l->payloads[0][rank].mem);
        kernel_mem_free(l->payloads[1][rank].mem);
        kernel_mem_free(l->returns[rank]);
    }
    kernel_queue_free(l->queue);
    step_plan_free(&l->plan);
    free(l->row_index);
    free(l->logit_rows);
    free(l->select);
    free(l);
}

// ---- a step begins ----

// A row has logits when it is the last known token of its sequence, or when the prompt's next token
// is to be scored and has not been (before a preemption).
static void list_logit_rows(lane *l) {
    l->n_logit_rows = l->logit_at = 0;
    for (size_t i = 0; i < l->plan.n_parts; i++) {
        const step_part *part = &l->plan.parts[i];
        const sequence *seq = part->seq;
        for (size_t r = 0; r < part->n_rows; r++) {
            size_t next = part->first_token + r + 1;
            bool score =
                seq->params.prompt_logprobs && next < seq->n_prompt && next > seq->n_scored;
            bool sample = next == seq->n_tokens && seq->params.max_tokens > 0;
            if (score || sample)
                l->logit_rows[l->n_logit_rows++] =
                    (logit_row){(int32_t)(part->row0 + r), (uint32_t)i, score};
        }
    }
}

static int begin_step(lane *l) {
    const plan *p = l->env.plan;
    sched_plan(l->env.sched, l->index, &l->plan);
    if (!l->plan.n_rows)
        return 0;
    list_logit_rows(l);
    int code = kernel_embed(l->queue, &(kernel_embed_args){.rows = l->plan.n_rows,
                                                           .ids = l->plan.ids,
                                                           .table = l->env.model->embed,
                                                           .x = whole(l->x)});
    if (!code)
        code = kernel_rope(l->queue,
                           &(kernel_rope_args){.rows = l->plan.n_rows,
                                               .head_dim = p->model.head_dim,
                                               .positions = l->plan.positions,
                                               .inverse_frequencies = p->model.inverse_frequencies,
                                               .out = whole(l->rope)});
    l->step++;
    l->pass = 0;
    l->members = 0;
    l->layer = 0;
    l->state = LANE_LAYER;
    return code ? code : 1;
}

// ---- a layer ----

static int dense(lane *l, const kernel_matrix *w, kernel_mem *a, kernel_mem *bias,
                 kernel_epilogue epilogue, kernel_mem *out, size_t rows) {
    int32_t n = (int32_t)rows;
    return kernel_gemm(l->queue, &(kernel_gemm_args){.n_groups = 1,
                                                     .group_rows = &n,
                                                     .matrices = &w,
                                                     .a = whole(a),
                                                     .bias = whole(bias),
                                                     .epilogue = epilogue,
                                                     .out = whole(out)});
}

static int norm(lane *l, kernel_mem *weight, const int32_t *select, size_t rows) {
    const model_config *m = &l->env.plan->model;
    return kernel_norm(l->queue, &(kernel_norm_args){.rows = rows,
                                                     .hidden = m->hidden,
                                                     .select = select,
                                                     .x = whole(l->x),
                                                     .weight = whole(weight),
                                                     .epsilon = m->rms_epsilon,
                                                     .out = whole(l->h)});
}

static int queue_attention(lane *l, const attn_layer *layer) {
    const model_config *m = &l->env.plan->model;
    size_t rows = l->plan.n_rows;
    int code = norm(l, layer->attn_norm, NULL, rows);
    if (!code)
        code = dense(l, layer->qkv, l->h, layer->qkv_bias, KERNEL_EPILOGUE_F32, l->qkv, rows);
    if (!code)
        code = kernel_append(l->queue, &(kernel_append_args){
                                           .rows = rows,
                                           .n_heads = m->n_heads,
                                           .n_kv_heads = m->n_kv_heads,
                                           .head_dim = m->head_dim,
                                           .qkv = whole(l->qkv),
                                           .rope = whole(l->rope),
                                           .qk_norm = (kernel_qk_norm)m->qk_norm,
                                           .q_norm = whole(layer->q_norm),
                                           .k_norm = whole(layer->k_norm),
                                           .epsilon = m->rms_epsilon,
                                           .clip = m->clip_qkv,
                                           .kv = l->env.kv,
                                           .layer = l->layer,
                                           .kv_slot = l->plan.kv_slot,
                                           .q = whole(l->q),
                                       });
    if (!code)
        code = kernel_attention(l->queue, &(kernel_attention_args){
                                              .n_sequences = l->plan.n_parts,
                                              .sequences = l->plan.sequences,
                                              .n_heads = m->n_heads,
                                              .n_kv_heads = m->n_kv_heads,
                                              .head_dim = m->head_dim,
                                              .scale = 1.0f / sqrtf((float)m->head_dim),
                                              .window = m->sliding_window,
                                              .kv = l->env.kv,
                                              .layer = l->layer,
                                              .q = whole(l->q),
                                              .out = whole(l->attended),
                                          });
    if (!code)
        code = dense(l, layer->o, l->attended, NULL, KERNEL_EPILOGUE_ADD, l->x, rows);
    return code;
}

static int queue_gate(lane *l, const attn_layer *layer) {
    const plan *p = l->env.plan;
    size_t rows = l->plan.n_rows;
    int code = norm(l, layer->ffn_norm, NULL, rows);
    if (!code)
        code = dense(l, layer->router, l->h, NULL, KERNEL_EPILOGUE_F32, l->gate, rows);
    if (!code)
        code = kernel_route(l->queue, &(kernel_route_args){.rows = rows,
                                                           .n_experts = p->model.n_experts,
                                                           .top_k = p->model.top_k,
                                                           .norm_top_k = p->model.norm_top_k,
                                                           .logits = whole(l->gate),
                                                           .experts = whole(l->experts),
                                                           .weights = whole(l->weights)});
    kernel_dispatch_args dispatch = {.rows = rows,
                                     .hidden = p->model.hidden,
                                     .top_k = p->model.top_k,
                                     .n_ranks = p->n_ffn,
                                     .h = whole(l->h),
                                     .experts = whole(l->experts),
                                     .weights = whole(l->weights),
                                     .expert_rank = p->expert_rank,
                                     .wire = p->wire,
                                     .frame_rows = l->frame_rows,
                                     .row_index = l->row_index};
    for (size_t rank = 0; rank < p->n_ffn; rank++)
        dispatch.payload[rank] = whole(l->payloads[l->layer & 1][rank].mem);
    return code ? code : kernel_dispatch(l->queue, &dispatch);
}

static int begin_layer(lane *l) {
    for (size_t rank = 0; rank < l->env.plan->n_ffn; rank++)
        if (l->payloads[l->layer & 1][rank].sending)
            return 0;
    const attn_layer *layer = &l->env.model->layers[l->layer];
    int code = queue_attention(l, layer);
    if (!code)
        code = queue_gate(l, layer);
    if (!code)
        code = kernel_queue_mark(l->queue, &l->mark);
    l->state = LANE_GATE;
    return code ? code : 1;
}

// Whether the lane expects a further step with some of these sequences: a hint for the gather.
static bool goes_on(const lane *l) {
    for (size_t i = 0; i < l->plan.n_parts; i++) {
        const sequence *seq = l->plan.parts[i].seq;
        if (seq->n_tokens + 1 < seq->n_prompt + (size_t)seq->params.max_tokens)
            return true;
    }
    return false;
}

static int send_frames(lane *l) {
    const plan *p = l->env.plan;
    frame_header header = {
        .magic = FRAME_MAGIC,
        .version = FRAME_VERSION,
        .kind = FRAME_DISPATCH,
        .plan_hash = p->hash,
        .epoch = l->env.epoch,
        .step = l->step,
        .pass = l->pass,
        .members = l->members,
        .attention = l->env.rank,
        .lane = (uint16_t)l->index,
        .layer = (uint16_t)l->layer,
        .top_k = (uint16_t)p->model.top_k,
        .hidden = (uint32_t)p->model.hidden,
        .placement = p->placement,
        .dtype = (uint8_t)p->wire,
        .flags = goes_on(l) ? FRAME_FLAG_MORE : 0,
    };
    l->n_returned = 0;
    l->state = LANE_AWAY;
    for (size_t rank = 0; rank < p->n_ffn; rank++) {
        payload *buffer = &l->payloads[l->layer & 1][rank];
        frame_layout layout;
        header.ffn = (uint16_t)rank;
        header.rows = (uint32_t)l->frame_rows[rank];
        int code = frame_layout_make(FRAME_DISPATCH, header.rows, p->model.top_k, p->model.hidden,
                                     p->wire, &layout);
        l->returned[rank] = false;
        buffer->sending = true;
        if (!code)
            code = l->env.send(l->env.user, rank, &header, kernel_mem_host(buffer->mem),
                               layout.bytes, buffer);
        if (code)
            return code;
    }
    return E_OK;
}

// x += sigmoid(gate) * shared expert, while the routed experts are away.
static int queue_shared(lane *l, const attn_layer *layer) {
    size_t rows = l->plan.n_rows;
    int32_t n = (int32_t)rows;
    if (!layer->shared_gate_up)
        return E_OK;
    int code =
        dense(l, layer->shared_router, l->h, NULL, KERNEL_EPILOGUE_SIGMOID, l->shared_gate, rows);
    if (!code)
        code = dense(l, layer->shared_gate_up, l->h, NULL, KERNEL_EPILOGUE_SWIGLU, l->shared, rows);
    if (!code)
        code = kernel_gemm(
            l->queue,
            &(kernel_gemm_args){.n_groups = 1,
                                .group_rows = &n,
                                .matrices = (const kernel_matrix *const *)&layer->shared_down,
                                .a = whole(l->shared),
                                .scale = kernel_mem_host(l->shared_gate),
                                .epilogue = KERNEL_EPILOGUE_ADD,
                                .out = whole(l->x)});
    return code;
}

static int dispatch_layer(lane *l) {
    if (!kernel_mark_done(l->queue, l->mark))
        return 0;
    int code = send_frames(l);
    if (!code)
        code = queue_shared(l, &l->env.model->layers[l->layer]);
    if (!code)
        code = kernel_queue_mark(l->queue, &l->mark);
    return code ? code : 1;
}

static int combine_layer(lane *l) {
    const plan *p = l->env.plan;
    if (l->n_returned < p->n_ffn || !kernel_mark_done(l->queue, l->mark))
        return 0;
    kernel_combine_args args = {.hidden = p->model.hidden,
                                .n_ranks = p->n_ffn,
                                .wire = p->wire,
                                .frame_rows = l->frame_rows,
                                .row_index = l->row_index,
                                .row_stride = l->plan.n_rows,
                                .x = whole(l->x)};
    for (size_t rank = 0; rank < p->n_ffn; rank++)
        args.payload[rank] = kernel_mem_host(l->returns[rank]);
    int code = kernel_combine(l->queue, &args);
    l->layer++;
    l->state = l->layer == p->model.n_layers ? LANE_HEAD : LANE_LAYER;
    return code ? code : 1;
}

// ---- logits and tokens ----

static bool stops(const sequence *seq, int32_t id) {
    for (int32_t i = 0; i < seq->params.n_stop_ids; i++)
        if (seq->params.stop_ids[i] == id)
            return true;
    return false;
}

static void emit_sampled(lane *l, step_part *part, const float *logits) {
    sequence *seq = part->seq;
    size_t n_generated = seq->n_tokens - seq->n_prompt;
    token_event event = {.request = seq->request, .position = (int32_t)seq->n_tokens};
    sampler_sample(l->env.sampler,
                   &(sampler_args){.params = &seq->params,
                                   .logits = logits,
                                   .tokens = seq->tokens,
                                   .n_tokens = seq->n_tokens,
                                   .n_prompt = seq->n_prompt,
                                   .n_generated = n_generated},
                   &event);
    sched_append(seq, event.id);
    if (stops(seq, event.id))
        event.finish = FINISH_STOP;
    else if (n_generated + 1 == (size_t)seq->params.max_tokens)
        event.finish = FINISH_LENGTH;
    part->ended = event.finish != FINISH_NONE;
    l->env.emit(l->env.user, &event);
}

static void emit_prompt(lane *l, step_part *part, const float *logits, size_t token) {
    sequence *seq = part->seq;
    token_event event = {.request = seq->request,
                         .id = seq->tokens[token],
                         .position = (int32_t)token,
                         .is_prompt = true,
                         .n_top = -1};
    if (logits)
        sampler_score(l->env.sampler, logits, event.id, seq->params.logprobs, &event);
    if (seq->params.max_tokens == 0 && token + 1 == seq->n_prompt) {
        event.finish = FINISH_LENGTH;
        part->ended = true;
    }
    seq->n_scored = token;
    l->env.emit(l->env.user, &event);
}

static int queue_logits(lane *l) {
    size_t n = l->n_logit_rows - l->logit_at;
    l->n_block = n < LOGIT_ROWS ? n : LOGIT_ROWS;
    for (size_t i = 0; i < l->n_block; i++)
        l->select[i] = l->logit_rows[l->logit_at + i].row;
    int code = norm(l, l->env.model->final_norm, l->select, l->n_block);
    if (!code)
        code = dense(l, l->env.model->head, l->h, NULL, KERNEL_EPILOGUE_F32, l->logits, l->n_block);
    if (!code)
        code = kernel_queue_mark(l->queue, &l->mark);
    l->state = LANE_SAMPLE;
    return code ? code : 1;
}

// The first token of a prompt has no logits before it.
static void emit_first_prompt_tokens(lane *l) {
    for (size_t i = 0; i < l->plan.n_parts; i++) {
        step_part *part = &l->plan.parts[i];
        if (part->first_token == 0 && part->seq->params.prompt_logprobs &&
            part->seq->n_tokens == part->seq->n_prompt && part->seq->n_scored == 0)
            emit_prompt(l, part, NULL, 0);
    }
}

static int head_block(lane *l) {
    if (l->logit_at == 0)
        emit_first_prompt_tokens(l);
    if (l->logit_at < l->n_logit_rows)
        return queue_logits(l);
    sched_step_done(l->env.sched, &l->plan);
    l->state = LANE_IDLE;
    l->env.step_done(l->env.user);
    return 1;
}

static int sample_block(lane *l) {
    if (!kernel_mark_done(l->queue, l->mark))
        return 0;
    const float *logits = kernel_mem_host(l->logits);
    for (size_t i = 0; i < l->n_block; i++, logits += l->env.plan->model.vocab) {
        const logit_row *row = &l->logit_rows[l->logit_at + i];
        step_part *part = &l->plan.parts[row->part];
        if (part->seq->cancelled)
            continue;
        if (row->score)
            emit_prompt(l, part, logits, part->first_token + (size_t)row->row - part->row0 + 1);
        else
            emit_sampled(l, part, logits);
    }
    l->logit_at += l->n_block;
    l->state = LANE_HEAD;
    return 1;
}

int lane_advance(lane *l) {
    switch (l->state) {
    case LANE_IDLE:
        return begin_step(l);
    case LANE_LAYER:
        return begin_layer(l);
    case LANE_GATE:
        return dispatch_layer(l);
    case LANE_AWAY:
        return combine_layer(l);
    case LANE_HEAD:
        return head_block(l);
    case LANE_SAMPLE:
        return sample_block(l);
    }
    return E_STATE;
}

// ---- frames ----

static bool awaits(const lane *l, const frame_header *header) {
    return l->state == LANE_AWAY && header->step == l->step && header->layer == l->layer &&
           header->ffn < l->env.plan->n_ffn && !l->returned[header->ffn] &&
           header->rows == (uint32_t)l->frame_rows[header->ffn];
}

void *lane_place(lane *l, const frame_header *header, size_t bytes) {
    (void)bytes; // frame_check has held it against the header's rows
    return awaits(l, header) ? kernel_mem_host(l->returns[header->ffn]) : NULL;
}

void lane_arrived(lane *l, const frame_header *header) {
    if (!awaits(l, header))
        return;
    l->returned[header->ffn] = true;
    l->n_returned++;
    if (header->ffn == 0) {
        l->pass = header->pass;
        l->members = header->members;
    }
}

void lane_sent(void *token) {
    ((payload *)token)->sending = false;
}
