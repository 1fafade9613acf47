/*
 * test_tls.c - the engine alone: two engines and the bytes between them, no sockets.
 */
#include "io_help.h"

#include <openssl/err.h>
#include <openssl/ssl.h>

static struct io_certs certs;
static struct tls_context *server_context, *client_context;

struct side {
    struct tls *t;
    struct queue out;
    struct buf plain;
    enum tls_result last;
};

static bool stale_errors; /* on_plain leaves one behind, as other code on this thread might */

struct duo {
    struct side server, client;
    size_t split; /* bytes fed at once; 0: all */
};

static void on_plain(void *arg, char *bytes, size_t n)
{
    struct side *s = arg;

    assert_in_range(n, 1, 16384);
    assert_true(buf_put(&s->plain, (struct slice){bytes, n}));
    memset(bytes, 0, n);
    if (stale_errors)
        ERR_raise(ERR_LIB_SSL, SSL_R_BAD_LENGTH);
}

/* Moves what `from` has to say to `to`. */
static bool move(struct duo *d, struct side *from, struct side *to)
{
    struct iovec iov;
    bool moved = false;

    while (queue_peek(&from->out, &iov, 1) == 1) {
        size_t n = d->split == 0 ? iov.iov_len : size_min(d->split, iov.iov_len);

        to->last = tls_feed(to->t, iov.iov_base, n, &to->out, on_plain, to);
        queue_drop(&from->out, n);
        moved = true;
    }
    return moved;
}

static void settle(struct duo *d)
{
    while (move(d, &d->client, &d->server) || move(d, &d->server, &d->client))
        ;
}

static void duo_begin(struct duo *d, struct tls_context *s, struct tls_context *c, const char *name,
                      struct tls_sessions *sessions)
{
    memset(d, 0, sizeof(*d));
    d->server.t = tls_new_server(s);
    d->client.t = tls_new_client(c, name, sessions);
    assert_non_null(d->server.t);
    assert_non_null(d->client.t);
    assert_int_equal(tls_start(d->client.t, &d->client.out), TLS_OK);
}

static void duo_free(struct duo *d)
{
    tls_free(d->server.t);
    tls_free(d->client.t);
    queue_free(&d->server.out);
    queue_free(&d->client.out);
    buf_free(&d->server.plain);
    buf_free(&d->client.plain);
}

static void say_to(struct side *from, const char *p, size_t n)
{
    struct iovec iov = {(void *)(uintptr_t)p, n};

    assert_int_equal(tls_write(from->t, &iov, 1, &from->out), TLS_OK);
}

/* Handshake, data both ways and close under every size of pieces that matters, one byte among them (H165). */
static void every_split(void **state)
{
    static const size_t splits[] = {1, 2, 3, 5, 7, 64, 1000, 0};
    static char big[50000];

    (void)state;
    for (size_t i = 0; i < sizeof(big); i++)
        big[i] = (char)(i * 7 + i / 251);
    for (size_t i = 0; i < ARRAY_LEN(splits); i++) {
        struct duo d;

        duo_begin(&d, server_context, client_context, "localhost", NULL);
        d.split = splits[i];
        settle(&d);
        assert_true(tls_ready(d.client.t) && tls_ready(d.server.t));
        assert_int_equal(d.client.plain.n + d.server.plain.n, 0); /* tickets are no data */
        say_to(&d.client, big, sizeof(big));
        say_to(&d.server, "answer", 6);
        settle(&d);
        assert_int_equal(d.server.plain.n, sizeof(big));
        assert_memory_equal(d.server.plain.p, big, sizeof(big));
        assert_int_equal(d.client.plain.n, 6);
        assert_memory_equal(d.client.plain.p, "answer", 6);
        tls_put_close(d.client.t, &d.client.out);
        settle(&d);
        assert_int_equal(d.server.last, TLS_CLOSED);
        say_to(&d.server, "late", 4); /* half-closed: the other direction lives */
        settle(&d);
        assert_int_equal(d.client.plain.n, 10);
        duo_free(&d);
    }
}

