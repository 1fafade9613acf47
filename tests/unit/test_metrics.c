/*
 * test_metrics.c - sums over threads that come and go, the edges of the buckets, and that every scrape is well-formed
 * Prometheus text (exposition format 0.0.4): each line by its grammar, HELP and TYPE once a name, no series twice.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "mem.h"
#include "metrics.h"

#include <pthread.h>

/* --- a scrape, taken apart ----------------------------------------------------------------------------------- */

struct sample {
    char series[256]; /* name and labels, as written */
    char name[128];
    double value;
};

struct scrape {
    struct sample samples[4096];
    size_t n;
    char typed[512][128]; /* names that have a TYPE, in order */
    char types[512][16];
    size_t n_typed, n_helped;
};

static bool is_name(const char *s, size_t n, bool colon)
{
    for (size_t i = 0; i < n; i++) {
        bool letter = (s[i] >= 'a' && s[i] <= 'z') || (s[i] >= 'A' && s[i] <= 'Z') || s[i] == '_' ||
                      (colon && s[i] == ':');

        if (!letter && (i == 0 || s[i] < '0' || s[i] > '9'))
            return false;
    }
    return n > 0;
}

/* {name="value",…}: returns what stands behind it, NULL when it is none. */
static const char *after_labels(const char *p)
{
    if (*p != '{')
        return p;
    do {
        size_t n = strcspn(++p, "=");

        if (!is_name(p, n, false) || p[n] != '=' || p[n + 1] != '"')
            return NULL;
        for (p += n + 2; *p != '"'; p++) {
            if (*p == '\0' || *p == '\n')
                return NULL;
            if (*p == '\\' && strchr("\\\"n", *++p) == NULL)
                return NULL;
        }
        p++;
    } while (*p == ',');
    return *p == '}' ? p + 1 : NULL;
}

/* The metric that a sample belongs to: histograms have three kinds of them. */
static void check_is_typed(const struct scrape *s, const struct sample *x)
{
    const char *last = s->typed[s->n_typed - 1], *type = s->types[s->n_typed - 1];
    size_t n = strlen(last);

    assert_true(s->n_typed > 0);
    if (strncmp(x->name, last, n) != 0) /* all lines of one metric stand together */
        fail_msg("%s below %s", x->name, last);
    if (strcmp(type, "histogram") == 0)
        assert_true(strcmp(x->name + n, "_bucket") == 0 || strcmp(x->name + n, "_sum") == 0 ||
                    strcmp(x->name + n, "_count") == 0);
    else
        assert_int_equal(x->name[n], '\0');
    if (strcmp(type, "counter") == 0) {
        assert_true(strcmp(x->name + n - 6, "_total") == 0);
        assert_true(x->value >= 0);
    }
}

static void take_comment(struct scrape *s, const char *line)
{
    bool help = strncmp(line, "# HELP ", 7) == 0;
    const char *name = line + 7;
    size_t n = strcspn(name, " ");

    assert_true(help || strncmp(line, "# TYPE ", 7) == 0);
    assert_true(is_name(name, n, true) && name[n] == ' ' && name[n + 1] != '\0');
    for (size_t i = 0; i < s->n_typed; i++) {
        if (strlen(s->typed[i]) == n && memcmp(s->typed[i], name, n) == 0)
            fail_msg("twice: %s", line);
    }
    if (help) {
        assert_int_equal(s->n_helped++, s->n_typed); /* and its TYPE follows at once */
        return;
    }
    assert_true(s->n_typed < ARRAY_LEN(s->typed));
    assert_int_equal(s->n_helped, s->n_typed + 1);
    snprintf(s->typed[s->n_typed], sizeof(s->typed[0]), "%.*s", (int)n, name);
    snprintf(s->types[s->n_typed], sizeof(s->types[0]), "%s", name + n + 1);
    if (strcmp(name + n + 1, "counter") != 0 && strcmp(name + n + 1, "gauge") != 0 &&
        strcmp(name + n + 1, "histogram") != 0)
        fail_msg("%s", line);
    s->n_typed++;
}

static void take_sample(struct scrape *s, const char *line)
{
    size_t n = strcspn(line, "{ ");
    struct sample *x = &s->samples[s->n];
    const char *p = after_labels(line + n);
    char *end;

    assert_true(s->n < ARRAY_LEN(s->samples));
    if (!is_name(line, n, true) || p == NULL || *p != ' ') {
        fail_msg("<%s>", line);
        return;
    }
    snprintf(x->series, sizeof(x->series), "%.*s", (int)(p - line), line);
    snprintf(x->name, sizeof(x->name), "%.*s", (int)n, line);
    x->value = strtod(p + 1, &end);
    if (end == p + 1 || *end != '\0')
        fail_msg("<%s>", line);
    for (size_t i = 0; i < s->n; i++)
        if (strcmp(s->samples[i].series, x->series) == 0)
            fail_msg("twice: %s", x->series);
    check_is_typed(s, x);
    s->n++;
}

