#include "engine/text_buf.h"

#include "engine/status.h"

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

int text_buf_reserve(text_buf *buf, size_t n_more) {
    if (n_more <= buf->capacity - buf->n)
        return E_OK;
    size_t capacity = buf->capacity ? buf->capacity : 64;
    if (n_more > SIZE_MAX / 4 - buf->n)
        return E_NO_MEMORY;
    while (capacity < buf->n + n_more)
        capacity *= 2;
    char *data = realloc(buf->data, capacity);
    if (!data)
        return E_NO_MEMORY;
    buf->data = data;
    buf->capacity = capacity;
    return E_OK;
}

int text_buf_add(text_buf *buf, const char *text, size_t n) {
    int rc = n ? text_buf_reserve(buf, n) : E_OK;
    if (rc != E_OK || n == 0)
        return rc;
    memcpy(buf->data + buf->n, text, n);
    buf->n += n;
    return E_OK;
}

int text_buf_add_replaced(text_buf *buf, const char *text, size_t n, const char *pattern,
                          const char *content) {
    size_t n_pattern = strlen(pattern), n_content = strlen(content), from = 0;
    int rc = E_OK;
    while (n > 0 && rc == E_OK) { // without bytes text may be NULL
        const char *hit = memmem(text + from, n - from, pattern, n_pattern);
        size_t end = hit ? (size_t)(hit - text) : n;
        rc = text_buf_add(buf, text + from, end - from);
        if (!hit || rc != E_OK)
            break;
        rc = text_buf_add(buf, content, n_content);
        from = end + n_pattern;
    }
    return rc;
}

void text_buf_free(text_buf *buf) {
    free(buf->data);
    *buf = (text_buf){0};
}
