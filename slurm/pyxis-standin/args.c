/* Options and their validation, in srun and again in slurmstepd; the messages are Pyxis's own. Slurm may call back
 * twice with the same value, so an equal value is not a second one. */
#include "pyxis.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct args args = {
    .mount_home = UNSET, .remap_root = UNSET, .writable = UNSET, .entrypoint = UNSET, .entrypoint_log = UNSET,
};

static int set_text(char **field, const char *option, const char *value)
{
    if (value == NULL || *value == '\0') {
        slurm_error("pyxis: --%s: argument required", option);
        return -1;
    }
    if (*field != NULL && strcmp(*field, value) != 0) {
        slurm_error("pyxis: --%s specified multiple times", option);
        return -1;
    }
    free(*field);
    *field = strdup(value);
    return *field == NULL ? -1 : 0;
}

static int set_switch(int *field, int value, const char *yes, const char *no)
{
    if (*field != UNSET && *field != value) {
        slurm_error("pyxis: both --%s and --%s were specified", yes, no);
        return -1;
    }
    *field = value;
    return 0;
}

static int take_image(int val, const char *value, int remote)
{
    (void)val, (void)remote;
    return set_text(&args.image, "container-image", value);
}

static int take_workdir(int val, const char *value, int remote)
{
    (void)val, (void)remote;
    return set_text(&args.workdir, "container-workdir", value);
}

static int take_save(int val, const char *value, int remote)
{
    (void)val, (void)remote;
    if (value != NULL && *value != '\0' && value[strlen(value) - 1] == '/') {
        slurm_error("pyxis: --container-save: target is a directory");
        return -1;
    }
    return set_text(&args.save, "container-save", value);
}

static int take_name(int val, const char *value, int remote)
{
    static const char *const known[] = {"auto", "create", "exec", "no_exec"};
    char *name, *flag;
    int rc = -1;

    (void)val, (void)remote;
    if (value == NULL || *value == '\0')
        return set_text(&args.name, "container-name", value);
    name = strdup(value);
    if (name == NULL)
        return -1;
    flag = strchr(name, ':');
    if (flag != NULL)
        *flag++ = '\0';
    if (flag == NULL || *flag == '\0')
        flag = "auto";
    if (*name == '\0') {
        slurm_error("pyxis: --container-name: empty name");
        goto out;
    }
    for (size_t i = 0; i < sizeof(known) / sizeof(*known); ++i)
        if (strcmp(flag, known[i]) == 0)
            rc = set_text(&args.name, "container-name", name) | set_text(&args.name_flag, "container-name", flag);
    if (rc < 0 && args.name == NULL)
        slurm_error("pyxis: --container-name: flag must be \"auto\", \"create\", \"exec\" or \"no_exec\"");
out:
    free(name);
    return rc;
}

int args_add_mount(const char *source, const char *target, const char *flags)
{
    const char *defaults = "x-create=auto,rbind";
    struct mount_spec spec = {0}, *grown;

    if (strcmp(source, "tmpfs") == 0)
        defaults = "x-create=dir";
    else if (strcmp(source, "umount") == 0)
        defaults = "x-detach";
    else if (*source != '.' && *source != '/') {
        slurm_error("pyxis: mount source must be a relative path, an absolute path, \"tmpfs\" or \"umount\"");
        return -1;
    }
    if (*target != '.' && *target != '/') {
        slurm_error("pyxis: mount target must be a relative path or an absolute path");
        return -1;
    }
    spec.source = strdup(source);
    spec.target = strdup(target);
    if (spec.source == NULL || spec.target == NULL ||
        asprintf(&spec.flags, "%s%s%s", defaults, flags == NULL ? "" : ",", flags == NULL ? "" : flags) < 0)
        return -1;
    for (size_t i = 0; i < args.mounts_len; ++i) {
        const struct mount_spec *seen = &args.mounts[i];

        if (strcmp(seen->source, spec.source) == 0 && strcmp(seen->target, spec.target) == 0 &&
            strcmp(seen->flags, spec.flags) == 0)
            return 0;
    }
    grown = realloc(args.mounts, (args.mounts_len + 1) * sizeof(*grown));
    if (grown == NULL)
        return -1;
    args.mounts = grown;
    args.mounts[args.mounts_len++] = spec;
    return 0;
}

