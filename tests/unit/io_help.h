/*
 * io_help.h - what the tests of the I/O rooms share: running a loop until something is true, an endpoint
 * that records its callbacks, raw sockets for the other side, and throw-away certificates.
 *
 * Each test ends with io_end: the loop closes clean, no stream is alive, no block is left, nothing was
 * warned of.
 */
#ifndef LG_TEST_IO_HELP_H
#define LG_TEST_IO_HELP_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "buf.h"
#include "log.h"
#include "loop.h"
#include "mem.h"
#include "stream.h"
#include "tls.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>
#include <uv.h>

/* --- running -------------------------------------------------------------------------------------------- */

struct io_wait {
    struct deadline deadline;
    struct loop *loop;
    bool (*met)(void *arg);
    void *arg;
    uint64_t until_ms;
    bool ok;
};

static inline void io_wait_fire(struct deadline *d)
{
    struct io_wait *w = container_of(d, struct io_wait, deadline);

    w->ok = w->met(w->arg);
    if (w->ok || loop_now_ms(w->loop) >= w->until_ms)
        loop_stop(w->loop);
    else
        assert_true(deadline_set(w->loop, d, loop_now_ms(w->loop) + 1));
}

/* Runs l until met(arg), which is asked about every ms; false after `ms`. */
UNUSED static bool io_run(struct loop *l, bool (*met)(void *arg), void *arg, uint64_t ms)
{
    struct io_wait w = {.loop = l, .met = met, .arg = arg};

    uv_update_time(loop_uv(l));
    w.until_ms = loop_now_ms(l) + ms;
    deadline_init(&w.deadline, io_wait_fire);
    assert_true(deadline_set(l, &w.deadline, loop_now_ms(l)));
    loop_run(l);
    deadline_cancel(l, &w.deadline);
    return w.ok;
}

static inline bool io_never(void *arg)
{
    (void)arg;
    return false;
}

/* For what must not happen within a while. */
UNUSED static void io_run_for(struct loop *l, uint64_t ms)
{
    io_run(l, io_never, NULL, ms);
}

static inline bool io_no_streams(void *arg)
{
    return stream_live(arg) == 0;
}

struct io_base {
    struct loop *loop;
    size_t blocks;
    uint64_t warnings;
};

UNUSED static struct io_base io_begin(void)
{
    struct io_base b = {.blocks = mem_live_blocks(), .warnings = base_warn_count()};

    signal(SIGPIPE, SIG_IGN);
    b.loop = loop_new(0);
    return b;
}

UNUSED static void io_end(struct io_base *b)
{
    assert_true(io_run(b->loop, io_no_streams, b->loop, 2000));
    loop_free(b->loop);
    log_thread_end();
    assert_int_equal(mem_live_blocks(), b->blocks);
    assert_int_equal(base_warn_count(), b->warnings);
}

/* --- an endpoint that records --------------------------------------------------------------------------- */

enum io_do { IO_NOTHING, IO_CLOSE, IO_RESET, IO_GENTLY, IO_PAUSE, IO_ECHO, IO_SHUTDOWN };

struct io_point {
    struct stream *s; /* NULL: closed by us */
    enum io_do at_open, at_data, at_end, at_drain, at_error;
    unsigned opens, ends, drains, errors;
    enum stream_end how;
    int error;
    char detail[200];
    uint64_t received;
    uint32_t sum;      /* of the bytes, in order */
    struct buf bytes;  /* where keep is set */
    bool keep, inside; /* inside: a stream_* call is below */
};

static inline uint32_t io_sum(uint32_t sum, const char *p, size_t n)
{
    for (size_t i = 0; i < n; i++)
        sum = (sum ^ (unsigned char)p[i]) * 16777619U;
    return sum;
}

