// Loads mutated tokenizer.json texts, and encodes and decodes arbitrary bytes. The first byte of an
// input selects: even, one of the texts below with the rest written over it in pieces; odd, the
// rest is text for one of them unchanged, whose ids must decode to UTF-8 and stream the same.
#include "engine/tokenizer_internal.h"
#include "engine/utf8.h"

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char byte_level[] =
    "{\"added_tokens\":[{\"id\":30,\"content\":\"<|a|>\",\"special\":true,\"normalized\":fals"
    "e,\"lstrip\":true},{\"id\":31,\"content\":\"  \",\"normalized\":true},{\"id\":32,\"conte"
    "nt\":\"e\\u0301x\",\"normalized\":true,\"single_word\":true,\"rstrip\":true}],\"normaliz"
    "er\":{\"type\":\"Sequence\",\"normalizers\":[{\"type\":\"NFC\"},{\"type\":\"Replace\",\""
    "pattern\":{\"String\":\"q\"},\"content\":\"ab\"}]},\"pre_tokenizer\":{\"type\":\"Sequenc"
    "e\",\"pretokenizers\":[{\"type\":\"Split\",\"pattern\":{\"Regex\":\"(?i:'s|'t)|[^\\\\r"
    "\\\\n\\\\p{L}\\\\p{N}]?\\\\p{L}+|\\\\p{N}{1,3}| ?[^\\\\s\\\\p{L}\\\\p{N}]+[\\\\r\\\\n]*|"
    "\\\\s*[\\\\r\\\\n]+|\\\\s+(?!\\\\S)|\\\\s+\"},\"behavior\":\"Removed\",\"invert\":true},"
    "{\"type\":\"Split\",\"pattern\":{\"String\":\"-\"},\"behavior\":\"MergedWithNext\"},{\"t"
    "ype\":\"ByteLevel\",\"add_prefix_space\":true,\"use_regex\":false}]},\"post_processor\":"
    "{\"type\":\"TemplateProcessing\",\"single\":[{\"SpecialToken\":{\"id\":\"<|a|>\",\"type_"
    "id\":0}},{\"Sequence\":{\"id\":\"A\",\"type_id\":0}}],\"special_tokens\":{\"<|a|>\":{\"i"
    "d\":\"<|a|>\",\"ids\":[30],\"tokens\":[\"<|a|>\"]}}},\"decoder\":{\"type\":\"ByteLevel\""
    "},\"model\":{\"type\":\"BPE\",\"vocab\":{\"a\":0,\"b\":1,\"ab\":2,\"\\u0120\":3,\""
    "\\u0120a\":4,\"\\u0120ab\":5,\"\\u00c3\":6,\"\\u00a9\":7,\"\\u00c3\\u00a9\":8,\"1\":9,\""
    "11\":10,\"\\u010a\":11,\"\\u010a\\u010a\":12,\"aa\":13,\"aaaa\":14},\"merges\":[\"a b\","
    "[\"\\u0120\",\"a\"],[\"\\u0120\",\"ab\"],\"\\u00c3 \\u00a9\",\"1 1\",\"\\u010a \\u010a\""
    ",\"a a\",\"aa aa\"]}}";
static const char sentencepiece[] =
    "{\"added_tokens\":[{\"id\":0,\"content\":\"<unk>\",\"special\":true},{\"id\":1,\"content"
    "\":\"<s>\",\"special\":true,\"normalized\":true},{\"id\":2,\"content\":\"</s>\",\"specia"
    "l\":true}],\"normalizer\":{\"type\":\"Sequence\",\"normalizers\":[{\"type\":\"Prepend\","
    "\"prepend\":\"\\u2581\"},{\"type\":\"Replace\",\"pattern\":{\"String\":\" \"},\"content"
    "\":\"\\u2581\"}]},\"decoder\":{\"type\":\"Sequence\",\"decoders\":[{\"type\":\"Replace\""
    ",\"pattern\":{\"String\":\"\\u2581\"},\"content\":\" \"},{\"type\":\"ByteFallback\"},{\""
    "type\":\"Fuse\"},{\"type\":\"Strip\",\"content\":\" \",\"start\":1,\"stop\":0}]},\"model"
    "\":{\"type\":\"BPE\",\"unk_token\":\"<unk>\",\"fuse_unk\":true,\"byte_fallback\":true,\""
    "vocab\":{\"<unk>\":0,\"<s>\":1,\"</s>\":2,\"<0xC3>\":3,\"<0xA9>\":4,\"<0x0A>\":5,\"a\":6"
    ",\"b\":7,\"\\u2581\":8,\"\\u2581a\":9,\"ab\":10,\"\\u2581\\u2581\":11,\"<\":12,\"s\":13,"
    "\">\":14,\"<s\":15},\"merges\":[\"\\u2581 a\",\"a b\",\"\\u2581 \\u2581\",[\"<\",\"s\"],"
    "[\"<s\",\">\"]]}}";
