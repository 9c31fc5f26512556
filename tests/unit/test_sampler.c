// The sampler against plain double-precision formulas: what may be drawn, how often, and what is
// reported of it.
#include "attn_node/sampler.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum { VOCAB = 40, DRAWS = 20000 };

static sampling_params plain(float temperature) {
    return (sampling_params){.temperature = temperature,
                             .top_p = 1,
                             .repetition_penalty = 1,
                             .max_tokens = 100,
                             .logprobs = -1};
}

static sampler *open_sampler(size_t vocab) {
    sampler *s;
    error err;
    assert_int_equal(sampler_open(vocab, &s, &err), E_OK);
    return s;
}

static int32_t sample_at(sampler *s, const sampling_params *p, const float *logits,
                         size_t position) {
    static const int32_t no_tokens[64];
    token_event event = {0};
    assert_true(position <= 64);
    sampler_sample(s,
                   &(sampler_args){.params = p,
                                   .logits = logits,
                                   .tokens = no_tokens,
                                   .n_tokens = position,
                                   .n_prompt = position},
                   &event);
    assert_in_range(event.id, 0, 100000);
    return event.id;
}

// Logits without equal values, the best one in the middle.
static void make_logits(float *logits) {
    for (int i = 0; i < VOCAB; i++)
        logits[i] = 3.0f * sinf(1.7f * (float)i) + 0.01f * (float)i;
}

// ---- the exact distribution: temperature, top_k, top_p over what is left, min_p ----

static int by_probability(const void *a, const void *b) {
    const double *x = *(const double *const *)a, *y = *(const double *const *)b;
    return *x < *y ? 1 : *x > *y ? -1 : x < y ? -1 : 1;
}

static void exact(const float *logits, const sampling_params *p, double *out) {
    double all[VOCAB], *order[VOCAB], top = -INFINITY, mass = 0, kept = 0;
    for (int i = 0; i < VOCAB; i++)
        top = fmax(top, (double)logits[i]);
    for (int i = 0; i < VOCAB; i++) {
        all[i] = exp(((double)logits[i] - top) / (double)p->temperature);
        order[i] = &all[i];
        out[i] = 0;
    }
    qsort(order, VOCAB, sizeof *order, by_probability);
    int n = p->top_k > 0 && p->top_k < VOCAB ? p->top_k : VOCAB;
    for (int i = 0; i < n; i++)
        mass += *order[i];
    int last = 0;
    for (double sum = 0; last < n && sum < (double)p->top_p * mass - 1e-9; last++)
        sum += *order[last];
    for (int i = 0; i < last; i++)
        if (i == 0 || *order[i] >= (double)p->min_p)
            kept += out[order[i] - all] = *order[i];
    for (int i = 0; i < VOCAB; i++)
        out[i] /= kept;
}

static void check_distribution(const sampling_params *params) {
    float logits[VOCAB];
    double expected[VOCAB];
    int seen[VOCAB] = {0};
    make_logits(logits);
    exact(logits, params, expected);
    sampler *s = open_sampler(VOCAB);
    sampling_params p = *params;
    for (int i = 0; i < DRAWS; i++) {
        p.seed = (uint64_t)i / 50;
        seen[sample_at(s, &p, logits, (size_t)i % 50)]++;
    }
    sampler_close(s);
    double chi_square = 0, rare = 0;
    int n_cells = 0, n_rare = 0;
    for (int i = 0; i < VOCAB; i++) {
        double mean = expected[i] * DRAWS;
        if (mean == 0 && seen[i])
            fail_msg("token %d was drawn %d times but is outside of the set", i, seen[i]);
        if (mean < 10) {
            rare += mean, n_rare += seen[i];
            continue;
        }
        chi_square += (seen[i] - mean) * (seen[i] - mean) / mean;
        n_cells++;
    }
    assert_true(fabs(n_rare - rare) < 6 * sqrt(rare + 1));
    if (!(chi_square < n_cells + 6 * sqrt(2.0 * n_cells)))
        fail_msg("chi-square %.1f over %d cells", chi_square, n_cells);
}

