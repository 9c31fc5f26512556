// frame.h: the two frames of the data path, DISPATCH (attention to FFN) and RETURN (FFN to
// attention), one of each per (layer, lane, attention-FFN pair) and step.
//
// A frame is a fixed little-endian header and a payload:
//   DISPATCH: experts (rows, top_k) u16 | weights (rows, top_k) f32 | rows (rows, hidden)
//   RETURN:   rows (rows, hidden), in the order of the DISPATCH
// Rows are of the wire's dtype; each section begins at a multiple of 64 bytes. frame_layout is the
// only place that knows it.
//
// A pass is one walk of a lane through all layers with a fixed set of attention workers: FFN rank 0
// fixes it at layer 0 and names it in its RETURN; the attention worker repeats pass and members in
// its later DISPATCH frames, so that every FFN rank gathers the same members.
// Thread: pure functions.
#ifndef TANDEM_ENGINE_FRAME_H
#define TANDEM_ENGINE_FRAME_H

#include "engine/status.h"
#include "engine/types.h"

#define FRAME_MAGIC 0x4d444e54u // "TNDM"
enum { FRAME_VERSION = 1, FRAME_DISPATCH = 1, FRAME_RETURN = 2, FRAME_NO_EXPERT = 0xffff };
enum { FRAME_FLAG_MORE = 1 }; // DISPATCH: the lane expects to run a further step after this one

typedef struct frame_header {
    uint32_t magic;
    uint16_t version;
    uint16_t kind;      // FRAME_DISPATCH or FRAME_RETURN
    uint64_t plan_hash; // model, dtypes, shapes, placement: equal at both ends
    uint32_t epoch;     // of the bundle; frames of an old epoch are dropped and counted
    uint32_t step;      // of the lane, from 1; a RETURN repeats that of its DISPATCH
    uint32_t pass;      // 0 in layer 0 of a DISPATCH
    uint16_t members;   // attention workers in the pass
    uint16_t attention; // rank of the attention worker
    uint16_t ffn;       // rank of the FFN worker
    uint16_t lane;
    uint16_t layer;
    uint16_t top_k;
    uint32_t rows;
    uint32_t hidden;
    uint32_t placement; // version of the placement of experts
    uint8_t dtype;      // enum dtype of the rows
    uint8_t flags;
    uint16_t reserved16; // 0
    uint64_t reserved64; // 0
} frame_header;
_Static_assert(sizeof(frame_header) == 64, "the header is 64 bytes on the wire");

typedef struct frame_layout {
    size_t experts_at, weights_at, rows_at; // bytes from the payload's start
    size_t bytes;                           // of the whole payload
} frame_layout;

// Layout of a payload. Sizes are bounded by FRAME_MAX_BYTES, else E_TOO_LARGE.
#define FRAME_MAX_BYTES ((size_t)1 << 30)
int frame_layout_make(int kind, size_t rows, size_t top_k, size_t hidden, dtype wire,
                      frame_layout *out);

// What the receiver expects of every frame; rows 0..max_rows.
typedef struct frame_expect {
    uint64_t plan_hash;
    size_t hidden, top_k, max_rows, n_layers, n_lanes;
    dtype wire;
} frame_expect;

// Checks a received header and the payload's size against what is expected. E_PROTOCOL with one
// line otherwise. The epoch is the caller's to check.
int frame_check(const frame_header *header, int kind, size_t payload_bytes,
                const frame_expect *expect, error *err);

#endif
