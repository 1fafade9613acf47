/*
 * load_parse.c - responses, from bytes to facts: status, framing, events and their times, and whether a
 * 429 is one that every SDK understands.
 */
#include "load.h"

#include <stdlib.h>

void response_init(struct response *r)
{
    free(r->refusal);
    memset(r, 0, sizeof(*r));
    r->failed_checks = (1u << CHECK_KINDS) - 1;
}

static void take_refusal_field(struct response *r, struct slice name, struct slice value)
{
    uint64_t v;

    if (slice_ieq(name, SLICE("retry-after")) && str_parse_u64(value, &v) && v >= 1 && v <= 60)
        r->failed_checks &= ~(1u << CHECK_RETRY_AFTER);
    else if (slice_ieq(name, SLICE("retry-after-ms")) && str_parse_u64(value, &v) && v > 0)
        r->failed_checks &= ~(1u << CHECK_RETRY_AFTER_MS);
    else if (slice_ieq(name, SLICE("x-should-retry")) && slice_eq(value, SLICE("true")))
        r->failed_checks &= ~(1u << CHECK_SHOULD_RETRY);
    else if (slice_ieq(name, SLICE("x-request-id")) && value.n > 0)
        r->failed_checks &= ~(1u << CHECK_REQUEST_ID);
    else if (slice_ieq(name, SLICE("content-length")))
        r->failed_checks &= ~(1u << CHECK_LENGTH);
    else if (slice_ieq(name, SLICE("content-type")) && slice_starts_with(value, SLICE("application/json")))
        r->failed_checks &= ~(1u << CHECK_TYPE);
}

static bool take_field(struct response *r, struct slice name, struct slice value)
{
    if (r->status == 429)
        take_refusal_field(r, name, value);
    switch (name.n) {
    case 10:
        if (slice_ieq(name, SLICE("connection")))
            r->close |= slice_ieq(value, SLICE("close"));
        break;
    case 12:
        if (slice_ieq(name, SLICE("content-type")))
            r->sse = slice_starts_with(value, SLICE("text/event-stream"));
        break;
    case 14:
        if (slice_ieq(name, SLICE("content-length"))) {
            if (r->state != RESPONSE_CLOSE || !str_parse_u64(value, &r->left))
                return false;
            r->state = r->left > 0 ? RESPONSE_LENGTH : RESPONSE_DONE;
        }
        break;
    case 17:
        if (slice_ieq(name, SLICE("transfer-encoding"))) {
            if (r->state != RESPONSE_CLOSE || !slice_ieq(value, SLICE("chunked")))
                return false;
            r->state = RESPONSE_CHUNKED;
        }
        break;
    case 18:
        if (slice_ieq(name, SLICE("x-leasegate-reason")) && value.n > 0) {
            r->failed_checks &= ~(1u << CHECK_REASON);
            memcpy(r->reason, value.p, size_min(value.n, sizeof(r->reason) - 1));
        }
        break;
    case 19:
        if (slice_ieq(name, SLICE("x-leasegate-wait-ms")))
            r->has_wait = str_parse_u64(value, &r->wait_ms);
        break;
    default:
        break;
    }
    return true;
}

/* `HTTP/1.1 200 …`: the status, 0 when it is something else. */
static unsigned status_of(struct slice line)
{
    uint64_t status;

    if (line.n < 12 || !slice_starts_with(line, SLICE("HTTP/1.")) || line.p[8] != ' ' ||
        !str_parse_u64((struct slice){line.p + 9, 3}, &status) || status < 100 || status > 599 ||
        (line.n > 12 && line.p[12] != ' '))
        return 0;
    return (unsigned)status;
}

