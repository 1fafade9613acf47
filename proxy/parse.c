/*
 * parse.c - heads: where one ends, and what it says.
 *
 *   bytes ──► parse_head_end ──► parse_request / parse_response ──► struct http_head
 *             one pass, stops    start line by hand, fields by llhttp,
 *             at the blank line  then the verdicts below, in this order: start line, field
 *                                grammar, Connection, Host, framing, Expect, Upgrade
 *
 * Nothing is owned and nothing allocated here. llhttp lives on the stack of one
 * call and sees only whole heads, so its spans are never split and it holds no
 * state between two reads. It is asked for the grammar of fields alone: what a
 * version, target, Host, Transfer-Encoding, Content-Length or Connection means
 * is decided here, since llhttp 8 and 9 accept more than RFC 9112 does, and not
 * the same. The scan refuses what the versions of llhttp disagree about (bare
 * CR or LF, obs-fold, empty names) before they see it.
 */
#include "parse.h"

/* llhttp names its methods as http.h does; ours are the ones to keep. */
#define HTTP_GET LLHTTP_METHOD_GET
#define HTTP_HEAD LLHTTP_METHOD_HEAD
#define HTTP_POST LLHTTP_METHOD_POST
#define HTTP_PUT LLHTTP_METHOD_PUT
#define HTTP_PATCH LLHTTP_METHOD_PATCH
#define HTTP_DELETE LLHTTP_METHOD_DELETE
#define HTTP_OPTIONS LLHTTP_METHOD_OPTIONS
#include <llhttp.h>
#undef HTTP_GET
#undef HTTP_HEAD
#undef HTTP_POST
#undef HTTP_PUT
#undef HTTP_PATCH
#undef HTTP_DELETE
#undef HTTP_OPTIONS

#if LLHTTP_VERSION_MAJOR < 9
#if LLHTTP_STRICT_MODE != 1
#error "llhttp 8 parses loosely unless LLHTTP_STRICT_MODE is 1, here and where it is compiled"
#endif
#endif

#ifdef __SSE2__
#include <emmintrin.h>
#endif

struct error_entry {
    uint16_t status;
    const char *word;
    const char *text;
};

static const struct error_entry errors[] = {
#define X(id, status, word, text) [PARSE_##id] = {status, word, text},
    PARSE_ERRORS(X)
#undef X
};

unsigned parse_error_status(enum parse_error e)
{
    BUG_ON((size_t)e >= ARRAY_LEN(errors));
    return errors[e].status;
}

const char *parse_error_word(enum parse_error e)
{
    BUG_ON((size_t)e >= ARRAY_LEN(errors));
    return errors[e].word;
}

const char *parse_error_text(enum parse_error e)
{
    BUG_ON((size_t)e >= ARRAY_LEN(errors));
    return errors[e].text;
}

/* ---- where the head ends ---- */

enum scan_state {
    SCAN_BLANK,    /* nothing yet, or CRLFs only */
    SCAN_BLANK_CR, /* CR before the start line */
    SCAN_LINE,     /* inside a line */
    SCAN_CR,       /* the CR that ends a line */
    SCAN_NEXT,     /* behind a line's CRLF */
    SCAN_LAST_CR,  /* CR of the final blank line */
};

/* Offset of the first control character (HTAB and DEL are such) in p[0 .. n), or n. */
static inline size_t find_control(const char *p, size_t n)
{
    size_t i = 0;

#ifdef __SSE2__
    const __m128i highest = _mm_set1_epi8(0x1f), del = _mm_set1_epi8(0x7f);

    for (; i + 16 <= n; i += 16) {
        __m128i x = _mm_loadu_si128((const __m128i *)(const void *)(p + i));
        __m128i hit = _mm_or_si128(_mm_cmpeq_epi8(_mm_min_epu8(x, highest), x), _mm_cmpeq_epi8(x, del));
        int mask = _mm_movemask_epi8(hit);

        if (mask != 0)
            return i + (size_t)__builtin_ctz((unsigned)mask);
    }
#endif
    for (; i < n; i++)
        if ((unsigned char)p[i] < 0x20 || p[i] == 0x7f)
            break;
    return i;
}

