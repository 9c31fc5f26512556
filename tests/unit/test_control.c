// Control connections: whole messages however the bytes are cut, every hostile header refused, and
// exactly one end for every connection, whatever ends it.
#include "engine/bytes.h"
#include "engine/control.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cmocka.h>

enum { WAIT_MS = 5000, MAX_CONNS = 8 };

typedef struct side {
    control_conn *conn;
    unsigned n_messages, n_closed;
    uint16_t last_type;
    size_t last_bytes;
    bool wrong;
    bool echo, close_at_message;
    char reason[128];
} side;

typedef struct stage {
    uv_loop_t loop;
    uv_timer_t deadline;
    bool late;
    control_listener *listener;
    char path[64];
    side accepted[MAX_CONNS];
    unsigned n_accepted;
} stage;

static uint8_t byte_at(uint16_t type, size_t i) {
    return (uint8_t)(type * 31 + i * 7 + (i >> 8));
}

static void on_message(void *user, control_conn *conn, uint16_t type, const void *payload,
                       size_t n) {
    side *s = user;
    s->n_messages++;
    s->last_type = type;
    s->last_bytes = n;
    const uint8_t *bytes = payload;
    for (size_t i = 0; i < n; i++)
        s->wrong = s->wrong || bytes[i] != byte_at(type, i);
    if (s->echo && control_send(conn, type, payload, n))
        s->wrong = true;
    if (s->close_at_message)
        control_close(conn);
}

static void on_closed(void *user, control_conn *conn, const char *reason) {
    side *s = user;
    s->wrong = s->wrong || (s->conn && conn != s->conn);
    s->n_closed++;
    snprintf(s->reason, sizeof s->reason, "%s", reason);
}

static control_callbacks callbacks_of(side *s) {
    return (control_callbacks){.user = s, .on_message = on_message, .on_closed = on_closed};
}

static void on_accept(void *user, control_conn *conn, control_callbacks *callbacks) {
    stage *st = user;
    assert_true(st->n_accepted < MAX_CONNS);
    side *s = &st->accepted[st->n_accepted++];
    s->conn = conn;
    *callbacks = callbacks_of(s);
}

static void on_deadline(uv_timer_t *timer) {
    ((stage *)timer->data)->late = true;
}

