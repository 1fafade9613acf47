/*
 * test_admit.c - admission against a real redis-server: granted, refused with an estimate that grows, the outage policy,
 * and the end of an admission in each of its states.
 */
#include "redis_help.h"

#include "admit.h"
#include "log.h"
#include "metrics.h"

#define HEARTBEAT_MS 300
#define TTL_MS 900
#define KEY "lg1:{main}:m:leases"

struct fixture {
    struct io_base base;
    struct server server;
    struct config_limit limits[2];
    struct config config;
    struct config_redis conf;
    struct leases *ls;
    struct admit *a;
    struct snapshot snapshot;
    unsigned rows[2];
    struct lease_scope scopes[2]; /* m, n */
};

struct caller {
    struct admission m;
    unsigned grants, refusals, losts;
    struct admit_refusal why;
    bool asking, end_at_grant;
};

static void on_granted(void *owner)
{
    struct caller *c = owner;

    assert_false(c->asking); /* never from inside */
    c->grants++;
    if (c->end_at_grant)
        admission_end(&c->m, 0);
}

static void on_refused(void *owner, const struct admit_refusal *why)
{
    struct caller *c = owner;

    assert_false(c->asking);
    assert_int_equal(c->m.state, ADMISSION_NONE); /* it is over */
    c->refusals++;
    c->why = *why;
}

static void on_lost(void *owner)
{
    struct caller *c = owner;

    c->losts++;
    admission_end(&c->m, 0);
}

static const struct admission_ops ops = {
    .on_granted = on_granted, .on_refused = on_refused, .on_lost = on_lost};

static enum admit_result ask(struct fixture *f, struct caller *c, size_t n)
{
    enum admit_result result;

    memset(&c->m, 0, sizeof(c->m));
    c->grants = c->refusals = c->losts = 0;
    c->asking = true;
    result = admit_begin(f->a, &c->m, &f->snapshot, f->scopes, n, &ops, c, &c->why);
    c->asking = false;
    return result;
}

/* --- conditions --------------------------------------------------------------------------------------------------- */

static bool usable(void *arg)
{
    return leases_usable(((struct fixture *)arg)->ls);
}

static bool unusable(void *arg)
{
    return !leases_usable(((struct fixture *)arg)->ls);
}

static bool quiet(void *arg)
{
    return leases_quiet(((struct fixture *)arg)->ls);
}

static bool answered(void *arg)
{
    const struct caller *c = arg;

    return c->grants + c->refusals > 0;
}

static bool lost(void *arg)
{
    return ((struct caller *)arg)->losts > 0;
}

static void get(struct fixture *f, struct caller *c)
{
    assert_int_equal(ask(f, c, 1), ADMIT_PENDING);
    assert_int_equal(c->m.state, ADMISSION_ASKED);
    assert_true(io_run(f->base.loop, answered, c, 5000));
    assert_int_equal(c->grants, 1);
    assert_int_equal(c->m.state, ADMISSION_HELD);
    assert_true(admission_lease_id(&c->m).n > 0);
}

static void get_refused(struct fixture *f, struct caller *c)
{
    assert_int_equal(ask(f, c, 1), ADMIT_PENDING);
    assert_true(io_run(f->base.loop, answered, c, 5000));
    assert_int_equal(c->refusals, 1);
    assert_int_equal(admission_lease_id(&c->m).n, 0);
    admission_end(&c->m, 0); /* over already: nothing */
}

static void check_outage(const struct caller *c)
{
    assert_int_equal(c->why.outcome, OUTCOME_REDIS_UNAVAILABLE);
    assert_string_equal(c->why.reason, "redis_unavailable");
    assert_string_equal(c->why.limit, "");
    assert_in_range(c->why.retry_after_ms, 750, 1250);
}

/* --- fixture ------------------------------------------------------------------------------------------------------ */

static void limit_set_up(struct fixture *f, unsigned i, const char *name, uint32_t cap)
{
    f->limits[i] = (struct config_limit){.name = (char *)(uintptr_t)name, .index = i, .concurrency = cap};
    f->scopes[i] = (struct lease_scope){.limit = &f->limits[i], .cap = cap, .name_n = strlen(name)};
    memcpy(f->scopes[i].name, name, strlen(name));
    f->rows[i] = metrics_limit_row(name);
}

