#include "router/plan_cli.h"

#include "engine/ratio_plan.h"
#include "engine/trace.h"
#include "router/json_writer.h"
#include "router/law_options.h"
#include "router/options.h"
#include "router/svg_plot.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

typedef struct plan_args {
    law_options law;
    const char *trace, *plot;
    uint64_t batch, lanes, horizon, pool, min_ffn; // 0: not given
    double prefill, decode;                        // NAN: not given
    double max_tpot, kv_tokens;                    // 0: no limit
    bool json, help;
} plan_args;

#define AT(field) offsetof(plan_args, field)
static const option_row rows[] = {
    LAW_OPTION_ROWS(plan_args, law),
    {"--batch", "SLOTS", "of a microbatch of one attention worker", OPTION_COUNT, AT(batch), 1,
     RATIO_MAX_BATCH},
    {"--prefill", "TOKENS", "mean length of a prompt, geometric", OPTION_NUMBER, AT(prefill), 0,
     RATIO_MAX_TOKENS},
    {"--decode", "TOKENS", "mean length of an output, geometric", OPTION_NUMBER, AT(decode), 1e-3,
     RATIO_MAX_TOKENS},
    {"--trace", "FILE.csv", "arrival,prompt,output per line, in place of the two means",
     OPTION_TEXT, AT(trace), 0, 0},
    {"--lanes", "M", "microbatches in flight of an attention worker (default 2)", OPTION_COUNT,
     AT(lanes), 1, RATIO_MAX_LANES},
    {"--horizon", "N", "requests of an attention worker, for r* alone (default: without end)",
     OPTION_COUNT, AT(horizon), 1, 1e12},
    {"--pool", "N", "workers of both kinds at most; without it, the bundle is r:1", OPTION_COUNT,
     AT(pool), 2, RATIO_MAX_WORKERS},
    {"--min-ffn", "Y", "FFN workers that the experts need (default 1)", OPTION_COUNT, AT(min_ffn),
     1, RATIO_MAX_WORKERS / 2.0},
    {"--max-tpot", "TIME", "limit of the time per output token", OPTION_NUMBER, AT(max_tpot), 1e-12,
     1e18},
    {"--kv-tokens", "TOKENS", "that an attention worker's memory holds", OPTION_NUMBER,
     AT(kv_tokens), 1, 1e15},
    {"--json", NULL, "one JSON object in place of the table", OPTION_FLAG, AT(json), 0, 0},
    {"--plot", "FILE.svg", "throughput against r, the regimes shaded", OPTION_TEXT, AT(plot), 0, 0},
    {"--help", NULL, "this text", OPTION_FLAG, AT(help), 0, 0},
};
#undef AT
enum { N_ROWS = sizeof rows / sizeof *rows };

// All that is printed.
typedef struct plan {
    ratio_setup setup;
    ratio_rule rule;
    ratio_choice mean_field, barrier, lanes;
    bool can_colocate, colocated_wins;
    ratio_colocated colocated;
    ratio_sensitivity sensitivities[RATIO_N_SENSITIVITIES];
    double *r, *curves[3]; // (n_curve) each, one allocation behind r; curves by ratio_form
    size_t n_curve;
} plan;

// ---- Reading and computing ----

static int load_of_trace(const char *path, ratio_load *out, error *err) {
    trace t;
    ratio_sums sums = {0};
    int rc = trace_open(path, &t, err);
    if (rc != E_OK)
        return rc;
    for (size_t i = 0; i < t.n; i++)
        ratio_sums_add(&sums, t.requests[i].prompt, t.requests[i].output);
    trace_free(&t);
    return ratio_load_from_sums(&sums, out, err);
}

