// The API's routes, keys, parameters and refusals: every field checked, hostile JSON included.
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <cmocka.h>

#include "tests/support/api_fixture.h"

#include <signal.h>

#define COMPLETIONS "/v1/completions"
#define CHAT "/v1/chat/completions"
#define HELLO "\"messages\":[{\"role\":\"user\",\"content\":\"hello\"}]"

// ---- Routes ----
static void test_models(void **state) {
    (void)state;
    reply r = ask("GET", "/v1/models", "");
    const json_value *root = json_root(r.doc);
    assert_string_equal(text_at(root, "object"), "list");
    assert_string_equal(text_at(root, "data.0.id"), "tiny-moe");
    assert_string_equal(text_at(root, "data.0.object"), "model");
    assert_string_equal(text_at(root, "data.0.owned_by"), "tandem");
    assert_string_equal(text_at(root, "data.0.root"), "/models/org/tiny-moe/");
    assert_int_equal(int_at(root, "data.0.max_model_len"), API_CONTEXT);
    assert_true(int_at(root, "data.0.created") > 0);
    reply_free(&r);
    r = ask("GET", "/v1/models/tiny-moe", "");
    assert_string_equal(text_at(json_root(r.doc), "id"), "tiny-moe");
    reply_free(&r);
    r = ask("GET", "/v1/models/org%2Fother", "");
    check_error(&r, 404, "model", "model_not_found");
    assert_non_null(strstr(r.body, "org/other"));
    reply_free(&r);
}

static void test_life_routes(void **state) {
    (void)state;
    static const struct {
        bundle_state state;
        int health, ready;
        const char *code;
    } cases[] = {
        {BUNDLE_STARTING, 200, 503, "loading"},
        {BUNDLE_READY, 200, 200, NULL},
        {BUNDLE_DRAINING, 200, 503, "draining"},
        {BUNDLE_FAILED, 503, 503, "failed"},
    };
    script_text("yes");
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        fx->bundle->state = cases[i].state;
        reply r = ask("GET", "/health", "");
        assert_int_equal(r.status, cases[i].health);
        reply_free(&r);
        r = ask("GET", "/ready", "");
        assert_int_equal(r.status, cases[i].ready);
        reply_free(&r);
        r = ask("POST", COMPLETIONS, "{\"prompt\":\"x\"}");
        assert_int_equal(r.status, cases[i].ready);
        if (cases[i].code) {
            check_error(&r, 503, NULL, cases[i].code);
            assert_non_null(strstr(r.head, "Retry-After: 1\r\n"));
        }
        reply_free(&r);
    }
    reply r = ask("GET", "/version", "");
    assert_string_equal(text_at(json_root(r.doc), "version"), TANDEM_VERSION);
    reply_free(&r);
}

static void test_metrics(void **state) {
    (void)state;
    script_text("yes");
    for (int i = 0; i < 3; i++) {
        reply r = ask("POST", COMPLETIONS, i < 2 ? "{\"prompt\":\"x\"}" : "{");
        reply_free(&r);
    }
    reply r = ask("GET", "/metrics", "");
#define LABELS "model_name=\"tiny-moe\",engine=\"0\""
    static const char *const lines[] = {
        "# TYPE tandem_num_requests_running gauge\n",
        "tandem_num_requests_running{" LABELS "} 0\n",
        "tandem_kv_cache_usage_perc{" LABELS "} 0.5\n",
        "tandem_prompt_tokens_total{" LABELS "} 2\n",
        "tandem_request_success_total{" LABELS ",finished_reason=\"stop\"} 2\n",
        "tandem_http_responses_total{" LABELS ",status=\"2xx\"} 2\n",
        "tandem_http_responses_total{" LABELS ",status=\"4xx\"} 1\n",
    };
    for (size_t i = 0; i < sizeof lines / sizeof lines[0]; i++)
        if (!strstr(r.body, lines[i]))
            fail_msg("no %s in %s", lines[i], r.body);
    assert_non_null(strstr(r.head, "Content-Type: text/plain; version=0.0.4"));
    reply_free(&r);
}

