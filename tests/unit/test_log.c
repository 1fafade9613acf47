/*
 * test_log.c - log lines: well-formed JSON or logfmt whatever bytes go in, whole lines from many threads, files that
 * are opened anew, and a reader that stops: lines are dropped and counted, nobody waits.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "buf.h"
#include "log.h"
#include "mem.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

static char dir[64], path[96], other_path[96];
static size_t blocks;

static int make_dir(void **state)
{
    (void)state;
    snprintf(dir, sizeof(dir), "/tmp/lg-log-XXXXXX");
    if (mkdtemp(dir) == NULL)
        return -1;
    snprintf(path, sizeof(path), "%s/log", dir);
    snprintf(other_path, sizeof(other_path), "%s/other", dir);
    return 0;
}

static int remove_dir(void **state)
{
    (void)state;
    return rmdir(dir);
}

static int begin(void **state)
{
    (void)state;
    blocks = mem_live_blocks();
    return 0;
}

static int end(void **state)
{
    (void)state;
    log_close();
    unlink(path);
    unlink(other_path);
    return mem_live_blocks() == blocks ? 0 : -1;
}

/* --- reading lines back --------------------------------------------------------------------------------------- */

static struct buf file_text(const char *name)
{
    struct buf b = {0};
    int fd = open(name, O_RDONLY | O_CLOEXEC);
    ssize_t n;

    assert_true(fd >= 0);
    do {
        assert_true(buf_reserve(&b, 65536));
        n = read(fd, b.p + b.n, 65536);
        assert_true(n >= 0);
        b.n += (size_t)n;
    } while (n > 0);
    close(fd);
    return b;
}

/* Takes one line off *rest; false at the end. A text that does not end with a line's end fails. */
static bool next_line(struct slice *rest, struct slice *line)
{
    size_t n = slice_find(*rest, '\n');

    if (rest->n == 0)
        return false;
    assert_true(n < rest->n);
    *line = (struct slice){rest->p, n};
    rest->p += n + 1;
    rest->n -= n + 1;
    return true;
}

/* RFC 3629: the bytes of one character at p, 0 when there is none. */
static size_t utf8(const unsigned char *p, size_t n)
{
    uint32_t cp;
    size_t need;

    if (p[0] < 0x80)
        return 1;
    need = p[0] >= 0xf0 && p[0] < 0xf8   ? 3
           : p[0] >= 0xe0 && p[0] < 0xf0 ? 2
           : p[0] >= 0xc0 && p[0] < 0xe0 ? 1
                                         : 0;
    if (need == 0 || need >= n)
        return 0;
    cp = p[0] & (0x3fu >> need);
    for (size_t i = 1; i <= need; i++) {
        if ((p[i] & 0xc0) != 0x80)
            return 0;
        cp = cp << 6 | (p[i] & 0x3fu);
    }
    if (cp < (need == 1   ? 0x80u
              : need == 2 ? 0x800u
                          : 0x10000u) ||
        cp > 0x10ffff || (cp >= 0xd800 && cp < 0xe000))
        return 0;
    return need + 1;
}

/* A JSON string at *at: its value is appended to out. */
static void take_string(struct slice line, size_t *at, struct buf *out)
{
    assert_true(*at < line.n && line.p[*at] == '"');
    for (++*at; line.p[*at] != '"';) {
        size_t n = utf8((const unsigned char *)line.p + *at, line.n - *at);
        char hex[5] = "", *stop, c;
        unsigned long code;

        assert_true(n > 0);
        if (line.p[*at] != '\\') {
            assert_true(n > 1 || (unsigned char)line.p[*at] >= 0x20);
            assert_true(buf_put(out, (struct slice){line.p + *at, n}));
            *at += n;
            assert_true(*at < line.n);
            continue;
        }
        c = line.p[*at + 1];
        *at += 2;
        switch (c) {
        case 'b':
            c = '\b';
            break;
        case 'f':
            c = '\f';
            break;
        case 'n':
            c = '\n';
            break;
        case 'r':
            c = '\r';
            break;
        case 't':
            c = '\t';
            break;
        case 'u':
            memcpy(hex, line.p + *at, 4);
            code = strtoul(hex, &stop, 16);
            assert_ptr_equal(stop, hex + 4);
            assert_true(code < 0x20); /* what else is escaped so: nothing */
            c = (char)code;
            *at += 4;
            break;
        default:
            assert_true(c == '"' || c == '\\');
        }
        assert_true(buf_put(out, (struct slice){&c, 1}));
        assert_true(*at < line.n);
    }
    ++*at;
}

