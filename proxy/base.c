/*
 * base.c - what BUG_ON and WARN_ON do.
 */
#include "base.h"

#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

static atomic_uint_fast64_t warnings;
static atomic_uint_fast64_t last_warned_s;

void base_bug(const char *file, int line, const char *condition)
{
    fprintf(stderr, "leasegate: BUG at %s:%d: %s\n", file, line, condition);
    abort();
}

void base_warn(const char *file, int line, const char *condition)
{
    uint64_t now_s = (uint64_t)time(NULL);

    atomic_fetch_add(&warnings, 1);
    if (atomic_exchange(&last_warned_s, now_s) != now_s)
        fprintf(stderr, "leasegate: surprised at %s:%d: %s\n", file, line, condition);
}

uint64_t base_warn_count(void)
{
    return atomic_load(&warnings);
}
