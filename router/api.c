#include "router/api_internal.h"

#include "engine/log.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

enum { DEFAULT_KEEP_ALIVE_MS = 10000, TIMER_TICKS_PER_KEEP_ALIVE = 4, LAST_WORDS_MS = 300 };

// ---- Errors and answers ----
int api_error_set(api_error *e, int status, const char *code, const char *param, const char *format,
                  ...) {
    va_list args;
    va_start(args, format);
    vsnprintf(e->message, sizeof e->message, format, args);
    va_end(args);
    for (char *p = e->message; *p; p++)
        if ((unsigned char)*p < 0x20 || *p == 0x7f)
            *p = '?'; // it also becomes a log line
    snprintf(e->param, sizeof e->param, "%s", param ? param : "");
    e->code = code;
    e->status = status;
    return status;
}

void api_error_body(const api_error *e, json_writer *out) {
    json_put(out, "{\"error\":{\"message\":");
    json_put_string(out, e->message);
    json_putf(out, ",\"type\":\"%s\",\"param\":",
              e->status >= 500 ? "server_error" : "invalid_request_error");
    if (e->param[0])
        json_put_string(out, e->param);
    else
        json_put(out, "null");
    json_put(out, ",\"code\":");
    if (e->code)
        json_put_string(out, e->code);
    else
        json_put(out, "null");
    json_put(out, "}}");
}

int api_error_from_bundle(api_error *e, int code, const char *text) {
    switch (code) {
    case E_FULL:
        return api_error_set(e, 503, "overloaded", NULL, "%.300s", text);
    case E_STATE:
    case E_CLOSED:
        return api_error_set(e, 503, "unavailable", NULL, "%.300s", text);
    case E_TOO_LARGE:
        return api_error_set(e, 400, "context_length_exceeded", NULL, "%.300s", text);
    case E_INVALID:
    case E_UNSUPPORTED:
        return api_error_set(e, 400, NULL, NULL, "%.300s", text);
    }
    return api_error_set(e, 500, NULL, NULL, "%.300s", text);
}

void api_respond(api *a, http_request *request, int status, const char *headers,
                 const json_writer *body) {
    a->responses[status / 100]++;
    http_respond(request, status, "application/json", headers, body->text, body->n);
}

void api_respond_error(api *a, http_request *request, const api_error *e) {
    json_writer body = {0};
    api_error_body(e, &body);
    const char *headers = e->status == 503   ? "Retry-After: 1\r\n"
                          : e->status == 401 ? "WWW-Authenticate: Bearer\r\n"
                                             : NULL;
    api_respond(a, request, e->status, headers, &body);
    json_writer_free(&body);
}

int api_check_ready(const api *a, api_error *e) {
    if (a->draining)
        return api_error_set(e, 503, "draining", NULL, "this server is shutting down");
    switch (bundle_state_get(a->bundle)) {
    case BUNDLE_STARTING:
        return api_error_set(e, 503, "loading", NULL, "the model is still being loaded");
    case BUNDLE_DRAINING:
        return api_error_set(e, 503, "draining", NULL, "this server is shutting down");
    case BUNDLE_FAILED:
        return api_error_set(e, 503, "failed", NULL, "the bundle has failed; see the server's log");
    case BUNDLE_READY:
        break;
    }
    return 0;
}

void api_make_id(const char *prefix, char out[API_ID_BYTES]) {
    uint64_t random[2] = {0};
    uv_random(NULL, NULL, random, sizeof random, 0, NULL);
    snprintf(out, API_ID_BYTES, "%s%016" PRIx64 "%016" PRIx64, prefix, random[0], random[1]);
}

// ---- Generations ----
static void post_generation(api *a, http_request *request, const json_value *body, bool chat) {
    api_error e;
    api_params params = {.chat = chat};
    api_prompts prompts = {0};
    int rc = api_check_model(a, body, &e);
    if (rc == 0)
        rc = api_parse_params(a, body, &params, &e);
    if (rc == 0)
        rc = chat ? api_chat_prompts(a, body, &prompts, &e)
                  : api_completion_prompts(a, body, &params, &prompts, &e);
    size_t longest = 0;
    bool empty = false;
    for (size_t i = 0; i < prompts.n; i++) {
        size_t n = prompts.list[i].ids.n;
        empty |= n == 0;
        longest = n > longest ? n : longest;
    }
    if (rc == 0)
        rc = api_limit_tokens(a, &params, empty ? 0 : longest, &e);
    if (rc == 0)
        api_job_start(a, request, &params, &prompts);
    else
        api_respond_error(a, request, &e);
    api_prompts_free(&prompts);
    api_params_free(&params);
}

