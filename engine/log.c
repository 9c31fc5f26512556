#include "engine/log.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

static char process_name[32] = "tandem";
static log_level max_level = LOG_LEVEL_INFO;

void log_set_name(const char *name) {
    snprintf(process_name, sizeof process_name, "%s", name);
}

void log_set_level(log_level level) {
    max_level = level;
}

void log_line(log_level level, const char *format, ...) {
    static const char *const names[] = {"error", "warn", "info", "debug"};
    if (level > max_level)
        return;
    char line[2048];
    struct timespec now;
    struct tm utc;
    clock_gettime(CLOCK_REALTIME, &now);
    gmtime_r(&now.tv_sec, &utc);
    size_t n = strftime(line, sizeof line, "%Y-%m-%dT%H:%M:%S", &utc);
    n += (size_t)snprintf(line + n, sizeof line - n, ".%03ldZ %-5s %s: ", now.tv_nsec / 1000000,
                          names[level], process_name);
    va_list args;
    va_start(args, format);
    int m = vsnprintf(line + n, sizeof line - n - 1, format, args);
    va_end(args);
    if (m > 0)
        n += (size_t)m < sizeof line - n - 1 ? (size_t)m : sizeof line - n - 2;
    line[n++] = '\n';
    ssize_t written = write(STDERR_FILENO, line, n);
    (void)written; // a log that cannot be written has nowhere to say so
}
