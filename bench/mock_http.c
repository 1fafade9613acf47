/*
 * mock_http.c - what comes in: request heads, x-mock-* fields, bodies, and what a body says of itself.
 *
 * The head parser is strict about framing (one rule each for CRLF, names, Content-Length and
 * Transfer-Encoding), for whatever a proxy sends to its upstream has to be beyond doubt; what it refuses
 * is counted as bad_requests. Bodies are never kept: they are counted, hashed where an echo asks for it,
 * and searched for three keys as they pass.
 */
#include "mock.h"

void wish_init(struct wish *w)
{
    memset(w, 0, sizeof(*w));
    w->bytes = w->fault_after = UINT64_MAX;
    w->events = 16;
    w->fault_percent = 100;
}

bool wish_set(struct wish *w, struct slice name, struct slice value)
{
    static const struct {
        const char *name;
        size_t offset;
        uint64_t max;
        enum { U32, U64, FLAG } type;
    } fields[] = {
        {"x-mock-ttft-ms", offsetof(struct wish, ttft_ms), 3600000, U32},
        {"x-mock-first-event-ms", offsetof(struct wish, first_event_ms), 3600000, U32},
        {"x-mock-delay-ms", offsetof(struct wish, delay_ms), 3600000, U32},
        {"x-mock-events", offsetof(struct wish, events), 100000000, U32},
        {"x-mock-bytes", offsetof(struct wish, bytes), (uint64_t)1 << 40, U64},
        {"x-mock-status", offsetof(struct wish, status), 599, U32},
        {"x-mock-fault-after", offsetof(struct wish, fault_after), (uint64_t)1 << 40, U64},
        {"x-mock-fault-percent", offsetof(struct wish, fault_percent), 100, U32},
        {"x-mock-read-bps", offsetof(struct wish, read_bps), (uint64_t)1 << 40, U64},
        {"x-mock-idle-close-ms", offsetof(struct wish, idle_close_ms), 3600000, U32},
        {"x-mock-hold-ms", offsetof(struct wish, hold_ms), 3600000, U32},
        {"x-mock-keep-working", offsetof(struct wish, keep_working), 1, FLAG},
        {"x-mock-echo", offsetof(struct wish, echo), 1, FLAG},
        {"x-mock-gzip", offsetof(struct wish, gzip), 1, FLAG},
        {"x-mock-ws-hello", offsetof(struct wish, ws_hello), 1, FLAG},
        {"x-mock-stream", offsetof(struct wish, stream), 1, FLAG},
    };
    uint64_t v;

    if (slice_ieq(name, SLICE("x-mock-fault"))) {
        w->fault = fault_find(value);
        w->unknown_fault = w->fault == NULL;
        return !w->unknown_fault;
    }
    for (size_t i = 0; i < ARRAY_LEN(fields); i++) {
        char *at = (char *)w + fields[i].offset;

        if (!slice_ieq(name, slice_of(fields[i].name)))
            continue;
        if (!str_parse_u64(value, &v) || v > fields[i].max)
            return false;
        if (fields[i].type == U32)
            *(uint32_t *)(void *)at = (uint32_t)v;
        else if (fields[i].type == U64)
            *(uint64_t *)(void *)at = v;
        else
            *(bool *)at = v != 0;
        return true;
    }
    return false;
}

bool head_next_field(struct slice *rest, struct slice *name, struct slice *value)
{
    const char *end, *colon;
    size_t line_n;

    if (rest->n == 0)
        return false;
    end = memchr(rest->p, '\r', rest->n);
    line_n = end == NULL ? rest->n : (size_t)(end - rest->p);
    colon = memchr(rest->p, ':', line_n);
    if (colon == NULL) {
        *name = (struct slice){rest->p, line_n};
        *value = (struct slice){NULL, 0};
    } else {
        *name = (struct slice){rest->p, (size_t)(colon - rest->p)};
        *value = slice_trim((struct slice){colon + 1, line_n - name->n - 1});
    }
    line_n = size_min(line_n + 2, rest->n);
    rest->p += line_n;
    rest->n -= line_n;
    return true;
}

