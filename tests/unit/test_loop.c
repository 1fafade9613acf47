/*
 * test_loop.c - deadlines against a plain model, the order of the end of a turn, posts from other threads,
 * and that an idle loop sleeps.
 */
#include "io_help.h"

#include <pthread.h>
#include <time.h>

static uint64_t now(struct loop *l)
{
    return loop_now_ms(l);
}

/* --- deadlines ------------------------------------------------------------------------------------------ */

struct probe {
    struct deadline d;
    struct loop *loop;
    uint64_t due, fired_at;
    unsigned fired;
    unsigned *left;
};

static void probe_fire(struct deadline *d)
{
    struct probe *p = container_of(d, struct probe, d);

    assert_false(deadline_armed(d));
    p->fired++;
    p->fired_at = now(p->loop);
    --*p->left;
}

static bool none_left(void *arg)
{
    return *(unsigned *)arg == 0;
}

#define N_PROBES 2000

/* Random arming, moving both ways and cancelling: each live one fires once, never early, and not late. */
static void deadlines_follow_the_model(void **state)
{
    struct io_base b = io_begin();
    struct probe *probes = calloc(N_PROBES, sizeof(*probes));
    unsigned left = 0, seed = 7;

    (void)state;
    for (int i = 0; i < N_PROBES; i++) {
        probes[i].loop = b.loop;
        probes[i].left = &left;
        deadline_init(&probes[i].d, probe_fire);
    }
    for (int step = 0; step < 20000; step++) {
        struct probe *p = &probes[rand_r(&seed) % N_PROBES];
        unsigned what = (unsigned)rand_r(&seed) % 10;

        if (what == 0) {
            deadline_cancel(b.loop, &p->d);
            p->due = 0;
        } else {
            p->due = now(b.loop) + 1 + (unsigned)rand_r(&seed) % 200;
            assert_true(deadline_set(b.loop, &p->d, p->due));
        }
        assert_int_equal(deadline_armed(&p->d), p->due != 0);
    }
    for (int i = 0; i < N_PROBES; i++)
        left += probes[i].due != 0;
    assert_true(io_run(b.loop, none_left, &left, 5000));
    for (int i = 0; i < N_PROBES; i++) {
        assert_int_equal(probes[i].fired, probes[i].due != 0);
        assert_false(deadline_armed(&probes[i].d));
        if (probes[i].fired > 0)
            assert_in_range(probes[i].fired_at, probes[i].due, probes[i].due + 100);
    }
    free(probes);
    io_end(&b);
}

struct rearm {
    struct deadline d;
    struct loop *loop;
    unsigned times;
};

static void rearm_fire(struct deadline *d)
{
    struct rearm *r = container_of(d, struct rearm, d);

    if (++r->times < 20)
        assert_true(deadline_set(r->loop, d, 0)); /* long past */
}

static bool rearmed_20(void *arg)
{
    return ((struct rearm *)arg)->times == 20;
}

/* A deadline that re-arms itself in the past comes once a turn: it cannot hold the loop. */
static void rearming_in_the_past_does_not_spin(void **state)
{
    struct io_base b = io_begin();
    struct rearm r = {.loop = b.loop};

    (void)state;
    deadline_init(&r.d, rearm_fire);
    assert_true(deadline_set(b.loop, &r.d, 0));
    assert_true(io_run(b.loop, rearmed_20, &r, 2000));
    io_end(&b);
}

static void no_memory_leaves_the_deadline_as_it_was(void **state)
{
    struct io_base b = io_begin();
    struct deadline d[200];
    int armed = 0;

    (void)state;
    mem_fail_at(1, true);
    for (int i = 0; i < 200; i++) {
        deadline_init(&d[i], probe_fire);
        armed += deadline_set(b.loop, &d[i], now(b.loop) + 10000);
        assert_int_equal(deadline_armed(&d[i]), armed == i + 1);
    }
    assert_int_equal(armed, 0);
    mem_fail_at(0, false);
    assert_true(deadline_set(b.loop, &d[0], now(b.loop) + 10000));
    deadline_cancel(b.loop, &d[0]);
    deadline_cancel(b.loop, &d[0]);
    io_end(&b);
}

/* --- the end of the turn -------------------------------------------------------------------------------- */

struct step {
    struct task t;
    struct loop *loop;
    char name;
    struct step *then, *then_last;
};

static char trace[32];

static void step_run(struct task *t)
{
    struct step *s = container_of(t, struct step, t);
    size_t n = strlen(trace);

    trace[n] = s->name;
    trace[n + 1] = '\0';
    if (s->then != NULL)
        loop_defer(s->loop, &s->then->t);
    if (s->then_last != NULL)
        loop_defer_last(s->loop, &s->then_last->t);
}

static bool traced_7(void *arg)
{
    (void)arg;
    return strlen(trace) == 7;
}

