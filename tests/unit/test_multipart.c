/*
 * test_multipart.c - the form scan: rows H073, H076 and H077 of cases/http.md,
 * every split of every body, and random bodies made and read by the obvious code.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "mem.h"
#include "multipart.h"

#include <stdio.h>

/* A slice of a literal, NULs in it included, for tables. */
#define TEXT(literal)                                                                                        \
    {                                                                                                        \
        (literal), sizeof(literal) - 1                                                                       \
    }

#define TYPE "multipart/form-data; boundary=b"
#define MODEL_PART "--b\r\nContent-Disposition: form-data; name=\"model\"\r\n\r\nwhisper-1\r\n"
#define FILE_HEAD                                                                                            \
    "--b\r\nContent-Disposition: form-data; name=\"file\"; filename=\"a.mp3\"\r\nContent-Type: "             \
    "audio/mpeg\r\n\r\n"

struct answer {
    enum bodyscan_verdict verdict;
    enum bodyscan_error error;
    struct multipart scan;
};

/* Feeds a piece from a place of its own, so that what came before it does not stand before it. */
static void feed_apart(struct multipart *m, const char *p, size_t n)
{
    char apart[64 + 256];

    if (n > 256) {
        (void)multipart_feed(m, p, n);
        return;
    }
    memset(apart, 'z', 64);
    if (n > 0)
        memcpy(apart + 64, p, n);
    (void)multipart_feed(m, apart + 64, n);
}

static void scan_pieces(struct answer *a, const char *type, struct slice body, size_t first, size_t piece)
{
    size_t at = size_min(first, body.n);

    memset(a, 0, sizeof(*a));
    assert_int_equal(multipart_init(&a->scan, slice_of(type)), BODYSCAN_E_OK);
    feed_apart(&a->scan, body.p, at);
    while (at < body.n) {
        size_t n = size_min(piece, body.n - at);

        feed_apart(&a->scan, body.p + at, n);
        at += n;
    }
    a->verdict = multipart_end(&a->scan);
    a->error = multipart_error(&a->scan);
}

static void assert_same(const struct answer *a, const struct answer *b)
{
    assert_int_equal(a->verdict, b->verdict);
    assert_int_equal(a->error, b->error);
    assert_true(slice_eq(multipart_model(&a->scan), multipart_model(&b->scan)));
}

/* H073 for any body: whole, in two at every place, in pieces of every small size. */
static void scan_all_splits(struct answer *whole, const char *type, struct slice body)
{
    struct answer split;

    scan_pieces(whole, type, body, body.n, body.n);
    for (size_t first = 0; first <= body.n; first++) {
        scan_pieces(&split, type, body, first, body.n);
        assert_same(whole, &split);
    }
    for (size_t piece = 1; piece <= 70; piece++) {
        scan_pieces(&split, type, body, 0, piece);
        assert_same(whole, &split);
    }
}

static void expect(const char *type, struct slice body, enum bodyscan_verdict v, enum bodyscan_error e,
                   const char *model)
{
    struct answer a;

    scan_all_splits(&a, type, body);
    if (a.verdict != v || a.error != e)
        print_error("body: %.*s\n", (int)body.n, body.p);
    assert_int_equal(a.verdict, v);
    assert_int_equal(a.error, e);
    if (model != NULL)
        assert_true(slice_eq(multipart_model(&a.scan), slice_of(model)));
}

static void expect_found(const char *type, struct slice body, const char *model)
{
    expect(type, body, BODYSCAN_FOUND, BODYSCAN_E_OK, model);
}

static void expect_bad(struct slice body, enum bodyscan_error e)
{
    expect(TYPE, body, BODYSCAN_BAD, e, NULL);
}

static void expect_none(struct slice body)
{
    expect(TYPE, body, BODYSCAN_NONE, BODYSCAN_E_OK, NULL);
}

