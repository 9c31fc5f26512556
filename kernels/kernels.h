// kernels.h: the one interface to every device that computes: cpu, cuda (plug-in), emulated.
//
// Memory is a handle of the backend; a kernel_ref is a place in it. Operations are queued: a call
// may return before the work is done; kernel_queue_mark closes a batch of queued work and
// kernel_mark_done says when all of it is complete. Operations of one queue run in order. The cpu
// backend computes inside the call and its marks are done at once.
// Buffers that an operation names stay valid and unchanged by the caller until a later mark of the
// queue is done; host arrays in args structs marked "host" are read before the call returns.
// No operation allocates, locks or formats text: scratch is sized at kernel_backend_open from its
// limits, and an operation over a limit returns E_TOO_LARGE.
// Thread: one thread owns a backend and its queues.
//
// Types of activations: "act" is the compute type of the backend (bf16 or f32); the residual
// stream x is always f32; accumulation is always f32. The result of a row never depends on the
// other rows of the call: every output element is one sum over k in ascending order.
#ifndef TANDEM_KERNELS_KERNELS_H
#define TANDEM_KERNELS_KERNELS_H

#include "engine/status.h"
#include "engine/types.h"

#include <stdbool.h>

enum {
    KERNEL_PAGE_TOKENS = 16,
    KERNEL_MAX_RANKS = 64,
    KERNEL_MAX_TOP_K = 64,
    KERNEL_MAX_HEAD_DIM = 256
};

typedef struct kernel_backend kernel_backend;
typedef struct kernel_queue kernel_queue;
typedef struct kernel_mem kernel_mem;
typedef struct kernel_matrix kernel_matrix; // weights (n, k) in the layout of the backend
typedef struct kernel_kv kernel_kv;         // paged KV cache of all layers of a worker
typedef uint64_t kernel_mark;

typedef struct kernel_ref {
    kernel_mem *mem;
    size_t offset; // bytes
} kernel_ref;

typedef struct kernel_backend_args {
    const char *device; // "cpu", "cpu:ref", "cpu:avx2", "cpu:avx512", "cpu:amx" ("cpu" picks the
                        // best), "cuda:N", "emulated"
    int threads;        // cpu: threads that compute, the caller's included
    dtype compute;      // DTYPE_BF16 or DTYPE_F32
    size_t max_rows;    // rows of one operation; for a grouped gemm: the sum over the groups
    size_t max_groups;  // groups of one gemm
} kernel_backend_args;

int kernel_backend_open(const kernel_backend_args *args, kernel_backend **out, error *err);
void kernel_backend_close(kernel_backend *backend); // after everything created from it is freed
// For logs: "cpu avx512-bf16, 2 threads". Owned by the backend.
const char *kernel_backend_describe(const kernel_backend *backend);

// Memory. DEVICE memory may have no host address; HOST memory has one and the device reads it.
// Zeroed at allocation, aligned to 64 bytes.
typedef enum kernel_mem_kind { KERNEL_MEM_DEVICE, KERNEL_MEM_HOST } kernel_mem_kind;
int kernel_mem_alloc(kernel_backend *backend, kernel_mem_kind kind, size_t bytes, kernel_mem **out,
                     error *err);
void kernel_mem_free(kernel_mem *mem);
void *kernel_mem_host(const kernel_mem *mem); // host address, or NULL for device-only memory

// A vector of f32 on the device from a 1-d tensor of any type (norm weights, biases).
int kernel_vector_load(kernel_backend *backend, const tensor_view *source, kernel_mem **out,
                       error *err);

// Weights. A matrix has n output and k input features: y[r, i] = sum over j of a[r, j] * w[i, j].
// A swiglu matrix has n = 2 * intermediate: its GATE and UP halves are loaded separately and laid
// out so that the SWIGLU epilogue finds both in one tile.
typedef enum kernel_matrix_part {
    KERNEL_PART_WHOLE,
    KERNEL_PART_GATE,
    KERNEL_PART_UP
} kernel_matrix_part;
int kernel_matrix_create(kernel_backend *backend, size_t n, size_t k, bool swiglu,
                         kernel_matrix **out, error *err);
// Packs source (rows, k) into output features row0.. of the part, converting to the compute type.
// source is not needed afterwards.
int kernel_matrix_load(kernel_matrix *matrix, const tensor_view *source, size_t row0,
                       kernel_matrix_part part, error *err);
void kernel_matrix_free(kernel_matrix *matrix);
size_t kernel_matrix_bytes(const kernel_matrix *matrix);

// KV cache in the compute type: n_pages pages of 16 tokens for each layer.
typedef struct kernel_kv_args {
    size_t n_layers, n_pages, n_kv_heads, head_dim;
} kernel_kv_args;
int kernel_kv_create(kernel_backend *backend, const kernel_kv_args *args, kernel_kv **out,
                     error *err);
