/*
 * chunked.h - the chunked coding (RFC 9112 section 7.1), byte by byte over its framing, for mock-llm and
 * loadgen. Strict: CRLF only, no more than 16 digits of size, nothing between data and its CRLF. Trailers
 * are skipped.
 */
#ifndef BENCH_CHUNKED_H
#define BENCH_CHUNKED_H

#include "../proxy/str.h"

enum chunked_state {
    CHUNKED_SIZE,
    CHUNKED_EXT,
    CHUNKED_SIZE_LF,
    CHUNKED_DATA,
    CHUNKED_DATA_CR,
    CHUNKED_DATA_LF,
    CHUNKED_TRAILER,
    CHUNKED_END_LF,
    CHUNKED_DONE,
    CHUNKED_BAD,
};

/* All zero is the start. */
struct chunked {
    uint64_t left; /* of the current chunk */
    uint8_t state; /* enum chunked_state */
    uint8_t line;  /* digits of a size, or whether a trailer line holds anything */
};

static inline int chunked_digit_(char ch)
{
    if (ch >= '0' && ch <= '9')
        return ch - '0';
    ch = ascii_lower(ch);
    return ch >= 'a' && ch <= 'f' ? ch - 'a' + 10 : -1;
}

static inline uint8_t chunked_size_(struct chunked *c, char ch)
{
    int digit = chunked_digit_(ch);

    if (digit >= 0 && c->line < 16) {
        c->left = c->left << 4 | (uint64_t)digit;
        c->line++;
        return CHUNKED_SIZE;
    }
    if (c->line == 0 || (ch != '\r' && ch != ';'))
        return CHUNKED_BAD;
    c->line = 0;
    return ch == '\r' ? CHUNKED_SIZE_LF : CHUNKED_EXT;
}

/* The state after one byte of framing. */
static inline uint8_t chunked_step_(struct chunked *c, char ch)
{
    bool empty = c->line == 0;

    switch (c->state) {
    case CHUNKED_SIZE:
        return chunked_size_(c, ch);
    case CHUNKED_EXT:
        return ch == '\n' ? CHUNKED_BAD : ch == '\r' ? CHUNKED_SIZE_LF : CHUNKED_EXT;
    case CHUNKED_SIZE_LF:
        return ch != '\n' ? CHUNKED_BAD : c->left > 0 ? CHUNKED_DATA : CHUNKED_TRAILER;
    case CHUNKED_DATA_CR:
        return ch == '\r' ? CHUNKED_DATA_LF : CHUNKED_BAD;
    case CHUNKED_DATA_LF:
        return ch == '\n' ? CHUNKED_SIZE : CHUNKED_BAD;
    case CHUNKED_TRAILER:
        c->line |= ch != '\r';
        return ch == '\n' ? CHUNKED_BAD : ch == '\r' ? CHUNKED_END_LF : CHUNKED_TRAILER;
    case CHUNKED_END_LF:
        c->line = 0;
        return ch != '\n' ? CHUNKED_BAD : empty ? CHUNKED_DONE : CHUNKED_TRAILER;
    default:
        return c->state;
    }
}

/*
 * Takes bytes off *in up to the end of the next piece of data, or of the body; the piece is returned and
 * may be empty. Call again while *in is not empty and the state is neither DONE nor BAD.
 */
static inline struct slice chunked_next(struct chunked *c, struct slice *in)
{
    struct slice piece = {in->p, 0};

    while (in->n > 0 && c->state != CHUNKED_DATA && c->state != CHUNKED_DONE && c->state != CHUNKED_BAD) {
        c->state = chunked_step_(c, in->p[0]);
        in->p++;
        in->n--;
    }
    if (c->state != CHUNKED_DATA || in->n == 0)
        return piece;
    piece = (struct slice){in->p, c->left < in->n ? (size_t)c->left : in->n};
    in->p += piece.n;
    in->n -= piece.n;
    c->left -= piece.n;
    if (c->left == 0)
        c->state = CHUNKED_DATA_CR;
    return piece;
}

#endif
