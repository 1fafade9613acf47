/*
 * wire.h - what the fuzzers of the wire rooms share: reading one head whole or byte by byte, and a
 * body either way, with a crash wherever the two differ.
 */
#ifndef LG_FUZZ_WIRE_H
#define LG_FUZZ_WIRE_H

#include "mem.h"
#include "parse.h"

#define WIRE_HEAD_MAX 8192

/* A block of just that size, so that a read beyond it is seen. */
static inline char *wire_copy(const void *bytes, size_t n)
{
    char *copy = mem_alloc(n > 0 ? n : 1);

    BUG_ON(copy == NULL);
    if (n > 0)
        memcpy(copy, bytes, n);
    return copy;
}

/* Length of the head, 0 with *error: that is what it was refused for, or PARSE_OK when it has no end yet. */
static inline size_t wire_head_end(const char *bytes, size_t n, bool request, size_t *start,
                                   enum parse_error *error)
{
    struct parse_scan whole = {0}, steps = {0};
    enum parse_error e = PARSE_OK;
    size_t length = parse_head_end(&whole, bytes, n, WIRE_HEAD_MAX, request, error), got = 0;

    for (size_t have = 0; have <= n && got == 0 && e == PARSE_OK; have++) {
        got = parse_head_end(&steps, bytes, have, WIRE_HEAD_MAX, request, &e);
        BUG_ON(steps.at > have);
    }
    BUG_ON(got != length || e != *error);
    BUG_ON(whole.at != steps.at || whole.start != steps.start || whole.lines != steps.lines);
    *start = whole.start;
    return length;
}

struct wire_body {
    enum parse_body_result result;
    enum parse_error error;
    size_t consumed;
    struct buf payload;
};

/* Feeds `step` bytes at a time; 0: all at once. */
static inline struct wire_body wire_feed(const struct http_head *h, const uint8_t *bytes, size_t n,
                                         bool request, size_t step)
{
    struct wire_body out = {.result = PARSE_BODY_MORE};
    struct parse_body b;

    parse_body_init(&b, h);
    for (size_t at = 0; out.result == PARSE_BODY_MORE; at = out.consumed) {
        size_t given = step == 0 ? n - at : size_min(step, n - at), took = given, payload_n = 0;
        char *copy = wire_copy(bytes + at, given);

        out.result = parse_body_feed(&b, copy, &took, &payload_n, request, &out.error);
        BUG_ON(took > given || payload_n > took);
        BUG_ON(out.result == PARSE_BODY_MORE && took != given);
        BUG_ON(!buf_put(&out.payload, (struct slice){copy, payload_n}));
        mem_free(copy);
        out.consumed += took;
        if (at + given == n)
            break;
    }
    BUG_ON((out.result == PARSE_BODY_BAD) != (out.error != PARSE_OK));
    return out;
}

/* The same body in one piece, byte by byte and in threes; what is paid out before an error may differ. */
static inline struct wire_body wire_feed_every_way(const struct http_head *h, const uint8_t *bytes, size_t n,
                                                   bool request)
{
    struct wire_body whole = wire_feed(h, bytes, n, request, 0);

    for (size_t step = 1; step <= 3; step += 2) {
        struct wire_body other = wire_feed(h, bytes, n, request, step);

        BUG_ON(other.result != whole.result || other.error != whole.error);
        BUG_ON(whole.result != PARSE_BODY_BAD &&
               (other.consumed != whole.consumed ||
                !slice_eq(buf_slice(&other.payload), buf_slice(&whole.payload))));
        buf_free(&other.payload);
    }
    return whole;
}

#endif
