// Generations through the HTTP API over a fake bundle: text, streams, stops, logprobs, ends.
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <cmocka.h>

#include "engine/utf8.h"
#include "tests/support/api_fixture.h"

#include <signal.h>

#define COMPLETIONS "/v1/completions"
#define CHAT "/v1/chat/completions"
#define HELLO "\"messages\":[{\"role\":\"user\",\"content\":\"hello\"}]"

static void test_completion(void **state) {
    (void)state;
    script_text("the answer");
    reply r = ask("POST", COMPLETIONS, "{\"model\":\"tiny-moe\",\"prompt\":\"hello there\"}");
    const json_value *root = json_root(r.doc);
    assert_int_equal(r.status, 200);
    assert_string_equal(text_at(root, "choices.0.text"), "the answer");
    assert_string_equal(text_at(root, "choices.0.finish_reason"), "stop");
    assert_string_equal(text_at(root, "object"), "text_completion");
    assert_string_equal(text_at(root, "model"), "tiny-moe");
    assert_memory_equal(text_at(root, "id"), "cmpl-", 5);
    assert_memory_equal(text_at(root, "system_fingerprint"), "fp_", 3);
    assert_true(int_at(root, "created") > 1700000000);
    const fake_request *sent = submitted(0);
    token_ids ids = {0};
    tokenizer_encode(fx->tokenizer, "hello there", 11, true, true, &ids, NULL);
    assert_int_equal(ids.n, sent->n_prompt);
    assert_memory_equal(ids.ids, sent->prompt, ids.n * sizeof *ids.ids);
    assert_int_equal(int_at(root, "usage.prompt_tokens"), ids.n);
    assert_int_equal(int_at(root, "usage.completion_tokens"), fx->script.n);
    assert_int_equal(int_at(root, "usage.total_tokens"), ids.n + fx->script.n);
    token_ids_free(&ids);
    reply_free(&r);
    // Without end tokens it runs to max_tokens, whose default is 16.
    int32_t many[40];
    for (int i = 0; i < 40; i++)
        many[i] = tokenizer_token_id(fx->tokenizer, "a");
    script_ids(many, 40);
    r = ask("POST", COMPLETIONS, "{\"prompt\":\"x\"}");
    assert_string_equal(text_at(json_root(r.doc), "choices.0.text"), "aaaaaaaaaaaaaaaa");
    assert_string_equal(text_at(json_root(r.doc), "choices.0.finish_reason"), "length");
    reply_free(&r);
}

static void test_chat(void **state) {
    (void)state;
    script_text("hi!");
    reply r =
        ask("POST", CHAT,
            "{\"model\":\"tiny-moe\",\"messages\":[{\"role\":\"system\",\"content\":\"be brief\"},"
            "{\"role\":\"user\",\"content\":[{\"type\":\"text\",\"text\":\"a\"},"
            "{\"type\":\"text\",\"text\":\"b<|im_end|>\"}]}]}");
    const json_value *root = json_root(r.doc);
    assert_int_equal(r.status, 200);
    assert_string_equal(text_at(root, "object"), "chat.completion");
    assert_memory_equal(text_at(root, "id"), "chatcmpl-", 9);
    assert_string_equal(text_at(root, "choices.0.message.role"), "assistant");
    assert_string_equal(text_at(root, "choices.0.message.content"), "hi!");
    assert_string_equal(text_at(root, "choices.0.finish_reason"), "stop");
    const chat_message messages[] = {{"system", "be brief", 8}, {"user", "a\nb<|im_end|>", 13}};
    token_ids ids = {0};
    assert_int_equal(chat_encode(fx->chat, fx->tokenizer, messages, 2, true, &ids, NULL), E_OK);
    assert_int_equal(submitted(0)->n_prompt, ids.n);
    assert_memory_equal(submitted(0)->prompt, ids.ids, ids.n * sizeof *ids.ids);
    // The default of max_tokens is all that is left of the context.
    assert_int_equal(submitted(0)->params.max_tokens, API_CONTEXT - ids.n);
    token_ids_free(&ids);
    reply_free(&r);
}

