// isa_ref.c: the operations of cpu_isa in plain C: the reference of the other sets.
#include "kernels/cpu/cpu.h"

#include <math.h>

static void gemm_tile_bf16(const gemm_tile *t) {
    size_t columns = (size_t)t->vectors * CPU_VECTOR;
    for (int r = 0; r < t->rows; r++) {
        const uint16_t *row = t->a[r];
        float *y = t->y + r * CPU_PANEL;
        memset(y, 0, columns * sizeof *y);
        for (size_t j = 0; j < t->k; j++) {
            const uint16_t *w = (const uint16_t *)t->weights + j / 2 * 2 * t->width + j % 2;
            float value = bf16_to_f32(row[j]);
            for (size_t c = 0; c < columns; c++)
                y[c] += value * bf16_to_f32(w[2 * c]);
        }
    }
}

static void gemm_tile_f32(const gemm_tile *t) {
    size_t columns = (size_t)t->vectors * CPU_VECTOR;
    for (int r = 0; r < t->rows; r++) {
        const float *row = t->a[r];
        float *y = t->y + r * CPU_PANEL;
        memset(y, 0, columns * sizeof *y);
        for (size_t j = 0; j < t->k; j++) {
            const float *w = (const float *)t->weights + j * t->width;
            for (size_t c = 0; c < columns; c++)
                y[c] += row[j] * w[c];
        }
    }
}

static void swiglu(const float *y, size_t columns, float *out) {
    for (size_t c = 0; c < columns; c += 2 * CPU_VECTOR, out += CPU_VECTOR)
        for (size_t i = 0; i < CPU_VECTOR; i++) {
            float gate = y[c + i];
            out[i] = gate / (1.0f + expf(-gate)) * y[c + CPU_VECTOR + i];
        }
}

static void sigmoid(float *y, size_t columns) {
    for (size_t c = 0; c < columns; c++)
        y[c] = 1.0f / (1.0f + expf(-y[c]));
}

static float inverse_rms(const float *x, size_t n, float epsilon) {
    double sum = 0;
    for (size_t i = 0; i < n; i++)
        sum += (double)x[i] * (double)x[i];
    return 1.0f / sqrtf((float)(sum / (double)n) + epsilon);
}

static void norm_bf16(const float *x, const float *weight, size_t n, float epsilon, void *out) {
    float scale = inverse_rms(x, n, epsilon);
    for (size_t i = 0; i < n; i++)
        ((uint16_t *)out)[i] = f32_to_bf16(x[i] * scale * weight[i]);
}

static void norm_f32(const float *x, const float *weight, size_t n, float epsilon, void *out) {
    float scale = inverse_rms(x, n, epsilon);
    for (size_t i = 0; i < n; i++)
        ((float *)out)[i] = x[i] * scale * weight[i];
}

static void scores_bf16(const attention_block *b) {
    for (int r = 0; r < b->rows; r++)
        for (int token = 0; token < CPU_BLOCK; token++) {
            const uint16_t *q = b->q[r], *k = b->k_page[token / KERNEL_PAGE_TOKENS];
            float sum = 0;
            for (size_t d = 0; d < b->head_dim; d++)
                sum +=
                    bf16_to_f32(q[d]) *
                    bf16_to_f32(
                        k[(d / 2 * KERNEL_PAGE_TOKENS + (size_t)(token % KERNEL_PAGE_TOKENS)) * 2 +
                          d % 2]);
            b->scores[r * CPU_BLOCK + token] = sum;
        }
}

static void scores_f32(const attention_block *b) {
    for (int r = 0; r < b->rows; r++)
        for (int token = 0; token < CPU_BLOCK; token++) {
            const float *q = b->q[r], *k = b->k_page[token / KERNEL_PAGE_TOKENS];
            float sum = 0;
            for (size_t d = 0; d < b->head_dim; d++)
                sum += q[d] * k[d * KERNEL_PAGE_TOKENS + (size_t)(token % KERNEL_PAGE_TOKENS)];
            b->scores[r * CPU_BLOCK + token] = sum;
        }
}

