// tempdir.h: a directory of a test's own, with files written and shortened in one call.
//
// Every function fails the running cmocka test when the file system does not do as asked.
#ifndef TANDEM_TESTS_TEMPDIR_H
#define TANDEM_TESTS_TEMPDIR_H

#include <stddef.h>

typedef struct tempdir {
    char path[256];
} tempdir;

tempdir tempdir_make(void);
void tempdir_remove(const tempdir *dir); // with the files in it

void tempdir_write(const tempdir *dir, const char *file, const void *bytes, size_t n_bytes);
void tempdir_write_text(const tempdir *dir, const char *file, const char *text);
void tempdir_truncate(const tempdir *dir, const char *file, size_t n_bytes);

// A safetensors file from a JSON header and n_data zero bytes.
void tempdir_write_safetensors(const tempdir *dir, const char *file, const char *header,
                               size_t n_data);

#endif
