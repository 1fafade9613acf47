/*
 * test_outcome.c - the table of ends: what the log, the metrics and the client rely on in every row.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "outcome.h"

/* Fit for a metric label, a header and a log field without quotes. */
static void check_word(const char *w)
{
    assert_non_null(w);
    assert_true(w[0] >= 'a' && w[0] <= 'z');
    for (const char *p = w; *p != '\0'; p++)
        if (!(*p >= 'a' && *p <= 'z') && *p != '_')
            fail_msg("<%s>", w);
}

static void test_every_row(void **state)
{
    (void)state;
    for (unsigned o = 0; o < OUTCOME_COUNT; o++) {
        const struct outcome_info *i = outcome_info((enum outcome)o);

        check_word(i->word);
        check_word(outcome_who_word((enum outcome_who)i->who));
        assert_non_null(i->message);
        if (i->status == 0) {
            assert_false(i->retry); /* nothing is sent that could say so */
            continue;
        }
        assert_in_range(i->status, 400, 599);
        assert_true(i->message[0] != '\0');
        assert_int_not_equal(i->status, 401); /* never for capacity or any doing of ours */
        assert_int_not_equal(i->status, 403);
        if (i->status == 429)
            assert_true(i->retry);
        if (i->who == OUTCOME_BY_CLIENT && i->status != 408) /* its own fault stays its fault */
            assert_false(i->retry);
        for (const char *p = i->message; *p != '\0'; p++)
            assert_true(*p >= ' ' && *p < 0x7f);
    }
}

/* Outcomes that share a word are one series and one reason: they must agree on whose doing it was, and to try again. */
static void test_rows_of_one_word_agree(void **state)
{
    (void)state;
    for (unsigned a = 0; a < OUTCOME_COUNT; a++) {
        for (unsigned b = 0; b < a; b++) {
            const struct outcome_info *x = outcome_info((enum outcome)a), *y = outcome_info((enum outcome)b);

            if (strcmp(x->word, y->word) != 0)
                continue;
            assert_int_equal(x->who, y->who);
            assert_int_equal(x->status, y->status);
            assert_int_equal(x->retry, y->retry);
        }
    }
}

/* What clients, dashboards and alerts spell out. */
static void test_rows_others_rely_on(void **state)
{
    static const struct {
        enum outcome outcome;
        const char *word, *who;
        unsigned status;
        bool retry;
    } rows[] = {
        {OUTCOME_DONE, "done", "upstream", 0, false},
        {OUTCOME_LIMIT_FULL, "limit_full", "gate", 429, true},
        {OUTCOME_REDIS_UNAVAILABLE, "redis_unavailable", "redis", 429, true},
        {OUTCOME_DRAINING, "draining", "gate", 429, true},
        {OUTCOME_BAD_REQUEST, "bad_request", "client", 400, false},
        {OUTCOME_NO_ROUTE, "no_route", "client", 404, false},
        {OUTCOME_BODY_TOO_LARGE, "body_too_large", "client", 413, false},
        {OUTCOME_REQUEST_TIMEOUT, "request_timeout", "client", 408, true},
        {OUTCOME_UPSTREAM_UNREACHABLE, "upstream_unreachable", "upstream", 502, true},
        {OUTCOME_UPSTREAM_CLOSED, "upstream_closed", "upstream", 502, true},
        {OUTCOME_FIRST_BYTE_TIMEOUT, "upstream_timeout", "upstream", 504, true},
        {OUTCOME_CLIENT_GONE, "client_gone", "client", 0, false},
    };

    (void)state;
    for (size_t k = 0; k < ARRAY_LEN(rows); k++) {
        const struct outcome_info *i = outcome_info(rows[k].outcome);

        assert_string_equal(i->word, rows[k].word);
        assert_string_equal(outcome_who_word((enum outcome_who)i->who), rows[k].who);
        assert_int_equal(i->status, rows[k].status);
        assert_int_equal(i->retry, rows[k].retry);
    }
}

static void test_phases_have_words_of_their_own(void **state)
{
    (void)state;
    for (unsigned a = 0; a < OUTCOME_PHASE_COUNT; a++) {
        check_word(outcome_phase_word((enum outcome_phase)a));
        for (unsigned b = 0; b < a; b++)
            assert_string_not_equal(outcome_phase_word((enum outcome_phase)a),
                                    outcome_phase_word((enum outcome_phase)b));
    }
    assert_string_equal(outcome_phase_word(OUTCOME_PHASE_ADMIT), "admit");
    assert_string_equal(outcome_phase_word(OUTCOME_PHASE_RELAY), "relay");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_every_row),
        cmocka_unit_test(test_rows_of_one_word_agree),
        cmocka_unit_test(test_rows_others_rely_on),
        cmocka_unit_test(test_phases_have_words_of_their_own),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
