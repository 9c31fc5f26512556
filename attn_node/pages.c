#include "attn_node/pages.h"

#include <assert.h>
#include <stdlib.h>

struct pages {
    size_t n_total, n_free;
    int32_t *free_list; // (n_total) the first n_free are free, taken from the end
};

int pages_open(size_t n_pages, pages **out, error *err) {
    pages *p = calloc(1, sizeof *p);
    if (p)
        p->free_list = malloc(n_pages * sizeof *p->free_list);
    if (!p || !p->free_list) {
        pages_close(p);
        return error_set(err, E_NO_MEMORY, "kv cache: no memory for a list of %zu pages", n_pages);
    }
    p->n_total = p->n_free = n_pages;
    for (size_t i = 0; i < n_pages; i++)
        p->free_list[i] = (int32_t)(n_pages - 1 - i);
    *out = p;
    return E_OK;
}

void pages_close(pages *p) {
    if (!p)
        return;
    free(p->free_list);
    free(p);
}

int32_t pages_take(pages *p) {
    return p->n_free ? p->free_list[--p->n_free] : -1;
}

void pages_give(pages *p, const int32_t *list, size_t n) {
    assert(p->n_free + n <= p->n_total);
    for (size_t i = 0; i < n; i++)
        p->free_list[p->n_free++] = list[i];
}

size_t pages_free_count(const pages *p) {
    return p->n_free;
}

size_t pages_total(const pages *p) {
    return p->n_total;
}
