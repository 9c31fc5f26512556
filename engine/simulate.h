// simulate.h: a discrete-event simulation of a bundle of x attention and y FFN workers.
//
// Section 5.1 of "Theoretically Optimal Attention/FFN Ratios in Disaggregated LLM Serving"
// (arXiv 2601.21351), whose equation numbers stand here. A lane is a batch in flight: a microbatch
// of B slots on every attention worker. It goes round six states: waiting for attention, attention,
// transfer, waiting for the FFN, FFN, transfer back. A worker computes one lane at a time, in the
// order in which they came; the FFN side starts when every worker's rows are there, and its y
// workers share them evenly. Between two steps of a lane, free slots are filled from one queue for
// the whole bundle, first come first served. A request of P and D tokens is in D steps, in which
// its slot holds P, P + 1, ... P + D - 1 tokens.
// Ownership: the caller's, but for what a run allocates and frees. Thread: any, runs share nothing.
#ifndef TANDEM_ENGINE_SIMULATE_H
#define TANDEM_ENGINE_SIMULATE_H

#include "engine/ratio.h"
#include "engine/trace.h"

#include <stdbool.h>

// Names as users write them. Lengths are whole numbers from 1.
#define SIM_LENGTHS_MAP(X)                                                                         \
    X(FIXED, "fixed")         /* all the mean */                                                   \
    X(UNIFORM, "uniform")     /* from 1 to 2 mean - 1 */                                           \
    X(GEOMETRIC, "geometric") /* the same chance to end at every token */                          \
    X(LOGNORMAL, "lognormal") /* spread is the deviation of the logarithm */

typedef enum sim_lengths_kind {
#define X(name, text) SIM_##name,
    SIM_LENGTHS_MAP(X)
#undef X
        SIM_N_LENGTHS
} sim_lengths_kind;

typedef struct sim_lengths {
    sim_lengths_kind kind;
    double mean, spread;
} sim_lengths;

typedef struct sim_args {
    ratio_law law;
    uint32_t batch, lanes, attention, ffn;
    uint64_t requests; // per attention worker; all wait at the start
    uint64_t seed;
    sim_lengths prompt, output;
    // In place of lengths: requests of a trace, drawn with the seed. With requests = 0 each comes
    // once, at its arrival, whose unit is that of the law.
    const trace *trace;
} sim_args;

typedef enum sim_state {
    SIM_WAITS_ATTENTION,
    SIM_IN_ATTENTION,
    SIM_TO_FFN,
    SIM_WAITS_FFN,
    SIM_IN_FFN,
    SIM_FROM_FFN,
    SIM_N_STATES
} sim_state;

typedef struct sim_result {
    uint64_t requests, tokens;
    double time;
    double throughput; // per instance, over the first 80% of the requests to end (21)
    double tpot;       // (22), a request's decode time counted from the start of its first step
    double idle_attention, idle_ffn; // (23), over the time of (21): the drain is no idleness
    // The steady window: every lane has run 5 times the mean output length, and requests wait.
    // NAN where there is none, as in a short run or a replayed trace.
    double steady_throughput, steady_cycle, steady_idle_attention, steady_idle_ffn;
    double states[SIM_N_STATES]; // shares of a lane's time, at its slowest attention worker
} sim_result;

enum { SIM_MAX_ATTENTION = 1024, SIM_MAX_SLOTS = 1 << 26 };
#define SIM_MAX_REQUESTS 1e9

// A length by a generator's state, any number at first. The lengths must be as simulate takes them.
uint32_t sim_draw_length(const sim_lengths *lengths, uint64_t *state);

// Deterministic: the same arguments, the same result. E_INVALID names the argument.
int simulate(const sim_args *args, sim_result *out, error *err);

#endif
