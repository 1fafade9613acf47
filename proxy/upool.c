/*
 * upool.c - the connections of one upstream on one loop.
 *
 *   wish (udial)   WAITING for its first turn or a name ─► TRYING addresses ─► on_dialed, gone
 *   connection     DIALING (in a wish's attempts) ─► BORROWED ◄─► IDLE (list, freshest first) ─► closed
 *
 * A pool owns its connections in all three lists, its resolver, its TLS sessions, and a reference to the
 * snapshot it was made from. A wish owns its attempts: the first that comes up wins, the others are closed.
 * A wish that was taken back while attempts are under way goes on without its owner, and what comes up
 * becomes an idle connection. Nothing is freed under a caller's feet: connections rest until the end of the
 * turn, a pool that is retired and empty is freed by its task.
 */
#include "upool.h"

#include "mem.h"
#include "resolve.h"

#include <stdio.h>
#include <sys/socket.h>

#define STAGGER_MS 250 /* RFC 8305 section 5: the next address while this one is silent */

enum uconn_state { UCONN_DIALING, UCONN_IDLE, UCONN_BORROWED };

struct uconn {
    struct list_node node; /* of the list that state names; first, as loop_free_later writes over it */
    struct upool *pool;
    struct stream *stream;
    enum uconn_state state;
    bool reused;
    bool ended;                     /* on_end has come: it serves no other call */
    struct udial *dial;             /* DIALING */
    const struct sockaddr *address; /* DIALING: in the dial's answer */
    const struct uconn_ops *ops;    /* BORROWED */
    void *owner;
    uint64_t born_ms, idle_since_ms;
};

struct udial {
    struct list_node node; /* of pool->dials */
    struct upool *pool;
    const struct uconn_ops *ops; /* NULL: taken back */
    void *owner;
    bool fresh_only;
    bool waiting; /* for the answer of the resolver */
    struct task start;
    struct deadline total, stagger;
    struct resolve_answer *answer;
    size_t next; /* address to try */
    struct list attempts;
    enum udial_result failed; /* of the last attempt that failed */
    char detail[200];
};

struct upool {
    struct loop *loop;
    struct config *config;
    const struct config_upstream *conf;
    struct tls_context *tls;
    struct tls_sessions *sessions;
    struct resolve *resolve;
    struct list idle, borrowed, dials;
    struct deadline sweep;
    struct task end;
    bool retired;
};

static const struct stream_ops conn_ops;

static void dial_try(struct udial *d);
static void dial_step(struct udial *d);

/* --- connections ---------------------------------------------------------------------------------------- */

static struct list *conn_list(struct uconn *c)
{
    switch (c->state) {
    case UCONN_IDLE:
        return &c->pool->idle;
    case UCONN_BORROWED:
        return &c->pool->borrowed;
    case UCONN_DIALING:
        break;
    }
    return &c->dial->attempts;
}

static void pool_maybe_end(struct upool *p)
{
    if (p->retired && list_empty(&p->borrowed) && list_empty(&p->dials))
        loop_defer(p->loop, &p->end);
}

static void conn_close(struct uconn *c)
{
    struct upool *p = c->pool;

    list_remove(conn_list(c), &c->node);
    stream_close(c->stream);
    c->stream = NULL;
    loop_free_later(p->loop, c);
    pool_maybe_end(p);
}

static bool conn_too_old(const struct uconn *c, uint64_t now_ms)
{
    const struct config_upstream *u = c->pool->conf;

    return (u->pool_max_age_ms > 0 && now_ms >= c->born_ms + u->pool_max_age_ms) ||
           (c->state == UCONN_IDLE && now_ms >= c->idle_since_ms + u->pool_idle_timeout_ms);
}

/* When an idle connection must go. */
static uint64_t conn_due_ms(const struct uconn *c)
{
    const struct config_upstream *u = c->pool->conf;
    uint64_t idle = c->idle_since_ms + u->pool_idle_timeout_ms, age = c->born_ms + u->pool_max_age_ms;

    return u->pool_max_age_ms > 0 && age < idle ? age : idle;
}

