/*
 * test_note.c - what is remembered of a call, and its line in the log: every field where it belongs, no key, no body.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#include <cmocka.h>

#include "hash.h"
#include "log.h"
#include "mem.h"
#include "note.h"
#include "parse.h"

#include <fcntl.h>
#include <unistd.h>

static struct http_field fields[HTTP_FIELDS_MAX];
static struct http_head head;
static char path[64];

static int no_blocks(void **state)
{
    (void)state;
    return mem_live_blocks() == 0 ? 0 : -1;
}

static void parse(const char *text)
{
    head = (struct http_head){.fields = fields};
    assert_int_equal(parse_request(text, strlen(text), &head), PARSE_OK);
}

static void assert_slice(struct slice got, const char *want)
{
    if (!slice_eq(got, slice_of(want)))
        fail_msg("<%.*s> instead of <%s>", (int)got.n, got.n == 0 ? "" : got.p, want);
}

static const char request[] =
    "POST /v1/chat/completions?api-version=1&key=AIza-secret HTTP/1.1\r\nHost: h\r\n"
    "Authorization: Bearer sk-secret\r\nCookie: c=secret\r\nx-request-id: req-7\r\n"
    "x-leasegate-task: task 9\r\ntraceparent: 00-abc-def-01\r\n\r\n";

static void test_what_is_remembered(void **state)
{
    struct route r = {.tenant = SLICE("acme")};
    char text[sizeof(request)];
    struct note *n;

    (void)state;
    memcpy(text, request, sizeof(request));
    parse(text);
    n = note_new(&head, &r, CONFIG_TENANT_LOG_PLAIN, SLICE("own-1"));
    assert_non_null(n);
    memset(text, 0x55, sizeof(text)); /* the head is gone */
    assert_slice(n->method, "POST");
    assert_slice(n->target, "/v1/chat/completions?api-version=1&key=***");
    assert_slice(n->request_id, "req-7");
    assert_slice(n->task, "task 9");
    assert_slice(n->traceparent, "00-abc-def-01");
    assert_slice(n->tenant, "acme");
    assert_null(n->model);
    assert_true(note_set_model(n, (struct slice){NULL, 0}));
    assert_null(n->model);
    assert_true(note_set_model(n, SLICE("gpt-4o")));
    assert_true(note_set_model(n, SLICE("gpt-4o-mini")));
    assert_string_equal(n->model, "gpt-4o-mini");
    note_free(n);
    note_free(NULL);
}

static void test_tenants_may_be_hashed(void **state)
{
    struct route r = {.tenant = SLICE("acme")};
    char hash[33] = "";
    struct note *n;

    (void)state;
    parse("GET / HTTP/1.1\r\nHost: h\r\n\r\n");
    n = note_new(&head, &r, CONFIG_TENANT_LOG_HASH, SLICE("own-1"));
    hash_stable_hex(SLICE("acme"), hash);
    assert_slice(n->tenant, hash);
    assert_slice(n->request_id, "own-1"); /* the client sent none */
    assert_slice(n->task, "");
    note_free(n);
    r.tenant = (struct slice){NULL, 0};
    n = note_new(&head, &r, CONFIG_TENANT_LOG_HASH, SLICE("own-1"));
    assert_slice(n->tenant, "");
    note_free(n);
}

static void test_each_part_has_a_bound(void **state)
{
    static char big[2001], text[16384];
    struct route r = {.tenant = {big, 2000}};
    struct note *n;

    (void)state;
    memset(big, 'x', 2000);
    snprintf(
        text, sizeof(text),
        "GET /%s HTTP/1.1\r\nHost: h\r\nx-request-id: %s\r\nx-leasegate-task: %s\r\ntraceparent: %s\r\n\r\n",
        big, big, big, big);
    parse(text);
    n = note_new(&head, &r, CONFIG_TENANT_LOG_PLAIN, SLICE("own-1"));
    assert_int_equal(n->target.n, 512);
    assert_int_equal(n->request_id.n, 128);
    assert_int_equal(n->task.n, 256);
    assert_int_equal(n->traceparent.n, 64);
    assert_int_equal(n->tenant.n, 256);
    note_free(n);
}

static void test_text_is_cut(void **state)
{
    char to[4];

    (void)state;
    note_text(to, sizeof(to), SLICE("abcdef"));
    assert_string_equal(to, "abc");
    note_text(to, sizeof(to), SLICE("ab"));
    assert_string_equal(to, "ab");
    note_text(to, sizeof(to), (struct slice){NULL, 0});
    assert_string_equal(to, "");
    note_text(to, 1, SLICE("abc"));
    assert_string_equal(to, "");
}

