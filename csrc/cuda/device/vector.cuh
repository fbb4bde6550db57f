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

    /* Loads the first `count` elements (any number, also negative); the others become 0. */
    __device__ __forceinline__ void load(const void *from, bool aligned, te_index count)
    {
        if (aligned && count >= N) {
            load_aligned(from);
            return;
        }
        clear();
#pragma unroll
        for (int i = 0; i < N; i++)
            if (i < count) put(i, ((const typename T::raw *)from)[i]);
    }

    /* Stores the first `count` elements (any number, also negative). */
    __device__ __forceinline__ void store(void *to, bool aligned, te_index count) const
    {
        if (aligned && count >= N) {
            store_aligned(to);
            return;
        }
#pragma unroll
        for (int i = 0; i < N; i++)
            if (i < count) ((typename T::raw *)to)[i] = get(i);
    }
};

/* 8-byte elements exist for copies and fills alone. */
template <int BYTES> struct te_opaque;
template <> struct te_opaque<1> {
    typedef unsigned char raw;
    static constexpr int bytes = 1;
};
template <> struct te_opaque<2> {
    typedef unsigned short raw;
    static constexpr int bytes = 2;
};
template <> struct te_opaque<4> {
    typedef unsigned raw;
    static constexpr int bytes = 4;
};

/* Element (row, column) of a view of T. */
template <typename T>
__device__ __forceinline__ typename T::raw *te_at(const te_view &view, te_index row,
                                                  te_index column)
{
    return (typename T::raw *)view.data + (row * view.stride + column);
}

#endif
