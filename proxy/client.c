/*
 * client.c - one connection from a client.
 *
 * Memory: the struct and its stream. `in` holds bytes only while a head is incomplete
 * or a request was sent ahead; in between it owns nothing.
 *
 * Whoever leaves a callback may have ended the exchange or the whole connection: after each call up,
 * `state` is looked at again; a struct that went is freed at the end of the turn only.
 */
#include "client.h"

#include "mem.h"
#include "metrics.h"

#define LINGER_BYTES                                                                                         \
    (32u * 1024 * 1024) /* a 30 MB upload is read to its end so that its 413 is seen (cases H137) */
#define LINGER_MS 5000
#define DISCARD_MAX (256 * 1024) /* a rest of a body that is worth reading to keep the connection */

enum client_state { CLIENT_IDLE, CLIENT_HEAD, CLIENT_EXCHANGE, CLIENT_DISCARD, CLIENT_TUNNEL, CLIENT_GONE };

struct client {
    struct list_node node; /* in group->clients */
    struct client_group *group;
    struct stream *stream;
    void *owner; /* of the exchange */
    struct buf in;
    struct parse_scan scan;
    struct parse_body body;
    struct deadline deadline; /* head, keep-alive, or progress of writing: one at a time, by state */
    struct task again;        /* bytes in `in` wait to be looked at */
    uint64_t delivered;       /* bytes that had arrived at the client at the last look */
    uint32_t exchanges;
    uint8_t state;
    bool body_done;
    bool keep; /* the request allows another one */
    bool want_continue;
    bool paused;      /* by the owner */
    bool ended;       /* FIN has come */
    bool handshaking; /* TLS is not up yet */
    uint8_t minor;
};

/* --- states ------------------------------------------------------------------------------------------------ */

static void rearm(struct client *c)
{
    struct client_group *g = c->group;
    uint64_t after_ms = 0;

    switch ((enum client_state)c->state) {
    case CLIENT_IDLE:
        if (c->handshaking)
            after_ms = g->settings.handshake_timeout_ms;
        else
            after_ms = c->exchanges == 0 ? g->settings.header_timeout_ms : g->settings.keepalive_timeout_ms;
        break;
    case CLIENT_HEAD: /* total, not reset by each byte */
        after_ms = g->settings.header_timeout_ms;
        break;
    case CLIENT_EXCHANGE:
    case CLIENT_TUNNEL:
        after_ms = stream_queued(c->stream) > 0 ? g->settings.write_timeout_ms : 0;
        break;
    case CLIENT_DISCARD:
        after_ms = LINGER_MS;
        break;
    case CLIENT_GONE:
        break;
    }
    if (stream_queued(c->stream) > 0)
        c->delivered = stream_bytes_acknowledged(c->stream);
    if (after_ms == 0)
        deadline_cancel(g->loop, &c->deadline);
    else if (!deadline_set(g->loop, &c->deadline, loop_now_ms(g->loop) + after_ms))
        WARN_ON(true); /* no memory for a deadline: this one wait is unbounded until the next rearm */
}

static void set_state(struct client *c, enum client_state state)
{
    c->state = (uint8_t)state;
    if (state != CLIENT_GONE)
        rearm(c);
}

/*
 * Paused by the owner, or because enough was sent ahead: the stream stays watched. But for a tunnel that is paused:
 * the watch sees a FIN ahead of bytes that are not read yet, and there it must be given on behind them.
 */
static void update_reading(struct client *c)
{
    bool ahead = c->state == CLIENT_EXCHANGE && c->body_done && c->in.n >= CLIENT_AHEAD_BYTES;

    stream_watch(c->stream, c->state != CLIENT_TUNNEL || !c->paused || c->ended);
    if (c->paused || ahead)
        stream_pause(c->stream);
    else
        stream_resume(c->stream);
}

static void forget(struct client *c)
{
    struct client_group *g = c->group;

    BUG_ON(c->state == CLIENT_GONE);
    set_state(c, CLIENT_GONE);
    deadline_cancel(g->loop, &c->deadline);
    task_cancel(g->loop, &c->again);
    list_remove(&g->clients, &c->node);
    buf_free(&c->in);
    c->stream = NULL;
    loop_free_later(g->loop, c);
}

static void close_now(struct client *c)
{
    struct stream *s = c->stream;

    forget(c);
    stream_close(s);
}

static void close_gently(struct client *c)
{
    struct stream *s = c->stream;

    forget(c);
    stream_close_gently(s, LINGER_BYTES, LINGER_MS);
}

/* Between requests: what is still queued of the last response goes out first. */
static void close_idle(struct client *c)
{
    if (stream_queued(c->stream) > 0)
        close_gently(c);
    else
        close_now(c);
}

