// config.json of every architecture: what is read, what is refused and how it is said.
#include "engine/model.h"
#include "tests/support/tempdir.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#define SIZES                                                                                      \
    "\"hidden_size\":64,\"num_hidden_layers\":2,\"vocab_size\":300,\"num_attention_heads\":4,"     \
    "\"num_key_value_heads\":2,\"max_position_embeddings\":128,\"num_experts_per_tok\":2"

static const char olmoe[] = "{\"architectures\":[\"OlmoeForCausalLM\"],\"num_experts\":8,"
                            "\"intermediate_size\":32," SIZES "}";
static const char qwen2[] = "{\"architectures\":[\"Qwen2MoeForCausalLM\"],\"num_experts\":8,"
                            "\"intermediate_size\":99,\"moe_intermediate_size\":32,"
                            "\"shared_expert_intermediate_size\":48," SIZES "}";
static const char qwen3[] = "{\"architectures\":[\"Qwen3MoeForCausalLM\"],\"num_local_experts\":8,"
                            "\"moe_intermediate_size\":32,\"head_dim\":24," SIZES "}";
static const char mixtral[] = "{\"model_type\":\"mixtral\",\"num_local_experts\":8,"
                              "\"intermediate_size\":32," SIZES "}";

// base with extra members before its first one; a key of extra replaces that of base.
static char *with(const char *base, const char *extra) {
    char *text = malloc(strlen(base) + strlen(extra) + 3);
    assert_non_null(text);
    sprintf(text, "{%s%s%s", extra, *extra ? "," : "", base + 1);
    const char *key_end = strchr(extra, ':');
    char key[80];
    if (!key_end || (size_t)(key_end - extra) >= sizeof key - 1)
        return text;
    snprintf(key, sizeof key, "%.*s:", (int)(key_end - extra), extra);
    char *old = strstr(text + 1 + strlen(extra), key);
    if (old) { // values of the base configs hold no comma but the list of one architecture
        char *end = old + strcspn(old, ",}");
        if (*end == ',')
            memmove(old, end + 1, strlen(end + 1) + 1);
        else
            memmove(old - 1, end, strlen(end) + 1);
    }
    return text;
}

static int parse(const char *text, const char *generation, model_config *out, error *err) {
    json *config = NULL, *gen = NULL;
    assert_int_equal(json_parse("config.json", text, strlen(text), &config, err), E_OK);
    if (generation)
        assert_int_equal(
            json_parse("generation_config.json", generation, strlen(generation), &gen, err), E_OK);
    int rc = model_config_parse(config, gen, out, err);
    json_close(config);
    json_close(gen);
    return rc;
}

static model_config parse_ok(const char *base, const char *extra) {
    model_config config;
    error err = {0};
    char *text = with(base, extra);
    if (parse(text, NULL, &config, &err) != E_OK)
        fail_msg("%s", err.text);
    free(text);
    return config;
}

static void test_olmoe(void **state) {
    (void)state;
    model_config c = parse_ok(olmoe, "\"clip_qkv\":7.5,\"dtype\":\"bfloat16\"");
    assert_int_equal(c.arch, MODEL_ARCH_OLMOE);
    assert_int_equal(c.hidden, 64);
    assert_int_equal(c.n_layers, 2);
    assert_int_equal(c.vocab, 300);
    assert_int_equal(c.n_heads, 4);
    assert_int_equal(c.n_kv_heads, 2);
    assert_int_equal(c.head_dim, 16);
    assert_int_equal(c.n_experts, 8);
    assert_int_equal(c.top_k, 2);
    assert_int_equal(c.expert_intermediate, 32);
    assert_int_equal(c.max_positions, 128);
    assert_int_equal(c.qk_norm, MODEL_QK_NORM_FULL);
    assert_false(c.norm_top_k);
    assert_false(c.qkv_bias);
    assert_true(c.clip_qkv == 7.5f);
    assert_true(c.rms_epsilon == 1e-5f);
    assert_int_equal(c.checkpoint, DTYPE_BF16);
    assert_int_equal(c.bos, -1);
    assert_int_equal(c.n_eos, 0);
    assert_true(c.inverse_frequencies[0] == 1.0f);
    assert_true(fabsf(c.inverse_frequencies[4] - 0.01f) < 1e-9f);
    assert_true(isnan(c.temperature));
    assert_int_equal(c.top_k_sampling, -1);
    assert_true(parse_ok(olmoe, "\"norm_topk_prob\":true").norm_top_k);
    assert_true(parse_ok(olmoe, "\"clip_qkv\":null").clip_qkv == 0);
    // Absent heads of keys and values are as many as those of queries.
    assert_int_equal(parse_ok(olmoe, "\"num_key_value_heads\":null").n_kv_heads, 4);
}

