// api_stop.h: finds stop strings in text that arrives in pieces.
//
// Text that may still become a stop string is held back, so that no part of one is ever sent.
// Thread: the caller's.
#ifndef TANDEM_ROUTER_API_STOP_H
#define TANDEM_ROUTER_API_STOP_H

#include "router/json_writer.h"

#include <stdbool.h>
#include <stddef.h>

enum { API_MAX_STOPS = 16, API_MAX_STOP_BYTES = 1024 };

typedef struct stop_strings {
    size_t n;
    char *texts[API_MAX_STOPS]; // owned; none is empty or longer than API_MAX_STOP_BYTES
} stop_strings;

void stop_strings_free(stop_strings *stops);

// Adds a piece to held and moves what is safe to out. True when a stop string was found: out has
// the text before it, and held is empty.
bool stop_push(const stop_strings *stops, json_writer *held, const char *piece, size_t n,
               json_writer *out);
// The rest, when no more will come.
void stop_flush(json_writer *held, json_writer *out);

#endif
