// isa_avx512.c: AVX-512 forms; bf16 products use VDPBF16PS, which rounds to nearest even, takes
// denormals as zero, and adds the pair of products into each f32 lane.
//
// A lane of an accumulator is one output element; the instructions that reach it are the same for
// every number of rows, so the result of a row does not depend on the tile.
#include "kernels/cpu/cpu.h"

#include <immintrin.h>

#define INLINE static inline __attribute__((always_inline))

enum { MAX_ROWS = 6, MAX_VECTORS = CPU_PANEL / CPU_VECTOR };

// Two bf16 in every lane.
INLINE __m512i broadcast_pair(const uint16_t *at) {
    uint32_t pair;
    memcpy(&pair, at, sizeof pair);
    return _mm512_set1_epi32((int)pair);
}

INLINE __m512 dot(__m512 sum, __m512i a, __m512i b) {
    return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b);
}

// ---- Matrix tiles: rows x vectors accumulators live in registers over all of k. ----

// The weights of a few steps later: the hardware's prefetchers alone do not reach the bandwidth.
INLINE void fetch_ahead(const void *w, int vectors) {
    for (int v = 0; v < vectors; v++)
        _mm_prefetch((const char *)w + CPU_FETCH_AHEAD + v * 64, _MM_HINT_T0);
}

INLINE void step_bf16(__m512 sum[MAX_ROWS][MAX_VECTORS], const __m512i x[MAX_ROWS], int rows,
                      const uint32_t *w, int vectors) {
    __m512i b[MAX_VECTORS];
    for (int v = 0; v < vectors; v++)
        b[v] = _mm512_loadu_si512(w + v * CPU_VECTOR);
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vectors; v++)
            sum[r][v] = dot(sum[r][v], x[r], b[v]);
}

INLINE void tile_bf16(const void *const *a, const int rows, const uint32_t *w, size_t k,
                      size_t width, const int vectors, float *y) {
    __m512 sum[MAX_ROWS][MAX_VECTORS];
    __m512i x[MAX_ROWS];
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vectors; v++)
            sum[r][v] = _mm512_setzero_ps();
    size_t pairs = k / 2;
    for (size_t j = 0; j < pairs; j++, w += width) {
        fetch_ahead(w, vectors);
        for (int r = 0; r < rows; r++)
            x[r] = broadcast_pair((const uint16_t *)a[r] + 2 * j);
        step_bf16(sum, x, rows, w, vectors);
    }
    if (k % 2) {
        for (int r = 0; r < rows; r++)
            x[r] = _mm512_set1_epi32(((const uint16_t *)a[r])[k - 1]);
        step_bf16(sum, x, rows, w, vectors);
    }
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vectors; v++)
            _mm512_storeu_ps(y + r * CPU_PANEL + v * CPU_VECTOR, sum[r][v]);
}

INLINE void tile_f32(const void *const *a, const int rows, const float *w, size_t k, size_t width,
                     const int vectors, float *y) {
    __m512 sum[MAX_ROWS][MAX_VECTORS], b[MAX_VECTORS];
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vectors; v++)
            sum[r][v] = _mm512_setzero_ps();
    for (size_t j = 0; j < k; j++, w += width) {
        fetch_ahead(w, vectors);
        for (int v = 0; v < vectors; v++)
            b[v] = _mm512_loadu_ps(w + v * CPU_VECTOR);
        for (int r = 0; r < rows; r++) {
            __m512 x = _mm512_set1_ps(((const float *)a[r])[j]);
            for (int v = 0; v < vectors; v++)
                sum[r][v] = _mm512_fmadd_ps(x, b[v], sum[r][v]);
        }
    }
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vectors; v++)
            _mm512_storeu_ps(y + r * CPU_PANEL + v * CPU_VECTOR, sum[r][v]);
}

#define TILE(tile, type, r, v)                                                                     \
    case ((r)-1) * MAX_VECTORS + (v)-1:                                                            \
        tile(t->a, r, (const type *)t->weights, t->k, t->width, v, t->y);                          \
        break;
