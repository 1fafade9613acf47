/*
 * stream.c - one duplex byte stream over libuv: plain or TLS, accepted or dialed.
 *
 *   dialed ─► DIALING ─► HANDSHAKING ─► OPEN ─► LINGERING ─► CLOSED     HANDSHAKING: only with TLS
 *                └────────────┴───────────┴──────────┴─► FAILED ─┘        accepted: begins there, or in OPEN
 *
 * Any of them may be closed.
 *
 * Who holds a stream: its owner until one of the three closes; then libuv, until close_cb *and* the request
 * in flight have both reported (a write may still report success after uv_close). on_closed / job_done free
 * it, so the memory never goes while a frame of this file stands on it.
 *
 * Writing: what the kernel takes goes out inside stream_write; the rest is copied to `out` and sent by at
 * most one uv_write at a time over the first chunks of `out`, which are dropped when it reports. Its
 * request lives only while something is queued: an idle stream is this struct and the kernel's socket,
 * nothing else.
 *
 * Failing: whoever finds an error calls stream_break, which only marks it. The deferred task tells the
 * owner at the end of the turn, so no callback runs inside a call of the owner's. Where it was writing that
 * failed, what the other side had sent before is delivered first: an early response with a reset behind it
 * is common (413, then close).
 *
 * Watching (stream_watch): one deadline a loop, armed while some watched stream is not read. It asks
 * poll(2) for all of them in one system call, and TCP_INFO only for those that poll names.
 */
#include "stream.h"

#include "mem.h"

#include <errno.h>
#include <linux/sockios.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdio.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>
#include <uv.h>

#define WATCH_MS 100
/*
 * A vanished host ends an idle stream 60 s + 6 x 10 s after its last sign of life, one that is written to
 * after 120 s without an acknowledgement (or with a window that stays shut, which a caller's own deadline
 * should end earlier).
 */
#define KEEPALIVE_IDLE_S 60
#define KEEPALIVE_INTERVAL_S 10
#define KEEPALIVE_PROBES 6
#define USER_TIMEOUT_MS 120000
/* At most 4: libuv allocates for more. 4 large chunks are 64 KiB a system call. */
#define WRITE_CHUNKS 4
#define DRAIN_READS 16 /* of a stream whose writing failed: at most 1 MiB is still delivered */

enum stream_state {
    STREAM_BORN, /* inside the call that makes it */
    STREAM_DIALING,
    STREAM_HANDSHAKING, /* TLS is not up yet */
    STREAM_OPEN,
    STREAM_FAILED,    /* on_error comes or has come; the owner must close */
    STREAM_LINGERING, /* no owner: flushing, then discarding until the other side's FIN */
    STREAM_CLOSED,    /* uv_close was called */
};

/* The request that libuv has; at most one. */
union stream_job {
    uv_write_t write;
    uv_connect_t connect;
};

struct stream_linger {
    struct deadline deadline;
    struct stream *stream;
    uint64_t bytes_left;
};

struct stream {
    union {
        uv_handle_t handle;
        uv_stream_t stream;
        uv_tcp_t tcp;
        uv_pipe_t pipe;
    } uv;
    struct loop *loop;
    const struct stream_ops *ops;
    void *owner;
    struct tls *tls; /* NULL: plain */
    struct queue out;
    union stream_job *job;  /* NULL: none */
    size_t in_flight_bytes; /* of `out`, in the job */
    struct stream_linger *linger;
    struct task task; /* tells of what was found where no callback may run */
    struct list_node watched;
    uint64_t bytes_in, bytes_out;
    const char *detail;
    int error;
    enum stream_state state : 8;
    bool paused : 1;
    bool reading : 1; /* uv_read_start is on */
    bool ended : 1;   /* on_end has come */
    bool eof : 1;     /* nothing is left to read */
    bool saw_fin : 1; /* by the watch; the task will tell */
    bool shut_asked : 1;
    bool shut_done : 1; /* FIN is given to the kernel */
    bool was_full : 1;  /* on_drain is owed below the low mark */
    bool watch : 1;
    bool unread : 1;    /* writing failed: the task delivers what was received first */
    bool uv_closed : 1; /* close_cb has come */
    char address[56];
};