static void test_distributions(void **state) {
    (void)state;
    static const struct {
        float temperature, top_p, min_p;
        int32_t top_k;
    } cases[] = {
        {1, 1, 0, 0},
        {0.5f, 1, 0, 0},
        {2.5f, 1, 0, 0},
        {1, 1, 0, 7},
        {1, 1, 0, 1},
        {1, 1, 0, 1000},
        {1, 0.5f, 0, 0},
        {1.3f, 0.9f, 0, 0},
        {1, 0.01f, 0, 0},
        {1, 1, 0.2f, 0},
        {1, 1, 1, 0},
        {1, 0.8f, 0, 3},
        {1, 0.9f, 0.3f, 0},
        {1, 0.9f, 0, 10},
        {2, 0.95f, 0.05f, 20},
        {1, 1, 0.4f, 5},
        {1, 0.7f, 0, 2},
        {1, 0.7f, 0.9f, 4},
        {0.7f, 0.97f, 0.01f, 30},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        sampling_params p = plain(cases[i].temperature);
        p.top_p = cases[i].top_p;
        p.min_p = cases[i].min_p;
        p.top_k = cases[i].top_k;
        check_distribution(&p);
    }
}

// top_p is a share of what top_k left, also when the nucleus of all would be wider.
static void test_top_p_after_top_k(void **state) {
    (void)state;
    float logits[3] = {logf(0.77f), logf(0.18f), logf(0.05f)};
    sampler *s = open_sampler(3);
    sampling_params p = plain(1);
    p.top_k = 2;
    p.top_p = 0.8f; // 0.77 of 0.95 is more than that
    for (uint64_t seed = 0; seed < 500; seed++) {
        p.seed = seed;
        assert_int_equal(sample_at(s, &p, logits, 3), 0);
    }
    sampler_close(s);
}

// A large vocabulary, of which only the best are sorted: the sets are exact all the same.
static void test_large_sets(void **state) {
    (void)state;
    enum { WIDE = 3000 };
    static const struct {
        int32_t top_k;
        float top_p;
    } cases[] = {{300, 1}, {0, 0.5f}, {2500, 0.9f}, {0, 0.99f}, {WIDE, 1}, {1, 0.5f}};
    static float logits[WIDE];
    static double weight[WIDE];
    static bool allowed[WIDE], seen[WIDE];
    sampler *s = open_sampler(WIDE);
    for (int i = 0; i < WIDE; i++) { // a permutation of equal steps
        logits[i] = (float)((i * 1237 + 11) % WIDE) / 1000;
        weight[WIDE - 1 - (i * 1237 + 11) % WIDE] = exp((double)logits[i]); // descending
    }
    for (size_t c = 0; c < sizeof cases / sizeof *cases; c++) {
        sampling_params p = plain(1);
        p.top_k = cases[c].top_k;
        p.top_p = cases[c].top_p;
        size_t n = p.top_k ? (size_t)p.top_k : WIDE, kept = 0, n_seen = 0;
        double total = 0, sum = 0;
        for (size_t i = 0; i < n; i++)
            total += weight[i];
        while (kept < n && sum < (double)p.top_p * total)
            sum += weight[kept++];
        for (int i = 0; i < WIDE; i++) {
            allowed[i] = (size_t)(WIDE - 1 - (i * 1237 + 11) % WIDE) < kept;
            seen[i] = false;
        }
        for (uint64_t seed = 0; seed < 600; seed++) {
            p.seed = seed;
            int32_t id = sample_at(s, &p, logits, 1);
            assert_true(allowed[id]);
            n_seen += !seen[id];
            seen[id] = true;
        }
        assert_true(n_seen * 2 > (kept < 600 ? kept : 600)); // and most of the set comes up
    }
    sampler_close(s);
}

// ---- greedy, ties, values that are not numbers ----

