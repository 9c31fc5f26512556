// tokenizer.h: text to token ids and back, read from a Hugging Face tokenizer.json (model BPE).
//
// Ids and decoded text equal those of the tokenizers library. Text that is not UTF-8 is first
// repaired as Python does it: each malformed subpart becomes U+FFFD.
// Ownership: tokenizer_open gives an object for tokenizer_close; token_ids and decoded text belong
// to the caller. Thread: a tokenizer is immutable after open and may be shared; scratch memory
// belongs to the call. A detok belongs to one thread and borrows its tokenizer.
#ifndef TANDEM_ENGINE_TOKENIZER_H
#define TANDEM_ENGINE_TOKENIZER_H

#include "engine/status.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define TOKENIZER_TEXT_MAX ((size_t)16 << 20) // bytes that one encode call takes

typedef struct tokenizer tokenizer;
typedef struct detok detok;

// A growable list of ids; {0} is an empty one.
typedef struct token_ids {
    int32_t *ids;
    size_t n, capacity;
} token_ids;

void token_ids_free(token_ids *list); // also makes it empty
int token_ids_push(token_ids *list, int32_t id);

// A stretch of the text to encode. Only where parse_special is true do the texts of special tokens
// become those tokens; elsewhere they are plain text. Added tokens that are not special (such as
// runs of spaces) are found everywhere.
typedef struct tokenizer_part {
    const char *text;
    size_t n_bytes;
    bool parse_special;
} tokenizer_part;

// Reads MODEL_DIR/tokenizer.json and, where there is one, tokenizer_config.json. A component that
// is not implemented is E_UNSUPPORTED with the file and the component's name.
int tokenizer_open(const char *model_dir, tokenizer **out, error *err);
void tokenizer_close(tokenizer *t);

size_t tokenizer_vocab_size(const tokenizer *t); // ids lie below it; there may be holes
int32_t tokenizer_token_id(const tokenizer *t, const char *text); // -1 when there is none
bool tokenizer_is_special(const tokenizer *t, int32_t id);
int32_t tokenizer_bos_id(const tokenizer *t); // from tokenizer_config.json; -1 when not given
int32_t tokenizer_eos_id(const tokenizer *t);
// The bytes that one id contributes to the text, perhaps part of a UTF-8 sequence; E_NOT_FOUND for
// an id that does not exist. The bytes belong to the tokenizer.
int tokenizer_token_bytes(const tokenizer *t, int32_t id, const char **bytes, size_t *n);

// Appends ids to out, which stays as it was on failure. add_special adds what the post-processor's
// template adds, such as BOS.
int tokenizer_encode(const tokenizer *t, const char *text, size_t n_bytes, bool add_special,
                     bool parse_special, token_ids *out, error *err);
// The parts are encoded as one text: tokens may reach over the seams.
int tokenizer_encode_parts(const tokenizer *t, const tokenizer_part *parts, size_t n_parts,
                           bool add_special, token_ids *out, error *err);

// Decodes the whole sequence; *text is for free() and has a NUL behind its n bytes. Ids that do not
// exist contribute nothing.
int tokenizer_decode(const tokenizer *t, const int32_t *ids, size_t n_ids, bool skip_special,
                     char **text, size_t *n, error *err);

// Streaming decode: every piece handed out is whole UTF-8, and the pieces of all pushes and the
// flush together are what tokenizer_decode gives. Text that a later id may still change is held
// back. A piece lives until the next call with the same detok.
int detok_open(const tokenizer *t, bool skip_special, detok **out);
void detok_close(detok *d);
int detok_push(detok *d, int32_t id, const char **text, size_t *n);
int detok_flush(detok *d, const char **text, size_t *n); // the rest; then ready for a new sequence

#endif
