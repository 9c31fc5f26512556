// bench_kernels.c: speed of the matrix product and of attention beside what this machine can do.
//
// Every round measures the read bandwidth and the bf16 peak with the same threads, then each case
// once. Rates are those of the fastest round, which on a shared machine is the one that nothing
// interrupted; the median time stands beside it.
// Shapes are those of OLMoE (hidden 2048, 64 experts top-8 of 1024, 16 heads of 128).
#include "kernels/cpu/pool.h"
#include "kernels/kernels.h"

#include <immintrin.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

enum { MAX_ROUNDS = 64, MAX_ROWS = 512, MAX_CASES = 64 };

typedef struct shape {
    size_t hidden, experts, top_k, intermediate, heads, dim, context, max_rows;
} shape;

static const shape olmoe = {2048, 64, 8, 1024, 16, 128, 2048, MAX_ROWS};
static const shape tiny = {128, 8, 2, 64, 4, 32, 64, 16};

typedef struct bench {
    shape s;
    const char *device;
    int threads, rounds;
    bool cpu_time;
    kernel_backend *backend;
    kernel_queue *queue;
    pool *pool;
    kernel_mem *a, *out, *x;
    kernel_matrix **up, **down, *dense;
    kernel_kv *kv;
    kernel_mem *stream_mem; // what the bandwidth probe reads
    uint8_t *stream;
    size_t stream_bytes;
} bench;

typedef struct result {
    char name[48];
    double us[MAX_ROUNDS], bytes, flops;
    size_t active, padded;
} result;

// Wall time; or, where other programs take turns on the cores, this process's time per thread.
static double now_us(const bench *b) {
    struct timespec t;
    clock_gettime(b->cpu_time ? CLOCK_PROCESS_CPUTIME_ID : CLOCK_MONOTONIC, &t);
    return ((double)t.tv_sec * 1e6 + (double)t.tv_nsec * 1e-3) / (b->cpu_time ? b->threads : 1);
}

static void check(int rc, const char *what, const error *err) {
    if (rc) {
        fprintf(stderr, "%s: %s\n", what, err ? err->text : status_text(rc));
        exit(1);
    }
}

static uint32_t next_random(void) {
    static uint32_t state = 1;
    state = state * 1664525u + 1013904223u;
    return state >> 8;
}

// ---- What the machine can do ----

static volatile float sink;

__attribute__((target("avx512f"))) static void read_stream(void *user, int part, int n_parts) {
    const bench *b = user;
    size_t begin, end;
    pool_range(b->stream_bytes / 256, part, n_parts, &begin, &end);
    __m512i sum[4] = {_mm512_setzero_si512(), _mm512_setzero_si512(), _mm512_setzero_si512(),
                      _mm512_setzero_si512()};
    for (const uint8_t *at = b->stream + begin * 256; at < b->stream + end * 256; at += 256)
        for (int v = 0; v < 4; v++)
            sum[v] = _mm512_xor_si512(sum[v], _mm512_load_si512(at + v * 64));
    sum[0] = _mm512_xor_si512(_mm512_xor_si512(sum[0], sum[1]), _mm512_xor_si512(sum[2], sum[3]));
    sink = (float)_mm512_reduce_add_epi32(sum[0]);
}

enum { PEAK_STEPS = 200000, PEAK_CHAINS = 16 };

__attribute__((target("avx512f,avx512bf16"))) static void run_peak(void *user, int part,
                                                                   int n_parts) {
    (void)user, (void)part, (void)n_parts;
    __m512 sum[PEAK_CHAINS];
    __m512i x = _mm512_set1_epi32(0x3f803f80), y = _mm512_set1_epi32(0x3f003f00);
    for (int c = 0; c < PEAK_CHAINS; c++)
        sum[c] = _mm512_setzero_ps();
    for (int i = 0; i < PEAK_STEPS; i++) {
#pragma GCC unroll 16
        for (int c = 0; c < PEAK_CHAINS; c++)
            sum[c] = _mm512_dpbf16_ps(sum[c], (__m512bh)x, (__m512bh)y);
        __asm__ volatile("" : "+v"(x));
    }
    for (int c = 1; c < PEAK_CHAINS; c++)
        sum[0] = _mm512_add_ps(sum[0], sum[c]);
    sink = _mm512_reduce_add_ps(sum[0]);
}

static bool has_bf16(void) {
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bf16");
}

static double timed_region(bench *b, pool_fn *fn) {
    double start = now_us(b);
    pool_run(b->pool, fn, b);
    return now_us(b) - start;
}

// ---- The cases ----

static size_t cache_sequences(const shape *s) {
    return s->max_rows < MAX_ROWS ? 1 : 16;
}

