// safetensors.h: the header of one safetensors file, parsed and checked.
//
// A file is a u64 (little endian) header length, a JSON header {name: {dtype, shape,
// data_offsets}}, then the tensors' bytes. As the format demands, the ranges must cover the bytes
// after the header exactly: no overlap, no gap, nothing behind the last one.
// Ownership: safetensors_parse gives a table that owns its names. Thread: any; a table is
// immutable.
#ifndef TANDEM_ENGINE_SAFETENSORS_H
#define TANDEM_ENGINE_SAFETENSORS_H

#include "engine/status.h"
#include "engine/types.h"

#include <stdint.h>

#define SAFETENSORS_MAX_HEADER ((size_t)100 << 20) // bytes of JSON

typedef struct safetensors_entry {
    const char *name;      // owned by the table
    const char *type_name; // as in the file, static
    dtype type;            // DTYPE_COUNT: a type of the format that weights cannot have
    int n_dims;
    size_t dims[TENSOR_MAX_DIMS]; // the first of n_dims when there are more
    size_t begin, end;            // bytes from the start of the file
} safetensors_entry;

typedef struct safetensors {
    size_t n_entries;
    safetensors_entry *entries; // (n_entries) in ascending order of begin
    char *names;
} safetensors;

// bytes is the whole file; path stands in error lines.
int safetensors_parse(const char *path, const void *bytes, size_t n_bytes, safetensors *out,
                      error *err);
void safetensors_free(safetensors *table); // safe on a zeroed table

#endif
