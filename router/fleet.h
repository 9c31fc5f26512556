// fleet.h: the worker processes of a bundle: launching, joining, the control sockets, the end.
//
// Workers that the configuration has this host launch are started as children; the others are
// waited for. When all have loaded, each is told its peers; when all have joined, on_ready comes.
// A worker that cannot start, or that goes, ends the fleet: on_failed with that worker's reason.
// Thread: the router's loop. Callbacks come from the loop.
#ifndef TANDEM_ROUTER_FLEET_H
#define TANDEM_ROUTER_FLEET_H

#include "engine/messages.h"
#include "engine/plan.h"

#include <stdbool.h>
#include <uv.h>

typedef struct fleet fleet;

typedef struct fleet_args {
    uv_loop_t *loop;
    const config *config; // outlive the fleet
    const plan *plan;
    void *user;
    void (*on_ready)(void *user);
    // Once; the fleet is then to be closed.
    void (*on_failed)(void *user, const char *reason);
    // From an attention worker.
    void (*on_message)(void *user, uint32_t rank, uint16_t type, const void *payload, size_t n);
} fleet_args;

int fleet_open(const fleet_args *args, fleet **out, error *err);
int fleet_send(fleet *f, uint32_t attention_rank, uint16_t type, const void *payload, size_t n);
uint64_t fleet_kv_tokens(const fleet *f); // capacity of the smallest KV cache of a worker
// Tells every worker to go, kills what is left after a grace period; then done, and the fleet is
// gone. `now`: without grace.
void fleet_close(fleet *f, bool now, void (*done)(void *user), void *user);

#endif
