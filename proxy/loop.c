/*
 * loop.c - the event loop of one thread.
 *
 *   uv_run:  poll + its callbacks ─► check ─► closing ─► timer (deadlines) ─► prepare: END OF TURN ─► poll …
 *
 * The end of the turn is libuv's prepare phase, the last one before it may sleep: deferred tasks run, then
 * the last ones, then late frees, then the one uv_timer is set to the nearest deadline. Nothing here ticks:
 * a loop with nothing to do sleeps until a socket, a deadline or another thread wakes it.
 *
 * Deadlines are a binary heap ordered by key_ms_. A deadline moved to a later time keeps its key and only
 * stores the new time; when the key is reached it is put back under its true time. So a connection that
 * makes progress a thousand times a second pays for one heap move per timeout, not for a thousand.
 *
 * Owns its libuv handles, the heap, the queue of posts and the scratch. The heap never shrinks: 8 bytes for
 * each deadline of the busiest moment. Other rooms keep one pointer a loop in a slot (loop_slot), dropped
 * by loop_free.
 */
#include "loop.h"

#include "mem.h"

#include <stdatomic.h>
#include <uv.h>

#define NEVER UINT64_MAX
#define LAST_WAIT_MS 1000

struct loop_post {
    struct loop_post *next;
    void (*fn)(struct loop *l, void *arg);
    void *arg;
};

/* Lies over the first bytes of a block that waits for its mem_free. */
struct late_free {
    struct late_free *next;
};

struct loop {
    uv_loop_t uv;
    uv_prepare_t prepare;
    uv_check_t check;
    uv_async_t wake;
    uv_timer_t timer;
    unsigned index;
    atomic_bool stop;

    struct deadline **heap;
    uint32_t heap_n, heap_cap;
    uint64_t timer_due_ms; /* what the uv_timer is set to; NEVER: it is stopped */
    bool firing;

    struct list deferred, last;
    struct late_free *late_frees;

    uv_mutex_t post_lock;
    struct loop_post *post_first, **post_end;

    uint64_t turn_began_ms; /* 0: no poll has returned yet */
    uint64_t longest_turn_us;

    struct {
        void *p;
        void (*drop)(void *p);
    } slots[LOOP_SLOTS];
    char scratch[LOOP_SCRATCH_BYTES] __attribute__((aligned(64)));
};

/* --- deadlines ------------------------------------------------------------------------------------------ */

static void heap_place(struct loop *l, uint32_t i, struct deadline *d)
{
    l->heap[i] = d;
    d->index_ = i + 1;
}

static void heap_up(struct loop *l, uint32_t i, struct deadline *d)
{
    while (i > 0) {
        uint32_t parent = (i - 1) / 2;

        if (l->heap[parent]->key_ms_ <= d->key_ms_)
            break;
        heap_place(l, i, l->heap[parent]);
        i = parent;
    }
    heap_place(l, i, d);
}

static void heap_down(struct loop *l, uint32_t i, struct deadline *d)
{
    for (;;) {
        uint32_t child = 2 * i + 1;

        if (child >= l->heap_n)
            break;
        if (child + 1 < l->heap_n && l->heap[child + 1]->key_ms_ < l->heap[child]->key_ms_)
            child++;
        if (d->key_ms_ <= l->heap[child]->key_ms_)
            break;
        heap_place(l, i, l->heap[child]);
        i = child;
    }
    heap_place(l, i, d);
}

static bool heap_grow(struct loop *l)
{
    uint32_t cap = l->heap_cap == 0 ? 64 : l->heap_cap * 2;
    struct deadline **heap = mem_realloc(l->heap, cap * sizeof(struct deadline *));

    if (heap == NULL)
        return false;
    l->heap = heap;
    l->heap_cap = cap;
    return true;
}

void deadline_init(struct deadline *d, void (*fire)(struct deadline *d))
{
    *d = (struct deadline){.fire = fire};
}

bool deadline_set(struct loop *l, struct deadline *d, uint64_t due_ms)
{
    uint64_t now = uv_now(&l->uv);

    if (due_ms <= now)
        due_ms = l->firing ? now + 1
                           : now; /* one that re-arms itself in the past must not keep the turn from ending */
    if (deadline_armed(d)) {
        d->due_ms_ = due_ms;
        if (due_ms < d->key_ms_) {
            d->key_ms_ = due_ms;
            heap_up(l, d->index_ - 1, d);
        }
        return true;
    }
    if (l->heap_n == l->heap_cap && !heap_grow(l))
        return false;
    d->due_ms_ = d->key_ms_ = due_ms;
    heap_up(l, l->heap_n++, d);
    return true;
}

