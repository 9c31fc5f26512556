#include "engine/json.h"

#include "engine/utf8.h"

#include <cjson/cJSON.h>

#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

struct json {
    char *name;  // owned
    cJSON *root; // owned
};

static size_t line_of(const char *text, size_t offset) {
    size_t line = 1;
    for (size_t i = 0; i < offset; i++)
        line += text[i] == '\n';
    return line;
}

// Finds the first thing in the bytes that cJSON would wave through; returns why, or NULL.
static const char *find_bad_byte(const char *text, size_t n, size_t *offset) {
    bool in_string = false;
    for (size_t i = 0, length; i < n; i += length) {
        uint32_t c;
        *offset = i;
        if (utf8_next(text + i, n - i, &length, &c) != UTF8_VALID)
            return "not UTF-8";
        if (c == 0)
            return "a NUL byte";
        if (c == '"')
            in_string = !in_string;
        if (!in_string)
            continue;
        if (c < 0x20)
            return "a control character in a string";
        if (c == '\\' && n - i > 1) {
            if (n - i >= 6 && memcmp(text + i, "\\u0000", 6) == 0)
                return "a \\u0000 in a string";
            length = (uint8_t)text[i + 1] < 0x80 ? 2 : 1;
        }
    }
    return NULL;
}

static int by_key(const void *a, const void *b) {
    return strcmp(*(const char *const *)a, *(const char *const *)b);
}

// Sorts the keys of one object and compares neighbours: a client cannot make this slow, as it could
// a hash table with keys that collide.
static int find_duplicate_in(const cJSON *object, const char **duplicate) {
    size_t n = 0;
    for (const cJSON *child = object->child; child; child = child->next)
        n++;
    if (n < 2)
        return E_OK;
    const char **keys = malloc(n * sizeof *keys);
    if (!keys)
        return E_NO_MEMORY;
    n = 0;
    for (const cJSON *child = object->child; child; child = child->next)
        keys[n++] = child->string;
    qsort(keys, n, sizeof *keys, by_key);
    for (size_t i = 1; i < n && !*duplicate; i++)
        if (strcmp(keys[i - 1], keys[i]) == 0)
            *duplicate = keys[i];
    free(keys);
    return E_OK;
}

// Recursion is bounded by cJSON's nesting limit of 1000.
static int find_duplicate(const cJSON *value, const char **duplicate) {
    int rc = cJSON_IsObject(value) ? find_duplicate_in(value, duplicate) : E_OK;
    for (const cJSON *child = value->child; child && rc == E_OK && !*duplicate; child = child->next)
        if (child->child)
            rc = find_duplicate(child, duplicate);
    return rc;
}

static int parse_checked(const char *name, const char *text, size_t n_bytes, cJSON **out,
                         error *err) {
    size_t offset = 0;
    const char *bad = find_bad_byte(text, n_bytes, &offset);
    if (bad)
        return error_set(err, E_INVALID, "%s: line %zu: %s", name, line_of(text, offset), bad);
    const char *end = text;
    cJSON *root = cJSON_ParseWithLengthOpts(text, n_bytes, &end, false);
    offset = (size_t)(end - text);
    if (offset > n_bytes)
        offset = n_bytes;
    if (!root)
        return error_set(err, E_INVALID, "%s: line %zu: not valid JSON at '%.*s'", name,
                         line_of(text, offset),
                         (int)(n_bytes - offset < 20 ? n_bytes - offset : 20), text + offset);
    while (offset < n_bytes && strchr(" \t\r\n", text[offset]))
        offset++;
    if (offset < n_bytes) {
        cJSON_Delete(root);
        return error_set(err, E_INVALID, "%s: line %zu: text after the end of the JSON value", name,
                         line_of(text, offset));
    }
    const char *duplicate = NULL;
    int rc = find_duplicate(root, &duplicate);
    if (rc != E_OK)
        error_set(err, rc, "%s: out of memory", name);
    else if (duplicate)
        rc = error_set(err, E_INVALID, "%s: key '%.60s' stands twice in one object", name,
                       duplicate);
    if (rc != E_OK) {
        cJSON_Delete(root);
        return rc;
    }
    *out = root;
    return E_OK;
}

int json_parse(const char *name, const char *text, size_t n_bytes, json **out, error *err) {
    json *doc = calloc(1, sizeof *doc);
    if (!doc || !(doc->name = strdup(name))) {
        json_close(doc);
        return error_set(err, E_NO_MEMORY, "%s: out of memory", name);
    }
    int rc = parse_checked(name, text, n_bytes, &doc->root, err);
    if (rc != E_OK) {
        json_close(doc);
        return rc;
    }
    *out = doc;
    return E_OK;
}

static int read_file(const char *path, size_t max_bytes, char **out, size_t *n_out, error *err) {
    int rc = E_OK;
    char *text = NULL;
    FILE *file = fopen(path, "rb");
    if (!file)
        return error_set(err, errno == ENOENT ? E_NOT_FOUND : E_IO, "%s: %s", path,
                         strerror(errno));
    struct stat info;
    if (fstat(fileno(file), &info) != 0 || !S_ISREG(info.st_mode)) {
        rc = error_set(err, E_IO, "%s: not a regular file", path);
        goto close_file;
    }
    if ((uint64_t)info.st_size > max_bytes) {
        rc = error_set(err, E_TOO_LARGE, "%s: %lld bytes, at most %zu are read", path,
                       (long long)info.st_size, max_bytes);
        goto close_file;
    }
    size_t n = (size_t)info.st_size;
    text = malloc(n + 1);
    if (!text) {
        rc = error_set(err, E_NO_MEMORY, "%s: out of memory", path);
        goto close_file;
    }
    if (fread(text, 1, n, file) != n) {
        rc = error_set(err, E_IO, "%s: the file could not be read to its end", path);
        free(text);
        goto close_file;
    }
    *out = text;
    *n_out = n;
close_file:
    fclose(file);
    return rc;
}

