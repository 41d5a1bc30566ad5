/* Start a program where it sees neither the fences nor any process but its own, with few privileges or none: what
 * the step script does with unshare, mount and setpriv, in one program instead of six.
 *
 *     isolate WAY UID GID TASK LIMIT GRACE COUNT DIR... PROGRAM ARG...
 *
 * WAY     full: new mount and PID namespaces, for a root that may make them.
 *         root-userns: the same in a user namespace in which UID 0 is mapped, for a root that may not.
 *         userns: the same in a user namespace in which UID is mapped to itself.
 * LIMIT   how long the command may take, in hundredths of a second, from what the record says of its start; 0: for ever. Then
 *         limit.TASK is made in the fence, everything is sent TERM, and after GRACE hundredths KILL.
 * DIR...  COUNT directories to cover with an empty file system; those that do not exist are passed over.
 *
 * Descriptors: 8 the record, 9 the fence directory, as in the step script.
 * Exit status: the program's, 128 + n when signal n ended it; 94 when it was not started.
 *
 * It is free of any C library: it has to run in every image, and starting it must cost less than starting a shell.
 */

#include <asm/unistd.h>
#include <linux/capability.h>
#include <linux/fcntl.h>
#include <linux/prctl.h>
#include <linux/sched.h>
#include <linux/signal.h>
#include <linux/mount.h>
#include <linux/time.h>
#include <linux/time_types.h>
#include <linux/wait.h>

enum { NOT_STARTED = 94, RECORD = 8, FENCE = 9, WORD = 64 };

/* ---- the kernel --------------------------------------------------------------------------------------------- */

#if defined(__x86_64__)
__asm__(".globl _start\n_start:\n\txor %ebp, %ebp\n\tmov %rsp, %rdi\n\tand $-16, %rsp\n\tcall begin\n");

static long call(long number, long a, long b, long c, long d, long e)
{
	long result;
	register long r10 __asm__("r10") = d;
	register long r8 __asm__("r8") = e;
	__asm__ volatile("syscall"
			 : "=a"(result)
			 : "a"(number), "D"(a), "S"(b), "d"(c), "r"(r10), "r"(r8)
			 : "rcx", "r11", "memory");
	return result;
}
#elif defined(__aarch64__)
__asm__(".globl _start\n_start:\n\tmov x29, #0\n\tmov x30, #0\n\tmov x0, sp\n\tbl begin\n");

static long call(long number, long a, long b, long c, long d, long e)
{
	register long x8 __asm__("x8") = number;
	register long x0 __asm__("x0") = a;
	register long x1 __asm__("x1") = b;
	register long x2 __asm__("x2") = c;
	register long x3 __asm__("x3") = d;
	register long x4 __asm__("x4") = e;
	__asm__ volatile("svc #0" : "+r"(x0) : "r"(x8), "r"(x1), "r"(x2), "r"(x3), "r"(x4) : "memory");
	return x0;
}
#else
#error "the step script does without this program here"
#endif

static _Noreturn void leave(int status)
{
	for (;;)
		call(__NR_exit_group, status, 0, 0, 0, 0);
}

static void must(long result)
{
	if (result < 0)
		leave(NOT_STARTED);
}

static void mount_at(const char *path, const char *type, unsigned long flags, const char *data)
{
	must(call(__NR_mount, (long)"none", (long)path, (long)type, (long)flags, (long)data));
}

/* ---- text --------------------------------------------------------------------------------------------------- */

static int is(const char *word, const char *other)
{
	while (*word && *word == *other)
		word++, other++;
	return *word == *other;
}

static long number_of(const char *word)
{
	long number = 0;
	if (!*word)
		leave(NOT_STARTED);
	for (; *word; word++) {
		if (*word < '0' || *word > '9' || number > 0xffffffffffL)
			leave(NOT_STARTED);
		number = number * 10 + (*word - '0');
	}
	return number;
}

static long now(void) /* in hundredths of a second since the machine started, as in /proc/uptime */
{
	struct __kernel_timespec time = {0, 0};
	call(__NR_clock_gettime, CLOCK_BOOTTIME, (long)&time, 0, 0, 0);
	return time.tv_sec * 100 + time.tv_nsec / 10000000;
}

static void write_file(const char *path, const char *text, long size)
{
	long file = call(__NR_openat, AT_FDCWD, (long)path, O_WRONLY | O_CLOEXEC, 0, 0);
	must(file);
	if (call(__NR_write, file, (long)text, size, 0, 0) != size)
		leave(NOT_STARTED);
	must(call(__NR_close, file, 0, 0, 0, 0));
}

/* Map an id to itself, and no other. */
static void map_id(const char *path, const char *id)
{
	char line[64];
	long size = 0;
	for (int twice = 0; twice < 2; twice++) {
		for (const char *digit = id; *digit && size < 60; digit++)
			line[size++] = *digit;
		line[size++] = ' ';
	}
	line[size++] = '1';
	write_file(path, line, size);
}

