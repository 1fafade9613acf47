/*
 * mock_ws.c - WebSocket (RFC 6455) for /v1/realtime and any other upgrade: accepts, then sends every frame
 * back unmasked as its bytes come, answers pings, and returns a close frame before it closes. The call is
 * in flight until the connection has closed.
 */
#include "mock.h"

#include <openssl/evp.h>
#include <openssl/sha.h>

enum { OP_CLOSE = 8, OP_PING = 9, OP_PONG = 10 };

/* Bytes of the first element of a comma-separated list. */
static size_t first_n(struct slice list)
{
    const char *comma = memchr(list.p, ',', list.n);

    return comma == NULL ? list.n : (size_t)(comma - list.p);
}

bool ws_accept(struct conn *c, const struct head *h)
{
    static const char guid[] = "258EAFA5-E914-47DA-95CA-C5AB0DC85B11";
    static const char hello[] =
        "{\"type\":\"session.created\",\"event_id\":\"event_mock\",\"session\":{\"id\":\"sess_mock\"}}";
    unsigned char joined[256], digest[SHA_DIGEST_LENGTH], accept[64];
    char buf[2048];
    struct text t = {.p = buf, .cap = sizeof(buf)};
    size_t n = size_min(h->ws_key.n, sizeof(joined) - sizeof(guid));

    memcpy(joined, h->ws_key.p, n);
    memcpy(joined + n, guid, sizeof(guid) - 1);
    SHA1(joined, n + sizeof(guid) - 1, digest);
    EVP_EncodeBlock(accept, digest, sizeof(digest));
    text_fmt(&t,
             "HTTP/1.1 101 Switching Protocols\r\nupgrade: websocket\r\nconnection: Upgrade\r\n"
             "sec-websocket-accept: %s\r\nx-request-id: req_mock%llu\r\n",
             (const char *)accept, (unsigned long long)c->call.id);
    if (h->ws_protocol.n > 0) {
        text_lit(&t, "sec-websocket-protocol: ");
        text_put(&t, h->ws_protocol.p, first_n(h->ws_protocol));
        text_lit(&t, "\r\n");
    }
    text_lit(&t, "\r\n");
    if (c->call.wish.ws_hello) {
        char frame[2] = {(char)0x81, (char)(sizeof(hello) - 1)};

        _Static_assert(sizeof(hello) - 1 < 126, "one-byte length");
        text_put(&t, frame, sizeof(frame));
        text_lit(&t, hello);
    }
    c->in_state = IN_TUNNEL;
    c->out_state = OUT_STUCK;
    return conn_send(c, t.p, t.n);
}

/* Takes a frame head off *in and sends its echo. False: it is not whole yet, or the connection was closed. */
static bool take_frame_head(struct conn *c, struct slice *in)
{
    const unsigned char *p = (const unsigned char *)in->p;
    struct ws *ws = &c->call.ws;
    size_t extra, n;
    char out[10];
    int opcode;

    if (in->n < 2)
        return false;
    extra = (p[1] & 0x7f) == 126 ? 2 : (p[1] & 0x7f) == 127 ? 8 : 0;
    n = 2 + extra + ((p[1] & 0x80) != 0 ? 4 : 0);
    if (in->n < n)
        return false;
    ws->left = extra == 0 ? p[1] & 0x7f : 0;
    for (size_t i = 0; i < extra; i++)
        ws->left = ws->left << 8 | p[2 + i];
    memset(ws->mask, 0, sizeof(ws->mask));
    if ((p[1] & 0x80) != 0)
        memcpy(ws->mask, p + 2 + extra, 4);
    ws->at = 0;
    ws->in_frame = true;
    opcode = p[0] & 0x0f;
    ws->closing = opcode == OP_CLOSE;
    out[0] = (char)(opcode == OP_PING ? (p[0] & 0xf0) | OP_PONG : p[0]);
    out[1] = (char)(p[1] & 0x7f);
    memcpy(out + 2, p + 2, extra);
    in->p += n;
    in->n -= n;
    return conn_send(c, out, 2 + extra);
}

void ws_take(struct conn *c, struct slice *in)
{
    struct ws *ws = &c->call.ws;

    for (;;) {
        size_t n;

        if (!ws->in_frame && !take_frame_head(c, in))
            return;
        n = size_min(ws->left < in->n ? (size_t)ws->left : in->n, MOCK_SCRATCH_SIZE);
        for (size_t i = 0; i < n; i++)
            c->loop->scratch[i] = (char)(in->p[i] ^ (char)ws->mask[(ws->at + i) & 3]);
        ws->at += (uint32_t)n;
        ws->left -= n;
        in->p += n;
        in->n -= n;
        if (n > 0 && !conn_send(c, c->loop->scratch, n))
            return;
        if (ws->left > 0)
            return;
        ws->in_frame = false;
        if (ws->closing) {
            c->in_state = IN_STOPPED;
            if (conn_queued(c) == 0)
                conn_close(c, false);
            return;
        }
    }
}
