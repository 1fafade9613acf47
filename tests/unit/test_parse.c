/*
 * test_parse.c - heads and bodies as they come off the wire. Rows bear the ids of the case table; each is
 * read whole, cut in two at every byte, and byte by byte, and every way must give the same answer. Bytes
 * are handed over in blocks of just their size, so that a sanitizer sees a read beyond them.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#include <cmocka.h>

#include "mem.h"
#include "parse.h"

#define HEAD_MAX 65536
#define INCOMPLETE ((int)PARSE_NO_MEMORY + 1) /* no verdict yet */

#define R11 " HTTP/1.1\r\nHost: a\r\n"
#define GET11 "GET /" R11
#define POST11 "POST /" R11

static struct http_field fields[HTTP_FIELDS_MAX];

static char *exact_copy(const char *bytes, size_t n)
{
    char *copy = mem_alloc(n > 0 ? n : 1);

    assert_non_null(copy);
    if (n > 0)
        memcpy(copy, bytes, n);
    return copy;
}

/* How a head is handed over: `first` bytes, then `step` at a time. */
struct cut {
    size_t first, step;
};

struct reading {
    const char *bytes;
    size_t n;
    bool request;
    enum http_method method; /* answered by a response */
    size_t max;
};

/* Reads one head; *h lives in *kept, which is the caller's to free. */
static int read_head(const struct reading *r, struct cut cut, struct http_head *h, char **kept)
{
    struct parse_scan s = {0};

    *kept = NULL;
    for (size_t have = size_min(cut.first, r->n);; have = size_min(have + cut.step, r->n)) {
        char *bytes = exact_copy(r->bytes, have);
        enum parse_error e;
        size_t length = parse_head_end(&s, bytes, have, r->max, r->request, &e);

        mem_free(bytes);
        assert_true(s.at <= have);
        if (length > 0) {
            assert_int_equal(e, PARSE_OK);
            assert_true(length <= have && s.start < length);
            *kept = exact_copy(r->bytes + s.start, length - s.start);
            h->fields = fields;
            return r->request ? (int)parse_request(*kept, length - s.start, h)
                              : (int)parse_response(*kept, length - s.start, r->method, h);
        }
        if (e != PARSE_OK)
            return (int)e;
        assert_int_equal(s.at, have);
        if (have == r->n)
            return INCOMPLETE;
    }
}

/* The one answer of all cuts. */
static int read_every_way(const char *id, const struct reading *r)
{
    struct http_head h;
    char *kept;
    int whole = read_head(r, (struct cut){r->n, 1}, &h, &kept);

    mem_free(kept);
    for (size_t i = 0; i <= r->n; i++) {
        /* i == r->n: byte by byte */
        struct cut cut = i == r->n ? (struct cut){1, 1} : (struct cut){i, r->n};
        int got = read_head(r, cut, &h, &kept);

        mem_free(kept);
        if (got != whole)
            fail_msg("%s: %d whole, %d when cut at %zu", id, whole, got, i);
    }
    return whole;
}

struct row {
    const char *id;
    const char *bytes;
    size_t n;
    int want;
};

#define ROW(id, bytes, want)                                                                                 \
    {                                                                                                        \
        id, bytes, sizeof(bytes) - 1, PARSE_##want                                                           \
    }

static void check_rows(const struct row *rows, size_t n, bool request)
{
    for (size_t i = 0; i < n; i++) {
        struct reading r = {rows[i].bytes, rows[i].n, request, HTTP_POST, HEAD_MAX};
        int got = read_every_way(rows[i].id, &r);

        if (got != rows[i].want)
            fail_msg("%s: row %zu: %d instead of %d for <%s>", rows[i].id, i, got, rows[i].want,
                     rows[i].bytes);
    }
}

static void test_request_line(void **state)
{
    static const struct row rows[] = {
        ROW("plain", GET11 "\r\n", OK),
        ROW("plain", "GET / HTTP/1.0\r\n\r\n", OK),
        ROW("H001", "GET / HTTP/1.1\nHost: a\r\n\r\n", BAD_REQUEST),
        ROW("H001", GET11 "X: y\n\r\n", BAD_REQUEST),
        ROW("H001", POST11 "Content-Length: 3\r\n\nabc", BAD_REQUEST),
        ROW("H001", "\nGET /" R11 "\r\n", BAD_REQUEST),
        ROW("H002", "GET / HTTP/2.0\r\nHost: a\r\n\r\n", VERSION),
        ROW("H002", "GET / HTTP/0.9\r\nHost: a\r\n\r\n", VERSION),
        ROW("H002", "GET / HTTP/1.2\r\nHost: a\r\n\r\n", VERSION),
        ROW("H002", "GET / HTTP/3.1\r\nHost: a\r\n\r\n", VERSION),
        ROW("H002", "GET /\r\n", BAD_REQUEST),
        ROW("H002", "GET / RTSP/1.0\r\n\r\n", BAD_REQUEST),
        ROW("H002", "SOURCE / ICE/1.0\r\n\r\n", BAD_REQUEST),
        ROW("H002", "GET / http/1.1\r\nHost: a\r\n\r\n", BAD_REQUEST),
        ROW("H002", "GET / HTTP/1.10\r\nHost: a\r\n\r\n", BAD_REQUEST),
        ROW("H002", "GET / HTTP/x.1\r\nHost: a\r\n\r\n", BAD_REQUEST),
        ROW("H002", "GET / HTTP/1.1 \r\nHost: a\r\n\r\n", BAD_REQUEST),
        ROW("H002", "GET HTTP/1.1\r\nHost: a\r\n\r\n", BAD_REQUEST),
        ROW("H002", "\r\n\r\n / HTTP/1.1\r\n", BAD_REQUEST),
        ROW("H003", "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", VERSION),
        ROW("H005", "POST http://b/v1/chat/completions HTTP/1.1\r\nHost: a\r\n\r\n", BAD_HOST),
        ROW("H005", "POST http://a/v1/chat/completions HTTP/1.1\r\nHost: a\r\n\r\n", OK),
        ROW("H005", "POST http://A:80/v1 HTTP/1.1\r\nHost: a:80\r\n\r\n", OK),
        ROW("H005", "POST http://a:80/v1 HTTP/1.1\r\nHost: a\r\n\r\n", BAD_HOST),
        ROW("H005", "GET https://user:pw@b:8/x HTTP/1.1\r\nHost: b:8\r\n\r\n", BAD_TARGET),
        ROW("H005", "GET http://a?x HTTP/1.1\r\nHost: a\r\n\r\n", BAD_TARGET),
        ROW("H005", "GET http:///x HTTP/1.1\r\nHost: a\r\n\r\n", BAD_TARGET),
        ROW("H005", "GET ftp://a/x HTTP/1.1\r\nHost: a\r\n\r\n", BAD_TARGET),
        ROW("H007", "CONNECT api:443 HTTP/1.1\r\nHost: api:443\r\n\r\n", METHOD_REFUSED),
        ROW("H007", "GET api:443 HTTP/1.1\r\nHost: api:443\r\n\r\n", BAD_TARGET),
        ROW("H008", "OPTIONS *" R11 "\r\n", OK),
        ROW("H008", "GET *" R11 "\r\n", BAD_TARGET),
        ROW("H008", "OPTIONS *x" R11 "\r\n", BAD_TARGET),
        ROW("H010", "FOO /" R11 "\r\n", METHOD_UNKNOWN),
        ROW("H010", "get /" R11 "\r\n", METHOD_UNKNOWN),
        ROW("H010", "GETS /" R11 "\r\n", METHOD_UNKNOWN),
        ROW("H010", "PROPFIND /" R11 "\r\n", METHOD_UNKNOWN),
        ROW("H010", "G(T /" R11 "\r\n", BAD_REQUEST),
        ROW("H011", "TRACE /v1/models" R11 "Authorization: Bearer x\r\n\r\n", METHOD_REFUSED),
        ROW("H013", "\r\n\r\n" GET11 "\r\n", OK),
        ROW("H013", "\r\n\r\n\r\n\r\n" GET11 "\r\n", OK),
        ROW("H013", "\r\n\r\n\r\n\r\n\r\n" GET11 "\r\n", BAD_REQUEST),
        ROW("H013", "\r\r\n" GET11 "\r\n", BAD_REQUEST),
        ROW("H014", "GET //evil/v1/x" R11 "\r\n", OK),
        ROW("H014", "GET /v1/../admin" R11 "\r\n", OK),
        ROW("H014", "GET /v1/%2e%2e/x" R11 "\r\n", OK),
        ROW("H014", "GET /v1/x;y?a={|}\"<>\\^`&b=[]" R11 "\r\n", OK),
        ROW("H015", "GET  /" R11 "\r\n", BAD_TARGET),
        ROW("H015", "GET /  HTTP/1.1\r\nHost: a\r\n\r\n", BAD_TARGET),
        ROW("H015", "GET\t/" R11 "\r\n", BAD_REQUEST),
        ROW("H015", "GET /\tHTTP/1.1\r\nHost: a\r\n\r\n", BAD_REQUEST),
        ROW("H015", "GET /a b" R11 "\r\n", BAD_TARGET),
        ROW("H015", "GET /a\tb" R11 "\r\n", BAD_TARGET),
        ROW("target", "GET /#x" R11 "\r\n", BAD_TARGET),
        ROW("target", "GET /\x80" R11 "\r\n", BAD_TARGET),
        ROW("target", "GET /\x7f" R11 "\r\n", BAD_REQUEST),
        ROW("target", "GET /\x01" R11 "\r\n", BAD_REQUEST),
        ROW("target", "GET /\0" R11 "\r\n", BAD_REQUEST),
        ROW("target", "GET x" R11 "\r\n", BAD_TARGET),
        ROW("H164", "\x16\x03\x01\x02\x00\x01", BAD_REQUEST),
        ROW("more", "GET /" R11, NO_MEMORY + 1),
        ROW("more", "", NO_MEMORY + 1),
    };

    (void)state;
    check_rows(rows, ARRAY_LEN(rows), true);
}