static struct scrape scraped;

static void scrape(void)
{
    struct buf text = {0};
    char *line, *rest;

    memset(&scraped, 0, sizeof(scraped));
    assert_true(metrics_write(&text));
    assert_int_equal(text.p[text.n - 1], '\n');
    assert_true(buf_put(&text, (struct slice){"", 1}));
    assert_int_equal(strlen(text.p), text.n - 1);
    for (line = text.p; *line != '\0'; line = rest) {
        rest = strchr(line, '\n');
        *rest++ = '\0';
        if (line[0] == '#')
            take_comment(&scraped, line);
        else
            take_sample(&scraped, line);
    }
    assert_int_equal(scraped.n_helped, scraped.n_typed);
    buf_free(&text);
}

static double value_of(const char *series)
{
    for (size_t i = 0; i < scraped.n; i++)
        if (strcmp(scraped.samples[i].series, series) == 0)
            return scraped.samples[i].value;
    fail_msg("no %s", series);
    return -1;
}

static bool has(const char *series)
{
    for (size_t i = 0; i < scraped.n; i++)
        if (strcmp(scraped.samples[i].series, series) == 0)
            return true;
    return false;
}

#define assert_value(series, want) assert_true(value_of(series) == (double)(want))

/* --- tests -------------------------------------------------------------------------------------------------------- */

static size_t blocks;

static int begin(void **state)
{
    (void)state;
    blocks = mem_live_blocks();
    metrics_thread_begin();
    return 0;
}

static int end(void **state)
{
    (void)state;
    metrics_thread_end();
    metrics_free();
    return mem_live_blocks() == blocks ? 0 : -1;
}

static void test_a_fresh_scrape_is_well_formed(void **state)
{
    (void)state;
    scrape();
#define X(id, name, help) assert_value(name, 0);
    METRICS_COUNTERS(X)
    METRICS_GAUGES(X)
#undef X
#define X(id, name, help)                                                                                    \
    assert_value(name "_count", 0);                                                                          \
    assert_value(name "_sum", 0);                                                                            \
    assert_value(name "_bucket{le=\"+Inf\"}", 0);
    METRICS_HISTOGRAMS(X)
#undef X
    assert_value("leasegate_responses_total{status=\"2xx\"}", 0);
}

