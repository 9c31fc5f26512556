// What the JSON writer writes reads back as what was put in, whatever the bytes.
#include "engine/json.h"
#include "engine/utf8.h"
#include "router/api_stop.h"
#include "router/json_writer.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

// Reads back a JSON string; for free().
static char *read_back(const json_writer *w) {
    json *doc = NULL;
    error err = {0};
    if (json_parse("written", w->text, w->n, &doc, &err) != E_OK)
        fail_msg("%s: %s", err.text, w->text);
    const char *text = NULL;
    assert_true(json_as_string(json_root(doc), &text));
    char *copy = strdup(text);
    json_close(doc);
    return copy;
}

static void test_every_codepoint(void **state) {
    (void)state;
    json_writer w = {0};
    for (uint32_t c = 1; c <= 0x10FFFF; c += c < 0x900 ? 1 : 251) {
        char text[8] = {0};
        if (c >= 0xD800 && c < 0xE000)
            continue;
        size_t n = utf8_put(c, text);
        json_writer_clear(&w);
        json_put_string_n(&w, text, n);
        char *back = read_back(&w);
        assert_string_equal(back, text);
        free(back);
    }
    json_writer_free(&w);
}

static void test_any_bytes(void **state) {
    (void)state;
    json_writer w = {0};
    srand(1);
    for (int round = 0; round < 3000; round++) {
        char bytes[32], repaired[97];
        size_t n = (size_t)(rand() % 32);
        for (size_t i = 0; i < n; i++)
            bytes[i] = (char)(rand() % 255 + 1);
        json_writer_clear(&w);
        json_put_string_n(&w, bytes, n);
        repaired[utf8_repair(bytes, n, repaired)] = '\0';
        char *back = read_back(&w);
        assert_string_equal(back, repaired);
        free(back);
    }
    json_writer_clear(&w);
    json_put_string_n(&w, "a\0b", 3);
    assert_string_equal(w.text, "\"a\\u0000b\"");
    json_writer_free(&w);
}

static void test_numbers(void **state) {
    (void)state;
    static const float values[] = {0, -0.5f, 1e-30f, -3.4e38f, 0.1f, 16777217.0f};
    json_writer w = {0};
    for (size_t i = 0; i < sizeof values / sizeof values[0]; i++) {
        json_writer_clear(&w);
        json_put_float(&w, values[i]);
        assert_true(strtof(w.text, NULL) == values[i]);
    }
    json_writer_clear(&w);
    json_put_float(&w, -INFINITY);
    json_put(&w, " ");
    json_put_float(&w, NAN);
    assert_string_equal(w.text, "-9999 -9999");
    json_writer_free(&w);
}

// Whatever the cut, the matcher gives what a search in the whole text gives, and never lets out
// more than a search could already promise.
static void test_stop_matcher(void **state) {
    (void)state;
    srand(2);
    for (int round = 0; round < 5000; round++) {
        char text[40], stop[3][6];
        stop_strings stops = {.n = (size_t)(rand() % 4)};
        size_t n = (size_t)(rand() % 39) + 1, first = n;
        for (size_t i = 0; i < n; i++)
            text[i] = (char)('a' + rand() % 2);
        text[n] = '\0';
        for (size_t i = 0; i < stops.n; i++) {
            size_t n_stop = (size_t)(rand() % 5) + 1;
            for (size_t k = 0; k < n_stop; k++)
                stop[i][k] = (char)('a' + rand() % 2);
            stop[i][n_stop] = '\0';
            stops.texts[i] = stop[i];
        }
        json_writer held = {0}, out = {0};
        bool found = false;
        size_t end = n;
        for (size_t at = 0; at < n && !found;) {
            size_t piece = (size_t)(rand() % 4) + 1;
            piece = piece > n - at ? n - at : piece;
            found = stop_push(&stops, &held, text + at, piece, &out);
            at += piece;
            end = at;
        }
        if (!found)
            stop_flush(&held, &out);
        bool expected = false;
        for (size_t i = 0; i < stops.n; i++) {
            const char *where = memmem(text, end, stops.texts[i], strlen(stops.texts[i]));
            if (where) {
                expected = true;
                first = (size_t)(where - text) < first ? (size_t)(where - text) : first;
            }
        }
        assert_int_equal(found, expected);
        assert_int_equal(out.n, first);
        if (out.n)
            assert_memory_equal(out.text, text, out.n);
        json_writer_free(&held);
        json_writer_free(&out);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_every_codepoint),
        cmocka_unit_test(test_any_bytes),
        cmocka_unit_test(test_numbers),
        cmocka_unit_test(test_stop_matcher),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
