/*
 * scan_reference.h - the JSON scan again, written the plain way: recursive,
 * over the whole text at once, no state kept between bytes. proxy/scan.c is held against it
 * by tests/unit/test_scan.c and by the fuzzer.
 */
#ifndef LG_SCAN_REFERENCE_H
#define LG_SCAN_REFERENCE_H

#include "scan.h"

#include <string.h>

struct reference {
    const uint8_t *text;
    size_t n;
    size_t at;
    enum bodyscan_error error;
    bool none; /* not an object */
    int models;
    int variants;
    bool has_value;
    char value[MODEL_NAME_MAX];
    size_t value_n;
};

static bool ref_fail(struct reference *r, enum bodyscan_error e)
{
    r->error = e;
    return false;
}

/* The byte at the cursor, or -1 at the end. */
static int ref_look(const struct reference *r)
{
    return r->at < r->n ? r->text[r->at] : -1;
}

static void ref_space(struct reference *r)
{
    while (r->at < r->n && r->text[r->at] != 0 && strchr(" \t\r\n", r->text[r->at]) != NULL)
        r->at++;
}

static bool ref_is_scalar(int c)
{
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '+' ||
           c == '-' || c == '.';
}

/* The cursor is behind an opening quote; moves it behind the closing one. */
static bool ref_skip_string(struct reference *r)
{
    while (r->at < r->n) {
        uint8_t c = r->text[r->at++];

        if (c == '"')
            return true;
        if (c == '\\')
            r->at++;
    }
    return ref_fail(r, BODYSCAN_E_BODY_MALFORMED);
}

/* Four hex digits at text[at], or -1. */
static int ref_hex4(const struct reference *r, size_t at)
{
    int v = 0;

    for (size_t i = at; i < at + 4; i++) {
        const char *digits = "0123456789abcdef";
        const char *d = i < r->n && r->text[i] != 0 ? strchr(digits, r->text[i] | 0x20) : NULL;

        if (d == NULL || (r->text[i] < '0'))
            return -1;
        if (r->text[i] < 'A' && r->text[i] > '9')
            return -1;
        v = v * 16 + (int)(d - digits);
    }
    return v;
}

/*
 * One character of a string: its code point, with 0x80 + byte for a raw byte
 * above ASCII; -1 for an escape that is none. Moves the cursor behind it.
 */
static int32_t ref_char(struct reference *r, bool *raw)
{
    static const char names[] = "\"\\/bfnrt", values[] = "\"\\/\b\f\n\r\t";
    const char *found;
    int32_t v;

    *raw = true;
    if (r->text[r->at] != '\\')
        return r->text[r->at++];
    *raw = false;
    r->at++;
    if (r->at >= r->n)
        return -1;
    if (r->text[r->at] == 'u') {
        v = ref_hex4(r, r->at + 1);
        r->at += 5;
        return v;
    }
    found = r->text[r->at] != 0 ? strchr(names, r->text[r->at]) : NULL;
    r->at++;
    return found != NULL ? values[found - names] : -1;
}

/* Reads a key of the top level. *is_model: it is the one. */
static bool ref_key(struct reference *r, bool *is_model)
{
    const char *want = "model";
    size_t i = 0;
    bool exact = true, raw;

    *is_model = false;
    while (r->at < r->n && r->text[r->at] != '"') {
        int32_t c = ref_char(r, &raw);

        if (c < 0)
            return ref_fail(r, BODYSCAN_E_BODY_MALFORMED);
        if (i < 5 && (c == want[i] || c == want[i] - 32)) {
            exact = exact && c == want[i];
            i++;
            continue;
        }
        if (i == 5 && c == 0) {
            r->variants++;
            if (r->models > 0)
                return ref_fail(r, BODYSCAN_E_MODEL_AMBIGUOUS);
        }
        return ref_skip_string(r);
    }
    if (r->at >= r->n)
        return ref_fail(r, BODYSCAN_E_BODY_MALFORMED);
    r->at++;
    if (i < 5)
        return true;
    if (exact)
        r->models++;
    else
        r->variants++;
    *is_model = exact;
    if (r->models > 1)
        return ref_fail(r, BODYSCAN_E_MODEL_DUPLICATE);
    if (r->models > 0 && r->variants > 0)
        return ref_fail(r, BODYSCAN_E_MODEL_AMBIGUOUS);
    return true;
}

