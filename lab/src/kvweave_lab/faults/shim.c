/* Stands between a process and libc: records what changes files under one folder, and lets chosen calls fail or kill.

   Preloaded (LD_PRELOAD); idle until `faults_begin`. Its state is shared with forks. Renames are trapped (seccomp), since libraries
   in Rust call the kernel directly for them. Not seen: writes through mmap and stdio, and other direct system calls. `crashes.py`
   compares the replay with the folder, so that none goes unnoticed. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <sys/prctl.h>
#include <ucontext.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

enum { CREATE = 1, WRITE, TRUNCATE, SYNC, SYNC_FOLDER, RENAME, LINK, UNLINK, MKDIR, RMDIR, MARK, READ, OPEN };

struct record { uint64_t inode; int64_t at; uint32_t kind, path, other, data; };

static struct control {
    pthread_mutex_t lock;
    char root[PATH_MAX], boot[PATH_MAX];
    size_t root_length;
    int log, error, kills;
    uint32_t kinds;             /* bits of the kinds that fail */
    long calls, first, last;    /* of these kinds: how many there were, and which of them fail */
    int64_t clock_ns;
} *shared;

#define REAL(type, name, ...) \
    static type (*real)(__VA_ARGS__); \
    if (!real) real = (type (*)(__VA_ARGS__))dlsym(RTLD_NEXT, name)

/* Paths */

static int place_of(int fd, char *path) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = syscall(SYS_readlinkat, AT_FDCWD, link, path, PATH_MAX - 1);
    if (length < 0) return 0;
    path[length] = 0;
    return 1;
}

static int ours(const char *path) {
    return shared && shared->log >= 0 && !strncmp(path, shared->root, shared->root_length)
        && (path[shared->root_length] == '/' || !path[shared->root_length]);
}

static int ours_fd(int fd, char *path) { return shared && shared->log >= 0 && place_of(fd, path) && ours(path); }

static int ours_at(int folder, const char *name, char *path) {
    if (!shared || shared->log < 0 || !name) return 0;
    if (name[0] == '/') return snprintf(path, PATH_MAX, "%s", name) < PATH_MAX && ours(path);
    if (folder == AT_FDCWD) {
        if (syscall(SYS_getcwd, path, PATH_MAX) < 0) return 0;
    } else if (!place_of(folder, path)) return 0;
    size_t length = strlen(path);
    return snprintf(path + length, PATH_MAX - length, "/%s", name) < (int)(PATH_MAX - length) && ours(path);
}

/* Recording and failing; the lock is held from the decision until the record is written, so that records are in order */

static void lock(void) {
    if (pthread_mutex_lock(&shared->lock) == EOWNERDEAD) pthread_mutex_consistent(&shared->lock);
}

static void unlock(void) { pthread_mutex_unlock(&shared->lock); }

static void all_out(const void *from, size_t length) {
    while (length) {
        ssize_t done = syscall(SYS_write, shared->log, from, length);
        if (done <= 0) _exit(97);
        from = (const char *)from + done, length -= done;
    }
}

static void record(uint32_t kind, uint64_t inode, int64_t at, const char *path, const char *other,
                   const struct iovec *data, int parts, size_t length) {
    path = path ? path : "", other = other ? other : "";
    struct record head = { inode, at, kind, strlen(path), strlen(other), length };
    all_out(&head, sizeof head);
    all_out(path, head.path);
    all_out(other, head.other);
    for (int part = 0; part < parts && length; part++) {
        size_t some = data[part].iov_len < length ? data[part].iov_len : length;
        all_out(data[part].iov_base, some);
        length -= some;
    }
}

/* Return how a call fails: 0 not at all, 1 with `errno`, 2 as the first of those that fail: a write is cut short. */
static int fails(uint32_t kind) {
    if (!(shared->kinds & (1u << kind))) return 0;
    long call = shared->calls++;
    if (call < shared->first || call > shared->last) return 0;
    if (shared->kills) syscall(SYS_kill, syscall(SYS_getpid), SIGKILL);
    errno = shared->error;
    return call == shared->first ? 2 : 1;
}

static uint64_t inode_of(int fd) {
    struct stat found;
    return fstat(fd, &found) ? 0 : found.st_ino;
}

/* Writes */

typedef ssize_t (*writing)(int, const struct iovec *, int, off_t);

