#include "router/synth.h"

#include "engine/json.h"

#include <dirent.h>
#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

// ---- Arguments ----

typedef struct option {
    const char *name, *help;
    size_t offset; // of a size_t in synth_args
    int64_t min, max, preset;
} option;

#define AT(field) offsetof(synth_args, field)
static const option options[] = {
    {"--hidden", "hidden size", AT(hidden), 1, MODEL_MAX_HIDDEN, 2048},
    {"--layers", "layers", AT(layers), 1, MODEL_MAX_LAYERS, 4},
    {"--heads", "attention heads", AT(heads), 1, MODEL_MAX_HEADS, 16},
    {"--kv-heads", "heads of keys and values; 0: as --heads", AT(kv_heads), 0, MODEL_MAX_HEADS, 0},
    {"--head-dim", "size of a head; 0: hidden / heads", AT(head_dim), 0, MODEL_MAX_HEAD_DIM, 0},
    {"--experts", "experts of a layer", AT(experts), 1, MODEL_MAX_EXPERTS, 64},
    {"--top-k", "experts of a token", AT(top_k), 1, MODEL_MAX_TOP_K, 8},
    {"--intermediate", "intermediate size of an expert", AT(intermediate), 1,
     MODEL_MAX_INTERMEDIATE, 1024},
    {"--shared-intermediate", "that of the shared expert (qwen2_moe); 0: as --intermediate",
     AT(shared_intermediate), 0, MODEL_MAX_INTERMEDIATE, 0},
    {"--vocab", "vocabulary", AT(vocab), SYNTH_MIN_VOCAB, MODEL_MAX_VOCAB, 50304},
    {"--context", "positions", AT(context), 1, MODEL_MAX_POSITIONS, 4096},
    {"--seed", "of the weights", AT(seed), 0, JSON_INT_MAX, 1},
    {"--shard-bytes", "bytes of weights in a file at most; 0: one file", AT(shard_bytes), 0,
     JSON_INT_MAX, 0},
};
#undef AT
enum { N_OPTIONS = sizeof options / sizeof *options };

static const char *const arch_names[] = {
#define X(name, hf, type) type,
    MODEL_ARCH_MAP(X)
#undef X
};
enum { N_ARCHS = sizeof arch_names / sizeof *arch_names };

static void print_help(void) {
    printf(
        "usage: tandem synth --arch ARCH [OPTION VALUE ...] DIR\n"
        "Writes a model with random weights and a dummy tokenizer into the new directory DIR.\n\n"
        "  %-22s",
        "--arch");
    for (int i = 0; i < N_ARCHS; i++)
        printf("%s%s", i ? ", " : "", arch_names[i]);
    printf("\n  %-22sbf16 (default), f16, f32\n", "--dtype");
    for (int i = 0; i < N_OPTIONS; i++)
        printf("  %-22s%s (default %" PRId64 ", from %" PRId64 " to %" PRId64 ")\n",
               options[i].name, options[i].help, options[i].preset, options[i].min, options[i].max);
}

static int read_number(const option *o, const char *text, synth_args *args, error *err) {
    char *end = NULL;
    errno = 0;
    long long value = strtoll(text, &end, 10);
    if (errno || end == text || *end || value < o->min || value > o->max)
        return error_set(err, E_INVALID,
                         "%s: expected an integer from %" PRId64 " to %" PRId64 ", not '%.60s'",
                         o->name, o->min, o->max, text);
    *(size_t *)((char *)args + o->offset) = (size_t)value;
    return E_OK;
}

static int read_arch(const char *text, synth_args *args, error *err) {
    for (int i = 0; i < N_ARCHS; i++) {
        if (strcmp(text, arch_names[i]) == 0) {
            args->arch = (model_arch)i;
            return E_OK;
        }
    }
    return error_set(err, E_INVALID,
                     "--arch: expected olmoe, qwen2_moe, qwen3_moe or mixtral, not '%.60s'", text);
}

static int read_dtype(const char *text, synth_args *args, error *err) {
    for (int i = 0; i < DTYPE_COUNT; i++) {
        if (strcmp(text, dtype_name((dtype)i)) == 0) {
            args->type = (dtype)i;
            return E_OK;
        }
    }
    return error_set(err, E_INVALID, "--dtype: expected bf16, f16 or f32, not '%.60s'", text);
}

static int read_option(const char *name, const char *value, synth_args *args, error *err) {
    if (strcmp(name, "--arch") == 0)
        return read_arch(value, args, err);
    if (strcmp(name, "--dtype") == 0)
        return read_dtype(value, args, err);
    for (int i = 0; i < N_OPTIONS; i++)
        if (strcmp(name, options[i].name) == 0)
            return read_number(&options[i], value, args, err);
    return error_set(err, E_INVALID, "unknown option '%.60s'", name);
}