/* A number, true or false. */
static void take_plain(struct slice line, size_t *at, struct buf *out)
{
    size_t n = strcspn(line.p + *at, ",}");
    char text[64], *stop;

    assert_true(n > 0 && n < sizeof(text));
    memcpy(text, line.p + *at, n);
    text[n] = '\0';
    if (strcmp(text, "true") != 0 && strcmp(text, "false") != 0) {
        (void)strtod(text, &stop);
        assert_true(*stop == '\0' && strspn(text, "-0123456789.") == n);
    }
    assert_true(buf_put(out, (struct slice){text, n}));
    *at += n;
}

struct field {
    char key[64];
    struct buf value;
};

struct record {
    struct field fields[64];
    size_t n;
};

static void record_free(struct record *r)
{
    for (size_t i = 0; i < r->n; i++)
        buf_free(&r->fields[i].value);
    r->n = 0;
}

/* One object, flat; fails at anything that RFC 8259 does not allow there. */
static void parse_json(struct slice line, struct record *r)
{
    size_t at = 1;

    r->n = 0;
    assert_true(line.n > 2 && line.p[0] == '{');
    for (;;) {
        struct field *f = &r->fields[r->n++];
        struct buf key = {0};

        assert_true(r->n < ARRAY_LEN(r->fields));
        f->value = (struct buf){0};
        take_string(line, &at, &key);
        snprintf(f->key, sizeof(f->key), "%.*s", (int)key.n, key.p);
        buf_free(&key);
        assert_int_equal(line.p[at++], ':');
        if (line.p[at] == '"')
            take_string(line, &at, &f->value);
        else
            take_plain(line, &at, &f->value);
        if (line.p[at] != ',')
            break;
        at++;
    }
    assert_int_equal(line.p[at], '}');
    assert_int_equal(at + 1, line.n);
}

/* key=value, key="quoted", one space between. */
static void parse_logfmt(struct slice line, struct record *r)
{
    size_t at = 0;

    r->n = 0;
    for (;;) {
        struct field *f = &r->fields[r->n++];
        size_t n = strcspn(line.p + at, "= \"\n");

        assert_true(r->n < ARRAY_LEN(r->fields) && n > 0 && line.p[at + n] == '=');
        f->value = (struct buf){0};
        snprintf(f->key, sizeof(f->key), "%.*s", (int)n, line.p + at);
        at += n + 1;
        if (at < line.n && line.p[at] == '"') {
            take_string(line, &at, &f->value);
        } else {
            n = strcspn(line.p + at, " =\"\\\n");
            assert_true(n > 0 && (at + n == line.n || line.p[at + n] == ' '));
            assert_true(buf_put(&f->value, (struct slice){line.p + at, n}));
            at += n;
        }
        if (at == line.n)
            return;
        assert_int_equal(line.p[at++], ' ');
    }
}

static void parse(bool json, struct slice line, struct record *r)
{
    static char text[16384]; /* ended by a NUL, for the functions of string.h */

    assert_true(line.n < sizeof(text));
    memcpy(text, line.p, line.n);
    text[line.n] = '\0';
    line.p = text;
    for (size_t i = 0; i < line.n; i++) /* one line on any terminal */
        assert_true((unsigned char)line.p[i] >= 0x20);
    if (json)
        parse_json(line, r);
    else
        parse_logfmt(line, r);
}

