// matrix.c: packs weights into panels (cpu.h), and reads rows back for the embedding.
#include "kernels/cpu/cpu.h"

#include <stdlib.h>

enum { PACK_K = 128 }; // k of one packing block: 16 features of it stay in the nearest cache

int cpu_matrix_create(kernel_backend *backend, size_t n, size_t k, bool swiglu, kernel_matrix **out,
                      error *err) {
    cpu_matrix *m = calloc(1, sizeof *m);
    if (!m)
        return error_set(err, E_NO_MEMORY, "no memory for a matrix");
    m->columns = swiglu ? 2 * round_up(n / 2, CPU_VECTOR) : round_up(n, CPU_VECTOR);
    m->k_pad = backend->compute == DTYPE_BF16 ? round_up(k, 2) : k;
    size_t bytes = m->columns * m->k_pad * dtype_bytes(backend->compute);
    int rc = cpu_mem_alloc(backend, KERNEL_MEM_DEVICE, bytes, &m->mem, err);
    if (rc) {
        free(m);
        return rc;
    }
    m->base = (kernel_matrix){backend, n, k, bytes, swiglu};
    m->data = m->mem->host;
    *out = &m->base;
    return 0;
}

void cpu_matrix_free(kernel_matrix *base) {
    cpu_matrix *m = (cpu_matrix *)base;
    cpu_mem_free(m->mem);
    free(m);
}

static size_t column_of(size_t feature, kernel_matrix_part part) {
    if (part == KERNEL_PART_WHOLE)
        return feature;
    size_t column = feature / CPU_VECTOR * 2 * CPU_VECTOR + feature % CPU_VECTOR;
    return part == KERNEL_PART_UP ? column + CPU_VECTOR : column;
}

typedef struct pack_job {
    cpu_matrix *m;
    const tensor_view *source;
    size_t row0;
    kernel_matrix_part part;
} pack_job;

// n elements of the source from element at, as f32 or, where the types are equal, as they are.
static void read_bf16(const tensor_view *source, size_t at, size_t n, uint16_t *out) {
    const uint8_t *from = (const uint8_t *)source->data + at * dtype_bytes(source->type);
    if (source->type == DTYPE_BF16) {
        memcpy(out, from, n * sizeof *out);
        return;
    }
    for (size_t i = 0; i < n; i++) {
        float value;
        uint16_t half;
        if (source->type == DTYPE_F32) {
            memcpy(&value, from + i * sizeof value, sizeof value);
        } else {
            memcpy(&half, from + i * sizeof half, sizeof half);
            value = f16_to_f32(half);
        }
        out[i] = f32_to_bf16(value);
    }
}

static void read_f32(const tensor_view *source, size_t at, size_t n, float *out) {
    const uint8_t *from = (const uint8_t *)source->data + at * dtype_bytes(source->type);
    if (source->type == DTYPE_F32) {
        memcpy(out, from, n * sizeof *out);
        return;
    }
    for (size_t i = 0; i < n; i++) {
        uint16_t half;
        memcpy(&half, from + i * sizeof half, sizeof half);
        out[i] = source->type == DTYPE_F16 ? f16_to_f32(half) : bf16_to_f32(half);
    }
}

// Features first..end, which lie in one vector of columns, over j0..j0+n; j0 is even.
static void pack_bf16(const pack_job *job, size_t first, size_t end, size_t j0, size_t n) {
    const cpu_matrix *m = job->m;
    uint16_t block[CPU_VECTOR][PACK_K];
    size_t features = end - first, pairs = (n + 1) / 2;
    for (size_t f = 0; f < features; f++) {
        read_bf16(job->source, (first + f - job->row0) * m->base.k + j0, n, block[f]);
        if (n % 2)
            block[f][n] = 0;
    }
    size_t column = column_of(first, job->part), width = cpu_panel_width(m, column);
    uint32_t *to = (uint32_t *)(uintptr_t)cpu_column(m, column) + j0 / 2 * width;
    for (size_t pair = 0; pair < pairs; pair++)
        for (size_t f = 0; f < features; f++)
            memcpy(&to[pair * width + f], &block[f][2 * pair], sizeof *to);
}

static void pack_f32(const pack_job *job, size_t first, size_t end, size_t j0, size_t n) {
    const cpu_matrix *m = job->m;
    float block[CPU_VECTOR][PACK_K];
    size_t features = end - first;
    for (size_t f = 0; f < features; f++)
        read_f32(job->source, (first + f - job->row0) * m->base.k + j0, n, block[f]);
    size_t column = column_of(first, job->part), width = cpu_panel_width(m, column);
    float *to = (float *)(uintptr_t)cpu_column(m, column) + j0 * width;
    for (size_t j = 0; j < n; j++)
        for (size_t f = 0; f < features; f++)
            to[j * width + f] = block[f][j];
}

static void pack_part(void *user, int part, int n_parts) {
    const pack_job *job = user;
    size_t rows_end = job->row0 + job->source->dims[0];
    size_t first_block = job->row0 / CPU_VECTOR, begin, end;
    pool_range(round_up(rows_end, CPU_VECTOR) / CPU_VECTOR - first_block, part, n_parts, &begin,
               &end);
    for (size_t b = first_block + begin; b < first_block + end; b++) {
        size_t first = b * CPU_VECTOR, last = first + CPU_VECTOR;
        first = first < job->row0 ? job->row0 : first;
        last = last > rows_end ? rows_end : last;
        for (size_t j = 0; j < job->m->base.k; j += PACK_K) {
            size_t left = job->m->base.k - j, n = left < PACK_K ? left : PACK_K;
            if (job->m->base.backend->compute == DTYPE_BF16)
                pack_bf16(job, first, last, j, n);
            else
                pack_f32(job, first, last, j, n);
        }
    }
}

int cpu_matrix_load(kernel_matrix *base, const tensor_view *source, size_t row0,
                    kernel_matrix_part part, error *err) {
    (void)err;
    pack_job job = {(cpu_matrix *)base, source, row0, part};
    cpu_run((cpu_backend *)base->backend, source->dims[0] * base->k * 2, pack_part, &job);
    return 0;
}

static void embed_part(void *user, int part, int n_parts) {
    const kernel_embed_args *args = user;
    const cpu_matrix *m = (const cpu_matrix *)args->table;
    size_t begin, end, k = m->base.k;
    pool_range(args->rows, part, n_parts, &begin, &end);
    for (size_t r = begin; r < end; r++) {
        size_t column = (size_t)args->ids[r], width = cpu_panel_width(m, column);
        float *x = (float *)cpu_address(args->x) + r * k;
        if (m->base.backend->compute == DTYPE_BF16) {
            const uint16_t *w = cpu_column(m, column);
            for (size_t j = 0; j < k; j++)
                x[j] = bf16_to_f32(w[j / 2 * 2 * width + j % 2]);
        } else {
            const float *w = cpu_column(m, column);
            for (size_t j = 0; j < k; j++)
                x[j] = w[j * width];
        }
    }
}

// Each value of a row lies in another cache line, but the rows are few beside a step's weights.
int cpu_embed(kernel_queue *queue, const kernel_embed_args *args) {
    cpu_run(cpu_of(queue), args->rows * args->table->k * 32, embed_part, (void *)(uintptr_t)args);
    return 0;
}
