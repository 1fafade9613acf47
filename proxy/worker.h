/*
 * worker.h - one thread that serves: its loop, listeners, clients, calls, leases and
 * pools. Workers share nothing but the snapshot and the few counters of service_shared.
 *
 *   states   made ─► serving ─► draining ─► done
 *            worker_new  worker_start  worker_drain   worker_join
 */
#ifndef LG_WORKER_H
#define LG_WORKER_H

#include "service.h"

struct worker;

/*
 * Makes the loop, binds the listeners and begins to connect to Redis; serves nothing yet. ports[i]: 0, or the
 * port that an earlier worker got for listener i; filled in. Main thread, at boot. NULL: *why says what failed.
 */
struct worker *worker_new(unsigned index, struct snapshot *s, struct service_shared *shared, uint16_t *ports,
                          struct buf *why);
/* Begins to serve, in a thread of its own. */
void worker_start(struct worker *w);
/* Any thread: serve new calls under this snapshot. Takes its own reference. False: no memory. */
MUST_CHECK bool worker_reload(struct worker *w, struct snapshot *s);
/*
 * Any thread: accept nothing new, let calls end, at most until drain_timeout; called again: end them now. Then
 * releases everything and stops.
 */
void worker_drain(struct worker *w);
/* Waits until the thread has ended and frees it. Main thread. */
void worker_join(struct worker *w);

/* Any thread: why calls that need a lease would be refused now; "" when they would not. Static text. */
const char *worker_trouble(const struct worker *w);
/* Any thread: calls running, for the progress of a drain. */
size_t worker_calls(const struct worker *w);
bool worker_done(const struct worker *w);

#endif
