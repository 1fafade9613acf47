/*
 * test_reply.c - what a client sees when the gateway answers itself, and the JSON strings in it.
 */
#include <iconv.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include <cmocka.h>

#include "json.h"
#include "mem.h"
#include "parse.h"
#include "reply.h"

static struct http_field fields[HTTP_FIELDS_MAX];

/* A reply taken apart by the same parser that reads upstreams. */
struct answer {
    struct buf bytes;
    struct http_head head;
    struct slice body;
};

static struct answer answer_to(const struct reply *r)
{
    struct answer a = {.head.fields = fields};
    struct parse_scan scan = {0};
    enum parse_error e;
    size_t n;

    assert_true(reply_put(&a.bytes, r));
    n = parse_head_end(&scan, a.bytes.p, a.bytes.n, 65536, false, &e);
    assert_true(n > 0);
    assert_int_equal(parse_response(a.bytes.p, n, r->head_request ? HTTP_HEAD : HTTP_POST, &a.head),
                     PARSE_OK);
    assert_int_equal(a.head.status, r->status);
    a.body = (struct slice){a.bytes.p + n, a.bytes.n - n};
    return a;
}

/* "" when the field is not there; it must not be there twice. */
static struct slice field(const struct answer *a, const char *name)
{
    const struct http_field *f = http_find_name(&a->head, slice_of(name));

    if (f == NULL)
        return SLICE("");
    for (const struct http_field *other = f + 1; other < a->head.fields + a->head.n_fields; other++)
        assert_false(slice_ieq(http_name(&a->head, other), slice_of(name)));
    return http_value(&a->head, f);
}

static void assert_slice(struct slice got, const char *want)
{
    if (!slice_eq(got, slice_of(want)))
        fail_msg("<%.*s> instead of <%s>", (int)got.n, got.p, want);
}

static struct reply refusal(enum config_api api, unsigned status)
{
    return (struct reply){
        .api = api,
        .status = status,
        .reason = SLICE("limit_full"),
        .message = SLICE("no \"slot\" is free"),
        .limit = SLICE("gpt-4o"),
        .request_id = SLICE("r-1"),
        .retry_after_ms = 1500,
    };
}

static void check_body(enum config_api api, unsigned status, const char *want)
{
    struct reply r = refusal(api, status);
    struct answer a = answer_to(&r);
    char length[20];

    assert_slice(a.body, want);
    assert_slice(field(&a, "content-type"), "application/json");
    assert_true(slice_eq(field(&a, "content-length"), (struct slice){length, str_put_u64(length, a.body.n)}));
    assert_slice(field(&a, "x-leasegate-reason"), "limit_full");
    assert_slice(field(&a, "x-leasegate-limit"), "gpt-4o");
    /* H171 */
    assert_slice(field(&a, "x-request-id"), "r-1");
    assert_slice(field(&a, "request-id"), "r-1");
    buf_free(&a.bytes);
}

#define TEXT "no \\\"slot\\\" is free (limit gpt-4o)"

static void test_H167_shapes(void **state)
{
    (void)state;
    check_body(CONFIG_API_OPENAI, 429,
               "{\"error\":{\"message\":\"" TEXT "\",\"type\":\"rate_limit_error\",\"param\":null,"
               "\"code\":\"limit_full\"}}");
    check_body(CONFIG_API_ANTHROPIC, 429,
               "{\"type\":\"error\",\"error\":{\"type\":\"rate_limit_error\",\"message\":\"" TEXT "\"},"
               "\"request_id\":\"r-1\"}");
    check_body(CONFIG_API_GEMINI, 429,
               "{\"error\":{\"code\":429,\"message\":\"" TEXT "\",\"status\":\"RESOURCE_EXHAUSTED\"}}");
}

static void check_word(enum config_api api, unsigned status, const char *want)
{
    struct reply r = refusal(api, status);
    struct answer a = answer_to(&r);
    char quoted[64];
    int n = snprintf(quoted, sizeof(quoted), "\"%s\"", want);

    if (memmem(a.body.p, a.body.n, quoted, (size_t)n) == NULL)
        fail_msg("%u: no %s in <%.*s>", status, quoted, (int)a.body.n, a.body.p);
    buf_free(&a.bytes);
}

