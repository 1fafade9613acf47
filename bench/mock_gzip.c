/*
 * mock_gzip.c - `x-mock-gzip: 1`: an event stream as gzip (RFC 1952) in stored blocks (RFC 1951 section
 * 3.2.4), each event in blocks of its own, so that every event can be read as soon as it has come. Nothing
 * gets smaller; what matters is that a proxy in between cannot read it.
 */
#include "mock.h"

#include <zlib.h>

enum { BLOCK_MAX = 65535, BLOCK_HEAD = 5 };

static void put_le(char *p, uint32_t v, int bytes)
{
    for (int i = 0; i < bytes; i++)
        p[i] = (char)(v >> 8 * i & 0xff);
}

static void put_block_head(char *p, size_t n, bool last)
{
    p[0] = last ? 1 : 0;
    put_le(p + 1, (uint32_t)n, 2);
    put_le(p + 3, ~(uint32_t)n & 0xffff, 2);
}

void gzip_wrap(struct call *call, struct text *t, size_t at, bool last)
{
    static const char head[10] = {0x1f, (char)0x8b, 8, 0, 0, 0, 0, 0, 0, 3};
    size_t n = t->n - at, blocks = (n + BLOCK_MAX - 1) / BLOCK_MAX;
    size_t front = call->gzip_bytes == 0 ? sizeof(head) : 0;
    char *p = t->p + at, end[BLOCK_HEAD + 8];

    if (front + blocks * BLOCK_HEAD > t->cap - t->n) {
        t->full = true;
        return;
    }
    call->gzip_crc = (uint32_t)crc32(call->gzip_crc, (const Bytef *)p, (uInt)n);
    call->gzip_bytes += (uint32_t)n;
    for (size_t i = blocks; i-- > 0;) { /* from behind: each moves into room that is free by then */
        size_t from = i * BLOCK_MAX, length = size_min(n - from, BLOCK_MAX);
        char *to = p + front + from + i * BLOCK_HEAD;

        memmove(to + BLOCK_HEAD, p + from, length);
        put_block_head(to, length, false);
    }
    memcpy(p, head, front);
    t->n += front + blocks * BLOCK_HEAD;
    if (!last)
        return;
    put_block_head(end, 0, true);
    put_le(end + BLOCK_HEAD, call->gzip_crc, 4);
    put_le(end + BLOCK_HEAD + 4, call->gzip_bytes, 4);
    text_put(t, end, sizeof(end));
}
