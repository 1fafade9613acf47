/*
 * mock-llm.c - an LLM API that never tires: options, listeners, threads. mock.h has the map.
 *
 * Each thread has its own loop and, on TCP, its own SO_REUSEPORT socket; a unix socket is shared. The only
 * output on stdout is one `listening on …` line for each listener, when all of them accept.
 */
#include "mock.h"

#include <arpa/inet.h>
#include <errno.h>
#include <getopt.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

enum { BACKLOG = 4096, THREADS_MAX = 64 };

struct options {
    const char *host, *unix_path, *cert, *key;
    unsigned port, threads;
    bool tcp;
};

static atomic_int stop;

static void on_signal(int number UNUSED)
{
    stop = 1;
}

NORETURN static void fail(const char *what)
{
    fprintf(stderr, "mock-llm: %s: %s\n", what, strerror(errno));
    exit(1);
}

NORETURN static void usage(int status)
{
    fputs("usage: mock-llm --port N [--host ADDR] [--unix PATH] [--tls-cert FILE --tls-key FILE]\n"
          "                [--threads N] [--cap N] [--default 'x-mock-NAME: VALUE']... [--faults]\n"
          "  --port N      TCP port; 0: a free one\n"
          "  --unix PATH   listens there too (never TLS)\n"
          "  --threads N   event loops; hold a limit against one (the default)\n"
          "  --cap N       answers 429 to calls beyond N in flight\n"
          "  --default F   what requests ask for unless they say otherwise\n"
          "  --faults      lists the values of x-mock-fault\n",
          status == 0 ? stdout : stderr);
    exit(status);
}

static unsigned number(const char *s, unsigned max)
{
    char *end;
    unsigned long v = strtoul(s, &end, 10);

    if (*s < '0' || *s > '9' || *end != '\0' || v > max)
        usage(2);
    return (unsigned)v;
}

static void set_default(const char *field)
{
    const char *colon = strchr(field, ':');
    const char *value;

    if (colon == NULL)
        usage(2);
    value = colon + 1 + strspn(colon + 1, " ");
    if (!call_set_default((struct slice){field, (size_t)(colon - field)}, slice_of(value))) {
        fprintf(stderr, "mock-llm: --default '%s': no such field or value\n", field);
        exit(2);
    }
}

static void parse_options(int argc, char **argv, struct options *o)
{
    static const struct option longs[] = {
        {"port", required_argument, NULL, 'p'},
        {"host", required_argument, NULL, 'h'},
        {"unix", required_argument, NULL, 'u'},
        {"tls-cert", required_argument, NULL, 'c'},
        {"tls-key", required_argument, NULL, 'k'},
        {"threads", required_argument, NULL, 't'},
        {"cap", required_argument, NULL, 'l'},
        {"default", required_argument, NULL, 'd'},
        {"faults", no_argument, NULL, 'f'},
        {"help", no_argument, NULL, '?'},
        {NULL, 0, NULL, 0},
    };
    int opt;

    while ((opt = getopt_long(argc, argv, "", longs, NULL)) != -1) {
        switch (opt) {
        case 'p':
            o->port = number(optarg, 65535);
            o->tcp = true;
            break;
        case 'h':
            o->host = optarg;
            break;
        case 'u':
            o->unix_path = optarg;
            break;
        case 'c':
            o->cert = optarg;
            break;
        case 'k':
            o->key = optarg;
            break;
        case 't':
            o->threads = number(optarg, THREADS_MAX);
            break;
        case 'l':
            stats_cap(number(optarg, 1000000000));
            break;
        case 'd':
            set_default(optarg);
            break;
        case 'f':
            fault_list();
            exit(0);
        default:
            usage(optind > 1 && strcmp(argv[optind - 1], "--help") == 0 ? 0 : 2);
        }
    }
    if (optind < argc || (!o->tcp && o->unix_path == NULL) || (o->cert == NULL) != (o->key == NULL) ||
        o->threads == 0)
        usage(2);
}

