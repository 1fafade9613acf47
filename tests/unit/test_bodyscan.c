/*
 * test_bodyscan.c - the door to the scanners: which Content-Type and
 * Content-Encoding are read how (rows H061, H069, H073, H074, H075 and H076 of
 * cases/http.md), what a decoder may cost, when it lets go, and what happens
 * when memory runs out.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <zlib.h>
#include <zstd.h>

#include "bodyscan.h"
#include "mem.h"

#define JSON SLICE("application/json")
#define NO_FIELD ((struct slice){NULL, 0})

enum { CAP_BYTES = 1 << 20 };

/* A slice of a literal, NULs in it included, for tables. */
#define TEXT(literal)                                                                                        \
    {                                                                                                        \
        (literal), sizeof(literal) - 1                                                                       \
    }

static const struct slice body_json = TEXT(
    "{\"messages\":[{\"role\":\"user\",\"content\":\"hello \\\"hello\\\" hello\"}],\"model\":\"gpt-4o\"}");

struct answer {
    enum bodyscan_verdict verdict;
    enum bodyscan_error error;
    char model[257];
};

static struct answer run(struct slice type, struct slice coding, struct slice body, size_t first,
                         size_t piece)
{
    struct answer a = {BODYSCAN_MORE, BODYSCAN_E_OK, ""};
    struct bodyscan *b = bodyscan_new(type, coding, CAP_BYTES, &a.error);
    size_t at = size_min(first, body.n);

    if (b == NULL) {
        a.verdict = BODYSCAN_BAD;
        return a;
    }
    (void)bodyscan_feed(b, body.p, at);
    while (at < body.n) {
        size_t n = size_min(piece, body.n - at);

        (void)bodyscan_feed(b, body.p + at, n);
        at += n;
    }
    a.verdict = bodyscan_end(b);
    a.error = bodyscan_error(b);
    if (bodyscan_model(b).n > 0)
        memcpy(a.model, bodyscan_model(b).p, bodyscan_model(b).n);
    bodyscan_free(b);
    return a;
}

static struct answer run_whole(struct slice type, struct slice coding, struct slice body)
{
    return run(type, coding, body, body.n, body.n);
}

static void expect(struct slice type, struct slice coding, struct slice body, enum bodyscan_verdict v,
                   enum bodyscan_error e, const char *model)
{
    struct answer whole = run_whole(type, coding, body);

    assert_int_equal(whole.verdict, v);
    assert_int_equal(whole.error, e);
    assert_string_equal(whole.model, model);
    for (size_t first = 0; first <= size_min(body.n, 400); first++) {
        struct answer split = run(type, coding, body, first, first % 3 == 0 ? 1 : body.n);

        assert_int_equal(split.verdict, v);
        assert_int_equal(split.error, e);
        assert_string_equal(split.model, model);
    }
    assert_int_equal(mem_live_blocks(), 0);
}

static void expect_found(struct slice type, struct slice coding, struct slice body, const char *model)
{
    expect(type, coding, body, BODYSCAN_FOUND, BODYSCAN_E_OK, model);
}

static void expect_none(struct slice type, struct slice body)
{
    expect(type, NO_FIELD, body, BODYSCAN_NONE, BODYSCAN_E_OK, "");
}

static void expect_bad(struct slice type, struct slice coding, struct slice body, enum bodyscan_error e)
{
    expect(type, coding, body, BODYSCAN_BAD, e, "");
}

/* ---- compressed bodies, in one static buffer, which the next one overwrites ---- */

static char packed[1 << 20];

enum wrapper {
    RAW = -15,
    ZLIB = 15,
    GZIP = 31,
};

static size_t deflate_at(size_t at, enum wrapper wrapper, const void *body, size_t n)
{
    z_stream z;

    memset(&z, 0, sizeof(z));
    assert_int_equal(deflateInit2(&z, 9, Z_DEFLATED, wrapper, 9, Z_DEFAULT_STRATEGY), Z_OK);
    z.next_in = (z_const Bytef *)(uintptr_t)body;
    z.avail_in = (uInt)n;
    z.next_out = (Bytef *)packed + at;
    z.avail_out = (uInt)(sizeof(packed) - at);
    assert_int_equal(deflate(&z, Z_FINISH), Z_STREAM_END);
    n = z.total_out;
    deflateEnd(&z);
    return n;
}