/* What the streams of one loop share. */
struct stream_room {
    struct loop *loop;
    size_t live;
    struct list watched; /* streams that are watched and not read */
    struct deadline tick;
};

static void stream_destroy(struct stream *s, bool reset);
static void stream_update(struct stream *s);
static bool stream_flush(struct stream *s);
static void send_what_fits(struct stream *s);
static void linger_step(struct stream *s);
static void on_tick(struct deadline *d);

static struct stream_room *room_of(const struct loop *l)
{
    return loop_slot(l, LOOP_SLOT_STREAM);
}

static void room_drop(void *p)
{
    struct stream_room *room = p;

    (void)WARN_ON(room->live > 0);
    deadline_cancel(room->loop, &room->tick);
    mem_free(room);
}

/* NULL: no memory. */
static struct stream_room *room_get(struct loop *l)
{
    struct stream_room *room = room_of(l);

    if (room != NULL)
        return room;
    room = mem_zalloc(sizeof(*room));
    if (room == NULL)
        return NULL;
    room->loop = l;
    list_init(&room->watched);
    deadline_init(&room->tick, on_tick);
    loop_slot_set(l, LOOP_SLOT_STREAM, room, room_drop);
    return room;
}

static int stream_fd(const struct stream *s)
{
    uv_os_fd_t fd = -1;

    return uv_fileno(&s->uv.handle, &fd) == 0 ? fd : -1;
}

static bool is_tcp(const struct stream *s)
{
    return s->uv.handle.type == UV_TCP;
}

/* --- failing -------------------------------------------------------------------------------------------- */

/* Marks it failed; the owner hears of it from the task. Always false, for `return stream_break(…)`. */
static bool stream_break(struct stream *s, int error, const char *detail)
{
    if (s->state == STREAM_FAILED || s->state == STREAM_CLOSED)
        return false;
    s->error = error;
    s->detail = detail != NULL ? detail : uv_strerror(error);
    s->state = STREAM_FAILED;
    stream_update(s);
    loop_defer(s->loop, &s->task);
    return false;
}

static bool stream_break_writing(struct stream *s, int error)
{
    s->unread = s->state == STREAM_OPEN && !s->paused && !s->eof;
    return stream_break(s, error, NULL);
}

static bool closed(const struct stream *s)
{
    return s->state == STREAM_CLOSED;
}

/* --- reading -------------------------------------------------------------------------------------------- */

static void on_alloc(uv_handle_t *h, size_t suggested, uv_buf_t *b)
{
    const struct stream *s = h->data;

    (void)suggested;
    *b = uv_buf_init(loop_scratch(s->loop), LOOP_SCRATCH_BYTES);
}

static void deliver(struct stream *s, char *bytes, size_t n)
{
    if ((s->state == STREAM_OPEN || s->state == STREAM_FAILED) && s->owner != NULL)
        s->ops->on_data(s->owner, bytes, n);
}

/* Connected, and TLS is up where there is TLS. */
static void stream_opened(struct stream *s)
{
    s->state = STREAM_OPEN;
    stream_update(s);
    if (s->state == STREAM_OPEN && s->ops != NULL && s->ops->on_open != NULL)
        s->ops->on_open(s->owner);
}

static void stream_end(struct stream *s, enum stream_end how)
{
    bool told = s->ended;

    s->eof = s->ended = true;
    stream_update(s);
    if (s->state == STREAM_LINGERING)
        linger_step(s);
    else if (s->state == STREAM_HANDSHAKING)
        stream_break(s, UV_ECONNRESET, "closed during the TLS handshake");
    else if (!told && s->owner != NULL)
        s->ops->on_end(s->owner, how);
}

static void on_plain(void *arg, char *bytes, size_t n)
{
    struct stream *s = arg;

    if (s->state == STREAM_HANDSHAKING)
        stream_opened(s);
    deliver(s, bytes, n);
}

