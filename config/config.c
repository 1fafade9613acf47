/*
 * config.c - one run from file to snapshot: the list of problems, the memory
 * that goes as one, and the reference count.
 *
 * Everything of a snapshot, the struct itself included, is a chain of blocks:
 * nothing has to be found and freed piece by piece, neither after an error nor
 * at the end. A run that finds no memory ends with one line that says so, and
 * the caller's old snapshot stays as it is.
 */
#include "config_parts.h"

#include "mem.h"

#include <stdarg.h>
#include <stdio.h>

struct config_block {
    struct config_block *next;
    max_align_t bytes[];
};

void *config_arena_alloc(struct config_arena *a, size_t n)
{
    struct config_block *b = mem_zalloc(sizeof(*b) + n + (n == 0));

    if (b == NULL) {
        a->failed = true;
        return NULL;
    }
    b->next = a->blocks;
    a->blocks = b;
    return b->bytes;
}

char *config_arena_copy(struct config_arena *a, struct slice s)
{
    char *copy = config_arena_alloc(a, s.n + 1);

    if (copy != NULL && s.n > 0)
        memcpy(copy, s.p, s.n);
    return copy;
}

void config_blocks_free(struct config_block *blocks)
{
    while (blocks != NULL) {
        struct config_block *next = blocks->next;

        mem_free(blocks);
        blocks = next;
    }
}

/* ---- problems ------------------------------------------------------------------------------------------ */

/* Sorted by line; of one line, as they were found. */
static void problem_insert(struct config_load *l, struct config_problem *p)
{
    struct config_problem **at = &l->problems;

    while (*at != NULL && (*at)->line <= p->line)
        at = &(*at)->next;
    p->next = *at;
    *at = p;
}

/* `limit "a": override "b": `: where n stands. Returns the length, cut to fit. */
static size_t put_place(char *out, size_t cap, const struct config_node *n)
{
    size_t used = 0;
    int more;

    out[0] = '\0';
    if (n == NULL || n->section == SECTION_TOP)
        return 0;
    used = put_place(out, cap, n->parent);
    if (*n->title == '\0' || n->section == SECTION_MAP) /* a mapped title may be a key */
        more = snprintf(out + used, cap - used, "%s: ", config_section_row(n->section)->name);
    else
        more = snprintf(out + used, cap - used, "%s \"%.64s\": ", config_section_row(n->section)->name,
                        n->title);
    return size_min(used + (size_t)more, cap - 1);
}

__attribute__((format(printf, 5, 0))) static void add_problem(struct config_load *l,
                                                              const struct config_node *n, unsigned line,
                                                              bool warning, const char *format, va_list ap)
{
    char text[768];
    size_t used;
    struct config_problem *p;

    l->n_errors += !warning;
    if (++l->n_problems > CONFIG_PROBLEMS_MAX)
        return;
    used = put_place(text, 256, n);
    vsnprintf(text + used, sizeof(text) - used, format, ap);
    for (char *c = text; *c != '\0';
         c++) /* what a file holds must not draw on a terminal or forge lines in a log */
        if ((unsigned char)*c < ' ' || *c == 0x7f)
            *c = '?';
    p = config_arena_alloc(&l->scratch, sizeof(*p));
    if (p == NULL)
        return;
    p->line = line;
    p->warning = warning;
    p->text = config_arena_copy(&l->scratch, slice_of(text));
    if (p->text != NULL)
        problem_insert(l, p);
}

void config_complain(struct config_load *l, const struct config_node *n, unsigned line, const char *format,
                     ...)
{
    va_list ap;

    va_start(ap, format);
    add_problem(l, n, line, false, format, ap);
    va_end(ap);
}

void config_warn(struct config_load *l, const struct config_node *n, unsigned line, const char *format, ...)
{
    va_list ap;

    va_start(ap, format);
    add_problem(l, n, line, true, format, ap);
    va_end(ap);
}

static bool put_problem(struct buf *out, const char *path, const struct config_problem *p)
{
    char line[16] = "";

    if (p->line > 0)
        snprintf(line, sizeof(line), ":%u", p->line);
    return buf_put(out, slice_of(path)) && buf_put(out, slice_of(line)) && buf_put(out, SLICE(": ")) &&
           (!p->warning || buf_put(out, SLICE("warning: "))) && buf_put(out, slice_of(p->text)) &&
           buf_put(out, SLICE("\n"));
}

/* Where memory is short, as much as there is room for; the result of config_load does not depend on it. */
static void put_problems(struct config_load *l, struct buf *out)
{
    static const struct config_problem no_memory = {.text = "out of memory"};
    char more[64];
    bool ok = true;

    for (const struct config_problem *p = l->problems; p != NULL && ok; p = p->next)
        ok = put_problem(out, l->path, p);
    if (l->n_problems > CONFIG_PROBLEMS_MAX) {
        struct config_problem rest = {.text = more};

        snprintf(more, sizeof(more), "and %zu more problems", l->n_problems - CONFIG_PROBLEMS_MAX);
        ok = ok && put_problem(out, l->path, &rest);
    }
    if (l->scratch.failed || l->arena.failed || !ok)
        (void)!put_problem(out, l->path, &no_memory);
}

/* ---- the snapshot -------------------------------------------------------------------------------------- */

bool config_load(const char *path, struct config **out, struct buf *errors)
{
    struct config_load l = {.path = path};
    bool ok;

    *out = NULL;
    l.config = config_arena_alloc(&l.arena, sizeof(*l.config));
    if (l.config != NULL && config_read(&l)) {
        config_build(&l);
        if (!l.arena.failed)
            config_check(&l);
    }
    ok = l.n_errors == 0 && !l.arena.failed && !l.scratch.failed;
    put_problems(&l, errors);
    config_blocks_free(l.scratch.blocks);
    if (!ok) {
        config_blocks_free(l.arena.blocks);
        return false;
    }
    atomic_init(&l.config->references_, 1);
    l.config->blocks_ = l.arena.blocks;
    *out = l.config;
    return true;
}

struct config *config_ref(struct config *c)
{
    unsigned before = atomic_fetch_add_explicit(&c->references_, 1, memory_order_relaxed);

    BUG_ON(before == 0 || before == UINT32_MAX);
    return c;
}

void config_unref(struct config *c)
{
    unsigned before;

    if (c == NULL)
        return;
    /* release: what this thread read of it comes before; acquire: the last one sees all others' reads done */
    before = atomic_fetch_sub_explicit(&c->references_, 1, memory_order_acq_rel);
    BUG_ON(before == 0);
    if (before == 1)
        config_blocks_free(c->blocks_);
}

void config_set_embedded_path(struct config *c, const char *path)
{
    size_t n = strlen(path);

    BUG_ON(n > CONFIG_UNIX_PATH_MAX);
    for (size_t i = 0; i < c->n_redis; i++)
        if (c->redis[i].kind == CONFIG_REDIS_EMBEDDED)
            memcpy(c->redis[i].path, path, n + 1);
}
