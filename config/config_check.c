/*
 * config_check.c - what only the whole configuration can tell: names that must
 * exist or must not repeat, times that must fit each other, settings that
 * would do nothing or do harm. Fills in the references between sections.
 *
 * Runs after config_build even when that complained, so that one run names
 * everything; a field that could not be read is NULL or 0 here and is passed
 * over, since its own complaint is there already.
 */
#include "config_parts.h"

#include <stdlib.h>

/* Complains about each title that an earlier section of the same kind has. Header names match in any case. */
static void check_repeats(struct config_load *l, const struct config_node *parent, enum config_section s,
                          bool folded)
{
    for (const struct config_node *n = config_node_first(parent, s); n != NULL; n = config_node_next(n)) {
        for (const struct config_node *first = config_node_first(parent, s); first != n;
             first = config_node_next(first)) {
            struct slice a = slice_of(first->title), b = slice_of(n->title);

            if (folded ? !slice_ieq(a, b) : !slice_eq(a, b))
                continue;
            config_complain(l, n, n->line, "is there twice; first in line %u", first->line);
            break;
        }
    }
}

static void check_name(struct config_load *l, const struct config_node *n)
{
    if (!config_is_name(slice_of(n->title)))
        config_complain(l, n, n->line, "a name is 1 to %d of A-Z a-z 0-9 . _ -", CONFIG_NAME_MAX);
}

/* Names and values that clients or keys bring: any bytes but control characters. */
static void check_value_title(struct config_load *l, const struct config_node *n)
{
    size_t length = strlen(n->title);

    for (const char *p = n->title; *p != '\0'; p++)
        if ((unsigned char)*p < ' ' || *p == 0x7f)
            length = 0;
    if (length == 0 || length > CONFIG_VALUE_MAX)
        config_complain(l, n, n->line, "its title must have 1 to %d bytes and no control character",
                        CONFIG_VALUE_MAX);
}

static bool is_set(const char *text)
{
    return text != NULL && *text != '\0';
}

static bool same_address(const struct config_address *a, const struct config_address *b)
{
    return a->host != NULL && b->host != NULL && a->port != 0 && a->port == b->port &&
           strcmp(a->host, b->host) == 0;
}

static void check_pair(struct config_load *l, const struct config_node *n, const struct config_tls *tls)
{
    if (is_set(tls->key) && tls->cert != NULL && *tls->cert == '\0')
        config_complain(l, n, config_node_line(n, "tls_key"), "`tls_key` without `tls_cert`");
    if (is_set(tls->cert) && tls->key != NULL && *tls->key == '\0')
        config_complain(l, n, config_node_line(n, "tls_cert"), "`tls_cert` without `tls_key`");
}

static void check_listens(struct config_load *l)
{
    const struct config *c = l->config;
    const struct config_node *n = config_node_first(l->root, SECTION_LISTEN);

    if (c->n_listens == 0)
        config_complain(l, NULL, 0, "there is no `listen \"ADDRESS:PORT\" {}`: nobody could connect");
    for (size_t i = 0; i < c->n_listens; i++, n = config_node_next(n)) {
        const struct config_listen *listen = &c->listens[i];

        check_pair(l, n, &listen->tls);
        if (is_set(listen->tls.ca) && listen->tls.cert != NULL && *listen->tls.cert == '\0')
            config_complain(l, n, config_node_line(n, "client_ca"), "`client_ca` without `tls_cert`");
        for (size_t k = 0; k < i; k++)
            if (same_address(&c->listens[k].address, &listen->address))
                config_complain(l, n, n->line, "is the same address as in line %u", c->listens[k].tls.line);
    }
}

static void check_admin(struct config_load *l)
{
    const struct config *c = l->config;
    const struct config_node *n = config_node_first(l->root, SECTION_ADMIN);

    if (n == NULL || c->admin.host == NULL)
        return;
    if (!config_address_is_loopback(&c->admin) && c->admin_token != NULL && *c->admin_token == '\0')
        config_complain(l, n, n->line, "is not on loopback, so it needs a `token`");
    for (size_t i = 0; i < c->n_listens; i++)
        if (same_address(&c->listens[i].address, &c->admin))
            config_complain(l, n, n->line, "is the same address as the listener in line %u",
                            c->listens[i].tls.line);
}

