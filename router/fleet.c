#include "router/fleet.h"

#include "engine/control.h"
#include "engine/log.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

enum { CLOSE_GRACE_MS = 5000, SPARE_STRANGERS = 16 };

typedef struct member member;

// An accepted connection: a stranger until its HELLO, then a member's.
typedef struct peer_link {
    fleet *fleet;
    member *member; // NULL: a stranger
    control_conn *conn;
    struct peer_link *next;
} peer_link;

typedef enum member_state {
    MEMBER_AWAITED,
    MEMBER_LOADING,
    MEMBER_LOADED,
    MEMBER_JOINED,
    MEMBER_GONE
} member_state;

struct member {
    fleet *fleet;
    worker_kind kind;
    uint32_t rank;
    member_state state;
    bool launched;      // a child of ours
    bool child_running; // process is valid and its exit has not been seen
    uv_process_t process;
    control_conn *conn; // NULL: none
    uint64_t loaded_bytes, total_bytes;
    message_ready ready;
    char failure[512]; // what its FAILED message said
    char exit_text[64];
};

struct fleet {
    fleet_args args;
    char dir[64]; // of the unix socket; "" when there is none
    control_listener *listener;
    uv_timer_t timer; // start timeout, then close grace
    member *members;  // attention workers by rank, then FFN workers by rank
    size_t n_attention, n_ffn;
    peer_link *links;
    size_t n_strangers;
    size_t n_processes, n_handles; // still to be closed
    bool ready, failed, closing;
    int shown_percent;
    bytes_writer out;
    message_topology topology;
    char *config_json;
    void (*done)(void *user);
    void *done_user;
};

static member *member_at(fleet *f, worker_kind kind, size_t rank) {
    return &f->members[(kind == WORKER_FFN ? f->n_attention : 0) + rank];
}

static size_t member_count(const fleet *f) {
    return f->n_attention + f->n_ffn;
}

static const char *kind_name(worker_kind kind) {
    return kind == WORKER_FFN ? "ffn" : "attn";
}

// ---- failure ----

static void fail(fleet *f, const char *reason) {
    if (f->failed || f->closing)
        return;
    f->failed = true;
    f->args.on_failed(f->args.user, reason);
}

static void fail_member(member *m, const char *what) {
    char reason[700];
    if (m->state == MEMBER_GONE)
        return;
    const char *when = m->state == MEMBER_JOINED ? "" : " before it was ready";
    m->state = MEMBER_GONE;
    if (m->failure[0])
        snprintf(reason, sizeof reason, "%s%u: %s", kind_name(m->kind), m->rank, m->failure);
    else
        snprintf(reason, sizeof reason, "%s%u: %s%s", kind_name(m->kind), m->rank, what, when);
    fail(m->fleet, reason);
}

// ---- progress of loading ----

static void show_progress(fleet *f) {
    uint64_t done = 0, total = 0;
    for (size_t i = 0; i < member_count(f); i++) {
        if (!f->members[i].total_bytes)
            return; // not all are known yet
        done += f->members[i].loaded_bytes;
        total += f->members[i].total_bytes;
    }
    int percent = (int)(done * 100 / total);
    bool terminal = isatty(STDERR_FILENO);
    int step = terminal ? 1 : 25;
    if (percent / step == f->shown_percent / step)
        return;
    f->shown_percent = percent;
    if (terminal)
        fprintf(stderr, "\rloading weights: %3d%% of %.1f MB%s", percent, (double)total / 1e6,
                percent == 100 ? "\n" : "");
    else
        log_info("loading weights: %d%% of %.1f MB", percent, (double)total / 1e6);
}

// ---- joining ----

static void send_out(member *m, uint16_t type) {
    if (m->conn && !m->fleet->out.failed)
        control_send(m->conn, type, m->fleet->out.data, m->fleet->out.n);
    bytes_writer_reset(&m->fleet->out);
}

static void tell_topology(fleet *f) {
    message_topology *t = &f->topology;
    for (size_t i = 0; i < member_count(f); i++) {
        member *m = &f->members[i];
        worker_kind other = m->kind == WORKER_FFN ? WORKER_ATTENTION : WORKER_FFN;
        t->epoch = 1;
        t->n_peers = (uint32_t)(other == WORKER_FFN ? f->n_ffn : f->n_attention);
        for (uint32_t rank = 0; rank < t->n_peers; rank++) {
            const message_ready *ready = &member_at(f, other, rank)->ready;
            t->peers[rank].rank = rank;
            t->peers[rank].n_address = ready->n_address;
            memcpy(t->peers[rank].address, ready->address, ready->n_address);
        }
        message_topology_encode(&f->out, t);
        send_out(m, MESSAGE_TOPOLOGY);
    }
}

