/*
 * call.c - the story: one client request and its response, under a lease.
 *
 *   call_begin ─► call_route ─► call_scan ─► call_admit ─► call_dial ─► call_send ─► call_wait ─► call_relay ─► call_end
 *                 upstream,     the body     the lease      a pooled     head and      for the      head, body,
 *                 tenant        names the                   or new       body go       response     tunnel
 *                               model                       connection   out           head
 *
 * The phase (outcome.h) is the state; set_phase is its only writer. call_end is the only way out: it may
 * be called in any phase, acts once, and gives the lease back once. What is needed only until the
 * upstream has begun to answer (head, held body, scanner) lives in `struct request` and goes then, so a long
 * quiet stream holds little.
 *
 * Holders of a call's memory: client (until it is detached), upstream, admission. call_end
 * takes it from all of them; the loop frees it at the end of the turn, after the callback that is running.
 */
#include "call.h"

#include "bodyscan.h"
#include "mem.h"
#include "metrics.h"
#include "note.h"
#include "relay.h"
#include "reply.h"
#include "route.h"

#define HELD_HIGH_BYTES (64 * 1024) /* of a body that nobody needs to see whole: then the client is paused */
#define PROBE_MS 40 /* after the 102 of a half-close probe: an RST comes within a round trip */
#define REPLAY_MAX_BYTES (64 * 1024)
#define RETRY_FAULT_MS 1000 /* retry-after of faults that are no matter of capacity */

/* What is needed until the upstream has begun to answer. */
struct request {
    struct http_head *head;
    struct route route;
    struct call *call;
    struct bodyscan *scan;
    struct queue behind; /* body bytes that the scanner has not seen: compressed ones are read by portions */
    struct deadline portion; /* the next portion, on a later turn */
    struct queue held;       /* body bytes that the upstream has not been given yet */
    struct queue sent;       /* and those it has been given, as long as a replay is allowed */
    size_t charged;          /* of held, from the body memory budget */
    bool may_replay;
};

struct call {
    struct list_node node; /* in the loop's list of calls */
    struct service *service;
    struct client *client;   /* NULL: gone */
    struct request *request; /* NULL: the response has begun */
    struct note *note;
    struct admission admission;
    struct upstream upstream;
    struct relay relay;
    const struct config_upstream *to;
    struct deadline deadline;
    /* times, us */
    uint64_t began_us, admitted_us, opened_us, head_us;
    uint64_t drain_due_ms; /* when reading on for a client that has gone must end; 0: it has not gone */
    uint64_t progress_ms;  /* last time that the side we wait for did something */
    uint64_t body_bytes;   /* of the request, received */
    uint64_t sent_mark;    /* bytes the upstream's socket had taken at the last look */
    uint16_t status;       /* sent to the client; 0: none */
    uint8_t phase;         /* enum outcome_phase */
    uint8_t half_close;    /* enum config_half_close */
    uint8_t api;           /* enum config_api */
    uint8_t client_minor;
    char client_address[48]; /* once it has gone */
    bool ended;
    bool response_done; /* received whole */
    bool head_request;
    bool explicit_keep_alive;
    bool request_has_body;
    bool body_done;   /* received whole */
    bool request_out; /* sent whole */
    bool client_paused;
    bool probing;        /* a half-close probe is out */
    bool client_had_all; /* the stream's terminator, before the client went */
    bool replayed;
    bool tunnel;           /* 101 */
    bool client_ended;     /* of a tunnel: FIN from the client */
    bool upstream_ended;   /* of a tunnel: FIN from the upstream */
    bool length_delimited; /* the response, towards the client */
    bool keep_client;      /* the response said that the connection stays */
};

static void call_end(struct call *c, enum outcome o, const char *detail);
static void call_refuse(struct call *c, enum outcome o, const struct reply *given, const char *detail);
static void call_admit(struct call *c);
static void call_dial(struct call *c, bool fresh_only);
static void call_send(struct call *c);
static void send_held(struct call *c);
static void on_portion(struct deadline *d);
static void probe(struct call *c);

/* --- phases and deadlines ------------------------------------------------------------------------------------ */

static struct loop *loop_of(const struct call *c)
{
    return c->service->loop;
}

/*
 * The one deadline, from the phase: how long the side that we wait for may stay without progress. A side that we
 * paused ourselves is not waited for. 0: no limit of this phase.
 */
