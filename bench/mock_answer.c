/*
 * mock_answer.c - the bytes of an answer: its head, then JSON in one piece or events in their time, with
 * the faults that strike within them. What happens after the last byte is mock_call.c's business.
 */
#include "mock.h"

#include <openssl/evp.h>
#include <stdio.h>
#include <stdlib.h>

enum { EVENTS_AT_ONCE = 64 * 1024, HEAD_ROOM = 4096, BIG_FIELD = 300 * 1000 };

/* What an echo needs of its request: the head, and a hash of the body. */
struct echo {
    EVP_MD_CTX *sha;
    char *head;
    size_t method_n, target_at, target_n, fields_at, fields_n;
};

/* ---- echo ---- */

struct echo *echo_new(const struct head *h)
{
    struct echo *e = calloc(1, sizeof(*e));

    BUG_ON(e == NULL);
    e->head = malloc(h->raw.n);
    e->sha = EVP_MD_CTX_new();
    BUG_ON(e->head == NULL || e->sha == NULL || EVP_DigestInit_ex(e->sha, EVP_sha256(), NULL) != 1);
    memcpy(e->head, h->raw.p, h->raw.n);
    e->method_n = h->method.n;
    e->target_at = (size_t)(h->target.p - h->raw.p);
    e->target_n = h->target.n;
    e->fields_at = (size_t)(h->fields.p - h->raw.p);
    e->fields_n = h->fields.n;
    return e;
}

void echo_take(struct echo *e, struct slice piece)
{
    EVP_DigestUpdate(e->sha, piece.p, piece.n);
}

void echo_free(struct call *call)
{
    if (call->echo == NULL)
        return;
    EVP_MD_CTX_free(call->echo->sha);
    free(call->echo->head);
    free(call->echo);
    call->echo = NULL;
}

static void put_echo(struct call *call, struct text *t)
{
    struct echo *e = call->echo;
    unsigned char digest[EVP_MAX_MD_SIZE];
    unsigned digest_n = 0;
    struct slice rest = {e->head + e->fields_at, e->fields_n}, name, value;
    const char *comma = "";

    text_lit(t, "{\"method\":\"");
    text_json(t, (struct slice){e->head, e->method_n});
    text_lit(t, "\",\"path\":\"");
    text_json(t, (struct slice){e->head + e->target_at, e->target_n});
    text_fmt(t, "\",\"id\":%llu,\"headers\":[", (unsigned long long)call->id);
    while (head_next_field(&rest, &name, &value)) {
        text_str(t, comma);
        text_lit(t, "[\"");
        text_json(t, name);
        text_lit(t, "\",\"");
        text_json(t, value);
        text_lit(t, "\"]");
        comma = ",";
    }
    EVP_DigestFinal_ex(e->sha, digest, &digest_n);
    text_fmt(t, "],\"body_bytes\":%llu,\"body_sha256\":\"", (unsigned long long)call->body.total);
    for (unsigned i = 0; i < digest_n; i++)
        text_fmt(t, "%02x", digest[i]);
    text_fmt(t, "\",\"chunked\":%s}\n", call->body.is_chunked ? "true" : "false");
}

/* ---- response heads ---- */

static const char *reason_of(uint32_t status)
{
    static const struct {
        uint32_t status;
        const char *reason;
    } reasons[] = {
        {200, "OK"},
        {201, "Created"},
        {202, "Accepted"},
        {204, "No Content"},
        {400, "Bad Request"},
        {401, "Unauthorized"},
        {403, "Forbidden"},
        {404, "Not Found"},
        {408, "Request Timeout"},
        {409, "Conflict"},
        {413, "Content Too Large"},
        {422, "Unprocessable Content"},
        {429, "Too Many Requests"},
        {500, "Internal Server Error"},
        {502, "Bad Gateway"},
        {503, "Service Unavailable"},
        {504, "Gateway Timeout"},
        {529, "Overloaded"},
    };

    for (size_t i = 0; i < ARRAY_LEN(reasons); i++) {
        if (reasons[i].status == status)
            return reasons[i].reason;
    }
    return "Status";
}

