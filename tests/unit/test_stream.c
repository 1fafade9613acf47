/*
 * test_stream.c - streams over real sockets on one loop: both ends ours, or the other end raw.
 */
#include "io_help.h"

static struct io_certs certs;
static struct tls_context *tls_server, *tls_client;

struct pair {
    struct io_base base;
    struct stream_listener *listener;
    struct io_point server, client;
};

static struct pair *pair_new(struct tls_context *s)
{
    struct pair *p = calloc(1, sizeof(*p));

    p->base = io_begin();
    p->listener = io_listen(p->base.loop, s, &p->server);
    return p;
}

static void pair_dial(struct pair *p, struct tls_context *c, const char *name)
{
    struct sockaddr_in a = io_loopback(stream_listener_port(p->listener));

    p->client.s = stream_dial(p->base.loop, (struct sockaddr *)&a, c, name, NULL, &io_ops, &p->client);
    assert_non_null(p->client.s);
    assert_int_equal(p->client.opens + p->client.errors, 0); /* never from inside the call */
}

static void pair_open(struct pair *p, bool tls)
{
    pair_dial(p, tls ? tls_client : NULL, "localhost");
    assert_true(io_run(p->base.loop, io_opened, &p->client, 2000));
    assert_true(io_run(p->base.loop, io_has_stream, &p->server, 2000));
    if (tls)
        assert_true(io_run(p->base.loop, io_opened, &p->server, 2000));
}

static void pair_free(struct pair *p)
{
    stream_listener_close(p->listener); /* first: it may still accept */
    io_close(&p->client);
    io_close(&p->server);
    io_end(&p->base);
    free(p);
}

/* A raw client of the pair's server. */
static int pair_raw(struct pair *p)
{
    int fd = io_raw_connect(stream_listener_port(p->listener));

    assert_true(io_run(p->base.loop, io_has_stream, &p->server, 2000));
    return fd;
}

struct count {
    struct io_point *p;
    uint64_t n;
};

static bool received(void *arg)
{
    const struct count *c = arg;

    return c->p->received >= c->n;
}

static bool run_received(struct pair *p, struct io_point *of, uint64_t n)
{
    struct count c = {of, n};

    return io_run(p->base.loop, received, &c, 10000);
}

/* --- plain talk ----------------------------------------------------------------------------------------- */

static void talk(bool tls)
{
    struct pair *p = pair_new(tls ? tls_server : NULL);
    char text[] = "hello";
    struct iovec three[3] = {{text, 2}, {NULL, 0}, {text + 2, 3}};

    pair_open(p, tls);
    p->server.at_data = IO_ECHO;
    p->client.keep = true;
    assert_true(stream_write(p->client.s, three, 3));
    assert_true(run_received(p, &p->client, 5));
    assert_memory_equal(p->client.bytes.p, "hello", 5);
    assert_int_equal(strncmp(stream_address(p->server.s), "127.0.0.1:", 10), 0);
    assert_int_equal(stream_is_tls(p->server.s), tls);
    if (!tls) {
        assert_true(stream_bytes_in(p->server.s) == 5);
        assert_true(stream_bytes_out(p->server.s) == 5);
    }
    /* half-close: the server still answers after the client's end */
    stream_shutdown(p->client.s);
    assert_false(io_write(&p->client, "x", 1));
    assert_true(io_run(p->base.loop, io_ended, &p->server, 2000));
    assert_int_equal(p->server.how, tls ? STREAM_END_CLOSE_NOTIFY : STREAM_END_FIN);
    assert_true(io_write(&p->server, "late", 4));
    assert_true(run_received(p, &p->client, 9));
    io_close(&p->server);
    assert_true(io_run(p->base.loop, io_ended, &p->client, 2000));
    assert_int_equal(p->client.errors + p->server.errors, 0);
    pair_free(p);
}

static void plain_talk(void **state)
{
    (void)state;
    talk(false);
}

static void tls_talk(void **state)
{
    (void)state;
    talk(true);
}

/* One sockopt of the server's socket, found by its port: only the descriptor tells. */
static void accepted_sockets_have_their_options(void **state)
{
    struct pair *p = pair_new(NULL);
    int found = 0;

    (void)state;
    pair_open(p, false);
    for (int fd = 3; fd < 64; fd++) {
        int nodelay = 0, keep = 0, idle = 0;
        socklen_t n = sizeof(int);
        struct sockaddr_in a = {0};
        socklen_t an = sizeof(a);

        if (getpeername(fd, (struct sockaddr *)&a, &an) != 0 || a.sin_family != AF_INET)
            continue;
        getsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &nodelay, &n);
        getsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &keep, &n);
        getsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &idle, &n);
        assert_true(nodelay != 0 && keep != 0 && idle == 60);
        found++;
    }
    assert_int_equal(found, 2); /* dialed and accepted */
    pair_free(p);
}

