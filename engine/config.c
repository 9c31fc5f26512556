#include "engine/config.h"

#include "engine/config_read.h"
#include "engine/config_table.h"

#include <errno.h>
#include <inttypes.h>
#include <limits.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

// Where a value came from; a line of the file when positive.
enum { FROM_DEFAULT = 0, FROM_ENVIRONMENT = -1, FROM_OVERRIDE = -2 };

typedef struct loader {
    const char *name; // of the file
    config *out;
    int from[CONFIG_N_ROWS];
} loader;

// TANDEM_ROUTER_PORT for router.port.
static void variable_name(const config_row *row, char *out, size_t n_bytes) {
    size_t n = (size_t)snprintf(out, n_bytes, "TANDEM_%s", row->path);
    for (size_t i = 0; i < n && i < n_bytes; i++)
        out[i] = out[i] == '.'                      ? '_'
                 : (out[i] >= 'a' && out[i] <= 'z') ? (char)(out[i] - 32)
                                                    : out[i];
}

// ---- Error lines ----

static int fail(const loader *l, size_t i, int from, error *err, const char *what) {
    char place[96];
    if (from == FROM_OVERRIDE) {
        snprintf(place, sizeof place, "--set");
    } else if (from == FROM_ENVIRONMENT) {
        variable_name(&config_rows[i], place, sizeof place);
    } else {
        return error_set(err, E_INVALID, "%s:%d: %s: %s", l->name, from > 0 ? from : 1,
                         config_rows[i].path, what);
    }
    return error_set(err, E_INVALID, "%s: %s: %s", place, config_rows[i].path, what);
}

static size_t edit_distance(const char *a, const char *b) {
    size_t row[CONFIG_READ_PATH_BYTES];
    size_t n = strlen(b);
    for (size_t j = 0; j <= n; j++)
        row[j] = j;
    for (size_t i = 1; a[i - 1]; i++) {
        size_t diagonal = row[0];
        row[0] = i;
        for (size_t j = 1; j <= n; j++) {
            size_t best = diagonal + (a[i - 1] != b[j - 1]);
            diagonal = row[j];
            if (row[j] + 1 < best)
                best = row[j] + 1;
            if (row[j - 1] + 1 < best)
                best = row[j - 1] + 1;
            row[j] = best;
        }
    }
    return row[n];
}

// The key (or section) that an unknown one most likely means, or NULL: a near spelling, or the same
// last word in another section.
static const char *nearest_key(const char *unknown, char *section, size_t n_section) {
    const char *best = NULL;
    size_t best_distance = strlen(unknown) / 3 < 2 ? 2 : strlen(unknown) / 3;
    for (size_t i = 0; i < CONFIG_N_ROWS; i++) {
        const char *dot = strchr(config_rows[i].path, '.');
        size_t distance = edit_distance(unknown, config_rows[i].path);
        if (dot && strcmp(unknown, dot + 1) == 0)
            distance = 0;
        if (distance < best_distance || (distance == best_distance && !best)) {
            best_distance = distance;
            best = config_rows[i].path;
        }
        if (!dot)
            continue;
        char name[CONFIG_READ_PATH_BYTES];
        snprintf(name, sizeof name, "%.*s", (int)(dot - config_rows[i].path), config_rows[i].path);
        if (edit_distance(unknown, name) < best_distance) {
            best_distance = edit_distance(unknown, name);
            snprintf(section, n_section, "%s", name);
            best = section;
        }
    }
    return best;
}

static int fail_unknown(const char *place, const char *path, error *err) {
    char section[CONFIG_READ_PATH_BYTES];
    const char *near = nearest_key(path, section, sizeof section);
    if (near)
        return error_set(err, E_INVALID, "%s: %.100s: unknown key; did you mean %s?", place, path,
                         near);
    return error_set(err, E_INVALID, "%s: %.100s: unknown key; see `tandem config --help`", place,
                     path);
}

// ---- One value ----

// A value as it was given; text is set for texts from the file, and for everything from elsewhere.
typedef struct given {
    bool is_text, is_integer, is_number;
    const char *text;
    int64_t integer;
    double number;
    char shown[80]; // for error lines
} given;

static void given_from_text(const char *text, given *out) {
    char *end;
    *out = (given){.is_text = true, .text = text};
    errno = 0;
    long long integer = strtoll(text, &end, 10);
    out->is_integer = *text && !*end && !errno;
    out->integer = integer;
    errno = 0;
    out->number = strtod(text, &end);
    out->is_number = *text && !*end && !errno && out->number - out->number == 0;
    snprintf(out->shown, sizeof out->shown, "'%.60s'", text);
}

