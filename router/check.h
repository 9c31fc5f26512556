// check.h: `tandem check`, everything that can be known of a bundle without starting it.
//
// Thread: the main thread.
#ifndef TANDEM_ROUTER_CHECK_H
#define TANDEM_ROUTER_CHECK_H

#include "engine/chat.h"
#include "engine/config.h"
#include "engine/plan.h"
#include "engine/tokenizer.h"

// Checks model, weights (headers alone), tokenizer and chat format, and prints a short summary.
int check_bundle(const config *c, FILE *out, error *err);

// Opens the tokenizer and the chat format, and checks that the model has a row for every id. The
// caller closes both; on failure nothing is open.
int check_text(const config *c, const plan *p, tokenizer **t, chat_format **chat, error *err);

#endif
