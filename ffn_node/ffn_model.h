// ffn_model.h: the experts of an FFN worker on its backend.
#ifndef TANDEM_FFN_NODE_FFN_MODEL_H
#define TANDEM_FFN_NODE_FFN_MODEL_H

#include "engine/plan.h"
#include "kernels/kernels.h"

typedef struct ffn_model {
    size_t n_layers, n_local;
    int16_t *local_group;    // (n_experts) group of an expert, -1: another worker's
    kernel_matrix **gate_up; // (n_layers, n_local) of (2 intermediate, hidden) swiglu
    kernel_matrix **down;    // (n_layers, n_local) of (hidden, intermediate)
    size_t weight_bytes;
} ffn_model;

int ffn_model_load(kernel_backend *backend, const plan *p, size_t rank, const char *dir,
                   void (*progress)(void *user, size_t bytes), void *user, ffn_model *out,
                   error *err);
void ffn_model_free(ffn_model *m);

#endif