static int take_mount(char *entry)
{
    char *source, *target, *rest = entry, *whole = strdup(entry);
    int rc = -1;

    if (whole == NULL)
        return -1;
    source = strsep(&rest, ":");
    target = rest == NULL ? source : strsep(&rest, ":");
    if (*source == '\0' || *target == '\0') {
        slurm_error("pyxis: --container-mounts: invalid format: %s", whole);
        goto out;
    }
    if (rest != NULL && *rest == '\0')
        rest = NULL;
    for (char *c = rest; c != NULL && *c != '\0'; ++c)
        if (*c == '+')
            *c = ',';
    rc = args_add_mount(source, target, rest);
    if (rc < 0)
        slurm_error("pyxis: could not add mount entry: %s:%s", source, target);
out:
    free(whole);
    return rc;
}

static int take_mounts(int val, const char *value, int remote)
{
    char *copy, *rest, *entry;
    int rc = 0;

    (void)val, (void)remote;
    if (value == NULL || *value == '\0') {
        slurm_error("pyxis: --container-mounts: argument required");
        return -1;
    }
    copy = rest = strdup(value);
    while (rc == 0 && (entry = strsep(&rest, ",")) != NULL)
        rc = take_mount(entry);
    free(copy);
    return rc;
}

static int take_env(int val, const char *value, int remote)
{
    char *rest, *name, **grown;

    (void)val, (void)remote;
    if (value == NULL || *value == '\0') {
        slurm_error("pyxis: --container-env: argument required");
        return -1;
    }
    rest = strdup(value); /* kept: the names point into it */
    while ((name = strsep(&rest, ",")) != NULL) {
        if (*name == '\0') {
            slurm_error("pyxis: --container-env: invalid format: %s", value);
            return -1;
        }
        if (args_env_holds(name))
            continue;
        grown = realloc(args.env, (args.env_len + 1) * sizeof(*grown));
        if (grown == NULL)
            return -1;
        args.env = grown;
        args.env[args.env_len++] = name;
    }
    return 0;
}

bool args_env_holds(const char *name)
{
    for (size_t i = 0; i < args.env_len; ++i)
        if (strcmp(args.env[i], name) == 0)
            return true;
    return false;
}

static int take_home(int val, const char *value, int remote)
{
    (void)value, (void)remote;
    return set_switch(&args.mount_home, val, "container-mount-home", "no-container-mount-home");
}

static int take_remap(int val, const char *value, int remote)
{
    (void)value, (void)remote;
    return set_switch(&args.remap_root, val, "container-remap-root", "no-container-remap-root");
}

static int take_writable(int val, const char *value, int remote)
{
    (void)value, (void)remote;
    return set_switch(&args.writable, val, "container-writable", "container-readonly");
}

static int take_entrypoint(int val, const char *value, int remote)
{
    (void)value, (void)remote;
    return set_switch(&args.entrypoint, val, "container-entrypoint", "no-container-entrypoint");
}

static int take_entrypoint_log(int val, const char *value, int remote)
{
    (void)value, (void)remote;
    args.entrypoint_log = val;
    return 0;
}

static struct spank_option options[] = {
    {"container-image", "PATH", "[pyxis] image: a squashfs file or a root directory", 1, 0, take_image},
    {"container-mounts", "SRC:DST[:FLAGS][,...]", "[pyxis] bind mounts, flags joined by +", 1, 0, take_mounts},
    {"container-workdir", "PATH", "[pyxis] working directory in the container", 1, 0, take_workdir},
    {"container-name", "NAME[:FLAG]", "[pyxis] keep the container under this name; FLAG: auto, create, exec, no_exec",
     1, 0, take_name},
    {"container-save", "PATH", "[pyxis] write the container to a squashfs file at the end", 1, 0, take_save},
    {"container-mount-home", NULL, "[pyxis] mount the home directory", 0, YES, take_home},
    {"no-container-mount-home", NULL, "[pyxis] do not mount the home directory", 0, NO, take_home},
    {"container-remap-root", NULL, "[pyxis] appear as root in the container", 0, YES, take_remap},
    {"no-container-remap-root", NULL, "[pyxis] keep the user id in the container", 0, NO, take_remap},
    {"container-writable", NULL, "[pyxis] make the container's file system writable", 0, YES, take_writable},
    {"container-readonly", NULL, "[pyxis] make the container's file system read-only", 0, NO, take_writable},
    {"container-entrypoint", NULL, "[pyxis] accepted and ignored", 0, YES, take_entrypoint},
    {"no-container-entrypoint", NULL, "[pyxis] accepted and ignored", 0, NO, take_entrypoint},
    {"container-entrypoint-log", NULL, "[pyxis] accepted and ignored", 0, YES, take_entrypoint_log},
    {"container-env", "NAME[,NAME...]", "[pyxis] variables whose host values beat the image's", 1, 0, take_env},
    SPANK_OPTIONS_TABLE_END,
};