// Takes `--name value` and `--name=value`.
static int read_arguments(int argc, char **argv, synth_args *args, error *err) {
    bool has_arch = false;
    args->type = DTYPE_BF16;
    for (int i = 0; i < N_OPTIONS; i++)
        *(size_t *)((char *)args + options[i].offset) = (size_t)options[i].preset;
    for (int i = 0; i < argc; i++) {
        char name[64];
        if (argv[i][0] != '-') {
            if (args->dir)
                return error_set(err, E_INVALID, "one directory is enough, not also '%.60s'",
                                 argv[i]);
            args->dir = argv[i];
            continue;
        }
        size_t length = strcspn(argv[i], "=");
        const char *value = argv[i][length] ? argv[i] + length + 1 : NULL;
        snprintf(name, sizeof name, "%.*s", (int)length, argv[i]);
        if (!value && i + 1 == argc)
            return error_set(err, E_INVALID, "'%.60s' stands without a value", name);
        int rc = read_option(name, value ? value : argv[++i], args, err);
        if (rc != E_OK)
            return rc;
        has_arch = has_arch || strcmp(name, "--arch") == 0;
    }
    if (!has_arch)
        return error_set(err, E_INVALID, "--arch is missing");
    if (!args->dir || !*args->dir)
        return error_set(err, E_INVALID, "the directory is missing");
    return E_OK;
}

// ---- Files ----

static int join_path(const synth_args *args, const char *name, char *out, size_t n, error *err) {
    int length = snprintf(out, n, "%s/%s", args->dir, name);
    if (length < 0 || (size_t)length >= n)
        return error_set(err, E_TOO_LARGE, "%.200s...: the path is too long", args->dir);
    return E_OK;
}

int synth_create(const synth_args *args, const char *name, FILE **out, error *err) {
    char path[4096];
    int rc = join_path(args, name, path, sizeof path, err);
    if (rc != E_OK)
        return rc;
    FILE *file = fopen(path, "wb");
    if (!file)
        return error_set(err, E_IO, "%s: %s", path, strerror(errno));
    *out = file;
    return E_OK;
}

int synth_finish(const synth_args *args, const char *name, FILE *file, error *err) {
    bool failed = ferror(file) != 0;
    if (fclose(file) != 0 || failed)
        return error_set(err, E_IO, "%s/%s: could not be written to its end: %s", args->dir, name,
                         errno ? strerror(errno) : "unknown error");
    return E_OK;
}

static int make_directory(const char *dir, error *err) {
    if (mkdir(dir, 0777) == 0)
        return E_OK;
    if (errno != EEXIST)
        return error_set(err, E_IO, "%s: %s", dir, strerror(errno));
    DIR *list = opendir(dir);
    if (!list)
        return error_set(err, E_IO, "%s: %s", dir, strerror(errno));
    bool empty = true;
    for (struct dirent *entry; empty && (entry = readdir(list));)
        empty = strcmp(entry->d_name, ".") == 0 || strcmp(entry->d_name, "..") == 0;
    closedir(list);
    return empty ? E_OK : error_set(err, E_IO, "%s: not empty; give a new directory", dir);
}

// ---- config.json ----

static void print_config(FILE *out, const synth_args *a) {
    bool qwen = a->arch == MODEL_ARCH_QWEN2_MOE || a->arch == MODEL_ARCH_QWEN3_MOE;
    bool mixtral = a->arch == MODEL_ARCH_MIXTRAL;
    static const char *const types[] = {
        [DTYPE_F32] = "float32", [DTYPE_BF16] = "bfloat16", [DTYPE_F16] = "float16"};
    fprintf(out, "{\n  \"architectures\": [\"%s\"],\n  \"model_type\": \"%s\",\n",
            model_arch_name(a->arch), arch_names[a->arch]);
    fprintf(out, "  \"hidden_size\": %zu,\n  \"num_hidden_layers\": %zu,\n", a->hidden, a->layers);
    fprintf(out, "  \"num_attention_heads\": %zu,\n  \"num_key_value_heads\": %zu,\n", a->heads,
            a->kv_heads ? a->kv_heads : a->heads);
    if (a->head_dim)
        fprintf(out, "  \"head_dim\": %zu,\n", a->head_dim);
    fprintf(out, "  \"%s\": %zu,\n  \"num_experts_per_tok\": %zu,\n",
            mixtral ? "num_local_experts" : "num_experts", a->experts, a->top_k);
    fprintf(out, "  \"intermediate_size\": %zu,\n", a->intermediate);
    if (qwen)
        fprintf(out,
                "  \"moe_intermediate_size\": %zu,\n  \"decoder_sparse_step\": 1,\n"
                "  \"mlp_only_layers\": [],\n  \"use_sliding_window\": false,\n",
                a->intermediate);
    if (a->arch == MODEL_ARCH_QWEN2_MOE)
        fprintf(out, "  \"shared_expert_intermediate_size\": %zu,\n",
                a->shared_intermediate ? a->shared_intermediate : a->intermediate);
    if (!mixtral)
        fprintf(out, "  \"norm_topk_prob\": %s,\n",
                a->arch == MODEL_ARCH_QWEN3_MOE ? "true" : "false");
    fprintf(out, "  \"hidden_act\": \"silu\",\n  \"rms_norm_eps\": %s,\n  \"rope_theta\": %s,\n",
            qwen ? "1e-06" : "1e-05", a->arch == MODEL_ARCH_OLMOE ? "10000.0" : "1000000.0");
    fprintf(out, "  \"max_position_embeddings\": %zu,\n  \"vocab_size\": %zu,\n", a->context,
            a->vocab);
    fprintf(out, "  \"bos_token_id\": null,\n  \"eos_token_id\": %zu,\n  \"pad_token_id\": %zu,\n",
            a->vocab - 1, a->vocab - SYNTH_N_SPECIAL);
    fprintf(out, "  \"tie_word_embeddings\": false,\n  \"torch_dtype\": \"%s\"\n}\n",
            types[a->type]);
}

