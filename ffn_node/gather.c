#include "ffn_node/gather.h"

#include <stdlib.h>

typedef struct waiting_frame {
    bool waits;
    bool more; // FRAME_FLAG_MORE
    uint16_t layer, members;
    uint32_t pass;
    uint64_t since_us;
} waiting_frame;

typedef struct gather_lane {
    waiting_frame *frames; // (n_attention)
    bool *expected;        // (n_attention) said in its last pass that it would go on
    // The newest pass seen, for layers after the first.
    uint32_t pass;
    uint16_t last_layer; // computed for it
    uint16_t missing;    // members that left it
    bool active;         // rank 0: the pass is under way
    uint64_t progress_us;
} gather_lane;

struct gather {
    gather_args args;
    uint32_t n_passes;
    gather_lane *lanes; // (n_lanes)
    size_t turn;        // the lane that is looked at first, so that none waits for another's luck
    gather_stats stats;
};

// What waits at one place of a lane.
typedef struct waiting_set {
    size_t n;
    uint64_t since_us; // of the first; UINT64_MAX when n is 0
} waiting_set;

int gather_open(const gather_args *args, gather **out, error *err) {
    gather *g = calloc(1, sizeof *g);
    if (g) {
        g->args = *args;
        g->lanes = calloc(args->n_lanes, sizeof *g->lanes);
    }
    bool complete = g && g->lanes;
    for (size_t i = 0; complete && i < args->n_lanes; i++) {
        g->lanes[i].frames = calloc(args->n_attention, sizeof *g->lanes[i].frames);
        g->lanes[i].expected = calloc(args->n_attention, sizeof *g->lanes[i].expected);
        complete = g->lanes[i].frames && g->lanes[i].expected;
    }
    if (!complete) {
        gather_close(g);
        return error_set(err, E_NO_MEMORY, "gather: out of memory");
    }
    *out = g;
    return E_OK;
}

void gather_close(gather *g) {
    if (!g)
        return;
    for (size_t i = 0; g->lanes && i < g->args.n_lanes; i++) {
        free(g->lanes[i].frames);
        free(g->lanes[i].expected);
    }
    free(g->lanes);
    free(g);
}

void gather_arrived(gather *g, const frame_header *header, uint64_t now_us) {
    waiting_frame *frame = &g->lanes[header->lane].frames[header->attention];
    *frame = (waiting_frame){.waits = true,
                             .more = header->flags & FRAME_FLAG_MORE,
                             .layer = header->layer,
                             .members = header->members,
                             .pass = header->pass,
                             .since_us = now_us};
}

static waiting_set waiting_at(const gather *g, const gather_lane *lane, uint16_t layer,
                              uint32_t pass) {
    waiting_set set = {.since_us = UINT64_MAX};
    for (size_t a = 0; a < g->args.n_attention; a++) {
        const waiting_frame *frame = &lane->frames[a];
        if (!frame->waits || frame->layer != layer || frame->pass != pass)
            continue;
        set.n++;
        set.since_us = frame->since_us < set.since_us ? frame->since_us : set.since_us;
    }
    return set;
}

static void begin_group(gather *g, const gather_lane *lane, uint16_t layer, uint64_t since_us,
                        uint64_t now_us, gather_group *out) {
    *out = (gather_group){.lane = (uint16_t)(lane - g->lanes), .layer = layer};
    g->stats.groups++;
    g->stats.wait_us += now_us - since_us;
}

// Moves every waiting frame of (layer, pass) into the group.
static void take_all(gather *g, gather_lane *lane, uint16_t layer, uint32_t pass, uint64_t now_us,
                     gather_group *out) {
    begin_group(g, lane, layer, waiting_at(g, lane, layer, pass).since_us, now_us, out);
    for (size_t a = 0; a < g->args.n_attention; a++) {
        waiting_frame *frame = &lane->frames[a];
        if (!frame->waits || frame->layer != layer || frame->pass != pass)
            continue;
        frame->waits = false;
        out->attention[out->n++] = (uint16_t)a;
    }
}

static void take_one(gather *g, gather_lane *lane, size_t attention, uint64_t now_us,
                     gather_group *out) {
    waiting_frame *frame = &lane->frames[attention];
    begin_group(g, lane, frame->layer, frame->since_us, now_us, out);
    out->n = 1;
    out->attention[0] = (uint16_t)attention;
    out->members = frame->members;
    out->pass = frame->pass;
    if (frame->layer == 0) {
        out->members = 1;
        out->pass = ++g->n_passes;
        g->stats.passes++;
    }
    frame->waits = false;
}

// ---- layer 0 ----

static bool all_expected_wait(const gather *g, const gather_lane *lane) {
    for (size_t a = 0; a < g->args.n_attention; a++)
        if (lane->expected[a] && !(lane->frames[a].waits && lane->frames[a].layer == 0))
            return false;
    return true;
}

