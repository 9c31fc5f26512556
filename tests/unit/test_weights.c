// Safetensors files: what is mapped, what is refused and how it is said.
#include "engine/safetensors.h"
#include "engine/weights.h"
#include "tests/support/tempdir.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

#define FILE_NAME "model.safetensors"
#define INDEX_NAME "model.safetensors.index.json"
#define A "\"a\":{\"dtype\":\"F32\",\"shape\":[2,3],\"data_offsets\":[0,24]}"
#define B "\"b\":{\"dtype\":\"BF16\",\"shape\":[4],\"data_offsets\":[24,32]}"

static void expect_refused(const tempdir *dir, int code, const char *message) {
    weights *w = NULL;
    error err = {0};
    int rc = weights_open(dir->path, &w, &err);
    if (rc != code || w || !strstr(err.text, message))
        fail_msg("expected %d '%s', got %d '%s'", code, message, rc, err.text);
    if (!strstr(err.text, dir->path))
        fail_msg("'%s' does not name the file", err.text);
}

static weights *open_ok(const tempdir *dir) {
    weights *w = NULL;
    error err = {0};
    if (weights_open(dir->path, &w, &err) != E_OK)
        fail_msg("%s", err.text);
    return w;
}

static void test_views(void **state) {
    (void)state;
    tempdir dir = tempdir_make();
    // The order in the header is not that in the file, and the header may end in blanks.
    tempdir_write_safetensors(&dir, FILE_NAME,
                              "{\"__metadata__\":{\"format\":\"pt\"}," B "," A ",\"i\":{\"dtype\":"
                              "\"I64\",\"shape\":[],\"data_offsets\":[32,40]},\"e\":{\"dtype\":"
                              "\"F16\",\"shape\":[0,7],\"data_offsets\":[24,24]}}  ",
                              40);
    weights *w = open_ok(&dir);
    error err = {0};
    tensor_view view;
    assert_int_equal(weights_total_bytes(w), 40);
    model_tensor_spec spec = {"a", 2, {2, 3}};
    assert_int_equal(weights_get(w, &spec, &view, &err), E_OK);
    assert_int_equal(view.type, DTYPE_F32);
    assert_int_equal(view.n_dims, 2);
    assert_int_equal(view.dims[1], 3);
    static const char zeros[24];
    assert_memory_equal(view.data, zeros, 24);
    weights_release(w, &view);
    assert_memory_equal(view.data, zeros, 24); // read again from the file
    spec = (model_tensor_spec){"b", 1, {4, 0}};
    tensor_view second;
    assert_int_equal(weights_get(w, &spec, &second, &err), E_OK);
    assert_int_equal(second.type, DTYPE_BF16);
    assert_int_equal((const char *)second.data - (const char *)view.data, 24);
    spec = (model_tensor_spec){"a", 2, {3, 2}};
    assert_int_equal(weights_get(w, &spec, &view, &err), E_INVALID);
    assert_non_null(strstr(err.text, "model.safetensors: tensor 'a' has shape [2, 3], config.json "
                                     "expects [3, 2]"));
    spec = (model_tensor_spec){"a", 1, {6, 0}};
    assert_int_equal(weights_get(w, &spec, &view, &err), E_INVALID);
    spec = (model_tensor_spec){"i", 1, {1, 0}};
    assert_int_equal(weights_get(w, &spec, &view, &err), E_INVALID);
    assert_non_null(strstr(err.text, "tensor 'i' has type I64, expected BF16, F16 or F32"));
    spec = (model_tensor_spec){"c", 1, {4, 0}};
    assert_int_equal(weights_get(w, &spec, &view, &err), E_NOT_FOUND);
    assert_non_null(strstr(err.text, "tensor 'c' is missing"));
    spec = (model_tensor_spec){0};
    assert_int_equal(weights_get(w, &spec, &view, &err), E_NOT_FOUND);
    weights_close(w);
    tempdir_remove(&dir);
}

