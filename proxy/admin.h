/*
 * admin.h - the admin listener, a thread of its own: /healthz, /readyz, /metrics. One table of
 * endpoints; a new one is a row. It shares nothing with the workers but what they publish.
 */
#ifndef LG_ADMIN_H
#define LG_ADMIN_H

#include "snapshot.h"
#include "worker.h"

struct admin;

/* What /readyz and the rest are told by the process. All fields are read by the admin thread, atomically. */
struct admin_view {
    struct worker **workers; /* fixed from boot to exit */
    size_t n_workers;
    bool draining; /* atomic */
};

/* Binds the listener of the snapshot's `admin` section. Main thread, at boot. NULL: *why says what failed. */
struct admin *admin_new(struct snapshot *s, const struct admin_view *view, struct buf *why);
void admin_start(struct admin *a);
/* Any thread: token and policy of a newer snapshot from now on (its own reference). The address stays. False: no memory. */
MUST_CHECK bool admin_reload(struct admin *a, struct snapshot *s);
/* Stops the thread and frees everything. Main thread. */
void admin_stop(struct admin *a);
uint16_t admin_port(const struct admin *a);

#endif