static void feed(struct stream *s, const char *bytes, size_t n)
{
    enum tls_result r = tls_feed(s->tls, bytes, n, &s->out, on_plain, s);

    if (closed(s))
        return;
    if (r == TLS_FAILED) {
        stream_break(s, STREAM_ERROR_TLS, tls_error(s->tls));
        send_what_fits(s); /* the alert says why */
        return;
    }
    if (s->state == STREAM_HANDSHAKING && tls_ready(s->tls))
        stream_opened(s);
    if (!closed(s))
        stream_flush(s);
    if (r == TLS_CLOSED && !closed(s) && s->state != STREAM_LINGERING)
        stream_end(s, STREAM_END_CLOSE_NOTIFY);
}

static void receive(struct stream *s, char *bytes, size_t n)
{
    s->bytes_in += n;
    if (s->state == STREAM_LINGERING) {
        s->linger->bytes_left -= size_min(n, s->linger->bytes_left);
        if (s->linger->bytes_left == 0)
            stream_destroy(s, false);
    } else if (s->tls != NULL) {
        feed(s, bytes, n);
    } else {
        deliver(s, bytes, n);
    }
}

static void on_read(uv_stream_t *h, ssize_t n, const uv_buf_t *b)
{
    struct stream *s = h->data;

    if (n > 0)
        receive(s, b->base, (size_t)n);
    else if (n == UV_EOF)
        stream_end(s, STREAM_END_FIN);
    else if (n < 0)
        stream_break(s, (int)n, NULL);
}

/* Reads on or off, watched or not: both follow from the state, so they are settled in this one place. */
static void stream_update(struct stream *s)
{
    struct stream_room *room = room_of(s->loop);
    bool open = s->state == STREAM_OPEN;
    bool read = !s->eof &&
                ((open && !s->paused && s->ops != NULL) ||
                 (s->state == STREAM_HANDSHAKING && s->ops != NULL) || s->state == STREAM_LINGERING);
    bool watched = s->watch && open && (s->paused || s->eof) && !(s->ended && s->shut_done);

    if (read != s->reading) {
        int rc = read ? uv_read_start(&s->uv.stream, on_alloc, on_read) : uv_read_stop(&s->uv.stream);

        s->reading = read && rc == 0;
        if (rc != 0)
            stream_break(s, rc, NULL);
    }
    if (watched == list_linked(&s->watched))
        return;
    if (watched)
        list_push_back(&room->watched, &s->watched);
    else
        list_remove(&room->watched, &s->watched);
    if (watched && !deadline_armed(&room->tick) &&
        !deadline_set(s->loop, &room->tick, loop_now_ms(s->loop) + WATCH_MS))
        stream_break(s, UV_ENOMEM, NULL);
}

/* What is in the socket of a stream whose writing failed, up to its end. */
static void deliver_unread(struct stream *s)
{
    char *scratch = loop_scratch(s->loop);

    for (int i = 0; i < DRAIN_READS && s->state == STREAM_FAILED && !s->paused; i++) {
        ssize_t n = recv(stream_fd(s), scratch, LOOP_SCRATCH_BYTES, MSG_DONTWAIT);

        if (n == 0)
            stream_end(s, STREAM_END_FIN);
        if (n <= 0)
            return;
        receive(s, scratch, (size_t)n);
    }
}

/* The end of the turn: nobody else's frame is below. */
static void on_task(struct task *t)
{
    struct stream *s = container_of(t, struct stream, task);

    if (s->saw_fin && s->state == STREAM_OPEN) {
        s->saw_fin = false;
        if (!s->ended) {
            s->ended = true;
            stream_update(s);
            s->ops->on_end(s->owner, STREAM_END_FIN);
        }
    }
    if (s->state != STREAM_FAILED)
        return;
    if (s->linger != NULL) {
        stream_destroy(s, false);
        return;
    }
    if (s->unread) {
        s->unread = false;
        deliver_unread(s);
    }
    if (s->state == STREAM_FAILED && s->owner != NULL)
        s->ops->on_error(s->owner, s->error, s->detail);
}

