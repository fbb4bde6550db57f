/* SPDX-License-Identifier: Apache-2.0
 *
 * library.h - vendor libraries opened at run time. Nothing is linked: what the process has loaded
 * already (torch's own) wins, whatever its version; two of one kind would each load their kernels.
 */
#ifndef TE_CUDA_LIBRARY_H
#define TE_CUDA_LIBRARY_H

#include <stddef.h>

#include "transformer_engine.h"

/* A symbol, and where its address goes in the table. */
typedef struct te_library_symbol {
    const char *name;
    size_t offset;
} te_library_symbol;

/* Opens the first of `sonames` (newest first, NULL at the end) that is loaded, else that can be,
 * and fills the table. DEVICE, with the loader's text, where there is none or it lacks a symbol. */
te_status te_library_open(const char *const *sonames, const te_library_symbol *symbols, int count,
                          void *table, void **library);

#define TE_LIBRARY_SYMBOL(name, table) {#name, offsetof(table, name)},

#endif