static void test_qwen(void **state) {
    (void)state;
    model_config c = parse_ok(qwen2, "\"torch_dtype\":\"float16\"");
    assert_int_equal(c.arch, MODEL_ARCH_QWEN2_MOE);
    assert_int_equal(c.expert_intermediate, 32);
    assert_int_equal(c.shared_intermediate, 48);
    assert_true(c.qkv_bias);
    assert_int_equal(c.qk_norm, MODEL_QK_NORM_NONE);
    assert_int_equal(c.checkpoint, DTYPE_F16);
    assert_true(c.rms_epsilon == 1e-6f);
    assert_false(parse_ok(qwen2, "\"qkv_bias\":false").qkv_bias);
    // A window that is switched off says nothing.
    c = parse_ok(qwen2, "\"sliding_window\":16,\"use_sliding_window\":false");
    assert_int_equal(c.sliding_window, 0);
    c = parse_ok(qwen3, "\"tie_word_embeddings\":true");
    assert_int_equal(c.arch, MODEL_ARCH_QWEN3_MOE);
    assert_int_equal(c.head_dim, 24);
    assert_int_equal(c.qk_norm, MODEL_QK_NORM_HEAD);
    assert_false(c.qkv_bias);
    assert_true(c.tie_embeddings);
    assert_int_equal(c.shared_intermediate, 0);
}

static void test_mixtral(void **state) {
    (void)state;
    model_config c = parse_ok(mixtral, "\"sliding_window\":32");
    assert_int_equal(c.arch, MODEL_ARCH_MIXTRAL);
    assert_true(c.norm_top_k);
    assert_int_equal(c.sliding_window, 32);
    assert_true(fabsf(c.inverse_frequencies[4] - 1e-3f) < 1e-9f); // theta 1e6 when absent
    assert_int_equal(parse_ok(mixtral, "\"sliding_window\":null").sliding_window, 0);
    assert_int_equal(parse_ok(mixtral, "\"sliding_window\":128").sliding_window, 0);
    assert_string_equal(model_arch_name(c.arch), "MixtralForCausalLM");
}

// Values of transformers 5.23 for head_dim 16, theta 10000 and the scaling shown.
static void test_rope(void **state) {
    (void)state;
    static const float llama3[] = {
        1.0f,           0.316227764f,    0.0509295836f,   0.00790569466f,
        0.00249999994f, 0.000790569466f, 0.000250000012f, 7.90569466e-05f};
    model_config plain = parse_ok(olmoe, ""), c;
    c = parse_ok(olmoe, "\"rope_scaling\":{\"type\":\"linear\",\"factor\":4.0}");
    for (int i = 0; i < 8; i++)
        assert_true(c.inverse_frequencies[i] == plain.inverse_frequencies[i] / 4);
    c = parse_ok(olmoe, "\"rope_parameters\":{\"rope_type\":\"llama3\",\"rope_theta\":10000.0,"
                        "\"factor\":4.0,\"low_freq_factor\":1.0,\"high_freq_factor\":4.0,"
                        "\"original_max_position_embeddings\":128}");
    for (int i = 0; i < 8; i++)
        if (fabsf(c.inverse_frequencies[i] / llama3[i] - 1) > 1e-6f)
            fail_msg("llama3[%d]: %.9g is not %.9g", i, (double)c.inverse_frequencies[i],
                     (double)llama3[i]);
    // The inner theta goes before the outer one.
    c = parse_ok(olmoe, "\"rope_theta\":500.0,\"rope_parameters\":{\"rope_type\":\"default\","
                        "\"rope_theta\":1000000.0}");
    assert_true(fabsf(c.inverse_frequencies[4] - 1e-3f) < 1e-9f);
    c = parse_ok(olmoe, "\"rope_theta\":1000000,\"rope_scaling\":null");
    assert_true(fabsf(c.inverse_frequencies[4] - 1e-3f) < 1e-9f);
}

