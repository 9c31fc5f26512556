// model.h: what a Hugging Face config.json says of a MoE model, checked, in one plain struct.
//
// Absent keys take the defaults of the transformers library, except sizes, which must be there.
// What Tandem does not compute (dense layers, quantised weights, other rotary scalings, ...) is
// refused here with one line that names file, key and fix.
// Thread: immutable after model_config_load.
#ifndef TANDEM_ENGINE_MODEL_H
#define TANDEM_ENGINE_MODEL_H

#include "engine/json.h"
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

typedef enum model_qk_norm {
    MODEL_QK_NORM_NONE,
    MODEL_QK_NORM_HEAD,
    MODEL_QK_NORM_FULL
} model_qk_norm;

// Caps, checked at load with a clear message.
enum {
    MODEL_MAX_LAYERS = 512,
    MODEL_MAX_EXPERTS = 4096,
    MODEL_MAX_TOP_K = 64,
    MODEL_MAX_HIDDEN = 65536,
    MODEL_MAX_HEADS = 1024,
    MODEL_MAX_HEAD_DIM = 512,
    MODEL_MAX_INTERMEDIATE = 1 << 20,
    MODEL_MAX_VOCAB = 1 << 24,
    MODEL_MAX_POSITIONS = 1 << 24, // exact in f32, the type of rotary angles
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
    float clip_qkv; // 0: off; acts after the QK norm
    float rms_epsilon;
    float inverse_frequencies[MODEL_MAX_HEAD_DIM / 2]; // rotary; scaling (llama3, linear) applied
    size_t max_positions;
    size_t sliding_window; // tokens a query sees, its own included; 0: all
    bool tie_embeddings;
    dtype checkpoint; // dtype or torch_dtype of config.json, f32 when absent
    int32_t bos;      // -1: none
    int n_eos;
    int32_t eos[MODEL_MAX_EOS]; // generation_config.json, else config.json
    // Defaults of generation_config.json, NAN or -1 when absent.
    float temperature, top_p, repetition_penalty;
    int top_k_sampling;
} model_config;

// Reads config.json and, when there is one, generation_config.json of a directory.
int model_config_load(const char *dir, model_config *out, error *err);
// The same from parsed documents; generation may be NULL.
int model_config_parse(const json *config, const json *generation, model_config *out, error *err);

const char *model_arch_name(model_arch arch);
// FNV-1a over every field that shapes the wire or the arithmetic; part of the plan hash.
uint64_t model_config_hash(const model_config *config);

// ---- Names of tensors: the one place that knows a checkpoint's naming. ----
typedef enum model_tensor {
    MODEL_EMBED,      // (vocab, hidden)
    MODEL_HEAD,       // (vocab, hidden); none when tie_embeddings: the head is MODEL_EMBED
    MODEL_FINAL_NORM, // (hidden)
    MODEL_ATTN_NORM,  // (hidden); from here on per layer
    MODEL_Q,
    MODEL_K,
    MODEL_V, // (heads * head_dim, hidden)
    MODEL_Q_BIAS,
    MODEL_K_BIAS,
    MODEL_V_BIAS,
    MODEL_Q_NORM,
    MODEL_K_NORM,   // (head_dim), or (heads * head_dim) for MODEL_QK_NORM_FULL
    MODEL_O,        // (hidden, heads * head_dim)
    MODEL_FFN_NORM, // (hidden)
    MODEL_ROUTER,   // (experts, hidden)
    MODEL_EXPERT_GATE,
    MODEL_EXPERT_UP,   // (intermediate, hidden), per expert
    MODEL_EXPERT_DOWN, // (hidden, intermediate), per expert
    MODEL_SHARED_GATE,
    MODEL_SHARED_UP,
    MODEL_SHARED_DOWN,
    MODEL_SHARED_ROUTER, // (1, hidden): gate of the shared expert
    MODEL_TENSOR_COUNT
} model_tensor;

// Name and dims of a tensor of this model (layer and expert ignored where they do not apply).
typedef struct model_tensor_spec {
    char name[128];
    int n_dims; // 0 and an empty name: this model has no such tensor
    size_t dims[2];
} model_tensor_spec;
void model_tensor_describe(const model_config *config, model_tensor which, size_t layer,
                           size_t expert, model_tensor_spec *out);
// How many layers and experts have a tensor of this kind: (1, 1), (n_layers, 1) or
// (n_layers, n_experts); (0, 0) when the model has none.
void model_tensor_counts(const model_config *config, model_tensor which, size_t *n_layers,
                         size_t *n_experts);

#endif
