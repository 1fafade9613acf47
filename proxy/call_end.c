/*
 * call_end.c - the end of a call: its slot, the last words to its client, its record. And the answers to heads
 * that begin no call.
 */
#include "call_parts.h"

#include "mem.h"
#include "metrics.h"

#define RETRY_FAULT_MS 1000 /* retry-after of faults that are no matter of capacity */

/* An id of our own: the instance and a number that is unique in it. */
struct slice call_make_request_id(struct service *s, char out[64])
{
    size_t n = strlen(s->shared->instance);

    memcpy(out, s->shared->instance, n);
    out[n++] = '-';
    n += str_put_u64(out + n, loop_index(s->loop));
    out[n++] = '-';
    n += str_put_u64(out + n, ++s->sequence);
    return (struct slice){out, n};
}

/* Writes one answer of our own. False: no memory, or the client is failing. */
static bool write_reply(struct client *client, const struct reply *r)
{
    struct buf out = {0};
    bool ok = reply_put(&out, r);
    struct iovec iov = {out.p, out.n};

    ok = ok && client_write(client, &iov, 1);
    buf_free(&out);
    return ok;
}

/* --- the end --------------------------------------------------------------------------------------------------------- */

/* An answer of our own, since nothing has been said yet. */
static enum client_finish answer(struct call *c, enum outcome o, const struct reply *given)
{
    const struct outcome_info *info = outcome_info(o);
    struct reply r = {0};

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
    if (!write_reply(c->client, &r))
        return CLIENT_DROP;
    return r.close ? CLIENT_CLOSE : CLIENT_KEEP;
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
    call_free_request(c);
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
void call_refuse(struct call *c, enum outcome o, const struct reply *given, const char *detail)
{
    struct client *client = c->client;
    struct note_end e;

    if (c->ended)
        return;
    c->ended = true;
    deadline_cancel(call_loop(c), &c->deadline);
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

void call_end(struct call *c, enum outcome o, const char *detail)
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
    struct note_end e = {
        .outcome = o, .phase = OUTCOME_PHASE_HEAD, .status = r.status, .detail = "", .upstream = ""};

    r.request_id = call_make_request_id(s, id);
    r.close = true;
    note_text(e.reason, sizeof(e.reason), r.reason);
    note_text(e.client, sizeof(e.client), client_address(client));
    e.began_us = e.ended_us = loop_now_us();
    client_finish(client, write_reply(client, &r) ? CLIENT_CLOSE : CLIENT_DROP);
    metrics_call_ended(o, OUTCOME_PHASE_HEAD, r.status);
    if (s->config->log.calls)
        note_log(NULL, &e);
}

void call_on_bad_head(void *arg, struct client *client, enum parse_error e)
{
    const struct call_entry *entry = arg;
    struct reply r = {.status = parse_error_status(e),
                      .reason = slice_of(parse_error_word(e)),
                      .message = slice_of(parse_error_text(e))};

    answer_bad_head(client, *entry->service, OUTCOME_BAD_REQUEST, &r);
}

void call_on_head_timeout(void *arg, struct client *client)
{
    const struct call_entry *entry = arg;
    const struct outcome_info *info = outcome_info(OUTCOME_REQUEST_TIMEOUT);
    struct reply r = {
        .status = info->status, .reason = slice_of(info->word), .message = slice_of(info->message)};

    answer_bad_head(client, *entry->service, OUTCOME_REQUEST_TIMEOUT, &r);
}
