/*
 * test_upstream.c - one exchange with an upstream, over real sockets: responses cut at every byte, interim ones, early
 * ones, cut ones, and which connections may serve again. The upstream is a raw socket of this file.
 */
#include "io_help.h"

#include "upstream.h"

enum act { ACT_NOTHING, ACT_CLOSE, ACT_PAUSE };

struct rig {
    struct io_base base;
    struct config config;
    struct config_upstream conf;
    struct upool *pool;
    int listen_fd, fd; /* the upstream's side; -1: none */
    struct buf got;    /* by the upstream */
    bool eof, reset;
    struct upstream u;
    enum act at_head, at_body, at_end;
    bool open, inside;
    unsigned opens, heads, ends, fails, drains, raw_ends, lasts;
    unsigned status;
    enum upstream_fail fail;
    char detail[128];
    struct buf body, raw;
};

/* --- the owner ---------------------------------------------------------------------------------------------------- */

static struct rig *live(void *owner)
{
    struct rig *r = owner;

    assert_true(r->open);    /* else: a report after the close */
    assert_false(r->inside); /* never from inside a call */
    assert_int_equal(r->ends + r->fails, 0);
    return r;
}

static void rig_close_exchange(struct rig *r)
{
    r->open = false;
    upstream_close(&r->u);
    upstream_close(&r->u);
}

static void act(struct rig *r, enum act what)
{
    if (what == ACT_CLOSE)
        rig_close_exchange(r);
    else if (what == ACT_PAUSE)
        upstream_pause(&r->u);
}

static void on_open(void *owner)
{
    live(owner)->opens++;
}

static void on_head(void *owner, const struct http_head *h)
{
    struct rig *r = live(owner);

    assert_int_equal(r->heads++, 0);
    r->status = h->status;
    act(r, r->at_head);
}

static void on_body(void *owner, char *bytes, size_t n, bool last)
{
    struct rig *r = live(owner);

    assert_true(n > 0 && r->heads == 1 && r->lasts == 0);
    assert_true(buf_put(&r->body, (struct slice){bytes, n}));
    r->lasts += last;
    memset(bytes, 0x55, n);
    act(r, r->at_body);
}

static void on_end(void *owner)
{
    struct rig *r = live(owner);

    r->ends++;
    act(r, r->at_end);
}

static void on_drain(void *owner)
{
    ((struct rig *)owner)->drains++;
}

static void on_fail(void *owner, enum upstream_fail why, const char *detail)
{
    struct rig *r = live(owner);

    r->fails++;
    r->fail = why;
    assert_non_null(detail);
    snprintf(r->detail, sizeof(r->detail), "%s", detail);
}

static void on_raw(void *owner, char *bytes, size_t n)
{
    struct rig *r = live(owner);

    assert_true(r->heads == 1 && r->raw_ends == 0);
    assert_true(buf_put(&r->raw, (struct slice){bytes, n}));
}

static void on_raw_end(void *owner)
{
    live(owner)->raw_ends++;
}

static const struct upstream_ops ops = {.on_open = on_open,
                                        .on_head = on_head,
                                        .on_body = on_body,
                                        .on_end = on_end,
                                        .on_drain = on_drain,
                                        .on_fail = on_fail,
                                        .on_raw = on_raw,
                                        .on_raw_end = on_raw_end};

/* --- the rig ------------------------------------------------------------------------------------------------------ */

static struct rig *rig_new(void)
{
    struct rig *r = calloc(1, sizeof(*r));
    uint16_t port;

    r->base = io_begin();
    r->listen_fd = io_raw_listen(16, &port);
    r->fd = -1;
    r->config.references_ = 1000; /* never the last one: it stands in r */
    r->conf = (struct config_upstream){
        .host = (char *)(uintptr_t) "127.0.0.1",
        .port = port,
        .connect_timeout_ms = 3000,
        .pool_idle_max = 3,
        .pool_idle_timeout_ms = 60000,
        .pool_max_age_ms = 600000,
        .resolve_interval_ms = 60000,
    };
    r->pool = upool_new(r->base.loop, &r->config, &r->conf, NULL);
    assert_non_null(r->pool);
    return r;
}