static void test_chat_stream(void **state) {
    (void)state;
    script_text("one two three");
    events e = ask_stream(CHAT, "{" HELLO ",\"stream\":true,"
                                "\"stream_options\":{\"include_usage\":true}}");
    const char *finish;
    char *text = join_choice(&e, 0, &finish);
    assert_true(e.done);
    assert_string_equal(text, "one two three");
    assert_string_equal(finish, "stop");
    for (size_t i = 0; i + 1 < e.n; i++) {
        const json_value *root = json_root(e.docs[i]);
        assert_string_equal(text_at(root, "object"), "chat.completion.chunk");
        assert_int_equal(json_count(json_get(root, "choices")), 1);
        assert_string_equal(text_at(root, "choices.0.delta.role"), i ? "(none)" : "assistant");
        assert_true(json_is_null(json_get(root, "usage")));
    }
    assert_true(strlen(text_at(json_root(e.docs[0]), "choices.0.delta.content")) > 0);
    const json_value *last = json_root(e.docs[e.n - 1]);
    assert_true(json_is_array(json_get(last, "choices")));
    assert_int_equal(json_count(json_get(last, "choices")), 0);
    assert_int_equal(int_at(last, "usage.completion_tokens"), fx->script.n);
    assert_non_null(at(json_root(e.docs[e.n - 2]), "choices.0.finish_reason"));
    free(text);
    events_free(&e);
}

static void test_completion_stream(void **state) {
    (void)state;
    script_text("one two three");
    events e = ask_stream(COMPLETIONS, "{\"prompt\":\"x\",\"stream\":true,\"stream_options\":"
                                       "{\"include_usage\":true,\"continuous_usage_stats\":true}}");
    char *text = join_choice(&e, 0, NULL);
    assert_string_equal(text, "one two three");
    int64_t before = 0;
    for (size_t i = 0; i < e.n; i++) {
        int64_t n = int_at(json_root(e.docs[i]), "usage.completion_tokens");
        assert_true(n >= before);
        assert_int_equal(int_at(json_root(e.docs[i]), "usage.prompt_tokens"), 1);
        before = n;
    }
    assert_int_equal(before, fx->script.n);
    free(text);
    events_free(&e);
    // Without include_usage there is no usage at all.
    e = ask_stream(COMPLETIONS, "{\"prompt\":\"x\",\"stream\":true}");
    for (size_t i = 0; i < e.n; i++)
        assert_null(json_get(json_root(e.docs[i]), "usage"));
    assert_true(e.done);
    events_free(&e);
}

// ---- Stop strings ----
static void check_stop(const char *says, const char *stop, const char *expected,
                       const char *reason) {
    char body[512];
    script_text(says);
    snprintf(body, sizeof body, "{\"prompt\":\"x\",\"max_tokens\":100,\"stop\":%s}", stop);
    reply r = ask("POST", COMPLETIONS, body);
    assert_string_equal(text_at(json_root(r.doc), "choices.0.text"), expected);
    assert_string_equal(text_at(json_root(r.doc), "choices.0.finish_reason"), reason);
    reply_free(&r);
    snprintf(body, sizeof body, "{\"prompt\":\"x\",\"max_tokens\":100,\"stream\":true,\"stop\":%s}",
             stop);
    events e = ask_stream(COMPLETIONS, body);
    const char *finish;
    char *text = join_choice(&e, 0, &finish);
    assert_string_equal(text, expected);
    assert_string_equal(finish, reason);
    assert_true(e.done);
    free(text);
    events_free(&e);
}

