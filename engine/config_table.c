#include "engine/config_table.h"

#include "engine/chat.h"

#include <inttypes.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#define NAME_OF(name, text) text,
static const char *const dtype_names[] = {CONFIG_DTYPE_MAP(NAME_OF) NULL};
static const char *const mode_names[] = {CONFIG_MODE_MAP(NAME_OF) NULL};
static const char *const gather_names[] = {CONFIG_GATHER_MAP(NAME_OF) NULL};
static const char *const transport_names[] = {CONFIG_TRANSPORT_MAP(NAME_OF) NULL};
static const char *const level_names[] = {"error", "warn", "info", "debug", NULL};
#define LISTED(name) name,
static const char *const chat_names[] = {"auto", CHAT_FORMAT_MAP(LISTED) NULL};
_Static_assert(sizeof(config_dtype) == sizeof(int) && sizeof(log_level) == sizeof(int),
               "a choice is stored as an int");

#define AT(field) offsetof(config, field)
const config_row config_rows[] = {
    {"model", TYPE_PATH, KEY_REQUIRED, AT(model), "", 0, 0, NULL,
     "Directory of a Hugging Face model: config.json, tokenizer.json, safetensors. A relative path "
     "in the file starts at the file's directory."},
    {"served_model_name", TYPE_TEXT, 0, AT(served_model_name), "", 0, 0, NULL,
     "Name of the model in the API. Empty: the name of its directory."},
    {"dtype", TYPE_CHOICE, 0, AT(dtype), "auto", 0, 0, dtype_names,
     "Type in which weights and the KV cache are held and products are taken. auto: bf16 for a "
     "bf16 or f16 checkpoint, f32 for an f32 one."},
    {"mode", TYPE_CHOICE, 0, AT(mode), "disaggregated", 0, 0, mode_names,
     "disaggregated: attention and FFN workers are separate processes. colocated: both in one "
     "process, the baseline to compare with."},
    {"max_model_len", TYPE_INTEGER, 0, AT(max_model_len), "0", 0, 1 << 24, NULL,
     "Tokens of one request, prompt and output together. 0: what the model was made for."},
    {"chat.format", TYPE_TEXT, 0, AT(chat.format), "auto", 0, 0, chat_names,
     "How chat messages become a prompt. auto: recognised from the model's chat template."},
    {"router.host", TYPE_TEXT, 0, AT(router.host), "127.0.0.1", 0, 0, NULL,
     "Address on which the HTTP API listens. 0.0.0.0 or :: for every interface."},
    {"router.port", TYPE_INTEGER, 0, AT(router.port), "8000", 0, 65535, NULL,
     "TCP port of the HTTP API. 0: any free one; it is printed when ready."},
    {"router.api_key", TYPE_TEXT, KEY_SECRET, AT(router.api_key), "", 0, 0, NULL,
     "Clients must send this as a bearer token to /v1. Empty: no key is asked for."},
    {"router.max_waiting", TYPE_INTEGER, 0, AT(router.max_waiting), "1024", 1, 1000000, NULL,
     "Requests that may wait for a worker; one more is answered with 503."},
    {"router.max_body_bytes", TYPE_INTEGER, 0, AT(router.max_body_bytes), "8388608", 1024, 1 << 30,
     NULL, "Size of one HTTP request's body; a larger one is answered with 413."},
    {"router.max_connections", TYPE_INTEGER, 0, AT(router.max_connections), "1024", 1, 65535, NULL,
     "Open HTTP connections; one more is closed at once."},
    {"router.drain_timeout_s", TYPE_SECONDS, 0, AT(router.drain_timeout_s), "30", 0, 86400, NULL,
     "After SIGTERM, running requests may take this long to end."},
    {"router.start_timeout_s", TYPE_SECONDS, 0, AT(router.start_timeout_s), "600", 1, 86400, NULL,
     "Workers that have not joined and loaded by then end the bundle."},
    {"router.control", TYPE_ADDRESS, 0, AT(router.control), "", 0, 0, NULL,
     "HOST:PORT on which workers of other hosts join. Empty: a unix socket for workers of this "
     "host."},
    {"attention.workers", TYPE_INTEGER, 0, AT(attention.workers), "1", 1, CONFIG_MAX_WORKERS, NULL,
     "Attention workers of the bundle (x)."},
    {"attention.launch", TYPE_INTEGER, 0, AT(attention.launch), "-1", -1, CONFIG_MAX_WORKERS, NULL,
     "How many of them the router starts itself; the others join with `tandem-attn --join "
     "HOST:PORT`. -1: all."},
    {"attention.lanes", TYPE_INTEGER, 0, AT(attention.lanes), "2", 1, CONFIG_MAX_LANES, NULL,
     "Microbatches in flight per attention worker at most: one computes while another waits for "
     "its FFN."},
    {"attention.lane_rows", TYPE_INTEGER, 0, AT(attention.lane_rows), "0", 0, 8192, NULL,
     "Rows of a step from which a worker opens a further lane. Below, weights are read once for "
     "all requests rather than once per lane. 0: four rows for each of a layer's experts."},
    {"attention.device", TYPE_DEVICE, 0, AT(attention.device), "cpu", 0, 0, NULL,
     "Where attention runs: cpu (the best instruction set found), cpu:ref, cpu:avx2, cpu:avx512, "
     "cpu:amx, cuda:N, emulated."},
    {"attention.threads", TYPE_INTEGER, 0, AT(attention.threads), "0", 0, 1024, NULL,
     "Threads that compute in each attention worker. 0: an even share of the cores."},
    {"attention.max_seqs", TYPE_INTEGER, 0, AT(attention.max_seqs), "64", 1, 4096, NULL,
     "Requests that one attention worker runs at a time."},
    {"attention.token_budget", TYPE_INTEGER, 0, AT(attention.token_budget), "256", 1, 8192, NULL,
     "Rows of one step of one lane: decode rows first, then chunks of prompts."},
    {"attention.kv_tokens", TYPE_INTEGER, 0, AT(attention.kv_tokens), "0", 0, 1 << 30, NULL,
     "Tokens that the KV cache of one attention worker holds, in pages of 16. 0: chosen from "
     "max_seqs, the context and the memory there is."},
    {"ffn.workers", TYPE_INTEGER, 0, AT(ffn.workers), "1", 1, CONFIG_MAX_WORKERS, NULL,
     "FFN workers of the bundle (y); the experts are split over them."},
    {"ffn.launch", TYPE_INTEGER, 0, AT(ffn.launch), "-1", -1, CONFIG_MAX_WORKERS, NULL,
     "How many of them the router starts itself; the others join with `tandem-ffn --join "
     "HOST:PORT`. -1: all."},
    {"ffn.device", TYPE_DEVICE, 0, AT(ffn.device), "cpu", 0, 0, NULL,
     "Where the experts run; the same names as attention.device."},
    {"ffn.threads", TYPE_INTEGER, 0, AT(ffn.threads), "0", 0, 1024, NULL,
     "Threads that compute in each FFN worker. 0: an even share of the cores."},
    {"ffn.gather", TYPE_CHOICE, 0, AT(ffn.gather), "pass", 0, 0, gather_names,
     "pass: frames of all attention workers in the same pass are computed together, so that "
     "weights are read once for all. none: each frame on its own, a control for measurements."},
    {"ffn.gather_wait_us", TYPE_INTEGER, 0, AT(ffn.gather_wait_us), "200", 0, 10000000, NULL,
     "When a pass begins, how long the workers that are not there yet are waited for."},
    {"ffn.member_deadline_ms", TYPE_INTEGER, 0, AT(ffn.member_deadline_ms), "2000", 1, 600000, NULL,
     "A member of a pass that is late by this much leaves the pass."},
    {"wire.dtype", TYPE_CHOICE, 0, AT(wire.dtype), "auto", 0, 0, dtype_names,
     "Type of activations between workers. auto: the type of the computation."},
    {"wire.transport", TYPE_CHOICE, 0, AT(wire.transport), "auto", 0, 0, transport_names,
     "auto: shared memory when all workers are on this host, else TCP."},
    {"wire.bind", TYPE_TEXT, 0, AT(wire.bind), "", 0, 0, NULL,
     "With TCP, the router host's address whose network interface carries activations. Empty: the "
     "one that reaches the control socket. Workers on other hosts: their --bind."},
    {"wire.spin_us", TYPE_INTEGER, 0, AT(wire.spin_us), "-1", -1, 1000000, NULL,
     "A worker that expects a frame polls this long before it sleeps. -1: chosen from the cores "
     "there are."},
    {"log.level", TYPE_CHOICE, 0, AT(log.level), "info", 0, 0, level_names,
     "Lines of this level and above are logged to standard error."},
};
_Static_assert(sizeof config_rows / sizeof config_rows[0] == CONFIG_N_ROWS, "count the rows");

