/*
 * stream_listen.c - the listening half of stream.h: binds with SO_REUSEPORT, accepts, makes streams.
 *
 * Accepts by itself on a polled descriptor instead of uv_listen: accept4 names the client in the same
 * system call, and when descriptors run out the calls wait in the kernel's queue for a moment, where libuv
 * would accept and drop them.
 *
 * A listener owns its descriptor and a reference to its TLS context; it goes away in the close callback of
 * its poll handle. Each loop counts the accepts that failed, and tells the log of them once a second.
 */
#include "log.h"
#include "mem.h"
#include "stream.h"

#include <errno.h>
#include <netdb.h>
#include <netinet/in.h>
#include <stdio.h>
#include <sys/socket.h>
#include <unistd.h>
#include <uv.h>

#define LISTEN_BACKLOG 4096
#define ACCEPTS_A_TURN 128
#define ACCEPT_PAUSE_MS 100

struct stream_listener {
    uv_poll_t poll;
    struct loop *loop;
    struct tls_context *tls;
    void (*on_accept)(void *arg, struct stream *s);
    void *arg;
    struct deadline retry; /* armed: out of descriptors, accepting pauses */
    int fd;
    uint16_t port;
    bool closing;
};

/* Of one loop. */
struct accept_failures {
    uint64_t n;
    uint64_t logged_s, held_back; /* for log_may_repeat */
};

static void accept_failed(const struct loop *l, int error)
{
    struct accept_failures *f = loop_slot(l, LOOP_SLOT_LISTENER);
    uint64_t suppressed;

    f->n++;
    if (log_may_repeat(&f->logged_s, &f->held_back, &suppressed))
        log_event(LOG_WARN, "accept", "cannot accept a connection: %s (%llu more since the last line)",
                  uv_strerror(error), (unsigned long long)suppressed);
}

/* Made with the loop's first listener. */
static bool make_failures(struct loop *l)
{
    struct accept_failures *f;

    if (loop_slot(l, LOOP_SLOT_LISTENER) != NULL)
        return true;
    f = mem_zalloc(sizeof(*f));
    if (f != NULL)
        loop_slot_set(l, LOOP_SLOT_LISTENER, f, mem_free);
    return f != NULL;
}

uint64_t stream_accept_failures(const struct loop *l)
{
    const struct accept_failures *f = loop_slot(l, LOOP_SLOT_LISTENER);

    return f == NULL ? 0 : f->n;
}

/*
 * Out of descriptors or memory: the calls wait in the kernel's queue for a moment instead of being dropped.
 */
static void accept_pause(struct stream_listener *sl, int error)
{
    accept_failed(sl->loop, error);
    if (sl->closing || !deadline_set(sl->loop, &sl->retry, loop_now_ms(sl->loop) + ACCEPT_PAUSE_MS))
        return;
    uv_poll_stop(&sl->poll);
}

static void accept_some(struct stream_listener *sl, int max)
{
    for (int i = 0; i < max; i++) {
        struct sockaddr_storage from;
        socklen_t n = sizeof(from);
        int fd = accept4(sl->fd, (struct sockaddr *)&from, &n, SOCK_NONBLOCK | SOCK_CLOEXEC);

        if (fd >= 0) {
            struct stream *s = stream_from_socket(sl->loop, fd, (const struct sockaddr *)&from, sl->tls);

            if (s != NULL)
                sl->on_accept(sl->arg, s);
            else
                accept_failed(sl->loop, UV_ENOMEM);
            if (sl->closing && max != INT32_MAX)
                return; /* closed from inside on_accept, which has served the rest */
            continue;
        }
        if (errno == ECONNABORTED || errno == EINTR)
            continue;
        if (errno != EAGAIN)
            accept_pause(sl, -errno);
        return;
    }
}

static void on_acceptable(uv_poll_t *p, int status, int events)
{
    struct stream_listener *sl = container_of(p, struct stream_listener, poll);

    (void)events;
    if (status == 0)
        accept_some(sl, ACCEPTS_A_TURN);
}

static void on_retry(struct deadline *d)
{
    struct stream_listener *sl = container_of(d, struct stream_listener, retry);

    BUG_ON(uv_poll_start(&sl->poll, UV_READABLE, on_acceptable) != 0);
}

