/* SPDX-License-Identifier: Apache-2.0
 *
 * ops_cases.h - one case per operator of TE_OPS, for any device.
 *
 * Casts, copies and scales are here, compared bit for bit with the definitions of numbers.h; the
 * other families have files of their own. test_run_ops() expands TE_OPS: an operator without a case
 * does not compile.
 */
#ifndef TE_TESTS_OPS_CASES_H
#define TE_TESTS_OPS_CASES_H

#include "activation_cases.h"
#include "attend_cases.h"
#include "attention_cases.h"
#include "cache_cases.h"
#include "merge_cases.h"
#include "cast_checks.h"
#include "gemm_cases.h"
#include "norm_cases.h"
#include "testing.h"

enum { SHAPES = 9 };
static const int64_t shapes[SHAPES][2] = {{0, 16},  {5, 0},    {1, 1},     {3, 7},    {16, 16},
                                          {64, 64}, {65, 257}, {130, 300}, {17, 1030}};

/* ---- quantize ----------------------------------------------------------------------------- */

typedef struct quantize_case {
    te_dtype input, output;
    int64_t rows, columns, gap;
    int row, column, sums, special, power_2, current;
} quantize_case;

static void run_quantize(test_device *t, const quantize_case *c)
{
    const float zeros[2] = {0}, epsilon = 0x1p-10F;
    test_matrix x = test_matrix_new(t, c->input, c->rows, c->columns, c->gap), sums;
    test_fill_random(t, &x, 3.0, c->special);
    test_matrix row = test_matrix_new(t, c->output, c->rows, (c->columns + 15) / 16 * 16, c->gap);
    test_matrix column =
        test_matrix_new(t, c->output, c->columns, (c->rows + 15) / 16 * 16, c->gap);
    test_buffer *amax = test_float(t, old_amax), *pair = test_floats(t, zeros, 2);
    test_buffer *noop = test_float(t, 1.0F);
    float scale = 37.5F;
    te_quantize_args args = {
        .size = sizeof args, .input = x.tensor, .noop = (float *)(void *)noop->device};
    args.cast = (te_cast_request){.amax = (float *)(void *)amax->device,
                                  .amax_epsilon = epsilon,
                                  .power_2_scale = c->power_2};
    args.cast.result.mode = TE_SCALING_TENSOR;
    args.cast.result.row_scales = test_scales((float *)(void *)pair->device, t->device);
    if (c->column) args.cast.result.column_scales = args.cast.result.row_scales;
    if (c->row) args.cast.result.row = row.tensor;
    if (c->column) args.cast.result.column = column.tensor;
    if (!c->row && !c->column) args.cast.result.row.dtype = c->output;
    if (c->sums) {
        sums = test_vector_new(t, c->input, c->columns);
        args.bias_grad = sums.tensor;
    }
    if (c->current) {
        test_buffer *partials = test_allocate(t, TE_AMAX_PARTIALS * sizeof(float));
        te_amax_args measure = {.size = sizeof measure,
                                .input = x.tensor,
                                .partials = (float *)(void *)partials->device};
        TEST_OK(t, te_amax(t->context, &measure, t->stream));
        args.cast.partials = measure.partials;
        scale = current_scale(largest(&x), te_dtype_max(c->output), epsilon, c->power_2);
    } else {
        args.cast.scale = (float *)(void *)test_float(t, scale)->device;
    }
    args.workspace = test_workspace(t, TE_OP_QUANTIZE, &args, &args.workspace_size);
    TEST_OK(t, te_quantize(t->context, &args, t->stream));
    TEST_CHECK(t, test_read_float(t, amax) == old_amax && test_read_float(t, pair) == 0.0F,
               "the noop flag was not obeyed");
    args.noop = NULL;
    TEST_OK(t, te_quantize(t->context, &args, t->stream));
    TEST_CHECK(t, test_read_float(t, amax) == fmaxf(old_amax, largest(&x)), "amax %g, not %g",
               (double)test_read_float(t, amax), (double)largest(&x));
    float made[2];
    test_download(t, pair);
    memcpy(made, pair->host, sizeof made);
    TEST_CHECK(t, made[TE_SCALES_SCALE] == scale && made[TE_SCALES_INVERSE] == 1.0F / scale,
               "scale pair %g %g, scale %g", (double)made[0], (double)made[1], (double)scale);
    if (c->row) check_codes(t, &x, &row, 0, scale);
    if (c->column) check_codes(t, &x, &column, 1, scale);
    if (c->sums && !c->special) check_sums(t, &x, &sums);
    test_release(t);
}

