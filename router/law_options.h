// law_options.h: the options by which `tandem plan` and `tandem simulate` are told a latency law.
//
// A preset, coefficients one by one, or a preset with some of them replaced.
#ifndef TANDEM_ROUTER_LAW_OPTIONS_H
#define TANDEM_ROUTER_LAW_OPTIONS_H

#include "engine/ratio.h"

#include <math.h>

typedef struct law_options {
    const char *preset;     // NULL: none
    ratio_law coefficients; // NAN: not given
} law_options;

#define LAW_OPTIONS_NONE                                                                           \
    {                                                                                              \
        NULL, {                                                                                    \
            NAN, NAN, NAN, NAN, NAN, NAN                                                           \
        }                                                                                          \
    }

// Rows of an option table, for a law_options named `field` in `args`.
#define LAW_OPTION_ROWS(args, field)                                                               \
    {"--preset", "NAME", "a measured law: ascend910c", OPTION_TEXT, offsetof(args, field.preset),  \
     0,          0},                                                                               \
        LAW_OPTION_ROW(args, field, "--alpha-a", alpha_a, "attention, per token of KV"),           \
        LAW_OPTION_ROW(args, field, "--beta-a", beta_a, "attention, per step"),                    \
        LAW_OPTION_ROW(args, field, "--alpha-f", alpha_f, "FFN, per row"),                         \
        LAW_OPTION_ROW(args, field, "--beta-f", beta_f, "FFN, per step"),                          \
        LAW_OPTION_ROW(args, field, "--alpha-c", alpha_c, "transfers there and back, per row"),    \
        LAW_OPTION_ROW(args, field, "--beta-c", beta_c, "transfers there and back, per step")
#define LAW_OPTION_ROW(args, field, name, coefficient, help)                                       \
    { name, "TIME", help, OPTION_NUMBER, offsetof(args, field.coefficients.coefficient), 0, 1e15 }

int law_options_resolve(const law_options *options, ratio_law *out, error *err);

#endif
