/*
 * test_relay.c - response bytes to a client: what leaves in one write, chunk framing, backpressure between two real
 * sockets, and what is left when either side goes. The client and the upstream are raw sockets of this file.
 */
#include "io_help.h"

#include "metrics.h"
#include "relay.h"

struct rig {
    struct io_base base;
    struct client_group group;
    struct stream_listener *listener;
    int client_fd, listen_fd, upstream_fd;
    struct config config;
    struct config_upstream conf;
    struct upool *pool;
    struct client *c; /* NULL: finished */
    struct upstream u;
    struct relay relay;
    unsigned opens, ups_ended, drains, ends;
    bool automatic; /* the response is relayed as it comes */
    bool is_sse;
    struct buf got; /* by the client */
    bool eof, reset;
};

#define HEAD "HTTP/1.1 200 OK\r\n\r\n"

static void put_head(struct rig *r, bool chunked)
{
    struct buf head = {0};

    assert_true(buf_put(&head, SLICE(HEAD)));
    relay_head(&r->relay, &head, chunked, r->is_sse);
    assert_int_equal(head.n, 0);
    assert_null(head.p);
}

/* --- both sides' owner -------------------------------------------------------------------------------------------- */

static void *on_request(void *arg, struct client *c, const struct http_head *h UNUSED)
{
    struct rig *r = arg;

    r->c = c;
    return r;
}

static void on_nothing(void *owner UNUSED)
{
}

static void on_client_drain(void *owner)
{
    struct rig *r = owner;

    r->drains++;
    relay_drained(&r->relay);
}

static void on_client_end(void *owner, enum client_end how)
{
    struct rig *r = owner;

    r->ends++;
    relay_detach_client(&r->relay);
    if (how != CLIENT_END_FIN) {
        client_finish(r->c, CLIENT_DROP);
        r->c = NULL;
    }
}

static const struct client_ops client_ops = {.on_request = on_request,
                                             .on_body_end = on_nothing,
                                             .on_drain = on_client_drain,
                                             .on_end = on_client_end};

static void on_open(void *owner)
{
    ((struct rig *)owner)->opens++;
}

static void on_head(void *owner, const struct http_head *h UNUSED)
{
    struct rig *r = owner;

    if (r->automatic)
        put_head(r, true);
}

static void on_body(void *owner, char *bytes, size_t n, bool last)
{
    struct rig *r = owner;

    if (r->automatic)
        (void)!relay_body(&r->relay, bytes, n, last);
}

static void on_end(void *owner)
{
    struct rig *r = owner;

    r->ups_ended++;
    if (r->automatic)
        relay_end(&r->relay);
}

static void on_fail(void *owner UNUSED, enum upstream_fail why UNUSED, const char *detail)
{
    fail_msg("%s", detail);
}

static const struct upstream_ops upstream_ops = {.on_open = on_open,
                                                 .on_head = on_head,
                                                 .on_body = on_body,
                                                 .on_end = on_end,
                                                 .on_drain = on_nothing,
                                                 .on_fail = on_fail};

/* --- the rig ------------------------------------------------------------------------------------------------------ */

static void on_accept(void *arg, struct stream *s)
{
    client_begin(&((struct rig *)arg)->group, s);
}

