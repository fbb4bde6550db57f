/* SPDX-License-Identifier: Apache-2.0
 *
 * test_disk_cache.c - the cache on disk reads what it wrote, and no file that somebody else can
 * have written; nor does it write to one, or wait for one. As root it also meets files of others.
 * The headers of the library's inside are what nothing public leads to without a GPU.
 */
#define _XOPEN_SOURCE 700 /* mkdtemp, mkfifo */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include "../../csrc/core/disk_cache.h"
#include "../../csrc/core/private_file.h"
#include "testing.h"

enum { STRANGER = 12345, SECONDS = 60, PATH = 512 };

static const char text[] = "device code";
static char folder[PATH], path[2 * PATH], other[2 * PATH];

/* An alarm ends a test that waits for a FIFO. */
static void late(int signal)
{
    static const char said[] = "the cache waits for a file\n";
    (void)signal;
    (void)!write(STDERR_FILENO, said, sizeof said - 1);
    _exit(EXIT_FAILURE);
}

static te_cache_key key_of(const char *what)
{
    te_cache_key key = te_cache_key_of("test");
    te_cache_key_add(&key, what, strlen(what));
    return key;
}

/* A file of a folder, in `path`; how many files there are. */
static int find_in(const char *where)
{
    DIR *listed = opendir(where);
    int count = 0;
    for (struct dirent *entry; listed != NULL && (entry = readdir(listed)) != NULL;) {
        if (strcmp(entry->d_name, ".") == 0 || strcmp(entry->d_name, "..") == 0) continue;
        (void)snprintf(path, sizeof path, "%s/%s", where, entry->d_name);
        count++;
    }
    if (listed != NULL) (void)closedir(listed);
    return count;
}

static int find_files(void)
{
    return find_in(folder);
}

static void remove_all(const char *where)
{
    while (find_in(where) > 0) {
        if (remove(path) != 0) break;
    }
}

/* 1 where the cache gives what was written. */
static int reads(const char *what, const char *expected)
{
    const te_cache_key key = key_of(what);
    void *data;
    size_t size;
    int good = te_cache_read(&key, &data, &size);
    if (good && (size != strlen(expected) || memcmp(data, expected, size) != 0)) good = -1;
    free(data);
    return good;
}

static void writes(const char *what, const char *content)
{
    const te_cache_key key = key_of(what);
    te_cache_write(&key, content, strlen(content));
}

static mode_t mode_of(const char *name)
{
    struct stat status = {0};
    (void)lstat(name, &status);
    return status.st_mode & 07777U;
}

/* A folder with one good file, whose path is `path`. */
static void begin(test_device *t, const char *name)
{
    t->running = name;
    remove_all(folder);
    (void)chmod(folder, 0700);
    TEST_OK(t, te_cache_set_folder(folder));
    writes("a", text);
    TEST_CHECK(t, find_files() == 1 && reads("a", text) == 1, "%s", path);
}

static void test_written_and_read(test_device *t)
{
    begin(t, "written and read");
    TEST_CHECK(t, mode_of(path) == 0600, "mode %o", (unsigned)mode_of(path));
    TEST_CHECK(t, reads("b", text) == 0, "what was not written");
    writes("a", "another");
    TEST_CHECK(t, find_files() == 1 && reads("a", "another") == 1, "written anew");
    TEST_OK(t, te_cache_set_folder(NULL));
    writes("b", text);
    TEST_CHECK(t, find_files() == 1 && reads("a", "another") == 0, "without a folder");
}

/* Bytes of the good file changed, or cut off. */
static void test_damaged(test_device *t)
{
    for (int at = 0; at < 24 + (int)strlen(text); at++) {
        char byte = 0;
        int file;
        begin(t, "a byte is changed");
        file = open(path, O_RDWR);
        TEST_CHECK(t, pread(file, &byte, 1, at) == 1, "byte %d", at);
        byte = (char)(byte ^ 1);
        TEST_CHECK(t, pwrite(file, &byte, 1, at) == 1 && close(file) == 0, "byte %d", at);
        TEST_CHECK(t, reads("a", text) == 0, "byte %d", at);
        begin(t, "cut off");
        TEST_CHECK(t, truncate(path, at) == 0 && reads("a", text) == 0, "at byte %d", at);
    }
}

static void test_modes(test_device *t)
{
    static const mode_t modes[] = {0666, 0620, 0602, 0777};
    for (size_t i = 0; i < sizeof modes / sizeof *modes; i++) {
        begin(t, "a file that others may write to");
        TEST_CHECK(t, chmod(path, modes[i]) == 0 && reads("a", text) == 0, "%o",
                   (unsigned)modes[i]);
        writes("a", text);
        TEST_CHECK(t, mode_of(path) == 0600 && reads("a", text) == 1, "replaced");
    }
    for (size_t i = 0; i < sizeof modes / sizeof *modes; i++) {
        begin(t, "a folder that others may write to");
        TEST_CHECK(t, chmod(folder, modes[i] | 0100U) == 0, "chmod");
        TEST_CHECK(t, reads("a", text) == 0, "it has changed since: %o", (unsigned)modes[i]);
        writes("b", text);
        TEST_CHECK(t, find_files() == 1, "written to it");
        TEST_CHECK(t, te_cache_set_folder(folder) == TE_ERROR_STATE, "%o", (unsigned)modes[i]);
        TEST_CHECK(t, strstr(te_last_error(), "others may write to it (mode ") != NULL, "%s",
                   te_last_error());
        (void)chmod(folder, 0700);
        TEST_CHECK(t, reads("a", text) == 0, "nothing is kept once it was refused");
    }
}

