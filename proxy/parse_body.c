/*
 * parse_body.c - bodies: length, chunked, until the end of the connection.
 *
 * The chunked decoder takes what RFC 9112 section 7.1 writes and nothing more:
 *
 *   SIZE ─► EXTENSION ─► SIZE_LF ─► DATA ─► DATA_CR ─► DATA_LF ─► SIZE …
 *                           │ size 0
 *                           └─► LINE ─► NAME ─► VALUE ─► VALUE_LF ─► LINE …
 *                                 └─► LAST_LF ─► ENDED
 *
 * Payload is moved together at the front of the caller's bytes, whole runs at a
 * time; where it stands there already it is not touched. All that is not
 * payload is bounded: the digits of a size, and extensions and trailers
 * together per message. Nothing is allocated, and each byte is looked at once.
 */
#include "parse.h"

enum body_state {
    BODY_SIZE,
    BODY_EXTENSION,
    BODY_SIZE_LF,
    BODY_DATA,
    BODY_DATA_CR,
    BODY_DATA_LF,
    BODY_LINE, /* at the start of a trailer line or of the blank one */
    BODY_NAME,
    BODY_VALUE,
    BODY_VALUE_LF,
    BODY_LAST_LF,
    BODY_ENDED,
    BODY_BAD,
};

/* 16 hex digits are 64 bits, so a size cannot overflow; leading zeros count as digits. */
#define SIZE_DIGITS_MAX 16

#define BIT(id) (1u << HTTP_FIELD_##id)

/* Trailers that would change what the message is or who sent it (RFC 9110 section 6.5.1). */
#define FORBIDDEN_TRAILERS                                                                                   \
    (BIT(HOST) | BIT(CONTENT_LENGTH) | BIT(TRANSFER_ENCODING) | BIT(CONNECTION) | BIT(KEEP_ALIVE) |          \
     BIT(PROXY_CONNECTION) | BIT(PROXY_AUTHORIZATION) | BIT(PROXY_AUTHENTICATE) | BIT(TE) | BIT(TRAILER) |   \
     BIT(UPGRADE) | BIT(HTTP2_SETTINGS) | BIT(EXPECT) | BIT(CONTENT_TYPE) | BIT(CONTENT_ENCODING) |          \
     BIT(AUTHORIZATION) | BIT(API_KEY) | BIT(X_API_KEY) | BIT(X_GOOG_API_KEY) | BIT(COOKIE) |                \
     BIT(MAX_FORWARDS) | BIT(LEASEGATE_TASK) | BIT(LEASEGATE_PRIORITY) | BIT(LEASEGATE_WAIT) |               \
     BIT(LEASEGATE_OTHER))

void parse_body_init(struct parse_body *b, const struct http_head *h)
{
    *b = (struct parse_body){.kind = h->body, .state_ = BODY_SIZE};
    if (h->body == HTTP_BODY_LENGTH)
        b->left = h->content_length;
    if (h->body == HTTP_BODY_NONE || (h->body == HTTP_BODY_LENGTH && b->left == 0))
        b->state_ = BODY_ENDED;
}

bool parse_body_may_end(const struct parse_body *b)
{
    return b->kind == HTTP_BODY_EOF || b->state_ == BODY_ENDED;
}

