/*
 * config_build.c - the tree to a snapshot: counts sections, makes their
 * arrays, and reads each option after its row of the table.
 *
 * Every section's fields are set, from the file or by default, also after an
 * error, so that config_check may look at all of them. Single sections that
 * the file leaves out are read as if they stood there empty.
 */
#include "config_parts.h"

#include <sched.h>

size_t config_node_count(const struct config_node *parent, enum config_section s)
{
    size_t n = 0;

    for (const struct config_node *c = config_node_first(parent, s); c != NULL; c = config_node_next(c))
        n++;
    return n;
}

static const struct config_node *next_of(const struct config_node *n, enum config_section s)
{
    while (n != NULL && n->section != s)
        n = n->next;
    return n;
}

const struct config_node *config_node_first(const struct config_node *parent, enum config_section s)
{
    return next_of(parent->children, s);
}

const struct config_node *config_node_next(const struct config_node *n)
{
    return next_of(n->next, n->section);
}

const struct config_entry *config_node_entry(const struct config_node *n, const char *name)
{
    const struct config_entry *found = NULL;

    for (const struct config_entry *e = n->entries; e != NULL; e = e->next)
        if (strcmp(e->option->name, name) == 0)
            found = e;
    return found;
}

unsigned config_node_line(const struct config_node *n, const char *name)
{
    const struct config_entry *e = config_node_entry(n, name);

    return e == NULL ? n->line : e->line;
}

static void complain_repeats(struct config_load *l, const struct config_node *n)
{
    for (const struct config_entry *e = n->entries; e != NULL; e = e->next) {
        for (const struct config_entry *first = n->entries; first != e; first = first->next) {
            if (first->option != e->option)
                continue;
            config_complain(l, n, e->line, "`%s` is given twice; first in line %u", e->option->name,
                            first->line);
            break;
        }
    }
}

/* Reads all options of one section into the struct at base. */
static void build_options(struct config_load *l, const struct config_node *n, void *base)
{
    size_t n_options;
    const struct config_option_row *options = config_options(&n_options);

    complain_repeats(l, n);
    for (size_t i = 0; i < n_options; i++) {
        const struct config_entry *e;

        if (options[i].section_ != n->section)
            continue;
        e = config_node_entry(n, options[i].name);
        if (e == NULL && (options[i].flags_ & OPTION_REQUIRED) != 0)
            config_complain(l, n, n->line, "`%s` is missing: %s", options[i].name, options[i].help);
        else
            (void)config_value_read(l, n, &options[i], base, e);
    }
}

/* A section that may stand once: its options belong to struct config itself. */
static const struct config_node *build_single(struct config_load *l, enum config_section s)
{
    struct config_node absent = {.section = s, .title = "", .parent = l->root};
    const struct config_node *n = config_node_first(l->root, s);

    for (const struct config_node *again = n == NULL ? NULL : config_node_next(n); again != NULL;
         again = config_node_next(again))
        config_complain(l, NULL, again->line, "`%s` may stand there once; first in line %u",
                        config_section_row(s)->name, n->line);
    build_options(l, n == NULL ? &absent : n, l->config);
    return n;
}

/* Room for all sections of that kind under parent. NULL: none there, or no memory. */
static void *build_array(struct config_load *l, const struct config_node *parent, enum config_section s,
                         size_t size, size_t *n)
{
    void *array;

    *n = config_node_count(parent, s);
    array = config_arena_alloc(&l->arena, (*n + 1) * size);
    if (array == NULL)
        *n = 0;
    return array;
}

static void build_title(struct config_load *l, const struct config_node *n, char **field)
{
    *field = config_arena_copy(&l->arena, slice_of(n->title));
}

static void build_listens(struct config_load *l)
{
    struct config *c = l->config;
    const struct config_node *n = config_node_first(l->root, SECTION_LISTEN);

    c->listens = build_array(l, l->root, SECTION_LISTEN, sizeof(*c->listens), &c->n_listens);
    for (size_t i = 0; i < c->n_listens; i++, n = config_node_next(n)) {
        (void)config_url_address(l, n, &c->listens[i].address);
        c->listens[i].tls.line = n->line;
        c->listens[i].tls.verify = true;
        build_options(l, n, &c->listens[i]);
    }
}

static void build_redis(struct config_load *l)
{
    struct config *c = l->config;
    struct config_node absent = {.section = SECTION_REDIS, .title = "", .parent = l->root};
    const struct config_node *n = config_node_first(l->root, SECTION_REDIS);

    c->redis = build_array(l, l->root, SECTION_REDIS, sizeof(*c->redis), &c->n_redis);
    if (c->n_redis == 0 && c->redis != NULL) {
        c->n_redis = 1; /* build_array leaves room for it */
        n = &absent;
    }
    for (size_t i = 0; i < c->n_redis; i++, n = config_node_next(n)) {
        if (*n->title == '\0')
            c->redis[i].name = config_arena_copy(&l->arena, SLICE("default"));
        else
            build_title(l, n, &c->redis[i].name);
        c->redis[i].tls.line = n->line;
        build_options(l, n, &c->redis[i]);
    }
}