/* --- backpressure --------------------------------------------------------------------------------------- */

#define BULK (50ULL * 1024 * 1024)

struct bulk {
    struct io_point point; /* first: it is the owner */
    uint64_t sent;
    uint32_t sum;
    size_t worst;
    char block[40000];
};

/* Writes until the stream is full: what every source must do. */
static void bulk_pump(struct bulk *b)
{
    while (b->sent < BULK && !stream_full(b->point.s)) {
        size_t n = size_min(sizeof(b->block), BULK - b->sent);

        for (size_t i = 0; i < n; i += 512)
            b->block[i] = (char)(b->sent >> 9);
        assert_true(io_write(&b->point, b->block, n));
        b->sum = io_sum(b->sum, b->block, n);
        b->sent += n;
        b->worst = size_max(b->worst, stream_queued(b->point.s));
    }
}

static void bulk_on_drain(void *owner)
{
    bulk_pump(owner);
}

static const struct stream_ops bulk_ops = {io_on_open, io_on_data, io_on_end, bulk_on_drain, io_on_error};

struct slow {
    int fd;
    uint64_t got;
    uint32_t sum;
};

static bool slow_read(void *arg)
{
    struct slow *s = arg;
    static char chunk[300000];
    ssize_t n = recv(s->fd, chunk, sizeof(chunk), 0);

    if (n > 0) {
        s->sum = io_sum(s->sum, chunk, (size_t)n);
        s->got += (uint64_t)n;
    }
    return s->got == BULK;
}

static void a_slow_reader_bounds_the_queue(void **state)
{
    struct pair *p = pair_new(NULL);
    struct bulk *b = calloc(1, sizeof(*b));
    struct slow slow = {.fd = pair_raw(p)};

    (void)state;
    b->point.s = p->server.s;
    p->server.s = NULL;
    stream_adopt(b->point.s, &bulk_ops, b);
    bulk_pump(b);
    assert_true(b->sent < BULK); /* it did not read a byte yet */
    assert_true(io_run(p->base.loop, slow_read, &slow, 60000));
    assert_int_equal(slow.sum, b->sum);
    assert_true(stream_bytes_out(b->point.s) == BULK);
    assert_int_equal(stream_queued(b->point.s), 0);
    assert_true(b->worst >= STREAM_HIGH_BYTES && b->worst < STREAM_HIGH_BYTES + sizeof(b->block));
    assert_int_equal(b->point.errors, 0);
    stream_close(b->point.s);
    close(slow.fd);
    free(b);
    pair_free(p);
}

/* The same through TLS, the reader one of ours that pauses after each piece. */
static void a_paused_tls_reader_bounds_the_queue(void **state)
{
    struct pair *p = pair_new(tls_server);
    struct bulk *b = calloc(1, sizeof(*b));
    struct count c = {&p->client, 0};

    (void)state;
    pair_open(p, true);
    b->point.s = p->server.s;
    p->server.s = NULL;
    stream_adopt(b->point.s, &bulk_ops, b);
    p->client.at_data = IO_PAUSE;
    bulk_pump(b);
    while (c.n < 8 * 1024 * 1024) {
        c.n = p->client.received + 1;
        stream_resume(p->client.s);
        assert_true(io_run(p->base.loop, received, &c, 2000));
    }
    assert_true(b->worst < STREAM_HIGH_BYTES + 2 * sizeof(b->block));
    p->client.at_data = IO_NOTHING;
    stream_resume(p->client.s);
    assert_true(run_received(p, &p->client, BULK));
    assert_int_equal(p->client.sum, b->sum);
    stream_close(b->point.s);
    free(b);
    pair_free(p);
}

static void pause_stops_and_resume_delivers(void **state)
{
    struct pair *p = pair_new(NULL);

    (void)state;
    pair_open(p, false);
    stream_pause(p->server.s);
    stream_pause(p->server.s);
    assert_true(io_write(&p->client, "abc", 3));
    io_run_for(p->base.loop, 30);
    assert_int_equal(p->server.received, 0);
    stream_resume(p->server.s);
    stream_resume(p->server.s);
    assert_true(run_received(p, &p->server, 3));
    pair_free(p);
}

/* --- watching ------------------------------------------------------------------------------------------- */