/* True when the comma-separated list holds the token. */
static bool list_has(struct slice list, struct slice token)
{
    struct slice element;

    while (slice_next_element(&list, &element)) {
        if (slice_ieq(element, token))
            return true;
    }
    return false;
}

/* Takes one field line into *h; false: it breaks the framing. */
static bool take_field(struct head *h, struct slice name, struct slice value)
{
    switch (name.n) {
    case 7:
        if (slice_ieq(name, SLICE("upgrade")))
            h->upgrade = slice_ieq(value, SLICE("websocket"));
        break;
    case 6:
        if (slice_ieq(name, SLICE("expect")))
            h->expect_continue = slice_ieq(value, SLICE("100-continue"));
        break;
    case 10:
        if (slice_ieq(name, SLICE("connection"))) {
            h->close |= list_has(value, SLICE("close"));
            h->keep_alive |= list_has(value, SLICE("keep-alive"));
        }
        break;
    case 14:
        if (slice_ieq(name, SLICE("content-length"))) {
            if (h->has_length || !str_parse_u64(value, &h->length))
                return false;
            h->has_length = true;
        }
        break;
    case 17:
        if (slice_ieq(name, SLICE("transfer-encoding"))) {
            if (h->chunked || !slice_ieq(value, SLICE("chunked")))
                return false;
            h->chunked = true;
        } else if (slice_ieq(name, SLICE("sec-websocket-key"))) {
            h->ws_key = value;
        }
        break;
    case 22:
        if (slice_ieq(name, SLICE("sec-websocket-protocol")))
            h->ws_protocol = value;
        break;
    default:
        break;
    }
    if (name.n > 7 && (name.p[0] | 0x20) == 'x' && slice_ieq((struct slice){name.p, 7}, SLICE("x-mock-"))) {
        if (slice_ieq(name, SLICE("x-mock-group")))
            h->group = value;
        else
            return wish_set(&h->wish, name, value) || h->wish.unknown_fault;
    }
    return true;
}

static bool take_request_line(struct head *h, struct slice line)
{
    const char *sp = memchr(line.p, ' ', line.n), *sp2;
    struct slice version;

    if (sp == NULL || sp == line.p)
        return false;
    h->method = (struct slice){line.p, (size_t)(sp - line.p)};
    sp2 = memchr(sp + 1, ' ', line.n - h->method.n - 1);
    if (sp2 == NULL || sp2 == sp + 1)
        return false;
    h->target = (struct slice){sp + 1, (size_t)(sp2 - sp - 1)};
    version = (struct slice){sp2 + 1, line.n - h->method.n - h->target.n - 2};
    h->http10 = slice_eq(version, SLICE("HTTP/1.0"));
    return h->http10 || slice_eq(version, SLICE("HTTP/1.1"));
}

enum http_result head_parse(struct slice buf, struct head *h)
{
    const char *end, *line_end;
    struct slice rest, name, value;

    end = buf.n < 4 ? NULL : memmem(buf.p, buf.n, "\r\n\r\n", 4);
    if (end == NULL)
        return buf.n >= MOCK_HEAD_MAX ? HTTP_BAD : HTTP_MORE;
    h->raw = (struct slice){buf.p, (size_t)(end - buf.p) + 4};
    line_end = memchr(buf.p, '\r', h->raw.n);
    if (!take_request_line(h, (struct slice){buf.p, (size_t)(line_end - buf.p)}))
        return HTTP_BAD;
    rest = (struct slice){line_end + 2, h->raw.n - (size_t)(line_end + 2 - buf.p) - 2};
    h->fields = rest;
    if (memchr(h->raw.p, 0, h->raw.n) != NULL)
        return HTTP_BAD;
    while (rest.n > 0) {
        const char *cr = memchr(rest.p, '\r', rest.n);

        if (cr[1] != '\n' || memchr(rest.p, '\n', (size_t)(cr - rest.p)) != NULL)
            return HTTP_BAD;
        head_next_field(&rest, &name, &value);
        if (name.n == 0 || value.p == NULL || memchr(name.p, ' ', name.n) != NULL ||
            memchr(name.p, '\t', name.n) != NULL || !take_field(h, name, value))
            return HTTP_BAD;
    }
    return h->chunked && (h->has_length || h->http10) ? HTTP_BAD : HTTP_OK;
}