static void test_bad_headers(void **state) {
    (void)state;
    static const struct {
        const char *header;
        size_t n_data;
        const char *message;
    } cases[] = {
        {"{" A "," B "}", 31, "tensor 'b' ends 1 bytes beyond the end of the file"},
        {"{" A "," B "}", 33, "1 bytes at the end belong to no tensor"},
        {"{" B "}", 32, "24 bytes before tensor 'b' belong to no tensor"},
        {"{" A ",\"c\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[20,24]}}", 24,
         "tensor 'c' overlaps tensor 'a'"},
        {"{" A "," A "}", 24, "key 'a' stands twice"},
        {"{\"a\":{\"dtype\":\"F31\",\"shape\":[1],\"data_offsets\":[0,4]}}", 4,
         "tensor 'a': unknown dtype 'F31'"},
        {"{\"a\":{\"dtype\":7,\"shape\":[1],\"data_offsets\":[0,4]}}", 4, "dtype is not a string"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,8]}}", 8,
         "tensor 'a': data_offsets span 8 bytes, shape and dtype F32 need 4"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[-1],\"data_offsets\":[0,4]}}", 4, "not a size"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1.5],\"data_offsets\":[0,4]}}", 4, "not a size"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":4,\"data_offsets\":[0,4]}}", 4,
         "shape is not a list"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[4294967296,4294967296],\"data_offsets\":[0,0]}}", 0,
         "tensor 'a': shape is too large"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[4503599627370496,4096],\"data_offsets\":[0,0]}}", 0,
         "tensor 'a': shape is too large"},
        {"{\"a\":{\"dtype\":\"F4\",\"shape\":[1],\"data_offsets\":[0,0]}}", 0, "whole bytes"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[4,0]}}", 4, "not a pair"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0]}}", 4, "not a pair"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4,5]}}", 4, "not a pair"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[-4,0]}}", 4, "not a pair"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":{\"x\":0,\"y\":4}}}", 4,
         "not a pair"},
        {"{\"a\":[]}", 0, "tensor 'a': not an object"},
        {"[]", 0, "the header is not a JSON object"},
        {"{" A, 24, "not valid JSON"},
        {"", 4, "not valid JSON"},
    };
    tempdir dir = tempdir_make();
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        tempdir_write_safetensors(&dir, FILE_NAME, cases[i].header, cases[i].n_data);
        expect_refused(&dir, E_INVALID, cases[i].message);
    }
    tempdir_remove(&dir);
}

static void test_bad_files(void **state) {
    (void)state;
    tempdir dir = tempdir_make();
    expect_refused(&dir, E_NOT_FOUND, "neither model.safetensors nor model.safetensors.index.json");
    char path[512];
    snprintf(path, sizeof path, "%s/" FILE_NAME, dir.path);
    assert_int_equal(mkfifo(path, 0600), 0);
    expect_refused(&dir, E_IO, "not a regular file");
    assert_int_equal(unlink(path), 0);
    tempdir_write(&dir, FILE_NAME, "", 0);
    expect_refused(&dir, E_INVALID, "the file is empty");
    tempdir_write(&dir, FILE_NAME, "1234567", 7);
    expect_refused(&dir, E_INVALID, "7 bytes is no safetensors file");
    tempdir_write(&dir, FILE_NAME, "\xff\xff\xff\xff\xff\xff\xff\xff{}", 10);
    expect_refused(&dir, E_INVALID, "a header of 18446744073709551615 bytes");
    tempdir_write_safetensors(&dir, FILE_NAME, "{" A "," B "}", 32);
    tempdir_truncate(&dir, FILE_NAME, 40);
    expect_refused(&dir, E_INVALID, "the file is truncated");
    tempdir_remove(&dir);
}

