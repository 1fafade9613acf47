/*
 * test_client.c - one connection from a client, over real sockets: requests cut at every byte, pipelined, discarded,
 * and every way in which a client can go in every state. The owner of each exchange is this file.
 */
#include "io_help.h"

#include "client.h"

#define OK_REPLY "HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"

enum act { ACT_NOTHING, ACT_REPLY, ACT_PAUSE, ACT_TUNNEL };

struct exchange {
    struct rig *rig;
    struct client *c; /* NULL: finished */
    char line[128];   /* method and target */
    enum http_body framing;
    struct buf body, raw;
    unsigned body_ends, bad_bodies, drains, fins, resets, stalls;
    size_t fin_wants_raw; /* so many bytes must have come before a FIN is told */
};

struct rig {
    struct io_base base;
    struct client_group group;
    struct stream_listener *listener;
    enum act at_request, at_body_end;
    enum client_finish how; /* what follows a reply; KEEP: where it may be kept */
    struct exchange exchanges[64];
    size_t n;
    unsigned bad_heads, head_timeouts;
    unsigned fail_at; /* after the accept this allocation fails; 0: none */
    enum parse_error bad_head;
    int fd; /* the client's side; -1: closed */
    struct buf got;
    bool eof, reset;
};

/* --- the owner -------------------------------------------------------------------------------------------------- */

static void finish(struct exchange *x, enum client_finish how)
{
    struct client *c = x->c;

    x->c = NULL;
    client_finish(c, how);
}

static bool write_text(struct client *c, const char *text)
{
    struct iovec iov = {(void *)(uintptr_t)text, strlen(text)};

    return client_write(c, &iov, 1);
}

static void reply(struct exchange *x)
{
    enum client_finish how = x->rig->how;

    if (how == CLIENT_KEEP && !client_can_keep(x->c))
        how = CLIENT_CLOSE;
    assert_true(write_text(x->c, OK_REPLY));
    finish(x, how);
}

static void act(struct exchange *x, enum act what)
{
    switch (what) {
    case ACT_NOTHING:
        break;
    case ACT_REPLY:
        reply(x);
        break;
    case ACT_PAUSE:
        client_pause(x->c);
        break;
    case ACT_TUNNEL:
        client_tunnel(x->c);
        break;
    }
}

static void *on_request(void *arg, struct client *c, const struct http_head *h)
{
    struct rig *r = arg;
    struct exchange *x = &r->exchanges[r->n++];
    struct slice method = http_method_name((enum http_method)h->method), target = http_target(h);

    assert_true(r->n <= ARRAY_LEN(r->exchanges));
    *x = (struct exchange){.rig = r, .c = c, .framing = (enum http_body)h->body};
    snprintf(x->line, sizeof(x->line), "%.*s %.*s", (int)method.n, method.p, (int)target.n, target.p);
    act(x, r->at_request);
    return x->c == NULL ? NULL : x;
}

static void refuse(struct client *c)
{
    assert_true(write_text(c, "HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"));
    client_finish(c, CLIENT_CLOSE);
}

static void on_bad_head(void *arg, struct client *c, enum parse_error e)
{
    struct rig *r = arg;

    r->bad_heads++;
    r->bad_head = e;
    refuse(c);
}

static void on_head_timeout(void *arg, struct client *c)
{
    struct rig *r = arg;

    r->head_timeouts++;
    refuse(c);
}

static struct exchange *live(void *owner)
{
    struct exchange *x = owner;

    assert_non_null(x->c); /* else: an event after the finish */
    assert_int_equal(x->resets + x->stalls, 0);
    return x;
}

static void on_body(void *owner, char *bytes, size_t n)
{
    struct exchange *x = live(owner);

    assert_true(n > 0 && x->body_ends == 0);
    assert_true(buf_put(&x->body, (struct slice){bytes, n}));
    memset(bytes, 0x55, n);
}

static void on_body_end(void *owner)
{
    struct exchange *x = live(owner);

    x->body_ends++;
    act(x, x->rig->at_body_end);
}

static void on_bad_body(void *owner, enum parse_error e)
{
    struct exchange *x = live(owner);

    assert_int_not_equal(e, PARSE_OK);
    x->bad_bodies++;
    finish(x, CLIENT_CLOSE);
}

static void on_drain(void *owner)
{
    live(owner)->drains++;
}

static void on_end(void *owner, enum client_end how)
{
    struct exchange *x = live(owner);

    x->fins += how == CLIENT_END_FIN;
    assert_true(x->raw.n >= x->fin_wants_raw);
    x->resets += how == CLIENT_END_RESET;
    x->stalls += how == CLIENT_END_STALLED;
    if (how != CLIENT_END_FIN)
        finish(x, CLIENT_DROP);
}

static void on_raw(void *owner, char *bytes, size_t n)
{
    struct exchange *x = live(owner);

    assert_true(buf_put(&x->raw, (struct slice){bytes, n}));
}

