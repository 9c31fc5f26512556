#include "engine/bytes.h"

#include <stdlib.h>
#include <string.h>

bytes_reader bytes_reader_make(const void *data, size_t n) {
    const uint8_t *at = data;
    return (bytes_reader){.at = at, .end = n ? at + n : at};
}

const uint8_t *bytes_read_blob(bytes_reader *r, size_t n) {
    if (r->failed || bytes_left(r) < n) {
        r->failed = true;
        return NULL;
    }
    const uint8_t *at = r->at;
    r->at += n;
    return at;
}

static uint64_t read_le(bytes_reader *r, size_t n) {
    const uint8_t *at = bytes_read_blob(r, n);
    uint64_t value = 0;
    for (size_t i = 0; at && i < n; i++)
        value |= (uint64_t)at[i] << (8 * i);
    return value;
}

uint8_t bytes_read_u8(bytes_reader *r) {
    return (uint8_t)read_le(r, 1);
}

uint16_t bytes_read_u16(bytes_reader *r) {
    return (uint16_t)read_le(r, 2);
}

uint32_t bytes_read_u32(bytes_reader *r) {
    return (uint32_t)read_le(r, 4);
}

uint64_t bytes_read_u64(bytes_reader *r) {
    return read_le(r, 8);
}

int32_t bytes_read_i32(bytes_reader *r) {
    return (int32_t)bytes_read_u32(r);
}

float bytes_read_f32(bytes_reader *r) {
    uint32_t bits = bytes_read_u32(r);
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

size_t bytes_left(const bytes_reader *r) {
    return (size_t)(r->end - r->at);
}

bool bytes_reader_done(const bytes_reader *r) {
    return !r->failed && r->at == r->end;
}

void bytes_writer_reset(bytes_writer *w) {
    w->n = 0;
    w->failed = false;
}

void bytes_writer_free(bytes_writer *w) {
    free(w->data);
    *w = (bytes_writer){0};
}

void bytes_writer_reserve(bytes_writer *w, size_t n) {
    if (w->failed || n > SIZE_MAX / 2 - w->n) {
        w->failed = true;
        return;
    }
    size_t capacity = w->capacity ? w->capacity : 256;
    while (capacity - w->n < n)
        capacity *= 2;
    if (capacity == w->capacity)
        return;
    uint8_t *grown = realloc(w->data, capacity);
    if (!grown) {
        w->failed = true;
        return;
    }
    w->data = grown;
    w->capacity = capacity;
}

void bytes_write_blob(bytes_writer *w, const void *data, size_t n) {
    bytes_writer_reserve(w, n);
    if (w->failed || !n)
        return;
    memcpy(w->data + w->n, data, n);
    w->n += n;
}

static void write_le(bytes_writer *w, uint64_t value, size_t n) {
    uint8_t bytes[8];
    for (size_t i = 0; i < n; i++)
        bytes[i] = (uint8_t)(value >> (8 * i));
    bytes_write_blob(w, bytes, n);
}

void bytes_write_u8(bytes_writer *w, uint8_t value) {
    write_le(w, value, 1);
}

void bytes_write_u16(bytes_writer *w, uint16_t value) {
    write_le(w, value, 2);
}

void bytes_write_u32(bytes_writer *w, uint32_t value) {
    write_le(w, value, 4);
}

void bytes_write_u64(bytes_writer *w, uint64_t value) {
    write_le(w, value, 8);
}

void bytes_write_i32(bytes_writer *w, int32_t value) {
    write_le(w, (uint32_t)value, 4);
}

void bytes_write_f32(bytes_writer *w, float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    write_le(w, bits, 4);
}