static struct slice value_of(const struct record *r, const char *key)
{
    for (size_t i = 0; i < r->n; i++)
        if (strcmp(r->fields[i].key, key) == 0)
            return buf_slice(&r->fields[i].value);
    fail_msg("no %s", key);
    return (struct slice){NULL, 0};
}

static void assert_field(const struct record *r, const char *key, const char *want)
{
    struct slice v = value_of(r, key);

    if (!slice_eq(v, slice_of(want)))
        fail_msg("%s: <%.*s> instead of <%s>", key, (int)v.n, v.p, want);
}

/* What must come out of json_put_string for these bytes: each that is part of no character becomes U+FFFD. */
static void put_repaired(struct buf *out, struct slice s)
{
    for (size_t i = 0; i < s.n;) {
        size_t n = utf8((const unsigned char *)s.p + i, s.n - i);

        assert_true(buf_put(out, n > 0 ? (struct slice){s.p + i, n} : SLICE("\xef\xbf\xbd")));
        i += n > 0 ? n : 1;
    }
}

/* --- form ------------------------------------------------------------------------------------------------------- */

static void check_fields(bool json)
{
    struct buf text;
    struct slice rest, line = SLICE("");
    struct record r = {0};
    struct log_line *l;

    assert_true(log_open(json, LOG_INFO, path));
    l = log_begin(LOG_WARN, "call");
    log_text(l, "model", "gpt-4o");
    log_text(l, "empty", "");
    log_text(l, "spaced", "a b=\"c\"\\");
    log_u64(l, "big", UINT64_MAX);
    log_i64(l, "low", INT64_MIN);
    log_i64(l, "high", INT64_MAX);
    log_ms(l, "took", 1234567);
    log_ms(l, "none", 0);
    log_ms(l, "tiny", 7);
    log_bool(l, "yes", true);
    log_bool(l, "no", false);
    log_end(l);
    log_event(LOG_ERROR, "redis", "timeout after %u ms", 250u);
    log_close();
    text = file_text(path);
    rest = buf_slice(&text);
    assert_true(next_line(&rest, &line));
    parse(json, line, &r);
    assert_string_equal(r.fields[0].key, "time");
    assert_int_equal(r.fields[0].value.n, 24); /* 2026-01-02T03:04:05.678Z */
    assert_int_equal(r.fields[0].value.p[10], 'T');
    assert_int_equal(r.fields[0].value.p[19], '.');
    assert_int_equal(r.fields[0].value.p[23], 'Z');
    assert_field(&r, "level", "warn");
    assert_field(&r, "event", "call");
    assert_field(&r, "model", "gpt-4o");
    assert_field(&r, "empty", "");
    assert_field(&r, "spaced", "a b=\"c\"\\");
    assert_field(&r, "big", "18446744073709551615");
    assert_field(&r, "low", "-9223372036854775808");
    assert_field(&r, "high", "9223372036854775807");
    assert_field(&r, "took", "1234.567");
    assert_field(&r, "none", "0.000");
    assert_field(&r, "tiny", "0.007");
    assert_field(&r, "yes", "true");
    assert_field(&r, "no", "false");
    record_free(&r);
    assert_true(next_line(&rest, &line));
    parse(json, line, &r);
    assert_field(&r, "message", "timeout after 250 ms");
    record_free(&r);
    assert_false(next_line(&rest, &line));
    buf_free(&text);
    unlink(path);
}

static void test_fields(void **state)
{
    (void)state;
    check_fields(true);
    check_fields(false);
}

