#include "engine/transport_ucx_config.h"

#include "engine/log.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>
#include <ucs/config/global_opts.h>
#include <ucs/debug/debug.h>
#include <unistd.h>
#include <uv.h>

#define QUEUE_ENTRIES "512" // of the shared-memory queue of a process

// UCX installs handlers for crashes when it is loaded and prints its own lines; a process of ours
// says what happens itself. UCX_LOG_LEVEL in the environment turns its lines on again.
static void quiet_ucx(void) {
    static const int signals[] = {SIGILL, SIGSEGV, SIGBUS, SIGFPE};
    if (!getenv("UCX_LOG_LEVEL"))
        ucs_global_opts_set_value_modifiable("LOG_LEVEL", "fatal");
    for (size_t i = 0; i < sizeof signals / sizeof *signals; i++)
        ucs_debug_disable_signal(signals[i]);
}

// Containers may forbid process_vm_readv, which UCX's cma is made of.
static bool cma_permitted(void) {
    char from = 1, to = 0;
    struct iovec local = {&to, 1}, remote = {&from, 1};
    return process_vm_readv(getpid(), &local, 1, &remote, 1, 0) == 1 && to == 1;
}

static const char *shared_memory_transports(void) {
    bool posix = !access("/dev/shm", R_OK | W_OK);
    bool cma = cma_permitted();
    if (!posix)
        log_warn("transport shm: /dev/shm cannot be written, using System V shared memory");
    if (!cma)
        log_warn("transport shm: reading another process's memory is not permitted here, large "
                 "frames are copied twice (allow ptrace in the container to avoid it)");
    if (posix)
        return cma ? "posix,cma,self" : "posix,self";
    return cma ? "sysv,cma,self" : "sysv,self";
}

// The interface that owns the address bind, or the one that is named so.
static int find_interface(const char *bind, char *name, size_t name_bytes, bool *v6, error *err) {
    uv_interface_address_t *list;
    int n, rc = uv_interface_addresses(&list, &n);
    if (rc)
        return error_set(err, E_IO, "transport tcp: cannot list the interfaces: %s",
                         uv_strerror(rc));
    bool found = false;
    for (int i = 0; i < n && !found; i++) {
        char text[64] = "";
        bool is_v6 = list[i].address.address4.sin_family == AF_INET6;
        if (is_v6)
            uv_ip6_name(&list[i].address.address6, text, sizeof text);
        else
            uv_ip4_name(&list[i].address.address4, text, sizeof text);
        if (strcmp(text, bind) && strcmp(list[i].name, bind))
            continue;
        snprintf(name, name_bytes, "%s", list[i].name);
        *v6 = is_v6 && !strcmp(text, bind);
        found = true;
    }
    uv_free_interface_addresses(list, n);
    if (!found)
        return error_set(err, E_INVALID,
                         "transport tcp: no interface of this host has the bind address \"%s\"",
                         bind);
    return E_OK;
}

typedef struct setting {
    const char *key, *value;
} setting;

static int apply(ucp_config_t *config, const setting *settings, size_t n, error *err) {
    for (size_t i = 0; i < n; i++) {
        ucs_status_t status = ucp_config_modify(config, settings[i].key, settings[i].value);
        if (status != UCS_OK)
            return error_set(err, E_UNSUPPORTED, "transport: UCX refuses %s=%s: %s",
                             settings[i].key, settings[i].value, ucs_status_string(status));
    }
    return E_OK;
}

int ucx_config_make(bool shared_memory, const char *bind, ucp_config_t **out, error *err) {
    char interface[64] = "all";
    bool v6 = false;
    if (!shared_memory && bind) {
        int rc = find_interface(bind, interface, sizeof interface, &v6, err);
        if (rc)
            return rc;
    }
    quiet_ucx();
    ucp_config_t *config;
    ucs_status_t status = ucp_config_read(NULL, NULL, &config);
    if (status != UCS_OK)
        return error_set(err, E_IO, "transport: UCX cannot read its configuration: %s",
                         ucs_status_string(status));
    int rc;
    if (shared_memory) {
        // Large frames go through the queue in pieces of 8 KB, and a sender that waits for room
        // there must poll: 512 entries, 4 MB, hold what a few lanes have under way.
        // Options of a device are named without the name of the device here. Endpoints can be
        // force-closed only with error handling on, which shared memory offers only when asked.
        const setting settings[] = {{"TLS", shared_memory_transports()},
                                    {"MM_ERROR_HANDLING", "y"},
                                    {"MM_FIFO_SIZE", QUEUE_ENTRIES}};
        rc = apply(config, settings, sizeof settings / sizeof *settings, err);
    } else {
        // A blocking connect to a host that does not answer would stop the loop for minutes.
        const setting settings[] = {{"TLS", "tcp,self"},
                                    {"NET_DEVICES", interface},
                                    {"AF_PRIO", v6 ? "inet6,inet" : "inet,inet6"},
                                    {"CONN_NB", "y"}};
        rc = apply(config, settings, sizeof settings / sizeof *settings, err);
    }
    if (rc) {
        ucp_config_release(config);
        return rc;
    }
    *out = config;
    return E_OK;
}
