// The scheduler driven as lanes drive it. Every plan is held against a model of the KV cache: what
// a row sees must have been written for that very request and position.
#include "attn_node/sched.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum { MAX_LANES = 4, MAX_REQUESTS = 64, MAX_PAGES = 64, PAGE = KERNEL_PAGE_TOKENS };

typedef struct request {
    bool submitted, ended;
    sequence *seq; // once it has been in a plan
    size_t n_prompt, max_tokens, n_generated, n_steps;
    size_t in_step_pages; // at the plan of the step under way
} request;

typedef struct bench {
    sched *s;
    sched_args args;
    step_plan plans[MAX_LANES];
    bool in_step[MAX_LANES];
    request requests[MAX_REQUESTS];
    size_t n_requests, n_alive;
    struct {
        uint64_t request;
        size_t token;
    } cache[MAX_PAGES * PAGE];
} bench;

// The token that a request has at a position, prompt and generated alike.
static int32_t token_of(uint64_t id, size_t position) {
    return (int32_t)(id * 1000 + position);
}

static bench *bench_open(sched_args args) {
    bench *b = calloc(1, sizeof *b);
    error err;
    assert_true(b && args.n_pages <= MAX_PAGES && args.n_lanes <= MAX_LANES);
    b->args = args;
    assert_int_equal(sched_open(&args, &b->s, &err), E_OK);
    for (size_t i = 0; i < args.n_lanes; i++)
        assert_int_equal(step_plan_init(&b->plans[i], &args, &err), E_OK);
    return b;
}

static void bench_close(bench *b) {
    for (size_t i = 0; i < b->args.n_lanes; i++)
        step_plan_free(&b->plans[i]);
    sched_close(b->s);
    free(b);
}

static uint64_t submit(bench *b, size_t n_prompt, int32_t max_tokens) {
    assert_true(b->n_requests < MAX_REQUESTS);
    uint64_t id = b->n_requests++;
    int32_t *prompt = malloc(n_prompt * sizeof *prompt);
    error err;
    assert_non_null(prompt);
    for (size_t i = 0; i < n_prompt; i++)
        prompt[i] = token_of(id, i);
    sampling_params params = {.max_tokens = max_tokens};
    if (sched_submit(b->s, id, prompt, n_prompt, &params, &err))
        fail_msg("%s", err.text);
    free(prompt);
    b->requests[id] =
        (request){.submitted = true, .n_prompt = n_prompt, .max_tokens = (size_t)max_tokens};
    b->n_alive++;
    return id;
}

// ---- what is always true ----

static size_t used_pages(const bench *b) {
    return sched_stats_get(b->s).kv_tokens / PAGE;
}

static void check_pages(const bench *b) {
    bool held[MAX_PAGES] = {false};
    size_t n_held = 0, n_running = 0;
    for (size_t i = 0; i < b->n_requests; i++) {
        const sequence *seq = b->requests[i].seq;
        if (!seq || b->requests[i].ended)
            continue;
        n_running += seq->lane >= 0;
        assert_true(seq->lane >= 0 || seq->n_pages == 0);
        assert_true(seq->n_computed <= seq->n_pages * PAGE);
        for (size_t p = 0; p < seq->n_pages; p++) {
            assert_in_range(seq->pages[p], 0, b->args.n_pages - 1);
            assert_false(held[seq->pages[p]]);
            held[seq->pages[p]] = true;
            n_held++;
        }
    }
    sched_stats stats = sched_stats_get(b->s);
    assert_true(stats.running <= b->args.max_sequences);
    assert_int_equal(stats.running + stats.waiting, b->n_alive);
    assert_true(n_held <= used_pages(b));
    if (n_running == stats.running) // every running one is known here
        assert_int_equal(n_held, used_pages(b));
}

