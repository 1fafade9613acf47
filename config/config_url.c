/*
 * config_url.c - addresses of listeners and URLs of upstreams and Redis, taken
 * apart strictly (RFC 3986 section 3): what is not understood whole is refused.
 *
 * A URL may hold a password, so complaints never repeat one. Strings go to the
 * snapshot's arena.
 */
#include "config_parts.h"

#include <arpa/inet.h>
#include <stdio.h>

struct url {
    struct slice scheme, userinfo, host, port, path, query;
    bool has_userinfo, has_query, has_fragment, bracketed;
};

static struct slice cut(struct slice s, size_t from, size_t to)
{
    return (struct slice){s.p + from, to - from};
}

static bool contains(struct slice s, char c)
{
    return slice_find(s, c) != s.n;
}

/* scheme://[userinfo@]host[:port][/path][?query]; the host may be empty. */
static bool url_split(struct slice s, struct url *u)
{
    struct slice colon = SLICE("://"), authority;
    size_t at = slice_find(s, ':'), end, i;

    *u = (struct url){0};
    if (!slice_starts_with(cut(s, at, s.n), colon) || !config_is_visible(s))
        return false;
    u->scheme = cut(s, 0, at);
    s = cut(s, at + 3, s.n);
    u->has_fragment = contains(s, '#');
    for (end = 0; end < s.n && s.p[end] != '/' && s.p[end] != '?' && s.p[end] != '#'; end++)
        continue;
    authority = cut(s, 0, end);
    s = cut(s, end, s.n);
    at = slice_find(s, '?');
    u->path = cut(s, 0, at);
    u->has_query = at < s.n;
    u->query = u->has_query ? cut(s, at + 1, s.n) : cut(s, at, at);
    for (i = authority.n; i > 0 && authority.p[i - 1] != '@'; i--)
        continue;
    u->has_userinfo = i > 0;
    u->userinfo = cut(authority, 0, i > 0 ? i - 1 : 0);
    authority = cut(authority, i, authority.n);
    u->bracketed = authority.n > 0 && authority.p[0] == '[';
    if (u->bracketed) {
        at = slice_find(authority, ']');
        if (at == authority.n)
            return false;
        u->host = cut(authority, 1, at);
        authority = cut(authority, at + 1, authority.n);
        if (authority.n > 0 && authority.p[0] != ':')
            return false;
    } else {
        at = slice_find(authority, ':');
        u->host = cut(authority, 0, at);
        authority = cut(authority, at, authority.n);
    }
    u->port = authority.n > 0 ? cut(authority, 1, authority.n) : authority;
    return authority.n != 1; /* `host:` */
}

static bool parse_port(struct slice s, uint16_t least, uint16_t *out)
{
    uint64_t port;

    if (s.n > 5 || !str_parse_u64(s, &port) || port < least || port > 65535)
        return false;
    *out = (uint16_t)port;
    return true;
}

static bool to_text(struct slice s, char *out, size_t cap)
{
    if (s.n >= cap || memchr(s.p, '\0', s.n) != NULL)
        return false;
    memcpy(out, s.p, s.n);
    out[s.n] = '\0';
    return true;
}

/* An address in the one form that inet_ntop gives it, or "". */
static const char *canonical_ip(struct slice s, bool v6, char out[INET6_ADDRSTRLEN])
{
    unsigned char bytes[sizeof(struct in6_addr)];
    char text[INET6_ADDRSTRLEN];
    int family = v6 ? AF_INET6 : AF_INET;

    if (s.n == 0 || !to_text(s, text, sizeof(text)) || inet_pton(family, text, bytes) != 1 ||
        inet_ntop(family, bytes, out, INET6_ADDRSTRLEN) == NULL)
        out[0] = '\0';
    return out;
}