static bool is_ready(void *arg)
{
    struct rig *r = arg;

    if (r->upstream_fd < 0)
        r->upstream_fd = accept4(r->listen_fd, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
    return r->c != NULL && r->opens > 0 && r->upstream_fd >= 0;
}

/* A client with its request, an upstream that was sent it, and a relay between them. */
static struct rig *rig_new(void)
{
    struct rig *r = calloc(1, sizeof(*r));
    struct buf why = {0};
    uint16_t port;

    r->base = io_begin();
    metrics_thread_begin();
    client_group_init(&r->group, r->base.loop, &client_ops, r);
    r->group.settings = (struct client_settings){.head_max_bytes = 65536,
                                                 .handshake_timeout_ms = 60000,
                                                 .header_timeout_ms = 60000,
                                                 .keepalive_timeout_ms = 60000,
                                                 .write_timeout_ms = 60000};
    r->listener = stream_listen(r->base.loop, "127.0.0.1", 0, NULL, on_accept, r, &why);
    r->client_fd = io_raw_connect(stream_listener_port(r->listener));
    assert_int_equal(send(r->client_fd, "GET / HTTP/1.1\r\nHost: h\r\n\r\n", 27, MSG_NOSIGNAL), 27);
    r->listen_fd = io_raw_listen(4, &port);
    r->upstream_fd = -1;
    r->config.references_ = 1000; /* never the last one: it stands in r */
    r->conf = (struct config_upstream){.host = (char *)(uintptr_t) "127.0.0.1",
                                       .port = port,
                                       .connect_timeout_ms = 3000,
                                       .pool_idle_max = 3,
                                       .pool_idle_timeout_ms = 60000,
                                       .pool_max_age_ms = 600000,
                                       .resolve_interval_ms = 60000};
    r->pool = upool_new(r->base.loop, &r->config, &r->conf, NULL);
    assert_false(upstream_open(&r->u, r->base.loop, r->pool, false, &upstream_ops, r));
    assert_true(io_run(r->base.loop, is_ready, r, 5000));
    assert_true(
        upstream_send_head(&r->u, SLICE("GET / HTTP/1.1\r\n\r\n"), HTTP_GET, HTTP_BODY_NONE, NULL, 0));
    upstream_send_end(&r->u);
    relay_init(&r->relay, r->base.loop, r->c, &r->u);
    return r;
}

static void rig_free(struct rig *r)
{
    relay_close(&r->relay);
    upstream_close(&r->u);
    if (r->c != NULL)
        client_finish(r->c, CLIENT_DROP);
    client_group_drop(&r->group);
    stream_listener_close(r->listener);
    upool_retire(r->pool);
    if (r->client_fd >= 0)
        close(r->client_fd);
    close(r->upstream_fd);
    close(r->listen_fd);
    buf_free(&r->got);
    metrics_thread_end();
    metrics_free();
    io_end(&r->base);
    free(r);
}

static void receive(struct rig *r)
{
    static char bytes[1 << 20];
    ssize_t n;

    while ((n = recv(r->client_fd, bytes, sizeof(bytes), MSG_DONTWAIT)) > 0)
        assert_true(buf_put(&r->got, (struct slice){bytes, (size_t)n}));
    r->eof |= n == 0;
    r->reset |= n < 0 && errno != EAGAIN;
}

/* On loopback what was written is there at once: no turn of the loop in between. */
static void expect_now(struct rig *r, const char *text)
{
    receive(r);
    if (!slice_eq(buf_slice(&r->got), slice_of(text)))
        fail_msg("<%.*s> instead of <%s>", (int)r->got.n, r->got.n == 0 ? "" : r->got.p, text);
    buf_free(&r->got);
}

/* --- tests -------------------------------------------------------------------------------------------------------- */

static void test_the_head_waits_for_the_first_bytes(void **state)
{
    struct rig *r = rig_new();

    (void)state;
    put_head(r, true);
    assert_true(relay_head_pending(&r->relay));
    expect_now(r, "");
    assert_true(relay_body(&r->relay, "hello", 5, false));
    assert_false(relay_head_pending(&r->relay));
    expect_now(r, HEAD "5\r\nhello\r\n");
    assert_true(relay_body(&r->relay, "0123456789abcdefg", 17, false));
    expect_now(r, "11\r\n0123456789abcdefg\r\n");
    assert_true(relay_body(&r->relay, "!", 1, true));
    expect_now(r, "1\r\n!\r\n0\r\n\r\n");
    relay_end(&r->relay); /* all is said */
    expect_now(r, "");
    assert_int_equal(r->relay.bytes, 23);
    rig_free(r);
}

static void test_the_head_goes_alone_at_the_end_of_the_turn(void **state)
{
    struct rig *r = rig_new();

    (void)state;
    put_head(r, true);
    io_run_for(r->base.loop, 5);
    assert_false(relay_head_pending(&r->relay));
    expect_now(r, HEAD);
    relay_end(&r->relay);
    expect_now(r, "0\r\n\r\n");
    rig_free(r);
}

static void test_all_of_a_short_response_is_one_write(void **state)
{
    struct rig *r = rig_new();

    (void)state;
    put_head(r, false);
    assert_true(relay_body(&r->relay, "ok", 2, true));
    expect_now(r, HEAD "ok");
    relay_end(&r->relay);
    expect_now(r, "");
    rig_free(r);
    r = rig_new();
    put_head(r, true); /* a head and nothing else */
    relay_end(&r->relay);
    expect_now(r, HEAD "0\r\n\r\n");
    io_run_for(r->base.loop, 5);
    expect_now(r, "");
    rig_free(r);
}

static void test_a_head_can_be_replaced(void **state)
{
    struct rig *r = rig_new();
    struct iovec other = {(void *)(uintptr_t) "HTTP/1.1 502 Bad Gateway\r\n\r\n", 28};

    (void)state;
    put_head(r, true);
    assert_true(relay_head_pending(&r->relay));
    relay_drop_head(&r->relay);
    assert_true(client_write(r->c, &other, 1));
    io_run_for(r->base.loop, 5);
    expect_now(r, "HTTP/1.1 502 Bad Gateway\r\n\r\n");
    rig_free(r);
}

static void test_what_is_known_of_an_event_stream(void **state)
{
    (void)state;
    for (int sse = 0; sse < 2; sse++) {
        struct rig *r = rig_new();

        r->is_sse = sse != 0;
        put_head(r, true);
        assert_true(relay_body(&r->relay, "data: x\n", 8, false));
        assert_int_equal(r->relay.sse.boundary, sse == 0);
        assert_true(relay_body(&r->relay, "\ndata: [DONE]\n\n", 15, false));
        assert_int_equal(r->relay.sse.done, sse != 0);
        assert_true(r->relay.sse.boundary);
        rig_free(r);
    }
}

static bool is_paused(void *arg)
{
    return ((struct rig *)arg)->relay.paused;
}

static bool has_ended(void *arg)
{
    struct rig *r = arg;

    receive(r);
    return r->ups_ended > 0 && r->got.n > 7 && memcmp(r->got.p + r->got.n - 7, "\r\n0\r\n\r\n", 7) == 0;
}

struct feed {
    struct deadline deadline;
    struct rig *rig;
    size_t left, at;
};

/* The upstream says what it can, a bit at each turn; byte k of the body is k mod 251. */
static void feed_more(struct deadline *d)
{
    struct feed *f = container_of(d, struct feed, deadline);
    char bytes[65536];
    ssize_t n;

    do {
        size_t part = size_min(f->left, sizeof(bytes));

        for (size_t i = 0; i < part; i++)
            bytes[i] = (char)((f->at + i) % 251);
        n = part == 0 ? -1 : send(f->rig->upstream_fd, bytes, part, MSG_NOSIGNAL);
        if (n > 0)
            f->at += (size_t)n, f->left -= (size_t)n;
    } while (n > 0);
    if (f->left > 0)
        assert_true(deadline_set(f->rig->base.loop, d, loop_now_ms(f->rig->base.loop) + 1));
}

/* Takes the chunks apart and looks at every byte. */
static void check_body(struct rig *r, size_t want)
{
    size_t at = sizeof(HEAD) - 1, seen = 0;

    assert_memory_equal(r->got.p, HEAD, at);
    for (;;) {
        char *end;
        size_t n = strtoul(r->got.p + at, &end, 16);

        assert_memory_equal(end, "\r\n", 2);
        at = (size_t)(end + 2 - r->got.p);
        if (n == 0)
            break;
        for (size_t i = 0; i < n; i++, seen++)
            if ((unsigned char)r->got.p[at + i] != seen % 251)
                fail_msg("byte %zu", seen);
        assert_memory_equal(r->got.p + at + n, "\r\n", 2);
        at += n + 2;
    }
    assert_int_equal(seen, want);
    assert_int_equal(at + 2, r->got.n);
}

/* A slow reader stops the upstream, what is held stays bounded, and every byte arrives in order. */
static void test_backpressure(void **state)
{
    enum { SIZE = 24 << 20 };
    struct rig *r = rig_new();
    struct feed f = {.rig = r, .left = SIZE};

    (void)state;
    r->automatic = true;
    assert_int_equal(
        send(r->upstream_fd, "HTTP/1.1 200 OK\r\nContent-Length: 25165824\r\n\r\n", 45, MSG_NOSIGNAL), 45);
    deadline_init(&f.deadline, feed_more);
    assert_true(deadline_set(r->base.loop, &f.deadline, loop_now_ms(r->base.loop)));
    assert_true(io_run(r->base.loop, is_paused, r, 10000));
    io_run_for(r->base.loop, 50);
    assert_true(r->relay.paused);
    assert_true(f.left > 0);
    assert_true(client_full(r->c));
    assert_true(r->relay.bytes < SIZE);
    assert_true(io_run(r->base.loop, has_ended, r, 30000));
    assert_true(r->drains > 0);
    assert_false(r->relay.paused);
    assert_int_equal(r->relay.bytes, SIZE);
    check_body(r, SIZE);
    rig_free(r);
}

static bool ups_ended(void *arg)
{
    return ((struct rig *)arg)->ups_ended > 0;
}

/* The client goes while the upstream stands paused for it: the rest is read and thrown away. */
static void test_the_client_goes_while_the_upstream_is_paused(void **state)
{
    enum { SIZE = 24 << 20 };
    struct rig *r = rig_new();
    struct feed f = {.rig = r, .left = SIZE};

    (void)state;
    r->automatic = true;
    assert_int_equal(
        send(r->upstream_fd, "HTTP/1.1 200 OK\r\nContent-Length: 25165824\r\n\r\n", 45, MSG_NOSIGNAL), 45);
    deadline_init(&f.deadline, feed_more);
    assert_true(deadline_set(r->base.loop, &f.deadline, loop_now_ms(r->base.loop)));
    assert_true(io_run(r->base.loop, is_paused, r, 10000));
    io_raw_reset(r->client_fd);
    r->client_fd = -1;
    assert_true(io_run(r->base.loop, ups_ended, r, 30000));
    assert_int_equal(r->ends, 1);
    assert_null(r->relay.client);
    assert_false(r->relay.paused);
    assert_int_equal(r->relay.bytes + r->relay.discarded, SIZE);
    assert_true(r->relay.discarded > 0);
    rig_free(r);
}

static void test_without_a_client_nothing_is_written(void **state)
{
    struct rig *r = rig_new();

    (void)state;
    put_head(r, true);
    relay_detach_client(&r->relay); /* its head goes too */
    assert_true(relay_body(&r->relay, "abc", 3, false));
    assert_true(relay_body(&r->relay, "def", 3, true));
    relay_end(&r->relay);
    io_run_for(r->base.loop, 5);
    expect_now(r, "");
    assert_int_equal(r->relay.bytes, 0);
    assert_int_equal(r->relay.discarded, 6);
    put_head(r, true); /* a head that comes afterwards is freed by the turn */
    io_run_for(r->base.loop, 5);
    expect_now(r, "");
    rig_free(r);
}

/* The write fails: the relay says so, holds nothing, and the client's own end follows. */
static void test_a_failing_client(void **state)
{
    struct rig *r = rig_new();

    (void)state;
    put_head(r, true);
    io_raw_reset(r->client_fd);
    r->client_fd = -1;
    for (int i = 0; i < 1000 && relay_body(&r->relay, "abc", 3, false); i++)
        continue;
    assert_false(relay_body(&r->relay, "abc", 3, false));
    relay_end(&r->relay);
    assert_int_equal(r->ends, 0);                 /* never from inside */
    for (int i = 0; i < 500 && r->c != NULL; i++) /* perhaps its FIN, for sure its reset */
        io_run_for(r->base.loop, 2);
    assert_null(r->c);
    assert_false(r->relay.paused);
    rig_free(r);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_the_head_waits_for_the_first_bytes),
        cmocka_unit_test(test_the_head_goes_alone_at_the_end_of_the_turn),
        cmocka_unit_test(test_all_of_a_short_response_is_one_write),
        cmocka_unit_test(test_a_head_can_be_replaced),
        cmocka_unit_test(test_what_is_known_of_an_event_stream),
        cmocka_unit_test(test_backpressure),
        cmocka_unit_test(test_the_client_goes_while_the_upstream_is_paused),
        cmocka_unit_test(test_without_a_client_nothing_is_written),
        cmocka_unit_test(test_a_failing_client),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