static void begin(struct fixture *f, uint32_t cap, enum config_outage outage)
{
    memset(f, 0, sizeof(*f));
    f->base = io_begin();
    metrics_thread_begin();
    server_start(&f->server, NULL);
    limit_set_up(f, 0, "m", cap);
    limit_set_up(f, 1, "n", 1000);
    f->config = (struct config){
        .references_ = 1, .limits = f->limits, .n_limits = 2, .heartbeat_ms = HEARTBEAT_MS, .ttl_ms = TTL_MS};
    f->conf = redis_conf(&f->server);
    f->conf.on_outage = outage;
    f->snapshot = (struct snapshot){.config = &f->config, .limit_rows = f->rows, .references_ = 1};
    f->ls = leases_new(f->base.loop, &f->config, &f->conf, NULL, "inst");
    f->a = admit_new(f->base.loop, &f->conf, f->ls);
    assert_true(io_run(f->base.loop, usable, f, 5000));
}

/* The gauge that a scrape shows. */
static long scraped(const char *series)
{
    struct buf text = {0};
    char line[128];
    const char *at;
    long v;

    snprintf(line, sizeof(line), "\n%s", series);
    assert_true(metrics_write(&text) && buf_put(&text, (struct slice){"", 1}));
    at = strstr(text.p, line);
    assert_non_null(at);
    v = strtol(at + strlen(line), NULL, 10);
    buf_free(&text);
    return v;
}

static void end(struct fixture *f)
{
    assert_int_equal(scraped("leasegate_limit_held{limit=\"m\"}"), 0);
    assert_int_equal(leases_held(f->ls), 0);
    leases_free(f->ls);
    admit_free(f->a);
    server_stop(&f->server);
    log_thread_end();
    metrics_thread_end();
    metrics_free();
    io_end(&f->base);
}

static void end_quiet(struct fixture *f)
{
    assert_true(io_run(f->base.loop, quiet, f, 5000));
    assert_int_equal(server_int(&f->server, "ZCARD %s", KEY), 0);
    end(f);
}

/* --- granted and refused ------------------------------------------------------------------------------------------ */

static void test_granted_and_refused(void **state)
{
    struct fixture f;
    struct caller a = {0}, b = {0}, c = {0};

    (void)state;
    begin(&f, 2, CONFIG_OUTAGE_DENY);
    get(&f, &a);
    get(&f, &b);
    assert_int_equal(server_int(&f.server, "ZCARD %s", KEY), 2);
    assert_int_equal(scraped("leasegate_limit_held{limit=\"m\"}"), 2);
    get_refused(&f, &c);
    assert_int_equal(c.why.outcome, OUTCOME_LIMIT_FULL);
    assert_string_equal(c.why.reason, "limit_full");
    assert_string_equal(c.why.limit, "m");
    admission_end(&a.m, 0);
    admission_end(&a.m, 0);
    assert_int_equal(admission_lease_id(&a.m).n, 0);
    get(&f, &c);
    admission_end(&b.m, 0);
    admission_end(&c.m, 0);
    assert_int_equal(scraped("leasegate_limit_granted_total{limit=\"m\"}"), 3);
    assert_int_equal(scraped("leasegate_limit_refused_total{limit=\"m\"}"), 1);
    end_quiet(&f);
}

static void test_a_call_that_nothing_counts(void **state)
{
    struct fixture f;
    struct caller a = {0};

    (void)state;
    begin(&f, 1, CONFIG_OUTAGE_DENY);
    assert_int_equal(ask(&f, &a, 0), ADMIT_GRANTED);
    assert_int_equal(admission_lease_id(&a.m).n, 0);
    admission_end(&a.m, 0);
    admission_end(&a.m, 0);
    assert_int_equal(a.grants, 0); /* said at once, not again */
    end_quiet(&f);
}

static void test_several_limits(void **state)
{
    struct fixture f;
    struct caller a = {0}, b = {0};

    (void)state;
    begin(&f, 1, CONFIG_OUTAGE_DENY);
    assert_int_equal(ask(&f, &a, 2), ADMIT_PENDING);
    assert_true(io_run(f.base.loop, answered, &a, 5000));
    assert_int_equal(a.grants, 1);
    assert_int_equal(scraped("leasegate_limit_held{limit=\"n\"}"), 1);
    assert_int_equal(ask(&f, &b, 2), ADMIT_PENDING);
    assert_true(io_run(f.base.loop, answered, &b, 5000));
    assert_string_equal(b.why.limit, "m"); /* the one that was full, and nothing was taken of the other */
    assert_int_equal(scraped("leasegate_limit_held{limit=\"n\"}"), 1);
    assert_int_equal(scraped("leasegate_limit_refused_total{limit=\"n\"}"), 0);
    admission_end(&a.m, 0);
    assert_int_equal(scraped("leasegate_limit_held{limit=\"n\"}"), 0);
    end_quiet(&f);
}

/* --- retry-after -------------------------------------------------------------------------------------------------- */

