#include "engine/simulate.h"

#include "engine/random.h"

#include <math.h>
#include <stdlib.h>

// ---- Lengths ----

uint32_t sim_draw_length(const sim_lengths *lengths, uint64_t *state) {
    double mean = lengths->mean, value = mean;
    switch (lengths->kind) {
    case SIM_UNIFORM:
        value = 1 + floor(random_unit(state) * (2 * mean - 1));
        break;
    case SIM_GEOMETRIC:
        value = mean > 1 ? 1 + floor(log(random_unit(state)) / log1p(-1 / mean)) : 1;
        break;
    case SIM_LOGNORMAL: { // by Box and Muller
        double radius = sqrt(-2 * log(random_unit(state)));
        double normal = radius * cos(2 * M_PI * random_unit(state));
        value = mean * exp(lengths->spread * normal - lengths->spread * lengths->spread / 2);
        break;
    }
    case SIM_FIXED:
    case SIM_N_LENGTHS:
        break;
    }
    return (uint32_t)fmin(fmax(round(value), 1), TRACE_MAX_LENGTH);
}

// ---- State of a run ----

typedef struct slot {
    uint64_t last_step; // the lane's step that ends it
    double begin;
    uint32_t prompt, output;
} slot;

// The rows of one lane on one attention worker.
typedef struct microbatch {
    slot *heap; // (batch), a heap by last_step of n; memory of the run
    uint32_t n;
    uint64_t tokens; // KV tokens of all its rows
} microbatch;

typedef struct lane {
    microbatch *parts; // (attention); memory of the run
    double ready;      // the end of its step; INFINITY once it will not run again
    uint64_t steps;
    uint32_t rows; // of the step that ends at ready
} lane;

// What has been counted up to some time.
typedef struct totals {
    double time, busy_attention, busy_ffn;
    uint64_t tokens, steps;
} totals;

typedef struct run {
    const sim_args *args;
    lane *lanes;        // (args->lanes)
    double *free_at;    // (attention): when a worker is done with what it was given
    double ffn_free_at; // the FFN side's
    uint64_t rng;
    uint64_t n_requests, n_begun, n_ended;
    uint64_t mark, marked_tokens; // ceil(0.8 N), and the output of those that ended before it
    uint64_t warm_steps;
    uint32_t n_cold; // lanes that have not run warm_steps yet
    totals now, at_mark, at_warm, at_dry;
    double sum_tpot, states[SIM_N_STATES];
} run;

static void sift_down(microbatch *part, slot value, uint32_t at) {
    slot *heap = part->heap;
    for (;;) {
        uint32_t child = 2 * at + 1;
        if (child >= part->n)
            break;
        if (child + 1 < part->n && heap[child + 1].last_step < heap[child].last_step)
            child++;
        if (value.last_step <= heap[child].last_step)
            break;
        heap[at] = heap[child];
        at = child;
    }
    heap[at] = value;
}

static void push(microbatch *part, slot value) {
    slot *heap = part->heap;
    uint32_t at = part->n++;
    for (; at > 0 && value.last_step < heap[(at - 1) / 2].last_step; at = (at - 1) / 2)
        heap[at] = heap[(at - 1) / 2];
    heap[at] = value;
}

// ---- Between two steps of a lane ----

static void end_request(run *r, const slot *done, double now) {
    r->n_ended++;
    r->sum_tpot += (now - done->begin) / done->output;
    if (r->n_ended <= r->mark)
        r->marked_tokens += done->output;
    if (r->n_ended == r->mark) {
        r->at_mark = r->now;
        r->at_mark.time = now;
    }
}

static void end_step(run *r, lane *l, double now) {
    if (l->rows == 0)
        return;
    l->steps++;
    r->now.steps++;
    r->now.tokens += l->rows;
    r->now.time = now;
    for (uint32_t w = 0; w < r->args->attention; w++) {
        microbatch *part = &l->parts[w];
        part->tokens += part->n;
        while (part->n && part->heap[0].last_step == l->steps) {
            slot done = part->heap[0];
            part->tokens -= (uint64_t)done.prompt + done.output;
            if (--part->n)
                sift_down(part, part->heap[part->n], 0);
            end_request(r, &done, now);
        }
    }
    if (l->steps == r->warm_steps && --r->n_cold == 0)
        r->at_warm = r->now;
}

static bool replays(const sim_args *args) {
    return args->trace && args->requests == 0;
}

// Whether a request waits at this time.
static bool one_waits(const run *r, double now) {
    return r->n_begun < r->n_requests &&
           (!replays(r->args) || r->args->trace->requests[r->n_begun].arrival <= now);
}

