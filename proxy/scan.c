/*
 * scan.c - the streaming JSON scan: see scan.h for what it promises.
 *
 *   START ─► KEY_FIRST ─► KEY ─► COLON ─► VALUE ─┬─► MODEL, SCALAR, SKIP_VALUE ─► AFTER ─► DONE
 *     │                    ▲                     └─► NESTED ──────────────────────►│
 *     └─► OTHER            └───────────────────────────── a comma ◄────────────────┘
 *
 * Level 1 is read byte by byte under the full grammar: it is where the answer
 * stands, and it is short. Two things are long, the strings of level 1 and all that
 * lies deeper, and both are skipped 64 bytes at a time by masks (scanblock.h);
 * what is left of a feed goes byte by byte under the same rules.
 *
 * In the deep part only that is checked which decides where it ends: strings
 * and their escapes, brackets and their kinds, and that nothing stands outside
 * of strings that JSON does not have. A reader that knows comments or single
 * quotes would otherwise see other strings than this one, and another top level.
 */
#include "scan.h"

#include "scanblock.h"

enum scan_state {
    START,     /* nothing but white space yet */
    BOM_1,     /* EF seen */
    BOM_2,     /* EF BB seen */
    LEAD,      /* after the byte order mark, or white space */
    KEY_FIRST, /* after { */
    KEY_NEXT,  /* after a comma */
    KEY,       /* in a key that may yet be `model` */
    KEY_ESCAPE,
    KEY_HEX,
    SKIP_KEY, /* in a key that is not */
    COLON,
    MODEL_COLON,
    VALUE,
    MODEL_VALUE,
    MODEL, /* in the string that is the answer */
    MODEL_ESCAPE,
    MODEL_HEX,
    SKIP_VALUE, /* in another string */
    SCALAR,
    NESTED, /* depth 2 and deeper */
    AFTER,  /* after a value of level 1 */
    DONE,   /* after the closing } */
    OTHER,  /* no object: nothing to find */
    BAD,
};

static const char key_wanted[] = "model";
enum { KEY_BYTES = sizeof(key_wanted) - 1 };

void scan_init(struct scan *s, enum scan_mode mode)
{
    memset(s, 0, offsetof(struct scan, name_));
    s->state_ = START;
    s->mode_ = (uint8_t)mode;
    model_name_init(&s->name_);
}

static void scan_fail(struct scan *s, enum bodyscan_error e)
{
    s->state_ = BAD;
    s->error_ = (uint8_t)e;
}

static bool is_space(uint8_t c)
{
    return c == ' ' || c == '\n' || c == '\r' || c == '\t';
}

/* ---- the first bytes ---- */

static void scan_open_object(struct scan *s)
{
    if (s->wide_) {
        scan_fail(s, BODYSCAN_E_BODY_ENCODING);
        return;
    }
    s->is_object_ = true;
    s->depth_ = 1;
    s->open_[0] = 1;
    s->state_ = KEY_FIRST;
}

/*
 * Nothing in JSON begins with NUL, FF or FE, while UTF-16 and UTF-32 do, with a mark or
 * without: their first character is ASCII. The one order left, '{' NUL, is met in KEY_FIRST.
 */
static void scan_start(struct scan *s, uint8_t c)
{
    bool sniffing = s->mode_ == SCAN_SNIFF;

    if (is_space(c)) {
        s->state_ = LEAD;
    } else if (c == '{') {
        scan_open_object(s);
    } else if (c == 0xEF && s->state_ == START) {
        s->state_ = BOM_1;
    } else if (c == 0x00 || c == 0xFF || c == 0xFE) {
        s->wide_ = true;
        s->state_ = LEAD;
        if (!sniffing)
            scan_fail(s, BODYSCAN_E_BODY_ENCODING);
    } else if (sniffing || c == '[' || c == '"' || c == '-' || (c >= '0' && c <= '9') || c == 't' ||
               c == 'f' || c == 'n') {
        s->state_ = OTHER;
    } else {
        scan_fail(s, BODYSCAN_E_BODY_MALFORMED);
    }
}

