#include "router/json_writer.h"

#include "engine/utf8.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MIN_ROOM = 256 };

// Room for n more bytes and a NUL.
static bool reserve(json_writer *w, size_t n) {
    if (w->failed)
        return false;
    if (w->n + n < w->room)
        return true;
    size_t room = w->room ? w->room : MIN_ROOM;
    while (room <= w->n + n)
        room *= 2;
    char *grown = realloc(w->text, room);
    if (!grown) {
        w->failed = true;
        return false;
    }
    w->text = grown;
    w->room = room;
    return true;
}

void json_writer_free(json_writer *w) {
    free(w->text);
    *w = (json_writer){0};
}

void json_writer_clear(json_writer *w) {
    w->n = 0;
    w->failed = false;
    if (w->text)
        w->text[0] = '\0';
}

void json_put_n(json_writer *w, const char *bytes, size_t n) {
    if (n == 0 || !reserve(w, n))
        return;
    memcpy(w->text + w->n, bytes, n);
    w->n += n;
    w->text[w->n] = '\0';
}

void json_put(json_writer *w, const char *text) {
    json_put_n(w, text, strlen(text));
}

void json_putf(json_writer *w, const char *format, ...) {
    va_list args, again;
    va_start(args, format);
    va_copy(again, args);
    int n = vsnprintf(NULL, 0, format, args);
    if (n > 0 && reserve(w, (size_t)n)) {
        vsnprintf(w->text + w->n, (size_t)n + 1, format, again);
        w->n += (size_t)n;
    }
    va_end(again);
    va_end(args);
}

static void put_escaped(json_writer *w, unsigned char c) {
    static const char plain[] = "\b\t\n\f\r\"\\", letters[] = "btnfr\"\\";
    const char *found = memchr(plain, c, sizeof plain - 1);
    if (found)
        json_putf(w, "\\%c", letters[found - plain]);
    else
        json_putf(w, "\\u%04x", c);
}

static bool is_plain(unsigned char c) {
    return c >= 0x20 && c < 0x7f && c != '"' && c != '\\';
}

void json_put_string_n(json_writer *w, const char *bytes, size_t n) {
    json_put_n(w, "\"", 1);
    for (size_t i = 0, length; i < n; i += length) {
        for (length = 0; i + length < n && is_plain((unsigned char)bytes[i + length]);)
            length++;
        if (length) {
            json_put_n(w, bytes + i, length);
            continue;
        }
        uint32_t codepoint;
        if (utf8_next(bytes + i, n - i, &length, &codepoint) != UTF8_VALID)
            json_put_n(w, UTF8_REPLACEMENT, UTF8_REPLACEMENT_BYTES);
        else if (length == 1)
            put_escaped(w, (unsigned char)bytes[i]);
        else
            json_put_n(w, bytes + i, length);
    }
    json_put_n(w, "\"", 1);
}

void json_put_string(json_writer *w, const char *text) {
    json_put_string_n(w, text, strlen(text));
}

void json_put_float(json_writer *w, float value) {
    if (!isfinite(value))
        value = -9999.0f;
    json_putf(w, "%.9g", (double)value);
}
