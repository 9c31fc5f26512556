// The plan: every process of a bundle derives the same one, and every difference that matters shows
// in its hash.
#include "engine/plan.h"
#include "tests/support/tempdir.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

static void write_model(const tempdir *dir, size_t hidden, size_t experts, const char *dtype_text) {
    char text[1024];
    snprintf(text, sizeof text,
             "{\"architectures\": [\"OlmoeForCausalLM\"], \"model_type\": \"olmoe\","
             " \"hidden_size\": %zu, \"num_hidden_layers\": 2, \"num_attention_heads\": %zu,"
             " \"num_experts\": %zu, \"num_experts_per_tok\": 2,"
             " \"intermediate_size\": 24, \"vocab_size\": 270, \"max_position_embeddings\": 128,"
             " \"torch_dtype\": \"%s\"}",
             hidden, hidden < 1024 ? 4 : hidden / 128, experts, dtype_text);
    tempdir_write_text(dir, "config.json", text);
}

static config defaults(const tempdir *dir) {
    char text[512];
    config c;
    error err;
    snprintf(text, sizeof text, "{\"model\": \"%s\"}", dir->path);
    if (config_parse_json("test", text, strlen(text), &c, &err))
        fail_msg("%s", err.text);
    return c;
}

static plan make(const config *c) {
    plan p;
    error err;
    if (plan_make(c, &p, &err))
        fail_msg("%s", err.text);
    return p;
}

static void test_sizes(void **state) {
    (void)state;
    tempdir dir = tempdir_make();
    write_model(&dir, 32, 6, "bfloat16");
    config c = defaults(&dir);
    c.attention.workers = 3;
    c.ffn.workers = 2;
    c.attention.lanes = 4;
    c.attention.token_budget = 100;
    c.attention.max_seqs = 10;
    plan p = make(&c);
    assert_true(p.n_attention == 3 && p.n_ffn == 2 && p.n_lanes == 4 && p.max_rows == 100);
    assert_true(p.max_sequences == 10 && p.max_tokens == 128);
    assert_true(p.compute == DTYPE_BF16 && p.wire == DTYPE_BF16);
    frame_expect e = plan_frame_expect(&p);
    assert_true(e.plan_hash == p.hash && e.hidden == 32 && e.top_k == 2 && e.max_rows == 100);
    assert_true(e.n_layers == 2 && e.n_lanes == 4 && e.wire == DTYPE_BF16);
    c.max_model_len = 50;
    c.dtype = CONFIG_DTYPE_F32;
    c.mode = CONFIG_MODE_COLOCATED;
    p = make(&c);
    assert_true(p.max_tokens == 50 && p.compute == DTYPE_F32 && p.wire == DTYPE_F32);
    assert_int_equal(p.n_ffn, 1); // each worker has all experts
    c.wire.dtype = CONFIG_DTYPE_BF16;
    p = make(&c);
    assert_int_equal(p.wire, DTYPE_BF16);
    tempdir_remove(&dir);
}

static void test_experts_are_split_evenly(void **state) {
    (void)state;
    static const size_t experts[] = {2, 5, 7, 64, 100};
    tempdir dir = tempdir_make();
    for (size_t i = 0; i < 5; i++) {
        write_model(&dir, 32, experts[i], "float32");
        config c = defaults(&dir);
        for (size_t y = 1; y <= experts[i] && y <= CONFIG_MAX_WORKERS; y++) {
            c.ffn.workers = (int64_t)y;
            plan p = make(&c);
            int16_t list[MODEL_MAX_EXPERTS];
            size_t next = 0;
            for (size_t rank = 0; rank < y; rank++) {
                size_t n = plan_experts_of(&p, rank, list);
                assert_in_range(n, experts[i] / y, (experts[i] + y - 1) / y);
                for (size_t k = 0; k < n; k++, next++) { // ascending over all ranks, none twice
                    assert_int_equal(list[k], next);
                    assert_int_equal(p.expert_rank[next], rank);
                }
            }
            assert_int_equal(next, experts[i]);
        }
    }
    tempdir_remove(&dir);
}

static void test_hash(void **state) {
    (void)state;
    enum { N = 10 };
    uint64_t hashes[N];
    tempdir dir = tempdir_make();
    write_model(&dir, 32, 6, "float32");
    config base = defaults(&dir), c[N];
    for (int i = 0; i < N; i++)
        c[i] = base;
    c[1].attention.workers = 2;
    c[2].ffn.workers = 2;
    c[3].ffn.workers = 3;
    c[4].attention.lanes = 3;
    c[5].attention.token_budget = 128;
    c[6].dtype = CONFIG_DTYPE_BF16;
    c[7].wire.dtype = CONFIG_DTYPE_BF16;
    for (int i = 0; i < N - 2; i++)
        hashes[i] = make(&c[i]).hash;
    write_model(&dir, 32, 7, "float32");
    hashes[8] = make(&base).hash;
    write_model(&dir, 64, 6, "float32");
    hashes[9] = make(&base).hash;
    for (int i = 0; i < N; i++)
        for (int k = 0; k < i; k++)
            if (hashes[i] == hashes[k])
                fail_msg("plans %d and %d have the same hash", k, i);
    // What only one process acts on is no difference, nor is another place of the same model.
    tempdir other = tempdir_make();
    write_model(&other, 64, 6, "float32");
    config moved = defaults(&other);
    moved.router.port = 1;
    moved.attention.threads = 7;
    moved.ffn.gather = CONFIG_GATHER_NONE;
    assert_true(make(&moved).hash == hashes[9]);
    tempdir_remove(&other);
    tempdir_remove(&dir);
}

static void expect_refused(const config *c, int code, const char *key) {
    plan p = {.hash = 5};
    error err;
    assert_int_equal(plan_make(c, &p, &err), code);
    if (!strstr(err.text, key))
        fail_msg("'%s' does not name %s", err.text, key);
    assert_true(p.hash == 5); // written only on success
}

static void test_refusals(void **state) {
    (void)state;
    tempdir dir = tempdir_make();
    write_model(&dir, 32, 6, "float32");
    config c = defaults(&dir);
    c.ffn.workers = 7;
    expect_refused(&c, E_INVALID, "ffn.workers");
    c.mode = CONFIG_MODE_COLOCATED; // there is no FFN worker to be without experts
    make(&c);
    c = defaults(&dir);
    c.max_model_len = 129;
    expect_refused(&c, E_INVALID, "max_model_len");
    c.max_model_len = 128;
    make(&c);
    write_model(&dir, 65536, 6, "float32"); // 8192 rows of 256 KiB
    c = defaults(&dir);
    c.attention.token_budget = 8192;
    expect_refused(&c, E_TOO_LARGE, "attention.token_budget");
    snprintf(c.model, sizeof c.model, "%s/absent", dir.path);
    expect_refused(&c, E_NOT_FOUND, "absent");
    tempdir_remove(&dir);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_sizes),
        cmocka_unit_test(test_experts_are_split_evenly),
        cmocka_unit_test(test_hash),
        cmocka_unit_test(test_refusals),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
