// api.h: the OpenAI-style HTTP API of one bundle and one model.
//
// Routes: GET /v1/models, /v1/models/{id}, /health, /ready, /version, /metrics; POST
// /v1/completions, /v1/chat/completions, /tokenize, /detokenize. A generation ends when its last
// token has been sent, when the bundle reports an error, or when the client goes away, which
// cancels it in the bundle at once.
// Ownership: the API owns its HTTP server and borrows the bundle, the tokenizer and the chat
// format, which must outlive on_closed. Thread: the loop's.
#ifndef TANDEM_ROUTER_API_H
#define TANDEM_ROUTER_API_H

#include "engine/chat.h"
#include "engine/status.h"
#include "engine/tokenizer.h"
#include "router/bundle.h"
#include "router/http.h"

#include <stddef.h>
#include <stdint.h>
#include <uv.h>

typedef struct api api;

typedef struct api_args {
    uv_loop_t *loop;
    const char *host;
    int port; // 0: any, see api_port
    http_limits limits;
    bundle *bundle;
    const tokenizer *tokenizer;
    const chat_format *chat;       // NULL: the model is not made for chat
    const char *model_root;        // the model's directory; copied
    const char *served_model_name; // NULL or "": the last part of model_root; copied
    const char *api_key;           // NULL or "": no key is asked for; copied
    uint32_t keep_alive_ms;        // silence of a stream before a comment line; 0: 10 s
} api_args;

// Listens when it returns; generations are refused with 503 until the bundle is ready.
int api_open(const api_args *args, api **out, error *err);
int api_port(const api *a);

// From now on /ready says 503 and new generations are refused with 503; running ones go on.
void api_drain(api *a);
size_t api_in_flight(const api *a); // HTTP requests that generate
// Stops listening and lets generations go on for at most grace_ms; what still runs then is
// cancelled and its client told. on_closed (may be NULL) comes from the loop, then the API is gone.
// Accepts NULL.
void api_close(api *a, uint32_t grace_ms, void (*on_closed)(void *user), void *user);

#endif
