#include "router/simulate_cli.h"

#include "engine/simulate.h"
#include "router/json_writer.h"
#include "router/law_options.h"
#include "router/options.h"
#include "router/svg_plot.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_RATIOS = 256, MAX_SEEDS = 100 };

typedef struct simulate_args {
    law_options law;
    const char *trace_path, *plot, *ratios, *prompt_kind, *output_kind;
    uint64_t batch, lanes, requests, seed, n_seeds; // batch, requests: 0 is not given
    double prefill, decode;                         // NAN: not given
    bool json, help;
} simulate_args;

#define AT(field) offsetof(simulate_args, field)
static const option_row rows[] = {
    LAW_OPTION_ROWS(simulate_args, law),
    {"--batch", "SLOTS", "of a microbatch of one attention worker", OPTION_COUNT, AT(batch), 1,
     RATIO_MAX_BATCH},
    {"--prefill", "TOKENS", "mean length of a prompt", OPTION_NUMBER, AT(prefill), 1, 1e6},
    {"--decode", "TOKENS", "mean length of an output", OPTION_NUMBER, AT(decode), 1, 1e6},
    {"--prefill-dist", "KIND", "geometric (default), fixed, uniform, lognormal:DEVIATION",
     OPTION_TEXT, AT(prompt_kind), 0, 0},
    {"--decode-dist", "KIND", "the same for outputs", OPTION_TEXT, AT(output_kind), 0, 0},
    {"--trace", "FILE.csv", "arrival,prompt,output per line, replayed; with --requests, drawn from",
     OPTION_TEXT, AT(trace_path), 0, 0},
    {"--requests", "N", "per attention worker, all there from the start (default 10000)",
     OPTION_COUNT, AT(requests), 1, 1e9},
    {"--ratio", "LIST", "r as 8 or 3.5, or workers as 7:2 (default 1,2,4,8,16,24,32)", OPTION_TEXT,
     AT(ratios), 0, 0},
    {"--lanes", "M", "microbatches in flight of an attention worker (default 2)", OPTION_COUNT,
     AT(lanes), 1, RATIO_MAX_LANES},
    {"--seed", "N", "the same seed gives the same numbers (default 1)", OPTION_COUNT, AT(seed), 0,
     9e15},
    {"--seeds", "N", "runs of each ratio, from that seed on, of which means are shown",
     OPTION_COUNT, AT(n_seeds), 1, MAX_SEEDS},
    {"--json", NULL, "one JSON object in place of the table", OPTION_FLAG, AT(json), 0, 0},
    {"--plot", "FILE.svg", "throughput and idle shares against r", OPTION_TEXT, AT(plot), 0, 0},
    {"--help", NULL, "this text", OPTION_FLAG, AT(help), 0, 0},
};
#undef AT
enum { N_ROWS = sizeof rows / sizeof *rows };

typedef struct workers {
    uint32_t attention, ffn;
} workers;

// ---- Reading ----

static int read_lengths(const char *option, const char *text, sim_lengths *out, error *err) {
    static const char *const names[] = {
#define X(name, text) text,
        SIM_LENGTHS_MAP(X)
#undef X
    };
    size_t n = strcspn(text, ":");
    for (int i = 0; i < SIM_N_LENGTHS; i++) {
        if (strlen(names[i]) != n || strncmp(names[i], text, n) != 0)
            continue;
        char *end = NULL;
        out->kind = (sim_lengths_kind)i;
        out->spread = 1;
        if (!text[n])
            return E_OK;
        out->spread = strtod(text + n + 1, &end);
        if (i == SIM_LOGNORMAL && end != text + n + 1 && !*end && out->spread >= 0 &&
            out->spread <= 4)
            return E_OK;
        break;
    }
    return error_set(err, E_INVALID,
                     "%s: expected geometric, fixed, uniform or lognormal:DEVIATION (0 to 4), "
                     "not '%.60s'",
                     option, text);
}

// The fewest FFN workers with which a ratio becomes whole.
static bool as_workers(double r, workers *out) {
    for (uint32_t y = 1; y <= 100; y++) {
        double x = round(r * y);
        if (fabs(x - r * y) < 1e-9 * y && x >= 1 && x <= SIM_MAX_ATTENTION) {
            *out = (workers){(uint32_t)x, y};
            return true;
        }
    }
    return false;
}

