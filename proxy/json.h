/*
 * json.h - the one place that turns arbitrary bytes into a JSON string. Used by
 * whoever writes JSON by hand: gateway-made answers, the log, the admin API.
 */
#ifndef LG_JSON_H
#define LG_JSON_H

#include "buf.h"
#include "str.h"

/*
 * Appends s as a JSON string (RFC 8259 section 7), quotes included. What comes out is valid UTF-8 whatever
 * goes in: every byte that is not part of a well-formed sequence becomes U+FFFD. False: no memory, nothing
 * was appended.
 */
MUST_CHECK bool json_put_string(struct buf *out, struct slice s);

#endif
