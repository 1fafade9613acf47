/*
 * mock_loop.c - one epoll loop of mock-llm: events, timers, and the order of a turn.
 *
 * A turn: wait, move all events to the ready list while counting closes at once (so that a call which
 * ended is never counted beside one that began after it), handle the list, run the timers that are due,
 * free what was closed.
 */
#include "mock.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

enum { BATCH = 512 };

void loop_arm(struct loop *l, struct timer *t, uint64_t due_ns)
{
    timers_arm(&l->timers, t, due_ns);
}

void loop_disarm(struct loop *l, struct timer *t)
{
    timers_disarm(&l->timers, t);
}

void loop_init(struct loop *l, SSL_CTX *tls)
{
    memset(l, 0, sizeof(*l));
    list_init(&l->conns);
    list_init(&l->ready);
    list_init(&l->dead);
    l->tls = tls;
    l->listeners[0].fd = l->listeners[1].fd = -1;
    l->epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    l->read_buffer = malloc(MOCK_READ_SIZE);
    l->scratch = malloc(MOCK_SCRATCH_SIZE);
    BUG_ON(l->epoll_fd < 0 || l->read_buffer == NULL || l->scratch == NULL);
    l->now_ns = clock_ns();
}

static void free_dead(struct loop *l)
{
    struct list_node *n;

    while ((n = list_pop_front(&l->dead)) != NULL)
        conn_free(container_of(n, struct conn, node));
}

void loop_free(struct loop *l)
{
    struct list_node *n;

    while ((n = list_first(&l->conns)) != NULL)
        conn_close(container_of(n, struct conn, node), false);
    free_dead(l);
    for (size_t i = 0; i < ARRAY_LEN(l->listeners); i++) {
        if (l->listeners[i].fd >= 0)
            close(l->listeners[i].fd);
    }
    close(l->epoll_fd);
    timers_free(&l->timers);
    free(l->read_buffer);
    free(l->scratch);
}

void loop_listen(struct loop *l, const struct listener *listener)
{
    struct listener *mine = l->listeners[0].fd < 0 ? &l->listeners[0] : &l->listeners[1];
    struct epoll_event ev = {.events = EPOLLIN | EPOLLEXCLUSIVE, .data.ptr = mine};

    *mine = *listener;
    BUG_ON(epoll_ctl(l->epoll_fd, EPOLL_CTL_ADD, mine->fd, &ev) != 0);
}

static void accept_some(struct loop *l, const struct listener *listener)
{
    for (int i = 0; i < 64; i++) {
        int fd = accept4(listener->fd, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);

        if (fd >= 0) {
            conn_open(l, fd, listener->tls);
        } else if (errno != EINTR && errno != ECONNABORTED) {
            if (errno == EMFILE || errno == ENFILE)
                usleep(1000); /* level-triggered: do not spin while there are no descriptors */
            return;
        }
    }
}

/* A tunnel whose other side has only finished sending still gets its echo; anything else has ended. */
static bool closes(const struct conn *c, uint32_t events)
{
    return events & (EPOLLHUP | EPOLLERR) || (events & EPOLLRDHUP && c->in_state != IN_TUNNEL);
}

/* Moves what epoll reports to the ready list; closes are dealt with at once, except of l->current. */
static void gather(struct loop *l, const struct timespec *timeout)
{
    struct epoll_event evs[BATCH];
    int n = epoll_pwait2(l->epoll_fd, evs, BATCH, timeout, NULL);
    unsigned accepting = 0;

    for (int i = 0; i < n; i++) {
        struct conn *c = evs[i].data.ptr;

        BUG_ON(c == NULL);
        if ((void *)c == &l->listeners[0] || (void *)c == &l->listeners[1]) {
            accepting |= (void *)c == &l->listeners[0] ? 1u : 2u;
        } else if (closes(c, evs[i].events) && c != l->current) {
            conn_gone(c);
        } else {
            c->events |= evs[i].events;
            if (!list_linked(&c->ready_node))
                list_push_back(&l->ready, &c->ready_node);
        }
    }
    for (unsigned i = 0; i < 2; i++) {
        if (accepting & 1u << i)
            accept_some(l, &l->listeners[i]);
    }
}

void loop_settle(struct loop *l)
{
    static const struct timespec now = {0, 0};

    gather(l, &now);
}

static void run_ready(struct loop *l)
{
    struct list_node *n;

    while ((n = list_pop_front(&l->ready)) != NULL) {
        l->current = container_of(n, struct conn, ready_node);
        conn_on_events(l->current);
    }
    l->current = NULL;
}

static void run_timers(struct loop *l)
{
    uint64_t now_ns = l->now_ns;
    struct timer *t;

    while ((t = timers_take_due(&l->timers, now_ns)) != NULL) {
        l->current = t->kind == TIMER_READ ? container_of(t, struct conn, read_timer)
                                           : container_of(t, struct conn, timer);
        conn_on_timer(l->current, t->kind);
    }
    l->current = NULL;
}

void loop_run(struct loop *l, const atomic_int *stop)
{
    while (!*stop) {
        uint64_t now_ns = l->timers.n > 0 ? clock_ns() : 0;
        struct timespec timeout = {0, (long)timers_wait_ns(&l->timers, now_ns, 500000000u)};

        gather(l, &timeout);
        l->now_ns = clock_ns();
        run_ready(l);
        run_timers(l);
        free_dead(l);
    }
}