/* --- reading ------------------------------------------------------------------------------------------------ */

/* Body bytes to the owner. Returns how many bytes were used, SIZE_MAX when the connection is no longer ours to read. */
static size_t feed_body(struct client *c, char *bytes, size_t n)
{
    size_t used = n, payload = 0;
    enum parse_error error = PARSE_OK;
    bool wanted = c->state == CLIENT_EXCHANGE;
    enum parse_body_result result = parse_body_feed(&c->body, bytes, &used, &payload, true, &error);
    void *owner = c->owner;

    if (result == PARSE_BODY_BAD) {
        c->keep = false;
        c->body_done = true;
        if (wanted)
            c->group->ops->on_bad_body(owner, error);
        else
            close_gently(c);
        return SIZE_MAX;
    }
    if (result == PARSE_BODY_END)
        c->body_done = true;
    if (wanted && payload > 0)
        c->group->ops->on_body(owner, bytes, payload);
    if (result == PARSE_BODY_END && c->state == CLIENT_EXCHANGE && c->owner == owner)
        c->group->ops->on_body_end(owner);
    if (c->state == CLIENT_GONE)
        return SIZE_MAX;
    return used;
}

static bool begin_exchange(struct client *c, const struct http_head *h)
{
    struct client_group *g = c->group;

    c->exchanges++;
    c->keep = h->keep_alive &&
              !h->websocket; /* what was sent behind it was meant for a tunnel (cases H143) */
    c->minor = h->minor;
    c->want_continue = h->expect_continue;
    c->paused = false;
    c->owner = NULL;
    parse_body_init(&c->body, h);
    c->body_done = h->body == HTTP_BODY_NONE || (h->body == HTTP_BODY_LENGTH && h->content_length == 0);
    set_state(c, CLIENT_EXCHANGE);
    c->owner = g->ops->on_request(g->arg, c, h);
    if (c->state == CLIENT_EXCHANGE && c->body_done && c->owner != NULL && h->body != HTTP_BODY_NONE)
        g->ops->on_body_end(c->owner);
    return c->state != CLIENT_GONE;
}

/* Looks for a head at the front of bytes. Returns the bytes used, 0: more is needed, SIZE_MAX: stop. */
static size_t feed_head(struct client *c, const char *bytes, size_t n)
{
    struct client_group *g = c->group;
    struct http_field fields[HTTP_FIELDS_MAX];
    struct http_head head = {.fields = fields};
    enum parse_error error = PARSE_OK;
    size_t length = parse_head_end(&c->scan, bytes, n, g->settings.head_max_bytes, true, &error);
    size_t start = c->scan.start;

    if (length == 0 && error == PARSE_OK)
        return 0;
    c->scan = (struct parse_scan){0};
    if (error == PARSE_OK)
        error = parse_request(bytes + start, length - start, &head);
    if (error != PARSE_OK) {
        c->keep = false;
        c->body_done = true;
        set_state(c, CLIENT_EXCHANGE);
        c->owner = NULL;
        g->ops->on_bad_head(g->arg, c, error);
        return SIZE_MAX;
    }
    return begin_exchange(c, &head) ? length : SIZE_MAX;
}

/* Keeps what could not be used now. */
static void keep_rest(struct client *c, const char *bytes, size_t n)
{
    if (n > 0 && !buf_put(&c->in, (struct slice){bytes, n})) {
        if ((c->state == CLIENT_EXCHANGE || c->state == CLIENT_TUNNEL) && c->owner != NULL)
            c->group->ops->on_end(c->owner, CLIENT_END_RESET); /* we cannot follow it any more */
        else
            close_now(c);
    }
}

/*
 * Uses as much of bytes as the state allows. Returns what is left over at the end of bytes, or SIZE_MAX when the
 * connection is gone.
 */
static size_t feed(struct client *c, char *bytes, size_t n)
{
    while (n > 0) {
        size_t used;

        if (c->state == CLIENT_IDLE)
            set_state(c, CLIENT_HEAD);
        if (c->state == CLIENT_HEAD) {
            used = feed_head(c, bytes, n);
        } else if ((c->state == CLIENT_EXCHANGE || c->state == CLIENT_DISCARD) && !c->body_done) {
            used = feed_body(c, bytes, n);
        } else {
            break; /* sent ahead */
        }
        if (used == SIZE_MAX)
            return c->state == CLIENT_GONE ? SIZE_MAX : 0;
        if (used == 0)
            break;
        bytes += used;
        n -= used;
        if (c->state == CLIENT_DISCARD && c->body_done)
            set_state(c, CLIENT_IDLE);
    }
    return n;
}

