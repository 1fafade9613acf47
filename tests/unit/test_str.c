/*
 * test_str.c - slices and the bounded parsers, each at its borders and against a plainer way to the same answer.
 */
#include <inttypes.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#include <cmocka.h>

#include "mem.h"
#include "str.h"

static const struct slice nothing = {NULL, 0};

static void check_slice(struct slice got, const char *want)
{
    if (!slice_eq(got, slice_of(want)))
        fail_msg("<%.*s> instead of <%s>", (int)got.n, got.n == 0 ? "" : got.p, want);
}

static void test_equality(void **state)
{
    (void)state;
    assert_true(slice_eq(nothing, SLICE("")));
    assert_true(slice_eq(SLICE("a\0b"), SLICE("a\0b")));
    assert_false(slice_eq(SLICE("a\0b"), SLICE("a\0c")));
    assert_false(slice_eq(SLICE("ab"), SLICE("abc")));
    assert_true(slice_ieq(nothing, nothing));
    assert_true(slice_ieq(SLICE("Content-LENGTH"), SLICE("content-length")));
    assert_false(slice_ieq(SLICE("ab"), SLICE("abc")));
    for (int a = 0; a < 256;
         a++) { /* letters alone have two cases: '@' and '`', '[' and '{' differ by the same bit */
        for (int b = 0; b < 256; b++) {
            char x = (char)a, y = (char)b;
            bool letters = ((a | 32) >= 'a' && (a | 32) <= 'z' && a < 128) && (a ^ b) == 32;

            assert_int_equal(slice_ieq((struct slice){&x, 1}, (struct slice){&y, 1}), a == b || letters);
        }
    }
}

static void test_cuts(void **state)
{
    (void)state;
    assert_true(slice_starts_with(SLICE("abc"), nothing));
    assert_true(slice_starts_with(SLICE("abc"), SLICE("ab")));
    assert_true(slice_starts_with(SLICE("abc"), SLICE("abc")));
    assert_false(slice_starts_with(SLICE("ab"), SLICE("abc")));
    assert_false(slice_starts_with(nothing, SLICE("a")));
    assert_true(slice_ends_with(SLICE("abc"), nothing));
    assert_true(slice_ends_with(SLICE("abc"), SLICE("bc")));
    assert_true(slice_ends_with(nothing, nothing));
    assert_false(slice_ends_with(SLICE("bc"), SLICE("abc")));
    check_slice(slice_trim(SLICE(" \t a b \t")), "a b");
    check_slice(slice_trim(SLICE(" \t ")), "");
    check_slice(slice_trim(nothing), "");
    check_slice(slice_trim(SLICE("\r\na\v")), "\r\na\v"); /* OWS is SP and HTAB alone */
    assert_int_equal(slice_find(SLICE("abcb"), 'b'), 1);
    assert_int_equal(slice_find(SLICE("abc"), 'x'), 3);
    assert_int_equal(slice_find(nothing, 'x'), 0);
}

static void test_list_elements(void **state)
{
    struct slice rest = SLICE(" a ,,\tb\t, c d,"), e = nothing;
    static const char *const want[] = {"a", "", "b", "c d", ""};

    (void)state;
    for (size_t i = 0; i < ARRAY_LEN(want); i++) {
        assert_true(slice_next_element(&rest, &e));
        check_slice(e, want[i]);
    }
    assert_false(slice_next_element(&rest, &e));
    assert_false(slice_next_element(&rest, &e));
    rest = SLICE("");
    assert_true(slice_next_element(&rest, &e));
    check_slice(e, "");
    assert_false(slice_next_element(&rest, &e));
    rest = nothing;
    assert_false(slice_next_element(&rest, &e));
}

/* --- numbers ---------------------------------------------------------------------------------------------------- */

