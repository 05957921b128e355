/* Hides instruction sets from a process: AVX-512, VNNI (AVX-VNNI too) and AMX, as on a processor with AVX2 alone.
 *
 * Loaded by scripts/older_processor through LD_PRELOAD. Linux can make the instruction CPUID fault (arch_prctl,
 * ARCH_SET_CPUID); the handler of that fault executes it and clears the bits. /proc/cpuinfo is replaced by a copy
 * without these flags, which the script writes to the file of OLDER_PROCESSOR_CPUINFO. Everything else runs natively:
 * whole test suites take their usual time, and libraries choose the kernels that such a processor gets.
 */
#define _GNU_SOURCE
#include <asm/prctl.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>

#ifndef ARCH_SET_CPUID
#define ARCH_SET_CPUID 0x1012
#endif

/* Leaf 7, subleaf 0: AVX512F, DQ, IFMA, PF, ER, CD, BW, VL; VBMI, VBMI2, VNNI, BITALG, VPOPCNTDQ; 4VNNIW, 4FMAPS,
 * VP2INTERSECT, AMX-BF16, AVX512-FP16, AMX-TILE, AMX-INT8. Its subleaf 1 (AVX-VNNI, AVX512-BF16, ...) is hidden whole. */
static const unsigned HIDDEN_EBX = 1u << 16 | 1u << 17 | 1u << 21 | 1u << 26 | 1u << 27 | 1u << 28 | 1u << 30 | 1u << 31;
static const unsigned HIDDEN_ECX = 1u << 1 | 1u << 6 | 1u << 11 | 1u << 12 | 1u << 14;
static const unsigned HIDDEN_EDX = 1u << 2 | 1u << 3 | 1u << 8 | 1u << 22 | 1u << 23 | 1u << 24 | 1u << 25;

typedef int sigaction_function(int, const struct sigaction *, struct sigaction *);
static struct sigaction next_action; /* of the process itself, such as Python's faulthandler */

static sigaction_function *real_sigaction(void)
{
    return (sigaction_function *)dlsym(RTLD_NEXT, "sigaction");
}

static long allow_cpuid(int allowed) { return syscall(SYS_arch_prctl, ARCH_SET_CPUID, allowed); }

static void emulate_cpuid(greg_t *registers)
{
    unsigned leaf = registers[REG_RAX], subleaf = registers[REG_RCX];
    unsigned eax = leaf, ebx, ecx = subleaf, edx;
    allow_cpuid(1);
    __asm__ volatile("cpuid" : "+a"(eax), "=b"(ebx), "+c"(ecx), "=d"(edx));
    allow_cpuid(0);
    if (leaf == 7 && subleaf == 0) {
        ebx &= ~HIDDEN_EBX;
        ecx &= ~HIDDEN_ECX;
        edx &= ~HIDDEN_EDX;
    } else if (leaf == 7) {
        eax = ebx = ecx = edx = 0;
    }
    registers[REG_RAX] = eax;
    registers[REG_RBX] = ebx;
    registers[REG_RCX] = ecx;
    registers[REG_RDX] = edx;
    registers[REG_RIP] += 2;
}

static void on_fault(int number, siginfo_t *info, void *context)
{
    greg_t *registers = ((ucontext_t *)context)->uc_mcontext.gregs;
    const unsigned char *instruction = (const unsigned char *)registers[REG_RIP];
    /* a protection fault of an instruction has no address */
    if (info->si_code == SI_KERNEL && instruction[0] == 0x0f && instruction[1] == 0xa2) {
        emulate_cpuid(registers);
        return;
    }
    if (next_action.sa_flags & SA_SIGINFO && next_action.sa_sigaction) {
        next_action.sa_sigaction(number, info, context);
    } else if (next_action.sa_handler != SIG_DFL && next_action.sa_handler != SIG_IGN) {
        next_action.sa_handler(number);
    } else {
        struct sigaction plain;
        memset(&plain, 0, sizeof plain); /* SIG_DFL: the instruction faults again */
        real_sigaction()(SIGSEGV, &plain, NULL);
    }
}

static void install(void)
{
    struct sigaction action;
    memset(&action, 0, sizeof action);
    action.sa_sigaction = on_fault;
    action.sa_flags = SA_SIGINFO | SA_NODEFER;
    real_sigaction()(SIGSEGV, &action, NULL);
}

int sigaction(int number, const struct sigaction *action, struct sigaction *previous)
{
    if (number != SIGSEGV) {
        return real_sigaction()(number, action, previous);
    }
    if (previous) {
        *previous = next_action;
    }
    if (action) {
        next_action = *action;
    }
    return 0;
}

/* The C library's own signal() does not call the function above: compilers use it. */
sighandler_t signal(int number, sighandler_t handler)
{
    struct sigaction action, previous;
    memset(&action, 0, sizeof action);
    action.sa_handler = handler;
    action.sa_flags = SA_RESTART;
    return sigaction(number, &action, &previous) ? SIG_ERR : previous.sa_handler;
}

static const char *shown_path(const char *path)
{
    const char *copy = getenv("OLDER_PROCESSOR_CPUINFO");
    return copy && path && strcmp(path, "/proc/cpuinfo") == 0 ? copy : path;
}

static int open_by(const char *name, const char *path, int flags, va_list arguments)
{
    mode_t mode = flags & (O_CREAT | __O_TMPFILE) ? va_arg(arguments, mode_t) : 0;
    int (*real)(const char *, int, ...) = (int (*)(const char *, int, ...))dlsym(RTLD_NEXT, name);
    return real(shown_path(path), flags, mode);
}

#define OPEN(name)                                      \
    int name(const char *path, int flags, ...)          \
    {                                                   \
        va_list arguments;                              \
        va_start(arguments, flags);                     \
        int file = open_by(#name, path, flags, arguments); \
        va_end(arguments);                              \
        return file;                                    \
    }

OPEN(open)
OPEN(open64)

__attribute__((constructor)) static void hide(void)
{
    install();
    if (allow_cpuid(0) != 0) {
        fprintf(stderr, "older_processor: this processor or kernel cannot make CPUID fault; use another machine\n");
        exit(2);
    }
}
