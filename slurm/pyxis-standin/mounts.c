/* In a new user and mount namespace: put the container's tree together and make it the root.
 *
 * Targets are made inside the rootfs, whose symbolic links never lead out of it. */
#include "pyxis.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/openat2.h>
#include <pwd.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { LINKS_MAX = 8 };

static int root_fd = -1;

static int failed(const char *source, const char *target)
{
    log_line("enroot-mount: failed to mount: %s at %s: %s", source, target, strerror(errno));
    return -1;
}

static int open_inside(const char *path, int flags, mode_t mode)
{
    struct open_how how = {.flags = (unsigned int)flags | O_CLOEXEC, .mode = mode, .resolve = RESOLVE_IN_ROOT};

    return (int)syscall(SYS_openat2, root_fd, *path == '\0' ? "." : path, &how, sizeof(how));
}

/* Open a target, making it and its parents as needed; a dangling link's target is made where it points. */
static int make_inside(const char *path, bool directory, int links)
{
    char parent[PATH_MAX], link[PATH_MAX], *name;
    int fd = open_inside(path, O_PATH, 0), up;
    ssize_t len;

    if (fd >= 0 || errno != ENOENT)
        return fd;
    snprintf(parent, sizeof(parent), "%s", path);
    while (strlen(parent) > 1 && parent[strlen(parent) - 1] == '/')
        parent[strlen(parent) - 1] = '\0';
    name = strrchr(parent, '/');
    if (name == NULL)
        return -1;
    *name++ = '\0';
    up = make_inside(parent, true, links);
    if (up < 0)
        return -1;
    len = readlinkat(up, name, link, sizeof(link) - 1);
    if (len >= 0 && links > 0) {
        char next[2 * PATH_MAX];

        link[len] = '\0';
        snprintf(next, sizeof(next), "%s/%s", *link == '/' ? "" : parent, link);
        close(up);
        return make_inside(next, directory, links - 1);
    }
    if (directory)
        mkdirat(up, name, 0755);
    else if ((fd = openat(up, name, O_CREAT | O_WRONLY | O_CLOEXEC, 0644)) >= 0)
        close(fd);
    close(up);
    return open_inside(path, O_PATH, 0);
}

struct parsed {
    unsigned long flags, propagation;
    bool bind, directory, file, detach, nofail;
    char data[256];
};

static struct parsed parse_flags(const char *text, bool source_is_directory)
{
    static const struct {
        const char *word;
        unsigned long set, propagation;
    } known[] = {
        {"ro", MS_RDONLY, 0},        {"nosuid", MS_NOSUID, 0},         {"nodev", MS_NODEV, 0},
        {"noexec", MS_NOEXEC, 0},    {"noatime", MS_NOATIME, 0},       {"nodiratime", MS_NODIRATIME, 0},
        {"relatime", MS_RELATIME, 0}, {"bind", MS_BIND, 0},            {"rbind", MS_BIND | MS_REC, 0},
        {"private", 0, MS_PRIVATE},  {"rprivate", 0, MS_PRIVATE | MS_REC}, {"slave", 0, MS_SLAVE},
        {"rslave", 0, MS_SLAVE | MS_REC}, {"shared", 0, MS_SHARED},    {"rshared", 0, MS_SHARED | MS_REC},
        {"rw", 0, 0},                {"suid", 0, 0},                   {"dev", 0, 0},
        {"exec", 0, 0},              {"silent", 0, 0},                 {"x-create=auto", 0, 0},
    };
    struct parsed parsed = {.directory = source_is_directory};
    char *copy = strdup(text), *rest = copy, *word;

    while ((word = strsep(&rest, ",")) != NULL) {
        size_t i = 0;

        while (i < sizeof(known) / sizeof(*known) && strcmp(word, known[i].word) != 0)
            ++i;
        if (i < sizeof(known) / sizeof(*known)) {
            parsed.flags |= known[i].set;
            parsed.propagation |= known[i].propagation;
        } else if (strcmp(word, "x-create=dir") == 0)
            parsed.directory = true;
        else if (strcmp(word, "x-create=file") == 0)
            parsed.directory = false;
        else if (strcmp(word, "x-detach") == 0)
            parsed.detach = true;
        else if (strcmp(word, "nofail") == 0)
            parsed.nofail = true;
        else if (strlen(parsed.data) + strlen(word) + 2 < sizeof(parsed.data))
            sprintf(parsed.data + strlen(parsed.data), "%s%s", *parsed.data == '\0' ? "" : ",", word);
    }
    free(copy);
    return parsed;
}