static void test_generation_config(void **state) {
    (void)state;
    model_config c;
    error err = {0};
    char *text = with(olmoe, "\"eos_token_id\":7,\"bos_token_id\":5");
    assert_int_equal(parse(text, NULL, &c, &err), E_OK);
    assert_int_equal(c.n_eos, 1);
    assert_int_equal(c.eos[0], 7);
    assert_int_equal(c.bos, 5);
    assert_int_equal(parse(text,
                           "{\"eos_token_id\":[3,4],\"temperature\":0.7,\"top_p\":0.8,\"top_k\":20,"
                           "\"repetition_penalty\":1.05}",
                           &c, &err),
                     E_OK);
    assert_int_equal(c.n_eos, 2);
    assert_int_equal(c.eos[1], 4);
    assert_int_equal(c.bos, 5);
    assert_true(c.temperature == 0.7f && c.top_p == 0.8f && c.repetition_penalty == 1.05f);
    assert_int_equal(c.top_k_sampling, 20);
    assert_int_equal(parse(text, "{\"eos_token_id\":\"x\"}", &c, &err), E_INVALID);
    assert_string_equal(err.text, "generation_config.json: eos_token_id: expected a token id or a "
                                  "list of token ids");
    assert_int_equal(parse(text, "{\"eos_token_id\":[1,2,3,4,5,6,7,8,9]}", &c, &err),
                     E_UNSUPPORTED);
    assert_int_equal(parse(text, "{\"top_p\":1.5}", &c, &err), E_INVALID);
    assert_non_null(strstr(err.text, "generation_config.json: top_p"));
    assert_int_equal(parse(text, "[]", &c, &err), E_INVALID);
    free(text);
}