/* Pieces of one write share records: a head and a body are one record, 40 KiB are three. */
static void small_pieces_share_a_record(void **state)
{
    struct duo d;
    static char block[20000];
    struct iovec five[5] = {{block, 100}, {block, 0}, {block, 300}, {block, 20000}, {block, 20000}};
    size_t before;

    (void)state;
    duo_begin(&d, server_context, client_context, "localhost", NULL);
    settle(&d);
    before = d.client.out.bytes;
    assert_int_equal(before, 0);
    assert_int_equal(tls_write(d.client.t, five, 3, &d.client.out), TLS_OK);
    assert_in_range(d.client.out.bytes, 401, 400 + 60); /* one record's overhead */
    settle(&d);
    assert_int_equal(d.server.plain.n, 400);
    assert_int_equal(tls_write(d.client.t, five, 5, &d.client.out), TLS_OK);
    assert_in_range(d.client.out.bytes, 40401, 40400 + 3 * 60);
    settle(&d);
    assert_int_equal(d.server.plain.n, 40800);
    duo_free(&d);
}

static void sessions_are_resumed(void **state)
{
    struct tls_sessions *sessions = tls_sessions_new();

    (void)state;
    for (int i = 0; i < 5; i++) {
        struct duo d;

        duo_begin(&d, server_context, client_context, "localhost", sessions);
        settle(&d);
        assert_true(tls_ready(d.client.t));
        assert_int_equal(tls_resumed(d.client.t), i > 0);
        assert_int_equal(tls_resumed(d.server.t), i > 0);
        duo_free(&d);
    }
    tls_sessions_free(sessions);
}

static void names_are_verified(void **state)
{
    static const struct {
        const char *name;
        bool good;
        const char *words;
    } cases[] = {
        {"localhost", true, ""},
        {"127.0.0.1", true, ""}, /* by its IP SAN */
        {"127.0.0.2", false, "IP address mismatch"},
        {"localhost.example", false, "ostname mismatch"},
        {"::1", false, "IP address mismatch"},
    };

    (void)state;
    for (size_t i = 0; i < ARRAY_LEN(cases); i++) {
        struct duo d;

        duo_begin(&d, server_context, client_context, cases[i].name, NULL);
        settle(&d);
        assert_int_equal(tls_ready(d.client.t), cases[i].good);
        if (!cases[i].good) {
            assert_int_equal(d.client.last, TLS_FAILED);
            assert_non_null(strstr(tls_error(d.client.t), cases[i].words));
            assert_int_equal(d.server.last, TLS_FAILED); /* by the alert */
        }
        duo_free(&d);
    }
}

static bool contains(const struct queue *q, const char *text)
{
    struct iovec iov;

    return queue_peek(q, &iov, 1) == 1 && memmem(iov.iov_base, iov.iov_len, text, strlen(text)) != NULL;
}

/* What the ClientHello shows: the name but no address, http/1.1 alone (H158). */
static void the_hello_names_host_and_protocol(void **state)
{
    struct duo d;

    (void)state;
    duo_begin(&d, server_context, client_context, "localhost", NULL);
    assert_true(contains(&d.client.out, "localhost"));
    assert_true(contains(&d.client.out, "\x08http/1.1"));
    assert_false(contains(&d.client.out, "\x02h2"));
    duo_free(&d);
    duo_begin(&d, server_context, client_context, "127.0.0.1", NULL);
    assert_false(contains(&d.client.out, "127.0.0.1"));
    duo_free(&d);
}

static void unverified_clients_take_any_name(void **state)
{
    struct buf why = {0};
    struct tls_context *lax = tls_context_client("", "", "", false, false, &why);
    struct duo d;

    (void)state;
    duo_begin(&d, server_context, lax, "elsewhere.example", NULL);
    settle(&d);
    assert_true(tls_ready(d.client.t));
    duo_free(&d);
    tls_context_unref(lax);
}

