#include "router/chat_client.h"

#include "engine/json.h"
#include "router/json_writer.h"

#include <llhttp.h>

#include <errno.h>
#include <netdb.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

enum { MAX_LINE_BYTES = 1 << 20, MAX_HOST_BYTES = 256 };

typedef struct answer {
    llhttp_t parser;
    json_writer line; // of an event stream, or the whole body of an error
    FILE *out;
    bool streams, done, ended;
    int rc; // of the first failure
    error *err;
} answer;

static int split_url(const char *url, char host[MAX_HOST_BYTES], char port[8], error *err) {
    const char *at = strncmp(url, "http://", 7) == 0 ? url + 7 : NULL;
    size_t n = at ? strcspn(at, "/") : 0;
    const char *colon = at ? memrchr(at, ':', n) : NULL;
    if (!colon || (at[0] == '[' && colon[-1] != ']'))
        colon = at ? at + n : NULL;
    size_t n_port = colon && colon < at + n ? (size_t)(at + n - colon) - 1 : 0;
    size_t n_host = colon ? (size_t)(colon - at) : 0;
    if (n_host > 2 && at[0] == '[') { // an IPv6 address
        at++;
        n_host -= 2;
    }
    if (!n_host || n_host >= MAX_HOST_BYTES || n_port > 5)
        return error_set(err, E_INVALID, "%.200s: not an address; write http://HOST:PORT", url);
    snprintf(host, MAX_HOST_BYTES, "%.*s", (int)n_host, at);
    snprintf(port, 8, "%.*s", n_port ? (int)n_port : 2, n_port ? colon + 1 : "80");
    return E_OK;
}

static int connect_to(const chat_client_args *args, int *out, error *err) {
    char host[MAX_HOST_BYTES], port[8];
    int rc = split_url(args->url, host, port, err);
    if (rc != E_OK)
        return rc;
    struct addrinfo hints = {.ai_socktype = SOCK_STREAM}, *list = NULL;
    rc = getaddrinfo(host, port, &hints, &list);
    if (rc != 0)
        return error_set(err, E_NOT_FOUND, "%s: %s", host, gai_strerror(rc));
    int fd = -1, failure = 0;
    for (const struct addrinfo *a = list; a && fd < 0; a = a->ai_next) {
        fd = socket(a->ai_family, a->ai_socktype | SOCK_CLOEXEC, a->ai_protocol);
        if (fd >= 0 && connect(fd, a->ai_addr, a->ai_addrlen) != 0) {
            failure = errno;
            close(fd);
            fd = -1;
        }
    }
    freeaddrinfo(list);
    if (fd < 0)
        return error_set(err, E_IO, "%.200s: %s; is `tandem serve` running there?", args->url,
                         strerror(failure));
    *out = fd;
    return E_OK;
}

static int send_all(int fd, const char *bytes, size_t n, error *err) {
    while (n > 0) {
        ssize_t sent = send(fd, bytes, n, MSG_NOSIGNAL);
        if (sent < 0 && errno == EINTR)
            continue;
        if (sent < 0)
            return error_set(err, E_IO, "sending the question: %s", strerror(errno));
        bytes += sent;
        n -= (size_t)sent;
    }
    return E_OK;
}

static int send_question(const chat_client_args *args, int fd, error *err) {
    json_writer body = {0}, head = {0};
    json_put(&body, "{\"stream\":true,\"messages\":[{\"role\":\"user\",\"content\":");
    json_put_string(&body, args->question);
    json_put(&body, "}]}");
    json_putf(&head,
              "POST /v1/chat/completions HTTP/1.1\r\nHost: tandem\r\nConnection: close\r\n"
              "Content-Type: application/json\r\nContent-Length: %zu\r\n",
              body.n);
    if (args->api_key)
        json_putf(&head, "Authorization: Bearer %s\r\n", args->api_key);
    json_put(&head, "\r\n");
    json_put_n(&head, body.text, body.n);
    int rc = body.failed || head.failed ? error_set(err, E_NO_MEMORY, "out of memory")
                                        : send_all(fd, head.text, head.n, err);
    json_writer_free(&body);
    json_writer_free(&head);
    return rc;
}

