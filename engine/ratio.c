#include "engine/ratio.h"

#include <math.h>
#include <string.h>

const char *ratio_regime_name(ratio_regime regime) {
    switch (regime) {
    case RATIO_ATTENTION:
        return "attention";
    case RATIO_COMMUNICATION:
        return "communication";
    case RATIO_FFN:
        break;
    }
    return "ffn";
}

int ratio_law_preset(const char *name, ratio_law *out, error *err) {
    if (strcmp(name, "ascend910c") != 0)
        return error_set(err, E_NOT_FOUND, "unknown preset '%.60s'; there is ascend910c", name);
    *out = (ratio_law){.alpha_a = 0.00165,
                       .beta_a = 50,
                       .alpha_f = 0.083,
                       .beta_f = 100,
                       .alpha_c = 0.022,
                       .beta_c = 20};
    return E_OK;
}

int ratio_law_check(const ratio_law *law, error *err) {
    const struct {
        const char *name;
        double value;
    } coefficients[] = {
#define X(field) {#field, law->field},
        RATIO_LAW_MAP(X)
#undef X
    };
    for (size_t i = 0; i < sizeof coefficients / sizeof *coefficients; i++)
        if (!(coefficients[i].value >= 0 && coefficients[i].value <= 1e15))
            return error_set(err, E_INVALID, "%s: expected a number from 0 to 1e15, not %g",
                             coefficients[i].name, coefficients[i].value);
    if (!(law->alpha_f >= 1e-15))
        return error_set(err, E_INVALID,
                         "alpha_f: a row of the FFN takes no time (%g), so no ratio is best",
                         law->alpha_f);
    return E_OK;
}

int ratio_setup_check(const ratio_setup *setup, error *err) {
    const ratio_load *load = &setup->load;
    int rc = ratio_law_check(&setup->law, err);
    if (rc != E_OK)
        return rc;
    if (!(setup->batch >= 1 && setup->batch <= RATIO_MAX_BATCH))
        return error_set(err, E_INVALID, "batch: expected 1 to %g slots, not %g", RATIO_MAX_BATCH,
                         setup->batch);
    if (!(setup->lanes >= 1 && setup->lanes <= RATIO_MAX_LANES))
        return error_set(err, E_INVALID, "lanes: expected 1 to %d, not %g", RATIO_MAX_LANES,
                         setup->lanes);
    if (!(setup->requests >= 1))
        return error_set(err, E_INVALID, "horizon: expected 1 request or more, not %g",
                         setup->requests);
    if (!(load->theta >= 0 && load->theta <= 2 * RATIO_MAX_TOKENS) ||
        !(load->nu2 >= 0 && load->nu2 <= 8 * RATIO_MAX_TOKENS * RATIO_MAX_TOKENS) ||
        !(load->mean_prompt >= 0 && load->mean_prompt <= RATIO_MAX_TOKENS) ||
        !(load->mean_output > 0 && load->mean_output <= RATIO_MAX_TOKENS))
        return error_set(err, E_INVALID, "load: theta %g and nu2 %g are no load of requests",
                         load->theta, load->nu2);
    // Then r* is above 0: an FFN without a fixed cost balances some time of attention.
    if (!(ratio_mean_attention(setup) > 0))
        return error_set(err, E_INVALID, "attention takes no time, so no ratio is best");
    return E_OK;
}

void ratio_solve(const ratio_setup *setup, ratio_rule *out) {
    const ratio_law *law = &setup->law;
    double tokens = ratio_tokens(&setup->load, setup->batch, setup->requests);
    double row = law->alpha_f * setup->batch;
    ratio_rule rule = {.t_attention = law->alpha_a * tokens + law->beta_a,
                       .t_communication = law->alpha_c * setup->batch + law->beta_c};
    rule.r_attention = (rule.t_attention - law->beta_f) / row;         // (15)
    rule.r_communication = (rule.t_communication - law->beta_f) / row; // (16)
    rule.r_critical = fmax(rule.r_attention, rule.r_communication);    // (17)
    rule.r_peak = sqrt(law->beta_f / row);                             // (18)
    rule.r_star = fmax(rule.r_critical, rule.r_peak);                  // (19)
    rule.regime = rule.r_star > rule.r_critical              ? RATIO_FFN
                  : rule.r_attention >= rule.r_communication ? RATIO_ATTENTION
                                                             : RATIO_COMMUNICATION;
    rule.throughput = // (20)
        rule.r_star * setup->batch / ((rule.r_star + 1) * (row * rule.r_star + law->beta_f));
    *out = rule;
}