/* The head up to the blank line. `length` counts only with FRAMING_LENGTH. */
static void put_head(struct conn *c, struct text *t, uint32_t status, const char *type, uint64_t length)
{
    struct call *call = &c->call;
    const struct fault *f = call->wish.fault;

    text_str(t, call_has_fault(call, FAULT_NO_LENGTH) && f->raw != NULL ? f->raw : "HTTP/1.1");
    text_lit(t, " ");
    text_u64(t, status);
    text_lit(t, " ");
    text_str(t, reason_of(status));
    text_lit(t, "\r\ncontent-type: ");
    text_str(t, type);
    text_lit(t, "\r\nx-request-id: req_mock");
    text_u64(t, call->id);
    if (call->api == API_MESSAGES) {
        text_lit(t, "\r\nrequest-id: req_mock");
        text_u64(t, call->id);
    }
    if (status == 429 || status == 503 || status == 529)
        text_lit(
            t, "\r\nretry-after: 1\r\nx-ratelimit-limit-requests: 100\r\nx-ratelimit-remaining-requests: 0");
    if (call->framing == FRAMING_CHUNKED) {
        text_lit(t, "\r\ntransfer-encoding: chunked");
    } else if (call->framing == FRAMING_LENGTH) {
        text_lit(t, "\r\ncontent-length: ");
        text_u64(t, length);
    }
    if (call->streams && call->wish.gzip)
        text_lit(t, "\r\ncontent-encoding: gzip");
    if (c->close_after || call->framing == FRAMING_CLOSE)
        text_lit(t, "\r\nconnection: close");
    if (call_has_fault(call, FAULT_TRAILERS))
        text_lit(t, "\r\ntrailer: x-mock-trailer, x-mock-second");
    text_lit(t, "\r\n");
    if (call_has_fault(call, FAULT_FIELD) && f->raw != NULL)
        text_str(t, f->raw);
}

static bool send_big_field(struct conn *c, struct text *head)
{
    char *p = malloc(BIG_FIELD + 64);
    struct text t = {.p = p, .cap = BIG_FIELD + 64};
    bool alive;

    BUG_ON(p == NULL);
    text_lit(&t, "x-mock-big: ");
    text_fill(&t, BIG_FIELD);
    text_lit(&t, ".\r\n");
    alive = conn_send(c, head->p, head->n) && conn_send(c, t.p, t.n);
    free(p);
    head->n = 0;
    return alive;
}

/* ---- JSON ---- */

/* How much of a body of `total` bytes goes out before a fault ends it. */
static uint64_t cut_of(struct call *call, uint64_t total)
{
    const struct wish *w = &call->wish;

    if (call_has_fault(call, FAULT_MID_BODY) || call_has_fault(call, FAULT_MID_EVENT)) {
        call->end = w->fault->end;
        return w->fault_after < total ? w->fault_after : total / 2;
    }
    if (call_has_fault(call, FAULT_HOLD)) {
        call->end = FAULT_STALL;
        return total > 0 ? total - 1 : 0;
    }
    return total;
}

/* Puts chunked framing around a body that is sent as one chunk, when the call asks for it. */
static void wrap_in_chunk(struct call *call, struct text *head, struct text *after, uint64_t total)
{
    const struct fault *f = call->wish.fault;

    if (call->framing != FRAMING_CHUNKED)
        return;
    text_fmt(head, "%llx\r\n", (unsigned long long)total);
    text_lit(after, "\r\n");
    if (call_has_fault(call, FAULT_BAD_CHUNK)) {
        call->end = f->end;
        text_str(after, f->raw);
        return;
    }
    text_lit(after, "0\r\n");
    if (call_has_fault(call, FAULT_TRAILERS))
        text_str(after, f->raw);
    text_lit(after, "\r\n");
}

