/*
 * call.h - the story of one call, from its head to its true end. Opaque: a call is
 * begun by a client's request and ends by itself.
 */
#ifndef LG_CALL_H
#define LG_CALL_H

#include "client.h"
#include "service.h"

/* Where a request came in. */
struct call_entry {
    struct service **service; /* the worker's present one: read at each request */
    enum config_half_close half_close;
};

/* For a client_group whose arg is a struct call_entry. */
extern const struct client_ops call_client_ops;

/* Ends every call of the list now (the drain's time is over). */
void call_end_all(struct list *calls);

#endif
