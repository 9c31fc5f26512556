#include "engine/chat_internal.h"

#include "engine/text_buf.h"
#include "engine/utf8.h"

#include <stdlib.h>
#include <string.h>

typedef enum chat_role { ROLE_SYSTEM, ROLE_USER, ROLE_ASSISTANT, ROLE_TOOL, N_ROLES } chat_role;

typedef struct part_list {
    tokenizer_part *parts; // owned; their texts are not
    size_t n, capacity;
} part_list;

static int add_part(part_list *list, const char *text, size_t n, bool literal) {
    if (n == 0)
        return E_OK;
    if (list->n == list->capacity) {
        size_t capacity = list->capacity ? 2 * list->capacity : 32;
        tokenizer_part *parts = realloc(list->parts, capacity * sizeof *parts);
        if (!parts)
            return E_NO_MEMORY;
        list->parts = parts;
        list->capacity = capacity;
    }
    list->parts[list->n++] = (tokenizer_part){text, n, literal};
    return E_OK;
}

static int add_content(part_list *list, const char *text, size_t n) {
    return add_part(list, text, n, false);
}

// Adds a row's text with BOS and EOS put in.
static int add_literal(const chat_format *format, part_list *list, const char *text) {
    int rc = E_OK;
    while (*text && rc == E_OK) {
        size_t n = strcspn(text, BOS EOS);
        rc = add_part(list, text, n, true);
        text += n;
        if (*text && rc == E_OK) {
            const char *token = *text == *BOS ? format->bos : format->eos;
            rc = add_part(list, token, strlen(token), true);
            text++;
        }
    }
    return rc;
}

static bool is_python_space(uint32_t c) {
    return (c >= 9 && c <= 13) || (c >= 0x1C && c <= 0x20) || c == 0x85 || c == 0xA0 ||
           c == 0x1680 || (c >= 0x2000 && c <= 0x200A) || c == 0x2028 || c == 0x2029 ||
           c == 0x202F || c == 0x205F || c == 0x3000;
}

// str.strip() of Python.
static void trim(const char **text, size_t *n) {
    size_t length, end = 0;
    uint32_t c;
    bool started = false;
    const char *from = *text + *n;
    for (size_t i = 0; i < *n; i += length) {
        bool blank = utf8_next(*text + i, *n - i, &length, &c) == UTF8_VALID && is_python_space(c);
        if (!blank && !started) {
            from = *text + i;
            started = true;
        }
        if (!blank)
            end = i + length;
    }
    *n = started ? end - (size_t)(from - *text) : 0;
    *text = from;
}

static int read_role(const chat_message *message, size_t index, chat_role *out, error *err) {
    static const char *const names[] = {"system", "user", "assistant", "tool"};
    for (int role = 0; role < N_ROLES; role++) {
        if (strcmp(message->role, names[role]) == 0) {
            *out = (chat_role)role;
            return E_OK;
        }
    }
    if (strcmp(message->role, "developer") == 0) {
        *out = ROLE_SYSTEM;
        return E_OK;
    }
    return error_set(err, E_INVALID,
                     "messages[%zu].role: '%.40s' is not one of system, user, assistant, tool",
                     index, message->role);
}

static const chat_turn *turn_of(const chat_row *row, chat_role role) {
    const chat_turn *turns[] = {&row->system, &row->user, &row->assistant, &row->tool};
    return turns[role];
}

static int check_order(const chat_row *row, const chat_role *roles, size_t n, error *err) {
    bool lead = n > 0 && roles[0] == ROLE_SYSTEM && row->system_place != SYSTEM_IS_A_TURN;
    if (n == 0)
        return error_set(err, E_INVALID, "messages: at least one is needed");
    if (lead && row->system_place == SYSTEM_REFUSED)
        return error_set(err, E_INVALID,
                         "messages[0].role: the %s format of this model has no system messages",
                         row->name);
    for (size_t i = lead; i < n; i++) {
        if (!turn_of(row, roles[i])->before && !(row->alternate && roles[i] == ROLE_SYSTEM))
            return error_set(err, E_INVALID,
                             "messages[%zu].role: the %s format of this model has no tool messages",
                             i, row->name);
        if (row->alternate && roles[i] != ((i - lead) % 2 == 0 ? ROLE_USER : ROLE_ASSISTANT))
            return error_set(
                err, E_INVALID,
                "messages[%zu].role: in the %s format of this model user and "
                "assistant alternate, the user first%s",
                i, row->name,
                row->system_place == SYSTEM_REFUSED ? "" : ", after at most one system message");
    }
    return E_OK;
}

