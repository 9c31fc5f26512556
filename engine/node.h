// node.h: what a worker process runs: an attention node or an FFN node (both when colocated).
//
// The folders attn_node and ffn_node each define one node_type; engine/worker.c drives it: open
// (loads weights; may take long), describe, join (connects to its peers), message (from the
// router), close (two-phase). A node calls back through its env.
// Thread: everything on the worker's loop thread.
#ifndef TANDEM_ENGINE_NODE_H
#define TANDEM_ENGINE_NODE_H

#include "engine/messages.h"
#include "engine/plan.h"

#include <uv.h>

typedef struct node_env {
    uv_loop_t *loop;
    const config *config;
    const plan *plan;
    uint32_t rank;
    const char *transport; // kind for engine/transport.h
    const char *bind;      // local address for it, or NULL
    uint32_t spin_us;
    int threads;
    void *user;
    void (*progress)(void *user, size_t bytes); // of weights read since the last call; in open
    void (*send)(void *user, uint16_t type, const void *payload, size_t n); // to the router
    void (*fail)(void *user, const error *err); // the node cannot go on; called at most once
} node_env;

typedef struct node_type {
    worker_kind kind;
    const char *name;
    int (*open)(const node_env *env, void **node, error *err); // env outlives the node
    void (*describe)(void *node, message_ready *out);
    int (*join)(void *node, const message_topology *topology, error *err);
    void (*message)(void *node, uint16_t type, const void *payload, size_t n);
    void (*close)(void *node, void (*done)(void *user), void *user); // node NULL is not given
} node_type;

extern const node_type attn_node_type; // attn_node/attn.c
extern const node_type ffn_node_type;  // ffn_node/ffn.c

#endif
