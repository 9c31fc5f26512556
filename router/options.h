// options.h: the options of a command, one table row each.
//
// A row names a field of the command's own struct, which holds the defaults before the reading.
// Takes `--name VALUE` and `--name=VALUE`; of a repeated option the last counts.
// Thread: the main thread.
#ifndef TANDEM_ROUTER_OPTIONS_H
#define TANDEM_ROUTER_OPTIONS_H

#include "engine/status.h"

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

typedef enum option_kind {
    OPTION_FLAG,   // bool, no value
    OPTION_TEXT,   // const char *, points into argv
    OPTION_COUNT,  // uint64_t
    OPTION_NUMBER, // double
} option_kind;

typedef struct option_row {
    const char *name, *value, *help; // value: what stands for it in the help; NULL for a flag
    option_kind kind;
    size_t offset;
    double min, max; // of a count or number
} option_row;

// An error line begins with the option.
int options_read(const option_row *rows, size_t n, int argc, char **argv, void *out, error *err);
void options_print(const option_row *rows, size_t n, FILE *out);

#endif
