/*
 * client.h - one connection from a client: heads in, bodies in, bytes out, one
 * request after the other. Knows HTTP/1.1 framing of requests, and no call.
 *
 *   states   IDLE ──► HEAD ──► EXCHANGE ──► (DISCARD) ──► IDLE …        any ──► gone
 *              waiting   collecting   the owner     the rest of a body
 *              for one   a head       has it        nobody wants
 *
 * It reports through `ops`; the functions below are for its owner. None of them calls back from inside. During
 * EXCHANGE the client stays watched: what it sends beyond its request is kept (at most
 * CLIENT_AHEAD_BYTES and one read), and its end is reported whether or not its body is being read.
 */
#ifndef LG_CLIENT_H
#define LG_CLIENT_H

#include "parse.h"
#include "stream.h"

#define CLIENT_AHEAD_BYTES (64 * 1024)

struct client;

enum client_end {
    CLIENT_END_FIN,     /* it sends no more: how every SDK aborts, and how a half-close looks */
    CLIENT_END_RESET,   /* it is certainly gone */
    CLIENT_END_STALLED, /* it takes no bytes for write_timeout */
};

struct client_ops {
    /* A request begins. The head is borrowed; body events follow unless h->body is NONE. Returns the owner of what follows, or NULL when the
     * client was already answered or closed. */
    void *(*on_request)(void *arg, struct client *c, const struct http_head *h);
    /* A head that is none: to be answered (client_write, client_finish) and logged. */
    void (*on_bad_head)(void *arg, struct client *c, enum parse_error e);
    /* No complete head within header_timeout, though some bytes came. */
    void (*on_head_timeout)(void *arg, struct client *c);
    void (*on_body)(void *owner, char *bytes, size_t n); /* writable, until it returns */
    void (*on_body_end)(void *owner);
    void (*on_bad_body)(void *owner, enum parse_error e);
    void (*on_drain)(void *owner); /* client_full was true, and is no longer */
    void (*on_end)(
        void *owner,
        enum client_end how); /* RESET and STALLED are the last event; FIN may be followed by them */
    void (*on_raw)(void *owner, char *bytes, size_t n); /* after client_tunnel */
};

struct client_settings {
    uint64_t head_max_bytes;
    uint64_t handshake_timeout_ms, header_timeout_ms, keepalive_timeout_ms, write_timeout_ms;
};

/* All clients of one loop, with what they have in common. */
struct client_group {
    struct loop *loop;
    const struct client_ops *ops;
    void *arg;
    struct client_settings settings;
    struct list clients;
    bool closing; /* no request follows the present one */
};

void client_group_init(struct client_group *g, struct loop *l, const struct client_ops *ops, void *arg);
/* Closes the clients that wait for a request, and lets the others end their present one (drain). */
void client_group_close(struct client_group *g);

/* Closes all that are left, whatever they do (the process ends). */
void client_group_drop(struct client_group *g);

/* Takes an accepted stream. Out of memory: closes it. */
void client_begin(struct client_group *g, struct stream *s);

/* --- for the owner, during EXCHANGE ------------------------------------------------------------------------ */

/* False: the client is gone or failing; on_end follows. */
MUST_CHECK bool client_write(struct client *c, const struct iovec *iov, size_t n);
bool client_full(const struct client *c);
/* Body events stop / go on. */
void client_pause(struct client *c);
void client_resume(struct client *c);
/* `100 Continue`, if the request asked for it and it was not sent yet. */
void client_continue(struct client *c);
/* An interim response that shows whether the client is still there (half-close probe); HTTP/1.1 only. */
void client_probe(struct client *c);
bool client_is_gone(struct client *c);
/* May this connection take another request after the response that is being made? (its wish, its version, its unread body, drain) */
bool client_can_keep(const struct client *c);
/* From now on bytes pass raw, first those that were sent ahead (by on_raw, on a later turn), then the FIN if it has come (by on_end). */
void client_tunnel(struct client *c);
void client_shutdown(struct client *c); /* FIN after what is queued */
bool client_half_closed(const struct client *c);
struct slice client_address(const struct client *c);

enum client_finish {
    CLIENT_KEEP,  /* the response is complete and said so: the next request */
    CLIENT_CLOSE, /* the response is complete and ends by closing: lingering (RFC 9112 section 9.6) */
    CLIENT_CUT,   /* the response is not complete: reset, so that it cannot look complete */
    CLIENT_DROP,  /* nothing more to say: close */
};
/* Ends the exchange: no event comes for it afterwards. The connection lives on by itself or goes. */
void client_finish(struct client *c, enum client_finish how);

#endif
