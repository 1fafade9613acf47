/*
 * fuzz_scan.c - proxy/scan.c against the plain reference, whole, byte by byte,
 * and split at places that the input itself chooses.
 *
 * Input: byte 0 the mode and the seed of the splits, the rest the text.
 */
#include "scan_reference.h"

#include <stdlib.h>

int LLVMFuzzerTestOneInput(const uint8_t *input, size_t size);

static enum bodyscan_verdict scan_split(struct scan *s, enum scan_mode mode, const uint8_t *text, size_t n,
                                        uint32_t seed)
{
    scan_init(s, mode);
    for (size_t at = 0; at < n;) {
        size_t piece = 1;

        if (seed != 0) {
            seed = seed * 1664525 + 1013904223;
            piece = (seed >> 16) % ((seed >> 8) % 4 == 0 ? 200 : 20) + 1;
        }
        piece = size_min(piece, n - at);
        (void)scan_feed(s, text + at, piece);
        at += piece;
    }
    return scan_end(s);
}

static void demand(bool ok)
{
    if (!ok)
        abort();
}

static bool same(const struct scan *a, const struct scan *b)
{
    return scan_verdict(a) == scan_verdict(b) && scan_error(a) == scan_error(b) &&
           slice_eq(scan_model(a), scan_model(b));
}

int LLVMFuzzerTestOneInput(const uint8_t *input, size_t size)
{
    struct scan whole, split;
    struct reference r;
    enum scan_mode mode;
    enum bodyscan_verdict v;

    if (size == 0)
        return 0;
    mode = (input[0] & 1) != 0 ? SCAN_SNIFF : SCAN_JSON;
    scan_init(&whole, mode);
    (void)scan_feed(&whole, input + 1, size - 1);
    v = scan_end(&whole);
    demand(reference_agrees(&r, reference_scan(&r, mode, input + 1, size - 1), &whole, v));
    (void)scan_split(&split, mode, input + 1, size - 1, 0);
    demand(same(&whole, &split));
    (void)scan_split(&split, mode, input + 1, size - 1, input[0] + 1U);
    demand(same(&whole, &split));
    return 0;
}
