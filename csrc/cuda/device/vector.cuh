/* SPDX-License-Identifier: Apache-2.0
 *
 * vector.cuh - a few neighbouring elements held in registers as 32-bit words, moved by accesses of
 * up to 16 bytes where the address allows it and one by one where it does not.
 */
#ifndef TE_DEVICE_VECTOR_CUH
#define TE_DEVICE_VECTOR_CUH

#include "numeric.cuh"

/* N elements of T. The index of every access is a compile-time constant, so it stays in registers.
 */
template <typename T, int N> struct te_vector {
    static constexpr int words = (N * T::bytes + 3) / 4;
    unsigned word[words];

    __device__ __forceinline__ void clear()
    {
#pragma unroll
        for (int i = 0; i < words; i++) word[i] = 0U;
    }

    __device__ __forceinline__ typename T::raw get(int i) const
    {
        const int per_word = T::bytes < 4 ? 4 / T::bytes : 1;
        return (typename T::raw)(word[i / per_word] >> (i % per_word * T::bytes * 8 & 31));
    }

    /* Sets an element of a vector that was cleared. */
    __device__ __forceinline__ void put(int i, typename T::raw bits)
    {
        const int per_word = T::bytes < 4 ? 4 / T::bytes : 1;
        word[i / per_word] |= (unsigned)bits << (i % per_word * T::bytes * 8 & 31);
    }

    __device__ __forceinline__ float value(int i) const
    {
        return te_decode<T>(get(i));
    }

    /* Sets all elements of a high-precision vector, rounding to nearest even. */
    __device__ __forceinline__ void encode(const float *values)
    {
        if constexpr (T::bytes == 4) {
#pragma unroll
            for (int i = 0; i < N; i++) word[i] = __float_as_uint(values[i]);
        } else {
#pragma unroll
            for (int i = 0; i < N; i += 2)
                word[i / 2] = te_encode_pair<T>(values[i], values[i + 1]);
        }
    }

    /* Elements whose bit is 0 become 0. */
    __device__ __forceinline__ void keep(unsigned bits)
    {
#pragma unroll
        for (int i = 0; i < N; i++) {
            const unsigned mine = (T::bytes < 4 ? (1U << T::bytes * 8) - 1U : ~0U)
                                  << (i * T::bytes * 8 & 31);
            word[i * T::bytes / 4] &= (bits >> i & 1U) != 0U ? ~0U : ~mine;
        }
    }

    /* Keeps the compiler from holding decoded values of one use for the next: they would take twice
     * the registers. */
    __device__ __forceinline__ void forget()
    {
#pragma unroll
        for (int i = 0; i < words; i++) asm volatile("" : "+r"(word[i]));
    }

    /* The address is a multiple of the vector's size, or of 16. */
    __device__ __forceinline__ void load_aligned(const void *from)
    {
        if constexpr (words % 4 == 0) {
#pragma unroll
            for (int i = 0; i < words / 4; i++) {
                const uint4 v = ((const uint4 *)from)[i];
                word[4 * i] = v.x, word[4 * i + 1] = v.y, word[4 * i + 2] = v.z,
                         word[4 * i + 3] = v.w;
            }
        } else if constexpr (words == 2) {
            const uint2 v = *(const uint2 *)from;
            word[0] = v.x, word[1] = v.y;
        } else {
            word[0] = *(const unsigned *)from;
        }
    }

    /* PTX, because the compiler splits some 16-byte stores of C into four, at half the bandwidth.
     */
    __device__ __forceinline__ void store_aligned(void *to) const
    {
        const size_t address = __cvta_generic_to_global(to);
        if constexpr (words % 4 == 0) {
#pragma unroll
            for (int i = 0; i < words; i += 4)
                asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(address + 4 * i),
                             "r"(word[i]), "r"(word[i + 1]), "r"(word[i + 2]), "r"(word[i + 3])
                             : "memory");
        } else if constexpr (words == 2) {
            asm volatile("st.global.v2.u32 [%0], {%1, %2};" ::"l"(address), "r"(word[0]),
                         "r"(word[1])
                         : "memory");
        } else {
            asm volatile("st.global.u32 [%0], %1;" ::"l"(address), "r"(word[0]) : "memory");
        }
    }

    /* Loads from any element on, in aligned words: those that hold the vector, with what else they
     * hold. */
    __device__ __forceinline__ void load_words(const void *from)
    {
        const unsigned *at = (const unsigned *)((const unsigned char *)from - ((size_t)from & 3U));
        const unsigned bits = (unsigned)(size_t)from << 3 & 31U;
        unsigned more = 0U;
#pragma unroll
        for (int i = 0; i < words; i++) word[i] = at[i];
        if (bits != 0U) more = at[words];
#pragma unroll
        for (int i = 0; i < words; i++)
            word[i] = __funnelshift_r(word[i], i + 1 < words ? word[i + 1] : more, bits);
    }

    /* Stores from any element on, in aligned words but for the halves of one at the ends. */
    __device__ __forceinline__ void store_words(void *to) const
    {
        if (((size_t)to & 3U) == 0U) {
#pragma unroll
            for (int i = 0; i < words; i++) ((unsigned *)to)[i] = word[i];
        } else {
            unsigned short *at = (unsigned short *)to;
            at[0] = (unsigned short)word[0];
#pragma unroll
            for (int i = 1; i < words; i++)
                *(unsigned *)(at + 2 * i - 1) = __funnelshift_r(word[i - 1], word[i], 16U);
            at[2 * words - 1] = (unsigned short)(word[words - 1] >> 16);
        }
    }

    /* Loads the elements [first, end), one by one; the others become 0. */
    __device__ __forceinline__ void load_part(const void *from, te_index first, te_index end)
    {
        clear();
#pragma unroll
        for (int i = 0; i < N; i++)
            if (i >= first && i < end) put(i, ((const typename T::raw *)from)[i]);
    }

    /* Stores the elements [first, end), one by one. */
    __device__ __forceinline__ void store_part(void *to, te_index first, te_index end) const
    {
#pragma unroll
        for (int i = 0; i < N; i++)
            if (i >= first && i < end) ((typename T::raw *)to)[i] = get(i);
    }

    /* Loads the first `count` elements (any number, also negative); the others become 0. */
    __device__ __forceinline__ void load(const void *from, bool aligned, te_index count)
    {
        if (aligned && count >= N)
            load_aligned(from);
        else
            load_part(from, 0, count);
    }

    /* Stores the first `count` elements (any number, also negative). */
    __device__ __forceinline__ void store(void *to, bool aligned, te_index count) const
    {
        if (aligned && count >= N)
            store_aligned(to);
        else
            store_part(to, 0, count);
    }
};

/* 8-byte elements exist for copies and fills alone. */
template <int BYTES> struct te_opaque;
template <> struct te_opaque<1> : te_tag<unsigned char> {
};
template <> struct te_opaque<2> : te_tag<unsigned short> {
};
template <> struct te_opaque<4> : te_tag<unsigned> {
};

/* Element (row, column) of a view of T. */
template <typename T>
__device__ __forceinline__ typename T::raw *te_at(const te_view &view, te_index row,
                                                  te_index column)
{
    return (typename T::raw *)view.data + (row * view.stride + column);
}

#endif
