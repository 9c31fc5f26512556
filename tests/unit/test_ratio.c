// The ratio rule against the paper's figures, its corrected forms against independent ones, the
// search against its limits, and arguments that must be refused.
#include "engine/ratio.h"
#include "engine/ratio_plan.h"

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

// Table 2 with geometric lengths; the prompts' variance is that of a geometric on 1, 2, ...
static ratio_setup make_setup(double batch, double prompt, double output, double requests) {
    ratio_setup setup = {.batch = batch, .lanes = 2, .requests = requests};
    error err = {0};
    assert_int_equal(ratio_law_preset("ascend910c", &setup.law, &err), E_OK);
    assert_int_equal(
        ratio_load_from_means(prompt, prompt * (prompt - 1), output, &setup.load, &err), E_OK);
    assert_int_equal(ratio_setup_check(&setup, &err), E_OK);
    return setup;
}

static void test_paper_ratios(void **state) {
    (void)state;
    static const struct {
        double batch, prompt, output, r_star;
        ratio_regime regime;
    } cases[] = {
        {256, 100, 100, 2.17, RATIO_FFN},        {256, 100, 500, 9.32, RATIO_ATTENTION},
        {256, 500, 500, 17.25, RATIO_ATTENTION}, {128, 100, 500, 7.09, RATIO_ATTENTION},
        {512, 100, 500, 10.25, RATIO_ATTENTION},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        ratio_setup setup = make_setup(cases[i].batch, cases[i].prompt, cases[i].output, 10000);
        ratio_rule rule;
        ratio_solve(&setup, &rule);
        near(rule.r_star, cases[i].r_star, 0.01);
        assert_int_equal(rule.regime, cases[i].regime);
        near(rule.throughput,
             ratio_throughput(&setup, ratio_cycle(&setup, RATIO_MEAN_FIELD, rule.r_star, 1),
                              rule.r_star, 1),
             1e-12);
    }
    ratio_setup limit = make_setup(256, 100, 500, INFINITY);
    ratio_rule rule;
    ratio_solve(&limit, &rule);
    near(rule.r_star, (0.00165 * 256 * 600 - 50) / (0.083 * 256), 1e-12);
}

// No r near r* gives more, in each regime; the third is communication-bound.
static void test_the_optimum_is_one(void **state) {
    (void)state;
    for (int i = 0; i < 3; i++) {
        ratio_setup setup = make_setup(256, 100, i == 0 ? 100 : 500, INFINITY);
        if (i == 2)
            setup.law.beta_c = 1000;
        ratio_rule rule;
        ratio_solve(&setup, &rule);
        assert_int_equal(rule.regime, i == 0   ? RATIO_FFN
                                      : i == 1 ? RATIO_ATTENTION
                                               : RATIO_COMMUNICATION);
        for (double r = 0.1; r < 100; r *= 1.01)
            assert_true(ratio_throughput(&setup, ratio_cycle(&setup, RATIO_MEAN_FIELD, r, 1), r,
                                         1) <= rule.throughput * (1 + 1e-12));
    }
}

static void test_token_load(void **state) {
    (void)state;
    ratio_setup setup = make_setup(64, 30, 40, INFINITY);
    const ratio_load *load = &setup.load;
    assert_true(ratio_tokens_at(load, 64, 0) == 64 * 30.0);
    near(ratio_tokens_at(load, 64, 1e6), 64 * 70.0, 1e-12);
    // One step of the recursion of lemma 4.1: E[D(k+1)] = (1 - p)(E[D(k)] + B).
    double d7 = ratio_tokens_at(load, 64, 7) - 64 * 30, d8 = ratio_tokens_at(load, 64, 8) - 64 * 30;
    near(d8, (1 - 1 / 41.0) * (d7 + 64), 1e-12);
    // The closed form (13) is the mean of (11) over the steps of the horizon: N = B p K.
    double sum = 0;
    for (int k = 0; k < 200; k++)
        sum += ratio_tokens_at(load, 64, k);
    near(ratio_tokens(load, 64, 200 * 64 / 41.0), sum / 200, 1e-12);
    near(ratio_tokens(load, 64, INFINITY), 64 * 70.0, 1e-15);
}

