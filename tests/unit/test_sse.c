/*
 * test_sse.c - what is known of an event stream as it passes must not depend on how its bytes were cut.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "mem.h"
#include "sse.h"

struct row {
    const char *text;
    bool boundary, done, saw_id;
};

static const struct row rows[] = {
    {"", true, false, false},
    {"\n", true, false, false},
    {"\r\n", true, false, false},
    {"\r", false, false, false}, /* half of an end of line */
    {"d", false, false, false},
    {"data: x", false, false, false},
    {"data: x\n", false, false, false},
    {"data: x\n\n", true, false, false},
    {"data: x\r\n\r", false, false, false},
    {"data: x\r\n\r\n", true, false, false},
    {"data: x\n\r\n", true, false, false},
    {"data: x\n\ndata", false, false, false},
    {": ping\n\n", true, false, false},
    {"\n\n\n\ndata: x\n\n\n", true, false, false},
    /* last words: in force when their event is complete */
    {"data: [DONE]", false, false, false},
    {"data: [DONE]\n", false, false, false},
    {"data: [DONE]\n\n", true, true, false},
    {"data: [DONE]\r\n\r\n", true, true, false},
    {"data:[DONE]\n\n", true, true, false},
    {"data: {}\n\ndata: [DONE]\n\n", true, true, false},
    {"data: [DONE]\n\ndata: more", false, true, false},
    {"event: message_stop\ndata: {\"type\":\"message_stop\"}\n\n", true, true, false},
    {"event: message_stop\r\ndata: {\"type\":\"message_stop\"}\r\n\r\n", true, true, false},
    {"event: message_stop\ndata: {\"type\":\"message_stop\"}\n", false, false, false},
    {"event:message_stop\ndata:{}\n\n", true, true, false}, /* the space is optional */
    {"data: {\"type\":\"message_stop\"}\nevent: message_stop\n\n", true, true, false},
    {"event: response.completed\ndata: {}\n\n", true, true, false},
    {"event:response.completed\ndata: {}\n\n", true, true, false},
    {"event: response.failed\ndata: {}\n\n", true, true, false},
    {"event: response.incomplete\ndata: {}\n\n", true, true, false},
    {"event: response.incomplete\r\ndata: {}\r\n\r\n", true, true, false},
    /* nearly last words */
    {"data: [DONE] \n\n", true, false, false},
    {"data:  [DONE]\n\n", true, false, false}, /* one space is taken off, the second belongs to the value */
    {" data: [DONE]\n\n", true, false, false},
    {"data: [DONE]x\n\n", true, false, false},
    {"data: [DONE\n\n", true, false, false},
    {"data: x[DONE]\n\n", true, false, false},
    {"event: [DONE]\n\n", true, false, false},
    {"data: message_stop\n\n", true, false, false},
    {"event: message_stopped\n\n", true, false, false},
    {"event: message_sto\n\n", true, false, false},
    {"event: response.incomplete!\n\n", true, false, false},
    {"event: response.incomplete\rx\n\n", true, false, false},
    {"event: response.completed.and.a.long.tail.of.it\n\n", true, false, false},
    {"event: response.created\ndata: {}\n\n", true, false, false},
    {": data: [DONE]\n\n", true, false, false},
    {"data: {\"content\":\"data: [DONE]\"}\n\n", true, false, false},
    {"data: {\"content\":\"a much longer line than the twenty-eight bytes that are kept\"}\n\n", true, false,
     false},
    /* ids */
    {"id: 1\ndata: x\n\n", true, false, true},
    {"id:1\ndata: x\n\n", true, false, true},
    {"id: a much longer one than the twenty-eight bytes that are kept\r\n", false, false, true},
    {"id: 1", false, false, false}, /* no line yet */
    {"id\n\n", true, false, false},
    {"idx: 1\n\n", true, false, false},
    {"data: id: 1\n\n", true, false, false},
    {"data: x\nid: 7\n\ndata: [DONE]\n\n", true, true, true},
};