static void test_stop_strings(void **state) {
    (void)state;
    check_stop("one two three four", "\" thr\"", "one two", "stop");
    check_stop("one two three four", "[\"zzz\",\"ree fo\",\"our\"]", "one two th", "stop");
    check_stop("one two three four", "\"one\"", "", "stop");
    check_stop("one two three four", "\"fourteen\"", "one two three four",
               "stop"); // by its end token
    check_stop("one two three four", "[]", "one two three four", "stop");
    check_stop("aaaaab", "\"aab\"", "aaa", "stop");
    check_stop("x\\ny\xF0\x9F\x98\x80z", "\"\\ud83d\\ude00\"", "x\\ny", "stop");
    check_stop("abc\xF0\x9F\x98\x80", "[\"c\\ud83d\\ude01\"]", "abc\xF0\x9F\x98\x80", "stop");
    size_t n = 0;
    for (size_t i = 0; i < fx->bundle->n_requests; i++)
        n += fx->bundle->requests[i].cancelled;
    assert_true(n >= 8); // the worker is told at once
}

// A stop string before min_tokens does not count.
static void test_stop_after_min_tokens(void **state) {
    (void)state;
    script_text("one two one two");
    reply r = ask("POST", COMPLETIONS, "{\"prompt\":\"x\",\"min_tokens\":4,\"stop\":\"one\"}");
    assert_string_equal(text_at(json_root(r.doc), "choices.0.finish_reason"), "stop");
    assert_true(strlen(text_at(json_root(r.doc), "choices.0.text")) >= 4);
    assert_memory_equal(text_at(json_root(r.doc), "choices.0.text"), "one ", 4);
    reply_free(&r);
}

static void test_stop_token_ids(void **state) {
    (void)state;
    script_text("abc");
    int32_t second = fx->script.ids[fx->script.n - 2];
    char body[128];
    snprintf(body, sizeof body, "{\"prompt\":\"x\",\"stop_token_ids\":[%d]}", second);
    reply r = ask("POST", COMPLETIONS, body);
    assert_string_equal(text_at(json_root(r.doc), "choices.0.finish_reason"), "stop");
    assert_null(strchr(text_at(json_root(r.doc), "choices.0.text"), 'c'));
    reply_free(&r);
}

static void test_utf8_across_tokens(void **state) {
    (void)state;
    const char *says =
        "caf\xC3\xA9 \xF0\x9F\x91\xA9\xE2\x80\x8D\xF0\x9F\x92\xBB \xE6\xBC\xA2\xE5\xAD\x97";
    script_text(says);
    assert_true(fx->script.n > 10); // the small vocabulary has no such tokens
    events e = ask_stream(CHAT, "{" HELLO ",\"stream\":true}");
    for (size_t i = 0; i < e.n; i++) // json_parse has refused broken UTF-8 already
        assert_null(
            strstr(text_at(json_root(e.docs[i]), "choices.0.delta.content"), "\xEF\xBF\xBD"));
    char *text = join_choice(&e, 0, NULL);
    assert_string_equal(text, says);
    free(text);
    events_free(&e);
    // Cut off inside a character: the rest becomes one replacement character.
    fx->bundle->n_script = 4;
    assert_int_equal(fx->script.n > 4, 1);
    e = ask_stream(CHAT, "{" HELLO ",\"stream\":true}");
    text = join_choice(&e, 0, NULL);
    assert_true(utf8_is_valid(text, strlen(text)));
    free(text);
    events_free(&e);
}

static void test_n_and_lists(void **state) {
    (void)state;
    script_text("so");
    reply r = ask("POST", COMPLETIONS,
                  "{\"prompt\":[\"a\",\"b b\"],\"n\":3,\"seed\":40,\"temperature\":0.5}");
    const json_value *root = json_root(r.doc);
    assert_int_equal(json_count(json_get(root, "choices")), 6);
    assert_int_equal(fx->bundle->n_requests, 6);
    for (size_t i = 0; i < 6; i++) {
        char path[32];
        snprintf(path, sizeof path, "choices.%zu.index", i);
        assert_int_equal(int_at(root, path), i);
        assert_int_equal(submitted(i)->params.seed, 40 + i % 3);
    }
    assert_int_equal(int_at(root, "usage.prompt_tokens"),
                     submitted(0)->n_prompt + submitted(3)->n_prompt);
    assert_int_equal(int_at(root, "usage.completion_tokens"), 6 * fx->script.n);
    reply_free(&r);
    r = ask("POST", COMPLETIONS, "{\"prompt\":[[5,6,7],[8]]}");
    assert_int_equal(json_count(json_get(json_root(r.doc), "choices")), 2);
    assert_int_equal(submitted(6)->n_prompt, 3);
    assert_int_equal(submitted(6)->prompt[1], 6);
    assert_int_equal(submitted(7)->prompt[0], 8);
    assert_true(submitted(6)->params.seed != 0);
    reply_free(&r);
    events e = ask_stream(CHAT, "{" HELLO ",\"stream\":true,\"n\":2}");
    for (int64_t i = 0; i < 2; i++) {
        const char *finish;
        char *text = join_choice(&e, i, &finish);
        assert_string_equal(text, "so");
        assert_string_equal(finish, "stop");
        free(text);
    }
    events_free(&e);
}