static struct slice deflated(enum wrapper wrapper, struct slice body)
{
    return (struct slice){packed, deflate_at(0, wrapper, body.p, body.n)};
}

static size_t zstd_at(size_t at, int window_log, const void *body, size_t n)
{
    ZSTD_CCtx *c = ZSTD_createCCtx();
    ZSTD_inBuffer in = {body, n, 0};
    ZSTD_outBuffer out = {packed + at, sizeof(packed) - at, 0};

    if (window_log != 0) /* without a known size the frame carries its window */
        assert_false(ZSTD_isError(ZSTD_CCtx_setParameter(c, ZSTD_c_windowLog, window_log)));
    assert_false(ZSTD_isError(ZSTD_CCtx_setParameter(c, ZSTD_c_checksumFlag, 1)));
    assert_false(ZSTD_isError(ZSTD_compressStream2(c, &out, &in, ZSTD_e_flush)));
    assert_int_equal(ZSTD_compressStream2(c, &out, &in, ZSTD_e_end), 0);
    ZSTD_freeCCtx(c);
    return out.pos;
}

static struct slice zstd(struct slice body)
{
    return (struct slice){packed, zstd_at(0, 0, body.p, body.n)};
}

static void test_H061_plain_json(void **state)
{
    struct bodyscan *b;
    enum bodyscan_error why;

    (void)state;
    expect_found(JSON, NO_FIELD, body_json, "gpt-4o");
    expect_found(JSON, SLICE("identity"), body_json, "gpt-4o");
    expect_none(JSON, SLICE("{\"input\":1}"));
    expect_none(JSON, SLICE("[]"));
    expect_none(JSON, SLICE(""));
    b = bodyscan_new(JSON, NO_FIELD, 0, &why); /* the cap is for decoded bytes alone */
    assert_non_null(b);
    assert_int_equal(mem_live_blocks(), 1);
    assert_int_equal(bodyscan_feed(b, "{\"model\":\"m", 11), BODYSCAN_MORE);
    assert_int_equal(bodyscan_model(b).n, 0);
    assert_int_equal(bodyscan_feed(b, "\"", 1), BODYSCAN_FOUND);
    assert_int_equal(bodyscan_feed(b, "", 0), BODYSCAN_FOUND);
    assert_true(slice_eq(bodyscan_model(b), SLICE("m")));
    assert_true(bodyscan_is_object(b));
    assert_int_equal(bodyscan_feed(b, ",\"model\"", 8), BODYSCAN_BAD);
    assert_int_equal(bodyscan_error(b), BODYSCAN_E_MODEL_DUPLICATE);
    assert_int_equal(bodyscan_model(b).n, 0);
    bodyscan_free(b);
    bodyscan_free(NULL);
}

static void test_content_types_read_as_json(void **state)
{
    static const char *const types[] = {"application/json",
                                        "Application/JSON; charset=utf-8",
                                        "text/json",
                                        "application/vnd.api+json",
                                        "application/json;charset=\"UTF-8\";",
                                        "application/json; utf-8",
                                        "application/json; charset=us-ascii"};
    static const char *const sniffed[] = {"",
                                          "text/plain",
                                          "text/plain;charset=UTF-8",
                                          "application/octet-stream",
                                          "application/x-www-form-urlencoded",
                                          "json",
                                          "*/*",
                                          ";",
                                          "image/png"};

    (void)state;
    for (size_t i = 0; i < ARRAY_LEN(types); i++) {
        expect_found(slice_of(types[i]), NO_FIELD, body_json, "gpt-4o");
        expect_bad(slice_of(types[i]), NO_FIELD, SLICE("model=x"), BODYSCAN_E_BODY_MALFORMED);
    }
    for (size_t i = 0; i < ARRAY_LEN(sniffed); i++) {
        expect_found(slice_of(sniffed[i]), NO_FIELD, body_json, "gpt-4o");
        expect_found(slice_of(sniffed[i]), NO_FIELD, SLICE(" \r\n{\"model\":\"x\"}"), "x");
        expect_none(slice_of(sniffed[i]), SLICE("model=gpt-4o&x={\"model\":\"y\"}"));
        expect_none(slice_of(sniffed[i]), SLICE("\x89PNG\r\n"));
        expect_none(slice_of(sniffed[i]), SLICE(""));
        expect_bad(slice_of(sniffed[i]), NO_FIELD, SLICE("{\"model\":\"a\",\"model\":\"b\"}"),
                   BODYSCAN_E_MODEL_DUPLICATE);
    }
    expect_found(NO_FIELD, NO_FIELD, body_json, "gpt-4o");
}