/* One address: a bound, listening descriptor, or -errno. */
static int listen_on(const struct addrinfo *a)
{
    int fd = socket(a->ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    int on = 1, off = 0, error;

    if (fd < 0)
        return -errno;
    (void)setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
    if (a->ai_family == AF_INET6)
        (void)setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof(off));
    stream_socket_options(fd); /* inherited by what is accepted: no system call for each */
    if (setsockopt(fd, SOL_SOCKET, SO_REUSEPORT, &on, sizeof(on)) == 0 &&
        bind(fd, a->ai_addr, a->ai_addrlen) == 0 && listen(fd, LISTEN_BACKLOG) == 0)
        return fd;
    error = errno;
    close(fd);
    return -error;
}

/*
 * Tries what the host stands for, in order; "": the IPv6 wildcard (which takes IPv4 too), then the IPv4 one.
 */
static int listen_any(const char *host, uint16_t port, struct buf *why)
{
    struct addrinfo hints = {.ai_socktype = SOCK_STREAM, .ai_flags = AI_PASSIVE | AI_NUMERICSERV},
                    *all = NULL;
    char service[8], text[256];
    const char *wild[] = {"::", "0.0.0.0"}, **hosts = host[0] == '\0' ? wild : &host;
    int fd = -EADDRNOTAVAIL, rc = 0;

    snprintf(service, sizeof(service), "%u", port);
    for (size_t i = 0; fd < 0 && i < (host[0] == '\0' ? 2 : 1); i++) {
        rc = getaddrinfo(hosts[i], service, &hints, &all);
        if (rc != 0)
            continue;
        for (const struct addrinfo *a = all; a != NULL && fd < 0; a = a->ai_next)
            fd = listen_on(a);
        freeaddrinfo(all);
    }
    if (fd >= 0)
        return fd;
    snprintf(text, sizeof(text), "cannot listen on %.120s:%u: %s", host[0] == '\0' ? "*" : host, port,
             rc != 0 ? gai_strerror(rc) : uv_strerror(fd));
    (void)WARN_ON(!buf_put(why, slice_of(text)));
    return fd;
}

static uint16_t bound_port(int fd)
{
    union {
        struct sockaddr any;
        struct sockaddr_in in;
        struct sockaddr_in6 in6;
    } a = {0};
    socklen_t n = sizeof(a);

    if (getsockname(fd, &a.any, &n) != 0)
        return 0;
    return ntohs(a.any.sa_family == AF_INET6 ? a.in6.sin6_port : a.in.sin_port);
}

struct stream_listener *stream_listen(struct loop *l, const char *host, uint16_t port,
                                      struct tls_context *tls, void (*on_accept)(void *arg, struct stream *s),
                                      void *arg, struct buf *why)
{
    struct stream_listener *sl = mem_alloc(sizeof(*sl));

    if (sl == NULL) {
        (void)WARN_ON(!buf_put(why, SLICE("cannot listen: no memory")));
        return NULL;
    }
    *sl = (struct stream_listener){.loop = l, .on_accept = on_accept, .arg = arg};
    deadline_init(&sl->retry, on_retry);
    sl->fd = !make_failures(l) ? -ENOMEM : listen_any(host, port, why);
    if (sl->fd < 0)
        goto no_socket;
    sl->port = bound_port(sl->fd);
    if (uv_poll_init(loop_uv(l), &sl->poll, sl->fd) != 0)
        goto no_poll;
    BUG_ON(uv_poll_start(&sl->poll, UV_READABLE, on_acceptable) != 0);
    if (tls != NULL)
        sl->tls = tls_context_ref(tls);
    return sl;

no_poll:
    close(sl->fd);
no_socket:
    mem_free(sl);
    return NULL;
}

uint16_t stream_listener_port(const struct stream_listener *sl)
{
    return sl->port;
}

void stream_listener_set_tls(struct stream_listener *sl, struct tls_context *tls)
{
    struct tls_context *old = sl->tls;

    sl->tls = tls == NULL ? NULL : tls_context_ref(tls);
    if (old != NULL)
        tls_context_unref(old);
}

static void on_listener_closed(uv_handle_t *h)
{
    struct stream_listener *sl = container_of((uv_poll_t *)h, struct stream_listener, poll);

    stream_listener_set_tls(sl, NULL);
    mem_free(sl);
}

void stream_listener_close(struct stream_listener *sl)
{
    BUG_ON(sl->closing);
    sl->closing = true;
    deadline_cancel(sl->loop, &sl->retry);
    accept_some(sl, INT32_MAX);
    uv_close((uv_handle_t *)&sl->poll, on_listener_closed);
    close(sl->fd);
}