#define TILE_ROWS(tile, type, r)                                                                   \
    TILE(tile, type, r, 1)                                                                         \
    TILE(tile, type, r, 2)                                                                         \
    TILE(tile, type, r, 3)                                                                         \
    TILE(tile, type, r, 4)
#define TILES(tile, type)                                                                          \
    TILE_ROWS(tile, type, 1)                                                                       \
    TILE_ROWS(tile, type, 2)                                                                       \
    TILE_ROWS(tile, type, 3)                                                                       \
    TILE_ROWS(tile, type, 4)                                                                       \
    TILE_ROWS(tile, type, 5)                                                                       \
    TILE_ROWS(tile, type, 6)

static void gemm_tile_bf16(const gemm_tile *t) {
    switch ((t->rows - 1) * MAX_VECTORS + t->vectors - 1) { TILES(tile_bf16, uint32_t) }
}

static void gemm_tile_f32(const gemm_tile *t) {
    switch ((t->rows - 1) * MAX_VECTORS + t->vectors - 1) { TILES(tile_f32, float) }
}

// ---- Elementwise ----

// exp within 2 units in the last place: 2^n times a polynomial of degree 6 on [-ln 2 / 2, ln 2 / 2]
// (its coefficients are those of the Cephes library). Below -104 the result is 0, NaN stays NaN.
INLINE __m512 exp_ps(__m512 x) {
    __mmask16 keep = _mm512_cmp_ps_mask(x, _mm512_set1_ps(-104.0f), _CMP_NLT_UQ);
    x = _mm512_min_ps(_mm512_set1_ps(89.0f), x);
    __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504088896341f)),
                                    _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
    r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
    __m512 p = _mm512_set1_ps(1.9875691500e-4f);
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.3981999507e-3f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(8.3334519073e-3f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(4.1665795894e-2f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.6666665459e-1f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.0000001201e-1f));
    p = _mm512_fmadd_ps(p, _mm512_mul_ps(r, r), r);
    return _mm512_maskz_scalef_ps(keep, _mm512_add_ps(p, _mm512_set1_ps(1.0f)), n);
}

INLINE __m512 negative(__m512 x) {
    return _mm512_sub_ps(_mm512_setzero_ps(), x);
}

INLINE __mmask16 tail_mask(size_t n) {
    return (__mmask16)((1u << n) - 1);
}

static void swiglu(const float *y, size_t columns, float *out) {
    __m512 one = _mm512_set1_ps(1.0f);
    for (size_t c = 0; c < columns; c += 2 * CPU_VECTOR, out += CPU_VECTOR) {
        __m512 gate = _mm512_loadu_ps(y + c), up = _mm512_loadu_ps(y + c + CPU_VECTOR);
        __m512 silu = _mm512_div_ps(gate, _mm512_add_ps(one, exp_ps(negative(gate))));
        _mm512_storeu_ps(out, _mm512_mul_ps(silu, up));
    }
}

static void sigmoid(float *y, size_t columns) {
    __m512 one = _mm512_set1_ps(1.0f);
    for (size_t c = 0; c < columns; c += CPU_VECTOR) {
        __m512 e = exp_ps(negative(_mm512_loadu_ps(y + c)));
        _mm512_storeu_ps(y + c, _mm512_div_ps(one, _mm512_add_ps(one, e)));
    }
}

INLINE __m256i to_bf16_vector(__m512 x) {
    return (__m256i)_mm512_cvtneps_pbh(x);
}

INLINE __m512 from_bf16_vector(__m256i x) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16));
}

static void to_bf16(const float *in, uint16_t *out, size_t n) {
    size_t i = 0;
    for (; i + CPU_VECTOR <= n; i += CPU_VECTOR)
        _mm256_storeu_si256((__m256i *)(out + i), to_bf16_vector(_mm512_loadu_ps(in + i)));
    __mmask16 tail = tail_mask(n - i);
    _mm256_mask_storeu_epi16(out + i, tail, to_bf16_vector(_mm512_maskz_loadu_ps(tail, in + i)));
}