// ---- Echo and logprobs ----
static void test_echo(void **state) {
    (void)state;
    script_text(" world");
    reply r = ask("POST", COMPLETIONS, "{\"prompt\":\"hello\",\"echo\":true,\"stop\":\"hello\"}");
    assert_string_equal(text_at(json_root(r.doc), "choices.0.text"), "hello world");
    assert_false(submitted(0)->params.prompt_logprobs);
    reply_free(&r);
    r = ask("POST", COMPLETIONS, "{\"prompt\":\"hello\",\"echo\":true,\"max_tokens\":0}");
    assert_string_equal(text_at(json_root(r.doc), "choices.0.text"), "hello");
    assert_string_equal(text_at(json_root(r.doc), "choices.0.finish_reason"), "length");
    assert_int_equal(int_at(json_root(r.doc), "usage.completion_tokens"), 0);
    assert_int_equal(fx->bundle->n_requests, 1); // nothing to compute
    reply_free(&r);
    events e = ask_stream(COMPLETIONS, "{\"prompt\":\"hello\",\"echo\":true,\"stream\":true}");
    char *text = join_choice(&e, 0, NULL);
    assert_string_equal(text, "hello world");
    free(text);
    events_free(&e);
    e = ask_stream(COMPLETIONS,
                   "{\"prompt\":\"hello\",\"echo\":true,\"stream\":true,\"max_tokens\":0}");
    text = join_choice(&e, 0, NULL);
    assert_string_equal(text, "hello");
    free(text);
    events_free(&e);
}

// As lm-evaluation-harness scores: token ids, echo, logprobs, max_tokens 0 or 1.
static void test_scoring(void **state) {
    (void)state;
    script_text("z");
    for (int n_new = 0; n_new < 2; n_new++) {
        char body[160];
        snprintf(body, sizeof body,
                 "{\"prompt\":[40,41,42],\"echo\":true,\"logprobs\":1,"
                 "\"max_tokens\":%d}",
                 n_new);
        reply r = ask("POST", COMPLETIONS, body);
        const json_value *logprobs = at(json_root(r.doc), "choices.0.logprobs");
        static const char *const arrays[] = {"tokens", "token_logprobs", "top_logprobs",
                                             "text_offset"};
        for (size_t i = 0; i < 4; i++)
            assert_int_equal(json_count(json_get(logprobs, arrays[i])), 3 + n_new);
        assert_true(json_is_null(at(logprobs, "token_logprobs.0")));
        assert_true(json_is_null(at(logprobs, "top_logprobs.0")));
        assert_true(double_at(logprobs, "token_logprobs.1") == -0.5);
        assert_int_equal(json_count(at(logprobs, "top_logprobs.1")), 1);
        assert_int_equal(int_at(logprobs, "text_offset.0"), 0);
        assert_int_equal(int_at(logprobs, "text_offset.2"), 2);
        assert_string_equal(text_at(json_root(r.doc), "choices.0.finish_reason"), "length");
        assert_int_equal(submitted((size_t)n_new)->params.max_tokens, n_new);
        assert_true(submitted((size_t)n_new)->params.prompt_logprobs);
        reply_free(&r);
    }
}