static uint64_t patience_ms(const struct call *c)
{
    const struct config *conf = c->service->config;

    switch ((enum outcome_phase)c->phase) {
    case OUTCOME_PHASE_SCAN:
        return conf->body_timeout_ms;
    case OUTCOME_PHASE_SEND:
        if (upstream_full(&c->upstream))
            return c->to->send_timeout_ms;
        return c->client_paused || c->body_done ? 0 : conf->body_timeout_ms;
    case OUTCOME_PHASE_WAIT:
        return c->to->first_byte_timeout_ms;
    case OUTCOME_PHASE_RELAY:
        if (c->relay.paused)
            return 0; /* the client's write_timeout rules */
        return c->relay.sse.done ? c->to->done_grace_ms : c->to->idle_timeout_ms;
    case OUTCOME_PHASE_DRAIN:
        return c->relay.sse.done ? c->to->done_grace_ms : c->to->idle_timeout_ms;
    default:
        return 0; /* leases, dialing and tunnels have their own */
    }
}

/* When this call must have ended altogether, ms of the loop's clock; 0: no such limit. */
static uint64_t total_due_ms(const struct call *c)
{
    if (c->drain_due_ms != 0)
        return c->drain_due_ms;
    if (c->to == NULL || c->to->total_timeout_ms == 0 || c->tunnel)
        return 0;
    return c->began_us / 1000 + c->to->total_timeout_ms;
}

static void rearm(struct call *c)
{
    uint64_t patience = c->probing ? PROBE_MS : patience_ms(c), total = total_due_ms(c);
    uint64_t due = patience == 0 ? 0 : c->progress_ms + patience;

    if (total != 0 && (due == 0 || total < due))
        due = total;
    if (due == 0)
        deadline_cancel(loop_of(c), &c->deadline);
    else if (!deadline_set(loop_of(c), &c->deadline, due))
        call_end(c, OUTCOME_NO_MEMORY, "no memory for a deadline");
}

static void progress(struct call *c)
{
    c->progress_ms = loop_now_ms(loop_of(c));
    rearm(c);
}

static void set_phase(struct call *c, enum outcome_phase p)
{
    BUG_ON(c->ended || p < c->phase);
    c->phase = (uint8_t)p;
    progress(c);
}

static void on_deadline(struct deadline *d)
{
    struct call *c = container_of(d, struct call, deadline);
    uint64_t now_ms = loop_now_ms(loop_of(c)), total = total_due_ms(c);

    if (total != 0 && now_ms >= total) {
        if (c->drain_due_ms != 0)
            call_end(c, OUTCOME_CLIENT_GONE, "drain_max is over");
        else
            call_end(c, OUTCOME_TOTAL_TIMEOUT, "");
        return;
    }
    if (c->probing) { /* still in CLOSE_WAIT: a half-close, so the call goes on (cases H131) */
        c->probing = false;
        if (client_is_gone(c->client))
            call_end(c, OUTCOME_CLIENT_GONE, "closed");
        else
            rearm(c);
        return;
    }
    switch ((enum outcome_phase)c->phase) {
    case OUTCOME_PHASE_SEND:
        if (upstream_sent_bytes(&c->upstream) != c->sent_mark) {
            c->sent_mark = upstream_sent_bytes(&c->upstream);
            progress(c);
        } else if (upstream_full(&c->upstream)) {
            call_end(c, OUTCOME_SEND_TIMEOUT, "the upstream takes no bytes");
        } else {
            call_end(c, OUTCOME_REQUEST_TIMEOUT, "the request body stopped");
        }
        break;
    case OUTCOME_PHASE_WAIT:
        call_end(c, OUTCOME_FIRST_BYTE_TIMEOUT, "");
        break;
    case OUTCOME_PHASE_RELAY:
    case OUTCOME_PHASE_DRAIN:
        call_end(c, c->relay.sse.done ? OUTCOME_DONE_GRACE : OUTCOME_IDLE_TIMEOUT, "");
        break;
    default:
        call_end(c, OUTCOME_REQUEST_TIMEOUT, "the request body stopped");
        break;
    }
}

/* --- begin ---------------------------------------------------------------------------------------------------- */

