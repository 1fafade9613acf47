/*
 * resp.c - the command writer. An id or a key costs one length, one copy and four fixed bytes.
 */
#include "resp.h"

#define LENGTH_MAX 23 /* '$' or '*', 20 digits, CR LF */

/* Writes "<mark><n>\r\n" at p; returns the end. */
static char *put_length(char *p, char mark, size_t n)
{
    *p++ = mark;
    if (n < 10)
        *p++ = (char)('0' + n);
    else
        p += str_put_u64(p, n);
    *p++ = '\r';
    *p++ = '\n';
    return p;
}

bool resp_put_command(struct buf *b, size_t n)
{
    if (!buf_reserve(b, LENGTH_MAX))
        return false;
    b->n = (size_t)(put_length(b->p + b->n, '*', n) - b->p);
    return true;
}

bool resp_put_bulk(struct buf *b, struct slice s)
{
    char *p;

    if (s.n > SIZE_MAX - LENGTH_MAX - 2 || !buf_reserve(b, LENGTH_MAX + s.n + 2))
        return false;
    p = put_length(b->p + b->n, '$', s.n);
    if (s.n > 0)
        memcpy(p, s.p, s.n);
    p += s.n;
    *p++ = '\r';
    *p++ = '\n';
    b->n = (size_t)(p - b->p);
    return true;
}

bool resp_put_u64(struct buf *b, uint64_t v)
{
    char digits[20];
    size_t n = str_put_u64(digits, v);

    return resp_put_bulk(b, (struct slice){digits, n});
}
