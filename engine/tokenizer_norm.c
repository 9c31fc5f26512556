// Normalizers: the four Unicode forms, Prepend, Replace, and sequences of these.
#include "engine/tokenizer_internal.h"
#include "engine/utf8.h"

#include <utf8proc.h>

#include <stdlib.h>
#include <string.h>

static int add_step(tokenizer *t, norm_kind kind, int form, const char *pattern,
                    const char *content) {
    norm_step *step = &t->norms[t->n_norms];
    *step = (norm_step){.kind = kind, .form = form};
    step->pattern = pattern ? strdup(pattern) : NULL;
    step->content = content ? strdup(content) : NULL;
    t->n_norms++;
    return (pattern && !step->pattern) || (content && !step->content) ? E_NO_MEMORY : E_OK;
}

static int load_replace(tokenizer *t, const json *doc, const json_value *node, error *err) {
    const json_value *pattern_node;
    const char *pattern, *content;
    int rc = json_need_object(doc, node, "pattern", &pattern_node, err);
    if (rc == E_OK)
        rc = json_need_string(doc, node, "content", &content, err);
    if (rc != E_OK)
        return rc;
    if (!json_as_string(json_get(pattern_node, "String"), &pattern) || !*pattern)
        return error_set(err, E_UNSUPPORTED,
                         "%s: normalizer: Replace is supported for a String pattern only", t->name);
    return add_step(t, NORM_REPLACE, 0, pattern, content);
}

static int load_step(tokenizer *t, const json *doc, const json_value *node, int depth, error *err) {
    static const struct {
        const char *type;
        int form;
    } forms[] = {
        {"NFC", UTF8PROC_STABLE | UTF8PROC_COMPOSE},
        {"NFD", UTF8PROC_STABLE | UTF8PROC_DECOMPOSE},
        {"NFKC", UTF8PROC_STABLE | UTF8PROC_COMPOSE | UTF8PROC_COMPAT},
        {"NFKD", UTF8PROC_STABLE | UTF8PROC_DECOMPOSE | UTF8PROC_COMPAT},
    };
    const char *type = "", *text;
    int rc = json_need_string(doc, node, "type", &type, err);
    if (rc != E_OK)
        return error_prefix(err, "normalizer");
    if (strcmp(type, "Sequence") == 0 && depth < 4) {
        const json_value *list;
        rc = json_need_array(doc, node, "normalizers", &list, err);
        for (const json_value *child = rc == E_OK ? json_first(list) : NULL; child && rc == E_OK;
             child = json_next(child))
            rc = load_step(t, doc, child, depth + 1, err);
        return rc;
    }
    if (t->n_norms == TOKENIZER_STEPS_MAX)
        return error_set(err, E_TOO_LARGE, "%s: normalizer: more than %d steps", t->name,
                         TOKENIZER_STEPS_MAX);
    for (size_t i = 0; i < sizeof forms / sizeof *forms; i++)
        if (strcmp(type, forms[i].type) == 0)
            return add_step(t, NORM_FORM, forms[i].form, NULL, NULL);
    if (strcmp(type, "Prepend") == 0) {
        rc = json_need_string(doc, node, "prepend", &text, err);
        return rc == E_OK ? add_step(t, NORM_PREPEND, 0, NULL, text) : rc;
    }
    if (strcmp(type, "Replace") == 0)
        return load_replace(t, doc, node, err);
    return error_set(err, E_UNSUPPORTED, "%s: normalizer: type '%.60s' is not supported", t->name,
                     type);
}

int norm_load(tokenizer *t, const json *doc, error *err) {
    const json_value *node = json_get(json_root(doc), "normalizer");
    if (json_is_null(node))
        return E_OK;
    int rc = load_step(t, doc, node, 0, err);
    return rc == E_NO_MEMORY ? error_set(err, rc, "%s: out of memory", t->name) : rc;
}

void norm_free(tokenizer *t) {
    for (size_t i = 0; i < t->n_norms; i++) {
        free(t->norms[i].pattern);
        free(t->norms[i].content);
    }
}