UNUSED static void io_act(struct io_point *p, enum io_do what)
{
    struct stream *s = p->s;

    if (s == NULL)
        return;
    switch (what) {
    case IO_CLOSE:
        p->s = NULL;
        stream_close(s);
        break;
    case IO_RESET:
        p->s = NULL;
        stream_reset(s);
        break;
    case IO_GENTLY:
        p->s = NULL;
        stream_close_gently(s, 1 << 20, 1000);
        break;
    case IO_PAUSE:
        stream_pause(s);
        break;
    case IO_SHUTDOWN:
        stream_shutdown(s);
        break;
    case IO_ECHO:
    case IO_NOTHING:
        break;
    }
}

UNUSED static bool io_write(struct io_point *p, const void *bytes, size_t n)
{
    struct iovec iov = {(void *)(uintptr_t)bytes, n};
    bool ok;

    p->inside = true;
    ok = stream_write(p->s, &iov, 1);
    p->inside = false;
    return ok;
}

static inline struct io_point *io_point_of(void *owner)
{
    struct io_point *p = owner;

    assert_false(p->inside);
    assert_non_null(p->s); /* else: a callback after the close */
    assert_int_equal(p->errors, 0);
    return p;
}

static inline void io_on_open(void *owner)
{
    struct io_point *p = io_point_of(owner);

    p->opens++;
    assert_int_equal(p->received, 0);
    io_act(p, p->at_open);
}

static inline void io_on_data(void *owner, char *bytes, size_t n)
{
    struct io_point *p = io_point_of(owner);

    assert_true(n > 0);
    p->received += n;
    p->sum = io_sum(p->sum, bytes, n);
    if (p->keep)
        assert_true(buf_put(&p->bytes, (struct slice){bytes, n}));
    if (p->at_data == IO_ECHO)
        (void)!io_write(p, bytes, n);
    memset(bytes, 0x55, n); /* they are ours to write on */
    io_act(p, p->at_data);
}

static inline void io_on_end(void *owner, enum stream_end how)
{
    struct io_point *p = io_point_of(owner);

    p->ends++;
    p->how = how;
    assert_int_equal(p->ends, 1);
    io_act(p, p->at_end);
}

static inline void io_on_drain(void *owner)
{
    struct io_point *p = io_point_of(owner);

    p->drains++;
    io_act(p, p->at_drain);
}

static inline void io_on_error(void *owner, int error, const char *detail)
{
    struct io_point *p = io_point_of(owner);

    p->errors++;
    p->error = error;
    snprintf(p->detail, sizeof(p->detail), "%s", detail);
    io_act(p, p->at_error);
}

UNUSED static const struct stream_ops io_ops = {
    .on_open = io_on_open,
    .on_data = io_on_data,
    .on_end = io_on_end,
    .on_drain = io_on_drain,
    .on_error = io_on_error,
};

/* on_accept: the next accepted stream goes to the point, others are closed. */
UNUSED static void io_accept(void *arg, struct stream *s)
{
    struct io_point *p = arg;

    if (p->s != NULL) {
        stream_close(s);
        return;
    }
    p->s = s;
    stream_adopt(s, &io_ops, p);
}

UNUSED static void io_close(struct io_point *p)
{
    io_act(p, IO_CLOSE);
    buf_free(&p->bytes);
}

static inline bool io_has_stream(void *arg)
{
    return ((struct io_point *)arg)->s != NULL;
}

static inline bool io_opened(void *arg)
{
    return ((struct io_point *)arg)->opens > 0;
}

static inline bool io_ended(void *arg)
{
    return ((struct io_point *)arg)->ends > 0;
}

static inline bool io_failed(void *arg)
{
    return ((struct io_point *)arg)->errors > 0;
}

UNUSED static struct stream_listener *io_listen(struct loop *l, struct tls_context *tls, struct io_point *p)
{
    struct buf why = {0};
    struct stream_listener *sl = stream_listen(l, "127.0.0.1", 0, tls, io_accept, p, &why);

    if (sl == NULL)
        fail_msg("%.*s", (int)why.n, why.p);
    buf_free(&why);
    return sl;
}

