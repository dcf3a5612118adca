/* Faults of a file system, preloaded into a process (LD_PRELOAD): at a chosen event below a chosen
 * folder the process is killed, or a call fails. Events are calls that change files (or, of the other
 * kind, that read them), from Python, Rust and C++ alike. Relative paths count as below the folder.
 *
 * Nothing happens before `faults_arm`. Counters are in memory that a forked child shares with its
 * parent, so that they can be read after the child was killed.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

enum kind { READ = 1, CHANGE = 2, GROW = 4 }; /* GROW needs space: a change that a full disk refuses */
enum mode { COUNT, KILL, FAIL_ONCE, FAIL_FROM, SHORT };

static struct shared { _Atomic long reads, changes, grows, faults; } *counters;
static char root[PATH_MAX];
static size_t root_length;
static enum mode mode;
static int kinds, error_number, armed;
static long at;
static _Atomic long clock_step, clock_calls;
static _Atomic unsigned char below[1 << 16]; /* by descriptor: whether it is of a file below root */

__attribute__((constructor)) static void start(void) {
    counters = mmap(NULL, sizeof *counters, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
}

void faults_arm(const char *folder, int what, int of_kinds, long event, int error) {
    memset(counters, 0, sizeof *counters);
    strncpy(root, folder, sizeof root - 1);
    root_length = strlen(root);
    mode = what, kinds = of_kinds, at = event, error_number = error;
    armed = 1;
}

/* Every look at the wall clock sets it back by this many seconds. */
void faults_clock(long seconds) { clock_step = seconds; }

long faults_count(int kind) {
    return kind == READ ? counters->reads : kind == CHANGE ? counters->changes
         : kind == GROW ? counters->grows : counters->faults;
}

#define REAL(name) ((__typeof__(&name))real(#name))
static void *real(const char *name) { return dlsym(RTLD_NEXT, name); }

static int is_below(int folder, const char *path) {
    if (!armed || path == NULL) return 0;
    if (path[0] == '/')
        return strncmp(path, root, root_length) == 0 && (path[root_length] == '/' || !path[root_length]);
    return folder == AT_FDCWD || (folder >= 0 && folder < (1 << 16) && below[folder]);
}

static int is_ours(int descriptor) {
    return armed && descriptor >= 0 && descriptor < (1 << 16) && below[descriptor];
}

static void note(int descriptor, int ours) {
    if (descriptor >= 0 && descriptor < (1 << 16)) below[descriptor] = ours;
}

static void die(void) {
    kill(getpid(), SIGKILL);
    for (;;) pause();
}

/* Count an event; returns whether it is the one at which (or after which) something goes wrong. */
static int event(int of) {
    long number = 0, count;
    if (of & READ && (count = ++counters->reads, kinds & READ)) number = count;
    if (of & CHANGE && (count = ++counters->changes, kinds & CHANGE)) number = count;
    if (of & GROW && (count = ++counters->grows, kinds & GROW)) number = count;
    if (number == 0 || mode == COUNT || mode == SHORT) return 0;
    if (mode == FAIL_FROM ? number < at : number != at) return 0;
    counters->faults++;
    return 1;
}

/* For calls without data: true if the call must fail with errno set. */
static int fails(int of) {
    if (!event(of)) return 0;
    if (mode == KILL) die();
    errno = error_number;
    return 1;
}

static int open_kind(int flags) {
    if (flags & (O_CREAT | O_TRUNC)) return CHANGE | GROW;
    return (flags & O_ACCMODE) == O_RDONLY ? READ : CHANGE;
}

#define OPEN(name, folder, before)                                     \
    mode_t bits = 0;                                                   \
    if (flags & (O_CREAT | O_TMPFILE)) {                               \
        va_list rest;                                                  \
        va_start(rest, flags);                                         \
        bits = va_arg(rest, mode_t);                                   \
        va_end(rest);                                                  \
    }                                                                  \
    int ours = is_below(folder, path);                                 \
    if (ours && fails(open_kind(flags))) return -1;                    \
    int descriptor = REAL(name) before;                                \
    note(descriptor, ours);                                            \
    return descriptor;

int open(const char *path, int flags, ...) { OPEN(open, AT_FDCWD, (path, flags, bits)) }
int open64(const char *path, int flags, ...) { OPEN(open64, AT_FDCWD, (path, flags, bits)) }
int openat(int folder, const char *path, int flags, ...) {
    OPEN(openat, folder, (folder, path, flags, bits))
}
int openat64(int folder, const char *path, int flags, ...) {
    OPEN(openat64, folder, (folder, path, flags, bits))
}

#define FOPEN(name)                                                    \
    int ours = is_below(AT_FDCWD, path);                               \
    if (ours && fails(how[0] == 'r' ? READ : CHANGE | GROW)) return NULL; \
    FILE *stream = REAL(name)(path, how);                              \
    if (stream) note(fileno(stream), ours);                            \
    return stream;

FILE *fopen(const char *path, const char *how) { FOPEN(fopen) }
FILE *fopen64(const char *path, const char *how) { FOPEN(fopen64) }

int close(int descriptor) {
    note(descriptor, 0);
    return REAL(close)(descriptor);
}

/* How much of `size` a short write takes. */
static size_t taken(size_t size) {
    if (mode != SHORT || size < 2) return size;
    return at > 0 && size > (size_t)at ? (size_t)at : size / 2;
}

/* A kill, or a disk that becomes full, lets the first half of the data through. */
#define WRITE(call)                                                    \
    if (!is_ours(descriptor)) return call(size);                       \
    if (!event(CHANGE | GROW)) return call(taken(size));               \
    if (size > 1 && (mode == KILL || (mode == FAIL_FROM && counters->faults == 1))) { \
        ssize_t written = call(size / 2);                              \
        if (mode != KILL) return written;                              \
    }                                                                  \
    if (mode == KILL) die();                                           \
    errno = error_number;                                              \
    return -1;

#define CALL(n) REAL(write)(descriptor, data, n)
ssize_t write(int descriptor, const void *data, size_t size) { WRITE(CALL) }
#undef CALL
#define CALL(n) REAL(pwrite)(descriptor, data, n, place)
ssize_t pwrite(int descriptor, const void *data, size_t size, off_t place) { WRITE(CALL) }
#undef CALL
#define CALL(n) REAL(pwrite64)(descriptor, data, n, place)
ssize_t pwrite64(int descriptor, const void *data, size_t size, off64_t place) { WRITE(CALL) }
#undef CALL
#define CALL(n) REAL(writev)(descriptor, parts, (int)(n))
ssize_t writev(int descriptor, const struct iovec *parts, int size) { WRITE(CALL) }
#undef CALL
#define CALL(n) REAL(sendfile)(descriptor, from, place, n)
ssize_t sendfile(int descriptor, int from, off_t *place, size_t size) { WRITE(CALL) }
#undef CALL
#define CALL(n) REAL(sendfile64)(descriptor, from, place, n)
ssize_t sendfile64(int descriptor, int from, off64_t *place, size_t size) { WRITE(CALL) }
#undef CALL
#define CALL(n) REAL(copy_file_range)(from, in, descriptor, out, n, flags)
ssize_t copy_file_range(
    int from, off64_t *in, int descriptor, off64_t *out, size_t size, unsigned flags
) { WRITE(CALL) }
#undef CALL

#define ON_DESCRIPTOR(of, call) return is_ours(descriptor) && fails(of) ? -1 : call
#define ON_PATH(of, folder, path, call) return is_below(folder, path) && fails(of) ? -1 : call

ssize_t read(int descriptor, void *data, size_t size) {
    ON_DESCRIPTOR(READ, REAL(read)(descriptor, data, size));
}
ssize_t pread(int descriptor, void *data, size_t size, off_t place) {
    ON_DESCRIPTOR(READ, REAL(pread)(descriptor, data, size, place));
}
ssize_t pread64(int descriptor, void *data, size_t size, off64_t place) {
    ON_DESCRIPTOR(READ, REAL(pread64)(descriptor, data, size, place));
}
/* A killed process loses nothing that it has written, so that a flush need not wait for the disk. */
int fsync(int descriptor) { return is_ours(descriptor) && fails(CHANGE) ? -1 : 0; }
int fdatasync(int descriptor) { return is_ours(descriptor) && fails(CHANGE) ? -1 : 0; }
int ftruncate(int descriptor, off_t size) { ON_DESCRIPTOR(CHANGE, REAL(ftruncate)(descriptor, size)); }
int ftruncate64(int descriptor, off64_t size) {
    ON_DESCRIPTOR(CHANGE, REAL(ftruncate64)(descriptor, size));
}
int truncate(const char *path, off_t size) { ON_PATH(CHANGE, AT_FDCWD, path, REAL(truncate)(path, size)); }
int truncate64(const char *path, off64_t size) {
    ON_PATH(CHANGE, AT_FDCWD, path, REAL(truncate64)(path, size));
}
int rename(const char *path, const char *to) { ON_PATH(CHANGE, AT_FDCWD, to, REAL(rename)(path, to)); }
int renameat(int folder, const char *path, int other, const char *to) {
    ON_PATH(CHANGE, other, to, REAL(renameat)(folder, path, other, to));
}
int renameat2(int folder, const char *path, int other, const char *to, unsigned flags) {
    ON_PATH(CHANGE, other, to, REAL(renameat2)(folder, path, other, to, flags));
}
int unlink(const char *path) { ON_PATH(CHANGE, AT_FDCWD, path, REAL(unlink)(path)); }
int unlinkat(int folder, const char *path, int flags) {
    ON_PATH(CHANGE, folder, path, REAL(unlinkat)(folder, path, flags));
}
int rmdir(const char *path) { ON_PATH(CHANGE, AT_FDCWD, path, REAL(rmdir)(path)); }
int mkdir(const char *path, mode_t bits) {
    ON_PATH(CHANGE | GROW, AT_FDCWD, path, REAL(mkdir)(path, bits));
}
int mkdirat(int folder, const char *path, mode_t bits) {
    ON_PATH(CHANGE | GROW, folder, path, REAL(mkdirat)(folder, path, bits));
}
int link(const char *from, const char *path) {
    ON_PATH(CHANGE | GROW, AT_FDCWD, path, REAL(link)(from, path));
}
int symlink(const char *from, const char *path) {
    ON_PATH(CHANGE | GROW, AT_FDCWD, path, REAL(symlink)(from, path));
}
int chmod(const char *path, mode_t bits) { ON_PATH(CHANGE, AT_FDCWD, path, REAL(chmod)(path, bits)); }

static long set_back(void) { return clock_step ? clock_step * ++clock_calls : 0; }

int clock_gettime(clockid_t which, struct timespec *now) {
    int result = REAL(clock_gettime)(which, now);
    if (which == CLOCK_REALTIME || which == CLOCK_REALTIME_COARSE) now->tv_sec -= set_back();
    return result;
}
int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    int result = REAL(gettimeofday)(now, zone);
    now->tv_sec -= set_back();
    return result;
}
time_t time(time_t *result) {
    time_t now = REAL(time)(NULL) - set_back();
    if (result) *result = now;
    return now;
}
