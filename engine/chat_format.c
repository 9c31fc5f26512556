#include "engine/chat_internal.h"

#include "engine/json.h"
#include "engine/text_buf.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CHAT_TEMPLATE_MAX ((size_t)1 << 20) // bytes of a template file
#define CHAT_CONFIG_MAX ((size_t)64 << 20)  // bytes of tokenizer_config.json

#define CHATML_TURN(role)                                                                          \
    { "<|im_start|>" role "\n", "<|im_end|>\n" }
#define CHATML_MARKER "'<|im_start|>'+message.role+'\n'+"
#define CHATML_STOPS                                                                               \
    { "<|im_end|>", "<|endoftext|>" }
#define LLAMA3_TURN(role)                                                                          \
    { "<|start_header_id|>" role "<|end_header_id|>\n\n", "<|eot_id|>" }

// Markers are looked for in the template with \n escapes resolved, double quotes made single, and
// no blanks around '+' and '|'. They are strict: a template that only resembles a format is
// refused, since a prompt that is nearly right is worse than a question. The first row that fits is
// taken.
static const chat_row rows[] = {
    {.name = "llama3",
     .has = {"'<|start_header_id|>'+message.role+'<|end_header_id|>\n\n'+message.content|trim"},
     .has_not = {"Cutting Knowledge Date", "functions"},
     .bos = true,
     .system = LLAMA3_TURN("system"),
     .user = LLAMA3_TURN("user"),
     .assistant = LLAMA3_TURN("assistant"),
     .generation = "<|start_header_id|>assistant<|end_header_id|>\n\n",
     .stops = {"<|eot_id|>", "<|end_of_text|>"},
     .trim = TRIM_ALL},
    {.name = "qwen3",
     .has = {CHATML_MARKER, "<tool_response>", "last_query_index"},
     .system = CHATML_TURN("system"),
     .user = CHATML_TURN("user"),
     .assistant = CHATML_TURN("assistant"),
     .tool = {"\n<tool_response>\n", "\n</tool_response>"},
     .generation = "<|im_start|>assistant\n",
     .stops = CHATML_STOPS,
     .tool_in_user = true,
     .default_system = true,
     .think = true},
    {.name = "qwen2.5",
     .has = {CHATML_MARKER, "<tool_response>"},
     .has_not = {"</think>"},
     .system = CHATML_TURN("system"),
     .user = CHATML_TURN("user"),
     .assistant = CHATML_TURN("assistant"),
     .tool = {"\n<tool_response>\n", "\n</tool_response>"},
     .generation = "<|im_start|>assistant\n",
     .stops = CHATML_STOPS,
     .tool_in_user = true,
     .default_system = true},
    {.name = "chatml",
     .has = {CHATML_MARKER, "<|im_end|>"},
     .has_not = {"</think>"},
     .system = CHATML_TURN("system"),
     .user = CHATML_TURN("user"),
     .assistant = CHATML_TURN("assistant"),
     .tool = CHATML_TURN("tool"),
     .generation = "<|im_start|>assistant\n",
     .stops = CHATML_STOPS,
     .default_system = true},
    {.name = "tulu",
     .has = {"'<|user|>\n'+message.content", "'<|assistant|>\n'+message.content+eos_token",
             "not loop.last"},
     .has_not = {"'<|user|>\n'+message.content+eos_token"},
     .bos = true,
     .system = {"<|system|>\n", "\n"},
     .user = {"<|user|>\n", "\n"},
     .assistant = {"<|assistant|>\n", EOS "\n"},
     .generation = "<|assistant|>\n",
     .bare_last_reply = true},
    {.name = "olmoe",
     .has = {"'<|user|>\n'+message.content", "'<|assistant|>\n'+message.content+eos_token"},
     .has_not = {"'<|user|>\n'+message.content+eos_token"},
     .bos = true,
     .system = {"<|system|>\n", "\n"},
     .user = {"<|user|>\n", "\n"},
     .assistant = {"<|assistant|>\n", EOS "\n"},
     .generation = "<|assistant|>\n"},
    {.name = "mistral",
     .has = {"' [INST] '", "' [/INST]'"},
     .has_not = {"<<SYS>>", "[SYSTEM_PROMPT]"},
     .bos = true,
     .user = {" [INST] ", " [/INST]"},
     .assistant = {" ", EOS},
     .generation = "",
     .system_place = SYSTEM_IN_FIRST_USER,
     .alternate = true},
    {.name = "mistral-legacy",
     .has = {"'[INST] '", "' [/INST]'"},
     .has_not = {"<<SYS>>", "[SYSTEM_PROMPT]", "system_message", "eos_token+' '"},
     .bos = true,
     .user = {"[INST] ", " [/INST]"},
     .assistant = {"", EOS},
     .generation = "",
     .system_place = SYSTEM_REFUSED,
     .alternate = true},
    {.name = "mistral-v3",
     .has = {"'[INST] '", "'[/INST]'", "system_message"},
     .has_not = {"<<SYS>>", "[SYSTEM_PROMPT]"},
     .bos = true,
     .user = {"[INST] ", "[/INST]"},
     .assistant = {" ", EOS},
     .generation = "",
     .trim = TRIM_ASSISTANT,
     .system_place = SYSTEM_IN_LAST_USER,
     .alternate = true},
    {.name = "mistral-tekken",
     .has = {"'[INST]'", "'[/INST]'", "system_message"},
     .has_not = {"<<SYS>>", "[SYSTEM_PROMPT]"},
     .bos = true,
     .user = {"[INST]", "[/INST]"},
     .assistant = {"", EOS},
     .generation = "",
     .system_place = SYSTEM_IN_LAST_USER,
     .alternate = true},
};
#define N_ROWS (sizeof rows / sizeof *rows)
#define COUNT(name) +1
_Static_assert(N_ROWS == CHAT_FORMAT_MAP(COUNT), "each name has a row");
#define LISTED(name) ", " name
#define NAMES "auto" CHAT_FORMAT_MAP(LISTED)