static void given_from_json(const json_value *value, given *out) {
    bool flag;
    *out = (given){0};
    if (json_as_string(value, &out->text)) {
        out->is_text = true;
        snprintf(out->shown, sizeof out->shown, "\"%.60s\"", out->text);
    } else if (json_as_double(value, &out->number)) {
        out->is_number = true;
        out->is_integer = json_as_int(value, &out->integer);
        snprintf(out->shown, sizeof out->shown, "%.15g", out->number);
    } else {
        snprintf(out->shown, sizeof out->shown, "%s",
                 !json_as_bool(value, &flag) ? "null"
                 : flag                      ? "true"
                                             : "false");
    }
}

static bool is_device(const char *text) {
    static const char *const names[] = {"cpu",        "cpu:ref", "cpu:avx2",
                                        "cpu:avx512", "cpu:amx", "emulated"};
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++)
        if (strcmp(text, names[i]) == 0)
            return true;
    size_t n = strlen(text);
    return n > 5 && n <= 8 && memcmp(text, "cuda:", 5) == 0 &&
           strspn(text + 5, "0123456789") == n - 5;
}

static bool is_address(const char *text) {
    const char *colon = strrchr(text, ':');
    if (!colon || colon == text || !colon[1] || strlen(colon + 1) > 5)
        return !*text;
    return strspn(colon + 1, "0123456789") == strlen(colon + 1) && atoi(colon + 1) <= 65535;
}

// Position in the list of choices, or -1.
static int choice_of(const config_row *row, const char *text) {
    for (int i = 0; row->choices[i]; i++)
        if (strcmp(row->choices[i], text) == 0)
            return i;
    return -1;
}

static bool store(const config_row *row, const given *value, config *out) {
    char *field = (char *)out + row->offset;
    int choice = value->is_text && row->choices ? choice_of(row, value->text) : 0;
    size_t limit = row->type == TYPE_PATH ? CONFIG_PATH_BYTES : CONFIG_TEXT_BYTES;
    switch (row->type) {
    case TYPE_INTEGER:
        if (!value->is_integer || (double)value->integer < row->min ||
            (double)value->integer > row->max)
            return false;
        memcpy(field, &value->integer, sizeof value->integer);
        return true;
    case TYPE_SECONDS:
        if (!value->is_number || value->number < row->min || value->number > row->max)
            return false;
        memcpy(field, &value->number, sizeof value->number);
        return true;
    case TYPE_CHOICE:
        if (!value->is_text || choice < 0)
            return false;
        memcpy(field, &choice, sizeof choice);
        return true;
    case TYPE_TEXT:
    case TYPE_PATH:
    case TYPE_DEVICE:
    case TYPE_ADDRESS:
        break;
    }
    if (!value->is_text || strlen(value->text) >= limit || choice < 0 ||
        (row->type == TYPE_DEVICE && !is_device(value->text)) ||
        (row->type == TYPE_ADDRESS && !is_address(value->text)))
        return false;
    memcpy(field, value->text, strlen(value->text) + 1);
    return true;
}

static int set_value(loader *l, size_t i, int from, const given *value, error *err) {
    if (from > 0 && l->from[i] > 0) {
        char what[64];
        snprintf(what, sizeof what, "given twice, first in line %d; keep one", l->from[i]);
        return fail(l, i, from, err, what);
    }
    if (!store(&config_rows[i], value, l->out)) {
        char type[160], what[320];
        config_row_describe(&config_rows[i], type, sizeof type);
        snprintf(what, sizeof what, "%s is not allowed; give %s", value->shown, type);
        return fail(l, i, from, err, what);
    }
    l->from[i] = from;
    return E_OK;
}

// ---- Sources ----

// Index of a key, or -1.
static int find_row(const char *path) {
    for (int i = 0; i < CONFIG_N_ROWS; i++)
        if (strcmp(config_rows[i].path, path) == 0)
            return i;
    return -1;
}

static bool is_section(const char *path) {
    size_t n = strlen(path);
    for (size_t i = 0; n && i < CONFIG_N_ROWS; i++)
        if (strncmp(config_rows[i].path, path, n) == 0 && config_rows[i].path[n] == '.')
            return true;
    return false;
}

