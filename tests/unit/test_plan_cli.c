// `tandem plan` and `tandem simulate` as users run them: what they print, and what they refuse.
#include "engine/json.h"
#include "router/cli.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>
#include <cmocka.h>

typedef struct outcome {
    int status;
    char *out, *err; // for free()
} outcome;

static char *read_all(FILE *file) {
    size_t n = 0, room = 1 << 20;
    char *text = calloc(room, 1);
    rewind(file);
    n = fread(text, 1, room - 1, file);
    assert_true(n < room - 1);
    fclose(file);
    return text;
}

// Runs `tandem` with the words of a line, in a child, since it writes to standard output.
static outcome run(const char *line) {
    char copy[1024], *argv[64] = {"tandem"};
    int argc = 1, status = 0;
    FILE *out = tmpfile(), *err = tmpfile();
    assert_true(out && err && strlen(line) < sizeof copy);
    strcpy(copy, line);
    for (char *word = strtok(copy, " "); word; word = strtok(NULL, " "))
        argv[argc++] = word;
    fflush(NULL);
    pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        dup2(fileno(out), STDOUT_FILENO);
        dup2(fileno(err), STDERR_FILENO);
        status = cli_run(argc, argv);
        fflush(NULL);
        _exit(status);
    }
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFEXITED(status));
    return (outcome){WEXITSTATUS(status), read_all(out), read_all(err)};
}

static void forget(outcome *o) {
    free(o->out);
    free(o->err);
}

static json *run_json(const char *line) {
    outcome o = run(line);
    json *doc = NULL;
    error err = {0};
    if (o.status != 0)
        fail_msg("%s: %s", line, o.err);
    assert_string_equal(o.err, "");
    if (json_parse("printed", o.out, strlen(o.out), &doc, &err) != E_OK)
        fail_msg("%s: %s", line, err.text);
    forget(&o);
    return doc;
}

static double number(const json_value *object, const char *key) {
    double value = 0;
    if (!json_as_double(json_get(object, key), &value))
        fail_msg("%s is no number", key);
    return value;
}

static const char *text(const json_value *object, const char *key) {
    const char *value = NULL;
    if (!json_as_string(json_get(object, key), &value))
        fail_msg("%s is no text", key);
    return value;
}

static void near(double value, double expected, double tolerance) {
    if (!(fabs(value - expected) <= tolerance * fabs(expected)))
        fail_msg("%.9g is not %.9g to %g", value, expected, tolerance);
}

