/*
 * http.h - an HTTP/1.1 message head as data, and the rules about it: framing,
 * hop-by-hop fields, persistence, and how it is written for the other side.
 * Pure: no I/O, no clock, no allocation but where said.
 *
 * A head is one run of raw bytes and a table of offsets into it, so that it can
 * be copied, kept while its call waits, and forwarded byte for byte.
 */
#ifndef LG_HTTP_H
#define LG_HTTP_H

#include "buf.h"
#include "str.h"

#define HTTP_FIELDS_MAX 256 /* more: 431 */

/* Fields that this program treats in some way; all others are HTTP_FIELD_OTHER and pass untouched. */
#define HTTP_FIELDS(X)                                                                                       \
    X(HOST, "host")                                                                                          \
    X(CONTENT_LENGTH, "content-length")                                                                      \
    X(TRANSFER_ENCODING, "transfer-encoding")                                                                \
    X(CONNECTION, "connection")                                                                              \
    X(KEEP_ALIVE, "keep-alive")                                                                              \
    X(PROXY_CONNECTION, "proxy-connection")                                                                  \
    X(PROXY_AUTHORIZATION, "proxy-authorization")                                                            \
    X(PROXY_AUTHENTICATE, "proxy-authenticate")                                                              \
    X(TE, "te")                                                                                              \
    X(TRAILER, "trailer")                                                                                    \
    X(UPGRADE, "upgrade")                                                                                    \
    X(HTTP2_SETTINGS, "http2-settings")                                                                      \
    X(EXPECT, "expect")                                                                                      \
    X(CONTENT_TYPE, "content-type")                                                                          \
    X(CONTENT_ENCODING, "content-encoding")                                                                  \
    X(AUTHORIZATION, "authorization")                                                                        \
    X(API_KEY, "api-key")                                                                                    \
    X(X_API_KEY, "x-api-key")                                                                                \
    X(X_GOOG_API_KEY, "x-goog-api-key")                                                                      \
    X(COOKIE, "cookie")                                                                                      \
    X(X_REQUEST_ID, "x-request-id")                                                                          \
    X(REQUEST_ID, "request-id")                                                                              \
    X(TRACEPARENT, "traceparent")                                                                            \
    X(RETRY_AFTER, "retry-after")                                                                            \
    X(SEC_WEBSOCKET_KEY, "sec-websocket-key")                                                                \
    X(MAX_FORWARDS, "max-forwards")                                                                          \
    X(VIA, "via")                                                                                            \
    X(LEASEGATE_TASK, "x-leasegate-task")                                                                    \
    X(LEASEGATE_PRIORITY, "x-leasegate-priority")                                                            \
    X(LEASEGATE_WAIT, "x-leasegate-wait")                                                                    \
    X(LEASEGATE_OTHER, "x-leasegate-*")

enum http_field_id {
    HTTP_FIELD_OTHER,
#define X(id, name) HTTP_FIELD_##id,
    HTTP_FIELDS(X)
#undef X
        HTTP_FIELD_COUNT
};

struct http_field {
    uint32_t name; /* offset into raw */
    uint32_t value;
    uint32_t value_n;
    uint16_t name_n;
    uint8_t id;         /* enum http_field_id */
    uint8_t hop_by_hop; /* not forwarded: by its name or because Connection names it */
};

enum http_body {
    HTTP_BODY_NONE,
    HTTP_BODY_LENGTH, /* content_length bytes, may be 0 */
    HTTP_BODY_CHUNKED,
    HTTP_BODY_EOF, /* responses only: until the connection ends */
};

/* All others are answered 501, TRACE and CONNECT 405. */
enum http_method {
    HTTP_GET,
    HTTP_HEAD,
    HTTP_POST,
    HTTP_PUT,
    HTTP_PATCH,
    HTTP_DELETE,
    HTTP_OPTIONS,
    HTTP_METHOD_COUNT
};

struct http_head {
    const char *raw; /* from the first byte of the start line to the blank line, inclusive */
    uint32_t raw_n;
    /* request */
    uint8_t method; /* enum http_method */
    /* as sent, in origin form; for absolute form the part after the authority ("/" if empty) */
    uint32_t target, target_n;
    uint32_t host, host_n; /* of the Host field, or the target's authority */
    bool websocket;        /* Upgrade: websocket that may be offered on (RFC 6455 section 4.1) */
    bool expect_continue;
    /* response */
    uint16_t status;
    uint32_t reason, reason_n;
    /* both */
    uint8_t minor;   /* HTTP/1.minor */
    uint8_t body;    /* enum http_body */
    bool keep_alive; /* this side would take another message afterwards */
    uint64_t content_length;
    uint16_t n_fields;
    struct http_field *fields;
};

