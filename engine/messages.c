#include "engine/messages.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static int finish_reading(const bytes_reader *r) {
    return bytes_reader_done(r) ? E_OK : E_PROTOCOL;
}

// ---- start of a worker ----

void message_hello_encode(bytes_writer *out, const message_hello *in) {
    bytes_write_u32(out, in->protocol);
    bytes_write_u8(out, (uint8_t)in->kind);
    bytes_write_i32(out, in->rank);
    bytes_write_i32(out, in->pid);
}

int message_hello_decode(const void *data, size_t n, message_hello *out) {
    bytes_reader r = bytes_reader_make(data, n);
    message_hello m = {.protocol = bytes_read_u32(&r)};
    uint8_t kind = bytes_read_u8(&r);
    m.kind = kind == WORKER_FFN ? WORKER_FFN : WORKER_ATTENTION;
    m.rank = bytes_read_i32(&r);
    m.pid = bytes_read_i32(&r);
    if (kind > WORKER_FFN || m.rank < -1 || m.rank >= MESSAGE_MAX_WORKERS)
        return E_PROTOCOL;
    *out = m;
    return finish_reading(&r);
}

void message_config_encode(bytes_writer *out, uint32_t rank, const char *json, size_t n_json) {
    bytes_write_u32(out, rank);
    bytes_write_blob(out, json, n_json);
}

int message_config_decode(const void *data, size_t n, uint32_t *rank, const char **json,
                          size_t *n_json) {
    bytes_reader r = bytes_reader_make(data, n);
    *rank = bytes_read_u32(&r);
    *n_json = bytes_left(&r);
    *json = (const char *)bytes_read_blob(&r, *n_json);
    return *rank < MESSAGE_MAX_WORKERS && *n_json ? finish_reading(&r) : E_PROTOCOL;
}

void message_progress_encode(bytes_writer *out, uint64_t done, uint64_t total) {
    bytes_write_u64(out, done);
    bytes_write_u64(out, total);
}

int message_progress_decode(const void *data, size_t n, uint64_t *done, uint64_t *total) {
    bytes_reader r = bytes_reader_make(data, n);
    *done = bytes_read_u64(&r);
    *total = bytes_read_u64(&r);
    return finish_reading(&r);
}

static void write_address(bytes_writer *out, const uint8_t *address, uint32_t n) {
    bytes_write_u32(out, n);
    bytes_write_blob(out, address, n);
}

static uint32_t read_address(bytes_reader *r, uint8_t *out) {
    uint32_t n = bytes_read_u32(r);
    if (n > MESSAGE_MAX_ADDRESS)
        r->failed = true;
    const void *at = bytes_read_blob(r, n);
    if (r->failed || !n)
        return 0;
    memcpy(out, at, n);
    return n;
}

void message_ready_encode(bytes_writer *out, const message_ready *in) {
    bytes_write_u64(out, in->plan_hash);
    bytes_write_u64(out, in->weight_bytes);
    bytes_write_u64(out, in->kv_tokens);
    write_address(out, in->address, in->n_address);
}

int message_ready_decode(const void *data, size_t n, message_ready *out) {
    bytes_reader r = bytes_reader_make(data, n);
    out->plan_hash = bytes_read_u64(&r);
    out->weight_bytes = bytes_read_u64(&r);
    out->kv_tokens = bytes_read_u64(&r);
    out->n_address = read_address(&r, out->address);
    return finish_reading(&r);
}

void message_topology_encode(bytes_writer *out, const message_topology *in) {
    bytes_write_u32(out, in->epoch);
    bytes_write_u32(out, in->n_peers);
    for (uint32_t i = 0; i < in->n_peers; i++) {
        bytes_write_u32(out, in->peers[i].rank);
        write_address(out, in->peers[i].address, in->peers[i].n_address);
    }
}

int message_topology_decode(const void *data, size_t n, message_topology *out) {
    bytes_reader r = bytes_reader_make(data, n);
    out->epoch = bytes_read_u32(&r);
    out->n_peers = bytes_read_u32(&r);
    if (out->n_peers > MESSAGE_MAX_WORKERS)
        return E_PROTOCOL;
    for (uint32_t i = 0; i < out->n_peers && !r.failed; i++) {
        out->peers[i].rank = bytes_read_u32(&r);
        out->peers[i].n_address = read_address(&r, out->peers[i].address);
    }
    return finish_reading(&r);
}

