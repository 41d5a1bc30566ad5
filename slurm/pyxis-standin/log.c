#include "pyxis.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

static int fd = -1;

void log_reset(void)
{
    if (fd >= 0)
        close(fd);
    fd = memfd_create("enroot-log", MFD_CLOEXEC);
}

int log_fd(void)
{
    return fd;
}

void log_line(const char *format, ...)
{
    va_list list;

    va_start(list, format);
    if (fd >= 0)
        vdprintf(fd, format, list);
    va_end(list);
    if (fd >= 0)
        dprintf(fd, "\n");
}

void log_show(void)
{
    char *line = NULL;
    size_t size = 0;
    ssize_t len;
    FILE *file;

    slurm_error("pyxis: printing enroot log file:");
    if (fd < 0 || lseek(fd, 0, SEEK_SET) < 0 || (file = fdopen(fd, "r")) == NULL)
        return;
    while ((len = getline(&line, &size, file)) > 0) {
        if (line[len - 1] == '\n')
            line[len - 1] = '\0';
        slurm_error("pyxis:     %s", line);
    }
    free(line);
    fclose(file);
    fd = -1;
}