static const struct client_ops ops = {.on_request = on_request,
                                      .on_bad_head = on_bad_head,
                                      .on_head_timeout = on_head_timeout,
                                      .on_body = on_body,
                                      .on_body_end = on_body_end,
                                      .on_bad_body = on_bad_body,
                                      .on_drain = on_drain,
                                      .on_end = on_end,
                                      .on_raw = on_raw};

/* --- the rig ---------------------------------------------------------------------------------------------------- */

static void on_accept(void *arg, struct stream *s)
{
    struct rig *r = arg;

    mem_fail_at(r->fail_at, false);
    client_begin(&r->group, s);
}

static struct rig *rig_new(void)
{
    struct rig *r = calloc(1, sizeof(*r));
    struct buf why = {0};

    r->base = io_begin();
    client_group_init(&r->group, r->base.loop, &ops, r);
    r->group.settings = (struct client_settings){.head_max_bytes = 65536,
                                                 .header_timeout_ms = 60000,
                                                 .keepalive_timeout_ms = 60000,
                                                 .write_timeout_ms = 60000};
    r->listener = stream_listen(r->base.loop, "127.0.0.1", 0, NULL, on_accept, r, &why);
    assert_non_null(r->listener);
    r->at_request = ACT_NOTHING;
    r->at_body_end = ACT_REPLY;
    r->how = CLIENT_KEEP;
    r->fd = -1;
    return r;
}

static void rig_hang_up(struct rig *r)
{
    if (r->fd >= 0)
        close(r->fd);
    r->fd = -1;
}

static bool nobody(void *arg)
{
    return list_empty(&((struct rig *)arg)->group.clients);
}

/* Forgets everything of the last connection. */
static void rig_clear(struct rig *r)
{
    rig_hang_up(r);
    client_group_drop(&r->group);
    r->group.closing = false;
    assert_true(nobody(r));
    for (size_t i = 0; i < r->n; i++) {
        buf_free(&r->exchanges[i].body);
        buf_free(&r->exchanges[i].raw);
    }
    r->n = 0;
    r->bad_heads = r->head_timeouts = 0;
    buf_free(&r->got);
    r->eof = r->reset = false;
}

static void rig_free(struct rig *r)
{
    rig_clear(r);
    stream_listener_close(r->listener);
    io_end(&r->base);
    free(r);
}

static void dial(struct rig *r)
{
    assert_int_equal(r->fd, -1);
    r->fd = io_raw_connect(stream_listener_port(r->listener));
    stream_socket_options(r->fd); /* no delay between two small pieces */
}

static void send_bytes(struct rig *r, const char *bytes, size_t n)
{
    assert_int_equal(send(r->fd, bytes, n, MSG_NOSIGNAL), n);
}

static void send_text(struct rig *r, const char *text)
{
    send_bytes(r, text, strlen(text));
}

static void receive(struct rig *r)
{
    char bytes[65536];
    ssize_t n;

    if (r->fd < 0)
        return;
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
    return w->r->got.n >= w->n || w->r->eof || w->r->reset;
}

/* What the client has been sent by now is exactly this. */
static void expect_text(struct rig *r, const char *text)
{
    struct want w = {r, strlen(text)};

    assert_true(io_run(r->base.loop, got_bytes, &w, 5000));
    if (!slice_eq(buf_slice(&r->got), slice_of(text)))
        fail_msg("<%.*s> instead of <%s>", (int)r->got.n, r->got.p, text);
    buf_free(&r->got);
}

static bool at_end(void *arg)
{
    struct rig *r = arg;

    receive(r);
    return r->eof || r->reset;
}

static void expect_eof(struct rig *r)
{
    assert_true(io_run(r->base.loop, at_end, r, 5000));
    assert_true(r->eof && !r->reset);
    assert_int_equal(r->got.n, 0);
}

static bool has_exchange(void *arg)
{
    struct want *w = arg;

    return w->r->n >= w->n;
}

static struct exchange *expect_exchange(struct rig *r, size_t i, const char *line)
{
    struct want w = {r, i + 1};

    assert_true(io_run(r->base.loop, has_exchange, &w, 5000));
    assert_string_equal(r->exchanges[i].line, line);
    return &r->exchanges[i];
}

static bool has_fin(void *arg)
{
    return ((struct exchange *)arg)->fins > 0;
}

static bool has_reset(void *arg)
{
    return ((struct exchange *)arg)->resets > 0;
}

static bool has_stalled(void *arg)
{
    return ((struct exchange *)arg)->stalls > 0;
}

static bool has_drained(void *arg)
{
    return ((struct exchange *)arg)->drains > 0;
}

static bool has_body_end(void *arg)
{
    return ((struct exchange *)arg)->body_ends > 0;
}

