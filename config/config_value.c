/*
 * config_value.c - the types of options: from the words of the file to a field
 * of the snapshot, and back for dumps. Defaults go the same way as what is in
 * the file, so a default can never be a value that a file could not give.
 *
 * Complaints name the option, what was written and what would be right; never
 * a secret. Strings are copied into the snapshot's arena.
 */
#include "config_parts.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <sys/stat.h>
#include <unistd.h>

/* One option being read. */
struct reader {
    struct config_load *load;
    const struct config_node *node;
    const struct config_option_row *option;
    unsigned line;
    size_t n;
    const char *const *values;
};

#define COMPLAIN(r, ...) (config_complain((r)->load, (r)->node, (r)->line, __VA_ARGS__), false)

static bool is_one_of(char c, const char *set)
{
    return c != '\0' && strchr(set, c) != NULL;
}

static bool is_alnum(char c)
{
    return (c >= '0' && c <= '9') || (ascii_lower(c) >= 'a' && ascii_lower(c) <= 'z');
}

bool config_is_token(struct slice s)
{
    for (size_t i = 0; i < s.n; i++)
        if (!is_alnum(s.p[i]) && !is_one_of(s.p[i], "!#$%&'*+-.^_`|~"))
            return false;
    return s.n > 0;
}

bool config_is_name(struct slice s)
{
    for (size_t i = 0; i < s.n; i++)
        if (!is_alnum(s.p[i]) && !is_one_of(s.p[i], "._-"))
            return false;
    return s.n > 0 && s.n <= CONFIG_NAME_MAX;
}

bool config_is_visible(struct slice s)
{
    for (size_t i = 0; i < s.n; i++)
        if ((unsigned char)s.p[i] <= ' ' || s.p[i] == 0x7f)
            return false;
    return true;
}

const char *config_duration_text(uint64_t ms, char out[24])
{
    static const struct {
        uint64_t ms;
        const char *unit;
    } units[] = {{3600000, "h"}, {60000, "m"}, {1000, "s"}, {1, "ms"}};
    size_t u = 0;

    while (ms % units[u].ms != 0 || (ms == 0 && units[u].ms != 1000))
        u++;
    snprintf(out, 24, "%llu%s", (unsigned long long)(ms / units[u].ms), units[u].unit);
    return out;
}

static const char *size_text(uint64_t bytes, char out[24])
{
    static const char units[] = "gmk";

    for (unsigned u = 0; u < 3; u++) {
        uint64_t unit = UINT64_C(1) << (30 - 10 * u);

        if (bytes >= unit && bytes % unit == 0) {
            snprintf(out, 24, "%llu%c", (unsigned long long)(bytes / unit), units[u]);
            return out;
        }
    }
    snprintf(out, 24, "%llu", (unsigned long long)bytes);
    return out;
}

/* ---- numbers and words --------------------------------------------------------------------------------- */

static bool read_bool(struct reader *r, bool *field)
{
    static const char *const words[] = {"false", "true", "no", "yes", "off", "on"};

    for (size_t i = 0; i < ARRAY_LEN(words); i++) {
        if (strcmp(words[i], r->values[0]) == 0) {
            *field = i % 2 == 1;
            return true;
        }
    }
    return COMPLAIN(r, "`%s` = %.60s: write true or false", r->option->name, r->values[0]);
}

static bool read_number(struct reader *r, uint64_t *out)
{
    const struct config_option_row *o = r->option;
    struct slice s = slice_of(r->values[0]);
    char least[24], most[24];
    bool ok;

    switch (o->type_) {
    case TYPE_DURATION:
        ok = str_parse_duration_ms(s, out);
        if (!ok)
            return COMPLAIN(r, "`%s` = %.60s is no duration: write 250ms, 2s, 5m or 1h", o->name, s.p);
        config_duration_text(o->min_, least);
        config_duration_text(o->max_, most);
        break;
    case TYPE_SIZE:
        ok = str_parse_size(s, out);
        if (!ok)
            return COMPLAIN(r, "`%s` = %.60s is no size: write 64k, 8m, 1g or a number of bytes", o->name,
                            s.p);
        size_text(o->min_, least);
        size_text(o->max_, most);
        break;
    default:
        ok = str_parse_u64(s, out);
        snprintf(least, sizeof(least), "%llu", (unsigned long long)o->min_);
        snprintf(most, sizeof(most), "%llu", (unsigned long long)o->max_);
        if (!ok)
            return COMPLAIN(r, "`%s` = %.60s is no whole number from %s to %s", o->name, s.p, least, most);
        break;
    }
    if (*out < o->min_ || *out > o->max_)
        return COMPLAIN(r, "`%s` = %.60s is out of range: %s to %s", o->name, s.p, least, most);
    return true;
}

