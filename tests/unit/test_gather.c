// Gathering of DISPATCH frames in virtual time: single decisions, then whole bundles with random
// delays and deaths.
#include "ffn_node/gather.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum { WAIT_US = 200, DEADLINE_US = 10000, LAYERS = 4 };

static gather *open_gather(size_t rank, size_t n_attention, size_t n_lanes) {
    gather *g;
    error err;
    gather_args args = {.n_attention = n_attention,
                        .n_lanes = n_lanes,
                        .n_layers = LAYERS,
                        .rank = rank,
                        .wait_us = WAIT_US,
                        .deadline_us = DEADLINE_US};
    assert_int_equal(gather_open(&args, &g, &err), E_OK);
    return g;
}

static void arrive(gather *g, size_t attention, size_t lane, uint64_t now) {
    frame_header h = {.attention = (uint16_t)attention, .lane = (uint16_t)lane};
    gather_arrived(g, &h, now);
}

static void arrive_more(gather *g, size_t attention, uint64_t now) {
    frame_header h = {.attention = (uint16_t)attention, .flags = FRAME_FLAG_MORE};
    gather_arrived(g, &h, now);
}

static void arrive_at(gather *g, size_t attention, size_t layer, const gather_group *pass,
                      uint64_t now) {
    frame_header h = {.attention = (uint16_t)attention,
                      .lane = pass->lane,
                      .layer = (uint16_t)layer,
                      .pass = pass->pass,
                      .members = pass->members};
    gather_arrived(g, &h, now);
}

static gather_group expect_group(gather *g, uint64_t now, size_t n, const uint16_t *attention) {
    gather_group group;
    assert_true(gather_next(g, now, &group));
    assert_int_equal(group.n, n);
    assert_memory_equal(group.attention, attention, n * sizeof *attention);
    return group;
}
#define MEMBERS(...)                                                                               \
    sizeof((uint16_t[]){__VA_ARGS__}) / sizeof(uint16_t), (uint16_t[]) {                           \
        __VA_ARGS__                                                                                \
    }

static void expect_none(gather *g, uint64_t now, uint64_t due) {
    gather_group group;
    assert_false(gather_next(g, now, &group));
    assert_true(gather_due(g) == due);
}

// Takes a pass of these members through its later layers.
static void finish_pass(gather *g, const gather_group *pass, uint64_t now) {
    for (size_t layer = 1; layer < LAYERS; layer++) {
        for (size_t i = 0; i < pass->n; i++)
            arrive_at(g, pass->attention[i], layer, pass, now);
        gather_group group = expect_group(g, now, pass->n, pass->attention);
        assert_int_equal(group.layer, layer);
        assert_int_equal(group.pass, pass->pass);
        assert_int_equal(group.members, pass->members);
    }
    expect_none(g, now, UINT64_MAX);
}

static void test_nothing_waits(void **state) {
    (void)state;
    gather *g = open_gather(0, 3, 2);
    expect_none(g, 0, UINT64_MAX);
    gather_close(g);
    gather_close(NULL);
}

// Nobody is expected at first: who waits is the pass.
static void test_a_pass_begins_with_those_that_wait(void **state) {
    (void)state;
    gather *g = open_gather(0, 3, 1);
    arrive(g, 2, 0, 100);
    arrive(g, 0, 0, 100);
    gather_group pass = expect_group(g, 100, MEMBERS(0, 2));
    assert_int_equal(pass.members, 2);
    assert_int_equal(pass.layer, 0);
    assert_int_not_equal(pass.pass, 0);
    finish_pass(g, &pass, 110);
    assert_int_equal(gather_stats_get(g).passes, 1);
    assert_int_equal(gather_stats_get(g).groups, LAYERS);
    gather_close(g);
}

