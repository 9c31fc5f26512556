// attn_model.h: the attention worker's weights on its backend: everything but the routed experts.
//
// A shared expert belongs here: it is computed while the routed experts are away.
// Ownership: attn_model owns its matrices and vectors, not the backend.
#ifndef TANDEM_ATTN_NODE_ATTN_MODEL_H
#define TANDEM_ATTN_NODE_ATTN_MODEL_H

#include "engine/plan.h"
#include "kernels/kernels.h"

typedef struct attn_layer {
    kernel_mem *attn_norm, *ffn_norm; // (hidden) f32
    kernel_matrix *qkv;               // ((heads + 2 kv_heads) head_dim, hidden)
    kernel_mem *qkv_bias;             // or NULL
    kernel_mem *q_norm, *k_norm;      // or NULL
    kernel_matrix *o;                 // (hidden, heads * head_dim)
    kernel_matrix *router;            // (experts, hidden)
    kernel_matrix *shared_gate_up;    // (2 shared_intermediate, hidden) swiglu, or NULL
    kernel_matrix *shared_down;       // (hidden, shared_intermediate)
    kernel_matrix *shared_router;     // (1, hidden)
} attn_layer;

typedef struct attn_model {
    kernel_matrix *embed; // (vocab, hidden)
    kernel_matrix *head;  // (vocab, hidden); embed when tied
    kernel_mem *final_norm;
    size_t n_layers;
    attn_layer *layers;
    size_t weight_bytes;
} attn_model;

// progress is told the bytes of every tensor read.
int attn_model_load(kernel_backend *backend, const plan *p, const char *dir,
                    void (*progress)(void *user, size_t bytes), void *user, attn_model *out,
                    error *err);
void attn_model_free(attn_model *m);

#endif