/* ---- what is done ------------------------------------------------------------------------------------------- */

static void cover(char **directories, long count)
{
	for (long n = 0; n < count; n++) {
		long found = call(__NR_openat, AT_FDCWD, (long)directories[n], O_PATH | O_DIRECTORY | O_CLOEXEC, 0, 0);
		if (found == -2 || found == -20 || found == -36 || found == -40)
			continue; /* ENOENT, ENOTDIR, ENAMETOOLONG, ELOOP: there is nothing by that name */
		must(found);
		must(call(__NR_close, found, 0, 0, 0, 0));
		mount_at(directories[n], "tmpfs", MS_RDONLY | MS_NOSUID | MS_NODEV, "size=4k,mode=555");
	}
}

/* Root keeps what package managers and patches need; not what mounts, unmounts, traces or makes devices. Nobody else
 * keeps anything: in a user namespace of one's own, one begins with all of it. */
static void drop_privileges(int is_root)
{
	static const unsigned kept = 1u << CAP_CHOWN | 1u << CAP_DAC_OVERRIDE | 1u << CAP_FOWNER | 1u << CAP_FSETID |
				     1u << CAP_KILL | 1u << CAP_SETGID | 1u << CAP_SETUID | 1u << CAP_NET_BIND_SERVICE;
	struct __user_cap_header_struct header = {_LINUX_CAPABILITY_VERSION_3, 0};
	struct __user_cap_data_struct sets[2];

	must(call(__NR_prctl, PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0));
	for (unsigned capability = 0; capability < 64; capability++) {
		if (is_root && capability < 32 && (kept >> capability & 1))
			continue;
		long dropped = call(__NR_prctl, PR_CAPBSET_DROP, capability, 0, 0, 0);
		if (dropped == -22 && capability > CAP_AUDIT_READ) /* EINVAL: the kernel has no more of them */
			break;
		must(dropped);
	}
	must(call(__NR_capget, (long)&header, (long)sets, 0, 0, 0));
	for (int half = 0; half < 2; half++) {
		unsigned mask = is_root && half == 0 ? kept : 0;
		sets[half].effective &= mask;
		sets[half].permitted &= mask;
		sets[half].inheritable = 0;
	}
	must(call(__NR_capset, (long)&header, (long)sets, 0, 0, 0));
	must(call(__NR_prctl, PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0));
}

/* ---- the command's end, and its time limit -------------------------------------------------------------------- */

static long status_of(int status)
{
	return status & 0x7f ? 128 + (status & 0x7f) : status >> 8 & 0xff;
}

/* Wait for a child; give up at a moment, in hundredths of a second as `now` counts them, 0 for never. SIGCHLD is blocked. */
static long wait_until(long child, long moment)
{
	for (;;) {
		int status = 0;
		long found = call(__NR_wait4, child, (long)&status, moment ? WNOHANG : 0, 0, 0);
		if (found == child)
			return status_of(status);
		if (found < 0 && found != -4) /* EINTR */
			leave(NOT_STARTED);
		if (!moment || found < 0)
			continue;
		long left = moment - now();
		if (left <= 0)
			return -1;
		unsigned long awaited = 1ul << (17 - 1); /* SIGCHLD */
		struct __kernel_timespec time = {left / 100, left % 100 * 10000000};
		call(__NR_rt_sigtimedwait, (long)&awaited, 0, (long)&time, sizeof awaited, 0);
	}
}

/* Return when the command started, as its record says: between two moments, or the later one. */
static long started_between(long earliest, long latest)
{
	char text[WORD];
	long record = call(__NR_openat, AT_FDCWD, (long)"/proc/self/fd/8", O_RDONLY | O_CLOEXEC, 0, 0);
	long size = record < 0 ? 0 : call(__NR_read, record, (long)text, sizeof text - 1, 0, 0);
	long blanks = 0, moment = 0;
	if (record >= 0)
		call(__NR_close, record, 0, 0, 0, 0);
	/* started WAY MOMENT */
	for (long n = 0; n < size && text[n] != '\n'; n++) {
		if (text[n] == ' ')
			blanks++;
		else if (blanks == 2 && text[n] >= '0' && text[n] <= '9' && moment < latest)
			moment = moment * 10 + (text[n] - '0');
	}
	return moment >= earliest && moment <= latest ? moment : latest;
}

