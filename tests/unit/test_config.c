// Every kind of error line, comments, places, precedence and the round trip of config.h.
#include "engine/config.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

static char dir[256]; // holds model/config.json and the configuration under test

static void write_file(const char *name, const char *text) {
    char path[512];
    snprintf(path, sizeof path, "%s/%s", dir, name);
    FILE *file = fopen(path, "wb");
    assert_non_null(file);
    fputs(text, file);
    assert_int_equal(fclose(file), 0);
}

static int set_up(void **state) {
    (void)state;
    snprintf(dir, sizeof dir, "/tmp/test_config.XXXXXX");
    if (!mkdtemp(dir))
        return -1;
    char path[512];
    snprintf(path, sizeof path, "%s/model", dir);
    if (mkdir(path, 0700) != 0)
        return -1;
    snprintf(path, sizeof path, "%s/empty", dir);
    if (mkdir(path, 0700) != 0)
        return -1;
    write_file("model/config.json", "{}");
    return 0;
}

static int tear_down(void **state) {
    (void)state;
    static const char *const names[] = {"model/config.json", "c.json", "model", "empty", ""};
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        char path[512];
        snprintf(path, sizeof path, "%s/%s", dir, names[i]);
        remove(path);
    }
    return 0;
}

static int load_with(const char *text, const char *const *overrides, size_t n, config *out,
                     error *err) {
    char path[512];
    snprintf(path, sizeof path, "%s/c.json", dir);
    write_file("c.json", text);
    return config_load(path, overrides, n, out, err);
}

static void load(const char *text, config *out) {
    error err = {0};
    if (load_with(text, NULL, 0, out, &err) != E_OK)
        fail_msg("%s", err.text);
}

// The line must be the file's path, then expected.
static void refuse(const char *text, const char *expected) {
    char line[768];
    error err = {0};
    config c;
    assert_int_not_equal(load_with(text, NULL, 0, &c, &err), E_OK);
    snprintf(line, sizeof line, "%s/c.json%s", dir, expected);
    assert_string_equal(err.text, line);
}

static void refuse_set(const char *override, const char *expected) {
    error err = {0};
    config c;
    assert_int_not_equal(load_with("{\"model\": \"model\"}", &override, 1, &c, &err), E_OK);
    assert_string_equal(err.text, expected);
}

static void test_defaults(void **state) {
    (void)state;
    config c;
    char model[512];
    load("{\"model\": \"model\"}", &c);
    snprintf(model, sizeof model, "%s/model", dir);
    assert_string_equal(c.model, model);
    assert_string_equal(c.served_model_name, "model");
    assert_string_equal(c.router.host, "127.0.0.1");
    assert_int_equal(c.router.port, 8000);
    assert_int_equal(c.attention.workers, 1);
    assert_int_equal(c.attention.launch, 1);
    assert_int_equal(c.attention.lanes, 2);
    assert_int_equal(c.ffn.gather, CONFIG_GATHER_PASS);
    assert_int_equal(c.wire.spin_us, -1);
    assert_int_equal(c.log.level, LOG_LEVEL_INFO);
    assert_true(c.router.drain_timeout_s == 30);
}

static void test_comments(void **state) {
    (void)state;
    config c;
    load("// first\n/* second\n * \"model\": 3 */ {\n"
         "  \"model\": \"model\", // a // b\n"
         "  \"served_model_name\": \"a // b /* c */ \\\"d\\\" \\u00e9\",\n"
         "  \"attention\": {\"workers\": /* here */ 3, \"device\": \"cpu:ref\",},\n"
         "  \"router\": {\"drain_timeout_s\": 1.5},\n"
         "} // end",
         &c);
    assert_string_equal(c.served_model_name, "a // b /* c */ \"d\" \xc3\xa9");
    assert_int_equal(c.attention.workers, 3);
    assert_string_equal(c.attention.device, "cpu:ref");
    assert_true(c.router.drain_timeout_s == 1.5);
}

