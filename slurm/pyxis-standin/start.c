/* Starting a container: a child makes the namespaces, stops itself once all is in place, and then only keeps them
 * open until every task of the step has joined. */
#include "pyxis.h"

#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

static int write_file(const char *path, const char *text)
{
    int fd = open(path, O_WRONLY | O_CLOEXEC);
    int rc = fd >= 0 && write(fd, text, strlen(text)) == (ssize_t)strlen(text) ? 0 : -1;

    if (fd >= 0)
        close(fd);
    return rc;
}

static int new_namespaces(const struct container *container)
{
    bool root = args.remap_root == YES;
    char uids[64], gids[64];

    snprintf(uids, sizeof(uids), "%u %u 1", root ? 0 : container->uid, container->uid);
    snprintf(gids, sizeof(gids), "%u %u 1", root ? 0 : container->gid, container->gid);
    if (unshare(CLONE_NEWUSER | CLONE_NEWNS) < 0)
        return -1;
    /* After a change of user the kernel keeps a process's /proc files from its own user. */
    prctl(PR_SET_DUMPABLE, 1);
    if (write_file("/proc/self/setgroups", "deny") < 0 || write_file("/proc/self/uid_map", uids) < 0)
        return -1;
    return write_file("/proc/self/gid_map", gids);
}

/* A container needs a shell that runs. */
static int probe_shell(void)
{
    int status;
    pid_t pid = fork();

    if (pid == 0) {
        execle("/bin/sh", "sh", "-c", "exit 0", NULL, (char *[]){NULL});
        log_line("enroot-switchroot: failed to execute: /bin/sh: %s", strerror(errno));
        _exit(1);
    }
    if (pid < 0 || waitpid(pid, &status, 0) < 0)
        return 1;
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

static void keep_namespaces(const struct container *container, int life_fd)
{
    int null = open("/dev/null", O_RDWR | O_CLOEXEC), rc;
    double seconds;
    sigset_t none;
    char byte;

    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
    prctl(PR_SET_NAME, "enroot"); /* proctrack/linuxproc ends no process called slurmstepd */
    prctl(PR_SET_PDEATHSIG, SIGKILL); /* nobody would wake an orphan that has stopped itself */
    dup2(null, STDIN_FILENO);
    dup2(log_fd(), STDOUT_FILENO);
    dup2(log_fd(), STDERR_FILENO);

    fault_delay("start_delay", container);
    if (fault_take("start_fail", container, &seconds)) {
        fault_sleep(seconds);
        log_line("[ERROR] /etc/enroot/hooks.d/50-injected.sh exited with return code 1");
        _exit(1);
    }
    if (fault_take("start_hang", container, &seconds))
        for (;;)
            pause();
    if (container->attach)
        _exit(0);
    if (new_namespaces(container) < 0) {
        log_line("enroot-nsenter: failed to create user namespace: %s", strerror(errno));
        _exit(1);
    }
    prctl(PR_SET_PDEATHSIG, SIGKILL); /* a new user namespace clears it */
    if (mounts_apply(container) < 0)
        _exit(1);
    rc = probe_shell();
    if (rc != 0)
        _exit(rc);
    /* Never hold srun's streams, or this end of the pipe would be the last thing that keeps them open. */
    dup2(life_fd, STDIN_FILENO);
    dup2(null, STDOUT_FILENO);
    dup2(null, STDERR_FILENO);
    close_range(3, ~0U, 0);
    prctl(PR_SET_PDEATHSIG, 0); /* the first task may end before the last one has joined */
    raise(SIGSTOP);
    while (read(STDIN_FILENO, &byte, 1) < 0 && errno == EINTR)
        ;
    _exit(0);
}

static int check_sources(void)
{
    struct stat st;

    for (size_t i = 0; i < args.mounts_len; ++i) {
        const char *source = args.mounts[i].source;

        if (*source == '/' && stat(source, &st) < 0 && (errno == ENOENT || errno == ENOTDIR)) {
            slurm_error("pyxis: --container-mounts: source path does not exist: %s", source);
            slurm_error("pyxis: couldn't create enroot start configuration script");
            return -1;
        }
    }
    return 0;
}

/* Return the process that holds the namespaces open, 0 after an attach, -1 on failure. life_fd reads as ended once
 * slurmstepd has ended. */
pid_t container_start(const struct container *container, int life_fd)
{
    int status;
    pid_t pid;

    if (check_sources() < 0) {
        log_show();
        return -1;
    }
    log_reset();
    pid = fork();
    if (pid == 0)
        keep_namespaces(container, life_fd);
    while (pid > 0 && waitpid(pid, &status, WUNTRACED) < 0)
        if (errno != EINTR)
            pid = -1;
    if (pid < 0) {
        slurm_error("pyxis: container start error: %s", strerror(errno));
        return -1;
    }
    if (WIFSTOPPED(status)) {
        kill(pid, SIGCONT);
        return pid;
    }
    if (WIFEXITED(status) && WEXITSTATUS(status) == 0 && container->attach)
        return 0;
    if (WIFEXITED(status) && WEXITSTATUS(status) != 0)
        slurm_error("pyxis: container start failed with error code: %d", WEXITSTATUS(status));
    else
        slurm_error("pyxis: container exited too soon");
    log_show();
    return -1;
}

static int open_namespace(pid_t pid, const char *file, const char *name)
{
    char path[64];
    int fd;

    snprintf(path, sizeof(path), "/proc/%d/ns/%s", pid, file);
    fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        slurm_error("pyxis: unable to open %s namespace file: %s", name, strerror(errno));
    return fd;
}

static int join(int fd, int type, const char *name)
{
    int rc = setns(fd, type);

    if (rc < 0)
        slurm_error("pyxis: couldn't join %s namespace: %s", name, strerror(errno));
    return rc;
}

int container_join(pid_t pid, const char *home)
{
    const char *workdir = args.workdir != NULL ? args.workdir : home;
    int user, tree, rc = -1;

    user = open_namespace(pid, "user", "user");
    tree = user < 0 ? -1 : open_namespace(pid, "mnt", "mount");
    if (tree < 0)
        slurm_error("pyxis: couldn't get container namespaces");
    else if (join(user, CLONE_NEWUSER, "user") == 0)
        rc = join(tree, CLONE_NEWNS, "mount");
    if (user >= 0)
        close(user);
    if (tree >= 0)
        close(tree);
    if (rc < 0)
        return -1;
    if (chdir(workdir) < 0) {
        slurm_error("pyxis: couldn't chdir to %s: %s", workdir, strerror(errno));
        return -1;
    }
    if (seccomp_fake_owners() < 0) {
        slurm_error("pyxis: seccomp filter failed: %s", strerror(errno));
        return -1;
    }
    /* Or this task would not be seen as running here until it has executed its command. */
    prctl(PR_SET_DUMPABLE, 1);
    return 0;
}