static void send_body(struct conn *c, uint32_t status, struct text *before, uint64_t fill, struct text *after)
{
    struct call *call = &c->call;
    uint64_t total = before->n + fill + after->n, cut = cut_of(call, total);
    char head_buffer[HEAD_ROOM];
    struct text head = {.p = head_buffer, .cap = sizeof(head_buffer)};
    char *p;

    put_head(c, &head, status, "application/json", total);
    if (call_has_fault(call, FAULT_FIELD) && call->wish.fault->raw == NULL && !send_big_field(c, &head))
        return;
    text_lit(&head, "\r\n");
    if (call->is_head) {
        call_send_last(c, head.p, head.n);
        return;
    }
    if (cut == total)
        wrap_in_chunk(call, &head, after, total);
    if (call_has_fault(call, FAULT_EXTRA))
        text_str(after, call->wish.fault->raw);
    if (cut < total) {
        before->n = (size_t)(cut < before->n ? cut : before->n);
        fill = cut - before->n < fill ? cut - before->n : fill;
        after->n = (size_t)(cut - before->n - fill);
    }
    p = before->p - head.n; /* `before` has HEAD_ROOM bytes in front of it */
    memcpy(p, head.p, head.n);
    if (before->n + fill + after->n <= before->cap) {
        text_fill(before, fill);
        text_put(before, after->p, after->n);
        call_send_last(c, p, head.n + before->n);
        return;
    }
    if (!conn_send(c, p, head.n + before->n))
        return;
    c->ending = call->framing != FRAMING_CLOSE && call->end == FAULT_KEEP;
    if (conn_send_fill(c, fill, after->p, after->n))
        call_sent_all(c);
}

void answer_json(struct conn *c, uint32_t status)
{
    struct call *call = &c->call;
    size_t cap = MOCK_SCRATCH_SIZE - HEAD_ROOM;
    char *own = NULL;
    char after_buffer[2048];
    struct text before, after = {.p = after_buffer, .cap = sizeof(after_buffer)};
    uint64_t fill = 0;

    if (call->echo != NULL) {
        cap = (call->echo->fields_n + call->echo->target_n) * 8 + HEAD_ROOM;
        own = malloc(HEAD_ROOM + cap);
        BUG_ON(own == NULL);
    }
    before = (struct text){.p = (own != NULL ? own : c->loop->scratch) + HEAD_ROOM, .cap = cap};
    if (status >= 400) {
        api_error(call, status, &before);
    } else if (call->api == API_STATS) {
        stats_put(&before);
    } else if (call->api == API_RESET) {
        stats_reset();
        stats_put(&before);
    } else if (call->echo != NULL) {
        put_echo(call, &before);
    } else {
        api_json(call, &before, &fill, &after);
    }
    send_body(c, status, &before, fill, &after);
    free(own);
}

/* ---- streams ---- */

/* Begins a chunk; returns where its payload begins. Three hex digits are the usual length. */
static size_t chunk_begin(const struct call *call, struct text *t)
{
    if (call->framing == FRAMING_CHUNKED)
        text_lit(t, "000\r\n");
    return t->n;
}

/* `last`: no payload follows. */
static void chunk_end(struct call *call, struct text *t, size_t at, bool last)
{
    size_t payload;
    char size[24];
    int n;

    if (call->wish.gzip && (t->n > at || last))
        gzip_wrap(call, t, at, last);
    if (call->framing != FRAMING_CHUNKED)
        return;
    payload = t->n - at;
    if (payload == 0) {
        t->n = at - 5;
        return;
    }
    n = snprintf(size, sizeof(size), "%zx\r\n", payload);
    if (n != 5)
        memmove(t->p + at - 5 + n, t->p + at, payload);
    memcpy(t->p + at - 5, size, (size_t)n);
    t->n = at - 5 + (size_t)n + payload;
    text_lit(t, "\r\n");
}

static void put_event(struct call *call, struct text *t)
{
    size_t at = chunk_begin(call, t), start = t->n;

    api_event(call, t);
    chunk_end(call, t, at, false);
    if (call_has_fault(call, FAULT_MID_EVENT) && call->end != FAULT_KEEP)
        t->n = start + (t->n - start) / 2;
    call->event++;
    if (call->aborted)
        stats_after_abort(1, 0);
}