static void test_expected_members_are_waited_for(void **state) {
    (void)state;
    gather *g = open_gather(0, 3, 1);
    arrive_more(g, 0, 0);
    arrive_more(g, 1, 0);
    arrive(g, 2, 0, 0); // says that it will not go on
    gather_group pass = expect_group(g, 0, MEMBERS(0, 1, 2));
    finish_pass(g, &pass, 10);
    arrive_more(g, 1, 1000);
    expect_none(g, 1000, 1000 + WAIT_US);
    arrive_more(g, 0, 1050); // the last one that is expected
    gather_group next = expect_group(g, 1050, MEMBERS(0, 1));
    assert_true(next.pass > pass.pass);
    finish_pass(g, &next, 1100);
    // A bounded wait: then the pass begins without it, and it is not expected again.
    arrive_more(g, 0, 2000);
    expect_none(g, 2000 + WAIT_US - 1, 2000 + WAIT_US);
    next = expect_group(g, 2000 + WAIT_US, MEMBERS(0));
    assert_int_equal(next.members, 1);
    finish_pass(g, &next, 3000);
    arrive_more(g, 0, 4000);
    next = expect_group(g, 4000, MEMBERS(0));
    gather_close(g);
}

static void test_a_late_comer_takes_the_next_pass(void **state) {
    (void)state;
    gather *g = open_gather(0, 2, 1);
    arrive(g, 0, 0, 0);
    gather_group pass = expect_group(g, 0, MEMBERS(0));
    arrive(g, 1, 0, 5);
    expect_none(g, 5, DEADLINE_US); // when the pass counts as given up
    for (size_t layer = 1; layer < LAYERS; layer++) {
        arrive_at(g, 0, layer, &pass, 10);
        expect_group(g, 10, MEMBERS(0));
    }
    gather_group next = expect_group(g, 10, MEMBERS(1));
    assert_true(next.pass > pass.pass);
    gather_close(g);
}

// A late comer has waited longer than WAIT_US when the pass ends; its members get their time all
// the same, or the two would take turns for ever.
static void test_a_late_comer_is_joined(void **state) {
    (void)state;
    gather *g = open_gather(0, 2, 1);
    arrive_more(g, 0, 0);
    gather_group pass = expect_group(g, 0, MEMBERS(0));
    arrive_more(g, 1, 5);
    for (size_t layer = 1; layer < LAYERS; layer++) {
        arrive_at(g, 0, layer, &pass, 1000);
        expect_group(g, 1000, MEMBERS(0));
    }
    expect_none(g, 1000, 1000 + WAIT_US);
    arrive_more(g, 0, 1050);
    expect_group(g, 1050, MEMBERS(0, 1));
    gather_close(g);
}

static void test_a_pass_without_a_living_member_is_given_up(void **state) {
    (void)state;
    gather *g = open_gather(0, 2, 1);
    arrive(g, 0, 0, 0);
    expect_group(g, 50, MEMBERS(0)); // and dies
    arrive(g, 1, 0, 60);
    expect_none(g, 60, 50 + DEADLINE_US);
    expect_none(g, 50 + DEADLINE_US - 1, 50 + DEADLINE_US);
    expect_group(g, 50 + DEADLINE_US, MEMBERS(1));
    gather_close(g);
}

// Other ranks never wait at layer 0; the names of passes come with the later frames.
static void test_other_ranks_follow(void **state) {
    (void)state;
    gather *g = open_gather(1, 3, 1);
    arrive(g, 1, 0, 0);
    expect_group(g, 0, MEMBERS(1));
    arrive(g, 2, 0, 1);
    arrive(g, 0, 0, 1);
    expect_group(g, 1, MEMBERS(0, 2));
    gather_group pass = {.pass = 7, .members = 2};
    arrive_at(g, 1, 1, &pass, 20);
    expect_none(g, 20, 20 + DEADLINE_US);
    arrive(g, 2, 0, 30); // of another pass: taken at once, and no reason to go on
    expect_group(g, 30, MEMBERS(2));
    expect_none(g, 30, 20 + DEADLINE_US);
    arrive_at(g, 0, 1, &pass, 40);
    gather_group group = expect_group(g, 40, MEMBERS(0, 1));
    assert_int_equal(group.pass, 7);
    assert_int_equal(gather_stats_get(g).wait_us, 0 + 0 + 0 + 20);
    gather_close(g);
}