static void check_part(bench *b, const step_plan *plan, size_t i) {
    const step_part *part = &plan->parts[i];
    const kernel_sequence *k = &plan->sequences[i];
    sequence *seq = part->seq;
    request *r = &b->requests[seq->request];
    assert_true(seq->request < b->n_requests && !r->ended && (!r->seq || r->seq == seq));
    r->seq = seq;
    r->n_steps++;
    r->in_step_pages = seq->n_pages;
    assert_true(seq->in_step && part->n_rows > 0 && part->first_token == seq->n_computed);
    assert_int_equal(seq->n_tokens, r->n_prompt + r->n_generated);
    assert_true(part->first_token + part->n_rows <= seq->n_tokens);
    assert_true(k->q_row0 == (int32_t)part->row0 && k->q_rows == (int32_t)part->n_rows);
    assert_true(k->kv_tokens == (int32_t)(part->first_token + part->n_rows));
    assert_ptr_equal(k->pages, seq->pages);
    for (size_t t = 0; t < part->first_token; t++) { // what the rows see besides themselves
        size_t slot = (size_t)seq->pages[t / PAGE] * PAGE + t % PAGE;
        assert_true(b->cache[slot].request == seq->request && b->cache[slot].token == t);
    }
    for (size_t n = 0; n < part->n_rows; n++) {
        size_t row = part->row0 + n, t = part->first_token + n;
        size_t slot = (size_t)seq->pages[t / PAGE] * PAGE + t % PAGE;
        assert_int_equal(plan->ids[row], token_of(seq->request, t));
        assert_int_equal(plan->positions[row], t);
        assert_int_equal(plan->kv_slot[row], slot);
        b->cache[slot].request = seq->request;
        b->cache[slot].token = t;
    }
}

// ---- a lane's moves ----

static size_t begin(bench *b, size_t lane) {
    step_plan *plan = &b->plans[lane];
    size_t rows = 0;
    assert_false(b->in_step[lane]);
    sched_plan(b->s, (int)lane, plan);
    assert_true(plan->n_rows <= b->args.token_budget);
    for (size_t i = 0; i < plan->n_parts; i++) {
        assert_int_equal(plan->parts[i].row0, rows);
        assert_int_equal(plan->parts[i].seq->lane, lane);
        check_part(b, plan, i);
        rows += plan->parts[i].n_rows;
    }
    assert_int_equal(plan->n_rows, rows);
    b->in_step[lane] = rows > 0;
    check_pages(b);
    return rows;
}

static void end_request(bench *b, request *r) {
    r->ended = true;
    b->n_alive--;
}

static void end(bench *b, size_t lane) {
    step_plan *plan = &b->plans[lane];
    assert_true(b->in_step[lane]);
    b->in_step[lane] = false;
    for (size_t i = 0; i < plan->n_parts; i++) {
        step_part *part = &plan->parts[i];
        request *r = &b->requests[part->seq->request];
        assert_int_equal(part->seq->n_pages, r->in_step_pages); // nobody took them meanwhile
        if (r->ended || part->first_token + part->n_rows < part->seq->n_tokens)
            continue;
        sched_append(part->seq, token_of(part->seq->request, part->seq->n_tokens));
        part->ended = ++r->n_generated == r->max_tokens;
        if (part->ended)
            end_request(b, r);
    }
    sched_step_done(b->s, plan);
    check_pages(b);
}

static size_t step(bench *b, size_t lane) {
    size_t rows = begin(b, lane);
    if (rows)
        end(b, lane);
    return rows;
}

static void cancel(bench *b, uint64_t id) {
    sched_cancel(b->s, id);
    if (!b->requests[id].ended)
        end_request(b, &b->requests[id]);
}

static void expect_empty(const bench *b) {
    sched_stats stats = sched_stats_get(b->s);
    assert_int_equal(stats.running + stats.waiting + stats.kv_tokens, 0);
}

static bool in_plan(const bench *b, size_t lane, uint64_t id) {
    for (size_t i = 0; i < b->plans[lane].n_parts; i++)
        if (b->plans[lane].parts[i].seq->request == id)
            return true;
    return false;
}

