/*
 * redis.c - the connection to one Redis server and everything that can happen to it.
 *
 * Owns: one stream at a time, the reply reader of that stream (redis_value.c), the bytes of commands written in this turn,
 * and the ring of commands that wait for a reply. Reader and ring outlive a broken connection until the next
 * dial; a stream that was closed calls nobody (stream.h), so a late event of an old connection cannot reach
 * the new one.
 *
 *     redis_send ──► out ──(end of turn, one write)──► stream ──► Redis
 *                     └► ring: fn, arg, when sent          │
 *     fn(status, value) ◄── head of ring ◄── reader ◄──────┘      replies come in the order of commands
 *
 * One deadline does for all: `wait_` is armed at all times, and the state says for what: the dial to succeed,
 * the oldest command to be answered, an idle connection to be tried by PING, or the next attempt.
 * Replies are in order, so nothing younger can be overdue while the oldest is not.
 *
 * break_off is the only way from a connection to none: it closes, chooses the time of the next attempt, and
 * leaves telling the owner (REDIS_UNKNOWN for the ring, on_broken) to a task at the end of the turn: never
 * from inside a call of the owner's.
 */
#include "redis.h"

#include "buf.h"
#include "hash.h"
#include "log.h"
#include "lua_scripts.h"
#include "mem.h"
#include "metrics.h"
#include "resolve.h"
#include "resp.h"
#include "stream.h"

#include <errno.h>
#include <stdio.h>

#define IN_FLIGHT_MAX 32768u /* commands, not ids; the ring's ceiling */
#define OUT_KEEP_BYTES 65536 /* a larger out buffer is given back after the write */
#define BACKOFF_MIN_MS 100
#define BACKOFF_MAX_MS 500
#define IDLE_PING_MS 2000 /* a silent connection is tried this often */
#define RESOLVE_INTERVAL_MS                                                                                  \
    1000 /* a failover may move the name: asked for anew at most this often, while dialing */
#define OLD_IDS_MAX 8
#define NOSCRIPT_MAX 8 /* rounds of loading without one script call that worked */
#define RUN_ID_MAX 40
#define SHA1_HEX 40

/* --- the connection ------------------------------------------------------------------------------------- */

enum redis_state {
    REDIS_CONNECTING, /* stream dialed; wait_: timeout */
    REDIS_GREETING,   /* greeting sent; wait_: oldest reply */
    REDIS_SETTLING,   /* on_ready's commands sent; wait_: oldest reply */
    REDIS_READY,      /* wait_: oldest reply, or the next PING */
    REDIS_BROKEN,     /* no stream; wait_: next attempt */
};

enum command_kind {
    COMMAND_OWN,    /* of redis.c itself */
    COMMAND_PLAIN,  /* of the owner */
    COMMAND_SCRIPT, /* of the owner; NOSCRIPT is possible */
};

struct command {
    redis_reply_fn *fn;
    void *arg;
    uint64_t sent_us;
    enum command_kind kind;
};

struct redis {
    struct loop *loop;
    struct config *config;
    const struct config_redis *conf;
    struct tls_context *tls;
    struct tls_sessions *sessions;
    const struct redis_ops *ops;
    void *owner;

    /* the connection */
    enum redis_state state; /* written by set_state alone */
    unsigned address_turn;
    const char *trouble;
    struct resolve *resolve; /* NULL: a unix socket */
    struct stream *stream;   /* NULL: BROKEN, or CONNECTING and not resolved yet */
    struct redis_reader *reader;
    struct task report;

    /* time */
    struct deadline wait_;
    uint64_t dialed_ms;
    uint64_t retry_ms;   /* BROKEN: when the next attempt is due */
    uint64_t backoff_ms; /* before jitter */
    uint64_t random;
    uint64_t last_reply_ms;

    /* commands written in this turn */
    struct buf out;
    struct task flush;
    size_t command_at; /* where the command being built begins in out */
    size_t args_left;
    enum command_kind building;

    /* commands in flight: ring_cap entries, a power of two */
    uint32_t ring_cap, ring_head, ring_count;
    uint32_t unsent; /* the youngest of ring: written to out, not to the stream */
    struct command *ring;

