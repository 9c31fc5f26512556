// The golden fixtures are whole: each opens with our loader and its reference agrees with itself.
#include "engine/weights.h"
#include "tests/support/golden.h"
#include "tests/support/reference.h"
#include "tests/support/tempdir.h"

#include <dirent.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#define FOLDER TESTS_DIR "/fixtures/golden"

static model_config load(const char *name, golden *g) {
    char dir[1024];
    model_config config;
    weights *w = NULL;
    error err = {0};
    snprintf(dir, sizeof dir, FOLDER "/%s", name);
    if (model_config_load(dir, &config, &err) != E_OK || weights_open(dir, &w, &err) != E_OK ||
        weights_check_model(w, &config, &err) != E_OK || golden_open(dir, g, &err) != E_OK)
        fail_msg("%s", err.text);
    weights_close(w);
    return config;
}

static size_t argmax(const float *values, size_t n) {
    size_t best = 0;
    for (size_t i = 1; i < n; i++)
        if (values[i] > values[best])
            best = i;
    return best;
}

static void test_fixtures_are_whole(void **state) {
    (void)state;
    for (size_t i = 0; i < n_golden_names; i++) {
        golden g;
        model_config config = load(golden_names[i], &g);
        assert_int_equal(g.vocab, config.vocab);
        assert_int_equal(g.n_prompts, 3);
        assert_int_equal(g.n_greedy, 32);
        for (size_t p = 0; p < g.n_prompts; p++) {
            const golden_prompt *prompt = &g.prompts[p];
            assert_true(prompt->n_tokens + g.n_greedy <= config.max_positions);
            for (size_t t = 0; t < prompt->n_tokens; t++)
                assert_in_range(prompt->ids[t], 0, g.vocab - 1);
            for (size_t t = 0; t < prompt->n_tokens * g.vocab; t++)
                assert_true(isfinite(prompt->logits[t]));
            const float *last = prompt->logits + (prompt->n_tokens - 1) * g.vocab;
            assert_int_equal(argmax(last, g.vocab), prompt->greedy[0]);
        }
        golden_close(&g);
    }
}

// What a fixture is about is in its config.json: a library that saved it away would show here.
static void test_fixtures_differ_as_they_say(void **state) {
    (void)state;
    golden g;
    model_config c = load("olmoe_clip_tied_bf16", &g);
    golden_close(&g);
    assert_true(c.clip_qkv == 0.9f && c.tie_embeddings && c.norm_top_k);
    assert_int_equal(c.qk_norm, MODEL_QK_NORM_FULL);
    assert_int_equal(c.checkpoint, DTYPE_BF16);
    c = load("qwen2_no_bias_f32", &g);
    golden_close(&g);
    assert_true(!c.qkv_bias && c.shared_intermediate == 16 && c.n_kv_heads == 1);
    c = load("qwen2_f16", &g);
    golden_close(&g);
    assert_true(c.qkv_bias && !c.norm_top_k && c.checkpoint == DTYPE_F16);
    c = load("qwen3_tied_bf16", &g);
    golden_close(&g);
    assert_true(c.head_dim == 16 && c.hidden == 32 && c.n_heads == 4 && c.tie_embeddings);
    assert_int_equal(c.n_experts, 8);
    c = load("mixtral_window_bf16", &g);
    golden_close(&g);
    assert_true(c.sliding_window == 9 && c.norm_top_k);
    c = load("mixtral_linear_rope_f16", &g);
    golden_close(&g);
    assert_true(c.inverse_frequencies[0] == 0.5f);
}

// A forward pass from the configuration and the weights alone gives what transformers gives.
static void check_reference(const char *name) {
    char dir[1024];
    model_config config;
    weights *w = NULL;
    reference *r = NULL;
    golden g;
    error err = {0};
    snprintf(dir, sizeof dir, FOLDER "/%s", name);
    if (model_config_load(dir, &config, &err) != E_OK || weights_open(dir, &w, &err) != E_OK ||
        golden_open(dir, &g, &err) != E_OK ||
        reference_open(&config, w, config.max_positions, &r, &err) != E_OK)
        fail_msg("%s", err.text);
    float *logits = malloc(g.vocab * sizeof *logits);
    assert_non_null(logits);
    for (size_t p = 0; p < g.n_prompts; p++) {
        const golden_prompt *prompt = &g.prompts[p];
        reference_reset(r);
        for (size_t t = 0; t < prompt->n_tokens; t++) {
            assert_int_equal(reference_step(r, prompt->ids[t], logits, &err), E_OK);
            double off = golden_relative_error(logits, prompt->logits + t * g.vocab, g.vocab);
            if (!(off < 1e-5))
                fail_msg("%s: prompt %zu, token %zu: relative error %g", name, p, t, off);
        }
        for (size_t t = 0; t < g.n_greedy; t++) {
            assert_int_equal(argmax(logits, g.vocab), prompt->greedy[t]);
            assert_int_equal(reference_step(r, prompt->greedy[t], logits, &err), E_OK);
        }
    }
    free(logits);
    reference_close(r);
    golden_close(&g);
    weights_close(w);
}

static void test_plain_forward_pass(void **state) {
    (void)state;
    for (size_t i = 0; i < n_golden_names; i++)
        check_reference(golden_names[i]);
}

static void test_every_folder_is_listed(void **state) {
    (void)state;
    size_t n = 0;
    DIR *list = opendir(FOLDER);
    assert_non_null(list);
    for (struct dirent *entry; (entry = readdir(list));)
        n += !strchr(entry->d_name, '.'); // README.md, . and .. are none
    closedir(list);
    assert_int_equal(n, n_golden_names);
}

static void test_reader_refuses_damage(void **state) {
    (void)state;
    static const char whole[8 + 12 + 4 + 4 + 8 + 4] = {
        'T', 'A', 'N', 'D', 'E', 'M', 'G', '1', 1, 0, 0, 0, 2, 0, 0, 0, 1, 0, 0, 0, 1};
    tempdir dir = tempdir_make();
    golden g = {0};
    error err = {0};
    tempdir_write(&dir, "golden.bin", whole, sizeof whole);
    assert_int_equal(golden_open(dir.path, &g, &err), E_OK);
    assert_int_equal(g.prompts[0].n_tokens, 1);
    golden_close(&g);
    for (size_t n = 0; n < sizeof whole; n += 4) {
        tempdir_write(&dir, "golden.bin", whole, n);
        assert_int_equal(golden_open(dir.path, &g, &err), E_INVALID);
    }
    tempdir_remove(&dir);
    assert_int_equal(golden_open(dir.path, &g, &err), E_NOT_FOUND);
}

static void test_relative_error(void **state) {
    (void)state;
    const float right[] = {3, 4}, shifted[] = {3, 4.5f};
    assert_true(golden_relative_error(right, right, 2) == 0);
    assert_true(fabs(golden_relative_error(shifted, right, 2) - 0.1) < 1e-9);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_fixtures_are_whole),
        cmocka_unit_test(test_fixtures_differ_as_they_say),
        cmocka_unit_test(test_plain_forward_pass),
        cmocka_unit_test(test_every_folder_is_listed),
        cmocka_unit_test(test_reader_refuses_damage),
        cmocka_unit_test(test_relative_error),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