void deadline_cancel(struct loop *l, struct deadline *d)
{
    struct deadline *moved;
    uint32_t i;

    if (!deadline_armed(d))
        return;
    i = d->index_ - 1;
    BUG_ON(i >= l->heap_n || l->heap[i] != d);
    d->index_ = 0;
    moved = l->heap[--l->heap_n];
    if (moved == d)
        return;
    if (i > 0 && moved->key_ms_ < l->heap[(i - 1) / 2]->key_ms_)
        heap_up(l, i, moved);
    else
        heap_down(l, i, moved);
}

static void on_timer(uv_timer_t *t)
{
    struct loop *l = container_of(t, struct loop, timer);
    uint64_t now = uv_now(&l->uv);

    l->timer_due_ms = NEVER;
    l->firing = true;
    while (l->heap_n > 0 && l->heap[0]->key_ms_ <= now) {
        struct deadline *d = l->heap[0];

        if (d->due_ms_ > now) {
            d->key_ms_ = d->due_ms_;
            heap_down(l, 0, d);
        } else {
            deadline_cancel(l, d);
            d->fire(d);
        }
    }
    l->firing = false;
}

/* Once a turn: whatever happened to the heap, only its top counts. */
static void arm_timer(struct loop *l)
{
    uint64_t now, due = l->heap_n == 0 ? NEVER : l->heap[0]->key_ms_;

    if (due == l->timer_due_ms)
        return;
    l->timer_due_ms = due;
    now = uv_now(&l->uv);
    if (due == NEVER)
        uv_timer_stop(&l->timer);
    else
        BUG_ON(uv_timer_start(&l->timer, on_timer, due > now ? due - now : 0, 0) != 0);
}

/* --- the end of the turn -------------------------------------------------------------------------------- */

void task_init(struct task *t, void (*run)(struct task *t))
{
    *t = (struct task){.run = run};
}

void loop_defer(struct loop *l, struct task *t)
{
    if (list_linked(&t->node_))
        return;
    t->last_ = false;
    list_push_back(&l->deferred, &t->node_);
}

void loop_defer_last(struct loop *l, struct task *t)
{
    if (list_linked(&t->node_))
        return;
    t->last_ = true;
    list_push_back(&l->last, &t->node_);
}

void task_cancel(struct loop *l, struct task *t)
{
    if (list_linked(&t->node_))
        list_remove(t->last_ ? &l->last : &l->deferred, &t->node_);
}

void loop_free_later(struct loop *l, void *p)
{
    struct late_free *f = p;

    f->next = l->late_frees;
    l->late_frees = f;
}

static void run_late_frees(struct loop *l)
{
    while (l->late_frees != NULL) {
        struct late_free *f = l->late_frees;

        l->late_frees = f->next;
        mem_free(f);
    }
}

static void end_turn(struct loop *l)
{
    struct list_node *n;

    for (;;) {
        n = list_pop_front(&l->deferred);
        if (n == NULL)
            n = list_pop_front(&l->last);
        if (n == NULL)
            break;
        container_of(n, struct task, node_)->run(container_of(n, struct task, node_));
    }
    run_late_frees(l);
}

static void on_check(uv_check_t *c)
{
    struct loop *l = container_of(c, struct loop, check);

    l->turn_began_ms =
        uv_now(&l->uv); /* libuv reads the clock when its poll returns, and not again until now */
}

static void on_prepare(uv_prepare_t *p)
{
    struct loop *l = container_of(p, struct loop, prepare);

    end_turn(l);
    arm_timer(l);
    if (l->turn_began_ms != 0) {
        uint64_t end_us = loop_now_us(), began_us = l->turn_began_ms * 1000;

        if (end_us > began_us && end_us - began_us > l->longest_turn_us)
            l->longest_turn_us = end_us - began_us;
    }
    if (atomic_load_explicit(&l->stop, memory_order_relaxed))
        uv_stop(&l->uv);
}

uint64_t loop_take_longest_turn_us(struct loop *l)
{
    uint64_t us = l->longest_turn_us;

    l->longest_turn_us = 0;
    return us;
}

/* --- other threads -------------------------------------------------------------------------------------- */

static struct loop_post *take_posts(struct loop *l)
{
    struct loop_post *first;

    uv_mutex_lock(&l->post_lock);
    first = l->post_first;
    l->post_first = NULL;
    l->post_end = &l->post_first;
    uv_mutex_unlock(&l->post_lock);
    return first;
}

static void on_wake(uv_async_t *a)
{
    struct loop *l = container_of(a, struct loop, wake);
    struct loop_post *p = take_posts(l);

    while (p != NULL) {
        struct loop_post *next = p->next;

        p->fn(l, p->arg);
        mem_free(p);
        p = next;
    }
}