static void test_host(void **state)
{
#define HOST(value) "GET / HTTP/1.1\r\nHost: " value "\r\n\r\n"
    static const struct row rows[] = {
        ROW("H009", "GET / HTTP/1.1\r\n\r\n", BAD_HOST),
        ROW("H009", "GET / HTTP/1.1\r\nHost: a\r\nHost: a\r\n\r\n", BAD_HOST),
        ROW("H009", "GET / HTTP/1.1\r\nHost: a\r\nhost: b\r\n\r\n", BAD_HOST),
        ROW("H009", "GET / HTTP/1.0\r\nHost: a\r\nHost: a\r\n\r\n", BAD_HOST),
        ROW("H009", HOST(""), BAD_HOST),
        ROW("H009", HOST("a b"), BAD_HOST),
        ROW("H009", HOST("a/b"), BAD_HOST),
        ROW("H009", HOST("a b/../@c"), BAD_HOST),
        ROW("H009", HOST("u@a"), BAD_HOST),
        ROW("H009", HOST("a:"), BAD_HOST),
        ROW("H009", HOST(":80"), BAD_HOST),
        ROW("H009", HOST("a:x"), BAD_HOST),
        ROW("H009", HOST("a:80x"), BAD_HOST),
        ROW("H009", HOST("a:65536"), BAD_HOST),
        ROW("H009", HOST("a:000080"), BAD_HOST),
        ROW("H009", HOST("a,b"), BAD_HOST),
        ROW("H009", HOST("a\xe9"), BAD_HOST),
        ROW("H009", HOST("[::1"), BAD_HOST),
        ROW("H009", HOST("[]"), BAD_HOST),
        ROW("H009", HOST("[::1]x"), BAD_HOST),
        ROW("H009", HOST("[::g]"), BAD_HOST),
        ROW("host", HOST("a"), OK),
        ROW("host", HOST("  a  "), OK),
        ROW("host", HOST("api.openai.com:65535"), OK),
        ROW("host", HOST("127.0.0.1:8080"), OK),
        ROW("host", HOST("[::1]:8080"), OK),
        ROW("host", HOST("[::ffff:1.2.3.4]"), OK),
        ROW("host", HOST("my_svc-1.ns"), OK),
    };

    (void)state;
    check_rows(rows, ARRAY_LEN(rows), true);
}

static void test_field_lines(void **state)
{
    static const struct row rows[] = {
        ROW("H016", POST11 "Content-Length : 3\r\n\r\n", BAD_REQUEST),
        ROW("H016", POST11 "Transfer-Encoding\t: chunked\r\n\r\n", BAD_REQUEST),
        ROW("H017", GET11 "Dummy: x\rContent-Length: 3\r\n\r\n", BAD_REQUEST),
        ROW("H017", GET11 "X:\rContent-Length: 3\r\n\r\n", BAD_REQUEST),
        ROW("H017", GET11 "X: \rTransfer-Encoding: chunked\r\n\r\n", BAD_REQUEST),
        ROW("H019", GET11 "X: y\r\n z\r\n\r\n", BAD_REQUEST),
        ROW("H019", "GET / HTTP/1.1\r\nHost: a\r\n Content-Length: 3\r\n\r\n", BAD_REQUEST),
        ROW("H019", GET11 "Connection:\r\n close\r\n\r\n", BAD_REQUEST),
        ROW("H019", GET11 "X: y\r\n\t\r\n\r\n", BAD_REQUEST),
        ROW("H019", GET11 "X: y\r\n \r\n\r\n", BAD_REQUEST),
        ROW("H020", GET11 "\rX", BAD_REQUEST),
        ROW("H020", GET11 "X: y\r\n\rX", BAD_REQUEST),
        ROW("H021", GET11 ": y\r\n\r\n", BAD_REQUEST),
        ROW("H022", GET11 "foo bar: y\r\n\r\n", BAD_REQUEST),
        ROW("H022", GET11 "foo(: y\r\n\r\n", BAD_REQUEST),
        ROW("H022", GET11 "foo\r\n\r\n", BAD_REQUEST),
        ROW("H022", GET11 "f\xe9o: y\r\n\r\n", BAD_REQUEST),
        ROW("H023", "GET / HTTP/1.1\r\n Host: a\r\n\r\n", BAD_REQUEST),
        ROW("H023", "GET / HTTP/1.1\r\n \r\nHost: a\r\n\r\n", BAD_REQUEST),
        ROW("H034", GET11 "X: \xe9\xff\x80\r\n\r\n", OK),
        ROW("value", GET11 "X: a\tb\r\nY:\r\nZ:\t\r\n\r\n", OK),
        ROW("value", GET11 "X: a\0b\r\n\r\n", BAD_REQUEST),
        ROW("value", GET11 "X: a\x7f\r\n\r\n", BAD_REQUEST),
        ROW("value", GET11 "X: a\x0b\r\n\r\n", BAD_REQUEST),
        ROW("value", GET11 "X: \"a\r\n\r\n", OK),
    };

    (void)state;
    check_rows(rows, ARRAY_LEN(rows), true);
}