static void test_routing(void **state) {
    (void)state;
    refused("/v1/nothing", "{}", 404, NULL, "not_found");
    reply r = ask("GET", COMPLETIONS, "");
    check_error(&r, 405, NULL, NULL);
    assert_non_null(strstr(r.head, "Allow: POST, OPTIONS\r\n"));
    reply_free(&r);
    r = ask("DELETE", "/v1/models/tiny-moe", "");
    check_error(&r, 405, NULL, NULL);
    assert_non_null(strstr(r.head, "Allow: GET, HEAD, OPTIONS\r\n"));
    reply_free(&r);
    r = ask("OPTIONS", CHAT, "");
    assert_int_equal(r.status, 204);
    assert_non_null(strstr(r.head, "Allow: POST, OPTIONS\r\n"));
    reply_free(&r);
    client *c = begin("HEAD", "/v1/models", "", "");
    assert_true(client_wait_eof(c));
    assert_non_null(strstr(c->in, "HTTP/1.1 200"));
    assert_string_equal(strstr(c->in, "\r\n\r\n"), "\r\n\r\n");
    client_close(c);
}

static void test_api_key(void **state) {
    (void)state;
    fixture_close_api();
    fixture_open_api("secret-key", 0);
    script_text("yes");
    static const struct {
        const char *header;
        int status;
    } cases[] = {
        {"", 401},
        {"Authorization: Bearer secret-key\r\n", 200},
        {"Authorization: bearer  secret-key\r\n", 200},
        {"Authorization: Bearer secret-ke\r\n", 401},
        {"Authorization: Bearer secret-keyy\r\n", 401},
        {"Authorization: Bearer \r\n", 401},
        {"Authorization: secret-key\r\n", 401},
        {"Authorization: Basic secret-key\r\n", 401},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        reply r = finish(begin("POST", COMPLETIONS, cases[i].header, "{\"prompt\":\"x\"}"));
        assert_int_equal(r.status, cases[i].status);
        if (r.status == 401) {
            check_error(&r, 401, NULL, "invalid_api_key");
            assert_null(strstr(r.body, "secret"));
        }
        reply_free(&r);
    }
    static const char *const closed[] = {"/v1/models", "/v1/models/tiny-moe"}, *const open[] = {
                                                                                   "/health",
                                                                                   "/ready",
                                                                                   "/metrics",
                                                                                   "/version"};
    for (size_t i = 0; i < 2; i++) {
        reply r = ask("GET", closed[i], "");
        assert_int_equal(r.status, 401);
        reply_free(&r);
    }
    for (size_t i = 0; i < 4; i++) {
        reply r = ask("GET", open[i], "");
        assert_int_equal(r.status, 200);
        reply_free(&r);
    }
    refused("/tokenize", "{\"prompt\":\"x\"}", 401, NULL, "invalid_api_key");
}

static void test_tokenize(void **state) {
    (void)state;
    token_ids ids = {0};
    const char *text = "hello w\xC3\xB6rld";
    tokenizer_encode(fx->tokenizer, text, strlen(text), true, true, &ids, NULL);
    char body[512] = "{\"tokens\":[";
    reply r = ask("POST", "/tokenize",
                  "{\"prompt\":\"hello w\xC3\xB6rld\",\"return_token_strs\":true,\"model\":null}");
    const json_value *root = json_root(r.doc);
    assert_int_equal(int_at(root, "count"), ids.n);
    assert_int_equal(int_at(root, "max_model_len"), API_CONTEXT);
    assert_int_equal(json_count(json_get(root, "token_strs")), ids.n);
    for (size_t i = 0; i < ids.n; i++) {
        char path[32];
        snprintf(path, sizeof path, "tokens.%zu", i);
        assert_int_equal(int_at(root, path), ids.ids[i]);
        snprintf(body + strlen(body), sizeof body - strlen(body), "%s%d", i ? "," : "", ids.ids[i]);
    }
    strcat(body, "]}");
    reply_free(&r);
    r = ask("POST", "/detokenize", body);
    assert_string_equal(text_at(json_root(r.doc), "prompt"), text);
    reply_free(&r);
    r = ask("POST", "/tokenize", "{" HELLO "}");
    const chat_message message = {"user", "hello", 5};
    ids.n = 0;
    chat_encode(fx->chat, fx->tokenizer, &message, 1, true, &ids, NULL);
    assert_int_equal(int_at(json_root(r.doc), "count"), ids.n);
    reply_free(&r);
    token_ids_free(&ids);
    refused("/tokenize", "{}", 400, "prompt", NULL);
    refused("/tokenize", "{\"prompt\":5}", 400, "prompt", NULL);
    refused("/tokenize", "{\"prompt\":\"x\",\"add_special_tokens\":5}", 400, "add_special_tokens",
            NULL);
    refused("/tokenize", "{\"model\":\"no\",\"prompt\":\"x\"}", 404, "model", "model_not_found");
    refused("/detokenize", "{}", 400, "tokens", NULL);
    refused("/detokenize", "{\"tokens\":[-1]}", 400, "tokens", NULL);
    refused("/detokenize", "{\"tokens\":[99999999]}", 400, "tokens", NULL);
    refused("/detokenize", "{\"tokens\":[\"a\"]}", 400, "tokens", NULL);
}

