// Split equals whole: however the bundle is cut into workers, lanes, chunks and passes, and
// whatever else is in the batch, a request gets what it gets alone in a bundle of one and one.
#include "router/synth.h"
#include "tests/support/rig.h"
#include "tests/support/tempdir.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>

#include <cmocka.h>

enum { N_REQUESTS = 8, VOCAB = 280, TOP = 5 };

static const size_t prompt_lengths[N_REQUESTS] = {1, 33, 5, 70, 16, 17, 2, 48};
static const int32_t max_tokens[N_REQUESTS] = {12, 9, 15, 4, 17, 1, 20, 10};

typedef struct answers {
    token_event events[N_REQUESTS][20];
} answers;

typedef struct fixture {
    tempdir dir;
    int32_t prompts[N_REQUESTS][70];
} fixture;

// A shared expert, biases and grouped heads: everything that an attention worker computes itself.
static fixture fixture_make(dtype type) {
    fixture f = {.dir = tempdir_make()};
    synth_args args = {.arch = MODEL_ARCH_QWEN2_MOE,
                       .hidden = 32,
                       .layers = 3,
                       .heads = 4,
                       .kv_heads = 2,
                       .experts = 7,
                       .top_k = 3,
                       .intermediate = 24,
                       .shared_intermediate = 40,
                       .vocab = VOCAB,
                       .context = 128,
                       .type = type,
                       .seed = 5,
                       .dir = f.dir.path};
    error err;
    if (synth_write(&args, NULL, NULL, &err))
        fail_msg("%s", err.text);
    uint32_t state = 1;
    for (size_t i = 0; i < N_REQUESTS; i++)
        for (size_t t = 0; t < prompt_lengths[i]; t++) {
            state = state * 1664525u + 1013904223u;
            f.prompts[i][t] = (int32_t)(state >> 8) % VOCAB;
        }
    return f;
}

static size_t submit(rig *r, const fixture *f, size_t worker, size_t i) {
    sampling_params params = rig_greedy(max_tokens[i]);
    params.logprobs = TOP;
    return rig_submit(r, worker, f->prompts[i], prompt_lengths[i], &params);
}

// One request at a time in the smallest bundle.
static answers run_whole(const fixture *f, config c) {
    answers w;
    c.attention.workers = c.ffn.workers = c.attention.lanes = 1;
    rig *r = rig_open(&c);
    for (size_t i = 0; i < N_REQUESTS; i++) {
        size_t index = submit(r, f, 0, i);
        rig_run(r);
        const rig_request *q = rig_request_at(r, index);
        assert_int_equal(q->finish, FINISH_LENGTH);
        assert_int_equal(q->n_events, max_tokens[i]);
        memcpy(w.events[i], q->events, q->n_events * sizeof *q->events);
    }
    rig_close(r);
    return w;
}

// tolerance 0: the same bits.
static void compare_event(const token_event *a, const token_event *b, double tolerance) {
    assert_int_equal(a->id, b->id);
    assert_int_equal(a->position, b->position);
    assert_int_equal(a->finish, b->finish);
    assert_int_equal(a->n_top, TOP);
    assert_int_equal(b->n_top, TOP);
    if (tolerance == 0) {
        assert_memory_equal(&a->logprob, &b->logprob, sizeof a->logprob);
        assert_memory_equal(a->top, b->top, TOP * sizeof *a->top);
        return;
    }
    if (!(fabs((double)a->logprob - (double)b->logprob) <= tolerance))
        fail_msg("log-probabilities %.9g and %.9g differ", (double)a->logprob, (double)b->logprob);
    for (int i = 0; i < TOP; i++)
        if (!(fabs((double)a->top[i].logprob - (double)b->top[i].logprob) <= tolerance))
            fail_msg("top log-probabilities differ");
}

static void compare(const rig *r, size_t first, const answers *w, double tolerance) {
    for (size_t i = 0; i < N_REQUESTS; i++) {
        const rig_request *q = rig_request_at(r, first + i);
        assert_int_equal(q->n_events, max_tokens[i]);
        for (size_t t = 0; t < q->n_events; t++)
            compare_event(&w->events[i][t], &q->events[t], tolerance);
    }
}

// All requests at once, then again while some are there already.
static void run_together(rig *r, const fixture *f, const answers *w, double tolerance) {
    size_t x = rig_plan(r)->n_attention;
    for (size_t i = 0; i < N_REQUESTS; i++)
        submit(r, f, i % x, i);
    rig_run(r);
    compare(r, 0, w, tolerance);
    for (size_t i = 0; i < N_REQUESTS; i++) {
        submit(r, f, (i / 2) % x, i);
        for (size_t turn = 0; turn < 5 * i; turn++)
            rig_turn(r);
    }
    rig_run(r);
    compare(r, N_REQUESTS, w, tolerance);
}

static const struct {
    int64_t max_seqs, token_budget;
    config_gather gather;
} settings[] = {
    {64, 256, CONFIG_GATHER_PASS}, {3, 3, CONFIG_GATHER_PASS},  {8, 20, CONFIG_GATHER_NONE},
    {1, 7, CONFIG_GATHER_PASS},    {4, 64, CONFIG_GATHER_NONE},
};