static int make_setup(const plan_args *args, ratio_setup *out, error *err) {
    ratio_setup setup = {.batch = (double)args->batch,
                         .lanes = (double)args->lanes,
                         .requests = args->horizon ? (double)args->horizon : INFINITY};
    int rc = law_options_resolve(&args->law, &setup.law, err);
    if (rc != E_OK)
        return rc;
    if (!args->batch)
        return error_set(err, E_INVALID, "--batch is missing");
    if (args->trace) {
        if (!isnan(args->prefill) || !isnan(args->decode))
            return error_set(err, E_INVALID, "--trace stands in place of --prefill and --decode");
        rc = load_of_trace(args->trace, &setup.load, err);
    } else {
        if (isnan(args->prefill) || isnan(args->decode))
            return error_set(err, E_INVALID,
                             "the load is missing: give --prefill and --decode, or "
                             "--trace");
        // The variance of a geometric length of 1 or more.
        double var = fmax(args->prefill * (args->prefill - 1), 0);
        rc = ratio_load_from_means(args->prefill, var, args->decode, &setup.load, err);
    }
    if (rc == E_OK)
        rc = ratio_setup_check(&setup, err);
    if (rc == E_OK)
        *out = setup;
    return rc;
}

static int make_curves(plan *p, error *err) {
    double most = fmax(fmax(p->barrier.r, p->lanes.r), p->rule.r_star);
    p->n_curve = (size_t)fmin(fmax(32, ceil(2 * most)), 256);
    p->r = malloc(4 * p->n_curve * sizeof *p->r);
    if (!p->r)
        return error_set(err, E_NO_MEMORY, "out of memory");
    for (int form = 0; form < 3; form++)
        p->curves[form] = p->r + (size_t)(form + 1) * p->n_curve;
    for (size_t i = 0; i < p->n_curve; i++) {
        double r = p->r[i] = (double)i + 1;
        for (int form = 0; form < 3; form++) {
            double cycle = ratio_cycle(&p->setup, (ratio_form)form, r, 1);
            p->curves[form][i] = ratio_throughput(&p->setup, cycle, r, 1);
        }
    }
    return E_OK;
}

static int make_plan(const plan_args *args, plan *p, error *err) {
    ratio_limits limits = {.pool = (uint32_t)args->pool,
                           .min_ffn = (uint32_t)args->min_ffn,
                           .max_tpot = args->max_tpot,
                           .kv_tokens = args->kv_tokens};
    int rc = make_setup(args, &p->setup, err);
    if (rc != E_OK)
        return rc;
    ratio_solve(&p->setup, &p->rule);
    // The form with lanes is the only one that knows the time per output token and what is in
    // memory; the others are asked for the best of their own terms.
    ratio_limits pool = {.pool = limits.pool, .min_ffn = limits.min_ffn};
    if ((rc = ratio_search(&p->setup, RATIO_LANES, &limits, &p->lanes, err)) != E_OK ||
        (rc = ratio_search(&p->setup, RATIO_BARRIER, &pool, &p->barrier, err)) != E_OK ||
        (rc = ratio_search(&p->setup, RATIO_MEAN_FIELD, &pool, &p->mean_field, err)) != E_OK)
        return rc;
    p->can_colocate = ratio_colocate(&p->setup, args->max_tpot, &p->colocated);
    p->colocated_wins = p->can_colocate && p->colocated.throughput > p->lanes.throughput;
    ratio_sensitivities(&p->setup, p->sensitivities);
    return make_curves(p, err);
}

// ---- JSON ----

static void put_number(json_writer *w, const char *before, double value) {
    if (isfinite(value))
        json_putf(w, "%s%.10g", before, value);
    else
        json_putf(w, "%snull", before);
}

static void put_choice(json_writer *w, const char *name, const ratio_choice *c) {
    json_putf(w, ",\n \"%s\": {\"r\": %.10g, \"attention\": %u, \"ffn\": %u", name, c->r,
              c->attention, c->ffn);
    put_number(w, ", \"throughput_per_instance\": ", c->throughput);
    put_number(w, ", \"cycle\": ", c->cycle);
    put_number(w, ", \"tpot\": ", c->tpot);
    put_number(w, ", \"idle_attention\": ", c->idle_attention);
    put_number(w, ", \"idle_ffn\": ", c->idle_ffn);
    json_putf(w, ", \"limited_by\": \"%s\"}", ratio_bound_name(c->bound));
}