static const char metaspace[] =
    "{\"added_tokens\":[{\"id\":3,\"content\":\"foo\",\"single_word\":true,\"lstrip\":true,\""
    "rstrip\":true}],\"normalizer\":{\"type\":\"NFKC\"},\"pre_tokenizer\":{\"type\":\"Sequenc"
    "e\",\"pretokenizers\":[{\"type\":\"Punctuation\",\"behavior\":\"Contiguous\"},{\"type\":"
    "\"Digits\",\"individual_digits\":true},{\"type\":\"Metaspace\",\"replacement\":\"\\u2581"
    "\",\"prepend_scheme\":\"first\",\"split\":true}]},\"decoder\":{\"type\":\"Metaspace\",\""
    "replacement\":\"\\u2581\",\"prepend_scheme\":\"always\"},\"model\":{\"vocab\":{\"a\":0,"
    "\"b\":1,\"ab\":2,\"\\u2581\":4,\"u\":5},\"unk_token\":\"u\",\"ignore_merges\":true,\"mer"
    "ges\":[\"a b\"]}}";

#define N_STYLES 3
static const char *const texts[N_STYLES] = {byte_level, sentencepiece, metaspace};
static tokenizer *tokenizers[N_STYLES];

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerInitialize(int *argc, char ***argv);

static void check(bool ok, const char *what) {
    if (!ok) {
        fprintf(stderr, "fuzz_tokenizer: %s\n", what);
        abort();
    }
}

int LLVMFuzzerInitialize(int *argc, char ***argv) {
    (void)argc, (void)argv;
    for (size_t i = 0; i < N_STYLES; i++) {
        error err = {0};
        int rc = tokenizer_parse("seed", texts[i], strlen(texts[i]), NULL, NULL, 0, &tokenizers[i],
                                 &err);
        check(rc == E_OK, err.text);
    }
    return 0;
}

static void use(const tokenizer *t, const char *text, size_t n, bool lossless) {
    token_ids ids = {0};
    error err = {0};
    char *whole;
    const char *piece;
    size_t n_whole, n_piece, at = 0;
    detok *d;
    if (tokenizer_encode(t, text, n, true, n & 1, &ids, &err) != E_OK) {
        check(!lossless, err.text);
        token_ids_free(&ids);
        return;
    }
    check(tokenizer_decode(t, ids.ids, ids.n, false, &whole, &n_whole, &err) == E_OK, err.text);
    check(utf8_is_valid(whole, n_whole), "the decoded text is not UTF-8");
    check(detok_open(t, false, &d) == E_OK, "memory");
    for (size_t i = 0; i <= ids.n; i++) {
        int rc = i < ids.n ? detok_push(d, ids.ids[i], &piece, &n_piece)
                           : detok_flush(d, &piece, &n_piece);
        check(rc == E_OK && utf8_is_valid(piece, n_piece), "a piece is not whole UTF-8");
        check(n_piece <= n_whole - at && memcmp(whole + at, piece, n_piece) == 0,
              "the stream differs from the whole");
        at += n_piece;
    }
    check(at == n_whole, "the stream is shorter than the whole");
    for (size_t i = 0; i < ids.n; i++)
        check(ids.ids[i] >= 0 && (size_t)ids.ids[i] < tokenizer_vocab_size(t),
              "an id out of range");
    detok_close(d);
    free(whole);
    token_ids_free(&ids);
}

// Pieces of the input: two bytes of place, one of length, then the bytes.
static void load_mutated(size_t style, const uint8_t *data, size_t size) {
    size_t n = strlen(texts[style]);
    char *text = malloc(n);
    memcpy(text, texts[style], n);
    while (size >= 3) {
        size_t place = ((size_t)data[0] << 8 | data[1]) % n, length = data[2] % 24;
        data += 3;
        size -= 3;
        length = length < size ? length : size;
        length = length < n - place ? length : n - place;
        memcpy(text + place, data, length);
        data += length;
        size -= length;
    }
    tokenizer *t = NULL;
    error err = {0};
    if (tokenizer_parse("fuzz", text, n, NULL, NULL, 0, &t, &err) == E_OK)
        use(t, "a  b\r\n1234 <s>\xc3\xa9\xe2\x96\x81\xff", 19, false);
    else
        check(*err.text, "a refusal without a reason");
    tokenizer_close(t);
    free(text);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    if (size < 1)
        return 0;
    size_t style = data[0] / 2 % N_STYLES;
    if (data[0] & 1)
        use(tokenizers[style], (const char *)data + 1, size - 1, true);
    else
        load_mutated(style, data + 1, size - 1);
    return 0;
}