// ---- Parameters ----
static void test_params_reach_the_bundle(void **state) {
    (void)state;
    script_text("yes");
    reply r =
        ask("POST", COMPLETIONS,
            "{\"prompt\":\"x\",\"temperature\":0.25,\"top_p\":0.5,\"top_k\":7,\"min_p\":0.125,"
            "\"presence_penalty\":1.5,\"frequency_penalty\":-2,\"repetition_penalty\":1.25,"
            "\"seed\":-3,\"logit_bias\":{\"5\":-100,\"17\":2.5},\"logprobs\":20,\"n\":1,"
            "\"min_tokens\":1,\"ignore_eos\":true,\"user\":\"me\",\"priority\":4,"
            "\"max_tokens\":9,\"stop_token_ids\":[3,4,3],\"best_of\":1,\"suffix\":\"\","
            "\"tools\":[],\"response_format\":{\"type\":\"text\"},\"unknown\":{\"a\":1}}");
    assert_int_equal(r.status, 200);
    const sampling_params *p = &submitted(0)->params;
    assert_true(p->temperature == 0.25f && p->top_p == 0.5f && p->top_k == 7);
    assert_true(p->min_p == 0.125f && p->presence_penalty == 1.5f && p->frequency_penalty == -2);
    assert_true(p->repetition_penalty == 1.25f && p->seed == (uint64_t)-3);
    assert_int_equal(p->n_logit_bias, 2);
    assert_int_equal(p->logit_bias[1].id, 17);
    assert_true(p->logit_bias[0].bias == -100 && p->logit_bias[1].bias == 2.5f);
    assert_int_equal(p->logprobs, 20);
    assert_int_equal(p->min_tokens, 1);
    assert_int_equal(p->max_tokens, 9);
    assert_int_equal(p->n_stop_ids, 2); // ignore_eos: the request's own alone
    assert_int_equal(p->stop_ids[1], 4);
    reply_free(&r);
}

static void test_seeds_of_64_bits(void **state) {
    (void)state;
    script_text("yes");
    static const struct {
        const char *body;
        uint64_t seed;
    } cases[] = {
        {"{\"prompt\":\"x\",\"seed\":9223372036854775807}", INT64_MAX},
        {"{\"prompt\":\"x\",\"seed\":-9223372036854775808}", (uint64_t)INT64_MIN},
        {"{\"prompt\":\"x\",\"seed\":1152921504606846976}", UINT64_C(1) << 60},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        reply r = ask("POST", COMPLETIONS, cases[i].body);
        assert_int_equal(r.status, 200);
        assert_true(submitted(i)->params.seed == cases[i].seed);
        reply_free(&r);
    }
}