static int read_ratios(const char *list, workers out[MAX_RATIOS], size_t *n_out, error *err) {
    size_t n = 0;
    for (const char *at = list;; at++) {
        char *end = NULL;
        double r = strtod(at, &end);
        bool good = end != at && n < MAX_RATIOS && as_workers(r, &out[n]);
        if (good && *end == ':') {
            const char *second = end + 1;
            double y = strtod(second, &end);
            good = end != second && out[n].ffn == 1 && y >= 1 && y <= SIM_MAX_ATTENTION &&
                   y == floor(y);
            if (good)
                out[n].ffn = (uint32_t)y;
        }
        if (!good || (*end && *end != ','))
            return error_set(err, E_INVALID,
                             "--ratio: expected up to %d of 8, 3.5 or 7:2 (up to %d workers), not "
                             "'%.60s'",
                             MAX_RATIOS, SIM_MAX_ATTENTION, at);
        n++;
        if (!*end)
            break;
        at = end;
    }
    *n_out = n;
    return E_OK;
}

static int make_args(const simulate_args *args, trace *t, sim_args *out, error *err) {
    sim_args sim = {.batch = (uint32_t)args->batch,
                    .lanes = (uint32_t)args->lanes,
                    .requests = args->requests,
                    .prompt = {SIM_GEOMETRIC, args->prefill, 1},
                    .output = {SIM_GEOMETRIC, args->decode, 1}};
    int rc = law_options_resolve(&args->law, &sim.law, err);
    if (rc != E_OK)
        return rc;
    if (!args->batch)
        return error_set(err, E_INVALID, "--batch is missing");
    if (args->trace_path) {
        if (!isnan(args->prefill) || !isnan(args->decode) || args->prompt_kind || args->output_kind)
            return error_set(err, E_INVALID, "--trace stands in place of --prefill and --decode");
        rc = trace_open(args->trace_path, t, err);
        sim.trace = t;
    } else {
        if (isnan(args->prefill) || isnan(args->decode))
            return error_set(err, E_INVALID,
                             "the load is missing: give --prefill and --decode, or "
                             "--trace");
        if (!args->requests)
            sim.requests = 10000;
        if (args->prompt_kind)
            rc = read_lengths("--prefill-dist", args->prompt_kind, &sim.prompt, err);
        if (rc == E_OK && args->output_kind)
            rc = read_lengths("--decode-dist", args->output_kind, &sim.output, err);
    }
    if (rc == E_OK)
        *out = sim;
    return rc;
}

// ---- Running ----

typedef struct study {
    sim_args sim;
    ratio_setup setup; // what the rule is told of the same load
    size_t n;
    workers workers[MAX_RATIOS];
    sim_result results[MAX_RATIOS]; // means over the seeds
    double predicted[MAX_RATIOS];   // by the form with lanes
    double mean_field[MAX_RATIOS];
} study;

static void add_share(sim_result *sum, const sim_result *one, double share) {
    sum->requests = one->requests;
    sum->tokens = one->tokens;
    sum->time += one->time * share;
    sum->throughput += one->throughput * share;
    sum->tpot += one->tpot * share;
    sum->idle_attention += one->idle_attention * share;
    sum->idle_ffn += one->idle_ffn * share;
    sum->steady_throughput += one->steady_throughput * share;
    sum->steady_cycle += one->steady_cycle * share;
    sum->steady_idle_attention += one->steady_idle_attention * share;
    sum->steady_idle_ffn += one->steady_idle_ffn * share;
    for (int i = 0; i < SIM_N_STATES; i++)
        sum->states[i] += one->states[i] * share;
}

// What the rule needs of the load: exact where it is geometric, else from the trace, or from draws.
static int describe_load(const sim_args *sim, ratio_load *out, error *err) {
    ratio_sums sums = {0};
    if (!sim->trace && sim->prompt.kind == SIM_GEOMETRIC && sim->output.kind == SIM_GEOMETRIC)
        return ratio_load_from_means(sim->prompt.mean, sim->prompt.mean * (sim->prompt.mean - 1),
                                     sim->output.mean, out, err);
    if (sim->trace) {
        for (size_t i = 0; i < sim->trace->n; i++)
            ratio_sums_add(&sums, sim->trace->requests[i].prompt, sim->trace->requests[i].output);
    } else {
        uint64_t rng = sim->seed;
        for (int i = 0; i < 1000000; i++) {
            double prompt = sim_draw_length(&sim->prompt, &rng);
            ratio_sums_add(&sums, prompt, sim_draw_length(&sim->output, &rng));
        }
    }
    return ratio_load_from_sums(&sums, out, err);
}

