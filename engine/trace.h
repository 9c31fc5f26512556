// trace.h: requests as they came: a CSV of arrival, prompt tokens, output tokens.
//
// One request a line, in the order of arrival, which is a time of any unit from any start. A first
// line of names, empty lines and lines that begin with # are passed over.
// Ownership: trace_free frees what trace_parse and trace_open gave. Thread: immutable once read.
#ifndef TANDEM_ENGINE_TRACE_H
#define TANDEM_ENGINE_TRACE_H

#include "engine/status.h"

#include <stddef.h>
#include <stdint.h>

enum { TRACE_MAX_BYTES = 256 << 20, TRACE_MAX_REQUESTS = 8 << 20, TRACE_MAX_LENGTH = 16 << 20 };

typedef struct trace_request {
    double arrival;          // counted from the first request
    uint32_t prompt, output; // tokens; output is 1 or more
} trace_request;

typedef struct trace {
    trace_request *requests; // (n), owned
    size_t n;                // 1 or more
} trace;

// name stands in error lines. Text needs no NUL.
int trace_parse(const char *name, const char *text, size_t n_bytes, trace *out, error *err);
int trace_open(const char *path, trace *out, error *err);
void trace_free(trace *t); // also makes it empty

#endif
