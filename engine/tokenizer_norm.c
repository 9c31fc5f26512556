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

// Below U+0300 nothing composes with what stands before it, and NFC leaves each character alone;
// below U+0080 the other forms do so too.
static bool is_stable(const char *text, size_t n, int form) {
    bool nfc = (form & UTF8PROC_COMPOSE) && !(form & UTF8PROC_COMPAT);
    uint8_t limit = nfc ? 0xCC : 0x80;
    for (size_t i = 0; i < n; i++)
        if ((uint8_t)text[i] >= limit)
            return false;
    return true;
}

// Stable sort of a run of combining marks by class. utf8proc's own ordering exchanges neighbours,
// which takes quadratic time on a long hostile run.
static void order_marks(utf8proc_int32_t *marks, utf8proc_int32_t *copy, size_t n) {
    size_t starts[257] = {0};
    memcpy(copy, marks, n * sizeof *copy);
    for (size_t i = 0; i < n; i++)
        starts[utf8proc_get_property(copy[i])->combining_class % 256 + 1]++;
    for (int c = 0; c < 256; c++)
        starts[c + 1] += starts[c];
    for (size_t i = 0; i < n; i++)
        marks[starts[utf8proc_get_property(copy[i])->combining_class % 256]++] = copy[i];
}

static void order_canonically(utf8proc_int32_t *points, utf8proc_int32_t *copy, size_t n) {
    for (size_t i = 0; i < n; i++) {
        size_t end = i;
        while (end < n && utf8proc_get_property(points[end])->combining_class != 0)
            end++;
        if (end - i > 1)
            order_marks(points + i, copy, end - i);
        if (end > i)
            i = end - 1;
    }
}

// Decomposes to code points; *out (for free) has room for twice as many as it holds.
static int decompose(const char *text, size_t n, int form, utf8proc_int32_t **out, size_t *n_out) {
    size_t capacity = n + 64, used = 0;
    utf8proc_int32_t *points = malloc(2 * capacity * sizeof *points);
    int last_class = UTF8PROC_BOUNDCLASS_START;
    for (size_t i = 0, length; points && i < n; i += length) {
        uint32_t c;
        if (utf8_next(text + i, n - i, &length, &c) != UTF8_VALID)
            break;                  // cannot be: the text was repaired
        if (capacity - used < 32) { // the longest decomposition has 18 code points
            capacity *= 2;
            utf8proc_int32_t *bigger = realloc(points, 2 * capacity * sizeof *points);
            if (!bigger)
                free(points);
            points = bigger;
            if (!points)
                break;
        }
        utf8proc_ssize_t rc =
            utf8proc_decompose_char((utf8proc_int32_t)c, points + used, 32,
                                    (utf8proc_option_t)(form | UTF8PROC_DECOMPOSE), &last_class);
        if (rc < 0 || rc > 32) {
            free(points);
            return E_INVALID;
        }
        used += (size_t)rc;
    }
    if (!points)
        return E_NO_MEMORY;
    *out = points;
    *n_out = used;
    return E_OK;
}

static int add_normal_form(text_buf *out, const char *text, size_t n, int form) {
    if (is_stable(text, n, form))
        return text_buf_add(out, text, n);
    utf8proc_int32_t *points = NULL;
    size_t n_points = 0;
    int rc = decompose(text, n, form, &points, &n_points);
    if (rc != E_OK)
        return rc;
    order_canonically(points, points + n_points, n_points);
    if (form & UTF8PROC_COMPOSE) {
        utf8proc_ssize_t left =
            utf8proc_normalize_utf32(points, (utf8proc_ssize_t)n_points, (utf8proc_option_t)form);
        rc = left < 0 ? E_INVALID : E_OK;
        n_points = left < 0 ? 0 : (size_t)left;
    }
    if (rc == E_OK)
        rc = text_buf_reserve(out, 4 * n_points);
    for (size_t i = 0; rc == E_OK && i < n_points; i++)
        out->n += utf8_put((uint32_t)points[i], out->data + out->n);
    free(points);
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
