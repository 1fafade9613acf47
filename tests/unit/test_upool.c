/*
 * test_upool.c - the pool of upstream connections and its resolver, against listeners on 127.0.0.0/8. Names
 * are answered by a getaddrinfo of this file, so that every order of good, refusing and silent addresses
 * can be had.
 */
#include "io_help.h"

#include "resolve.h"
#include "upool.h"

#include <netdb.h>
#include <stdatomic.h>

/* --- names ---------------------------------------------------------------------------------------------- */

static atomic_int asked, broken, slow_ms;

/*
 * "a,b.test" answers with a and b in this order, 127.0.0.1 (a listener's) with itself; any other name does
 * not exist.
 */
/* NOLINTNEXTLINE(readability-inconsistent-declaration-parameter-name): the C library's are reserved names */
int getaddrinfo(const char *node, const char *service, const struct addrinfo *hints, struct addrinfo **out)
{
    char text[256], *save = NULL;
    const char *dot = strcmp(node, "127.0.0.1") == 0 ? node + strlen(node) : strstr(node, ".test");
    struct addrinfo **link = out;

    (void)hints;
    *out = NULL;
    if (dot == NULL || atomic_load(&broken) != 0)
        goto end;
    snprintf(text, sizeof(text), "%.*s", (int)(dot - node), node);
    for (char *a = strtok_r(text, ",", &save); a != NULL; a = strtok_r(NULL, ",", &save)) {
        struct {
            struct addrinfo info;
            struct sockaddr_in6 address;
        } *x = calloc(1, sizeof(*x));
        uint16_t port = (uint16_t)strtoul(service, NULL, 10);
        bool six = strchr(a, ':') != NULL;

        if (six)
            uv_ip6_addr(a, port, &x->address);
        else
            uv_ip4_addr(a, port, (struct sockaddr_in *)&x->address);
        x->info.ai_family = six ? AF_INET6 : AF_INET;
        x->info.ai_socktype = SOCK_STREAM;
        x->info.ai_addrlen = six ? sizeof(struct sockaddr_in6) : sizeof(struct sockaddr_in);
        x->info.ai_addr = (struct sockaddr *)&x->address;
        *link = &x->info;
        link = &x->info.ai_next;
    }
end:
    if (atomic_load(&slow_ms) > 0)
        usleep((unsigned)atomic_load(&slow_ms) * 1000);
    atomic_fetch_add(&asked, 1);
    return *out == NULL ? EAI_NONAME : 0;
}

/* NOLINTNEXTLINE(readability-inconsistent-declaration-parameter-name) */
void freeaddrinfo(struct addrinfo *a)
{
    while (a != NULL) {
        struct addrinfo *next = a->ai_next;

        free(a);
        a = next;
    }
}

/* --- a pool, an upstream and borrowers ------------------------------------------------------------------ */

static struct io_certs certs;
static struct tls_context *tls_server, *tls_client, *tls_lax_client; /* lax: verifies nothing */

struct rig {
    struct io_base base;
    struct stream_listener *listener;
    struct io_point server; /* the last connection accepted */
    struct stream *accepted[16];
    size_t n_accepted;
    struct config config;
    struct config_upstream conf;
    struct upool *pool;
};

static const struct stream_ops server_ops;

static void rig_accept(void *arg, struct stream *s)
{
    struct rig *r = arg;

    assert_true(r->n_accepted < ARRAY_LEN(r->accepted));
    r->accepted[r->n_accepted++] = s;
    stream_adopt(s, &server_ops, r);
}

static void server_nothing(void *owner)
{
    (void)owner;
}

static void server_data(void *owner, char *bytes, size_t n)
{
    (void)owner;
    (void)bytes;
    (void)n;
}

static void server_end(void *owner, enum stream_end how)
{
    (void)owner;
    (void)how;
}

static void server_error(void *owner, int error, const char *detail)
{
    (void)owner;
    (void)error;
    (void)detail;
}

static const struct stream_ops server_ops = {server_nothing, server_data, server_end, server_nothing,
                                             server_error};