// ---- The slowest of n workers ----

// The integral of 1 - Phi(x)^n from z to infinity, for n >= 1, by Simpson's rule. Below BOTTOM the
// integrand is 1, above TOP it is under 1e-21 even for n = 1e9.
static double excess(double z, double n) {
    enum { PANELS = 512 };
    const double bottom = -10, top = 12;
    double below = 0;
    if (z >= top)
        return 0;
    if (z < bottom) {
        below = bottom - z;
        z = bottom;
    }
    double step = (top - z) / PANELS, sum = 0;
    for (int i = 0; i <= PANELS; i++) {
        double x = z + step * i;
        double tail = 0.5 * erfc(x * M_SQRT1_2);
        double value = -expm1(n * log1p(-tail));
        sum += value * (i == 0 || i == PANELS ? 1 : i % 2 ? 4 : 2);
    }
    return below + sum * step / 3;
}

double ratio_kappa(double n) {
    const double far = -12; // E[M_n] = E[max(far, M_n)] to the last digit
    return n > 1 ? far + excess(far, n) : 0;
}

double ratio_barrier(double g, double mu, double sigma, double n) {
    // At one worker, the maximum over one, a worker's own variation still meets g.
    double z = (g - mu) / sigma;
    if (!(sigma > 0) || isinf(z))
        return fmax(g, mu);
    return g + sigma * excess(z, fmax(n, 1));
}

// ---- Time of a step ----

double ratio_mean_attention(const ratio_setup *setup) {
    return setup->law.alpha_a * setup->batch * setup->load.theta + setup->law.beta_a;
}

double ratio_sigma(const ratio_setup *setup) {
    return setup->law.alpha_a * sqrt(setup->batch * setup->load.nu2);
}

double ratio_ffn_time(const ratio_setup *setup, double x, double y) {
    return setup->law.alpha_f * setup->batch * x / y + setup->law.beta_f;
}

double ratio_cycle_at(const ratio_setup *setup, ratio_form form, double x, double y, double kappa) {
    double t_f = ratio_ffn_time(setup, x, y);
    double t_c = setup->law.alpha_c * setup->batch + setup->law.beta_c;
    double mu = ratio_mean_attention(setup), sigma = ratio_sigma(setup), m = setup->lanes;
    switch (form) {
    case RATIO_MEAN_FIELD: // (5)
        mu = setup->law.alpha_a * ratio_tokens(&setup->load, setup->batch, setup->requests) +
             setup->law.beta_a;
        return fmax(fmax(mu, t_c), t_f);
    case RATIO_BARRIER:
        return ratio_barrier(fmax(t_f, t_c), mu, sigma, x);
    case RATIO_LANES:
        break;
    }
    // The lanes of a worker average its load, so the spread of what it does in m steps is that of
    // one divided by sqrt(m). A lane's own loop waits for the slowest worker every time; where it
    // takes about as long as a worker, now one and now the other is the longer.
    double loop = (mu + sigma * kappa + t_c + t_f) / m;
    return m > 1 ? ratio_barrier(fmax(t_f, loop), mu, sigma / sqrt(m), x) : loop;
}

double ratio_cycle(const ratio_setup *setup, ratio_form form, double x, double y) {
    return ratio_cycle_at(setup, form, x, y, form == RATIO_LANES ? ratio_kappa(x) : 0);
}

double ratio_throughput(const ratio_setup *setup, double cycle, double x, double y) {
    return x * setup->batch / ((x + y) * cycle);
}
