/*
 * test_lease.c - leases against a real server: grants, batches, heartbeats, and every way in which an answer
 * can fail to come.
 *
 * What Redis holds is asked from Redis, over a line of the test's own. Waiting is for conditions, with a
 * deadline.
 */
#include "redis_help.h"

#include "lease.h"
#include "log.h"

#define HEARTBEAT_MS 400
#define TTL_MS 1200
#define KEY(name) "lg1:{main}:" name ":leases"

struct fixture {
    struct io_base base;
    struct server server;
    struct config_limit limits[3];
    struct config config;
    struct config_redis conf;
    struct lease_scope scopes[3]; /* m, t/acme, a */
    struct leases *ls;
};

enum act { ACT_NOTHING, ACT_END };

struct caller {
    struct fixture *f;
    struct lease *l; /* NULL: none, or gone */
    unsigned answers, losts;
    enum lease_answer answer;
    unsigned scope;
    char reason[32];
    enum act at_grant, at_lost;
    struct caller *also; /* ended together with this one */
    bool asking;         /* inside lease_ask */
};

static void caller_end(struct caller *c, uint64_t delay_ms)
{
    struct lease *l = c->l;

    c->l = NULL;
    if (l != NULL)
        lease_end(l, delay_ms);
}

static void on_answer(void *owner, struct lease *l, enum lease_answer answer, unsigned scope,
                      const char *reason)
{
    struct caller *c = owner;

    assert_false(c->asking);
    assert_ptr_equal(c->l, l);
    assert_true(lease_id(l).n > 5);
    c->answers++;
    c->answer = answer;
    c->scope = scope;
    snprintf(c->reason, sizeof(c->reason), "%s", reason);
    if (answer != LEASE_GRANTED)
        c->l = NULL;
    if (c->also != NULL)
        caller_end(c->also, 0);
    if (answer == LEASE_GRANTED && c->at_grant == ACT_END)
        caller_end(c, 0);
}

static void on_lost(void *owner)
{
    struct caller *c = owner;

    c->losts++;
    if (c->also != NULL)
        caller_end(c->also, 0);
    if (c->at_lost == ACT_END)
        caller_end(c, 0);
}

static const struct lease_ops ops = {.on_answer = on_answer, .on_lost = on_lost};

static void ask_in(struct fixture *f, struct caller *c, size_t from, size_t n)
{
    c->f = f;
    c->answers = 0;
    c->asking = true;
    c->l = lease_ask(f->ls, f->scopes + from, n, &ops, c);
    c->asking = false;
    assert_non_null(c->l);
}

static void ask(struct fixture *f, struct caller *c)
{
    ask_in(f, c, 0, 1);
}

/* --- conditions ----------------------------------------------------------------------------------------- */

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

static bool idle(void *arg)
{
    return leases_in_flight(((struct fixture *)arg)->ls) == 0;
}

static bool answered(void *arg)
{
    return ((struct caller *)arg)->answers > 0;
}

static bool told_lost(void *arg)
{
    return ((struct caller *)arg)->losts > 0;
}

static bool run(struct fixture *f, bool (*met)(void *arg), void *arg, uint64_t ms)
{
    return io_run(f->base.loop, met, arg, ms);
}

static void expect(struct fixture *f, struct caller *c, enum lease_answer answer)
{
    assert_true(run(f, answered, c, 3000));
    assert_int_equal(c->answers, 1);
    assert_int_equal(c->answer, answer);
}

static void get(struct fixture *f, struct caller *c)
{
    ask(f, c);
    expect(f, c, LEASE_GRANTED);
}

/* One turn: what is deferred runs, what has arrived is read. */
static void turn(struct fixture *f)
{
    uv_run(loop_uv(f->base.loop), UV_RUN_NOWAIT);
}

/* --- fixture -------------------------------------------------------------------------------------------- */

static void scope_set_up(struct fixture *f, unsigned i, const char *name, uint32_t cap)
{
    f->limits[i] = (struct config_limit){.name = (char *)(uintptr_t)name, .index = i, .concurrency = cap};
    f->scopes[i] = (struct lease_scope){.limit = &f->limits[i], .cap = cap, .name_n = strlen(name)};
    memcpy(f->scopes[i].name, name, strlen(name));
}

static void start(struct fixture *f)
{
    f->ls = leases_new(f->base.loop, &f->config, &f->conf, NULL, "inst");
    assert_non_null(f->ls);
}

static void begin_cold(struct fixture *f, uint32_t cap)
{
    memset(f, 0, sizeof(*f));
    f->base = io_begin();
    server_start(&f->server, NULL);
    scope_set_up(f, 0, "m", cap);
    scope_set_up(f, 1, "t", 2);
    assert_true(lease_scope_add(&f->scopes[1], SLICE("acme")));
    scope_set_up(f, 2, "a", 1000);
    f->config = (struct config){
        .references_ = 1, .limits = f->limits, .n_limits = 3, .heartbeat_ms = HEARTBEAT_MS, .ttl_ms = TTL_MS};
    f->conf = redis_conf(&f->server);
}

static void begin(struct fixture *f, uint32_t cap)
{
    begin_cold(f, cap);
    start(f);
    assert_true(run(f, usable, f, 5000));
    server_ask(&f->server, "CONFIG RESETSTAT");
}

static void end(struct fixture *f)
{
    leases_free(f->ls);
    server_stop(&f->server);
    assert_int_equal(f->config.references_, 1);
    log_thread_end();
    io_end(&f->base);
}

/* Everything was ended: nothing may be left anywhere. */
static void end_quiet(struct fixture *f)
{
    assert_true(run(f, quiet, f, 5000));
    assert_int_equal(leases_held(f->ls), 0);
    assert_int_equal(leases_owed(f->ls), 0);
    assert_int_equal(server_int(&f->server, "ZCARD %s", KEY("m")), 0);
    assert_int_equal(server_int(&f->server, "ZCARD %s", KEY("t/acme")), 0);
    end(f);
}

