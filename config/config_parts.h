/*
 * config_parts.h - what the rooms of config/ share, and nobody else includes.
 *
 *   text ──config_read──► tree of sections and options, each with its line
 *        ──config_build──► snapshot, option by option (config_table, config_value, config_url)
 *        ──config_check──► what only the whole can tell (references, duplicates)
 *
 * All three report into one list of problems, so that one run names them all.
 * The tree lives in a scratch arena that is freed when config_load returns; the
 * snapshot lives in an arena of its own.
 */
#ifndef LG_CONFIG_PARTS_H
#define LG_CONFIG_PARTS_H

#include "base.h"
#include "buf.h"
#include "config.h"
#include "str.h"

#define CONFIG_PROBLEMS_MAX 100          /* one run names at most so many */
#define CONFIG_FILE_MAX_BYTES (1u << 20) /* a configuration larger than this is a mistake */
#define CONFIG_NAME_MAX 64   /* bytes of a name that becomes a metric label and part of a Redis key */
#define CONFIG_VALUE_MAX 256 /* bytes of a tenant, a glob, an override */

/* ---- memory: blocks that go together ------------------------------------------------------------------- */

struct config_block;

struct config_arena {
    struct config_block *blocks;
    bool failed; /* some allocation was refused: what was built is not complete */
};

/* Zeroed memory; NULL and a->failed when there is none. n may be 0. */
MUST_CHECK void *config_arena_alloc(struct config_arena *a, size_t n);
/* A copy ended by NUL; NULL and a->failed when there is no memory. */
MUST_CHECK char *config_arena_copy(struct config_arena *a, struct slice s);
void config_blocks_free(struct config_block *blocks);

/* ---- the option table ---------------------------------------------------------------------------------- */

enum config_section {
    SECTION_TOP,
    SECTION_LISTEN,
    SECTION_ADMIN,
    SECTION_CLIENT,
    SECTION_REDIS,
    SECTION_LEASE,
    SECTION_UPSTREAM,
    SECTION_HEADER,
    SECTION_ROUTE,
    SECTION_TENANT,
    SECTION_MAP,
    SECTION_LIMIT,
    SECTION_OVERRIDE,
    SECTION_LOG,
    SECTION_COUNT
};

enum config_title { TITLE_NONE, TITLE_WANTED, TITLE_EITHER };

struct config_section_row {
    const char *name;
    enum config_section parent;
    enum config_title title;
    bool many; /* may stand there more than once */
};

enum config_type {
    TYPE_TEXT,         /* char *; no control characters */
    TYPE_FILE,         /* char *; "" or a readable file */
    TYPE_SECRET,       /* char *; visible ASCII, masked in dumps */
    TYPE_FIELD_VALUE,  /* char *; a header's value, masked in dumps */
    TYPE_FIELD_NAME,   /* char *; "" or the name of a header, lower case */
    TYPE_PREFIX,       /* char *; the start of every Redis key */
    TYPE_BOOL,         /* bool */
    TYPE_COUNT,        /* unsigned or uint32_t, min..max */
    TYPE_DURATION,     /* uint64_t, ms, min..max */
    TYPE_SIZE,         /* uint64_t, bytes, min..max */
    TYPE_WORD,         /* an enum whose values are the places in the type text */
    TYPE_GLOBS,        /* char **, followed by its size_t */
    TYPE_NAMES,        /* char **, followed by its size_t; names of upstreams */
    TYPE_UPSTREAM_URL, /* of struct config_upstream */
    TYPE_REDIS_URL,    /* of struct config_redis */
    TYPE_TENANT_FROM,  /* of struct config_tenant */
    TYPE_PER,          /* of struct config_limit */
    TYPE_UPSTREAM_REF  /* struct config_upstream *; config_check finds it */
};

enum {
    OPTION_NONE = 0,
    OPTION_REQUIRED = 1 << 0,
    OPTION_LATER =
        1 << 1, /* known by name, but only its default, which asks for nothing, exists in this version */
    OPTION_BOOT = 1 << 2 /* a reload does not change it */
};