static void scan_bom(struct scan *s, uint8_t c)
{
    if (c == (s->state_ == BOM_1 ? 0xBB : 0xBF))
        s->state_ = s->state_ == BOM_1 ? BOM_2 : LEAD;
    else if (s->mode_ == SCAN_SNIFF)
        s->state_ = OTHER;
    else
        scan_fail(s, BODYSCAN_E_BODY_MALFORMED);
}

/* ---- keys of level 1 ---- */

static void scan_key_begin(struct scan *s)
{
    s->match_ = 0;
    s->exact_ = true;
    s->state_ = KEY;
}

/* A key that only some servers take for `model`. Alone it is none; beside `model` the body is refused. */
static void scan_note_variant(struct scan *s)
{
    s->has_variant_ = true;
    if (s->has_model_)
        scan_fail(s, BODYSCAN_E_MODEL_AMBIGUOUS);
}

/*
 * One more character of the key, unescaped; anything above ASCII as 0x80. No such character
 * folds to a letter of "model" in Unicode, so ASCII case is all that Go's folding means here.
 * NUL right after the word: a server in C may read the key as ended there.
 */
static void scan_key_char(struct scan *s, uint8_t c)
{
    s->state_ = KEY;
    if (s->match_ < KEY_BYTES && ascii_lower((char)c) == key_wanted[s->match_]) {
        s->exact_ = s->exact_ && (char)c == key_wanted[s->match_];
        s->match_++;
        return;
    }
    s->state_ = SKIP_KEY;
    s->escaped_ = false;
    if (s->match_ == KEY_BYTES && c == 0)
        scan_note_variant(s);
}

static void scan_key_end(struct scan *s)
{
    s->state_ = COLON;
    if (s->match_ != KEY_BYTES)
        return;
    if (!s->exact_) {
        scan_note_variant(s);
    } else if (s->has_model_) {
        scan_fail(s, BODYSCAN_E_MODEL_DUPLICATE);
    } else if (s->has_variant_) {
        scan_fail(s, BODYSCAN_E_MODEL_AMBIGUOUS);
    } else {
        s->has_model_ = true;
        s->state_ = MODEL_COLON;
    }
}

/* The character that \c stands for (RFC 8259 section 7), or 0: no such escape. */
static uint8_t unescape(uint8_t c)
{
    switch (c) {
    case '"':
    case '\\':
    case '/':
        return c;
    case 'b':
        return '\b';
    case 'f':
        return '\f';
    case 'n':
        return '\n';
    case 'r':
        return '\r';
    case 't':
        return '\t';
    default:
        return 0;
    }
}

/* A lenient reader takes \m for m: an escape that is none is refused while the key may still be the one. */
static void scan_key_escape(struct scan *s, uint8_t c)
{
    uint8_t plain = unescape(c);

    if (c == 'u') {
        s->hex_ = 0;
        s->hex_digits_ = 0;
        s->state_ = KEY_HEX;
    } else if (plain != 0) {
        scan_key_char(s, plain);
    } else {
        scan_fail(s, BODYSCAN_E_BODY_MALFORMED);
    }
}

/* Takes a digit of \uXXXX. False: c is none. */
static bool scan_hex_digit(struct scan *s, uint8_t c)
{
    uint8_t folded = c | 0x20;
    unsigned v;

    if (c >= '0' && c <= '9')
        v = c - '0';
    else if (folded >= 'a' && folded <= 'f')
        v = folded - 'a' + 10U;
    else
        return false;
    s->hex_ = (uint16_t)(s->hex_ << 4 | v);
    s->hex_digits_++;
    return true;
}