/* Whole-string check of UTF-8 without control characters, by decoding each character. */
static bool ref_is_clean(const uint8_t *s, size_t n)
{
    for (size_t i = 0; i < n;) {
        int more = s[i] < 0x80   ? 0
                   : s[i] < 0xC0 ? -1
                   : s[i] < 0xE0 ? 1
                   : s[i] < 0xF0 ? 2
                   : s[i] < 0xF8 ? 3
                                 : -1;
        static const uint32_t least[] = {0, 0x80, 0x800, 0x10000};
        uint32_t cp;

        if (more < 0 || i + (size_t)more >= n)
            return false;
        cp = more == 0 ? s[i] : s[i] & (0x3FU >> more);
        for (int k = 1; k <= more; k++) {
            if ((s[i + (size_t)k] & 0xC0) != 0x80)
                return false;
            cp = cp << 6 | (s[i + (size_t)k] & 0x3F);
        }
        if (cp < least[more] || cp > 0x10FFFF || (cp >= 0xD800 && cp < 0xE000) || cp < 0x20 ||
            (cp >= 0x7F && cp < 0xA0))
            return false;
        i += (size_t)more + 1;
    }
    return true;
}

static size_t ref_encode(uint8_t *out, uint32_t cp)
{
    if (cp < 0x80)
        return out[0] = (uint8_t)cp, 1;
    if (cp < 0x800)
        return out[0] = (uint8_t)(0xC0 | cp >> 6), out[1] = (uint8_t)(0x80 | (cp & 63)), 2;
    if (cp < 0x10000)
        return out[0] = (uint8_t)(0xE0 | cp >> 12), out[1] = (uint8_t)(0x80 | (cp >> 6 & 63)),
               out[2] = (uint8_t)(0x80 | (cp & 63)), 3;
    return out[0] = (uint8_t)(0xF0 | cp >> 18), out[1] = (uint8_t)(0x80 | (cp >> 12 & 63)),
           out[2] = (uint8_t)(0x80 | (cp >> 6 & 63)), out[3] = (uint8_t)(0x80 | (cp & 63)), 4;
}

/* The cursor is behind the opening quote of the model's value. */
static bool ref_model(struct reference *r)
{
    uint8_t value[MODEL_NAME_MAX + 8];
    size_t n = 0;
    bool raw, mixed = false;

    while (r->at < r->n && r->text[r->at] != '"') {
        int32_t c = ref_char(r, &raw), low;

        if (c < 0)
            return ref_fail(r, BODYSCAN_E_MODEL_INVALID);
        if (!raw && n > 0 && value[n - 1] >= 0x80 && !ref_is_clean(value, n))
            mixed = true; /* an escape in the middle of a raw character */
        if (!raw && c >= 0xD800 && c < 0xDC00) {
            if (r->at >= r->n || r->text[r->at] != '\\')
                return ref_fail(r, BODYSCAN_E_MODEL_INVALID);
            low = ref_char(r, &raw);
            if (low < 0xDC00 || low > 0xDFFF)
                return ref_fail(r, BODYSCAN_E_MODEL_INVALID);
            c = 0x10000 + ((c - 0xD800) << 10) + (low - 0xDC00);
        }
        if (raw)
            value[n++] = (uint8_t)c;
        else
            n += ref_encode(value + n, (uint32_t)c);
        if (n > MODEL_NAME_MAX)
            return ref_fail(r, BODYSCAN_E_MODEL_TOO_LONG);
    }
    if (r->at >= r->n)
        return ref_fail(r, BODYSCAN_E_BODY_MALFORMED);
    r->at++;
    if (mixed || !ref_is_clean(value, n))
        return ref_fail(r, BODYSCAN_E_MODEL_INVALID);
    if (n == 0)
        return ref_fail(r, BODYSCAN_E_MODEL_EMPTY);
    memcpy(r->value, value, n);
    r->value_n = n;
    r->has_value = true;
    return true;
}

/* The cursor is behind an opening bracket, on the level given; moves it behind the closing one. */
static bool ref_nested(struct reference *r, char open, int level)
{
    if (level > SCAN_DEPTH_MAX)
        return ref_fail(r, BODYSCAN_E_BODY_TOO_DEEP);
    while (r->at < r->n) {
        uint8_t c = r->text[r->at++];

        if (c == '"') {
            if (!ref_skip_string(r))
                return false;
        } else if (c == '{' || c == '[') {
            if (!ref_nested(r, (char)c, level + 1))
                return false;
        } else if (c == '}' || c == ']') {
            return (c == '}') == (open == '{') ? true : ref_fail(r, BODYSCAN_E_BODY_MALFORMED);
        } else if (!ref_is_scalar(c) && (c == 0 || strchr(" \t\r\n,:", c) == NULL)) {
            return ref_fail(r, BODYSCAN_E_BODY_MALFORMED);
        }
    }
    return ref_fail(r, BODYSCAN_E_BODY_MALFORMED);
}

