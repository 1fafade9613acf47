/*
 * test_scan.c - the JSON scan: each row of cases/http.md about finding the
 * model in JSON, every split of every text in the table, the block masks
 * against the obvious loop, and random texts against tests/fuzz/scan_reference.h.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "../fuzz/scan_reference.h"
#include "mem.h"
#include "scanblock.h"

#include <stdio.h>

/* A slice of a literal, NULs in it included, for tables. */
#define TEXT(literal)                                                                                        \
    {                                                                                                        \
        (literal), sizeof(literal) - 1                                                                       \
    }

struct answer {
    enum bodyscan_verdict verdict;
    enum bodyscan_error error;
    char model[MODEL_NAME_MAX + 1];
    size_t model_n;
};

static struct answer answer_of(const struct scan *s, enum bodyscan_verdict v)
{
    struct answer a = {v, scan_error(s), "", scan_model(s).n};

    if (a.model_n > 0)
        memcpy(a.model, scan_model(s).p, a.model_n);
    return a;
}

/* Scans text in pieces of `piece` bytes, the first one of `first`. */
static struct answer scan_pieces(enum scan_mode mode, struct slice text, size_t first, size_t piece)
{
    struct scan s;
    size_t at = size_min(first, text.n);

    scan_init(&s, mode);
    (void)scan_feed(&s, text.p, at);
    while (at < text.n) {
        size_t n = size_min(piece, text.n - at);

        (void)scan_feed(&s, text.p + at, n);
        at += n;
    }
    return answer_of(&s, scan_end(&s));
}

static void assert_same(struct answer a, struct answer b)
{
    assert_int_equal(a.verdict, b.verdict);
    assert_int_equal(a.error, b.error);
    assert_int_equal(a.model_n, b.model_n);
    assert_memory_equal(a.model, b.model, a.model_n);
}

/* H073 for any text: whole, in two at every place, in pieces of every small size. */
static struct answer scan_all_splits(enum scan_mode mode, struct slice text)
{
    struct answer whole = scan_pieces(mode, text, text.n, text.n);

    for (size_t first = 0; first <= text.n; first++)
        assert_same(whole, scan_pieces(mode, text, first, text.n));
    for (size_t piece = 1; piece <= 70; piece++)
        assert_same(whole, scan_pieces(mode, text, 0, piece));
    return whole;
}

static void expect_found(struct slice text, struct slice model)
{
    struct answer a = scan_all_splits(SCAN_JSON, text);

    assert_int_equal(a.verdict, BODYSCAN_FOUND);
    assert_int_equal(a.model_n, model.n);
    assert_memory_equal(a.model, model.p, model.n);
    assert_same(a, scan_all_splits(SCAN_SNIFF, text));
}

static void expect_bad(struct slice text, enum bodyscan_error e)
{
    struct answer a = scan_all_splits(SCAN_JSON, text);

    assert_int_equal(a.verdict, BODYSCAN_BAD);
    assert_int_equal(a.error, e);
    assert_int_equal(a.model_n == 0 || e == BODYSCAN_E_BODY_MALFORMED || e == BODYSCAN_E_MODEL_DUPLICATE ||
                         e == BODYSCAN_E_MODEL_AMBIGUOUS || e == BODYSCAN_E_BODY_TOO_DEEP,
                     1);
}

static void expect_none(struct slice text)
{
    assert_int_equal(scan_all_splits(SCAN_JSON, text).verdict, BODYSCAN_NONE);
}

/* open, then unit as often as it fits in n bytes, then close. Owner: the caller, mem_free. */
static struct slice repeated(struct slice open, struct slice unit, size_t n, struct slice close)
{
    char *p = mem_must_zalloc(open.n + n + close.n + unit.n);
    size_t at = open.n;

    memcpy(p, open.p, open.n);
    for (; at < open.n + n; at += unit.n)
        memcpy(p + at, unit.p, unit.n);
    memcpy(p + at, close.p, close.n);
    return (struct slice){p, at + close.n};
}

static void free_slice(struct slice s)
{
    mem_free((void *)(uintptr_t)s.p);
}

static void test_H061_model_after_8_mib_of_messages(void **state)
{
    struct slice units[] = {SLICE("plain text of a message. "), SLICE("a\\n"), SLICE("\\\""), SLICE("\\\\"),
                            SLICE("\xe6\x97\xa5")};

    (void)state;
    for (size_t i = 0; i < ARRAY_LEN(units); i++) {
        struct slice text = repeated(SLICE("{\"messages\":[{\"role\":\"user\",\"content\":\""), units[i],
                                     8 << 20, SLICE("\"}],\"model\":\"gpt-4o\"}"));
        size_t sizes[] = {text.n, 65536, 4095, 63};

        for (size_t k = 0; k < ARRAY_LEN(sizes); k++) {
            struct answer a = scan_pieces(SCAN_JSON, text, 0, sizes[k]);

            assert_int_equal(a.verdict, BODYSCAN_FOUND);
            assert_string_equal(a.model, "gpt-4o");
        }
        free_slice(text);
    }
}

