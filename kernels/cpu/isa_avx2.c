// isa_avx2.c: AVX2 and FMA forms. bf16 is widened in registers: the even value of a pair is the
// lane shifted left, the odd one the lane with its low half cleared; products of bf16 are exact in
// f32.
//
// The order of the sum of a lane is the same for every number of rows (see isa_avx512.c).
#include "kernels/cpu/cpu.h"

#include <immintrin.h>

#define INLINE static inline __attribute__((always_inline))

enum { LANES = 8, MAX_ROWS = 4, MAX_VECTORS = CPU_PANEL / LANES };

INLINE __m256 even(__m256i pair) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(pair, 16));
}

INLINE __m256 odd(__m256i pair) {
    return _mm256_castsi256_ps(_mm256_and_si256(pair, _mm256_set1_epi32((int)0xffff0000u)));
}

INLINE __m256i load(const void *at) {
    return _mm256_loadu_si256((const __m256i *)at);
}

INLINE __m256i broadcast_pair(const uint16_t *at) {
    uint32_t pair;
    memcpy(&pair, at, sizeof pair);
    return _mm256_set1_epi32((int)pair);
}

// ---- Matrix tiles: rows x vectors of 8 columns in registers over all of k. ----

INLINE void step_bf16(__m256 sum[MAX_ROWS][MAX_VECTORS], const __m256i x[MAX_ROWS], int rows,
                      const uint32_t *w, int vectors) {
    for (int v = 0; v < vectors; v++) {
        __m256i pair = load(w + v * LANES);
        for (int r = 0; r < rows; r++) {
            sum[r][v] = _mm256_fmadd_ps(even(x[r]), even(pair), sum[r][v]);
            sum[r][v] = _mm256_fmadd_ps(odd(x[r]), odd(pair), sum[r][v]);
        }
    }
}

INLINE void tile_bf16(const void *const *a, const int rows, const uint32_t *w, size_t k,
                      size_t width, const int vectors, float *y) {
    __m256 sum[MAX_ROWS][MAX_VECTORS];
    __m256i x[MAX_ROWS];
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vectors; v++)
            sum[r][v] = _mm256_setzero_ps();
    size_t pairs = k / 2;
    for (size_t j = 0; j < pairs; j++, w += width) {
        for (int r = 0; r < rows; r++)
            x[r] = broadcast_pair((const uint16_t *)a[r] + 2 * j);
        step_bf16(sum, x, rows, w, vectors);
    }
    if (k % 2) {
        for (int r = 0; r < rows; r++)
            x[r] = _mm256_set1_epi32(((const uint16_t *)a[r])[k - 1]);
        step_bf16(sum, x, rows, w, vectors);
    }
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vectors; v++)
            _mm256_storeu_ps(y + r * CPU_PANEL + v * LANES, sum[r][v]);
}

INLINE void tile_f32(const void *const *a, const int rows, const float *w, size_t k, size_t width,
                     const int vectors, float *y) {
    __m256 sum[MAX_ROWS][MAX_VECTORS];
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vectors; v++)
            sum[r][v] = _mm256_setzero_ps();
    for (size_t j = 0; j < k; j++, w += width)
        for (int v = 0; v < vectors; v++) {
            __m256 b = _mm256_loadu_ps(w + v * LANES);
            for (int r = 0; r < rows; r++)
                sum[r][v] = _mm256_fmadd_ps(_mm256_set1_ps(((const float *)a[r])[j]), b, sum[r][v]);
        }
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vectors; v++)
            _mm256_storeu_ps(y + r * CPU_PANEL + v * LANES, sum[r][v]);
}

// Eight accumulators whatever the rows: a tile of more rows goes through its columns in narrower
// strips. A strip never ends beyond the tile, whose columns are a multiple of 16.
#define STRIPS(suffix, type, rows, strip)                                                          \
    for (; c + (strip) <= columns; c += (strip))                                                   \
        tile_##suffix(t->a, rows, (const type *)t->weights + c, t->k, t->width, (strip) / LANES,   \
                      t->y + c);
