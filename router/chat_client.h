// chat_client.h: `tandem chat`, which asks a server one question and shows the answer as it
// streams.
//
// Thread: the main thread; everything blocks.
#ifndef TANDEM_ROUTER_CHAT_CLIENT_H
#define TANDEM_ROUTER_CHAT_CLIENT_H

#include "engine/status.h"

#include <stdio.h>

typedef struct chat_client_args {
    const char *url;     // http://HOST:PORT
    const char *api_key; // NULL: none is sent
    const char *question;
    FILE *out; // the answer, flushed at every piece
} chat_client_args;

int chat_client_ask(const chat_client_args *args, error *err);

#endif