#define WAIT_FOR(st, condition)                                                                    \
    do {                                                                                           \
        bool held = false;                                                                         \
        (st)->late = false;                                                                        \
        uv_timer_start(&(st)->deadline, on_deadline, WAIT_MS, 0);                                  \
        while (!(held = (condition)) && !(st)->late)                                               \
            uv_run(&(st)->loop, UV_RUN_ONCE);                                                      \
        uv_timer_stop(&(st)->deadline);                                                            \
        if (!held)                                                                                 \
            fail_msg("waited %d ms for " #condition, (int)WAIT_MS);                                \
    } while (0)

static stage *begin(const char *address) {
    stage *st = calloc(1, sizeof *st);
    assert_non_null(st);
    uv_loop_init(&st->loop);
    uv_timer_init(&st->loop, &st->deadline);
    st->deadline.data = st;
    snprintf(st->path, sizeof st->path, "/tmp/tandem_control_%d", (int)getpid());
    char unix_address[80];
    snprintf(unix_address, sizeof unix_address, "unix:%s", st->path);
    control_listen_args args = {.loop = &st->loop,
                                .address = address ? address : unix_address,
                                .user = st,
                                .on_accept = on_accept};
    error err = {0};
    if (control_listen(&args, &st->listener, &err))
        fail_msg("%s", err.text);
    return st;
}

static void end(stage *st) {
    control_listener_close(st->listener);
    uv_close((uv_handle_t *)&st->deadline, NULL);
    uv_run(&st->loop, UV_RUN_DEFAULT);
    for (unsigned i = 0; i < st->n_accepted; i++) {
        assert_int_equal(st->accepted[i].n_closed, 1);
        assert_false(st->accepted[i].wrong);
    }
    assert_int_equal(uv_loop_close(&st->loop), 0);
    assert_int_not_equal(access(st->path, F_OK), 0); // the socket's file is gone
    free(st);
}

static void connect_side(stage *st, side *s) {
    control_callbacks callbacks = callbacks_of(s);
    error err = {0};
    if (control_connect(&st->loop, control_listener_address(st->listener), &callbacks, &s->conn,
                        &err))
        fail_msg("%s", err.text);
}

static void send_pattern(side *s, uint16_t type, size_t n) {
    uint8_t *payload = malloc(n + 1);
    assert_non_null(payload);
    for (size_t i = 0; i < n; i++)
        payload[i] = byte_at(type, i);
    assert_int_equal(control_send(s->conn, type, payload, n), E_OK);
    free(payload); // it was copied
}

static bool have_ipv6(void) {
    struct sockaddr_in6 at = {.sin6_family = AF_INET6, .sin6_addr = IN6ADDR_LOOPBACK_INIT};
    int fd = socket(AF_INET6, SOCK_STREAM | SOCK_CLOEXEC, 0);
    bool good = fd >= 0 && !bind(fd, (struct sockaddr *)&at, sizeof at);
    if (fd >= 0)
        close(fd);
    return good;
}

static void test_echo_all_sizes(void **state) {
    const char *address = *state;
    if (address && address[0] == '[' && !have_ipv6())
        skip();
    static const size_t sizes[] = {0, 1, 7, 8, 9, 65527, 65528, 65529, 1 << 20, 5 << 20};
    stage *st = begin(*state);
    side near = {0};
    connect_side(st, &near); // sends wait for the connection
    for (uint16_t i = 0; i < 10; i++)
        send_pattern(&near, i, sizes[i]);
    WAIT_FOR(st, st->n_accepted == 1 && st->accepted[0].n_messages == 10);
    char host[64] = "?";
    control_local_host(near.conn, host, sizeof host);
    assert_string_equal(host, !address ? "" : address[0] == '[' ? "::1" : "127.0.0.1");
    st->accepted[0].echo = true;
    for (uint16_t i = 0; i < 10; i++) {
        send_pattern(&near, (uint16_t)(i + 100), sizes[i]);
        WAIT_FOR(st, near.n_messages == i + 1u);
        assert_int_equal(near.last_type, i + 100);
        assert_int_equal(near.last_bytes, sizes[i]);
    }
    control_close(near.conn);
    WAIT_FOR(st, near.n_closed && st->accepted[0].n_closed);
    assert_string_equal(near.reason, "closed here");
    assert_false(near.wrong);
    end(st);
    assert_int_equal(near.n_closed, 1);
}

// What was queued before a close is still sent.
static void test_close_sends_the_rest(void **state) {
    (void)state;
    stage *st = begin(NULL);
    side near = {0};
    connect_side(st, &near);
    WAIT_FOR(st, st->n_accepted == 1);
    for (uint16_t i = 0; i < 20; i++)
        send_pattern(&near, i, 1 << 19);
    control_close(near.conn);
    assert_int_equal(control_send(near.conn, 1, NULL, 0), E_CLOSED);
    control_close(near.conn); // a second one does nothing
    WAIT_FOR(st, near.n_closed && st->accepted[0].n_closed);
    assert_int_equal(st->accepted[0].n_messages, 20);
    end(st);
    assert_int_equal(near.n_closed, 1);
}

// A peer that does not read cannot hold a close for ever.
static void test_close_has_a_deadline(void **state) {
    (void)state;
    stage *st = begin(NULL);
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    struct sockaddr_un to = {.sun_family = AF_UNIX};
    memcpy(to.sun_path, st->path, strlen(st->path));
    assert_int_equal(connect(fd, (struct sockaddr *)&to, sizeof to), 0);
    WAIT_FOR(st, st->n_accepted == 1);
    send_pattern(&st->accepted[0], 1, 8 << 20);
    control_close(st->accepted[0].conn);
    WAIT_FOR(st, st->accepted[0].n_closed);
    close(fd);
    end(st);
}

static void test_close_before_connected(void **state) {
    stage *st = begin(*state);
    side near = {0};
    connect_side(st, &near);
    send_pattern(&near, 1, 100);
    control_close(near.conn);
    WAIT_FOR(st, near.n_closed);
    uv_run(&st->loop, UV_RUN_NOWAIT);
    for (unsigned i = 0; i < st->n_accepted; i++)
        WAIT_FOR(st, st->accepted[i].n_closed);
    end(st);
    assert_int_equal(near.n_closed, 1);
}

static void test_close_inside_a_message(void **state) {
    (void)state;
    stage *st = begin(NULL);
    side near = {0};
    connect_side(st, &near);
    WAIT_FOR(st, st->n_accepted == 1);
    st->accepted[0].close_at_message = true;
    for (uint16_t i = 0; i < 5; i++)
        send_pattern(&near, i, 10);
    WAIT_FOR(st, st->accepted[0].n_closed && near.n_closed);
    assert_int_equal(st->accepted[0].n_messages, 1);
    end(st);
}

// A raw socket that says whatever a hostile peer says.
static int raw_connect(stage *st) {
    unsigned before = st->n_accepted;
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    struct sockaddr_un to = {.sun_family = AF_UNIX};
    memcpy(to.sun_path, st->path, strlen(st->path));
    assert_int_equal(connect(fd, (struct sockaddr *)&to, sizeof to), 0);
    WAIT_FOR(st, st->n_accepted == before + 1);
    return fd;
}

static size_t make_frame(uint8_t *out, uint32_t length, uint16_t type, uint16_t version) {
    bytes_writer w = {0};
    bytes_write_u32(&w, length);
    bytes_write_u16(&w, type);
    bytes_write_u16(&w, version);
    assert_int_equal(w.n, 8);
    memcpy(out, w.data, 8);
    bytes_writer_free(&w);
    for (uint32_t i = 0; i < length && i < 64; i++)
        out[8 + i] = byte_at(type, i);
    return 8 + (length < 64 ? length : 64);
}

static void test_byte_by_byte(void **state) {
    (void)state;
    stage *st = begin(NULL);
    int fd = raw_connect(st);
    uint8_t frame[80];
    for (uint32_t n = 0; n < 20; n++) {
        size_t bytes = make_frame(frame, n, (uint16_t)(n + 1), CONTROL_VERSION);
        for (size_t i = 0; i < bytes; i++) {
            assert_int_equal(write(fd, frame + i, 1), 1);
            unsigned expected = n + (i + 1 == bytes);
            uv_run(&st->loop, UV_RUN_NOWAIT);
            if (i + 1 == bytes)
                WAIT_FOR(st, st->accepted[0].n_messages == expected);
            assert_int_equal(st->accepted[0].n_messages, expected);
        }
        assert_int_equal(st->accepted[0].last_bytes, n);
    }
    close(fd);
    WAIT_FOR(st, st->accepted[0].n_closed);
    end(st);
}

static void test_hostile_headers(void **state) {
    (void)state;
    static const struct {
        uint32_t length;
        uint16_t version;
    } cases[] = {{CONTROL_MAX_PAYLOAD + 1u, CONTROL_VERSION},
                 {0x7fffffffu, CONTROL_VERSION},
                 {0xffffffffu, CONTROL_VERSION},
                 {4, 0},
                 {4, CONTROL_VERSION + 1},
                 {4, 0xffff}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        stage *st = begin(NULL);
        int fd = raw_connect(st);
        uint8_t frame[80];
        size_t n = make_frame(frame, cases[i].length, 1, cases[i].version);
        assert_int_equal(write(fd, frame, n), (ssize_t)n);
        WAIT_FOR(st, st->accepted[0].n_closed);
        assert_int_equal(st->accepted[0].n_messages, 0);
        assert_non_null(strstr(st->accepted[0].reason, "not a control message"));
        close(fd);
        end(st);
    }
}

// A long message is promised and never sent: what is promised is not taken from memory.
static void test_promised_length(void **state) {
    (void)state;
    stage *st = begin(NULL);
    int fd = raw_connect(st);
    uint8_t frame[80];
    size_t n = make_frame(frame, CONTROL_MAX_PAYLOAD, 1, CONTROL_VERSION);
    assert_int_equal(write(fd, frame, n), (ssize_t)n);
    for (int i = 0; i < 20; i++)
        uv_run(&st->loop, UV_RUN_NOWAIT);
    assert_int_equal(st->accepted[0].n_messages, 0);
    assert_int_equal(st->accepted[0].n_closed, 0);
    close(fd);
    WAIT_FOR(st, st->accepted[0].n_closed);
    assert_int_equal(st->accepted[0].n_messages, 0);
    end(st);
}

static void test_peer_closes_at_any_byte(void **state) {
    (void)state;
    uint8_t frames[200];
    size_t n = make_frame(frames, 13, 1, CONTROL_VERSION);
    n += make_frame(frames + n, 0, 2, CONTROL_VERSION);
    n += make_frame(frames + n, 5, 3, CONTROL_VERSION);
    for (size_t cut = 0; cut <= n; cut++) {
        stage *st = begin(NULL);
        int fd = raw_connect(st);
        assert_int_equal(write(fd, frames, cut), (ssize_t)cut);
        close(fd);
        WAIT_FOR(st, st->accepted[0].n_closed);
        unsigned whole = (cut >= 21) + (cut >= 29) + (cut >= 42);
        assert_int_equal(st->accepted[0].n_messages, whole);
        assert_string_equal(st->accepted[0].reason, "closed by the peer");
        end(st);
    }
}

static void test_addresses(void **state) {
    (void)state;
    uv_loop_t loop;
    uv_loop_init(&loop);
    side s = {0};
    control_callbacks callbacks = callbacks_of(&s);
    static const char *const bad[] = {"",
                                      ":",
                                      "nonsense",
                                      "host:",
                                      ":5",
                                      "1.2.3.4",
                                      "[::1",
                                      "1.2.3.4:99999999",
                                      "unix:/a/path/that/is/much/too/long/for/the/address/of/a/"
                                      "socket/of/the/unix/family/because/it/has/more/than/one/"
                                      "hundred/and/eight/bytes"};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        error err = {0};
        control_conn *conn = NULL;
        assert_true(control_connect(&loop, bad[i], &callbacks, &conn, &err) < 0);
        assert_true(err.text[0]);
        assert_null(conn);
        control_listen_args args = {.loop = &loop, .address = bad[i], .on_accept = on_accept};
        control_listener *listener = NULL;
        assert_true(control_listen(&args, &listener, &err) < 0);
        assert_null(listener);
    }
    // Nobody listens: the connection ends with the reason.
    error err = {0};
    assert_int_equal(
        control_connect(&loop, "unix:/tmp/tandem_nobody_listens", &callbacks, &s.conn, &err), E_OK);
    uv_run(&loop, UV_RUN_DEFAULT);
    assert_int_equal(s.n_closed, 1);
    assert_true(s.reason[0]);
    s = (side){0};
    assert_int_equal(control_connect(&loop, "127.0.0.1:1", &callbacks, &s.conn, &err), E_OK);
    uv_run(&loop, UV_RUN_DEFAULT);
    assert_int_equal(s.n_closed, 1);
    control_listener_close(NULL);
    uv_run(&loop, UV_RUN_DEFAULT);
    assert_int_equal(uv_loop_close(&loop), 0);
}