static float softmax(const float *scores, int first, int end, float scale, softmax_state *state,
                     float *p) {
    float max = state->max, sum = 0;
    for (int i = first; i < end; i++)
        max = scores[i] * scale > max ? scores[i] * scale : max;
    for (int i = 0; i < CPU_BLOCK; i++)
        sum += p[i] = i >= first && i < end ? expf(scores[i] * scale - max) : 0.0f;
    float rescale = expf(state->max - max);
    *state = (softmax_state){max, state->sum * rescale + sum};
    return rescale;
}

static float softmax_bf16(const float *scores, int first, int end, float scale,
                          softmax_state *state, void *p) {
    float exact[CPU_BLOCK];
    float rescale = softmax(scores, first, end, scale, state, exact);
    for (int i = 0; i < CPU_BLOCK; i++)
        ((uint16_t *)p)[i] = f32_to_bf16(exact[i]);
    return rescale;
}

static float softmax_f32(const float *scores, int first, int end, float scale, softmax_state *state,
                         void *p) {
    return softmax(scores, first, end, scale, state, p);
}

static void values_bf16(const attention_block *b) {
    const uint16_t *p = b->p;
    for (int r = 0; r < b->rows; r++, p += CPU_BLOCK) {
        float *out = b->out + (size_t)r * b->value_stride;
        for (size_t d = 0; d < b->value_stride; d++)
            out[d] *= b->rescale[r];
        for (int token = 0; token < b->tokens; token++) {
            size_t at = (size_t)(token % KERNEL_PAGE_TOKENS);
            const uint16_t *v = (const uint16_t *)b->v_page[token / KERNEL_PAGE_TOKENS] +
                                at / 2 * 2 * b->value_stride + at % 2;
            for (size_t d = 0; d < b->value_stride; d++)
                out[d] += bf16_to_f32(p[token]) * bf16_to_f32(v[2 * d]);
        }
    }
}

static void values_f32(const attention_block *b) {
    const float *p = b->p;
    for (int r = 0; r < b->rows; r++, p += CPU_BLOCK) {
        float *out = b->out + (size_t)r * b->value_stride;
        for (size_t d = 0; d < b->value_stride; d++)
            out[d] *= b->rescale[r];
        for (int token = 0; token < b->tokens; token++) {
            const float *v = (const float *)b->v_page[token / KERNEL_PAGE_TOKENS] +
                             (size_t)(token % KERNEL_PAGE_TOKENS) * b->value_stride;
            for (size_t d = 0; d < b->value_stride; d++)
                out[d] += p[token] * v[d];
        }
    }
}

static void to_bf16(const float *in, uint16_t *out, size_t n) {
    for (size_t i = 0; i < n; i++)
        out[i] = f32_to_bf16(in[i]);
}

static void from_bf16(const uint16_t *in, float *out, size_t n) {
    for (size_t i = 0; i < n; i++)
        out[i] = bf16_to_f32(in[i]);
}

static void add_bf16(float *x, const uint16_t *in, size_t n) {
    for (size_t i = 0; i < n; i++)
        x[i] += bf16_to_f32(in[i]);
}

static void add_scaled(float *x, const float *in, float scale, size_t n) {
    for (size_t i = 0; i < n; i++)
        x[i] += scale * in[i];
}

static const tile_shape shapes[] = {{1, 500, 500}, {4, 1900, 1900}};

#define TABLE(suffix)                                                                              \
    {                                                                                              \
        .name = "ref", .n_shapes = sizeof shapes / sizeof *shapes, .shapes = shapes,               \
        .gemm_tile = gemm_tile_##suffix, .swiglu = swiglu, .sigmoid = sigmoid,                     \
        .norm = norm_##suffix, .scores = scores_##suffix, .softmax = softmax_##suffix,             \
        .values = values_##suffix, .to_bf16 = to_bf16, .from_bf16 = from_bf16,                     \
        .add_bf16 = add_bf16, .add_scaled = add_scaled,                                            \
    }

bool cpu_isa_ref(dtype compute, cpu_isa *out) {
    static const cpu_isa bf16 = TABLE(bf16), f32 = TABLE(f32);
    *out = compute == DTYPE_BF16 ? bf16 : f32;
    return true;
}
