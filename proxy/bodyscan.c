/*
 * bodyscan.c - see bodyscan.h. Picks the decoder by Content-Encoding, the
 * scanner by Content-Type, and passes the bytes from one to the other.
 */
#include "bodyscan.h"

#include "decode.h"
#include "mediatype.h"
#include "mem.h"
#include "multipart.h"
#include "scan.h"

struct bodyscan {
    enum bodyscan_verdict verdict_;
    enum bodyscan_error error_;
    bool ended_;
    struct decode *decode_;  /* NULL: a plain body, or decoding is over */
    struct multipart *form_; /* NULL: json_ is the one in use */
    struct scan json_;
};

static const struct bodyscan_error_info error_info[BODYSCAN_E_COUNT] = {
#define X(name, status, reason, message) [BODYSCAN_E_##name] = {status, reason, message},
    BODYSCAN_ERRORS(X)
#undef X
};

const struct bodyscan_error_info *bodyscan_error_info(enum bodyscan_error e)
{
    BUG_ON((unsigned)e >= BODYSCAN_E_COUNT);
    return &error_info[e];
}

static bool is_json(struct slice type)
{
    static const struct slice suffix = {"+json", 5};

    if (slice_ieq(type, SLICE("application/json")) || slice_ieq(type, SLICE("text/json")))
        return true;
    return type.n > suffix.n && slice_ieq((struct slice){type.p + type.n - suffix.n, suffix.n}, suffix);
}

/* Of parameters that cannot be read: a lenient server may find one there all the same. */
static bool mentions_charset(struct slice text)
{
    static const struct slice word = {"charset", 7};

    for (; text.n >= word.n; text.p++, text.n--)
        if (slice_ieq((struct slice){text.p, word.n}, word))
            return true;
    return false;
}

/*
 * Charsets in which ASCII stands for itself. In any other one (UTF-16, UTF-7,
 * EBCDIC) the structure seen here is not the one that a server sees that heeds
 * the parameter.
 */
static bool has_alien_charset(struct slice params)
{
    static const struct slice good[] = {{"utf-8", 5},       {"utf8", 4},   {"us-ascii", 8},     {"ascii", 5},
                                        {"iso-8859-1", 10}, {"latin1", 6}, {"windows-1252", 12}};
    struct mediatype_param param;

    for (;;) {
        const struct slice rest = params; /* a parameter that cannot be read is used up in part */
        enum mediatype_step step = mediatype_next_param(&params, &param);
        size_t i;

        if (step != MEDIATYPE_PARAM)
            return step == MEDIATYPE_BAD && mentions_charset(rest);
        if (!slice_ieq(param.name, SLICE("charset")))
            continue;
        for (i = 0; i < ARRAY_LEN(good) && !slice_ieq(param.value, good[i]); i++)
            ;
        if (i == ARRAY_LEN(good))
            return true;
    }
}

static enum bodyscan_error open_scanner(struct bodyscan *b, struct slice content_type)
{
    struct slice params = content_type, type = mediatype_take_type(&params);

    if (slice_ieq(type, SLICE("multipart/form-data"))) {
        b->form_ = mem_alloc(sizeof(*b->form_));
        return b->form_ == NULL ? BODYSCAN_E_NO_MEMORY : multipart_init(b->form_, content_type);
    }
    if (has_alien_charset(params)) /* of whatever type: many a server reads JSON without asking for it */
        return BODYSCAN_E_BODY_ENCODING;
    scan_init(&b->json_, is_json(type) ? SCAN_JSON : SCAN_SNIFF);
    return BODYSCAN_E_OK;
}

static enum bodyscan_error open_decoder(struct bodyscan *b, struct slice content_encoding, uint64_t cap_bytes)
{
    enum decode_coding coding;

    if (!decode_parse_coding(content_encoding, &coding))
        return BODYSCAN_E_CODING_UNSUPPORTED;
    if (coding == DECODE_IDENTITY)
        return BODYSCAN_E_OK;
    b->decode_ = decode_new(coding, cap_bytes);
    return b->decode_ == NULL ? BODYSCAN_E_NO_MEMORY : BODYSCAN_E_OK;
}

struct bodyscan *bodyscan_new(struct slice content_type, struct slice content_encoding,
                              uint64_t decoded_cap_bytes, enum bodyscan_error *why)
{
    struct bodyscan *b = mem_zalloc(sizeof(*b));

    *why = BODYSCAN_E_NO_MEMORY;
    if (b == NULL)
        return NULL;
    b->verdict_ = BODYSCAN_MORE;
    *why = open_scanner(b, content_type);
    if (*why == BODYSCAN_E_OK)
        *why = open_decoder(b, content_encoding, decoded_cap_bytes);
    if (*why == BODYSCAN_E_OK)
        return b;
    bodyscan_free(b);
    return NULL;
}

