/*
 * call.c - the story: one client request and its response, under a lease.
 *
 *   call_begin ─► call_route ─► call_scan ─► call_admit ─► call_dial ─► call_send ─► call_wait ─► call_relay ─► call_end
 *                 upstream,     the body     the lease      a pooled     head and      for the      head, body,
 *                 tenant        names the                   or new       body go       response     tunnel
 *                               model                       connection   out           head
 *
 * The phase (outcome.h) is the state; call_set_phase is its only writer, but for the one step back of a replay. call_end is the only way out: it may
 * be called in any phase, acts once, and gives the lease back once. What is needed only until the
 * upstream has begun to answer (head, held body, scanner) lives in `struct request` and goes then, so a long
 * quiet stream holds little.
 *
 * Holders of a call's memory: client (until it is detached), upstream, admission. call_end
 * takes it from all of them; the loop frees it at the end of the turn, after the callback that is running.
 */
#include "call_parts.h"

#include "mem.h"
#include "metrics.h"

#define REPLAY_MAX_BYTES (64 * 1024)

static void call_dial(struct call *c, bool fresh_only);
static void call_send(struct call *c);

/* --- begin ---------------------------------------------------------------------------------------------------- */

static bool take_note(struct call *c)
{
    char id[64];

    c->note = note_new(c->request->head, &c->request->route, c->service->config->tenant.log,
                       call_make_request_id(c->service, id));
    return c->note != NULL;
}

static bool asks_to_keep_alive(const struct http_head *h)
{
    return h->minor == 0 && h->keep_alive;
}

static void on_lease_granted(void *owner);
static void on_lease_refused(void *owner, const struct admit_refusal *why);
static void on_lease_lost(void *owner);

static const struct admission_ops admission_ops = {
    .on_granted = on_lease_granted, .on_refused = on_lease_refused, .on_lost = on_lease_lost};

static struct call *call_new(struct service *s, struct client *client, const struct http_head *h,
                             const struct call_entry *entry)
{
    struct call *c = mem_zalloc(sizeof(*c));

    if (c == NULL)
        return NULL;
    c->request = mem_zalloc(sizeof(*c->request));
    if (c->request != NULL) {
        c->request->call = c;
        deadline_init(&c->request->portion, call_on_portion);
        c->request->head = http_head_copy(h);
    }
    if (c->request == NULL || c->request->head == NULL) {
        mem_free(c->request);
        mem_free(c);
        return NULL;
    }
    c->service = service_ref(s);
    c->client = client;
    c->half_close = (uint8_t)entry->half_close;
    c->client_minor = h->minor;
    c->head_request = h->method == HTTP_HEAD;
    c->explicit_keep_alive = asks_to_keep_alive(h);
    c->request_has_body = h->body != HTTP_BODY_NONE;
    c->body_done = !c->request_has_body;
    c->began_us = loop_now_us();
    c->progress_ms = loop_now_ms(s->loop);
    deadline_init(&c->deadline, call_on_deadline);
    relay_init(&c->relay, s->loop, client, &c->upstream);
    list_push_back(s->calls, &c->node);
    return c;
}

/* Max-Forwards: 0 makes the one that reads it the last recipient (RFC 9110 section 7.6.2), and there is nothing at ours. */
static bool is_meant_for_us(const struct http_head *h)
{
    return h->method == HTTP_OPTIONS && slice_eq(http_value_of(h, HTTP_FIELD_MAX_FORWARDS, 20), SLICE("0"));
}

static void call_route(struct call *c)
{
    struct request *r = c->request;
    const struct config *conf = c->service->config;
    const struct http_head *h = r->head;

    c->to = r->route.upstream;
    if (c->service->draining) {
        call_end(c, OUTCOME_DRAINING, "");
    } else if (c->to == NULL || is_meant_for_us(h)) {
        call_end(c, OUTCOME_NO_ROUTE, "");
    } else if (r->route.ambiguous) {
        call_end(c, OUTCOME_BAD_REQUEST, "the tenant's or the model's header is given twice");
    } else if (h->body == HTTP_BODY_LENGTH && h->content_length > conf->body_max_bytes) {
        call_refuse_size(c, "the request body is larger than body_max");
    } else if (r->route.model_from == ROUTE_MODEL_BAD) {
        call_refuse_scan(c, r->route.model_error);
    } else if (r->route.scan) {
        call_scan(c);
    } else {
        call_admit(c);
    }
}

