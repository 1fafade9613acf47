/*
 * log.c - log lines and the writer thread.
 *
 *   thread A   [line line line]──┐
 *   thread B   [line line]───────┼──► queue of parcels (capped) ──► writer ──► write(2)
 *   main       [line]────────────┘
 *
 * A parcel is the buffer of one thread, handed over whole. When the queue is full (a slow disk, a reader that
 * stopped) the parcel is dropped and its lines are counted: metric leasegate_log_lines_dropped_total.
 */
#include "log.h"

#include "buf.h"
#include "json.h"
#include "mem.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <time.h>
#include <unistd.h>

#define PARCEL_BYTES 16384                /* handed over when it has grown to this */
#define QUEUE_MAX_BYTES (8 * 1024 * 1024) /* of all parcels that the writer has not written yet */
#define WRITER_WAIT_S 2
#define LINE_MAX_BYTES 8192 /* a longer line is cut at a field */

struct parcel {
    struct list_node node;
    struct buf bytes;
    uint64_t lines;
};

struct log_line {
    struct buf *out;
    size_t start;
    bool json;
};

_Atomic int log_level_ = LOG_INFO;

static atomic_bool format_json = true;
static atomic_uint_fast64_t dropped;

/* The queue to the writer; everything below is guarded by `lock`. */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t more = PTHREAD_COND_INITIALIZER;
static pthread_cond_t empty = PTHREAD_COND_INITIALIZER;
static struct list parcels = {.head = {&parcels.head, &parcels.head}};
static size_t parcel_bytes;
static int out_fd = STDERR_FILENO;
static bool running, stopping, writing;
static pthread_t writer;

static _Thread_local struct parcel *mine;
static _Thread_local struct log_line line_here;

static void write_all(int fd, const char *p, size_t n)
{
    while (n > 0) {
        ssize_t w = write(fd, p, n);

        if (w < 0 && errno == EINTR)
            continue;
        if (w < 0 && errno == EAGAIN) { /* standard error may be a pipe that its other owner has set so */
            struct pollfd ready = {.fd = fd, .events = POLLOUT};

            (void)poll(&ready, 1, -1);
            continue;
        }
        if (w <= 0)
            return; /* nowhere to report it to */
        p += w;
        n -= (size_t)w;
    }
}

static void parcel_free(struct parcel *p)
{
    buf_free(&p->bytes);
    mem_free(p);
}

static void *writer_main(void *arg UNUSED)
{
    pthread_mutex_lock(&lock);
    for (;;) {
        struct list_node *node = list_pop_front(&parcels);
        struct parcel *p;
        int fd = out_fd;

        if (node == NULL) {
            writing = false;
            pthread_cond_broadcast(&empty);
            if (stopping)
                break;
            pthread_cond_wait(&more, &lock);
            continue;
        }
        p = container_of(node, struct parcel, node);
        writing = true;
        pthread_mutex_unlock(&lock);
        write_all(fd, p->bytes.p, p->bytes.n);
        pthread_mutex_lock(&lock);
        parcel_bytes -= p->bytes.n;
        parcel_free(p);
    }
    pthread_mutex_unlock(&lock);
    return NULL;
}

/* How long the writer is waited for: whoever reads the log may have stopped. */
static struct timespec in_a_while(void)
{
    struct timespec t;

    clock_gettime(CLOCK_REALTIME, &t);
    t.tv_sec += WRITER_WAIT_S;
    return t;
}

bool log_open(bool json, enum log_level level, const char *file)
{
    int fd = STDERR_FILENO, old;
    struct timespec deadline;

    if (file[0] != '\0') {
        fd = open(file, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0640);
        if (fd < 0)
            return false;
    }
    deadline = in_a_while();
    pthread_mutex_lock(&lock);
    while (writing || !list_empty(&parcels)) { /* lines so far belong to the old file */
        if (pthread_cond_timedwait(&empty, &lock, &deadline) != ETIMEDOUT ||
            (!writing && list_empty(&parcels)))
            continue;
        pthread_mutex_unlock(&lock);
        if (fd != STDERR_FILENO)
            close(fd);
        errno = EBUSY;
        return false;
    }
    old = out_fd;
    out_fd = fd;
    if (!running) {
        stopping = false;
        running = pthread_create(&writer, NULL, writer_main, NULL) == 0;
        BUG_ON(!running);
    }
    pthread_mutex_unlock(&lock);
    if (old != STDERR_FILENO)
        close(old);
    atomic_store(&format_json, json);
    atomic_store(&log_level_, (int)level);
    return true;
}