static void post_completions(api *a, http_request *request, const json_value *body) {
    post_generation(a, request, body, false);
}

static void post_chat(api *a, http_request *request, const json_value *body) {
    post_generation(a, request, body, true);
}

// ---- Routes ----
typedef struct route {
    const char *path;
    void (*get)(api *a, http_request *request);
    void (*post)(api *a, http_request *request, const json_value *body);
    bool open;      // asks for no key
    bool generates; // refused until the bundle is ready
} route;

static const route routes[] = {
    {"/v1/models", api_get_models, NULL, false, false},
    {"/v1/completions", NULL, post_completions, false, true},
    {"/v1/chat/completions", NULL, post_chat, false, true},
    {"/tokenize", NULL, api_post_tokenize, false, false},
    {"/detokenize", NULL, api_post_detokenize, false, false},
    {"/health", api_get_health, NULL, true, false},
    {"/ready", api_get_ready, NULL, true, false},
    {"/version", api_get_version, NULL, true, false},
    {"/metrics", api_get_metrics, NULL, true, false},
};

#define MODEL_PREFIX "/v1/models/"
static const route model_route = {MODEL_PREFIX, NULL, NULL, false, false};

static const route *find_route(const char *path) {
    for (size_t i = 0; i < sizeof routes / sizeof routes[0]; i++)
        if (strcmp(routes[i].path, path) == 0)
            return &routes[i];
    if (strncmp(path, MODEL_PREFIX, sizeof MODEL_PREFIX - 1) == 0)
        return &model_route;
    return NULL;
}

// The time does not depend on where the two differ.
static bool same_key(const char *given, const char *key) {
    size_t n_given = strlen(given), n_key = strlen(key);
    size_t difference = n_given ^ n_key;
    for (size_t i = 0; i < n_given; i++)
        difference |= (size_t)((unsigned char)given[i] ^ (unsigned char)key[i % n_key]);
    return difference == 0;
}

static bool is_authorized(const api *a, const http_request *request) {
    if (!a->key)
        return true;
    const char *header = http_request_header(request, "authorization");
    if (!header || strncasecmp(header, "Bearer ", 7) != 0)
        return false;
    return same_key(header + 7 + strspn(header + 7, " "), a->key);
}

static void post(api *a, http_request *request, const route *to) {
    api_error e;
    if (to->generates && api_check_ready(a, &e) != 0) {
        api_respond_error(a, request, &e);
        return;
    }
    size_t n;
    const char *text = http_request_body(request, &n);
    json *doc = NULL;
    error err = {0};
    int rc = json_parse("request body", text, n, &doc, &err);
    if (rc == E_OK && json_is_object(json_root(doc))) {
        to->post(a, request, json_root(doc));
    } else {
        api_error_set(&e, rc == E_NO_MEMORY ? 500 : 400, NULL, NULL, "%.300s",
                      rc == E_OK ? "request body: must be a JSON object" : err.text);
        api_respond_error(a, request, &e);
    }
    json_close(doc);
}

static void respond_method(api *a, http_request *request, const route *to) {
    const char *allow = to->post ? "Allow: POST, OPTIONS\r\n" : "Allow: GET, HEAD, OPTIONS\r\n";
    json_writer body = {0};
    int status = 204;
    if (strcmp(http_request_method(request), "OPTIONS") != 0) {
        api_error e;
        status =
            api_error_set(&e, 405, NULL, NULL, "%s takes %s", to->path, to->post ? "POST" : "GET");
        api_error_body(&e, &body);
    }
    api_respond(a, request, status, allow, &body);
    json_writer_free(&body);
}

static void on_request(void *user, http_request *request) {
    api *a = user;
    api_error e;
    const char *path = http_request_path(request), *method = http_request_method(request);
    const route *to = find_route(path);
    bool is_get = strcmp(method, "GET") == 0 || strcmp(method, "HEAD") == 0;
    if (!to) {
        api_error_set(&e, 404, "not_found", NULL, "no such route: %.*s", API_ECHO_BYTES, path);
        api_respond_error(a, request, &e);
    } else if (!to->open && !is_authorized(a, request)) {
        api_error_set(&e, 401, "invalid_api_key", NULL,
                      "the API key is missing or wrong; send it as 'Authorization: Bearer KEY'");
        api_respond_error(a, request, &e);
    } else if (is_get && to == &model_route) {
        api_get_model(a, request, path + sizeof MODEL_PREFIX - 1);
    } else if (is_get && to->get) {
        to->get(a, request);
    } else if (strcmp(method, "POST") == 0 && to->post) {
        post(a, request, to);
    } else {
        respond_method(a, request, to);
    }
}

