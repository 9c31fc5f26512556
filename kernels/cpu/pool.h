// pool.h: the threads that compute one region at a time with their caller.
//
// pool_run calls fn(user, part, n_parts) once for each part; part 0 runs on the caller. Between
// regions a thread spins for some microseconds, since the next region of a step usually follows at
// once, then sleeps in the kernel: an idle pool uses no time.
// Thread: one thread owns a pool and calls it.
#ifndef TANDEM_KERNELS_CPU_POOL_H
#define TANDEM_KERNELS_CPU_POOL_H

#include "engine/status.h"

typedef struct pool pool;
typedef void pool_fn(void *user, int part, int n_parts);

int pool_create(int n_threads, pool **out, error *err);
void pool_destroy(pool *p);
void pool_run(pool *p, pool_fn *fn, void *user);

// The contiguous range of part out of n_parts over n items.
static inline void pool_range(size_t n, int part, int n_parts, size_t *begin, size_t *end) {
    *begin = n * (size_t)part / (size_t)n_parts;
    *end = n * ((size_t)part + 1) / (size_t)n_parts;
}

#endif