static struct rig *rig_new(const char *host, struct tls_context *server, struct tls_context *client)
{
    struct rig *r = calloc(1, sizeof(*r));
    struct buf why = {0};

    r->base = io_begin();
    r->listener = stream_listen(r->base.loop, "127.0.0.1", 0, server, rig_accept, r, &why);
    assert_non_null(r->listener);
    r->config.references_ = 1000; /* never the last one: it stands in r */
    r->conf = (struct config_upstream){
        .host = (char *)(uintptr_t)host,
        .port = stream_listener_port(r->listener),
        .use_tls = client != NULL,
        .connect_timeout_ms = 3000,
        .pool_idle_max = 3,
        .pool_idle_timeout_ms = 60000,
        .pool_max_age_ms = 600000,
        .resolve_interval_ms = 60000,
    };
    r->pool = upool_new(r->base.loop, &r->config, &r->conf, client);
    assert_non_null(r->pool);
    return r;
}

static void rig_close_accepted(struct rig *r)
{
    while (r->n_accepted > 0)
        stream_close(r->accepted[--r->n_accepted]);
}

static void rig_free(struct rig *r)
{
    if (r->pool != NULL)
        upool_retire(r->pool);
    stream_listener_close(r->listener);
    rig_close_accepted(r);
    io_end(&r->base);
    assert_int_equal(r->config.references_, 1000);
    free(r);
}

struct wish {
    unsigned dialed;
    enum udial_result how;
    struct uconn *c;
    char detail[256];
    unsigned data, ends, errors;
    bool forbidden; /* no callback may come */
};

static void wish_dialed(void *owner, enum udial_result how, struct uconn *c, const char *detail)
{
    struct wish *w = owner;

    assert_false(w->forbidden);
    assert_int_equal(w->dialed, 0);
    assert_int_equal(how == UDIAL_OK, c != NULL);
    w->dialed++;
    w->how = how;
    w->c = c;
    snprintf(w->detail, sizeof(w->detail), "%s", detail);
}

static void wish_data(void *owner, char *bytes, size_t n)
{
    (void)bytes;
    (void)n;
    ((struct wish *)owner)->data++;
}

static void wish_end(void *owner, enum stream_end how)
{
    (void)how;
    ((struct wish *)owner)->ends++;
}

static void wish_drain(void *owner)
{
    (void)owner;
}

static void wish_error(void *owner, int error, const char *detail)
{
    (void)error;
    (void)detail;
    ((struct wish *)owner)->errors++;
}

static const struct uconn_ops wish_ops = {wish_dialed, wish_data, wish_end, wish_drain, wish_error};

static bool wish_over(void *arg)
{
    return ((struct wish *)arg)->dialed > 0;
}

static bool wish_ended(void *arg)
{
    return ((struct wish *)arg)->ends > 0;
}

static void dial_ok(struct rig *r, struct wish *w)
{
    *w = (struct wish){0};
    assert_non_null(upool_dial(r->pool, false, &wish_ops, w));
    assert_int_equal(w->dialed, 0); /* never from inside */
    assert_true(io_run(r->base.loop, wish_over, w, 2000));
    if (w->how != UDIAL_OK)
        fail_msg("%d: %s", (int)w->how, w->detail);
}

/* Dials, expecting a failure, and returns how long it took. */
static uint64_t dial_bad(struct rig *r, enum udial_result how, const char *words)
{
    struct wish w = {0};
    uint64_t began = loop_now_us() / 1000;

    uv_update_time(loop_uv(r->base.loop)); /* the test may have slept outside of the loop */
    assert_non_null(upool_dial(r->pool, false, &wish_ops, &w));
    assert_true(io_run(r->base.loop, wish_over, &w, 4000));
    assert_int_equal(w.how, how);
    if (strstr(w.detail, words) == NULL)
        fail_msg("%s", w.detail);
    return loop_now_us() / 1000 - began;
}