/* Within 25 % of what the estimate says, and never outside of 250 ms and a minute. */
static void check_retry(uint64_t got, uint64_t estimate)
{
    uint64_t clipped = estimate < 250 ? 250 : estimate > 60000 ? 60000 : estimate;
    uint64_t low = clipped - clipped / 4, high = clipped + clipped / 4 + 1;

    if (low < 250)
        low = 250;
    if (high > 60000)
        high = 60000;
    if (got < low || got > high)
        fail_msg("%llu, estimate %llu", (unsigned long long)got, (unsigned long long)estimate);
}

static void test_the_delay_grows_with_the_refused(void **state)
{
    struct fixture f;
    struct caller holder = {0}, c = {0};
    uint64_t least = UINT64_MAX, most = 0;

    (void)state;
    begin(&f, 1, CONFIG_OUTAGE_DENY);
    get(&f, &holder);
    for (uint64_t n = 1; n <= 100; n++) { /* one slot, held for a second as long as nothing better is known */
        get_refused(&f, &c);
        check_retry(c.why.retry_after_ms, 1000 * (1 + n));
        if (n > 80) {
            least = c.why.retry_after_ms < least ? c.why.retry_after_ms : least;
            most = c.why.retry_after_ms > most ? c.why.retry_after_ms : most;
        }
    }
    assert_true(least < most); /* those refused together do not return together */
    admission_end(&holder.m, 0);
    get(&f, &holder); /* a grant halves the crowd; calls were seen to last some ms here */
    get_refused(&f, &c);
    assert_true(c.why.retry_after_ms < 60000);
    admission_end(&holder.m, 0);
    end_quiet(&f);
}

/* Others hold n slots. */
static void fill(struct fixture *f, int n)
{
    for (int i = 0; i < n; i++)
        assert_string_equal(server_ask(&f->server, "ZADD %s 99999999999999 others/%d", KEY, i), "1");
}

static void test_the_delay_at_both_ends(void **state)
{
    struct fixture f;
    struct caller c = {0};

    (void)state;
    begin(&f, 1000, CONFIG_OUTAGE_DENY);
    fill(&f, 1000); /* one of a thousand slots comes free at any moment */
    for (int i = 0; i < 20; i++) {
        get_refused(&f, &c);
        assert_in_range(c.why.retry_after_ms, 250, 313);
    }
    f.scopes[0].cap = 0; /* nothing enters: no telling when */
    for (int i = 0; i < 20; i++) {
        get_refused(&f, &c);
        assert_in_range(c.why.retry_after_ms, 22500, 37500);
    }
    server_ask(&f.server, "DEL %s", KEY);
    end_quiet(&f);
}

/* --- outages ------------------------------------------------------------------------------------------------------ */

static void test_a_known_outage_is_answered_at_once(void **state)
{
    struct fixture f;
    struct caller a = {0};

    (void)state;
    begin(&f, 1, CONFIG_OUTAGE_DENY);
    server_kill(&f.server);
    assert_true(io_run(f.base.loop, unusable, &f, 5000));
    assert_int_equal(ask(&f, &a, 1), ADMIT_REFUSED);
    check_outage(&a);
    admission_end(&a.m, 0);
    f.conf.on_outage = CONFIG_OUTAGE_ALLOW; /* a newer configuration */
    admit_reconfigure(f.a, &f.conf);
    assert_int_equal(ask(&f, &a, 1), ADMIT_GRANTED);
    assert_int_equal(a.m.state, ADMISSION_UNCOUNTED);
    assert_int_equal(admission_lease_id(&a.m).n, 0);
    assert_int_equal(scraped("leasegate_uncounted_calls_total "), 1);
    assert_int_equal(scraped("leasegate_limit_held{limit=\"m\"}"), 0);
    admission_end(&a.m, 100);
    admission_end(&a.m, 0);
    assert_int_equal(a.grants + a.refusals, 0);
    end(&f);
}

static void test_an_outage_while_asking(void **state)
{
    (void)state;
    for (int allow = 0; allow < 2; allow++) {
        struct fixture f;
        struct caller a = {0};

        begin(&f, 1, allow != 0 ? CONFIG_OUTAGE_ALLOW : CONFIG_OUTAGE_DENY);
        server_pause(&f.server);
        assert_int_equal(ask(&f, &a, 1), ADMIT_PENDING);
        assert_true(io_run(f.base.loop, answered, &a, 5000));
        assert_int_equal(a.grants, allow);
        if (allow == 0)
            check_outage(&a);
        else
            assert_int_equal(a.m.state, ADMISSION_UNCOUNTED);
        admission_end(&a.m, 0);
        server_resume(&f.server);
        assert_true(io_run(f.base.loop, usable, &f, 10000));
        end_quiet(&f); /* the slot that may have been taken was given back */
    }
}

