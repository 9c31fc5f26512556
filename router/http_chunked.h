// http_chunked.h: a strict decoder of the chunked transfer coding, fed in pieces of any size.
//
// Refuses what lenient parsers let through: a bare LF, a wrong CRLF after a chunk's data, sizes
// beyond 15 hex digits, extensions and trailers beyond a cap. Trailers are dropped.
// Thread: any.
#ifndef TANDEM_ROUTER_HTTP_CHUNKED_H
#define TANDEM_ROUTER_HTTP_CHUNKED_H

#include <stddef.h>
#include <stdint.h>

typedef struct http_chunked {
    int state;      // zero: at the first chunk's size
    int n_digits;   // of the size being read
    uint64_t left;  // data bytes of this chunk still to come
    size_t n_extra; // bytes of this extension, or of all trailers
} http_chunked;     // start from {0}

// Takes up to n bytes and stops after the first run of body bytes: *used were taken, of which
// (*body, *n_body) are body. E_OK: the body has ended. E_AGAIN: call again with what is left, or
// with more when nothing is. E_INVALID: broken framing.
int http_chunked_next(http_chunked *decoder, const char *data, size_t n, size_t *used,
                      const char **body, size_t *n_body);

#endif