static void conn_lend(struct uconn *c, const struct uconn_ops *ops, void *owner)
{
    list_remove(conn_list(c), &c->node);
    c->state = UCONN_BORROWED;
    c->dial = NULL;
    c->address = NULL;
    c->ops = ops;
    c->owner = owner;
    list_push_back(&c->pool->borrowed, &c->node);
}

/* From the dial or from a borrower into the idle list, or closed where it does not fit. */
static void conn_rest(struct uconn *c)
{
    struct upool *p = c->pool;
    uint64_t now = loop_now_ms(p->loop);

    if (p->retired || c->ended || conn_too_old(c, now) || p->idle.length >= p->conf->pool_idle_max ||
        (c->state == UCONN_BORROWED &&
         stream_queued(c->stream) > 0)) { /* a fresh one has the handshake's end there */
        conn_close(c);
        return;
    }
    list_remove(conn_list(c), &c->node);
    c->state = UCONN_IDLE;
    c->dial = NULL;
    c->address = NULL;
    c->ops = NULL;
    c->owner = NULL;
    c->idle_since_ms = now;
    list_push_front(&p->idle, &c->node);
    pool_maybe_end(p);
    stream_watch(c->stream, false);
    stream_resume(c->stream);
    /* A maximum age that comes before the sweep is seen when the connection would be taken. */
    if (!deadline_armed(&p->sweep) && !deadline_set(p->loop, &p->sweep, conn_due_ms(c)))
        conn_close(c);
}

/* Closes the idle ones that are too old; armed again for the next. */
static void on_sweep(struct deadline *d)
{
    struct upool *p = container_of(d, struct upool, sweep);
    uint64_t now = loop_now_ms(p->loop), next = UINT64_MAX;

    list_for_each_safe (node, &p->idle) {
        struct uconn *c = container_of(node, struct uconn, node);

        if (conn_too_old(c, now))
            conn_close(c);
        else if (conn_due_ms(c) < next)
            next = conn_due_ms(c);
    }
    if (next != UINT64_MAX)
        (void)WARN_ON(!deadline_set(p->loop, d, next)); /* cannot fail: the heap had room a moment ago */
}

static struct uconn *pool_take(struct upool *p, const struct uconn_ops *ops, void *owner)
{
    uint64_t now = loop_now_ms(p->loop);

    while (!list_empty(&p->idle)) {
        struct uconn *c = container_of(list_first(&p->idle), struct uconn, node);

        /* A FIN that came in this very turn would cost the call a 502: one recv(2) tells. */
        if (conn_too_old(c, now) || stream_has_news(c->stream)) {
            conn_close(c);
            continue;
        }
        conn_lend(c, ops, owner);
        c->reused = true;
        return c;
    }
    return NULL;
}

/* --- wishes --------------------------------------------------------------------------------------------- */

static void dial_unhook(struct udial *d)
{
    struct loop *l = d->pool->loop;

    while (!list_empty(&d->attempts))
        conn_close(container_of(list_first(&d->attempts), struct uconn, node));
    task_cancel(l, &d->start);
    deadline_cancel(l, &d->total);
    deadline_cancel(l, &d->stagger);
    resolve_answer_unref(d->answer);
    d->answer = NULL;
    list_remove(&d->pool->dials, &d->node);
    pool_maybe_end(d->pool);
}

static void dial_failed(struct udial *d, enum udial_result how)
{
    dial_unhook(d);
    if (d->ops != NULL)
        d->ops->on_dialed(d->owner, how, NULL, d->detail);
    mem_free(d);
}

static void dial_done(struct udial *d, struct uconn *c)
{
    const struct uconn_ops *ops = d->ops;
    void *owner = d->owner;

    dial_unhook(d);
    mem_free(d);
    ops->on_dialed(owner, UDIAL_OK, c, "");
}

/* An attempt has come up. */
static void dial_won(struct udial *d, struct uconn *c)
{
    c->born_ms = loop_now_ms(d->pool->loop);
    if (c->address != resolve_answer_at(d->answer, 0))
        resolve_prefer(d->pool->resolve, c->address);
    if (d->ops != NULL) {
        conn_lend(c, d->ops, d->owner);
        dial_done(d, c);
    } else {
        conn_rest(c);
        dial_unhook(d);
        mem_free(d);
    }
}

