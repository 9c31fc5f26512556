// plan.h: what every process of a bundle derives alike from its configuration: the model, the
// types, the sizes of a step and which FFN worker owns which expert. Its hash is in every frame and
// is compared at join, so that workers of different bundles never mix.
// Thread: immutable after plan_make.
#ifndef TANDEM_ENGINE_PLAN_H
#define TANDEM_ENGINE_PLAN_H

#include "engine/config.h"
#include "engine/frame.h"
#include "engine/model.h"

typedef struct plan {
    model_config model;
    dtype compute, wire;
    size_t n_attention, n_ffn, n_lanes;
    size_t max_rows;                        // of one step of one lane
    size_t max_sequences;                   // running, of one attention worker
    size_t max_tokens;                      // of one sequence
    uint32_t placement;                     // version of the placement below
    uint8_t expert_rank[MODEL_MAX_EXPERTS]; // FFN rank that owns the expert
    uint64_t hash;
} plan;

// Reads the model's config.json. In colocated mode every worker owns all experts as FFN rank 0.
int plan_make(const config *c, plan *out, error *err);

// Experts of an FFN rank, ascending: fills list (n_experts) and returns their number.
size_t plan_experts_of(const plan *p, size_t rank, int16_t *list);

// Bytes of the checkpoint that a worker reads: all but the routed experts, or a rank's experts.
size_t plan_attention_bytes(const plan *p);
size_t plan_ffn_bytes(const plan *p, size_t rank);

frame_expect plan_frame_expect(const plan *p);

#endif