// The configuration as our own loader reads it.
static int parse_config(const synth_args *args, model_config *out, error *err) {
    char *text = NULL;
    size_t n = 0;
    json *doc = NULL;
    FILE *file = open_memstream(&text, &n);
    if (!file)
        return error_set(err, E_NO_MEMORY, "out of memory");
    print_config(file, args);
    fclose(file);
    int rc = json_parse("config.json", text, n, &doc, err);
    if (rc == E_OK)
        rc = model_config_parse(doc, NULL, out, err);
    json_close(doc);
    free(text);
    return rc;
}

int synth_write(const synth_args *args, synth_progress progress, void *user, error *err) {
    model_config config;
    FILE *out = NULL;
    int rc;
    if ((rc = parse_config(args, &config, err)) != E_OK ||
        (rc = make_directory(args->dir, err)) != E_OK ||
        (rc = synth_write_tokenizer(args, err)) != E_OK ||
        (rc = synth_write_weights(args, &config, progress, user, err)) != E_OK ||
        (rc = synth_create(args, "generation_config.json", &out, err)) != E_OK)
        return rc;
    fprintf(out, "{\n  \"eos_token_id\": [%zu, %zu],\n  \"pad_token_id\": %zu\n}\n",
            args->vocab - 1, args->vocab - SYNTH_N_SPECIAL, args->vocab - SYNTH_N_SPECIAL);
    rc = synth_finish(args, "generation_config.json", out, err);
    // config.json comes last: a directory that has it is whole.
    if (rc == E_OK)
        rc = synth_create(args, "config.json", &out, err);
    if (rc != E_OK)
        return rc;
    print_config(out, args);
    return synth_finish(args, "config.json", out, err);
}

// ---- The command ----

typedef struct meter {
    bool terminal;
    double started_s, shown_s;
    size_t total_bytes;
} meter;

static double now_s(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

static void show_progress(void *user, size_t done_bytes, size_t total_bytes) {
    meter *m = user;
    double now = now_s();
    m->total_bytes = total_bytes;
    if (now - m->shown_s < (m->terminal ? 0.1 : 5))
        return;
    m->shown_s = now;
    fprintf(stderr, "%s%3.0f%% of %.2f GB%s", m->terminal ? "\r" : "",
            100 * (double)done_bytes / (double)total_bytes, (double)total_bytes * 1e-9,
            m->terminal ? "" : "\n");
}

int synth_main(int argc, char **argv) {
    synth_args args = {0};
    model_config config;
    error err = {0};
    for (int i = 0; i < argc; i++) {
        if (strcmp(argv[i], "--help") == 0 || strcmp(argv[i], "-h") == 0) {
            print_help();
            return 0;
        }
    }
    if (read_arguments(argc, argv, &args, &err) != E_OK ||
        parse_config(&args, &config, &err) != E_OK) {
        fprintf(stderr, "tandem synth: %s; see `tandem synth --help`\n", err.text);
        return 2;
    }
    meter m = {.terminal = isatty(STDERR_FILENO), .started_s = now_s()};
    m.shown_s = m.started_s;
    int rc = synth_write(&args, show_progress, &m, &err);
    if (m.terminal)
        fprintf(stderr, "\r\033[K");
    if (rc != E_OK) {
        fprintf(stderr, "tandem synth: %s\n", err.text);
        return 1;
    }
    printf("%s: %s, %.3f GB of %s weights, %.1f s\n", args.dir, model_arch_name(args.arch),
           (double)m.total_bytes * 1e-9, dtype_name(args.type), now_s() - m.started_s);
    return 0;
}
