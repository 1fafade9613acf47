/*
 * snapshot.c - makes TLS contexts and metric rows for a configuration.
 */
#include "snapshot.h"

#include "mem.h"
#include "metrics.h"

static void snapshot_free(struct snapshot *s)
{
    struct config *c = s->config;

    for (size_t i = 0; s->listen_tls != NULL && i < c->n_listens; i++)
        tls_context_unref(s->listen_tls[i]);
    for (size_t i = 0; s->upstream_tls != NULL && i < c->n_upstreams; i++)
        tls_context_unref(s->upstream_tls[i]);
    for (size_t i = 0; s->redis_tls != NULL && i < c->n_redis; i++)
        tls_context_unref(s->redis_tls[i]);
    mem_free(s->listen_tls);
    mem_free(s->upstream_tls);
    mem_free(s->redis_tls);
    mem_free(s->limit_rows);
    config_unref(c);
    mem_free(s);
}

/* An array of n pointers; one at least, so that NULL always means "no memory". */
static void *array_of(size_t n, size_t size)
{
    return mem_zalloc((n == 0 ? 1 : n) * size);
}

static bool make_tls(struct snapshot *s, struct buf *why)
{
    struct config *c = s->config;

    for (size_t i = 0; i < c->n_listens; i++) {
        const struct config_tls *t = &c->listens[i].tls;

        if (t->cert[0] == '\0')
            continue;
        s->listen_tls[i] = tls_context_server(t->cert, t->key, t->ca, why);
        if (s->listen_tls[i] == NULL)
            return false;
    }
    for (size_t i = 0; i < c->n_upstreams; i++) {
        const struct config_tls *t = &c->upstreams[i].tls;

        if (!c->upstreams[i].use_tls)
            continue;
        s->upstream_tls[i] = tls_context_client(t->ca, t->cert, t->key, t->verify, true, why);
        if (s->upstream_tls[i] == NULL)
            return false;
    }
    for (size_t i = 0; i < c->n_redis; i++) {
        const struct config_tls *t = &c->redis[i].tls;

        if (!c->redis[i].use_tls)
            continue;
        s->redis_tls[i] = tls_context_client(t->ca, t->cert, t->key, t->verify, false, why);
        if (s->redis_tls[i] == NULL)
            return false;
    }
    return true;
}

struct snapshot *snapshot_new(struct config *c, struct buf *why)
{
    struct snapshot *s = mem_zalloc(sizeof(*s));

    if (s == NULL) {
        config_unref(c);
        return NULL;
    }
    s->config = c;
    s->references_ = 1;
    s->listen_tls = array_of(c->n_listens, sizeof(*s->listen_tls));
    s->upstream_tls = array_of(c->n_upstreams, sizeof(*s->upstream_tls));
    s->redis_tls = array_of(c->n_redis, sizeof(*s->redis_tls));
    s->limit_rows = array_of(c->n_limits, sizeof(*s->limit_rows));
    if (s->listen_tls == NULL || s->upstream_tls == NULL || s->redis_tls == NULL || s->limit_rows == NULL ||
        !make_tls(s, why)) {
        snapshot_free(s);
        return NULL;
    }
    for (size_t i = 0; i < c->n_limits; i++) {
        s->limit_rows[i] = metrics_limit_row(c->limits[i].name);
        metrics_limit_cap(s->limit_rows[i], c->limits[i].concurrency);
    }
    return s;
}

struct snapshot *snapshot_ref(struct snapshot *s)
{
    __atomic_add_fetch(&s->references_, 1, __ATOMIC_RELAXED);
    return s;
}

void snapshot_unref(struct snapshot *s)
{
    if (s != NULL && __atomic_sub_fetch(&s->references_, 1, __ATOMIC_ACQ_REL) == 0)
        snapshot_free(s);
}
