// weights.h: the safetensors files of a model directory, mapped read-only.
//
// Opening reads and checks the headers (and model.safetensors.index.json) of all shards: sizes,
// overlaps, bounds, types. Tensor bytes are touched only by whoever reads them.
// A file that somebody shortens while it is mapped ends the process that reads beyond its new end
// (SIGBUS): replace model files by rename, never in place.
// Thread: one thread per object.
#ifndef TANDEM_ENGINE_WEIGHTS_H
#define TANDEM_ENGINE_WEIGHTS_H

#include "engine/model.h"

enum { WEIGHTS_MAX_SHARDS = 4096 };

typedef struct weights weights;

// model.safetensors, or the files named by model.safetensors.index.json.
int weights_open(const char *dir, weights **out, error *err);
void weights_close(weights *w); // views end here

// View of a tensor, checked against name, dims and float type. E_NOT_FOUND, E_INVALID with the
// tensor's name and file.
int weights_get(weights *w, const model_tensor_spec *spec, tensor_view *out, error *err);

// Gives the pages behind a view back to the kernel once it has been packed elsewhere, so that the
// resident size of a loading worker stays near its share. The view stays valid: its pages are read
// again from the file when they are touched.
void weights_release(weights *w, const tensor_view *view);

// Checks that every tensor of the model is present with the right dims and type, without touching
// tensor bytes. Used before serving starts and by `tandem check`. Tensors that the model does not
// use are ignored.
int weights_check_model(weights *w, const model_config *config, error *err);

// Bytes of all tensors in the files.
size_t weights_total_bytes(const weights *w);

#endif
