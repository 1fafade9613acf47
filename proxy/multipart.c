/*
 * multipart.c - the streaming form scan: see multipart.h for what it promises.
 *
 *   FIRST ─► MATCH ─► BOUNDARY ─► BOUNDARY_CR ─► HEADER ⇄ HEADER_CR ─┬─► DATA ──► MATCH
 *            "--b"       │ "--"                                      └─► VALUE ─► VALUE_CR ─► MATCH
 *                        └─► DASH ─► CLOSED ─► EPILOGUE
 *
 * No byte of "--boundary" is CR or LF, so no other delimiter can begin inside of
 * what matched of a line: no table, no going back.
 */
#include "multipart.h"

#include "mediatype.h"
#include "scanblock.h"

enum multipart_state {
    FIRST,       /* before the first boundary */
    MATCH,       /* in a line that begins like a delimiter */
    BOUNDARY,    /* behind a delimiter */
    BOUNDARY_CR, /* and CR */
    DASH,        /* and one dash */
    CLOSED,      /* behind the closing delimiter, on its line */
    EPILOGUE,    /* on the lines after it */
    HEADER,      /* in a header line */
    HEADER_CR,
    DATA,  /* of a part that is not asked for */
    VALUE, /* of the part that is */
    VALUE_CR,
    BAD,
};

enum line_break {
    BREAK_NONE,
    BREAK_CR,
    BREAK_LF,
    BREAK_CRLF,
};

static enum bodyscan_verdict verdict(const struct multipart *m)
{
    if (m->state_ == BAD)
        return BODYSCAN_BAD;
    return m->has_value_ ? BODYSCAN_FOUND : BODYSCAN_MORE;
}

static void fail(struct multipart *m, enum bodyscan_error e)
{
    m->state_ = BAD;
    m->error_ = (uint8_t)e;
}

/* ---- the boundary ---- */

/* RFC 2046 section 5.1.1 bchars, and what else a token may hold. A space may not be the last. */
static bool boundary_is_valid(struct slice b)
{
    if (b.n == 0 || b.n > MULTIPART_BOUNDARY_MAX || b.p[b.n - 1] == ' ')
        return false;
    for (size_t i = 0; i < b.n; i++) {
        if (!mediatype_is_tchar((uint8_t)b.p[i]) &&
            (b.p[i] == '\0' || strchr("'()+_,-./:=? ", b.p[i]) == NULL))
            return false;
    }
    return true;
}

enum bodyscan_error multipart_init(struct multipart *m, struct slice content_type)
{
    struct slice rest = content_type, boundary = {NULL, 0};
    struct mediatype_param param;
    enum mediatype_step step;

    memset(m, 0, offsetof(struct multipart, name_));
    model_name_init(&m->name_);
    m->state_ = FIRST;
    (void)mediatype_take_type(&rest);
    while ((step = mediatype_next_param(&rest, &param)) == MEDIATYPE_PARAM) {
        if (!slice_ieq(param.name, SLICE("boundary")))
            continue;
        if (boundary.n > 0 || !boundary_is_valid(param.value))
            return BODYSCAN_E_MULTIPART_BOUNDARY;
        boundary = param.value;
    }
    if (step == MEDIATYPE_BAD || boundary.n == 0)
        return BODYSCAN_E_MULTIPART_BOUNDARY;
    memcpy(m->delimiter_, "--", 2);
    memcpy(m->delimiter_ + 2, boundary.p, boundary.n);
    m->delimiter_n_ = (uint8_t)(2 + boundary.n);
    return BODYSCAN_E_OK;
}

/* ---- part headers ---- */

static bool contains(struct slice s, struct slice what)
{
    return s.n > 0 && memmem(s.p, s.n, what.p, what.n) != NULL;
}

/* `name*`, `name*0`, `name*0*`: RFC 2231 forms, which RFC 7578 knows nothing of and some servers decode. */
static bool is_extended(struct slice name, struct slice plain)
{
    return name.n > plain.n && slice_ieq((struct slice){name.p, plain.n}, plain) && name.p[plain.n] == '*';
}

/*
 * Content-Disposition: form-data; name="model" (RFC 7578 section 4.2) makes the
 * part the one. Where the line is not plain and `model` could be meant, it is
 * refused: a quote after a backslash, which ends the value for some readers and
 * not for others; an encoded name; a file of that name; another disposition.
 */
