// log.h: log lines to standard error, one write each, prefixed with time, level and process name.
//
// Thread: any. Never called on a step path.
#ifndef TANDEM_ENGINE_LOG_H
#define TANDEM_ENGINE_LOG_H

typedef enum log_level {
    LOG_LEVEL_ERROR,
    LOG_LEVEL_WARN,
    LOG_LEVEL_INFO,
    LOG_LEVEL_DEBUG
} log_level;

// Name shown in every line of this process, for example "router" or "attn0"; copied.
void log_set_name(const char *name);
void log_set_level(log_level level);

void log_line(log_level level, const char *format, ...) __attribute__((format(printf, 2, 3)));

#define log_error(...) log_line(LOG_LEVEL_ERROR, __VA_ARGS__)
#define log_warn(...) log_line(LOG_LEVEL_WARN, __VA_ARGS__)
#define log_info(...) log_line(LOG_LEVEL_INFO, __VA_ARGS__)
#define log_debug(...) log_line(LOG_LEVEL_DEBUG, __VA_ARGS__)

#endif
