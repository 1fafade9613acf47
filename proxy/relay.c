/*
 * relay.c - response bytes to the client.
 */
#include "relay.h"

#include "metrics.h"

static void flush_head(struct task *t)
{
    struct relay *r = container_of(t, struct relay, flush_);
    struct iovec iov = {r->head_.p, r->head_.n};

    if (r->client != NULL && r->head_.n > 0) {
        r->head_sent = true;
        if (!client_write(r->client, &iov, 1))
            r->paused = false; /* its on_end follows */
    }
    buf_free(&r->head_);
}

void relay_init(struct relay *r, struct loop *l, struct client *c, struct upstream *u)
{
    *r = (struct relay){.client = c, .upstream = u, .loop = l};
    task_init(&r->flush_, flush_head);
    sse_init(&r->sse);
}

void relay_head(struct relay *r, struct buf *head, bool chunked, bool is_sse)
{
    r->head_ = *head;
    *head = (struct buf){0};
    r->chunked = chunked;
    r->is_sse = is_sse;
    loop_defer(r->loop, &r->flush_);
}

/* Head (if it waits), chunk frame, bytes, last chunk: whatever of it there is, in one write. */
static bool write_parts(struct relay *r, const char *bytes, size_t n, bool last)
{
    static const char end_and_last[] = "\r\n0\r\n\r\n";
    char line[20];
    struct iovec iov[4];
    size_t parts = 0;
    bool ok;

    if (r->head_.n > 0)
        iov[parts++] = (struct iovec){r->head_.p, r->head_.n};
    if (n > 0 && r->chunked) {
        size_t digits = str_put_hex(line, n);

        line[digits] = '\r';
        line[digits + 1] = '\n';
        iov[parts++] = (struct iovec){line, digits + 2};
    }
    if (n > 0)
        iov[parts++] = (struct iovec){(void *)(uintptr_t)bytes, n};
    if (r->chunked && (n > 0 || last)) {
        const char *from = n > 0 ? end_and_last : end_and_last + 2;

        iov[parts++] = (struct iovec){(void *)(uintptr_t)from, (n > 0 ? 2u : 0u) + (last ? 5u : 0u)};
    }
    if (parts == 0)
        return true;
    r->head_sent = true;
    ok = client_write(r->client, iov, parts);
    task_cancel(r->loop, &r->flush_);
    buf_free(&r->head_);
    return ok;
}

bool relay_body(struct relay *r, const char *bytes, size_t n, bool last)
{
    if (r->is_sse)
        sse_feed(&r->sse, bytes, n);
    if (r->client == NULL) {
        r->discarded += n;
        return true;
    }
    r->bytes += n;
    metrics_add(METRICS_CLIENT_BYTES_OUT, n);
    if (!write_parts(r, bytes, n, last))
        return false;
    if (last)
        r->chunked = false; /* the last chunk is out */
    if (client_full(r->client) && !last) {
        r->paused = true;
        upstream_pause(r->upstream);
    }
    return true;
}

void relay_end(struct relay *r)
{
    if (r->client != NULL && !write_parts(r, NULL, 0, r->chunked))
        r->paused = false; /* the client failed in the last moment: its connection tells it */
}

void relay_drained(struct relay *r)
{
    if (!r->paused)
        return;
    r->paused = false;
    upstream_resume(r->upstream);
}

bool relay_head_pending(const struct relay *r)
{
    return !r->head_sent;
}

void relay_drop_head(struct relay *r)
{
    BUG_ON(r->head_sent);
    task_cancel(r->loop, &r->flush_);
    buf_free(&r->head_);
}

void relay_detach_client(struct relay *r)
{
    r->client = NULL;
    task_cancel(r->loop, &r->flush_);
    buf_free(&r->head_);
    relay_drained(r);
}

void relay_close(struct relay *r)
{
    task_cancel(r->loop, &r->flush_);
    buf_free(&r->head_);
    r->client = NULL;
}
