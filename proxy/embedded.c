/*
 * embedded.c - the private redis-server: a child of this process that serves nobody else.
 *
 * For one machine, tests and a first try: no Redis to install beside the package, no port, no password. It
 * listens on a unix socket in a fresh directory of mode 0700, keeps nothing on disk, and must not outlive us,
 * however we end: the kernel kills it with its parent (PR_SET_PDEATHSIG; the child looks once more at its
 * parent, which may have died before).
 *
 * Owns the child and the directory: one a process, hence a static. Main thread only, at boot and at exit,
 * where blocking is fine; PDEATHSIG means the thread that forked, and the main thread lives as long as the
 * process. After SIGKILL of ours the (empty but for socket and log) directory stays behind.
 */
#include "redis.h"

#include "buf.h"
#include "mem.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define START_MS 5000
#define STOP_MS 2000
#define POLL_MS 5
#define EXEC_FAILED 127
#define PATH_MAX_BYTES (sizeof(((struct sockaddr_un *)NULL)->sun_path) - 1)

static struct {
    pid_t pid; /* 0: none */
    char dir[128];
} embedded;

static void say(struct buf *why, const char *text)
{
    (void)!buf_put(why, slice_of(text));
}

static void nap(void)
{
    struct timespec t = {.tv_nsec = POLL_MS * 1000000L};

    nanosleep(&t, NULL);
}

/* The child, between fork and exec: only what is safe there. */
NORETURN static void become_server(const char *path, const char *dir, pid_t parent)
{
    /*
     * zset-max-ziplist-entries: the name that Redis 6 knows, and 7 and Valkey still take for
     * ...-listpack-entries.
     */
    const char *const argv[] = {"redis-server",
                                "--port",
                                "0",
                                "--unixsocket",
                                path,
                                "--unixsocketperm",
                                "700",
                                "--save",
                                "",
                                "--appendonly",
                                "no",
                                "--dir",
                                dir,
                                "--logfile",
                                "server.log",
                                "--loglevel",
                                "warning",
                                "--daemonize",
                                "no",
                                "--databases",
                                "1",
                                "--maxmemory-policy",
                                "noeviction",
                                "--zset-max-ziplist-entries",
                                "0",
                                NULL};
    sigset_t none;
    int null_fd;

    if (prctl(PR_SET_PDEATHSIG, SIGKILL) != 0 || getppid() != parent)
        _exit(EXEC_FAILED);
    (void)setpgid(0, 0); /* a Ctrl-C is for us: we drain first */
    sigemptyset(&none);
    (void)sigprocmask(SIG_SETMASK, &none, NULL);
    null_fd = open("/dev/null", O_RDWR);
    if (null_fd >= 0) {
        (void)dup2(null_fd, STDIN_FILENO);
        (void)dup2(null_fd, STDOUT_FILENO);
        (void)dup2(null_fd, STDERR_FILENO);
    }
    execvp(argv[0], (char *const *)(uintptr_t)argv);
    _exit(EXEC_FAILED);
}

static bool answers(const char *path)
{
    struct sockaddr_un a = {.sun_family = AF_UNIX};
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    bool ok;

    if (fd < 0)
        return false;
    memcpy(a.sun_path, path, strlen(path) + 1);
    ok = connect(fd, (struct sockaddr *)&a, sizeof(a)) == 0;
    close(fd);
    return ok;
}

/* True once it can be connected to. */
static bool wait_for_server(const char *path, struct buf *why)
{
    for (int ms = 0; ms < START_MS; ms += POLL_MS) {
        int status;

        if (answers(path))
            return true;
        if (waitpid(embedded.pid, &status, WNOHANG) == embedded.pid) {
            embedded.pid = 0;
            if (WIFEXITED(status) && WEXITSTATUS(status) == EXEC_FAILED)
                say(why, "the embedded Redis needs the program redis-server: install it, or set redis.url to "
                         "a server");
            else
                say(why, "the embedded redis-server ended at once: try `redis-server --port 0` by hand");
            return false;
        }
        nap();
    }
    say(why, "the embedded redis-server did not come up in time");
    return false;
}

