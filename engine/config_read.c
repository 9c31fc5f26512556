#include "engine/config_read.h"

#include <stdio.h>
#include <string.h>

typedef struct reader {
    const char *name;
    const char *at, *end;
    int line;
    char path[CONFIG_READ_PATH_BYTES]; // of the value being read
    config_read_fn fn;
    void *user;
    error *err;
} reader;

static int fail(reader *r, const char *what) {
    return error_set(r->err, E_INVALID, "%s:%d: %s%s%s", r->name, r->line, r->path,
                     r->path[0] ? ": " : "", what);
}

static int peek(const reader *r, size_t ahead) {
    return (size_t)(r->end - r->at) > ahead ? (unsigned char)r->at[ahead] : -1;
}

static void advance(reader *r) {
    r->line += *r->at == '\n';
    r->at++;
}

static int skip_comment(reader *r) {
    bool block = peek(r, 1) == '*';
    int first_line = r->line;
    r->at += 2;
    while (r->at < r->end) {
        if (!block && *r->at == '\n')
            return E_OK;
        if (block && *r->at == '*' && peek(r, 1) == '/') {
            r->at += 2;
            return E_OK;
        }
        advance(r);
    }
    r->line = first_line;
    return block ? fail(r, "this comment has no end; close it with */") : E_OK;
}

// Whitespace and comments.
static int skip_space(reader *r) {
    while (r->at < r->end) {
        if (*r->at == '/' && (peek(r, 1) == '/' || peek(r, 1) == '*')) {
            int rc = skip_comment(r);
            if (rc != E_OK)
                return rc;
        } else if (strchr(" \t\r\n", *r->at) && *r->at) {
            advance(r);
        } else {
            break;
        }
    }
    return E_OK;
}

// Decodes the string or plain value at the reader's place and moves behind it.
static int read_scalar(reader *r, json **out) {
    const char *start = r->at;
    if (peek(r, 0) == '"') {
        for (r->at++; r->at < r->end && *r->at != '"' && *r->at != '\n'; r->at++)
            r->at += *r->at == '\\' && peek(r, 1) >= 0 && peek(r, 1) != '\n';
        if (peek(r, 0) != '"')
            return fail(r, "this text has no end on its line; close it with \"");
        r->at++;
    } else {
        while (r->at < r->end && !strchr(" \t\r\n,:{}[]\"/", *r->at))
            r->at++;
        if (r->at == start)
            return fail(r, "a value is missing here; write KEY: VALUE");
    }
    error why;
    int rc = json_parse("", start, (size_t)(r->at - start), out, &why);
    if (rc == E_NO_MEMORY)
        return error_set(r->err, rc, "%s: out of memory", r->name);
    if (rc != E_OK) {
        char what[128];
        size_t n = (size_t)(r->at - start);
        snprintf(what, sizeof what, "%.*s is no JSON value; put text in double quotes",
                 (int)(n < 40 ? n : 40), start);
        return fail(r, what);
    }
    return E_OK;
}

// Reads a key and the colon, and appends the key to the path.
static int read_key(reader *r) {
    if (peek(r, 0) != '"')
        return fail(r, peek(r, 0) < 0 ? "the file ends inside { }; add the closing }"
                                      : "a key in double quotes, or }, is expected here");
    json *doc = NULL;
    int rc = read_scalar(r, &doc);
    if (rc != E_OK)
        return rc;
    const char *key = "";
    json_as_string(json_root(doc), &key);
    size_t n = strlen(r->path);
    int needed = snprintf(r->path + n, sizeof r->path - n, "%s%s", n ? "." : "", key);
    json_close(doc);
    if ((size_t)needed >= sizeof r->path - n) {
        r->path[n] = '\0';
        return fail(r, "this key is too long to be one; see `tandem config --help`");
    }
    rc = skip_space(r);
    if (rc != E_OK)
        return rc;
    if (peek(r, 0) != ':')
        return fail(r, "a colon is missing after the key");
    r->at++;
    return skip_space(r);
}

static int read_object(reader *r, int depth);

static int read_value(reader *r, int depth) {
    if (peek(r, 0) == '[')
        return fail(r, "no key takes a list; see `tandem config --help`");
    int line = r->line;
    if (peek(r, 0) == '{') {
        int rc = r->fn(r->user, r->path, line, NULL, r->err);
        return rc != E_OK ? rc : read_object(r, depth + 1);
    }
    json *doc = NULL;
    int rc = read_scalar(r, &doc);
    if (rc == E_OK)
        rc = r->fn(r->user, r->path, line, json_root(doc), r->err);
    json_close(doc);
    return rc;
}

static int read_object(reader *r, int depth) {
    if (depth > CONFIG_READ_MAX_DEPTH)
        return fail(r, "nested too deep; see `tandem config --help`");
    size_t n_path = strlen(r->path);
    r->at++; // the brace
    for (;;) {
        int rc = skip_space(r);
        if (rc != E_OK)
            return rc;
        if (peek(r, 0) == '}')
            break;
        if ((rc = read_key(r)) != E_OK || (rc = read_value(r, depth)) != E_OK ||
            (rc = skip_space(r)) != E_OK)
            return rc;
        r->path[n_path] = '\0';
        if (peek(r, 0) == ',')
            r->at++;
        else if (peek(r, 0) != '}')
            return fail(r, peek(r, 0) < 0 ? "the file ends inside { }; add the closing }"
                                          : "a comma or } is missing before this");
    }
    r->at++;
    return E_OK;
}

int config_read(const char *name, const char *text, size_t n_bytes, config_read_fn fn, void *user,
                error *err) {
    reader r = {.name = name,
                .at = text,
                .end = text + n_bytes,
                .line = 1,
                .fn = fn,
                .user = user,
                .err = err};
    int rc = skip_space(&r);
    if (rc != E_OK)
        return rc;
    if (peek(&r, 0) != '{')
        return fail(&r, "a configuration is one JSON object; begin with {");
    if ((rc = read_object(&r, 1)) != E_OK || (rc = skip_space(&r)) != E_OK)
        return rc;
    return r.at < r.end ? fail(&r, "text after the closing }; remove it") : E_OK;
}