/* ` HTTP/` d.d at its end is what makes a line a request line; all else is some other protocol. */
static bool is_http_line(const char *line, size_t n)
{
    return n > 9 && memcmp(line + n - 9, " HTTP/", 6) == 0;
}

/* A start line has been read up to its CR. */
static enum parse_error end_of_start_line(const char *line, size_t n, bool request)
{
    if (request)
        return is_http_line(line, n) ? PARSE_OK : PARSE_BAD_REQUEST;
    return n > 5 && memcmp(line, "HTTP/", 5) == 0 ? PARSE_OK : PARSE_BAD_REQUEST;
}

/*
 * What a field line may begin with, as far as the scan is concerned: no obs-fold, no empty name, no
 * blank line.
 */
static inline bool begins_field(char c)
{
    return (unsigned char)c > ' ' && c != ':';
}

/*
 * Inside a line: on to the CR of the last one whose successor is not in sight yet. `end` is never behind the
 * line's limit, so what is beyond that decides nothing.
 */
static enum parse_error scan_line(struct parse_scan *s, const char *bytes, size_t end, bool request)
{
    size_t at = s->at, lines = s->lines;
    enum parse_error e = PARSE_OK;

    for (;;) {
        at += find_control(bytes + at, end - at);
        if (at == end)
            break;
        if (bytes[at] == '\t') {
            at++;
        } else if (bytes[at] != '\r') {
            e = PARSE_BAD_REQUEST;
            break;
        } else if (lines > 0 && lines < HTTP_FIELDS_MAX && end - at > 2 && bytes[at + 1] == '\n' &&
                   begins_field(bytes[at + 2])) {
            lines++;
            at += 2;
        } else {
            s->state_ = SCAN_CR;
            if (lines == 0)
                e = end_of_start_line(bytes + s->start, at - s->start, request);
            at++;
            break;
        }
    }
    s->at = (uint32_t)at;
    s->lines = (uint16_t)lines;
    return e;
}

/* One step outside of lines: c is the byte at s->at. */
static enum parse_error scan_between(struct parse_scan *s, char c, bool request)
{
    switch ((enum scan_state)s->state_) {
    case SCAN_BLANK:
        if (c == '\r') {
            if (!request || s->blank == PARSE_BLANK_LINES_MAX)
                return PARSE_BAD_REQUEST;
            s->state_ = SCAN_BLANK_CR;
            break;
        }
        if (c == ' ' || c == '\t')
            return PARSE_BAD_REQUEST;
        s->start = s->at;
        s->state_ = SCAN_LINE;
        return PARSE_OK; /* c is the line's own */
    case SCAN_NEXT:
        if (c == '\r') {
            s->state_ = SCAN_LAST_CR;
            break;
        }
        if (!begins_field(c))
            return PARSE_BAD_REQUEST;
        if (s->lines > HTTP_FIELDS_MAX)
            return PARSE_HEAD_TOO_LARGE;
        s->state_ = SCAN_LINE;
        return PARSE_OK;
    case SCAN_BLANK_CR:
        if (c != '\n')
            return PARSE_BAD_REQUEST;
        s->blank++;
        s->state_ = SCAN_BLANK;
        break;
    case SCAN_CR:
        if (c != '\n')
            return PARSE_BAD_REQUEST;
        s->lines++;
        s->state_ = SCAN_NEXT;
        break;
    default:
        BUG_ON(true);
    }
    s->at++;
    return PARSE_OK;
}

/* Where the present line must have ended. */
static size_t line_limit(const struct parse_scan *s, size_t cap)
{
    return s->lines > 0 ? cap : s->start + size_min(cap / 2, PARSE_START_LINE_MAX) + 1;
}

/* All that may be looked at was, and there is no end: is that too much already? */
static enum parse_error scan_too_long(const struct parse_scan *s, size_t cap, bool request)
{
    if (s->state_ == SCAN_LINE && s->lines == 0 && s->at >= line_limit(s, cap))
        return request ? PARSE_TARGET_TOO_LONG : PARSE_HEAD_TOO_LARGE;
    return s->at >= cap ? PARSE_HEAD_TOO_LARGE : PARSE_OK;
}

