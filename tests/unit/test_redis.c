/*
 * test_redis.c - the connection to Redis: greeting, deadlines, breaker, scripts, replies; the private server.
 */
#include "redis_help.h"

#include "log.h"
#include "redis.h"

struct probe { /* the owner */
    struct io_base base;
    struct server server;
    struct config config;
    struct config_redis conf;
    struct redis *r;
    unsigned readies, brokens;
    bool changed;
    redis_reply_fn *on_ready_fn; /* INCR ready, from inside on_ready, answered here */
    unsigned oks, errors, unknowns, agains;
    unsigned next;     /* the number that the next reply must belong to */
    bool broken_first; /* on_broken came before an unknown */
    int64_t last_int;
    char last_error[200];
    char last_str[200];
};

static void on_ready(void *owner)
{
    struct probe *p = owner;

    assert_false(redis_usable(p->r));
    assert_true(redis_accepts(p->r));
    p->readies++;
    p->changed = redis_server_changed(p->r);
    if (p->on_ready_fn != NULL) {
        redis_begin(p->r, 2);
        redis_arg(p->r, SLICE("INCR"));
        redis_arg(p->r, SLICE("ready"));
        assert_true(redis_send(p->r, p->on_ready_fn, p));
    }
}

static void on_broken(void *owner)
{
    struct probe *p = owner;

    p->brokens++;
}

static const struct redis_ops ops = {.on_ready = on_ready, .on_broken = on_broken};

static void on_reply(void *arg, enum redis_status status, const struct redis_value *v)
{
    struct probe *p = arg;

    if (status == REDIS_OK) {
        p->oks++;
        if (redis_value_type(v) == REDIS_TYPE_INT)
            p->last_int = redis_value_int(v);
        if (redis_value_type(v) == REDIS_TYPE_STRING)
            snprintf(p->last_str, sizeof(p->last_str), "%.*s", (int)redis_value_str(v).n,
                     redis_value_str(v).p);
    } else if (status == REDIS_ERROR) {
        p->errors++;
        snprintf(p->last_error, sizeof(p->last_error), "%.*s", (int)redis_value_str(v).n,
                 redis_value_str(v).p);
    } else if (status == REDIS_UNKNOWN) {
        assert_null(v);
        assert_false(redis_usable(p->r));
        p->broken_first = p->brokens > 0;
        p->unknowns++;
    } else {
        assert_null(v);
        p->agains++;
    }
}

static bool answered(void *arg)
{
    struct probe *p = arg;

    return redis_in_flight(p->r) == 0;
}

static bool usable(void *arg)
{
    return redis_usable(((struct probe *)arg)->r);
}

static bool unusable(void *arg)
{
    return !redis_usable(((struct probe *)arg)->r);
}

static void begin(struct probe *p)
{
    *p = (struct probe){.base = io_begin()};
    server_start(&p->server, NULL);
    p->config = (struct config){.references_ = 1};
    p->conf = redis_conf(&p->server);
}

static void dial(struct probe *p)
{
    p->r = redis_new(p->base.loop, &p->config, &p->conf, NULL, &ops, p);
    assert_non_null(p->r);
}

static void end(struct probe *p)
{
    if (p->r != NULL)
        redis_free(p->r);
    server_stop(&p->server);
    assert_int_equal(p->config.references_, 1);
    log_thread_end();
    io_end(&p->base);
}

static void begin_usable(struct probe *p)
{
    begin(p);
    dial(p);
    assert_false(redis_usable(p->r));
    assert_string_equal(redis_trouble(p->r), "connecting");
    assert_true(io_run(p->base.loop, usable, p, 5000));
    assert_string_equal(redis_trouble(p->r), "");
}

/* Sends words separated by spaces. */
static bool send_words(struct probe *p, const char *words, redis_reply_fn *fn, void *arg)
{
    struct slice rest = slice_of(words);
    size_t n = 1;

    for (size_t i = 0; i < rest.n; i++)
        n += rest.p[i] == ' ';
    redis_begin(p->r, n);
    while (n-- > 0) {
        size_t at = slice_find(rest, ' ');

        redis_arg(p->r, (struct slice){rest.p, at});
        rest = at == rest.n ? (struct slice){rest.p + at, 0}
                            : (struct slice){rest.p + at + 1, rest.n - at - 1};
    }
    return redis_send(p->r, fn, arg);
}

