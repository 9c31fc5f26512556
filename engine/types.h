// types.h: element types and views of tensors, shared by every folder (valid C11 and C++17).
#ifndef TANDEM_ENGINE_TYPES_H
#define TANDEM_ENGINE_TYPES_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

// X(enum name, name in a config or a safetensors header, bytes per element)
#define DTYPE_MAP(X)                                                                               \
    X(F32, "f32", 4)                                                                               \
    X(BF16, "bf16", 2)                                                                             \
    X(F16, "f16", 2)

typedef enum dtype {
#define X(name, text, bytes) DTYPE_##name,
    DTYPE_MAP(X)
#undef X
        DTYPE_COUNT
} dtype;

static inline size_t dtype_bytes(dtype type) {
    switch (type) {
#define X(name, text, bytes)                                                                       \
    case DTYPE_##name:                                                                             \
        return bytes;
        DTYPE_MAP(X)
#undef X
    case DTYPE_COUNT:
        break;
    }
    return 0;
}

static inline const char *dtype_name(dtype type) {
    switch (type) {
#define X(name, text, bytes)                                                                       \
    case DTYPE_##name:                                                                             \
        return text;
        DTYPE_MAP(X)
#undef X
    case DTYPE_COUNT:
        break;
    }
    return "unknown";
}

enum { TENSOR_MAX_DIMS = 4 };

// A row-major tensor in host memory owned by somebody else; rows of dims[n_dims-1] elements.
typedef struct tensor_view {
    const void *data; // unaligned is allowed: safetensors promise no alignment
    dtype type;
    int n_dims;
    size_t dims[TENSOR_MAX_DIMS];
} tensor_view;

static inline float bf16_to_f32(uint16_t value) {
    uint32_t bits = (uint32_t)value << 16;
    float out;
    memcpy(&out, &bits, sizeof out);
    return out;
}

// Round to nearest even; NaN stays NaN.
static inline uint16_t f32_to_bf16(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    if ((bits & 0x7fffffffu) > 0x7f800000u)
        return (uint16_t)((bits >> 16) | 0x40u);
    return (uint16_t)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

static inline float f16_to_f32(uint16_t value) {
    uint32_t sign = (uint32_t)(value & 0x8000u) << 16;
    uint32_t exponent = (value >> 10) & 0x1fu;
    uint32_t mantissa = value & 0x3ffu;
    uint32_t bits;
    float out;
    if (exponent == 0x1fu) {
        bits = sign | 0x7f800000u | (mantissa << 13);
    } else if (exponent) {
        bits = sign | ((exponent + 112u) << 23) | (mantissa << 13);
    } else {
        // A subnormal is mantissa * 2^-24, exact in f32.
        out = (float)mantissa * 5.9604644775390625e-8f;
        memcpy(&bits, &out, sizeof bits);
        bits |= sign;
    }
    memcpy(&out, &bits, sizeof out);
    return out;
}

#endif
