/*
 * upstream.c - one exchange with an upstream.
 *
 * A connection is clean, and goes back to the pool, when the request went out whole, the response
 * came to its end by its own framing, nothing came behind it, and neither side wants to close.
 */
#include "upstream.h"

#include "metrics.h"

#define HEAD_MAX_BYTES (64 * 1024)
#define INTERIM_MAX 64 /* 1xx heads in one exchange: more is an upstream gone wild */

enum upstream_response { UPSTREAM_HEAD, UPSTREAM_BODY, UPSTREAM_DONE, UPSTREAM_FAILED, UPSTREAM_CLOSED };

static void fail(struct upstream *u, enum upstream_fail why, const char *detail)
{
    if (u->response_ >= UPSTREAM_DONE)
        return;
    u->response_ = UPSTREAM_FAILED;
    u->keep_ = false;
    u->ops_->on_fail(u->owner_, why, detail);
}

static void complete(struct upstream *u)
{
    u->response_ = UPSTREAM_DONE;
    u->ops_->on_end(u->owner_);
}

/* --- response ------------------------------------------------------------------------------------------------ */

/* A final head: tells the owner, and begins the body; `more`: bytes stand behind it. False: nothing more to read here. */
static bool begin_response(struct upstream *u, const struct http_head *h, bool more)
{
    bool empty = h->body == HTTP_BODY_NONE || (h->body == HTTP_BODY_LENGTH && h->content_length == 0);

    if (h->status == 101) {
        if (!u->tunnel_) {
            fail(u, UPSTREAM_FAIL_BAD, "101 to a request that asked for no upgrade");
            return false;
        }
        u->keep_ = false;
        u->response_ = UPSTREAM_BODY;
        u->ops_->on_head(u->owner_, h);
        return u->response_ == UPSTREAM_BODY;
    }
    u->tunnel_ = false;
    u->keep_ = h->keep_alive &&
               !(empty && more); /* what is behind an empty body belongs to nobody (cases H116) */
    parse_body_init(&u->body_, h);
    u->response_ = UPSTREAM_BODY;
    u->ops_->on_head(u->owner_, h);
    if (u->response_ != UPSTREAM_BODY)
        return false;
    if (empty) {
        complete(u);
        return false;
    }
    return true;
}

/* Returns the bytes used, 0: more is needed, SIZE_MAX: stop. */
static size_t feed_head(struct upstream *u, const char *bytes, size_t n)
{
    struct http_field fields[HTTP_FIELDS_MAX];
    struct http_head head = {.fields = fields};
    enum parse_error error = PARSE_OK;
    size_t length = parse_head_end(&u->scan_, bytes, n, HEAD_MAX_BYTES, false, &error);
    size_t start = u->scan_.start;

    if (length == 0 && error == PARSE_OK)
        return 0;
    u->scan_ = (struct parse_scan){0};
    if (error == PARSE_OK)
        error = parse_response(bytes + start, length - start, u->method_, &head);
    if (error != PARSE_OK) {
        fail(u, UPSTREAM_FAIL_BAD, parse_error_text(error));
        return SIZE_MAX;
    }
    if (head.status < 200 &&
        head.status != 101) { /* nobody asked for it, and a forwarded 100 breaks SDKs (cases H109) */
        if (++u->interim_ > INTERIM_MAX) {
            fail(u, UPSTREAM_FAIL_BAD, "too many interim responses");
            return SIZE_MAX;
        }
        return length;
    }
    return begin_response(u, &head, length < n) ? length : SIZE_MAX;
}

static size_t feed_body(struct upstream *u, char *bytes, size_t n)
{
    size_t used = n, payload = 0;
    enum parse_error error = PARSE_OK;
    enum parse_body_result result = parse_body_feed(&u->body_, bytes, &used, &payload, false, &error);

    if (payload > 0 && result != PARSE_BODY_BAD)
        u->ops_->on_body(u->owner_, bytes, payload, result == PARSE_BODY_END);
    if (u->response_ != UPSTREAM_BODY)
        return SIZE_MAX;
    if (result == PARSE_BODY_BAD) {
        fail(u, UPSTREAM_FAIL_BAD, parse_error_text(error));
        return SIZE_MAX;
    }
    if (result == PARSE_BODY_END) {
        if (used < n)
            u->keep_ = false; /* bytes behind the response belong to nobody (cases H116) */
        complete(u);
        return SIZE_MAX;
    }
    return used;
}

