/*
 * mediatype.h - reads `type; name=value; name="value"`, the shape of
 * Content-Type and Content-Disposition (RFC 9110 sections 5.6.6 and 8.3,
 * RFC 6266 section 4.1). Borrowed slices only; nothing allocates.
 */
#ifndef LG_MEDIATYPE_H
#define LG_MEDIATYPE_H

#include "str.h"

enum mediatype_step {
    MEDIATYPE_PARAM, /* *out is the next parameter */
    MEDIATYPE_END,   /* there is none */
    MEDIATYPE_BAD,   /* not of this shape: readers may differ on it */
};

struct mediatype_param {
    struct slice name;
    struct slice value; /* without its quotes; backslashes stand as they came */
    bool has_escape;    /* there is a backslash in a quoted value */
    bool escaped_quote; /* and one of those is followed by a quote */
};

/* Takes what stands before the first ';' off *rest, trimmed. */
struct slice mediatype_take_type(struct slice *rest);

/*
 * Takes the next parameter off *rest, which is what mediatype_take_type left. A
 * value that is not quoted may hold more than a token may (many clients leave a
 * boundary unquoted), but no space, quote, comma or control character.
 */
enum mediatype_step mediatype_next_param(struct slice *rest, struct mediatype_param *out);

/* A character of a token (RFC 9110 section 5.6.2). */
bool mediatype_is_tchar(uint8_t c);

#endif
