// The cost of experts against the paper's numbers, against counts by hand, and against themselves.
#include "engine/tax_model.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <cmocka.h>

static void near(double value, double expected, double tolerance) {
    if (!(fabs(value - expected) <= tolerance * fabs(expected)))
        fail_msg("%.9g is not %.9g to %g", value, expected, tolerance);
}

// Table 2 of the paper on its A100 (section 5.3).
static tax_model make_model(double experts, double top_k, double hidden, double intermediate) {
    tax_hardware a100 = {.hbm_bytes_s = 1.5e12, .flops_s = 312e12, .net_bytes_s = 300e9};
    tax_shape shape = {.hidden = hidden,
                       .intermediate = intermediate,
                       .experts = experts,
                       .top_k = top_k,
                       .weight_bytes = 2,
                       .row_bytes = 2,
                       .wire_bytes = 2};
    tax_model model;
    error err = {0};
    if (tax_model_make(&a100, &shape, &model, &err) != E_OK)
        fail_msg("%s", err.text);
    return model;
}

static tax_model mixtral(void) {
    return make_model(8, 2, 4096, 14336);
}

static tax_model qwen(void) {
    return make_model(64, 8, 3584, 2560);
}

static double block_ratio(const tax_model *model, double m, double eta) {
    double active = tax_active_uniform(model->experts, model->top_k, m);
    return tax_moe_time(model, m, active, eta, 8) / tax_dense_time(model, m, 8);
}

static void test_costs(void **state) {
    (void)state;
    tax_model model = mixtral();
    near(model.weight_io, 3 * 4096.0 * 14336 * 2 / 1.5e12, 1e-12);
    near(model.compute, 6 * 4096.0 * 14336 / 312e12, 1e-12);
    near(model.network, 4096 * 2 / 300e9, 1e-12);
    // Equation 27 of the ratio paper counts the same FLOPs for DeepSeek-V3: 8.81e7 for a row.
    tax_model deepseek = make_model(256, 8, 7168, 2048);
    near(deepseek.compute * 312e12, 8.81e7, 0.001);
}

// Decode: as E_active / K, which ends at E / K. Prefill: as the padding. Between them a fall.
static void test_regimes(void **state) {
    (void)state;
    const tax_model models[] = {mixtral(), qwen(), make_model(256, 8, 7168, 2048)};
    static const double limits[] = {4, 8, 32}; // E / K
    for (int i = 0; i < 3; i++) {
        const tax_model *model = &models[i];
        double peak = 0, last = 1e9;
        near(block_ratio(model, 1, 1), 1, 1e-9); // one row has its K experts either way
        for (double m = 1; m <= 65536; m *= 2) {
            double active = tax_active_uniform(model->experts, model->top_k, m);
            double ratio = block_ratio(model, m, 1);
            peak = fmax(peak, ratio);
            switch (tax_moe_regime(model, m, active, 1)) {
            case TAX_MEMORY_BOUND: // weights outweigh the rows' own reads by far where m is small
                if (m <= 16)
                    near(ratio, active / model->top_k, 0.02);
                break;
            case TAX_TRANSITION:
                assert_true(ratio < last);
                assert_true(ratio >= model->weight_io * active /
                                         (model->compute * m * model->top_k) * (1 - 1e-12));
                break;
            case TAX_COMPUTE_BOUND:
                near(ratio, 1, 1e-12);
                break;
            }
            last = ratio;
        }
        assert_true(peak > 0.85 * limits[i] && peak <= limits[i]);
        assert_true(tax_moe_regime(model, 1, model->top_k, 1) == TAX_MEMORY_BOUND);
        assert_true(tax_moe_regime(model, 65536, model->experts, 1) == TAX_COMPUTE_BOUND);
    }
}

