/*
 * call_parts.h - what the files of the call share: the call itself, and the steps that one file takes for another.
 * Included by call*.c alone; for everybody else a call is opaque (call.h).
 *
 *   call.c        the story: begin, admission, dial, send, response, tunnel
 *   call_body.c   the request body: held, scanned, given on
 *   call_time.c   phases and the one deadline
 *   call_end.c    the end: the slot, the last words to the client, the record
 */
#ifndef LG_CALL_PARTS_H
#define LG_CALL_PARTS_H

#include "bodyscan.h"
#include "call.h"
#include "note.h"
#include "relay.h"
#include "reply.h"
#include "route.h"

#define CALL_HELD_HIGH_BYTES                                                                                 \
    (64 * 1024) /* of a body that nobody needs to see whole: then the client is paused */

/* What is needed until the upstream has begun to answer. */
struct request {
    struct http_head *head;
    struct route route;
    struct call *call;
    struct bodyscan *scan;
    struct queue behind; /* body bytes that the scanner has not seen: compressed ones are read by portions */
    struct deadline portion; /* the next portion, on a later turn */
    struct queue held;       /* body bytes that the upstream has not been given yet */
    struct queue sent;       /* and those it has been given, as long as a replay is allowed */
    size_t charged;          /* of held, from the body memory budget */
    bool may_replay;
    bool body_gone; /* some of it was given to the upstream and not kept: there is no sending it again */
};

struct call {
    struct list_node node; /* in the loop's list of calls */
    struct service *service;
    struct client *client;   /* NULL: gone */
    struct request *request; /* NULL: the response has begun */
    struct note *note;
    struct admission admission;
    struct upstream upstream;
    struct relay relay;
    const struct config_upstream *to;
    struct deadline deadline;
    /* times, us */
    uint64_t began_us, admitted_us, opened_us, head_us;
    uint64_t drain_due_ms; /* when reading on for a client that has gone must end; 0: it has not gone */
    uint64_t progress_ms;  /* last time that the side we wait for did something */
    uint64_t body_bytes;   /* of the request, received */
    uint64_t sent_mark;    /* bytes the upstream's socket had taken at the last look */
    uint64_t sent_before;  /* and before this call: as long as it is that, nothing of the call has gone out */
    uint16_t status;       /* sent to the client; 0: none */
    uint8_t phase;         /* enum outcome_phase */
    uint8_t half_close;    /* enum config_half_close */
    uint8_t api;           /* enum config_api */
    uint8_t client_minor;
    char client_address[48]; /* once it has gone */
    bool ended;
    bool response_done; /* received whole */
    bool head_request;
    bool explicit_keep_alive;
    bool request_has_body;
    bool body_done;   /* received whole */
    bool request_out; /* sent whole */
    bool client_paused;
    bool probing;        /* a half-close probe is out */
    bool client_had_all; /* the stream's terminator, before the client went */
    bool replayed;
    bool tunnel;           /* 101 */
    bool client_ended;     /* of a tunnel: FIN from the client */
    bool upstream_ended;   /* of a tunnel: FIN from the upstream */
    bool length_delimited; /* the response, towards the client */
    bool keep_client;      /* the response said that the connection stays */
};

/* --- call_time.c --- */

struct loop *call_loop(const struct call *c);
/* The only writer of the phase; forwards only (a replay steps back by itself). May end the call: look at c->ended. */
void call_set_phase(struct call *c, enum outcome_phase p);
/* The side that we wait for did something. May end the call, when there is no memory for a deadline. */
void call_progress(struct call *c);
void call_rearm(struct call *c);
void call_on_deadline(struct deadline *d);

/* --- call.c --- */

/* The model is known, or there is none to wait for: asks for the lease. May end the call. */
void call_admit(struct call *c);
/* Gives the upstream what is held, as far as its socket takes it; the client is slowed down by it. */
void call_send_held(struct call *c);
/* The client's FIN came while half_close says "probe" or "serve". */
void call_probe(struct call *c);
/* The client has gone: the end, or the drain where the upstream's configuration asks for it. */
void call_lose_client(struct call *c, enum outcome o, const char *detail);

/* --- call_body.c --- */

/* The body must be seen before the call can be admitted. May end the call. */
void call_scan(struct call *c);
void call_on_portion(struct deadline *d);
void call_on_body(void *owner, char *bytes, size_t n);
void call_on_body_end(void *owner);
void call_on_bad_body(void *owner, enum parse_error e);
/* The scanner's or the path's verdict that no model can be told. Ends the call. */
void call_refuse_scan(struct call *c, enum bodyscan_error e);
void call_refuse_size(struct call *c, const char *message);
/* The response has begun, or nothing is to be sent any more: head, body and scanner go. */
void call_free_request(struct call *c);

/* --- call_end.c --- */

/* The end, in any phase, once. `detail` is for the log. */
void call_end(struct call *c, enum outcome o, const char *detail);
/* The same; `given`: the answer's own words where the outcome's do not say enough (fields left 0 are the outcome's). */
void call_refuse(struct call *c, enum outcome o, const struct reply *given, const char *detail);
/* An id of our own: the instance and a number that is unique in it. */
struct slice call_make_request_id(struct service *s, char out[64]);
void call_on_bad_head(void *arg, struct client *client, enum parse_error e);
void call_on_head_timeout(void *arg, struct client *client);

#endif