static void check_random_bytes(bool json)
{
    enum { LINES = 2000 };
    struct buf values[LINES] = {0}, text;
    struct slice rest, line = SLICE("");
    struct record r = {0};
    unsigned seed = 11;

    assert_true(log_open(json, LOG_DEBUG, path));
    for (size_t i = 0; i < LINES; i++) {
        char bytes[300];
        size_t n = (size_t)rand_r(&seed) % sizeof(bytes);
        struct log_line *l = log_begin(LOG_DEBUG, "random");

        for (size_t k = 0; k < n; k++) /* in some lines mostly text, in others anything */
            bytes[k] = (char)(rand_r(&seed) % (i % 3 == 0 ? 256 : i % 3 == 1 ? 128 : 40));
        if (n > 4 && i % 5 == 0)
            memcpy(bytes + n - 4, "\xf0\x9f\x98\x80", 4 - i % 2); /* a character, whole or cut */
        log_str(l, "value", (struct slice){bytes, n});
        log_u64(l, "number", i);
        log_end(l);
        put_repaired(&values[i], (struct slice){bytes, n});
    }
    log_close();
    text = file_text(path);
    rest = buf_slice(&text);
    for (size_t i = 0; i < LINES; i++) {
        struct slice got;

        assert_true(next_line(&rest, &line));
        parse(json, line, &r);
        got = value_of(&r, "value");
        if (!slice_eq(got, buf_slice(&values[i])))
            fail_msg("line %zu: <%.*s>", i, (int)line.n, line.p);
        record_free(&r);
        buf_free(&values[i]);
    }
    assert_false(next_line(&rest, &line));
    buf_free(&text);
    unlink(path);
}

static void test_random_bytes(void **state)
{
    (void)state;
    check_random_bytes(true);
    check_random_bytes(false);
}

static void check_long(bool json)
{
    static char big[100000];
    struct buf text;
    struct slice rest, line = SLICE("");
    struct record r = {0};
    struct log_line *l;

    assert_true(log_open(json, LOG_INFO, path));
    memset(big, 'x', sizeof(big));
    l = log_begin(LOG_INFO, "long");
    log_str(l, "cut", (struct slice){big, sizeof(big)});
    log_u64(l, "after", 1);
    log_end(l);
    memset(big, '\x01', sizeof(big)); /* six bytes each, once escaped */
    l = log_begin(LOG_INFO, "long");
    for (int i = 0; i < 40; i++) /* fields that have no room are left out */
        log_str(l, "wide", (struct slice){big, sizeof(big)});
    log_end(l);
    log_event(LOG_INFO, "long", "%.*s", (int)sizeof(big), big);
    log_close();
    text = file_text(path);
    rest = buf_slice(&text);
    assert_true(next_line(&rest, &line));
    parse(json, line, &r);
    assert_int_equal(value_of(&r, "cut").n, 1024);
    assert_field(&r, "after", "1");
    record_free(&r);
    for (int i = 0; i < 2; i++) {
        assert_true(next_line(&rest, &line));
        assert_true(line.n <= 8192 + 2);
        parse(json, line, &r);
        assert_field(&r, "event", "long");
        record_free(&r);
    }
    assert_false(next_line(&rest, &line));
    buf_free(&text);
    unlink(path);
}

static void test_long_values_are_cut(void **state)
{
    (void)state;
    check_long(true);
    check_long(false);
}

static size_t count_lines(const char *name)
{
    struct buf text = file_text(name);
    struct slice rest = buf_slice(&text), line = SLICE("");
    size_t n = 0;

    while (next_line(&rest, &line))
        n++;
    buf_free(&text);
    return n;
}

static void test_levels(void **state)
{
    (void)state;
    for (int level = LOG_ERROR; level <= LOG_DEBUG; level++) {
        assert_true(log_open(true, (enum log_level)level, path));
        for (int of = LOG_ERROR; of <= LOG_DEBUG; of++) {
            struct log_line *l = log_begin((enum log_level)of, "x");

            assert_int_equal(l != NULL, of <= level);
            assert_int_equal(log_wants((enum log_level)of), of <= level);
            log_text(l, "k", "v");
            log_u64(l, "k", 1);
            log_i64(l, "k", 1);
            log_ms(l, "k", 1);
            log_bool(l, "k", true);
            log_end(l);
            log_event((enum log_level)of, "y", "z");
        }
        log_close();
        assert_int_equal(count_lines(path), 2 * (level + 1));
        unlink(path);
    }
}

