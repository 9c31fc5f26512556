// Control messages: what goes in comes out, and whatever is short, long or out of range is refused.
#include "engine/messages.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

// A decoder that keeps nothing.
typedef int (*decoder)(const void *data, size_t n);

// Every proper prefix and one byte too many; each in memory of just that size, so that a read
// beyond it shows under AddressSanitizer.
static void expect_exact_size(decoder decode, const bytes_writer *w) {
    assert_false(w->failed);
    assert_int_equal(decode(w->data, w->n), E_OK);
    for (size_t n = 0; n <= w->n + 1; n++) {
        uint8_t *copy = malloc(n ? n : 1);
        assert_non_null(copy);
        memset(copy, 0, n);
        memcpy(copy, w->data, n < w->n ? n : w->n);
        if (n != w->n)
            assert_int_equal(decode(copy, n), E_PROTOCOL);
        free(copy);
    }
}

// The message with the bytes at `at` replaced.
static void expect_refused(decoder decode, const bytes_writer *w, size_t at, const void *bytes,
                           size_t n) {
    uint8_t *copy = malloc(w->n);
    assert_non_null(copy);
    memcpy(copy, w->data, w->n);
    assert_true(at + n <= w->n);
    memcpy(copy + at, bytes, n);
    assert_int_equal(decode(copy, w->n), E_PROTOCOL);
    free(copy);
}

static void expect_u32_refused(decoder decode, const bytes_writer *w, size_t at, uint32_t value) {
    uint8_t bytes[4];
    for (int i = 0; i < 4; i++)
        bytes[i] = (uint8_t)(value >> (8 * i));
    expect_refused(decode, w, at, bytes, sizeof bytes);
}

// ---- start of a worker ----

static int decode_hello(const void *data, size_t n) {
    message_hello out;
    return message_hello_decode(data, n, &out);
}

static void test_hello(void **state) {
    (void)state;
    for (int32_t rank = -1; rank < MESSAGE_MAX_WORKERS; rank++) {
        bytes_writer w = {0};
        message_hello in = {MESSAGE_PROTOCOL, rank & 1 ? WORKER_FFN : WORKER_ATTENTION, rank, 77};
        message_hello out;
        message_hello_encode(&w, &in);
        assert_int_equal(message_hello_decode(w.data, w.n, &out), E_OK);
        assert_true(out.protocol == in.protocol && out.kind == in.kind && out.rank == rank &&
                    out.pid == 77);
        expect_exact_size(decode_hello, &w);
        expect_refused(decode_hello, &w, 4, "\x02", 1);
        expect_u32_refused(decode_hello, &w, 5, MESSAGE_MAX_WORKERS);
        expect_u32_refused(decode_hello, &w, 5, (uint32_t)-2);
        bytes_writer_free(&w);
    }
}

static void test_config(void **state) {
    (void)state;
    bytes_writer w = {0};
    uint32_t rank;
    const char *json;
    size_t n;
    message_config_encode(&w, 5, "{\"model\": 1}", 12);
    assert_int_equal(message_config_decode(w.data, w.n, &rank, &json, &n), E_OK);
    assert_true(rank == 5 && n == 12 && !memcmp(json, "{\"model\": 1}", 12));
    for (size_t cut = 0; cut <= 4; cut++)
        assert_int_equal(message_config_decode(w.data, cut, &rank, &json, &n), E_PROTOCOL);
    bytes_writer_reset(&w);
    message_config_encode(&w, MESSAGE_MAX_WORKERS, "{}", 2);
    assert_int_equal(message_config_decode(w.data, w.n, &rank, &json, &n), E_PROTOCOL);
    bytes_writer_free(&w);
}

static int decode_progress(const void *data, size_t n) {
    uint64_t done, total;
    return message_progress_decode(data, n, &done, &total);
}

static int decode_cancel(const void *data, size_t n) {
    uint64_t request;
    return message_cancel_decode(data, n, &request);
}

static void test_progress_and_cancel(void **state) {
    (void)state;
    bytes_writer w = {0};
    uint64_t a, b;
    message_progress_encode(&w, UINT64_MAX - 1, 3);
    assert_int_equal(message_progress_decode(w.data, w.n, &a, &b), E_OK);
    assert_true(a == UINT64_MAX - 1 && b == 3);
    expect_exact_size(decode_progress, &w);
    bytes_writer_reset(&w);
    message_cancel_encode(&w, 0x123456789abcdef0);
    assert_int_equal(message_cancel_decode(w.data, w.n, &a), E_OK);
    assert_true(a == 0x123456789abcdef0);
    expect_exact_size(decode_cancel, &w);
    bytes_writer_free(&w);
}

