// bench_transport.c: round trip and bandwidth of every kind of transport, as a table.
//
// Two processes (inproc: two transports on one loop) send a frame to and fro. "polling" keeps both
// ends awake between frames, "sleeping" lets the loops sleep at once, "rested" sleeps 300 us before
// each round trip, as a worker does that waits for a peer. Medians of single round trips. Bandwidth
// has as many frames under way as are taken, one direction, and ends with an answer to the last.
// Usage: bench_transport [--tiny] [KIND...]
#include "engine/transport.h"

#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

enum { MAX_BYTES = 1 << 20, SPIN_US = 2000, REST_US = 300, N_SIZES = 6 };
enum { ASK_ECHO = 1, ASK_TAKE, ASK_ANSWER };

static const size_t sizes[N_SIZES] = {64, 1024, 8192, 65536, 262144, MAX_BYTES};

typedef struct node {
    uv_loop_t *loop;
    transport *t;
    transport_peer *peer;
    bool far;
    uint64_t n_arrived, n_sent_back;
    uint8_t *in, *out; // (MAX_BYTES)
    bool closed;
} node;

static void die(const char *what) {
    fprintf(stderr, "bench_transport: %s\n", what);
    exit(1);
}

static void *on_place(void *user, const frame_header *header, size_t bytes) {
    (void)header;
    return bytes <= MAX_BYTES ? ((node *)user)->in : NULL;
}

static void on_arrived(void *user, const frame_header *header, void *payload, size_t bytes) {
    (void)payload;
    node *n = user;
    n->n_arrived++;
    if (!n->far || header->epoch == ASK_TAKE)
        return;
    frame_header reply = *header;
    if (transport_send(n->peer, &reply, n->out, header->epoch == ASK_ECHO ? bytes : 0, n))
        die("an answer was refused");
}

static void on_abandoned(void *user, const frame_header *header, void *payload, size_t bytes) {
    (void)user, (void)header, (void)payload, (void)bytes;
}

static void on_sent(void *user, void *token, int status) {
    (void)token, (void)status;
    ((node *)user)->n_sent_back++;
}

static void on_lost(void *user, transport_peer *peer, const char *reason) {
    (void)peer;
    if (!((node *)user)->far) // a far end ends after the near one
        die(reason);
}

static void on_closed(void *user) {
    ((node *)user)->closed = true;
}

static void open_node(node *n, uv_loop_t *loop, const char *kind, bool far, uint32_t spin_us) {
    *n = (node){.loop = loop, .far = far};
    n->in = calloc(1, MAX_BYTES);
    n->out = calloc(1, MAX_BYTES);
    if (!n->in || !n->out)
        die("out of memory");
    transport_args args = {.kind = kind,
                           .bind = !strcmp(kind, "tcp") ? "127.0.0.1" : NULL,
                           .spin_us = spin_us,
                           .loop = loop,
                           .callbacks = {.user = n,
                                         .place = on_place,
                                         .arrived = on_arrived,
                                         .abandoned = on_abandoned,
                                         .sent = on_sent,
                                         .lost = on_lost}};
    error err = {0};
    if (transport_open(&args, &n->t, &err))
        die(err.text);
    transport_expect(n->t, spin_us > 0);
}

static void close_node(node *n) {
    transport_close(n->t, on_closed, n);
    while (!n->closed)
        uv_run(n->loop, UV_RUN_ONCE);
    free(n->in);
    free(n->out);
}

static void connect_node(node *n, const void *address, size_t bytes) {
    error err = {0};
    if (transport_connect(n->t, address, bytes, &n->peer, &err))
        die(err.text);
}

static void swap_addresses(node *n, int fd) {
    uint8_t mine[TRANSPORT_MAX_ADDRESS] = {0}, theirs[TRANSPORT_MAX_ADDRESS];
    const void *address;
    size_t bytes, their_bytes = 0;
    transport_address(n->t, &address, &bytes);
    memcpy(mine, address, bytes);
    if (write(fd, &bytes, sizeof bytes) != sizeof bytes ||
        write(fd, mine, sizeof mine) != sizeof mine ||
        recv(fd, &their_bytes, sizeof their_bytes, MSG_WAITALL) != sizeof their_bytes ||
        recv(fd, theirs, sizeof theirs, MSG_WAITALL) != sizeof theirs)
        die("the addresses were not exchanged");
    connect_node(n, theirs, their_bytes);
}

static void on_near_gone(uv_poll_t *poll, int status, int events) {
    (void)status, (void)events;
    uv_stop(poll->loop);
}

static int far_main(const char *kind, uint32_t spin_us) {
    uv_loop_t *loop = uv_default_loop();
    node n;
    open_node(&n, loop, kind, true, spin_us);
    swap_addresses(&n, 3);
    uv_poll_t control;
    uv_poll_init(loop, &control, 3);
    uv_poll_start(&control, UV_READABLE | UV_DISCONNECT, on_near_gone);
    uv_run(loop, UV_RUN_DEFAULT);
    uv_close((uv_handle_t *)&control, NULL);
    close_node(&n);
    return 0;
}

extern char **environ;

