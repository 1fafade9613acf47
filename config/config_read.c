/*
 * config_read.c - the file's text to a tree of sections and options, each
 * with its line, by way of libConfuse.
 *
 * libConfuse 3.3 keeps no line per option, stops at the first error, and lets
 * a later section of the same title silently replace the first one. So its
 * own storage is not used at all. Every option is told to it as a list of
 * strings with a callback, which notes name, value and line while they are
 * current; sections report their end by a validating callback, and their
 * beginning by a hidden list option whose default value libConfuse parses at
 * exactly that moment. Where it stops at an unknown name, that is noted, the
 * statement is blanked in our copy of the text, and reading starts again.
 *
 * libConfuse keeps its lexer in globals and hands no user pointer to its
 * callbacks: hence `reading`, and hence main thread only. It allocates with
 * malloc for itself; all of that is gone when config_read returns.
 */
#include "config_parts.h"

#include <confuse.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <unistd.h>

#define OPTIONS_MAX 48 /* of one section */
#define BEGIN " begin" /* a space: cannot be written unquoted, and quoted names are refused */

static char begin_default[] = "{x}"; /* libConfuse takes it without const; it copies */

enum stop { STOP_NONE, STOP_UNKNOWN, STOP_REDIS_TITLE, STOP_SYNTAX };

static struct reading {
    struct config_load *load;
    struct config_node *node; /* the innermost open section */
    unsigned crooked_line;    /* libConfuse reached an option by a path (`"redis|url"`); 0: it did not */
    bool redis_titled;
    enum stop stop;
    unsigned stop_line;
    char stop_name[64];
    enum config_section stop_section;
} reading;

static struct config_node *node_new(struct config_node *parent, enum config_section s, const char *title,
                                    unsigned line)
{
    struct config_arena *a = &reading.load->scratch;
    struct config_node *n = config_arena_alloc(a, sizeof(*n));
    const char *copy = config_arena_copy(a, slice_of(title == NULL ? "" : title));

    if (n == NULL || copy == NULL)
        return NULL;
    n->section = s;
    n->title = copy;
    n->line = line;
    n->parent = parent;
    n->children_end = &n->children;
    n->entries_end = &n->entries;
    if (parent != NULL) {
        *parent->children_end = n;
        parent->children_end = &n->next;
    }
    return n;
}

/* Callbacks always report success: libConfuse aborts the process when a default value is refused. */
static int on_begin(cfg_t *cfg, cfg_opt_t *opt UNUSED, const char *value, void *result)
{
    enum config_section s = config_section_find(cfg->name);
    struct config_node *n;

    *(const char **)result = value;
    if (reading.load->scratch.failed)
        return 0;
    if (s == SECTION_COUNT || config_section_row(s)->parent != reading.node->section)
        reading.crooked_line = (unsigned)cfg->line;
    n = node_new(reading.node, s, cfg->title, (unsigned)cfg->line);
    if (n != NULL)
        reading.node = n;
    return 0;
}

static struct config_entry *entry_new(struct config_node *n, const struct config_option_row *row,
                                      unsigned line)
{
    struct config_entry *e = config_arena_alloc(&reading.load->scratch, sizeof(*e));

    if (e == NULL)
        return NULL;
    e->option = row;
    e->line = line;
    *n->entries_end = e;
    n->entries_end = &e->next;
    return e;
}

/* `name = {}` runs no callback; all that is left of it is a list that was set and is empty. */
static void note_empty_lists(const cfg_t *section)
{
    for (const cfg_opt_t *o = section->opts; o->name != NULL; o++) {
        const struct config_option_row *row = config_option_find(reading.node->section, o->name);

        if (row != NULL && (o->flags & CFGF_MODIFIED) != 0 && o->nvalues == 0 &&
            !reading.load->scratch.failed)
            (void)entry_new(reading.node, row, reading.node->line);
    }
}

static int on_end(cfg_t *cfg UNUSED, cfg_opt_t *opt)
{
    const cfg_t *section = cfg_opt_getnsec(opt, cfg_opt_size(opt) - 1);

    if (reading.load->scratch.failed)
        return 0;
    note_empty_lists(section);
    reading.node = reading.node->parent;
    return 0;
}

static struct config_entry *entry_last(const struct config_node *n, const struct config_option_row *row)
{
    struct config_entry *last = NULL;