static bool all_at_least(const fleet *f, member_state state) {
    for (size_t i = 0; i < member_count(f); i++)
        if (f->members[i].state < state || f->members[i].state == MEMBER_GONE)
            return false;
    return true;
}

static void take_ready(member *m, const void *payload, size_t n) {
    fleet *f = m->fleet;
    if (m->state != MEMBER_LOADING || message_ready_decode(payload, n, &m->ready)) {
        fail_member(m, "sent a READY message that cannot be read");
    } else if (m->ready.plan_hash != f->args.plan->hash) {
        fail_member(m, "has another model or configuration than the router (plan hash differs)");
    } else {
        m->state = MEMBER_LOADED;
        if (all_at_least(f, MEMBER_LOADED))
            tell_topology(f);
    }
}

static void take_joined(member *m) {
    fleet *f = m->fleet;
    if (m->state != MEMBER_LOADED)
        return;
    m->state = MEMBER_JOINED;
    if (!f->ready && all_at_least(f, MEMBER_JOINED)) {
        f->ready = true;
        uv_timer_stop(&f->timer);
        f->args.on_ready(f->args.user);
    }
}

static void take_message(member *m, uint16_t type, const void *payload, size_t n) {
    fleet *f = m->fleet;
    switch (type) {
    case MESSAGE_PROGRESS:
        if (!message_progress_decode(payload, n, &m->loaded_bytes, &m->total_bytes))
            show_progress(f);
        break;
    case MESSAGE_READY:
        take_ready(m, payload, n);
        break;
    case MESSAGE_JOINED:
        take_joined(m);
        break;
    case MESSAGE_FAILED:
        snprintf(m->failure, sizeof m->failure, "%.*s", (int)(n < 500 ? n : 500),
                 (const char *)payload);
        break;
    default:
        if (m->kind == WORKER_ATTENTION && !f->failed && !f->closing)
            f->args.on_message(f->args.user, m->rank, type, payload, n);
    }
}

// The member a HELLO is of: the launched one of that rank, or the first place still awaited.
static member *find_member(fleet *f, const message_hello *hello) {
    size_t n = hello->kind == WORKER_FFN ? f->n_ffn : f->n_attention;
    for (size_t rank = 0; rank < n; rank++) {
        member *m = member_at(f, hello->kind, rank);
        bool fits = hello->rank < 0 ? !m->launched : (size_t)hello->rank == rank;
        if (fits && m->state == MEMBER_AWAITED && !m->conn)
            return m;
    }
    return NULL;
}

static void take_hello(peer_link *l, uint16_t type, const void *payload, size_t n) {
    fleet *f = l->fleet;
    message_hello hello;
    member *m = NULL;
    if (type == MESSAGE_HELLO && !message_hello_decode(payload, n, &hello) &&
        hello.protocol == MESSAGE_PROTOCOL)
        m = find_member(f, &hello);
    if (!m || f->failed || f->closing) {
        log_warn("a connection to the control socket is no worker that is awaited; closed");
        control_close(l->conn);
        return;
    }
    f->n_strangers--;
    l->member = m;
    m->conn = l->conn;
    m->state = MEMBER_LOADING;
    message_config_encode(&f->out, m->rank, f->config_json, strlen(f->config_json));
    send_out(m, MESSAGE_CONFIG);
}

static void on_message(void *user, control_conn *conn, uint16_t type, const void *payload,
                       size_t n) {
    peer_link *l = user;
    (void)conn;
    if (l->member)
        take_message(l->member, type, payload, n);
    else
        take_hello(l, type, payload, n);
}

static void check_closed(fleet *f);

static void lost_member(member *m, const char *reason) {
    char what[200];
    m->conn = NULL;
    snprintf(what, sizeof what, "its control connection ended: %s", reason);
    // A child's exit status says more than the end of its connection, and follows at once.
    if (m->failure[0] || !m->child_running)
        fail_member(m, m->exit_text[0] ? m->exit_text : what);
}