static void *call_begin(void *arg, struct client *client, const struct http_head *h)
{
    const struct call_entry *entry = arg;
    struct service *s = *entry->service;
    struct call *c = call_new(s, client, h, entry);
    bool routed;

    if (c == NULL) {
        metrics_call_ended(OUTCOME_NO_MEMORY, OUTCOME_PHASE_HEAD, 0);
        client_finish(client, CLIENT_DROP);
        return NULL;
    }
    routed = route_find(s->config, c->request->head, &c->request->route);
    c->api = (uint8_t)c->request->route.api;
    if (!routed)
        c->request->route.upstream = NULL;
    if (!take_note(c)) {
        call_end(c, OUTCOME_NO_MEMORY, "");
        return NULL;
    }
    call_route(c);
    return c->ended ? NULL : c;
}

/* --- admission --------------------------------------------------------------------------------------------------- */

static void refuse_admission(struct call *c, const struct admit_refusal *why)
{
    struct reply r = {.reason = slice_of(why->reason),
                      .limit = slice_of(why->limit),
                      .retry_after_ms = why->retry_after_ms};

    call_refuse(c, why->outcome, &r, "");
}

void call_admit(struct call *c)
{
    struct lease_scope scopes[LEASE_SCOPES_MAX];
    struct admit_refusal why = {0};
    int n = route_scopes(c->service->config, &c->request->route, scopes);

    if (n < 0 || !note_set_model(c->note, model_name_slice(&c->request->route.model))) {
        call_end(c, n < 0 ? OUTCOME_TOO_MANY_LIMITS : OUTCOME_NO_MEMORY, "");
        return;
    }
    call_set_phase(c, OUTCOME_PHASE_ADMIT);
    if (c->ended)
        return;
    switch (admit_begin(c->service->admit, &c->admission, c->service->snapshot, scopes, (size_t)n,
                        &admission_ops, c, &why)) {
    case ADMIT_GRANTED:
        on_lease_granted(c);
        break;
    case ADMIT_PENDING:
        break;
    case ADMIT_REFUSED:
        refuse_admission(c, &why);
        break;
    }
}

static void on_lease_granted(void *owner)
{
    struct call *c = owner;

    c->admitted_us = loop_now_us();
    metrics_observe_us(METRICS_HISTOGRAM_WAIT, c->admitted_us - c->began_us);
    call_dial(c, false);
}

static void on_lease_refused(void *owner, const struct admit_refusal *why)
{
    refuse_admission(owner, why);
}

static void on_lease_lost(void *owner)
{
    call_end(owner, OUTCOME_LEASE_LOST, "");
}

/* --- dial and send ----------------------------------------------------------------------------------------------- */

static void on_open(void *owner);
static void on_head(void *owner, const struct http_head *h);
static void on_response_body(void *owner, char *bytes, size_t n, bool last);
static void on_response_end(void *owner);
static void on_upstream_drain(void *owner);
static void on_fail(void *owner, enum upstream_fail why, const char *detail);
static void on_upstream_raw(void *owner, char *bytes, size_t n);
static void on_upstream_raw_end(void *owner);

static const struct upstream_ops upstream_ops = {
    .on_open = on_open,
    .on_head = on_head,
    .on_body = on_response_body,
    .on_end = on_response_end,
    .on_drain = on_upstream_drain,
    .on_fail = on_fail,
    .on_raw = on_upstream_raw,
    .on_raw_end = on_upstream_raw_end,
};

static void call_dial(struct call *c, bool fresh_only)
{
    struct upool *pool = service_pool(c->service, c->to);

    if (pool == NULL) {
        call_end(c, OUTCOME_NO_MEMORY, "");
        return;
    }
    if (c->phase < OUTCOME_PHASE_DIAL) /* a replay dials again from a later phase */
        call_set_phase(c, OUTCOME_PHASE_DIAL);
    if (c->ended)
        return;
    if (upstream_open(&c->upstream, call_loop(c), pool, fresh_only || c->request->head->websocket,
                      &upstream_ops, c))
        call_send(c);
}

static void on_open(void *owner)
{
    call_send(owner);
}

static bool put_request_head(struct call *c, struct buf *out)
{
    const struct config_upstream *u = c->to;
    struct http_extra set[CONFIG_HEADERS_MAX];
    struct http_request_out o = {.path_prefix = slice_of(u->path_prefix), .set = set};

    if (!u->pass_host)
        o.authority = slice_of(u->authority);
    BUG_ON(u->n_headers > ARRAY_LEN(set)); /* config_check */
    for (size_t i = 0; i < u->n_headers; i++) {
        if (u->headers[i].value[0] == '\0')
            continue;
        set[o.n_set++] = (struct http_extra){slice_of(u->headers[i].name), slice_of(u->headers[i].value)};
    }
    o.websocket = c->request->head->websocket;
    return http_put_request(out, c->request->head, &o);
}