static void test_none_is_told_at_the_first_byte(void **state)
{
    enum bodyscan_error why;
    struct bodyscan *b = bodyscan_new(SLICE("application/octet-stream"), NO_FIELD, CAP_BYTES, &why);

    (void)state;
    assert_int_equal(bodyscan_feed(b, " ", 1), BODYSCAN_MORE);
    assert_int_equal(bodyscan_feed(b, "R", 1), BODYSCAN_NONE);
    assert_int_equal(bodyscan_feed(b, "{\"model\":\"x\"}", 13), BODYSCAN_NONE);
    assert_int_equal(bodyscan_end(b), BODYSCAN_NONE);
    assert_false(bodyscan_is_object(b));
    bodyscan_free(b);
}

static void test_H069_charset(void **state)
{
    static const char *const types[] = {
        "application/json; charset=utf-16", "application/json;charset=\"UTF-32\"",
        "application/json; charset=utf-16le", "text/json; x=y; charset=utf-7",
        "application/problem+json; charset=utf-8; charset=utf-16",
        /* by which a lenient server may read JSON all the same */
        "text/plain; charset=utf-7", "application/json, x; charset=utf-7",
        "application/json; =; charset=utf-7", "application/json; charset =utf-7", ";charset=utf-7",
        "application/json; charset= utf-16", "application/json; charset=\"utf-16"};
    enum bodyscan_error why;

    (void)state;
    for (size_t i = 0; i < ARRAY_LEN(types); i++) {
        assert_null(bodyscan_new(slice_of(types[i]), NO_FIELD, CAP_BYTES, &why));
        assert_int_equal(why, BODYSCAN_E_BODY_ENCODING);
    }
    expect_bad(JSON, NO_FIELD, ((struct slice){"{\0\"\0m\0", 6}), BODYSCAN_E_BODY_ENCODING);
    assert_int_equal(mem_live_blocks(), 0);
}

static void test_H074_codings(void **state)
{
    (void)state;
    expect_found(JSON, SLICE("gzip"), deflated(GZIP, body_json), "gpt-4o");
    expect_found(JSON, SLICE("X-GZip"), deflated(GZIP, body_json), "gpt-4o");
    expect_found(JSON, SLICE(" gzip , identity,"), deflated(GZIP, body_json), "gpt-4o");
    expect_found(JSON, SLICE("deflate"), deflated(ZLIB, body_json), "gpt-4o");
    expect_found(JSON, SLICE("deflate"), deflated(RAW, body_json), "gpt-4o");
    expect_found(JSON, SLICE("zstd"), zstd(body_json), "gpt-4o");
    expect_found(JSON, SLICE("ZSTD"), zstd(body_json), "gpt-4o");
    expect_found(NO_FIELD, SLICE("gzip"), deflated(GZIP, body_json), "gpt-4o");
    expect_found(SLICE("multipart/form-data; boundary=b"), SLICE("gzip"),
                 deflated(GZIP, SLICE("--b\r\nContent-Disposition: form-data; name=model\r\n\r\nx\r\n--b--")),
                 "x");
    expect_bad(JSON, SLICE("gzip"), deflated(GZIP, SLICE("{\"model\":\"a\",\"Model\":1}")),
               BODYSCAN_E_MODEL_AMBIGUOUS);
    expect_bad(JSON, SLICE("zstd"), zstd(SLICE("{\"model\":1}")), BODYSCAN_E_MODEL_NOT_STRING);
    expect(JSON, SLICE("zstd"), zstd(SLICE("{}")), BODYSCAN_NONE, BODYSCAN_E_OK, "");
    expect(JSON, SLICE("gzip"), SLICE(""), BODYSCAN_NONE, BODYSCAN_E_OK, "");
    expect(JSON, SLICE("zstd"), SLICE(""), BODYSCAN_NONE, BODYSCAN_E_OK, "");
    expect(JSON, SLICE("deflate"), SLICE(""), BODYSCAN_NONE, BODYSCAN_E_OK, "");
}

