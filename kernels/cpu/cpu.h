// cpu.h: the CPU backend: its objects, its packed layouts, and the table of an instruction set.
//
// Matrix: columns (output features) in panels of 64, the last panel as wide as its columns rounded
// up to 16; a panel is contiguous: bf16 as (k / 2, width, 2), so that a pair of k lies in one
// 32-bit lane as the bf16 dot product instruction wants it, f32 as (k, width). An odd k is filled
// with 0. A swiglu matrix alternates 16 gate and 16 up columns. Threads own ranges of columns. KV:
// (layer, page, kv head), each a K page and a V page: K bf16 (head_dim / 2, 16 tokens, 2) or f32
// (head_dim, 16); V bf16 (8 token pairs, value_stride, 2) or f32 (16, value_stride), where
// value_stride is head_dim rounded up to 16.
#ifndef TANDEM_KERNELS_CPU_CPU_H
#define TANDEM_KERNELS_CPU_CPU_H

#include "kernels/backend.h"
#include "kernels/cpu/pool.h"
#include "kernels/tile_plan.h"

enum {
    CPU_VECTOR = 16,        // columns per vector of f32 in the widest set
    CPU_PANEL = 64,         // columns per panel
    CPU_UNIT = 32,          // columns that threads divide: a gate and an up vector
    CPU_MAX_TILE_ROWS = 32, // rows of one matrix tile
    CPU_FETCH_AHEAD = 8192, // bytes between the weights in use and those that are fetched
    CPU_BLOCK = 64,         // tokens of one attention block, at absolute positions
    CPU_BLOCK_PAGES = CPU_BLOCK / KERNEL_PAGE_TOKENS,
    CPU_ATTENTION_ROWS = 32, // (query, head) rows of one attention tile
};

static inline size_t round_up(size_t n, size_t unit) {
    return (n + unit - 1) / unit * unit;
}

// y[r][0..16 vectors) = sum over j < k of a[r][j] * w[j][..], j ascending.
typedef struct gemm_tile {
    const void *const *a; // as many rows as the shape has, act; the last real one is repeated
    int rows;             // real ones
    int vectors;          // of columns, 1..4
    const void *weights;  // the first column in its panel of width columns
    size_t k, width;
    float *y;         // (CPU_MAX_TILE_ROWS, CPU_PANEL)
    const void *next; // a share of the next panel, which may be fetched into the cache meanwhile
    size_t next_bytes;
} gemm_tile;

// One block of 64 tokens against the rows of an attention tile that see any of it.
typedef struct attention_block {
    int rows;
    int tokens; // of the block that are in the cache, 1..64
    size_t head_dim, value_stride;
    const void *q[CPU_ATTENTION_ROWS];   // rows of head_dim, act
    const void *k_page[CPU_BLOCK_PAGES]; // pages beyond the cache repeat an earlier one
    const void *v_page[CPU_BLOCK_PAGES];
    const void *next_k[CPU_BLOCK_PAGES]; // K pages of the next block, to be fetched meanwhile
    float *scores;                       // (rows, 64)
    void *p;                             // (rows, 64) act
    const float *rescale;                // (rows): what out is multiplied by first
    float *out;                          // (rows, value_stride)
} attention_block;

// Running state of one row's softmax.
typedef struct softmax_state {
    float max, sum;
} softmax_state;

// What differs by instruction set and compute type.
typedef struct cpu_isa {
    const char *name;
    size_t n_shapes;
    const tile_shape *shapes; // rows 1..CPU_MAX_TILE_ROWS; measured, see tests/bench/NOTES.md

    // Called by a thread around its tiles; NULL: nothing to do.
    void (*enter)(void);
    void (*leave)(void);
    void (*gemm_tile)(const gemm_tile *tile);
    // out[16 i + c] = silu(y[32 i + c]) * y[32 i + 16 + c]
    void (*swiglu)(const float *y, size_t columns, float *out);
    void (*sigmoid)(float *y, size_t columns);
    void (*norm)(const float *x, const float *weight, size_t n, float epsilon, void *out_act);

    void (*scores)(const attention_block *block);
    // One row of scores, tokens first..end of the block: updates the state, writes p (64) act, and
    // returns the factor of what was summed before.
    float (*softmax)(const float *scores, int first, int end, float scale, softmax_state *state,
                     void *p);
    void (*values)(const attention_block *block);

    void (*to_bf16)(const float *in, uint16_t *out, size_t n);
    void (*from_bf16)(const uint16_t *in, float *out, size_t n);
    void (*add_bf16)(float *x, const uint16_t *in, size_t n);             // x += in
    void (*add_scaled)(float *x, const float *in, float scale, size_t n); // x += scale * in
} cpu_isa;