enum gone { GONE_FIN, GONE_FIN_BEHIND_BYTES, GONE_RESET, GONE_RESET_BEHIND_BYTES };

static void watch_sees(enum gone how)
{
    struct pair *p = pair_new(NULL);
    int fd = pair_raw(p);
    bool bytes = how == GONE_FIN_BEHIND_BYTES || how == GONE_RESET_BEHIND_BYTES;
    bool fin = how == GONE_FIN || how == GONE_FIN_BEHIND_BYTES;

    stream_watch(p->server.s, true);
    stream_pause(p->server.s);
    if (bytes)
        assert_int_equal(send(fd, "0123456789", 10, 0), 10);
    io_run_for(p->base.loop, 150);
    assert_int_equal(p->server.ends + p->server.errors, 0);
    assert_false(stream_peer_is_gone(p->server.s));
    if (fin)
        close(fd);
    else
        io_raw_reset(fd);
    assert_true(io_run(p->base.loop, fin ? io_ended : io_failed, &p->server, 300));
    assert_int_equal(stream_peer_is_gone(p->server.s), !fin);
    assert_int_equal(p->server.received, 0);
    if (fin) {
        assert_int_equal(p->server.how, STREAM_END_FIN);
        stream_resume(p->server.s); /* what came before the FIN can still be read; no second on_end */
        if (bytes)
            assert_true(run_received(p, &p->server, 10));
        io_run_for(p->base.loop, 20);
        assert_int_equal(p->server.ends, 1);
    } else {
        assert_int_equal(p->server.error, UV_ECONNRESET);
    }
    pair_free(p);
}

static void watch_sees_fin_and_reset_of_paused_streams(void **state)
{
    (void)state;
    watch_sees(GONE_FIN);
    watch_sees(GONE_FIN_BEHIND_BYTES);
    watch_sees(GONE_RESET);
    watch_sees(GONE_RESET_BEHIND_BYTES);
}

/* After its FIN, a client that is gone answers the next write with RST; one that half-closed does not. */
static void a_write_after_fin_tells_gone_from_half_closed(void **state)
{
    (void)state;
    for (int half = 0; half < 2; half++) {
        struct pair *p = pair_new(NULL);
        int fd = pair_raw(p);

        stream_watch(p->server.s, true);
        if (half)
            shutdown(fd, SHUT_WR);
        else
            close(fd);
        assert_true(io_run(p->base.loop, io_ended, &p->server, 1000));
        io_run_for(p->base.loop, 150);
        assert_int_equal(p->server.errors, 0); /* a FIN alone is no error */
        assert_true(io_write(&p->server, "HTTP/1.1 102 Processing\r\n\r\n", 27));
        if (half) {
            io_run_for(p->base.loop, 250);
            assert_int_equal(p->server.errors, 0);
            assert_false(stream_peer_is_gone(p->server.s));
            close(fd);
        } else {
            assert_true(io_run(p->base.loop, io_failed, &p->server, 300));
            assert_true(stream_peer_is_gone(p->server.s));
        }
        pair_free(p);
    }
}

/* Both directions ended in good order: nothing to report, whatever state TCP is in. */
static void watch_is_quiet_after_both_ends(void **state)
{
    struct pair *p = pair_new(NULL);
    int fd = pair_raw(p);

    (void)state;
    stream_watch(p->server.s, true);
    shutdown(fd, SHUT_WR);
    assert_true(io_run(p->base.loop, io_ended, &p->server, 1000));
    stream_shutdown(p->server.s);
    close(fd);
    io_run_for(p->base.loop, 250);
    assert_int_equal(p->server.errors, 0);
    pair_free(p);
}

/* --- ends ----------------------------------------------------------------------------------------------- */

static void reset_is_seen_as_reset(void **state)
{
    (void)state;
    for (int after_shutdown = 0; after_shutdown < 2; after_shutdown++) {
        struct pair *p = pair_new(NULL);
        int fd = pair_raw(p);
        char c;

        assert_true(io_write(&p->server, "cut", 3));
        if (after_shutdown)
            stream_shutdown(p->server.s);
        io_run_for(p->base.loop, 10);
        if (after_shutdown) {
            assert_int_equal(recv(fd, (char[8]){0}, 8, 0), 3);
            assert_int_equal(recv(fd, &c, 1, 0), 0); /* the FIN */
        }
        io_act(&p->server, IO_RESET);
        io_run_for(p->base.loop, 10);
        if (!after_shutdown) {
            assert_int_equal(recv(fd, &c, 1, MSG_PEEK) == 1 ? recv(fd, (char[8]){0}, 8, 0) : 3, 3);
            assert_int_equal(recv(fd, &c, 1, 0), -1);
            assert_int_equal(errno, ECONNRESET);
        } else {
            assert_int_equal(send(fd, "x", 1, 0), -1);
        }
        close(fd);
        pair_free(p);
    }
}