static void test_H074_unknown_codings_are_415(void **state)
{
    static const char *const codings[] = {"br",       "compress",  "gzip, gzip", "gzip, zstd",
                                          "gzip;q=1", "gzip zstd", "aes128gcm"};
    enum bodyscan_error why;

    (void)state;
    for (size_t i = 0; i < ARRAY_LEN(codings); i++) {
        assert_null(bodyscan_new(JSON, slice_of(codings[i]), CAP_BYTES, &why));
        assert_int_equal(why, BODYSCAN_E_CODING_UNSUPPORTED);
        assert_int_equal(bodyscan_error_info(why)->status, 415);
    }
    assert_int_equal(mem_live_blocks(), 0);
}

/* A long body whose model comes last, through output pieces and in input pieces of many sizes. */
static void test_H074_long_compressed_bodies(void **state)
{
    static const struct slice tail = TEXT("\"}],\"model\":\"last\"}");
    size_t n = 700000;
    char *text = mem_must_zalloc(n);
    struct slice unchecked = {packed, 0};
    uint32_t seed = 7;

    (void)state;
    memcpy(text, "{\"messages\":[{\"content\":\"", 25);
    for (size_t i = 25; i < n - tail.n; i++) {
        seed = seed * 1664525 + 1013904223;
        text[i] = "abcdefgh "[(seed >> 24) % 9];
    }
    memcpy(text + n - tail.n, tail.p, tail.n);
    for (size_t piece = 1; piece <= sizeof(packed); piece = piece * 5 + 1) {
        assert_string_equal(run(JSON, SLICE("gzip"), deflated(GZIP, (struct slice){text, n}), 0, piece).model,
                            "last");
        assert_string_equal(
            run(JSON, SLICE("deflate"), deflated(RAW, (struct slice){text, n}), 0, piece).model, "last");
        assert_string_equal(run(JSON, SLICE("zstd"), zstd((struct slice){text, n}), 0, piece).model, "last");
        /* without a checksum nothing follows the last block, whose output outlasts the input */
        unchecked.n = ZSTD_compress(packed, sizeof(packed), text, n, 1);
        assert_string_equal(run(JSON, SLICE("zstd"), unchecked, 0, piece).model, "last");
    }
    mem_free(text);
}

static void test_H075_gzip_members_and_zstd_frames_in_a_row(void **state)
{
    static const uint8_t skippable[] = {0x5A, 0x2A, 0x4D, 0x18, 3, 0, 0, 0, 'x', 'y', 'z'};
    size_t n;

    (void)state;
    n = deflate_at(0, GZIP, body_json.p, 10);
    n += deflate_at(n, GZIP, "", 0);
    n += deflate_at(n, GZIP, body_json.p + 10, body_json.n - 10);
    expect_found(JSON, SLICE("gzip"), (struct slice){packed, n}, "gpt-4o");
    memcpy(packed, skippable, sizeof(skippable));
    n = sizeof(skippable);
    n += zstd_at(n, 0, body_json.p, 70);
    n += zstd_at(n, 0, body_json.p + 70, body_json.n - 70);
    memcpy(packed + n, skippable, sizeof(skippable));
    expect_found(JSON, SLICE("zstd"), (struct slice){packed, n + sizeof(skippable)}, "gpt-4o");
    /* a second member is more of the body, not a hiding place for another one */
    n = deflate_at(0, GZIP, body_json.p, body_json.n);
    n += deflate_at(n, GZIP, body_json.p, body_json.n);
    expect_bad(JSON, SLICE("gzip"), (struct slice){packed, n}, BODYSCAN_E_BODY_MALFORMED);
}