    for (struct config_entry *e = n->entries; e != NULL; e = e->next)
        if (e->option == row)
            last = e;
    return last;
}

static int on_value(cfg_t *cfg, cfg_opt_t *opt, const char *value, void *result)
{
    struct config_arena *a = &reading.load->scratch;
    struct config_node *n = reading.node;
    const struct config_option_row *row = config_option_find(n->section, opt->name);
    struct config_entry *e;
    const char **values;

    *(const char **)result = value;
    if (row == NULL)
        reading.crooked_line = (unsigned)cfg->line;
    if (row == NULL || a->failed)
        return 0;
    e = opt->nvalues > 1 ? entry_last(n, row) : NULL; /* NULL: the first value of a new assignment */
    if (e == NULL)
        e = entry_new(n, row, (unsigned)cfg->line);
    values = e == NULL ? NULL : config_arena_alloc(a, (e->n + 1) * sizeof(*values));
    if (values == NULL)
        return 0;
    if (e->n > 0)
        memcpy(values, e->values, e->n * sizeof(*values));
    values[e->n] = config_arena_copy(a, slice_of(value));
    e->values = values;
    e->n += values[e->n] != NULL;
    return 0;
}

static void stop_at(enum stop stop, cfg_t *cfg)
{
    reading.stop = stop;
    reading.stop_line = (unsigned)cfg->line;
    reading.stop_section = config_section_find(cfg->name);
    if (reading.stop_section == SECTION_COUNT)
        reading.stop_section = SECTION_TOP;
}

__attribute__((format(printf, 2, 0))) static void on_error(cfg_t *cfg, const char *format, va_list ap)
{
    char text[256];
    va_list again;

    if (reading.stop != STOP_NONE)
        return;
    va_copy(again, ap);
    if (strcmp(format, "no such option '%s'") == 0) {
        const char *name = va_arg(again, const char *);

        stop_at(STOP_UNKNOWN, cfg);
        snprintf(reading.stop_name, sizeof(reading.stop_name), "%s", name);
        if (strlen(name) >= sizeof(reading.stop_name))
            stop_at(STOP_SYNTAX, cfg);
    } else if (strcmp(format, "missing opening brace for section '%s'") == 0 && !reading.redis_titled &&
               strcmp(va_arg(again, const char *), "redis") == 0) {
        stop_at(STOP_REDIS_TITLE, cfg);
    } else {
        stop_at(STOP_SYNTAX, cfg);
    }
    va_end(again);
    if (reading.stop == STOP_SYNTAX) {
        vsnprintf(text, sizeof(text), format, ap);
        config_complain(reading.load, NULL, reading.stop_line, "%s; reading stopped here%s", text,
                        reading.redis_titled && strstr(text, "missing title for section 'redis'") != NULL
                            ? " (either one redis section without a name, or all of them with one)"
                            : "");
    }
}

/* The grammar of one section from the tables; its sub-sections' grammars are made first. */
static void grammar_make(cfg_opt_t grammar[SECTION_COUNT][OPTIONS_MAX], enum config_section s)
{
    const struct config_option_row *rows;
    cfg_opt_t *o = grammar[s];
    size_t n_rows;

    rows = config_options(&n_rows);
    if (s != SECTION_TOP)
        *o++ = (cfg_opt_t)CFG_STR_LIST_CB(BEGIN, begin_default, CFGF_NONE, on_begin);
    for (size_t i = 0; i < n_rows; i++) {
        if (rows[i].section_ != s)
            continue;
        BUG_ON(o - grammar[s] > OPTIONS_MAX - 2);
        *o++ = (cfg_opt_t)CFG_STR_LIST_CB(rows[i].name, NULL, CFGF_NODEFAULT, on_value);
    }
    for (enum config_section sub = SECTION_TOP + 1; sub < SECTION_COUNT; sub++) {
        const struct config_section_row *row = config_section_row(sub);
        bool titled = row->title == TITLE_WANTED || (row->title == TITLE_EITHER && reading.redis_titled);

        if (row->parent != s)
            continue;
        grammar_make(grammar, sub);
        BUG_ON(o - grammar[s] > OPTIONS_MAX - 2);
        *o = (cfg_opt_t)CFG_SEC(row->name, grammar[sub], CFGF_MULTI | (titled ? CFGF_TITLE : 0));
        o++->validcb = on_end;
    }
    *o = (cfg_opt_t)CFG_END();
}