static long held_in_redis(struct fixture *f)
{
    return server_int(&f->server, "ZCARD %s", KEY("m"));
}

/* How long ago the oldest lease of m was renewed, by Redis's clock. */
static long oldest_age_ms(struct fixture *f)
{
    char *us;
    const char *at = strrchr(server_ask(&f->server, "ZRANGE %s 0 0 WITHSCORES", KEY("m")), ' ');
    long score, now;

    assert_non_null(at);
    score = strtol(at, NULL, 10);
    now = strtol(server_ask(&f->server, "TIME"), &us, 10) * 1000;
    return now + strtol(us, NULL, 10) / 1000 - score;
}

/* --- granting ------------------------------------------------------------------------------------------- */

static void grants_refuses_releases(void **state)
{
    struct fixture f;
    struct caller a = {0}, b = {0}, c = {0};

    (void)state;
    begin(&f, 2);
    get(&f, &a);
    get(&f, &b);
    assert_int_equal(held_in_redis(&f), 2);
    assert_int_equal(leases_held(f.ls), 2);
    assert_true(slice_eq(lease_id(a.l), SLICE("inst/1")));
    assert_non_null(strstr(server_ask(&f.server, "ZRANGE %s 0 -1", KEY("m")), "inst/1"));
    ask(&f, &c);
    expect(&f, &c, LEASE_FULL);
    assert_int_equal(c.scope, 0);
    caller_end(&a, 0);
    get(&f, &c);
    assert_int_equal(held_in_redis(&f), 2);
    caller_end(&b, 0);
    caller_end(&c, 0);
    assert_int_equal(leases_counters(f.ls)->granted, 3);
    assert_int_equal(leases_counters(f.ls)->refused, 1);
    end_quiet(&f);
}

static void several_scopes_all_or_none(void **state)
{
    struct fixture f;
    struct caller all[4] = {0};

    (void)state;
    begin(&f, 10);
    for (unsigned i = 0; i < 3; i++)
        ask_in(&f, &all[i], 0, 3);
    expect(&f, &all[0], LEASE_GRANTED);
    expect(&f, &all[1], LEASE_GRANTED);
    expect(&f, &all[2], LEASE_FULL);
    assert_int_equal(all[2].scope, 1);
    assert_int_equal(held_in_redis(&f), 2);
    assert_int_equal(server_int(&f.server, "ZCARD %s", KEY("t/acme")), 2);
    caller_end(&all[0], 0);
    caller_end(&all[1], 0);
    end_quiet(&f);
}

static void a_turn_is_one_call_a_verb(void **state)
{
    static struct caller all[300];
    struct fixture f;

    (void)state;
    memset(all, 0, sizeof(all));
    begin(&f, 300);
    for (unsigned i = 0; i < 300; i++)
        ask(&f, &all[i]);
    assert_true(run(&f, answered, &all[299], 3000));
    assert_int_equal(server_calls(&f.server, "evalsha"), 2);
    for (unsigned i = 0; i < 300; i++)
        assert_int_equal(all[i].answer, LEASE_GRANTED);
    assert_int_equal(held_in_redis(&f), 300);
    server_ask(&f.server, "CONFIG RESETSTAT");
    for (unsigned i = 0; i < 300; i++)
        caller_end(&all[i], 0);
    assert_int_equal(leases_owed(f.ls), 300);
    assert_true(run(&f, quiet, &f, 3000));
    assert_in_range(server_calls(&f.server, "evalsha"), 2, 3); /* a renewal may be among them */
    end_quiet(&f);
}

/* A slot given back in a turn is granted in the same one. */
static void releases_go_before_asks(void **state)
{
    struct fixture f;
    struct caller a = {0}, b = {0};

    (void)state;
    begin(&f, 1);
    get(&f, &a);
    for (int i = 0; i < 100; i++) {
        ask(&f, &b);
        caller_end(&a, 0);
        expect(&f, &b, LEASE_GRANTED);
        ask(&f, &a);
        caller_end(&b, 0);
        expect(&f, &a, LEASE_GRANTED);
    }
    caller_end(&a, 0);
    end_quiet(&f);
}

static void values_are_made_safe(void **state)
{
    static const struct {
        const char *value;
        size_t n;
        const char *name;
    } rows[] = {
        {"acme", 4, "m/acme"},
        {"", 0, "m/h-e3b0c44298fc1c149afbf4c8996fb924"},
        {"team a/b", 8, "m/h-0ead84d3178b12d6e88102e6f2df13c3"},
        {"h-1", 3, "m/h-54f50aff0c05f509a804604b776c85a2"},
        {"h1", 2, "m/h1"},
        {"A.b_C-9", 7, "m/A.b_C-9"},
    };
    struct lease_scope s = {0};
    char longest[65];
    size_t n = 0;

    (void)state;
    for (size_t i = 0; i < ARRAY_LEN(rows); i++) {
        s = (struct lease_scope){.name = "m", .name_n = 1};
        assert_true(lease_scope_add(&s, (struct slice){rows[i].value, rows[i].n}));
        assert_true(slice_eq((struct slice){s.name, s.name_n}, slice_of(rows[i].name)));
    }
    memset(longest, 'x', sizeof(longest));
    s = (struct lease_scope){.name = "m", .name_n = 1};
    assert_true(lease_scope_add(&s, (struct slice){longest, 64}));
    assert_int_equal(s.name_n, 1 + 1 + 64);
    assert_true(lease_scope_add(&s, (struct slice){longest, 65}));
    assert_int_equal(s.name_n, 66 + 1 + 34);
    assert_int_equal(memcmp(s.name + 66, "/h-", 3), 0);
    s.name_n = 0;
    while (lease_scope_add(&s, (struct slice){longest, 64}))
        assert_true(++n < 10);
    assert_true(s.name_n <= LEASE_SCOPE_MAX);
    for (int i = 0; i < 256; i++) { /* each byte by itself: in the key, or hashed */
        char c = (char)i;
        bool plain = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') ||
                     (c != 0 && strchr("._-", c) != NULL);

        s = (struct lease_scope){.name = "m", .name_n = 1};
        assert_true(lease_scope_add(&s, (struct slice){&c, 1}));
        assert_int_equal(s.name_n, plain ? 3 : 36);
    }
}