static bool none_idle(void *arg)
{
    return upool_idle(((struct rig *)arg)->pool) == 0;
}

static bool one_idle(void *arg)
{
    return upool_idle(((struct rig *)arg)->pool) == 1;
}

static bool accepted_one(void *arg)
{
    return ((struct rig *)arg)->n_accepted == 1;
}

/* --- reuse ---------------------------------------------------------------------------------------------- */

static void connections_are_reused_freshest_first(void **state)
{
    struct rig *r = rig_new("127.0.0.1", NULL, NULL);
    struct wish a, b, c;
    struct uconn *ca, *cb;

    (void)state;
    assert_null(upool_take_idle(r->pool, &wish_ops, &a));
    dial_ok(r, &a);
    dial_ok(r, &b);
    ca = a.c;
    cb = b.c;
    assert_ptr_not_equal(ca, cb);
    assert_false(uconn_reused(ca));
    assert_int_equal(upool_borrowed(r->pool), 2);
    uconn_return(ca, true);
    uconn_return(cb, true);
    assert_int_equal(upool_idle(r->pool), 2);
    assert_int_equal(upool_borrowed(r->pool), 0);
    assert_ptr_equal(upool_take_idle(r->pool, &wish_ops, &b), cb);
    assert_true(uconn_reused(cb));
    dial_ok(r, &a); /* a wish takes an idle one too */
    assert_ptr_equal(a.c, ca);
    uconn_return(ca, true);
    c = (struct wish){0};
    assert_non_null(upool_dial(r->pool, true, &wish_ops, &c)); /* unless it wants a fresh one */
    assert_true(io_run(r->base.loop, wish_over, &c, 2000));
    assert_ptr_not_equal(c.c, ca);
    uconn_return(c.c, false);
    assert_int_equal(upool_idle(r->pool), 1);
    uconn_return(cb, true);
    rig_free(r);
}

static void idle_connections_are_capped(void **state)
{
    struct rig *r = rig_new("127.0.0.1", NULL, NULL);
    struct wish w[5];

    (void)state;
    for (int i = 0; i < 5; i++)
        dial_ok(r, &w[i]);
    for (int i = 0; i < 5; i++)
        uconn_return(w[i].c, true);
    assert_int_equal(upool_idle(r->pool), 3);
    rig_free(r);
}

/* H101: any event on an idle connection retires it. */
static void idle_events_retire(void **state)
{
    struct rig *r = rig_new("127.0.0.1", NULL, NULL);
    char text[] = "HTTP/1.1 408 Request Timeout\r\n\r\n";
    struct iovec iov = {text, sizeof(text) - 1};

    (void)state;
    for (int how = 0; how < 4; how++) {
        struct wish w;

        dial_ok(r, &w);
        assert_true(io_run(r->base.loop, accepted_one, r, 1000));
        if (how == 3)
            stream_pause(uconn_stream(w.c)); /* as a borrower may leave it */
        uconn_return(w.c, true);
        assert_int_equal(upool_idle(r->pool), 1);
        if (how == 0)
            assert_true(stream_write(r->accepted[0], &iov, 1));
        else if (how == 1)
            stream_reset(r->accepted[--r->n_accepted]);
        else
            stream_close(r->accepted[--r->n_accepted]);
        assert_true(io_run(r->base.loop, none_idle, r, 1000));
        assert_int_equal(w.data + w.ends + w.errors, 0); /* not the borrower's any more */
        rig_close_accepted(r);
    }
    rig_free(r);
}

/* Also when the loop has not heard of it yet. */
static void a_connection_that_ended_this_turn_is_not_lent(void **state)
{
    struct rig *r = rig_new("127.0.0.1", NULL, NULL);
    struct wish w;

    (void)state;
    dial_ok(r, &w);
    assert_true(io_run(r->base.loop, accepted_one, r, 1000));
    uconn_return(w.c, true);
    assert_int_equal(upool_idle(r->pool), 1);
    stream_shutdown(r->accepted[0]); /* the FIN is on its way at once, and loopback is quick */
    usleep(2000);
    assert_null(upool_take_idle(r->pool, &wish_ops, &w));
    rig_free(r);
}