    /* scripts and greeting */
    unsigned loading;         /* SCRIPT LOADs in flight */
    unsigned noscript_rounds; /* since a script call worked */
    unsigned greeting_left;   /* replies until on_ready */
    unsigned n_old_ids;
    int64_t id; /* CLIENT ID of this connection; 0: not known */
    int64_t old_ids[OLD_IDS_MAX];
    size_t run_id_n, new_run_id_n; /* 0: not known */
    char run_id[RUN_ID_MAX];       /* of the server that was last settled with */
    char new_run_id[RUN_ID_MAX];   /* of the one being greeted */
    char sha[REDIS_SCRIPT_COUNT][SHA1_HEX];

    struct redis_counters counters;
    const char *logged_trouble; /* NULL: the log says that all is well */
    uint64_t log_last_s, log_held_back;
    bool build_failed;
    bool grace_used;  /* the overdue command has been given one more poll */
    bool was_settled; /* the connection just given up had come to on_ready */
    bool server_changed;
    bool noted; /* that an ACL takes something away from us */
};

static void break_off(struct redis *r, const char *trouble, const char *detail);
static void dial(struct redis *r);
static void flush_run(struct task *t);

static void set_state(struct redis *r, enum redis_state to)
{
    static const uint8_t legal_from[] = {
        [REDIS_CONNECTING] = 1u << REDIS_BROKEN,
        [REDIS_GREETING] = 1u << REDIS_CONNECTING,
        [REDIS_SETTLING] = 1u << REDIS_GREETING,
        [REDIS_READY] = 1u << REDIS_SETTLING,
        [REDIS_BROKEN] = 1u << REDIS_CONNECTING | 1u << REDIS_GREETING | 1u << REDIS_SETTLING |
                         1u << REDIS_READY,
    };

    BUG_ON((legal_from[to] & 1u << r->state) == 0);
    r->state = to;
}

/*
 * wait_ is never disarmed but to fire, and set again before anything else takes its place in the heap: no
 * memory is needed.
 */
static void wait_until(struct redis *r, uint64_t due_ms)
{
    bool armed = deadline_set(r->loop, &r->wait_, due_ms);

    BUG_ON(!armed);
}

/*
 * Since when the next reply is due. SETTLING sends everything that this loop holds at once, as do all other
 * loops: nobody waits for it, and it may take the server a while, so there each reply gives the next its full
 * time. Else a crowd could time out, reconnect and send it all again for ever.
 */
static uint64_t oldest_ms(const struct redis *r)
{
    uint64_t sent_ms = r->ring[r->ring_head].sent_us / 1000;

    return r->state == REDIS_SETTLING && r->last_reply_ms > sent_ms ? r->last_reply_ms : sent_ms;
}

static void wait_for_next(struct redis *r)
{
    if (r->state == REDIS_CONNECTING)
        wait_until(r, r->dialed_ms + r->conf->timeout_ms);
    else if (r->state == REDIS_BROKEN)
        wait_until(r, r->retry_ms);
    else if (r->ring_count > 0)
        wait_until(r, oldest_ms(r) + r->conf->timeout_ms);
    else
        wait_until(r, r->last_reply_ms + IDLE_PING_MS);
}

/* --- commands out --------------------------------------------------------------------------------------- */

static bool ring_grow(struct redis *r)
{
    uint32_t cap = r->ring_cap == 0 ? 64 : r->ring_cap * 2;
    struct command *ring;

    if (cap > IN_FLIGHT_MAX)
        return false;
    ring = mem_alloc(cap * sizeof(*ring));
    if (ring == NULL)
        return false;
    for (uint32_t i = 0; i < r->ring_count; i++)
        ring[i] = r->ring[(r->ring_head + i) & (r->ring_cap - 1)];
    mem_free(r->ring);
    r->ring = ring;
    r->ring_cap = cap;
    r->ring_head = 0;
    return true;
}

static void begin(struct redis *r, enum command_kind kind, size_t n_args)
{
    BUG_ON(r->args_left != 0);
    r->building = kind;
    r->command_at = r->out.n;
    r->args_left = n_args;
    r->build_failed = !resp_put_command(&r->out, n_args);
}

void redis_begin(struct redis *r, size_t n_args)
{
    begin(r, COMMAND_PLAIN, n_args);
}

void redis_begin_script(struct redis *r, enum redis_script s, size_t n_keys, size_t n_args)
{
    begin(r, COMMAND_SCRIPT, 3 + n_keys + n_args);
    redis_arg(r, SLICE("EVALSHA"));
    redis_arg(r, (struct slice){r->sha[s], SHA1_HEX});
    redis_arg_u64(r, n_keys);
}

void redis_arg(struct redis *r, struct slice s)
{
    BUG_ON(r->args_left == 0);
    r->args_left--;
    if (!r->build_failed)
        r->build_failed = !resp_put_bulk(&r->out, s);
}