/* --- unknown answers ------------------------------------------------------------------------------------ */

/*
 * The ask reached a frozen server, which may yet run it: its slot must be free again right after the
 * recovery.
 */
static void a_lost_ask_leaves_no_ghost(void **state)
{
    static struct caller all[20];
    struct fixture f;
    uint64_t began;

    (void)state;
    memset(all, 0, sizeof(all));
    begin(&f, 20);
    for (int round = 0; round < 3; round++) {
        server_pause(&f.server);
        for (unsigned i = 0; i < 20; i++)
            ask(&f, &all[i]);
        for (unsigned i = 0; i < 20; i++)
            expect(&f, &all[i], LEASE_UNKNOWN);
        assert_int_equal(leases_owed(f.ls), 20);
        server_resume(&f.server);
        began = real_ms();
        assert_true(run(&f, usable, &f, 3000));
        assert_true(real_ms() - began < 1000);
        assert_true(run(&f, quiet, &f, 1000));
        assert_int_equal(held_in_redis(&f), 0);
        get(&f, &all[0]);
        assert_int_equal(held_in_redis(&f), 1);
        caller_end(&all[0], 0);
        assert_true(run(&f, quiet, &f, 1000));
    }
    assert_int_equal(leases_counters(f.ls)->unknown, 60);
    end_quiet(&f);
}

static void open_breaker_answers_at_once_without_traffic(void **state)
{
    static struct caller all[100];
    struct fixture f;
    uint64_t commands;

    (void)state;
    memset(all, 0, sizeof(all));
    begin(&f, 100);
    server_pause(&f.server);
    ask(&f, &all[0]);
    expect(&f, &all[0], LEASE_UNKNOWN);
    assert_false(leases_usable(f.ls));
    assert_string_equal(leases_trouble(f.ls), "timeout");
    commands = leases_redis_counters(f.ls)->commands;
    for (unsigned i = 0; i < 100; i++)
        ask(&f, &all[i]);
    caller_end(&all[7], 0);
    turn(&f);
    for (unsigned i = 0; i < 100; i++) {
        assert_int_equal(all[i].answers, i == 7 ? 0 : 1);
        assert_true(i == 7 || all[i].answer == LEASE_UNAVAILABLE);
    }
    assert_int_equal(leases_redis_counters(f.ls)->commands, commands);
    server_resume(&f.server);
    end_quiet(&f);
}

static void frozen_server_keeps_what_is_held(void **state)
{
    static struct caller all[50];
    struct fixture f;
    uint64_t began;

    (void)state;
    memset(all, 0, sizeof(all));
    begin(&f, 50);
    for (unsigned i = 0; i < 50; i++)
        get(&f, &all[i]);
    server_pause(&f.server);
    assert_true(run(&f, unusable, &f, 2000)); /* a heartbeat finds out */
    for (unsigned i = 0; i < 10; i++)
        caller_end(&all[i], 0);
    io_run_for(f.base.loop, 300);
    assert_int_equal(leases_owed(f.ls), 10);
    began = real_ms();
    server_resume(&f.server);
    assert_true(run(&f, usable, &f, 3000));
    assert_true(real_ms() - began < 1000);
    assert_true(run(&f, idle, &f, 1000));
    assert_int_equal(held_in_redis(&f), 40);
    assert_int_equal(leases_owed(f.ls), 0);
    for (unsigned i = 10; i < 50; i++)
        caller_end(&all[i], 0);
    end_quiet(&f);
}

static void killed_client_keeps_what_is_held(void **state)
{
    struct fixture f;
    struct caller a = {0};

    (void)state;
    begin(&f, 1);
    get(&f, &a);
    assert_int_equal(server_int(&f.server, "CLIENT KILL TYPE normal SKIPME yes"), 1);
    assert_true(run(&f, unusable, &f, 1000));
    assert_true(run(&f, usable, &f, 1000));
    assert_int_equal(held_in_redis(&f), 1);
    assert_int_equal(leases_held(f.ls), 1);
    assert_int_equal(leases_counters(f.ls)->restored, 0);
    caller_end(&a, 0);
    end_quiet(&f);
}

static bool has_restored(void *arg)
{
    return leases_counters(((struct fixture *)arg)->ls)->restored == 3;
}

/* Restarted empty: what runs is put back first, and nobody is let in for a heartbeat. */
static void empty_server_gets_its_leases_back(void **state)
{
    struct fixture f;
    struct caller all[4] = {0};
    uint64_t began;

    (void)state;
    begin(&f, 3);
    for (unsigned i = 0; i < 3; i++)
        get(&f, &all[i]);
    server_kill(&f.server);
    assert_true(run(&f, unusable, &f, 1000));
    server_spawn(&f.server, NULL);
    assert_true(run(&f, usable, &f, 1500));
    began = real_ms();
    assert_true(has_restored(&f));
    assert_int_equal(held_in_redis(&f), 3);
    ask(&f, &all[3]);
    io_run_for(f.base.loop, HEARTBEAT_MS / 2);
    assert_int_equal(all[3].answers, 0);
    expect(&f, &all[3], LEASE_FULL);
    assert_true(real_ms() - began >= HEARTBEAT_MS - 50 && real_ms() - began < 3 * HEARTBEAT_MS);
    for (unsigned i = 0; i < 3; i++)
        caller_end(&all[i], 0);
    end_quiet(&f);
}