struct uploader {
    int fd;
    size_t sent, want;
    bool send_failed;
};

static bool upload(void *arg)
{
    struct uploader *u = arg;
    static char block[65536];
    ssize_t n = send(u->fd, block, size_min(sizeof(block), u->want - u->sent), 0);

    if (n > 0)
        u->sent += (size_t)n;
    else if (errno != EAGAIN)
        u->send_failed = true;
    return u->sent == u->want || u->send_failed;
}

/*
 * A refusal in the middle of an upload: the client sends on to its end and then reads the whole answer
 * (H137).
 */
static void close_gently_lets_the_answer_arrive(void **state)
{
    struct pair *p = pair_new(NULL);
    struct uploader u = {.fd = pair_raw(p), .want = 4 * 1024 * 1024};
    static char answer[300000], got[sizeof(answer)];
    struct stream *s;
    size_t n = 0;
    ssize_t part;

    (void)state;
    memset(answer, 'r', sizeof(answer));
    u.want = 100000;
    assert_true(io_run(p->base.loop, upload, &u, 2000));
    u.want = 4 * 1024 * 1024;
    assert_true(io_write(&p->server, answer, sizeof(answer)));
    s = p->server.s;
    p->server.s = NULL;
    stream_close_gently(s, 64 << 20, 5000);
    assert_true(io_run(p->base.loop, upload, &u, 5000));
    assert_false(u.send_failed);
    fcntl(u.fd, F_SETFL, 0);
    shutdown(u.fd, SHUT_WR);
    io_run_for(p->base.loop, 50); /* the server may be gone by now: what it sent must not be */
    while ((part = recv(u.fd, got + n, sizeof(got) - n, MSG_DONTWAIT)) != 0) {
        if (part < 0) {
            assert_int_equal(errno, EAGAIN);
            io_run_for(p->base.loop, 5);
        } else {
            n += (size_t)part;
        }
    }
    assert_int_equal(n, sizeof(answer));
    assert_true(io_run(p->base.loop, io_no_streams, p->base.loop, 1000));
    close(u.fd);
    pair_free(p);
}

static void close_gently_is_bounded(void **state)
{
    struct pair *p = pair_new(NULL);
    struct uploader u = {.want = 64 << 20};
    uint64_t began;
    int fd;

    (void)state;
    /* by bytes */
    u.fd = pair_raw(p);
    stream_close_gently(p->server.s, 200000, 60000);
    p->server.s = NULL;
    assert_true(io_run(p->base.loop, upload, &u, 5000));
    assert_true(u.send_failed);
    close(u.fd);
    /* by time */
    fd = pair_raw(p);
    began = loop_now_ms(p->base.loop);
    stream_close_gently(p->server.s, 200000, 100);
    p->server.s = NULL;
    assert_true(io_run(p->base.loop, io_no_streams, p->base.loop, 2000));
    assert_in_range(loop_now_ms(p->base.loop) - began, 100, 400);
    close(fd);
    pair_free(p);
}

/* Each way to end, from inside each callback, plain and TLS. */
static void ends_inside_callbacks(bool tls)
{
    static const enum io_do ends[] = {IO_CLOSE, IO_RESET, IO_GENTLY};

    for (size_t e = 0; e < 3; e++) {
        for (int where = 0; where < 4; where++) {
            struct pair *p = pair_new(tls ? tls_server : NULL);
            struct io_point *who = where == 0 ? &p->client : &p->server;

            if (where == 0)
                p->client.at_open = ends[e];
            else if (where == 1)
                p->server.at_data = ends[e];
            else if (where == 2)
                p->server.at_end = ends[e];
            else
                p->server.at_drain = ends[e];
            pair_dial(p, tls ? tls_client : NULL, "localhost");
            assert_true(io_run(p->base.loop, io_opened, &p->client, 2000));
            assert_true(io_run(p->base.loop, io_has_stream, &p->server, 2000) || tls);
            if (where == 1) {
                static char big[200000];

                assert_true(io_write(&p->client, big, sizeof(big)));
            } else if (where == 2) {
                stream_shutdown(p->client.s);
            } else if (where == 3) {
                if (tls)
                    assert_true(io_run(p->base.loop, io_opened, &p->server, 2000));
                while (!stream_full(p->server.s)) {
                    static char big[100000];

                    assert_true(io_write(&p->server, big, sizeof(big)));
                }
            }
            for (int i = 0; i < 2000 && who->s != NULL; i++)
                io_run_for(p->base.loop, 1);
            assert_null(who->s);
            io_run_for(p->base.loop, 5);
            pair_free(p);
        }
    }
}

