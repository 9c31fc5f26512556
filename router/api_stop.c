#include "router/api_stop.h"

#include <stdlib.h>
#include <string.h>

void stop_strings_free(stop_strings *stops) {
    for (size_t i = 0; i < stops->n; i++)
        free(stops->texts[i]);
    stops->n = 0;
}

// Bytes before the first stop string in text; n when there is none.
static size_t find_stop(const stop_strings *stops, const char *text, size_t n) {
    size_t first = n;
    for (size_t i = 0; i < stops->n; i++) {
        const char *found = memmem(text, n, stops->texts[i], strlen(stops->texts[i]));
        if (found && (size_t)(found - text) < first)
            first = (size_t)(found - text);
    }
    return first;
}

// Length of the longest end of text with which a stop string begins.
static size_t count_held(const stop_strings *stops, const char *text, size_t n) {
    size_t longest = n < API_MAX_STOP_BYTES ? n : API_MAX_STOP_BYTES;
    for (size_t k = longest; k > 0; k--)
        for (size_t i = 0; i < stops->n; i++)
            if (strncmp(stops->texts[i], text + n - k, k) == 0)
                return k;
    return 0;
}

static void keep_end(json_writer *held, size_t n_keep) {
    memmove(held->text, held->text + held->n - n_keep, n_keep);
    held->n = n_keep;
    held->text[n_keep] = '\0';
}

bool stop_push(const stop_strings *stops, json_writer *held, const char *piece, size_t n,
               json_writer *out) {
    if (stops->n == 0) {
        json_put_n(out, piece, n);
        return false;
    }
    json_put_n(held, piece, n);
    out->failed |= held->failed;
    if (held->n == 0)
        return false;
    size_t before = find_stop(stops, held->text, held->n);
    bool found = before < held->n;
    size_t n_keep = found ? 0 : count_held(stops, held->text, held->n);
    json_put_n(out, held->text, found ? before : held->n - n_keep);
    keep_end(held, n_keep);
    return found;
}

void stop_flush(json_writer *held, json_writer *out) {
    json_put_n(out, held->text, held->n);
    json_writer_clear(held);
}
