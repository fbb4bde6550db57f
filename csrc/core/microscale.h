/* SPDX-License-Identifier: Apache-2.0
 *
 * microscale.h - the arithmetic of MXFP8 and NVFP4, once for both backends. Read by gcc, nvcc and
 * NVRTC.
 *
 * MXFP8: groups of 32 values of a row or a column share 2^(e - 127), e being a byte (E8M0).
 * NVFP4: groups of 16 values, two to a byte (E2M1), share an E4M3 number, and the whole tensor the
 * largest magnitude that it was made with. IEEE fp32 throughout, so every backend makes the same
 * bits. The operations of NVFP4, and their order, are those of its published recipe
 * (arXiv:2509.25149, appendix C; four over six: arXiv:2512.02010) as its training libraries have
 * them, division being a division. A cast makes no NaN or Inf that the values did not hold, and
 * what its data stands for has none either: Inf saturates. E4M3 and E5M2 keep a NaN for itself;
 * E2M1 has none, so a group of NVFP4 that holds a NaN has NaN for its scale.
 */
#ifndef TE_CORE_MICROSCALE_H
#define TE_CORE_MICROSCALE_H

#include "core/philox.h"

enum {
    TE_MXFP8_GROUP = 32,
    TE_NVFP4_GROUP = 16,
    TE_SCALES_ROWS = 128, /* scales are padded to tiles of so many rows, */
    TE_SCALES_COLUMNS = 4 /* and so many columns */
};

#define TE_BF16_MAX 3.389531389e+38F
#define TE_NVFP4_RANGE 2688.0F     /* largest E2M1 times largest E4M3: 6 * 448 */
#define TE_NVFP4_RANGE_256 1536.0F /* that of scales of groups that go up to 256: 6 * 256 */

/* a b, never part of a fused multiply-add. */
TE_SHARED float te_product(float a, float b)
{
#ifdef __CUDA_ARCH__
    return __fmul_rn(a, b);
#else
    return a * b;
#endif
}

/* ---- MXFP8 ---- */

/* The byte of a group: the exponent of amax / fp8_max, rounded up, and `margin` more. 0: 0x00; Inf:
 * 0xfe; NaN: 0xff. */
TE_SHARED unsigned te_e8m0_of(float amax, float fp8_max, int margin)
{
    const unsigned bits = te_float_bits(amax * (1.0F / fp8_max)) & 0x7fffffffU;
    const int exponent = (int)(bits >> 23) + ((bits & 0x7fffffU) != 0U) + margin;
    if (bits > 0x7f800000U) return 0xffU;
    if (bits == 0U) return 0U;
    if (bits >= 0x7f000000U) return 0xfeU;
    return (unsigned)(exponent < 0 ? 0 : exponent > 0xfe ? 0xfe : exponent);
}

/* 2^(e - 127); NaN for 0xff. */
TE_SHARED float te_e8m0_value(unsigned e)
{
    return te_bits_float(e == 0U ? 0x00400000U : e == 0xffU ? 0x7fc00000U : e << 23);
}

/* 2^(127 - e), what the values of a group are multiplied by; NaN for 0xff. */
TE_SHARED float te_e8m0_multiplier(unsigned e)
{
    return te_e8m0_value(e == 0xffU ? e : 254U - e);
}

/* ---- numbers that a dtype holds ---- */

/* A number beyond +-limit becomes that; NaN stays. */
TE_SHARED float te_saturate(float value, float limit)
{
    if (value > limit) return limit;
    return value < -limit ? -limit : value;
}

/* Rounded to bf16, to nearest even, but never to Inf. NaN stays. */
TE_SHARED float te_round_bf16(float value)
{
    const unsigned bits = te_float_bits(value);
    if (value != value) return value;
    return te_saturate(te_bits_float((bits + 0x7fffU + (bits >> 16 & 1U)) & 0xffff0000U),
                       TE_BF16_MAX);
}

/* ---- NVFP4 ---- */

/* A largest magnitude as it is used: NaN never is one, Inf counts as the largest number. */
TE_SHARED float te_nvfp4_amax(float amax)
{
    return amax > TE_FLT_MAX ? TE_FLT_MAX : amax;
}

/* What the largest magnitude of a tensor stands for in units of its factor. */
TE_SHARED float te_nvfp4_range(int scales_to_256)
{
    return scales_to_256 ? TE_NVFP4_RANGE_256 : TE_NVFP4_RANGE;
}

/* What all values of a tensor are multiplied by before their groups are looked at. */
TE_SHARED float te_nvfp4_encode(float amax, float range)
{
    const float scale = range / amax;
    if (amax == 0.0F) return 1.0F;
    return scale > TE_FLT_MAX ? TE_FLT_MAX : scale;
}

/* The factor of the tensor in what its data stands for. */
TE_SHARED float te_nvfp4_decode(float amax, float range)
{
    return amax / range;
}