static void ends_inside_callbacks_plain(void **state)
{
    (void)state;
    ends_inside_callbacks(false);
}

static void ends_inside_callbacks_tls(void **state)
{
    (void)state;
    ends_inside_callbacks(true);
}

/* --- failures ------------------------------------------------------------------------------------------- */

static void a_refused_dial_fails_later(void **state)
{
    (void)state;
    for (int act = IO_CLOSE; act <= IO_GENTLY; act++) {
        struct io_base b = io_begin();
        struct io_point c = {.at_error = (enum io_do)act};
        uint16_t port;
        struct sockaddr_in a;

        close(io_raw_listen(1, &port));
        a = io_loopback(port);
        c.s = stream_dial(b.loop, (struct sockaddr *)&a, NULL, NULL, NULL, &io_ops, &c);
        assert_int_equal(c.errors, 0);
        assert_true(io_run(b.loop, io_failed, &c, 1000));
        assert_int_equal(c.error, UV_ECONNREFUSED);
        assert_null(c.s);
        io_end(&b);
    }
}

static void a_dial_can_be_closed_at_once(void **state)
{
    struct pair *p = pair_new(NULL);

    (void)state;
    pair_dial(p, NULL, NULL);
    io_close(&p->client);
    pair_dial(p, tls_client, "localhost");
    io_act(&p->client, IO_RESET);
    pair_dial(p, tls_client, "localhost");
    io_act(&p->client, IO_GENTLY);
    io_run_for(p->base.loop, 20);
    pair_free(p);
}

/* The other side answers early and breaks off: the answer is delivered before the write error. */
static void an_early_answer_comes_before_the_error(void **state)
{
    struct pair *p = pair_new(NULL);
    int fd = pair_raw(p);
    static char big[4 << 20];

    (void)state;
    p->server.keep = true;
    assert_int_equal(send(fd, "413 too large", 13, 0), 13);
    assert_true(io_write(&p->server, big, 100)); /* unread over there: its close resets */
    close(fd);
    usleep(20 * 1000);
    /* nothing was read on our side yet, and the reset is in */
    assert_false(io_write(&p->server, big, sizeof(big)) && io_write(&p->server, big, sizeof(big)));
    assert_true(io_run(p->base.loop, io_failed, &p->server, 1000));
    assert_int_equal(p->server.bytes.n, 13);
    assert_false(io_write(&p->server, "x", 1));
    pair_free(p);
}

static void out_of_descriptors_pauses_accepting(void **state)
{
    struct pair *p = pair_new(NULL);
    struct rlimit old, low;
    int fds[8], n = 0, top;

    (void)state;
    for (int i = 0; i < 3; i++)
        fds[n++] = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
    assert_int_equal(getrlimit(RLIMIT_NOFILE, &old), 0);
    top = dup(0);
    low = (struct rlimit){(rlim_t)top, old.rlim_max};
    close(top);
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &low), 0);
    for (int i = 0; i < 3; i++) {
        struct sockaddr_in a = io_loopback(stream_listener_port(p->listener));

        (void)!connect(fds[i], (struct sockaddr *)&a, sizeof(a));
    }
    pair_dial(p, NULL, NULL);
    assert_true(io_run(p->base.loop, io_failed, &p->client, 500));
    assert_int_equal(p->client.error, UV_EMFILE);
    io_run_for(p->base.loop, 250);
    assert_null(p->server.s);
    assert_in_range(stream_accept_failures(p->base.loop), 1, 5); /* paused, not spinning */
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &old), 0);
    assert_true(
        io_run(p->base.loop, io_has_stream, &p->server, 500)); /* it had waited in the kernel's queue */
    for (int i = 0; i < n; i++)
        close(fds[i]);
    pair_free(p);
}

