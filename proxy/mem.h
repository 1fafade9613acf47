/*
 * mem.h - allocation. The only room that calls malloc and free.
 *
 * At boot an allocation that fails ends the process (mem_must_*). At run time
 * it returns NULL and fails the one call that wanted it. mem_fail_at makes the
 * n-th allocation fail, so that tests can walk every such path.
 *
 * Live blocks are counted, so a test can end with "live blocks = 0".
 */
#ifndef LG_MEM_H
#define LG_MEM_H

#include "base.h"

/* n bytes, not initialised; NULL when there is no memory. n may not be 0. Owner: the caller, mem_free. */
MUST_CHECK void *mem_alloc(size_t n);
/* As mem_alloc, zeroed. */
MUST_CHECK void *mem_zalloc(size_t n);
/* Grows or shrinks p (NULL: allocates). On NULL the old block is still there and still the caller's. */
MUST_CHECK void *mem_realloc(void *p, size_t n);
/* Copies n bytes and ends them with a NUL. NULL when there is no memory. */
MUST_CHECK char *mem_strndup(const char *s, size_t n);
/* Frees p; NULL is a no-op. */
void mem_free(void *p);

/* As above, for boot and configuration: never NULL, the process ends with a message instead. */
MUST_CHECK void *mem_must_zalloc(size_t n);
MUST_CHECK char *mem_must_strndup(const char *s, size_t n);
MUST_CHECK void *mem_must_realloc(void *p, size_t n);

/* Blocks allocated and not freed in this process. */
size_t mem_live_blocks(void);

/*
 * From now on the n-th allocation of this process fails (1: the next one), and
 * with `for_ever` each one after it too. n = 0 turns it off. mem_must_* do not count.
 */
void mem_fail_at(uint64_t n, bool for_ever);

#endif
