/*
 * worker.c - a serving thread.
 */
#include "worker.h"

#include "call.h"
#include "log.h"
#include "mem.h"
#include "metrics.h"

#include <pthread.h>

#define TICK_MS 200 /* gauges and log lines are at most this old */
#define DRAIN_LOOK_MS 20
#define GRACE_MS                                                                                             \
    40 /* two looks: a request that lay in an idle client's socket is answered, not reset (cases H151) */
#define FAREWELL_MS 1000   /* for the last releases to reach Redis; after that they expire by themselves */
#define LAST_BYTES_MS 6000 /* for last responses to reach their clients: longer than a connection lingers */
#define HURRIED_MS 250     /* instead of it, when asked a second time */

/* How a worker comes to its end. Each stage has a time at which the next one begins at the latest. */
enum worker_stage {
    WORKER_SERVING,
    WORKER_NOTICE, /* min_drain: still accepting, each response closes its connection, so that balancers notice */
    WORKER_GRACE,  /* no longer accepting; what was under way is answered */
    WORKER_ENDING, /* calls end by themselves, at drain_timeout all of them; then releases are delivered */
    WORKER_LAST_BYTES, /* nothing is owed to Redis any more; connections take their last bytes */
};

/* One `listen` of the configuration on this loop. */
struct entry {
    struct call_entry call; /* arg of the group */
    struct client_group group;
    /* NULL: not in the present configuration any more; its clients live on */
    struct stream_listener *listener;
    char *address;
    struct worker *worker;
};

struct worker {
    struct loop *loop;
    pthread_t thread;
    struct service *service;
    struct service_shared *shared;
    struct leases *leases;
    struct admit *admit;
    struct list calls;
    struct entry **entries;
    size_t n_entries;
    struct deadline tick;
    struct deadline drain;
    enum worker_stage stage;
    uint64_t stage_due_ms; /* when the next stage begins at the latest; ENDING: when calls are ended */
    uint64_t
        farewell_due_ms; /* ENDING, once no call is left: when releases are waited for no longer; 0: calls are left */
    bool hurried; /* asked a second time */
    uint64_t refused_last_s, refused_held_back;
    unsigned index;
    /* read by other threads */
    const char *trouble_;
    size_t calls_;
    bool done_;
};

/* --- clients --------------------------------------------------------------------------------------------------- */

static size_t count_clients(const struct worker *w)
{
    size_t n = 0;

    for (size_t i = 0; i < w->n_entries; i++)
        n += w->entries[i]->group.clients.length;
    return n;
}

static void on_accept(void *arg, struct stream *s)
{
    struct entry *e = arg;
    struct worker *w = e->worker;
    uint64_t suppressed;

    if (count_clients(w) < w->service->config->max_connections) {
        client_begin(&e->group, s);
        return;
    }
    stream_close(s);
    if (log_may_repeat(&w->refused_last_s, &w->refused_held_back, &suppressed))
        log_event(LOG_WARN, "clients",
                  "max_connections (%u) reached: connection closed; %llu more since the last line",
                  w->service->config->max_connections, (unsigned long long)suppressed);
}

static void apply_settings(struct client_group *g, const struct config *c)
{
    g->settings = (struct client_settings){
        .head_max_bytes = c->head_max_bytes,
        .handshake_timeout_ms = c->handshake_timeout_ms,
        .header_timeout_ms = c->header_timeout_ms,
        .keepalive_timeout_ms = c->keepalive_timeout_ms,
        .write_timeout_ms = c->write_timeout_ms,
    };
}

static struct entry *entry_new(struct worker *w, const struct snapshot *s, size_t i, uint16_t *port,
                               struct buf *why)
{
    const struct config_listen *listen = &s->config->listens[i];
    struct entry *e = mem_zalloc(sizeof(*e));

    if (e == NULL)
        return NULL;
    e->address = mem_strndup(listen->address.text, strlen(listen->address.text));
    if (e->address == NULL) {
        mem_free(e);
        return NULL;
    }
    e->worker = w;
    e->call = (struct call_entry){.service = &w->service, .half_close = listen->half_close};
    client_group_init(&e->group, w->loop, &call_client_ops, &e->call);
    apply_settings(&e->group, s->config);
    e->listener = stream_listen(w->loop, listen->address.host, *port != 0 ? *port : listen->address.port,
                                s->listen_tls[i], on_accept, e, why);
    if (e->listener == NULL) {
        mem_free(e->address);
        mem_free(e);
        return NULL;
    }
    *port = stream_listener_port(e->listener);
    return e;
}