static void rig_clear(struct rig *r)
{
    if (r->open)
        rig_close_exchange(r);
    buf_free(&r->got);
    buf_free(&r->body);
    buf_free(&r->raw);
    r->eof = r->reset = false;
    r->opens = r->heads = r->ends = r->fails = r->drains = r->raw_ends = r->lasts = r->status = 0;
    r->at_head = r->at_body = r->at_end = ACT_NOTHING;
}

static void hang_up(struct rig *r)
{
    if (r->fd >= 0)
        close(r->fd);
    r->fd = -1;
}

static void rig_free(struct rig *r)
{
    rig_clear(r);
    upool_retire(r->pool);
    hang_up(r);
    if (r->listen_fd >= 0)
        close(r->listen_fd);
    io_end(&r->base);
    free(r);
}

static bool is_open(void *arg)
{
    struct rig *r = arg;

    return r->opens + r->fails > 0;
}

static bool has_accepted(void *arg)
{
    struct rig *r = arg;

    if (r->fd >= 0)
        return true;
    r->fd = accept4(r->listen_fd, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
    if (r->fd < 0)
        return false;
    stream_socket_options(r->fd); /* no delay between two small pieces */
    return true;
}

/* Begins an exchange. True: on a connection that had served before. */
static bool begin(struct rig *r)
{
    bool at_once;

    r->open = true;
    r->inside = true;
    at_once = upstream_open(&r->u, r->base.loop, r->pool, false, &ops, r);
    r->inside = false;
    if (at_once) {
        assert_true(upstream_reused(&r->u));
        return true;
    }
    assert_true(io_run(r->base.loop, is_open, r, 5000));
    assert_int_equal(r->fails, 0);
    hang_up(r);
    assert_true(io_run(r->base.loop, has_accepted, r, 5000));
    assert_false(upstream_reused(&r->u));
    return false;
}

static void send_request(struct rig *r, enum http_method method)
{
    r->inside = true;
    assert_true(upstream_send_head(&r->u, SLICE("X / HTTP/1.1\r\n\r\n"), method, HTTP_BODY_NONE, NULL, 0));
    upstream_send_end(&r->u);
    r->inside = false;
}

static void receive(struct rig *r)
{
    static char bytes[1 << 20];
    ssize_t n;

    while ((n = recv(r->fd, bytes, sizeof(bytes), MSG_DONTWAIT)) > 0)
        assert_true(buf_put(&r->got, (struct slice){bytes, (size_t)n}));
    r->eof |= n == 0;
    r->reset |= n < 0 && errno != EAGAIN;
}

struct want {
    struct rig *r;
    size_t n;
};

static bool got_bytes(void *arg)
{
    struct want *w = arg;

    receive(w->r);
    return w->r->got.n >= w->n;
}

static void expect_request(struct rig *r, const char *text)
{
    assert_true(io_run(r->base.loop, got_bytes, &(struct want){r, strlen(text)}, 5000));
    if (!slice_eq(buf_slice(&r->got), slice_of(text)))
        fail_msg("<%.*s> instead of <%s>", (int)r->got.n, r->got.p, text);
    buf_free(&r->got);
}

static bool gone(void *arg)
{
    struct rig *r = arg;

    receive(r);
    return r->eof || r->reset;
}

static bool is_over(void *arg)
{
    struct rig *r = arg;

    return r->ends + r->fails > 0;
}

static bool has_head(void *arg)
{
    return ((struct rig *)arg)->heads > 0;
}

static void say(struct rig *r, const char *bytes, size_t n)
{
    assert_int_equal(send(r->fd, bytes, n, MSG_NOSIGNAL), n);
}

static void say_text(struct rig *r, const char *text)
{
    say(r, text, strlen(text));
}

static void assert_bytes(const struct buf *b, const char *want)
{
    if (!slice_eq(buf_slice(b), slice_of(want)))
        fail_msg("<%.*s> instead of <%s>", (int)b->n, b->n == 0 ? "" : b->p, want);
}

/* --- responses ----------------------------------------------------------------------------------------------------- */

struct row {
    const char *response;
    const char *body;
    enum http_method method;
    unsigned status;
    bool fin; /* the upstream closes behind it */
    bool clean;
};

static const struct row good[] = {
    {"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello", "hello", HTTP_POST, 200, false, true},
    {"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", "", HTTP_POST, 200, false, true},
    {"HTTP/1.1 204 No Content\r\n\r\n", "", HTTP_POST, 204, false, true},
    {"HTTP/1.1 304 Not Modified\r\nContent-Length: 77\r\n\r\n", "", HTTP_GET, 304, false, true},
    {"HTTP/1.1 200 OK\r\nContent-Length: 77\r\n\r\n", "", HTTP_HEAD, 200, false, true},
    {"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n6;a=b\r\n world\r\n0\r\nx: "
     "y\r\n\r\n",
     "hello world", HTTP_POST, 200, false, true},
    {"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 5\r\n\r\nhello", "hello", HTTP_POST, 200, false,
     false},
    {"HTTP/1.0 200 OK\r\nContent-Length: 5\r\n\r\nhello", "hello", HTTP_POST, 200, false, false},
    {"HTTP/1.1 200 OK\r\n\r\nuntil the end", "until the end", HTTP_POST, 200, true, false},
    {"HTTP/1.1 200 OK\r\n\r\n", "", HTTP_POST, 200, true, false},
    {"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\nHTTP/1.1 200 "
     "OK\r\nContent-Length: 2\r\n\r\nok",
     "ok", HTTP_POST, 200, false, true},
    {"HTTP/1.1 429 Too Many Requests\r\nretry-after: 1\r\nContent-Length: 2\r\n\r\n{}", "{}", HTTP_POST, 429,
     false, true},
};

static void check_good(struct rig *r, const struct row *row, const char *how, size_t at)
{
    if (row->fin)
        assert_int_equal(shutdown(r->fd, SHUT_WR), 0);
    assert_true(io_run(r->base.loop, is_over, r, 5000));
    if (r->fails > 0)
        fail_msg("<%s> %s %zu: %s", row->response, how, at, r->detail);
    assert_int_equal(r->heads, 1);
    assert_int_equal(r->status, row->status);
    assert_bytes(&r->body, row->body);
    rig_close_exchange(r);
    if (upool_idle(r->pool) != row->clean)
        fail_msg("<%s> %s %zu: idle %zu", row->response, how, at, upool_idle(r->pool));
    rig_clear(r);
}

static void test_responses_cut_at_every_byte(void **state)
{
    (void)state;
    for (size_t i = 0; i < ARRAY_LEN(good); i++) {
        struct rig *r = rig_new();
        size_t n = strlen(good[i].response);

        for (size_t at = 0; at < n; at++) {
            begin(r);
            send_request(r, good[i].method);
            if (at > 0) {
                say(r, good[i].response, at);
                io_run_for(r->base.loop, 1);
                assert_int_equal(r->ends + r->fails, 0);
            }
            say(r, good[i].response + at, n - at);
            check_good(r, &good[i], "cut at", at);
        }
        begin(r);
        send_request(r, good[i].method);
        for (size_t at = 0; at < n; at++) {
            say(r, good[i].response + at, 1);
            io_run_for(r->base.loop, 1);
        }
        check_good(r, &good[i], "by bytes", 0);
        rig_free(r);
    }
}

/* Two exchanges on one connection, and `last` where the end comes in the same read. */
static void test_a_clean_connection_serves_again(void **state)
{
    struct rig *r = rig_new();

    (void)state;
    for (int i = 0; i < 3; i++) {
        assert_int_equal(begin(r), i > 0);
        send_request(r, HTTP_POST);
        expect_request(r, "X / HTTP/1.1\r\n\r\n");
        say_text(r, "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok");
        assert_true(io_run(r->base.loop, is_over, r, 5000));
        assert_int_equal(r->ends, 1);
        assert_int_equal(r->lasts, 1);
        rig_close_exchange(r);
        assert_int_equal(upool_idle(r->pool), 1);
        rig_clear(r);
    }
    rig_free(r);
}

/* H116: bytes behind a response belong to nobody; whoever came next would take them for its answer. */
static void test_bytes_behind_a_response_retire_the_connection(void **state)
{
    (void)state;
    for (size_t i = 0; i < ARRAY_LEN(good); i++) {
        struct rig *r;
        char text[512];

        if (!good[i].clean)
            continue;
        for (int later = 0; later < 2; later++) {
            r = rig_new();
            begin(r);
            send_request(r, good[i].method);
            snprintf(text, sizeof(text), "%s%s", good[i].response,
                     "HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nevil");
            if (later == 0) {
                say_text(r, text);
                assert_true(io_run(r->base.loop, is_over, r, 5000));
            } else { /* in another read, while the exchange is still open */
                say_text(r, good[i].response);
                assert_true(io_run(r->base.loop, is_over, r, 5000));
                say_text(r, "HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nevil");
                io_run_for(r->base.loop, 5);
            }
            assert_int_equal(r->ends, 1);
            assert_bytes(&r->body, good[i].body);
            rig_close_exchange(r);
            if (upool_idle(r->pool) != 0)
                fail_msg("<%s>, later %d", text, later);
            rig_free(r);
        }
    }
}

static void test_interim_responses_have_a_bound(void **state)
{
    struct rig *r = rig_new();

    (void)state;
    begin(r);
    send_request(r, HTTP_POST);
    for (int i = 0; i < 64; i++)
        say_text(r, "HTTP/1.1 102 Processing\r\n\r\n");
    io_run_for(r->base.loop, 10);
    assert_int_equal(r->heads + r->fails, 0);
    say_text(r, "HTTP/1.1 102 Processing\r\n\r\n");
    assert_true(io_run(r->base.loop, is_over, r, 5000));
    assert_int_equal(r->fails, 1);
    assert_int_equal(r->fail, UPSTREAM_FAIL_BAD);
    rig_free(r);
}

/* --- cut and bad ones ---------------------------------------------------------------------------------------------- */

static void check_fail(const char *response, bool reset, enum upstream_fail why, const char *body)
{
    struct rig *r = rig_new();

    begin(r);
    send_request(r, HTTP_POST);
    expect_request(r, "X / HTTP/1.1\r\n\r\n");
    if (response[0] != '\0')
        say_text(r, response);
    io_run_for(r->base.loop, 5);
    if (r->fails == 0) {
        if (reset)
            io_raw_reset(r->fd);
        else
            close(r->fd);
        r->fd = -1;
        assert_true(io_run(r->base.loop, is_over, r, 5000));
    }
    if (r->fails != 1 || r->fail != why)
        fail_msg("<%s>: %u ends, %u fails (%u %s)", response, r->ends, r->fails, r->fail, r->detail);
    assert_bytes(&r->body, body);
    rig_close_exchange(r);
    assert_int_equal(upool_idle(r->pool), 0);
    rig_free(r);
}

static void test_cut_responses_fail(void **state)
{
    (void)state;
    for (int reset = 0; reset < 2; reset++) {
        check_fail("", reset != 0, UPSTREAM_FAIL_CLOSED, "");
        check_fail("HTTP/1.1 2", reset != 0, UPSTREAM_FAIL_CLOSED, "");
        check_fail("HTTP/1.1 100 Continue\r\n\r\n", reset != 0, UPSTREAM_FAIL_CLOSED, "");
        check_fail("HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhell", reset != 0, UPSTREAM_FAIL_CLOSED,
                   "hell");
        check_fail("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n", reset != 0,
                   UPSTREAM_FAIL_CLOSED, "hello");
        check_fail("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n", reset != 0,
                   UPSTREAM_FAIL_CLOSED, "hello");
    }
    check_fail("HTTP/1.1 200 OK\r\n\r\nuntil the reset", true, UPSTREAM_FAIL_CLOSED, "until the reset");
}

static void test_bad_responses_fail(void **state)
{
    (void)state;
    check_fail("SSH-2.0-OpenSSH\r\n\r\n", false, UPSTREAM_FAIL_BAD, "");
    check_fail("HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n", false, UPSTREAM_FAIL_BAD,
               "");
    check_fail("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\nzz\r\n", false,
               UPSTREAM_FAIL_BAD, "");
    check_fail("HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: upgrade\r\n\r\n", false,
               UPSTREAM_FAIL_BAD, "");
}

static void test_a_head_without_end_fails(void **state)
{
    struct rig *r = rig_new();
    char part[1024];

    (void)state;
    memset(part, 'x', sizeof(part));
    begin(r);
    send_request(r, HTTP_POST);
    say_text(r, "HTTP/1.1 200 OK\r\nx: ");
    for (int i = 0; i < 70 && r->fails == 0; i++) {
        (void)!send(r->fd, part, sizeof(part), MSG_NOSIGNAL);
        io_run_for(r->base.loop, 1);
    }
    assert_true(io_run(r->base.loop, is_over, r, 5000));
    assert_int_equal(r->fail, UPSTREAM_FAIL_BAD);
    rig_free(r);
}

/* --- requests ------------------------------------------------------------------------------------------------------- */

static void test_request_framing(void **state)
{
    struct rig *r = rig_new();

    (void)state;
    begin(r);
    assert_true(upstream_send_head(&r->u, SLICE("HEAD\r\n\r\n"), HTTP_POST, HTTP_BODY_CHUNKED, "first", 5));
    assert_true(upstream_send_body(&r->u, "0123456789abcdefg", 17));
    upstream_send_end(&r->u);
    expect_request(r, "HEAD\r\n\r\n5\r\nfirst\r\n11\r\n0123456789abcdefg\r\n0\r\n\r\n");
    assert_true(upstream_sent_bytes(&r->u) > 40);
    rig_clear(r);

    begin(r);
    assert_true(upstream_send_head(&r->u, SLICE("HEAD\r\n\r\n"), HTTP_POST, HTTP_BODY_LENGTH, "first", 5));
    assert_true(upstream_send_body(&r->u, "second", 6));
    upstream_send_end(&r->u);
    expect_request(r, "HEAD\r\n\r\nfirstsecond");
    rig_clear(r);

    begin(r);
    assert_true(upstream_send_head(&r->u, SLICE("HEAD\r\n\r\n"), HTTP_POST, HTTP_BODY_CHUNKED, NULL, 0));
    upstream_send_end(&r->u);
    expect_request(r, "HEAD\r\n\r\n0\r\n\r\n");
    rig_free(r);
}

/* H106, H107, H117: the answer comes while the request is still going out; the connection is then not used again. */
static void test_early_responses(void **state)
{
    struct rig *r = rig_new();

    (void)state;
    begin(r);
    assert_true(upstream_send_head(&r->u, SLICE("HEAD\r\n\r\n"), HTTP_POST, HTTP_BODY_LENGTH, "some", 4));
    say_text(r, "HTTP/1.1 413 Too Large\r\nContent-Length: 2\r\n\r\nno");
    assert_true(io_run(r->base.loop, is_over, r, 5000));
    assert_int_equal(r->status, 413);
    assert_bytes(&r->body, "no");
    assert_false(upstream_send_body(&r->u, "more", 4)); /* stop */
    rig_close_exchange(r);
    assert_int_equal(upool_idle(r->pool), 0);
    assert_true(io_run(r->base.loop, gone, r, 5000));
    rig_clear(r);

    begin(r); /* a head is no end: the request goes on, and the connection stays good */
    assert_true(upstream_send_head(&r->u, SLICE("HEAD\r\n\r\n"), HTTP_POST, HTTP_BODY_LENGTH, "some", 4));
    say_text(r, "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n");
    assert_true(io_run(r->base.loop, has_head, r, 5000));
    assert_true(upstream_send_body(&r->u, "more", 4));
    upstream_send_end(&r->u);
    expect_request(r, "HEAD\r\n\r\nsomemore");
    say_text(r, "ok");
    assert_true(io_run(r->base.loop, is_over, r, 5000));
    rig_close_exchange(r);
    assert_int_equal(upool_idle(r->pool), 1);
    rig_free(r);
}

static bool has_drained(void *arg)
{
    struct rig *r = arg;

    receive(r);
    return r->drains > 0;
}

static void test_backpressure_of_the_request(void **state)
{
    static char bytes[1 << 20];
    struct rig *r = rig_new();

    (void)state;
    begin(r);
    assert_true(upstream_send_head(&r->u, SLICE("HEAD\r\n\r\n"), HTTP_POST, HTTP_BODY_LENGTH, NULL, 0));
    assert_false(upstream_full(&r->u));
    for (int i = 0; i < 16; i++)
        assert_true(upstream_send_body(&r->u, bytes, sizeof(bytes)));
    assert_true(upstream_full(&r->u));
    assert_true(io_run(r->base.loop, has_drained, r, 20000));
    assert_false(upstream_full(&r->u));
    /* answered before it was read: what is queued would stand before the next request */
    for (int i = 0; i < 16; i++)
        assert_true(upstream_send_body(&r->u, bytes, sizeof(bytes)));
    upstream_send_end(&r->u);
    say_text(r, "HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n");
    assert_true(io_run(r->base.loop, is_over, r, 5000));
    assert_int_equal(r->ends, 1);
    rig_close_exchange(r);
    assert_int_equal(upool_idle(r->pool), 0);
    rig_free(r);
}

/* --- pausing, closing -------------------------------------------------------------------------------------------- */

static bool body_is_whole(void *arg)
{
    struct want *w = arg;

    return w->r->body.n >= w->n;
}

static void test_pausing_stops_the_body(void **state)
{
    struct rig *r = rig_new();

    (void)state;
    r->at_head = ACT_PAUSE;
    begin(r);
    r->at_head = ACT_PAUSE;
    send_request(r, HTTP_POST);
    say_text(r, "HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\n");
    assert_true(io_run(r->base.loop, has_head, r, 5000));
    say_text(r, "abcdef");
    io_run_for(r->base.loop, 30);
    assert_int_equal(r->body.n, 0);
    upstream_resume(&r->u);
    assert_true(io_run(r->base.loop, body_is_whole, &(struct want){r, 6}, 5000));
    upstream_pause(&r->u); /* closed while paused: the pool gets one that reads */
    rig_close_exchange(r);
    assert_int_equal(upool_idle(r->pool), 1);
    hang_up(r);
    for (int i = 0; i < 1000 && upool_idle(r->pool) > 0; i++)
        io_run_for(r->base.loop, 2);
    assert_int_equal(upool_idle(r->pool), 0);
    rig_free(r);
}

static void test_closing_in_every_callback(void **state)
{
    static const char *const responses[] = {
        "HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello",
        "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
        "HTTP/1.1 204 No Content\r\n\r\n",
        "HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello",
    };

    (void)state;
    for (size_t i = 0; i < ARRAY_LEN(responses); i++) {
        for (int where = 0; where < 3; where++) {
            for (int cut = 0; cut < 2; cut++) {
                struct rig *r = rig_new();

                begin(r);
                *(where == 0 ? &r->at_head : where == 1 ? &r->at_body : &r->at_end) = ACT_CLOSE;
                send_request(r, HTTP_POST);
                if (cut != 0)
                    say(r, responses[i], 10);
                io_run_for(r->base.loop, 2);
                say_text(r, responses[i] + (cut != 0 ? 10 : 0));
                io_run_for(r->base.loop, 5);
                if (where == 2) { /* all was read: clean */
                    assert_int_equal(r->ends, 1);
                    assert_int_equal(upool_idle(r->pool), 1);
                }
                if (where == 0)
                    assert_int_equal(upool_idle(r->pool), 0);
                rig_free(r);
            }
        }
    }
}

static void test_closing_before_anything(void **state)
{
    struct rig *r = rig_new();

    (void)state;
    r->open = true;
    assert_false(upstream_open(&r->u, r->base.loop, r->pool, false, &ops, r));
    rig_close_exchange(r); /* the wish is taken back */
    io_run_for(r->base.loop, 20);
    assert_int_equal(r->opens, 0);
    rig_clear(r);
    begin(r);
    rig_close_exchange(r); /* nothing was sent: closed, not kept */
    assert_int_equal(upool_borrowed(r->pool), 0);
    rig_clear(r);
    r->u = (struct upstream){0};
    upstream_close(&r->u); /* never opened */
    rig_free(r);
}

static void test_nobody_listens(void **state)
{
    struct rig *r = rig_new();

    (void)state;
    close(r->listen_fd);
    r->listen_fd = -1;
    r->open = true;
    assert_false(upstream_open(&r->u, r->base.loop, r->pool, false, &ops, r));
    assert_true(io_run(r->base.loop, is_over, r, 5000));
    assert_int_equal(r->fail, UPSTREAM_FAIL_CONNECT);
    rig_free(r);
}

static void test_no_memory_to_dial(void **state)
{
    struct rig *r = rig_new();

    (void)state;
    r->open = r->inside = true;
    mem_fail_at(1, true);
    assert_false(upstream_open(&r->u, r->base.loop, r->pool, true, &ops, r));
    mem_fail_at(0, false);
    r->inside = false;
    assert_true(io_run(r->base.loop, is_over, r, 5000));
    assert_int_equal(r->fail, UPSTREAM_FAIL_MEMORY);
    rig_clear(r);
    r->open = true;
    mem_fail_at(1, true);
    assert_false(upstream_open(&r->u, r->base.loop, r->pool, true, &ops, r));
    mem_fail_at(0, false);
    rig_close_exchange(r); /* before it was told */
    io_run_for(r->base.loop, 5);
    assert_int_equal(r->fails, 0);
    rig_free(r);
}

/* --- tunnels ------------------------------------------------------------------------------------------------------- */

static bool raw_is_whole(void *arg)
{
    struct want *w = arg;

    return w->r->raw.n >= w->n;
}

static bool raw_ended(void *arg)
{
    return ((struct rig *)arg)->raw_ends > 0;
}

#define SWITCH "HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: upgrade\r\n\r\n"

static void test_tunnel(void **state)
{
    static const char text[] = SWITCH "abc";

    (void)state;
    for (size_t at = 1; at < sizeof(text); at++) {
        struct rig *r = rig_new();

        begin(r);
        upstream_expect_upgrade(&r->u);
        send_request(r, HTTP_GET);
        say(r, text, at);
        io_run_for(r->base.loop, 1);
        say(r, text + at, sizeof(text) - 1 - at);
        assert_true(io_run(r->base.loop, raw_is_whole, &(struct want){r, 3}, 5000));
        assert_int_equal(r->status, 101);
        assert_bytes(&r->raw, "abc");
        buf_free(&r->got);
        receive(r);
        buf_free(&r->got);
        assert_true(upstream_send_raw(&r->u, "def", 3));
        expect_request(r, "def");
        upstream_shutdown(&r->u);
        assert_true(io_run(r->base.loop, gone, r, 5000));
        assert_true(r->eof);
        assert_int_equal(shutdown(r->fd, SHUT_WR), 0);
        assert_true(io_run(r->base.loop, raw_ended, r, 5000));
        rig_close_exchange(r);
        assert_int_equal(upool_idle(r->pool), 0);
        rig_free(r);
    }
}

static void test_an_upgrade_may_be_declined(void **state)
{
    struct rig *r = rig_new();

    (void)state;
    begin(r);
    upstream_expect_upgrade(&r->u);
    send_request(r, HTTP_GET);
    say_text(r, "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok");
    assert_true(io_run(r->base.loop, is_over, r, 5000));
    assert_int_equal(r->ends, 1);
    assert_bytes(&r->body, "ok");
    rig_free(r);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_responses_cut_at_every_byte),
        cmocka_unit_test(test_a_clean_connection_serves_again),
        cmocka_unit_test(test_bytes_behind_a_response_retire_the_connection),
        cmocka_unit_test(test_interim_responses_have_a_bound),
        cmocka_unit_test(test_cut_responses_fail),
        cmocka_unit_test(test_bad_responses_fail),
        cmocka_unit_test(test_a_head_without_end_fails),
        cmocka_unit_test(test_request_framing),
        cmocka_unit_test(test_early_responses),
        cmocka_unit_test(test_backpressure_of_the_request),
        cmocka_unit_test(test_pausing_stops_the_body),
        cmocka_unit_test(test_closing_in_every_callback),
        cmocka_unit_test(test_closing_before_anything),
        cmocka_unit_test(test_nobody_listens),
        cmocka_unit_test(test_no_memory_to_dial),
        cmocka_unit_test(test_tunnel),
        cmocka_unit_test(test_an_upgrade_may_be_declined),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