/* Remembers bytes that are given to the upstream, while a replay is still thinkable. */
static void keep_for_replay(struct request *r, const void *bytes, size_t n)
{
    if (n == 0)
        return;
    if (!r->may_replay || r->sent.bytes + n > REPLAY_MAX_BYTES || !queue_put(&r->sent, bytes, n)) {
        r->may_replay = false;
        r->body_gone = true;
        queue_free(&r->sent);
    }
}

/* May this request be sent a second time, on a connection that proves dead? (RFC 9110 section 9.2.2) */
static bool replay_allowed(const struct call *c)
{
    const struct http_head *h = c->request->head;

    if (c->replayed || !upstream_reused(&c->upstream))
        return false;
    return c->to->replay_stale ||
           ((h->method == HTTP_GET || h->method == HTTP_HEAD) && h->body == HTTP_BODY_NONE);
}

static void call_send(struct call *c)
{
    struct request *r = c->request;
    struct buf head = {0};
    struct iovec first = {NULL, 0};
    bool ok;

    c->opened_us = loop_now_us();
    if (c->phase < OUTCOME_PHASE_SEND)
        call_set_phase(c, OUTCOME_PHASE_SEND);
    if (c->ended)
        return;
    if (!put_request_head(c, &head)) {
        buf_free(&head);
        call_end(c, OUTCOME_NO_MEMORY, "");
        return;
    }
    r->may_replay = replay_allowed(c);
    c->sent_mark = c->sent_before = upstream_sent_bytes(&c->upstream);
    if (r->head->websocket)
        upstream_expect_upgrade(&c->upstream);
    if (queue_peek(&r->held, &first, 1) == 0)
        first.iov_len = 0;
    ok = upstream_send_head(&c->upstream, buf_slice(&head), r->head->method, r->head->body, first.iov_base,
                            first.iov_len);
    buf_free(&head);
    if (!ok)
        return; /* on_fail follows, with everything still held */
    keep_for_replay(r, first.iov_base, first.iov_len);
    queue_drop(&r->held, first.iov_len);
    client_continue(c->client);
    call_send_held(c);
}

/* Gives the upstream what is held, as far as its socket takes it; the client is slowed down by it. */
void call_send_held(struct call *c)
{
    struct request *r = c->request;
    struct iovec part;

    if (c->request_out)
        return;
    while (r->held.bytes > 0 && !upstream_full(&c->upstream) && queue_peek(&r->held, &part, 1) == 1) {
        if (!upstream_send_body(&c->upstream, part.iov_base, part.iov_len))
            return;
        keep_for_replay(r, part.iov_base, part.iov_len);
        queue_drop(&r->held, part.iov_len);
    }
    if (r->charged > r->held.bytes) {
        service_body_give(c->service, r->charged - r->held.bytes);
        r->charged = r->held.bytes;
    }
    if (c->client_paused && r->held.bytes < CALL_HELD_HIGH_BYTES / 2) {
        c->client_paused = false;
        if (r->behind.bytes == 0)
            client_resume(c->client);
    }
    if (c->body_done && r->held.bytes == 0 && r->behind.bytes == 0) {
        c->request_out = true;
        upstream_send_end(&c->upstream);
        call_set_phase(c, OUTCOME_PHASE_WAIT);
    } else {
        call_progress(c);
    }
}

static void on_upstream_drain(void *owner)
{
    struct call *c = owner;

    if (c->tunnel) {
        c->client_paused = false;
        client_resume(c->client);
    } else if (c->phase == OUTCOME_PHASE_SEND) {
        call_send_held(c);
    }
}

/* --- the response ------------------------------------------------------------------------------------------------ */

static bool is_event_stream(const struct http_head *h)
{
    const struct http_field *type = http_find(h, HTTP_FIELD_CONTENT_TYPE);
    const struct http_field *coding = http_find(h, HTTP_FIELD_CONTENT_ENCODING);
    struct slice v;

    if (type == NULL || (coding != NULL && !slice_ieq(http_value(h, coding), SLICE("identity"))))
        return false;
    v = http_value(h, type);
    v.n = size_min(v.n, slice_find(v, ';'));
    return slice_ieq(slice_trim(v), SLICE("text/event-stream"));
}

static bool put_response_head(struct call *c, const struct http_head *h, struct http_response_out *o,
                              struct buf *out)
{
    char wait_ms[20];
    struct http_extra add[2];
    size_t n = 0;
    struct slice lease = admission_lease_id(&c->admission);

