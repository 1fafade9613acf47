/*
 * buf.c - the contiguous buffer and the chunk queue.
 */
#include "buf.h"

#include "mem.h"

#define BUF_MIN 256

bool buf_reserve(struct buf *b, size_t more)
{
    size_t want = b->n + more, cap = b->cap_ == 0 ? BUF_MIN : b->cap_;
    char *p;

    if (want < b->n)
        return false;
    if (want <= b->cap_)
        return true;
    while (cap < want)
        cap = cap > SIZE_MAX / 2 ? want : cap * 2;
    p = mem_realloc(b->p, cap);
    if (p == NULL)
        return false;
    b->p = p;
    b->cap_ = cap;
    return true;
}

bool buf_put(struct buf *b, struct slice s)
{
    if (!buf_reserve(b, s.n))
        return false;
    if (s.n > 0)
        memcpy(b->p + b->n, s.p, s.n);
    b->n += s.n;
    return true;
}

void buf_drop(struct buf *b, size_t n)
{
    BUG_ON(n > b->n);
    b->n -= n;
    if (b->n > 0)
        memmove(b->p, b->p + n, b->n);
}

void buf_free(struct buf *b)
{
    mem_free(b->p);
    *b = (struct buf){0};
}

/* A small first chunk for the common few hundred bytes, large ones for what streams. */
#define CHUNK_SMALL (1024 - sizeof(struct queue_chunk))
#define CHUNK_LARGE (16384 - sizeof(struct queue_chunk))

struct queue_chunk {
    struct queue_chunk *next;
    uint32_t done; /* taken from the front */
    uint32_t end;  /* filled up to here */
    uint32_t cap;
    char bytes[];
};

static struct queue_chunk *chunk_new(size_t want)
{
    size_t cap = want <= CHUNK_SMALL ? CHUNK_SMALL : CHUNK_LARGE;
    struct queue_chunk *c = mem_alloc(sizeof(*c) + cap);

    if (c == NULL)
        return NULL;
    c->next = NULL;
    c->done = c->end = 0;
    c->cap = (uint32_t)cap;
    return c;
}

static void chunks_free(struct queue_chunk *c)
{
    while (c != NULL) {
        struct queue_chunk *next = c->next;

        mem_free(c);
        c = next;
    }
}

/* Chunks enough for n more bytes, linked; NULL when there is no memory for all of them. */
static struct queue_chunk *chunks_new(size_t n)
{
    struct queue_chunk *first = NULL, **link = &first;

    while (n > 0) {
        struct queue_chunk *c = chunk_new(n);

        if (c == NULL) {
            chunks_free(first);
            return NULL;
        }
        *link = c;
        link = &c->next;
        n -= size_min(n, c->cap);
    }
    return first;
}

bool queue_put(struct queue *q, const void *bytes, size_t n)
{
    size_t room = q->last_ == NULL ? 0 : q->last_->cap - q->last_->end;
    struct queue_chunk *fresh = NULL, *c = q->last_;
    const char *from = bytes;

    if (n > room) {
        fresh = chunks_new(n - room);
        if (fresh == NULL)
            return false;
        if (c == NULL)
            q->first_ = c = fresh;
        else
            c->next = fresh;
    }
    q->bytes += n;
    while (n > 0) {
        size_t part;

        if (c->end == c->cap)
            c = c->next;
        BUG_ON(c == NULL); /* chunks_new made room for all of it */
        part = size_min(n, c->cap - c->end);
        memcpy(c->bytes + c->end, from, part);
        c->end += (uint32_t)part;
        from += part;
        n -= part;
    }
    q->last_ = c;
    return true;
}

size_t queue_peek(const struct queue *q, struct iovec *iov, size_t max)
{
    size_t n = 0;

    for (struct queue_chunk *c = q->first_; c != NULL && n < max; c = c->next) {
        if (c->end == c->done)
            continue;
        iov[n].iov_base = c->bytes + c->done;
        iov[n].iov_len = c->end - c->done;
        n++;
    }
    return n;
}

void queue_drop(struct queue *q, size_t n)
{
    BUG_ON(n > q->bytes);
    q->bytes -= n;
    while (n > 0) {
        struct queue_chunk *c = q->first_;
        size_t part = size_min(n, c->end - c->done);

        c->done += (uint32_t)part;
        n -= part;
        if (c->done == c->end) {
            q->first_ = c->next;
            if (q->last_ == c)
                q->last_ = NULL;
            mem_free(c);
        }
    }
}

void queue_move(struct queue *to, struct queue *from)
{
    if (from->first_ == NULL)
        return;
    if (to->last_ == NULL)
        to->first_ = from->first_;
    else
        to->last_->next = from->first_;
    to->last_ = from->last_;
    to->bytes += from->bytes;
    *from = (struct queue){0};
}

void queue_free(struct queue *q)
{
    chunks_free(q->first_);
    *q = (struct queue){0};
}

size_t queue_memory(const struct queue *q)
{
    size_t total = 0;

    for (const struct queue_chunk *c = q->first_; c != NULL; c = c->next)
        total += sizeof(*c) + c->cap;
    return total;
}
