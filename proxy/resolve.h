/*
 * resolve.h - the addresses of one host, kept fresh for whoever dials it.
 *
 * A literal address is its own answer and never asked for. A name is asked for when somebody wants it and
 * the last answer is older than the interval: in libuv's threads, one question in flight a resolver, the
 * old answer serving meanwhile and staying good when the new question fails. All of it belongs to the
 * loop's thread.
 */
#ifndef LG_RESOLVE_H
#define LG_RESOLVE_H

#include "loop.h"

struct sockaddr;
struct resolve;
struct resolve_answer; /* counted and immutable: one who dials through it keeps it while newer ones come */

/*
 * interval_ms: after how long an answer is asked for anew. on_done(owner) is called when a question has
 * ended, well or not, and never from inside a call of this room. NULL: no memory. host is copied.
 */
struct resolve *resolve_new(struct loop *l, const char *host, uint16_t port, uint64_t interval_ms,
                            void (*on_done)(void *owner), void *owner);
/* No callback comes afterwards. A question in flight ends by itself. */
void resolve_free(struct resolve *r);

/*
 * The last good answer with one reference for the caller, or NULL when there is none yet; asks anew where
 * that is due. After NULL either resolve_asking is true and on_done will come, or the name has failed just
 * now (resolve_error).
 */
struct resolve_answer *resolve_get(struct resolve *r);
bool resolve_asking(const struct resolve *r);
/* Why the last question failed; "" when it did not. */
const char *resolve_error(const struct resolve *r);
/*
 * The address worked where earlier ones had not: later dials begin with it, until the name is asked for
 * anew.
 */
void resolve_prefer(struct resolve *r, const struct sockaddr *address);

size_t resolve_answer_n(const struct resolve_answer *a); /* at least 1 */
/* Families alternate (RFC 8305 section 4), so that one broken family delays a dial once and not n times. */
const struct sockaddr *resolve_answer_at(const struct resolve_answer *a, size_t i);
void resolve_answer_unref(struct resolve_answer *a); /* NULL is a no-op */

#endif