static ssize_t written(int fd, const struct iovec *data, int parts, off_t at, writing call) {
    char path[PATH_MAX];
    if (!ours_fd(fd, path)) return call(fd, data, parts, at);
    size_t length = 0;
    for (int part = 0; part < parts; part++) length += data[part].iov_len;
    lock();
    int failure = fails(WRITE), code = errno;
    ssize_t done = -1;
    if (!failure) done = call(fd, data, parts, at);
    else if (failure == 2 && shared->error == ENOSPC && data[0].iov_len > 1) {
        struct iovec half = { data[0].iov_base, data[0].iov_len / 2 };
        done = call(fd, &half, 1, at);
    } else errno = code;
    code = errno;
    if (done > 0) {
        off_t start = at >= 0 ? at : (off_t)syscall(SYS_lseek, fd, 0, SEEK_CUR) - done;
        record(WRITE, inode_of(fd), start, path, 0, data, parts, done);
    }
    unlock();
    errno = code;
    return done;
}

static ssize_t in_order(int fd, const struct iovec *data, int parts, off_t at) {
    (void)at;
    return syscall(SYS_writev, fd, data, parts);
}

static ssize_t at_place(int fd, const struct iovec *data, int parts, off_t at) {
    return syscall(SYS_pwritev, fd, data, parts, (long)at, 0L);
}

ssize_t write(int fd, const void *data, size_t length) {
    struct iovec one = { (void *)data, length };
    char path[PATH_MAX];
    if (!ours_fd(fd, path)) { REAL(ssize_t, "write", int, const void *, size_t); return real(fd, data, length); }
    return written(fd, &one, 1, -1, in_order);
}

ssize_t pwrite(int fd, const void *data, size_t length, off_t at) {
    struct iovec one = { (void *)data, length };
    return written(fd, &one, 1, at, at_place);
}
ssize_t pwrite64(int fd, const void *data, size_t length, off64_t at) { return pwrite(fd, data, length, at); }
ssize_t writev(int fd, const struct iovec *data, int parts) { return written(fd, data, parts, -1, in_order); }
ssize_t pwritev(int fd, const struct iovec *data, int parts, off_t at) { return written(fd, data, parts, at, at_place); }
ssize_t pwritev64(int fd, const struct iovec *data, int parts, off64_t at) { return pwritev(fd, data, parts, at); }
ssize_t pwritev2(int fd, const struct iovec *data, int parts, off_t at, int flags) {
    (void)flags;
    return written(fd, data, parts, at, at < 0 ? in_order : at_place);
}
ssize_t pwritev64v2(int fd, const struct iovec *data, int parts, off64_t at, int flags) {
    return pwritev2(fd, data, parts, at, flags);
}

ssize_t copy_file_range(int from, off64_t *from_at, int to, off64_t *to_at, size_t length, unsigned flags) {
    char path[PATH_MAX];
    if (ours_fd(to, path)) { errno = EXDEV; return -1; } /* callers then read and write */
    return syscall(SYS_copy_file_range, from, from_at, to, to_at, length, flags);
}

ssize_t sendfile(int to, int from, off_t *at, size_t length) {
    char path[PATH_MAX];
    if (ours_fd(to, path)) { errno = EINVAL; return -1; }
    return syscall(SYS_sendfile, to, from, at, length);
}
ssize_t sendfile64(int to, int from, off64_t *at, size_t length) { return sendfile(to, from, at, length); }

int ftruncate(int fd, off_t length) {
    char path[PATH_MAX];
    if (!ours_fd(fd, path)) return syscall(SYS_ftruncate, fd, length);
    lock();
    int done = fails(TRUNCATE) ? -1 : (int)syscall(SYS_ftruncate, fd, length), code = errno;
    if (!done) record(TRUNCATE, inode_of(fd), length, path, 0, 0, 0, 0);
    unlock();
    errno = code;
    return done;
}
int ftruncate64(int fd, off64_t length) { return ftruncate(fd, length); }

int fallocate(int fd, int mode, off_t at, off_t length) {
    char path[PATH_MAX];
    if (ours_fd(fd, path)) { errno = EOPNOTSUPP; return -1; }
    return syscall(SYS_fallocate, fd, mode, at, length);
}
int fallocate64(int fd, int mode, off64_t at, off64_t length) { return fallocate(fd, mode, at, length); }

static int synced(int fd, long call) {
    char path[PATH_MAX];
    if (!ours_fd(fd, path)) return syscall(call, fd);
    struct stat found;
    lock();
    int done = fails(SYNC) ? -1 : (int)syscall(call, fd), code = errno;
    if (!done && !fstat(fd, &found))
        record(S_ISDIR(found.st_mode) ? SYNC_FOLDER : SYNC, found.st_ino, 0, path, 0, 0, 0, 0);
    unlock();
    errno = code;
    return done;
}
int fsync(int fd) { return synced(fd, SYS_fsync); }
int fdatasync(int fd) { return synced(fd, SYS_fdatasync); }

/* Names */

enum { PASS = 0x6b7677 }; /* the sixth argument of a rename that is not trapped */

