/*
 * load_slot.c - one connection and the calls on it.
 *
 * A call begins on the connection that the one before left, or on a new one; a planned abort closes the
 * connection like an SDK does (a plain close). Every end of a call goes through call_over, which tells the
 * loop that the slot is free.
 */
#include "load.h"

#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <unistd.h>

enum { ABORT_EARLY_MS = 20 };

static void hang_up(struct slot *s)
{
    if (s->fd >= 0)
        close(s->fd);
    s->fd = -1;
    s->held_n = 0;
}

static void call_over(struct slot *s, bool after_error)
{
    struct load *l = s->load;

    timers_disarm(&l->timers, &s->limit);
    free(s->response.refusal);
    s->response.refusal = NULL;
    s->state = SLOT_IDLE;
    l->in_flight--;
    load_slot_free(s, after_error);
}

static void call_failed(struct slot *s, enum load_error kind)
{
    s->load->results.errors[kind]++;
    hang_up(s);
    call_over(s, true);
}

static void call_aborted(struct slot *s)
{
    if (s->got_byte)
        s->load->results.aborted_late++;
    else
        s->load->results.aborted_early++;
    hang_up(s);
    call_over(s, false);
}

void slot_drop(struct slot *s)
{
    timers_disarm(&s->load->timers, &s->limit);
    timers_disarm(&s->load->timers, &s->pause);
    free(s->response.refusal);
    s->response.refusal = NULL;
    hang_up(s);
    free(s->held);
    s->held = NULL;
    s->state = SLOT_IDLE;
}

static void call_done(struct slot *s)
{
    struct load *l = s->load;
    struct response *r = &s->response;

    l->results.completed++;
    if (!l->stopping)
        l->results.in_window++;
    l->results.status[r->status]++;
    hist_add(&l->results.total, l->now_ns - s->begun_ns);
    if (r->has_wait)
        hist_add(&l->results.wait, r->wait_ms * 1000000u);
    if (r->status == 429)
        response_check_refusal(r, &l->results);
    if (r->close || s->held_n > 0 || s->sent < s->request->head_n + s->request->body_n)
        hang_up(s);
    call_over(s, false);
}

/* Plans how this call ends early, if it does: at a time, or after some events. */
static void plan_limit(struct slot *s)
{
    struct load *l = s->load;
    const struct options *o = &l->options;
    uint64_t due_ns = l->now_ns + o->timeout_ns;

    s->abort_planned = o->abort_rate > 0 && load_uniform(l) < o->abort_rate;
    s->abort_after_events = 0;
    if (s->abort_planned && o->stream && load_uniform(l) < 0.5) {
        s->abort_planned = false; /* by events, not by time */
        s->abort_after_events = 1 + load_random(l) % (o->events > 1 ? (uint64_t)o->events - 1 : 1);
    } else if (s->abort_planned) {
        uint64_t span_ms = o->ttft_ms > 0 ? (uint64_t)o->ttft_ms : ABORT_EARLY_MS;

        due_ns = l->now_ns + (uint64_t)(load_uniform(l) * (double)span_ms * 1e6);
    }
    timers_arm(&l->timers, &s->limit, due_ns);
}

static void dial(struct slot *s)
{
    struct load *l = s->load;
    struct epoll_event ev = {.events = EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET, .data.ptr = s};
    int one = 1;

    s->fd = socket(l->address.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (s->fd < 0) {
        call_failed(s, ERROR_CONNECT);
        return;
    }
    setsockopt(s->fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one));
    s->state = SLOT_CONNECTING;
    if ((connect(s->fd, (struct sockaddr *)&l->address, l->address_n) != 0 && errno != EINPROGRESS) ||
        epoll_ctl(l->epoll_fd, EPOLL_CTL_ADD, s->fd, &ev) != 0)
        call_failed(s, ERROR_CONNECT);
}

static void send_some(struct slot *s)
{
    const struct request *q = s->request;
    size_t total = q->head_n + q->body_n;

    while (s->sent < total) {
        struct iovec iov[2];
        struct msghdr msg = {.msg_iov = iov};
        ssize_t n;

        if (s->sent < q->head_n)
            iov[msg.msg_iovlen++] = (struct iovec){q->head + s->sent, q->head_n - s->sent};
        if (q->body_n > 0) {
            size_t at = s->sent > q->head_n ? s->sent - q->head_n : 0;

            iov[msg.msg_iovlen++] = (struct iovec){(char *)(uintptr_t)(q->body + at), q->body_n - at};
        }
        n = sendmsg(s->fd, &msg, MSG_NOSIGNAL);
        if (n < 0) {
            if (errno == EAGAIN)
                return;
            s->sent = total; /* a response may have come before the break: reading will tell */
            break;
        }
        s->sent += (uint64_t)n;
    }
    if (s->state == SLOT_SENDING)
        s->state = SLOT_WAITING;
}

