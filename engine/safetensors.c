#include "engine/safetensors.h"

#include "engine/json.h"

#include <stdlib.h>
#include <string.h>

enum { LENGTH_BYTES = 8, MAX_DIMS = 64 };

static const struct {
    const char *name;
    dtype type;
    size_t bits;
} types[] = {
    {"F32", DTYPE_F32, 32},      {"BF16", DTYPE_BF16, 16},    {"F16", DTYPE_F16, 16},
    {"F64", DTYPE_COUNT, 64},    {"I64", DTYPE_COUNT, 64},    {"U64", DTYPE_COUNT, 64},
    {"C64", DTYPE_COUNT, 64},    {"I32", DTYPE_COUNT, 32},    {"U32", DTYPE_COUNT, 32},
    {"I16", DTYPE_COUNT, 16},    {"U16", DTYPE_COUNT, 16},    {"I8", DTYPE_COUNT, 8},
    {"U8", DTYPE_COUNT, 8},      {"BOOL", DTYPE_COUNT, 8},    {"F8_E4M3", DTYPE_COUNT, 8},
    {"F8_E5M2", DTYPE_COUNT, 8}, {"F8_E8M0", DTYPE_COUNT, 8}, {"F6_E2M3", DTYPE_COUNT, 6},
    {"F6_E3M2", DTYPE_COUNT, 6}, {"F4", DTYPE_COUNT, 4},
};

enum { N_TYPES = sizeof types / sizeof *types };

typedef struct parser {
    const char *path;
    size_t data_at; // bytes from the start of the file
    size_t n_bytes; // of the file
    error *err;
} parser;

static int bad_tensor(const parser *p, const char *name, const char *what) {
    return error_set(p->err, E_INVALID, "%s: tensor '%.100s': %s", p->path, name, what);
}

// Product of the dims, checked against overflow on the way to bits.
static int read_shape(const parser *p, const char *name, const json_value *shape, size_t bits,
                      safetensors_entry *out, size_t *n_bytes) {
    if (!json_is_array(shape))
        return bad_tensor(p, name, "shape is not a list");
    size_t n = 1;
    out->n_dims = 0;
    for (const json_value *v = json_first(shape); v; v = json_next(v)) {
        int64_t dim = -1;
        if (!json_as_int(v, &dim) || dim < 0)
            return bad_tensor(p, name, "shape has an entry that is not a size");
        if (out->n_dims == MAX_DIMS)
            return bad_tensor(p, name, "shape has too many dimensions");
        if (out->n_dims < TENSOR_MAX_DIMS)
            out->dims[out->n_dims] = (size_t)dim;
        out->n_dims++;
        if (__builtin_mul_overflow(n, (size_t)dim, &n))
            return bad_tensor(p, name, "shape is too large");
    }
    if (__builtin_mul_overflow(n, bits, &n))
        return bad_tensor(p, name, "shape is too large");
    if (n % 8)
        return bad_tensor(p, name, "the elements do not fill whole bytes");
    *n_bytes = n / 8;
    return E_OK;
}

static int read_range(const parser *p, const char *name, const json_value *offsets,
                      size_t shape_bytes, safetensors_entry *out) {
    const json_value *first = json_first(offsets), *second = json_next(first);
    int64_t begin = -1, end = -1;
    if (!json_is_array(offsets) || !json_as_int(first, &begin) || !json_as_int(second, &end) ||
        json_next(second) || begin < 0 || end < begin)
        return bad_tensor(p, name, "data_offsets is not a pair [begin, end]");
    size_t room = p->n_bytes - p->data_at;
    if ((uint64_t)end > room)
        return error_set(p->err, E_INVALID,
                         "%s: tensor '%.100s' ends %llu bytes beyond the end of the file: the file "
                         "is truncated; fetch it again",
                         p->path, name, (unsigned long long)((uint64_t)end - room));
    if ((uint64_t)(end - begin) != shape_bytes)
        return error_set(p->err, E_INVALID,
                         "%s: tensor '%.100s': data_offsets span %llu bytes, shape and dtype %s "
                         "need %zu",
                         p->path, name, (unsigned long long)(end - begin), out->type_name,
                         shape_bytes);
    out->begin = p->data_at + (size_t)begin;
    out->end = p->data_at + (size_t)end;
    return E_OK;
}

