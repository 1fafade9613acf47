/*
 * fuzz_response.c - an upstream's bytes; the first byte says who asked and how. Any cut gives the same
 * verdict, and what is accepted and written for the client is read there as the framing that the writer
 * announced.
 */
#include "wire.h"

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t n);

static struct http_field fields[HTTP_FIELDS_MAX], again_fields[HTTP_FIELDS_MAX];

static const struct http_extra extras[] = {{SLICE("x-leasegate-lease"), SLICE("i/1")}};

static void check_framing(const struct http_head *h, const struct http_head *again,
                          const struct http_response_out *o)
{
    if (o->head_request || h->status < 200 || h->status == 204 || h->status == 304)
        BUG_ON(again->body != HTTP_BODY_NONE || o->chunked);
    else if (h->body == HTTP_BODY_LENGTH)
        BUG_ON(again->body != HTTP_BODY_LENGTH || again->content_length != h->content_length || o->chunked);
    else if (o->client_minor > 0)
        BUG_ON(again->body != HTTP_BODY_CHUNKED || !o->chunked);
    else
        BUG_ON(again->body != HTTP_BODY_EOF || o->chunked || !o->will_close);
}

static void check_forwarded(const struct http_head *h, enum http_method method, uint8_t how)
{
    struct http_response_out o = {
        .client_minor = how & 1,
        .client_keep_alive = (how >> 1) & 1,
        .client_explicit_keep_alive = (how >> 2) & 1,
        .close = (how >> 3) & 1,
        .head_request = method == HTTP_HEAD,
        .websocket = h->websocket,
        .add = extras,
        .n_add = ARRAY_LEN(extras),
    };
    struct http_head again = {.fields = again_fields};
    struct parse_scan scan = {0};
    struct buf out = {0};
    enum parse_error e;

    if (h->n_fields > HTTP_FIELDS_MAX - 8)
        return;
    BUG_ON(!http_put_response(&out, h, &o));
    if (h->status < 200 && o.client_minor == 0) {
        BUG_ON(out.n != 0);
        return;
    }
    BUG_ON(parse_head_end(&scan, out.p, out.n, 4 * WIRE_HEAD_MAX, false, &e) != out.n || scan.start != 0);
    BUG_ON(parse_response(out.p, out.n, method, &again) != PARSE_OK);
    BUG_ON(again.status != h->status || again.reason_n == 0);
    check_framing(h, &again, &o);
    if (h->status >= 200) {
        BUG_ON(again.keep_alive != (!o.will_close && again.body != HTTP_BODY_EOF));
        BUG_ON(o.close && !o.will_close);
    }
    for (size_t i = 0; i < again.n_fields; i++) {
        struct slice name = http_name(&again, &again.fields[i]);

        if (again.fields[i].hop_by_hop && !h->websocket)
            BUG_ON(!slice_ieq(name, SLICE("connection")) && !slice_ieq(name, SLICE("transfer-encoding")) &&
                   !slice_eq(name, extras[0].name));
        if (again.fields[i].id == HTTP_FIELD_LEASEGATE_OTHER)
            BUG_ON(!slice_eq(http_value(&again, &again.fields[i]), extras[0].value));
    }
    buf_free(&out);
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t n)
{
    uint8_t how = n > 0 ? bytes[0] : 0;
    enum http_method method = (how & 0x80) != 0 ? HTTP_HEAD : HTTP_POST;
    struct http_head h = {.fields = fields};
    enum parse_error e;
    size_t start, length;
    char *copy;

    if (n == 0)
        return 0;
    bytes++;
    n--;
    copy = wire_copy(bytes, n);
    length = wire_head_end(copy, n, false, &start, &e);
    if (length > 0 && parse_response(copy + start, length - start, method, &h) == PARSE_OK) {
        struct wire_body body = wire_feed_every_way(&h, bytes + length, n - length, false);

        buf_free(&body.payload);
        check_forwarded(&h, method, how);
    }
    mem_free(copy);
    BUG_ON(mem_live_blocks() != 0);
    return 0;
}
