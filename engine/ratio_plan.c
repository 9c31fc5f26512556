#include "engine/ratio_plan.h"

#include <math.h>

const char *ratio_bound_name(ratio_bound bound) {
    switch (bound) {
    case RATIO_BOUND_ATTENTION:
        return "attention";
    case RATIO_BOUND_FFN:
        return "ffn";
    case RATIO_BOUND_COMMUNICATION:
        return "communication";
    case RATIO_BOUND_LOOP:
        break;
    }
    return "loop";
}

double ratio_kv_tokens(const ratio_setup *setup) {
    double slots = setup->lanes * setup->batch;
    return slots * setup->load.theta + 3 * sqrt(slots * setup->load.nu2);
}

// ---- Search ----

// The parts of a cycle, each with the mean of the slowest worker's time.
typedef struct parts {
    double attention, ffn, communication, loop;
} parts;

static parts parts_of(const ratio_setup *setup, ratio_form form, uint32_t x, uint32_t y,
                      double kappa) {
    double m = setup->lanes, mu = ratio_mean_attention(setup), wait = ratio_sigma(setup) * kappa;
    parts p = {.attention = mu,
               .ffn = ratio_ffn_time(setup, x, y),
               .communication = setup->law.alpha_c * setup->batch + setup->law.beta_c};
    if (form == RATIO_BARRIER)
        p.attention = mu + wait;
    if (form == RATIO_LANES) {
        p.attention = mu + wait / sqrt(m);
        p.loop = (mu + wait + p.communication + p.ffn) / m;
        p.communication = 0; // a part of the loop
    }
    return p;
}

static ratio_bound bound_of(const parts *p) {
    double most = fmax(fmax(p->attention, p->ffn), fmax(p->communication, p->loop));
    return p->attention == most ? RATIO_BOUND_ATTENTION
           : p->ffn == most     ? RATIO_BOUND_FFN
           : p->loop == most    ? RATIO_BOUND_LOOP
                                : RATIO_BOUND_COMMUNICATION;
}

static void evaluate(const ratio_setup *setup, ratio_form form, uint32_t x, uint32_t y,
                     double kappa, ratio_choice *out) {
    double cycle = ratio_cycle_at(setup, form, x, y, kappa);
    parts p = parts_of(setup, form, x, y, kappa);
    // Only the form with lanes says how many cycles a step of a request takes.
    double lanes = form == RATIO_LANES ? setup->lanes : 1;
    *out = (ratio_choice){.attention = x,
                          .ffn = y,
                          .r = (double)x / y,
                          .cycle = cycle,
                          .throughput = ratio_throughput(setup, cycle, x, y),
                          .tpot = lanes * cycle,
                          .idle_attention = fmax(0, 1 - ratio_mean_attention(setup) / cycle),
                          .idle_ffn = fmax(0, 1 - ratio_ffn_time(setup, x, y) / cycle),
                          .bound = bound_of(&p)};
}

void ratio_evaluate(const ratio_setup *setup, ratio_form form, uint32_t x, uint32_t y,
                    ratio_choice *out) {
    evaluate(setup, form, x, y, ratio_kappa(x), out);
}

typedef struct search {
    const ratio_setup *setup;
    ratio_form form;
    const ratio_limits *limits;
    ratio_choice best;    // attention = 0: none yet
    double shortest_tpot; // of all that were looked at
} search;

static void try_choice(search *s, uint32_t x, uint32_t y, double kappa) {
    const ratio_setup *setup = s->setup;
    double lanes = s->form == RATIO_LANES ? setup->lanes : 1;
    parts p = parts_of(setup, s->form, x, y, kappa);
    // The mean of a maximum is at least the maximum of the means: what cannot win by that is not
    // integrated.
    double least = s->form == RATIO_MEAN_FIELD
                       ? ratio_cycle_at(setup, s->form, x, y, kappa)
                       : fmax(fmax(p.attention, p.ffn), fmax(p.communication, p.loop));
    s->shortest_tpot = fmin(s->shortest_tpot, lanes * least);
    if (s->limits->max_tpot > 0 && lanes * least > s->limits->max_tpot)
        return;
    if (s->best.attention && ratio_throughput(setup, least, x, y) <= s->best.throughput)
        return;
    ratio_choice choice;
    evaluate(setup, s->form, x, y, kappa, &choice);
    if (s->limits->max_tpot > 0 && choice.tpot > s->limits->max_tpot)
        return;
    // Less than this is rounding, and the smaller bundle, which came first, is as good.
    if (!s->best.attention || choice.throughput > s->best.throughput * (1 + 1e-12))
        s->best = choice;
}

// Beyond four times the best ratio every form falls.
static uint32_t reach(double r) {
    double n = 4 * ceil(r);
    return n < 64 ? 64 : n > RATIO_MAX_WORKERS ? RATIO_MAX_WORKERS : (uint32_t)n;
}