typedef struct render_run {
    const chat_format *format;
    const chat_message *messages; // (n)
    const chat_role *roles;       // (n)
    size_t n;
    size_t last_question; // index of the last user message that is no tool's answer
    part_list *list;
} render_run;

static bool starts_and_ends(const chat_message *m, const char *start, const char *end) {
    size_t n_start = strlen(start), n_end = strlen(end);
    return m->n_bytes >= n_start && m->n_bytes >= n_end &&
           memcmp(m->content, start, n_start) == 0 &&
           memcmp(m->content + m->n_bytes - n_end, end, n_end) == 0;
}

static size_t find_last_question(const render_run *run) {
    for (size_t i = run->n; i-- > 0;)
        if (run->roles[i] == ROLE_USER &&
            !starts_and_ends(&run->messages[i], "<tool_response>", "</tool_response>"))
            return i;
    return run->n - 1;
}

static const char *find_text(const char *text, size_t n, const char *part) {
    return n ? memmem(text, n, part, strlen(part)) : NULL;
}

// Text behind the last occurrence of part, or the whole text.
static void keep_behind_last(const char **text, size_t *n, const char *part) {
    for (const char *hit; (hit = find_text(*text, *n, part));) {
        const char *next = hit + strlen(part);
        *n -= (size_t)(next - *text);
        *text = next;
    }
}

static void strip_newlines(const char **text, size_t *n, bool left, bool right) {
    while (left && *n > 0 && **text == '\n') {
        ++*text;
        --*n;
    }
    while (right && *n > 0 && (*text)[*n - 1] == '\n')
        --*n;
}

// Qwen3: reasoning stands before </think>. Behind the last question it is kept, before it dropped.
static int add_thinking_reply(const render_run *run, size_t i) {
    const char *text = run->messages[i].content, *reason = "";
    size_t n = run->messages[i].n_bytes, n_reason = 0;
    const char *end = find_text(text, n, "</think>");
    if (end) {
        reason = text;
        n_reason = (size_t)(end - text);
        strip_newlines(&reason, &n_reason, false, true);
        keep_behind_last(&reason, &n_reason, "<think>");
        strip_newlines(&reason, &n_reason, true, true);
        keep_behind_last(&text, &n, "</think>");
        strip_newlines(&text, &n, true, false);
    }
    if (i <= run->last_question || (i + 1 < run->n && n_reason == 0))
        return add_content(run->list, text, n);
    strip_newlines(&text, &n, true, false);
    int rc = add_literal(run->format, run->list, "<think>\n");
    if (rc == E_OK)
        rc = add_content(run->list, reason, n_reason);
    if (rc == E_OK)
        rc = add_literal(run->format, run->list, "\n</think>\n\n");
    return rc == E_OK ? add_content(run->list, text, n) : rc;
}

static int add_message_content(const render_run *run, size_t i) {
    const chat_row *row = run->format->row;
    const char *text = run->messages[i].content;
    size_t n = run->messages[i].n_bytes;
    if (row->think && run->roles[i] == ROLE_ASSISTANT)
        return add_thinking_reply(run, i);
    if (row->trim == TRIM_ALL || (row->trim == TRIM_ASSISTANT && run->roles[i] == ROLE_ASSISTANT))
        trim(&text, &n);
    return add_content(run->list, text, n);
}

