// synth.h: `tandem synth`, which writes a random-weight model of any shape with a dummy tokenizer,
// so that benchmarks and tests need no download.
//
// The directory is one of a Hugging Face model: config.json, generation_config.json,
// tokenizer.json, tokenizer_config.json and one safetensors file or several with their index.
// Weights are normal with variance 1 / (input features), norms are 1; they depend on the shape,
// the type and the seed alone. Memory stays at a few MiB whatever the model's size.
// Thread: the caller's.
#ifndef TANDEM_ROUTER_SYNTH_H
#define TANDEM_ROUTER_SYNTH_H

#include "engine/model.h"

#include <stdio.h>

// Ids of the dummy tokenizer: the 256 bytes, then one word each, then three special tokens.
enum { SYNTH_N_BYTES = 256, SYNTH_N_SPECIAL = 3, SYNTH_MIN_VOCAB = 259 };

typedef struct synth_args {
    model_arch arch;
    size_t hidden, layers, heads, kv_heads, head_dim; // kv_heads 0: heads; head_dim 0: by division
    size_t experts, top_k, intermediate;
    size_t shared_intermediate; // qwen2_moe only; 0: as intermediate
    size_t vocab, context;
    dtype type;
    size_t seed;
    size_t shard_bytes; // of tensors in a file at most; 0: one file
    const char *dir;    // must not exist, or be empty
} synth_args;

// Runs the command on the arguments after its name; --help prints the options. Exit status: 0, 1
// when writing failed, 2 when an argument is wrong (said in one line on standard error).
int synth_main(int argc, char **argv);

// Writes the directory. progress is called now and then with bytes of weights; it may be NULL.
typedef void (*synth_progress)(void *user, size_t done_bytes, size_t total_bytes);
int synth_write(const synth_args *args, synth_progress progress, void *user, error *err);

// The parts of synth_write.
int synth_write_tokenizer(const synth_args *args, error *err);
int synth_write_weights(const synth_args *args, const model_config *config, synth_progress progress,
                        void *user, error *err);

// Opens DIR/name for writing, and closes it with a check that all of it was written.
int synth_create(const synth_args *args, const char *name, FILE **out, error *err);
int synth_finish(const synth_args *args, const char *name, FILE *file, error *err);

#endif