/* Room first: a listener that is open has its place in the list. */
static bool add_entry(struct worker *w, const struct snapshot *s, size_t i, uint16_t *port, struct buf *why)
{
    struct entry **grown = mem_realloc(w->entries, (w->n_entries + 1) * sizeof(struct entry *)), *e;

    if (grown == NULL)
        return false;
    w->entries = grown;
    e = entry_new(w, s, i, port, why);
    if (e == NULL)
        return false;
    w->entries[w->n_entries++] = e;
    return true;
}

static struct entry *find_entry(struct worker *w, const char *address)
{
    for (size_t i = 0; i < w->n_entries; i++)
        if (w->entries[i]->listener != NULL && strcmp(w->entries[i]->address, address) == 0)
            return w->entries[i];
    return NULL;
}

/* No further clients, and no further requests of those that are there. */
static void entry_stop(struct entry *e)
{
    if (e->listener != NULL)
        stream_listener_close(e->listener);
    e->listener = NULL;
    e->group.closing = true;
}

static void entry_close(struct entry *e)
{
    entry_stop(e);
    client_group_close(&e->group);
}

/* --- gauges ------------------------------------------------------------------------------------------------------ */

static void publish_lease_counts(const struct worker *w)
{
    const struct leases_counters *l = leases_counters(w->leases);
    const struct redis_counters *r = leases_redis_counters(w->leases);

    metrics_total(METRICS_LEASES_GRANTED, l->granted);
    metrics_total(METRICS_LEASES_RELEASED, l->released);
    metrics_total(METRICS_LEASES_RESTORED, l->restored);
    metrics_total(METRICS_LEASES_OVER, l->over);
    metrics_total(METRICS_LEASES_LOST, l->lost);
    metrics_total(METRICS_LEASES_UNKNOWN, l->unknown);
    metrics_total(METRICS_REDIS_COMMANDS, r->commands);
    metrics_total(METRICS_REDIS_FAILURES, r->breaks);
    metrics_set(METRICS_GAUGE_LEASES_HELD, (int64_t)leases_held(w->leases));
    metrics_set(METRICS_GAUGE_RELEASES_OWED, (int64_t)leases_owed(w->leases));
    metrics_set(METRICS_GAUGE_REDIS_UP, leases_usable(w->leases));
}

static void on_tick(struct deadline *d)
{
    struct worker *w = container_of(d, struct worker, tick);
    const char *trouble = leases_trouble(w->leases);

    metrics_set(METRICS_GAUGE_CLIENTS, (int64_t)count_clients(w));
    metrics_set(METRICS_GAUGE_CALLS, (int64_t)w->calls.length);
    publish_lease_counts(w);
    metrics_set(METRICS_GAUGE_POOL_IDLE, (int64_t)service_idle_connections(w->service));
    metrics_set(METRICS_GAUGE_STREAMS, (int64_t)stream_live(w->loop));
    if (w->index == 0) { /* of the process, so told once */
        metrics_set(METRICS_GAUGE_BODY_MEMORY, (int64_t)service_body_memory(w->shared));
        metrics_total(METRICS_LOG_LINES_DROPPED, log_lines_dropped());
    }
    metrics_total(METRICS_ACCEPT_FAILURES, stream_accept_failures(w->loop));
    metrics_observe_us(METRICS_HISTOGRAM_LOOP_TURN, loop_take_longest_turn_us(w->loop));
    __atomic_store_n(&w->trouble_, trouble, __ATOMIC_RELEASE);
    __atomic_store_n(&w->calls_, w->calls.length, __ATOMIC_RELAXED);
    log_flush();
    if (!deadline_set(w->loop, &w->tick, loop_now_ms(w->loop) + TICK_MS))
        WARN_ON(true);
}

/* --- birth -------------------------------------------------------------------------------------------------------- */

struct worker *worker_new(unsigned index, struct snapshot *s, struct service_shared *shared, uint16_t *ports,
                          struct buf *why)
{
    struct worker *w = mem_must_zalloc(sizeof(*w));
    const struct config *c = s->config;
    char instance[40];
    size_t n = strlen(shared->instance);

