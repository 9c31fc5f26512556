// operations.c: the public operations: arguments are checked here, once for every backend.
//
// Every row that an operation reads or writes is checked to lie inside the memory named: the cost
// is a pass over the index arrays, which are small beside the rows themselves.
#include "kernels/backend.h"

#include "engine/frame.h"

// Bytes of (a, b, c), or SIZE_MAX when that does not fit.
static size_t bytes_of(size_t a, size_t b, size_t c) {
    size_t bytes;
    if (__builtin_mul_overflow(a, b, &bytes) || __builtin_mul_overflow(bytes, c, &bytes))
        return SIZE_MAX;
    return bytes;
}

static bool holds(const kernel_queue *queue, kernel_ref ref, size_t bytes) {
    return ref.mem && ref.mem->backend == queue->backend && ref.offset <= ref.mem->bytes &&
           bytes <= ref.mem->bytes - ref.offset;
}

static bool holds_on_host(const kernel_queue *queue, kernel_ref ref, size_t bytes) {
    return holds(queue, ref, bytes) && ref.mem->host;
}

// Rows that an index list reaches: its maximum + 1; negative entries count as huge.
static size_t reach(const int32_t *index, size_t n) {
    uint32_t max = 0;
    for (size_t i = 0; i < n; i++)
        max = (uint32_t)index[i] > max ? (uint32_t)index[i] : max;
    return n ? (size_t)max + 1 : 0;
}

static size_t act_bytes(const kernel_queue *queue) {
    return dtype_bytes(queue->backend->compute);
}

static bool is_wire(dtype type) {
    return type == DTYPE_F32 || type == DTYPE_BF16;
}

int kernel_embed(kernel_queue *queue, const kernel_embed_args *args) {
    if (args->rows > queue->backend->max_rows)
        return E_TOO_LARGE;
    if (!args->table || args->table->backend != queue->backend || args->table->swiglu ||
        reach(args->ids, args->rows) > args->table->n ||
        !holds(queue, args->x, bytes_of(args->rows, args->table->k, sizeof(float))))
        return E_INVALID;
    return queue->backend->ops->embed(queue, args);
}

int kernel_norm(kernel_queue *queue, const kernel_norm_args *args) {
    if (args->rows > queue->backend->max_rows)
        return E_TOO_LARGE;
    size_t x_rows = args->select ? reach(args->select, args->rows) : args->rows;
    if (args->hidden < 1 || !holds(queue, args->x, bytes_of(x_rows, args->hidden, sizeof(float))) ||
        !holds(queue, args->weight, bytes_of(args->hidden, sizeof(float), 1)) ||
        !holds(queue, args->out, bytes_of(args->rows, args->hidden, act_bytes(queue))))
        return E_INVALID;
    return queue->backend->ops->norm(queue, args);
}

static size_t output_row_bytes(const kernel_queue *queue, kernel_epilogue epilogue, size_t n) {
    switch (epilogue) {
    case KERNEL_EPILOGUE_ACT:
        return bytes_of(n, act_bytes(queue), 1);
    case KERNEL_EPILOGUE_SWIGLU:
        return bytes_of(n / 2, act_bytes(queue), 1);
    case KERNEL_EPILOGUE_F32:
    case KERNEL_EPILOGUE_ADD:
    case KERNEL_EPILOGUE_SIGMOID:
        break;
    }
    return bytes_of(n, sizeof(float), 1);
}

// Checks the groups: *shape is a matrix of a group that has rows, or NULL when none has.
static int check_groups(const kernel_queue *queue, const kernel_gemm_args *args, size_t *slots,
                        const kernel_matrix **shape) {
    *slots = 0;
    *shape = NULL;
    if (args->n_groups > queue->backend->max_groups)
        return E_TOO_LARGE;
    for (size_t g = 0; g < args->n_groups; g++) {
        if (args->group_rows[g] < 0)
            return E_INVALID;
        if (!args->group_rows[g])
            continue;
        const kernel_matrix *matrix = args->matrices[g];
        if (!matrix || matrix->backend != queue->backend ||
            matrix->swiglu != (args->epilogue == KERNEL_EPILOGUE_SWIGLU))
            return E_INVALID;
        if (*shape && ((*shape)->n != matrix->n || (*shape)->k != matrix->k))
            return E_INVALID;
        *shape = matrix;
        *slots += (size_t)args->group_rows[g];
        if (*slots > queue->backend->max_rows)
            return E_TOO_LARGE;
    }
    return 0;
}

