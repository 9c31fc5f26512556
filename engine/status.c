#include "engine/status.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

const char *status_text(int code) {
    switch (code) {
#define X(name, value, text)                                                                       \
    case value:                                                                                    \
        return text;
        STATUS_MAP(X)
#undef X
    }
    return "unknown status";
}

static void flatten_line(char *text) {
    for (char *p = text; *p; p++)
        if ((unsigned char)*p < 0x20 || *p == 0x7f)
            *p = '?';
}

int error_set(error *err, int code, const char *format, ...) {
    if (!err)
        return code;
    va_list args;
    va_start(args, format);
    vsnprintf(err->text, sizeof err->text, format, args);
    va_end(args);
    err->code = code;
    flatten_line(err->text);
    return code;
}

int error_prefix(error *err, const char *format, ...) {
    char joined[sizeof err->text];
    va_list args;
    va_start(args, format);
    int n = vsnprintf(joined, sizeof joined, format, args);
    va_end(args);
    if (n > 0 && (size_t)n + 3 < sizeof joined)
        snprintf(joined + n, sizeof joined - (size_t)n, ": %.*s",
                 (int)(sizeof joined - (size_t)n - 3), err->text);
    memcpy(err->text, joined, sizeof joined);
    flatten_line(err->text);
    return err->code;
}