/* A body whose one part has this Content-Disposition value. */
static struct slice with_disposition(char *out, size_t size, const char *disposition)
{
    int n = snprintf(out, size, "--b\r\nContent-Disposition: %s\r\n\r\nx\r\n--b--\r\n", disposition);

    assert_true(n > 0 && (size_t)n < size);
    return (struct slice){out, (size_t)n};
}

static void test_H076_model_in_any_place(void **state)
{
    (void)state;
    expect_found(TYPE, SLICE(MODEL_PART "--b--\r\n"), "whisper-1");
    expect_found(TYPE, SLICE(MODEL_PART FILE_HEAD "ID3\r\nmodel\r\n--b--\r\n"), "whisper-1");
    expect_found(TYPE, SLICE(FILE_HEAD "ID3\0\xff\r\n" MODEL_PART "--b--"), "whisper-1");
    expect_found(TYPE, SLICE(FILE_HEAD "\r\n" FILE_HEAD "\r\n\r\n" MODEL_PART FILE_HEAD "\r\n--b--\r\n"),
                 "whisper-1");
    expect_none(SLICE(FILE_HEAD "ID3\r\n--b--\r\n"));
    expect_none(SLICE(""));
}

static void test_H076_model_after_25_mib(void **state)
{
    static const size_t pieces[] = {65536, 4093, 1 << 30};
    size_t size = 25 << 20, n = strlen(FILE_HEAD);
    char *body = mem_must_zalloc(size + 1024);
    uint32_t seed = 1;

    (void)state;
    memcpy(body, FILE_HEAD, n);
    for (; n < size; n++) {
        seed = seed * 1664525 + 1013904223;
        body[n] = (char)(seed >> 24);
    }
    memcpy(body + n, "\r\n" MODEL_PART "--b--\r\n", strlen("\r\n" MODEL_PART "--b--\r\n"));
    n += strlen("\r\n" MODEL_PART "--b--\r\n");
    for (size_t i = 0; i < ARRAY_LEN(pieces); i++) {
        struct answer a;

        scan_pieces(&a, TYPE, (struct slice){body, n}, 0, pieces[i]);
        assert_int_equal(a.verdict, BODYSCAN_FOUND);
        assert_true(slice_eq(multipart_model(&a.scan), SLICE("whisper-1")));
    }
    mem_free(body);
}

static void test_H076_two_model_parts(void **state)
{
    (void)state;
    expect_bad(SLICE(MODEL_PART MODEL_PART "--b--\r\n"), BODYSCAN_E_MODEL_DUPLICATE);
    expect_bad(SLICE(MODEL_PART FILE_HEAD "x\r\n" MODEL_PART "--b--\r\n"), BODYSCAN_E_MODEL_DUPLICATE);
}

static void test_H076_quoted_boundary(void **state)
{
    (void)state;
    expect_found("multipart/form-data; boundary=\"b\"", SLICE(MODEL_PART "--b--\r\n"), "whisper-1");
    expect_found("Multipart/Form-Data ; charset=utf-8 ;BOUNDARY=\"a b:c\" ;",
                 SLICE("--a b:c\r\nContent-Disposition: form-data; name=model\r\n\r\nx\r\n--a b:c--"), "x");
    expect_found(
        "multipart/form-data; boundary=----=_Part/1?x",
        SLICE("------=_Part/1?x\r\ncontent-disposition:form-data;name=model\r\n\r\nx\r\n------=_Part/1?x--"),
        "x");
}

