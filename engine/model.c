#include "engine/model.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

enum { CONFIG_MAX_BYTES = 4 << 20 };

static const char *const hf_names[] = {
#define X(name, hf, type) hf,
    MODEL_ARCH_MAP(X)
#undef X
};

static const char *const type_names[] = {
#define X(name, hf, type) type,
    MODEL_ARCH_MAP(X)
#undef X
};

enum { N_ARCHS = sizeof hf_names / sizeof *hf_names };

// What the transformers library takes for keys that are absent, and what only the code of an
// architecture says.
typedef struct arch_facts {
    const char *intermediate_key;
    double rms_epsilon, rope_theta;
    model_qk_norm qk_norm;
    bool qkv_bias, shared_expert, always_norm_top_k;
} arch_facts;

static const arch_facts facts_of[N_ARCHS] = {
    [MODEL_ARCH_OLMOE] = {"intermediate_size", 1e-5, 1e4, MODEL_QK_NORM_FULL, false, false, false},
    [MODEL_ARCH_QWEN2_MOE] = {"moe_intermediate_size", 1e-6, 1e4, MODEL_QK_NORM_NONE, true, true,
                              false},
    [MODEL_ARCH_QWEN3_MOE] = {"moe_intermediate_size", 1e-6, 1e4, MODEL_QK_NORM_HEAD, false, false,
                              false},
    // Mixtral takes the softmax over the top-k logits: the softmax over all, renormalised.
    [MODEL_ARCH_MIXTRAL] = {"intermediate_size", 1e-5, 1e6, MODEL_QK_NORM_NONE, false, false, true},
};

const char *model_arch_name(model_arch arch) {
    return hf_names[arch];
}

static int read_arch(const json *doc, model_arch *out, error *err) {
    const json_value *root = json_root(doc), *list = json_get(root, "architectures");
    const char *found = NULL, *key = "architectures";
    if (json_is_array(list) && json_first(list)) {
        if (!json_as_string(json_first(list), &found))
            return error_set(err, E_INVALID, "%s: architectures: expected a list of strings",
                             json_name(doc));
        for (int i = 0; i < N_ARCHS; i++) {
            if (strcmp(found, hf_names[i]) == 0) {
                *out = (model_arch)i;
                return E_OK;
            }
        }
    } else {
        key = "model_type";
        int rc = json_need_string(doc, root, key, &found, err);
        if (rc != E_OK)
            return rc;
        for (int i = 0; i < N_ARCHS; i++) {
            if (strcmp(found, type_names[i]) == 0) {
                *out = (model_arch)i;
                return E_OK;
            }
        }
    }
#define X(name, hf, type) " " hf
    return error_set(err, E_UNSUPPORTED, "%s: %s: '%.80s' is not supported, only" MODEL_ARCH_MAP(X),
                     json_name(doc), key, found);
#undef X
}

static int read_size(const json *doc, const char *key, int64_t max, size_t *out, error *err) {
    int64_t value = 0;
    int rc = json_need_int(doc, json_root(doc), key, 1, max, &value, err);
    if (rc == E_OK)
        *out = (size_t)value;
    return rc;
}

static int read_sizes(const json *doc, model_config *out, error *err) {
    const json_value *root = json_root(doc);
    // Both names are in use: newer transformers save Qwen3 with Mixtral's.
    bool local = json_is_null(json_get(root, "num_experts"));
    const struct {
        const char *key;
        int64_t max;
        size_t *out;
    } rows[] = {
        {"hidden_size", MODEL_MAX_HIDDEN, &out->hidden},
        {"num_hidden_layers", MODEL_MAX_LAYERS, &out->n_layers},
        {"vocab_size", MODEL_MAX_VOCAB, &out->vocab},
        {"num_attention_heads", MODEL_MAX_HEADS, &out->n_heads},
        {"max_position_embeddings", MODEL_MAX_POSITIONS, &out->max_positions},
        {local ? "num_local_experts" : "num_experts", MODEL_MAX_EXPERTS, &out->n_experts},
        {"num_experts_per_tok", MODEL_MAX_TOP_K, &out->top_k},
        {facts_of[out->arch].intermediate_key, MODEL_MAX_INTERMEDIATE, &out->expert_intermediate},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        int rc = read_size(doc, rows[i].key, rows[i].max, rows[i].out, err);
        if (rc != E_OK)
            return rc;
    }
    if (facts_of[out->arch].shared_expert) {
        int rc = read_size(doc, "shared_expert_intermediate_size", MODEL_MAX_INTERMEDIATE,
                           &out->shared_intermediate, err);
        if (rc != E_OK)
            return rc;
    }
    if (out->top_k > out->n_experts)
        return error_set(err, E_INVALID,
                         "%s: num_experts_per_tok: %zu is more than the model's %zu experts",
                         json_name(doc), out->top_k, out->n_experts);
    return E_OK;
}