/* --- writing -------------------------------------------------------------------------------------------- */

/* The part of the job that the kernel has already taken. */
static size_t job_progress(const struct stream *s)
{
    return s->in_flight_bytes == 0 ? 0 : s->in_flight_bytes - uv_stream_get_write_queue_size(&s->uv.stream);
}

size_t stream_queued(const struct stream *s)
{
    return s->out.bytes - job_progress(s);
}

uint64_t stream_bytes_out(const struct stream *s)
{
    return s->bytes_out + job_progress(s);
}

uint64_t stream_bytes_acknowledged(const struct stream *s)
{
    int unacknowledged = 0;

    if (ioctl(stream_fd(s), SIOCOUTQ, &unacknowledged) != 0 || unacknowledged < 0)
        unacknowledged = 0;
    return stream_bytes_out(s) - size_min((size_t)unacknowledged, stream_bytes_out(s));
}

uint64_t stream_bytes_in(const struct stream *s)
{
    return s->bytes_in;
}

static void maybe_free(struct stream *s)
{
    if (!s->uv_closed || s->job != NULL)
        return;
    room_of(s->loop)->live--;
    tls_free(s->tls);
    queue_free(&s->out);
    mem_free(s);
}

static void job_done(struct stream *s)
{
    mem_free(s->job);
    s->job = NULL;
    s->in_flight_bytes = 0;
    maybe_free(s);
}

/*
 * FIN, once everything before it is with the kernel. shutdown(2) itself: uv_shutdown would forbid a reset
 * later.
 */
static void maybe_shut(struct stream *s)
{
    if (!s->shut_asked || s->shut_done || s->out.bytes > 0)
        return;
    s->shut_done = true;
    if (shutdown(stream_fd(s), SHUT_WR) != 0 && errno != ENOTCONN)
        stream_break(s, -errno, NULL);
    stream_update(s);
}

static void tell_drained(struct stream *s)
{
    bool low = s->was_full && s->out.bytes < STREAM_LOW_BYTES;

    if (low)
        s->was_full = false;
    if ((low || s->out.bytes == 0) && s->state == STREAM_OPEN && s->owner != NULL && s->ops->on_drain != NULL)
        s->ops->on_drain(s->owner);
}

static void on_written(uv_write_t *w, int status);

/* Starts the job on what stands first in `out`. */
static bool write_more(struct stream *s)
{
    uv_buf_t bufs[WRITE_CHUNKS];
    size_t n = queue_peek(&s->out, (struct iovec *)bufs, WRITE_CHUNKS);
    int rc;

    if (s->job == NULL)
        s->job = mem_alloc(sizeof(*s->job));
    if (s->job == NULL)
        return stream_break(s, UV_ENOMEM, NULL);
    for (size_t i = 0; i < n; i++)
        s->in_flight_bytes += bufs[i].len;
    s->job->write.data = s;
    rc = uv_write(&s->job->write, &s->uv.stream, bufs, (unsigned)n, on_written);
    if (rc == 0)
        return true;
    job_done(s);
    return stream_break_writing(s, rc);
}

static void on_written(uv_write_t *w, int status)
{
    struct stream *s = w->data;

    if (closed(s)) {
        job_done(s);
        return;
    }
    if (status < 0 || s->state == STREAM_FAILED) {
        job_done(s);
        queue_free(&s->out);
        if (status < 0)
            stream_break_writing(s, status);
        return;
    }
    queue_drop(&s->out, s->in_flight_bytes);
    s->bytes_out += s->in_flight_bytes;
    s->in_flight_bytes = 0;
    if (s->out.bytes > 0) {
        if (!write_more(s))
            return;
    } else {
        job_done(s);
        maybe_shut(s);
    }
    if (s->state == STREAM_LINGERING)
        linger_step(s);
    else
        tell_drained(s);
}

