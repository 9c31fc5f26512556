// Any text as config.json, and as generation_config.json beside a valid one.
#include "engine/model.h"

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

static const char valid[] =
    "{\"architectures\":[\"OlmoeForCausalLM\"],\"num_experts\":8,\"intermediate_size\":32,"
    "\"hidden_size\":64,\"num_hidden_layers\":2,\"vocab_size\":300,\"num_attention_heads\":4,"
    "\"max_position_embeddings\":128,\"num_experts_per_tok\":2}";

static void parse(const json *config, const json *generation) {
    model_config out;
    error err = {0};
    if (model_config_parse(config, generation, &out, &err) != E_OK) {
        if (!err.code || !err.text[0])
            abort();
        return;
    }
    if (!out.n_kv_heads || out.n_heads % out.n_kv_heads || out.head_dim % 2 ||
        out.head_dim > MODEL_MAX_HEAD_DIM || out.top_k > out.n_experts || out.n_eos > MODEL_MAX_EOS)
        abort();
    for (int which = 0; which < MODEL_TENSOR_COUNT; which++) {
        model_tensor_spec spec;
        model_tensor_describe(&out, (model_tensor)which, 0, 0, &spec);
        if ((spec.n_dims == 0) != (spec.name[0] == 0))
            abort();
    }
    model_config_hash(&out);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n) {
    json *doc = NULL, *good = NULL;
    if (json_parse("fuzz", (const char *)data, n, &doc, NULL) != E_OK)
        return 0;
    if (json_parse("valid", valid, strlen(valid), &good, NULL) == E_OK)
        parse(good, doc);
    parse(doc, NULL);
    json_close(good);
    json_close(doc);
    return 0;
}
