// http_head.h: the head of an HTTP/1.x request (request line and headers), checked strictly.
//
// llhttp reads the grammar; what it lets through in some versions is refused here: a bare LF or CR,
// obs-fold, control bytes, a missing or second Host, a second Content-Length, Content-Length beside
// Transfer-Encoding, any coding but chunked.
// Ownership: everything in http_head points into the text given to http_head_parse.
// Thread: any.
#ifndef TANDEM_ROUTER_HTTP_HEAD_H
#define TANDEM_ROUTER_HTTP_HEAD_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { HTTP_MAX_HEADERS = 100 };

typedef struct http_header {
    char *name, *value;
} http_header;

typedef struct http_head {
    const char *method; // static
    char *path;         // percent-decoded
    char *query;        // as sent, "" when there is none
    bool http_1_1, keep_alive, chunked, expect_continue;
    uint64_t content_length; // 0 when absent or chunked
    size_t n_headers;
    http_header headers[HTTP_MAX_HEADERS];
} http_head;

// Looks for the end of the head in text, from *position (kept by the caller between calls, 0 at
// first). E_OK: *position is the head's length. E_AGAIN: more bytes are needed. E_INVALID: no
// request can begin like this.
int http_head_scan(const char *text, size_t n, size_t *position);

// Parses a whole head of n bytes (with its empty line) in place. Returns 0, or the status to answer
// with *why a static text.
int http_head_parse(char *text, size_t n, http_head *out, const char **why);

// The first header of that name (any case), or NULL.
const char *http_head_find(const http_head *head, const char *name);

#endif