static sched_args sizes(size_t n_lanes, size_t max_sequences, size_t token_budget, size_t n_pages) {
    return (sched_args){.n_lanes = n_lanes,
                        .max_sequences = max_sequences,
                        .token_budget = token_budget,
                        .lane_rows = 1,
                        .n_pages = n_pages,
                        .max_tokens = 1000};
}

// ---- single decisions ----

static void test_prompts_are_computed_in_chunks(void **state) {
    (void)state;
    bench *b = bench_open(sizes(1, 4, 20, 32));
    submit(b, 50, 3);
    static const size_t rows[] = {20, 20, 10, 1, 1, 0};
    for (size_t i = 0; i < 6; i++)
        assert_int_equal(step(b, 0), rows[i]);
    expect_empty(b);
    bench_close(b);
}

static void test_decode_goes_on_beside_a_prompt(void **state) {
    (void)state;
    bench *b = bench_open(sizes(1, 4, 20, 32));
    uint64_t first = submit(b, 5, 10);
    assert_int_equal(step(b, 0), 5);
    submit(b, 60, 2);
    static const size_t rows[] = {20, 20, 20, 4, 2, 1};
    for (size_t i = 0; i < 6; i++)
        assert_int_equal(step(b, 0), rows[i]);
    assert_int_equal(b->requests[first].n_generated, 7); // one in each step
    assert_true(b->requests[1].ended);
    bench_close(b);
}

static void test_a_slot_is_refilled_at_the_next_step(void **state) {
    (void)state;
    bench *b = bench_open(sizes(1, 2, 20, 32));
    submit(b, 4, 2);
    submit(b, 4, 9);
    uint64_t third = submit(b, 4, 1);
    assert_int_equal(step(b, 0), 8);
    assert_int_equal(sched_stats_get(b->s).waiting, 1);
    assert_int_equal(step(b, 0), 2); // the first ends here
    begin(b, 0);
    assert_true(in_plan(b, 0, third) && in_plan(b, 0, 1));
    end(b, 0);
    assert_true(b->requests[third].ended);
    bench_close(b);
}

static void test_lanes_are_balanced(void **state) {
    (void)state;
    bench *b = bench_open(sizes(2, 8, 64, 64));
    submit(b, 100, 4);
    for (int i = 0; i < 4; i++)
        submit(b, 10, 4);
    begin(b, 0);
    begin(b, 1);
    assert_int_equal(b->plans[0].n_parts, 1); // the long one against the four
    assert_int_equal(b->plans[1].n_parts, 4);
    end(b, 1);
    end(b, 0);
    bench_close(b);
}

// Few rows share one lane, so that weights are read once; a prompt counts with all of its rows.
static void test_a_lane_is_opened_when_rows_are_many(void **state) {
    (void)state;
    sched_args args = sizes(2, 8, 64, 64);
    args.lane_rows = 3;
    bench *b = bench_open(args);
    submit(b, 1, 9);
    submit(b, 1, 9);
    submit(b, 1, 9);
    assert_int_equal(step(b, 0), 3);
    assert_int_equal(step(b, 1), 0);
    submit(b, 1, 9); // the first lane has three rows
    assert_int_equal(step(b, 1), 1);
    assert_int_equal(step(b, 0), 3);
    bench_close(b);

    b = bench_open(args);
    submit(b, 50, 2);
    submit(b, 1, 2);
    assert_int_equal(step(b, 0), 50);
    assert_int_equal(step(b, 1), 1);
    bench_close(b);
}

static void test_cancel(void **state) {
    (void)state;
    bench *b = bench_open(sizes(2, 2, 64, 64));
    uint64_t running = submit(b, 20, 4), in_step = submit(b, 30, 4), waiting = submit(b, 5, 4);
    step(b, 0);
    assert_int_equal(begin(b, 1), 30);
    cancel(b, waiting);
    cancel(b, running);
    assert_int_equal(used_pages(b), 2);
    cancel(b, in_step); // its pages are read until the step ends
    assert_int_equal(used_pages(b), 2);
    end(b, 1);
    expect_empty(b);
    sched_cancel(b->s, running); // has ended already
    sched_cancel(b->s, 99);
    assert_int_equal(step(b, 0) + step(b, 1), 0);
    bench_close(b);
}