static void test_H061_found_is_told_before_the_end(void **state)
{
    struct scan s;

    (void)state;
    scan_init(&s, SCAN_JSON);
    assert_int_equal(scan_feed(&s, "{\"model\":\"a", 11), BODYSCAN_MORE);
    assert_int_equal(scan_model(&s).n, 0);
    assert_int_equal(scan_feed(&s, "\"", 1), BODYSCAN_FOUND);
    assert_true(slice_eq(scan_model(&s), SLICE("a")));
    assert_int_equal(scan_feed(&s, ",\"model\"", 8), BODYSCAN_BAD);
    assert_int_equal(scan_feed(&s, ":1}", 3), BODYSCAN_BAD);
    assert_int_equal(scan_end(&s), BODYSCAN_BAD);
    assert_int_equal(scan_error(&s), BODYSCAN_E_MODEL_DUPLICATE);
}

static void test_H062_only_depth_1_counts(void **state)
{
    (void)state;
    expect_found(SLICE("{\"messages\":[{\"model\":\"inner\"}],\"model\":\"outer\"}"), SLICE("outer"));
    expect_found(SLICE("{\"metadata\":{\"model\":\"inner\",\"m\":{\"model\":1}},\"model\":\"outer\"}"),
                 SLICE("outer"));
    expect_found(SLICE("{\"model\":\"outer\",\"tools\":[[{\"model\":\"inner\"}]]}"), SLICE("outer"));
    expect_found(SLICE("{\"a\":\"\\\",\\\"model\\\":\\\"no\",\"model\":\"yes\"}"), SLICE("yes"));
    expect_found(SLICE("{\"a\":\"}\",\"b\":[\"]\",\"{\",\"\\\\\"],\"model\":\"yes\"}"), SLICE("yes"));
    expect_found(SLICE("{\"x\":\"model\",\"model\":\"yes\"}"), SLICE("yes"));
    expect_none(SLICE("{\"response_format\":{\"model\":\"inner\"}}"));
    expect_none(SLICE("{\"a\":\"model\",\"b\":[\"model\",\"x\"]}"));
}

static void test_H063_keys_are_unescaped(void **state)
{
    (void)state;
    expect_found(SLICE("{\"\\u006dodel\":\"x\"}"), SLICE("x"));
    expect_found(SLICE("{\"m\\u006Fdel\":\"x\"}"), SLICE("x"));
    expect_found(SLICE("{\"\\u006d\\u006f\\u0064\\u0065\\u006c\":\"x\"}"), SLICE("x"));
    expect_none(SLICE("{\"\\u016dodel\":\"x\"}"));
    expect_none(SLICE("{\"\\\\u006dodel\":\"x\"}"));
    expect_none(SLICE("{\"model\\n\":\"x\"}"));
    expect_none(SLICE("{\"model \":\"x\"}"));
    expect_none(SLICE("{\"mode\":\"x\",\"models\":\"y\",\"\":\"z\",\"mmodel\":\"q\"}"));
    expect_none(SLICE("{\"x\\q\\u00\":\"of no concern\"}"));
    /* no escapes: a lenient reader may still see the word */
    expect_bad(SLICE("{\"\\model\":\"x\"}"), BODYSCAN_E_BODY_MALFORMED);
    expect_bad(SLICE("{\"m\\u06gdel\":\"x\"}"), BODYSCAN_E_BODY_MALFORMED);
    expect_bad(SLICE("{\"mode\\x6c\":\"x\"}"), BODYSCAN_E_BODY_MALFORMED);
}

static void test_H064_model_twice(void **state)
{
    (void)state;
    expect_bad(SLICE("{\"model\":\"cheap\",\"model\":\"dear\"}"), BODYSCAN_E_MODEL_DUPLICATE);
    expect_bad(SLICE("{\"model\":\"same\",\"a\":1,\"model\":\"same\"}"), BODYSCAN_E_MODEL_DUPLICATE);
    expect_bad(SLICE("{\"model\":\"cheap\",\"\\u006dodel\":\"dear\"}"), BODYSCAN_E_MODEL_DUPLICATE);
    expect_bad(SLICE("{\"mod\\u0065l\":\"cheap\",\"messages\":[],\"model\":null}"),
               BODYSCAN_E_MODEL_DUPLICATE);
}

