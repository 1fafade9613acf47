/*
 * config_scan.c - a pass over the text before libConfuse reads it.
 *
 * libConfuse 3.3 miscounts lines behind comments (one or two too many for
 * each), takes a comment within a list or before an opening brace for a syntax
 * error, and swallows without a word: characters that fit no token (a `*`
 * outside quotes, so that a glob loses its star), variables that are not set,
 * what follows a NUL in a string, and sections that the file's end leaves open.
 * So comments become blanks here, and the rest is said aloud, with its line.
 *
 * Also cuts out one statement by line and name: that is how reading goes on
 * behind an unknown option. Owns nothing; the text is the caller's.
 */
#include "config_parts.h"

#include <stdlib.h>

#define DEPTH_MAX 16 /* the deepest list needs 3 */

struct cursor {
    struct config_load *load;
    char *p, *end;
    unsigned line;
    unsigned depth, opened[DEPTH_MAX]; /* open braces, and their lines */
    bool after_string;                 /* the last token was a quoted string */
    bool usable;                       /* libConfuse may be given this text */
};

static char peek(const struct cursor *c, size_t ahead)
{
    return (size_t)(c->end - c->p) > ahead ? c->p[ahead] : '\0';
}

static void blank(char *p)
{
    if (*p != '\n')
        *p = ' ';
}

static void scan_line_comment(struct cursor *c)
{
    for (; c->p < c->end && *c->p != '\n'; c->p++)
        *c->p = ' ';
}

static void scan_block_comment(struct cursor *c)
{
    unsigned opened = c->line;

    while (c->p < c->end) {
        bool last = c->p[0] == '*' && peek(c, 1) == '/';

        c->line += *c->p == '\n';
        blank(c->p++);
        if (last && c->p[0] == '/') {
            blank(c->p++);
            return;
        }
    }
    config_complain(c->load, NULL, opened, "this comment is not closed with */");
    c->usable = false;
}

/* `${NAME}` or `${NAME:-default}`; libConfuse puts "" for what is not set. */
static void scan_variable(struct cursor *c)
{
    char name[128];
    size_t n = 0, end = 2;

    while (peek(c, end) != '\0' && peek(c, end) != '}' && peek(c, end) != '\n')
        end++;
    if (peek(c, end) != '}') {
        config_complain(c->load, NULL, c->line, "`${` without `}` in the same line");
        c->usable = false;
        c->p += 2;
        return;
    }
    while (2 + n < end && n + 1 < sizeof(name) && !(c->p[2 + n] == ':' && c->p[3 + n] == '-')) {
        name[n] = c->p[2 + n];
        n++;
    }
    name[n] = '\0';
    if (2 + n == end && getenv(name) == NULL)
        config_complain(c->load, NULL, c->line,
                        "the environment has no %s; set it, or write ${%s:-} where it may be empty", name,
                        name);
    c->p += end + 1;
}

/* Behind a backslash: does an octal or hexadecimal escape stand for NUL? */
static bool is_nul_escape(const struct cursor *c)
{
    char first = peek(c, 1);
    size_t n = 0;

    if (first == 'x') {
        while (n < 2 && peek(c, 2 + n) == '0')
            n++;
        return n > 0 &&
               !(n < 2 && strchr("123456789abcdefABCDEF", peek(c, 2 + n)) != NULL && peek(c, 2 + n) != '\0');
    }
    while (n < 3 && peek(c, 1 + n) == '0')
        n++;
    return n > 0 && !(n < 3 && peek(c, 1 + n) >= '1' && peek(c, 1 + n) <= '7');
}

static void scan_string(struct cursor *c)
{
    unsigned opened = c->line;
    char quote = *c->p++;

    while (c->p < c->end && *c->p != quote) {
        if (*c->p == '\\' && c->end - c->p > 1) {
            if (quote == '"' && is_nul_escape(c))
                config_complain(c->load, NULL, c->line, "a string cannot hold a NUL");
            c->line += c->p[1] == '\n';
            c->p += 2;
        } else if (quote == '"' && *c->p == '$' && peek(c, 1) == '{') {
            scan_variable(c);
        } else {
            c->line += *c->p++ == '\n';
        }
    }
    if (c->p >= c->end) {
        config_complain(c->load, NULL, opened, "this string is not closed with %c", quote);
        c->usable = false;
        return;
    }
    c->p++;
    c->after_string = true;
}

static bool is_word(char ch)
{
    return ch != '\0' && strchr(" \t\n\r#\"'{}=,+()*|;", ch) == NULL;
}