// The lowest prefill tax, about 1.28, is measured at 1024 rows for Mixtral and at 2048 for Qwen:
// there, and not at half of it, the model is compute-bound with the paper's padding of 1.25.
static void test_where_the_prefill_tax_ends(void **state) {
    (void)state;
    const tax_model models[] = {mixtral(), qwen()};
    static const double least[] = {1024, 2048};
    for (int i = 0; i < 2; i++) {
        near(block_ratio(&models[i], least[i], 1.25), 1.25, 1e-9);
        near(block_ratio(&models[i], 4 * least[i], 1.25), 1.25, 1e-9);
        assert_true(block_ratio(&models[i], least[i] / 2, 1.25) > 1.35);
        double tau = tax_tau_tp(1.25, 1, 0.9); // an FFN of nine tenths of the time
        near(tau, 1.28, 0.05);
    }
}

// The decode tax at 32 rows, measured as 2.08 (Mixtral) and 2.57 (Qwen), with the padding 1.05: the
// share of the FFN that gives it is a share, and the same tax is far lower for one row.
static void test_decode_tax(void **state) {
    (void)state;
    const tax_model models[] = {mixtral(), qwen()};
    static const double measured[] = {2.08, 2.57};
    for (int i = 0; i < 2; i++) {
        double ratio = block_ratio(&models[i], 32, 1.05);
        double share = (measured[i] - 1) / (ratio - 1);
        assert_true(share > 0.2 && share < 0.7);
        near(tax_tau_tp(ratio, 1, share), measured[i], 1e-12);
        assert_true(tax_tau_tp(block_ratio(&models[i], 1, 1.05), 1, share) < 1.05);
    }
}

static void test_active_experts(void **state) {
    (void)state;
    near(tax_active_uniform(8, 2, 1), 2, 1e-12);
    near(tax_active_uniform(8, 2, 2), 8 * (1 - 0.75 * 0.75), 1e-12);
    near(tax_active_uniform(8, 8, 5), 8, 1e-12);
    assert_true(tax_active_uniform(64, 8, 32) > 0.98 * 64);
    uint64_t even[8], skewed[8], none[8] = {0}, one[8] = {70, 70};
    for (int i = 0; i < 8; i++) {
        even[i] = 1000;
        skewed[i] = i < 2 ? 900 : 200 / 6;
    }
    near(tax_active_profiled(even, 8, 2, 7), tax_active_uniform(8, 2, 7), 1e-12);
    assert_true(tax_active_profiled(skewed, 8, 2, 7) < 0.7 * tax_active_uniform(8, 2, 7));
    assert_true(tax_active_profiled(none, 8, 2, 7) == 0);
    assert_true(tax_active_profiled(one, 8, 2, 7) == 2);
    uint32_t counts[] = {0, 3, 0, 1, 9, 0};
    assert_int_equal(tax_active_counted(counts, 6), 3);
}

static void test_padding(void **state) {
    (void)state;
    uint32_t spread[] = {1, 1, 1, 1}, one[] = {64, 0, 0, 0}, hot[] = {61, 1, 1, 1};
    assert_true(tax_padded_rows(spread, 4, 16, TAX_BLOCKWISE) == 64);
    assert_true(tax_padded_rows(one, 4, 16, TAX_BLOCKWISE) == 64);
    assert_true(tax_padded_rows(one, 4, 16, TAX_MAX) == 64); // one expert is active
    assert_true(tax_padded_rows(hot, 4, 16, TAX_BLOCKWISE) == 64 + 48);
    assert_true(tax_padded_rows(hot, 4, 16, TAX_MAX) == 256);
    assert_true(tax_padded_rows(hot, 4, 1, TAX_BLOCKWISE) == 64);
    uint32_t none[] = {0, 0};
    assert_true(tax_padded_rows(none, 2, 16, TAX_MAX) == 0);
}

