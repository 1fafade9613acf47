/*
 * fuzz_config.c - any bytes as a configuration file: a snapshot or errors, never both halves of each, nothing
 * left behind, and a dump that can be read again.
 */
#include "config.h"
#include "mem.h"

#include <stdio.h>
#include <sys/mman.h>
#include <unistd.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

static bool load(const void *text, size_t n, struct config **c, struct buf *errors)
{
    char path[32];
    int fd = memfd_create("config", MFD_CLOEXEC);
    bool ok;

    BUG_ON(fd < 0 || write(fd, text, n) != (ssize_t)n);
    snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
    ok = config_load(path, c, errors);
    close(fd);
    return ok;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    struct buf errors = {0}, dump = {0};
    size_t before = mem_live_blocks();
    struct config *c, *again;

    if (load(data, n, &c, &errors)) {
        BUG_ON(c->n_listens == 0 || c->n_routes == 0 || c->routes[0].upstream == NULL || c->n_redis == 0);
        BUG_ON(!config_dump(c, &dump));
        buf_free(&errors);
        BUG_ON(!load(dump.p, dump.n, &again, &errors));
        config_unref(again);
        config_unref(c);
    } else {
        BUG_ON(c != NULL || errors.n == 0);
    }
    buf_free(&errors);
    buf_free(&dump);
    BUG_ON(mem_live_blocks() != before);
    return 0;
}