/* An ask that waits for the pause to end was never sent: when the breaker opens, it is told so. */
static void an_ask_that_was_not_sent_is_unavailable(void **state)
{
    struct fixture f;
    struct caller a = {0}, b = {0};

    (void)state;
    begin(&f, 3);
    get(&f, &a);
    server_kill(&f.server);
    assert_true(run(&f, unusable, &f, 1000));
    server_spawn(&f.server, NULL);
    assert_true(run(&f, usable, &f, 1500));
    ask(&f, &b);
    turn(&f);
    assert_int_equal(server_int(&f.server, "CLIENT KILL TYPE normal SKIPME yes"), 1);
    expect(&f, &b, LEASE_UNAVAILABLE);
    caller_end(&a, 0);
    assert_true(run(&f, usable, &f, 1500));
    end_quiet(&f);
}

/* Losing the connection once more does not let anybody in earlier: others may still be putting their leases back. */
static void the_pause_outlives_a_connection(void **state)
{
    struct fixture f;
    struct caller a = {0}, b = {0};
    uint64_t began;

    (void)state;
    begin(&f, 3);
    get(&f, &a);
    server_kill(&f.server);
    assert_true(run(&f, unusable, &f, 1000));
    server_spawn(&f.server, NULL);
    assert_true(run(&f, usable, &f, 1500));
    began = real_ms();
    assert_int_equal(server_int(&f.server, "CLIENT KILL TYPE normal SKIPME yes"), 1);
    assert_true(run(&f, unusable, &f, 1000));
    assert_true(run(&f, usable, &f, 1500));
    ask(&f, &b);
    expect(&f, &b, LEASE_GRANTED);
    assert_true(real_ms() - began >= HEARTBEAT_MS - 50);
    caller_end(&a, 0);
    caller_end(&b, 0);
    end_quiet(&f);
}

static bool forgotten(void *arg)
{
    return leases_counters(((struct fixture *)arg)->ls)->forgotten > 0;
}

static void what_is_owed_too_long_is_forgotten(void **state)
{
    struct fixture f;
    struct caller a = {0};
    uint64_t began;

    (void)state;
    begin(&f, 1);
    get(&f, &a);
    server_pause(&f.server);
    assert_true(run(&f, unusable, &f, 2000));
    began = real_ms();
    caller_end(&a, 0);
    assert_true(run(&f, forgotten, &f, 5000));
    assert_true(real_ms() - began >= TTL_MS);
    assert_int_equal(leases_owed(f.ls), 0);
    assert_true(leases_quiet(f.ls));
    server_resume(&f.server);
    assert_true(run(&f, usable, &f, 1500));
    assert_true(run(&f, quiet, &f, 1000));
    end(&f);
}

/* --- scripts lost --------------------------------------------------------------------------------------- */

static void script_flush_under_load_is_not_noticed(void **state)
{
    static struct caller all[40];
    struct fixture f;
    unsigned seed = 7;

    (void)state;
    memset(all, 0, sizeof(all));
    begin(&f, 100);
    for (int round = 0; round < 300; round++) {
        for (unsigned i = 0; i < 40; i++) {
            seed = seed * 1103515245 + 12345;
            if (all[i].l == NULL)
                ask(&f, &all[i]);
            else if (seed & 0x10000)
                caller_end(&all[i], 0);
        }
        if (round % 3 == 0)
            server_ask(&f.server, "SCRIPT FLUSH");
        turn(&f);
        if (round % 4 == 0)
            assert_true(run(&f, idle, &f, 2000));
        for (unsigned i = 0; i < 40; i++)
            assert_true(all[i].answers == 0 || all[i].answer == LEASE_GRANTED);
    }
    for (unsigned i = 0; i < 40; i++)
        caller_end(&all[i], 0);
    assert_true(leases_redis_counters(f.ls)->noscripts > 20);
    assert_int_equal(leases_redis_counters(f.ls)->breaks, 0);
    end_quiet(&f);
}

/* A renewal that was not executed must not be repeated behind the release of its lease. */
static void a_renewal_repeated_brings_nothing_back(void **state)
{
    static struct caller all[30];
    struct fixture f;

    (void)state;
    memset(all, 0, sizeof(all));
    begin_cold(&f, 30);
    f.config.heartbeat_ms = 40; /* a tick each 5 ms */
    start(&f);
    assert_true(run(&f, usable, &f, 5000));
    for (int round = 0; round < 40 || leases_counters(f.ls)->renewals <= 20; round++) {
        assert_true(round < 4000);
        for (unsigned i = 0; i < 30; i++)
            get(&f, &all[i]);
        for (unsigned i = 0; i < 30; i++) {
            if (i % 3 == 0)
                server_ask(&f.server, "SCRIPT FLUSH");
            caller_end(&all[i], 0);
            if (i % 2 == 0)
                turn(&f);
        }
        assert_true(run(&f, quiet, &f, 2000));
        assert_int_equal(held_in_redis(&f), 0);
    }
    end_quiet(&f);
}

/* --- errors --------------------------------------------------------------------------------------------- */

static void wrong_type_fails_closed(void **state)
{
    struct fixture f;
    struct caller a = {0};

    (void)state;
    begin(&f, 1);
    server_ask(&f.server, "SET %s 1", KEY("m"));
    ask(&f, &a);
    expect(&f, &a, LEASE_ERROR);
    assert_string_equal(a.reason, "redis_wrongtype");
    assert_true(leases_usable(f.ls));
    server_ask(&f.server, "DEL %s", KEY("m"));
    get(&f, &a);
    caller_end(&a, 0);
    end_quiet(&f);
}