void redis_arg_u64(struct redis *r, uint64_t v)
{
    char digits[20];
    size_t n = str_put_u64(digits, v);

    redis_arg(r, (struct slice){digits, n});
}

/* Queues the command that was built. False: it is taken out of the buffer again. */
static bool enqueue(struct redis *r, redis_reply_fn *fn, void *arg)
{
    BUG_ON(r->args_left != 0);
    if (r->build_failed || (r->ring_count == r->ring_cap && !ring_grow(r))) {
        r->out.n = r->command_at;
        return false;
    }
    r->ring[(r->ring_head + r->ring_count) & (r->ring_cap - 1)] =
        (struct command){.fn = fn, .arg = arg, .kind = r->building};
    r->ring_count++;
    r->unsent++;
    r->counters.commands++;
    loop_defer_last(r->loop, &r->flush);
    return true;
}

bool redis_send(struct redis *r, redis_reply_fn *fn, void *arg)
{
    if (!redis_accepts(r))
        r->build_failed = true;
    return enqueue(r, fn, arg);
}

/* A command of redis.c itself; fn gets r. Without memory the connection cannot go on. */
static bool send_own(struct redis *r, redis_reply_fn *fn)
{
    r->building = COMMAND_OWN;
    if (enqueue(r, fn, r))
        return true;
    break_off(r, "no_memory", "");
    return false;
}

/* The end of the turn: one write for all of it. The time is read now: the turn may have been a long one. */
static void flush_run(struct task *t)
{
    struct redis *r = container_of(t, struct redis, flush);
    struct iovec iov = {r->out.p, r->out.n};
    uint64_t now_us = loop_now_us();
    bool written;

    if (r->unsent == 0)
        return;
    for (uint32_t i = r->ring_count - r->unsent; i < r->ring_count; i++)
        r->ring[(r->ring_head + i) & (r->ring_cap - 1)].sent_us = now_us;
    r->unsent = 0;
    written = stream_write(r->stream, &iov, 1);
    r->out.n = 0;
    if (r->out.cap_ > OUT_KEEP_BYTES)
        buf_free(&r->out);
    if (!written)
        break_off(r, "reset", "write failed");
    else
        wait_for_next(r);
}

/* --- troubles ------------------------------------------------------------------------------------------- */

/* Error replies that say: not this command, but this server cannot serve us now. */
static const char *server_trouble(const struct redis_value *v)
{
    static const struct {
        const char *code;
        const char *trouble;
    } rows[] = {
        {"LOADING", "loading"},
        {"READONLY", "readonly"},
        {"MASTERDOWN", "masterdown"},
        {"NOAUTH", "auth"},
        {"WRONGPASS", "auth"},
        {"NOPERM", "noperm"},
        {"BUSY ", "busy"},
        {"MISCONF", "misconf"},
        {"CLUSTERDOWN", "cluster"},
        {"MOVED", "cluster"},
        {"ASK ", "cluster"},
        {"CROSSSLOT", "cluster"},
        {"NOREPLICAS", "noreplicas"},
        {"DENIED", "protected_mode"},
        {"UNBLOCKED", "reset"},
        {"ERR max number of clients reached", "maxclients"},
        {"ERR The user executing the script", "noperm"},
        {"The user executing the script", "noperm"},
        {"ERR ACL failure in script", "noperm"}, /* 7.2 and newer, in place of the two above */
        {"ERR invalid password", "auth"},
    };

    for (size_t i = 0; i < ARRAY_LEN(rows); i++)
        if (redis_value_is_error(v, rows[i].code))
            return rows[i].trouble;
    return NULL;
}

/*
 * The first line of an error reply, for the log. It may quote key names of ours, never an argument of AUTH.
 */
static void break_off_by_reply(struct redis *r, const char *trouble, const struct redis_value *v)
{
    char detail[160] = "unexpected reply";

    if (v != NULL && redis_value_type(v) == REDIS_TYPE_ERROR)
        (void)snprintf(detail, sizeof(detail), "%.*s", (int)size_min(redis_value_str(v).n, 150),
                       redis_value_str(v).p);
    break_off(r, trouble, detail);
}

