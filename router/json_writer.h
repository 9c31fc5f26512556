// json_writer.h: a growable text for JSON and other answers.
//
// A failed allocation is remembered: later puts do nothing and json_writer_failed says so.
// Ownership: the caller frees with json_writer_free; {0} is an empty writer. Thread: the caller's.
#ifndef TANDEM_ROUTER_JSON_WRITER_H
#define TANDEM_ROUTER_JSON_WRITER_H

#include <stdbool.h>
#include <stddef.h>

typedef struct json_writer {
    char *text; // (n) bytes and a NUL; NULL while nothing was put
    size_t n, room;
    bool failed;
} json_writer;

void json_writer_free(json_writer *w);  // also makes it empty
void json_writer_clear(json_writer *w); // keeps the memory

void json_put(json_writer *w, const char *text); // as it is
void json_put_n(json_writer *w, const char *bytes, size_t n);
void json_putf(json_writer *w, const char *format, ...) __attribute__((format(printf, 2, 3)));
// A JSON string with its quotes. Bytes that are not UTF-8 become U+FFFD.
void json_put_string_n(json_writer *w, const char *bytes, size_t n);
void json_put_string(json_writer *w, const char *text);
// A number that reads back as the same float; what JSON cannot say (infinite, NaN) is -9999.
void json_put_float(json_writer *w, float value);

#endif