void slot_begin(struct slot *s, uint64_t due_ns)
{
    struct load *l = s->load;

    l->in_flight++;
    l->results.started++;
    s->request = &l->requests[l->request_count == 1 ? 0 : load_random(l) % l->request_count];
    s->begun_ns = due_ns;
    s->sent = 0;
    s->got_byte = false;
    response_init(&s->response);
    plan_limit(s);
    if (s->fd < 0) {
        dial(s);
        return;
    }
    s->state = SLOT_SENDING;
    send_some(s);
}

static void keep_rest(struct slot *s, struct slice rest)
{
    if (rest.n > 0 && rest.p != s->held) {
        char *p = malloc(rest.n);

        BUG_ON(p == NULL);
        memcpy(p, rest.p, rest.n);
        free(s->held);
        s->held = p;
    }
    s->held_n = rest.n;
}

static void take(struct slot *s, char *p, size_t n)
{
    struct load *l = s->load;
    struct slice in = {p, n};

    l->results.bytes_in += n;
    if (!s->got_byte) {
        s->got_byte = true;
        s->state = SLOT_READING;
        hist_add(&l->results.ttfb, l->now_ns - s->begun_ns);
    }
    if (s->held_n > 0) {
        char *joined = malloc(s->held_n + n);

        BUG_ON(joined == NULL);
        memcpy(joined, s->held, s->held_n);
        memcpy(joined + s->held_n, p, n);
        in = (struct slice){joined, s->held_n + n};
        free(s->held);
        s->held = joined;
    }
    response_take(&s->response, &in, l->now_ns, &l->results);
    keep_rest(s, in);
}

/* The connection has ended while a call was on it. */
static void ended(struct slot *s, bool reset)
{
    if (!reset && response_eof(&s->response)) {
        s->response.close = true;
        call_done(s);
    } else if (s->got_byte) {
        call_failed(s, reset ? ERROR_RESET : ERROR_CUT);
    } else {
        call_failed(s, reset ? ERROR_RESET : ERROR_NO_RESPONSE);
    }
}

/* `closing`: the other side has finished, so read to its end; a short read else means that all is read. */
static void read_some(struct slot *s, bool closing)
{
    struct load *l = s->load;

    while (s->fd >= 0) {
        ssize_t n = recv(s->fd, l->read_buffer, LOAD_READ_SIZE, 0);

        if (n < 0 && errno == EAGAIN)
            return;
        if (s->state == SLOT_IDLE) { /* nothing is due: closed while idle, or bytes that nobody asked for */
            hang_up(s);
            return;
        }
        if (n <= 0) {
            ended(s, n < 0);
            return;
        }
        l->now_ns = clock_ns();
        take(s, l->read_buffer, (size_t)n);
        if (s->response.state == RESPONSE_DONE) {
            call_done(s);
            return;
        }
        if (s->response.state == RESPONSE_BAD) {
            call_failed(s, ERROR_BAD_RESPONSE);
            return;
        }
        if (s->abort_after_events > 0 && s->response.events >= s->abort_after_events) {
            call_aborted(s);
            return;
        }
        if (n < LOAD_READ_SIZE && !closing)
            return;
    }
}

static bool connected(struct slot *s)
{
    int error = 0;
    socklen_t n = sizeof(error);

    if (getsockopt(s->fd, SOL_SOCKET, SO_ERROR, &error, &n) != 0 || error != 0) {
        call_failed(s, ERROR_CONNECT);
        return false;
    }
    s->load->results.connects++;
    s->state = SLOT_SENDING;
    return true;
}

void slot_on_events(struct slot *s, uint32_t events)
{
    if (s->fd < 0)
        return;
    if (s->state == SLOT_CONNECTING && (events & (EPOLLOUT | EPOLLERR | EPOLLHUP)) != 0 && !connected(s))
        return;
    if (s->state == SLOT_SENDING ||
        (s->state == SLOT_READING && s->sent < s->request->head_n + s->request->body_n))
        send_some(s);
    if (events & (EPOLLIN | EPOLLRDHUP | EPOLLHUP | EPOLLERR))
        read_some(s, (events & (EPOLLRDHUP | EPOLLHUP | EPOLLERR)) != 0);
}

void slot_on_limit(struct slot *s)
{
    if (s->state == SLOT_IDLE)
        return;
    if (s->abort_planned)
        call_aborted(s);
    else
        call_failed(s, ERROR_TIMEOUT);
}