static int read_heads(const json *doc, model_config *out, error *err) {
    const json_value *root = json_root(doc);
    const char *name = json_name(doc);
    int64_t n_kv = (int64_t)out->n_heads, head_dim = 0;
    int rc = json_opt_int(doc, root, "num_key_value_heads", 1, MODEL_MAX_HEADS, &n_kv, err);
    if (rc == E_OK)
        rc = json_opt_int(doc, root, "head_dim", 1, MODEL_MAX_HEAD_DIM, &head_dim, err);
    if (rc != E_OK)
        return rc;
    if (out->n_heads % (size_t)n_kv)
        return error_set(err, E_INVALID,
                         "%s: num_key_value_heads: %zu attention heads are not a multiple of %lld",
                         name, out->n_heads, (long long)n_kv);
    bool exact = out->hidden % out->n_heads == 0;
    if (!exact && !head_dim)
        return error_set(err, E_INVALID,
                         "%s: num_attention_heads: hidden_size %zu is not a multiple of %zu and "
                         "there is no head_dim",
                         name, out->hidden, out->n_heads);
    if (!head_dim)
        head_dim = (int64_t)(out->hidden / out->n_heads);
    // The norm over all heads of OLMoE has hidden_size weights in transformers.
    if (out->qk_norm == MODEL_QK_NORM_FULL && (size_t)head_dim * out->n_heads != out->hidden)
        return error_set(err, E_INVALID,
                         "%s: head_dim: %lld times %zu heads is not hidden_size %zu", name,
                         (long long)head_dim, out->n_heads, out->hidden);
    if (head_dim % 2 || head_dim > MODEL_MAX_HEAD_DIM)
        return error_set(err, E_UNSUPPORTED, "%s: head_dim: %lld, expected an even number up to %d",
                         name, (long long)head_dim, MODEL_MAX_HEAD_DIM);
    out->n_kv_heads = (size_t)n_kv;
    out->head_dim = (size_t)head_dim;
    return E_OK;
}

// Keys whose presence would change the arithmetic in a way that Tandem does not compute.
static int refuse_unsupported(const json *doc, error *err) {
    const json_value *root = json_root(doc);
    const char *name = json_name(doc), *act = "silu";
    bool attention_bias = false;
    int64_t sparse_step = 1;
    if (!json_is_null(json_get(root, "quantization_config")))
        return error_set(err, E_UNSUPPORTED,
                         "%s: quantization_config: quantised weights are not supported; use the "
                         "model's bf16, f16 or f32 checkpoint",
                         name);
    int rc = json_opt_string(doc, root, "hidden_act", &act, err);
    if (rc == E_OK)
        rc = json_opt_bool(doc, root, "attention_bias", &attention_bias, err);
    if (rc == E_OK)
        rc = json_opt_int(doc, root, "decoder_sparse_step", 0, INT32_MAX, &sparse_step, err);
    if (rc != E_OK)
        return rc;
    if (strcmp(act, "silu") != 0)
        return error_set(err, E_UNSUPPORTED, "%s: hidden_act: '%.40s' is not supported, only silu",
                         name, act);
    if (attention_bias)
        return error_set(err, E_UNSUPPORTED,
                         "%s: attention_bias: true is not supported; choose a model without", name);
    if (sparse_step != 1)
        return error_set(err, E_UNSUPPORTED,
                         "%s: decoder_sparse_step: %lld makes dense layers, which are not "
                         "supported; choose a model with experts in every layer",
                         name, (long long)sparse_step);
    if (json_count(json_get(root, "mlp_only_layers")))
        return error_set(err, E_UNSUPPORTED,
                         "%s: mlp_only_layers: dense layers are not supported; choose a model "
                         "with experts in every layer",
                         name);
    return E_OK;
}

