/*
 * test_http.c - what a head becomes on the other side. Heads are made by the parser, so that these tests
 * say what a client sent and what an upstream receives, and the reverse.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include <cmocka.h>

#include "http.h"
#include "mem.h"
#include "parse.h"

static struct http_field fields[HTTP_FIELDS_MAX];

static struct http_head request(const char *bytes)
{
    struct http_head h = {.fields = fields};

    assert_int_equal(parse_request(bytes, strlen(bytes), &h), PARSE_OK);
    return h;
}

static struct http_head response(const char *bytes, enum http_method method)
{
    struct http_head h = {.fields = fields};

    assert_int_equal(parse_response(bytes, strlen(bytes), method, &h), PARSE_OK);
    return h;
}

static void assert_buf(struct buf *got, const char *want)
{
    if (!slice_eq(buf_slice(got), slice_of(want)))
        fail_msg("<%.*s>\ninstead of\n<%s>", (int)got->n, got->p, want);
    buf_free(got);
}

static void test_lookup(void **state)
{
#define X(id, name) {name, HTTP_FIELD_##id},
    static const struct {
        const char *name;
        enum http_field_id id;
    } all[] = {HTTP_FIELDS(X)};
#undef X
    static const char *const others[] = {"",
                                         "t",
                                         "tf",
                                         "hosts",
                                         "host_",
                                         "transfer_encoding",
                                         "content-lengthx",
                                         "x-leasegate",
                                         "x-leasegate_task",
                                         "accept",
                                         "api-kez",
                                         "cookix",
                                         "xookie",
                                         "upgradd",
                                         "content-lengti",
                                         "x-stainless-lang"};
    char name[64];

    (void)state;
    for (size_t i = 0; i < ARRAY_LEN(all); i++) {
        assert_int_equal(http_field_lookup(slice_of(all[i].name)), all[i].id);
        for (size_t k = 0; k <= strlen(all[i].name); k++)
            name[k] = (char)(all[i].name[k] >= 'a' && all[i].name[k] <= 'z' && k % 2 == 0
                                 ? all[i].name[k] - 32
                                 : all[i].name[k]);
        assert_int_equal(http_field_lookup(slice_of(name)), all[i].id);
    }
    for (size_t i = 0; i < ARRAY_LEN(others); i++)
        assert_int_equal(http_field_lookup(slice_of(others[i])), HTTP_FIELD_OTHER);
    assert_int_equal(http_field_lookup(SLICE("X-Leasegate-Lease")), HTTP_FIELD_LEASEGATE_OTHER);
}

static void test_tokens(void **state)
{
    static const char tokens[] = "!#$%&'*+-.^_`|~0123456789abcxyzABCXYZ";

    (void)state;
    for (unsigned c = 0; c < 256; c++) {
        bool alnum = (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z');

        assert_int_equal(http_is_token_char((char)c), alnum || (c != 0 && strchr(tokens, (int)c) != NULL));
    }
    assert_true(http_is_token(SLICE("chunked")));
    assert_false(http_is_token(SLICE("")));
    assert_false(http_is_token(SLICE("a b")));
}

static void test_find(void **state)
{
    struct http_head h = request("GET / HTTP/1.1\r\nHost: a\r\nX-Tenant-Id: t\r\nx-tenant-id: u\r\n\r\n");

    (void)state;
    assert_true(http_find(&h, HTTP_FIELD_HOST) == &h.fields[0]);
    assert_null(http_find(&h, HTTP_FIELD_TE));
    assert_true(http_find_name(&h, SLICE("x-tenant-ID")) == &h.fields[1]);
    /* H031 */
    assert_null(http_find_name(&h, SLICE("x_tenant_id")));
}

static void test_reasons(void **state)
{
    (void)state;
    assert_string_equal(http_reason(429), "Too Many Requests");
    for (unsigned status = 0; status < 1000; status++)
        assert_true(strlen(http_reason(status)) > 0);
}

