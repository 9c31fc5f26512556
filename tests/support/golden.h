// golden.h: reads golden.bin of tests/fixtures/golden/NAME (layout: its README.md).
//
// A golden owns everything it points to. Thread: any; immutable after golden_open.
#ifndef TANDEM_TESTS_GOLDEN_H
#define TANDEM_TESTS_GOLDEN_H

#include "engine/status.h"

#include <stddef.h>
#include <stdint.h>

typedef struct golden_prompt {
    size_t n_tokens;
    const int32_t *ids;    // (n_tokens)
    const float *logits;   // (n_tokens, vocab)
    const int32_t *greedy; // (n_greedy of the golden)
} golden_prompt;

typedef struct golden {
    size_t n_prompts, vocab, n_greedy;
    golden_prompt *prompts; // (n_prompts)
    void *words;            // the file behind its magic
} golden;

// Names of all fixtures; each is a model directory under tests/fixtures/golden.
extern const char *const golden_names[];
extern const size_t n_golden_names;

// dir is the fixture's directory, for example TESTS_DIR "/fixtures/golden/olmoe_f32".
int golden_open(const char *dir, golden *out, error *err);
void golden_close(golden *g); // safe on a zeroed golden

// |logits - reference| / |reference| over n values: the measure of the tolerances.
double golden_relative_error(const float *logits, const float *reference, size_t n);

#endif
