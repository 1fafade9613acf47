/*
 * clock.c - for LD_PRELOAD: shifts what a process takes for the time of day.
 *
 * By the seconds in the first eight bytes of the file that LEASEGATE_TEST_CLOCK names, looked up at each call, so that a
 * test can step the clock of a process that runs. CLOCK_MONOTONIC stays as it is, as in a real step. (libfaketime 0.9.10
 * does not start below jemalloc, which redis-server brings.)
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static const volatile int64_t *shift_s;

__attribute__((constructor)) static void map_shift(void)
{
    const char *path = getenv("LEASEGATE_TEST_CLOCK");
    int fd = path == NULL ? -1 : open(path, O_RDONLY | O_CLOEXEC);
    void *p = fd < 0 ? MAP_FAILED : mmap(NULL, sizeof(*shift_s), PROT_READ, MAP_SHARED, fd, 0);

    if (fd >= 0)
        close(fd);
    if (p == MAP_FAILED)
        abort();
    shift_s = p;
}

int clock_gettime(clockid_t id, struct timespec *ts)
{
    if (syscall(SYS_clock_gettime, id, ts) != 0)
        return -1;
    if (shift_s != NULL && (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE))
        ts->tv_sec += *shift_s;
    return 0;
}

int gettimeofday(struct timeval *restrict tv, void *restrict zone)
{
    if (syscall(SYS_gettimeofday, tv, zone) != 0)
        return -1;
    if (shift_s != NULL)
        tv->tv_sec += *shift_s;
    return 0;
}

time_t time(time_t *t)
{
    struct timespec ts;

    if (clock_gettime(CLOCK_REALTIME, &ts) != 0)
        return -1;
    if (t != NULL)
        *t = ts.tv_sec;
    return ts.tv_sec;
}
