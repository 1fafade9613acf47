/*
 * reply.h - answers that the gateway makes itself, in the shape that the API's
 * SDKs read: JSON with a Content-Length, a reason word for machines, ids for
 * the log, and what each SDK obeys about trying again.
 *
 * Pure: text in, bytes out. Who may call: whoever answers in place of an upstream.
 */
#ifndef LG_REPLY_H
#define LG_REPLY_H

#include "buf.h"
#include "config/config.h"
#include "str.h"

/* No SDK obeys a longer delay, and one gives up at more than two minutes. */
#define REPLY_RETRY_AFTER_MAX_MS 60000

struct reply {
    enum config_api api;
    unsigned status;         /* 400 ... 599 */
    struct slice reason;     /* x-leasegate-reason, e.g. limit_full; in OpenAI's shape also error.code */
    struct slice message;    /* for people; without the limit's name, which is put behind it */
    struct slice limit;      /* "": none */
    struct slice request_id; /* "": none; the same as in the log */
    uint64_t retry_after_ms; /* 0: no delay is told; ignored where trying again is of no use */
    bool close;              /* say Connection: close */
    bool keep_alive;         /* say Connection: keep-alive, for an HTTP/1.0 client that asked; close wins */
    bool head_request;       /* the head alone, as for the body that is not sent */
};

/*
 * Appends one complete HTTP/1.1 response. 429, 500, 502, 503, 504 and 529 are said to be worth another try;
 * 501 and 505, which SDKs would repeat like every 5xx, are said not to be. False: no memory, nothing was
 * appended.
 */
MUST_CHECK bool reply_put(struct buf *out, const struct reply *r);

/* Where the bytes that went out last stand in the event stream. As a bool: at a boundary or not. */
enum reply_sse_at {
    REPLY_SSE_IN_LINE,  /* inside a line: it is ended, then a blank line */
    REPLY_SSE_BOUNDARY, /* nothing yet, or behind a blank line */
    REPLY_SSE_LINE,     /* behind a line's end: a blank line only */
};

/*
 * Appends the one error event that ends a stream cut in the middle, after a 200 that cannot be taken back.
 * The SDKs raise it. For an uncompressed text/event-stream only, once, and nothing may follow it. False: no
 * memory, nothing was appended.
 */
MUST_CHECK bool reply_sse_error(struct buf *out, enum config_api api, struct slice reason,
                                struct slice message, struct slice request_id, enum reply_sse_at at);

#endif
