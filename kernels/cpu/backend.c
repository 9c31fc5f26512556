// backend.c: opens the CPU backend; memory, KV cache and queues.
#include "kernels/cpu/cpu.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>

enum { HUGE_PAGE = 2 << 20 };

typedef struct cpu_mem {
    kernel_mem base;
    void *mapping;
    size_t mapping_bytes;
} cpu_mem;

// Memory comes from the kernel zeroed and becomes resident page by page as it is written. Blocks
// of at least a huge page begin at one, so that weights are read with few TLB misses; the end is
// not rounded up to one, which would make unused memory resident.
int cpu_mem_alloc(kernel_backend *backend, kernel_mem_kind kind, size_t bytes, kernel_mem **out,
                  error *err) {
    cpu_mem *mem = calloc(1, sizeof *mem);
    size_t align = bytes >= HUGE_PAGE ? HUGE_PAGE : 0;
    size_t mapping_bytes = round_up((bytes ? bytes : 1) + align, 4096);
    void *mapping = MAP_FAILED;
    if (mem)
        mapping = mmap(NULL, mapping_bytes, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (mapping == MAP_FAILED) {
        free(mem);
        return error_set(err, E_NO_MEMORY, "no memory for %zu bytes", bytes);
    }
    uintptr_t at = (uintptr_t)mapping;
    if (align) {
        at = round_up(at, HUGE_PAGE);
        madvise((void *)at, round_up(bytes, 4096), MADV_HUGEPAGE); // a hint: no error matters
    }
    mem->base = (kernel_mem){backend, kind, bytes, (void *)at};
    mem->mapping = mapping;
    mem->mapping_bytes = mapping_bytes;
    *out = &mem->base;
    return 0;
}

void cpu_mem_free(kernel_mem *base) {
    cpu_mem *mem = (cpu_mem *)base;
    if (mem)
        munmap(mem->mapping, mem->mapping_bytes);
    free(mem);
}

static int cpu_vector_load(kernel_backend *backend, const tensor_view *source, kernel_mem **out,
                           error *err) {
    size_t n = source->dims[0];
    int rc = cpu_mem_alloc(backend, KERNEL_MEM_DEVICE, n * sizeof(float), out, err);
    if (rc)
        return rc;
    float *to = (*out)->host;
    const uint8_t *from = source->data;
    for (size_t i = 0; i < n; i++) {
        uint16_t half;
        if (source->type == DTYPE_F32) {
            memcpy(&to[i], from + i * sizeof(float), sizeof(float));
            continue;
        }
        memcpy(&half, from + i * sizeof half, sizeof half);
        to[i] = source->type == DTYPE_F16 ? f16_to_f32(half) : bf16_to_f32(half);
    }
    return 0;
}

size_t cpu_kv_page_bytes(kernel_backend *backend, const kernel_kv_args *args) {
    size_t stride = round_up(args->head_dim, CPU_VECTOR);
    return args->n_layers * args->n_kv_heads * KERNEL_PAGE_TOKENS * (args->head_dim + stride) *
           dtype_bytes(backend->compute);
}

int cpu_kv_create(kernel_backend *backend, const kernel_kv_args *args, kernel_kv **out,
                  error *err) {
    cpu_kv *kv = calloc(1, sizeof *kv);
    if (!kv)
        return error_set(err, E_NO_MEMORY, "no memory for a KV cache");
    size_t bytes = cpu_kv_page_bytes(backend, args) * args->n_pages;
    int rc = cpu_mem_alloc(backend, KERNEL_MEM_DEVICE, bytes, &kv->mem, err);
    if (rc) {
        free(kv);
        return rc;
    }
    size_t element = dtype_bytes(backend->compute);
    kv->base = (kernel_kv){backend, *args};
    kv->value_stride = round_up(args->head_dim, CPU_VECTOR);
    kv->k_bytes = KERNEL_PAGE_TOKENS * args->head_dim * element;
    kv->page_bytes = kv->k_bytes + KERNEL_PAGE_TOKENS * kv->value_stride * element;
    kv->data = kv->mem->host;
    *out = &kv->base;
    return 0;
}

void cpu_kv_free(kernel_kv *base) {
    cpu_kv *kv = (cpu_kv *)base;
    cpu_mem_free(kv->mem);
    free(kv);
}

typedef struct cpu_queue {
    kernel_queue base;
    kernel_mark mark;
} cpu_queue;

// Work is done when its call returns, so a mark is done at once and on_mark has nothing to tell.
static int cpu_queue_create(kernel_backend *backend, void (*on_mark)(void *user), void *user,
                            kernel_queue **out, error *err) {
    (void)on_mark, (void)user;
    cpu_queue *queue = calloc(1, sizeof *queue);
    if (!queue)
        return error_set(err, E_NO_MEMORY, "no memory for a queue");
    queue->base.backend = backend;
    *out = &queue->base;
    return 0;
}

static void cpu_queue_free(kernel_queue *queue) {
    free(queue);
}

static int cpu_queue_mark(kernel_queue *base, kernel_mark *out) {
    *out = ++((cpu_queue *)base)->mark;
    return 0;
}

static bool cpu_mark_done(kernel_queue *base, kernel_mark mark) {
    return mark <= ((cpu_queue *)base)->mark;
}

// A wake-up costs some microseconds: a smaller operation is done sooner by the caller alone.
void cpu_run(cpu_backend *cpu, size_t bytes, pool_fn *fn, void *user) {
    enum { WORTH_WAKING_BYTES = 96 << 10 };
    if (bytes < WORTH_WAKING_BYTES)
        fn(user, 0, 1);
    else
        pool_run(cpu->pool, fn, user);
}

void cpu_store_act(const cpu_backend *cpu, const float *in, void *out, size_t n) {
    if (cpu->base.compute == DTYPE_BF16)
        cpu->isa.to_bf16(in, out, n);
    else
        memcpy(out, in, n * sizeof *in);
}

static void cpu_close(kernel_backend *base) {
    cpu_backend *cpu = (cpu_backend *)base;
    pool_destroy(cpu->pool);
    cpu_mem_free(cpu->scratch_mem);
    free(cpu->scratch);
    free(cpu->choices);
    free(cpu->tiles);
    free(cpu);
}

static const backend_ops cpu_ops = {
    .close = cpu_close,
    .mem_alloc = cpu_mem_alloc,
    .mem_free = cpu_mem_free,
    .vector_load = cpu_vector_load,
    .matrix_create = cpu_matrix_create,
    .matrix_load = cpu_matrix_load,
    .matrix_free = cpu_matrix_free,
    .kv_page_bytes = cpu_kv_page_bytes,
    .kv_create = cpu_kv_create,
    .kv_free = cpu_kv_free,
    .queue_create = cpu_queue_create,
    .queue_free = cpu_queue_free,
    .queue_mark = cpu_queue_mark,
    .mark_done = cpu_mark_done,
    .embed = cpu_embed,
    .norm = cpu_norm,
    .gemm = cpu_gemm,
    .rope = cpu_rope,
    .append = cpu_append,
    .attention = cpu_attention,
    .route = cpu_route,
    .dispatch = cpu_dispatch,
    .combine = cpu_combine,
    .convert = cpu_convert,
    .sort = cpu_sort,
    .zero = cpu_zero,
};

static int choose_isa(const char *name, dtype compute, cpu_isa *out, error *err) {
    static bool (*const sets[])(dtype, cpu_isa *) = {cpu_isa_amx, cpu_isa_avx512, cpu_isa_avx2,
                                                     cpu_isa_ref};
    static const char *const names[] = {"amx", "avx512", "avx2", "ref"};
    for (size_t i = 0; i < sizeof sets / sizeof *sets; i++) {
        if (name && strcmp(name, names[i]))
            continue;
        if (sets[i](compute, out))
            return 0;
        if (name)
            return error_set(
                err, E_UNSUPPORTED,
                "device cpu:%s: this machine lacks the instructions for %s; cpu picks the "
                "best it has",
                name, dtype_name(compute));
    }
    return error_set(err, E_INVALID,
                     "unknown device cpu:%s: set attention.device and ffn.device to cpu, cpu:ref, "
                     "cpu:avx2, cpu:avx512 or cpu:amx",
                     name);
}

static int create_scratch(cpu_backend *cpu, int threads, error *err) {
    enum {
        Y = CPU_MAX_TILE_ROWS * CPU_PANEL,
        STAGING = CPU_ATTENTION_ROWS * KERNEL_MAX_HEAD_DIM,
        SCORES = CPU_ATTENTION_ROWS * CPU_BLOCK,
        EACH = Y + STAGING + 2 * SCORES,
    };
    int rc = cpu_mem_alloc(&cpu->base, KERNEL_MEM_HOST, (size_t)threads * EACH * sizeof(float),
                           &cpu->scratch_mem, err);
    if (rc)
        return rc;
    size_t rows = cpu->base.max_rows;
    cpu->scratch = calloc((size_t)threads, sizeof *cpu->scratch);
    cpu->tiles = calloc(rows, sizeof *cpu->tiles);
    cpu->choices = calloc(rows + 1, sizeof *cpu->choices);
    if (!cpu->scratch || !cpu->tiles || !cpu->choices)
        return error_set(err, E_NO_MEMORY, "no memory for the scratch of %d threads", threads);
    for (int i = 0; i < threads; i++) {
        float *at = (float *)cpu->scratch_mem->host + (size_t)i * EACH;
        cpu->scratch[i] = (cpu_scratch){
            .y = at,
            .staging = at + Y,
            .scores = at + Y + STAGING,
            .p = at + Y + STAGING + SCORES,
        };
    }
    return 0;
}

int cpu_backend_open(const kernel_backend_args *args, const char *isa, kernel_backend **out,
                     error *err) {
    cpu_backend *cpu = calloc(1, sizeof *cpu);
    if (!cpu)
        return error_set(err, E_NO_MEMORY, "no memory for a device");
    cpu->base = (kernel_backend){&cpu_ops, args->compute, args->max_rows, args->max_groups, ""};
    int rc = choose_isa(isa, args->compute, &cpu->isa, err);
    if (!rc)
        rc = create_scratch(cpu, args->threads, err);
    if (!rc)
        rc = pool_create(args->threads, &cpu->pool, err);
    if (rc) {
        cpu_close(&cpu->base);
        return rc;
    }
    snprintf(cpu->base.description, sizeof cpu->base.description, "cpu %s-%s, %d thread%s",
             cpu->isa.name, dtype_name(args->compute), args->threads,
             args->threads == 1 ? "" : "s");
    *out = &cpu->base;
    return 0;
}
