/*
 * fuzz_bodyscan.c - proxy/bodyscan.c whole: every type, every coding, any split.
 *
 * Input: byte 0 picks the Content-Type, byte 1 the Content-Encoding, byte 2 the
 * seed of the splits and whether the text is compressed here first, the rest is the body.
 *
 * Demanded: no crash, no leak; the same verdict and model at every split (of a
 * corrupt compressed body only that it is refused, see bodyscan.h); a plain
 * body and the same one compressed get the same answer; and a form in which the
 * fuzzer's own plain search finds no `model` has none.
 */
#include "bodyscan.h"
#include "mem.h"

#include <stdlib.h>
#include <string.h>
#include <zlib.h>
#include <zstd.h>

int LLVMFuzzerTestOneInput(const uint8_t *input, size_t size);

enum { CAP_BYTES = 1 << 20 };

static const char *const types[] = {"application/json", "", "multipart/form-data; boundary=b",
                                    "multipart/form-data; boundary=\"----x\"",
                                    "application/x-www-form-urlencoded"};
static const char *const codings[] = {"", "gzip", "deflate", "zstd"};

struct answer {
    enum bodyscan_verdict verdict;
    enum bodyscan_error error;
    size_t n;
    char model[256];
};

static void demand(bool ok)
{
    if (!ok)
        abort();
}

static void run(struct answer *a, const char *type, const char *coding, struct slice body, uint32_t seed)
{
    struct bodyscan *b = bodyscan_new(slice_of(type), slice_of(coding), CAP_BYTES, &a->error);
    enum bodyscan_verdict last = BODYSCAN_MORE;

    demand(b != NULL);
    for (size_t at = 0; at < body.n;) {
        size_t piece = body.n;
        enum bodyscan_verdict v;

        if (seed != 0) {
            seed = seed * 1664525 + 1013904223;
            piece = seed >> 31 != 0 ? 1 : (seed >> 16) % 150 + 1;
        }
        piece = size_min(piece, body.n - at);
        v = bodyscan_feed(b, body.p + at, piece);
        demand(v == last || last == BODYSCAN_MORE || (last == BODYSCAN_FOUND && v == BODYSCAN_BAD));
        last = v;
        at += piece;
    }
    a->verdict = bodyscan_end(b);
    a->error = bodyscan_error(b);
    a->n = bodyscan_model(b).n;
    demand(a->verdict != BODYSCAN_MORE && (a->verdict == BODYSCAN_FOUND) == (a->n > 0));
    demand((a->verdict == BODYSCAN_BAD) == (a->error != BODYSCAN_E_OK));
    if (a->n > 0)
        memcpy(a->model, bodyscan_model(b).p, a->n);
    bodyscan_free(b);
    demand(mem_live_blocks() == 0);
}

static void demand_same(const struct answer *a, const struct answer *b, bool same_error)
{
    demand(a->verdict == b->verdict && a->n == b->n && memcmp(a->model, b->model, a->n) == 0);
    demand(!same_error || a->error == b->error);
}

/* The body in the coding given. Owner: the caller, free. */
static struct slice compress_body(size_t coding, struct slice body)
{
    size_t room = compressBound(body.n) + ZSTD_compressBound(body.n) + 64;
    char *out = malloc(room);
    z_stream z;

    demand(out != NULL);
    if (coding == 3)
        return (struct slice){out, ZSTD_compress(out, room, body.p, body.n, 1)};
    memset(&z, 0, sizeof(z));
    demand(deflateInit2(&z, 1, Z_DEFLATED, coding == 1 ? 31 : 15, 8, Z_DEFAULT_STRATEGY) == Z_OK);
    z.next_in = (z_const Bytef *)(uintptr_t)body.p;
    z.avail_in = (uInt)body.n;
    z.next_out = (Bytef *)out;
    z.avail_out = (uInt)room;
    demand(deflate(&z, Z_FINISH) == Z_STREAM_END);
    room = z.total_out;
    deflateEnd(&z);
    return (struct slice){out, room};
}

int LLVMFuzzerTestOneInput(const uint8_t *input, size_t size)
{
    const char *type, *coding;
    struct slice body, compressed;
    struct answer whole, other;

    if (size < 3)
        return 0;
    type = types[input[0] % ARRAY_LEN(types)];
    coding = codings[input[1] % ARRAY_LEN(codings)];
    body = (struct slice){(const char *)input + 3, size - 3};
    run(&whole, type, "", body, 0);
    if (strncmp(type, "multipart", 9) == 0)
        demand(whole.verdict != BODYSCAN_FOUND || memmem(body.p, body.n, "model", 5) != NULL);
    if (*coding == '\0') {
        run(&other, type, "", body, input[2] + 1U);
        demand_same(&whole, &other, true);
        return 0;
    }
    if ((input[2] & 1) != 0 && body.n > 0) {
        compressed = compress_body(input[1] % ARRAY_LEN(codings), body);
        run(&other, type, coding, compressed, input[2]);
        free((void *)(uintptr_t)compressed.p);
        demand_same(&whole, &other, true);
        return 0;
    }
    run(&whole, type, coding, body, 0);
    run(&other, type, coding, body, input[2] + 1U);
    if (whole.verdict == BODYSCAN_NONE ||
        other.verdict == BODYSCAN_NONE) /* it may be told before the fault is met */
        demand(whole.verdict != BODYSCAN_FOUND && other.verdict != BODYSCAN_FOUND);
    else
        demand_same(&whole, &other, false);
    return 0;
}