void log_close(void)
{
    struct timespec deadline;

    log_thread_end();
    pthread_mutex_lock(&lock);
    if (!running) {
        pthread_mutex_unlock(&lock);
        return;
    }
    stopping = true;
    running = false;
    pthread_cond_signal(&more);
    pthread_mutex_unlock(&lock);
    deadline = in_a_while();
    if (pthread_timedjoin_np(writer, NULL, &deadline) != 0)
        return; /* it hangs in a write that nobody takes: the process ends without it */
    if (out_fd != STDERR_FILENO)
        close(out_fd);
    out_fd = STDERR_FILENO;
}

/* --- lines ------------------------------------------------------------------------------------------- */

static bool room(struct log_line *l, size_t more_bytes)
{
    return l != NULL && l->out->n - l->start + more_bytes <= LINE_MAX_BYTES &&
           buf_reserve(l->out, more_bytes);
}

static void put_raw(struct log_line *l, const char *s, size_t n)
{
    memcpy(l->out->p + l->out->n, s, n); /* room() was asked */
    l->out->n += n;
}

/* The key and what stands before and after it. False: no room, the field is left out. */
static bool put_key(struct log_line *l, const char *key, size_t value_bytes)
{
    size_t n = strlen(key);

    if (!room(l, n + 5 + value_bytes))
        return false;
    if (l->json) {
        put_raw(l, ",", l->out->n == l->start + 1 ? 0 : 1);
        put_raw(l, "\"", 1);
        put_raw(l, key, n);
        put_raw(l, "\":", 2);
    } else {
        put_raw(l, " ", l->out->n == l->start ? 0 : 1);
        put_raw(l, key, n);
        put_raw(l, "=", 1);
    }
    return true;
}

static bool is_plain(struct slice s)
{
    for (size_t i = 0; i < s.n; i++) {
        unsigned char c = (unsigned char)s.p[i];

        if (c <= ' ' || c == '"' || c == '=' || c == '\\' || c >= 0x7f)
            return false;
    }
    return s.n > 0;
}

void log_str(struct log_line *l, const char *key, struct slice value)
{
    struct slice v = {value.p, size_min(value.n, 1024)};

    if (l == NULL || !put_key(l, key, v.n * 6 + 2))
        return;
    if (!l->json && is_plain(v)) {
        put_raw(l, v.p, v.n);
        return;
    }
    if (!json_put_string(l->out, v))
        l->out->n = l->start; /* no memory: the line is given up */
}

void log_text(struct log_line *l, const char *key, const char *value)
{
    log_str(l, key, slice_of(value));
}

void log_u64(struct log_line *l, const char *key, uint64_t value)
{
    char digits[20];
    size_t n = str_put_u64(digits, value);

    if (l != NULL && put_key(l, key, n))
        put_raw(l, digits, n);
}

void log_i64(struct log_line *l, const char *key, int64_t value)
{
    char digits[21];
    size_t n = 0;

    if (value < 0)
        digits[n++] = '-';
    n += str_put_u64(digits + n, value < 0 ? 0 - (uint64_t)value : (uint64_t)value);
    if (l != NULL && put_key(l, key, sizeof(digits)))
        put_raw(l, digits, n);
}

void log_ms(struct log_line *l, const char *key, uint64_t us)
{
    char text[24];
    size_t n = str_put_u64(text, us / 1000);

    text[n++] = '.';
    text[n++] = (char)('0' + us / 100 % 10);
    text[n++] = (char)('0' + us / 10 % 10);
    text[n++] = (char)('0' + us % 10);
    if (l != NULL && put_key(l, key, n))
        put_raw(l, text, n);
}

void log_bool(struct log_line *l, const char *key, bool value)
{
    if (l != NULL && put_key(l, key, 5))
        put_raw(l, value ? "true" : "false", value ? 4 : 5);
}

