/*
 * mock_call.c - the life of a call, from its head to its true end.
 *
 *   head ─► call_begin: counted ─► body ─► call_body_end ─► (x-mock-ttft-ms) ─► answer
 *        ─► JSON, or events (x-mock-delay-ms apart) ─► last byte: uncounted ─► finish
 *
 * Faults leave this path at the place that their row in mock_fault.c names. An answer that ends its
 * connection, or never ends, stays counted until the connection has closed.
 */
#include "mock.h"

#include <sys/socket.h>

enum { SMALL_RCVBUF = 64 * 1024 };

#define NS_PER_MS 1000000u

static struct wish default_wish;
static bool default_wish_ready;

void call_default_wish(struct wish *w)
{
    if (default_wish_ready)
        *w = default_wish;
    else
        wish_init(w);
}

bool call_set_default(struct slice name, struct slice value)
{
    if (!default_wish_ready)
        wish_init(&default_wish);
    default_wish_ready = true;
    return wish_set(&default_wish, name, value);
}

/* ---- endings ---- */

void call_arm_ms(struct conn *c, uint64_t ms)
{
    loop_arm(c->loop, &c->timer, c->loop->now_ns + ms * NS_PER_MS);
}

/* The answer is complete and uncounted. */
static void finish(struct conn *c)
{
    if (c->call.api < API_STATS && !c->call.aborted)
        stats_completed();
    if (c->close_after || c->call.aborted) {
        conn_close(c, false);
        return;
    }
    echo_free(&c->call);
    c->out_state = OUT_IDLE;
    c->ending = false;
    if (c->in_state == IN_DONE)
        c->in_state = IN_HEAD;
    if (c->call.wish.idle_close_ms > 0)
        call_arm_ms(c, c->call.wish.idle_close_ms);
    conn_resume(c);
}

/* Everything queued is out: what the call has planned for then. */
static void after_last(struct conn *c)
{
    switch (c->call.end) {
    case FAULT_KEEP:
        finish(c);
        break;
    case FAULT_FIN:
    case FAULT_RST:
        if (c->call.framing == FRAMING_CLOSE && c->call.end == FAULT_FIN)
            stats_completed();
        conn_close(c, c->call.end == FAULT_RST);
        break;
    case FAULT_STALL:
        c->out_state = OUT_STUCK;
        if (c->call.wish.hold_ms > 0)
            call_arm_ms(c, c->call.wish.hold_ms);
        break;
    }
}

/* All bytes of the answer have been given to conn_send. */
void call_sent_all(struct conn *c)
{
    c->out_state = OUT_FLUSH;
    if (conn_queued(c) == 0)
        after_last(c);
}

void call_send_last(struct conn *c, const char *p, size_t n)
{
    c->ending = c->call.framing != FRAMING_CLOSE && c->call.end == FAULT_KEEP;
    if (conn_send(c, p, n))
        call_sent_all(c);
}

bool call_has_fault(const struct call *call, enum fault_act act)
{
    return call->wish.fault != NULL && call->wish.fault->act == act;
}

/* ---- the answer ---- */

/* Faults that leave no answer. True: done. */
static bool answer_by_fault(struct conn *c)
{
    static const char half_head[] = "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-le";
    struct call *call = &c->call;
    const struct fault *f = call->wish.fault;

    if (f == NULL)
        return false;
    switch (f->act) {
    case FAULT_SILENT:
        c->out_state = OUT_STUCK;
        return true;
    case FAULT_BEFORE_HEAD:
        conn_close(c, f->end == FAULT_RST);
        return true;
    case FAULT_MID_HEAD:
    case FAULT_RAW:
        call->end = f->end;
        if (f->act == FAULT_RAW && f->end == FAULT_KEEP)
            call_send_last(c, f->raw, strlen(f->raw));
        else if (conn_send(c, f->act == FAULT_RAW ? f->raw : half_head,
                           f->act == FAULT_RAW ? strlen(f->raw) : sizeof(half_head) - 1))
            call_sent_all(c);
        return true;
    default:
        return false;
    }
}

static void choose_framing(struct conn *c)
{
    struct call *call = &c->call;

    if (call_has_fault(call, FAULT_NO_LENGTH) || (call->streams && call->http10)) {
        call->framing = FRAMING_CLOSE;
        call->end = call_has_fault(call, FAULT_NO_LENGTH) ? call->wish.fault->end : FAULT_FIN;
    } else if (call->streams || call_has_fault(call, FAULT_TRAILERS) ||
               call_has_fault(call, FAULT_BAD_CHUNK)) {
        call->framing = FRAMING_CHUNKED;
    } else {
        call->framing = FRAMING_LENGTH;
    }
    if (call_has_fault(call, FAULT_EARLY) || call_has_fault(call, FAULT_FIELD))
        c->close_after |= call->wish.fault->end == FAULT_FIN;
}

