// What a worker's command line refuses, before it connects to anything.
#include "engine/node.h"
#include "engine/worker.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>

#include <cmocka.h>

static void test_refused(void **state) {
    (void)state;
    static char *const lines[][6] = {
        {"w"},
        {"w", "--join"},
        {"w", "--rank", "1"},
        {"w", "--join", "unix:/x", "--rank", "64"},
        {"w", "--join", "unix:/x", "--rank", "-1"},
        {"w", "--join", "unix:/x", "--rank", "1x"},
        {"w", "--join", "unix:/x", "--rank", ""},
        {"w", "--join", "unix:/x", "--rank", "4294967297"}, // 1 in 32 bits
        {"w", "--join", "unix:/x", "--rank"},
        {"w", "--join", "unix:/x", "more"},
    };
    for (size_t i = 0; i < sizeof lines / sizeof *lines; i++) {
        char *argv[6];
        int argc = 0;
        for (; argc < 6 && lines[i][argc]; argc++)
            argv[argc] = lines[i][argc];
        if (worker_main(argc, argv, &attn_node_type, NULL) != 2)
            fail_msg("line %zu was taken", i);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_refused)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
