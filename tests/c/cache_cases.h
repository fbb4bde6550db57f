/* SPDX-License-Identifier: Apache-2.0
 *
 * cache_cases.h - keys and values into a cache and out of it, against a walk over tokens.
 */
#ifndef TE_TESTS_CACHE_CASES_H
#define TE_TESTS_CACHE_CASES_H

#include <string.h>

#include "attention_cases.h"

enum { CACHE_BATCH = 3, CACHE_HEADS = 2, CACHE_PAGE = 4, CACHE_TABLE = 3, CACHE_TOKENS = 5 };

typedef struct cache_case {
    te_dtype dtype;
    int64_t channels[2], gap; /* of keys and values */
    int paged, packed, counts;
} cache_case;

/* Pages of a table that are no sequence's are in between; without one a page is a sequence. */
static const int32_t cache_table[CACHE_BATCH * CACHE_TABLE] = {9, 2, 4, 0, 7, 8, 1, 3, 6};
static const int32_t cache_starts[CACHE_BATCH] = {0, 3, 7}, cache_counts[CACHE_BATCH] = {5, 0, 2};
static const int32_t cache_limits[CACHE_BATCH + 1] = {1, 5, 5, 10};

static te_cache new_cache(test_device *t, const cache_case *c, test_matrix both[2])
{
    te_cache cache = {0};
    for (int i = 0; i < 2; i++) {
        const int64_t whole = CACHE_PAGE * CACHE_TABLE;
        const int64_t shape[4] = {c->paged ? 10 : CACHE_BATCH + 1, c->paged ? CACHE_PAGE : whole,
                                  CACHE_HEADS, c->channels[i]};
        both[i] = dense4(t, c->dtype, shape, c->gap);
        test_fill_random(t, &both[i], 2.0, 0);
    }
    cache.key = both[0].tensor;
    cache.value = both[1].tensor;
    if (c->paged) {
        cache.page_table = int32_vector(t, cache_table, CACHE_BATCH * CACHE_TABLE);
        cache.page_table.ndim = 2;
        memcpy(cache.page_table.shape, (int64_t[]){CACHE_BATCH, CACHE_TABLE}, 2 * sizeof(int64_t));
        memcpy(cache.page_table.strides, (int64_t[]){CACHE_TABLE, 1}, 2 * sizeof(int64_t));
    }
    return cache;
}

/* Row of the first head of token p of sequence i in the cache. */
static int64_t cache_row(const cache_case *c, int64_t i, int64_t p)
{
    const int64_t whole = CACHE_PAGE * CACHE_TABLE;
    int64_t token = i * whole + p;
    if (c->paged)
        token = cache_table[i * CACHE_TABLE + p / CACHE_PAGE] * CACHE_PAGE + p % CACHE_PAGE;
    return token * CACHE_HEADS;
}

static void check_heads(test_device *t, const test_matrix *to, int64_t row, const void *expected)
{
    for (int64_t h = 0; h < CACHE_HEADS; h++) {
        const size_t bytes = (size_t)to->columns * to->bytes;
        TEST_CHECK(t,
                   memcmp(test_at(to, row + h, 0), (const char *)expected + h * (int64_t)bytes,
                          bytes) == 0,
                   "heads of row %lld", (long long)(row + h));
    }
}

/* Bytes of the heads of a token, one after the other. */
static const void *heads_at(const test_matrix *from, int64_t row)
{
    static unsigned char bytes[CACHE_HEADS * 256 * sizeof(float)];
    for (int64_t h = 0; h < CACHE_HEADS; h++) {
        const size_t size = (size_t)from->columns * from->bytes;
        memcpy(bytes + (size_t)h * size, test_at(from, row + h, 0), size);
    }
    return bytes;
}