static kernel_matrix *random_matrix(bench *b, size_t n, size_t k, bool swiglu) {
    kernel_matrix *m = NULL;
    error err;
    check(kernel_matrix_create(b->backend, n, k, swiglu, &m, &err), "matrix", &err);
    size_t rows = swiglu ? n / 2 : n;
    uint16_t *values = malloc(rows * k * sizeof *values);
    if (!values)
        exit(1);
    for (size_t i = 0; i < rows * k; i++)
        values[i] = (uint16_t)(0x3c00u + (next_random() & 0x81ffu));
    tensor_view view = {values, DTYPE_BF16, 2, {rows, k}};
    kernel_matrix_part part = swiglu ? KERNEL_PART_GATE : KERNEL_PART_WHOLE;
    check(kernel_matrix_load(m, &view, 0, part, &err), "matrix", &err);
    if (swiglu)
        check(kernel_matrix_load(m, &view, 0, KERNEL_PART_UP, &err), "matrix", &err);
    free(values);
    return m;
}

// Writes every page: memory that was never written is one page of zeros, which any cache holds.
static void fill_cache(bench *b) {
    const shape *s = &b->s;
    size_t tokens = cache_sequences(s) * s->context, width = s->heads * s->dim;
    kernel_kv_args args = {1, tokens / KERNEL_PAGE_TOKENS, s->heads, s->dim};
    error err;
    check(kernel_kv_create(b->backend, &args, &b->kv, &err), "kv", &err);
    float *rope = kernel_mem_host(b->x), *qkv = kernel_mem_host(b->out);
    for (size_t i = 0; i < s->max_rows * s->dim; i++)
        rope[i] = i % s->dim < s->dim / 2 ? 1 : 0;
    for (size_t i = 0; i < s->max_rows * 3 * width; i++)
        qkv[i] = (float)(int32_t)(next_random() % 2001) * 1e-3f - 1;
    for (size_t first = 0; first < tokens; first += s->max_rows) {
        int32_t slots[MAX_ROWS];
        for (size_t i = 0; i < s->max_rows; i++)
            slots[i] = (int32_t)((first + i) % tokens);
        kernel_append_args append = {.rows = s->max_rows,
                                     .n_heads = s->heads,
                                     .n_kv_heads = s->heads,
                                     .head_dim = s->dim,
                                     .qkv = {b->out, 0},
                                     .rope = {b->x, 0},
                                     .kv = b->kv,
                                     .kv_slot = slots,
                                     .q = {b->a, 0}};
        check(kernel_append(b->queue, &append), "append", NULL);
    }
}

static void open_bench(bench *b) {
    const shape *s = &b->s;
    size_t slots = s->max_rows * s->top_k;
    kernel_backend_args args = {b->device, b->threads, DTYPE_BF16, slots, s->experts};
    error err;
    check(kernel_backend_open(&args, &b->backend, &err), "backend", &err);
    check(kernel_queue_create(b->backend, NULL, NULL, &b->queue, &err), "queue", &err);
    check(pool_create(b->threads, &b->pool, &err), "pool", &err);
    size_t widest = s->hidden > 3 * s->intermediate ? s->hidden : 3 * s->intermediate;
    widest = widest > s->heads * s->dim ? widest : s->heads * s->dim;
    check(kernel_mem_alloc(b->backend, KERNEL_MEM_HOST, slots * widest * 2, &b->a, &err), "a",
          &err);
    check(kernel_mem_alloc(b->backend, KERNEL_MEM_HOST, slots * widest * 4, &b->out, &err), "out",
          &err);
    check(kernel_mem_alloc(b->backend, KERNEL_MEM_HOST, s->max_rows * widest * 4, &b->x, &err), "x",
          &err);
    uint16_t *a = kernel_mem_host(b->a);
    for (size_t i = 0; i < slots * widest; i++)
        a[i] = (uint16_t)(0x3c00u + (next_random() & 0x81ffu));
    b->up = calloc(s->experts, sizeof(kernel_matrix *));
    b->down = calloc(s->experts, sizeof(kernel_matrix *));
    if (!b->up || !b->down)
        exit(1);
    for (size_t e = 0; e < s->experts; e++) {
        b->up[e] = random_matrix(b, 2 * s->intermediate, s->hidden, true);
        b->down[e] = random_matrix(b, s->hidden, s->intermediate, false);
    }
    b->dense = random_matrix(b, 3 * s->hidden, s->hidden, false);
    fill_cache(b);
    b->stream_bytes = s->experts * s->intermediate * s->hidden * 4 / 256 * 256;
    check(kernel_mem_alloc(b->backend, KERNEL_MEM_HOST, b->stream_bytes, &b->stream_mem, &err),
          "stream", &err);
    b->stream = kernel_mem_host(b->stream_mem);
    for (size_t i = 0; i < b->stream_bytes; i += 64)
        b->stream[i] = (uint8_t)i;
}