static void tasks_run_in_order_and_last_ones_last(void **state)
{
    struct io_base b = io_begin();
    struct step s[8];
    char *held;

    (void)state;
    trace[0] = '\0';
    for (int i = 0; i < 8; i++) {
        s[i] = (struct step){.loop = b.loop, .name = (char)('a' + i)};
        task_init(&s[i].t, step_run);
    }
    s[0].then = &s[2];      /* a: defers c */
    s[2].then_last = &s[6]; /* c: g last */
    s[4].then = &s[5];      /* e, a last one: f, before the next last one */
    loop_defer_last(b.loop, &s[4].t);
    loop_defer(b.loop, &s[0].t);
    loop_defer(b.loop, &s[1].t);
    loop_defer(b.loop, &s[1].t); /* again: no-op */
    loop_defer_last(b.loop, &s[3].t);
    loop_defer(b.loop, &s[7].t);
    task_cancel(b.loop, &s[7].t);
    task_cancel(b.loop, &s[7].t);
    held = mem_alloc(64);
    loop_free_later(b.loop, held);
    held[32] = 1; /* still there */
    assert_true(io_run(b.loop, traced_7, NULL, 1000));
    assert_string_equal(trace, "abcefdg");
    io_end(&b);
}

/* --- other threads -------------------------------------------------------------------------------------- */

#define POSTS 2000
#define POSTERS 3

struct posts {
    struct loop *loop;
    unsigned next[POSTERS];
    unsigned total;
    pthread_t own;
};

struct post {
    struct posts *all;
    unsigned thread, number;
};

static void on_post(struct loop *l, void *arg)
{
    struct post *p = arg;

    assert_ptr_equal(l, p->all->loop);
    assert_true(pthread_equal(pthread_self(), p->all->own));
    assert_int_equal(p->all->next[p->thread], p->number); /* order is kept */
    p->all->next[p->thread]++;
    if (++p->all->total == POSTS * POSTERS)
        loop_stop(l);
    mem_free(p);
}

struct poster {
    struct posts *all;
    unsigned thread;
};

static void *post_many(void *arg)
{
    const struct poster *me = arg;

    for (unsigned i = 0; i < POSTS; i++) {
        struct post *p = mem_alloc(sizeof(*p));

        *p = (struct post){.all = me->all, .thread = me->thread, .number = i};
        if (!loop_post(me->all->loop, on_post, p))
            abort();
    }
    return NULL;
}

static void posts_arrive_in_order_on_the_loop_thread(void **state)
{
    struct io_base b = io_begin();
    struct posts all = {.loop = b.loop, .own = pthread_self()};
    struct poster posters[POSTERS];
    pthread_t threads[POSTERS];

    (void)state;
    for (unsigned i = 0; i < POSTERS; i++) {
        posters[i] = (struct poster){&all, i};
        assert_int_equal(pthread_create(&threads[i], NULL, post_many, &posters[i]), 0);
    }
    loop_run(b.loop);
    for (unsigned i = 0; i < POSTERS; i++)
        pthread_join(threads[i], NULL);
    assert_int_equal(all.total, POSTS * POSTERS);
    io_end(&b);
}

static void *stop_later(void *arg)
{
    usleep(300 * 1000);
    loop_stop(arg);
    return NULL;
}

static long switches(void)
{
    struct rusage u;

    getrusage(RUSAGE_THREAD, &u);
    return u.ru_nvcsw + u.ru_nivcsw;
}

/* A loop with an armed, far deadline and nothing to do: not one wake-up in 300 ms but the last. */
static void an_idle_loop_sleeps(void **state)
{
    struct io_base b = io_begin();
    struct probe p = {.loop = b.loop};
    unsigned left = 1;
    pthread_t thread;
    struct timespec before, after;
    long n, us;

    (void)state;
    p.left = &left;
    deadline_init(&p.d, probe_fire);
    assert_true(deadline_set(b.loop, &p.d, now(b.loop) + 100000));
    assert_int_equal(pthread_create(&thread, NULL, stop_later, b.loop), 0);
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &before);
    n = switches();
    loop_run(b.loop);
    n = switches() - n;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &after);
    pthread_join(thread, NULL);
    us = (after.tv_sec - before.tv_sec) * 1000000 + (after.tv_nsec - before.tv_nsec) / 1000;
    assert_true(n <= 10); /* a tick of 10 ms would make 30 */
    assert_true(us < 20000);
    deadline_cancel(b.loop, &p.d);
    io_end(&b);
}

static void sleep_30(struct loop *l, void *arg)
{
    (void)l;
    usleep(30 * 1000);
    *(bool *)arg = true;
}

static bool is_true(void *arg)
{
    return *(bool *)arg;
}

static void the_longest_turn_is_measured(void **state)
{
    struct io_base b = io_begin();
    bool done = false;

    (void)state;
    io_run_for(b.loop, 5);
    (void)loop_take_longest_turn_us(b.loop);
    assert_true(loop_post(b.loop, sleep_30, &done));
    assert_true(io_run(b.loop, is_true, &done, 1000));
    assert_in_range(loop_take_longest_turn_us(b.loop), 30000, 300000);
    assert_true(loop_take_longest_turn_us(b.loop) == 0);
    io_end(&b);
}

static void stop_before_run_returns_at_once(void **state)
{
    struct io_base b = io_begin();

    (void)state;
    loop_stop(b.loop);
    loop_run(b.loop);
    io_end(&b);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(deadlines_follow_the_model),
        cmocka_unit_test(rearming_in_the_past_does_not_spin),
        cmocka_unit_test(no_memory_leaves_the_deadline_as_it_was),
        cmocka_unit_test(tasks_run_in_order_and_last_ones_last),
        cmocka_unit_test(posts_arrive_in_order_on_the_loop_thread),
        cmocka_unit_test(an_idle_loop_sleeps),
        cmocka_unit_test(the_longest_turn_is_measured),
        cmocka_unit_test(stop_before_run_returns_at_once),
    };

    return cmocka_run_group_tests_name("loop", tests, NULL, NULL);
}