static void begin_request(run *r, const lane *l, microbatch *part, double now) {
    const sim_args *args = r->args;
    slot s = {.begin = now};
    if (args->trace) {
        const trace_request *from = args->trace->requests;
        from += replays(args) ? r->n_begun : random_next(&r->rng) % args->trace->n;
        s.prompt = from->prompt;
        s.output = from->output;
    } else {
        s.prompt = sim_draw_length(&args->prompt, &r->rng);
        s.output = sim_draw_length(&args->output, &r->rng);
    }
    s.last_step = l->steps + s.output;
    part->tokens += s.prompt;
    push(part, s);
    if (++r->n_begun == r->n_requests)
        r->at_dry = r->now;
}

// To the worker with the fewest rows first: where all slots get filled the order is no matter.
static void refill(run *r, lane *l, double now) {
    uint32_t batch = r->args->batch, level = batch, n = r->args->attention;
    for (uint32_t w = 0; w < n; w++)
        level = l->parts[w].n < level ? l->parts[w].n : level;
    for (; level < batch; level++)
        for (uint32_t w = 0; w < n; w++)
            if (l->parts[w].n == level) {
                if (!one_waits(r, now))
                    return;
                begin_request(r, l, &l->parts[w], now);
            }
}

// ---- A step ----

// Sends a lane once round from `now`, and sets when it is back.
static void begin_step(run *r, lane *l, double now) {
    const ratio_law *law = &r->args->law;
    double all_there = 0, back = 0, begin = now, end = now, half = 0;
    l->rows = 0;
    for (uint32_t w = 0; w < r->args->attention; w++) {
        const microbatch *part = &l->parts[w];
        if (part->n == 0)
            continue;
        double takes = law->alpha_a * (double)part->tokens + law->beta_a;
        double from = fmax(now, r->free_at[w]);
        double transfer = (law->alpha_c * part->n + law->beta_c) / 2;
        r->free_at[w] = from + takes;
        r->now.busy_attention += takes;
        l->rows += part->n;
        back = fmax(back, transfer);
        if (from + takes + transfer > all_there) {
            all_there = from + takes + transfer;
            begin = from;
            end = from + takes;
            half = transfer;
        }
    }
    double ffn = law->alpha_f * l->rows / r->args->ffn + law->beta_f;
    double ffn_begin = fmax(all_there, r->ffn_free_at);
    r->ffn_free_at = ffn_begin + ffn;
    r->now.busy_ffn += ffn;
    l->ready = r->ffn_free_at + back;
    r->states[SIM_WAITS_ATTENTION] += begin - now;
    r->states[SIM_IN_ATTENTION] += end - begin;
    r->states[SIM_TO_FFN] += half;
    r->states[SIM_WAITS_FFN] += ffn_begin - all_there;
    r->states[SIM_IN_FFN] += ffn;
    r->states[SIM_FROM_FFN] += back;
}

// All that happens to a lane at the end of its step; the lane that is ready first comes first, so
// the workers it asks for next have been given all that comes before it.
static void turn(run *r, lane *l) {
    double now = l->ready;
    end_step(r, l, now);
    refill(r, l, now);
    for (uint32_t w = 0; w < r->args->attention; w++)
        if (l->parts[w].n) {
            begin_step(r, l, now);
            return;
        }
    l->rows = 0;
    l->ready = r->n_begun < r->n_requests ? r->args->trace->requests[r->n_begun].arrival : INFINITY;
}

// ---- A run ----

static int check_lengths(const sim_lengths *lengths, const char *name, error *err) {
    if (!(lengths->mean >= 1 && lengths->mean <= TRACE_MAX_LENGTH / 16))
        return error_set(err, E_INVALID, "%s: expected a mean of 1 to %d tokens, not %g", name,
                         TRACE_MAX_LENGTH / 16, lengths->mean);
    if ((unsigned)lengths->kind >= SIM_N_LENGTHS)
        return error_set(err, E_INVALID, "%s: unknown distribution", name);
    if (lengths->kind == SIM_LOGNORMAL && !(lengths->spread >= 0 && lengths->spread <= 4))
        return error_set(err, E_INVALID, "%s: expected a spread of 0 to 4, not %g", name,
                         lengths->spread);
    return E_OK;
}

static int check(const sim_args *a, error *err) {
    int rc = ratio_law_check(&a->law, err);
    if (rc == E_OK && !a->trace)
        rc = check_lengths(&a->prompt, "prefill", err);
    if (rc == E_OK && !a->trace)
        rc = check_lengths(&a->output, "decode", err);
    if (rc != E_OK)
        return rc;
    if (a->attention < 1 || a->attention > SIM_MAX_ATTENTION || a->ffn < 1 ||
        a->ffn > SIM_MAX_ATTENTION)
        return error_set(err, E_INVALID,
                         "ratio: expected 1 to %d workers of a kind, not %u attention and %u FFN",
                         SIM_MAX_ATTENTION, a->attention, a->ffn);
    if (a->lanes < 1 || a->lanes > RATIO_MAX_LANES)
        return error_set(err, E_INVALID, "lanes: expected 1 to %d, not %u", RATIO_MAX_LANES,
                         a->lanes);
    if (a->batch < 1 || (uint64_t)a->batch * a->lanes * a->attention > SIM_MAX_SLOTS)
        return error_set(err, E_INVALID,
                         "batch: %u slots in each of %u microbatches: expected 1 to "
                         "%d in all",
                         a->batch, a->lanes * a->attention, SIM_MAX_SLOTS);
    if (a->trace && a->trace->n == 0)
        return error_set(err, E_INVALID, "the trace is empty");
    if (!a->trace && a->requests == 0)
        return error_set(err, E_INVALID, "requests: expected 1 or more");
    if ((double)a->requests * a->attention > SIM_MAX_REQUESTS)
        return error_set(err, E_INVALID, "requests: at most %g in all", SIM_MAX_REQUESTS);
    return E_OK;
}

