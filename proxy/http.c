/*
 * http.c - the rules about a head that do not depend on how it was parsed:
 * which names mean something, and how a head is written for the other side.
 *
 * Forwarding is copying: fields that go on are contiguous in the raw head, so a
 * run of them is one memcpy, and a typical head is two or three. What a run
 * must leave out is decided field by field in forwarded(): nothing else drops a field.
 */
#include "http.h"

#include "mem.h"

struct name_entry {
    const char *name;
    uint8_t n;
    uint8_t id;
};

/*
 * Names by length, since that alone tells most of them apart. http_field_lookup goes through the group of
 * one length; the order inside this table is that of length, and test_http.c checks that it holds every
 * name once.
 */
static const struct name_entry names[] = {
#define NAME(id, name)                                                                                       \
    {                                                                                                        \
        name, sizeof(name) - 1, HTTP_FIELD_##id                                                              \
    }
    NAME(TE, "te"),
    NAME(VIA, "via"),
    NAME(HOST, "host"),
    NAME(COOKIE, "cookie"),
    NAME(EXPECT, "expect"),
    NAME(API_KEY, "api-key"),
    NAME(TRAILER, "trailer"),
    NAME(UPGRADE, "upgrade"),
    NAME(X_API_KEY, "x-api-key"),
    NAME(CONNECTION, "connection"),
    NAME(KEEP_ALIVE, "keep-alive"),
    NAME(REQUEST_ID, "request-id"),
    NAME(TRACEPARENT, "traceparent"),
    NAME(RETRY_AFTER, "retry-after"),
    NAME(CONTENT_TYPE, "content-type"),
    NAME(X_REQUEST_ID, "x-request-id"),
    NAME(MAX_FORWARDS, "max-forwards"),
    NAME(AUTHORIZATION, "authorization"),
    NAME(CONTENT_LENGTH, "content-length"),
    NAME(X_GOOG_API_KEY, "x-goog-api-key"),
    NAME(HTTP2_SETTINGS, "http2-settings"),
    NAME(LEASEGATE_TASK, "x-leasegate-task"),
    NAME(LEASEGATE_WAIT, "x-leasegate-wait"),
    NAME(CONTENT_ENCODING, "content-encoding"),
    NAME(PROXY_CONNECTION, "proxy-connection"),
    NAME(TRANSFER_ENCODING, "transfer-encoding"),
    NAME(SEC_WEBSOCKET_KEY, "sec-websocket-key"),
    NAME(PROXY_AUTHENTICATE, "proxy-authenticate"),
    NAME(PROXY_AUTHORIZATION, "proxy-authorization"),
    NAME(LEASEGATE_PRIORITY, "x-leasegate-priority"),
#undef NAME
};

#define NAME_MAX_BYTES 20

/* first_of[n]: where the names of n bytes begin in names[]; first_of[n + 1]: where they end. */
static const uint8_t first_of[NAME_MAX_BYTES + 2] = {
    [2] = 0,   [3] = 1,   [4] = 2,   [5] = 3,   [6] = 3,   [7] = 5,   [8] = 8,
    [9] = 8,   [10] = 9,  [11] = 12, [12] = 14, [13] = 17, [14] = 18, [15] = 21,
    [16] = 21, [17] = 25, [18] = 27, [19] = 28, [20] = 29, [21] = 30,
};

bool http_is_token_char(char c)
{
    static const bool is_token[256] = {
        ['!'] = true,         ['#' ... '\''] = true, ['*'] = true,         ['+'] = true,
        ['-'] = true,         ['.'] = true,          ['0' ... '9'] = true, ['A' ... 'Z'] = true,
        ['^' ... 'z'] = true, ['|'] = true,          ['~'] = true,
    };

    return is_token[(unsigned char)c];
}

bool http_is_token(struct slice s)
{
    for (size_t i = 0; i < s.n; i++)
        if (!http_is_token_char(s.p[i]))
            return false;
    return s.n > 0;
}

/*
 * Whether the bytes of x are those of `lower`, letters in any case. Of what stands in a name in lower case,
 * letters alone have the bit 0x40, and there alone the bit 0x20 may differ.
 */
static inline bool word_eq(uint64_t x, uint64_t lower)
{
    return (x | (lower & UINT64_C(0x4040404040404040)) >> 1) == lower;
}

static inline uint64_t load8(const char *p)
{
    uint64_t v;

    memcpy(&v, p, sizeof(v));
    return v;
}

static inline uint64_t load4(const char *p)
{
    uint32_t v;

    memcpy(&v, p, sizeof(v));
    return v;
}

