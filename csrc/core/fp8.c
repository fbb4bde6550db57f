/* SPDX-License-Identifier: Apache-2.0
 *
 * fp8.c - single numbers to elements of any dtype. The conversions of arrays are in fp8.h, where
 * the compiler can make vector code of them.
 */
#include "core/fp8.h"

/* fp64 to fp32, rounded to odd: a second rounding, to a narrower float, then gives what a single
 * one would have given. */
static float round_to_odd(double value)
{
    float result = (float)value;
    int32_t bits = te_bits_of(result);
    if ((double)result == value || value != value || (bits & 0x7fffffff) == TE_F32_INF_BITS) {
        return result;
    }
    double magnitude = value < 0 ? -value : value;
    double rounded = result < 0 ? -(double)result : (double)result;
    if (rounded > magnitude) bits -= 1; /* towards zero */
    return te_float_of(bits | 1);
}

/* To the nearest integer, ties to even, within [low, high]. The bounds as doubles are exact or, for
 * 2^63, just beyond. */
static int64_t round_integer(double value, int64_t low, int64_t high)
{
    if (value != value) return 0;
    if (value <= (double)low) return low;
    if (value >= (double)high) return high;
    int64_t whole = (int64_t)value; /* towards zero */
    double rest = value - (double)whole;
    int64_t away = value < 0 ? -1 : 1;
    double distance = rest < 0 ? -rest : rest;
    if (distance > 0.5 || (distance == 0.5 && (whole & 1) != 0)) whole += away;
    return whole;
}

static size_t put(unsigned char *bytes, const void *element, size_t size)
{
    memcpy(bytes, element, size);
    return size;
}

size_t te_encode(te_dtype dtype, double value, unsigned char *bytes)
{
    float odd = round_to_odd(value), nearest = (float)value;
    uint16_t half = dtype == TE_DTYPE_F16 ? te_f32_to_f16(odd) : te_f32_to_bf16(odd);
    switch (dtype) {
    case TE_DTYPE_F32:
        return put(bytes, &nearest, sizeof nearest);
    case TE_DTYPE_F16:
    case TE_DTYPE_BF16:
        return put(bytes, &half, sizeof half);
    case TE_DTYPE_E4M3:
        bytes[0] = te_f32_to_e4m3(odd);
        return 1;
    case TE_DTYPE_E5M2:
        bytes[0] = te_f32_to_e5m2(odd);
        return 1;
    case TE_DTYPE_U8:
        bytes[0] = (unsigned char)round_integer(value, 0, UINT8_MAX);
        return 1;
    case TE_DTYPE_I32: {
        int32_t integer = (int32_t)round_integer(value, INT32_MIN, INT32_MAX);
        return put(bytes, &integer, sizeof integer);
    }
    case TE_DTYPE_I64: {
        int64_t integer = round_integer(value, INT64_MIN, INT64_MAX);
        return put(bytes, &integer, sizeof integer);
    }
    case TE_DTYPE_COUNT:
        break;
    }
    return 0;
}

/* A loop for each dtype, which the compiler makes vector code of. */
#define FLOATS(X)                                                                                  \
    X(F16, f16, uint16_t)                                                                          \
    X(BF16, bf16, uint16_t)                                                                        \
    X(E4M3, e4m3, uint8_t)                                                                         \
    X(E5M2, e5m2, uint8_t)

te_status te_to_f32(te_dtype dtype, const void *elements, float *numbers, int64_t count)
{
    switch (dtype) {
    case TE_DTYPE_F32:
        if (count > 0) memcpy(numbers, elements, (size_t)count * sizeof *numbers);
        return TE_OK;
#define X(NAME, name, type)                                                                        \
    case TE_DTYPE_##NAME:                                                                          \
        for (int64_t i = 0; i < count; i++) {                                                      \
            numbers[i] = te_##name##_to_f32(((const type *)elements)[i]);                          \
        }                                                                                          \
        return TE_OK;
        FLOATS(X)
#undef X
    default:
        return TE_FAIL(TE_ERROR_INVALID, "to_f32: %s has no conversion", te_dtype_name(dtype));
    }
}

te_status te_from_f32(te_dtype dtype, const float *numbers, void *elements, int64_t count)
{
    switch (dtype) {
    case TE_DTYPE_F32:
        if (count > 0) memcpy(elements, numbers, (size_t)count * sizeof *numbers);
        return TE_OK;
#define X(NAME, name, type)                                                                        \
    case TE_DTYPE_##NAME:                                                                          \
        for (int64_t i = 0; i < count; i++) {                                                      \
            ((type *)elements)[i] = te_f32_to_##name(numbers[i]);                                  \
        }                                                                                          \
        return TE_OK;
        FLOATS(X)
#undef X
    default:
        return TE_FAIL(TE_ERROR_INVALID, "from_f32: %s has no conversion", te_dtype_name(dtype));
    }
}
