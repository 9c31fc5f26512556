// attention.c: causal attention over the paged cache.
//
// The rows of a (sequence, kv head) are its (query, head of the group) pairs, queries first; a tile
// is up to 32 of them, which share every K and V page they load. A tile walks the blocks of 64
// tokens that its rows see with an online softmax. Blocks begin at absolute positions and a row
// takes part only in the blocks that it sees, so its result is the same in a chunk of any size, in
// any tile, and in a decode step.
#include "kernels/cpu/cpu.h"

#include <math.h>

typedef struct attention_job {
    cpu_backend *cpu;
    const kernel_attention_args *args;
    size_t total_cost;
} attention_job;

// One tile and what it keeps while it walks the blocks.
typedef struct attention_tile {
    const attention_job *job;
    const kernel_sequence *sequence;
    const cpu_scratch *scratch;
    size_t kv_head;
    size_t first; // row of the (sequence, kv head)
    int rows;
    int position[CPU_ATTENTION_ROWS];
    softmax_state state[CPU_ATTENTION_ROWS];
    float rescale[CPU_ATTENTION_ROWS];
} attention_tile;

static size_t group_of(const kernel_attention_args *args) {
    return args->n_heads / args->n_kv_heads;
}

// First position that a query at this position sees.
static int window_start(const kernel_attention_args *args, int position) {
    return args->window && (size_t)position >= args->window ? position + 1 - (int)args->window : 0;
}

static size_t row_offset(const attention_tile *t, int row) {
    const kernel_attention_args *args = t->job->args;
    size_t flat = t->first + (size_t)row, group = group_of(args);
    size_t query = (size_t)t->sequence->q_row0 + flat / group;
    return (query * args->n_heads + t->kv_head * group + flat % group) * args->head_dim;
}

static void set_pages(const attention_tile *t, int block, attention_block *b) {
    const kernel_attention_args *args = t->job->args;
    const cpu_kv *kv = (const cpu_kv *)args->kv;
    int n_pages = (t->sequence->kv_tokens + KERNEL_PAGE_TOKENS - 1) / KERNEL_PAGE_TOKENS;
    for (int i = 0; i < 2 * CPU_BLOCK_PAGES; i++) {
        int page = block * CPU_BLOCK_PAGES + i;
        page = page < n_pages ? page : n_pages - 1;
        const uint8_t *at = cpu_page(kv, args->layer, (size_t)t->sequence->pages[page], t->kv_head);
        if (i < CPU_BLOCK_PAGES) {
            b->k_page[i] = at;
            b->v_page[i] = at + kv->k_bytes;
        } else {
            b->next_k[i - CPU_BLOCK_PAGES] = at;
        }
    }
}

// Rows first..end of the tile see some of the block.
static void run_block(attention_tile *t, int block, int first, int end) {
    const kernel_attention_args *args = t->job->args;
    const cpu_backend *cpu = t->job->cpu;
    const cpu_kv *kv = (const cpu_kv *)args->kv;
    size_t act = dtype_bytes(cpu->base.compute);
    int start = block * CPU_BLOCK, left = t->sequence->kv_tokens - start;
    attention_block b = {
        .rows = end - first,
        .tokens = left < CPU_BLOCK ? left : CPU_BLOCK,
        .head_dim = args->head_dim,
        .value_stride = kv->value_stride,
        .scores = t->scratch->scores,
        .p = t->scratch->p,
        .rescale = t->rescale,
        .out = t->scratch->staging + (size_t)first * kv->value_stride,
    };
    set_pages(t, block, &b);
    for (int r = 0; r < b.rows; r++)
        b.q[r] = (const uint8_t *)cpu_address(args->q) + row_offset(t, first + r) * act;
    cpu->isa.scores(&b);
    for (int r = 0; r < b.rows; r++) {
        int position = t->position[first + r];
        int from = window_start(args, position) - start, to = position + 1 - start;
        t->rescale[r] = cpu->isa.softmax(
            b.scores + r * CPU_BLOCK, from > 0 ? from : 0, to < CPU_BLOCK ? to : CPU_BLOCK,
            args->scale, &t->state[first + r], (uint8_t *)b.p + (size_t)r * CPU_BLOCK * act);
    }
    cpu->isa.values(&b);
}

