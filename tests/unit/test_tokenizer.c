// Ids and texts equal to those of the tokenizers library, on fixtures that
// tests/fixtures/make_tokenizers.py writes; and what is refused.
#include "engine/tokenizer_internal.h"
#include "engine/utf8.h"

#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "tests/unit/token_fixtures.h"

static const char *const styles[] = {
    "gpt2",     "llama3",    "qwen2",           "cl100k", "o200k",
    "deepseek", "olmoe",     "starcoder",       "llama2", "llama2_normalized",
    "mistral",  "metaspace", "metaspace_first", "misc",
};
#define N_STYLES (sizeof styles / sizeof *styles)

// --- fixtures ------------------------------------------------------------------------------------

static json_lines read_style(const char *style, const char *file) {
    char sub[64];
    snprintf(sub, sizeof sub, "tokenizers/%s", style);
    return read_lines(sub, file);
}

// The bytes of a hex string of a row; NULL when the row has none. For free().
static char *hex_of(const json *row, const char *key, size_t *n) {
    const char *hex;
    if (!json_as_string(json_get(json_root(row), key), &hex))
        return NULL;
    *n = strlen(hex) / 2;
    char *bytes = malloc(*n + 1);
    for (size_t i = 0; i < *n; i++) {
        unsigned byte;
        assert_int_equal(sscanf(hex + 2 * i, "%2x", &byte), 1);
        bytes[i] = (char)byte;
    }
    bytes[*n] = '\0';
    return bytes;
}

static void check_text(const char *style, const char *name, const char *got, size_t n_got,
                       const char *want, size_t n_want) {
    if (n_got != n_want || memcmp(got, want, n_got) != 0)
        fail_msg("%s: case '%s': text '%.*s', expected '%.*s'", style, name, (int)n_got, got,
                 (int)n_want, want);
}

// --- against the library -------------------------------------------------------------------------

// Decodes as a whole and as a stream; both must be the expected text, each piece whole UTF-8.
static void check_decode(const tokenizer *t, const char *style, const char *name,
                         const token_ids *ids, bool skip, const char *want, size_t n_want) {
    char *whole = NULL;
    size_t n_whole, n;
    const char *piece;
    error err = {0};
    assert_int_equal(tokenizer_decode(t, ids->ids, ids->n, skip, &whole, &n_whole, &err), E_OK);
    check_text(style, name, whole, n_whole, want, n_want);
    detok *d;
    text_buf streamed = {0};
    assert_int_equal(detok_open(t, skip, &d), E_OK);
    for (size_t i = 0; i <= ids->n; i++) {
        int rc = i < ids->n ? detok_push(d, ids->ids[i], &piece, &n) : detok_flush(d, &piece, &n);
        assert_int_equal(rc, E_OK);
        assert_true(utf8_is_valid(piece, n));
        assert_int_equal(text_buf_add(&streamed, piece, n), E_OK);
    }
    check_text(style, name, streamed.n ? streamed.data : "", streamed.n, whole, n_whole);
    detok_close(d);
    text_buf_free(&streamed);
    free(whole);
}

static void check_case(const tokenizer *t, const char *style, const json *corpus_row,
                       const json *row) {
    const char *name = "";
    size_t n, n_text;
    token_ids got = {0}, want = {0};
    error err = {0};
    json_as_string(json_get(json_root(corpus_row), "name"), &name);
    char *bytes = hex_of(corpus_row, "hex", &n);
    if (tokenizer_encode(t, bytes, n, false, true, &got, &err) != E_OK)
        fail_msg("%s: case '%s': %s", style, name, err.text);
    ids_of(row, "ids", &want);
    check_ids(style, name, &got, &want);
    char *text = hex_of(row, "text", &n_text);
    if (!text) { // decodes to itself
        n_text = utf8_repaired_bytes(bytes, n);
        text = malloc(n_text + 1);
        utf8_repair(bytes, n, text);
    }
    check_decode(t, style, name, &want, false, text, n_text);
    size_t n_bare = n_text;
    char *bare = hex_of(row, "bare", &n_bare);
    check_decode(t, style, name, &want, true, bare ? bare : text, n_bare);
    if (!ids_of(row, "plain", &want))
        ids_of(row, "ids", &want);
    got.n = 0;
    assert_int_equal(tokenizer_encode(t, bytes, n, false, false, &got, &err), E_OK);
    check_ids(style, name, &got, &want);
    free(bytes);
    free(text);
    free(bare);
    token_ids_free(&got);
    token_ids_free(&want);
}