static void test_framing(void **state)
{
#define TE(value) POST11 "Transfer-Encoding: " value "\r\n\r\n"
#define CL(value) POST11 "Content-Length: " value "\r\n\r\n"
    static const struct row rows[] = {
        ROW("H037", POST11 "Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n", BAD_FRAMING),
        ROW("H037", POST11 "Transfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n", BAD_FRAMING),
        ROW("H038", POST11 "Content-Length: 3\r\nContent-Length: 3\r\n\r\n", BAD_FRAMING),
        ROW("H038", POST11 "Content-Length: 3\r\nContent-Length: 4\r\n\r\n", BAD_FRAMING),
        ROW("H038", CL("3, 3"), BAD_FRAMING),
        ROW("H038", CL("+3"), BAD_FRAMING),
        ROW("H038", CL("-3"), BAD_FRAMING),
        ROW("H038", CL("0x3"), BAD_FRAMING),
        ROW("H038", CL("3 3"), BAD_FRAMING),
        ROW("H038", CL(""), BAD_FRAMING),
        ROW("H038", CL("18446744073709551619"), BAD_FRAMING),
        ROW("H038", CL("18446744073709551615"), OK),
        ROW("H038", CL(" 3  "), OK),
        ROW("H038", CL("3\t"), BAD_FRAMING),
        ROW("H039", TE("chunked"), OK),
        ROW("H039", TE("Chunked"), OK),
        ROW("H039", TE("gzip, chunked"), CODING_UNKNOWN),
        ROW("H039", TE("gzip"), CODING_UNKNOWN),
        ROW("H039", TE("xchunked"), CODING_UNKNOWN),
        ROW("H039", TE(", chunked"), BAD_FRAMING),
        ROW("H039", TE("chunked,"), BAD_FRAMING),
        ROW("H039", TE("chunked, chunked"), BAD_FRAMING),
        ROW("H039", TE("chunked, identity"), BAD_FRAMING),
        ROW("H039", TE("\"chunked\""), BAD_FRAMING),
        ROW("H039", TE("chunked;q=1"), BAD_FRAMING),
        ROW("H039", POST11 "Transfer-Encoding: identity\r\nTransfer-Encoding: chunked\r\n\r\n",
            CODING_UNKNOWN),
        ROW("H039", POST11 "Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n", BAD_FRAMING),
        ROW("H040", TE(""), BAD_FRAMING),
        ROW("H040", POST11 "Transfer-Encoding:\r\nContent-Length: 3\r\n\r\n", BAD_FRAMING),
        ROW("H041", "POST / HTTP/1.0\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n", BAD_FRAMING),
        ROW("H031", POST11 "Transfer_Encoding: chunked\r\n\r\n", OK),
        ROW("H055", POST11 "Expect: 100-continue\r\nContent-Length: 3\r\n\r\n", OK),
        ROW("H055", POST11 "Expect: x\r\nContent-Length: 3\r\n\r\n", EXPECTATION),
        ROW("H055", POST11 "Expect: y 100-continue\r\nContent-Length: 3\r\n\r\n", EXPECTATION),
        ROW("H055", POST11 "Expect: 100-continue, 100-continue\r\n\r\n", EXPECTATION),
        ROW("H055", POST11 "Expect:\r\n\r\n", EXPECTATION),
        ROW("H055", POST11 "Expect: 100-continue\r\nExpect: 100-continue\r\n\r\n", EXPECTATION),
        ROW("H055", "POST / HTTP/1.0\r\nExpect: x\r\n\r\n", OK),
    };

    (void)state;
    check_rows(rows, ARRAY_LEN(rows), true);
}

#define UP "Connection: upgrade\r\nUpgrade: "

static void test_connection(void **state)
{
    static const struct row rows[] = {
        ROW("H026", GET11 "Connection: close, authorization\r\n\r\n", BAD_CONNECTION),
        ROW("H026", GET11 "Connection: content-length\r\n\r\n", BAD_CONNECTION),
        ROW("H026", GET11 "Connection: close\r\nConnection: Host\r\n\r\n", BAD_CONNECTION),
        ROW("H026", GET11 "Connection: transfer-encoding\r\n\r\n", BAD_CONNECTION),
        ROW("H026", GET11 "Connection: close,,x-api-key\r\n\r\n", BAD_CONNECTION),
        ROW("H026", GET11 "Connection: X-Goog-Api-Key\r\n\r\n", BAD_CONNECTION),
        ROW("H026", GET11 "Connection: api-key\r\n\r\n", BAD_CONNECTION),
        ROW("H026", GET11 "Connection: x-forwarded-for\r\n\r\n", BAD_CONNECTION),
        ROW("H026", GET11 "Connection: x-amz-security-token\r\n\r\n", BAD_CONNECTION),
        ROW("H026", GET11 "Connection: content-type\r\n\r\n", BAD_CONNECTION),
        ROW("H026", GET11 "Connection: close, x-leasegate-task, x-secret\r\n\r\n", OK),
        ROW("H026",
            GET11 "Connection: ,,,a,b,c,d,e,f,g,h,i,j,k,l,m,n,o,p,q,r,s,t,u,v,w,x,y,z,0,1,2,3,4,5\r\n\r\n",
            OK),
        ROW("H026",
            GET11 "Connection: a,b,c,d,e,f,g,h,i,j,k,l,m,n,o,p,q,r,s,t,u,v,w,x,y,z,0,1,2,3,4,5,6\r\n\r\n",
            BAD_CONNECTION),
        ROW("H142", GET11 "Connection: upgrade, http2-settings\r\nUpgrade: h2c\r\nHTTP2-Settings: x\r\n\r\n",
            OK),
        ROW("H142", GET11 UP "foo\r\n\r\n", OK),
        ROW("H142", POST11 UP "foo\r\nContent-Length: 3\r\n\r\n", OK),
        ROW("H142", POST11 UP "websocket, h2c\r\nContent-Length: 3\r\n\r\n", OK),
        ROW("H146", GET11 UP "websocket\r\n\r\n", OK),
        ROW("H146", GET11 UP "websocket\r\nContent-Length: 0\r\n\r\n", OK),
        ROW("H146", GET11 UP "websocket\r\nContent-Length: 3\r\n\r\n", BAD_UPGRADE),
        ROW("H146", GET11 UP "websocket\r\nTransfer-Encoding: chunked\r\n\r\n", BAD_UPGRADE),
        ROW("H146", POST11 UP "WebSocket\r\n\r\n", BAD_UPGRADE),
        ROW("H146", "POST / HTTP/1.0\r\n" UP "websocket\r\n\r\n", OK),
        ROW("H146", POST11 "Upgrade: websocket\r\n\r\n", OK),
    };

    (void)state;
    check_rows(rows, ARRAY_LEN(rows), true);
}

