/*
 * tls.h - OpenSSL behind two things: a context (certificates and rules, shared
 * by threads, counted) and an engine (one connection, no sockets: bytes in, bytes out).
 * The only room that includes OpenSSL's TLS headers.
 */
#ifndef LG_TLS_H
#define LG_TLS_H

#include "buf.h"

struct tls_context;
struct tls;

/*
 * For listeners. client_ca "" : client certificates are not asked for. NULL: *error (a static or
 * errors-owned text in `why`) says why. ALPN http/1.1.
 */
struct tls_context *tls_context_server(const char *cert_file, const char *key_file, const char *client_ca,
                                       struct buf *why);
/*
 * For upstreams and Redis. ca "" : the system's. cert/key "" : none. verify false: neither chain nor name is
 * checked.
 */
struct tls_context *tls_context_client(const char *ca_file, const char *cert_file, const char *key_file,
                                       bool verify, bool alpn_http, struct buf *why);
struct tls_context *tls_context_ref(struct tls_context *c);
void tls_context_unref(struct tls_context *c); /* any thread; NULL: nothing */

/* Remembered sessions of one target, of one thread: resumption. Owned by the caller. */
struct tls_sessions;
struct tls_sessions *tls_sessions_new(void);
void tls_sessions_free(struct tls_sessions *s);

/*
 * NULL: no memory. server_name: SNI and the name that is verified; an IP address is verified as IP SAN and
 * not sent as SNI.
 */
struct tls *tls_new_server(struct tls_context *c);
struct tls *tls_new_client(struct tls_context *c, const char *server_name, struct tls_sessions *sessions);
void tls_free(struct tls *t);

enum tls_result {
    TLS_OK,     /* all input was taken; there may be output */
    TLS_CLOSED, /* close_notify came */
    TLS_FAILED, /* see tls_error */
};

/*
 * Takes all n bytes of ciphertext. Calls on_plain (possibly many times, at most once per 16 KiB record) with
 * decrypted bytes: valid and writable during the call. What must be sent (handshake, alerts) is appended to
 * *out. on_plain must not free the engine.
 */
enum tls_result tls_feed(struct tls *t, const char *cipher, size_t n, struct queue *out,
                         void (*on_plain)(void *arg, char *bytes, size_t n), void *arg);
/*
 * Starts the client handshake: appends the ClientHello. Neither this nor tls_feed may be called from
 * on_plain; the others may.
 */
enum tls_result tls_start(struct tls *t, struct queue *out);
/* Encrypts; only after tls_ready. Appends records to *out. */
enum tls_result tls_write(struct tls *t, const struct iovec *iov, size_t n_iov, struct queue *out);
/* Appends close_notify (RFC 9112 section 9.8). */
void tls_put_close(struct tls *t, struct queue *out);
/* The handshake is complete. */
bool tls_ready(const struct tls *t);
/* The handshake continued a remembered session. */
bool tls_resumed(const struct tls *t);
/* After TLS_FAILED: what went wrong, one line, no secrets. */
const char *tls_error(const struct tls *t);

#endif
