/*
 * lease.c - leases in batches.
 *
 * Everything about one set of scopes is in one struct scope_set: who asks, who holds, whose release is due.
 * The end of a turn turns these lists into script calls, at most IDS_MAX ids each, in this order over all
 * sets:
 *
 *     renewals, releases, admits          a slot given back in this turn can be granted in this turn
 *
 * State is list membership (lease_move is the only writer), so every count is the length of a list:
 *
 *     QUEUED ─────────► ASKED ──────────► HELD ─────► LINGERING ─► OWED ⇄ RELEASING ─► freed
 *     set->asks         ls->asked         set->held[b]  (delay)    set->owed  ls->releasing
 *        │ lease_end      │ lease_end         └─► LOSING ─► LOST ─────┘
 *        ▼                ▼                       (strict)
 *      freed          CANCELLED ─► OWED, or freed if refused
 *
 * Why no pointer in a batch can dangle. A batch holds leases by pointer until its reply. Replies come in the
 * order of commands, and all of them come (REDIS_UNKNOWN at worst), so when the reply to a release arrives,
 * every earlier batch with that lease has been answered. Only then is the lease freed; where one is dropped
 * otherwise (refused, too old), `batches` says that no batch has it.
 *
 * Why no renewal can follow the release of its lease: only HELD and LINGERING leases are renewed, both travel
 * on one connection, nothing is repeated by redis.c, and what a lost connection may still carry dies before
 * the next one is used (redis.h).
 *
 * Renewal. The leases of a set lie in 8 buckets; each tick, an eighth of the heartbeat, renews one bucket of
 * every set, so each lease is renewed once a heartbeat and for the first time within one of its grant. A
 * bucket is filled up to one call's worth before the next is begun: a set with few leases costs one call a
 * heartbeat.
 *
 * Owns leases and batches; lease_set.c finds and makes their scope sets. A set lives while a lease refers to it,
 * and for a heartbeat more.
 */
#include "lease_parts.h"

#include "log.h"
#include "mem.h"

#define IDS_MAX 250 /* a script call (lua/README.md) */

enum verb { VERB_ADMIT, VERB_RENEW, VERB_RELEASE };

/* One script call in flight. */
struct batch {
    struct list_node node; /* in leases->batches */
    struct scope_set *set;
    uint64_t sent_ms;
    unsigned n;
    struct lease *lease[];
};

/* --- one lease ------------------------------------------------------------------------------------------ */

static struct list *list_of(struct lease *l)
{
    struct leases *ls = l->set->leases;

    switch ((enum lease_state)l->state) {
    case LEASE_QUEUED:
        return &l->set->asks;
    case LEASE_UNASKED:
        return &ls->unasked;
    case LEASE_ASKED:
    case LEASE_CANCELLED:
        return &ls->asked;
    case LEASE_HELD:
    case LEASE_LINGERING:
        return &l->set->held[l->bucket];
    case LEASE_LOSING:
        return &ls->losing;
    case LEASE_LOST:
        return &ls->lost;
    case LEASE_OWED:
        return &l->set->owed;
    case LEASE_RELEASING:
        return &ls->releasing;
    case LEASE_GONE:
        break;
    }
    return NULL;
}

#define FROM(s) (1u << LEASE_##s)

static void lease_move(struct lease *l, enum lease_state to)
{
    static const uint16_t legal_from[] = {
        [LEASE_QUEUED] = FROM(GONE) | FROM(ASKED),
        [LEASE_UNASKED] = FROM(GONE),
        [LEASE_ASKED] = FROM(QUEUED),
        [LEASE_CANCELLED] = FROM(ASKED),
        [LEASE_HELD] = FROM(ASKED),
        [LEASE_LINGERING] = FROM(HELD),
        [LEASE_LOSING] = FROM(HELD),
        [LEASE_LOST] = FROM(LOSING),
        [LEASE_OWED] = FROM(ASKED) | FROM(CANCELLED) | FROM(HELD) | FROM(LINGERING) | FROM(LOSING) |
                       FROM(LOST) | FROM(RELEASING),
        [LEASE_RELEASING] = FROM(OWED),
        [LEASE_GONE] = FROM(QUEUED) | FROM(UNASKED) | FROM(ASKED) | FROM(CANCELLED) | FROM(OWED) |
                       FROM(RELEASING),
    };
    struct list *from = list_of(l), *into;

    BUG_ON((legal_from[to] & 1u << l->state) == 0);
    if (l->state == LEASE_LINGERING)
        list_remove(&l->set->leases->lingering, &l->u.due);
    l->state = (uint8_t)to;
    into = list_of(l);
    if (from == into)
        return;
    if (from != NULL)
        list_remove(from, &l->node);
    if (into != NULL)
        list_push_back(into, &l->node);
}

