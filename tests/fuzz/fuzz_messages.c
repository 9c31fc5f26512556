// Any payload is refused or decoded; what was decoded, encoded and decoded again stays the same.
#include "engine/messages.h"

#include <stdlib.h>
#include <string.h>

static bytes_writer first, second;

static void same(void) {
    if (first.failed || second.failed || first.n != second.n ||
        (first.n && memcmp(first.data, second.data, first.n)))
        abort();
}

static void must(int code) {
    if (code)
        abort();
}

static void try_start(uint8_t type, const uint8_t *data, size_t n) {
    static message_ready ready;
    static message_topology topology;
    message_hello hello;
    uint32_t rank;
    const char *json;
    size_t n_json;
    if (type == 0 && !message_hello_decode(data, n, &hello)) {
        message_hello_encode(&first, &hello);
        must(message_hello_decode(first.data, first.n, &hello));
        message_hello_encode(&second, &hello);
    } else if (type == 1 && !message_config_decode(data, n, &rank, &json, &n_json)) {
        message_config_encode(&first, rank, json, n_json);
        must(message_config_decode(first.data, first.n, &rank, &json, &n_json));
        message_config_encode(&second, rank, json, n_json);
    } else if (type == 2 && !message_ready_decode(data, n, &ready)) {
        message_ready_encode(&first, &ready);
        must(message_ready_decode(first.data, first.n, &ready));
        message_ready_encode(&second, &ready);
    } else if (type == 3 && !message_topology_decode(data, n, &topology)) {
        message_topology_encode(&first, &topology);
        must(message_topology_decode(first.data, first.n, &topology));
        message_topology_encode(&second, &topology);
    }
}

static void encode_submit(bytes_writer *out, const message_submit *m) {
    message_submit_encode(out, m->request, &m->params, m->prompt, (size_t)m->n_prompt);
}

static void try_submit(const uint8_t *data, size_t n) {
    message_submit m;
    if (message_submit_decode(data, n, &m))
        return;
    encode_submit(&first, &m);
    message_submit_free(&m);
    must(message_submit_decode(first.data, first.n, &m));
    encode_submit(&second, &m);
    message_submit_free(&m);
}

static void add_event(void *user, const token_event *event) {
    message_tokens_add(user, event);
}

static void try_tokens(const uint8_t *data, size_t n) {
    message_load load;
    if (message_tokens_decode(data, n, &load, add_event, &first)) {
        bytes_writer_reset(&first); // events before the bad one
        return;
    }
    message_tokens_finish(&first, &load);
    must(message_tokens_decode(first.data, first.n, &load, add_event, &second));
    message_tokens_finish(&second, &load);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    if (!size)
        return 0;
    bytes_writer_reset(&first);
    bytes_writer_reset(&second);
    uint8_t type = data[0] % 6;
    if (type < 4)
        try_start(type, data + 1, size - 1);
    else if (type == 4)
        try_submit(data + 1, size - 1);
    else
        try_tokens(data + 1, size - 1);
    same();
    return 0;
}
