#include "router/http_head.h"

#include "engine/status.h"

#include <llhttp.h>

#include <ctype.h>
#include <string.h>
#include <strings.h>

int http_head_scan(const char *text, size_t n, size_t *position) {
    for (size_t i = *position; i < n; i++) {
        unsigned char c = (unsigned char)text[i];
        unsigned char before = i ? (unsigned char)text[i - 1] : '\n';
        bool line_start = before == '\n';
        if ((c == '\n') != (before == '\r'))
            return E_INVALID; // a bare LF, or a CR with something else after it
        if (c == 0x7f || (c < 0x20 && c != '\t' && c != '\r' && c != '\n'))
            return E_INVALID;
        if (line_start && (c == ' ' || c == '\t'))
            return E_INVALID; // obs-fold, or a request line that begins with a blank
        if (c == '\n' && i >= 3 && text[i - 2] == '\n') {
            *position = i + 1;
            return E_OK;
        }
    }
    *position = n;
    return E_AGAIN;
}

// ---- llhttp callbacks: they note spans, nothing else ----
typedef struct head_spans {
    const char *url;
    size_t url_bytes;
    struct {
        const char *name, *value;
        size_t name_bytes, value_bytes;
    } headers[HTTP_MAX_HEADERS];
    size_t n_headers;
    bool too_many, done, keep_alive;
    int major, minor, method;
} head_spans;

// A span may come in pieces; pieces that do not touch would be a folded value.
static int extend(const char **start, size_t *n, const char *at, size_t n_more) {
    if (!*start)
        *start = at;
    if (at != *start + *n)
        return HPE_USER;
    *n += n_more;
    return 0;
}

static int note_url(llhttp_t *parser, const char *at, size_t n) {
    head_spans *spans = parser->data;
    return extend(&spans->url, &spans->url_bytes, at, n);
}

static int note_field(llhttp_t *parser, const char *at, size_t n) {
    head_spans *spans = parser->data;
    size_t i = spans->n_headers;
    spans->too_many |= i == HTTP_MAX_HEADERS;
    if (spans->too_many)
        return HPE_USER;
    return extend(&spans->headers[i].name, &spans->headers[i].name_bytes, at, n);
}

static int note_value(llhttp_t *parser, const char *at, size_t n) {
    head_spans *spans = parser->data;
    size_t i = spans->n_headers;
    if (i == HTTP_MAX_HEADERS)
        return HPE_USER;
    return extend(&spans->headers[i].value, &spans->headers[i].value_bytes, at, n);
}

static int note_value_complete(llhttp_t *parser) {
    head_spans *spans = parser->data;
    spans->n_headers++;
    return 0;
}

static int note_headers_complete(llhttp_t *parser) {
    head_spans *spans = parser->data;
    spans->done = true;
    spans->keep_alive = llhttp_should_keep_alive(parser);
    spans->major = parser->http_major;
    spans->minor = parser->http_minor;
    spans->method = parser->method;
    return HPE_PAUSED; // the body's framing is not llhttp's business here
}

static llhttp_errno_t run_parser(const char *text, size_t n, head_spans *spans) {
    llhttp_settings_t settings;
    llhttp_settings_init(&settings);
    settings.on_url = note_url;
    settings.on_header_field = note_field;
    settings.on_header_value = note_value;
    settings.on_header_value_complete = note_value_complete;
    settings.on_headers_complete = note_headers_complete;
    llhttp_t parser;
    llhttp_init(&parser, HTTP_REQUEST, &settings);
    parser.data = spans;
    return llhttp_execute(&parser, text, n);
}

// ---- What the headers mean ----
static int hex_digit(char c) {
    if (c >= '0' && c <= '9')
        return c - '0';
    if ((c | 0x20) >= 'a' && (c | 0x20) <= 'f')
        return (c | 0x20) - 'a' + 10;
    return -1;
}

// Decodes %XX in place; a NUL or a broken escape is refused.
static bool percent_decode(char *text) {
    char *out = text;
    for (const char *p = text; *p; p++) {
        if (*p != '%') {
            *out++ = *p;
            continue;
        }
        int high = hex_digit(p[1]);
        int low = high < 0 ? -1 : hex_digit(p[2]);
        if (low < 0 || high * 16 + low == 0)
            return false;
        *out++ = (char)(high * 16 + low);
        p += 2;
    }
    *out = '\0';
    return true;
}

static int split_target(char *target, http_head *out, const char **why) {
    static char empty[] = "";
    if (strncasecmp(target, "http://", 7) == 0 || strncasecmp(target, "https://", 8) == 0) {
        char *slash = strchr(strstr(target, "//") + 2, '/');
        target = slash ? slash : empty;
    }
    char *query = strchr(target, '?');
    out->query = empty;
    if (query) {
        *query = '\0';
        out->query = query + 1;
    }
    out->path = target;
    if (!percent_decode(target)) {
        *why = "the path has a broken percent escape";
        return 400;
    }
    return 0;
}