/* Amax and column sums without a cast. */
static void run_quantize_nothing(test_device *t, te_dtype dtype, int64_t rows, int64_t columns)
{
    test_matrix x = test_matrix_new(t, dtype, rows, columns, 3);
    test_fill_random(t, &x, 2.0, 0);
    test_matrix sums = test_vector_new(t, TE_DTYPE_F32, columns);
    test_buffer *amax = test_float(t, 0.0F);
    te_quantize_args args = {.size = sizeof args, .input = x.tensor, .bias_grad = sums.tensor};
    args.cast.amax = (float *)(void *)amax->device;
    args.workspace = test_workspace(t, TE_OP_QUANTIZE, &args, &args.workspace_size);
    TEST_OK(t, te_quantize(t->context, &args, t->stream));
    TEST_CHECK(t, test_read_float(t, amax) == largest(&x), "amax without a cast");
    check_sums(t, &x, &sums);
    test_release(t);
}

/* Numbers around every rounding boundary of the output, as f32, f16 and bf16. */
static void run_quantize_boundaries(test_device *t, te_dtype input, te_dtype output)
{
    test_format format = test_format_of(output);
    test_matrix x = test_matrix_new(t, input, 16, 128, 0),
                q = test_matrix_new(t, output, 16, 128, 0);
    for (int64_t i = 0; i < x.rows * x.columns; i++) {
        unsigned code = (unsigned)(i / 16);
        double low = test_code_value(&format, code), high = test_code_value(&format, code + 1);
        double value = (low + high) / 2 + (double)(i / 2 % 4 - 1) * ldexp(high - low, -12);
        if (i / 2 % 8 >= 4) value = low + (high - low) * (double)(i % 4) / 4;
        test_set(&x, i / 128, i % 128, i % 2 ? -value : value);
    }
    test_upload(t, x.buffer);
    te_quantize_args args = {.size = sizeof args, .input = x.tensor};
    args.cast.result = (te_operand){.mode = TE_SCALING_TENSOR, .row = q.tensor};
    args.cast.scale = (float *)(void *)test_float(t, 1.0F)->device;
    TEST_OK(t, te_quantize(t->context, &args, t->stream));
    check_codes(t, &x, &q, 0, 1.0F);
    test_release(t);
}

static void test_quantize(test_device *t)
{
    int variant = 0;
    for (int input = 0; input < 3; input++) {
        for (int output = 0; output < 2; output++) {
            for (int shape = 0; shape < SHAPES; shape++, variant++) {
                for (int usage = 0; usage < 4; usage++) {
                    run_quantize(t, &(quantize_case){.input = high_precision[input],
                                                     .output = fp8[output],
                                                     .rows = shapes[shape][0],
                                                     .columns = shapes[shape][1],
                                                     .gap = (variant + usage) % 4,
                                                     .row = usage & 1,
                                                     .column = usage >> 1,
                                                     .sums = (variant + usage) % 2,
                                                     .special = variant % 3 == 0,
                                                     .power_2 = variant / 2 % 2,
                                                     .current = variant % 2});
                }
            }
            run_quantize_boundaries(t, high_precision[input], fp8[output]);
        }
        run_quantize_nothing(t, high_precision[input], 70, 19);
    }
}

/* ---- dequantize, amax, transpose ---------------------------------------------------------- */