// A geometric trace gives theta = mu_P + mu_D without being told; one of fixed lengths is counted
// by hand.
static void test_load_of_a_trace(void **state) {
    (void)state;
    error err = {0};
    ratio_load load, exact;
    ratio_sums fixed = {0}, geometric = {0};
    ratio_sums_add(&fixed, 10, 4); // 10, 11, 12, 13
    ratio_sums_add(&fixed, 20, 2); // 20, 21
    assert_int_equal(ratio_load_from_sums(&fixed, &load, &err), E_OK);
    near(load.theta, 87.0 / 6, 1e-15);
    double squares = 100 + 121 + 144 + 169 + 400 + 441;
    near(load.nu2, squares / 6 - load.theta * load.theta, 1e-12);
    near(load.mean_prompt, 15, 1e-15);
    near(load.mean_output, 3, 1e-15);
    // Quantiles of a geometric D on 0, 1, ... of mean 50, in place of draws.
    for (int i = 0; i < 200000; i++)
        ratio_sums_add(&geometric, 100, floor(log((i + 0.5) / 200000) / log(50.0 / 51)));
    assert_int_equal(ratio_load_from_sums(&geometric, &load, &err), E_OK);
    assert_int_equal(ratio_load_from_means(100, 0, 50, &exact, &err), E_OK);
    near(load.theta, exact.theta, 0.001);
    near(load.nu2, exact.nu2, 0.005);
}

static void test_kappa(void **state) {
    (void)state;
    near(ratio_kappa(2), 1 / sqrt(M_PI), 1e-7);
    near(ratio_kappa(3), 1.5 / sqrt(M_PI), 1e-7);
    near(ratio_kappa(4), 1.02937537, 1e-7);
    near(ratio_kappa(8), 1.42360031, 1e-7);
    near(ratio_kappa(16), 1.76599139, 1e-7);
    near(ratio_kappa(1000), 3.24143577, 1e-6);
    assert_true(ratio_kappa(1) == 0);
}

static void test_barrier(void **state) {
    (void)state;
    // One worker: E[max(g, mu + sigma X)] has a closed form.
    for (double z = -6; z <= 6; z += 0.5) {
        double phi = exp(-z * z / 2) / sqrt(2 * M_PI), tail = 0.5 * erfc(z * M_SQRT1_2);
        near(ratio_barrier(10 + 3 * z, 10, 3, 1), 10 + 3 * z + 3 * (phi - z * tail), 1e-7);
    }
    near(ratio_barrier(0, 300, 13, 8), 300 + 13 * ratio_kappa(8), 1e-9);
    assert_true(ratio_barrier(700, 300, 0, 8) == 700);
    assert_true(ratio_barrier(100, 300, 0, 8) == 300);
    near(ratio_barrier(100, 300, 1e-300, 8), 300, 1e-12);
    near(ratio_barrier(700, 300, 13, 32), 700, 1e-12);
}

// The steady per-instance throughput of an independent simulation (table 2, B = 256, 100/500).
static void test_lanes_against_an_independent_simulation(void **state) {
    (void)state;
    static const double seen[][2] = {{1, 0.423},  {4, 0.668},  {8, 0.721},  {9, 0.713},
                                     {10, 0.701}, {12, 0.661}, {16, 0.548}, {32, 0.318}};
    ratio_setup setup = make_setup(256, 100, 500, INFINITY);
    for (size_t i = 0; i < sizeof seen / sizeof *seen; i++) {
        double r = seen[i][0];
        near(ratio_throughput(&setup, ratio_cycle(&setup, RATIO_LANES, r, 1), r, 1), seen[i][1],
             0.025);
    }
    ratio_choice best;
    error err = {0};
    ratio_limits none = {0};
    assert_int_equal(ratio_search(&setup, RATIO_LANES, &none, &best, &err), E_OK);
    assert_int_equal(best.attention, 8);
    assert_int_equal(best.ffn, 1);
    assert_int_equal(ratio_search(&setup, RATIO_BARRIER, &none, &best, &err), E_OK);
    assert_int_equal(best.attention, 10);
    // One lane is one thing after another.
    setup.lanes = 1;
    near(ratio_cycle(&setup, RATIO_LANES, 1, 1), 303.44 + 25.632 + 121.248, 1e-9);
}

