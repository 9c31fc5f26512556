// The dummy tokenizer: byte-level BPE without merges, so every byte of a text is one token, and
// every id that a random model can produce decodes to something.
#include "router/synth.h"

static const char *const special[SYNTH_N_SPECIAL] = {"<|endoftext|>", "<|im_start|>", "<|im_end|>"};

// GPT-2's printable stand-in for a byte: itself, or the next free code point from 256 on.
static unsigned stand_in(unsigned byte, unsigned *next_free) {
    bool printable = (byte >= 33 && byte <= 126) || (byte >= 161 && byte != 173);
    return printable ? byte : (*next_free)++;
}

static void print_code_point(FILE *out, unsigned c) {
    if (c == '"' || c == '\\')
        fprintf(out, "\\%c", (int)c);
    else if (c < 0x80)
        fputc((int)c, out);
    else
        fprintf(out, "%c%c", (int)(0xc0 | c >> 6), (int)(0x80 | (c & 0x3f)));
}

static void print_added(FILE *out, const char *text, size_t id) {
    fprintf(out,
            "{\"id\": %zu, \"content\": \"%s\", \"single_word\": false, \"lstrip\": false, "
            "\"rstrip\": false, \"normalized\": false, \"special\": true}",
            id, text);
}

static void print_tokenizer(FILE *out, size_t vocab) {
    size_t n_plain = vocab - SYNTH_N_SPECIAL;
    fprintf(out, "{\"version\": \"1.0\", \"truncation\": null, \"padding\": null,\n"
                 "\"added_tokens\": [");
    for (size_t i = 0; i < SYNTH_N_SPECIAL; i++) {
        fputs(i ? ", " : "", out);
        print_added(out, special[i], n_plain + i);
    }
    fprintf(out, "],\n\"normalizer\": null,\n"
                 "\"pre_tokenizer\": {\"type\": \"ByteLevel\", \"add_prefix_space\": false, "
                 "\"trim_offsets\": true, \"use_regex\": true},\n"
                 "\"post_processor\": null,\n"
                 "\"decoder\": {\"type\": \"ByteLevel\", \"add_prefix_space\": true, "
                 "\"trim_offsets\": true, \"use_regex\": true},\n"
                 "\"model\": {\"type\": \"BPE\", \"dropout\": null, \"unk_token\": null, "
                 "\"continuing_subword_prefix\": null, \"end_of_word_suffix\": null, "
                 "\"fuse_unk\": false, \"byte_fallback\": false, \"ignore_merges\": false,\n"
                 "\"vocab\": {");
    unsigned next_free = 256;
    for (unsigned byte = 0; byte < SYNTH_N_BYTES; byte++) {
        fprintf(out, "%s\"", byte ? ", " : "");
        print_code_point(out, stand_in(byte, &next_free));
        fprintf(out, "\": %u", byte);
    }
    for (size_t id = SYNTH_N_BYTES; id < n_plain; id++) // U+0120 stands for the blank
        fprintf(out, ",%s\"\xc4\xa0w%zu\": %zu", id % 8 ? " " : "\n", id, id);
    fprintf(out, "},\n\"merges\": []}}\n");
}

static void print_tokenizer_config(FILE *out, const synth_args *args) {
    size_t first = args->vocab - SYNTH_N_SPECIAL;
    fprintf(out, "{\n  \"tokenizer_class\": \"PreTrainedTokenizerFast\",\n"
                 "  \"added_tokens_decoder\": {");
    for (size_t i = 0; i < SYNTH_N_SPECIAL; i++)
        fprintf(out,
                "%s\n    \"%zu\": {\"content\": \"%s\", \"lstrip\": false, \"normalized\": false, "
                "\"rstrip\": false, \"single_word\": false, \"special\": true}",
                i ? "," : "", first + i, special[i]);
    fprintf(out,
            "\n  },\n  \"bos_token\": null,\n  \"eos_token\": \"%s\",\n  \"pad_token\": \"%s\",\n"
            "  \"unk_token\": null,\n  \"clean_up_tokenization_spaces\": false,\n"
            "  \"model_max_length\": %zu,\n"
            "  \"chat_template\": \"{%% for message in messages %%}{{ '<|im_start|>' + "
            "message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}{%% endfor %%}"
            "{%% if add_generation_prompt %%}{{ '<|im_start|>assistant\\n' }}{%% endif %%}\"\n}\n",
            special[2], special[0], args->context);
}

int synth_write_tokenizer(const synth_args *args, error *err) {
    FILE *out = NULL;
    int rc = synth_create(args, "tokenizer.json", &out, err);
    if (rc != E_OK)
        return rc;
    print_tokenizer(out, args->vocab);
    rc = synth_finish(args, "tokenizer.json", out, err);
    if (rc == E_OK)
        rc = synth_create(args, "tokenizer_config.json", &out, err);
    if (rc != E_OK)
        return rc;
    print_tokenizer_config(out, args);
    return synth_finish(args, "tokenizer_config.json", out, err);
}