static void an_ended_connection_is_not_kept(void **state)
{
    struct rig *r = rig_new("127.0.0.1", NULL, NULL);
    struct wish w;

    (void)state;
    dial_ok(r, &w);
    assert_true(io_run(r->base.loop, accepted_one, r, 1000));
    stream_close(r->accepted[--r->n_accepted]);
    assert_true(io_run(r->base.loop, wish_ended, &w, 1000));
    uconn_return(w.c, true);
    assert_int_equal(upool_idle(r->pool), 0);
    rig_free(r);
}

static void idle_time_and_age_are_bounded(void **state)
{
    struct rig *r = rig_new("127.0.0.1", NULL, NULL);
    struct wish w;

    (void)state;
    r->conf.pool_idle_timeout_ms = 60;
    dial_ok(r, &w);
    uconn_return(w.c, true);
    assert_int_equal(upool_idle(r->pool), 1);
    assert_true(io_run(r->base.loop, none_idle, r, 1000)); /* by itself */

    r->conf.pool_idle_timeout_ms = 60000;
    r->conf.pool_max_age_ms = 50;
    dial_ok(r, &w);
    io_run_for(r->base.loop, 70);
    uconn_return(w.c, true); /* too old to rest */
    assert_int_equal(upool_idle(r->pool), 0);
    dial_ok(r, &w);
    uconn_return(w.c, true);
    assert_int_equal(upool_idle(r->pool), 1);
    io_run_for(r->base.loop, 70);
    assert_null(upool_take_idle(r->pool, &wish_ops, &w)); /* or to be taken */
    rig_free(r);
}

/* --- addresses ------------------------------------------------------------------------------------------ */

static void a_refusing_address_is_followed_by_the_next(void **state)
{
    struct rig *r = rig_new("127.0.0.2,127.0.0.1.test", NULL, NULL);
    struct wish w;

    (void)state;
    dial_ok(r, &w);
    assert_int_equal(strncmp(stream_address(uconn_stream(w.c)), "127.0.0.1:", 10), 0);
    uconn_return(w.c, false);
    rig_free(r);
}

static void when_all_refuse_the_last_one_is_named(void **state)
{
    struct rig *r = rig_new("127.0.0.2,127.0.0.3.test", NULL, NULL);

    (void)state;
    dial_bad(r, UDIAL_REFUSED, "127.0.0.3:");
    dial_bad(r, UDIAL_REFUSED, "refused");
    rig_free(r);
}

/* A listener on 127.0.0.2:port whose queue is full: the kernel drops what comes, and a dial hears nothing. */
static int silent_listener(uint16_t port, int *fillers, size_t n)
{
    struct sockaddr_in a = io_loopback(port);
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);

    uv_ip4_addr("127.0.0.2", port, &a);
    assert_int_equal(bind(fd, (struct sockaddr *)&a, sizeof(a)), 0);
    assert_int_equal(listen(fd, 0), 0);
    for (size_t i = 0; i < n; i++) {
        fillers[i] = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
        (void)!connect(fillers[i], (struct sockaddr *)&a, sizeof(a));
    }
    usleep(20 * 1000);
    return fd;
}

static void a_silent_address_is_overtaken_after_250_ms(void **state)
{
    struct rig *r = rig_new("127.0.0.2,127.0.0.1.test", NULL, NULL);
    struct wish w;
    int fillers[4], silent = silent_listener(r->conf.port, fillers, 4);
    uint64_t began = loop_now_us();

    (void)state;
    dial_ok(r, &w);
    assert_in_range((loop_now_us() - began) / 1000, 200, 900);
    uconn_return(w.c, false);
    began = loop_now_us();
    dial_ok(r, &w); /* the one that worked comes first now */
    assert_in_range((loop_now_us() - began) / 1000, 0, 150);
    uconn_return(w.c, false);
    for (int i = 0; i < 4; i++)
        close(fillers[i]);
    close(silent);
    rig_free(r);
}

