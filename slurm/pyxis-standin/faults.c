/* A fault is a file of that name in the faults directory:
 *
 *     line 1: words in any order: a number is seconds, `once` or `xN` limits how often it strikes
 *     line 2: if not empty, text that must occur in the container's name or in the image's path
 *
 * A use is counted by creating a file exclusively, so that of many steps at once exactly N are struck; the
 * count belongs to the file's inode and time, so a file written anew counts anew. */
#include "pyxis.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

static bool use_one(const char *fault, const struct stat *st, long limit)
{
    char path[PATH_MAX];

    for (long n = 1; n <= limit; ++n) {
        int fd;

        snprintf(path, sizeof(path), "%s/.%s.%ju.%jd%09ld.%ld", config.faults, fault, (uintmax_t)st->st_ino,
                 (intmax_t)st->st_mtim.tv_sec, st->st_mtim.tv_nsec, n);
        fd = open(path, O_CREAT | O_EXCL | O_WRONLY | O_CLOEXEC, 0600);
        if (fd >= 0) {
            close(fd);
            return true;
        }
        if (errno != EEXIST) {
            slurm_error("pyxis: fault %s not injected: %s: %s", fault, path, strerror(errno));
            return false;
        }
    }
    return false;
}

static bool concerns(const char *text, const struct container *container)
{
    if (*text == '\0' || strstr(container->name, text) != NULL)
        return true;
    return args.image != NULL && strstr(args.image, text) != NULL;
}

bool fault_take(const char *fault, const struct container *container, double *seconds)
{
    char path[PATH_MAX], text[1024], *line, *rest, *word, *end;
    long limit = -1;
    struct stat st;
    ssize_t len;
    int fd;

    *seconds = 0;
    snprintf(path, sizeof(path), "%s/%s", config.faults, fault);
    fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return false;
    len = fstat(fd, &st) == 0 ? read(fd, text, sizeof(text) - 1) : -1;
    close(fd);
    if (len < 0)
        return false;
    text[len] = '\0';

    rest = text;
    line = strsep(&rest, "\n");
    for (char *save = NULL; (word = strtok_r(line, " \t", &save)) != NULL; line = NULL) {
        if (strcmp(word, "once") == 0)
            limit = 1;
        else if (*word == 'x')
            limit = strtol(word + 1, NULL, 10);
        else
            *seconds = strtod(word, &end);
    }
    word = rest == NULL ? "" : strsep(&rest, "\n");
    return concerns(word, container) && (limit < 0 || use_one(fault, &st, limit));
}

void fault_sleep(double seconds)
{
    struct timespec left = {.tv_sec = (time_t)seconds, .tv_nsec = (long)((seconds - (double)(time_t)seconds) * 1e9)};

    while (nanosleep(&left, &left) < 0 && errno == EINTR)
        ;
}

void fault_delay(const char *fault, const struct container *container)
{
    double seconds;

    if (fault_take(fault, container, &seconds))
        fault_sleep(seconds);
}
