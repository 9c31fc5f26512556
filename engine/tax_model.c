#include "engine/tax_model.h"

#include "engine/random.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

// ---- Costs ----

static int check_positive(const char *name, double value, double most, error *err) {
    return value > 0 && value <= most
               ? E_OK
               : error_set(err, E_INVALID, "%s: expected above 0 and up to %g, not %g", name, most,
                           value);
}

int tax_model_check(const tax_model *model, error *err) {
    const double costs[] = {model->weight_io, model->activation_io, model->compute, model->network};
    int rc = check_positive("experts", model->experts, TAX_MAX_EXPERTS, err);
    if (rc == E_OK)
        rc = check_positive("top-k", model->top_k, model->experts, err);
    if (rc != E_OK)
        return rc;
    for (size_t i = 0; i < sizeof costs / sizeof *costs; i++)
        if (!(costs[i] >= 0 && costs[i] <= 1e15))
            return error_set(err, E_INVALID, "a cost of the MoE layer is %g", costs[i]);
    return check_positive("weights and compute", model->weight_io + model->compute, 2e15, err);
}

int tax_model_make(const tax_hardware *hardware, const tax_shape *shape, tax_model *out,
                   error *err) {
    const struct {
        const char *name;
        double value, most;
    } numbers[] = {
        {"memory bandwidth", hardware->hbm_bytes_s, 1e18},
        {"peak compute", hardware->flops_s, 1e21},
        {"network bandwidth", hardware->net_bytes_s, 1e18},
        {"hidden size", shape->hidden, 1e7},
        {"expert size", shape->intermediate, 1e7},
        {"bytes of a weight", shape->weight_bytes, 16},
        {"bytes of an activation", shape->row_bytes, 16},
        {"bytes on the wire", shape->wire_bytes, 16},
    };
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++) {
        int rc = check_positive(numbers[i].name, numbers[i].value, numbers[i].most, err);
        if (rc != E_OK)
            return rc;
    }
    double elements = 3 * shape->hidden * shape->intermediate;
    // In, out, and the product of gate and up written and read again.
    double activations = 2 * shape->hidden + 2 * shape->intermediate;
    tax_model model = {
        .experts = shape->experts,
        .top_k = shape->top_k,
        .weight_io = elements * shape->weight_bytes / hardware->hbm_bytes_s,
        .activation_io = activations * shape->row_bytes / hardware->hbm_bytes_s,
        .compute = 2 * elements / hardware->flops_s,
        .network = shape->hidden * shape->wire_bytes / hardware->net_bytes_s,
    };
    int rc = tax_model_check(&model, err);
    if (rc == E_OK)
        *out = model;
    return rc;
}

static double experts_time(const tax_model *model, double active, double rows) {
    return fmax(model->weight_io * active + model->activation_io * rows, model->compute * rows);
}

double tax_dense_time(const tax_model *model, double m, double n_tp) {
    return experts_time(model, model->top_k, m * model->top_k) / n_tp;
}

double tax_moe_time(const tax_model *model, double m, double active, double eta, double n_tp) {
    return experts_time(model, active, eta * m * model->top_k) / n_tp;
}

static bool waits_for_memory(const tax_model *model, double active, double rows) {
    return model->weight_io * active + model->activation_io * rows > model->compute * rows;
}

tax_regime tax_moe_regime(const tax_model *model, double m, double active, double eta) {
    double rows = m * model->top_k;
    if (!waits_for_memory(model, active, eta * rows))
        return TAX_COMPUTE_BOUND;
    return waits_for_memory(model, model->top_k, rows) ? TAX_MEMORY_BOUND : TAX_TRANSITION;
}

double tax_tp_ep_time(const tax_model *model, const tax_gpu *gpus, uint32_t n, double t_ancillary,
                      double t_allreduce) {
    double slowest = 0;
    for (uint32_t g = 0; g < n; g++)
        slowest = fmax(slowest, experts_time(model, gpus[g].active, gpus[g].padded));
    return slowest + t_ancillary + t_allreduce;
}

double tax_dp_ep_time(const tax_model *model, const tax_gpu *gpus, uint32_t n, double t_ancillary) {
    double slowest = 0;
    for (uint32_t g = 0; g < n; g++) {
        double exchange = model->network * fmax(gpus[g].sent, gpus[g].received);
        slowest = fmax(slowest, 2 * exchange + experts_time(model, gpus[g].active, gpus[g].padded));
    }
    return slowest + t_ancillary;
}