static void run_dequantize(test_device *t, te_dtype input, te_dtype output, int by_columns)
{
    const float pair[2] = {0.3F, 4.0F};
    test_matrix x = test_matrix_new(t, output, 67, 130, by_columns), q;
    q = by_columns ? test_matrix_new(t, input, 130, 80, 5) : test_matrix_new(t, input, 67, 144, 5);
    for (int64_t i = 0; i < q.rows; i++) {
        for (int64_t j = 0; j < q.columns; j++) *test_at(&q, i, j) = (unsigned char)(i * 3 + j);
    }
    test_upload(t, q.buffer);
    te_dequantize_args args = {.size = sizeof args, .output = x.tensor};
    args.input =
        test_operand(q.tensor, (float *)(void *)test_floats(t, pair, 2)->device, by_columns);
    TEST_OK(t, te_dequantize(t->context, &args, t->stream));
    test_fetch(t, &x);
    for (int64_t r = 0; r < x.rows; r++) {
        for (int64_t c = 0; c < x.columns; c++) {
            float code = (float)(by_columns ? test_get(&q, c, r) : test_get(&q, r, c));
            double value = (double)(code * pair[TE_SCALES_INVERSE]), got = test_get(&x, r, c);
            if (output != TE_DTYPE_F32) value = test_decode(output, test_encode(output, value));
            TEST_CHECK(t, got == value || (isnan(got) && isnan(value)), "%g * %g gave %g",
                       (double)code, (double)pair[TE_SCALES_INVERSE], got);
        }
    }
    test_release(t);
}

static void test_dequantize(test_device *t)
{
    for (int i = 0; i < 12; i++) {
        run_dequantize(t, fp8[i % 2], high_precision[i / 2 % 3], i / 6);
    }
}

static void test_amax(test_device *t)
{
    for (int i = 0; i < 3 * SHAPES; i++) {
        test_matrix x =
            test_matrix_new(t, high_precision[i % 3], shapes[i / 3][0], shapes[i / 3][1], i % 5);
        test_buffer *partials = test_allocate(t, TE_AMAX_PARTIALS * sizeof(float));
        te_amax_args args = {
            .size = sizeof args, .input = x.tensor, .partials = (float *)(void *)partials->device};
        float amax = 0.0F, part;
        test_fill_random(t, &x, 1.0, i % 2);
        TEST_OK(t, te_amax(t->context, &args, t->stream));
        test_download(t, partials);
        for (int p = 0; p < TE_AMAX_PARTIALS; p++) {
            memcpy(&part, partials->host + (size_t)p * sizeof part, sizeof part);
            TEST_CHECK(t, part >= 0.0F, "partial %d is %g", p, (double)part);
            amax = fmaxf(amax, part);
        }
        TEST_CHECK(t, amax == largest(&x), "amax %g, not %g", (double)amax, (double)largest(&x));
        test_release(t);
    }
}

static void test_transpose(test_device *t)
{
    const te_dtype dtypes[] = {TE_DTYPE_E4M3, TE_DTYPE_E5M2, TE_DTYPE_U8};
    for (int i = 0; i < 3 * SHAPES; i++) {
        int64_t rows = shapes[i / 3][0], columns = shapes[i / 3][1];
        test_matrix x = test_matrix_new(t, dtypes[i % 3], rows, columns, i % 4);
        test_matrix y = test_matrix_new(t, dtypes[i % 3], columns, rows + i % 7, i % 5);
        for (int64_t r = 0; r < rows; r++) {
            for (int64_t c = 0; c < columns; c++) *test_at(&x, r, c) = (unsigned char)test_random();
        }
        test_upload(t, x.buffer);
        te_transpose_args args = {.size = sizeof args, .input = x.tensor, .output = y.tensor};
        TEST_OK(t, te_transpose(t->context, &args, t->stream));
        test_fetch(t, &y);
        for (int64_t r = 0; r < y.columns; r++) {
            for (int64_t c = 0; c < columns; c++) {
                unsigned expected = r < rows ? *test_at(&x, r, c) : 0;
                TEST_CHECK(t, test_code(&y, c, r) == expected, "element (%lld, %lld)", (long long)r,
                           (long long)c);
            }
        }
        test_release(t);
    }
}