/* A remount in a user namespace must repeat the flags that the outer one locked. */
static unsigned long locked_flags(const char *path)
{
    struct statvfs st;

    if (statvfs(path, &st) < 0)
        return 0;
    return (st.f_flag & ST_RDONLY ? MS_RDONLY : 0) | (st.f_flag & ST_NOSUID ? MS_NOSUID : 0) |
           (st.f_flag & ST_NODEV ? MS_NODEV : 0) | (st.f_flag & ST_NOEXEC ? MS_NOEXEC : 0);
}

static int attach(const char *source, int target_fd, const struct parsed *parsed)
{
    const unsigned long once = MS_BIND | MS_REC;
    char target[64];

    snprintf(target, sizeof(target), "/proc/self/fd/%d", target_fd);
    if (parsed->detach)
        return umount2(target, MNT_DETACH);
    if (strcmp(source, "tmpfs") == 0)
        return mount("tmpfs", target, "tmpfs", parsed->flags, parsed->data);
    return mount(source, target, NULL, parsed->flags & once, NULL);
}

static int mount_one(const char *source, const char *path, const char *flags)
{
    const unsigned long once = MS_BIND | MS_REC;
    char absolute[PATH_MAX], target[64];
    struct parsed parsed;
    struct stat st;
    int fd, rc;

    parsed = parse_flags(flags, stat(source, &st) == 0 && S_ISDIR(st.st_mode));
    snprintf(absolute, sizeof(absolute), "/%s", path);
    fd = make_inside(absolute, parsed.directory, LINKS_MAX);
    rc = fd < 0 ? -1 : attach(source, fd, &parsed);
    if (fd >= 0)
        close(fd);
    /* The descriptor was of what lay under the mount: open again to reach the mount itself. */
    fd = rc == 0 && !parsed.detach ? open_inside(absolute, O_PATH, 0) : -1;
    snprintf(target, sizeof(target), "/proc/self/fd/%d", fd);
    if (fd >= 0 && (parsed.flags & ~once) != 0 && (parsed.flags & MS_BIND) != 0)
        rc = mount(NULL, target, NULL,
                   MS_REMOUNT | MS_BIND | (parsed.flags & ~once) | locked_flags(target), NULL);
    if (rc == 0 && fd >= 0 && parsed.propagation != 0)
        rc = mount(NULL, target, NULL, parsed.propagation, NULL);
    if (fd >= 0)
        close(fd);
    return rc < 0 && !parsed.nofail ? failed(source, path) : 0;
}

/* What enroot mounts into every container. */
static int mount_system(void)
{
    static const char *const table[][3] = {
        {"/proc", "/proc", "x-create=dir,rbind,nosuid,nodev,noexec"},
        {"/sys", "/sys", "x-create=dir,rbind,ro,nosuid,nodev,noexec"},
        {"/dev", "/dev", "x-create=dir,rbind,nosuid,noexec"},
        {"tmpfs", "/tmp", "x-create=dir,nosuid,nodev,mode=755"},
        {"tmpfs", "/var/run", "x-create=dir,nosuid,nodev,mode=755"},
        {"tmpfs", "/var/lock", "x-create=dir,nosuid,nodev,mode=755"},
        {"/etc/hosts", "/etc/hosts", "x-create=file,bind,ro,nosuid,nodev,noexec,nofail"},
        {"/etc/hostname", "/etc/hostname", "x-create=file,bind,ro,nosuid,nodev,noexec,nofail"},
        {"/etc/resolv.conf", "/etc/resolv.conf", "x-create=file,bind,ro,nosuid,nodev,noexec,nofail"},
        {"/etc/machine-id", "/etc/machine-id", "x-create=file,bind,ro,nosuid,nodev,noexec,nofail"},
    };

    for (size_t i = 0; i < sizeof(table) / sizeof(*table); ++i)
        if (mount_one(table[i][0], table[i][1], table[i][2]) < 0)
            return -1;
    return 0;
}

