/*
 * resp.h - writes commands in RESP, the Redis protocol: an array of bulk
 * strings (redis.io/docs/reference/protocol-spec). Pure: bytes appended to a buf.
 *
 * A command is  *<n>\r\n  and n times  $<len>\r\n<bytes>\r\n : lengths first, so no byte of an
 * argument can ever be read as protocol. Replies are read in redis.c.
 */
#ifndef LG_RESP_H
#define LG_RESP_H

#include "buf.h"
#include "str.h"

/*
 * Opens a command of n arguments (its name is the first); exactly n resp_put_* must follow. False: no memory,
 * nothing appended.
 */
MUST_CHECK bool resp_put_command(struct buf *b, size_t n);
/* One argument, any bytes. False as above. */
MUST_CHECK bool resp_put_bulk(struct buf *b, struct slice s);
/* One argument: v in decimal. False as above. */
MUST_CHECK bool resp_put_u64(struct buf *b, uint64_t v);

#endif
