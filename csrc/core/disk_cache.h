/* SPDX-License-Identifier: Apache-2.0
 *
 * disk_cache.h - what took long to make and is kept between processes: a file for each thing, named
 * by a hash of all that it depends on. Whatever goes wrong here only costs the making. Folder and
 * files are private (private_file.h): what is read becomes code.
 */
#ifndef TE_CORE_DISK_CACHE_H
#define TE_CORE_DISK_CACHE_H

#include <stddef.h>
#include <stdint.h>

#include "transformer_engine.h"

/* A name in the making. */
typedef struct te_cache_key {
    const char *kind;   /* the file's name begins with it */
    uint64_t hashes[2]; /* FNV-1a, from two starts */
} te_cache_key;

te_cache_key te_cache_key_of(const char *kind);
void te_cache_key_add(te_cache_key *key, const void *data, size_t size);

/* The folder (NULL or "": nothing is kept), which is made when it is first needed. INVALID where
 * its path is too long; STATE where it is there and not private: then nothing is kept. */
te_status te_cache_set_folder(const char *path);
/* Whole and undamaged bytes, which the caller frees; 0 where there are none. */
int te_cache_read(const te_cache_key *key, void **data, size_t *size);
/* Readers see all of it or nothing. */
void te_cache_write(const te_cache_key *key, const void *data, size_t size);

#endif
