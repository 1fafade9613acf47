/*
 * service.c - pools and budgets of one loop under one snapshot.
 */
#include "service.h"

#include "mem.h"

struct service *service_new(struct loop *l, struct snapshot *s, struct admit *a, struct list *calls,
                            struct service_shared *shared)
{
    struct service *v = mem_zalloc(sizeof(*v));

    if (v == NULL)
        return NULL;
    v->pools = mem_zalloc((s->config->n_upstreams + 1) * sizeof(struct upool *));
    if (v->pools == NULL) {
        mem_free(v);
        return NULL;
    }
    v->loop = l;
    v->snapshot = snapshot_ref(s);
    v->config = s->config;
    v->shared = shared;
    v->admit = a;
    v->references_ = 1;
    v->calls = calls;
    return v;
}

struct service *service_ref(struct service *s)
{
    s->references_++;
    return s;
}

void service_retire(struct service *s)
{
    for (size_t i = 0; i < s->config->n_upstreams; i++) {
        if (s->pools[i] != NULL)
            upool_retire(s->pools[i]);
        s->pools[i] = NULL;
    }
}

void service_unref(struct service *s)
{
    if (--s->references_ > 0)
        return;
    service_retire(s);
    snapshot_unref(s->snapshot);
    mem_free(s->pools);
    mem_free(s);
}

struct upool *service_pool(struct service *s, const struct config_upstream *u)
{
    struct upool **pool = &s->pools[u->index];

    if (*pool == NULL)
        *pool = upool_new(s->loop, s->snapshot->config, u, s->snapshot->upstream_tls[u->index]);
    return *pool;
}

size_t service_idle_connections(const struct service *s)
{
    size_t n = 0;

    for (size_t i = 0; i < s->config->n_upstreams; i++)
        n += s->pools[i] == NULL ? 0 : upool_idle(s->pools[i]);
    return n;
}

bool service_body_take(struct service *s, size_t n)
{
    size_t *total = &s->shared->body_memory_;

    if (__atomic_add_fetch(total, n, __ATOMIC_RELAXED) <= s->config->body_memory_bytes)
        return true;
    service_body_give(s, n);
    return false;
}

void service_body_give(struct service *s, size_t n)
{
    if (n > 0)
        __atomic_sub_fetch(&s->shared->body_memory_, n, __ATOMIC_RELAXED);
}

size_t service_body_memory(const struct service_shared *shared)
{
    return __atomic_load_n(&shared->body_memory_, __ATOMIC_RELAXED);
}