static void client_certificates(void **state)
{
    struct buf why = {0};
    struct tls_context *asking = tls_context_server(certs.cert, certs.key, certs.ca, &why);
    struct tls_context *with = tls_context_client(certs.ca, certs.cert, certs.key, true, true, &why);
    struct tls_sessions *sessions = tls_sessions_new();
    struct duo d;

    (void)state;
    assert_non_null(asking);
    assert_non_null(with);
    for (int i = 0; i < 2; i++) { /* the second one resumes */
        duo_begin(&d, asking, with, "localhost", sessions);
        settle(&d);
        assert_true(tls_ready(d.client.t) && tls_ready(d.server.t));
        assert_int_equal(tls_resumed(d.server.t), i);
        duo_free(&d);
    }
    duo_begin(&d, asking, client_context, "localhost", NULL); /* none */
    settle(&d);
    assert_false(tls_ready(d.server.t));
    assert_int_equal(d.server.last, TLS_FAILED);
    assert_int_equal(d.client.last, TLS_FAILED);
    duo_free(&d);
    tls_sessions_free(sessions);
    tls_context_unref(asking);
    tls_context_unref(with);
}

/* --- against a bare OpenSSL ----------------------------------------------------------------------------- */

/* An OpenSSL client with memory BIOs, for what our own client never does. */
struct bare {
    SSL_CTX *ctx;
    SSL *ssl;
};

static void bare_begin(struct bare *b, int version)
{
    b->ctx = SSL_CTX_new(TLS_client_method());
    SSL_CTX_set_max_proto_version(b->ctx, version);
    SSL_CTX_set_min_proto_version(b->ctx, version);
    b->ssl = SSL_new(b->ctx);
    SSL_set_bio(b->ssl, BIO_new(BIO_s_mem()), BIO_new(BIO_s_mem()));
    SSL_set_connect_state(b->ssl);
}

static void bare_free(struct bare *b)
{
    SSL_free(b->ssl);
    SSL_CTX_free(b->ctx);
}

/* The bare client's bytes to the server and back, until both are silent. */
static void bare_settle(struct bare *b, struct side *s)
{
    char bytes[4096];
    bool moved = true;

    while (moved) {
        struct iovec iov;
        int n;

        moved = false;
        while ((n = BIO_read(SSL_get_wbio(b->ssl), bytes, sizeof(bytes))) > 0) {
            s->last = tls_feed(s->t, bytes, (size_t)n, &s->out, on_plain, s);
            moved = true;
        }
        while (queue_peek(&s->out, &iov, 1) == 1) {
            BIO_write(SSL_get_rbio(b->ssl), iov.iov_base, (int)iov.iov_len);
            queue_drop(&s->out, iov.iov_len);
            moved = true;
        }
        SSL_is_init_finished(b->ssl) ? (void)SSL_read(b->ssl, bytes, sizeof(bytes))
                                     : (void)SSL_do_handshake(b->ssl);
    }
}

static void side_free(struct side *s)
{
    tls_free(s->t);
    queue_free(&s->out);
    buf_free(&s->plain);
}

static void old_versions_are_refused(void **state)
{
    struct bare b;
    struct side s = {.t = tls_new_server(server_context)};

    (void)state;
    bare_begin(&b, TLS1_1_VERSION);
    SSL_set_security_level(b.ssl, 0);
    SSL_set_cipher_list(b.ssl, "ALL:@SECLEVEL=0");
    SSL_do_handshake(b.ssl);
    bare_settle(&b, &s);
    assert_false(tls_ready(s.t));
    assert_int_equal(s.last, TLS_FAILED);
    bare_free(&b);
    side_free(&s);
}

/* H161: TLS 1.2 renegotiation is refused; OpenSSL's client then gives up with an alert of its own. */
static void renegotiation_is_refused(void **state)
{
    struct bare b;
    struct side s = {.t = tls_new_server(server_context)};

    (void)state;
    bare_begin(&b, TLS1_2_VERSION);
    SSL_do_handshake(b.ssl);
    bare_settle(&b, &s);
    assert_true(tls_ready(s.t));
    assert_int_equal(SSL_renegotiate(b.ssl), 1);
    SSL_do_handshake(b.ssl);
    bare_settle(&b, &s);
    assert_int_equal(s.last, TLS_FAILED);
    assert_false(SSL_is_init_finished(b.ssl));
    assert_int_equal(s.plain.n, 0);
    bare_free(&b);
    side_free(&s);
}