int json_open(const char *path, size_t max_bytes, json **out, error *err) {
    char *text = NULL;
    size_t n = 0;
    int rc = read_file(path, max_bytes, &text, &n, err);
    if (rc != E_OK)
        return rc;
    rc = json_parse(path, text, n, out, err);
    free(text);
    return rc;
}

void json_close(json *doc) {
    if (!doc)
        return;
    cJSON_Delete(doc->root);
    free(doc->name);
    free(doc);
}

const json_value *json_root(const json *doc) {
    return doc->root;
}

const char *json_name(const json *doc) {
    return doc->name;
}

const json_value *json_first(const json_value *container) {
    return container ? container->child : NULL;
}

const json_value *json_next(const json_value *value) {
    return value ? value->next : NULL;
}

const char *json_key(const json_value *value) {
    return value ? value->string : NULL;
}

size_t json_count(const json_value *container) {
    size_t n = 0;
    for (const json_value *child = json_first(container); child; child = child->next)
        n++;
    return n;
}

const json_value *json_get(const json_value *object, const char *key) {
    return cJSON_IsObject(object) ? cJSON_GetObjectItemCaseSensitive(object, key) : NULL;
}

bool json_is_null(const json_value *value) {
    return !value || cJSON_IsNull(value);
}

bool json_is_object(const json_value *value) {
    return cJSON_IsObject(value);
}

bool json_is_array(const json_value *value) {
    return cJSON_IsArray(value);
}

bool json_as_string(const json_value *value, const char **out) {
    if (!cJSON_IsString(value))
        return false;
    *out = value->valuestring;
    return true;
}

bool json_as_bool(const json_value *value, bool *out) {
    if (!cJSON_IsBool(value))
        return false;
    *out = cJSON_IsTrue(value);
    return true;
}

bool json_as_int(const json_value *value, int64_t *out) {
    if (!cJSON_IsNumber(value))
        return false;
    double number = value->valuedouble;
    if (!(fabs(number) <= (double)JSON_INT_MAX) || floor(number) != number)
        return false;
    *out = (int64_t)number;
    return true;
}

bool json_as_double(const json_value *value, double *out) {
    if (!cJSON_IsNumber(value) || !isfinite(value->valuedouble))
        return false;
    *out = value->valuedouble;
    return true;
}

static int expected(const json *doc, const json_value *found, const char *key, const char *what,
                    error *err) {
    return error_set(err, E_INVALID, "%s: %s: %s %s", doc->name, key,
                     json_is_null(found) ? "missing, expected" : "expected", what);
}

int json_need_object(const json *doc, const json_value *object, const char *key,
                     const json_value **out, error *err) {
    const json_value *value = json_get(object, key);
    if (!json_is_object(value))
        return expected(doc, value, key, "an object", err);
    *out = value;
    return E_OK;
}

int json_need_array(const json *doc, const json_value *object, const char *key,
                    const json_value **out, error *err) {
    const json_value *value = json_get(object, key);
    if (!json_is_array(value))
        return expected(doc, value, key, "an array", err);
    *out = value;
    return E_OK;
}

int json_need_string(const json *doc, const json_value *object, const char *key, const char **out,
                     error *err) {
    const json_value *value = json_get(object, key);
    return json_as_string(value, out) ? E_OK : expected(doc, value, key, "a string", err);
}

int json_need_bool(const json *doc, const json_value *object, const char *key, bool *out,
                   error *err) {
    const json_value *value = json_get(object, key);
    return json_as_bool(value, out) ? E_OK : expected(doc, value, key, "true or false", err);
}

int json_need_int(const json *doc, const json_value *object, const char *key, int64_t min,
                  int64_t max, int64_t *out, error *err) {
    const json_value *value = json_get(object, key);
    int64_t number;
    if (!json_as_int(value, &number) || number < min || number > max) {
        char what[80];
        snprintf(what, sizeof what, "an integer from %" PRId64 " to %" PRId64, min, max);
        return expected(doc, value, key, what, err);
    }
    *out = number;
    return E_OK;
}

int json_need_double(const json *doc, const json_value *object, const char *key, double min,
                     double max, double *out, error *err) {
    const json_value *value = json_get(object, key);
    double number;
    if (!json_as_double(value, &number) || number < min || number > max) {
        char what[80];
        snprintf(what, sizeof what, "a number from %g to %g", min, max);
        return expected(doc, value, key, what, err);
    }
    *out = number;
    return E_OK;
}

int json_opt_string(const json *doc, const json_value *object, const char *key, const char **out,
                    error *err) {
    bool absent = json_is_null(json_get(object, key));
    return absent ? E_OK : json_need_string(doc, object, key, out, err);
}

int json_opt_bool(const json *doc, const json_value *object, const char *key, bool *out,
                  error *err) {
    bool absent = json_is_null(json_get(object, key));
    return absent ? E_OK : json_need_bool(doc, object, key, out, err);
}

int json_opt_int(const json *doc, const json_value *object, const char *key, int64_t min,
                 int64_t max, int64_t *out, error *err) {
    bool absent = json_is_null(json_get(object, key));
    return absent ? E_OK : json_need_int(doc, object, key, min, max, out, err);
}

int json_opt_double(const json *doc, const json_value *object, const char *key, double min,
                    double max, double *out, error *err) {
    bool absent = json_is_null(json_get(object, key));
    return absent ? E_OK : json_need_double(doc, object, key, min, max, out, err);
}