#define GEMM_TILE(suffix, type)                                                                    \
    static void gemm_tile_##suffix(const gemm_tile *t) {                                           \
        int columns = t->vectors * CPU_VECTOR, c = 0;                                              \
        if (t->rows == 1) {                                                                        \
            STRIPS(suffix, type, 1, 64)                                                            \
            STRIPS(suffix, type, 1, 32)                                                            \
            STRIPS(suffix, type, 1, 16)                                                            \
        } else if (t->rows == 2) {                                                                 \
            STRIPS(suffix, type, 2, 32)                                                            \
            STRIPS(suffix, type, 2, 16)                                                            \
        } else {                                                                                   \
            STRIPS(suffix, type, 4, 16)                                                            \
        }                                                                                          \
    }
GEMM_TILE(bf16, uint32_t)
GEMM_TILE(f32, float)

// ---- Elementwise ----

INLINE __m256 power_of_two(__m256i n) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(n, _mm256_set1_epi32(127)), 23));
}

// As exp_ps of isa_avx512.c; 2^n is applied in two halves so that it reaches denormals.
INLINE __m256 exp_ps(__m256 x) {
    __m256 keep = _mm256_cmp_ps(x, _mm256_set1_ps(-104.0f), _CMP_NLT_UQ);
    x = _mm256_min_ps(_mm256_set1_ps(89.0f), _mm256_max_ps(_mm256_set1_ps(-105.0f), x));
    __m256 n = _mm256_round_ps(_mm256_mul_ps(x, _mm256_set1_ps(1.44269504088896341f)),
                               _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m256 r = _mm256_fnmadd_ps(n, _mm256_set1_ps(0.693359375f), x);
    r = _mm256_fnmadd_ps(n, _mm256_set1_ps(-2.12194440e-4f), r);
    __m256 p = _mm256_set1_ps(1.9875691500e-4f);
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.3981999507e-3f));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(8.3334519073e-3f));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(4.1665795894e-2f));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.6666665459e-1f));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(5.0000001201e-1f));
    p = _mm256_fmadd_ps(p, _mm256_mul_ps(r, r), r);
    p = _mm256_add_ps(p, _mm256_set1_ps(1.0f));
    __m256i whole = _mm256_cvtps_epi32(n), half = _mm256_srai_epi32(whole, 1);
    p = _mm256_mul_ps(p, power_of_two(half));
    p = _mm256_mul_ps(p, power_of_two(_mm256_sub_epi32(whole, half)));
    return _mm256_and_ps(keep, p);
}

INLINE __m256 negative(__m256 x) {
    return _mm256_sub_ps(_mm256_setzero_ps(), x);
}

static void swiglu(const float *y, size_t columns, float *out) {
    __m256 one = _mm256_set1_ps(1.0f);
    for (size_t c = 0; c < columns; c += 2 * CPU_VECTOR)
        for (size_t i = 0; i < CPU_VECTOR; i += LANES, out += LANES) {
            __m256 gate = _mm256_loadu_ps(y + c + i);
            __m256 up = _mm256_loadu_ps(y + c + CPU_VECTOR + i);
            __m256 silu = _mm256_div_ps(gate, _mm256_add_ps(one, exp_ps(negative(gate))));
            _mm256_storeu_ps(out, _mm256_mul_ps(silu, up));
        }
}

static void sigmoid(float *y, size_t columns) {
    __m256 one = _mm256_set1_ps(1.0f);
    for (size_t c = 0; c < columns; c += LANES) {
        __m256 e = exp_ps(negative(_mm256_loadu_ps(y + c)));
        _mm256_storeu_ps(y + c, _mm256_div_ps(one, _mm256_add_ps(one, e)));
    }
}

// To nearest even, as f32_to_bf16; a NaN stays one.
INLINE __m128i to_bf16_vector(__m256 x) {
    __m256i bits = _mm256_castps_si256(x);
    __m256i lsb = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(lsb, _mm256_set1_epi32(0x7fff)));
    __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
    __m256i high = _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, nan), 16);
    return _mm_packus_epi32(_mm256_castsi256_si128(high), _mm256_extracti128_si256(high, 1));
}

