/* SPDX-License-Identifier: Apache-2.0
 *
 * numbers.h - random numbers, elements of tensors as doubles, and the number formats, defined once
 * more, slowly and by search.
 */
#ifndef TE_TESTS_NUMBERS_H
#define TE_TESTS_NUMBERS_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#include <transformer_engine.h>

/* ---- random numbers ----------------------------------------------------------------------- */

static uint64_t test_seed = 1;

static inline uint32_t test_random(void)
{
    test_seed = test_seed * 6364136223846793005U + 1442695040888963407U;
    return (uint32_t)(test_seed >> 32);
}

/* In (-1, 1). */
static inline double test_uniform(void)
{
    return ((double)test_random() + 0.5) / 2147483648.0 - 1.0;
}

/* ---- operands ----------------------------------------------------------------------------- */

static inline te_tensor test_scales(float *scales, te_device device)
{
    return (te_tensor){.data = scales,
                       .dtype = TE_DTYPE_F32,
                       .device = device,
                       .ndim = 1,
                       .shape = {TE_TENSOR_SCALES},
                       .strides = {1}};
}

/* An operand of a GEMM over data that lies as the GEMM reads it: high precision, or FP8 with
 * scales, by rows or by columns. */
static inline te_operand test_operand(te_tensor data, float *scales, int by_columns)
{
    if (!te_dtype_is_fp8(data.dtype)) return (te_operand){.wide = data};
    if (by_columns) {
        return (te_operand){.mode = TE_SCALING_TENSOR,
                            .column = data,
                            .column_scales = test_scales(scales, data.device)};
    }
    return (te_operand){
        .mode = TE_SCALING_TENSOR, .row = data, .row_scales = test_scales(scales, data.device)};
}

/* ---- formats ------------------------------------------------------------------------------ */

typedef struct test_format {
    int exponent_bits, mantissa_bits;
    unsigned largest; /* code of the largest finite value */
    int saturates;
} test_format;

static inline test_format test_format_of(te_dtype dtype)
{
    switch (dtype) {
    case TE_DTYPE_F32:
        return (test_format){8, 23, 0x7f7fffff, 0};
    case TE_DTYPE_F16:
        return (test_format){5, 10, 0x7bff, 0};
    case TE_DTYPE_BF16:
        return (test_format){8, 7, 0x7f7f, 0};
    case TE_DTYPE_E4M3:
        return (test_format){4, 3, 0x7e, 1};
    default:
        return (test_format){5, 2, 0x7b, 1};
    }
}

/* Value of a non-negative code, as if there were neither Inf nor NaN. */
static inline double test_code_value(const test_format *format, unsigned code)
{
    int bias = (1 << (format->exponent_bits - 1)) - 1;
    int exponent = (int)(code >> format->mantissa_bits);
    unsigned mantissa = code & ((1U << format->mantissa_bits) - 1);
    if (exponent > 0) mantissa |= 1U << format->mantissa_bits;
    return ldexp((double)mantissa, (exponent > 0 ? exponent : 1) - bias - format->mantissa_bits);
}

/* The nearest code of a narrow float by bisection; ties to the even one. NaN: any NaN code. */
static inline unsigned test_encode(te_dtype dtype, double value)
{
    test_format format = test_format_of(dtype);
    unsigned width = (unsigned)(format.exponent_bits + format.mantissa_bits);
    unsigned sign = signbit(value) ? 1U << width : 0, low = 0, high = format.largest + 1;
    double magnitude = fabs(value);
    if (isnan(value)) return (1U << width) - 1; /* FP8 drops the sign */
    if (magnitude >= test_code_value(&format, high)) {
        return sign | (format.saturates ? format.largest : high);
    }
    while (high - low > 1) {
        unsigned middle = (low + high) / 2;
        if (test_code_value(&format, middle) <= magnitude) {
            low = middle;
        } else {
            high = middle;
        }
    }
    double below = magnitude - test_code_value(&format, low);
    double above = test_code_value(&format, high) - magnitude;
    unsigned code = above < below || (above == below && (high & 1) == 0) ? high : low;
    if (format.saturates && code > format.largest) code = format.largest;
    return sign | code;
}

static inline double test_decode(te_dtype dtype, unsigned code)
{
    test_format format = test_format_of(dtype);
    unsigned width = (unsigned)(format.exponent_bits + format.mantissa_bits);
    unsigned magnitude = code & ((1U << width) - 1);
    double value = test_code_value(&format, magnitude);
    if (magnitude > format.largest) {
        int infinite =
            dtype != TE_DTYPE_E4M3 && (magnitude & ((1U << format.mantissa_bits) - 1)) == 0;
        value = infinite ? (double)INFINITY : (double)NAN;
    }
    return (code >> width) & 1 ? -value : value;
}

/* Half a unit in the last place of 1. */
static inline double test_dtype_eps(te_dtype dtype)
{
    return ldexp(0.5, -test_format_of(dtype).mantissa_bits);
}

/* ---- elements ----------------------------------------------------------------------------- */

static inline double test_load(te_dtype dtype, const void *element)
{
    float single;
    uint16_t half;
    int32_t i32;
    int64_t i64;
    switch (dtype) {
    case TE_DTYPE_F32:
        memcpy(&single, element, sizeof single);
        return (double)single;
    case TE_DTYPE_F16:
    case TE_DTYPE_BF16:
        memcpy(&half, element, sizeof half);
        return test_decode(dtype, half);
    case TE_DTYPE_I32:
        memcpy(&i32, element, sizeof i32);
        return (double)i32;
    case TE_DTYPE_I64:
        memcpy(&i64, element, sizeof i64);
        return (double)i64;
    case TE_DTYPE_U8:
        return *(const unsigned char *)element;
    default:
        return test_decode(dtype, *(const unsigned char *)element);
    }
}

/* Floats and bytes only. */
static inline void test_store(te_dtype dtype, void *element, double value)
{
    float single = (float)value;
    uint16_t half;
    switch (dtype) {
    case TE_DTYPE_F32:
        memcpy(element, &single, sizeof single);
        break;
    case TE_DTYPE_F16:
    case TE_DTYPE_BF16:
        half = (uint16_t)test_encode(dtype, value);
        memcpy(element, &half, sizeof half);
        break;
    case TE_DTYPE_U8:
        *(unsigned char *)element = (unsigned char)value;
        break;
    default:
        *(unsigned char *)element = (unsigned char)test_encode(dtype, value);
    }
}

/* GELU by tanh. */
static inline double test_gelu(double x)
{
    return 0.5 * x * (1.0 + tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)));
}

#endif
