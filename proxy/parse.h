/*
 * parse.h - bytes to heads and bodies, strictly.
 *
 * A head is parsed when all of it is there: parse_head_end finds its end while
 * the bytes arrive (and refuses what no two parsers would read alike: bare LF,
 * bare CR, obs-fold, empty names, too much of anything); then llhttp checks the
 * grammar of the complete head, and parse_request/parse_response make a verdict
 * about version, target, Host, Transfer-Encoding, Content-Length and Connection
 * that is the same with every llhttp (RFC 9112 sections 3, 5, 6).
 *
 * Body framing (length, chunked, EOF) is our own: llhttp accepts more than RFC 9112 section 7.1 allows.
 */
#ifndef LG_PARSE_H
#define LG_PARSE_H

#include "http.h"

/* Why a message was refused. X(id, HTTP status for a request, reason word, what to say to the client) */
#define PARSE_ERRORS(X)                                                                                      \
    X(OK, 200, "", "")                                                                                       \
    X(BAD_REQUEST, 400, "bad_request", "the request is not well-formed HTTP/1.1")                            \
    X(BAD_FRAMING, 400, "bad_framing", "the message length is ambiguous or malformed")                       \
    X(BAD_HOST, 400, "bad_host", "exactly one valid Host header is required")                                \
    X(BAD_TARGET, 400, "bad_target", "the request target is not valid")                                      \
    X(BAD_CHUNK, 400, "bad_chunk", "the chunked body is malformed")                                          \
    X(BAD_TRAILER, 400, "bad_trailer", "a trailer field is not allowed there")                               \
    X(BAD_UPGRADE, 400, "bad_upgrade", "an upgrade request must be a GET without a body")                    \
    X(BAD_CONNECTION, 400, "bad_connection", "Connection must not name an end-to-end header")                \
    X(METHOD_UNKNOWN, 501, "method_unknown", "the request method is not supported")                          \
    X(METHOD_REFUSED, 405, "method_refused", "this method is not allowed through the gateway")               \
    X(CODING_UNKNOWN, 501, "coding_unknown", "only the chunked transfer coding is supported")                \
    X(EXPECTATION, 417, "expectation", "only `Expect: 100-continue` is supported")                           \
    X(VERSION, 505, "version", "only HTTP/1.0 and HTTP/1.1 are supported")                                   \
    X(TARGET_TOO_LONG, 414, "target_too_long", "the request target is too long")                             \
    X(HEAD_TOO_LARGE, 431, "head_too_large", "the request headers are too large or too many")                \
    X(NO_MEMORY, 503, "no_memory", "the gateway is out of memory")

enum parse_error {
#define X(id, status, word, text) PARSE_##id,
    PARSE_ERRORS(X)
#undef X
};

unsigned parse_error_status(enum parse_error e);
const char *parse_error_word(enum parse_error e);
const char *parse_error_text(enum parse_error e);

/* Progress of the search for the end of a head; all zero at the start of each message. */
struct parse_scan {
    uint32_t at; /* bytes looked at */
    uint16_t lines;
    uint8_t state_;
    uint8_t blank;  /* leading CRLFs before the start line (they are counted in `at` too) */
    uint32_t start; /* offset of the first byte of the start line */
};

/* A start line may take half of what a head may take, and never more than this. */
#define PARSE_START_LINE_MAX 65536
/* CRLFs that are skipped before a request line (RFC 9112 section 2.2); none before a status line. */
#define PARSE_BLANK_LINES_MAX 4

/*
 * Looks at bytes[s->at .. n), which begin with everything seen so far; a byte is never looked at twice.
 * Returns the length of the head including its blank line (and leading CRLFs), or 0: then *error is
 * PARSE_OK when more bytes are needed, else why the head is refused (and s must not be used again).
 * max_bytes: the head's cap, leading CRLFs included. The verdict does not depend on how the bytes were cut
 * into calls.
 */
MUST_CHECK size_t parse_head_end(struct parse_scan *s, const char *bytes, size_t n, size_t max_bytes,
                                 bool request, enum parse_error *error);

/*
 * Parses one complete head (as delimited by parse_head_end, leading CRLFs cut off: raw + scan.start, length
 * minus scan.start). out->fields must have room for HTTP_FIELDS_MAX. The head borrows raw. On any error
 * *out is not to be read.
 */
MUST_CHECK enum parse_error parse_request(const char *raw, size_t n, struct http_head *out);
/*
 * `method`: of the request that it answers (HEAD: no body). 1xx, 204, 304: no body. Any error means the
 * upstream is not to be believed: 502. A 101 is refused unless it switches to websocket (out->websocket);
 * whether that was asked for is the caller's to know.
 */
MUST_CHECK enum parse_error parse_response(const char *raw, size_t n, enum http_method method,
                                           struct http_head *out);

/* Bytes of chunk extensions and trailers together that one message may carry. */
#define PARSE_OVERHEAD_MAX 16384

enum parse_body_result { PARSE_BODY_MORE, PARSE_BODY_END, PARSE_BODY_BAD };

/* Where one message body stands. */
struct parse_body {
    uint64_t left;     /* of the length, or of the present chunk */
    uint32_t overhead; /* bytes of extensions and trailers so far: at most PARSE_OVERHEAD_MAX */
    uint8_t kind;      /* enum http_body */
    uint8_t state_;
    uint8_t digits_;
    uint8_t name_n_; /* of the present trailer name */
    char name_[24];  /* enough to know the forbidden ones */
};

void parse_body_init(struct parse_body *b, const struct http_head *h);

/*
 * Takes framing off: at most *n bytes of `bytes` are looked at; payload is moved together IN PLACE at
 * bytes[0 .. *payload_n). On return *n is how many input bytes were consumed (less than given only at END:
 * what follows belongs to the next message). Trailers are dropped; framing, routing or credential names
 * among them are BAD (RFC 9110 section 6.5.1). `request` decides the strictness of trailers (a response's
 * unwanted trailer is dropped). EOF bodies never report END here: the connection's end does.
 */
MUST_CHECK enum parse_body_result parse_body_feed(struct parse_body *b, char *bytes, size_t *n,
                                                  size_t *payload_n, bool request, enum parse_error *error);

/* True when the message is whole if the connection ends now: an EOF body, or one that has already ended. */
bool parse_body_may_end(const struct parse_body *b);

#endif
