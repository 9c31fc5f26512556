// The head of a request and the chunked coding, apart from any connection.
#include "engine/status.h"
#include "router/http_chunked.h"
#include "router/http_head.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <cmocka.h>

static int parse(char *text, http_head *out) {
    const char *why = NULL;
    size_t position = 0;
    assert_int_equal(http_head_scan(text, strlen(text), &position), E_OK);
    assert_int_equal(position, strlen(text));
    int status = http_head_parse(text, position, out, &why);
    assert_int_equal(status == 0, why == NULL);
    return status;
}

static void test_head(void **state) {
    (void)state;
    char text[] = "POST /a%2Fb?c=%20 HTTP/1.1\r\nHost: h\r\nX-Empty:\r\nX-Blank: \t v w \t\r\n"
                  "content-LENGTH: 007\r\nExpect: 100-Continue\r\nX-Empty: second\r\n\r\n";
    http_head head;
    assert_int_equal(parse(text, &head), 0);
    assert_string_equal(head.method, "POST");
    assert_string_equal(head.path, "/a/b");
    assert_string_equal(head.query, "c=%20");
    assert_string_equal(http_head_find(&head, "x-blank"), "v w");
    assert_string_equal(http_head_find(&head, "X-EMPTY"), "");
    assert_null(http_head_find(&head, "x"));
    assert_int_equal(head.content_length, 7);
    assert_true(head.expect_continue && head.keep_alive && head.http_1_1 && !head.chunked);
    assert_int_equal(head.n_headers, 6);
}

static void test_keep_alive(void **state) {
    (void)state;
    static const struct {
        const char *text;
        bool keep_alive;
    } cases[] = {
        {"GET / HTTP/1.1\r\nHost: h\r\n\r\n", true},
        {"GET / HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n", false},
        {"GET / HTTP/1.1\r\nHost: h\r\nConnection: x, Close\r\n\r\n", false},
        {"GET / HTTP/1.0\r\n\r\n", false},
        {"GET / HTTP/1.0\r\nConnection: Keep-Alive\r\n\r\n", true},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        char text[128];
        http_head head;
        snprintf(text, sizeof text, "%s", cases[i].text);
        assert_int_equal(parse(text, &head), 0);
        assert_int_equal(head.keep_alive, cases[i].keep_alive);
    }
}

// The scanner and the chunk decoder say the same whatever the split.
static void test_split_independence(void **state) {
    (void)state;
    static const char head[] = "GET / HTTP/1.1\r\nHost: x\r\n\r\nrest";
    for (size_t cut = 0; cut < sizeof head; cut++) {
        size_t position = 0;
        int rc = http_head_scan(head, cut, &position);
        if (rc == E_AGAIN)
            rc = http_head_scan(head, sizeof head - 1, &position);
        assert_int_equal(rc, E_OK);
        assert_int_equal(position, sizeof head - 5);
    }
    static const char body[] = "3\r\nabc\r\n2\r\nde\r\n0\r\nT: x\r\n\r\nrest";
    for (size_t piece = 1; piece < sizeof body; piece++) {
        http_chunked decoder = {0};
        char out[16] = "";
        size_t n_out = 0, at = 0;
        int rc = E_AGAIN;
        while (rc == E_AGAIN && at < sizeof body - 1) {
            size_t n = sizeof body - 1 - at < piece ? sizeof body - 1 - at : piece, used, n_body;
            const char *run = NULL;
            rc = http_chunked_next(&decoder, body + at, n, &used, &run, &n_body);
            if (n_body)
                memcpy(out + n_out, run, n_body);
            n_out += n_body;
            at += used;
        }
        assert_int_equal(rc, E_OK);
        assert_string_equal(out, "abcde");
        assert_int_equal(at, sizeof body - 5);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_head),
        cmocka_unit_test(test_keep_alive),
        cmocka_unit_test(test_split_independence),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
