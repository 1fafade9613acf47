/*
 * service.h - what one loop serves calls with: the snapshot in force, its pools, the
 * admission, and what all loops share. A reload makes a new one; a call keeps the one under which it
 * began until it ends, and the last call of an old one frees it.
 */
#ifndef LG_SERVICE_H
#define LG_SERVICE_H

#include "admit.h"
#include "snapshot.h"
#include "upool.h"

/* Of the process: outlives every loop. */
struct service_shared {
    size_t body_memory_; /* atomic: request bodies held while their calls wait */
    char instance[24];   /* random, per start; the loops add their index */
};

struct service {
    struct loop *loop;
    struct snapshot *snapshot;
    const struct config *config; /* of the snapshot */
    struct service_shared *shared;
    struct admit *admit;  /* of the loop: outlives the service */
    struct upool **pools; /* one an upstream, made at first use */
    struct list *calls;   /* of the loop, under every snapshot */
    uint64_t sequence;    /* request ids */
    bool draining;
    unsigned references_; /* the worker's and one a call; own thread */
};

/* Takes its own reference to the snapshot. NULL: no memory. */
struct service *service_new(struct loop *l, struct snapshot *s, struct admit *a, struct list *calls,
                            struct service_shared *shared);
struct service *service_ref(struct service *s);
void service_unref(struct service *s);

/* The pool of an upstream of this service's configuration. NULL: no memory. */
struct upool *service_pool(struct service *s, const struct config_upstream *u);
/* No new calls begin here: idle connections are closed, those in use go when their calls end. */
void service_retire(struct service *s);
size_t service_idle_connections(const struct service *s);

/* Body memory, of the whole process. False: the budget is spent. */
MUST_CHECK bool service_body_take(struct service *s, size_t n);
void service_body_give(struct service *s, size_t n);
size_t service_body_memory(const struct service_shared *shared);

#endif