/* Gives `out` to the kernel; what it does not take goes by a job. False: failed. */
static bool stream_flush(struct stream *s)
{
    struct iovec iov[16];
    size_t n;
    int rc;

    if (s->state == STREAM_FAILED)
        return false;
    if (s->in_flight_bytes > 0 || s->out.bytes == 0)
        return true;
    n = queue_peek(&s->out, iov, ARRAY_LEN(iov));
    rc = uv_try_write(&s->uv.stream, (const uv_buf_t *)iov, (unsigned)n);
    if (rc > 0) {
        queue_drop(&s->out, (size_t)rc);
        s->bytes_out += (uint64_t)rc;
    } else if (rc != UV_EAGAIN) {
        return stream_break_writing(s, rc);
    }
    return s->out.bytes == 0 || write_more(s);
}

/* A last word that nobody waits for. */
static void send_what_fits(struct stream *s)
{
    struct iovec iov[4];
    size_t n = queue_peek(&s->out, iov, ARRAY_LEN(iov));

    if (n > 0 && s->job == NULL)
        (void)uv_try_write(&s->uv.stream, (const uv_buf_t *)iov, (unsigned)n);
}

static bool queue_rest(struct stream *s, const struct iovec *iov, size_t n, size_t skip)
{
    for (size_t i = 0; i < n; i++) {
        size_t done = size_min(skip, iov[i].iov_len);

        skip -= done;
        if (done < iov[i].iov_len &&
            !queue_put(&s->out, (const char *)iov[i].iov_base + done, iov[i].iov_len - done))
            return stream_break(s, UV_ENOMEM, NULL);
    }
    return true;
}

static bool write_plain(struct stream *s, const struct iovec *iov, size_t n)
{
    size_t total = 0;
    int rc = UV_EAGAIN;

    for (size_t i = 0; i < n; i++)
        total += iov[i].iov_len;
    if (total == 0)
        return true;
    if (s->out.bytes == 0)
        rc = uv_try_write(&s->uv.stream, (const uv_buf_t *)iov, (unsigned)n);
    if (rc < 0 && rc != UV_EAGAIN)
        return stream_break_writing(s, rc);
    if (rc < 0)
        rc = 0;
    s->bytes_out += (uint64_t)rc;
    if ((size_t)rc == total)
        return true;
    if (!queue_rest(s, iov, n, (size_t)rc))
        return false;
    return s->in_flight_bytes > 0 || write_more(s);
}

bool stream_write(struct stream *s, const struct iovec *iov, size_t n)
{
    bool ok;

    if (s->state != STREAM_OPEN || s->shut_asked) {
        (void)WARN_ON(s->state < STREAM_OPEN); /* before on_open */
        return false;
    }
    if (s->tls == NULL)
        ok = write_plain(s, iov, n);
    else if (tls_write(s->tls, iov, n, &s->out) == TLS_OK)
        ok = stream_flush(s);
    else
        ok = stream_break(s, STREAM_ERROR_TLS, tls_error(s->tls));
    if (ok && stream_full(s))
        s->was_full = true;
    return ok;
}

void stream_shutdown(struct stream *s)
{
    if (s->state != STREAM_OPEN || s->shut_asked)
        return;
    s->shut_asked = true;
    if (s->tls != NULL)
        tls_put_close(s->tls, &s->out);
    if (stream_flush(s))
        maybe_shut(s);
}

/* --- pausing and watching ------------------------------------------------------------------------------- */

void stream_pause(struct stream *s)
{
    s->paused = true;
    stream_update(s);
}

void stream_resume(struct stream *s)
{
    s->paused = false;
    stream_update(s);
}

void stream_watch(struct stream *s, bool on)
{
    s->watch = on;
    stream_update(s);
}

static bool tcp_is_closed(int fd)
{
    struct tcp_info info;
    socklen_t n = sizeof(info);

    return getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &n) == 0 && info.tcpi_state == TCP_CLOSE;
}