INLINE __m256 from_bf16_vector(const uint16_t *at) {
    __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)at));
    return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}

static void to_bf16(const float *in, uint16_t *out, size_t n) {
    size_t i = 0;
    for (; i + LANES <= n; i += LANES)
        _mm_storeu_si128((__m128i *)(out + i), to_bf16_vector(_mm256_loadu_ps(in + i)));
    for (; i < n; i++)
        out[i] = f32_to_bf16(in[i]);
}

static void from_bf16(const uint16_t *in, float *out, size_t n) {
    size_t i = 0;
    for (; i + LANES <= n; i += LANES)
        _mm256_storeu_ps(out + i, from_bf16_vector(in + i));
    for (; i < n; i++)
        out[i] = bf16_to_f32(in[i]);
}

static void add_bf16(float *x, const uint16_t *in, size_t n) {
    size_t i = 0;
    for (; i + LANES <= n; i += LANES)
        _mm256_storeu_ps(x + i, _mm256_add_ps(_mm256_loadu_ps(x + i), from_bf16_vector(in + i)));
    for (; i < n; i++)
        x[i] += bf16_to_f32(in[i]);
}

static void add_scaled(float *x, const float *in, float scale, size_t n) {
    size_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        __m256 y = _mm256_mul_ps(_mm256_set1_ps(scale), _mm256_loadu_ps(in + i));
        _mm256_storeu_ps(x + i, _mm256_add_ps(_mm256_loadu_ps(x + i), y));
    }
    for (; i < n; i++)
        x[i] += scale * in[i];
}

INLINE float sum_of(__m256 x) {
    __m128 half = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    half = _mm_add_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_add_ss(half, _mm_shuffle_ps(half, half, 1)));
}

INLINE float max_of(__m256 x) {
    __m128 half = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    half = _mm_max_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_max_ss(half, _mm_shuffle_ps(half, half, 1)));
}

INLINE float rms_scale(const float *x, size_t n, float epsilon) {
    __m256 sums[4] = {_mm256_setzero_ps(), _mm256_setzero_ps(), _mm256_setzero_ps(),
                      _mm256_setzero_ps()};
    size_t i = 0;
    for (; i + 4 * LANES <= n; i += 4 * LANES)
        for (size_t v = 0; v < 4; v++) {
            __m256 value = _mm256_loadu_ps(x + i + v * LANES);
            sums[v] = _mm256_fmadd_ps(value, value, sums[v]);
        }
    float sum =
        sum_of(_mm256_add_ps(_mm256_add_ps(sums[0], sums[1]), _mm256_add_ps(sums[2], sums[3])));
    for (; i < n; i++)
        sum += x[i] * x[i];
    float mean = sum / (float)n + epsilon;
    return _mm_cvtss_f32(_mm_div_ss(_mm_set_ss(1.0f), _mm_sqrt_ss(_mm_set_ss(mean))));
}

static void norm_bf16(const float *x, const float *weight, size_t n, float epsilon, void *out) {
    float scale = rms_scale(x, n, epsilon);
    uint16_t *to = out;
    size_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        __m256 value = _mm256_mul_ps(_mm256_loadu_ps(x + i), _mm256_set1_ps(scale));
        value = _mm256_mul_ps(value, _mm256_loadu_ps(weight + i));
        _mm_storeu_si128((__m128i *)(to + i), to_bf16_vector(value));
    }
    for (; i < n; i++)
        to[i] = f32_to_bf16(x[i] * scale * weight[i]);
}

static void norm_f32(const float *x, const float *weight, size_t n, float epsilon, void *out) {
    float scale = rms_scale(x, n, epsilon), *to = out;
    for (size_t i = 0; i < n; i++)
        to[i] = x[i] * scale * weight[i];
}

// ---- Attention: a row at a time, whose block stays in the nearest cache for the others. ----