static struct lease *first_lease(const struct list *list)
{
    struct list_node *n = list_first(list);

    return n == NULL ? NULL : container_of(n, struct lease, node);
}

/* Frees it, and lets its set go idle. */
static void lease_forget(struct lease *l)
{
    struct scope_set *set = l->set;
    struct leases *ls = set->leases;

    if (l->state != LEASE_GONE)
        lease_move(l, LEASE_GONE);
    BUG_ON(l->batches != 0);
    mem_free(l);
    ls->alive--;
    if (--set->refs == 0 && set != ls->nowhere) {
        set->idle_ms = loop_now_ms(ls->loop);
        list_push_back(&ls->idle, &set->idle);
    }
}

static void mark_dirty(struct scope_set *set)
{
    struct leases *ls = set->leases;

    if (!list_linked(&set->dirty))
        list_push_back(&ls->dirty, &set->dirty);
    loop_defer_last(ls->loop, &ls->flush);
}

/* Its slot is to be given back, now. */
static void lease_owe(struct lease *l)
{
    lease_move(l, LEASE_OWED);
    l->when_ms = loop_now_ms(l->set->leases->loop);
    mark_dirty(l->set);
}

/*
 * Tells the owner of a lease that did not come to be. It is freed, or owed, whatever the owner does
 * meanwhile.
 */
static void lease_deny(struct lease *l, enum lease_answer answer, unsigned scope, const char *reason,
                       bool owe)
{
    const struct lease_ops *ops = l->u.owner.ops;
    void *owner = l->u.owner.p;
    bool cancelled = l->state == LEASE_CANCELLED;

    if (owe)
        lease_owe(l);
    else
        lease_move(l, LEASE_GONE);
    if (!cancelled)
        ops->on_answer(owner, l, answer, scope, reason);
    if (!owe)
        lease_forget(l);
}

/* --- batches out ---------------------------------------------------------------------------------------- */

static void on_admitted(void *arg, enum redis_status status, const struct redis_value *v);
static void on_renewed(void *arg, enum redis_status status, const struct redis_value *v);
static void on_released(void *arg, enum redis_status status, const struct redis_value *v);

static struct batch *batch_new(struct scope_set *set, size_t n)
{
    struct batch *b = mem_alloc(sizeof(*b) + n * sizeof(struct lease *));

    if (b == NULL)
        return NULL;
    *b = (struct batch){.set = set, .sent_ms = loop_now_ms(set->leases->loop)};
    return b;
}

/* From now on the batch refers to l. */
static void batch_add(struct batch *b, struct lease *l)
{
    l->batches++;
    b->lease[b->n++] = l;
}

static struct lease *batch_take(struct batch *b, unsigned i)
{
    b->lease[i]->batches--;
    return b->lease[i];
}

static void put_keys(struct scope_set *set)
{
    for (size_t i = 0; i < set->n; i++)
        redis_arg(set->leases->redis, set->keys[i]);
}

static void put_caps(struct scope_set *set)
{
    for (size_t i = 0; i < set->n; i++)
        redis_arg_u64(set->leases->redis, set->caps[i]);
}

/* Writes the call for what is in b. False: nothing was sent, b and its leases are the caller's again. */
static bool batch_send(struct batch *b, enum verb verb)
{
    static redis_reply_fn *const on_reply[] = {on_admitted, on_renewed, on_released};
    static const enum redis_script script[] = {REDIS_SCRIPT_ADMIT, REDIS_SCRIPT_RENEW, REDIS_SCRIPT_RELEASE};
    struct scope_set *set = b->set;
    struct leases *ls = set->leases;
    uint64_t half_beat = ls->config->heartbeat_ms / 2;
    bool refresh = set->refreshed_ms == 0 || set->refreshed_ms < ls->connected_ms ||
                   set->refreshed_ms + half_beat <= b->sent_ms;

    redis_begin_script(ls->redis, script[verb], set->n, b->n + (verb == VERB_RELEASE ? 0 : 2u + set->n));
    put_keys(set);
    if (verb != VERB_RELEASE) {
        redis_arg_u64(ls->redis, ls->config->ttl_ms);
        redis_arg_u64(ls->redis, verb == VERB_ADMIT ? refresh : ls->config->strict);
        put_caps(set);
    }
    for (unsigned i = 0; i < b->n; i++)
        redis_arg(ls->redis, lease_id(b->lease[i]));
    if (!redis_send(ls->redis, on_reply[verb], b))
        return false;
    if (verb == VERB_RENEW || (verb == VERB_ADMIT && refresh))
        set->refreshed_ms = b->sent_ms;
    list_push_back(&ls->batches, &b->node);
    return true;
}

