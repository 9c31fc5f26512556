#include "engine/weights.h"

#include "engine/safetensors.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define SINGLE_NAME "model.safetensors"
#define INDEX_NAME "model.safetensors.index.json"

enum { PATH_BYTES = 4096, INDEX_MAX_BYTES = 64 << 20 };

typedef struct shard {
    char *path;       // owned
    const char *file; // within path
    void *map;        // whole file, read-only
    size_t map_bytes;
    safetensors table;
} shard;

typedef struct slot {
    const safetensors_entry *entry; // NULL: free
    uint32_t shard;
} slot;

struct weights {
    char *dir;     // owned
    shard *shards; // (n_shards)
    size_t n_shards;
    slot *slots; // open-addressed by the hash of the name; n_slots is a power of two
    size_t n_slots;
    size_t total_bytes;
};

static uint64_t hash_name(const char *name) {
    uint64_t hash = 0xcbf29ce484222325u; // FNV-1a
    for (; *name; name++)
        hash = (hash ^ (uint8_t)*name) * 0x100000001b3u;
    return hash ^ hash >> 29;
}

// The slot of a name, or the free one where it would go.
static slot *find_slot(const weights *w, const char *name) {
    size_t i = hash_name(name) & (w->n_slots - 1);
    while (w->slots[i].entry && strcmp(w->slots[i].entry->name, name) != 0)
        i = (i + 1) & (w->n_slots - 1);
    return &w->slots[i];
}

static size_t entry_bytes(const safetensors_entry *entry) {
    return entry->end - entry->begin;
}

static int map_file(const char *path, void **map, size_t *n_bytes, error *err) {
    int rc = E_OK;
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK); // a FIFO must not hold us up
    if (fd < 0)
        return error_set(err, errno == ENOENT ? E_NOT_FOUND : E_IO, "%s: %s", path,
                         strerror(errno));
    struct stat info;
    if (fstat(fd, &info) != 0 || !S_ISREG(info.st_mode)) {
        rc = error_set(err, E_IO, "%s: not a regular file", path);
        goto close_fd;
    }
    if (info.st_size <= 0) {
        rc = error_set(err, E_INVALID, "%s: the file is empty; fetch it again", path);
        goto close_fd;
    }
    void *got = mmap(NULL, (size_t)info.st_size, PROT_READ, MAP_SHARED, fd, 0);
    if (got == MAP_FAILED) {
        rc = error_set(err, E_IO, "%s: cannot be mapped: %s", path, strerror(errno));
        goto close_fd;
    }
    *map = got;
    *n_bytes = (size_t)info.st_size;
close_fd:
    close(fd);
    return rc;
}

static int open_shard(const char *dir, const char *file, shard *out, error *err) {
    char path[PATH_BYTES];
    int n = snprintf(path, sizeof path, "%s/%s", dir, file);
    if (n < 0 || (size_t)n >= sizeof path)
        return error_set(err, E_TOO_LARGE, "%.200s...: the path is too long", dir);
    int rc = map_file(path, &out->map, &out->map_bytes, err);
    if (rc != E_OK)
        return rc;
    out->path = strdup(path);
    if (!out->path)
        return error_set(err, E_NO_MEMORY, "%s: out of memory", path);
    out->file = out->path + strlen(dir) + 1;
    rc = safetensors_parse(path, out->map, out->map_bytes, &out->table, err);
    madvise(out->map, out->map_bytes, MADV_DONTNEED); // the header's pages are not read again
    return rc;
}

static void close_shard(shard *s) {
    safetensors_free(&s->table);
    if (s->map)
        munmap(s->map, s->map_bytes);
    free(s->path);
}

