#include "engine/model.h"

#include <stdio.h>

enum tensor_scope { SCOPE_MODEL, SCOPE_LAYER, SCOPE_EXPERT };

static enum tensor_scope scope_of(model_tensor which) {
    switch (which) {
    case MODEL_EMBED:
    case MODEL_HEAD:
    case MODEL_FINAL_NORM:
        return SCOPE_MODEL;
    case MODEL_EXPERT_GATE:
    case MODEL_EXPERT_UP:
    case MODEL_EXPERT_DOWN:
        return SCOPE_EXPERT;
    default:
        return SCOPE_LAYER;
    }
}

static bool has_tensor(const model_config *c, model_tensor which) {
    switch (which) {
    case MODEL_HEAD:
        return !c->tie_embeddings;
    case MODEL_Q_BIAS:
    case MODEL_K_BIAS:
    case MODEL_V_BIAS:
        return c->qkv_bias;
    case MODEL_Q_NORM:
    case MODEL_K_NORM:
        return c->qk_norm != MODEL_QK_NORM_NONE;
    case MODEL_SHARED_GATE:
    case MODEL_SHARED_UP:
    case MODEL_SHARED_DOWN:
    case MODEL_SHARED_ROUTER:
        return c->shared_intermediate != 0;
    case MODEL_TENSOR_COUNT:
        return false;
    default:
        return true;
    }
}

// The name within its scope; Mixtral names its experts after the paper's w1 (gate), w2 (down) and
// w3 (up).
static const char *suffix_of(const model_config *c, model_tensor which) {
    bool mixtral = c->arch == MODEL_ARCH_MIXTRAL;
    switch (which) {
    case MODEL_EMBED:
        return "model.embed_tokens.weight";
    case MODEL_HEAD:
        return "lm_head.weight";
    case MODEL_FINAL_NORM:
        return "model.norm.weight";
    case MODEL_ATTN_NORM:
        return "input_layernorm.weight";
    case MODEL_Q:
        return "self_attn.q_proj.weight";
    case MODEL_K:
        return "self_attn.k_proj.weight";
    case MODEL_V:
        return "self_attn.v_proj.weight";
    case MODEL_Q_BIAS:
        return "self_attn.q_proj.bias";
    case MODEL_K_BIAS:
        return "self_attn.k_proj.bias";
    case MODEL_V_BIAS:
        return "self_attn.v_proj.bias";
    case MODEL_Q_NORM:
        return "self_attn.q_norm.weight";
    case MODEL_K_NORM:
        return "self_attn.k_norm.weight";
    case MODEL_O:
        return "self_attn.o_proj.weight";
    case MODEL_FFN_NORM:
        return "post_attention_layernorm.weight";
    case MODEL_ROUTER:
        return "gate.weight";
    case MODEL_EXPERT_GATE:
        return mixtral ? "w1.weight" : "gate_proj.weight";
    case MODEL_EXPERT_UP:
        return mixtral ? "w3.weight" : "up_proj.weight";
    case MODEL_EXPERT_DOWN:
        return mixtral ? "w2.weight" : "down_proj.weight";
    case MODEL_SHARED_GATE:
        return "shared_expert.gate_proj.weight";
    case MODEL_SHARED_UP:
        return "shared_expert.up_proj.weight";
    case MODEL_SHARED_DOWN:
        return "shared_expert.down_proj.weight";
    case MODEL_SHARED_ROUTER:
        return "shared_expert_gate.weight";
    case MODEL_TENSOR_COUNT:
        break;
    }
    return "";
}

static void name_tensor(const model_config *c, model_tensor which, size_t layer, size_t expert,
                        char *name, size_t n) {
    const char *ffn = c->arch == MODEL_ARCH_MIXTRAL ? "block_sparse_moe" : "mlp";
    const char *suffix = suffix_of(c, which);
    if (scope_of(which) == SCOPE_MODEL)
        snprintf(name, n, "%s", suffix);
    else if (which < MODEL_ROUTER)
        snprintf(name, n, "model.layers.%zu.%s", layer, suffix);
    else if (scope_of(which) == SCOPE_LAYER)
        snprintf(name, n, "model.layers.%zu.%s.%s", layer, ffn, suffix);
    else
        snprintf(name, n, "model.layers.%zu.%s.experts.%zu.%s", layer, ffn, expert, suffix);
}

