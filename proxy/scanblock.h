/*
 * scanblock.h - 64 bytes at a time: which of them are quotes, brackets, line
 * ends. A mask has bit i set when byte i is one of those asked for.
 *
 * Two versions of each question, with the same answers: SSE2, which every
 * x86-64 has, and plain 64-bit words for every other machine. Both are always
 * compiled where they can be, so that the tests hold them against each other
 * and against the obvious loop. `block_*` without a suffix is the faster one.
 *
 * SSE2 already goes at the speed of memory on the texts that bodies are made of
 * (bench/scanbench.c), so nothing wider is chosen at run time.
 */
#ifndef LG_SCANBLOCK_H
#define LG_SCANBLOCK_H

#include "base.h"

#include <endian.h>
#include <string.h>

enum { BLOCK_BYTES = 64 };

/* What a byte may be in JSON text outside of strings (RFC 8259 section 2). */
enum json_class {
    JSON_SPACE = 1,
    JSON_SCALAR = 2,  /* may stand in a number, true, false, null, and NaN, Infinity as Python writes them */
    JSON_BRACKET = 4, /* { } [ ] */
    JSON_MARK = 8,    /* , : " */
};

static inline uint8_t json_class(uint8_t c)
{
    uint8_t folded = c | 0x20;

    if ((folded >= 'a' && folded <= 'z') || (c >= '0' && c <= '9') || c == '+' || c == '-' || c == '.')
        return JSON_SCALAR;
    if (c == ' ' || c == '\t' || c == '\n' || c == '\r')
        return JSON_SPACE;
    if (folded == '{' || folded == '}')
        return JSON_BRACKET;
    return c == ',' || c == ':' || c == '"' ? JSON_MARK : 0;
}

/* ---- plain words ---- */

static inline uint64_t block_eq_words(const uint8_t *p, uint8_t c)
{
    const uint64_t low7 = 0x7F7F7F7F7F7F7F7FULL;
    uint64_t mask = 0;

    for (unsigned i = 0; i < 8; i++) {
        uint64_t w;

        memcpy(&w, p + 8 * i, sizeof(w));
        w = le64toh(w) ^ (0x0101010101010101ULL * c);
        w = ~(((w & low7) + low7) | w | low7);                         /* 0x80 where the byte was c */
        mask |= (((w >> 7) * 0x0102040810204080ULL) >> 56) << (8 * i); /* those bits side by side */
    }
    return mask;
}

static inline uint64_t block_brackets_words(const uint8_t *p)
{
    return block_eq_words(p, '{') | block_eq_words(p, '}') | block_eq_words(p, '[') | block_eq_words(p, ']');
}

static inline uint64_t block_foreign_words(const uint8_t *p)
{
    uint64_t mask = 0;

    for (unsigned i = 0; i < BLOCK_BYTES; i++)
        mask |= (uint64_t)(json_class(p[i]) == 0) << i;
    return mask;
}

static inline bool block_has_either_words(const uint8_t *p, uint8_t a, uint8_t b)
{
    return (block_eq_words(p, a) | block_eq_words(p, b)) != 0;
}

#ifdef __SSE2__
#include <emmintrin.h>

/* ---- SSE2 ---- */

static inline __m128i block_load_(const uint8_t *p, unsigned i)
{
    return _mm_loadu_si128((const __m128i *)(const void *)(p + 16 * i));
}

static inline uint64_t block_bits_(__m128i v, unsigned i)
{
    return (uint64_t)(uint32_t)_mm_movemask_epi8(v) << (16 * i);
}

static inline uint64_t block_eq_sse2(const uint8_t *p, uint8_t c)
{
    const __m128i want = _mm_set1_epi8((char)c);
    uint64_t mask = 0;

    for (unsigned i = 0; i < 4; i++)
        mask |= block_bits_(_mm_cmpeq_epi8(block_load_(p, i), want), i);
    return mask;
}

static inline uint64_t block_brackets_sse2(const uint8_t *p)
{
    uint64_t mask = 0;

    for (unsigned i = 0; i < 4; i++) { /* [ ] differ from { } by the bit 0x20 alone */
        __m128i v = _mm_or_si128(block_load_(p, i), _mm_set1_epi8(0x20));

        mask |= block_bits_(
            _mm_or_si128(_mm_cmpeq_epi8(v, _mm_set1_epi8('{')), _mm_cmpeq_epi8(v, _mm_set1_epi8('}'))), i);
    }
    return mask;
}

