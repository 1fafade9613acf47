/*
 * modelname.h - the one value that the scanners bring back: the name of a
 * model, gathered byte by byte and checked on the way.
 *
 * What is let in is valid UTF-8 (RFC 3629) without control characters (C0,
 * DEL, C1), at most MODEL_NAME_MAX bytes: a name that cannot break a log line,
 * a header or a key, whoever prints it. Fixed size, owns nothing.
 */
#ifndef LG_MODELNAME_H
#define LG_MODELNAME_H

#include "bodyscan_verdict.h"
#include "str.h"

enum { MODEL_NAME_MAX = 256 };

struct model_name {
    uint16_t n_;
    uint8_t need_; /* continuation bytes still to come in the character begun */
    uint8_t low_;  /* bounds of the next continuation byte */
    uint8_t high_;
    char bytes_[MODEL_NAME_MAX];
};

void model_name_init(struct model_name *m);
/* Appends one byte: BODYSCAN_E_OK, _MODEL_INVALID or _MODEL_TOO_LONG. */
MUST_CHECK enum bodyscan_error model_name_put(struct model_name *m, uint8_t c);
/* Appends a code point that was written as \uXXXX (a surrogate is _MODEL_INVALID). */
MUST_CHECK enum bodyscan_error model_name_put_code_point(struct model_name *m, uint32_t cp);
/* The value is complete: OK, _MODEL_EMPTY, or _MODEL_INVALID when it ends inside a character. */
MUST_CHECK enum bodyscan_error model_name_finish(const struct model_name *m);

static inline struct slice model_name_slice(const struct model_name *m)
{
    return (struct slice){m->bytes_, m->n_};
}

#endif
