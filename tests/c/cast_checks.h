/* SPDX-License-Identifier: Apache-2.0
 *
 * cast_checks.h - what quantize and the operators that are fused with it have in common: FP8 codes,
 * column sums, amax and scales, checked against their definitions.
 */
#ifndef TE_TESTS_CAST_CHECKS_H
#define TE_TESTS_CAST_CHECKS_H

#include "testing.h"

static const te_dtype high_precision[] = {TE_DTYPE_F32, TE_DTYPE_F16, TE_DTYPE_BF16};
static const te_dtype fp8[] = {TE_DTYPE_E4M3, TE_DTYPE_E5M2};

static void check_codes(test_device *t, const test_matrix *x, test_matrix *q, int transposed,
                        float scale)
{
    test_fetch(t, q);
    for (int64_t i = 0; i < q->rows; i++) {
        for (int64_t j = 0; j < q->columns; j++) {
            int64_t r = transposed ? j : i, c = transposed ? i : j;
            unsigned expected = 0, code = test_code(q, i, j);
            float value = 0.0F;
            if (r < x->rows && c < x->columns) {
                value = (float)test_get(x, r, c);
                expected = test_encode(q->tensor.dtype, (double)(value * scale));
            }
            TEST_CHECK(t, code == expected, "%s of %g * %g at (%lld, %lld): %02x, expected %02x",
                       te_dtype_name(q->tensor.dtype), (double)value, (double)scale, (long long)r,
                       (long long)c, code, expected);
        }
    }
}

static void check_sums(test_device *t, const test_matrix *x, test_matrix *sums)
{
    test_fetch(t, sums);
    for (int64_t c = 0; c < x->columns; c++) {
        double sum = 0, size = 0;
        for (int64_t r = 0; r < x->rows; r++) {
            sum += test_get(x, r, c);
            size += fabs(test_get(x, r, c));
        }
        double bound = size * 0x1p-23 * sqrt((double)x->rows + 1) +
                       fabs(sum) * test_dtype_eps(sums->tensor.dtype) + 0x1p-24;
        TEST_CHECK(t, fabs(test_get(sums, 0, c) - sum) <= bound, "sum of column %lld: %g, not %g",
                   (long long)c, test_get(sums, 0, c), sum);
    }
}

/* Largest |x|, NaN ignored. */
static float largest(const test_matrix *x)
{
    float amax = 0.0F;
    for (int64_t r = 0; r < x->rows; r++) {
        for (int64_t c = 0; c < x->columns; c++)
            amax = fmaxf(amax, fabsf((float)test_get(x, r, c)));
    }
    return amax;
}

/* Current scaling, from its definition. */
static float current_scale(float amax, float fp8_max, float epsilon, int power_2)
{
    int exponent;
    if (amax < epsilon) amax = epsilon;
    if (!isfinite(amax) || amax == 0.0F) return 1.0F;
    float scale = fp8_max / amax;
    if (isinf(scale)) scale = 3.402823466e+38F;
    if (power_2) {
        (void)frexpf(scale, &exponent);
        scale = ldexpf(0.5F, exponent);
    }
    return scale;
}

/* ---- fused casts -------------------------------------------------------------------------- */

typedef struct cast_case {
    te_dtype output, codes;
    int64_t gap;
    int row, column, power_2;
    int current; /* the scale comes from partials */
} cast_case;

/* What a fused operator is asked for beside the fp32 values. */
typedef struct cast_outputs {
    test_matrix wide, row, column;
    test_buffer *amax, *scales[2], *written; /* scales: of the rows, of the columns */
    te_cast_request cast;
    float scale;
} cast_outputs;

static const float old_amax = 0.75F;

