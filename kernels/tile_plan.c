#include "kernels/tile_plan.h"

#include "engine/status.h"

typedef struct plan_costs {
    const tile_plan_args *args;
    float tile_ps; // the fixed cost of a tile, per weight
} plan_costs;

static int32_t rows_left(const tile_plan_args *args, int32_t rows, int32_t shape) {
    return rows > args->shapes[shape].rows ? rows - args->shapes[shape].rows : 0;
}

// choices[r]: the least cost of r rows whose group has had its first tile.
static void fill_choices(const plan_costs *costs, int32_t max_rows) {
    const tile_plan_args *args = costs->args;
    args->choices[0] = (tile_choice){0};
    for (int32_t r = 1; r <= max_rows; r++) {
        tile_choice best = {0};
        for (int32_t s = 0; s < (int32_t)args->n_shapes; s++) {
            float ps = args->shapes[s].warm_ps + costs->tile_ps +
                       args->choices[rows_left(args, r, s)].warm_ps;
            if (s == 0 || ps < best.warm_ps)
                best = (tile_choice){ps, s};
        }
        args->choices[r] = best;
    }
}

static int32_t first_shape(const plan_costs *costs, int32_t rows, float *total_ps) {
    const tile_plan_args *args = costs->args;
    int32_t best = 0;
    for (int32_t s = 0; s < (int32_t)args->n_shapes; s++) {
        float ps = args->shapes[s].cold_ps + costs->tile_ps +
                   args->choices[rows_left(args, rows, s)].warm_ps;
        if (s == 0 || ps < *total_ps) {
            *total_ps = ps;
            best = s;
        }
    }
    return best;
}

static int plan_group(const plan_costs *costs, int32_t group, int32_t first, tile_plan *plan) {
    const tile_plan_args *args = costs->args;
    int32_t left = args->group_rows[group];
    float total_ps = 0;
    int32_t shape = first_shape(costs, left, &total_ps);
    plan->active_groups++;
    plan->predicted_us += (double)total_ps * 1e-6 * (double)args->n * (double)args->k;
    while (left > 0) {
        int32_t height = args->shapes[shape].rows;
        int32_t rows = left < height ? left : height;
        if (plan->n_tiles == args->max_tiles)
            return E_TOO_LARGE;
        args->tiles[plan->n_tiles++] = (tile){group, first, rows, shape};
        plan->padded_rows += (size_t)(height - rows);
        first += rows;
        left -= rows;
        shape = args->choices[left].shape;
    }
    return 0;
}

int tile_plan_make(const tile_plan_args *args, tile_plan *out) {
    int32_t max_rows = 0;
    if (!args->n_shapes || !args->n || !args->k)
        return E_INVALID;
    for (size_t s = 0; s < args->n_shapes; s++)
        if (args->shapes[s].rows < 1)
            return E_INVALID;
    for (size_t g = 0; g < args->n_groups; g++) {
        if (args->group_rows[g] < 0)
            return E_INVALID;
        max_rows = args->group_rows[g] > max_rows ? args->group_rows[g] : max_rows;
    }
    if ((size_t)max_rows >= args->max_choices)
        return E_TOO_LARGE;

    plan_costs costs = {args, args->tile_us * 1e6f / ((float)args->n * (float)args->k)};
    fill_choices(&costs, max_rows);
    tile_plan plan = {0};
    int32_t first = 0;
    for (size_t g = 0; g < args->n_groups; g++) {
        if (!args->group_rows[g])
            continue;
        int rc = plan_group(&costs, (int32_t)g, first, &plan);
        if (rc)
            return rc;
        first += args->group_rows[g];
    }
    *out = plan;
    return 0;
}