static int named(uint32_t kind, const char *path, const char *other, long call, long a, long b, long c, long d, long e) {
    lock();
    int done = fails(kind) ? -1 : (int)syscall(call, a, b, c, d, e, PASS), code = errno;
    if (!done) record(kind, 0, 0, path, other, 0, 0, 0);
    unlock();
    errno = code;
    return done;
}

static int moved(uint32_t kind, long call, int from, const char *name, int to, const char *new, long flags) {
    char path[PATH_MAX], other[PATH_MAX];
    int here = ours_at(from, name, path), there = ours_at(to, new, other);
    if (!here && !there) return syscall(call, from, name, to, new, flags, PASS);
    return named(kind, path, other, call, from, (long)name, to, (long)new, flags);
}

int rename(const char *from, const char *to) { return moved(RENAME, SYS_renameat2, AT_FDCWD, from, AT_FDCWD, to, 0); }
int renameat(int a, const char *from, int b, const char *to) { return moved(RENAME, SYS_renameat2, a, from, b, to, 0); }
int renameat2(int a, const char *from, int b, const char *to, unsigned flags) {
    return moved(RENAME, SYS_renameat2, a, from, b, to, flags);
}
int link(const char *from, const char *to) { return moved(LINK, SYS_linkat, AT_FDCWD, from, AT_FDCWD, to, 0); }
int linkat(int a, const char *from, int b, const char *to, int flags) {
    return moved(LINK, SYS_linkat, a, from, b, to, flags);
}

int unlinkat(int folder, const char *name, int flags) {
    char path[PATH_MAX];
    if (!ours_at(folder, name, path)) return syscall(SYS_unlinkat, folder, name, flags);
    return named(flags & AT_REMOVEDIR ? RMDIR : UNLINK, path, 0, SYS_unlinkat, folder, (long)name, flags, 0, 0);
}
int unlink(const char *name) { return unlinkat(AT_FDCWD, name, 0); }
int rmdir(const char *name) { return unlinkat(AT_FDCWD, name, AT_REMOVEDIR); }

int mkdirat(int folder, const char *name, mode_t mode) {
    char path[PATH_MAX];
    if (!ours_at(folder, name, path)) return syscall(SYS_mkdirat, folder, name, mode);
    return named(MKDIR, path, 0, SYS_mkdirat, folder, (long)name, mode, 0, 0);
}
int mkdir(const char *name, mode_t mode) { return mkdirat(AT_FDCWD, name, mode); }

static int opened(int folder, const char *name, int flags, mode_t mode) {
    char path[PATH_MAX];
    if (shared && *shared->boot && name && !strcmp(name, "/proc/sys/kernel/random/boot_id")) name = shared->boot;
    if (!ours_at(folder, name, path)) return syscall(SYS_openat, folder, name, flags, mode);
    lock();
    int new = (flags & O_CREAT) && syscall(SYS_faccessat, folder, name, F_OK) < 0;
    int done = fails(new ? CREATE : OPEN) ? -1 : (int)syscall(SYS_openat, folder, name, flags, mode), code = errno;
    if (done >= 0 && new) record(CREATE, inode_of(done), 0, path, 0, 0, 0, 0);
    else if (done >= 0 && (flags & O_TRUNC)) record(TRUNCATE, inode_of(done), 0, path, 0, 0, 0, 0);
    unlock();
    errno = code;
    return done;
}

#define OPENED(folder, name, flags) \
    mode_t mode = 0; \
    if ((flags) & (O_CREAT | __O_TMPFILE)) { va_list more; va_start(more, flags); mode = va_arg(more, mode_t); va_end(more); } \
    return opened(folder, name, (flags) | O_LARGEFILE, mode)

int open(const char *name, int flags, ...) { OPENED(AT_FDCWD, name, flags); }
int open64(const char *name, int flags, ...) { OPENED(AT_FDCWD, name, flags); }
int openat(int folder, const char *name, int flags, ...) { OPENED(folder, name, flags); }
int openat64(int folder, const char *name, int flags, ...) { OPENED(folder, name, flags); }
int creat(const char *name, mode_t mode) { return opened(AT_FDCWD, name, O_CREAT | O_WRONLY | O_TRUNC, mode); }

/* Reads, which only fail */

static int read_fails(int fd) {
    char path[PATH_MAX];
    if (!shared || !(shared->kinds & (1u << READ)) || !ours_fd(fd, path)) return 0;
    lock();
    int failure = fails(READ), code = errno;
    unlock();
    errno = code;
    return failure;
}

