// json.h: reading JSON from files and peers; the only module that touches cJSON.
//
// What cJSON lets through is refused here, with the line: bytes that are not UTF-8, NUL (raw or
// \u0000, which would cut a C string), raw control characters in strings, text after the value,
// duplicate keys in one object. Look-ups are case-sensitive. An integer is a number without a
// fraction within +-2^53, the range in which cJSON's doubles are exact.
// Ownership: json_parse and json_open give a document that owns all of its values; values and
// strings are valid until json_close. Thread: a document is immutable and may be shared.
#ifndef TANDEM_ENGINE_JSON_H
#define TANDEM_ENGINE_JSON_H

#include "engine/status.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define JSON_INT_MAX (INT64_C(1) << 53)

typedef struct json json;
typedef struct cJSON json_value; // opaque outside json.c

// name stands in error lines, for example a path or "request body"; copied.
int json_parse(const char *name, const char *text, size_t n_bytes, json **out, error *err);
// Reads a file of at most max_bytes. E_NOT_FOUND when there is none, E_TOO_LARGE above the cap.
int json_open(const char *path, size_t max_bytes, json **out, error *err);
void json_close(json *doc);

const json_value *json_root(const json *doc);
const char *json_name(const json *doc);

// Structure. A container's values form a list: iterate with first and next, since access by index
// or key is linear. Each accepts NULL, and a value that is no container has no values.
const json_value *json_first(const json_value *container);
const json_value *json_next(const json_value *value);
const char *json_key(const json_value *value); // NULL for an element of an array
size_t json_count(const json_value *container);
const json_value *json_get(const json_value *object, const char *key); // NULL when absent

// Kinds, and typed reads that return false and leave *out alone when the value (which may be NULL)
// has another type.
bool json_is_null(const json_value *value); // also true for NULL
bool json_is_object(const json_value *value);
bool json_is_array(const json_value *value);
bool json_as_string(const json_value *value, const char **out);
bool json_as_bool(const json_value *value, bool *out);
bool json_as_int(const json_value *value, int64_t *out);
bool json_as_double(const json_value *value, double *out); // finite

// Required members: "NAME: KEY: expected ..." when absent, null or of another type.
int json_need_object(const json *doc, const json_value *object, const char *key,
                     const json_value **out, error *err);
int json_need_array(const json *doc, const json_value *object, const char *key,
                    const json_value **out, error *err);
int json_need_string(const json *doc, const json_value *object, const char *key, const char **out,
                     error *err);
int json_need_bool(const json *doc, const json_value *object, const char *key, bool *out,
                   error *err);
int json_need_int(const json *doc, const json_value *object, const char *key, int64_t min,
                  int64_t max, int64_t *out, error *err);
int json_need_double(const json *doc, const json_value *object, const char *key, double min,
                     double max, double *out, error *err);

// Optional members: absent or null leaves *out as the caller preset it.
int json_opt_string(const json *doc, const json_value *object, const char *key, const char **out,
                    error *err);
int json_opt_bool(const json *doc, const json_value *object, const char *key, bool *out,
                  error *err);
int json_opt_int(const json *doc, const json_value *object, const char *key, int64_t min,
                 int64_t max, int64_t *out, error *err);
int json_opt_double(const json *doc, const json_value *object, const char *key, double min,
                    double max, double *out, error *err);

#endif