/* A good request, whose head stays readable until the next call of this. */
static const struct http_head *good_request(const char *bytes)
{
    static struct http_head h;
    static char kept[HEAD_MAX];
    struct reading r = {bytes, strlen(bytes), true, HTTP_POST, HEAD_MAX};
    char *copy;

    assert_int_equal(read_head(&r, (struct cut){1, 1}, &h, &copy), PARSE_OK);
    memcpy(kept, copy, h.raw_n);
    h.raw = kept;
    mem_free(copy);
    return &h;
}

static void assert_slice(struct slice got, const char *want)
{
    if (!slice_eq(got, slice_of(want)))
        fail_msg("<%.*s> instead of <%s>", (int)got.n, got.p, want);
}

static bool hops(const struct http_head *h, const char *name)
{
    const struct http_field *f = http_find_name(h, slice_of(name));

    assert_non_null(f);
    return f->hop_by_hop;
}

static void test_request_contents(void **state)
{
    const struct http_head *h;

    (void)state;
    h = good_request(
        "POST /v1/x?y=1 HTTP/1.1\r\nHost: a:8 \r\nX-A:\r\nx-b: \t b c \t\r\nContent-Length: 12\r\n\r\n");
    assert_slice(http_target(h), "/v1/x?y=1");
    assert_slice(http_at(h, h->host, h->host_n), "a:8");
    assert_int_equal(h->method, HTTP_POST);
    assert_int_equal(h->minor, 1);
    assert_int_equal(h->n_fields, 4);
    assert_slice(http_name(h, &h->fields[1]), "X-A");
    assert_slice(http_value(h, &h->fields[1]), "");
    assert_slice(http_name(h, &h->fields[2]), "x-b");
    assert_slice(http_value(h, &h->fields[2]), "b c");
    assert_int_equal(h->fields[3].id, HTTP_FIELD_CONTENT_LENGTH);
    assert_int_equal(h->body, HTTP_BODY_LENGTH);
    assert_int_equal(h->content_length, 12);
    assert_true(h->keep_alive);
    assert_false(h->expect_continue || h->websocket);

    /* H005: the part behind the authority is the target */
    h = good_request("GET HTTP://a:8/p?q HTTP/1.1\r\nHost: a:8\r\n\r\n");
    assert_slice(http_target(h), "/p?q");
    h = good_request("GET http://a:8 HTTP/1.0\r\n\r\n");
    assert_slice(http_target(h), "/");
    assert_slice(http_at(h, h->host, h->host_n), "a:8");

    /* H140: 64 bits */
    h = good_request(POST11 "Content-Length: 4294967297\r\n\r\n");
    assert_true(h->content_length == UINT64_C(4294967297));
    /* H051: any method may have a body */
    h = good_request("DELETE /" R11 "Content-Length: 5\r\n\r\n");
    assert_int_equal(h->body, HTTP_BODY_LENGTH);
    h = good_request("GET /" R11 "Transfer-Encoding: chunked\r\n\r\n");
    assert_int_equal(h->body, HTTP_BODY_CHUNKED);
    /* H052 */
    h = good_request(POST11 "Content-Length: 0\r\n\r\n");
    assert_int_equal(h->body, HTTP_BODY_LENGTH);
    assert_int_equal(good_request(POST11 "\r\n")->body, HTTP_BODY_NONE);
    /* H053, H055 */
    assert_true(good_request(POST11 "Expect: 100-Continue\r\nContent-Length: 1\r\n\r\n")->expect_continue);
    assert_false(good_request(POST11 "Expect: 100-continue\r\n\r\n")->expect_continue);
    assert_false(good_request("POST / HTTP/1.0\r\nExpect: 100-continue\r\nContent-Length: 1\r\n\r\n")
                     ->expect_continue);
    /* H146 */
    assert_true(
        good_request(GET11 "Connection: keep-alive, Upgrade\r\nUpgrade: WebSocket\r\n\r\n")->websocket);
    assert_false(good_request(GET11 "Upgrade: websocket\r\n\r\n")->websocket);
    assert_false(good_request("GET / HTTP/1.0\r\n" UP "websocket\r\n\r\n")->websocket);
    assert_false(good_request(GET11 UP "websocket\r\nUpgrade: h2c\r\n\r\n")->websocket);
    assert_false(good_request(GET11 UP "h2c\r\n\r\n")->websocket);
}

static void test_request_persistence(void **state)
{
    const struct http_head *h;

    (void)state;
    assert_true(good_request(GET11 "\r\n")->keep_alive);
    assert_false(good_request(GET11 "Connection: close\r\n\r\n")->keep_alive);
    assert_false(good_request("GET / HTTP/1.0\r\n\r\n")->keep_alive);
    assert_true(good_request("GET / HTTP/1.0\r\nConnection: Keep-Alive\r\n\r\n")->keep_alive);
    /* H028 */
    assert_false(good_request(GET11 "Connection: close\t\r\n\r\n")->keep_alive);
    assert_false(good_request(GET11 "Connection: TE , CLOSE\r\n\r\n")->keep_alive);
    assert_false(good_request(GET11 "Connection: keep-alive\r\nConnection: close\r\n\r\n")->keep_alive);
    /* H027 */
    h = good_request(
        GET11 "Connection:\r\nX-Secret: 1\r\nConnection: x-secret\r\nx-SECRET: 2\r\nX-Other: 3\r\n\r\n");
    assert_true(hops(h, "x-secret"));
    assert_true(h->fields[4].hop_by_hop);
    assert_false(hops(h, "x-other"));
    /* H029 */
    h = good_request(GET11 "Keep-Alive: 1\r\nTE: x\r\nTrailer: x\r\nUpgrade: x\r\nHTTP2-Settings: x\r\n"
                           "Proxy-Connection: x\r\nProxy-Authorization: x\r\nExpect: 100-continue\r\n"
                           "x-leasegate-task: t\r\nX-LeaseGate-Foo: t\r\nConnection: keep-alive\r\n"
                           "Transfer-Encoding: chunked\r\n\r\n");
    for (size_t i = 0; i < h->n_fields; i++)
        assert_int_equal(h->fields[i].hop_by_hop, h->fields[i].id != HTTP_FIELD_HOST);
    /* H031 */
    h = good_request(GET11 "Transfer_Encoding: chunked\r\nContent.Length: 3\r\nX_Leasegate_Task: 1\r\n\r\n");
    assert_int_equal(h->body, HTTP_BODY_NONE);
    for (size_t i = 1; i < h->n_fields; i++)
        assert_int_equal(h->fields[i].id, HTTP_FIELD_OTHER);
}

/* Fills `to` with n times c. */
static size_t put_run(char *to, size_t at, char c, size_t n)
{
    memset(to + at, c, n);
    return at + n;
}

static size_t put_text(char *to, size_t at, const char *text)
{
    memcpy(to + at, text, strlen(text));
    return at + strlen(text);
}

/* One way only: quadratic work on long input would tell nothing more. */
static int read_steps(const char *bytes, size_t n, size_t max, size_t step, bool request)
{
    struct reading r = {bytes, n, request, HTTP_GET, max};
    struct http_head h;
    char *kept;
    int got = read_head(&r, (struct cut){step, step}, &h, &kept);

    mem_free(kept);
    return got;
}