static void close_decoder(struct bodyscan *b)
{
    decode_free(b->decode_);
    b->decode_ = NULL;
}

void bodyscan_free(struct bodyscan *b)
{
    if (b == NULL)
        return;
    close_decoder(b);
    mem_free(b->form_);
    mem_free(b);
}

/* The only writer of the verdict. A final one needs no decoder any more. */
static enum bodyscan_verdict settle(struct bodyscan *b, enum bodyscan_verdict v, enum bodyscan_error e)
{
    b->verdict_ = v;
    b->error_ = v == BODYSCAN_BAD ? e : BODYSCAN_E_OK;
    if (v == BODYSCAN_BAD || v == BODYSCAN_NONE)
        close_decoder(b);
    return v;
}

static enum bodyscan_error scanner_error(const struct bodyscan *b)
{
    return b->form_ != NULL ? multipart_error(b->form_) : scan_error(&b->json_);
}

static enum bodyscan_verdict scanner_feed(struct bodyscan *b, const void *bytes, size_t n)
{
    enum bodyscan_verdict v = b->form_ != NULL ? multipart_feed(b->form_, bytes, n)
                                               : scan_feed(&b->json_, bytes, n);

    return settle(b, v, scanner_error(b));
}

static bool is_final(const struct bodyscan *b)
{
    return b->verdict_ == BODYSCAN_NONE || b->verdict_ == BODYSCAN_BAD;
}

/* Decodes all of in and scans what comes out; adds that to *decoded_bytes. */
static void decode_and_scan(struct bodyscan *b, struct slice in, uint64_t *decoded_bytes)
{
    struct slice out;
    bool again = true;

    while (again) {
        again = decode_next(b->decode_, &in, &out);
        *decoded_bytes += out.n;
        if (out.n > 0)
            (void)scanner_feed(b, out.p, out.n);
        if (is_final(b))
            return;
    }
    if (decode_error(b->decode_) != BODYSCAN_E_OK)
        settle(b, BODYSCAN_BAD, decode_error(b->decode_));
}

/* Input goes in by small steps, each of them worth about a MiB at most in deflate (1032 to 1, and
 * zstd, which can be denser, is as much faster): so a turn ends soon after its budget. */
enum { STEP_BYTES = 1024 };

enum bodyscan_verdict bodyscan_feed_some(struct bodyscan *b, const void *bytes, size_t n, size_t *used)
{
    const char *p = bytes;
    uint64_t decoded_bytes = 0;
    size_t at = 0;

    BUG_ON(b->ended_);
    *used = n;
    if (is_final(b) || n == 0)
        return b->verdict_;
    if (b->decode_ == NULL)
        return scanner_feed(b, bytes, n);
    while (at < n && decoded_bytes < BODYSCAN_TURN_BYTES && !is_final(b)) {
        size_t step = size_min(n - at, STEP_BYTES);

        decode_and_scan(b, (struct slice){p + at, step}, &decoded_bytes);
        at += step;
    }
    if (!is_final(b))
        *used = at;
    return b->verdict_;
}

enum bodyscan_verdict bodyscan_feed(struct bodyscan *b, const void *bytes, size_t n)
{
    const char *p = bytes;
    enum bodyscan_verdict v;
    size_t used;

    do {
        v = bodyscan_feed_some(b, p, n, &used);
        n -= used;
        p = n > 0 ? p + used : p;
    } while (n > 0);
    return v;
}

enum bodyscan_verdict bodyscan_end(struct bodyscan *b)
{
    enum bodyscan_error cut = b->decode_ != NULL ? decode_end(b->decode_) : BODYSCAN_E_OK;
    enum bodyscan_verdict v;

    b->ended_ = true;
    if (is_final(b))
        return b->verdict_;
    if (cut != BODYSCAN_E_OK)
        return settle(b, BODYSCAN_BAD, cut);
    close_decoder(b);
    v = b->form_ != NULL ? multipart_end(b->form_) : scan_end(&b->json_);
    return settle(b, v, scanner_error(b));
}

struct slice bodyscan_model(const struct bodyscan *b)
{
    if (b->verdict_ != BODYSCAN_FOUND)
        return (struct slice){NULL, 0};
    return b->form_ != NULL ? multipart_model(b->form_) : scan_model(&b->json_);
}

enum bodyscan_error bodyscan_error(const struct bodyscan *b)
{
    return b->error_;
}

bool bodyscan_is_object(const struct bodyscan *b)
{
    return b->form_ != NULL || scan_is_object(&b->json_);
}