static void test_corpus(void **state) {
    (void)state;
    json_lines corpus = read_lines("tokenizers", "corpus.jsonl");
    for (size_t s = 0; s < N_STYLES; s++) {
        tokenizer *t = open_style(styles[s]);
        json_lines rows = read_style(styles[s], "expected.jsonl");
        assert_int_equal(rows.n, corpus.n);
        for (size_t i = 0; i < rows.n; i++)
            check_case(t, styles[s], corpus.docs[i], rows.docs[i]);
        free_lines(&rows);
        tokenizer_close(t);
    }
    free_lines(&corpus);
}

static void test_random_ids_decode(void **state) {
    (void)state;
    for (size_t s = 0; s < N_STYLES; s++) {
        tokenizer *t = open_style(styles[s]);
        json_lines rows = read_style(styles[s], "decode.jsonl");
        token_ids ids = {0};
        for (size_t i = 0; i < rows.n; i++) {
            size_t n_text, n_bare;
            char *text = hex_of(rows.docs[i], "text", &n_text);
            char *bare = hex_of(rows.docs[i], "bare", &n_bare);
            ids_of(rows.docs[i], "ids", &ids);
            check_decode(t, styles[s], "random ids", &ids, false, text, n_text);
            check_decode(t, styles[s], "random ids", &ids, true, bare, n_bare);
            free(text);
            free(bare);
        }
        token_ids_free(&ids);
        free_lines(&rows);
        tokenizer_close(t);
    }
}

static void test_template(void **state) {
    (void)state;
    json_lines corpus = read_lines("tokenizers", "corpus.jsonl");
    for (size_t s = 0; s < N_STYLES; s++) {
        tokenizer *t = open_style(styles[s]);
        json_lines rows = read_style(styles[s], "template.jsonl");
        for (size_t i = 0; i < rows.n; i++) {
            token_ids got = {0}, want = {0};
            size_t n;
            char *bytes = hex_of(corpus.docs[i], "hex", &n);
            ids_of(rows.docs[i], "ids", &want);
            assert_int_equal(tokenizer_encode(t, bytes, n, true, true, &got, NULL), E_OK);
            check_ids(styles[s], "template", &got, &want);
            free(bytes);
            token_ids_free(&got);
            token_ids_free(&want);
        }
        free_lines(&rows);
        tokenizer_close(t);
    }
    free_lines(&corpus);
}

// --- what the library is not asked about ---------------------------------------------------------

static const char tiny_model[] = "\"model\":{\"type\":\"BPE\",\"vocab\":{\"a\":0,\"b\":1,\"ab\":2,"
                                 "\"x\":5},\"merges\":[\"a b\"]}";

static int parse_with(const char *rest, const char *config, tokenizer **out, error *err) {
    char text[4096];
    snprintf(text, sizeof text, "{%s%s%s}", rest, *rest ? "," : "", tiny_model);
    return tokenizer_parse("t.json", text, strlen(text), "c.json", config,
                           config ? strlen(config) : 0, out, err);
}

