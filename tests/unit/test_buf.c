/*
 * test_buf.c - the buffer and the queue under random operations against plain arrays, and what happens without memory.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#include <cmocka.h>

#include "buf.h"
#include "mem.h"

#define MODEL_BYTES (1u << 20)

static unsigned seed;

static size_t below(size_t n)
{
    return (size_t)rand_r(&seed) % n;
}

/* Mostly small, sometimes just around a chunk's size, sometimes several chunks. */
static size_t some_size(void)
{
    switch (below(8)) {
    case 0:
        return 0;
    case 1:
        return 980 + below(60);
    case 2:
        return 16300 + below(200);
    case 3:
        return below(100000);
    default:
        return below(300);
    }
}

static void fill(char *p, size_t n)
{
    for (size_t i = 0; i < n; i++)
        p[i] = (char)rand_r(&seed);
}

static void test_buf_is_as_the_model(void **state)
{
    static char model[MODEL_BYTES], bytes[100000];
    struct buf b = {0};
    size_t n = 0, before = mem_live_blocks();

    (void)state;
    seed = 1;
    for (int step = 0; step < 3000; step++) {
        size_t part = some_size();

        if (below(2) == 0 && n + part <= MODEL_BYTES) {
            fill(bytes, part);
            assert_true(buf_put(&b, (struct slice){bytes, part}));
            memcpy(model + n, bytes, part);
            n += part;
        } else if (below(20) == 0) {
            buf_free(&b);
            n = 0;
            assert_null(b.p);
            assert_int_equal(mem_live_blocks(), before);
        } else {
            part = size_min(part, n);
            buf_drop(&b, part);
            memmove(model, model + part, n - part);
            n -= part;
        }
        if (below(10) == 0) {
            size_t more = some_size();

            assert_true(buf_reserve(&b, more));
            if (more > 0)
                memset(b.p + b.n, 0x55, more); /* all of it is ours */
        }
        assert_int_equal(buf_slice(&b).n, n);
        if (n > 0)
            assert_memory_equal(b.p, model, n);
    }
    buf_free(&b);
    buf_free(&b);
    assert_int_equal(mem_live_blocks(), before);
}

static void test_buf_without_memory(void **state)
{
    struct buf b = {0};
    char big[1000] = {0};

    (void)state;
    assert_true(buf_put(&b, SLICE("kept")));
    mem_fail_at(1, true);
    assert_false(buf_put(&b, (struct slice){big, sizeof(big)}));
    assert_false(buf_reserve(&b, 1000));
    assert_true(buf_put(&b, SLICE(" room"))); /* is there */
    mem_fail_at(0, false);
    assert_true(slice_eq(buf_slice(&b), SLICE("kept room")));
    assert_false(buf_reserve(&b, SIZE_MAX)); /* the sum would wrap */
    assert_false(buf_reserve(&b, SIZE_MAX - 4));
    assert_true(slice_eq(buf_slice(&b), SLICE("kept room")));
    buf_free(&b);
}

/* --- queue ------------------------------------------------------------------------------------------------------- */

struct model {
    struct queue q;
    char *bytes;
    size_t n;
};

static void check_queue(const struct model *m)
{
    struct iovec iov[3];
    size_t n = queue_peek(&m->q, iov, ARRAY_LEN(iov)), at = 0;

    assert_int_equal(m->q.bytes, m->n);
    assert_int_equal(n == 0, m->n == 0);
    for (size_t i = 0; i < n; i++) {
        assert_true(iov[i].iov_len > 0 && at + iov[i].iov_len <= m->n);
        assert_memory_equal(iov[i].iov_base, m->bytes + at, iov[i].iov_len);
        at += iov[i].iov_len;
    }
    if (n < ARRAY_LEN(iov)) /* then that was all */
        assert_int_equal(at, m->n);
    if (m->n == 0) /* an empty queue owns no memory */
        assert_int_equal(queue_memory(&m->q), 0);
    else
        assert_true(queue_memory(&m->q) >= m->n);
}

static void put(struct model *m, size_t part)
{
    static char bytes[100000];

    part = size_min(part, MODEL_BYTES - m->n);
    fill(bytes, part);
    assert_true(queue_put(&m->q, bytes, part));
    memcpy(m->bytes + m->n, bytes, part);
    m->n += part;
}