/* Both are n bytes. Words that overlap cover what is no multiple of eight. */
static inline bool name_eq(const char *p, const char *lower, size_t n)
{
    size_t i = 0;

    if (n >= 8) {
        for (; i + 8 < n; i += 8)
            if (!word_eq(load8(p + i), load8(lower + i)))
                return false;
        return word_eq(load8(p + (n - 8)), load8(lower + (n - 8)));
    }
    if (n >= 4)
        return word_eq(load4(p), load4(lower)) && word_eq(load4(p + (n - 4)), load4(lower + (n - 4)));
    for (; i < n; i++)
        if (ascii_lower(p[i]) != lower[i])
            return false;
    return true;
}

enum http_field_id http_field_lookup(struct slice name)
{
    static const char ours[] = "x-leasegate-";

    if (name.n <= NAME_MAX_BYTES) {
        for (size_t i = first_of[name.n]; i < first_of[name.n + 1]; i++)
            if (name_eq(name.p, names[i].name, name.n))
                return (enum http_field_id)names[i].id;
    }
    if (name.n >= sizeof(ours) - 1 && name_eq(name.p, ours, sizeof(ours) - 1))
        return HTTP_FIELD_LEASEGATE_OTHER;
    return HTTP_FIELD_OTHER;
}

const struct http_field *http_find(const struct http_head *h, enum http_field_id id)
{
    for (size_t i = 0; i < h->n_fields; i++)
        if (h->fields[i].id == id)
            return &h->fields[i];
    return NULL;
}

const struct http_field *http_find_name(const struct http_head *h, struct slice name)
{
    for (size_t i = 0; i < h->n_fields; i++)
        if (h->fields[i].name_n == name.n && slice_ieq(http_name(h, &h->fields[i]), name))
            return &h->fields[i];
    return NULL;
}

struct slice http_value_of(const struct http_head *h, enum http_field_id id, size_t max)
{
    const struct http_field *f = http_find(h, id);
    struct slice v = {NULL, 0};

    if (f != NULL)
        v = http_value(h, f);
    return (struct slice){v.p, size_min(v.n, max)};
}

size_t http_count(const struct http_head *h, enum http_field_id id)
{
    size_t n = 0;

    for (size_t i = 0; i < h->n_fields; i++)
        n += h->fields[i].id == id;
    return n;
}

struct slice http_method_name(enum http_method m)
{
    static const struct slice method_names[HTTP_METHOD_COUNT] = {
        [HTTP_GET] = {"GET", 3},         [HTTP_HEAD] = {"HEAD", 4},   [HTTP_POST] = {"POST", 4},
        [HTTP_PUT] = {"PUT", 3},         [HTTP_PATCH] = {"PATCH", 5}, [HTTP_DELETE] = {"DELETE", 6},
        [HTTP_OPTIONS] = {"OPTIONS", 7},
    };

    BUG_ON((unsigned)m >= HTTP_METHOD_COUNT);
    return method_names[m];
}

struct reason_entry {
    uint16_t status;
    const char *phrase;
};

/* RFC 9110 section 15 and the registry, as far as an LLM API or this program sends them. */
static const struct reason_entry reasons[] = {
    {100, "Continue"},
    {101, "Switching Protocols"},
    {102, "Processing"},
    {103, "Early Hints"},
    {200, "OK"},
    {201, "Created"},
    {202, "Accepted"},
    {203, "Non-Authoritative Information"},
    {204, "No Content"},
    {205, "Reset Content"},
    {206, "Partial Content"},
    {207, "Multi-Status"},
    {300, "Multiple Choices"},
    {301, "Moved Permanently"},
    {302, "Found"},
    {303, "See Other"},
    {304, "Not Modified"},
    {307, "Temporary Redirect"},
    {308, "Permanent Redirect"},
    {400, "Bad Request"},
    {401, "Unauthorized"},
    {402, "Payment Required"},
    {403, "Forbidden"},
    {404, "Not Found"},
    {405, "Method Not Allowed"},
    {406, "Not Acceptable"},
    {407, "Proxy Authentication Required"},
    {408, "Request Timeout"},
    {409, "Conflict"},
    {410, "Gone"},
    {411, "Length Required"},
    {412, "Precondition Failed"},
    {413, "Content Too Large"},
    {414, "URI Too Long"},
    {415, "Unsupported Media Type"},
    {416, "Range Not Satisfiable"},
    {417, "Expectation Failed"},
    {421, "Misdirected Request"},
    {422, "Unprocessable Content"},
    {424, "Failed Dependency"},
    {425, "Too Early"},
    {426, "Upgrade Required"},
    {428, "Precondition Required"},
    {429, "Too Many Requests"},
    {431, "Request Header Fields Too Large"},
    {451, "Unavailable For Legal Reasons"},
    {499, "Client Closed Request"},
    {500, "Internal Server Error"},
    {501, "Not Implemented"},
    {502, "Bad Gateway"},
    {503, "Service Unavailable"},
    {504, "Gateway Timeout"},
    {505, "HTTP Version Not Supported"},
    {529, "Overloaded"},
};