static void log_broken(struct redis *r, const char *detail)
{
    uint64_t suppressed = 0;

    /* The same trouble at every attempt is one piece of news. */
    if (r->logged_trouble != NULL && strcmp(r->logged_trouble, r->trouble) == 0)
        return;
    if (!log_may_repeat(&r->log_last_s, &r->log_held_back, &suppressed))
        return;
    r->logged_trouble = r->trouble;
    log_event(LOG_WARN, "redis", "%s: not usable: %s%s%s", r->conf->name, r->trouble,
              *detail != '\0' ? ": " : "", detail);
}

static uint64_t jittered(struct redis *r, uint64_t ms)
{
    /* xorshift64: spread between instances is all that is asked of it. */
    r->random ^= r->random << 13;
    r->random ^= r->random >> 7;
    r->random ^= r->random << 17;
    return ms * 4 / 5 + r->random % (ms * 2 / 5 + 1);
}

static void remember_old_id(struct redis *r)
{
    if (r->id == 0)
        return;
    if (r->n_old_ids == OLD_IDS_MAX) {
        memmove(r->old_ids, r->old_ids + 1, (OLD_IDS_MAX - 1) * sizeof(r->old_ids[0]));
        r->n_old_ids--;
    }
    r->old_ids[r->n_old_ids++] = r->id;
}

/*
 * Gives the connection up. The owner is told at the end of the turn. Values read from r->reader stay valid
 * until then.
 */
static void break_off(struct redis *r, const char *trouble, const char *detail)
{
    if (r->state == REDIS_BROKEN)
        return;
    r->was_settled = r->state == REDIS_SETTLING || r->state == REDIS_READY;
    if (r->was_settled)
        remember_old_id(r);
    else
        r->address_turn++;
    if (r->stream != NULL)
        stream_close(r->stream);
    r->stream = NULL;
    r->id = 0;
    r->out.n = 0;
    r->unsent = 0;
    r->args_left = 0;
    r->loading = 0;
    r->trouble = trouble;
    r->counters.breaks++;
    set_state(r, REDIS_BROKEN);
    r->retry_ms = loop_now_us() / 1000 + jittered(r, r->backoff_ms);
    r->backoff_ms = r->backoff_ms * 2 > BACKOFF_MAX_MS ? BACKOFF_MAX_MS : r->backoff_ms * 2;
    wait_for_next(r);
    log_broken(r, detail);
    loop_defer(r->loop, &r->report);
}

/* The end of the turn after break_off: every command in flight gets its answer. */
static void report_run(struct task *t)
{
    struct redis *r = container_of(t, struct redis, report);
    bool was_settled = r->was_settled;

    while (r->ring_count > 0) {
        struct command c = r->ring[r->ring_head];

        r->ring_head = (r->ring_head + 1) & (r->ring_cap - 1);
        r->ring_count--;
        if (c.kind != COMMAND_OWN)
            c.fn(c.arg, REDIS_UNKNOWN, NULL);
    }
    r->was_settled = false;
    if (was_settled && r->ops->on_broken != NULL)
        r->ops->on_broken(r->owner);
}

/* --- greeting ------------------------------------------------------------------------------------------- */

static void settle(struct redis *r);

/* One reply of the greeting was good (or its failure does not matter). */
static void greeting_step(struct redis *r)
{
    if (r->state == REDIS_GREETING && --r->greeting_left == 0)
        settle(r);
}

static void on_auth(void *arg, enum redis_status status, const struct redis_value *v)
{
    struct redis *r = arg;
    const char *trouble;

    if (status == REDIS_OK) {
        greeting_step(r);
        return;
    }
    trouble = server_trouble(v);
    break_off_by_reply(r, trouble != NULL ? trouble : "auth", v);
}

static void on_select(void *arg, enum redis_status status, const struct redis_value *v)
{
    struct redis *r = arg;
    const char *trouble;

    if (status == REDIS_OK) {
        greeting_step(r);
        return;
    }
    trouble = server_trouble(v);
    break_off_by_reply(r, trouble != NULL ? trouble : "select", v);
}

/*
 * CLIENT SETNAME: an ACL may forbid it. What a server says in place of any answer comes here as well
 * (maxclients, LOADING).
 */
static void on_named(void *arg, enum redis_status status, const struct redis_value *v)
{
    const char *trouble = status == REDIS_ERROR && !redis_value_is_error(v, "NOPERM") ? server_trouble(v)
                                                                                      : NULL;

    if (trouble != NULL)
        break_off_by_reply(arg, trouble, v);
    else
        greeting_step(arg);
}

static void on_client_id(void *arg, enum redis_status status, const struct redis_value *v)
{
    struct redis *r = arg;

    r->id = status == REDIS_OK && redis_value_type(v) == REDIS_TYPE_INT ? redis_value_int(v) : 0;
    greeting_step(r);
}