static void test_completion_logprobs(void **state) {
    (void)state;
    script_text("ab\xC3\xA9");
    reply r = ask("POST", COMPLETIONS, "{\"prompt\":\"x\",\"logprobs\":3}");
    const json_value *logprobs = at(json_root(r.doc), "choices.0.logprobs");
    assert_int_equal(submitted(0)->params.logprobs, 3);
    assert_int_equal(json_count(json_get(logprobs, "tokens")), fx->script.n);
    assert_int_equal(json_count(at(logprobs, "top_logprobs.0")), 3);
    assert_string_equal(text_at(logprobs, "tokens.0"), "ab");
    reply_free(&r);
    events e = ask_stream(COMPLETIONS, "{\"prompt\":\"x\",\"logprobs\":0,\"stream\":true}");
    size_t n = 0;
    for (size_t i = 0; i < e.n; i++) {
        const json_value *part = at(json_root(e.docs[i]), "choices.0.logprobs");
        n += json_count(json_get(part, "tokens"));
        assert_int_equal(json_count(json_get(part, "tokens")),
                         json_count(json_get(part, "token_logprobs")));
    }
    assert_int_equal(n, fx->script.n);
    events_free(&e);
    r = ask("POST", COMPLETIONS, "{\"prompt\":\"x\"}");
    assert_true(json_is_null(at(json_root(r.doc), "choices.0.logprobs")));
    assert_non_null(at(json_root(r.doc), "choices.0.logprobs"));
    reply_free(&r);
}

static void test_chat_logprobs(void **state) {
    (void)state;
    script_text("\xC3\xA9");
    assert_int_equal(fx->script.n, 2);
    int32_t half[] = {tokenizer_token_id(fx->tokenizer, "\xC3\x83"), fx->eos}; // byte 0xC3 alone
    if (half[0] >= 0)
        script_ids(half, 2);
    reply r = ask("POST", CHAT, "{" HELLO ",\"logprobs\":true,\"top_logprobs\":2}");
    const json_value *content = at(json_root(r.doc), "choices.0.logprobs.content");
    assert_int_equal(json_count(content), 2);
    assert_true(double_at(content, "0.logprob") == -0.5);
    assert_int_equal(int_at(content, "0.bytes.0"), 0xC3);
    assert_int_equal(json_count(at(content, "0.top_logprobs")), 2);
    assert_true(double_at(content, "0.top_logprobs.1.logprob") == -1.5);
    if (half[0] >= 0)
        assert_string_equal(text_at(content, "0.token"), "bytes:\\xc3");
    reply_free(&r);
    r = ask("POST", CHAT, "{" HELLO ",\"logprobs\":true}");
    assert_int_equal(submitted(1)->params.logprobs, 0);
    content = at(json_root(r.doc), "choices.0.logprobs.content");
    assert_int_equal(json_count(at(content, "0.top_logprobs")), 0);
    assert_true(json_is_array(at(content, "0.top_logprobs")));
    reply_free(&r);
    r = ask("POST", CHAT, "{" HELLO ",\"logprobs\":false}");
    assert_int_equal(submitted(2)->params.logprobs, -1);
    reply_free(&r);
}

// ---- Ends ----
static void stop_stepping(void) {
    uv_idle_stop(&fx->bundle->idle);
}

static void wait_requests(size_t n) {
    for (int i = 0; i < 20000 && fx->bundle->n_requests < n; i++)
        client_turn(&fx->loop);
    assert_int_equal(fx->bundle->n_requests, n);
}

static void wait_dead(void) {
    for (int i = 0; i < 20000 && fake_n_live(fx->bundle); i++)
        client_turn(&fx->loop);
    assert_int_equal(fake_n_live(fx->bundle), 0);
}