static void test_H075_corrupt(void **state)
{
    static const struct {
        struct slice coding;
        int kind; /* 0: zstd */
    } all[] = {{{"gzip", 4}, GZIP}, {{"deflate", 7}, ZLIB}, {{"deflate", 7}, RAW}, {{"zstd", 4}, 0}};

    (void)state;
    for (size_t i = 0; i < ARRAY_LEN(all); i++) {
        struct slice good = all[i].kind == 0 ? zstd(body_json)
                                             : deflated((enum wrapper)all[i].kind, body_json);

        for (size_t cut = 1; cut < good.n; cut++) {
            struct answer a = run(JSON, all[i].coding, (struct slice){good.p, cut}, 0, 7);

            assert_int_equal(a.verdict, BODYSCAN_BAD);
            assert_int_equal(a.error, BODYSCAN_E_CODING_CORRUPT);
        }
        packed[good.n] = 'x';
        expect_bad(JSON, all[i].coding, (struct slice){packed, good.n + 1}, BODYSCAN_E_CODING_CORRUPT);
        packed[good.n] = '\0';
        expect_bad(JSON, all[i].coding, (struct slice){packed, good.n + 1}, BODYSCAN_E_CODING_CORRUPT);
        if (all[i].kind == RAW)
            continue;
        packed[good.n - 1] ^= 1; /* of the checksum, or the length of gzip */
        expect_bad(JSON, all[i].coding, (struct slice){packed, good.n}, BODYSCAN_E_CODING_CORRUPT);
        if (all[i].kind != GZIP)
            continue;
        packed[good.n - 1] ^= 1;
        packed[good.n - 5] ^= 1; /* the CRC */
        expect_bad(JSON, all[i].coding, (struct slice){packed, good.n}, BODYSCAN_E_CODING_CORRUPT);
    }
    expect_bad(JSON, SLICE("gzip"), body_json, BODYSCAN_E_CODING_CORRUPT);
    expect_bad(JSON, SLICE("zstd"), body_json, BODYSCAN_E_CODING_CORRUPT);
    expect_bad(JSON, SLICE("gzip"), zstd(body_json), BODYSCAN_E_CODING_CORRUPT);
    expect_bad(JSON, SLICE("deflate"), SLICE("\x07\xff\xff"), BODYSCAN_E_CODING_CORRUPT);
    /* zstd 0.5 and its like: windows without our cap */
    expect_bad(JSON, SLICE("zstd"), SLICE("\x25\xb5\x2f\xfd\x00\x00\x00\x00"), BODYSCAN_E_CODING_CORRUPT);
}

static void test_H075_bombs(void **state)
{
    size_t n = 64 << 20;
    char *spaces = mem_must_zalloc(n);
    size_t live = mem_live_blocks();
    struct slice codings[] = {SLICE("gzip"), SLICE("deflate"), SLICE("zstd")};

    (void)state;
    memset(spaces, ' ', n);
    for (size_t i = 0; i < ARRAY_LEN(codings); i++) {
        struct slice bomb = i == 2 ? zstd((struct slice){spaces, n})
                                   : deflated(i == 0 ? GZIP : ZLIB, (struct slice){spaces, n});

        for (size_t piece = 1; piece <= bomb.n; piece = piece * 64) {
            struct answer a = run(JSON, codings[i], bomb, 0, piece);

            assert_int_equal(a.verdict, BODYSCAN_BAD);
            assert_int_equal(a.error, BODYSCAN_E_DECODED_TOO_LARGE);
            assert_int_equal(bodyscan_error_info(a.error)->status, 413);
        }
        /* exactly the cap is good, one byte more is not */
        spaces[0] = '{';
        spaces[CAP_BYTES - 1] = '}';
        bomb = i == 2 ? zstd((struct slice){spaces, CAP_BYTES})
                      : deflated(i == 0 ? GZIP : ZLIB, (struct slice){spaces, CAP_BYTES});
        assert_int_equal(run(JSON, codings[i], bomb, 0, 100).verdict, BODYSCAN_NONE);
        spaces[CAP_BYTES - 1] = ' ';
        bomb = i == 2 ? zstd((struct slice){spaces, CAP_BYTES + 1})
                      : deflated(i == 0 ? GZIP : ZLIB, (struct slice){spaces, CAP_BYTES + 1});
        assert_int_equal(run(JSON, codings[i], bomb, 0, 100).error, BODYSCAN_E_DECODED_TOO_LARGE);
        spaces[0] = ' ';
    }
    assert_int_equal(mem_live_blocks(), live);
    mem_free(spaces);
}