/* INFO server: the line "run_id:<40 hex>" tells one start of a server from every other. */
static void on_info(void *arg, enum redis_status status, const struct redis_value *v)
{
    static const char key[] = "\nrun_id:";
    struct redis *r = arg;
    const char *at = status == REDIS_OK && redis_value_type(v) == REDIS_TYPE_STRING
                         ? strstr(redis_value_str(v).p, key)
                         : NULL;

    r->new_run_id_n = 0;
    if (at != NULL) {
        at += sizeof(key) - 1;
        r->new_run_id_n = size_min(strcspn(at, "\r\n"), RUN_ID_MAX);
        memcpy(r->new_run_id, at, r->new_run_id_n);
    }
    greeting_step(r);
}

static void script_loaded(struct redis *r, enum redis_script s, enum redis_status status,
                          const struct redis_value *v)
{
    const char *trouble;

    r->loading--;
    if (status == REDIS_OK && redis_value_type(v) == REDIS_TYPE_STRING && redis_value_str(v).n == SHA1_HEX) {
        memcpy(r->sha[s], redis_value_str(v).p, SHA1_HEX);
        greeting_step(r);
        return;
    }
    trouble = server_trouble(v);
    break_off_by_reply(r, trouble != NULL ? trouble : "script", v);
}

static void on_admit_loaded(void *arg, enum redis_status status, const struct redis_value *v)
{
    script_loaded(arg, REDIS_SCRIPT_ADMIT, status, v);
}

static void on_renew_loaded(void *arg, enum redis_status status, const struct redis_value *v)
{
    script_loaded(arg, REDIS_SCRIPT_RENEW, status, v);
}

static void on_release_loaded(void *arg, enum redis_status status, const struct redis_value *v)
{
    script_loaded(arg, REDIS_SCRIPT_RELEASE, status, v);
}

static bool load_scripts(struct redis *r)
{
    const struct {
        struct slice text;
        redis_reply_fn *fn;
    } scripts[REDIS_SCRIPT_COUNT] = {
        [REDIS_SCRIPT_ADMIT] = {{lua_admit, lua_admit_len}, on_admit_loaded},
        [REDIS_SCRIPT_RENEW] = {{lua_renew, lua_renew_len}, on_renew_loaded},
        [REDIS_SCRIPT_RELEASE] = {{lua_release, lua_release_len}, on_release_loaded},
    };

    for (size_t i = 0; i < REDIS_SCRIPT_COUNT; i++) {
        redis_begin(r, 3);
        redis_arg(r, SLICE("SCRIPT"));
        redis_arg(r, SLICE("LOAD"));
        redis_arg(r, scripts[i].text);
        if (!send_own(r, scripts[i].fn))
            return false;
        r->loading++;
    }
    return true;
}

static bool send_auth(struct redis *r)
{
    bool named = r->conf->user != NULL && *r->conf->user != '\0';

    redis_begin(r, named ? 3 : 2);
    redis_arg(r, SLICE("AUTH"));
    if (named)
        redis_arg(r, slice_of(r->conf->user));
    redis_arg(r, slice_of(r->conf->password));
    return send_own(r, on_auth);
}

static bool send_select(struct redis *r)
{
    redis_begin(r, 2);
    redis_arg(r, SLICE("SELECT"));
    redis_arg_u64(r, r->conf->db);
    return send_own(r, on_select);
}

static bool send_words(struct redis *r, struct slice a, struct slice b, redis_reply_fn *fn)
{
    redis_begin(r, 2);
    redis_arg(r, a);
    redis_arg(r, b);
    return send_own(r, fn);
}

/* The whole greeting in one pipeline. Each send may have ended the connection. */
static void greet(struct redis *r)
{
    bool auth = r->conf->password != NULL && *r->conf->password != '\0';

    set_state(r, REDIS_GREETING);
    r->grace_used = false;
    r->greeting_left = (auth ? 1 : 0) + (r->conf->db != 0 ? 1 : 0) + 3 + REDIS_SCRIPT_COUNT;
    if (auth && !send_auth(r))
        return;
    if (r->conf->db != 0 && !send_select(r))
        return;
    redis_begin(r, 3);
    redis_arg(r, SLICE("CLIENT"));
    redis_arg(r, SLICE("SETNAME"));
    redis_arg(r, SLICE("leasegate"));
    if (!send_own(r, on_named) || !send_words(r, SLICE("CLIENT"), SLICE("ID"), on_client_id) ||
        !send_words(r, SLICE("INFO"), SLICE("server"), on_info))
        return;
    (void)load_scripts(r);
}