// The library's Unicode tables end with version 9. What later versions decompose, compose or give a
// combining class is therefore left alone; these ranges hold all of it up to version 16 (and
// harmless others).
static bool is_newer(uint32_t c) {
    static const struct {
        uint32_t first, last;
    } ranges[] = {
        {0x7FD, 0x7FD},     {0x897, 0x8D3},     {0x9FE, 0x9FE},     {0xC3C, 0xC3C},
        {0xD3B, 0xD3C},     {0xEBA, 0xEBA},     {0x1715, 0x1715},   {0x1ABF, 0x1AFF},
        {0x1DF6, 0x1DFA},   {0x32FF, 0x32FF},   {0xA7F1, 0xA7F4},   {0xA82C, 0xA82C},
        {0xAB69, 0xAB69},   {0x105C9, 0x105E4}, {0x10781, 0x107BA}, {0x10D24, 0x10F85},
        {0x11070, 0x11070}, {0x1133B, 0x1133B}, {0x11382, 0x113E2}, {0x1145E, 0x1145E},
        {0x11839, 0x11A99}, {0x11D42, 0x11F42}, {0x16121, 0x1612F}, {0x16D63, 0x16D6A},
        {0x16FF0, 0x16FF1}, {0x1CCD6, 0x1CCF9}, {0x1E030, 0x1E5EF}, {0x1F16C, 0x1F16C},
        {0x1FBF0, 0x1FBF9},
    };
    size_t low = 0, high = sizeof ranges / sizeof *ranges;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (c > ranges[middle].last)
            low = middle + 1;
        else
            high = middle;
    }
    return low < sizeof ranges / sizeof *ranges && c >= ranges[low].first;
}

// Stands for newer characters while a text is normalized: a starter that nothing composes with.
// Every stand-in and every real U+E000 keeps its place among the others.
#define STAND_IN 0xE000

typedef struct code_points {
    utf8proc_int32_t *points; // (capacity) owned; NULL while empty
    size_t n, capacity;
} code_points;

// Room for n_more; the bytes behind may be written.
static int reserve_points(code_points *list, size_t n_more) {
    if (n_more <= list->capacity - list->n)
        return E_OK;
    size_t capacity = list->capacity ? list->capacity : 256;
    while (capacity < list->n + n_more)
        capacity *= 2;
    utf8proc_int32_t *points = realloc(list->points, capacity * sizeof *points);
    if (!points)
        return E_NO_MEMORY;
    list->points = points;
    list->capacity = capacity;
    return E_OK;
}

typedef struct form_run {
    int form;
    code_points text;
    code_points replaced; // what the stand-ins stand for, in order
    code_points sorted;   // scratch of order_marks
    text_buf *out;
} form_run;

static int combining_class(utf8proc_int32_t c) {
    return utf8proc_get_property(c)->combining_class & 0xFF;
}

// Stable sort of a run of combining marks by class. utf8proc's own ordering exchanges neighbours,
// which takes quadratic time on a long hostile run.
static int order_marks(form_run *run, utf8proc_int32_t *marks, size_t n) {
    size_t starts[257] = {0};
    int rc = reserve_points(&run->sorted, n);
    if (rc != E_OK)
        return rc;
    utf8proc_int32_t *copy = run->sorted.points;
    memcpy(copy, marks, n * sizeof *copy);
    for (size_t i = 0; i < n; i++)
        starts[combining_class(copy[i]) + 1]++;
    for (int c = 0; c < 256; c++)
        starts[c + 1] += starts[c];
    for (size_t i = 0; i < n; i++)
        marks[starts[combining_class(copy[i])]++] = copy[i];
    return E_OK;
}

static int order_canonically(form_run *run) {
    utf8proc_int32_t *points = run->text.points;
    int rc = E_OK;
    for (size_t i = 0; i < run->text.n && rc == E_OK; i++) {
        size_t end = i;
        while (end < run->text.n && combining_class(points[end]) != 0)
            end++;
        if (end - i > 1)
            rc = order_marks(run, points + i, end - i);
        i = end > i ? end - 1 : i;
    }
    return rc;
}

