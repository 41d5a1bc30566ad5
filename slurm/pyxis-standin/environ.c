/* The environment inside: the caller's, overridden by the image's /etc/environment and by a login's variables,
 * except for the names given to --container-env. */
#include "pyxis.h"

#include <ctype.h>
#include <fcntl.h>
#include <pwd.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int override(spank_t spank, const char *name, const char *value)
{
    spank_err_t rc = spank_setenv(spank, name, value, !args_env_holds(name));

    if (rc == ESPANK_SUCCESS || rc == ESPANK_ENV_EXISTS)
        return 0;
    slurm_error("pyxis: failed to set %s: %s", name, spank_strerror(rc));
    return -1;
}

/* Cut a line into name and value: "NAME=VALUE", with or without quotes around the value. */
static bool parse_line(char *line, char **name, char **value)
{
    size_t len;

    line[strcspn(line, "\n")] = '\0';
    while (isspace((unsigned char)*line))
        ++line;
    *name = line;
    *value = strchr(line, '=');
    if (*value == NULL || *value == line || isdigit((unsigned char)*line) || strncmp(line, "ENROOT_", 7) == 0)
        return false;
    *(*value)++ = '\0';
    for (const char *c = line; *c != '\0'; ++c)
        if (!isalnum((unsigned char)*c) && *c != '_')
            return false;
    len = strlen(*value);
    if (len >= 2 && (**value == '"' || **value == '\'') && ((*value)[len - 1] == '"' || (*value)[len - 1] == '\'')) {
        (*value)[len - 1] = '\0';
        ++*value;
    }
    return true;
}

static int image_environment(spank_t spank, const struct container *container, bool *has_path)
{
    char path[PATH_MAX + 32], *line = NULL, *name, *value;
    size_t size = 0;
    int rc = 0;
    FILE *file;

    snprintf(path, sizeof(path), "%s/etc/environment", container->rootfs);
    file = fopen(path, "re");
    while (file != NULL && rc == 0 && getline(&line, &size, file) > 0) {
        if (!parse_line(line, &name, &value))
            continue;
        *has_path |= strcmp(name, "PATH") == 0;
        rc = override(spank, name, value);
    }
    free(line);
    if (file != NULL)
        fclose(file);
    return rc;
}

const char *environ_home(const struct container *container)
{
    const struct passwd *user = getpwuid(args.remap_root == YES ? 0 : container->uid);

    if (args.mount_home == YES && args.remap_root != YES)
        return container->home;
    return user != NULL ? user->pw_dir : "/";
}

int environ_apply(spank_t spank, const struct container *container)
{
    static const char *const locale[] = {"LANG", "LANGUAGE", "LC_ALL"};
    const struct passwd *user = getpwuid(args.remap_root == YES ? 0 : container->uid);
    bool has_path = false;

    for (size_t i = 0; i < sizeof(locale) / sizeof(*locale); ++i)
        if (!args_env_holds(locale[i]))
            spank_unsetenv(spank, locale[i]);
    if (user != NULL &&
        (override(spank, "HOME", environ_home(container)) < 0 || override(spank, "USER", user->pw_name) < 0 ||
         override(spank, "SHELL", "/bin/sh") < 0))
        return -1;
    if (image_environment(spank, container, &has_path) < 0)
        return -1;
    return has_path ? 0 : override(spank, "PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin");
}