/* Renews all of one list. What cannot be sent is tried again at the next tick, or after the reconnect. */
static void send_renewals(struct scope_set *set, struct list *held)
{
    struct list_node *n = held->head.next;
    size_t left = held->length;

    while (left > 0) {
        size_t part = size_min(left, IDS_MAX);
        struct batch *b = batch_new(set, part);

        if (b == NULL) {
            set->renew_all = true;
            return;
        }
        for (left -= part; part > 0; part--, n = n->next)
            batch_add(b, container_of(n, struct lease, node));
        if (!batch_send(b, VERB_RENEW)) {
            for (unsigned i = 0; i < b->n; i++)
                (void)batch_take(b, i);
            mem_free(b);
            set->renew_all = true;
            return;
        }
        set->leases->counters.renewals++;
    }
}

static void set_renew_all(struct scope_set *set, void *arg UNUSED)
{
    set->renew_all = false;
    for (unsigned i = 0; i < LEASE_BUCKETS; i++)
        send_renewals(set, &set->held[i]);
}

/* Sends what is owed. What cannot be sent stays owed, for the next tick or the reconnect. */
static void set_release(struct scope_set *set, void *arg UNUSED)
{
    while (!list_empty(&set->owed)) {
        size_t n = size_min(set->owed.length, IDS_MAX);
        struct batch *b = batch_new(set, n);
        struct list_node *node = set->owed.head.next;

        if (b == NULL)
            return;
        for (; n > 0; n--, node = node->next)
            batch_add(b, container_of(node, struct lease, node));
        if (!batch_send(b, VERB_RELEASE)) {
            for (unsigned i = 0; i < b->n; i++)
                (void)batch_take(b, i);
            mem_free(b);
            return;
        }
        for (unsigned i = 0; i < b->n; i++)
            lease_move(b->lease[i], LEASE_RELEASING);
    }
}

/* Answers those that ask now, not those that their owners ask for in reply. */
static void set_deny_asks(struct scope_set *set, enum lease_answer answer)
{
    for (size_t n = set->asks.length; n > 0 && !list_empty(&set->asks); n--)
        lease_deny(first_lease(&set->asks), answer, 0, "", false);
}

static void set_ask(struct scope_set *set)
{
    struct leases *ls = set->leases;

    while (!list_empty(&set->asks)) {
        size_t n = size_min(set->asks.length, IDS_MAX);
        struct batch *b = batch_new(set, n);
        struct list_node *node = set->asks.head.next;
        bool sent;

        if (b != NULL)
            for (; n > 0; n--, node = node->next)
                batch_add(b, container_of(node, struct lease, node));
        sent = b != NULL && batch_send(b, VERB_ADMIT);
        for (unsigned i = 0; b != NULL && i < b->n; i++) {
            if (sent)
                lease_move(b->lease[i], LEASE_ASKED);
            else
                (void)batch_take(b, i);
        }
        if (!sent) {
            mem_free(b);
            set_deny_asks(set, redis_usable(ls->redis) ? LEASE_NO_MEMORY : LEASE_UNAVAILABLE);
            return;
        }
    }
}

static void deny_unasked(struct leases *ls)
{
    for (size_t n = ls->unasked.length; n > 0 && !list_empty(&ls->unasked); n--)
        lease_deny(first_lease(&ls->unasked), LEASE_UNAVAILABLE, 0, "", false);
}

/*
 * The end of a turn. Only the last pass calls owners; sets that they make dirty are for the flush after this
 * one.
 */
static void flush_run(struct task *t)
{
    struct leases *ls = container_of(t, struct leases, flush);

    if (redis_accepts(ls->redis)) {
        list_for_each_safe (n, &ls->dirty) {
            if (container_of(n, struct scope_set, dirty)->renew_all)
                set_renew_all(container_of(n, struct scope_set, dirty), NULL);
        }
        list_for_each_safe (n, &ls->dirty)
            set_release(container_of(n, struct scope_set, dirty), NULL);
    }
    for (size_t n = ls->dirty.length; n > 0 && !list_empty(&ls->dirty); n--) {
        struct scope_set *set = container_of(list_pop_front(&ls->dirty), struct scope_set, dirty);

        if (!redis_usable(ls->redis))
            set_deny_asks(set, LEASE_UNAVAILABLE);
        else if (loop_now_ms(ls->loop) >= ls->hold_until_ms)
            set_ask(set);
    }
    deny_unasked(ls);
}