// --- recognising ---------------------------------------------------------------------------------

static const chat_row *row_named(const char *name) {
    for (size_t i = 0; i < N_ROWS; i++)
        if (strcmp(rows[i].name, name) == 0)
            return &rows[i];
    return NULL;
}

static int choose(error *err, const char *where, const char *what) {
    return error_set(err, E_UNSUPPORTED,
                     "%s: %s; set chat.format in the config to the format the model was trained "
                     "with, one of " NAMES,
                     where, what);
}

static int read_template_file(const char *path, text_buf *out, error *err) {
    FILE *file = fopen(path, "rb");
    if (!file)
        return E_NOT_FOUND;
    int rc = text_buf_reserve(out, CHAT_TEMPLATE_MAX + 1);
    if (rc == E_OK) {
        out->n = fread(out->data, 1, CHAT_TEMPLATE_MAX + 1, file);
        if (ferror(file))
            rc = E_IO;
        else if (out->n > CHAT_TEMPLATE_MAX)
            rc = E_TOO_LARGE;
    }
    fclose(file);
    return rc == E_OK ? rc : error_set(err, rc, "%s: %s", path, status_text(rc));
}

// chat_template is a text, or a list of named ones of which "default" counts.
static const char *template_of(const json *config) {
    const json_value *node = json_get(json_root(config), "chat_template");
    const char *text = NULL, *name;
    if (json_as_string(node, &text) || !json_is_array(node))
        return text;
    for (const json_value *v = json_first(node); v; v = json_next(v))
        if (json_as_string(json_get(v, "name"), &name) && strcmp(name, "default") == 0)
            json_as_string(json_get(v, "template"), &text);
    return text;
}

// Brings a template into the one spelling in which markers are written.
static int normalize(text_buf *text) {
    static const struct {
        const char *from, *to;
    } rules[] = {{"\\n", "\n"},         {"\"", "'"}, {"['content']", ".content"},
                 {"['role']", ".role"}, {"  ", " "}, {" +", "+"},
                 {"+ ", "+"},           {" | ", "|"}};
    int rc = E_OK;
    for (size_t i = 0; i < sizeof rules / sizeof *rules && rc == E_OK; i++) {
        text_buf next = {0};
        rc = text_buf_add_replaced(&next, text->data, text->n, rules[i].from, rules[i].to);
        if (rc == E_OK) {
            text_buf_free(text);
            *text = next;
        } else {
            text_buf_free(&next);
        }
    }
    return rc;
}

static bool contains(const text_buf *text, const char *part) {
    return text->n > 0 && memmem(text->data, text->n, part, strlen(part));
}

static bool fits(const chat_row *row, const text_buf *text) {
    for (size_t i = 0; i < CHAT_MARKERS_MAX; i++) {
        if (row->has[i] && !contains(text, row->has[i]))
            return false;
        if (row->has_not[i] && contains(text, row->has_not[i]))
            return false;
    }
    return true;
}

// A default system prompt is literal text between the markers of a system turn; where the turn
// takes a message's content a quote follows instead.
static void find_default_system(chat_format *format, const text_buf *text) {
    static const char open[] = "<|im_start|>system\n", close[] = "<|im_end|>";
    size_t at = 0;
    while (format->row->default_system && at < text->n) {
        const char *hit = memmem(text->data + at, text->n - at, open, strlen(open));
        if (!hit)
            return;
        at = (size_t)(hit - text->data) + strlen(open);
        const char *end = memmem(text->data + at, text->n - at, close, strlen(close));
        size_t n = end ? (size_t)(end - text->data) - at : 0;
        if (n == 0 || n >= sizeof format->system || text->data[at] == '\'' ||
            memchr(text->data + at, '{', n))
            continue;
        memcpy(format->system, text->data + at, n);
        format->system[n] = '\0';
        return;
    }
}