bool stream_peer_is_gone(struct stream *s)
{
    struct pollfd p = {.fd = stream_fd(s), .events = POLLRDHUP};

    if (is_tcp(s))
        return tcp_is_closed(p.fd);
    return poll(&p, 1, 0) == 1 && (p.revents & (POLLHUP | POLLERR)) != 0;
}

bool stream_has_news(struct stream *s)
{
    char byte;
    ssize_t n = recv(stream_fd(s), &byte, 1, MSG_PEEK | MSG_DONTWAIT);

    return n == 0 || (n > 0 && s->tls == NULL) || (n < 0 && errno != EAGAIN) || s->state != STREAM_OPEN;
}

/* poll(2) had something to say of a stream that is not read. */
static void watch_hit(struct stream *s, const struct pollfd *p)
{
    bool hung_up = (p->revents & POLLHUP) != 0;
    /*
     * A unix socket has no reset: its other side is gone when both directions are closed and we closed
     * neither.
     */
    bool gone = is_tcp(s) ? hung_up && tcp_is_closed(p->fd) : hung_up && s->ended && !s->shut_done;

    if ((p->revents & (POLLERR | POLLNVAL)) != 0 || gone) {
        stream_break(s, UV_ECONNRESET, NULL);
    } else if (!s->ended) {
        s->saw_fin = true;
        loop_defer(s->loop, &s->task);
    }
}

static void watch_ask(struct pollfd *polls, struct stream **streams, size_t n)
{
    if (poll(polls, n, 0) <= 0)
        return;
    for (size_t i = 0; i < n; i++) {
        if (polls[i].revents != 0)
            watch_hit(streams[i], &polls[i]);
    }
}

/*
 * The answers are only marked here and told by the tasks: the list stays as it is, and the scratch ours. A
 * failed stream leaves the list, which is why its successor is fetched first.
 */
static void on_tick(struct deadline *d)
{
    struct stream_room *room = container_of(d, struct stream_room, tick);
    enum { BATCH = LOOP_SCRATCH_BYTES / (sizeof(struct pollfd) + sizeof(struct stream *)) };
    struct stream **streams = (struct stream **)(void *)loop_scratch(room->loop);
    struct pollfd *polls = (struct pollfd *)(void *)(streams + BATCH);
    struct list_node *node = room->watched.head.next;

    while (node != &room->watched.head) {
        size_t n = 0;

        for (; node != &room->watched.head && n < BATCH; node = node->next) {
            streams[n] = container_of(node, struct stream, watched);
            polls[n] = (struct pollfd){.fd = stream_fd(streams[n]), .events = POLLRDHUP};
            n++;
        }
        watch_ask(polls, streams, n);
    }
    if (list_empty(&room->watched))
        return;
    /* Cannot fail: the heap had room for it a moment ago. */
    (void)WARN_ON(!deadline_set(room->loop, d, loop_now_ms(room->loop) + WATCH_MS));
}

/* --- birth ---------------------------------------------------------------------------------------------- */

static void address_put(struct stream *s, const struct sockaddr *a)
{
    char host[INET6_ADDRSTRLEN] = "?";

    if (a->sa_family == AF_INET) {
        const struct sockaddr_in *in = (const void *)a;

        uv_ip4_name(in, host, sizeof(host));
        snprintf(s->address, sizeof(s->address), "%s:%u", host, ntohs(in->sin_port));
    } else {
        const struct sockaddr_in6 *in6 = (const void *)a;

        if (IN6_IS_ADDR_V4MAPPED(&in6->sin6_addr)) {
            uv_inet_ntop(AF_INET, &in6->sin6_addr.s6_addr[12], host, sizeof(host));
            snprintf(s->address, sizeof(s->address), "%s:%u", host, ntohs(in6->sin6_port));
        } else {
            uv_ip6_name(in6, host, sizeof(host));
            snprintf(s->address, sizeof(s->address), "[%s]:%u", host, ntohs(in6->sin6_port));
        }
    }
}

const char *stream_address(const struct stream *s)
{
    return s->address;
}