const struct config_section_row *config_section_row(enum config_section s);
/* SECTION_COUNT: there is no section of that name. */
enum config_section config_section_find(const char *name);
/* NULL: no such option there. */
const struct config_option_row *config_option_find(enum config_section s, const char *name);

/* ---- the tree ------------------------------------------------------------------------------------------ */

struct config_entry { /* one assignment */
    struct config_entry *next;
    const struct config_option_row *option;
    unsigned line;
    size_t n; /* values */
    const char **values;
};

struct config_node { /* one section as it stands in the file */
    struct config_node *next, *parent;
    struct config_node *children, **children_end;
    struct config_entry *entries, **entries_end;
    enum config_section section;
    const char *title; /* "" : none */
    unsigned line;     /* of its opening brace; 0: it is not in the file */
};

/* ---- one run of config_load ---------------------------------------------------------------------------- */

struct config_problem {
    struct config_problem *next;
    unsigned line;
    bool warning;
    const char *text;
};

struct config_load {
    const char *path;
    struct config_arena scratch; /* tree and problems */
    struct config_arena arena;   /* becomes the snapshot's */
    struct config *config;
    struct config_node *root;
    struct config_problem *problems; /* by line; of the same line in the order they were found */
    size_t n_errors, n_problems;
};

/* Notes an error at that line (0: of the file as a whole), after the name of section n (NULL: none). */
void config_complain(struct config_load *l, const struct config_node *n, unsigned line, const char *format,
                     ...) PRINTF_LIKE(4, 5);
void config_warn(struct config_load *l, const struct config_node *n, unsigned line, const char *format, ...)
    PRINTF_LIKE(4, 5);

/* The file's text into l->root. False: it could not be read to its end, and l->root is not to be used. */
MUST_CHECK bool config_read(struct config_load *l);
/* Comments to blanks; complains about what libConfuse would swallow. False: reading makes no sense. */
MUST_CHECK bool config_scan(struct config_load *l, char *text, size_t n);
/* Blanks the statement that begins with that name in that line. False: there is none. */
MUST_CHECK bool config_scan_cut(char *text, unsigned line, const char *name);

/* l->root into l->config, each option after its row. */
void config_build(struct config_load *l);
/* What only the whole can tell; fills in the references between sections. */
void config_check(struct config_load *l);

size_t config_node_count(const struct config_node *parent, enum config_section s);
/* The first child of that kind, or the next one after it; NULL at the end. */
const struct config_node *config_node_first(const struct config_node *parent, enum config_section s);
const struct config_node *config_node_next(const struct config_node *n);
/* NULL: not given there. */
const struct config_entry *config_node_entry(const struct config_node *n, const char *name);
/* The line of that option, or of the section where it is not given. */
unsigned config_node_line(const struct config_node *n, const char *name);

/* Reads one option into the struct at base; e NULL: its default. False: complained. */
bool config_value_read(struct config_load *l, const struct config_node *n, const struct config_option_row *o,
                       void *base, const struct config_entry *e);
/* Writes `value` as the file would have it. False: no memory. */
MUST_CHECK bool config_value_put(const struct config_option_row *o, const void *base, struct buf *out);
MUST_CHECK bool config_put_quoted(struct buf *out, const char *text);
/* `250ms`, `2s`, …: the largest unit that tells it exactly; at out (24 bytes are enough), returns out. */
const char *config_duration_text(uint64_t ms, char out[24]);

/* These complain in their own words and return false; `what` is the option's name. */
bool config_url_upstream(struct config_load *l, const struct config_node *n, unsigned line, struct slice url,
                         struct config_upstream *u);
bool config_url_redis(struct config_load *l, const struct config_node *n, unsigned line, struct slice url,
                      struct config_redis *r);
bool config_url_address(struct config_load *l, const struct config_node *n, struct config_address *a);
bool config_address_is_loopback(const struct config_address *a);

bool config_is_token(struct slice s);   /* RFC 9110 section 5.6.2 */
bool config_is_name(struct slice s);    /* [A-Za-z0-9._-]{1,64} */
bool config_is_visible(struct slice s); /* no control characters, no space, no DEL */

#endif