// ---- requests ----

static void write_params(bytes_writer *out, const sampling_params *p) {
    bytes_write_f32(out, p->temperature);
    bytes_write_f32(out, p->top_p);
    bytes_write_f32(out, p->min_p);
    bytes_write_i32(out, p->top_k);
    bytes_write_f32(out, p->presence_penalty);
    bytes_write_f32(out, p->frequency_penalty);
    bytes_write_f32(out, p->repetition_penalty);
    bytes_write_u64(out, p->seed);
    bytes_write_i32(out, p->max_tokens);
    bytes_write_i32(out, p->min_tokens);
    bytes_write_i32(out, p->logprobs);
    bytes_write_u8(out, p->prompt_logprobs);
    bytes_write_u16(out, (uint16_t)p->n_stop_ids);
    for (int32_t i = 0; i < p->n_stop_ids; i++)
        bytes_write_i32(out, p->stop_ids[i]);
    bytes_write_u16(out, (uint16_t)p->n_logit_bias);
    for (int32_t i = 0; i < p->n_logit_bias; i++) {
        bytes_write_i32(out, p->logit_bias[i].id);
        bytes_write_f32(out, p->logit_bias[i].bias);
    }
}

static bool params_in_range(const sampling_params *p) {
    return p->temperature >= 0 && isfinite(p->temperature) && p->top_p > 0 && p->top_p <= 1 &&
           p->min_p >= 0 && p->min_p <= 1 && p->top_k >= 0 && isfinite(p->presence_penalty) &&
           isfinite(p->frequency_penalty) && p->repetition_penalty > 0 &&
           isfinite(p->repetition_penalty) && p->max_tokens >= 0 && p->min_tokens >= 0 &&
           p->logprobs >= -1 && p->logprobs <= REQUEST_MAX_TOP_LOGPROBS &&
           (p->max_tokens > 0 || p->prompt_logprobs);
}

static bool read_params(bytes_reader *r, message_submit *out) {
    sampling_params *p = &out->params;
    p->temperature = bytes_read_f32(r);
    p->top_p = bytes_read_f32(r);
    p->min_p = bytes_read_f32(r);
    p->top_k = bytes_read_i32(r);
    p->presence_penalty = bytes_read_f32(r);
    p->frequency_penalty = bytes_read_f32(r);
    p->repetition_penalty = bytes_read_f32(r);
    p->seed = bytes_read_u64(r);
    p->max_tokens = bytes_read_i32(r);
    p->min_tokens = bytes_read_i32(r);
    p->logprobs = bytes_read_i32(r);
    p->prompt_logprobs = bytes_read_u8(r) != 0;
    p->n_stop_ids = bytes_read_u16(r);
    if (p->n_stop_ids > REQUEST_MAX_STOP_IDS)
        return false;
    for (int32_t i = 0; i < p->n_stop_ids; i++)
        p->stop_ids[i] = bytes_read_i32(r);
    p->n_logit_bias = bytes_read_u16(r);
    if (p->n_logit_bias > REQUEST_MAX_LOGIT_BIAS)
        return false;
    out->bias = calloc((size_t)p->n_logit_bias + 1, sizeof *out->bias);
    for (int32_t i = 0; out->bias && i < p->n_logit_bias; i++) {
        out->bias[i].id = bytes_read_i32(r);
        out->bias[i].bias = bytes_read_f32(r);
    }
    p->logit_bias = out->bias;
    return out->bias && !r->failed && params_in_range(p);
}

void message_submit_encode(bytes_writer *out, uint64_t request, const sampling_params *params,
                           const int32_t *prompt, size_t n_prompt) {
    bytes_write_u64(out, request);
    write_params(out, params);
    bytes_write_u32(out, (uint32_t)n_prompt);
    for (size_t i = 0; i < n_prompt; i++)
        bytes_write_i32(out, prompt[i]);
}

