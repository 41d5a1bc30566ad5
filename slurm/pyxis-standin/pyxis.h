/* A stand-in for Pyxis and enroot on a one-machine test cluster. See README.md. */
#pragma once

#include <limits.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include <slurm/spank.h>

enum { UNSET = -1, NO = 0, YES = 1 }; /* an option that may not have been given */

/* args.c: what the user asked for. */
struct mount_spec {
    char *source, *target, *flags; /* flags separated by commas */
};
struct args {
    char *image, *name, *name_flag, *workdir, *save;
    struct mount_spec *mounts;
    size_t mounts_len;
    char **env; /* names whose host values beat the image's */
    size_t env_len;
    int mount_home, remap_root, writable, entrypoint, entrypoint_log;
};
extern struct args args;
int args_register(spank_t spank);
void args_from_environment(spank_t spank);
bool args_ask_for_container(void);
int args_add_mount(const char *source, const char *target, const char *flags);
bool args_env_holds(const char *name);

/* config.c: the words behind the plugin in plugstack.conf. */
struct config {
    char data_path[PATH_MAX / 2], faults[PATH_MAX / 2];
    bool scope_job;
};
extern struct config config;
int config_parse(int argc, char **argv);

/* log.c: what enroot would have printed; shown to the user only when something fails. */
void log_reset(void);
int log_fd(void);
void log_line(const char *format, ...) __attribute__((format(printf, 1, 2)));
void log_show(void);

/* The container of this step on this node. */
struct container {
    char name[NAME_MAX + 1];
    char rootfs[PATH_MAX];
    char home[PATH_MAX]; /* the caller's $HOME */
    bool exists, attach, temporary;
    uid_t uid;
    gid_t gid;
};

/* faults.c: faults on demand. */
bool fault_take(const char *fault, const struct container *container, double *seconds);
void fault_sleep(double seconds);
void fault_delay(const char *fault, const struct container *container);

/* rootfs.c: the root file systems kept in the data path. */
int rootfs_find(struct container *container, pid_t *running);
int rootfs_create(struct container *container, const char *image);
int rootfs_remove(const struct container *container);
int rootfs_save(const struct container *container, const char *path);

/* start.c: namespaces of a container that is started, and joining them. */
pid_t container_start(const struct container *container, int life_fd);
int container_join(pid_t pid, const char *home);

/* mounts.c: inside a fresh mount namespace, everything up to the pivot. */
int mounts_apply(const struct container *container);

/* environ.c: the image's environment against the caller's, and the home directory inside. */
int environ_apply(spank_t spank, const struct container *container);
const char *environ_home(const struct container *container);

/* seccomp.c: calls that change an owner succeed without doing anything. */
int seccomp_fake_owners(void);
