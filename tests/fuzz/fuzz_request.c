/*
 * fuzz_request.c - a client's bytes. Any cut gives the same verdict, and what is accepted and written for
 * the upstream is read there as the same message: same method, target and framing, one Host, nothing that
 * is only between two neighbours. So no request can hide another one in it.
 */
#include "wire.h"

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t n);

static struct http_field fields[HTTP_FIELDS_MAX], again_fields[HTTP_FIELDS_MAX];

static const struct http_extra extras[] = {{SLICE("Authorization"), SLICE("Bearer real")},
                                           {SLICE("x-a"), SLICE("b")}};

static void check_forwarded(const struct http_head *h, bool own_host)
{
    const struct http_request_out o = {
        .authority = own_host && h->host_n > 0 ? (struct slice){NULL, 0} : SLICE("up.stream:8"),
        .path_prefix = own_host ? (struct slice){NULL, 0} : SLICE("/base"),
        .set = extras,
        .n_set = ARRAY_LEN(extras),
        .websocket = h->websocket,
    };
    struct http_head again = {.fields = again_fields};
    struct parse_scan scan = {0};
    struct buf out = {0};
    struct slice target = http_target(h), sent;
    enum parse_error e;

    if (h->n_fields > HTTP_FIELDS_MAX - 8) /* ours might be one too many */
        return;
    BUG_ON(!http_put_request(&out, h, &o));
    BUG_ON(parse_head_end(&scan, out.p, out.n, 4 * WIRE_HEAD_MAX, true, &e) != out.n || scan.start != 0);
    BUG_ON(parse_request(out.p, out.n, &again) != PARSE_OK);
    BUG_ON(again.method != h->method || again.minor != 1);
    BUG_ON(again.websocket != h->websocket);
    BUG_ON(again.expect_continue || !again.keep_alive);
    if (h->body == HTTP_BODY_NONE)
        BUG_ON(again.body != HTTP_BODY_NONE && again.content_length != 0);
    else
        BUG_ON(again.body != h->body || again.content_length != h->content_length);
    sent = http_target(&again);
    if (target.p[0] == '/') {
        BUG_ON(!slice_starts_with(sent, o.path_prefix));
        sent.p += o.path_prefix.n;
        sent.n -= o.path_prefix.n;
    }
    BUG_ON(!slice_eq(sent, target));
    for (size_t i = 0; i < again.n_fields; i++) {
        const struct http_field *f = &again.fields[i];

        BUG_ON(f->hop_by_hop && f->id != HTTP_FIELD_TRANSFER_ENCODING && !h->websocket);
        if (f->id == HTTP_FIELD_AUTHORIZATION)
            BUG_ON(!slice_eq(http_value(&again, f), SLICE("Bearer real")));
    }
    buf_free(&out);
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t n)
{
    char *copy = wire_copy(bytes, n);
    struct http_head h = {.fields = fields}, *kept;
    enum parse_error e;
    size_t start, length = wire_head_end(copy, n, true, &start, &e);

    if (length > 0 && parse_request(copy + start, length - start, &h) == PARSE_OK) {
        struct wire_body body;

        kept = http_head_copy(&h);
        BUG_ON(kept == NULL);
        memset(copy, 0, n);
        check_forwarded(kept, false);
        check_forwarded(kept, true);
        body = wire_feed_every_way(kept, bytes + length, n - length, true);
        buf_free(&body.payload);
        mem_free(kept);
    }
    mem_free(copy);
    BUG_ON(mem_live_blocks() != 0);
    return 0;
}
