// chat_internal.h: what chat.c (rendering) and chat_format.c (recognising) share.
#ifndef TANDEM_ENGINE_CHAT_INTERNAL_H
#define TANDEM_ENGINE_CHAT_INTERNAL_H

#include "engine/chat.h"

#define CHAT_TOKEN_MAX 128   // bytes of bos_token and eos_token
#define CHAT_SYSTEM_MAX 1024 // bytes of a default system prompt
#define CHAT_MARKERS_MAX 4
#define CHAT_STOPS_MAX 2

// In the texts of a row these stand for the model's bos_token and eos_token.
#define BOS "\1"
#define EOS "\2"

typedef enum chat_system {
    SYSTEM_IS_A_TURN,
    SYSTEM_REFUSED,
    SYSTEM_IN_FIRST_USER, // before the first user message, two newlines between
    SYSTEM_IN_LAST_USER,  // before the last message, if that is a user's
} chat_system;

typedef enum chat_trim { TRIM_NOTHING, TRIM_ASSISTANT, TRIM_ALL } chat_trim;

// Text around one role's content; before is NULL where the role is refused.
typedef struct chat_turn {
    const char *before, *after;
} chat_turn;

typedef struct chat_row {
    const char *name;
    const char *has[CHAT_MARKERS_MAX];     // a template of this format has all of these
    const char *has_not[CHAT_MARKERS_MAX]; // and none of these
    chat_turn system, user, assistant, tool;
    const char *generation;
    const char *stops[CHAT_STOPS_MAX]; // besides eos_token
    chat_system system_place;
    chat_trim trim;
    bool bos;             // begins with bos_token, unless the template shows that it does not
    bool alternate;       // user and assistant take turns, the user first
    bool default_system;  // the template may have a system prompt of its own
    bool bare_last_reply; // no newline behind a reply that is the last message
    bool tool_in_user;    // neighbouring tool messages share one user turn
    bool think;           // replies before the last question lose their reasoning
} chat_row;

struct chat_format {
    const chat_row *row;
    char bos[CHAT_TOKEN_MAX], eos[CHAT_TOKEN_MAX];
    char system[CHAT_SYSTEM_MAX]; // default system prompt; "": none
    bool begin;                   // with bos_token
    bool open_think;              // the generation prompt opens a <think>
};

#endif
