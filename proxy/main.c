/*
 * main.c - arguments, boot, signals, reload, drain, exit.
 *
 * Threads: one worker per core (worker.c), one for the admin listener (admin.c), one that writes the log
 * (log.c), and this one, which only waits for signals and answers them: SIGHUP reloads, SIGTERM and SIGINT drain, a
 * second one hurries.
 */
#include "admin.h"
#include "config.h"
#include "hash.h"
#include "log.h"
#include "mem.h"
#include "metrics.h"
#include "redis.h"
#include "snapshot.h"
#include "worker.h"

#include <errno.h>
#include <getopt.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define LEASEGATE_VERSION "0.1.0"

#define LOOK_AFTER_S 5 /* an embedded Redis that did not come back is tried again so often */

/* Exit statuses, as in sysexits.h. */
enum { EXIT_OK = 0, EXIT_USAGE = 64, EXIT_UNAVAILABLE = 69, EXIT_CONFIG = 78 };

struct process {
    struct snapshot *snapshot;
    struct service_shared shared;
    struct worker **workers;
    size_t n_workers;
    struct admin *admin;
    struct admin_view view;
    char *embedded_path; /* NULL: no private Redis */
    bool draining;
};

static const char usage[] =
    "leasegate - a streaming reverse proxy with a global limit on calls in flight\n"
    "\n"
    "usage:\n"
    "  leasegate [run] -c FILE     serve; SIGHUP reloads FILE, SIGTERM lets calls end and stops\n"
    "  leasegate check -c FILE     say what is wrong with FILE, all of it, and exit\n"
    "      --dump                  and print the configuration as it is understood\n"
    "  leasegate --version | --help\n"
    "\n"
    "FILE is proxy.conf in the present directory when -c is not given.\n"
    "Exit status: 0 done, 64 usage, 69 something needed is not available, 78 the configuration is wrong.\n";

/* --- configuration ------------------------------------------------------------------------------------------------ */

static struct config *load(const char *path, struct buf *errors)
{
    struct config *c = NULL;

    if (!config_load(path, &c, errors))
        return NULL;
    return c;
}

static int check(const char *path, bool dump)
{
    struct buf errors = {0}, text = {0};
    struct config *c = load(path, &errors);
    struct snapshot *s = c == NULL ? NULL : snapshot_new(c, &errors);
    int status = s == NULL ? EXIT_CONFIG : EXIT_OK;

    if (errors.n > 0)
        fprintf(stderr, "%.*s%s", (int)errors.n, errors.p, errors.p[errors.n - 1] == '\n' ? "" : "\n");
    if (s != NULL && dump && config_dump(s->config, &text))
        fwrite(text.p, 1, text.n, stdout);
    if (s != NULL && !dump)
        printf("%s: ok\n", path);
    snapshot_unref(s);
    buf_free(&errors);
    buf_free(&text);
    metrics_free();
    return status;
}

/* --- boot ---------------------------------------------------------------------------------------------------------- */

static void raise_descriptor_limit(void)
{
    struct rlimit l;

    if (getrlimit(RLIMIT_NOFILE, &l) == 0 && l.rlim_cur < l.rlim_max) {
        l.rlim_cur = l.rlim_max;
        (void)setrlimit(RLIMIT_NOFILE, &l);
    }
}

/* Blocked in every thread from now on: only the main thread takes them, by sigtimedwait. */
static void block_signals(sigset_t *set)
{
    sigemptyset(set);
    sigaddset(set, SIGHUP);
    sigaddset(set, SIGTERM);
    sigaddset(set, SIGINT);
    sigaddset(set, SIGCHLD);
    pthread_sigmask(SIG_BLOCK, set, NULL);
    signal(SIGPIPE, SIG_IGN);
}

static void name_instance(struct service_shared *shared)
{
    uint64_t nonce;
    size_t n;

    hash_random(&nonce, sizeof(nonce));
    n = str_put_hex(shared->instance, nonce);
    shared->instance[n] = '\0';
}

static int fail_boot(const char *what, const struct buf *why)
{
    fprintf(stderr, "leasegate: %s: %.*s\n", what, (int)why->n, why->n == 0 ? "" : why->p);
    redis_embedded_stop();
    return EXIT_UNAVAILABLE;
}

