/* Counts the calls of a process that change files below a folder, and fails, halves or ends with the n-th (LD_PRELOAD).
 *
 * Calls are those of the C library, and renameat, which some programs make without it: that one the system hands back
 * (seccomp), and it is made as renameat2.
 *
 * TORTURE_FOLDER  absolute path; calls on other paths pass.
 * TORTURE_LOG     file that gets a line "<n> <call> <path>" per call, before it is made.
 * TORTURE_AT      n, from 1; 0: none.
 * TORTURE_ACTION  kill: SIGKILL before the call; tear: after half of a write; slow: every call from n on takes 20 ms;
 *                 a number: the call returns this errno.
 * TORTURE_ONWARD  1: so do all later calls (of a full disk, ENOSPC: those that need space).
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <limits.h>
#include <signal.h>
#include <stddef.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <time.h>
#include <ucontext.h>
#include <unistd.h>

static char folder[PATH_MAX];
static size_t length;
static long at;
static int fails, kills, tears, slows, onward;
static int log_file = -1;
static atomic_long count;

static void take_renames(void);

__attribute__((constructor)) static void begin(void) {
    const char *below = getenv("TORTURE_FOLDER"), *number = getenv("TORTURE_AT"), *action = getenv("TORTURE_ACTION");
    const char *log = getenv("TORTURE_LOG"), *all = getenv("TORTURE_ONWARD");
    if (!below) return;
    snprintf(folder, sizeof folder, "%s", below);
    length = strlen(folder);
    at = number ? atol(number) : 0;
    if (action) {
        kills = !strcmp(action, "kill");
        tears = !strcmp(action, "tear");
        slows = !strcmp(action, "slow");
        fails = atoi(action);
    }
    onward = all && *all == '1';
    take_renames();
    if (log) log_file = (int)syscall(SYS_openat, AT_FDCWD, log, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
}

static int is_below(const char *path) {
    return length && !strncmp(path, folder, length) && (path[length] == '/' || path[length] == 0);
}

static int of_descriptor(int descriptor, char *path) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
    long size = syscall(SYS_readlinkat, AT_FDCWD, link, path, PATH_MAX - 1);
    if (size < 0) return 0;
    path[size] = 0;
    return 1;
}

static void resolve(int base, const char *name, char *path) {
    if (name[0] == '/') {
        snprintf(path, PATH_MAX, "%s", name);
        return;
    }
    char before[PATH_MAX] = "";
    if (base != AT_FDCWD) of_descriptor(base, before);
    else if (!getcwd(before, sizeof before)) before[0] = 0;
    if ((size_t)snprintf(path, PATH_MAX, "%s/%s", before, name) >= PATH_MAX) path[0] = 0;
}

static void end_here(void) {
    syscall(SYS_kill, getpid(), SIGKILL);
    for (;;) pause();
}

/* Count a call. Returns -1 where a write is to be cut in half, the errno to fail with, or 0. */
static int meet(const char *call, const char *path, int needs_space, int is_write) {
    if (!is_below(path)) return 0;
    int before = errno;
    long number = atomic_fetch_add(&count, 1) + 1;
    if (log_file >= 0) {
        char line[PATH_MAX + 64];
        int size = snprintf(line, sizeof line, "%ld %s %s\n", number, call, path);
        syscall(SYS_write, log_file, line, (size_t)size);
    }
    errno = before;
    if (!at || number < at) return 0;
    if (slows) {
        struct timespec moment = {0, 20000000};
        nanosleep(&moment, NULL);
        errno = before;
        return 0;
    }
    if (number > at && !onward) return 0;
    if (kills || (tears && !is_write)) end_here();
    if (tears) return -1;
    return fails == ENOSPC && onward && !needs_space ? 0 : fails;
}

static int meet_at(const char *call, int base, const char *name, int needs_space) {
    char path[PATH_MAX];
    resolve(base, name, path);
    return meet(call, path, needs_space, 0);
}