double tax_tau_tp(double t_moe, double t_ffn, double ffn_share) {
    return 1 + (t_moe / t_ffn - 1) * ffn_share;
}

double tax_tau_dp_ep(double t_other_dp, double t_moe, double t_other_tp, double t_ffn) {
    return (t_other_dp + t_moe) / (t_other_tp + t_ffn);
}

double tax_network_ratio(double top_k, double n) {
    // A ring AllReduce sends 2 (n - 1) / n of its input; the paper counts all of AllToAll's.
    return top_k * n / (2 * (n - 1));
}

double tax_ffn_time(const tax_model *model, double rows, double workers, double eta,
                    double t_ancillary) {
    double active = tax_active_uniform(model->experts, model->top_k, rows) / workers;
    return experts_time(model, active, eta * rows * model->top_k / workers) + t_ancillary;
}

// ---- Where the rows go ----

double tax_active_uniform(double experts, double top_k, double m) {
    return experts * -expm1(m * log1p(-top_k / experts));
}

double tax_active_profiled(const uint64_t *profile, uint32_t n, double top_k, double m) {
    double rows = 0, active = 0;
    for (uint32_t i = 0; i < n; i++)
        rows += (double)profile[i] / top_k;
    for (uint32_t i = 0; i < n && rows > 0; i++) {
        double chance = fmin((double)profile[i] / rows, 1); // that a row has this expert
        active += -expm1(m * log1p(-chance));
    }
    return active;
}

uint32_t tax_active_counted(const uint32_t *counts, uint32_t n) {
    uint32_t active = 0;
    for (uint32_t i = 0; i < n; i++)
        active += counts[i] > 0;
    return active;
}

double tax_padded_rows(const uint32_t *counts, uint32_t n, uint32_t block, tax_padding padding) {
    uint64_t sum = 0, active = 0, largest = 0;
    for (uint32_t i = 0; i < n; i++) {
        uint64_t padded = ((uint64_t)counts[i] + block - 1) / block * block;
        sum += padded;
        active += counts[i] > 0;
        largest = padded > largest ? padded : largest;
    }
    return (double)(padding == TAX_BLOCKWISE ? sum : active * largest);
}

int tax_place(const uint32_t *counts, uint32_t n, uint32_t n_gpus, uint32_t block,
              tax_padding padding, tax_gpu *out, error *err) {
    if (n < 1 || n > TAX_MAX_EXPERTS || n_gpus < 1 || n_gpus > TAX_MAX_GPUS || n % n_gpus != 0)
        return error_set(err, E_INVALID, "%u experts do not split evenly over %u GPUs", n, n_gpus);
    if (block < 1)
        return error_set(err, E_INVALID, "a padding block needs a row");
    uint32_t each = n / n_gpus;
    double total = 0;
    for (uint32_t i = 0; i < n; i++)
        total += counts[i];
    for (uint32_t g = 0; g < n_gpus; g++) {
        const uint32_t *own = counts + (size_t)g * each;
        double received = 0;
        for (uint32_t i = 0; i < each; i++)
            received += own[i];
        out[g] = (tax_gpu){.active = tax_active_counted(own, each),
                           .received = received,
                           .padded = tax_padded_rows(own, each, block, padding),
                           .sent = total / n_gpus};
    }
    return E_OK;
}

double tax_max_load(double balls, double bins) {
    if (bins <= 1)
        return balls;
    double mean = balls / bins, few = log(bins) / log(log(bins));
    double many = mean + sqrt(2 * mean * log(bins));
    // log log is below 1 for fewer than 16 bins, where the first form says nothing.
    return fmin(balls, bins >= 16 ? fmax(few, many) : many);
}

double tax_straggler_bound(double m, double top_k, double bins) {
    double balls = m * top_k;
    return tax_max_load(balls, bins) / (balls / bins);
}

// ---- Monte Carlo ----

typedef struct trial_state {
    uint64_t rng;
    uint32_t order[TAX_MAX_EXPERTS], counts[TAX_MAX_EXPERTS];
    double keys[TAX_MAX_EXPERTS];
    tax_gpu gpus[TAX_MAX_GPUS];
} trial_state;