static int boot(struct process *p, struct config *c, struct buf *why)
{
    uint16_t *ports;

    if (c->redis[0].kind == CONFIG_REDIS_EMBEDDED) {
        if (!redis_embedded_start(&p->embedded_path, why)) {
            config_unref(c);
            return fail_boot("the embedded Redis does not start", why);
        }
        config_set_embedded_path(c, p->embedded_path);
    }
    p->snapshot = snapshot_new(c, why);
    if (p->snapshot == NULL)
        return fail_boot("configuration", why);
    name_instance(&p->shared);
    p->n_workers = c->workers;
    p->workers = mem_must_zalloc(p->n_workers * sizeof(struct worker *));
    ports = mem_must_zalloc((c->n_listens + 1) * sizeof(*ports));
    for (size_t i = 0; i < p->n_workers; i++) {
        p->workers[i] = worker_new((unsigned)i, p->snapshot, &p->shared, ports, why);
        if (p->workers[i] == NULL)
            return fail_boot("cannot listen", why);
    }
    p->view = (struct admin_view){.workers = p->workers, .n_workers = p->n_workers};
    if (c->has_admin) {
        p->admin = admin_new(p->snapshot, &p->view, why);
        if (p->admin == NULL)
            return fail_boot("cannot listen for admin", why);
    }
    for (size_t i = 0; i < c->n_listens; i++)
        log_event(LOG_INFO, "start", "listening on %s (port %u)", c->listens[i].address.text,
                  (unsigned)ports[i]);
    if (p->admin != NULL)
        log_event(LOG_INFO, "start", "admin on %s (port %u)", c->admin.text, (unsigned)admin_port(p->admin));
    log_event(LOG_INFO, "start", "leasegate %s, instance %s, %zu threads", LEASEGATE_VERSION,
              p->shared.instance, p->n_workers);
    log_flush();
    mem_free(ports);
    for (size_t i = 0; i < p->n_workers; i++)
        worker_start(p->workers[i]);
    if (p->admin != NULL)
        admin_start(p->admin);
    return EXIT_OK;
}

/* --- signals --------------------------------------------------------------------------------------------------------- */

/* What a running process cannot change. "": nothing of it was changed. */
static const char *needs_restart(const struct config *old, const struct config *fresh)
{
    const struct config_redis *a = &old->redis[0], *b = &fresh->redis[0];

    if (a->kind != b->kind || strcmp(a->host, b->host) != 0 || a->port != b->port || a->db != b->db ||
        (a->kind == CONFIG_REDIS_UNIX && strcmp(a->path, b->path) != 0) || a->use_tls != b->use_tls)
        return "redis url";
    if (strcmp(a->prefix, b->prefix) != 0)
        return "redis prefix";
    if (old->workers != fresh->workers)
        return "workers";
    if (old->has_admin != fresh->has_admin ||
        (old->has_admin && strcmp(old->admin.text, fresh->admin.text) != 0))
        return "admin address";
    return "";
}

static void log_problems(enum log_level level, const struct buf *problems)
{
    struct slice rest = buf_slice(problems);

    while (rest.n > 0) {
        size_t end = slice_find(rest, '\n');

        log_event(level, "reload", "%.*s", (int)end, rest.p);
        rest.p += end == rest.n ? end : end + 1;
        rest.n -= end == rest.n ? end : end + 1;
    }
}

/* All of it or nothing: the new file is in force, or the old one stays and the log says why. */
static bool try_reload(struct process *p, struct buf *errors)
{
    const char *path = p->snapshot->config->path;
    struct config *c = load(path, errors);
    struct snapshot *s;
    const char *fixed;
    bool ok = true;

    if (c == NULL)
        return false;
    fixed = needs_restart(p->snapshot->config, c);
    if (fixed[0] != '\0') {
        log_event(LOG_ERROR, "reload", "%s: a change of `%s` needs a restart", path, fixed);
        config_unref(c);
        return false;
    }
    if (p->embedded_path != NULL)
        config_set_embedded_path(c, p->embedded_path);
    s = snapshot_new(c, errors);
    if (s == NULL)
        return false;
    if (!log_open(c->log.format == CONFIG_LOG_JSON, (enum log_level)c->log.level, c->log.file)) {
        log_event(LOG_ERROR, "reload", "cannot open the log file %s: %s", c->log.file, strerror(errno));
        snapshot_unref(s);
        return false;
    }
    for (size_t i = 0; i < p->n_workers; i++)
        ok = worker_reload(p->workers[i], s) && ok;
    if (p->admin != NULL)
        ok = admin_reload(p->admin, s) && ok;
    snapshot_unref(p->snapshot);
    p->snapshot = s;
    return ok;
}

static void reload(struct process *p)
{
    struct buf errors = {0};

    if (try_reload(p, &errors)) {
        metrics_add(METRICS_RELOADS, 1);
        log_problems(LOG_WARN, &errors); /* it may hold warnings */
        log_event(LOG_INFO, "reload", "%s is in force", p->snapshot->config->path);
    } else {
        metrics_add(METRICS_RELOAD_FAILURES, 1);
        log_problems(LOG_ERROR, &errors);
        log_event(LOG_ERROR, "reload", "the old configuration stays in force");
    }
    buf_free(&errors);
    log_flush();
}

static void drain(struct process *p)
{
    log_event(LOG_INFO, "drain",
              p->draining ? "again: ending what is still running" : "no new calls; running ones may end");
    p->draining = true;
    __atomic_store_n(&p->view.draining, true, __ATOMIC_RELEASE);
    for (size_t i = 0; i < p->n_workers; i++)
        worker_drain(p->workers[i]);
    log_flush();
}

