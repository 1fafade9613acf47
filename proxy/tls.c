/*
 * tls.c - OpenSSL behind a context and an engine without sockets.
 *
 *                  tls_feed(bytes) ─► [in] ─► BIO read ─► SSL ─► on_plain
 *      struct queue *out ◄── BIO write ◄── SSL ◄── tls_write(iov)
 *
 * Instead of memory BIOs there is one BIO of our own an engine: it reads from the slice that tls_feed was
 * given and writes straight into the caller's queue. tls_feed always empties the slice, so nothing is kept
 * between calls, and with SSL_MODE_RELEASE_BUFFERS an idle connection holds no record buffer. The BIO never
 * blocks a write, so SSL_write takes all or fails, and the "wants read / wants write" cases of
 * SSL_get_error shrink to one: more input.
 *
 * OpenSSL's error queue is one a thread: it is emptied before each call, else one bad client would fail the
 * next one's. Contexts are shared by threads and never changed after they were made; engines and sessions
 * belong to one thread.
 */
#include "tls.h"

#include "mem.h"

#include <arpa/inet.h>
#include <openssl/bio.h>
#include <openssl/err.h>
#include <openssl/ssl.h>
#include <openssl/x509v3.h>
#include <stdatomic.h>
#include <stdio.h>

#define RECORD_BYTES SSL3_RT_MAX_PLAIN_LENGTH
#define SESSIONS_MAX 8

struct tls_context {
    SSL_CTX *ctx;
    BIO_METHOD *bio;
    atomic_uint references;
    bool verify;
};

struct tls_sessions {
    SSL_SESSION *newest_last[SESSIONS_MAX];
    size_t n;
};

struct tls {
    SSL *ssl;
    const char *in; /* during tls_feed: what the BIO may still read */
    size_t in_n;
    struct queue *out; /* during a call: where the BIO writes */
    struct tls_sessions *sessions;
    char *error;
    bool ready, failed;
};

/* --- the BIO -------------------------------------------------------------------------------------------- */

static int bio_read(BIO *b, char *to, size_t n, size_t *got)
{
    struct tls *t = BIO_get_data(b);

    BIO_clear_retry_flags(b);
    *got = size_min(n, t->in_n);
    if (*got == 0) {
        BIO_set_retry_read(b);
        return 0;
    }
    memcpy(to, t->in, *got);
    t->in += *got;
    t->in_n -= *got;
    return 1;
}

static int bio_write(BIO *b, const char *from, size_t n, size_t *put)
{
    const struct tls *t = BIO_get_data(b);

    BIO_clear_retry_flags(b);
    *put = 0;
    if (t->out == NULL || !queue_put(t->out, from, n))
        return 0;
    *put = n;
    return 1;
}

static long bio_ctrl(BIO *b, int command, long number, void *p)
{
    (void)b;
    (void)number;
    (void)p;
    return command == BIO_CTRL_FLUSH ? 1 : 0;
}

static BIO_METHOD *bio_method(void)
{
    BIO_METHOD *m = BIO_meth_new(BIO_TYPE_SOURCE_SINK | BIO_get_new_index(), "leasegate");

    if (m == NULL)
        return NULL;
    BIO_meth_set_read_ex(m, bio_read);
    BIO_meth_set_write_ex(m, bio_write);
    BIO_meth_set_ctrl(m, bio_ctrl);
    return m;
}

/* --- contexts ------------------------------------------------------------------------------------------- */

/* The last reason in OpenSSL's queue. */
static const char *last_reason(void)
{
    const char *reason = ERR_reason_error_string(ERR_peek_last_error());

    return reason != NULL ? reason : "unknown reason";
}

static void say(struct buf *why, const char *what, const char *file)
{
    char text[512];

    snprintf(text, sizeof(text), "%s%s%.300s: %s", what, file[0] == '\0' ? "" : " ", file, last_reason());
    (void)WARN_ON(!buf_put(why, slice_of(text)));
}

static void context_free(struct tls_context *c)
{
    SSL_CTX_free(c->ctx);
    BIO_meth_free(c->bio);
    mem_free(c);
}

static struct tls_context *context_new(const SSL_METHOD *method, struct buf *why)
{
    struct tls_context *c = mem_zalloc(sizeof(*c));

    if (c == NULL)
        return NULL;
    ERR_clear_error();
    atomic_init(&c->references, 1);
    c->ctx = SSL_CTX_new(method);
    c->bio = bio_method();
    if (c->ctx == NULL || c->bio == NULL || SSL_CTX_set_min_proto_version(c->ctx, TLS1_2_VERSION) != 1) {
        say(why, "cannot set up TLS", "");
        context_free(c);
        return NULL;
    }
    SSL_CTX_set_options(c->ctx,
                        SSL_OP_NO_RENEGOTIATION | SSL_OP_CIPHER_SERVER_PREFERENCE | SSL_OP_PRIORITIZE_CHACHA);
    SSL_CTX_set_mode(c->ctx, SSL_MODE_RELEASE_BUFFERS);
    return c;
}

