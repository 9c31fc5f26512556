// status.h: return codes and the error out-argument of cold paths.
//
// Functions return 0 (E_OK) or a negative code. On cold paths the function that detects a failure
// fills the error out-argument with one line (what, where, the fix); callers only return the code;
// main or the worker loop logs the line once. Hot paths return codes alone.
// Thread: an error object belongs to the caller's thread.
#ifndef TANDEM_ENGINE_STATUS_H
#define TANDEM_ENGINE_STATUS_H

#include <stddef.h>

#define STATUS_MAP(X)                                                                              \
    X(OK, 0, "ok")                                                                                 \
    X(INVALID, -1, "invalid input")                                                                \
    X(NOT_FOUND, -2, "not found")                                                                  \
    X(NO_MEMORY, -3, "out of memory")                                                              \
    X(IO, -4, "input/output error")                                                                \
    X(UNSUPPORTED, -5, "unsupported")                                                              \
    X(FULL, -6, "no room")                                                                         \
    X(AGAIN, -7, "try again")                                                                      \
    X(CLOSED, -8, "peer closed")                                                                   \
    X(PROTOCOL, -10, "protocol error")                                                             \
    X(TOO_LARGE, -11, "too large")                                                                 \
    X(STATE, -12, "wrong state")

enum {
#define X(name, code, text) E_##name = code,
    STATUS_MAP(X)
#undef X
};

typedef struct error {
    int code;
    char text[512]; // one line, no newline, always terminated
} error;

// Text of a code; never NULL.
const char *status_text(int code);

// Fills err (which may be NULL) and returns code, so that a detector writes
// `return error_set(err, E_INVALID, "...", ...)`. Control characters in the result become '?'.
int error_set(error *err, int code, const char *format, ...) __attribute__((format(printf, 3, 4)));

// Puts "prefix: " before the text already in err. Returns err->code.
int error_prefix(error *err, const char *format, ...) __attribute__((format(printf, 2, 3)));

#endif