static void check_redis(struct config_load *l)
{
    const struct config *c = l->config;
    const struct config_node *first = config_node_first(l->root, SECTION_REDIS), *n = first;

    for (size_t i = 0; n != NULL && i < c->n_redis; i++, n = config_node_next(n)) {
        const struct config_redis *r = &c->redis[i];
        const struct config_tls *tls = &r->tls;
        char timeout[24], ttl[24];

        if (n != first) /* its limits would be counted elsewhere than it says */
            config_complain(l, n, n->line,
                            "several redis sections are not available in this version; first in line %u",
                            first->line);
        if (*n->title != '\0')
            check_name(l, n);
        check_pair(l, n, tls);
        if (r->url != NULL && !r->use_tls && (is_set(tls->ca) || is_set(tls->cert)))
            config_complain(l, n, n->line, "has tls_ options, but its `url` is not rediss://");
        if (r->timeout_ms > 0 && c->ttl_ms > 0 && r->timeout_ms >= c->ttl_ms)
            config_complain(
                l, n, config_node_line(n, "timeout"),
                "`timeout` (%s) must be less than the lease's `ttl` (%s), or leases die while Redis is slow",
                config_duration_text(r->timeout_ms, timeout), config_duration_text(c->ttl_ms, ttl));
    }
}

static void check_lease(struct config_load *l)
{
    const struct config *c = l->config;
    const struct config_node *n = config_node_first(l->root, SECTION_LEASE);
    char heartbeat[24], ttl[24];

    if (n == NULL || c->heartbeat_ms == 0 || c->ttl_ms == 0)
        return;
    config_duration_text(c->heartbeat_ms, heartbeat);
    config_duration_text(c->ttl_ms, ttl);
    if (c->ttl_ms < 2 * c->heartbeat_ms)
        config_complain(l, n, config_node_line(n, "ttl"),
                        "`ttl` (%s) must be at least two heartbeats (%s), better three", ttl, heartbeat);
    else if (c->ttl_ms < 3 * c->heartbeat_ms)
        config_warn(l, n, config_node_line(n, "ttl"),
                    "`ttl` (%s) is less than three heartbeats (%s): one late renewal may lose a slot", ttl,
                    heartbeat);
}

/* Written by the gateway itself, or of one connection only (RFC 9110 section 7.6.1, RFC 9112). */
static bool is_reserved_header(struct slice name)
{
    static const char *const reserved[] = {
        "connection", "content-length",   "expect",  "host",    "keep-alive",
        "te",         "proxy-connection", "upgrade", "trailer", "transfer-encoding"};

    for (size_t i = 0; i < ARRAY_LEN(reserved); i++)
        if (slice_ieq(name, slice_of(reserved[i])))
            return true;
    return name.n >= 12 && slice_ieq((struct slice){name.p, 12}, SLICE("x-leasegate-"));
}

static void check_headers(struct config_load *l, const struct config_node *upstream)
{
    size_t count = 0;

    check_repeats(l, upstream, SECTION_HEADER, true);
    for (const struct config_node *h = config_node_first(upstream, SECTION_HEADER); h != NULL;
         h = config_node_next(h)) {
        struct slice name = slice_of(h->title);

        if (!config_is_token(name) || name.n > CONFIG_VALUE_MAX)
            config_complain(l, h, h->line, "is no name of a header");
        else if (is_reserved_header(name))
            config_complain(l, h, h->line, "is written by the gateway itself and cannot be set");
        if (++count == CONFIG_HEADERS_MAX + 1)
            config_complain(l, h, h->line, "is one too many: an upstream sets at most %d headers",
                            CONFIG_HEADERS_MAX);
    }
}

static void check_upstreams(struct config_load *l)
{
    const struct config *c = l->config;
    const struct config_node *n = config_node_first(l->root, SECTION_UPSTREAM);

    if (c->n_upstreams == 0)
        config_complain(l, NULL, 0,
                        "there is no `upstream \"NAME\" { url = … }`: nothing could be forwarded");
    check_repeats(l, l->root, SECTION_UPSTREAM, false);
    for (size_t i = 0; i < c->n_upstreams; i++, n = config_node_next(n)) {
        const struct config_upstream *u = &c->upstreams[i];

        check_name(l, n);
        check_pair(l, n, &u->tls);
        if (u->url != NULL && !u->use_tls && (is_set(u->tls.ca) || is_set(u->tls.cert)))
            config_complain(l, n, n->line, "has tls_ options, but its `url` is not https://");
        if (u->url != NULL && u->use_tls && !u->tls.verify && config_node_entry(n, "tls_verify") != NULL)
            config_warn(l, n, config_node_line(n, "tls_verify"),
                        "anybody between here and %s can read and change its calls", u->host);
        check_headers(l, n);
    }
}

