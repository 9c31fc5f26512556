#include "engine/bytes.h"

#include <stdlib.h>
#include <string.h>

bytes_reader bytes_reader_make(const void *data, size_t n) {
    return (bytes_reader){.data = data, .n = n};
}

const void *bytes_get_raw(bytes_reader *r, size_t n) {
    if (r->failed || n > r->n - r->at) {
        r->failed = true;
        return NULL;
    }
    if (!n)
        return NULL;
    const uint8_t *at = r->data + r->at;
    r->at += n;
    return at;
}

static uint64_t get_little(bytes_reader *r, size_t n) {
    const uint8_t *at = bytes_get_raw(r, n);
    uint64_t value = 0;
    for (size_t i = 0; at && i < n; i++)
        value |= (uint64_t)at[i] << (8 * i);
    return value;
}

uint8_t bytes_get_u8(bytes_reader *r) {
    return (uint8_t)get_little(r, 1);
}

uint16_t bytes_get_u16(bytes_reader *r) {
    return (uint16_t)get_little(r, 2);
}

uint32_t bytes_get_u32(bytes_reader *r) {
    return (uint32_t)get_little(r, 4);
}

uint64_t bytes_get_u64(bytes_reader *r) {
    return get_little(r, 8);
}

float bytes_get_f32(bytes_reader *r) {
    uint32_t bits = bytes_get_u32(r);
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

double bytes_get_f64(bytes_reader *r) {
    uint64_t bits = bytes_get_u64(r);
    double value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

const void *bytes_get_blob(bytes_reader *r, size_t *n) {
    size_t length = bytes_get_u32(r);
    const void *at = bytes_get_raw(r, length);
    *n = at ? length : 0;
    return at;
}

void bytes_get_text(bytes_reader *r, char *out, size_t out_bytes) {
    size_t n;
    const void *text = bytes_get_blob(r, &n);
    if (n >= out_bytes || (n && memchr(text, 0, n))) {
        r->failed = true;
        n = 0;
    }
    if (n)
        memcpy(out, text, n);
    if (out_bytes)
        out[n] = 0;
}

size_t bytes_left(const bytes_reader *r) {
    return r->failed ? 0 : r->n - r->at;
}

bool bytes_reader_done(const bytes_reader *r) {
    return !r->failed && r->at == r->n;
}

// Room for n more bytes, which the caller fills; NULL without memory.
static uint8_t *extend(bytes_writer *w, size_t n) {
    if (w->failed || n > SIZE_MAX / 2 - w->n) {
        w->failed = true;
        return NULL;
    }
    if (w->n + n > w->capacity) {
        size_t capacity = w->capacity ? w->capacity : 64;
        while (capacity < w->n + n)
            capacity *= 2;
        uint8_t *data = realloc(w->data, capacity);
        if (!data) {
            w->failed = true;
            return NULL;
        }
        w->data = data;
        w->capacity = capacity;
    }
    w->n += n;
    return w->data + w->n - n;
}

static void put_little(bytes_writer *w, uint64_t value, size_t n) {
    uint8_t *at = extend(w, n);
    for (size_t i = 0; at && i < n; i++)
        at[i] = (uint8_t)(value >> (8 * i));
}

void bytes_put_u8(bytes_writer *w, uint8_t value) {
    put_little(w, value, 1);
}

void bytes_put_u16(bytes_writer *w, uint16_t value) {
    put_little(w, value, 2);
}

void bytes_put_u32(bytes_writer *w, uint32_t value) {
    put_little(w, value, 4);
}

void bytes_put_u64(bytes_writer *w, uint64_t value) {
    put_little(w, value, 8);
}

void bytes_put_f32(bytes_writer *w, float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    bytes_put_u32(w, bits);
}

void bytes_put_f64(bytes_writer *w, double value) {
    uint64_t bits;
    memcpy(&bits, &value, sizeof bits);
    bytes_put_u64(w, bits);
}

void bytes_put_raw(bytes_writer *w, const void *data, size_t n) {
    if (!n)
        return;
    uint8_t *at = extend(w, n);
    if (at)
        memcpy(at, data, n);
}

void bytes_put_blob(bytes_writer *w, const void *data, size_t n) {
    if (n > UINT32_MAX) {
        w->failed = true;
        return;
    }
    bytes_put_u32(w, (uint32_t)n);
    bytes_put_raw(w, data, n);
}

void bytes_put_text(bytes_writer *w, const char *text) {
    bytes_put_blob(w, text, strlen(text));
}

void bytes_writer_reset(bytes_writer *w) {
    w->n = 0;
    w->failed = false;
}

void bytes_writer_free(bytes_writer *w) {
    free(w->data);
    *w = (bytes_writer){0};
}
