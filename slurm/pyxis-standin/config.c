#include "pyxis.h"

#include <stdio.h>
#include <string.h>

struct config config = {.data_path = "/var/lib/pyxis-standin/containers", .faults = "/var/lib/pyxis-standin/faults"};

static const char *value_of(const char *word, const char *key)
{
    size_t len = strlen(key);

    return strncmp(word, key, len) == 0 && word[len] == '=' ? word + len + 1 : NULL;
}

static int copy_path(char *to, size_t size, const char *from)
{
    return *from == '/' && (size_t)snprintf(to, size, "%s", from) < size ? 0 : -1;
}

static int parse_word(const char *word)
{
    const char *value;

    if ((value = value_of(word, "data_path")) != NULL)
        return copy_path(config.data_path, sizeof(config.data_path), value);
    if ((value = value_of(word, "faults")) != NULL)
        return copy_path(config.faults, sizeof(config.faults), value);
    if ((value = value_of(word, "scope")) != NULL || (value = value_of(word, "container_scope")) != NULL) {
        config.scope_job = strcmp(value, "job") == 0;
        return config.scope_job || strcmp(value, "global") == 0 ? 0 : -1;
    }
    return -1;
}

int config_parse(int argc, char **argv)
{
    for (int i = 0; i < argc; ++i) {
        if (parse_word(argv[i]) < 0) {
            slurm_error("pyxis: invalid configuration option: %s", argv[i]);
            return -1;
        }
    }
    return 0;
}