static void feed(struct upstream *u, char *bytes, size_t n)
{
    while (n > 0) {
        size_t used;

        if (u->response_ == UPSTREAM_HEAD) {
            used = feed_head(u, bytes, n);
            if (used == 0) {
                if (!buf_put(&u->head_, (struct slice){bytes, n}))
                    fail(u, UPSTREAM_FAIL_MEMORY, "out of memory");
                return;
            }
        } else if (u->response_ == UPSTREAM_BODY && u->tunnel_) {
            u->ops_->on_raw(u->owner_, bytes, n);
            return;
        } else if (u->response_ == UPSTREAM_BODY) {
            used = feed_body(u, bytes, n);
        } else {
            u->keep_ = false;
            return;
        }
        if (used == SIZE_MAX)
            return;
        bytes += used;
        n -= used;
    }
}

static void on_data(void *owner, char *bytes, size_t n)
{
    struct upstream *u = owner;

    u->any_byte = true;
    if (u->head_.n == 0) {
        feed(u, bytes, n);
    } else { /* a head in pieces: joined; rare, so the copy does not matter */
        struct buf whole = u->head_;

        u->head_ = (struct buf){0};
        if (!buf_put(&whole, (struct slice){bytes, n}))
            fail(u, UPSTREAM_FAIL_MEMORY, "out of memory");
        else
            feed(u, whole.p, whole.n);
        buf_free(&whole);
    }
}

static void on_end(void *owner, enum stream_end how)
{
    struct upstream *u = owner;
    bool orderly = how == STREAM_END_CLOSE_NOTIFY || !stream_is_tls(uconn_stream(u->conn));

    u->keep_ = false;
    if (u->response_ == UPSTREAM_BODY && u->tunnel_)
        u->ops_->on_raw_end(u->owner_);
    else if (u->response_ == UPSTREAM_BODY && orderly && parse_body_may_end(&u->body_))
        complete(u);
    else
        fail(u, UPSTREAM_FAIL_CLOSED,
             u->any_byte ? "connection ended in the middle of the response"
                         : "connection ended without a response");
}

static void on_error(void *owner, int error, const char *detail)
{
    struct upstream *u = owner;

    u->keep_ = false;
    fail(u, UPSTREAM_FAIL_CLOSED,
         detail != NULL              ? detail
         : error == STREAM_ERROR_TLS ? "TLS error"
                                     : "connection reset");
}

static void on_drain(void *owner)
{
    struct upstream *u = owner;

    if (u->response_ != UPSTREAM_FAILED)
        u->ops_->on_drain(u->owner_);
}

/* --- opening --------------------------------------------------------------------------------------------------- */

static void on_dialed(void *owner, enum udial_result how, struct uconn *c, const char *detail)
{
    static const enum upstream_fail fails[] = {
        [UDIAL_RESOLVE_FAILED] = UPSTREAM_FAIL_RESOLVE, [UDIAL_REFUSED] = UPSTREAM_FAIL_CONNECT,
        [UDIAL_TLS_FAILED] = UPSTREAM_FAIL_TLS,         [UDIAL_TIMEOUT] = UPSTREAM_FAIL_CONNECT_TIMEOUT,
        [UDIAL_NO_MEMORY] = UPSTREAM_FAIL_MEMORY,
    };
    struct upstream *u = owner;

    u->dial_ = NULL;
    if (how != UDIAL_OK) {
        fail(u, fails[how], detail);
        return;
    }
    u->conn = c;
    metrics_add(uconn_reused(c) ? METRICS_UPSTREAM_REUSES : METRICS_UPSTREAM_DIALS, 1);
    u->ops_->on_open(u->owner_);
}

static const struct uconn_ops conn_ops = {
    .on_dialed = on_dialed, .on_data = on_data, .on_end = on_end, .on_drain = on_drain, .on_error = on_error};

/* No memory even to dial: told on a later turn, like every failure. */
static void report_no_memory(struct task *t)
{
    struct upstream *u = container_of(t, struct upstream, report_);

    fail(u, UPSTREAM_FAIL_MEMORY, "out of memory");
}

bool upstream_open(struct upstream *u, struct loop *l, struct upool *pool, bool fresh_only,
                   const struct upstream_ops *ops, void *owner)
{
    *u = (struct upstream){
        .ops_ = ops, .owner_ = owner, .pool_ = pool, .loop_ = l, .response_ = UPSTREAM_HEAD};
    task_init(&u->report_, report_no_memory);
    if (!fresh_only)
        u->conn = upool_take_idle(pool, &conn_ops, u);
    if (u->conn != NULL) {
        metrics_add(METRICS_UPSTREAM_REUSES, 1);
        return true;
    }
    u->dial_ = upool_dial(pool, fresh_only, &conn_ops, u);
    if (u->dial_ == NULL)
        loop_defer(l, &u->report_);
    return false;
}

