// The logits of a whole bundle against those of the transformers library (tests/fixtures/golden).
//
// This program defines the functions of attn_node/sampler.h itself, so that the worker hands every
// row of logits to the test.
#include "attn_node/sampler.h"
#include "tests/support/golden.h"
#include "tests/support/rig.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

#include <cmocka.h>

enum { MAX_ROWS = 64 };

// The rows that the only request of the moment was given, in order.
struct sampler {
    size_t vocab, n_rows;
    float *rows; // (MAX_ROWS, vocab)
};
static sampler recorder;

int sampler_open(size_t vocab, sampler **out, error *err) {
    (void)err;
    if (!recorder.rows)
        recorder.rows = malloc(MAX_ROWS * vocab * sizeof(float));
    assert_non_null(recorder.rows);
    recorder.vocab = vocab;
    *out = &recorder;
    return E_OK;
}

void sampler_close(sampler *s) { // once for each attention worker
    free(s->rows);
    *s = (sampler){0};
}

static void record(sampler *s, const float *logits) {
    if (s->n_rows < MAX_ROWS)
        memcpy(s->rows + s->n_rows * s->vocab, logits, s->vocab * sizeof(float));
    s->n_rows++;
}

void sampler_sample(sampler *s, const sampler_args *args, token_event *event) {
    record(s, args->logits);
    event->id = 0;
    for (size_t i = 1; i < s->vocab; i++)
        if (args->logits[i] > args->logits[event->id])
            event->id = (int32_t)i;
    event->n_top = -1;
}

void sampler_score(sampler *s, const float *logits, int32_t id, int32_t n_top, token_event *event) {
    (void)id, (void)n_top;
    record(s, logits);
    event->n_top = -1;
}

static void check_logits(rig *r, const golden *g, const char *name, double tolerance,
                         double *worst) {
    for (size_t i = 0; i < g->n_prompts; i++) {
        const golden_prompt *p = &g->prompts[i];
        sampling_params params = rig_greedy(1);
        params.prompt_logprobs = true;
        recorder.n_rows = 0;
        rig_submit(r, rig_plan(r)->n_attention - 1, p->ids, p->n_tokens, &params);
        rig_run(r);
        assert_int_equal(recorder.n_rows, p->n_tokens);
        double e = golden_relative_error(recorder.rows, p->logits, p->n_tokens * g->vocab);
        for (size_t t = 0; t < p->n_tokens; t++) {
            double row = golden_relative_error(recorder.rows + t * g->vocab,
                                               p->logits + t * g->vocab, g->vocab);
            if (!(row < 4 * tolerance)) // no single position may hide in the whole
                fail_msg("%s: logits at position %zu of prompt %zu are off by %.2e", name, t, i,
                         row);
        }
        if (!(e < tolerance))
            fail_msg("%s: logits of prompt %zu are off by %.2e", name, i, e);
        *worst = e > *worst ? e : *worst;
    }
}

static void check_greedy(rig *r, const golden *g, const char *name) {
    for (size_t i = 0; i < g->n_prompts; i++) {
        const golden_prompt *p = &g->prompts[i];
        sampling_params params = rig_greedy((int32_t)g->n_greedy);
        size_t index = rig_submit(r, 0, p->ids, p->n_tokens, &params);
        rig_run(r);
        const rig_request *q = rig_request_at(r, index);
        assert_int_equal(q->n_events, g->n_greedy);
        for (size_t t = 0; t < g->n_greedy; t++)
            if (q->events[t].id != p->greedy[t])
                fail_msg("%s: token %zu after prompt %zu is %d, not %d", name, t, i,
                         q->events[t].id, p->greedy[t]);
    }
}

typedef struct variant {
    const char *device;
    int64_t workers, ffn, lanes, token_budget;
} variant;

static void run_variant(const char *name, const variant *v, config_dtype type, double tolerance,
                        double *worst) {
    char dir[512];
    golden g;
    error err;
    snprintf(dir, sizeof dir, "%s/fixtures/golden/%s", TESTS_DIR, name);
    if (golden_open(dir, &g, &err))
        fail_msg("%s", err.text);
    config c = rig_config(dir);
    c.dtype = c.wire.dtype = type;
    snprintf(c.attention.device, sizeof c.attention.device, "%s", v->device);
    snprintf(c.ffn.device, sizeof c.ffn.device, "%s", v->device);
    c.attention.workers = v->workers;
    c.ffn.workers = v->ffn;
    c.attention.lanes = v->lanes;
    c.attention.token_budget = v->token_budget;
    c.attention.max_seqs = 4;
    rig *r = rig_open(&c);
    check_logits(r, &g, name, tolerance, worst);
    if (type == CONFIG_DTYPE_F32)
        check_greedy(r, &g, name);
    rig_close(r);
    golden_close(&g);
}

static const variant variants[] = {
    {"cpu", 1, 1, 1, 256}, {"cpu:ref", 1, 1, 1, 256}, {"cpu", 2, 3, 2, 5}};

static void test_f32(void **state) {
    (void)state;
    assert_true(n_golden_names >= 9);
    for (size_t i = 0; i < n_golden_names; i++) {
        double worst = 0;
        for (size_t v = 0; v < sizeof variants / sizeof *variants; v++)
            run_variant(golden_names[i], &variants[v], CONFIG_DTYPE_F32, 1e-4, &worst);
        print_message("%-26s f32  relative error %.1e\n", golden_names[i], worst);
    }
}

// The reference has the rounding of a bf16 checkpoint's weights but none of the arithmetic.
static void test_bf16(void **state) {
    (void)state;
    size_t n = 0;
    for (size_t i = 0; i < n_golden_names; i++) {
        double worst = 0;
        if (!strstr(golden_names[i], "bf16"))
            continue;
        n++;
        for (size_t v = 0; v < sizeof variants / sizeof *variants; v++)
            run_variant(golden_names[i], &variants[v], CONFIG_DTYPE_BF16, 1e-2, &worst);
        print_message("%-26s bf16 relative error %.1e\n", golden_names[i], worst);
    }
    assert_true(n >= 4);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_f32), cmocka_unit_test(test_bf16)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