static void test_type_words(void **state)
{
    static const struct {
        unsigned status;
        const char *openai, *anthropic, *gemini;
    } rows[] = {
        {400, "invalid_request_error", "invalid_request_error", "INVALID_ARGUMENT"},
        {404, "invalid_request_error", "not_found_error", "NOT_FOUND"},
        {413, "invalid_request_error", "request_too_large", "INVALID_ARGUMENT"},
        {431, "invalid_request_error", "invalid_request_error", "INVALID_ARGUMENT"},
        {502, "server_error", "api_error", "UNAVAILABLE"},
        {503, "server_error", "overloaded_error", "UNAVAILABLE"},
        {504, "timeout_error", "timeout_error", "DEADLINE_EXCEEDED"},
        {529, "server_error", "overloaded_error", "UNAVAILABLE"},
        {599, "server_error", "api_error", "INTERNAL"},
    };

    (void)state;
    for (size_t i = 0; i < ARRAY_LEN(rows); i++) {
        check_word(CONFIG_API_OPENAI, rows[i].status, rows[i].openai);
        check_word(CONFIG_API_ANTHROPIC, rows[i].status, rows[i].anthropic);
        check_word(CONFIG_API_GEMINI, rows[i].status, rows[i].gemini);
    }
}

static void check_retry(unsigned status, uint64_t ms, const char *after, const char *after_ms,
                        const char *should)
{
    struct reply r = refusal(CONFIG_API_OPENAI, status);
    struct answer a;

    r.retry_after_ms = ms;
    a = answer_to(&r);
    assert_slice(field(&a, "retry-after"), after);
    assert_slice(field(&a, "retry-after-ms"), after_ms);
    assert_slice(field(&a, "x-should-retry"), should);
    buf_free(&a.bytes);
}

/* H098: whole seconds from 1 to 60, and the same in ms; never 0. */
static void test_H098_retry_fields(void **state)
{
    (void)state;
    check_retry(429, 1, "1", "1", "true");
    check_retry(429, 1000, "1", "1000", "true");
    check_retry(429, 1001, "2", "1001", "true");
    check_retry(503, 60000, "60", "60000", "true");
    check_retry(502, 60001, "60", "60000", "true");
    check_retry(504, UINT64_MAX, "60", "60000", "true");
    check_retry(429, 0, "", "", "true");
    check_retry(500, 700, "1", "700", "true");
    check_retry(529, 30000, "30", "30000", "true");
    check_retry(501, 1000, "", "", "false");
    check_retry(505, 0, "", "", "false");
}

static void test_H169_no_retry_of_client_errors(void **state)
{
    static const unsigned statuses[] = {400, 401, 403, 404, 405, 408, 413, 414, 415, 417, 431};

    (void)state;
    for (size_t i = 0; i < ARRAY_LEN(statuses); i++)
        check_retry(statuses[i], 1000, "", "", "");
}

static void test_fields_by_status(void **state)
{
    struct reply r = refusal(CONFIG_API_OPENAI, 405);
    struct answer a = answer_to(&r);

    (void)state;
    assert_slice(field(&a, "allow"), "GET, HEAD, POST, PUT, PATCH, DELETE, OPTIONS");
    assert_slice(field(&a, "connection"), "");
    buf_free(&a.bytes);
    r.status = 415;
    r.close = true;
    r.keep_alive = true;
    a = answer_to(&r);
    assert_slice(field(&a, "accept-encoding"), "gzip, deflate, zstd");
    assert_slice(field(&a, "connection"), "close");
    buf_free(&a.bytes);
    r.close = false;
    r.limit = r.request_id = (struct slice){0};
    a = answer_to(&r);
    assert_slice(field(&a, "connection"), "keep-alive");
    assert_null(http_find_name(&a.head, SLICE("x-leasegate-limit")));
    assert_null(http_find_name(&a.head, SLICE("x-request-id")));
    buf_free(&a.bytes);
    r.api = CONFIG_API_ANTHROPIC;
    a = answer_to(&r);
    assert_non_null(memmem(a.body.p, a.body.n, "\"request_id\":null", 17));
    buf_free(&a.bytes);
}

