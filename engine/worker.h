// worker.h: the main of a worker process: joins the router, opens its node, runs until told to go.
//
// Usage of both executables: --join ADDRESS [--bind ADDRESS], and --rank N from the
// router that launches. The configuration comes from the router.
// A colocated bundle runs an attention and an FFN node in one process, over the inproc transport;
// its executable is the attention worker's.
#ifndef TANDEM_ENGINE_WORKER_H
#define TANDEM_ENGINE_WORKER_H

#include "engine/node.h"

// ffn: the FFN node of a colocated worker, or NULL where the executable has none.
// Returns the process's exit status.
int worker_main(int argc, char **argv, const node_type *type, const node_type *ffn);

#endif