/* An error that says no is no outage: it closes, also under "allow". */
static void test_an_error_reply_refuses(void **state)
{
    struct fixture f;
    struct caller a = {0};

    (void)state;
    begin(&f, 1, CONFIG_OUTAGE_ALLOW);
    server_ask(&f.server, "SET %s x", KEY);
    get_refused(&f, &a);
    assert_int_equal(a.why.outcome, OUTCOME_REDIS_ERROR);
    assert_string_equal(a.why.reason, "redis_wrongtype");
    assert_in_range(a.why.retry_after_ms, 750, 1250);
    server_ask(&f.server, "DEL %s", KEY);
    get(&f, &a);
    admission_end(&a.m, 0);
    end_quiet(&f);
}

static void test_no_memory_refuses(void **state)
{
    struct fixture f;
    struct caller a = {0};

    (void)state;
    begin(&f, 1, CONFIG_OUTAGE_ALLOW);
    mem_fail_at(1, true);
    assert_int_equal(ask(&f, &a, 1), ADMIT_REFUSED);
    mem_fail_at(0, false);
    assert_int_equal(a.why.outcome, OUTCOME_NO_MEMORY);
    assert_string_equal(a.why.reason, "no_memory");
    admission_end(&a.m, 0);
    end_quiet(&f);
}

/* --- the end, in every state --------------------------------------------------------------------------------------- */

static void test_ends(void **state)
{
    struct fixture f;
    struct caller a = {0}, b = {0};
    unsigned told;

    (void)state;
    begin(&f, 1, CONFIG_OUTAGE_DENY);
    admission_end(&a.m, 0); /* never begun */
    assert_int_equal(ask(&f, &a, 1), ADMIT_PENDING);
    admission_end(&a.m, 500); /* asked, not sent; a delay is for slots that were used */
    get(&f, &b);
    admission_end(&b.m, 0);
    assert_int_equal(ask(&f, &a, 1), ADMIT_PENDING);
    assert_int_equal(a.grants + a.refusals, 0);
    uv_run(loop_uv(f.base.loop), UV_RUN_NOWAIT); /* sent; the answer has perhaps come, perhaps not */
    told = a.grants;
    admission_end(&a.m, 0);
    assert_true(io_run(f.base.loop, quiet, &f, 5000));
    assert_int_equal(server_int(&f.server, "ZCARD %s", KEY), 0);
    b.end_at_grant = true; /* from inside its own event */
    assert_int_equal(ask(&f, &b, 1), ADMIT_PENDING);
    assert_true(io_run(f.base.loop, answered, &b, 5000));
    assert_int_equal(b.m.state, ADMISSION_NONE);
    assert_int_equal(a.grants + a.refusals, told); /* nothing since its end */
    end_quiet(&f);
}

static void test_a_delay_keeps_the_slot(void **state)
{
    struct fixture f;
    struct caller a = {0}, b = {0};

    (void)state;
    begin(&f, 1, CONFIG_OUTAGE_DENY);
    get(&f, &a);
    admission_end(&a.m, 300);
    assert_int_equal(scraped("leasegate_limit_held{limit=\"m\"}"), 0);
    get_refused(&f, &b); /* the provider still counts the call */
    assert_true(io_run(f.base.loop, quiet, &f, 5000));
    get(&f, &b);
    admission_end(&b.m, 0);
    end_quiet(&f);
}

static void test_a_lost_slot_is_told(void **state)
{
    struct fixture f;
    struct caller a = {0};

    (void)state;
    begin(&f, 1, CONFIG_OUTAGE_DENY);
    f.config.strict = true;
    get(&f, &a);
    server_ask(&f.server, "DEL %s", KEY);
    server_ask(&f.server, "ZADD %s 99999999999999 thief/1", KEY);
    assert_true(io_run(f.base.loop, lost, &a, 5000));
    assert_int_equal(a.losts, 1);
    assert_int_equal(a.m.state, ADMISSION_NONE);
    server_ask(&f.server, "DEL %s", KEY);
    end_quiet(&f);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_granted_and_refused),
        cmocka_unit_test(test_a_call_that_nothing_counts),
        cmocka_unit_test(test_several_limits),
        cmocka_unit_test(test_the_delay_grows_with_the_refused),
        cmocka_unit_test(test_the_delay_at_both_ends),
        cmocka_unit_test(test_a_known_outage_is_answered_at_once),
        cmocka_unit_test(test_an_outage_while_asking),
        cmocka_unit_test(test_an_error_reply_refuses),
        cmocka_unit_test(test_no_memory_refuses),
        cmocka_unit_test(test_ends),
        cmocka_unit_test(test_a_delay_keeps_the_slot),
        cmocka_unit_test(test_a_lost_slot_is_told),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