static void a_silent_upstream_times_out(void **state)
{
    struct rig *r = rig_new("127.0.0.2", NULL, NULL);
    int fillers[4], silent = silent_listener(r->conf.port, fillers, 4);

    (void)state;
    r->conf.connect_timeout_ms = 150;
    assert_in_range(dial_bad(r, UDIAL_TIMEOUT, "127.0.0.2"), 140, 600);
    for (int i = 0; i < 4; i++)
        close(fillers[i]);
    close(silent);
    rig_free(r);
}

/* --- names ---------------------------------------------------------------------------------------------- */

static void a_name_is_asked_for_once_and_again_by_time(void **state)
{
    struct rig *r = rig_new("127.0.0.1.test", NULL, NULL);
    struct wish w, v = {0};
    int before = atomic_load(&asked);

    (void)state;
    /* the pool read the interval when it was made */
    upool_retire(r->pool);
    r->conf.resolve_interval_ms = 50;
    r->pool = upool_new(r->base.loop, &r->config, &r->conf, NULL);
    assert_non_null(upool_dial(r->pool, true, &wish_ops, &v));
    dial_ok(r, &w); /* both wait for one question */
    assert_true(io_run(r->base.loop, wish_over, &v, 1000));
    assert_int_equal(atomic_load(&asked), before + 1);
    uconn_return(w.c, false);
    uconn_return(v.c, false);
    io_run_for(r->base.loop, 80);
    assert_int_equal(atomic_load(&asked), before + 1); /* nobody wants it: nobody asks */
    atomic_store(&broken, 1);
    dial_ok(r, &w); /* at once, by the old answer, while the new question fails */
    uconn_return(w.c, false);
    for (int i = 0; i < 500 && atomic_load(&asked) < before + 2; i++)
        io_run_for(r->base.loop, 1);
    assert_int_equal(atomic_load(&asked), before + 2);
    io_run_for(r->base.loop, 20);
    dial_ok(r, &w); /* and after it has failed */
    uconn_return(w.c, false);
    atomic_store(&broken, 0);
    rig_free(r);
}

static void an_unknown_name_fails(void **state)
{
    struct rig *r = rig_new("nowhere.invalid", NULL, NULL);
    int before = atomic_load(&asked);

    (void)state;
    dial_bad(r, UDIAL_RESOLVE_FAILED, "nowhere.invalid: ");
    dial_bad(r, UDIAL_RESOLVE_FAILED, "nowhere.invalid: ");
    assert_int_equal(atomic_load(&asked), before + 1); /* not asked again within a second */
    rig_free(r);
}

static void a_slow_name_is_in_the_connect_timeout(void **state)
{
    struct rig *r = rig_new("127.0.0.1.test", NULL, NULL);

    (void)state;
    atomic_store(&slow_ms, 300);
    r->conf.connect_timeout_ms = 100;
    assert_in_range(dial_bad(r, UDIAL_TIMEOUT, "127.0.0.1.test"), 90, 290);
    atomic_store(&slow_ms, 0);
    rig_free(r); /* the question is still in flight */
}

static void never(void *owner)
{
    *(bool *)owner = true;
}

