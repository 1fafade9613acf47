/*
 * lease.h - leases: asked for, held, renewed, given back, through the scripts
 * in lua/ (contract: lua/README.md). Sole owner of key names and lease ids.
 * One `struct leases` per loop and Redis server.
 *
 *   states   ASKED ─► HELD ─► gone        lease_end may come in any of them, once:
 *              │                            ASKED, not sent yet: forgotten
 *              ├─► refused: gone            ASKED, sent: the answer is awaited, then a release is sent,
 *              unless it was "refused" └─► unknown: a release is    HELD: a release is sent
 *                  owed, gone
 *
 * Everything that one turn asks, renews and releases for one set of scopes is one script call, and all of one
 * loop turn is one write. A release that could not be delivered is owed: sent again after the reconnect,
 * and forgotten when it is older than ttl and a heartbeat (then it has expired by itself).
 *
 * Another server than before (restarted empty, failed over): grants pause for one heartbeat, or longer where
 * others may need longer to connect again, while all instances put back what they hold. Asks wait meanwhile;
 * they are not refused.
 */
#ifndef LG_LEASE_H
#define LG_LEASE_H

#include "config.h"
#include "loop.h"
#include "redis.h"

struct leases;
struct lease;

#define LEASE_SCOPES_MAX 8 /* limits that count one call */
#define LEASE_ID_MAX 64
#define LEASE_SCOPE_MAX 200 /* "<limit>[/<value>…]", values hashed where long or unusual */

/* One counted scope: a limit and, where the limit is `per` something, the values. */
struct lease_scope {
    const struct config_limit *limit;
    uint32_t cap; /* with overrides applied */
    char name[LEASE_SCOPE_MAX];
    size_t name_n;
};

/*
 * Appends "/<value>" to a scope's name, replaced by its hash where it is long or unusual (lua/README.md).
 * Pure. False: no room.
 */
MUST_CHECK bool lease_scope_add(struct lease_scope *s, struct slice value);

enum lease_answer {
    LEASE_GRANTED,
    LEASE_FULL,        /* `scope` says which one */
    LEASE_UNAVAILABLE, /* breaker open, or it opened before the command was sent: nothing was asked */
    LEASE_UNKNOWN,     /* sent, no answer in time: perhaps taken; the release is already owed */
    LEASE_ERROR,       /* an error reply; `reason` names it ("redis_oom", "redis_wrongtype", …) */
    LEASE_NO_MEMORY,
};

struct lease_ops {
    /* Never from inside lease_ask. After any answer but GRANTED the lease is gone. */
    void (*on_answer)(void *owner, struct lease *l, enum lease_answer answer, unsigned scope,
                      const char *reason);
    /*
     * strict: the lease no longer fits, or could not be renewed in time; the owner must end its call now (and
     * lease_end).
     */
    void (*on_lost)(void *owner);
};

/*
 * `instance` is copied: at most LEASE_INSTANCE_MAX bytes, of [A-Za-z0-9._-], never used by anyone else (other
 * threads and earlier starts included). References to c and tls are taken; `conf` is one of c's. NULL: no
 * memory.
 */
#define LEASE_INSTANCE_MAX (LEASE_ID_MAX - 1 - 16)
struct leases *leases_new(struct loop *l, struct config *c, const struct config_redis *conf,
                          struct tls_context *tls, const char *instance);
/* A newer snapshot: timings and caps from now on. Keys and ids stay. */
void leases_reconfigure(struct leases *ls, struct config *c);
/* The same server, as a newer snapshot has it: user, password, deadline, TLS. References as in leases_new. */
void leases_set_redis(struct leases *ls, struct config *c, const struct config_redis *conf,
                      struct tls_context *tls);
/*
 * Everything has been released (lease_end was called for each): true when nothing is owed and nothing in
 * flight. For the exit.
 */
bool leases_quiet(const struct leases *ls);
/*
 * Closes. Leases that still live are forgotten without a release; no callback comes. Not from inside a
 * callback.
 */
void leases_free(struct leases *ls);

/* Breaker closed. */
bool leases_usable(const struct leases *ls);
const char *leases_trouble(const struct leases *ls);

/*
 * Asks for one slot in each of the n scopes (1 … LEASE_SCOPES_MAX, all of this server), all or none. The
 * scopes are copied. NULL: no memory (no callback comes).
 */
struct lease *lease_ask(struct leases *ls, const struct lease_scope *scopes, size_t n,
                        const struct lease_ops *ops, void *owner);
/*
 * The call has truly ended (or no longer wants it): gives the slot back after delay_ms (0: at the end of this
 * turn). No callback comes afterwards; l is forgotten.
 */
void lease_end(struct lease *l, uint64_t delay_ms);
/* "<instance>/<sequence>", lives as long as the lease. */
struct slice lease_id(const struct lease *l);

/*
 * For gauges, /api and tests: leases held now (a release delay included); releases not yet confirmed by
 * Redis. Walks the scope sets.
 */
size_t leases_held(const struct leases *ls);
size_t leases_owed(const struct leases *ls);
/* Commands without a reply. */
size_t leases_in_flight(const struct leases *ls);

/* Ever growing, for metrics and tests. */
struct leases_counters {
    uint64_t granted;
    uint64_t refused;              /* full */
    uint64_t unknown;              /* asks without an answer */
    uint64_t errors;               /* asks answered by an error reply */
    uint64_t released;             /* confirmed */
    uint64_t forgotten;            /* owed for so long that they have expired */
    uint64_t restored, over, lost; /* renewals that found their lease gone; lost: strict, also by time */
    uint64_t renewals;             /* script calls */
};
const struct leases_counters *leases_counters(const struct leases *ls);
/* Of the connection underneath. */
const struct redis_counters *leases_redis_counters(const struct leases *ls);

#endif