static inline struct slice http_at(const struct http_head *h, uint32_t offset, uint32_t n)
{
    return (struct slice){h->raw + offset, n};
}

static inline struct slice http_name(const struct http_head *h, const struct http_field *f)
{
    return http_at(h, f->name, f->name_n);
}

static inline struct slice http_value(const struct http_head *h, const struct http_field *f)
{
    return http_at(h, f->value, f->value_n);
}

static inline struct slice http_target(const struct http_head *h)
{
    return http_at(h, h->target, h->target_n);
}

/* RFC 9110 section 5.6.2: what names of fields, methods and codings are made of. */
bool http_is_token_char(char c);
/* At least one such byte and no other. */
bool http_is_token(struct slice s);
/* Which field a name is (case-insensitive; aliases such as Transfer_Encoding are HTTP_FIELD_OTHER). */
enum http_field_id http_field_lookup(struct slice name);
/* The first field with that id, or NULL. */
const struct http_field *http_find(const struct http_head *h, enum http_field_id id);
/* The first field with that name (any case), or NULL. */
const struct http_field *http_find_name(const struct http_head *h, struct slice name);
/* The value of the first field with that id, cut to max bytes; empty when there is none. */
struct slice http_value_of(const struct http_head *h, enum http_field_id id, size_t max);
/* How many fields have that id. */
size_t http_count(const struct http_head *h, enum http_field_id id);
struct slice http_method_name(enum http_method m);
/* Standard reason phrase, never empty ("Unknown" otherwise): Google's SDK shows it. */
const char *http_reason(unsigned status);

/* One block that holds h, its fields and its raw bytes; mem_free it. NULL: no memory. */
MUST_CHECK struct http_head *http_head_copy(const struct http_head *h);

/* What the proxy adds when it writes a head for the other side. Empty slices are left out. */
struct http_extra {
    struct slice name;
    struct slice value;
};

struct http_request_out {
    struct slice authority;       /* Host field; empty: the client's own, byte for byte */
    struct slice path_prefix;     /* put before the target */
    const struct http_extra *set; /* replace all client fields of the same name, then are added */
    size_t n_set;
    bool websocket; /* offer Upgrade: websocket */
};

/*
 * The request as it goes upstream (always HTTP/1.1, keep-alive unless websocket): start line, Host first,
 * the client's end-to-end fields in their order byte for byte, then `set`, framing by h->body
 * (Content-Length as sent; chunked re-framed; a POST, PUT or PATCH without any gets Content-Length: 0),
 * never Expect, never x-leasegate-*. `set` must not name Host or a framing or connection field. False: no
 * memory, nothing was appended.
 */
MUST_CHECK bool http_put_request(struct buf *out, const struct http_head *h,
                                 const struct http_request_out *o);

struct http_response_out {
    unsigned client_minor;           /* 0: HTTP/1.0 client: no chunked, no 1xx */
    bool client_keep_alive;          /* the client would send another request here */
    bool client_explicit_keep_alive; /* an HTTP/1.0 client asked with Connection: keep-alive */
    bool head_request;
    bool close;     /* end the client's connection after this response */
    bool websocket; /* 101: rebuild Upgrade and Connection */
    const struct http_extra *add;
    size_t n_add;
    /* out */
    bool chunked;    /* the body must be written in chunks */
    bool will_close; /* the client's connection ends after this response, and the head says so */
};

/*
 * The response as it goes to the client: status line (with the standard phrase where the upstream sent
 * none), end-to-end fields byte for byte without the upstream's own x-leasegate-*, then `add`. A body
 * without length becomes chunked for HTTP/1.1 and close-delimited for 1.0. For HEAD and 304 the
 * Content-Length is kept as sent and no body follows; 1xx and 204 lose it (RFC 9110 section 8.6). An
 * interim response other than 101 gets nothing added, and leaves chunked and will_close false; to an
 * HTTP/1.0 client nothing at all is written for it. False: no memory, nothing was appended.
 */
MUST_CHECK bool http_put_response(struct buf *out, const struct http_head *h, struct http_response_out *o);

#endif