/* Takes one head off *in. False: it is not whole yet, or it is bad (state says so). */
static bool take_head(struct response *r, struct slice *in)
{
    const char *end = in->n < 4 ? NULL : memmem(in->p, in->n, "\r\n\r\n", 4), *p = in->p, *eol;

    if (end == NULL) {
        if (in->n > LOAD_HEAD_MAX * 8)
            r->state = RESPONSE_BAD;
        return false;
    }
    in->n -= (size_t)(end + 4 - in->p);
    in->p = end + 4;
    eol = memchr(p, '\r', (size_t)(end + 1 - p));
    r->status = status_of((struct slice){p, (size_t)(eol - p)});
    if (r->status == 0) {
        r->state = RESPONSE_BAD;
        return false;
    }
    r->close = p[7] == '0';
    r->state = RESPONSE_CLOSE; /* unless a field says better */
    for (p = eol + 2; p < end; p = eol + 2) {
        const char *colon;
        struct slice value;

        eol = memchr(p, '\r', (size_t)(end + 1 - p));
        colon = memchr(p, ':', (size_t)(eol - p));
        if (colon == NULL || eol[1] != '\n') {
            r->state = RESPONSE_BAD;
            return false;
        }
        value = slice_trim((struct slice){colon + 1, (size_t)(eol - colon - 1)});
        if (!take_field(r, (struct slice){p, (size_t)(colon - p)}, value)) {
            r->state = RESPONSE_BAD;
            return false;
        }
    }
    if (r->status < 200)
        r->state = RESPONSE_HEAD;
    else if (r->status == 204 || r->status == 304)
        r->state = RESPONSE_DONE;
    return true;
}

/*
 * `"mock_sent_ns":123,`: adds the lag of each stamp in s that begins before `begin` and whose number ends
 * at `end` or later: so a stamp across a seam is found once.
 */
static void take_stamps(struct slice s, size_t begin, size_t end, uint64_t now_ns, struct results *res)
{
    static const char key[] = "\"mock_sent_ns\":";
    size_t at = 0;

    for (;;) {
        const char *found = memmem(s.p + at, s.n - at, key, sizeof(key) - 1);
        uint64_t sent_ns = 0;
        size_t i, start;

        if (found == NULL || (size_t)(found - s.p) >= begin)
            return;
        start = i = (size_t)(found - s.p) + sizeof(key) - 1;
        while (i < s.n && s.p[i] >= '0' && s.p[i] <= '9' && i - start < 19)
            sent_ns = sent_ns * 10 + (uint64_t)(s.p[i++] - '0');
        if (i == s.n)
            return; /* the rest comes with the next piece */
        if (i >= end && sent_ns <= now_ns)
            hist_add(&res->lag, now_ns - sent_ns);
        at = i;
    }
}

/* Every blank line ends an event. */
static void take_lines(struct response *r, struct slice piece, uint64_t now_ns, struct results *res)
{
    for (size_t i = 0; i < piece.n; i++) {
        if (piece.p[i] == '\n') {
            if (++r->newlines < 2)
                continue;
            r->newlines = 0;
            if (r->events++ > 0)
                hist_add(&res->inter_event, now_ns - r->last_event_ns);
            r->last_event_ns = now_ns;
            res->events++;
        } else if (piece.p[i] != '\r') {
            const char *next = memchr(piece.p + i, '\n', piece.n - i);

            r->newlines = 0;
            if (next == NULL)
                return;
            i = (size_t)(next - piece.p) - 1;
        }
    }
}

static void take_events(struct response *r, struct slice piece, uint64_t now_ns, struct results *res)
{
    char seam[2 * LOAD_CARRY];
    size_t n = size_min(piece.n, LOAD_CARRY);

    take_lines(r, piece, now_ns, res);
    memcpy(seam, r->carry, r->carried);
    memcpy(seam + r->carried, piece.p, n);
    n += r->carried;
    take_stamps((struct slice){seam, n}, r->carried, r->carried, now_ns, res);
    take_stamps(piece, piece.n, 0, now_ns, res);
    if (piece.n >= LOAD_CARRY) {
        memcpy(r->carry, piece.p + piece.n - LOAD_CARRY, LOAD_CARRY);
        r->carried = LOAD_CARRY;
    } else {
        r->carried = (uint8_t)size_min(n, LOAD_CARRY);
        memcpy(r->carry, seam + n - r->carried, r->carried);
    }
}

static void take_piece(struct response *r, struct slice piece, uint64_t now_ns, struct results *res)
{
    if (r->sse)
        take_events(r, piece, now_ns, res);
    if (r->status != 429 || piece.n == 0)
        return;
    if (r->refusal == NULL) {
        r->refusal = malloc(LOAD_REFUSAL_MAX);
        BUG_ON(r->refusal == NULL);
    }
    piece.n = size_min(piece.n, LOAD_REFUSAL_MAX - r->refusal_n);
    memcpy(r->refusal + r->refusal_n, piece.p, piece.n);
    r->refusal_n += piece.n;
}