static void assert_bytes(const struct buf *b, const char *want)
{
    if (!slice_eq(buf_slice(b), slice_of(want)))
        fail_msg("<%.*s> instead of <%s>", (int)b->n, b->n == 0 ? "" : b->p, want);
}

static void turn(struct rig *r)
{
    io_run_for(r->base.loop, 1);
}

/* --- requests --------------------------------------------------------------------------------------------------- */

#define GET(path) "GET " path " HTTP/1.1\r\nHost: h\r\n\r\n"
#define POST(path, n) "POST " path " HTTP/1.1\r\nHost: h\r\nContent-Length: " n "\r\n\r\n"

static const char three[] =
    POST("/a", "5") "hello"
                    "POST /b HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n"
                    "3;x=y\r\nwor\r\n2\r\nld\r\n0\r\nt: v\r\n\r\n" POST("/c", "0") POST("/d", "1") "!";

static void check_three(struct rig *r)
{
    static const char *const lines[] = {"POST /a", "POST /b", "POST /c", "POST /d"};
    static const char *const bodies[] = {"hello", "world", "", "!"};

    expect_text(r, OK_REPLY OK_REPLY OK_REPLY OK_REPLY);
    assert_int_equal(r->n, 4);
    for (size_t i = 0; i < 4; i++) {
        assert_string_equal(r->exchanges[i].line, lines[i]);
        assert_bytes(&r->exchanges[i].body, bodies[i]);
        assert_int_equal(r->exchanges[i].body_ends, 1);
        assert_int_equal(r->exchanges[i].fins, 0);
    }
}

static void test_requests_cut_at_every_byte(void **state)
{
    struct rig *r = rig_new();

    (void)state;
    for (size_t at = 0; at < sizeof(three) - 1; at++) {
        dial(r);
        if (at > 0)
            send_bytes(r, three, at);
        turn(r);
        send_bytes(r, three + at, sizeof(three) - 1 - at);
        check_three(r);
        rig_clear(r);
    }
    dial(r);
    for (size_t at = 0; at < sizeof(three) - 1; at++) {
        send_bytes(r, three + at, 1);
        turn(r);
    }
    check_three(r);
    rig_free(r);
}

/* The second request is not looked at before the first has its answer. */
static void test_pipelined_requests_wait(void **state)
{
    struct rig *r = rig_new();

    (void)state;
    r->at_body_end = ACT_NOTHING;
    dial(r);
    send_text(r, GET("/1") POST("/2", "3") "abc" GET("/3"));
    for (size_t i = 0; i < 3; i++) {
        char line[16];

        snprintf(line, sizeof(line), "%s /%zu", i == 1 ? "POST" : "GET", i + 1);
        expect_exchange(r, i, line);
        io_run_for(r->base.loop, 20);
        assert_int_equal(r->n, i + 1);
        send_text(r, i == 0   ? "GET /4 HTTP/1.1\r\n"
                     : i == 1 ? "Host: h\r\n"
                              : "\r\n"); /* a fourth comes ahead in pieces */
        turn(r);
        reply(&r->exchanges[i]);
    }
    expect_exchange(r, 3, "GET /4");
    reply(&r->exchanges[3]);
    expect_text(r, OK_REPLY OK_REPLY OK_REPLY OK_REPLY);
    assert_bytes(&r->exchanges[1].body, "abc");
    rig_free(r);
}

static void test_pausing_holds_the_body(void **state)
{
    struct rig *r = rig_new();
    struct exchange *x;

    (void)state;
    r->at_request = ACT_PAUSE;
    dial(r);
    send_text(r, POST("/", "6"));
    x = expect_exchange(r, 0, "POST /");
    send_text(r, "abc");
    io_run_for(r->base.loop, 150); /* longer than a look at a watched socket takes */
    assert_int_equal(x->body.n, 0);
    client_resume(x->c);
    send_text(r, "def");
    assert_true(io_run(r->base.loop, has_body_end, x, 5000));
    assert_bytes(&x->body, "abcdef");
    expect_text(r, OK_REPLY);
    rig_free(r);
}

static void test_interim_responses(void **state)
{
    struct rig *r = rig_new();
    struct exchange *x;

    (void)state;
    r->at_body_end = ACT_NOTHING;
    dial(r);
    send_text(r, "POST / HTTP/1.1\r\nHost: h\r\nExpect: 100-continue\r\nContent-Length: 2\r\n\r\n");
    x = expect_exchange(r, 0, "POST /");
    assert_false(client_can_keep(x->c)); /* whether the body will come is not known */
    client_continue(x->c);
    client_continue(x->c);
    expect_text(r, "HTTP/1.1 100 Continue\r\n\r\n");
    client_probe(x->c);
    expect_text(r, "HTTP/1.1 102 Processing\r\n\r\n");
    send_text(r, "ab");
    assert_true(io_run(r->base.loop, has_body_end, x, 5000));
    client_continue(x->c);
    reply(x);
    expect_text(r, OK_REPLY);
    send_text(
        r,
        "POST /2 HTTP/1.1\r\nHost: h\r\nExpect: 100-continue\r\nContent-Length: 2\r\n\r\nab"); /* did not wait for it */
    x = expect_exchange(r, 1, "POST /2");
    assert_true(io_run(r->base.loop, has_body_end, x, 5000));
    client_continue(x->c);
    reply(x);
    expect_text(r, OK_REPLY);
    rig_clear(r);

    dial(r);
    send_text(r, "GET /old HTTP/1.0\r\n\r\n");
    x = expect_exchange(r, 0, "GET /old");
    client_probe(x->c);
    reply(x);
    expect_text(r, OK_REPLY);
    expect_eof(r);
    rig_free(r);
}