static void test_repeats_are_damped(void **state)
{
    uint64_t last = 0, held = 0, suppressed = 99, told = 0, calls = 0, said = 0;
    struct timespec from, now;

    (void)state;
    assert_true(log_may_repeat(&last, &held, &suppressed));
    assert_int_equal(suppressed, 0);
    clock_gettime(CLOCK_MONOTONIC, &from);
    do { /* for a second and a half: at most two more, and every one held back is told of */
        struct timespec t = {.tv_nsec = 1000000};

        calls++;
        if (log_may_repeat(&last, &held, &suppressed)) {
            told += suppressed;
            said++;
        }
        nanosleep(&t, NULL);
        clock_gettime(CLOCK_MONOTONIC, &now);
    } while ((now.tv_sec - from.tv_sec) * 1000 + (now.tv_nsec - from.tv_nsec) / 1000000 < 1500);
    assert_in_range(said, 1, 2);
    assert_int_equal(calls, told + held + said);
}

/* --- files ------------------------------------------------------------------------------------------------------ */

static void test_reopen(void **state)
{
    char nowhere[128];

    (void)state;
    assert_true(log_open(true, LOG_INFO, path));
    log_event(LOG_INFO, "one", "before");
    log_flush();
    assert_int_equal(rename(path, other_path), 0); /* as logrotate does */
    assert_true(log_open(true, LOG_INFO, path));
    log_event(LOG_INFO, "two", "after");
    log_event(LOG_INFO, "three", "after");
    log_flush();
    snprintf(nowhere, sizeof(nowhere), "%s/no/such", dir);
    assert_false(log_open(false, LOG_ERROR, nowhere)); /* the old one stays, and its form and level */
    assert_int_equal(errno, ENOENT);
    log_event(LOG_INFO, "four", "still");
    log_close();
    assert_int_equal(count_lines(other_path), 1);
    assert_int_equal(count_lines(path), 3);
    assert_true(log_open(true, LOG_INFO, path)); /* appended to, and a writer again after the close */
    log_event(LOG_INFO, "five", "more");
    log_close();
    assert_int_equal(count_lines(path), 4);
}

static void test_pending(void **state)
{
    (void)state;
    assert_true(log_open(true, LOG_INFO, path));
    assert_int_equal(log_pending(), 0);
    log_event(LOG_INFO, "x", "y");
    assert_true(log_pending() > 0);
    log_flush();
    assert_int_equal(log_pending(), 0);
    log_event(LOG_WARN, "x", "trouble is passed on at once");
    assert_int_equal(log_pending(), 0);
    for (int i = 0; i < 1000; i++) {
        log_event(LOG_INFO, "x", "y");
        assert_true(log_pending() < 16384);
    }
}

/* Every allocation on the way, missing in turn: whole lines or none. */
static void test_without_memory(void **state)
{
    struct buf text;
    struct slice rest, line = SLICE("");
    struct record r = {0};
    size_t n_lines = 0;

    (void)state;
    assert_true(log_open(true, LOG_INFO, path));
    for (unsigned n = 1; n < 8; n++) {
        struct log_line *l;
        char big[1000];

        memset(big, '"', sizeof(big));
        log_thread_end();
        mem_fail_at(n, false);
        l = log_begin(LOG_INFO, "x");
        for (int i = 0; i < 6; i++)
            log_str(l, "wide", (struct slice){big, sizeof(big)});
        log_u64(l, "last", n);
        log_end(l);
        mem_fail_at(0, false);
        log_event(LOG_INFO, "x", "next");
    }
    log_close();
    text = file_text(path);
    rest = buf_slice(&text);
    while (next_line(&rest, &line)) {
        parse(true, line, &r);
        record_free(&r);
        n_lines++;
    }
    assert_in_range(n_lines, 7, 14);
    buf_free(&text);
}

