/*
 * upstream.h - one exchange on one connection to an upstream: request out,
 * response in. Knows HTTP/1.1 framing of responses, and no call.
 *
 * Embedded in its owner. The two directions are independent: a response may begin, and even end, while the request
 * is still going out (cases H106, H107, H117).
 *
 *     request   NONE ─► HEAD_SENT ─► DONE            response   HEAD ─► BODY ─► DONE
 *                                └─► (given up: the response came first)      └─► TUNNEL
 *
 * Reports come from the loop, never from inside an upstream_* call; after on_end or on_fail no other
 * report follows. upstream_close must be called once in any case.
 */
#ifndef LG_UPSTREAM_H
#define LG_UPSTREAM_H

#include "parse.h"
#include "upool.h"

enum upstream_fail {
    UPSTREAM_FAIL_RESOLVE,
    UPSTREAM_FAIL_CONNECT,
    UPSTREAM_FAIL_TLS,
    UPSTREAM_FAIL_CONNECT_TIMEOUT,
    UPSTREAM_FAIL_CLOSED, /* ended or reset before the response was complete */
    UPSTREAM_FAIL_BAD,    /* what came is no valid response */
    UPSTREAM_FAIL_MEMORY,
};

struct upstream_ops {
    void (*on_open)(void *owner);                            /* a connection is there: send */
    void (*on_head)(void *owner, const struct http_head *h); /* the final response (not 1xx but 101) */
    /* n > 0, writable until it returns; `last`: on_end follows at once. */
    void (*on_body)(void *owner, char *bytes, size_t n, bool last);
    void (*on_end)(void *owner); /* the response is complete */
    void (*on_drain)(void *owner);
    void (*on_fail)(void *owner, enum upstream_fail why, const char *detail);
    void (*on_raw)(void *owner, char *bytes, size_t n); /* after a 101 */
    void (*on_raw_end)(void *owner);
};

struct upstream {
    const struct upstream_ops *ops_;
    void *owner_;
    struct upool *pool_;
    struct udial *dial_;
    struct uconn *conn;
    struct loop *loop_;
    struct buf head_; /* a response head in pieces */
    struct parse_scan scan_;
    struct parse_body body_;
    struct task report_; /* what happened inside a call from the owner */
    uint8_t method_;
    uint8_t response_; /* enum upstream_response */
    bool keep_;        /* the connection may serve another call afterwards */
    bool request_done_;
    bool request_chunked_;
    bool paused_;
    bool any_byte; /* of a response has come */
    bool tunnel_;
    uint8_t interim_; /* 1xx heads so far: capped */
};

/* Begins: takes an idle connection or dials. on_open follows on a later turn, or true: it is there at once. */
MUST_CHECK bool upstream_open(struct upstream *u, struct loop *l, struct upool *pool, bool fresh_only,
                              const struct upstream_ops *ops, void *owner);
bool upstream_reused(const struct upstream *u);

/* A 101 will be welcome: the request that is about to be sent offers the upgrade. */
void upstream_expect_upgrade(struct upstream *u);
/* The serialised request head, and how its body is framed. False: the connection took nothing of it (on_fail follows). */
MUST_CHECK bool upstream_send_head(struct upstream *u, struct slice head, enum http_method method,
                                   enum http_body body, const void *first, size_t first_n);
/* False: failing, on_fail follows; or the response came first: stop sending. */
MUST_CHECK bool upstream_send_body(struct upstream *u, const void *bytes, size_t n);
void upstream_send_end(struct upstream *u);
bool upstream_full(const struct upstream *u);
/* Bytes that the kernel has not taken yet. */
size_t upstream_queued(const struct upstream *u);
/* Bytes that the kernel has taken so far: progress of sending. */
uint64_t upstream_sent_bytes(const struct upstream *u);

/* on_body stops / goes on. */
void upstream_pause(struct upstream *u);
void upstream_resume(struct upstream *u);

/* Raw bytes of a tunnel. */
MUST_CHECK bool upstream_send_raw(struct upstream *u, const void *bytes, size_t n);
void upstream_shutdown(struct upstream *u);

/* Ends the exchange in any state: the connection goes back to the pool if it is clean, else it is closed. Idempotent. */
void upstream_close(struct upstream *u);

#endif
