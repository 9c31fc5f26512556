// backend.h: what stands behind kernels.h: a table of operations per device (internal to kernels/).
//
// kernels.c and operations.c check every argument against the limits and the sizes of the memory
// named, then call the table: a backend may trust what it is given. Backends embed the structs
// below as their first member.
// Thread: as kernels.h.
#ifndef TANDEM_KERNELS_BACKEND_H
#define TANDEM_KERNELS_BACKEND_H

#include "kernels/kernels.h"

typedef struct backend_ops {
    void (*close)(kernel_backend *backend);

    // Objects: cold paths, these allocate.
    int (*mem_alloc)(kernel_backend *backend, kernel_mem_kind kind, size_t bytes, kernel_mem **out,
                     error *err);
    void (*mem_free)(kernel_mem *mem);
    int (*vector_load)(kernel_backend *backend, const tensor_view *source, kernel_mem **out,
                       error *err);
    int (*matrix_create)(kernel_backend *backend, size_t n, size_t k, bool swiglu,
                         kernel_matrix **out, error *err);
    int (*matrix_load)(kernel_matrix *matrix, const tensor_view *source, size_t row0,
                       kernel_matrix_part part, error *err);
    void (*matrix_free)(kernel_matrix *matrix);
    size_t (*kv_page_bytes)(kernel_backend *backend, const kernel_kv_args *args);
    int (*kv_create)(kernel_backend *backend, const kernel_kv_args *args, kernel_kv **out,
                     error *err);
    void (*kv_free)(kernel_kv *kv);
    int (*queue_create)(kernel_backend *backend, void (*on_mark)(void *user), void *user,
                        kernel_queue **out, error *err);
    void (*queue_free)(kernel_queue *queue);

    // Operations: none allocates.
    int (*queue_mark)(kernel_queue *queue, kernel_mark *out);
    bool (*mark_done)(kernel_queue *queue, kernel_mark mark);
    int (*embed)(kernel_queue *queue, const kernel_embed_args *args);
    int (*norm)(kernel_queue *queue, const kernel_norm_args *args);
    int (*gemm)(kernel_queue *queue, const kernel_gemm_args *args);
    int (*rope)(kernel_queue *queue, const kernel_rope_args *args);
    int (*append)(kernel_queue *queue, const kernel_append_args *args);
    int (*attention)(kernel_queue *queue, const kernel_attention_args *args);
    int (*route)(kernel_queue *queue, const kernel_route_args *args);
    int (*dispatch)(kernel_queue *queue, const kernel_dispatch_args *args);
    int (*combine)(kernel_queue *queue, const kernel_combine_args *args);
    int (*convert)(kernel_queue *queue, const kernel_convert_args *args);
    int (*sort)(kernel_queue *queue, const kernel_sort_args *args);
    int (*zero)(kernel_queue *queue, kernel_ref ref, size_t bytes);
} backend_ops;

struct kernel_backend {
    const backend_ops *ops;
    dtype compute;
    size_t max_rows, max_groups;
    char description[96];
};

struct kernel_mem {
    kernel_backend *backend;
    kernel_mem_kind kind;
    size_t bytes;
    void *host; // or NULL: no host address
};

struct kernel_matrix {
    kernel_backend *backend;
    size_t n, k, bytes;
    bool swiglu;
};

struct kernel_kv {
    kernel_backend *backend;
    kernel_kv_args shape;
};

struct kernel_queue {
    kernel_backend *backend;
};

// isa: what follows "cpu:" in the device's name, or NULL for the best of this machine.
int cpu_backend_open(const kernel_backend_args *args, const char *isa, kernel_backend **out,
                     error *err);

#endif