/* What the largest magnitude of a group becomes. */
typedef enum te_nvfp4_code {
    TE_NVFP4_SIX,
    TE_NVFP4_SIX_OF_TWO, /* six, where four was the other way: rounded otherwise */
    TE_NVFP4_FOUR
} te_nvfp4_code;

/* The scale of a group, to be rounded to E4M3, with which its largest magnitude, whose bits these
 * are, NaN included, becomes `code`. */
TE_SHARED float te_nvfp4_group_scale(unsigned amax_bits, float encode, te_nvfp4_code code)
{
    const float amax = te_nvfp4_amax(te_bits_float(amax_bits));
    if (code == TE_NVFP4_SIX) return te_product(amax, te_product(encode, 1.0F / 6.0F));
    return te_product(te_product(amax / 6.0F, encode), code == TE_NVFP4_FOUR ? 1.5F : 1.0F);
}

/* What the values of a group are multiplied by, given its rounded scale. With a scale of 0 all but
 * zeros saturate, and stand for 0 as that scale says. */
TE_SHARED float te_nvfp4_multiplier(float encode, float group_scale)
{
    const float scale = 1.0F / te_product(group_scale, 1.0F / encode);
    return scale > TE_FLT_MAX ? TE_FLT_MAX : scale;
}

/* 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives. */
TE_SHARED float te_e2m1_value(unsigned code)
{
    const unsigned magnitude = code & 7U, sign = (code & 8U) << 28;
    const unsigned bits =
        magnitude < 2U ? magnitude * 0x3f000000U : (magnitude << 22) + 0x3f000000U;
    return te_bits_float(bits | sign);
}

/* Round to nearest even; beyond 6 saturates; NaN gives 0. */
TE_SHARED unsigned te_e2m1_nearest(float value)
{
    const unsigned bits = te_float_bits(value), sign = bits >> 28 & 8U;
    const float x = te_bits_float(bits & 0x7fffffffU);
    const unsigned code = (unsigned)(x > 0.25F) + (x >= 0.75F) + (x > 1.25F) + (x >= 1.75F) +
                          (x > 2.5F) + (x >= 3.5F) + (x > 5.0F);
    return value != value ? 0U : code | sign;
}

/* Of the two numbers around it the farther one with the probability of the distance to the nearer,
 * `random` being uniform in [0, 1): right on average. Beyond 6 saturates; NaN gives 0. */
TE_SHARED unsigned te_e2m1_stochastic(float value, float random)
{
    const unsigned bits = te_float_bits(value), sign = bits >> 28 & 8U;
    const float x = te_bits_float(bits & 0x7fffffffU);
    const unsigned below = (unsigned)(x >= 0.5F) + (x >= 1.0F) + (x >= 1.5F) + (x >= 2.0F) +
                           (x >= 3.0F) + (x >= 4.0F) + (x >= 6.0F);
    const float per_step = x < 2.0F ? 2.0F : x < 4.0F ? 1.0F : 0.5F;
    const unsigned code = below + (below < 7U && random < (x - te_e2m1_value(below)) * per_step);
    return value != value ? 0U : code | sign;
}

/* How a value is cast, and what that stands for. */
typedef struct te_nvfp4_way {
    float multiplier, group_scale;
    float amax, range; /* of the tensor */
} te_nvfp4_way;

/* What a value loses in a cast: its error, or the square of that. The errors of a line of 16 are
 * added one after the other. Those of the 16 rows of a square then as a tree: row i and row i + 8,
 * of these i and i + 4, and so on. The scale for 4 is taken where it loses less than that for 6. */
TE_SHARED float te_nvfp4_error(float value, te_nvfp4_way way, int squared)
{
    const float code = te_e2m1_value(te_e2m1_nearest(te_product(value, way.multiplier)));
    const float meant = te_product(te_product(code, way.group_scale), way.amax) / way.range;
    const float error = meant - value;
    if (squared) return te_product(error, error);
    return error < 0.0F ? -error : error;
}

/* ---- the random Hadamard transform ---- */

/* Bit i: value i of a group is negated first. */
#define TE_HADAMARD_SIGNS 0xd7e8U

/* The signs of a way to transform, te_hadamard of the C header. */
TE_SHARED unsigned te_hadamard_signs(int hadamard)
{
    return hadamard == 1 ? TE_HADAMARD_SIGNS : 0U;
}

/* Value i of a group as the transform reads it: rounded to bf16, and small enough for the sums.
 * `signs`: bit i, value i is negated. */
TE_SHARED float te_hadamard_enter(float value, int i, unsigned signs)
{
    const float scaled = te_round_bf16(value) * 0.0625F; /* exact */
    return (signs >> i & 1U) != 0U ? -scaled : scaled;
}

/* A sum of the transform as a value: H16 / 4 in all, rounded to bf16. */
TE_SHARED float te_hadamard_leave(float sum)
{
    return te_round_bf16(te_saturate(sum * 4.0F, TE_BF16_MAX));
}

#endif
