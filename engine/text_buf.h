// text_buf.h: a growable string of bytes, for cold paths.
//
// {0} is an empty one; the owner frees it with text_buf_free. There is no NUL behind the bytes.
// Thread: the owner's.
#ifndef TANDEM_ENGINE_TEXT_BUF_H
#define TANDEM_ENGINE_TEXT_BUF_H

#include <stddef.h>

typedef struct text_buf {
    char *data; // (capacity) owned; NULL while nothing was added
    size_t n, capacity;
} text_buf;

// Each returns E_NO_MEMORY with the buffer unchanged, or 0.
int text_buf_reserve(text_buf *buf, size_t n_more);
int text_buf_add(text_buf *buf, const char *text, size_t n);

// Appends text with every occurrence of pattern (not empty) replaced by content.
int text_buf_add_replaced(text_buf *buf, const char *text, size_t n, const char *pattern,
                          const char *content);

void text_buf_free(text_buf *buf); // also makes it empty

#endif
