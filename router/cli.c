#include "router/cli.h"

#include "router/chat_client.h"
#include "router/check.h"
#include "router/plan_cli.h"
#include "router/serve.h"
#include "router/simulate_cli.h"
#include "router/synth.h"

#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

typedef struct command {
    const char *name;
    const char *arguments;
    const char *summary;
    const char *help; // more than the summary says, or NULL
    int (*run)(const struct command *command, int argc, char **argv);
} command;

static int wrong_usage(const command *c, const char *what, const char *argument) {
    fprintf(stderr, "tandem%s%s: %s%s; see `tandem%s%s --help`\n", c ? " " : "", c ? c->name : "",
            what, argument, c ? " " : "", c ? c->name : "");
    return CLI_WRONG_USAGE;
}

static bool wants_help(const char *argument) {
    return strcmp(argument, "--help") == 0 || strcmp(argument, "-h") == 0;
}

// Reads `CONFIG [--set KEY=VALUE ...]`. Result: 0, or the exit status after one line.
static int load_config(const command *c, int argc, char **argv, config *out) {
    const char *path = NULL;
    const char **overrides = calloc((size_t)argc + 1, sizeof *overrides);
    size_t n_overrides = 0;
    int status = CLI_WRONG_USAGE;
    error err = {0};
    if (!overrides) {
        fprintf(stderr, "tandem: out of memory\n");
        return CLI_FAILED;
    }
    for (int i = 0; i < argc; i++) {
        if (strncmp(argv[i], "--set=", 6) == 0) {
            overrides[n_overrides++] = argv[i] + 6;
        } else if (strcmp(argv[i], "--set") == 0) {
            if (i + 1 == argc) {
                wrong_usage(c, "KEY=VALUE is missing after ", argv[i]);
                goto free_overrides;
            }
            overrides[n_overrides++] = argv[++i];
        } else if (argv[i][0] == '-') {
            wrong_usage(c, "unknown option ", argv[i]);
            goto free_overrides;
        } else if (path) {
            wrong_usage(c, "one configuration file is enough, not also ", argv[i]);
            goto free_overrides;
        } else {
            path = argv[i];
        }
    }
    if (!path) {
        wrong_usage(c, "the configuration file is missing", "");
    } else if (config_load(path, overrides, n_overrides, out, &err) != E_OK) {
        fprintf(stderr, "%s\n", err.text);
    } else {
        log_set_level(out->log.level);
        status = 0;
    }
free_overrides:
    free(overrides);
    return status;
}

static int run_serve(const command *c, int argc, char **argv) {
    config loaded;
    int status = load_config(c, argc, argv, &loaded);
    return status ? status : serve_main(&loaded);
}

static int run_check(const command *c, int argc, char **argv) {
    config loaded;
    error err = {0};
    int status = load_config(c, argc, argv, &loaded);
    if (status)
        return status;
    if (check_bundle(&loaded, stdout, &err) == E_OK)
        return 0;
    fprintf(stderr, "%s\n", err.text);
    return CLI_WRONG_USAGE;
}

static int run_config(const command *c, int argc, char **argv) {
    if (argc == 0) {
        config_print_help(stdout);
        return 0;
    }
    if (strcmp(argv[0], "--markdown") == 0) {
        if (argc > 1)
            return wrong_usage(c, "nothing is expected after --markdown, not ", argv[1]);
        config_print_markdown(stdout);
        return 0;
    }
    config loaded;
    int status = load_config(c, argc, argv, &loaded);
    if (status)
        return status;
    char *text = config_to_json(&loaded);
    if (!text) {
        fprintf(stderr, "tandem: out of memory\n");
        return CLI_FAILED;
    }
    fputs(text, stdout);
    free(text);
    return 0;
}

static int run_version(const command *c, int argc, char **argv) {
    if (argc > 0)
        return wrong_usage(c, "unknown argument ", argv[0]);
    printf("tandem %s\n", TANDEM_VERSION);
    return 0;
}