static void on_closed(void *user, control_conn *conn, const char *reason) {
    peer_link *l = user;
    fleet *f = l->fleet;
    (void)conn;
    for (peer_link **at = &f->links; *at; at = &(*at)->next) {
        if (*at == l) {
            *at = l->next;
            break;
        }
    }
    if (l->member)
        lost_member(l->member, reason);
    else
        f->n_strangers--;
    free(l);
    check_closed(f);
}

static void on_accept(void *user, control_conn *conn, control_callbacks *callbacks) {
    fleet *f = user;
    // All workers may connect before the first HELLO is read.
    size_t most = member_count(f) + SPARE_STRANGERS;
    peer_link *l = f->n_strangers < most ? calloc(1, sizeof *l) : NULL;
    if (!l) {
        log_warn("too many connections to the control socket have said nothing; refused");
        control_close(conn);
        return;
    }
    *l = (peer_link){.fleet = f, .conn = conn, .next = f->links};
    *callbacks = (control_callbacks){l, on_message, on_closed};
    f->links = l;
    f->n_strangers++;
}

// ---- launching ----

static void on_process_closed(uv_handle_t *handle) {
    member *m = handle->data;
    m->fleet->n_processes--;
    check_closed(m->fleet);
}

static void on_child_exit(uv_process_t *process, int64_t status, int signal_number) {
    member *m = process->data;
    m->child_running = false;
    if (signal_number)
        snprintf(m->exit_text, sizeof m->exit_text, "ended by signal %d", signal_number);
    else
        snprintf(m->exit_text, sizeof m->exit_text, "exited with status %lld", (long long)status);
    if (!m->conn) // else what it said last is still to be read
        fail_member(m, m->exit_text);
    uv_close((uv_handle_t *)process, on_process_closed);
}

static int launch(member *m, error *err) {
    fleet *f = m->fleet;
    char path[4200], rank[16];
    ssize_t n = readlink("/proc/self/exe", path, sizeof path - 32);
    if (n <= 0)
        return error_set(err, E_IO, "cannot tell where the tandem executable is");
    path[n] = 0;
    char *slash = strrchr(path, '/');
    snprintf(slash + 1, 32, "tandem-%s", kind_name(m->kind));
    snprintf(rank, sizeof rank, "%u", m->rank);
    char *argv[] = {path,     "--join", (char *)control_listener_address(f->listener),
                    "--rank", rank,     NULL};
    uv_stdio_container_t stdio[] = {{.flags = UV_IGNORE},
                                    {.flags = UV_INHERIT_FD, .data.fd = STDERR_FILENO},
                                    {.flags = UV_INHERIT_FD, .data.fd = STDERR_FILENO}};
    uv_process_options_t options = {
        .exit_cb = on_child_exit, .file = path, .args = argv, .stdio_count = 3, .stdio = stdio};
    m->process.data = m;
    int code = uv_spawn(f->args.loop, &m->process, &options);
    f->n_processes++;
    if (code) {
        uv_close((uv_handle_t *)&m->process, on_process_closed);
        return error_set(err, E_IO, "cannot start %s: %s", path, uv_strerror(code));
    }
    m->child_running = true;
    return E_OK;
}

// ---- open ----

static void on_start_timeout(uv_timer_t *timer) {
    fleet *f = timer->data;
    member *last = &f->members[0];
    for (size_t i = 1; i < member_count(f); i++)
        if (f->members[i].state < last->state)
            last = &f->members[i];
    if (last->state == MEMBER_JOINED)
        return;
    snprintf(last->failure, sizeof last->failure, "has not %s within router.start_timeout_s",
             last->state == MEMBER_AWAITED ? "joined" : "loaded");
    fail_member(last, last->failure);
}

static void init_members(fleet *f) {
    const config *c = f->args.config;
    for (size_t i = 0; i < member_count(f); i++) {
        member *m = &f->members[i];
        bool ffn = i >= f->n_attention;
        m->fleet = f;
        m->kind = ffn ? WORKER_FFN : WORKER_ATTENTION;
        m->rank = (uint32_t)(ffn ? i - f->n_attention : i);
        m->launched = (int64_t)m->rank < (ffn ? c->ffn.launch : c->attention.launch);
    }
}