static bool ref_value(struct reference *r, bool is_model)
{
    int c = ref_look(r);

    if (is_model && (ref_is_scalar(c) || c == '{' || c == '['))
        return ref_fail(r, BODYSCAN_E_MODEL_NOT_STRING);
    if (ref_is_scalar(c)) {
        while (ref_is_scalar(ref_look(r)))
            r->at++;
        return true;
    }
    r->at++;
    if (c == '"')
        return is_model ? ref_model(r) : ref_skip_string(r);
    if (c == '{' || c == '[')
        return ref_nested(r, (char)c, 2);
    return ref_fail(r, BODYSCAN_E_BODY_MALFORMED);
}

/* The cursor is behind the first {. */
static bool ref_object(struct reference *r)
{
    bool is_model;

    ref_space(r);
    if (ref_look(r) == 0)
        return ref_fail(r, BODYSCAN_E_BODY_ENCODING);
    if (ref_look(r) == '}') {
        r->at++;
        return true;
    }
    for (;;) {
        ref_space(r);
        if (ref_look(r) != '"')
            return ref_fail(r, BODYSCAN_E_BODY_MALFORMED);
        r->at++;
        if (!ref_key(r, &is_model))
            return false;
        ref_space(r);
        if (ref_look(r) != ':')
            return ref_fail(r, BODYSCAN_E_BODY_MALFORMED);
        r->at++;
        ref_space(r);
        if (!ref_value(r, is_model))
            return false;
        ref_space(r);
        if (ref_look(r) == '}') {
            r->at++;
            return true;
        }
        if (ref_look(r) != ',')
            return ref_fail(r, BODYSCAN_E_BODY_MALFORMED);
        r->at++;
    }
}

/* What comes before the object. False: there is no object, or an error. */
static bool ref_start(struct reference *r, enum scan_mode mode)
{
    static const uint8_t bom[] = {0xEF, 0xBB, 0xBF};
    bool wide = false;
    int c;

    if (r->n >= 3 && memcmp(r->text, bom, 3) == 0)
        r->at = 3;
    for (;; r->at++) {
        ref_space(r);
        c = ref_look(r);
        if (c != 0x00 && c != 0xFE && c != 0xFF)
            break;
        if (mode == SCAN_JSON)
            return ref_fail(r, BODYSCAN_E_BODY_ENCODING);
        wide = true;
    }
    r->none = c == -1;
    if (c == '{' && wide)
        return ref_fail(r, BODYSCAN_E_BODY_ENCODING);
    if (c == '{') {
        r->at++;
        return true;
    }
    if (!r->none) {
        r->none = mode == SCAN_SNIFF || strchr("[\"-0123456789tfn", c) != NULL;
        if (!r->none)
            return ref_fail(r, BODYSCAN_E_BODY_MALFORMED);
    }
    return false;
}

/* The verdict at the end of the text. */
static enum bodyscan_verdict reference_scan(struct reference *r, enum scan_mode mode, const void *text,
                                            size_t n)
{
    memset(r, 0, sizeof(*r));
    r->text = text;
    r->n = n;
    if (!ref_start(r, mode))
        return r->none ? BODYSCAN_NONE : BODYSCAN_BAD;
    if (!ref_object(r))
        return BODYSCAN_BAD;
    ref_space(r);
    if (r->at < r->n) {
        r->error = BODYSCAN_E_BODY_MALFORMED;
        return BODYSCAN_BAD;
    }
    return r->has_value ? BODYSCAN_FOUND : BODYSCAN_NONE;
}

/* In a text with several faults the two may meet another one first, within these. */
static bool ref_is_value_fault(enum bodyscan_error e)
{
    return e == BODYSCAN_E_MODEL_INVALID || e == BODYSCAN_E_MODEL_TOO_LONG || e == BODYSCAN_E_BODY_MALFORMED;
}

/* scan.c's answer is the reference's. */
static bool reference_agrees(const struct reference *r, enum bodyscan_verdict expected, const struct scan *s,
                             enum bodyscan_verdict got)
{
    if (got != expected)
        return false;
    if (got == BODYSCAN_FOUND)
        return slice_eq(scan_model(s), (struct slice){r->value, r->value_n});
    if (got == BODYSCAN_BAD)
        return scan_error(s) == r->error ||
               (ref_is_value_fault(r->error) && ref_is_value_fault(scan_error(s)));
    return true;
}

#endif