static int run_chat(const command *c, int argc, char **argv) {
    chat_client_args args = {.url = "http://127.0.0.1:8000", .out = stdout};
    error err = {0};
    args.api_key = getenv("TANDEM_ROUTER_API_KEY");
    for (int i = 0; i < argc; i++) {
        if (strcmp(argv[i], "--url") == 0) {
            if (i + 1 == argc)
                return wrong_usage(c, "an address is missing after ", argv[i]);
            args.url = argv[++i];
        } else if (argv[i][0] == '-' && argv[i][1]) {
            return wrong_usage(c, "unknown option ", argv[i]);
        } else if (args.question) {
            return wrong_usage(c, "one question is enough (put it in quotes), not also ", argv[i]);
        } else {
            args.question = argv[i];
        }
    }
    if (!args.question)
        return wrong_usage(c, "the question is missing", "");
    if (chat_client_ask(&args, &err) == E_OK)
        return 0;
    fprintf(stderr, "tandem chat: %s\n", err.text);
    return CLI_FAILED;
}

static int run_synth(const command *c, int argc, char **argv) {
    (void)c;
    return synth_main(argc, argv);
}

static int run_plan(const command *c, int argc, char **argv) {
    (void)c;
    return plan_main(argc, argv);
}

static int run_simulate(const command *c, int argc, char **argv) {
    (void)c;
    return simulate_main(argc, argv);
}

// These have tables of options, and print them themselves.
static bool has_own_help(const command *c) {
    return c->run == run_synth || c->run == run_plan || c->run == run_simulate;
}

static const command commands[] = {
    {"serve", "CONFIG.json [--set KEY=VALUE ...]", "launch a bundle and serve it over HTTP",
     "Prints `tandem: ready at http://HOST:PORT` when requests are taken. SIGTERM or Ctrl-C lets\n"
     "running requests end; a second one ends the bundle at once. Keys: `tandem config --help`.\n",
     run_serve},
    {"check", "CONFIG.json [--set KEY=VALUE ...]",
     "check a configuration and its model, start nothing",
     "Reads the headers of the weights, not the weights, and prints what each worker will hold.\n",
     run_check},
    {"config", "[--help | --markdown | CONFIG.json [--set KEY=VALUE ...]]",
     "the keys of a configuration, or the effective values of one", NULL, run_config},
    {"plan", "--preset NAME --batch SLOTS --prefill TOKENS --decode TOKENS [OPTION ...]",
     "how many attention workers to an FFN worker", NULL, run_plan},
    {"simulate", "--preset NAME --batch SLOTS --prefill TOKENS --decode TOKENS [OPTION ...]",
     "a bundle at several ratios as discrete events", NULL, run_simulate},
    {"synth", "--arch ARCH [OPTION VALUE ...] DIR",
     "write a model with random weights and a dummy tokenizer", NULL, run_synth},
    {"chat", "[--url http://HOST:PORT] QUESTION",
     "ask a running server, and show the answer as it streams",
     "The address is http://127.0.0.1:8000 unless given. A key is taken from the variable\n"
     "TANDEM_ROUTER_API_KEY.\n",
     run_chat},
    {"version", "", "print the version", NULL, run_version},
};
enum { N_COMMANDS = sizeof commands / sizeof commands[0] };

static void print_help(void) {
    printf("tandem %s: serves Mixture-of-Experts language models, attention and FFN in separate "
           "processes\n\nusage:\n",
           TANDEM_VERSION);
    for (size_t i = 0; i < N_COMMANDS; i++)
        printf("  tandem %s%s%s\n      %s\n", commands[i].name, commands[i].arguments[0] ? " " : "",
               commands[i].arguments, commands[i].summary);
    printf("  tandem COMMAND --help\n");
}

static int print_command_help(const command *c) {
    printf("usage: tandem %s %s\n%s\n%s", c->name, c->arguments, c->summary,
           c->help ? c->help : "");
    return 0;
}

int cli_run(int argc, char **argv) {
    if (argc < 2) {
        fprintf(stderr, "tandem: a command is missing; see `tandem --help`\n");
        return CLI_WRONG_USAGE;
    }
    if (wants_help(argv[1]) || strcmp(argv[1], "help") == 0) {
        print_help();
        return 0;
    }
    const char *name = strcmp(argv[1], "--version") == 0 ? "version" : argv[1];
    for (size_t i = 0; i < N_COMMANDS; i++) {
        const command *c = &commands[i];
        if (strcmp(c->name, name) != 0)
            continue;
        // config --help is the table of keys.
        for (int k = 2; k < argc && !has_own_help(c); k++)
            if (wants_help(argv[k]))
                return c->run == run_config ? c->run(c, 0, NULL) : print_command_help(c);
        return c->run(c, argc - 2, argv + 2);
    }
    return wrong_usage(NULL, "unknown command ", argv[1]);
}