static void test_H076_lines_that_end_with_lf_only(void **state)
{
    (void)state;
    expect_bad(SLICE("--b\nContent-Disposition: form-data; name=\"model\"\n\nx\n--b--\n"),
               BODYSCAN_E_MULTIPART_MALFORMED);
    expect_bad(SLICE("--b\r\nContent-Disposition: form-data; name=\"model\"\n\nx\r\n--b--"),
               BODYSCAN_E_MULTIPART_MALFORMED);
    expect_bad(SLICE("--b\r\nContent-Disposition: form-data; name=\"model\"\r\n\nx\r\n--b--"),
               BODYSCAN_E_MULTIPART_MALFORMED);
    expect_bad(SLICE(FILE_HEAD "x\n--b\r\nContent-Disposition: form-data; name=model\r\n\r\ny\r\n--b--"),
               BODYSCAN_E_MULTIPART_MALFORMED);
    expect_bad(SLICE(FILE_HEAD "x\r--b--\r\n"), BODYSCAN_E_MULTIPART_MALFORMED);
    expect_bad(SLICE("--b\r\nContent-Disposition: form-data; name=model\r\n\r\ny\n--b--"),
               BODYSCAN_E_MODEL_INVALID);
    expect_bad(SLICE("--b\r\nContent-Disposition: form-data; name=model\r\n\r\ny\r--b--"),
               BODYSCAN_E_MODEL_INVALID);
}

static void test_H077_boundary_parameter(void **state)
{
    static const char *const bad[] = {
        "multipart/form-data",
        "multipart/form-data;",
        "multipart/form-data; boundary",
        "multipart/form-data; boundary=",
        "multipart/form-data; boundary=\"\"",
        "multipart/form-data; boundary=\"b",
        "multipart/form-data; boundary=\"b \"",
        "multipart/form-data; boundary=\"b\\b\"",
        "multipart/form-data; boundary=b; boundary=c",
        "multipart/form-data; boundary=b; Boundary=b",
        "multipart/form-data; boundary=a b",
        "multipart/form-data; boundary=a,b",
        "multipart/form-data; boundary = b",
        "multipart/form-data; boundary*=utf-8''b",
        "multipart/form-data boundary=b",
        "m/f; boundary=12345678901234567890123456789012345678901234567890123456789012345678901",
    };
    struct multipart m;

    (void)state;
    for (size_t i = 0; i < ARRAY_LEN(bad); i++)
        assert_int_equal(multipart_init(&m, slice_of(bad[i])), BODYSCAN_E_MULTIPART_BOUNDARY);
    assert_int_equal(
        multipart_init(
            &m, SLICE("multipart/form-data; "
                      "boundary=1234567890123456789012345678901234567890123456789012345678901234567890")),
        BODYSCAN_E_OK);
}

static void test_H077_file_bytes_do_not_fool_it(void **state)
{
    const char *type = "multipart/form-data; boundary=boundary1";

    (void)state;
    expect_found(
        type,
        SLICE(
            "--boundary1\r\nContent-Disposition: form-data; name=\"file\"; filename=\"x\"\r\n\r\n"
            "\r\n--boundary2\r\nContent-Disposition: form-data; name=\"model\"\r\n\r\nno\r\n--boundary\r\n"
            "--Boundary1\r\n-\r\n--\r\r\n--boundary\r\r\n\n --boundary1\r\n---boundary1\r\nx--boundary1--\r\n"
            "\r\n--boundary1\r\nContent-Disposition: form-data; "
            "name=\"model\"\r\n\r\nyes\r\n--boundary1--\r\n"),
        "yes");
    expect_found(
        type,
        SLICE(
            "--boundary1\r\nContent-Disposition: form-data; name=\"a\"\r\n\r\n--boundary\r\n--boundar\r\n"
            "--boundary1\r\nContent-Disposition: form-data; name=\"model\"\r\n\r\nyes\r\n--boundary1--\r\n"),
        "yes");
}