static void test_unknown(void **state) {
    (void)state;
    refuse("{\n\"model\": \"model\",\n\"attention\": {\n\"worker\": 2}}",
           ":4: attention.worker: unknown key; did you mean attention.workers?");
    refuse("{\"atention\": {\"workers\": 2}}",
           ":1: atention: unknown key; did you mean attention?");
    refuse("{\n\"port\": 80}", ":2: port: unknown key; did you mean router.port?");
    refuse("{\"zzzzzzzz\": 80}", ":1: zzzzzzzz: unknown key; see `tandem config --help`");
    refuse("{\"\": 1}", ":1: : unknown key; see `tandem config --help`");
}

static void test_types(void **state) {
    (void)state;
    refuse("{\"model\": 3}", ":1: model: 3 is not allowed; give a path of less than 4096 bytes");
    refuse("{\"router\":\n{\"port\": \"80\"}}",
           ":2: router.port: \"80\" is not allowed; give an integer from 0 to 65535");
    refuse("{\"router\": {\"port\": 80.5}}",
           ":1: router.port: 80.5 is not allowed; give an integer from 0 to 65535");
    refuse("{\"router\": {\"port\": null}}",
           ":1: router.port: null is not allowed; give an integer from 0 to 65535");
    refuse("{\"router\": {\"port\": {\"a\": 1}}}",
           ":1: router.port: { } is not allowed; give an integer from 0 to 65535");
    refuse("{\"router\": 5}", ":1: router: is a section; write \"router\": { KEY: VALUE }");
    refuse("{\"attention\": {\"workers\": 0}}",
           ":1: attention.workers: 0 is not allowed; give an integer from 1 to 64");
    refuse("{\"attention\": {\"workers\": 65}}",
           ":1: attention.workers: 65 is not allowed; give an integer from 1 to 64");
    refuse("{\"attention\": {\"workers\": 1e300}}",
           ":1: attention.workers: 1e+300 is not allowed; give an integer from 1 to 64");
    refuse("{\"router\": {\"drain_timeout_s\": -1}}",
           ":1: router.drain_timeout_s: -1 is not allowed; give a number of seconds from 0 to "
           "86400");
    refuse("{\"dtype\": \"fp16\"}", ":1: dtype: \"fp16\" is not allowed; give auto, bf16 or f32");
    refuse("{\"mode\": \"Colocated\"}",
           ":1: mode: \"Colocated\" is not allowed; give disaggregated or colocated");
    refuse("{\"mode\": true}", ":1: mode: true is not allowed; give disaggregated or colocated");
    refuse("{\"chat\": {\"format\": \"vicuna\"}}",
           ":1: chat.format: \"vicuna\" is not allowed; give auto, chatml, qwen2.5, qwen3, olmoe, "
           "tulu, mistral, mistral-legacy, mistral-v3, mistral-tekken or llama3");
    refuse("{\"ffn\": {\"device\": \"gpu\"}}",
           ":1: ffn.device: \"gpu\" is not allowed; give cpu, cpu:ref, cpu:avx2, cpu:avx512, "
           "cpu:amx, cuda:N or emulated");
    refuse("{\"router\": {\"control\": \"10.0.0.1\"}}",
           ":1: router.control: \"10.0.0.1\" is not allowed; give HOST:PORT with a port from 0 to "
           "65535, or nothing");
}