static void test_copy(void **state)
{
    char raw[] = "GET /x HTTP/1.1\r\nHost: a\r\nX: y\r\n\r\n";
    struct http_head h = request(raw), *copy = http_head_copy(&h);

    (void)state;
    assert_non_null(copy);
    memset(raw, 0, sizeof(raw));
    memset(fields, 0, sizeof(fields));
    assert_true(slice_eq(http_target(copy), SLICE("/x")));
    assert_true(slice_eq(http_value(copy, http_find_name(copy, SLICE("x"))), SLICE("y")));
    assert_int_equal(copy->fields[0].id, HTTP_FIELD_HOST);
    mem_free(copy);
    mem_fail_at(1, false);
    assert_null(http_head_copy(&h));
    mem_fail_at(0, false);
}

static void check_request(const char *in, const struct http_request_out *o, const char *want)
{
    struct http_head h = request(in);
    struct buf out = {0};

    assert_true(http_put_request(&out, &h, o));
    assert_buf(&out, want);
}

static void test_request_fields_pass_byte_for_byte(void **state)
{
    const struct http_request_out o = {.authority = SLICE("api.x:8"), .path_prefix = SLICE("/base")};

    (void)state;
    check_request("POST /v1/x?y HTTP/1.1\r\nAccept:  a \t\r\nHOST: gw\r\nx-E:\r\nX-E: "
                  "\xe9\r\ncontent-LENGTH: 0012\r\n\r\n",
                  &o,
                  "POST /base/v1/x?y HTTP/1.1\r\nHost: api.x:8\r\nAccept:  a \t\r\nx-E:\r\nX-E: \xe9\r\n"
                  "content-LENGTH: 0012\r\n\r\n");
    /* the client's own Host; HTTP/1.0 becomes 1.1; an absolute target loses its authority */
    check_request("GET http://gw:1/p HTTP/1.0\r\nX: y\r\n\r\n", &(struct http_request_out){0},
                  "GET /p HTTP/1.1\r\nHost: gw:1\r\nX: y\r\n\r\n");
    check_request("GET / HTTP/1.0\r\n\r\n", &(struct http_request_out){0},
                  "GET / HTTP/1.1\r\nHost: \r\n\r\n");
    /* H008 */
    check_request("OPTIONS * HTTP/1.1\r\nHost: gw\r\n\r\n", &o,
                  "OPTIONS * HTTP/1.1\r\nHost: api.x:8\r\n\r\n");
    /* H014 */
    check_request("GET /v1/%2e%2e/../x;y//z HTTP/1.1\r\nHost: gw\r\n\r\n", &o,
                  "GET /base/v1/%2e%2e/../x;y//z HTTP/1.1\r\nHost: api.x:8\r\n\r\n");
}

static void test_request_hop_by_hop(void **state)
{
    const struct http_request_out o = {.authority = SLICE("u")};

    (void)state;
    /* H026, H027, H029 */
    check_request(
        "GET / HTTP/1.1\r\nHost: gw\r\nKeep-Alive: 5\r\nA: 1\r\nConnection:\r\nTE: trailers\r\n"
        "Connection: x-secret, close\r\nX-Secret: s\r\nTrailer: x\r\nB: 2\r\nC: 3\r\nUpgrade: h2c\r\n"
        "HTTP2-Settings: x\r\nProxy-Connection: x\r\nProxy-Authorization: x\r\nX-Leasegate-Task: t\r\n"
        "x-leasegate-anything: t\r\nx-SECRET: s\r\n\r\n",
        &o, "GET / HTTP/1.1\r\nHost: u\r\nA: 1\r\nB: 2\r\nC: 3\r\n\r\n");
    /* H053: Expect goes no further */
    check_request("PUT / HTTP/1.1\r\nHost: gw\r\nExpect: 100-continue\r\nContent-Length: 3\r\n\r\n", &o,
                  "PUT / HTTP/1.1\r\nHost: u\r\nContent-Length: 3\r\n\r\n");
    /* H031: an alias is a plain field */
    check_request("GET / HTTP/1.1\r\nHost: gw\r\nTransfer_Encoding: chunked\r\n\r\n", &o,
                  "GET / HTTP/1.1\r\nHost: u\r\nTransfer_Encoding: chunked\r\n\r\n");
    /* H141, H142 */
    check_request("GET / HTTP/1.1\r\nHost: gw\r\nConnection: Upgrade\r\nUpgrade: "
                  "websocket\r\nSec-WebSocket-Key: k\r\n\r\n",
                  &(struct http_request_out){.authority = SLICE("u"), .websocket = true},
                  "GET / HTTP/1.1\r\nHost: u\r\nSec-WebSocket-Key: k\r\nConnection: Upgrade\r\nUpgrade: "
                  "websocket\r\n\r\n");
}