/* --- keeping and closing ---------------------------------------------------------------------------------------- */

static void check_keep(const char *request, bool keep)
{
    struct rig *r = rig_new();
    struct exchange *x;
    struct want w = {r, 1};

    r->at_body_end = ACT_NOTHING;
    dial(r);
    send_text(r, request);
    assert_true(io_run(r->base.loop, has_exchange, &w, 5000));
    x = &r->exchanges[0];
    if (client_can_keep(x->c) != keep)
        fail_msg("<%s>", request);
    reply(x);
    expect_text(r, OK_REPLY);
    if (!keep)
        expect_eof(r);
    rig_free(r);
}

static void test_which_connections_are_kept(void **state)
{
    (void)state;
    check_keep(GET("/"), true);
    check_keep("GET / HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n", false);
    check_keep("GET / HTTP/1.1\r\nHost: h\r\nConnection: x, Close\r\n\r\n", false);
    check_keep("GET / HTTP/1.0\r\n\r\n", false);
    check_keep("GET / HTTP/1.0\r\nConnection: keep-alive\r\n\r\n", true);
    check_keep(POST("/", "262144"), true); /* a rest that is worth reading */
    check_keep(POST("/", "262145"), false);
    check_keep("POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n", false);
    check_keep("POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", true);
}

static void test_the_rest_of_a_body_is_discarded(void **state)
{
    struct rig *r = rig_new();
    char part[1000];

    (void)state;
    memset(part, 'x', sizeof(part));
    r->at_request = ACT_REPLY;
    dial(r);
    send_text(r, POST("/1", "100000"));
    expect_text(r, OK_REPLY); /* before any of the body */
    for (int i = 0; i < 100; i++) {
        send_bytes(r, part, sizeof(part));
        if (i % 10 == 0)
            turn(r);
    }
    send_text(r, POST("/2", "3") "xyz" POST("/3", "0"));
    expect_text(r, OK_REPLY OK_REPLY);
    assert_int_equal(r->n, 3);
    for (size_t i = 0; i < 3; i++)
        assert_int_equal(r->exchanges[i].body.n, 0);
    rig_free(r);
}

/* The whole upload is taken off the client's hands, so that it comes to read its answer; no reset destroys it. */
static void test_a_refused_upload_sees_its_answer(void **state)
{
    struct rig *r = rig_new();
    static char part[65536];
    size_t left = 4u << 20;

    (void)state;
    r->at_request = ACT_REPLY;
    dial(r);
    send_text(r, POST("/", "4194304"));
    while (left > 0) {
        ssize_t n = send(r->fd, part, size_min(left, sizeof(part)), MSG_NOSIGNAL);

        if (n < 0) {
            assert_int_equal(errno, EAGAIN);
            turn(r);
            continue;
        }
        left -= (size_t)n;
    }
    expect_text(r, OK_REPLY);
    expect_eof(r);
    rig_hang_up(r);
    assert_true(io_run(r->base.loop, io_no_streams, r->base.loop, 5000) || stream_live(r->base.loop) == 0);
    rig_free(r);
}

static void test_a_cut_response_looks_cut(void **state)
{
    struct rig *r = rig_new();
    struct exchange *x;

    (void)state;
    dial(r);
    send_text(r, GET("/"));
    x = expect_exchange(r, 0, "GET /");
    assert_true(write_text(x->c, "HTTP/1.1 200 OK\r\n\r\nhalf"));
    finish(x, CLIENT_CUT);
    assert_true(io_run(r->base.loop, at_end, r, 5000));
    assert_true(r->reset);
    rig_clear(r);
    dial(r);
    send_text(r, GET("/"));
    x = expect_exchange(r, 0, "GET /");
    finish(x, CLIENT_DROP);
    expect_eof(r);
    rig_free(r);
}