static void from_bf16(const uint16_t *in, float *out, size_t n) {
    size_t i = 0;
    for (; i + CPU_VECTOR <= n; i += CPU_VECTOR)
        _mm512_storeu_ps(out + i, from_bf16_vector(_mm256_loadu_si256((const __m256i *)(in + i))));
    __mmask16 tail = tail_mask(n - i);
    _mm512_mask_storeu_ps(out + i, tail, from_bf16_vector(_mm256_maskz_loadu_epi16(tail, in + i)));
}

static void add_bf16(float *x, const uint16_t *in, size_t n) {
    size_t i = 0;
    for (; i + CPU_VECTOR <= n; i += CPU_VECTOR) {
        __m512 y = from_bf16_vector(_mm256_loadu_si256((const __m256i *)(in + i)));
        _mm512_storeu_ps(x + i, _mm512_add_ps(_mm512_loadu_ps(x + i), y));
    }
    __mmask16 tail = tail_mask(n - i);
    __m512 y = from_bf16_vector(_mm256_maskz_loadu_epi16(tail, in + i));
    _mm512_mask_storeu_ps(x + i, tail, _mm512_add_ps(_mm512_maskz_loadu_ps(tail, x + i), y));
}

static void add_scaled(float *x, const float *in, float scale, size_t n) {
    size_t i = 0;
    for (; i + CPU_VECTOR <= n; i += CPU_VECTOR) {
        __m512 y = _mm512_mul_ps(_mm512_set1_ps(scale), _mm512_loadu_ps(in + i));
        _mm512_storeu_ps(x + i, _mm512_add_ps(_mm512_loadu_ps(x + i), y));
    }
    __mmask16 tail = tail_mask(n - i);
    __m512 y = _mm512_mul_ps(_mm512_set1_ps(scale), _mm512_maskz_loadu_ps(tail, in + i));
    _mm512_mask_storeu_ps(x + i, tail, _mm512_add_ps(_mm512_maskz_loadu_ps(tail, x + i), y));
}

INLINE __m512 rms_scale(const float *x, size_t n, float epsilon) {
    __m512 sums[4] = {_mm512_setzero_ps(), _mm512_setzero_ps(), _mm512_setzero_ps(),
                      _mm512_setzero_ps()};
    size_t i = 0;
    for (; i + 4 * CPU_VECTOR <= n; i += 4 * CPU_VECTOR)
        for (size_t v = 0; v < 4; v++) {
            __m512 value = _mm512_loadu_ps(x + i + v * CPU_VECTOR);
            sums[v] = _mm512_fmadd_ps(value, value, sums[v]);
        }
    for (; i < n; i += CPU_VECTOR) {
        __mmask16 mask = n - i < CPU_VECTOR ? tail_mask(n - i) : 0xffff;
        __m512 value = _mm512_maskz_loadu_ps(mask, x + i);
        sums[0] = _mm512_fmadd_ps(value, value, sums[0]);
    }
    float sum = _mm512_reduce_add_ps(
        _mm512_add_ps(_mm512_add_ps(sums[0], sums[1]), _mm512_add_ps(sums[2], sums[3])));
    __m512 mean = _mm512_set1_ps(sum / (float)n + epsilon);
    return _mm512_div_ps(_mm512_set1_ps(1.0f), _mm512_sqrt_ps(mean));
}

INLINE __m512 normed(const float *x, const float *weight, size_t i, __mmask16 mask, __m512 scale) {
    __m512 value = _mm512_mul_ps(_mm512_maskz_loadu_ps(mask, x + i), scale);
    return _mm512_mul_ps(value, _mm512_maskz_loadu_ps(mask, weight + i));
}

static void norm_bf16(const float *x, const float *weight, size_t n, float epsilon, void *out) {
    __m512 scale = rms_scale(x, n, epsilon);
    for (size_t i = 0; i < n; i += CPU_VECTOR) {
        __mmask16 mask = n - i < CPU_VECTOR ? tail_mask(n - i) : 0xffff;
        _mm256_mask_storeu_epi16((uint16_t *)out + i, mask,
                                 to_bf16_vector(normed(x, weight, i, mask, scale)));
    }
}