static void test_expert_parallel(void **state) {
    (void)state;
    tax_model model = {.experts = 4,
                       .top_k = 2,
                       .weight_io = 10,
                       .activation_io = 1,
                       .compute = 2,
                       .network = 0.5};
    uint32_t counts[] = {6, 0, 1, 1}; // 4 rows
    tax_gpu gpus[2];
    error err = {0};
    assert_int_equal(tax_place(counts, 4, 2, 4, TAX_BLOCKWISE, gpus, &err), E_OK);
    assert_true(gpus[0].active == 1 && gpus[0].received == 6 && gpus[0].padded == 8);
    assert_true(gpus[1].active == 2 && gpus[1].received == 2 && gpus[1].padded == 8);
    assert_true(gpus[0].sent == 4 && gpus[1].sent == 4);
    // GPU 0: max(10 + 8, 16) = 18; GPU 1: max(20 + 8, 16) = 28.
    near(tax_tp_ep_time(&model, gpus, 2, 3, 5), 28 + 3 + 5, 1e-12);
    // Exchanges of 6 and of 4 rows, twice: 18 + 6 and 28 + 4.
    near(tax_dp_ep_time(&model, gpus, 2, 3), 32 + 3, 1e-12);
    near(tax_tau_dp_ep(10, 35, 15, 25), 45.0 / 40, 1e-12);
    assert_int_equal(tax_place(counts, 4, 3, 4, TAX_BLOCKWISE, gpus, &err), E_INVALID);
    assert_int_equal(tax_place(counts, 4, 2, 0, TAX_BLOCKWISE, gpus, &err), E_INVALID);
}

static void test_network(void **state) {
    (void)state;
    near(tax_network_ratio(8, 8), 4.6, 0.01); // DeepSeek-V3 on one node
}

// With many rows t_F is the line alpha_F rows + beta_F of the ratio rule, with few it is not.
static void test_ffn_time(void **state) {
    (void)state;
    tax_model model = make_model(256, 8, 7168, 2048);
    double slope = model.compute * 8;
    near(tax_ffn_time(&model, 40000, 1, 1, 0) - tax_ffn_time(&model, 30000, 1, 1, 0), 10000 * slope,
         1e-9);
    near(tax_ffn_time(&model, 40000, 4, 1, 7), 7 + 40000 * slope / 4, 1e-9);
    double few = tax_ffn_time(&model, 8, 1, 1, 0), line = tax_ffn_time(&model, 512, 1, 1, 0);
    assert_true(few < 0.3 * line && few > 0.1 * line);
    near(few, model.weight_io * tax_active_uniform(256, 8, 8), 0.01);
}

static tax_trial_result trial(uint32_t experts, uint32_t top_k, uint32_t gpus, uint32_t rows,
                              const double *weights) {
    tax_trial t = {.experts = experts,
                   .top_k = top_k,
                   .gpus = gpus,
                   .rows = rows,
                   .block = 1,
                   .runs = 300,
                   .weights = weights,
                   .seed = 5};
    tax_trial_result result;
    error err = {0};
    if (tax_monte_carlo(&t, &result, &err) != E_OK)
        fail_msg("%s", err.text);
    return result;
}

static void test_monte_carlo(void **state) {
    (void)state;
    tax_trial_result r = trial(64, 8, 8, 32, NULL), again = trial(64, 8, 8, 32, NULL);
    assert_memory_equal(&r, &again, sizeof r);
    near(r.active, tax_active_uniform(64, 8, 32), 0.005);
    assert_true(r.eta == 1 && r.straggler == r.padded_straggler);
    // All experts for every row: nothing is left to chance.
    r = trial(8, 8, 4, 10, NULL);
    assert_true(r.active == 8 && r.max_expert == 10 && r.max_gpu == 20 && r.straggler == 1);
    // Equal weights route as the uniform does, unequal ones activate fewer experts.
    double even[64], skewed[64];
    for (int i = 0; i < 64; i++) {
        even[i] = 3;
        skewed[i] = pow(0.9, i);
    }
    tax_trial_result uniform = trial(64, 8, 8, 16, NULL), weighted = trial(64, 8, 8, 16, even);
    near(weighted.active, uniform.active, 0.01);
    near(weighted.max_gpu, uniform.max_gpu, 0.03);
    weighted = trial(64, 8, 8, 16, skewed);
    assert_true(weighted.active < 0.8 * uniform.active && weighted.straggler > 2);
}

