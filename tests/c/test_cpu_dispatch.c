/* SPDX-License-Identifier: Apache-2.0
 *
 * test_cpu_dispatch.c - the CPU backend gives the same bits with every instruction set and with
 * every number of threads. Only the portable GEMM may differ, which has no fused multiply-add.
 */
#if defined(_OPENMP)
#include <omp.h>
#endif

#include "testing.h"

/* An internal hook (csrc/cpu/isa.h), reachable through the static library only. */
te_status te_cpu_force_isa(int isa);

enum { PORTABLE, AVX2, AVX512, BEST = -1, ROWS = 150, COLUMNS = 1027, DEPTH = 560 };

static int copy(void *target, const void *source, size_t bytes)
{
    memcpy(target, source, bytes);
    return 0;
}

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

/* All that quantize makes, one after the other. */
static void quantize(test_device *t, te_tensor input, te_dtype output, test_buffer *made)
{
    test_seed = 7; /* the same column sums: they read finite input only */
    test_matrix row = test_matrix_new(t, output, ROWS, COLUMNS, 0);
    test_matrix column = test_matrix_new(t, output, COLUMNS, ROWS, 0);
    test_matrix sums = test_vector_new(t, TE_DTYPE_F32, COLUMNS);
    test_matrix finite = test_matrix_new(t, input.dtype, ROWS, COLUMNS, 0);
    test_fill_random(t, &finite, 1.0, 0);
    test_buffer *amax = test_float(t, 0.0F);
    te_quantize_args args = {.size = sizeof args, .input = input};
    args.output = (te_quantized){
        .mode = TE_SCALING_TENSOR, .rowwise = row.tensor, .columnwise = column.tensor};
    args.output.scale = (float *)(void *)test_float(t, 3.7F)->device;
    args.output.amax = (float *)(void *)amax->device;
    TEST_OK(t, te_quantize(t->context, &args, NULL));
    args.input = finite.tensor;
    args.output = (te_quantized){.mode = TE_SCALING_NONE};
    args.bias_grad = sums.tensor;
    args.workspace = test_workspace(t, TE_OP_QUANTIZE, &args, &args.workspace_size);
    TEST_OK(t, te_quantize(t->context, &args, NULL));
    size_t codes = (size_t)ROWS * COLUMNS;
    memcpy(made->host, row.buffer->device, codes);
    memcpy(made->host + codes, column.buffer->device, codes);
    memcpy(made->host + 2 * codes, sums.buffer->device, COLUMNS * sizeof(float));
    memcpy(made->host + 2 * codes + COLUMNS * sizeof(float), amax->device, sizeof(float));
}

static void compare_quantize(test_device *t, te_dtype input, te_dtype output)
{
    size_t bytes = 2 * (size_t)ROWS * COLUMNS + (COLUMNS + 1) * sizeof(float);
    test_matrix x = any_bits(t, input, ROWS, COLUMNS);
    test_buffer *expected = test_allocate(t, bytes), *made = test_allocate(t, bytes);
    for (int isa = PORTABLE; isa <= AVX512; isa++) {
        if (te_cpu_force_isa(isa) != TE_OK) continue;
        quantize(t, x.tensor, output, isa == PORTABLE ? expected : made);
        if (isa == PORTABLE) continue;
        TEST_CHECK(t, memcmp(expected->host, made->host, bytes) == 0,
                   "%s to %s: instruction set %d gives other bits", te_dtype_name(input),
                   te_dtype_name(output), isa);
    }
    test_release(t);
}

static void compare_cast(test_device *t, te_dtype from, te_dtype to)
{
    test_matrix x = any_bits(t, from, ROWS, COLUMNS), y[AVX512 + 1];
    for (int isa = PORTABLE; isa <= AVX512; isa++) {
        if (te_cpu_force_isa(isa) != TE_OK) continue;
        y[isa] = test_matrix_new(t, to, ROWS, COLUMNS, 0);
        te_cast_args args = {.size = sizeof args, .input = x.tensor, .output = y[isa].tensor};
        TEST_OK(t, te_cast(t->context, &args, NULL));
        TEST_CHECK(
            t, memcmp(y[PORTABLE].buffer->device, y[isa].buffer->device, y[isa].buffer->bytes) == 0,
            "%s to %s: instruction set %d gives other bits", te_dtype_name(from), te_dtype_name(to),
            isa);
    }
    test_release(t);
}

