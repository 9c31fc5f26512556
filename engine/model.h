// model.h: what a Hugging Face config.json says of a MoE model, checked, in one plain struct.
//
// Thread: immutable after model_config_load.
#ifndef TANDEM_ENGINE_MODEL_H
#define TANDEM_ENGINE_MODEL_H

#include "engine/status.h"
#include "engine/types.h"

#include <stdbool.h>

#define MODEL_ARCH_MAP(X)                                                                          \
    X(OLMOE, "OlmoeForCausalLM", "olmoe")                                                          \
    X(QWEN2_MOE, "Qwen2MoeForCausalLM", "qwen2_moe")                                               \
    X(QWEN3_MOE, "Qwen3MoeForCausalLM", "qwen3_moe")                                               \
    X(MIXTRAL, "MixtralForCausalLM", "mixtral")

typedef enum model_arch {
#define X(name, hf, type) MODEL_ARCH_##name,
    MODEL_ARCH_MAP(X)
#undef X
} model_arch;

typedef enum model_qk_norm { MODEL_QK_NORM_NONE, MODEL_QK_NORM_HEAD, MODEL_QK_NORM_FULL } model_qk_norm;

// Caps, checked at load with a clear message.
enum {
    MODEL_MAX_LAYERS = 512,
    MODEL_MAX_EXPERTS = 4096,
    MODEL_MAX_TOP_K = 64,
    MODEL_MAX_HIDDEN = 65536,
    MODEL_MAX_HEAD_DIM = 512,
    MODEL_MAX_EOS = 8
};

typedef struct model_config {
    model_arch arch;
    size_t hidden, n_layers, vocab;
    size_t n_heads, n_kv_heads, head_dim;
    size_t n_experts, top_k, expert_intermediate;
    size_t shared_intermediate; // 0: no shared expert
    bool norm_top_k;
    model_qk_norm qk_norm;
    bool qkv_bias;
    float clip_qkv; // 0: off
    float rms_epsilon;
    float inverse_frequencies[MODEL_MAX_HEAD_DIM / 2]; // rotary; scaling (llama3, linear) applied
    size_t max_positions;
    size_t sliding_window; // 0: none
    bool tie_embeddings;
    dtype checkpoint; // torch_dtype of config.json, f32 when absent
    int32_t bos; // -1: none
    int n_eos;
    int32_t eos[MODEL_MAX_EOS]; // generation_config.json, else config.json
    // Defaults of generation_config.json, NAN or -1 when absent.
    float temperature, top_p, repetition_penalty;
    int top_k_sampling;
} model_config;

// Reads config.json and generation_config.json of a directory. One line names file, key and fix.
int model_config_load(const char *dir, model_config *out, error *err);

const char *model_arch_name(model_arch arch);

// FNV-1a over every field that shapes the wire or the arithmetic; part of the plan hash.
uint64_t model_config_hash(const model_config *config);

// ---- Names of tensors: the one place that knows a checkpoint's naming. ----
typedef enum model_tensor {
    MODEL_EMBED,       // (vocab, hidden)
    MODEL_HEAD,        // (vocab, hidden)
    MODEL_FINAL_NORM,  // (hidden)
    MODEL_ATTN_NORM,   // (hidden), per layer
    MODEL_Q, MODEL_K, MODEL_V, // (heads * head_dim, hidden)
    MODEL_Q_BIAS, MODEL_K_BIAS, MODEL_V_BIAS,
    MODEL_Q_NORM, MODEL_K_NORM,
    MODEL_O,           // (hidden, heads * head_dim)
    MODEL_FFN_NORM,    // (hidden)
    MODEL_ROUTER,      // (experts, hidden)
    MODEL_EXPERT_GATE, MODEL_EXPERT_UP,   // (intermediate, hidden), per expert
    MODEL_EXPERT_DOWN,                    // (hidden, intermediate), per expert
    MODEL_SHARED_GATE, MODEL_SHARED_UP, MODEL_SHARED_DOWN,
    MODEL_SHARED_ROUTER, // (1, hidden): gate of the shared expert
} model_tensor;

// Name and dims of a tensor of this model (layer and expert ignored where they do not apply).
// n_dims 0 and an empty name: this model has no such tensor.
typedef struct model_tensor_spec {
    char name[128];
    int n_dims;
    size_t dims[2];
} model_tensor_spec;
void model_tensor_describe(const model_config *config, model_tensor which, size_t layer,
                           size_t expert, model_tensor_spec *out);

#endif
