// tile_plan.h: chooses the tiles of a grouped matrix product from its histogram of rows per group.
//
// A tile computes up to shape.rows rows of one group for all n columns. The first tile of a group
// finds its weights in memory (cold), the later ones in a cache (warm); both costs are given per
// weight and already hold the work on the tile's rows, so that bytes and operations meet in one
// number. The plan with the least predicted time is exact (dynamic programming over the rows left).
// Plain data, no backend: the table of shapes says what the device can do.
// Thread: pure functions; the caller owns every array.
#ifndef TANDEM_KERNELS_TILE_PLAN_H
#define TANDEM_KERNELS_TILE_PLAN_H

#include <stddef.h>
#include <stdint.h>

typedef struct tile_shape {
    int32_t rows;
    float cold_ps; // picoseconds per weight of a group's first tile
    float warm_ps; // picoseconds per weight of its later tiles
} tile_shape;

typedef struct tile {
    int32_t group;
    int32_t first; // slot: rows of all groups counted from 0
    int32_t rows;  // real rows, 1..shapes[shape].rows
    int32_t shape;
} tile;

// Best way to go on with a number of rows left; scratch of the planner.
typedef struct tile_choice {
    float warm_ps;
    int32_t shape;
} tile_choice;

typedef struct tile_plan_args {
    size_t n_groups, n, k;
    const int32_t *group_rows; // (n_groups)
    size_t n_shapes;
    const tile_shape *shapes; // (n_shapes), rows >= 1
    float tile_us;            // fixed cost of a tile
    size_t max_tiles;
    tile *tiles; // (max_tiles), filled in ascending group and slot
    size_t max_choices;
    tile_choice *choices; // (max_choices), at least the rows of the largest group + 1
} tile_plan_args;

typedef struct tile_plan {
    size_t n_tiles;
    size_t padded_rows;   // rows of the chosen shapes beyond the real rows
    size_t active_groups; // groups with rows
    double predicted_us;
} tile_plan;

// 0, E_INVALID (no shapes, negative rows) or E_TOO_LARGE (an array is too short).
int tile_plan_make(const tile_plan_args *args, tile_plan *out);

#endif
