#include "engine/worker.h"

#include "engine/control.h"
#include "engine/log.h"

#include <malloc.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

typedef struct worker_args {
    const char *join;
    int rank; // -1: the router chooses; else it has launched this worker
    const char *bind;
} worker_args;

typedef struct worker_node {
    const node_type *type;
    void *node;
    node_env env;
} worker_node;

typedef struct worker {
    worker_args args;
    uv_loop_t loop;
    control_conn *conn; // NULL once closed
    bytes_writer out;
    bool has_config, shutting_down;
    uint32_t rank;
    char bind[CONFIG_TEXT_BYTES];
    config config;
    plan plan;
    worker_node nodes[2]; // the second one when colocated
    size_t n_nodes, n_closing;
    uint64_t read_bytes, total_bytes; // of weights
    uint64_t percent;                 // as last reported
    bool pumping;                     // the loop runs inside node open, for the progress alone
    int exit_status;
    message_topology topology;
} worker;

// ---- command line ----

static int parse_args(int argc, char **argv, const char *name, worker_args *out) {
    *out = (worker_args){.rank = -1};
    for (int i = 1; i < argc; i++) {
        bool has_value = i + 1 < argc;
        char *end = NULL;
        if (!strcmp(argv[i], "--join") && has_value) {
            out->join = argv[++i];
        } else if (!strcmp(argv[i], "--rank") && has_value) {
            const char *text = argv[++i];
            long rank = strtol(text, &end, 10);
            out->rank = (int)rank;
            if (end == text || *end || rank < 0 || rank >= MESSAGE_MAX_WORKERS) {
                fprintf(stderr, "tandem-%s: --rank %s: expected 0..%d\n", name, argv[i],
                        MESSAGE_MAX_WORKERS - 1);
                return E_INVALID;
            }
        } else if (!strcmp(argv[i], "--bind") && has_value) {
            out->bind = argv[++i];
        } else if (!strcmp(argv[i], "--help")) {
            printf("usage: tandem-%s --join ADDRESS [--bind ADDRESS]\n\n"
                   "Joins the bundle whose router listens at ADDRESS (HOST:PORT as set by\n"
                   "router.control, or unix:PATH) as its next %s worker. The router sends the\n"
                   "configuration; the model must be at the same path on this host.\n\n"
                   "  --bind ADDRESS  the local address that carries the activations; without it\n"
                   "                  the one that reaches the router\n",
                   name, name);
            return E_CLOSED;
        } else {
            fprintf(stderr, "tandem-%s: unexpected '%s'; see --help\n", name, argv[i]);
            return E_INVALID;
        }
    }
    if (!out->join) {
        fprintf(stderr, "tandem-%s: --join ADDRESS is missing; see --help\n", name);
        return E_INVALID;
    }
    return E_OK;
}

// ---- towards the router ----

static void send_out(worker *w, uint16_t type) {
    if (w->conn && !w->out.failed)
        control_send(w->conn, type, w->out.data, w->out.n);
    bytes_writer_reset(&w->out);
}

static void say_failed(worker *w, const error *err) {
    if (w->args.rank < 0) // the router that launched us says it in its own log
        log_error("%s", err->text);
    bytes_write_blob(&w->out, err->text, strlen(err->text));
    send_out(w, MESSAGE_FAILED);
    w->exit_status = 1;
}

static void begin_shutdown(worker *w);

static void node_progress(void *user, size_t bytes) {
    worker *w = user;
    w->read_bytes += bytes;
    uint64_t percent = w->read_bytes * 100 / w->total_bytes;
    if (percent == w->percent)
        return;
    w->percent = percent;
    message_progress_encode(&w->out, w->read_bytes, w->total_bytes);
    send_out(w, MESSAGE_PROGRESS);
    w->pumping = true;
    uv_run(&w->loop, UV_RUN_NOWAIT);
    w->pumping = false;
}

static void node_send(void *user, uint16_t type, const void *payload, size_t n) {
    worker *w = user;
    if (w->conn)
        control_send(w->conn, type, payload, n);
}

static void node_fail(void *user, const error *err) {
    say_failed(user, err);
    begin_shutdown(user);
}

// ---- nodes ----

static int usable_cores(void) {
    cpu_set_t set;
    return sched_getaffinity(0, sizeof set, &set) ? 1 : CPU_COUNT(&set);
}

// A worker's threads without a setting: this host's cores over the workers launched on it.
static int default_threads(const config *c) {
    int64_t workers = c->attention.launch;
    if (c->mode == CONFIG_MODE_DISAGGREGATED)
        workers += c->ffn.launch;
    int64_t share = workers ? usable_cores() / workers : usable_cores();
    return share > 1 ? (int)share : 1;
}