static bool tls_refused(void *arg)
{
    return strcmp(redis_trouble(((struct probe *)arg)->r), "tls") == 0;
}

/* --- greeting ------------------------------------------------------------------------------------------- */

static void greets_and_serves(void **state)
{
    struct probe p;

    (void)state;
    begin_usable(&p);
    assert_int_equal(p.readies, 1);
    assert_false(p.changed);
    assert_non_null(strstr(server_ask(&p.server, "CLIENT LIST"), "name=leasegate"));
    assert_true(send_words(&p, "SET a 7", on_reply, &p));
    assert_true(send_words(&p, "INCR a", on_reply, &p));
    assert_true(send_words(&p, "LPUSH a x", on_reply, &p));
    assert_true(io_run(p.base.loop, answered, &p, 2000));
    assert_int_equal(p.oks, 2);
    assert_int_equal(p.last_int, 8);
    assert_int_equal(p.errors, 1);
    assert_non_null(strstr(p.last_error, "WRONGTYPE"));
    assert_true(redis_usable(p.r));
    end(&p);
}

static void greets_over_tcp_into_a_database(void **state)
{
    struct probe p;
    const char *host = *state; /* an address, or a name */

    begin(&p);
    server_kill(&p.server);
    p.server.port = free_port();
    server_spawn(&p.server, NULL);
    p.conf.kind = CONFIG_REDIS_TCP;
    p.conf.port = p.server.port;
    p.conf.db = 3;
    p.conf.host = (char *)(uintptr_t)host;
    dial(&p);
    assert_true(io_run(p.base.loop, usable, &p, 5000));
    assert_true(send_words(&p, "SET a 7", on_reply, &p));
    assert_true(io_run(p.base.loop, answered, &p, 2000));
    assert_string_equal(server_ask(&p.server, "SELECT 3"), "OK");
    assert_string_equal(server_ask(&p.server, "GET a"), "7");
    end(&p);
}

static void greets_over_tls(void **state)
{
    struct probe p;
    struct io_certs certs;
    struct buf why = {0};
    struct tls_context *good, *bad;
    char port[8];

    (void)state;
    begin(&p);
    server_kill(&p.server);
    io_certs_make(&certs);
    p.conf.kind = CONFIG_REDIS_TCP;
    p.conf.port = free_port();
    snprintf(port, sizeof(port), "%u", p.conf.port);
    server_spawn(&p.server, (const char *const[]){"--tls-port", port, "--tls-cert-file", certs.cert,
                                                  "--tls-key-file", certs.key, "--tls-ca-cert-file", certs.ca,
                                                  "--tls-auth-clients", "no", NULL});
    good = tls_context_client(certs.ca, "", "", true, false, &why);
    bad = tls_context_client("", "", "", true, false, &why);
    assert_non_null(good);
    assert_non_null(bad);
    p.conf.timeout_ms = 2000; /* handshakes under a sanitizer */
    p.r = redis_new(p.base.loop, &p.config, &p.conf, bad, &ops, &p);
    assert_true(io_run(p.base.loop, tls_refused, &p, 5000));
    redis_free(p.r);
    p.r = redis_new(p.base.loop, &p.config, &p.conf, good, &ops, &p);
    assert_true(io_run(p.base.loop, usable, &p, 5000));
    assert_true(send_words(&p, "INCR a", on_reply, &p));
    assert_true(io_run(p.base.loop, answered, &p, 3000));
    assert_int_equal(p.oks, 1);
    redis_free(p.r);
    p.r = NULL;
    tls_context_unref(good);
    tls_context_unref(bad);
    buf_free(&why);
    io_certs_remove(&certs);
    end(&p);
}

static bool unresolved(void *arg)
{
    return strcmp(redis_trouble(((struct probe *)arg)->r), "resolve") == 0;
}