static void test_greedy_and_ties(void **state) {
    (void)state;
    float logits[VOCAB];
    make_logits(logits);
    int best = 0;
    for (int i = 0; i < VOCAB; i++)
        best = logits[i] > logits[best] ? i : best;
    sampler *s = open_sampler(VOCAB);
    sampling_params p = plain(0);
    for (uint64_t seed = 0; seed < 20; seed++) {
        p.seed = seed;
        assert_int_equal(sample_at(s, &p, logits, (size_t)seed), best);
    }
    logits[3] = logits[best]; // of equal ones the first
    assert_int_equal(sample_at(s, &p, logits, 0), best < 3 ? best : 3);
    for (int i = 0; i < VOCAB; i++)
        logits[i] = 1;
    assert_int_equal(sample_at(s, &p, logits, 0), 0);
    p = plain(1e-30f); // so cold that only the best is left
    make_logits(logits);
    for (uint64_t seed = 0; seed < 20; seed++) {
        p.seed = seed;
        assert_int_equal(sample_at(s, &p, logits, 5), best);
    }
    // top_k 1 of equal ones is the first, whatever the seed.
    for (int i = 0; i < VOCAB; i++)
        logits[i] = 1;
    p = plain(1);
    p.top_k = 1;
    for (uint64_t seed = 0; seed < 20; seed++) {
        p.seed = seed;
        assert_int_equal(sample_at(s, &p, logits, 5), 0);
    }
    sampler_close(s);
}

static void check_reported(const token_event *event) {
    assert_true(isfinite(event->logprob));
    for (int i = 0; i < event->n_top; i++)
        assert_true(isfinite(event->top[i].logprob));
}

static void test_values_that_are_not_numbers(void **state) {
    (void)state;
    static const float specials[] = {NAN, -INFINITY};
    float logits[VOCAB];
    sampler *s = open_sampler(VOCAB);
    for (size_t k = 0; k < 2; k++) {
        for (int hot = 0; hot < 2; hot++) {
            sampling_params p = plain(hot ? 1.5f : 0);
            p.logprobs = 20;
            for (uint64_t seed = 0; seed < 200; seed++) {
                make_logits(logits);
                for (int i = 0; i < VOCAB; i += 2)
                    logits[i] = specials[k];
                p.seed = seed;
                token_event event = {0};
                sampler_sample(s, &(sampler_args){.params = &p, .logits = logits}, &event);
                assert_int_equal(event.id % 2, 1);
                check_reported(&event);
            }
            for (int i = 0; i < VOCAB; i++)
                logits[i] = specials[k];
            token_event event = {0};
            sampler_sample(s, &(sampler_args){.params = &p, .logits = logits}, &event);
            assert_in_range(event.id, 0, VOCAB - 1);
            check_reported(&event);
        }
    }
    make_logits(logits);
    logits[9] = logits[11] = INFINITY;
    bool seen[2] = {false, false};
    sampling_params p = plain(1);
    p.logprobs = 5;
    for (uint64_t seed = 0; seed < 100; seed++) {
        p.seed = seed;
        token_event event = {0};
        sampler_sample(s, &(sampler_args){.params = &p, .logits = logits}, &event);
        assert_true(event.id == 9 || event.id == 11);
        seen[event.id == 11] = true;
        check_reported(&event);
    }
    assert_true(seen[0] && seen[1]);
    sampler_close(s);
}

// ---- bias, penalties, min_tokens ----

static void test_logit_bias(void **state) {
    (void)state;
    float logits[VOCAB];
    make_logits(logits);
    logit_bias bias[3] = {{7, -100}, {8, 100}, {9, 99}};
    sampler *s = open_sampler(VOCAB);
    for (int hot = 0; hot < 2; hot++) {
        sampling_params p = plain(hot ? 1 : 0);
        p.logit_bias = bias;
        p.n_logit_bias = 3;
        int32_t first = sample_at(s, &p, logits, 0);
        assert_true(first == 8 || (hot && first == 9));
        bias[1].bias = INFINITY;
        bias[2].bias = -INFINITY;
        for (uint64_t seed = 0; seed < 50; seed++) {
            p.seed = seed;
            assert_int_equal(sample_at(s, &p, logits, 1), 8);
        }
        bias[1].bias = 100;
        bias[2].bias = 99;
    }
    // A ban leaves the distribution of the others as it was.
    sampling_params p = plain(1);
    p.logit_bias = bias;
    p.n_logit_bias = 1;
    for (uint64_t seed = 0; seed < 2000; seed++) {
        p.seed = seed;
        assert_int_not_equal(sample_at(s, &p, logits, 2), 7);
    }
    sampler_close(s);
}

