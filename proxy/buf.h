/*
 * buf.h - where bytes rest between two callbacks. Two shapes, no I/O:
 *
 *   struct buf    one contiguous, growing run of bytes: a head being collected
 *                 or written, a line being formatted.
 *   struct queue  a list of chunks for bytes in transit: a body held while its
 *                 call waits, bytes that a socket did not take yet.
 *
 *                 queue_peek ──►  [chunk: done ▒▒▒▒ ready ████ ][chunk ██████  room ] ◄── queue_put
 *
 * An empty buf or queue owns no memory, so an idle connection holds none.
 */
#ifndef LG_BUF_H
#define LG_BUF_H

#include "base.h"
#include "str.h"

#include <sys/uio.h>

struct buf {
    char *p;
    size_t n;
    size_t cap_;
};

/* Room for at least `more` bytes behind p + n. False: no memory, the buf is as it was. */
MUST_CHECK bool buf_reserve(struct buf *b, size_t more);
/* Appends a copy. False: no memory, nothing was appended. */
MUST_CHECK bool buf_put(struct buf *b, struct slice s);
/* Takes n bytes off the front. */
void buf_drop(struct buf *b, size_t n);
/* Gives the memory back; the buf is empty and usable again. */
void buf_free(struct buf *b);

static inline struct slice buf_slice(const struct buf *b)
{
    return (struct slice){b->p, b->n};
}

struct queue_chunk;

struct queue {
    struct queue_chunk *first_;
    struct queue_chunk *last_;
    size_t bytes; /* ready to be taken */
};

/* Appends a copy of the bytes. False: no memory, nothing was appended. */
MUST_CHECK bool queue_put(struct queue *q, const void *bytes, size_t n);
/* Fills at most max entries with what stands first in q, in order; returns how many. They stay valid until queue_drop. */
size_t queue_peek(const struct queue *q, struct iovec *iov, size_t max);
/* Takes n bytes off the front; n must not exceed q->bytes. */
void queue_drop(struct queue *q, size_t n);
/* Moves all that `from` holds to the end of `to`, without copying. */
void queue_move(struct queue *to, struct queue *from);
/* Drops everything; the queue is empty and usable again. */
void queue_free(struct queue *q);
/* Memory in use by q, its own overhead included. */
size_t queue_memory(const struct queue *q);

#endif
