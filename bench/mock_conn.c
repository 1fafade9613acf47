/*
 * mock_conn.c - one connection of mock-llm: bytes in, bytes out, plain or TLS.
 *
 * Owns the descriptor, the SSL, and buffers that exist only while they hold something. Knows HTTP only as
 * "head, then body, then the next head"; what is answered is mock_call.c's business.
 *
 * Descriptors are edge-triggered and registered once for reading, writing and RDHUP: a close is reported
 * whether or not we read. `read_again` remembers that the socket may still hold bytes that we left there.
 */
#include "mock.h"

#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <openssl/err.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

enum { TLS_PIECE = 16384, FILL_PIECE = 64 * 1024, READ_AHEAD = 16 * 1024, CREDIT_TICK_MS = 10 };

#define IO_AGAIN (-1)
#define IO_GONE (-2)

static ssize_t tls_result(SSL *ssl, int n)
{
    int why;

    if (n > 0)
        return n;
    why = SSL_get_error(ssl, n);
    return why == SSL_ERROR_WANT_READ || why == SSL_ERROR_WANT_WRITE ? IO_AGAIN : IO_GONE;
}

static ssize_t io_read(struct conn *c, char *p, size_t n)
{
    ssize_t got;

    if (c->ssl != NULL) {
        ERR_clear_error();
        return tls_result(c->ssl, SSL_read(c->ssl, p, (int)n));
    }
    do
        got = recv(c->fd, p, n, 0);
    while (got < 0 && errno == EINTR);
    if (got > 0)
        return got;
    return got < 0 && errno == EAGAIN ? IO_AGAIN : IO_GONE;
}

static ssize_t io_write(struct conn *c, const char *p, size_t n)
{
    ssize_t put;

    if (c->ssl != NULL) {
        ERR_clear_error();
        return tls_result(c->ssl, SSL_write(c->ssl, p, (int)size_min(n, TLS_PIECE)));
    }
    do
        put = send(c->fd, p, n, MSG_NOSIGNAL);
    while (put < 0 && errno == EINTR);
    if (put >= 0)
        return put;
    return errno == EAGAIN ? IO_AGAIN : IO_GONE;
}

void conn_open(struct loop *l, int fd, bool tls)
{
    struct conn *c = calloc(1, sizeof(*c));
    struct epoll_event ev = {.events = EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET};
    int one = 1;

    BUG_ON(c == NULL);
    c->loop = l;
    c->fd = fd;
    c->timer.kind = TIMER_ANSWER;
    c->read_timer.kind = TIMER_READ;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one)); /* fails on unix sockets, rightly */
    if (tls) {
        c->ssl = SSL_new(l->tls);
        BUG_ON(c->ssl == NULL || SSL_set_fd(c->ssl, fd) != 1);
        SSL_set_accept_state(c->ssl);
    }
    ev.data.ptr = c;
    if (epoll_ctl(l->epoll_fd, EPOLL_CTL_ADD, fd, &ev) != 0) {
        close(fd);
        SSL_free(c->ssl);
        free(c);
        return;
    }
    list_push_back(&l->conns, &c->node);
    stats_conn_opened();
}

void conn_free(struct conn *c)
{
    SSL_free(c->ssl);
    free(c->out);
    free(c->in);
    free(c->tail);
    free(c);
}

void conn_close(struct conn *c, bool reset)
{
    struct linger hard = {1, 0};

    if (c->closed)
        return;
    c->closed = true;
    call_uncount(&c->call);
    echo_free(&c->call);
    loop_disarm(c->loop, &c->timer);
    loop_disarm(c->loop, &c->read_timer);
    if (list_linked(&c->ready_node))
        list_remove(&c->loop->ready, &c->ready_node);
    list_remove(&c->loop->conns, &c->node);
    list_push_back(&c->loop->dead, &c->node);
    stats_conn_closed();
    if (c->fd < 0)
        return;
    if (reset)
        setsockopt(c->fd, SOL_SOCKET, SO_LINGER, &hard, sizeof(hard));
    else if (c->ssl != NULL && SSL_is_init_finished(c->ssl))
        SSL_shutdown(c->ssl);
    close(c->fd);
    c->fd = -1;
}