static void no_memory_in_redis_still_releases(void **state)
{
    struct fixture f;
    struct caller a = {0}, b = {0};

    (void)state;
    begin(&f, 5);
    get(&f, &a);
    server_ask(&f.server, "CONFIG SET maxmemory 1");
    ask(&f, &b);
    expect(&f, &b, LEASE_ERROR);
    assert_string_equal(b.reason, "redis_oom");
    io_run_for(f.base.loop, HEARTBEAT_MS + 100); /* heartbeats pass */
    assert_int_equal(held_in_redis(&f), 1);
    caller_end(&a, 0);
    end_quiet(&f);
}

static void a_release_that_fails_is_repeated(void **state)
{
    struct fixture f;
    struct caller a = {0};

    (void)state;
    begin(&f, 5);
    ask_in(&f, &a, 0, 2);
    expect(&f, &a, LEASE_GRANTED);
    server_ask(&f.server, "RENAME %s keep", KEY("m"));
    server_ask(&f.server, "SET %s 1", KEY("m"));
    caller_end(&a, 0);
    assert_true(run(&f, idle, &f, 1000));
    turn(&f);
    assert_int_equal(server_int(&f.server, "ZCARD %s", KEY("t/acme")), 0); /* the other scope is free */
    assert_int_equal(leases_owed(f.ls), 1);
    server_ask(&f.server, "RENAME keep %s", KEY("m"));
    assert_int_equal(held_in_redis(&f), 1);
    end_quiet(&f);
}

static bool readonly(void *arg)
{
    return strcmp(leases_trouble(((struct fixture *)arg)->ls), "readonly") == 0;
}

/* A replica loads scripts and answers PING: the probe says before any ask that it will not do. */
static void replica_is_known_without_asking(void **state)
{
    struct fixture f;
    struct caller a = {0};
    uint64_t began;

    (void)state;
    begin_cold(&f, 5);
    server_ask(&f.server, "REPLICAOF 127.0.0.1 1");
    start(&f);
    assert_true(run(&f, readonly, &f, 2000));
    ask(&f, &a);
    expect(&f, &a, LEASE_UNAVAILABLE);
    io_run_for(f.base.loop, 500);
    assert_false(leases_usable(f.ls));
    server_ask(&f.server, "REPLICAOF NO ONE");
    began = real_ms();
    assert_true(run(&f, usable, &f, 2000));
    assert_true(real_ms() - began < 1000);
    get(&f, &a);
    caller_end(&a, 0);
    end_quiet(&f);
}

static bool trouble_is_auth(void *arg)
{
    return strcmp(leases_trouble(((struct fixture *)arg)->ls), "auth") == 0;
}

static void rotated_password(void **state)
{
    struct fixture f;
    struct caller a = {0}, b = {0};

    (void)state;
    begin(&f, 5);
    get(&f, &a);
    server_ask(&f.server, "CONFIG SET requirepass new");
    server_ask(&f.server, "AUTH new");
    assert_int_equal(server_int(&f.server, "CLIENT KILL TYPE normal SKIPME yes"), 1);
    assert_true(run(&f, trouble_is_auth, &f, 2000));
    ask(&f, &b);
    expect(&f, &b, LEASE_UNAVAILABLE);
    server_ask(&f.server, "CONFIG SET requirepass \"\"");
    assert_true(run(&f, usable, &f, 1000));
    assert_int_equal(held_in_redis(&f), 1);
    caller_end(&a, 0);
    end_quiet(&f);
}

/* --- heartbeats ----------------------------------------------------------------------------------------- */

static bool is_over(void *arg)
{
    return leases_counters(((struct fixture *)arg)->ls)->over > 0;
}

/* Someone else took the slot of a lease that was lost in Redis. */
static void steal(struct fixture *f)
{
    server_ask(&f->server, "DEL %s", KEY("m"));
    server_ask(&f->server, "ZADD %s 9999999999999 other/1", KEY("m"));
}

static void over_the_limit_is_counted(void **state)
{
    struct fixture f;
    struct caller a = {0}, b = {0};

    (void)state;
    begin(&f, 1);
    get(&f, &a);
    steal(&f);
    assert_true(run(&f, is_over, &f, 2000));
    assert_int_equal(leases_counters(f.ls)->over, 1);
    assert_int_equal(held_in_redis(&f), 2);
    server_ask(&f.server, "ZREM %s other/1", KEY("m"));
    ask(&f, &b);
    expect(&f, &b, LEASE_FULL);
    caller_end(&a, 0);
    end_quiet(&f);
}

static void strict_ends_what_was_lost(void **state)
{
    struct fixture f;
    struct caller a = {0}, b = {0}, c = {0};

    (void)state;
    begin_cold(&f, 3);
    f.config.strict = true;
    start(&f);
    assert_true(run(&f, usable, &f, 5000));
    a.at_lost = ACT_END;
    a.also = &b; /* another lease ends inside the callback */
    get(&f, &b);
    a.also = NULL;
    get(&f, &a);
    a.also = &b;
    get(&f, &c);
    server_ask(&f.server, "DEL %s", KEY("m"));
    for (int i = 1; i <= 3; i++)
        server_ask(&f.server, "ZADD %s 9999999999999 other/%d", KEY("m"), i);
    assert_true(run(&f, told_lost, &a, 2000));
    assert_true(run(&f, told_lost, &c, 2000));
    assert_int_equal(c.losts, 1);
    assert_null(a.l);
    assert_null(b.l);
    io_run_for(f.base.loop, HEARTBEAT_MS);
    assert_int_equal(c.losts, 1);
    caller_end(&c, 0);
    assert_true(run(&f, quiet, &f, 2000));
    assert_int_equal(held_in_redis(&f), 3);
    for (int i = 1; i <= 3; i++)
        server_ask(&f.server, "ZREM %s other/%d", KEY("m"), i);
    end_quiet(&f);
}