static void answer(struct conn *c)
{
    struct call *call = &c->call;
    uint32_t status = call->wish.unknown_fault ? 400 : call->over_cap ? 429 : call->wish.status;

    if (status < 200)
        status = 200;
    if (answer_by_fault(c))
        return;
    call->streams = status < 300 && !call->is_head && api_can_stream(call->api) &&
                    (call->wish.stream || call->scan.stream || call->api == API_GEMINI_STREAM);
    choose_framing(c);
    if (call->streams)
        answer_stream(c, status);
    else
        answer_json(c, status);
}

static void answer_in_time(struct conn *c)
{
    if (c->call.wish.ttft_ms == 0) {
        answer(c);
        return;
    }
    c->out_state = OUT_DELAY;
    call_arm_ms(c, c->call.wish.ttft_ms);
}

bool call_begin(struct conn *c, const struct head *h)
{
    struct call *call = &c->call;
    int small = SMALL_RCVBUF;

    echo_free(call);
    memset(call, 0, sizeof(*call));
    call->wish = h->wish;
    call->id = stats_next_id();
    if (call->wish.fault_percent < 100 && call->id * 37 % 100 >= call->wish.fault_percent)
        call->wish.fault = NULL;
    body_init(&call->body, h);
    api_route(call, h->method, h->target);
    call->http10 = h->http10;
    c->close_after = h->http10 ? !h->keep_alive : h->close;
    c->out_state = OUT_BODY;
    call->group = stats_group(h->group);
    if (call->api < API_STATS)
        stats_call_begin(c);
    else
        wish_init(&call->wish); /* /stats and /reset always answer, and at once */
    if (h->upgrade && call->wish.status == 0 && !call->over_cap && call->wish.fault == NULL)
        return ws_accept(c, h);
    if (call->api == API_ECHO)
        call->echo = echo_new(h);
    if (call_has_fault(call, FAULT_NO_READ) || call->wish.read_bps > 0)
        setsockopt(c->fd, SOL_SOCKET, SO_RCVBUF, &small, sizeof(small));
    if (call_has_fault(call, FAULT_NO_READ)) {
        c->in_state = IN_STOPPED;
        c->out_state = OUT_STUCK;
        return true;
    }
    if (call_has_fault(call, FAULT_INTERIM) && !h->http10 &&
        !conn_send(c, call->wish.fault->raw, strlen(call->wish.fault->raw)))
        return false;
    if (call_has_fault(call, FAULT_EARLY))
        answer_in_time(c);
    else if (h->expect_continue && !h->http10 && !conn_send(c, "HTTP/1.1 100 Continue\r\n\r\n", 25))
        return false;
    return !c->closed;
}

void call_body(struct conn *c, struct slice piece)
{
    if (c->call.echo != NULL)
        echo_take(c->call.echo, piece);
    else if (c->call.api < API_ECHO && c->out_state == OUT_BODY)
        scan_piece(&c->call.scan, piece);
}

bool call_body_end(struct conn *c)
{
    if (c->out_state == OUT_BODY)
        answer_in_time(c);
    else if (c->out_state == OUT_IDLE)
        c->in_state = IN_HEAD; /* answered early */
    return !c->closed;
}

static void idle_over(struct conn *c)
{
    const struct fault *f = c->call.wish.fault;

    if (call_has_fault(&c->call, FAULT_IDLE) && f->raw != NULL && !conn_send(c, f->raw, strlen(f->raw)))
        return;
    conn_close(c, call_has_fault(&c->call, FAULT_IDLE) && f->end == FAULT_RST);
}

void call_on_timer(struct conn *c)
{
    struct text t = {.p = c->loop->scratch, .cap = MOCK_SCRATCH_SIZE};

    switch (c->out_state) {
    case OUT_IDLE:
        idle_over(c);
        break;
    case OUT_DELAY:
        answer(c);
        break;
    case OUT_EVENTS:
        if (conn_queued(c) < MOCK_OUT_HIGH)
            answer_events(c, &t);
        break;      /* else call_on_drained goes on */
    case OUT_STUCK: /* x-mock-hold-ms is over */
        c->call.end = FAULT_KEEP;
        if (c->call.streams)
            call_send_last(c, "0\r\n\r\n", 5);
        else
            call_send_last(c, "}", 1);
        break;
    case OUT_BODY:
    case OUT_FLUSH:
        break;
    }
}

void call_on_drained(struct conn *c)
{
    if (c->out_state == OUT_FLUSH)
        after_last(c);
    else if (c->out_state == OUT_EVENTS && c->timer.pos == 0)
        call_on_timer(c);
    else if (c->out_state == OUT_STUCK && c->call.ws.closing)
        conn_close(c, false);
}

bool call_gone(struct conn *c)
{
    struct call *call = &c->call;

    if (!call->counted)
        return false;
    if (c->in_state != IN_TUNNEL)
        stats_aborted();
    if (!call->wish.keep_working || (c->out_state != OUT_DELAY && c->out_state != OUT_EVENTS))
        return false;
    call->aborted = true;
    if (c->out_state == OUT_EVENTS && c->timer.pos == 0)
        loop_arm(c->loop, &c->timer, c->loop->now_ns + 1);
    return true;
}