bool stream_is_tls(const struct stream *s)
{
    return s->tls != NULL;
}

bool stream_tls_resumed(const struct stream *s)
{
    return s->tls != NULL && tls_ready(s->tls) && tls_resumed(s->tls);
}

void stream_socket_options(int fd)
{
    int on = 1, idle = KEEPALIVE_IDLE_S, interval = KEEPALIVE_INTERVAL_S, probes = KEEPALIVE_PROBES;
    unsigned user_timeout = USER_TIMEOUT_MS;

    /* Each is a wish: a kernel that refuses one still gives a working stream. */
    (void)setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
    (void)setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof(on));
    (void)setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &idle, sizeof(idle));
    (void)setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &interval, sizeof(interval));
    (void)setsockopt(fd, IPPROTO_TCP, TCP_KEEPCNT, &probes, sizeof(probes));
    (void)setsockopt(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &user_timeout, sizeof(user_timeout));
}

/* The struct alone; its uv handle is not initialised. */
static struct stream *stream_new(struct loop *l, const struct stream_ops *ops, void *owner)
{
    struct stream_room *room = room_get(l);
    struct stream *s = room == NULL ? NULL : mem_zalloc(sizeof(*s));

    if (s == NULL)
        return NULL;
    s->loop = l;
    s->ops = ops;
    s->owner = owner;
    task_init(&s->task, on_task);
    room->live++;
    return s;
}

/* Undoes stream_new where no uv handle was initialised. */
static void stream_unmake(struct stream *s)
{
    room_of(s->loop)->live--;
    tls_free(s->tls);
    mem_free(s->job);
    mem_free(s);
}

static void on_connected(uv_connect_t *c, int status)
{
    struct stream *s = c->data;

    job_done(s);
    if (status == UV_ECANCELED)
        return; /* closed; it may be gone */
    if (s->state != STREAM_DIALING)
        return;
    if (status < 0) {
        stream_break(s, status, NULL);
        return;
    }
    if (s->tls == NULL) {
        stream_opened(s);
        return;
    }
    s->state = STREAM_HANDSHAKING;
    stream_update(s);
    if (tls_start(s->tls, &s->out) != TLS_OK)
        stream_break(s, STREAM_ERROR_TLS, tls_error(s->tls));
    else
        stream_flush(s);
}

struct stream *stream_dial(struct loop *l, const struct sockaddr *address, struct tls_context *tls,
                           const char *server_name, struct tls_sessions *sessions,
                           const struct stream_ops *ops, void *owner)
{
    struct stream *s = stream_new(l, ops, owner);
    int rc;

    if (s == NULL)
        return NULL;
    s->job = mem_alloc(sizeof(*s->job));
    if (tls != NULL)
        s->tls = tls_new_client(tls, server_name, sessions);
    if (s->job == NULL || (tls != NULL && s->tls == NULL))
        goto no_memory;
    address_put(s, address);
    rc = uv_tcp_init_ex(loop_uv(l), &s->uv.tcp, address->sa_family);
    if (rc != 0) {
        /*
         * No descriptor: the handle without a socket always comes to be, and lets the error go its usual
         * way.
         */
        BUG_ON(uv_tcp_init(loop_uv(l), &s->uv.tcp) != 0);
    } else {
        stream_socket_options(stream_fd(s));
    }
    s->uv.handle.data = s;
    s->state = STREAM_DIALING;
    s->job->connect.data = s;
    if (rc == 0)
        rc = uv_tcp_connect(&s->job->connect, &s->uv.tcp, address, on_connected);
    if (rc != 0) {
        job_done(s);
        stream_break(s, rc, NULL);
    }
    return s;

no_memory:
    stream_unmake(s);
    return NULL;
}

struct stream *stream_dial_unix(struct loop *l, const char *path, const struct stream_ops *ops, void *owner)
{
    struct stream *s = stream_new(l, ops, owner);