static int run_study(const simulate_args *args, study *s, error *err) {
    s->sim.seed = args->seed;
    s->setup = (ratio_setup){
        .law = s->sim.law,
        .batch = s->sim.batch,
        .lanes = s->sim.lanes,
        .requests = s->sim.requests ? (double)s->sim.requests : INFINITY, // a replay has no N
    };
    int rc = describe_load(&s->sim, &s->setup.load, err);
    if (rc == E_OK)
        rc = ratio_setup_check(&s->setup, err);
    for (size_t i = 0; i < s->n && rc == E_OK; i++) {
        double x = s->workers[i].attention, y = s->workers[i].ffn;
        s->sim.attention = s->workers[i].attention;
        s->sim.ffn = s->workers[i].ffn;
        for (uint64_t k = 0; k < args->n_seeds && rc == E_OK; k++) {
            sim_result one;
            s->sim.seed = args->seed + k;
            rc = simulate(&s->sim, &one, err);
            if (rc == E_OK)
                add_share(&s->results[i], &one, 1 / (double)args->n_seeds);
        }
        s->predicted[i] =
            ratio_throughput(&s->setup, ratio_cycle(&s->setup, RATIO_LANES, x, y), x, y);
        s->mean_field[i] =
            ratio_throughput(&s->setup, ratio_cycle(&s->setup, RATIO_MEAN_FIELD, x, y), x, y);
    }
    return rc;
}

// ---- Showing ----

static void put_number(json_writer *w, const char *name, double value) {
    if (isfinite(value))
        json_putf(w, ", \"%s\": %.10g", name, value);
    else
        json_putf(w, ", \"%s\": null", name);
}

static void put_json(json_writer *w, const simulate_args *args, const study *s) {
    static const char *const states[] = {"waits_attention", "attention", "to_ffn",
                                         "waits_ffn",       "ffn",       "from_ffn"};
    json_putf(w,
              "{\"batch\": %u, \"n_lanes\": %u, \"requests\": %llu, \"seed\": %llu, \"seeds\": "
              "%llu, \"theta\": %.10g, \"nu2\": %.10g,\n \"ratios\": [",
              s->sim.batch, s->sim.lanes, (unsigned long long)s->sim.requests,
              (unsigned long long)args->seed, (unsigned long long)args->n_seeds,
              s->setup.load.theta, s->setup.load.nu2);
    for (size_t i = 0; i < s->n; i++) {
        const sim_result *r = &s->results[i];
        json_putf(w, "%s\n  {\"r\": %.10g, \"attention\": %u, \"ffn\": %u", i ? "," : "",
                  (double)s->workers[i].attention / s->workers[i].ffn, s->workers[i].attention,
                  s->workers[i].ffn);
        put_number(w, "throughput_per_instance", r->throughput);
        put_number(w, "tpot", r->tpot);
        put_number(w, "idle_attention", r->idle_attention);
        put_number(w, "idle_ffn", r->idle_ffn);
        put_number(w, "steady_throughput_per_instance", r->steady_throughput);
        put_number(w, "steady_cycle", r->steady_cycle);
        put_number(w, "steady_idle_attention", r->steady_idle_attention);
        put_number(w, "steady_idle_ffn", r->steady_idle_ffn);
        put_number(w, "predicted_throughput_per_instance", s->predicted[i]);
        put_number(w, "mean_field_throughput_per_instance", s->mean_field[i]);
        put_number(w, "time", r->time);
        json_put(w, ", \"states\": {");
        for (int k = 0; k < SIM_N_STATES; k++)
            json_putf(w, "%s\"%s\": %.6g", k ? ", " : "", states[k], r->states[k]);
        json_put(w, "}}");
    }
    json_put(w, "]}\n");
}

static void print_table(const study *s) {
    printf("%8s %6s %5s %12s %12s %12s %10s %8s %8s\n", "r", "attn", "ffn", "per instance",
           "steady", "predicted", "TPOT", "idle A", "idle F");
    for (size_t i = 0; i < s->n; i++) {
        const sim_result *r = &s->results[i];
        char steady[32] = "-";
        if (isfinite(r->steady_throughput))
            snprintf(steady, sizeof steady, "%.5g", r->steady_throughput);
        printf("%8.4g %6u %5u %12.5g %12s %12.5g %10.5g %7.1f%% %7.1f%%\n",
               (double)s->workers[i].attention / s->workers[i].ffn, s->workers[i].attention,
               s->workers[i].ffn, r->throughput, steady, s->predicted[i], r->tpot,
               100 * r->idle_attention, 100 * r->idle_ffn);
    }
    printf("\nPer instance: over the first 80%% of the requests to end; it leaves out what the "
           "open ones, the\nlong ones, have been given. Steady: all slots filled, the load "
           "grown; this is what is predicted.\n");
}