static bool make_dir(struct buf *why)
{
    const char *tmp = getenv("TMPDIR");
    int n;

    if (tmp == NULL || *tmp == '\0')
        tmp = P_tmpdir;
    n = snprintf(embedded.dir, sizeof(embedded.dir), "%s/leasegate-XXXXXX", tmp);
    /* "/redis.sock" must fit into a socket's address behind it */
    if (n < 0 || (size_t)n + 11 > PATH_MAX_BYTES || (size_t)n >= sizeof(embedded.dir)) {
        say(why, "the embedded Redis needs a shorter TMPDIR");
        return false;
    }
    if (mkdtemp(embedded.dir) == NULL) {
        say(why, "the embedded Redis needs a directory that can be written to: set TMPDIR");
        return false;
    }
    return true;
}

static void remove_dir(void)
{
    static const char *const names[] = {"redis.sock", "server.log"};
    char path[sizeof(embedded.dir) + 16];

    for (size_t i = 0; i < ARRAY_LEN(names); i++) {
        (void)snprintf(path, sizeof(path), "%s/%s", embedded.dir, names[i]);
        (void)unlink(path);
    }
    (void)rmdir(embedded.dir);
    embedded.dir[0] = '\0';
}

static bool start_server(const char *socket_path, struct buf *why)
{
    pid_t parent = getpid();

    embedded.pid = fork();
    if (embedded.pid == 0)
        become_server(socket_path, embedded.dir, parent);
    if (embedded.pid < 0) {
        embedded.pid = 0;
        say(why, "the embedded redis-server cannot be started: no process can be made");
        return false;
    }
    return wait_for_server(socket_path, why);
}

static void put_socket_path(char path[sizeof(embedded.dir) + 16])
{
    (void)snprintf(path, sizeof(embedded.dir) + 16, "%s/redis.sock", embedded.dir);
}

bool redis_embedded_start(char **path, struct buf *why)
{
    char socket_path[sizeof(embedded.dir) + 16];

    BUG_ON(embedded.pid != 0);
    if (!make_dir(why))
        return false;
    put_socket_path(socket_path);
    if (!start_server(socket_path, why)) {
        redis_embedded_stop();
        return false;
    }
    *path = mem_must_strndup(socket_path, strlen(socket_path));
    return true;
}

enum redis_embedded_fate redis_embedded_look_after(struct buf *why)
{
    char socket_path[sizeof(embedded.dir) + 16];
    int status;

    if (embedded.dir[0] == '\0') /* none was asked for */
        return REDIS_EMBEDDED_ALIVE;
    if (embedded.pid != 0 && waitpid(embedded.pid, &status, WNOHANG) != embedded.pid)
        return REDIS_EMBEDDED_ALIVE;
    embedded.pid = 0;
    put_socket_path(socket_path);
    (void)unlink(socket_path); /* of the dead one */
    return start_server(socket_path, why) ? REDIS_EMBEDDED_REVIVED : REDIS_EMBEDDED_DEAD;
}

void redis_embedded_stop(void)
{
    if (embedded.dir[0] == '\0')
        return;
    if (embedded.pid == 0) { /* it has died, and did not come back */
        remove_dir();
        return;
    }
    (void)kill(embedded.pid, SIGTERM);
    for (int ms = 0; ms < STOP_MS; ms += POLL_MS) {
        if (waitpid(embedded.pid, NULL, WNOHANG) != 0) {
            embedded.pid = 0;
            remove_dir();
            return;
        }
        nap();
    }
    (void)kill(embedded.pid, SIGKILL);
    (void)waitpid(embedded.pid, NULL, 0);
    embedded.pid = 0;
    remove_dir();
}
