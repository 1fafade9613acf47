/*
 * stream.h - one duplex byte stream: TCP or unix socket, plain or TLS, accepted
 * or dialed. Clients, upstreams and Redis all travel on it, so deadlines,
 * backpressure, TLS and closing are written once.
 *
 *   reading   bytes are read into the loop's scratch and lent to on_data; what the
 *             owner does not use at once it must copy. An idle stream holds no buffer.
 *   writing   stream_write hands bytes to the kernel at once and queues (copies) only what it
 *             did not take. The queue is bounded by the caller: look at stream_queued
 *             and stop the source above the high mark; on_drain tells when it fell below the low mark.
 *   closing   exactly one of stream_close / stream_close_gently / stream_reset ends the owner's
 *             relation to it: no callback comes afterwards; the stream frees itself when libuv is done
 *             with it.
 *
 * Callbacks come from the loop, never from inside a stream_* call. Each callback may close the stream.
 */
#ifndef LG_STREAM_H
#define LG_STREAM_H

#include "loop.h"
#include "str.h"
#include "tls.h"

#include <sys/uio.h>

struct stream;
struct sockaddr;

/* Above it, stop reading the source; at most one read (LOOP_SCRATCH_BYTES) comes on top. */
#define STREAM_HIGH_BYTES (128 * 1024)
#define STREAM_LOW_BYTES (32 * 1024)

enum stream_end {
    STREAM_END_FIN,          /* TCP FIN; on TLS: FIN without close_notify (RFC 9112 section 9.8: a cut) */
    STREAM_END_CLOSE_NOTIFY, /* TLS only: an orderly end */
};

struct stream_ops {
    /*
     * Dialed: connected, and TLS is up. Accepted TLS: handshake done. Accepted plain streams do not call it.
     */
    void (*on_open)(void *owner);
    /*
     * n > 0 bytes, valid and writable until the call returns. Not called while paused, but for the rest of
     * one read.
     */
    void (*on_data)(void *owner, char *bytes, size_t n);
    /* The other side sends no more. Writing may still be possible. Comes once. */
    void (*on_end)(void *owner, enum stream_end how);
    /*
     * The write queue fell below STREAM_LOW_BYTES after it was above STREAM_HIGH_BYTES (stream_full was
     * true), or emptied.
     */
    void (*on_drain)(void *owner);
    /*
     * Connect failed, reset, TLS failure, write error. `error`: negative errno (libuv's) or
     * STREAM_ERROR_TLS. Comes once and is the last callback; the owner must still close.
     */
    void (*on_error)(void *owner, int error, const char *detail);
};

#define STREAM_ERROR_TLS (-20001)

/* --- birth ---------------------------------------------------------------------------------------------- */

struct stream_listener; /* stream_listen.c */
/*
 * Binds host:port with SO_REUSEPORT on this loop ("" host: all addresses, dual stack where there is IPv6).
 * tls may be NULL (the listener takes a reference). on_accept gets a stream without owner: stream_adopt it
 * at once or stream_close it. Running out of descriptors pauses accepting for a short while and is logged
 * once a second. NULL: *why says what failed.
 */
struct stream_listener *stream_listen(struct loop *l, const char *host, uint16_t port,
                                      struct tls_context *tls, void (*on_accept)(void *arg, struct stream *s),
                                      void *arg, struct buf *why);
uint16_t stream_listener_port(const struct stream_listener *sl); /* the real one, when 0 was asked for */
/* New handshakes use this context. */
void stream_listener_set_tls(struct stream_listener *sl, struct tls_context *tls);
/* Serves what is in the accept queue, then closes. */
void stream_listener_close(struct stream_listener *sl);

/*
 * Dials; the outcome comes by on_open or on_error on a later turn. NULL: no memory. tls NULL: plain.
 * server_name as in tls_new_client.
 */
struct stream *stream_dial(struct loop *l, const struct sockaddr *address, struct tls_context *tls,
                           const char *server_name, struct tls_sessions *sessions,
                           const struct stream_ops *ops, void *owner);