// ---- Life ----
static void on_timer(uv_timer_t *timer) {
    api *a = timer->data;
    uint64_t now = uv_now(a->loop);
    for (api_job *job = a->jobs; job; job = job->next)
        api_job_keep_alive(job, now);
}

void api_jobs_changed(api *a) {
    bool active = uv_is_active((uv_handle_t *)&a->timer);
    uint64_t period = a->keep_alive_ms / TIMER_TICKS_PER_KEEP_ALIVE + 1;
    if (a->n_jobs && !active)
        uv_timer_start(&a->timer, on_timer, period, period);
    else if (a->n_jobs == 0 && active)
        uv_timer_stop(&a->timer);
}

static void free_api(api *a) {
    json_writer_free(&a->scratch);
    token_ids_free(&a->chat_stops);
    free(a->name);
    free(a->root);
    free(a->key);
    free(a);
}

static char *last_part(const char *path) {
    size_t end = strlen(path);
    while (end && path[end - 1] == '/')
        end--;
    size_t begin = end;
    while (begin && path[begin - 1] != '/')
        begin--;
    return end > begin ? strndup(path + begin, end - begin) : strdup("model");
}

static size_t longest_token(const tokenizer *t) {
    size_t longest = 1;
    for (size_t id = 0; id < tokenizer_vocab_size(t); id++) {
        const char *bytes;
        size_t n;
        if (tokenizer_token_bytes(t, (int32_t)id, &bytes, &n) == E_OK && n > longest)
            longest = n;
    }
    return longest;
}

static bool has_text(const char *text) {
    return text && *text;
}

int api_open(const api_args *args, api **out, error *err) {
    api *a = calloc(1, sizeof *a);
    if (!a)
        return error_set(err, E_NO_MEMORY, "api: out of memory");
    a->loop = args->loop;
    a->bundle = args->bundle;
    a->tokenizer = args->tokenizer;
    a->chat = args->chat;
    a->created = time(NULL);
    a->keep_alive_ms = args->keep_alive_ms ? args->keep_alive_ms : DEFAULT_KEEP_ALIVE_MS;
    a->max_token_bytes = longest_token(args->tokenizer);
    a->root = strdup(args->model_root);
    a->name = has_text(args->served_model_name) ? strdup(args->served_model_name)
                                                : last_part(args->model_root);
    a->key = has_text(args->api_key) ? strdup(args->api_key) : NULL;
    snprintf(a->fingerprint, sizeof a->fingerprint, "fp_%016" PRIx64,
             model_config_hash(bundle_model(args->bundle)));
    int rc = E_OK;
    if (!a->root || !a->name || (has_text(args->api_key) && !a->key))
        rc = error_set(err, E_NO_MEMORY, "api: out of memory");
    if (rc == E_OK && a->chat && chat_stop_ids(a->chat, a->tokenizer, &a->chat_stops) != E_OK)
        rc = error_set(err, E_NO_MEMORY, "api: out of memory");
    http_server_args http = {args->loop, args->host, args->port, args->limits, on_request, a};
    if (rc == E_OK)
        rc = http_server_open(&http, &a->http, err);
    if (rc != E_OK) {
        free_api(a);
        return rc;
    }
    uv_timer_init(a->loop, &a->timer);
    uv_timer_init(a->loop, &a->close_timer);
    a->timer.data = a->close_timer.data = a;
    a->n_timers = 2;
    *out = a;
    return E_OK;
}

int api_port(const api *a) {
    return http_server_port(a->http);
}

void api_drain(api *a) {
    a->draining = true;
}

size_t api_in_flight(const api *a) {
    return a->n_jobs;
}

static void on_timer_closed(uv_handle_t *handle) {
    api *a = handle->data;
    void (*on_closed)(void *) = a->on_closed;
    void *user = a->closed_user;
    if (--a->n_timers)
        return;
    free_api(a);
    if (on_closed)
        on_closed(user);
}

// Every job ends with its connection, so none is left here.
static void on_http_closed(void *user) {
    api *a = user;
    uv_close((uv_handle_t *)&a->timer, on_timer_closed);
    uv_close((uv_handle_t *)&a->close_timer, on_timer_closed);
}

static void on_grace_over(uv_timer_t *timer) {
    api *a = timer->data;
    while (a->jobs)
        api_job_stop(a->jobs);
}

void api_close(api *a, uint32_t grace_ms, void (*on_closed)(void *user), void *user) {
    if (!a)
        return;
    a->draining = true;
    a->on_closed = on_closed;
    a->closed_user = user;
    uv_timer_start(&a->close_timer, on_grace_over, grace_ms, 0);
    http_server_close(a->http, grace_ms + LAST_WORDS_MS, on_http_closed, a);
}