static void names_that_do_not_resolve_are_said_so(void **state)
{
    struct probe p;

    (void)state;
    begin(&p);
    p.conf.kind = CONFIG_REDIS_TCP;
    p.conf.host = (char *)(uintptr_t) "no-such-host.invalid";
    dial(&p);
    assert_true(io_run(p.base.loop, unresolved, &p, 5000));
    end(&p);
}

static void on_ready_commands_come_before_usable(void **state)
{
    struct probe p;

    (void)state;
    begin(&p);
    p.on_ready_fn = on_reply;
    dial(&p);
    assert_false(send_words(&p, "INCR early", on_reply, &p));
    assert_true(io_run(p.base.loop, usable, &p, 5000));
    assert_int_equal(p.oks, 1);
    assert_int_equal(server_int(&p.server, "GET ready"), 1);
    assert_int_equal(server_int(&p.server, "EXISTS early"), 0);
    end(&p);
}

static bool refused(void *arg)
{
    return strcmp(redis_trouble(((struct probe *)arg)->r), "refused") == 0;
}

static void absent_server_is_refused_until_it_comes(void **state)
{
    struct probe p;

    (void)state;
    begin(&p);
    server_kill(&p.server);
    dial(&p);
    assert_true(io_run(p.base.loop, refused, &p, 5000));
    server_spawn(&p.server, NULL);
    assert_true(io_run(p.base.loop, usable, &p, 1000));
    assert_int_equal(p.brokens, 0); /* it was never open */
    end(&p);
}

static bool trouble_is_auth(void *arg)
{
    return strcmp(redis_trouble(((struct probe *)arg)->r), "auth") == 0;
}

static void wrong_password_is_named_and_heals(void **state)
{
    struct probe p;

    (void)state;
    begin(&p);
    server_ask(&p.server, "CONFIG SET requirepass other");
    p.conf.password = (char *)(uintptr_t) "secret";
    dial(&p);
    assert_true(io_run(p.base.loop, trouble_is_auth, &p, 5000));
    assert_int_equal(p.readies, 0);
    server_ask(&p.server, "AUTH other");
    server_ask(&p.server, "CONFIG SET requirepass secret");
    assert_true(io_run(p.base.loop, usable, &p, 1000));
    end(&p);
}

static bool trouble_is_maxclients(void *arg)
{
    return strcmp(redis_trouble(((struct probe *)arg)->r), "maxclients") == 0;
}

static void a_full_server_is_named(void **state)
{
    struct probe p;

    (void)state;
    begin(&p);
    server_ask(&p.server, "CONFIG SET maxclients 1");
    dial(&p);
    assert_true(io_run(p.base.loop, trouble_is_maxclients, &p, 5000));
    server_ask(&p.server, "CONFIG SET maxclients 10");
    assert_true(io_run(p.base.loop, usable, &p, 1000));
    end(&p);
}

static void missing_password_is_auth_too(void **state)
{
    struct probe p;

    (void)state;
    begin(&p);
    server_ask(&p.server, "CONFIG SET requirepass other");
    dial(&p);
    assert_true(io_run(p.base.loop, trouble_is_auth, &p, 5000));
    end(&p);
}

static void acl_user_without_niceties_will_do(void **state)
{
    struct probe p;

    (void)state;
    begin(&p);
    server_ask(&p.server, "ACL SETUSER app on >pw ~* +@scripting +incr +select +ping");
    p.conf.user = (char *)(uintptr_t) "app";
    p.conf.password = (char *)(uintptr_t) "pw";
    dial(&p);
    assert_true(io_run(p.base.loop, usable, &p, 5000));
    assert_true(send_words(&p, "INCR a", on_reply, &p));
    assert_true(io_run(p.base.loop, answered, &p, 2000));
    assert_int_equal(p.oks, 1);
    /* a command that is not allowed says that nothing will work */
    assert_true(send_words(&p, "SET a 1", on_reply, &p));
    assert_true(io_run(p.base.loop, unusable, &p, 2000));
    assert_int_equal(p.errors, 1);
    assert_string_equal(redis_trouble(p.r), "noperm");
    end(&p);
}

