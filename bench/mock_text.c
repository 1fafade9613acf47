/*
 * mock_text.c - a bounded text builder over a borrowed buffer. It never allocates and never overflows.
 */
#include "mock.h"

#include <stdarg.h>
#include <stdio.h>

void text_put(struct text *t, const char *s, size_t n)
{
    if (n > t->cap - t->n) {
        t->full = true;
        n = t->cap - t->n;
    }
    memcpy(t->p + t->n, s, n);
    t->n += n;
}

void text_str(struct text *t, const char *s)
{
    text_put(t, s, strlen(s));
}

void text_u64(struct text *t, uint64_t v)
{
    char digits[20];
    size_t at = sizeof(digits);

    do {
        digits[--at] = (char)('0' + v % 10);
        v /= 10;
    } while (v != 0);
    text_put(t, digits + at, sizeof(digits) - at);
}

void text_fmt(struct text *t, const char *fmt, ...)
{
    char line[2048];
    va_list args;
    int n;

    va_start(args, fmt);
    n = vsnprintf(line, sizeof(line), fmt, args);
    va_end(args);
    if (n < 0 || (size_t)n >= sizeof(line)) {
        t->full = true;
        return;
    }
    text_put(t, line, (size_t)n);
}

void text_json(struct text *t, struct slice s)
{
    static const char hex[] = "0123456789abcdef";

    for (size_t i = 0; i < s.n; i++) {
        unsigned char ch = (unsigned char)s.p[i];
        char escaped[6] = {'\\', 'u', '0', '0', hex[ch >> 4], hex[ch & 15]};

        if (ch == '"' || ch == '\\') {
            escaped[1] = (char)ch;
            text_put(t, escaped, 2);
        } else if (ch < 0x20 || ch > 0x7e) {
            text_put(t, escaped, 6);
        } else {
            text_put(t, s.p + i, 1);
        }
    }
}

void text_fill(struct text *t, uint64_t n)
{
    static const char words[] =
        "the quick brown fox jumps over the lazy dog and then rests beside a calm stream, "
        "while far away a patient server answers every question it is ever asked; ";

    while (n > 0 && !t->full) {
        size_t piece = n < sizeof(words) - 1 ? (size_t)n : sizeof(words) - 1;

        text_put(t, words, piece);
        n -= piece;
    }
}