static void dial_attempt_failed(struct udial *d, struct uconn *c, int error, const char *why)
{
    d->failed = error == STREAM_ERROR_TLS ? UDIAL_TLS_FAILED : UDIAL_REFUSED;
    snprintf(d->detail, sizeof(d->detail), "%s: %s", stream_address(c->stream), why);
    conn_close(c);
    dial_try(d);
}

/* One more address, or the end of the wish when none is left and none is under way. */
static void dial_try(struct udial *d)
{
    struct upool *p = d->pool;
    struct uconn *c;

    if (d->next == resolve_answer_n(d->answer) || (d->ops == NULL && d->next > 0)) {
        if (list_empty(&d->attempts))
            dial_failed(d, d->failed);
        return;
    }
    c = mem_zalloc(sizeof(*c));
    if (c == NULL)
        goto no_memory;
    *c = (struct uconn){.pool = p, .dial = d, .state = UCONN_DIALING};
    c->address = resolve_answer_at(d->answer, d->next++);
    c->stream = stream_dial(p->loop, c->address, p->tls, p->conf->host, p->sessions, &conn_ops, c);
    if (c->stream == NULL)
        goto no_memory;
    list_push_back(&d->attempts, &c->node);
    deadline_cancel(p->loop, &d->stagger);
    if (d->next < resolve_answer_n(d->answer) &&
        !deadline_set(p->loop, &d->stagger, loop_now_ms(p->loop) + STAGGER_MS))
        dial_failed(d, UDIAL_NO_MEMORY);
    return;

no_memory:
    mem_free(c);
    dial_failed(d, UDIAL_NO_MEMORY);
}

static void on_stagger(struct deadline *d)
{
    dial_try(container_of(d, struct udial, stagger));
}

static void on_total(struct deadline *deadline)
{
    struct udial *d = container_of(deadline, struct udial, total);
    const struct list_node *n = list_first(&d->attempts);

    snprintf(d->detail, sizeof(d->detail), "%s: no connection within %llu ms",
             n == NULL ? d->pool->conf->host : stream_address(container_of(n, struct uconn, node)->stream),
             (unsigned long long)d->pool->conf->connect_timeout_ms);
    dial_failed(d, UDIAL_TIMEOUT);
}

/* First turn of a wish, and each time the resolver has ended a question for which it waits. */
static void dial_step(struct udial *d)
{
    struct uconn *c = d->fresh_only ? NULL : pool_take(d->pool, d->ops, d->owner);

    if (c != NULL) {
        dial_done(d, c);
        return;
    }
    d->answer = resolve_get(d->pool->resolve);
    d->waiting = d->answer == NULL && resolve_asking(d->pool->resolve);
    if (d->answer != NULL) {
        dial_try(d);
    } else if (!d->waiting) {
        snprintf(d->detail, sizeof(d->detail), "%s: %s", d->pool->conf->host,
                 resolve_error(d->pool->resolve));
        dial_failed(d, UDIAL_RESOLVE_FAILED);
    }
}

static void on_start(struct task *t)
{
    dial_step(container_of(t, struct udial, start));
}

/* on_dialed may make and end other wishes, so each waiting one goes on from a task of its own. */
static void on_resolved(void *owner)
{
    struct upool *p = owner;

    list_for_each_safe (node, &p->dials) {
        struct udial *d = container_of(node, struct udial, node);

        if (d->waiting)
            loop_defer(p->loop, &d->start);
    }
}

struct udial *upool_dial(struct upool *p, bool fresh_only, const struct uconn_ops *ops, void *owner)
{
    struct udial *d = mem_zalloc(sizeof(*d));

    if (d == NULL)
        return NULL;
    *d = (struct udial){
        .pool = p, .ops = ops, .owner = owner, .fresh_only = fresh_only, .failed = UDIAL_REFUSED};
    task_init(&d->start, on_start);
    deadline_init(&d->total, on_total);
    deadline_init(&d->stagger, on_stagger);
    list_init(&d->attempts);
    if (!deadline_set(p->loop, &d->total, loop_now_ms(p->loop) + p->conf->connect_timeout_ms)) {
        mem_free(d);
        return NULL;
    }
    list_push_back(&p->dials, &d->node);
    loop_defer(p->loop, &d->start);
    return d;
}

