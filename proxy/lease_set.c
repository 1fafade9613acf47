/*
 * lease_set.c - scope sets: their names and keys, the table they stand in, and their caps.
 *
 * A set is one combination of scopes that some call was counted by, keyed by the names of its scopes. It is made
 * when it is first asked for, with its keys written out once, and freed by lease.c when no lease has referred to
 * it for a while. Its caps follow the newest configuration: each ask and each reload sets them.
 */
#include "lease_parts.h"

#include "hash.h"
#include "mem.h"

#define TAG "main" /* the cluster hash tag: one for all limits, as any may have to be taken together */
#define VALUE_MAX 64
#define NAMES_MAX (LEASE_SCOPES_MAX * (LEASE_SCOPE_MAX + 1))

/* --- names ---------------------------------------------------------------------------------------------- */

static bool value_is_plain(struct slice v)
{
    if (v.n == 0 || v.n > VALUE_MAX || (v.n >= 2 && v.p[0] == 'h' && v.p[1] == '-'))
        return false;
    for (size_t i = 0; i < v.n; i++) {
        char c = v.p[i];

        if (!((c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '.' ||
              c == '_' || c == '-'))
            return false;
    }
    return true;
}

/* The value as it stands in a key: itself, or its hash in `hashed` (34 bytes). */
static struct slice value_in_key(struct slice v, char hashed[34])
{
    if (value_is_plain(v))
        return v;
    hashed[0] = 'h';
    hashed[1] = '-';
    hash_stable_hex(v, hashed + 2);
    return (struct slice){hashed, 34};
}

bool lease_scope_add(struct lease_scope *s, struct slice value)
{
    char hashed[34];
    struct slice v = value_in_key(value, hashed);

    if (s->name_n + 1 + v.n > LEASE_SCOPE_MAX)
        return false;
    s->name[s->name_n] = '/';
    memcpy(s->name + s->name_n + 1, v.p, v.n);
    s->name_n += 1 + v.n;
    return true;
}

/* --- scope sets ----------------------------------------------------------------------------------------- */

static struct scope_set *set_find(struct leases *ls, uint64_t hash, struct slice names)
{
    struct scope_set *set = ls->table[hash & (ls->slots - 1)];

    while (set != NULL && !(set->hash == hash && slice_eq(set->names, names)))
        set = set->chain;
    return set;
}

/* Doubles the table; without memory its chains grow longer, that is all. */
static void table_grow(struct leases *ls)
{
    size_t slots = ls->slots * 2;
    struct scope_set **table = mem_zalloc(slots * sizeof(struct scope_set *));

    if (table == NULL)
        return;
    for (size_t i = 0; i < ls->slots; i++) {
        struct scope_set *set = ls->table[i];

        while (set != NULL) {
            struct scope_set *next = set->chain, **slot = &table[set->hash & (slots - 1)];

            set->chain = *slot;
            *slot = set;
            set = next;
        }
    }
    mem_free(ls->table);
    ls->table = table;
    ls->slots = slots;
}

/* Writes the keys behind the names: "<prefix>:{<tag>}:<scope>:leases". */
char *lease_put_key(char *p, const char *prefix, const struct lease_scope *s, struct slice *key)
{
    size_t n = strlen(prefix);

    key->p = p;
    memcpy(p, prefix, n);
    p += n;
    memcpy(p, ":{" TAG "}:", sizeof(":{" TAG "}:") - 1);
    p += sizeof(":{" TAG "}:") - 1;
    memcpy(p, s->name, s->name_n);
    p += s->name_n;
    memcpy(p, ":leases", 7);
    p += 7;
    key->n = (size_t)(p - key->p);
    return p;
}

static struct scope_set *set_new(struct leases *ls, uint64_t hash, struct slice names,
                                 const struct lease_scope *scopes, size_t n)
{
    size_t text = names.n + n * (strlen(ls->prefix) + sizeof(":{" TAG "}:") + sizeof(":leases"));
    struct scope_set *set, **slot;
    char *p;

    text += names.n; /* the names once more, in the keys */
    set = mem_zalloc(sizeof(*set) + text);
    if (set == NULL)
        return NULL;
    set->leases = ls;
    set->hash = hash;
    set->home = ls->next_home++ % LEASE_BUCKETS;
    set->n = (uint8_t)n;
    list_init(&set->asks);
    list_init(&set->owed);
    for (size_t i = 0; i < LEASE_BUCKETS; i++)
        list_init(&set->held[i]);
    memcpy(set->text, names.p, names.n);
    set->names = (struct slice){set->text, names.n};
    p = set->text + names.n;
    for (size_t i = 0; i < n; i++)
        p = lease_put_key(p, ls->prefix, &scopes[i], &set->keys[i]);
    BUG_ON(p > set->text + text);
    if (ls->n_sets >= ls->slots)
        table_grow(ls);
    slot = &ls->table[hash & (ls->slots - 1)];
    set->chain = *slot;
    *slot = set;
    ls->n_sets++;
    return set;
}

void lease_set_free(struct scope_set *set)
{
    struct leases *ls = set->leases;
    struct scope_set **link = &ls->table[set->hash & (ls->slots - 1)];

    while (*link != set)
        link = &(*link)->chain;
    *link = set->chain;
    ls->n_sets--;
    if (ls->last == set)
        ls->last = NULL;
    if (list_linked(&set->dirty))
        list_remove(&ls->dirty, &set->dirty);
    if (list_linked(&set->idle))
        list_remove(&ls->idle, &set->idle);
    mem_free(set);
}

/* fn for each set; it may not make or free sets. */
void lease_sets_each(struct leases *ls, void (*fn)(struct scope_set *set, void *arg), void *arg)
{
    for (size_t i = 0; i < ls->slots; i++)
        for (struct scope_set *set = ls->table[i]; set != NULL; set = set->chain)
            fn(set, arg);
}

/* --- caps ----------------------------------------------------------------------------------------------- */

static const struct config_limit *limit_named(const struct config *c, struct slice name)
{
    for (size_t i = 0; i < c->n_limits; i++)
        if (slice_eq(slice_of(c->limits[i].name), name))
            return &c->limits[i];
    return NULL;
}

/*
 * The cap of a scope "<limit>[/<value>…]" in the present configuration; `old` where the limit is no longer in
 * it.
 */
static uint32_t cap_now(const struct config *c, struct slice scope, uint32_t old)
{
    struct slice rest, limit_name = {scope.p, slice_find(scope, '/')}, value = {0};
    const struct config_limit *limit = limit_named(c, limit_name);

    if (limit == NULL)
        return old;
    if (limit_name.n < scope.n) {
        rest = (struct slice){scope.p + limit_name.n + 1, scope.n - limit_name.n - 1};
        value = (struct slice){rest.p, slice_find(rest, '/')};
    }
    for (size_t i = 0; i < limit->n_overrides && value.n > 0; i++) {
        char hashed[34];

        if (slice_eq(value_in_key(slice_of(limit->overrides[i].value), hashed), value))
            return limit->overrides[i].concurrency;
    }
    return limit->concurrency;
}

/* Configuration rules, and the newest: a call that began under an older one does not bring its caps back. */
static void set_take_caps(struct scope_set *set, const struct lease_scope *scopes)
{
    const struct config *c = set->leases->config;
    uintptr_t begin = (uintptr_t)c->limits, end = (uintptr_t)(c->limits + c->n_limits);

    for (size_t i = 0; i < set->n; i++) {
        uintptr_t limit = (uintptr_t)scopes[i].limit;
        bool current = limit >= begin && limit < end;

        set->caps[i] = current ? scopes[i].cap
                               : cap_now(c, (struct slice){scopes[i].name, scopes[i].name_n}, scopes[i].cap);
    }
}

void lease_set_recap(struct scope_set *set, void *arg UNUSED)
{
    struct slice rest = set->names;

    for (size_t i = 0; i < set->n; i++) {
        size_t n = slice_find(rest, ' ');

        set->caps[i] = cap_now(set->leases->config, (struct slice){rest.p, n}, set->caps[i]);
        rest = (struct slice){rest.p + n + 1, rest.n - n - 1};
    }
}

/* --- finding ------------------------------------------------------------------------------------------- */

struct scope_set *lease_set_for(struct leases *ls, const struct lease_scope *scopes, size_t n)
{
    char names[NAMES_MAX];
    struct slice key = {names, 0};
    struct scope_set *set;
    uint64_t hash;

    for (size_t i = 0; i < n; i++) {
        memcpy(names + key.n, scopes[i].name, scopes[i].name_n);
        key.n += scopes[i].name_n;
        names[key.n++] = ' ';
    }
    set = ls->last;
    if (set == NULL || !slice_eq(set->names, key)) {
        hash = hash_keyed(key);
        set = set_find(ls, hash, key);
        if (set == NULL)
            set = set_new(ls, hash, key, scopes, n);
        if (set == NULL)
            return NULL;
        ls->last = set;
    }
    set_take_caps(set, scopes);
    return set;
}