static int decode_ready(const void *data, size_t n) {
    static message_ready out;
    return message_ready_decode(data, n, &out);
}

static void test_ready(void **state) {
    (void)state;
    static message_ready in, out;
    static const uint32_t sizes[] = {0, 1, 100, MESSAGE_MAX_ADDRESS};
    for (size_t i = 0; i < 4; i++) {
        bytes_writer w = {0};
        in = (message_ready){
            .plan_hash = 1ull << 63, .weight_bytes = 5, .kv_tokens = 6, .n_address = sizes[i]};
        memset(in.address, 0xa5, sizes[i]);
        message_ready_encode(&w, &in);
        assert_int_equal(message_ready_decode(w.data, w.n, &out), E_OK);
        assert_true(out.plan_hash == in.plan_hash && out.weight_bytes == 5 && out.kv_tokens == 6);
        assert_int_equal(out.n_address, sizes[i]);
        assert_memory_equal(out.address, in.address, sizes[i]);
        expect_exact_size(decode_ready, &w);
        expect_u32_refused(decode_ready, &w, 24, MESSAGE_MAX_ADDRESS + 1);
        expect_u32_refused(decode_ready, &w, 24, UINT32_MAX);
        bytes_writer_free(&w);
    }
}

static message_topology topology_in, topology_out;

static int decode_topology(const void *data, size_t n) {
    return message_topology_decode(data, n, &topology_out);
}

static void test_topology(void **state) {
    (void)state;
    static const uint32_t counts[] = {0, 1, 3, MESSAGE_MAX_WORKERS};
    for (size_t c = 0; c < 4; c++) {
        bytes_writer w = {0};
        message_topology *in = &topology_in;
        in->epoch = 9;
        in->n_peers = counts[c];
        for (uint32_t i = 0; i < in->n_peers; i++) {
            in->peers[i].rank = i;
            in->peers[i].n_address = i * 3;
            memset(in->peers[i].address, (int)i, i * 3);
        }
        message_topology_encode(&w, in);
        assert_int_equal(message_topology_decode(w.data, w.n, &topology_out), E_OK);
        assert_true(topology_out.epoch == 9 && topology_out.n_peers == counts[c]);
        for (uint32_t i = 0; i < in->n_peers; i++) {
            assert_true(topology_out.peers[i].rank == i &&
                        topology_out.peers[i].n_address == i * 3);
            assert_memory_equal(topology_out.peers[i].address, in->peers[i].address, i * 3);
        }
        expect_exact_size(decode_topology, &w);
        expect_u32_refused(decode_topology, &w, 4, MESSAGE_MAX_WORKERS + 1);
        expect_u32_refused(decode_topology, &w, 4, UINT32_MAX);
        bytes_writer_free(&w);
    }
}

// ---- requests ----

static sampling_params full_params(logit_bias *bias) {
    sampling_params p = {.temperature = 0.75f,
                         .top_p = 0.5f,
                         .min_p = 0.25f,
                         .top_k = 40,
                         .presence_penalty = -1.5f,
                         .frequency_penalty = 2,
                         .repetition_penalty = 1.25f,
                         .seed = UINT64_MAX - 5,
                         .max_tokens = 1000,
                         .min_tokens = 3,
                         .logprobs = 20,
                         .prompt_logprobs = true,
                         .n_stop_ids = REQUEST_MAX_STOP_IDS,
                         .n_logit_bias = REQUEST_MAX_LOGIT_BIAS,
                         .logit_bias = bias};
    for (int i = 0; i < REQUEST_MAX_STOP_IDS; i++)
        p.stop_ids[i] = i * i;
    for (int i = 0; i < REQUEST_MAX_LOGIT_BIAS; i++)
        bias[i] = (logit_bias){i, (float)i / 4 - 20};
    return p;
}

static int decode_submit(const void *data, size_t n) {
    message_submit out;
    int code = message_submit_decode(data, n, &out);
    if (!code)
        message_submit_free(&out);
    return code;
}