/*
 * The answer to CLIENT KILL ID: an integer, 0 when it was gone already. Where an ACL forbids it, the window
 * described in redis.h stays.
 */
static void on_killed(void *arg, enum redis_status status, const struct redis_value *v)
{
    struct redis *r = arg;

    (void)v;
    if (r->n_old_ids == 0)
        return;
    if (status != REDIS_OK)
        log_event(LOG_WARN, "redis", "%s: CLIENT KILL is refused: commands of a lost connection may run late",
                  r->conf->name);
    /* Answers come in the order of old_ids, and nothing joins it while a connection lives. */
    r->n_old_ids--;
    memmove(r->old_ids, r->old_ids + 1, r->n_old_ids * sizeof(r->old_ids[0]));
}

static bool kill_old_connections(struct redis *r)
{
    for (unsigned i = 0; i < r->n_old_ids; i++) {
        redis_begin(r, 4);
        redis_arg(r, SLICE("CLIENT"));
        redis_arg(r, SLICE("KILL"));
        redis_arg(r, SLICE("ID"));
        redis_arg_u64(r, (uint64_t)r->old_ids[i]);
        if (!send_own(r, on_killed))
            return false;
    }
    return true;
}

static void ready_if_settled(struct redis *r)
{
    if (r->state != REDIS_SETTLING || r->ring_count > 0)
        return;
    set_state(r, REDIS_READY);
    r->trouble = "";
    r->backoff_ms = BACKOFF_MIN_MS;
    if (r->logged_trouble != NULL)
        log_event(LOG_INFO, "redis", "%s: usable", r->conf->name);
    r->logged_trouble = NULL;
}

/*
 * The greeting was answered. Ids of old connections mean something to the server that gave them out, and to
 * no other.
 */
static void settle(struct redis *r)
{
    bool same = r->run_id_n > 0 && r->run_id_n == r->new_run_id_n &&
                memcmp(r->run_id, r->new_run_id, r->run_id_n) == 0;

    set_state(r, REDIS_SETTLING);
    if (!r->noted && (r->id == 0 || r->new_run_id_n == 0)) {
        r->noted = true;
        log_event(LOG_WARN, "redis",
                  "%s: CLIENT ID or INFO is refused: after a timeout, commands may run late", r->conf->name);
    }
    r->server_changed = r->run_id_n > 0 && r->new_run_id_n > 0 && !same;
    if (!same)
        r->n_old_ids = 0;
    r->run_id_n = r->new_run_id_n;
    memcpy(r->run_id, r->new_run_id, r->new_run_id_n);
    if (!kill_old_connections(r))
        return;
    r->ops->on_ready(r->owner);
    ready_if_settled(r);
}

/* --- replies in ----------------------------------------------------------------------------------------- */

/* A script call was not executed. Loads the scripts again, once for all calls that were under way. */
static void noscript(struct redis *r)
{
    r->counters.noscripts++;
    if (r->loading > 0)
        return;
    if (++r->noscript_rounds > NOSCRIPT_MAX) {
        break_off(r, "noscript", "scripts vanish as fast as they are loaded");
        return;
    }
    (void)load_scripts(r);
}

/* Hands one reply to whom it belongs. May end the connection. */
static void take_reply(struct redis *r, const struct redis_value *v)
{
    struct command c = r->ring[r->ring_head];
    enum redis_status status = redis_value_type(v) == REDIS_TYPE_ERROR ? REDIS_ERROR : REDIS_OK;

    r->ring_head = (r->ring_head + 1) & (r->ring_cap - 1);
    r->ring_count--;
    r->grace_used = false;
    if (c.kind == COMMAND_SCRIPT && redis_value_is_error(v, "NOSCRIPT")) {
        noscript(r);
        status = REDIS_AGAIN;
        v = NULL;
    } else if (c.kind == COMMAND_SCRIPT && status == REDIS_OK) {
        r->noscript_rounds = 0;
    }
    if (c.kind != COMMAND_OWN && status == REDIS_ERROR) {
        const char *trouble = server_trouble(v);

        if (trouble != NULL)
            break_off_by_reply(r, trouble, v);
    }
    c.fn(c.arg, status, v);
    ready_if_settled(r);
}