/* --- failure -------------------------------------------------------------------------------------------- */

static void frozen_server_leaves_unknowns_and_heals(void **state)
{
    struct probe p;
    uint64_t began;

    (void)state;
    begin_usable(&p);
    server_pause(&p.server);
    for (int i = 0; i < 500; i++)
        assert_true(send_words(&p, "INCR frozen", on_reply, &p));
    began = real_ms();
    assert_true(io_run(p.base.loop, unusable, &p, 2000));
    assert_true(real_ms() - began >= 245 && real_ms() - began < 600);
    assert_string_equal(redis_trouble(p.r), "timeout");
    assert_true(io_run(p.base.loop, answered, &p, 1000));
    assert_int_equal(p.unknowns, 500);
    assert_int_equal(p.brokens, 1);
    assert_false(p.broken_first);
    assert_false(send_words(&p, "INCR late", on_reply, &p));
    io_run_for(p.base.loop, 1500); /* several attempts: accepted by the kernel, never answered */
    assert_true(redis_counters(p.r)->connects >= 3 && redis_counters(p.r)->connects <= 12);
    began = real_ms();
    server_resume(&p.server);
    assert_true(io_run(p.base.loop, usable, &p, 3000));
    assert_true(real_ms() - began < 1000);
    assert_false(p.changed);
    /* nothing of the old connections runs behind what is sent now */
    assert_true(send_words(&p, "SET frozen 0", on_reply, &p));
    assert_true(io_run(p.base.loop, answered, &p, 2000));
    assert_int_equal(server_int(&p.server, "GET frozen"), 0);
    io_run_for(p.base.loop, 100);
    assert_int_equal(server_int(&p.server, "GET frozen"), 0);
    assert_int_equal(p.unknowns, 500);
    end(&p);
}

static bool ready_twice(void *arg)
{
    struct probe *p = arg;

    return p->readies == 2 && redis_usable(p->r);
}

static void killed_client_comes_back(void **state)
{
    struct probe p;

    (void)state;
    begin_usable(&p);
    assert_int_equal(server_int(&p.server, "CLIENT KILL TYPE normal SKIPME yes"), 1);
    assert_true(io_run(p.base.loop, ready_twice, &p, 1000));
    assert_int_equal(p.brokens, 1);
    assert_false(p.changed);
    end(&p);
}

static void another_server_is_noticed(void **state)
{
    struct probe p;

    (void)state;
    begin_usable(&p);
    server_kill(&p.server);
    assert_true(io_run(p.base.loop, unusable, &p, 1000));
    server_spawn(&p.server, NULL);
    assert_true(io_run(p.base.loop, ready_twice, &p, 1500));
    assert_true(p.changed);
    end(&p);
}

/* An id of the server before means someone else on this one: it must not be killed. */
static void strangers_are_not_killed(void **state)
{
    struct probe p;

    (void)state;
    begin_usable(&p);
    server_kill(&p.server);
    server_spawn(&p.server, NULL); /* ids begin anew: the line has one that our connection had */
    assert_true(io_run(p.base.loop, ready_twice, &p, 2000));
    assert_string_equal(server_ask(&p.server, "PING"), "PONG");
    assert_int_equal(server_calls(&p.server, "client|kill"), 0);
    end(&p);
}

static void old_connection_is_killed(void **state)
{
    struct probe p;

    (void)state;
    begin_usable(&p);
    server_ask(&p.server, "CONFIG RESETSTAT");
    server_pause(&p.server);
    assert_true(send_words(&p, "INCR a", on_reply, &p));
    assert_true(io_run(p.base.loop, unusable, &p, 2000));
    server_resume(&p.server);
    assert_true(io_run(p.base.loop, ready_twice, &p, 2000));
    assert_int_equal(server_calls(&p.server, "client|kill"), 1);
    end(&p);
}

