/*
 * bodyscan_verdict.h - the words in which the model scanners answer: where a
 * scan stands, and each way in which a body can be refused.
 *
 * One table for scan.c, multipart.c, decode.c and bodyscan.c, so that no error
 * is translated on its way up: the row says what the client is told.
 */
#ifndef LG_BODYSCAN_VERDICT_H
#define LG_BODYSCAN_VERDICT_H

#include "base.h"

enum bodyscan_verdict {
    BODYSCAN_MORE,  /* nothing known yet; feed on */
    BODYSCAN_FOUND, /* the model is known; feed on all the same, to catch a second one */
    BODYSCAN_NONE,  /* final: no model in this body; nothing that follows changes that */
    BODYSCAN_BAD,   /* final: to be refused; the error says why */
};

/* X(name, HTTP status, reason word, message for the client: what is wrong and what to do) */
#define BODYSCAN_ERRORS(X)                                                                                   \
    X(OK, 200, "ok", "")                                                                                     \
    X(MODEL_DUPLICATE, 400, "model_duplicate",                                                               \
      "The request body names 'model' more than once. Send it exactly once.")                                \
    X(MODEL_AMBIGUOUS, 400, "model_ambiguous",                                                               \
      "The request body names 'model' in a way that servers read differently (another letter case, a file "  \
      "part, an encoded name). Send one plain field 'model'.")                                               \
    X(MODEL_NOT_STRING, 400, "model_not_string",                                                             \
      "The value of 'model' is not a string. Send it as a string.")                                          \
    X(MODEL_INVALID, 400, "model_invalid",                                                                   \
      "The value of 'model' holds a control character, a lone surrogate, an invalid escape or invalid "      \
      "UTF-8. Send the plain name.")                                                                         \
    X(MODEL_EMPTY, 400, "model_empty", "The value of 'model' is empty. Send the name of a model.")           \
    X(MODEL_TOO_LONG, 400, "model_too_long", "The value of 'model' is longer than 256 bytes.")               \
    X(BODY_ENCODING, 400, "body_encoding",                                                                   \
      "The request body is not in UTF-8. Send JSON in UTF-8 (RFC 8259).")                                    \
    X(BODY_TOO_DEEP, 400, "body_too_deep", "The JSON body is nested deeper than 1024 levels.")               \
    X(BODY_MALFORMED, 400, "body_malformed",                                                                 \
      "The request body is not one well-formed JSON value, so its 'model' cannot be told for certain.")      \
    X(MULTIPART_BOUNDARY, 400, "multipart_boundary",                                                         \
      "The Content-Type multipart/form-data has no single valid boundary parameter. Let the HTTP client "    \
      "library set this header.")                                                                            \
    X(MULTIPART_MALFORMED, 400, "multipart_malformed",                                                       \
      "The multipart/form-data body is malformed or was cut short, so its 'model' cannot be told for "       \
      "certain. Lines end with CRLF, the last boundary with '--' (RFC 7578).")                               \
    X(MULTIPART_HEADERS, 400, "multipart_headers",                                                           \
      "The headers of a multipart part are longer than allowed.")                                            \
    X(CODING_UNSUPPORTED, 415, "content_encoding_unsupported",                                               \
      "This Content-Encoding cannot be read here. Use one of gzip, deflate, zstd, or send the body plain.")  \
    X(CODING_CORRUPT, 400, "content_encoding_corrupt",                                                       \
      "The compressed request body is corrupt, cut short, or followed by other bytes.")                      \
    X(DECODED_TOO_LARGE, 413, "decoded_body_too_large",                                                      \
      "The compressed request body is larger than allowed once decoded, or needs a larger window than 8 "    \
      "MiB. Send less, or send it uncompressed.")                                                            \
    X(NO_MEMORY, 503, "out_of_memory", "The gateway is out of memory. Try again later.")

enum bodyscan_error {
#define X(name, status, reason, message) BODYSCAN_E_##name,
    BODYSCAN_ERRORS(X)
#undef X
        BODYSCAN_E_COUNT
};

#endif
