/*
 * decode.h - undoes a Content-Encoding as the bytes come, for a reader that
 * only wants to look: gzip, deflate (zlib or raw) and zstd.
 *
 * Bounded on every side: output in pieces of DECODE_PIECE_BYTES, at most
 * cap_bytes in total, windows of at most 8 MiB for zstd. That is what RFC 9659
 * lets an encoder use on the wire; a frame that asks for more is refused
 * before its window is allocated.
 *
 * All memory, that of zlib and libzstd included, comes from mem.h and goes
 * with decode_free. Only decode.c sees zlib.h and zstd.h.
 */
#ifndef LG_DECODE_H
#define LG_DECODE_H

#include "bodyscan_verdict.h"
#include "str.h"

enum { DECODE_PIECE_BYTES = 16 * 1024 };

enum decode_coding {
    DECODE_IDENTITY,
    DECODE_GZIP,
    DECODE_DEFLATE,
    DECODE_ZSTD,
};

struct decode;

/*
 * Reads a Content-Encoding field value (RFC 9110 section 8.4). False: a coding
 * that is not known, or more than one.
 */
MUST_CHECK bool decode_parse_coding(struct slice content_encoding, enum decode_coding *out);

/* A decoder for one body; not for DECODE_IDENTITY. NULL: no memory. Owner: the caller, decode_free. */
MUST_CHECK struct decode *decode_new(enum decode_coding coding, uint64_t cap_bytes);
/* NULL is a no-op. */
void decode_free(struct decode *d);

/*
 * Takes one step from *in, which is moved past what was used. *out is what came
 * out, possibly nothing; it is d's and valid until the next call. True: call
 * again. False: *in is used up, or there is an error; *out is good in either
 * case and to be looked at first.
 */
MUST_CHECK bool decode_next(struct decode *d, struct slice *in, struct slice *out);

/* The error met, or BODYSCAN_E_OK. */
enum bodyscan_error decode_error(const struct decode *d);

/* The input has ended: OK, the error met, or _CODING_CORRUPT when it was cut short. No input at all is OK. */
enum bodyscan_error decode_end(const struct decode *d);

#endif