size_t conn_queued(const struct conn *c)
{
    return c->out_n - c->out_off + (size_t)(c->fill_left > 0) + c->tail_n;
}

static void drop_output(struct conn *c)
{
    free(c->out);
    free(c->tail);
    c->out = c->tail = NULL;
    c->out_n = c->out_off = c->out_cap = c->tail_n = 0;
    c->fill_left = 0;
}

/* Writes what it can; `last`: the final byte of the response is among them. Returns bytes, or IO_GONE. */
static ssize_t write_some(struct conn *c, const char *p, size_t n, bool last)
{
    size_t done = 0;

    while (done < n) {
        size_t piece = c->ssl == NULL ? n - done : size_min(n - done, TLS_PIECE);
        bool final = last && done + piece == n;
        ssize_t put;

        if (final)
            call_uncount(&c->call);
        put = io_write(c, p + done, piece);
        if (final && put != (ssize_t)piece)
            call_recount(&c->call);
        if (put == IO_GONE)
            return IO_GONE;
        if (put == IO_AGAIN)
            break;
        done += (size_t)put;
    }
    return (ssize_t)done;
}

static void reserve_out(struct conn *c, size_t n)
{
    if (c->out_off > 0 && c->out_n + n > c->out_cap) {
        memmove(c->out, c->out + c->out_off, c->out_n - c->out_off);
        c->out_n -= c->out_off;
        c->out_off = 0;
    }
    if (c->out_n + n > c->out_cap) {
        c->out_cap = size_max(c->out_n + n, c->out_cap * 2);
        c->out = realloc(c->out, c->out_cap);
        BUG_ON(c->out == NULL);
    }
}

static void append_out(struct conn *c, const char *p, size_t n)
{
    reserve_out(c, n);
    memcpy(c->out + c->out_n, p, n);
    c->out_n += n;
}

/* `out` is empty: makes the next piece of a large answer, if there is one. */
static void refill(struct conn *c)
{
    c->out_n = c->out_off = 0;
    if (c->fill_left > 0) {
        struct text t;
        size_t n = c->fill_left < FILL_PIECE ? (size_t)c->fill_left : FILL_PIECE;

        reserve_out(c, n);
        t = (struct text){.p = c->out, .cap = n};
        text_fill(&t, n);
        c->out_n = n;
        c->fill_left -= n;
    }
    if (c->fill_left == 0 && c->tail_n > 0) {
        append_out(c, c->tail, c->tail_n);
        free(c->tail);
        c->tail = NULL;
        c->tail_n = 0;
    }
}

/* False: the connection was closed. What remains waits for EPOLLOUT. */
static bool flush(struct conn *c)
{
    for (;;) {
        size_t n;
        ssize_t put;

        if (c->out_off == c->out_n)
            refill(c);
        n = c->out_n - c->out_off;
        if (n == 0)
            break;
        put = write_some(c, c->out + c->out_off, n, c->ending && c->fill_left == 0 && c->tail_n == 0);
        if (put == IO_GONE) {
            conn_gone(c);
            return !c->closed;
        }
        c->out_off += (size_t)put;
        if ((size_t)put < n)
            return true;
    }
    drop_output(c);
    return true;
}

bool conn_send(struct conn *c, const char *p, size_t n)
{
    if (c->call.aborted)
        return true;
    if (conn_queued(c) == 0) {
        ssize_t put = write_some(c, p, n, c->ending);

        if (put == IO_GONE) {
            conn_gone(c);
            return !c->closed;
        }
        p += put;
        n -= (size_t)put;
    }
    if (n > 0)
        append_out(c, p, n);
    return true;
}