/* Every allocation of dial, accept, echo and close fails once, and then for ever. */
static void every_allocation_may_fail(void **state)
{
    struct tls_context *contexts[] = {NULL, tls_server};

    (void)state;
    for (int tls = 0; tls < 2; tls++) {
        for (uint64_t n = 1; n < 60; n++) {
            struct pair *p = pair_new(contexts[tls]);
            struct sockaddr_in a = io_loopback(stream_listener_port(p->listener));
            static char big[3 << 20];

            p->server.at_data = IO_ECHO;
            mem_fail_at((n + 1) / 2, n % 2 == 0);
            p->client.s = stream_dial(p->base.loop, (struct sockaddr *)&a, tls ? tls_client : NULL,
                                      "localhost", NULL, &io_ops, &p->client);
            for (int i = 0; i < 20 && p->client.s != NULL && p->client.opens + p->client.errors == 0; i++) {
                loop_stop(p->base.loop); /* one turn without the allocations of io_run */
                loop_run(p->base.loop);
                usleep(500);
            }
            if (p->client.s != NULL && p->client.opens > 0 && p->client.errors == 0)
                (void)!io_write(&p->client, big, sizeof(big));
            for (int i = 0; i < 10; i++) {
                loop_stop(p->base.loop);
                loop_run(p->base.loop);
            }
            mem_fail_at(0, false);
            pair_free(p);
        }
    }
}

/* --- unix sockets and listeners ------------------------------------------------------------------------- */

static void unix_sockets(void **state)
{
    struct io_base b = io_begin();
    struct io_point c = {.keep = true}, none = {0};
    struct sockaddr_un a = {.sun_family = AF_UNIX};
    struct count five = {&c, 5};
    int listener = socket(AF_UNIX, SOCK_STREAM, 0), fd;

    (void)state;
    snprintf(a.sun_path, sizeof(a.sun_path), "%s/sock", certs.dir);
    unlink(a.sun_path);
    assert_int_equal(bind(listener, (struct sockaddr *)&a, sizeof(a)), 0);
    assert_int_equal(listen(listener, 5), 0);
    c.s = stream_dial_unix(b.loop, a.sun_path, &io_ops, &c);
    assert_true(io_run(b.loop, io_opened, &c, 1000));
    assert_string_equal(stream_address(c.s), "unix");
    fd = accept(listener, NULL, NULL);
    assert_int_equal(send(fd, "hello", 5, 0), 5);
    assert_true(io_run(b.loop, received, &five, 1000));
    stream_watch(c.s, true);
    stream_pause(c.s);
    close(fd);
    assert_true(io_run(b.loop, io_ended, &c, 300));
    assert_true(stream_peer_is_gone(c.s));
    assert_true(io_run(b.loop, io_failed, &c, 300));
    io_close(&c);
    close(listener);
    unlink(a.sun_path);
    none.s = stream_dial_unix(b.loop, a.sun_path, &io_ops, &none);
    assert_true(io_run(b.loop, io_failed, &none, 1000));
    assert_int_equal(none.error, UV_ENOENT);
    io_close(&none);
    io_end(&b);
}

static void listeners(void **state)
{
    struct io_base b = io_begin();
    struct io_point first = {0}, second = {0};
    struct buf why = {0};
    struct stream_listener *all, *shared;
    struct sockaddr_in6 a6 = {.sin6_family = AF_INET6, .sin6_addr = IN6ADDR_LOOPBACK_INIT};
    int fd, taken;
    uint16_t port;

    (void)state;
    all = stream_listen(b.loop, "", 0, NULL, io_accept, &first, &why);
    assert_non_null(all);
    fd = io_raw_connect(stream_listener_port(all));
    assert_true(io_run(b.loop, io_has_stream, &first, 1000));
    assert_int_equal(strncmp(stream_address(first.s), "127.0.0.1:", 10), 0); /* not ::ffff:127.0.0.1 */
    close(fd);
    io_close(&first);
    first = (struct io_point){0};
    fd = socket(AF_INET6, SOCK_STREAM | SOCK_NONBLOCK, 0);
    a6.sin6_port = htons(stream_listener_port(all));
    if (fd >= 0 && (connect(fd, (struct sockaddr *)&a6, sizeof(a6)) == 0 || errno == EINPROGRESS)) {
        assert_true(io_run(b.loop, io_has_stream, &first, 1000));
        assert_int_equal(strncmp(stream_address(first.s), "[::1]:", 6), 0);
        io_close(&first);
    }
    close(fd);
    shared = stream_listen(b.loop, "", stream_listener_port(all), NULL, io_accept, &second, &why);
    assert_non_null(shared); /* as the second loop does */
    stream_listener_close(shared);
    stream_listener_close(all);

    taken = io_raw_listen(1, &port);
    assert_int_equal(why.n, 0);
    assert_null(stream_listen(b.loop, "127.0.0.1", port, NULL, io_accept, &first, &why));
    assert_true(why.n > 0);
    buf_free(&why);
    assert_null(stream_listen(b.loop, "no such host", 1, NULL, io_accept, &first, &why));
    assert_true(why.n > 0);
    buf_free(&why);
    close(taken);
    io_end(&b);
}

