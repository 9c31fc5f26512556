#include "kernels/cpu/pool.h"

#include <errno.h>
#include <linux/futex.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

// Some 10 to 20 us: longer than the gap between two operations of a step, shorter than a wake-up.
enum { SPINS = 256 };

typedef struct pool_thread {
    pool *pool;
    int part;
    pthread_t handle;
} pool_thread;

struct pool {
    int n_threads; // the caller's included
    pool_fn *fn;
    void *user;
    bool stop;
    _Atomic uint32_t generation; // a change starts a region; fn, user and stop are read after it
    _Atomic uint32_t running;    // threads that have not finished the region
    _Atomic uint32_t sleepers;   // threads that may sleep on generation
    pool_thread threads[];       // (n_threads - 1)
};

static inline void relax(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

static void futex_wait(_Atomic uint32_t *word, uint32_t seen) {
    syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, seen, NULL, NULL, 0);
}

static void futex_wake(_Atomic uint32_t *word) {
    syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, INT32_MAX, NULL, NULL, 0);
}

// Both sides use sequentially consistent order: either the thread sees the new generation before
// it sleeps, or the owner sees the sleeper after it has changed the generation.
static uint32_t wait_for_region(pool *p, uint32_t seen) {
    for (int i = 0; i < SPINS; i++) {
        uint32_t now = atomic_load_explicit(&p->generation, memory_order_acquire);
        if (now != seen)
            return now;
        relax();
    }
    atomic_fetch_add(&p->sleepers, 1);
    while (atomic_load(&p->generation) == seen)
        futex_wait(&p->generation, seen);
    atomic_fetch_sub(&p->sleepers, 1);
    return atomic_load(&p->generation);
}

static void *thread_main(void *user) {
    pool_thread *self = user;
    pool *p = self->pool;
    uint32_t seen = 0;
    for (;;) {
        seen = wait_for_region(p, seen);
        if (p->stop)
            return NULL;
        p->fn(p->user, self->part, p->n_threads);
        if (atomic_fetch_sub(&p->running, 1) == 1)
            futex_wake(&p->running);
    }
}

static void start_region(pool *p) {
    atomic_store(&p->running, (uint32_t)p->n_threads - 1);
    atomic_fetch_add(&p->generation, 1);
    if (atomic_load(&p->sleepers))
        futex_wake(&p->generation);
}

void pool_run(pool *p, pool_fn *fn, void *user) {
    if (p->n_threads == 1) {
        fn(user, 0, 1);
        return;
    }
    p->fn = fn;
    p->user = user;
    start_region(p);
    fn(user, 0, p->n_threads);
    for (int i = 0; i < SPINS && atomic_load_explicit(&p->running, memory_order_acquire); i++)
        relax();
    uint32_t running;
    while ((running = atomic_load(&p->running)))
        futex_wait(&p->running, running);
}

int pool_create(int n_threads, pool **out, error *err) {
    pool *p = calloc(1, sizeof *p + (size_t)n_threads * sizeof *p->threads);
    if (!p)
        return error_set(err, E_NO_MEMORY, "no memory for %d threads", n_threads);
    p->n_threads = 1;
    for (int i = 1; i < n_threads; i++) {
        pool_thread *thread = &p->threads[i - 1];
        *thread = (pool_thread){.pool = p, .part = i};
        int rc = pthread_create(&thread->handle, NULL, thread_main, thread);
        if (rc) {
            pool_destroy(p);
            return error_set(err, E_NO_MEMORY, "cannot start compute thread %d: %s", i,
                             strerror(rc));
        }
        p->n_threads++;
    }
    *out = p;
    return 0;
}

void pool_destroy(pool *p) {
    if (!p)
        return;
    p->stop = true;
    if (p->n_threads > 1)
        start_region(p);
    for (int i = 0; i < p->n_threads - 1; i++)
        pthread_join(p->threads[i].handle, NULL);
    free(p);
}
