// Random weights, streamed into safetensors files.
//
// Speed: each value is one of 65536 normal draws, picked by 16 bits of a xoshiro256++ state and
// already scaled and converted, so a value costs a table look-up and the disk is the limit.
#include "router/synth.h"

#include <math.h>
#include <stdlib.h>

enum { N_DRAWS = 65536, N_TABLES = 8, BUFFER_BYTES = 1 << 20 };

typedef struct item {
    model_tensor which;
    uint32_t layer, expert, shard;
    size_t begin; // bytes from the start of the shard's data
    size_t n;     // elements
} item;

typedef struct writer {
    const synth_args *args;
    const model_config *config;
    item *items; // (n_items) in the order of the files
    size_t n_items, n_shards;
    float *draws;           // (N_DRAWS) standard normal
    void *tables[N_TABLES]; // (N_DRAWS) of the type each: draws times a scale; a layer has few
    float scales[N_TABLES]; // of tables; 0: none yet
    size_t next_table;
    void *buffer; // BUFFER_BYTES
    uint64_t state[4];
    size_t done_bytes, total_bytes;
    synth_progress progress;
    void *user;
} writer;

static uint64_t rotate_left(uint64_t x, int k) {
    return x << k | x >> (64 - k);
}

// xoshiro256++ by Blackman and Vigna.
static uint64_t next_random(uint64_t s[4]) {
    uint64_t result = rotate_left(s[0] + s[3], 23) + s[0], t = s[1] << 17;
    s[2] ^= s[0];
    s[3] ^= s[1];
    s[1] ^= s[2];
    s[0] ^= s[3];
    s[2] ^= t;
    s[3] = rotate_left(s[3], 45);
    return result;
}

static void seed_random(uint64_t s[4], uint64_t seed) {
    for (int i = 0; i < 4; i++) { // splitmix64
        uint64_t z = seed += 0x9e3779b97f4a7c15u;
        z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
        z = (z ^ z >> 27) * 0x94d049bb133111ebu;
        s[i] = z ^ z >> 31;
    }
}

// Box-Muller.
static void fill_draws(writer *w) {
    for (size_t i = 0; i < N_DRAWS; i += 2) {
        double u = ((double)(next_random(w->state) >> 11) + 0.5) * 0x1p-53;
        double angle = (double)(next_random(w->state) >> 11) * 0x1p-53 * 6.283185307179586;
        double radius = sqrt(-2 * log(u));
        w->draws[i] = (float)(radius * cos(angle));
        w->draws[i + 1] = (float)(radius * sin(angle));
    }
}

// Round to nearest even; what is too large becomes infinite.
static uint16_t f32_to_f16(float value) {
    uint32_t bits, sign;
    memcpy(&bits, &value, sizeof bits);
    sign = bits >> 16 & 0x8000u;
    bits &= 0x7fffffffu;
    if (bits >= 0x47800000u)
        return (uint16_t)(sign | 0x7c00u);
    if (bits < 0x38800000u) { // subnormal: the sum with 0.5 has the step 2^-24 of f16
        float sum = fabsf(value) + 0.5f;
        memcpy(&bits, &sum, sizeof bits);
        return (uint16_t)(sign | (bits - 0x3f000000u));
    }
    bits += 0xfffu + (bits >> 13 & 1u);
    return (uint16_t)(sign | (bits - 0x38000000u) >> 13);
}

static void convert(dtype type, float value, void *array, size_t i) {
    if (type == DTYPE_F32)
        ((float *)array)[i] = value;
    else
        ((uint16_t *)array)[i] = type == DTYPE_BF16 ? f32_to_bf16(value) : f32_to_f16(value);
}

static const void *scaled_draws(writer *w, float scale) {
    for (size_t t = 0; t < N_TABLES; t++)
        if (w->scales[t] == scale)
            return w->tables[t];
    size_t t = w->next_table++ % N_TABLES;
    for (size_t i = 0; i < N_DRAWS; i++)
        convert(w->args->type, w->draws[i] * scale, w->tables[t], i);
    w->scales[t] = scale;
    return w->tables[t];
}