static void scan_word(struct cursor *c)
{
    while (c->p < c->end && is_word(*c->p)) {
        if (*c->p == '$' && peek(c, 1) == '{')
            scan_variable(c);
        else
            c->p++;
    }
}

static void scan_sign(struct cursor *c)
{
    char sign = *c->p;

    if (sign == '{') {
        if (c->depth < DEPTH_MAX)
            c->opened[c->depth] = c->line;
        c->depth++;
    } else if (sign == '}') {
        c->depth -= c->depth > 0; /* libConfuse refuses one too many */
    } else if (sign == '=' && c->after_string) {
        config_complain(c->load, NULL, c->line, "names of options are not quoted");
        c->usable = false;
    } else if (sign == ';') {
        config_complain(c->load, NULL, c->line, "no `;` is needed: options end by themselves");
        *c->p = ' ';
    } else if (strchr("*|()", sign) != NULL || (sign == '+' && peek(c, 1) != '=')) {
        config_complain(c->load, NULL, c->line, "a value with `%c` needs quotes", sign);
        c->usable = c->usable && sign != '|'; /* libConfuse takes it for a path into another section */
        *c->p = '_';
    }
    c->p++;
}

bool config_scan(struct config_load *l, char *text, size_t n)
{
    struct cursor c = {.load = l, .p = text, .end = text + n, .line = 1, .usable = true};
    const char *nul = memchr(text, '\0', n);

    if (nul != NULL) {
        for (const char *p = text; p < nul; p++)
            c.line += *p == '\n';
        config_complain(l, NULL, c.line, "there is a NUL byte in this line: not a text file");
        return false;
    }
    while (c.p < c.end) {
        char ch = *c.p;

        if (ch == '#' || (ch == '/' && peek(&c, 1) == '/')) {
            scan_line_comment(&c);
        } else if (ch == '/' && peek(&c, 1) == '*') {
            scan_block_comment(&c);
        } else if (ch == '\n') {
            c.line++;
            c.p++;
        } else if (ch == ' ' || ch == '\t' || ch == '\r') {
            c.p++;
        } else if (ch == '"' || ch == '\'') {
            scan_string(&c);
        } else {
            if (is_word(ch))
                scan_word(&c);
            else
                scan_sign(&c);
            c.after_string = false;
        }
    }
    if (c.depth > 0 && c.usable) {
        config_complain(l, NULL, c.opened[size_min(c.depth, DEPTH_MAX) - 1],
                        "this `{` is not closed with `}`");
        c.usable = false;
    }
    return c.usable;
}

/* ---- cutting a statement out; here the text is known to have no comments and closed strings ------------ */

static char *skip_blanks(char *p)
{
    return p + strspn(p, " \t\r\n");
}

static char *skip_token(char *p)
{
    if (*p == '"' || *p == '\'') {
        char quote = *p++;

        while (*p != '\0' && *p != quote)
            p += *p == '\\' && p[1] != '\0' ? 2 : 1;
        return *p == '\0' ? p : p + 1;
    }
    if (!is_word(*p))
        return *p == '\0' ? p : p + 1;
    while (is_word(*p)) {
        if (p[0] == '$' && p[1] == '{' && strchr(p, '}') != NULL)
            p = strchr(p, '}');
        p++;
    }
    return p;
}

static char *skip_braces(char *p)
{
    unsigned depth = 0;

    do {
        depth += *p == '{';
        depth -= *p == '}';
        p = skip_blanks(skip_token(p));
    } while (depth > 0 && *p != '\0');
    return p;
}

/* From behind the name: `= value`, `+= {list}`, `{ section }`, `"title" { section }`. */
static char *skip_statement(char *p)
{
    p = skip_blanks(p);
    if (*p == '+')
        p++;
    if (*p == '=') {
        p = skip_blanks(p + 1);
        return *p == '{' ? skip_braces(p) : skip_token(p);
    }
    if (*p != '{')
        p = skip_blanks(skip_token(p));
    return *p == '{' ? skip_braces(p) : NULL;
}

bool config_scan_cut(char *text, unsigned line, const char *name)
{
    char *p = text, *next;
    size_t n = strlen(name);

    for (; line > 1; line--) {
        p = strchr(p, '\n');
        if (p == NULL)
            return false;
        p++;
    }
    for (p += strspn(p, " \t\r"); *p != '\0' && *p != '\n'; p = next + strspn(next, " \t\r")) {
        char *end;

        next = skip_token(p);
        if ((size_t)(next - p) != n || memcmp(p, name, n) != 0)
            continue;
        end = skip_statement(next);
        if (end == NULL)
            continue;
        for (; p < end; p++)
            blank(p);
        return true;
    }
    return false;
}