static void test_H077_names(void **state)
{
    static const char *const found[] = {"form-data; name=\"model\"", "form-data; name=model",
                                        "form-data;name=model;", "Form-Data; NAME=\"model\"",
                                        "form-data; x=y; name=model"};
    static const char *const none[] = {"form-data; name=\"Model\"",
                                       "form-data; name=\"model \"",
                                       "form-data; name=\"models\"",
                                       "form-data; name=\"file\"; filename=\"model\"",
                                       "form-data; filename=\"name=model\"; name=file",
                                       "form-data; name=\"file\"; filename=\"; name=model; x=\"",
                                       "form-data; name=\"file\"; filename=\"C:\\\\model\\x.gguf\"",
                                       "form-data; name=\"file\"; filename=\"say \\\"hi\\\"\"",
                                       "form-data; name=\"x\"; filename*=utf-8''model",
                                       "form-data; names=model",
                                       "form-data; xname=\"model\"",
                                       "form-data",
                                       "attachment; filename=\"model\""};
    char body[512];

    (void)state;
    for (size_t i = 0; i < ARRAY_LEN(found); i++)
        expect_found(TYPE, with_disposition(body, sizeof(body), found[i]), "x");
    for (size_t i = 0; i < ARRAY_LEN(none); i++)
        expect_none(with_disposition(body, sizeof(body), none[i]));
    expect_found(TYPE, SLICE(MODEL_PART "--b\r\n\r\nno headers\r\n--b--"), "whisper-1");
    expect_none(SLICE("--b\r\n\r\nno headers\r\n--b\r\nX: form-data; name=model\r\n\r\nx\r\n--b--"));
}

static void test_H077_names_that_servers_read_differently(void **state)
{
    static const char *const ambiguous[] = {"form-data; name*=utf-8''model",
                                            "form-data; name=\"x\"; name*=utf-8''mod%65l",
                                            "form-data; name*0=mo; name*1=del",
                                            "form-data; name=\"mo\\del\"",
                                            "form-data; name=\"model\"; filename=\"model\"",
                                            "form-data; name=\"model\"; filename=\"\"",
                                            "form-data; name=\"model\"; filename*=utf-8''x",
                                            "form-data; filename=\"a\\\"; name=model; x=\"; name=\"file\"",
                                            "attachment; name=\"model\"",
                                            "; name=model"};
    static const char *const malformed[] = {"form-data; name=\"x\"; name=\"model\"",
                                            "form-data; name=\"model\"; name=\"x\"",
                                            "form-data; name = \"model\"",
                                            "form-data; name=\"model",
                                            "form-data; name=\"x\" name=\"model\"",
                                            "form-data; name=a b",
                                            "form-data; name=",
                                            "form-data; =model",
                                            "form-data; name=\"x\"y=z",
                                            "form-data; name=x, name=model"};
    char body[512];

    (void)state;
    for (size_t i = 0; i < ARRAY_LEN(ambiguous); i++)
        expect_bad(with_disposition(body, sizeof(body), ambiguous[i]), BODYSCAN_E_MODEL_AMBIGUOUS);
    for (size_t i = 0; i < ARRAY_LEN(malformed); i++)
        expect_bad(with_disposition(body, sizeof(body), malformed[i]), BODYSCAN_E_MULTIPART_MALFORMED);
}

static void test_encoded_value(void **state)
{
#define HEAD "--b\r\nContent-Disposition: form-data; name=model\r\n"
    (void)state;
    expect_bad(SLICE(HEAD "Content-Transfer-Encoding: base64\r\n\r\neA==\r\n--b--"),
               BODYSCAN_E_MODEL_AMBIGUOUS);
    expect_bad(SLICE(HEAD "Content-Transfer-Encoding: quoted-printable\r\n\r\nx\r\n--b--"),
               BODYSCAN_E_MODEL_AMBIGUOUS);
    expect_bad(SLICE(HEAD "Content-Type: text/plain; charset=utf-7\r\n\r\nx\r\n--b--"),
               BODYSCAN_E_MODEL_AMBIGUOUS);
    expect_found(TYPE, SLICE(HEAD "Content-Transfer-Encoding: 8bit\r\n\r\nx\r\n--b--"), "x");
    expect_found(TYPE, SLICE(HEAD "Content-Type: text/plain; charset=\"UTF-8\"\r\n\r\nx\r\n--b--"), "x");
    expect_found(TYPE,
                 SLICE("--b\r\nContent-Type: text/plain;charset=utf-16\r\n\r\nx\r\n" HEAD "\r\nx\r\n--b--"),
                 "x");
}