/* What stands in the kernel's queue when a listener closes is served first. */
static void closing_a_listener_serves_its_queue(void **state)
{
    struct io_base b = io_begin();
    struct io_point p = {0};
    struct stream_listener *sl = io_listen(b.loop, NULL, &p);
    int fd = io_raw_connect(stream_listener_port(sl));

    (void)state;
    stream_listener_close(sl);
    assert_non_null(p.s);
    assert_true(io_write(&p, "ok", 2));
    io_run_for(b.loop, 5);
    assert_int_equal(recv(fd, (char[4]){0}, 4, 0), 2);
    close(fd);
    io_close(&p);
    io_end(&b);
}

/* --- TLS ------------------------------------------------------------------------------------------------ */

static void tls_fails(struct tls_context *server, struct tls_context *client, const char *name,
                      const char *words)
{
    struct pair *p = pair_new(server);

    pair_dial(p, client, name);
    assert_true(io_run(p->base.loop, io_failed, &p->client, 2000));
    assert_int_equal(p->client.error, STREAM_ERROR_TLS);
    assert_int_equal(p->client.opens, 0);
    if (strstr(p->client.detail, words) == NULL)
        fail_msg("%s", p->client.detail);
    if (server != NULL) {
        assert_true(io_run(p->base.loop, io_failed, &p->server, 2000)); /* by the alert */
        assert_int_equal(p->server.error, STREAM_ERROR_TLS);
    }
    pair_free(p);
}

static void tls_failures_name_their_cause(void **state)
{
    struct buf why = {0};
    struct tls_context *expired = tls_context_server(certs.expired, certs.key, "", &why);
    struct tls_context *stranger = tls_context_client("", "", "", true, true, &why);

    (void)state;
    assert_non_null(expired);
    assert_non_null(stranger);
    tls_fails(tls_server, tls_client, "example.com", "ostname mismatch");
    tls_fails(tls_server, tls_client, "127.0.0.2", "IP address mismatch");
    tls_fails(expired, tls_client, "localhost", "expired");
    tls_fails(tls_server, stranger, "localhost", "certificate");
    tls_context_unref(expired);
    tls_context_unref(stranger);
}

static void plain_bytes_on_a_tls_port_fail(void **state)
{
    struct pair *p = pair_new(tls_server);
    int fd = pair_raw(p);

    (void)state;
    assert_int_equal(send(fd, "GET / HTTP/1.1\r\nhost: x\r\n\r\n", 27, 0), 27);
    assert_true(io_run(p->base.loop, io_failed, &p->server, 1000));
    assert_int_equal(p->server.received, 0);
    close(fd);
    pair_free(p);
}

/* A server that speaks plain HTTP on the port we dial with TLS: its bytes never come as data (H157). */
static void a_plain_answer_to_a_tls_dial_fails(void **state)
{
    struct io_base b = io_begin();
    struct io_point c = {0};
    uint16_t port;
    int listener = io_raw_listen(5, &port), fd;
    struct sockaddr_in a = io_loopback(port);

    (void)state;
    c.s = stream_dial(b.loop, (struct sockaddr *)&a, tls_client, "localhost", NULL, &io_ops, &c);
    io_run_for(b.loop, 10);
    fd = accept(listener, NULL, NULL);
    assert_true(fd >= 0);
    assert_int_equal(send(fd, "HTTP/1.1 400 Bad Request\r\n\r\n", 28, 0), 28);
    assert_true(io_run(b.loop, io_failed, &c, 1000));
    assert_int_equal(c.error, STREAM_ERROR_TLS);
    assert_int_equal(c.received + c.opens, 0);
    io_close(&c);
    close(fd);
    close(listener);
    io_end(&b);
}

static void a_close_in_the_handshake_is_an_error(void **state)
{
    struct pair *p = pair_new(tls_server);
    int fd = pair_raw(p);

    (void)state;
    assert_int_equal(send(fd, "\x16\x03\x01\x02", 4, 0), 4); /* a piece of a ClientHello */
    io_run_for(p->base.loop, 10);
    close(fd);
    assert_true(io_run(p->base.loop, io_failed, &p->server, 1000));
    assert_int_equal(p->server.error, UV_ECONNRESET);
    assert_int_equal(p->server.ends + p->server.opens, 0);
    pair_free(p);
}