void config_row_describe(const config_row *row, char *out, size_t n_bytes) {
    size_t n = 0;
    switch (row->type) {
    case TYPE_INTEGER:
        snprintf(out, n_bytes, "an integer from %.0f to %.0f", row->min, row->max);
        return;
    case TYPE_SECONDS:
        snprintf(out, n_bytes, "a number of seconds from %.0f to %.0f", row->min, row->max);
        return;
    case TYPE_DEVICE:
        snprintf(out, n_bytes, "cpu, cpu:ref, cpu:avx2, cpu:avx512, cpu:amx, cuda:N or emulated");
        return;
    case TYPE_ADDRESS:
        snprintf(out, n_bytes, "HOST:PORT with a port from 0 to 65535, or nothing");
        return;
    case TYPE_PATH:
        snprintf(out, n_bytes, "a path of less than %d bytes", CONFIG_PATH_BYTES);
        return;
    case TYPE_TEXT:
    case TYPE_CHOICE:
        break;
    }
    if (!row->choices)
        snprintf(out, n_bytes, "text of less than %d bytes", CONFIG_TEXT_BYTES);
    for (size_t i = 0; row->choices && row->choices[i] && n < n_bytes; i++)
        n += (size_t)snprintf(out + n, n_bytes - n, "%s%s",
                              !i                    ? ""
                              : row->choices[i + 1] ? ", "
                                                    : " or ",
                              row->choices[i]);
}