static void test_closing_the_group(void **state)
{
    struct rig *r = rig_new();
    struct exchange *x;
    int idle;

    (void)state;
    r->at_body_end = ACT_NOTHING;
    idle = io_raw_connect(stream_listener_port(r->listener));
    dial(r);
    send_text(r, GET("/"));
    x = expect_exchange(r, 0, "GET /");
    assert_true(client_can_keep(x->c));
    client_group_close(&r->group);
    assert_int_equal(r->group.clients.length, 1); /* the idle one is gone */
    assert_false(client_can_keep(x->c));
    reply(x);
    expect_text(r, OK_REPLY);
    expect_eof(r);
    close(idle);
    rig_free(r);
}

/* --- what is no request ------------------------------------------------------------------------------------------ */

static void test_bad_heads(void **state)
{
    static const char *const bad[] = {"NONSENSE\r\n\r\n", "GET / HTTP/1.1\r\n\r\n",
                                      "GET / HTTP/1.1\nHost: h\n\n", "GET / HTTP/2.0\r\nHost: h\r\n\r\n",
                                      "\x16\x03\x01\x02"};
    struct rig *r = rig_new();

    (void)state;
    for (size_t i = 0; i < ARRAY_LEN(bad); i++) {
        dial(r);
        send_text(r, bad[i]);
        send_text(r, GET("/behind"));
        expect_text(r, "HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\nconnection: close\r\n\r\n");
        expect_eof(r);
        assert_int_equal(r->bad_heads, 1);
        assert_int_not_equal(r->bad_head, PARSE_OK);
        assert_int_equal(r->n, 0);
        rig_clear(r);
    }
    rig_free(r);
}

static void test_bad_bodies(void **state)
{
    struct rig *r = rig_new();

    (void)state;
    dial(r);
    send_text(r, "POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\nzz\r\n");
    expect_eof(r);
    assert_int_equal(r->exchanges[0].bad_bodies, 1);
    assert_int_equal(r->exchanges[0].body_ends, 0);
    rig_clear(r);
    r->at_request = ACT_REPLY; /* while it is being thrown away: the connection just goes */
    r->how = CLIENT_KEEP;
    dial(r);
    send_text(r, POST("/", "1"));
    expect_text(r, OK_REPLY);
    send_text(r, "xNONSENSE\r\n\r\n");
    expect_text(r, "HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\nconnection: close\r\n\r\n");
    expect_eof(r);
    rig_free(r);
}

/* --- deadlines --------------------------------------------------------------------------------------------------- */

static void test_head_and_keep_alive_deadlines(void **state)
{
    struct rig *r = rig_new();

    (void)state;
    r->group.settings.header_timeout_ms = 60;
    dial(r);
    expect_eof(r); /* no byte: no answer */
    assert_int_equal(r->head_timeouts, 0);
    rig_clear(r);
    dial(r);
    send_text(r, "GET / HT");
    expect_text(r, "HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\nconnection: close\r\n\r\n");
    expect_eof(r);
    assert_int_equal(r->head_timeouts, 1);
    rig_clear(r);
    dial(r);
    for (const char *p = "GET / HTTP/1.1\r\nx: 12345678901234567890123456789012345678901234567890";
         *p != '\0' && r->head_timeouts == 0; p++) {
        (void)!send(r->fd, p, 1, MSG_NOSIGNAL); /* a byte now and then buys no time */
        io_run_for(r->base.loop, 3);
    }
    assert_int_equal(r->head_timeouts, 1);
    rig_clear(r);
    r->group.settings.header_timeout_ms = 60000;
    r->group.settings.keepalive_timeout_ms = 60;
    r->at_request = ACT_REPLY;
    dial(r);
    send_text(r, GET("/"));
    expect_text(r, OK_REPLY);
    expect_eof(r);
    assert_int_equal(r->head_timeouts, 0);
    rig_free(r);
}

static void write_much(struct exchange *x, size_t n)
{
    static char bytes[1 << 20];
    struct iovec iov = {bytes, sizeof(bytes)};

    for (size_t i = 0; i < n; i++)
        assert_true(client_write(x->c, &iov, 1));
}

static void test_a_client_that_stops_reading(void **state)
{
    struct rig *r = rig_new();
    struct exchange *x;
    size_t total = 0, size = 64u << 20;

    (void)state;
    r->group.settings.write_timeout_ms = 400;
    dial(r);
    send_text(r, GET("/"));
    x = expect_exchange(r, 0, "GET /");
    write_much(x, size >> 20);
    assert_true(client_full(x->c));
    for (int i = 0; i < 3; i++) { /* taking all there is every now and then is progress */
        static char bytes[1 << 20];
        ssize_t n;

        io_run_for(r->base.loop, 160);
        while ((n = recv(r->fd, bytes, sizeof(bytes), MSG_DONTWAIT)) > 0)
            total += (size_t)n;
        assert_int_equal(x->stalls, 0);
    }
    assert_true(total < size);
    assert_true(io_run(r->base.loop, has_stalled, x, 5000));
    assert_null(x->c);
    rig_free(r);
}