/* Send a signal to everything in the namespace of its first process, but to that. Return whether that was possible. */
static int signal_all(long first, unsigned long namespaces, int number)
{
	long inside = call(__NR_pidfd_open, first, 0, 0, 0, 0), child, status;
	if (inside < 0)
		return 0;
	child = call(__NR_clone, 17, 0, 0, 0, 0);
	if (child == 0) {
		if (call(__NR_setns, inside, (long)namespaces, 0, 0, 0) < 0)
			leave(1);
		child = call(__NR_clone, 17, 0, 0, 0, 0);
		if (child == 0)
			leave(call(__NR_kill, -1, number, 0, 0, 0) < 0);
		leave(child < 0 || wait_until(child, 0) != 0);
	}
	status = child < 0 ? 1 : wait_until(child, 0);
	call(__NR_close, inside, 0, 0, 0, 0);
	return status == 0;
}

static void join(char *text, const char *kind, const char *task)
{
	char *end = text + WORD - 1;
	for (; *kind && text < end; kind++)
		*text++ = *kind;
	for (; *task && text < end; task++)
		*text++ = *task;
	*text = 0;
}

struct limit {
	const char *task;
	long limit, grace;
};

static long wait_for(long child, const struct limit *command, unsigned long namespaces)
{
	char name[WORD];
	long began = now(), moment = began + command->limit, status;
	if (!command->limit)
		return wait_until(child, 0);

	status = wait_until(child, moment);
	join(name, "status.", command->task);
	while (status < 0 && call(__NR_faccessat, FENCE, (long)name, 0, 0, 0) < 0) { /* its time has not begun */
		moment = now() + command->limit;
		status = wait_until(child, now() + 1);
	}
	/* The command's parent has the record open, so the command can rewrite it: it is read once, and no later than now. */
	if (status < 0)
		status = wait_until(child, started_between(began, now()) + command->limit);
	if (status >= 0)
		return status;

	join(name, "limit.", command->task);
	long file = call(__NR_openat, FENCE, (long)name, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600, 0);
	if (file < 0 || call(__NR_write, file, (long)"limit\n", 6, 0, 0) != 6)
		leave(NOT_STARTED);
	call(__NR_close, file, 0, 0, 0, 0);
	if (signal_all(child, namespaces, 15))
		status = wait_until(child, now() + command->grace);
	if (status < 0) {
		call(__NR_kill, child, 9, 0, 0, 0); /* and with its first process the namespace */
		status = wait_until(child, 0);
	}
	return status;
}

static _Noreturn void run(int argc, char **argv, char **environment)
{
	/* The end of the command is the command's own business: whoever ends this one would leave it without a parent. */
	unsigned long held = 1ul << (2 - 1) | 1ul << (15 - 1) | 1ul << (17 - 1), before = 0; /* SIGINT, SIGTERM, SIGCHLD */
	unsigned long flags = CLONE_NEWNS | CLONE_NEWPID | 17;		     /* SIGCHLD */
	const char *way;
	int is_root;
	long count, child;

	if (argc < 9)
		leave(NOT_STARTED);
	way = argv[1];
	is_root = number_of(argv[2]) == 0;
	number_of(argv[3]);
	number_of(argv[4]);
	struct limit limit = {argv[4], number_of(argv[5]), number_of(argv[6])};
	count = number_of(argv[7]);
	if (count > argc - 9)
		leave(NOT_STARTED);
	if (is(way, "userns") || is(way, "root-userns"))
		flags |= CLONE_NEWUSER;
	else if (!is(way, "full"))
		leave(NOT_STARTED);

	must(call(__NR_rt_sigprocmask, SIG_BLOCK, (long)&held, (long)&before, sizeof held, 0));
	child = call(__NR_clone, (long)flags, 0, 0, 0, 0);
	must(child);
	if (child != 0)
		leave((int)wait_for(child, &limit, flags & (CLONE_NEWUSER | CLONE_NEWPID)));

	/* Where this program is killed all the same, nothing of the command outlives it. */
	must(call(__NR_prctl, PR_SET_PDEATHSIG, 9, 0, 0, 0));
	/* A process group reaches across namespaces: a command that kills its own would kill the script. */
	must(call(__NR_setsid, 0, 0, 0, 0, 0));
	if (flags & CLONE_NEWUSER) {
		write_file("/proc/self/setgroups", "deny", 4);
		map_id("/proc/self/uid_map", argv[2]);
		map_id("/proc/self/gid_map", argv[3]);
	}
	mount_at("/", 0, MS_REC | MS_PRIVATE, 0);
	mount_at("/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, 0);
	cover(argv + 8, count);
	drop_privileges(is_root);
	must(call(__NR_rt_sigprocmask, SIG_SETMASK, (long)&before, 0, sizeof before, 0));
	call(__NR_execve, (long)argv[8 + count], (long)(argv + 8 + count), (long)environment, 0, 0);
	leave(NOT_STARTED);
}

_Noreturn void begin(long *stack);
_Noreturn void begin(long *stack)
{
	int argc = (int)stack[0];
	char **argv = (char **)(stack + 1);
	run(argc, argv, argv + argc + 1);
}