static void test_H065_model_in_another_case(void **state)
{
    (void)state;
    expect_none(SLICE("{\"Model\":\"x\"}"));
    expect_none(SLICE("{\"MODEL\":\"x\",\"moDel\":1}"));
    expect_bad(SLICE("{\"model\":\"a\",\"Model\":\"b\"}"), BODYSCAN_E_MODEL_AMBIGUOUS);
    expect_bad(SLICE("{\"MODEL\":\"b\",\"model\":\"a\"}"), BODYSCAN_E_MODEL_AMBIGUOUS);
    expect_bad(SLICE("{\"\\u004dodel\":\"b\",\"model\":\"a\"}"), BODYSCAN_E_MODEL_AMBIGUOUS);
    expect_found(SLICE("{\"model\":\"a\",\"x\":{\"Model\":\"b\"}}"), SLICE("a"));
}

static void test_H065_model_cut_by_nul(void **state)
{
    (void)state;
    expect_none(SLICE("{\"model\\u0000\":\"b\"}"));
    expect_none(SLICE("{\"model\0x\":\"b\"}"));
    expect_bad(SLICE("{\"model\\u0000\":\"b\",\"model\":\"a\"}"), BODYSCAN_E_MODEL_AMBIGUOUS);
    expect_bad(SLICE("{\"model\":\"a\",\"model\0x\":\"b\"}"), BODYSCAN_E_MODEL_AMBIGUOUS);
}

static void test_H067_value_is_unescaped(void **state)
{
    (void)state;
    expect_found(SLICE("{\"model\":\"gpt\\u002d4o\"}"), SLICE("gpt-4o"));
    expect_found(SLICE("{\"model\":\"a\\/b\\\\c\\\"d{x}:\"}"), SLICE("a/b\\c\"d{x}:"));
    expect_found(SLICE("{\"model\":\"\\u00e9\\u65E5\\uD83D\\uDE00\"}"),
                 SLICE("\xc3\xa9\xe6\x97\xa5\xf0\x9f\x98\x80"));
    expect_found(SLICE("{\"model\":\"\xc3\xa9\xf4\x8f\xbf\xbf\xed\x9f\xbf\xee\x80\x80\xc2\xa0\"}"),
                 SLICE("\xc3\xa9\xf4\x8f\xbf\xbf\xed\x9f\xbf\xee\x80\x80\xc2\xa0"));
    expect_found(SLICE("{\"model\" : \t\"x\"\r\n}"), SLICE("x"));
}

static void test_H067_value_that_cannot_be_a_name(void **state)
{
    static const struct slice values[] = {
        TEXT("\\u0000"),
        TEXT("a\\nb"),
        TEXT("\\u001f"),
        TEXT("\\u007f"),
        TEXT("\\u0085"),
        TEXT("a\nb"),
        TEXT("\0"),
        TEXT("\x7f"),
        TEXT("\xc2\x85"),
        TEXT("\\ud800"),
        TEXT("\\udc00"),
        TEXT("\\ud800x"),
        TEXT("\\ud800\\n"),
        TEXT("\\ud800\\u0041"),
        TEXT("\\ud800\\ud800"),
        TEXT("\\ud800\\/\\udc00"),
        TEXT("\\ud800x\\udc00"),
        TEXT("\xe6\\u65e5"),
        TEXT("\x80"),
        TEXT("\xc3"),
        TEXT("\xc3x"),
        TEXT("\xc0\xaf"),
        TEXT("\xe0\x80\xaf"),
        TEXT("\xed\xa0\x80"),
        TEXT("\xf0\x80\x80\xaf"),
        TEXT("\xf4\x90\x80\x80"),
        TEXT("\xf5\x80\x80\x80"),
        TEXT("\xff"),
        TEXT("\xe6\x97\\u0061"),
        TEXT("\\q"),
        TEXT("\\u12g4"),
        TEXT("\\x41"),
    };

    (void)state;
    for (size_t i = 0; i < ARRAY_LEN(values); i++) {
        char text[64];
        size_t n = 0;

        memcpy(text, "{\"model\":\"", 10);
        memcpy(text + 10, values[i].p, values[i].n);
        n = 10 + values[i].n;
        memcpy(text + n, "\"}", 2);
        expect_bad((struct slice){text, n + 2}, BODYSCAN_E_MODEL_INVALID);
    }
    expect_bad(SLICE("{\"model\":\"\"}"), BODYSCAN_E_MODEL_EMPTY);
}