static bool read_word(struct reader *r, unsigned *field)
{
    struct slice rest = slice_of(r->option->type), value = slice_of(r->values[0]);

    for (unsigned i = 0; rest.n > 0; i++) {
        struct slice word = {rest.p, slice_find(rest, '|')};

        if (slice_eq(word, value)) {
            *field = i;
            return true;
        }
        rest.p += size_min(word.n + 1, rest.n);
        rest.n -= size_min(word.n + 1, rest.n);
    }
    if (r->option->section_ == SECTION_REDIS && slice_eq(value, SLICE("local")))
        return COMPLAIN(r, "`%s` = local is not available in this version; write one of %s", r->option->name,
                        r->option->type);
    return COMPLAIN(r, "`%s` = %.60s: write one of %s", r->option->name, value.p, r->option->type);
}

/* ---- strings ------------------------------------------------------------------------------------------- */

static bool keep(struct reader *r, char **field, struct slice s)
{
    *field = config_arena_copy(&r->load->arena, s);
    return *field != NULL;
}

static bool read_text(struct reader *r, char **field)
{
    struct slice s = slice_of(r->values[0]);

    for (size_t i = 0; i < s.n; i++)
        if ((unsigned char)s.p[i] < ' ' || s.p[i] == 0x7f)
            return COMPLAIN(r, "`%s` has a control character in it", r->option->name);
    if (r->option->section_ == SECTION_MAP && (s.n == 0 || s.n > CONFIG_VALUE_MAX))
        return COMPLAIN(r, "`%s`: a tenant's name has 1 to %d bytes", r->option->name, CONFIG_VALUE_MAX);
    return keep(r, field, s);
}

static bool read_file(struct reader *r, char **field)
{
    const char *path = r->values[0];
    struct stat st;
    int fd;

    if (*path != '\0') {
        fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
        if (fd < 0)
            return COMPLAIN(r, "`%s`: %.200s cannot be read: %s", r->option->name, path, strerror(errno));
        if (fstat(fd, &st) != 0 || !S_ISREG(st.st_mode)) {
            close(fd);
            return COMPLAIN(r, "`%s`: %.200s is not a regular file", r->option->name, path);
        }
        close(fd);
    }
    return read_text(r, field);
}

static bool read_secret(struct reader *r, char **field)
{
    struct slice s = slice_of(r->values[0]);
    bool ascii = true;

    for (size_t i = 0; i < s.n; i++)
        ascii = ascii && (unsigned char)s.p[i] < 0x80;
    if (!ascii || s.n > 1024 || !config_is_visible(s))
        return COMPLAIN(r, "`%s` must be at most 1024 visible ASCII characters without spaces",
                        r->option->name);
    return keep(r, field, s);
}

/* RFC 9110 section 5.5: no control characters; a line end here would add a header of somebody's choice. */
static bool read_field_value(struct reader *r, char **field)
{
    struct slice s = slice_of(r->values[0]);

    for (size_t i = 0; i < s.n; i++) {
        unsigned char c = (unsigned char)s.p[i];

        if (c == '\r' || c == '\n')
            return COMPLAIN(r, "`%s` has a line end in it (a key read from a file?)", r->option->name);
        if ((c < ' ' && c != '\t') || c == 0x7f)
            return COMPLAIN(r, "`%s` has a control character in it", r->option->name);
    }
    if (slice_trim(s).n != s.n)
        return COMPLAIN(r, "`%s` begins or ends with a space (an empty variable?)", r->option->name);
    if (s.n > 8192)
        return COMPLAIN(r, "`%s` is longer than 8192 bytes", r->option->name);
    return keep(r, field, s);
}