    if (s == NULL)
        return NULL;
    s->job = mem_alloc(sizeof(*s->job));
    if (s->job == NULL) {
        stream_unmake(s);
        return NULL;
    }
    snprintf(s->address, sizeof(s->address), "unix");
    BUG_ON(uv_pipe_init(loop_uv(l), &s->uv.pipe, 0) != 0);
    s->uv.handle.data = s;
    s->state = STREAM_DIALING;
    s->job->connect.data = s;
    uv_pipe_connect(&s->job->connect, &s->uv.pipe, path, on_connected); /* errors come by the callback */
    return s;
}

struct stream *stream_from_socket(struct loop *l, int fd, const struct sockaddr *from,
                                  struct tls_context *tls)
{
    struct stream *s = stream_new(l, NULL, NULL);

    if (s == NULL)
        goto no_stream;
    if (tls != NULL && (s->tls = tls_new_server(tls)) == NULL)
        goto no_tls;
    BUG_ON(uv_tcp_init(loop_uv(l), &s->uv.tcp) != 0);
    s->uv.handle.data = s;
    address_put(s, from);
    s->state = tls == NULL ? STREAM_OPEN : STREAM_HANDSHAKING;
    if (uv_tcp_open(&s->uv.tcp, fd) == 0)
        return s;
    stream_destroy(s, false);
    close(fd);
    return NULL;

no_tls:
    stream_unmake(s);
no_stream:
    close(fd);
    return NULL;
}

void stream_adopt(struct stream *s, const struct stream_ops *ops, void *owner)
{
    s->ops = ops;
    s->owner = owner;
    stream_update(s);
}

/* --- end ------------------------------------------------------------------------------------------------ */

static void on_closed(uv_handle_t *h)
{
    struct stream *s = h->data;

    s->uv_closed = true;
    maybe_free(s);
}

static void stream_destroy(struct stream *s, bool reset)
{
    struct linger linger = {.l_onoff = 1, .l_linger = 0};

    BUG_ON(closed(s));
    s->owner = NULL;
    s->state = STREAM_CLOSED;
    stream_update(s);
    task_cancel(s->loop, &s->task);
    if (s->linger != NULL) {
        deadline_cancel(s->loop, &s->linger->deadline);
        mem_free(s->linger);
        s->linger = NULL;
    }
    if (reset && is_tcp(s))
        (void)setsockopt(stream_fd(s), SOL_SOCKET, SO_LINGER, &linger, sizeof(linger));
    uv_close(&s->uv.handle, on_closed);
}

void stream_close(struct stream *s)
{
    if (s->tls != NULL && s->state == STREAM_OPEN && s->out.bytes == 0 && !s->shut_asked) {
        tls_put_close(s->tls, &s->out);
        send_what_fits(s);
    }
    stream_destroy(s, false);
}

void stream_reset(struct stream *s)
{
    stream_destroy(s, true);
}

static void on_lingered(struct deadline *d)
{
    stream_destroy(container_of(d, struct stream_linger, deadline)->stream, false);
}

static void linger_step(struct stream *s)
{
    if (s->state == STREAM_LINGERING && s->shut_done && s->eof)
        stream_destroy(s, false);
}

void stream_close_gently(struct stream *s, uint64_t max_bytes, uint64_t max_ms)
{
    stream_shutdown(s);
    if (s->state == STREAM_OPEN && (!s->shut_done || !s->eof)) {
        s->linger = mem_alloc(sizeof(*s->linger));
        if (s->linger != NULL) {
            *s->linger = (struct stream_linger){.stream = s, .bytes_left = max_bytes};
            deadline_init(&s->linger->deadline, on_lingered);
        }
    }
    if (s->linger == NULL || !deadline_set(s->loop, &s->linger->deadline, loop_now_ms(s->loop) + max_ms)) {
        stream_destroy(s, false);
        return;
    }
    s->owner = NULL;
    s->state = STREAM_LINGERING;
    stream_update(s);
}

size_t stream_live(const struct loop *l)
{
    const struct stream_room *room = room_of(l);

    return room == NULL ? 0 : room->live;
}