static void request_free(struct call *c)
{
    struct request *r = c->request;

    if (r == NULL)
        return;
    c->request = NULL;
    service_body_give(c->service, r->charged);
    deadline_cancel(loop_of(c), &r->portion);
    bodyscan_free(r->scan);
    queue_free(&r->behind);
    queue_free(&r->held);
    queue_free(&r->sent);
    mem_free(r->head);
    mem_free(r);
}

static struct slice field_value(const struct http_head *h, enum http_field_id id, size_t max)
{
    const struct http_field *f = http_find(h, id);
    struct slice v = {NULL, 0};

    if (f != NULL)
        v = http_value(h, f);
    return (struct slice){v.p, size_min(v.n, max)};
}

/* An id of our own: the instance and a number that is unique in it. */
static struct slice make_request_id(struct service *s, char out[64])
{
    size_t n = strlen(s->shared->instance);

    memcpy(out, s->shared->instance, n);
    out[n++] = '-';
    n += str_put_u64(out + n, loop_index(s->loop));
    out[n++] = '-';
    n += str_put_u64(out + n, ++s->sequence);
    return (struct slice){out, n};
}

static bool take_note(struct call *c)
{
    char id[64];

    c->note = note_new(c->request->head, &c->request->route, c->service->config->tenant.log,
                       make_request_id(c->service, id));
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
        deadline_init(&c->request->portion, on_portion);
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
    deadline_init(&c->deadline, on_deadline);
    relay_init(&c->relay, s->loop, client, &c->upstream);
    list_push_back(s->calls, &c->node);
    return c;
}

static void refuse_plainly(struct call *c, enum outcome o, const char *detail)
{
    struct reply r = {0};

    call_refuse(c, o, &r, detail);
}

/* The answer names the cap, so that whoever reads it knows what to change. */
static void refuse_size(struct call *c, const char *message)
{
    struct reply r = {.message = slice_of(message)};

    call_refuse(c, OUTCOME_BODY_TOO_LARGE, &r, message);
}

/* The scanner's or the path's verdict that no model can be told. */
static void refuse_scan(struct call *c, enum bodyscan_error e)
{
    const struct bodyscan_error_info *info = bodyscan_error_info(e);
    struct reply r = {.status = (unsigned)info->status,
                      .reason = slice_of(info->reason),
                      .message = slice_of(info->message)};
    enum outcome o = info->status == 413   ? OUTCOME_BODY_TOO_LARGE
                     : info->status == 415 ? OUTCOME_BODY_CODING
                     : info->status == 503 ? OUTCOME_NO_MEMORY
                                           : OUTCOME_BAD_MODEL;

    call_refuse(c, o, &r, info->reason);
}

static void call_scan(struct call *c)
{
    struct request *r = c->request;
    const struct config *conf = c->service->config;
    enum bodyscan_error why = BODYSCAN_E_OK;
    struct slice coding = field_value(r->head, HTTP_FIELD_CONTENT_ENCODING, 256);

    r->scan = bodyscan_new(field_value(r->head, HTTP_FIELD_CONTENT_TYPE, 512), coding,
                           conf->body_scan_max_bytes, &why);
    if (r->scan == NULL) {
        refuse_scan(c, why);
        return;
    }
    set_phase(c, OUTCOME_PHASE_SCAN);
    if (c->ended)
        return;
    if (c->body_done) /* no body at all */
        refuse_plainly(c, OUTCOME_MODEL_MISSING, "");
    else
        client_continue(c->client);
}

/* Max-Forwards: 0 makes the one that reads it the last recipient (RFC 9110 section 7.6.2), and there is nothing at ours. */
static bool is_meant_for_us(const struct http_head *h)
{
    return h->method == HTTP_OPTIONS && slice_eq(field_value(h, HTTP_FIELD_MAX_FORWARDS, 20), SLICE("0"));
}