/* The start of every key: no braces, which are the cluster hash tag, and no `:#/`, which divide the rest. */
static bool read_prefix(struct reader *r, char **field)
{
    struct slice s = slice_of(r->values[0]);

    if (!config_is_name(s))
        return COMPLAIN(r, "`%s` must be 1 to %d of A-Z a-z 0-9 . _ -", r->option->name, CONFIG_NAME_MAX);
    return keep(r, field, s);
}

/* A list's length stands right behind its pointer, so one row tells of both. */
#define LIST_LENGTH_FOLLOWS(list, length)                                                                    \
    _Static_assert(offsetof(struct config_limit, length) ==                                                  \
                       offsetof(struct config_limit, list) + sizeof(char **),                                \
                   "the length of a list follows its pointer")
LIST_LENGTH_FOLLOWS(models, n_models);
LIST_LENGTH_FOLLOWS(tenants, n_tenants);
LIST_LENGTH_FOLLOWS(upstreams, n_upstreams);

/* ---- lists --------------------------------------------------------------------------------------------- */

static bool check_glob(struct reader *r, struct slice s)
{
    if (s.n == 0 || s.n > CONFIG_VALUE_MAX)
        return COMPLAIN(r, "`%s`: a pattern has 1 to %d bytes", r->option->name, CONFIG_VALUE_MAX);
    if (!config_is_visible(s))
        return COMPLAIN(r, "`%s`: a pattern has a space or control character in it", r->option->name);
    if (slice_find(s, '?') != s.n)
        return COMPLAIN(r, "`%s` = %.60s: only * is special in a pattern, ? is not", r->option->name, s.p);
    return true;
}

static bool check_name(struct reader *r, struct slice s)
{
    return config_is_name(s) || COMPLAIN(r, "`%s` = %.60s is no name", r->option->name, s.p);
}

static bool read_list(struct reader *r, char ***field, size_t *n_field)
{
    char **list = config_arena_alloc(&r->load->arena, (r->n + 1) * sizeof(*list));
    bool ok = list != NULL;

    for (size_t i = 0; i < r->n && ok; i++) {
        struct slice s = slice_of(r->values[i]);

        ok = (r->option->type_ == TYPE_GLOBS ? check_glob(r, s) : check_name(r, s)) && keep(r, &list[i], s);
        for (size_t k = 0; ok && k < i; k++)
            if (strcmp(list[k], list[i]) == 0)
                ok = COMPLAIN(r, "`%s` names %.60s twice", r->option->name, s.p);
    }
    *field = list;
    *n_field = ok ? r->n : 0;
    return ok;
}

static bool read_per(struct reader *r, struct config_limit *limit)
{
    for (size_t i = 0; i < r->n; i++) {
        bool *word = strcmp(r->values[i], "tenant") == 0  ? &limit->per_tenant
                     : strcmp(r->values[i], "model") == 0 ? &limit->per_model
                                                          : NULL;

        if (word == NULL)
            return COMPLAIN(r, "`per` = %.60s: write tenant, model, or both", r->values[i]);
        if (*word)
            return COMPLAIN(r, "`per` names %s twice", r->values[i]);
        *word = true;
    }
    return true;
}

static bool read_header_name(struct reader *r, struct slice s, char **field)
{
    if (!config_is_token(s) || s.n > CONFIG_NAME_MAX)
        return COMPLAIN(r, "`%s`: `%.60s` is no name of a header", r->option->name, s.p);
    if (!keep(r, field, s))
        return false;
    for (char *p = *field; *p != '\0'; p++)
        *p = ascii_lower(*p);
    return true;
}