static void test_the_youngest_gives_way(void **state) {
    (void)state;
    bench *b = bench_open(sizes(1, 4, 64, 4));
    uint64_t old = submit(b, 16, 40), young = submit(b, 16, 40);
    size_t n = 0;
    while (!b->requests[old].ended) {
        step(b, 0);
        assert_true(++n < 100);
    }
    assert_int_equal(b->requests[old].n_steps, 40); // never held up
    assert_int_equal(sched_stats_get(b->s).preemptions, 1);
    size_t generated = b->requests[young].n_generated;
    assert_int_equal(generated, 17);
    assert_int_equal(step(b, 0), 16 + generated); // all of it is computed again
    while (step(b, 0))
        assert_true(++n < 200);
    assert_int_equal(b->requests[young].n_generated, 40);
    expect_empty(b);
    bench_close(b);
}

static void test_a_sequence_in_a_step_gives_way_at_its_end(void **state) {
    (void)state;
    bench *b = bench_open(sizes(2, 4, 64, 3));
    uint64_t old = submit(b, 16, 20), young = submit(b, 32, 10);
    assert_int_equal(step(b, 0), 16);
    assert_int_equal(begin(b, 1), 32);
    assert_int_equal(begin(b, 0), 0); // a 17th token, and no page
    assert_true(b->requests[young].seq->evict);
    end(b, 1);
    assert_int_equal(b->requests[young].n_generated, 1); // what it computed counts
    assert_int_equal(b->requests[young].seq->lane, -1);
    assert_int_equal(begin(b, 1), 0); // does not take the pages again before the older one
    assert_int_equal(begin(b, 0), 1);
    end(b, 0);
    assert_int_equal(b->requests[old].n_generated, 2);
    for (size_t n = 0; b->n_alive; n++) {
        step(b, 0);
        step(b, 1);
        assert_true(n < 100);
    }
    expect_empty(b);
    bench_close(b);
}

static void test_older_sequences_keep_their_pages(void **state) {
    (void)state;
    bench *b = bench_open(sizes(2, 4, 64, 3));
    uint64_t old = submit(b, 32, 10), young = submit(b, 16, 10);
    assert_int_equal(begin(b, 0), 32);
    assert_int_equal(step(b, 1), 16);
    assert_int_equal(begin(b, 1), 0); // waits for a page, whoever is in a step
    assert_false(b->requests[old].seq->evict);
    end(b, 0);
    while (!b->requests[old].ended)
        assert_int_equal(step(b, 0), 1);
    while (!b->requests[young].ended) // in the lane that it is given
        assert_true(step(b, 0) + step(b, 1) > 0);
    bench_close(b);
}

static void test_what_can_never_fit_is_refused(void **state) {
    (void)state;
    sched_args args = sizes(1, 4, 64, 4);
    args.max_tokens = 80;
    bench *b = bench_open(args);
    int32_t prompt[81] = {0};
    error err;
    sampling_params params = {.max_tokens = 1};
    assert_int_equal(sched_submit(b->s, 1, prompt, 80, &params, &err), E_TOO_LARGE);
    assert_non_null(strstr(err.text, "context of 80"));
    assert_int_equal(sched_submit(b->s, 1, prompt, 64, &params, &err), E_TOO_LARGE);
    assert_non_null(strstr(err.text, "KV cache of 64"));
    submit(b, 63, 1);
    assert_int_equal(step(b, 0), 63);
    assert_int_equal(step(b, 0), 0);
    expect_empty(b);
    bench_close(b);
}

// ---- any order of events ----

static uint32_t draw(uint64_t *state, uint32_t n) {
    *state = *state * 6364136223846793005ull + 1442695040888963407ull;
    return (uint32_t)(*state >> 33) % n;
}

