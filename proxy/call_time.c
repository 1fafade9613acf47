/*
 * call_time.c - how long a call may stay where it is.
 *
 * One deadline a call, recomputed from its phase: the side that we wait for has so long to make progress, and a
 * side that we paused ourselves is not waited for. Moving it on costs a store (loop.h), so each event may.
 */
#include "call_parts.h"

#define PROBE_MS 40 /* after the 102 of a half-close probe: an RST comes within a round trip */

/* --- phases and deadlines ------------------------------------------------------------------------------------ */

struct loop *call_loop(const struct call *c)
{
    return c->service->loop;
}

#define NO_LIMIT UINT64_MAX

/*
 * The one deadline, from the phase: how long the side that we wait for may stay without progress. A side that we
 * paused ourselves is not waited for. NO_LIMIT: none of this phase; 0 is no time at all (done_grace).
 */
static uint64_t patience_ms(const struct call *c)
{
    const struct config *conf = c->service->config;

    switch ((enum outcome_phase)c->phase) {
    case OUTCOME_PHASE_SCAN:
        return conf->body_timeout_ms;
    case OUTCOME_PHASE_SEND:
        if (upstream_queued(&c->upstream) >
            0) /* full or not: nothing else happens before it has taken some */
            return c->to->send_timeout_ms;
        return c->client_paused || c->body_done ? NO_LIMIT : conf->body_timeout_ms;
    case OUTCOME_PHASE_WAIT:
        return c->to->first_byte_timeout_ms;
    case OUTCOME_PHASE_RELAY:
        if (c->relay.paused)
            return NO_LIMIT; /* the client's write_timeout rules */
        return c->relay.sse.done ? c->to->done_grace_ms : c->to->idle_timeout_ms;
    case OUTCOME_PHASE_DRAIN:
        if (c->head_us == 0) /* the client went before the upstream had begun to answer */
            return c->to->first_byte_timeout_ms;
        return c->relay.sse.done ? c->to->done_grace_ms : c->to->idle_timeout_ms;
    case OUTCOME_PHASE_TUNNEL: /* quiet as long as it likes, but not half open for ever */
        return c->client_ended || c->upstream_ended ? c->to->idle_timeout_ms : NO_LIMIT;
    default:
        return NO_LIMIT; /* leases and dialing have their own */
    }
}

/* When this call must have ended altogether, ms of the loop's clock; NO_LIMIT: whenever it does. */
static uint64_t total_due_ms(const struct call *c)
{
    if (c->drain_due_ms != 0)
        return c->drain_due_ms;
    if (c->to == NULL || c->to->total_timeout_ms == 0 || c->tunnel)
        return NO_LIMIT;
    return c->began_us / 1000 + c->to->total_timeout_ms;
}

void call_rearm(struct call *c)
{
    uint64_t patience = c->probing ? PROBE_MS : patience_ms(c), total = total_due_ms(c);
    uint64_t due = patience == NO_LIMIT ? NO_LIMIT : c->progress_ms + patience;

    if (total < due)
        due = total;
    if (due == NO_LIMIT)
        deadline_cancel(call_loop(c), &c->deadline);
    else if (!deadline_set(call_loop(c), &c->deadline, due))
        call_end(c, OUTCOME_NO_MEMORY, "no memory for a deadline");
}

void call_progress(struct call *c)
{
    c->progress_ms = loop_now_ms(call_loop(c));
    call_rearm(c);
}

void call_set_phase(struct call *c, enum outcome_phase p)
{
    BUG_ON(c->ended || p < c->phase);
    c->phase = (uint8_t)p;
    call_progress(c);
}

void call_on_deadline(struct deadline *d)
{
    struct call *c = container_of(d, struct call, deadline);
    uint64_t now_ms = loop_now_ms(call_loop(c)), total = total_due_ms(c);

    if (now_ms >= total) {
        if (c->drain_due_ms != 0)
            call_end(c, OUTCOME_CLIENT_GONE, "drain_max is over");
        else
            call_end(c, OUTCOME_TOTAL_TIMEOUT, "");
        return;
    }
    if (c->probing) { /* still in CLOSE_WAIT: a half-close, so the call goes on (cases H131) */
        c->probing = false;
        if (client_is_gone(c->client))
            call_lose_client(c, OUTCOME_CLIENT_GONE, "closed");
        else
            call_rearm(c);
        return;
    }
    switch ((enum outcome_phase)c->phase) {
    case OUTCOME_PHASE_SEND:
        if (upstream_queued(&c->upstream) == 0) {
            call_end(c, OUTCOME_REQUEST_TIMEOUT, "the request body stopped");
        } else if (upstream_sent_bytes(&c->upstream) != c->sent_mark) {
            c->sent_mark = upstream_sent_bytes(&c->upstream);
            call_progress(c);
        } else {
            call_end(c, OUTCOME_SEND_TIMEOUT, "the upstream takes no bytes");
        }
        break;
    case OUTCOME_PHASE_WAIT:
        call_end(c, OUTCOME_FIRST_BYTE_TIMEOUT, "");
        break;
    case OUTCOME_PHASE_RELAY:
    case OUTCOME_PHASE_TUNNEL:
    case OUTCOME_PHASE_DRAIN:
        call_end(c, c->relay.sse.done ? OUTCOME_DONE_GRACE : OUTCOME_IDLE_TIMEOUT, "");
        break;
    default:
        call_end(c, OUTCOME_REQUEST_TIMEOUT, "the request body stopped");
        break;
    }
}