/* --- replies -------------------------------------------------------------------------------------------- */

static void batch_free(struct batch *b)
{
    list_remove(&b->set->leases->batches, &b->node);
    mem_free(b);
}

static const char *error_reason(const struct redis_value *v)
{
    if (redis_value_is_error(v, "OOM"))
        return "redis_oom";
    if (redis_value_is_error(v, "WRONGTYPE"))
        return "redis_wrongtype";
    return "redis_error";
}

static void log_error(struct scope_set *set, const char *what, const struct redis_value *v)
{
    struct leases *ls = set->leases;
    uint64_t held_back = 0;
    struct slice text = v == NULL ? SLICE("malformed reply") : redis_value_str(v);

    if (!log_may_repeat(&ls->log_last_s, &ls->log_held_back, &held_back))
        return;
    log_event(LOG_ERROR, "lease", "%s of %.*s%s: %.*s (%llu more held back)", what, (int)set->keys[0].n,
              set->keys[0].p, set->n > 1 ? " and others" : "", (int)size_min(text.n, 200), text.p,
              (unsigned long long)held_back);
}

/* An array of exactly n integers in 0 … max: what our scripts answer. */
static bool codes_are_sane(const struct redis_value *v, size_t n, int64_t max)
{
    if (redis_value_type(v) != REDIS_TYPE_ARRAY || redis_value_count(v) != n)
        return false;
    for (size_t i = 0; i < n; i++) {
        const struct redis_value *code = redis_value_at(v, i);

        if (redis_value_type(code) != REDIS_TYPE_INT || redis_value_int(code) < 0 ||
            redis_value_int(code) > max)
            return false;
    }
    return true;
}

/* An unused bucket would let a set of few leases cost a call each: one is filled before the next. */
static uint8_t bucket_for(const struct scope_set *set)
{
    size_t least = 0;

    for (size_t i = 0; i < LEASE_BUCKETS; i++) {
        size_t b = (set->home + i) % LEASE_BUCKETS;

        if (set->held[b].length < IDS_MAX)
            return (uint8_t)b;
        if (set->held[b].length < set->held[least].length)
            least = b;
    }
    return (uint8_t)least;
}

static void lease_grant(struct lease *l, uint64_t sent_ms)
{
    struct leases *ls = l->set->leases;

    l->bucket = bucket_for(l->set);
    lease_move(l, LEASE_HELD);
    l->when_ms = sent_ms;
    ls->counters.granted++;
    l->u.owner.ops->on_answer(l->u.owner.p, l, LEASE_GRANTED, 0, "");
}

/* The answer to one id, by the code of lua/README.md. */
static void take_code(struct lease *l, int64_t code, uint64_t sent_ms)
{
    if (code > 0) {
        l->set->leases->counters.refused++;
        lease_deny(l, LEASE_FULL, (unsigned)code - 1, "", false);
    } else if (l->state == LEASE_CANCELLED) {
        lease_owe(l);
    } else {
        lease_grant(l, sent_ms);
    }
}

/* Not executed: those who still want it ask again, before those who came later. */
static void ask_again(struct batch *b)
{
    for (unsigned i = b->n; i > 0; i--) {
        struct lease *l = batch_take(b, i - 1);

        if (l->state == LEASE_CANCELLED) {
            lease_forget(l);
            continue;
        }
        lease_move(l, LEASE_QUEUED);
        list_remove(&b->set->asks, &l->node);
        list_push_front(&b->set->asks, &l->node);
    }
    mark_dirty(b->set);
}

static void on_admitted(void *arg, enum redis_status status, const struct redis_value *v)
{
    struct batch *b = arg;
    struct leases *ls = b->set->leases;
    bool sane = status == REDIS_OK && codes_are_sane(v, b->n, b->set->n);

    if (!sane)
        b->set->refreshed_ms = 0;
    if (status == REDIS_AGAIN) {
        ask_again(b);
    } else if (status == REDIS_UNKNOWN) {
        ls->counters.unknown += b->n;
        for (unsigned i = 0; i < b->n; i++)
            lease_deny(batch_take(b, i), LEASE_UNKNOWN, 0, "", true);
    } else if (status == REDIS_ERROR && !redis_usable(ls->redis)) {
        for (unsigned i = 0; i < b->n; i++)
            lease_deny(batch_take(b, i), LEASE_UNAVAILABLE, 0, "", false);
    } else if (!sane) { /* an error grants nothing (lua/README.md); what is no answer at all may have */
        const char *reason = status == REDIS_ERROR ? error_reason(v) : "redis_error";

        log_error(b->set, "admit", status == REDIS_ERROR ? v : NULL);
        ls->counters.errors += b->n;
        for (unsigned i = 0; i < b->n; i++)
            lease_deny(batch_take(b, i), LEASE_ERROR, 0, reason, status != REDIS_ERROR);
    } else {
        for (unsigned i = 0; i < b->n; i++)
            take_code(batch_take(b, i), redis_value_int(redis_value_at(v, i)), b->sent_ms);
    }
    batch_free(b);
}

