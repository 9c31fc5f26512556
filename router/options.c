#include "router/options.h"

#include <errno.h>
#include <math.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

static int read_value(const option_row *row, const char *text, void *field, error *err) {
    char *end = NULL;
    errno = 0;
    if (row->kind == OPTION_TEXT) {
        if (!*text)
            return error_set(err, E_INVALID, "%s: expected %s, not nothing", row->name, row->value);
        *(const char **)field = text;
        return E_OK;
    }
    if (row->kind == OPTION_COUNT) {
        unsigned long long value = strtoull(text, &end, 10);
        if (errno || end == text || *end || strspn(text, "0123456789") != strlen(text) ||
            (double)value < row->min || (double)value > row->max)
            return error_set(err, E_INVALID,
                             "%s: expected an integer from %.0f to %.0f, not '%.60s'", row->name,
                             row->min, row->max, text);
        *(uint64_t *)field = value;
        return E_OK;
    }
    double value = strtod(text, &end);
    if (end == text || *end || !(value >= row->min && value <= row->max))
        return error_set(err, E_INVALID, "%s: expected a number from %g to %g, not '%.60s'",
                         row->name, row->min, row->max, text);
    *(double *)field = value;
    return E_OK;
}

int options_read(const option_row *rows, size_t n, int argc, char **argv, void *out, error *err) {
    for (int i = 0; i < argc; i++) {
        size_t length = strcspn(argv[i], "="), k = 0;
        const char *value = argv[i][length] ? argv[i] + length + 1 : NULL;
        while (k < n &&
               (strlen(rows[k].name) != length || strncmp(rows[k].name, argv[i], length) != 0))
            k++;
        if (k == n)
            return error_set(err, E_INVALID, "unknown %s '%.60s'",
                             argv[i][0] == '-' ? "option" : "argument", argv[i]);
        void *field = (char *)out + rows[k].offset;
        if (rows[k].kind == OPTION_FLAG) {
            if (value)
                return error_set(err, E_INVALID, "%s: takes no value", rows[k].name);
            *(bool *)field = true;
            continue;
        }
        if (!value && i + 1 == argc)
            return error_set(err, E_INVALID, "%s: the value is missing", rows[k].name);
        int rc = read_value(&rows[k], value ? value : argv[++i], field, err);
        if (rc != E_OK)
            return rc;
    }
    return E_OK;
}

void options_print(const option_row *rows, size_t n, FILE *out) {
    for (size_t i = 0; i < n; i++)
        fprintf(out, "  %s %-*s %s\n", rows[i].name, (int)(24 - strlen(rows[i].name)),
                rows[i].value ? rows[i].value : "", rows[i].help);
}