size_t parse_head_end(struct parse_scan *s, const char *bytes, size_t n, size_t max_bytes, bool request,
                      enum parse_error *error)
{
    const size_t cap = size_min(max_bytes, UINT32_MAX);
    const size_t end = size_min(n, cap);

    *error = PARSE_OK;
    while (s->at < end && *error == PARSE_OK) {
        if (s->state_ == SCAN_LINE) {
            *error = scan_line(s, bytes, size_min(end, line_limit(s, cap)), request);
            if (s->state_ == SCAN_LINE)
                break;
        } else if (s->state_ == SCAN_LAST_CR) {
            if (bytes[s->at] == '\n')
                return ++s->at;
            *error = PARSE_BAD_REQUEST;
        } else {
            *error = scan_between(s, bytes[s->at], request);
        }
    }
    if (*error == PARSE_OK)
        *error = scan_too_long(s, cap, request);
    return 0;
}

/* ---- fields, by llhttp ---- */

#define BIT(id) (1u << HTTP_FIELD_##id)
_Static_assert(HTTP_FIELD_COUNT <= 32, "a set of field ids must fit a word");

/*
 * Never forwarded, whoever names them (RFC 9110 section 7.6.1), and what is between the client and
 * this gateway.
 */
#define HOP_BY_HOP                                                                                           \
    (BIT(TRANSFER_ENCODING) | BIT(CONNECTION) | BIT(KEEP_ALIVE) | BIT(PROXY_CONNECTION) |                    \
     BIT(PROXY_AUTHORIZATION) | BIT(PROXY_AUTHENTICATE) | BIT(TE) | BIT(TRAILER) | BIT(UPGRADE) |            \
     BIT(HTTP2_SETTINGS) | BIT(EXPECT) | BIT(LEASEGATE_TASK) | BIT(LEASEGATE_PRIORITY) |                     \
     BIT(LEASEGATE_WAIT) | BIT(LEASEGATE_OTHER))

/* What llhttp's callbacks fill. */
struct collector {
    struct http_head *head;
    const char *name; /* of the line being read; NULL between lines */
    size_t name_n;
    uint32_t seen;  /* ids that occur, and */
    uint32_t twice; /* that occur more than once */
    bool too_large;
};

static int on_name(llhttp_t *parser, const char *at, size_t n)
{
    struct collector *c = parser->data;

    if (c->name != NULL)
        return -1;
    c->name = at;
    c->name_n = n;
    return 0;
}

static int on_value(llhttp_t *parser, const char *at, size_t n)
{
    struct collector *c = parser->data;
    struct http_head *h = c->head;
    struct http_field *f = &h->fields[h->n_fields];
    enum http_field_id id;

    if (c->name == NULL)
        return -1;
    if (h->n_fields == HTTP_FIELDS_MAX || c->name_n > UINT16_MAX) {
        c->too_large = true;
        return -1;
    }
    while (n > 0 && (at[n - 1] == ' ' || at[n - 1] == '\t'))
        n--;
    id = http_field_lookup((struct slice){c->name, c->name_n});
    f->name = (uint32_t)(c->name - h->raw);
    f->name_n = (uint16_t)c->name_n;
    f->value = (uint32_t)(at - h->raw);
    f->value_n = (uint32_t)n;
    f->id = (uint8_t)id;
    f->hop_by_hop = (HOP_BY_HOP >> id) & 1;
    c->twice |= c->seen & 1u << id;
    c->seen |= 1u << id;
    c->name = NULL;
    h->n_fields++;
    return 0;
}

/* The head is whole: stop here, so that llhttp has no say about the body. */
static int on_head(UNUSED llhttp_t *parser)
{
    return HPE_PAUSED;
}

static const llhttp_settings_t settings = {
    .on_header_field = on_name,
    .on_header_value = on_value,
    .on_headers_complete = on_head,
};

static enum parse_error read_fields(struct http_head *h, llhttp_type_t type, struct collector *c)
{
    llhttp_t parser;