static bool read_tenant_from(struct reader *r, struct config_tenant *t)
{
    struct slice s = slice_of(r->values[0]), header = SLICE("header:");

    t->from = CONFIG_TENANT_NONE;
    if (!keep(r, &t->header, (struct slice){"", 0}))
        return false;
    if (slice_eq(s, SLICE("none")))
        return true;
    if (slice_eq(s, SLICE("key"))) {
        t->from = CONFIG_TENANT_KEY;
        return true;
    }
    if (!slice_starts_with(s, header))
        return COMPLAIN(r, "`from` = %.60s: write none, key or header:NAME", s.p);
    s.p += header.n;
    s.n -= header.n;
    t->from = CONFIG_TENANT_HEADER;
    return read_header_name(r, s, &t->header);
}

/* ---- one option ---------------------------------------------------------------------------------------- */

static bool read_later(struct reader *r)
{
    const struct config_option_row *o = r->option;
    uint64_t asked = 0, nothing = 0;
    struct reader none = *r;

    if (o->type_ == TYPE_TEXT) {
        if (r->values[0][0] != '\0')
            return COMPLAIN(r, "`%s` is not available in this version; remove it", o->name);
        return true;
    }
    none.values = &o->default_text;
    if (!read_number(r, &asked) || !read_number(&none, &nothing))
        return false;
    if (asked != nothing)
        return COMPLAIN(r, "`%s` is not available in this version; remove it or set it to %s", o->name,
                        o->default_text);
    return true;
}

static bool read_scalar(struct reader *r, void *base)
{
    const struct config_option_row *o = r->option;
    void *field = (char *)base + (o->at_ == SIZE_MAX ? 0 : o->at_);
    uint64_t number = 0;

    switch ((enum config_type)o->type_) {
    case TYPE_TEXT:
        return read_text(r, field);
    case TYPE_FILE:
        return read_file(r, field);
    case TYPE_SECRET:
        return read_secret(r, field);
    case TYPE_FIELD_VALUE:
        return read_field_value(r, field);
    case TYPE_FIELD_NAME:
        return r->values[0][0] == '\0' ? read_text(r, field)
                                       : read_header_name(r, slice_of(r->values[0]), field);
    case TYPE_PREFIX:
        return read_prefix(r, field);
    case TYPE_BOOL:
        return read_bool(r, field);
    case TYPE_WORD:
        return read_word(r, field);
    case TYPE_COUNT:
        if (!read_number(r, &number))
            return false;
        *(unsigned *)field = (unsigned)number;
        return true;
    case TYPE_DURATION:
    case TYPE_SIZE:
        return read_number(r, field);
    case TYPE_UPSTREAM_URL:
        return config_url_upstream(r->load, r->node, r->line, slice_of(r->values[0]), base);
    case TYPE_REDIS_URL:
        return config_url_redis(r->load, r->node, r->line, slice_of(r->values[0]), base);
    case TYPE_TENANT_FROM:
        return read_tenant_from(r, field);
    case TYPE_UPSTREAM_REF:
        return r->values[0][0] == '\0' || check_name(r, slice_of(r->values[0])); /* found by config_check */
    case TYPE_GLOBS:
    case TYPE_NAMES:
    case TYPE_PER:
        break;
    }
    BUG_ON(true);
    return false;
}

bool config_value_read(struct config_load *l, const struct config_node *n, const struct config_option_row *o,
                       void *base, const struct config_entry *e)
{
    bool list = o->type_ == TYPE_GLOBS || o->type_ == TYPE_NAMES || o->type_ == TYPE_PER;
    struct reader r = {.load = l, .node = n, .option = o, .line = e == NULL ? n->line : e->line};

    r.n = e == NULL ? 1 : e->n;
    r.values = e == NULL ? &o->default_text : e->values;
    if (e != NULL && e->n == 0)
        return COMPLAIN(&r, "`%s` is an empty list; leave it out", o->name);
    if (e != NULL && e->n > 1 && !list)
        return COMPLAIN(&r, "`%s` takes one value, not a list", o->name);
    if (list && e == NULL)
        r.n = 0;
    if ((o->flags_ & OPTION_LATER) != 0)
        return read_later(&r);
    if (o->type_ == TYPE_PER)
        return read_per(&r, base);
    if (list) {
        char ***field = (void *)((char *)base + o->at_);

        return read_list(&r, field, (size_t *)(void *)(field + 1));
    }
    return read_scalar(&r, base);
}

