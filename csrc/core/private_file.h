/* SPDX-License-Identifier: Apache-2.0
 *
 * private_file.h - files that nobody else can have written: what is read of them is loaded onto a
 * GPU or handed to a vendor library. A folder or file is private where its owner is this user or
 * root and nobody else may write to it. Symbolic links, FIFOs and devices are no files here, and
 * nothing waits for them.
 */
#ifndef TE_CORE_PRIVATE_FILE_H
#define TE_CORE_PRIVATE_FILE_H

#include <stddef.h>

/* Opens a private folder: a descriptor, which the caller closes, or -1. Then `why` has the reason
 * in one line, and is empty where there is nothing under that path. */
int te_private_folder(const char *path, char *why, size_t size);
/* The same of the folder that a file lies in, by the file's path, and the folder is made where
 * there is none; *name is the file's name in it, a part of `path`. */
int te_private_folder_of(const char *path, const char **name, char *why, size_t size);
/* Opens a private file of a folder to read it: a descriptor, which the caller closes, or -1. */
int te_private_open(int folder, const char *name);
/* Writes a file anew, for its owner alone: readers see all of it, old or new. The content comes in
 * two parts. 1 where it is done. */
int te_private_replace(int folder, const char *name, const void *const parts[2],
                       const size_t sizes[2]);
/* Adds to a private file, or to a new one, by one write. 1 where it is done. */
int te_private_append(int folder, const char *name, const void *data, size_t size);

#endif