bool upstream_reused(const struct upstream *u)
{
    return u->conn != NULL && uconn_reused(u->conn);
}

/* --- request ----------------------------------------------------------------------------------------------------- */

void upstream_expect_upgrade(struct upstream *u)
{
    u->tunnel_ = true;
}

/* Writes a chunk's size line into `line` (at least 20 bytes). */
static size_t chunk_line(char *line, size_t n)
{
    size_t digits = str_put_hex(line, n);

    line[digits] = '\r';
    line[digits + 1] = '\n';
    return digits + 2;
}

bool upstream_send_head(struct upstream *u, struct slice head, enum http_method method, enum http_body body,
                        const void *first, size_t first_n)
{
    char line[20];
    struct iovec iov[4];
    size_t n = 0;

    u->method_ = (uint8_t)method;
    u->request_chunked_ = body == HTTP_BODY_CHUNKED;
    iov[n++] = (struct iovec){(void *)(uintptr_t)head.p, head.n};
    if (first_n > 0 && u->request_chunked_)
        iov[n++] = (struct iovec){line, chunk_line(line, first_n)};
    if (first_n > 0)
        iov[n++] = (struct iovec){(void *)(uintptr_t)first, first_n};
    if (first_n > 0 && u->request_chunked_)
        iov[n++] = (struct iovec){(void *)(uintptr_t) "\r\n", 2};
    return stream_write(uconn_stream(u->conn), iov, n);
}

bool upstream_send_body(struct upstream *u, const void *bytes, size_t n)
{
    char line[20];
    struct iovec iov[3];
    size_t parts = 0;

    if (u->response_ >= UPSTREAM_DONE)
        return false;
    if (n == 0)
        return true; /* a chunk of none would be the last one */
    if (u->request_chunked_)
        iov[parts++] = (struct iovec){line, chunk_line(line, n)};
    iov[parts++] = (struct iovec){(void *)(uintptr_t)bytes, n};
    if (u->request_chunked_)
        iov[parts++] = (struct iovec){(void *)(uintptr_t) "\r\n", 2};
    return stream_write(uconn_stream(u->conn), iov, parts);
}

void upstream_send_end(struct upstream *u)
{
    struct iovec last = {(void *)(uintptr_t) "0\r\n\r\n", 5};

    u->request_done_ = true;
    if (u->request_chunked_ && u->response_ < UPSTREAM_DONE && !stream_write(uconn_stream(u->conn), &last, 1))
        u->keep_ = false; /* the failure is reported by the stream */
}

bool upstream_full(const struct upstream *u)
{
    return u->conn != NULL && stream_full(uconn_stream(u->conn));
}

size_t upstream_queued(const struct upstream *u)
{
    return u->conn == NULL ? 0 : stream_queued(uconn_stream(u->conn));
}

uint64_t upstream_sent_bytes(const struct upstream *u)
{
    return u->conn == NULL ? 0 : stream_bytes_out(uconn_stream(u->conn));
}

void upstream_pause(struct upstream *u)
{
    if (u->conn != NULL && !u->paused_)
        stream_pause(uconn_stream(u->conn));
    u->paused_ = true;
}

void upstream_resume(struct upstream *u)
{
    if (u->conn != NULL && u->paused_)
        stream_resume(uconn_stream(u->conn));
    u->paused_ = false;
}

bool upstream_send_raw(struct upstream *u, const void *bytes, size_t n)
{
    struct iovec iov = {(void *)(uintptr_t)bytes, n};

    return stream_write(uconn_stream(u->conn), &iov, 1);
}

void upstream_shutdown(struct upstream *u)
{
    if (u->conn != NULL)
        stream_shutdown(uconn_stream(u->conn));
}

void upstream_close(struct upstream *u)
{
    bool clean = u->response_ == UPSTREAM_DONE && u->request_done_ && u->keep_;

    if (u->loop_ == NULL)
        return;
    task_cancel(u->loop_, &u->report_);
    buf_free(&u->head_);
    if (u->dial_ != NULL)
        udial_cancel(u->dial_);
    u->dial_ = NULL;
    u->response_ = UPSTREAM_CLOSED;
    if (u->conn == NULL)
        return;
    if (clean && stream_queued(uconn_stream(u->conn)) > 0)
        clean = false; /* the upstream answered before it had read everything */
    if (clean)
        upstream_resume(u);
    uconn_return(u->conn, clean);
    u->conn = NULL;
}
