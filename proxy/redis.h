/*
 * redis.h - one connection of one loop to one Redis server: commands in, replies
 * out, each with a deadline; reconnect, breaker, script loading. Knows no leases.
 *
 *   states    CONNECTING ─► GREETING ─► SETTLING ─► READY ─► (failure) ─► BROKEN ─► CONNECTING …
 *             GREETING: AUTH, SELECT, CLIENT SETNAME, CLIENT ID, INFO server, SCRIPT LOADs, in one pipeline.
 *             SETTLING: CLIENT KILL of our previous connections, then the owner's on_ready commands, in one
 *             pipeline; READY when all of it has been answered. Two pipelines, since nothing of the owner's
 *             may be sent before our own id is known (else it could not be killed), nor an id be killed
 *             before we know that it is the same server's.
 *   breaker   is open in every state but READY: redis_usable is false and no command is sent.
 *             Any failure (deadline, reset, connect failure, or an error reply that says the server as a
 *             whole cannot serve: LOADING, READONLY, MASTERDOWN, NOAUTH, …) opens it; probes follow at 100 ms
 *             … 500 ms with jitter.
 *   unknown   a command whose reply does not come was perhaps executed. The connection is given up, all
 *             commands in flight end as REDIS_UNKNOWN, and the next connection first kills the old one's
 *             server side (CLIENT KILL ID), so that bytes still queued there can never run after what is sent
 *             from now on.
 *   noscript  a script call that the server does not know (restarted, SCRIPT FLUSH) ends as REDIS_AGAIN,
 *             after the SCRIPT LOADs were put in front of whatever is sent next. Nothing is sent again unseen
 *             by the owner: a renewal repeated here could bring back a lease whose release has run since.
 */
#ifndef LG_REDIS_H
#define LG_REDIS_H

#include "config.h"
#include "loop.h"
#include "redis_value.h"
#include "str.h"

struct redis;
struct tls_context;

enum redis_status {
    REDIS_OK,      /* value is the reply */
    REDIS_ERROR,   /* value is an error reply to this command alone (WRONGTYPE, OOM, NOPERM of a key …) */
    REDIS_UNKNOWN, /* deadline or lost connection: executed or not, nobody knows */
    REDIS_AGAIN, /* not executed: the server had lost our scripts; they are loaded before what is sent from now on */
};

/*
 * Called once per command, from the loop (never from inside redis_send), in the order of sending. value is
 * set on OK and ERROR, and valid until fn returns. An ERROR that concerns the whole server has opened the breaker before fn is called:
 * look at redis_usable.
 */
typedef void redis_reply_fn(void *arg, enum redis_status status, const struct redis_value *value);

enum redis_script { REDIS_SCRIPT_ADMIT, REDIS_SCRIPT_RENEW, REDIS_SCRIPT_RELEASE, REDIS_SCRIPT_COUNT };

/*
 * `on_ready` is called when the greeting was answered, before redis_usable turns true: commands sent from
 * inside it (renewals of all leases held) go first; usable turns true when their replies have come.
 * `on_broken` tells that a connection was given up after its on_ready: on a later turn's end than the
 * failure, after the REDIS_UNKNOWNs of all that was in flight.
 */
struct redis_ops {
    void (*on_ready)(void *owner);
    void (*on_broken)(void *owner);
};

/*
 * Begins to connect. tls NULL: plain. `conf` is c's: takes a reference to c, and one to tls. NULL: no memory.
 */
struct redis *redis_new(struct loop *l, struct config *c, const struct config_redis *conf,
                        struct tls_context *tls, const struct redis_ops *ops, void *owner);
/*
 * A newer snapshot of the same server: its user, password, deadline and TLS from the next use on. A connection
 * that is in order stays. References as in redis_new; whether it is plain or TLS may not change.
 */
void redis_reconfigure(struct redis *r, struct config *c, const struct config_redis *conf,
                       struct tls_context *tls);
/*
 * Closes. The callbacks of commands in flight are dropped; none of any kind comes afterwards. Not from inside
 * a callback.
 */
void redis_free(struct redis *r);

/* Breaker closed: a command sent now will be tried. */
bool redis_usable(const struct redis *r);
/*
 * As redis_usable, or SETTLING: what makes good for the past (renewals, releases) may be sent, nothing new
 * may begin.
 */
bool redis_accepts(const struct redis *r);
/* A server that is back has been found by every instance after so long: a step of the backoff, a deadline. */
uint64_t redis_reconnect_ms(const struct redis *r);
/*
 * Why it is not usable: a reason word for logs, /readyz and metrics ("connecting", "timeout", "refused",
 * "auth", "loading", "readonly", …). "" when usable.
 */
const char *redis_trouble(const struct redis *r);

/*
 * True from on_ready on while this server is another one than that of the connection before (INFO's run_id):
 * what it knew may be gone.
 */
bool redis_server_changed(const struct redis *r);

/*
 * Commands of one turn leave in one write at its end. Builds one command in place:
 *     redis_begin_script(r, REDIS_SCRIPT_ADMIT, n_keys, n_args);   keys and args follow, exactly that many
 *     redis_arg(r, slice) …, redis_arg_u64(r, v) …
 *     redis_send(r, fn, arg);
 * Possible while SETTLING (from on_ready) and READY. redis_send returns false when there is no memory, too
 * much in flight, or the breaker is open: nothing was sent, fn will not be called.
 */
void redis_begin_script(struct redis *r, enum redis_script s, size_t n_keys, size_t n_args);
void redis_begin(struct redis *r, size_t n_args); /* a plain command: its name is the first argument */
void redis_arg(struct redis *r, struct slice s);
void redis_arg_u64(struct redis *r, uint64_t v);
MUST_CHECK bool redis_send(struct redis *r, redis_reply_fn *fn, void *arg);

/* Commands in flight (for gauges). */
size_t redis_in_flight(const struct redis *r);

/* Ever growing, for metrics and tests. */
struct redis_counters {
    uint64_t connects;  /* attempts begun */
    uint64_t breaks;    /* connections given up, failed attempts included */
    uint64_t timeouts;  /* of these, by deadline */
    uint64_t commands;  /* sent */
    uint64_t noscripts; /* script calls that ended as REDIS_AGAIN */
};
const struct redis_counters *redis_counters(const struct redis *r);

/* --- the private server --------------------------------------------------------------------------------- */

/*
 * Starts a redis-server child for `embedded`: unix socket in a fresh directory (0700), no TCP port, no
 * persistence, `zset-max-listpack-entries 0`, dies with its parent (PR_SET_PDEATHSIG and an own check). Main
 * thread, at boot; blocks for at most some seconds. On failure false and *why says what to do (e.g. install
 * redis-server). *path: the socket, mem_free it. In embedded.c.
 */
MUST_CHECK bool redis_embedded_start(char **path, struct buf *why);
/*
 * After SIGCHLD, and now and then: an embedded server that has died is started again on its socket, empty; the leases come back with
 * the next renewals. DEAD: it did not start, *why says why; the next look tries again. Main thread.
 */
enum redis_embedded_fate { REDIS_EMBEDDED_ALIVE, REDIS_EMBEDDED_REVIVED, REDIS_EMBEDDED_DEAD };
enum redis_embedded_fate redis_embedded_look_after(struct buf *why);
/* Stops it and removes its directory. No-op when none runs. */
void redis_embedded_stop(void);

#endif
