// kernels_fixture.h: runs a test for every implementation of kernels.h on this machine, compute
// type and number of threads, and the small tools that the conformance tests share.
//
// A new implementation joins by one row in fixture_devices. Sets that the machine lacks are skipped
// with a line each and counted.
#ifndef TANDEM_TESTS_KERNELS_FIXTURE_H
#define TANDEM_TESTS_KERNELS_FIXTURE_H

#include "kernels/kernels.h"

#include <stdarg.h>
#include <setjmp.h>
#include <cmocka.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { FIXTURE_MAX_ROWS = 256, FIXTURE_MAX_GROUPS = 16 };

typedef struct fixture {
    const char *device;
    dtype compute;
    int threads;
    kernel_backend *backend;
    kernel_queue *queue;
} fixture;

static inline uint32_t fixture_random(void) {
    static uint32_t state = 12345;
    state ^= state << 13;
    state ^= state >> 17;
    state ^= state << 5;
    return state;
}

static inline int fixture_below(int n) {
    return (int)(fixture_random() % (uint32_t)n);
}

static inline float fixture_uniform(void) {
    return (float)(fixture_random() >> 8) / (float)(1 << 23) - 1.0f;
}

static inline bool fixture_open(fixture *f) {
    kernel_backend_args args = {f->device, f->threads, f->compute, FIXTURE_MAX_ROWS,
                                FIXTURE_MAX_GROUPS};
    error err;
    int rc = kernel_backend_open(&args, &f->backend, &err);
    if (rc == E_UNSUPPORTED) {
        printf("SKIPPED %s: %s\n", f->device, err.text);
        return false;
    }
    assert_int_equal(rc, 0);
    assert_int_equal(kernel_queue_create(f->backend, NULL, NULL, &f->queue, &err), 0);
    return true;
}

static inline void fixture_close(fixture *f) {
    kernel_queue_free(f->queue);
    kernel_backend_close(f->backend);
}

// Runs test on every device, compute type and one to three threads.
static inline void fixture_each(void (*test)(fixture *f)) {
    static const char *const fixture_devices[] = {"cpu:ref", "cpu:avx2", "cpu:avx512", "cpu:amx"};
    int ran = 0, skipped = 0;
    for (size_t d = 0; d < sizeof fixture_devices / sizeof *fixture_devices; d++)
        for (int type = 0; type < 2; type++)
            for (int threads = 1; threads <= 3; threads++) {
                fixture f = {.device = fixture_devices[d],
                             .compute = type ? DTYPE_BF16 : DTYPE_F32,
                             .threads = threads};
                if (!fixture_open(&f)) {
                    skipped++;
                    continue;
                }
                test(&f);
                fixture_close(&f);
                ran++;
            }
    printf("%d implementations ran, %d skipped\n", ran, skipped);
    assert_true(ran >= 6); // the reference at least
}

static inline void *fixture_alloc(size_t n, size_t size) {
    void *out = calloc(n ? n : 1, size);
    assert_non_null(out);
    return out;
}

// n random values; of the compute type exactly, so that a reference in double sees what the kernel
// sees.
static inline float *fixture_values(dtype type, size_t n, float scale) {
    float *out = fixture_alloc(n, sizeof *out);
    for (size_t i = 0; i < n; i++) {
        out[i] = fixture_uniform() * scale;
        if (type == DTYPE_BF16)
            out[i] = bf16_to_f32(f32_to_bf16(out[i]));
    }
    return out;
}

static inline size_t fixture_act(const fixture *f) {
    return dtype_bytes(f->compute);
}

static inline kernel_ref fixture_memory(const fixture *f, size_t bytes) {
    kernel_ref ref = {0};
    error err;
    assert_int_equal(kernel_mem_alloc(f->backend, KERNEL_MEM_HOST, bytes, &ref.mem, &err), 0);
    assert_int_equal((uintptr_t)kernel_mem_host(ref.mem) % 64, 0);
    return ref;
}

static inline void *fixture_host(kernel_ref ref) {
    return (uint8_t *)kernel_mem_host(ref.mem) + ref.offset;
}

// Memory that holds values as f32 or bf16.
static inline kernel_ref fixture_upload(const fixture *f, dtype type, const float *values,
                                        size_t n) {
    kernel_ref ref = fixture_memory(f, n * dtype_bytes(type));
    for (size_t i = 0; i < n; i++)
        if (type == DTYPE_F32)
            ((float *)fixture_host(ref))[i] = values[i];
        else
            ((uint16_t *)fixture_host(ref))[i] = f32_to_bf16(values[i]);
    return ref;
}

static inline float fixture_get(kernel_ref ref, dtype type, size_t i) {
    return type == DTYPE_F32 ? ((const float *)fixture_host(ref))[i]
                             : bf16_to_f32(((const uint16_t *)fixture_host(ref))[i]);
}

// Fails when got is further than tolerance from want, or when one is NaN.
static inline void fixture_near(const char *what, double got, double want, double tolerance) {
    if (!(fabs(got - want) <= tolerance)) {
        fail_msg("%s: got %.9g, want %.9g, off by %.3g with a tolerance of %.3g", what, got, want,
                 fabs(got - want), tolerance);
    }
}

// Rounding of one result in the type beyond the error of its sum.
static inline double fixture_rounding(dtype type, double value) {
    return fabs(value) * (type == DTYPE_BF16 ? 1.0 / 256 : 1e-6);
}

// A matrix (n, k) from f32 values, in one call.
static inline kernel_matrix *fixture_matrix(const fixture *f, size_t n, size_t k, bool swiglu,
                                            const float *values) {
    kernel_matrix *m = NULL;
    error err = {0};
    assert_int_equal(kernel_matrix_create(f->backend, n, k, swiglu, &m, &err), 0);
    tensor_view view = {values, DTYPE_F32, 2, {swiglu ? n / 2 : n, k}};
    kernel_matrix_part first = swiglu ? KERNEL_PART_GATE : KERNEL_PART_WHOLE;
    assert_int_equal(kernel_matrix_load(m, &view, 0, first, &err), 0);
    if (swiglu) {
        view.data = values + n / 2 * k;
        assert_int_equal(kernel_matrix_load(m, &view, 0, KERNEL_PART_UP, &err), 0);
    }
    return m;
}

#endif