static void test_a_late_member_leaves_the_pass(void **state) {
    (void)state;
    for (size_t rank = 0; rank < 2; rank++) {
        gather *g = open_gather(rank, 3, 1);
        for (size_t a = 0; a < 3; a++)
            arrive(g, a, 0, 0);
        gather_group pass = expect_group(g, 0, MEMBERS(0, 1, 2));
        if (rank)
            pass.pass = 4, pass.members = 3;
        arrive_at(g, 0, 1, &pass, 100);
        arrive_at(g, 2, 1, &pass, 150);
        expect_none(g, 150, 100 + DEADLINE_US);
        expect_none(g, 100 + DEADLINE_US - 1, 100 + DEADLINE_US);
        gather_group group = expect_group(g, 100 + DEADLINE_US, MEMBERS(0, 2));
        assert_int_equal(group.members, 3);
        assert_int_equal(gather_stats_get(g).late_members, 1);
        // It comes after all: alone from then on. The others do not wait for it again.
        uint64_t now = 100 + DEADLINE_US + 50;
        arrive_at(g, 1, 1, &pass, now);
        expect_group(g, now, MEMBERS(1));
        arrive_at(g, 0, 2, &pass, now);
        arrive_at(g, 2, 2, &pass, now);
        expect_group(g, now, MEMBERS(0, 2));
        arrive_at(g, 1, 2, &pass, now);
        expect_group(g, now, MEMBERS(1));
        arrive_at(g, 2, 3, &pass, now);
        arrive_at(g, 0, 3, &pass, now);
        expect_group(g, now, MEMBERS(0, 2));
        arrive_at(g, 1, 3, &pass, now);
        expect_group(g, now, MEMBERS(1));
        expect_none(g, now, UINT64_MAX);
        assert_int_equal(gather_stats_get(g).late_members, 1);
        gather_close(g);
    }
}

static void test_each_frame_alone(void **state) {
    (void)state;
    gather *g;
    error err;
    gather_args args = {.n_attention = 2, .n_lanes = 2, .n_layers = 2, .alone = true};
    assert_int_equal(gather_open(&args, &g, &err), E_OK);
    arrive(g, 1, 0, 0);
    arrive(g, 0, 0, 0);
    arrive(g, 0, 1, 0);
    gather_group a = expect_group(g, 0, MEMBERS(0)), c = expect_group(g, 0, MEMBERS(0));
    gather_group b = expect_group(g, 0, MEMBERS(1));
    assert_int_equal(c.lane, 1);
    assert_true(a.members == 1 && b.members == 1 && a.pass != b.pass && b.pass != c.pass);
    arrive_at(g, 1, 1, &b, 5);
    gather_group last = expect_group(g, 5, MEMBERS(1));
    assert_int_equal(last.pass, b.pass);
    expect_none(g, 5, UINT64_MAX);
    gather_close(g);
}

static void test_lanes_are_apart(void **state) {
    (void)state;
    gather *g = open_gather(0, 2, 2);
    arrive(g, 0, 1, 0);
    arrive(g, 1, 0, 0);
    gather_group first = expect_group(g, 0, MEMBERS(1)), second = expect_group(g, 0, MEMBERS(0));
    assert_true(first.lane == 0 && second.lane == 1 && first.pass != second.pass);
    arrive(g, 0, 0, 1); // waits for lane 0's pass alone
    expect_none(g, 1, DEADLINE_US);
    for (size_t layer = 1; layer < LAYERS; layer++) {
        arrive_at(g, 0, layer, &second, 2);
        gather_group group = expect_group(g, 2, MEMBERS(0));
        assert_true(group.lane == 1 && group.layer == layer);
    }
    expect_none(g, 2, DEADLINE_US);
    gather_close(g);
}

// ---- whole bundles ----

