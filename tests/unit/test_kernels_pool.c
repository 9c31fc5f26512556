// test_kernels_pool.c: every part of a region runs once, in any number of threads, and an idle pool
// uses no time.
#include "kernels/cpu/pool.h"
#include "kernels/kernels.h"

#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <cmocka.h>

#include <stdatomic.h>
#include <time.h>

enum { ITEMS = 1001, MAX_THREADS = 5 };

typedef struct work {
    int count[ITEMS];
    atomic_int parts;
} work;

static void count_items(void *user, int part, int n_parts) {
    work *w = user;
    size_t begin, end;
    pool_range(ITEMS, part, n_parts, &begin, &end);
    for (size_t i = begin; i < end; i++)
        w->count[i]++;
    atomic_fetch_add(&w->parts, 1);
}

static double process_seconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static void wait_ms(long ms) {
    nanosleep(&(struct timespec){ms / 1000, ms % 1000 * 1000000}, NULL);
}

// Regions follow at once, and after pauses in which the threads have gone to sleep.
static void test_regions(void **state) {
    (void)state;
    for (int threads = 1; threads <= MAX_THREADS; threads++) {
        static work w;
        pool *p = NULL;
        error err;
        w = (work){0};
        assert_int_equal(pool_create(threads, &p, &err), 0);
        int rounds = 0;
        for (; rounds < 200; rounds++) {
            if (rounds % 20 == 0)
                wait_ms(1);
            pool_run(p, count_items, &w);
            assert_int_equal(atomic_load(&w.parts), (rounds + 1) * threads);
        }
        for (int i = 0; i < ITEMS; i++)
            assert_int_equal(w.count[i], rounds);
        pool_destroy(p);
    }
    pool_destroy(NULL);
}

static void test_idle(void **state) {
    (void)state;
    static work w;
    pool *p = NULL;
    error err;
    assert_int_equal(pool_create(4, &p, &err), 0);
    pool_run(p, count_items, &w);
    wait_ms(20);
    double before = process_seconds();
    wait_ms(300);
    assert_true(process_seconds() - before < 0.003); // 1% of a core
    pool_destroy(p);
}

// As many threads as attention.threads may say, and a large machine has cores.
static void test_many_threads(void **state) {
    (void)state;
    kernel_backend_args args = {
        .device = "cpu:ref", .threads = 1024, .compute = DTYPE_F32, .max_rows = 1, .max_groups = 1};
    kernel_backend *backend;
    error err;
    if (kernel_backend_open(&args, &backend, &err))
        fail_msg("%s", err.text);
    kernel_backend_close(backend);
    args.threads++;
    assert_int_equal(kernel_backend_open(&args, &backend, &err), E_INVALID);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_regions),
        cmocka_unit_test(test_idle),
        cmocka_unit_test(test_many_threads),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