static int add_turn(const render_run *run, size_t i, bool lead) {
    const chat_row *row = run->format->row;
    const chat_turn *turn = turn_of(row, run->roles[i]);
    bool grouped = row->tool_in_user && run->roles[i] == ROLE_TOOL;
    bool bare = row->bare_last_reply && run->roles[i] == ROLE_ASSISTANT && i + 1 == run->n;
    int rc = E_OK;
    if (grouped && (i == 0 || run->roles[i - 1] != ROLE_TOOL))
        rc = add_literal(run->format, run->list, "<|im_start|>user");
    if (rc == E_OK)
        rc = add_literal(run->format, run->list, turn->before);
    bool has_system = lead && ((row->system_place == SYSTEM_IN_FIRST_USER && i == 1) ||
                               (row->system_place == SYSTEM_IN_LAST_USER && i + 1 == run->n &&
                                run->roles[i] == ROLE_USER));
    if (rc == E_OK && has_system)
        rc = add_message_content(run, 0);
    if (rc == E_OK && has_system)
        rc = add_literal(run->format, run->list, "\n\n");
    if (rc == E_OK)
        rc = add_message_content(run, i);
    if (rc == E_OK)
        rc = add_literal(run->format, run->list, bare ? EOS : turn->after);
    if (rc == E_OK && grouped && (i + 1 == run->n || run->roles[i + 1] != ROLE_TOOL))
        rc = add_literal(run->format, run->list, "<|im_end|>\n");
    return rc;
}

static int add_all(const render_run *run, bool generation) {
    const chat_format *format = run->format;
    const chat_row *row = format->row;
    bool lead = run->roles[0] == ROLE_SYSTEM && row->system_place != SYSTEM_IS_A_TURN;
    int rc = format->begin ? add_literal(format, run->list, BOS) : E_OK;
    if (rc == E_OK && *format->system && run->roles[0] != ROLE_SYSTEM) {
        rc = add_literal(format, run->list, row->system.before);
        if (rc == E_OK)
            rc = add_literal(format, run->list, format->system);
        if (rc == E_OK)
            rc = add_literal(format, run->list, row->system.after);
    }
    for (size_t i = lead; i < run->n && rc == E_OK; i++)
        rc = add_turn(run, i, lead);
    if (rc == E_OK && generation)
        rc = add_literal(format, run->list, row->generation);
    if (rc == E_OK && generation && format->open_think)
        rc = add_literal(format, run->list, "<think>\n");
    return rc;
}

static int make_parts(const chat_format *format, const chat_message *messages, size_t n,
                      bool generation, part_list *list, error *err) {
    chat_role *roles = malloc((n + 1) * sizeof *roles);
    int rc = roles ? E_OK : error_set(err, E_NO_MEMORY, "messages: out of memory");
    for (size_t i = 0; i < n && rc == E_OK; i++)
        rc = read_role(&messages[i], i, &roles[i], err);
    if (rc == E_OK)
        rc = check_order(format->row, roles, n, err);
    if (rc == E_OK) {
        render_run run = {format, messages, roles, n, 0, list};
        run.last_question = find_last_question(&run);
        rc = add_all(&run, generation);
        if (rc != E_OK)
            error_set(err, rc, "messages: %s", status_text(rc));
    }
    free(roles);
    return rc;
}

int chat_render(const chat_format *format, const chat_message *messages, size_t n_messages,
                bool add_generation_prompt, char **text, size_t *n, error *err) {
    part_list list = {0};
    text_buf out = {0};
    int rc = make_parts(format, messages, n_messages, add_generation_prompt, &list, err);
    size_t n_out = 1;
    for (size_t i = 0; i < list.n; i++)
        n_out += utf8_repaired_bytes(list.parts[i].text, list.parts[i].n_bytes);
    if (rc == E_OK && text_buf_reserve(&out, n_out) != E_OK)
        rc = error_set(err, E_NO_MEMORY, "messages: out of memory");
    if (rc == E_OK) {
        for (size_t i = 0; i < list.n; i++)
            out.n += utf8_repair(list.parts[i].text, list.parts[i].n_bytes, out.data + out.n);
        out.data[out.n] = '\0';
        *text = out.data;
        *n = out.n;
    }
    free(list.parts);
    return rc;
}

int chat_encode(const chat_format *format, const tokenizer *t, const chat_message *messages,
                size_t n_messages, bool add_generation_prompt, token_ids *out, error *err) {
    part_list list = {0};
    int rc = make_parts(format, messages, n_messages, add_generation_prompt, &list, err);
    if (rc == E_OK)
        rc = tokenizer_encode_parts(t, list.parts, list.n, false, out, err);
    free(list.parts);
    return rc;
}