// Mixtral's window holds in every layer. Qwen's begins at a layer that versions of transformers
// disagree on, so it is refused when it could matter.
static int read_window(const json *doc, model_config *out, error *err) {
    const json_value *root = json_root(doc);
    int64_t window = 0;
    bool qwen = out->arch == MODEL_ARCH_QWEN2_MOE || out->arch == MODEL_ARCH_QWEN3_MOE;
    bool use = !qwen;
    int rc = json_opt_bool(doc, root, "use_sliding_window", &use, err);
    if (rc == E_OK && use && out->arch != MODEL_ARCH_OLMOE)
        rc = json_opt_int(doc, root, "sliding_window", 1, JSON_INT_MAX, &window, err);
    if (rc != E_OK)
        return rc;
    for (const json_value *type = json_first(json_get(root, "layer_types")); type;
         type = json_next(type)) {
        const char *text = "";
        if (out->arch != MODEL_ARCH_MIXTRAL &&
            (!json_as_string(type, &text) || strcmp(text, "full_attention") != 0))
            return error_set(err, E_UNSUPPORTED,
                             "%s: layer_types: '%.40s' is not supported, only full_attention",
                             json_name(doc), text);
    }
    if (!window || (uint64_t)window >= out->max_positions)
        return E_OK;
    if (qwen)
        return error_set(err, E_UNSUPPORTED,
                         "%s: use_sliding_window: a window of %lld tokens is not supported; set "
                         "it to false and max_position_embeddings to at most %lld",
                         json_name(doc), (long long)window, (long long)window);
    out->sliding_window = (size_t)window;
    return E_OK;
}

static int read_dtype(const json *doc, dtype *out, error *err) {
    const json_value *root = json_root(doc);
    const char *key = json_is_null(json_get(root, "dtype")) ? "torch_dtype" : "dtype";
    const char *text = "float32";
    int rc = json_opt_string(doc, root, key, &text, err);
    if (rc != E_OK)
        return rc;
    static const struct {
        const char *text;
        dtype type;
    } rows[] = {{"float32", DTYPE_F32}, {"bfloat16", DTYPE_BF16}, {"float16", DTYPE_F16}};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        if (strcmp(text, rows[i].text) == 0) {
            *out = rows[i].type;
            return E_OK;
        }
    }
    return error_set(err, E_UNSUPPORTED,
                     "%s: %s: '%.40s' is not supported, only bfloat16, float16 or float32",
                     json_name(doc), key, text);
}

static int read_arithmetic(const json *doc, model_config *out, error *err) {
    const json_value *root = json_root(doc);
    const arch_facts *facts = &facts_of[out->arch];
    double epsilon = facts->rms_epsilon, clip = 0;
    out->qkv_bias = facts->qkv_bias;
    out->norm_top_k = facts->always_norm_top_k;
    int rc = json_opt_double(doc, root, "rms_norm_eps", 0, 1, &epsilon, err);
    if (rc == E_OK && !facts->always_norm_top_k)
        rc = json_opt_bool(doc, root, "norm_topk_prob", &out->norm_top_k, err);
    if (rc == E_OK)
        rc = json_opt_bool(doc, root, "tie_word_embeddings", &out->tie_embeddings, err);
    if (rc == E_OK && facts->qkv_bias)
        rc = json_opt_bool(doc, root, "qkv_bias", &out->qkv_bias, err);
    if (rc == E_OK && out->arch == MODEL_ARCH_OLMOE)
        rc = json_opt_double(doc, root, "clip_qkv", 1e-6, 1e30, &clip, err);
    if (rc == E_OK)
        rc = read_window(doc, out, err);
    if (rc == E_OK)
        rc = read_dtype(doc, &out->checkpoint, err);
    if (rc != E_OK)
        return rc;
    out->rms_epsilon = (float)epsilon;
    out->clip_qkv = (float)clip;
    return E_OK;
}

// Where the rotary parameters stand: rope_scaling (when it says anything) before rope_parameters,
// as transformers has it; NULL for neither.
static int find_rope(const json *doc, const char **key, const json_value **out, error *err) {
    static const char *const keys[] = {"rope_scaling", "rope_parameters"};
    *out = NULL;
    for (int i = 0; i < 2 && !*out; i++) {
        const json_value *value = json_get(json_root(doc), keys[i]);
        *key = keys[i];
        if (json_is_null(value))
            continue;
        if (!json_is_object(value))
            return error_set(err, E_INVALID, "%s: %s: expected an object or null", json_name(doc),
                             keys[i]);
        if (json_first(value))
            *out = value;
    }
    for (const json_value *member = json_first(*out); member; member = json_next(member))
        if (json_is_object(member))
            return error_set(err, E_UNSUPPORTED,
                             "%s: %s: '%.40s' sets rotary parameters per kind of layer, which is "
                             "not supported",
                             json_name(doc), *key, json_key(member));
    return E_OK;
}