const char *http_reason(unsigned status)
{
    for (size_t i = 0; i < ARRAY_LEN(reasons); i++)
        if (reasons[i].status == status)
            return reasons[i].phrase;
    return "Unknown";
}

struct http_head *http_head_copy(const struct http_head *h)
{
    size_t fields_n = h->n_fields * sizeof(*h->fields);
    struct http_head *copy = mem_alloc(sizeof(*copy) + fields_n + h->raw_n);
    char *raw;

    if (copy == NULL)
        return NULL;
    *copy = *h;
    copy->fields = (struct http_field *)(copy + 1);
    if (fields_n > 0)
        memcpy(copy->fields, h->fields, fields_n);
    raw = (char *)(copy + 1) + fields_n;
    memcpy(raw, h->raw, h->raw_n);
    copy->raw = raw;
    return copy;
}

/* ---- writing ---- */

/* Into room that was reserved before. */
static inline char *put(char *o, struct slice s)
{
    memcpy(o, s.p, s.n);
    return o + s.n;
}

static inline char *put_field(char *o, struct slice name, struct slice value)
{
    o = put(o, name);
    o = put(o, SLICE(": "));
    if (value.n > 0)
        o = put(o, value);
    return put(o, SLICE("\r\n"));
}

/*
 * An added field that counts: one that says something and does not touch what only the writer may decide. The
 * configuration refuses such names, so here it would be our own mistake.
 */
static bool extra_counts(const struct http_extra *e)
{
    if (e->value.n == 0)
        return false;
    switch (http_field_lookup(e->name)) {
    case HTTP_FIELD_HOST:
    case HTTP_FIELD_CONTENT_LENGTH:
    case HTTP_FIELD_TRANSFER_ENCODING:
    case HTTP_FIELD_CONNECTION:
    case HTTP_FIELD_UPGRADE:
        return !WARN_ON(true);
    default:
        return true;
    }
}

static size_t extras_bytes(const struct http_extra *extras, size_t n)
{
    size_t total = 0;

    for (size_t i = 0; i < n; i++)
        total += extras[i].name.n + extras[i].value.n + 4;
    return total;
}

static char *put_extras(char *o, const struct http_extra *extras, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (extra_counts(&extras[i]))
            o = put_field(o, extras[i].name, extras[i].value);
    return o;
}

static bool is_replaced(const struct http_head *h, const struct http_field *f,
                        const struct http_extra *extras, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (extras[i].name.n == f->name_n && extras[i].value.n > 0 &&
            slice_ieq(extras[i].name, http_name(h, f)))
            return true;
    return false;
}

/* What of the received head goes on. */
struct forward {
    bool drop_host;
    bool drop_content_length;
    const struct http_extra *replaced;
    size_t n_replaced;
};

static bool forwarded(const struct http_head *h, const struct http_field *f, const struct forward *w)
{
    if (f->hop_by_hop)
        return false;
    if (f->id == HTTP_FIELD_HOST)
        return !w->drop_host;
    if (f->id == HTTP_FIELD_CONTENT_LENGTH)
        return !w->drop_content_length;
    return !is_replaced(h, f, w->replaced, w->n_replaced);
}

/*
 * Copies the lines of all fields that go on, run by run. A field's line ends where the next one's name
 * begins.
 */
static char *put_forwarded(char *o, const struct http_head *h, const struct forward *w)
{
    const uint32_t end = h->raw_n - 2; /* of the last field line */
    uint32_t run = end;                /* where the present run began; `end`: none */

    for (size_t i = 0; i < h->n_fields; i++) {
        const struct http_field *f = &h->fields[i];

        if (forwarded(h, f, w)) {
            if (run == end)
                run = f->name;
        } else if (run != end) {
            o = put(o, http_at(h, run, f->name - run));
            run = end;
        }
    }
    return put(o, http_at(h, run, end - run));
}