static int decompose(form_run *run, const char *text, size_t n) {
    int last_class = UTF8PROC_BOUNDCLASS_START, rc = E_OK;
    run->text.n = run->replaced.n = 0;
    for (size_t i = 0, length; i < n && rc == E_OK; i += length) {
        uint32_t c = 0;
        utf8_next(text + i, n - i, &length, &c); // valid: the text was repaired
        rc = reserve_points(&run->text, 32);     // the longest decomposition has 18
        if (rc == E_OK && (c == STAND_IN || is_newer(c))) {
            rc = reserve_points(&run->replaced, 1);
            if (rc == E_OK) {
                run->replaced.points[run->replaced.n++] = (utf8proc_int32_t)c;
                run->text.points[run->text.n++] = STAND_IN;
            }
        } else if (rc == E_OK) {
            utf8proc_ssize_t n_put = utf8proc_decompose_char(
                (utf8proc_int32_t)c, run->text.points + run->text.n, 32,
                (utf8proc_option_t)(run->form | UTF8PROC_DECOMPOSE), &last_class);
            if (n_put < 0 || n_put > 32)
                return E_INVALID;
            run->text.n += (size_t)n_put;
        }
    }
    return rc;
}

static int add_segment(form_run *run, const char *text, size_t n) {
    int rc = decompose(run, text, n);
    if (rc == E_OK)
        rc = order_canonically(run);
    if (rc == E_OK && (run->form & UTF8PROC_COMPOSE)) {
        utf8proc_ssize_t left = utf8proc_normalize_utf32(
            run->text.points, (utf8proc_ssize_t)run->text.n, (utf8proc_option_t)run->form);
        rc = left < 0 ? E_INVALID : E_OK;
        run->text.n = left < 0 ? 0 : (size_t)left;
    }
    if (rc == E_OK)
        rc = text_buf_reserve(run->out, 4 * run->text.n);
    for (size_t i = 0, k = 0; rc == E_OK && i < run->text.n; i++) {
        utf8proc_int32_t c = run->text.points[i];
        if (c == STAND_IN)
            c = run->replaced.points[k++];
        run->out->n += utf8_put((uint32_t)c, run->out->data + run->out->n);
    }
    return rc;
}

// Below U+0300 nothing composes with what stands before it, and NFC leaves each character alone;
// below U+0080 the other forms do so too. So only segments are normalized that hold a character
// above the limit: from the last ASCII character before it to the next one behind.
static int add_normal_form(text_buf *out, const char *text, size_t n, int form) {
    form_run run = {.form = form, .out = out};
    bool nfc = (form & UTF8PROC_COMPOSE) && !(form & UTF8PROC_COMPAT);
    const uint8_t limit = nfc ? 0xCC : 0x80, *bytes = (const uint8_t *)text;
    int rc = E_OK;
    for (size_t from = 0, start, end; from < n && rc == E_OK; from = end) {
        for (end = from; end < n && bytes[end] < limit; end++)
            ;
        start = end;
        if (end < n) {
            while (start > from && bytes[start - 1] >= 0x80)
                start--;
            start -= start > from;
            while (end < n && bytes[end] >= 0x80)
                end++;
        }
        rc = text_buf_add(out, text + from, start - from);
        if (rc == E_OK && end > start)
            rc = add_segment(&run, text + start, end - start);
    }
    free(run.text.points);
    free(run.replaced.points);
    free(run.sorted.points);
    return rc;
}

int norm_run(const tokenizer *t, encode_scratch *scratch, const char *text, size_t n, bool first) {
    text_buf *out = &scratch->normalized, *tmp = &scratch->norm_tmp;
    out->n = 0;
    int rc = text_buf_add(out, text, n);
    for (size_t i = 0; i < t->n_norms && rc == E_OK; i++) {
        const norm_step *step = &t->norms[i];
        tmp->n = 0;
        switch (step->kind) {
        case NORM_FORM:
            rc = add_normal_form(tmp, out->data, out->n, step->form);
            break;
        case NORM_PREPEND:
            if (first && out->n > 0)
                rc = text_buf_add(tmp, step->content, strlen(step->content));
            if (rc == E_OK)
                rc = text_buf_add(tmp, out->data, out->n);
            break;
        case NORM_REPLACE:
            rc = text_buf_add_replaced(tmp, out->data, out->n, step->pattern, step->content);
            break;
        }
        text_buf swap = *out;
        *out = *tmp;
        *tmp = swap;
    }
    return rc;
}
