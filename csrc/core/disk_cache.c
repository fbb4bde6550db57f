/* SPDX-License-Identifier: Apache-2.0 */
#define _POSIX_C_SOURCE 200809L /* fdopen */
#include "core/disk_cache.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "core/fork.h"
#include "core/private_file.h"
#include "core/status.h"

#define PATH_BYTES 4096
#define NAME_BYTES 128
#define REASON_BYTES (PATH_BYTES + 256)

/* Before the bytes. */
typedef struct cache_header {
    char magic[8];
    uint64_t size, hash;
} cache_header;

static const char cache_magic[8] = {'T', 'E', 'C', 'O', 'D', 'E', '0', '1'};

TE_PROCESS_LOCK(lock);
static char folder[PATH_BYTES]; /* guarded by lock; "": nothing is kept */

te_status te_cache_set_folder(const char *path)
{
    const size_t length = path != NULL ? strlen(path) : 0;
    char why[REASON_BYTES] = "";
    int kept = 1;
    TE_FAIL_IF(length >= PATH_BYTES, TE_ERROR_INVALID,
               "cache_dir has %zu bytes, at most %d are possible", length, PATH_BYTES - 1);
    if (length > 0) {
        const int opened = te_private_folder(path, why, sizeof why);
        if (opened >= 0) (void)close(opened);
        kept = why[0] == '\0';
    }
    (void)pthread_mutex_lock(&lock);
    if (length > 0 && kept) memcpy(folder, path, length);
    folder[kept ? length : 0] = '\0';
    (void)pthread_mutex_unlock(&lock);
    if (kept) return TE_OK;
    return TE_FAIL(TE_ERROR_STATE, "nothing is kept on disk: cache_dir %s", why);
}

static uint64_t hash_bytes(uint64_t hash, const void *data, size_t size)
{
    const unsigned char *bytes = data;
    for (size_t i = 0; i < size; i++) hash = (hash ^ bytes[i]) * 0x100000001b3ULL;
    return hash;
}

te_cache_key te_cache_key_of(const char *kind)
{
    return (te_cache_key){kind, {0xcbf29ce484222325ULL, 0x9ae16a3b2f90404fULL}};
}

void te_cache_key_add(te_cache_key *key, const void *data, size_t size)
{
    for (int i = 0; i < 2; i++) key->hashes[i] = hash_bytes(key->hashes[i], data, size);
}

/* The file's name in the folder, which is opened: a descriptor, or -1 where nothing is kept. */
static int open_folder(const te_cache_key *key, char name[NAME_BYTES])
{
    char path[PATH_BYTES], why[REASON_BYTES];
    (void)pthread_mutex_lock(&lock);
    memcpy(path, folder, sizeof path);
    (void)pthread_mutex_unlock(&lock);
    if (path[0] == '\0') return -1;
    (void)mkdir(path, S_IRWXU);
    (void)snprintf(name, NAME_BYTES, "%.32s-%016llx%016llx.bin", key->kind,
                   (unsigned long long)key->hashes[0], (unsigned long long)key->hashes[1]);
    return te_private_folder(path, why,
                             sizeof why); /* it may have changed hands since it was set */
}

int te_cache_read(const te_cache_key *key, void **data, size_t *size)
{
    char name[NAME_BYTES];
    cache_header header;
    struct stat status;
    FILE *file;
    int at, opened, good = 0;
    *data = NULL;
    at = open_folder(key, name);
    if (at < 0) return 0;
    opened = te_private_open(at, name);
    (void)close(at);
    file = opened < 0 ? NULL : fdopen(opened, "rb");
    if (file == NULL) {
        if (opened >= 0) (void)close(opened);
        return 0;
    }
    if (fstat(opened, &status) == 0 && fread(&header, sizeof header, 1, file) == 1 &&
        memcmp(header.magic, cache_magic, sizeof cache_magic) == 0 && header.size > 0 &&
        status.st_size > (off_t)sizeof header &&
        (uint64_t)status.st_size - sizeof header == header.size) {
        *size = (size_t)header.size;
        *data = malloc(*size);
        good = *data != NULL && fread(*data, 1, *size, file) == *size &&
               hash_bytes(0, *data, *size) == header.hash;
    }
    (void)fclose(file);
    if (!good) {
        free(*data);
        *data = NULL;
    }
    return good;
}

void te_cache_write(const te_cache_key *key, const void *data, size_t size)
{
    char name[NAME_BYTES];
    cache_header header = {.size = size, .hash = hash_bytes(0, data, size)};
    const int at = open_folder(key, name);
    if (at < 0) return;
    memcpy(header.magic, cache_magic, sizeof header.magic);
    (void)te_private_replace(at, name, (const void *const[2]){&header, data},
                             (const size_t[2]){sizeof header, size});
    (void)close(at);
}