/* ---- back ---------------------------------------------------------------------------------------------- */

bool config_put_quoted(struct buf *out, const char *text)
{
    if (!buf_put(out, SLICE("\"")))
        return false;
    for (const char *p = text; *p != '\0'; p++) {
        /* `$` would begin a variable when the dump is read again */
        if ((*p == '"' || *p == '\\' || *p == '$') && !buf_put(out, SLICE("\\")))
            return false;
        if (!buf_put(out, (struct slice){p, 1}))
            return false;
    }
    return buf_put(out, SLICE("\""));
}

static bool put_list(struct buf *out, char *const *list, size_t n)
{
    if (!buf_put(out, SLICE("{")))
        return false;
    for (size_t i = 0; i < n; i++)
        if ((i > 0 && !buf_put(out, SLICE(", "))) || !config_put_quoted(out, list[i]))
            return false;
    return buf_put(out, SLICE("}"));
}

static bool put_word(struct buf *out, const char *words, unsigned at)
{
    struct slice rest = slice_of(words);
    size_t n;

    for (; at > 0; at--) {
        n = slice_find(rest, '|') + 1;
        rest.p += n;
        rest.n -= n;
    }
    rest.n = slice_find(rest, '|');
    return buf_put(out, SLICE("\"")) && buf_put(out, rest) && buf_put(out, SLICE("\""));
}

static bool put_per(struct buf *out, const struct config_limit *limit)
{
    static char tenant[] = "tenant", model[] = "model";
    char *words[2];
    size_t n = 0;

    if (limit->per_tenant)
        words[n++] = tenant;
    if (limit->per_model)
        words[n++] = model;
    return put_list(out, words, n);
}

static bool put_tenant_from(struct buf *out, const struct config_tenant *t)
{
    if (t->from != CONFIG_TENANT_HEADER)
        return buf_put(out, t->from == CONFIG_TENANT_KEY ? SLICE("\"key\"") : SLICE("\"none\""));
    return buf_put(out, SLICE("\"header:")) && buf_put(out, slice_of(t->header)) && buf_put(out, SLICE("\""));
}

bool config_value_put(const struct config_option_row *o, const void *base, struct buf *out)
{
    const void *field = (const char *)base + (o->at_ == SIZE_MAX ? 0 : o->at_);
    char text[24];

    switch ((enum config_type)o->type_) {
    case TYPE_TEXT:
    case TYPE_FILE:
    case TYPE_FIELD_NAME:
    case TYPE_PREFIX:
        return config_put_quoted(out, *(char *const *)field);
    case TYPE_SECRET:
    case TYPE_FIELD_VALUE:
        return config_put_quoted(out, **(char *const *)field == '\0' ? "" : "***");
    case TYPE_BOOL:
        return buf_put(out, *(const bool *)field ? SLICE("true") : SLICE("false"));
    case TYPE_WORD:
        return put_word(out, o->type, *(const unsigned *)field);
    case TYPE_COUNT:
        return buf_put(out, (struct slice){text, str_put_u64(text, *(const unsigned *)field)});
    case TYPE_DURATION:
        return buf_put(out, slice_of(config_duration_text(*(const uint64_t *)field, text)));
    case TYPE_SIZE:
        return buf_put(out, slice_of(size_text(*(const uint64_t *)field, text)));
    case TYPE_GLOBS:
    case TYPE_NAMES:
        return put_list(out, *(char **const *)field,
                        *(const size_t *)((const char *)field + sizeof(char **)));
    case TYPE_UPSTREAM_URL:
        return config_put_quoted(out, ((const struct config_upstream *)base)->url);
    case TYPE_REDIS_URL:
        return config_put_quoted(out, ((const struct config_redis *)base)->url);
    case TYPE_TENANT_FROM:
        return put_tenant_from(out, field);
    case TYPE_PER:
        return put_per(out, base);
    case TYPE_UPSTREAM_REF:
        return config_put_quoted(out, (*(struct config_upstream *const *)field)->name);
    }
    BUG_ON(true);
    return false;
}
