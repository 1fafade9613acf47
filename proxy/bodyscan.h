/*
 * bodyscan.h - finds the model that a request body names, while the body goes
 * by: the one door to the decoders (Content-Encoding) and the scanners
 * (Content-Type) behind it.
 *
 *                     decode.c             scan.c        JSON, and whatever begins with '{'
 *   body bytes ──►  gzip deflate zstd ──►  multipart.c   multipart/form-data
 *
 * The body itself is only looked at: it is neither kept nor changed, and what
 * is forwarded are the original bytes. A scan costs half a KiB, or 5 KiB for a
 * form, plus the decoder's memory (64 KiB for gzip; for zstd the window that
 * the frame asks for, at most 8 MiB), which goes at the end of the body, at the
 * first final verdict, or with bodyscan_free.
 *
 * The verdict for a body does not depend on how it was split into feeds. (One
 * reservation: a compressed body that is corrupt *and* otherwise worth
 * refusing may get either reason, since the decoders work by blocks.)
 */
#ifndef LG_BODYSCAN_H
#define LG_BODYSCAN_H

#include "bodyscan_verdict.h"
#include "str.h"

/* Goes into the Accept-Encoding field of a 415 (RFC 9110 section 12.5.3). */
#define BODYSCAN_ACCEPT_ENCODING "gzip, deflate, zstd, identity"

struct bodyscan;

/*
 * Begins a scan. content_type and content_encoding are the field values, empty
 * when the field is absent; several Content-Encoding lines come joined by ", ".
 * They are not kept after the return.
 *
 * decoded_cap_bytes bounds what a compressed body may decode to; it does not
 * apply to a plain body, which costs no memory here.
 *
 * NULL: *why says the reason (BODYSCAN_E_CODING_UNSUPPORTED, _MULTIPART_BOUNDARY,
 * _BODY_ENCODING, _NO_MEMORY). Owner: the caller, bodyscan_free.
 *
 * What is scanned as what:
 *   multipart/form-data                          as a form (RFC 7578)
 *   application/json, text/json, any +json       as JSON (RFC 8259)
 *   any other type, or none                      as JSON when the first byte that is no space is '{';
 *                                                else BODYSCAN_NONE at that byte
 * The last because clients forget the header or let curl put its form type
 * there, and many servers never look at it: a limit must not be dodged by it.
 */
MUST_CHECK struct bodyscan *bodyscan_new(struct slice content_type, struct slice content_encoding,
                                         uint64_t decoded_cap_bytes, enum bodyscan_error *why);

/* Frees the scan and its decoder; NULL is a no-op. */
void bodyscan_free(struct bodyscan *b);

/*
 * Looks at the next n bytes of the body (n may be 0). MORE, FOUND, NONE or BAD;
 * the latter two are final: later feeds return them again at no cost.
 *
 * A few KiB may decode to decoded_cap_bytes, at some ms per MiB: an event loop
 * takes bodyscan_feed_some instead.
 */
enum bodyscan_verdict bodyscan_feed(struct bodyscan *b, const void *bytes, size_t n);

/*
 * As bodyscan_feed, but stops once BODYSCAN_TURN_BYTES have been decoded in this call, so that
 * one body cannot hold up the others. *used is how many bytes were looked at: fewer than n mean
 * that the rest is to be fed in a later turn. A plain body, and a final verdict, use all n at once.
 */
enum { BODYSCAN_TURN_BYTES = 1 << 20 };
enum bodyscan_verdict bodyscan_feed_some(struct bodyscan *b, const void *bytes, size_t n, size_t *used);

/*
 * The body is complete: FOUND, NONE or BAD. A body that ends in the middle of
 * a value is BAD. An empty body is NONE. Nothing may be fed after this.
 */
enum bodyscan_verdict bodyscan_end(struct bodyscan *b);

/*
 * The model, unescaped: valid UTF-8 without control characters, 1 to 256 bytes;
 * empty unless FOUND. Lives as long as b.
 */
struct slice bodyscan_model(const struct bodyscan *b);

/* Why the verdict is BAD; BODYSCAN_E_OK otherwise. */
enum bodyscan_error bodyscan_error(const struct bodyscan *b);

/* The body is a JSON object or a form: so NONE means that `model` is missing in it. */
bool bodyscan_is_object(const struct bodyscan *b);

/* What to tell the client of an error. The strings are static. */
struct bodyscan_error_info {
    int status;          /* 400, 413, 415, 503 */
    const char *reason;  /* one word, for x-leasegate-reason, log and metric label */
    const char *message; /* a sentence for people */
};
const struct bodyscan_error_info *bodyscan_error_info(enum bodyscan_error e);

#endif
