/*
 * upool.h - connections to upstreams: resolve, dial, keep idle ones, hand them out.
 * One pool per upstream and loop.
 *
 * A borrowed connection belongs to one exchange. It comes back clean (reusable)
 * or is closed. An idle connection is read all the time: any byte or end retires
 * it (cases H101), so what a call gets is alive as far as the kernel knows.
 */
#ifndef LG_UPOOL_H
#define LG_UPOOL_H

#include "config.h"
#include "stream.h"

struct upool; /* one upstream on one loop */
struct uconn; /* one connection; its stream lives and dies with it */
struct udial; /* one wish for a connection */

/*
 * `tls`: NULL for http upstreams; the pool takes a reference. The snapshot that holds `u` must outlive the
 * pool (the pool takes a reference to c).
 */
struct upool *upool_new(struct loop *l, struct config *c, const struct config_upstream *u,
                        struct tls_context *tls);
/*
 * Closes idle connections at once; goes away when the last borrowed connection and wish are gone. For reload
 * and exit.
 */
void upool_retire(struct upool *p);

enum udial_result {
    UDIAL_OK,
    UDIAL_RESOLVE_FAILED,
    UDIAL_REFUSED, /* no address took the connection */
    UDIAL_TLS_FAILED,
    UDIAL_TIMEOUT, /* connect_timeout over all addresses and TLS */
    UDIAL_NO_MEMORY,
};

struct uconn_ops { /* of the exchange that borrows it; static const, given with the wish */
    /*
     * `how` UDIAL_OK: the exchange owns `c` now. Otherwise c is NULL and `detail` says more (for the log).
     * Comes once, never from inside upool_dial. The wish is gone.
     */
    void (*on_dialed)(void *owner, enum udial_result how, struct uconn *c, const char *detail);
    void (*on_data)(void *owner, char *bytes, size_t n);
    void (*on_end)(void *owner, enum stream_end how);
    void (*on_drain)(void *owner);
    void (*on_error)(void *owner, int error, const char *detail);
};

/*
 * Wishes for a connection: the freshest idle one unless fresh_only, otherwise a new one (addresses tried in
 * turn, RFC 8305 in spirit: the next address after a failure or 250 ms). NULL: no memory.
 */
struct udial *upool_dial(struct upool *p, bool fresh_only, const struct uconn_ops *ops, void *owner);
/* Takes the wish back; no callback comes. A connection in the making is kept for the pool if it succeeds. */
void udial_cancel(struct udial *d);
/*
 * The quick way: an idle connection at once, or NULL (then upool_dial). Saves a turn on the hot path.
 */
struct uconn *upool_take_idle(struct upool *p, const struct uconn_ops *ops, void *owner);

struct stream *uconn_stream(struct uconn *c);
/* It had served another call before this one. */
bool uconn_reused(const struct uconn *c);
/* Gives it back: `clean` and young enough and room in the pool: kept; else closed. The owner forgets c. */
void uconn_return(struct uconn *c, bool clean);

/* For gauges and tests. */
size_t upool_idle(const struct upool *p);
size_t upool_borrowed(const struct upool *p);

#endif
