#include "tests/support/golden.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char magic[8] = "TANDEMG1";
enum { MAX_PROMPTS = 64, MAX_BYTES = 16 << 20 };

const char *const golden_names[] = {
    "olmoe_f32",
    "olmoe_clip_tied_bf16",
    "qwen2_f16",
    "qwen2_sharded_bf16",
    "qwen2_no_bias_f32",
    "qwen3_tied_bf16",
    "qwen3_llama3_rope_f32",
    "mixtral_linear_rope_f16",
    "mixtral_window_bf16",
};
const size_t n_golden_names = sizeof golden_names / sizeof *golden_names;

static int read_words(const char *path, uint32_t **words, size_t *n, error *err) {
    char found[sizeof magic];
    FILE *file = fopen(path, "rb");
    if (!file)
        return error_set(err, E_NOT_FOUND, "%s: cannot be opened", path);
    int rc = E_OK;
    uint32_t *got = malloc(MAX_BYTES);
    if (!got)
        rc = error_set(err, E_NO_MEMORY, "%s: out of memory", path);
    else if (fread(found, sizeof found, 1, file) != 1 || memcmp(found, magic, sizeof magic) != 0)
        rc = error_set(err, E_INVALID, "%s: not a golden file", path);
    else
        *n = fread(got, sizeof *got, MAX_BYTES / sizeof *got, file);
    if (rc == E_OK && (ferror(file) || !feof(file)))
        rc = error_set(err, E_IO, "%s: not read to its end", path);
    fclose(file);
    if (rc == E_OK)
        *words = got;
    else
        free(got);
    return rc;
}

static int place_prompts(golden *g, const uint32_t *words, size_t n) {
    size_t at = 3;
    for (size_t i = 0; i < g->n_prompts; i++) {
        if (at >= n || words[at] > n)
            return E_INVALID;
        size_t n_tokens = words[at++];
        if (n - at < n_tokens + n_tokens * g->vocab + g->n_greedy)
            return E_INVALID;
        golden_prompt *p = &g->prompts[i];
        p->n_tokens = n_tokens;
        p->ids = (const int32_t *)(words + at);
        p->logits = (const float *)(const void *)(words + at + n_tokens);
        at += n_tokens + n_tokens * g->vocab;
        p->greedy = (const int32_t *)(words + at);
        at += g->n_greedy;
    }
    return at == n ? E_OK : E_INVALID;
}

int golden_open(const char *dir, golden *out, error *err) {
    char path[4096];
    uint32_t *words = NULL;
    size_t n = 0;
    snprintf(path, sizeof path, "%s/golden.bin", dir);
    int rc = read_words(path, &words, &n, err);
    if (rc != E_OK)
        return rc;
    golden g = {.words = words};
    if (n < 3 || words[0] > MAX_PROMPTS || words[1] > MAX_BYTES || words[2] > n) {
        rc = error_set(err, E_INVALID, "%s: sizes that cannot be", path);
        goto fail;
    }
    g.n_prompts = words[0];
    g.vocab = words[1];
    g.n_greedy = words[2];
    g.prompts = calloc(g.n_prompts + 1, sizeof *g.prompts);
    rc = g.prompts ? place_prompts(&g, words, n) : E_NO_MEMORY;
    if (rc == E_OK) {
        *out = g;
        return E_OK;
    }
    error_set(err, rc, "%s: %s", path, status_text(rc));
fail:
    golden_close(&g);
    return rc;
}

void golden_close(golden *g) {
    free(g->prompts);
    free(g->words);
    *g = (golden){0};
}

double golden_relative_error(const float *logits, const float *reference, size_t n) {
    double difference = 0, norm = 0;
    for (size_t i = 0; i < n; i++) {
        double d = (double)logits[i] - (double)reference[i];
        difference += d * d;
        norm += (double)reference[i] * (double)reference[i];
    }
    return sqrt(difference / norm);
}
