/*
 * multipart.h - finds the field `model` in a multipart/form-data body (RFC 7578,
 * RFC 2046 section 5.1) that comes in pieces, wherever it stands.
 *
 * File bytes are skipped, looking only for line ends before a dash; part headers
 * are read one line at a time into a fixed buffer; nothing is allocated. The
 * answer is the same after any split.
 *
 * The rule is that of scan.h: one answer that any server gets, or a refusal. So
 * a delimiter is a line CRLF "--" boundary and nothing less: lines that end
 * otherwise before a boundary, text before the first one, folded or strange
 * headers, encoded names: each makes servers differ, none comes from a client of
 * good will, all are refused.
 */
#ifndef LG_MULTIPART_H
#define LG_MULTIPART_H

#include "bodyscan_verdict.h"
#include "modelname.h"

enum {
    MULTIPART_BOUNDARY_MAX = 70,   /* RFC 2046 section 5.1.1 */
    MULTIPART_LINE_MAX = 4096,     /* one header line of a part */
    MULTIPART_HEADERS_MAX = 16384, /* all of them */
};

struct multipart {
    uint8_t state_; /* enum multipart_state */
    uint8_t error_; /* enum bodyscan_error */
    uint8_t break_; /* enum line_break: what stands before the next byte of skipped data */
    uint8_t from_;  /* the state to which a line that is no delimiter returns */
    uint8_t delimiter_n_;
    uint8_t matched_;    /* of the delimiter */
    bool after_crlf_;    /* the line that matches so far began after CRLF */
    bool has_model_;     /* a part named model was begun */
    bool has_value_;     /* name_ is complete */
    bool part_is_model_; /* of the part being read: */
    bool part_has_disposition_;
    bool part_is_encoded_; /* it has a transfer encoding or a charset that changes its bytes */
    uint16_t line_n_;
    uint32_t header_bytes_;
    char delimiter_[2 + MULTIPART_BOUNDARY_MAX]; /* "--" boundary */
    struct model_name name_;
    char line_[MULTIPART_LINE_MAX];
};

/* Copies the boundary out of the Content-Type: BODYSCAN_E_OK, or _MULTIPART_BOUNDARY. */
MUST_CHECK enum bodyscan_error multipart_init(struct multipart *m, struct slice content_type);
/* The next n bytes: MORE, FOUND or BAD (final). */
enum bodyscan_verdict multipart_feed(struct multipart *m, const void *bytes, size_t n);
/* The body has ended: FOUND, NONE or BAD. */
enum bodyscan_verdict multipart_end(struct multipart *m);

static inline struct slice multipart_model(const struct multipart *m)
{
    return m->has_value_ ? model_name_slice(&m->name_) : (struct slice){NULL, 0};
}

static inline enum bodyscan_error multipart_error(const struct multipart *m)
{
    return (enum bodyscan_error)m->error_;
}

#endif
