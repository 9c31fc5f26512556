// kernels.c: opens backends and creates their objects; operations.c has the operations.
#include "kernels/backend.h"

#include <string.h>

enum { MAX_THREADS = 1024, MAX_GROUPS = 1 << 16, MAX_ROWS = 1 << 22 };

static int check_backend_args(const kernel_backend_args *args, error *err) {
    if (args->threads < 1 || args->threads > MAX_THREADS)
        return error_set(err, E_INVALID, "device %s: threads must be 1 to %d, got %d", args->device,
                         MAX_THREADS, args->threads);
    if (args->compute != DTYPE_BF16 && args->compute != DTYPE_F32)
        return error_set(err, E_INVALID, "device %s: compute type must be bf16 or f32, got %s",
                         args->device, dtype_name(args->compute));
    if (args->max_rows < 1 || args->max_rows > MAX_ROWS)
        return error_set(err, E_INVALID,
                         "device %s: rows of one operation must be 1 to %d, got %zu", args->device,
                         MAX_ROWS, args->max_rows);
    if (args->max_groups < 1 || args->max_groups > MAX_GROUPS)
        return error_set(err, E_INVALID, "device %s: groups must be 1 to %d, got %zu", args->device,
                         MAX_GROUPS, args->max_groups);
    return 0;
}

int kernel_backend_open(const kernel_backend_args *args, kernel_backend **out, error *err) {
    if (!args->device)
        return error_set(err, E_INVALID, "no device named: set attention.device and ffn.device");
    int rc = check_backend_args(args, err);
    if (rc)
        return rc;
    if (!strcmp(args->device, "cpu"))
        return cpu_backend_open(args, NULL, out, err);
    if (!strncmp(args->device, "cpu:", 4))
        return cpu_backend_open(args, args->device + 4, out, err);
    if (!strcmp(args->device, "emulated") || !strncmp(args->device, "cuda", 4))
        return error_set(err, E_UNSUPPORTED,
                         "device %s is not in this build: set attention.device and ffn.device to "
                         "cpu",
                         args->device);
    return error_set(err, E_INVALID,
                     "unknown device %s: set attention.device and ffn.device to cpu, cpu:ref, "
                     "cpu:avx2, cpu:avx512 or cpu:amx",
                     args->device);
}

void kernel_backend_close(kernel_backend *backend) {
    if (backend)
        backend->ops->close(backend);
}

const char *kernel_backend_describe(const kernel_backend *backend) {
    return backend->description;
}

int kernel_mem_alloc(kernel_backend *backend, kernel_mem_kind kind, size_t bytes, kernel_mem **out,
                     error *err) {
    if (bytes > SIZE_MAX / 2)
        return error_set(err, E_NO_MEMORY, "memory of %zu bytes was asked for", bytes);
    return backend->ops->mem_alloc(backend, kind, bytes, out, err);
}

void kernel_mem_free(kernel_mem *mem) {
    if (mem)
        mem->backend->ops->mem_free(mem);
}

void *kernel_mem_host(const kernel_mem *mem) {
    return mem->host;
}

int kernel_vector_load(kernel_backend *backend, const tensor_view *source, kernel_mem **out,
                       error *err) {
    if (source->n_dims != 1 || source->dims[0] == 0 || source->dims[0] > SIZE_MAX / 8)
        return error_set(err, E_INVALID, "a vector needs a 1-d tensor that is not empty");
    if (!source->data || !dtype_bytes(source->type))
        return error_set(err, E_INVALID, "the source of a vector has no data or type");
    return backend->ops->vector_load(backend, source, out, err);
}

