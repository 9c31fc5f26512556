#include "engine/utf8.h"

#include <string.h>

// Allowed range of the second byte for each lead byte; later bytes are 80..BF.
static bool lead_info(uint8_t lead, size_t *n_tail, uint8_t *low, uint8_t *high) {
    *low = 0x80;
    *high = 0xBF;
    if (lead >= 0xC2 && lead <= 0xDF) {
        *n_tail = 1;
    } else if (lead >= 0xE0 && lead <= 0xEF) {
        *n_tail = 2;
        if (lead == 0xE0)
            *low = 0xA0; // shorter forms exist
        if (lead == 0xED)
            *high = 0x9F; // surrogates
    } else if (lead >= 0xF0 && lead <= 0xF4) {
        *n_tail = 3;
        if (lead == 0xF0)
            *low = 0x90;
        if (lead == 0xF4)
            *high = 0x8F; // above U+10FFFF
    } else {
        return false;
    }
    return true;
}

utf8_status utf8_next(const char *p, size_t n, size_t *length, uint32_t *codepoint) {
    const uint8_t *bytes = (const uint8_t *)p;
    if (bytes[0] < 0x80) {
        *length = 1;
        *codepoint = bytes[0];
        return UTF8_VALID;
    }
    size_t n_tail;
    uint8_t low, high;
    if (!lead_info(bytes[0], &n_tail, &low, &high)) {
        *length = 1;
        return UTF8_BAD;
    }
    uint32_t value = bytes[0] & (0x3Fu >> n_tail);
    for (size_t i = 1; i <= n_tail; i++) {
        if (i == n) {
            *length = i;
            return UTF8_INCOMPLETE;
        }
        if (bytes[i] < low || bytes[i] > high) {
            *length = i;
            return UTF8_BAD;
        }
        value = value << 6 | (bytes[i] & 0x3Fu);
        low = 0x80;
        high = 0xBF;
    }
    *length = n_tail + 1;
    *codepoint = value;
    return UTF8_VALID;
}

// Length of the ASCII run at p, eight bytes at a time.
static size_t ascii_run(const char *p, size_t n) {
    size_t i = 0;
    for (uint64_t word; i + 8 <= n; i += 8) {
        memcpy(&word, p + i, 8);
        if (word & 0x8080808080808080u)
            break;
    }
    while (i < n && (uint8_t)p[i] < 0x80)
        i++;
    return i;
}

bool utf8_is_valid(const char *text, size_t n) {
    for (size_t i = ascii_run(text, n); i < n; i += ascii_run(text + i, n - i)) {
        size_t length;
        uint32_t codepoint;
        if (utf8_next(text + i, n - i, &length, &codepoint) != UTF8_VALID)
            return false;
        i += length;
    }
    return true;
}

size_t utf8_repaired_bytes(const char *text, size_t n) {
    size_t total = 0;
    for (size_t i = 0, length; i < n; i += length) {
        uint32_t codepoint;
        bool ok = utf8_next(text + i, n - i, &length, &codepoint) == UTF8_VALID;
        total += ok ? length : UTF8_REPLACEMENT_BYTES;
    }
    return total;
}

size_t utf8_repair(const char *text, size_t n, char *out) {
    size_t total = 0;
    for (size_t i = 0, length; i < n; i += length) {
        uint32_t codepoint;
        bool ok = utf8_next(text + i, n - i, &length, &codepoint) == UTF8_VALID;
        size_t n_put = ok ? length : UTF8_REPLACEMENT_BYTES;
        memcpy(out + total, ok ? text + i : UTF8_REPLACEMENT, n_put);
        total += n_put;
    }
    return total;
}

size_t utf8_put(uint32_t codepoint, char out[4]) {
    if (codepoint < 0x80) {
        out[0] = (char)codepoint;
        return 1;
    }
    if (codepoint < 0x800) {
        out[0] = (char)(0xC0 | codepoint >> 6);
        out[1] = (char)(0x80 | (codepoint & 0x3F));
        return 2;
    }
    if (codepoint < 0x10000) {
        out[0] = (char)(0xE0 | codepoint >> 12);
        out[1] = (char)(0x80 | (codepoint >> 6 & 0x3F));
        out[2] = (char)(0x80 | (codepoint & 0x3F));
        return 3;
    }
    out[0] = (char)(0xF0 | codepoint >> 18);
    out[1] = (char)(0x80 | (codepoint >> 12 & 0x3F));
    out[2] = (char)(0x80 | (codepoint >> 6 & 0x3F));
    out[3] = (char)(0x80 | (codepoint & 0x3F));
    return 4;
}