static void test_H067_value_too_long(void **state)
{
    struct slice fits = repeated(SLICE("{\"model\":\""), SLICE("m"), 256, SLICE("\"}"));
    struct slice over = repeated(SLICE("{\"model\":\""), SLICE("m"), 257, SLICE("\"}"));
    struct slice escaped = repeated(SLICE("{\"model\":\""), SLICE("\\u65e5"), 86 * 6, SLICE("\"}"));
    struct slice huge = repeated(SLICE("{\"model\":\""), SLICE("m"), 1 << 20, SLICE("\"}"));

    (void)state;
    assert_int_equal(scan_all_splits(SCAN_JSON, fits).model_n, 256);
    expect_bad(over, BODYSCAN_E_MODEL_TOO_LONG);
    expect_bad(escaped, BODYSCAN_E_MODEL_TOO_LONG);
    assert_int_equal(scan_pieces(SCAN_JSON, huge, 0, 4096).error, BODYSCAN_E_MODEL_TOO_LONG);
    free_slice(fits);
    free_slice(over);
    free_slice(escaped);
    free_slice(huge);
}

static void test_value_is_not_a_string(void **state)
{
    (void)state;
    expect_bad(SLICE("{\"model\":null}"), BODYSCAN_E_MODEL_NOT_STRING);
    expect_bad(SLICE("{\"model\":4}"), BODYSCAN_E_MODEL_NOT_STRING);
    expect_bad(SLICE("{\"model\":-1}"), BODYSCAN_E_MODEL_NOT_STRING);
    expect_bad(SLICE("{\"model\":[\"a\"]}"), BODYSCAN_E_MODEL_NOT_STRING);
    expect_bad(SLICE("{\"model\": {\"model\":\"a\"}}"), BODYSCAN_E_MODEL_NOT_STRING);
    expect_bad(SLICE("{\"model\":'a'}"), BODYSCAN_E_BODY_MALFORMED);
    expect_bad(SLICE("{\"model\":}"), BODYSCAN_E_BODY_MALFORMED);
}

static void test_H068_byte_order_mark(void **state)
{
    (void)state;
    expect_found(SLICE("\xef\xbb\xbf{\"model\":\"x\"}"), SLICE("x"));
    expect_found(SLICE("\xef\xbb\xbf \n{\"model\":\"x\"}"), SLICE("x"));
    expect_none(SLICE("\xef\xbb\xbf"));
    expect_bad(SLICE(" \xef\xbb\xbf{}"), BODYSCAN_E_BODY_MALFORMED);
    expect_bad(SLICE("\xef\xbb{}"), BODYSCAN_E_BODY_MALFORMED);
    expect_bad(SLICE("\xef"), BODYSCAN_E_BODY_MALFORMED);
    expect_bad(SLICE("\xef\xbb\xbf\xef\xbb\xbf{}"), BODYSCAN_E_BODY_MALFORMED);
}

static void test_H069_utf16_and_utf32(void **state)
{
    static const struct slice texts[] = {
        TEXT("\xff\xfe{\0\"\0m\0"),  TEXT("\xfe\xff\0{\0\"\0m"),  TEXT("{\0\"\0m\0"),
        TEXT("\0{\0\"\0m"),          TEXT("{\0\0\0\"\0\0\0"),     TEXT("\0\0\0{\0\0\0\""),
        TEXT("\xff\xfe\0\0{\0\0\0"), TEXT("\0\0\xfe\xff\0\0\0{"), TEXT(" \0{\0\"\0"),
    };

    (void)state;
    for (size_t i = 0; i < ARRAY_LEN(texts); i++) {
        expect_bad(texts[i], BODYSCAN_E_BODY_ENCODING);
        assert_int_equal(scan_all_splits(SCAN_SNIFF, texts[i]).error, BODYSCAN_E_BODY_ENCODING);
    }
}

static void test_H070_bad_bytes_elsewhere_are_ignored(void **state)
{
    (void)state;
    expect_found(SLICE("{\"messages\":[\"\xff\xfe\x80\x01\n\0\xed\xa0\x80\"],\"model\":\"x\"}"), SLICE("x"));
    expect_found(SLICE("{\"a\":\"\xc3\n\0\",\"model\":\"x\"}"), SLICE("x"));
    expect_found(SLICE("{\"a\xff\":\"\\q\\ud800\",\"model\":\"x\",\"\xed\xa0\x80\":0}"), SLICE("x"));
}