static void print_text(FILE *out, const char *text) {
    fputc('"', out);
    for (; *text; text++) {
        if (*text == '"' || *text == '\\')
            fprintf(out, "\\%c", *text);
        else if ((unsigned char)*text < 0x20)
            fprintf(out, "\\u%04x", (unsigned)*text);
        else
            fputc(*text, out);
    }
    fputc('"', out);
}

static void print_value(FILE *out, const config_row *row, const config *c) {
    const char *field = (const char *)c + row->offset;
    int64_t integer;
    double number;
    int choice;
    switch (row->type) {
    case TYPE_INTEGER:
        memcpy(&integer, field, sizeof integer);
        fprintf(out, "%" PRId64, integer);
        return;
    case TYPE_SECONDS:
        memcpy(&number, field, sizeof number);
        fprintf(out, "%.17g", number);
        return;
    case TYPE_CHOICE:
        memcpy(&choice, field, sizeof choice);
        print_text(out, row->choices[choice]);
        return;
    case TYPE_TEXT:
    case TYPE_PATH:
    case TYPE_DEVICE:
    case TYPE_ADDRESS:
        print_text(out, field);
    }
}

char *config_to_json(const config *c) {
    char *text = NULL;
    size_t n = 0;
    FILE *out = open_memstream(&text, &n);
    if (!out)
        return NULL;
    const char *section = "";
    size_t n_section = 0;
    // The rows of a section stand together in the table, and those without a section first.
    for (size_t i = 0; i < CONFIG_N_ROWS; i++) {
        const config_row *row = &config_rows[i];
        const char *dot = strchr(row->path, '.');
        size_t n_prefix = dot ? (size_t)(dot - row->path) + 1 : 0;
        bool enters = n_prefix && (n_prefix != n_section || memcmp(section, row->path, n_prefix));
        if (row->flags & KEY_SECRET)
            continue;
        fprintf(out, "%s%s", enters && n_section ? "\n  }" : "", i ? ",\n" : "{\n");
        if (enters) {
            section = row->path;
            n_section = n_prefix;
            fprintf(out, "  \"%.*s\": {\n", (int)n_section - 1, section);
        }
        fprintf(out, "%s\"%s\": ", n_prefix ? "    " : "  ", row->path + n_prefix);
        print_value(out, row, c);
    }
    fprintf(out, "%s\n}\n", n_section ? "\n  }" : "");
    if (fclose(out) != 0) {
        free(text);
        return NULL;
    }
    return text;
}

// "integer 1..64", as the reference says it.
static void type_summary(const config_row *row, char *out, size_t n_bytes) {
    static const char *const names[] = {
        [TYPE_TEXT] = "text",       [TYPE_PATH] = "path", [TYPE_INTEGER] = "integer",
        [TYPE_SECONDS] = "seconds", [TYPE_CHOICE] = "",   [TYPE_DEVICE] = "device",
        [TYPE_ADDRESS] = "address",
    };
    if (row->choices)
        config_row_describe(row, out, n_bytes);
    else if (row->max > row->min)
        snprintf(out, n_bytes, "%s %.0f..%.0f", names[row->type], row->min, row->max);
    else
        snprintf(out, n_bytes, "%s", names[row->type]);
}

static void print_wrapped(FILE *out, const char *text, size_t indent, size_t width) {
    while (*text) {
        size_t n = strlen(text);
        if (n > width - indent)
            for (n = width - indent; n && text[n] != ' '; n--)
                ;
        fprintf(out, "%*s%.*s\n", (int)indent, "", (int)n, text);
        text += n + (text[n] == ' ');
    }
}

void config_print_help(FILE *out) {
    fprintf(out, "A configuration is a JSON file; // and /* */ comments are allowed. Every key can "
                 "also be\ngiven as `--set KEY=VALUE`, or as a variable of the environment: "
                 "TANDEM_ROUTER_PORT for\nrouter.port. The command line wins over the environment, "
                 "the environment over the file.\n\n");
    for (size_t i = 0; i < CONFIG_N_ROWS; i++) {
        char type[160];
        type_summary(&config_rows[i], type, sizeof type);
        fprintf(out, "%s  (%s; ", config_rows[i].path, type);
        if (config_rows[i].flags & KEY_REQUIRED)
            fprintf(out, "required)\n");
        else
            fprintf(out, "default %s)\n",
                    config_rows[i].initial[0] ? config_rows[i].initial : "empty");
        print_wrapped(out, config_rows[i].help, 4, 92);
    }
}

void config_print_markdown(FILE *out) {
    fprintf(out, "| Key | Type | Default | Meaning |\n|---|---|---|---|\n");
    for (size_t i = 0; i < CONFIG_N_ROWS; i++) {
        char type[160];
        type_summary(&config_rows[i], type, sizeof type);
        fprintf(out, "| `%s` | %s | %s | %s |\n", config_rows[i].path, type,
                config_rows[i].flags & KEY_REQUIRED ? "required"
                : config_rows[i].initial[0]         ? config_rows[i].initial
                                                    : "empty",
                config_rows[i].help);
    }
}