static void test_refusals(void **state) {
    (void)state;
    static const struct {
        const char *text, *message;
        int code;
    } cases[] = {
        {"{}", "model: missing", E_INVALID},
        {"{\"model\":{}}", "vocab: missing", E_INVALID},
        {"{\"model\":{\"vocab\":{},\"merges\":[]}}", "no token at all", E_INVALID},
        {"{\"model\":{\"vocab\":{\"a\":-1},\"merges\":[]}}", "the id of 'a'", E_INVALID},
        {"{\"model\":{\"vocab\":{\"a\":4194304},\"merges\":[]}}", "the id of 'a'", E_INVALID},
        {"{\"model\":{\"vocab\":{\"a\":1.5},\"merges\":[]}}", "the id of 'a'", E_INVALID},
        {"{\"model\":{\"vocab\":{\"a\":1,\"b\":1},\"merges\":[]}}", "id 1 is given to", E_INVALID},
        {"{\"model\":{\"vocab\":{\"a\":1,\"a\":2},\"merges\":[]}}", "stands twice", E_INVALID},
        {"{\"model\":{\"vocab\":{\"a\":1},\"merges\":[\"a a\"]}}", "entry 0", E_INVALID},
        {"{\"model\":{\"vocab\":{\"a\":1},\"merges\":[\"a\"]}}", "not a pair", E_INVALID},
        {"{\"model\":{\"vocab\":{\"a\":1},\"merges\":[[\"a\"]]}}", "not a pair", E_INVALID},
        {"{\"model\":{\"vocab\":{\"a\":1},\"merges\":[7]}}", "not a pair", E_INVALID},
        {"{\"model\":{\"type\":\"Unigram\",\"vocab\":{\"a\":1},\"merges\":[]}}", "'Unigram'",
         E_UNSUPPORTED},
        {"{\"model\":{\"vocab\":{\"a\":1},\"merges\":[],\"dropout\":0.1}}", "dropout",
         E_UNSUPPORTED},
        {"{\"model\":{\"vocab\":{\"a\":1},\"merges\":[],\"continuing_subword_prefix\":\"##\"}}",
         "continuing_subword_prefix", E_UNSUPPORTED},
        {"{\"model\":{\"vocab\":{\"a\":1},\"merges\":[],\"unk_token\":\"u\"}}", "unk_token 'u'",
         E_INVALID},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        tokenizer *t = NULL;
        error err = {0};
        int rc = tokenizer_parse("t.json", cases[i].text, strlen(cases[i].text), NULL, NULL, 0, &t,
                                 &err);
        if (rc != cases[i].code || !strstr(err.text, cases[i].message) ||
            !strstr(err.text, "t.json"))
            fail_msg("%s: %d %s", cases[i].text, rc, err.text);
    }
}