/* --- threads ---------------------------------------------------------------------------------------------------- */

#define THREADS 4
#define THREAD_LINES 5000

static void *write_lines(void *arg)
{
    size_t who = (size_t)(uintptr_t)arg;

    for (size_t i = 0; i < THREAD_LINES; i++) {
        struct log_line *l = log_begin(LOG_INFO, "x");

        log_u64(l, "thread", who);
        log_u64(l, "number", i);
        log_str(l, "filler", (struct slice){"................................................", i % 48});
        log_end(l);
        if (i % 97 == 0)
            log_flush();
    }
    log_thread_end();
    return NULL;
}

static uint64_t number_in(struct record *r, const char *key)
{
    uint64_t v = 0;

    assert_true(str_parse_u64(value_of(r, key), &v));
    return v;
}

static void test_no_line_is_torn(void **state)
{
    pthread_t threads[THREADS];
    uint64_t next[THREADS] = {0}, dropped = log_lines_dropped();
    struct record r = {0};

    (void)state;
    assert_true(log_open(true, LOG_INFO, path));
    for (size_t i = 0; i < THREADS; i++)
        assert_int_equal(pthread_create(&threads[i], NULL, write_lines, (void *)(uintptr_t)i), 0);
    for (int i = 0; i < 20; i++) /* a reload now and then, into the same two files */
        assert_true(log_open(true, LOG_INFO, i % 2 == 0 ? other_path : path));
    for (size_t i = 0; i < THREADS; i++)
        pthread_join(threads[i], NULL);
    log_close();
    assert_int_equal(log_lines_dropped(), dropped);
    for (int file = 0; file < 2; file++) {
        struct buf text = file_text(file == 0 ? path : other_path);
        struct slice rest = buf_slice(&text), line = SLICE("");

        while (next_line(&rest, &line)) {
            uint64_t who;

            parse(true, line, &r);
            who = number_in(&r, "thread");
            assert_true(who < THREADS && number_in(&r, "number") < THREAD_LINES);
            assert_int_equal(value_of(&r, "filler").n, number_in(&r, "number") % 48);
            next[who]++;
            record_free(&r);
        }
        buf_free(&text);
    }
    for (size_t i = 0; i < THREADS; i++)
        assert_int_equal(next[i], THREAD_LINES);
}

/* --- a reader that is slow -------------------------------------------------------------------------------------- */

static uint64_t now_ms(void)
{
    struct timespec t;

    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000 + (uint64_t)t.tv_nsec / 1000000;
}

/* Reads whole lines until the writer has closed; counts them, and checks that each is one. */
static void *read_lines(void *arg)
{
    static size_t n_lines;
    int fd = *(int *)arg;
    struct buf text = {0};
    ssize_t n;

    n_lines = 0;
    for (;;) {
        struct slice rest, line = SLICE("");

        assert_true(buf_reserve(&text, 65536));
        n = read(fd, text.p + text.n, 65536);
        if (n <= 0)
            break;
        text.n += (size_t)n;
        rest = buf_slice(&text);
        while (slice_find(rest, '\n') < rest.n && next_line(&rest, &line)) {
            assert_true(line.p[0] == '{' && line.p[line.n - 1] == '}');
            n_lines++;
        }
        buf_drop(&text, text.n - rest.n);
    }
    assert_int_equal(text.n, 0);
    buf_free(&text);
    return &n_lines;
}

