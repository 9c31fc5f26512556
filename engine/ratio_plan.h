// ratio_plan.h: the numbers of attention and FFN workers that the ratio's forms make best, what the
// answer depends on, and the law of a machine from its data sheet.
//
// Pure, as ratio.h. The setup of every function has passed ratio_setup_check.
#ifndef TANDEM_ENGINE_RATIO_PLAN_H
#define TANDEM_ENGINE_RATIO_PLAN_H

#include "engine/ratio.h"

#include <stdbool.h>

// What binds a search; 0 is no limit.
typedef struct ratio_limits {
    uint32_t pool;    // workers of both kinds; without one, the topology is r:min_ffn or 1:y
    uint32_t min_ffn; // FFN workers whose memory holds the experts
    double max_tpot;  // time per output token
    double kv_tokens; // memory of an attention worker
} ratio_limits;

typedef enum ratio_bound {
    RATIO_BOUND_ATTENTION,
    RATIO_BOUND_FFN,
    RATIO_BOUND_COMMUNICATION,
    RATIO_BOUND_LOOP, // a lane's own way round: attention, transfers and FFN, one after another
} ratio_bound;

typedef struct ratio_choice {
    uint32_t attention, ffn;
    double r, cycle, throughput; // per instance
    double tpot;                 // of a request: each of its steps is one of the lane's m cycles
    double idle_attention, idle_ffn;
    ratio_bound bound;
} ratio_choice;

// One process computes attention and FFN of the same rows, one after another, on every instance.
typedef struct ratio_colocated {
    double batch, cycle, throughput, tpot;
} ratio_colocated;

// How much the answer moves with a number: percent per percent.
enum { RATIO_N_SENSITIVITIES = 7 };
typedef struct ratio_sensitivity {
    const char *name; // a coefficient of the law, or theta
    double r_star, throughput;
} ratio_sensitivity;

const char *ratio_bound_name(ratio_bound bound);

// KV tokens that an attention worker must hold: the mean of its lanes' slots and three standard
// deviations.
double ratio_kv_tokens(const ratio_setup *setup);

// The choice (x, y) of most throughput per instance under the limits; of equals, the smallest.
// E_FULL with the limit that nothing meets.
int ratio_search(const ratio_setup *setup, ratio_form form, const ratio_limits *limits,
                 ratio_choice *out, error *err);
// What a form says of one choice.
void ratio_evaluate(const ratio_setup *setup, ratio_form form, uint32_t x, uint32_t y,
                    ratio_choice *out);

// The largest batch up to that of all lanes of an attention worker (the same KV memory) whose TPOT
// is within max_tpot (0: any). False when not even one slot is.
bool ratio_colocate(const ratio_setup *setup, double max_tpot, ratio_colocated *out);

// Elasticities of r* and its throughput, in the order of the law's fields, theta last.
void ratio_sensitivities(const ratio_setup *setup, ratio_sensitivity out[RATIO_N_SENSITIVITIES]);

// ---- Appendix B ----
typedef struct ratio_hardware {
    double hbm_bytes_s, hbm_efficiency; // (25)
    double flops_s, flops_efficiency;   // (28)
    double net_bytes_s;                 // what the topology leaves of the links (35)
} ratio_hardware;

typedef struct ratio_shape {
    double hidden, expert_intermediate;
    double kv_bytes;         // of a token (24)
    double wire_bytes;       // there and back for an element of a row (34): 3 is INT8 out, BF16 in
    double experts, top_k;   // of the model
    double experts_per_card; // of an FFN worker
    double mtp_depth;        // tokens guessed beside each token
} ratio_shape;

// The slopes in seconds (26, 33, 38); the intercepts, which only a measurement gives, are those in
// *law already.
int ratio_law_from_hardware(const ratio_hardware *hardware, const ratio_shape *shape,
                            ratio_law *law, error *err);

#endif