static int read_entry(const parser *p, const json_value *value, const char *name,
                      safetensors_entry *out) {
    const char *type = NULL;
    if (!json_is_object(value))
        return bad_tensor(p, name, "not an object");
    if (!json_as_string(json_get(value, "dtype"), &type))
        return bad_tensor(p, name, "dtype is not a string");
    size_t t = 0, shape_bytes = 0;
    while (t < N_TYPES && strcmp(type, types[t].name) != 0)
        t++;
    if (t == N_TYPES)
        return error_set(p->err, E_INVALID, "%s: tensor '%.100s': unknown dtype '%.20s'", p->path,
                         name, type);
    out->name = name;
    out->type = types[t].type;
    out->type_name = types[t].name;
    int rc = read_shape(p, name, json_get(value, "shape"), types[t].bits, out, &shape_bytes);
    if (rc == E_OK)
        rc = read_range(p, name, json_get(value, "data_offsets"), shape_bytes, out);
    return rc;
}

static int compare_ranges(const void *left, const void *right) {
    const safetensors_entry *a = left, *b = right;
    if (a->begin != b->begin)
        return a->begin < b->begin ? -1 : 1;
    return a->end < b->end ? -1 : a->end > b->end;
}

static int check_cover(const parser *p, const safetensors *table) {
    size_t at = p->data_at;
    for (size_t i = 0; i < table->n_entries; i++) {
        const safetensors_entry *e = &table->entries[i];
        if (e->begin < at)
            return error_set(p->err, E_INVALID, "%s: tensor '%.100s' overlaps tensor '%.100s'",
                             p->path, e->name, table->entries[i - 1].name);
        if (e->begin > at)
            return error_set(p->err, E_INVALID,
                             "%s: %zu bytes before tensor '%.100s' belong to no tensor", p->path,
                             e->begin - at, e->name);
        at = e->end;
    }
    if (at != p->n_bytes)
        return error_set(p->err, E_INVALID, "%s: %zu bytes at the end belong to no tensor", p->path,
                         p->n_bytes - at);
    return E_OK;
}

static int read_table(const parser *p, const json_value *root, safetensors *table) {
    size_t n = 0, names_bytes = 0;
    for (const json_value *v = json_first(root); v; v = json_next(v)) {
        names_bytes += strlen(json_key(v)) + 1;
        n++;
    }
    table->entries = calloc(n + 1, sizeof *table->entries);
    table->names = malloc(names_bytes + 1);
    if (!table->entries || !table->names)
        return error_set(p->err, E_NO_MEMORY, "%s: out of memory", p->path);
    char *name = table->names;
    for (const json_value *v = json_first(root); v; v = json_next(v)) {
        if (strcmp(json_key(v), "__metadata__") == 0)
            continue;
        size_t length = strlen(json_key(v)) + 1;
        memcpy(name, json_key(v), length);
        int rc = read_entry(p, v, name, &table->entries[table->n_entries]);
        if (rc != E_OK)
            return rc;
        table->n_entries++;
        name += length;
    }
    qsort(table->entries, table->n_entries, sizeof *table->entries, compare_ranges);
    return check_cover(p, table);
}

int safetensors_parse(const char *path, const void *bytes, size_t n_bytes, safetensors *out,
                      error *err) {
    const unsigned char *file = bytes;
    if (n_bytes < LENGTH_BYTES)
        return error_set(err, E_INVALID, "%s: %zu bytes is no safetensors file; fetch it again",
                         path, n_bytes);
    uint64_t length = 0;
    for (int i = LENGTH_BYTES - 1; i >= 0; i--)
        length = length << 8 | file[i];
    if (length > SAFETENSORS_MAX_HEADER)
        return error_set(err, E_INVALID,
                         "%s: a header of %llu bytes, at most %zu are read: not a safetensors file",
                         path, (unsigned long long)length, SAFETENSORS_MAX_HEADER);
    if (length > n_bytes - LENGTH_BYTES)
        return error_set(err, E_INVALID,
                         "%s: the header of %llu bytes ends beyond the file's %zu: the file is "
                         "truncated; fetch it again",
                         path, (unsigned long long)length, n_bytes);
    json *doc = NULL;
    safetensors table = {0};
    int rc = json_parse(path, (const char *)file + LENGTH_BYTES, (size_t)length, &doc, err);
    if (rc != E_OK)
        return rc;
    parser p = {path, LENGTH_BYTES + (size_t)length, n_bytes, err};
    if (json_is_object(json_root(doc)))
        rc = read_table(&p, json_root(doc), &table);
    else
        rc = error_set(err, E_INVALID, "%s: the header is not a JSON object", path);
    json_close(doc);
    if (rc != E_OK) {
        safetensors_free(&table);
        return rc;
    }
    *out = table;
    return E_OK;
}

void safetensors_free(safetensors *table) {
    free(table->entries);
    free(table->names);
    *table = (safetensors){0};
}