/* The date part changes once a second: it is kept per thread. */
static void put_time(struct log_line *l)
{
    static _Thread_local time_t last_s;
    static _Thread_local char text[40];
    struct timespec now;
    char *ms = text + 20;

    clock_gettime(CLOCK_REALTIME, &now);
    if (now.tv_sec != last_s) {
        struct tm tm;

        gmtime_r(&now.tv_sec, &tm);
        strftime(text, sizeof(text), "%Y-%m-%dT%H:%M:%S.000Z", &tm);
        last_s = now.tv_sec;
    }
    ms[0] = (char)('0' + now.tv_nsec / 100000000);
    ms[1] = (char)('0' + now.tv_nsec / 10000000 % 10);
    ms[2] = (char)('0' + now.tv_nsec / 1000000 % 10);
    log_str(l, "time", (struct slice){text, 24});
}

struct log_line *log_begin(enum log_level level, const char *event)
{
    static const char *const words[] = {"error", "warn", "info", "debug"};
    struct log_line *l = &line_here;

    if (!log_wants(level))
        return NULL;
    if (mine == NULL) {
        mine = mem_zalloc(sizeof(*mine));
        if (mine == NULL)
            return NULL;
    }
    l->out = &mine->bytes;
    l->start = mine->bytes.n;
    l->json = atomic_load_explicit(&format_json, memory_order_relaxed);
    if (!buf_reserve(l->out, 256))
        return NULL;
    if (l->json)
        put_raw(l, "{", 1);
    put_time(l);
    log_text(l, "level", words[level]);
    log_text(l, "event", event);
    return l;
}

void log_end(struct log_line *l)
{
    if (l == NULL)
        return;
    if (l->out->n == l->start || !buf_reserve(l->out, 2)) {
        l->out->n = l->start;
        return;
    }
    put_raw(l, l->json ? "}\n" : "\n", l->json ? 2 : 1);
    mine->lines++;
    if (mine->bytes.n >= PARCEL_BYTES)
        log_flush();
}

void log_event(enum log_level level, const char *event, const char *fmt, ...)
{
    struct log_line *l = log_begin(level, event);
    char text[1024];
    va_list args;
    int n;

    if (l == NULL)
        return;
    va_start(args, fmt);
    n = vsnprintf(text, sizeof(text), fmt, args);
    va_end(args);
    log_str(l, "message", (struct slice){text, n < 0 ? 0 : size_min((size_t)n, sizeof(text) - 1)});
    log_end(l);
    if (level <= LOG_WARN)
        log_flush();
}

bool log_may_repeat(uint64_t *last_s, uint64_t *held_back, uint64_t *suppressed)
{
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC_COARSE, &now);
    if ((uint64_t)now.tv_sec + 1 == *last_s) {
        ++*held_back;
        return false;
    }
    *last_s = (uint64_t)now.tv_sec + 1; /* + 1: zero means never */
    *suppressed = *held_back;
    *held_back = 0;
    return true;
}

/* --- hand over ----------------------------------------------------------------------------------------- */

void log_flush(void)
{
    struct parcel *p = mine;

    if (p == NULL || p->bytes.n == 0)
        return;
    pthread_mutex_lock(&lock);
    if (!running) { /* before log_open and after log_close: tests, errors of the boot */
        write_all(out_fd, p->bytes.p, p->bytes.n);
        pthread_mutex_unlock(&lock);
        p->bytes.n = 0;
        p->lines = 0;
        return;
    }
    if (parcel_bytes + p->bytes.n > QUEUE_MAX_BYTES) {
        pthread_mutex_unlock(&lock);
        atomic_fetch_add(&dropped, p->lines);
        p->bytes.n = 0;
        p->lines = 0;
        return;
    }
    parcel_bytes += p->bytes.n;
    list_push_back(&parcels, &p->node);
    pthread_cond_signal(&more);
    pthread_mutex_unlock(&lock);
    mine = NULL;
}

size_t log_pending(void)
{
    return mine == NULL ? 0 : mine->bytes.n;
}

void log_thread_end(void)
{
    log_flush();
    if (mine != NULL)
        parcel_free(mine);
    mine = NULL;
}

uint64_t log_lines_dropped(void)
{
    return atomic_load(&dropped);
}