    *c = (struct collector){.head = h};
    llhttp_init(&parser, type, &settings);
    parser.data = c;
    switch (llhttp_execute(&parser, h->raw, h->raw_n)) {
    case HPE_PAUSED:
        c->seen &= ~BIT(OTHER);
        return PARSE_OK;
    case HPE_INVALID_URL:
        return PARSE_BAD_TARGET;
    case HPE_UNEXPECTED_CONTENT_LENGTH:
    case HPE_INVALID_CONTENT_LENGTH:
    case HPE_INVALID_TRANSFER_ENCODING:
        return PARSE_BAD_FRAMING;
    default:
        return c->too_large ? PARSE_HEAD_TOO_LARGE : PARSE_BAD_REQUEST;
    }
}

/* ---- Connection ---- */

/*
 * What a request may not have removed on the way: its meaning, its framing or its credentials hang on
 * them.
 */
#define END_TO_END                                                                                           \
    (BIT(HOST) | BIT(CONTENT_LENGTH) | BIT(TRANSFER_ENCODING) | BIT(CONTENT_TYPE) | BIT(CONTENT_ENCODING) |  \
     BIT(AUTHORIZATION) | BIT(API_KEY) | BIT(X_API_KEY) | BIT(X_GOOG_API_KEY) | BIT(COOKIE))
/* Some servers name Transfer-Encoding, which goes no further anyway. */
#define END_TO_END_RESPONSE (BIT(CONTENT_LENGTH) | BIT(CONTENT_TYPE) | BIT(CONTENT_ENCODING))

/* Each option is compared with every field, so their number has a bound. */
#define CONNECTION_OPTIONS_MAX 32

struct connection {
    bool close, keep_alive, upgrade;
};

static bool starts_with_lower(struct slice s, struct slice prefix)
{
    return s.n >= prefix.n && slice_ieq((struct slice){s.p, prefix.n}, prefix);
}

static bool may_be_nominated(struct slice name, enum http_field_id id, bool request)
{
    if (!request)
        return (END_TO_END_RESPONSE >> id & 1) == 0;
    return (END_TO_END >> id & 1) == 0 && !starts_with_lower(name, SLICE("x-forwarded-")) &&
           !starts_with_lower(name, SLICE("x-amz-")) && !slice_ieq(name, SLICE("forwarded"));
}

static void mark_nominated(struct http_head *h, struct slice name)
{
    for (size_t i = 0; i < h->n_fields; i++)
        if (h->fields[i].name_n == name.n && slice_ieq(http_name(h, &h->fields[i]), name))
            h->fields[i].hop_by_hop = 1;
}

static enum parse_error take_connection_option(struct http_head *h, struct slice option, bool request,
                                               struct connection *c)
{
    enum http_field_id id = http_field_lookup(option); /* keep-alive and upgrade are names of fields too */

    if (id == HTTP_FIELD_KEEP_ALIVE)
        c->keep_alive = true;
    else if (id == HTTP_FIELD_UPGRADE)
        c->upgrade = true;
    else if (slice_ieq(option, SLICE("close")))
        c->close = true;
    else if (!may_be_nominated(option, id, request))
        return PARSE_BAD_CONNECTION;
    else
        mark_nominated(h, option);
    return PARSE_OK;
}

static enum parse_error read_connection(struct http_head *h, bool request, struct connection *c)
{
    enum parse_error e = PARSE_OK;
    unsigned options = 0;

    for (size_t i = 0; i < h->n_fields && e == PARSE_OK; i++) {
        struct slice rest = http_value(h, &h->fields[i]), option;

        if (h->fields[i].id != HTTP_FIELD_CONNECTION)
            continue;
        while (e == PARSE_OK && slice_next_element(&rest, &option)) {
            if (option.n == 0)
                continue;
            if (++options > CONNECTION_OPTIONS_MAX)
                return PARSE_BAD_CONNECTION;
            e = take_connection_option(h, option, request, c);
        }
    }
    return e;
}

static bool stays_open(const struct http_head *h, const struct connection *c)
{
    return !c->close && (h->minor == 1 || c->keep_alive);
}

/*
 * Upgrade says websocket and nothing else, and Connection agrees (RFC 9110 section 7.8, RFC 6455
 * section 4).
 */
static bool wants_websocket(const struct http_head *h, const struct collector *c,
                            const struct connection *conn)
{
    return (c->seen & ~c->twice & BIT(UPGRADE)) != 0 && conn->upgrade && h->minor == 1 &&
           slice_ieq(http_value(h, http_find(h, HTTP_FIELD_UPGRADE)), SLICE("websocket"));
}