static void scores_bf16(const attention_block *b) {
    for (int r = 0; r < b->rows; r++) {
        __m256 sum[MAX_VECTORS];
        for (int v = 0; v < MAX_VECTORS; v++)
            sum[v] = _mm256_setzero_ps();
        for (size_t d = 0; d < b->head_dim; d += 2) {
            __m256i q = broadcast_pair((const uint16_t *)b->q[r] + d);
            for (int v = 0; v < MAX_VECTORS; v++) {
                const uint16_t *page = b->k_page[v / 2];
                __m256i k = load(page + d * KERNEL_PAGE_TOKENS + v % 2 * 2 * LANES);
                sum[v] = _mm256_fmadd_ps(even(q), even(k), sum[v]);
                sum[v] = _mm256_fmadd_ps(odd(q), odd(k), sum[v]);
            }
        }
        for (int v = 0; v < MAX_VECTORS; v++)
            _mm256_storeu_ps(b->scores + r * CPU_BLOCK + v * LANES, sum[v]);
    }
}

static void scores_f32(const attention_block *b) {
    for (int r = 0; r < b->rows; r++) {
        __m256 sum[MAX_VECTORS];
        for (int v = 0; v < MAX_VECTORS; v++)
            sum[v] = _mm256_setzero_ps();
        for (size_t d = 0; d < b->head_dim; d++) {
            __m256 q = _mm256_set1_ps(((const float *)b->q[r])[d]);
            for (int v = 0; v < MAX_VECTORS; v++) {
                const float *page = b->k_page[v / 2];
                __m256 k = _mm256_loadu_ps(page + d * KERNEL_PAGE_TOKENS + v % 2 * LANES);
                sum[v] = _mm256_fmadd_ps(q, k, sum[v]);
            }
        }
        for (int v = 0; v < MAX_VECTORS; v++)
            _mm256_storeu_ps(b->scores + r * CPU_BLOCK + v * LANES, sum[v]);
    }
}

// Vectors of 8 values of one row; the last pair of tokens is masked as in isa_avx512.c.
INLINE void values_strip_bf16(const attention_block *b, int row, size_t d, const int vectors) {
    __m256 sum[MAX_VECTORS];
    float *out = b->out + (size_t)row * b->value_stride + d;
    const uint16_t *p = (const uint16_t *)b->p + row * CPU_BLOCK;
    for (int v = 0; v < vectors; v++)
        sum[v] = _mm256_mul_ps(_mm256_set1_ps(b->rescale[row]), _mm256_loadu_ps(out + v * LANES));
    for (int token = 0; token < b->tokens; token += 2) {
        const uint32_t *at = (const uint32_t *)b->v_page[token / KERNEL_PAGE_TOKENS] +
                             (size_t)(token % KERNEL_PAGE_TOKENS / 2) * b->value_stride + d;
        __m256i x = broadcast_pair(p + token);
        __m256i keep = _mm256_set1_epi32(token + 1 < b->tokens ? -1 : 0xffff);
        for (int v = 0; v < vectors; v++) {
            __m256i value = _mm256_and_si256(keep, load(at + v * LANES));
            sum[v] = _mm256_fmadd_ps(even(x), even(value), sum[v]);
            sum[v] = _mm256_fmadd_ps(odd(x), odd(value), sum[v]);
        }
    }
    for (int v = 0; v < vectors; v++)
        _mm256_storeu_ps(out + v * LANES, sum[v]);
}

INLINE void values_strip_f32(const attention_block *b, int row, size_t d, const int vectors) {
    __m256 sum[MAX_VECTORS];
    float *out = b->out + (size_t)row * b->value_stride + d;
    const float *p = (const float *)b->p + row * CPU_BLOCK;
    for (int v = 0; v < vectors; v++)
        sum[v] = _mm256_mul_ps(_mm256_set1_ps(b->rescale[row]), _mm256_loadu_ps(out + v * LANES));
    for (int token = 0; token < b->tokens; token++) {
        const float *at = (const float *)b->v_page[token / KERNEL_PAGE_TOKENS] +
                          (size_t)(token % KERNEL_PAGE_TOKENS) * b->value_stride + d;
        for (int v = 0; v < vectors; v++)
            sum[v] =
                _mm256_fmadd_ps(_mm256_set1_ps(p[token]), _mm256_loadu_ps(at + v * LANES), sum[v]);
    }
    for (int v = 0; v < vectors; v++)
        _mm256_storeu_ps(out + v * LANES, sum[v]);
}