/* d = gelu(a b + bias). */
static test_matrix multiply(test_device *t, const test_matrix *a, const test_matrix *b,
                            const test_matrix *bias)
{
    test_matrix d = test_matrix_new(t, TE_DTYPE_F32, a->rows, b->rows, 0);
    te_gemm_args args = {
        .size = sizeof args, .d = d.tensor, .bias = bias->tensor, .epilogue = TE_EPILOGUE_GELU};
    args.a = (te_gemm_operand){.data = a->tensor};
    args.b = (te_gemm_operand){.data = b->tensor, .transposed = 1};
    args.workspace = test_workspace(t, TE_OP_GEMM, &args, &args.workspace_size);
    TEST_OK(t, te_gemm(t->context, &args, NULL));
    return d;
}

static void compare_gemm(test_device *t, int64_t m, int64_t n)
{
    test_matrix a = test_matrix_new(t, TE_DTYPE_F32, m, DEPTH, 1), d[2];
    test_matrix b = test_matrix_new(t, TE_DTYPE_F32, n, DEPTH, 0);
    test_matrix bias = test_vector_new(t, TE_DTYPE_F32, n);
    test_fill_random(t, &a, 1.0, 0);
    test_fill_random(t, &b, 1.0, 0);
    test_fill_random(t, &bias, 1.0, 0);
    if (te_cpu_force_isa(AVX2) == TE_OK && te_cpu_force_isa(AVX512) == TE_OK) {
        d[0] = multiply(t, &a, &b, &bias);
        (void)te_cpu_force_isa(AVX2);
        d[1] = multiply(t, &a, &b, &bias);
        TEST_CHECK(t, memcmp(d[0].buffer->device, d[1].buffer->device, d[0].buffer->bytes) == 0,
                   "AVX2 and AVX-512 give other bits");
    }
    (void)te_cpu_force_isa(BEST);
#if defined(_OPENMP)
    int threads = omp_get_max_threads();
    omp_set_num_threads(1);
    d[0] = multiply(t, &a, &b, &bias);
    for (int count = 2; count <= 5; count++) {
        omp_set_num_threads(count);
        d[1] = multiply(t, &a, &b, &bias);
        TEST_CHECK(t, memcmp(d[0].buffer->device, d[1].buffer->device, d[0].buffer->bytes) == 0,
                   "%d threads give other bits than one", count);
    }
    omp_set_num_threads(threads);
#endif
    test_release(t);
}

int main(void)
{
    static test_device t = {.device = {TE_DEVICE_CPU, 0},
                            .running = "dispatch",
                            .allocate = malloc,
                            .release = free,
                            .upload = copy,
                            .download = copy};
    if (te_context_create(t.device, &t.context) != TE_OK) {
        (void)fprintf(stderr, "%s\n", te_last_error());
        return EXIT_FAILURE;
    }
    for (int input = TE_DTYPE_F32; input <= TE_DTYPE_BF16; input++) {
        compare_quantize(&t, (te_dtype)input, TE_DTYPE_E4M3);
        compare_quantize(&t, (te_dtype)input, TE_DTYPE_E5M2);
        for (int to = TE_DTYPE_F32; to <= TE_DTYPE_BF16; to++) {
            compare_cast(&t, (te_dtype)input, (te_dtype)to);
        }
    }
    compare_gemm(&t, 400, 70);
    compare_gemm(&t, 37, 600);
    TEST_CHECK(&t, te_cpu_force_isa(99) == TE_ERROR_INVALID, "instruction set 99");
    (void)te_cpu_force_isa(BEST);
    te_context_destroy(t.context);
    if (t.failures > 0) (void)fprintf(stderr, "%d checks failed\n", t.failures);
    return t.failures > 0 ? EXIT_FAILURE : EXIT_SUCCESS;
}
