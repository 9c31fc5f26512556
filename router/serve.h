// serve.h: `tandem serve`: one bundle and its HTTP API, from start to the end by signal.
#ifndef TANDEM_ROUTER_SERVE_H
#define TANDEM_ROUTER_SERVE_H

#include "engine/config.h"

// Runs until SIGTERM or SIGINT (drains; a second one ends at once) or until a worker fails.
// Prints "tandem: ready at http://HOST:PORT" on standard output when requests are taken.
// Returns the process's exit status: 0 after a signal, 1 after a failure,
// 2 when the model cannot be served with this configuration (one line on standard error).
int serve_main(const config *c);

#endif