int kernel_matrix_create(kernel_backend *backend, size_t n, size_t k, bool swiglu,
                         kernel_matrix **out, error *err) {
    size_t elements;
    if (n < 1 || k < 1 || n > INT32_MAX || k > INT32_MAX || (swiglu && n % 2))
        return error_set(err, E_INVALID, "a matrix of %zu x %zu%s is not possible", n, k,
                         swiglu ? " with gate and up halves" : "");
    if (__builtin_mul_overflow(n + 32, k + 2, &elements) || elements > SIZE_MAX / 16)
        return error_set(err, E_TOO_LARGE, "a matrix of %zu x %zu is too large", n, k);
    return backend->ops->matrix_create(backend, n, k, swiglu, out, err);
}

int kernel_matrix_load(kernel_matrix *matrix, const tensor_view *source, size_t row0,
                       kernel_matrix_part part, error *err) {
    if ((part == KERNEL_PART_WHOLE) == matrix->swiglu)
        return error_set(
            err, E_INVALID,
            "a swiglu matrix is loaded by its gate and up parts, any other as a whole");
    size_t rows = part == KERNEL_PART_WHOLE ? matrix->n : matrix->n / 2;
    if (source->n_dims != 2 || source->dims[1] != matrix->k || row0 > rows ||
        source->dims[0] > rows - row0)
        return error_set(
            err, E_INVALID, "a source of %zu x %zu does not fit at row %zu of %zu x %zu",
            source->dims[0], source->n_dims == 2 ? source->dims[1] : 0, row0, rows, matrix->k);
    if (!source->data || !dtype_bytes(source->type))
        return error_set(err, E_INVALID, "the source of a matrix has no data or type");
    return matrix->backend->ops->matrix_load(matrix, source, row0, part, err);
}

void kernel_matrix_free(kernel_matrix *matrix) {
    if (matrix)
        matrix->backend->ops->matrix_free(matrix);
}

size_t kernel_matrix_bytes(const kernel_matrix *matrix) {
    return matrix->bytes;
}

int kernel_kv_create(kernel_backend *backend, const kernel_kv_args *args, kernel_kv **out,
                     error *err) {
    if (args->head_dim < 2 || args->head_dim % 2 || args->head_dim > KERNEL_MAX_HEAD_DIM)
        return error_set(err, E_UNSUPPORTED, "head dimension %zu: it must be even and 2 to %d",
                         args->head_dim, KERNEL_MAX_HEAD_DIM);
    if (args->n_layers < 1 || args->n_kv_heads < 1 || args->n_pages < 1 ||
        args->n_pages > INT32_MAX / KERNEL_PAGE_TOKENS)
        return error_set(err, E_INVALID, "a KV cache of %zu layers, %zu heads, %zu pages",
                         args->n_layers, args->n_kv_heads, args->n_pages);
    size_t bytes;
    if (__builtin_mul_overflow(args->n_layers, args->n_kv_heads, &bytes) ||
        __builtin_mul_overflow(bytes, args->n_pages, &bytes) ||
        __builtin_mul_overflow(bytes, (size_t)KERNEL_MAX_HEAD_DIM * 256, &bytes))
        return error_set(err, E_TOO_LARGE, "a KV cache of %zu pages is too large", args->n_pages);
    return backend->ops->kv_create(backend, args, out, err);
}

void kernel_kv_free(kernel_kv *kv) {
    if (kv)
        kv->backend->ops->kv_free(kv);
}

size_t kernel_kv_page_bytes(kernel_backend *backend, const kernel_kv_args *args) {
    return backend->ops->kv_page_bytes(backend, args);
}

int kernel_queue_create(kernel_backend *backend, void (*on_mark)(void *user), void *user,
                        kernel_queue **out, error *err) {
    return backend->ops->queue_create(backend, on_mark, user, out, err);
}

void kernel_queue_free(kernel_queue *queue) {
    if (queue)
        queue->backend->ops->queue_free(queue);
}

int kernel_queue_mark(kernel_queue *queue, kernel_mark *out) {
    return queue->backend->ops->queue_mark(queue, out);
}

bool kernel_mark_done(kernel_queue *queue, kernel_mark mark) {
    return queue->backend->ops->mark_done(queue, mark);
}
