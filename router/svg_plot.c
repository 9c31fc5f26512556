#include "router/svg_plot.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

enum { WIDTH = 820, HEIGHT = 440, LEFT = 80, RIGHT = 30, TOP = 70, BOTTOM = 60 };

typedef struct axes {
    FILE *out;
    double x_min, x_max, y_max, top; // top: of the panel in the file
} axes;

static double at_x(const axes *a, double x) {
    return LEFT + (x - a->x_min) / (a->x_max - a->x_min) * (WIDTH - LEFT - RIGHT);
}

static double at_y(const axes *a, double y) {
    return a->top + HEIGHT - BOTTOM - y / a->y_max * (HEIGHT - TOP - BOTTOM);
}

// The largest of 1, 2, 5 times a power of ten that gives 5 steps or more.
static double tick_of(double range) {
    double power = pow(10, floor(log10(range / 5)));
    double share = range / 5 / power;
    return power * (share >= 5 ? 5 : share >= 2 ? 2 : 1);
}

static void draw_axes(const axes *a, const plot *p) {
    double bottom = at_y(a, 0), right = WIDTH - RIGHT, tick = tick_of(a->y_max);
    for (double y = 0; y <= a->y_max * 1.0001; y += tick)
        fprintf(a->out,
                "<path d='M%d %.1fH%.1f' stroke='#ddd'/><text x='%d' y='%.1f' "
                "text-anchor='end'>%g</text>\n",
                LEFT, at_y(a, y), right, LEFT - 8, at_y(a, y) + 4, round(y / tick) * tick);
    tick = fmax(tick_of(a->x_max - a->x_min), 1e-9);
    for (double x = ceil(a->x_min / tick) * tick; x <= a->x_max * 1.0001; x += tick)
        fprintf(a->out, "<text x='%.1f' y='%.1f' text-anchor='middle'>%g</text>\n", at_x(a, x),
                bottom + 18, round(x / tick) * tick);
    fprintf(a->out,
            "<path d='M%d %.1fV%.1fH%.1f' fill='none' stroke='#333'/>\n"
            "<text x='%d' y='%.1f' font-size='15' font-weight='bold'>%s</text>\n"
            "<text x='%.1f' y='%.1f' text-anchor='middle'>%s</text>\n"
            "<text transform='translate(22 %.1f) rotate(-90)' text-anchor='middle'>%s</text>\n",
            LEFT, a->top + TOP, bottom, right, LEFT, a->top + 24, p->title, (LEFT + right) / 2,
            bottom + 40, p->x_name, (a->top + TOP + bottom) / 2, p->y_name);
}

static void draw_series(const axes *a, const plot_series *s) {
    bool open = false;
    fprintf(a->out, "<path fill='none' stroke='%s' stroke-width='%s' d='", s->color,
            s->dots ? "1" : "2");
    for (size_t i = 0; i < s->n; i++) {
        if (!isfinite(s->y[i])) {
            open = false;
            continue;
        }
        fprintf(a->out, "%c%.2f %.2f", open ? 'L' : 'M', at_x(a, s->x[i]), at_y(a, s->y[i]));
        open = true;
    }
    fprintf(a->out, "'/>\n");
    for (size_t i = 0; s->dots && i < s->n; i++)
        if (isfinite(s->y[i]))
            fprintf(a->out, "<circle cx='%.2f' cy='%.2f' r='4' fill='%s'/>\n", at_x(a, s->x[i]),
                    at_y(a, s->y[i]), s->color);
}

static void draw_plot(FILE *out, const plot *p, double top) {
    axes a = {.out = out, .x_min = INFINITY, .x_max = -INFINITY, .top = top};
    for (size_t k = 0; k < p->n_series; k++)
        for (size_t i = 0; i < p->series[k].n; i++) {
            a.x_min = fmin(a.x_min, p->series[k].x[i]);
            a.x_max = fmax(a.x_max, p->series[k].x[i]);
            if (isfinite(p->series[k].y[i]))
                a.y_max = fmax(a.y_max, p->series[k].y[i] * 1.1);
        }
    if (!(a.x_max > a.x_min)) // one point stands in the middle
        a.x_min -= 0.5, a.x_max += 0.5;
    a.y_max = a.y_max > 0 ? a.y_max : 1;
    for (size_t i = 0; i < p->n_bands; i++) {
        const plot_band *band = &p->bands[i];
        double from = fmax(band->from, a.x_min), to = fmin(band->to, a.x_max);
        if (!(from < to))
            continue;
        fprintf(out, "<rect x='%.1f' y='%.1f' width='%.1f' height='%d' fill='%s'/>\n",
                at_x(&a, from), top + TOP, at_x(&a, to) - at_x(&a, from), HEIGHT - TOP - BOTTOM,
                band->color);
        // A name wider than its band would run into the next one's.
        if (at_x(&a, to) - at_x(&a, from) > 7.5 * (double)strlen(band->name))
            fprintf(out, "<text x='%.1f' y='%.1f' fill='#666'>%s</text>\n", at_x(&a, from) + 6,
                    top + TOP + 16, band->name);
    }
    draw_axes(&a, p);
    if (p->mark >= a.x_min && p->mark <= a.x_max)
        fprintf(out,
                "<path d='M%.1f %.1fV%.1f' stroke='#555' stroke-dasharray='5 4'/>"
                "<text x='%.1f' y='%.1f'>%s</text>\n",
                at_x(&a, p->mark), top + TOP, at_y(&a, 0), at_x(&a, p->mark) + 5, at_y(&a, 0) - 8,
                p->mark_name);
    for (size_t k = 0; k < p->n_series; k++) {
        double x = LEFT + 180.0 * (double)k;
        draw_series(&a, &p->series[k]);
        fprintf(out,
                "<path d='M%.1f %.1fh22' stroke='%s' stroke-width='3'/>"
                "<text x='%.1f' y='%.1f'>%s</text>\n",
                x, top + 48, p->series[k].color, x + 28, top + 52, p->series[k].name);
    }
}

int svg_plot_write(const char *path, const plot *plots, size_t n_plots, error *err) {
    FILE *out = fopen(path, "w");
    if (!out)
        return error_set(err, E_IO, "%s: %s", path, strerror(errno));
    fprintf(out,
            "<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 %d %zu' "
            "font-family='sans-serif' font-size='13' fill='#222'>\n"
            "<rect width='100%%' height='100%%' fill='#fff'/>\n",
            WIDTH, HEIGHT * n_plots);
    for (size_t i = 0; i < n_plots; i++)
        draw_plot(out, &plots[i], (double)(HEIGHT * i));
    fprintf(out, "</svg>\n");
    bool failed = ferror(out) != 0;
    if (fclose(out) != 0 || failed)
        return error_set(err, E_IO, "%s: %s", path, strerror(errno));
    return E_OK;
}