static void idle_connection_is_tried(void **state)
{
    struct probe p;
    uint64_t began;

    (void)state;
    begin_usable(&p);
    server_pause(&p.server);
    began = real_ms();
    assert_true(io_run(p.base.loop, unusable, &p, 5000));
    assert_true(real_ms() - began < 3000);
    server_resume(&p.server);
    assert_true(io_run(p.base.loop, usable, &p, 1000));
    end(&p);
}

/*
 * A loop that was held up sees its timers before its sockets: no verdict before the replies were looked for.
 */
static void own_stall_is_no_timeout(void **state)
{
    struct probe p;
    struct timespec stall = {.tv_nsec = 400 * 1000 * 1000};

    (void)state;
    begin_usable(&p);
    for (int i = 0; i < 3; i++) {
        assert_true(send_words(&p, "INCR a", on_reply, &p));
        uv_run(loop_uv(p.base.loop), UV_RUN_NOWAIT); /* sent */
        nanosleep(&stall, NULL);
        assert_true(io_run(p.base.loop, answered, &p, 2000));
        nanosleep(&stall, NULL); /* between building and sending */
    }
    assert_int_equal(p.oks, 3);
    assert_int_equal(p.unknowns, 0);
    assert_int_equal(redis_counters(p.r)->breaks, 0);
    end(&p);
}

static void replica_is_readonly(void **state)
{
    struct probe p;

    (void)state;
    begin_usable(&p);
    server_ask(&p.server, "REPLICAOF 127.0.0.1 1");
    assert_true(send_words(&p, "SET a 1", on_reply, &p));
    assert_true(io_run(p.base.loop, unusable, &p, 2000));
    assert_int_equal(p.errors, 1);
    assert_string_equal(redis_trouble(p.r), "readonly");
    end(&p);
}

/* Someone else listens there: garbage, silence, or a hang-up at once. */
static void not_a_redis_is_never_usable(void **state)
{
    struct probe p;
    uint16_t port;
    int fd, conn;

    (void)state;
    begin(&p);
    fd = io_raw_listen(8, &port);
    p.conf.kind = CONFIG_REDIS_TCP;
    p.conf.port = port;
    dial(&p);
    io_run_for(p.base.loop, 20);
    conn = accept(fd, NULL, NULL);
    assert_true(conn >= 0);
    assert_int_equal(write(conn, "HTTP/1.1 400 Bad Request\r\n\r\n", 28), 28);
    io_run_for(p.base.loop, 50);
    assert_string_equal(redis_trouble(p.r), "protocol");
    close(conn);
    close(fd);
    end(&p);
}

static void replies_in_fragments(void **state)
{
    struct redis_reader *rd = redis_reader_new();
    static const char bytes[] = "*3\r\n:-7\r\n$5\r\nab\r\nc\r\n*2\r\n+OK\r\n$-1\r\n-ERR no\r\n*0\r\n";
    const struct redis_value *v;
    unsigned n = 0;
    bool failed;

    (void)state;
    assert_non_null(rd);
    for (size_t i = 0; i < sizeof(bytes) - 1; i++) {
        assert_true(redis_reader_feed(rd, bytes + i, 1));
        while ((v = redis_reader_next(rd, &failed)) != NULL) {
            n++;
            if (n == 1) {
                assert_int_equal(redis_value_count(v), 3);
                assert_int_equal(redis_value_int(redis_value_at(v, 0)), -7);
                assert_true(slice_eq(redis_value_str(redis_value_at(v, 1)), SLICE("ab\r\nc")));
                v = redis_value_at(v, 2);
                assert_true(slice_eq(redis_value_str(redis_value_at(v, 0)), SLICE("OK")));
                assert_int_equal(redis_value_type(redis_value_at(v, 1)), REDIS_TYPE_NIL);
            } else if (n == 2) {
                assert_int_equal(redis_value_type(v), REDIS_TYPE_ERROR);
                assert_true(redis_value_is_error(v, "ERR"));
                assert_false(redis_value_is_error(v, "OOM"));
            } else {
                assert_int_equal(redis_value_count(v), 0);
            }
        }
        assert_false(failed);
    }
    assert_int_equal(n, 3);
    redis_reader_free(rd);
}