/* A bomb takes many turns, each of them short. */
static void test_H075_a_turn_is_bounded(void **state)
{
    size_t n = 64 << 20;
    char *spaces = mem_must_zalloc(n);

    (void)state;
    memset(spaces, ' ', n);
    memcpy(spaces, "{\"model\":\"m\"}", 13);
    for (int zlib_turn = 0; zlib_turn < 2; zlib_turn++) {
        struct slice body = zlib_turn ? deflated(GZIP, (struct slice){spaces, n})
                                      : zstd((struct slice){spaces, n});
        enum bodyscan_error why;
        struct bodyscan *b = bodyscan_new(JSON, zlib_turn ? SLICE("gzip") : SLICE("zstd"), n, &why);
        size_t turns = 0, used;

        assert_non_null(b);
        for (; body.n > 0; turns++) {
            assert_int_equal(bodyscan_feed_some(b, body.p, body.n, &used), BODYSCAN_FOUND);
            assert_true(used > 0 && used <= body.n);
            body.p += used;
            body.n -= used;
        }
        assert_true(turns >= (zlib_turn ? 30 : 1));
        assert_int_equal(bodyscan_end(b), BODYSCAN_FOUND);
        bodyscan_free(b);
    }
    mem_free(spaces);
}

static void test_H075_zstd_windows(void **state)
{
    /* a single segment of 4 GiB, so a window of as much; then a window of 2^41 bytes */
    static const uint8_t four_gib[] = {0x28, 0xB5, 0x2F, 0xFD, 0xE0, 0, 0, 0, 0, 1, 0, 0, 0, 1, 0, 0};
    static const uint8_t two_tib[] = {0x28, 0xB5, 0x2F, 0xFD, 0x00, 31 << 3, 1, 0, 0};

    (void)state;
    expect_bad(JSON, SLICE("zstd"), (struct slice){(const char *)four_gib, sizeof(four_gib)},
               BODYSCAN_E_DECODED_TOO_LARGE);
    expect_bad(JSON, SLICE("zstd"), (struct slice){(const char *)two_tib, sizeof(two_tib)},
               BODYSCAN_E_DECODED_TOO_LARGE);
    for (int window_log = 21; window_log <= 27; window_log++) {
        struct slice body = {packed, zstd_at(0, window_log, body_json.p, body_json.n)};
        struct answer a = run_whole(JSON, SLICE("zstd"), body);

        assert_int_equal(a.error, window_log <= 23 ? BODYSCAN_E_OK : BODYSCAN_E_DECODED_TOO_LARGE);
        assert_int_equal(a.verdict, window_log <= 23 ? BODYSCAN_FOUND : BODYSCAN_BAD);
    }
}

static void test_decoder_goes_with_the_end_of_the_body(void **state)
{
    struct slice codings[] = {SLICE("gzip"), SLICE("deflate"), SLICE("zstd")};
    enum bodyscan_error why;

    (void)state;
    for (size_t i = 0; i < ARRAY_LEN(codings); i++) {
        struct slice body = i == 2 ? zstd(body_json) : deflated(i == 0 ? GZIP : ZLIB, body_json);
        struct bodyscan *b = bodyscan_new(JSON, codings[i], CAP_BYTES, &why);

        assert_int_equal(bodyscan_feed(b, body.p, body.n), BODYSCAN_FOUND);
        assert_true(mem_live_blocks() > 1);
        assert_int_equal(bodyscan_end(b), BODYSCAN_FOUND);
        assert_int_equal(mem_live_blocks(), 1);
        assert_true(slice_eq(bodyscan_model(b), SLICE("gpt-4o")));
        bodyscan_free(b);
        b = bodyscan_new(JSON, codings[i], CAP_BYTES, &why);
        assert_int_equal(bodyscan_feed(b, "no such format", 14), BODYSCAN_BAD);
        assert_int_equal(mem_live_blocks(), 1);
        bodyscan_free(b);
        b = bodyscan_new(JSON, codings[i], CAP_BYTES, &why);
        bodyscan_free(b);
        assert_int_equal(mem_live_blocks(), 0);
    }
}

