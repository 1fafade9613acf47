/*
 * mock_stats.c - the counters of mock-llm: the truth that tests hold against the limit. mock.h has the
 * three rules. They are atomics, shared by all threads, and exact; only the order in which two threads see
 * a close and a beginning is theirs.
 */
#include "mock.h"

#include <pthread.h>

struct group {
    char name[MOCK_MODEL_MAX];
    atomic_llong in_flight, max_in_flight;
    atomic_ullong total;
};

/* The counters of the process, shared by its threads. */
static struct {
    atomic_llong in_flight, max_in_flight, connections;
    atomic_ullong total, completed, aborted, connections_total, bytes_after_abort, events_after_abort;
    atomic_ullong over_cap, bad_requests, next_id, cap;
} stats;

static struct group groups[MOCK_GROUPS];
static atomic_uint group_count;
static pthread_mutex_t group_lock = PTHREAD_MUTEX_INITIALIZER;

void stats_conn_opened(void)
{
    atomic_fetch_add(&stats.connections, 1);
    atomic_fetch_add(&stats.connections_total, 1);
}

void stats_conn_closed(void)
{
    atomic_fetch_sub(&stats.connections, 1);
}

void stats_bad_request(void)
{
    atomic_fetch_add(&stats.bad_requests, 1);
}

void stats_cap(uint64_t cap)
{
    atomic_store(&stats.cap, cap);
}

uint64_t stats_next_id(void)
{
    return atomic_fetch_add(&stats.next_id, 1) + 1;
}

void stats_completed(void)
{
    atomic_fetch_add(&stats.completed, 1);
}

void stats_aborted(void)
{
    atomic_fetch_add(&stats.aborted, 1);
}

void stats_after_abort(uint64_t events, uint64_t bytes)
{
    atomic_fetch_add(&stats.events_after_abort, events);
    atomic_fetch_add(&stats.bytes_after_abort, bytes);
}

static void raise_max(atomic_llong *max, long long n)
{
    long long seen = atomic_load(max);

    while (n > seen && !atomic_compare_exchange_weak(max, &seen, n))
        ;
}

struct group *stats_group(struct slice name)
{
    struct group *found = NULL;

    if (name.n == 0 || name.n >= sizeof(groups[0].name))
        return NULL;
    pthread_mutex_lock(&group_lock);
    for (unsigned i = 0; i < group_count && found == NULL; i++) {
        if (slice_eq(slice_of(groups[i].name), name))
            found = &groups[i];
    }
    if (found == NULL && group_count < MOCK_GROUPS) {
        found = &groups[group_count];
        memcpy(found->name, name.p, name.n);
        group_count++;
    }
    pthread_mutex_unlock(&group_lock);
    return found;
}

/* A new maximum, or a full cap, is believed only after loop_settle. */
void stats_call_begin(struct conn *c)
{
    struct call *call = &c->call;
    struct group *g = call->group;
    unsigned long long cap = atomic_load(&stats.cap);
    long long n = atomic_fetch_add(&stats.in_flight, 1) + 1;
    long long group_n = g == NULL ? 0 : atomic_fetch_add(&g->in_flight, 1) + 1;

    call->counted = true;
    atomic_fetch_add(&stats.total, 1);
    if (g != NULL)
        atomic_fetch_add(&g->total, 1);
    if (n > atomic_load(&stats.max_in_flight) || (cap != 0 && (unsigned long long)n > cap) ||
        (g != NULL && group_n > atomic_load(&g->max_in_flight))) {
        loop_settle(c->loop);
        n = atomic_load(&stats.in_flight);
        raise_max(&stats.max_in_flight, n);
        if (g != NULL)
            raise_max(&g->max_in_flight, atomic_load(&g->in_flight));
    }
    call->over_cap = cap != 0 && n > 0 && (unsigned long long)n > cap;
    if (call->over_cap)
        atomic_fetch_add(&stats.over_cap, 1);
}

void call_uncount(struct call *call)
{
    if (!call->counted)
        return;
    call->counted = false;
    atomic_fetch_sub(&stats.in_flight, 1);
    if (call->group != NULL)
        atomic_fetch_sub(&call->group->in_flight, 1);
}

/* The last byte did not get out after all. */
void call_recount(struct call *call)
{
    if (call->counted || call->api >= API_STATS)
        return;
    call->counted = true;
    raise_max(&stats.max_in_flight, atomic_fetch_add(&stats.in_flight, 1) + 1);
    if (call->group != NULL)
        raise_max(&call->group->max_in_flight, atomic_fetch_add(&call->group->in_flight, 1) + 1);
}

void stats_put(struct text *t)
{
    text_fmt(t,
             "{\"in_flight\":%lld,\"max_in_flight\":%lld,\"total\":%llu,\"completed\":%llu,\"aborted\":%llu,"
             "\"connections\":%lld,\"connections_total\":%llu,\"bytes_after_abort\":%llu,\"events_after_"
             "abort\":%llu,"
             "\"over_cap\":%llu,\"bad_requests\":%llu,\"groups\":{",
             atomic_load(&stats.in_flight), atomic_load(&stats.max_in_flight), atomic_load(&stats.total),
             atomic_load(&stats.completed), atomic_load(&stats.aborted), atomic_load(&stats.connections),
             atomic_load(&stats.connections_total), atomic_load(&stats.bytes_after_abort),
             atomic_load(&stats.events_after_abort), atomic_load(&stats.over_cap),
             atomic_load(&stats.bad_requests));
    for (unsigned i = 0; i < group_count; i++) {
        struct group *g = &groups[i];

        text_str(t, i == 0 ? "\"" : ",\"");
        text_json(t, slice_of(g->name));
        text_fmt(t, "\":{\"in_flight\":%lld,\"max_in_flight\":%lld,\"total\":%llu}",
                 atomic_load(&g->in_flight), atomic_load(&g->max_in_flight), atomic_load(&g->total));
    }
    text_lit(t, "}}\n");
}

void stats_reset(void)
{
    atomic_store(&stats.max_in_flight, atomic_load(&stats.in_flight));
    atomic_store(&stats.total, 0);
    atomic_store(&stats.completed, 0);
    atomic_store(&stats.aborted, 0);
    atomic_store(&stats.connections_total, (unsigned long long)atomic_load(&stats.connections));
    atomic_store(&stats.bytes_after_abort, 0);
    atomic_store(&stats.events_after_abort, 0);
    atomic_store(&stats.over_cap, 0);
    atomic_store(&stats.bad_requests, 0);
    for (unsigned i = 0; i < group_count; i++) {
        atomic_store(&groups[i].max_in_flight, atomic_load(&groups[i].in_flight));
        atomic_store(&groups[i].total, 0);
    }
}