/* H160: a KeyUpdate is no data, its answer goes out, and what follows is read under the new keys. */
static void key_updates_are_no_data(void **state)
{
    struct bare b;
    struct side s = {.t = tls_new_server(server_context)};

    (void)state;
    bare_begin(&b, TLS1_3_VERSION);
    SSL_do_handshake(b.ssl);
    bare_settle(&b, &s);
    assert_true(tls_ready(s.t));
    assert_int_equal(SSL_key_update(b.ssl, SSL_KEY_UPDATE_REQUESTED), 1);
    SSL_do_handshake(b.ssl);
    bare_settle(&b, &s);
    assert_int_equal(s.last, TLS_OK);
    assert_int_equal(s.plain.n, 0);
    assert_int_equal(SSL_write(b.ssl, "after", 5), 5);
    bare_settle(&b, &s);
    assert_int_equal(s.plain.n, 5);
    bare_free(&b);
    side_free(&s);
}

static void alpn(const char *offer, unsigned n, const char *want)
{
    struct bare b;
    struct side s = {.t = tls_new_server(server_context)};
    const unsigned char *got;
    unsigned got_n;

    bare_begin(&b, TLS1_3_VERSION);
    assert_int_equal(SSL_set_alpn_protos(b.ssl, (const unsigned char *)offer, n), 0);
    SSL_do_handshake(b.ssl);
    bare_settle(&b, &s);
    assert_true(tls_ready(s.t));
    SSL_get0_alpn_selected(b.ssl, &got, &got_n);
    assert_int_equal(got_n, strlen(want));
    assert_int_equal(memcmp(got_n > 0 ? (const char *)got : "", want, got_n), 0);
    bare_free(&b);
    side_free(&s);
}

static void alpn_takes_http_1_1_or_nothing(void **state)
{
    (void)state;
    alpn("\x02h2\x08http/1.1", 12, "http/1.1");
    alpn("\x02h2", 3, "");
}

/* --- damage --------------------------------------------------------------------------------------------- */

/* H159: what another connection left in the thread's error queue fails nobody. */
static void stale_errors_fail_nobody(void **state)
{
    struct duo d;

    (void)state;
    ERR_raise(ERR_LIB_SSL, SSL_R_BAD_LENGTH);
    duo_begin(&d, server_context, client_context, "localhost", NULL);
    ERR_raise(ERR_LIB_SSL, SSL_R_BAD_LENGTH);
    settle(&d);
    assert_true(tls_ready(d.client.t) && tls_ready(d.server.t));
    ERR_raise(ERR_LIB_SSL, SSL_R_BAD_LENGTH);
    say_to(&d.client, "x", 1);
    stale_errors = true;
    settle(&d);
    stale_errors = false;
    assert_int_equal(d.server.plain.n, 1);
    assert_int_equal(d.server.last, TLS_OK);
    duo_free(&d);
    ERR_clear_error();
}

static void damaged_records_fail(void **state)
{
    struct duo d;
    struct iovec iov;

    (void)state;
    duo_begin(&d, server_context, client_context, "localhost", NULL);
    settle(&d);
    say_to(&d.client, "secret", 6);
    assert_int_equal(queue_peek(&d.client.out, &iov, 1), 1);
    ((char *)iov.iov_base)[iov.iov_len - 1] ^= 1;
    settle(&d);
    assert_int_equal(d.server.last, TLS_FAILED);
    assert_int_equal(d.server.plain.n, 0);
    assert_true(strlen(tls_error(d.server.t)) > 0);
    assert_int_equal(tls_feed(d.server.t, "x", 1, &d.server.out, on_plain, &d.server), TLS_FAILED);
    tls_put_close(d.server.t, &d.server.out); /* no-op */
    duo_free(&d);
}