static void test_sharded(void **state) {
    (void)state;
    tempdir dir = tempdir_make();
    tempdir_write_safetensors(&dir, "one.safetensors", "{" A "}", 24);
    tempdir_write_safetensors(&dir, "two.safetensors",
                              "{\"b\":{\"dtype\":\"BF16\",\"shape\":[4],\"data_offsets\":[0,8]}}",
                              8);
    tempdir_write_text(&dir, INDEX_NAME,
                       "{\"weight_map\":{\"a\":\"one.safetensors\",\"b\":\"two.safetensors\"}}");
    weights *w = open_ok(&dir);
    error err = {0};
    tensor_view view;
    model_tensor_spec spec = {"b", 1, {4, 0}};
    assert_int_equal(weights_total_bytes(w), 32);
    assert_int_equal(weights_get(w, &spec, &view, &err), E_OK);
    spec.dims[0] = 5;
    assert_int_equal(weights_get(w, &spec, &view, &err), E_INVALID);
    assert_non_null(strstr(err.text, "two.safetensors: tensor 'b'"));
    weights_close(w);
    static const struct {
        const char *map;
        int code;
        const char *message;
    } cases[] = {
        {"{\"a\":\"none.safetensors\"}", E_NOT_FOUND, "none.safetensors: no such file"},
        {"{\"a\":\"two.safetensors\"}", E_INVALID, "two.safetensors: tensor 'a' is not in it"},
        {"{\"a\":\"one.safetensors\",\"b\":\"one.safetensors\"}", E_INVALID,
         "one.safetensors: tensor 'b' is not in it"},
        {"{\"a\":\"../one.safetensors\"}", E_INVALID, "a file name without a path"},
        {"{\"a\":\"/etc/hostname\"}", E_INVALID, "a file name without a path"},
        {"{\"a\":\"..\"}", E_INVALID, "a file name without a path"},
        {"{\"a\":\"\"}", E_INVALID, "a file name without a path"},
        {"{\"a\":1}", E_INVALID, "a file name without a path"},
        {"[]", E_INVALID, "weight_map: expected an object"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char text[256];
        snprintf(text, sizeof text, "{\"weight_map\":%s}", cases[i].map);
        tempdir_write_text(&dir, INDEX_NAME, text);
        expect_refused(&dir, cases[i].code, cases[i].message);
    }
    tempdir_write_safetensors(&dir, "two.safetensors", "{" A "}", 24);
    tempdir_write_text(&dir, INDEX_NAME,
                       "{\"weight_map\":{\"a\":\"one.safetensors\",\"b\":\"two.safetensors\"}}");
    expect_refused(&dir, E_INVALID, "two.safetensors: tensor 'a' is also in");
    tempdir_remove(&dir);
}

// A whole tiny Mixtral as a header; which says what is wrong with one tensor.
static void write_model(const tempdir *dir, const model_config *c, model_tensor wrong,
                        const char *how) {
    char *header = malloc(1 << 16);
    assert_non_null(header);
    size_t n = 0, at = 0;
    for (int which = 0; which < MODEL_TENSOR_COUNT; which++) {
        size_t n_layers, n_experts;
        model_tensor_counts(c, (model_tensor)which, &n_layers, &n_experts);
        for (size_t i = 0; i < n_layers * n_experts; i++) {
            model_tensor_spec spec;
            model_tensor_describe(c, (model_tensor)which, i / n_experts, i % n_experts, &spec);
            bool last = i + 1 == n_layers * n_experts && which == (int)wrong;
            const char *type = last && strcmp(how, "type") == 0 ? "I16" : "BF16";
            if (last && strcmp(how, "missing") == 0)
                continue;
            if (last && strcmp(how, "shape") == 0)
                spec.dims[0]++;
            size_t columns = spec.n_dims == 2 ? spec.dims[1] : 1;
            size_t bytes = spec.dims[0] * columns * 2;
            char shape[64];
            snprintf(shape, sizeof shape, spec.n_dims == 2 ? "%zu,%zu" : "%zu", spec.dims[0],
                     columns);
            n += (size_t)snprintf(
                header + n, (1 << 16) - n,
                "%s\"%s\":{\"dtype\":\"%s\",\"shape\":[%s],\"data_offsets\":[%zu,%zu]}",
                n ? "," : "{", spec.name, type, shape, at, at + bytes);
            at += bytes;
        }
    }
    snprintf(header + n, (1 << 16) - n, "}");
    tempdir_write_safetensors(dir, FILE_NAME, header, at);
    free(header);
}

static void test_check_model(void **state) {
    (void)state;
    model_config c = {.arch = MODEL_ARCH_MIXTRAL,
                      .hidden = 8,
                      .n_layers = 2,
                      .vocab = 11,
                      .n_heads = 2,
                      .n_kv_heads = 1,
                      .head_dim = 4,
                      .n_experts = 3,
                      .top_k = 2,
                      .expert_intermediate = 6};
    tempdir dir = tempdir_make();
    for (int which = 0; which < MODEL_TENSOR_COUNT; which++) {
        static const char *const how[] = {"right", "missing", "shape", "type"};
        size_t n_layers, n_experts;
        model_tensor_counts(&c, (model_tensor)which, &n_layers, &n_experts);
        for (size_t i = 0; i < 4 && n_layers; i++) {
            model_tensor_spec spec;
            model_tensor_describe(&c, (model_tensor)which, n_layers - 1, n_experts - 1, &spec);
            write_model(&dir, &c, (model_tensor)which, how[i]);
            weights *w = open_ok(&dir);
            error err = {0};
            int rc = weights_check_model(w, &c, &err);
            assert_int_equal(rc, i == 0 ? E_OK : i == 1 ? E_NOT_FOUND : E_INVALID);
            if (i && !strstr(err.text, spec.name))
                fail_msg("'%s' does not name %s", err.text, spec.name);
            weights_close(w);
        }
    }
    // A head beside tied embeddings is not looked at.
    write_model(&dir, &c, MODEL_HEAD, "type");
    c.tie_embeddings = true;
    weights *w = open_ok(&dir);
    error err = {0};
    assert_int_equal(weights_check_model(w, &c, &err), E_OK);
    weights_close(w);
    tempdir_remove(&dir);
}

static size_t resident_file_bytes(void) {
    size_t size = 0, resident = 0, shared = 0;
    FILE *file = fopen("/proc/self/statm", "r");
    assert_non_null(file);
    assert_int_equal(fscanf(file, "%zu %zu %zu", &size, &resident, &shared), 3);
    fclose(file);
    return shared * (size_t)sysconf(_SC_PAGESIZE);
}

static void test_release_gives_pages_back(void **state) {
    (void)state;
    enum { MIB = 1 << 20, N = 16 };
    tempdir dir = tempdir_make();
    tempdir_write_safetensors(
        &dir, FILE_NAME,
        "{\"a\":{\"dtype\":\"F32\",\"shape\":[4194304],\"data_offsets\":[0,16777216]}}", N * MIB);
    weights *w = open_ok(&dir);
    error err = {0};
    tensor_view view;
    model_tensor_spec spec = {"a", 1, {N * MIB / 4, 0}};
    assert_int_equal(weights_get(w, &spec, &view, &err), E_OK);
    size_t before = resident_file_bytes();
    unsigned sum = 0;
    for (size_t i = 0; i < (size_t)N * MIB; i += 1024)
        sum += ((const unsigned char *)view.data)[i];
    assert_int_equal(sum, 0);
    assert_true(resident_file_bytes() > before + 15 * MIB);
    weights_release(w, &view);
    assert_true(resident_file_bytes() < before + MIB);
    weights_close(w);
    tempdir_remove(&dir);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_views),       cmocka_unit_test(test_bad_headers),
        cmocka_unit_test(test_bad_files),   cmocka_unit_test(test_sharded),
        cmocka_unit_test(test_check_model), cmocka_unit_test(test_release_gives_pages_back),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