static void test_drain_is_told(void **state)
{
    struct rig *r = rig_new();
    struct exchange *x;
    struct want w = {r, 32u << 20};

    (void)state;
    dial(r);
    send_text(r, GET("/"));
    x = expect_exchange(r, 0, "GET /");
    assert_false(client_full(x->c));
    write_much(x, 32);
    assert_true(client_full(x->c));
    io_run_for(r->base.loop, 20);
    assert_int_equal(x->drains, 0);
    assert_true(io_run(r->base.loop, got_bytes, &w, 20000));
    assert_true(io_run(r->base.loop, has_drained, x, 5000));
    assert_false(client_full(x->c));
    assert_int_equal(r->got.n, 32u << 20);
    rig_free(r);
}

/* --- the client goes ---------------------------------------------------------------------------------------------- */

/* Where nobody has an exchange, the connection goes by itself, without an event. */
static void check_goes_alone(const char *sent, enum act at_request, bool reset)
{
    struct rig *r = rig_new();

    r->at_request = at_request;
    dial(r);
    send_text(r, sent);
    io_run_for(r->base.loop, 10);
    assert_int_equal(r->group.clients.length, 1);
    if (reset)
        io_raw_reset(r->fd);
    else
        close(r->fd);
    r->fd = -1;
    assert_true(io_run(r->base.loop, nobody, r, 5000));
    assert_int_equal(r->bad_heads + r->head_timeouts, 0);
    for (size_t i = 0; i < r->n; i++)
        assert_int_equal(r->exchanges[i].fins + r->exchanges[i].resets, 0);
    rig_free(r);
}

static void test_gone_between_exchanges(void **state)
{
    (void)state;
    for (int reset = 0; reset < 2; reset++) {
        check_goes_alone("", ACT_NOTHING, reset != 0);
        check_goes_alone("GET / HT", ACT_NOTHING, reset != 0);
        check_goes_alone(GET("/"), ACT_REPLY, reset != 0);
        check_goes_alone(POST("/", "100"), ACT_REPLY, reset != 0); /* the rest is being discarded */
        check_goes_alone(POST("/", "100") "some", ACT_REPLY, reset != 0);
        check_goes_alone(GET("/") "GET /nex", ACT_REPLY, reset != 0);
    }
}

static void check_told(const char *sent, enum act at_request, const char *behind)
{
    for (int reset = 0; reset < 2; reset++) {
        struct rig *r = rig_new();
        struct exchange *x;
        struct want w = {r, 1};

        r->at_request = at_request;
        r->at_body_end = ACT_NOTHING;
        dial(r);
        send_text(r, sent);
        assert_true(io_run(r->base.loop, has_exchange, &w, 5000));
        x = &r->exchanges[0];
        io_run_for(r->base.loop, 5);
        if (behind[0] != '\0')
            send_text(r, behind);
        if (reset != 0) {
            io_raw_reset(r->fd);
            r->fd = -1;
            assert_true(io_run(r->base.loop, has_reset, x, 5000));
            assert_true(io_run(r->base.loop, nobody, r, 5000));
        } else {
            assert_int_equal(shutdown(r->fd, SHUT_WR), 0);
            assert_true(io_run(r->base.loop, has_fin, x, 5000));
            assert_true(client_half_closed(x->c));
            assert_false(client_can_keep(x->c));
            assert_false(client_is_gone(x->c)); /* it may only have half closed */
            assert_int_equal(x->fins, 1);
            if (at_request != ACT_TUNNEL) {
                client_resume(x->c);
                reply(x);
                expect_text(r, OK_REPLY);
                expect_eof(r);
            }
        }
        rig_free(r);
    }
}

static void test_gone_during_an_exchange(void **state)
{
    (void)state;
    check_told(GET("/"), ACT_NOTHING, "");
    check_told(GET("/"), ACT_PAUSE, "");
    check_told(GET("/") GET("/2"), ACT_NOTHING, "");
    check_told(POST("/", "10") "half", ACT_NOTHING, "");
    check_told(POST("/", "10") "half", ACT_PAUSE, "");
    check_told(POST("/", "10"), ACT_PAUSE, "unread"); /* the end stands behind bytes that nobody reads */
    check_told(GET("/"), ACT_TUNNEL, "");
}

static void test_gone_is_told_apart_from_half_closed(void **state)
{
    struct rig *r = rig_new();
    struct exchange *x;

    (void)state;
    dial(r);
    send_text(r, GET("/"));
    x = expect_exchange(r, 0, "GET /");
    close(r->fd);
    r->fd = -1;
    assert_true(io_run(r->base.loop, has_fin, x, 5000));
    client_probe(x->c); /* a closed socket answers with a reset */
    assert_true(io_run(r->base.loop, has_reset, x, 5000));
    rig_free(r);
}

/*
 * A head in two pieces, the second in one turn with the FIN (it fills a read, so libuv reads on; on TLS, close_notify in the
 * same segment does it): the exchange begins when the end of its client is already known.
 */