static void norm_f32(const float *x, const float *weight, size_t n, float epsilon, void *out) {
    __m512 scale = rms_scale(x, n, epsilon);
    for (size_t i = 0; i < n; i += CPU_VECTOR) {
        __mmask16 mask = n - i < CPU_VECTOR ? tail_mask(n - i) : 0xffff;
        _mm512_mask_storeu_ps((float *)out + i, mask, normed(x, weight, i, mask, scale));
    }
}

// ---- Attention: V is fetched while K is multiplied, and the next K while V is. ----

INLINE void fetch(const void *page, size_t bytes) {
    _mm_prefetch((const char *)page + bytes, _MM_HINT_T0);
}

INLINE void scores_rows_bf16(const attention_block *b, int first, const int rows) {
    __m512 sum[MAX_ROWS][CPU_BLOCK_PAGES];
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < CPU_BLOCK_PAGES; v++)
            sum[r][v] = _mm512_setzero_ps();
    for (size_t d = 0; d < b->head_dim; d += 2) {
        __m512i k[CPU_BLOCK_PAGES];
        for (int v = 0; v < CPU_BLOCK_PAGES; v++) {
            k[v] = _mm512_loadu_si512((const uint16_t *)b->k_page[v] + d * KERNEL_PAGE_TOKENS);
            fetch(b->v_page[v], d * KERNEL_PAGE_TOKENS * sizeof(uint16_t));
        }
        for (int r = 0; r < rows; r++) {
            __m512i q = broadcast_pair((const uint16_t *)b->q[first + r] + d);
            for (int v = 0; v < CPU_BLOCK_PAGES; v++)
                sum[r][v] = dot(sum[r][v], q, k[v]);
        }
    }
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < CPU_BLOCK_PAGES; v++)
            _mm512_storeu_ps(b->scores + (first + r) * CPU_BLOCK + v * CPU_VECTOR, sum[r][v]);
}

INLINE void scores_rows_f32(const attention_block *b, int first, const int rows) {
    __m512 sum[MAX_ROWS][CPU_BLOCK_PAGES];
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < CPU_BLOCK_PAGES; v++)
            sum[r][v] = _mm512_setzero_ps();
    for (size_t d = 0; d < b->head_dim; d++) {
        __m512 k[CPU_BLOCK_PAGES];
        for (int v = 0; v < CPU_BLOCK_PAGES; v++) {
            k[v] = _mm512_loadu_ps((const float *)b->k_page[v] + d * KERNEL_PAGE_TOKENS);
            fetch(b->v_page[v], d * KERNEL_PAGE_TOKENS * sizeof(float));
        }
        for (int r = 0; r < rows; r++) {
            __m512 q = _mm512_set1_ps(((const float *)b->q[first + r])[d]);
            for (int v = 0; v < CPU_BLOCK_PAGES; v++)
                sum[r][v] = _mm512_fmadd_ps(q, k[v], sum[r][v]);
        }
    }
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < CPU_BLOCK_PAGES; v++)
            _mm512_storeu_ps(b->scores + (first + r) * CPU_BLOCK + v * CPU_VECTOR, sum[r][v]);
}