static int listen_for_workers(fleet *f, error *err) {
    const config *c = f->args.config;
    char address[sizeof f->dir + 32];
    if (c->router.control[0]) {
        snprintf(address, sizeof address, "%.90s", c->router.control);
    } else {
        snprintf(f->dir, sizeof f->dir, "/tmp/tandem-XXXXXX");
        if (!mkdtemp(f->dir)) {
            f->dir[0] = 0;
            return error_set(err, E_IO, "cannot make a directory in /tmp for the control socket");
        }
        snprintf(address, sizeof address, "unix:%s/control", f->dir);
    }
    control_listen_args args = {f->args.loop, address, f, on_accept};
    return control_listen(&args, &f->listener, err);
}

int fleet_open(const fleet_args *args, fleet **out, error *err) {
    const config *c = args->config;
    fleet *f = calloc(1, sizeof *f);
    if (!f)
        return error_set(err, E_NO_MEMORY, "fleet: out of memory");
    f->args = *args;
    f->n_attention = (size_t)c->attention.workers;
    f->n_ffn = c->mode == CONFIG_MODE_COLOCATED ? 0 : (size_t)c->ffn.workers;
    f->members = calloc(member_count(f), sizeof *f->members);
    f->config_json = config_to_json(c);
    int code = E_OK;
    if (!f->members || !f->config_json)
        code = error_set(err, E_NO_MEMORY, "fleet: out of memory");
    if (!code)
        code = listen_for_workers(f, err);
    if (code) {
        if (f->dir[0])
            rmdir(f->dir);
        free(f->members);
        free(f->config_json);
        free(f);
        return code;
    }
    uv_timer_init(args->loop, &f->timer);
    f->timer.data = f;
    f->n_handles = 1;
    init_members(f);
    uv_timer_start(&f->timer, on_start_timeout, (uint64_t)(c->router.start_timeout_s * 1000), 0);
    *out = f;
    for (size_t i = 0; i < member_count(f) && !code; i++)
        if (f->members[i].launched)
            code = launch(&f->members[i], err);
    if (code)
        *out = NULL, fleet_close(f, true, NULL, NULL);
    return code;
}

// ---- use ----

int fleet_send(fleet *f, uint32_t attention_rank, uint16_t type, const void *payload, size_t n) {
    member *m = member_at(f, WORKER_ATTENTION, attention_rank);
    return m->conn ? control_send(m->conn, type, payload, n) : E_CLOSED;
}

uint64_t fleet_kv_tokens(const fleet *f) {
    uint64_t least = UINT64_MAX;
    for (size_t i = 0; i < f->n_attention; i++)
        if (f->members[i].ready.kv_tokens < least)
            least = f->members[i].ready.kv_tokens;
    return least;
}

// ---- close ----

static void on_timer_closed(uv_handle_t *handle) {
    fleet *f = handle->data;
    f->n_handles--;
    check_closed(f);
}

static void check_closed(fleet *f) {
    if (!f->closing || f->links || f->n_processes)
        return;
    if (f->n_handles) {
        if (!uv_is_closing((uv_handle_t *)&f->timer))
            uv_close((uv_handle_t *)&f->timer, on_timer_closed);
        return;
    }
    void (*done)(void *) = f->done;
    void *user = f->done_user;
    if (f->dir[0])
        rmdir(f->dir);
    bytes_writer_free(&f->out);
    free(f->config_json);
    free(f->members);
    free(f);
    if (done)
        done(user);
}

static void kill_rest(fleet *f) {
    for (size_t i = 0; i < member_count(f); i++) {
        member *m = &f->members[i];
        if (m->child_running)
            uv_process_kill(&m->process, SIGKILL);
    }
    for (peer_link *l = f->links; l; l = l->next)
        control_close(l->conn);
}

static void on_grace_over(uv_timer_t *timer) {
    kill_rest(timer->data);
}

void fleet_close(fleet *f, bool now, void (*done)(void *user), void *user) {
    f->closing = true;
    f->done = done;
    f->done_user = user;
    control_listener_close(f->listener);
    f->listener = NULL;
    uv_timer_stop(&f->timer);
    for (peer_link *l = f->links; l; l = l->next)
        if (!l->member)
            control_close(l->conn);
    if (now) {
        kill_rest(f);
    } else {
        for (size_t i = 0; i < member_count(f); i++)
            send_out(&f->members[i], MESSAGE_SHUTDOWN);
        uv_timer_start(&f->timer, on_grace_over, CLOSE_GRACE_MS, 0);
    }
    check_closed(f);
}
