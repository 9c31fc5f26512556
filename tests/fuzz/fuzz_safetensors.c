// Any bytes as a safetensors file: a table whose ranges lie within them, or an error line.
#include "engine/safetensors.h"

#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

static void parse(const uint8_t *file, size_t n) {
    safetensors table = {0};
    error err = {0};
    if (safetensors_parse("fuzz", file, n, &table, &err) != E_OK) {
        if (!err.code || !err.text[0])
            abort();
        return;
    }
    for (size_t i = 0; i < table.n_entries; i++) {
        const safetensors_entry *e = &table.entries[i];
        if (e->begin > e->end || e->end > n || strlen(e->name) > n)
            abort();
    }
    safetensors_free(&table);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n) {
    parse(data, n);
    // Once more with a length that fits, which random bytes seldom have: the first byte says how
    // many bytes follow the header.
    if (n < 2 || data[0] > n - 1)
        return 0;
    size_t length = n - 1 - data[0];
    uint8_t *file = malloc(8 + n);
    if (!file)
        return 0;
    for (int i = 0; i < 8; i++)
        file[i] = (uint8_t)((uint64_t)length >> 8 * i);
    memcpy(file + 8, data + 1, n - 1);
    parse(file, 8 + n - 1);
    free(file);
    return 0;
}
