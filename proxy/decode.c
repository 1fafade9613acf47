/*
 * decode.c - see decode.h.
 *
 * decode_next makes one library call, from the input (or the few bytes of it that
 * were held back) to the one piece of output.
 *
 * A body may be several gzip members (RFC 1952 section 2.2) or zstd frames
 * (RFC 8878 section 3.1) in a row; `between_` is true where it may end. What follows
 * and is neither is garbage, and an error.
 */
#include "decode.h"

#include "mem.h"

#define ZSTD_STATIC_LINKING_ONLY /* for ZSTD_createDStream_advanced: memory through mem.h */
#include <zlib.h>
#include <zstd.h>
#include <zstd_errors.h>

enum {
    WINDOW_LOG_MAX = 23, /* 8 MiB: RFC 9659 section 3 */
    MAGIC_BYTES = 4,
};

struct decode {
    enum decode_coding coding_;
    enum bodyscan_error error_;
    bool between_; /* at the beginning, or right behind a complete member or frame */
    bool over_;    /* a deflate stream has ended: there is only one */
    bool full_;    /* the last piece was full: the library may hold more of it */
    bool inflate_open_;
    uint64_t left_bytes_; /* until the cap */
    z_stream inflate_;
    ZSTD_DStream *zstd_;
    uint8_t head_[MAGIC_BYTES]; /* the first bytes, held until they tell what follows */
    size_t head_n_;
    size_t head_used_; /* of those, given to the library */
    char piece_[DECODE_PIECE_BYTES];
};

bool decode_parse_coding(struct slice content_encoding, enum decode_coding *out)
{
    static const struct {
        struct slice name;
        enum decode_coding coding;
    } known[] = {
        {{"identity", 8}, DECODE_IDENTITY}, {{"gzip", 4}, DECODE_GZIP}, {{"x-gzip", 6}, DECODE_GZIP},
        {{"deflate", 7}, DECODE_DEFLATE},   {{"zstd", 4}, DECODE_ZSTD},
    };
    struct slice element;

    *out = DECODE_IDENTITY;
    while (slice_next_element(&content_encoding, &element)) {
        size_t i;

        if (element.n == 0)
            continue;
        for (i = 0; i < ARRAY_LEN(known) && !slice_ieq(element, known[i].name); i++)
            ;
        if (i == ARRAY_LEN(known))
            return false;
        if (known[i].coding == DECODE_IDENTITY)
            continue;
        if (*out != DECODE_IDENTITY)
            return false;
        *out = known[i].coding;
    }
    return true;
}

static void *zlib_alloc(void *unused, unsigned items, unsigned size)
{
    size_t n;

    (void)unused;
    if (__builtin_mul_overflow((size_t)items, (size_t)size, &n) || n == 0)
        return NULL;
    return mem_alloc(n);
}

static void *zstd_alloc(void *unused, size_t n)
{
    (void)unused;
    return n == 0 ? NULL : mem_alloc(n);
}

static void library_free(void *unused, void *p)
{
    (void)unused;
    mem_free(p);
}

/* 16 + 15: a gzip wrapper; 15: a zlib one; -15: none. False: no memory. */
static bool open_inflate(struct decode *d, int window_bits)
{
    d->inflate_.zalloc = zlib_alloc;
    d->inflate_.zfree = library_free;
    d->inflate_open_ = inflateInit2(&d->inflate_, window_bits) == Z_OK;
    return d->inflate_open_;
}

static bool open_zstd(struct decode *d)
{
    d->zstd_ = ZSTD_createDStream_advanced((ZSTD_customMem){zstd_alloc, library_free, NULL});
    return d->zstd_ != NULL &&
           !ZSTD_isError(ZSTD_DCtx_setParameter(d->zstd_, ZSTD_d_windowLogMax, WINDOW_LOG_MAX));
}

struct decode *decode_new(enum decode_coding coding, uint64_t cap_bytes)
{
    struct decode *d = mem_alloc(sizeof(*d));
    bool ok = true;

    if (d == NULL)
        return NULL;
    memset(d, 0, offsetof(struct decode, piece_));
    d->coding_ = coding;
    d->between_ = true;
    d->left_bytes_ = cap_bytes;
    if (coding == DECODE_GZIP)
        ok = open_inflate(d, 16 + MAX_WBITS);
    else if (coding == DECODE_ZSTD)
        ok = open_zstd(d);
    if (!ok) {
        decode_free(d);
        return NULL;
    }
    return d;
}

void decode_free(struct decode *d)
{
    if (d == NULL)
        return;
    if (d->inflate_open_)
        inflateEnd(&d->inflate_);
    ZSTD_freeDStream(d->zstd_);
    mem_free(d);
}

/*
 * zlib with its two-byte head (RFC 1950 section 2.2), which is what the field
 * means, or the bare deflate that some clients send: the head has a check in
 * it that tells.
 */
static bool deflate_has_head(const uint8_t *head)
{
    return (head[0] & 0x0F) == Z_DEFLATED && head[0] >> 4 <= MAX_WBITS - 8 &&
           (head[0] << 8 | head[1]) % 31 == 0;
}

