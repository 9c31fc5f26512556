// lane.h: a microbatch in flight: one step of its requests through all layers.
//
//   IDLE -> LAYER -> GATE -> AWAY -> (LAYER of the next layer ... | HEAD <-> SAMPLE) -> IDLE
// LAYER queues the attention half-layer up to the DISPATCH payloads; GATE waits for its mark and
// sends the frames; AWAY waits for the RETURN of every FFN rank (a shared expert is computed
// meanwhile) and adds them; HEAD and SAMPLE take the rows that need logits in blocks. lane_advance
// makes one such move, so that a worker serves its lanes in turn; nothing in it blocks or
// allocates.
// Thread: the worker's loop.
#ifndef TANDEM_ATTN_NODE_LANE_H
#define TANDEM_ATTN_NODE_LANE_H

#include "attn_node/attn_model.h"
#include "attn_node/sampler.h"
#include "attn_node/sched.h"
#include "engine/frame.h"

typedef struct lane lane;

// What a lane uses of its worker. All pointers outlive the lane.
typedef struct lane_env {
    const plan *plan;
    const attn_model *model;
    kernel_backend *backend;
    kernel_kv *kv;
    sched *sched;
    sampler *sampler;
    uint16_t rank; // of this attention worker
    uint32_t epoch;
    void *user;
    // Wakes the loop when a mark completes; any thread.
    void (*wake)(void *user);
    // Sends a DISPATCH to an FFN rank; payload stays unchanged until lane_sent gets the token.
    int (*send)(void *user, size_t ffn_rank, const frame_header *header, const void *payload,
                size_t bytes, void *token);
    void (*emit)(void *user, const token_event *event);
    void (*step_done)(void *user);
} lane_env;

int lane_open(const lane_env *env, int index, const sched_args *sizes, lane **out, error *err);
void lane_close(lane *l);

// One move. 1: moved, 0: waiting or idle, negative: a code; the worker cannot go on.
int lane_advance(lane *l);

// A RETURN arrives (header checked against the plan): a buffer for its payload, or NULL when the
// lane does not wait for it.
void *lane_place(lane *l, const frame_header *header, size_t bytes);
void lane_arrived(lane *l, const frame_header *header);
void lane_sent(void *token);

#endif
