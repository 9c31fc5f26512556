// gemm.c: the dense and grouped matrix product.
//
// The planner cuts the rows of every group into tiles. Threads own contiguous ranges of columns, in
// every group: no two threads write one output element, so slots that share an output row are added
// in the order of the groups. A thread walks groups, panels, tiles: a panel comes from memory for
// the first tile and from the cache for the others.
#include "kernels/cpu/cpu.h"

typedef struct gemm_job {
    cpu_backend *cpu;
    const kernel_gemm_args *args;
    size_t n, k, columns;
    size_t n_tiles;
} gemm_job;

// Columns of the tile in y, and the output features they are.
typedef struct tile_columns {
    size_t first, end; // columns of the matrix
    size_t out;        // first output feature
    size_t n_out;
} tile_columns;

static void add_bias(const gemm_job *job, const tile_columns *span, float *y) {
    if (job->args->bias.mem)
        job->cpu->isa.add_scaled(y, (const float *)cpu_address(job->args->bias) + span->out, 1.0f,
                                 span->n_out);
}

static void finish_f32(const gemm_job *job, const tile_columns *span, float *y, float *out,
                       float scale) {
    add_bias(job, span, y);
    if (job->args->epilogue == KERNEL_EPILOGUE_ADD) {
        job->cpu->isa.add_scaled(out, y, scale, span->n_out);
        return;
    }
    if (job->args->epilogue == KERNEL_EPILOGUE_SIGMOID)
        job->cpu->isa.sigmoid(y, span->end - span->first);
    memcpy(out, y, span->n_out * sizeof *out);
}

static void finish_act(const gemm_job *job, const tile_columns *span, float *y, void *out) {
    const kernel_gemm_args *args = job->args;
    if (args->epilogue == KERNEL_EPILOGUE_SWIGLU) {
        float product[CPU_PANEL / 2];
        job->cpu->isa.swiglu(y, span->end - span->first, product);
        cpu_store_act(job->cpu, product, out, span->n_out);
        return;
    }
    add_bias(job, span, y);
    cpu_store_act(job->cpu, y, out, span->n_out);
}

// What the next panel of this thread is; tile i of n fetches its share of it.
typedef struct next_panel {
    const uint8_t *weights;
    size_t bytes;
} next_panel;

// What ADD adds to is scattered over the rows: it is on its way while the tile is multiplied.
static void fetch_outputs(const gemm_job *job, const tile *t, const tile_columns *span) {
    const kernel_gemm_args *args = job->args;
    for (int r = 0; r < t->rows; r++) {
        int slot = t->first + r;
        size_t row = (size_t)(args->out_index ? args->out_index[slot] : slot);
        const float *out = (const float *)cpu_address(args->out) + row * job->n + span->out;
        for (size_t c = 0; c < span->n_out; c += CPU_VECTOR)
            __builtin_prefetch(out + c, 1);
    }
}

static void run_tile(const gemm_job *job, const tile *t, const tile_columns *span,
                     const next_panel *share, float *y) {
    const kernel_gemm_args *args = job->args;
    const cpu_matrix *m = (const cpu_matrix *)args->matrices[t->group];
    size_t act = dtype_bytes(job->cpu->base.compute);
    int height = job->cpu->isa.shapes[t->shape].rows;
    const void *rows[CPU_MAX_TILE_ROWS];
    for (int r = 0; r < height; r++) {
        int slot = t->first + (r < t->rows ? r : t->rows - 1);
        size_t row = (size_t)(args->a_index ? args->a_index[slot] : slot);
        rows[r] = (const uint8_t *)cpu_address(args->a) + row * job->k * act;
    }
    if (args->epilogue == KERNEL_EPILOGUE_ADD)
        fetch_outputs(job, t, span);
    job->cpu->isa.gemm_tile(&(gemm_tile){
        .a = rows,
        .rows = t->rows,
        .vectors = (int)((span->end - span->first) / CPU_VECTOR),
        .weights = cpu_column(m, span->first),
        .k = job->k,
        .width = cpu_panel_width(m, span->first),
        .y = y,
        .next = share->weights,
        .next_bytes = share->bytes,
    });
    bool swiglu = args->epilogue == KERNEL_EPILOGUE_SWIGLU;
    size_t stride = swiglu ? job->n / 2 : job->n;
    for (int r = 0; r < t->rows; r++, y += CPU_PANEL) {
        int slot = t->first + r;
        size_t row = (size_t)(args->out_index ? args->out_index[slot] : slot);
        uint8_t *out = cpu_address(args->out);
        if (swiglu || args->epilogue == KERNEL_EPILOGUE_ACT)
            finish_act(job, span, y, out + (row * stride + span->out) * act);
        else
            finish_f32(job, span, y, (float *)(void *)out + row * stride + span->out,
                       args->scale ? args->scale[slot] : 1.0f);
    }
}

