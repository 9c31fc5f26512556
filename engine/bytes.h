// bytes.h: little-endian reading and writing of message payloads.
//
// A reader never goes beyond its end: after the first short read it fails for good and gives
// zeros. A writer grows; after a failed allocation it fails for good and takes nothing more.
// Thread: one thread per object.
#ifndef TANDEM_ENGINE_BYTES_H
#define TANDEM_ENGINE_BYTES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct bytes_reader {
    const uint8_t *at, *end;
    bool failed;
} bytes_reader;

bytes_reader bytes_reader_make(const void *data, size_t n);
uint8_t bytes_read_u8(bytes_reader *r);
uint16_t bytes_read_u16(bytes_reader *r);
uint32_t bytes_read_u32(bytes_reader *r);
uint64_t bytes_read_u64(bytes_reader *r);
int32_t bytes_read_i32(bytes_reader *r);
float bytes_read_f32(bytes_reader *r);
// A place in the reader's data, or NULL when fewer than n bytes are left.
const uint8_t *bytes_read_blob(bytes_reader *r, size_t n);
size_t bytes_left(const bytes_reader *r);
// All read, nothing short, nothing left over.
bool bytes_reader_done(const bytes_reader *r);

typedef struct bytes_writer {
    uint8_t *data;
    size_t n, capacity;
    bool failed;
} bytes_writer;

void bytes_writer_reset(bytes_writer *w); // empty again, memory kept
void bytes_writer_free(bytes_writer *w);  // back to {0}
// Makes room for n more bytes, so that writing them allocates nothing.
void bytes_writer_reserve(bytes_writer *w, size_t n);
void bytes_write_u8(bytes_writer *w, uint8_t value);
void bytes_write_u16(bytes_writer *w, uint16_t value);
void bytes_write_u32(bytes_writer *w, uint32_t value);
void bytes_write_u64(bytes_writer *w, uint64_t value);
void bytes_write_i32(bytes_writer *w, int32_t value);
void bytes_write_f32(bytes_writer *w, float value);
void bytes_write_blob(bytes_writer *w, const void *data, size_t n);

#endif