static bool use_certificate(SSL_CTX *ctx, const char *cert_file, const char *key_file, struct buf *why)
{
    if (SSL_CTX_use_certificate_chain_file(ctx, cert_file) != 1)
        say(why, "cannot use the certificate", cert_file);
    else if (SSL_CTX_use_PrivateKey_file(ctx, key_file, SSL_FILETYPE_PEM) != 1)
        say(why, "cannot use the private key", key_file);
    else if (SSL_CTX_check_private_key(ctx) != 1)
        say(why, "the private key does not belong to the certificate", cert_file);
    else
        return true;
    return false;
}

/* http/1.1 when it is offered; else the handshake goes on without ALPN (RFC 7301 section 3.2). */
static int on_alpn(SSL *ssl, const unsigned char **chosen, unsigned char *n, const unsigned char *offered,
                   unsigned offered_n, void *arg)
{
    static const unsigned char ours[] = "\x08http/1.1";
    unsigned char *pick;

    (void)ssl;
    (void)arg;
    if (SSL_select_next_proto(&pick, n, ours, sizeof(ours) - 1, offered, offered_n) != OPENSSL_NPN_NEGOTIATED)
        return SSL_TLSEXT_ERR_NOACK;
    *chosen = pick;
    return SSL_TLSEXT_ERR_OK;
}

static bool ask_client_certificate(SSL_CTX *ctx, const char *ca_file, struct buf *why)
{
    STACK_OF(X509_NAME) *names = SSL_load_client_CA_file(ca_file);

    if (names == NULL || SSL_CTX_load_verify_file(ctx, ca_file) != 1) {
        sk_X509_NAME_pop_free(names, X509_NAME_free);
        say(why, "cannot use the client CA", ca_file);
        return false;
    }
    SSL_CTX_set_client_CA_list(ctx, names);
    SSL_CTX_set_verify(ctx, SSL_VERIFY_PEER | SSL_VERIFY_FAIL_IF_NO_PEER_CERT, NULL);
    return true;
}

struct tls_context *tls_context_server(const char *cert_file, const char *key_file, const char *client_ca,
                                       struct buf *why)
{
    struct tls_context *c = context_new(TLS_server_method(), why);

    if (c == NULL)
        return NULL;
    /*
     * Tickets carry the sessions, so no cache with its lock; without early data there is nothing to replay
     * (RFC 8470).
     */
    SSL_CTX_set_session_cache_mode(c->ctx, SSL_SESS_CACHE_OFF);
    SSL_CTX_set_max_early_data(c->ctx, 0);
    SSL_CTX_set_alpn_select_cb(c->ctx, on_alpn, NULL);
    if (SSL_CTX_set_session_id_context(c->ctx, (const unsigned char *)"leasegate", 9) != 1 ||
        !use_certificate(c->ctx, cert_file, key_file, why) ||
        (client_ca[0] != '\0' && !ask_client_certificate(c->ctx, client_ca, why))) {
        context_free(c);
        return NULL;
    }
    return c;
}

static int on_new_session(SSL *ssl, SSL_SESSION *session);

struct tls_context *tls_context_client(const char *ca_file, const char *cert_file, const char *key_file,
                                       bool verify, bool alpn_http, struct buf *why)
{
    struct tls_context *c = context_new(TLS_client_method(), why);

    if (c == NULL)
        return NULL;
    c->verify = verify;
    SSL_CTX_set_session_cache_mode(c->ctx, SSL_SESS_CACHE_CLIENT | SSL_SESS_CACHE_NO_INTERNAL);
    SSL_CTX_sess_set_new_cb(c->ctx, on_new_session);
    if (cert_file[0] != '\0' && !use_certificate(c->ctx, cert_file, key_file, why))
        goto failed;
    if (verify) {
        SSL_CTX_set_verify(c->ctx, SSL_VERIFY_PEER, NULL);
        if (ca_file[0] == '\0' ? SSL_CTX_set_default_verify_paths(c->ctx) != 1
                               : SSL_CTX_load_verify_file(c->ctx, ca_file) != 1) {
            say(why, "cannot use the CA", ca_file);
            goto failed;
        }
    }
    if (alpn_http && SSL_CTX_set_alpn_protos(c->ctx, (const unsigned char *)"\x08http/1.1", 9) != 0) {
        say(why, "cannot set up ALPN", "");
        goto failed;
    }
    return c;

failed:
    context_free(c);
    return NULL;
}