int args_register(spank_t spank)
{
    for (struct spank_option *option = options; option->name != NULL; ++option) {
        spank_err_t rc = spank_option_register(spank, option);

        if (rc != ESPANK_SUCCESS) {
            slurm_error("pyxis: couldn't register option %s: %s", option->name, spank_strerror(rc));
            return -1;
        }
    }
    return 0;
}

static const char *variable(spank_t spank, const char *name, char *buffer, int size)
{
    if (spank_context() != S_CTX_REMOTE)
        return getenv(name);
    return spank_getenv(spank, name, buffer, size) == ESPANK_SUCCESS ? buffer : NULL;
}

static int truth(const char *text)
{
    static const char *const words[2][4] = {{"0", "false", "no", "n"}, {"1", "true", "yes", "y"}};

    for (int value = 0; value < 2; ++value)
        for (int i = 0; i < 4; ++i)
            if (strcmp(text, words[value][i]) == 0)
                return value;
    return UNSET;
}

/* PYXIS_CONTAINER_* stand in for options that the command line did not give. */
void args_from_environment(spank_t spank)
{
    const struct {
        const char *name;
        spank_opt_cb_f take;
        bool given, is_switch, inverted;
    } table[] = {
        {"PYXIS_CONTAINER_IMAGE", take_image, args.image != NULL, false, false},
        {"PYXIS_CONTAINER_MOUNTS", take_mounts, args.mounts_len > 0, false, false},
        {"PYXIS_CONTAINER_WORKDIR", take_workdir, args.workdir != NULL, false, false},
        {"PYXIS_CONTAINER_NAME", take_name, args.name != NULL, false, false},
        {"PYXIS_CONTAINER_SAVE", take_save, args.save != NULL, false, false},
        {"PYXIS_CONTAINER_ENV", take_env, args.env_len > 0, false, false},
        {"PYXIS_CONTAINER_MOUNT_HOME", take_home, args.mount_home != UNSET, true, false},
        {"PYXIS_CONTAINER_REMAP_ROOT", take_remap, args.remap_root != UNSET, true, false},
        {"PYXIS_CONTAINER_ENTRYPOINT", take_entrypoint, args.entrypoint != UNSET, true, false},
        {"PYXIS_CONTAINER_WRITABLE", take_writable, args.writable != UNSET, true, false},
        {"PYXIS_CONTAINER_READONLY", take_writable, args.writable != UNSET, true, true},
    };

    for (size_t i = 0; i < sizeof(table) / sizeof(*table); ++i) {
        char buffer[PATH_MAX];
        const char *value = table[i].given ? NULL : variable(spank, table[i].name, buffer, sizeof(buffer));

        if (value == NULL)
            continue;
        if (!table[i].is_switch)
            table[i].take(0, value, 0);
        else if (truth(value) != UNSET)
            table[i].take(truth(value) != table[i].inverted, NULL, 0);
    }
}

bool args_ask_for_container(void)
{
    const struct {
        bool given;
        const char *option;
    } table[] = {
        {args.mounts_len > 0, "--container-mounts"},
        {args.workdir != NULL, "--container-workdir"},
        {args.save != NULL, "--container-save"},
        {args.mount_home != UNSET, "--[no-]container-mount-home"},
        {args.remap_root != UNSET, "--[no-]container-remap-root"},
        {args.entrypoint != UNSET, "--[no-]container-entrypoint"},
        {args.entrypoint_log != UNSET, "--container-entrypoint-log"},
        {args.writable == NO, "--container-readonly"},
        {args.writable == YES, "--container-writable"},
    };

    if (args.image != NULL || args.name != NULL)
        return true;
    for (size_t i = 0; i < sizeof(table) / sizeof(*table); ++i)
        if (table[i].given)
            slurm_error("pyxis: ignoring %s because neither --container-image nor --container-name is set",
                        table[i].option);
    return false;
}