/* ---- scaling update ----------------------------------------------------------------------- */

enum { SLOTS = 8, HISTORY = 5 };

/* One slot from its definition: history[0] is live, the newest finished step is last. */
static float update_slot(float *history, int length, float scale, float fp8_max, int most_recent)
{
    float current = history[0], amax = current;
    for (int i = 1; i < length && !most_recent; i++) amax = fmaxf(amax, history[i]);
    if (current == 0.0F) return scale;
    for (int i = 1; i + 1 < length; i++) history[i] = history[i + 1];
    history[length - 1] = current;
    history[0] = 0.0F;
    if (!isfinite(amax) || amax <= 0.0F) return scale;
    return isinf(fp8_max / amax) ? 3.402823466e+38F : fp8_max / amax;
}

static int same_float(float a, float b)
{
    return a == b || (isnan(a) && isnan(b));
}

/* Six steps of eight slots, against the definition. */
static void run_scaling_update(test_device *t, int length, te_amax_algo algo)
{
    const float amaxes[] = {2.0F, 0.0F, INFINITY, NAN, 1e-40F, 3.0F, 0.1F, 0.0F, 65504.0F};
    float expected[SLOTS][HISTORY] = {{0}}, scales[SLOTS];
    test_matrix history = test_matrix_new(t, TE_DTYPE_F32, length, SLOTS, 2);
    test_matrix scale = test_vector_new(t, TE_DTYPE_F32, SLOTS);
    for (int s = 0; s < SLOTS; s++) {
        scales[s] = (float)(s + 1);
        test_set(&scale, 0, s, (double)scales[s]);
        for (int row = 0; row < length; row++) test_set(&history, row, s, 0.0);
    }
    test_upload(t, scale.buffer);
    te_scaling_update_args args = {.size = sizeof args,
                                   .scale = scale.tensor,
                                   .history = history.tensor,
                                   .fp8_max = 448.0F,
                                   .algo = algo};
    for (int step = 0; step < 6; step++) {
        for (int s = 0; s < SLOTS; s++) {
            expected[s][0] = amaxes[(unsigned)(step * (s + 1) + s) % 9];
            test_set(&history, 0, s, (double)expected[s][0]);
            scales[s] = update_slot(expected[s], length, scales[s], 448.0F, algo != TE_AMAX_MAX);
        }
        test_upload(t, history.buffer);
        TEST_OK(t, te_scaling_update(t->context, &args, t->stream));
        test_fetch(t, &history);
        test_fetch(t, &scale);
        for (int s = 0; s < SLOTS; s++) {
            TEST_CHECK(t, same_float((float)test_get(&scale, 0, s), scales[s]),
                       "length %d step %d slot %d: scale %g, not %g", length, step, s,
                       test_get(&scale, 0, s), (double)scales[s]);
            for (int row = 0; row < length; row++) {
                TEST_CHECK(t, same_float((float)test_get(&history, row, s), expected[s][row]),
                           "length %d step %d slot %d row %d: %g, not %g", length, step, s, row,
                           test_get(&history, row, s), (double)expected[s][row]);
            }
        }
    }
    test_release(t);
}

static void test_scaling_update(test_device *t)
{
    for (int length = 1; length <= HISTORY; length++) {
        run_scaling_update(t, length, TE_AMAX_MAX);
        run_scaling_update(t, length, TE_AMAX_MOST_RECENT);
    }
}

/* ---- fill, cast --------------------------------------------------------------------------- */

