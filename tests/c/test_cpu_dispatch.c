/* SPDX-License-Identifier: Apache-2.0
 *
 * test_cpu_dispatch.c - the CPU backend gives the same bits with every instruction set and with
 * every number of threads. Only the portable GEMM may differ, which has no fused multiply-add.
 */
#include "cpu_variants.h"

enum { ROWS = 150, COLUMNS = 1027, DEPTH = 560 };

/* Any bit pattern: NaN, Inf and subnormals of every dtype are among them. */
static test_matrix any_bits(test_device *t, te_dtype dtype, int64_t rows, int64_t columns)
{
    test_matrix matrix = test_matrix_new(t, dtype, rows, columns, 0);
    for (size_t i = 0; i < matrix.buffer->bytes; i++) {
        matrix.buffer->host[i] = (unsigned char)test_random();
    }
    test_upload(t, matrix.buffer);
    return matrix;
}

/* A conversion: quantize makes all that it can, cast one matrix. */
typedef struct conversion {
    te_tensor input;
    te_dtype to;
} conversion;

static uint64_t quantize(test_device *t, const void *data)
{
    const conversion *c = data;
    const te_dtype output = c->to;
    test_seed = 7; /* the same column sums: they read finite input only */
    test_matrix row = test_matrix_new(t, output, ROWS, COLUMNS, 0);
    test_matrix column = test_matrix_new(t, output, COLUMNS, ROWS, 0);
    test_matrix sums = test_vector_new(t, TE_DTYPE_F32, COLUMNS);
    test_matrix finite = test_matrix_new(t, c->input.dtype, ROWS, COLUMNS, 0);
    test_fill_random(t, &finite, 1.0, 0);
    test_buffer *amax = test_float(t, 0.0F);
    te_quantize_args args = {.size = sizeof args, .input = c->input};
    args.cast.result =
        (te_operand){.mode = TE_SCALING_TENSOR, .row = row.tensor, .column = column.tensor};
    args.cast.scale = (float *)(void *)test_float(t, 3.7F)->device;
    args.cast.amax = (float *)(void *)amax->device;
    TEST_OK(t, te_quantize(t->context, &args, NULL));
    args.input = finite.tensor;
    args.cast = (te_cast_request){.amax = NULL};
    args.bias_grad = sums.tensor;
    args.workspace = test_workspace(t, TE_OP_QUANTIZE, &args, &args.workspace_size);
    TEST_OK(t, te_quantize(t->context, &args, NULL));
    const test_buffer *made[] = {row.buffer, column.buffer, sums.buffer, amax};
    uint64_t hash = empty_digest;
    for (int i = 0; i < 4; i++) hash = test_digest(hash, made[i]);
    return hash;
}

static uint64_t cast(test_device *t, const void *data)
{
    const conversion *c = data;
    test_matrix y = test_matrix_new(t, c->to, ROWS, COLUMNS, 0);
    te_cast_args args = {.size = sizeof args, .input = c->input, .output = y.tensor};
    TEST_OK(t, te_cast(t->context, &args, NULL));
    return test_digest(empty_digest, y.buffer);
}

static void compare_conversion(test_device *t, te_dtype from, te_dtype to, test_work work)
{
    conversion c = {any_bits(t, from, ROWS, COLUMNS).tensor, to};
    char what[32];
    (void)snprintf(what, sizeof what, "%s to %s", te_dtype_name(from), te_dtype_name(to));
    compare_variants(t, what, PORTABLE, work, &c);
    test_release(t);
}

/* d = gelu(a b + bias). */
typedef struct product {
    test_matrix a, b, bias;
} product;

static uint64_t multiply(test_device *t, const void *data)
{
    const product *p = data;
    test_matrix d = test_matrix_new(t, TE_DTYPE_F32, p->a.rows, p->b.rows, 0);
    te_gemm_args args = {
        .size = sizeof args, .d = d.tensor, .bias = p->bias.tensor, .epilogue = TE_EPILOGUE_GELU};
    args.a.wide = p->a.tensor;
    args.b.wide = p->b.tensor;
    args.b_transposed = 1;
    args.workspace = test_workspace(t, TE_OP_GEMM, &args, &args.workspace_size);
    TEST_OK(t, te_gemm(t->context, &args, NULL));
    return test_digest(empty_digest, d.buffer);
}

static void compare_gemm(test_device *t, int64_t m, int64_t n)
{
    product p = {.a = test_matrix_new(t, TE_DTYPE_F32, m, DEPTH, 1),
                 .b = test_matrix_new(t, TE_DTYPE_F32, n, DEPTH, 0),
                 .bias = test_vector_new(t, TE_DTYPE_F32, n)};
    test_fill_random(t, &p.a, 1.0, 0);
    test_fill_random(t, &p.b, 1.0, 0);
    test_fill_random(t, &p.bias, 1.0, 0);
    compare_variants(t, "gemm", AVX2, multiply, &p);
    test_release(t);
}

static void check_all(test_device *t)
{
    for (int input = TE_DTYPE_F32; input <= TE_DTYPE_BF16; input++) {
        compare_conversion(t, (te_dtype)input, TE_DTYPE_E4M3, quantize);
        compare_conversion(t, (te_dtype)input, TE_DTYPE_E5M2, quantize);
        for (int to = TE_DTYPE_F32; to <= TE_DTYPE_BF16; to++) {
            compare_conversion(t, (te_dtype)input, (te_dtype)to, cast);
        }
    }
    compare_gemm(t, 400, 70);
    compare_gemm(t, 37, 600);
    TEST_CHECK(t, te_cpu_force_isa(99) == TE_ERROR_INVALID, "instruction set 99");
    (void)te_cpu_force_isa(BEST);
}

int main(void)
{
    return test_on_cpu("dispatch", check_all);
}