static void run_tile(attention_tile *t) {
    const kernel_attention_args *args = t->job->args;
    const cpu_kv *kv = (const cpu_kv *)args->kv;
    float *out = t->scratch->staging;
    memset(out, 0, (size_t)t->rows * kv->value_stride * sizeof *out);
    for (int r = 0; r < t->rows; r++) {
        size_t query = (t->first + (size_t)r) / group_of(args);
        t->position[r] = t->sequence->kv_tokens - t->sequence->q_rows + (int)query;
        t->state[r] = (softmax_state){-INFINITY, 0};
    }
    int last = t->position[t->rows - 1] / CPU_BLOCK, first = 0, end = 0;
    for (int block = window_start(args, t->position[0]) / CPU_BLOCK; block <= last; block++) {
        int start = block * CPU_BLOCK;
        while (first < t->rows && t->position[first] < start)
            first++;
        end = end < first ? first : end;
        while (end < t->rows && window_start(args, t->position[end]) < start + CPU_BLOCK)
            end++;
        run_block(t, block, first, end);
    }
    for (int r = 0; r < t->rows; r++) {
        float *row = out + (size_t)r * kv->value_stride, inverse = 1.0f / t->state[r].sum;
        for (size_t d = 0; d < args->head_dim; d++)
            row[d] *= inverse;
        size_t act = dtype_bytes(t->job->cpu->base.compute);
        cpu_store_act(t->job->cpu, row, (uint8_t *)cpu_address(args->out) + row_offset(t, r) * act,
                      args->head_dim);
    }
}

// Tokens read and rows computed, roughly: what a tile of a sequence costs.
static size_t tile_cost(const kernel_attention_args *args, const kernel_sequence *sequence,
                        int rows) {
    size_t tokens = (size_t)sequence->kv_tokens;
    tokens = args->window && args->window < tokens ? args->window : tokens;
    return (tokens + CPU_BLOCK) * (size_t)(rows + 4);
}

// Visits every tile in one order; a thread takes those whose cost begins in its share.
static size_t walk_tiles(const attention_job *job, size_t from, size_t to,
                         const cpu_scratch *scratch) {
    const kernel_attention_args *args = job->args;
    size_t cost = 0;
    for (size_t s = 0; s < args->n_sequences; s++) {
        const kernel_sequence *sequence = &args->sequences[s];
        size_t rows = (size_t)sequence->q_rows * group_of(args);
        for (size_t head = 0; rows && head < args->n_kv_heads; head++)
            for (size_t first = 0; first < rows; first += CPU_ATTENTION_ROWS) {
                size_t left = rows - first;
                int n = left < CPU_ATTENTION_ROWS ? (int)left : CPU_ATTENTION_ROWS;
                if (cost >= from && cost < to) {
                    attention_tile t;
                    t.job = job;
                    t.sequence = sequence;
                    t.scratch = scratch;
                    t.kv_head = head;
                    t.first = first;
                    t.rows = n;
                    run_tile(&t);
                }
                cost += tile_cost(args, sequence, n);
            }
    }
    return cost;
}

static void attention_part(void *user, int part, int n_parts) {
    const attention_job *job = user;
    size_t from, to;
    pool_range(job->total_cost, part, n_parts, &from, &to);
    walk_tiles(job, from, to, &job->cpu->scratch[part]);
}

int cpu_attention(kernel_queue *queue, const kernel_attention_args *args) {
    attention_job job = {cpu_of(queue), args, 0};
    job.total_cost = walk_tiles(&job, 0, 0, NULL);
    cpu_run(job.cpu, job.total_cost * args->head_dim, attention_part, &job);
    return 0;
}
