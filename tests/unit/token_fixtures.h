// token_fixtures.h: reading the fixtures of the tokenizer and chat tests. Include it behind
// cmocka.h.
#ifndef TANDEM_TESTS_TOKEN_FIXTURES_H
#define TANDEM_TESTS_TOKEN_FIXTURES_H

#include "engine/json.h"
#include "engine/tokenizer.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct json_lines {
    json **docs; // (n)
    size_t n;
} json_lines;

// Reads TESTS_DIR/fixtures/SUB/FILE.
static inline json_lines read_lines(const char *sub, const char *file) {
    char path[512];
    snprintf(path, sizeof path, TESTS_DIR "/fixtures/%s/%s", sub, file);
    FILE *in = fopen(path, "rb");
    if (!in)
        fail_msg("%s is missing", path);
    json_lines lines = {0};
    char *line = NULL;
    size_t capacity = 0;
    for (ssize_t n; (n = getline(&line, &capacity, in)) > 0;) {
        error err;
        lines.docs = realloc(lines.docs, (lines.n + 1) * sizeof *lines.docs);
        if (json_parse(path, line, (size_t)n, &lines.docs[lines.n++], &err) != E_OK)
            fail_msg("%s", err.text);
    }
    free(line);
    fclose(in);
    assert_true(lines.n > 0);
    return lines;
}

static inline void free_lines(json_lines *lines) {
    for (size_t i = 0; i < lines->n; i++)
        json_close(lines->docs[i]);
    free(lines->docs);
}

static inline bool ids_of(const json *row, const char *key, token_ids *out) {
    const json_value *list = json_get(json_root(row), key);
    out->n = 0;
    for (const json_value *v = json_first(list); v; v = json_next(v)) {
        int64_t id = -1;
        assert_true(json_as_int(v, &id));
        assert_int_equal(token_ids_push(out, (int32_t)id), E_OK);
    }
    return list != NULL;
}

static inline tokenizer *open_style(const char *style) {
    char path[512];
    tokenizer *t = NULL;
    error err = {0};
    snprintf(path, sizeof path, TESTS_DIR "/fixtures/tokenizers/%s", style);
    if (tokenizer_open(path, &t, &err) != E_OK)
        fail_msg("%s", err.text);
    return t;
}

static inline void check_ids(const char *style, const char *name, const token_ids *got,
                             const token_ids *want) {
    size_t i = 0;
    while (i < got->n && i < want->n && got->ids[i] == want->ids[i])
        i++;
    if (i < got->n || i < want->n)
        fail_msg("%s: case '%s': at token %zu: %d, expected %d (%zu tokens, expected %zu)", style,
                 name, i, i < got->n ? got->ids[i] : -1, i < want->n ? want->ids[i] : -1, got->n,
                 want->n);
}

#endif
