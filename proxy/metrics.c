/*
 * metrics.c - the counts of each thread, and their sum as text.
 *
 * The owner of a count is the only one that writes it, so an add is a relaxed load and store: an
 * ordinary add for the machine, and still no data race with the scraper.
 */
#include "metrics.h"

#include "mem.h"

#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>

#define BUCKETS 24 /* upper bounds 50 us * 2^k: 50 us ... 419 s; then +Inf */
#define FIRST_BOUND_US 50
#define STATUS_CLASSES 6 /* 0: no head was sent */

typedef _Atomic uint64_t count;

struct histogram {
    count buckets[BUCKETS + 1];
    count sum_us;
};

struct limit_counts {
    count held; /* two's complement: it may go down in another moment than it went up */
    count granted;
    count refused;
};

struct metrics {
    struct metrics *next;
    count counters[METRICS_COUNTER_COUNT];
    count gauges[METRICS_GAUGE_COUNT];
    struct histogram histograms[METRICS_HISTOGRAM_COUNT];
    count outcomes[OUTCOME_COUNT][OUTCOME_PHASE_COUNT];
    count statuses[STATUS_CLASSES];
    struct limit_counts limits[METRICS_LIMITS_MAX];
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* guards everything static below */
static struct metrics *all;
static char *limit_names[METRICS_LIMITS_MAX];
static unsigned n_limits;
static count limit_caps[METRICS_LIMITS_MAX];

static _Thread_local struct metrics *mine;

static inline void add(count *c, uint64_t n)
{
    atomic_store_explicit(c, atomic_load_explicit(c, memory_order_relaxed) + n, memory_order_relaxed);
}

static inline uint64_t get(const count *c)
{
    return atomic_load_explicit((count *)(uintptr_t)c, memory_order_relaxed);
}

void metrics_thread_begin(void)
{
    BUG_ON(mine != NULL);
    mine = mem_must_zalloc(sizeof(*mine));
    pthread_mutex_lock(&lock);
    mine->next = all;
    all = mine;
    pthread_mutex_unlock(&lock);
}

void metrics_thread_end(void)
{
    for (size_t i = 0; mine != NULL && i < METRICS_GAUGE_COUNT; i++)
        atomic_store_explicit(&mine->gauges[i], 0, memory_order_relaxed);
    mine = NULL;
}

void metrics_free(void)
{
    pthread_mutex_lock(&lock);
    while (all != NULL) {
        struct metrics *next = all->next;

        mem_free(all);
        all = next;
    }
    for (unsigned i = 0; i < n_limits; i++)
        mem_free(limit_names[i]);
    n_limits = 0;
    pthread_mutex_unlock(&lock);
}

void metrics_add(enum metrics_counter c, uint64_t n)
{
    if (mine != NULL)
        add(&mine->counters[c], n);
}

void metrics_total(enum metrics_counter c, uint64_t total)
{
    if (mine != NULL)
        atomic_store_explicit(&mine->counters[c], total, memory_order_relaxed);
}

void metrics_set(enum metrics_gauge g, int64_t value)
{
    if (mine != NULL)
        atomic_store_explicit(&mine->gauges[g], (uint64_t)value, memory_order_relaxed);
}

static size_t bucket_of(uint64_t us)
{
    uint64_t steps = us / FIRST_BOUND_US + (us % FIRST_BOUND_US != 0); /* bound k holds steps <= 2^k */
    size_t k = steps <= 1 ? 0 : (size_t)(64 - __builtin_clzll(steps - 1));

    return size_min(k, BUCKETS);
}

void metrics_observe_us(enum metrics_histogram h, uint64_t us)
{
    if (mine == NULL)
        return;
    add(&mine->histograms[h].buckets[bucket_of(us)], 1);
    add(&mine->histograms[h].sum_us, us);
}

unsigned metrics_limit_row(const char *name)
{
    unsigned row;

    pthread_mutex_lock(&lock);
    for (row = 0; row < n_limits; row++)
        if (strcmp(limit_names[row], name) == 0)
            break;
    if (row == n_limits) {
        if (n_limits == METRICS_LIMITS_MAX) {
            row = METRICS_LIMITS_MAX - 1;
        } else {
            const char *shown = n_limits == METRICS_LIMITS_MAX - 1 ? "(other)"
                                                                   : name; /* no name of a limit */

            limit_names[n_limits++] = mem_must_strndup(shown, strlen(shown));
        }
    }
    pthread_mutex_unlock(&lock);
    return row;
}

void metrics_limit_held(unsigned row, int delta)
{
    if (mine != NULL)
        add(&mine->limits[row].held, (uint64_t)(int64_t)delta);
}

void metrics_limit_granted(unsigned row)
{
    if (mine != NULL)
        add(&mine->limits[row].granted, 1);
}

void metrics_limit_refused(unsigned row)
{
    if (mine != NULL)
        add(&mine->limits[row].refused, 1);
}

void metrics_limit_cap(unsigned row, uint32_t cap)
{
    atomic_store_explicit(&limit_caps[row], cap, memory_order_relaxed);
}

void metrics_call_ended(enum outcome o, enum outcome_phase p, unsigned client_status)
{
    if (mine == NULL)
        return;
    add(&mine->outcomes[o][p], 1);
    add(&mine->statuses[client_status / 100 < STATUS_CLASSES ? client_status / 100 : 0], 1);
}

/* --- exposition ---------------------------------------------------------------------------------------- */

struct writer {
    struct buf *out;
    bool ok;
};

static void put(struct writer *w, const char *fmt, ...) PRINTF_LIKE(2, 3);
static void put(struct writer *w, const char *fmt, ...)
{
    char text[512];
    va_list args;
    int n;

    va_start(args, fmt);
    n = vsnprintf(text, sizeof(text), fmt, args);
    va_end(args);
    BUG_ON(n < 0 || (size_t)n >= sizeof(text)); /* names and numbers only, all short */
    w->ok = w->ok && buf_put(w->out, (struct slice){text, (size_t)n});
}

static void put_head(struct writer *w, const char *name, const char *type, const char *help)
{
    put(w, "# HELP %s %s\n# TYPE %s %s\n", name, help, name, type);
}

/* The sum over all threads of the count that lies at this offset in struct metrics. */
static uint64_t sum_at(size_t offset)
{
    uint64_t total = 0;

    for (const struct metrics *m = all; m != NULL; m = m->next)
        total += get((const count *)(const void *)((const char *)m + offset));
    return total;
}

#define SUM(field) sum_at(offsetof(struct metrics, field))

static void put_counters(struct writer *w)
{
#define X(id, name, help)                                                                                    \
    put_head(w, name, "counter", help);                                                                      \
    put(w, "%s %llu\n", name, (unsigned long long)SUM(counters[METRICS_##id]));
    METRICS_COUNTERS(X)
#undef X
}

static void put_gauges(struct writer *w)
{
#define X(id, name, help)                                                                                    \
    put_head(w, name, "gauge", help);                                                                        \
    put(w, "%s %lld\n", name, (long long)SUM(gauges[METRICS_GAUGE_##id]));
    METRICS_GAUGES(X)
#undef X
}

static void put_histogram(struct writer *w, size_t offset, const char *name, const char *help)
{
    size_t buckets = offset + offsetof(struct histogram, buckets);
    uint64_t total = 0, bound_us = FIRST_BOUND_US;

    put_head(w, name, "histogram", help);
    for (size_t k = 0; k < BUCKETS; k++, bound_us *= 2) {
        total += sum_at(buckets + k * sizeof(count));
        put(w, "%s_bucket{le=\"%llu.%06llu\"} %llu\n", name, (unsigned long long)(bound_us / 1000000),
            (unsigned long long)(bound_us % 1000000), (unsigned long long)total);
    }
    total += sum_at(buckets + BUCKETS * sizeof(count));
    put(w, "%s_bucket{le=\"+Inf\"} %llu\n", name, (unsigned long long)total);
    put(w, "%s_sum %.6f\n", name, (double)sum_at(offset + offsetof(struct histogram, sum_us)) / 1e6);
    put(w, "%s_count %llu\n", name, (unsigned long long)total);
}

static void put_outcomes(struct writer *w)
{
    static const char name[] = "leasegate_calls_total";

    put_head(w, name, "counter", "Calls ended, by what ended them, whose doing it was, and in which phase.");
    for (size_t o = 0; o < OUTCOME_COUNT; o++) {
        for (size_t p = 0; p < OUTCOME_PHASE_COUNT; p++) {
            uint64_t n = SUM(outcomes[o][p]);
            bool seen_before = false;

            /* several outcomes share a word: they are one series */
            for (size_t other = 0; other < OUTCOME_COUNT; other++) {
                if (other == o || strcmp(outcome_info(other)->word, outcome_info(o)->word) != 0)
                    continue;
                seen_before |= other < o;
                n += SUM(outcomes[other][p]);
            }
            if (n == 0 || seen_before)
                continue;
            put(w, "%s{reason=\"%s\",by=\"%s\",phase=\"%s\"} %llu\n", name, outcome_info(o)->word,
                outcome_who_word(outcome_info(o)->who), outcome_phase_word(p), (unsigned long long)n);
        }
    }
}

static void put_statuses(struct writer *w)
{
    static const char *const classes[STATUS_CLASSES] = {"none", "1xx", "2xx", "3xx", "4xx", "5xx"};
    static const char name[] = "leasegate_responses_total";

    put_head(w, name, "counter", "Calls ended, by the class of the status that the client was sent.");
    for (size_t i = 0; i < STATUS_CLASSES; i++)
        put(w, "%s{status=\"%s\"} %llu\n", name, classes[i], (unsigned long long)SUM(statuses[i]));
}

struct limit_metric {
    const char *name;
    const char *type;
    const char *help;
    size_t offset;
};

static void put_limits(struct writer *w)
{
    static const struct limit_metric table[] = {
        {"leasegate_limit_held", "gauge", "Slots of the limit held by calls of this instance.",
         offsetof(struct limit_counts, held)},
        {"leasegate_limit_granted_total", "counter", "Calls that the limit has let in.",
         offsetof(struct limit_counts, granted)},
        {"leasegate_limit_refused_total", "counter", "Calls refused because the limit was full.",
         offsetof(struct limit_counts, refused)},
    };

    for (size_t i = 0; i < ARRAY_LEN(table); i++) {
        put_head(w, table[i].name, table[i].type, table[i].help);
        for (unsigned row = 0; row < n_limits; row++)
            put(w, "%s{limit=\"%s\"} %lld\n", table[i].name, limit_names[row],
                (long long)sum_at(offsetof(struct metrics, limits) + row * sizeof(struct limit_counts) +
                                  table[i].offset));
    }
    put_head(w, "leasegate_limit_cap", "gauge",
             "Configured slots of the limit (of each scope, where it is per something).");
    for (unsigned row = 0; row < n_limits; row++)
        put(w, "leasegate_limit_cap{limit=\"%s\"} %llu\n", limit_names[row],
            (unsigned long long)get(&limit_caps[row]));
}

bool metrics_write(struct buf *out)
{
    struct writer w = {out, true};

    pthread_mutex_lock(&lock);
    put_counters(&w);
    put_gauges(&w);
#define X(id, name, help)                                                                                    \
    put_histogram(&w, offsetof(struct metrics, histograms[METRICS_HISTOGRAM_##id]), name, help);
    METRICS_HISTOGRAMS(X)
#undef X
    put_outcomes(&w);
    put_statuses(&w);
    put_limits(&w);
    pthread_mutex_unlock(&lock);
    return w.ok;
}