static void test_fill(test_device *t)
{
    const double values[] = {0.0, 1.0, -2.5, 300.0, 1e9, (double)NAN, 0.1};
    for (int dtype = 0; dtype < TE_DTYPE_COUNT; dtype++) {
        for (int i = 0; i < 7; i++) {
            int integer = dtype >= TE_DTYPE_U8;
            test_matrix x = test_matrix_new(t, (te_dtype)dtype, 5, 37, i % 3);
            te_fill_args args = {.size = sizeof args, .output = x.tensor, .value = values[i]};
            double expected = values[i];
            TEST_OK(t, te_fill(t->context, &args, t->stream));
            test_fetch(t, &x);
            if (dtype == TE_DTYPE_F32) expected = (double)(float)expected;
            if (dtype > TE_DTYPE_F32 && !integer) {
                expected = test_decode((te_dtype)dtype, test_encode((te_dtype)dtype, expected));
            }
            if (integer) expected = isnan(expected) ? 0.0 : nearbyint(expected);
            if (dtype == TE_DTYPE_U8) expected = fmin(fmax(expected, 0.0), 255.0);
            for (int64_t j = 0; j < x.rows * x.columns; j++) {
                double got = test_get(&x, j / x.columns, j % x.columns);
                TEST_CHECK(t, got == expected || (isnan(got) && isnan(expected)), "%s %g, not %g",
                           te_dtype_name((te_dtype)dtype), got, expected);
            }
            test_release(t);
        }
    }
}

/* One pair of dtypes; the output is cut or padded. Bits are kept within a dtype. */
static void run_cast(test_device *t, te_dtype from, te_dtype to, int64_t rows, int64_t columns)
{
    test_matrix x = test_matrix_new(t, from, 33, 70, 1),
                y = test_matrix_new(t, to, rows, columns, 2);
    if (te_dtype_max(from) > 0.0F) {
        test_fill_random(t, &x, 2.0, 1);
    }
    te_cast_args args = {.size = sizeof args, .input = x.tensor, .output = y.tensor};
    TEST_OK(t, te_cast(t->context, &args, t->stream));
    test_fetch(t, &y);
    for (int64_t r = 0; r < rows; r++) {
        for (int64_t c = 0; c < columns; c++) {
            const unsigned char zeros[8] = {0};
            int inside = r < x.rows && c < x.columns, equal;
            if (from == to || !inside) {
                equal = memcmp(test_at(&y, r, c), inside ? test_at(&x, r, c) : zeros, y.bytes) == 0;
            } else {
                double value = test_get(&x, r, c), got = test_get(&y, r, c);
                if (to != TE_DTYPE_F32) value = test_decode(to, test_encode(to, value));
                equal = isnan(value) ? isnan(got) : got == value && signbit(got) == signbit(value);
            }
            TEST_CHECK(t, equal, "%s to %s at (%lld, %lld): %g from %g", te_dtype_name(from),
                       te_dtype_name(to), (long long)r, (long long)c, test_get(&y, r, c),
                       inside ? test_get(&x, r, c) : 0.0);
        }
    }
    test_release(t);
}

static void test_cast(test_device *t)
{
    for (int from = 0; from < TE_DTYPE_COUNT; from++) {
        for (int to = 0; to < TE_DTYPE_COUNT; to++) {
            if (from != to && (from > TE_DTYPE_BF16 || to > TE_DTYPE_BF16)) continue;
            run_cast(t, (te_dtype)from, (te_dtype)to, 33, 70);
            run_cast(t, (te_dtype)from, (te_dtype)to, 40, 64);
            run_cast(t, (te_dtype)from, (te_dtype)to, 20, 96);
            run_cast(t, (te_dtype)from, (te_dtype)to, 0, 3);
        }
    }
}

/* ---- all ---------------------------------------------------------------------------------- */

/* Runs the case of every operator. */
static void test_run_ops(test_device *t)
{
#define X(NAME, name)                                                                              \
    t->running = #name;                                                                            \
    test_##name(t);
    TE_OPS(X)
#undef X
}

#endif
