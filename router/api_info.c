#include "router/api_internal.h"

#include <stdio.h>
#include <string.h>

static void put_model(const api *a, json_writer *out) {
    json_put(out, "{\"id\":");
    json_put_string(out, a->name);
    json_putf(out, ",\"object\":\"model\",\"created\":%lld,\"owned_by\":\"tandem\",\"root\":",
              (long long)a->created);
    json_put_string(out, a->root);
    json_putf(out, ",\"parent\":null,\"max_model_len\":%zu}", bundle_max_model_len(a->bundle));
}

static void respond_and_free(api *a, http_request *request, json_writer *body) {
    api_respond(a, request, 200, NULL, body);
    json_writer_free(body);
}

void api_get_models(api *a, http_request *request) {
    json_writer body = {0};
    json_put(&body, "{\"object\":\"list\",\"data\":[");
    put_model(a, &body);
    json_put(&body, "]}");
    respond_and_free(a, request, &body);
}

void api_get_model(api *a, http_request *request, const char *id) {
    if (strcmp(id, a->name) != 0) {
        api_error e;
        api_error_set(&e, 404, "model_not_found", "model", "The model '%.*s' does not exist",
                      API_ECHO_BYTES, id);
        api_respond_error(a, request, &e);
        return;
    }
    json_writer body = {0};
    put_model(a, &body);
    respond_and_free(a, request, &body);
}

void api_get_version(api *a, http_request *request) {
    json_writer body = {0};
    json_put(&body, "{\"version\":\"" TANDEM_VERSION "\"}");
    respond_and_free(a, request, &body);
}

// Live means that this loop turns and the bundle has not failed for good.
void api_get_health(api *a, http_request *request) {
    api_error e;
    if (bundle_state_get(a->bundle) == BUNDLE_FAILED && api_check_ready(a, &e) != 0) {
        api_respond_error(a, request, &e);
        return;
    }
    json_writer body = {0};
    json_put(&body, "{\"status\":\"ok\"}");
    respond_and_free(a, request, &body);
}

void api_get_ready(api *a, http_request *request) {
    api_error e;
    if (api_check_ready(a, &e) != 0) {
        api_respond_error(a, request, &e);
        return;
    }
    json_writer body = {0};
    json_put(&body, "{\"status\":\"ready\"}");
    respond_and_free(a, request, &body);
}

// ---- Metrics, in the Prometheus text format ----
static void put_family(json_writer *out, const char *name, const char *type, const char *help) {
    json_putf(out, "# HELP tandem_%s %s\n# TYPE tandem_%s %s\n", name, help, name, type);
}

// extra is `,label="value"` or "".
static void put_sample(json_writer *out, const api *a, const char *name, const char *extra,
                       double value) {
    json_putf(out, "tandem_%s{model_name=", name);
    json_put_string(out, a->name);
    json_putf(out, ",engine=\"0\"%s} %.17g\n", extra, value);
}

static void put_metric(json_writer *out, const api *a, const char *name, const char *type,
                       const char *help, double value) {
    put_family(out, name, type, help);
    put_sample(out, a, name, "", value);
}

static void put_metrics(json_writer *out, const api *a) {
    bundle_stats stats = bundle_stats_get(a->bundle);
    double used = stats.kv_capacity ? (double)stats.kv_tokens / (double)stats.kv_capacity : 0;
    put_metric(out, a, "num_requests_running", "gauge", "Sequences that are being computed.",
               (double)stats.running);
    put_metric(out, a, "num_requests_waiting", "gauge", "Sequences that wait for a worker.",
               (double)stats.waiting);
    put_metric(out, a, "kv_cache_usage_perc", "gauge", "Share of the KV cache in use, 0 to 1.",
               used);
    put_metric(out, a, "num_preemptions_total", "counter",
               "Sequences set back for want of KV pages.", (double)stats.preemptions);
    put_metric(out, a, "prompt_tokens_total", "counter", "Prompt tokens computed.",
               (double)stats.prompt_tokens);
    put_metric(out, a, "generation_tokens_total", "counter", "Tokens generated.",
               (double)stats.generated_tokens);
    put_metric(out, a, "steps_total", "counter", "Steps of lanes of all attention workers.",
               (double)stats.steps);
    put_metric(out, a, "transport_bytes_total", "counter",
               "Bytes of frames between attention and FFN workers, both ways.",
               (double)stats.wire_bytes);
    put_family(out, "request_success_total", "counter", "Sequences by how they ended.");
    for (int i = FINISH_STOP; i <= FINISH_ERROR; i++) {
        char label[64];
        snprintf(label, sizeof label, ",finished_reason=\"%s\"",
                 finish_reason_name((finish_reason)i));
        put_sample(out, a, "request_success_total", label, (double)a->finished[i]);
    }
    put_family(out, "http_responses_total", "counter",
               "HTTP answers of the API by class of status; 499: the client went away first.");
    for (int i = 2; i <= 5; i++) {
        char label[32];
        snprintf(label, sizeof label, ",status=\"%dxx\"", i);
        put_sample(out, a, "http_responses_total", label, (double)a->responses[i]);
    }
    put_sample(out, a, "http_responses_total", ",status=\"499\"", (double)a->client_gone);
    put_metric(out, a, "http_connections", "gauge", "Open HTTP connections.",
               (double)http_server_connections(a->http));
}

void api_get_metrics(api *a, http_request *request) {
    json_writer body = {0};
    put_metrics(&body, a);
    a->responses[2]++;
    http_respond(request, 200, "text/plain; version=0.0.4; charset=utf-8", NULL, body.text, body.n);
    json_writer_free(&body);
}
