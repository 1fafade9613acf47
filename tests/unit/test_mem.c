/*
 * test_mem.c - the count of live blocks, over threads too, and the switch that makes the n-th allocation fail.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "mem.h"

#include <pthread.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

/* Sanitizers reserve more address space than the limit of one test leaves. */
#if defined(__has_feature)
#define SANITIZED (__has_feature(address_sanitizer) || __has_feature(thread_sanitizer))
#elif defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define SANITIZED 1
#else
#define SANITIZED 0
#endif

static void test_each_block_is_counted(void **state)
{
    size_t before = mem_live_blocks();
    char *a, *b, *c, *grown;

    (void)state;
    a = mem_alloc(100);
    memset(a, 0x55, 100);
    assert_int_equal(mem_live_blocks(), before + 1);
    b = mem_zalloc(1000);
    for (int i = 0; i < 1000; i++)
        assert_int_equal(b[i], 0);
    c = mem_strndup("hello world", 5);
    assert_string_equal(c, "hello");
    assert_int_equal(mem_live_blocks(), before + 3);
    grown = mem_realloc(a, 100000);
    for (int i = 0; i < 100; i++)
        assert_int_equal(grown[i], 0x55);
    assert_int_equal(mem_live_blocks(), before + 3); /* the same block */
    a = mem_realloc(NULL, 8);
    assert_int_equal(mem_live_blocks(), before + 4);
    mem_free(NULL);
    assert_int_equal(mem_live_blocks(), before + 4);
    mem_free(a);
    mem_free(grown);
    mem_free(b);
    mem_free(c);
    assert_int_equal(mem_live_blocks(), before);
}

static void test_the_must_kind_is_counted(void **state)
{
    size_t before = mem_live_blocks();
    char *z = mem_must_zalloc(3), *s = mem_must_strndup("", 0), *r = mem_must_realloc(NULL, 10);

    (void)state;
    assert_int_equal(z[0] | z[1] | z[2], 0);
    assert_string_equal(s, "");
    r = mem_must_realloc(r, 10000);
    assert_int_equal(mem_live_blocks(), before + 3);
    mem_free(z);
    mem_free(s);
    mem_free(r);
    assert_int_equal(mem_live_blocks(), before);
}

/* NULL or a block, which is freed again at once. */
static bool works(void *p)
{
    mem_free(p);
    return p != NULL;
}

static void test_the_nth_fails_once(void **state)
{
    (void)state;
    for (unsigned n = 1; n <= 6; n++) {
        size_t before = mem_live_blocks();
        char *old = mem_alloc(4);

        memcpy(old, "old", 4);
        mem_fail_at(n, false);
        for (unsigned i = 1; i <= 8; i++) {
            bool ok = false;

            switch (i % 4) {
            case 0:
                ok = works(mem_alloc(1));
                break;
            case 1:
                ok = works(mem_zalloc(1));
                break;
            case 2:
                ok = works(mem_strndup("x", 1));
                break;
            default: {
                void *more = mem_realloc(old, 64);

                ok = more != NULL;
                old = ok ? more : old; /* still there and still ours */
                assert_string_equal(old, "old");
            }
            }
            assert_int_equal(ok, i != n);
            assert_int_equal(mem_live_blocks(), before + 1);
        }
        mem_free(old);
        assert_int_equal(mem_live_blocks(), before);
    }
}

static void test_the_nth_and_all_later_fail(void **state)
{
    void *p;

    (void)state;
    mem_fail_at(3, true);
    for (int i = 1; i <= 10; i++)
        assert_int_equal(works(mem_alloc(1)), i < 3);
    p = mem_must_zalloc(1); /* does not count and does not fail */
    mem_free(p);
    mem_fail_at(0, false);
    assert_true(works(mem_alloc(1)));
}

static void *take_and_give(void *arg)
{
    void **mine = arg;

    for (int i = 0; i < 20000; i++)
        mem_free(mem_alloc(16 + (size_t)i % 64));
    *mine = mem_alloc(10);
    return NULL;
}

/* Blocks may be freed by another thread than the one that made them. */
static void test_threads_are_counted_together(void **state)
{
    size_t before = mem_live_blocks();
    pthread_t threads[4];
    void *blocks[4] = {0};

    (void)state;
    for (int i = 0; i < 4; i++)
        assert_int_equal(pthread_create(&threads[i], NULL, take_and_give, &blocks[i]), 0);
    for (int i = 0; i < 4; i++)
        pthread_join(threads[i], NULL);
    assert_int_equal(mem_live_blocks(), before + 4);
    for (int i = 0; i < 4; i++)
        mem_free(blocks[i]);
    assert_int_equal(mem_live_blocks(), before);
}

static void test_zero_bytes_are_a_bug(void **state)
{
    int status;
    pid_t pid = fork();

    (void)state;
    assert_true(pid >= 0);
    if (pid == 0) {
        signal(SIGABRT, SIG_DFL);
        close(STDERR_FILENO);
        mem_free(mem_alloc(0));
        _exit(0);
    }
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_true(WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT);
}

#if !SANITIZED
/* 70 is EX_SOFTWARE: the process says that it has no memory, and ends. */
static void test_boot_without_memory_ends(void **state)
{
    char text[256] = "";
    int status, fds[2];
    pid_t pid;

    (void)state;
    assert_int_equal(pipe(fds), 0);
    pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        struct rlimit some = {256ul << 20, 256ul << 20};

        dup2(fds[1], STDERR_FILENO);
        setrlimit(RLIMIT_AS, &some);
        _exit(mem_must_zalloc(1ul << 30) == NULL);
    }
    close(fds[1]);
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_true(read(fds[0], text, sizeof(text) - 1) > 0);
    close(fds[0]);
    assert_true(WIFEXITED(status));
    assert_int_equal(WEXITSTATUS(status), 70);
    assert_non_null(strstr(text, "out of memory"));
}
#endif

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_each_block_is_counted),
        cmocka_unit_test(test_the_must_kind_is_counted),
        cmocka_unit_test(test_the_nth_fails_once),
        cmocka_unit_test(test_the_nth_and_all_later_fail),
        cmocka_unit_test(test_threads_are_counted_together),
        cmocka_unit_test(test_zero_bytes_are_a_bug),
#if !SANITIZED
        cmocka_unit_test(test_boot_without_memory_ends),
#endif
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