// The search equals a look at every pair, and keeps each limit.
static void test_search(void **state) {
    (void)state;
    ratio_setup setup = make_setup(256, 100, 500, INFINITY);
    error err = {0};
    for (int form = RATIO_MEAN_FIELD; form <= RATIO_LANES; form++) {
        ratio_limits limits = {.pool = 24, .min_ffn = 2};
        ratio_choice best, one;
        double most = 0;
        assert_int_equal(ratio_search(&setup, (ratio_form)form, &limits, &best, &err), E_OK);
        for (uint32_t x = 1; x < 24; x++)
            for (uint32_t y = 2; x + y <= 24; y++) {
                ratio_evaluate(&setup, (ratio_form)form, x, y, &one);
                most = fmax(most, one.throughput);
            }
        near(best.throughput, most, 1e-12);
        assert_true(best.attention + best.ffn <= 24 && best.ffn >= 2);
        limits.max_tpot = best.tpot * 0.99;
        assert_int_equal(ratio_search(&setup, (ratio_form)form, &limits, &one, &err),
                         form == RATIO_MEAN_FIELD ? E_FULL : E_OK);
        if (form != RATIO_MEAN_FIELD)
            assert_true(one.tpot <= limits.max_tpot && one.throughput <= best.throughput);
    }
    ratio_limits memory = {.kv_tokens = 2 * 256 * 600};
    ratio_choice best;
    assert_int_equal(ratio_search(&setup, RATIO_LANES, &memory, &best, &err), E_FULL);
    assert_non_null(strstr(err.text, "kv-tokens"));
    memory.kv_tokens = ratio_kv_tokens(&setup);
    assert_int_equal(ratio_search(&setup, RATIO_LANES, &memory, &best, &err), E_OK);
    // A large pool is searched in a moment: what cannot win is not integrated.
    memory.pool = 1024;
    assert_int_equal(ratio_search(&setup, RATIO_BARRIER, &memory, &best, &err), E_OK);
    // An FFN that is the slower part even for one attention worker asks for more FFN workers.
    setup.law.alpha_f = 10, setup.law.beta_f = 0;
    ratio_limits none = {0};
    assert_int_equal(ratio_search(&setup, RATIO_LANES, &none, &best, &err), E_OK);
    assert_int_equal(best.attention, 1);
    assert_in_range(best.ffn, 5, 12);
}

static void test_idle_shares_add_up(void **state) {
    (void)state;
    ratio_setup setup = make_setup(256, 100, 500, INFINITY);
    ratio_choice at;
    ratio_evaluate(&setup, RATIO_LANES, 1, 1, &at);
    near(at.idle_ffn, 1 - 121.248 / 303.44, 1e-9);
    assert_int_equal(at.bound, RATIO_BOUND_ATTENTION);
    ratio_evaluate(&setup, RATIO_LANES, 9, 1, &at);
    assert_int_equal(at.bound, RATIO_BOUND_LOOP);
    near(at.tpot, 2 * at.cycle, 1e-15);
    ratio_evaluate(&setup, RATIO_LANES, 32, 1, &at);
    near(at.idle_attention, 1 - 303.44 / 779.936, 1e-9);
    assert_int_equal(at.bound, RATIO_BOUND_FFN);
}

static void test_colocated(void **state) {
    (void)state;
    ratio_setup setup = make_setup(256, 100, 500, INFINITY);
    ratio_colocated whole, part;
    assert_true(ratio_colocate(&setup, 0, &whole));
    near(whole.cycle, 0.00165 * 512 * 600 + 50 + 0.083 * 512 + 100, 1e-12);
    near(whole.throughput, 512 / whole.cycle, 1e-12);
    assert_true(ratio_colocate(&setup, 400, &part));
    assert_true(part.tpot <= 400 && part.batch < 512);
    assert_false(ratio_colocate(&setup, 150, &part));
}

static void test_sensitivity(void **state) {
    (void)state;
    ratio_setup setup = make_setup(256, 100, 500, INFINITY);
    ratio_sensitivity out[RATIO_N_SENSITIVITIES];
    ratio_sensitivities(&setup, out);
    // r_A = (alpha_A T + beta_A - beta_F) / (alpha_F B): the derivatives by hand.
    assert_string_equal(out[0].name, "alpha_a");
    near(out[0].r_star, 253.44 / 203.44, 0.001);
    assert_string_equal(out[2].name, "alpha_f");
    near(out[2].r_star, -1, 0.001);
    near(out[3].r_star, -100 / 203.44, 0.001);
    assert_true(fabs(out[4].r_star) < 1e-9 && fabs(out[5].r_star) < 1e-9);
    assert_string_equal(out[6].name, "theta");
    near(out[6].r_star, out[0].r_star, 1e-9);
}