static void test_H071_depth(void **state)
{
    struct slice arrays = repeated(SLICE("{\"a\":"), SLICE("["), 100000, SLICE(""));
    struct slice objects = repeated(SLICE("{\"a\":"), SLICE("{\"a\":"), 500000, SLICE(""));
    struct slice bare = repeated(SLICE(""), SLICE("["), 100000, SLICE(""));

    (void)state;
    assert_int_equal(scan_pieces(SCAN_JSON, arrays, 0, 4096).error, BODYSCAN_E_BODY_TOO_DEEP);
    assert_int_equal(scan_pieces(SCAN_JSON, arrays, 0, 1).error, BODYSCAN_E_BODY_TOO_DEEP);
    assert_int_equal(scan_pieces(SCAN_JSON, objects, 0, 4096).error, BODYSCAN_E_BODY_TOO_DEEP);
    assert_int_equal(scan_pieces(SCAN_JSON, bare, 0, 4096).verdict, BODYSCAN_NONE);
    free_slice(arrays);
    free_slice(objects);
    free_slice(bare);
    for (size_t deep = 1022; deep <= 1024; deep++) { /* beside the top level itself */
        struct slice open = repeated(SLICE("{\"a\":"), SLICE("["), deep, SLICE(""));
        struct slice text = repeated(open, SLICE("]"), deep, SLICE(",\"model\":\"x\"}"));
        struct answer a = scan_pieces(SCAN_JSON, text, 0, 100);

        assert_int_equal(a.verdict, deep < SCAN_DEPTH_MAX ? BODYSCAN_FOUND : BODYSCAN_BAD);
        assert_int_equal(a.error, deep < SCAN_DEPTH_MAX ? BODYSCAN_E_OK : BODYSCAN_E_BODY_TOO_DEEP);
        free_slice(open);
        free_slice(text);
    }
}

static void test_H073_every_split_of_a_long_body(void **state)
{
    struct slice text = SLICE(
        "\xef\xbb\xbf { \"messages\" : [ { \"role\" : \"user\", \"content\" : \"\\\\\\\" \xe6\x97\xa5 "
        "\\ud83d\\ude00 and on and on, "
        "until there is more than one block of it \\\\\" }, [1, -2.5e+3, true, null, {}, [ ]] ],\n"
        "\t\"temperature\": 0.5, \"\\u0073tream\": true, \"input\": \"a string of the top level, "
        "\\\"long\\\" "
        "enough to be skipped by blocks, with model inside\\\\\",\"mod\\u0065l\" : "
        "\"gpt\\u002d4o-\xc3\xa9\", \"n\":1}\r\n");

    (void)state;
    expect_found(text, SLICE("gpt-4o-\xc3\xa9"));
    for (size_t cut = 0; cut < text.n;
         cut++) { /* every prefix, too: a cut body is never taken for a whole one */
        struct answer a = scan_all_splits(SCAN_JSON, (struct slice){text.p, cut});

        if (cut <= 4)
            assert_int_not_equal(a.verdict, BODYSCAN_FOUND);
        else if (cut < text.n - 2)
            assert_int_equal(a.error, BODYSCAN_E_BODY_MALFORMED);
    }
}

static void test_not_an_object(void **state)
{
    static const char *const texts[] = {"",     " \r\n", "[]",  "[{\"model\":\"x\"}]", "\"model\"", "-1", "0",
                                        "true", "false", "null"};

    (void)state;
    for (size_t i = 0; i < ARRAY_LEN(texts); i++) {
        struct scan s;

        expect_none(slice_of(texts[i]));
        scan_init(&s, SCAN_JSON);
        (void)scan_feed(&s, texts[i], strlen(texts[i]));
        assert_int_equal(scan_end(&s), BODYSCAN_NONE);
        assert_false(scan_is_object(&s));
    }
    expect_none(SLICE("{}"));
    expect_none(SLICE("{ }"));
}

static void test_sniffing_leaves_other_bytes_alone(void **state)
{
    static const struct slice texts[] = {TEXT("model=gpt-4o"),
                                         TEXT("--boundary\r\n"),
                                         TEXT("RIFF\x24\0\0\0WAVE"),
                                         TEXT("\0\0\0 ftypisom"),
                                         TEXT("\xff\xfb\x90{"),
                                         TEXT("\xef\xbb\xbfhello {"),
                                         TEXT(""),
                                         TEXT("[1]"),
                                         TEXT("/* { */")};

    (void)state;
    for (size_t i = 0; i < ARRAY_LEN(texts); i++)
        assert_int_equal(scan_all_splits(SCAN_SNIFF, texts[i]).verdict, BODYSCAN_NONE);
}

