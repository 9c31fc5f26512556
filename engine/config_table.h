// config_table.h: the keys of a configuration, one row each.
//
// Thread: constant. Private to config.c and config_table.c.
#ifndef TANDEM_ENGINE_CONFIG_TABLE_H
#define TANDEM_ENGINE_CONFIG_TABLE_H

#include "engine/config.h"

typedef enum row_type {
    TYPE_TEXT,
    TYPE_PATH,
    TYPE_INTEGER,
    TYPE_SECONDS, // a number, stored as double
    TYPE_CHOICE,  // an enum, stored as int
    TYPE_DEVICE,
    TYPE_ADDRESS, // "" or HOST:PORT
} row_type;

enum { KEY_REQUIRED = 1, KEY_SECRET = 2 };

typedef struct config_row {
    const char *path;
    row_type type;
    int flags;
    size_t offset;
    const char *initial; // the default, as text
    double min, max;
    const char *const *choices; // NULL-terminated; for CHOICE, and for TEXT that is one of a list
    const char *help;
} config_row;

enum { CONFIG_N_ROWS = 36 };
extern const config_row config_rows[]; // (CONFIG_N_ROWS)

// What a key takes, for error lines: "an integer from 1 to 64".
void config_row_describe(const config_row *row, char *out, size_t n_bytes);

#endif
