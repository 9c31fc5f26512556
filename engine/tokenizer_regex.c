// Expressions of tokenizer.json, written for Oniguruma (Ruby syntax), run by PCRE2 with JIT.
//
// Where the two differ in meaning the expression is rewritten; where no rewriting is known it is
// refused:
//   \s \S   Oniguruma means White_Space; PCRE2 would also match U+180E
//   \w      Alphabetic, marks, decimal digits, connectors and the numbers of Latin-1; PCRE2's
//   differs \p{Han} and other scripts: PCRE2 would also take characters shared between scripts
//   \uHHHH  is \x{HHHH}
//   {n,m}+  is a repeated group; in PCRE2 it would be possessive
//   [a[b]], [a&&b], [[:punct:]], \h \R \X \K \G, (?m  mean other things or nothing in PCRE2
#define PCRE2_CODE_UNIT_WIDTH 8
#include "engine/tokenizer_internal.h"

#include <pcre2.h>

#include <stdlib.h>
#include <string.h>

#define REGEX_BYTES_MAX 65536
#define WORD "\\p{Alphabetic}\\p{M}\\p{Nd}\\p{Pc}\\xB2\\xB3\\xB9\\xBC-\\xBE"

struct regex {
    pcre2_code *code;             // owned
    pcre2_match_context *context; // owned
    bool jit;
};

typedef struct rewriter {
    const char *where, *in;
    size_t at; // next byte of in
    bool in_class;
    text_buf out;
    error *err;
} rewriter;

static int refuse(const rewriter *rw, const char *what) {
    return error_set(rw->err, E_UNSUPPORTED, "%s: %s in the expression '%.120s' is not supported",
                     rw->where, what, rw->in);
}

static int put(rewriter *rw, const char *text) {
    return text_buf_add(&rw->out, text, strlen(text));
}

static int put_bytes(rewriter *rw, size_t n) {
    int rc = text_buf_add(&rw->out, rw->in + rw->at, n);
    rw->at += n;
    return rc;
}

// \p{L} and the like mean the same; names of scripts get PCRE2's sc:.
static int rewrite_property(rewriter *rw) {
    static const char *const scripts[] = {"Han",   "Hiragana", "Katakana", "Hangul", "Latin",
                                          "Greek", "Cyrillic", "Arabic",   "Hebrew", "Thai"};
    const char *p = rw->in + rw->at;
    if (p[2] != '{')
        return put_bytes(rw, 2);
    size_t from = p[3] == '^' ? 4 : 3, n = strcspn(p + from, "}");
    for (size_t i = 0; i < sizeof scripts / sizeof *scripts; i++) {
        if (strlen(scripts[i]) != n || strncmp(p + from, scripts[i], n) != 0)
            continue;
        int rc = put_bytes(rw, from);
        if (rc == E_OK)
            rc = put(rw, "sc:");
        return rc == E_OK ? put_bytes(rw, n + 1) : rc;
    }
    if (n > 2 && strncmp(p + from, "Alphabetic}", 11) != 0)
        return refuse(rw, "a property of a long name");
    return put_bytes(rw, 3);
}

static int rewrite_escape(rewriter *rw) {
    char c = rw->in[rw->at + 1];
    switch (c) {
    case '\0':
        return refuse(rw, "a backslash at the end");
    case 's':
        rw->at += 2;
        return put(rw, "\\p{White_Space}");
    case 'S':
        rw->at += 2;
        return put(rw, "\\P{White_Space}");
    case 'w':
        rw->at += 2;
        return put(rw, rw->in_class ? WORD : "[" WORD "]");
    case 'p':
    case 'P':
        return rewrite_property(rw);
    case 'u': {
        if (strspn(rw->in + rw->at + 2, "0123456789abcdefABCDEF") < 4)
            return refuse(rw, "\\u without four digits");
        char hex[10] = "\\x{....}";
        memcpy(hex + 3, rw->in + rw->at + 2, 4);
        rw->at += 6;
        return put(rw, hex);
    }
    }
    bool alphanumeric = (c >= '0' && c <= '9') || ((c | 32) >= 'a' && (c | 32) <= 'z');
    if (alphanumeric && !strchr("0123456789dDnrtfaexbBAzZ", c)) {
        char what[] = "\\?";
        what[1] = c;
        return refuse(rw, what);
    }
    return put_bytes(rw, 2);
}

// At a '{': copies an interval such as {1,3}, and turns {1,m}+ into +.
static int rewrite_brace(rewriter *rw) {
    const char *p = rw->in + rw->at;
    size_t n = 1 + strspn(p + 1, "0123456789,");
    if (p[n] != '}' || n == 1)
        return put_bytes(rw, 1);
    if (p[n + 1] != '+')
        return put_bytes(rw, n + 1);
    if (strncmp(p, "{1,", 3) != 0)
        return refuse(rw, "a '+' behind an interval that does not start at 1");
    rw->at += n + 2;
    return put(rw, "+");
}