// The logits after penalties, seen through greedy choice: token `id` wins exactly while the others
// lie below its adjusted value.
static float adjusted_value(sampler *s, const sampling_params *params, const float *logits,
                            const int32_t *tokens, size_t n_tokens, size_t n_prompt, int32_t id) {
    sampling_params p = *params;
    float low = -50, high = 50;
    for (int i = 0; i < 40; i++) {
        float middle = (low + high) / 2, row[VOCAB];
        for (int k = 0; k < VOCAB; k++)
            row[k] = k == id ? logits[id] : k == 0 ? middle : -60;
        token_event event = {0};
        sampler_sample(s,
                       &(sampler_args){.params = &p,
                                       .logits = row,
                                       .tokens = tokens,
                                       .n_tokens = n_tokens,
                                       .n_prompt = n_prompt},
                       &event);
        if (event.id == id)
            low = middle;
        else
            high = middle;
    }
    return low;
}

static void test_penalties(void **state) {
    (void)state;
    static const int32_t tokens[] = {5, 5, 6, 7, 5, 7, 7, 8}; // a prompt of 4
    float logits[VOCAB];
    for (int i = 0; i < VOCAB; i++)
        logits[i] = i % 2 ? 4 : -4;
    sampler *s = open_sampler(VOCAB);
    sampling_params p = plain(0);
    p.presence_penalty = 0.5f;
    p.frequency_penalty = 0.25f;
    static const struct {
        int32_t id, in_output;
    } counts[] = {{5, 1}, {6, 0}, {7, 2}, {8, 1}, {9, 0}};
    for (size_t i = 0; i < 5; i++) {
        int32_t id = counts[i].id;
        float want =
            logits[id] - 0.25f * (float)counts[i].in_output - (counts[i].in_output ? 0.5f : 0);
        float got = adjusted_value(s, &p, logits, tokens, 8, 4, id);
        assert_true(fabsf(got - want) < 1e-3f);
    }
    p = plain(0);
    p.repetition_penalty = 2; // prompt and output, once however often
    for (int32_t id = 5; id < 10; id++) {
        float want = id == 9 ? 4 : id % 2 ? 2 : -8;
        float got = adjusted_value(s, &p, logits, tokens, 8, 4, id);
        assert_true(fabsf(got - want) < 1e-3f);
    }
    sampler_close(s);
}

static void test_min_tokens(void **state) {
    (void)state;
    float logits[VOCAB] = {0};
    logits[2] = logits[4] = 50;
    logits[6] = 40;
    sampler *s = open_sampler(VOCAB);
    for (int hot = 0; hot < 2; hot++) {
        sampling_params p = plain(hot ? 1 : 0);
        p.n_stop_ids = 2;
        p.stop_ids[0] = 2;
        p.stop_ids[1] = 4;
        p.min_tokens = 3;
        for (size_t n = 0; n < 6; n++) {
            token_event event = {0};
            sampler_sample(s, &(sampler_args){.params = &p, .logits = logits, .n_generated = n},
                           &event);
            if (n < 3)
                assert_int_equal(event.id, 6);
            else
                assert_true(event.id == 2 || event.id == 4);
        }
    }
    sampler_close(s);
}

// ---- what a draw depends on ----

static void test_draw_depends_on_seed_and_position_alone(void **state) {
    (void)state;
    float logits[VOCAB], other[VOCAB];
    int32_t first[64];
    make_logits(logits);
    for (int i = 0; i < VOCAB; i++)
        other[i] = logits[VOCAB - 1 - i];
    sampling_params p = plain(1.5f), q = plain(1);
    p.seed = 42;
    q.top_p = 0.5f;
    q.repetition_penalty = 1.3f;
    sampler *s = open_sampler(VOCAB);
    for (size_t i = 0; i < 64; i++)
        first[i] = sample_at(s, &p, logits, i);
    for (size_t i = 64; i-- > 0;) { // another order, other requests between
        sample_at(s, &q, other, i);
        assert_int_equal(sample_at(s, &p, logits, i), first[i]);
    }
    sampler *fresh = open_sampler(VOCAB);
    int same_seed = 0, next_seed = 0, shifted = 0;
    for (size_t i = 0; i < 64; i++) {
        same_seed += sample_at(fresh, &p, logits, i) == first[i];
        sampling_params next = p;
        next.seed = 43;
        int32_t id = sample_at(fresh, &next, logits, i);
        next_seed += id == first[i];
        shifted += i < 63 && id == first[i + 1];
    }
    assert_int_equal(same_seed, 64);
    assert_true(next_seed < 32); // neither the same nor the same one step later
    assert_true(shifted < 32);
    sampler_close(s);
    sampler_close(fresh);
}