static bool all_done(const struct process *p)
{
    for (size_t i = 0; i < p->n_workers; i++)
        if (!worker_done(p->workers[i]))
            return false;
    return true;
}

static size_t running_calls(const struct process *p)
{
    size_t n = 0;

    for (size_t i = 0; i < p->n_workers; i++)
        n += worker_calls(p->workers[i]);
    return n;
}

static void look_after_embedded(void)
{
    struct buf why = {0};

    switch (redis_embedded_look_after(&why)) {
    case REDIS_EMBEDDED_ALIVE:
        break;
    case REDIS_EMBEDDED_REVIVED:
        log_event(LOG_ERROR, "redis", "the embedded redis-server had died and was started again");
        break;
    case REDIS_EMBEDDED_DEAD:
        log_event(LOG_ERROR, "redis", "the embedded redis-server has died: %.*s", (int)why.n, why.p);
        break;
    }
    buf_free(&why);
    log_flush();
}

/* Takes signals until everything has drained. While it drains, how much is left is logged every few seconds. */
static void wait_for_the_end(struct process *p, const sigset_t *set)
{
    unsigned rounds = 0;

    while (!p->draining || !all_done(p)) {
        struct timespec patience = {p->draining ? 0 : LOOK_AFTER_S, p->draining ? 50 * 1000 * 1000 : 0};

        switch (sigtimedwait(set, NULL, &patience)) {
        case SIGHUP:
            if (!p->draining)
                reload(p);
            break;
        case SIGTERM:
        case SIGINT:
            drain(p);
            break;
        case SIGCHLD:
            look_after_embedded();
            break;
        default:
            if (!p->draining)
                look_after_embedded();
            else if (++rounds % 100 == 0) {
                log_event(LOG_INFO, "drain", "%zu calls still running", running_calls(p));
                log_flush();
            }
            break;
        }
    }
}

static int run(const char *path, const sigset_t *signals)
{
    struct process p = {0};
    struct buf why = {0};
    struct config *c = load(path, &why);
    int status;

    if (why.n > 0)
        fprintf(stderr, "%.*s", (int)why.n, why.p);
    if (c == NULL) {
        buf_free(&why);
        return EXIT_CONFIG;
    }
    why.n = 0;
    raise_descriptor_limit();
    if (!log_open(c->log.format == CONFIG_LOG_JSON, (enum log_level)c->log.level, c->log.file)) {
        fprintf(stderr, "leasegate: cannot open the log file %s: %s\n", c->log.file, strerror(errno));
        return EXIT_UNAVAILABLE;
    }
    metrics_thread_begin();
    status = boot(&p, c, &why);
    if (status != EXIT_OK) {
        log_close();
        return status;
    }
    buf_free(&why);
    wait_for_the_end(&p, signals);
    if (p.admin != NULL) /* first: it looks at the workers */
        admin_stop(p.admin);
    for (size_t i = 0; i < p.n_workers; i++)
        worker_join(p.workers[i]);
    redis_embedded_stop();
    log_event(LOG_INFO, "stop", "all calls have ended, all leases are released");
    snapshot_unref(p.snapshot);
    mem_free(p.workers);
    mem_free(p.embedded_path);
    metrics_thread_end();
    log_close();
    metrics_free();
    return EXIT_OK;
}

/* --- arguments --------------------------------------------------------------------------------------------------------- */

int main(int argc, char **argv)
{
    static const struct option options[] = {
        {"config", required_argument, NULL, 'c'},
        {"dump", no_argument, NULL, 'd'},
        {"help", no_argument, NULL, 'h'},
        {"version", no_argument, NULL, 'V'},
        {NULL, 0, NULL, 0},
    };
    const char *path = "proxy.conf", *verb = "run";
    bool dump = false;
    sigset_t signals;
    int o;

    while ((o = getopt_long(argc, argv, "c:hV", options, NULL)) != -1) {
        switch (o) {
        case 'c':
            path = optarg;
            break;
        case 'd':
            dump = true;
            break;
        case 'h':
            fputs(usage, stdout);
            return EXIT_OK;
        case 'V':
            puts("leasegate " LEASEGATE_VERSION);
            return EXIT_OK;
        default:
            fputs("try: leasegate --help\n", stderr);
            return EXIT_USAGE;
        }
    }
    if (optind < argc)
        verb = argv[optind++];
    if (optind < argc) {
        fprintf(stderr, "leasegate: one argument too many: %s\ntry: leasegate --help\n", argv[optind]);
        return EXIT_USAGE;
    }
    if (strcmp(verb, "run") == 0) {
        block_signals(
            &signals); /* first of all: a signal that comes while we boot waits until we can heed it */
        return run(path, &signals);
    }
    if (strcmp(verb, "check") == 0)
        return check(path, dump);
    fprintf(stderr, "leasegate: unknown command: %s\ntry: leasegate --help\n", verb);
    return EXIT_USAGE;
}
