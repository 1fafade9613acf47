/* modelname.c - see modelname.h. */
#include "modelname.h"

void model_name_init(struct model_name *m)
{
    m->n_ = 0;
    m->need_ = 0;
    m->low_ = 0x80;
    m->high_ = 0xBF;
}

/*
 * The first byte of a character decides how many follow and how the second is
 * bounded (RFC 3629 section 4: no overlong forms, no surrogates, nothing above
 * U+10FFFF). After C2 the bound also keeps out C1, U+0080 to U+009F.
 */
static bool begin_character(struct model_name *m, uint8_t c)
{
    m->low_ = 0x80;
    m->high_ = 0xBF;
    if (c < 0x20 || c == 0x7F)
        return false;
    if (c < 0x80)
        return true;
    if (c < 0xC2 || c > 0xF4)
        return false;
    m->need_ = c < 0xE0 ? 1 : c < 0xF0 ? 2 : 3;
    switch (c) {
    case 0xC2:
    case 0xE0:
        m->low_ = 0xA0;
        break;
    case 0xED:
        m->high_ = 0x9F;
        break;
    case 0xF0:
        m->low_ = 0x90;
        break;
    case 0xF4:
        m->high_ = 0x8F;
        break;
    default:
        break;
    }
    return true;
}

enum bodyscan_error model_name_put(struct model_name *m, uint8_t c)
{
    if (m->need_ > 0) {
        if (c < m->low_ || c > m->high_)
            return BODYSCAN_E_MODEL_INVALID;
        m->need_--;
        m->low_ = 0x80;
        m->high_ = 0xBF;
    } else if (!begin_character(m, c)) {
        return BODYSCAN_E_MODEL_INVALID;
    }
    if (m->n_ == MODEL_NAME_MAX)
        return BODYSCAN_E_MODEL_TOO_LONG;
    m->bytes_[m->n_++] = (char)c;
    return BODYSCAN_E_OK;
}

enum bodyscan_error model_name_put_code_point(struct model_name *m, uint32_t cp)
{
    uint8_t utf8[4];
    size_t n = cp < 0x80 ? 1 : cp < 0x800 ? 2 : cp < 0x10000 ? 3 : 4;

    if (n == 1) {
        utf8[0] = (uint8_t)cp;
    } else {
        for (size_t i = n - 1; i > 0; i--, cp >>= 6)
            utf8[i] = (uint8_t)(0x80 | (cp & 0x3F));
        utf8[0] = (uint8_t)((0xF00U >> n) | cp);
    }
    /* By the gate of raw bytes, which knows what is forbidden: an escape inside of a raw character, too. */
    for (size_t i = 0; i < n; i++) {
        enum bodyscan_error e = model_name_put(m, utf8[i]);

        if (e != BODYSCAN_E_OK)
            return e;
    }
    return BODYSCAN_E_OK;
}

enum bodyscan_error model_name_finish(const struct model_name *m)
{
    if (m->need_ > 0)
        return BODYSCAN_E_MODEL_INVALID;
    return m->n_ == 0 ? BODYSCAN_E_MODEL_EMPTY : BODYSCAN_E_OK;
}