static void test_client_gone(void **state) {
    (void)state;
    static const char *const bodies[] = {
        "{\"prompt\":\"x\",\"n\":3}",
        "{\"prompt\":\"x\",\"n\":3,\"stream\":true}",
        "{\"prompt\":\"x\",\"n\":3,\"stream\":true,\"max_tokens\":3}",
    };
    int32_t many[100];
    for (int i = 0; i < 100; i++)
        many[i] = 70;
    script_ids(many, 100);
    stop_stepping();
    for (size_t i = 0; i < 6; i++) {
        client *c = begin("POST", COMPLETIONS, "", bodies[i / 2]);
        wait_requests(3 * i + 3);
        assert_int_equal(api_in_flight(fx->api), 1);
        if (i >= 2) // in the stream, after a first token
            fake_step(fx->bundle);
        if (i >= 4) { // one choice has ended already
            fake_step_one(fx->bundle, 3 * i);
            fake_step_one(fx->bundle, 3 * i);
        }
        if (i % 2)
            client_reset(c);
        else
            client_close(c);
        wait_dead();
        for (size_t k = 3 * i; k < 3 * i + 3; k++)
            assert_int_equal(submitted(k)->cancelled, i < 4 || k > 3 * i);
        assert_int_equal(api_in_flight(fx->api), 0);
    }
    reply r = ask("GET", "/metrics", "");
    assert_non_null(strstr(r.body,
                           "tandem_request_success_total{model_name=\"tiny-moe\",engine=\"0\","
                           "finished_reason=\"abort\"} 16\n"));
    assert_non_null(strstr(r.body, "finished_reason=\"length\"} 2\n"));
    assert_non_null(strstr(r.body, "status=\"499\"} 6\n"));
    reply_free(&r);
}

static void test_bundle_errors(void **state) {
    (void)state;
    static const struct {
        int rc, status;
        const char *code;
    } cases[] = {
        {E_FULL, 503, "overloaded"},
        {E_STATE, 503, "unavailable"},
        {E_TOO_LARGE, 400, "context_length_exceeded"},
        {E_IO, 500, NULL},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        fx->bundle->submit_rc = cases[i].rc;
        reply r = ask("POST", COMPLETIONS, "{\"prompt\":\"x\"}");
        check_error(&r, cases[i].status, NULL, cases[i].code);
        assert_int_equal(strstr(r.head, "Retry-After: 1\r\n") != NULL, cases[i].status == 503);
        reply_free(&r);
    }
    assert_int_equal(api_in_flight(fx->api), 0);
}

static void test_error_before_first_token(void **state) {
    (void)state;
    stop_stepping();
    client *c = begin("POST", COMPLETIONS, "", "{\"prompt\":\"x\",\"stream\":true,\"n\":2}");
    wait_requests(2);
    fake_fail(fx->bundle, 0, E_IO, "the worker \"a\" said\nno");
    reply r = finish(c);
    check_error(&r, 500, NULL, NULL);
    assert_true(submitted(1)->cancelled);
    reply_free(&r);
}

static void test_error_in_stream(void **state) {
    (void)state;
    script_text("one two three");
    stop_stepping();
    client *c = begin("POST", CHAT, "", "{" HELLO ",\"stream\":true,\"n\":2}");
    wait_requests(2);
    fake_step(fx->bundle);
    fake_fail(fx->bundle, 1, E_CLOSED, "gone");
    reply r = finish(c);
    assert_int_equal(r.status, 200);
    events e = read_events(&r);
    assert_true(e.done);
    assert_string_equal(text_at(json_root(e.docs[e.n - 1]), "error.message"), "gone");
    assert_true(submitted(0)->cancelled);
    events_free(&e);
}

static void test_abort_and_error_events(void **state) {
    (void)state;
    script_text("one two three");
    stop_stepping();
    client *c = begin("POST", COMPLETIONS, "", "{\"prompt\":\"x\"}");
    wait_requests(1);
    fake_request *sent = &fx->bundle->requests[0];
    fake_step(fx->bundle);
    token_event event = {.request = 1, .id = -1, .n_top = -1, .finish = FINISH_ABORT};
    sent->live = false;
    sent->on_token(sent->user, &event);
    reply r = finish(c);
    assert_string_equal(text_at(json_root(r.doc), "choices.0.finish_reason"), "abort");
    assert_string_equal(text_at(json_root(r.doc), "choices.0.text"), "one");
    assert_int_equal(int_at(json_root(r.doc), "usage.completion_tokens"), 1);
    reply_free(&r);
    c = begin("POST", COMPLETIONS, "", "{\"prompt\":\"x\"}");
    wait_requests(2);
    event.finish = FINISH_ERROR;
    sent = &fx->bundle->requests[1];
    sent->live = false;
    sent->on_token(sent->user, &event);
    r = finish(c);
    check_error(&r, 500, NULL, NULL);
    reply_free(&r);
}

