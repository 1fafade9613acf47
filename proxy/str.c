/*
 * str.c - slices and bounded parsing.
 */
#include "str.h"

bool slice_ieq(struct slice a, struct slice b)
{
    if (a.n != b.n)
        return false;
    for (size_t i = 0; i < a.n; i++)
        if (ascii_lower(a.p[i]) != ascii_lower(b.p[i]))
            return false;
    return true;
}

bool slice_starts_with(struct slice s, struct slice prefix)
{
    return s.n >= prefix.n && (prefix.n == 0 || memcmp(s.p, prefix.p, prefix.n) == 0);
}

bool slice_ends_with(struct slice s, struct slice suffix)
{
    return s.n >= suffix.n && (suffix.n == 0 || memcmp(s.p + s.n - suffix.n, suffix.p, suffix.n) == 0);
}

struct slice slice_trim(struct slice s)
{
    while (s.n > 0 && (s.p[0] == ' ' || s.p[0] == '\t'))
        s.p++, s.n--;
    while (s.n > 0 && (s.p[s.n - 1] == ' ' || s.p[s.n - 1] == '\t'))
        s.n--;
    return s;
}

size_t slice_find(struct slice s, char c)
{
    const char *at = s.n == 0 ? NULL : memchr(s.p, c, s.n);

    return at == NULL ? s.n : (size_t)(at - s.p);
}

bool slice_next_element(struct slice *rest, struct slice *element)
{
    size_t comma;

    if (rest->p == NULL)
        return false;
    comma = slice_find(*rest, ',');
    *element = slice_trim((struct slice){rest->p, comma});
    if (comma == rest->n)
        *rest = (struct slice){NULL, 0};
    else
        *rest = (struct slice){rest->p + comma + 1, rest->n - comma - 1};
    return true;
}

bool str_parse_u64(struct slice s, uint64_t *out)
{
    uint64_t v = 0;

    if (s.n == 0)
        return false;
    for (size_t i = 0; i < s.n; i++) {
        uint64_t digit = (uint64_t)(unsigned char)s.p[i] - '0';

        if (digit > 9 || v > (UINT64_MAX - digit) / 10)
            return false;
        v = v * 10 + digit;
    }
    *out = v;
    return true;
}

struct unit {
    const char *name;
    uint64_t factor;
};

/* A number directly followed by one of the units. */
static bool parse_with_unit(struct slice s, const struct unit *units, size_t n_units, uint64_t *out)
{
    size_t digits = 0;
    uint64_t v;

    while (digits < s.n && s.p[digits] >= '0' && s.p[digits] <= '9')
        digits++;
    if (!str_parse_u64((struct slice){s.p, digits}, &v))
        return false;
    for (size_t i = 0; i < n_units; i++) {
        if (!slice_eq((struct slice){s.p + digits, s.n - digits}, slice_of(units[i].name)))
            continue;
        if (v > UINT64_MAX / units[i].factor)
            return false;
        *out = v * units[i].factor;
        return true;
    }
    return false;
}

bool str_parse_duration_ms(struct slice s, uint64_t *out_ms)
{
    static const struct unit units[] = {{"ms", 1}, {"s", 1000}, {"m", 60 * 1000}, {"h", 3600 * 1000}};

    if (slice_eq(s, SLICE("0"))) {
        *out_ms = 0;
        return true;
    }
    return parse_with_unit(s, units, ARRAY_LEN(units), out_ms);
}

bool str_parse_size(struct slice s, uint64_t *out_bytes)
{
    static const struct unit units[] = {{"", 1}, {"k", 1 << 10}, {"m", 1 << 20}, {"g", 1 << 30}};

    return parse_with_unit(s, units, ARRAY_LEN(units), out_bytes);
}

bool str_glob(struct slice pattern, struct slice text)
{
    size_t p = 0, t = 0, star = SIZE_MAX, retry = 0;

    while (t < text.n) {
        if (p < pattern.n && pattern.p[p] == '*') {
            star = p++;
            retry = t;
        } else if (p < pattern.n && pattern.p[p] == text.p[t]) {
            p++;
            t++;
        } else if (star != SIZE_MAX) {
            p = star + 1;
            t = ++retry;
        } else {
            return false;
        }
    }
    while (p < pattern.n && pattern.p[p] == '*')
        p++;
    return p == pattern.n;
}

size_t str_put_u64(char *out, uint64_t v)
{
    char digits[20];
    size_t n = 0;

    if (v < 10) { /* most lengths and counts that are written */
        out[0] = (char)('0' + v);
        return 1;
    }
    if (v < 100) {
        out[0] = (char)('0' + v / 10);
        out[1] = (char)('0' + v % 10);
        return 2;
    }
    do {
        digits[n++] = (char)('0' + v % 10);
        v /= 10;
    } while (v > 0);
    for (size_t i = 0; i < n; i++)
        out[i] = digits[n - 1 - i];
    return n;
}

size_t str_put_hex(char *out, uint64_t v)
{
    static const char digit[16] = "0123456789abcdef";
    size_t n = 1;

    while (n < 16 && v >> (4 * n) != 0)
        n++;
    for (size_t i = 0; i < n; i++)
        out[i] = digit[(v >> (4 * (n - 1 - i))) & 15];
    return n;
}