static void strict_ends_what_could_not_be_renewed(void **state)
{
    struct fixture f;
    struct caller a = {0}, b = {0};
    uint64_t began;

    (void)state;
    begin_cold(&f, 3);
    f.config.strict = true;
    start(&f);
    assert_true(run(&f, usable, &f, 5000));
    a.at_lost = ACT_END;
    get(&f, &a);
    get(&f, &b);
    server_pause(&f.server);
    began = real_ms();
    assert_true(run(&f, told_lost, &a, 3000));
    assert_true(real_ms() - began < TTL_MS);
    assert_true(run(&f, told_lost, &b, 3000));
    assert_true(real_ms() - began < TTL_MS);
    assert_int_equal(leases_held(f.ls), 0);
    server_resume(&f.server);
    assert_true(run(&f, usable, &f, 2000));
    caller_end(&b, 0);
    assert_int_equal(leases_counters(f.ls)->lost, 2);
    end_quiet(&f);
}

static void without_strict_nothing_is_lost(void **state)
{
    struct fixture f;
    struct caller a = {0};

    (void)state;
    begin(&f, 3);
    get(&f, &a);
    server_pause(&f.server);
    io_run_for(f.base.loop, 2 * TTL_MS);
    assert_int_equal(a.losts, 0);
    assert_int_equal(leases_held(f.ls), 1);
    server_resume(&f.server);
    assert_true(run(&f, usable, &f, 2000));
    assert_int_equal(held_in_redis(&f), 1);
    assert_true(oldest_age_ms(&f) < TTL_MS);
    caller_end(&a, 0);
    end_quiet(&f);
}

static void ten_thousand_cost_forty_calls_a_heartbeat(void **state)
{
    static struct caller all[10000];
    struct fixture f;
    uint64_t began, renewals;
    long calls;

    (void)state;
    memset(all, 0, sizeof(all));
    begin_cold(&f, 10000);
    f.config.heartbeat_ms = 1000;
    f.config.ttl_ms = 3000;
    f.conf.timeout_ms = 3000; /* sanitizers and a busy machine */
    start(&f);
    assert_true(run(&f, usable, &f, 5000));
    for (unsigned i = 0; i < 10000; i++)
        ask(&f, &all[i]);
    assert_true(run(&f, answered, &all[9999], 10000));
    assert_true(run(&f, idle, &f, 5000));
    assert_int_equal(leases_held(f.ls), 10000);
    server_ask(&f.server, "CONFIG RESETSTAT");
    began = real_ms();
    renewals = leases_counters(f.ls)->renewals;
    io_run_for(f.base.loop, 2000); /* two heartbeats, up to a tick */
    renewals = leases_counters(f.ls)->renewals - renewals;
    calls = server_calls(&f.server, "evalsha");
    assert_in_range(renewals, 2 * 40 - 10, (real_ms() - began) / 125 * 5 + 10);
    assert_in_range(calls, renewals - 10, renewals + 10);
    /* and each of them was renewed */
    assert_int_equal(leases_counters(f.ls)->restored, 0);
    assert_true(oldest_age_ms(&f) < 2000);
    for (unsigned i = 0; i < 10000; i++)
        caller_end(&all[i], 0);
    end_quiet(&f);
}

static void few_leases_cost_one_call_a_heartbeat(void **state)
{
    struct fixture f;
    struct caller all[20] = {0};
    uint64_t before;

    (void)state;
    begin(&f, 100);
    for (unsigned i = 0; i < 20; i++)
        get(&f, &all[i]);
    before = leases_counters(f.ls)->renewals;
    io_run_for(f.base.loop, 4 * HEARTBEAT_MS);
    assert_in_range(leases_counters(f.ls)->renewals - before, 3, 5);
    assert_int_equal(held_in_redis(&f), 20);
    for (unsigned i = 0; i < 20; i++)
        caller_end(&all[i], 0);
    assert_true(run(&f, quiet, &f, 2000));
    before = leases_counters(f.ls)->renewals;
    io_run_for(f.base.loop, 2 * HEARTBEAT_MS);
    assert_int_equal(leases_counters(f.ls)->renewals, before); /* no heartbeat of the dead */
    end_quiet(&f);
}

/* Refused asks alone keep no key alive wrongly, and grants none without expiry. */
static void every_key_expires(void **state)
{
    struct fixture f;
    struct caller a = {0}, b = {0};

    (void)state;
    begin(&f, 1);
    get(&f, &a);
    for (int i = 0; i < 40; i++) {
        ask(&f, &b);
        expect(&f, &b, LEASE_FULL);
        assert_true(server_int(&f.server, "PTTL %s", KEY("m")) > TTL_MS);
        io_run_for(f.base.loop, 20);
    }
    caller_end(&a, 0);
    end_quiet(&f);
}

/* --- ending --------------------------------------------------------------------------------------------- */

static void delay_keeps_the_slot(void **state)
{
    struct fixture f;
    struct caller a = {0}, b = {0}, c = {0};
    uint64_t began;

    (void)state;
    begin(&f, 3);
    get(&f, &a);
    get(&f, &b);
    get(&f, &c);
    began = real_ms();
    caller_end(&a, 2 * TTL_MS); /* longer than ttl: it is renewed meanwhile */
    caller_end(&b, 100);
    caller_end(&c, 300);
    assert_int_equal(leases_held(f.ls), 3);
    assert_false(leases_quiet(f.ls));
    while (held_in_redis(&f) == 3 && real_ms() - began < 2000)
        turn(&f);
    assert_in_range(real_ms() - began, 99, 800);
    while (held_in_redis(&f) == 2 && real_ms() - began < 2000)
        turn(&f);
    assert_in_range(real_ms() - began, 299, 1000);
    io_run_for(f.base.loop, TTL_MS + HEARTBEAT_MS);
    assert_int_equal(held_in_redis(&f), 1);
    assert_true(server_int(&f.server, "PTTL %s", KEY("m")) > 0);
    assert_int_equal(leases_counters(f.ls)->restored, 0);
    assert_true(run(&f, quiet, &f, 3000));
    assert_true(real_ms() - began >= 2 * TTL_MS - 1);
    end_quiet(&f);
}