static void test_head_request(void **state)
{
    struct reply r = refusal(CONFIG_API_GEMINI, 429);
    struct answer whole = answer_to(&r), head;

    (void)state;
    r.head_request = true;
    head = answer_to(&r);
    assert_int_equal(head.body.n, 0);
    assert_true(
        slice_eq((struct slice){whole.bytes.p, whole.bytes.n - whole.body.n}, buf_slice(&head.bytes)));
    buf_free(&whole.bytes);
    buf_free(&head.bytes);
}

/* H033: no name can end a line of the head. */
static void test_H033_fields_are_cleaned(void **state)
{
    struct reply r = refusal(CONFIG_API_OPENAI, 400);
    struct answer a;

    (void)state;
    r.limit = SLICE("a\r\nSet-Cookie: x\xe9\x7f");
    r.request_id = SLICE("\n");
    a = answer_to(&r);
    assert_slice(field(&a, "x-leasegate-limit"), "a__Set-Cookie: x__");
    assert_slice(field(&a, "x-request-id"), "_");
    buf_free(&a.bytes);
}

static void check_event(enum config_api api, const char *reason, enum reply_sse_at at, const char *want)
{
    struct buf out = {0};

    assert_true(reply_sse_error(&out, api, slice_of(reason), SLICE("cut"), SLICE("r-1"), at));
    assert_slice(buf_slice(&out), want);
    buf_free(&out);
}

static void test_H170_stream_errors(void **state)
{
#define OPENAI                                                                                               \
    "data: "                                                                                                 \
    "{\"error\":{\"message\":\"cut\",\"type\":\"server_error\",\"param\":null,\"code\":\"upstream_closed\"}" \
    "}\n\n"

    (void)state;
    check_event(CONFIG_API_OPENAI, "upstream_closed", REPLY_SSE_BOUNDARY, OPENAI);
    check_event(CONFIG_API_OPENAI, "upstream_closed", REPLY_SSE_LINE, "\n" OPENAI);
    check_event(CONFIG_API_OPENAI, "upstream_closed", REPLY_SSE_IN_LINE, "\n\n" OPENAI);
    check_event(
        CONFIG_API_ANTHROPIC, "upstream_timeout", REPLY_SSE_BOUNDARY,
        "event: error\ndata: {\"type\":\"error\",\"error\":{\"type\":\"timeout_error\",\"message\":\"cut\"},"
        "\"request_id\":\"r-1\"}\n\n");
    check_event(CONFIG_API_GEMINI, "upstream_closed", REPLY_SSE_BOUNDARY,
                "data: {\"error\":{\"code\":502,\"message\":\"cut\",\"status\":\"UNAVAILABLE\"}}\n\n");
    /* as a bool */
    check_event(CONFIG_API_OPENAI, "upstream_closed", (enum reply_sse_at)(1 == 1), OPENAI);
}

/* An event is lines: nothing in a message may break one. */
static void test_H170_message_stays_in_its_line(void **state)
{
    struct buf out = {0};
    size_t ends = 0;

    (void)state;
    assert_true(reply_sse_error(&out, CONFIG_API_OPENAI, SLICE("a\nb"), SLICE("x\r\n\r\ndata: [DONE]\n"),
                                SLICE("r"), REPLY_SSE_BOUNDARY));
    for (size_t i = 0; i < out.n; i++)
        ends += out.p[i] == '\n' || out.p[i] == '\r';
    assert_int_equal(ends, 2);
    buf_free(&out);
}

static void check_string(struct slice in, const char *want)
{
    struct buf out = {0};

    assert_true(json_put_string(&out, in));
    assert_slice(buf_slice(&out), want);
    buf_free(&out);
}

#define R "\xef\xbf\xbd"