int ratio_search(const ratio_setup *setup, ratio_form form, const ratio_limits *limits,
                 ratio_choice *out, error *err) {
    uint32_t min_ffn = limits->min_ffn ? limits->min_ffn : 1, pool = limits->pool;
    ratio_rule rule;
    search s = {.setup = setup, .form = form, .limits = limits, .shortest_tpot = INFINITY};
    if (pool > RATIO_MAX_WORKERS || min_ffn > RATIO_MAX_WORKERS / 2)
        return error_set(err, E_INVALID, "pool: at most %d workers are planned for",
                         RATIO_MAX_WORKERS);
    if (pool && pool < min_ffn + 1)
        return error_set(err, E_FULL,
                         "pool: %u workers are too few for one attention and %u FFN workers", pool,
                         min_ffn);
    if (limits->kv_tokens > 0 && ratio_kv_tokens(setup) > limits->kv_tokens)
        return error_set(err, E_FULL,
                         "kv-tokens: %g lanes of %g slots need %.0f tokens of KV, there are %.0f; "
                         "take a smaller batch",
                         setup->lanes, setup->batch, ratio_kv_tokens(setup), limits->kv_tokens);
    ratio_solve(setup, &rule);
    if (pool) {
        double kappa[RATIO_MAX_WORKERS];
        for (uint32_t n = min_ffn + 1; n <= pool; n++) { // the smaller bundles first
            kappa[n - min_ffn] = ratio_kappa(n - min_ffn);
            for (uint32_t x = 1; x <= n - min_ffn; x++)
                try_choice(&s, x, n - x, kappa[x]);
        }
    } else {
        uint32_t most = reach(rule.r_star * min_ffn);
        for (uint32_t x = 1; x <= most; x++)
            try_choice(&s, x, min_ffn, ratio_kappa(x));
        if (rule.r_star > 0 && rule.r_star < 1)
            for (uint32_t y = min_ffn + 1; y <= reach(1 / rule.r_star); y++)
                try_choice(&s, 1, y, 0);
    }
    if (!s.best.attention)
        return error_set(err, E_FULL, "max-tpot: %g is below the shortest possible, %.6g",
                         limits->max_tpot, s.shortest_tpot);
    *out = s.best;
    return E_OK;
}

// ---- Colocated ----

bool ratio_colocate(const ratio_setup *setup, double max_tpot, ratio_colocated *out) {
    const ratio_law *law = &setup->law;
    double row = law->alpha_a * setup->load.theta + law->alpha_f;
    double fixed = law->beta_a + law->beta_f, batch = setup->lanes * setup->batch;
    if (max_tpot > 0)
        batch = fmin(batch, floor((max_tpot - fixed) / row));
    if (batch < 1)
        return false;
    double cycle = row * batch + fixed;
    *out = (ratio_colocated){
        .batch = batch, .cycle = cycle, .throughput = batch / cycle, .tpot = cycle};
    return true;
}

// ---- Sensitivity ----

void ratio_sensitivities(const ratio_setup *setup, ratio_sensitivity out[RATIO_N_SENSITIVITIES]) {
    const double step = 0.01;
    static const char *const names[] = {
#define X(field) #field,
        RATIO_LAW_MAP(X)
#undef X
            "theta"};
    for (int i = 0; i < RATIO_N_SENSITIVITIES; i++) {
        ratio_setup low = *setup, high = *setup;
        double *in_low[] = {
#define X(field) &low.law.field,
            RATIO_LAW_MAP(X)
#undef X
            & low.load.theta};
        double *in_high[] = {
#define X(field) &high.law.field,
            RATIO_LAW_MAP(X)
#undef X
            & high.load.theta};
        ratio_rule a, b;
        *in_low[i] *= 1 - step;
        *in_high[i] *= 1 + step;
        ratio_solve(&low, &a);
        ratio_solve(&high, &b);
        double width = log1p(step) - log1p(-step);
        bool moves = a.r_star > 0 && b.r_star > 0;
        out[i] = (ratio_sensitivity){.name = names[i],
                                     .r_star = moves ? log(b.r_star / a.r_star) / width : 0,
                                     .throughput = log(b.throughput / a.throughput) / width};
    }
}

// ---- Appendix B ----

int ratio_law_from_hardware(const ratio_hardware *hardware, const ratio_shape *shape,
                            ratio_law *law, error *err) {
    const struct {
        const char *name;
        double value, most;
    } numbers[] = {
        {"memory bandwidth", hardware->hbm_bytes_s, 1e18},
        {"memory efficiency", hardware->hbm_efficiency, 1},
        {"peak compute", hardware->flops_s, 1e21},
        {"compute efficiency", hardware->flops_efficiency, 1},
        {"network bandwidth", hardware->net_bytes_s, 1e18},
        {"hidden size", shape->hidden, 1e7},
        {"expert size", shape->expert_intermediate, 1e7},
        {"bytes of a KV token", shape->kv_bytes, 1e9},
        {"bytes on the wire", shape->wire_bytes, 16},
        {"experts", shape->experts, 1e6},
        {"top-k", shape->top_k, shape->experts},
        {"experts per card", shape->experts_per_card, shape->experts},
    };
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++)
        if (!(numbers[i].value > 0 && numbers[i].value <= numbers[i].most))
            return error_set(err, E_INVALID, "%s: expected above 0 and up to %g, not %g",
                             numbers[i].name, numbers[i].most, numbers[i].value);
    if (!(shape->mtp_depth >= 0 && shape->mtp_depth <= 64))
        return error_set(err, E_INVALID, "MTP depth: expected 0 to 64, not %g", shape->mtp_depth);
    // Rows that each expert gets for a row of the batch (31).
    double rows = shape->top_k * (1 + shape->mtp_depth) / shape->experts;
    double flops = 6 * shape->hidden * shape->expert_intermediate; // of a row in an expert (27)
    law->alpha_a = shape->kv_bytes / (hardware->hbm_bytes_s * hardware->hbm_efficiency); // (26)
    law->alpha_f = shape->experts_per_card * flops * rows /
                   (hardware->flops_s * hardware->flops_efficiency); // (33)
    law->alpha_c = shape->experts_per_card * shape->wire_bytes * shape->hidden * rows /
                   hardware->net_bytes_s; // (38)
    return E_OK;
}