static void test_H004_long_target(void **state)
{
    static char bytes[4096];
    static const size_t steps[] = {1, 7, sizeof(bytes)};

    (void)state;
    for (size_t i = 0; i < ARRAY_LEN(steps); i++) {
        /* cap 2048: the start line may take 1024 */
        size_t n = put_text(bytes, 0, "GET /");

        n = put_run(bytes, n, 'x', 1024 - 5 - 9);
        n = put_text(bytes, n, " HTTP/1.1\r\nHost: a\r\n\r\n");
        assert_int_equal(read_steps(bytes, n, 2048, steps[i], true), PARSE_OK);
        n = put_run(bytes, 5, 'x', 1024 - 5 - 9 + 1);
        n = put_text(bytes, n, " HTTP/1.1\r\nHost: a\r\n\r\n");
        assert_int_equal(read_steps(bytes, n, 2048, steps[i], true), PARSE_TARGET_TOO_LONG);
        /*
         * no line end in sight: refused as soon as it cannot be good any more, and what follows does not
         * matter
         */
        put_run(bytes, 5, 'x', sizeof(bytes) - 5);
        assert_int_equal(read_steps(bytes, 1024, 2048, steps[i], true), INCOMPLETE);
        assert_int_equal(read_steps(bytes, 1025, 2048, steps[i], true), PARSE_TARGET_TOO_LONG);
        bytes[1025] = '\0';
        assert_int_equal(read_steps(bytes, 4000, 2048, steps[i], true), PARSE_TARGET_TOO_LONG);
    }
}

static void test_H004_absolute_cap(void **state)
{
    const size_t n = PARSE_START_LINE_MAX + 100;
    char *bytes = mem_alloc(n);
    struct parse_scan s = {0};
    enum parse_error e;

    (void)state;
    assert_non_null(bytes);
    memset(bytes, 'x', n);
    assert_int_equal(parse_head_end(&s, bytes, PARSE_START_LINE_MAX, 1 << 20, true, &e), 0);
    assert_int_equal(e, PARSE_OK);
    assert_int_equal(parse_head_end(&s, bytes, n, 1 << 20, true, &e), 0);
    assert_int_equal(e, PARSE_TARGET_TOO_LONG);
    assert_int_equal(s.at, PARSE_START_LINE_MAX + 1);
    mem_free(bytes);
}

static void test_H025_large_heads(void **state)
{
    static char bytes[65536];
    static const size_t steps[] = {1, 13, sizeof(bytes)};
    size_t n;

    (void)state;
    for (size_t i = 0; i < ARRAY_LEN(steps); i++) {
        /* the cap counts every byte of the head */
        n = put_text(bytes, 0, GET11 "X: ");
        n = put_run(bytes, n, 'x', 1024 - n - 4);
        n = put_text(bytes, n, "\r\n\r\n");
        assert_int_equal(read_steps(bytes, n, 1024, steps[i], true), PARSE_OK);
        assert_int_equal(read_steps(bytes, n, 1023, steps[i], true), PARSE_HEAD_TOO_LARGE);
        assert_int_equal(read_steps(bytes, n - 1, 1024, steps[i], true), INCOMPLETE);
        /* 256 fields, and one more */
        n = put_text(bytes, 0, GET11);
        for (unsigned k = 1; k < HTTP_FIELDS_MAX; k++)
            n = put_text(bytes, n, "a: b\r\n");
        put_text(bytes, n, "\r\n");
        assert_int_equal(read_steps(bytes, n + 2, sizeof(bytes), steps[i], true), PARSE_OK);
        n = put_text(bytes, n, "a: b\r\n");
        put_text(bytes, n, "\r\n");
        assert_int_equal(read_steps(bytes, n + 2, sizeof(bytes), steps[i], true), PARSE_HEAD_TOO_LARGE);
        /* known at its first byte */
        assert_int_equal(read_steps(bytes, n - 5, sizeof(bytes), steps[i], true), PARSE_HEAD_TOO_LARGE);
        assert_int_equal(read_steps(bytes, n - 6, sizeof(bytes), steps[i], true), INCOMPLETE);
    }
    /* the table is safe even from a head that was not scanned */
    n = put_text(bytes, 0, GET11);
    for (unsigned k = 0; k < HTTP_FIELDS_MAX; k++)
        n = put_text(bytes, n, "a: b\r\n");
    n = put_text(bytes, n, "\r\n");
    assert_int_equal(parse_request(bytes, n, &(struct http_head){.fields = fields}), PARSE_HEAD_TOO_LARGE);
    n = put_text(bytes, 0, GET11);
    for (unsigned k = 0; k < 9000; k++)
        n = put_text(bytes, n, "a: b\r\n");
    assert_int_equal(read_steps(bytes, n, sizeof(bytes), sizeof(bytes), true), PARSE_HEAD_TOO_LARGE);
}

/* H035: many heads in one read, each found where the last one ended. */
static void test_H035_pipelined(void **state)
{
    static const char bytes[] = GET11 "\r\n\r\nGET /b" R11 "\r\nGET /c" R11 "\r\n";
    static const char *const targets[] = {"/", "/b", "/c"};
    size_t at = 0;

    (void)state;
    for (size_t i = 0; i < ARRAY_LEN(targets); i++) {
        struct parse_scan s = {0};
        struct http_head h = {.fields = fields};
        enum parse_error e;
        size_t n = parse_head_end(&s, bytes + at, sizeof(bytes) - 1 - at, HEAD_MAX, true, &e);

        assert_true(n > 0);
        assert_int_equal(parse_request(bytes + at + s.start, n - s.start, &h), PARSE_OK);
        assert_slice(http_target(&h), targets[i]);
        at += n;
    }
    assert_int_equal(at, sizeof(bytes) - 1);
}

/* The scanner reads sixteen bytes at a time: every control byte must be seen at each place of a block. */
static void test_control_bytes_everywhere(void **state)
{
    char bytes[128];

    (void)state;
    for (size_t at = 0; at < 48; at++) {
        for (unsigned c = 0; c < 256; c++) {
            size_t n = put_text(bytes, 0, GET11 "X: ");
            bool control = (c < 0x20 && c != '\t') || c == 0x7f;
            int got;

            n = put_run(bytes, n, 'x', 48);
            bytes[n - 48 + at] = (char)c;
            n = put_text(bytes, n, "\r\n"); /* no end: the scan alone must see it */
            got = read_steps(bytes, n, HEAD_MAX, n, true);
            if (got != (control ? (int)PARSE_BAD_REQUEST : INCOMPLETE))
                fail_msg("byte %02x at %zu: %d", c, at, got);
        }
    }
}

/* ---- responses ---- */

#define OK11 "HTTP/1.1 200 OK\r\n"