static int take_from_file(void *user, const char *path, int line, const json_value *value,
                          error *err) {
    loader *l = user;
    int i = find_row(path);
    char place[CONFIG_PATH_BYTES + 16];
    snprintf(place, sizeof place, "%s:%d", l->name, line);
    if (i < 0 && is_section(path))
        return value
                   ? error_set(err, E_INVALID, "%s: %s: is a section; write \"%s\": { KEY: VALUE }",
                               place, path, path)
                   : E_OK;
    if (i < 0)
        return fail_unknown(place, path, err);
    given read;
    if (value) {
        given_from_json(value, &read);
    } else {
        read = (given){0};
        snprintf(read.shown, sizeof read.shown, "{ }");
    }
    return set_value(l, (size_t)i, line, &read, err);
}

static void set_defaults(loader *l) {
    *l->out = (config){0};
    for (size_t i = 0; i < CONFIG_N_ROWS; i++) {
        given value;
        given_from_text(config_rows[i].initial, &value);
        store(&config_rows[i], &value, l->out);
    }
}

static int take_from_environment(loader *l, error *err) {
    for (size_t i = 0; i < CONFIG_N_ROWS; i++) {
        char name[96];
        variable_name(&config_rows[i], name, sizeof name);
        const char *text = getenv(name);
        if (!text)
            continue;
        given value;
        given_from_text(text, &value);
        int rc = set_value(l, i, FROM_ENVIRONMENT, &value, err);
        if (rc != E_OK)
            return rc;
    }
    return E_OK;
}

static int take_override(loader *l, const char *text, error *err) {
    char path[CONFIG_READ_PATH_BYTES];
    const char *equals = strchr(text, '=');
    if (!equals)
        return error_set(err, E_INVALID, "--set: %.100s: the value is missing; write KEY=VALUE",
                         text);
    snprintf(path, sizeof path, "%.*s", (int)(equals - text < 200 ? equals - text : 200), text);
    int i = find_row(path);
    if (i < 0)
        return fail_unknown("--set", path, err);
    given value;
    given_from_text(equals + 1, &value);
    return set_value(l, (size_t)i, FROM_OVERRIDE, &value, err);
}

// ---- Checks that need more than one value, or the file system ----

static int resolve_launch(const loader *l, const char *key, int64_t workers, int64_t *launch,
                          error *err) {
    size_t i = (size_t)find_row(key);
    char what[160];
    if (*launch > workers) {
        snprintf(what, sizeof what,
                 "%" PRId64 " is more than there are workers; give 0 to %" PRId64, *launch,
                 workers);
        return fail(l, i, l->from[i], err, what);
    }
    if (*launch < 0)
        *launch = workers;
    if (*launch < workers && !l->out->router.control[0]) {
        snprintf(what, sizeof what,
                 "%" PRId64 " of %" PRId64 " workers join from elsewhere, but nothing listens for "
                 "them; set router.control to HOST:PORT",
                 workers - *launch, workers);
        return fail(l, i, l->from[i], err, what);
    }
    return E_OK;
}

static int check_together(const loader *l, error *err) {
    config *c = l->out;
    if (!c->model[0])
        return error_set(err, E_INVALID,
                         "%s:1: model: missing; give the directory of a model, \"model\": \"PATH\"",
                         l->name);
    if (c->attention.token_budget < c->attention.max_seqs) {
        size_t i = (size_t)find_row("attention.token_budget");
        char what[160];
        snprintf(what, sizeof what,
                 "%" PRId64 " is below attention.max_seqs, which is %" PRId64
                 "; a step needs a row for every running request",
                 c->attention.token_budget, c->attention.max_seqs);
        return fail(l, i, l->from[i], err, what);
    }
    int rc = resolve_launch(l, "attention.launch", c->attention.workers, &c->attention.launch, err);
    if (rc == E_OK)
        rc = resolve_launch(l, "ffn.launch", c->ffn.workers, &c->ffn.launch, err);
    return rc;
}