static bool parse_length(const char *text, uint64_t *out) {
    uint64_t value = 0;
    size_t n = strlen(text);
    if (n == 0 || n > 18 || strspn(text, "0123456789") != n)
        return false;
    for (const char *p = text; *p; p++)
        value = value * 10 + (uint64_t)(*p - '0');
    *out = value;
    return true;
}

static int check_headers(http_head *out, const char **why) {
    size_t n_host = 0, n_length = 0, n_coding = 0;
    for (size_t i = 0; i < out->n_headers; i++) {
        const char *name = out->headers[i].name, *value = out->headers[i].value;
        if (strcasecmp(name, "host") == 0) {
            n_host++;
        } else if (strcasecmp(name, "content-length") == 0) {
            n_length++;
            if (!parse_length(value, &out->content_length)) {
                *why = "Content-Length is not a number";
                return 400;
            }
        } else if (strcasecmp(name, "transfer-encoding") == 0) {
            n_coding++;
            out->chunked = true;
            if (strcasecmp(value, "chunked") != 0) {
                *why = "the only Transfer-Encoding here is chunked";
                return 501;
            }
        } else if (strcasecmp(name, "expect") == 0) {
            if (strcasecmp(value, "100-continue") != 0) {
                *why = "the only Expect here is 100-continue";
                return 417;
            }
            out->expect_continue = out->http_1_1;
        }
    }
    *why = n_host > 1 || (n_host == 0 && out->http_1_1) ? "exactly one Host header is needed"
           : n_length > 1                               ? "more than one Content-Length"
           : n_coding > 1                               ? "more than one Transfer-Encoding"
           : n_coding && n_length       ? "both Content-Length and Transfer-Encoding"
           : n_coding && !out->http_1_1 ? "Transfer-Encoding needs HTTP/1.1"
                                        : NULL;
    return *why ? 400 : 0;
}

static bool is_token(const char *text, size_t n) {
    for (size_t i = 0; i < n; i++)
        if (!isalnum((unsigned char)text[i]) && !(text[i] && strchr("!#$%&'*+-.^_`|~", text[i])))
            return false;
    return n > 0;
}

// Cuts the spans into strings. The byte after a name is its colon (or a blank that llhttp refused)
// and the byte after a value its CR, so the terminators overwrite nothing that is still needed.
static bool cut_headers(char *text, const head_spans *spans, http_head *out) {
    static char empty[] = "";
    for (size_t i = 0; i < spans->n_headers; i++) {
        if (!is_token(spans->headers[i].name, spans->headers[i].name_bytes))
            return false;
        char *name = text + (spans->headers[i].name - text);
        size_t n = spans->headers[i].value_bytes;
        char *value = n ? text + (spans->headers[i].value - text) : empty;
        while (n && (value[n - 1] == ' ' || value[n - 1] == '\t'))
            n--;
        name[spans->headers[i].name_bytes] = '\0';
        if (value != empty)
            value[n] = '\0';
        out->headers[i] = (http_header){name, value};
    }
    out->n_headers = spans->n_headers;
    return true;
}

int http_head_parse(char *text, size_t n, http_head *out, const char **why) {
    head_spans spans = {0};
    llhttp_errno_t rc = run_parser(text, n, &spans);
    if (spans.too_many) {
        *why = "too many headers";
        return 431;
    }
    if (rc == HPE_INVALID_VERSION) {
        *why = "the HTTP version is not 1.0 or 1.1";
        return 505;
    }
    if (!spans.done || !spans.url || spans.url_bytes == 0) {
        *why = rc == HPE_INVALID_METHOD ? "unknown method" : "not a valid HTTP request";
        return 400;
    }
    if (spans.major != 1 || spans.minor > 1) {
        *why = "the HTTP version is not 1.0 or 1.1";
        return 505;
    }
    memset(out, 0, sizeof *out);
    out->method = llhttp_method_name((llhttp_method_t)spans.method);
    out->http_1_1 = spans.minor == 1;
    out->keep_alive = spans.keep_alive;
    char *target = text + (spans.url - text);
    target[spans.url_bytes] = '\0';
    if (!cut_headers(text, &spans, out)) {
        *why = "not a valid HTTP request";
        return 400;
    }
    int status = split_target(target, out, why);
    return status ? status : check_headers(out, why);
}

const char *http_head_find(const http_head *head, const char *name) {
    for (size_t i = 0; i < head->n_headers; i++)
        if (strcasecmp(head->headers[i].name, name) == 0)
            return head->headers[i].value;
    return NULL;
}
