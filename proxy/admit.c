/*
 * admit.c - outage policy, refusals, and the estimate behind retry-after.
 *
 * The estimate: a slot of a limit comes free every hold / cap on average, and those who were refused
 * lately will come back for it too. So the one refused now is told hold * (1 + refused lately) / cap, where
 * `hold` is a moving average of how long calls of this limit kept their slots here, and `refused lately` counts
 * refusals since the last grant, halved at each grant. With jitter, so that those refused together
 * do not return together.
 */
#include "admit.h"

#include "hash.h"
#include "mem.h"
#include "metrics.h"

#define RETRY_MIN_MS 250
#define RETRY_MAX_MS 60000
#define OUTAGE_RETRY_MS 1000 /* recovery is noticed within half a second */
#define HOLD_WEIGHT 8        /* a new holding time counts for an eighth */

struct estimate {
    uint64_t hold_ms;
    uint64_t refused;
};

struct admit {
    struct loop *loop;
    struct leases *leases;
    enum config_outage on_outage;
    uint64_t random;
    struct estimate estimates[METRICS_LIMITS_MAX]; /* by metrics row: it survives reloads */
};

struct admit *admit_new(struct loop *l, const struct config_redis *redis, struct leases *leases)
{
    struct admit *a = mem_must_zalloc(sizeof(*a));

    a->loop = l;
    a->leases = leases;
    a->on_outage = redis->on_outage;
    hash_random(&a->random, sizeof(a->random));
    a->random |= 1;
    return a;
}

void admit_reconfigure(struct admit *a, const struct config_redis *redis)
{
    a->on_outage = redis->on_outage;
}

void admit_free(struct admit *a)
{
    mem_free(a);
}

/* xorshift64: only to spread retries. */
static uint64_t next_random(struct admit *a)
{
    a->random ^= a->random << 13;
    a->random ^= a->random >> 7;
    a->random ^= a->random << 17;
    return a->random;
}

/* Within +-25 % of ms. */
static uint64_t with_jitter(struct admit *a, uint64_t ms)
{
    return ms - ms / 4 + next_random(a) % (ms / 2 + 1);
}

static uint64_t retry_after_ms(struct admit *a, unsigned row, uint32_t cap)
{
    const struct estimate *e = &a->estimates[row];
    uint64_t hold = e->hold_ms == 0 ? 1000 : e->hold_ms;
    uint64_t ms = cap == 0 ? RETRY_MAX_MS / 2 : hold * (1 + e->refused) / cap;

    ms = with_jitter(a, ms < RETRY_MIN_MS ? RETRY_MIN_MS : ms > RETRY_MAX_MS ? RETRY_MAX_MS : ms);
    return ms < RETRY_MIN_MS ? RETRY_MIN_MS : ms > RETRY_MAX_MS ? RETRY_MAX_MS : ms;
}

static unsigned row_of(const struct admission *m, size_t i)
{
    return m->snapshot_->limit_rows[m->limits_[i]];
}

static void refuse_full(struct admission *m, unsigned scope, struct admit_refusal *why)
{
    const struct config_limit *limit = &m->snapshot_->config->limits[m->limits_[scope]];
    unsigned row = row_of(m, scope);

    m->admit_->estimates[row].refused++;
    metrics_limit_refused(row);
    why->outcome = OUTCOME_LIMIT_FULL;
    why->reason = outcome_info(OUTCOME_LIMIT_FULL)->word;
    why->limit = limit->name;
    why->retry_after_ms = retry_after_ms(m->admit_, row, m->caps_[scope]);
}

static void refuse_outage(struct admission *m, enum outcome outcome, const char *reason,
                          struct admit_refusal *why)
{
    why->outcome = outcome;
    why->reason = reason;
    why->limit = "";
    why->retry_after_ms = with_jitter(m->admit_, OUTAGE_RETRY_MS);
}

static void count_held(struct admission *m, int delta)
{
    for (size_t i = 0; i < m->n_; i++)
        metrics_limit_held(row_of(m, i), delta);
}

static void granted(struct admission *m)
{
    m->state = ADMISSION_HELD;
    m->granted_ms_ = loop_now_ms(m->admit_->loop);
    count_held(m, 1);
    for (size_t i = 0; i < m->n_; i++) {
        metrics_limit_granted(row_of(m, i));
        m->admit_->estimates[row_of(m, i)].refused /= 2;
    }
    m->ops_->on_granted(m->owner_);
}