static void fill_random(writer *w, const void *table, size_t n) {
    const uint16_t *from16 = table;
    const uint32_t *from32 = table;
    uint16_t *to16 = w->buffer;
    uint32_t *to32 = w->buffer;
    bool wide = w->args->type == DTYPE_F32;
    for (size_t i = 0; i < n;) {
        uint64_t bits = next_random(w->state);
        for (int k = 0; k < 4 && i < n; k++, i++, bits >>= 16) {
            if (wide)
                to32[i] = from32[bits & 0xffff];
            else
                to16[i] = from16[bits & 0xffff];
        }
    }
}

static bool is_norm(model_tensor which) {
    return which == MODEL_FINAL_NORM || which == MODEL_ATTN_NORM || which == MODEL_FFN_NORM ||
           which == MODEL_Q_NORM || which == MODEL_K_NORM;
}

static void write_tensor(writer *w, const item *it, FILE *out) {
    size_t width = dtype_bytes(w->args->type), per_buffer = BUFFER_BYTES / width;
    model_tensor_spec spec;
    model_tensor_describe(w->config, it->which, it->layer, it->expert, &spec);
    bool norm = is_norm(it->which);
    const void *table = NULL;
    for (size_t i = 0; norm && i < per_buffer && i < it->n; i++)
        convert(w->args->type, 1, w->buffer, i);
    if (!norm) // a bias has no input features: its own length stands in
        table = scaled_draws(w, 1 / sqrtf((float)spec.dims[spec.n_dims - 1]));
    for (size_t left = it->n; left;) {
        size_t n = left < per_buffer ? left : per_buffer;
        if (!norm)
            fill_random(w, table, n);
        fwrite(w->buffer, width, n, out);
        left -= n;
        w->done_bytes += n * width;
        if (w->progress)
            w->progress(w->user, w->done_bytes, w->total_bytes);
    }
}

// Prints the header of a shard when out is not NULL; the result is its bytes.
static size_t print_header(const writer *w, const item *first, const item *end, FILE *out) {
    static const char *const names[] = {
        [DTYPE_F32] = "F32", [DTYPE_BF16] = "BF16", [DTYPE_F16] = "F16"};
    char line[320];
    size_t n = 0, width = dtype_bytes(w->args->type);
    for (const item *it = first; it < end; it++) {
        model_tensor_spec spec;
        model_tensor_describe(w->config, it->which, it->layer, it->expert, &spec);
        char shape[48];
        snprintf(shape, sizeof shape, spec.n_dims == 2 ? "%zu,%zu" : "%zu", spec.dims[0],
                 spec.dims[1]);
        n += (size_t)snprintf(line, sizeof line,
                              "%s\"%s\":{\"dtype\":\"%s\",\"shape\":[%s],\"data_offsets\":"
                              "[%zu,%zu]}",
                              it == first ? "{\"__metadata__\":{\"format\":\"pt\"}," : ",",
                              spec.name, names[w->args->type], shape, it->begin,
                              it->begin + it->n * width);
        if (out)
            fputs(line, out);
    }
    return n;
}

static void shard_name(const writer *w, size_t shard, char name[64]) {
    if (w->n_shards == 1)
        snprintf(name, 64, "model.safetensors");
    else
        snprintf(name, 64, "model-%05zu-of-%05zu.safetensors", shard + 1, w->n_shards);
}

static int write_shard(writer *w, size_t shard, const item *first, const item *end, error *err) {
    char name[64];
    FILE *out = NULL;
    shard_name(w, shard, name);
    int rc = synth_create(w->args, name, &out, err);
    if (rc != E_OK)
        return rc;
    // Blanks after the closing brace align the data to 8 bytes.
    size_t n = print_header(w, first, end, NULL) + 1, padded = (n + 7) & ~(size_t)7;
    for (int i = 0; i < 8; i++)
        fputc((int)((uint64_t)padded >> 8 * i & 0xff), out);
    print_header(w, first, end, out);
    fprintf(out, "}%*s", (int)(padded - n), "");
    for (const item *it = first; it < end && !ferror(out); it++)
        write_tensor(w, it, out);
    return synth_finish(w->args, name, out, err);
}