static void test_submit(void **state) {
    (void)state;
    logit_bias bias[REQUEST_MAX_LOGIT_BIAS];
    sampling_params in = full_params(bias);
    int32_t prompt[50];
    for (int i = 0; i < 50; i++)
        prompt[i] = i * 7;
    bytes_writer w = {0};
    message_submit out;
    message_submit_encode(&w, 99, &in, prompt, 50);
    assert_int_equal(message_submit_decode(w.data, w.n, &out), E_OK);
    const sampling_params *p = &out.params;
    assert_true(out.request == 99 && out.n_prompt == 50);
    assert_memory_equal(out.prompt, prompt, sizeof prompt);
    assert_true(p->temperature == in.temperature && p->top_p == in.top_p && p->min_p == in.min_p);
    assert_true(p->top_k == 40 && p->presence_penalty == -1.5f && p->frequency_penalty == 2);
    assert_true(p->repetition_penalty == 1.25f && p->seed == in.seed && p->max_tokens == 1000);
    assert_true(p->min_tokens == 3 && p->logprobs == 20 && p->prompt_logprobs);
    assert_int_equal(p->n_stop_ids, REQUEST_MAX_STOP_IDS);
    assert_memory_equal(p->stop_ids, in.stop_ids, sizeof in.stop_ids);
    assert_int_equal(p->n_logit_bias, REQUEST_MAX_LOGIT_BIAS);
    assert_ptr_equal(p->logit_bias, out.bias);
    assert_memory_equal(out.bias, bias, sizeof bias);
    message_submit_free(&out);
    expect_exact_size(decode_submit, &w);
    bytes_writer_free(&w);
}

static void expect_params(const sampling_params *params, int code) {
    bytes_writer w = {0};
    int32_t prompt = 1;
    message_submit_encode(&w, 1, params, &prompt, 1);
    assert_int_equal(decode_submit(w.data, w.n), code);
    bytes_writer_free(&w);
}

static void test_submit_ranges(void **state) {
    (void)state;
    sampling_params ok = {.top_p = 1, .repetition_penalty = 1, .max_tokens = 1, .logprobs = -1};
    sampling_params p = ok;
    expect_params(&p, E_OK);
#define REFUSED(field, value)                                                                      \
    p = ok;                                                                                        \
    p.field = value;                                                                               \
    expect_params(&p, E_PROTOCOL)
    REFUSED(temperature, -0.5f);
    REFUSED(temperature, NAN);
    REFUSED(temperature, INFINITY);
    REFUSED(top_p, 0);
    REFUSED(top_p, 1.5f);
    REFUSED(top_p, NAN);
    REFUSED(min_p, -0.1f);
    REFUSED(min_p, 1.1f);
    REFUSED(min_p, NAN);
    REFUSED(top_k, -1);
    REFUSED(presence_penalty, NAN);
    REFUSED(frequency_penalty, INFINITY);
    REFUSED(repetition_penalty, 0);
    REFUSED(repetition_penalty, NAN);
    REFUSED(max_tokens, -1);
    REFUSED(max_tokens, 0);
    REFUSED(min_tokens, -1);
    REFUSED(logprobs, -2);
    REFUSED(logprobs, REQUEST_MAX_TOP_LOGPROBS + 1);
#undef REFUSED
    p = ok;
    p.max_tokens = 0; // only to score a prompt
    p.prompt_logprobs = true;
    expect_params(&p, E_OK);
    // Counts beyond the caps, and prompts of nothing or of more than the message has.
    bytes_writer w = {0};
    int32_t prompt[2] = {1, 2};
    message_submit_encode(&w, 1, &ok, prompt, 2);
    size_t n_prompt_at = w.n - 12, n_bias_at = n_prompt_at - 2, n_stop_at = n_bias_at - 2;
    expect_refused(decode_submit, &w, n_stop_at, "\x11", 1);
    expect_refused(decode_submit, &w, n_stop_at, "\xff\xff", 2);
    expect_refused(decode_submit, &w, n_bias_at, "\x2d\x01", 2);
    expect_refused(decode_submit, &w, n_bias_at, "\xff\xff", 2);
    expect_u32_refused(decode_submit, &w, n_prompt_at, 0);
    expect_u32_refused(decode_submit, &w, n_prompt_at, 3);
    expect_u32_refused(decode_submit, &w, n_prompt_at, 0x40000002); // times 4 wraps to 8
    bytes_writer_free(&w);
}

// ---- tokens ----

enum { MAX_SEEN = 16 };

typedef struct seen {
    size_t n;
    token_event events[MAX_SEEN];
} seen;

static void visit(void *user, const token_event *event) {
    seen *s = user;
    assert_true(s->n < MAX_SEEN);
    s->events[s->n++] = *event;
}

