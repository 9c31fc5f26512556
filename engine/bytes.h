// bytes.h: little-endian reader and writer for the payloads of control messages.
//
// Both carry a sticky failure: after the first read past the end, or the first write without
// memory, every further call does nothing (reads give 0), and the caller checks once at the end.
// Reader: borrows the bytes; blobs and text point into them. Writer: owns its memory.
// Thread: an object belongs to its caller's thread.
#ifndef TANDEM_ENGINE_BYTES_H
#define TANDEM_ENGINE_BYTES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct bytes_reader {
    const uint8_t *data; // (n), borrowed
    size_t n, at;
    bool failed;
} bytes_reader;

bytes_reader bytes_reader_make(const void *data, size_t n);
uint8_t bytes_get_u8(bytes_reader *r);
uint16_t bytes_get_u16(bytes_reader *r);
uint32_t bytes_get_u32(bytes_reader *r);
uint64_t bytes_get_u64(bytes_reader *r);
float bytes_get_f32(bytes_reader *r);
double bytes_get_f64(bytes_reader *r);
// n bytes as they are; NULL on failure (and for n 0).
const void *bytes_get_raw(bytes_reader *r, size_t n);
// u32 length and bytes; *n is 0 on failure.
const void *bytes_get_blob(bytes_reader *r, size_t *n);
// A blob as a terminated string into out, cut never: failure when it holds a NUL or does not fit.
void bytes_get_text(bytes_reader *r, char *out, size_t out_bytes);
size_t bytes_left(const bytes_reader *r); // 0 after a failure
// Nothing failed and nothing is left: what a receiver checks after the last field.
bool bytes_reader_done(const bytes_reader *r);

typedef struct bytes_writer {
    uint8_t *data; // (capacity), owned; n bytes are written
    size_t n, capacity;
    bool failed;
} bytes_writer; // {0} is an empty writer

void bytes_put_u8(bytes_writer *w, uint8_t value);
void bytes_put_u16(bytes_writer *w, uint16_t value);
void bytes_put_u32(bytes_writer *w, uint32_t value);
void bytes_put_u64(bytes_writer *w, uint64_t value);
void bytes_put_f32(bytes_writer *w, float value);
void bytes_put_f64(bytes_writer *w, double value);
void bytes_put_raw(bytes_writer *w, const void *data, size_t n);
void bytes_put_blob(bytes_writer *w, const void *data, size_t n); // n under 4 GiB
void bytes_put_text(bytes_writer *w, const char *text);
void bytes_writer_reset(bytes_writer *w); // empty again, memory kept
void bytes_writer_free(bytes_writer *w);  // {0} again

#endif
