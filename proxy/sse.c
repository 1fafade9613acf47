/*
 * sse.c - line by line over the bytes that pass; memchr does the walking.
 */
#include "sse.h"

#include "str.h"

void sse_init(struct sse *s)
{
    *s = (struct sse){.boundary = true};
}

/* Longest of all: "event: response.incomplete" and a CR, 27 bytes: SSE_LINE_KEPT tells it from a longer line. */
static bool is_last_word(struct slice line)
{
    static const struct slice events[] = {{"message_stop", 12},
                                          {"response.completed", 18},
                                          {"response.failed", 15},
                                          {"response.incomplete", 19}};
    size_t colon = slice_find(line, ':');
    struct slice name = {line.p, colon}, value;

    if (colon == line.n)
        return false;
    value = (struct slice){line.p + colon + 1, line.n - colon - 1};
    if (value.n > 0 && value.p[0] == ' ') /* one, and it may be missing */
        value.p++, value.n--;
    if (slice_eq(name, SLICE("data")))
        return slice_eq(value, SLICE("[DONE]"));
    if (!slice_eq(name, SLICE("event")))
        return false;
    for (size_t i = 0; i < ARRAY_LEN(events); i++)
        if (slice_eq(value, events[i]))
            return true;
    return false;
}

/* One whole line, without its end; only its first SSE_LINE_KEPT bytes matter. */
static void take_line(struct sse *s, const char *p, size_t n)
{
    if (n > 0 && p[n - 1] == '\r')
        n--;
    if (n == 0) {
        s->boundary = true;
        s->done |= s->last_word_;
        s->last_word_ = false;
        return;
    }
    if (p[0] == 'd' || p[0] == 'e')
        s->last_word_ |= is_last_word((struct slice){p, n});
    else if (n >= 3 && memcmp(p, "id:", 3) == 0)
        s->saw_id = true;
}

void sse_feed(struct sse *s, const char *bytes, size_t n)
{
    while (n > 0) {
        const char *end = memchr(bytes, '\n', n);
        size_t part = end == NULL ? n : (size_t)(end - bytes);

        if (end != NULL && !s->in_line_) { /* the usual case: the line is here whole */
            s->boundary = false;
            take_line(s, bytes, part);
        } else {
            size_t kept = size_min(part, SSE_LINE_KEPT - s->line_n_);

            memcpy(s->line_ + s->line_n_, bytes, kept);
            s->line_n_ = (uint8_t)(s->line_n_ + kept);
            s->in_line_ = true;
            s->boundary = false;
            if (end != NULL) {
                take_line(s, s->line_, s->line_n_);
                s->in_line_ = false;
                s->line_n_ = 0;
            }
        }
        if (end == NULL)
            return;
        bytes += part + 1;
        n -= part + 1;
    }
}
