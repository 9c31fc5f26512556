#include "router/serve.h"

#include "engine/log.h"
#include "engine/weights.h"
#include "router/api.h"
#include "router/bundle.h"
#include "router/check.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>

// Time for the last bytes of answers to reach their clients after the last token.
enum { ANSWER_GRACE_MS = 2000 };

typedef struct server {
    const config *config;
    plan plan;
    tokenizer *tokenizer;
    chat_format *chat;
    uv_loop_t loop;
    bundle *bundle;
    api *api;
    uv_signal_t interrupt, terminate;
    uv_timer_t drain;
    uint64_t started_ms;
    enum { SERVING, DRAINING, CLOSING_API, CLOSING_BUNDLE } phase;
    bool forced; // without waiting for anybody
    int exit_status;
} server;

// ---- the end: drain, then the API, then the bundle, then the loop's last handles ----

static void on_bundle_closed(void *user) {
    server *s = user;
    s->bundle = NULL;
    uv_close((uv_handle_t *)&s->interrupt, NULL);
    uv_close((uv_handle_t *)&s->terminate, NULL);
    uv_close((uv_handle_t *)&s->drain, NULL);
}

static void on_api_closed(void *user) {
    server *s = user;
    s->phase = CLOSING_BUNDLE;
    bundle_close(s->bundle, s->forced, on_bundle_closed, s);
}

static void close_all(server *s) {
    uv_timer_stop(&s->drain);
    s->phase = CLOSING_API;
    api_close(s->api, s->forced ? 0 : ANSWER_GRACE_MS, on_api_closed, s);
}

static void on_drained(void *user) {
    server *s = user;
    if (s->phase != DRAINING)
        return;
    log_info("drained");
    close_all(s);
}

static void on_drain_timeout(uv_timer_t *timer) {
    server *s = timer->data;
    log_warn("router.drain_timeout_s is over; what still runs is ended");
    s->forced = true;
    close_all(s);
}

static void end_now(server *s) {
    if (s->forced)
        return;
    log_warn("a second signal: ending at once");
    s->forced = true;
    if (s->phase == DRAINING)
        close_all(s);
    else if (s->phase == CLOSING_BUNDLE && s->bundle)
        bundle_close(s->bundle, true, on_bundle_closed, s);
}

static void on_signal(uv_signal_t *handle, int number) {
    server *s = handle->data;
    if (s->phase != SERVING) {
        end_now(s);
        return;
    }
    s->phase = DRAINING;
    log_info("%s: no new requests; %zu in flight", number == SIGINT ? "SIGINT" : "SIGTERM",
             api_in_flight(s->api));
    api_drain(s->api);
    uv_timer_start(&s->drain, on_drain_timeout,
                   (uint64_t)(s->config->router.drain_timeout_s * 1000), 0);
    bundle_drain(s->bundle, on_drained, s);
}

// ---- the bundle's state ----

static void on_ready(void *user) {
    server *s = user;
    const char *host = s->config->router.host;
    bool ipv6 = strchr(host, ':');
    log_info("ready after %.1f s; %zu attention, %zu FFN workers, %s; context %zu tokens",
             (double)(uv_now(&s->loop) - s->started_ms) / 1e3, s->plan.n_attention,
             s->config->mode == CONFIG_MODE_COLOCATED ? 0 : s->plan.n_ffn,
             dtype_name(s->plan.compute), s->plan.max_tokens);
    printf("tandem: ready at http://%s%s%s:%d\n", ipv6 ? "[" : "", host, ipv6 ? "]" : "",
           api_port(s->api));
    fflush(stdout);
}

static void on_failed(void *user, const char *reason) {
    server *s = user;
    log_error("%s", reason);
    s->exit_status = 1;
    if (s->phase == SERVING || s->phase == DRAINING)
        close_all(s);
}

// ---- open ----

static int check_weights(const server *s, error *err) {
    weights *files;
    int code = weights_open(s->config->model, &files, err);
    if (code)
        return code;
    code = weights_check_model(files, &s->plan.model, err);
    weights_close(files);
    return code;
}

static int open_model(server *s, error *err) {
    const config *c = s->config;
    int code = plan_make(c, &s->plan, err);
    if (!code)
        code = check_weights(s, err);
    if (!code)
        code = check_text(c, &s->plan, &s->tokenizer, &s->chat, err);
    return code;
}

static void open_handles(server *s) {
    uv_signal_init(&s->loop, &s->interrupt);
    uv_signal_init(&s->loop, &s->terminate);
    uv_timer_init(&s->loop, &s->drain);
    s->interrupt.data = s->terminate.data = s->drain.data = s;
    uv_signal_start(&s->interrupt, on_signal, SIGINT);
    uv_signal_start(&s->terminate, on_signal, SIGTERM);
    s->started_ms = uv_now(&s->loop);
}

static int open_api(server *s, error *err) {
    const config *c = s->config;
    api_args args = {.loop = &s->loop,
                     .host = c->router.host,
                     .port = (int)c->router.port,
                     .limits = http_limits_default(),
                     .bundle = s->bundle,
                     .tokenizer = s->tokenizer,
                     .chat = s->chat,
                     .model_root = c->model,
                     .served_model_name = c->served_model_name,
                     .api_key = c->router.api_key};
    args.limits.max_body_bytes = (size_t)c->router.max_body_bytes;
    args.limits.max_connections = (size_t)c->router.max_connections;
    return api_open(&args, &s->api, err);
}

static int open_bundle(server *s, error *err) {
    bundle_args args = {&s->loop, s->config, &s->plan, s, on_ready, on_failed};
    int code = bundle_open(&args, &s->bundle, err);
    if (code)
        return code;
    open_handles(s);
    code = open_api(s, err);
    if (code) {
        s->phase = CLOSING_BUNDLE;
        bundle_close(s->bundle, true, on_bundle_closed, s);
    }
    return code;
}

int serve_main(const config *c) {
    server *s = calloc(1, sizeof *s);
    error err;
    if (!s) {
        log_error("out of memory");
        return 1;
    }
    log_set_name("router");
    log_set_level(c->log.level);
    signal(SIGPIPE, SIG_IGN);
    s->config = c;
    uv_loop_init(&s->loop);
    if (open_model(s, &err)) {
        fprintf(stderr, "%s\n", err.text);
        s->exit_status = 2;
    } else if (open_bundle(s, &err)) {
        log_error("%s", err.text);
        s->exit_status = 1;
    }
    uv_run(&s->loop, UV_RUN_DEFAULT);
    uv_loop_close(&s->loop);
    chat_format_close(s->chat);
    tokenizer_close(s->tokenizer);
    int status = s->exit_status;
    free(s);
    return status;
}