// A lane whose next frame is always there already does not keep the other from its turn.
static void test_lanes_take_turns(void **state) {
    (void)state;
    gather *g = open_gather(0, 1, 2);
    arrive(g, 0, 0, 0);
    arrive(g, 0, 1, 0);
    gather_group first = expect_group(g, 2 * WAIT_US, MEMBERS(0));
    assert_int_equal(first.lane, 0);
    arrive_at(g, 0, 1, &first, 2 * WAIT_US);
    gather_group second = expect_group(g, 2 * WAIT_US, MEMBERS(0));
    assert_int_equal(second.lane, 1);
    arrive_at(g, 0, 1, &second, 2 * WAIT_US);
    assert_int_equal(expect_group(g, 2 * WAIT_US, MEMBERS(0)).lane, 0);
    arrive_at(g, 0, 2, &first, 2 * WAIT_US);
    assert_int_equal(expect_group(g, 2 * WAIT_US, MEMBERS(0)).lane, 1);
    gather_close(g);
}

enum { MAX_X = 3, MAX_Y = 3, MAX_LANES = 3, MAX_EVENTS = 256, STEPS = 12 };

typedef enum event_kind { DISPATCH, RETURN, RANK_FREE, RANK_DUE } event_kind;
typedef struct event {
    uint64_t at;
    event_kind kind;
    size_t rank;
    frame_header header;
} event;

typedef struct runner { // one lane of one attention worker
    uint32_t step, pass;
    uint16_t members, layer;
    size_t n_returned;
    uint64_t away; // bit of a rank: a frame of this layer has gone there and not come back
    bool dead;
} runner;

typedef struct rank_state {
    gather *g;
    bool busy;
    gather_group group; // computed while busy
} rank_state;

typedef struct simulation {
    size_t x, y, lanes, layers;
    bool alone;
    uint64_t deadline_us, max_delay_us;
    uint32_t n_steps;
    int die; // one in so many dispatches is a worker's last; 0: none
    uint64_t random, now;
    runner runners[MAX_X][MAX_LANES];
    bool waits[MAX_Y][MAX_X][MAX_LANES];
    rank_state ranks[MAX_Y];
    event events[MAX_EVENTS];
    size_t n_events, n_groups, n_members;
    // Members of each group, as bits, by (lane, pass % 512, layer): must be equal on all ranks.
    uint8_t groups[MAX_LANES][512][6];
} simulation;

static uint64_t draw(simulation *s, uint64_t n) {
    s->random = s->random * 6364136223846793005ull + 1442695040888963407ull;
    return (s->random >> 33) % n;
}

static void push(simulation *s, event e) {
    assert_true(s->n_events < MAX_EVENTS);
    s->events[s->n_events++] = e;
}

static event pop(simulation *s) {
    size_t first = 0;
    for (size_t i = 1; i < s->n_events; i++)
        if (s->events[i].at < s->events[first].at)
            first = i;
    event e = s->events[first];
    s->events[first] = s->events[--s->n_events];
    return e;
}

static void dispatch(simulation *s, size_t a, size_t lane) {
    runner *r = &s->runners[a][lane];
    if (s->die && draw(s, (uint64_t)s->die) == 0) {
        for (size_t l = 0; l < s->lanes; l++)
            s->runners[a][l].dead = true;
        return;
    }
    uint64_t think = 1 + draw(s, s->max_delay_us);
    r->n_returned = 0;
    for (size_t rank = 0; rank < s->y; rank++) {
        frame_header h = {.attention = (uint16_t)a,
                          .lane = (uint16_t)lane,
                          .layer = r->layer,
                          .pass = r->pass,
                          .members = r->members,
                          .step = r->step,
                          .ffn = (uint16_t)rank,
                          .flags = r->step + 1 < s->n_steps ? FRAME_FLAG_MORE : 0};
        r->away |= 1ull << rank;
        push(s, (event){s->now + think + draw(s, s->max_delay_us), DISPATCH, rank, h});
    }
}

static void begin_step(simulation *s, size_t a, size_t lane) {
    runner *r = &s->runners[a][lane];
    r->layer = 0;
    r->pass = 0;
    r->members = 0;
    dispatch(s, a, lane);
}