static void test_paper_ratios(void **state) {
    (void)state;
    static const struct {
        int batch, prefill, decode;
        double r_star;
        const char *regime;
    } cases[] = {
        {256, 100, 100, 2.17, "ffn"},        {256, 100, 500, 9.32, "attention"},
        {256, 500, 500, 17.25, "attention"}, {128, 100, 500, 7.08, "attention"},
        {512, 100, 500, 10.25, "attention"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char line[256];
        snprintf(line, sizeof line,
                 "plan --preset ascend910c --batch %d --prefill %d --decode %d --horizon 10000 "
                 "--json",
                 cases[i].batch, cases[i].prefill, cases[i].decode);
        json *doc = run_json(line);
        near(number(json_root(doc), "r_star"), cases[i].r_star, 0.01);
        assert_string_equal(text(json_root(doc), "regime"), cases[i].regime);
        json_close(doc);
    }
}

static void test_plan_json(void **state) {
    (void)state;
    json *doc = run_json("plan --preset ascend910c --batch 256 --prefill 100 --decode 500 "
                         "--lanes=2 --pool 16 --json");
    const json_value *root = json_root(doc);
    near(number(root, "r_star"), number(root, "r_attention"), 1e-12);
    near(number(root, "r_peak"), 2.169, 0.001);
    assert_true(number(root, "r_communication") < 0);
    near(number(root, "throughput_per_instance"), 0.7639, 0.001);
    assert_true(json_is_null(json_get(root, "horizon")));
    const json_value *barrier = json_get(root, "barrier"), *lanes = json_get(root, "lanes");
    assert_true(number(barrier, "r") == 10 && number(barrier, "attention") == 10 &&
                number(barrier, "ffn") == 1);
    near(number(barrier, "throughput_per_instance") * number(barrier, "cycle"), 2560.0 / 11, 1e-6);
    assert_true(number(lanes, "r") == 8);
    near(number(lanes, "throughput_per_instance") * number(lanes, "cycle"), 2048.0 / 9, 1e-6);
    near(number(lanes, "tpot"), 2 * number(lanes, "cycle"), 1e-9);
    near(number(json_get(root, "colocated"), "throughput_per_instance"), 0.73208, 0.001);
    const json_value *curve = json_get(root, "curve");
    double r = 1;
    assert_true(json_count(curve) >= 32);
    for (const json_value *at = json_first(curve); at; at = json_next(at), r++) {
        assert_true(number(at, "r") == r);
        assert_true(number(at, "barrier") <= number(at, "mean_field") * (1 + 1e-9));
        if (r == 8)
            near(number(at, "lanes"), number(lanes, "throughput_per_instance"), 1e-9);
    }
    json_close(doc);
}

// A trace of one length has no spread: all three forms agree where nothing but attention binds.
static void test_plan_of_a_trace(void **state) {
    (void)state;
    char path[] = "/tmp/test_plan_cli_XXXXXX", line[256];
    FILE *file = fdopen(mkstemp(path), "w");
    fprintf(file, "arrival,prompt,output\n0,600,1\n1,600,1\n");
    fclose(file);
    snprintf(line, sizeof line, "plan --preset ascend910c --batch 256 --trace %s --json", path);
    json *doc = run_json(line);
    assert_true(number(json_root(doc), "theta") == 600 && number(json_root(doc), "nu2") == 0);
    const json_value *first = json_first(json_get(json_root(doc), "curve"));
    near(number(first, "lanes"), number(first, "mean_field"), 1e-9);
    json_close(doc);
    snprintf(line, sizeof line,
             "simulate --preset ascend910c --batch 2 --ratio 1 --trace %s --json", path);
    doc = run_json(line);
    assert_true(number(json_first(json_get(json_root(doc), "ratios")), "throughput_per_instance") >
                0);
    assert_true(json_is_null(json_get(json_first(json_get(json_root(doc), "ratios")),
                                      "steady_throughput_per_instance")));
    json_close(doc);
    unlink(path);
}

static void test_simulate_json(void **state) {
    (void)state;
    static const double rs[] = {1, 3.5, 8, 32};
    clock_t begin = clock();
    const char *line = "simulate --preset ascend910c --batch 256 --prefill 100 --decode 500 "
                       "--requests 10000 --ratio 1,7:2,8,32 --seed 1 --json";
    json *doc = run_json(line);
    const json_value *ratios = json_get(json_root(doc), "ratios");
    size_t i = 0;
    assert_int_equal(json_count(ratios), 4);
    for (const json_value *at = json_first(ratios); at; at = json_next(at), i++) {
        assert_true(number(at, "r") == rs[i]);
        assert_true(number(at, "tpot") > 500 && number(at, "throughput_per_instance") > 0.2);
        assert_in_range(number(at, "idle_attention") * 1000, 0, 650);
        assert_in_range(number(at, "idle_ffn") * 1000, 0, 650);
        near(number(at, "predicted_throughput_per_instance"),
             number(at, "steady_throughput_per_instance"), 0.03);
    }
    json_close(doc);
    outcome a = run(line), b = run(line);
    assert_string_equal(a.out, b.out);
    forget(&a);
    forget(&b);
    assert_true((double)(clock() - begin) / CLOCKS_PER_SEC < 10);
}

static void test_tables_and_help(void **state) {
    (void)state;
    outcome o = run("plan --preset ascend910c --batch 256 --prefill 100 --decode 500");
    assert_int_equal(o.status, 0);
    assert_non_null(strstr(o.out, "r* = 9.575, attention-bound"));
    assert_non_null(strstr(o.out, "olocated"));
    forget(&o);
    o = run("simulate --preset ascend910c --batch 16 --prefill 10 --decode-dist lognormal:0.5 "
            "--decode 20 --requests 200 --ratio 1,2 --seeds 2");
    assert_int_equal(o.status, 0);
    assert_non_null(strstr(o.out, "per instance"));
    forget(&o);
    static const char *const helps[] = {"plan --help", "simulate --help", "plan --json --help"};
    for (size_t i = 0; i < 3; i++) {
        o = run(helps[i]);
        assert_int_equal(o.status, 0);
        assert_non_null(strstr(o.out, "usage: tandem "));
        assert_non_null(strstr(o.out, "--alpha-f"));
        forget(&o);
    }
}

static void test_plots(void **state) {
    (void)state;
    static const char *const commands[] = {"plan", "simulate --requests 100 --ratio 1,2,3"};
    static const char *const words[] = {"attention-bound", "Idle share"};
    for (int i = 0; i < 2; i++) {
        char path[] = "/tmp/test_plan_cli_XXXXXX", line[256];
        close(mkstemp(path));
        snprintf(line, sizeof line,
                 "%s --preset ascend910c --batch 256 --prefill 100 --decode 500 --plot %s",
                 commands[i], path);
        outcome o = run(line);
        assert_int_equal(o.status, 0);
        forget(&o);
        char *svg = read_all(fopen(path, "r"));
        assert_non_null(strstr(svg, words[i]));
        assert_non_null(strstr(svg, "</svg>"));
        assert_null(strstr(svg, "nan"));
        assert_null(strstr(svg, "inf"));
        free(svg);
        unlink(path);
    }
    outcome o = run("plan --preset ascend910c --batch 256 --prefill 100 --decode 500 "
                    "--plot /nonexistent/p.svg");
    assert_int_equal(o.status, CLI_FAILED);
    forget(&o);
}

static void test_bad_arguments(void **state) {
    (void)state;
    static const struct {
        const char *line, *word;
    } cases[] = {
        {"plan", "--preset"},
        {"plan --preset h100", "unknown preset"},
        {"plan --preset", "value is missing"},
        {"plan --preset ascend910c", "--batch is missing"},
        {"plan --preset ascend910c --batch 0", "--batch"},
        {"plan --preset ascend910c --batch 2.5", "--batch"},
        {"plan --preset ascend910c --batch -3", "--batch"},
        {"plan --preset ascend910c --batch 99999999999999999999", "--batch"},
        {"plan --preset ascend910c --batch 8", "the load is missing"},
        {"plan --preset ascend910c --batch 8 --prefill nan --decode 5", "--prefill"},
        {"plan --preset ascend910c --batch 8 --prefill 5 --decode 0", "--decode"},
        {"plan --preset ascend910c --batch 8 --prefill 5 --decode inf", "--decode"},
        {"plan --alpha-a -1", "--alpha-a"},
        {"plan --alpha-a 1 --beta-a 1 --beta-f 1 --alpha-c 1 --beta-c 1", "a law is missing"},
        {"plan --preset ascend910c --alpha-f 0 --batch 8 --prefill 5 --decode 5", "alpha_f"},
        {"plan --preset ascend910c --batch 8 --prefill 5 --decode 5 --pool 1", "--pool"},
        {"plan --preset ascend910c --batch 8 --prefill 5 --decode 5 --pool 4 --min-ffn 4", "pool"},
        {"plan --preset ascend910c --batch 8 --prefill 5 --decode 5 --max-tpot 1", "max-tpot"},
        {"plan --preset ascend910c --batch 8 --prefill 5 --decode 5 --kv-tokens 10", "kv-tokens"},
        {"plan --preset ascend910c --batch 8 --trace /nonexistent.csv", "/nonexistent.csv"},
        {"plan --preset ascend910c --batch 8 --trace x --prefill 5", "in place of"},
        {"plan --wat", "unknown option '--wat'"},
        {"plan wat", "unknown argument 'wat'"},
        {"plan --json=1", "takes no value"},
        {"simulate", "--preset"},
        {"simulate --ratio 0", "--ratio"},
        {"simulate --ratio 1,,2", "--ratio"},
        {"simulate --ratio 8:0", "--ratio"},
        {"simulate --ratio 1.5:2", "--ratio"},
        {"simulate --ratio nan", "--ratio"},
        {"simulate --ratio 3.14159265", "--ratio"},
        {"simulate --ratio 5000", "--ratio"},
        {"simulate --ratio 8x", "--ratio"},
        {"simulate --preset ascend910c --batch 8 --prefill 5 --decode 5 --decode-dist zipf",
         "--decode-dist"},
        {"simulate --preset ascend910c --batch 8 --prefill 5 --decode 5 --decode-dist lognormal:x",
         "--decode-dist"},
        {"simulate --preset ascend910c --batch 8 --prefill 5 --decode 5 --seeds 0", "--seeds"},
        {"simulate --preset ascend910c --batch 1000000 --prefill 5 --decode 5 --ratio 900",
         "batch"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        outcome o = run(cases[i].line);
        assert_int_equal(o.status, CLI_WRONG_USAGE);
        assert_string_equal(o.out, "");
        if (!strstr(o.err, cases[i].word) || strchr(o.err, '\n') != o.err + strlen(o.err) - 1)
            fail_msg("%s: '%s'", cases[i].line, o.err);
        forget(&o);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_paper_ratios),    cmocka_unit_test(test_plan_json),
        cmocka_unit_test(test_plan_of_a_trace), cmocka_unit_test(test_simulate_json),
        cmocka_unit_test(test_tables_and_help), cmocka_unit_test(test_plots),
        cmocka_unit_test(test_bad_arguments),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
