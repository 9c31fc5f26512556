// Requests in a running bundle of workers: scoring of prompts, ends, refusals, cancelling.
#include "tests/support/rig.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>

#include <cmocka.h>

enum { PROMPT = 45, NEW = 6, TOP = 3, VOCAB = 264, CONTEXT = 128 };

static config settings(void) {
    return rig_config(TESTS_DIR "/fixtures/golden/olmoe_f32");
}

static size_t submit(rig *r, size_t seed, size_t n_prompt, const sampling_params *params) {
    int32_t prompt[CONTEXT];
    assert_true(n_prompt <= CONTEXT);
    for (size_t i = 0; i < n_prompt; i++)
        prompt[i] = (int32_t)((i * i + 31 * i + 17 * seed) % VOCAB);
    return rig_submit(r, 0, prompt, n_prompt, params);
}

static sampling_params scored(int32_t max_tokens) {
    sampling_params p = rig_greedy(max_tokens);
    p.prompt_logprobs = true;
    p.logprobs = TOP;
    return p;
}

// ---- prompt_logprobs ----

static void check_scored(const rig_request *q, const rig_request *whole, size_t n_prompt,
                         size_t n_new) {
    assert_int_equal(q->finish, FINISH_LENGTH);
    assert_int_equal(q->n_events, n_prompt + n_new);
    for (size_t i = 0; i < q->n_events; i++) {
        const token_event *e = &q->events[i], *w = &whole->events[i];
        assert_int_equal(e->position, i);
        assert_int_equal(e->is_prompt, i < n_prompt);
        assert_int_equal(e->n_top, i == 0 ? -1 : TOP); // the first token has nothing before it
        assert_int_equal(e->id, w->id);
        if (i == 0)
            continue;
        assert_memory_equal(&e->logprob, &w->logprob, sizeof e->logprob);
        assert_memory_equal(e->top, w->top, TOP * sizeof *e->top);
    }
}

static void test_prompts_are_scored_once(void **state) {
    (void)state;
    static const struct {
        int64_t lanes, max_seqs, token_budget, kv_tokens;
    } shapes[] = {{1, 8, 256, 0}, {2, 3, 7, 0}, {3, 8, 20, 80}, {2, 8, 8, 64}, {1, 1, 1, 0}};
    static const size_t lengths[] = {PROMPT, 1, 2, 17, 33};
    config c = settings();
    rig *alone = rig_open(&c);
    sampling_params p = scored(NEW), none = scored(0);
    for (size_t i = 0; i < 5; i++) {
        submit(alone, i, lengths[i], &p);
        rig_run(alone);
    }
    for (size_t s = 0; s < sizeof shapes / sizeof *shapes; s++) {
        c.attention.lanes = shapes[s].lanes;
        c.attention.max_seqs = shapes[s].max_seqs;
        c.attention.token_budget = shapes[s].token_budget;
        c.attention.kv_tokens = shapes[s].kv_tokens;
        rig *r = rig_open(&c);
        for (size_t i = 0; i < 5; i++) {
            submit(r, i, lengths[i], &p);
            submit(r, i, lengths[i], &none);
        }
        rig_run(r);
        for (size_t i = 0; i < 5; i++) {
            const rig_request *whole = rig_request_at(alone, i);
            check_scored(rig_request_at(r, 2 * i), whole, lengths[i], NEW);
            check_scored(rig_request_at(r, 2 * i + 1), whole, lengths[i], 0);
        }
        assert_true(!shapes[s].kv_tokens || rig_load(r, 0)->preemptions > 0);
        assert_int_equal(rig_load(r, 0)->kv_tokens, 0);
        rig_close(r);
    }
    rig_close(alone);
}

// ---- ends ----

static void test_stop_ids_end_a_request(void **state) {
    (void)state;
    config c = settings();
    rig *r = rig_open(&c);
    sampling_params p = rig_greedy(20);
    const rig_request *whole = rig_request_at(r, submit(r, 1, PROMPT, &p));
    rig_run(r);
    assert_int_equal(whole->n_events, 20);
    assert_int_equal(whole->finish, FINISH_LENGTH);
    int32_t third = whole->events[2].id;
    size_t first_at = 0;
    while (whole->events[first_at].id != third)
        first_at++;
    p.n_stop_ids = 2;
    p.stop_ids[0] = VOCAB - 1 == third ? 0 : VOCAB - 1;
    p.stop_ids[1] = third;
    const rig_request *stopped = rig_request_at(r, submit(r, 1, PROMPT, &p));
    rig_run(r);
    assert_int_equal(stopped->finish, FINISH_STOP);
    assert_int_equal(stopped->n_events, first_at + 1);
    assert_int_equal(stopped->events[first_at].id, third); // the id itself is reported
    p.min_tokens = 10;                                     // masked until then
    const rig_request *later = rig_request_at(r, submit(r, 1, PROMPT, &p));
    rig_run(r);
    assert_true(later->n_events >= 11);
    for (size_t i = 0; i < 10; i++)
        assert_int_not_equal(later->events[i].id, third);
    // A stop id at the last token that is allowed is a stop.
    p = rig_greedy((int32_t)first_at + 1);
    p.n_stop_ids = 1;
    p.stop_ids[0] = third;
    const rig_request *both = rig_request_at(r, submit(r, 1, PROMPT, &p));
    rig_run(r);
    assert_int_equal(both->finish, FINISH_STOP);
    rig_close(r);
}