static void take_chunked(struct response *r, struct slice *in, uint64_t now_ns, struct results *res)
{
    while (in->n > 0 && r->state == RESPONSE_CHUNKED) {
        struct slice piece = chunked_next(&r->chunked, in);

        if (piece.n > 0)
            take_piece(r, piece, now_ns, res);
        if (r->chunked.state == CHUNKED_DONE)
            r->state = RESPONSE_DONE;
        else if (r->chunked.state == CHUNKED_BAD)
            r->state = RESPONSE_BAD;
    }
}

void response_take(struct response *r, struct slice *in, uint64_t now_ns, struct results *res)
{
    struct slice piece;

    while (r->state == RESPONSE_HEAD) {
        if (!take_head(r, in))
            return;
    }
    switch (r->state) {
    case RESPONSE_LENGTH:
    case RESPONSE_CLOSE:
        piece = *in;
        if (r->state == RESPONSE_LENGTH && r->left < piece.n)
            piece.n = (size_t)r->left;
        take_piece(r, piece, now_ns, res);
        in->p += piece.n;
        in->n -= piece.n;
        if (r->state == RESPONSE_LENGTH && (r->left -= piece.n) == 0)
            r->state = RESPONSE_DONE;
        break;
    case RESPONSE_CHUNKED:
        take_chunked(r, in, now_ns, res);
        break;
    default:
        break;
    }
}

bool response_eof(struct response *r)
{
    if (r->state == RESPONSE_CLOSE)
        r->state = RESPONSE_DONE;
    return r->state == RESPONSE_DONE;
}

void response_check_refusal(struct response *r, struct results *res)
{
    struct slice body = {r->refusal, r->refusal_n};

    results_reason(res, r->reason[0] != '\0' ? slice_of(r->reason) : SLICE("none"));
    if (body.n > 0 && memmem(body.p, body.n, "\"error\"", 7) != NULL && json_valid(body))
        r->failed_checks &= ~(1u << CHECK_BODY);
    if (r->failed_checks == 0)
        return;
    res->malformed++;
    for (unsigned i = 0; i < CHECK_KINDS; i++)
        res->failed_checks[i] += r->failed_checks >> i & 1;
}

/* ---- JSON, just enough to say whether it is (RFC 8259) ---- */

static const char *json_space(const char *p, const char *end)
{
    while (p < end && (*p == ' ' || *p == '\t' || *p == '\r' || *p == '\n'))
        p++;
    return p;
}

/* Past the string that begins at p; NULL: there is none. */
static const char *json_string(const char *p, const char *end)
{
    if (p >= end || *p != '"')
        return NULL;
    for (p++; p < end; p++) {
        if (*p == '"')
            return p + 1;
        if ((unsigned char)*p < 0x20)
            return NULL;
        if (*p == '\\')
            p++;
    }
    return NULL;
}

static const char *json_scalar(const char *p, const char *end)
{
    static const char *const words[] = {"true", "false", "null"};
    const char *start = p;

    if (p < end && *p == '"')
        return json_string(p, end);
    for (size_t i = 0; i < ARRAY_LEN(words); i++) {
        if ((size_t)(end - p) >= strlen(words[i]) && memcmp(p, words[i], strlen(words[i])) == 0)
            return p + strlen(words[i]);
    }
    while (p < end && (strchr("+-.eE", *p) != NULL || (*p >= '0' && *p <= '9')) && *p != '\0')
        p++;
    return p > start ? p : NULL;
}

static const char *json_value(const char *p, const char *end, int depth)
{
    bool object;
    char close;

    p = json_space(p, end);
    if (p == end || depth > 32)
        return NULL;
    if (*p != '{' && *p != '[')
        return json_scalar(p, end);
    object = *p == '{';
    close = object ? '}' : ']';
    p = json_space(p + 1, end);
    if (p < end && *p == close)
        return p + 1;
    for (;;) {
        if (object) {
            p = json_string(json_space(p, end), end);
            p = p == NULL ? NULL : json_space(p, end);
            if (p == NULL || p == end || *p++ != ':')
                return NULL;
        }
        p = json_value(p, end, depth + 1);
        p = p == NULL ? NULL : json_space(p, end);
        if (p == NULL || p == end || (*p != ',' && *p != close))
            return NULL;
        if (*p++ == close)
            return p;
    }
}

bool json_valid(struct slice text)
{
    const char *end = text.p + text.n, *p = json_value(text.p, end, 0);

    return p != NULL && json_space(p, end) == end;
}
