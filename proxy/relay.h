/*
 * relay.h - bytes from the upstream to the client: framing for the client, one
 * write for all that one read brought, backpressure, and what is known of an event stream. Knows no lease.
 *
 *   upstream ──read──► relay_body ──write──► client
 *      ▲                    │ client_full
 *      └───── paused ◄──────┘         on_drain: relay_drained resumes
 *
 * The response head waits for the first body bytes of the same turn, so that both leave in one write; at the end
 * of the turn it goes alone. Paused by us means: the upstream's clock stands still (`paused`).
 */
#ifndef LG_RELAY_H
#define LG_RELAY_H

#include "client.h"
#include "sse.h"
#include "upstream.h"

struct relay {
    struct client *client; /* NULL: gone; what comes is discarded */
    struct upstream *upstream;
    struct loop *loop;
    struct buf head_;   /* not written yet */
    struct task flush_; /* writes head_ at the end of the turn */
    struct sse sse;
    uint64_t bytes;     /* of response body passed on */
    uint64_t discarded; /* of response body, after the client had gone */
    bool head_sent;     /* to the client's connection */
    bool chunked;       /* towards the client */
    bool is_sse;        /* an uncompressed event stream */
    bool paused;        /* the upstream, because the client is full */
};

void relay_init(struct relay *r, struct loop *l, struct client *c, struct upstream *u);
/* The head as it goes to the client; takes over the bytes of *head, leaving it empty. */
void relay_head(struct relay *r, struct buf *head, bool chunked, bool is_sse);
/* Body bytes; `last`: the response ends with them. False: the client failed (its on_end follows). */
MUST_CHECK bool relay_body(struct relay *r, const char *bytes, size_t n, bool last);
/* The response has ended, and nothing came with `last`: what is still to be said (head, last chunk). */
void relay_end(struct relay *r);
/* The client took what was queued. */
void relay_drained(struct relay *r);
/* True as long as the head has not been handed to the client: it can still be replaced by an error answer. */
bool relay_head_pending(const struct relay *r);
/* Forgets the head (an answer of our own goes out instead). */
void relay_drop_head(struct relay *r);
/* The client has gone: what comes is discarded from now on. */
void relay_detach_client(struct relay *r);
/* Frees what it holds. */
void relay_close(struct relay *r);

#endif
