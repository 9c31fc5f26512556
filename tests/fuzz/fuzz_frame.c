// frame_check must accept a header only when its payload lies wholly inside the bytes received.
#include "engine/frame.h"

#include <stdlib.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    frame_header h;
    if (size < sizeof h + 1)
        return 0;
    memcpy(&h, data + 1, sizeof h);
    size_t payload = size - 1 - sizeof h;
    // Bits of the first byte repair fields, so that inputs get past the first comparisons.
    int kind = data[0] & 1 ? FRAME_DISPATCH : FRAME_RETURN;
    frame_expect expect = {.plan_hash = 7,
                           .hidden = 16,
                           .top_k = 2,
                           .max_rows = UINT32_MAX,
                           .n_layers = 4,
                           .n_lanes = 2,
                           .wire = DTYPE_BF16};
    if (data[0] & 2) {
        h.magic = FRAME_MAGIC;
        h.version = FRAME_VERSION;
        h.kind = (uint16_t)kind;
        h.plan_hash = 7;
    }
    if (data[0] & 4) {
        h.flags = 0;
        h.reserved16 = 0;
        h.reserved64 = 0;
        h.dtype = DTYPE_BF16;
        h.hidden = 16;
        h.top_k = 2;
    }
    if (data[0] & 8) {
        h.lane %= 2;
        h.layer %= 4;
        h.step |= 1;
        h.rows %= 128;
    }
    if (data[0] & 16)
        payload = h.rows * 32u + (kind == FRAME_DISPATCH
                                      ? (h.rows * 4u + 63) / 64 * 64 + (h.rows * 8u + 63) / 64 * 64
                                      : 0);
    error err;
    if (frame_check(&h, kind, payload, &expect, &err))
        return err.code == E_PROTOCOL ? 0 : (abort(), 0);
    frame_layout l;
    if (frame_layout_make(kind, h.rows, h.top_k, h.hidden, (dtype)h.dtype, &l) ||
        l.bytes != payload || l.rows_at + (size_t)h.rows * 32 > payload)
        abort();
    return 0;
}