// The first top_k of a shuffle.
static void route_uniform(const tax_trial *t, trial_state *s) {
    for (uint32_t k = 0; k < t->top_k; k++) {
        uint32_t at = k + (uint32_t)(random_next(&s->rng) % (t->experts - k));
        uint32_t chosen = s->order[at];
        s->order[at] = s->order[k];
        s->order[k] = chosen;
        s->counts[chosen]++;
    }
}

// Each expert waits an exponential time of the rate of its weight, and the first top_k are taken:
// draws by weight among those left (Efraimidis and Spirakis).
static void route_weighted(const tax_trial *t, trial_state *s) {
    for (uint32_t i = 0; i < t->experts; i++)
        s->keys[i] = -log(random_unit(&s->rng)) / t->weights[i];
    for (uint32_t k = 0; k < t->top_k; k++) {
        uint32_t first = 0;
        for (uint32_t i = 1; i < t->experts; i++)
            first = s->keys[i] < s->keys[first] ? i : first;
        s->keys[first] = INFINITY;
        s->counts[first]++;
    }
}

static int check_trial(const tax_trial *t, error *err) {
    if (t->experts < 1 || t->experts > TAX_MAX_EXPERTS || t->top_k < 1 || t->top_k > t->experts)
        return error_set(err, E_INVALID, "%u of %u experts: expected 1 to %d", t->top_k, t->experts,
                         TAX_MAX_EXPERTS);
    if (t->rows < 1 || t->rows > TAX_MAX_ROWS || t->runs < 1 || t->runs > 1000000)
        return error_set(err, E_INVALID, "%u rows in %u runs: expected 1 to %g, 1 to 1000000",
                         t->rows, t->runs, TAX_MAX_ROWS);
    uint32_t usable = 0;
    for (uint32_t i = 0; t->weights && i < t->experts; i++) {
        if (!(t->weights[i] >= 0 && t->weights[i] <= 1e15))
            return error_set(err, E_INVALID, "the weight of expert %u is %g", i, t->weights[i]);
        usable += t->weights[i] > 1e-15;
    }
    if (t->weights && usable < t->top_k)
        return error_set(err, E_INVALID, "%u experts have a weight, a row needs %u", usable,
                         t->top_k);
    return E_OK;
}

// Adds one run's figures to the sums.
static void add_run(const tax_trial *t, const trial_state *s, tax_trial_result *sum) {
    double rows = 0, padded = 0, most = 0, most_padded = 0, most_expert = 0;
    for (uint32_t i = 0; i < t->experts; i++)
        most_expert = fmax(most_expert, s->counts[i]);
    for (uint32_t g = 0; g < t->gpus; g++) {
        rows += s->gpus[g].received;
        padded += s->gpus[g].padded;
        most = fmax(most, s->gpus[g].received);
        most_padded = fmax(most_padded, s->gpus[g].padded);
        sum->active += s->gpus[g].active;
    }
    sum->max_expert += most_expert;
    sum->max_gpu += most;
    sum->straggler += most / (rows / t->gpus);
    sum->padded_straggler += most_padded / (padded / t->gpus);
    sum->eta += padded / rows;
}

int tax_monte_carlo(const tax_trial *t, tax_trial_result *out, error *err) {
    tax_trial_result sum = {0};
    int rc = check_trial(t, err);
    if (rc != E_OK)
        return rc;
    trial_state *s = malloc(sizeof *s);
    if (!s)
        return error_set(err, E_NO_MEMORY, "tax model: out of memory");
    s->rng = t->seed;
    for (uint32_t i = 0; i < t->experts; i++)
        s->order[i] = i;
    for (uint32_t run = 0; run < t->runs && rc == E_OK; run++) {
        memset(s->counts, 0, t->experts * sizeof *s->counts);
        for (uint32_t row = 0; row < t->rows; row++)
            (t->weights ? route_weighted : route_uniform)(t, s);
        rc = tax_place(s->counts, t->experts, t->gpus, t->block, t->padding, s->gpus, err);
        if (rc == E_OK)
            add_run(t, s, &sum);
    }
    free(s);
    if (rc != E_OK)
        return rc;
    double *fields[] = {&sum.active,    &sum.max_expert,       &sum.max_gpu,
                        &sum.straggler, &sum.padded_straggler, &sum.eta};
    for (size_t i = 0; i < sizeof fields / sizeof *fields; i++)
        *fields[i] /= t->runs;
    *out = sum;
    return E_OK;
}
