/* mediatype.c - see mediatype.h. */
#include "mediatype.h"

bool mediatype_is_tchar(uint8_t c)
{
    uint8_t folded = c | 0x20;

    if ((folded >= 'a' && folded <= 'z') || (c >= '0' && c <= '9'))
        return true;
    return c != 0 && strchr("!#$%&'*+-.^_`|~", c) != NULL;
}

static void advance(struct slice *s, size_t n)
{
    if (n == 0) /* of an absent field, whose slice has no address */
        return;
    s->p += n;
    s->n -= n;
}

static void skip_spaces(struct slice *s)
{
    while (s->n > 0 && (*s->p == ' ' || *s->p == '\t'))
        advance(s, 1);
}

struct slice mediatype_take_type(struct slice *rest)
{
    size_t n = slice_find(*rest, ';');
    struct slice type = {rest->p, n};

    advance(rest, n);
    return slice_trim(type);
}

/* *rest begins behind the opening quote. */
static bool take_quoted(struct slice *rest, struct mediatype_param *out)
{
    size_t i = 0;

    for (; i < rest->n && rest->p[i] != '"'; i++) {
        if (rest->p[i] != '\\')
            continue;
        out->has_escape = true;
        if (++i == rest->n)
            return false;
        out->escaped_quote = out->escaped_quote || rest->p[i] == '"';
    }
    if (i == rest->n)
        return false;
    out->value = (struct slice){rest->p, i};
    advance(rest, i + 1);
    return true;
}

static bool take_plain(struct slice *rest, struct mediatype_param *out)
{
    size_t i = 0;

    for (; i < rest->n; i++) {
        uint8_t c = (uint8_t)rest->p[i];

        if (c == ';' || c == ' ' || c == '\t')
            break;
        if (c < 0x20 || c == 0x7F || c == '"' || c == ',')
            return false;
    }
    out->value = (struct slice){rest->p, i};
    advance(rest, i);
    return i > 0;
}

enum mediatype_step mediatype_next_param(struct slice *rest, struct mediatype_param *out)
{
    size_t n = 0;

    memset(out, 0, sizeof(*out));
    skip_spaces(rest);
    if (rest->n > 0 && *rest->p != ';')
        return MEDIATYPE_BAD;
    while (rest->n > 0 && (*rest->p == ';' || *rest->p == ' ' || *rest->p == '\t')) /* `;;` names nothing */
        advance(rest, 1);
    if (rest->n == 0)
        return MEDIATYPE_END;
    while (n < rest->n && mediatype_is_tchar((uint8_t)rest->p[n]))
        n++;
    if (n == 0 || n == rest->n || rest->p[n] != '=')
        return MEDIATYPE_BAD;
    out->name = (struct slice){rest->p, n};
    advance(rest, n + 1);
    if (rest->n > 0 && *rest->p == '"') {
        advance(rest, 1);
        return take_quoted(rest, out) ? MEDIATYPE_PARAM : MEDIATYPE_BAD;
    }
    return take_plain(rest, out) ? MEDIATYPE_PARAM : MEDIATYPE_BAD;
}
