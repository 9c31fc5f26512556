// `tandem synth`: what it writes opens with our own loader, and wrong arguments say so.
#include "engine/chat.h"
#include "engine/tokenizer.h"
#include "engine/weights.h"
#include "router/synth.h"
#include "tests/support/tempdir.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <unistd.h>

#include <cmocka.h>

static synth_args tiny(const tempdir *dir, model_arch arch, dtype type) {
    return (synth_args){.arch = arch,
                        .hidden = 32,
                        .layers = 2,
                        .heads = 4,
                        .kv_heads = 2,
                        .experts = 6,
                        .top_k = 2,
                        .intermediate = 24,
                        .shared_intermediate = arch == MODEL_ARCH_QWEN2_MOE ? 40 : 0,
                        .vocab = 270,
                        .context = 64,
                        .type = type,
                        .seed = 3,
                        .dir = dir->path};
}

static void write_ok(const synth_args *args) {
    error err = {0};
    if (synth_write(args, NULL, NULL, &err) != E_OK)
        fail_msg("%s", err.text);
}

static weights *open_checked(const tempdir *dir, model_config *config) {
    weights *w = NULL;
    error err = {0};
    if (model_config_load(dir->path, config, &err) != E_OK ||
        weights_open(dir->path, &w, &err) != E_OK || weights_check_model(w, config, &err) != E_OK)
        fail_msg("%s", err.text);
    return w;
}

static tensor_view view_of(weights *w, const model_config *c, model_tensor which, size_t layer,
                           size_t expert) {
    model_tensor_spec spec;
    tensor_view view;
    error err = {0};
    model_tensor_describe(c, which, layer, expert, &spec);
    if (weights_get(w, &spec, &view, &err) != E_OK)
        fail_msg("%s", err.text);
    return view;
}

static float element(const tensor_view *view, size_t i) {
    uint16_t half;
    float value;
    if (view->type == DTYPE_F32) {
        memcpy(&value, (const char *)view->data + i * 4, 4);
        return value;
    }
    memcpy(&half, (const char *)view->data + i * 2, 2);
    return view->type == DTYPE_BF16 ? bf16_to_f32(half) : f16_to_f32(half);
}

static void test_every_architecture_and_type(void **state) {
    (void)state;
    for (int arch = 0; arch <= MODEL_ARCH_MIXTRAL; arch++) {
        for (int type = 0; type < DTYPE_COUNT; type++) {
            tempdir dir = tempdir_make();
            synth_args args = tiny(&dir, (model_arch)arch, (dtype)type);
            args.shard_bytes = type == DTYPE_F16 ? 40000 : 0;
            write_ok(&args);
            model_config c;
            weights *w = open_checked(&dir, &c);
            assert_int_equal(c.arch, arch);
            assert_int_equal(c.checkpoint, type);
            assert_int_equal(c.head_dim, 8);
            assert_int_equal(c.shared_intermediate, arch == MODEL_ARCH_QWEN2_MOE ? 40 : 0);
            assert_int_equal(c.n_eos, 2);
            assert_int_equal(c.eos[0], 269);
            tensor_view norm = view_of(w, &c, MODEL_FFN_NORM, 1, 0);
            tensor_view embed = view_of(w, &c, MODEL_EMBED, 0, 0);
            assert_int_equal(embed.type, type);
            for (size_t i = 0; i < 32; i++)
                assert_true(element(&norm, i) == 1);
            double sum = 0, squares = 0;
            size_t n = 270 * 32;
            for (size_t i = 0; i < n; i++) {
                sum += (double)element(&embed, i);
                squares += (double)element(&embed, i) * (double)element(&embed, i);
            }
            // Mean 0 and variance 1/32, within five standard errors.
            assert_true(fabs(sum / (double)n) < 5 * sqrt(1 / 32. / (double)n));
            assert_true(fabs(squares / (double)n * 32 - 1) < 5 * sqrt(2 / (double)n));
            weights_close(w);
            tempdir_remove(&dir);
        }
    }
}

static void test_weights_depend_on_the_seed_alone(void **state) {
    (void)state;
    tempdir dirs[3];
    weights *w[3];
    model_config c;
    for (int i = 0; i < 3; i++) {
        dirs[i] = tempdir_make();
        synth_args args = tiny(&dirs[i], MODEL_ARCH_QWEN3_MOE, DTYPE_BF16);
        args.shard_bytes = i == 1 ? 1000 : 0; // fewer than one tensor has: a file for each
        args.seed = i == 2 ? 4 : 3;
        write_ok(&args);
        w[i] = open_checked(&dirs[i], &c);
    }
    const char *last[3];
    for (int i = 0; i < 3; i++)
        last[i] = view_of(w[i], &c, MODEL_EXPERT_DOWN, 1, 5).data;
    assert_memory_equal(last[0], last[1], 24 * 32 * 2);
    assert_memory_not_equal(last[0], last[2], 24 * 32 * 2);
    assert_int_equal(weights_total_bytes(w[0]), weights_total_bytes(w[1]));
    for (int i = 0; i < 3; i++) {
        weights_close(w[i]);
        tempdir_remove(&dirs[i]);
    }
}