// Rows per expert when every token chooses top_k experts at random.
static void choose_experts(const shape *s, size_t tokens, int32_t *group_rows, int32_t *slot_row) {
    bool *taken = calloc(tokens * s->experts, sizeof *taken);
    size_t slot = 0;
    if (!taken)
        exit(1);
    for (size_t t = 0; t < tokens; t++)
        for (size_t left = s->top_k; left > 0;) {
            size_t e = next_random() % s->experts;
            left -= !taken[t * s->experts + e];
            taken[t * s->experts + e] = true;
        }
    for (size_t e = 0; e < s->experts; e++) {
        group_rows[e] = 0;
        for (size_t t = 0; t < tokens; t++)
            if (taken[t * s->experts + e]) {
                group_rows[e]++;
                slot_row[slot++] = (int32_t)t;
            }
    }
    free(taken);
}

static double run_gemm(bench *b, const kernel_gemm_args *args) {
    double start = now_us(b);
    check(kernel_gemm(b->queue, args), "gemm", NULL);
    return now_us(b) - start;
}

// Gate, up and SwiGLU, then down with its weighted sum into x: what an FFN worker does per layer.
static double run_experts(bench *b, size_t tokens, result *r) {
    const shape *s = &b->s;
    static int32_t rows[4096], slot_row[MAX_ROWS * 64];
    choose_experts(s, tokens, rows, slot_row);
    kernel_gemm_report report;
    kernel_gemm_args up = {.n_groups = s->experts,
                           .group_rows = rows,
                           .matrices = (const kernel_matrix *const *)b->up,
                           .a = {b->a, 0},
                           .a_index = slot_row,
                           .epilogue = KERNEL_EPILOGUE_SWIGLU,
                           .out = {b->out, 0},
                           .report = &report};
    kernel_gemm_args down = {.n_groups = s->experts,
                             .group_rows = rows,
                             .matrices = (const kernel_matrix *const *)b->down,
                             .a = {b->out, 0},
                             .epilogue = KERNEL_EPILOGUE_ADD,
                             .out = {b->x, 0},
                             .out_index = slot_row};
    double us = run_gemm(b, &up) + run_gemm(b, &down);
    double weights = 3.0 * (double)s->hidden * (double)s->intermediate;
    r->active = report.active_groups;
    r->padded = report.padded_rows;
    r->bytes = weights * 2 * (double)report.active_groups;
    r->flops = weights * 2 * (double)(tokens * s->top_k);
    return us;
}

static double run_dense(bench *b, size_t tokens, result *r) {
    int32_t rows = (int32_t)tokens;
    const kernel_matrix *matrix = b->dense;
    kernel_gemm_args args = {.n_groups = 1,
                             .group_rows = &rows,
                             .matrices = &matrix,
                             .a = {b->a, 0},
                             .epilogue = KERNEL_EPILOGUE_F32,
                             .out = {b->out, 0}};
    r->bytes = (double)kernel_matrix_bytes(matrix);
    r->flops = r->bytes * (double)tokens;
    r->active = 1;
    return run_gemm(b, &args);
}

static double run_attention(bench *b, size_t sequences, size_t q_rows, result *r) {
    const shape *s = &b->s;
    static int32_t pages[MAX_ROWS / 16][4096];
    static kernel_sequence list[MAX_ROWS / 16];
    size_t n_pages = s->context / KERNEL_PAGE_TOKENS;
    for (size_t i = 0; i < sequences; i++) {
        for (size_t p = 0; p < n_pages; p++)
            pages[i][p] = (int32_t)((p * sequences + i) * 7 % (n_pages * sequences));
        list[i] = (kernel_sequence){(int32_t)(i * q_rows), (int32_t)q_rows, (int32_t)s->context,
                                    pages[i]};
    }
    kernel_attention_args args = {.n_sequences = sequences,
                                  .sequences = list,
                                  .n_heads = s->heads,
                                  .n_kv_heads = s->heads,
                                  .head_dim = s->dim,
                                  .scale = 0.1f,
                                  .kv = b->kv,
                                  .q = {b->a, 0},
                                  .out = {b->out, 0}};
    double width = (double)(s->heads * s->dim), rows = (double)(sequences * q_rows);
    r->bytes = (double)(sequences * s->context) * width * 4;
    r->flops = rows * ((double)s->context - (double)q_rows / 2) * width * 4;
    double start = now_us(b);
    check(kernel_attention(b->queue, &args), "attention", NULL);
    return now_us(b) - start;
}

typedef struct bench_case {
    enum { EXPERTS, DENSE, ATTENTION } kind;
    size_t rows, q_rows;
} bench_case;