/* Each row of the tables is a place of its own. */
static void test_each_count_is_its_own(void **state)
{
    (void)state;
    for (unsigned i = 0; i < METRICS_COUNTER_COUNT; i++)
        metrics_add((enum metrics_counter)i, i + 1);
    for (unsigned i = 0; i < METRICS_GAUGE_COUNT; i++)
        metrics_set((enum metrics_gauge)i, -(int64_t)i);
    for (unsigned i = 0; i < METRICS_HISTOGRAM_COUNT; i++)
        for (unsigned k = 0; k <= i; k++)
            metrics_observe_us((enum metrics_histogram)i, 1000000);
    scrape();
#define X(id, name, help) assert_value(name, METRICS_##id + 1);
    METRICS_COUNTERS(X)
#undef X
#define X(id, name, help) assert_value(name, -(int)METRICS_GAUGE_##id);
    METRICS_GAUGES(X)
#undef X
#define X(id, name, help)                                                                                    \
    assert_value(name "_count", METRICS_HISTOGRAM_##id + 1);                                                 \
    assert_value(name "_sum", METRICS_HISTOGRAM_##id + 1);
    METRICS_HISTOGRAMS(X)
#undef X
    metrics_total(METRICS_REDIS_COMMANDS, 70);
    metrics_total(METRICS_REDIS_COMMANDS, 75);
    scrape();
    assert_value("leasegate_redis_commands_total", 75);
}

/* A bound belongs to its bucket (`le`), and one more us to the next. */
static void test_bucket_edges(void **state)
{
    uint64_t bound_us = 50;

    (void)state;
    for (size_t k = 0; k < 24; k++, bound_us *= 2) {
        char at[128], below[128];
        double before_at, before_below;

        snprintf(at, sizeof(at), "leasegate_wait_seconds_bucket{le=\"%llu.%06llu\"}",
                 (unsigned long long)(bound_us / 1000000), (unsigned long long)(bound_us % 1000000));
        snprintf(below, sizeof(below), "leasegate_wait_seconds_bucket{le=\"%llu.%06llu\"}",
                 (unsigned long long)(bound_us / 2 / 1000000), (unsigned long long)(bound_us / 2 % 1000000));
        scrape();
        before_at = value_of(at);
        before_below = k == 0 ? 0 : value_of(below);
        metrics_observe_us(METRICS_HISTOGRAM_WAIT, bound_us);
        metrics_observe_us(METRICS_HISTOGRAM_WAIT, bound_us + 1);
        scrape();
        assert_true(value_of(at) == before_at + 1);
        if (k > 0)
            assert_true(value_of(below) == before_below);
    }
    assert_value("leasegate_wait_seconds_count", 48);
    assert_value("leasegate_wait_seconds_bucket{le=\"+Inf\"}", 48);
}

static void test_buckets_at_both_ends(void **state)
{
    double last = 0;

    (void)state;
    metrics_observe_us(METRICS_HISTOGRAM_DURATION, 0);
    metrics_observe_us(METRICS_HISTOGRAM_DURATION, 1);
    metrics_observe_us(METRICS_HISTOGRAM_DURATION, 86400000000);
    scrape();
    assert_value("leasegate_call_duration_seconds_bucket{le=\"0.000050\"}", 2);
    assert_value("leasegate_call_duration_seconds_bucket{le=\"419.430400\"}", 2);
    assert_value("leasegate_call_duration_seconds_bucket{le=\"+Inf\"}", 3);
    assert_true(value_of("leasegate_call_duration_seconds_sum") > 86399.9);
    for (size_t i = 0; i < scraped.n; i++) { /* cumulative */
        if (strcmp(scraped.samples[i].name, "leasegate_call_duration_seconds_bucket") != 0)
            continue;
        assert_true(scraped.samples[i].value >= last);
        last = scraped.samples[i].value;
    }
    metrics_observe_us(METRICS_HISTOGRAM_LOOP_TURN,
                       UINT64_MAX); /* a difference that went wrong is not a short one */
    metrics_observe_us(METRICS_HISTOGRAM_LOOP_TURN, UINT64_MAX - 48);
    scrape();
    assert_value("leasegate_loop_turn_seconds_bucket{le=\"419.430400\"}", 0);
    assert_value("leasegate_loop_turn_seconds_count", 2);
}

static void test_outcomes(void **state)
{
    (void)state;
    for (unsigned o = 0; o < OUTCOME_COUNT; o++)
        for (unsigned p = 0; p < OUTCOME_PHASE_COUNT; p++)
            metrics_call_ended((enum outcome)o, (enum outcome_phase)p, outcome_info((enum outcome)o)->status);
    metrics_call_ended(OUTCOME_DONE, OUTCOME_PHASE_RELAY, 200);
    metrics_call_ended(OUTCOME_DONE, OUTCOME_PHASE_TUNNEL, 101);
    metrics_call_ended(OUTCOME_DONE, OUTCOME_PHASE_RELAY, 999);
    scrape();
    assert_value("leasegate_calls_total{reason=\"done\",by=\"upstream\",phase=\"relay\"}", 3);
    assert_value("leasegate_calls_total{reason=\"limit_full\",by=\"gate\",phase=\"admit\"}", 1);
    /* CONNECT_, SEND_, FIRST_BYTE_ and IDLE_TIMEOUT share their word: one series */
    assert_value("leasegate_calls_total{reason=\"upstream_timeout\",by=\"upstream\",phase=\"dial\"}", 4);
    assert_value("leasegate_responses_total{status=\"2xx\"}", 1);
    assert_value("leasegate_responses_total{status=\"1xx\"}", 1);
    assert_true(value_of("leasegate_responses_total{status=\"none\"}") >= 1);
}

static void test_limits(void **state)
{
    unsigned a = metrics_limit_row("gpt-4o"), b = metrics_limit_row("tenants");

    (void)state;
    assert_int_not_equal(a, b);
    assert_int_equal(metrics_limit_row("gpt-4o"), a); /* as after a reload */
    metrics_limit_cap(a, 200);
    metrics_limit_held(a, 1);
    metrics_limit_held(a, 1);
    metrics_limit_held(a, -1);
    metrics_limit_held(b, -1); /* one that another thread had counted up */
    metrics_limit_granted(a);
    metrics_limit_refused(b);
    scrape();
    assert_value("leasegate_limit_cap{limit=\"gpt-4o\"}", 200);
    assert_value("leasegate_limit_held{limit=\"gpt-4o\"}", 1);
    assert_value("leasegate_limit_held{limit=\"tenants\"}", -1);
    assert_value("leasegate_limit_granted_total{limit=\"gpt-4o\"}", 1);
    assert_value("leasegate_limit_refused_total{limit=\"tenants\"}", 1);
}

/* Names beyond the table share its last row, whatever they and earlier ones are called. */
static void test_more_limits_than_rows(void **state)
{
    unsigned last = 0;

    (void)state;
    for (unsigned i = 0; i < METRICS_LIMITS_MAX + 40; i++) {
        char name[32];
        unsigned row;

        snprintf(name, sizeof(name), i == 3 ? "other" : "limit-%u", i);
        row = metrics_limit_row(name);
        assert_true(row < METRICS_LIMITS_MAX);
        assert_int_equal(row, size_min(i, METRICS_LIMITS_MAX - 1));
        metrics_limit_granted(row);
        last = row;
    }
    assert_int_equal(last, METRICS_LIMITS_MAX - 1);
    scrape();
    assert_value("leasegate_limit_granted_total{limit=\"limit-7\"}", 1);
    assert_value("leasegate_limit_granted_total{limit=\"other\"}", 1); /* its own */
    assert_false(has("leasegate_limit_granted_total{limit=\"limit-270\"}"));
}

/* --- threads ------------------------------------------------------------------------------------------------------ */

static unsigned shared_row;

static void *count_a_while(void *arg UNUSED)
{
    metrics_thread_begin();
    for (int i = 0; i < 10000; i++) {
        metrics_add(METRICS_CLIENT_CONNECTIONS, 1);
        metrics_set(METRICS_GAUGE_CALLS, 3);
        metrics_observe_us(METRICS_HISTOGRAM_FIRST_BYTE, 1000);
        metrics_call_ended(OUTCOME_LIMIT_FULL, OUTCOME_PHASE_ADMIT, 429);
        metrics_limit_held(shared_row, i % 2 == 0 ? 1 : -1);
        metrics_limit_granted(shared_row);
    }
    metrics_thread_end();
    return NULL;
}

/* What an ended thread has counted stays in the sums; what it had at hand is gone. */
static void test_threads(void **state)
{
    pthread_t threads[4];
    double last = 0;

    (void)state;
    shared_row = metrics_limit_row("shared");
    for (size_t i = 0; i < ARRAY_LEN(threads); i++)
        assert_int_equal(pthread_create(&threads[i], NULL, count_a_while, NULL), 0);
    for (int i = 0; i < 20; i++) { /* scrapes while they count: never backwards */
        scrape();
        assert_true(value_of("leasegate_client_connections_total") >= last);
        last = value_of("leasegate_client_connections_total");
    }
    for (size_t i = 0; i < ARRAY_LEN(threads); i++)
        pthread_join(threads[i], NULL);
    metrics_add(METRICS_CLIENT_CONNECTIONS, 5);
    scrape();
    assert_value("leasegate_client_connections_total", 40005);
    assert_value("leasegate_calls_in_flight", 0);
    assert_value("leasegate_time_to_first_byte_seconds_count", 40000);
    assert_value("leasegate_responses_total{status=\"4xx\"}", 40000);
    assert_value("leasegate_limit_held{limit=\"shared\"}", 0);
    assert_value("leasegate_limit_granted_total{limit=\"shared\"}", 40000);
}

static void *count_nothing(void *arg UNUSED)
{
    metrics_add(METRICS_RELOADS, 1);
    metrics_total(METRICS_RELOADS, 1);
    metrics_set(METRICS_GAUGE_CALLS, 1);
    metrics_observe_us(METRICS_HISTOGRAM_WAIT, 1);
    metrics_call_ended(OUTCOME_DONE, OUTCOME_PHASE_RELAY, 200);
    metrics_limit_held(0, 1);
    metrics_limit_granted(0);
    metrics_limit_refused(0);
    metrics_thread_end();
    return NULL;
}

static void test_a_thread_that_never_began_counts_nothing(void **state)
{
    pthread_t t;

    (void)state;
    assert_int_equal(pthread_create(&t, NULL, count_nothing, NULL), 0);
    pthread_join(t, NULL);
    scrape();
    assert_value("leasegate_config_reloads_total", 0);
    assert_value("leasegate_calls_in_flight", 0);
}

static void test_a_scrape_without_memory_says_so(void **state)
{
    struct buf text = {0};

    (void)state;
    for (unsigned n = 1; n <= 5; n++) {
        bool ok;

        mem_fail_at(n, false);
        ok = metrics_write(&text);
        mem_fail_at(0, false);
        assert_false(ok);
        buf_free(&text);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_a_fresh_scrape_is_well_formed, begin, end),
        cmocka_unit_test_setup_teardown(test_each_count_is_its_own, begin, end),
        cmocka_unit_test_setup_teardown(test_bucket_edges, begin, end),
        cmocka_unit_test_setup_teardown(test_buckets_at_both_ends, begin, end),
        cmocka_unit_test_setup_teardown(test_outcomes, begin, end),
        cmocka_unit_test_setup_teardown(test_limits, begin, end),
        cmocka_unit_test_setup_teardown(test_more_limits_than_rows, begin, end),
        cmocka_unit_test_setup_teardown(test_threads, begin, end),
        cmocka_unit_test_setup_teardown(test_a_thread_that_never_began_counts_nothing, begin, end),
        cmocka_unit_test_setup_teardown(test_a_scrape_without_memory_says_so, begin, end),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
