// append.c: rotary angles, and what happens to q, k and v between their projection and attention.
#include "kernels/cpu/cpu.h"

#include <math.h>

// The reference models form the angle in f32 as well, so its rounding is theirs.
int cpu_rope(kernel_queue *queue, const kernel_rope_args *args) {
    (void)queue;
    size_t half = args->head_dim / 2;
    for (size_t r = 0; r < args->rows; r++) {
        float *out = (float *)cpu_address(args->out) + r * args->head_dim;
        for (size_t i = 0; i < half; i++) {
            float angle = (float)args->positions[r] * args->inverse_frequencies[i];
            out[i] = cosf(angle);
            out[half + i] = sinf(angle);
        }
    }
    return 0;
}

static float inverse_rms(const float *x, size_t n, float epsilon) {
    enum { LANES = 16 };
    float lanes[LANES] = {0}, sum = 0;
    size_t i = 0;
    for (; i + LANES <= n; i += LANES)
        for (size_t l = 0; l < LANES; l++)
            lanes[l] += x[i + l] * x[i + l];
    for (size_t l = 0; l < LANES; l++)
        sum += lanes[l];
    for (; i < n; i++)
        sum += x[i] * x[i];
    return 1.0f / sqrtf(sum / (float)n + epsilon);
}

static void clamp(float *x, size_t n, float clip) {
    for (size_t i = 0; i < n; i++)
        x[i] = x[i] < -clip ? -clip : x[i] > clip ? clip : x[i];
}

// One head of q or k, normed, clipped and rotated. weight: of this head, or NULL.
static void turn_head(const kernel_append_args *args, const float *in, const float *weight,
                      float scale, const float *rope, float *out) {
    size_t half = args->head_dim / 2;
    float x[KERNEL_MAX_HEAD_DIM];
    memcpy(x, in, args->head_dim * sizeof *x);
    if (weight)
        for (size_t i = 0; i < args->head_dim; i++)
            x[i] = x[i] * scale * weight[i];
    if (args->clip > 0)
        clamp(x, args->head_dim, args->clip);
    for (size_t i = 0; i < half; i++) {
        float c = rope[i], s = rope[half + i];
        out[i] = x[i] * c - x[half + i] * s;
        out[half + i] = x[half + i] * c + x[i] * s;
    }
}

typedef struct append_job {
    cpu_backend *cpu;
    const kernel_append_args *args;
} append_job;

// The factor of FULL norm, over all heads of q or of k.
static float full_scale(const kernel_append_args *args, const float *in, size_t heads) {
    if (args->qk_norm != KERNEL_QK_NORM_FULL)
        return 1.0f;
    return inverse_rms(in, heads * args->head_dim, args->epsilon);
}

static void prepare_head(const kernel_append_args *args, const float *in, kernel_ref norm,
                         size_t head, float scale, const float *rope, float *out) {
    const float *weight = NULL;
    in += head * args->head_dim;
    if (args->qk_norm != KERNEL_QK_NORM_NONE)
        weight = cpu_address(norm);
    if (args->qk_norm == KERNEL_QK_NORM_FULL)
        weight += head * args->head_dim;
    if (args->qk_norm == KERNEL_QK_NORM_HEAD)
        scale = inverse_rms(in, args->head_dim, args->epsilon);
    turn_head(args, in, weight, scale, rope, out);
}

static void store_kv(const append_job *job, size_t row, size_t head, const float *k,
                     const float *v) {
    const kernel_append_args *args = job->args;
    const cpu_kv *kv = (const cpu_kv *)args->kv;
    size_t slot = (size_t)args->kv_slot[row], token = slot % KERNEL_PAGE_TOKENS;
    uint8_t *page = cpu_page(kv, args->layer, slot / KERNEL_PAGE_TOKENS, head);
    if (job->cpu->base.compute == DTYPE_F32) {
        float *to_k = (float *)(void *)page + token;
        for (size_t d = 0; d < args->head_dim; d++)
            to_k[d * KERNEL_PAGE_TOKENS] = k[d];
        memcpy(page + kv->k_bytes + token * kv->value_stride * sizeof *v, v,
               args->head_dim * sizeof *v);
        return;
    }
    uint16_t *to_k = (uint16_t *)(void *)page + 2 * token;
    uint16_t *to_v = (uint16_t *)(void *)(page + kv->k_bytes);
    to_v += token / 2 * 2 * kv->value_stride + token % 2;
    for (size_t d = 0; d < args->head_dim; d++) {
        to_k[d / 2 * 2 * KERNEL_PAGE_TOKENS + d % 2] = f32_to_bf16(k[d]);
        to_v[2 * d] = f32_to_bf16(v[d]);
    }
}

static void append_row(const append_job *job, size_t row) {
    const kernel_append_args *args = job->args;
    size_t dim = args->head_dim, act = dtype_bytes(job->cpu->base.compute);
    const float *q =
        (const float *)cpu_address(args->qkv) + row * (args->n_heads + 2 * args->n_kv_heads) * dim;
    const float *k = q + args->n_heads * dim, *v = k + args->n_kv_heads * dim;
    const float *rope = (const float *)cpu_address(args->rope) + row * dim;
    uint8_t *q_out = (uint8_t *)cpu_address(args->q) + row * args->n_heads * dim * act;
    float out[KERNEL_MAX_HEAD_DIM], value[KERNEL_MAX_HEAD_DIM];
    float q_scale = full_scale(args, q, args->n_heads);
    float k_scale = full_scale(args, k, args->n_kv_heads);
    for (size_t h = 0; h < args->n_heads; h++) {
        prepare_head(args, q, args->q_norm, h, q_scale, rope, out);
        cpu_store_act(job->cpu, out, q_out + h * dim * act, dim);
    }
    for (size_t h = 0; h < args->n_kv_heads; h++) {
        prepare_head(args, k, args->k_norm, h, k_scale, rope, out);
        memcpy(value, v + h * dim, dim * sizeof *value);
        if (args->clip > 0)
            clamp(value, dim, args->clip);
        store_kv(job, row, h, out, value);
    }
}

static void append_part(void *user, int part, int n_parts) {
    const append_job *job = user;
    size_t begin, end;
    pool_range(job->args->rows, part, n_parts, &begin, &end);
    for (size_t r = begin; r < end; r++)
        append_row(job, r);
}

int cpu_append(kernel_queue *queue, const kernel_append_args *args) {
    append_job job = {cpu_of(queue), args};
    size_t heads = args->n_heads + 2 * args->n_kv_heads;
    cpu_run(job.cpu, args->rows * heads * args->head_dim * 8, append_part, &job);
    return 0;
}