static void test_an_end_that_came_with_the_head_is_told(void **state)
{
    static char piece[LOOP_SCRATCH_BYTES];
    struct rig *r = rig_new();
    struct exchange *x;

    (void)state;
    r->group.settings.head_max_bytes = 4 * LOOP_SCRATCH_BYTES;
    memset(piece, 'x', sizeof(piece));
    memcpy(piece, "st: h\r\nx: ", 10);
    memcpy(piece + sizeof(piece) - 4, "\r\n\r\n", 4);
    dial(r);
    send_text(r, "GET / HTTP/1.1\r\nHo");
    io_run_for(r->base.loop, 5);
    send_bytes(r, piece, sizeof(piece));
    assert_int_equal(shutdown(r->fd, SHUT_WR), 0);
    x = expect_exchange(r, 0, "GET /");
    assert_true(io_run(r->base.loop, has_fin, x, 1000));
    reply(x);
    expect_text(r, OK_REPLY);
    expect_eof(r);
    rig_free(r);
}

/* --- tunnels ------------------------------------------------------------------------------------------------------ */

struct trigger {
    struct exchange *x;
    unsigned fired;
};

static void trigger_data(void *owner, char *bytes UNUSED, size_t n UNUSED)
{
    struct trigger *t = owner;

    t->fired++;
    client_tunnel(t->x->c);
}

static void trigger_nothing(void *owner UNUSED)
{
}

static void trigger_end(void *owner UNUSED, enum stream_end how UNUSED)
{
}

static void trigger_error(void *owner UNUSED, int error UNUSED, const char *detail UNUSED)
{
}

static const struct stream_ops trigger_ops = {trigger_nothing, trigger_data, trigger_end, trigger_nothing,
                                              trigger_error};

struct raw_want {
    struct exchange *x;
    size_t n;
};

static bool has_raw(void *arg)
{
    struct raw_want *w = arg;

    return w->x->raw.n >= w->n;
}

/*
 * Bytes sent ahead of the 101 and bytes that come in the very turn in which the tunnel begins: in order. The tunnel begins
 * where it does in life: in the callback of another socket, which the kernel reports before the client's.
 */
static void test_tunnel_bytes_keep_their_order(void **state)
{
    struct rig *r = rig_new();
    struct trigger t = {0};
    struct sockaddr_in address = io_loopback(1);
    int pair[2];
    struct stream *s;

    (void)state;
    assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, pair), 0);
    s = stream_from_socket(r->base.loop, pair[0], (struct sockaddr *)&address, NULL);
    assert_non_null(s);
    stream_adopt(s, &trigger_ops, &t);
    dial(r);
    send_text(r, GET("/ws") "first ");
    t.x = expect_exchange(r, 0, "GET /ws");
    io_run_for(r->base.loop, 5);
    assert_int_equal(write(pair[1], "x", 1), 1);
    send_text(r, "second ");
    assert_true(io_run(r->base.loop, has_raw, &(struct raw_want){t.x, 13}, 5000));
    assert_int_equal(t.fired, 1);
    send_text(r, "third");
    assert_true(io_run(r->base.loop, has_raw, &(struct raw_want){t.x, 18}, 5000));
    assert_bytes(&t.x->raw, "first second third");
    assert_true(write_text(t.x->c, "back"));
    expect_text(r, "back");
    client_shutdown(t.x->c);
    expect_eof(r);
    finish(t.x, CLIENT_DROP);
    stream_close(s);
    close(pair[1]);
    rig_free(r);
}

/* The client sent ahead and left: its end comes behind its bytes, whichever way the turn went. */
static void test_tunnel_end_comes_behind_the_bytes(void **state)
{
    struct rig *r = rig_new();
    struct trigger t = {0};
    struct sockaddr_in address = io_loopback(1);
    int pair[2];
    struct stream *s;

    (void)state;
    assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, pair), 0);
    s = stream_from_socket(r->base.loop, pair[0], (struct sockaddr *)&address, NULL);
    assert_non_null(s);
    stream_adopt(s, &trigger_ops, &t);
    dial(r);
    send_text(r, GET("/ws") "ahead");
    t.x = expect_exchange(r, 0, "GET /ws");
    io_run_for(r->base.loop, 5);
    assert_int_equal(write(pair[1], "x", 1), 1);
    assert_int_equal(shutdown(r->fd, SHUT_WR), 0);
    t.x->fin_wants_raw = 5;
    assert_true(io_run(r->base.loop, has_fin, t.x, 5000));
    assert_bytes(&t.x->raw, "ahead");
    stream_close(s);
    close(pair[1]);
    rig_free(r);
}

/* --- memory ------------------------------------------------------------------------------------------------------- */

static void trigger_without_memory(void *owner, char *bytes, size_t n)
{
    trigger_data(owner, bytes, n);
    mem_fail_at(1, true);
}