static void test_a_request_fills_the_context(void **state) {
    (void)state;
    config c = settings();
    rig *r = rig_open(&c);
    sampling_params p = rig_greedy(CONTEXT - 1);
    const rig_request *q = rig_request_at(r, submit(r, 2, 1, &p));
    p = rig_greedy(1);
    const rig_request *last = rig_request_at(r, submit(r, 2, CONTEXT - 1, &p));
    rig_run(r);
    assert_int_equal(q->n_events, CONTEXT - 1);
    assert_int_equal(last->n_events, 1);
    rig_close(r);
}

// ---- refusals ----

static void expect_refused(rig *r, size_t request) {
    const rig_request *q = rig_request_at(r, request);
    assert_int_equal(q->finish, FINISH_ERROR);
    assert_int_equal(q->n_events, 1);
}

static void test_what_cannot_run_ends_with_an_error(void **state) {
    (void)state;
    config c = settings();
    c.attention.kv_tokens = 64;
    rig *r = rig_open(&c);
    sampling_params p = rig_greedy(CONTEXT);
    expect_refused(r, submit(r, 0, 1, &p)); // beyond the context
    p = rig_greedy(20);
    expect_refused(r, submit(r, 0, 45, &p)); // beyond the cache
    p = rig_greedy(4);
    expect_refused(r, rig_submit(r, 0, (int32_t[]){1, VOCAB}, 2, &p));
    expect_refused(r, rig_submit(r, 0, (int32_t[]){-1}, 1, &p));
    p.n_stop_ids = 1;
    p.stop_ids[0] = VOCAB;
    expect_refused(r, submit(r, 0, 1, &p));
    p = rig_greedy(4);
    logit_bias bias = {-5, 1};
    p.n_logit_bias = 1;
    p.logit_bias = &bias;
    expect_refused(r, submit(r, 0, 1, &p));
    p = rig_greedy(INT32_MAX);
    expect_refused(r, submit(r, 0, 1, &p));
    p = rig_greedy(19);
    const rig_request *q = rig_request_at(r, submit(r, 0, 45, &p)); // just fits
    rig_run(r);
    assert_int_equal(q->n_events, 19);
    rig_close(r);
}

// ---- cancel ----

static void test_cancel_at_any_time(void **state) {
    (void)state;
    config c = settings();
    c.attention.max_seqs = 3;
    sampling_params p = rig_greedy(30);
    rig *r = rig_open(&c);
    const rig_request *whole = rig_request_at(r, submit(r, 0, PROMPT, &p));
    rig_run(r);
    for (size_t turns = 0; turns < 60; turns += 3) {
        size_t first = submit(r, 0, PROMPT, &p);
        for (size_t i = 1; i < 5; i++) // two of them wait for a slot
            submit(r, i, PROMPT, &p);
        for (size_t t = 0; t < turns; t++)
            rig_turn(r);
        for (size_t i = 1; i < 5; i++)
            rig_cancel(r, first + i);
        rig_run(r);
        const rig_request *q = rig_request_at(r, first);
        assert_int_equal(q->n_events, whole->n_events);
        for (size_t t = 0; t < q->n_events; t++)
            assert_int_equal(q->events[t].id, whole->events[t].id);
        assert_int_equal(rig_load(r, 0)->running + rig_load(r, 0)->waiting, 0);
        assert_int_equal(rig_load(r, 0)->kv_tokens, 0);
    }
    // A cancel of what has ended, and a close while requests run.
    rig_cancel(r, 0);
    size_t running = submit(r, 0, PROMPT, &p);
    for (int t = 0; t < 10; t++)
        rig_turn(r);
    assert_int_equal(rig_request_at(r, running)->finish, FINISH_NONE);
    rig_close(r);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_prompts_are_scored_once),
        cmocka_unit_test(test_stop_ids_end_a_request),
        cmocka_unit_test(test_a_request_fills_the_context),
        cmocka_unit_test(test_what_cannot_run_ends_with_an_error),
        cmocka_unit_test(test_cancel_at_any_time),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