static void test_defaults_and_nulls(void **state) {
    (void)state;
    script_text("yes");
    static const char *const bodies[] = {
        "{\"prompt\":\"x\"}",
        "{\"prompt\":\"x\",\"model\":null,\"temperature\":null,\"top_p\":null,\"top_k\":null,"
        "\"min_p\":null,\"presence_penalty\":null,\"frequency_penalty\":null,"
        "\"repetition_penalty\":null,\"seed\":null,\"stop\":null,\"logit_bias\":null,"
        "\"logprobs\":null,\"n\":null,\"min_tokens\":null,\"ignore_eos\":null,\"stream\":null,"
        "\"stream_options\":null,\"user\":null,\"priority\":null,\"max_tokens\":null,\"echo\":null,"
        "\"stop_token_ids\":null,\"best_of\":null,\"suffix\":null,\"tools\":null,"
        "\"response_format\":null,\"add_special_tokens\":null,\"skip_special_tokens\":null}",
    };
    for (size_t i = 0; i < 2; i++) {
        reply r = ask("POST", COMPLETIONS, bodies[i]);
        if (r.status != 200)
            fail_msg("%s", r.body);
        const sampling_params *p = &submitted(i)->params;
        // generation_config.json of the fixture's model, else neutral.
        assert_true(p->temperature == 0.6f && p->top_p == 0.9f && p->top_k == 20);
        assert_true(p->repetition_penalty == 1 && p->min_p == 0 && p->presence_penalty == 0);
        assert_int_equal(p->max_tokens, 16);
        assert_int_equal(p->logprobs, -1);
        assert_int_equal(p->n_stop_ids, 1);
        assert_int_equal(p->stop_ids[0], fx->eos);
        reply_free(&r);
    }
    assert_true(submitted(0)->params.seed != submitted(1)->params.seed);
    reply r = ask("POST", CHAT,
                  "{" HELLO ",\"max_tokens\":3,\"max_completion_tokens\":5,"
                  "\"top_k\":-1,\"temperature\":0}");
    assert_int_equal(submitted(2)->params.max_tokens, 5);
    assert_int_equal(submitted(2)->params.top_k, 0);
    assert_true(submitted(2)->params.temperature == 0);
    reply_free(&r);
    r = ask("POST", CHAT,
            "{" HELLO ",\"max_tokens\":null,\"max_completion_tokens\":null,"
            "\"logprobs\":null,\"top_logprobs\":null,\"tool_choice\":null}");
    assert_int_equal(r.status, 200);
    reply_free(&r);
}

