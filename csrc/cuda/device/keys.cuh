/* SPDX-License-Identifier: Apache-2.0
 *
 * keys.cuh - a thread's vectors of a row that may begin anywhere.
 *
 * Rows are distributed in the aligned 16 bytes of the operand that is written, so that only the
 * first and the last vector of a row are written one by one. Whatever is read beside it may lie
 * otherwise in its 16 bytes: it is fetched in aligned words, and shifted once they are there. A
 * first or last vector is read whole, with what lies before or behind the row, as long as that is
 * within the tensor.
 */
#ifndef TE_DEVICE_KEYS_CUH
#define TE_DEVICE_KEYS_CUH

#include "vector.cuh"

/* A distance in keys, or one that is farther than any thread's keys. */
__device__ __forceinline__ int te_near(te_index keys)
{
    const te_index far = 1 << 30;
    return (int)min(max(keys, -far), far);
}

/* What a thread has of a row: vectors of N keys, each STEP after the one before. Keys are counted
 * from the thread's first, which may lie before the row. */
template <int N, int STEP> struct te_part {
    int begin, count; /* the keys [begin, count) exist, */
    int first, end;   /* and [first, end) of them are needed */

    __device__ __forceinline__ te_part(int begin_, int count_)
        : begin(begin_), count(count_), first(begin_), end(count_)
    {
    }

    /* Needs no more than [first_, end_). */
    __device__ __forceinline__ void narrow(te_index first_, te_index end_)
    {
        first = max(first, te_near(first_));
        end = min(end, te_near(end_));
    }

    /* Some keys of vector i are needed. */
    __device__ __forceinline__ bool needs(int i) const
    {
        return i * STEP < end && i * STEP + N > first;
    }

    /* All of them are. */
    __device__ __forceinline__ bool needs_all(int i) const
    {
        return i * STEP >= first && i * STEP + N <= end;
    }

    /* Bits 0 .. N - 1: which of them are. */
    __device__ __forceinline__ unsigned needed(int i) const
    {
        const int low = min(max(first - i * STEP, 0), N), high = min(max(end - i * STEP, 0), N);
        return (1U << high) - 1U & ~0U << low;
    }

    /* Bit i: some keys of vector i are needed by some lane of the warp. */
    template <int VECTORS> __device__ __forceinline__ unsigned live() const
    {
        unsigned bits = 0U;
#pragma unroll
        for (int i = 0; i < VECTORS; i++) bits |= needs(i) ? 1U << i : 0U;
        return __reduce_or_sync(0xffffffffU, bits);
    }
};

/* A thread's part of one operand: VECTORS of N elements of T. ALIGNED: every vector exists as a
 * whole and begins where it should. */
template <typename T, int N, int STEP, int VECTORS, bool ALIGNED> struct te_operand {
    static constexpr int words = te_vector<T, N>::words;
    const unsigned char *line; /* the thread's first key */
    int low, high;             /* vectors in [low, high) are fetched as a whole */
    unsigned word[VECTORS][ALIGNED ? words : words + 1];

    /* Begins to read; [data, data_end) is the tensor. */
    __device__ __forceinline__ void fetch(const te_part<N, STEP> &part, const unsigned char *from,
                                          const unsigned char *data, const unsigned char *data_end)
    {
        constexpr int bytes = N * T::bytes, margin = bytes + 3;
        const unsigned misplaced = (unsigned)(size_t)from & (bytes < 16 ? bytes - 1 : 15);
        line = from;
        if constexpr (!ALIGNED) {
            const int slack = misplaced != 0 ? 3 : 0; /* words hold more than the vector */
            const bool before = at(part.begin) - data >= margin;
            const bool behind = data_end - at(part.count) >= margin;
            low = before ? part.begin - N : part.begin + slack;
            high = behind ? part.count + N : part.count - slack;
        }
#pragma unroll
        for (int i = 0; i < VECTORS; i++) {
#pragma unroll
            for (int j = 0; j < (ALIGNED ? words : words + 1); j++) word[i][j] = 0U;
            if (!part.needs(i) || !whole(i)) continue;
            if (ALIGNED || misplaced == 0) {
                te_vector<T, N> vector;
                vector.load_aligned(at(i * STEP));
#pragma unroll
                for (int j = 0; j < words; j++) word[i][j] = vector.word[j];
            } else if constexpr (!ALIGNED) {
                const unsigned *words_at = (const unsigned *)(at(i * STEP) - ((size_t)from & 3U));
#pragma unroll
                for (int j = 0; j < words; j++) word[i][j] = words_at[j];
                if ((misplaced & 3U) != 0U) word[i][words] = words_at[words];
            }
        }
    }

    /* Vector i; what is not needed of it may be anything. */
    __device__ __forceinline__ te_vector<T, N> take(const te_part<N, STEP> &part, int i) const
    {
        te_vector<T, N> vector;
        if constexpr (ALIGNED) {
#pragma unroll
            for (int j = 0; j < words; j++) vector.word[j] = word[i][j];
        } else if (whole(i) || !part.needs(i)) {
#pragma unroll
            for (int j = 0; j < words; j++)
                vector.word[j] =
                    __funnelshift_r(word[i][j], word[i][j + 1], (unsigned)(size_t)line << 3);
        } else {
            vector.load_part(at(i * STEP), part.first - i * STEP, part.end - i * STEP);
        }
        return vector;
    }

  private:
    __device__ __forceinline__ const unsigned char *at(int key) const
    {
        return line + (te_index)key * T::bytes;
    }

    __device__ __forceinline__ bool whole(int i) const
    {
        return ALIGNED || (i * STEP >= low && i * STEP + N <= high);
    }
};

/* Writes vector i to a line whose rows lie in their 16 bytes as they are distributed; `line` is
 * the thread's first key. */
template <bool ALIGNED, typename T, int N, int STEP>
__device__ __forceinline__ void te_write_keys(const te_part<N, STEP> &part, unsigned char *line,
                                              int i, const te_vector<T, N> &vector)
{
    const int key = i * STEP;
    unsigned char *to = line + (te_index)key * T::bytes;
    if (ALIGNED ? key < part.count : key >= part.begin && key + N <= part.count)
        vector.store_aligned(to);
    else if constexpr (!ALIGNED)
        vector.store_part(to, part.begin - key, part.count - key);
}

#endif