/* ---- framing (RFC 9112 section 6) ---- */

/* `chunked`, once, is the only coding taken; a list that is well-formed but has others is told apart: 501. */
static enum parse_error check_codings(const struct http_head *h)
{
    bool unknown = false, chunked = false;

    for (size_t i = 0; i < h->n_fields; i++) {
        struct slice rest = http_value(h, &h->fields[i]), element;

        if (h->fields[i].id != HTTP_FIELD_TRANSFER_ENCODING)
            continue;
        while (slice_next_element(&rest, &element)) {
            if (chunked || !http_is_token(element)) /* chunked must be the last */
                return PARSE_BAD_FRAMING;
            chunked = slice_ieq(element, SLICE("chunked"));
            unknown |= !chunked;
        }
    }
    return unknown ? PARSE_CODING_UNKNOWN : PARSE_OK;
}

static enum parse_error decide_framing(struct http_head *h, const struct collector *c, enum http_body without)
{
    h->body = (uint8_t)without;
    if ((c->seen & BIT(TRANSFER_ENCODING)) != 0) {
        if (h->minor == 0 || (c->seen & BIT(CONTENT_LENGTH)) != 0)
            return PARSE_BAD_FRAMING;
        h->body = HTTP_BODY_CHUNKED;
        return check_codings(h);
    }
    if ((c->seen & BIT(CONTENT_LENGTH)) != 0) {
        if ((c->twice & BIT(CONTENT_LENGTH)) != 0 ||
            !str_parse_u64(http_value(h, http_find(h, HTTP_FIELD_CONTENT_LENGTH)), &h->content_length))
            return PARSE_BAD_FRAMING;
        h->body = HTTP_BODY_LENGTH;
    }
    return PARSE_OK;
}

static bool has_body(const struct http_head *h)
{
    return h->body == HTTP_BODY_CHUNKED || (h->body == HTTP_BODY_LENGTH && h->content_length > 0);
}

/* ---- requests ---- */

static bool is_digit(char c)
{
    return c >= '0' && c <= '9';
}

/* `[v6]`, name or v4, with or without a port (RFC 3986 section 3.2.2, without what no DNS name holds). */
static bool is_authority(struct slice s)
{
    size_t i = 0, digits = 0;
    unsigned port = 0;

    if (s.n > 0 && s.p[0] == '[') {
        bool colon = false;

        for (i = 1; i < s.n && s.p[i] != ']'; i++) {
            char c = ascii_lower(s.p[i]);

            colon |= c == ':';
            if (!is_digit(c) && !(c >= 'a' && c <= 'f') && c != ':' && c != '.')
                return false;
        }
        if (i == s.n || !colon)
            return false;
        i++;
    } else {
        while (i < s.n && (is_digit(s.p[i]) || (ascii_lower(s.p[i]) >= 'a' && ascii_lower(s.p[i]) <= 'z') ||
                           s.p[i] == '-' || s.p[i] == '.' || s.p[i] == '_' || s.p[i] == '~'))
            i++;
        if (i == 0)
            return false;
    }
    if (i == s.n)
        return true;
    if (s.p[i++] != ':')
        return false;
    for (; i < s.n && is_digit(s.p[i]) && digits < 5; i++, digits++)
        port = port * 10 + (unsigned)(s.p[i] - '0');
    return i == s.n && digits > 0 && port <= 65535;
}

/* RFC 9112 section 3.2. `authority`: the target's own, empty when it has none. */
static enum parse_error read_host(struct http_head *h, const struct collector *c, struct slice authority)
{
    const struct http_field *f;

    if ((c->seen & BIT(HOST)) == 0) {
        if (h->minor > 0)
            return PARSE_BAD_HOST;
        h->host = authority.n == 0 ? 0 : (uint32_t)(authority.p - h->raw);
        h->host_n = (uint32_t)authority.n;
        return PARSE_OK;
    }
    f = http_find(h, HTTP_FIELD_HOST);
    if ((c->twice & BIT(HOST)) != 0 || !is_authority(http_value(h, f)))
        return PARSE_BAD_HOST;
    if (authority.n > 0 && !slice_ieq(authority, http_value(h, f)))
        return PARSE_BAD_HOST;
    h->host = f->value;
    h->host_n = f->value_n;
    return PARSE_OK;
}

