/*
 * note.h - what is remembered of a call for its log line and its answers: one block,
 * made at the head, kept to the end; and the log line itself. Never keys, never bodies.
 */
#ifndef LG_NOTE_H
#define LG_NOTE_H

#include "http.h"
#include "outcome.h"
#include "route.h"

#define NOTE_LEASE_MAX 64
#define NOTE_WORD_MAX 80

struct note {
    struct slice method, target, tenant, task, request_id, traceparent; /* into bytes_, or static */
    char *model;                                                        /* "": none or not known yet; owned */
    char bytes_[];
};

/* own_id: the request id where the client sent none. NULL: no memory. Owner: the caller, note_free. */
struct note *note_new(const struct http_head *h, const struct route *r, enum config_tenant_log how,
                      struct slice own_id);
/* The model is known. False: no memory. */
MUST_CHECK bool note_set_model(struct note *n, struct slice model);
void note_free(struct note *n);

/* What the log line says beyond the note. Times in us, 0: did not happen. */
struct note_end {
    enum outcome outcome;
    enum outcome_phase phase;
    unsigned status;
    char reason[NOTE_WORD_MAX];
    char limit[NOTE_WORD_MAX];
    char lease[NOTE_LEASE_MAX];
    char client[NOTE_WORD_MAX];
    const char *detail;   /* "": none */
    const char *upstream; /* "": none */
    uint64_t began_us, admitted_us, opened_us, head_us, ended_us;
    uint64_t bytes_in, bytes_out;
    bool replayed;
};

/* Copies s, cut where it must be, as a string. */
void note_text(char *to, size_t size, struct slice s);
/* One line "call"; n may be NULL when there was no head worth a note. */
void note_log(const struct note *n, const struct note_end *e);

#endif