void kernel_kv_free(kernel_kv *kv);
size_t kernel_kv_page_bytes(kernel_backend *backend, const kernel_kv_args *args); // all layers

// Queues and marks. on_mark may be called from any thread when a mark that was seen not done
// completes; it is never called by a backend whose marks are done at once.
int kernel_queue_create(kernel_backend *backend, void (*on_mark)(void *user), void *user,
                        kernel_queue **out, error *err);
void kernel_queue_free(kernel_queue *queue);
int kernel_queue_mark(kernel_queue *queue, kernel_mark *out);
bool kernel_mark_done(kernel_queue *queue, kernel_mark mark);

// ---- Operations. All return 0 or a negative code. ----

// x[r] = row ids[r] of the table.
typedef struct kernel_embed_args {
    size_t rows;
    const int32_t *ids;         // (rows) host
    const kernel_matrix *table; // (vocab, hidden), the layout of any matrix
    kernel_ref x;               // (rows, hidden) f32
} kernel_embed_args;
int kernel_embed(kernel_queue *queue, const kernel_embed_args *args);

// out[r] = rmsnorm(x[select ? select[r] : r]) * weight
typedef struct kernel_norm_args {
    size_t rows, hidden;
    const int32_t *select; // (rows) host, or NULL
    kernel_ref x;          // (>= rows, hidden) f32
    kernel_ref weight;     // (hidden) f32
    float epsilon;
    kernel_ref out; // (rows, hidden) act
} kernel_norm_args;
int kernel_norm(kernel_queue *queue, const kernel_norm_args *args);

// Dense or grouped matrix product. Group g covers the next group_rows[g] slots and matrix
// matrices[g]; all matrices have the same n and k. Slot s reads row a_index[s] of a (s itself when
// NULL) and writes row out_index[s] of out (s itself when NULL). Never pads in memory.
typedef enum kernel_epilogue {
    KERNEL_EPILOGUE_F32,     // out f32 (., n) = y
    KERNEL_EPILOGUE_ACT,     // out act (., n) = y
    KERNEL_EPILOGUE_ADD,     // out f32 (., n) += scale[s] * y; groups in order: slots that share an
                             // out row are added in ascending group order
    KERNEL_EPILOGUE_SWIGLU,  // out act (., n / 2) = silu(gate) * up
    KERNEL_EPILOGUE_SIGMOID, // out f32 (., n) = 1 / (1 + exp(-y))
} kernel_epilogue;

typedef struct kernel_gemm_report {
    size_t padded_rows;   // rows of the chosen tiles beyond the real rows
    size_t active_groups; // groups with at least one row: expert weights read
    size_t tiles;
} kernel_gemm_report;

typedef struct kernel_gemm_args {
    size_t n_groups;
    const int32_t *group_rows;            // (n_groups) host
    const kernel_matrix *const *matrices; // (n_groups) host
    kernel_ref a;                         // (., k) act
    const int32_t *a_index;               // (slots) host, or NULL
    kernel_ref bias;                      // (n) f32, mem NULL: none; one group, not SWIGLU
    const float *scale;                   // (slots) host, or NULL for 1; ADD only, else NULL
    kernel_epilogue epilogue;
    kernel_ref out;
    const int32_t *out_index;   // (slots) host, or NULL
    kernel_gemm_report *report; // or NULL; written before the call returns
} kernel_gemm_args;
int kernel_gemm(kernel_queue *queue, const kernel_gemm_args *args);

// Cosines and sines of the rows' positions, once per step and used by every layer:
// out[r] = cos(p * f[0..half)), sin(p * f[0..half)), angles in f32 as the Hugging Face models do.
typedef struct kernel_rope_args {
    size_t rows, head_dim;
    const int32_t *positions;         // (rows) host
    const float *inverse_frequencies; // (head_dim / 2) host
    kernel_ref out;                   // (rows, head_dim) f32
} kernel_rope_args;
int kernel_rope(kernel_queue *queue, const kernel_rope_args *args);

// Fused: QK norm, clip, rotary embedding (half rotation), KV append, q to the compute type.
typedef enum kernel_qk_norm {
    KERNEL_QK_NORM_NONE,
    KERNEL_QK_NORM_HEAD,
    KERNEL_QK_NORM_FULL
} kernel_qk_norm;
typedef struct kernel_append_args {
    size_t rows, n_heads, n_kv_heads, head_dim;
    kernel_ref qkv;            // (rows, (n_heads + 2 n_kv_heads) head_dim) f32: q, k, v
    kernel_ref rope;           // (rows, head_dim) f32, from kernel_rope
    kernel_qk_norm qk_norm;    // HEAD: over each head; FULL: over all heads of q, all of k
    kernel_ref q_norm, k_norm; // f32 weights: (head_dim), or (heads * head_dim) for FULL
    float epsilon;
    float clip; // clamp the normed q and k, and v, to [-clip, clip] before rotary; 0: off
    kernel_kv *kv;
    size_t layer;
    const int32_t *kv_slot; // (rows) host: page * 16 + offset in the page
    kernel_ref q;           // (rows, n_heads, head_dim) act
} kernel_append_args;
int kernel_append(kernel_queue *queue, const kernel_append_args *args);

