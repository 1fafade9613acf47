/*
 * reply.c - gateway-made answers.
 *
 * The body is written first, into a buf of its own, since its length stands in
 * the head. What goes into a field value is cleaned on the way, so that no
 * name from a configuration or a client can end a line.
 */
#include "reply.h"

#include "http.h"
#include "json.h"

struct status_row {
    uint16_t status;
    const char *openai, *anthropic, *gemini;
};

/*
 * How each API names a failure. A status without a row has the words of its class: of 400 below 500, of 500
 * above.
 */
static const struct status_row status_rows[] = {
    {400, "invalid_request_error", "invalid_request_error", "INVALID_ARGUMENT"},
    {401, "authentication_error", "authentication_error", "UNAUTHENTICATED"},
    {402, "billing_error", "billing_error", "FAILED_PRECONDITION"},
    {403, "permission_error", "permission_error", "PERMISSION_DENIED"},
    {404, "invalid_request_error", "not_found_error", "NOT_FOUND"},
    {408, "timeout_error", "timeout_error", "DEADLINE_EXCEEDED"},
    {413, "invalid_request_error", "request_too_large", "INVALID_ARGUMENT"},
    {429, "rate_limit_error", "rate_limit_error", "RESOURCE_EXHAUSTED"},
    {500, "server_error", "api_error", "INTERNAL"},
    {501, "invalid_request_error", "invalid_request_error", "UNIMPLEMENTED"},
    {502, "server_error", "api_error", "UNAVAILABLE"},
    {503, "server_error", "overloaded_error", "UNAVAILABLE"},
    {504, "timeout_error", "timeout_error", "DEADLINE_EXCEEDED"},
    {505, "invalid_request_error", "invalid_request_error", "UNIMPLEMENTED"},
    {529, "server_error", "overloaded_error", "UNAVAILABLE"},
};

static const struct status_row *row_of(unsigned status)
{
    unsigned general = status < 500 ? 400 : 500;
    const struct status_row *found = NULL;

    for (size_t i = 0; i < ARRAY_LEN(status_rows); i++) {
        if (status_rows[i].status == status)
            return &status_rows[i];
        if (status_rows[i].status == general)
            found = &status_rows[i];
    }
    return found;
}

/* A step of a chain of writes: once one has failed, the rest does nothing. */
struct writer {
    struct buf *out;
    bool ok;
};

static void put(struct writer *w, struct slice s)
{
    w->ok = w->ok && buf_put(w->out, s);
}

static void put_text(struct writer *w, const char *s)
{
    put(w, slice_of(s));
}

static void put_number(struct writer *w, uint64_t v)
{
    char digits[20];

    put(w, (struct slice){digits, str_put_u64(digits, v)});
}

static void put_string(struct writer *w, struct slice s)
{
    w->ok = w->ok && json_put_string(w->out, s);
}

/* A field, left out when it has no value; bytes that do not belong into one become `_`. */
static void put_field(struct writer *w, const char *name, struct slice value)
{
    size_t start;

    if (value.n == 0)
        return;
    put_text(w, name);
    put_text(w, ": ");
    start = w->out->n;
    put(w, value);
    for (size_t i = start; w->ok && i < w->out->n; i++)
        if (w->out->p[i] < ' ' || w->out->p[i] > '~')
            w->out->p[i] = '_';
    put_text(w, "\r\n");
}

static void put_number_field(struct writer *w, const char *name, uint64_t v)
{
    char digits[20];

    put_field(w, name, (struct slice){digits, str_put_u64(digits, v)});
}

/* ---- bodies ---- */

/* {"error":{"message":"…","type":"…","param":null,"code":"…"}} */
static void put_openai(struct writer *w, const struct reply *r, struct slice message)
{
    put_text(w, "{\"error\":{\"message\":");
    put_string(w, message);
    put_text(w, ",\"type\":");
    put_string(w, slice_of(row_of(r->status)->openai));
    put_text(w, ",\"param\":null,\"code\":");
    put_string(w, r->reason);
    put_text(w, "}}");
}

/* {"type":"error","error":{"type":"…","message":"…"},"request_id":"…"} */
static void put_anthropic(struct writer *w, const struct reply *r, struct slice message)
{
    put_text(w, "{\"type\":\"error\",\"error\":{\"type\":");
    put_string(w, slice_of(row_of(r->status)->anthropic));
    put_text(w, ",\"message\":");
    put_string(w, message);
    put_text(w, "},\"request_id\":");
    if (r->request_id.n > 0)
        put_string(w, r->request_id);
    else
        put_text(w, "null");
    put_text(w, "}");
}

