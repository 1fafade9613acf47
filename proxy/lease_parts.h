/*
 * lease_parts.h - what the files of the leases share: the structs, and what one file does for the other.
 * Included by lease*.c alone; for everybody else leases are opaque (lease.h).
 *
 *   lease.c      states, batches, replies, the connection, time
 *   lease_set.c  scope sets: names and keys, the table, caps
 */
#ifndef LG_LEASE_PARTS_H
#define LG_LEASE_PARTS_H

#include "lease.h"

#define LEASE_BUCKETS 8
#define LEASE_SETS_MIN 64 /* slots of the table */

enum lease_state {
    LEASE_QUEUED,
    LEASE_UNASKED, /* the breaker was open: UNAVAILABLE is said at the end of the turn */
    LEASE_ASKED,
    LEASE_CANCELLED,
    LEASE_HELD,
    LEASE_LINGERING,
    LEASE_LOSING, /* on_lost is due */
    LEASE_LOST,   /* on_lost was called */
    LEASE_OWED,
    LEASE_RELEASING,
    LEASE_GONE, /* in no list */
};

struct lease {
    struct list_node node; /* in the list of its state */
    struct scope_set *set;
    union { /* after lease_end there is no owner: its place links those that linger, in order of time */
        struct {
            const struct lease_ops *ops;
            void *p;
        } owner;
        struct list_node due;
    } u;
    uint64_t
        when_ms; /* HELD: the last heartbeat known to have arrived was sent; LINGERING: due; OWED: since */
    uint16_t batches; /* that hold a pointer to it */
    uint8_t state;    /* enum lease_state */
    uint8_t bucket;
    uint8_t id_n;
    char id[];
};

struct scope_set {
    struct leases *leases;
    struct scope_set *chain; /* in its slot of the table */
    uint64_t hash;
    struct list_node dirty; /* in leases->dirty */
    struct list_node idle;  /* in leases->idle, when refs is 0 */
    uint64_t idle_ms;
    size_t refs; /* leases */
    struct list asks, owed, held[LEASE_BUCKETS];
    uint64_t refreshed_ms; /* the keys' expiry was last set by a command sent then; 0: not known */
    bool renew_all;        /* a renewal was not executed: all at the next flush */
    uint8_t home;          /* first bucket to be filled */
    uint8_t n;
    uint32_t caps[LEASE_SCOPES_MAX];
    struct slice keys[LEASE_SCOPES_MAX];
    struct slice names; /* of the scopes, each ended by a space: what the table is keyed by */
    char text[];        /* names and keys */
};

struct leases {
    struct loop *loop;
    struct config *config;
    struct redis *redis;
    char *prefix;
    char instance[LEASE_INSTANCE_MAX];
    size_t instance_n;
    uint64_t sequence;

    struct scope_set **table; /* slots, a power of two */
    struct scope_set *last;   /* asked for last: most asks of a turn are for one set */
    size_t slots, n_sets;
    uint8_t next_home;
    struct scope_set *nowhere; /* of leases that are UNASKED; in no table. Its key is the probe's */

    size_t alive; /* leases allocated */
    struct list unasked, asked, losing, lost, releasing;
    struct list lingering; /* by u.due, sorted by when_ms */
    struct list batches;
    struct list dirty, idle;
    struct task flush;
    struct deadline tick, linger;
    uint64_t tick_due_ms;
    unsigned tick_bucket;
    uint64_t connected_ms;  /* the last on_ready */
    uint64_t hold_until_ms; /* another server: no admits before */

    struct leases_counters counters;
    uint64_t log_last_s, log_held_back;
};

/* --- lease_set.c --- */

/* The set of these scopes, with their caps of now; made where there is none. NULL: no memory. */
struct scope_set *lease_set_for(struct leases *ls, const struct lease_scope *scopes, size_t n);
/* It has no lease. Takes it from the table and from the lists that it is in. */
void lease_set_free(struct scope_set *set);
/* fn for each set; it may not make or free sets. */
void lease_sets_each(struct leases *ls, void (*fn)(struct scope_set *set, void *arg), void *arg);
/* For lease_sets_each, after a reload: caps from the configuration in force. */
void lease_set_recap(struct scope_set *set, void *arg);
/* Writes "<prefix>:{<tag>}:<scope>:leases" to p and lets *key be it. Returns the end. */
char *lease_put_key(char *p, const char *prefix, const struct lease_scope *s, struct slice *key);

#endif
