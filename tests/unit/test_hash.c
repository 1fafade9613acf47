/*
 * test_hash.c - the stable hash against sums that sha256sum gives, the keyed one by how it spreads, and by being the
 * same for the same bytes wherever they stand.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#include <cmocka.h>

#include "hash.h"
#include "mem.h"

#include <pthread.h>
#include <sys/wait.h>
#include <unistd.h>

static void check_stable(struct slice s, const char *want)
{
    char hex[33];

    memset(hex, 'x', sizeof(hex));
    hash_stable_hex(s, hex);
    assert_memory_equal(hex, want, 32);
    assert_int_equal(hex[32], 'x'); /* no NUL */
}

/* The first half of what `printf %s … | sha256sum` says: names in Redis depend on it for ever. */
static void test_stable_is_sha256(void **state)
{
    static char million[1000000];

    (void)state;
    memset(million, 'a', sizeof(million));
    check_stable((struct slice){NULL, 0}, "e3b0c44298fc1c149afbf4c8996fb924");
    check_stable(SLICE(""), "e3b0c44298fc1c149afbf4c8996fb924");
    check_stable(SLICE("abc"), "ba7816bf8f01cfea414140de5dae2223");
    check_stable(SLICE("a tenant/with: odd {bytes}"), "ca2a9a967ba2e09b8fc59eae40e0debd");
    check_stable(SLICE("sk-0123456789abcdef"), "221df437bc4f8c4d9718bd7a9ec4c102");
    check_stable(SLICE("nul\0in\0it"), "2e5c36b3bb607080fc42dcc46771148d");
    check_stable((struct slice){million, sizeof(million)}, "cdc76e5c9914fb9281a1c7e284d73e67");
}

/* --- keyed ------------------------------------------------------------------------------------------------------- */

static void test_keyed_depends_on_the_bytes_alone(void **state)
{
    char bytes[80], moved[88];

    (void)state;
    for (size_t i = 0; i < sizeof(bytes); i++)
        bytes[i] = (char)(i * 37);
    for (size_t n = 0; n <= sizeof(bytes); n++) {
        uint64_t h = hash_keyed((struct slice){bytes, n});

        for (size_t shift = 0; shift < 8; shift++) {
            memset(moved, (int)shift, sizeof(moved));
            memcpy(moved + shift, bytes, n);
            assert_true(hash_keyed((struct slice){moved + shift, n}) == h);
        }
        if (n > 0)
            assert_true(hash_keyed((struct slice){bytes, n - 1}) != h);
    }
    assert_true(hash_keyed((struct slice){NULL, 0}) == hash_keyed(SLICE("")));
    assert_true(hash_keyed(SLICE("\0")) != hash_keyed(SLICE("\0\0"))); /* the length counts */
}

/* Each bit of the input moves half of the output: 32 +- 4 on average over many inputs. */
static void test_keyed_one_bit_changes_half(void **state)
{
    char bytes[24] = {0};

    (void)state;
    for (size_t bit = 0; bit < 8 * sizeof(bytes); bit++) {
        uint64_t changed = 0;

        for (uint64_t i = 0; i < 256; i++) {
            uint64_t before;

            memcpy(bytes, &i, sizeof(i));
            before = hash_keyed((struct slice){bytes, sizeof(bytes)});
            bytes[bit / 8] = (char)(bytes[bit / 8] ^ 1 << bit % 8);
            changed += (uint64_t)__builtin_popcountll(before ^
                                                      hash_keyed((struct slice){bytes, sizeof(bytes)}));
            bytes[bit / 8] = (char)(bytes[bit / 8] ^ 1 << bit % 8);
        }
        assert_in_range(changed / 256, 28, 36); /* sigma of the mean is 0.25 */
    }
}

/* Names that differ in their last digits fill a table evenly, by its low bits and by its high ones. */
static void test_keyed_spreads(void **state)
{
    enum { BUCKETS = 256, NAMES = 256 * 200 };
    static unsigned low[BUCKETS], high[BUCKETS];
    double chi_low = 0, chi_high = 0;

    (void)state;
    for (uint64_t i = 0; i < NAMES; i++) {
        char name[32] = "tenant-";
        uint64_t h = hash_keyed((struct slice){name, 7 + str_put_u64(name + 7, i)});

        low[h % BUCKETS]++;
        high[h >> 56]++;
    }
    for (size_t i = 0; i < BUCKETS; i++) {
        chi_low += ((double)low[i] - 200) * ((double)low[i] - 200) / 200;
        chi_high += ((double)high[i] - 200) * ((double)high[i] - 200) / 200;
    }
    /* 255 degrees of freedom: 255 +- 22.6; seven sigma up, six down */
    assert_true(chi_low > 120 && chi_low < 413);
    assert_true(chi_high > 120 && chi_high < 413);
}

/* The key is drawn once in each process, so nobody outside knows a bucket. */
static void test_keyed_differs_between_processes(void **state)
{
    uint64_t theirs[2];

    (void)state;
    for (int i = 0; i < 2; i++) {
        int fds[2];
        pid_t pid;

        assert_int_equal(pipe(fds), 0);
        pid = fork();
        assert_true(pid >= 0);
        if (pid == 0) {
            uint64_t h = hash_keyed(SLICE("the same"));

            _exit(write(fds[1], &h, sizeof(h)) != sizeof(h));
        }
        close(fds[1]);
        assert_int_equal(read(fds[0], &theirs[i], sizeof(theirs[i])), sizeof(theirs[i]));
        close(fds[0]);
        waitpid(pid, NULL, 0);
    }
    assert_true(theirs[0] != theirs[1]);
}

static void *hash_once(void *out)
{
    *(uint64_t *)out = hash_keyed(SLICE("one key for all threads"));
    return NULL;
}

static void test_keyed_is_one_for_all_threads(void **state)
{
    pthread_t threads[4];
    uint64_t hashes[4];

    (void)state;
    for (int i = 0; i < 4; i++)
        assert_int_equal(pthread_create(&threads[i], NULL, hash_once, &hashes[i]), 0);
    for (int i = 0; i < 4; i++)
        pthread_join(threads[i], NULL);
    for (int i = 1; i < 4; i++)
        assert_true(hashes[i] == hashes[0]);
}

static void test_random_fills_all(void **state)
{
    unsigned char bytes[1000], seen[1000] = {0};

    (void)state;
    for (int round = 0; round < 8; round++) { /* a byte that is never written stays 0 in all rounds */
        memset(bytes, 0, sizeof(bytes));
        hash_random(bytes + 1, sizeof(bytes) - 2);
        for (size_t i = 0; i < sizeof(bytes); i++)
            seen[i] |= bytes[i];
    }
    assert_int_equal(seen[0], 0);
    assert_int_equal(seen[sizeof(seen) - 1], 0);
    for (size_t i = 1; i < sizeof(seen) - 1; i++)
        assert_int_not_equal(seen[i], 0);
    hash_random(bytes, 0);
}

static int no_blocks(void **state)
{
    (void)state;
    return mem_live_blocks() == 0 ? 0 : -1;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_keyed_differs_between_processes), /* first: before this process has its key */
        cmocka_unit_test(test_keyed_is_one_for_all_threads),
        cmocka_unit_test(test_stable_is_sha256),
        cmocka_unit_test(test_keyed_depends_on_the_bytes_alone),
        cmocka_unit_test(test_keyed_one_bit_changes_half),
        cmocka_unit_test(test_keyed_spreads),
        cmocka_unit_test(test_random_fills_all),
    };

    return cmocka_run_group_tests(tests, NULL, no_blocks);
}
