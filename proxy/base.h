/*
 * base.h - the few words that every room uses: attributes, container_of, the
 * counted intrusive list, and the two kinds of assertion.
 *
 * BUG_ON is always on: a state that must not exist is worth a core dump, never
 * a wrong count. WARN_ON marks what is survivable; it is counted and goes on.
 * Includes libc only; every other room may include this one.
 */
#ifndef LG_BASE_H
#define LG_BASE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define MUST_CHECK __attribute__((warn_unused_result))
#define PRINTF_LIKE(fmt, args) __attribute__((format(printf, fmt, args)))
#define NORETURN __attribute__((noreturn))
#define COLD __attribute__((cold, noinline))
#define UNUSED __attribute__((unused))

#define ARRAY_LEN(a) (sizeof(a) / sizeof((a)[0]))
#define container_of(ptr, type, member) ((type *)(void *)((char *)(ptr)-offsetof(type, member)))

#define LIKELY(x) __builtin_expect(!!(x), 1)
#define UNLIKELY(x) __builtin_expect(!!(x), 0)

/* Prints the place and the condition, then aborts. Never returns. */
NORETURN COLD void base_bug(const char *file, int line, const char *condition);
/* Counts a survivable surprise; the first of each second is logged to stderr. */
COLD void base_warn(const char *file, int line, const char *condition);
/* How many times base_warn was reached in this process. */
uint64_t base_warn_count(void);

#define BUG_ON(cond)                                                                                         \
    do {                                                                                                     \
        if (UNLIKELY(cond))                                                                                  \
            base_bug(__FILE__, __LINE__, #cond);                                                             \
    } while (0)

#define WARN_ON(cond) base_warn_if_((cond), __FILE__, __LINE__, #cond)

static inline bool base_warn_if_(bool surprised, const char *file, int line, const char *condition)
{
    if (UNLIKELY(surprised))
        base_warn(file, line, condition);
    return surprised;
}

static inline size_t size_min(size_t a, size_t b)
{
    return a < b ? a : b;
}

static inline size_t size_max(size_t a, size_t b)
{
    return a > b ? a : b;
}

/*
 * A counted, doubly linked, circular list. The length is the count that is
 * reported, so a gauge can never drift from the truth. A node that is in no
 * list has next == NULL.
 */
struct list_node {
    struct list_node *next;
    struct list_node *prev;
};

struct list {
    struct list_node head;
    size_t length;
};

static inline void list_init(struct list *l)
{
    l->head.next = l->head.prev = &l->head;
    l->length = 0;
}

static inline bool list_empty(const struct list *l)
{
    return l->length == 0;
}

static inline bool list_linked(const struct list_node *n)
{
    return n->next != NULL;
}

static inline void list_insert_before_(struct list *l, struct list_node *pos, struct list_node *n)
{
    BUG_ON(n->next != NULL);
    n->prev = pos->prev;
    n->next = pos;
    pos->prev->next = n;
    pos->prev = n;
    l->length++;
}

static inline void list_push_back(struct list *l, struct list_node *n)
{
    list_insert_before_(l, &l->head, n);
}

static inline void list_push_front(struct list *l, struct list_node *n)
{
    list_insert_before_(l, l->head.next, n);
}

static inline void list_remove(struct list *l, struct list_node *n)
{
    BUG_ON(n->next == NULL || l->length == 0);
    n->prev->next = n->next;
    n->next->prev = n->prev;
    n->next = n->prev = NULL;
    l->length--;
}

static inline struct list_node *list_first(const struct list *l)
{
    return l->length == 0 ? NULL : l->head.next;
}

static inline struct list_node *list_pop_front(struct list *l)
{
    struct list_node *n = list_first(l);

    if (n != NULL)
        list_remove(l, n);
    return n;
}

/* Walks l; the body may remove `node` itself, and nothing else. */
#define list_for_each_safe(node, l)                                                                          \
    for (struct list_node *node = (l)->head.next, *node##_next_ = node->next; node != &(l)->head;            \
         node = node##_next_, node##_next_ = node->next)

#endif
