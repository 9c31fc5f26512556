// api_fixture.h: the API over a fake bundle and a small real tokenizer, and a client that asks it.
//
// Every JSON answer is parsed before a test sees it, so each test also checks the writing of JSON.
// Include it in one file of a program, after cmocka.h.
#ifndef TANDEM_TESTS_SUPPORT_API_FIXTURE_H
#define TANDEM_TESTS_SUPPORT_API_FIXTURE_H

#include "engine/json.h"
#include "router/api.h"
#include "router/http_chunked.h"
#include "router/json_writer.h"
#include "tests/support/fake_bundle.h"
#include "tests/support/http_client.h"

#define MODEL_DIR SOURCE_DIR "/tests/fixtures/tokenizers/qwen2"

enum { API_CONTEXT = 200 };

typedef struct api_fixture {
    uv_loop_t loop;
    bundle *bundle;
    tokenizer *tokenizer;
    chat_format *chat;
    api *api;
    bool closed;
    int32_t eos;
    token_ids script;
} api_fixture;

static api_fixture *fx;

static void fixture_on_closed(void *user) {
    ((api_fixture *)user)->closed = true;
}

static void fixture_open_api(const char *key, uint32_t keep_alive_ms) {
    error err = {0};
    fx->closed = false;
    api_args args = {.loop = &fx->loop,
                     .host = "127.0.0.1",
                     .limits = http_limits_default(),
                     .bundle = fx->bundle,
                     .tokenizer = fx->tokenizer,
                     .chat = fx->chat,
                     .model_root = "/models/org/tiny-moe/",
                     .api_key = key,
                     .keep_alive_ms = keep_alive_ms};
    if (api_open(&args, &fx->api, &err) != E_OK)
        fail_msg("%s", err.text);
}

static void fixture_close_api(void) {
    if (!fx->closed)
        api_close(fx->api, 0, fixture_on_closed, fx);
    for (int i = 0; i < 20000 && !fx->closed; i++)
        client_turn(&fx->loop);
    assert_true(fx->closed);
    assert_int_equal(fake_n_live(fx->bundle), 0); // nothing outlives its client
}

static int fixture_setup(void **state) {
    (void)state;
    error err = {0};
    fx = calloc(1, sizeof *fx);
    uv_loop_init(&fx->loop);
    if (tokenizer_open(MODEL_DIR, &fx->tokenizer, &err) != E_OK ||
        chat_format_open(MODEL_DIR, "chatml", &fx->chat, &err) != E_OK)
        fail_msg("%s", err.text);
    fx->eos = tokenizer_token_id(fx->tokenizer, "<|im_end|>");
    fx->bundle = calloc(1, sizeof *fx->bundle);
    fx->bundle->state = BUNDLE_READY;
    fx->bundle->max_model_len = API_CONTEXT;
    fx->bundle->model = (model_config){.vocab = tokenizer_vocab_size(fx->tokenizer),
                                       .n_eos = 1,
                                       .eos = {fx->eos},
                                       .temperature = 0.6f,
                                       .top_p = 0.9f,
                                       .repetition_penalty = -1,
                                       .top_k_sampling = 20};
    fake_run_on(fx->bundle, &fx->loop);
    fixture_open_api(NULL, 0);
    return 0;
}

static int fixture_teardown(void **state) {
    (void)state;
    fixture_close_api();
    fake_run_off(fx->bundle);
    uv_run(&fx->loop, UV_RUN_NOWAIT);
    assert_int_equal(uv_loop_close(&fx->loop), 0);
    fake_reset(fx->bundle);
    token_ids_free(&fx->script);
    chat_format_close(fx->chat);
    tokenizer_close(fx->tokenizer);
    free(fx->bundle);
    free(fx);
    return 0;
}

