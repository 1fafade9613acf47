/*
 * fuzz_resp.c - any bytes as replies of a Redis server: in one piece, in two, and one by one they must give
 * the same replies, or fail, and every reply can be walked to its last element.
 *
 * And the other way: any bytes as an argument, written as a command, are read back as exactly that.
 */
#include "buf.h"
#include "mem.h"
#include "redis.h"
#include "resp.h"

#include <stdint.h>
#include <stdlib.h>

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t n);

static uint64_t mix(uint64_t sum, const void *p, size_t n)
{
    const unsigned char *b = p;

    for (size_t i = 0; i < n; i++)
        sum = (sum ^ b[i]) * 1099511628211U;
    return sum;
}

static uint64_t walk(const struct redis_value *v, uint64_t sum)
{
    enum redis_type type = redis_value_type(v);
    int64_t number;

    sum = mix(sum, &type, sizeof(type));
    switch (type) {
    case REDIS_TYPE_INT:
        number = redis_value_int(v);
        return mix(sum, &number, sizeof(number));
    case REDIS_TYPE_ERROR:
        sum += redis_value_is_error(v, "WRONGTYPE");
        return mix(sum, redis_value_str(v).p, redis_value_str(v).n);
    case REDIS_TYPE_STRING:
        return mix(sum, redis_value_str(v).p, redis_value_str(v).n);
    case REDIS_TYPE_ARRAY:
        for (size_t i = 0; i < redis_value_count(v); i++)
            sum = walk(redis_value_at(v, i), sum);
        return sum;
    case REDIS_TYPE_NIL:
        break;
    }
    return sum;
}

/* Feeds pieces of `step` bytes; a sum of all replies before the failure, if any. */
static uint64_t read_all(const char *bytes, size_t n, size_t step, bool *failed)
{
    struct redis_reader *rd = redis_reader_new();
    uint64_t sum = 14695981039346656037U;

    *failed = false;
    for (size_t at = 0; at < n && !*failed; at += step) {
        const struct redis_value *v;

        if (!redis_reader_feed(rd, bytes + at, size_min(step, n - at)))
            *failed = true;
        while (!*failed && (v = redis_reader_next(rd, failed)) != NULL)
            sum = walk(v, sum);
    }
    redis_reader_free(rd);
    return sum;
}

static void round_trip(struct slice argument)
{
    struct redis_reader *rd = redis_reader_new();
    struct buf b = {0};
    const struct redis_value *v;
    bool failed;

    if (!resp_put_command(&b, 2) || !resp_put_bulk(&b, argument) || !resp_put_u64(&b, argument.n))
        abort();
    if (!redis_reader_feed(rd, b.p, b.n))
        abort();
    v = redis_reader_next(rd, &failed); /* a command has the form of a reply */
    BUG_ON(v == NULL || failed || redis_value_count(v) != 2);
    BUG_ON(!slice_eq(redis_value_str(redis_value_at(v, 0)), argument));
    BUG_ON(redis_reader_next(rd, &failed) != NULL || failed);
    buf_free(&b);
    redis_reader_free(rd);
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t n)
{
    const char *p = (const char *)bytes;
    bool whole_failed, halves_failed, single_failed;
    uint64_t whole = read_all(p, n, n > 0 ? n : 1, &whole_failed);
    uint64_t halves = read_all(p, n, n / 2 + 1, &halves_failed);
    uint64_t single = read_all(p, n, 1, &single_failed);

    BUG_ON(whole != halves || whole != single || whole_failed != halves_failed ||
           whole_failed != single_failed);
    round_trip((struct slice){p, n});
    BUG_ON(mem_live_blocks() != 0);
    return 0;
}