static void run_cache_append(test_device *t, const cache_case *c)
{
    test_matrix kept[2], new[2];
    te_cache_append_args args = {.size = sizeof args, .cache = new_cache(t, c, kept)};
    const int64_t lead[] = {c->packed ? 1 : CACHE_BATCH, c->packed ? 11 : CACHE_TOKENS};
    te_tensor *const given[] = {&args.key, &args.value};
    for (int i = 0; i < 2; i++) {
        const int64_t shape[4] = {lead[0], lead[1], CACHE_HEADS, c->channels[i]};
        new[i] = dense4(t, c->dtype, shape, 3 - c->gap);
        test_fill_random(t, &new[i], 2.0, 0);
        *given[i] = new[i].tensor;
        if (!c->packed) continue;
        given[i]->ndim = 3;
        memmove(given[i]->shape, given[i]->shape + 1, 3 * sizeof(int64_t));
        memmove(given[i]->strides, given[i]->strides + 1, 3 * sizeof(int64_t));
    }
    args.starts = int32_vector(t, cache_starts, CACHE_BATCH);
    if (c->counts) args.counts = int32_vector(t, cache_counts, CACHE_BATCH);
    if (c->packed) args.cu_seqlens = int32_vector(t, cache_limits, CACHE_BATCH + 1);
    test_matrix before[2] = {kept[0], kept[1]};
    for (int k = 0; k < 2; k++) {
        before[k].buffer = test_allocate(t, kept[k].buffer->bytes);
        memcpy(before[k].buffer->host, kept[k].buffer->host, kept[k].buffer->bytes);
    }
    TEST_OK(t, te_cache_append(t->context, &args, t->stream));
    for (int k = 0; k < 2; k++) {
        test_fetch(t, &kept[k]);
        for (int64_t i = 0; i < CACHE_BATCH; i++) {
            const int64_t first = c->packed ? cache_limits[i] : i * CACHE_TOKENS;
            int64_t count = c->packed ? cache_limits[i + 1] - cache_limits[i] : CACHE_TOKENS;
            if (c->counts) count = cache_counts[i];
            for (int64_t p = 0; p < CACHE_PAGE * CACHE_TABLE; p++) {
                const int64_t j = p - cache_starts[i], row = cache_row(c, i, p);
                const int is_new = j >= 0 && j < count;
                check_heads(t, &kept[k], row,
                            is_new ? heads_at(&new[k], (first + j) * CACHE_HEADS)
                                   : heads_at(&before[k], row));
            }
        }
    }
    test_release(t);
}

static void run_cache_gather(test_device *t, const cache_case *c)
{
    const int32_t lengths[CACHE_BATCH] = {7, 0, c->counts ? 11 : 4};
    const unsigned char zeros[CACHE_HEADS * 256 * sizeof(float)] = {0};
    test_matrix kept[2], made[2];
    te_cache_gather_args args = {.size = sizeof args, .cache = new_cache(t, c, kept)};
    for (int i = 0; i < 2; i++) {
        const int64_t shape[4] = {CACHE_BATCH, 11, CACHE_HEADS, c->channels[i]};
        made[i] = dense4(t, c->dtype, shape, 3 - c->gap);
    }
    args.key = made[0].tensor;
    args.value = made[1].tensor;
    args.lengths = int32_vector(t, lengths, CACHE_BATCH);
    TEST_OK(t, te_cache_gather(t->context, &args, t->stream));
    for (int k = 0; k < 2; k++) {
        test_fetch(t, &made[k]);
        for (int64_t token = 0; token < CACHE_BATCH * 11; token++) {
            const int64_t i = token / 11, p = token % 11;
            check_heads(t, &made[k], token * CACHE_HEADS,
                        p < lengths[i] ? heads_at(&kept[k], cache_row(c, i, p)) : zeros);
        }
    }
    test_release(t);
}

static cache_case cache_variant(int i)
{
    static const int64_t channels[][2] = {{8, 8}, {64, 16}, {7, 3}, {128, 72}};
    const int64_t *each = channels[i / 3 % 4];
    return (cache_case){.dtype = attention_dtypes[i % 3],
                        .channels = {each[0], each[1]},
                        .gap = i % 4,
                        .paged = i / 12 % 2,
                        .packed = i / 24 % 2,
                        .counts = i / 48 % 2};
}

static void test_cache_append(test_device *t)
{
    for (int i = 0; i < 96; i++) {
        cache_case c = cache_variant(i);
        run_cache_append(t, &c);
    }
}

static void test_cache_gather(test_device *t)
{
    for (int i = 0; i < 96; i++) {
        cache_case c = cache_variant(i);
        run_cache_gather(t, &c);
    }
}

#endif