/* Structure that readers see differently, or none accepts. The names are those of JSONTestSuite. */
static void test_malformed_structure(void **state)
{
    static const struct slice texts[] = {
        TEXT("{"),
        TEXT("{\"model\""),
        TEXT("{\"model\":"),
        TEXT("{\"model\":\"x\""),
        TEXT("{\"model\":\"x"),
        TEXT("{\"model\":\"x\",}"), /* n_object_trailing_comma */
        TEXT("{,\"model\":\"x\"}"),
        TEXT("{\"a\":1,,\"model\":\"x\"}"), /* n_object_two_commas_in_a_row */
        TEXT("{\"model\":\"x\"}}"),
        TEXT("{\"model\":\"x\"}#"), /* n_object_trailing_comment */
        TEXT("{\"model\":\"x\"}/**/"),
        TEXT("{\"model\":\"x\"}\0"),
        TEXT("{\"model\":\"x\"}{\"model\":\"y\"}"), /* n_structure_double_array */
        TEXT("{\"model\":\"x\"} \"y\""),
        TEXT("{\"model\":\"x\" \"a\":1}"),
        TEXT("{\"model\" \"x\"}"),  /* n_object_missing_colon */
        TEXT("{\"model\"::\"x\"}"), /* n_object_double_colon */
        TEXT("{model:\"x\"}"),      /* n_object_unquoted_key */
        TEXT("{'model':\"x\"}"),    /* n_object_single_quote */
        TEXT("{1:1}"),              /* n_object_non_string_key */
        TEXT("{/**/\"model\":\"x\"}"),
        TEXT("{\"model\":/**/\"x\"}"),
        TEXT("{\"a\":1/**/,\"model\":\"x\"}"),
        TEXT("{\"a\":[1}"),
        TEXT("{\"a\":[1},\"model\":\"x\"}"),
        TEXT("{\"a\":{1]}"),
        TEXT("{\"a\":[{]}]}"),
        TEXT("{\"a\":]"),
        TEXT("{]"),
        TEXT("{\"a\":[/*\"*/],\"model\":\"x\"}"),
        TEXT("{\"a\":['\"'],\"model\":\"x\"}"),
        TEXT("{\"a\":[#\"\n],\"model\":\"x\"}"),
        TEXT("{\"a\":[\\\"],\"model\":\"x\"}"),
        TEXT("{\"a\":[\xc2\xa0]}"),
        TEXT("{\"a\":[\v]}"),
        TEXT("{\"a\":\xc2\xa0}"),
        TEXT("{\"a\":'x'}"),
        TEXT("{\"a\":\"x\"\0}"),
        TEXT("\v{}"),
        TEXT("'x'"),
        TEXT("// c\n{}"),
        TEXT("}"),
        TEXT("\xc2\xa0{}"),
    };

    (void)state;
    for (size_t i = 0; i < ARRAY_LEN(texts); i++)
        expect_bad(texts[i], BODYSCAN_E_BODY_MALFORMED);
}

/* The same texts with a block and more of padding before the fault, so that the masks meet it. */
static void test_malformed_structure_in_blocks(void **state)
{
    static const char *const faults[] = {"/* \" */", "'\"'", "\\\"", "#", "}", "\xc2\xa0", "\v", "]}]"};

    (void)state;
    for (size_t i = 0; i < ARRAY_LEN(faults); i++) {
        for (size_t pad = 0; pad < 140; pad++) {
            struct slice open = repeated(SLICE("{\"a\":[0"), SLICE(" "), pad, slice_of(faults[i]));
            struct slice text = repeated(open, SLICE(","), 150, SLICE("\"],\"model\":\"x\"}"));
            struct answer a = scan_pieces(SCAN_JSON, text, text.n, text.n);

            assert_int_equal(a.error, BODYSCAN_E_BODY_MALFORMED);
            assert_same(a, scan_pieces(SCAN_JSON, text, 0, 1));
            free_slice(open);
            free_slice(text);
        }
    }
}

/* An escape ends a block, the next one holds nothing, the one after begins with a quote: all meet here. */
static void test_escape_across_blocks(void **state)
{
    static const char *const opens[] = {"{\"a\":[\"", "{\"a\":\"", "{\"", "{\"k\":\"\",\"a\":\""};
    static const char *const closes[] = {"\"],", "\",", "\":1,", "\","};

    (void)state;
    for (size_t i = 0; i < ARRAY_LEN(opens); i++) {
        for (size_t pad = 0; pad < 66; pad++) {
            for (size_t gap = 0; gap < 140; gap += gap < 60 ? 20 : 1) {
                struct slice head = repeated(slice_of(opens[i]), SLICE("x"), pad, SLICE("\\n"));
                struct slice middle = repeated(head, SLICE("y"), gap, slice_of(closes[i]));
                struct slice text = repeated(middle, SLICE(" "), 130, SLICE("\"model\":\"m\"}"));

                assert_string_equal(scan_pieces(SCAN_JSON, text, text.n, text.n).model, "m");
                free_slice(head);
                free_slice(middle);
                free_slice(text);
            }
        }
    }
}

