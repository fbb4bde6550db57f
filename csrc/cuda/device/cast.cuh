/* SPDX-License-Identifier: Apache-2.0
 *
 * cast.cuh - eight neighbouring fp32 values to FP8 or to high precision, and the scale of a cast.
 *
 * Formats come as template parameters where a kernel is bound by instructions, and as run-time
 * numbers, the same for every thread, where one kernel for all saves code.
 */
#ifndef TE_DEVICE_CAST_CUH
#define TE_DEVICE_CAST_CUH

#include "vector.cuh"
#include "reduce.cuh"
#include "core/scaling_math.h"

/* FP8 whose format is known at run time: te_cast_target.e5m2. */
struct te_any_fp8 : te_tag<unsigned char, true> {
};

/* out = FP8(values * scale). */
template <typename T>
__device__ __forceinline__ void te_cast_vector(const float values[8], float scale, int e5m2,
                                               te_vector<T, 8> &out)
{
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const float *v = values + half * 4;
        out.word[half] = te_fp8_word<T>(v[0] * scale, v[1] * scale, v[2] * scale, v[3] * scale);
    }
}

template <>
__device__ __forceinline__ void te_cast_vector<te_any_fp8>(const float values[8], float scale,
                                                           int e5m2, te_vector<te_any_fp8, 8> &out)
{
    te_vector<te_e4m3, 8> narrow;
    te_vector<te_e5m2, 8> wide;
    if (e5m2) {
        te_cast_vector<te_e5m2>(values, scale, e5m2, wide);
        out.word[0] = wide.word[0], out.word[1] = wide.word[1];
    } else {
        te_cast_vector<te_e4m3>(values, scale, e5m2, narrow);
        out.word[0] = narrow.word[0], out.word[1] = narrow.word[1];
    }
}

/* Clears what lies at or beyond `count`. */
template <typename T>
__device__ __forceinline__ void te_clear_beyond(te_index count, te_vector<T, 8> &bytes)
{
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const te_index left = count - half * 4;
        if (left <= 0)
            bytes.word[half] = 0U;
        else if (left < 4)
            bytes.word[half] &= (1U << ((int)left * 8)) - 1U;
    }
}

/* Rounds and stores eight values at a place that allows vector accesses. */
template <typename T>
__device__ __forceinline__ void te_round_store(const float values[8], void *to)
{
    te_vector<T, 8> out;
    out.encode(values);
    out.store_aligned(to);
}

/* Stores eight values as a run-time dtype at element `at`, whose place allows vector accesses. */
__device__ __forceinline__ void te_store_vector(int dtype, void *to, te_index at,
                                                const float values[8])
{
    if (dtype == TE_STORE_BF16)
        te_round_store<te_bf16>(values, (te_bf16::raw *)to + at);
    else if (dtype == TE_STORE_F16)
        te_round_store<te_f16>(values, (te_f16::raw *)to + at);
    else
        te_round_store<te_f32>(values, (te_f32::raw *)to + at);
}

/* Stores the first `count` of eight values at (row, column) of a matrix of a run-time dtype. */
__device__ __forceinline__ void te_store_values(int dtype, const te_view &to, bool aligned,
                                                te_index row, te_index column, te_index count,
                                                const float values[8])
{
    const te_index at = row * to.stride + column;
    if (aligned && count >= 8) {
        te_store_vector(dtype, to.data, at, values);
        return;
    }
#pragma unroll
    for (int j = 0; j < 8; j++)
        if (j < count) te_store_as(dtype, to.data, at + j, values[j]);
}

template <typename T>
__device__ __forceinline__ void te_load_typed(const void *from, float values[8])
{
    te_vector<T, 8> in;
    in.load_aligned(from);
#pragma unroll
    for (int j = 0; j < 8; j++) values[j] = in.value(j);
}

/* Elements at .. at + 7 of a vector of a run-time dtype, the first `count` of them; others are 0.
 */
__device__ __forceinline__ void te_load_values(int dtype, const void *from, bool aligned,
                                               te_index at, te_index count, float values[8])
{
    if (!aligned || count < 8) {
#pragma unroll
        for (int j = 0; j < 8; j++) values[j] = j < count ? te_load_as(dtype, from, at + j) : 0.0F;
    } else if (dtype == TE_STORE_BF16) {
        te_load_typed<te_bf16>((const te_bf16::raw *)from + at, values);
    } else if (dtype == TE_STORE_F16) {
        te_load_typed<te_f16>((const te_f16::raw *)from + at, values);
    } else {
        te_load_typed<te_f32>((const te_f32::raw *)from + at, values);
    }
}

/* The scale of this call; `scratch` has a word per warp. Ends in a barrier where it used `scratch`.
 * THREADS 0: as many as the block has. */
template <int THREADS>
__device__ __forceinline__ float te_read_scale(const te_cast_target &to, unsigned *scratch)
{
    const int threads = THREADS > 0 ? THREADS : blockDim.x;
    float amax = 0.0F;
    if (to.scale != nullptr) {
        const float scale = *to.scale;
        if (to.partials == nullptr || scale != 0.0F) return scale;
    }
    if (to.partials == nullptr) return 1.0F;
#pragma unroll
    for (int i = 0; i < TE_CAST_PARTIALS / 4; i += threads) {
        const int at = i + threadIdx.x;
        te_vector<te_f32, 4> part;
        part.load(to.partials + 4 * at, to.partials_aligned != 0,
                  THREADS > 0 || at < TE_CAST_PARTIALS / 4 ? 4 : 0);
#pragma unroll
        for (int j = 0; j < 4; j++) amax = fmaxf(amax, part.value(j));
    }
    amax = te_block_max<THREADS>(amax, scratch);
    __syncthreads();
    return te_current_scale(amax, to.fp8_max, to.epsilon, to.power_2);
}

/* Leaves {1/scale, scale} for who reads the data; by one thread. */
__device__ __forceinline__ void te_write_scales(const te_cast_target &to, float scale)
{
    for (int i = 0; i < 2; i++) {
        if (to.scales[i] == nullptr) return;
        to.scales[i][0] = __fdiv_rn(1.0F, scale);
        to.scales[i][1] = scale;
    }
}

#endif