static double mean_output(const sim_args *a) {
    double sum = 0;
    if (!a->trace)
        return a->output.mean;
    for (size_t i = 0; i < a->trace->n; i++)
        sum += a->trace->requests[i].output;
    return sum / (double)a->trace->n;
}

static double idle(double busy, double time, double workers) {
    return time > 0 ? fmax(0, 1 - busy / (time * workers)) : 0;
}

static void report(const run *r, sim_result *out) {
    const sim_args *a = r->args;
    double instances = (double)a->attention + a->ffn, around = 0;
    const totals *from = &r->at_warm, *to = &r->at_dry;
    sim_result result = {.requests = r->n_requests,
                         .tokens = r->now.tokens,
                         .time = r->now.time,
                         .tpot = r->sum_tpot / (double)r->n_requests,
                         .steady_throughput = NAN,
                         .steady_cycle = NAN,
                         .steady_idle_attention = NAN,
                         .steady_idle_ffn = NAN};
    result.throughput = (double)r->marked_tokens / (instances * r->at_mark.time);
    result.idle_attention = idle(r->at_mark.busy_attention, r->at_mark.time, a->attention);
    result.idle_ffn = idle(r->at_mark.busy_ffn, r->at_mark.time, 1);
    // A window of less than the mean life of a request would show chance alone.
    if (r->n_cold == 0 && !replays(a) &&
        to->steps >= from->steps + a->lanes * (r->warm_steps / 5)) {
        double time = to->time - from->time;
        result.steady_throughput = (double)(to->tokens - from->tokens) / (instances * time);
        result.steady_cycle = time / (double)(to->steps - from->steps);
        result.steady_idle_attention =
            idle(to->busy_attention - from->busy_attention, time, a->attention);
        result.steady_idle_ffn = idle(to->busy_ffn - from->busy_ffn, time, 1);
    }
    for (int i = 0; i < SIM_N_STATES; i++)
        around += r->states[i];
    for (int i = 0; i < SIM_N_STATES; i++)
        result.states[i] = r->states[i] / around;
    *out = result;
}

static int allocate(run *r) {
    const sim_args *a = r->args;
    size_t n_parts = (size_t)a->lanes * a->attention;
    r->lanes = calloc(a->lanes, sizeof *r->lanes);
    r->free_at = calloc(a->attention, sizeof *r->free_at);
    microbatch *parts = calloc(n_parts, sizeof *parts);
    slot *slots = calloc(n_parts * a->batch, sizeof *slots);
    if (!r->lanes || !r->free_at || !parts || !slots) {
        free(parts);
        free(slots);
        return E_NO_MEMORY;
    }
    for (size_t i = 0; i < n_parts; i++)
        parts[i].heap = slots + i * a->batch;
    for (uint32_t i = 0; i < a->lanes; i++)
        r->lanes[i].parts = parts + (size_t)i * a->attention;
    return E_OK;
}

static void release(run *r) {
    if (r->lanes && r->lanes[0].parts) {
        free(r->lanes[0].parts[0].heap);
        free(r->lanes[0].parts);
    }
    free(r->lanes);
    free(r->free_at);
}

int simulate(const sim_args *args, sim_result *out, error *err) {
    run r = {.args = args, .rng = args->seed};
    int rc = check(args, err);
    if (rc != E_OK)
        return rc;
    if (allocate(&r) != E_OK) {
        release(&r);
        return error_set(err, E_NO_MEMORY, "simulate: out of memory");
    }
    r.n_requests = replays(args) ? args->trace->n : args->requests * args->attention;
    r.mark = (r.n_requests * 4 + 4) / 5;
    r.warm_steps = (uint64_t)ceil(5 * mean_output(args));
    r.n_cold = args->lanes;
    for (;;) {
        lane *first = &r.lanes[0];
        for (uint32_t i = 1; i < args->lanes; i++)
            if (r.lanes[i].ready < first->ready)
                first = &r.lanes[i];
        if (isinf(first->ready))
            break;
        turn(&r, first);
    }
    report(&r, out);
    release(&r);
    return E_OK;
}