/* Outputs for values that are known: `made` [rows, columns] f32. */
static cast_outputs new_cast_outputs(test_device *t, const cast_case *c, const test_matrix *made)
{
    const float zeros[2] = {0};
    const float epsilon = 0x1p-10F;
    cast_outputs o = {.scale = 9.25F};
    o.wide = test_matrix_new(t, c->output, made->rows, made->columns, c->gap);
    o.row = test_matrix_new(t, c->codes, made->rows, (made->columns + 15) / 16 * 16, c->gap);
    o.column = test_matrix_new(t, c->codes, made->columns, (made->rows + 15) / 16 * 16, c->gap);
    o.amax = test_float(t, old_amax);
    o.scales[0] = o.scales[1] = test_floats(t, zeros, 2);
    if (c->gap % 2 != 0) o.scales[1] = test_floats(t, zeros, 2);
    o.written = test_allocate(t, TE_AMAX_PARTIALS * sizeof(float));
    o.cast.result =
        (te_operand){.mode = TE_SCALING_TENSOR,
                     .wide = o.wide.tensor,
                     .row_scales = test_scales((float *)(void *)o.scales[0]->device, t->device),
                     .column_scales = test_scales((float *)(void *)o.scales[1]->device, t->device)};
    o.cast.amax = (float *)(void *)o.amax->device;
    o.cast.amax_partials = (float *)(void *)o.written->device;
    o.cast.power_2_scale = c->power_2;
    o.cast.result.row.dtype = c->codes;
    if (c->row) o.cast.result.row = o.row.tensor;
    if (c->column) o.cast.result.column = o.column.tensor;
    if (c->current) {
        float partials[TE_AMAX_PARTIALS] = {0};
        partials[test_random() % TE_AMAX_PARTIALS] = largest(made);
        o.cast.partials = (float *)(void *)test_floats(t, partials, TE_AMAX_PARTIALS)->device;
        o.cast.amax_epsilon = epsilon;
        o.scale = current_scale(largest(made), te_dtype_max(c->codes), epsilon, c->power_2);
    } else {
        o.cast.scale = (float *)(void *)test_float(t, o.scale)->device;
    }
    return o;
}

/* High precision is the fp32 value rounded once, FP8 as well. */
static void check_cast_outputs(test_device *t, const cast_case *c, cast_outputs *o,
                               const test_matrix *made)
{
    float scales[TE_TENSOR_SCALES], part, amax = 0.0F;
    test_fetch(t, &o->wide);
    for (int64_t i = 0; i < made->rows * made->columns; i++) {
        double value = test_get(made, i / made->columns, i % made->columns);
        double got = test_get(&o->wide, i / made->columns, i % made->columns);
        if (c->output != TE_DTYPE_F32)
            value = test_decode(c->output, test_encode(c->output, value));
        TEST_CHECK(t, got == value || (isnan(got) && isnan(value)), "%s %.9g, not %.9g",
                   te_dtype_name(c->output), got, value);
    }
    if (c->row) check_codes(t, made, &o->row, 0, o->scale);
    if (c->column) check_codes(t, made, &o->column, 1, o->scale);
    for (int i = 0; i < 2; i++) {
        test_download(t, o->scales[i]);
        memcpy(scales, o->scales[i]->host, sizeof scales);
        TEST_CHECK(
            t, scales[TE_SCALES_SCALE] == o->scale && scales[TE_SCALES_INVERSE] == 1.0F / o->scale,
            "scales %g %g, scale %g", (double)scales[TE_SCALES_SCALE],
            (double)scales[TE_SCALES_INVERSE], (double)o->scale);
    }
    test_download(t, o->written);
    for (int i = 0; i < TE_AMAX_PARTIALS; i++) {
        memcpy(&part, o->written->host + (size_t)i * sizeof part, sizeof part);
        TEST_CHECK(t, part >= 0.0F, "partial %d is %g", i, (double)part);
        amax = fmaxf(amax, part);
    }
    TEST_CHECK(t, amax == largest(made), "partial maxima %g, not %g", (double)amax,
               (double)largest(made));
    amax = test_read_float(t, o->amax);
    TEST_CHECK(t, amax == fmaxf(old_amax, largest(made)), "amax %g, not %g", (double)amax,
               (double)fmaxf(old_amax, largest(made)));
}

#endif