bool conn_send_fill(struct conn *c, uint64_t fill, const char *tail, size_t tail_n)
{
    if (c->call.aborted)
        return true;
    BUG_ON(c->tail != NULL || c->fill_left != 0);
    c->fill_left = fill;
    if (tail_n > 0) {
        c->tail = malloc(tail_n);
        BUG_ON(c->tail == NULL);
        memcpy(c->tail, tail, tail_n);
        c->tail_n = tail_n;
    }
    return flush(c);
}

/* The caller has gone, its call works on: the descriptor goes now, the struct when the call ends. */
static void detach(struct conn *c)
{
    drop_output(c);
    c->in_state = IN_STOPPED;
    loop_disarm(c->loop, &c->read_timer);
    close(c->fd);
    c->fd = -1;
}

void conn_gone(struct conn *c)
{
    if (c->closed || c->fd < 0)
        return;
    if (call_gone(c))
        detach(c);
    else
        conn_close(c, false);
}

static void refuse(struct conn *c)
{
    static const char bad[] =
        "HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\ncontent-length: 52\r\n"
        "connection: close\r\n\r\n"
        "{\"error\":{\"message\":\"mock-llm: not a valid request\"}}";

    stats_bad_request();
    if (conn_send(c, bad, sizeof(bad) - 1))
        conn_close(c, false);
}

static void take_head(struct conn *c, struct slice *in)
{
    struct head h;
    enum http_result result;

    if (c->out_state != OUT_IDLE) {
        c->in_state = IN_DONE;
        return;
    }
    memset(&h, 0, sizeof(h));
    call_default_wish(&h.wish);
    result = head_parse(*in, &h);
    if (result == HTTP_MORE)
        return;
    if (result == HTTP_BAD) {
        refuse(c);
        return;
    }
    in->p += h.raw.n;
    in->n -= h.raw.n;
    loop_disarm(c->loop, &c->timer);
    c->in_state = IN_BODY;
    c->ending = false;
    if (!call_begin(c, &h) || c->in_state != IN_BODY)
        return;
    if (c->call.wish.read_bps > 0) {
        c->read_credit = 0;
        loop_arm(c->loop, &c->read_timer, c->loop->now_ns + CREDIT_TICK_MS * 1000000u);
    }
}

static void take_body(struct conn *c, struct slice *in)
{
    struct slice piece;
    enum http_result result = body_next(&c->call.body, in, &piece);

    if (piece.n > 0)
        call_body(c, piece);
    if (result == HTTP_BAD) {
        refuse(c);
    } else if (result == HTTP_OK) {
        loop_disarm(c->loop, &c->read_timer);
        c->in_state = IN_DONE;
        if (!call_body_end(c))
            return;
    }
}

/* Parses as far as the state of the connection allows. */
static void parse(struct conn *c, struct slice *in)
{
    c->parsing = true;
    for (;;) {
        size_t before = in->n;
        enum conn_in state = c->in_state;

        if (state == IN_HEAD && in->n > 0)
            take_head(c, in);
        else if (state == IN_BODY)
            take_body(c, in);
        else if (state == IN_TUNNEL && in->n > 0)
            ws_take(c, in);
        if (c->closed || (in->n == before && c->in_state == state))
            break;
    }
    c->parsing = false;
}

static void keep_rest(struct conn *c, struct slice rest)
{
    if (rest.n > c->in_cap) {
        char *p = malloc(rest.n);

        BUG_ON(p == NULL);
        memcpy(p, rest.p, rest.n);
        free(c->in);
        c->in = p;
        c->in_cap = rest.n;
    } else if (rest.n > 0) {
        memmove(c->in, rest.p, rest.n);
    } else {
        free(c->in);
        c->in = NULL;
        c->in_cap = 0;
    }
    c->in_n = rest.n;
}