static void on_data(void *owner, char *bytes, size_t n)
{
    struct redis *r = owner;
    const struct redis_value *v;
    uint64_t now_us = loop_now_us();
    bool failed = false;

    if (!redis_reader_feed(r->reader, bytes, n)) {
        break_off(r, redis_reader_trouble(r->reader), "reply not understood");
        return;
    }
    while (r->state != REDIS_BROKEN && (v = redis_reader_next(r->reader, &failed)) != NULL) {
        if (r->ring_count == r->unsent) { /* a reply to nothing: an error before closing, or no Redis */
            const char *trouble = redis_value_type(v) == REDIS_TYPE_ERROR ? server_trouble(v) : NULL;

            break_off_by_reply(r, trouble != NULL ? trouble : "protocol", v);
            return;
        }
        metrics_observe_us(METRICS_HISTOGRAM_REDIS_ROUND_TRIP, now_us - r->ring[r->ring_head].sent_us);
        take_reply(r, v);
    }
    if (r->state == REDIS_BROKEN)
        return;
    if (failed) {
        break_off(r, redis_reader_trouble(r->reader), "reply not understood");
        return;
    }
    r->last_reply_ms = now_us / 1000;
    /* What was queued just now gets its date, and the deadline with it, from flush_run. */
    if (r->ring_count > r->unsent || r->ring_count == 0)
        wait_for_next(r);
}

static void on_open(void *owner)
{
    greet(owner);
}

static void on_end(void *owner, enum stream_end how)
{
    (void)how;
    break_off(owner, "closed", "closed by the server");
}

static void on_drain(void *owner)
{
    (void)owner;
}

static void on_error(void *owner, int error, const char *detail)
{
    const char *trouble = "unreachable";

    if (error == STREAM_ERROR_TLS)
        trouble = "tls";
    else if (error == -ECONNREFUSED || error == -ENOENT)
        trouble = "refused";
    else if (error == -ECONNRESET || error == -EPIPE)
        trouble = "reset";
    break_off(owner, trouble, detail != NULL ? detail : "");
}

/* --- dialing and time ----------------------------------------------------------------------------------- */

static const struct stream_ops stream_ops = {
    .on_open = on_open,
    .on_data = on_data,
    .on_end = on_end,
    .on_drain = on_drain,
    .on_error = on_error,
};

static void dial_failed(struct redis *r)
{
    if (r->stream == NULL)
        break_off(r, "no_memory", "");
}

/* The address that worked last; after an attempt that failed the next one. */
static void dial_address(struct redis *r, const struct resolve_answer *answer)
{
    const struct sockaddr *address = resolve_answer_at(answer, r->address_turn % resolve_answer_n(answer));

    r->stream = stream_dial(r->loop, address, r->tls, r->conf->host, r->sessions, &stream_ops, r);
    dial_failed(r);
}

/* Dials now if the name has an address, else waits for on_resolved, as long as wait_ allows. */
static void dial_name(struct redis *r)
{
    struct resolve_answer *answer = resolve_get(r->resolve);

    if (answer != NULL)
        dial_address(r, answer);
    else if (!resolve_asking(r->resolve))
        break_off(r, "resolve", resolve_error(r->resolve));
    resolve_answer_unref(answer);
}

static void on_resolved(void *owner)
{
    struct redis *r = owner;

    if (r->state == REDIS_CONNECTING && r->stream == NULL)
        dial_name(r);
}

static void dial(struct redis *r)
{
    BUG_ON(r->stream != NULL || r->ring_count > 0);
    set_state(r, REDIS_CONNECTING);
    r->grace_used = false;
    r->dialed_ms = loop_now_us() / 1000;
    r->counters.connects++;
    wait_for_next(r);
    redis_reader_free(r->reader);
    r->reader = redis_reader_new();
    if (r->reader == NULL) {
        break_off(r, "no_memory", "");
    } else if (r->resolve != NULL) {
        dial_name(r);
    } else {
        r->stream = stream_dial_unix(r->loop, r->conf->path, &stream_ops, r);
        dial_failed(r);
    }
}

static void on_pong(void *arg, enum redis_status status, const struct redis_value *v)
{
    const char *trouble = status == REDIS_ERROR ? server_trouble(v) : NULL;

    if (trouble != NULL)
        break_off_by_reply(arg, trouble, v);
}

static void ping(struct redis *r)
{
    redis_begin(r, 1);
    redis_arg(r, SLICE("PING"));
    (void)send_own(r, on_pong);
}

