/*
 * timers.h - deadlines of an event loop as a binary heap of pointers, for mock-llm and loadgen.
 *
 * A timer lives in its owner and is armed when pos != 0. Arming and disarming cost O(log n); a timer that
 * is not armed costs nothing. The heap array is owned by struct timers and freed by timers_free.
 */
#ifndef BENCH_TIMERS_H
#define BENCH_TIMERS_H

#include "../proxy/base.h"

#include <stdlib.h>
#include <time.h>

struct timer {
    uint64_t due_ns;
    uint32_t pos; /* in the heap, from 1 */
    uint8_t kind; /* the owner's: which of its timers this is */
};

struct timers {
    struct timer **heap;
    uint32_t n, cap;
};

static inline uint64_t clock_ns(void)
{
    struct timespec ts;

    clock_gettime(CLOCK_MONOTONIC, &ts);
    return (uint64_t)ts.tv_sec * 1000000000u + (uint64_t)ts.tv_nsec;
}

static inline void timers_place_(struct timers *h, struct timer *t, uint32_t pos)
{
    h->heap[pos] = t;
    t->pos = pos;
}

static inline void timers_rise_(struct timers *h, struct timer *t, uint32_t pos)
{
    while (pos > 1 && h->heap[pos / 2]->due_ns > t->due_ns) {
        timers_place_(h, h->heap[pos / 2], pos);
        pos /= 2;
    }
    timers_place_(h, t, pos);
}

static inline void timers_sink_(struct timers *h, struct timer *t, uint32_t pos)
{
    for (;;) {
        uint32_t child = pos * 2;

        if (child > h->n)
            break;
        if (child < h->n && h->heap[child + 1]->due_ns < h->heap[child]->due_ns)
            child++;
        if (h->heap[child]->due_ns >= t->due_ns)
            break;
        timers_place_(h, h->heap[child], pos);
        pos = child;
    }
    timers_place_(h, t, pos);
}

static inline void timers_disarm(struct timers *h, struct timer *t)
{
    uint32_t pos = t->pos;
    struct timer *last;

    if (pos == 0)
        return;
    t->pos = 0;
    last = h->heap[h->n--];
    if (last == t)
        return;
    if (pos > 1 && h->heap[pos / 2]->due_ns > last->due_ns)
        timers_rise_(h, last, pos);
    else
        timers_sink_(h, last, pos);
}

static inline void timers_arm(struct timers *h, struct timer *t, uint64_t due_ns)
{
    timers_disarm(h, t);
    if (h->n + 1 >= h->cap) {
        h->cap = h->cap == 0 ? 256 : h->cap * 2;
        h->heap = realloc(h->heap, h->cap * sizeof(struct timer *));
        BUG_ON(h->heap == NULL);
    }
    t->due_ns = due_ns;
    timers_rise_(h, t, ++h->n);
}

/* The next timer that is due at now_ns, disarmed; NULL: none. */
static inline struct timer *timers_take_due(struct timers *h, uint64_t now_ns)
{
    struct timer *t = h->n > 0 && h->heap[1]->due_ns <= now_ns ? h->heap[1] : NULL;

    if (t != NULL)
        timers_disarm(h, t);
    return t;
}

/* How long to wait for the next one, at most max_ns. */
static inline uint64_t timers_wait_ns(const struct timers *h, uint64_t now_ns, uint64_t max_ns)
{
    if (h->n == 0)
        return max_ns;
    if (h->heap[1]->due_ns <= now_ns)
        return 0;
    return h->heap[1]->due_ns - now_ns < max_ns ? h->heap[1]->due_ns - now_ns : max_ns;
}

static inline void timers_free(struct timers *h)
{
    free(h->heap);
    h->heap = NULL;
    h->n = h->cap = 0;
}

#endif