static void test_response_heads(void **state)
{
    static const struct row rows[] = {
        ROW("plain", OK11 "\r\n", OK),
        ROW("plain", "HTTP/1.1 200\r\n\r\n", OK),
        ROW("plain", "HTTP/1.1 200 \r\n\r\n", OK),
        ROW("plain", "HTTP/1.0 599 x\t\xe9\r\n\r\n", OK),
        ROW("H110", OK11 "Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n", BAD_FRAMING),
        ROW("H110", OK11 "Transfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n", BAD_FRAMING),
        ROW("H110", OK11 "Content-Length: 3\r\nContent-Length: 3\r\n\r\n", BAD_FRAMING),
        ROW("H110", OK11 "Content-Length: x\r\n\r\n", BAD_FRAMING),
        ROW("H110", OK11 "Content-Length: 3, 3\r\n\r\n", BAD_FRAMING),
        ROW("H110", OK11 "Transfer-Encoding: gzip\r\n\r\n", CODING_UNKNOWN),
        ROW("H110", OK11 "Transfer-Encoding:\r\n\r\n", BAD_FRAMING),
        ROW("H110", "HTTP/1.0 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", BAD_FRAMING),
        ROW("H110", "HTTP/1.1 099 x\r\n\r\n", BAD_REQUEST),
        ROW("H110", "HTTP/1.1 99 x\r\n\r\n", BAD_REQUEST),
        ROW("H110", "HTTP/1.1 600 x\r\n\r\n", BAD_REQUEST),
        ROW("H110", "HTTP/1.1 1000 x\r\n\r\n", BAD_REQUEST),
        ROW("H110", "HTTP/1.1 2000\r\n\r\n", BAD_REQUEST),
        ROW("H110", "HTTP/1.1  200 OK\r\n\r\n", BAD_REQUEST),
        ROW("H110", "HTTP/2.0 200 OK\r\n\r\n", VERSION),
        ROW("H110", "HTTP/1.1 200 OK\rX: y\r\n\r\n", BAD_REQUEST),
        ROW("H110", "HTTP/1.1 200 OK\nX: y\r\n\r\n", BAD_REQUEST),
        ROW("H110", "ICY 200 OK\r\n\r\n", BAD_REQUEST),
        ROW("H110", "\r\n" OK11 "\r\n", BAD_REQUEST),
        ROW("H157", "SSH-2.0-OpenSSH_9.2\r\n", BAD_REQUEST),
        ROW("H016", OK11 "Content-Length : 3\r\n\r\n", BAD_REQUEST),
        ROW("H111", OK11 "X: y\r\n z\r\n\r\n", BAD_REQUEST),
        ROW("H026", OK11 "Connection: content-length\r\n\r\n", BAD_CONNECTION),
        ROW("H026", OK11 "Connection: Transfer-Encoding\r\nTransfer-Encoding: chunked\r\n\r\n", OK),
        ROW("H115", "HTTP/1.1 204 No Content\r\nContent-Length: 3\r\n\r\n", OK),
        ROW("H115", "HTTP/1.1 304 x\r\nTransfer-Encoding: chunked\r\n\r\n", OK),
        ROW("H109", "HTTP/1.1 100 Continue\r\n\r\n", OK),
        ROW("H109", "HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n", OK),
        ROW("H141", "HTTP/1.1 101 x\r\n" UP "websocket\r\n\r\n", OK),
        ROW("H142", "HTTP/1.1 101 x\r\n" UP "h2c\r\n\r\n", BAD_UPGRADE),
        ROW("H142", "HTTP/1.1 101 x\r\n\r\n", BAD_UPGRADE),
        ROW("H142", "HTTP/1.1 101 x\r\nUpgrade: websocket\r\n\r\n", BAD_UPGRADE),
    };

    (void)state;
    check_rows(rows, ARRAY_LEN(rows), false);
}

static struct http_head response(const char *bytes, enum http_method method)
{
    struct http_head h = {.fields = fields};

    assert_int_equal(parse_response(bytes, strlen(bytes), method, &h), PARSE_OK);
    return h;
}

static void test_response_contents(void **state)
{
    struct http_head h = response("HTTP/1.1 429 Too Many\r\nContent-Length: 12\r\n\r\n", HTTP_POST);

    (void)state;
    assert_int_equal(h.status, 429);
    assert_slice(http_at(&h, h.reason, h.reason_n), "Too Many");
    assert_int_equal(h.body, HTTP_BODY_LENGTH);
    assert_int_equal(h.content_length, 12);
    assert_true(h.keep_alive);
    assert_int_equal(response("HTTP/1.1 200\r\n\r\n", HTTP_POST).reason_n, 0);
    /* H112 */
    h = response(OK11 "\r\n", HTTP_POST);
    assert_int_equal(h.body, HTTP_BODY_EOF);
    assert_false(h.keep_alive);
    /* H115 */
    h = response(OK11 "Content-Length: 123\r\n\r\n", HTTP_HEAD);
    assert_int_equal(h.body, HTTP_BODY_NONE);
    assert_true(h.keep_alive);
    assert_int_equal(response(OK11 "Transfer-Encoding: chunked\r\n\r\n", HTTP_HEAD).body, HTTP_BODY_NONE);
    assert_int_equal(response("HTTP/1.1 204 x\r\nContent-Length: 3\r\n\r\n", HTTP_GET).body, HTTP_BODY_NONE);
    assert_int_equal(response("HTTP/1.1 304 x\r\nContent-Length: 3\r\n\r\n", HTTP_GET).body, HTTP_BODY_NONE);
    assert_int_equal(response("HTTP/1.1 102 x\r\nContent-Length: 3\r\n\r\n", HTTP_GET).body, HTTP_BODY_NONE);
    assert_int_equal(response("HTTP/1.1 205 x\r\nContent-Length: 3\r\n\r\n", HTTP_GET).body,
                     HTTP_BODY_LENGTH);
    /* H118 */
    assert_false(response("HTTP/1.0 200 OK\r\nContent-Length: 3\r\n\r\n", HTTP_GET).keep_alive);
    assert_true(response("HTTP/1.0 200 OK\r\nConnection: keep-alive\r\nContent-Length: 3\r\n\r\n", HTTP_GET)
                    .keep_alive);
    assert_false(
        response("HTTP/1.1 413 x\r\nConnection: close\r\nContent-Length: 3\r\n\r\n", HTTP_GET).keep_alive);
    assert_false(response("HTTP/1.1 101 x\r\n" UP "websocket\r\n\r\n", HTTP_GET).keep_alive);
    assert_true(response("HTTP/1.1 101 x\r\n" UP "websocket\r\n\r\n", HTTP_GET).websocket);
}

static void test_errors_have_words(void **state)
{
    (void)state;
    assert_int_equal(parse_error_status(PARSE_VERSION), 505);
    assert_string_equal(parse_error_word(PARSE_BAD_CHUNK), "bad_chunk");
    for (int e = PARSE_BAD_REQUEST; e <= PARSE_NO_MEMORY; e++) {
        assert_true(parse_error_status((enum parse_error)e) >= 400);
        assert_true(strlen(parse_error_word((enum parse_error)e)) > 0);
        assert_true(strlen(parse_error_text((enum parse_error)e)) > 0);
    }
}

/* ---- bodies ---- */

struct body_row {
    const char *id;
    const char *bytes;
    size_t n;
    int want; /* PARSE_OK: complete, INCOMPLETE, or the error */
    const char *payload;
    size_t rest; /* bytes that belong to the next message */
};

#define BODY(id, bytes, payload, rest)                                                                       \
    {                                                                                                        \
        id, bytes, sizeof(bytes) - 1, PARSE_OK, payload, rest                                                \
    }