static int decode_tokens(const void *data, size_t n, message_load *load, seen *s) {
    s->n = 0;
    return message_tokens_decode(data, n, load, visit, s);
}

static void test_tokens(void **state) {
    (void)state;
    static seen in, out;
    static const int32_t n_top[] = {-1, 0, 1, 5, REQUEST_MAX_TOP_LOGPROBS};
    bytes_writer w = {0};
    message_load load = {1, 2, 3, 4, 5, 1ull << 40}, got;
    message_tokens_begin(&w);
    for (int k = 0; k < 5; k++) {
        token_event *e = &in.events[in.n++];
        *e = (token_event){.request = 1ull << (10 * k),
                           .id = k,
                           .position = 100 + k,
                           .is_prompt = k & 1,
                           .finish = (finish_reason)k,
                           .logprob = -0.5f * (float)k,
                           .n_top = n_top[k]};
        for (int i = 0; i < e->n_top; i++)
            e->top[i] = (token_logprob){i * 3, -1.25f * (float)i};
        message_tokens_add(&w, e);
    }
    message_tokens_finish(&w, &load);
    assert_int_equal(decode_tokens(w.data, w.n, &got, &out), E_OK);
    assert_int_equal(out.n, in.n);
    for (size_t i = 0; i < in.n; i++) {
        const token_event *a = &in.events[i], *b = &out.events[i];
        assert_true(a->request == b->request && a->id == b->id && a->position == b->position);
        assert_true(a->is_prompt == b->is_prompt && a->finish == b->finish);
        assert_true(a->logprob == b->logprob && a->n_top == b->n_top);
        for (int k = 0; k < a->n_top; k++)
            assert_memory_equal(&a->top[k], &b->top[k], sizeof a->top[k]);
    }
    assert_true(got.running == 1 && got.waiting == 2 && got.kv_tokens == 3 &&
                got.preemptions == 4 && got.steps == 5 && got.wire_bytes == 1ull << 40);
    assert_true(w.n <= MESSAGE_LOAD_BYTES + in.n * MESSAGE_EVENT_MAX_BYTES);
    // A message that is cut has fewer events, or is refused; none is made up.
    for (size_t n = 0; n < w.n; n++) {
        uint8_t *copy = malloc(n ? n : 1);
        assert_non_null(copy);
        memcpy(copy, w.data, n);
        decode_tokens(copy, n, &got, &out);
        assert_true(out.n < in.n);
        for (size_t i = 0; i < out.n; i++)
            assert_true(out.events[i].request == in.events[i].request);
        free(copy);
    }
    // Begun anew it is empty but for the load.
    message_tokens_begin(&w);
    message_tokens_finish(&w, &load);
    assert_int_equal(decode_tokens(w.data, w.n, &got, &out), E_OK);
    assert_int_equal(out.n, 0);
    assert_int_equal(decode_tokens(w.data, w.n - 1, &got, &out), E_PROTOCOL);
    bytes_writer_free(&w);
}

static void test_tokens_out_of_range(void **state) {
    (void)state;
    static seen out;
    bytes_writer w = {0};
    message_load load = {0};
    message_tokens_begin(&w);
    message_tokens_add(&w, &(token_event){.request = 1, .n_top = -1});
    message_tokens_finish(&w, &load);
    static const struct {
        size_t at;
        uint8_t value;
    } bad[] = {{17, FINISH_ERROR + 1},
               {17, 0xff},
               {18, 0xfe},
               {18, 0x80},
               {18, REQUEST_MAX_TOP_LOGPROBS + 1},
               {18, 1}};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        uint8_t kept = w.data[bad[i].at];
        w.data[bad[i].at] = bad[i].value;
        assert_int_equal(decode_tokens(w.data, w.n, &load, &out), E_PROTOCOL);
        assert_int_equal(out.n, 0);
        w.data[bad[i].at] = kept;
    }
    assert_int_equal(decode_tokens(w.data, w.n, &load, &out), E_OK);
    bytes_writer_free(&w);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_hello),
        cmocka_unit_test(test_config),
        cmocka_unit_test(test_progress_and_cancel),
        cmocka_unit_test(test_ready),
        cmocka_unit_test(test_topology),
        cmocka_unit_test(test_submit),
        cmocka_unit_test(test_submit_ranges),
        cmocka_unit_test(test_tokens),
        cmocka_unit_test(test_tokens_out_of_range),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
