// http_client.h: a raw HTTP client for tests that run the server's loop in the same thread.
//
// Nothing blocks: each wait turns the loop and polls the socket until a condition or a deadline.
#ifndef TANDEM_TESTS_SUPPORT_HTTP_CLIENT_H
#define TANDEM_TESTS_SUPPORT_HTTP_CLIENT_H

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>
#include <uv.h>

enum { CLIENT_WAIT_MS = 5000 };

typedef struct client {
    uv_loop_t *loop;
    int fd;
    char *in; // all that has come, NUL-terminated
    size_t n_in, room;
    bool eof, reset;
} client;

static inline uint64_t client_now_ms(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000 + (uint64_t)now.tv_nsec / 1000000;
}

static inline void client_turn(uv_loop_t *loop) {
    if (uv_run(loop, UV_RUN_NOWAIT) >= 0)
        usleep(100);
}

static inline void client_run_ms(uv_loop_t *loop, uint64_t ms) {
    for (uint64_t end = client_now_ms() + ms; client_now_ms() < end;)
        client_turn(loop);
}

static inline client *client_open(uv_loop_t *loop, int port) {
    client *c = calloc(1, sizeof *c);
    c->loop = loop;
    c->fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    struct sockaddr_in to = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
    to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    if (connect(c->fd, (struct sockaddr *)&to, sizeof to) != 0) {
        perror("connect");
        abort();
    }
    int one = 1;
    setsockopt(c->fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    fcntl(c->fd, F_SETFL, O_NONBLOCK);
    c->room = 4096;
    c->in = calloc(1, c->room);
    return c;
}

static inline void client_close(client *c) {
    close(c->fd);
    free(c->in);
    free(c);
}

// Closes with a reset instead of an orderly end.
static inline void client_reset(client *c) {
    struct linger now = {.l_onoff = 1, .l_linger = 0};
    setsockopt(c->fd, SOL_SOCKET, SO_LINGER, &now, sizeof now);
    client_close(c);
}

static inline void client_poll(client *c) {
    while (!c->eof && !c->reset) {
        if (c->room - c->n_in < 65536) {
            c->room = c->room * 2 + 65536;
            c->in = realloc(c->in, c->room);
        }
        ssize_t n = recv(c->fd, c->in + c->n_in, c->room - c->n_in - 1, MSG_DONTWAIT);
        if (n > 0)
            c->n_in += (size_t)n;
        else if (n == 0)
            c->eof = true;
        else if (errno == ECONNRESET)
            c->reset = true;
        c->in[c->n_in] = '\0';
        if (n <= 0)
            break;
    }
}

// Sends all of it, turning the loop where the socket is full; false when the peer has closed.
static inline bool client_send_n(client *c, const char *data, size_t n) {
    uint64_t end = client_now_ms() + CLIENT_WAIT_MS;
    for (size_t done = 0; done < n;) {
        ssize_t sent = send(c->fd, data + done, n - done, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (sent > 0)
            done += (size_t)sent;
        else if (errno != EAGAIN || client_now_ms() > end)
            return false;
        else
            client_turn(c->loop);
    }
    return true;
}

static inline bool client_send(client *c, const char *text) {
    return client_send_n(c, text, strlen(text));
}

// Waits until text has come at or after offset; returns where, or NULL after the deadline.
static inline const char *client_wait_from(client *c, size_t offset, const char *text) {
    for (uint64_t end = client_now_ms() + CLIENT_WAIT_MS;;) {
        client_poll(c);
        const char *found = c->n_in >= offset ? strstr(c->in + offset, text) : NULL;
        if (found || client_now_ms() > end || ((c->eof || c->reset) && !found))
            return found;
        client_turn(c->loop);
    }
}

static inline const char *client_wait(client *c, const char *text) {
    return client_wait_from(c, 0, text);
}

// Waits for the server's end of the connection.
static inline bool client_wait_eof(client *c) {
    for (uint64_t end = client_now_ms() + CLIENT_WAIT_MS; client_now_ms() < end;) {
        client_poll(c);
        if (c->eof)
            return true;
        if (c->reset)
            return false;
        client_turn(c->loop);
    }
    return false;
}

#endif
