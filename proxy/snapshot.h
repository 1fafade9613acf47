/*
 * snapshot.h - a configuration with everything that was made from it once for all
 * loops: TLS contexts and metric rows. Immutable, counted by its users.
 */
#ifndef LG_SNAPSHOT_H
#define LG_SNAPSHOT_H

#include "config.h"
#include "tls.h"

struct snapshot {
    struct config *config;
    struct tls_context **listen_tls;   /* one a listener; NULL: plain */
    struct tls_context **upstream_tls; /* one an upstream; NULL: plain */
    struct tls_context **redis_tls;    /* one a Redis; NULL: plain */
    unsigned *limit_rows;              /* metrics row of each limit */
    unsigned references_;
};

/* Takes over the caller's reference to c, also on failure. NULL: *why says what cannot be used (a certificate, …). */
struct snapshot *snapshot_new(struct config *c, struct buf *why);
struct snapshot *snapshot_ref(struct snapshot *s);
/* Any thread. */
void snapshot_unref(struct snapshot *s);

#endif