// Makes the model's path absolute and checks that a model is there.
static int resolve_model(const loader *l, error *err) {
    size_t i = (size_t)find_row("model");
    int from = l->from[i];
    const char *slash = strrchr(l->name, '/');
    int n_dir = from > 0 && l->out->model[0] != '/' && slash ? (int)(slash - l->name) + 1 : 0;
    char joined[2 * CONFIG_PATH_BYTES], resolved[PATH_MAX], what[400];
    snprintf(joined, sizeof joined, "%.*s%s", n_dir, l->name, l->out->model);
    struct stat info;
    if (!realpath(joined, resolved) || stat(resolved, &info) != 0) {
        snprintf(what, sizeof what, "%.200s: %s; give the directory of a model", joined,
                 strerror(errno));
        return fail(l, i, from, err, what);
    }
    if (!S_ISDIR(info.st_mode)) {
        snprintf(what, sizeof what,
                 "%.200s is not a directory; give the one that holds config.json", resolved);
        return fail(l, i, from, err, what);
    }
    snprintf(joined, sizeof joined, "%s/config.json", resolved);
    if (stat(joined, &info) != 0) {
        snprintf(what, sizeof what, "%.200s: %s; give the directory of a Hugging Face model",
                 joined, strerror(errno));
        return fail(l, i, from, err, what);
    }
    if (strlen(resolved) >= sizeof l->out->model)
        return fail(l, i, from, err, "the absolute path is too long");
    memcpy(l->out->model, resolved, strlen(resolved) + 1);
    return E_OK;
}

static void name_model(config *c) {
    const char *slash = strrchr(c->model, '/');
    if (!c->served_model_name[0])
        snprintf(c->served_model_name, sizeof c->served_model_name, "%.*s", CONFIG_TEXT_BYTES - 1,
                 slash ? slash + 1 : c->model);
}

static int read_file(const char *path, char **out, size_t *n_out, error *err) {
    FILE *file = fopen(path, "rb");
    struct stat info;
    if (!file)
        return error_set(err, E_NOT_FOUND, "%s: %s; give the path of a configuration file", path,
                         strerror(errno));
    int rc = E_OK;
    char *text = NULL;
    if (fstat(fileno(file), &info) != 0 || S_ISDIR(info.st_mode)) {
        rc = error_set(err, E_INVALID, "%s: is a directory; give a configuration file in it", path);
        goto close_file;
    }
    text = malloc(CONFIG_MAX_FILE_BYTES + 1);
    if (!text) {
        rc = error_set(err, E_NO_MEMORY, "%s: out of memory", path);
        goto close_file;
    }
    size_t n = fread(text, 1, CONFIG_MAX_FILE_BYTES + 1, file);
    if (ferror(file))
        rc = error_set(err, E_IO, "%s: %s", path, strerror(errno));
    else if (n > CONFIG_MAX_FILE_BYTES)
        rc = error_set(err, E_TOO_LARGE, "%s: larger than %d bytes; this is no configuration file",
                       path, CONFIG_MAX_FILE_BYTES);
    if (rc != E_OK) {
        free(text);
        goto close_file;
    }
    *out = text;
    *n_out = n;
close_file:
    fclose(file);
    return rc;
}

int config_load(const char *path, const char *const *overrides, size_t n_overrides, config *out,
                error *err) {
    config result;
    loader l = {.name = path, .out = &result};
    char *text = NULL;
    size_t n = 0;
    set_defaults(&l);
    int rc = read_file(path, &text, &n, err);
    if (rc != E_OK)
        return rc;
    rc = config_read(path, text, n, take_from_file, &l, err);
    free(text);
    if (rc == E_OK)
        rc = take_from_environment(&l, err);
    for (size_t i = 0; i < n_overrides && rc == E_OK; i++)
        rc = take_override(&l, overrides[i], err);
    if (rc != E_OK || (rc = check_together(&l, err)) != E_OK ||
        (rc = resolve_model(&l, err)) != E_OK)
        return rc;
    name_model(&result);
    *out = result;
    return E_OK;
}

int config_parse_json(const char *name, const char *text, size_t n_bytes, config *out, error *err) {
    config result;
    loader l = {.name = name, .out = &result};
    set_defaults(&l);
    int rc = config_read(name, text, n_bytes, take_from_file, &l, err);
    if (rc != E_OK || (rc = check_together(&l, err)) != E_OK)
        return rc;
    name_model(&result);
    *out = result;
    return E_OK;
}

dtype config_compute_dtype(const config *c, dtype checkpoint) {
    if (c->dtype == CONFIG_DTYPE_AUTO)
        return checkpoint == DTYPE_F32 ? DTYPE_F32 : DTYPE_BF16;
    return c->dtype == CONFIG_DTYPE_F32 ? DTYPE_F32 : DTYPE_BF16;
}

dtype config_wire_dtype(const config *c, dtype checkpoint) {
    if (c->wire.dtype == CONFIG_DTYPE_AUTO)
        return config_compute_dtype(c, checkpoint);
    return c->wire.dtype == CONFIG_DTYPE_F32 ? DTYPE_F32 : DTYPE_BF16;
}
