/*
 * admit.h - admission of a call: may it start, and if not, what is it told.
 *
 * Between the call, which knows nothing of Redis, and the leases, which know nothing of policy. Here
 * live the outage policy, the words of a refusal, and the estimate of when to come back.
 * One `struct admit` per loop; its leases outlive every configuration.
 */
#ifndef LG_ADMIT_H
#define LG_ADMIT_H

#include "lease.h"
#include "outcome.h"
#include "snapshot.h"

struct admit;

struct admit_refusal {
    enum outcome outcome;
    const char *reason; /* x-leasegate-reason; static */
    const char *limit;  /* the limit's name, of the snapshot; "": none */
    uint64_t retry_after_ms;
};

struct admission_ops {
    void (*on_granted)(void *owner);
    void (*on_refused)(void *owner, const struct admit_refusal *why);
    void (*on_lost)(void *owner); /* strict: the slot is gone, the call must end */
};

enum admission_state { ADMISSION_NONE, ADMISSION_ASKED, ADMISSION_HELD, ADMISSION_UNCOUNTED };

/* Embedded in the call. */
struct admission {
    struct admit *admit_;
    struct lease *lease_;
    const struct admission_ops *ops_;
    void *owner_;
    uint64_t granted_ms_;
    const struct snapshot *snapshot_;
    uint16_t limits_[LEASE_SCOPES_MAX]; /* index of each limit in the snapshot */
    uint32_t caps_[LEASE_SCOPES_MAX];   /* of its scopes, overrides applied */
    uint8_t n_;
    uint8_t state; /* enum admission_state */
};

enum admit_result {
    ADMIT_GRANTED, /* at once: nothing counts this call, or the outage policy lets it pass */
    ADMIT_PENDING, /* one of the ops follows on a later turn */
    ADMIT_REFUSED, /* at once, *why says so; the admission is over */
};

struct admit *admit_new(struct loop *l, const struct config_redis *redis, struct leases *leases);
/* A newer configuration: its outage policy from now on. */
void admit_reconfigure(struct admit *a, const struct config_redis *redis);
void admit_free(struct admit *a);

/*
 * Asks for slots in all n scopes. `owner` gets the ops while the admission is pending or held. The
 * snapshot must outlive the admission (the call holds it).
 */
enum admit_result admit_begin(struct admit *a, struct admission *m, const struct snapshot *s,
                              const struct lease_scope *scopes, size_t n, const struct admission_ops *ops,
                              void *owner, struct admit_refusal *why);

/* The call has truly ended, or no longer wants to begin: any state, idempotent. No op comes afterwards. */
void admission_end(struct admission *m, uint64_t delay_ms);

/* "<instance>/<sequence>", empty when the call holds no lease. */
struct slice admission_lease_id(const struct admission *m);

#endif
