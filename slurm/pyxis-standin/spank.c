/* What Slurm calls, in the order of a step's life. An error in user_init would let srun exit 0, so it is kept and
 * raised in task_init, as Pyxis does. */
#include "pyxis.h"

#include <errno.h>
#include <fcntl.h>
#include <pwd.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define EXPORTED __attribute__((visibility("default")))

#pragma GCC visibility push(default)
SPANK_PLUGIN(pyxis, 1);
#pragma GCC visibility pop

/* Shared by the tasks of the step on this node. */
struct shared {
    unsigned int begun, started, ended;
    pid_t holder;     /* keeps the namespaces of a container started here */
    pid_t namespaces; /* whose namespaces the tasks join; 0 if the start failed */
};

static struct {
    bool enabled;
    int user_init_rc;
    uint32_t local_tasks;
    char job_cwd[PATH_MAX];
    int shared_fd, life[2];
    struct shared *shared;
    struct container container;
} step = {.shared_fd = -1, .life = {-1, -1}};

EXPORTED int slurm_spank_init(spank_t spank, int argc, char **argv)
{
    spank_context_t context = spank_context();

    if (config_parse(argc, argv) < 0)
        return -1;
    if (context == S_CTX_LOCAL || context == S_CTX_REMOTE || context == S_CTX_ALLOCATOR)
        return args_register(spank);
    return 0;
}

/* Tests put faults here and steps of any user count them; the container directory is only made, never changed. */
static void make_directories(void)
{
    if (mkdir(config.data_path, 01777) == 0)
        (void)!chmod(config.data_path, 01777);
    if (mkdir(config.faults, 01777) == 0 || errno == EEXIST)
        (void)!chmod(config.faults, 01777);
}

EXPORTED int slurm_spank_init_post_opt(spank_t spank, int argc, char **argv)
{
    spank_context_t context = spank_context();

    (void)argc, (void)argv;
    if (context != S_CTX_LOCAL && context != S_CTX_REMOTE)
        return 0;
    args_from_environment(spank);
    step.enabled = args_ask_for_container();
    if (!step.enabled || context == S_CTX_LOCAL)
        return 0;
    make_directories();
    if (spank_get_item(spank, S_JOB_UID, &step.container.uid) != ESPANK_SUCCESS ||
        spank_get_item(spank, S_JOB_GID, &step.container.gid) != ESPANK_SUCCESS ||
        spank_get_item(spank, S_JOB_LOCAL_TASK_COUNT, &step.local_tasks) != ESPANK_SUCCESS) {
        slurm_error("pyxis: couldn't get the job's user and tasks");
        return -1;
    }
    if (spank_getenv(spank, "PWD", step.job_cwd, sizeof(step.job_cwd)) != ESPANK_SUCCESS)
        step.job_cwd[0] = '\0';
    if (spank_getenv(spank, "HOME", step.container.home, sizeof(step.container.home)) != ESPANK_SUCCESS) {
        const struct passwd *user = getpwuid(step.container.uid);

        snprintf(step.container.home, sizeof(step.container.home), "%s", user != NULL ? user->pw_dir : "/");
    }
    return 0;
}

static int make_shared(void)
{
    step.shared_fd = memfd_create("pyxis", MFD_CLOEXEC);
    if (step.shared_fd < 0 || ftruncate(step.shared_fd, sizeof(*step.shared)) < 0 || pipe2(step.life, O_CLOEXEC) < 0)
        return -1;
    step.shared = mmap(NULL, sizeof(*step.shared), PROT_READ | PROT_WRITE, MAP_SHARED, step.shared_fd, 0);
    return step.shared == MAP_FAILED ? -1 : 0;
}

static int name_container(spank_t spank)
{
    struct container *container = &step.container;
    uint32_t job, id;
    char scope[16] = "";
    int len;

    if (spank_get_item(spank, S_JOB_ID, &job) != ESPANK_SUCCESS ||
        spank_get_item(spank, S_JOB_STEPID, &id) != ESPANK_SUCCESS)
        return -1;
    if (config.scope_job)
        snprintf(scope, sizeof(scope), "%u_", job);
    container->temporary = args.name == NULL;
    if (container->temporary)
        len = snprintf(container->name, sizeof(container->name), "pyxis_%s%u.%u", scope, job, id);
    else
        len = snprintf(container->name, sizeof(container->name), "pyxis_%s%s", scope, args.name);
    if (len < (int)sizeof(container->name))
        return 0;
    slurm_error("pyxis: container name too long: %s", args.name);
    return -1;
}