static tile_columns columns_at(const gemm_job *job, size_t first, size_t limit) {
    bool swiglu = job->args->epilogue == KERNEL_EPILOGUE_SWIGLU;
    size_t end = (first / CPU_PANEL + 1) * CPU_PANEL;
    tile_columns span = {.first = first, .end = end < limit ? end : limit};
    span.out = swiglu ? first / 2 : first;
    size_t out_end = swiglu ? span.end / 2 : span.end;
    size_t n_out = swiglu ? job->n / 2 : job->n;
    span.n_out = (out_end < n_out ? out_end : n_out) - span.out;
    return span;
}

// The panel that follows column c: of the same group, else the first of the next group.
static next_panel panel_after(const gemm_job *job, size_t c, size_t begin, size_t end,
                              size_t group_tile, size_t next_tile) {
    const tile *tiles = job->cpu->tiles;
    if (c >= end && next_tile == job->n_tiles)
        return (next_panel){NULL, 0};
    size_t at = c < end ? group_tile : next_tile, column = c < end ? c : begin;
    const cpu_matrix *m = (const cpu_matrix *)job->args->matrices[tiles[at].group];
    column = column / CPU_PANEL * CPU_PANEL;
    size_t bytes = cpu_panel_width(m, column) * m->k_pad * dtype_bytes(job->cpu->base.compute);
    return (next_panel){cpu_column(m, column), bytes};
}

// Tiles first..last of one group, for columns begin..end; tile last is the next group's first.
static void run_group(const gemm_job *job, size_t first, size_t last, size_t begin, size_t end,
                      float *y) {
    for (size_t c = begin; c < end;) {
        tile_columns span = columns_at(job, c, end);
        // A single tile waits for memory all the time, and its own panel comes first.
        next_panel next = {NULL, 0};
        if (last - first > 1)
            next = panel_after(job, span.end, begin, end, first, last);
        for (size_t i = first; i < last; i++) {
            size_t from, to;
            pool_range(next.bytes, (int)(i - first), (int)(last - first), &from, &to);
            next_panel share = {next.bytes ? next.weights + from : NULL, to - from};
            run_tile(job, &job->cpu->tiles[i], &span, &share, y);
        }
        c = span.end;
    }
}

static void gemm_part(void *user, int part, int n_parts) {
    const gemm_job *job = user;
    const tile *tiles = job->cpu->tiles;
    size_t begin, end;
    pool_range(round_up(job->columns, CPU_UNIT) / CPU_UNIT, part, n_parts, &begin, &end);
    begin *= CPU_UNIT;
    end = end * CPU_UNIT < job->columns ? end * CPU_UNIT : job->columns;
    if (job->cpu->isa.enter)
        job->cpu->isa.enter();
    for (size_t t = 0, t_end; t < job->n_tiles; t = t_end) {
        for (t_end = t; t_end < job->n_tiles && tiles[t_end].group == tiles[t].group;)
            t_end++;
        run_group(job, t, t_end, begin, end, job->cpu->scratch[part].y);
    }
    if (job->cpu->isa.leave)
        job->cpu->isa.leave();
}

int cpu_gemm(kernel_queue *queue, const kernel_gemm_args *args) {
    cpu_backend *cpu = cpu_of(queue);
    size_t g = 0;
    while (!args->group_rows[g])
        g++;
    const cpu_matrix *shape = (const cpu_matrix *)args->matrices[g];
    tile_plan_args plan_args = {
        .n_groups = args->n_groups,
        .n = shape->columns,
        .k = shape->base.k,
        .group_rows = args->group_rows,
        .n_shapes = cpu->isa.n_shapes,
        .shapes = cpu->isa.shapes,
        .max_tiles = cpu->base.max_rows,
        .tiles = cpu->tiles,
        .max_choices = cpu->base.max_rows + 1,
        .choices = cpu->choices,
    };
    tile_plan plan;
    int rc = tile_plan_make(&plan_args, &plan);
    if (rc)
        return rc;
    gemm_job job = {
        .cpu = cpu,
        .args = args,
        .n = shape->base.n,
        .k = shape->base.k,
        .columns = shape->columns,
        .n_tiles = plan.n_tiles,
    };
    cpu_run(cpu, shape->base.bytes * plan.n_tiles, gemm_part, &job);
    if (args->report)
        *args->report = (kernel_gemm_report){
            .padded_rows = plan.padded_rows,
            .active_groups = plan.active_groups,
            .tiles = plan.n_tiles,
        };
    return 0;
}