    memcpy(instance, shared->instance, n);
    instance[n++] = '.';
    n += str_put_u64(instance + n, index);
    instance[n] = '\0';
    w->index = index;
    w->shared = shared;
    w->loop = loop_new(index);
    w->trouble_ = "starting";
    list_init(&w->calls);
    w->leases = leases_new(w->loop, s->config, &c->redis[0], s->redis_tls[0], instance);
    w->admit = admit_new(w->loop, &c->redis[0], w->leases);
    w->service = service_new(w->loop, s, w->admit, &w->calls, shared);
    BUG_ON(w->leases == NULL || w->service == NULL); /* at boot only: no memory, no gateway */
    for (size_t i = 0; i < c->n_listens; i++)
        if (!add_entry(w, s, i, &ports[i], why))
            return NULL; /* the process ends with *why */
    return w;
}

static void *worker_main(void *arg)
{
    struct worker *w = arg;

    metrics_thread_begin();
    on_tick(&w->tick);
    loop_run(w->loop);
    metrics_thread_end();
    log_thread_end();
    __atomic_store_n(&w->done_, true, __ATOMIC_RELEASE);
    return NULL;
}

static void on_drain(struct deadline *d);

void worker_start(struct worker *w)
{
    deadline_init(&w->tick, on_tick);
    deadline_init(&w->drain, on_drain);
    BUG_ON(pthread_create(&w->thread, NULL, worker_main, w) != 0);
}

/* --- reload --------------------------------------------------------------------------------------------------------- */

struct reload {
    struct worker *worker;
    struct snapshot *snapshot;
};

/* Listeners that stay get the new settings; new ones are opened, missing ones closed. */
static void reload_listeners(struct worker *w, const struct snapshot *s)
{
    const struct config *c = s->config;
    struct buf why = {0};

    for (size_t i = 0; i < w->n_entries; i++) {
        struct entry *e = w->entries[i];
        bool still = false;

        for (size_t k = 0; k < c->n_listens; k++)
            still |= strcmp(c->listens[k].address.text, e->address) == 0;
        if (!still && e->listener != NULL)
            entry_close(e);
    }
    for (size_t i = 0; i < c->n_listens; i++) {
        struct entry *e = find_entry(w, c->listens[i].address.text);
        uint16_t port = 0;

        if (e != NULL) {
            stream_listener_set_tls(e->listener, s->listen_tls[i]);
            e->call.half_close = c->listens[i].half_close;
            apply_settings(&e->group, c);
            continue;
        }
        if (!add_entry(w, s, i, &port, &why))
            log_event(LOG_ERROR, "reload", "cannot listen on %s: %.*s", c->listens[i].address.text,
                      (int)why.n, why.p);
        why.n = 0;
    }
    buf_free(&why);
}

static void reload_here(struct loop *l, void *arg)
{
    struct reload *r = arg;
    struct worker *w = r->worker;
    struct service *fresh = w->stage != WORKER_SERVING
                                ? NULL
                                : service_new(l, r->snapshot, w->admit, &w->calls, w->shared);

    if (fresh != NULL) {
        service_retire(w->service);
        service_unref(w->service);
        w->service = fresh;
        leases_reconfigure(w->leases, r->snapshot->config);
        leases_set_redis(w->leases, r->snapshot->config, &r->snapshot->config->redis[0],
                         r->snapshot->redis_tls[0]);
        admit_reconfigure(w->admit, &r->snapshot->config->redis[0]);
        reload_listeners(w, r->snapshot);
    } else if (w->stage == WORKER_SERVING) {
        log_event(LOG_ERROR, "reload", "out of memory: the old configuration stays in force in thread %u",
                  w->index);
    }
    snapshot_unref(r->snapshot);
    mem_free(r);
}

bool worker_reload(struct worker *w, struct snapshot *s)
{
    struct reload *r = mem_alloc(sizeof(*r));

    if (r == NULL)
        return false;
    *r = (struct reload){w, snapshot_ref(s)};
    if (loop_post(w->loop, reload_here, r))
        return true;
    snapshot_unref(s);
    mem_free(r);
    return false;
}

/* --- drain ------------------------------------------------------------------------------------------------------------ */

