/*
 * config_dump.c - a snapshot in the file's own syntax, row by row of the
 * option table, so that what is shown can be read again. Secrets are "***".
 */
#include "config_parts.h"

static bool put(struct buf *out, const char *text)
{
    return buf_put(out, slice_of(text));
}

static bool put_indent(struct buf *out, unsigned depth)
{
    for (; depth > 0; depth--)
        if (!put(out, "    "))
            return false;
    return true;
}

static bool put_options(struct buf *out, enum config_section s, const void *base, unsigned depth)
{
    size_t n;
    const struct config_option_row *options = config_options(&n);

    for (size_t i = 0; i < n; i++) {
        const struct config_option_row *o = &options[i];
        bool list = o->type_ == TYPE_GLOBS || o->type_ == TYPE_NAMES || o->type_ == TYPE_PER;
        size_t start = out->n;

        if (o->section_ != s || (o->flags_ & OPTION_LATER) != 0)
            continue;
        if (!put_indent(out, depth) || !put(out, o->name) || !put(out, " = ") ||
            !config_value_put(o, base, out))
            return false;
        if (list && out->n >= 2 && memcmp(out->p + out->n - 2, "{}", 2) == 0)
            out->n = start; /* the syntax has no empty list: left out means just that */
        else if (!put(out, "\n"))
            return false;
    }
    return true;
}

static bool put_begin(struct buf *out, enum config_section s, const char *title, unsigned depth)
{
    if (!put_indent(out, depth) || !put(out, config_section_row(s)->name))
        return false;
    if (title != NULL && (!put(out, " ") || !config_put_quoted(out, title)))
        return false;
    return put(out, " {\n");
}

static bool put_end(struct buf *out, unsigned depth)
{
    return put_indent(out, depth) && put(out, "}\n");
}

static bool put_section(struct buf *out, enum config_section s, const char *title, const void *base,
                        unsigned depth)
{
    return put_begin(out, s, title, depth) && put_options(out, s, base, depth + 1) && put_end(out, depth);
}

static bool put_upstream(struct buf *out, const struct config_upstream *u)
{
    if (!put_begin(out, SECTION_UPSTREAM, u->name, 0) || !put_options(out, SECTION_UPSTREAM, u, 1))
        return false;
    for (size_t i = 0; i < u->n_headers; i++)
        if (!put_section(out, SECTION_HEADER, u->headers[i].name, &u->headers[i], 1))
            return false;
    return put_end(out, 0);
}

static bool put_tenant(struct buf *out, const struct config *c)
{
    const struct config_tenant *t = &c->tenant;

    if (!put_begin(out, SECTION_TENANT, NULL, 0) || !put_options(out, SECTION_TENANT, c, 1))
        return false;
    for (size_t i = 0; i < t->n_map; i++) {
        char masked[32] = "***"; /* what is mapped are keys then; counted, since titles do not repeat */

        masked[3 + str_put_u64(masked + 3, i + 1)] = '\0';
        if (!put_section(out, SECTION_MAP, t->from == CONFIG_TENANT_KEY ? masked : t->map[i].from, &t->map[i],
                         1))
            return false;
    }
    return put_end(out, 0);
}

static bool put_limit(struct buf *out, const struct config_limit *limit)
{
    if (!put_begin(out, SECTION_LIMIT, limit->name, 0) || !put_options(out, SECTION_LIMIT, limit, 1))
        return false;
    for (size_t i = 0; i < limit->n_overrides; i++)
        if (!put_section(out, SECTION_OVERRIDE, limit->overrides[i].value, &limit->overrides[i], 1))
            return false;
    return put_end(out, 0);
}

bool config_dump(const struct config *c, struct buf *out)
{
    bool ok = put_options(out, SECTION_TOP, c, 0);

    for (size_t i = 0; ok && i < c->n_listens; i++)
        ok = put_section(out, SECTION_LISTEN, c->listens[i].address.text, &c->listens[i], 0);
    if (ok && c->has_admin)
        ok = put_section(out, SECTION_ADMIN, c->admin.text, c, 0);
    ok = ok && put_section(out, SECTION_CLIENT, NULL, c, 0);
    for (size_t i = 0; ok && i < c->n_redis; i++)
        ok = put_section(out, SECTION_REDIS, c->redis[i].name, &c->redis[i], 0);
    ok = ok && put_section(out, SECTION_LEASE, NULL, c, 0);
    for (size_t i = 0; ok && i < c->n_upstreams; i++)
        ok = put_upstream(out, &c->upstreams[i]);
    for (size_t i = 0; ok && i < c->n_routes; i++)
        ok = put_section(out, SECTION_ROUTE, c->routes[i].prefix, &c->routes[i], 0);
    ok = ok && put_tenant(out, c);
    for (size_t i = 0; ok && i < c->n_limits; i++)
        ok = put_limit(out, &c->limits[i]);
    return ok && put_section(out, SECTION_LOG, NULL, c, 0);
}