static void test_parse_u64(void **state)
{
    static const struct {
        const char *text;
        bool ok;
        uint64_t value;
    } rows[] = {
        {"0", true, 0},
        {"007", true, 7},
        {"18446744073709551615", true, UINT64_MAX},
        {"000018446744073709551615", true, UINT64_MAX},
        {"18446744073709551616", false, 0},
        {"18446744073709551619", false, 0},
        {"28446744073709551615", false, 0},
        {"184467440737095516150", false, 0},
        {"", false, 0},
        {"-1", false, 0},
        {"+1", false, 0},
        {" 1", false, 0},
        {"1 ", false, 0},
        {"0x1", false, 0},
        {"1a", false, 0},
        {"/", false, 0},
        {":", false, 0},
        {"\xb2", false, 0},
    };

    (void)state;
    for (size_t i = 0; i < ARRAY_LEN(rows); i++) {
        uint64_t v = 4711;

        if (str_parse_u64(slice_of(rows[i].text), &v) != rows[i].ok)
            fail_msg("\"%s\"", rows[i].text);
        assert_true(v == (rows[i].ok ? rows[i].value : 4711)); /* untouched on failure */
    }
    assert_false(str_parse_u64(nothing, &(uint64_t){0}));
}

static void check_unit(bool (*parse)(struct slice, uint64_t *), const char *text, bool ok, uint64_t want)
{
    uint64_t v = 0;

    if (parse(slice_of(text), &v) != ok || (ok && v != want))
        fail_msg("\"%s\": %" PRIu64, text, v);
}

static void test_durations(void **state)
{
    static const char *const bad[] = {
        "",   "5",  "00",  "ms",  "s",   "-1s", "1.5s",           "1 s",
        "1S", "1d", "1sm", "1s ", " 1s", "1us", "5124095576031h", "18446744073709551616ms"};

    (void)state;
    check_unit(str_parse_duration_ms, "0", true, 0);
    check_unit(str_parse_duration_ms, "0ms", true, 0);
    check_unit(str_parse_duration_ms, "250ms", true, 250);
    check_unit(str_parse_duration_ms, "2s", true, 2000);
    check_unit(str_parse_duration_ms, "5m", true, 300000);
    check_unit(str_parse_duration_ms, "1h", true, 3600000);
    check_unit(str_parse_duration_ms, "18446744073709551615ms", true, UINT64_MAX);
    check_unit(str_parse_duration_ms, "5124095576030h", true, 5124095576030u * 3600000u);
    for (size_t i = 0; i < ARRAY_LEN(bad); i++)
        check_unit(str_parse_duration_ms, bad[i], false, 0);
}

static void test_sizes(void **state)
{
    static const char *const bad[] = {"",   "k",    "1K",  "1kb",          "1t",
                                      "-1", "1.5m", "1 k", "17179869184g", "18446744073709551616"};

    (void)state;
    check_unit(str_parse_size, "0", true, 0);
    check_unit(str_parse_size, "17", true, 17);
    check_unit(str_parse_size, "64k", true, 65536);
    check_unit(str_parse_size, "8m", true, 8388608);
    check_unit(str_parse_size, "1g", true, 1073741824);
    check_unit(str_parse_size, "17179869183g", true, 17179869183u * 1073741824u);
    check_unit(str_parse_size, "18446744073709551615", true, UINT64_MAX);
    for (size_t i = 0; i < ARRAY_LEN(bad); i++)
        check_unit(str_parse_size, bad[i], false, 0);
}

static void check_put(uint64_t v)
{
    char got[20], want[32];
    int n = snprintf(want, sizeof(want), "%" PRIu64, v);

    assert_int_equal(str_put_u64(got, v), n);
    assert_memory_equal(got, want, n);
    n = snprintf(want, sizeof(want), "%" PRIx64, v);
    assert_int_equal(str_put_hex(got, v), n);
    assert_memory_equal(got, want, n);
}

static void test_put_numbers(void **state)
{
    uint64_t v = 1, x = 88172645463325252u;

    (void)state;
    check_put(0);
    for (int i = 0; i < 20; i++, v *= 10) {
        check_put(v - 1);
        check_put(v);
        check_put(v + 1);
    }
    for (int i = 0; i < 64; i++) {
        check_put((uint64_t)1 << i);
        check_put(((uint64_t)1 << i) - 1);
    }
    check_put(UINT64_MAX);
    for (int i = 0; i < 10000; i++) {
        x ^= x << 13, x ^= x >> 7, x ^= x << 17;
        check_put(x >> (x & 63));
    }
}