// What the model will say: the tokens of text, then its end token.
static inline void script_text(const char *text) {
    fx->script.n = 0;
    assert_int_equal(
        tokenizer_encode(fx->tokenizer, text, strlen(text), false, false, &fx->script, NULL), E_OK);
    token_ids_push(&fx->script, fx->eos);
    fx->bundle->script = fx->script.ids;
    fx->bundle->n_script = fx->script.n;
}

static inline void script_ids(const int32_t *ids, size_t n) {
    fx->script.n = 0;
    for (size_t i = 0; i < n; i++)
        token_ids_push(&fx->script, ids[i]);
    fx->bundle->script = fx->script.ids;
    fx->bundle->n_script = n;
}

static inline const fake_request *submitted(size_t i) {
    assert_true(i < fx->bundle->n_requests);
    return &fx->bundle->requests[i];
}

typedef struct reply {
    int status;
    char *head, *body; // body without chunk framing
    json *doc;         // of a JSON body, else NULL
} reply;

static inline void reply_free(reply *r) {
    json_close(r->doc);
    free(r->head);
    free(r->body);
}

static inline client *begin(const char *method, const char *path, const char *headers,
                            const char *body) {
    client *c = client_open(&fx->loop, api_port(fx->api));
    char head[1024];
    snprintf(head, sizeof head,
             "%s %s HTTP/1.1\r\nHost: x\r\nConnection: close\r\n%s"
             "Content-Length: %zu\r\n\r\n",
             method, path, headers, strlen(body));
    assert_true(client_send(c, head));
    assert_true(client_send(c, body));
    return c;
}

static inline char *dechunk(const char *data, size_t n) {
    char *out = calloc(1, n + 1);
    size_t n_out = 0;
    http_chunked decoder = {0};
    for (int rc = E_AGAIN; rc == E_AGAIN && n;) {
        size_t used, n_body;
        const char *run = NULL;
        rc = http_chunked_next(&decoder, data, n, &used, &run, &n_body);
        assert_int_not_equal(rc, E_INVALID);
        if (n_body)
            memcpy(out + n_out, run, n_body);
        n_out += n_body;
        data += used;
        n -= used;
    }
    return out;
}

// Waits for the end of the answer and takes the connection down.
static inline reply finish(client *c) {
    reply r = {0};
    assert_true(client_wait_eof(c));
    char *split = strstr(c->in, "\r\n\r\n");
    assert_non_null(split);
    r.head = strndup(c->in, (size_t)(split - c->in) + 2);
    size_t n = c->n_in - (size_t)(split + 4 - c->in);
    r.status = atoi(r.head + 9);
    r.body = strstr(r.head, "Transfer-Encoding: chunked") ? dechunk(split + 4, n)
                                                          : strndup(split + 4, n);
    if (strstr(r.head, "application/json") && *r.body) {
        error err = {0};
        if (json_parse("answer", r.body, strlen(r.body), &r.doc, &err) != E_OK)
            fail_msg("%s in %s", err.text, r.body);
    }
    client_close(c);
    return r;
}

static inline reply ask(const char *method, const char *path, const char *body) {
    return finish(begin(method, path, "", body));
}

// Follows a path such as "choices.0.message.content".
static inline const json_value *at(const json_value *value, const char *path) {
    char copy[256], *save = NULL;
    snprintf(copy, sizeof copy, "%s", path);
    for (char *part = strtok_r(copy, ".", &save); part; part = strtok_r(NULL, ".", &save)) {
        if (part[0] >= '0' && part[0] <= '9') {
            value = json_first(value);
            for (int i = atoi(part); i > 0; i--)
                value = json_next(value);
        } else {
            value = json_get(value, part);
        }
    }
    return value;
}

static inline const char *text_at(const json_value *value, const char *path) {
    const char *text = NULL;
    json_as_string(at(value, path), &text);
    return text ? text : "(none)";
}

static inline int64_t int_at(const json_value *value, const char *path) {
    int64_t number = -12345;
    json_as_int(at(value, path), &number);
    return number;
}