// dims[1] 0: a vector.
static void shape_of(const model_config *c, model_tensor which, size_t dims[2]) {
    size_t q = c->n_heads * c->head_dim, kv = c->n_kv_heads * c->head_dim;
    bool full = c->qk_norm == MODEL_QK_NORM_FULL;
    size_t rows = c->hidden, columns = 0;
    switch (which) {
    case MODEL_EMBED:
    case MODEL_HEAD:
        rows = c->vocab, columns = c->hidden;
        break;
    case MODEL_Q:
        rows = q, columns = c->hidden;
        break;
    case MODEL_K:
    case MODEL_V:
        rows = kv, columns = c->hidden;
        break;
    case MODEL_Q_BIAS:
        rows = q;
        break;
    case MODEL_K_BIAS:
    case MODEL_V_BIAS:
        rows = kv;
        break;
    case MODEL_Q_NORM:
        rows = full ? q : c->head_dim;
        break;
    case MODEL_K_NORM:
        rows = full ? kv : c->head_dim;
        break;
    case MODEL_O:
        columns = q;
        break;
    case MODEL_ROUTER:
        rows = c->n_experts, columns = c->hidden;
        break;
    case MODEL_EXPERT_GATE:
    case MODEL_EXPERT_UP:
        rows = c->expert_intermediate, columns = c->hidden;
        break;
    case MODEL_EXPERT_DOWN:
        columns = c->expert_intermediate;
        break;
    case MODEL_SHARED_GATE:
    case MODEL_SHARED_UP:
        rows = c->shared_intermediate, columns = c->hidden;
        break;
    case MODEL_SHARED_DOWN:
        columns = c->shared_intermediate;
        break;
    case MODEL_SHARED_ROUTER:
        rows = 1, columns = c->hidden;
        break;
    case MODEL_FINAL_NORM:
    case MODEL_ATTN_NORM:
    case MODEL_FFN_NORM:
    case MODEL_TENSOR_COUNT:
        break;
    }
    dims[0] = rows;
    dims[1] = columns;
}

void model_tensor_describe(const model_config *config, model_tensor which, size_t layer,
                           size_t expert, model_tensor_spec *out) {
    *out = (model_tensor_spec){0};
    if (!has_tensor(config, which))
        return;
    name_tensor(config, which, layer, expert, out->name, sizeof out->name);
    shape_of(config, which, out->dims);
    out->n_dims = out->dims[1] ? 2 : 1;
}

void model_tensor_counts(const model_config *config, model_tensor which, size_t *n_layers,
                         size_t *n_experts) {
    bool has = has_tensor(config, which);
    enum tensor_scope scope = scope_of(which);
    *n_layers = !has ? 0 : scope == SCOPE_MODEL ? 1 : config->n_layers;
    *n_experts = !has ? 0 : scope == SCOPE_EXPERT ? config->n_experts : 1;
}

static uint64_t hash_bytes(uint64_t hash, const void *bytes, size_t n) {
    const unsigned char *p = bytes;
    for (size_t i = 0; i < n; i++)
        hash = (hash ^ p[i]) * 0x100000001b3u;
    return hash;
}

uint64_t model_config_hash(const model_config *c) {
    // Field by field: the struct has padding, and ids and sampling defaults shape nothing.
    const uint64_t whole[] = {(uint64_t)c->arch,
                              c->hidden,
                              c->n_layers,
                              c->vocab,
                              c->n_heads,
                              c->n_kv_heads,
                              c->head_dim,
                              c->n_experts,
                              c->top_k,
                              c->expert_intermediate,
                              c->shared_intermediate,
                              c->norm_top_k,
                              (uint64_t)c->qk_norm,
                              c->qkv_bias,
                              c->max_positions,
                              c->sliding_window,
                              c->tie_embeddings,
                              (uint64_t)c->checkpoint};
    const float real[] = {c->clip_qkv, c->rms_epsilon};
    uint64_t hash = 0xcbf29ce484222325u;
    hash = hash_bytes(hash, whole, sizeof whole);
    hash = hash_bytes(hash, real, sizeof real);
    return hash_bytes(hash, c->inverse_frequencies, c->head_dim / 2 * sizeof(float));
}