static int hex_value(char c)
{
    if (c >= '0' && c <= '9')
        return c - '0';
    c = ascii_lower(c);
    return c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

static bool is_text(char c)
{
    return (unsigned char)c >= ' ' ? c != 0x7f : c == '\t';
}

static bool trailer_forbidden(const struct parse_body *b, bool request)
{
    /* A name longer than name_ is none that is known, but may begin as our own do. */
    return request &&
           (FORBIDDEN_TRAILERS >> http_field_lookup((struct slice){b->name_, b->name_n_}) & 1) != 0;
}

static enum parse_error step_size(struct parse_body *b, char c)
{
    int digit = hex_value(c);

    if (digit >= 0) {
        if (b->digits_++ == SIZE_DIGITS_MAX)
            return PARSE_BAD_CHUNK;
        b->left = b->left << 4 | (uint64_t)digit;
        return PARSE_OK;
    }
    if (b->digits_ == 0 || (c != ';' && c != '\r'))
        return PARSE_BAD_CHUNK;
    b->state_ = c == ';' ? BODY_EXTENSION : BODY_SIZE_LF;
    return PARSE_OK;
}

static enum parse_error step_trailer(struct parse_body *b, char c, bool request)
{
    if (++b->overhead > PARSE_OVERHEAD_MAX)
        return PARSE_BAD_TRAILER;
    if (b->state_ == BODY_VALUE) {
        if (c == '\r')
            b->state_ = BODY_VALUE_LF;
        return c == '\r' || is_text(c) ? PARSE_OK : PARSE_BAD_TRAILER;
    }
    if (c == ':' && b->name_n_ > 0) {
        b->state_ = BODY_VALUE;
        return trailer_forbidden(b, request) ? PARSE_BAD_TRAILER : PARSE_OK;
    }
    if (!http_is_token_char(c))
        return PARSE_BAD_TRAILER;
    b->state_ = BODY_NAME;
    if (b->name_n_ < sizeof(b->name_))
        b->name_[b->name_n_++] = c;
    return PARSE_OK;
}

/* c must be what ends a line; then on to `next`. */
static enum parse_error step_exact(struct parse_body *b, char c, char want, enum body_state next)
{
    b->state_ = (uint8_t)next;
    return c == want ? PARSE_OK : PARSE_BAD_CHUNK;
}

/* One byte of framing. */
static enum parse_error step(struct parse_body *b, char c, bool request)
{
    switch ((enum body_state)b->state_) {
    case BODY_SIZE:
        return step_size(b, c);
    case BODY_EXTENSION:
        if (c == '\r')
            b->state_ = BODY_SIZE_LF;
        else if (!is_text(c) || ++b->overhead > PARSE_OVERHEAD_MAX)
            return PARSE_BAD_CHUNK;
        return PARSE_OK;
    case BODY_SIZE_LF:
        b->digits_ = 0;
        return step_exact(b, c, '\n', b->left > 0 ? BODY_DATA : BODY_LINE);
    case BODY_DATA_CR:
        return step_exact(b, c, '\r', BODY_DATA_LF);
    case BODY_DATA_LF:
        return step_exact(b, c, '\n', BODY_SIZE);
    case BODY_LINE:
        if (c == '\r') {
            b->state_ = BODY_LAST_LF;
            return PARSE_OK;
        }
        return step_trailer(b, c, request);
    case BODY_NAME:
    case BODY_VALUE:
        return step_trailer(b, c, request);
    case BODY_VALUE_LF:
        b->name_n_ = 0;
        return step_exact(b, c, '\n', BODY_LINE);
    case BODY_LAST_LF:
        return step_exact(b, c, '\n', BODY_ENDED);
    default:
        return PARSE_BAD_CHUNK;
    }
}

/* Takes payload off the front of what is `left`. */
static size_t take(struct parse_body *b, size_t n, enum body_state then)
{
    if (b->left < n)
        n = (size_t)b->left;
    b->left -= n;
    if (b->left == 0)
        b->state_ = (uint8_t)then;
    return n;
}

static enum parse_error feed_chunked(struct parse_body *b, char *bytes, size_t *n, size_t *payload_n,
                                     bool request)
{
    size_t in = 0, out = 0;
    enum parse_error e = PARSE_OK;

    while (in < *n && b->state_ != BODY_ENDED && e == PARSE_OK) {
        if (b->state_ == BODY_DATA) {
            size_t run = take(b, *n - in, BODY_DATA_CR);

            if (in != out)
                memmove(bytes + out, bytes + in, run);
            in += run;
            out += run;
        } else {
            e = step(b, bytes[in++], request);
        }
    }
    *n = in;
    *payload_n = out;
    return e;
}

enum parse_body_result parse_body_feed(struct parse_body *b, char *bytes, size_t *n, size_t *payload_n,
                                       bool request, enum parse_error *error)
{
    *error = PARSE_OK;
    if (b->kind == HTTP_BODY_EOF) {
        *payload_n = *n;
        return PARSE_BODY_MORE;
    }
    if (b->kind == HTTP_BODY_CHUNKED) {
        *error = b->state_ == BODY_BAD ? PARSE_BAD_CHUNK : feed_chunked(b, bytes, n, payload_n, request);
        if (*error != PARSE_OK) {
            b->state_ = BODY_BAD;
            *payload_n = 0;
            return PARSE_BODY_BAD;
        }
    } else {
        *n = *payload_n = b->state_ == BODY_ENDED ? 0 : take(b, *n, BODY_ENDED);
    }
    return b->state_ == BODY_ENDED ? PARSE_BODY_END : PARSE_BODY_MORE;
}