/* One run of libConfuse over the text. False: no memory. */
static bool parse_once(const char *text, size_t n)
{
    cfg_opt_t grammar[SECTION_COUNT][OPTIONS_MAX];
    cfg_t *cfg;
    FILE *f;

    reading.stop = STOP_NONE;
    reading.load->root = reading.node = node_new(NULL, SECTION_TOP, NULL, 0);
    if (reading.node == NULL)
        return false;
    grammar_make(grammar, SECTION_TOP);
    f = fmemopen((void *)(uintptr_t)text, n, "r");
    if (f == NULL)
        return false;
    cfg = cfg_init(grammar[SECTION_TOP], CFGF_NONE);
    if (cfg == NULL) {
        fclose(f);
        return false;
    }
    cfg_set_error_function(cfg, on_error);
    if (cfg_parse_fp(cfg, f) != CFG_SUCCESS && reading.stop == STOP_NONE) {
        stop_at(STOP_SYNTAX, cfg);
        config_complain(reading.load, NULL, reading.stop_line, "syntax error; reading stopped here");
    }
    fclose(f);
    if (reading.stop == STOP_NONE && reading.node != NULL)
        note_empty_lists(cfg);
    cfg_free(cfg);
    return !reading.load->scratch.failed;
}

static void complain_unknown(struct config_load *l)
{
    const char *where = config_section_row(reading.stop_section)->name, *home = NULL;
    size_t n;
    const struct config_option_row *rows = config_options(&n);
    enum config_section s = config_section_find(reading.stop_name);

    for (size_t i = 0; i < n && home == NULL; i++)
        if (strcmp(rows[i].name, reading.stop_name) == 0)
            home = rows[i].section;
    if (s != SECTION_COUNT)
        home = config_section_row(config_section_row(s)->parent)->name;
    config_complain(l, NULL, reading.stop_line, "unknown option `%s`%s%s%s%s%s", reading.stop_name,
                    *where == '\0' ? " at top level" : " in ", where, home == NULL ? "" : "; it belongs ",
                    home == NULL    ? ""
                    : *home == '\0' ? "to the top level"
                                    : "into ",
                    home == NULL ? "" : home);
}

/* The whole file and a NUL behind it. False: complained. */
static bool load_text(struct config_load *l, struct buf *text)
{
    int fd = open(l->path, O_RDONLY | O_CLOEXEC);
    ssize_t got = fd < 0 ? -1 : 1;

    while (got > 0 && text->n <= CONFIG_FILE_MAX_BYTES) {
        if (!buf_reserve(text, 16384)) {
            l->scratch.failed = true;
            break;
        }
        got = read(fd, text->p + text->n, 16384 - 2);
        if (got < 0 && errno == EINTR)
            got = 1;
        else if (got > 0)
            text->n += (size_t)got;
    }
    if (got < 0)
        config_complain(l, NULL, 0, "cannot be read: %s", strerror(errno));
    else if (got > 0 && !l->scratch.failed)
        config_complain(l, NULL, 0, "is larger than %u bytes", CONFIG_FILE_MAX_BYTES);
    if (fd >= 0)
        close(fd);
    if (got != 0)
        return false;
    if (text->n == 0 || text->p[text->n - 1] != '\n')
        text->p[text->n++] = '\n'; /* fmemopen takes no empty text; a comment may end the file */
    text->p[text->n] = '\0';
    return true;
}

bool config_read(struct config_load *l)
{
    struct buf text = {0};
    bool ok = load_text(l, &text) && config_scan(l, text.p, text.n);

    reading = (struct reading){.load = l};
    while (ok) {
        ok = parse_once(text.p, text.n);
        if (!ok || reading.stop == STOP_NONE)
            break;
        if (reading.stop == STOP_REDIS_TITLE) {
            reading.redis_titled = true;
        } else if (reading.stop == STOP_UNKNOWN) {
            complain_unknown(l);
            ok = l->n_errors < CONFIG_PROBLEMS_MAX &&
                 config_scan_cut(text.p, reading.stop_line, reading.stop_name);
        } else {
            ok = false;
        }
    }
    if (ok && reading.crooked_line > 0) {
        config_complain(l, NULL, reading.crooked_line,
                        "a name with `|` is no option; options stand in their section");
        ok = false;
    }
    reading = (struct reading){0};
    buf_free(&text);
    return ok;
}