#define VALUES(suffix)                                                                             \
    static void values_##suffix(const attention_block *b) {                                        \
        for (int r = 0; r < b->rows; r++) {                                                        \
            size_t d = 0;                                                                          \
            for (; d + CPU_PANEL <= b->value_stride; d += CPU_PANEL)                               \
                values_strip_##suffix(b, r, d, MAX_VECTORS);                                       \
            for (; d < b->value_stride; d += CPU_VECTOR)                                           \
                values_strip_##suffix(b, r, d, 2);                                                 \
        }                                                                                          \
    }
VALUES(bf16)
VALUES(f32)

// p: (CPU_BLOCK) f32.
static float softmax_f32(const float *scores, int first, int end, float scale, softmax_state *state,
                         void *p) {
    __m256 s[MAX_VECTORS], seen[MAX_VECTORS], top = _mm256_set1_ps(state->max);
    __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    for (int v = 0; v < MAX_VECTORS; v++) {
        __m256i token = _mm256_add_epi32(lane, _mm256_set1_epi32(v * LANES));
        __m256i in = _mm256_andnot_si256(_mm256_cmpgt_epi32(_mm256_set1_epi32(first), token),
                                         _mm256_cmpgt_epi32(_mm256_set1_epi32(end), token));
        seen[v] = _mm256_castsi256_ps(in);
        s[v] = _mm256_mul_ps(_mm256_loadu_ps(scores + v * LANES), _mm256_set1_ps(scale));
        top = _mm256_blendv_ps(top, _mm256_max_ps(s[v], top), seen[v]);
    }
    float max = max_of(top);
    __m256 sum = _mm256_setzero_ps(), shift = _mm256_set1_ps(max);
    for (int v = 0; v < MAX_VECTORS; v++) {
        __m256 e = _mm256_and_ps(seen[v], exp_ps(_mm256_sub_ps(s[v], shift)));
        _mm256_storeu_ps((float *)p + v * LANES, e);
        sum = _mm256_add_ps(sum, e);
    }
    float rescale = _mm256_cvtss_f32(exp_ps(_mm256_set1_ps(state->max - max)));
    *state = (softmax_state){max, state->sum * rescale + sum_of(sum)};
    return rescale;
}

static float softmax_bf16(const float *scores, int first, int end, float scale,
                          softmax_state *state, void *p) {
    float exact[CPU_BLOCK];
    float rescale = softmax_f32(scores, first, end, scale, state, exact);
    for (int v = 0; v < MAX_VECTORS; v++)
        _mm_storeu_si128((__m128i *)p + v, to_bf16_vector(_mm256_loadu_ps(exact + v * LANES)));
    return rescale;
}

static const tile_shape shapes[] = {{1, 70, 60}, {2, 100, 95}, {4, 160, 160}};

#define TABLE(suffix)                                                                              \
    {                                                                                              \
        .name = "avx2", .n_shapes = sizeof shapes / sizeof *shapes, .shapes = shapes,              \
        .gemm_tile = gemm_tile_##suffix, .swiglu = swiglu, .sigmoid = sigmoid,                     \
        .norm = norm_##suffix, .scores = scores_##suffix, .softmax = softmax_##suffix,             \
        .values = values_##suffix, .to_bf16 = to_bf16, .from_bf16 = from_bf16,                     \
        .add_bf16 = add_bf16, .add_scaled = add_scaled,                                            \
    }

bool cpu_isa_avx2(dtype compute, cpu_isa *out) {
    static const cpu_isa bf16 = TABLE(bf16), f32 = TABLE(f32);
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma"))
        return false;
    *out = compute == DTYPE_BF16 ? bf16 : f32;
    return true;
}