static void scan_key_hex(struct scan *s, uint8_t c)
{
    if (!scan_hex_digit(s, c))
        scan_fail(s, BODYSCAN_E_BODY_MALFORMED);
    else if (s->hex_digits_ == 4)
        scan_key_char(s, s->hex_ < 0x80 ? (uint8_t)s->hex_ : 0x80);
}

static void scan_key(struct scan *s, uint8_t c)
{
    if (c == '"')
        scan_key_end(s);
    else if (c == '\\')
        s->state_ = KEY_ESCAPE;
    else
        scan_key_char(s, c);
}

/* ---- the value of `model` ---- */

static void scan_model_put(struct scan *s, enum bodyscan_error e)
{
    s->state_ = MODEL;
    if (e != BODYSCAN_E_OK)
        scan_fail(s, e);
}

static void scan_model_byte(struct scan *s, uint8_t c)
{
    enum bodyscan_error e;

    if (c == '\\') {
        s->state_ = MODEL_ESCAPE;
    } else if (s->high_ != 0) {
        scan_fail(s, BODYSCAN_E_MODEL_INVALID);
    } else if (c != '"') {
        scan_model_put(s, model_name_put(&s->name_, c));
    } else if ((e = model_name_finish(&s->name_)) != BODYSCAN_E_OK) {
        scan_fail(s, e);
    } else {
        s->has_value_ = true;
        s->state_ = AFTER;
    }
}

static void scan_model_escape(struct scan *s, uint8_t c)
{
    if (c == 'u') {
        s->hex_ = 0;
        s->hex_digits_ = 0;
        s->state_ = MODEL_HEX;
    } else if (s->high_ != 0) {
        scan_fail(s, BODYSCAN_E_MODEL_INVALID);
    } else { /* 0, for an escape that is none, is a control character as well */
        scan_model_put(s, model_name_put_code_point(&s->name_, unescape(c)));
    }
}

static void scan_model_hex(struct scan *s, uint8_t c)
{
    uint32_t unit;

    if (!scan_hex_digit(s, c)) {
        scan_fail(s, BODYSCAN_E_MODEL_INVALID);
        return;
    }
    if (s->hex_digits_ < 4)
        return;
    unit = s->hex_;
    if (s->high_ != 0) {
        bool low = (unit & 0xFC00) == 0xDC00;

        unit = 0x10000 + ((s->high_ & 0x3FFU) << 10) + (unit & 0x3FF);
        s->high_ = 0;
        scan_model_put(s, low ? model_name_put_code_point(&s->name_, unit) : BODYSCAN_E_MODEL_INVALID);
    } else if ((unit & 0xFC00) == 0xD800) {
        s->high_ = (uint16_t)unit;
        s->state_ = MODEL;
    } else {
        scan_model_put(s, model_name_put_code_point(&s->name_, unit));
    }
}

/* ---- nested values ---- */

static void scan_push(struct scan *s, uint8_t bracket)
{
    uint64_t bit = 1ULL << (s->depth_ % 64);

    if (s->depth_ == SCAN_DEPTH_MAX) {
        scan_fail(s, BODYSCAN_E_BODY_TOO_DEEP);
        return;
    }
    if (bracket == '{')
        s->open_[s->depth_ / 64] |= bit;
    else
        s->open_[s->depth_ / 64] &= ~bit;
    s->depth_++;
}

static void scan_pop(struct scan *s, uint8_t bracket)
{
    unsigned level = s->depth_ - 1U;
    bool is_object = (s->open_[level / 64] >> (level % 64)) & 1;

    if (is_object != (bracket == '}')) {
        scan_fail(s, BODYSCAN_E_BODY_MALFORMED);
        return;
    }
    s->depth_--;
    if (s->depth_ == 1)
        s->state_ = AFTER;
    else if (s->depth_ == 0)
        s->state_ = DONE;
}