static void check(const struct sse *s, const struct row *r, const char *how)
{
    if (s->boundary != r->boundary || s->done != r->done || s->saw_id != r->saw_id)
        fail_msg("<%s> %s: boundary %d done %d id %d", r->text, how, s->boundary, s->done, s->saw_id);
}

/* The bytes in a block of their own: a look beyond its end is seen by the sanitizer. */
static void feed(struct sse *s, const char *bytes, size_t n)
{
    char *copy = malloc(n + 1);

    memcpy(copy + 1, bytes, n);
    sse_feed(s, copy + 1, n);
    free(copy);
}

static void test_whole(void **state)
{
    (void)state;
    for (size_t i = 0; i < ARRAY_LEN(rows); i++) {
        struct sse s;

        sse_init(&s);
        feed(&s, rows[i].text, strlen(rows[i].text));
        check(&s, &rows[i], "whole");
    }
}

static void test_every_split(void **state)
{
    (void)state;
    for (size_t i = 0; i < ARRAY_LEN(rows); i++) {
        size_t n = strlen(rows[i].text);
        struct sse s;

        sse_init(&s);
        for (size_t k = 0; k < n; k++)
            feed(&s, rows[i].text + k, 1);
        check(&s, &rows[i], "by bytes");
        for (size_t a = 0; a <= n; a++) {
            for (size_t b = a; b <= n; b++) {
                sse_init(&s);
                feed(&s, rows[i].text, a);
                feed(&s, rows[i].text + a, b - a);
                feed(&s, rows[i].text + b, n - b);
                check(&s, &rows[i], "in three");
            }
        }
    }
}

/* Random streams out of the pieces that matter, cut at random: the same as whole, at each end of a piece. */
static void test_random_streams(void **state)
{
    static const char *const pieces[] = {
        "data: ",
        "data:",
        "[DONE]",
        "event: ",
        "message_stop",
        "response.incomplete",
        "id:",
        "\n",
        "\n",
        "\r\n",
        "\r",
        "x",
        " ",
        "0123456789012345678901234567",
        ":",
    };
    unsigned seed = 3;

    (void)state;
    for (int round = 0; round < 5000; round++) {
        char text[1024];
        size_t n = 0;
        struct sse whole, cut;

        for (size_t k = 0; k < 20; k++) {
            const char *piece = pieces[(size_t)rand_r(&seed) % ARRAY_LEN(pieces)];

            memcpy(text + n, piece, strlen(piece));
            n += strlen(piece);
        }
        sse_init(&whole);
        sse_init(&cut);
        feed(&whole, text, n);
        for (size_t at = 0, part; at < n; at += part) {
            part = size_min(1 + (size_t)rand_r(&seed) % 30, n - at);
            feed(&cut, text + at, part);
        }
        if (whole.boundary != cut.boundary || whole.done != cut.done || whole.saw_id != cut.saw_id)
            fail_msg("round %d: <%.*s>", round, (int)n, text);
    }
}

/* The last word is of one event, and holds from then on. */
static void test_done_stays(void **state)
{
    struct sse s;

    (void)state;
    sse_init(&s);
    feed(&s, "event: message_stop\n", 20);
    assert_false(s.done);
    feed(&s, "\n", 1);
    assert_true(s.done);
    feed(&s, "data: after\n\n", 13);
    assert_true(s.done);
    assert_true(s.boundary);
    sse_init(&s);
    assert_false(s.done);
}

static int no_blocks(void **state)
{
    (void)state;
    return mem_live_blocks() == 0 ? 0 : -1;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_whole),
        cmocka_unit_test(test_every_split),
        cmocka_unit_test(test_random_streams),
        cmocka_unit_test(test_done_stays),
    };

    return cmocka_run_group_tests(tests, NULL, no_blocks);
}