/* RFC 1123 section 2.1, and `_`, which container networks use. A last label of digits is a broken address. */
static bool is_host_name(struct slice s)
{
    size_t label = 0;
    bool digits = true;

    if (s.n == 0 || s.n > 253)
        return false;
    for (size_t i = 0; i < s.n; i++) {
        char c = ascii_lower(s.p[i]);

        if (c == '.') {
            if (label == 0)
                return false;
            label = 0;
            digits = true;
            continue;
        }
        if (!((c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') || c == '_' || (c == '-' && label > 0)))
            return false;
        digits = digits && c >= '0' && c <= '9';
        if (++label > 63)
            return false;
    }
    return label == 0 || !digits;
}

/* Lower case; NULL: no valid host (or no memory, which the arena notes). */
static char *host_copy(struct config_load *l, const struct url *u)
{
    char ip[INET6_ADDRSTRLEN];
    char *host;

    canonical_ip(u->host, u->bracketed, ip);
    if (ip[0] != '\0')
        return config_arena_copy(&l->arena, slice_of(ip));
    if (u->bracketed || !is_host_name(u->host))
        return NULL;
    host = config_arena_copy(&l->arena, u->host);
    for (char *p = host; p != NULL && *p != '\0'; p++)
        *p = ascii_lower(*p);
    return host;
}

static char *joined(struct config_load *l, const char *a, const char *b, const char *c, const char *d,
                    const char *e)
{
    const char *parts[] = {a, b, c, d, e};
    size_t n = 0;
    char *out;

    for (size_t i = 0; i < ARRAY_LEN(parts); i++)
        n += strlen(parts[i]);
    out = config_arena_alloc(&l->arena, n + 1);
    n = 0;
    for (size_t i = 0; out != NULL && i < ARRAY_LEN(parts); i++) {
        size_t part = strlen(parts[i]);

        memcpy(out + n, parts[i], part);
        n += part;
    }
    return out;
}

/* `host`, `host:port`, `[v6]:port`; the port only where it is not the scheme's own. NULL: no memory. */
static char *authority_of(struct config_load *l, const char *host, bool bracketed, uint16_t port,
                          uint16_t usual)
{
    char digits[8] = "";

    if (port != usual)
        snprintf(digits, sizeof(digits), ":%u", (unsigned)port);
    return joined(l, bracketed ? "[" : "", host, bracketed ? "]" : "", digits, "");
}

bool config_url_upstream(struct config_load *l, const struct config_node *n, unsigned line, struct slice url,
                         struct config_upstream *u)
{
    struct url parts;
    uint16_t usual;

    if (!url_split(url, &parts) ||
        !(slice_ieq(parts.scheme, SLICE("http")) || slice_ieq(parts.scheme, SLICE("https")))) {
        config_complain(l, n, line, "`url`: write http://HOST[:PORT][/PATH] or https://…");
        return false;
    }
    if (parts.has_userinfo) {
        config_complain(l, n, line,
                        "`url` must not hold a user or password; use header \"authorization\" { value = … }");
        return false;
    }
    if (parts.has_query || parts.has_fragment) {
        config_complain(l, n, line, "`url` must end with its path: no ? and no #");
        return false;
    }
    u->use_tls = parts.scheme.n == 5;
    usual = u->use_tls ? 443 : 80;
    u->port = usual;
    if (parts.port.n > 0 && !parse_port(parts.port, 1, &u->port)) {
        config_complain(l, n, line, "`url`: the port is a number from 1 to 65535");
        return false;
    }
    u->host = host_copy(l, &parts);
    if (u->host == NULL) {
        if (!l->arena.failed)
            config_complain(l, n, line, "`url`: `%.*s` is no host name, IPv4 or [IPv6] address",
                            (int)size_min(parts.host.n, 60), parts.host.p);
        return false;
    }
    while (parts.path.n > 0 && parts.path.p[parts.path.n - 1] == '/')
        parts.path.n--;
    u->path_prefix = config_arena_copy(&l->arena, parts.path);
    u->authority = authority_of(l, u->host, parts.bracketed, u->port, usual);
    if (u->path_prefix == NULL || u->authority == NULL)
        return false;
    u->url = joined(l, u->use_tls ? "https://" : "http://", u->authority, u->path_prefix, "", "");
    return u->url != NULL;
}

static int hex_digit(char c)
{
    c = ascii_lower(c);
    return c >= '0' && c <= '9' ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

/* RFC 3986 section 2.1. NULL: a broken escape, a NUL, or no memory. */
static char *percent_decoded(struct config_load *l, struct slice s)
{
    char *out = config_arena_copy(&l->arena, s);
    size_t n = 0;

    for (size_t i = 0; out != NULL && i < s.n; i++) {
        if (s.p[i] == '%') {
            int high = i + 2 < s.n ? hex_digit(s.p[i + 1]) : -1,
                low = i + 2 < s.n ? hex_digit(s.p[i + 2]) : -1;

            if (high < 0 || low < 0 || high + low == 0)
                return NULL;
            out[n++] = (char)(high * 16 + low);
            i += 2;
        } else {
            out[n++] = s.p[i];
        }
    }
    if (out != NULL)
        out[n] = '\0';
    return out;
}

/* `USER:PASSWORD` or `:PASSWORD`; a lone word would be a user for some clients and a password for others. */
static bool redis_login(struct config_load *l, const struct config_node *n, unsigned line,
                        const struct url *parts, struct config_redis *r)
{
    size_t colon = slice_find(parts->userinfo, ':');

    r->user = config_arena_copy(&l->arena, SLICE(""));
    r->password = config_arena_copy(&l->arena, SLICE(""));
    if (!parts->has_userinfo || r->user == NULL || r->password == NULL)
        return !l->arena.failed;
    if (colon == parts->userinfo.n || colon + 1 == parts->userinfo.n) {
        config_complain(l, n, line, "`url`: before the @ write USER:PASSWORD or :PASSWORD");
        return false;
    }
    r->user = percent_decoded(l, cut(parts->userinfo, 0, colon));
    r->password = percent_decoded(l, cut(parts->userinfo, colon + 1, parts->userinfo.n));
    if (r->user != NULL && r->password != NULL)
        return true;
    if (!l->arena.failed)
        config_complain(l, n, line,
                        "`url`: a %% in user or password is followed by two hexadecimal digits, not 00");
    return false;
}

static bool redis_database(struct config_load *l, const struct config_node *n, unsigned line, struct slice s,
                           struct config_redis *r)
{
    uint64_t db = 0;

    if (s.n > 0 && (!str_parse_u64(s, &db) || db > INT32_MAX)) {
        config_complain(l, n, line,
                        "`url`: the database is a number, as in redis://HOST/0 or unix:///PATH?db=0");
        return false;
    }
    r->db = (unsigned)db;
    return true;
}

static bool redis_unix(struct config_load *l, const struct config_node *n, unsigned line,
                       const struct url *parts, struct config_redis *r)
{
    struct slice key = SLICE("db="), db = parts->query;

    r->kind = CONFIG_REDIS_UNIX;
    if (parts->host.n > 0 || parts->port.n > 0 || parts->path.n < 2 || parts->path.n > CONFIG_UNIX_PATH_MAX) {
        config_complain(l, n, line,
                        "`url`: write unix:///PATH[?db=N], the path absolute and at most %d bytes",
                        CONFIG_UNIX_PATH_MAX);
        return false;
    }
    if (parts->has_query) {
        if (!slice_starts_with(db, key) || db.n == key.n)
            db = SLICE("x"); /* no number: refused */
        else
            db = cut(db, key.n, db.n);
    }
    r->path = config_arena_copy(&l->arena, parts->path);
    return r->path != NULL && redis_database(l, n, line, db, r);
}

static bool redis_tcp(struct config_load *l, const struct config_node *n, unsigned line,
                      const struct url *parts, struct config_redis *r)
{
    struct slice db = parts->path;

    r->kind = CONFIG_REDIS_TCP;
    r->port = 6379;
    r->host = host_copy(l, parts);
    if (r->host == NULL) {
        if (!l->arena.failed)
            config_complain(l, n, line, "`url`: a host name, IPv4 or [IPv6] address must follow");
        return false;
    }
    if (parts->port.n > 0 && !parse_port(parts->port, 1, &r->port)) {
        config_complain(l, n, line, "`url`: the port is a number from 1 to 65535");
        return false;
    }
    if (parts->has_query) {
        config_complain(l, n, line, "`url`: nothing may follow the database");
        return false;
    }
    if (db.n > 0)
        db = cut(db, 1, db.n);
    return redis_database(l, n, line, db, r);
}

/* The URL without its password, for messages and dumps. */
static char *redis_masked(struct config_load *l, const struct url *parts, const struct config_redis *r)
{
    char tail[32];
    char *login = joined(l, r->user, *r->password != '\0' ? ":***@" : "", "", "", "");
    char *place;

    if (r->kind == CONFIG_REDIS_UNIX) {
        tail[0] = '\0';
        if (r->db > 0)
            snprintf(tail, sizeof(tail), "?db=%u", r->db);
        return login == NULL ? NULL : joined(l, "unix://", login, r->path, tail, "");
    }
    place = authority_of(l, r->host, parts->bracketed, r->port, 0);
    snprintf(tail, sizeof(tail), "/%u", r->db);
    if (login == NULL || place == NULL)
        return NULL;
    return joined(l, r->use_tls ? "rediss://" : "redis://", login, place, tail, "");
}

bool config_url_redis(struct config_load *l, const struct config_node *n, unsigned line, struct slice url,
                      struct config_redis *r)
{
    struct url parts;
    bool split = url_split(url, &parts), ok;

    r->host = config_arena_copy(&l->arena, SLICE(""));
    r->path = config_arena_copy(&l->arena, SLICE(""));
    if (slice_eq(url, SLICE("embedded"))) {
        r->kind = CONFIG_REDIS_EMBEDDED;
        /* config_set_embedded_path writes here: boot must not need memory then */
        r->path = config_arena_alloc(&l->arena, CONFIG_UNIX_PATH_MAX + 1);
        r->url = config_arena_copy(&l->arena, url);
        r->user = config_arena_copy(&l->arena, SLICE(""));
        r->password = config_arena_copy(&l->arena, SLICE(""));
        return !l->arena.failed;
    }
    if (slice_starts_with(url, SLICE("redis+sentinel://")) ||
        slice_starts_with(url, SLICE("redis+cluster://"))) {
        config_complain(l, n, line,
                        "`url`: %.*s is not available in this version; write redis://, rediss://, "
                        "unix:// or embedded",
                        (int)slice_find(url, ':'), url.p);
        return false;
    }
    if (!split || parts.has_fragment) {
        config_complain(l, n, line,
                        "`url`: write redis://[[USER]:PASSWORD@]HOST[:PORT][/DB], rediss://…, "
                        "unix:///PATH[?db=N] or embedded");
        return false;
    }
    r->use_tls = slice_ieq(parts.scheme, SLICE("rediss"));
    ok = redis_login(l, n, line, &parts, r);
    if (slice_ieq(parts.scheme, SLICE("unix"))) {
        ok = redis_unix(l, n, line, &parts, r) && ok;
    } else if (r->use_tls || slice_ieq(parts.scheme, SLICE("redis"))) {
        ok = redis_tcp(l, n, line, &parts, r) && ok;
    } else {
        config_complain(l, n, line, "`url`: the scheme is redis, rediss or unix");
        ok = false;
    }
    if (ok)
        r->url = redis_masked(l, &parts, r);
    return ok && r->url != NULL;
}

bool config_url_address(struct config_load *l, const struct config_node *n, struct config_address *a)
{
    struct slice s = slice_of(n->title), host, port;
    size_t colon = s.n;
    char ip[INET6_ADDRSTRLEN];
    bool v6 = s.n > 0 && s.p[0] == '[', ok;

    while (colon > 0 && s.p[colon - 1] != ':')
        colon--;
    if (colon == 0)
        colon = s.n + 1; /* no port: refused below */
    host = cut(s, 0, colon - 1);
    port = colon <= s.n ? cut(s, colon, s.n) : (struct slice){"", 0};
    if (v6)
        host = host.n > 2 && host.p[host.n - 1] == ']' ? cut(host, 1, host.n - 1) : (struct slice){"x", 1};
    ok = parse_port(port, 0, &a->port);
    if (slice_eq(host, SLICE("localhost")))
        host = SLICE("127.0.0.1");
    canonical_ip(host, v6, ip);
    ok = ok && (ip[0] != '\0' || host.n == 0 || slice_eq(host, SLICE("*")));
    a->text = config_arena_copy(&l->arena, s);
    a->host = config_arena_copy(&l->arena, slice_of(ip));
    if (!ok)
        config_complain(l, n, n->line,
                        "write \"ADDRESS:PORT\": an IPv4, [IPv6] address or * and a port up to 65535");
    return ok && a->text != NULL && a->host != NULL;
}

bool config_address_is_loopback(const struct config_address *a)
{
    struct in_addr v4;
    struct in6_addr v6;

    if (inet_pton(AF_INET, a->host, &v4) == 1)
        return (ntohl(v4.s_addr) >> 24) == 127;
    return inet_pton(AF_INET6, a->host, &v6) == 1 && IN6_IS_ADDR_LOOPBACK(&v6);
}
