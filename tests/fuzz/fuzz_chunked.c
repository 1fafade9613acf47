/*
 * fuzz_chunked.c - chunked bodies; the first byte says whether it is a request's. Any cut gives the same
 * payload and verdict, and a second decoder, written from the grammar alone, agrees on every body that is
 * complete.
 */
#include "wire.h"

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t n);

struct cursor {
    const uint8_t *p;
    size_t n, at;
};

/* Takes the bytes up to CRLF; false when there is none, or a control character before it. */
static bool take_line(struct cursor *c, struct slice *line)
{
    for (size_t i = c->at; i < c->n; i++) {
        if (c->p[i] == '\r') {
            *line = (struct slice){(const char *)c->p + c->at, i - c->at};
            c->at = i + 2;
            return i + 1 < c->n && c->p[i + 1] == '\n';
        }
        if ((c->p[i] < ' ' && c->p[i] != '\t') || c->p[i] == 0x7f)
            return false;
    }
    return false;
}

static bool parse_hex(struct slice s, uint64_t *v)
{
    *v = 0;
    for (size_t i = 0; i < s.n; i++) {
        const char *digits = "0123456789abcdef",
                   *d = s.p[i] == '\0' ? NULL : strchr(digits, ascii_lower(s.p[i]));

        if (d == NULL)
            return false;
        *v = *v * 16 + (uint64_t)(d - digits);
    }
    return s.n >= 1 && s.n <= 16;
}

/* chunked-body of RFC 9112 section 7.1, whole; its budget of overhead is not looked at. */
static bool reference(const uint8_t *bytes, size_t n, struct buf *payload, size_t *consumed)
{
    struct cursor c = {bytes, n, 0};
    struct slice line;
    uint64_t size;

    for (;;) {
        if (!take_line(&c, &line) || !parse_hex((struct slice){line.p, slice_find(line, ';')}, &size))
            return false;
        if (size == 0)
            break;
        if (size > c.n - c.at || c.n - c.at - size < 2)
            return false;
        BUG_ON(!buf_put(payload, (struct slice){(const char *)c.p + c.at, (size_t)size}));
        c.at += (size_t)size + 2;
        if (c.p[c.at - 2] != '\r' || c.p[c.at - 1] != '\n')
            return false;
    }
    for (;;) {
        if (!take_line(&c, &line))
            return false;
        if (line.n == 0)
            break;
        if (slice_find(line, ':') == line.n || !http_is_token((struct slice){line.p, slice_find(line, ':')}))
            return false;
    }
    *consumed = c.at;
    return true;
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t n)
{
    const struct http_head h = {.body = HTTP_BODY_CHUNKED};
    struct buf want = {0};
    struct wire_body got;
    size_t consumed;
    bool request, complete;

    if (n == 0)
        return 0;
    request = (bytes[0] & 1) != 0;
    bytes++;
    n--;
    got = wire_feed_every_way(&h, bytes, n, request);
    complete = reference(bytes, n, &want, &consumed);
    if (got.result == PARSE_BODY_END)
        BUG_ON(!complete || got.consumed != consumed || !slice_eq(buf_slice(&got.payload), buf_slice(&want)));
    else if (complete && n <= PARSE_OVERHEAD_MAX) /* only the names in the trailer can be at fault */
        BUG_ON(!request || got.error != PARSE_BAD_TRAILER);
    buf_free(&got.payload);
    buf_free(&want);
    BUG_ON(mem_live_blocks() != 0);
    return 0;
}