static enum parse_error read_method(struct slice name, struct http_head *h)
{
    for (unsigned m = 0; m < HTTP_METHOD_COUNT; m++)
        if (slice_eq(name, http_method_name((enum http_method)m))) {
            h->method = (uint8_t)m;
            return PARSE_OK;
        }
    /* TRACE would echo credentials, CONNECT would make a tunnel */
    if (slice_eq(name, SLICE("TRACE")) || slice_eq(name, SLICE("CONNECT")))
        return PARSE_METHOD_REFUSED;
    return http_is_token(name) ? PARSE_METHOD_UNKNOWN : PARSE_BAD_REQUEST;
}

/* absolute-form: *authority is what Host must equal; the target becomes what follows it. */
static enum parse_error read_absolute(struct slice target, struct http_head *h, struct slice *authority)
{
    size_t scheme = starts_with_lower(target, SLICE("http://"))    ? 7
                    : starts_with_lower(target, SLICE("https://")) ? 8
                                                                   : 0;
    struct slice rest = {target.p + scheme, target.n - scheme};
    size_t slash = slice_find(rest, '/');

    *authority = (struct slice){rest.p, slash};
    if (scheme == 0 || !is_authority(*authority)) /* userinfo and `?` directly behind the authority too */
        return PARSE_BAD_TARGET;
    if (slash == rest.n) { /* no path is the path `/`: one stands in the scheme's `://` */
        h->target = (uint32_t)(rest.p - 1 - h->raw);
        h->target_n = 1;
    } else {
        h->target = (uint32_t)(rest.p + slash - h->raw);
        h->target_n = (uint32_t)(rest.n - slash);
    }
    return PARSE_OK;
}

/* RFC 9112 section 3.2. Raw bytes stay as they are; what no URI can hold is refused. */
static enum parse_error read_target(struct slice target, struct http_head *h, struct slice *authority)
{
    *authority = (struct slice){0};
    if (target.n == 0)
        return PARSE_BAD_TARGET;
    for (size_t i = 0; i < target.n; i++) {
        unsigned char c = (unsigned char)target.p[i];

        if (c <= ' ' || c >= 0x7f || c == '#')
            return PARSE_BAD_TARGET;
    }
    h->target = (uint32_t)(target.p - h->raw);
    h->target_n = (uint32_t)target.n;
    if (target.p[0] == '/')
        return PARSE_OK;
    if (slice_eq(target, SLICE("*")))
        return h->method == HTTP_OPTIONS ? PARSE_OK : PARSE_BAD_TARGET;
    return read_absolute(target, h, authority);
}

/* `HTTP/1.x` at p, all eight bytes of it there. */
static enum parse_error read_version(const char *p, struct http_head *h)
{
    if (memcmp(p, "HTTP/", 5) != 0 || !is_digit(p[5]) || p[6] != '.' || !is_digit(p[7]))
        return PARSE_BAD_REQUEST;
    if (p[5] != '1' || p[7] > '1')
        return PARSE_VERSION;
    h->minor = (uint8_t)(p[7] - '0');
    return PARSE_OK;
}

static enum parse_error read_request_line(struct http_head *h, struct slice *authority)
{
    struct slice line = {h->raw, slice_find((struct slice){h->raw, h->raw_n}, '\r')};
    size_t space = slice_find(line, ' ');
    enum parse_error e;

    if (!is_http_line(line.p, line.n))
        return PARSE_BAD_REQUEST;
    e = read_version(line.p + line.n - 8, h);
    if (e == PARSE_OK)
        e = read_method((struct slice){line.p, space}, h);
    if (e != PARSE_OK)
        return e;
    if (space + 9 == line.n) /* the one space stands for both */
        return PARSE_BAD_REQUEST;
    return read_target((struct slice){line.p + space + 1, line.n - 9 - space - 1}, h, authority);
}

