/*
 * redis_help.h - what the tests of redis.c and lease.c share: a redis-server of their own on a unix socket,
 * which can be stopped, continued, killed and started anew, and a blocking line to it besides the code under
 * test.
 */
#ifndef LG_TEST_REDIS_HELP_H
#define LG_TEST_REDIS_HELP_H

#include "io_help.h"

#include "config/config.h"

#include <dirent.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>

#define SERVER_WORDS_MAX 32

struct server {
    pid_t pid;
    char dir[64];
    char path[96];
    uint16_t port; /* 0: no TCP */
    int fd;        /* the line; -1: not open */
    char reply[65536];
    size_t reply_n;
};

static inline uint64_t real_ms(void)
{
    return loop_now_us() / 1000;
}

static inline void nap(void)
{
    struct timespec t = {.tv_nsec = 2000000};

    nanosleep(&t, NULL);
}

static inline void server_dial(struct server *s)
{
    struct sockaddr_un a = {.sun_family = AF_UNIX};
    uint64_t until = real_ms() + 10000;

    snprintf(a.sun_path, sizeof(a.sun_path), "%s", s->path);
    for (;;) {
        s->fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
        assert_true(s->fd >= 0);
        if (connect(s->fd, (struct sockaddr *)&a, sizeof(a)) == 0)
            return;
        close(s->fd);
        assert_true(real_ms() < until);
        nap();
    }
}

/* Starts it in s->dir; words: further arguments, ended by NULL. */
static inline void server_spawn(struct server *s, const char *const *words)
{
    const char *argv[SERVER_WORDS_MAX] = {
        "redis-server", "--port", "0",    "--unixsocket", s->path,   "--save",    "",          "--appendonly",
        "no",           "--dir",  s->dir, "--loglevel",   "warning", "--logfile", "server.log"};
    size_t n = 15;
    char port[8];

    if (s->port != 0) {
        snprintf(port, sizeof(port), "%u", s->port);
        argv[2] = port;
    }
    while (words != NULL && *words != NULL && n < SERVER_WORDS_MAX - 1)
        argv[n++] = *words++;
    unlink(s->path);
    s->pid = fork();
    assert_true(s->pid >= 0);
    if (s->pid == 0) {
        (void)prctl(PR_SET_PDEATHSIG, SIGKILL); /* also when a test fails */
        execvp(argv[0], (char *const *)(uintptr_t)argv);
        _exit(127);
    }
    server_dial(s);
}

static inline void server_start(struct server *s, const char *const *words)
{
    *s = (struct server){.fd = -1};
    snprintf(s->dir, sizeof(s->dir), "/tmp/lg-redis-XXXXXX");
    assert_non_null(mkdtemp(s->dir));
    snprintf(s->path, sizeof(s->path), "%s/sock", s->dir);
    server_spawn(s, words);
}

static inline void server_kill(struct server *s)
{
    close(s->fd);
    s->fd = -1;
    kill(s->pid, SIGKILL);
    waitpid(s->pid, NULL, 0);
    s->pid = 0;
}

/* A directory of files only. */
static inline void remove_dir(const char *dir)
{
    DIR *d = opendir(dir);
    const struct dirent *e;

    assert_non_null(d);
    while ((e = readdir(d)) != NULL)
        if (e->d_name[0] != '.')
            assert_int_equal(unlinkat(dirfd(d), e->d_name, 0), 0);
    closedir(d);
    assert_int_equal(rmdir(dir), 0);
}

static inline void server_stop(struct server *s)
{
    if (s->pid != 0)
        server_kill(s);
    remove_dir(s->dir);
}

/* Stopped for sure when it returns. */
static inline void server_pause(struct server *s)
{
    int status;

    kill(s->pid, SIGSTOP);
    assert_int_equal(waitpid(s->pid, &status, WUNTRACED), s->pid);
}

static inline void server_resume(struct server *s)
{
    kill(s->pid, SIGCONT);
}

/* --- the line ------------------------------------------------------------------------------------------- */

static inline char line_byte(struct server *s)
{
    struct pollfd p = {.fd = s->fd, .events = POLLIN};
    char c;

    assert_int_equal(poll(&p, 1, 10000), 1);
    assert_int_equal(read(s->fd, &c, 1), 1);
    return c;
}

static inline void line_put(struct server *s, char c)
{
    if (s->reply_n < sizeof(s->reply) - 1)
        s->reply[s->reply_n++] = c;
}

/* Appends one reply as text: elements of an array are separated by spaces. */
static inline void line_take(struct server *s)
{
    char type = line_byte(s), head[512];
    size_t n = 0;
    long count;

    while ((head[n] = line_byte(s)) != '\n')
        n = n < sizeof(head) - 1 ? n + 1 : n;
    head[n > 0 ? n - 1 : 0] = '\0';
    count = strtol(head, NULL, 10);
    if (type == '$') {
        for (long i = 0; i < count; i++)
            line_put(s, line_byte(s));
        for (int i = 0; i < 2 && count >= 0; i++)
            (void)line_byte(s);
    } else if (type == '*') {
        for (long i = 0; i < count; i++) {
            if (i > 0)
                line_put(s, ' ');
            line_take(s);
        }
    } else {
        for (const char *p = head; *p != '\0'; p++)
            line_put(s, *p);
    }
}

/* One command, words separated by spaces; the reply as text, valid until the next. */
PRINTF_LIKE(2, 3) static inline const char *server_ask(struct server *s, const char *fmt, ...)
{
    char text[1024];
    va_list args;
    int n;

    va_start(args, fmt);
    n = vsnprintf(text, sizeof(text) - 2, fmt, args);
    va_end(args);
    text[n++] = '\r';
    text[n++] = '\n';
    assert_int_equal(write(s->fd, text, (size_t)n), n);
    s->reply_n = 0;
    line_take(s);
    s->reply[s->reply_n] = '\0';
    return s->reply;
}

#define server_int(s, ...) strtol(server_ask(s, __VA_ARGS__), NULL, 10)

/* How often a command was called since CONFIG RESETSTAT. */
static inline long server_calls(struct server *s, const char *command)
{
    char key[64];
    const char *at;

    snprintf(key, sizeof(key), "cmdstat_%s:calls=", command);
    at = strstr(server_ask(s, "INFO commandstats"), key);
    return at == NULL ? 0 : strtol(at + strlen(key), NULL, 10);
}

/* A port that was free a moment ago. */
static inline uint16_t free_port(void)
{
    uint16_t port;
    int fd = io_raw_listen(1, &port);

    close(fd);
    return port;
}

/* --- configuration -------------------------------------------------------------------------------------- */

static inline struct config_redis redis_conf(struct server *s)
{
    return (struct config_redis){.name = (char *)(uintptr_t) "test",
                                 .kind = CONFIG_REDIS_UNIX,
                                 .path = s->path,
                                 .host = (char *)(uintptr_t) "127.0.0.1",
                                 .port = s->port,
                                 .user = (char *)(uintptr_t) "",
                                 .password = (char *)(uintptr_t) "",
                                 .prefix = (char *)(uintptr_t) "lg1",
                                 .timeout_ms = 250};
}

#endif