static bool is_path_prefix(const char *s)
{
    return *s == '/' && config_is_visible(slice_of(s)) && strchr(s, '?') == NULL && strchr(s, '#') == NULL &&
           strlen(s) <= 1024;
}

static int longer_prefix_first(const void *a, const void *b)
{
    const struct config_route *x = a, *y = b;
    size_t nx = strlen(x->prefix), ny = strlen(y->prefix);

    return nx != ny ? (nx > ny ? -1 : 1) : strcmp(x->prefix, y->prefix);
}

static void check_routes(struct config_load *l)
{
    struct config *c = l->config;
    const struct config_node *n = config_node_first(l->root, SECTION_ROUTE);
    bool complete = true;

    if (c->n_routes == 0)
        config_complain(l, NULL, 0, "there is no `route \"/\" { upstream = … }`: nothing is forwarded");
    check_repeats(l, l->root, SECTION_ROUTE, false);
    for (size_t i = 0; i < c->n_routes; i++, n = config_node_next(n)) {
        const struct config_entry *e = config_node_entry(n, "upstream");

        if (!is_path_prefix(n->title))
            config_complain(l, n, n->line,
                            "a route is the beginning of a path: it starts with / and has no ? # or space");
        for (size_t k = 0; e != NULL && e->n == 1 && k < c->n_upstreams; k++)
            if (c->upstreams[k].name != NULL && strcmp(c->upstreams[k].name, e->values[0]) == 0)
                c->routes[i].upstream = &c->upstreams[k];
        if (e != NULL && e->n == 1 && c->routes[i].upstream == NULL)
            config_complain(l, n, e->line, "there is no upstream \"%.64s\"", e->values[0]);
        complete = complete && c->routes[i].prefix != NULL;
    }
    if (complete && c->n_routes > 1)
        qsort(c->routes, c->n_routes, sizeof(*c->routes), longer_prefix_first);
}

static void check_tenant(struct config_load *l)
{
    const struct config_node *n = config_node_first(l->root, SECTION_TENANT);

    if (n == NULL)
        return;
    check_repeats(l, n, SECTION_MAP, false);
    for (const struct config_node *m = config_node_first(n, SECTION_MAP); m != NULL;
         m = config_node_next(m)) {
        check_value_title(l, m);
        if (l->config->tenant.from == CONFIG_TENANT_NONE)
            config_complain(l, m, m->line, "maps tenants, but the tenant comes `from` nowhere");
    }
}

static void check_limit_upstreams(struct config_load *l, const struct config_node *n,
                                  const struct config_limit *limit)
{
    const struct config *c = l->config;

    for (size_t i = 0; i < limit->n_upstreams; i++) {
        bool found = false;

        for (size_t k = 0; k < c->n_upstreams; k++)
            found = found ||
                    (c->upstreams[k].name != NULL && strcmp(c->upstreams[k].name, limit->upstreams[i]) == 0);
        if (!found)
            config_complain(l, n, config_node_line(n, "upstream"), "there is no upstream \"%.64s\"",
                            limit->upstreams[i]);
    }
}

static void check_limits(struct config_load *l)
{
    struct config *c = l->config;
    const struct config_node *n = config_node_first(l->root, SECTION_LIMIT);

    if (c->n_limits == 0)
        config_warn(l, NULL, 0, "there is no limit: calls are forwarded uncounted");
    check_repeats(l, l->root, SECTION_LIMIT, false);
    for (size_t i = 0; i < c->n_limits; i++, n = config_node_next(n)) {
        struct config_limit *limit = &c->limits[i];

        check_name(l, n);
        check_limit_upstreams(l, n, limit);
        if (c->tenant.from == CONFIG_TENANT_NONE && (limit->per_tenant || limit->n_tenants > 0))
            config_complain(l, n, config_node_line(n, limit->per_tenant ? "per" : "tenant"),
                            "asks for a tenant, but there is no `tenant { from = … }`");
        check_repeats(l, n, SECTION_OVERRIDE, limit->per_model);
        for (const struct config_node *o = config_node_first(n, SECTION_OVERRIDE); o != NULL;
             o = config_node_next(o)) {
            check_value_title(l, o);
            if (limit->per_tenant == limit->per_model)
                config_complain(l, o, o->line,
                                "an override needs a limit that is `per` one word: tenant or model");
        }
    }
}

void config_check(struct config_load *l)
{
    check_listens(l);
    check_admin(l);
    check_redis(l);
    check_lease(l);
    check_upstreams(l);
    check_routes(l);
    check_tenant(l);
    check_limits(l);
}