void udial_cancel(struct udial *d)
{
    d->ops = NULL;
    d->owner = NULL;
    if (!list_empty(&d->attempts))
        return;
    dial_unhook(d);
    mem_free(d);
}

/* --- what the streams say ------------------------------------------------------------------------------- */

static void conn_on_open(void *owner)
{
    struct uconn *c = owner;

    dial_won(c->dial, c);
}

static void conn_on_data(void *owner, char *bytes, size_t n)
{
    struct uconn *c = owner;

    if (c->state == UCONN_BORROWED)
        c->ops->on_data(c->owner, bytes, n);
    else
        conn_close(c); /* nobody asked: not the answer to whatever comes next */
}

static void conn_on_end(void *owner, enum stream_end how)
{
    struct uconn *c = owner;

    c->ended = true;
    if (c->state == UCONN_BORROWED)
        c->ops->on_end(c->owner, how);
    else
        conn_close(c);
}

static void conn_on_drain(void *owner)
{
    struct uconn *c = owner;

    if (c->state == UCONN_BORROWED)
        c->ops->on_drain(c->owner);
}

static void conn_on_error(void *owner, int error, const char *detail)
{
    struct uconn *c = owner;

    c->ended = true;
    if (c->state == UCONN_DIALING)
        dial_attempt_failed(c->dial, c, error, detail);
    else if (c->state == UCONN_BORROWED)
        c->ops->on_error(c->owner, error, detail);
    else
        conn_close(c);
}

static const struct stream_ops conn_ops = {
    .on_open = conn_on_open,
    .on_data = conn_on_data,
    .on_end = conn_on_end,
    .on_drain = conn_on_drain,
    .on_error = conn_on_error,
};

/* --- borrowers ------------------------------------------------------------------------------------------ */

struct uconn *upool_take_idle(struct upool *p, const struct uconn_ops *ops, void *owner)
{
    return pool_take(p, ops, owner);
}

struct stream *uconn_stream(struct uconn *c)
{
    return c->stream;
}

bool uconn_reused(const struct uconn *c)
{
    return c->reused;
}

void uconn_return(struct uconn *c, bool clean)
{
    BUG_ON(c->state != UCONN_BORROWED);
    if (clean)
        conn_rest(c);
    else
        conn_close(c);
}

size_t upool_idle(const struct upool *p)
{
    return p->idle.length;
}

size_t upool_borrowed(const struct upool *p)
{
    return p->borrowed.length;
}

/* --- the pool ------------------------------------------------------------------------------------------- */

static void pool_free(struct upool *p)
{
    if (p->resolve != NULL)
        resolve_free(p->resolve);
    tls_sessions_free(p->sessions);
    if (p->tls != NULL)
        tls_context_unref(p->tls);
    config_unref(p->config);
    mem_free(p);
}

static void on_pool_end(struct task *t)
{
    struct upool *p = container_of(t, struct upool, end);

    if (list_empty(&p->borrowed) && list_empty(&p->dials))
        pool_free(p);
}

struct upool *upool_new(struct loop *l, struct config *c, const struct config_upstream *u,
                        struct tls_context *tls)
{
    struct upool *p = mem_zalloc(sizeof(*p));

    if (p == NULL)
        return NULL;
    p->loop = l;
    p->config = config_ref(c);
    p->conf = u;
    p->tls = tls == NULL ? NULL : tls_context_ref(tls);
    list_init(&p->idle);
    list_init(&p->borrowed);
    list_init(&p->dials);
    deadline_init(&p->sweep, on_sweep);
    task_init(&p->end, on_pool_end);
    p->resolve = resolve_new(l, u->host, u->port, u->resolve_interval_ms, on_resolved, p);
    if (tls != NULL)
        p->sessions = tls_sessions_new();
    if (p->resolve == NULL || (tls != NULL && p->sessions == NULL)) {
        pool_free(p);
        return NULL;
    }
    return p;
}

void upool_retire(struct upool *p)
{
    BUG_ON(p->retired);
    p->retired = true;
    deadline_cancel(p->loop, &p->sweep);
    while (!list_empty(&p->idle))
        conn_close(container_of(list_first(&p->idle), struct uconn, node));
    pool_maybe_end(p);
}