static void test_json_strings(void **state)
{
    (void)state;
    check_string((struct slice){NULL, 0}, "\"\"");
    check_string(SLICE("a/b"), "\"a/b\"");
    check_string(SLICE("\"\\\b\f\n\r\t"), "\"\\\"\\\\\\b\\f\\n\\r\\t\"");
    check_string(SLICE("\0\x1f\x7f"), "\"\\u0000\\u001f\x7f\"");
    check_string(SLICE("\xc3\xa9\xe2\x82\xac\xf0\x9f\x98\x80"), "\"\xc3\xa9\xe2\x82\xac\xf0\x9f\x98\x80\"");
    /* H034: cut, overlong, surrogate, beyond Unicode, stray continuation */
    check_string(SLICE("a\xe9z"), "\"a" R "z\"");
    check_string(SLICE("\xe2\x82"), "\"" R R "\"");
    check_string(SLICE("\xc0\x80"), "\"" R R "\"");
    check_string(SLICE("\xe0\x9f\xbf"), "\"" R R R "\"");
    check_string(SLICE("\xed\xa0\x80"), "\"" R R R "\"");
    check_string(SLICE("\xf4\x90\x80\x80"), "\"" R R R R "\"");
    check_string(SLICE("\xf0\x8f\xbf\xbf"), "\"" R R R R "\"");
    check_string(SLICE("\x80\xff"), "\"" R R "\"");
}

/* All pairs and many longer runs of bytes: the C library's own decoder must take what comes out. */
static void test_json_is_always_utf8(void **state)
{
    iconv_t decoder = iconv_open("UCS-4LE", "UTF-8");
    struct buf out = {0};
    uint32_t seed = 1;

    (void)state;
    assert_true(decoder != (iconv_t)-1);
    for (unsigned round = 0; round < 65536 + 20000; round++) {
        char bytes[6], wide[256], *to = wide;
        size_t n = round < 65536 ? 2 : sizeof(bytes), room = sizeof(wide);

        for (size_t i = 0; i < n; i++) {
            seed = seed * 1664525 + 1013904223;
            bytes[i] = (char)(round < 65536 ? round >> (8 * i) : 0x80 | seed >> 24);
        }
        out.n = 0;
        assert_true(json_put_string(&out, (struct slice){bytes, n}));
        assert_int_equal(out.p[0], '"');
        assert_int_equal(out.p[out.n - 1], '"');
        for (size_t i = 0; i < out.n; i++)
            assert_true((unsigned char)out.p[i] >= ' ');
        for (char *from = out.p; out.n > 0;)
            assert_true(iconv(decoder, &from, &out.n, &to, &room) != (size_t)-1);
    }
    iconv_close(decoder);
    buf_free(&out);
}

/* Each allocation fails in turn: false, and the buf as it was. */
static void test_no_memory(void **state)
{
    struct reply r = refusal(CONFIG_API_OPENAI, 429);
    struct buf out = {0};
    bool ok = false;
    uint64_t failures = 0;

    (void)state;
    for (uint64_t n = 1; !ok; n++) {
        struct buf fresh = {0};

        assert_true(buf_put(&fresh, SLICE("x")));
        mem_fail_at(n, false);
        ok = reply_put(&fresh, &r);
        mem_fail_at(0, false);
        failures += !ok;
        assert_true(ok || fresh.n == 1);
        buf_free(&fresh);
    }
    assert_true(failures >= 3);
    mem_fail_at(1, true);
    assert_false(
        reply_sse_error(&out, CONFIG_API_GEMINI, r.reason, r.message, r.request_id, REPLY_SSE_BOUNDARY));
    assert_false(json_put_string(&out, SLICE("x")));
    mem_fail_at(0, false);
    assert_int_equal(out.n, 0);
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
        cmocka_unit_test(test_H167_shapes),
        cmocka_unit_test(test_type_words),
        cmocka_unit_test(test_H098_retry_fields),
        cmocka_unit_test(test_H169_no_retry_of_client_errors),
        cmocka_unit_test(test_fields_by_status),
        cmocka_unit_test(test_head_request),
        cmocka_unit_test(test_H033_fields_are_cleaned),
        cmocka_unit_test(test_H170_stream_errors),
        cmocka_unit_test(test_H170_message_stays_in_its_line),
        cmocka_unit_test(test_json_strings),
        cmocka_unit_test(test_json_is_always_utf8),
        cmocka_unit_test(test_no_memory),
    };

    return cmocka_run_group_tests(tests, NULL, no_live_blocks);
}
