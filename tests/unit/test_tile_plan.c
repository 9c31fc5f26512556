// test_tile_plan.c: the planner's tiles cover every row once, and no other choice of tiles is
// predicted to be faster.
#include "kernels/tile_plan.h"

#include "engine/status.h"

#include <stdarg.h>
#include <stdbool.h>
#include <setjmp.h>
#include <cmocka.h>

#include <math.h>

enum { MAX_TILES = 4096, MAX_CHOICES = 2049, MAX_GROUPS = 64 };

static const tile_shape cpu_shapes[] = {{1, 50, 30}, {2, 50, 33}, {4, 55, 50}, {6, 70, 70}};
// A GPU pays for whole tiles: a high one is cheap per row but wasteful for few rows.
static const tile_shape gpu_shapes[] = {
    {8, 1.0f, 1.0f}, {16, 1.1f, 1.1f}, {32, 1.4f, 1.4f}, {64, 2.2f, 2.2f}, {128, 3.9f, 3.9f}};

static tile tiles[MAX_TILES];
static tile_choice choices[MAX_CHOICES];

static tile_plan_args args_of(const int32_t *rows, size_t n_groups, const tile_shape *shapes,
                              size_t n_shapes) {
    return (tile_plan_args){.n_groups = n_groups,
                            .n = 1024,
                            .k = 2048,
                            .group_rows = rows,
                            .n_shapes = n_shapes,
                            .shapes = shapes,
                            .tile_us = 0.1f,
                            .max_tiles = MAX_TILES,
                            .tiles = tiles,
                            .max_choices = MAX_CHOICES,
                            .choices = choices};
}

static double tile_cost(const tile_plan_args *args, int32_t shape, bool cold) {
    const tile_shape *s = &args->shapes[shape];
    return (double)(cold ? s->cold_ps : s->warm_ps) * 1e-6 * (double)args->n * (double)args->k +
           (double)args->tile_us;
}

static void check_cover(const tile_plan_args *args, const tile_plan *plan) {
    size_t t = 0, padded = 0, active = 0;
    int32_t slot = 0;
    double us = 0;
    for (size_t g = 0; g < args->n_groups; g++) {
        int32_t end = slot + args->group_rows[g];
        active += end > slot;
        for (bool cold = true; slot < end; cold = false, t++) {
            assert_true(t < plan->n_tiles);
            assert_int_equal(tiles[t].group, g);
            assert_int_equal(tiles[t].first, slot);
            assert_in_range(tiles[t].shape, 0, args->n_shapes - 1);
            assert_in_range(tiles[t].rows, 1, args->shapes[tiles[t].shape].rows);
            padded += (size_t)(args->shapes[tiles[t].shape].rows - tiles[t].rows);
            us += tile_cost(args, tiles[t].shape, cold);
            slot += tiles[t].rows;
        }
        assert_int_equal(slot, end);
    }
    assert_int_equal(t, plan->n_tiles);
    assert_int_equal(padded, plan->padded_rows);
    assert_int_equal(active, plan->active_groups);
    assert_true(fabs(us - plan->predicted_us) <= 1e-4 * us + 1e-9);
}

static double least_cost(const tile_plan_args *args, int32_t rows, bool cold) {
    double best = INFINITY;
    if (rows <= 0)
        return 0;
    for (int32_t s = 0; s < (int32_t)args->n_shapes; s++) {
        double us = tile_cost(args, s, cold) + least_cost(args, rows - args->shapes[s].rows, false);
        best = us < best ? us : best;
    }
    return best;
}

static void test_optimal(void **state) {
    (void)state;
    for (int32_t rows = 0; rows <= 13; rows++) {
        tile_plan plan;
        tile_plan_args args = args_of(&rows, 1, cpu_shapes, 4);
        assert_int_equal(tile_plan_make(&args, &plan), 0);
        check_cover(&args, &plan);
        double least = least_cost(&args, rows, true);
        assert_true(fabs(plan.predicted_us - least) <= 1e-4 * least + 1e-9);
    }
    for (int32_t rows = 1; rows <= 60; rows++) {
        tile_plan plan;
        tile_plan_args args = args_of(&rows, 1, gpu_shapes, 5);
        assert_int_equal(tile_plan_make(&args, &plan), 0);
        check_cover(&args, &plan);
        double least = least_cost(&args, rows, true);
        assert_true(fabs(plan.predicted_us - least) <= 1e-4 * least + 1e-9);
    }
}

static void test_cover(void **state) {
    (void)state;
    static const int32_t histograms[][8] = {{0, 0, 0, 0, 0, 0, 0, 0},
                                            {1, 0, 0, 5, 0, 0, 0, 2},
                                            {2048, 0, 1, 1, 1, 1, 1, 1},
                                            {64, 64, 64, 64, 64, 64, 64, 64},
                                            {7, 8, 9, 15, 16, 17, 127, 129}};
    for (size_t i = 0; i < sizeof histograms / sizeof *histograms; i++)
        for (int table = 0; table < 2; table++) {
            tile_plan plan;
            tile_plan_args args = table ? args_of(histograms[i], 8, gpu_shapes, 5)
                                        : args_of(histograms[i], 8, cpu_shapes, 4);
            assert_int_equal(tile_plan_make(&args, &plan), 0);
            check_cover(&args, &plan);
        }
}

// Skew decides: the same number of rows takes other shapes when it is spread over the groups.
static void test_skew(void **state) {
    (void)state;
    int32_t even[MAX_GROUPS], skewed[MAX_GROUPS] = {MAX_GROUPS * 2};
    for (size_t g = 0; g < MAX_GROUPS; g++)
        even[g] = 2;
    tile_plan plan;
    tile_plan_args args = args_of(even, MAX_GROUPS, gpu_shapes, 5);
    assert_int_equal(tile_plan_make(&args, &plan), 0);
    assert_int_equal(plan.padded_rows, 6 * MAX_GROUPS);
    assert_int_equal(tiles[0].shape, 0);
    args.group_rows = skewed;
    assert_int_equal(tile_plan_make(&args, &plan), 0);
    assert_int_equal(plan.padded_rows, 0);
    assert_int_equal(plan.n_tiles, 1);
    assert_int_equal(tiles[0].shape, 4);
}

static void test_refused(void **state) {
    (void)state;
    int32_t rows[2] = {5, 9};
    tile_plan plan;
    tile_plan_args good = args_of(rows, 2, cpu_shapes, 4), args = good;
    args.max_tiles = 2;
    assert_int_equal(tile_plan_make(&args, &plan), E_TOO_LARGE);
    args = good;
    args.max_choices = 9;
    assert_int_equal(tile_plan_make(&args, &plan), E_TOO_LARGE);
    args.max_choices = 10;
    assert_int_equal(tile_plan_make(&args, &plan), 0);
    args.n_shapes = 0;
    assert_int_equal(tile_plan_make(&args, &plan), E_INVALID);
    args = good;
    args.k = 0;
    assert_int_equal(tile_plan_make(&args, &plan), E_INVALID);
    rows[1] = -1;
    assert_int_equal(tile_plan_make(&good, &plan), E_INVALID);
    const tile_shape empty = {0, 1, 1};
    rows[1] = 1;
    args = args_of(rows, 2, &empty, 1);
    assert_int_equal(tile_plan_make(&args, &plan), E_INVALID);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_optimal),
        cmocka_unit_test(test_cover),
        cmocka_unit_test(test_skew),
        cmocka_unit_test(test_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