/*
 * Methods that are expected to have a body: without one, some servers answer 411 unless told that it
 * is empty.
 */
static bool method_has_body(uint8_t method)
{
    return method == HTTP_POST || method == HTTP_PUT || method == HTTP_PATCH;
}

#define FIXED_FIELDS_BYTES 256 /* more than all constant text that the two writers below can add */

bool http_put_request(struct buf *out, const struct http_head *h, const struct http_request_out *o)
{
    const struct forward w = {
        .drop_host = true,
        .drop_content_length = h->body != HTTP_BODY_LENGTH,
        .replaced = o->set,
        .n_replaced = o->n_set,
    };
    struct slice authority = o->authority.n > 0 ? o->authority : http_at(h, h->host, h->host_n);
    struct slice target = http_target(h);
    char *p;

    if (!buf_reserve(out, h->raw_n + authority.n + o->path_prefix.n + extras_bytes(o->set, o->n_set) +
                              FIXED_FIELDS_BYTES))
        return false;
    p = out->p + out->n;
    p = put(p, http_method_name((enum http_method)h->method));
    *p++ = ' ';
    if (o->path_prefix.n > 0 && target.p[0] == '/') /* `*` is no path */
        p = put(p, o->path_prefix);
    p = put(p, target);
    p = put(p, SLICE(" HTTP/1.1\r\n"));
    p = put_field(p, SLICE("Host"), authority);
    p = put_forwarded(p, h, &w);
    p = put_extras(p, o->set, o->n_set);
    if (h->body == HTTP_BODY_CHUNKED)
        p = put(p, SLICE("Transfer-Encoding: chunked\r\n"));
    else if (h->body == HTTP_BODY_NONE && method_has_body(h->method))
        p = put(p, SLICE("Content-Length: 0\r\n"));
    if (o->websocket)
        p = put(p, SLICE("Connection: Upgrade\r\nUpgrade: websocket\r\n"));
    p = put(p, SLICE("\r\n"));
    out->n = (size_t)(p - out->p);
    return true;
}

/* The client's connection, and how the body is delimited on it. */
static void decide_response(const struct http_head *h, struct http_response_out *o)
{
    bool until_close = false;

    o->chunked = false;
    o->will_close = false;
    if (h->status < 200) /* also 101: what follows it is no longer HTTP */
        return;
    if (!o->head_request && (h->body == HTTP_BODY_CHUNKED || h->body == HTTP_BODY_EOF)) {
        o->chunked = o->client_minor > 0;
        until_close = !o->chunked;
    }
    o->will_close = o->close || until_close || !o->client_keep_alive ||
                    (o->client_minor == 0 && !o->client_explicit_keep_alive);
}

static char *put_status_line(char *p, const struct http_head *h)
{
    struct slice reason = http_at(h, h->reason, h->reason_n);

    if (reason.n == 0)
        reason = slice_of(http_reason(h->status));
    p = put(p, SLICE("HTTP/1.1 "));
    p += str_put_u64(p, h->status);
    *p++ = ' ';
    p = put(p, reason);
    return put(p, SLICE("\r\n"));
}

bool http_put_response(struct buf *out, const struct http_head *h, struct http_response_out *o)
{
    const struct forward w = {
        /* RFC 9110 section 8.6: never in 1xx and 204; where a body follows, only if it delimits that */
        .drop_content_length = h->status < 200 || h->status == 204 || h->body == HTTP_BODY_CHUNKED ||
                               h->body == HTTP_BODY_EOF,
        .replaced = o->add,
        .n_replaced = o->n_add,
    };
    char *p;

    decide_response(h, o);
    if (h->status < 200 && o->client_minor == 0)
        return true;
    if (!buf_reserve(out, h->raw_n + extras_bytes(o->add, o->n_add) + FIXED_FIELDS_BYTES))
        return false;
    p = put_status_line(out->p + out->n, h);
    p = put_forwarded(p, h, &w);
    if (h->status >= 200 || o->websocket)
        p = put_extras(p, o->add, o->n_add);
    if (o->chunked)
        p = put(p, SLICE("Transfer-Encoding: chunked\r\n"));
    if (h->status == 101 && o->websocket)
        p = put(p, SLICE("Connection: Upgrade\r\nUpgrade: websocket\r\n"));
    else if (o->will_close)
        p = put(p, SLICE("Connection: close\r\n"));
    else if (o->client_minor == 0)
        p = put(p, SLICE("Connection: keep-alive\r\n"));
    p = put(p, SLICE("\r\n"));
    out->n = (size_t)(p - out->p);
    return true;
}