static pid_t spawn_far(const char *kind, uint32_t spin_us, int *fd) {
    int pair[2];
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair))
        die("no socket pair");
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, pair[1], 3);
    char spin[16];
    snprintf(spin, sizeof spin, "%u", (unsigned)spin_us);
    char *argv[] = {(char *)"far", (char *)kind, spin, NULL};
    pid_t pid;
    if (posix_spawn(&pid, "/proc/self/exe", &actions, NULL, argv, environ))
        die("the far end did not start");
    posix_spawn_file_actions_destroy(&actions);
    close(pair[1]);
    *fd = pair[0];
    return pid;
}

static void run_until(node *n, uint64_t arrived) {
    while (n->n_arrived < arrived)
        uv_run(n->loop, UV_RUN_ONCE);
}

static void send_or_wait(node *n, uint32_t ask, size_t bytes) {
    frame_header h = {.magic = FRAME_MAGIC, .version = FRAME_VERSION, .epoch = ask};
    int rc;
    while ((rc = transport_send(n->peer, &h, n->out, bytes, n)) == E_FULL)
        uv_run(n->loop, UV_RUN_ONCE);
    if (rc)
        die("a send was refused");
}

static int compare_times(const void *a, const void *b) {
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return (x > y) - (x < y);
}

// Median in microseconds.
static double round_trip(node *n, size_t bytes, int rounds, bool rest) {
    uint64_t *times = malloc((size_t)rounds * sizeof *times);
    if (!times)
        die("out of memory");
    for (int i = -3; i < rounds; i++) { // three unmeasured ones connect and warm up
        if (rest)
            usleep(REST_US);
        uint64_t start = uv_hrtime();
        send_or_wait(n, ASK_ECHO, bytes);
        run_until(n, n->n_arrived + 1);
        if (i >= 0)
            times[i] = uv_hrtime() - start;
    }
    qsort(times, (size_t)rounds, sizeof *times, compare_times);
    double median = 1e-3 * (double)times[rounds / 2];
    free(times);
    return median;
}

// GB/s
static double bandwidth(node *n, size_t bytes, size_t total) {
    size_t frames = total / bytes + 1;
    uint64_t start = uv_hrtime();
    for (size_t i = 0; i < frames; i++)
        send_or_wait(n, i + 1 < frames ? ASK_TAKE : ASK_ANSWER, bytes);
    run_until(n, n->n_arrived + 1);
    return (double)(frames * bytes) / (double)(uv_hrtime() - start);
}

typedef struct row {
    double polling, sleeping, rested, bandwidth;
} row;

static void measure(const char *kind, bool spin, bool tiny, row rows[N_SIZES]) {
    uv_loop_t loop;
    uv_loop_init(&loop);
    node near, far;
    pid_t pid = 0;
    int fd = -1;
    uint32_t spin_us = spin ? SPIN_US : 0;
    open_node(&near, &loop, kind, false, spin_us);
    if (!strcmp(kind, "inproc")) {
        const void *address;
        size_t bytes;
        open_node(&far, &loop, kind, true, spin_us);
        transport_address(far.t, &address, &bytes);
        connect_node(&near, address, bytes);
        transport_address(near.t, &address, &bytes);
        connect_node(&far, address, bytes);
    } else {
        pid = spawn_far(kind, spin_us, &fd);
        swap_addresses(&near, fd);
    }
    for (int i = 0; i < N_SIZES; i++) {
        int rounds = tiny ? 5 : 400;
        if (spin) {
            rows[i].polling = round_trip(&near, sizes[i], rounds, false);
            continue;
        }
        rows[i].sleeping = round_trip(&near, sizes[i], rounds, false);
        rows[i].rested = round_trip(&near, sizes[i], rounds, true);
        rows[i].bandwidth = bandwidth(&near, sizes[i], tiny ? 1 << 21 : sizes[i] * 2000);
    }
    close_node(&near);
    if (pid) {
        close(fd);
        int status;
        if (waitpid(pid, &status, 0) != pid || status)
            die("the far end failed");
    } else {
        close_node(&far);
    }
    if (uv_loop_close(&loop))
        die("handles are left on the loop");
}

int main(int argc, char **argv) {
    if (argc == 3 && !strcmp(argv[0], "far"))
        return far_main(argv[1], (uint32_t)atoi(argv[2]));
    static const char *const all[] = {"inproc", "shm", "tcp"};
    bool tiny = argc > 1 && !strcmp(argv[1], "--tiny");
    int first = tiny ? 2 : 1;
    int n_kinds = argc > first ? argc - first : 3;
    printf("| kind | bytes | polling us | sleeping us | rested us | GB/s "
           "|\n|---|---|---|---|---|---|\n");
    for (int k = 0; k < n_kinds; k++) {
        const char *kind = argc > first ? argv[first + k] : all[k];
        row rows[N_SIZES];
        measure(kind, true, tiny, rows);
        measure(kind, false, tiny, rows);
        for (int i = 0; i < N_SIZES; i++)
            printf("| %s | %zu | %.1f | %.1f | %.1f | %.2f |\n", kind, sizes[i], rows[i].polling,
                   rows[i].sleeping, rows[i].rested, rows[i].bandwidth);
        fflush(stdout);
    }
    return 0;
}