static void enter_stage(struct worker *w, enum worker_stage stage, uint64_t lasts_ms)
{
    w->stage = stage;
    w->stage_due_ms = loop_now_ms(w->loop) + (w->hurried ? size_min(lasts_ms, HURRIED_MS) : lasts_ms);
}

static void stop_accepting(struct worker *w)
{
    w->service->draining = true;
    for (size_t i = 0; i < w->n_entries; i++)
        entry_stop(w->entries[i]);
    enter_stage(w, WORKER_GRACE, GRACE_MS);
}

/* Leases and calls are gone. */
static void part(struct worker *w)
{
    deadline_cancel(w->loop, &w->tick);
    publish_lease_counts(w);
    leases_free(w->leases);
    w->leases = NULL;
    for (size_t i = 0; i < w->n_entries; i++)
        client_group_drop(&w->entries[i]->group);
    service_retire(w->service);
    enter_stage(w, WORKER_LAST_BYTES, LAST_BYTES_MS);
}

static void look_at_the_ending(struct worker *w, uint64_t now_ms)
{
    if (!list_empty(&w->calls) && (w->hurried || now_ms >= w->stage_due_ms))
        call_end_all(&w->calls);
    for (size_t i = 0; i < w->n_entries; i++) /* those that became idle meanwhile */
        client_group_close(&w->entries[i]->group);
    if (!list_empty(&w->calls))
        return;
    if (w->farewell_due_ms == 0)
        w->farewell_due_ms = now_ms + FAREWELL_MS;
    if (leases_quiet(w->leases) || now_ms >= w->farewell_due_ms)
        part(w);
}

/* A look every DRAIN_LOOK_MS: may the next stage begin? At the end of the last one the loop stops. */
static void on_drain(struct deadline *d)
{
    struct worker *w = container_of(d, struct worker, drain);
    uint64_t now_ms = loop_now_ms(w->loop);
    bool over = w->hurried || now_ms >= w->stage_due_ms;

    __atomic_store_n(&w->calls_, w->calls.length, __ATOMIC_RELAXED);
    switch (w->stage) {
    case WORKER_SERVING:
        BUG_ON(true);
        break;
    case WORKER_NOTICE:
        if (over)
            stop_accepting(w);
        break;
    case WORKER_GRACE:
        if (over)
            enter_stage(w, WORKER_ENDING, w->service->config->drain_timeout_ms);
        break;
    case WORKER_ENDING:
        look_at_the_ending(w, now_ms);
        break;
    case WORKER_LAST_BYTES:
        if (stream_live(w->loop) == 0 || now_ms >= w->stage_due_ms) {
            loop_stop(w->loop);
            return;
        }
        break;
    }
    if (!deadline_set(w->loop, &w->drain, now_ms + DRAIN_LOOK_MS))
        loop_stop(w->loop);
}

static void drain_here(struct loop *l UNUSED, void *arg)
{
    struct worker *w = arg;

    if (w->stage == WORKER_SERVING) {
        for (size_t i = 0; i < w->n_entries; i++)
            w->entries[i]->group.closing = true;
        enter_stage(w, WORKER_NOTICE, w->service->config->min_drain_ms);
    } else {
        w->hurried = true;
        w->stage_due_ms = size_min(w->stage_due_ms, loop_now_ms(w->loop) + HURRIED_MS);
    }
    on_drain(&w->drain);
}

void worker_drain(struct worker *w)
{
    if (!loop_post(w->loop, drain_here, w))
        loop_stop(w->loop); /* no memory even for that: leases expire by themselves */
}

void worker_join(struct worker *w)
{
    pthread_join(w->thread, NULL);
    service_unref(w->service);
    admit_free(w->admit);
    loop_free(w->loop); /* its last callbacks may still look at an entry */
    for (size_t i = 0; i < w->n_entries; i++) {
        mem_free(w->entries[i]->address);
        mem_free(w->entries[i]);
    }
    mem_free(w->entries);
    mem_free(w);
}

/* --- for other threads -------------------------------------------------------------------------------------------------- */

const char *worker_trouble(const struct worker *w)
{
    return __atomic_load_n(&w->trouble_, __ATOMIC_ACQUIRE);
}

size_t worker_calls(const struct worker *w)
{
    return __atomic_load_n(&w->calls_, __ATOMIC_RELAXED);
}

bool worker_done(const struct worker *w)
{
    return __atomic_load_n(&w->done_, __ATOMIC_ACQUIRE);
}