struct tls_context *tls_context_ref(struct tls_context *c)
{
    atomic_fetch_add(&c->references, 1);
    return c;
}

void tls_context_unref(struct tls_context *c)
{
    if (c != NULL && atomic_fetch_sub(&c->references, 1) == 1)
        context_free(c);
}

/* --- sessions ------------------------------------------------------------------------------------------- */

struct tls_sessions *tls_sessions_new(void)
{
    return mem_zalloc(sizeof(struct tls_sessions));
}

void tls_sessions_free(struct tls_sessions *s)
{
    if (s == NULL)
        return;
    for (size_t i = 0; i < s->n; i++)
        SSL_SESSION_free(s->newest_last[i]);
    mem_free(s);
}

static void sessions_remove(struct tls_sessions *s, size_t i)
{
    SSL_SESSION_free(s->newest_last[i]);
    memmove(&s->newest_last[i], &s->newest_last[i + 1], (s->n - i - 1) * sizeof(s->newest_last[0]));
    s->n--;
}

/* 1: the session is ours now. */
static int on_new_session(SSL *ssl, SSL_SESSION *session)
{
    const struct tls *t = SSL_get_app_data(ssl);

    if (t->sessions == NULL)
        return 0;
    if (t->sessions->n == SESSIONS_MAX)
        sessions_remove(t->sessions, 0);
    t->sessions->newest_last[t->sessions->n++] = session;
    return 1;
}

/* The newest that still serves. A TLS 1.3 ticket is used once (RFC 8446 appendix C.4). */
static void resume(struct tls *t)
{
    struct tls_sessions *s = t->sessions;

    while (s != NULL && s->n > 0) {
        SSL_SESSION *session = s->newest_last[s->n - 1];
        bool good = SSL_SESSION_is_resumable(session) == 1 && SSL_set_session(t->ssl, session) == 1;

        if (!good || SSL_SESSION_get_protocol_version(session) >= TLS1_3_VERSION)
            sessions_remove(s, s->n - 1);
        if (good)
            return;
    }
}

/* --- engines -------------------------------------------------------------------------------------------- */

static struct tls *engine_new(struct tls_context *c)
{
    struct tls *t = mem_zalloc(sizeof(*t));
    BIO *bio;

    if (t == NULL)
        return NULL;
    ERR_clear_error();
    t->ssl = SSL_new(c->ctx);
    bio = t->ssl == NULL ? NULL : BIO_new(c->bio);
    if (bio == NULL) {
        tls_free(t);
        return NULL;
    }
    BIO_set_data(bio, t);
    BIO_set_init(bio, 1);
    SSL_set_bio(t->ssl, bio, bio); /* takes bio */
    SSL_set_app_data(t->ssl, t);
    return t;
}

struct tls *tls_new_server(struct tls_context *c)
{
    struct tls *t = engine_new(c);

    if (t != NULL)
        SSL_set_accept_state(t->ssl);
    return t;
}

/*
 * Whom we talk to: sent as SNI and held against the certificate. An address is never SNI (RFC 6066 section
 * 3).
 */
static bool set_name(SSL *ssl, const char *name, bool verify)
{
    unsigned char address[16];

    if (inet_pton(AF_INET, name, address) == 1 || inet_pton(AF_INET6, name, address) == 1)
        return !verify || X509_VERIFY_PARAM_set1_ip_asc(SSL_get0_param(ssl), name) == 1;
    if (SSL_set_tlsext_host_name(ssl, name) != 1)
        return false;
    SSL_set_hostflags(ssl, X509_CHECK_FLAG_NO_PARTIAL_WILDCARDS);
    return !verify || SSL_set1_host(ssl, name) == 1;
}

struct tls *tls_new_client(struct tls_context *c, const char *server_name, struct tls_sessions *sessions)
{
    struct tls *t = engine_new(c);

    if (t == NULL)
        return NULL;
    SSL_set_connect_state(t->ssl);
    if (server_name != NULL && server_name[0] != '\0' && !set_name(t->ssl, server_name, c->verify)) {
        tls_free(t);
        return NULL;
    }
    t->sessions = sessions;
    resume(t);
    return t;
}

void tls_free(struct tls *t)
{
    if (t == NULL)
        return;
    if (t->ssl != NULL) {
        /* Else OpenSSL takes the session of a connection that was merely closed for a bad one. */
        if (t->ready && !t->failed)
            SSL_set_shutdown(t->ssl, SSL_SENT_SHUTDOWN | SSL_RECEIVED_SHUTDOWN);
        SSL_free(t->ssl);
    }
    mem_free(t->error);
    mem_free(t);
}

static enum tls_result engine_failed(struct tls *t)
{
    long verified = SSL_get_verify_result(t->ssl);
    const char *reason = last_reason();
    char text[256];