static void scale_linear(model_config *out, float factor) {
    for (size_t i = 0; i < out->head_dim / 2; i++)
        out->inverse_frequencies[i] /= factor;
}

typedef struct llama3_scaling {
    double factor, low, high, context;
} llama3_scaling;

// Llama 3.1: long wavelengths are stretched by factor, short ones kept, those between interpolated.
static void scale_llama3(model_config *out, const llama3_scaling *s) {
    float factor = (float)s->factor, low = (float)s->low, high = (float)s->high;
    float context = (float)s->context;
    for (size_t i = 0; i < out->head_dim / 2; i++) {
        float f = out->inverse_frequencies[i];
        float wavelength = 6.283185307179586f / f;
        if (wavelength > context / low) {
            out->inverse_frequencies[i] = f / factor;
        } else if (wavelength >= context / high) {
            float smooth = (context / wavelength - low) / (high - low);
            out->inverse_frequencies[i] = (1 - smooth) * f / factor + smooth * f;
        }
    }
}

static int read_llama3(const json *doc, const char *key, const json_value *rope, model_config *out,
                       error *err) {
    llama3_scaling s = {.context = (double)out->max_positions};
    int rc =
        json_opt_double(doc, rope, "original_max_position_embeddings", 1, 1e9, &s.context, err);
    if (rc == E_OK) // transformers gives the outer key precedence
        rc = json_opt_double(doc, json_root(doc), "original_max_position_embeddings", 1, 1e9,
                             &s.context, err);
    if (rc == E_OK)
        rc = json_need_double(doc, rope, "factor", 1, 1e6, &s.factor, err);
    if (rc == E_OK)
        rc = json_need_double(doc, rope, "low_freq_factor", 1e-6, 1e6, &s.low, err);
    if (rc == E_OK)
        rc = json_need_double(doc, rope, "high_freq_factor", 1e-6, 1e6, &s.high, err);
    if (rc != E_OK)
        return rc;
    if (!((float)s.high > (float)s.low))
        return error_set(err, E_INVALID,
                         "%s: %s.high_freq_factor: %g is not above low_freq_factor %g",
                         json_name(doc), key, s.high, s.low);
    scale_llama3(out, &s);
    return E_OK;
}

static int read_rope(const json *doc, model_config *out, error *err) {
    const json_value *root = json_root(doc), *rope = NULL;
    const char *key = NULL, *type = "default";
    double theta = facts_of[out->arch].rope_theta, partial = 1, factor = 1;
    int rc = find_rope(doc, &key, &rope, err);
    if (rc == E_OK)
        rc = json_opt_double(doc, root, "rope_theta", 1, 1e30, &theta, err);
    if (rc == E_OK)
        rc = json_opt_double(doc, rope, "rope_theta", 1, 1e30, &theta, err);
    if (rc == E_OK)
        rc = json_opt_double(doc, root, "partial_rotary_factor", 0, 1, &partial, err);
    if (rc == E_OK)
        rc = json_opt_double(doc, rope, "partial_rotary_factor", 0, 1, &partial, err);
    if (rc == E_OK)
        rc = json_opt_string(doc, rope, "type", &type, err);
    if (rc == E_OK)
        rc = json_opt_string(doc, rope, "rope_type", &type, err);
    if (rc != E_OK)
        return rc;
    if (partial != 1)
        return error_set(err, E_UNSUPPORTED,
                         "%s: partial_rotary_factor: %g is not supported, only 1", json_name(doc),
                         partial);
    // In the precision of transformers: the exponent, the power and the inverse are each f32.
    for (size_t i = 0; i < out->head_dim / 2; i++) {
        float exponent = (float)(2 * i) / (float)out->head_dim;
        out->inverse_frequencies[i] = 1.0f / (float)pow((double)(float)theta, (double)exponent);
    }
    if (strcmp(type, "default") == 0)
        return E_OK;
    if (strcmp(type, "llama3") == 0)
        return read_llama3(doc, key, rope, out, err);
    if (strcmp(type, "linear") != 0)
        return error_set(err, E_UNSUPPORTED,
                         "%s: %s: rotary scaling '%.40s' is not supported, only default, linear "
                         "or llama3; set %s to null for the model's original context",
                         json_name(doc), key, type, key);
    rc = json_need_double(doc, rope, "factor", 1, 1e6, &factor, err);
    if (rc == E_OK)
        scale_linear(out, (float)factor);
    return rc;
}