static int write_index(writer *w, error *err) {
    static const char file[] = "model.safetensors.index.json";
    FILE *out = NULL;
    int rc = synth_create(w->args, file, &out, err);
    if (rc != E_OK)
        return rc;
    fprintf(out, "{\n  \"metadata\": {\"total_size\": %zu},\n  \"weight_map\": {", w->total_bytes);
    for (const item *it = w->items; it < w->items + w->n_items; it++) {
        model_tensor_spec spec;
        char name[64];
        model_tensor_describe(w->config, it->which, it->layer, it->expert, &spec);
        shard_name(w, it->shard, name);
        fprintf(out, "%s\n    \"%s\": \"%s\"", it == w->items ? "" : ",", spec.name, name);
    }
    fprintf(out, "\n  }\n}\n");
    return synth_finish(w->args, file, out, err);
}

static void add_item(writer *w, model_tensor which, size_t layer, size_t expert) {
    model_tensor_spec spec;
    model_tensor_describe(w->config, which, layer, expert, &spec);
    if (!spec.n_dims)
        return;
    const item *last = w->n_items ? &w->items[w->n_items - 1] : NULL;
    size_t width = dtype_bytes(w->args->type);
    size_t n = spec.dims[0] * (spec.n_dims == 2 ? spec.dims[1] : 1);
    item it = {which, (uint32_t)layer, (uint32_t)expert, last ? last->shard : 0, 0, n};
    if (last)
        it.begin = last->begin + last->n * width;
    if (last && w->args->shard_bytes && it.begin + n * width > w->args->shard_bytes) {
        it.shard++;
        it.begin = 0;
    }
    w->n_shards = it.shard + 1;
    w->total_bytes += n * width;
    w->items[w->n_items++] = it;
}

// Layer by layer, as a forward pass meets them.
static void list_items(writer *w) {
    const model_config *c = w->config;
    add_item(w, MODEL_EMBED, 0, 0);
    for (size_t layer = 0; layer < c->n_layers; layer++) {
        for (int which = MODEL_ATTN_NORM; which <= MODEL_ROUTER; which++)
            add_item(w, (model_tensor)which, layer, 0);
        for (size_t expert = 0; expert < c->n_experts; expert++)
            for (int which = MODEL_EXPERT_GATE; which <= MODEL_EXPERT_DOWN; which++)
                add_item(w, (model_tensor)which, layer, expert);
        for (int which = MODEL_SHARED_GATE; which <= MODEL_SHARED_ROUTER; which++)
            add_item(w, (model_tensor)which, layer, 0);
    }
    add_item(w, MODEL_FINAL_NORM, 0, 0);
    add_item(w, MODEL_HEAD, 0, 0);
}

int synth_write_weights(const synth_args *args, const model_config *config, synth_progress progress,
                        void *user, error *err) {
    writer w = {.args = args, .config = config, .progress = progress, .user = user};
    size_t most = 3 + config->n_layers * (MODEL_TENSOR_COUNT + 3 * config->n_experts);
    int rc = E_OK;
    w.items = calloc(most, sizeof *w.items);
    w.draws = malloc(N_DRAWS * sizeof *w.draws);
    char *tables = malloc(N_TABLES * N_DRAWS * sizeof(float));
    w.buffer = malloc(BUFFER_BYTES);
    if (!w.items || !w.draws || !tables || !w.buffer) {
        rc = error_set(err, E_NO_MEMORY, "%s: out of memory", args->dir);
        goto done;
    }
    for (size_t t = 0; t < N_TABLES; t++)
        w.tables[t] = tables + t * N_DRAWS * sizeof(float);
    seed_random(w.state, args->seed);
    fill_draws(&w);
    list_items(&w);
    const item *first = w.items, *end = w.items + w.n_items;
    for (size_t shard = 0; shard < w.n_shards && rc == E_OK; shard++) {
        const item *next = first;
        while (next < end && next->shard == shard)
            next++;
        rc = write_shard(&w, shard, first, next, err);
        first = next;
    }
    if (rc == E_OK && w.n_shards > 1)
        rc = write_index(&w, err);
done:
    free(w.buffer);
    free(tables);
    free(w.draws);
    free(w.items);
    return rc;
}