static int rewrite_class_start(rewriter *rw) {
    const char *p = rw->in + rw->at;
    if (!rw->in_class) {
        rw->in_class = true;
        size_t n = p[1] == '^' ? 2 : 1;
        return put_bytes(rw, p[n] == ']' ? n + 1 : n); // a ']' in first place is itself
    }
    return refuse(rw, "a class inside a class");
}

static int rewrite_one(rewriter *rw) {
    const char *p = rw->in + rw->at;
    if (*p == '\\')
        return rewrite_escape(rw);
    if (*p == '[')
        return rewrite_class_start(rw);
    if (rw->in_class) {
        if (p[0] == '&' && p[1] == '&')
            return refuse(rw, "&& in a class");
        rw->in_class = *p != ']';
        return put_bytes(rw, 1);
    }
    if (*p == '{')
        return rewrite_brace(rw);
    if (p[0] == '(' && p[1] == '?') {
        size_t n = strspn(p + 2, "imx-");
        if (memchr(p + 2, 'm', n) || memchr(p + 2, 'x', n))
            return refuse(rw, "the option m or x");
    }
    return put_bytes(rw, 1);
}

static int compile(const char *where, const char *pattern, const char *text, size_t n,
                   uint32_t options, regex *re, error *err) {
    int code;
    size_t offset;
    re->code = pcre2_compile((PCRE2_SPTR)text, n, options, &code, &offset, NULL);
    if (!re->code) {
        char why[120];
        pcre2_get_error_message(code, (PCRE2_UCHAR *)why, sizeof why);
        return error_set(err, E_INVALID, "%s: the expression '%.120s' does not compile: %s", where,
                         pattern, why);
    }
    re->context = pcre2_match_context_create(NULL);
    if (!re->context)
        return error_set(err, E_NO_MEMORY, "%s: out of memory", where);
    re->jit = pcre2_jit_compile(re->code, PCRE2_JIT_COMPLETE) == 0;
    return E_OK;
}

int regex_compile(const char *where, const char *pattern, bool literal, regex **out, error *err) {
    if (strlen(pattern) > REGEX_BYTES_MAX)
        return error_set(err, E_TOO_LARGE, "%s: an expression of more than %d bytes", where,
                         REGEX_BYTES_MAX);
    rewriter rw = {.where = where, .in = pattern, .err = err};
    int rc = E_OK;
    uint32_t options = PCRE2_UTF | PCRE2_UCP | PCRE2_MULTILINE | PCRE2_NEVER_BACKSLASH_C;
    regex *re = calloc(1, sizeof *re);
    if (!re)
        return error_set(err, E_NO_MEMORY, "%s: out of memory", where);
    if (literal) {
        options = PCRE2_UTF | PCRE2_LITERAL;
        rc = put(&rw, pattern);
    }
    while (!literal && rc == E_OK && pattern[rw.at])
        rc = rewrite_one(&rw);
    if (rc == E_NO_MEMORY)
        error_set(err, rc, "%s: out of memory", where);
    if (rc == E_OK)
        rc = compile(where, pattern, rw.out.n ? rw.out.data : "", rw.out.n, options, re, err);
    text_buf_free(&rw.out);
    if (rc != E_OK) {
        regex_free(re);
        return rc;
    }
    *out = re;
    return E_OK;
}

void regex_free(regex *re) {
    if (!re)
        return;
    pcre2_match_context_free(re->context);
    pcre2_code_free(re->code);
    free(re);
}

int regex_find(const regex *re, encode_scratch *scratch, const char *text, size_t n, size_t from,
               text_span *match) {
    if (!scratch->match_data)
        scratch->match_data = pcre2_match_data_create(1, NULL); // only the whole match is wanted
    pcre2_match_data *data = scratch->match_data;
    if (!data)
        return E_NO_MEMORY;
    PCRE2_SPTR subject = (PCRE2_SPTR)text;
    int rc = re->jit ? pcre2_jit_match(re->code, subject, n, from, 0, data, re->context)
                     : PCRE2_ERROR_JIT_STACKLIMIT;
    if (rc == PCRE2_ERROR_JIT_STACKLIMIT) // the interpreter keeps its stack on the heap
        rc = pcre2_match(re->code, subject, n, from, PCRE2_NO_UTF_CHECK | PCRE2_NO_JIT, data,
                         re->context);
    if (rc == PCRE2_ERROR_NOMATCH)
        return E_NOT_FOUND;
    if (rc < 0)
        return rc == PCRE2_ERROR_NOMEMORY ? E_NO_MEMORY : E_TOO_LARGE;
    const size_t *ends = pcre2_get_ovector_pointer(data);
    if (ends[1] < ends[0]) // \K is refused, but an assertion may still do this
        return E_TOO_LARGE;
    *match = (text_span){ends[0], ends[1]};
    return E_OK;
}
