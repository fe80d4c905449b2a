// SPDX-License-Identifier: Apache-2.0
// Faults of a machine that a test switches on and off while a job runs, for LD_PRELOAD.
//
// The switches are in the file that $FAULTS_FILE names, mapped by every process of the job:
// seconds that the wall clock is ahead, whether writes under a path fail with EIO, whether the file
// system there has no locks, and whether a rename to a name under that path waits.

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

struct switches {
    volatile double clock_s;
    volatile int eio;
    volatile int no_locks;
    volatile int hold;
    volatile int held;  // Set by the process that waits.
    // So often each fault has acted, in all processes.
    volatile int clock_reads;
    volatile int eio_refusals;
    volatile int lock_refusals;
    char prefix[220];
};

static struct switches none;

static struct switches *now(void) {
    static struct switches *mapped;
    if (mapped) return mapped;
    const char *path = getenv("FAULTS_FILE");
    int file = path ? open(path, O_RDWR | O_CLOEXEC) : -1;
    void *found = MAP_FAILED;
    if (file >= 0) {
        found = mmap(NULL, sizeof none, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
        close(file);
    }
    return mapped = found == MAP_FAILED ? &none : found;
}

static int is_meant(const char *path) {
    return strncmp(path, now()->prefix, strlen(now()->prefix)) == 0;
}

static void count(volatile int *counter) { __atomic_fetch_add(counter, 1, __ATOMIC_RELAXED); }

static void *real(const char *name) { return dlsym(RTLD_NEXT, name); }

// ---- the wall clock -----------------------------------------------------------------------------

int clock_gettime(clockid_t clock, struct timespec *time) {
    static int (*original)(clockid_t, struct timespec *);
    if (!original) original = real("clock_gettime");
    int answer = original(clock, time);
    if (clock == CLOCK_REALTIME && answer == 0 && now()->clock_s != 0) {
        time->tv_sec += (time_t)now()->clock_s;
        count(&now()->clock_reads);
    }
    return answer;
}

int gettimeofday(struct timeval *restrict time, void *restrict zone) {
    static int (*original)(struct timeval *, void *);
    if (!original) original = real("gettimeofday");
    int answer = original(time, zone);
    if (answer == 0) time->tv_sec += (time_t)now()->clock_s;
    return answer;
}

// ---- a disk that fails --------------------------------------------------------------------------

static int is_meant_file(int file) {
    char link[40], path[4096];
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 0) return 0;
    path[length] = 0;
    return is_meant(path);
}

#define FAILING(type, name, parameters, arguments)      \
    type name parameters {                              \
        static type(*original) parameters;              \
        if (!original) original = real(#name);          \
        if (now()->eio && is_meant_file(file)) {                      \
            count(&now()->eio_refusals);                \
            errno = EIO;                                \
            return -1;                                  \
        }                                               \
        return original arguments;                      \
    }

FAILING(int, fsync, (int file), (file))
FAILING(int, fdatasync, (int file), (file))
FAILING(ssize_t, write, (int file, const void *data, size_t size), (file, data, size))
FAILING(ssize_t, pwrite, (int file, const void *data, size_t size, off_t at),
        (file, data, size, at))
FAILING(ssize_t, pwrite64, (int file, const void *data, size_t size, off64_t at),
        (file, data, size, at))

// ---- a machine that stands still in the middle of a commit --------------------------------------

int rename(const char *from, const char *to) {
    static int (*original)(const char *, const char *);
    if (!original) original = real("rename");
    while (now()->hold && is_meant(to)) {
        now()->held = 1;
        usleep(1000);
    }
    return original(from, to);
}

// ---- a file system without locks ----------------------------------------------------------------

int flock(int file, int operation) {
    static int (*original)(int, int);
    if (!original) original = real("flock");
    if (now()->no_locks && is_meant_file(file)) {
        count(&now()->lock_refusals);
        errno = ENOLCK;
        return -1;
    }
    return original(file, operation);
}

static int is_a_lock(int command) {
    return command == F_SETLK || command == F_SETLKW || command == F_OFD_SETLK ||
           command == F_OFD_SETLKW;
}

#define CONTROL(name)                                         \
    int name(int file, int command, ...) {                    \
        static int (*original)(int, int, ...);                \
        if (!original) original = real(#name);                \
        va_list arguments;                                    \
        va_start(arguments, command);                         \
        void *argument = va_arg(arguments, void *);           \
        va_end(arguments);                                    \
        if (is_a_lock(command) && now()->no_locks && is_meant_file(file)) { \
            count(&now()->lock_refusals);                     \
            errno = ENOLCK;                                   \
            return -1;                                        \
        }                                                     \
        return original(file, command, argument);             \
    }

CONTROL(fcntl)
CONTROL(fcntl64)