int kernel_gemm(kernel_queue *queue, const kernel_gemm_args *args) {
    size_t slots;
    const kernel_matrix *shape;
    if ((unsigned)args->epilogue > KERNEL_EPILOGUE_SIGMOID)
        return E_INVALID;
    int rc = check_groups(queue, args, &slots, &shape);
    if (rc)
        return rc;
    if (args->report)
        *args->report = (kernel_gemm_report){0};
    if (!slots)
        return 0;
    size_t a_rows = args->a_index ? reach(args->a_index, slots) : slots;
    size_t out_rows = args->out_index ? reach(args->out_index, slots) : slots;
    if (!holds(queue, args->a, bytes_of(a_rows, shape->k, act_bytes(queue))) ||
        !holds(queue, args->out,
               bytes_of(out_rows, output_row_bytes(queue, args->epilogue, shape->n), 1)))
        return E_INVALID;
    if (args->bias.mem && (args->n_groups != 1 || shape->swiglu ||
                           !holds(queue, args->bias, bytes_of(shape->n, sizeof(float), 1))))
        return E_INVALID;
    if (args->scale && args->epilogue != KERNEL_EPILOGUE_ADD)
        return E_INVALID;
    return queue->backend->ops->gemm(queue, args);
}

int kernel_rope(kernel_queue *queue, const kernel_rope_args *args) {
    if (args->rows > queue->backend->max_rows)
        return E_TOO_LARGE;
    if (args->head_dim < 2 || args->head_dim % 2 ||
        !holds(queue, args->out, bytes_of(args->rows, args->head_dim, sizeof(float))))
        return E_INVALID;
    return queue->backend->ops->rope(queue, args);
}

static bool is_kv_of(const kernel_queue *queue, const kernel_kv *kv, size_t layer, size_t n_heads,
                     size_t n_kv_heads, size_t head_dim) {
    return kv && kv->backend == queue->backend && layer < kv->shape.n_layers &&
           kv->shape.n_kv_heads == n_kv_heads && kv->shape.head_dim == head_dim && n_heads > 0 &&
           n_heads % n_kv_heads == 0;
}

int kernel_append(kernel_queue *queue, const kernel_append_args *args) {
    if (args->rows > queue->backend->max_rows)
        return E_TOO_LARGE;
    if (!is_kv_of(queue, args->kv, args->layer, args->n_heads, args->n_kv_heads, args->head_dim) ||
        reach(args->kv_slot, args->rows) > args->kv->shape.n_pages * KERNEL_PAGE_TOKENS)
        return E_INVALID;
    size_t heads = args->n_heads + 2 * args->n_kv_heads;
    if (!holds(queue, args->qkv, bytes_of(args->rows, heads * args->head_dim, sizeof(float))) ||
        !holds(queue, args->rope, bytes_of(args->rows, args->head_dim, sizeof(float))) ||
        !holds(queue, args->q,
               bytes_of(args->rows, args->n_heads * args->head_dim, act_bytes(queue))))
        return E_INVALID;
    if (args->qk_norm != KERNEL_QK_NORM_NONE) {
        bool full = args->qk_norm == KERNEL_QK_NORM_FULL;
        size_t head = bytes_of(args->head_dim, sizeof(float), 1);
        if (!holds(queue, args->q_norm, full ? args->n_heads * head : head) ||
            !holds(queue, args->k_norm, full ? args->n_kv_heads * head : head))
            return E_INVALID;
    }
    return queue->backend->ops->append(queue, args);
}

static bool is_sequence_of(const kernel_sequence *sequence, const kernel_kv *kv) {
    if (sequence->q_rows < 0 || sequence->q_row0 < 0 || sequence->kv_tokens < sequence->q_rows)
        return false;
    size_t pages = ((size_t)sequence->kv_tokens + KERNEL_PAGE_TOKENS - 1) / KERNEL_PAGE_TOKENS;
    return !sequence->q_rows || reach(sequence->pages, pages) <= kv->shape.n_pages;
}

int kernel_attention(kernel_queue *queue, const kernel_attention_args *args) {
    if (!is_kv_of(queue, args->kv, args->layer, args->n_heads, args->n_kv_heads, args->head_dim))
        return E_INVALID;
    size_t rows = 0, q_reach = 0;
    for (size_t s = 0; s < args->n_sequences; s++) {
        const kernel_sequence *sequence = &args->sequences[s];
        if (!is_sequence_of(sequence, args->kv))
            return E_INVALID;
        rows += (size_t)sequence->q_rows;
        if (rows > queue->backend->max_rows)
            return E_TOO_LARGE;
        size_t end = (size_t)sequence->q_row0 + (size_t)sequence->q_rows;
        q_reach = sequence->q_rows && end > q_reach ? end : q_reach;
    }
    size_t bytes = bytes_of(q_reach, args->n_heads * args->head_dim, act_bytes(queue));
    if (!holds(queue, args->q, bytes) || !holds(queue, args->out, bytes))
        return E_INVALID;
    return queue->backend->ops->attention(queue, args);
}

