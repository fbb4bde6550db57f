/* SPDX-License-Identifier: Apache-2.0
 *
 * numeric.cuh - number formats: tags, conversions to and from float.
 *
 * Conversions are inline PTX rather than cuda_fp16.h and friends, because this code is also
 * compiled by NVRTC, which may come without those headers. FP8 is converted in hardware from sm_89
 * on; the path for older devices makes the same bits: round to nearest even, finite overflow and
 * Inf saturate, NaN becomes 0x7f.
 */
#ifndef TE_DEVICE_NUMERIC_CUH
#define TE_DEVICE_NUMERIC_CUH

#include "cuda/device/types.h"

/* Tags: `raw`, an unsigned type that holds an element's bits, its size, and whether it is FP8. */
template <typename RAW, bool CASTS = false> struct te_tag {
    typedef RAW raw;
    static constexpr int bytes = sizeof(RAW);
    static constexpr bool casts = CASTS;
};
struct te_f32 : te_tag<unsigned> {
};
struct te_f16 : te_tag<unsigned short> {
};
struct te_bf16 : te_tag<unsigned short> {
};
struct te_e4m3 : te_tag<unsigned char, true> {
    static constexpr int mantissa = 3, bias = 7;
    static constexpr unsigned largest = 0x7eU;
};
struct te_e5m2 : te_tag<unsigned char, true> {
    static constexpr int mantissa = 2, bias = 15;
    static constexpr unsigned largest = 0x7bU;
};
struct te_none : te_tag<unsigned char> { /* nothing is cast */
};

/* ---- high precision to float: exact ---- */

template <typename T> __device__ __forceinline__ float te_decode(typename T::raw bits);

template <> __device__ __forceinline__ float te_decode<te_f32>(unsigned bits)
{
    return __uint_as_float(bits);
}

template <> __device__ __forceinline__ float te_decode<te_f16>(unsigned short bits)
{
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
}

template <> __device__ __forceinline__ float te_decode<te_bf16>(unsigned short bits)
{
    return __uint_as_float((unsigned)bits << 16);
}

/* ---- float to high precision: round to nearest even ---- */

template <typename T> __device__ __forceinline__ typename T::raw te_encode(float value);

template <> __device__ __forceinline__ unsigned te_encode<te_f32>(float value)
{
    return __float_as_uint(value);
}

template <> __device__ __forceinline__ unsigned short te_encode<te_f16>(float value)
{
    unsigned short bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}

template <> __device__ __forceinline__ unsigned short te_encode<te_bf16>(float value)
{
    unsigned short bits;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}

/* Two floats to one word of a 16-bit format; `low` goes into the low half. */
template <typename T> __device__ __forceinline__ unsigned te_encode_pair(float low, float high);

template <> __device__ __forceinline__ unsigned te_encode_pair<te_f16>(float low, float high)
{
    unsigned pair;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

template <> __device__ __forceinline__ unsigned te_encode_pair<te_bf16>(float low, float high)
{
    unsigned pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

/* Writes element `index` of a vector whose dtype is a TE_STORE_* number. */
__device__ __forceinline__ void te_store_as(int dtype, void *data, te_index index, float value)
{
    if (dtype == TE_STORE_F32)
        ((float *)data)[index] = value;
    else if (dtype == TE_STORE_F16)
        ((unsigned short *)data)[index] = te_encode<te_f16>(value);
    else
        ((unsigned short *)data)[index] = te_encode<te_bf16>(value);
}

/* Reads element `index` of such a vector. */
__device__ __forceinline__ float te_load_as(int dtype, const void *data, te_index index)
{
    if (dtype == TE_STORE_F32) return ((const float *)data)[index];
    const unsigned short bits = ((const unsigned short *)data)[index];
    return dtype == TE_STORE_F16 ? te_decode<te_f16>(bits) : te_decode<te_bf16>(bits);
}

/* ---- FP8 ---- */

/* One float to FP8 without hardware. Subnormals are rounded by adding the number whose last bit is
 * the format's quantum; normals by adding half a last place in the integer domain. */
template <typename T> __device__ __forceinline__ unsigned te_fp8_software(float value)
{
    const unsigned bits = __float_as_uint(value), sign = bits >> 24 & 0x80U;
    const unsigned magnitude = bits & 0x7fffffffU;
    const int dropped = 23 - T::mantissa;
    unsigned code;
    if (magnitude > 0x7f800000U) return 0x7fU;
    if (magnitude < (unsigned)(127 + 1 - T::bias) << 23) {
        const unsigned quantum = (unsigned)(127 + 1 - T::bias - T::mantissa + 23) << 23;
        const float sum = __fadd_rn(__uint_as_float(magnitude), __uint_as_float(quantum));
        code = __float_as_uint(sum) - quantum;
    } else {
        const unsigned rounded =
            magnitude + (1U << (dropped - 1)) - 1U + (magnitude >> dropped & 1U);
        code = (rounded >> dropped) - ((unsigned)(127 - T::bias) << T::mantissa);
        if (code > T::largest) code = T::largest;
    }
    return sign | code;
}

/* Two floats to two FP8 codes; `low` goes into the low byte. */
template <typename T> __device__ __forceinline__ unsigned te_fp8_pair(float low, float high);

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890

template <> __device__ __forceinline__ unsigned te_fp8_pair<te_e4m3>(float low, float high)
{
    unsigned short pair;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
    return pair;
}

template <> __device__ __forceinline__ unsigned te_fp8_pair<te_e5m2>(float low, float high)
{
    unsigned short pair;
    asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
    return pair;
}

#else

template <typename T> __device__ __forceinline__ unsigned te_fp8_pair(float low, float high)
{
    return te_fp8_software<T>(low) | te_fp8_software<T>(high) << 8;
}

#endif

/* Four floats to one word of FP8, the first in the lowest byte. */
template <typename T>
__device__ __forceinline__ unsigned te_fp8_word(float a, float b, float c, float d)
{
    return te_fp8_pair<T>(a, b) | te_fp8_pair<T>(c, d) << 16;
}

/* E5M2 is the upper half of an f16. */
template <> __device__ __forceinline__ float te_decode<te_e5m2>(unsigned char bits)
{
    return te_decode<te_f16>((unsigned short)(bits << 8));
}

/* The bits of E4M3, put where an f16 has them, are the value times 2^-8; NaN is the code 0x7f
 * alone. */
template <> __device__ __forceinline__ float te_decode<te_e4m3>(unsigned char bits)
{
    const unsigned half = (bits & 0x80U) << 8 | (bits & 0x7fU) << 7;
    const float value = te_decode<te_f16>((unsigned short)half) * 256.0F;
    return (bits & 0x7fU) == 0x7fU ? __uint_as_float(0x7fc00000U) : value;
}

#endif
