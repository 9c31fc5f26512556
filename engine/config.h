// config.h: the configuration of a bundle, read from a JSON file with comments and checked.
//
// The table in config.c has one row per key: path, type, default, range and help. The checks,
// `tandem config --help` and the reference in the README come from it.
// A value is taken from --set, else from the environment (TANDEM_ATTENTION_WORKERS for
// attention.workers), else from the file, else from the table's default.
// A failure is one line, "FILE:LINE: KEY: what; the fix", with "--set" or the name of the variable
// in place of FILE:LINE for a value that came from there.
// Ownership: a config is plain memory without pointers; copy it freely. Thread: pure functions.
#ifndef TANDEM_ENGINE_CONFIG_H
#define TANDEM_ENGINE_CONFIG_H

#include "engine/log.h"
#include "engine/status.h"
#include "engine/types.h"

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

enum {
    CONFIG_PATH_BYTES = 4096, // a path, its NUL included
    CONFIG_TEXT_BYTES = 256,  // any other text
    CONFIG_MAX_WORKERS = 64,  // of one kind
    CONFIG_MAX_LANES = 8,
    CONFIG_MAX_FILE_BYTES = 1 << 20
};

// X(enum name, name in a config)
#define CONFIG_DTYPE_MAP(X) X(AUTO, "auto") X(BF16, "bf16") X(F32, "f32")
#define CONFIG_MODE_MAP(X) X(DISAGGREGATED, "disaggregated") X(COLOCATED, "colocated")
#define CONFIG_GATHER_MAP(X) X(PASS, "pass") X(NONE, "none")
#define CONFIG_TRANSPORT_MAP(X) X(AUTO, "auto") X(SHM, "shm") X(TCP, "tcp")

#define CONFIG_DTYPE_ENUM(name, text) CONFIG_DTYPE_##name,
#define CONFIG_MODE_ENUM(name, text) CONFIG_MODE_##name,
#define CONFIG_GATHER_ENUM(name, text) CONFIG_GATHER_##name,
#define CONFIG_TRANSPORT_ENUM(name, text) CONFIG_TRANSPORT_##name,
typedef enum config_dtype { CONFIG_DTYPE_MAP(CONFIG_DTYPE_ENUM) } config_dtype;
typedef enum config_mode { CONFIG_MODE_MAP(CONFIG_MODE_ENUM) } config_mode;
typedef enum config_gather { CONFIG_GATHER_MAP(CONFIG_GATHER_ENUM) } config_gather;
typedef enum config_transport { CONFIG_TRANSPORT_MAP(CONFIG_TRANSPORT_ENUM) } config_transport;

// One field per key, named as the key; the table in config.c says what each means.
typedef struct config {
    char model[CONFIG_PATH_BYTES]; // absolute after config_load
    char served_model_name[CONFIG_TEXT_BYTES];
    config_dtype dtype;
    config_mode mode;
    int64_t max_model_len; // 0: the model's
    struct {
        char format[CONFIG_TEXT_BYTES]; // "auto", or the name of a chat format
    } chat;
    struct {
        char host[CONFIG_TEXT_BYTES];
        int64_t port;                    // 0: any free one
        char api_key[CONFIG_TEXT_BYTES]; // "": no key is asked for
        int64_t max_waiting, max_body_bytes, max_connections;
        double drain_timeout_s, start_timeout_s;
        char control[CONFIG_TEXT_BYTES]; // "": a unix socket of the launcher, else HOST:PORT
    } router;
    struct {
        int64_t workers, launch; // launch is 0..workers after config_load
        int64_t lanes;
        int64_t lane_rows; // 0: chosen from the model's experts
        char device[CONFIG_TEXT_BYTES];
        int64_t threads; // 0: a share of the cores
        int64_t max_seqs, token_budget;
        int64_t kv_tokens; // 0: by the memory there is
    } attention;
    struct {
        int64_t workers, launch;
        char device[CONFIG_TEXT_BYTES];
        int64_t threads;
        config_gather gather;
        int64_t gather_wait_us, member_deadline_ms;
    } ffn;
    struct {
        config_dtype dtype;
        config_transport transport;
        char bind[CONFIG_TEXT_BYTES];
        int64_t spin_us; // -1: chosen by the transport
    } wire;
    struct {
        log_level level;
    } log;
} config;

// Reads the file, then the environment, then overrides ("path=value", the arguments of --set), and
// checks that the model is a directory with a config.json. Relative paths in the file start at the
// file's directory, others at the working directory.
int config_load(const char *path, const char *const *overrides, size_t n_overrides, config *out,
                error *err);

// The whole configuration as JSON (malloc'd, NULL when out of memory), and back. The text leaves
// out router.api_key, which no worker needs. Reading it back looks at no file and no environment;
// name stands in error lines.
char *config_to_json(const config *c);
int config_parse_json(const char *name, const char *text, size_t n_bytes, config *out, error *err);

// What "auto" means for a model of this checkpoint type: f32 stays f32, all else is bf16; the wire
// carries the compute type.
dtype config_compute_dtype(const config *c, dtype checkpoint);
dtype config_wire_dtype(const config *c, dtype checkpoint);

void config_print_help(FILE *out);     // for a terminal
void config_print_markdown(FILE *out); // the reference section of the README

#endif
