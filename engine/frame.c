#include "engine/frame.h"

// Every section begins at a multiple of this, so that a kernel may read it in place.
enum { FRAME_ALIGN = 64 };

// a * b, or FRAME_MAX_BYTES + 1 where that is larger: a product over the limit stays over it.
static size_t bounded_product(size_t a, size_t b) {
    if (a && b > FRAME_MAX_BYTES / a)
        return FRAME_MAX_BYTES + 1;
    return a * b;
}

static size_t align_up(size_t bytes) {
    return (bytes + FRAME_ALIGN - 1) / FRAME_ALIGN * FRAME_ALIGN;
}

int frame_layout_make(int kind, size_t rows, size_t top_k, size_t hidden, dtype wire,
                      frame_layout *out) {
    if (kind != FRAME_DISPATCH && kind != FRAME_RETURN)
        return E_INVALID;
    size_t element_bytes = dtype_bytes(wire);
    if (!element_bytes)
        return E_INVALID;
    size_t row_bytes = bounded_product(bounded_product(rows, hidden), element_bytes);
    size_t choices = kind == FRAME_DISPATCH ? bounded_product(rows, top_k) : 0;
    size_t experts_bytes = bounded_product(choices, sizeof(uint16_t));
    size_t weights_bytes = bounded_product(choices, sizeof(float));
    if (row_bytes > FRAME_MAX_BYTES || experts_bytes > FRAME_MAX_BYTES ||
        weights_bytes > FRAME_MAX_BYTES)
        return E_TOO_LARGE;

    // Each term is at most FRAME_MAX_BYTES = 2^30, so these sums do not overflow.
    frame_layout layout = {0};
    layout.experts_at = 0;
    layout.weights_at = align_up(experts_bytes);
    layout.rows_at = align_up(layout.weights_at + weights_bytes);
    layout.bytes = layout.rows_at + row_bytes;
    if (layout.bytes > FRAME_MAX_BYTES)
        return E_TOO_LARGE;
    *out = layout;
    return E_OK;
}

static int mismatch(error *err, const char *field, unsigned long long got,
                    unsigned long long expected) {
    return error_set(err, E_PROTOCOL, "frame: %s is %llu, expected %llu", field, got, expected);
}

static int over(error *err, const char *field, unsigned long long got, unsigned long long limit) {
    return error_set(err, E_PROTOCOL, "frame: %s is %llu, the limit is %llu", field, got, limit);
}

int frame_check(const frame_header *header, int kind, size_t payload_bytes,
                const frame_expect *expect, error *err) {
    const frame_header *h = header;
    if (h->magic != FRAME_MAGIC)
        return error_set(err, E_PROTOCOL, "frame: magic is %#x, not a Tandem frame",
                         (unsigned)h->magic);
    if (h->version != FRAME_VERSION)
        return mismatch(err, "version", h->version, FRAME_VERSION);
    if (h->kind != kind)
        return mismatch(err, "kind", h->kind, (unsigned long long)kind);
    if (h->plan_hash != expect->plan_hash)
        return error_set(err, E_PROTOCOL, "frame: plan hash is %016llx, ours is %016llx",
                         (unsigned long long)h->plan_hash, (unsigned long long)expect->plan_hash);
    if (h->lane >= expect->n_lanes)
        return error_set(err, E_PROTOCOL, "frame: lane %u of %zu", (unsigned)h->lane,
                         expect->n_lanes);
    if (h->layer >= expect->n_layers)
        return error_set(err, E_PROTOCOL, "frame: layer %u of %zu", (unsigned)h->layer,
                         expect->n_layers);
    if (!h->step)
        return error_set(err, E_PROTOCOL, "frame: step is 0, steps count from 1");
    if (h->top_k != expect->top_k)
        return mismatch(err, "top_k", h->top_k, expect->top_k);
    if (h->hidden != expect->hidden)
        return mismatch(err, "hidden", h->hidden, expect->hidden);
    if (h->rows > expect->max_rows)
        return over(err, "rows", h->rows, expect->max_rows);
    if (h->dtype != (uint8_t)expect->wire)
        return mismatch(err, "dtype", h->dtype, (unsigned long long)expect->wire);
    if (h->flags & ~(kind == FRAME_DISPATCH ? FRAME_FLAG_MORE : 0))
        return mismatch(err, "flags", h->flags, 0);
    if (h->reserved16 || h->reserved64)
        return error_set(err, E_PROTOCOL, "frame: a reserved field is not 0");

    frame_layout layout;
    int rc = frame_layout_make(kind, h->rows, h->top_k, h->hidden, expect->wire, &layout);
    if (rc)
        return error_set(err, E_PROTOCOL, "frame: %u rows of %u do not fit a frame",
                         (unsigned)h->rows, (unsigned)h->hidden);
    if (payload_bytes != layout.bytes)
        return mismatch(err, "payload size", payload_bytes, layout.bytes);
    return E_OK;
}
