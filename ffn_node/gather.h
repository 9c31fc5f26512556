// gather.h: which waiting DISPATCH frames an FFN worker computes together.
//
// Pass gather: FFN rank 0 fixes the members of a pass at layer 0: the workers that wait there,
// after a bounded wait for those that were in the lane's last pass and said they would go on. One
// pass is under way per lane; who comes later takes the next one. In later layers every rank
// computes a pass when all of its members are there; a member later than the deadline leaves the
// pass and is computed alone. Other ranks take layer 0 as it comes, so no rank ever waits for
// another's choice. Without gather every frame is a pass of its own. Pure logic: the caller gives
// the time and moves the data. Thread: one.
#ifndef TANDEM_FFN_NODE_GATHER_H
#define TANDEM_FFN_NODE_GATHER_H

#include "engine/config.h"
#include "engine/frame.h"

#include <stdbool.h>

typedef struct gather gather;

typedef struct gather_args {
    size_t n_attention, n_lanes, n_layers;
    size_t rank; // of this FFN worker
    bool alone;  // no gather
    uint64_t wait_us, deadline_us;
} gather_args;

typedef struct gather_group {
    uint16_t lane, layer, members;
    uint32_t pass;
    size_t n;
    uint16_t attention[CONFIG_MAX_WORKERS]; // ascending
} gather_group;

int gather_open(const gather_args *args, gather **out, error *err);
void gather_close(gather *g);

// A frame of (attention, lane) waits from now on; at most one of each at a time.
void gather_arrived(gather *g, const frame_header *header, uint64_t now_us);

// Takes the next group that is due out of the waiting frames; false: none.
bool gather_next(gather *g, uint64_t now_us, gather_group *out);

// When gather_next may give a group without a further frame; UINT64_MAX: never.
uint64_t gather_due(const gather *g);

typedef struct gather_stats {
    uint64_t passes, groups, late_members;
    uint64_t wait_us; // sum over groups of the time from the first frame to the group
} gather_stats;
gather_stats gather_stats_get(const gather *g);

#endif