static void test_every_allocation_may_fail(void **state)
{
    struct slice types[] = {JSON, SLICE("multipart/form-data; boundary=b")};
    struct slice codings[] = {NO_FIELD, SLICE("gzip"), SLICE("deflate"), SLICE("zstd")};
    size_t failures = 0;

    (void)state;
    for (size_t t = 0; t < ARRAY_LEN(types); t++) {
        struct slice plain =
            t == 0 ? body_json
                   : SLICE("--b\r\nContent-Disposition: form-data; name=model\r\n\r\ngpt-4o\r\n--b--");

        for (size_t i = 0; i < ARRAY_LEN(codings); i++) {
            struct slice body = i == 0 ? plain : i == 3 ? zstd(plain) : deflated(i == 1 ? GZIP : ZLIB, plain);
            struct answer a;

            for (uint64_t nth = 1;; nth++) {
                mem_fail_at(nth, nth % 2 == 0);
                a = run(types[t], codings[i], body, 0, 9);
                mem_fail_at(0, false);
                assert_int_equal(mem_live_blocks(), 0);
                if (a.verdict == BODYSCAN_FOUND)
                    break;
                assert_int_equal(a.error, BODYSCAN_E_NO_MEMORY);
                assert_true(nth < 100);
                failures++;
            }
            assert_string_equal(a.model, "gpt-4o");
        }
    }
    assert_true(failures >= 12);
}

static void test_H076_forms(void **state)
{
    struct slice type = SLICE("multipart/form-data; boundary=\"x y\"");
    enum bodyscan_error why;

    (void)state;
    expect_found(
        type, NO_FIELD,
        SLICE("--x y\r\nContent-Disposition: form-data; name=\"model\"\r\n\r\nwhisper-1\r\n--x y--\r\n"),
        "whisper-1");
    expect_none(type, SLICE("--x y\r\nContent-Disposition: form-data; name=\"a\"\r\n\r\nb\r\n--x y--\r\n"));
    expect_bad(type, NO_FIELD, body_json, BODYSCAN_E_MULTIPART_MALFORMED);
    assert_null(bodyscan_new(SLICE("multipart/form-data"), NO_FIELD, CAP_BYTES, &why));
    assert_int_equal(why, BODYSCAN_E_MULTIPART_BOUNDARY);
    assert_int_equal(mem_live_blocks(), 0);
    expect_none(SLICE("multipart/related; boundary=b"), SLICE("--b\r\n"));
}

static void test_errors_are_told(void **state)
{
    (void)state;
    for (int e = BODYSCAN_E_OK + 1; e < BODYSCAN_E_COUNT; e++) {
        const struct bodyscan_error_info *info = bodyscan_error_info((enum bodyscan_error)e);

        assert_true(info->status == 400 || info->status == 413 || info->status == 415 || info->status == 503);
        assert_true(strlen(info->message) > 20 && info->message[strlen(info->message) - 1] == '.');
        assert_int_equal(strspn(info->reason, "abcdefghijklmnopqrstuvwxyz_"), strlen(info->reason));
        for (int other = BODYSCAN_E_OK; other < e; other++)
            assert_string_not_equal(info->reason, bodyscan_error_info((enum bodyscan_error)other)->reason);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_H061_plain_json),
        cmocka_unit_test(test_content_types_read_as_json),
        cmocka_unit_test(test_none_is_told_at_the_first_byte),
        cmocka_unit_test(test_H069_charset),
        cmocka_unit_test(test_H074_codings),
        cmocka_unit_test(test_H074_unknown_codings_are_415),
        cmocka_unit_test(test_H074_long_compressed_bodies),
        cmocka_unit_test(test_H075_gzip_members_and_zstd_frames_in_a_row),
        cmocka_unit_test(test_H075_corrupt),
        cmocka_unit_test(test_H075_bombs),
        cmocka_unit_test(test_H075_a_turn_is_bounded),
        cmocka_unit_test(test_H075_zstd_windows),
        cmocka_unit_test(test_decoder_goes_with_the_end_of_the_body),
        cmocka_unit_test(test_every_allocation_may_fail),
        cmocka_unit_test(test_H076_forms),
        cmocka_unit_test(test_errors_are_told),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
