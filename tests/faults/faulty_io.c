/* Fault injection into file operations, by LD_PRELOAD. A call on a path that contains FAULT_PATH
 * fails with the error number FAULT_ERRNO, from the FAULT_AT-th such call on and FAULT_TIMES times.
 * FAULT_CALL names the call: open, read, write, fsync or rename. Variables are read at each call, so
 * that a fork sets its own. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <unistd.h>

static long seen;

static int strikes(const char *call, const char *path) {
    const char *part = getenv("FAULT_PATH"), *wanted = getenv("FAULT_CALL");
    if (!part || !wanted || strcmp(call, wanted) || !strstr(path, part)) return 0;
    long at = atol(getenv("FAULT_AT")), times = atol(getenv("FAULT_TIMES"));
    long number = __sync_fetch_and_add(&seen, 1);
    if (number < at || number >= at + times) return 0;
    static const char mark[] = "[a call failed on purpose]\n";
    syscall(SYS_write, 2, mark, sizeof mark - 1);
    errno = atoi(getenv("FAULT_ERRNO"));
    return 1;
}

static int strikes_fd(const char *call, int fd) {
    if (!getenv("FAULT_PATH")) return 0;
    char name[64], path[4096];
    snprintf(name, sizeof name, "/proc/self/fd/%d", fd);
    ssize_t size = readlink(name, path, sizeof path - 1);
    if (size < 0) return 0;
    path[size] = 0;
    return strikes(call, path);
}

#define USUAL(result, name, ...) \
    static result (*usual)(__VA_ARGS__); \
    if (!usual) usual = (result(*)(__VA_ARGS__))dlsym(RTLD_NEXT, name)

#define OPENS(function) \
    int function(const char *path, int flags, ...) { \
        va_list words; \
        va_start(words, flags); \
        mode_t mode = va_arg(words, mode_t); \
        va_end(words); \
        USUAL(int, #function, const char *, int, ...); \
        return strikes("open", path) ? -1 : usual(path, flags, mode); \
    }
OPENS(open)
OPENS(open64)

ssize_t read(int fd, void *to, size_t size) {
    USUAL(ssize_t, "read", int, void *, size_t);
    return strikes_fd("read", fd) ? -1 : usual(fd, to, size);
}

ssize_t write(int fd, const void *from, size_t size) {
    USUAL(ssize_t, "write", int, const void *, size_t);
    return strikes_fd("write", fd) ? -1 : usual(fd, from, size);
}

int fsync(int fd) {
    USUAL(int, "fsync", int);
    return strikes_fd("fsync", fd) ? -1 : usual(fd);
}

int rename(const char *from, const char *to) {
    USUAL(int, "rename", const char *, const char *);
    return strikes("rename", to) ? -1 : usual(from, to);
}
