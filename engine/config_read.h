// config_read.h: walks a JSON text with comments and hands over each value with its place.
//
// Accepts what JSON has, and // and /* */ comments and a comma before a closing brace. A config
// has objects and plain values; lists are refused.
// Thread: pure functions. Private to config.c.
#ifndef TANDEM_ENGINE_CONFIG_READ_H
#define TANDEM_ENGINE_CONFIG_READ_H

#include "engine/json.h"

enum { CONFIG_READ_MAX_DEPTH = 8, CONFIG_READ_PATH_BYTES = 256 };

// path is dotted: "router.port". value is valid during the call only; NULL for an object, whose
// members follow. A negative result ends the walk; the callback has filled err.
typedef int (*config_read_fn)(void *user, const char *path, int line, const json_value *value,
                              error *err);

// name stands in error lines before ":LINE".
int config_read(const char *name, const char *text, size_t n_bytes, config_read_fn fn, void *user,
                error *err);

#endif