static const struct stream_ops starving_ops = {trigger_nothing, trigger_without_memory, trigger_end,
                                               trigger_nothing, trigger_error};

/* The owner has paused the tunnel, its client sends a rest and leaves: the end waits until the rest has been read. */
static void test_tunnel_end_waits_for_a_paused_rest(void **state)
{
    struct rig *r = rig_new();
    struct exchange *x;

    (void)state;
    dial(r);
    send_text(r, GET("/ws"));
    x = expect_exchange(r, 0, "GET /ws");
    client_tunnel(x->c);
    client_pause(x->c);
    send_text(r, "the rest");
    assert_int_equal(shutdown(r->fd, SHUT_WR), 0);
    io_run_for(r->base.loop, 250); /* longer than the watch takes to see it */
    assert_int_equal(x->fins, 0);
    x->fin_wants_raw = 8;
    client_resume(x->c);
    assert_true(io_run(r->base.loop, has_fin, x, 5000));
    assert_bytes(&x->raw, "the rest");
    rig_free(r);
}

static bool is_lost(void *arg)
{
    const struct exchange *x = arg;

    return x->resets > 0;
}

/* What the tunnel's first bytes do not fit into is not there: the owner hears that the client is lost, as in any state. */
static void test_tunnel_without_memory(void **state)
{
    struct rig *r = rig_new();
    struct trigger t = {0};
    struct sockaddr_in address = io_loopback(1);
    char much[4096];
    int pair[2];
    struct stream *s;

    (void)state;
    memset(much, 'x', sizeof(much));
    assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, pair), 0);
    s = stream_from_socket(r->base.loop, pair[0], (struct sockaddr *)&address, NULL);
    assert_non_null(s);
    stream_adopt(s, &starving_ops, &t);
    dial(r);
    send_text(r, GET("/ws") "ahead");
    t.x = expect_exchange(r, 0, "GET /ws");
    io_run_for(r->base.loop, 5);
    assert_int_equal(write(pair[1], "x", 1), 1);
    assert_int_equal(send(r->fd, much, sizeof(much), MSG_NOSIGNAL), sizeof(much));
    assert_true(io_run(r->base.loop, is_lost, t.x, 5000));
    mem_fail_at(0, false);
    stream_close(s);
    close(pair[1]);
    rig_free(r);
}

/* Each allocation on the way of a request, missing in turn: the connection is served or goes, nothing is left. */
static void test_without_memory(void **state)
{
    unsigned served = 0;

    (void)state;
    for (unsigned n = 0; n <= 12; n++) { /* 0: what the loop and the tests need has been had once */
        struct rig *r = rig_new();
        struct want w = {r, sizeof(OK_REPLY) - 1};

        for (int round = 0; round < 2; round++) {
            r->fail_at = round == 0 ? 0 : n;
            r->at_body_end = ACT_REPLY;
            dial(r);
            send_text(r, "POST / HTTP/1.1\r\nHo");
            io_run_for(r->base.loop, 3);
            (void)!send(r->fd, "st: h\r\nContent-Length: 0\r\n\r\n", 28, MSG_NOSIGNAL);
            io_run_for(r->base.loop, 3);
            mem_fail_at(0, false);
            assert_true(io_run(r->base.loop, got_bytes, &w, 5000));
            if (round == 1 && r->got.n > 0)
                served++;
            rig_clear(r);
        }
        rig_free(r);
    }
    assert_in_range(served, 1, 12);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_requests_cut_at_every_byte),
        cmocka_unit_test(test_pipelined_requests_wait),
        cmocka_unit_test(test_pausing_holds_the_body),
        cmocka_unit_test(test_interim_responses),
        cmocka_unit_test(test_which_connections_are_kept),
        cmocka_unit_test(test_the_rest_of_a_body_is_discarded),
        cmocka_unit_test(test_a_refused_upload_sees_its_answer),
        cmocka_unit_test(test_a_cut_response_looks_cut),
        cmocka_unit_test(test_closing_the_group),
        cmocka_unit_test(test_bad_heads),
        cmocka_unit_test(test_bad_bodies),
        cmocka_unit_test(test_head_and_keep_alive_deadlines),
        cmocka_unit_test(test_a_client_that_stops_reading),
        cmocka_unit_test(test_drain_is_told),
        cmocka_unit_test(test_gone_between_exchanges),
        cmocka_unit_test(test_gone_during_an_exchange),
        cmocka_unit_test(test_gone_is_told_apart_from_half_closed),
        cmocka_unit_test(test_an_end_that_came_with_the_head_is_told),
        cmocka_unit_test(test_tunnel_bytes_keep_their_order),
        cmocka_unit_test(test_tunnel_end_comes_behind_the_bytes),
        cmocka_unit_test(test_tunnel_end_waits_for_a_paused_rest),
        cmocka_unit_test(test_tunnel_without_memory),
        cmocka_unit_test(test_without_memory),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