static void test_refusals(void **state) {
    (void)state;
    static const struct {
        const char *base, *extra;
        int code;
        const char *message;
    } cases[] = {
        {olmoe, "\"architectures\":[\"LlamaForCausalLM\"]", E_UNSUPPORTED,
         "config.json: architectures: 'LlamaForCausalLM' is not supported, only OlmoeForCausalLM"},
        {olmoe, "\"architectures\":[1]", E_INVALID, "architectures: expected a list of strings"},
        {mixtral, "\"model_type\":\"llama\"", E_UNSUPPORTED, "model_type: 'llama'"},
        {mixtral, "\"model_type\":3", E_INVALID, "model_type: expected a string"},
        {olmoe, "\"hidden_size\":0", E_INVALID, "hidden_size: expected an integer from 1 to 65536"},
        {olmoe, "\"hidden_size\":null", E_INVALID, "hidden_size: missing"},
        {olmoe, "\"hidden_size\":1e300", E_INVALID, "hidden_size"},
        {olmoe, "\"hidden_size\":\"64\"", E_INVALID, "hidden_size: expected an integer"},
        {olmoe, "\"num_hidden_layers\":513", E_INVALID, "num_hidden_layers: expected an integer"},
        {olmoe, "\"vocab_size\":-1", E_INVALID, "vocab_size"},
        {olmoe, "\"num_attention_heads\":2000", E_INVALID, "num_attention_heads"},
        {olmoe, "\"num_attention_heads\":6", E_INVALID, "hidden_size 64 is not a multiple of 6"},
        {olmoe, "\"num_key_value_heads\":3", E_INVALID, "num_key_value_heads: 4 attention heads"},
        {olmoe, "\"head_dim\":8", E_INVALID, "head_dim: 8 times 4 heads is not hidden_size 64"},
        {qwen3, "\"head_dim\":7", E_UNSUPPORTED, "head_dim: 7, expected an even number"},
        {qwen3, "\"head_dim\":514", E_INVALID, "head_dim"},
        {qwen2, "\"hidden_size\":65536", E_UNSUPPORTED, "head_dim: 16384"},
        {olmoe, "\"num_experts\":4097", E_INVALID, "num_experts: expected an integer"},
        {mixtral, "\"num_local_experts\":null", E_INVALID, "num_local_experts: missing"},
        {olmoe, "\"num_experts\":1", E_INVALID, "num_experts_per_tok: 2 is more than"},
        {olmoe, "\"num_experts_per_tok\":65", E_INVALID, "num_experts_per_tok: expected"},
        {qwen2, "\"shared_expert_intermediate_size\":null", E_INVALID, "shared_expert_inter"},
        {qwen2, "\"moe_intermediate_size\":null", E_INVALID, "moe_intermediate_size: missing"},
        {olmoe, "\"max_position_embeddings\":null", E_INVALID, "max_position_embeddings: missing"},
        {olmoe, "\"hidden_act\":\"gelu\"", E_UNSUPPORTED, "hidden_act: 'gelu' is not supported"},
        {qwen3, "\"attention_bias\":true", E_UNSUPPORTED, "attention_bias"},
        {qwen3, "\"decoder_sparse_step\":2", E_UNSUPPORTED, "decoder_sparse_step: 2"},
        {qwen3, "\"mlp_only_layers\":[0]", E_UNSUPPORTED, "mlp_only_layers"},
        {qwen3, "\"quantization_config\":{\"bits\":4}", E_UNSUPPORTED, "quantization_config"},
        {qwen3, "\"dtype\":\"float8_e4m3fn\"", E_UNSUPPORTED, "dtype: 'float8_e4m3fn'"},
        {qwen3, "\"torch_dtype\":\"int8\"", E_UNSUPPORTED, "torch_dtype: 'int8'"},
        {qwen2, "\"use_sliding_window\":true,\"sliding_window\":16", E_UNSUPPORTED,
         "use_sliding_window: a window of 16 tokens"},
        {qwen3, "\"layer_types\":[\"full_attention\",\"sliding_attention\"]", E_UNSUPPORTED,
         "layer_types: 'sliding_attention'"},
        {mixtral, "\"sliding_window\":0", E_INVALID, "sliding_window"},
        {olmoe, "\"clip_qkv\":-1", E_INVALID, "clip_qkv"},
        {olmoe, "\"rms_norm_eps\":-1", E_INVALID, "rms_norm_eps"},
        {olmoe, "\"norm_topk_prob\":1", E_INVALID, "norm_topk_prob: expected true or false"},
        {olmoe, "\"rope_scaling\":{\"type\":\"yarn\",\"factor\":2}", E_UNSUPPORTED,
         "rope_scaling: rotary scaling 'yarn' is not supported"},
        {olmoe, "\"rope_scaling\":{\"rope_type\":\"dynamic\",\"factor\":2}", E_UNSUPPORTED,
         "'dynamic'"},
        {olmoe, "\"rope_scaling\":[1]", E_INVALID, "rope_scaling: expected an object"},
        {olmoe, "\"rope_scaling\":{\"type\":\"linear\"}", E_INVALID, "factor: missing"},
        {olmoe, "\"rope_scaling\":{\"type\":\"linear\",\"factor\":0}", E_INVALID, "factor"},
        {olmoe, "\"rope_scaling\":{\"type\":\"llama3\",\"factor\":2}", E_INVALID, "low_freq"},
        {olmoe,
         "\"rope_scaling\":{\"type\":\"llama3\",\"factor\":2,\"low_freq_factor\":4,"
         "\"high_freq_factor\":4}",
         E_INVALID, "rope_scaling.high_freq_factor: 4 is not above"},
        {olmoe, "\"rope_parameters\":{\"full_attention\":{}}", E_UNSUPPORTED, "per kind of layer"},
        {olmoe, "\"partial_rotary_factor\":0.5", E_UNSUPPORTED, "partial_rotary_factor: 0.5"},
        {olmoe, "\"rope_theta\":0", E_INVALID, "rope_theta"},
        {olmoe, "\"bos_token_id\":-2", E_INVALID, "bos_token_id"},
        {olmoe, "\"eos_token_id\":[1,1.5]", E_INVALID, "eos_token_id"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        model_config config;
        error err = {0};
        char *text = with(cases[i].base, cases[i].extra);
        int rc = parse(text, NULL, &config, &err);
        if (rc != cases[i].code || !strstr(err.text, cases[i].message) ||
            !strstr(err.text, "config.json"))
            fail_msg("%s gives %d '%s'", cases[i].extra, rc, err.text);
        free(text);
    }
}

static void expect_spec(const model_config *c, model_tensor which, const char *name, size_t rows,
                        size_t columns) {
    model_tensor_spec spec;
    model_tensor_describe(c, which, 1, 5, &spec);
    assert_string_equal(spec.name, name);
    assert_int_equal(spec.n_dims, !*name ? 0 : columns ? 2 : 1);
    assert_int_equal(spec.dims[0], rows);
    assert_int_equal(spec.dims[1], columns);
}

static void test_tensor_names(void **state) {
    (void)state;
    model_config c = parse_ok(qwen3, "\"tie_word_embeddings\":true");
    expect_spec(&c, MODEL_EMBED, "model.embed_tokens.weight", 300, 64);
    expect_spec(&c, MODEL_HEAD, "", 0, 0);
    expect_spec(&c, MODEL_Q, "model.layers.1.self_attn.q_proj.weight", 96, 64);
    expect_spec(&c, MODEL_K, "model.layers.1.self_attn.k_proj.weight", 48, 64);
    expect_spec(&c, MODEL_O, "model.layers.1.self_attn.o_proj.weight", 64, 96);
    expect_spec(&c, MODEL_K_NORM, "model.layers.1.self_attn.k_norm.weight", 24, 0);
    expect_spec(&c, MODEL_Q_BIAS, "", 0, 0);
    expect_spec(&c, MODEL_SHARED_ROUTER, "", 0, 0);
    expect_spec(&c, MODEL_ROUTER, "model.layers.1.mlp.gate.weight", 8, 64);
    expect_spec(&c, MODEL_EXPERT_DOWN, "model.layers.1.mlp.experts.5.down_proj.weight", 64, 32);
    c = parse_ok(olmoe, "");
    expect_spec(&c, MODEL_HEAD, "lm_head.weight", 300, 64);
    expect_spec(&c, MODEL_Q_NORM, "model.layers.1.self_attn.q_norm.weight", 64, 0);
    expect_spec(&c, MODEL_K_NORM, "model.layers.1.self_attn.k_norm.weight", 32, 0);
    c = parse_ok(qwen2, "");
    expect_spec(&c, MODEL_Q_BIAS, "model.layers.1.self_attn.q_proj.bias", 64, 0);
    expect_spec(&c, MODEL_V_BIAS, "model.layers.1.self_attn.v_proj.bias", 32, 0);
    expect_spec(&c, MODEL_SHARED_UP, "model.layers.1.mlp.shared_expert.up_proj.weight", 48, 64);
    expect_spec(&c, MODEL_SHARED_DOWN, "model.layers.1.mlp.shared_expert.down_proj.weight", 64, 48);
    expect_spec(&c, MODEL_SHARED_ROUTER, "model.layers.1.mlp.shared_expert_gate.weight", 1, 64);
    c = parse_ok(mixtral, "");
    expect_spec(&c, MODEL_ROUTER, "model.layers.1.block_sparse_moe.gate.weight", 8, 64);
    expect_spec(&c, MODEL_EXPERT_GATE, "model.layers.1.block_sparse_moe.experts.5.w1.weight", 32,
                64);
    expect_spec(&c, MODEL_EXPERT_UP, "model.layers.1.block_sparse_moe.experts.5.w3.weight", 32, 64);
    expect_spec(&c, MODEL_EXPERT_DOWN, "model.layers.1.block_sparse_moe.experts.5.w2.weight", 64,
                32);
    size_t n_layers, n_experts;
    model_tensor_counts(&c, MODEL_EXPERT_UP, &n_layers, &n_experts);
    assert_int_equal(n_layers * n_experts, 16);
    model_tensor_counts(&c, MODEL_SHARED_UP, &n_layers, &n_experts);
    assert_int_equal(n_layers + n_experts, 0);
}

static void test_hash(void **state) {
    (void)state;
    model_config a = parse_ok(olmoe, "\"eos_token_id\":1"), b = parse_ok(olmoe, "");
    assert_true(model_config_hash(&a) == model_config_hash(&b));
    b = parse_ok(olmoe, "\"rope_theta\":20000");
    assert_true(model_config_hash(&a) != model_config_hash(&b));
    b = parse_ok(olmoe, "\"norm_topk_prob\":true");
    assert_true(model_config_hash(&a) != model_config_hash(&b));
    b = parse_ok(olmoe, "\"intermediate_size\":36");
    assert_true(model_config_hash(&a) != model_config_hash(&b));
}

static void test_load(void **state) {
    (void)state;
    tempdir dir = tempdir_make();
    model_config c;
    error err = {0};
    assert_int_equal(model_config_load(dir.path, &c, &err), E_NOT_FOUND);
    assert_non_null(strstr(err.text, "no config.json; give the directory"));
    tempdir_write_text(&dir, "config.json", olmoe);
    assert_int_equal(model_config_load(dir.path, &c, &err), E_OK);
    tempdir_write_text(&dir, "generation_config.json", "{\"eos_token_id\":9}");
    assert_int_equal(model_config_load(dir.path, &c, &err), E_OK);
    assert_int_equal(c.eos[0], 9);
    tempdir_write_text(&dir, "generation_config.json", "{");
    assert_int_equal(model_config_load(dir.path, &c, &err), E_INVALID);
    assert_non_null(strstr(err.text, "generation_config.json: line 1"));
    tempdir_write_text(&dir, "config.json", "[]");
    tempdir_write_text(&dir, "generation_config.json", "{}");
    assert_int_equal(model_config_load(dir.path, &c, &err), E_INVALID);
    assert_non_null(strstr(err.text, "/config.json: expected a JSON object"));
    tempdir_remove(&dir);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_olmoe),
        cmocka_unit_test(test_qwen),
        cmocka_unit_test(test_mixtral),
        cmocka_unit_test(test_rope),
        cmocka_unit_test(test_generation_config),
        cmocka_unit_test(test_refusals),
        cmocka_unit_test(test_tensor_names),
        cmocka_unit_test(test_hash),
        cmocka_unit_test(test_load),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