static void test_refused_values(void **state) {
    (void)state;
    static const struct {
        const char *param, *value;
    } cases[] = {
        {"temperature", "-0.1"},
        {"temperature", "2.1"},
        {"temperature", "\"1\""},
        {"temperature", "1e999"},
        {"temperature", "[]"},
        {"temperature", "true"},
        {"top_p", "0"},
        {"top_p", "1.01"},
        {"top_p", "-1"},
        {"top_p", "1e-60"},
        {"min_p", "-0.1"},
        {"min_p", "2"},
        {"top_k", "-2"},
        {"top_k", "1.5"},
        {"top_k", "1e30"},
        {"top_k", "9007199254740993"},
        {"presence_penalty", "2.5"},
        {"presence_penalty", "-3"},
        {"frequency_penalty", "\"x\""},
        {"repetition_penalty", "0"},
        {"repetition_penalty", "-1"},
        {"repetition_penalty", "11"},
        {"n", "0"},
        {"n", "17"},
        {"n", "-1"},
        {"n", "1.5"},
        {"n", "\"2\""},
        {"max_tokens", "0"},
        {"max_tokens", "-1"},
        {"max_tokens", "1e20"},
        {"max_tokens", "{}"},
        {"min_tokens", "-1"},
        {"min_tokens", "17"},
        {"min_tokens", "true"},
        {"ignore_eos", "1"},
        {"ignore_eos", "\"true\""},
        {"stream", "\"yes\""},
        {"stream", "0"},
        {"logprobs", "21"},
        {"logprobs", "-1"},
        {"logprobs", "true"},
        {"echo", "1"},
        {"seed", "1.5"},
        {"seed", "\"a\""},
        {"seed", "1e40"},
        {"seed", "18446744073709551616"},
        {"stop", "5"},
        {"stop", "[1]"},
        {"stop", "\"\""},
        {"stop", "[\"a\",\"\"]"},
        {"stop", "{}"},
        {"stop", "[\"1\",\"2\",\"3\",\"4\",\"5\",\"6\",\"7\",\"8\",\"9\",\"10\",\"11\",\"12\","
                 "\"13\",\"14\",\"15\",\"16\",\"17\"]"},
        {"stop_token_ids", "5"},
        {"stop_token_ids", "[-1]"},
        {"stop_token_ids", "[1.5]"},
        {"stop_token_ids", "[99999999]"},
        {"stop_token_ids", "[[1]]"},
        {"stop_token_ids", "[1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16]"},
        {"logit_bias", "[]"},
        {"logit_bias", "{\"a\":1}"},
        {"logit_bias", "{\"-1\":1}"},
        {"logit_bias", "{\"5\":101}"},
        {"logit_bias", "{\"5\":\"x\"}"},
        {"logit_bias", "{\"5\":null}"},
        {"logit_bias", "{\"99999999\":1}"},
        {"logit_bias", "{\"99999999999999999999\":1}"},
        {"logit_bias", "{\"\":1}"},
        {"logit_bias", "{\"5x\":1}"},
        {"stream_options", "{}"}, // without stream
        {"best_of", "2"},
        {"best_of", "\"x\""},
        {"suffix", "\"end\""},
        {"suffix", "5"},
        {"tools", "[{}]"},
        {"tools", "{}"},
        {"functions", "[{}]"},
        {"response_format", "{\"type\":\"json_object\"}"},
        {"response_format", "\"text\""},
        {"response_format", "{\"type\":5}"},
        {"response_format", "{}"},
        {"add_special_tokens", "1"},
        {"skip_special_tokens", "\"no\""},
        {"prompt", "5"},
        {"prompt", "{}"},
        {"prompt", "[]"},
        {"prompt", "\"\""},
        {"prompt", "[[]]"},
        {"prompt", "null"},
        {"prompt", "true"},
        {"prompt", "[\"a\",5]"},
        {"prompt", "[1,\"a\"]"},
        {"prompt", "[1,[2]]"},
        {"prompt", "[[1],[]]"},
        {"prompt", "[[1],{}]"},
        {"prompt", "[-1]"},
        {"prompt", "[1.5]"},
        {"prompt", "[99999999]"},
        {"prompt", "[null]"},
        {"prompt", "[[[1]]]"},
        {"model", "5"},
        {"model", "[\"tiny-moe\"]"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        char body[512];
        bool is_prompt = strcmp(cases[i].param, "prompt") == 0;
        snprintf(body, sizeof body, "{%s\"%s\":%s}", is_prompt ? "" : "\"prompt\":\"x\",",
                 cases[i].param, cases[i].value);
        reply r = ask("POST", COMPLETIONS, body);
        // What no JSON reader takes as a number has no parameter to name.
        bool not_json = r.status == 400 && strstr(r.body, "request body") != NULL;
        if (not_json && strcmp(cases[i].value, "1e999") == 0) {
            reply_free(&r);
            continue;
        }
        if (r.status != 400)
            print_error("%s\n", body);
        check_error(&r, 400, cases[i].param, NULL);
        reply_free(&r);
    }
    assert_int_equal(fx->bundle->n_requests, 0);
    refused(COMPLETIONS, "{\"prompt\":\"x\",\"model\":\"other\"}", 404, "model", "model_not_found");
    refused(COMPLETIONS, "{\"prompt\":\"x\",\"stream\":true,\"stream_options\":5}", 400,
            "stream_options", NULL);
    refused(COMPLETIONS,
            "{\"prompt\":\"x\",\"stream\":true,\"stream_options\":"
            "{\"include_usage\":5}}",
            400, "stream_options", NULL);
}

static void test_refused_chats(void **state) {
    (void)state;
    static const struct {
        const char *param, *body;
    } cases[] = {
        {"messages", "{}"},
        {"messages", "{\"messages\":null}"},
        {"messages", "{\"messages\":[]}"},
        {"messages", "{\"messages\":\"hi\"}"},
        {"messages", "{\"messages\":[\"hi\"]}"},
        {"messages", "{\"messages\":[null]}"},
        {"messages", "{\"messages\":[{\"content\":\"hi\"}]}"},
        {"messages", "{\"messages\":[{\"role\":5,\"content\":\"hi\"}]}"},
        {"messages", "{\"messages\":[{\"role\":\"wizard\",\"content\":\"hi\"}]}"},
        {"messages[0].content", "{\"messages\":[{\"role\":\"user\"}]}"},
        {"messages[0].content", "{\"messages\":[{\"role\":\"user\",\"content\":null}]}"},
        {"messages[0].content", "{\"messages\":[{\"role\":\"user\",\"content\":{}}]}"},
        {"messages[0].content", "{\"messages\":[{\"role\":\"user\",\"content\":[\"hi\"]}]}"},
        {"messages[1].content",
         "{\"messages\":[{\"role\":\"user\",\"content\":\"a\"},{\"role\":"
         "\"user\",\"content\":[{\"type\":\"image_url\",\"image_url\":{\"url\":\"x\"}}]}]}"},
        {"messages[0].content",
         "{\"messages\":[{\"role\":\"user\",\"content\":[{\"type\":\"text\"}]}]}"},
        {"messages",
         "{\"messages\":[{\"role\":\"assistant\",\"content\":null,\"tool_calls\":[{}]}]}"},
        {"logprobs", "{" HELLO ",\"logprobs\":5}"},
        {"top_logprobs", "{" HELLO ",\"top_logprobs\":5}"},
        {"top_logprobs", "{" HELLO ",\"logprobs\":true,\"top_logprobs\":21}"},
        {"max_completion_tokens", "{" HELLO ",\"max_completion_tokens\":0}"},
        {"max_tokens", "{" HELLO ",\"max_tokens\":0}"},
        {"add_generation_prompt", "{" HELLO ",\"add_generation_prompt\":5}"},
        {"tools", "{" HELLO ",\"tools\":[{\"type\":\"function\"}]}"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++)
        refused(CHAT, cases[i].body, 400, cases[i].param, NULL);
    assert_int_equal(fx->bundle->n_requests, 0);
}

static void test_hostile_json(void **state) {
    (void)state;
    static const char *const bodies[] = {
        "",
        "{",
        "}",
        "null",
        "[]",
        "5",
        "\"x\"",
        "{\"prompt\":}",
        "{\"prompt\":\"x\"} trailing",
        "{\"prompt\":\"x\",}",
        "{'prompt':'x'}",
        "{\"prompt\":\"\xFF\"}",
        "{\"prompt\":\"\\ud800\"}",
        "{\"prompt\":\"a\\u0000b\"}",
        "{\"prompt\":\"a\nb\"}",
        "{\"prompt\":\"x\",\"prompt\":\"y\"}",
        "{\"prompt\":NaN}",
        "\xEF\xBB\xBF{}x",
        "{\"prompt\":\"x\\q\"}",
        "{\"temperature\":Infinity}",
    };
    for (size_t i = 0; i < sizeof bodies / sizeof bodies[0]; i++)
        refused(COMPLETIONS, bodies[i], 400, NULL, NULL);
    enum { DEEP = 100000 };
    char *deep = malloc(DEEP + 1);
    memset(deep, '[', DEEP);
    deep[DEEP] = '\0';
    refused(COMPLETIONS, deep, 400, NULL, NULL);
    free(deep);
    assert_int_equal(fx->bundle->n_requests, 0);
}

// What an error repeats of the request is short, whatever the request says.
static void test_errors_echo_little(void **state) {
    (void)state;
    enum { LONG = 50000 };
    char *body = malloc(LONG + 200), *name = malloc(LONG + 1);
    memset(name, 'm', LONG);
    name[LONG] = '\0';
    static const char *const forms[] = {
        "{\"prompt\":\"x\",\"model\":\"%s\"}",
        "{\"prompt\":\"x\",\"logit_bias\":{\"%s\":1}}",
        "{\"prompt\":\"x\",\"stop\":\"%s\"}",
        "{\"messages\":[{\"role\":\"%s\",\"content\":\"\"}]}",
        "{\"prompt\":\"x\" %s}",
        "{\"prompt\":\"x\",\"%s\":1,\"n\":0}",
    };
    for (size_t i = 0; i < sizeof forms / sizeof forms[0]; i++) {
        sprintf(body, forms[i], name);
        reply r = ask("POST", i == 3 ? CHAT : COMPLETIONS, body);
        assert_in_range(r.status, 400, 404);
        assert_true(strlen(r.body) < 700);
        const char *run = strstr(r.body, "mmm");
        assert_true(!run || strspn(run, "m") <= 200);
        reply_free(&r);
    }
    free(name);
    free(body);
}

static void test_context_limits(void **state) {
    (void)state;
    script_text("yes");
    char body[4096] = "{\"prompt\":[1";
    for (int i = 1; i < API_CONTEXT - 5; i++)
        strcat(body, ",1");
    size_t n = strlen(body);
    strcpy(body + n, "],\"max_tokens\":5}"); // just fits
    reply r = ask("POST", COMPLETIONS, body);
    assert_int_equal(r.status, 200);
    reply_free(&r);
    strcpy(body + n, "]}"); // the default of 16 shrinks to what is left
    r = ask("POST", COMPLETIONS, body);
    assert_int_equal(r.status, 200);
    assert_int_equal(submitted(1)->params.max_tokens, 5);
    reply_free(&r);
    strcpy(body + n, "],\"max_tokens\":6}");
    r = ask("POST", COMPLETIONS, body);
    check_error(&r, 400, "prompt", "context_length_exceeded");
    assert_non_null(strstr(r.body, "200 tokens"));
    reply_free(&r);
    strcpy(body + n, ",1,1,1,1,1]}");
    refused(COMPLETIONS, body, 400, "prompt", "context_length_exceeded");
    strcpy(body + n, ",1,1,1,1,1],\"echo\":true,\"max_tokens\":0,\"logprobs\":1}"); // scoring fits
    r = ask("POST", COMPLETIONS, body);
    assert_int_equal(r.status, 200);
    reply_free(&r);
    // A text that cannot fit is refused before it is tokenized.
    enum { LONG = 1000000 };
    char *big = malloc(LONG + 100);
    sprintf(big, "{\"prompt\":\"%0*d\"}", LONG, 0);
    r = ask("POST", COMPLETIONS, big);
    check_error(&r, 400, "prompt", "context_length_exceeded");
    assert_non_null(strstr(r.body, "bytes of text"));
    reply_free(&r);
    sprintf(big, "{\"messages\":[{\"role\":\"user\",\"content\":\"%0*d\"}]}", LONG, 0);
    refused(CHAT, big, 400, "messages", "context_length_exceeded");
    free(big);
    // Too many choices.
    char *many = malloc(100000);
    strcpy(many, "{\"n\":16,\"prompt\":[[1]");
    for (int i = 1; i < 17; i++)
        strcat(many, ",[1]");
    strcat(many, "]}");
    refused(COMPLETIONS, many, 400, "prompt", NULL);
    free(many);
}

static void test_model_without_chat(void **state) {
    (void)state;
    fixture_close_api();
    chat_format *chat = fx->chat;
    fx->chat = NULL;
    fixture_open_api(NULL, 0);
    fx->chat = chat;
    refused(CHAT, "{" HELLO "}", 400, "messages", NULL);
}

static void test_special_tokens_in_output(void **state) {
    (void)state;
    int32_t ids[] = {5, tokenizer_token_id(fx->tokenizer, "<|im_start|>"), 6};
    script_ids(ids, 3);
    reply r = ask("POST", COMPLETIONS, "{\"prompt\":\"x\"}");
    assert_null(strstr(r.body, "im_start"));
    reply_free(&r);
    r = ask("POST", COMPLETIONS, "{\"prompt\":\"x\",\"skip_special_tokens\":false}");
    assert_non_null(strstr(text_at(json_root(r.doc), "choices.0.text"), "<|im_start|>"));
    reply_free(&r);
}

int main(void) {
    signal(SIGPIPE, SIG_IGN);
    const struct CMUnitTest tests[] = {
        API_TEST(test_models),
        API_TEST(test_life_routes),
        API_TEST(test_metrics),
        API_TEST(test_routing),
        API_TEST(test_api_key),
        API_TEST(test_tokenize),
        API_TEST(test_params_reach_the_bundle),
        API_TEST(test_seeds_of_64_bits),
        API_TEST(test_defaults_and_nulls),
        API_TEST(test_refused_values),
        API_TEST(test_refused_chats),
        API_TEST(test_hostile_json),
        API_TEST(test_errors_echo_little),
        API_TEST(test_context_limits),
        API_TEST(test_model_without_chat),
        API_TEST(test_special_tokens_in_output),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