/* Redis 6 wraps what a script ran into. */
static void wrapped_errors_are_recognised(void **state)
{
    static const struct {
        const char *text, *code;
        bool is;
    } rows[] = {
        {"-ERR Error running script (call to f_1): @user_script:66: WRONGTYPE Operation against a key\r\n",
         "WRONGTYPE", true},
        {"-ERR Error running script (call to f_1): @user_script:9: -READONLY You can't write\r\n", "READONLY",
         true},
        {"-ERR Error running script (call to f_1): @user_script:9: -READONLY You can't write\r\n", "OOM",
         false},
        {"-ERR something: OOM\r\n", "OOM", false},
        {"-OOM command not allowed\r\n", "OOM", true},
    };

    (void)state;
    for (size_t i = 0; i < ARRAY_LEN(rows); i++) {
        struct redis_reader *rd = redis_reader_new();
        const struct redis_value *v;
        bool failed;

        assert_true(redis_reader_feed(rd, rows[i].text, strlen(rows[i].text)));
        v = redis_reader_next(rd, &failed);
        assert_non_null(v);
        assert_int_equal(redis_value_is_error(v, rows[i].code), rows[i].is);
        redis_reader_free(rd);
    }
}

static void monstrous_replies_are_refused(void **state)
{
    static const char *const rows[] = {"*99999999\r\n",
                                       "*2147483647\r\n",
                                       "*1\r\n*1\r\n*1\r\n*1\r\n*1\r\n*1\r\n*1\r\n*1\r\n*1\r\n*1\r\n*1\r\n",
                                       "?\r\n",
                                       "$abc\r\n",
                                       ":12x\r\n",
                                       "$99999999999999999999\r\n"};
    size_t blocks = mem_live_blocks();

    (void)state;
    for (size_t i = 0; i < ARRAY_LEN(rows); i++) {
        struct redis_reader *rd = redis_reader_new();
        bool failed = false;

        if (redis_reader_feed(rd, rows[i], strlen(rows[i])))
            assert_null(redis_reader_next(rd, &failed));
        assert_true(failed);
        redis_reader_free(rd);
    }
    assert_int_equal(mem_live_blocks(), blocks);
}

/* --- many ----------------------------------------------------------------------------------------------- */

struct numbered {
    struct probe *p;
    unsigned n;
};

static void on_numbered(void *arg, enum redis_status status, const struct redis_value *v)
{
    struct numbered *x = arg;

    assert_int_equal(status, REDIS_OK);
    assert_int_equal(redis_value_int(v), x->n + 1);
    assert_int_equal(x->p->next++, x->n);
}

static void ten_thousand_in_a_turn_come_in_order(void **state)
{
    static struct numbered all[10000];
    struct probe p;

    (void)state;
    begin_usable(&p);
    for (unsigned i = 0; i < 10000; i++) {
        all[i] = (struct numbered){&p, i};
        assert_true(send_words(&p, "INCR n", on_numbered, &all[i]));
    }
    assert_true(io_run(p.base.loop, answered, &p, 5000));
    assert_int_equal(p.next, 10000);
    end(&p);
}

static void in_flight_is_capped(void **state)
{
    struct probe p;
    unsigned sent = 0;

    (void)state;
    begin_usable(&p);
    while (sent < 100000 && send_words(&p, "PING", on_reply, &p))
        sent++;
    assert_int_equal(sent, 32768);
    assert_true(io_run(p.base.loop, answered, &p, 5000));
    assert_int_equal(p.oks, sent);
    end(&p);
}

static void free_with_commands_in_flight(void **state)
{
    struct probe p;

    (void)state;
    begin_usable(&p);
    server_pause(&p.server);
    assert_true(send_words(&p, "INCR a", on_reply, &p));
    uv_run(loop_uv(p.base.loop), UV_RUN_NOWAIT);
    assert_true(send_words(&p, "INCR a", on_reply, &p));
    redis_free(p.r);
    p.r = NULL;
    io_run_for(p.base.loop, 20);
    assert_int_equal(p.oks + p.errors + p.unknowns, 0);
    server_resume(&p.server);
    end(&p);
}