// out[rows][d..] = out * rescale + p . v for vectors of 16 values. A token beyond the cache has
// p = 0, but what its value holds may be NaN, so the last pair is masked.
INLINE void values_rows_bf16(const attention_block *b, int first, const int rows, size_t d,
                             const int vectors) {
    __m512 sum[MAX_ROWS][MAX_VECTORS];
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vectors; v++)
            sum[r][v] =
                _mm512_mul_ps(_mm512_set1_ps(b->rescale[first + r]),
                              _mm512_loadu_ps(b->out + (size_t)(first + r) * b->value_stride + d +
                                              (size_t)v * CPU_VECTOR));
    const uint16_t *p = (const uint16_t *)b->p + first * CPU_BLOCK;
    for (int token = 0; token < b->tokens; token += 2) {
        size_t offset = (size_t)(token % KERNEL_PAGE_TOKENS / 2) * b->value_stride + d;
        const uint32_t *at = (const uint32_t *)b->v_page[token / KERNEL_PAGE_TOKENS] + offset;
        __m512i value[MAX_VECTORS], keep = _mm512_set1_epi32(token + 1 < b->tokens ? -1 : 0xffff);
        for (int v = 0; v < vectors; v++) {
            value[v] = _mm512_and_si512(keep, _mm512_loadu_si512(at + v * CPU_VECTOR));
            fetch(b->next_k[token / KERNEL_PAGE_TOKENS],
                  (offset + (size_t)v * CPU_VECTOR) * sizeof *at);
        }
        for (int r = 0; r < rows; r++) {
            __m512i x = broadcast_pair(p + r * CPU_BLOCK + token);
            for (int v = 0; v < vectors; v++)
                sum[r][v] = dot(sum[r][v], x, value[v]);
        }
    }
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vectors; v++)
            _mm512_storeu_ps(b->out + (size_t)(first + r) * b->value_stride + d +
                                 (size_t)v * CPU_VECTOR,
                             sum[r][v]);
}

INLINE void values_rows_f32(const attention_block *b, int first, const int rows, size_t d,
                            const int vectors) {
    __m512 sum[MAX_ROWS][MAX_VECTORS];
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vectors; v++)
            sum[r][v] =
                _mm512_mul_ps(_mm512_set1_ps(b->rescale[first + r]),
                              _mm512_loadu_ps(b->out + (size_t)(first + r) * b->value_stride + d +
                                              (size_t)v * CPU_VECTOR));
    const float *p = (const float *)b->p + first * CPU_BLOCK;
    for (int token = 0; token < b->tokens; token++) {
        size_t offset = (size_t)(token % KERNEL_PAGE_TOKENS) * b->value_stride + d;
        const float *at = (const float *)b->v_page[token / KERNEL_PAGE_TOKENS] + offset;
        __m512 value[MAX_VECTORS];
        for (int v = 0; v < vectors; v++) {
            value[v] = _mm512_loadu_ps(at + v * CPU_VECTOR);
            fetch(b->next_k[token / KERNEL_PAGE_TOKENS],
                  (offset + (size_t)v * CPU_VECTOR) * sizeof *at);
        }
        for (int r = 0; r < rows; r++) {
            __m512 x = _mm512_set1_ps(p[r * CPU_BLOCK + token]);
            for (int v = 0; v < vectors; v++)
                sum[r][v] = _mm512_fmadd_ps(x, value[v], sum[r][v]);
        }
    }
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vectors; v++)
            _mm512_storeu_ps(b->out + (size_t)(first + r) * b->value_stride + d +
                                 (size_t)v * CPU_VECTOR,
                             sum[r][v]);
}

// Rows in groups of 6, then 2, then 1; values in groups of 4 vectors, then 1.
#define SCORES(suffix)                                                                             \
    static void scores_##suffix(const attention_block *b) {                                        \
        int r = 0;                                                                                 \
        for (; r + 6 <= b->rows; r += 6)                                                           \
            scores_rows_##suffix(b, r, 6);                                                         \
        for (; r + 2 <= b->rows; r += 2)                                                           \
            scores_rows_##suffix(b, r, 2);                                                         \
        for (; r < b->rows; r++)                                                                   \
            scores_rows_##suffix(b, r, 1);                                                         \
    }
#define VALUES(suffix)                                                                             \
    INLINE void values_columns_##suffix(const attention_block *b, int first, const int rows) {     \
        size_t d = 0;                                                                              \
        for (; d + CPU_PANEL <= b->value_stride; d += CPU_PANEL)                                   \
            values_rows_##suffix(b, first, rows, d, MAX_VECTORS);                                  \
        for (; d < b->value_stride; d += CPU_VECTOR)                                               \
            values_rows_##suffix(b, first, rows, d, 1);                                            \
    }                                                                                              \
    static void values_##suffix(const attention_block *b) {                                        \
        int r = 0;                                                                                 \
        for (; r + 6 <= b->rows; r += 6)                                                           \
            values_columns_##suffix(b, r, 6);                                                      \
        for (; r + 2 <= b->rows; r += 2)                                                           \
            values_columns_##suffix(b, r, 2);                                                      \
        for (; r < b->rows; r++)                                                                   \
            values_columns_##suffix(b, r, 1);                                                      \
    }