// When the wait for the expected ones is over. It runs from the end of the last pass at the
// earliest: were it over for a late comer of that pass before its members could send again, the two
// would take turns for ever.
static uint64_t wait_ends(const gather *g, const gather_lane *lane, uint64_t since_us) {
    uint64_t from = since_us > lane->progress_us ? since_us : lane->progress_us;
    return from + g->args.wait_us;
}

// Rank 0 begins a pass. A pass under way whose members have all gone silent is given up.
static bool begin_pass(gather *g, gather_lane *lane, uint64_t now_us, gather_group *out) {
    waiting_set set = waiting_at(g, lane, 0, 0);
    if (!set.n || (lane->active && now_us < lane->progress_us + g->args.deadline_us))
        return false;
    if (!all_expected_wait(g, lane) && now_us < wait_ends(g, lane, set.since_us))
        return false;
    for (size_t a = 0; a < g->args.n_attention; a++) {
        const waiting_frame *frame = &lane->frames[a];
        lane->expected[a] = frame->waits && frame->layer == 0 && frame->more;
    }
    take_all(g, lane, 0, 0, now_us, out);
    out->pass = lane->pass = ++g->n_passes;
    out->members = (uint16_t)set.n;
    lane->last_layer = 0;
    lane->missing = 0;
    lane->active = g->args.n_layers > 1;
    lane->progress_us = now_us;
    g->stats.passes++;
    return true;
}

static bool next_layer_0(gather *g, gather_lane *lane, uint64_t now_us, gather_group *out) {
    if (g->args.rank == 0)
        return begin_pass(g, lane, now_us, out);
    if (!waiting_at(g, lane, 0, 0).n)
        return false;
    take_all(g, lane, 0, 0, now_us, out); // the pass is rank 0's to name
    return true;
}

// ---- later layers ----

static bool is_newer(uint32_t pass, uint32_t than) {
    return (int32_t)(pass - than) > 0;
}

static bool has_left(const gather_lane *lane, const waiting_frame *frame) {
    return is_newer(lane->pass, frame->pass) ||
           (lane->pass == frame->pass && frame->layer <= lane->last_layer);
}

// The whole pass at this layer, or what of it is there when the deadline has passed.
static bool take_pass(gather *g, gather_lane *lane, const waiting_frame *frame, uint64_t now_us,
                      gather_group *out) {
    waiting_set set = waiting_at(g, lane, frame->layer, frame->pass);
    if (set.n + lane->missing < frame->members) {
        if (now_us < set.since_us + g->args.deadline_us)
            return false;
        g->stats.late_members += frame->members - lane->missing - set.n;
        lane->missing = (uint16_t)(frame->members - set.n);
    }
    uint16_t members = frame->members;
    uint32_t pass = frame->pass;
    take_all(g, lane, frame->layer, frame->pass, now_us, out);
    out->pass = pass;
    out->members = members;
    lane->last_layer = out->layer;
    lane->progress_us = now_us;
    if ((size_t)out->layer + 1 == g->args.n_layers)
        lane->active = false;
    return true;
}

static bool next_of_pass(gather *g, gather_lane *lane, size_t attention, uint64_t now_us,
                         gather_group *out) {
    const waiting_frame *frame = &lane->frames[attention];
    if (is_newer(frame->pass, lane->pass)) {
        lane->pass = frame->pass;
        lane->last_layer = 0;
        lane->missing = 0;
    }
    if (!has_left(lane, frame))
        return take_pass(g, lane, frame, now_us, out);
    take_one(g, lane, attention, now_us, out);
    return true;
}

static bool next_of_lane(gather *g, gather_lane *lane, uint64_t now_us, gather_group *out) {
    for (size_t a = 0; a < g->args.n_attention; a++) {
        if (!lane->frames[a].waits)
            continue;
        if (g->args.alone) {
            take_one(g, lane, a, now_us, out);
            return true;
        }
        if (lane->frames[a].layer > 0 && next_of_pass(g, lane, a, now_us, out))
            return true;
    }
    return !g->args.alone && next_layer_0(g, lane, now_us, out);
}

bool gather_next(gather *g, uint64_t now_us, gather_group *out) {
    for (size_t i = 0; i < g->args.n_lanes; i++) {
        size_t lane = (g->turn + i) % g->args.n_lanes;
        if (next_of_lane(g, &g->lanes[lane], now_us, out)) {
            g->turn = lane + 1;
            return true;
        }
    }
    return false;
}

uint64_t gather_due(const gather *g) {
    uint64_t due = UINT64_MAX;
    for (size_t i = 0; i < g->args.n_lanes; i++) {
        const gather_lane *lane = &g->lanes[i];
        for (size_t a = 0; a < g->args.n_attention; a++) {
            const waiting_frame *frame = &lane->frames[a];
            if (!frame->waits)
                continue;
            uint64_t at = frame->since_us + g->args.deadline_us;
            if (frame->layer == 0 && lane->active)
                at = lane->progress_us + g->args.deadline_us;
            else if (frame->layer == 0)
                at = wait_ends(g, lane, frame->since_us);
            due = at < due ? at : due;
        }
    }
    return due;
}

gather_stats gather_stats_get(const gather *g) {
    return g->stats;
}