// Figure 10: finer experts spread the load of an expert more, that of a GPU about the same; more
// GPUs spread it more, and padding adds to it. And the bounds hold where rows are many.
static void test_balls_bins_buckets(void **state) {
    (void)state;
    error err = {0};
    for (uint32_t rows = 256; rows <= 4096; rows *= 4) {
        tax_trial_result coarse = trial(8, 2, 4, rows, NULL), fine = trial(64, 8, 4, rows, NULL),
                         wide = trial(64, 8, 32, rows, NULL);
        double coarse_skew = coarse.max_expert / (rows * 2.0 / 8);
        double fine_skew = fine.max_expert / (rows * 8.0 / 64);
        assert_true(fine_skew > coarse_skew);
        assert_true(fabs(fine.straggler - coarse.straggler) < 0.1);
        assert_true(wide.straggler > fine.straggler);
        double bound = tax_max_load(rows * 8.0, 64);
        assert_true(fine.max_expert < bound && fine.max_expert > 0.75 * bound);
        assert_true(wide.straggler < tax_straggler_bound(rows, 8, 32));
        assert_true(coarse.straggler < tax_straggler_bound(rows, 2, 4));
    }
    // As many balls as bins: the formula is about a half of a random throw's.
    double few = tax_max_load(256, 256), thrown = trial(256, 1, 1, 256, NULL).max_expert;
    assert_true(few > 0.5 * thrown && few < 1.5 * thrown);
    assert_true(tax_max_load(3, 1) == 3 && tax_max_load(1, 100) == 1);
    tax_trial padded = {
        .experts = 64, .top_k = 8, .gpus = 32, .rows = 32, .block = 16, .runs = 200, .seed = 1};
    tax_trial_result r;
    assert_int_equal(tax_monte_carlo(&padded, &r, &err), E_OK);
    assert_true(r.eta > 3); // about four rows in a block of 16
    padded.padding = TAX_MAX;
    assert_int_equal(tax_monte_carlo(&padded, &r, &err), E_OK);
    assert_true(r.eta > 3);
}

static void test_bad_arguments(void **state) {
    (void)state;
    const tax_trial good = {.experts = 8, .top_k = 2, .gpus = 2, .rows = 4, .block = 1, .runs = 1};
    tax_trial_result r;
    error err = {0};
    tax_trial t;
    double weights[8] = {1, 0, 0, 0, 0, 0, 0, 0};
    assert_int_equal(tax_monte_carlo(&good, &r, &err), E_OK);
#define REFUSED(field, value)                                                                      \
    t = good, t.field = value, assert_int_equal(tax_monte_carlo(&t, &r, &err), E_INVALID)
    REFUSED(experts, 0);
    REFUSED(experts, TAX_MAX_EXPERTS + 1);
    REFUSED(top_k, 9);
    REFUSED(top_k, 0);
    REFUSED(gpus, 0);
    REFUSED(gpus, 3);
    REFUSED(rows, 0);
    REFUSED(runs, 0);
    REFUSED(block, 0);
    REFUSED(weights, weights); // one expert cannot be two
    weights[1] = NAN;
    REFUSED(weights, weights);
#undef REFUSED
    tax_hardware hardware = {.hbm_bytes_s = 1e12, .flops_s = 0, .net_bytes_s = 1e9};
    tax_shape shape = {64, 64, 8, 2, 2, 2, 2};
    tax_model model;
    assert_int_equal(tax_model_make(&hardware, &shape, &model, &err), E_INVALID);
    assert_non_null(strstr(err.text, "peak compute"));
    hardware.flops_s = NAN;
    assert_int_equal(tax_model_make(&hardware, &shape, &model, &err), E_INVALID);
    hardware.flops_s = 1e12, shape.top_k = 9;
    assert_int_equal(tax_model_make(&hardware, &shape, &model, &err), E_INVALID);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_costs),
        cmocka_unit_test(test_regimes),
        cmocka_unit_test(test_where_the_prefill_tax_ends),
        cmocka_unit_test(test_decode_tax),
        cmocka_unit_test(test_active_experts),
        cmocka_unit_test(test_padding),
        cmocka_unit_test(test_expert_parallel),
        cmocka_unit_test(test_network),
        cmocka_unit_test(test_ffn_time),
        cmocka_unit_test(test_monte_carlo),
        cmocka_unit_test(test_balls_bins_buckets),
        cmocka_unit_test(test_bad_arguments),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