/* The last events and the last chunk; sets what happens after them. */
static void put_close(struct call *call, struct text *t)
{
    const struct fault *f = call->wish.fault;
    size_t at = chunk_begin(call, t);

    api_close(call, t);
    chunk_end(call, t, at, true);
    if (call_has_fault(call, FAULT_HOLD)) {
        call->end = FAULT_STALL;
        return;
    }
    if (call->framing == FRAMING_CHUNKED) {
        text_lit(t, "0\r\n");
        if (call_has_fault(call, FAULT_TRAILERS))
            text_str(t, f->raw);
        text_lit(t, "\r\n");
    }
    if (call_has_fault(call, FAULT_EXTRA))
        text_str(t, f->raw);
}

/* The event before which a fault of this call strikes; UINT32_MAX: none. */
static uint32_t fault_event(const struct call *call)
{
    const struct wish *w = &call->wish;

    if (!call_has_fault(call, FAULT_MID_BODY) && !call_has_fault(call, FAULT_MID_EVENT) &&
        !call_has_fault(call, FAULT_BAD_CHUNK))
        return UINT32_MAX;
    return w->fault_after < w->events ? (uint32_t)w->fault_after : w->events / 2;
}

/* Ends the events with what the fault of the call puts there. */
static void strike(struct call *call, struct text *t)
{
    const struct fault *f = call->wish.fault;

    call->end = f->end;
    if (f->act == FAULT_MID_EVENT)
        put_event(call, t);
    else if (f->act == FAULT_BAD_CHUNK)
        text_str(t, f->raw);
}

/* Sends the events that are due; t may already hold a head. */
void answer_events(struct conn *c, struct text *t)
{
    struct call *call = &c->call;
    const struct wish *w = &call->wish;
    uint32_t strike_at = fault_event(call);
    bool last = false;

    if (!call->opened) {
        size_t at = chunk_begin(call, t);

        call->opened = true;
        api_open(call, t);
        chunk_end(call, t, at, false);
    }
    while (!last && t->n < EVENTS_AT_ONCE) {
        if (call->event == strike_at) {
            strike(call, t);
            last = true;
        } else if (call->event >= w->events) {
            put_close(call, t);
            last = true;
        } else {
            put_event(call, t);
            if (w->delay_ms > 0 && call->event < w->events && call->event != strike_at)
                break;
        }
    }
    BUG_ON(t->full);
    if (call->aborted)
        stats_after_abort(0, t->n);
    if (last) {
        if (call->end == FAULT_KEEP && call_has_fault(call, FAULT_NO_LENGTH))
            call->end = w->fault->end;
        if (call->end == FAULT_KEEP && call->framing == FRAMING_CLOSE)
            call->end = FAULT_FIN;
        call_send_last(c, t->p, t->n);
        return;
    }
    if (!conn_send(c, t->p, t->n))
        return;
    if (w->delay_ms > 0)
        loop_arm(c->loop, &c->timer, c->timer.due_ns + (uint64_t)w->delay_ms * 1000000u);
    else if (conn_queued(c) < MOCK_OUT_HIGH)
        loop_arm(c->loop, &c->timer, c->loop->now_ns + 1); /* let others have their turn */
}

void answer_stream(struct conn *c, uint32_t status)
{
    struct text t = {.p = c->loop->scratch, .cap = MOCK_SCRATCH_SIZE};

    put_head(c, &t, status, api_stream_type(&c->call), 0);
    if (call_has_fault(&c->call, FAULT_FIELD) && c->call.wish.fault->raw == NULL && !send_big_field(c, &t))
        return;
    text_lit(&t, "\r\n");
    c->out_state = OUT_EVENTS;
    c->timer.due_ns = c->loop->now_ns; /* from here the events keep time */
    if (c->call.wish.first_event_ms == 0) {
        answer_events(c, &t);
        return;
    }
    if (!conn_send(c, t.p, t.n))
        return;
    call_arm_ms(c, c->call.wish.first_event_ms);
}