static void check_group(simulation *s, size_t rank, const gather_group *g) {
    uint8_t bits = 0;
    assert_true(g->n > 0 && g->n <= s->x);
    assert_true(!s->alone || g->n == 1);
    for (size_t i = 0; i < g->n; i++) {
        size_t a = g->attention[i];
        assert_true(a < s->x && (!i || a > g->attention[i - 1]));
        assert_true(s->waits[rank][a][g->lane]); // a frame is in one group alone
        s->waits[rank][a][g->lane] = false;
        if (g->layer)
            assert_int_equal(s->runners[a][g->lane].pass, g->pass);
        assert_int_equal(s->runners[a][g->lane].layer, g->layer);
        bits |= (uint8_t)(1 << a);
    }
    s->n_groups++;
    s->n_members += g->n;
    // The last layer may be cut on other ranks when rank 0 has begun the next pass already.
    if (g->layer == 0 || (size_t)g->layer + 1 >= s->layers || s->deadline_us < 1000000)
        return;
    uint8_t *known = &s->groups[g->lane][g->pass % 512][g->layer];
    assert_true(!*known || *known == bits);
    *known = bits;
    assert_int_equal(g->members, g->n);
}

static void serve(simulation *s, size_t rank) {
    rank_state *r = &s->ranks[rank];
    if (r->busy)
        return;
    if (gather_next(r->g, s->now, &r->group)) {
        check_group(s, rank, &r->group);
        r->busy = true;
        push(s, (event){s->now + 1 + draw(s, 60), RANK_FREE, rank, {0}});
        return;
    }
    uint64_t due = gather_due(r->g);
    if (due != UINT64_MAX)
        push(s, (event){due > s->now ? due : s->now + 1, RANK_DUE, rank, {0}});
}

static void answer(simulation *s, size_t rank) {
    rank_state *r = &s->ranks[rank];
    for (size_t i = 0; i < r->group.n; i++) {
        frame_header h = {.attention = r->group.attention[i],
                          .lane = r->group.lane,
                          .layer = r->group.layer,
                          .pass = r->group.pass,
                          .members = r->group.members,
                          .ffn = (uint16_t)rank};
        push(s, (event){s->now + 1 + draw(s, s->max_delay_us), RETURN, rank, h});
    }
    r->busy = false;
}

static void take_return(simulation *s, const frame_header *h) {
    runner *r = &s->runners[h->attention][h->lane];
    assert_int_equal(h->layer, r->layer);
    assert_true(r->away >> h->ffn & 1); // answered once
    r->away &= ~(1ull << h->ffn);
    if (h->ffn == 0) {
        r->pass = h->pass;
        r->members = h->members;
    }
    if (++r->n_returned < s->y || r->dead)
        return;
    if (++r->layer < s->layers)
        dispatch(s, h->attention, h->lane);
    else if (++r->step < s->n_steps)
        begin_step(s, h->attention, h->lane);
}

static void handle(simulation *s, const event *e) {
    s->now = e->at;
    if (e->kind == DISPATCH) {
        const frame_header *h = &e->header;
        assert_false(s->waits[e->rank][h->attention][h->lane]);
        s->waits[e->rank][h->attention][h->lane] = true;
        gather_arrived(s->ranks[e->rank].g, h, s->now);
    } else if (e->kind == RETURN) {
        take_return(s, &e->header);
        return;
    } else if (e->kind == RANK_FREE) {
        answer(s, e->rank);
    }
    for (size_t i = s->n_events; i-- > 0 && e->kind != RANK_DUE;) // serve asks for the time anew
        if (s->events[i].kind == RANK_DUE && s->events[i].rank == e->rank)
            s->events[i] = s->events[--s->n_events];
    serve(s, e->rank);
}

