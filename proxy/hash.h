/*
 * hash.h - two hashes: one for tables in memory that clients can feed, one
 * for names that every instance and version must agree on.
 */
#ifndef LG_HASH_H
#define LG_HASH_H

#include "str.h"

/* SipHash-2-4 under a key drawn once per process: nobody outside can aim at a bucket. */
uint64_t hash_keyed(struct slice s);

/* First 128 bits of SHA-256 as 32 lower-case hex digits, no NUL: the same everywhere (lua/README.md, key names). */
void hash_stable_hex(struct slice s, char out[32]);

/* n bytes from the system's random source; the process ends when there is none. */
void hash_random(void *out, size_t n);

#endif