static void test_owners(test_device *t)
{
    if (geteuid() != 0) return; /* only root can give files away */
    begin(t, "a file of somebody else");
    TEST_CHECK(t, chown(path, STRANGER, STRANGER) == 0 && reads("a", text) == 0, "read");
    begin(t, "a folder of somebody else");
    TEST_CHECK(t, chown(folder, STRANGER, STRANGER) == 0 && reads("a", text) == 0, "read");
    writes("b", text);
    TEST_CHECK(t, find_files() == 1, "written to it");
    TEST_CHECK(t, te_cache_set_folder(folder) == TE_ERROR_STATE, "set");
    TEST_CHECK(t, strstr(te_last_error(), "it belongs to user 12345") != NULL, "%s",
               te_last_error());
    (void)chown(folder, 0, 0);
}

/* Whatever lies where the file should be is not followed, written to or waited for. */
static void test_kinds(test_device *t)
{
    struct stat status;
    begin(t, "a link");
    (void)snprintf(other, sizeof other, "%s-aside", folder);
    TEST_CHECK(t, rename(path, other) == 0 && symlink(other, path) == 0, "link");
    TEST_CHECK(t, reads("a", text) == 0, "read through a link");
    writes("a", "another");
    TEST_CHECK(t,
               reads("a", "another") == 1 && lstat(path, &status) == 0 && S_ISREG(status.st_mode),
               "the link is replaced");
    TEST_CHECK(t, remove(path) == 0 && rename(other, path) == 0 && reads("a", text) == 1,
               "what it led to is as it was");
    begin(t, "a FIFO");
    TEST_CHECK(t, remove(path) == 0 && mkfifo(path, 0600) == 0 && reads("a", text) == 0, "read");
    writes("a", text);
    TEST_CHECK(t, reads("a", text) == 1, "it is replaced");
    begin(t, "a folder");
    TEST_CHECK(t, remove(path) == 0 && mkdir(path, 0700) == 0 && reads("a", text) == 0, "read");
    writes("a", text);
    TEST_CHECK(t, find_files() == 1 && reads("a", text) == 0, "no scratch file is left");
}

static void test_folders(test_device *t)
{
    static char far[5000];
    begin(t, "folders");
    TEST_CHECK(t, te_cache_set_folder(path) == TE_ERROR_STATE, "a file");
    memset(far, 'x', sizeof far - 1);
    TEST_CHECK(t, te_cache_set_folder(far) == TE_ERROR_INVALID, "a path that is too long");
    (void)snprintf(other, sizeof other, "%s/new", folder);
    TEST_OK(t, te_cache_set_folder(other));
    TEST_CHECK(t, access(other, F_OK) != 0 && errno == ENOENT, "made before it is needed");
    writes("a", text);
    TEST_CHECK(t, mode_of(other) == 0700 && reads("a", text) == 1, "made");
    writes("a", "");
    TEST_CHECK(t, reads("a", "") == 0, "nothing is no content");
    remove_all(other);
    remove_all(folder);
}

/* The file of the tuner: lines that are added. */
static void test_appended(test_device *t)
{
    const char *name;
    char why[PATH * 3], read_back[8] = "";
    int at, file;
    begin(t, "appended");
    (void)snprintf(other, sizeof other, "%s/lines", folder);
    at = te_private_folder_of(other, &name, why, sizeof why);
    TEST_CHECK(t, at >= 0 && strcmp(name, "lines") == 0, "%s", why);
    TEST_CHECK(t, te_private_append(at, name, "ab\n", 3) && te_private_append(at, name, "c\n", 2),
               "appended");
    file = te_private_open(at, name);
    TEST_CHECK(t, read(file, read_back, 7) == 5 && strcmp(read_back, "ab\nc\n") == 0, "read");
    (void)close(file);
    TEST_CHECK(t, chmod(other, 0666) == 0 && !te_private_append(at, name, "d\n", 2), "mode 666");
    TEST_CHECK(t, te_private_open(at, name) < 0, "mode 666 is read");
    (void)chmod(other, 0600);
    TEST_CHECK(t, symlink(other, path) != 0 && remove(path) == 0 && symlink(other, path) == 0,
               "link");
    TEST_CHECK(t, !te_private_append(at, strrchr(path, '/') + 1, "d\n", 2), "through a link");
    TEST_CHECK(t, remove(path) == 0 && mkfifo(path, 0600) == 0, "FIFO");
    TEST_CHECK(t, !te_private_append(at, strrchr(path, '/') + 1, "d\n", 2), "to a FIFO");
    (void)close(at);
}

int main(void)
{
    test_device t = {.running = "main"};
    char made[] = "/tmp/te_cache_XXXXXX";
    (void)signal(SIGALRM, late);
    (void)alarm(SECONDS);
    if (mkdtemp(made) == NULL) return EXIT_FAILURE;
    (void)snprintf(folder, sizeof folder, "%s", made);
    test_written_and_read(&t);
    test_damaged(&t);
    test_modes(&t);
    test_owners(&t);
    test_kinds(&t);
    test_folders(&t);
    test_appended(&t);
    remove_all(folder);
    (void)rmdir(folder);
    return t.failures == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}
