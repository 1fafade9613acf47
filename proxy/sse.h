/*
 * sse.h - looks at a stream of server-sent events as it passes: does it stand at
 * an event boundary, has its API said the last word. Changes nothing, keeps at most one line's beginning.
 * (WHATWG HTML, section 9.2 "Server-sent events"; terminators: what the OpenAI and Anthropic SDKs stop at.)
 */
#ifndef LG_SSE_H
#define LG_SSE_H

#include "base.h"

#define SSE_LINE_KEPT 28

struct sse {
    char line_[SSE_LINE_KEPT]; /* the beginning of the line that is not complete yet */
    uint8_t line_n_;
    bool in_line_;   /* the line has bytes, perhaps more than are kept */
    bool last_word_; /* the event that is not complete yet is a terminator */
    bool boundary;   /* the last bytes were a blank line, or nothing has come yet */
    bool done;       /* a terminator event is complete: [DONE], message_stop, response.completed … */
    bool saw_id;     /* an `id:` line came: some SDKs then trip over extra blank lines */
};

void sse_init(struct sse *s);
void sse_feed(struct sse *s, const char *bytes, size_t n);

#endif