static void families_alternate(void **state)
{
    struct io_base b = io_begin();
    bool done = false;
    struct resolve *r = resolve_new(b.loop, "::1,::2,::3,127.0.0.1,127.0.0.2.test", 80, 1000, never, &done);
    static const int want[] = {AF_INET6, AF_INET, AF_INET6, AF_INET, AF_INET6};
    struct resolve_answer *a = resolve_get(r), *again;
    struct sockaddr_in second = io_loopback(80);

    (void)state;
    assert_null(a);
    assert_true(resolve_asking(r));
    for (int i = 0; i < 1000 && !done; i++)
        io_run_for(b.loop, 1);
    a = resolve_get(r);
    assert_int_equal(resolve_answer_n(a), 5);
    for (size_t i = 0; i < 5; i++)
        assert_int_equal(resolve_answer_at(a, i)->sa_family, want[i]);
    resolve_prefer(r, (struct sockaddr *)&second);
    assert_int_equal(resolve_answer_at(a, 0)->sa_family, AF_INET6); /* an answer in use stays as it is */
    again = resolve_get(r);
    assert_int_equal(resolve_answer_n(again), 5);
    assert_int_equal(resolve_answer_at(again, 0)->sa_family, AF_INET);
    assert_int_equal(resolve_answer_at(again, 1)->sa_family, AF_INET6);
    assert_int_equal(resolve_answer_at(again, 2)->sa_family, AF_INET6);
    assert_int_equal(resolve_answer_at(again, 3)->sa_family, AF_INET);
    resolve_answer_unref(a);
    resolve_free(r);
    resolve_answer_unref(again); /* outlives its resolver */
    io_end(&b);
}

/* --- taking back ---------------------------------------------------------------------------------------- */

/* TCP on loopback is up within the turn that dials; TLS takes some more. */
static void turn_that_dials(struct rig *r)
{
    loop_stop(r->base.loop);
    loop_run(r->base.loop);
}

static void a_wish_can_be_taken_back_in_every_state(void **state)
{
    struct rig *r = rig_new("127.0.0.1.test", tls_server, tls_lax_client);
    struct wish w = {.forbidden = true}, ok;
    struct udial *d;

    (void)state;
    d = upool_dial(r->pool, false, &wish_ops, &w); /* before its first turn */
    udial_cancel(d);
    io_run_for(r->base.loop, 5);
    atomic_store(&slow_ms, 50);
    d = upool_dial(r->pool, false, &wish_ops, &w); /* while the name is asked for */
    io_run_for(r->base.loop, 5);
    udial_cancel(d);
    io_run_for(r->base.loop, 80);
    atomic_store(&slow_ms, 0);
    assert_int_equal(r->n_accepted, 0);
    d = upool_dial(r->pool, false, &wish_ops, &w); /* while it connects or shakes hands */
    turn_that_dials(r);
    udial_cancel(d);
    assert_true(io_run(r->base.loop, one_idle, r, 1000)); /* what came up is kept */
    dial_ok(r, &ok);
    assert_true(uconn_reused(ok.c));
    uconn_return(ok.c, true);
    d = upool_dial(r->pool, false, &wish_ops, &w); /* where an idle one would serve */
    udial_cancel(d);
    io_run_for(r->base.loop, 5);
    assert_int_equal(upool_idle(r->pool), 1);
    rig_free(r);
}

static void retiring_waits_for_what_is_lent(void **state)
{
    struct rig *r = rig_new("127.0.0.1", tls_server, tls_client);
    struct wish lent, idle, late = {0}, back = {.forbidden = true};
    struct udial *d;

    (void)state;
    dial_ok(r, &lent);
    dial_ok(r, &idle);
    uconn_return(idle.c, true);
    assert_non_null(upool_dial(r->pool, true, &wish_ops, &late));
    d = upool_dial(r->pool, true, &wish_ops, &back);
    turn_that_dials(r);
    udial_cancel(d);
    upool_retire(r->pool);
    assert_int_equal(upool_idle(r->pool), 0);
    assert_true(io_run(r->base.loop, wish_over, &late, 1000)); /* still served */
    assert_int_equal(late.how, UDIAL_OK);
    io_run_for(r->base.loop, 20);
    assert_int_equal(upool_idle(r->pool), 0); /* not even for the one that was taken back */
    uconn_return(late.c, true);
    uconn_return(lent.c, true);
    r->pool = NULL;
    rig_free(r);
}

/* --- TLS ------------------------------------------------------------------------------------------------ */

