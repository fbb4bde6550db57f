/* SPDX-License-Identifier: Apache-2.0
 *
 * norm.cuh - what the norms and their gradients share: gamma and beta of 8 neighbouring columns,
 * and shared memory of blocks that stay on the device for many rows.
 *
 * There the rows to come are on their way while one is worked on: a multiprocessor has to have
 * some 40 KB in flight all the time, and registers do not last for both. A thread reads what itself
 * has fetched, so rows need no barrier.
 */
#ifndef TE_DEVICE_NORM_CUH
#define TE_DEVICE_NORM_CUH

#include "async.cuh"
#include "cast.cuh"
#include "cuda/kernels/norm.h"
#include "view4.cuh"

/* Where a row of heads begins, in elements. */
__device__ __forceinline__ te_index te_head_offset(const te_norm_heads &heads, te_index row)
{
    te_index inner, middle;
    const te_index outer = te_divide(te_divide(row, heads.inner, &inner), heads.middle, &middle);
    return outer * heads.strides[0] + middle * heads.strides[1] + inner * heads.strides[2];
}

/* Element (row, column) of a matrix; HEADS: of rows that lie as the heads say. */
template <typename T, bool HEADS>
__device__ __forceinline__ typename T::raw *
te_row_at(const te_view &view, const te_norm_heads &heads, te_index row, te_index column)
{
    if constexpr (HEADS)
        return (typename T::raw *)view.data + te_head_offset(heads, row) + column;
    else
        return te_at<T>(view, row, column);
}

/* Both loads are issued before either is waited for. */
template <typename T>
__device__ __forceinline__ void te_load_factors_of(const te_norm_factors &f, te_index column,
                                                   te_index left, float w[8], float b[8])
{
    te_vector<T, 8> gamma, beta;
    gamma.clear();
    beta.clear();
    if (f.gamma != nullptr)
        gamma.load((const typename T::raw *)f.gamma + column, f.aligned != 0, left);
    if (f.beta != nullptr)
        beta.load((const typename T::raw *)f.beta + column, f.aligned != 0, left);
#pragma unroll
    for (int j = 0; j < 8; j++) w[j] = gamma.value(j), b[j] = beta.value(j);
}

/* The factors of columns column .. column + 7 and what is added; 0 from `columns` on, whatever
 * they are. */
__device__ __forceinline__ void te_load_factors(const te_norm_factors &f, te_index column,
                                                te_index columns, float w[8], float b[8])
{
    const te_index left = columns - column;
    if (f.dtype == TE_STORE_F32)
        te_load_factors_of<te_f32>(f, column, left, w, b);
    else if (f.dtype == TE_STORE_BF16)
        te_load_factors_of<te_bf16>(f, column, left, w, b);
    else
        te_load_factors_of<te_f16>(f, column, left, w, b);
    if (f.gamma != nullptr && !f.zero_centered) return;
#pragma unroll
    for (int j = 0; j < 8; j++) w[j] = j < left ? 1.0F + w[j] : 0.0F;
}

/* Vectors of 8 elements of a row are distributed 32 at a time: warp i of the row's team has VECTORS
 * groups of them from group VECTORS * i on. So a thread's vectors lie 32 apart, and their addresses
 * differ by constants. */
template <int VECTORS> __device__ __forceinline__ int te_first_vector(int lane)
{
    return (lane & ~31) * VECTORS + (lane & 31);
}

/* The factors as floats in shared memory: [groups of 32 vectors][2 or, with what is added, 4
 * halves of 8][32]; 0 beyond the row. */
template <bool ADDS> struct te_staged_factors {
    static constexpr int halves = ADDS ? 4 : 2;
    float4 *own; /* of the thread's first vector */

    __device__ __forceinline__ te_staged_factors(void *memory, int first_vector)
        : own((float4 *)memory + place(first_vector))
    {
    }

    static __device__ __forceinline__ int place(int vector)
    {
        return (vector & ~31) * halves + (vector & 31);
    }

    /* `vectors` of them, by all threads of the block; what reads them comes after a barrier. */
    static __device__ __forceinline__ void fill(void *memory, const te_norm_factors &f, int columns,
                                                int vectors)
    {
#pragma unroll 1
        for (int vector = threadIdx.x; vector < vectors; vector += blockDim.x) {
            float4 *to = (float4 *)memory + place(vector);
            float w[8], b[8];
            te_load_factors(f, 8 * vector, columns, w, b);
            to[0] = make_float4(w[0], w[1], w[2], w[3]);
            to[32] = make_float4(w[4], w[5], w[6], w[7]);
            if (!ADDS) continue;
            to[64] = make_float4(b[0], b[1], b[2], b[3]);
            to[96] = make_float4(b[4], b[5], b[6], b[7]);
        }
    }

    /* Line 0, factors, or 1, what is added, of the thread's vector v. */
    __device__ __forceinline__ void read(int v, int line, float values[8]) const
    {
        const float4 *from = own + (v * halves + line * 2) * 32;
        *(float4 *)values = from[0];
        *(float4 *)(values + 4) = from[32];
    }
};

/* Rows in shared memory: [stages][matrices][warps of the block][VECTORS][halves][32] pieces of 16
 * bytes; f32 takes two per vector. */
template <typename T, int VECTORS> struct te_row_stages {
    static constexpr int pieces = T::bytes / 2; /* of a vector */
    uint4 *own;                                 /* the thread's first piece */
    int matrices, pitch;                        /* pitch: pieces from one to the next */

    __device__ __forceinline__ te_row_stages(uint4 *memory, int matrices_)
        : own(memory + te_first_vector<VECTORS * pieces>(threadIdx.x)), matrices(matrices_),
          pitch(blockDim.x * (VECTORS * pieces))
    {
    }

    __device__ __forceinline__ int size(int stages) const
    {
        return stages * matrices * pitch;
    }

    __device__ __forceinline__ uint4 *place(int stage, int matrix) const
    {
        return own + (stage * matrices + matrix) * pitch;
    }

    /* Begins to load vector v of a row. WHOLE: it is aligned, and all of it in the row, else
     * `left` elements at most. */
    template <bool WHOLE>
    static __device__ __forceinline__ void fetch(uint4 *place, int v, const typename T::raw *from,
                                                 bool aligned, int left)
    {
        uint4 *to = place + v * pieces * 32;
        if (WHOLE || (aligned && left >= 8)) {
#pragma unroll
            for (int i = 0; i < pieces; i++)
                te_copy_async(to + i * 32, (const unsigned char *)from + 16 * i);
            return;
        }
        te_vector<T, 8> in;
        in.load(from, false, left);
        write(place, v, in);
    }

    static __device__ __forceinline__ void write(uint4 *place, int v, const te_vector<T, 8> &in)
    {
        uint4 *to = place + v * pieces * 32;
#pragma unroll
        for (int i = 0; i < pieces; i++)
            to[i * 32] = make_uint4(in.word[4 * i], in.word[4 * i + 1], in.word[4 * i + 2],
                                    in.word[4 * i + 3]);
    }

    static __device__ __forceinline__ void read(const uint4 *place, int v, te_vector<T, 8> &out)
    {
        const uint4 *from = place + v * pieces * 32;
#pragma unroll
        for (int i = 0; i < pieces; i++) {
            const uint4 piece = from[i * 32];
            out.word[4 * i] = piece.x, out.word[4 * i + 1] = piece.y;
            out.word[4 * i + 2] = piece.z, out.word[4 * i + 3] = piece.w;
        }
    }
};

#endif
