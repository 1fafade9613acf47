/*
 * test_base.c - the counted list against a model, and the two kinds of assertion: what aborts, and what is counted.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base.h"
#include "mem.h"

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

struct item {
    int number;
    struct list_node node;
};

static struct item *item_of(struct list_node *n)
{
    return container_of(n, struct item, node);
}

/* Forwards, backwards and by count: the three ways to look at a list agree with the model. */
static void check_list(const struct list *l, const int *model, size_t n)
{
    const struct list_node *at = l->head.next;

    assert_int_equal(l->length, n);
    assert_int_equal(list_empty(l), n == 0);
    if (n == 0)
        assert_null(list_first(l));
    else
        assert_int_equal(item_of(list_first(l))->number, model[0]);
    for (size_t i = 0; i < n; i++, at = at->next)
        assert_int_equal(item_of((struct list_node *)(uintptr_t)at)->number, model[i]);
    assert_ptr_equal(at, &l->head);
    at = l->head.prev;
    for (size_t i = n; i > 0; i--, at = at->prev)
        assert_int_equal(item_of((struct list_node *)(uintptr_t)at)->number, model[i - 1]);
    assert_ptr_equal(at, &l->head);
}

static void test_list_is_as_the_model(void **state)
{
    enum { ITEMS = 40, STEPS = 20000 };
    struct item items[ITEMS] = {{0}};
    struct list l;
    int model[ITEMS];
    size_t n = 0;
    unsigned seed = 7;

    (void)state;
    list_init(&l);
    for (int i = 0; i < ITEMS; i++)
        items[i].number = i;
    for (int step = 0; step < STEPS; step++) {
        struct item *x = &items[rand_r(&seed) % ITEMS];
        bool linked = list_linked(&x->node);
        size_t at = 0;

        while (at < n && model[at] != x->number)
            at++;
        assert_int_equal(linked, at < n);
        if (linked && rand_r(&seed) % 2 == 0) {
            list_remove(&l, &x->node);
            memmove(model + at, model + at + 1, (--n - at) * sizeof(*model));
        } else if (linked) {
            struct list_node *first = list_pop_front(&l);

            assert_int_equal(item_of(first)->number, model[0]);
            assert_false(list_linked(first));
            memmove(model, model + 1, --n * sizeof(*model));
        } else if (rand_r(&seed) % 2 == 0) {
            list_push_back(&l, &x->node);
            model[n++] = x->number;
        } else {
            list_push_front(&l, &x->node);
            memmove(model + 1, model, n++ * sizeof(*model));
            model[0] = x->number;
        }
        check_list(&l, model, n);
    }
    while (list_pop_front(&l) != NULL)
        n--;
    assert_int_equal(n, 0);
    check_list(&l, model, 0);
}

static void test_walk_may_remove_the_node_itself(void **state)
{
    struct item items[10] = {{0}};
    struct list l;
    int seen = 0, odd[5];

    (void)state;
    list_init(&l);
    list_for_each_safe (node, &l)
        fail_msg("%p in an empty list", (void *)node);
    for (int i = 0; i < 10; i++) {
        items[i].number = i;
        list_push_back(&l, &items[i].node);
    }
    list_for_each_safe (node, &l) {
        assert_int_equal(item_of(node)->number, seen++);
        if (item_of(node)->number % 2 == 0)
            list_remove(&l, node);
    }
    assert_int_equal(seen, 10);
    for (int i = 0; i < 5; i++)
        odd[i] = 2 * i + 1;
    check_list(&l, odd, 5);
}

static void test_small_words(void **state)
{
    struct item x = {.number = 5};

    (void)state;
    assert_ptr_equal(container_of(&x.node, struct item, node), &x);
    assert_int_equal(size_min(3, 4), 3);
    assert_int_equal(size_min(SIZE_MAX, 0), 0);
    assert_int_equal(size_max(3, 4), 4);
    assert_int_equal(size_max(SIZE_MAX, 0), SIZE_MAX);
}

/* --- assertions ------------------------------------------------------------------------------------------------- */

/* Runs fn in a child: what it wrote to standard error, and how it ended. */
static int run_child(void (*fn)(void), char *text, size_t size)
{
    int fds[2], status;
    ssize_t n;
    size_t used = 0;
    pid_t pid;

    assert_int_equal(pipe(fds), 0);
    pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        signal(SIGABRT, SIG_DFL);
        dup2(fds[1], STDERR_FILENO);
        fn();
        _exit(0);
    }
    close(fds[1]);
    while ((n = read(fds[0], text + used, size - 1 - used)) > 0)
        used += (size_t)n;
    text[used] = '\0';
    close(fds[0]);
    assert_int_equal(waitpid(pid, &status, 0), pid);
    return status;
}

static void check_bug(void (*fn)(void), const char *condition)
{
    char text[1024];
    int status = run_child(fn, text, sizeof(text));

    if (!WIFSIGNALED(status) || WTERMSIG(status) != SIGABRT)
        fail_msg("%s: status %x", condition, (unsigned)status);
    assert_non_null(strstr(text, "leasegate: BUG at "));
    assert_non_null(strstr(text, condition));
    assert_non_null(strchr(text, '\n'));
}

static void bug_plain(void)
{
    int three = 3;

    BUG_ON(three == 4);
    BUG_ON(three == 3);
}

static void bug_push_twice(void)
{
    struct item x = {0};
    struct list l;

    list_init(&l);
    list_push_back(&l, &x.node);
    list_push_back(&l, &x.node);
}

static void bug_remove_twice(void)
{
    struct item x = {0}, other = {0};
    struct list l;

    list_init(&l);
    list_push_back(&l, &x.node);
    list_push_back(&l, &other.node);
    list_remove(&l, &x.node);
    list_remove(&l, &x.node);
}

static void test_bugs_abort(void **state)
{
    (void)state;
    check_bug(bug_plain, "three == 3");
    check_bug(bug_push_twice, "n->next != NULL");
    check_bug(bug_remove_twice, "n->next == NULL");
}

static void warn_often(void)
{
    uint64_t before = base_warn_count();
    int asked = 0;

    for (int i = 0; i < 50; i++)
        if (!WARN_ON(++asked > 0))
            _exit(1);
    if (WARN_ON(asked != 50) || base_warn_count() != before + 50)
        _exit(2);
}

/* Each is counted, a condition is asked once, and one line a second is said of them. */
static void test_warnings_are_counted(void **state)
{
    char text[4096];
    int status = run_child(warn_often, text, sizeof(text));
    int lines = 0;

    (void)state;
    assert_true(WIFEXITED(status));
    assert_int_equal(WEXITSTATUS(status), 0);
    for (const char *p = text; (p = strstr(p, "leasegate: surprised at ")) != NULL; p++)
        lines++;
    assert_true(lines >= 1 && lines <= 3); /* as many as seconds passed: 50 calls take no three of them */
    assert_non_null(strstr(text, "++asked > 0"));
    assert_int_equal(base_warn_count(), 0); /* of this process */
    assert_false(WARN_ON(lines == 0));
}

static int no_blocks(void **state)
{
    (void)state;
    return mem_live_blocks() == 0 ? 0 : -1;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_teardown(test_list_is_as_the_model, no_blocks),
        cmocka_unit_test_teardown(test_walk_may_remove_the_node_itself, no_blocks),
        cmocka_unit_test_teardown(test_small_words, no_blocks),
        cmocka_unit_test_teardown(test_bugs_abort, no_blocks),
        cmocka_unit_test_teardown(test_warnings_are_counted, no_blocks),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
