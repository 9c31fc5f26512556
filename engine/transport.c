#include "engine/transport_ops.h"

#include <fcntl.h>
#include <stdio.h>
#include <sys/stat.h>
#include <unistd.h>

static const transport_ops *const kinds[] = {&transport_inproc_ops, &transport_shm_ops,
                                             &transport_tcp_ops};
enum { N_KINDS = sizeof kinds / sizeof *kinds };

#define ADDRESS_MAGIC 0x41444e54u // "TNDA"
enum { ADDRESS_VERSION = 1 };

// Stands before the body that a kind made. UCX reads an address without checking it, so whatever
// was cut, mixed up or made by another version must be refused here.
typedef struct address_prefix {
    uint32_t magic;
    uint8_t version;
    uint8_t kind;
    uint16_t body_bytes;
    uint64_t id;
    uint64_t host;
    uint64_t checksum; // of prefix and body, with this field 0
} address_prefix;
_Static_assert(sizeof(address_prefix) == 32, "the prefix is 32 bytes on the wire");

// FNV-1a, 64 bit.
static uint64_t hash_bytes(uint64_t hash, const void *data, size_t n) {
    const uint8_t *bytes = data;
    for (size_t i = 0; i < n; i++)
        hash = (hash ^ bytes[i]) * 0x100000001b3ull;
    return hash;
}
#define HASH_SEED 0xcbf29ce484222325ull

// Shared memory needs the same kernel, pid namespace (UCX opens the segment through /proc) and
// network namespace (UCX wakes the peer through an abstract socket).
static uint64_t host_id(void) {
    uint64_t hash = HASH_SEED;
    char boot[64];
    int fd = open("/proc/sys/kernel/random/boot_id", O_RDONLY | O_CLOEXEC);
    if (fd >= 0) {
        ssize_t n = read(fd, boot, sizeof boot);
        close(fd);
        if (n > 0)
            hash = hash_bytes(hash, boot, (size_t)n);
    }
    static const char *const spaces[] = {"/proc/self/ns/pid", "/proc/self/ns/net"};
    for (size_t i = 0; i < sizeof spaces / sizeof *spaces; i++) {
        struct stat st;
        if (!stat(spaces[i], &st))
            hash = hash_bytes(hash, &st.st_ino, sizeof st.st_ino);
    }
    return hash;
}

static uint64_t address_checksum(address_prefix prefix, const void *body) {
    prefix.checksum = 0;
    return hash_bytes(hash_bytes(HASH_SEED, &prefix, sizeof prefix), body, prefix.body_bytes);
}

int transport_init(transport *t, const transport_ops *ops, const transport_args *args, error *err) {
    t->ops = ops;
    t->loop = args->loop;
    t->callbacks = args->callbacks;
    t->spin_us = args->spin_us;
    int rc = uv_random(NULL, NULL, &t->id, sizeof t->id, 0, NULL);
    if (rc)
        return error_set(err, E_IO, "transport: no random bytes: %s", uv_strerror(rc));
    return E_OK;
}

int transport_set_address(transport *t, const void *body, size_t body_bytes, error *err) {
    if (body_bytes > sizeof t->address - sizeof(address_prefix))
        return error_set(err, E_TOO_LARGE,
                         "transport %s: an address of %zu bytes is over the limit of %zu; restrict "
                         "the interfaces with the bind address",
                         t->ops->kind, body_bytes, sizeof t->address - sizeof(address_prefix));
    address_prefix prefix = {.magic = ADDRESS_MAGIC,
                             .version = ADDRESS_VERSION,
                             .kind = t->ops->kind_id,
                             .body_bytes = (uint16_t)body_bytes,
                             .id = t->id,
                             .host = host_id()};
    prefix.checksum = address_checksum(prefix, body);
    memcpy(t->address, &prefix, sizeof prefix);
    memcpy(t->address + sizeof prefix, body, body_bytes);
    t->address_bytes = sizeof prefix + body_bytes;
    return E_OK;
}

int transport_open(const transport_args *args, transport **out, error *err) {
    const transport_callbacks *cb = &args->callbacks;
    if (!args->loop || !cb->place || !cb->arrived || !cb->abandoned || !cb->sent || !cb->lost)
        return error_set(err, E_INVALID, "transport: a loop and every callback are required");
    for (size_t i = 0; i < N_KINDS; i++)
        if (args->kind && !strcmp(args->kind, kinds[i]->kind))
            return kinds[i]->open(args, out, err);
    return error_set(err, E_INVALID, "transport: unknown kind \"%s\"; use inproc, shm or tcp",
                     args->kind ? args->kind : "");
}

void transport_close(transport *t, void (*done)(void *user), void *user) {
    if (!t || t->closing)
        return;
    t->closing = true;
    t->done = done;
    t->done_user = user;
    t->ops->close(t);
}

int transport_address(transport *t, const void **out, size_t *n_bytes) {
    if (t->closing)
        return E_STATE;
    *out = t->address;
    *n_bytes = t->address_bytes;
    return E_OK;
}

int transport_connect(transport *t, const void *address, size_t n_bytes, transport_peer **out,
                      error *err) {
    const char *kind = t->ops->kind;
    if (t->closing)
        return error_set(err, E_STATE, "transport %s: closing", kind);
    address_prefix prefix;
    if (!address || n_bytes < sizeof prefix || n_bytes > TRANSPORT_MAX_ADDRESS)
        return error_set(err, E_INVALID, "transport %s: a peer's address of %zu bytes", kind,
                         n_bytes);
    memcpy(&prefix, address, sizeof prefix);
    const uint8_t *body = (const uint8_t *)address + sizeof prefix;
    if (prefix.magic != ADDRESS_MAGIC)
        return error_set(err, E_INVALID, "transport %s: not the address of a transport", kind);
    if (prefix.version != ADDRESS_VERSION)
        return error_set(err, E_INVALID,
                         "transport %s: the peer's address has version %u, ours is %u; run the "
                         "same build at both ends",
                         kind, (unsigned)prefix.version, (unsigned)ADDRESS_VERSION);
    if (prefix.body_bytes != n_bytes - sizeof prefix)
        return error_set(err, E_INVALID,
                         "transport %s: the peer's address is cut: %zu bytes of %zu", kind,
                         n_bytes - sizeof prefix, (size_t)prefix.body_bytes);
    if (prefix.checksum != address_checksum(prefix, body))
        return error_set(err, E_INVALID, "transport %s: the peer's address is damaged", kind);
    if (prefix.kind != t->ops->kind_id)
        return error_set(err, E_INVALID,
                         "transport %s: the peer's address is of another kind; use the same "
                         "transport at both ends",
                         kind);
    if (t->ops->same_host && prefix.host != host_id())
        return error_set(err, E_INVALID,
                         "transport %s: the peer is on another host or in another container; use "
                         "tcp",
                         kind);
    return t->ops->connect(t, prefix.id, body, prefix.body_bytes, out, err);
}

void transport_peer_close(transport_peer *peer) {
    if (!peer || peer->closing)
        return;
    peer->closing = true;
    peer->owner->ops->peer_close(peer);
}

int transport_send(transport_peer *peer, const frame_header *header, const void *payload,
                   size_t bytes, void *token) {
    if (peer->closing || peer->lost || peer->owner->closing)
        return E_CLOSED;
    if (bytes > FRAME_MAX_BYTES)
        return E_TOO_LARGE;
    return peer->owner->ops->send(peer, header, payload, bytes, token);
}

void transport_expect(transport *t, bool on) {
    t->ops->expect(t, on);
}

transport_stats transport_stats_get(const transport *t) {
    return t->stats;
}
