#include "tests/support/tempdir.h"

#include <dirent.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

static void join(const tempdir *dir, const char *file, char *out, size_t n) {
    assert_true((size_t)snprintf(out, n, "%s/%s", dir->path, file) < n);
}

tempdir tempdir_make(void) {
    tempdir dir;
    const char *base = getenv("TMPDIR");
    snprintf(dir.path, sizeof dir.path, "%s/tandem-test-XXXXXX", base && *base ? base : "/tmp");
    assert_non_null(mkdtemp(dir.path));
    return dir;
}

void tempdir_remove(const tempdir *dir) {
    DIR *list = opendir(dir->path);
    assert_non_null(list);
    for (struct dirent *entry; (entry = readdir(list));) {
        char path[1024];
        if (strcmp(entry->d_name, ".") == 0 || strcmp(entry->d_name, "..") == 0)
            continue;
        join(dir, entry->d_name, path, sizeof path);
        assert_int_equal(unlink(path), 0);
    }
    closedir(list);
    assert_int_equal(rmdir(dir->path), 0);
}

void tempdir_write(const tempdir *dir, const char *file, const void *bytes, size_t n_bytes) {
    char path[1024];
    join(dir, file, path, sizeof path);
    FILE *out = fopen(path, "wb");
    assert_non_null(out);
    assert_int_equal(fwrite(bytes, 1, n_bytes, out), n_bytes);
    assert_int_equal(fclose(out), 0);
}

void tempdir_write_text(const tempdir *dir, const char *file, const char *text) {
    tempdir_write(dir, file, text, strlen(text));
}

void tempdir_truncate(const tempdir *dir, const char *file, size_t n_bytes) {
    char path[1024];
    join(dir, file, path, sizeof path);
    assert_int_equal(truncate(path, (off_t)n_bytes), 0);
}

void tempdir_write_safetensors(const tempdir *dir, const char *file, const char *header,
                               size_t n_data) {
    size_t length = strlen(header), total = 8 + length + n_data;
    unsigned char *bytes = calloc(1, total);
    assert_non_null(bytes);
    for (int i = 0; i < 8; i++)
        bytes[i] = (unsigned char)((uint64_t)length >> 8 * i);
    memcpy(bytes + 8, header, length);
    tempdir_write(dir, file, bytes, total);
    free(bytes);
}