static void test_request_framing(void **state)
{
    const struct http_request_out o = {.authority = SLICE("u")};

    (void)state;
    /* H051 */
    check_request("GET / HTTP/1.1\r\nHost: gw\r\nTransfer-Encoding: Chunked\r\nA: 1\r\n\r\n", &o,
                  "GET / HTTP/1.1\r\nHost: u\r\nA: 1\r\nTransfer-Encoding: chunked\r\n\r\n");
    check_request("DELETE / HTTP/1.1\r\nHost: gw\r\nContent-Length: 5\r\n\r\n", &o,
                  "DELETE / HTTP/1.1\r\nHost: u\r\nContent-Length: 5\r\n\r\n");
    /* H052 */
    check_request("POST / HTTP/1.1\r\nHost: gw\r\nContent-Length: 0\r\n\r\n", &o,
                  "POST / HTTP/1.1\r\nHost: u\r\nContent-Length: 0\r\n\r\n");
    check_request("POST / HTTP/1.1\r\nHost: gw\r\n\r\n", &o,
                  "POST / HTTP/1.1\r\nHost: u\r\nContent-Length: 0\r\n\r\n");
    check_request("GET / HTTP/1.1\r\nHost: gw\r\n\r\n", &o, "GET / HTTP/1.1\r\nHost: u\r\n\r\n");
}

static void test_request_set_replaces(void **state)
{
    const struct http_extra set[] = {
        {SLICE("authorization"), SLICE("Bearer real")},
        {SLICE("x-empty"), {NULL, 0}},
        {SLICE("x-new"), SLICE("1")},
    };

    (void)state;
    check_request("GET / HTTP/1.1\r\nHost: gw\r\nA: 1\r\nAuthorization: Bearer fake\r\nX-Empty: kept\r\n"
                  "AUTHORIZATION: Bearer fake\r\nAuthorizations: b\r\n\r\n",
                  &(struct http_request_out){.authority = SLICE("u"), .set = set, .n_set = ARRAY_LEN(set)},
                  "GET / HTTP/1.1\r\nHost: u\r\nA: 1\r\nX-Empty: kept\r\nAuthorizations: b\r\n"
                  "authorization: Bearer real\r\nx-new: 1\r\n\r\n");
}

/* An added field can never change the framing, whatever a configuration holds. */
static void test_set_cannot_frame(void **state)
{
    const struct http_extra set[] = {
        {SLICE("Content-Length"), SLICE("7")}, {SLICE("transfer-encoding"), SLICE("chunked")},
        {SLICE("host"), SLICE("evil")},        {SLICE("connection"), SLICE("close")},
        {SLICE("upgrade"), SLICE("h2c")},
    };
    uint64_t warned = base_warn_count();

    (void)state;
    check_request("POST / HTTP/1.1\r\nHost: gw\r\nContent-Length: 3\r\n\r\n",
                  &(struct http_request_out){.authority = SLICE("u"), .set = set, .n_set = ARRAY_LEN(set)},
                  "POST / HTTP/1.1\r\nHost: u\r\nContent-Length: 3\r\n\r\n");
    assert_int_equal(base_warn_count() - warned, ARRAY_LEN(set));
}

static void test_no_memory(void **state)
{
    struct http_head h = request("GET / HTTP/1.1\r\nHost: gw\r\n\r\n");
    struct http_response_out ro = {.client_minor = 1, .client_keep_alive = true};
    struct buf out = {0};

    (void)state;
    mem_fail_at(1, true);
    assert_false(http_put_request(&out, &h, &(struct http_request_out){0}));
    h = response("HTTP/1.1 200 OK\r\n\r\n", HTTP_GET);
    assert_false(http_put_response(&out, &h, &ro));
    mem_fail_at(0, false);
    assert_int_equal(out.n, 0);
    assert_null(out.p);
}

