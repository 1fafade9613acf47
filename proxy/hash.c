/*
 * hash.c - keyed and stable hashes. SHA-256 is OpenSSL's; SipHash is 30 lines
 * (Aumasson and Bernstein, 2012) and needs no set-up per use, which EVP_MAC would.
 */
#include "hash.h"

#include <errno.h>
#include <openssl/sha.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/random.h>

static uint64_t key[2];
static pthread_once_t key_once = PTHREAD_ONCE_INIT;

void hash_random(void *out, size_t n)
{
    char *at = out;

    while (n > 0) {
        ssize_t got = getrandom(at, n, 0);

        if (got < 0 && errno == EINTR)
            continue;
        if (got < 0) {
            perror("leasegate: getrandom");
            exit(71); /* EX_OSERR */
        }
        at += got;
        n -= (size_t)got;
    }
}

static void key_draw(void)
{
    hash_random(key, sizeof(key));
}

#define ROTL(x, b) (((x) << (b)) | ((x) >> (64 - (b))))

static void sip_round(uint64_t v[4])
{
    v[0] += v[1];
    v[2] += v[3];
    v[1] = ROTL(v[1], 13) ^ v[0];
    v[3] = ROTL(v[3], 16) ^ v[2];
    v[0] = ROTL(v[0], 32);
    v[2] += v[1];
    v[0] += v[3];
    v[1] = ROTL(v[1], 17) ^ v[2];
    v[3] = ROTL(v[3], 21) ^ v[0];
    v[2] = ROTL(v[2], 32);
}

static void sip_word(uint64_t v[4], uint64_t word)
{
    v[3] ^= word;
    sip_round(v);
    sip_round(v);
    v[0] ^= word;
}

uint64_t hash_keyed(struct slice s)
{
    uint64_t v[4], word, last = (uint64_t)s.n << 56;
    size_t whole = s.n & ~(size_t)7;

    pthread_once(&key_once, key_draw);
    v[0] = key[0] ^ 0x736f6d6570736575ULL;
    v[1] = key[1] ^ 0x646f72616e646f6dULL;
    v[2] = key[0] ^ 0x6c7967656e657261ULL;
    v[3] = key[1] ^ 0x7465646279746573ULL;
    for (size_t i = 0; i < whole; i += 8) {
        memcpy(&word, s.p + i, 8);
        sip_word(v, word);
    }
    for (size_t i = whole; i < s.n; i++)
        last |= (uint64_t)(unsigned char)s.p[i] << (8 * (i - whole));
    sip_word(v, last);
    v[2] ^= 0xff;
    for (int i = 0; i < 4; i++)
        sip_round(v);
    return v[0] ^ v[1] ^ v[2] ^ v[3];
}

void hash_stable_hex(struct slice s, char out[32])
{
    static const char digit[16] = "0123456789abcdef";
    unsigned char sum[SHA256_DIGEST_LENGTH];

    SHA256((const unsigned char *)(s.n == 0 ? "" : s.p), s.n, sum);
    for (size_t i = 0; i < 16; i++) {
        out[2 * i] = digit[sum[i] >> 4];
        out[2 * i + 1] = digit[sum[i] & 15];
    }
}
