// check.h: `tandem check`, everything that can be known of a bundle without starting it.
//
// Thread: the main thread.
#ifndef TANDEM_ROUTER_CHECK_H
#define TANDEM_ROUTER_CHECK_H

#include "engine/config.h"

// Checks model, weights (headers alone), tokenizer and chat format, and prints a short summary.
int check_bundle(const config *c, FILE *out, error *err);

#endif