// Causal attention over the paged cache; decode and prefill chunks in one call. Query i of a
// sequence has position kv_tokens - q_rows + i and sees the positions up to its own, the last
// `window` of them when window is not 0.
typedef struct kernel_sequence {
    int32_t q_row0, q_rows; // rows of q and out
    int32_t kv_tokens;      // tokens in the cache, these rows included
    const int32_t *pages;   // host, (ceil(kv_tokens / 16))
} kernel_sequence;
typedef struct kernel_attention_args {
    size_t n_sequences;
    const kernel_sequence *sequences; // (n_sequences) host
    size_t n_heads, n_kv_heads, head_dim;
    float scale;
    size_t window;
    const kernel_kv *kv;
    size_t layer;
    kernel_ref q;   // (rows, n_heads, head_dim) act
    kernel_ref out; // (rows, n_heads, head_dim) act
} kernel_attention_args;
int kernel_attention(kernel_queue *queue, const kernel_attention_args *args);

// Gate: softmax over all experts in f32, top-k (ties: the lower expert), weights renormalised to
// sum 1 when norm_top_k. Experts of a row come in descending order of weight.
typedef struct kernel_route_args {
    size_t rows, n_experts, top_k;
    bool norm_top_k;
    kernel_ref logits;  // (rows, n_experts) f32
    kernel_ref experts; // (rows, top_k) uint16, HOST memory
    kernel_ref weights; // (rows, top_k) f32, HOST memory
} kernel_route_args;
int kernel_route(kernel_queue *queue, const kernel_route_args *args);

// Builds the payload of one DISPATCH frame per FFN rank (layout: engine/frame.h). A row goes to
// every rank that owns one of its experts, once; entries of other ranks are expert 0xffff, weight
// 0.
typedef struct kernel_dispatch_args {
    size_t rows, hidden, top_k, n_ranks;
    kernel_ref h;               // (rows, hidden) act
    kernel_ref experts;         // (rows, top_k) uint16, HOST memory
    kernel_ref weights;         // (rows, top_k) f32, HOST memory
    const uint8_t *expert_rank; // (n_experts) host: FFN rank that owns the expert
    dtype wire;
    kernel_ref payload[KERNEL_MAX_RANKS]; // HOST memory, room for `rows` rows each
    // Outputs, host; valid when a later mark is done.
    int32_t *frame_rows; // (n_ranks)
    int32_t *row_index;  // (n_ranks, rows): row of h behind each row of the frame, ascending
} kernel_dispatch_args;
int kernel_dispatch(kernel_queue *queue, const kernel_dispatch_args *args);

// x[row_index[rank][i]] += rows[rank][i], ranks in order.
typedef struct kernel_combine_args {
    size_t hidden, n_ranks;
    dtype wire;
    const void *payload[KERNEL_MAX_RANKS]; // host: (frame_rows[rank], hidden) of the wire type
    const int32_t *frame_rows;             // (n_ranks) host
    const int32_t *row_index;              // (n_ranks, row_stride) host
    size_t row_stride;
    kernel_ref x; // (., hidden) f32
} kernel_combine_args;
int kernel_combine(kernel_queue *queue, const kernel_combine_args *args);

// out = in, converted; (rows, columns) contiguous. Wire rows into act rows and back.
typedef struct kernel_convert_args {
    size_t rows, columns;
    const void *host_in; // host, of in_type (or NULL: in)
    kernel_ref in;
    dtype in_type;
    void *host_out; // host, of out_type (or NULL: out)
    kernel_ref out;
    dtype out_type; // F32 or BF16
} kernel_convert_args;
int kernel_convert(kernel_queue *queue, const kernel_convert_args *args);

// Sorts (row, entry) pairs by local expert for a grouped gemm: slot lists in ascending expert, then
// ascending row. local_group[expert] is the group, or -1 when the expert is not this worker's.
typedef struct kernel_sort_args {
    size_t rows, top_k, n_experts, n_groups;
    const uint16_t *experts;    // (rows, top_k) host; 0xffff: no entry
    const float *weights;       // (rows, top_k) host
    const int16_t *local_group; // (n_experts) host
    // Outputs, host; written before the call returns on the cpu, else when a later mark is done.
    int32_t *group_rows; // (n_groups)
    int32_t *slot_row;   // (rows * top_k at most)
    float *slot_weight;  // (rows * top_k at most)
    size_t *n_slots;
} kernel_sort_args;
int kernel_sort(kernel_queue *queue,
                const kernel_sort_args *args); // E_PROTOCOL: an expert that is not ours

// Sets bytes to zero.
int kernel_zero(kernel_queue *queue, kernel_ref ref, size_t bytes);

#endif
