/*
 * mem.c - allocation with a live-block count and the fail-n-th switch.
 *
 * Plain malloc underneath: glibc's per-thread caches already serve the small,
 * short-lived blocks of a call; a slab on top was not measured to win.
 */
#include "mem.h"

#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* One count a thread would need a registry to sum; a relaxed add costs less than the malloc beside it,
 * and blocks may be freed by another thread than the one that made them. */
static atomic_size_t live_blocks;
static atomic_uint_fast64_t fail_countdown; /* 0: off */
static atomic_bool fail_for_ever;

static bool must_fail(void)
{
    uint64_t left = atomic_load_explicit(&fail_countdown, memory_order_relaxed);

    if (LIKELY(left == 0))
        return false;
    if (left > 1) {
        atomic_fetch_sub_explicit(&fail_countdown, 1, memory_order_relaxed);
        return false;
    }
    if (!atomic_load_explicit(&fail_for_ever, memory_order_relaxed))
        atomic_store_explicit(&fail_countdown, 0, memory_order_relaxed);
    return true;
}

static void *counted(void *p)
{
    if (p != NULL)
        atomic_fetch_add_explicit(&live_blocks, 1, memory_order_relaxed);
    return p;
}

void *mem_alloc(size_t n)
{
    BUG_ON(n == 0);
    if (must_fail())
        return NULL;
    return counted(malloc(n));
}

void *mem_zalloc(size_t n)
{
    BUG_ON(n == 0);
    if (must_fail())
        return NULL;
    return counted(calloc(1, n));
}

void *mem_realloc(void *p, size_t n)
{
    void *q;

    BUG_ON(n == 0);
    if (must_fail())
        return NULL;
    q = realloc(p, n);
    return p == NULL ? counted(q) : q;
}

char *mem_strndup(const char *s, size_t n)
{
    char *copy = mem_alloc(n + 1);

    if (copy == NULL)
        return NULL;
    memcpy(copy, s, n);
    copy[n] = '\0';
    return copy;
}

void mem_free(void *p)
{
    if (p == NULL)
        return;
    atomic_fetch_sub_explicit(&live_blocks, 1, memory_order_relaxed);
    free(p);
}

NORETURN COLD static void out_of_memory(size_t n)
{
    fprintf(stderr, "leasegate: out of memory: %zu bytes at start-up\n", n);
    exit(70); /* EX_SOFTWARE */
}

void *mem_must_zalloc(size_t n)
{
    void *p = counted(calloc(1, n));

    if (p == NULL)
        out_of_memory(n);
    return p;
}

char *mem_must_strndup(const char *s, size_t n)
{
    char *copy = mem_must_zalloc(n + 1);

    memcpy(copy, s, n);
    return copy;
}

void *mem_must_realloc(void *p, size_t n)
{
    void *q = realloc(p, n);

    if (q == NULL)
        out_of_memory(n);
    return p == NULL ? counted(q) : q;
}

size_t mem_live_blocks(void)
{
    return atomic_load_explicit(&live_blocks, memory_order_relaxed);
}

void mem_fail_at(uint64_t n, bool for_ever)
{
    atomic_store_explicit(&fail_for_ever, for_ever, memory_order_relaxed);
    atomic_store_explicit(&fail_countdown, n, memory_order_relaxed);
}