/* RFC 9110 section 10.1.1; an HTTP/1.0 client cannot wait for a 100. */
static enum parse_error read_expect(struct http_head *h, const struct collector *c)
{
    if ((c->seen & BIT(EXPECT)) == 0 || h->minor == 0)
        return PARSE_OK;
    if ((c->twice & BIT(EXPECT)) != 0 ||
        !slice_ieq(http_value(h, http_find(h, HTTP_FIELD_EXPECT)), SLICE("100-continue")))
        return PARSE_EXPECTATION;
    h->expect_continue = has_body(h);
    return PARSE_OK;
}

/* All but the table of fields, which is the caller's. */
static void head_init(struct http_head *h, const char *raw, size_t n)
{
    struct http_field *fields = h->fields;

    *h = (struct http_head){.raw = raw, .raw_n = (uint32_t)n, .fields = fields};
}

static bool is_whole(const char *raw, size_t n)
{
    return n >= 4 && n <= UINT32_MAX && memcmp(raw + n - 4, "\r\n\r\n", 4) == 0;
}

enum parse_error parse_request(const char *raw, size_t n, struct http_head *out)
{
    struct connection connection = {0};
    struct slice authority;
    struct collector c;
    enum parse_error e;

    if (!is_whole(raw, n))
        return PARSE_BAD_REQUEST;
    head_init(out, raw, n);
    e = read_request_line(out, &authority);
    if (e == PARSE_OK)
        e = read_fields(out, HTTP_REQUEST, &c);
    if (e == PARSE_OK && (c.seen & BIT(CONNECTION)) != 0)
        e = read_connection(out, true, &connection);
    if (e == PARSE_OK)
        e = read_host(out, &c, authority);
    if (e == PARSE_OK)
        e = decide_framing(out, &c, HTTP_BODY_NONE);
    if (e == PARSE_OK)
        e = read_expect(out, &c);
    if (e != PARSE_OK)
        return e;
    out->keep_alive = stays_open(out, &connection);
    out->websocket = wants_websocket(out, &c, &connection);
    return out->websocket && (out->method != HTTP_GET || has_body(out)) ? PARSE_BAD_UPGRADE : PARSE_OK;
}

/* ---- responses ---- */

/* `HTTP/1.1 200 OK`; the reason may be missing, and its space too (RFC 9112 section 4). */
static enum parse_error read_status_line(struct http_head *h)
{
    struct slice line = {h->raw, slice_find((struct slice){h->raw, h->raw_n}, '\r')};
    enum parse_error e;
    const char *p = line.p + 8;

    if (line.n < 12)
        return PARSE_BAD_REQUEST;
    e = read_version(line.p, h);
    if (e != PARSE_OK)
        return e;
    if (p[0] != ' ' || p[1] < '1' || p[1] > '5' || !is_digit(p[2]) || !is_digit(p[3]) ||
        (line.n > 12 && p[4] != ' '))
        return PARSE_BAD_REQUEST;
    h->status = (uint16_t)((p[1] - '0') * 100 + (p[2] - '0') * 10 + (p[3] - '0'));
    h->reason = (uint32_t)size_min(13, line.n);
    h->reason_n = (uint32_t)line.n - h->reason;
    return PARSE_OK;
}

enum parse_error parse_response(const char *raw, size_t n, enum http_method method, struct http_head *out)
{
    struct connection connection = {0};
    struct collector c;
    enum parse_error e;

    if (!is_whole(raw, n))
        return PARSE_BAD_REQUEST;
    head_init(out, raw, n);
    e = read_status_line(out);
    if (e == PARSE_OK)
        e = read_fields(out, HTTP_RESPONSE, &c);
    if (e == PARSE_OK && (c.seen & BIT(CONNECTION)) != 0)
        e = read_connection(out, false, &connection);
    if (e == PARSE_OK)
        e = decide_framing(out, &c, HTTP_BODY_EOF);
    if (e != PARSE_OK)
        return e;
    if (method == HTTP_HEAD || out->status < 200 || out->status == 204 || out->status == 304)
        out->body = HTTP_BODY_NONE;
    out->keep_alive = stays_open(out, &connection) && out->body != HTTP_BODY_EOF && out->status != 101;
    if (out->status != 101)
        return PARSE_OK;
    out->websocket = wants_websocket(out, &c, &connection);
    return out->websocket ? PARSE_OK : PARSE_BAD_UPGRADE;
}