static void test_tolerated_as_no_reader_differs(void **state)
{
    (void)state;
    expect_found(SLICE("{\"a\":NaN,\"b\":[-Infinity,+1.e,tru],\"model\":\"x\"}"), SLICE("x"));
    expect_found(SLICE("{\"a\":[1 2,,3:4 \"b\" \"c\"],\"model\":\"x\"}"), SLICE("x"));
    expect_found(SLICE("{\"a\":1,\"a\":2,\"model\":\"x\"}"),
                 SLICE("x")); /* y_object_duplicated_key, of no concern */
}

/* ---- masks and random texts ---- */

static uint64_t random_state = 88172645463325252ULL;

static uint32_t random_below(uint32_t n)
{
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return (uint32_t)((random_state >> 32) % n);
}

static void test_block_masks_agree_with_the_loop(void **state)
{
    static const char alphabet[] = "{}[]\"\\,:/' \t\n\r\v09az AZ\x7f\x80\xff\xdb\xdd@`^~|";

    (void)state;
    for (int round = 0; round < 20000; round++) {
        uint8_t p[BLOCK_BYTES];
        uint64_t quote = 0, bracket = 0, foreign = 0;

        for (size_t i = 0; i < BLOCK_BYTES; i++) {
            p[i] = round % 2 == 0 ? (uint8_t)random_below(256)
                                  : (uint8_t)alphabet[random_below(sizeof(alphabet))];
            quote |= (uint64_t)(p[i] == '"') << i;
            bracket |= (uint64_t)(p[i] == '{' || p[i] == '}' || p[i] == '[' || p[i] == ']') << i;
            foreign |= (uint64_t)(json_class(p[i]) == 0) << i;
        }
        assert_true(block_eq_words(p, '"') == quote && block_eq(p, '"') == quote);
        assert_true(block_brackets_words(p) == bracket && block_brackets(p) == bracket);
        assert_true(block_foreign_words(p) == foreign && block_foreign(p) == foreign);
        assert_true(block_has_either_words(p, '"', '"') == (quote != 0));
        assert_true(block_has_either(p, '"', '"') == (quote != 0));
    }
}

static void test_escape_masks_agree_with_the_loop(void **state)
{
    bool carry = false, slow_carry = false;

    (void)state;
    for (int round = 0; round < 200000; round++) {
        uint32_t density = 1 + random_below(8);
        uint64_t backslash = 0, quote = 0, expected = 0, got;

        for (unsigned i = 0; i < 64; i++) {
            bool is_backslash = round % 16 == 0 || random_below(8) >= density;

            backslash |= (uint64_t)is_backslash << i;
            quote |= (uint64_t)!is_backslash << i;
            expected |= (uint64_t)slow_carry << i;
            slow_carry = is_backslash && !slow_carry;
        }
        got = block_escaped(backslash, &carry);
        assert_true((got & quote) == (expected & quote));
        assert_true(carry == slow_carry);
    }
}

static size_t random_text(char *out, size_t size)
{
    static const char *const tokens[] = {
        "{",
        "}",
        "[",
        "]",
        "\"",
        ",",
        ":",
        "\\",
        "\"model\"",
        "\"model\":",
        "\"Model\":",
        "\"a\":",
        "\"x\"",
        "\\\"",
        "\\\\",
        "\\u006d",
        "\\ud83d\\ude00",
        "\\u0000",
        "\"\\u006dodel\":",
        "1",
        "true",
        " ",
        "\n",
        "\xc3\xa9",
        "\xff",
        "/",
        "'",
        "\"a\":{",
        "\"a\":[",
        "},",
        "],",
        "\"x\",",
        "\"model\":\"x\"",
        "\"b\":\"                                        ",
        "the quick brown fox jumps over the lazy dog and so on and on and on and on and on",
        "\x00"};
    size_t n = 0;
    uint32_t count = random_below(40);

    if (random_below(8) != 0)
        out[n++] = '{';
    for (uint32_t i = 0; i < count; i++) {
        const char *token = tokens[random_below(ARRAY_LEN(tokens))];
        size_t length = size_max(strlen(token), 1);

        if (n + length >= size)
            break;
        memcpy(out + n, token, length);
        n += length;
    }
    if (random_below(3) == 0)
        out[n++] = '}';
    return n;
}

