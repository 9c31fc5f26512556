// route.c: the gate's choice of experts, and the sort of received entries by expert.
#include "kernels/cpu/cpu.h"

#include "engine/frame.h"

#include <math.h>

// Places expert e into the list of the best so far. NaN never beats a number, and an earlier expert
// stays ahead of an equal one.
static void insert_expert(const float *logits, uint16_t e, size_t *n, size_t top_k,
                          uint16_t *best) {
    size_t at = *n;
    while (at > 0 &&
           (logits[e] > logits[best[at - 1]] || (isnan(logits[best[at - 1]]) && !isnan(logits[e]))))
        at--;
    if (at == top_k)
        return;
    if (*n < top_k)
        (*n)++;
    for (size_t i = *n - 1; i > at; i--)
        best[i] = best[i - 1];
    best[at] = e;
}

static void route_row(const kernel_route_args *args, const float *logits, uint16_t *experts,
                      float *weights) {
    size_t n = 0;
    for (size_t e = 0; e < args->n_experts; e++)
        insert_expert(logits, (uint16_t)e, &n, args->top_k, experts);
    float max = logits[experts[0]], sum = 0;
    if (args->norm_top_k) {
        for (size_t i = 0; i < args->top_k; i++)
            sum += weights[i] = expf(logits[experts[i]] - max);
    } else {
        for (size_t e = 0; e < args->n_experts; e++)
            sum += expf(logits[e] - max);
        for (size_t i = 0; i < args->top_k; i++)
            weights[i] = expf(logits[experts[i]] - max);
    }
    for (size_t i = 0; i < args->top_k; i++)
        weights[i] /= sum;
}

static void route_part(void *user, int part, int n_parts) {
    const kernel_route_args *args = user;
    size_t begin, end;
    pool_range(args->rows, part, n_parts, &begin, &end);
    for (size_t r = begin; r < end; r++)
        route_row(args, (const float *)cpu_address(args->logits) + r * args->n_experts,
                  (uint16_t *)cpu_address(args->experts) + r * args->top_k,
                  (float *)cpu_address(args->weights) + r * args->top_k);
}

int cpu_route(kernel_queue *queue, const kernel_route_args *args) {
    cpu_run(cpu_of(queue), args->rows * args->n_experts * 32, route_part, (void *)(uintptr_t)args);
    return 0;
}

// A counting sort. group_rows counts first, then holds where the next slot of a group goes, and is
// counted back at the end: no array beside the outputs is needed.
int cpu_sort(kernel_queue *queue, const kernel_sort_args *args) {
    (void)queue;
    size_t entries = args->rows * args->top_k;
    memset(args->group_rows, 0, args->n_groups * sizeof *args->group_rows);
    for (size_t i = 0; i < entries; i++) {
        uint16_t expert = args->experts[i];
        if (expert == FRAME_NO_EXPERT)
            continue;
        int group = expert < args->n_experts ? args->local_group[expert] : -1;
        if (group < 0 || (size_t)group >= args->n_groups)
            return E_PROTOCOL;
        args->group_rows[group]++;
    }
    int32_t n = 0;
    for (size_t g = 0; g < args->n_groups; g++) {
        int32_t rows = args->group_rows[g];
        args->group_rows[g] = n;
        n += rows;
    }
    for (size_t i = 0; i < entries; i++) {
        if (args->experts[i] == FRAME_NO_EXPERT)
            continue;
        int32_t slot = args->group_rows[args->local_group[args->experts[i]]]++;
        args->slot_row[slot] = (int32_t)(i / args->top_k);
        args->slot_weight[slot] = args->weights[i];
    }
    for (size_t g = args->n_groups; g-- > 1;)
        args->group_rows[g] -= args->group_rows[g - 1];
    *args->n_slots = (size_t)n;
    return 0;
}