static void test_values(void **state)
{
    char body[512];
    size_t n = strlen(HEAD "\r\n");

    (void)state;
    expect_found(TYPE, SLICE(HEAD "\r\nft:gpt-4o:\xc3\xa9{x}--\r\n--b--"), "ft:gpt-4o:\xc3\xa9{x}--");
    expect_bad(SLICE(HEAD "\r\n\r\n--b--"), BODYSCAN_E_MODEL_EMPTY);
    expect_bad(SLICE(HEAD "\r\na\0b\r\n--b--"), BODYSCAN_E_MODEL_INVALID);
    expect_bad(SLICE(HEAD "\r\na\r\nb\r\n--b--"), BODYSCAN_E_MODEL_INVALID);
    expect_bad(SLICE(HEAD "\r\na\r\n--c\r\n--b--"), BODYSCAN_E_MODEL_INVALID);
    expect_bad(SLICE(HEAD "\r\n\xff\r\n--b--"), BODYSCAN_E_MODEL_INVALID);
    expect_bad(SLICE(HEAD "\r\n\xc3\r\n--b--"), BODYSCAN_E_MODEL_INVALID);
    expect_bad(SLICE(HEAD "\r\na--b\r\n--b--"), BODYSCAN_E_MULTIPART_MALFORMED);
    memcpy(body, HEAD "\r\n", n);
    memset(body + n, 'm', 257);
    memcpy(body + n + 256, "\r\n--b--", 7);
    expect(TYPE, (struct slice){body, n + 256 + 7}, BODYSCAN_FOUND, BODYSCAN_E_OK, NULL);
    memset(body + n, 'm', 257);
    memcpy(body + n + 257, "\r\n--b--", 7);
    expect_bad((struct slice){body, n + 257 + 7}, BODYSCAN_E_MODEL_TOO_LONG);
}

static void test_malformed(void **state)
{
    static const struct slice bodies[] = {
        TEXT("x"),
        TEXT("{\"model\":\"x\"}\r\n" MODEL_PART "--b--"), /* another server may read the JSON */
        TEXT("preamble\r\n--b--\r\n"),
        TEXT("--b"),
        TEXT("--c\r\n"),
        TEXT("--b-"),
        TEXT("--b-x"),
        TEXT("--bX\r\n"),
        TEXT("--b--X"),
        TEXT("--b --\r\n"),
        TEXT("--b\r\r\n"),
        TEXT("--b\r\nContent-Disposition: form-data; name=x\r\n"),
        TEXT(FILE_HEAD "x"),
        TEXT(FILE_HEAD "x\r\n--b"),
        TEXT(FILE_HEAD "x\r\n--bX\r\n--b--"),
        TEXT(FILE_HEAD "--b--\r\n"), /* no line end of its own before it */
        TEXT(FILE_HEAD "\n--b--\r\n"),
        TEXT(MODEL_PART "--b--\r\n--b\r\n"), /* a part after the end */
        TEXT(MODEL_PART "--b--\r\nx\n--b\r\n"),
        TEXT("--b\r\n Content-Disposition: form-data; name=x\r\n\r\n\r\n--b--"),
        TEXT("--b\r\nContent-Disposition: form-data;\r\n name=model\r\n\r\nx\r\n--b--"),
        TEXT("--b\r\nContent-Disposition : form-data; name=model\r\n\r\nx\r\n--b--"),
        TEXT("--b\r\nContent-Disposition\r\n\r\nx\r\n--b--"),
        TEXT("--b\r\n: x\r\n\r\nx\r\n--b--"),
        TEXT("--b\r\nX: a\0b\r\n\r\nx\r\n--b--"),
        TEXT("--b\r\nX: a\rb\r\n\r\nx\r\n--b--"),
        TEXT("--b\r\nContent-Disposition: form-data; name=x\r\nContent-Disposition: form-data; "
             "name=model\r\n\r\nx\r\n--b--"),
    };

    (void)state;
    for (size_t i = 0; i < ARRAY_LEN(bodies); i++)
        expect_bad(bodies[i], BODYSCAN_E_MULTIPART_MALFORMED);
}