UNUSED static struct sockaddr_in io_loopback(uint16_t port)
{
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_port = htons(port)};

    a.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    return a;
}

/* --- the other side, raw -------------------------------------------------------------------------------- */

/* A connected, non-blocking socket. */
UNUSED static int io_raw_connect(uint16_t port)
{
    struct sockaddr_in a = io_loopback(port);
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);

    assert_true(fd >= 0);
    assert_int_equal(connect(fd, (struct sockaddr *)&a, sizeof(a)), 0);
    assert_int_equal(fcntl(fd, F_SETFL, O_NONBLOCK), 0);
    return fd;
}

/* A listening, non-blocking socket on a free port. */
UNUSED static int io_raw_listen(int backlog, uint16_t *port)
{
    struct sockaddr_in a = io_loopback(0);
    socklen_t n = sizeof(a);
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);

    assert_true(fd >= 0);
    assert_int_equal(bind(fd, (struct sockaddr *)&a, sizeof(a)), 0);
    assert_int_equal(listen(fd, backlog), 0);
    assert_int_equal(getsockname(fd, (struct sockaddr *)&a, &n), 0);
    *port = ntohs(a.sin_port);
    return fd;
}

UNUSED static void io_raw_reset(int fd)
{
    struct linger linger = {.l_onoff = 1, .l_linger = 0};

    assert_int_equal(setsockopt(fd, SOL_SOCKET, SO_LINGER, &linger, sizeof(linger)), 0);
    close(fd);
}

/* --- certificates --------------------------------------------------------------------------------------- */

struct io_certs {
    char dir[64];
    char ca[96], cert[96], key[96], expired[96], expired_key[96];
};

UNUSED static void io_certs_path(const struct io_certs *c, char *out, size_t n, const char *name)
{
    snprintf(out, n, "%s/%s", c->dir, name);
}

/*
 * A CA, a certificate for `localhost` and 127.0.0.1, and one that ended long ago; made by the openssl
 * command.
 */
UNUSED static void io_certs_make(struct io_certs *c)
{
    static const char script[] =
        "set -e; cd '%s'; exec >/dev/null 2>&1;"
        "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=test-ca "
        "-keyout ca.key"
        " -out ca.pem;"
        "openssl req -new -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj /CN=localhost -keyout "
        "key.pem -out r;"
        "printf 'subjectAltName=DNS:localhost,IP:127.0.0.1' >e;"
        "openssl x509 -req -in r -CA ca.pem -CAkey ca.key -set_serial 1 -days 2 -extfile e -out cert.pem;"
        "mkdir d; touch d/index; echo 02 >d/serial;"
        "printf '[ca]\\ndefault_ca=c\\n[c]\\nnew_certs_dir=d\\ndatabase=d/index\\nserial=d/serial\\n"
        "default_md=sha256\\npolicy=p\\n[p]\\ncommonName=supplied\\n' >cnf;"
        "openssl ca -batch -config cnf -cert ca.pem -keyfile ca.key -in r -startdate 20200101000000Z"
        " -enddate 20200102000000Z -extfile e -notext -out expired.pem";
    char command[2048];

    snprintf(c->dir, sizeof(c->dir), "/tmp/lg-test-XXXXXX");
    assert_non_null(mkdtemp(c->dir));
    snprintf(command, sizeof(command), script, c->dir);
    assert_int_equal(system(command), 0);
    io_certs_path(c, c->ca, sizeof(c->ca), "ca.pem");
    io_certs_path(c, c->cert, sizeof(c->cert), "cert.pem");
    io_certs_path(c, c->key, sizeof(c->key), "key.pem");
    io_certs_path(c, c->expired, sizeof(c->expired), "expired.pem");
}

UNUSED static void io_certs_remove(struct io_certs *c)
{
    char command[128];

    snprintf(command, sizeof(command), "rm -rf '%s'", c->dir);
    assert_int_equal(system(command), 0);
}

#endif
