// transport_ucx_config.h: how UCX is set up for a kind of transport; for transport_ucx.c only.
#ifndef TANDEM_ENGINE_TRANSPORT_UCX_CONFIG_H
#define TANDEM_ENGINE_TRANSPORT_UCX_CONFIG_H

#include "engine/status.h"

#include <stdbool.h>
#include <ucp/api/ucp.h>

// A UCX configuration for shared memory, or for TCP on the interface that owns bind (an address,
// the name of an interface, or NULL for any). Turns UCX's own signal handlers and log lines off.
// The caller releases *out with ucp_config_release.
int ucx_config_make(bool shared_memory, const char *bind, ucp_config_t **out, error *err);

#endif
