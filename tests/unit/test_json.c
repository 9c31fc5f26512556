// What json.c accepts, refuses and says.
#include "engine/json.h"
#include "engine/utf8.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

static json *parse_ok(const char *text) {
    json *doc = NULL;
    error err = {0};
    if (json_parse("t", text, strlen(text), &doc, &err) != E_OK)
        fail_msg("%s", err.text);
    return doc;
}

static void expect_refused(const char *text, size_t n, const char *message) {
    json *doc = NULL;
    error err = {0};
    assert_int_equal(json_parse("t", text, n, &doc, &err), E_INVALID);
    assert_null(doc);
    if (!strstr(err.text, message))
        fail_msg("'%s' does not say '%s'", err.text, message);
}

static void test_hostile_text_is_refused(void **state) {
    (void)state;
    static const struct {
        const char *text, *message;
    } cases[] = {
        {"", "line 1: not valid JSON"},
        {"{\"a\": 1", "not valid JSON"},
        {"{\n\n\"a\": x}", "line 3: not valid JSON"},
        {"{} x", "text after the end"},
        {"[1, 2,]", "not valid JSON"},
        {"\"\xff\"", "not UTF-8"},
        {"\"\xed\xa0\x80\"", "not UTF-8"},
        {"{\"a\":\"\n\"}", "control character"},
        {"[\"x\\u0000y\"]", "\\u0000"},
        {"{\"a\":{\"b\":1,\"c\":2,\"b\":3}}", "'b' stands twice"},
        {"[\"\\ud800\"]", "not valid JSON"},
        {"NaN", "not valid JSON"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        expect_refused(cases[i].text, strlen(cases[i].text), cases[i].message);
    expect_refused("{}\0", 3, "NUL");
    char deep[4001];
    memset(deep, '[', 2000);
    memset(deep + 2000, ']', 2000);
    expect_refused(deep, 4000, "not valid JSON");
}

static void test_case_and_duplicates(void **state) {
    (void)state;
    json *doc = parse_ok("{\"A\": 1, \"a\": 2, \"\\\\u0000\": \"\\\\\"}");
    int64_t value = 0;
    assert_true(json_as_int(json_get(json_root(doc), "a"), &value));
    assert_int_equal(value, 2);
    assert_null(json_get(json_root(doc), "B"));
    assert_int_equal(json_count(json_root(doc)), 3);
    json_close(doc);
}

static void test_numbers(void **state) {
    (void)state;
    json *doc = parse_ok("{\"i\":9007199254740992,\"big\":1e19,\"f\":1.5,\"inf\":1e999,\"n\":-3}");
    const json_value *root = json_root(doc);
    int64_t i = 7;
    double d = 0;
    assert_true(json_as_int(json_get(root, "i"), &i));
    assert_true(i == JSON_INT_MAX);
    assert_false(json_as_int(json_get(root, "big"), &i));
    assert_false(json_as_int(json_get(root, "f"), &i));
    assert_false(json_as_double(json_get(root, "inf"), &d));
    assert_true(i == JSON_INT_MAX);
    error err = {0};
    assert_int_equal(json_need_int(doc, root, "n", 0, 9, &i, &err), E_INVALID);
    assert_string_equal(err.text, "t: n: expected an integer from 0 to 9");
    json_close(doc);
}

static void test_members(void **state) {
    (void)state;
    json *doc = parse_ok("{\"s\":\"x\",\"z\":null,\"b\":true,\"l\":[1,2]}");
    const json_value *root = json_root(doc), *list = NULL;
    error err = {0};
    const char *text = "preset";
    assert_int_equal(json_need_string(doc, root, "z", &text, &err), E_INVALID);
    assert_string_equal(err.text, "t: z: missing, expected a string");
    assert_int_equal(json_opt_string(doc, root, "z", &text, &err), E_OK);
    assert_string_equal(text, "preset");
    assert_int_equal(json_opt_string(doc, root, "b", &text, &err), E_INVALID);
    assert_string_equal(err.text, "t: b: expected a string");
    assert_int_equal(json_opt_string(doc, root, "s", &text, &err), E_OK);
    assert_string_equal(text, "x");
    assert_int_equal(json_need_array(doc, root, "l", &list, &err), E_OK);
    assert_int_equal(json_count(list), 2);
    assert_int_equal(json_need_object(doc, root, "l", &list, &err), E_INVALID);
    json_close(doc);
}

static void test_files(void **state) {
    (void)state;
    char path[] = "/tmp/test_json_XXXXXX";
    int fd = mkstemp(path);
    assert_true(fd >= 0);
    assert_int_equal(write(fd, "{\"a\":1}\n", 8), 8);
    close(fd);
    json *doc = NULL;
    error err = {0};
    assert_int_equal(json_open(path, 7, &doc, &err), E_TOO_LARGE);
    assert_int_equal(json_open(path, 8, &doc, &err), E_OK);
    assert_string_equal(json_name(doc), path);
    json_close(doc);
    unlink(path);
    assert_int_equal(json_open(path, 8, &doc, &err), E_NOT_FOUND);
    assert_int_equal(json_open("/tmp", 8, &doc, &err), E_IO);
    json_close(NULL);
}

static void test_utf8_repair_is_pythons(void **state) {
    (void)state;
    // expected: bytes.decode("utf-8", "replace")
    static const struct {
        const char *bytes;
        size_t n_replaced;
    } cases[] = {
        {"\x80", 1},         {"\xc0\x80", 2},         {"\xe2\x82", 1},         {"\xf0\x9f\x98", 1},
        {"\xed\xa0\x80", 3}, {"\xf4\x90\x80\x80", 4}, {"\xf5\x80", 2},         {"\xe0\x80", 2},
        {"\xf0\x80\x80", 3}, {"\xc3\xc3", 2},         {"\xf0\x9f\xf0\x9f", 2},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        size_t n = strlen(cases[i].bytes);
        char out[16];
        assert_int_equal(utf8_repair(cases[i].bytes, n, out), 3 * cases[i].n_replaced);
        assert_int_equal(utf8_repaired_bytes(cases[i].bytes, n), 3 * cases[i].n_replaced);
        assert_false(utf8_is_valid(cases[i].bytes, n));
    }
    assert_true(utf8_is_valid("a\xc3\xa9\xe2\x82\xac\xf0\x9f\x98\x80plain text", 20));
    for (uint32_t c = 1; c < 0x110000; c += c < 0x3000 ? 1 : 97) {
        if (c >= 0xD800 && c < 0xE000)
            continue;
        char bytes[4];
        size_t length;
        uint32_t back;
        size_t n = utf8_put(c, bytes);
        assert_int_equal(utf8_next(bytes, n, &length, &back), UTF8_VALID);
        assert_int_equal(length, n);
        assert_int_equal(back, c);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_hostile_text_is_refused),
        cmocka_unit_test(test_case_and_duplicates),
        cmocka_unit_test(test_numbers),
        cmocka_unit_test(test_members),
        cmocka_unit_test(test_files),
        cmocka_unit_test(test_utf8_repair_is_pythons),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