/* A well-formed object with a few of its bytes changed or none. */
static size_t random_object(char *out, size_t size)
{
    static const char *const members[] = {
        "\"messages\":[{\"role\":\"user\",\"content\":\"Hello, \\\"you\\\", some text \\n\"}]",
        "\"stream\":true",
        "\"temperature\":0.7",
        "\"metadata\":{\"model\":\"inner\",\"k\":[1,2,{}]}",
        "\"model\":\"gpt-4o\"",
        "\"\\u006dodel\":\"b\"",
        "\"MODEL\":\"c\"",
        "\"input\":\"a long string at the top level of the object, \\\\ over 64\"",
        "\"tools\":[[],[[]],{\"a\":{\"b\":[]}}]",
        "\"x\\\\\":null"};
    size_t n = 0;
    uint32_t count = random_below(6), faults = random_below(3);

    out[n++] = '{';
    for (uint32_t i = 0; i < count; i++) {
        const char *member = members[random_below(ARRAY_LEN(members))];
        size_t length = strlen(member);

        if (n + length + 3 >= size)
            break;
        if (i > 0)
            out[n++] = ',';
        memcpy(out + n, member, length);
        n += length;
    }
    out[n++] = '}';
    for (uint32_t i = 0; i < faults; i++)
        out[random_below((uint32_t)n)] = "{}[]\"\\,:m \n/"[random_below(12)];
    return n;
}

static void test_random_texts_against_the_reference(void **state)
{
    char text[2048];
    size_t seen[4] = {0, 0, 0, 0};

    (void)state;
    for (int round = 0; round < 400000; round++) {
        size_t n = round % 2 == 0 ? random_text(text, sizeof(text) - 2)
                                  : random_object(text, sizeof(text) - 2);
        enum scan_mode mode = random_below(4) == 0 ? SCAN_SNIFF : SCAN_JSON;
        struct reference r;
        struct scan s;
        enum bodyscan_verdict expected = reference_scan(&r, mode, text, n), got;
        size_t at = 0;

        scan_init(&s, mode);
        while (at < n) {
            size_t piece = size_min(n - at, 1 + random_below(round % 3 == 0 ? 5 : 500));

            (void)scan_feed(&s, text + at, piece);
            at += piece;
        }
        got = scan_end(&s);
        if (!reference_agrees(&r, expected, &s, got)) {
            print_error("differs from the reference (%d, %d): %.*s\n", (int)expected, (int)r.error, (int)n,
                        text);
            fail();
        }
        seen[got]++;
    }
    /* The test is worth something only when all answers occur. */
    assert_true(seen[BODYSCAN_FOUND] > 1000 && seen[BODYSCAN_NONE] > 1000 && seen[BODYSCAN_BAD] > 1000);
}

static void test_nothing_is_allocated(void **state)
{
    (void)state;
    assert_int_equal(mem_live_blocks(), 0);
    assert_true(sizeof(struct scan) <= 512);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_H061_model_after_8_mib_of_messages),
        cmocka_unit_test(test_H061_found_is_told_before_the_end),
        cmocka_unit_test(test_H062_only_depth_1_counts),
        cmocka_unit_test(test_H063_keys_are_unescaped),
        cmocka_unit_test(test_H064_model_twice),
        cmocka_unit_test(test_H065_model_in_another_case),
        cmocka_unit_test(test_H065_model_cut_by_nul),
        cmocka_unit_test(test_H067_value_is_unescaped),
        cmocka_unit_test(test_H067_value_that_cannot_be_a_name),
        cmocka_unit_test(test_H067_value_too_long),
        cmocka_unit_test(test_value_is_not_a_string),
        cmocka_unit_test(test_H068_byte_order_mark),
        cmocka_unit_test(test_H069_utf16_and_utf32),
        cmocka_unit_test(test_H070_bad_bytes_elsewhere_are_ignored),
        cmocka_unit_test(test_H071_depth),
        cmocka_unit_test(test_H073_every_split_of_a_long_body),
        cmocka_unit_test(test_not_an_object),
        cmocka_unit_test(test_sniffing_leaves_other_bytes_alone),
        cmocka_unit_test(test_malformed_structure),
        cmocka_unit_test(test_malformed_structure_in_blocks),
        cmocka_unit_test(test_escape_across_blocks),
        cmocka_unit_test(test_tolerated_as_no_reader_differs),
        cmocka_unit_test(test_block_masks_agree_with_the_loop),
        cmocka_unit_test(test_escape_masks_agree_with_the_loop),
        cmocka_unit_test(test_random_texts_against_the_reference),
        cmocka_unit_test(test_nothing_is_allocated),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