static bool has_account(FILE *file, const char *name)
{
    char line[1024];

    while (fgets(line, sizeof(line), file) != NULL)
        if (strncmp(line, name, strlen(name)) == 0 && line[strlen(name)] == ':')
            return true;
    return false;
}

/* The user that appears inside has a name there, as after enroot's hook. */
static void add_account(const char *path, const char *name, const char *rest)
{
    int fd = open_inside(path, O_RDWR | O_CREAT | O_APPEND, 0644);
    FILE *file = fd < 0 ? NULL : fdopen(fd, "a+");

    if (file == NULL)
        return;
    if (!has_account(file, name))
        fprintf(file, "%s:%s\n", name, rest);
    fclose(file);
}

static void add_accounts(const struct container *container, const struct passwd *user)
{
    char rest[PATH_MAX];

    close(make_inside("/etc", true, LINKS_MAX));
    add_account("/etc/passwd", "root", "x:0:0:root:/root:/bin/sh");
    add_account("/etc/group", "root", "x:0:");
    if (user == NULL || container->uid == 0)
        return;
    snprintf(rest, sizeof(rest), "x:%u:%u::%s:/bin/sh", container->uid, container->gid, user->pw_dir);
    add_account("/etc/passwd", user->pw_name, rest);
    snprintf(rest, sizeof(rest), "x:%u:", container->gid);
    add_account("/etc/group", user->pw_name, rest);
}

static int mount_home(const struct container *container, const struct passwd *user)
{
    int made = user != NULL ? make_inside(user->pw_dir, true, LINKS_MAX) : -1;

    if (made >= 0)
        close(made);
    if (args.mount_home != YES)
        return 0;
    return mount_one(container->home, environ_home(container), "x-create=dir,bind,nosuid");
}

static int pivot(void)
{
    int old = open("/", O_PATH | O_DIRECTORY | O_CLOEXEC);
    int rc = -1;

    if (old >= 0 && fchdir(root_fd) == 0 && syscall(SYS_pivot_root, ".", ".") == 0 && fchdir(old) == 0 &&
        mount(NULL, ".", NULL, MS_REC | MS_SLAVE, NULL) == 0 && umount2(".", MNT_DETACH) == 0 &&
        fchdir(root_fd) == 0 && chroot(".") == 0)
        rc = chdir("/");
    if (old >= 0)
        close(old);
    return rc;
}

int mounts_apply(const struct container *container)
{
    const struct passwd *user = getpwuid(container->uid);
    unsigned long flags;
    char target[64];
    int lock;

    if (mount(NULL, "/", NULL, MS_REC | MS_SLAVE, NULL) < 0 ||
        mount(container->rootfs, container->rootfs, NULL, MS_BIND, NULL) < 0)
        return failed(container->rootfs, container->rootfs);
    root_fd = open(container->rootfs, O_PATH | O_DIRECTORY | O_CLOEXEC);
    if (root_fd < 0)
        return failed(container->rootfs, container->rootfs);
    lock = open_inside("/.lock", O_CREAT | O_WRONLY, 0644);
    if (lock >= 0)
        close(lock);
    add_accounts(container, user);
    if (mount_system() < 0 || mount_home(container, user) < 0)
        return -1;
    for (size_t i = 0; i < args.mounts_len; ++i)
        if (mount_one(args.mounts[i].source, args.mounts[i].target, args.mounts[i].flags) < 0)
            return -1;
    snprintf(target, sizeof(target), "/proc/self/fd/%d", root_fd);
    flags = MS_REMOUNT | MS_BIND | MS_NOSUID | MS_NODEV | locked_flags(target);
    if (mount(NULL, target, NULL, flags | (args.writable == YES ? 0 : MS_RDONLY), NULL) < 0)
        return failed("none", container->rootfs);
    if (pivot() < 0) {
        log_line("enroot-switchroot: failed to switch root: %s: %s", container->rootfs, strerror(errno));
        return -1;
    }
    return 0;
}