int kernel_route(kernel_queue *queue, const kernel_route_args *args) {
    if (args->rows > queue->backend->max_rows || args->top_k > KERNEL_MAX_TOP_K)
        return E_TOO_LARGE;
    if (args->top_k < 1 || args->n_experts < args->top_k || args->n_experts > FRAME_NO_EXPERT ||
        !holds(queue, args->logits, bytes_of(args->rows, args->n_experts, sizeof(float))) ||
        !holds_on_host(queue, args->experts, bytes_of(args->rows, args->top_k, sizeof(uint16_t))) ||
        !holds_on_host(queue, args->weights, bytes_of(args->rows, args->top_k, sizeof(float))))
        return E_INVALID;
    return queue->backend->ops->route(queue, args);
}

int kernel_dispatch(kernel_queue *queue, const kernel_dispatch_args *args) {
    if (args->rows > queue->backend->max_rows || args->top_k > KERNEL_MAX_TOP_K ||
        args->n_ranks > KERNEL_MAX_RANKS)
        return E_TOO_LARGE;
    frame_layout layout;
    if (args->top_k < 1 || args->n_ranks < 1 || args->hidden < 1 || !is_wire(args->wire) ||
        !holds(queue, args->h, bytes_of(args->rows, args->hidden, act_bytes(queue))) ||
        !holds_on_host(queue, args->experts, bytes_of(args->rows, args->top_k, sizeof(uint16_t))) ||
        !holds_on_host(queue, args->weights, bytes_of(args->rows, args->top_k, sizeof(float))))
        return E_INVALID;
    int rc = frame_layout_make(FRAME_DISPATCH, args->rows, args->top_k, args->hidden, args->wire,
                               &layout);
    if (rc)
        return rc;
    for (size_t r = 0; r < args->n_ranks; r++)
        if (!holds_on_host(queue, args->payload[r], layout.bytes))
            return E_INVALID;
    return queue->backend->ops->dispatch(queue, args);
}

int kernel_combine(kernel_queue *queue, const kernel_combine_args *args) {
    if (args->n_ranks > KERNEL_MAX_RANKS)
        return E_TOO_LARGE;
    if (args->hidden < 1 || !is_wire(args->wire))
        return E_INVALID;
    size_t x_rows = 0;
    for (size_t r = 0; r < args->n_ranks; r++) {
        size_t rows = (size_t)args->frame_rows[r];
        if (args->frame_rows[r] < 0 || rows > args->row_stride || (rows && !args->payload[r]))
            return E_INVALID;
        size_t end = reach(args->row_index + r * args->row_stride, rows);
        x_rows = end > x_rows ? end : x_rows;
    }
    if (!holds(queue, args->x, bytes_of(x_rows, args->hidden, sizeof(float))))
        return E_INVALID;
    return queue->backend->ops->combine(queue, args);
}

int kernel_convert(kernel_queue *queue, const kernel_convert_args *args) {
    if (!dtype_bytes(args->in_type) || !is_wire(args->out_type))
        return E_UNSUPPORTED;
    size_t in_bytes = bytes_of(args->rows, args->columns, dtype_bytes(args->in_type));
    size_t out_bytes = bytes_of(args->rows, args->columns, dtype_bytes(args->out_type));
    if (in_bytes == SIZE_MAX || out_bytes == SIZE_MAX ||
        (!args->host_in && !holds(queue, args->in, in_bytes)) ||
        (!args->host_out && !holds(queue, args->out, out_bytes)))
        return E_INVALID;
    return queue->backend->ops->convert(queue, args);
}

int kernel_sort(kernel_queue *queue, const kernel_sort_args *args) {
    size_t limit = queue->backend->max_rows;
    if (args->n_groups > queue->backend->max_groups || args->top_k > KERNEL_MAX_TOP_K ||
        args->rows > limit)
        return E_TOO_LARGE;
    return queue->backend->ops->sort(queue, args);
}

int kernel_zero(kernel_queue *queue, kernel_ref ref, size_t bytes) {
    return holds(queue, ref, bytes) ? queue->backend->ops->zero(queue, ref, bytes) : E_INVALID;
}
