/*
 * redis_value.h - what Redis replies: bytes in, values out. Knows no connection.
 *
 * A value belongs to the reader that gave it out, its elements to it; nobody else frees either.
 */
#ifndef LG_REDIS_VALUE_H
#define LG_REDIS_VALUE_H

#include "base.h"
#include "str.h"

struct redis_value;

enum redis_type { REDIS_TYPE_NIL, REDIS_TYPE_INT, REDIS_TYPE_STRING, REDIS_TYPE_ARRAY, REDIS_TYPE_ERROR };
enum redis_type redis_value_type(const struct redis_value *v);
int64_t redis_value_int(const struct redis_value *v);
struct slice redis_value_str(
    const struct redis_value *v); /* strings, status and errors; a NUL stands behind them */
size_t redis_value_count(const struct redis_value *v);
const struct redis_value *redis_value_at(const struct redis_value *v, size_t i);
/*
 * An error reply with this code (`WRONGTYPE`), also where Redis 6 wraps it into the text of a script error.
 */
bool redis_value_is_error(const struct redis_value *v, const char *code);

/*
 * Feed bytes, then take replies until NULL; a reply is valid until the next redis_reader call. *failed: the
 * bytes were no RESP, or there was no memory; only redis_reader_trouble and redis_reader_free may follow.
 */
struct redis_reader;
struct redis_reader *redis_reader_new(void); /* NULL: no memory */
void redis_reader_free(struct redis_reader *rd);
MUST_CHECK bool redis_reader_feed(struct redis_reader *rd, const char *bytes, size_t n);
const struct redis_value *redis_reader_next(struct redis_reader *rd, bool *failed);
/* Why it failed: "no_memory" or "protocol". */
const char *redis_reader_trouble(const struct redis_reader *rd);

#endif