/* A byte outside of strings that is a bracket, or one that JSON does not have. */
static void scan_nested_mark(struct scan *s, uint8_t c)
{
    if (json_class(c) != JSON_BRACKET)
        scan_fail(s, BODYSCAN_E_BODY_MALFORMED);
    else if ((c | 0x20) == '{')
        scan_push(s, c);
    else
        scan_pop(s, c);
}

static void scan_nested_byte(struct scan *s, uint8_t c)
{
    if (s->escaped_)
        s->escaped_ = false;
    else if (s->in_string_ && c == '\\')
        s->escaped_ = true;
    else if (c == '"')
        s->in_string_ = !s->in_string_;
    else if (!s->in_string_ && (json_class(c) & (JSON_SPACE | JSON_SCALAR | JSON_MARK)) == 0)
        scan_nested_mark(s, c);
}

/*
 * One block of the nested part. Returns where to go on: behind it, or behind the bracket or the
 * error that ended the part. An escape outside of a string spoils the masks behind it only, and
 * is itself a byte that JSON does not have there: the walk ends at it.
 */
static const uint8_t *scan_nested_block(struct scan *s, const uint8_t *p)
{
    uint64_t quotes = block_eq(p, '"') & ~block_escaped(block_eq(p, '\\'), &s->escaped_);
    uint64_t inside, marks;

    if (quotes == 0 && s->in_string_)
        return p + BLOCK_BYTES;
    inside = block_prefix_parity(quotes) ^ (s->in_string_ ? ~0ULL : 0);
    s->in_string_ = inside >> 63;
    for (marks = (block_brackets(p) | block_foreign(p)) & ~inside; marks != 0; marks &= marks - 1) {
        unsigned i = (unsigned)__builtin_ctzll(marks);

        scan_nested_mark(s, p[i]);
        if (s->state_ != NESTED)
            return p + i + 1;
    }
    return p + BLOCK_BYTES;
}

static const uint8_t *scan_nested(struct scan *s, const uint8_t *p, const uint8_t *end)
{
    while (s->state_ == NESTED && end - p >= BLOCK_BYTES) {
        if (s->in_string_ && !s->escaped_ && !block_has_either(p, '"', '\\'))
            p += BLOCK_BYTES;
        else
            p = scan_nested_block(s, p);
    }
    while (s->state_ == NESTED && p < end)
        scan_nested_byte(s, *p++);
    return p;
}

/* The rest of a string of level 1 whose content does not matter. Returns behind its closing quote, or end. */
static const uint8_t *scan_skip_string(struct scan *s, const uint8_t *p, const uint8_t *end)
{
    uint8_t next = s->state_ == SKIP_KEY ? COLON : AFTER;

    for (; end - p >= BLOCK_BYTES; p += BLOCK_BYTES) {
        uint64_t quotes;

        if (!s->escaped_ && !block_has_either(p, '"', '\\'))
            continue;
        quotes = block_eq(p, '"') & ~block_escaped(block_eq(p, '\\'), &s->escaped_);
        if (quotes != 0) {
            s->state_ = next;
            return p + __builtin_ctzll(quotes) + 1;
        }
    }
    for (; p < end; p++) {
        if (s->escaped_) {
            s->escaped_ = false;
        } else if (*p == '\\') {
            s->escaped_ = true;
        } else if (*p == '"') {
            s->state_ = next;
            return p + 1;
        }
    }
    return p;
}

/* ---- level 1 ---- */

static void scan_value_begin(struct scan *s, uint8_t c)
{
    if (c == '"') {
        s->state_ = SKIP_VALUE;
        s->escaped_ = false;
    } else if (c == '{' || c == '[') {
        s->state_ = NESTED;
        s->in_string_ = false;
        s->escaped_ = false;
        scan_push(s, c);
    } else if (json_class(c) == JSON_SCALAR) {
        s->state_ = SCALAR;
    } else {
        scan_fail(s, BODYSCAN_E_BODY_MALFORMED);
    }
}