static void put_input(json_writer *w, const plan *p) {
    const ratio_setup *s = &p->setup;
    const char *comma = "{\"law\": {";
#define X(field)                                                                                   \
    json_putf(w, "%s\"%s\": %.10g", comma, #field, s->law.field);                                  \
    comma = ", ";
    RATIO_LAW_MAP(X)
#undef X
    json_putf(w,
              "},\n \"batch\": %.0f, \"n_lanes\": %.0f, \"prefill\": %.10g, \"decode\": %.10g, "
              "\"theta\": %.10g, \"nu2\": %.10g, \"kv_tokens\": %.0f",
              s->batch, s->lanes, s->load.mean_prompt, s->load.mean_output, s->load.theta,
              s->load.nu2, ratio_kv_tokens(s));
    put_number(w, ", \"horizon\": ", s->requests);
}

static void put_json(json_writer *w, const plan *p) {
    const ratio_rule *rule = &p->rule;
    put_input(w, p);
    json_putf(w,
              ",\n \"r_star\": %.10g, \"r_attention\": %.10g, \"r_communication\": %.10g, "
              "\"r_peak\": %.10g, \"regime\": \"%s\", \"throughput_per_instance\": %.10g",
              rule->r_star, rule->r_attention, rule->r_communication, rule->r_peak,
              ratio_regime_name(rule->regime), rule->throughput);
    put_choice(w, "mean_field", &p->mean_field);
    put_choice(w, "barrier", &p->barrier);
    put_choice(w, "lanes", &p->lanes);
    if (p->can_colocate) {
        json_putf(w,
                  ",\n \"colocated\": {\"batch\": %.0f, \"throughput_per_instance\": %.10g, "
                  "\"cycle\": %.10g, \"tpot\": %.10g, \"wins\": %s}",
                  p->colocated.batch, p->colocated.throughput, p->colocated.cycle,
                  p->colocated.tpot, p->colocated_wins ? "true" : "false");
    } else {
        json_put(w, ",\n \"colocated\": null");
    }
    json_put(w, ",\n \"sensitivity\": [");
    for (int i = 0; i < RATIO_N_SENSITIVITIES; i++)
        json_putf(w, "%s{\"name\": \"%s\", \"r_star\": %.6g, \"throughput\": %.6g}", i ? ", " : "",
                  p->sensitivities[i].name, p->sensitivities[i].r_star,
                  p->sensitivities[i].throughput);
    json_put(w, "],\n \"curve\": [");
    for (size_t i = 0; i < p->n_curve; i++)
        json_putf(w,
                  "%s\n  {\"r\": %.0f, \"mean_field\": %.10g, \"barrier\": %.10g, "
                  "\"lanes\": %.10g}",
                  i ? "," : "", p->r[i], p->curves[RATIO_MEAN_FIELD][i],
                  p->curves[RATIO_BARRIER][i], p->curves[RATIO_LANES][i]);
    json_put(w, "]}\n");
}

// ---- Table ----

static void print_choice(const char *name, const ratio_choice *c) {
    printf("  %-22s %7.4g %5u %4u %12.6g %10.6g %10.6g %6.0f%% %6.0f%%  %s\n", name, c->r,
           c->attention, c->ffn, c->throughput, c->cycle, c->tpot, 100 * c->idle_attention,
           100 * c->idle_ffn, ratio_bound_name(c->bound));
}

static void print_table(const plan *p) {
    const ratio_setup *s = &p->setup;
    const ratio_law *law = &s->law;
    const ratio_rule *rule = &p->rule;
    const ratio_sensitivity *most = &p->sensitivities[0];
    char name[32];
    for (int i = 1; i < RATIO_N_SENSITIVITIES; i++)
        if (fabs(p->sensitivities[i].r_star) > fabs(most->r_star))
            most = &p->sensitivities[i];
    printf("law        attention %g T + %g, FFN %g n + %g, transfers %g B + %g\n", law->alpha_a,
           law->beta_a, law->alpha_f, law->beta_f, law->alpha_c, law->beta_c);
    printf("load       %g prompt and %g output tokens; a slot holds %.6g tokens of KV, "
           "deviation %.4g\n",
           s->load.mean_prompt, s->load.mean_output, s->load.theta, sqrt(s->load.nu2));
    printf("memory     %.0f tokens of KV in an attention worker (%.0f x %.0f slots)\n",
           ratio_kv_tokens(s), s->lanes, s->batch);
    printf("rule       r* = %.4g, %s-bound (attention %.4g, communication %.4g, peak %.4g); "
           "throughput %.6g\n\n",
           rule->r_star, ratio_regime_name(rule->regime), rule->r_attention, rule->r_communication,
           rule->r_peak, rule->throughput);
    printf("  %-22s %7s %5s %4s %12s %10s %10s %7s %7s  %s\n", "best whole numbers", "r", "attn",
           "ffn", "per instance", "cycle", "TPOT", "idle A", "idle F", "limited by");
    print_choice("mean field", &p->mean_field);
    print_choice("barrier", &p->barrier);
    snprintf(name, sizeof name, "%.0f lane%s in flight", s->lanes, s->lanes > 1 ? "s" : "");
    print_choice(name, &p->lanes);
    if (p->can_colocate)
        printf("  %-22s %7s %5s %4s %12.6g %10.6g %10.6g   (batch %.0f)\n", "colocated", "-", "-",
               "-", p->colocated.throughput, p->colocated.cycle, p->colocated.tpot,
               p->colocated.batch);
    printf("\n1%% more %s moves r* by %+.2g%% and its throughput by %+.2g%%.\n", most->name,
           most->r_star, most->throughput);
    if (!p->can_colocate)
        printf("Colocated serving does not keep the limit of TPOT at any batch.\n");
    else if (p->colocated_wins)
        printf("Colocated serving gives %.2g%% more with the same KV memory, where every worker "
               "can hold\nthe experts as well.\n",
               100 * (p->colocated.throughput / p->lanes.throughput - 1));
    else
        printf("Disaggregated serving gives %.2g%% more than colocated with the same KV memory.\n",
               100 * (p->lanes.throughput / p->colocated.throughput - 1));
}

// ---- Plot ----

static int write_plot(const plan *p, const char *path, error *err) {
    static const char *const names[] = {"mean field", "barrier", "lanes"};
    static const char *const colors[] = {"#888", "#d95f02", "#1b6ca8"};
    const ratio_rule *rule = &p->rule;
    plot_series series[3];
    bool attention = rule->r_attention >= rule->r_communication;
    plot_band bands[] = {
        {-INFINITY, rule->r_critical, attention ? "attention-bound" : "communication-bound",
         attention ? "#e8f1fa" : "#eef7e6"},
        {rule->r_critical, INFINITY, "FFN-bound", "#fdf0e2"},
    };
    for (int form = 0; form < 3; form++)
        series[form] = (plot_series){names[form],     colors[form], p->r,
                                     p->curves[form], p->n_curve,   form == RATIO_LANES};
    plot panel = {.title = "Throughput per instance against r attention workers to an FFN worker",
                  .x_name = "r",
                  .y_name = "tokens per unit of time",
                  .series = series,
                  .n_series = 3,
                  .bands = bands,
                  .n_bands = 2,
                  .mark = rule->r_star,
                  .mark_name = "r*"};
    return svg_plot_write(path, &panel, 1, err);
}

// ---- Command ----

static void print_help(void) {
    printf(
        "usage: tandem plan --preset ascend910c --batch 256 --prefill 100 --decode 500\n"
        "Says how many attention workers an FFN worker should have, from the latency law of the\n"
        "machine and the load. Times are in the unit of the law.\n\n");
    options_print(rows, N_ROWS, stdout);
}

int plan_main(int argc, char **argv) {
    plan_args args = {.law = LAW_OPTIONS_NONE, .lanes = 2, .prefill = NAN, .decode = NAN};
    plan p = {0};
    json_writer w = {0};
    error err = {0};
    int rc = options_read(rows, N_ROWS, argc, argv, &args, &err);
    if (rc == E_OK && args.help) {
        print_help();
        return 0;
    }
    if (rc == E_OK)
        rc = make_plan(&args, &p, &err);
    if (rc == E_OK && args.plot)
        rc = write_plot(&p, args.plot, &err);
    if (rc == E_OK && args.json) {
        put_json(&w, &p);
        if (w.failed)
            rc = error_set(&err, E_NO_MEMORY, "out of memory");
        else
            fputs(w.text, stdout);
    } else if (rc == E_OK) {
        print_table(&p);
    }
    json_writer_free(&w);
    free(p.r);
    if (rc == E_OK)
        return 0;
    fprintf(stderr, "tandem plan: %s\n", err.text);
    return rc == E_IO || rc == E_NO_MEMORY ? 1 : 2;
}
