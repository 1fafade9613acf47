/*
 * log.h - log lines: built in place, JSON or logfmt, handed to one writer thread.
 *
 * A loop never waits for the log: each thread collects its lines in a buffer of its own and passes it
 * on when it is large or old enough; the writer thread does the write(2). What the writer cannot keep up with is dropped
 * and counted. Never any key, credential or body.
 *
 *     struct log_line *l = log_begin(LOG_INFO, "call");
 *     log_str(l, "model", model);
 *     log_u64(l, "bytes", n);
 *     log_end(l);
 */
#ifndef LG_LOG_H
#define LG_LOG_H

#include "base.h"
#include "str.h"

enum log_level { LOG_ERROR, LOG_WARN, LOG_INFO, LOG_DEBUG };

/* Boot: starts the writer thread. file "": standard error. False: the file cannot be opened, or the old one takes no lines (errno tells); the old one stays. Also for reload. */
MUST_CHECK bool log_open(bool json, enum log_level level, const char *file);
/* Writes out everything that was handed over, stops the writer. Last of all. */
void log_close(void);

struct log_line;

static inline bool log_wants(enum log_level level);

/* A new line with time, level and event; NULL when the level is off or there is no memory (all functions take NULL). One at a time per thread. */
struct log_line *log_begin(enum log_level level, const char *event);
void log_str(struct log_line *l, const char *key, struct slice value); /* escaped */
void log_text(struct log_line *l, const char *key, const char *value);
void log_u64(struct log_line *l, const char *key, uint64_t value);
void log_i64(struct log_line *l, const char *key, int64_t value);
void log_ms(struct log_line *l, const char *key, uint64_t us); /* as milliseconds with three decimals */
void log_bool(struct log_line *l, const char *key, bool value);
void log_end(struct log_line *l);

/* A whole line of one message: log_event(LOG_WARN, "redis", "timeout after %u ms", n). */
void log_event(enum log_level level, const char *event, const char *fmt, ...) PRINTF_LIKE(3, 4);

/*
 * For what may repeat quickly: true at most once a second per `last_s` (caller's own zeroed store), and *suppressed
 * then tells how many were held back since.
 */
bool log_may_repeat(uint64_t *last_s, uint64_t *held_back, uint64_t *suppressed);

/* Passes this thread's lines to the writer; call it at the end of a turn when lines may be older than ~200 ms, and before the thread ends. */
void log_flush(void);
/* Bytes collected and not passed on by this thread. */
size_t log_pending(void);
/* Frees this thread's buffer (it flushes first). */
void log_thread_end(void);
uint64_t log_lines_dropped(void);

extern _Atomic int log_level_; /* private: for log_wants */

static inline bool log_wants(enum log_level level)
{
    return (int)level <= __atomic_load_n((const int *)&log_level_, __ATOMIC_RELAXED);
}

#endif
