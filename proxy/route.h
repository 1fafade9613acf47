/*
 * route.h - which call is it: from a request head and a configuration to the
 * upstream, the shape of error bodies, the tenant, where the model stands, and the scopes that count
 * the call. Pure: no I/O, no allocation, no state.
 *
 * Route, tenant and model are taken from the same raw bytes that are forwarded: nothing is
 * normalised on the way (RFC 9110 section 7.7, cases H014).
 */
#ifndef LG_ROUTE_H
#define LG_ROUTE_H

#include "config.h"
#include "http.h"
#include "lease.h"
#include "modelname.h"

enum route_model {
    ROUTE_MODEL_KNOWN,    /* the path, query or header tells it: `model` is set */
    ROUTE_MODEL_REQUIRED, /* it stands in the body, and this endpoint always has one */
    ROUTE_MODEL_OPTIONAL, /* it may stand in the body */
    ROUTE_MODEL_NONE,     /* this endpoint takes no model; the body is not looked at */
    ROUTE_MODEL_BAD,      /* it is named twice or not validly: `model_error` */
};

struct route {
    const struct config_upstream *upstream;
    enum config_api api; /* shape of bodies that are made here */
    enum route_model model_from;
    enum bodyscan_error model_error;
    bool ambiguous; /* the header that names the tenant or the model is given twice: readers differ */
    bool scan;      /* the body must be scanned before admission */
    struct model_name model; /* empty until it is known */
    struct slice tenant;     /* into the head, the configuration or tenant_buf_; empty: none */
    char tenant_buf_[40];
};

/* False: no route leads anywhere from this path (api is set all the same). */
MUST_CHECK bool route_find(const struct config *c, const struct http_head *h, struct route *out);

/*
 * The scopes of every limit that counts this call, in the order of the configuration.
 * Returns how many, or -1 when more than LEASE_SCOPES_MAX limits match.
 */
int route_scopes(const struct config *c, const struct route *r, struct lease_scope out[LEASE_SCOPES_MAX]);

/* The target without what may be a secret: values of `key`, `api-key`, … in the query become "***". For logs. Writes at most n bytes. */
struct slice route_loggable_target(struct slice target, char *out, size_t n);

#endif
