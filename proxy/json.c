/*
 * json.c - JSON strings. Bytes that need no escape are copied in runs.
 */
#include "json.h"

/* An escape, \u00XX, is the longest thing that one byte can become. */
#define ESCAPED_MAX 6

/* Length of the well-formed UTF-8 sequence at p (RFC 3629 section 4), 0 if there is none. */
static size_t utf8_sequence(const unsigned char *p, size_t n)
{
    size_t length = p[0] < 0xc2 ? 0 : p[0] < 0xe0 ? 2 : p[0] < 0xf0 ? 3 : p[0] < 0xf5 ? 4 : 0;
    unsigned char low = 0x80, high = 0xbf;

    if (length == 0 || n < length)
        return 0;
    if (p[0] == 0xe0) /* overlong */
        low = 0xa0;
    else if (p[0] == 0xed) /* surrogates */
        high = 0x9f;
    else if (p[0] == 0xf0) /* overlong */
        low = 0x90;
    else if (p[0] == 0xf4) /* above U+10FFFF */
        high = 0x8f;
    if (p[1] < low || p[1] > high)
        return 0;
    for (size_t i = 2; i < length; i++)
        if ((p[i] & 0xc0) != 0x80)
            return 0;
    return length;
}

/* Writes the escape of c at out, returns its length. */
static size_t put_escape(char *out, unsigned char c)
{
    static const char short_form[32] = {
        ['\b'] = 'b', ['\t'] = 't', ['\n'] = 'n', ['\f'] = 'f', ['\r'] = 'r',
    };
    static const char hex[16] = "0123456789abcdef";
    char letter = c < sizeof(short_form) ? short_form[c] : (char)c;

    out[0] = '\\';
    if (letter != 0) {
        out[1] = letter;
        return 2;
    }
    memcpy(out + 1, "u00", 3);
    out[4] = hex[c >> 4];
    out[5] = hex[c & 15];
    return ESCAPED_MAX;
}

bool json_put_string(struct buf *out, struct slice s)
{
    const unsigned char *p = (const unsigned char *)s.p;
    size_t run = 0, i = 0;
    char *o;

    if (s.n > (SIZE_MAX - 2) / ESCAPED_MAX || !buf_reserve(out, s.n * ESCAPED_MAX + 2))
        return false;
    o = out->p + out->n;
    *o++ = '"';
    while (i < s.n) {
        size_t plain = p[i] >= 0x80 ? utf8_sequence(p + i, s.n - i)
                                    : p[i] >= 0x20 && p[i] != '"' && p[i] != '\\';

        if (plain > 0) {
            i += plain;
            continue;
        }
        memcpy(o, p + run, i - run);
        o += i - run;
        if (p[i] < 0x80) {
            o += put_escape(o, p[i]);
        } else {
            memcpy(o, "\xef\xbf\xbd", 3);
            o += 3;
        }
        run = ++i;
    }
    if (i > run)
        memcpy(o, p + run, i - run);
    o += i - run;
    *o++ = '"';
    out->n = (size_t)(o - out->p);
    return true;
}
