// Any body at a route of the API: one whole answer of readable JSON, nothing left behind.
#include "engine/json.h"
#include "router/api.h"
#include "tests/support/fake_bundle.h"
#include "tests/support/http_client.h"

#include <signal.h>

#define MODEL_DIR SOURCE_DIR "/tests/fixtures/tokenizers/qwen2"

// A turn past PATIENT_TURNS sleeps, for a machine that has other things to do.
enum { N_SCRIPT = 24, PATIENT_TURNS = 1000, MAX_TURNS = 100000, HOUR_MS = 3600 * 1000 };

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static uv_loop_t loop;
static struct bundle fake;
static tokenizer *model_tokenizer;
static chat_format *chat;
static api *server;
static int32_t script[N_SCRIPT];

static const char *const paths[] = {"/v1/completions", "/v1/chat/completions", "/tokenize",
                                    "/detokenize"};

static void start(void) {
    error err = {0};
    signal(SIGPIPE, SIG_IGN);
    uv_loop_init(&loop);
    if (tokenizer_open(MODEL_DIR, &model_tokenizer, &err) != E_OK ||
        chat_format_open(MODEL_DIR, "chatml", &chat, &err) != E_OK) {
        fprintf(stderr, "%s\n", err.text);
        abort();
    }
    fake.state = BUNDLE_READY;
    fake.max_model_len = 100;
    fake.model = (model_config){.vocab = tokenizer_vocab_size(model_tokenizer), .n_eos = 1};
    fake.model.eos[0] = tokenizer_token_id(model_tokenizer, "<|im_end|>");
    fake.script = script;
    fake.n_script = N_SCRIPT;
    http_limits limits = http_limits_default();
    limits.header_timeout_ms = limits.body_timeout_ms = limits.write_timeout_ms = HOUR_MS;
    api_args args = {.loop = &loop,
                     .host = "127.0.0.1",
                     .limits = limits,
                     .bundle = &fake,
                     .tokenizer = model_tokenizer,
                     .chat = chat,
                     .model_root = "m"};
    if (api_open(&args, &server, &err) != E_OK)
        abort();
}

// Tokens that depend on the input, so that what is said varies with what is asked.
static void make_script(const uint8_t *data, size_t size) {
    uint32_t hash = 2166136261u;
    for (size_t i = 0; i < size; i++)
        hash = (hash ^ data[i]) * 16777619u;
    for (size_t i = 0; i < N_SCRIPT; i++) {
        hash = hash * 1664525u + 1013904223u;
        script[i] = (int32_t)((hash >> 8) % fake.model.vocab);
    }
}

// json.h refuses \u0000, which is right JSON in an answer; it is read as \ue000 here.
static void check_json(const char *text, size_t n) {
    json *doc = NULL;
    error err = {0};
    char *copy = strndup(text, n);
    for (char *zero = strstr(copy, "\\u0000"); zero; zero = strstr(zero, "\\u0000"))
        zero[2] = 'e';
    if (json_parse("answer", copy, n, &doc, &err) != E_OK) {
        fprintf(stderr, "%s\n%s\n", err.text, text);
        abort();
    }
    json_close(doc);
    free(copy);
}

static void check_answer(const client *c) {
    const char *body = strstr(c->in, "\r\n\r\n");
    if (!body || strncmp(c->in, "HTTP/1.1 ", 9) != 0 || strncmp(c->in + 9, "500", 3) == 0)
        abort();
    const char *chunked = strstr(c->in, "Transfer-Encoding: chunked"); // a body may echo it
    if (chunked && chunked < body) {
        if (!strstr(body, "data: [DONE]\n\n\r\n0\r\n\r\n"))
            abort();
        for (const char *event = strstr(body, "data: {"); event; event = strstr(event, "data: {")) {
            const char *end = strstr(event, "\n\n");
            check_json(event + 6, (size_t)(end - event) - 6);
            event = end;
        }
    } else {
        check_json(body + 4, strlen(body + 4));
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    if (size < 1)
        return 0;
    if (!server)
        start();
    make_script(data, size);
    client *c = client_open(&loop, api_port(server));
    char head[256];
    snprintf(head, sizeof head,
             "POST %s HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: %zu\r\n\r\n",
             paths[data[0] % 4], size - 1);
    client_send(c, head);
    client_send_n(c, (const char *)data + 1, size - 1);
    for (int turn = 0; turn < MAX_TURNS && !c->eof && !c->reset; turn++) {
        uv_run(&loop, UV_RUN_NOWAIT);
        fake_step(&fake);
        client_poll(c);
        if (turn > PATIENT_TURNS)
            usleep(100);
    }
    if (!c->eof)
        abort();
    check_answer(c);
    client_reset(c);
    uv_run(&loop, UV_RUN_NOWAIT);
    if (api_in_flight(server) || fake_n_live(&fake))
        abort();
    fake_reset(&fake);
    return 0;
}