static void test_unsupported_components(void **state) {
    (void)state;
#define SPLIT_BY(pattern)                                                                          \
    "\"pre_tokenizer\":{\"type\":\"Split\",\"behavior\":\"Isolated\",\"pattern\":{\"Regex\":"      \
    "\"" pattern "\"}}"
    static const struct {
        const char *text, *message;
    } cases[] = {
        {"\"normalizer\":{\"type\":\"Precompiled\"}", "normalizer: type 'Precompiled'"},
        {"\"normalizer\":{\"type\":\"Replace\",\"pattern\":{\"Regex\":\"a\"},\"content\":\"\"}",
         "normalizer: Replace"},
        {"\"pre_tokenizer\":{\"type\":\"BertPreTokenizer\"}", "pre_tokenizer: type 'Bert"},
        {"\"pre_tokenizer\":{\"type\":\"Sequence\",\"pretokenizers\":[{\"type\":\"ByteLevel\"},"
         "{\"type\":\"Digits\"}]}",
         "behind ByteLevel"},
        {SPLIT_BY("[a[b]]"), "a class inside a class"},
        {SPLIT_BY("[a&&b]"), "&& in a class"},
        {SPLIT_BY("[[:punct:]]"), "a class inside a class"},
        {SPLIT_BY("\\\\p{Emoji}"), "a property of a long name"},
        {SPLIT_BY("\\\\h"), "\\h"},
        {SPLIT_BY("\\\\X"), "\\X"},
        {SPLIT_BY("(?m:.)"), "option m"},
        {SPLIT_BY("a{2,3}+"), "behind an interval"},
        {SPLIT_BY("("), "does not compile"},
        {"\"post_processor\":{\"type\":\"BertProcessing\"}", "post_processor: type 'Bert"},
        {"\"decoder\":{\"type\":\"WordPiece\"}", "decoder: type 'WordPiece'"},
        {"\"decoder\":{\"type\":\"Strip\",\"content\":\" \",\"start\":1,\"stop\":0}", "Strip"},
        {"\"decoder\":{\"type\":\"Sequence\",\"decoders\":[{\"type\":\"Fuse\"},"
         "{\"type\":\"ByteFallback\"}]}",
         "ByteFallback at this place"},
        {"\"added_tokens\":[{\"id\":3,\"content\":\"a\"}]", "'a' has id 3, but 0"},
        {"\"added_tokens\":[{\"id\":1,\"content\":\"c\"}]", "id 1 is given to"},
        {"\"added_tokens\":[{\"id\":3,\"content\":\"c\",\"special\":1}]", "special: expected"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        tokenizer *t = NULL;
        error err = {0};
        int rc = parse_with(cases[i].text, NULL, &t, &err);
        if ((rc != E_UNSUPPORTED && rc != E_INVALID) || !strstr(err.text, cases[i].message) ||
            !strstr(err.text, "t.json"))
            fail_msg("%s: %d %s", cases[i].text, rc, err.text);
    }
    tokenizer *t = NULL;
    error err = {0};
    assert_int_equal(tokenizer_open("/nonexistent", &t, &err), E_NOT_FOUND);
}

static void expect_ids(const tokenizer *t, const char *text, bool parse_special, size_t n,
                       const int32_t *want) {
    token_ids ids = {0};
    error err = {0};
    if (tokenizer_encode(t, text, strlen(text), false, parse_special, &ids, &err) != E_OK)
        fail_msg("%s", err.text);
    check_ids("tiny", text, &ids, &(token_ids){(int32_t *)want, n, n});
    token_ids_free(&ids);
}

// bos and eos named by tokenizer_config.json are special even where tokenizer.json says otherwise,
// and neither a match, a merge nor a whole word makes them out of plain text.
static void test_named_tokens(void **state) {
    (void)state;
    tokenizer *t = NULL;
    error err = {0};
    const char *config = "{\"bos_token\":{\"content\":\"ab\"},\"eos_token\":\"x\"}";
    assert_int_equal(parse_with("", config, &t, &err), E_OK);
    assert_int_equal(tokenizer_bos_id(t), 2);
    assert_int_equal(tokenizer_eos_id(t), 5);
    assert_true(tokenizer_is_special(t, 2) && tokenizer_is_special(t, 5));
    assert_false(tokenizer_is_special(t, 0) || tokenizer_is_special(t, 3));
    expect_ids(t, "ab", true, 1, (int32_t[]){2});
    expect_ids(t, "abxa", false, 3, (int32_t[]){0, 1, 0});
    tokenizer_close(t);
    assert_int_equal(parse_with("", "{\"bos_token\":\"nowhere\"}", &t, &err), E_OK);
    assert_int_equal(tokenizer_bos_id(t), -1);
    expect_ids(t, "abxa", false, 3, (int32_t[]){2, 5, 0});
    tokenizer_close(t);
}

// A special token in untrusted text that reaches into a trusted part does not hide one there.
static void test_overlapping_specials(void **state) {
    (void)state;
    tokenizer *t = NULL;
    error err = {0};
    token_ids ids = {0};
    const char *added = "\"added_tokens\":[{\"id\":7,\"content\":\"aab\",\"special\":true},"
                        "{\"id\":8,\"content\":\"b\xc3\xa9\",\"special\":true}]";
    const tokenizer_part parts[] = {{"aa", 2, false}, {"b\xc3\xa9", 3, true}, {"b", 1, false}};
    assert_int_equal(parse_with(added, NULL, &t, &err), E_OK);
    assert_int_equal(tokenizer_encode_parts(t, parts, 3, false, &ids, &err), E_OK);
    check_ids("tiny", "overlap", &ids, &(token_ids){(int32_t[]){0, 0, 8, 1}, 4, 4});
    token_ids_free(&ids);
    expect_ids(t, "aab", true, 1, (int32_t[]){7});
    tokenizer_close(t);
}

// Where a token holds U+2581 behind another character, words are not cut before it.
static void test_merges_over_metaspace(void **state) {
    (void)state;
    tokenizer *t = NULL;
    error err = {0};
    const char *text = "{\"normalizer\":{\"type\":\"Replace\",\"pattern\":{\"String\":\" \"},"
                       "\"content\":\"\\u2581\"},\"model\":{\"vocab\":{\"a\":0,\"\\u2581\":1,"
                       "\"a\\u2581\":2,\"\\u2581a\":3},\"merges\":[\"a \\u2581\","
                       "\"\\u2581 a\"]}}";
    assert_int_equal(tokenizer_parse("t.json", text, strlen(text), NULL, NULL, 0, &t, &err), E_OK);
    expect_ids(t, " a a", true, 3, (int32_t[]){1, 2, 0});
    tokenizer_close(t);
}

static void test_accessors(void **state) {
    (void)state;
    tokenizer *t = NULL;
    error err = {0};
    const char *bytes;
    size_t n;
    assert_int_equal(parse_with("", NULL, &t, &err), E_OK);
    assert_int_equal(tokenizer_vocab_size(t), 6);
    assert_int_equal(tokenizer_token_id(t, "ab"), 2);
    assert_int_equal(tokenizer_token_id(t, "nope"), -1);
    assert_int_equal(tokenizer_token_bytes(t, 2, &bytes, &n), E_OK);
    assert_memory_equal(bytes, "ab", 2);
    assert_int_equal(tokenizer_token_bytes(t, 3, &bytes, &n), E_NOT_FOUND); // a hole
    assert_int_equal(tokenizer_token_bytes(t, -1, &bytes, &n), E_NOT_FOUND);
    assert_int_equal(tokenizer_token_bytes(t, 6, &bytes, &n), E_NOT_FOUND);
    char *text;
    const int32_t ids[] = {2, -1, 3, 1 << 30, 5}; // ids that do not exist vanish
    assert_int_equal(tokenizer_decode(t, ids, 5, true, &text, &n, &err), E_OK);
    assert_string_equal(text, "ab x");
    free(text);
    tokenizer_close(t);
    t = open_style("qwen2");
    int32_t id = tokenizer_token_id(t, "\xc4\xa0"); // the byte-level space
    assert_int_equal(tokenizer_token_bytes(t, id, &bytes, &n), E_OK);
    assert_true(n == 1 && *bytes == ' ');
    tokenizer_close(t);
    t = open_style("llama2");
    assert_int_equal(tokenizer_token_bytes(t, tokenizer_token_id(t, "<0xF0>"), &bytes, &n), E_OK);
    assert_true(n == 1 && (uint8_t)*bytes == 0xF0);
    tokenizer_close(t);
    tokenizer_close(NULL);
    detok_close(NULL);
}

// Special tokens count in trusted parts only, also where plain text surrounds or splits them, and
// for tokens that are matched in normalized text.
static void test_parts(void **state) {
    (void)state;
    static const char *const names[] = {"qwen2", "llama2_normalized"};
    static const char *const specials[] = {"<|im_end|>", " </s>"};
    for (size_t k = 0; k < 2; k++) {
        tokenizer *t = open_style(names[k]);
        const char *s = specials[k];
        size_t n = strlen(s);
        const tokenizer_part parts[] = {
            {s, n, false},       {s, n, true},      {s, n - 3, false},     {s, n, true},
            {"", 0, true},       {s, n - 2, true},  {s + n - 2, 2, false}, {s, n, false},
            {"e\xcc", 2, false}, {"\x81", 1, true},
        };
        token_ids ids = {0};
        error err = {0};
        int32_t id = tokenizer_token_id(t, s + (*s == ' '));
        assert_int_equal(tokenizer_encode_parts(t, parts, 10, false, &ids, &err), E_OK);
        size_t n_special = 0;
        for (size_t i = 0; i < ids.n; i++)
            n_special += ids.ids[i] == id;
        assert_int_equal(n_special, 2);
        char *text;
        size_t n_text;
        assert_int_equal(tokenizer_decode(t, ids.ids, ids.n, false, &text, &n_text, &err), E_OK);
        assert_non_null(strstr(text, "e\xEF\xBF\xBD\xEF\xBF\xBD")); // parts are repaired one by one
        free(text);
        ids.n = 1;
        tokenizer_part huge = {s, TOKENIZER_TEXT_MAX + 1, false};
        assert_int_equal(tokenizer_encode_parts(t, &huge, 1, false, &ids, &err), E_TOO_LARGE);
        assert_int_equal(ids.n, 1);
        token_ids_free(&ids);
        tokenizer_close(t);
    }
}

// Long texts without any place to cut take no more than n log n: 200 KB within the test's time.
static void test_long_runs(void **state) {
    (void)state;
    static const char *const units[] = {"a",
                                        " ",
                                        "\n",
                                        "1",
                                        "!",
                                        "a\xcc\x81\xcc\xa3",
                                        "\xcc\x81\xcc\xa3",
                                        "\xe6\xb1\x89",
                                        "\xff",
                                        "\xe2\x96\x81",
                                        "'",
                                        "|||"};
    const size_t n = 200000;
    char *text = malloc(n);
    for (size_t s = 0; s < N_STYLES; s++) {
        tokenizer *t = open_style(styles[s]);
        for (size_t k = 0; k < sizeof units / sizeof *units; k++) {
            token_ids ids = {0};
            error err = {0};
            size_t n_unit = strlen(units[k]);
            for (size_t i = 0; i < n; i++)
                text[i] = units[k][i % n_unit];
            if (tokenizer_encode(t, text, n - n % n_unit, false, true, &ids, &err) != E_OK)
                fail_msg("%s: unit %zu: %s", styles[s], k, err.text);
            token_ids_free(&ids);
        }
        tokenizer_close(t);
    }
    free(text);
}

typedef struct shared_use {
    const tokenizer *t;
    const char *text;
    size_t n;
    const token_ids *want;
    bool same;
} shared_use;

static void *use_shared(void *argument) {
    shared_use *use = argument;
    use->same = true;
    for (int i = 0; i < 20 && use->same; i++) {
        token_ids ids = {0};
        use->same = tokenizer_encode(use->t, use->text, use->n, false, true, &ids, NULL) == E_OK &&
                    ids.n == use->want->n &&
                    memcmp(ids.ids, use->want->ids, ids.n * sizeof *ids.ids) == 0;
        token_ids_free(&ids);
    }
    return NULL;
}

static void test_shared_by_threads(void **state) {
    (void)state;
    tokenizer *t = open_style("qwen2");
    static const char text[] = "Shared e\xcc\x81 text, 123 <|im_end|>\n\n  and more of it.";
    token_ids want = {0};
    pthread_t threads[4];
    shared_use uses[4];
    assert_int_equal(tokenizer_encode(t, text, strlen(text), false, true, &want, NULL), E_OK);
    for (int i = 0; i < 4; i++) {
        uses[i] = (shared_use){t, text, strlen(text), &want, false};
        assert_int_equal(pthread_create(&threads[i], NULL, use_shared, &uses[i]), 0);
    }
    for (int i = 0; i < 4; i++) {
        pthread_join(threads[i], NULL);
        assert_true(uses[i].same);
    }
    token_ids_free(&want);
    tokenizer_close(t);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_corpus),
        cmocka_unit_test(test_random_ids_decode),
        cmocka_unit_test(test_template),
        cmocka_unit_test(test_refusals),
        cmocka_unit_test(test_unsupported_components),
        cmocka_unit_test(test_named_tokens),
        cmocka_unit_test(test_overlapping_specials),
        cmocka_unit_test(test_merges_over_metaspace),
        cmocka_unit_test(test_accessors),
        cmocka_unit_test(test_parts),
        cmocka_unit_test(test_long_runs),
        cmocka_unit_test(test_shared_by_threads),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