#define BAD_BODY(id, bytes, error)                                                                           \
    {                                                                                                        \
        id, bytes, sizeof(bytes) - 1, PARSE_##error, NULL, 0                                                 \
    }
#define OPEN_BODY(id, bytes, payload)                                                                        \
    {                                                                                                        \
        id, bytes, sizeof(bytes) - 1, INCOMPLETE, payload, 0                                                 \
    }

static int feed_cut(const struct body_row *row, const struct http_head *h, bool request, struct cut cut,
                    struct buf *got, size_t *consumed)
{
    struct parse_body b;
    size_t at = 0;

    parse_body_init(&b, h);
    *consumed = 0;
    for (size_t have = size_min(cut.first, row->n);; have = size_min(have + cut.step, row->n)) {
        size_t n = have - at, given = n, payload_n = 0;
        char *bytes = exact_copy(row->bytes + at, n);
        enum parse_error e;
        enum parse_body_result result = parse_body_feed(&b, bytes, &n, &payload_n, request, &e);

        assert_true(n <= given && payload_n <= n);
        assert_true(buf_put(got, (struct slice){bytes, payload_n}));
        mem_free(bytes);
        *consumed += n;
        at = have;
        assert_int_equal(result == PARSE_BODY_BAD, e != PARSE_OK);
        if (result == PARSE_BODY_BAD) {
            assert_false(parse_body_may_end(&b));
            return (int)e;
        }
        if (result == PARSE_BODY_END) {
            assert_true(parse_body_may_end(&b));
            return PARSE_OK;
        }
        assert_int_equal(n, given);
        if (have == row->n)
            return INCOMPLETE;
    }
}

static void check_body(const struct body_row *row, const struct http_head *h, bool request)
{
    for (size_t i = 0; i <= row->n + 1; i++) {
        /* cut at i; then byte by byte */
        struct cut cut = i > row->n ? (struct cut){1, 1} : (struct cut){i, row->n};
        struct buf got = {0};
        size_t consumed;
        int result = feed_cut(row, h, request, cut, &got, &consumed);

        if (result != row->want)
            fail_msg("%s: %d instead of %d, cut at %zu: <%s>", row->id, result, row->want, i, row->bytes);
        if (row->payload != NULL)
            assert_slice(buf_slice(&got), row->payload);
        if (row->want == PARSE_OK && consumed + row->rest != row->n)
            fail_msg("%s: %zu bytes consumed of %zu, cut at %zu", row->id, consumed, row->n, i);
        buf_free(&got);
    }
}

static void check_bodies(const struct body_row *rows, size_t n, enum http_body kind, uint64_t length,
                         bool request)
{
    const struct http_head h = {.body = (uint8_t)kind, .content_length = length};

    for (size_t i = 0; i < n; i++)
        check_body(&rows[i], &h, request);
}

static void test_chunked(void **state)
{
    static const struct body_row rows[] = {
        BODY("plain", "0\r\n\r\n", "", 0),
        BODY("plain", "3\r\nabc\r\n0\r\n\r\n", "abc", 0),
        BODY("plain", "3\r\nabc\r\nA\r\n0123456789\r\n000\r\n\r\nGET", "abc0123456789", 3),
        OPEN_BODY("H113", "3\r\nabc\r\n", "abc"),
        OPEN_BODY("H113", "3\r\nabc\r\n0\r\n\r", "abc"),
        OPEN_BODY("H140", "100000001\r\nabc", "abc"),
        OPEN_BODY("H140", "ffffffffffffffff\r\nabc", "abc"),
        BAD_BODY("H043", "3\r\nabcXX0\r\n\r\n", BAD_CHUNK),
        BAD_BODY("H043", "3\r\nabc\n0\r\n\r\n", BAD_CHUNK),
        BAD_BODY("H043", "3\r\nabc\rX0\r\n\r\n", BAD_CHUNK),
        BAD_BODY("H043", "3\r\nabcd\r\n0\r\n\r\n", BAD_CHUNK),
        BODY("H044", "3;a=b\r\nabc\r\n0;\"x y\"\r\n\r\n", "abc", 0),
        BAD_BODY("H044", "3;a\nabc\r\n0\r\n\r\n", BAD_CHUNK),
        BAD_BODY("H044", "3;a\rX\r\nabc\r\n0\r\n\r\n", BAD_CHUNK),
        BAD_BODY("H044", "3;a\0b\r\nabc\r\n0\r\n\r\n", BAD_CHUNK),
        BAD_BODY("H044", "3;a\x7f\r\nabc\r\n0\r\n\r\n", BAD_CHUNK),
        BAD_BODY("H045", "0x3\r\nabc\r\n0\r\n\r\n", BAD_CHUNK),
        BAD_BODY("H045", "+3\r\nabc\r\n0\r\n\r\n", BAD_CHUNK),
        BAD_BODY("H045", "3 \r\nabc\r\n0\r\n\r\n", BAD_CHUNK),
        BAD_BODY("H045", " 3\r\nabc\r\n0\r\n\r\n", BAD_CHUNK),
        BAD_BODY("H045", "\r\n", BAD_CHUNK),
        BAD_BODY("H045", ";a\r\n", BAD_CHUNK),
        BAD_BODY("H045", "g\r\n", BAD_CHUNK),
        BAD_BODY("H045", "3\nabc\r\n0\r\n\r\n", BAD_CHUNK),
        BAD_BODY("H045", "3\rXabc", BAD_CHUNK),
        BODY("H045", "0000000000000003\r\nabc\r\n0\r\n\r\n", "abc", 0),
        BAD_BODY("H045", "00000000000000003\r\nabc\r\n0\r\n\r\n", BAD_CHUNK),
        BAD_BODY("H045", "10000000000000000\r\n", BAD_CHUNK),
        BAD_BODY("H047", "0\r\n\n", BAD_TRAILER),
        BAD_BODY("H047", "0\r\n\rX", BAD_CHUNK),
        BAD_BODY("H047", "0\n\r\n", BAD_CHUNK),
    };

    (void)state;
    check_bodies(rows, ARRAY_LEN(rows), HTTP_BODY_CHUNKED, 0, true);
    check_bodies(rows, ARRAY_LEN(rows), HTTP_BODY_CHUNKED, 0, false);
}