    if (lease.n > 0) {
        add[n++] = (struct http_extra){SLICE("x-leasegate-lease"), lease};
        add[n++] =
            (struct http_extra){SLICE("x-leasegate-wait-ms"),
                                {wait_ms, str_put_u64(wait_ms, (c->admitted_us - c->began_us) / 1000)}};
    }
    *o = (struct http_response_out){
        .client_minor = c->client_minor,
        .client_keep_alive = client_can_keep(c->client),
        .client_explicit_keep_alive = c->explicit_keep_alive,
        .head_request = c->head_request,
        .close = !client_can_keep(c->client),
        .websocket = h->status == 101,
        .add = add,
        .n_add = n,
    };
    return http_put_response(out, h, o);
}

static void on_head(void *owner, const struct http_head *h)
{
    struct call *c = owner;
    struct http_response_out o;
    struct buf head = {0};

    c->head_us = loop_now_us();
    metrics_observe_us(METRICS_HISTOGRAM_FIRST_BYTE, c->head_us - c->began_us);
    c->probing = false;
    if (c->client == NULL && h->status == 101) { /* draining: a tunnel to nobody */
        call_end(c, OUTCOME_CLIENT_GONE, "");
        return;
    }
    if (c->client == NULL) { /* draining: nobody to tell */
        c->relay.is_sse = is_event_stream(h);
        call_progress(c);
        return;
    }
    if (!put_response_head(c, h, &o, &head)) {
        buf_free(&head);
        call_end(c, OUTCOME_NO_MEMORY, "");
        return;
    }
    c->status = h->status;
    c->keep_client = !o.will_close;
    c->length_delimited = h->body == HTTP_BODY_LENGTH;
    c->tunnel = h->status == 101;
    call_free_request(c);
    c->client_paused = false; /* whatever of the body is still to come is discarded */
    client_resume(c->client);
    relay_head(&c->relay, &head, o.chunked, is_event_stream(h));
    call_set_phase(c, c->tunnel ? OUTCOME_PHASE_TUNNEL : OUTCOME_PHASE_RELAY);
    if (c->tunnel && !c->ended)
        client_tunnel(c->client);
}

static void on_response_body(void *owner, char *bytes, size_t n, bool last)
{
    struct call *c = owner;

    if (!relay_body(&c->relay, bytes, n, last))
        return; /* the client's end follows */
    if (!last)
        call_progress(c);
}

static void on_response_end(void *owner)
{
    struct call *c = owner;

    c->response_done = true;
    relay_end(&c->relay);
    call_end(c, c->client != NULL || c->client_had_all ? OUTCOME_DONE : OUTCOME_CLIENT_GONE, "");
}

/* --- failures of the upstream -------------------------------------------------------------------------------------- */

/* The connection had been idle and ended before any byte of a response: one more try, under the same lease. */
static bool replay(struct call *c)
{
    struct request *r = c->request;
    bool untouched = !c->request_out && r != NULL && r->sent.bytes == 0 && !r->body_gone &&
                     upstream_sent_bytes(&c->upstream) == c->sent_before;

    if (r == NULL || c->client == NULL || c->replayed || !upstream_reused(&c->upstream) ||
        c->upstream.any_byte)
        return false;
    if (!r->may_replay && !untouched)
        return false;
    metrics_add(METRICS_UPSTREAM_REPLAYS, 1);
    c->replayed = true;
    c->request_out = false;
    c->phase = OUTCOME_PHASE_DIAL; /* the one step back: everything is to be sent again */
    queue_move(&r->sent, &r->held);
    queue_move(&r->held, &r->sent);
    upstream_close(&c->upstream);
    call_rearm(c); /* the wait for the first connection is over; a dial has its own time */
    if (!c->ended)
        call_dial(c, true);
    return true;
}

static void on_fail(void *owner, enum upstream_fail why, const char *detail)
{
    static const enum outcome outcomes[] = {
        [UPSTREAM_FAIL_RESOLVE] = OUTCOME_UPSTREAM_UNREACHABLE,
        [UPSTREAM_FAIL_CONNECT] = OUTCOME_UPSTREAM_UNREACHABLE,
        [UPSTREAM_FAIL_TLS] = OUTCOME_UPSTREAM_TLS,
        [UPSTREAM_FAIL_CONNECT_TIMEOUT] = OUTCOME_CONNECT_TIMEOUT,
        [UPSTREAM_FAIL_CLOSED] = OUTCOME_UPSTREAM_CLOSED,
        [UPSTREAM_FAIL_BAD] = OUTCOME_UPSTREAM_BAD,
        [UPSTREAM_FAIL_MEMORY] = OUTCOME_NO_MEMORY,
    };
    struct call *c = owner;

    if (why == UPSTREAM_FAIL_CLOSED && replay(c))
        return;
    if (c->relay.sse.done) /* all was said; how the connection ended does not matter any more */
        call_end(c, OUTCOME_DONE_GRACE, detail);
    else
        call_end(c, outcomes[why], detail);
}