struct stream *stream_dial_unix(struct loop *l, const char *path, const struct stream_ops *ops, void *owner);

/*
 * For stream_listen.c: a stream without owner on an accepted, non-blocking socket, which is its own from now
 * on. NULL: no memory, the socket is closed.
 */
struct stream *stream_from_socket(struct loop *l, int fd, const struct sockaddr *from,
                                  struct tls_context *tls);
/* TCP_NODELAY, keepalive, user timeout. */
void stream_socket_options(int fd);

/* Gives an accepted stream its owner and begins to read. */
void stream_adopt(struct stream *s, const struct stream_ops *ops, void *owner);

/* --- life ----------------------------------------------------------------------------------------------- */

/*
 * Writes the bytes in order; they are the caller's again on return. Errors come by on_error. False: no
 * memory or the stream has already failed or was shut down: nothing more will be written (on_error follows
 * if it has not come yet).
 */
MUST_CHECK bool stream_write(struct stream *s, const struct iovec *iov, size_t n);
/* Bytes that the kernel has not taken yet. */
size_t stream_queued(const struct stream *s);
static inline bool stream_full(const struct stream *s)
{
    return stream_queued(s) >= STREAM_HIGH_BYTES;
}
/*
 * Bytes given to the kernel / read so far (of the wire, TLS overhead included). For progress checks and
 * metrics.
 */
uint64_t stream_bytes_out(const struct stream *s);
/* Of these, bytes that the other side's kernel has acknowledged (SIOCOUTQ): moves with a slow reader while the kernel takes nothing new. One system call. */
uint64_t stream_bytes_acknowledged(const struct stream *s);
uint64_t stream_bytes_in(const struct stream *s);

/* Stops and starts on_data. Idempotent. */
void stream_pause(struct stream *s);
void stream_resume(struct stream *s);
/*
 * A stream that is paused, or whose on_end has come, reports nothing by itself (libuv polls no more). With
 * watch on, such a stream's TCP state is looked at every 100 ms: a FIN behind unread bytes gives on_end, a
 * reset on_error(UV_ECONNRESET). Such an on_end says STREAM_END_FIN also on TLS (what stands before the FIN
 * was not read), and comes ahead of the bytes that were sent before it: stream_resume still delivers those,
 * and no second on_end. So it is for sides whose leaving matters more than their last bytes (clients), not
 * for a response that ends where its connection ends.
 */
void stream_watch(struct stream *s, bool on);
/*
 * The kernel says right now that the other side has fully closed (TCP state CLOSE) — for the half-close
 * probe (cases H131).
 */
bool stream_peer_is_gone(struct stream *s);

/*
 * The kernel holds something for a stream that should be silent: an end, a reset or (plain streams only:
 * TLS has silent records) bytes. One system call; for a pooled connection before it is used again.
 */
bool stream_has_news(struct stream *s);

/* Sends FIN (close_notify first on TLS) after everything queued. Reading goes on. */
void stream_shutdown(struct stream *s);

/* Client address as text ("127.0.0.1:4711", "unix"); lives as long as the stream. */
const char *stream_address(const struct stream *s);
bool stream_is_tls(const struct stream *s);
/* TLS is up and continued an earlier session. */
bool stream_tls_resumed(const struct stream *s);

/* --- end ------------------------------------------------------------------------------------------------ */

/* Closes now; what is queued is lost (on TLS a close_notify is tried). The owner forgets s. */
void stream_close(struct stream *s);
/*
 * Lingering close (RFC 9112 section 9.6): sends what is queued, then FIN, reads and discards until the
 * other side's FIN, at most max_bytes and max_ms, then closes. By itself, without owner.
 */
void stream_close_gently(struct stream *s, uint64_t max_bytes, uint64_t max_ms);
/* Breaks it off with RST: a cut response must not look complete. */
void stream_reset(struct stream *s);

/* Streams alive on this loop (for tests and gauges). */
size_t stream_live(const struct loop *l);
/* Accepts that failed for want of descriptors or memory on this loop, ever. */
uint64_t stream_accept_failures(const struct loop *l);

#endif
