// reference.h: a model's forward pass written out plainly, one token at a time, sums in double.
//
// It takes everything from model_config and weights and nothing from kernels or workers, so it
// says whether those two carry all that the architecture needs, and what the rest must compute.
// Ownership: borrows config and weights. Thread: one per object.
#ifndef TANDEM_TESTS_REFERENCE_H
#define TANDEM_TESTS_REFERENCE_H

#include "engine/weights.h"

typedef struct reference reference;

int reference_open(const model_config *config, weights *w, size_t max_tokens, reference **out,
                   error *err);
void reference_close(reference *r);
void reference_reset(reference *r); // forgets the tokens

// Appends a token, at most max_tokens of them; logits (vocab) are those of the next one.
int reference_step(reference *r, int32_t id, float *logits, error *err);

#endif