static int recognise(chat_format *format, const char *where, text_buf *text, error *err) {
    if (normalize(text) != E_OK)
        return error_set(err, E_NO_MEMORY, "%s: out of memory", where);
    for (size_t i = 0; i < N_ROWS && !format->row; i++)
        if (fits(&rows[i], text))
            format->row = &rows[i];
    if (!format->row)
        return choose(err, where, "its chat template is of no known format");
    format->begin = contains(text, "bos_token") || (*format->bos && contains(text, format->bos));
    format->open_think = format->row->think && contains(text, "'<|im_start|>assistant\n<think>\n'");
    find_default_system(format, text);
    return E_OK;
}

static int read_token(const json *config, const char *key, char out[CHAT_TOKEN_MAX], error *err) {
    const json_value *node = json_get(json_root(config), key);
    const char *text = "";
    if (!json_as_string(node, &text))
        json_as_string(json_get(node, "content"), &text);
    if (strlen(text) >= CHAT_TOKEN_MAX)
        return error_set(err, E_TOO_LARGE, "%s: %s: more than %d bytes", json_name(config), key,
                         CHAT_TOKEN_MAX - 1);
    strcpy(out, text);
    return E_OK;
}

// Fills the format from the directory's files. config is NULL when there is none.
static int load(chat_format *format, const char *model_dir, const char *jinja_path,
                const json *config, error *err) {
    text_buf text = {0};
    int rc = E_OK;
    if (config) {
        rc = read_token(config, "bos_token", format->bos, err);
        if (rc == E_OK)
            rc = read_token(config, "eos_token", format->eos, err);
    }
    if (rc != E_OK || format->row)
        return rc;
    const char *inside = config ? template_of(config) : NULL, *where = jinja_path;
    rc = read_template_file(jinja_path, &text, err); // it wins over the config, as in transformers
    if (rc == E_NOT_FOUND && inside) {
        where = json_name(config);
        rc = text_buf_add(&text, inside, strlen(inside));
    }
    if (rc == E_NOT_FOUND)
        rc = choose(err, model_dir, "there is no chat template");
    else if (rc == E_OK)
        rc = recognise(format, where, &text, err);
    text_buf_free(&text);
    return rc;
}

int chat_format_open(const char *model_dir, const char *name, chat_format **out, error *err) {
    char config_path[4096], jinja_path[4096];
    json *config = NULL;
    error ignored;
    err = err ? err : &ignored;
    bool named = name && strcmp(name, "auto") != 0;
    if (named && !row_named(name))
        return error_set(err, E_INVALID, "chat.format: '%.60s' is not one of " NAMES, name);
    int n = snprintf(config_path, sizeof config_path, "%s/tokenizer_config.json", model_dir);
    if (n < 0 || (size_t)n >= sizeof config_path)
        return error_set(err, E_INVALID, "%.60s...: the path is too long", model_dir);
    snprintf(jinja_path, sizeof jinja_path, "%.4000s/chat_template.jinja", model_dir);
    int rc = json_open(config_path, CHAT_CONFIG_MAX, &config, err);
    if (rc != E_OK && rc != E_NOT_FOUND)
        return rc;
    chat_format *format = calloc(1, sizeof *format);
    if (!format) {
        json_close(config);
        return error_set(err, E_NO_MEMORY, "%s: out of memory", model_dir);
    }
    if (named) {
        format->row = row_named(name);
        format->begin = format->row->bos;
    }
    rc = load(format, model_dir, jinja_path, config, err);
    json_close(config);
    if (rc != E_OK) {
        chat_format_close(format);
        return rc;
    }
    *out = format;
    return E_OK;
}

void chat_format_close(chat_format *format) {
    free(format);
}

const char *chat_format_name(const chat_format *format) {
    return format->row->name;
}

static int push_stop(const tokenizer *t, const char *text, token_ids *out) {
    int32_t id = text && *text ? tokenizer_token_id(t, text) : -1;
    for (size_t i = 0; i < out->n; i++)
        if (out->ids[i] == id)
            return E_OK;
    return id >= 0 ? token_ids_push(out, id) : E_OK;
}

int chat_stop_ids(const chat_format *format, const tokenizer *t, token_ids *out) {
    int rc = push_stop(t, format->eos, out);
    for (size_t i = 0; i < CHAT_STOPS_MAX && rc == E_OK; i++)
        rc = push_stop(t, format->row->stops[i], out);
    return rc;
}