// Polling pays only where every thread of the bundle has a core of its own.
static uint32_t spin_us(const config *c, int threads) {
    enum { SPIN_US = 50 };
    if (c->wire.spin_us >= 0)
        return (uint32_t)c->wire.spin_us;
    int64_t workers = c->attention.launch + c->ffn.launch;
    return c->mode == CONFIG_MODE_DISAGGREGATED && workers * threads <= usable_cores() ? SPIN_US
                                                                                       : 0;
}

static const char *transport_kind(const config *c) {
    if (c->mode == CONFIG_MODE_COLOCATED)
        return "inproc";
    bool local = c->attention.launch == c->attention.workers && c->ffn.launch == c->ffn.workers;
    if (c->wire.transport == CONFIG_TRANSPORT_TCP ||
        (c->wire.transport == CONFIG_TRANSPORT_AUTO && !local))
        return "tcp";
    return "shm";
}

// The interface that carries activations: the one asked for (wire.bind speaks of the router's host
// only), else the one that reaches the router.
static void choose_bind(worker *w) {
    if (w->args.bind)
        snprintf(w->bind, sizeof w->bind, "%s", w->args.bind);
    else if (w->args.rank >= 0 && w->config.wire.bind[0])
        snprintf(w->bind, sizeof w->bind, "%s", w->config.wire.bind);
    else if (w->conn)
        control_local_host(w->conn, w->bind, sizeof w->bind);
}

static int open_node(worker *w, const node_type *type, uint32_t rank, error *err) {
    worker_node *n = &w->nodes[w->n_nodes];
    const config *c = &w->config;
    int64_t threads = type->kind == WORKER_FFN ? c->ffn.threads : c->attention.threads;
    if (!threads)
        threads = default_threads(c);
    n->type = type;
    n->env = (node_env){.loop = &w->loop,
                        .config = c,
                        .plan = &w->plan,
                        .rank = rank,
                        .transport = transport_kind(c),
                        .bind = w->bind[0] ? w->bind : NULL,
                        .spin_us = spin_us(c, (int)threads),
                        .threads = (int)threads,
                        .user = w,
                        .progress = node_progress,
                        .send = node_send,
                        .fail = node_fail};
    int code = type->open(&n->env, &n->node, err);
    if (!code)
        w->n_nodes++;
    return code;
}

static int open_nodes(worker *w, const node_type *type, const node_type *ffn, error *err) {
    int code = plan_make(&w->config, &w->plan, err);
    if (code)
        return code;
    bool colocated = w->config.mode == CONFIG_MODE_COLOCATED;
    if (type->kind == WORKER_ATTENTION)
        w->total_bytes += plan_attention_bytes(&w->plan);
    if (type->kind == WORKER_FFN || colocated)
        w->total_bytes += plan_ffn_bytes(&w->plan, colocated ? 0 : w->rank);
    choose_bind(w);
    code = open_node(w, type, w->rank, err);
    if (!code && colocated) {
        if (!ffn)
            return error_set(err, E_STATE, "an FFN worker has no part in a colocated bundle");
        code = open_node(w, ffn, 0, err);
    }
    return code;
}

static void say_ready(worker *w) {
    message_ready ready;
    w->nodes[0].type->describe(w->nodes[0].node, &ready);
    if (w->n_nodes == 2) { // the peers are in this process
        message_ready local;
        w->nodes[1].type->describe(w->nodes[1].node, &local);
        ready.weight_bytes += local.weight_bytes;
        ready.n_address = 0;
    }
    message_ready_encode(&w->out, &ready);
    send_out(w, MESSAGE_READY);
}

// The two nodes of a colocated worker are each other's only peer.
static int join_colocated(worker *w, uint32_t epoch, error *err) {
    int code = E_OK;
    for (size_t i = 0; i < 2 && !code; i++) {
        worker_node *self = &w->nodes[i], *other = &w->nodes[1 - i];
        message_ready ready;
        other->type->describe(other->node, &ready);
        message_topology *t = &w->topology;
        t->epoch = epoch;
        t->n_peers = 1;
        t->peers[0].rank = other->env.rank;
        t->peers[0].n_address = ready.n_address;
        memcpy(t->peers[0].address, ready.address, ready.n_address);
        code = self->type->join(self->node, t, err);
    }
    return code;
}

static void join(worker *w, const void *payload, size_t n) {
    error err;
    int code = message_topology_decode(payload, n, &w->topology);
    if (code)
        error_set(&err, code, "a TOPOLOGY message cannot be read");
    else if (w->n_nodes == 2)
        code = join_colocated(w, w->topology.epoch, &err);
    else
        code = w->nodes[0].type->join(w->nodes[0].node, &w->topology, &err);
    if (code)
        node_fail(w, &err);
    else
        send_out(w, MESSAGE_JOINED);
}