/* Calls on_lost of those in ls->losing. Owners may end any lease meanwhile. */
static void tell_lost(struct leases *ls)
{
    struct lease *l;

    while ((l = first_lease(&ls->losing)) != NULL) {
        lease_move(l, LEASE_LOST);
        ls->counters.lost++;
        l->u.owner.ops->on_lost(l->u.owner.p);
    }
}

static void take_renewal(struct lease *l, int64_t code, uint64_t sent_ms)
{
    struct leases *ls = l->set->leases;
    bool lingering = l->state == LEASE_LINGERING;

    if (!lingering && l->state != LEASE_HELD)
        return; /* ended since: its release is behind this renewal */
    if (code == 1)
        ls->counters.restored++;
    else if (code == 2)
        ls->counters.over++;
    if (code == 3 && lingering)
        lease_owe(l);
    else if (code == 3)
        lease_move(l, LEASE_LOSING);
    else if (!lingering)
        l->when_ms = sent_ms;
}

static void on_renewed(void *arg, enum redis_status status, const struct redis_value *v)
{
    struct batch *b = arg;
    struct leases *ls = b->set->leases;
    bool sane = status == REDIS_OK && codes_are_sane(v, b->n, 3);

    if (!sane)
        b->set->refreshed_ms = 0;
    if (status == REDIS_AGAIN) {
        b->set->renew_all = true;
        mark_dirty(b->set);
    } else if (!sane && status != REDIS_UNKNOWN) {
        log_error(b->set, "renewal", status == REDIS_ERROR ? v : NULL);
    }
    for (unsigned i = 0; i < b->n; i++) {
        struct lease *l = batch_take(b, i);

        if (sane)
            take_renewal(l, redis_value_int(redis_value_at(v, i)), b->sent_ms);
    }
    batch_free(b);
    tell_lost(ls);
}

static void on_released(void *arg, enum redis_status status, const struct redis_value *v)
{
    struct batch *b = arg;
    struct leases *ls = b->set->leases;

    if (status == REDIS_ERROR && redis_usable(ls->redis))
        log_error(b->set, "release", v);
    if (status == REDIS_AGAIN)
        mark_dirty(b->set);
    for (unsigned i = 0; i < b->n; i++) {
        struct lease *l = batch_take(b, i);

        if (status == REDIS_OK) {
            ls->counters.released++;
            lease_forget(l);
        } else {
            lease_move(l, LEASE_OWED); /* keeps its age; repeated by the tick, or after the reconnect */
        }
    }
    batch_free(b);
}

/* --- the connection ------------------------------------------------------------------------------------- */

static void on_probed(void *arg, enum redis_status status, const struct redis_value *v)
{
    struct leases *ls = arg;

    if (status == REDIS_ERROR && redis_usable(ls->redis))
        log_error(ls->nowhere, "probe", v);
}

/*
 * Can this server do what admit needs at all: write, tell the time, under our ACL, on our keys? An admit of
 * nobody says so before anyone has to be refused: a replica answers READONLY, and the breaker stays open.
 */
static void probe(struct leases *ls)
{
    redis_begin_script(ls->redis, REDIS_SCRIPT_ADMIT, 1, 3);
    redis_arg(ls->redis, ls->nowhere->keys[0]);
    redis_arg_u64(ls->redis, ls->config->ttl_ms);
    redis_arg_u64(ls->redis, 0);
    redis_arg_u64(ls->redis, 0);
    if (!redis_send(ls->redis, on_probed, ls))
        return; /* no memory: the first admit will tell */
}

/*
 * So long nobody is let in at a server that has forgotten who holds what: those who hold something may still be in
 * the last step of their backoff.
 */
static uint64_t pause_ms(const struct leases *ls)
{
    uint64_t others_ms = redis_reconnect_ms(ls->redis);

    return ls->config->heartbeat_ms > others_ms ? ls->config->heartbeat_ms : others_ms;
}