static void test_without_memory(void **state)
{
    struct route r = {.tenant = SLICE("acme")};
    struct note *n;

    (void)state;
    parse(request);
    mem_fail_at(1, false);
    assert_null(note_new(&head, &r, CONFIG_TENANT_LOG_PLAIN, SLICE("own-1")));
    n = note_new(&head, &r, CONFIG_TENANT_LOG_PLAIN, SLICE("own-1"));
    assert_true(note_set_model(n, SLICE("first")));
    mem_fail_at(1, false);
    assert_false(note_set_model(n, SLICE("second")));
    assert_null(n->model);
    note_log(n, &(struct note_end){.detail = "", .upstream = ""});
    log_thread_end();
    note_free(n);
}

/* --- the line ------------------------------------------------------------------------------------------------------ */

/* The line that note_log writes, without its time. */
static void line_of(const struct note *n, const struct note_end *e, char *out, size_t size)
{
    ssize_t got;
    char *from;
    int fd;

    assert_true(log_open(true, LOG_INFO, path));
    note_log(n, e);
    log_close();
    fd = open(path, O_RDONLY | O_CLOEXEC);
    got = read(fd, out, size - 1);
    assert_true(got > 0);
    out[got] = '\0';
    close(fd);
    assert_int_equal(unlink(path), 0);
    from = strstr(out, "\"level\":");
    assert_non_null(from);
    memmove(out, from, strlen(from) + 1);
}

static void test_the_line_of_a_call(void **state)
{
    struct route r = {.tenant = SLICE("acme")};
    struct note_end e = {.outcome = OUTCOME_DONE,
                         .phase = OUTCOME_PHASE_RELAY,
                         .status = 200,
                         .reason = "done",
                         .limit = "gpt-4o",
                         .lease = "inst/7",
                         .client = "127.0.0.1:4711",
                         .detail = "",
                         .upstream = "llm",
                         .began_us = 1000000,
                         .admitted_us = 1000500,
                         .opened_us = 1002500,
                         .head_us = 1100000,
                         .ended_us = 3500001,
                         .bytes_in = 17,
                         .bytes_out = 4711};
    char line[4096];
    struct note *n;

    (void)state;
    parse(request);
    n = note_new(&head, &r, CONFIG_TENANT_LOG_PLAIN, SLICE("own-1"));
    assert_true(note_set_model(n, SLICE("gpt-4o")));
    line_of(n, &e, line, sizeof(line));
    assert_string_equal(
        line,
        "\"level\":\"info\",\"event\":\"call\",\"id\":\"req-7\",\"method\":\"POST\","
        "\"path\":\"/v1/chat/completions?api-version=1&key=***\",\"status\":200,\"reason\":\"done\","
        "\"by\":\"upstream\",\"phase\":\"relay\",\"upstream\":\"llm\",\"model\":\"gpt-4o\",\"tenant\":"
        "\"acme\","
        "\"task\":\"task 9\",\"traceparent\":\"00-abc-def-01\",\"limit\":\"gpt-4o\",\"lease\":\"inst/7\","
        "\"wait_ms\":0.500,\"dial_ms\":2.000,\"first_byte_ms\":100.000,\"duration_ms\":2500.001,"
        "\"bytes_in\":17,\"bytes_out\":4711,\"client\":\"127.0.0.1:4711\"}\n");
    assert_null(strstr(line, "secret"));
    note_free(n);
}

/* What did not happen is not in the line. */
static void test_the_line_of_a_call_that_never_began(void **state)
{
    struct note_end e = {.outcome = OUTCOME_BAD_REQUEST,
                         .phase = OUTCOME_PHASE_HEAD,
                         .status = 400,
                         .reason = "bad_host",
                         .client = "unix",
                         .detail = "exactly one valid Host",
                         .upstream = "",
                         .began_us = 5,
                         .ended_us = 5,
                         .replayed = true};
    char line[4096];

    (void)state;
    line_of(NULL, &e, line, sizeof(line));
    assert_string_equal(
        line,
        "\"level\":\"info\",\"event\":\"call\",\"status\":400,\"reason\":\"bad_host\",\"by\":\"client\","
        "\"phase\":\"head\",\"detail\":\"exactly one valid Host\",\"duration_ms\":0.000,\"bytes_in\":0,"
        "\"bytes_out\":0,\"replayed\":true,\"client\":\"unix\"}\n");
}

static int make_path(void **state)
{
    int fd;

    (void)state;
    snprintf(path, sizeof(path), "/tmp/lg-note-XXXXXX");
    fd = mkstemp(path);
    if (fd < 0)
        return -1;
    close(fd);
    return unlink(path);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_teardown(test_what_is_remembered, no_blocks),
        cmocka_unit_test_teardown(test_tenants_may_be_hashed, no_blocks),
        cmocka_unit_test_teardown(test_each_part_has_a_bound, no_blocks),
        cmocka_unit_test_teardown(test_text_is_cut, no_blocks),
        cmocka_unit_test_teardown(test_without_memory, no_blocks),
        cmocka_unit_test_teardown(test_the_line_of_a_call, no_blocks),
        cmocka_unit_test_teardown(test_the_line_of_a_call_that_never_began, no_blocks),
    };

    return cmocka_run_group_tests(tests, make_path, NULL);
}