static enum bodyscan_error read_disposition(struct multipart *m, struct slice value)
{
    struct slice rest = value, type = mediatype_take_type(&rest), name = {NULL, 0};
    bool is_file = false, has_name = false;
    struct mediatype_param param;
    enum mediatype_step step;

    if (m->part_has_disposition_)
        return BODYSCAN_E_MULTIPART_MALFORMED;
    m->part_has_disposition_ = true;
    while ((step = mediatype_next_param(&rest, &param)) == MEDIATYPE_PARAM) {
        if (is_extended(param.name, SLICE("name")) ||
            (param.escaped_quote && contains(value, SLICE("model"))))
            return BODYSCAN_E_MODEL_AMBIGUOUS;
        if (slice_ieq(param.name, SLICE("filename")) || is_extended(param.name, SLICE("filename")))
            is_file = true;
        if (!slice_ieq(param.name, SLICE("name")))
            continue;
        if (has_name)
            return BODYSCAN_E_MULTIPART_MALFORMED;
        if (param.has_escape)
            return BODYSCAN_E_MODEL_AMBIGUOUS;
        has_name = true;
        name = param.value;
    }
    if (step == MEDIATYPE_BAD)
        return BODYSCAN_E_MULTIPART_MALFORMED;
    m->part_is_model_ = slice_eq(name, SLICE("model"));
    if (m->part_is_model_ && (is_file || !slice_ieq(type, SLICE("form-data"))))
        return BODYSCAN_E_MODEL_AMBIGUOUS;
    return BODYSCAN_E_OK;
}

static bool is_one_of(struct slice s, const struct slice *list, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        if (slice_ieq(s, list[i]))
            return true;
    }
    return false;
}

/* Encodings that servers may undo, so that they read another value than stands here. */
static bool changes_bytes(struct slice field, struct slice value)
{
    static const struct slice plain_codings[] = {{"7bit", 4}, {"8bit", 4}, {"binary", 6}};
    static const struct slice plain_charsets[] = {
        {"utf-8", 5}, {"utf8", 4}, {"us-ascii", 8}, {"iso-8859-1", 10}};
    struct mediatype_param param;
    enum mediatype_step step;

    if (slice_ieq(field, SLICE("content-transfer-encoding")))
        return !is_one_of(value, plain_codings, ARRAY_LEN(plain_codings));
    if (!slice_ieq(field, SLICE("content-type")))
        return false;
    (void)mediatype_take_type(&value);
    while ((step = mediatype_next_param(&value, &param)) == MEDIATYPE_PARAM) {
        if (slice_ieq(param.name, SLICE("charset")) &&
            !is_one_of(param.value, plain_charsets, ARRAY_LEN(plain_charsets)))
            return true;
    }
    return step == MEDIATYPE_BAD;
}

static void header_line(struct multipart *m)
{
    struct slice line = {m->line_, m->line_n_}, field, value;
    size_t colon = slice_find(line, ':');
    enum bodyscan_error e;

    m->line_n_ = 0;
    for (size_t i = 0; i < colon; i++) { /* a fold begins with a space, which is no token either */
        if (!mediatype_is_tchar((uint8_t)line.p[i])) {
            fail(m, BODYSCAN_E_MULTIPART_MALFORMED);
            return;
        }
    }
    if (colon == 0 || colon == line.n) {
        fail(m, BODYSCAN_E_MULTIPART_MALFORMED);
        return;
    }
    field = (struct slice){line.p, colon};
    value = slice_trim((struct slice){line.p + colon + 1, line.n - colon - 1});
    m->part_is_encoded_ = m->part_is_encoded_ || changes_bytes(field, value);
    if (slice_ieq(field, SLICE("content-disposition")) && (e = read_disposition(m, value)) != BODYSCAN_E_OK)
        fail(m, e);
}

/* The blank line: the part's data begins. */
static void headers_end(struct multipart *m)
{
    m->state_ = DATA;
    m->break_ = BREAK_LF; /* a boundary right here, with no line end of its own, is read in two ways */
    if (!m->part_is_model_)
        return;
    if (m->has_model_) {
        fail(m, BODYSCAN_E_MODEL_DUPLICATE);
    } else if (m->part_is_encoded_) {
        fail(m, BODYSCAN_E_MODEL_AMBIGUOUS);
    } else {
        m->has_model_ = true;
        m->state_ = VALUE;
    }
}