/* Both writers append: what stood in the buf stays. */
static void test_appends(void **state)
{
    struct http_head h = request("GET / HTTP/1.1\r\nHost: gw\r\n\r\n");
    struct buf out = {0};

    (void)state;
    assert_true(buf_put(&out, SLICE("before|")));
    assert_true(http_put_request(&out, &h, &(struct http_request_out){0}));
    assert_buf(&out, "before|GET / HTTP/1.1\r\nHost: gw\r\n\r\n");
}

#define KEEP .client_minor = 1, .client_keep_alive = true

static struct http_response_out check_response(const char *in, enum http_method method,
                                               struct http_response_out o, const char *want)
{
    struct http_head h = response(in, method);
    struct buf out = {0};

    o.head_request = method == HTTP_HEAD;
    assert_true(http_put_response(&out, &h, &o));
    if (*want == '\0')
        assert_int_equal(out.n, 0);
    else
        assert_buf(&out, want);
    return o;
}

static void test_response_passes(void **state)
{
    const struct http_extra add[] = {{SLICE("x-leasegate-lease"), SLICE("i/1")},
                                     {SLICE("x-empty"), {NULL, 0}}};
    const struct http_response_out keep = {KEEP, .add = add, .n_add = ARRAY_LEN(add)};
    struct http_response_out o;

    (void)state;
    /* H121: status, reason and fields as sent; H125: the coding too; nobody can fake our own */
    o = check_response(
        "HTTP/1.1 529 Site Overloaded\r\nRetry-After:  7\r\nX-Leasegate-Lease: fake\r\n"
        "x-leasegate-limit: fake\r\nx-should-retry: false\r\nContent-Encoding: gzip\r\n"
        "content-length: 12\r\nREQUEST-ID: r\r\n\r\n",
        HTTP_POST, keep,
        "HTTP/1.1 529 Site Overloaded\r\nRetry-After:  7\r\nx-should-retry: false\r\n"
        "Content-Encoding: gzip\r\ncontent-length: 12\r\nREQUEST-ID: r\r\nx-leasegate-lease: i/1\r\n\r\n");
    assert_false(o.chunked || o.will_close);
    /* an empty reason is filled in; H029 in this direction */
    o = check_response(
        "HTTP/1.1 502\r\nConnection: close, x-hop\r\nKeep-Alive: x\r\nX-Hop: 1\r\nTrailer: a\r\n"
        "Proxy-Authenticate: b\r\nContent-Length: 0\r\n\r\n",
        HTTP_POST, (struct http_response_out){KEEP}, "HTTP/1.1 502 Bad Gateway\r\nContent-Length: 0\r\n\r\n");
    assert_false(o.will_close);
}

static void test_response_framing(void **state)
{
    struct http_response_out o;

    (void)state;
    o = check_response("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nA: 1\r\n\r\n", HTTP_POST,
                       (struct http_response_out){KEEP},
                       "HTTP/1.1 200 OK\r\nA: 1\r\nTransfer-Encoding: chunked\r\n\r\n");
    assert_true(o.chunked && !o.will_close);
    /* H112 */
    o = check_response("HTTP/1.0 200 OK\r\n\r\n", HTTP_POST, (struct http_response_out){KEEP},
                       "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n");
    assert_true(o.chunked && !o.will_close);
    /* H135 */
    o = check_response(
        "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", HTTP_POST,
        (struct http_response_out){.client_keep_alive = true, .client_explicit_keep_alive = true},
        "HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n");
    assert_true(!o.chunked && o.will_close);
    o = check_response(
        "HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\n", HTTP_POST,
        (struct http_response_out){.client_keep_alive = true, .client_explicit_keep_alive = true},
        "HTTP/1.1 200 OK\r\nContent-Length: 3\r\nConnection: keep-alive\r\n\r\n");
    assert_false(o.chunked || o.will_close);
    o = check_response("HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\n", HTTP_POST,
                       (struct http_response_out){0},
                       "HTTP/1.1 200 OK\r\nContent-Length: 3\r\nConnection: close\r\n\r\n");
    assert_true(o.will_close);
    o = check_response("HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\n", HTTP_POST,
                       (struct http_response_out){KEEP, .close = true},
                       "HTTP/1.1 200 OK\r\nContent-Length: 3\r\nConnection: close\r\n\r\n");
    assert_true(o.will_close && !o.chunked);
}