static void test_syntax(void **state) {
    (void)state;
    refuse("", ":1: a configuration is one JSON object; begin with {");
    refuse("[1]", ":1: a configuration is one JSON object; begin with {");
    refuse("{\"model\": \"model\"\n\n", ":3: the file ends inside { }; add the closing }");
    refuse("{\"model\": \"model\"\n\"dtype\": 1}", ":2: a comma or } is missing before this");
    refuse("{\"model\" \"model\"}", ":1: model: a colon is missing after the key");
    refuse("{\"model\": }", ":1: model: a value is missing here; write KEY: VALUE");
    refuse("{\"model\": model}", ":1: model: model is no JSON value; put text in double quotes");
    refuse("{\"model\": \"mod\nel\"}",
           ":1: model: this text has no end on its line; close it with \"");
    refuse("{\"model\": \"\\u0000\"}",
           ":1: model: \"\\u0000\" is no JSON value; put text in double quotes");
    refuse("{\"model\": [1]}", ":1: model: no key takes a list; see `tandem config --help`");
    refuse("{\n/* \n\n", ":2: this comment has no end; close it with */");
    refuse("{} x", ":1: text after the closing }; remove it");
    refuse("{model: 1}", ":1: a key in double quotes, or }, is expected here");
    refuse("{\"router\": {\"port\": 1},\n\n\"router\": {\"port\": 2}}",
           ":3: router.port: given twice, first in line 1; keep one");
    refuse("{\"dtype\": \"f32\",\n\"dtype\": \"f32\"}",
           ":2: dtype: given twice, first in line 1; keep one");
}

static void test_model(void **state) {
    (void)state;
    char expected[1024];
    refuse("{\n}", ":1: model: missing; give the directory of a model, \"model\": \"PATH\"");
    snprintf(expected, sizeof expected,
             ":2: model: %s/nowhere: No such file or directory; give the directory of a model",
             dir);
    refuse("{\n\"model\": \"nowhere\"}", expected);
    snprintf(expected, sizeof expected,
             ":1: model: %s/model/config.json is not a directory; give the one that holds "
             "config.json",
             dir);
    refuse("{\"model\": \"model/config.json\"}", expected);
    snprintf(expected, sizeof expected,
             ":1: model: %s/empty/config.json: No such file or directory; give the directory of a "
             "Hugging Face model",
             dir);
    refuse("{\"model\": \"empty\"}", expected);
}

static void test_files(void **state) {
    (void)state;
    config c;
    error err = {0};
    assert_int_equal(config_load("/nowhere/c.json", NULL, 0, &c, &err), E_NOT_FOUND);
    assert_string_equal(err.text, "/nowhere/c.json: No such file or directory; give the path of a "
                                  "configuration file");
    assert_int_equal(config_load("/tmp", NULL, 0, &c, &err), E_INVALID);
    assert_string_equal(err.text, "/tmp: is a directory; give a configuration file in it");
}

static void test_overrides(void **state) {
    (void)state;
    refuse_set("attention.workers=two",
               "--set: attention.workers: 'two' is not allowed; give an integer from 1 to 64");
    refuse_set("attention.workers=",
               "--set: attention.workers: '' is not allowed; give an integer from 1 to 64");
    refuse_set("attention.workers=99999999999999999999",
               "--set: attention.workers: '99999999999999999999' is not allowed; give an integer "
               "from 1 to 64");
    refuse_set("attention.wokers=2",
               "--set: attention.wokers: unknown key; did you mean attention.workers?");
    refuse_set("attention.workers",
               "--set: attention.workers: the value is missing; write KEY=VALUE");
    refuse_set("router.drain_timeout_s=nan",
               "--set: router.drain_timeout_s: 'nan' is not allowed; give a number of seconds from "
               "0 to 86400");
    refuse_set("attention.token_budget=63",
               "--set: attention.token_budget: 63 is below attention.max_seqs, which is 64; a step "
               "needs a row for every running request");
    refuse_set("attention.launch=2",
               "--set: attention.launch: 2 is more than there are workers; give 0 to 1");
    refuse_set("ffn.launch=0",
               "--set: ffn.launch: 1 of 1 workers join from elsewhere, but nothing listens for "
               "them; set router.control to HOST:PORT");
}