static void on_ready(void *owner)
{
    struct leases *ls = owner;

    ls->connected_ms = loop_now_ms(ls->loop);
    if (redis_server_changed(ls->redis)) /* a pause that is running goes on through a lost connection */
        ls->hold_until_ms = ls->connected_ms + pause_ms(ls);
    lease_sets_each(ls, set_renew_all, NULL);
    lease_sets_each(ls, set_release, NULL);
    probe(ls);
}

static void set_wake_asks(struct scope_set *set, void *arg UNUSED)
{
    if (!list_empty(&set->asks))
        mark_dirty(set);
}

static void on_broken(void *owner)
{
    lease_sets_each(owner, set_wake_asks, NULL); /* to be told at the end of the turn */
}

static const struct redis_ops redis_ops = {.on_ready = on_ready, .on_broken = on_broken};

/* --- time ----------------------------------------------------------------------------------------------- */

static uint64_t tick_ms(const struct leases *ls)
{
    uint64_t ms = ls->config->heartbeat_ms / LEASE_BUCKETS;

    return ms == 0 ? 1 : ms;
}

/* What is owed for so long that it has expired by itself is owed no more. */
static void set_expire_owed(struct scope_set *set)
{
    struct leases *ls = set->leases;
    uint64_t now_ms = loop_now_ms(ls->loop), age_ms = ls->config->ttl_ms + ls->config->heartbeat_ms;

    list_for_each_safe (n, &set->owed) {
        struct lease *l = container_of(n, struct lease, node);

        if (l->batches == 0 && now_ms - l->when_ms > age_ms) {
            ls->counters.forgotten++;
            lease_forget(l);
        }
    }
}

/* strict: those that others may take over one heartbeat from now. */
static void set_find_lost(struct scope_set *set)
{
    struct leases *ls = set->leases;
    uint64_t now_ms = loop_now_ms(ls->loop), age_ms = ls->config->ttl_ms - ls->config->heartbeat_ms;

    for (unsigned i = 0; i < LEASE_BUCKETS; i++) {
        list_for_each_safe (n, &set->held[i]) {
            struct lease *l = container_of(n, struct lease, node);

            if (l->state == LEASE_HELD && now_ms >= l->when_ms + age_ms)
                lease_move(l, LEASE_LOSING);
        }
    }
}

static void set_tick(struct scope_set *set, void *arg)
{
    struct leases *ls = set->leases;
    bool usable = redis_usable(ls->redis);

    if (usable)
        send_renewals(set, &set->held[*(unsigned *)arg]);
    if (ls->config->strict)
        set_find_lost(set);
    set_expire_owed(set);
    if (usable && (set->renew_all || !list_empty(&set->owed) || !list_empty(&set->asks)))
        mark_dirty(set);
}

static void free_idle_sets(struct leases *ls, uint64_t older_than_ms)
{
    struct list_node *n;

    while ((n = list_first(&ls->idle)) != NULL &&
           container_of(n, struct scope_set, idle)->idle_ms < older_than_ms)
        lease_set_free(container_of(n, struct scope_set, idle));
}

/* Renews the bucket whose turn it is; several, after a stall, but none twice. Rests while there is no set. */
static void tick_fired(struct deadline *d)
{
    struct leases *ls = container_of(d, struct leases, tick);
    uint64_t now_ms = loop_now_ms(ls->loop);

    for (unsigned i = 0; i < LEASE_BUCKETS && ls->tick_due_ms <= now_ms; i++) {
        lease_sets_each(ls, set_tick, &ls->tick_bucket);
        ls->tick_bucket = (ls->tick_bucket + 1) % LEASE_BUCKETS;
        ls->tick_due_ms += tick_ms(ls);
    }
    if (ls->tick_due_ms <= now_ms)
        ls->tick_due_ms = now_ms + tick_ms(ls);
    if (now_ms > ls->config->heartbeat_ms)
        free_idle_sets(ls, now_ms - ls->config->heartbeat_ms);
    if (ls->n_sets > 0) {
        bool armed = deadline_set(ls->loop, &ls->tick,
                                  ls->tick_due_ms); /* it has just fired: its place is free */

        BUG_ON(!armed);
    }
    tell_lost(ls);
}

static bool tick_start(struct leases *ls)
{
    if (deadline_armed(&ls->tick))
        return true;
    ls->tick_due_ms = loop_now_ms(ls->loop) + tick_ms(ls);
    return deadline_set(ls->loop, &ls->tick, ls->tick_due_ms);
}