static void tls_upstreams(void **state)
{
    struct rig *r = rig_new("127.0.0.1", tls_server, tls_client);
    struct wish w;

    (void)state;
    dial_ok(r, &w);
    assert_false(stream_tls_resumed(uconn_stream(w.c)));
    uconn_return(w.c, true);
    io_run_for(r->base.loop, 30); /* session tickets come while it is idle, and are no data (H160) */
    assert_int_equal(upool_idle(r->pool), 1);
    assert_ptr_equal(upool_take_idle(r->pool, &wish_ops, &w), w.c);
    uconn_return(w.c, false);
    dial_ok(r, &w);
    assert_true(stream_tls_resumed(uconn_stream(w.c)));
    uconn_return(w.c, false);
    rig_free(r);

    r = rig_new("127.0.0.2,127.0.0.1.test", tls_server,
                tls_client); /* the certificate does not know this name */
    dial_bad(r, UDIAL_TLS_FAILED, "ostname mismatch");
    rig_free(r);
}

/* TCP comes up, TLS never answers. */
static void a_silent_tls_server_times_out(void **state)
{
    struct rig *r = rig_new("127.0.0.1", NULL, tls_client);

    (void)state;
    r->conf.connect_timeout_ms = 150;
    assert_in_range(dial_bad(r, UDIAL_TIMEOUT, "127.0.0.1:"), 140, 600);
    rig_free(r);
}

static void every_allocation_may_fail(void **state)
{
    (void)state;
    for (uint64_t n = 1; n < 60; n++) {
        struct rig *r = rig_new("127.0.0.2,127.0.0.1.test", NULL, NULL);
        struct wish w = {0};
        struct udial *d;

        mem_fail_at((n + 1) / 2, n % 2 == 0);
        d = upool_dial(r->pool, false, &wish_ops, &w);
        for (int i = 0; i < 40 && d != NULL && w.dialed == 0; i++) {
            loop_stop(r->base.loop);
            loop_run(r->base.loop);
            usleep(500);
        }
        mem_fail_at(0, false);
        if (d != NULL)
            assert_true(io_run(r->base.loop, wish_over, &w, 4000));
        if (w.c != NULL)
            uconn_return(w.c, n % 3 == 0);
        rig_free(r);
    }
}

static int setup(void **state)
{
    struct buf why = {0};

    (void)state;
    io_certs_make(&certs);
    tls_server = tls_context_server(certs.cert, certs.key, "", &why);
    tls_client = tls_context_client(certs.ca, "", "", true, true, &why);
    tls_lax_client = tls_context_client("", "", "", false, true, &why);
    return tls_server == NULL || tls_client == NULL || tls_lax_client == NULL ? -1 : 0;
}

static int teardown(void **state)
{
    (void)state;
    tls_context_unref(tls_server);
    tls_context_unref(tls_client);
    tls_context_unref(tls_lax_client);
    io_certs_remove(&certs);
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(connections_are_reused_freshest_first),
        cmocka_unit_test(idle_connections_are_capped),
        cmocka_unit_test(idle_events_retire),
        cmocka_unit_test(a_connection_that_ended_this_turn_is_not_lent),
        cmocka_unit_test(an_ended_connection_is_not_kept),
        cmocka_unit_test(idle_time_and_age_are_bounded),
        cmocka_unit_test(a_refusing_address_is_followed_by_the_next),
        cmocka_unit_test(when_all_refuse_the_last_one_is_named),
        cmocka_unit_test(a_silent_address_is_overtaken_after_250_ms),
        cmocka_unit_test(a_silent_upstream_times_out),
        cmocka_unit_test(a_name_is_asked_for_once_and_again_by_time),
        cmocka_unit_test(an_unknown_name_fails),
        cmocka_unit_test(a_slow_name_is_in_the_connect_timeout),
        cmocka_unit_test(families_alternate),
        cmocka_unit_test(a_wish_can_be_taken_back_in_every_state),
        cmocka_unit_test(retiring_waits_for_what_is_lent),
        cmocka_unit_test(tls_upstreams),
        cmocka_unit_test(a_silent_tls_server_times_out),
        cmocka_unit_test(every_allocation_may_fail),
    };

    return cmocka_run_group_tests_name("upool", tests, setup, teardown);
}
