#include "router/http_chunked.h"

#include "engine/status.h"

enum { MAX_SIZE_DIGITS = 15, MAX_EXTENSION_BYTES = 256, MAX_TRAILER_BYTES = 8192 };

enum {
    AT_SIZE,
    AT_EXTENSION,
    AT_SIZE_LF,
    AT_DATA,
    AT_DATA_CR,
    AT_DATA_LF,
    AT_TRAILER_START,
    AT_TRAILER,
    AT_TRAILER_LF,
    AT_END_LF
};

static int hex_digit(char c) {
    if (c >= '0' && c <= '9')
        return c - '0';
    if ((c | 0x20) >= 'a' && (c | 0x20) <= 'f')
        return (c | 0x20) - 'a' + 10;
    return -1;
}

static int step_size(http_chunked *d, char c) {
    int digit = hex_digit(c);
    if (digit >= 0) {
        if (++d->n_digits > MAX_SIZE_DIGITS)
            return E_INVALID;
        d->left = d->left * 16 + (uint64_t)digit;
        return E_AGAIN;
    }
    if (d->n_digits == 0 || (c != '\r' && c != ';'))
        return E_INVALID;
    d->state = c == '\r' ? AT_SIZE_LF : AT_EXTENSION;
    d->n_extra = 0;
    return E_AGAIN;
}

static int step_text(http_chunked *d, char c, size_t max_bytes, int at_cr) {
    unsigned char byte = (unsigned char)c;
    if (c == '\r') {
        d->state = at_cr;
        return E_AGAIN;
    }
    if ((byte < 0x20 && c != '\t') || byte == 0x7f || ++d->n_extra > max_bytes)
        return E_INVALID;
    return E_AGAIN;
}

// Everything but data, one byte at a time.
static int step(http_chunked *d, char c) {
    switch (d->state) {
    case AT_SIZE:
        return step_size(d, c);
    case AT_EXTENSION:
        return step_text(d, c, MAX_EXTENSION_BYTES, AT_SIZE_LF);
    case AT_SIZE_LF:
        d->state = d->left ? AT_DATA : AT_TRAILER_START;
        d->n_digits = 0;
        d->n_extra = 0;
        return c == '\n' ? E_AGAIN : E_INVALID;
    case AT_DATA_CR:
        d->state = AT_DATA_LF;
        return c == '\r' ? E_AGAIN : E_INVALID;
    case AT_DATA_LF:
        d->state = AT_SIZE;
        return c == '\n' ? E_AGAIN : E_INVALID;
    case AT_TRAILER_START:
        if (c == ' ' || c == '\t')
            return E_INVALID;
        if (c == '\r') {
            d->state = AT_END_LF;
            return E_AGAIN;
        }
        d->state = AT_TRAILER;
        return step_text(d, c, MAX_TRAILER_BYTES, AT_TRAILER_LF);
    case AT_TRAILER:
        return step_text(d, c, MAX_TRAILER_BYTES, AT_TRAILER_LF);
    case AT_TRAILER_LF:
        d->state = AT_TRAILER_START;
        return c == '\n' ? E_AGAIN : E_INVALID;
    case AT_END_LF:
        return c == '\n' ? E_OK : E_INVALID;
    }
    return E_INVALID;
}

int http_chunked_next(http_chunked *d, const char *data, size_t n, size_t *used, const char **body,
                      size_t *n_body) {
    *n_body = 0;
    for (*used = 0; *used < n;) {
        if (d->state == AT_DATA) {
            size_t room = n - *used;
            *n_body = d->left < room ? (size_t)d->left : room;
            *body = data + *used;
            *used += *n_body;
            d->left -= *n_body;
            if (d->left == 0)
                d->state = AT_DATA_CR;
            return E_AGAIN;
        }
        int rc = step(d, data[(*used)++]);
        if (rc != E_AGAIN)
            return rc;
    }
    return E_AGAIN;
}