static void linger_fired(struct deadline *d)
{
    struct leases *ls = container_of(d, struct leases, linger);
    uint64_t now_ms = loop_now_ms(ls->loop);
    struct list_node *n;

    while ((n = list_first(&ls->lingering)) != NULL) {
        struct lease *l = container_of(n, struct lease, u.due);

        if (l->when_ms > now_ms) {
            bool armed = deadline_set(ls->loop, &ls->linger, l->when_ms);

            BUG_ON(!armed); /* it has just fired: its place is free */
            return;
        }
        lease_owe(l);
    }
}

/* Delays are few and much alike: the place is found from the end. */
static void lease_linger(struct lease *l, uint64_t delay_ms)
{
    struct leases *ls = l->set->leases;
    uint64_t now_ms = loop_now_ms(ls->loop),
             due_ms = delay_ms > UINT64_MAX - now_ms ? UINT64_MAX : now_ms + delay_ms;
    struct list_node *pos = &ls->lingering.head;

    while (pos->prev != &ls->lingering.head && container_of(pos->prev, struct lease, u.due)->when_ms > due_ms)
        pos = pos->prev;
    if (pos->prev == &ls->lingering.head && !deadline_set(ls->loop, &ls->linger, due_ms)) {
        lease_owe(l); /* no memory: at once */
        return;
    }
    lease_move(l, LEASE_LINGERING);
    l->when_ms = due_ms;
    l->u.due = (struct list_node){0};
    list_insert_before_(&ls->lingering, pos, &l->u.due);
}

/* --- for the owner -------------------------------------------------------------------------------------- */

static struct lease *lease_new(struct leases *ls)
{
    char id[LEASE_ID_MAX];
    size_t n = ls->instance_n;
    struct lease *l;

    memcpy(id, ls->instance, n);
    id[n++] = '/';
    n += str_put_hex(id + n, ++ls->sequence);
    l = mem_alloc(sizeof(*l) + n);
    if (l == NULL)
        return NULL;
    *l = (struct lease){.state = LEASE_GONE, .id_n = (uint8_t)n};
    memcpy(l->id, id, n);
    return l;
}

struct lease *lease_ask(struct leases *ls, const struct lease_scope *scopes, size_t n,
                        const struct lease_ops *ops, void *owner)
{
    bool usable = redis_usable(ls->redis);
    struct scope_set *set;
    struct lease *l;

    BUG_ON(n == 0 || n > LEASE_SCOPES_MAX);
    if (usable && !tick_start(ls))
        return NULL;
    l = lease_new(ls);
    if (l == NULL)
        return NULL;
    set = usable ? lease_set_for(ls, scopes, n) : ls->nowhere;
    if (set == NULL) {
        mem_free(l);
        return NULL;
    }
    if (set->refs++ == 0 && list_linked(&set->idle))
        list_remove(&ls->idle, &set->idle);
    ls->alive++;
    l->set = set;
    l->u.owner.ops = ops;
    l->u.owner.p = owner;
    lease_move(l, usable ? LEASE_QUEUED : LEASE_UNASKED);
    if (usable)
        mark_dirty(set);
    else
        loop_defer_last(ls->loop, &ls->flush);
    return l;
}

void lease_end(struct lease *l, uint64_t delay_ms)
{
    switch ((enum lease_state)l->state) {
    case LEASE_QUEUED:
    case LEASE_UNASKED:
        lease_forget(l);
        return;
    case LEASE_ASKED:
        lease_move(l, LEASE_CANCELLED);
        return;
    case LEASE_HELD:
        if (delay_ms > 0)
            lease_linger(l, delay_ms);
        else
            lease_owe(l);
        return;
    case LEASE_LOSING:
    case LEASE_LOST:
        lease_owe(l); /* it may hold a slot still: lost by time */
        return;
    default:
        BUG_ON(true); /* ended twice */
    }
}

struct slice lease_id(const struct lease *l)
{
    return (struct slice){l->id, l->id_n};
}

bool leases_usable(const struct leases *ls)
{
    return redis_usable(ls->redis);
}

const char *leases_trouble(const struct leases *ls)
{
    return redis_trouble(ls->redis);
}

bool leases_quiet(const struct leases *ls)
{
    return ls->alive == 0 && list_empty(&ls->batches);
}

size_t leases_held(const struct leases *ls)
{
    size_t n = 0;

    for (size_t i = 0; i < ls->slots; i++)
        for (const struct scope_set *set = ls->table[i]; set != NULL; set = set->chain)
            for (unsigned b = 0; b < LEASE_BUCKETS; b++)
                n += set->held[b].length;
    return n;
}

size_t leases_owed(const struct leases *ls)
{
    size_t n = ls->releasing.length;

    for (size_t i = 0; i < ls->slots; i++)
        for (const struct scope_set *set = ls->table[i]; set != NULL; set = set->chain)
            n += set->owed.length;
    return n;
}

