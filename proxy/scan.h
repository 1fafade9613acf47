/*
 * scan.h - finds the value of the top-level key `model` in JSON text (RFC 8259)
 * that comes in pieces, wherever it stands.
 *
 * The text is neither kept nor built into a tree. One struct of fixed size is
 * all the state there is; nothing is allocated, nothing recurses, and after any
 * split of the input the answer is the same.
 *
 * The rule behind every decision here: the answer must be the one that any
 * server reading the same bytes gets, or the body is refused. A limit that can
 * be dodged by writing the key strangely is no limit. So keys are unescaped;
 * a second `model` is refused, since servers differ on which one counts; so is
 * a `Model` beside it (Go matches without case); and so is any text whose
 * structure a lenient reader may see otherwise. Where that cannot matter the
 * scan looks away: bytes inside of strings are the upstream's business.
 */
#ifndef LG_SCAN_H
#define LG_SCAN_H

#include "bodyscan_verdict.h"
#include "modelname.h"

enum { SCAN_DEPTH_MAX = 1024 };

enum scan_mode {
    SCAN_JSON,  /* the body is said to be JSON: what cannot be is an error */
    SCAN_SNIFF, /* it may be anything: it is JSON when its first byte that is no white space is '{' */
};

struct scan {
    uint8_t state_; /* enum scan_state */
    uint8_t mode_;  /* enum scan_mode */
    uint8_t error_; /* enum bodyscan_error */
    uint8_t match_; /* bytes of "model" that the key begun agrees with, in any case */
    uint8_t hex_digits_;
    uint16_t hex_;  /* \uXXXX so far */
    uint16_t high_; /* the high surrogate that waits for its low one, or 0 */
    uint16_t depth_;
    bool exact_;     /* so far also with regard to case */
    bool in_string_; /* in the nested part; like the next one set anew where such a part begins */
    bool escaped_;   /* the next byte is escaped by a backslash; in the nested part and in skipped strings */
    bool wide_;      /* sniffing went past bytes that UTF-16 or UTF-32 begin with */
    bool is_object_;
    bool has_model_;                     /* a top-level key `model` was seen */
    bool has_variant_;                   /* one that only some servers take for it was seen */
    bool has_value_;                     /* name_ is complete */
    uint64_t open_[SCAN_DEPTH_MAX / 64]; /* bit of each open level: 1 object, 0 array */
    struct model_name name_;
};

_Static_assert(sizeof(struct scan) <= 512, "a scan is cheap to hold for a queued call");

void scan_init(struct scan *s, enum scan_mode mode);
/* The next n bytes. MORE or FOUND; NONE when the text is no object; BAD. NONE and BAD are final. */
enum bodyscan_verdict scan_feed(struct scan *s, const void *bytes, size_t n);
/* The text has ended: FOUND, NONE or BAD. */
enum bodyscan_verdict scan_end(struct scan *s);
/* What scan_feed returned last. */
enum bodyscan_verdict scan_verdict(const struct scan *s);

static inline struct slice scan_model(const struct scan *s)
{
    return s->has_value_ ? model_name_slice(&s->name_) : (struct slice){NULL, 0};
}

static inline enum bodyscan_error scan_error(const struct scan *s)
{
    return (enum bodyscan_error)s->error_;
}

/* The top level is an object. */
static inline bool scan_is_object(const struct scan *s)
{
    return s->is_object_;
}

#endif