/* SDKs abort by closing the socket under TLS: FIN without close_notify, which is told apart. */
static void fin_without_close_notify(void **state)
{
    struct pair *p = pair_new(tls_server);
    bool found = false;

    (void)state;
    pair_open(p, true);
    for (int fd = 3; fd < 64 && !found; fd++) {
        struct sockaddr_in a = {0};
        socklen_t n = sizeof(a);

        /* the client's descriptor: the one whose other side is the listener's port */
        if (getpeername(fd, (struct sockaddr *)&a, &n) == 0 && a.sin_family == AF_INET &&
            ntohs(a.sin_port) == stream_listener_port(p->listener))
            found = shutdown(fd, SHUT_WR) == 0;
    }
    assert_true(found);
    assert_true(io_run(p->base.loop, io_ended, &p->server, 1000));
    assert_int_equal(p->server.how, STREAM_END_FIN);
    pair_free(p);
}

static void tls_close_gently_ends_with_close_notify(void **state)
{
    struct pair *p = pair_new(tls_server);
    static char big[400000];

    (void)state;
    pair_open(p, true);
    assert_true(io_write(&p->server, big, sizeof(big)));
    io_act(&p->server, IO_GENTLY);
    assert_true(io_run(p->base.loop, io_ended, &p->client, 2000));
    assert_int_equal(p->client.how, STREAM_END_CLOSE_NOTIFY);
    assert_int_equal(p->client.received, sizeof(big));
    pair_free(p);
}

static void a_new_context_serves_new_handshakes(void **state)
{
    struct pair *p = pair_new(tls_server);
    struct buf why = {0};
    struct tls_context *expired = tls_context_server(certs.expired, certs.key, "", &why);

    (void)state;
    stream_listener_set_tls(p->listener, expired);
    tls_context_unref(expired);
    pair_dial(p, tls_client, "localhost");
    assert_true(io_run(p->base.loop, io_failed, &p->client, 2000));
    pair_free(p);
}

static int setup(void **state)
{
    struct buf why = {0};

    (void)state;
    io_certs_make(&certs);
    tls_server = tls_context_server(certs.cert, certs.key, "", &why);
    tls_client = tls_context_client(certs.ca, "", "", true, true, &why);
    return tls_server == NULL || tls_client == NULL ? -1 : 0;
}

static int teardown(void **state)
{
    (void)state;
    tls_context_unref(tls_server);
    tls_context_unref(tls_client);
    io_certs_remove(&certs);
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(plain_talk),
        cmocka_unit_test(tls_talk),
        cmocka_unit_test(accepted_sockets_have_their_options),
        cmocka_unit_test(a_slow_reader_bounds_the_queue),
        cmocka_unit_test(a_paused_tls_reader_bounds_the_queue),
        cmocka_unit_test(pause_stops_and_resume_delivers),
        cmocka_unit_test(watch_sees_fin_and_reset_of_paused_streams),
        cmocka_unit_test(a_write_after_fin_tells_gone_from_half_closed),
        cmocka_unit_test(watch_is_quiet_after_both_ends),
        cmocka_unit_test(reset_is_seen_as_reset),
        cmocka_unit_test(close_gently_lets_the_answer_arrive),
        cmocka_unit_test(close_gently_is_bounded),
        cmocka_unit_test(ends_inside_callbacks_plain),
        cmocka_unit_test(ends_inside_callbacks_tls),
        cmocka_unit_test(a_refused_dial_fails_later),
        cmocka_unit_test(a_dial_can_be_closed_at_once),
        cmocka_unit_test(an_early_answer_comes_before_the_error),
        cmocka_unit_test(out_of_descriptors_pauses_accepting),
        cmocka_unit_test(every_allocation_may_fail),
        cmocka_unit_test(unix_sockets),
        cmocka_unit_test(listeners),
        cmocka_unit_test(closing_a_listener_serves_its_queue),
        cmocka_unit_test(tls_failures_name_their_cause),
        cmocka_unit_test(plain_bytes_on_a_tls_port_fail),
        cmocka_unit_test(a_plain_answer_to_a_tls_dial_fails),
        cmocka_unit_test(a_close_in_the_handshake_is_an_error),
        cmocka_unit_test(fin_without_close_notify),
        cmocka_unit_test(tls_close_gently_ends_with_close_notify),
        cmocka_unit_test(a_new_context_serves_new_handshakes),
    };

    return cmocka_run_group_tests_name("stream", tests, setup, teardown);
}