SCORES(bf16)
SCORES(f32)
VALUES(bf16)
VALUES(f32)

INLINE float softmax(const float *scores, int first, int end, float scale, softmax_state *state,
                     __m512 p[CPU_BLOCK_PAGES]) {
    uint64_t seen = (end < CPU_BLOCK ? (1ull << end) - 1 : ~0ull) & ~((1ull << first) - 1);
    __m512 s[CPU_BLOCK_PAGES], top = _mm512_set1_ps(state->max);
    for (int v = 0; v < CPU_BLOCK_PAGES; v++) {
        s[v] = _mm512_mul_ps(_mm512_loadu_ps(scores + v * CPU_VECTOR), _mm512_set1_ps(scale));
        top = _mm512_mask_max_ps(top, (__mmask16)(seen >> (v * CPU_VECTOR)), s[v], top);
    }
    float max = _mm512_reduce_max_ps(top);
    __m512 sum = _mm512_setzero_ps(), shift = _mm512_set1_ps(max);
    for (int v = 0; v < CPU_BLOCK_PAGES; v++) {
        __m512 e = exp_ps(_mm512_sub_ps(s[v], shift));
        p[v] = _mm512_maskz_mov_ps((__mmask16)(seen >> (v * CPU_VECTOR)), e);
        sum = _mm512_add_ps(sum, p[v]);
    }
    float rescale = _mm512_cvtss_f32(exp_ps(_mm512_set1_ps(state->max - max)));
    *state = (softmax_state){max, state->sum * rescale + _mm512_reduce_add_ps(sum)};
    return rescale;
}

static float softmax_bf16(const float *scores, int first, int end, float scale,
                          softmax_state *state, void *out) {
    __m512 p[CPU_BLOCK_PAGES];
    float rescale = softmax(scores, first, end, scale, state, p);
    for (int v = 0; v < CPU_BLOCK_PAGES; v++)
        _mm256_storeu_si256((__m256i *)out + v, to_bf16_vector(p[v]));
    return rescale;
}

static float softmax_f32(const float *scores, int first, int end, float scale, softmax_state *state,
                         void *out) {
    __m512 p[CPU_BLOCK_PAGES];
    float rescale = softmax(scores, first, end, scale, state, p);
    for (int v = 0; v < CPU_BLOCK_PAGES; v++)
        _mm512_storeu_ps((float *)out + v * CPU_VECTOR, p[v]);
    return rescale;
}

// Measured on one core (tests/bench/NOTES.md): 16 GB/s from memory, 109 GFLOP/s of bf16.
static const tile_shape shapes[] = {{1, 125, 25}, {2, 125, 37}, {3, 125, 55},
                                    {4, 125, 73}, {5, 125, 92}, {6, 125, 110}};

#define TABLE(suffix)                                                                              \
    {                                                                                              \
        .name = "avx512", .n_shapes = sizeof shapes / sizeof *shapes, .shapes = shapes,            \
        .gemm_tile = gemm_tile_##suffix, .swiglu = swiglu, .sigmoid = sigmoid,                     \
        .norm = norm_##suffix, .scores = scores_##suffix, .softmax = softmax_##suffix,             \
        .values = values_##suffix, .to_bf16 = to_bf16, .from_bf16 = from_bf16,                     \
        .add_bf16 = add_bf16, .add_scaled = add_scaled,                                            \
    }

bool cpu_isa_avx512(dtype compute, cpu_isa *out) {
    static const cpu_isa bf16 = TABLE(bf16), f32 = TABLE(f32);
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
        !__builtin_cpu_supports("avx512vl") || !__builtin_cpu_supports("avx512dq") ||
        !__builtin_cpu_supports("avx512bf16"))
        return false;
    *out = compute == DTYPE_BF16 ? bf16 : f32;
    return true;
}