static void run(simulation *s) {
    for (size_t rank = 0; rank < s->y; rank++) {
        error err;
        gather_args args = {.n_attention = s->x,
                            .n_lanes = s->lanes,
                            .n_layers = s->layers,
                            .rank = rank,
                            .alone = s->alone,
                            .wait_us = WAIT_US,
                            .deadline_us = s->deadline_us};
        assert_int_equal(gather_open(&args, &s->ranks[rank].g, &err), E_OK);
    }
    for (size_t a = 0; a < s->x; a++)
        for (size_t lane = 0; lane < s->lanes; lane++)
            begin_step(s, a, lane);
    for (size_t n = 0; s->n_events; n++) {
        assert_true(n < 200000); // a wait that never ends is no progress either
        event e = pop(s);
        handle(s, &e);
    }
    for (size_t a = 0; a < s->x; a++)
        for (size_t lane = 0; lane < s->lanes; lane++) {
            const runner *r = &s->runners[a][lane];
            assert_int_equal(r->away, 0);
            if (!r->dead)
                assert_int_equal(r->step, s->n_steps);
        }
    for (size_t rank = 0; rank < s->y; rank++) {
        if (s->deadline_us >= 1000000)
            assert_int_equal(gather_stats_get(s->ranks[rank].g).late_members, 0);
        gather_close(s->ranks[rank].g);
    }
}

// What is drawn beside x, y and lanes.
static void run_seed(uint64_t seed, size_t x, size_t y, size_t lanes, uint64_t deadline, int die) {
    static const uint64_t delays[] = {5, 100, 2000};
    simulation *s = calloc(1, sizeof *s);
    assert_non_null(s);
    *s = (simulation){.x = x,
                      .y = y,
                      .lanes = lanes,
                      .layers = 1 + seed % 5,
                      .alone = seed % 7 == 6,
                      .deadline_us = deadline,
                      .max_delay_us = delays[seed % 3],
                      .n_steps = STEPS,
                      .die = die,
                      .random = seed * 77 + x * 5 + y * 3 + lanes};
    run(s);
    free(s);
}

static void test_bundles(void **state) {
    (void)state;
    for (size_t x = 1; x <= MAX_X; x++)
        for (size_t y = 1; y <= MAX_Y; y++)
            for (size_t lanes = 1; lanes <= MAX_LANES; lanes++)
                for (uint64_t seed = 0; seed < 21; seed++)
                    run_seed(seed, x, y, lanes, 1000000000, 0);
}

// Deadlines so short that members leave passes all the time.
static void test_bundles_with_short_deadlines(void **state) {
    (void)state;
    for (size_t x = 2; x <= MAX_X; x++)
        for (size_t y = 1; y <= MAX_Y; y++)
            for (uint64_t seed = 0; seed < 42; seed++)
                run_seed(seed, x, y, 2, 1 + 50 * (seed % 4), 0);
}

static void test_bundles_with_deaths(void **state) {
    (void)state;
    for (size_t x = 2; x <= MAX_X; x++)
        for (size_t y = 1; y <= MAX_Y; y++)
            for (uint64_t seed = 0; seed < 42; seed++)
                run_seed(seed, x, y, 2, 30000, 60);
}

// Lanes that run in step are gathered, not merely served: all but layer 0 of rank 1, where frames
// are taken as they come.
static void test_gathering_happens(void **state) {
    (void)state;
    simulation *s = calloc(1, sizeof *s);
    assert_non_null(s);
    *s = (simulation){.x = 3,
                      .y = 2,
                      .lanes = 2,
                      .layers = 5,
                      .deadline_us = 1000000000,
                      .max_delay_us = 40,
                      .n_steps = STEPS};
    run(s);
    assert_true(s->n_members >= 2 * s->n_groups);
    free(s);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_nothing_waits),
        cmocka_unit_test(test_a_pass_begins_with_those_that_wait),
        cmocka_unit_test(test_expected_members_are_waited_for),
        cmocka_unit_test(test_a_late_comer_takes_the_next_pass),
        cmocka_unit_test(test_a_late_comer_is_joined),
        cmocka_unit_test(test_a_pass_without_a_living_member_is_given_up),
        cmocka_unit_test(test_other_ranks_follow),
        cmocka_unit_test(test_a_late_member_leaves_the_pass),
        cmocka_unit_test(test_each_frame_alone),
        cmocka_unit_test(test_lanes_are_apart),
        cmocka_unit_test(test_lanes_take_turns),
        cmocka_unit_test(test_bundles),
        cmocka_unit_test(test_bundles_with_short_deadlines),
        cmocka_unit_test(test_bundles_with_deaths),
        cmocka_unit_test(test_gathering_happens),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