static void test_tolerated(void **state)
{
    (void)state;
    expect_found(TYPE, SLICE("\r\n" MODEL_PART "--b--"), "whisper-1");
    expect_found(
        TYPE,
        SLICE("--b \t\r\nContent-Disposition: form-data; name=model\r\n\r\nx\r\n--b-- \r\n\r\nepilogue"),
        "x");
    expect_found(TYPE, SLICE(MODEL_PART "--b--\n"), "whisper-1");
    expect_found(TYPE, SLICE(MODEL_PART "--b--\r\n--"), "whisper-1");
    expect_none(SLICE("--b--\r\n"));
}

static void test_headers_are_bounded(void **state)
{
    size_t size = 64 << 10, n = 5;
    char *body = mem_must_zalloc(size);
    struct answer a;

    (void)state;
    memcpy(body, "--b\r\n", 5);
    memset(body + 5, 'x', size - 5);
    scan_pieces(&a, TYPE, (struct slice){body, size}, 0, 100);
    assert_int_equal(a.error, BODYSCAN_E_MULTIPART_HEADERS);
    while (n + 6 < size) {
        memcpy(body + n, "X: y\r\n", 6);
        n += 6;
    }
    scan_pieces(&a, TYPE, (struct slice){body, n}, 0, 100);
    assert_int_equal(a.error, BODYSCAN_E_MULTIPART_HEADERS);
    mem_free(body);
}

static void test_a_header_line_is_bounded(void **state)
{
    (void)state;
    for (size_t n = MULTIPART_LINE_MAX - 1; n <= MULTIPART_LINE_MAX + 1; n++) {
        char body[MULTIPART_LINE_MAX + 64];
        struct answer a;

        memcpy(body, "--b\r\nX:", 7);
        memset(body + 7, 'y', n - 2);
        memcpy(body + 5 + n, "\r\n\r\nx\r\n--b--", 12);
        scan_pieces(&a, TYPE, (struct slice){body, 5 + n + 12}, 0, 100);
        assert_int_equal(a.verdict, n <= MULTIPART_LINE_MAX ? BODYSCAN_NONE : BODYSCAN_BAD);
        assert_int_equal(a.error, n <= MULTIPART_LINE_MAX ? BODYSCAN_E_OK : BODYSCAN_E_MULTIPART_HEADERS);
    }
}

static void test_headers_are_bounded_by_part(void **state)
{
    size_t part = strlen(FILE_HEAD "\r\n"), n = 0;
    char *body = mem_must_zalloc(1000 * part + 5);
    struct answer a;

    (void)state;
    for (; n < 1000 * part; n += part)
        memcpy(body + n, FILE_HEAD "\r\n", part);
    memcpy(body + n, "--b--", 5);
    scan_pieces(&a, TYPE, (struct slice){body, n + 5}, 0, 100);
    assert_int_equal(a.verdict, BODYSCAN_NONE);
    mem_free(body);
}

