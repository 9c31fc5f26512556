#include "engine/ratio.h"

#include <math.h>

int ratio_load_from_means(double mean_prompt, double var_prompt, double mean_output,
                          ratio_load *out, error *err) {
    if (!(mean_prompt >= 0 && mean_prompt <= RATIO_MAX_TOKENS))
        return error_set(err, E_INVALID, "prefill: expected a mean of 0 to %g tokens, not %g",
                         RATIO_MAX_TOKENS, mean_prompt);
    if (!(mean_output > 0 && mean_output <= RATIO_MAX_TOKENS))
        return error_set(err, E_INVALID,
                         "decode: expected a mean above 0 and up to %g tokens, not %g",
                         RATIO_MAX_TOKENS, mean_output);
    if (!(var_prompt >= 0 && var_prompt <= RATIO_MAX_TOKENS * RATIO_MAX_TOKENS))
        return error_set(err, E_INVALID, "prefill: the variance %g is no variance", var_prompt);
    // A geometric age has mean (1 - p) / p = mu_D and variance (1 - p) / p^2 = mu_D (mu_D + 1).
    *out = (ratio_load){.mean_prompt = mean_prompt,
                        .mean_output = mean_output,
                        .theta = mean_prompt + mean_output, // (14)
                        .nu2 = var_prompt + mean_output * (mean_output + 1)};
    return E_OK;
}

// A request is seen by D steps, in which its slot holds P, P + 1, ... P + D - 1 tokens.
void ratio_sums_add(ratio_sums *sums, double prompt, double output) {
    double ages = output * (output - 1) / 2;
    sums->n += 1;
    sums->p += prompt;
    sums->d += output;
    sums->dp += output * prompt;
    sums->ages += ages;
    sums->dpp += output * prompt * prompt;
    sums->page += 2 * prompt * ages;
    sums->ages2 += output * (output - 1) * (2 * output - 1) / 6;
}

int ratio_load_from_sums(const ratio_sums *sums, ratio_load *out, error *err) {
    if (!(sums->d > 0) || !isfinite(sums->ages2 + sums->dpp))
        return error_set(err, E_INVALID, "the trace has no output token, so no load follows");
    double theta = (sums->dp + sums->ages) / sums->d;
    double square = (sums->dpp + sums->page + sums->ages2) / sums->d;
    *out = (ratio_load){.mean_prompt = sums->p / sums->n,
                        .mean_output = sums->d / sums->n,
                        .theta = theta,
                        .nu2 = fmax(square - theta * theta, 0)};
    return E_OK;
}

// Above its start, when every slot holds a prompt alone, the load approaches theta by the share p
// of what is missing at each step. That is exact for geometric D, and a fair guess for a trace.
double ratio_tokens_at(const ratio_load *load, double batch, double step) {
    double p = 1 / (1 + load->mean_output);
    double grown = -expm1(step * log1p(-p));                                        // 1 - (1 - p)^k
    return batch * (load->mean_prompt + (load->theta - load->mean_prompt) * grown); // (11)
}

double ratio_tokens(const ratio_load *load, double batch, double n_requests) {
    if (isinf(n_requests))
        return batch * load->theta; // (14)
    double p = 1 / (1 + load->mean_output);
    double steps = fmax(n_requests / (batch * p), 1); // (12)
    double missing = -expm1(steps * log1p(-p)) / (steps * p);
    return batch * (load->theta - (load->theta - load->mean_prompt) * missing); // (13)
}