/* The outage policy: true when the call may pass without a lease. */
static bool pass_uncounted(struct admission *m)
{
    if (m->admit_->on_outage != CONFIG_OUTAGE_ALLOW)
        return false;
    m->state = ADMISSION_UNCOUNTED;
    metrics_add(METRICS_UNCOUNTED, 1);
    return true;
}

static void on_answer(void *owner, struct lease *l UNUSED, enum lease_answer answer, unsigned scope,
                      const char *reason)
{
    struct admission *m = owner;
    struct admit_refusal why = {0};

    BUG_ON(m->state != ADMISSION_ASKED);
    if (answer == LEASE_GRANTED) {
        granted(m);
        return;
    }
    m->lease_ = NULL;
    m->state = ADMISSION_NONE;
    switch (answer) {
    case LEASE_FULL:
        refuse_full(m, scope, &why);
        break;
    case LEASE_ERROR:
        refuse_outage(m, OUTCOME_REDIS_ERROR, reason, &why);
        break;
    case LEASE_NO_MEMORY:
        refuse_outage(m, OUTCOME_NO_MEMORY, outcome_info(OUTCOME_NO_MEMORY)->word, &why);
        break;
    case LEASE_UNKNOWN:
    case LEASE_UNAVAILABLE:
    default:
        if (pass_uncounted(m)) {
            m->ops_->on_granted(m->owner_);
            return;
        }
        refuse_outage(m, OUTCOME_REDIS_UNAVAILABLE, outcome_info(OUTCOME_REDIS_UNAVAILABLE)->word, &why);
        break;
    }
    m->ops_->on_refused(m->owner_, &why);
}

static void on_lost(void *owner)
{
    struct admission *m = owner;

    m->ops_->on_lost(m->owner_);
}

static const struct lease_ops lease_ops = {.on_answer = on_answer, .on_lost = on_lost};

enum admit_result admit_begin(struct admit *a, struct admission *m, const struct snapshot *s,
                              const struct lease_scope *scopes, size_t n, const struct admission_ops *ops,
                              void *owner, struct admit_refusal *why)
{
    BUG_ON(m->state != ADMISSION_NONE || n > LEASE_SCOPES_MAX);
    m->admit_ = a;
    m->ops_ = ops;
    m->owner_ = owner;
    m->snapshot_ = s;
    m->n_ = (uint8_t)n;
    for (size_t i = 0; i < n; i++) {
        m->limits_[i] = (uint16_t)scopes[i].limit->index;
        m->caps_[i] = scopes[i].cap;
    }
    if (n == 0)
        return ADMIT_GRANTED;
    if (!leases_usable(a->leases)) { /* the short circuit: no Redis traffic, no waiting */
        if (pass_uncounted(m))
            return ADMIT_GRANTED;
        refuse_outage(m, OUTCOME_REDIS_UNAVAILABLE, outcome_info(OUTCOME_REDIS_UNAVAILABLE)->word, why);
        return ADMIT_REFUSED;
    }
    m->lease_ = lease_ask(a->leases, scopes, n, &lease_ops, m);
    if (m->lease_ == NULL) {
        refuse_outage(m, OUTCOME_NO_MEMORY, outcome_info(OUTCOME_NO_MEMORY)->word, why);
        return ADMIT_REFUSED;
    }
    m->state = ADMISSION_ASKED;
    return ADMIT_PENDING;
}

void admission_end(struct admission *m, uint64_t delay_ms)
{
    uint8_t was = m->state;

    m->state = ADMISSION_NONE;
    if (was == ADMISSION_HELD) {
        uint64_t held_ms = loop_now_ms(m->admit_->loop) - m->granted_ms_;

        count_held(m, -1);
        for (size_t i = 0; i < m->n_; i++) {
            struct estimate *e = &m->admit_->estimates[row_of(m, i)];

            e->hold_ms = e->hold_ms == 0 ? held_ms + 1
                                         : (e->hold_ms * (HOLD_WEIGHT - 1) + held_ms) / HOLD_WEIGHT;
        }
    }
    if (m->lease_ != NULL) {
        lease_end(m->lease_, was == ADMISSION_HELD ? delay_ms : 0);
        m->lease_ = NULL;
    }
}

struct slice admission_lease_id(const struct admission *m)
{
    return m->lease_ == NULL ? (struct slice){NULL, 0} : lease_id(m->lease_);
}
