/* SPDX-License-Identifier: Apache-2.0 */
#include "cuda/disk_cache.h"

#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "core/fork.h"
#include "core/status.h"

#define PATH_BYTES 4096
#define NAME_BYTES 128

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
    if (length >= PATH_BYTES - NAME_BYTES) {
        return TE_FAIL(TE_ERROR_INVALID, "cache_dir has %zu bytes, at most %d are possible", length,
                       PATH_BYTES - NAME_BYTES - 1);
    }
    (void)pthread_mutex_lock(&lock);
    if (length > 0) memcpy(folder, path, length);
    folder[length] = '\0';
    (void)pthread_mutex_unlock(&lock);
    return TE_OK;
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

/* Path of the file, "" where nothing is kept. */
static void path_of(const te_cache_key *key, char path[PATH_BYTES])
{
    path[0] = '\0';
    (void)pthread_mutex_lock(&lock);
    if (folder[0] != '\0') {
        (void)mkdir(folder, 0700);
        (void)snprintf(path, PATH_BYTES, "%.*s/%.32s-%016llx%016llx.bin", PATH_BYTES - NAME_BYTES,
                       folder, key->kind, (unsigned long long)key->hashes[0],
                       (unsigned long long)key->hashes[1]);
    }
    (void)pthread_mutex_unlock(&lock);
}

int te_cache_read(const te_cache_key *key, void **data, size_t *size)
{
    char path[PATH_BYTES];
    cache_header header;
    struct stat status;
    FILE *file;
    int good = 0;
    *data = NULL;
    path_of(key, path);
    file = path[0] != '\0' ? fopen(path, "rb") : NULL;
    if (file == NULL) return 0;
    if (fstat(fileno(file), &status) == 0 && fread(&header, sizeof header, 1, file) == 1 &&
        memcmp(header.magic, cache_magic, sizeof cache_magic) == 0 && header.size > 0 &&
        (uint64_t)status.st_size == header.size + sizeof header) {
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
    static atomic_uint writes;
    char path[PATH_BYTES], scratch[PATH_BYTES + 48];
    cache_header header = {.size = size, .hash = hash_bytes(0, data, size)};
    FILE *file;
    int good;
    path_of(key, path);
    if (path[0] == '\0') return;
    memcpy(header.magic, cache_magic, sizeof header.magic);
    (void)snprintf(scratch, sizeof scratch, "%s.%ld.%u.tmp", path, (long)getpid(),
                   atomic_fetch_add(&writes, 1)); /* two devices may make the same at a time */
    file = fopen(scratch, "wb");
    if (file == NULL) return;
    good = fwrite(&header, sizeof header, 1, file) == 1 && fwrite(data, 1, size, file) == size;
    good = fclose(file) == 0 && good;
    if (!good || rename(scratch, path) != 0) (void)remove(scratch);
}