/* 0xFF where lo <= byte < lo + span, unsigned. */
static inline __m128i block_range_(__m128i v, uint8_t lo, uint8_t span)
{
    __m128i d = _mm_sub_epi8(v, _mm_set1_epi8((char)lo));

    return _mm_cmpeq_epi8(_mm_min_epu8(d, _mm_set1_epi8((char)(span - 1))), d);
}

static inline uint64_t block_foreign_sse2(const uint8_t *p)
{
    uint64_t mask = 0;

    for (unsigned i = 0; i < 4; i++) {
        __m128i v = block_load_(p, i), folded = _mm_or_si128(v, _mm_set1_epi8(0x20)), ok;

        ok = block_range_(v, '+', 4);                         /* + , - . */
        ok = _mm_or_si128(ok, block_range_(v, '0', 11));      /* 0-9 : */
        ok = _mm_or_si128(ok, block_range_(folded, 'a', 27)); /* letters { [ */
        ok = _mm_or_si128(ok, _mm_cmpeq_epi8(folded, _mm_set1_epi8('}')));
        ok = _mm_or_si128(ok, _mm_cmpeq_epi8(v, _mm_set1_epi8('"')));
        ok = _mm_or_si128(ok, _mm_cmpeq_epi8(v, _mm_set1_epi8(' ')));
        ok = _mm_or_si128(ok, block_range_(v, '\t', 2)); /* \t \n */
        ok = _mm_or_si128(ok, _mm_cmpeq_epi8(v, _mm_set1_epi8('\r')));
        mask |= block_bits_(ok, i);
    }
    return ~mask;
}

static inline bool block_has_either_sse2(const uint8_t *p, uint8_t a, uint8_t b)
{
    const __m128i va = _mm_set1_epi8((char)a), vb = _mm_set1_epi8((char)b);
    __m128i any = _mm_setzero_si128();

    for (unsigned i = 0; i < 4; i++) {
        __m128i v = block_load_(p, i);

        any = _mm_or_si128(any, _mm_or_si128(_mm_cmpeq_epi8(v, va), _mm_cmpeq_epi8(v, vb)));
    }
    return _mm_movemask_epi8(any) != 0;
}

#define block_eq block_eq_sse2
#define block_brackets block_brackets_sse2
#define block_foreign block_foreign_sse2
#define block_has_either block_has_either_sse2
#else
#define block_eq block_eq_words
#define block_brackets block_brackets_words
#define block_foreign block_foreign_words
#define block_has_either block_has_either_words
#endif

/* ---- on masks ---- */

/* Bit i of the result: parity of the bits 0..i of m. Between an opening quote and its closing one it is 1. */
static inline uint64_t block_prefix_parity(uint64_t m)
{
    for (unsigned shift = 1; shift < 64; shift <<= 1)
        m ^= m << shift;
    return m;
}

/*
 * Which bytes are escaped, so that a quote among them ends nothing: the byte
 * after each run of backslashes of odd length. (Inside a run every second one
 * is escaped too, but no question is asked about those.)
 *
 * Adding a run's first bit to the mask makes the carry ripple to the bit behind
 * the run. Where the run began on an even place and ends before an odd one, or
 * the reverse, its length is odd. *carry: the byte before this block escapes its
 * first byte; updated for the next block.
 */
static inline uint64_t block_escaped(uint64_t backslash, bool *carry)
{
    const uint64_t even = 0x5555555555555555ULL;
    uint64_t first = *carry ? 1 : 0;
    uint64_t run = backslash & ~first; /* an escaped backslash begins no escape */
    uint64_t start = run & ~(run << 1);
    uint64_t from_even = (run + (start & even)) & ~run;
    uint64_t past_odd;

    /* A run that reaches the end of the block overflows; it is odd when it began on an odd place. */
    *carry = __builtin_add_overflow(run, start & ~even, &past_odd);
    return first | (from_even & ~even) | (past_odd & ~run & even);
}

#endif
