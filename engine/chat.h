// chat.h: from a list of chat messages to the prompt that the model was trained on.
//
// A format is recognised by marker strings in the model's chat template; templates are not run.
// What a message says is never taken for the format's own tokens: chat_encode treats the texts of
// special tokens inside contents as plain text.
// Ownership: chat_format_open gives an object for chat_format_close. Thread: a format is immutable
// and may be shared.
#ifndef TANDEM_ENGINE_CHAT_H
#define TANDEM_ENGINE_CHAT_H

#include "engine/tokenizer.h"

// Names for the config key chat.format, besides "auto".
#define CHAT_FORMAT_MAP(X)                                                                         \
    X("chatml")                                                                                    \
    X("qwen2.5")                                                                                   \
    X("qwen3")                                                                                     \
    X("olmoe")                                                                                     \
    X("tulu")                                                                                      \
    X("mistral")                                                                                   \
    X("mistral-legacy")                                                                            \
    X("mistral-v3")                                                                                \
    X("mistral-tekken")                                                                            \
    X("llama3")

typedef struct chat_format chat_format;

typedef struct chat_message {
    const char *role; // system (or developer), user, assistant, tool
    const char *content;
    size_t n_bytes;
} chat_message;

// name is "auto" or a name of the map; "auto" (or NULL) recognises the format from
// chat_template.jinja or from chat_template in tokenizer_config.json. E_UNSUPPORTED with the config
// key when there is no template or none is recognised.
int chat_format_open(const char *model_dir, const char *name, chat_format **out, error *err);
void chat_format_close(chat_format *format);

const char *chat_format_name(const chat_format *format);

// Appends the ids that end a turn, as far as the vocabulary has them.
int chat_stop_ids(const chat_format *format, const tokenizer *t, token_ids *out);

// The prompt as text, for free(), with a NUL behind its n bytes. Roles in an order that the format
// does not know are E_INVALID and named.
int chat_render(const chat_format *format, const chat_message *messages, size_t n_messages,
                bool add_generation_prompt, char **text, size_t *n, error *err);

// The prompt as ids, appended to out; the same ids as encoding the rendered text as far as no
// content contains the text of a special token.
int chat_encode(const chat_format *format, const tokenizer *t, const chat_message *messages,
                size_t n_messages, bool add_generation_prompt, token_ids *out, error *err);

#endif