// The message of {"error": {"message": ...}}, or NULL.
static const char *message_of(const json_value *root) {
    const char *message = NULL;
    json_as_string(json_get(json_get(root, "error"), "message"), &message);
    return message;
}

static int take_event(answer *a, const char *text, size_t n) {
    json *doc = NULL;
    if (n == 6 && memcmp(text, "[DONE]", 6) == 0) {
        a->done = true;
        return E_OK;
    }
    int rc = json_parse("event", text, n, &doc, a->err);
    if (rc != E_OK)
        return rc;
    const char *content = "";
    if (message_of(json_root(doc)))
        rc = error_set(a->err, E_STATE, "%s", message_of(json_root(doc)));
    const json_value *choice = json_first(json_get(json_root(doc), "choices"));
    if (json_as_string(json_get(json_get(choice, "delta"), "content"), &content)) {
        fputs(content, a->out);
        fflush(a->out);
    }
    json_close(doc);
    return rc;
}

static int on_headers(llhttp_t *parser) {
    answer *a = parser->data;
    a->streams = parser->status_code == 200;
    return 0;
}

static int on_body(llhttp_t *parser, const char *bytes, size_t n) {
    answer *a = parser->data;
    for (size_t i = 0; i < n && a->rc == E_OK; i++) {
        if (!a->streams || bytes[i] != '\n') {
            if (a->line.n < MAX_LINE_BYTES)
                json_put_n(&a->line, bytes + i, 1);
            continue;
        }
        if (a->line.n > 6 && memcmp(a->line.text, "data: ", 6) == 0)
            a->rc = take_event(a, a->line.text + 6, a->line.n - 6);
        json_writer_clear(&a->line);
    }
    return a->rc == E_OK ? 0 : -1;
}

static int on_complete(llhttp_t *parser) {
    answer *a = parser->data;
    a->ended = true;
    return 0;
}

// Reads until the answer is complete; what it says of a failure becomes the error.
static int receive(answer *a, int fd, error *err) {
    char bytes[16384];
    while (!a->ended) {
        ssize_t n = recv(fd, bytes, sizeof bytes, 0);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            return error_set(err, E_IO, "reading the answer: %s", strerror(errno));
        llhttp_errno_t code =
            n ? llhttp_execute(&a->parser, bytes, (size_t)n) : llhttp_finish(&a->parser);
        if (a->rc != E_OK)
            return a->rc;
        if (code != HPE_OK)
            return error_set(err, E_PROTOCOL, "the answer is not HTTP: %s",
                             llhttp_get_error_reason(&a->parser));
        if (n == 0)
            break;
    }
    if (a->streams)
        return a->done ? E_OK : error_set(err, E_CLOSED, "the answer broke off");
    json *doc = NULL;
    int status = a->parser.status_code;
    if (a->line.n && json_parse("", a->line.text, a->line.n, &doc, NULL) == E_OK &&
        message_of(json_root(doc)))
        error_set(err, E_STATE, "status %d: %s", status, message_of(json_root(doc)));
    else
        error_set(err, E_STATE, "status %d", status);
    json_close(doc);
    return E_STATE;
}

int chat_client_ask(const chat_client_args *args, error *err) {
    int fd = -1;
    int rc = connect_to(args, &fd, err);
    if (rc != E_OK)
        return rc;
    llhttp_settings_t settings;
    answer a = {.out = args->out, .err = err};
    rc = send_question(args, fd, err);
    if (rc != E_OK)
        goto close_socket;
    llhttp_settings_init(&settings);
    settings.on_headers_complete = on_headers;
    settings.on_body = on_body;
    settings.on_message_complete = on_complete;
    llhttp_init(&a.parser, HTTP_RESPONSE, &settings);
    a.parser.data = &a;
    rc = receive(&a, fd, err);
    if (rc == E_OK)
        fputc('\n', args->out);
close_socket:
    json_writer_free(&a.line);
    close(fd);
    return rc;
}
