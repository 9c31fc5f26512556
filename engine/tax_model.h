// tax_model.h: what the experts of a Mixture-of-Experts layer cost, and what of it a dense layer of
// the same compute would not.
//
// Sections 5, 5.1 and 5.2 of "Demystifying the Mixture of Experts Serving Tax", whose equation
// numbers stand here. Pure functions, but for a Monte Carlo that is reproducible by its seed. Times
// are in the unit of the costs; m is the rows of a step, each routed to top_k experts.
// Ownership: none; arrays are the caller's. Thread: any.
#ifndef TANDEM_ENGINE_TAX_MODEL_H
#define TANDEM_ENGINE_TAX_MODEL_H

#include "engine/status.h"

#include <stdbool.h>
#include <stdint.h>

// Costs of one layer on one GPU.
typedef struct tax_model {
    double experts, top_k; // E, K
    double weight_io;      // alpha: reading an expert's weights
    double activation_io;  // alpha_act: per row of an expert
    double compute;        // beta: per row of an expert
    double network;        // gamma: per row sent
} tax_model;

typedef struct tax_hardware {
    double hbm_bytes_s, flops_s, net_bytes_s;
} tax_hardware;

typedef struct tax_shape {
    double hidden, intermediate, experts, top_k;
    double weight_bytes, row_bytes; // of an element in memory
    double wire_bytes;              // of an element on the network
} tax_shape;

// What one GPU has of a step under expert parallelism.
typedef struct tax_gpu {
    double active;   // E_g: experts with a row
    double received; // R_g: rows of its experts
    double padded;   // P_g = eta_g R_g
    double sent;     // S_g: rows its own tokens send
} tax_gpu;

typedef enum tax_padding { TAX_BLOCKWISE, TAX_MAX } tax_padding;

typedef enum tax_regime {
    TAX_MEMORY_BOUND,  // both layers wait for weights: the ratio is near E_active / K
    TAX_TRANSITION,    // only the MoE layer does
    TAX_COMPUTE_BOUND, // neither does: the ratio is the padding
} tax_regime;

enum { TAX_MAX_EXPERTS = 4096, TAX_MAX_GPUS = 1024 };
#define TAX_MAX_ROWS 1e7

// ---- Costs ----
// An expert is three matrices, gate, up and down.
int tax_model_make(const tax_hardware *hardware, const tax_shape *shape, tax_model *out,
                   error *err);
int tax_model_check(const tax_model *model, error *err);

// The layers of a step on n_tp GPUs without ancillary kernels and AllReduce. eta >= 1.
double tax_dense_time(const tax_model *model, double m, double n_tp); // (2)
double tax_moe_time(const tax_model *model, double m, double active, double eta,
                    double n_tp); // (4)
tax_regime tax_moe_regime(const tax_model *model, double m, double active, double eta);
// The slowest GPU's part, with AllReduce (TP+EP) or with dispatch and combine (DP+EP).
double tax_tp_ep_time(const tax_model *model, const tax_gpu *gpus, uint32_t n, double t_ancillary,
                      double t_allreduce); // (5)
double tax_dp_ep_time(const tax_model *model, const tax_gpu *gpus, uint32_t n,
                      double t_ancillary); // (7)

// The tax. ffn_share is f, the share of the FFN in the dense model's time.
double tax_tau_tp(double t_moe, double t_ffn, double ffn_share); // (3), for TP+TP and TP+EP
double tax_tau_dp_ep(double t_other_dp, double t_moe, double t_other_tp, double t_ffn); // (6)
// Bytes on the wire of AllToAll over those of a ring AllReduce, on n > 1 GPUs (section 4.2).
double tax_network_ratio(double top_k, double n);

// The time of an FFN step of `rows` rows on one of `workers` FFN workers that share the experts
// evenly, under uniform routing: the t_F that the ratio rule takes for linear.
double tax_ffn_time(const tax_model *model, double rows, double workers, double eta,
                    double t_ancillary);

// ---- Where the rows go ----
// E[E_active] of m rows under uniform routing; and by a profile, the rows that each expert had over
// any number of steps. Of one step's counts the active ones need only be counted.
double tax_active_uniform(double experts, double top_k, double m);
double tax_active_profiled(const uint64_t *profile, uint32_t n, double top_k, double m);
uint32_t tax_active_counted(const uint32_t *counts, uint32_t n);

// The rows that a kernel computes for experts with these counts; E_g is the active ones.
double tax_padded_rows(const uint32_t *counts, uint32_t n, uint32_t block, tax_padding padding);
// Splits the experts evenly in their order over GPUs whose tokens are equally many. n_gpus divides
// n.
int tax_place(const uint32_t *counts, uint32_t n, uint32_t n_gpus, uint32_t block,
              tax_padding padding, tax_gpu *out, error *err);

// Balls and bins: about the expected largest load, few balls or many, whichever is the more.
double tax_max_load(double balls, double bins);
// The largest load over the mean that tax_max_load gives for experts, and for GPUs.
double tax_straggler_bound(double m, double top_k, double bins);

typedef struct tax_trial {
    uint32_t experts, top_k, gpus, rows, block, runs;
    tax_padding padding;
    const double *weights; // (experts) of a row's choice among those left; NULL: uniform
    uint64_t seed;
} tax_trial;

// Means over the runs.
typedef struct tax_trial_result {
    double active, max_expert, max_gpu; // experts with a row; most rows of an expert, of a GPU
    double straggler;                   // most rows of a GPU over the mean
    double padded_straggler;            // the same of padded rows
    double eta;                         // padded rows over rows
} tax_trial_result;

// Balls, bins and buckets: rows choose distinct experts, which stand on GPUs and are padded.
int tax_monte_carlo(const tax_trial *trial, tax_trial_result *out, error *err);

#endif