/* Port 0: a free one is taken and *port is set to it. */
static int listen_tcp(const char *host, unsigned *port, bool shared)
{
    struct sockaddr_in addr = {.sin_family = AF_INET, .sin_port = htons((uint16_t)*port)};
    socklen_t n = sizeof(addr);
    int one = 1, fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);

    if (inet_pton(AF_INET, host, &addr.sin_addr) != 1) {
        errno = EINVAL;
        fail(host);
    }
    if (fd < 0 || setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof(one)) != 0 ||
        (shared && setsockopt(fd, SOL_SOCKET, SO_REUSEPORT, &one, sizeof(one)) != 0) ||
        bind(fd, (struct sockaddr *)&addr, sizeof(addr)) != 0 || listen(fd, BACKLOG) != 0 ||
        getsockname(fd, (struct sockaddr *)&addr, &n) != 0)
        fail("listen");
    *port = ntohs(addr.sin_port);
    return fd;
}

static int listen_unix(const char *path)
{
    struct sockaddr_un addr = {.sun_family = AF_UNIX};
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);

    if (strlen(path) >= sizeof(addr.sun_path)) {
        errno = ENAMETOOLONG;
        fail(path);
    }
    memcpy(addr.sun_path, path, strlen(path) + 1);
    unlink(path);
    if (fd < 0 || bind(fd, (struct sockaddr *)&addr, sizeof(addr)) != 0 || listen(fd, BACKLOG) != 0)
        fail(path);
    return fd;
}

static SSL_CTX *load_tls(const struct options *o)
{
    SSL_CTX *ctx;

    if (o->cert == NULL)
        return NULL;
    ctx = SSL_CTX_new(TLS_server_method());
    if (ctx == NULL || SSL_CTX_use_certificate_chain_file(ctx, o->cert) != 1 ||
        SSL_CTX_use_PrivateKey_file(ctx, o->key, SSL_FILETYPE_PEM) != 1) {
        fprintf(stderr, "mock-llm: cannot use %s with %s\n", o->cert, o->key);
        exit(1);
    }
    SSL_CTX_set_mode(ctx, SSL_MODE_ENABLE_PARTIAL_WRITE | SSL_MODE_ACCEPT_MOVING_WRITE_BUFFER |
                              SSL_MODE_RELEASE_BUFFERS);
    return ctx;
}

static void *run_thread(void *loop)
{
    loop_run(loop, &stop);
    return NULL;
}

static void catch_signals(void)
{
    struct sigaction act = {.sa_handler = on_signal};

    sigaction(SIGTERM, &act, NULL);
    sigaction(SIGINT, &act, NULL);
    signal(SIGPIPE, SIG_IGN);
}

static void raise_file_limit(void)
{
    struct rlimit limit;

    if (getrlimit(RLIMIT_NOFILE, &limit) == 0) {
        limit.rlim_cur = limit.rlim_max;
        setrlimit(RLIMIT_NOFILE, &limit);
    }
}

int main(int argc, char **argv)
{
    struct options o = {.host = "127.0.0.1", .threads = 1};
    struct loop *loops;
    pthread_t ids[THREADS_MAX];
    SSL_CTX *tls;
    int unix_fd = -1;

    parse_options(argc, argv, &o);
    catch_signals();
    raise_file_limit();
    tls = load_tls(&o);
    loops = calloc(o.threads, sizeof(*loops));
    BUG_ON(loops == NULL);
    if (o.unix_path != NULL)
        unix_fd = listen_unix(o.unix_path);
    for (unsigned i = 0; i < o.threads; i++) {
        loop_init(&loops[i], tls);
        if (o.tcp)
            loop_listen(&loops[i],
                        &(struct listener){listen_tcp(o.host, &o.port, o.threads > 1), tls != NULL});
        if (unix_fd >= 0)
            loop_listen(&loops[i], &(struct listener){i == 0 ? unix_fd : dup(unix_fd), false});
    }
    if (o.tcp)
        printf("listening on %s:%u\n", o.host, o.port);
    if (unix_fd >= 0)
        printf("listening on %s\n", o.unix_path);
    fflush(stdout);
    for (unsigned i = 1; i < o.threads; i++) {
        if (pthread_create(&ids[i], NULL, run_thread, &loops[i]) != 0)
            fail("thread");
    }
    loop_run(&loops[0], &stop);
    for (unsigned i = 1; i < o.threads; i++)
        pthread_join(ids[i], NULL);
    for (unsigned i = 0; i < o.threads; i++)
        loop_free(&loops[i]);
    free(loops);
    SSL_CTX_free(tls);
    if (o.unix_path != NULL)
        unlink(o.unix_path);
    return 0;
}