static void drop(struct model *m, size_t part)
{
    part = size_min(part, m->n);
    queue_drop(&m->q, part);
    memmove(m->bytes, m->bytes + part, m->n - part);
    m->n -= part;
}

static void move(struct model *to, struct model *from)
{
    if (to->n + from->n > MODEL_BYTES)
        return;
    queue_move(&to->q, &from->q);
    memcpy(to->bytes + to->n, from->bytes, from->n);
    to->n += from->n;
    from->n = 0;
}

static void test_queue_is_as_the_model(void **state)
{
    size_t before = mem_live_blocks();
    struct model m[2] = {{.bytes = malloc(MODEL_BYTES)}, {.bytes = malloc(MODEL_BYTES)}};

    (void)state;
    seed = 2;
    for (int step = 0; step < 6000; step++) {
        struct model *a = &m[below(2)], *b = a == m ? m + 1 : m;

        switch (below(8)) {
        case 0:
        case 1:
        case 2:
            put(a, some_size());
            break;
        case 3:
        case 4:
            drop(a, some_size());
            break;
        case 5: /* to the end of what one peek shows, as a write does */
        {
            struct iovec iov[2];
            size_t n = queue_peek(&a->q, iov, 2), part = 0;

            for (size_t i = 0; i < n; i++)
                part += iov[i].iov_len;
            drop(a, part);
            break;
        }
        case 6:
            move(a, b);
            break;
        default:
            if (below(10) == 0) {
                queue_free(&a->q);
                a->n = 0;
            } else {
                drop(a, a->n);
            }
        }
        check_queue(a);
        check_queue(b);
        if (m[0].n == 0 && m[1].n == 0)
            assert_int_equal(mem_live_blocks(), before);
    }
    for (int i = 0; i < 2; i++) {
        queue_free(&m[i].q);
        queue_free(&m[i].q);
        free(m[i].bytes);
    }
    assert_int_equal(mem_live_blocks(), before);
}

/* Many small puts share chunks: the memory is in proportion to the bytes. */
static void test_queue_memory_is_in_proportion(void **state)
{
    struct queue q = {0};

    (void)state;
    assert_true(queue_put(&q, "x", 1));
    assert_true(queue_memory(&q) <= 1024);
    for (int i = 0; i < 100000; i++)
        assert_true(queue_put(&q, "0123456789", 10));
    assert_int_equal(q.bytes, 1000001);
    assert_true(queue_memory(&q) < 1000001 + 1000001 / 10 + 32768);
    queue_free(&q);
    assert_int_equal(queue_memory(&q), 0);
}

/* Each allocation that a put needs, missing in turn: all or nothing. */
static void test_queue_without_memory(void **state)
{
    static char big[50000];
    size_t before = mem_live_blocks();

    (void)state;
    for (unsigned n = 1; n < 10; n++) {
        struct queue q = {0};
        size_t had;
        bool ok;

        assert_true(queue_put(&q, "first", 5));
        had = mem_live_blocks();
        mem_fail_at(n, false);
        ok = queue_put(&q, big, sizeof(big));
        mem_fail_at(0, false);
        assert_int_equal(q.bytes, ok ? 5 + sizeof(big) : 5);
        if (!ok)
            assert_int_equal(mem_live_blocks(), had);
        assert_true(ok || n <= 4); /* 49 KB are four chunks */
        assert_false(ok && n <= 3);
        assert_true(queue_put(&q, "more", 4));
        queue_drop(&q, q.bytes - 4);
        assert_int_equal(q.bytes, 4);
        queue_drop(&q, 4);
        assert_int_equal(mem_live_blocks(), before);
    }
}

static int no_blocks(void **state)
{
    (void)state;
    return mem_live_blocks() == 0 ? 0 : -1;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_teardown(test_buf_is_as_the_model, no_blocks),
        cmocka_unit_test_teardown(test_buf_without_memory, no_blocks),
        cmocka_unit_test_teardown(test_queue_is_as_the_model, no_blocks),
        cmocka_unit_test_teardown(test_queue_memory_is_in_proportion, no_blocks),
        cmocka_unit_test_teardown(test_queue_without_memory, no_blocks),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
