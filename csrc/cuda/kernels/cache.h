/* SPDX-License-Identifier: Apache-2.0
 *
 * cache.h - parameters of the copies into and out of a cache of keys and values. Device pointers
 * are borrowed for the launch. Read by gcc, nvcc and NVRTC.
 */
#ifndef TE_CUDA_KERNELS_CACHE_H
#define TE_CUDA_KERNELS_CACHE_H

#include "cuda/device/types.h"

/* X(bytes of an element): te_cache_append_<bytes> and te_cache_gather_<bytes>. */
#define TE_CACHE_INSTANCES(X)                                                                      \
    X(2)                                                                                           \
    X(4)

enum { TE_CACHE_THREADS = 128 };

/* Heads [.., .., heads, channels], of tokens and of a cache's pages. */
typedef struct te_cache_heads {
    te_view4 tokens; /* [batch, sequence, ..]; packed tokens are one batch entry */
    te_view4 pages;  /* [pages, page_size, ..] */
    te_index channels;
    int aligned; /* every head begins at 16 bytes in both */
} te_cache_heads;

/* Grid: any number of blocks, which stride over the tokens. */
typedef struct te_cache_params {
    te_cache_heads key, value;
    const int *page_table;            /* [batch, table_pages], or NULL: page i is sequence i */
    const int *starts;                /* [batch]; NULL: 0 */
    const int *counts;                /* [batch]; NULL: all tokens */
    const int *cu_seqlens;            /* [batch + 1], or NULL: not packed */
    te_index batch, tokens, sequence; /* tokens: of all batch entries */
    te_index heads, pages, page_size, table_pages, table_stride;
} te_cache_params;

#endif