/* --- scripts -------------------------------------------------------------------------------------------- */

static bool send_admit(struct probe *p, const char *id)
{
    redis_begin_script(p->r, REDIS_SCRIPT_ADMIT, 1, 4);
    redis_arg(p->r, SLICE("k"));
    redis_arg_u64(p->r, 6000);
    redis_arg_u64(p->r, 1);
    redis_arg_u64(p->r, 10);
    redis_arg(p->r, slice_of(id));
    return redis_send(p->r, on_reply, p);
}

static void lost_scripts_are_loaded_again(void **state)
{
    struct probe p;

    (void)state;
    begin_usable(&p);
    assert_true(send_admit(&p, "a"));
    assert_true(io_run(p.base.loop, answered, &p, 2000));
    assert_int_equal(p.oks, 1);
    for (int i = 0; i < 20; i++) {
        server_ask(&p.server, "SCRIPT FLUSH");
        assert_true(send_admit(&p, "b"));
        assert_true(send_admit(&p, "c"));
        assert_true(io_run(p.base.loop, answered, &p, 2000));
        assert_true(send_admit(&p, "d"));
        assert_true(io_run(p.base.loop, answered, &p, 2000));
    }
    assert_int_equal(p.agains, 40);
    assert_int_equal(p.oks, 21);
    assert_int_equal(p.errors, 0);
    assert_int_equal(server_int(&p.server, "ZCARD k"), 2);
    assert_int_equal(redis_counters(p.r)->breaks, 0);
    end(&p);
}

/* --- no memory ------------------------------------------------------------------------------------------ */

static bool settled_or_time(void *arg)
{
    struct probe *p = arg;

    return redis_usable(p->r) && redis_in_flight(p->r) == 0;
}

/* Each allocation fails once, in turn: the connection comes up all the same, nothing leaks, nothing hangs. */
static void any_allocation_may_fail(void **state)
{
    struct probe p;

    (void)state;
    begin(&p);
    for (uint64_t n = 1; n < 60; n++) {
        mem_fail_at(n, false);
        p.r = redis_new(p.base.loop, &p.config, &p.conf, NULL, &ops, &p);
        if (p.r == NULL)
            continue;
        assert_true(io_run(p.base.loop, settled_or_time, &p, 3000));
        for (int i = 0; i < 3; i++)
            (void)!send_words(&p, "INCR a", on_reply, &p);
        assert_true(io_run(p.base.loop, settled_or_time, &p, 3000));
        mem_fail_at(0, false);
        redis_free(p.r);
        p.r = NULL;
    }
    end(&p);
}

/* --- the private server --------------------------------------------------------------------------------- */

static bool gone(void *arg)
{
    return kill(*(pid_t *)arg, 0) != 0 && errno == ESRCH;
}

static pid_t pid_of(const char *path)
{
    struct server s = {.fd = -1};
    const char *at;
    pid_t pid;

    snprintf(s.path, sizeof(s.path), "%s", path);
    server_dial(&s);
    at = strstr(server_ask(&s, "INFO server"), "process_id:");
    assert_non_null(at);
    pid = (pid_t)strtol(at + 11, NULL, 10);
    close(s.fd);
    return pid;
}

static void embedded_starts_and_leaves_nothing(void **state)
{
    struct probe p;
    struct buf why = {0};
    char *path = NULL, dir[128];
    struct stat st;
    pid_t pid;

    (void)state;
    begin(&p);
    if (!redis_embedded_start(&path, &why))
        fail_msg("%.*s", (int)why.n, why.p);
    buf_free(&why);
    snprintf(dir, sizeof(dir), "%.*s", (int)(strrchr(path, '/') - path), path);
    assert_int_equal(stat(dir, &st), 0);
    assert_int_equal(st.st_mode & 0777, 0700);
    p.conf.kind = CONFIG_REDIS_EMBEDDED;
    p.conf.path = path;
    dial(&p);
    assert_true(io_run(p.base.loop, usable, &p, 2000));
    pid = pid_of(path);
    redis_embedded_stop();
    assert_true(gone(&pid));
    assert_int_not_equal(stat(dir, &st), 0);
    assert_true(io_run(p.base.loop, unusable, &p, 2000));
    redis_embedded_stop();
    redis_free(p.r);
    p.r = NULL;
    mem_free(path);
    end(&p);
}

