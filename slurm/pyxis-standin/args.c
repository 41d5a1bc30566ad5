/* Options and their validation, in srun and again in slurmstepd; the messages are Pyxis's own. Slurm may call back
 * twice with the same value, so an equal value is not a second one. */
#include "pyxis.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct args args = {
    .mount_home = UNSET, .remap_root = UNSET, .writable = UNSET, .entrypoint = UNSET, .entrypoint_log = UNSET,
};

/* What an option's callback is told: up to SWITCHES the option takes a text, above that it is a switch, and even
 * numbers turn it on. */
enum option {
    IMAGE, MOUNTS, WORKDIR, NAME, SAVE, ENV, SWITCHES,
    HOME = SWITCHES, NO_HOME, REMAP, NO_REMAP, WRITABLE, READONLY, ENTRYPOINT, NO_ENTRYPOINT, LOG,
};

static int take(int val, const char *value, int remote);

static struct spank_option options[] = {
    {"container-image", "PATH", "[pyxis] image: a squashfs file or a root directory", 1, IMAGE, take},
    {"container-mounts", "SRC:DST[:FLAGS][,...]", "[pyxis] bind mounts, flags joined by +", 1, MOUNTS, take},
    {"container-workdir", "PATH", "[pyxis] working directory in the container", 1, WORKDIR, take},
    {"container-name", "NAME[:FLAG]", "[pyxis] keep the container; FLAG: auto, create, exec, no_exec", 1, NAME, take},
    {"container-save", "PATH", "[pyxis] write the container to a squashfs file at the end", 1, SAVE, take},
    {"container-env", "NAME[,NAME...]", "[pyxis] variables whose host values beat the image's", 1, ENV, take},
    {"container-mount-home", NULL, "[pyxis] mount the home directory", 0, HOME, take},
    {"no-container-mount-home", NULL, "[pyxis] do not mount the home directory", 0, NO_HOME, take},
    {"container-remap-root", NULL, "[pyxis] appear as root in the container", 0, REMAP, take},
    {"no-container-remap-root", NULL, "[pyxis] keep the user id in the container", 0, NO_REMAP, take},
    {"container-writable", NULL, "[pyxis] make the container's file system writable", 0, WRITABLE, take},
    {"container-readonly", NULL, "[pyxis] make the container's file system read-only", 0, READONLY, take},
    {"container-entrypoint", NULL, "[pyxis] accepted and ignored", 0, ENTRYPOINT, take},
    {"no-container-entrypoint", NULL, "[pyxis] accepted and ignored", 0, NO_ENTRYPOINT, take},
    {"container-entrypoint-log", NULL, "[pyxis] accepted and ignored", 0, LOG, take},
    SPANK_OPTIONS_TABLE_END,
};

static const char *title(int option)
{
    for (const struct spank_option *known = options; known->name != NULL; ++known)
        if (known->val == option)
            return known->name;
    return "";
}

static int set_text(char **field, int option, const char *value)
{
    if (*field != NULL && strcmp(*field, value) != 0) {
        slurm_error("pyxis: --%s specified multiple times", title(option));
        return -1;
    }
    free(*field);
    *field = strdup(value);
    return *field == NULL ? -1 : 0;
}

static int set_switch(int *field, int option)
{
    int value = (option - SWITCHES) % 2 == 0 ? YES : NO;

    if (*field != UNSET && *field != value) {
        option -= value == NO;
        slurm_error("pyxis: both --%s and --%s were specified", title(option), title(option + 1));
        return -1;
    }
    *field = value;
    return 0;
}

static int take_name(const char *value)
{
    static const char *const known[] = {"auto", "create", "exec", "no_exec"};
    char *name = strdup(value), *flag = name == NULL ? NULL : strchr(name, ':');
    int rc = -1;

    if (flag != NULL)
        *flag++ = '\0';
    if (flag == NULL || *flag == '\0')
        flag = "auto";
    for (size_t i = 0; i < sizeof(known) / sizeof(*known); ++i)
        if (strcmp(flag, known[i]) == 0)
            rc = 0;
    if (name == NULL || *name == '\0') {
        slurm_error("pyxis: --container-name: empty name");
        rc = -1;
    } else if (rc < 0)
        slurm_error("pyxis: --container-name: flag must be \"auto\", \"create\", \"exec\" or \"no_exec\"");
    else
        rc = set_text(&args.name, NAME, name) | set_text(&args.name_flag, NAME, flag);
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

static int take_mounts(const char *value)
{
    char *copy = strdup(value), *rest = copy, *entry;
    int rc = copy == NULL ? -1 : 0;

    while (rc == 0 && (entry = strsep(&rest, ",")) != NULL)
        rc = take_mount(entry);
    free(copy);
    return rc;
}

static int take_env(const char *value)
{
    char *rest = strdup(value), *name, **grown; /* never freed: the names point into it */

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

static int take(int val, const char *value, int remote)
{
    (void)remote;
    if (val < SWITCHES && (value == NULL || *value == '\0')) {
        slurm_error("pyxis: --%s: argument required", title(val));
        return -1;
    }
    if (val == SAVE && value[strlen(value) - 1] == '/') {
        slurm_error("pyxis: --container-save: target is a directory");
        return -1;
    }
    switch (val) {
    case IMAGE: return set_text(&args.image, val, value);
    case MOUNTS: return take_mounts(value);
    case WORKDIR: return set_text(&args.workdir, val, value);
    case NAME: return take_name(value);
    case SAVE: return set_text(&args.save, val, value);
    case ENV: return take_env(value);
    case HOME: case NO_HOME: return set_switch(&args.mount_home, val);
    case REMAP: case NO_REMAP: return set_switch(&args.remap_root, val);
    case WRITABLE: case READONLY: return set_switch(&args.writable, val);
    case ENTRYPOINT: case NO_ENTRYPOINT: return set_switch(&args.entrypoint, val);
    case LOG: return set_switch(&args.entrypoint_log, val);
    }
    return -1;
}

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
        int option;
        bool given;
    } table[] = {
        {"PYXIS_CONTAINER_IMAGE", IMAGE, args.image != NULL},
        {"PYXIS_CONTAINER_MOUNTS", MOUNTS, args.mounts_len > 0},
        {"PYXIS_CONTAINER_WORKDIR", WORKDIR, args.workdir != NULL},
        {"PYXIS_CONTAINER_NAME", NAME, args.name != NULL},
        {"PYXIS_CONTAINER_SAVE", SAVE, args.save != NULL},
        {"PYXIS_CONTAINER_ENV", ENV, args.env_len > 0},
        {"PYXIS_CONTAINER_MOUNT_HOME", HOME, args.mount_home != UNSET},
        {"PYXIS_CONTAINER_REMAP_ROOT", REMAP, args.remap_root != UNSET},
        {"PYXIS_CONTAINER_ENTRYPOINT", ENTRYPOINT, args.entrypoint != UNSET},
        {"PYXIS_CONTAINER_WRITABLE", WRITABLE, args.writable != UNSET},
        {"PYXIS_CONTAINER_READONLY", READONLY, args.writable != UNSET},
    };
    char buffer[PATH_MAX];

    for (size_t i = 0; i < sizeof(table) / sizeof(*table); ++i) {
        const char *value = table[i].given ? NULL : variable(spank, table[i].name, buffer, sizeof(buffer));

        if (value == NULL)
            continue;
        if (table[i].option < SWITCHES)
            take(table[i].option, value, 0);
        else if (truth(value) != UNSET) /* the opposite of a switch is its neighbour */
            take(truth(value) == YES ? table[i].option : table[i].option ^ 1, NULL, 0);
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