static double run_case(bench *b, const bench_case *c, result *r) {
    switch (c->kind) {
    case EXPERTS:
        snprintf(r->name, sizeof r->name, "experts %zu tokens", c->rows);
        return run_experts(b, c->rows, r);
    case DENSE:
        snprintf(r->name, sizeof r->name, "dense %zu rows", c->rows);
        return run_dense(b, c->rows, r);
    case ATTENTION:
        break;
    }
    snprintf(r->name, sizeof r->name, "attention %zu x %zu", c->rows, c->q_rows);
    return run_attention(b, c->rows, c->q_rows, r);
}

static int compare(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double sort_times(double *us, int n) {
    qsort(us, (size_t)n, sizeof *us, compare);
    return us[0];
}

static void run_all(bench *b) {
    static result results[MAX_CASES];
    static double read_us[MAX_ROUNDS], peak_us[MAX_ROUNDS];
    bench_case cases[MAX_CASES];
    static const size_t tokens[] = {1, 4, 8, 16, 32, 128, 512};
    size_t n = 0;
    for (int kind = EXPERTS; kind <= DENSE; kind++)
        for (size_t i = 0; i < sizeof tokens / sizeof *tokens; i++)
            if (tokens[i] <= b->s.max_rows)
                cases[n++] = (bench_case){kind, tokens[i], 0};
    cases[n++] = (bench_case){ATTENTION, 1, 1};
    if (cache_sequences(&b->s) > 1)
        cases[n++] = (bench_case){ATTENTION, cache_sequences(&b->s), 1};
    cases[n++] = (bench_case){ATTENTION, 1, b->s.max_rows};
    for (int round = 0; round < b->rounds; round++) {
        read_us[round] = has_bf16() ? timed_region(b, read_stream) : 0;
        peak_us[round] = has_bf16() ? timed_region(b, run_peak) : 0;
        for (size_t i = 0; i < n; i++)
            results[i].us[round] = run_case(b, &cases[i], &results[i]);
    }
    double gbs = (double)b->stream_bytes / sort_times(read_us, b->rounds) * 1e-3;
    double peak =
        (double)PEAK_STEPS * PEAK_CHAINS * 64 * b->threads / sort_times(peak_us, b->rounds) * 1e-3;
    printf("%s, %d rounds; read %.1f GB/s, bf16 peak %.0f GFLOP/s\n",
           kernel_backend_describe(b->backend), b->rounds, gbs, peak);
    printf("%-22s %7s %7s %10s %10s %8s %8s %7s %7s\n", "case", "experts", "padded", "median us",
           "best us", "GB/s", "GFLOP/s", "% read", "% peak");
    for (size_t i = 0; i < n; i++) {
        result *r = &results[i];
        double us = sort_times(r->us, b->rounds);
        double g = r->bytes / us * 1e-3, f = r->flops / us * 1e-3;
        printf("%-22s %7zu %7zu %10.0f %10.0f %8.1f %8.1f %7.0f %7.0f\n", r->name, r->active,
               r->padded, r->us[b->rounds / 2], us, g, f, 100 * g / gbs, 100 * f / peak);
    }
}

static void close_bench(bench *b) {
    for (size_t e = 0; e < b->s.experts; e++) {
        kernel_matrix_free(b->up[e]);
        kernel_matrix_free(b->down[e]);
    }
    free(b->up);
    free(b->down);
    kernel_matrix_free(b->dense);
    kernel_kv_free(b->kv);
    kernel_mem_free(b->a);
    kernel_mem_free(b->out);
    kernel_mem_free(b->x);
    kernel_mem_free(b->stream_mem);
    pool_destroy(b->pool);
    kernel_queue_free(b->queue);
    kernel_backend_close(b->backend);
}

int main(int argc, char **argv) {
    bench b = {.s = olmoe, .device = "cpu", .threads = 2, .rounds = 9};
    for (int i = 1; i < argc; i++) {
        if (!strcmp(argv[i], "--tiny")) {
            b.s = tiny;
            b.rounds = 2;
        } else if (!strcmp(argv[i], "--cpu-time")) {
            b.cpu_time = true;
        } else if (i + 1 < argc && !strcmp(argv[i], "--device")) {
            b.device = argv[++i];
        } else if (i + 1 < argc && !strcmp(argv[i], "--threads")) {
            b.threads = atoi(argv[++i]);
        } else if (i + 1 < argc && !strcmp(argv[i], "--rounds")) {
            b.rounds = atoi(argv[++i]);
        } else {
            fprintf(
                stderr,
                "usage: %s [--tiny] [--cpu-time] [--device cpu[:isa]] [--threads N] [--rounds N]\n",
                argv[0]);
            return 2;
        }
    }
    if (b.rounds < 1 || b.rounds > MAX_ROUNDS || b.threads < 1)
        return 2;
    open_bench(&b);
    run_all(&b);
    close_bench(&b);
    return 0;
}
