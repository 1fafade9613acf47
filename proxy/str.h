/*
 * str.h - borrowed slices of bytes, and bounded parsing of numbers, durations
 * and sizes. Nothing here allocates or owns.
 */
#ifndef LG_STR_H
#define LG_STR_H

#include "base.h"

#include <string.h>

/* n bytes at p, owned by somebody else, not ended by NUL. p may be NULL only when n is 0. */
struct slice {
    const char *p;
    size_t n;
};

#define SLICE(literal) ((struct slice){(literal), sizeof(literal) - 1})

static inline struct slice slice_of(const char *s)
{
    return (struct slice){s, strlen(s)};
}

static inline bool slice_eq(struct slice a, struct slice b)
{
    return a.n == b.n && (a.n == 0 || memcmp(a.p, b.p, a.n) == 0);
}

static inline char ascii_lower(char c)
{
    return c >= 'A' && c <= 'Z' ? (char)(c | 0x20) : c;
}

/* ASCII case-insensitive equality (field names, tokens; RFC 9110 section 5.1). */
bool slice_ieq(struct slice a, struct slice b);
bool slice_starts_with(struct slice s, struct slice prefix);
bool slice_ends_with(struct slice s, struct slice suffix);
/* Without leading and trailing SP and HTAB (RFC 9110 section 5.5: OWS). */
struct slice slice_trim(struct slice s);
/* Position of c in s, or s.n when it is not there. */
size_t slice_find(struct slice s, char c);

/*
 * Takes the next element of a comma-separated list (RFC 9110 section 5.6.1) off
 * *rest, trimmed; empty elements are given as empty slices. False at the end.
 */
bool slice_next_element(struct slice *rest, struct slice *element);

/* Digits only, no sign, no space, no overflow, at least one digit. */
MUST_CHECK bool str_parse_u64(struct slice s, uint64_t *out);
/* `250ms`, `2s`, `5m`, `1h`, or plain `0`; the result in ms. */
MUST_CHECK bool str_parse_duration_ms(struct slice s, uint64_t *out_ms);
/* `64k`, `8m`, `1g` (powers of 1024) or plain bytes. */
MUST_CHECK bool str_parse_size(struct slice s, uint64_t *out_bytes);
/*
 * Glob match where `*` stands for any run of bytes and nothing else is special.
 * Linear in pattern x text, no recursion.
 */
bool str_glob(struct slice pattern, struct slice text);

/* Writes v in decimal at out (20 bytes are enough), returns the number of digits. No NUL. */
size_t str_put_u64(char *out, uint64_t v);
/* Writes v in lower-case hex without leading zeros (16 bytes are enough), returns the digits. */
size_t str_put_hex(char *out, uint64_t v);

#endif