static void call_route(struct call *c)
{
    struct request *r = c->request;
    const struct config *conf = c->service->config;
    const struct http_head *h = r->head;

    c->to = r->route.upstream;
    if (c->service->draining) {
        refuse_plainly(c, OUTCOME_DRAINING, "");
    } else if (c->to == NULL || is_meant_for_us(h)) {
        refuse_plainly(c, OUTCOME_NO_ROUTE, "");
    } else if (h->body == HTTP_BODY_LENGTH && h->content_length > conf->body_max_bytes) {
        refuse_size(c, "the request body is larger than body_max");
    } else if (r->route.model_from == ROUTE_MODEL_BAD) {
        refuse_scan(c, r->route.model_error);
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

/* --- the request body ------------------------------------------------------------------------------------------ */

/* Keeps bytes until the upstream takes them. */
static bool hold(struct call *c, const char *bytes, size_t n)
{
    struct request *r = c->request;

    if (c->phase == OUTCOME_PHASE_SCAN) { /* must be kept whole: from the budget */
        if (r->held.bytes + n > c->service->config->body_scan_max_bytes) {
            refuse_size(c,
                        "no model within body_scan_max of the request body; send `model` before large parts");
            return false;
        }
        if (!service_body_take(c->service, n)) {
            refuse_plainly(c, OUTCOME_BODY_MEMORY, "body_memory is spent");
            return false;
        }
        r->charged += n;
    }
    if (!queue_put(&r->held, bytes, n)) {
        refuse_plainly(c, OUTCOME_NO_MEMORY, "");
        return false;
    }
    if (c->phase != OUTCOME_PHASE_SCAN && r->held.bytes >= HELD_HIGH_BYTES && !c->client_paused) {
        c->client_paused = true;
        client_pause(c->client);
    }
    return true;
}

/* The scanner's word about what has come so far. False: the call was refused. */
static bool heed_scan(struct call *c, enum bodyscan_verdict v, bool at_end)
{
    struct request *r = c->request;

    if (v == BODYSCAN_BAD) {
        refuse_scan(c, bodyscan_error(r->scan));
        return false;
    }
    if (v == BODYSCAN_NONE && r->route.model_from == ROUTE_MODEL_REQUIRED) {
        refuse_plainly(c, OUTCOME_MODEL_MISSING, "");
        return false;
    }
    if (c->phase != OUTCOME_PHASE_SCAN || (v == BODYSCAN_MORE && !at_end))
        return true;
    if (v == BODYSCAN_FOUND) {
        struct slice model = bodyscan_model(r->scan);

        model_name_init(&r->route.model);
        for (size_t i = 0; i < model.n; i++)
            if (model_name_put(&r->route.model, (uint8_t)model.p[i]) != BODYSCAN_E_OK)
                break; /* the scanner has checked it already */
    }
    call_admit(c);
    return !c->ended;
}

/* Shows bytes to the scanner, and keeps or sends those that it has seen. False: the call has ended. */
static bool take_body(struct call *c, const char *bytes, size_t n, size_t *used)
{
    struct request *r = c->request;
    enum bodyscan_verdict v = BODYSCAN_MORE;

    *used = n;
    if (r->scan != NULL)
        v = bodyscan_feed_some(r->scan, bytes, n, used);
    if (!hold(c, bytes, *used) || (r->scan != NULL && !heed_scan(c, v, false)))
        return false;
    if (c->phase == OUTCOME_PHASE_SCAN)
        progress(c);
    else if (c->phase == OUTCOME_PHASE_SEND)
        send_held(c);
    return !c->ended;
}

/* The body is here whole, and was seen whole. */
static void finish_body(struct call *c)
{
    struct request *r = c->request;

    if (r->scan != NULL && !heed_scan(c, bodyscan_end(r->scan), true))
        return;
    if (c->phase == OUTCOME_PHASE_SEND)
        send_held(c);
    if (!c->ended && client_half_closed(c->client)) /* the FIN was seen first */
        probe(c);
}

/* The rest of what was read waits for the next turn, so that one client's compressed body cannot hold up the others. */
static void later(struct call *c)
{
    struct request *r = c->request;

    client_pause(c->client);
    if (!deadline_set(loop_of(c), &r->portion, loop_now_ms(loop_of(c))))
        refuse_plainly(c, OUTCOME_NO_MEMORY, "");
}

static void on_portion(struct deadline *d)
{
    struct call *c = container_of(d, struct request, portion)->call;
    struct iovec part;
    size_t used;

    if (queue_peek(&c->request->behind, &part, 1) == 0 || !take_body(c, part.iov_base, part.iov_len, &used) ||
        c->request == NULL)
        return;
    queue_drop(&c->request->behind, used);
    if (c->request->behind.bytes > 0) {
        later(c);
        return;
    }
    if (!c->client_paused)
        client_resume(c->client);
    if (c->body_done)
        finish_body(c);
}

static void on_body(void *owner, char *bytes, size_t n)
{
    struct call *c = owner;
    struct request *r = c->request;
    size_t used = 0;

    c->body_bytes += n;
    metrics_add(METRICS_CLIENT_BYTES_IN, n);
    if (r == NULL || c->phase >= OUTCOME_PHASE_RELAY)
        return; /* the response came first: the rest of the request has no reader any more */
    if (c->body_bytes > c->service->config->body_max_bytes) {
        refuse_size(c, "the request body is larger than body_max");
        return;
    }
    if (r->behind.bytes == 0 && !take_body(c, bytes, n, &used))
        return;
    if (used == n || c->request == NULL)
        return;
    if (!queue_put(&r->behind, bytes + used, n - used))
        refuse_plainly(c, OUTCOME_NO_MEMORY, "");
    else
        later(c);
}

static void on_body_end(void *owner)
{
    struct call *c = owner;

    c->body_done = true;
    if (c->request != NULL && c->phase < OUTCOME_PHASE_RELAY && c->request->behind.bytes == 0)
        finish_body(c);
}

static void on_bad_body(void *owner, enum parse_error e)
{
    struct call *c = owner;
    struct reply r = {.status = parse_error_status(e),
                      .reason = slice_of(parse_error_word(e)),
                      .message = slice_of(parse_error_text(e))};

    call_refuse(c, OUTCOME_BAD_REQUEST, &r, parse_error_word(e));
}

/* --- admission --------------------------------------------------------------------------------------------------- */

static void refuse_admission(struct call *c, const struct admit_refusal *why)
{
    struct reply r = {.reason = slice_of(why->reason),
                      .limit = slice_of(why->limit),
                      .retry_after_ms = why->retry_after_ms};

    call_refuse(c, why->outcome, &r, "");
}

static void call_admit(struct call *c)
{
    struct lease_scope scopes[LEASE_SCOPES_MAX];
    struct admit_refusal why = {0};
    int n = route_scopes(c->service->config, &c->request->route, scopes);

    if (n < 0 || !note_set_model(c->note, model_name_slice(&c->request->route.model))) {
        refuse_plainly(c, n < 0 ? OUTCOME_TOO_MANY_LIMITS : OUTCOME_NO_MEMORY, "");
        return;
    }
    set_phase(c, OUTCOME_PHASE_ADMIT);
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
        set_phase(c, OUTCOME_PHASE_DIAL);
    if (c->ended)
        return;
    if (upstream_open(&c->upstream, loop_of(c), pool, fresh_only || c->request->head->websocket,
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
    struct http_extra set[32];
    struct http_request_out o = {.path_prefix = slice_of(u->path_prefix), .set = set};

    if (!u->pass_host)
        o.authority = slice_of(u->authority);
    for (size_t i = 0; i < u->n_headers && o.n_set < ARRAY_LEN(set); i++) {
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
    if (!r->may_replay)
        return;
    if (r->sent.bytes + n > REPLAY_MAX_BYTES || !queue_put(&r->sent, bytes, n)) {
        r->may_replay = false;
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
        set_phase(c, OUTCOME_PHASE_SEND);
    if (c->ended)
        return;
    if (!put_request_head(c, &head)) {
        buf_free(&head);
        call_end(c, OUTCOME_NO_MEMORY, "");
        return;
    }
    r->may_replay = replay_allowed(c);
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
    send_held(c);
}

/* Gives the upstream what is held, as far as its socket takes it; the client is slowed down by it. */
static void send_held(struct call *c)
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
    if (c->client_paused && r->held.bytes < HELD_HIGH_BYTES / 2) {
        c->client_paused = false;
        if (r->behind.bytes == 0)
            client_resume(c->client);
    }
    if (c->body_done && r->held.bytes == 0 && r->behind.bytes == 0) {
        c->request_out = true;
        upstream_send_end(&c->upstream);
        set_phase(c, OUTCOME_PHASE_WAIT);
    } else {
        progress(c);
    }
}

static void on_upstream_drain(void *owner)
{
    struct call *c = owner;

    if (c->tunnel) {
        c->client_paused = false;
        client_resume(c->client);
    } else if (c->phase == OUTCOME_PHASE_SEND) {
        send_held(c);
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
    if (c->client == NULL) { /* draining: nobody to tell */
        progress(c);
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
    request_free(c);
    c->client_paused = false; /* whatever of the body is still to come is discarded */
    client_resume(c->client);
    relay_head(&c->relay, &head, o.chunked, is_event_stream(h));
    set_phase(c, c->tunnel ? OUTCOME_PHASE_TUNNEL : OUTCOME_PHASE_RELAY);
    if (c->tunnel && !c->ended)
        client_tunnel(c->client);
}

static void on_response_body(void *owner, char *bytes, size_t n, bool last)
{
    struct call *c = owner;

    if (!relay_body(&c->relay, bytes, n, last))
        return; /* the client's end follows */
    if (!last)
        progress(c);
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
    bool untouched = !c->request_out && r != NULL && r->sent.bytes == 0 &&
                     upstream_sent_bytes(&c->upstream) == c->sent_mark;

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
    progress(c);
}

/* The provider works on whatever we do: its response is read to the end, and the lease held until then. */
static void call_drain(struct call *c)
{
    struct client *client = c->client;

    note_text(c->client_address, sizeof(c->client_address), client_address(client));
    c->client = NULL;
    c->client_had_all = c->relay.sse.done;
    relay_detach_client(&c->relay);
    client_finish(client, CLIENT_DROP);
    request_free(c);
    c->drain_due_ms = loop_now_ms(loop_of(c)) + c->to->drain_max_ms;
    set_phase(c, OUTCOME_PHASE_DRAIN);
}

static bool worth_draining(const struct call *c)
{
    if (c->phase != OUTCOME_PHASE_WAIT && c->phase != OUTCOME_PHASE_RELAY)
        return false; /* the upstream has not got the whole request: it cannot be at work */
    return c->relay.sse.done || c->to->on_client_gone == CONFIG_GONE_DRAIN;
}

/* FIN behind a whole request: has it closed, or only finished sending? (cases H131) */
static void probe(struct call *c)
{
    if (c->half_close != CONFIG_HALF_PROBE || c->phase >= OUTCOME_PHASE_RELAY || c->client_minor == 0)
        return;
    c->probing = true;
    client_probe(c->client);
    progress(c);
}

static void on_client_end(void *owner, enum client_end how)
{
    struct call *c = owner;

    if (c->tunnel && how == CLIENT_END_FIN) {
        c->client_ended = true;
        upstream_shutdown(&c->upstream);
        if (c->upstream_ended)
            call_end(c, OUTCOME_DONE, "");
        return;
    }
    if (how == CLIENT_END_FIN && c->half_close != CONFIG_HALF_ABORT && !c->relay.sse.done) {
        if (c->body_done)
            probe(c);
        if (c->body_done || c->client_paused) /* paused: seen ahead of a body that was not read yet */
            return;                           /* the call goes on; an RST, when one comes, ends it */
    }
    if (worth_draining(c))
        call_drain(c);
    else
        call_end(c, how == CLIENT_END_STALLED ? OUTCOME_CLIENT_STALLED : OUTCOME_CLIENT_GONE,
                 how == CLIENT_END_FIN     ? "closed"
                 : how == CLIENT_END_RESET ? "reset"
                                           : "took no bytes");
}

/* --- tunnels -------------------------------------------------------------------------------------------------------- */

static void on_client_raw(void *owner, char *bytes, size_t n)
{
    struct call *c = owner;

    c->body_bytes += n;
    if (!upstream_send_raw(&c->upstream, bytes, n))
        return; /* on_fail follows */
    if (upstream_full(&c->upstream) && !c->client_paused) {
        c->client_paused = true;
        client_pause(c->client);
    }
}

static void on_upstream_raw(void *owner, char *bytes, size_t n)
{
    struct call *c = owner;
    bool ok = relay_body(&c->relay, bytes, n, false);

    (void)ok; /* where it failed, the client's end follows */
}

static void on_upstream_raw_end(void *owner)
{
    struct call *c = owner;

    c->upstream_ended = true;
    if (c->client_ended)
        call_end(c, OUTCOME_DONE, "");
    else
        client_shutdown(c->client);
}

/* --- the end --------------------------------------------------------------------------------------------------------- */

/* An answer of our own, since nothing has been said yet. */
static enum client_finish answer(struct call *c, enum outcome o, const struct reply *given)
{
    const struct outcome_info *info = outcome_info(o);
    struct reply r = {0};
    struct buf out = {0};
    struct iovec iov;
    bool written;

    if (given != NULL)
        r = *given;
    relay_drop_head(&c->relay);
    r.api = c->api;
    if (r.status == 0)
        r.status = info->status;
    if (r.reason.n == 0)
        r.reason = slice_of(info->word);
    if (r.message.n == 0)
        r.message = slice_of(info->message);
    if (c->note != NULL)
        r.request_id = c->note->request_id;
    if (r.retry_after_ms == 0 && info->retry)
        r.retry_after_ms = RETRY_FAULT_MS;
    r.close = !client_can_keep(c->client) ||
              o == OUTCOME_REQUEST_TIMEOUT; /* its rest would not come either */
    r.keep_alive = c->explicit_keep_alive;
    r.head_request = c->head_request;
    c->status = (uint16_t)r.status;
    written = reply_put(&out, &r);
    iov = (struct iovec){out.p, out.n};
    written = written && client_write(c->client, &iov, 1);
    buf_free(&out);
    return !written ? CLIENT_DROP : r.close ? CLIENT_CLOSE : CLIENT_KEEP;
}

/* The response was cut after its head had gone out. An SDK is told by the one event that it raises; nothing else can be. */
static enum client_finish cut(struct call *c, enum outcome o)
{
    const struct sse *sse = &c->relay.sse;
    enum reply_sse_at at = sse->boundary   ? REPLY_SSE_BOUNDARY
                           : sse->in_line_ ? REPLY_SSE_IN_LINE
                                           : REPLY_SSE_LINE;
    struct buf out = {0};
    bool told = c->relay.is_sse &&
                reply_sse_error(&out, c->api, slice_of(outcome_info(o)->word),
                                slice_of(outcome_info(o)->message), c->note->request_id, at) &&
                relay_body(&c->relay, out.p, out.n, false);

    buf_free(&out);
    /* where a length or a last chunk is missing, an orderly FIN shows the cut and lets the event arrive */
    return told && (c->relay.chunked || c->length_delimited) ? CLIENT_CLOSE : CLIENT_CUT;
}

/* The last words to the client, and what becomes of its connection. */
static enum client_finish part_from_client(struct call *c, enum outcome o, const struct reply *given)
{
    switch (o) {
    case OUTCOME_DONE:
        if (c->phase == OUTCOME_PHASE_TUNNEL)
            return CLIENT_CLOSE;
        return c->keep_client && client_can_keep(c->client) ? CLIENT_KEEP : CLIENT_CLOSE;
    case OUTCOME_DONE_GRACE: /* all was said but the framing's end, which stays missing */
        return CLIENT_CLOSE;
    case OUTCOME_CLIENT_GONE:
        return CLIENT_DROP;
    case OUTCOME_CLIENT_STALLED:
        return CLIENT_CUT;
    default:
        if (relay_head_pending(&c->relay))
            return answer(c, o, given);
        return cut(c, o);
    }
}

/* What the log line will say, taken down while everything is still there. */
static void take_down(const struct call *c, enum outcome o, const struct reply *given, const char *detail,
                      struct note_end *e)
{
    *e = (struct note_end){
        .outcome = o,
        .phase = c->phase,
        .detail = detail == NULL ? "" : detail,
        .upstream = c->to == NULL ? "" : c->to->name,
        .began_us = c->began_us,
        .admitted_us = c->admitted_us,
        .opened_us = c->opened_us,
        .head_us = c->head_us,
        .ended_us = loop_now_us(),
        .bytes_in = c->body_bytes,
        .replayed = c->replayed,
    };
    note_text(e->reason, sizeof(e->reason),
              given != NULL && given->reason.n > 0 ? given->reason : slice_of(outcome_info(o)->word));
    note_text(e->limit, sizeof(e->limit), given != NULL ? given->limit : (struct slice){NULL, 0});
    note_text(e->lease, sizeof(e->lease), admission_lease_id(&c->admission));
    note_text(e->client, sizeof(e->client),
              c->client != NULL ? client_address(c->client) : slice_of(c->client_address));
}

static void record(struct call *c, struct note_end *e)
{
    e->status = c->status;
    e->bytes_out = c->relay.bytes;
    metrics_call_ended(e->outcome, e->phase, e->status);
    metrics_observe_us(METRICS_HISTOGRAM_DURATION, e->ended_us - e->began_us);
    if (c->service->config->log.calls)
        note_log(c->note, e);
}

/* Gives everything back; the memory itself goes at the end of the turn, since a callback of the call may be running. */
static void let_go(struct call *c)
{
    struct service *s = c->service;

    relay_close(&c->relay);
    request_free(c);
    note_free(c->note);
    c->note = NULL;
    list_remove(s->calls, &c->node);
    loop_free_later(s->loop, c);
    service_unref(s);
}

/*
 * The end, in any phase, once. The order: what the upstream does for us is over, then its slot is given
 * back (so that the slot is never free while the upstream still works), then the client, then the record.
 * `given`: the answer's own words where the outcome's do not say enough; NULL otherwise.
 */
static void call_refuse(struct call *c, enum outcome o, const struct reply *given, const char *detail)
{
    struct client *client = c->client;
    struct note_end e;

    if (c->ended)
        return;
    c->ended = true;
    deadline_cancel(loop_of(c), &c->deadline);
    take_down(c, o, given, detail, &e);
    upstream_close(&c->upstream);
    admission_end(&c->admission, c->to == NULL      ? 0
                                 : c->response_done ? c->to->release_delay_ms
                                                    : c->to->abort_delay_ms);
    if (client != NULL) {
        enum client_finish how = part_from_client(c, o, given);

        c->client = NULL;
        client_finish(client, how);
    }
    record(c, &e);
    let_go(c);
}

static void call_end(struct call *c, enum outcome o, const char *detail)
{
    call_refuse(c, o, NULL, detail);
}

void call_end_all(struct list *calls)
{
    list_for_each_safe (node, calls)
        call_end(container_of(node, struct call, node), OUTCOME_DRAIN_CUT, "");
}

/* --- heads that begin no call ----------------------------------------------------------------------------------------- */

static void answer_bad_head(struct client *client, struct service *s, enum outcome o,
                            const struct reply *given)
{
    char id[64];
    struct reply r = *given;
    struct buf out = {0};
    struct iovec iov;
    bool written;
    struct note_end e = {
        .outcome = o, .phase = OUTCOME_PHASE_HEAD, .status = r.status, .detail = "", .upstream = ""};

    r.request_id = make_request_id(s, id);
    r.close = true;
    note_text(e.reason, sizeof(e.reason), r.reason);
    note_text(e.client, sizeof(e.client), client_address(client));
    e.began_us = e.ended_us = loop_now_us();
    written = reply_put(&out, &r);
    iov = (struct iovec){out.p, out.n};
    written = written && client_write(client, &iov, 1);
    buf_free(&out);
    client_finish(client, written ? CLIENT_CLOSE : CLIENT_DROP);
    metrics_call_ended(o, OUTCOME_PHASE_HEAD, r.status);
    if (s->config->log.calls)
        note_log(NULL, &e);
}

static void on_bad_head(void *arg, struct client *client, enum parse_error e)
{
    const struct call_entry *entry = arg;
    struct reply r = {.status = parse_error_status(e),
                      .reason = slice_of(parse_error_word(e)),
                      .message = slice_of(parse_error_text(e))};

    answer_bad_head(client, *entry->service, OUTCOME_BAD_REQUEST, &r);
}

static void on_head_timeout(void *arg, struct client *client)
{
    const struct call_entry *entry = arg;
    const struct outcome_info *info = outcome_info(OUTCOME_REQUEST_TIMEOUT);
    struct reply r = {
        .status = info->status, .reason = slice_of(info->word), .message = slice_of(info->message)};

    answer_bad_head(client, *entry->service, OUTCOME_REQUEST_TIMEOUT, &r);
}

const struct client_ops call_client_ops = {
    .on_request = call_begin,
    .on_bad_head = on_bad_head,
    .on_head_timeout = on_head_timeout,
    .on_body = on_body,
    .on_body_end = on_body_end,
    .on_bad_body = on_bad_body,
    .on_drain = on_client_drain,
    .on_end = on_client_end,
    .on_raw = on_client_raw,
};
