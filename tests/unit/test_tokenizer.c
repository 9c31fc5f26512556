// Ids and texts equal to those of the tokenizers library, on fixtures that
// tests/fixtures/make_tokenizers.py writes; and what is refused.
#include "engine/tokenizer_internal.h"
#include "engine/utf8.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "tests/unit/token_fixtures.h"

static const char *const styles[] = {
    "gpt2",     "llama3",    "qwen2",     "cl100k", "o200k",
    "deepseek", "olmoe",     "starcoder", "llama2", "llama2_normalized",
    "mistral",  "metaspace", "misc",
};
#define N_STYLES (sizeof styles / sizeof *styles)

// --- fixtures ------------------------------------------------------------------------------------

static json_lines read_style(const char *style, const char *file) {
    char sub[64];
    snprintf(sub, sizeof sub, "tokenizers/%s", style);
    return read_lines(sub, file);
}

// The bytes of a hex string of a row; NULL when the row has none. For free().
static char *hex_of(const json *row, const char *key, size_t *n) {
    const char *hex;
    if (!json_as_string(json_get(json_root(row), key), &hex))
        return NULL;
    *n = strlen(hex) / 2;
    char *bytes = malloc(*n + 1);
    for (size_t i = 0; i < *n; i++) {
        unsigned byte;
        assert_int_equal(sscanf(hex + 2 * i, "%2x", &byte), 1);
        bytes[i] = (char)byte;
    }
    bytes[*n] = '\0';
    return bytes;
}

static void check_text(const char *style, const char *name, const char *got, size_t n_got,
                       const char *want, size_t n_want) {
    if (n_got != n_want || memcmp(got, want, n_got) != 0)
        fail_msg("%s: case '%s': text '%.*s', expected '%.*s'", style, name, (int)n_got, got,
                 (int)n_want, want);
}

// --- against the library -------------------------------------------------------------------------

// Decodes as a whole and as a stream; both must be the expected text, each piece whole UTF-8.
static void check_decode(const tokenizer *t, const char *style, const char *name,
                         const token_ids *ids, bool skip, const char *want, size_t n_want) {
    char *whole = NULL;
    size_t n_whole, n;
    const char *piece;
    error err = {0};
    assert_int_equal(tokenizer_decode(t, ids->ids, ids->n, skip, &whole, &n_whole, &err), E_OK);
    check_text(style, name, whole, n_whole, want, n_want);
    detok *d;
    text_buf streamed = {0};
    assert_int_equal(detok_open(t, skip, &d), E_OK);
    for (size_t i = 0; i <= ids->n; i++) {
        int rc = i < ids->n ? detok_push(d, ids->ids[i], &piece, &n) : detok_flush(d, &piece, &n);
        assert_int_equal(rc, E_OK);
        assert_true(utf8_is_valid(piece, n));
        assert_int_equal(text_buf_add(&streamed, piece, n), E_OK);
    }
    check_text(style, name, streamed.n ? streamed.data : "", streamed.n, whole, n_whole);
    detok_close(d);
    text_buf_free(&streamed);
    free(whole);
}

static void check_case(const tokenizer *t, const char *style, const json *corpus_row,
                       const json *row) {
    const char *name = "";
    size_t n, n_text;
    token_ids got = {0}, want = {0};
    error err = {0};
    json_as_string(json_get(json_root(corpus_row), "name"), &name);
    char *bytes = hex_of(corpus_row, "hex", &n);
    if (tokenizer_encode(t, bytes, n, false, true, &got, &err) != E_OK)
        fail_msg("%s: case '%s': %s", style, name, err.text);
    ids_of(row, "ids", &want);
    check_ids(style, name, &got, &want);
    char *text = hex_of(row, "text", &n_text);
    if (!text) { // decodes to itself
        n_text = utf8_repaired_bytes(bytes, n);
        text = malloc(n_text + 1);
        utf8_repair(bytes, n, text);
    }
    check_decode(t, style, name, &want, false, text, n_text);
    size_t n_bare = n_text;
    char *bare = hex_of(row, "bare", &n_bare);
    check_decode(t, style, name, &want, true, bare ? bare : text, n_bare);
    if (!ids_of(row, "plain", &want))
        ids_of(row, "ids", &want);
    got.n = 0;
    assert_int_equal(tokenizer_encode(t, bytes, n, false, false, &got, &err), E_OK);
    check_ids(style, name, &got, &want);
    free(bytes);
    free(text);
    free(bare);
    token_ids_free(&got);
    token_ids_free(&want);
}

static void test_corpus(void **state) {
    (void)state;
    json_lines corpus = read_lines("tokenizers", "corpus.jsonl");
    for (size_t s = 0; s < N_STYLES; s++) {
        tokenizer *t = open_style(styles[s]);
        json_lines rows = read_style(styles[s], "expected.jsonl");
        assert_int_equal(rows.n, corpus.n);
        for (size_t i = 0; i < rows.n; i++)
            check_case(t, styles[s], corpus.docs[i], rows.docs[i]);
        free_lines(&rows);
        tokenizer_close(t);
    }
    free_lines(&corpus);
}

static void test_random_ids_decode(void **state) {
    (void)state;
    for (size_t s = 0; s < N_STYLES; s++) {
        tokenizer *t = open_style(styles[s]);
        json_lines rows = read_style(styles[s], "decode.jsonl");
        token_ids ids = {0};
        for (size_t i = 0; i < rows.n; i++) {
            size_t n_text, n_bare;
            char *text = hex_of(rows.docs[i], "text", &n_text);
            char *bare = hex_of(rows.docs[i], "bare", &n_bare);
            ids_of(rows.docs[i], "ids", &ids);
            check_decode(t, styles[s], "random ids", &ids, false, text, n_text);
            check_decode(t, styles[s], "random ids", &ids, true, bare, n_bare);
            free(text);
            free(bare);
        }
        token_ids_free(&ids);
        free_lines(&rows);
        tokenizer_close(t);
    }
}

static void test_template(void **state) {
    (void)state;
    json_lines corpus = read_lines("tokenizers", "corpus.jsonl");
    for (size_t s = 0; s < N_STYLES; s++) {
        tokenizer *t = open_style(styles[s]);
        json_lines rows = read_style(styles[s], "template.jsonl");
        for (size_t i = 0; i < rows.n; i++) {
            token_ids got = {0}, want = {0};
            size_t n;
            char *bytes = hex_of(corpus.docs[i], "hex", &n);
            ids_of(rows.docs[i], "ids", &want);
            assert_int_equal(tokenizer_encode(t, bytes, n, true, true, &got, NULL), E_OK);
            check_ids(styles[s], "template", &got, &want);
            free(bytes);
            token_ids_free(&got);
            token_ids_free(&want);
        }
        free_lines(&rows);
        tokenizer_close(t);
    }
    free_lines(&corpus);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_corpus),
        cmocka_unit_test(test_random_ids_decode),
        cmocka_unit_test(test_template),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