static void embedded_dies_with_its_parent(void **state)
{
    struct io_base base = io_begin();
    int pipe_fd[2];
    char path[128] = {0};
    pid_t parent, server;

    (void)state;
    assert_int_equal(pipe(pipe_fd), 0);
    parent = fork();
    if (parent == 0) {
        struct buf why = {0};
        char *p = NULL;

        if (!redis_embedded_start(&p, &why) || write(pipe_fd[1], p, strlen(p)) < 0)
            _exit(1);
        for (;;)
            pause();
    }
    assert_true(read(pipe_fd[0], path, sizeof(path) - 1) > 0);
    server = pid_of(path);
    assert_false(gone(&server));
    kill(parent, SIGKILL);
    waitpid(parent, NULL, 0);
    assert_true(io_run(base.loop, gone, &server, 3000));
    close(pipe_fd[0]);
    close(pipe_fd[1]);
    *strrchr(path, '/') = '\0';
    remove_dir(path);
    io_end(&base);
}

static void embedded_says_what_is_missing(void **state)
{
    struct buf why = {0};
    const char *was = getenv("PATH");
    char *path = NULL, *saved;

    (void)state;
    was = was == NULL ? "" : was;
    saved = mem_strndup(was, strlen(was));
    assert_non_null(saved);
    setenv("PATH", "/nonexistent", 1);
    assert_false(redis_embedded_start(&path, &why));
    setenv("PATH", saved, 1);
    assert_true(buf_put(&why, (struct slice){"", 1}));
    assert_non_null(strstr(why.p, "redis-server"));
    assert_null(path);
    buf_free(&why);
    mem_free(saved);
    redis_embedded_stop();
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(greets_and_serves),
        cmocka_unit_test_prestate(greets_over_tcp_into_a_database, (void *)(uintptr_t) "127.0.0.1"),
        cmocka_unit_test_prestate(greets_over_tcp_into_a_database, (void *)(uintptr_t) "localhost"),
        cmocka_unit_test(greets_over_tls),
        cmocka_unit_test(names_that_do_not_resolve_are_said_so),
        cmocka_unit_test(on_ready_commands_come_before_usable),
        cmocka_unit_test(absent_server_is_refused_until_it_comes),
        cmocka_unit_test(wrong_password_is_named_and_heals),
        cmocka_unit_test(missing_password_is_auth_too),
        cmocka_unit_test(a_full_server_is_named),
        cmocka_unit_test(acl_user_without_niceties_will_do),
        cmocka_unit_test(frozen_server_leaves_unknowns_and_heals),
        cmocka_unit_test(killed_client_comes_back),
        cmocka_unit_test(another_server_is_noticed),
        cmocka_unit_test(strangers_are_not_killed),
        cmocka_unit_test(old_connection_is_killed),
        cmocka_unit_test(idle_connection_is_tried),
        cmocka_unit_test(own_stall_is_no_timeout),
        cmocka_unit_test(replica_is_readonly),
        cmocka_unit_test(not_a_redis_is_never_usable),
        cmocka_unit_test(replies_in_fragments),
        cmocka_unit_test(wrapped_errors_are_recognised),
        cmocka_unit_test(monstrous_replies_are_refused),
        cmocka_unit_test(ten_thousand_in_a_turn_come_in_order),
        cmocka_unit_test(in_flight_is_capped),
        cmocka_unit_test(free_with_commands_in_flight),
        cmocka_unit_test(lost_scripts_are_loaded_again),
        cmocka_unit_test(any_allocation_may_fail),
        cmocka_unit_test(embedded_starts_and_leaves_nothing),
        cmocka_unit_test(embedded_dies_with_its_parent),
        cmocka_unit_test(embedded_says_what_is_missing),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