static void ending_in_each_state(void **state)
{
    struct fixture f;
    struct caller a = {0}, b = {0}, c = {0};
    uint64_t commands;

    (void)state;
    begin(&f, 1);
    /* not sent yet: forgotten, without a command */
    commands = leases_redis_counters(f.ls)->commands;
    ask(&f, &a);
    caller_end(&a, 0);
    turn(&f);
    assert_true(leases_quiet(f.ls));
    assert_int_equal(leases_redis_counters(f.ls)->commands, commands);
    /* sent, then granted: released */
    server_pause(&f.server);
    ask(&f, &a);
    turn(&f);
    caller_end(&a, 0);
    server_resume(&f.server);
    assert_true(run(&f, quiet, &f, 2000));
    assert_int_equal(a.answers, 0);
    assert_int_equal(held_in_redis(&f), 0);
    /* sent, then refused: no release */
    get(&f, &b);
    commands = leases_counters(f.ls)->released;
    server_pause(&f.server);
    ask(&f, &a);
    turn(&f);
    caller_end(&a, 0);
    server_resume(&f.server);
    assert_true(run(&f, idle, &f, 2000));
    assert_int_equal(leases_counters(f.ls)->released, commands);
    /* ended by another's answer in the same batch */
    caller_end(&b, 0);
    assert_true(run(&f, quiet, &f, 2000));
    f.scopes[0].cap = f.limits[0].concurrency = 5;
    a.also = &b;
    ask(&f, &a);
    ask(&f, &b);
    ask(&f, &c);
    expect(&f, &c, LEASE_GRANTED);
    assert_int_equal(b.answers, 0);
    a.also = NULL;
    /* from inside the answer */
    caller_end(&a, 0);
    a.at_grant = ACT_END;
    get(&f, &a);
    caller_end(&c, 0);
    assert_true(run(&f, quiet, &f, 2000));
    assert_int_equal(held_in_redis(&f), 0);
    /* sent, then unknown */
    server_pause(&f.server);
    ask(&f, &b);
    turn(&f);
    caller_end(&b, 0);
    assert_true(run(&f, unusable, &f, 2000));
    assert_int_equal(leases_owed(f.ls), 1);
    server_resume(&f.server);
    assert_true(run(&f, quiet, &f, 2000));
    assert_int_equal(b.answers, 0);
    end_quiet(&f);
}

/* --- reconfiguration ------------------------------------------------------------------------------------ */

static void caps_follow_the_configuration(void **state)
{
    struct fixture f;
    struct caller a = {0}, b = {0}, c = {0};
    struct config_limit limits[2];
    struct config_override override = {.value = (char *)(uintptr_t) "acme", .concurrency = 1};
    struct config next;

    (void)state;
    begin(&f, 2);
    get(&f, &a);
    ask_in(&f, &c, 1, 1); /* t/acme */
    expect(&f, &c, LEASE_GRANTED);
    next = f.config;
    next.references_ = 1;
    memcpy(limits, f.limits, sizeof(limits));
    limits[0].concurrency = 1;
    limits[1].overrides = &override;
    limits[1].n_overrides = 1;
    next.limits = limits;
    next.n_limits = 2;
    leases_reconfigure(f.ls, &next);
    assert_int_equal(f.config.references_, 2); /* redis.c's */
    /* calls of the old configuration ask with its caps: the new one's rule */
    ask(&f, &b);
    expect(&f, &b, LEASE_FULL);
    ask_in(&f, &b, 1, 1);
    expect(&f, &b, LEASE_FULL);
    limits[0].concurrency = 3;
    leases_reconfigure(f.ls, &next);
    get(&f, &b);
    caller_end(&a, 0);
    caller_end(&b, 0);
    caller_end(&c, 0);
    assert_true(run(&f, quiet, &f, 2000));
    leases_reconfigure(f.ls, &f.config);
    assert_int_equal(next.references_, 1);
    end_quiet(&f);
}

static bool only_table_left(void *arg)
{
    return mem_live_blocks() <= *(size_t *)arg;
}

static void scope_sets_come_and_go(void **state)
{
    static struct caller all[5000];
    struct fixture f;
    size_t blocks;

    (void)state;
    memset(all, 0, sizeof(all));
    begin(&f, 3);
    f.conf.timeout_ms = 3000;
    blocks = mem_live_blocks();
    for (unsigned i = 0; i < 5000; i++) {
        struct lease_scope s = {.limit = &f.limits[1], .cap = 2, .name = "t", .name_n = 1};
        char value[16];

        snprintf(value, sizeof(value), "x%u", i);
        assert_true(lease_scope_add(&s, slice_of(value)));
        all[i].l = lease_ask(f.ls, &s, 1, &ops, &all[i]);
    }
    assert_true(run(&f, answered, &all[4999], 5000));
    assert_true(run(&f, idle, &f, 5000));
    assert_int_equal(server_int(&f.server, "DBSIZE"), 5000);
    for (unsigned i = 0; i < 5000; i++) {
        assert_int_equal(all[i].answer, LEASE_GRANTED);
        caller_end(&all[i], 0);
    }
    assert_true(run(&f, quiet, &f, 5000));
    assert_int_equal(server_int(&f.server, "DBSIZE"), 0);
    blocks += 8; /* the ring, out and log buffers */
    assert_true(run(&f, only_table_left, &blocks, 5000));
    end_quiet(&f);
}

/* --- everything at once --------------------------------------------------------------------------------- */

#define STORM_CALLERS 60

static void storm_step(struct fixture *f, struct caller *c, unsigned dice)
{
    if (c->l == NULL) {
        c->answers = 0;
        ask_in(f, c, 0, 1 + dice % 2);
    } else if (dice % 3 == 0) {
        caller_end(c, dice % 5 == 0 ? dice % 30 : 0);
    }
}