    t->failed = true;
    if (!t->ready && verified != X509_V_OK)
        snprintf(text, sizeof(text), "certificate: %s", X509_verify_cert_error_string(verified));
    else
        snprintf(text, sizeof(text), "%s%s", t->ready ? "" : "handshake: ", reason);
    mem_free(t->error);
    t->error = mem_strndup(text, strlen(text));
    ERR_clear_error();
    return TLS_FAILED;
}

const char *tls_error(const struct tls *t)
{
    return t->error != NULL ? t->error : "TLS failed";
}

bool tls_ready(const struct tls *t)
{
    return t->ready;
}

/* One step of the handshake. TLS_OK with !ready: it waits for input. */
static enum tls_result handshake(struct tls *t)
{
    int rc;

    ERR_clear_error();
    rc = SSL_do_handshake(t->ssl);
    if (rc == 1)
        t->ready = true;
    else if (SSL_get_error(t->ssl, rc) != SSL_ERROR_WANT_READ)
        return engine_failed(t);
    return TLS_OK;
}

enum tls_result tls_start(struct tls *t, struct queue *out)
{
    enum tls_result r;

    t->out = out;
    r = handshake(t);
    t->out = NULL;
    return r;
}

static enum tls_result read_records(struct tls *t, void (*on_plain)(void *arg, char *bytes, size_t n),
                                    void *arg)
{
    char plain[RECORD_BYTES];
    size_t n;

    for (;;) {
        int rc, error;

        ERR_clear_error();
        rc = SSL_read_ex(t->ssl, plain, sizeof(plain), &n);
        if (rc == 1) {
            on_plain(arg, plain, n);
            continue;
        }
        error = SSL_get_error(t->ssl, rc);
        if (error == SSL_ERROR_WANT_READ)
            return TLS_OK;
        return error == SSL_ERROR_ZERO_RETURN ? TLS_CLOSED : engine_failed(t);
    }
}

enum tls_result tls_feed(struct tls *t, const char *cipher, size_t n, struct queue *out,
                         void (*on_plain)(void *arg, char *bytes, size_t n), void *arg)
{
    enum tls_result r = TLS_OK;

    if (t->failed)
        return TLS_FAILED;
    t->in = cipher;
    t->in_n = n;
    t->out = out;
    if (!t->ready)
        r = handshake(t);
    if (r == TLS_OK && t->ready)
        r = read_records(t, on_plain, arg);
    BUG_ON(r == TLS_OK && t->in_n > 0);
    t->in = NULL;
    t->in_n = 0;
    t->out = NULL;
    return r;
}

static bool put_record(struct tls *t, const void *p, size_t n)
{
    size_t done;

    if (n == 0)
        return true;
    ERR_clear_error();
    return SSL_write_ex(t->ssl, p, n, &done) == 1;
}

/* Small pieces of one call share a record; large ones are encrypted where they stand. */
static bool put_all(struct tls *t, const struct iovec *iov, size_t n_iov)
{
    char gathered[RECORD_BYTES];
    size_t used = 0;

    if (n_iov == 1)
        return put_record(t, iov[0].iov_base, iov[0].iov_len);
    for (size_t i = 0; i < n_iov; i++) {
        const char *p = iov[i].iov_base;
        size_t left = iov[i].iov_len;

        while (left > 0) {
            size_t part = size_min(left, sizeof(gathered) - used);

            if (used == 0 && left >= sizeof(gathered)) {
                part = left - left % sizeof(gathered);
                if (!put_record(t, p, part))
                    return false;
            } else {
                memcpy(gathered + used, p, part);
                used += part;
            }
            p += part;
            left -= part;
            if (used == sizeof(gathered)) {
                if (!put_record(t, gathered, used))
                    return false;
                used = 0;
            }
        }
    }
    return put_record(t, gathered, used);
}

enum tls_result tls_write(struct tls *t, const struct iovec *iov, size_t n_iov, struct queue *out)
{
    struct queue *outer = t->out; /* on_plain of tls_feed may write */
    bool ok;

    if (t->failed)
        return TLS_FAILED;
    BUG_ON(!t->ready);
    t->out = out;
    ok = put_all(t, iov, n_iov);
    t->out = outer;
    return ok ? TLS_OK : engine_failed(t);
}

void tls_put_close(struct tls *t, struct queue *out)
{
    struct queue *outer = t->out;

    if (t->failed || !t->ready)
        return;
    t->out = out;
    ERR_clear_error();
    (void)SSL_shutdown(t->ssl); /* 0: sent, theirs has not come; nobody waits for it here */
    t->out = outer;
}

bool tls_resumed(const struct tls *t)
{
    return SSL_session_reused(t->ssl) == 1;
}