/* RFC 8878 sections 3.1.1 and 3.1.2. Older formats know no window cap. */
static bool zstd_has_magic(const uint8_t *head)
{
    uint32_t magic = head[0] | (uint32_t)head[1] << 8 | (uint32_t)head[2] << 16 | (uint32_t)head[3] << 24;

    return magic == ZSTD_MAGICNUMBER || (magic & ZSTD_MAGIC_SKIPPABLE_MASK) == ZSTD_MAGIC_SKIPPABLE_START;
}

/* ---- one library call each: moves *in, writes into the piece, returns the bytes written ---- */

static size_t step_inflate(struct decode *d, struct slice *in)
{
    z_stream *z = &d->inflate_;
    uInt offered = (uInt)size_min(in->n, 1U << 30);
    int rc;

    z->next_in = (z_const Bytef *)(uintptr_t)in->p;
    z->avail_in = offered;
    z->next_out = (Bytef *)d->piece_;
    z->avail_out = DECODE_PIECE_BYTES;
    rc = inflate(z, Z_NO_FLUSH);
    in->p += offered - z->avail_in;
    in->n -= offered - z->avail_in;
    d->between_ = rc == Z_STREAM_END;
    if (rc == Z_STREAM_END && d->coding_ == DECODE_GZIP)
        rc = inflateReset(z);
    else if (rc == Z_STREAM_END)
        d->over_ = true;
    if (rc == Z_MEM_ERROR)
        d->error_ = BODYSCAN_E_NO_MEMORY;
    else if (rc != Z_OK && rc != Z_STREAM_END && rc != Z_BUF_ERROR)
        d->error_ = BODYSCAN_E_CODING_CORRUPT;
    return DECODE_PIECE_BYTES - z->avail_out;
}

static enum bodyscan_error zstd_error(size_t rc)
{
    switch (ZSTD_getErrorCode(rc)) {
    case ZSTD_error_memory_allocation:
        return BODYSCAN_E_NO_MEMORY;
    case ZSTD_error_frameParameter_windowTooLarge:
        return BODYSCAN_E_DECODED_TOO_LARGE;
    default:
        return BODYSCAN_E_CODING_CORRUPT;
    }
}

static size_t step_zstd(struct decode *d, struct slice *in)
{
    ZSTD_inBuffer from = {in->p, in->n, 0};
    ZSTD_outBuffer to = {d->piece_, DECODE_PIECE_BYTES, 0};
    size_t rc = ZSTD_decompressStream(d->zstd_, &to, &from);

    in->p += from.pos;
    in->n -= from.pos;
    d->between_ = rc == 0;
    if (rc == 0) /* the next frame's magic is looked at again */
        d->head_n_ = d->head_used_ = 0;
    else if (ZSTD_isError(rc))
        d->error_ = zstd_error(rc);
    return to.pos;
}

/*
 * Holds back the bytes by which the format is told: 2 of deflate, 4 of each
 * zstd frame, none of gzip. True: they are complete and good.
 */
static bool take_head(struct decode *d, struct slice *in)
{
    size_t wanted = d->coding_ == DECODE_DEFLATE ? 2 : d->coding_ == DECODE_ZSTD ? MAGIC_BYTES : 0;

    if (d->head_n_ == wanted)
        return true;
    while (in->n > 0 && d->head_n_ < wanted) {
        d->head_[d->head_n_++] = (uint8_t)*in->p++;
        in->n--;
        d->between_ = false;
    }
    if (d->head_n_ < wanted)
        return false;
    if (d->coding_ == DECODE_DEFLATE && !open_inflate(d, deflate_has_head(d->head_) ? MAX_WBITS : -MAX_WBITS))
        d->error_ = BODYSCAN_E_NO_MEMORY;
    else if (d->coding_ == DECODE_ZSTD && !zstd_has_magic(d->head_))
        d->error_ = BODYSCAN_E_CODING_CORRUPT;
    return d->error_ == BODYSCAN_E_OK;
}

bool decode_next(struct decode *d, struct slice *in, struct slice *out)
{
    struct slice head, *from = in;
    size_t n;

    *out = (struct slice){d->piece_, 0};
    if (d->error_ != BODYSCAN_E_OK || !take_head(d, in))
        return false;
    head = (struct slice){(const char *)d->head_ + d->head_used_, d->head_n_ - d->head_used_};
    if (head.n > 0)
        from = &head;
    if (from->n == 0 && (d->between_ || !d->full_))
        return false;
    if (d->over_) {
        d->error_ = BODYSCAN_E_CODING_CORRUPT;
        return false;
    }
    n = d->coding_ == DECODE_ZSTD ? step_zstd(d, from) : step_inflate(d, from);
    if (from == &head)
        d->head_used_ = d->head_n_ - head.n;
    d->full_ = n == DECODE_PIECE_BYTES;
    if (n > d->left_bytes_) {
        n = (size_t)d->left_bytes_;
        d->error_ = BODYSCAN_E_DECODED_TOO_LARGE;
    }
    d->left_bytes_ -= n;
    out->n = n;
    return d->error_ == BODYSCAN_E_OK;
}

enum bodyscan_error decode_error(const struct decode *d)
{
    return d->error_;
}

enum bodyscan_error decode_end(const struct decode *d)
{
    if (d->error_ == BODYSCAN_E_OK && !d->between_)
        return BODYSCAN_E_CODING_CORRUPT;
    return d->error_;
}