// A socket file that a killed process left behind does not stop its successor.
static void test_stale_socket_file(void **state) {
    (void)state;
    struct sockaddr_un at = {.sun_family = AF_UNIX};
    snprintf(at.sun_path, sizeof at.sun_path, "/tmp/tandem_control_%d", (int)getpid());
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    assert_int_equal(bind(fd, (struct sockaddr *)&at, sizeof at), 0);
    close(fd);
    stage *st = begin(NULL);
    side near = {0};
    connect_side(st, &near);
    WAIT_FOR(st, st->n_accepted == 1);
    control_close(near.conn);
    WAIT_FOR(st, near.n_closed && st->accepted[0].n_closed);
    end(st);
}

static void test_bytes(void **state) {
    (void)state;
    bytes_writer w = {0};
    bytes_write_u8(&w, 0x81);
    bytes_write_u16(&w, 0x8182);
    bytes_write_u32(&w, 0x81828384u);
    bytes_write_u64(&w, 0x8182838485868788ull);
    bytes_write_i32(&w, -5);
    bytes_write_f32(&w, -1.5f);
    bytes_write_blob(&w, "abc", 3);
    bytes_write_blob(&w, NULL, 0);
    assert_false(w.failed);
    assert_int_equal(w.n, 1 + 2 + 4 + 8 + 4 + 4 + 3);
    static const uint8_t head[] = {0x81, 0x82, 0x81, 0x84, 0x83, 0x82, 0x81, 0x88, 0x87};
    assert_memory_equal(w.data, head, sizeof head);
    for (size_t n = 0; n <= w.n; n++) { // cut anywhere
        bytes_reader r = bytes_reader_make(w.data, n);
        uint8_t a = bytes_read_u8(&r);
        uint16_t b = bytes_read_u16(&r);
        uint32_t c = bytes_read_u32(&r);
        uint64_t d = bytes_read_u64(&r);
        int32_t e = bytes_read_i32(&r);
        float f = bytes_read_f32(&r);
        const uint8_t *g = bytes_read_blob(&r, 3);
        assert_int_equal(bytes_reader_done(&r), n == w.n);
        assert_int_equal(r.failed, n != w.n);
        if (n == w.n) {
            assert_true(a == 0x81 && b == 0x8182 && c == 0x81828384u);
            assert_true(d == 0x8182838485868788ull && e == -5 && f == -1.5f);
            assert_memory_equal(g, "abc", 3);
        } else {
            assert_null(g);
            assert_int_equal(bytes_read_u8(&r), 0); // it stays failed
        }
    }
    bytes_reader r = bytes_reader_make(w.data, w.n);
    assert_null(bytes_read_blob(&r, SIZE_MAX));
    assert_true(r.failed);
    bytes_writer_free(&w);
    bytes_write_blob(&w, "x", SIZE_MAX);
    assert_true(w.failed);
    bytes_write_u8(&w, 1);
    assert_int_equal(w.n, 0);
    bytes_writer_free(&w);
    assert_false(w.failed);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_bytes),
        {"echo, unix", test_echo_all_sizes, NULL, NULL, NULL},
        {"echo, tcp", test_echo_all_sizes, NULL, NULL, (void *)"127.0.0.1:0"},
        {"echo, tcp v6", test_echo_all_sizes, NULL, NULL, (void *)"[::1]:0"},
        cmocka_unit_test(test_close_sends_the_rest),
        cmocka_unit_test(test_close_has_a_deadline),
        {"close before connected, unix", test_close_before_connected, NULL, NULL, NULL},
        {"close before connected, tcp", test_close_before_connected, NULL, NULL,
         (void *)"127.0.0.1:0"},
        cmocka_unit_test(test_close_inside_a_message),
        cmocka_unit_test(test_byte_by_byte),
        cmocka_unit_test(test_hostile_headers),
        cmocka_unit_test(test_promised_length),
        cmocka_unit_test(test_peer_closes_at_any_byte),
        cmocka_unit_test(test_addresses),
        cmocka_unit_test(test_stale_socket_file),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