// ---- log-probabilities ----

static void test_logprobs_are_a_log_softmax(void **state) {
    (void)state;
    enum { WIDE = 5000 };
    static float logits[WIDE];
    for (int i = 0; i < WIDE; i++)
        logits[i] = 12.0f * sinf(0.37f * (float)i) * cosf(0.011f * (float)i);
    double sum = 0;
    for (int i = 0; i < WIDE; i++)
        sum += exp((double)logits[i]);
    sampler *s = open_sampler(WIDE);
    for (int32_t n_top = 0; n_top <= REQUEST_MAX_TOP_LOGPROBS; n_top += 5) {
        // What penalties and temperature do to the choice does not show in the report.
        sampling_params p = plain(2);
        p.logprobs = n_top;
        p.presence_penalty = 1;
        token_event event = {0};
        int32_t tokens[2] = {1, 2};
        sampler_sample(
            s,
            &(sampler_args){
                .params = &p, .logits = logits, .tokens = tokens, .n_tokens = 2, .n_prompt = 1},
            &event);
        assert_true(fabs((double)event.logprob - ((double)logits[event.id] - log(sum))) < 2e-5);
        assert_int_equal(event.n_top, n_top);
        for (int i = 0; i < n_top; i++) {
            double want = (double)logits[event.top[i].id] - log(sum);
            assert_true(fabs((double)event.top[i].logprob - want) < 2e-5);
            int above = 0; // exactly i tokens are better
            for (int k = 0; k < WIDE; k++)
                above += logits[k] > logits[event.top[i].id] ||
                         (logits[k] == logits[event.top[i].id] && k < event.top[i].id);
            assert_int_equal(above, i);
        }
        sampler_score(s, logits, 77, n_top, &event);
        assert_true(fabs((double)event.logprob - ((double)logits[77] - log(sum))) < 2e-5);
    }
    token_event event = {0};
    sampler_score(s, logits, 77, -1, &event);
    assert_int_equal(event.n_top, -1);
    sampler_close(s);
}

static void test_top_list_of_equals_and_of_a_small_vocabulary(void **state) {
    (void)state;
    float logits[4] = {1, 1, 1, 1};
    token_event event = {0};
    sampler *s = open_sampler(4);
    sampler_score(s, logits, 2, 20, &event);
    assert_int_equal(event.n_top, 4);
    for (int i = 0; i < 4; i++) {
        assert_int_equal(event.top[i].id, i);
        assert_true(fabs((double)event.top[i].logprob + log(4)) < 1e-6);
    }
    sampler_score(s, logits, 2, 2, &event);
    assert_int_equal(event.top[0].id, 0);
    assert_int_equal(event.top[1].id, 1);
    logits[3] = -INFINITY;
    sampler_score(s, logits, 3, 4, &event);
    assert_true(event.logprob == -9999.0f && event.top[3].logprob == -9999.0f);
    sampler_close(s);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_distributions),
        cmocka_unit_test(test_top_p_after_top_k),
        cmocka_unit_test(test_large_sets),
        cmocka_unit_test(test_greedy_and_ties),
        cmocka_unit_test(test_values_that_are_not_numbers),
        cmocka_unit_test(test_logit_bias),
        cmocka_unit_test(test_penalties),
        cmocka_unit_test(test_min_tokens),
        cmocka_unit_test(test_draw_depends_on_seed_and_position_alone),
        cmocka_unit_test(test_logprobs_are_a_log_softmax),
        cmocka_unit_test(test_top_list_of_equals_and_of_a_small_vocabulary),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