bool loop_post(struct loop *l, void (*fn)(struct loop *l, void *arg), void *arg)
{
    struct loop_post *p = mem_alloc(sizeof(*p));

    if (p == NULL)
        return false;
    *p = (struct loop_post){.fn = fn, .arg = arg};
    uv_mutex_lock(&l->post_lock);
    *l->post_end = p;
    l->post_end = &p->next;
    uv_mutex_unlock(&l->post_lock);
    BUG_ON(uv_async_send(&l->wake) != 0);
    return true;
}

void loop_stop(struct loop *l)
{
    atomic_store(&l->stop, true);
    BUG_ON(uv_async_send(&l->wake) != 0);
}

/* --- the loop itself ------------------------------------------------------------------------------------ */

struct loop *loop_new(unsigned index)
{
    struct loop *l = mem_must_zalloc(sizeof(*l));

    l->index = index;
    l->timer_due_ms = NEVER;
    list_init(&l->deferred);
    list_init(&l->last);
    l->post_end = &l->post_first;
    BUG_ON(uv_loop_init(&l->uv) != 0);
    l->uv.data = l;
    BUG_ON(uv_mutex_init(&l->post_lock) != 0);
    BUG_ON(uv_async_init(&l->uv, &l->wake, on_wake) != 0);
    BUG_ON(uv_timer_init(&l->uv, &l->timer) != 0);
    BUG_ON(uv_check_init(&l->uv, &l->check) != 0 || uv_check_start(&l->check, on_check) != 0);
    BUG_ON(uv_prepare_init(&l->uv, &l->prepare) != 0 || uv_prepare_start(&l->prepare, on_prepare) != 0);
    return l;
}

static void count_closing(uv_handle_t *h, void *arg)
{
    if (uv_is_closing(h))
        ++*(size_t *)arg;
}

/* Something was closed or deferred and has not come to its end yet. */
static bool unsettled(struct loop *l)
{
    size_t closing = 0;

    uv_walk(&l->uv, count_closing, &closing);
    return closing > 0 || !list_empty(&l->deferred) || !list_empty(&l->last) || l->late_frees != NULL;
}

void loop_run(struct loop *l)
{
    while (!atomic_exchange(&l->stop, false))
        uv_run(&l->uv, UV_RUN_DEFAULT);
    /* A close takes one round; a bound, should events keep closing things for ever. */
    for (int i = 0; i < 100 && unsettled(l); i++)
        uv_run(&l->uv, UV_RUN_NOWAIT);
}

void loop_free(struct loop *l)
{
    struct loop_post *p = take_posts(l);

    while (p != NULL) {
        struct loop_post *next = p->next;

        mem_free(p);
        p = next;
    }
    uv_close((uv_handle_t *)&l->wake, NULL);
    uv_close((uv_handle_t *)&l->timer, NULL);
    uv_close((uv_handle_t *)&l->check, NULL);
    uv_close((uv_handle_t *)&l->prepare, NULL);
    /* What other threads still work on, a name being resolved, is waited for, but not for ever. */
    for (int i = 0; i < LAST_WAIT_MS && (unsettled(l) || uv_loop_alive(&l->uv)); i++) {
        uv_run(&l->uv, UV_RUN_NOWAIT);
        end_turn(l); /* the prepare handle is closed by now */
        if (uv_loop_alive(&l->uv))
            uv_sleep(1);
    }
    for (size_t i = 0; i < LOOP_SLOTS; i++) {
        if (l->slots[i].p != NULL)
            l->slots[i].drop(l->slots[i].p);
    }
    WARN_ON(l->heap_n > 0);
    if (WARN_ON(uv_loop_close(&l->uv) != 0))
        return; /* a handle that is still open points into l: better a leak than a crash */
    uv_mutex_destroy(&l->post_lock);
    mem_free(l->heap);
    mem_free(l);
}

struct uv_loop_s *loop_uv(struct loop *l)
{
    return &l->uv;
}

unsigned loop_index(const struct loop *l)
{
    return l->index;
}

uint64_t loop_now_ms(const struct loop *l)
{
    return uv_now(&l->uv);
}

uint64_t loop_now_us(void)
{
    return uv_hrtime() / 1000;
}

char *loop_scratch(struct loop *l)
{
    return l->scratch;
}

void *loop_slot(const struct loop *l, enum loop_slot slot)
{
    return l->slots[slot].p;
}

void loop_slot_set(struct loop *l, enum loop_slot slot, void *p, void (*drop)(void *p))
{
    l->slots[slot].p = p;
    l->slots[slot].drop = drop;
}
