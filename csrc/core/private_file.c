/* SPDX-License-Identifier: Apache-2.0 */
#define _POSIX_C_SOURCE 200809L /* openat, fsync */
#include "core/private_file.h"

#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

/* No link is followed, no FIFO waited for, no child inherits it. */
#define SAFELY (O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC)
#define RANDOM_BYTES 16

static int is_own(const struct stat *status)
{
    return status->st_uid == geteuid() || status->st_uid == 0;
}

static int is_private(const struct stat *status)
{
    return is_own(status) && (status->st_mode & (S_IWGRP | S_IWOTH)) == 0;
}

int te_private_folder(const char *path, char *why, size_t size)
{
    struct stat status;
    int folder = open(path, O_RDONLY | O_DIRECTORY | O_NONBLOCK | O_CLOEXEC);
    why[0] = '\0';
    if (folder < 0 || fstat(folder, &status) != 0) {
        const int number = errno;
        char text[128] = "";
        if (folder < 0 && number == ENOENT) return -1;
        (void)strerror_r(number, text, sizeof text);
        (void)snprintf(why, size, "%s: %s", path, text);
    } else if (!is_own(&status)) {
        (void)snprintf(why, size, "%s: it belongs to user %lu, neither to this one (%lu) nor root",
                       path, (unsigned long)status.st_uid, (unsigned long)geteuid());
    } else if (!is_private(&status)) {
        (void)snprintf(why, size, "%s: others may write to it (mode %o): chmod go-w it", path,
                       (unsigned)(status.st_mode & 07777U));
    }
    if (why[0] == '\0') return folder;
    if (folder >= 0) (void)close(folder);
    return -1;
}

int te_private_folder_of(const char *path, const char **name, char *why, size_t size)
{
    char folder[4096] = ".";
    const char *slash = strrchr(path, '/');
    const size_t length = slash == NULL ? 1 : slash == path ? 1 : (size_t)(slash - path);
    *name = slash == NULL ? path : slash + 1;
    if (length >= sizeof folder) {
        (void)snprintf(why, size, "a path of %zu bytes, at most %zu are possible", length,
                       sizeof folder - 1);
        return -1;
    }
    if (slash != NULL) memcpy(folder, path, length);
    folder[length] = '\0';
    (void)mkdir(folder, S_IRWXU);
    return te_private_folder(folder, why, size);
}

/* Gives the descriptor back where it is one of a private regular file, else closes it. */
static int only_private(int file)
{
    struct stat status;
    if (file < 0) return -1;
    if (fstat(file, &status) == 0 && S_ISREG(status.st_mode) && is_private(&status)) return file;
    (void)close(file);
    return -1;
}

int te_private_open(int folder, const char *name)
{
    return only_private(openat(folder, name, O_RDONLY | SAFELY));
}

static int write_all(int file, const void *data, size_t size)
{
    const char *at = data;
    while (size > 0) {
        const ssize_t written = write(file, at, size);
        if (written < 0 && errno == EINTR) continue;
        if (written <= 0) return 0;
        at += written;
        size -= (size_t)written;
    }
    return 1;
}

/* A name that nobody can have made a file under beforehand. */
static int scratch_name(char *name, size_t size)
{
    unsigned char random[RANDOM_BYTES];
    int length = snprintf(name, size, ".");
    if (getrandom(random, sizeof random, 0) != (ssize_t)sizeof random) return 0;
    for (size_t i = 0; i < sizeof random; i++) {
        length += snprintf(name + length, size - (size_t)length, "%02x", random[i]);
    }
    (void)snprintf(name + length, size - (size_t)length, ".tmp");
    return 1;
}

int te_private_replace(int folder, const char *name, const void *const parts[2],
                       const size_t sizes[2])
{
    char scratch[2 * RANDOM_BYTES + 8];
    int file, good;
    if (!scratch_name(scratch, sizeof scratch)) return 0;
    file = openat(folder, scratch, O_WRONLY | O_CREAT | O_EXCL | SAFELY, S_IRUSR | S_IWUSR);
    if (file < 0) return 0;
    good = write_all(file, parts[0], sizes[0]) && write_all(file, parts[1], sizes[1]) &&
           fsync(file) == 0;
    good = close(file) == 0 && good;
    good = good && renameat(folder, scratch, folder, name) == 0;
    if (!good) (void)unlinkat(folder, scratch, 0);
    return good;
}

int te_private_append(int folder, const char *name, const void *data, size_t size)
{
    const int how = O_WRONLY | O_APPEND | O_CREAT | SAFELY;
    int file = only_private(openat(folder, name, how, S_IRUSR | S_IWUSR)), good;
    if (file < 0) return 0;
    good = write(file, data, size) == (ssize_t)size;
    return close(file) == 0 && good;
}