/* Decide whether this step makes, starts or joins a container. */
static int settle(void)
{
    struct container *container = &step.container;
    const char *flag = args.name_flag;
    pid_t running = 0;

    if (container->temporary) {
        snprintf(container->rootfs, sizeof(container->rootfs), "%s/user-%u/%s", config.data_path, container->uid,
                 container->name);
        return 0;
    }
    if (rootfs_find(container, &running) < 0) {
        slurm_error("pyxis: couldn't get list of containers");
        return -1;
    }
    if (strcmp(flag, "create") == 0 && container->exists) {
        slurm_error("pyxis: error: \"create\" flag was passed to --container-name but the container already exists");
        return -1;
    }
    if (strcmp(flag, "exec") == 0 && running == 0) {
        slurm_error("pyxis: error: \"exec\" flag was passed to --container-name but the container is not running");
        return -1;
    }
    if (strcmp(flag, "no_exec") == 0)
        running = 0;
    if (!container->exists && args.image == NULL) {
        slurm_error("pyxis: error: a container with name \"%s\" does not exist, and --container-image is not set",
                    container->name);
        return -1;
    }
    container->attach = running != 0;
    step.shared->namespaces = running;
    if (container->attach && args.mounts_len > 0) {
        slurm_spank_log("pyxis: ignoring --container-mounts when attaching to a running container");
        args.mounts_len = 0;
    }
    return 0;
}

EXPORTED int slurm_spank_user_init(spank_t spank, int argc, char **argv)
{
    (void)argc, (void)argv;
    if (!step.enabled)
        return 0;
    if (make_shared() < 0 || name_container(spank) < 0 || settle() < 0)
        step.user_init_rc = -1;
    return 0;
}

/* The kernel gives the lock up with its process, so a task killed half-way does not block the others. */
static void lock(short type)
{
    struct flock whole = {.l_type = type, .l_whence = SEEK_SET};

    while (fcntl(step.shared_fd, F_SETLKW, &whole) < 0 && errno == EINTR)
        ;
}

/* The first task makes and starts the container; the others wait for the lock, then see what became of it. */
static int start_once(void)
{
    struct shared *shared = step.shared;
    bool ready;

    lock(F_WRLCK);
    if (shared->begun++ == 0) {
        bool created = step.container.exists || rootfs_create(&step.container, args.image) == 0;
        pid_t holder = created ? container_start(&step.container, step.life[0]) : -1;

        if (!created) {
            lock(F_UNLCK);
            return -1;
        }
        if (holder > 0)
            shared->holder = shared->namespaces = holder;
        else if (holder < 0)
            shared->namespaces = 0;
    }
    ready = shared->namespaces > 0;
    lock(F_UNLCK);
    if (!ready)
        slurm_error("pyxis: container was not started successfully by another task");
    return ready ? 0 : -1;
}

EXPORTED int slurm_spank_task_init(spank_t spank, int argc, char **argv)
{
    struct shared *shared = step.shared;

    (void)argc, (void)argv;
    if (!step.enabled)
        return 0;
    if (step.user_init_rc < 0)
        return step.user_init_rc;
    close(step.life[1]);
    if (start_once() < 0 || environ_apply(spank, &step.container) < 0 || container_join(shared->namespaces, environ_home(&step.container)) < 0)
        return -1;
    if (__atomic_add_fetch(&shared->started, 1, __ATOMIC_SEQ_CST) == step.local_tasks && shared->holder > 0)
        kill(shared->holder, SIGKILL);
    return 0;
}

static int save(void)
{
    char path[2 * PATH_MAX];
    bool absolute = args.save != NULL && *args.save == '/';

    if (args.save == NULL || step.shared->started != step.local_tasks)
        return 0;
    if (!absolute && *step.job_cwd == '\0') {
        slurm_error("pyxis: container export: relative path used, but job's cwd is unset");
        return -1;
    }
    snprintf(path, sizeof(path), "%s%s%s", absolute ? "" : step.job_cwd, absolute ? "" : "/", args.save);
    if (rootfs_save(&step.container, path) < 0) {
        slurm_error("pyxis: failed to export container %s to %s", step.container.name, args.save);
        return -1;
    }
    slurm_spank_log("pyxis: exported container %s to %s", step.container.name, args.save);
    return 0;
}

EXPORTED int slurm_spank_task_exit(spank_t spank, int argc, char **argv)
{
    int rc;

    (void)spank, (void)argc, (void)argv;
    if (!step.enabled || step.shared == NULL)
        return 0;
    if (++step.shared->ended != step.local_tasks)
        return 0;
    rc = save();
    if (step.container.temporary && rootfs_remove(&step.container) < 0)
        slurm_info("pyxis: failed to remove container filesystem: %s", step.container.name);
    return rc;
}