static void test_response_without_body(void **state)
{
    struct http_response_out o;

    (void)state;
    /* H115 */
    o = check_response("HTTP/1.1 200 OK\r\nContent-Length: 123\r\n\r\n", HTTP_HEAD,
                       (struct http_response_out){KEEP}, "HTTP/1.1 200 OK\r\nContent-Length: 123\r\n\r\n");
    assert_false(o.chunked || o.will_close);
    o = check_response("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", HTTP_HEAD,
                       (struct http_response_out){KEEP}, "HTTP/1.1 200 OK\r\n\r\n");
    assert_false(o.chunked || o.will_close);
    o = check_response("HTTP/1.1 204 No Content\r\nContent-Length: 3\r\nA: 1\r\n\r\n", HTTP_GET,
                       (struct http_response_out){KEEP}, "HTTP/1.1 204 No Content\r\nA: 1\r\n\r\n");
    assert_false(o.chunked || o.will_close);
    o = check_response("HTTP/1.1 304 Not Modified\r\nContent-Length: 3\r\n\r\n", HTTP_GET,
                       (struct http_response_out){KEEP},
                       "HTTP/1.1 304 Not Modified\r\nContent-Length: 3\r\n\r\n");
    assert_false(o.chunked || o.will_close);
    o = check_response(
        "HTTP/1.1 204 No Content\r\n\r\n", HTTP_GET,
        (struct http_response_out){.client_keep_alive = true, .client_explicit_keep_alive = true},
        "HTTP/1.1 204 No Content\r\nConnection: keep-alive\r\n\r\n");
    assert_false(o.will_close);
}

static void test_interim_and_upgrade(void **state)
{
    const struct http_extra add[] = {{SLICE("x-leasegate-lease"), SLICE("i/1")}};
    struct http_response_out o;

    (void)state;
    /* H109 */
    o = check_response("HTTP/1.1 103 Early Hints\r\nLink: x\r\nContent-Length: 3\r\n\r\n", HTTP_GET,
                       (struct http_response_out){KEEP, .close = true, .add = add, .n_add = 1},
                       "HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n");
    assert_false(o.chunked || o.will_close);
    /* H135 */
    check_response("HTTP/1.1 102 Processing\r\n\r\n", HTTP_GET, (struct http_response_out){0}, "");
    /* H141 */
    o = check_response(
        "HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: upgrade\r\n"
        "Sec-WebSocket-Accept: a\r\n\r\n",
        HTTP_GET, (struct http_response_out){KEEP, .websocket = true, .add = add, .n_add = 1},
        "HTTP/1.1 101 Switching Protocols\r\nSec-WebSocket-Accept: a\r\nx-leasegate-lease: i/1\r\n"
        "Connection: Upgrade\r\nUpgrade: websocket\r\n\r\n");
    assert_false(o.chunked || o.will_close);
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
        cmocka_unit_test(test_lookup),
        cmocka_unit_test(test_tokens),
        cmocka_unit_test(test_find),
        cmocka_unit_test(test_reasons),
        cmocka_unit_test(test_copy),
        cmocka_unit_test(test_request_fields_pass_byte_for_byte),
        cmocka_unit_test(test_request_hop_by_hop),
        cmocka_unit_test(test_request_framing),
        cmocka_unit_test(test_request_set_replaces),
        cmocka_unit_test(test_set_cannot_frame),
        cmocka_unit_test(test_no_memory),
        cmocka_unit_test(test_appends),
        cmocka_unit_test(test_response_passes),
        cmocka_unit_test(test_response_framing),
        cmocka_unit_test(test_response_without_body),
        cmocka_unit_test(test_interim_and_upgrade),
    };

    return cmocka_run_group_tests(tests, NULL, no_live_blocks);
}