/* --- globs ------------------------------------------------------------------------------------------------------ */

/* The definition, without any thought of time. */
static bool glob_plain(struct slice p, struct slice t)
{
    if (p.n == 0)
        return t.n == 0;
    if (p.p[0] == '*')
        return glob_plain((struct slice){p.p + 1, p.n - 1}, t) ||
               (t.n > 0 && glob_plain(p, (struct slice){t.p + 1, t.n - 1}));
    return t.n > 0 && p.p[0] == t.p[0] &&
           glob_plain((struct slice){p.p + 1, p.n - 1}, (struct slice){t.p + 1, t.n - 1});
}

static void test_glob_examples(void **state)
{
    (void)state;
    assert_true(str_glob(SLICE("gpt-4o"), SLICE("gpt-4o")));
    assert_false(str_glob(SLICE("gpt-4o"), SLICE("gpt-4o-mini")));
    assert_true(str_glob(SLICE("gpt-4o-*"), SLICE("gpt-4o-mini")));
    assert_true(str_glob(SLICE("gpt-4o-*"), SLICE("gpt-4o-")));
    assert_false(str_glob(SLICE("gpt-4o-*"), SLICE("gpt-4o")));
    assert_true(str_glob(SLICE("*"), nothing));
    assert_true(str_glob(nothing, nothing));
    assert_false(str_glob(nothing, SLICE("a")));
    assert_true(str_glob(SLICE("a?[b]\\"), SLICE("a?[b]\\"))); /* nothing else is special */
    assert_false(str_glob(SLICE("a?"), SLICE("ab")));
    assert_false(str_glob(SLICE("GPT*"), SLICE("gpt-4o")));
    assert_true(str_glob(SLICE("*\0*"), SLICE("a\0b")));
}

/* Every pattern of up to 5 and every text of up to 6 bytes over a small alphabet. */
static void test_glob_is_as_defined(void **state)
{
    static const char in_pattern[] = "ab*", in_text[] = "ab";
    char p[5], t[6];

    (void)state;
    for (size_t pn = 0, pc = 1; pn <= sizeof(p); pn++, pc *= 3)
        for (size_t pi = 0; pi < pc; pi++)
            for (size_t tn = 0; tn <= sizeof(t); tn++)
                for (size_t ti = 0; ti < (size_t)1 << tn; ti++) {
                    size_t rest = pi;

                    for (size_t i = 0; i < pn; i++, rest /= 3)
                        p[i] = in_pattern[rest % 3];
                    for (size_t i = 0; i < tn; i++)
                        t[i] = in_text[ti >> i & 1];
                    if (str_glob((struct slice){p, pn}, (struct slice){t, tn}) !=
                        glob_plain((struct slice){p, pn}, (struct slice){t, tn}))
                        fail_msg("%.*s on %.*s", (int)pn, p, (int)tn, t);
                }
}

/* What takes a backtracking matcher years: here at most pattern x text steps. */
static void test_glob_stays_linear(void **state)
{
    static char pattern[2001], text[4096];

    (void)state;
    for (size_t i = 0; i < 2000; i += 2) {
        pattern[i] = '*';
        pattern[i + 1] = 'a';
    }
    pattern[2000] = 'b';
    memset(text, 'a', sizeof(text));
    assert_false(str_glob((struct slice){pattern, sizeof(pattern)}, (struct slice){text, sizeof(text)}));
    text[sizeof(text) - 1] = 'b';
    assert_true(str_glob((struct slice){pattern, sizeof(pattern)}, (struct slice){text, sizeof(text)}));
}

static int no_blocks(void **state)
{
    (void)state;
    return mem_live_blocks() == 0 ? 0 : -1;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_equality),           cmocka_unit_test(test_cuts),
        cmocka_unit_test(test_list_elements),      cmocka_unit_test(test_parse_u64),
        cmocka_unit_test(test_durations),          cmocka_unit_test(test_sizes),
        cmocka_unit_test(test_put_numbers),        cmocka_unit_test(test_glob_examples),
        cmocka_unit_test(test_glob_is_as_defined), cmocka_unit_test(test_glob_stays_linear),
    };

    return cmocka_run_group_tests(tests, NULL, no_blocks);
}