ssize_t read(int fd, void *to, size_t length) { return read_fails(fd) ? -1 : syscall(SYS_read, fd, to, length); }
ssize_t pread(int fd, void *to, size_t length, off_t at) {
    return read_fails(fd) ? -1 : syscall(SYS_pread64, fd, to, length, at);
}
ssize_t pread64(int fd, void *to, size_t length, off64_t at) { return pread(fd, to, length, at); }
ssize_t readv(int fd, const struct iovec *to, int parts) {
    return read_fails(fd) ? -1 : syscall(SYS_readv, fd, to, parts);
}
ssize_t preadv(int fd, const struct iovec *to, int parts, off_t at) {
    return read_fails(fd) ? -1 : syscall(SYS_preadv, fd, to, parts, (long)at, 0L);
}
ssize_t preadv64(int fd, const struct iovec *to, int parts, off64_t at) { return preadv(fd, to, parts, at); }

/* The clock of the day */

int clock_gettime(clockid_t clock, struct timespec *now) {
    int done = syscall(SYS_clock_gettime, clock, now);
    if (!done && clock == CLOCK_REALTIME && shared && shared->clock_ns) {
        int64_t ns = now->tv_sec * 1000000000LL + now->tv_nsec + shared->clock_ns;
        now->tv_sec = ns / 1000000000LL, now->tv_nsec = ns % 1000000000LL;
    }
    return done;
}
time_t time(time_t *to) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (to) *to = now.tv_sec;
    return now.tv_sec;
}
int gettimeofday(struct timeval *to, void *zone) {
    struct timespec now;
    (void)zone;
    clock_gettime(CLOCK_REALTIME, &now);
    to->tv_sec = now.tv_sec, to->tv_usec = now.tv_nsec / 1000;
    return 0;
}

/* Direct system calls */

static void trapped(int signal, siginfo_t *why, void *at) {
    greg_t *registers = ((ucontext_t *)at)->uc_mcontext.gregs;
    const char *b = (const char *)registers[REG_RSI], *d = (const char *)registers[REG_R10];
    int a = registers[REG_RDI], c = registers[REG_RDX], kept = errno, done;
    (void)signal;
    if (why->si_syscall == SYS_rename) done = rename((const char *)registers[REG_RDI], b);
    else done = renameat2(a, b, c, d, why->si_syscall == SYS_renameat2 ? registers[REG_R8] : 0);
    registers[REG_RAX] = done < 0 ? -errno : done;
    errno = kept;
}

__attribute__((constructor)) static void handle_traps(void) { /* in programs that are started too: filters outlive exec */
    struct sigaction action = { .sa_sigaction = trapped, .sa_flags = SA_SIGINFO | SA_NODEFER | SA_RESTART };
    sigaction(SIGSYS, &action, 0);
}

static int trap_renames(void) {
    struct sock_filter filter[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_rename, 2, 0),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_renameat, 1, 0),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_renameat2, 0, 2),
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, args[5])),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, PASS, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_TRAP),
    };
    struct sock_fprog program = { sizeof filter / sizeof *filter, filter };
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)) return -1;
    return syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_TSYNC, &program);
}

/* Called by Python */

int faults_begin(const char *root, const char *log) {
    void *place = mmap(0, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (place == MAP_FAILED) return -1;
    struct control *new = place;
    pthread_mutexattr_t kind;
    pthread_mutexattr_init(&kind);
    pthread_mutexattr_setpshared(&kind, PTHREAD_PROCESS_SHARED);
    pthread_mutexattr_setrobust(&kind, PTHREAD_MUTEX_ROBUST);
    pthread_mutex_init(&new->lock, &kind);
    snprintf(new->root, PATH_MAX, "%s", root);
    new->root_length = strlen(new->root);
    new->log = syscall(SYS_openat, AT_FDCWD, log, O_CREAT | O_WRONLY | O_APPEND | O_CLOEXEC, 0600);
    static int trapping;
    if (new->log < 0 || (!trapping && trap_renames())) return -1;
    trapping = 1;
    shared = new;
    return 0;
}

void faults_fail(uint32_t kinds, long first, long last, int error, int kills) {
    lock();
    shared->kinds = kinds, shared->first = first, shared->last = last, shared->calls = 0;
    shared->error = error, shared->kills = kills;
    unlock();
}

long faults_calls(void) { return shared->calls; }

void faults_clock(double seconds) { shared->clock_ns = (int64_t)(seconds * 1e9); }

void faults_boot(const char *path) { snprintf(shared->boot, PATH_MAX, "%s", path); }

void faults_mark(const char *text) {
    lock();
    record(MARK, 0, 0, text, 0, 0, 0, 0);
    unlock();
}

void faults_end(void) {
    if (!shared) return;
    syscall(SYS_close, shared->log);
    shared = 0; /* stays mapped: another thread may be inside a call */
}