static int meet_on(const char *call, int descriptor, int needs_space, int is_write) {
    char path[PATH_MAX];
    return length && of_descriptor(descriptor, path) ? meet(call, path, needs_space, is_write) : 0;
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
#define FAIL_WITH(expression)      \
    do {                           \
        int failure = expression;  \
        if (failure > 0) {         \
            errno = failure;       \
            return -1;             \
        }                          \
    } while (0)
#define CHANGES(flags) ((flags) & (O_CREAT | O_WRONLY | O_RDWR | O_TRUNC))
#define MODE(last)                                       \
    mode_t mode = 0;                                     \
    if (flags & (O_CREAT | O_TMPFILE)) {                 \
        va_list rest;                                    \
        va_start(rest, last);                            \
        mode = (mode_t)va_arg(rest, int);                \
        va_end(rest);                                    \
    }

#define OPEN(name)                                                                        \
    int name(const char *path, int flags, ...) {                                          \
        MODE(flags)                                                                       \
        if (CHANGES(flags)) FAIL_WITH(meet_at("open", AT_FDCWD, path, flags & O_CREAT));  \
        return REAL(name)(path, flags, mode);                                             \
    }
#define OPENAT(name)                                                                  \
    int name(int base, const char *path, int flags, ...) {                            \
        MODE(flags)                                                                   \
        if (CHANGES(flags)) FAIL_WITH(meet_at("open", base, path, flags & O_CREAT));  \
        return REAL(name)(base, path, flags, mode);                                   \
    }
OPEN(open)
OPEN(open64)
OPENAT(openat)
OPENAT(openat64)

#define WRITE(name, parameters, given, shorter)                                      \
    ssize_t name parameters {                                                        \
        int answer = meet_on("write", descriptor, 1, 1);                             \
        if (answer < 0) {                                                            \
            REAL(name) shorter;                                                      \
            end_here();                                                              \
        }                                                                            \
        FAIL_WITH(answer);                                                           \
        return REAL(name) given;                                                     \
    }
WRITE(write, (int descriptor, const void *data, size_t size), (descriptor, data, size), (descriptor, data, size / 2))
WRITE(pwrite, (int descriptor, const void *data, size_t size, off_t place), (descriptor, data, size, place),
      (descriptor, data, size / 2, place))
WRITE(pwrite64, (int descriptor, const void *data, size_t size, off64_t place), (descriptor, data, size, place),
      (descriptor, data, size / 2, place))
WRITE(writev, (int descriptor, const struct iovec *parts, int number), (descriptor, parts, number),
      (descriptor, parts, number / 2))

#define ON(call, name, needs_space, parameters, given)                \
    int name parameters {                                             \
        FAIL_WITH(meet_on(call, descriptor, needs_space, 0));         \
        return REAL(name) given;                                      \
    }
ON("fsync", fsync, 0, (int descriptor), (descriptor))
ON("fsync", fdatasync, 0, (int descriptor), (descriptor))
ON("truncate", ftruncate, 1, (int descriptor, off_t size), (descriptor, size))
ON("truncate", ftruncate64, 1, (int descriptor, off64_t size), (descriptor, size))
ON("fallocate", fallocate, 1, (int descriptor, int mode, off_t place, off_t size), (descriptor, mode, place, size))

#define AT(call, name, base, path, needs_space, parameters, given)   \
    int name parameters {                                            \
        FAIL_WITH(meet_at(call, base, path, needs_space));           \
        return REAL(name) given;                                     \
    }
AT("rename", rename, AT_FDCWD, before, 0, (const char *before, const char *after), (before, after))
AT("rename", renameat2, first, before, 0,
   (int first, const char *before, int second, const char *after, unsigned int flags),
   (first, before, second, after, flags))
AT("link", link, AT_FDCWD, after, 1, (const char *before, const char *after), (before, after))
AT("unlink", unlink, AT_FDCWD, path, 0, (const char *path), (path))
AT("unlink", unlinkat, base, path, 0, (int base, const char *path, int flags), (base, path, flags))
AT("rmdir", rmdir, AT_FDCWD, path, 0, (const char *path), (path))
AT("mkdir", mkdir, AT_FDCWD, path, 1, (const char *path, mode_t mode), (path, mode))
AT("mkdir", mkdirat, base, path, 1, (int base, const char *path, mode_t mode), (base, path, mode))

/* The number of renameat, and what its caller has given and is to get, on the processors that have it. */
#if defined(__x86_64__)
#define ARCHITECTURE AUDIT_ARCH_X86_64
#define GIVEN(n) ((n) == 0 ? REG_RDI : (n) == 1 ? REG_RSI : (n) == 2 ? REG_RDX : REG_R10)
#define REGISTER(context, n) ((context)->uc_mcontext.gregs[GIVEN(n)])
#define RESULT(context) ((context)->uc_mcontext.gregs[REG_RAX])
#elif defined(__aarch64__)
#define ARCHITECTURE AUDIT_ARCH_AARCH64
#define REGISTER(context, n) ((context)->uc_mcontext.regs[n])
#define RESULT(context) ((context)->uc_mcontext.regs[0])
#endif

#ifdef ARCHITECTURE
static void rename_instead(int number, siginfo_t *info, void *given) {
    (void)number, (void)info;
    ucontext_t *context = given;
    const char *before = (const char *)REGISTER(context, 1);
    int first = (int)REGISTER(context, 0), failure = meet_at("rename", first, before, 0), earlier = errno;
    if (failure > 0) {
        RESULT(context) = -failure;
        return;
    }
    long done = syscall(SYS_renameat2, first, before, (int)REGISTER(context, 2), (const char *)REGISTER(context, 3), 0);
    RESULT(context) = done < 0 ? -errno : done;
    errno = earlier;
}

static void take_renames(void) {
    struct sock_filter rules[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, arch)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, ARCHITECTURE, 0, 3),
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_renameat, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_TRAP),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    struct sock_fprog program = {sizeof rules / sizeof *rules, rules};
    struct sigaction action = {.sa_sigaction = rename_instead, .sa_flags = SA_SIGINFO};
    sigaction(SIGSYS, &action, NULL);
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) || prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program)) abort();
}
#else
#error "calls.c: got a processor that it does not know; expected x86-64 or aarch64. Add its registers."
#endif