/*
 * Time is up for whatever wait_ stood for. Where a reply is overdue, it may yet lie in the socket: a loop
 * that was held up (by a long turn, by SIGSTOP) sees its timers before its sockets. So one more poll comes
 * before the verdict.
 */
static void wait_fired(struct deadline *d)
{
    struct redis *r = container_of(d, struct redis, wait_);
    uint64_t now_ms = loop_now_ms(r->loop);

    if (r->state == REDIS_BROKEN) {
        dial(r);
        return;
    }
    if (r->state == REDIS_READY && r->ring_count == 0) {
        wait_until(r, now_ms + IDLE_PING_MS);
        ping(r);
        return;
    }
    if (r->ring_count == r->unsent && r->ring_count > 0) { /* begun by an earlier deadline of this turn */
        wait_until(r, now_ms + r->conf->timeout_ms);
        return;
    }
    if (!r->grace_used) {
        r->grace_used = true;
        wait_until(r, now_ms + 1);
        return;
    }
    wait_until(r, now_ms + BACKOFF_MIN_MS); /* break_off sets it anew: armed, it needs no memory */
    r->counters.timeouts++;
    r->grace_used = false;
    if (r->stream == NULL)
        break_off(r, "resolve", "no address in time");
    else
        break_off(r, "timeout", r->state == REDIS_CONNECTING ? "connecting" : "no reply in time");
}

/* --- life ----------------------------------------------------------------------------------------------- */

struct redis *redis_new(struct loop *l, struct config *c, const struct config_redis *conf,
                        struct tls_context *tls, const struct redis_ops *ops, void *owner)
{
    struct redis *r = mem_zalloc(sizeof(*r));

    if (r == NULL)
        return NULL;
    r->loop = l;
    r->conf = conf;
    r->ops = ops;
    r->owner = owner;
    r->state = REDIS_BROKEN;
    r->logged_trouble = r->trouble = "connecting";
    r->backoff_ms = BACKOFF_MIN_MS;
    hash_random(&r->random, sizeof(r->random));
    r->random |= 1;
    task_init(&r->flush, flush_run);
    task_init(&r->report, report_run);
    deadline_init(&r->wait_, wait_fired);
    if (tls != NULL) {
        r->sessions = tls_sessions_new();
        r->tls = tls_context_ref(tls);
    }
    r->config = config_ref(c);
    if (conf->kind == CONFIG_REDIS_TCP) {
        r->resolve = resolve_new(l, conf->host, conf->port, RESOLVE_INTERVAL_MS, on_resolved, r);
        if (r->resolve == NULL)
            goto failed;
    }
    if (!deadline_set(l, &r->wait_, loop_now_ms(l)))
        goto failed;
    dial(r);
    return r;

failed:
    redis_free(r);
    return NULL;
}

void redis_reconfigure(struct redis *r, struct config *c, const struct config_redis *conf,
                       struct tls_context *tls)
{
    struct config *old = r->config;

    BUG_ON((r->tls == NULL) != (tls == NULL));
    r->config = config_ref(c);
    r->conf = conf;
    config_unref(old);
    if (tls == NULL)
        return;
    tls_context_ref(tls);
    tls_context_unref(r->tls);
    r->tls = tls;
}

void redis_free(struct redis *r)
{
    if (r->stream != NULL)
        stream_close(r->stream);
    deadline_cancel(r->loop, &r->wait_);
    task_cancel(r->loop, &r->flush);
    task_cancel(r->loop, &r->report);
    if (r->resolve != NULL)
        resolve_free(r->resolve);
    redis_reader_free(r->reader);
    buf_free(&r->out);
    mem_free(r->ring);
    if (r->sessions != NULL)
        tls_sessions_free(r->sessions);
    if (r->tls != NULL)
        tls_context_unref(r->tls);
    config_unref(r->config);
    mem_free(r);
}

uint64_t redis_reconnect_ms(const struct redis *r)
{
    return BACKOFF_MAX_MS * 6 / 5 + r->conf->timeout_ms; /* with the most jitter */
}

bool redis_usable(const struct redis *r)
{
    return r->state == REDIS_READY;
}

bool redis_accepts(const struct redis *r)
{
    return r->state == REDIS_SETTLING || r->state == REDIS_READY;
}

const char *redis_trouble(const struct redis *r)
{
    return r->trouble;
}

bool redis_server_changed(const struct redis *r)
{
    return r->server_changed;
}

size_t redis_in_flight(const struct redis *r)
{
    return r->ring_count;
}

const struct redis_counters *redis_counters(const struct redis *r)
{
    return &r->counters;
}