static void scan_after_value(struct scan *s, uint8_t c)
{
    if (is_space(c))
        s->state_ = AFTER;
    else if (c == ',')
        s->state_ = KEY_NEXT;
    else if (c == '}')
        scan_pop(s, c);
    else
        scan_fail(s, BODYSCAN_E_BODY_MALFORMED);
}

/* One byte between the keys and values of level 1. */
static void scan_between(struct scan *s, uint8_t c)
{
    if (is_space(c))
        return;
    if ((s->state_ == KEY_FIRST || s->state_ == KEY_NEXT) && c == '"')
        scan_key_begin(s);
    else if (s->state_ == KEY_FIRST && c == '}')
        scan_pop(s, c);
    else if (s->state_ == KEY_FIRST && c == 0)
        scan_fail(s, BODYSCAN_E_BODY_ENCODING);
    else if (s->state_ == COLON && c == ':')
        s->state_ = VALUE;
    else if (s->state_ == MODEL_COLON && c == ':')
        s->state_ = MODEL_VALUE;
    else if (s->state_ == MODEL_VALUE && c == '"')
        s->state_ = MODEL;
    else if (s->state_ == MODEL_VALUE && (json_class(c) == JSON_SCALAR || c == '{' || c == '['))
        scan_fail(s, BODYSCAN_E_MODEL_NOT_STRING);
    else if (s->state_ == VALUE)
        scan_value_begin(s, c);
    else
        scan_fail(s, BODYSCAN_E_BODY_MALFORMED); /* also anything in DONE */
}

static void scan_step(struct scan *s, uint8_t c)
{
    switch ((enum scan_state)s->state_) {
    case START:
    case LEAD:
        scan_start(s, c);
        break;
    case BOM_1:
    case BOM_2:
        scan_bom(s, c);
        break;
    case KEY:
        scan_key(s, c);
        break;
    case KEY_ESCAPE:
        scan_key_escape(s, c);
        break;
    case KEY_HEX:
        scan_key_hex(s, c);
        break;
    case MODEL:
        scan_model_byte(s, c);
        break;
    case MODEL_ESCAPE:
        scan_model_escape(s, c);
        break;
    case MODEL_HEX:
        scan_model_hex(s, c);
        break;
    case SCALAR:
        if (json_class(c) != JSON_SCALAR)
            scan_after_value(s, c);
        break;
    case AFTER:
        scan_after_value(s, c);
        break;
    default:
        scan_between(s, c);
        break;
    }
}

/* ---- what others call ---- */

enum bodyscan_verdict scan_verdict(const struct scan *s)
{
    if (s->state_ == BAD)
        return BODYSCAN_BAD;
    if (s->state_ == OTHER)
        return BODYSCAN_NONE;
    return s->has_value_ ? BODYSCAN_FOUND : BODYSCAN_MORE;
}

enum bodyscan_verdict scan_feed(struct scan *s, const void *bytes, size_t n)
{
    const uint8_t *p = bytes, *end = n > 0 ? p + n : p;

    while (p < end && s->state_ != BAD && s->state_ != OTHER) {
        if (s->state_ == NESTED)
            p = scan_nested(s, p, end);
        else if (s->state_ == SKIP_VALUE || s->state_ == SKIP_KEY)
            p = scan_skip_string(s, p, end);
        else
            scan_step(s, *p++);
    }
    return scan_verdict(s);
}

enum bodyscan_verdict scan_end(struct scan *s)
{
    switch ((enum scan_state)s->state_) {
    case START:
    case LEAD: /* an empty body */
        s->state_ = OTHER;
        break;
    case BOM_1:
    case BOM_2:
        scan_bom(s, 0);
        break;
    case DONE:
        if (!s->has_value_)
            s->state_ = OTHER;
        break;
    case OTHER:
    case BAD:
        break;
    default: /* cut short */
        scan_fail(s, BODYSCAN_E_BODY_MALFORMED);
        break;
    }
    return scan_verdict(s);
}