static void on_data(void *owner, char *bytes, size_t n)
{
    struct client *c = owner;
    size_t rest;

    if (c->state == CLIENT_TUNNEL && c->in.n == 0) {
        c->group->ops->on_raw(c->owner, bytes, n);
        return;
    }
    if (c->in.n >
        0) { /* a head in pieces, or more sent ahead (look_again gives it to a tunnel): joined to what was there */
        keep_rest(c, bytes, n);
        if (c->state == CLIENT_HEAD || c->state == CLIENT_IDLE)
            loop_defer(c->group->loop, &c->again);
        else if (c->state != CLIENT_GONE)
            update_reading(c);
        return;
    }
    rest = feed(c, bytes, n);
    if (rest == SIZE_MAX)
        return;
    keep_rest(c, bytes + n - rest, rest);
    if (c->state != CLIENT_GONE)
        update_reading(c);
}

/* What was sent before the tunnel began. */
static void give_ahead(struct client *c)
{
    struct buf bytes = c->in;

    c->in = (struct buf){0};
    if (bytes.n > 0)
        c->group->ops->on_raw(c->owner, bytes.p, bytes.n);
    buf_free(&bytes);
}

/* What waits in `in` can be used now: a head grew, or the exchange before it has ended. */
static void look_again(struct task *t)
{
    struct client *c = container_of(t, struct client, again);
    struct buf bytes = c->in;
    uint32_t begun = c->exchanges;
    size_t rest;

    if (c->state == CLIENT_TUNNEL) {
        give_ahead(c);
        if (c->state == CLIENT_TUNNEL && c->ended) /* before there was a tunnel: it has to hear of it too */
            c->group->ops->on_end(c->owner, CLIENT_END_FIN);
        return;
    }
    c->in = (struct buf){0};
    rest = feed(c, bytes.p, bytes.n);
    if (rest == SIZE_MAX) {
        buf_free(&bytes);
        return;
    }
    if (rest == 0) {
        buf_free(&bytes);
    } else {
        BUG_ON(c->in.p != NULL);
        buf_drop(&bytes, bytes.n - rest);
        c->in = bytes;
    }
    update_reading(c);
    if (c->ended && (c->state == CLIENT_IDLE || c->state == CLIENT_HEAD))
        close_idle(c);
    else if (c->ended && c->exchanges > begun && c->state == CLIENT_EXCHANGE && c->owner != NULL)
        c->group->ops->on_end(c->owner, CLIENT_END_FIN); /* it came before there was anyone to tell */
}

static void on_end(void *owner, enum stream_end how UNUSED)
{
    struct client *c = owner;

    c->ended = true;
    if (c->state == CLIENT_TUNNEL) {
        task_cancel(c->group->loop, &c->again);
        give_ahead(c);
    }
    if (c->state == CLIENT_EXCHANGE && c->owner != NULL)
        c->group->ops->on_end(c->owner, CLIENT_END_FIN);
    else if (c->state == CLIENT_TUNNEL)
        c->group->ops->on_end(c->owner, CLIENT_END_FIN);
    else if (c->state != CLIENT_GONE && !list_linked(&c->again.node_))
        close_idle(c); /* between requests, or in the middle of a head: nobody to answer */
}

static void on_error(void *owner, int error UNUSED, const char *detail UNUSED)
{
    struct client *c = owner;

    if ((c->state == CLIENT_EXCHANGE || c->state == CLIENT_TUNNEL) && c->owner != NULL)
        c->group->ops->on_end(c->owner, CLIENT_END_RESET);
    else if (c->state != CLIENT_GONE)
        close_now(c);
}

static void on_drain(void *owner)
{
    struct client *c = owner;

    rearm(c);
    if ((c->state == CLIENT_EXCHANGE || c->state == CLIENT_TUNNEL) && c->owner != NULL)
        c->group->ops->on_drain(c->owner);
}

/* TLS is up. */
static void on_open(void *owner)
{
    struct client *c = owner;

    c->handshaking = false;
    rearm(c);
}

static const struct stream_ops stream_ops = {
    .on_open = on_open, .on_data = on_data, .on_end = on_end, .on_drain = on_drain, .on_error = on_error};

static void on_deadline(struct deadline *d)
{
    struct client *c = container_of(d, struct client, deadline);

    switch ((enum client_state)c->state) {
    case CLIENT_HEAD:
        c->keep = false;
        c->body_done = true;
        set_state(c, CLIENT_EXCHANGE);
        c->owner = NULL;
        c->group->ops->on_head_timeout(c->group->arg, c);
        break;
    case CLIENT_EXCHANGE:
    case CLIENT_TUNNEL:
        if (stream_queued(c->stream) == 0 || stream_bytes_acknowledged(c->stream) != c->delivered)
            rearm(c); /* it took something: the wait begins anew */
        else if (c->owner != NULL)
            c->group->ops->on_end(c->owner, CLIENT_END_STALLED);
        else
            close_now(c);
        break;
    case CLIENT_IDLE: /* quietly: undici opens spare connections (cases H058) */
        if (stream_queued(c->stream) > 0 && stream_bytes_acknowledged(c->stream) != c->delivered)
            rearm(c); /* still taking the last response */
        else
            close_now(c);
        break;
    case CLIENT_DISCARD:
        close_now(c);
        break;
    case CLIENT_GONE:
        break;
    }
}