static bool says(const struct buf *why, const char *text)
{
    return memmem(why->p, why->n, text, strlen(text)) != NULL;
}

static void bad_files_are_named(void **state)
{
    struct buf why = {0};

    (void)state;
    assert_null(tls_context_server("/nowhere/cert", certs.key, "", &why));
    assert_true(says(&why, "/nowhere/cert"));
    buf_free(&why);
    assert_null(
        tls_context_server(certs.cert, certs.ca, "", &why)); /* a certificate where the key should be */
    assert_true(says(&why, "private key"));
    buf_free(&why);
    assert_null(tls_context_server(certs.ca, certs.key, "", &why)); /* not a pair */
    assert_true(why.n > 0);
    buf_free(&why);
    assert_null(tls_context_client("/nowhere/ca", "", "", true, true, &why));
    assert_true(says(&why, "/nowhere/ca"));
    buf_free(&why);
}

/* No memory for the output queue: the engine fails, nothing leaks, nothing crashes. */
static void every_allocation_may_fail(void **state)
{
    (void)state;
    for (uint64_t n = 1; n < 40; n++) {
        struct duo d = {0};

        mem_fail_at((n + 1) / 2, n % 2 == 0);
        d.server.t = tls_new_server(server_context);
        d.client.t = tls_new_client(client_context, "localhost", NULL);
        if (d.server.t != NULL && d.client.t != NULL && tls_start(d.client.t, &d.client.out) == TLS_OK) {
            for (int i = 0; i < 4; i++) {
                char wire[65536];
                struct iovec iov;

                while (queue_peek(&d.client.out, &iov, 1) == 1) {
                    size_t m = iov.iov_len;

                    memcpy(wire, iov.iov_base, m);
                    queue_drop(&d.client.out, m);
                    d.server.last = tls_feed(d.server.t, wire, m, &d.server.out, on_plain, &d.server);
                }
                while (queue_peek(&d.server.out, &iov, 1) == 1) {
                    size_t m = iov.iov_len;

                    memcpy(wire, iov.iov_base, m);
                    queue_drop(&d.server.out, m);
                    d.client.last = tls_feed(d.client.t, wire, m, &d.client.out, on_plain, &d.client);
                }
            }
        }
        mem_fail_at(0, false);
        duo_free(&d);
    }
}

static size_t blocks;

static int setup(void **state)
{
    struct buf why = {0};

    (void)state;
    blocks = mem_live_blocks();
    io_certs_make(&certs);
    server_context = tls_context_server(certs.cert, certs.key, "", &why);
    client_context = tls_context_client(certs.ca, "", "", true, true, &why);
    return server_context == NULL || client_context == NULL ? -1 : 0;
}

static void nothing_is_left(void **state)
{
    (void)state;
    tls_context_unref(server_context);
    tls_context_unref(client_context);
    assert_int_equal(mem_live_blocks(), blocks);
    io_certs_remove(&certs);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_split),
        cmocka_unit_test(small_pieces_share_a_record),
        cmocka_unit_test(sessions_are_resumed),
        cmocka_unit_test(names_are_verified),
        cmocka_unit_test(the_hello_names_host_and_protocol),
        cmocka_unit_test(unverified_clients_take_any_name),
        cmocka_unit_test(client_certificates),
        cmocka_unit_test(old_versions_are_refused),
        cmocka_unit_test(renegotiation_is_refused),
        cmocka_unit_test(key_updates_are_no_data),
        cmocka_unit_test(alpn_takes_http_1_1_or_nothing),
        cmocka_unit_test(stale_errors_fail_nobody),
        cmocka_unit_test(damaged_records_fail),
        cmocka_unit_test(bad_files_are_named),
        cmocka_unit_test(every_allocation_may_fail),
        cmocka_unit_test(nothing_is_left),
    };

    return cmocka_run_group_tests_name("tls", tests, setup, NULL);
}