static void test_every_split(void **state) {
    (void)state;
    fixture f = fixture_make(DTYPE_F32);
    config c = rig_config(f.dir.path);
    answers w = run_whole(&f, c);
    size_t n = 0;
    for (int x = 1; x <= 3; x++)
        for (int y = 1; y <= 3; y++)
            for (int lanes = 1; lanes <= 3; lanes++, n++) {
                c.attention.workers = x;
                c.ffn.workers = y;
                c.attention.lanes = lanes;
                c.attention.max_seqs = settings[n % 5].max_seqs;
                c.attention.token_budget = settings[n % 5].token_budget;
                c.ffn.gather = settings[n % 5].gather;
                rig *r = rig_open(&c);
                run_together(r, &f, &w, y == 1 ? 0 : 1e-5);
                rig_close(r);
            }
    tempdir_remove(&f.dir);
}

static void test_every_setting(void **state) {
    (void)state;
    fixture f = fixture_make(DTYPE_F32);
    config c = rig_config(f.dir.path);
    answers w = run_whole(&f, c);
    c.attention.workers = 2;
    for (size_t i = 0; i < sizeof settings / sizeof *settings; i++) {
        c.attention.max_seqs = settings[i].max_seqs;
        c.attention.token_budget = settings[i].token_budget;
        c.ffn.gather = settings[i].gather;
        rig *r = rig_open(&c);
        run_together(r, &f, &w, 0);
        rig_close(r);
    }
    tempdir_remove(&f.dir);
}

static void test_bf16(void **state) {
    (void)state;
    fixture f = fixture_make(DTYPE_BF16);
    config c = rig_config(f.dir.path);
    answers w = run_whole(&f, c);
    for (int x = 1; x <= 3; x++) {
        c.attention.workers = x;
        c.attention.lanes = x;
        c.attention.max_seqs = 5;
        c.attention.token_budget = 24;
        rig *r = rig_open(&c);
        assert_int_equal(rig_plan(r)->compute, DTYPE_BF16);
        assert_int_equal(rig_plan(r)->wire, DTYPE_BF16);
        run_together(r, &f, &w, 0);
        rig_close(r);
    }
    tempdir_remove(&f.dir);
}

// Mean difference of the log-probabilities of all prompts' tokens to those in `whole`.
static double score_difference(rig *r, const fixture *f, const rig *whole) {
    double sum = 0;
    size_t n = 0, x = rig_plan(r)->n_attention;
    for (size_t i = 0; i < N_REQUESTS; i++) {
        sampling_params params = rig_greedy(0);
        params.prompt_logprobs = true;
        params.logprobs = 0;
        rig_submit(r, i % x, f->prompts[i], prompt_lengths[i], &params);
    }
    rig_run(r);
    for (size_t i = 0; whole && i < N_REQUESTS; i++) {
        const rig_request *a = rig_request_at(r, i), *b = rig_request_at(whole, i);
        assert_int_equal(a->n_events, prompt_lengths[i]);
        for (size_t t = 1; t < a->n_events; t++, n++)
            sum += fabs((double)a->events[t].logprob - (double)b->events[t].logprob);
    }
    return n ? sum / (double)n : 0;
}

// Each FFN worker rounds what it returns to bf16, so that the sum is not that of one worker.
// Prompts are scored because there a difference does not choose what comes next.
static void test_bf16_over_ffn_workers(void **state) {
    (void)state;
    fixture f = fixture_make(DTYPE_BF16);
    config c = rig_config(f.dir.path);
    rig *whole = rig_open(&c);
    score_difference(whole, &f, NULL);
    for (int y = 2; y <= 3; y++) {
        c.attention.workers = c.attention.lanes = c.ffn.workers = y;
        rig *r = rig_open(&c);
        double difference = score_difference(r, &f, whole);
        print_message("%d FFN workers: mean difference %.4f\n", y, difference);
        assert_true(difference > 0 && difference < 0.03);
        rig_close(r);
    }
    rig_close(whole);
    tempdir_remove(&f.dir);
}

static void test_preemption_changes_nothing(void **state) {
    (void)state;
    fixture f = fixture_make(DTYPE_F32);
    config c = rig_config(f.dir.path);
    answers w = run_whole(&f, c);
    c.attention.kv_tokens = 96; // the longest request alone needs 5 of the 6 pages
    c.attention.token_budget = 64;
    for (int lanes = 1; lanes <= 3; lanes++) {
        c.attention.lanes = lanes;
        rig *r = rig_open(&c);
        run_together(r, &f, &w, 0);
        assert_true(rig_load(r, 0)->preemptions > 0);
        assert_int_equal(rig_load(r, 0)->kv_tokens, 0);
        rig_close(r);
    }
    tempdir_remove(&f.dir);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_every_split),
        cmocka_unit_test(test_every_setting),
        cmocka_unit_test(test_bf16),
        cmocka_unit_test(test_bf16_over_ffn_workers),
        cmocka_unit_test(test_preemption_changes_nothing),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
