// rig.h: a whole bundle without its router in one process: the attention and FFN nodes of a
// configuration on one loop, over the inproc transport. A test submits requests to chosen attention
// workers and reads the events of each.
//
// Every function fails the running cmocka test when the bundle does not do as asked: a node that
// does not open or gives up, an event of an unknown or ended request, positions out of order, a run
// longer than a minute.
// Thread: one.
#ifndef TANDEM_TESTS_RIG_H
#define TANDEM_TESTS_RIG_H

#include "engine/config.h"
#include "engine/messages.h"
#include "engine/plan.h"
#include "engine/request.h"

typedef struct rig rig;

// The defaults of every key with a model directory; one thread a worker, errors alone are logged.
config rig_config(const char *dir);

rig *rig_open(const config *c); // copied
void rig_close(rig *r);
const plan *rig_plan(const rig *r);

typedef struct rig_request {
    uint64_t id;
    size_t worker, n_prompt;
    token_event *events; // (n_events), of the prompt and generated, in order
    size_t n_events, n_room;
    bool cancelled;
    finish_reason finish; // NONE: still under way
} rig_request;

// Greedy, no logprobs, stop ids ignored.
sampling_params rig_greedy(int32_t max_tokens);

// Returns the index of the request.
size_t rig_submit(rig *r, size_t worker, const int32_t *prompt, size_t n_prompt,
                  const sampling_params *params);
void rig_cancel(rig *r, size_t request); // it counts as ended from now on
const rig_request *rig_request_at(const rig *r, size_t request);

void rig_turn(rig *r); // one turn of the loop; may sleep until something happens
void rig_run(rig *r);  // until every request has ended

// The newest load that an attention worker reported.
const message_load *rig_load(const rig *r, size_t worker);

#endif