static void take_bytes(struct conn *c, const char *p, size_t n)
{
    struct slice in = {p, n};

    if (c->in_n > 0) {
        if (c->in_n + n > c->in_cap) {
            c->in_cap = (c->in_n + n) * 2;
            c->in = realloc(c->in, c->in_cap);
            BUG_ON(c->in == NULL);
        }
        memcpy(c->in + c->in_n, p, n);
        c->in_n += n;
        in = (struct slice){c->in, c->in_n};
    }
    parse(c, &in);
    if (!c->closed)
        keep_rest(c, in);
}

/* How many bytes may be read now. */
static size_t read_quota(const struct conn *c)
{
    switch (c->in_state) {
    case IN_HEAD:
        return MOCK_READ_SIZE;
    case IN_BODY:
        return c->call.wish.read_bps == 0 ? MOCK_READ_SIZE : size_min((size_t)c->read_credit, MOCK_READ_SIZE);
    case IN_DONE:
        return c->in_n < READ_AHEAD ? READ_AHEAD - c->in_n : 0;
    case IN_TUNNEL:
        return conn_queued(c) < MOCK_OUT_HIGH ? MOCK_READ_SIZE : 0;
    case IN_STOPPED:
        break;
    }
    return 0;
}

static void read_some(struct conn *c)
{
    while (!c->closed && c->fd >= 0 && c->read_again) {
        size_t quota = read_quota(c);
        ssize_t got;

        if (quota == 0)
            return;
        got = io_read(c, c->loop->read_buffer, quota);
        if (got == IO_GONE) {
            if (c->in_state == IN_TUNNEL && conn_queued(c) > 0) {
                c->in_state = IN_STOPPED;
                c->call.ws.closing = true; /* when the rest of the echo is out */
            } else {
                conn_gone(c);
            }
            return;
        }
        if (got == IO_AGAIN || (c->ssl == NULL && (size_t)got < quota))
            c->read_again = false;
        if (got == IO_AGAIN)
            return;
        if (c->in_state == IN_BODY && c->call.wish.read_bps > 0)
            c->read_credit -= (uint64_t)got;
        take_bytes(c, c->loop->read_buffer, (size_t)got);
    }
}

void conn_resume(struct conn *c)
{
    if (c->parsing || c->closed)
        return;
    if (c->in_n > 0) {
        struct slice in = {c->in, c->in_n};

        parse(c, &in);
        if (c->closed)
            return;
        keep_rest(c, in);
    }
    read_some(c);
}

/* A tunnel whose other side has finished sending: answer what it sent, then close. */
static void tunnel_ended(struct conn *c)
{
    c->read_again = true;
    read_some(c);
    if (!c->closed && c->in_state == IN_TUNNEL)
        conn_close(c, false);
}

void conn_on_events(struct conn *c)
{
    uint32_t events = c->events;

    c->events = 0;
    if (c->closed || c->fd < 0)
        return;
    if (events & (EPOLLRDHUP | EPOLLHUP | EPOLLERR)) {
        if (c->in_state == IN_TUNNEL && !(events & (EPOLLHUP | EPOLLERR)))
            tunnel_ended(c);
        else
            conn_gone(c);
        return;
    }
    c->read_again |= (events & EPOLLIN) != 0;
    if (conn_queued(c) > 0) {
        if (!flush(c) || c->fd < 0)
            return;
        if (conn_queued(c) == 0)
            call_on_drained(c);
    }
    read_some(c);
}

void conn_on_timer(struct conn *c, int kind)
{
    uint64_t bps = c->call.wish.read_bps;

    if (kind == TIMER_ANSWER) {
        call_on_timer(c);
        return;
    }
    c->read_credit += bps / (1000 / CREDIT_TICK_MS) + 1;
    loop_arm(c->loop, &c->read_timer, c->loop->now_ns + CREDIT_TICK_MS * 1000000u);
    read_some(c);
}