static void header_byte(struct multipart *m, uint8_t c)
{
    if (++m->header_bytes_ > MULTIPART_HEADERS_MAX) {
        fail(m, BODYSCAN_E_MULTIPART_HEADERS);
    } else if (m->state_ == HEADER_CR) {
        m->state_ = HEADER;
        if (c != '\n')
            fail(m, BODYSCAN_E_MULTIPART_MALFORMED);
        else if (m->line_n_ == 0)
            headers_end(m);
        else
            header_line(m);
    } else if (c == '\r') {
        m->state_ = HEADER_CR;
    } else if ((c < 0x20 && c != '\t') || c == 0x7F) { /* a bare LF among them */
        fail(m, BODYSCAN_E_MULTIPART_MALFORMED);
    } else if (m->line_n_ == MULTIPART_LINE_MAX) {
        fail(m, BODYSCAN_E_MULTIPART_HEADERS);
    } else {
        m->line_[m->line_n_++] = (char)c;
    }
}

/* ---- delimiters ---- */

static void match_begin(struct multipart *m, uint8_t from, bool after_crlf, uint8_t matched)
{
    m->from_ = from;
    m->after_crlf_ = after_crlf;
    m->matched_ = matched;
    m->state_ = MATCH;
}

/* The value is complete. Readers that look for the boundary anywhere must not find it inside. */
static void value_end(struct multipart *m)
{
    enum bodyscan_error e = model_name_finish(&m->name_);

    if (e == BODYSCAN_E_OK &&
        contains(model_name_slice(&m->name_), (struct slice){m->delimiter_, m->delimiter_n_}))
        e = BODYSCAN_E_MULTIPART_MALFORMED;
    if (e != BODYSCAN_E_OK)
        fail(m, e);
    else
        m->has_value_ = true;
}

static void match_complete(struct multipart *m)
{
    if (!m->after_crlf_ || m->from_ == EPILOGUE) {
        fail(m, BODYSCAN_E_MULTIPART_MALFORMED);
        return;
    }
    m->state_ = BOUNDARY;
    if (m->from_ == VALUE)
        value_end(m);
}

static void data_byte(struct multipart *m, uint8_t c)
{
    if (c == '-' && m->break_ != BREAK_NONE)
        match_begin(m, m->state_, m->break_ == BREAK_CRLF, 1);
    else if (c == '\n')
        m->break_ = m->break_ == BREAK_CR ? BREAK_CRLF : BREAK_LF;
    else
        m->break_ = c == '\r' ? BREAK_CR : BREAK_NONE;
}

static void match_byte(struct multipart *m, uint8_t c)
{
    if (c == (uint8_t)m->delimiter_[m->matched_]) {
        if (++m->matched_ == m->delimiter_n_)
            match_complete(m);
    } else if (m->from_ == FIRST) {
        fail(m, BODYSCAN_E_MULTIPART_MALFORMED);
    } else if (m->from_ == VALUE) { /* a line break inside of the value */
        fail(m, BODYSCAN_E_MODEL_INVALID);
    } else {
        m->state_ = m->from_;
        m->break_ = BREAK_NONE;
        data_byte(m, c);
    }
}

static void part_begin(struct multipart *m)
{
    m->state_ = HEADER;
    m->line_n_ = 0;
    m->header_bytes_ = 0;
    m->part_is_model_ = false;
    m->part_has_disposition_ = false;
    m->part_is_encoded_ = false;
}

/*
 * Behind "--boundary": spaces and CRLF, or "--" (RFC 2046 section 5.1.1).
 * Anything else makes it another line to some readers.
 */
