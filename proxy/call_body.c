/*
 * call_body.c - the request body: held until the upstream takes it, shown to the scanner on the way.
 *
 *   client ──► [behind] ──► scanner ──► [held] ──► upstream
 *              compressed bytes         until there is a lease and a connection, then as far
 *              wait for their turn      as the upstream's socket takes them
 *
 * Where the body must be seen before admission, `held` is charged to the budget that all calls share; otherwise the
 * client is paused when enough is held.
 */
#include "call_parts.h"

#include "mem.h"
#include "metrics.h"

void call_free_request(struct call *c)
{
    struct request *r = c->request;

    if (r == NULL)
        return;
    c->request = NULL;
    service_body_give(c->service, r->charged);
    deadline_cancel(call_loop(c), &r->portion);
    bodyscan_free(r->scan);
    queue_free(&r->behind);
    queue_free(&r->held);
    queue_free(&r->sent);
    mem_free(r->head);
    mem_free(r);
}

/* The answer names the cap, so that whoever reads it knows what to change. */
void call_refuse_size(struct call *c, const char *message)
{
    struct reply r = {.message = slice_of(message)};

    call_refuse(c, OUTCOME_BODY_TOO_LARGE, &r, message);
}

/* The scanner's or the path's verdict that no model can be told. */
void call_refuse_scan(struct call *c, enum bodyscan_error e)
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

void call_scan(struct call *c)
{
    struct request *r = c->request;
    const struct config *conf = c->service->config;
    enum bodyscan_error why = BODYSCAN_E_OK;
    struct slice type = http_value_of(r->head, HTTP_FIELD_CONTENT_TYPE, SIZE_MAX);
    struct slice coding = http_value_of(r->head, HTTP_FIELD_CONTENT_ENCODING, SIZE_MAX);

    if (http_count(r->head, HTTP_FIELD_CONTENT_TYPE) > 1 ||
        http_count(r->head, HTTP_FIELD_CONTENT_ENCODING) > 1) {
        /* servers differ in which line counts, and so in which model they would see */
        call_end(c, OUTCOME_BAD_REQUEST, "Content-Type or Content-Encoding is given twice");
        return;
    }
    r->scan = bodyscan_new(type, coding, conf->body_scan_max_bytes, &why);
    if (r->scan == NULL) {
        call_refuse_scan(c, why);
        return;
    }
    call_set_phase(c, OUTCOME_PHASE_SCAN);
    if (c->ended)
        return;
    if (c->body_done) /* no body at all */
        call_end(c, OUTCOME_MODEL_MISSING, "");
    else
        client_continue(c->client);
}

/* Keeps bytes until the upstream takes them. */
static bool hold(struct call *c, const char *bytes, size_t n)
{
    struct request *r = c->request;

    if (c->phase == OUTCOME_PHASE_SCAN) { /* must be kept whole: from the budget */
        if (r->held.bytes + n > c->service->config->body_scan_max_bytes) {
            call_refuse_size(
                c, "no model within body_scan_max of the request body; send `model` before large parts");
            return false;
        }
        if (!service_body_take(c->service, n)) {
            call_end(c, OUTCOME_BODY_MEMORY, "body_memory is spent");
            return false;
        }
        r->charged += n;
    }
    if (!queue_put(&r->held, bytes, n)) {
        call_end(c, OUTCOME_NO_MEMORY, "");
        return false;
    }
    if (c->phase != OUTCOME_PHASE_SCAN && r->held.bytes >= CALL_HELD_HIGH_BYTES && !c->client_paused) {
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
        call_refuse_scan(c, bodyscan_error(r->scan));
        return false;
    }
    if (v == BODYSCAN_NONE && r->route.model_from == ROUTE_MODEL_REQUIRED) {
        call_end(c, OUTCOME_MODEL_MISSING, "");
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
        call_progress(c);
    else if (c->phase == OUTCOME_PHASE_SEND)
        call_send_held(c);
    return !c->ended;
}

/* The body is here whole, and was seen whole. */
static void finish_body(struct call *c)
{
    struct request *r = c->request;

    if (r->scan != NULL && !heed_scan(c, bodyscan_end(r->scan), true))
        return;
    if (c->phase == OUTCOME_PHASE_SEND)
        call_send_held(c);
    if (!c->ended && client_half_closed(c->client)) /* the FIN was seen first */
        call_probe(c);
}

/* The rest of what was read waits for the next turn, so that one client's compressed body cannot hold up the others. */
static void later(struct call *c)
{
    struct request *r = c->request;

    client_pause(c->client);
    if (!deadline_set(call_loop(c), &r->portion, loop_now_ms(call_loop(c))))
        call_end(c, OUTCOME_NO_MEMORY, "");
}

void call_on_portion(struct deadline *d)
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

void call_on_body(void *owner, char *bytes, size_t n)
{
    struct call *c = owner;
    struct request *r = c->request;
    size_t used = 0;

    c->body_bytes += n;
    metrics_add(METRICS_CLIENT_BYTES_IN, n);
    if (r == NULL || c->phase >= OUTCOME_PHASE_RELAY)
        return; /* the response came first: the rest of the request has no reader any more */
    if (c->body_bytes > c->service->config->body_max_bytes) {
        call_refuse_size(c, "the request body is larger than body_max");
        return;
    }
    if (r->behind.bytes == 0 && !take_body(c, bytes, n, &used))
        return;
    if (used == n || c->request == NULL)
        return;
    if (!queue_put(&r->behind, bytes + used, n - used))
        call_end(c, OUTCOME_NO_MEMORY, "");
    else
        later(c);
}

void call_on_body_end(void *owner)
{
    struct call *c = owner;

    c->body_done = true;
    if (c->request != NULL && c->phase < OUTCOME_PHASE_RELAY && c->request->behind.bytes == 0)
        finish_body(c);
}

void call_on_bad_body(void *owner, enum parse_error e)
{
    struct call *c = owner;
    struct reply r = {.status = parse_error_status(e),
                      .reason = slice_of(parse_error_word(e)),
                      .message = slice_of(parse_error_text(e))};

    call_refuse(c, OUTCOME_BAD_REQUEST, &r, parse_error_word(e));
}