static void test_tokenizer_has_every_id(void **state) {
    (void)state;
    tempdir dir = tempdir_make();
    synth_args args = tiny(&dir, MODEL_ARCH_OLMOE, DTYPE_BF16);
    write_ok(&args);
    tokenizer *t = NULL;
    error err = {0};
    if (tokenizer_open(dir.path, &t, &err) != E_OK)
        fail_msg("%s", err.text);
    assert_int_equal(tokenizer_vocab_size(t), 270);
    for (int32_t id = 0; id < 270; id++) {
        const char *bytes = NULL;
        size_t n = 0;
        assert_int_equal(tokenizer_token_bytes(t, id, &bytes, &n), E_OK);
        assert_true(n > 0 && (id >= 256 || (n == 1 && (uint8_t)bytes[0] == id)));
        assert_int_equal(tokenizer_is_special(t, id), id >= 267);
    }
    assert_int_equal(tokenizer_token_id(t, "<|im_end|>"), 269);
    assert_int_equal(tokenizer_eos_id(t), 269);
    static const char text[] = "h\xc3\xa9 2\n";
    token_ids ids = {0};
    assert_int_equal(tokenizer_encode(t, text, 6, false, true, &ids, &err), E_OK);
    assert_int_equal(ids.n, 6);
    for (size_t i = 0; i < ids.n; i++)
        assert_int_equal(ids.ids[i], (uint8_t)text[i]);
    token_ids_free(&ids);
    tokenizer_close(t);
    chat_format *format = NULL;
    if (chat_format_open(dir.path, NULL, &format, &err) != E_OK)
        fail_msg("%s", err.text);
    assert_string_equal(chat_format_name(format), "chatml");
    chat_format_close(format);
    tempdir_remove(&dir);
}

// Runs the command; the result is its exit status, text what it said on standard error.
static int run(const char *const *arguments, char *text, size_t n) {
    char *argv[16];
    int argc = 0;
    for (; arguments[argc]; argc++)
        argv[argc] = (char *)(uintptr_t)arguments[argc];
    FILE *capture = tmpfile();
    assert_non_null(capture);
    fflush(stdout);
    fflush(stderr);
    int out = dup(STDOUT_FILENO), err = dup(STDERR_FILENO);
    dup2(fileno(capture), STDOUT_FILENO);
    dup2(fileno(capture), STDERR_FILENO);
    int status = synth_main(argc, argv);
    fflush(stdout);
    fflush(stderr);
    dup2(out, STDOUT_FILENO);
    dup2(err, STDERR_FILENO);
    close(out);
    close(err);
    rewind(capture);
    text[fread(text, 1, n - 1, capture)] = 0;
    fclose(capture);
    return status;
}

static void test_command_line(void **state) {
    (void)state;
    tempdir dir = tempdir_make();
    tempdir_write_text(&dir, "x", "");
    char text[4096];
    const struct {
        const char *arguments[10];
        int status;
        const char *message;
    } cases[] = {
        {{"d"}, 2, "--arch is missing"},
        {{"--arch", "olmoe"}, 2, "the directory is missing"},
        {{"--arch", "gpt", "d"}, 2, "--arch: expected olmoe, qwen2_moe, qwen3_moe or mixtral"},
        {{"--arch", "olmoe", "d", "e"}, 2, "one directory is enough, not also 'e'"},
        {{"--arch", "olmoe", "d", "--hidden"}, 2, "'--hidden' stands without a value"},
        {{"--arch", "olmoe", "d", "--hidden", "12x"}, 2, "--hidden: expected an integer from 1"},
        {{"--arch", "olmoe", "d", "--hidden=99999999999999999999"}, 2, "--hidden: expected an int"},
        {{"--arch", "olmoe", "d", "--vocab", "258"}, 2, "from 259 to"},
        {{"--arch", "olmoe", "d", "--dtype", "fp8"}, 2, "--dtype: expected bf16, f16 or f32"},
        {{"--arch", "olmoe", "d", "--colour", "red"}, 2, "unknown option '--colour'"},
        {{"--arch", "olmoe", "d", "--heads", "3"}, 2, "hidden_size 2048 is not a multiple of 3"},
        {{"--arch", "olmoe", "d", "--experts", "4"}, 2, "8 is more than the model's 4 experts"},
        {{"--arch", "olmoe", "--layers=1", "--hidden=32", dir.path}, 1, "not empty"},
        {{"--arch", "olmoe", "--layers=1", "--hidden=32", "/nonexistent/d"}, 1, "No such file"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        int status = run(cases[i].arguments, text, sizeof text);
        const char *end = strchr(text, '\n');
        if (status != cases[i].status || !strstr(text, cases[i].message) || !end || end[1])
            fail_msg("case %zu: status %d, '%s'", i, status, text);
    }
    tempdir_remove(&dir);
    const char *const help[] = {"--help", NULL};
    assert_int_equal(run(help, text, sizeof text), 0);
    assert_non_null(strstr(text, "--shared-intermediate"));
    dir = tempdir_make();
    const char *const good[] = {"--arch",      "mixtral",     "--hidden=16", "--layers",
                                "1",           "--experts=4", "--top-k=2",   "--intermediate=8",
                                "--vocab=300", "--heads=2",   dir.path,      NULL};
    assert_int_equal(run(good, text, sizeof text), 0);
    assert_non_null(strstr(text, "MixtralForCausalLM"));
    model_config c;
    weights_close(open_checked(&dir, &c));
    assert_int_equal(c.n_kv_heads, 2);
    tempdir_remove(&dir);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_every_architecture_and_type),
        cmocka_unit_test(test_weights_depend_on_the_seed_alone),
        cmocka_unit_test(test_tokenizer_has_every_id),
        cmocka_unit_test(test_command_line),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