static int build_table(weights *w, error *err) {
    size_t n = 0, size = 16;
    for (size_t s = 0; s < w->n_shards; s++)
        n += w->shards[s].table.n_entries;
    while (size < 2 * n)
        size *= 2;
    w->slots = calloc(size, sizeof *w->slots);
    if (!w->slots)
        return error_set(err, E_NO_MEMORY, "%s: out of memory", w->dir);
    w->n_slots = size;
    for (size_t s = 0; s < w->n_shards; s++) {
        const safetensors *table = &w->shards[s].table;
        for (size_t i = 0; i < table->n_entries; i++) {
            const safetensors_entry *entry = &table->entries[i];
            slot *at = find_slot(w, entry->name);
            if (at->entry)
                return error_set(err, E_INVALID, "%s: tensor '%.100s' is also in %s",
                                 w->shards[s].path, entry->name, w->shards[at->shard].path);
            *at = (slot){entry, (uint32_t)s};
            w->total_bytes += entry_bytes(entry);
        }
    }
    return E_OK;
}

// A shard of the index is a file of the same directory: a name that could lead elsewhere is not.
static bool is_plain_name(const char *file) {
    return *file && *file != '.' && !strchr(file, '/') && strlen(file) < 256;
}

static const shard *find_shard(const weights *w, const char *file, size_t *hint) {
    for (size_t i = 0; i < w->n_shards; i++) {
        size_t s = (*hint + i) % w->n_shards; // names come grouped by file
        if (strcmp(w->shards[s].file, file) == 0) {
            *hint = s;
            return &w->shards[s];
        }
    }
    return NULL;
}

static int open_indexed(weights *w, const json *index, const json_value *map, error *err) {
    size_t hint = 0;
    w->shards = calloc(WEIGHTS_MAX_SHARDS, sizeof *w->shards);
    if (!w->shards)
        return error_set(err, E_NO_MEMORY, "%s: out of memory", w->dir);
    for (const json_value *v = json_first(map); v; v = json_next(v)) {
        const char *file = NULL;
        if (!json_as_string(v, &file) || !is_plain_name(file))
            return error_set(err, E_INVALID,
                             "%s: weight_map: tensor '%.100s': expected a file name without a path",
                             json_name(index), json_key(v));
        if (find_shard(w, file, &hint))
            continue;
        if (w->n_shards == WEIGHTS_MAX_SHARDS)
            return error_set(err, E_TOO_LARGE, "%s: weight_map: more than %d files",
                             json_name(index), WEIGHTS_MAX_SHARDS);
        int rc = open_shard(w->dir, file, &w->shards[w->n_shards], err);
        w->n_shards++;
        if (rc == E_NOT_FOUND)
            return error_set(err, rc, "%s/%s: no such file, but %s names it for tensor '%.100s'",
                             w->dir, file, INDEX_NAME, json_key(v));
        if (rc != E_OK)
            return rc;
    }
    int rc = build_table(w, err);
    for (const json_value *v = json_first(map); v && rc == E_OK; v = json_next(v)) {
        const char *file = "";
        json_as_string(v, &file);
        const slot *at = find_slot(w, json_key(v));
        if (!at->entry || strcmp(w->shards[at->shard].file, file) != 0)
            rc = error_set(err, E_INVALID, "%s/%s: tensor '%.100s' is not in it, but %s says so",
                           w->dir, file, json_key(v), INDEX_NAME);
    }
    return rc;
}

static int open_index(weights *w, error *err) {
    char path[PATH_BYTES];
    int n = snprintf(path, sizeof path, "%s/" INDEX_NAME, w->dir);
    if (n < 0 || (size_t)n >= sizeof path)
        return error_set(err, E_TOO_LARGE, "%.200s...: the path is too long", w->dir);
    json *index = NULL;
    const json_value *map = NULL;
    int rc = json_open(path, INDEX_MAX_BYTES, &index, err);
    if (rc == E_NOT_FOUND)
        return error_set(err, rc,
                         "%s: neither " SINGLE_NAME " nor " INDEX_NAME
                         "; convert the model to safetensors",
                         w->dir);
    if (rc != E_OK)
        return rc;
    rc = json_need_object(index, json_root(index), "weight_map", &map, err);
    if (rc == E_OK)
        rc = open_indexed(w, index, map, err);
    json_close(index);
    return rc;
}