static void boundary_byte(struct multipart *m, uint8_t c)
{
    bool space = c == ' ' || c == '\t';

    if (m->state_ == BOUNDARY && space)
        m->matched_ = 0; /* dashes behind a space close nothing */
    else if (m->state_ == BOUNDARY && c == '-' && m->matched_ != 0)
        m->state_ = DASH;
    else if (m->state_ == BOUNDARY && c == '\r')
        m->state_ = BOUNDARY_CR;
    else if (m->state_ == BOUNDARY_CR && c == '\n')
        part_begin(m);
    else if (m->state_ == DASH && c == '-')
        m->state_ = CLOSED;
    else if (m->state_ == CLOSED && (c == '\r' || c == '\n')) {
        m->state_ = EPILOGUE;
        m->break_ = c == '\r' ? BREAK_CR : BREAK_LF;
    } else if (m->state_ != CLOSED || !space)
        fail(m, BODYSCAN_E_MULTIPART_MALFORMED);
}

/* ---- data ---- */

/* Skips blocks with no line that begins with a dash. Stops just before such a line, or at the last block. */
static const uint8_t *skip_data(struct multipart *m, const uint8_t *p, const uint8_t *end)
{
    for (; end - p >= BLOCK_BYTES; p += BLOCK_BYTES) {
        uint64_t dashes = block_eq(p, '-');
        uint8_t last = p[BLOCK_BYTES - 1];

        if (dashes != 0)
            dashes &= (block_eq(p, '\r') | block_eq(p, '\n')) << 1 | (m->break_ != BREAK_NONE);
        if (dashes != 0) {
            unsigned i = (unsigned)__builtin_ctzll(dashes);

            if (i < 2)
                return p;
            m->break_ = BREAK_NONE; /* what counts are the two bytes before the dash; data_byte reads them */
            return p + i - 2;
        }
        if (last == '\n')
            m->break_ = p[BLOCK_BYTES - 2] == '\r' ? BREAK_CRLF : BREAK_LF;
        else
            m->break_ = last == '\r' ? BREAK_CR : BREAK_NONE;
    }
    return p;
}

static const uint8_t *multipart_data(struct multipart *m, const uint8_t *p, const uint8_t *end)
{
    uint8_t here = m->state_;

    p = skip_data(m, p, end);
    for (size_t i = 0; i < BLOCK_BYTES && p < end && m->state_ == here; i++)
        data_byte(m, *p++);
    return p;
}

static void value_byte(struct multipart *m, uint8_t c)
{
    enum bodyscan_error e;

    if (m->state_ == VALUE_CR && c == '\n')
        match_begin(m, VALUE, true, 0);
    else if (m->state_ == VALUE_CR)
        fail(m, BODYSCAN_E_MODEL_INVALID);
    else if (c == '\r')
        m->state_ = VALUE_CR;
    else if ((e = model_name_put(&m->name_, c)) != BODYSCAN_E_OK)
        fail(m, e);
}

static void first_byte(struct multipart *m, uint8_t c)
{
    if (c == '-')
        match_begin(m, FIRST, true, 1);
    else if (c != '\r' && c != '\n')
        fail(m, BODYSCAN_E_MULTIPART_MALFORMED);
}

static void multipart_step(struct multipart *m, uint8_t c)
{
    switch ((enum multipart_state)m->state_) {
    case FIRST:
        first_byte(m, c);
        break;
    case MATCH:
        match_byte(m, c);
        break;
    case HEADER:
    case HEADER_CR:
        header_byte(m, c);
        break;
    case VALUE:
    case VALUE_CR:
        value_byte(m, c);
        break;
    default:
        boundary_byte(m, c);
        break;
    }
}

/* ---- what others call ---- */

enum bodyscan_verdict multipart_feed(struct multipart *m, const void *bytes, size_t n)
{
    const uint8_t *p = bytes, *end = n > 0 ? p + n : p;

    while (p < end && m->state_ != BAD) {
        if (m->state_ == DATA || m->state_ == EPILOGUE)
            p = multipart_data(m, p, end);
        else
            multipart_step(m, *p++);
    }
    return verdict(m);
}

enum bodyscan_verdict multipart_end(struct multipart *m)
{
    bool closed = m->state_ == CLOSED || m->state_ == EPILOGUE ||
                  (m->state_ == MATCH && m->from_ == EPILOGUE);

    if (m->state_ == BAD)
        return BODYSCAN_BAD;
    if (!closed && m->state_ != FIRST)
        fail(m, BODYSCAN_E_MULTIPART_MALFORMED);
    else if (!m->has_value_)
        return BODYSCAN_NONE;
    return verdict(m);
}
