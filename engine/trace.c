#include "engine/trace.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// A number with blanks around it, which fills the field. Copied, since strtod needs an end.
static int read_field(const char *text, size_t n, double *out) {
    char copy[64], *end = NULL;
    while (n && (*text == ' ' || *text == '\t'))
        text++, n--;
    while (n && (text[n - 1] == ' ' || text[n - 1] == '\t'))
        n--;
    if (!n || n >= sizeof copy)
        return E_INVALID;
    memcpy(copy, text, n);
    copy[n] = '\0';
    if (strspn(copy, "+-.0123456789eE") != n) // not what else strtod takes: nan, inf, hexadecimal
        return E_INVALID;
    *out = strtod(copy, &end);
    return *end || !isfinite(*out) ? E_INVALID : E_OK;
}

static int read_line(const char *line, size_t n, trace_request *out, const char **expected) {
    double values[3];
    static const char *const what[] = {"a time of arrival", "prompt tokens, 0 to 16777216",
                                       "output tokens, 1 to 16777216"};
    for (int i = 0; i < 3; i++) {
        const char *comma = i < 2 ? memchr(line, ',', n) : NULL;
        size_t length = comma ? (size_t)(comma - line) : n;
        *expected = what[i];
        if ((i < 2 && !comma) || read_field(line, length, &values[i]) != E_OK)
            return E_INVALID;
        if (i > 0 &&
            !(values[i] >= i - 1 && values[i] <= TRACE_MAX_LENGTH && values[i] == floor(values[i])))
            return E_INVALID;
        if (comma) {
            line += length + 1;
            n -= length + 1;
        }
    }
    *out = (trace_request){values[0], (uint32_t)values[1], (uint32_t)values[2]};
    return E_OK;
}

static int append(trace *t, size_t *room, const trace_request *request) {
    if (t->n == *room) {
        size_t more = *room ? 2 * *room : 1024;
        trace_request *requests = realloc(t->requests, more * sizeof *requests);
        if (!requests)
            return E_NO_MEMORY;
        t->requests = requests;
        *room = more;
    }
    t->requests[t->n++] = *request;
    return E_OK;
}

int trace_parse(const char *name, const char *text, size_t n_bytes, trace *out, error *err) {
    trace t = {0};
    size_t room = 0, number = 0;
    int rc = E_OK;
    const char *end = text + n_bytes;
    for (const char *line = text; line < end && rc == E_OK;) {
        const char *newline = memchr(line, '\n', (size_t)(end - line));
        size_t n = (size_t)((newline ? newline : end) - line);
        const char *here = line, *expected = NULL;
        trace_request request;
        line += n + (newline ? 1 : 0);
        number++;
        if (n && here[n - 1] == '\r')
            n--;
        if (!n || *here == '#')
            continue;
        if (read_line(here, n, &request, &expected) != E_OK) {
            if (number == 1 && ((*here | 32) >= 'a' && (*here | 32) <= 'z'))
                continue; // the names of the columns
            rc = error_set(err, E_INVALID, "%s: line %zu: expected %s (arrival,prompt,output)",
                           name, number, expected);
        } else if (t.n && request.arrival < t.requests[t.n - 1].arrival) {
            rc = error_set(err, E_INVALID, "%s: line %zu: arrives before the line above it", name,
                           number);
        } else if (t.n == TRACE_MAX_REQUESTS) {
            rc = error_set(err, E_TOO_LARGE, "%s: more than %d requests", name, TRACE_MAX_REQUESTS);
        } else if (append(&t, &room, &request) != E_OK) {
            rc = error_set(err, E_NO_MEMORY, "%s: out of memory", name);
        }
    }
    if (rc == E_OK && t.n == 0)
        rc = error_set(err, E_INVALID, "%s: the trace is empty", name);
    if (rc == E_OK && !isfinite(t.requests[t.n - 1].arrival - t.requests[0].arrival))
        rc = error_set(err, E_INVALID, "%s: the last arrival is too far from the first", name);
    if (rc != E_OK) {
        trace_free(&t);
        return rc;
    }
    double first = t.requests[0].arrival;
    for (size_t i = 0; i < t.n; i++)
        t.requests[i].arrival -= first;
    *out = t;
    return E_OK;
}

int trace_open(const char *path, trace *out, error *err) {
    FILE *file = fopen(path, "rb");
    char *text = NULL;
    size_t n = 0, room = 0;
    int rc = E_OK;
    if (!file)
        return error_set(err, errno == ENOENT ? E_NOT_FOUND : E_IO, "%s: %s", path,
                         strerror(errno));
    for (;;) {
        if (n == room) {
            room = room ? 2 * room : 1 << 16;
            char *more = room > 2 * (size_t)TRACE_MAX_BYTES ? NULL : realloc(text, room);
            if (!more) {
                rc = error_set(err, E_TOO_LARGE, "%s: too large to read as a trace", path);
                break;
            }
            text = more;
        }
        size_t got = fread(text + n, 1, room - n, file);
        n += got;
        if (n > TRACE_MAX_BYTES) {
            rc = error_set(err, E_TOO_LARGE, "%s: more than %d bytes", path, TRACE_MAX_BYTES);
            break;
        }
        if (got == 0) {
            if (ferror(file))
                rc = error_set(err, E_IO, "%s: %s", path, strerror(errno));
            break;
        }
    }
    fclose(file);
    if (rc == E_OK)
        rc = trace_parse(path, text, n, out, err);
    free(text);
    return rc;
}

void trace_free(trace *t) {
    free(t->requests);
    *t = (trace){0};
}
