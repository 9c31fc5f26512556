// utf8.h: checking and repairing UTF-8 byte by byte, the way Python and Rust do it.
//
// A malformed stretch is cut into "maximal subparts" (Unicode 15, section 3.9, table 3-8): each is
// replaced by one U+FFFD, which is what bytes.decode(errors="replace") and from_utf8_lossy give.
// Nothing here allocates or keeps a pointer. Thread: any.
#ifndef TANDEM_ENGINE_UTF8_H
#define TANDEM_ENGINE_UTF8_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define UTF8_REPLACEMENT "\xEF\xBF\xBD"
#define UTF8_REPLACEMENT_BYTES 3

typedef enum utf8_status {
    UTF8_VALID,      // a whole sequence
    UTF8_BAD,        // a malformed subpart, to be replaced by one U+FFFD
    UTF8_INCOMPLETE, // the bytes end inside a sequence that is well formed so far
} utf8_status;

// Looks at the sequence that starts at p (n >= 1 bytes are there). *length is its length in bytes,
// or the length of the malformed or incomplete subpart; *codepoint is set for UTF8_VALID only.
utf8_status utf8_next(const char *p, size_t n, size_t *length, uint32_t *codepoint);

bool utf8_is_valid(const char *text, size_t n);

// Bytes that utf8_repair would write for this text.
size_t utf8_repaired_bytes(const char *text, size_t n);

// Copies text with every malformed or incomplete subpart replaced by U+FFFD; out has room for
// utf8_repaired_bytes (3 n always suffices). Returns the bytes written.
size_t utf8_repair(const char *text, size_t n, char *out);

// Writes a code point (a scalar value, not a surrogate) as 1 to 4 bytes; returns their number.
size_t utf8_put(uint32_t codepoint, char out[4]);

#endif
