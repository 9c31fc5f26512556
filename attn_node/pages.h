// pages.h: free list of KV pages (16 tokens each); numbers only, the memory is the backend's.
// Thread: the worker's. pages_take never allocates memory.
#ifndef TANDEM_ATTN_NODE_PAGES_H
#define TANDEM_ATTN_NODE_PAGES_H

#include "engine/status.h"

#include <stdint.h>

typedef struct pages pages;

int pages_open(size_t n_pages, pages **out, error *err);
void pages_close(pages *p);
int32_t pages_take(pages *p); // -1: none free
void pages_give(pages *p, const int32_t *list, size_t n);
size_t pages_free_count(const pages *p);
size_t pages_total(const pages *p);

#endif