static void test_keep_alive_comments(void **state) {
    (void)state;
    fixture_close_api();
    fixture_open_api(NULL, 20);
    script_text("late");
    stop_stepping();
    client *c = begin("POST", CHAT, "", "{" HELLO ",\"stream\":true}");
    assert_non_null(client_wait(c, ":\n\n"));
    const char *first = strstr(c->in, ":\n\n");
    assert_non_null(client_wait_from(c, (size_t)(first - c->in) + 3, ":\n\n"));
    assert_null(strstr(c->in, "assistant")); // no role before the first token
    while (fake_step(fx->bundle))
        client_turn(&fx->loop);
    reply r = finish(c);
    events e = read_events(&r);
    char *text = join_choice(&e, 0, NULL);
    assert_string_equal(text, "late");
    free(text);
    events_free(&e);
}

static void test_drain(void **state) {
    (void)state;
    script_text("one two three");
    stop_stepping();
    client *c = begin("POST", CHAT, "", "{" HELLO ",\"stream\":true}");
    wait_requests(1);
    fake_step(fx->bundle);
    api_drain(fx->api);
    refused(COMPLETIONS, "{\"prompt\":\"x\"}", 503, NULL, "draining");
    reply r = ask("GET", "/ready", "");
    check_error(&r, 503, NULL, "draining");
    reply_free(&r);
    r = ask("GET", "/health", "");
    assert_int_equal(r.status, 200);
    reply_free(&r);
    api_close(fx->api, 5000, fixture_on_closed, fx);
    while (fake_step(fx->bundle))
        client_turn(&fx->loop);
    r = finish(c);
    events e = read_events(&r);
    char *text = join_choice(&e, 0, NULL);
    assert_string_equal(text, "one two three");
    assert_true(e.done);
    free(text);
    events_free(&e);
}

// Past the grace a stream still has an end: an error and [DONE].
static void test_close_cancels(void **state) {
    (void)state;
    script_text("one two three");
    stop_stepping();
    client *stream = begin("POST", CHAT, "", "{" HELLO ",\"stream\":true}");
    wait_requests(1);
    client *whole = begin("POST", CHAT, "", "{" HELLO "}");
    wait_requests(2);
    fake_step(fx->bundle);
    api_close(fx->api, 10, fixture_on_closed, fx);
    wait_dead();
    reply r = finish(whole);
    check_error(&r, 503, NULL, "draining");
    reply_free(&r);
    r = finish(stream);
    events e = read_events(&r);
    assert_true(e.done);
    assert_string_equal(text_at(json_root(e.docs[e.n - 1]), "error.code"), "draining");
    events_free(&e);
}

int main(void) {
    signal(SIGPIPE, SIG_IGN);
    const struct CMUnitTest tests[] = {
        API_TEST(test_completion),
        API_TEST(test_chat),
        API_TEST(test_chat_stream),
        API_TEST(test_completion_stream),
        API_TEST(test_stop_strings),
        API_TEST(test_stop_after_min_tokens),
        API_TEST(test_stop_token_ids),
        API_TEST(test_utf8_across_tokens),
        API_TEST(test_n_and_lists),
        API_TEST(test_echo),
        API_TEST(test_scoring),
        API_TEST(test_completion_logprobs),
        API_TEST(test_chat_logprobs),
        API_TEST(test_client_gone),
        API_TEST(test_bundle_errors),
        API_TEST(test_error_before_first_token),
        API_TEST(test_error_in_stream),
        API_TEST(test_abort_and_error_events),
        API_TEST(test_keep_alive_comments),
        API_TEST(test_drain),
        API_TEST(test_close_cancels),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