// An id, or a list of ids.
static int read_eos(const json *doc, model_config *out, error *err) {
    const json_value *value = json_get(json_root(doc), "eos_token_id");
    bool list = json_is_array(value);
    int n = 0;
    for (const json_value *v = list ? json_first(value) : value; v;
         v = list ? json_next(v) : NULL) {
        int64_t id = -1;
        if (!json_as_int(v, &id) || id < 0 || id > INT32_MAX)
            return error_set(err, E_INVALID,
                             "%s: eos_token_id: expected a token id or a list of token ids",
                             json_name(doc));
        if (n == MODEL_MAX_EOS)
            return error_set(err, E_UNSUPPORTED, "%s: eos_token_id: more than %d ids",
                             json_name(doc), MODEL_MAX_EOS);
        out->eos[n++] = (int32_t)id;
    }
    out->n_eos = n;
    return E_OK;
}

static int read_special_ids(const json *config, const json *generation, model_config *out,
                            error *err) {
    bool has_bos = generation && !json_is_null(json_get(json_root(generation), "bos_token_id"));
    bool has_eos = generation && !json_is_null(json_get(json_root(generation), "eos_token_id"));
    const json *doc = has_bos ? generation : config;
    int64_t bos = -1;
    int rc = json_opt_int(doc, json_root(doc), "bos_token_id", 0, INT32_MAX, &bos, err);
    if (rc != E_OK)
        return rc;
    out->bos = (int32_t)bos;
    doc = has_eos ? generation : config;
    return json_is_null(json_get(json_root(doc), "eos_token_id")) ? E_OK : read_eos(doc, out, err);
}

static int read_sampling(const json *doc, model_config *out, error *err) {
    double temperature = NAN, top_p = NAN, penalty = NAN;
    int64_t top_k = -1;
    if (doc) {
        const json_value *root = json_root(doc);
        int rc = json_opt_double(doc, root, "temperature", 0, 100, &temperature, err);
        if (rc == E_OK)
            rc = json_opt_double(doc, root, "top_p", 0, 1, &top_p, err);
        if (rc == E_OK)
            rc = json_opt_double(doc, root, "repetition_penalty", 1e-3, 1e3, &penalty, err);
        if (rc == E_OK)
            rc = json_opt_int(doc, root, "top_k", -1, INT32_MAX, &top_k, err);
        if (rc != E_OK)
            return rc;
    }
    out->temperature = (float)temperature;
    out->top_p = (float)top_p;
    out->repetition_penalty = (float)penalty;
    out->top_k_sampling = (int)top_k;
    return E_OK;
}

int model_config_parse(const json *config, const json *generation, model_config *out, error *err) {
    model_config parsed = {0};
    if (!json_is_object(json_root(config)) ||
        (generation && !json_is_object(json_root(generation))))
        return error_set(err, E_INVALID, "%s: expected a JSON object",
                         json_name(json_is_object(json_root(config)) ? generation : config));
    int rc = read_arch(config, &parsed.arch, err);
    if (rc != E_OK)
        return rc;
    parsed.qk_norm = facts_of[parsed.arch].qk_norm;
    if ((rc = refuse_unsupported(config, err)) != E_OK ||
        (rc = read_sizes(config, &parsed, err)) != E_OK ||
        (rc = read_heads(config, &parsed, err)) != E_OK ||
        (rc = read_arithmetic(config, &parsed, err)) != E_OK ||
        (rc = read_rope(config, &parsed, err)) != E_OK ||
        (rc = read_special_ids(config, generation, &parsed, err)) != E_OK ||
        (rc = read_sampling(generation, &parsed, err)) != E_OK)
        return rc;
    *out = parsed;
    return E_OK;
}

static int open_in(const char *dir, const char *file, json **out, error *err) {
    char path[4096];
    int n = snprintf(path, sizeof path, "%s/%s", dir, file);
    if (n < 0 || (size_t)n >= sizeof path)
        return error_set(err, E_TOO_LARGE, "%.200s...: the path is too long", dir);
    return json_open(path, CONFIG_MAX_BYTES, out, err);
}

int model_config_load(const char *dir, model_config *out, error *err) {
    json *config = NULL, *generation = NULL;
    int rc = open_in(dir, "config.json", &config, err);
    if (rc == E_NOT_FOUND)
        rc = error_set(err, rc, "%s: no config.json; give the directory of a Hugging Face model",
                       dir);
    if (rc != E_OK)
        goto done;
    rc = open_in(dir, "generation_config.json", &generation, err);
    if (rc != E_OK && rc != E_NOT_FOUND)
        goto done;
    rc = model_config_parse(config, generation, out, err);
done:
    json_close(generation);
    json_close(config);
    return rc;
}