static inline double double_at(const json_value *value, const char *path) {
    double number = -12345;
    json_as_double(at(value, path), &number);
    return number;
}

// Checks all four keys of an error.
static inline void check_error(const reply *r, int status, const char *param, const char *code) {
    const json_value *e = at(json_root(r->doc), "error");
    if (r->status != status)
        print_error("status %d: %s\n", r->status, r->body);
    assert_int_equal(r->status, status);
    assert_int_equal(json_count(e), 4);
    assert_true(strlen(text_at(e, "message")) > 3 && strlen(text_at(e, "message")) < 500);
    assert_string_equal(text_at(e, "type"),
                        status >= 500 ? "server_error" : "invalid_request_error");
    if (param)
        assert_string_equal(text_at(e, "param"), param);
    else
        assert_true(json_is_null(json_get(e, "param")));
    if (code)
        assert_string_equal(text_at(e, "code"), code);
    else
        assert_true(json_is_null(json_get(e, "code")));
}

static inline void refused(const char *path, const char *body, int status, const char *param,
                           const char *code) {
    reply r = ask("POST", path, body);
    if (r.status != status)
        print_error("asked: %.300s\n", body);
    check_error(&r, status, param, code);
    reply_free(&r);
}

// ---- Streams ----
enum { MAX_EVENTS = 256 };

typedef struct events {
    size_t n;
    json *docs[MAX_EVENTS];
    bool done; // [DONE] was the last
    char id[64];
    int status;
} events;

static inline events read_events(reply *r) {
    events out = {.status = r->status};
    assert_non_null(strstr(r->head, "Content-Type: text/event-stream"));
    assert_null(strchr(r->body, '\r'));
    char *at_event = r->body;
    while (*at_event) {
        char *end = strstr(at_event, "\n\n");
        assert_non_null(end);
        *end = '\0';
        if (at_event[0] != ':') {
            assert_false(out.done);
            assert_memory_equal(at_event, "data: ", 6);
            out.done = strcmp(at_event + 6, "[DONE]") == 0;
            error err = {0};
            if (!out.done && json_parse("event", at_event + 6, strlen(at_event + 6),
                                        &out.docs[out.n++], &err) != E_OK)
                fail_msg("%s in %s", err.text, at_event);
            const char *id = out.done ? NULL : text_at(json_root(out.docs[out.n - 1]), "id");
            if (id && id[0] == 'c') {
                if (out.n > 1)
                    assert_string_equal(id, out.id);
                snprintf(out.id, sizeof out.id, "%s", id);
            }
        }
        at_event = end + 2;
    }
    reply_free(r);
    return out;
}

static inline events ask_stream(const char *path, const char *body) {
    reply r = ask("POST", path, body);
    if (r.status != 200)
        fail_msg("%d %s", r.status, r.body);
    return read_events(&r);
}

static inline void events_free(events *e) {
    for (size_t i = 0; i < e->n; i++)
        json_close(e->docs[i]);
}

// The texts of one choice, joined; finish (may be NULL) gets its finish_reason.
static inline char *join_choice(const events *e, int64_t index, const char **reason) {
    json_writer text = {0};
    if (reason)
        *reason = NULL;
    for (size_t i = 0; i < e->n; i++) {
        const json_value *choice = at(json_root(e->docs[i]), "choices.0");
        const char *piece, *why;
        if (!choice || int_at(choice, "index") != index)
            continue;
        if (json_as_string(at(choice, "text"), &piece) ||
            json_as_string(at(choice, "delta.content"), &piece))
            json_put(&text, piece);
        if (reason && json_as_string(at(choice, "finish_reason"), &why)) {
            assert_null(*reason); // a choice ends once
            *reason = why;
        }
    }
    json_put(&text, "");
    return text.text ? text.text : calloc(1, 1);
}

#define API_TEST(name) cmocka_unit_test_setup_teardown(name, fixture_setup, fixture_teardown)

#endif