static int by_ratio(const void *a, const void *b) {
    const workers *p = a, *q = b;
    uint64_t left = (uint64_t)p->attention * q->ffn, right = (uint64_t)q->attention * p->ffn;
    return left < right ? -1 : left > right;
}

static int write_plot(const study *s, const char *path, error *err) {
    double r[MAX_RATIOS], stable[MAX_RATIOS], steady[MAX_RATIOS], a[MAX_RATIOS], f[MAX_RATIOS];
    for (size_t i = 0; i < s->n; i++) {
        r[i] = (double)s->workers[i].attention / s->workers[i].ffn;
        stable[i] = s->results[i].throughput;
        steady[i] = s->results[i].steady_throughput;
        a[i] = s->results[i].idle_attention;
        f[i] = s->results[i].idle_ffn;
    }
    ratio_rule rule;
    ratio_solve(&s->setup, &rule);
    plot_series throughput[] = {{"mean field", "#888", r, s->mean_field, s->n, false},
                                {"rule with lanes", "#d95f02", r, s->predicted, s->n, false},
                                {"simulated, steady", "#1b6ca8", r, steady, s->n, true},
                                {"simulated, 80%", "#7bb26a", r, stable, s->n, true}};
    plot_series idle[] = {{"attention", "#1b6ca8", r, a, s->n, true},
                          {"FFN", "#d95f02", r, f, s->n, true}};
    plot panels[] = {{.title = "Throughput per instance",
                      .x_name = "r",
                      .y_name = "tokens per unit of time",
                      .series = throughput,
                      .n_series = 4,
                      .mark = rule.r_star,
                      .mark_name = "r*"},
                     {.title = "Idle share",
                      .x_name = "r",
                      .y_name = "share of the time",
                      .series = idle,
                      .n_series = 2,
                      .mark = rule.r_star,
                      .mark_name = "r*"}};
    return svg_plot_write(path, panels, 2, err);
}

// ---- Command ----

static void print_help(void) {
    printf("usage: tandem simulate --preset ascend910c --batch 256 --prefill 100 --decode 500 "
           "--ratio 4,8,16\n"
           "Runs a bundle at several ratios of attention to FFN workers as discrete events. Times "
           "are in\nthe unit of the law.\n\n");
    options_print(rows, N_ROWS, stdout);
}

static int show(const simulate_args *args, const study *s, error *err) {
    json_writer w = {0};
    int rc = args->plot ? write_plot(s, args->plot, err) : E_OK;
    if (rc == E_OK && args->json) {
        put_json(&w, args, s);
        if (w.failed)
            rc = error_set(err, E_NO_MEMORY, "out of memory");
        else
            fputs(w.text, stdout);
    } else if (rc == E_OK) {
        print_table(s);
    }
    json_writer_free(&w);
    return rc;
}

int simulate_main(int argc, char **argv) {
    simulate_args args = {.law = LAW_OPTIONS_NONE,
                          .ratios = "1,2,4,8,16,24,32",
                          .lanes = 2,
                          .seed = 1,
                          .n_seeds = 1,
                          .prefill = NAN,
                          .decode = NAN};
    trace t = {0};
    error err = {0};
    study *s = calloc(1, sizeof *s);
    int rc = s ? options_read(rows, N_ROWS, argc, argv, &args, &err)
               : error_set(&err, E_NO_MEMORY, "out of memory");
    if (rc == E_OK && args.help) {
        print_help();
        goto free_study;
    }
    if (rc == E_OK)
        rc = read_ratios(args.ratios, s->workers, &s->n, &err);
    if (rc == E_OK)
        rc = make_args(&args, &t, &s->sim, &err);
    if (rc == E_OK) {
        qsort(s->workers, s->n, sizeof *s->workers, by_ratio);
        rc = run_study(&args, s, &err);
    }
    if (rc == E_OK)
        rc = show(&args, s, &err);
    if (rc != E_OK)
        fprintf(stderr, "tandem simulate: %s\n", err.text);
free_study:
    trace_free(&t);
    free(s);
    return rc == E_OK ? 0 : rc == E_IO || rc == E_NO_MEMORY ? 1 : 2;
}