/* The line end in the last bytes of a block, the dashes first in the next one, and all places between. */
static void test_line_ends_at_every_place_of_a_block(void **state)
{
    static const struct slice ends[] = {TEXT("\r\n"),   TEXT("\n"),     TEXT("\r"),
                                        TEXT("\n\r\n"), TEXT("\r\r\n"), TEXT("\n\r")};
    static const struct slice tail =
        TEXT("--b--\r\n                                                                ");

    (void)state;
    for (size_t i = 0; i < ARRAY_LEN(ends); i++) {
        for (size_t pad = 1; pad < 200; pad++) {
            char body[600];
            size_t n = strlen(FILE_HEAD);
            bool is_delimiter = ends[i].n >= 2 && memcmp(ends[i].p + ends[i].n - 2, "\r\n", 2) == 0;
            struct answer a;

            memcpy(body, FILE_HEAD, n);
            memset(body + n, 'y', pad);
            memcpy(body + n + pad, ends[i].p, ends[i].n);
            n += pad + ends[i].n;
            memcpy(body + n, tail.p, tail.n);
            scan_pieces(&a, TYPE, (struct slice){body, n + tail.n}, n + tail.n, 1);
            assert_int_equal(a.verdict, is_delimiter ? BODYSCAN_NONE : BODYSCAN_BAD);
        }
    }
}

static uint32_t random_state = 12345;

static uint32_t random_below(uint32_t n)
{
    random_state = random_state * 1664525 + 1013904223;
    return (random_state >> 8) % n;
}

/* Random parts of bytes that look like delimiters; a body is wrong only when one of them is a real one. */
static void test_random_file_bytes(void **state)
{
    static const char alphabet[] = "\r\n-bx ";
    size_t found = 0, refused = 0;

    (void)state;
    for (int round = 0; round < 60000; round++) {
        char body[600];
        size_t n = strlen(FILE_HEAD), data = n, length = random_below(300);
        struct answer a, b;
        bool holds_one = false;

        memcpy(body, FILE_HEAD, n);
        for (size_t i = 0; i < length; i++)
            body[n++] = random_below(4) == 0 ? alphabet[random_below(6)] : (round % 2 == 0 ? 'y' : '-');
        memcpy(body + n, "\r\n" MODEL_PART "--b--", strlen("\r\n" MODEL_PART "--b--"));
        for (size_t i = data; i + 3 <= n;
             i++) { /* "--b" at the start of anything that is a line to somebody */
            if (memcmp(body + i, "--b", 3) == 0 && (i == data || body[i - 1] == '\n' || body[i - 1] == '\r'))
                holds_one = true;
        }
        n += strlen("\r\n" MODEL_PART "--b--");
        scan_pieces(&a, TYPE, (struct slice){body, n}, n, n);
        scan_pieces(&b, TYPE, (struct slice){body, n}, random_below(200), 1 + random_below(130));
        assert_same(&a, &b);
        if (holds_one) { /* then a header line must follow it, and none of these bytes is a colon */
            assert_int_equal(a.error, BODYSCAN_E_MULTIPART_MALFORMED);
            refused++;
        } else {
            assert_int_equal(a.verdict, BODYSCAN_FOUND);
            found++;
        }
    }
    assert_true(found > 1000 && refused > 1000);
}

static void test_nothing_is_allocated(void **state)
{
    (void)state;
    assert_int_equal(mem_live_blocks(), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_H076_model_in_any_place),
        cmocka_unit_test(test_H076_model_after_25_mib),
        cmocka_unit_test(test_H076_two_model_parts),
        cmocka_unit_test(test_H076_quoted_boundary),
        cmocka_unit_test(test_H076_lines_that_end_with_lf_only),
        cmocka_unit_test(test_H077_boundary_parameter),
        cmocka_unit_test(test_H077_file_bytes_do_not_fool_it),
        cmocka_unit_test(test_H077_names),
        cmocka_unit_test(test_H077_names_that_servers_read_differently),
        cmocka_unit_test(test_encoded_value),
        cmocka_unit_test(test_values),
        cmocka_unit_test(test_malformed),
        cmocka_unit_test(test_tolerated),
        cmocka_unit_test(test_headers_are_bounded),
        cmocka_unit_test(test_a_header_line_is_bounded),
        cmocka_unit_test(test_headers_are_bounded_by_part),
        cmocka_unit_test(test_line_ends_at_every_place_of_a_block),
        cmocka_unit_test(test_random_file_bytes),
        cmocka_unit_test(test_nothing_is_allocated),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
