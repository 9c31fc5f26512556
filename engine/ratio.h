// ratio.h: how many attention workers an FFN worker should have.
//
// Pure functions over the latency law of a machine and the load of its requests. Equation numbers
// are those of "Theoretically Optimal Attention/FFN Ratios in Disaggregated LLM Serving"
// (arXiv 2601.21351, first version); the barrier-corrected form is that of its later versions, the
// form with lanes was found by simulation (engine/simulate). Times are in the unit of the law
// (cycles, milliseconds); a load is counted in tokens of KV cache.
// Three forms of the time of a step: the mean field (5), which knows averages only; the barrier,
// where a step waits for the slowest of the x attention workers; and lanes, where m microbatches
// are in flight, about max(mu_A + sigma_A kappa_x / sqrt(m), t_F, (mu_A + sigma_A kappa_x + t_C +
// t_F) / m) with the first maximum taken over the distribution, not over means.
// The corrected forms take the load of a microbatch as normal. With table 2, its slopes scaled to
// the batch to keep the balance, and geometric lengths, the form with lanes is within 2% of the
// simulation at 128 slots or more, 4% at 16, and 9% at 4.
// Ownership: none, everything is by value. Thread: any.
#ifndef TANDEM_ENGINE_RATIO_H
#define TANDEM_ENGINE_RATIO_H

#include "engine/status.h"

#include <stdint.h>

// t_A(T) = alpha_a T + beta_a over T tokens of KV (2), t_F(n) = alpha_f n + beta_f over n rows (3),
// t_C(B) = alpha_c B + beta_c for the round trip of B rows (4).
typedef struct ratio_law {
    double alpha_a, beta_a, alpha_f, beta_f, alpha_c, beta_c;
} ratio_law;

#define RATIO_LAW_MAP(X) X(alpha_a) X(beta_a) X(alpha_f) X(beta_f) X(alpha_c) X(beta_c)

// What a slot of a batch holds, in the steady state: theta tokens on average, with variance nu2.
typedef struct ratio_load {
    double mean_prompt, mean_output, theta, nu2;
} ratio_load;

// Sums over finished requests of P prompt and D output tokens; {0} is none.
typedef struct ratio_sums {
    double n, p, d, dp, ages, dpp, page, ages2;
} ratio_sums;

typedef enum ratio_regime {
    RATIO_ATTENTION,     // the optimum is where attention and FFN take the same time
    RATIO_COMMUNICATION, // where communication and FFN do
    RATIO_FFN,           // at the peak of the FFN-bound part
} ratio_regime;

// The closed form: r* with its three candidates.
typedef struct ratio_rule {
    double r_attention, r_communication, r_critical, r_peak; // (15) (16) (17) (18)
    double r_star, throughput;                               // (19) (20)
    double t_attention, t_communication;
    ratio_regime regime;
} ratio_rule;

typedef enum ratio_form { RATIO_MEAN_FIELD, RATIO_BARRIER, RATIO_LANES } ratio_form;

// A bundle whose size is still open.
typedef struct ratio_setup {
    ratio_law law;
    ratio_load load;
    double batch;    // B: slots of a microbatch of one attention worker
    double lanes;    // m: microbatches of a worker in flight
    double requests; // N of one attention worker, for the mean field; INFINITY: the limit
} ratio_setup;

enum { RATIO_MAX_WORKERS = 4096, RATIO_MAX_LANES = 64 };
#define RATIO_MAX_BATCH 1e6
#define RATIO_MAX_TOKENS 1e9 // of one request

const char *ratio_regime_name(ratio_regime regime);

// The coefficients of table 2 are "ascend910c".
int ratio_law_preset(const char *name, ratio_law *out, error *err);
// Each coefficient is finite and not negative, and alpha_f above 0.
int ratio_law_check(const ratio_law *law, error *err);
// The law's check, the ranges of the rest, and that attention takes time.
int ratio_setup_check(const ratio_setup *setup, error *err);

// ---- Load ----
// D geometric with this mean, P independent of it with this mean and variance (9-11, 14).
int ratio_load_from_means(double mean_prompt, double var_prompt, double mean_output,
                          ratio_load *out, error *err);
// theta and nu2 as ratios of sums, which assume no distribution. E_INVALID while no output token
// was counted.
void ratio_sums_add(ratio_sums *sums, double prompt, double output);
int ratio_load_from_sums(const ratio_sums *sums, ratio_load *out, error *err);
// E[T_k], all requests having started at step 0 (11).
double ratio_tokens_at(const ratio_load *load, double batch, double step);
// The average of that until n_requests are served (12, 13); INFINITY gives the limit (14).
double ratio_tokens(const ratio_load *load, double batch, double n_requests);

// ---- The rule ----
// The setup has passed its check, here and below.
void ratio_solve(const ratio_setup *setup, ratio_rule *out);

// kappa_n: the mean of the largest of n independent standard normals; 0 where n <= 1.
double ratio_kappa(double n);
// E[max(g, mu + sigma M_n)] by numerical integration.
double ratio_barrier(double g, double mu, double sigma, double n);

double ratio_mean_attention(const ratio_setup *setup); // mu_A
double ratio_sigma(const ratio_setup *setup);          // sigma_A
double ratio_ffn_time(const ratio_setup *setup, double x, double y);
// Time between two steps of a bundle of x attention and y FFN workers, each of x * batch rows. The
// mean field takes the average load over the setup's requests, the others take the steady state.
double ratio_cycle(const ratio_setup *setup, ratio_form form, double x, double y);
// The same with kappa_x at hand; it is not looked at for the mean field.
double ratio_cycle_at(const ratio_setup *setup, ratio_form form, double x, double y, double kappa);
// Output tokens per unit of time and instance (6).
double ratio_throughput(const ratio_setup *setup, double cycle, double x, double y);

#endif