static void test_a_stopped_reader_costs_lines_not_time(void **state)
{
    enum { LINES = 40000 };
    uint64_t dropped = log_lines_dropped(), from;
    void *n_lines;
    pthread_t reader;
    int fd;

    (void)state;
    assert_int_equal(mkfifo(path, 0600), 0);
    fd = open(path, O_RDONLY | O_NONBLOCK | O_CLOEXEC);
    assert_true(fd >= 0);
    assert_true(log_open(true, LOG_INFO, path));
    from = now_ms();
    for (int i = 0; i < LINES; i++) { /* some 40 MB: far more than the queue holds */
        struct log_line *l = log_begin(LOG_INFO, "x");
        char filler[900];

        memset(filler, 'x', sizeof(filler));
        log_str(l, "filler", (struct slice){filler, sizeof(filler)});
        log_end(l);
    }
    log_flush();
    assert_true(now_ms() - from < 20000); /* nobody reads, and still we are here */
    dropped = log_lines_dropped() - dropped;
    assert_true(dropped > LINES / 2 && dropped < LINES);
    assert_int_equal(fcntl(fd, F_SETFL, 0), 0);
    assert_int_equal(pthread_create(&reader, NULL, read_lines, &fd), 0);
    log_close();
    pthread_join(reader, &n_lines);
    close(fd);
    assert_int_equal(*(size_t *)n_lines + dropped, LINES); /* each line was written or counted */
}

/* Standard error is often a pipe shared with a parent who has made it non-blocking: EAGAIN must not cost bytes. */
static void test_standard_error_may_be_non_blocking(void **state)
{
    enum { LINES = 2000 };
    int fds[2], saved = dup(STDERR_FILENO);
    uint64_t dropped = log_lines_dropped();
    struct pollfd full;
    void *n_lines;
    pthread_t reader;

    (void)state;
    assert_int_equal(pipe2(fds, O_CLOEXEC), 0);
    assert_int_equal(fcntl(fds[1], F_SETFL, O_NONBLOCK), 0);
    assert_true(dup2(fds[1], STDERR_FILENO) >= 0);
    assert_true(log_open(true, LOG_INFO, ""));
    for (int i = 0; i < LINES; i++) {
        struct log_line *l = log_begin(LOG_INFO, "x");
        char filler[500];

        memset(filler, 'y', sizeof(filler));
        log_str(l, "filler", (struct slice){filler, sizeof(filler)});
        log_end(l);
    }
    log_flush();
    full = (struct pollfd){.fd = fds[1], .events = POLLOUT};
    for (uint64_t until = now_ms() + 10000; poll(&full, 1, 0) == 1;
         poll(NULL, 0, 1)) /* the writer meets the full pipe */
        assert_true(now_ms() < until);
    assert_int_equal(pthread_create(&reader, NULL, read_lines, &fds[0]), 0);
    log_close();
    dup2(saved, STDERR_FILENO);
    close(saved);
    close(fds[1]);
    pthread_join(reader, &n_lines);
    close(fds[0]);
    assert_int_equal(log_lines_dropped(), dropped);
    assert_int_equal(*(size_t *)n_lines, LINES);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_fields, begin, end),
        cmocka_unit_test_setup_teardown(test_random_bytes, begin, end),
        cmocka_unit_test_setup_teardown(test_long_values_are_cut, begin, end),
        cmocka_unit_test_setup_teardown(test_levels, begin, end),
        cmocka_unit_test_setup_teardown(test_repeats_are_damped, begin, end),
        cmocka_unit_test_setup_teardown(test_reopen, begin, end),
        cmocka_unit_test_setup_teardown(test_pending, begin, end),
        cmocka_unit_test_setup_teardown(test_without_memory, begin, end),
        cmocka_unit_test_setup_teardown(test_no_line_is_torn, begin, end),
        cmocka_unit_test_setup_teardown(test_a_stopped_reader_costs_lines_not_time, begin, end),
        cmocka_unit_test_setup_teardown(test_standard_error_may_be_non_blocking, begin, end),
    };

    return cmocka_run_group_tests(tests, make_dir, remove_dir);
}