static void test_precedence(void **state) {
    (void)state;
    config c;
    error err = {0};
    const char *text = "{\"model\": \"model\", \"attention\": {\"workers\": 2, \"lanes\": 3}}";
    const char *const overrides[] = {"attention.workers=4", "attention.workers=5"};
    setenv("TANDEM_ATTENTION_WORKERS", "7", 1);
    setenv("TANDEM_ATTENTION_LANES", "4", 1);
    load(text, &c);
    assert_int_equal(c.attention.workers, 7);
    assert_int_equal(load_with(text, overrides, 2, &c, &err), E_OK);
    assert_int_equal(c.attention.workers, 5);
    assert_int_equal(c.attention.lanes, 4);
    setenv("TANDEM_ATTENTION_LANES", "many", 1);
    assert_int_equal(load_with(text, overrides, 2, &c, &err), E_INVALID);
    assert_string_equal(err.text, "TANDEM_ATTENTION_LANES: attention.lanes: 'many' is not allowed; "
                                  "give an integer from 1 to 8");
    unsetenv("TANDEM_ATTENTION_WORKERS");
    unsetenv("TANDEM_ATTENTION_LANES");
}

static void test_round_trip(void **state) {
    (void)state;
    config c, back;
    error err = {0};
    memset(&c, 0, sizeof c);
    memset(&back, 0, sizeof back);
    load(
        "{\"model\": \"model\", \"served_model_name\": \"q\\\"\\\\\\n\\u00e9\", \"dtype\": \"f32\","
        "\"router\": {\"api_key\": \"secret\", \"drain_timeout_s\": 0.1, \"control\": \"h:1\"},"
        "\"attention\": {\"workers\": 3, \"launch\": 1}, \"wire\": {\"transport\": \"tcp\"},"
        "\"log\": {\"level\": \"debug\"}}",
        &c);
    char *text = config_to_json(&c);
    assert_non_null(text);
    assert_null(strstr(text, "secret"));
    if (config_parse_json("peer", text, strlen(text), &back, &err) != E_OK)
        fail_msg("%s", err.text);
    char *again = config_to_json(&back);
    assert_string_equal(text, again);
    assert_string_equal(back.model, c.model);
    assert_string_equal(back.served_model_name, "q\"\\\n\xc3\xa9");
    assert_true(back.router.drain_timeout_s == 0.1);
    assert_int_equal(back.attention.launch, 1);
    assert_int_equal(back.wire.transport, CONFIG_TRANSPORT_TCP);
    assert_int_equal(back.log.level, LOG_LEVEL_DEBUG);
    assert_string_equal(back.router.api_key, "");
    free(text);
    free(again);
}

static void test_auto_types(void **state) {
    (void)state;
    config c = {0};
    assert_int_equal(config_compute_dtype(&c, DTYPE_F32), DTYPE_F32);
    assert_int_equal(config_compute_dtype(&c, DTYPE_F16), DTYPE_BF16);
    assert_int_equal(config_wire_dtype(&c, DTYPE_F32), DTYPE_F32);
    c.dtype = CONFIG_DTYPE_F32;
    assert_int_equal(config_compute_dtype(&c, DTYPE_BF16), DTYPE_F32);
    c.wire.dtype = CONFIG_DTYPE_BF16;
    assert_int_equal(config_wire_dtype(&c, DTYPE_F32), DTYPE_BF16);
}

static void test_reference(void **state) {
    (void)state;
    char *text = NULL;
    size_t n = 0;
    FILE *out = open_memstream(&text, &n);
    config_print_help(out);
    config_print_markdown(out);
    assert_int_equal(fclose(out), 0);
    assert_non_null(strstr(text, "attention.workers  (integer 1..64; default 1)\n"));
    assert_non_null(strstr(text, "| `router.port` | integer 0..65535 | 8000 | "));
    assert_non_null(strstr(text, "| `model` | path | required | "));
    free(text);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_defaults),   cmocka_unit_test(test_comments),
        cmocka_unit_test(test_unknown),    cmocka_unit_test(test_types),
        cmocka_unit_test(test_syntax),     cmocka_unit_test(test_model),
        cmocka_unit_test(test_files),      cmocka_unit_test(test_overrides),
        cmocka_unit_test(test_precedence), cmocka_unit_test(test_round_trip),
        cmocka_unit_test(test_auto_types), cmocka_unit_test(test_reference),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