int message_submit_decode(const void *data, size_t n, message_submit *out) {
    bytes_reader r = bytes_reader_make(data, n);
    message_submit m = {.request = bytes_read_u64(&r)};
    uint32_t n_prompt = 0;
    if (read_params(&r, &m))
        n_prompt = bytes_read_u32(&r);
    if (n_prompt && bytes_left(&r) == (size_t)n_prompt * 4)
        m.prompt = malloc((size_t)n_prompt * sizeof *m.prompt);
    if (!m.prompt) {
        message_submit_free(&m);
        return E_PROTOCOL;
    }
    m.n_prompt = (int32_t)n_prompt;
    for (uint32_t i = 0; i < n_prompt; i++)
        m.prompt[i] = bytes_read_i32(&r);
    *out = m;
    return E_OK;
}

void message_submit_free(message_submit *submit) {
    free(submit->prompt);
    free(submit->bias);
    submit->prompt = NULL;
    submit->bias = NULL;
}

void message_cancel_encode(bytes_writer *out, uint64_t request) {
    bytes_write_u64(out, request);
}

int message_cancel_decode(const void *data, size_t n, uint64_t *request) {
    bytes_reader r = bytes_reader_make(data, n);
    *request = bytes_read_u64(&r);
    return finish_reading(&r);
}

// ---- tokens: events, then the load ----

void message_tokens_begin(bytes_writer *out) {
    bytes_writer_reset(out);
}

void message_tokens_add(bytes_writer *out, const token_event *event) {
    bytes_write_u64(out, event->request);
    bytes_write_i32(out, event->id);
    bytes_write_i32(out, event->position);
    bytes_write_u8(out, event->is_prompt);
    bytes_write_u8(out, (uint8_t)event->finish);
    bytes_write_u8(out, (uint8_t)(int8_t)event->n_top);
    bytes_write_f32(out, event->logprob);
    for (int32_t i = 0; i < event->n_top; i++) {
        bytes_write_i32(out, event->top[i].id);
        bytes_write_f32(out, event->top[i].logprob);
    }
}

void message_tokens_finish(bytes_writer *out, const message_load *load) {
    bytes_write_u32(out, load->running);
    bytes_write_u32(out, load->waiting);
    bytes_write_u64(out, load->kv_tokens);
    bytes_write_u64(out, load->preemptions);
    bytes_write_u64(out, load->steps);
    bytes_write_u64(out, load->wire_bytes);
}

static bool read_event(bytes_reader *r, token_event *event) {
    event->request = bytes_read_u64(r);
    event->id = bytes_read_i32(r);
    event->position = bytes_read_i32(r);
    event->is_prompt = bytes_read_u8(r) != 0;
    uint8_t finish = bytes_read_u8(r);
    event->n_top = (int8_t)bytes_read_u8(r);
    event->logprob = bytes_read_f32(r);
    if (finish > FINISH_ERROR || event->n_top < -1 || event->n_top > REQUEST_MAX_TOP_LOGPROBS)
        return false;
    event->finish = (finish_reason)finish;
    for (int32_t i = 0; i < event->n_top; i++) {
        event->top[i].id = bytes_read_i32(r);
        event->top[i].logprob = bytes_read_f32(r);
    }
    return !r->failed;
}

int message_tokens_decode(const void *data, size_t n, message_load *load,
                          void (*visit)(void *user, const token_event *event), void *user) {
    if (n < MESSAGE_LOAD_BYTES)
        return E_PROTOCOL;
    bytes_reader tail =
        bytes_reader_make((const uint8_t *)data + n - MESSAGE_LOAD_BYTES, MESSAGE_LOAD_BYTES);
    load->running = bytes_read_u32(&tail);
    load->waiting = bytes_read_u32(&tail);
    load->kv_tokens = bytes_read_u64(&tail);
    load->preemptions = bytes_read_u64(&tail);
    load->steps = bytes_read_u64(&tail);
    load->wire_bytes = bytes_read_u64(&tail);
    bytes_reader r = bytes_reader_make(data, n - MESSAGE_LOAD_BYTES);
    while (bytes_left(&r)) {
        token_event event = {0};
        if (!read_event(&r, &event))
            return E_PROTOCOL;
        visit(user, &event);
    }
    return E_OK;
}