/* --- birth and group ------------------------------------------------------------------------------------------ */

void client_group_init(struct client_group *g, struct loop *l, const struct client_ops *ops, void *arg)
{
    *g = (struct client_group){.loop = l, .ops = ops, .arg = arg};
    list_init(&g->clients);
}

void client_group_close(struct client_group *g)
{
    g->closing = true;
    list_for_each_safe (node, &g->clients) {
        struct client *c = container_of(node, struct client, node);

        if (c->state == CLIENT_IDLE)
            close_idle(c);
    }
}

void client_group_drop(struct client_group *g)
{
    g->closing = true;
    list_for_each_safe (node, &g->clients)
        close_now(container_of(node, struct client, node));
}

void client_begin(struct client_group *g, struct stream *s)
{
    struct client *c = mem_zalloc(sizeof(*c));

    if (c == NULL) {
        stream_close(s);
        return;
    }
    c->group = g;
    c->stream = s;
    deadline_init(&c->deadline, on_deadline);
    task_init(&c->again, look_again);
    list_push_back(&g->clients, &c->node);
    metrics_add(METRICS_CLIENT_CONNECTIONS, 1);
    stream_adopt(s, &stream_ops, c);
    stream_watch(s, true);
    c->handshaking = stream_is_tls(s);
    set_state(c, CLIENT_IDLE);
}

/* --- for the owner ---------------------------------------------------------------------------------------------- */

bool client_write(struct client *c, const struct iovec *iov, size_t n)
{
    bool was_empty = stream_queued(c->stream) == 0;
    bool ok = stream_write(c->stream, iov, n);

    if (was_empty && stream_queued(c->stream) > 0)
        rearm(c); /* from now on progress is watched */
    return ok;
}

bool client_full(const struct client *c)
{
    return stream_full(c->stream);
}

void client_pause(struct client *c)
{
    c->paused = true;
    update_reading(c);
}

void client_resume(struct client *c)
{
    c->paused = false;
    update_reading(c);
}

static void write_text(struct client *c, const char *text)
{
    struct iovec iov = {(void *)(uintptr_t)text, strlen(text)};

    if (!client_write(c, &iov, 1))
        return; /* on_error tells */
}

void client_continue(struct client *c)
{
    if (!c->want_continue)
        return;
    c->want_continue = false;
    if (!c->body_done)
        write_text(c, "HTTP/1.1 100 Continue\r\n\r\n");
}

void client_probe(struct client *c)
{
    if (c->minor > 0)
        write_text(c, "HTTP/1.1 102 Processing\r\n\r\n");
}

bool client_is_gone(struct client *c)
{
    return stream_peer_is_gone(c->stream);
}

bool client_can_keep(const struct client *c)
{
    if (!c->keep || c->group->closing || c->ended)
        return false;
    if (c->body_done)
        return true;
    return !c->want_continue && c->body.kind == HTTP_BODY_LENGTH && c->body.left <= DISCARD_MAX;
}

void client_tunnel(struct client *c)
{
    set_state(c, CLIENT_TUNNEL);
    c->keep = false;
    client_resume(c);
    if (c->in.n > 0 || c->ended)
        loop_defer(c->group->loop, &c->again);
}

void client_shutdown(struct client *c)
{
    stream_shutdown(c->stream);
}

bool client_half_closed(const struct client *c)
{
    return c->ended;
}

struct slice client_address(const struct client *c)
{
    return slice_of(stream_address(c->stream));
}

static void next_request(struct client *c)
{
    c->owner = NULL;
    c->paused = false;
    set_state(c, c->body_done ? CLIENT_IDLE : CLIENT_DISCARD);
    update_reading(c);
    if (c->in.n > 0)
        loop_defer(c->group->loop, &c->again);
    else if (c->ended)
        close_gently(c);
}

void client_finish(struct client *c, enum client_finish how)
{
    BUG_ON(c->state != CLIENT_EXCHANGE && c->state != CLIENT_TUNNEL);
    switch (how) {
    case CLIENT_KEEP:
        next_request(c);
        break;
    case CLIENT_CLOSE:
        close_gently(c);
        break;
    case CLIENT_CUT: {
        struct stream *s = c->stream;

        forget(c);
        stream_reset(s);
        break;
    }
    case CLIENT_DROP:
        close_now(c);
        break;
    }
}