static void test_H046_trailers(void **state)
{
    static const struct body_row either[] = {
        BODY("H046", "1\r\na\r\n0\r\nX-Anything: y\r\nx-e:\r\n\r\nZ", "a", 1),
        BODY("H046", "0\r\nx-a-name-much-longer-than-all-that-are-known: y\r\n\r\n", "", 0),
        BAD_BODY("H046", "0\r\nX: a\r\n b\r\n\r\n", BAD_TRAILER),
        BAD_BODY("H046", "0\r\n: a\r\n\r\n", BAD_TRAILER),
        BAD_BODY("H046", "0\r\nX : a\r\n\r\n", BAD_TRAILER),
        BAD_BODY("H046", "0\r\nX\r\n\r\n", BAD_TRAILER),
        BAD_BODY("H046", "0\r\nX: a\n\r\n", BAD_TRAILER),
        BAD_BODY("H046", "0\r\nX: a\rb\r\n\r\n", BAD_CHUNK),
        BAD_BODY("H046", "0\r\nX: a\0b\r\n\r\n", BAD_TRAILER),
        BAD_BODY("H046", "0\r\n\x80: a\r\n\r\n", BAD_TRAILER),
    };
    static const struct body_row named[] = {
        BAD_BODY("H046", "0\r\nHost: a\r\n\r\n", BAD_TRAILER),
        BAD_BODY("H046", "0\r\nX: 1\r\nauthorization: a\r\n\r\n", BAD_TRAILER),
        BAD_BODY("H046", "0\r\nContent-Length: 3\r\n\r\n", BAD_TRAILER),
        BAD_BODY("H046", "0\r\nTransfer-Encoding: chunked\r\n\r\n", BAD_TRAILER),
        BAD_BODY("H046", "0\r\nX-API-Key: a\r\n\r\n", BAD_TRAILER),
        BAD_BODY("H046", "0\r\nx-leasegate-priority: 9\r\n\r\n", BAD_TRAILER),
        BAD_BODY("H046", "0\r\nx-leasegate-anything-that-is-very-long: 9\r\n\r\n", BAD_TRAILER),
    };
    static const struct body_row dropped[] = {
        BODY("H046", "1\r\na\r\n0\r\nContent-Length: 3\r\n\r\nZ", "a", 1),
    };

    (void)state;
    check_bodies(either, ARRAY_LEN(either), HTTP_BODY_CHUNKED, 0, true);
    check_bodies(either, ARRAY_LEN(either), HTTP_BODY_CHUNKED, 0, false);
    check_bodies(named, ARRAY_LEN(named), HTTP_BODY_CHUNKED, 0, true);
    check_bodies(dropped, ARRAY_LEN(dropped), HTTP_BODY_CHUNKED, 0, false);
}

static void test_length_and_eof(void **state)
{
    static const struct body_row exact[] = {
        BODY("H050", "abc", "abc", 0),
        BODY("H050", "abcGET / HTTP/1.1", "abc", 14),
        OPEN_BODY("H113", "ab", "ab"),
    };
    static const struct body_row none[] = {BODY("H052", "GET /", "", 5), BODY("H052", "", "", 0)};
    static const struct body_row eof[] = {OPEN_BODY("H112", "a\r\n0\r\n\r\n", "a\r\n0\r\n\r\n"),
                                          OPEN_BODY("H112", "", "")};
    const struct http_head h = {.body = HTTP_BODY_EOF}, l = {.body = HTTP_BODY_LENGTH, .content_length = 1};
    struct parse_body b;

    (void)state;
    check_bodies(exact, ARRAY_LEN(exact), HTTP_BODY_LENGTH, 3, true);
    check_bodies(none, ARRAY_LEN(none), HTTP_BODY_LENGTH, 0, true);
    check_bodies(none, ARRAY_LEN(none), HTTP_BODY_NONE, 0, true);
    check_bodies(eof, ARRAY_LEN(eof), HTTP_BODY_EOF, 0, false);
    parse_body_init(&b, &h);
    assert_true(parse_body_may_end(&b));
    parse_body_init(&b, &l);
    assert_false(parse_body_may_end(&b));
}

static int feed_all(char *bytes, size_t n)
{
    const struct http_head h = {.body = HTTP_BODY_CHUNKED};
    struct parse_body b;
    enum parse_error e;
    size_t payload_n;

    parse_body_init(&b, &h);
    return parse_body_feed(&b, bytes, &n, &payload_n, true, &e) == PARSE_BODY_MORE ? INCOMPLETE : (int)e;
}

/* H044, H046: extensions and trailers have one budget per message; H045: so have the digits of a size. */
static void test_overhead_is_bounded(void **state)
{
    static char bytes[3 * PARSE_OVERHEAD_MAX];
    size_t n;

    (void)state;
    n = put_run(bytes, put_text(bytes, 0, "1;"), 'x', PARSE_OVERHEAD_MAX);
    assert_int_equal(feed_all(bytes, n), INCOMPLETE);
    n = put_run(bytes, put_text(bytes, 0, "1;"), 'x', PARSE_OVERHEAD_MAX + 1);
    assert_int_equal(feed_all(bytes, n), PARSE_BAD_CHUNK);
    n = put_run(bytes, put_text(bytes, 0, "0\r\nX:"), 'x', PARSE_OVERHEAD_MAX);
    assert_int_equal(feed_all(bytes, n), PARSE_BAD_TRAILER);
    /* spread over many chunks */
    for (n = 0; n + 16 < sizeof(bytes);)
        n = put_text(bytes, n, "1;abcdefg\r\nx\r\n");
    assert_int_equal(feed_all(bytes, n), PARSE_BAD_CHUNK);
    n = put_run(bytes, 0, '0', sizeof(bytes));
    assert_int_equal(feed_all(bytes, n), PARSE_BAD_CHUNK);
}

/* A chunk's payload that stands at the front already is not moved, and not even read. */
static void test_payload_in_place(void **state)
{
    const struct http_head h = {.body = HTTP_BODY_CHUNKED};
    char head[] = "1000\r\n", bytes[64];
    struct parse_body b;
    enum parse_error e;
    size_t n = sizeof(head) - 1, payload_n;

    (void)state;
    parse_body_init(&b, &h);
    assert_int_equal(parse_body_feed(&b, head, &n, &payload_n, true, &e), PARSE_BODY_MORE);
    assert_int_equal(payload_n, 0);
    memset(bytes, '\n', sizeof(bytes));
    n = sizeof(bytes);
    assert_int_equal(parse_body_feed(&b, bytes, &n, &payload_n, true, &e), PARSE_BODY_MORE);
    assert_int_equal(payload_n, sizeof(bytes));
    assert_int_equal(b.left, 0x1000 - sizeof(bytes));
    /* a second error stays an error */
    parse_body_init(&b, &h);
    n = 1;
    bytes[0] = 'x';
    assert_int_equal(parse_body_feed(&b, bytes, &n, &payload_n, true, &e), PARSE_BODY_BAD);
    bytes[0] = '0';
    n = 1;
    assert_int_equal(parse_body_feed(&b, bytes, &n, &payload_n, true, &e), PARSE_BODY_BAD);
}

static int no_live_blocks(void **state)
{
    (void)state;
    assert_int_equal(mem_live_blocks(), 0);
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_request_line),        cmocka_unit_test(test_host),
        cmocka_unit_test(test_field_lines),         cmocka_unit_test(test_framing),
        cmocka_unit_test(test_connection),          cmocka_unit_test(test_request_contents),
        cmocka_unit_test(test_request_persistence), cmocka_unit_test(test_H004_long_target),
        cmocka_unit_test(test_H004_absolute_cap),   cmocka_unit_test(test_H025_large_heads),
        cmocka_unit_test(test_H035_pipelined),      cmocka_unit_test(test_control_bytes_everywhere),
        cmocka_unit_test(test_response_heads),      cmocka_unit_test(test_response_contents),
        cmocka_unit_test(test_errors_have_words),   cmocka_unit_test(test_chunked),
        cmocka_unit_test(test_H046_trailers),       cmocka_unit_test(test_length_and_eof),
        cmocka_unit_test(test_overhead_is_bounded), cmocka_unit_test(test_payload_in_place),
    };

    return cmocka_run_group_tests(tests, NULL, no_live_blocks);
}