/*
 * Two instances, limit 5, calls ended in all states, and the server mistreated: never over, nothing left at
 * the end.
 */
static void a_storm_leaves_nothing(void **state)
{
    static struct caller all[2][STORM_CALLERS];
    struct fixture f, g;
    unsigned seed = 42, granted = 0;
    bool both;

    (void)state;
    memset(all, 0, sizeof(all));
    begin(&f, 5);
    memcpy(&g, &f, sizeof(f));
    g.ls = leases_new(f.base.loop, &f.config, &f.conf, NULL, "other");
    for (int round = 0; round < 1500; round++) {
        for (unsigned k = 0; k < 8; k++) {
            seed = seed * 1103515245 + 12345;
            storm_step(seed & 0x800000 ? &f : &g, &all[seed & 0x800000 ? 0 : 1][(seed >> 8) % STORM_CALLERS],
                       seed >> 12);
        }
        if (round % 100 == 50)
            server_ask(&f.server, "SCRIPT FLUSH");
        if (round % 250 == 120)
            server_ask(&f.server, "CLIENT KILL TYPE normal SKIPME yes");
        if (round % 500 == 499) {
            server_pause(&f.server);
            io_run_for(f.base.loop, 320);
            server_resume(&f.server);
        }
        io_run_for(f.base.loop, 1);
        assert_true(held_in_redis(&f) <= 5);
        both = leases_usable(f.ls) && leases_usable(g.ls);
        granted += both ? 1 : 0;
    }
    assert_true(granted > 300);
    for (unsigned i = 0; i < STORM_CALLERS; i++) {
        caller_end(&all[0][i], 0);
        caller_end(&all[1][i], 0);
    }
    assert_true(leases_counters(f.ls)->granted + leases_counters(g.ls)->granted > 100);
    assert_true(run(&g, quiet, &g, 5000));
    assert_true(run(&f, quiet, &f, 5000));
    leases_free(g.ls);
    end_quiet(&f);
}

static bool all_told(void *arg)
{
    struct caller *all = arg;

    for (unsigned i = 0; i < 6; i++)
        if (all[i].l != NULL && all[i].answers == 0)
            return false;
    return true;
}

/*
 * Each allocation fails once, in turn: every ask is answered or was refused at once, and no slot stays
 * behind.
 */
static void any_allocation_may_fail(void **state)
{
    struct fixture f;

    (void)state;
    begin(&f, 100);
    for (uint64_t n = 1; n < 40; n++) {
        struct caller all[6] = {0};

        assert_true(run(&f, usable, &f, 3000));
        mem_fail_at(n, false);
        for (unsigned i = 0; i < 6; i++) {
            all[i].f = &f;
            all[i].l = lease_ask(f.ls, &f.scopes[i % 2], 1 + i % 2, &ops, &all[i]);
        }
        assert_true(run(&f, all_told, all, 3000));
        for (unsigned i = 0; i < 6; i++)
            caller_end(&all[i], i % 3);
        assert_true(run(&f, quiet, &f, 3000));
        mem_fail_at(0, false);
        assert_int_equal(held_in_redis(&f), 0);
    }
    end_quiet(&f);
}

static void freed_alive(void **state)
{
    struct fixture f;
    struct caller all[6] = {0};

    (void)state;
    begin(&f, 3);
    get(&f, &all[0]);
    get(&f, &all[1]);
    caller_end(&all[1], 1000);
    server_pause(&f.server);
    ask(&f, &all[2]);
    turn(&f);
    ask(&f, &all[3]);
    ask(&f, &all[4]);
    turn(&f);
    ask(&f, &all[5]);
    caller_end(&all[0], 0);
    for (unsigned i = 2; i < 6; i++)
        all[i].l = NULL;
    end(&f);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(grants_refuses_releases),
        cmocka_unit_test(several_scopes_all_or_none),
        cmocka_unit_test(a_turn_is_one_call_a_verb),
        cmocka_unit_test(releases_go_before_asks),
        cmocka_unit_test(values_are_made_safe),
        cmocka_unit_test(a_lost_ask_leaves_no_ghost),
        cmocka_unit_test(open_breaker_answers_at_once_without_traffic),
        cmocka_unit_test(frozen_server_keeps_what_is_held),
        cmocka_unit_test(killed_client_keeps_what_is_held),
        cmocka_unit_test(empty_server_gets_its_leases_back),
        cmocka_unit_test(an_ask_that_was_not_sent_is_unavailable),
        cmocka_unit_test(the_pause_outlives_a_connection),
        cmocka_unit_test(what_is_owed_too_long_is_forgotten),
        cmocka_unit_test(script_flush_under_load_is_not_noticed),
        cmocka_unit_test(a_renewal_repeated_brings_nothing_back),
        cmocka_unit_test(wrong_type_fails_closed),
        cmocka_unit_test(no_memory_in_redis_still_releases),
        cmocka_unit_test(a_release_that_fails_is_repeated),
        cmocka_unit_test(replica_is_known_without_asking),
        cmocka_unit_test(rotated_password),
        cmocka_unit_test(over_the_limit_is_counted),
        cmocka_unit_test(strict_ends_what_was_lost),
        cmocka_unit_test(strict_ends_what_could_not_be_renewed),
        cmocka_unit_test(without_strict_nothing_is_lost),
        cmocka_unit_test(ten_thousand_cost_forty_calls_a_heartbeat),
        cmocka_unit_test(few_leases_cost_one_call_a_heartbeat),
        cmocka_unit_test(every_key_expires),
        cmocka_unit_test(delay_keeps_the_slot),
        cmocka_unit_test(ending_in_each_state),
        cmocka_unit_test(caps_follow_the_configuration),
        cmocka_unit_test(scope_sets_come_and_go),
        cmocka_unit_test(a_storm_leaves_nothing),
        cmocka_unit_test(any_allocation_may_fail),
        cmocka_unit_test(freed_alive),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