static void build_upstreams(struct config_load *l)
{
    struct config *c = l->config;
    const struct config_node *n = config_node_first(l->root, SECTION_UPSTREAM), *h;

    c->upstreams = build_array(l, l->root, SECTION_UPSTREAM, sizeof(*c->upstreams), &c->n_upstreams);
    for (size_t i = 0; i < c->n_upstreams; i++, n = config_node_next(n)) {
        struct config_upstream *u = &c->upstreams[i];

        build_title(l, n, &u->name);
        u->index = (unsigned)i;
        u->tls.line = n->line;
        build_options(l, n, u);
        u->headers = build_array(l, n, SECTION_HEADER, sizeof(*u->headers), &u->n_headers);
        h = config_node_first(n, SECTION_HEADER);
        for (size_t k = 0; k < u->n_headers; k++, h = config_node_next(h)) {
            build_title(l, h, &u->headers[k].name);
            build_options(l, h, &u->headers[k]);
        }
    }
}

static void build_routes(struct config_load *l)
{
    struct config *c = l->config;
    const struct config_node *n = config_node_first(l->root, SECTION_ROUTE);

    c->routes = build_array(l, l->root, SECTION_ROUTE, sizeof(*c->routes), &c->n_routes);
    for (size_t i = 0; i < c->n_routes; i++, n = config_node_next(n)) {
        build_title(l, n, &c->routes[i].prefix);
        build_options(l, n, &c->routes[i]);
    }
}

/* Models are told apart without regard to ASCII case (some APIs do not heed it): everything is compared in small letters. */
static void fold_case(char *s)
{
    for (; s != NULL && *s != '\0'; s++)
        *s = ascii_lower(*s);
}

static void build_limits(struct config_load *l)
{
    struct config *c = l->config;
    const struct config_node *n = config_node_first(l->root, SECTION_LIMIT), *o;

    c->limits = build_array(l, l->root, SECTION_LIMIT, sizeof(*c->limits), &c->n_limits);
    for (size_t i = 0; i < c->n_limits; i++, n = config_node_next(n)) {
        struct config_limit *limit = &c->limits[i];

        build_title(l, n, &limit->name);
        limit->index = (unsigned)i;
        build_options(l, n, limit);
        for (size_t k = 0; k < limit->n_models; k++)
            fold_case(limit->models[k]);
        c->any_limit_needs_model = c->any_limit_needs_model || limit->n_models > 0 || limit->per_model;
        limit->overrides = build_array(l, n, SECTION_OVERRIDE, sizeof(*limit->overrides),
                                       &limit->n_overrides);
        o = config_node_first(n, SECTION_OVERRIDE);
        for (size_t k = 0; k < limit->n_overrides; k++, o = config_node_next(o)) {
            build_title(l, o, &limit->overrides[k].value);
            if (limit->per_model)
                fold_case(limit->overrides[k].value);
            build_options(l, o, &limit->overrides[k]);
        }
    }
}

static void build_tenant(struct config_load *l)
{
    struct config_tenant *t = &l->config->tenant;
    const struct config_node *n = build_single(l, SECTION_TENANT), *m;

    if (n == NULL)
        return;
    t->map = build_array(l, n, SECTION_MAP, sizeof(*t->map), &t->n_map);
    m = config_node_first(n, SECTION_MAP);
    for (size_t i = 0; i < t->n_map; i++, m = config_node_next(m)) {
        build_title(l, m, &t->map[i].from);
        build_options(l, m, &t->map[i]);
    }
}

static unsigned cores(void)
{
    cpu_set_t set;

    if (sched_getaffinity(0, sizeof(set), &set) != 0)
        return 1;
    return (unsigned)size_min((size_t)CPU_COUNT(&set), 256);
}

void config_build(struct config_load *l)
{
    struct config *c = l->config;
    const struct config_node *admin;

    c->path = config_arena_copy(&l->arena, slice_of(l->path));
    build_options(l, l->root, c);
    if (c->workers == 0)
        c->workers = cores();
    admin = build_single(l, SECTION_ADMIN);
    c->has_admin = admin != NULL;
    if (admin != NULL)
        (void)config_url_address(l, admin, &c->admin);
    (void)build_single(l, SECTION_CLIENT);
    (void)build_single(l, SECTION_LEASE);
    (void)build_single(l, SECTION_LOG);
    build_listens(l);
    build_redis(l);
    build_upstreams(l);
    build_routes(l);
    build_tenant(l);
    build_limits(l);
}