/* --- the client's side ---------------------------------------------------------------------------------------------- */

static void on_client_drain(void *owner)
{
    struct call *c = owner;

    relay_drained(&c->relay);
    call_progress(c);
}

/* The provider works on whatever we do: its response is read to the end, and the lease held until then. */
static void call_drain(struct call *c)
{
    struct client *client = c->client;

    note_text(c->client_address, sizeof(c->client_address), client_address(client));
    c->client = NULL;
    c->probing = false; /* answered */
    c->client_had_all = c->relay.sse.done;
    relay_detach_client(&c->relay);
    client_finish(client, CLIENT_DROP);
    call_free_request(c);
    c->drain_due_ms = loop_now_ms(call_loop(c)) + c->to->drain_max_ms;
    call_set_phase(c, OUTCOME_PHASE_DRAIN);
}

static bool worth_draining(const struct call *c)
{
    if (c->phase != OUTCOME_PHASE_WAIT && c->phase != OUTCOME_PHASE_RELAY)
        return false; /* the upstream has not got the whole request: it cannot be at work */
    return c->relay.sse.done || c->to->on_client_gone == CONFIG_GONE_DRAIN;
}

/* Nobody is there any more for whom the call could go on. */
void call_lose_client(struct call *c, enum outcome o, const char *detail)
{
    if (worth_draining(c))
        call_drain(c);
    else
        call_end(c, o, detail);
}

static void on_client_end(void *owner, enum client_end how)
{
    struct call *c = owner;

    if (c->tunnel && how == CLIENT_END_FIN) {
        c->client_ended = true;
        upstream_shutdown(&c->upstream);
        if (c->upstream_ended)
            call_end(c, OUTCOME_DONE, "");
        else
            call_progress(c);
        return;
    }
    if (how == CLIENT_END_FIN && c->half_close != CONFIG_HALF_ABORT && !c->relay.sse.done) {
        if (c->body_done)
            call_probe(c);
        if (c->body_done || c->client_paused) /* paused: seen ahead of a body that was not read yet */
            return;                           /* the call goes on; an RST, when one comes, ends it */
    }
    call_lose_client(c, how == CLIENT_END_STALLED ? OUTCOME_CLIENT_STALLED : OUTCOME_CLIENT_GONE,
                     how == CLIENT_END_FIN     ? "closed"
                     : how == CLIENT_END_RESET ? "reset"
                                               : "took no bytes");
}

/* FIN behind a whole request: has it closed, or only finished sending? (cases H131) */
void call_probe(struct call *c)
{
    if (c->half_close != CONFIG_HALF_PROBE || c->phase >= OUTCOME_PHASE_RELAY || c->client_minor == 0)
        return;
    c->probing = true;
    client_probe(c->client);
    call_progress(c);
}

/* --- tunnels -------------------------------------------------------------------------------------------------------- */

static void on_client_raw(void *owner, char *bytes, size_t n)
{
    struct call *c = owner;

    c->body_bytes += n;
    if (!upstream_send_raw(&c->upstream, bytes, n))
        return; /* on_fail follows */
    if (c->upstream_ended)
        call_progress(c);
    if (upstream_full(&c->upstream) && !c->client_paused) {
        c->client_paused = true;
        client_pause(c->client);
    }
}

static void on_upstream_raw(void *owner, char *bytes, size_t n)
{
    struct call *c = owner;
    bool ok = relay_body(&c->relay, bytes, n, false);

    if (ok && c->client_ended) /* where it failed, the client's end follows */
        call_progress(c);
}

static void on_upstream_raw_end(void *owner)
{
    struct call *c = owner;

    c->upstream_ended = true;
    if (c->client_ended) {
        call_end(c, OUTCOME_DONE, "");
        return;
    }
    client_shutdown(c->client);
    call_progress(c);
}

const struct client_ops call_client_ops = {
    .on_request = call_begin,
    .on_bad_head = call_on_bad_head,
    .on_head_timeout = call_on_head_timeout,
    .on_body = call_on_body,
    .on_body_end = call_on_body_end,
    .on_bad_body = call_on_bad_body,
    .on_drain = on_client_drain,
    .on_end = on_client_end,
    .on_raw = on_client_raw,
};
