// svg_plot.h: line plots as an SVG file, panels one below the other.
#ifndef TANDEM_ROUTER_SVG_PLOT_H
#define TANDEM_ROUTER_SVG_PLOT_H

#include "engine/status.h"

#include <stdbool.h>
#include <stddef.h>

// Texts go into the file as they are: no <, > or &.
typedef struct plot_series {
    const char *name, *color;
    const double *x, *y; // (n), the caller's; a y that is not finite is left out
    size_t n;
    bool dots; // a dot at every point, and a thin line
} plot_series;

typedef struct plot_band { // a shaded range of x with its name at the top
    double from, to;
    const char *name, *color;
} plot_band;

typedef struct plot {
    const char *title, *x_name, *y_name;
    const plot_series *series;
    size_t n_series;
    const plot_band *bands;
    size_t n_bands;
    double mark; // a vertical line, with its name; NAN: none
    const char *mark_name;
} plot;

// From 0 on the y axis, over the x of all series.
int svg_plot_write(const char *path, const plot *plots, size_t n_plots, error *err);

#endif