size_t leases_in_flight(const struct leases *ls)
{
    return redis_in_flight(ls->redis);
}

const struct leases_counters *leases_counters(const struct leases *ls)
{
    return &ls->counters;
}

const struct redis_counters *leases_redis_counters(const struct leases *ls)
{
    return redis_counters(ls->redis);
}

/* --- life ----------------------------------------------------------------------------------------------- */

/* The probe's key is one that no limit can have: their scopes do not end in a slash. */
static struct scope_set *nowhere_new(struct leases *ls)
{
    static const struct lease_scope scope = {.name = "probe/", .name_n = 6};
    struct scope_set *set = mem_zalloc(sizeof(*set) + strlen(ls->prefix) + 64);

    if (set == NULL)
        return NULL;
    set->leases = ls;
    set->n = 1;
    (void)lease_put_key(set->text, ls->prefix, &scope, &set->keys[0]);
    return set;
}

struct leases *leases_new(struct loop *l, struct config *c, const struct config_redis *conf,
                          struct tls_context *tls, const char *instance)
{
    struct leases *ls = mem_zalloc(sizeof(*ls));

    if (ls == NULL)
        return NULL;
    ls->loop = l;
    ls->instance_n = strlen(instance);
    BUG_ON(ls->instance_n > LEASE_INSTANCE_MAX);
    memcpy(ls->instance, instance, ls->instance_n);
    list_init(&ls->unasked);
    list_init(&ls->asked);
    list_init(&ls->losing);
    list_init(&ls->lost);
    list_init(&ls->releasing);
    list_init(&ls->lingering);
    list_init(&ls->batches);
    list_init(&ls->dirty);
    list_init(&ls->idle);
    task_init(&ls->flush, flush_run);
    deadline_init(&ls->tick, tick_fired);
    deadline_init(&ls->linger, linger_fired);
    ls->prefix = mem_strndup(conf->prefix, strlen(conf->prefix));
    if (ls->prefix == NULL)
        goto no_prefix;
    ls->slots = LEASE_SETS_MIN;
    ls->table = mem_zalloc(ls->slots * sizeof(struct scope_set *));
    if (ls->table == NULL)
        goto no_table;
    ls->nowhere = nowhere_new(ls);
    if (ls->nowhere == NULL)
        goto no_nowhere;
    ls->config = config_ref(c);
    ls->redis = redis_new(l, c, conf, tls, &redis_ops, ls);
    if (ls->redis == NULL)
        goto no_redis;
    return ls;

no_redis:
    config_unref(ls->config);
    mem_free(ls->nowhere);
no_nowhere:
    mem_free(ls->table);
no_table:
    mem_free(ls->prefix);
no_prefix:
    mem_free(ls);
    return NULL;
}

void leases_reconfigure(struct leases *ls, struct config *c)
{
    struct config *old = ls->config;

    ls->config = config_ref(c);
    lease_sets_each(ls, lease_set_recap, NULL);
    config_unref(old);
}

void leases_set_redis(struct leases *ls, struct config *c, const struct config_redis *conf,
                      struct tls_context *tls)
{
    redis_reconfigure(ls->redis, c, conf, tls);
}

static void free_leases_in(struct list *list)
{
    struct list_node *n;

    while ((n = list_pop_front(list)) != NULL)
        mem_free(container_of(n, struct lease, node));
}

static void set_drop(struct scope_set *set)
{
    free_leases_in(&set->asks);
    free_leases_in(&set->owed);
    for (unsigned i = 0; i < LEASE_BUCKETS; i++)
        free_leases_in(&set->held[i]);
    lease_set_free(set);
}

void leases_free(struct leases *ls)
{
    struct list *lists[] = {&ls->unasked, &ls->asked, &ls->losing, &ls->lost, &ls->releasing};
    struct list_node *n;

    redis_free(ls->redis);
    deadline_cancel(ls->loop, &ls->tick);
    deadline_cancel(ls->loop, &ls->linger);
    task_cancel(ls->loop, &ls->flush);
    while ((n = list_pop_front(&ls->batches)) != NULL)
        mem_free(container_of(n, struct batch, node));
    for (size_t i = 0; i < ARRAY_LEN(lists); i++)
        free_leases_in(lists[i]);
    for (size_t i = 0; i < ls->slots; i++)
        while (ls->table[i] != NULL)
            set_drop(ls->table[i]);
    config_unref(ls->config);
    mem_free(ls->nowhere);
    mem_free(ls->table);
    mem_free(ls->prefix);
    mem_free(ls);
}