// The shapes of DeepSeek-V3 in appendix B, on hardware of round numbers.
static void test_law_from_hardware(void **state) {
    (void)state;
    ratio_hardware hardware = {.hbm_bytes_s = 2e12,
                               .hbm_efficiency = 0.576,
                               .flops_s = 1e15,
                               .flops_efficiency = 0.5,
                               .net_bytes_s = 1e11};
    ratio_shape shape = {.hidden = 7168,
                         .expert_intermediate = 2048,
                         .kv_bytes = 1152,
                         .wire_bytes = 3,
                         .experts = 256,
                         .top_k = 8,
                         .experts_per_card = 8,
                         .mtp_depth = 1};
    ratio_law law = {.beta_a = 1, .beta_f = 2, .beta_c = 3};
    error err = {0};
    assert_int_equal(ratio_law_from_hardware(&hardware, &shape, &law, &err), E_OK);
    near(law.alpha_a, 1e-9, 1e-12);
    near(law.alpha_f, 8 * 6.0 * 7168 * 2048 / 5e14 / 16, 1e-12);
    near(law.alpha_c, 8 * 21504 / 1e11 / 16, 1e-12);
    assert_true(law.beta_a == 1 && law.beta_f == 2 && law.beta_c == 3);
    shape.top_k = 300;
    assert_int_equal(ratio_law_from_hardware(&hardware, &shape, &law, &err), E_INVALID);
    shape.top_k = 8, hardware.hbm_efficiency = NAN;
    assert_int_equal(ratio_law_from_hardware(&hardware, &shape, &law, &err), E_INVALID);
}

static void refused(ratio_setup setup, const char *word) {
    error err = {0};
    assert_int_equal(ratio_setup_check(&setup, &err), E_INVALID);
    if (!strstr(err.text, word))
        fail_msg("'%s' does not say '%s'", err.text, word);
}

static void test_bad_arguments(void **state) {
    (void)state;
    static const double bad[] = {-1, NAN, INFINITY, -INFINITY};
    const ratio_setup good = make_setup(256, 100, 500, INFINITY);
    error err = {0};
    ratio_load load;
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        ratio_setup setup;
#define X(field) setup = good, setup.law.field = bad[i], refused(setup, #field);
        RATIO_LAW_MAP(X)
#undef X
        setup = good, setup.batch = bad[i], refused(setup, "batch");
        setup = good, setup.lanes = bad[i], refused(setup, "lanes");
        setup = good, setup.load.theta = bad[i], refused(setup, "load");
        setup = good, setup.load.nu2 = bad[i], refused(setup, "load");
        if (bad[i] != INFINITY)
            setup = good, setup.requests = bad[i], refused(setup, "horizon");
        assert_int_equal(ratio_load_from_means(bad[i], 0, 5, &load, &err), E_INVALID);
        assert_int_equal(ratio_load_from_means(5, bad[i], 5, &load, &err), E_INVALID);
        assert_int_equal(ratio_load_from_means(5, 0, bad[i], &load, &err), E_INVALID);
    }
    ratio_setup setup = good;
    setup.law.alpha_f = 0, refused(setup, "alpha_f");
    setup = good, setup.law.beta_a = setup.law.alpha_a = 0, refused(setup, "attention");
    setup = good, setup.batch = 0, refused(setup, "batch");
    ratio_sums none = {0};
    assert_int_equal(ratio_load_from_sums(&none, &load, &err), E_INVALID);
    assert_int_equal(ratio_law_preset("h100", &setup.law, &err), E_NOT_FOUND);
    ratio_limits limits = {.pool = 1};
    ratio_choice best;
    assert_int_equal(ratio_search(&good, RATIO_LANES, &limits, &best, &err), E_FULL);
    limits.pool = RATIO_MAX_WORKERS + 1;
    assert_int_equal(ratio_search(&good, RATIO_LANES, &limits, &best, &err), E_INVALID);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_paper_ratios),
        cmocka_unit_test(test_the_optimum_is_one),
        cmocka_unit_test(test_token_load),
        cmocka_unit_test(test_load_of_a_trace),
        cmocka_unit_test(test_kappa),
        cmocka_unit_test(test_barrier),
        cmocka_unit_test(test_lanes_against_an_independent_simulation),
        cmocka_unit_test(test_search),
        cmocka_unit_test(test_idle_shares_add_up),
        cmocka_unit_test(test_colocated),
        cmocka_unit_test(test_sensitivity),
        cmocka_unit_test(test_law_from_hardware),
        cmocka_unit_test(test_bad_arguments),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
