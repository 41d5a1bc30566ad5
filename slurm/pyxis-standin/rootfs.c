/* Root file systems: DATA_PATH/user-UID/pyxis_NAME, made as the job's user, as enroot would. */
#include "pyxis.h"

#include <ctype.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

enum { NAMES_MAX = 256 };

static void unblock_signals(void)
{
    sigset_t none;

    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
}

/* slurmstepd's signal mask, environment and descriptors are not for what we run. */
static void exec_into(int fd, char *const argv[])
{
    char *environment[] = {"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", NULL};
    int null = open("/dev/null", O_RDWR | O_CLOEXEC);

    unblock_signals();
    dup2(null, STDIN_FILENO);
    dup2(fd >= 0 ? fd : null, STDOUT_FILENO);
    dup2(fd >= 0 ? fd : null, STDERR_FILENO);
    close_range(3, ~0U, 0);
    execvpe(argv[0], argv, environment);
    dprintf(STDERR_FILENO, "[ERROR] Command not found: %s\n", argv[0]);
    _exit(127);
}

static int wait_status(pid_t pid)
{
    int status;

    while (waitpid(pid, &status, 0) < 0)
        if (errno != EINTR)
            return -1;
    return status;
}

/* Return the exit status, 128 + the signal, or -1. Output goes to fd, to nowhere if that is -1. */
static int run_into(int fd, char *const argv[])
{
    pid_t pid = fork();
    int status;

    if (pid == 0)
        exec_into(fd, argv);
    if (pid < 0 || (status = wait_status(pid)) < 0)
        return -1;
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

static int run_and_wait(char *const argv[])
{
    return run_into(log_fd(), argv);
}

/* Wait for one of our stand-ins for an enroot command, and say how it failed. */
static int child_wait(pid_t pid)
{
    int status = pid < 0 ? -1 : wait_status(pid);

    if (status < 0)
        slurm_error("pyxis: could not wait for child %d: %s", pid, strerror(errno));
    else if (WIFSIGNALED(status))
        slurm_error("pyxis: child %d terminated with signal %d", pid, WTERMSIG(status));
    else if (WEXITSTATUS(status) != 0)
        slurm_error("pyxis: child %d failed with error code: %d", pid, WEXITSTATUS(status));
    return status == 0 ? 0 : -1;
}

/* The lowest process whose root directory is this rootfs, 0 if there is none. */
static pid_t running_in(const char *rootfs)
{
    struct stat wanted, root;
    struct dirent *entry;
    pid_t found = 0;
    DIR *proc;

    if (stat(rootfs, &wanted) < 0 || (proc = opendir("/proc")) == NULL)
        return 0;
    while ((entry = readdir(proc)) != NULL) {
        pid_t pid = isdigit((unsigned char)*entry->d_name) ? atoi(entry->d_name) : 0;
        char path[64];

        if (pid == 0 || (found != 0 && found < pid))
            continue;
        snprintf(path, sizeof(path), "/proc/%d/root", pid);
        if (stat(path, &root) == 0 && root.st_dev == wanted.st_dev && root.st_ino == wanted.st_ino)
            found = pid;
    }
    closedir(proc);
    return found;
}

static int list_failed(pid_t pid)
{
    slurm_error("pyxis: child %d failed with error code: 1", pid);
    slurm_error("pyxis: couldn't execute enroot command");
    log_show();
    slurm_error("pyxis: couldn't get list of existing container filesystems");
    return -1;
}

static int make_user_directory(struct container *container)
{
    char directory[PATH_MAX - NAME_MAX - 2];

    snprintf(directory, sizeof(directory), "%s/user-%u", config.data_path, container->uid);
    snprintf(container->rootfs, sizeof(container->rootfs), "%s/%s", directory, container->name);
    if (mkdir(directory, 0700) == 0 || errno == EEXIST)
        return 0;
    log_line("mkdir: cannot create directory \xe2\x80\x98%s\xe2\x80\x99: %s", directory, strerror(errno));
    return -1;
}

/* As the job's user: fill in the path, whether it exists and which process runs in it. */
int rootfs_find(struct container *container, pid_t *running)
{
    struct stat st;
    double seconds;

    log_reset();
    if (make_user_directory(container) < 0)
        return list_failed(getpid());
    if (fault_take("list_race", container, &seconds)) {
        fault_sleep(seconds);
        return list_failed(getpid());
    }
    container->exists = strchr(container->name, '/') == NULL && lstat(container->rootfs, &st) == 0;
    *running = container->exists ? running_in(container->rootfs) : 0;
    return 0;
}

/* A directory is taken as an image if it looks like a root; enroot takes none at all. */
static bool is_root_directory(const char *path)
{
    char shell[PATH_MAX + 8];
    struct stat st;

    snprintf(shell, sizeof(shell), "%s/bin", path);
    return stat(path, &st) == 0 && S_ISDIR(st.st_mode) && lstat(shell, &st) == 0;
}

struct unpacking {
    char image[PATH_MAX];
    bool directory;
    char *names[NAMES_MAX]; /* at the top level: first those with programs in them */
    int count, half;
};

static bool holds_programs(const char *name)
{
    return strcmp(name, "bin") == 0 || strcmp(name, "sbin") == 0 || strcmp(name, "usr") == 0 ||
           strncmp(name, "lib", 3) == 0;
}

static int programs_first(const void *left, const void *right)
{
    const char *a = *(char *const *)left, *b = *(char *const *)right;

    return holds_programs(a) != holds_programs(b) ? holds_programs(b) - holds_programs(a) : strcmp(a, b);
}

/* The first half holds the programs and half of the rest, so that commands run in a half-made rootfs. */
static void list_names(struct unpacking *what)
{
    int fd = memfd_create("names", MFD_CLOEXEC), programs = 0;
    FILE *listing = fdopen(fd, "r");
    char *line = NULL, *name;
    size_t size = 0;

    if (listing == NULL)
        return;
    if (what->directory)
        run_into(fd, (char *[]){"find", what->image, "-mindepth", "1", "-maxdepth", "1", NULL});
    else
        run_into(fd, (char *[]){"unsquashfs", "-l", "-max-depth", "1", what->image, NULL});
    lseek(fd, 0, SEEK_SET);
    while (what->count < NAMES_MAX && getline(&line, &size, listing) > 0) {
        line[strcspn(line, "\n")] = '\0';
        name = strrchr(line, '/');
        if (name == NULL)
            continue;
        programs += holds_programs(name + 1);
        what->names[what->count++] = strdup(name + 1);
    }
    free(line);
    fclose(listing);
    qsort(what->names, (size_t)what->count, sizeof(*what->names), programs_first);
    what->half = programs + (what->count - programs + 1) / 2;
}

/* Unpack the names from one up to another; all of the image if there are none. */
static int unpack(const struct unpacking *what, const char *rootfs, int from, int to)
{
    char *argv[NAMES_MAX + 12], *paths[NAMES_MAX];
    int argc = 0;

    if (what->directory) {
        argv[argc++] = "cp";
        argv[argc++] = "-a";
        argv[argc++] = "--reflink=auto";
        argv[argc++] = "-t";
        argv[argc++] = (char *)rootfs;
        if (mkdir(rootfs, 0755) < 0 && errno != EEXIST)
            return -1;
        for (int i = from; i < to; ++i)
            if (asprintf(&paths[i], "%s/%s", what->image, what->names[i]) > 0)
                argv[argc++] = paths[i];
    } else {
        argv[argc++] = "unsquashfs";
        argv[argc++] = "-no-progress";
        argv[argc++] = "-user-xattrs";
        if (to > from)
            argv[argc++] = "-f";
        argv[argc++] = "-d";
        argv[argc++] = (char *)rootfs;
        argv[argc++] = (char *)what->image;
        for (int i = from; i < to; ++i)
            argv[argc++] = what->names[i];
    }
    argv[argc] = NULL;
    return run_and_wait(argv);
}

/* A fault strikes between the first half of the top-level names and the rest. */
struct mishap {
    bool hang, fail, any;
    double seconds;
};

static struct mishap foresee(const struct container *container)
{
    struct mishap mishap = {0};
    double seconds;

    if (fault_take("import_delay", container, &seconds)) {
        mishap.any = true;
        mishap.seconds += seconds;
    }
    if (fault_take("create_fail", container, &seconds)) {
        mishap.any = mishap.fail = true;
        mishap.seconds += seconds;
    }
    mishap.hang = fault_take("import_hang", container, &seconds);
    mishap.any |= mishap.hang;
    return mishap;
}

/* A step that starts in the half-made rootfs makes directories of its own there, on which an unsquashfs without -f
 * fails: so do we. */
static int unpack_in_halves(const struct unpacking *what, const char *rootfs, const struct mishap *mishap)
{
    int half = what->half, rc = unpack(what, rootfs, 0, half);
    char path[2 * PATH_MAX];
    struct stat st;

    if (rc != 0)
        return rc;
    while (mishap->hang)
        pause();
    fault_sleep(mishap->seconds);
    if (mishap->fail) {
        log_line("Write on output file failed because No space left on device");
        log_line("FATAL ERROR: writer: failed to write file %s/%s", rootfs, what->names[what->count - 1]);
        return 1;
    }
    for (int i = half; i < what->count; ++i) {
        snprintf(path, sizeof(path), "%s/%s", rootfs, what->names[i]);
        if (lstat(path, &st) == 0) {
            log_line("FATAL ERROR: dir_scan: failed to make directory %s, because File exists", path);
            return 1;
        }
    }
    return half == what->count ? 0 : unpack(what, rootfs, half, what->count);
}

static int refuse(const char *reason, const char *what)
{
    log_line("[ERROR] %s: %s", reason, what);
    return 1;
}

static int create(struct container *container, const char *image)
{
    struct unpacking what = {0};
    struct mishap mishap;
    struct stat st;
    double seconds;
    int rc;

    if (make_user_directory(container) < 0)
        return 1;
    if (realpath(image, what.image) == NULL || stat(what.image, &st) < 0)
        return refuse("No such file or directory", image);
    what.directory = S_ISDIR(st.st_mode) && is_root_directory(what.image);
    if (!what.directory && !S_ISREG(st.st_mode))
        return refuse("No such file or directory", image);
    if (fault_take("import_fail", container, &seconds)) {
        fault_sleep(seconds);
        return refuse("Injected import failure", image);
    }
    if (!what.directory && run_into(-1, (char *[]){"unsquashfs", "-s", what.image, NULL}) != 0)
        return refuse("Invalid image format", image);
    if (strchr(container->name, '/') != NULL)
        return refuse("Invalid argument", container->name);
    if (lstat(container->rootfs, &st) == 0)
        return refuse("File already exists", container->rootfs);

    log_line("[INFO] Extracting squashfs filesystem...");
    mishap = foresee(container);
    if (mishap.any || what.directory)
        list_names(&what);
    rc = mishap.any ? unpack_in_halves(&what, container->rootfs, &mishap)
                    : unpack(&what, container->rootfs, 0, what.count);
    if (rc == 0)
        run_and_wait((char *[]){"chmod", "-f", "-R", "u+rX", (char *)container->rootfs, NULL});
    return rc;
}

int rootfs_create(struct container *container, const char *image)
{
    pid_t pid;

    if (*image != '/' && *image != '.') {
        slurm_spank_log("pyxis: importing docker image: %s", image);
        slurm_error("pyxis: child %d failed with error code: 6", getpid());
        slurm_error("pyxis: failed to import docker image: %s", image);
        log_reset();
        log_line("[INFO] Querying registry for permission grant");
        log_line("curl: (6) Could not resolve host: registry-1.docker.io");
        log_show();
        return -1;
    }
    log_reset();
    pid = fork();
    if (pid == 0) {
        unblock_signals();
        prctl(PR_SET_NAME, "enroot"); /* proctrack/linuxproc ends no process called slurmstepd */
        _exit(create(container, image) & 0xff);
    }
    if (child_wait(pid) == 0)
        return 0;
    slurm_error("pyxis: failed to create container filesystem for image: %s", image);
    log_show();
    return -1;
}

/* Called by slurmstepd itself, which is root: become the user for good first. */
static int as_user(const struct container *container, char *const argv[])
{
    pid_t pid = fork();

    if (pid == 0) {
        if (setgroups(1, &container->gid) < 0 || setregid(container->gid, container->gid) < 0 ||
            setreuid(container->uid, container->uid) < 0)
            _exit(EXIT_FAILURE);
        exec_into(log_fd(), argv);
    }
    return child_wait(pid);
}

int rootfs_remove(const struct container *container)
{
    log_reset();
    return as_user(container, (char *[]){"rm", "--one-file-system", "-rf", (char *)container->rootfs, NULL});
}

int rootfs_save(const struct container *container, const char *path)
{
    char lock[PATH_MAX + 8];

    snprintf(lock, sizeof(lock), "%s/.lock", container->rootfs);
    log_reset();
    if (as_user(container, (char *[]){"rm", "-f", (char *)path, NULL}) == 0 &&
        as_user(container, (char *[]){"mksquashfs", (char *)container->rootfs, (char *)path, "-all-root", "-noappend",
                                      "-no-progress", "-e", lock, NULL}) == 0)
        return 0;
    log_show();
    return -1;
}