int weights_open(const char *dir, weights **out, error *err) {
    weights *w = calloc(1, sizeof *w);
    if (!w || !(w->dir = strdup(dir)) || !(w->shards = calloc(1, sizeof *w->shards))) {
        weights_close(w);
        return error_set(err, E_NO_MEMORY, "%s: out of memory", dir);
    }
    int rc = open_shard(dir, SINGLE_NAME, w->shards, err);
    if (rc == E_NOT_FOUND) {
        free(w->shards);
        w->shards = NULL;
        rc = open_index(w, err);
    } else {
        w->n_shards = 1;
        if (rc == E_OK)
            rc = build_table(w, err);
    }
    if (rc != E_OK) {
        weights_close(w);
        return rc;
    }
    *out = w;
    return E_OK;
}

void weights_close(weights *w) {
    if (!w)
        return;
    for (size_t s = 0; s < w->n_shards; s++)
        close_shard(&w->shards[s]);
    free(w->shards);
    free(w->slots);
    free(w->dir);
    free(w);
}

static void format_dims(char *text, size_t n, int n_dims, const size_t *dims) {
    size_t at = (size_t)snprintf(text, n, "[");
    for (int i = 0; i < n_dims && i < TENSOR_MAX_DIMS && at < n; i++)
        at += (size_t)snprintf(text + at, n - at, "%s%zu", i ? ", " : "", dims[i]);
    if (at < n)
        snprintf(text + at, n - at, n_dims > TENSOR_MAX_DIMS ? ", ...]" : "]");
}

int weights_get(weights *w, const model_tensor_spec *spec, tensor_view *out, error *err) {
    if (!spec->n_dims)
        return error_set(err, E_NOT_FOUND, "%s: this model has no such tensor", w->dir);
    const slot *at = find_slot(w, spec->name);
    const safetensors_entry *entry = at->entry;
    if (!entry)
        return error_set(err, E_NOT_FOUND, "%s: tensor '%s' is missing", w->dir, spec->name);
    const shard *s = &w->shards[at->shard];
    if (entry->type == DTYPE_COUNT)
        return error_set(err, E_INVALID, "%s: tensor '%s' has type %s, expected BF16, F16 or F32",
                         s->path, spec->name, entry->type_name);
    if (entry->n_dims != spec->n_dims ||
        memcmp(entry->dims, spec->dims, (size_t)spec->n_dims * sizeof *spec->dims) != 0) {
        char found[96], wanted[96];
        format_dims(found, sizeof found, entry->n_dims, entry->dims);
        format_dims(wanted, sizeof wanted, spec->n_dims, spec->dims);
        return error_set(err, E_INVALID, "%s: tensor '%s' has shape %s, config.json expects %s",
                         s->path, spec->name, found, wanted);
    }
    *out = (tensor_view){(const char *)s->map + entry->begin, entry->type, entry->n_dims, {0}};
    memcpy(out->dims, entry->dims, (size_t)entry->n_dims * sizeof *out->dims);
    return E_OK;
}

void weights_release(weights *w, const tensor_view *view) {
    (void)w;
    size_t bytes = dtype_bytes(view->type);
    for (int i = 0; i < view->n_dims; i++)
        bytes *= view->dims[i];
    // Outward to whole pages: a clean page of a file that a neighbour still needs comes back with
    // its next touch.
    uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);
    uintptr_t begin = (uintptr_t)view->data & ~(page - 1);
    uintptr_t end = ((uintptr_t)view->data + bytes + page - 1) & ~(page - 1);
    madvise((void *)begin, end - begin, MADV_DONTNEED);
}

int weights_check_model(weights *w, const model_config *config, error *err) {
    for (int which = 0; which < MODEL_TENSOR_COUNT; which++) {
        size_t n_layers, n_experts;
        model_tensor_counts(config, (model_tensor)which, &n_layers, &n_experts);
        for (size_t layer = 0; layer < n_layers; layer++) {
            for (size_t expert = 0; expert < n_experts; expert++) {
                model_tensor_spec spec;
                tensor_view view;
                model_tensor_describe(config, (model_tensor)which, layer, expert, &spec);
                int rc = weights_get(w, &spec, &view, err);
                if (rc != E_OK)
                    return rc;
            }
        }
    }
    return E_OK;
}

size_t weights_total_bytes(const weights *w) {
    return w->total_bytes;
}