/* {"error":{"code":429,"message":"…","status":"RESOURCE_EXHAUSTED"}} */
static void put_gemini(struct writer *w, const struct reply *r, struct slice message)
{
    put_text(w, "{\"error\":{\"code\":");
    put_number(w, r->status);
    put_text(w, ",\"message\":");
    put_string(w, message);
    put_text(w, ",\"status\":");
    put_string(w, slice_of(row_of(r->status)->gemini));
    put_text(w, "}}");
}

/* One line of JSON: the same in a response and in an event. */
static void put_body(struct writer *w, const struct reply *r)
{
    struct buf message = {0};
    struct writer m = {&message, true};

    put(&m, r->message);
    if (r->limit.n > 0) {
        put_text(&m, " (limit ");
        put(&m, r->limit);
        put_text(&m, ")");
    }
    w->ok = w->ok && m.ok;
    switch (r->api) {
    case CONFIG_API_OPENAI:
        put_openai(w, r, buf_slice(&message));
        break;
    case CONFIG_API_ANTHROPIC:
        put_anthropic(w, r, buf_slice(&message));
        break;
    case CONFIG_API_GEMINI:
        put_gemini(w, r, buf_slice(&message));
        break;
    }
    buf_free(&message);
}

/* ---- heads ---- */

static bool worth_a_retry(unsigned status)
{
    return status == 429 || status == 500 || (status >= 502 && status <= 504) || status == 529;
}

/* Both delays always together and never 0: the SDKs differ in which they read and in what 0 means to them. */
static void put_retry_fields(struct writer *w, const struct reply *r)
{
    uint64_t ms = r->retry_after_ms < REPLY_RETRY_AFTER_MAX_MS ? r->retry_after_ms : REPLY_RETRY_AFTER_MAX_MS;

    if (r->status == 501 || r->status == 505)
        put_text(w, "x-should-retry: false\r\n");
    if (!worth_a_retry(r->status))
        return;
    if (ms > 0) {
        put_number_field(w, "retry-after", (ms + 999) / 1000);
        put_number_field(w, "retry-after-ms", ms);
    }
    put_text(w, "x-should-retry: true\r\n");
}

static void put_head(struct writer *w, const struct reply *r, size_t body_bytes)
{
    put_text(w, "HTTP/1.1 ");
    put_number(w, r->status);
    put_text(w, " ");
    put_text(w, http_reason(r->status));
    put_text(w, "\r\nContent-Type: application/json\r\n");
    put_number_field(w, "Content-Length", body_bytes);
    put_field(w, "x-request-id", r->request_id);
    put_field(w, "request-id", r->request_id);
    put_field(w, "x-leasegate-reason", r->reason);
    put_field(w, "x-leasegate-limit", r->limit);
    put_retry_fields(w, r);
    if (r->status == 405)
        put_text(w, "Allow: GET, HEAD, POST, PUT, PATCH, DELETE, OPTIONS\r\n");
    if (r->status == 415)
        put_text(w, "Accept-Encoding: gzip, deflate, zstd\r\n");
    if (r->close)
        put_text(w, "Connection: close\r\n");
    else if (r->keep_alive)
        put_text(w, "Connection: keep-alive\r\n");
    put_text(w, "\r\n");
}

bool reply_put(struct buf *out, const struct reply *r)
{
    const size_t before = out->n;
    struct buf body = {0};
    struct writer b = {&body, true}, w = {out, true};

    BUG_ON(r->status < 400 || r->status > 599);
    put_body(&b, r);
    w.ok = b.ok;
    put_head(&w, r, body.n);
    if (!r->head_request)
        put(&w, buf_slice(&body));
    buf_free(&body);
    if (!w.ok)
        out->n = before;
    return w.ok;
}

bool reply_sse_error(struct buf *out, enum config_api api, struct slice reason, struct slice message,
                     struct slice request_id, enum reply_sse_at at)
{
    const size_t before = out->n;
    const struct reply r = {
        .api = api,
        .status = slice_eq(reason, SLICE("upstream_timeout")) ? 504 : 502,
        .reason = reason,
        .message = message,
        .request_id = request_id,
    };
    struct writer w = {out, true};

    if (at == REPLY_SSE_IN_LINE)
        put_text(&w, "\n\n");
    else if (at == REPLY_SSE_LINE)
        put_text(&w, "\n");
    if (api == CONFIG_API_ANTHROPIC)
        put_text(&w, "event: error\n");
    put_text(&w, "data: ");
    put_body(&w, &r);
    put_text(&w, "\n\n");
    if (!w.ok)
        out->n = before;
    return w.ok;
}
