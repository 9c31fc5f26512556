// messages.h: what router and workers say to each other on the control socket.
//
// Each message is a type and a payload inside the frames of engine/control.h. Encoders append to a
// bytes_writer that the caller owns and resets; decoders read a payload, copy what they keep into
// the caller's struct and return E_PROTOCOL on anything short, long or out of range.
// Start of a worker: HELLO -> CONFIG -> READY (after loading) -> TOPOLOGY -> JOINED. A worker that
// cannot start says FAILED with its reason. Then SUBMIT, CANCEL and TOKENS flow until SHUTDOWN.
// Thread: pure functions.
#ifndef TANDEM_ENGINE_MESSAGES_H
#define TANDEM_ENGINE_MESSAGES_H

#include "engine/bytes.h"
#include "engine/request.h"
#include "engine/status.h"

// X(name, value, sender)
#define MESSAGE_MAP(X)                                                                             \
    X(HELLO, 1, "worker")                                                                          \
    X(CONFIG, 2, "router")                                                                         \
    X(PROGRESS, 3, "worker")                                                                       \
    X(READY, 4, "worker")                                                                          \
    X(FAILED, 5, "worker")                                                                         \
    X(TOPOLOGY, 6, "router")                                                                       \
    X(JOINED, 7, "worker")                                                                         \
    X(SUBMIT, 8, "router")                                                                         \
    X(CANCEL, 9, "router")                                                                         \
    X(TOKENS, 10, "worker")                                                                        \
    X(SHUTDOWN, 11, "router")

enum {
#define X(name, value, sender) MESSAGE_##name = value,
    MESSAGE_MAP(X)
#undef X
};

enum { MESSAGE_PROTOCOL = 1, MESSAGE_MAX_WORKERS = 64, MESSAGE_MAX_ADDRESS = 2048 };

typedef enum worker_kind { WORKER_ATTENTION, WORKER_FFN } worker_kind;

// HELLO: who I am. rank -1: the router chooses.
typedef struct message_hello {
    uint32_t protocol;
    worker_kind kind;
    int32_t rank;
    int32_t pid;
} message_hello;
void message_hello_encode(bytes_writer *out, const message_hello *in);
int message_hello_decode(const void *data, size_t n, message_hello *out);

// CONFIG: rank, then the effective configuration as JSON text (the decoder points into data).
void message_config_encode(bytes_writer *out, uint32_t rank, const char *json, size_t n_json);
int message_config_decode(const void *data, size_t n, uint32_t *rank, const char **json,
                          size_t *n_json);

// PROGRESS: bytes of weights loaded so far and in all.
void message_progress_encode(bytes_writer *out, uint64_t done, uint64_t total);
int message_progress_decode(const void *data, size_t n, uint64_t *done, uint64_t *total);

// READY: loaded; where frames reach me and what I can hold.
typedef struct message_ready {
    uint64_t plan_hash;
    uint64_t weight_bytes;
    uint64_t kv_tokens; // attention: capacity of the KV cache
    uint32_t n_address;
    uint8_t address[MESSAGE_MAX_ADDRESS]; // of engine/transport.h; empty when colocated
} message_ready;
void message_ready_encode(bytes_writer *out, const message_ready *in);
int message_ready_decode(const void *data, size_t n, message_ready *out);

// TOPOLOGY: the peers of this worker (FFN workers for an attention worker and the other way
// round), by rank.
typedef struct message_peer {
    uint32_t rank;
    uint32_t n_address;
    uint8_t address[MESSAGE_MAX_ADDRESS];
} message_peer;
typedef struct message_topology {
    uint32_t epoch;
    uint32_t n_peers;
    message_peer peers[MESSAGE_MAX_WORKERS];
} message_topology;
void message_topology_encode(bytes_writer *out, const message_topology *in);
int message_topology_decode(const void *data, size_t n, message_topology *out);

// SUBMIT: a request. The decoder's arrays point into scratch memory that the caller frees with
// message_submit_free.
typedef struct message_submit {
    uint64_t request;
    sampling_params params;
    int32_t n_prompt;
    int32_t *prompt;
    logit_bias *bias;
} message_submit;
void message_submit_encode(bytes_writer *out, uint64_t request, const sampling_params *params,
                           const int32_t *prompt, size_t n_prompt);
int message_submit_decode(const void *data, size_t n, message_submit *out);
void message_submit_free(message_submit *submit);

// CANCEL: request id. Events of the step under way may still come; then there are no more.
void message_cancel_encode(bytes_writer *out, uint64_t request);
int message_cancel_decode(const void *data, size_t n, uint64_t *request);

// TOKENS: the worker's state and the events of a step.
typedef struct message_load {
    uint32_t running, waiting;
    uint64_t kv_tokens;   // in use
    uint64_t preemptions; // since start
    uint64_t steps;
    uint64_t wire_bytes; // sent and received since start
} message_load;
enum { MESSAGE_LOAD_BYTES = 40, MESSAGE_EVENT_MAX_BYTES = 23 + 8 * REQUEST_MAX_TOP_LOGPROBS };
// A message is begun, gets its events, and is finished with the load of that moment.
void message_tokens_begin(bytes_writer *out);
void message_tokens_add(bytes_writer *out, const token_event *event);
void message_tokens_finish(bytes_writer *out, const message_load *load);
// Calls visit for every event in order.
int message_tokens_decode(const void *data, size_t n, message_load *load,
                          void (*visit)(void *user, const token_event *event), void *user);

#endif