// ---- from the router ----

static int take_config(worker *w, const void *payload, size_t n, error *err) {
    const char *text;
    size_t n_text;
    if (message_config_decode(payload, n, &w->rank, &text, &n_text))
        return error_set(err, E_PROTOCOL, "a CONFIG message cannot be read");
    return config_parse_json("the router's configuration", text, n_text, &w->config, err);
}

static void on_message(void *user, control_conn *conn, uint16_t type, const void *payload,
                       size_t n) {
    worker *w = user;
    error err;
    (void)conn;
    if (type == MESSAGE_SHUTDOWN) {
        begin_shutdown(w);
    } else if (type == MESSAGE_CONFIG && !w->has_config) {
        if (take_config(w, payload, n, &err)) {
            node_fail(w, &err);
            return;
        }
        w->has_config = true;
        uv_stop(&w->loop); // loading runs outside of the loop's callbacks
    } else if (w->n_nodes && !w->shutting_down) {
        if (type == MESSAGE_TOPOLOGY)
            join(w, payload, n);
        else
            w->nodes[0].type->message(w->nodes[0].node, type, payload, n);
    } else {
        log_warn("message of type %u at the wrong time; ignored", type);
    }
}

static void on_closed(void *user, control_conn *conn, const char *reason) {
    worker *w = user;
    (void)conn;
    w->conn = NULL;
    if (!w->shutting_down) {
        log_error("lost the router: %s", reason);
        w->exit_status = 1;
        begin_shutdown(w);
    }
}

// ---- the end ----

static void on_node_closed(void *user) {
    worker *w = user;
    if (--w->n_closing == 0 && w->conn)
        control_close(w->conn);
}

static void begin_shutdown(worker *w) {
    if (w->shutting_down)
        return;
    w->shutting_down = true;
    uv_stop(&w->loop);
    if (w->pumping)
        return; // a node is still opening; worker_main goes on from there
    w->n_closing = w->n_nodes;
    size_t n = w->n_nodes;
    if (!n && w->conn)
        control_close(w->conn);
    for (size_t i = 0; i < n; i++)
        w->nodes[i].type->close(w->nodes[i].node, on_node_closed, w);
    w->n_nodes = 0;
}

static void run_until_closed(worker *w) {
    uv_run(&w->loop, UV_RUN_DEFAULT);
    while (w->shutting_down && uv_run(&w->loop, UV_RUN_DEFAULT))
        continue;
}

int worker_main(int argc, char **argv, const node_type *type, const node_type *ffn) {
    static worker w; // large, and one a process
    error err;
    int code = parse_args(argc, argv, type->name, &w.args);
    if (code)
        return code == E_CLOSED ? 0 : 2;
    log_set_name(type->name);
    // A terminal's Ctrl-C and a service manager's SIGTERM reach the whole group; the router that
    // launched this worker (and gave it its rank) drains first and decides when it goes.
    signal(SIGINT, SIG_IGN);
    if (w.args.rank >= 0)
        signal(SIGTERM, SIG_IGN);
    signal(SIGPIPE, SIG_IGN);
    uv_loop_init(&w.loop);
    control_callbacks callbacks = {&w, on_message, on_closed};
    code = control_connect(&w.loop, w.args.join, &callbacks, &w.conn, &err);
    if (code) {
        log_error("%s", err.text);
        return 1;
    }
    message_hello_encode(&w.out, &(message_hello){.protocol = MESSAGE_PROTOCOL,
                                                  .kind = type->kind,
                                                  .rank = w.args.rank,
                                                  .pid = (int32_t)getpid()});
    send_out(&w, MESSAGE_HELLO);
    uv_run(&w.loop, UV_RUN_DEFAULT); // until the configuration is here, or the end
    if (w.has_config && !w.shutting_down) {
        char name[32];
        snprintf(name, sizeof name, "%s%u", type->name, w.rank);
        log_set_name(name);
        log_set_level(w.config.log.level);
        code = open_nodes(&w, type, ffn, &err);
        malloc_trim(0);        // what the headers of many tensors took goes back to the kernel
        if (w.shutting_down) { // told to go while it loaded
            w.shutting_down = false;
            begin_shutdown(&w);
        } else if (code) {
            node_fail(&w, &err);
        } else {
            say_ready(&w);
        }
    }
    run_until_closed(&w);
    bytes_writer_free(&w.out);
    uv_loop_close(&w.loop);
    return w.exit_status;
}