static void random_submit(bench *b, uint64_t *random) {
    size_t room = b->args.n_pages * PAGE;
    size_t n_prompt = 1 + draw(random, draw(random, 4) ? 20 : (uint32_t)room - 2);
    size_t left = room - n_prompt;
    submit(b, n_prompt, 1 + (int32_t)draw(random, (uint32_t)(left < 40 ? left : 40)));
}

// The oldest one alive is never set back.
static void check_oldest(const bench *b, size_t *computed, uint64_t *oldest) {
    for (size_t i = 0; i < b->n_requests; i++) {
        const request *r = &b->requests[i];
        if (r->ended)
            continue;
        size_t now = r->seq ? r->seq->n_computed : 0;
        assert_true(*oldest != i || now >= *computed);
        *oldest = i;
        *computed = now;
        return;
    }
}

static void run_random(uint64_t seed) {
    uint64_t random = seed * 2654435761u + 1, oldest = UINT64_MAX;
    size_t n_lanes = 1 + draw(&random, 3), max_sequences = 1 + draw(&random, 8);
    size_t budget = max_sequences + draw(&random, draw(&random, 2) ? 4 : 60);
    bench *b = bench_open(sizes(n_lanes, max_sequences, budget, 4 + draw(&random, 20)));
    size_t idle = 0, computed = 0;
    bool cancels = draw(&random, 2);
    for (size_t turn = 0; b->n_requests < 40 || b->n_alive; turn++) {
        assert_true(turn < 100000);
        if (b->n_requests < 40 && (!b->n_alive || draw(&random, 6) == 0))
            random_submit(b, &random);
        if (cancels && draw(&random, 50) == 0) {
            uint64_t id = draw(&random, (uint32_t)b->n_requests);
            // Only what is in no step: then the books of this test are right at once.
            if (!b->requests[id].seq || b->requests[id].ended || !b->requests[id].seq->in_step)
                cancel(b, id);
        }
        // A turn of the worker's loop: each lane moves, or its step goes on.
        bool moved = false;
        for (size_t lane = 0; lane < n_lanes; lane++) {
            if (!b->in_step[lane])
                moved |= begin(b, lane) > 0;
            else if (draw(&random, 3) == 0)
                end(b, lane), moved = true;
            else
                moved = true;
            check_oldest(b, &computed, &oldest);
        }
        idle = moved ? 0 : idle + 1;
        assert_true(!b->n_alive || idle == 0); // or the worker would sleep with work to do
    }
    expect_empty(b);
    for (size_t i = 0; i < b->n_requests; i++)
        assert_true(b->requests[i].ended);
    bench_close(b);
}

static void test_random_orders(void **state) {
    (void)state;
    for (uint64_t seed = 0; seed < 300; seed++)
        run_random(seed);
}

// A close with requests in every state frees them all (AddressSanitizer sees what is left).
static void test_close_with_requests(void **state) {
    (void)state;
    bench *b = bench_open(sizes(2, 2, 64, 64));
    for (int i = 0; i < 4; i++)
        submit(b, 20, 4);
    step(b, 0);
    begin(b, 1);
    bench_close(b);
    sched_close(NULL);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_prompts_are_computed_in_chunks),
        cmocka_unit_test(test_decode_goes_on_beside_a_prompt),
        cmocka_unit_test(test_a_slot_is_refilled_at_the_next_step),
        cmocka_unit_test(test_lanes_are_balanced),
        cmocka_unit_test(test_a_lane_is_opened_when_rows_are_many),
        cmocka_unit_test(test_cancel),
        cmocka_unit_test(test_the_youngest_gives_way),
        cmocka_unit_test(test_a_sequence_in_a_step_gives_way_at_its_end),
        cmocka_unit_test(test_older_sequences_keep_their_pages),
        cmocka_unit_test(test_what_can_never_fit_is_refused),
        cmocka_unit_test(test_random_orders),
        cmocka_unit_test(test_close_with_requests),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