void body_init(struct body *b, const struct head *h)
{
    memset(b, 0, sizeof(*b));
    b->is_chunked = h->chunked;
    b->left = h->length;
}

enum http_result body_next(struct body *b, struct slice *in, struct slice *piece)
{
    if (b->is_chunked) {
        *piece = chunked_next(&b->chunked, in);
        b->total += piece->n;
        return b->chunked.state == CHUNKED_BAD    ? HTTP_BAD
               : b->chunked.state == CHUNKED_DONE ? HTTP_OK
                                                  : HTTP_MORE;
    }
    *piece = (struct slice){in->p, b->left < in->n ? (size_t)b->left : in->n};
    in->p += piece->n;
    in->n -= piece->n;
    b->left -= piece->n;
    b->total += piece->n;
    return b->left == 0 ? HTTP_OK : HTTP_MORE;
}

/* The value after `"key"` in s, past colon and white space; empty when it is not there or not yet whole. */
static struct slice value_of(struct slice s, struct slice quoted_key)
{
    const char *at = memmem(s.p, s.n, quoted_key.p, quoted_key.n);
    const char *end = s.p + s.n;

    if (at == NULL)
        return (struct slice){NULL, 0};
    at += quoted_key.n;
    while (at < end && (*at == ' ' || *at == '\t' || *at == '\n' || *at == '\r' || *at == ':'))
        at++;
    return (struct slice){at, (size_t)(end - at)};
}

static void scan_whole(struct scan *s, struct slice text)
{
    struct slice v;

    if (s->model[0] == '\0') {
        v = value_of(text, SLICE("\"model\""));
        if (v.n > 1 && v.p[0] == '"') {
            const char *end = memchr(v.p + 1, '"', v.n - 1);
            size_t n = end == NULL ? 0 : (size_t)(end - v.p - 1);

            if (n > 0 && n < sizeof(s->model) && memchr(v.p + 1, '\\', n) == NULL) {
                memcpy(s->model, v.p + 1, n);
                s->model[n] = '\0';
            }
        }
    }
    if (!s->stream) {
        v = value_of(text, SLICE("\"stream\""));
        s->stream = v.n >= 4 && memcmp(v.p, "true", 4) == 0;
    }
    if (!s->include_usage) {
        v = value_of(text, SLICE("\"include_usage\""));
        s->include_usage = v.n >= 4 && memcmp(v.p, "true", 4) == 0;
    }
    if (!s->base64) {
        v = value_of(text, SLICE("\"encoding_format\""));
        s->base64 = v.n >= 8 && memcmp(v.p, "\"base64\"", 8) == 0;
    }
}

/* Keys and short values across a seam are found in the last bytes of the piece before plus the first of this. */
void scan_piece(struct scan *s, struct slice piece)
{
    if (s->carried > 0) {
        char seam[2 * sizeof(s->carry)];
        size_t n = size_min(piece.n, sizeof(s->carry));

        memcpy(seam, s->carry, s->carried);
        memcpy(seam + s->carried, piece.p, n);
        n += s->carried;
        scan_whole(s, (struct slice){seam, n});
        if (piece.n < sizeof(s->carry)) {
            size_t keep = size_min(n, sizeof(s->carry));

            memcpy(s->carry, seam + n - keep, keep);
            s->carried = (uint8_t)keep;
            return;
        }
    }
    scan_whole(s, piece);
    s->carried = (uint8_t)size_min(piece.n, sizeof(s->carry));
    memcpy(s->carry, piece.p + piece.n - s->carried, s->carried);
}