// The table of a compute type; false where the machine lacks the set or the set lacks the type.
bool cpu_isa_ref(dtype compute, cpu_isa *out);
bool cpu_isa_avx2(dtype compute, cpu_isa *out);
bool cpu_isa_avx512(dtype compute, cpu_isa *out);
bool cpu_isa_amx(dtype compute, cpu_isa *out);

// Scratch of one thread.
typedef struct cpu_scratch {
    float *y;       // (CPU_MAX_TILE_ROWS, CPU_PANEL)
    float *staging; // (CPU_ATTENTION_ROWS, KERNEL_MAX_HEAD_DIM)
    float *scores;  // (CPU_ATTENTION_ROWS, CPU_BLOCK)
    void *p;        // (CPU_ATTENTION_ROWS, CPU_BLOCK) act
} cpu_scratch;

typedef struct cpu_backend {
    kernel_backend base;
    cpu_isa isa;
    pool *pool;
    cpu_scratch *scratch; // (threads)
    kernel_mem *scratch_mem;
    tile *tiles;          // (max_rows)
    tile_choice *choices; // (max_rows + 1)
} cpu_backend;

typedef struct cpu_matrix {
    kernel_matrix base;
    kernel_mem *mem;
    size_t columns; // padded
    size_t k_pad;
    void *data;
} cpu_matrix;

typedef struct cpu_kv {
    kernel_kv base;
    kernel_mem *mem;
    size_t value_stride;
    size_t k_bytes;    // of one K page of one head
    size_t page_bytes; // of the K and V page of one head
    uint8_t *data;
} cpu_kv;

static inline cpu_backend *cpu_of(const kernel_queue *queue) {
    return (cpu_backend *)queue->backend;
}

static inline void *cpu_address(kernel_ref ref) {
    return (uint8_t *)ref.mem->host + ref.offset;
}

// Where column c of row 0 lies; a panel is width columns wide.
static inline size_t cpu_panel_width(const cpu_matrix *m, size_t c) {
    size_t left = m->columns - c / CPU_PANEL * CPU_PANEL;
    return left < CPU_PANEL ? left : CPU_PANEL;
}

static inline const void *cpu_column(const cpu_matrix *m, size_t c) {
    size_t pair = m->base.backend->compute == DTYPE_BF16 ? 2 : 1;
    size_t at = c / CPU_PANEL * CPU_PANEL * m->k_pad + c % CPU_PANEL * pair;
    return (const uint8_t *)m->data + at * dtype_bytes(m->base.backend->compute);
}

static inline uint8_t *cpu_page(const cpu_kv *kv, size_t layer, size_t page, size_t head) {
    size_t at = (layer * kv->base.shape.n_pages + page) * kv->base.shape.n_kv_heads + head;
    return kv->data + at * kv->page_bytes;
}

// Runs fn on all threads when the work is worth waking them for, else on the caller alone.
void cpu_run(cpu_backend *cpu, size_t bytes, pool_fn *fn, void *user);

// act row <-> f32, by the compute type.
void cpu_store_act(const cpu_backend *cpu, const float *in, void *out, size_t n);

int cpu_mem_alloc(kernel_backend *backend, kernel_mem_kind kind, size_t bytes, kernel_mem **out,
                  error *err);
void cpu_mem_free(kernel_mem *mem);
int cpu_matrix_create(kernel_backend *backend, size_t n, size_t k, bool swiglu, kernel_matrix **out,
                      error *err);
int cpu_matrix_load(kernel_matrix *matrix, const tensor_view *source, size_t row0,
                    kernel_matrix_part part, error *err);
void cpu_matrix_free(kernel_matrix *matrix);
size_t cpu_kv_page_bytes(kernel_backend *backend, const kernel_kv_args *args);
int cpu_kv_create(kernel_backend *backend, const kernel_kv_args *args, kernel_kv **out, error *err);
void cpu_kv_free(kernel_kv *kv);

int cpu_embed(kernel_queue *queue, const kernel_embed_args *args);
int cpu_norm(kernel_queue *queue, const kernel_norm_args *args);
int cpu_gemm(kernel_queue *queue, const kernel_gemm_args *args);
int cpu_rope(kernel_queue *queue, const kernel_rope_args *args);
int cpu_append(kernel_queue *queue, const kernel_append_args *args);
int cpu_attention(kernel_queue *queue, const kernel_attention_args *args);
int cpu_route(kernel_queue *queue, const kernel_route_args *args);
int cpu_dispatch(kernel_queue *queue, const kernel_dispatch_args *args);
int cpu_combine(kernel_queue *queue, const kernel_combine_args *args);
int cpu_convert(kernel_queue *queue, const kernel_convert_args *args);
int cpu_sort(kernel_queue *queue, const kernel_sort_args *args);
int cpu_zero(kernel_queue *queue, kernel_ref ref, size_t bytes);

#endif
