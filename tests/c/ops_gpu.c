/* SPDX-License-Identifier: Apache-2.0
 *
 * ops_gpu.c - every operator on a CUDA device against its twin on the CPU, with random sizes,
 * layouts and contents: ragged, strided, misaligned, empty, NaN and Inf. An operator of TE_OPS
 * without a case does not compile.
 *
 * ops_gpu [operator | all [source]]: one operator alone; with device code compiled by NVRTC.
 */
#include <pthread.h>

#include "attention_twins.h"
#include "layer_twins.h"
#include "twin.h"

/* ---- cases ---- */

static void quantize_case(extent size, te_dtype from, te_dtype to, int variant)
{
    const int casts = te_dtype_is_fp8(to), usages = casts ? (int)pick(4) : 0;
    const float scales[] = {1.0F, 0.37F, 100.0F, 3e-5F};
    any_args any = {0};
    te_quantize_args *args = &any.quantize;
    const int wants_sums = pick(2) == 0;
    args->size = sizeof *args;
    args->input = new_matrix(from, size.rows, size.columns, any_layout(size.columns, 8), BITS);
    fill_numbers(&buffers[0], 0, from, !wants_sums);
    args->cast.result.mode = casts ? TE_SCALING_TENSOR : TE_SCALING_NONE;
    args->cast.result.row.dtype = args->cast.result.column.dtype = to;
    if (usages & 1) {
        int64_t columns = padded(size.columns);
        args->cast.result.row = new_matrix(to, size.rows, columns, any_layout(columns, 16), BITS);
    }
    if (usages & 2) {
        int64_t columns = padded(size.rows);
        args->cast.result.column =
            new_matrix(to, size.columns, columns, any_layout(columns, 16), BITS);
    }
    if (casts && pick(4) != 0) {
        const float pair[2] = {-1.0F, -1.0F};
        args->cast.result.row_scales = new_scales(pair);
        if (pick(2) == 0) args->cast.result.column_scales = new_scales(pair);
    }
    if (casts && pick(2) == 0) {
        args->cast.scale = new_floats(&scales[pick(4)], 1);
    } else if (casts) {
        float partials[TE_AMAX_PARTIALS] = {0};
        const float amaxes[] = {0.0F, 3.7F, 1e-30F, 1e-42F, INFINITY, 250.0F};
        partials[pick(TE_AMAX_PARTIALS)] = amaxes[pick(6)];
        args->cast.partials = new_floats(partials, TE_AMAX_PARTIALS);
        args->cast.amax_epsilon = pick(2) == 0 ? 0.0F : 0.5F;
        args->cast.power_2_scale = pick(2) == 0;
    }
    if (pick(4) != 0) {
        const float before[] = {0.0F, 2.0F, 1e9F};
        args->cast.amax = new_floats(&before[pick(3)], 1);
    }
    if (wants_sums) {
        te_dtype dtype = high[pick(3)];
        args->bias_grad = new_vector(dtype, size.columns, CLOSE);
        buffers[buffer_count - 1].bound = dtype == TE_DTYPE_F32 ? 1e-6 : 1e-2;
        /* Sums of numbers of either sign: the error is one of their magnitudes. */
        buffers[buffer_count - 1].norm = 4.0 * sqrt((double)size.columns) * (double)(size.rows + 1);
    }
    if (variant % 8 == 0) {
        const float flag = (float)(variant / 8 % 2);
        args->noop = new_floats(&flag, 1);
    }
    (void)snprintf(case_name, sizeof case_name,
                   "quantize %s to %s, %lld x %lld, usages %d, variant %d", te_dtype_name(from),
                   casts ? te_dtype_name(to) : "nothing", (long long)size.rows,
                   (long long)size.columns, usages, variant);
    run_case(TE_OP_QUANTIZE, &any);
}

static void cases_quantize(void)
{
    int variant = 0;
    for (int e = 0; e < EXTENTS; e++) {
        for (int from = 0; from < 3; from++) {
            for (int repeat = 0; repeat < 3; repeat++) {
                for (int to = 0; to < 2; to++)
                    quantize_case(extents[e], high[from], fp8[to], variant++);
            }
            quantize_case(extents[e], high[from], TE_DTYPE_F32, variant++);
        }
    }
    /* Many row groups, each of several tiles. */
    quantize_case((extent){20000, 512}, TE_DTYPE_BF16, TE_DTYPE_E4M3, 1);
}

/* All codes of a format, NaN and Inf included. */
static void cases_dequantize(void)
{
    for (int e = 0; e < EXTENTS; e++) {
        for (int i = 0; i < 12; i++) {
            const te_dtype from = fp8[i % 2], to = high[i / 2 % 3];
            const extent size = extents[e];
            const int64_t minor = i < 6 ? padded(size.columns) : padded(size.rows);
            const float pair[2] = {3.0F, 1.0F / 3.0F};
            any_args any = {0};
            te_dequantize_args *args = &any.dequantize;
            te_tensor data;
            args->size = sizeof *args;
            args->input.mode = TE_SCALING_TENSOR;
            data = new_matrix(from, i < 6 ? size.rows : size.columns, minor, any_layout(minor, 16),
                              BITS);
            if (i < 6) {
                args->input.row = data;
            } else {
                args->input.column = data;
            }
            args->input.row_scales = args->input.column_scales = new_scales(pair);
            args->output =
                new_matrix(to, size.rows, size.columns, any_layout(size.columns, 8), FLOATS);
            (void)snprintf(case_name, sizeof case_name, "dequantize %s to %s, %lld x %lld, %s",
                           te_dtype_name(from), te_dtype_name(to), (long long)size.rows,
                           (long long)size.columns, i < 6 ? "row-wise" : "column-wise");
            run_case(TE_OP_DEQUANTIZE, &any);
        }
    }
}

static void cases_amax(void)
{
    const extent wide = {3000, 700};
    for (int e = 0; e <= EXTENTS; e++) {
        for (int from = 0; from < 3; from++) {
            const extent size = e < EXTENTS ? extents[e] : wide;
            any_args any = {0};
            te_amax_args *args = &any.amax;
            args->size = sizeof *args;
            args->input =
                new_matrix(high[from], size.rows, size.columns, any_layout(size.columns, 8), BITS);
            fill_numbers(&buffers[0], 0, high[from], pick(2) == 0);
            args->partials =
                (float *)(void *)new_buffer(TE_AMAX_PARTIALS * sizeof(float), MAXIMUM)->initial;
            (void)snprintf(case_name, sizeof case_name, "amax %s, %lld x %lld",
                           te_dtype_name(high[from]), (long long)size.rows,
                           (long long)size.columns);
            run_case(TE_OP_AMAX, &any);
        }
    }
}

static void cases_transpose(void)
{
    static const te_dtype dtypes[3] = {TE_DTYPE_E4M3, TE_DTYPE_E5M2, TE_DTYPE_U8};
    for (int e = 0; e < EXTENTS; e++) {
        for (int i = 0; i < 3; i++) {
            const extent size = extents[e];
            const int64_t columns = padded(size.rows);
            any_args any = {0};
            te_transpose_args *args = &any.transpose;
            args->size = sizeof *args;
            args->input =
                new_matrix(dtypes[i], size.rows, size.columns, any_layout(size.columns, 16), BITS);
            args->output =
                new_matrix(dtypes[i], size.columns, columns, any_layout(columns, 16), BITS);
            (void)snprintf(case_name, sizeof case_name, "transpose %s, %lld x %lld to %lld",
                           te_dtype_name(dtypes[i]), (long long)size.rows, (long long)size.columns,
                           (long long)columns);
            run_case(TE_OP_TRANSPOSE, &any);
        }
    }
}

static void cases_scaling_update(void)
{
    static const int64_t lengths[] = {1, 2, 3, 4, 16, 17, 65, 66, 130, 1024, 1025};
    static const int64_t slots[] = {256, 1, 33, 5, 0};
    for (int l = 0; l < 11; l++) {
        for (int s = 0; s < 5; s++) {
            const float special[] = {0.0F, INFINITY, NAN, 1e-42F, 3e38F};
            any_args any = {0};
            te_scaling_update_args *args = &any.scaling_update;
            args->size = sizeof *args;
            args->scale = new_vector(TE_DTYPE_F32, slots[s], BITS);
            fill_numbers(&buffers[0], 0, TE_DTYPE_F32, 0);
            args->history = new_matrix(TE_DTYPE_F32, lengths[l], slots[s],
                                       (layout){s % 2 == 0 ? 0 : 3, 0}, BITS);
            for (size_t at = 0; at + 4 <= buffers[1].bytes; at += 4) {
                float value = fabsf(random_number());
                if (pick(10) == 0) value = special[pick(5)];
                memcpy(buffers[1].initial + at, &value, sizeof value);
            }
            args->fp8_max = 448.0F;
            args->algo = (te_amax_algo)pick(2);
            (void)snprintf(case_name, sizeof case_name, "scaling_update, %lld x %lld, algorithm %d",
                           (long long)lengths[l], (long long)slots[s], (int)args->algo);
            run_case(TE_OP_SCALING_UPDATE, &any);
        }
    }
}

static void cases_fill(void)
{
    const double values[] = {0.0, 1.0, -2.5, 1e30, 1.0 / 3.0};
    for (int e = 0; e < EXTENTS; e++) {
        for (int dtype = 0; dtype < TE_DTYPE_COUNT; dtype++) {
            any_args any = {0};
            te_fill_args *args = &any.fill;
            args->size = sizeof *args;
            args->output = new_matrix((te_dtype)dtype, extents[e].rows, extents[e].columns,
                                      any_layout(extents[e].columns, 8), BITS);
            args->value = values[pick(5)];
            (void)snprintf(case_name, sizeof case_name, "fill %s, %lld x %lld, %g",
                           te_dtype_name((te_dtype)dtype), (long long)extents[e].rows,
                           (long long)extents[e].columns, args->value);
            run_case(TE_OP_FILL, &any);
        }
    }
}

static void cast_case(extent size, te_dtype from, te_dtype to)
{
    const int64_t more[] = {0, 0, 5, 70, -3};
    any_args any = {0};
    te_cast_args *args = &any.cast;
    int64_t rows = size.rows + more[pick(5)], columns = size.columns + more[pick(5)];
    if (rows < 0) rows = 0;
    if (columns < 0) columns = 0;
    args->size = sizeof *args;
    args->input = new_matrix(from, size.rows, size.columns, any_layout(size.columns, 8), BITS);
    if (te_dtype_is_high_precision(from)) fill_numbers(&buffers[0], 0, from, 1);
    args->output =
        new_matrix(to, rows, columns, any_layout(columns, 8), from == to ? BITS : FLOATS);
    (void)snprintf(case_name, sizeof case_name, "cast %s to %s, %lld x %lld to %lld x %lld",
                   te_dtype_name(from), te_dtype_name(to), (long long)size.rows,
                   (long long)size.columns, (long long)rows, (long long)columns);
    run_case(TE_OP_CAST, &any);
}

static void cases_cast(void)
{
    for (int e = 0; e < EXTENTS; e++) {
        for (int from = 0; from < 3; from++) {
            for (int to = 0; to < 3; to++) cast_case(extents[e], high[from], high[to]);
        }
        for (int dtype = 0; dtype < TE_DTYPE_COUNT; dtype++) {
            cast_case(extents[e], (te_dtype)dtype, (te_dtype)dtype);
        }
    }
}

/* One operand as [rows, k] or, transposed, [k, rows]. */
static te_operand new_operand(te_dtype dtype, extent size, int transposed, int by_columns)
{
    const float scales[TE_TENSOR_SCALES] = {0.01F, 100.0F};
    te_tensor data;
    if (transposed) size = (extent){size.columns, size.rows};
    data = new_matrix(dtype, size.rows, size.columns,
                      (layout){te_dtype_is_fp8(dtype) ? 16 * pick(2) : 8 * pick(2), 0}, BITS);
    fill_numbers(&buffers[buffer_count - 1], 0, dtype, 0);
    return test_operand(data, te_dtype_is_fp8(dtype) ? new_floats(scales, 2) : NULL, by_columns);
}

typedef struct gemm_shape {
    int64_t m, n, k;
} gemm_shape;

/* Bounds: an output's rounding, and operands whose products are summed in another order; FP8 sums
 * are kept in fewer bits by the hardware. */
static double gemm_bound(te_dtype a, te_dtype d)
{
    if (te_dtype_is_fp8(d)) return 0.05;
    if (te_dtype_is_fp8(a)) return 1e-2;
    return d == TE_DTYPE_F32 ? 1e-5 : 1e-2;
}

static void gemm_case(gemm_shape size, te_dtype a, te_dtype b, te_dtype d, int variant)
{
    const int is_fp8 = te_dtype_is_fp8(a);
    const double bound = gemm_bound(a, d);
    any_args any = {0};
    te_gemm_args *args = &any.gemm;
    args->size = sizeof *args;
    args->a_transposed = variant & 1; /* FP8: which form the data is */
    args->b_transposed = variant & 2;
    args->a = new_operand(a, (extent){size.m, size.k}, !is_fp8 && variant & 1, variant & 1);
    args->b = new_operand(b, (extent){size.k, size.n}, is_fp8 || variant & 2, !(variant & 2));
    args->d = new_matrix(d, size.m, size.n, (layout){8 * pick(2), 0},
                         te_dtype_is_fp8(d) ? WORKSPACE : CLOSE);
    fill_numbers(&buffers[buffer_count - 1], 0, d, 0);
    buffers[buffer_count - 1].bound = bound;
    if (te_dtype_is_fp8(d)) {
        const float scale = 2.0F, zero = 0.0F;
        args->d_scale = new_floats(&scale, 1);
        args->d_amax = new_floats(&zero, 1);
        buffers[buffer_count - 1].kind = CLOSE;
        buffers[buffer_count - 1].bound = 1e-2;
    } else if (variant & 4) {
        args->flags |= d == TE_DTYPE_F16 ? 0 : TE_GEMM_ACCUMULATE;
    } else if (variant & 8) {
        args->bias = new_vector(!is_fp8 ? d : d == TE_DTYPE_F16 ? d : TE_DTYPE_BF16, size.n, BITS);
        fill_numbers(&buffers[buffer_count - 1], 0, args->bias.dtype, 0);
        if (variant & 16) args->epilogue = TE_EPILOGUE_GELU;
    }
    if (!is_fp8 && variant & 32 && args->bias.data == NULL) {
        args->bias_grad = new_vector(a, size.m, CLOSE);
        buffers[buffer_count - 1].bound = a == TE_DTYPE_F32 ? 1e-4 : 1e-2;
        buffers[buffer_count - 1].norm = sqrt((double)(size.m * size.k));
    }
    if (variant & 64) args->flags |= TE_GEMM_FAST_ACCUMULATION;
    (void)snprintf(case_name, sizeof case_name, "gemm %s %s to %s, %lld x %lld x %lld, variant %d",
                   te_dtype_name(a), te_dtype_name(b), te_dtype_name(d), (long long)size.m,
                   (long long)size.n, (long long)size.k, variant);
    run_case(TE_OP_GEMM, &any);
}

static void cases_gemm(void)
{
    static const gemm_shape shapes[] = {{0, 16, 16},  {16, 0, 16},   {16, 16, 0}, {1, 1, 16},
                                        {16, 16, 16}, {64, 256, 96}, {5, 7, 32},  {130, 72, 304}};
    static const te_dtype pairs[3][2] = {{TE_DTYPE_E4M3, TE_DTYPE_E4M3},
                                         {TE_DTYPE_E5M2, TE_DTYPE_E4M3},
                                         {TE_DTYPE_E4M3, TE_DTYPE_E5M2}};
    int variant = 0;
    for (int s = 0; s < 8; s++) {
        for (int i = 0; i < 12; i++) {
            const te_dtype dtype = high[i % 3];
            gemm_case(shapes[s], dtype, dtype, pick(3) == 0 ? TE_DTYPE_F32 : dtype, variant += 5);
            gemm_case(shapes[s], pairs[i % 3][0], pairs[i % 3][1], high[pick(3)], variant += 5);
        }
    }
    gemm_case((gemm_shape){64, 256, 96}, TE_DTYPE_E4M3, TE_DTYPE_E4M3, TE_DTYPE_E4M3, 0);
}

/* ---- */

/* Where there is no device the context says so, and cuda_begin ends the program. */
static void open_contexts(void)
{
    const te_device cpu = {TE_DEVICE_CPU, 0}, device = {TE_DEVICE_CUDA, 0},
                    absent = {TE_DEVICE_CUDA, TE_DEVICE_INDICES - 1};
    te_status st = te_context_create(device, &contexts[1]);
    (void)snprintf(case_name, sizeof case_name, "context");
    if (st != TE_OK) {
        if (st != TE_ERROR_DEVICE && st != TE_ERROR_UNSUPPORTED) exit(1);
        if (contexts[1] != NULL || te_last_error()[0] == '\0') exit(1);
        (void)fprintf(stderr, "%s\n", te_last_error());
        cuda_begin();
        exit(1);
    }
    cuda_begin();
    if (te_context_create(absent, &contexts[0]) != TE_ERROR_DEVICE || contexts[0] != NULL) {
        REPORT("last device: %s", te_last_error());
    }
    cuda_expect(te_context_create(cpu, &contexts[0]), "te_context_create");
}

static te_fill_args fill_args(device_address address, double value)
{
    te_fill_args args = {.size = sizeof args, .value = value};
    args.output = (te_tensor){
        (void *)(uintptr_t)address, TE_DTYPE_F32, {TE_DEVICE_CUDA, 0}, 2, {1, 4}, {4, 1}};
    return args;
}

static void expect_filled(device_address address, float value)
{
    float found[4] = {0};
    cuda_expect(cuda.download(found, address, sizeof found), "cuMemcpyDtoH");
    for (int i = 0; i < 4; i++) {
        if (found[i] != value)
            REPORT("element %d is %g, expected %g", i, (double)found[i], (double)value);
    }
}

/* The first kernel of all is loaded while its stream is captured, and runs when the graph does. */
static void check_capture(void)
{
    void *stream = NULL, *graph = NULL, *executable = NULL;
    device_address address = 0;
    te_fill_args args;
    (void)snprintf(case_name, sizeof case_name, "first use in a capture");
    cuda_expect(cuda.allocate(&address, 4 * sizeof(float)), "cuMemAlloc");
    cuda_expect(cuda.stream_create(&stream, 1), "cuStreamCreate");
    cuda_expect(cuda.capture_begin(stream, 0), "cuStreamBeginCapture");
    args = fill_args(address, 7.0);
    if (te_fill(contexts[1], &args, stream) != TE_OK) REPORT("%s", te_last_error());
    cuda_expect(cuda.capture_end(stream, &graph), "cuStreamEndCapture");
    cuda_expect(cuda.instantiate(&executable, graph, 0), "cuGraphInstantiateWithFlags");
    args = fill_args(address, 1.0);
    if (te_fill(contexts[1], &args, stream) != TE_OK) REPORT("%s", te_last_error());
    cuda_expect(cuda.launch(executable, stream), "cuGraphLaunch");
    cuda_expect(cuda.stream_synchronize(stream), "cuStreamSynchronize");
    expect_filled(address, 7.0F);
    cuda_expect(cuda.executable_destroy(executable), "cuGraphExecDestroy");
    cuda_expect(cuda.graph_destroy(graph), "cuGraphDestroy");
    cuda_expect(cuda.stream_destroy(stream), "cuStreamDestroy");
    cuda_expect(cuda.release(address), "cuMemFree");
}

static void *fill_in_thread(void *address)
{
    const te_fill_args args = fill_args(*(const device_address *)address, 3.0);
    if (te_fill(contexts[1], &args, NULL) != TE_OK) REPORT("%s", te_last_error());
    return NULL;
}

/* A thread of its own has no current context. */
static void check_thread(void)
{
    pthread_t thread;
    device_address address = 0;
    (void)snprintf(case_name, sizeof case_name, "thread without a context");
    cuda_expect(cuda.allocate(&address, 4 * sizeof(float)), "cuMemAlloc");
    cuda_expect(pthread_create(&thread, NULL, fill_in_thread, &address), "pthread_create");
    cuda_expect(pthread_join(thread, NULL), "pthread_join");
    cuda_expect(cuda.synchronize(), "cuCtxSynchronize");
    expect_filled(address, 3.0F);
    cuda_expect(cuda.release(address), "cuMemFree");
}

int main(int argc, char **argv)
{
    if (argc > 2 && strcmp(argv[2], "source") == 0 && te_cuda_configure(1, NULL) != TE_OK) return 1;
    open_contexts();
    check_capture();
    check_thread();
#define X(NAME, name)                                                                              \
    if (argc < 2 || strcmp(argv[1], "all") == 0 || strcmp(argv[1], #name) == 0) {                  \
        cases_##name();                                                                            \
        (void)printf("%s: %d failures so far\n", #name, failures);                                 \
    }
    TE_OPS(X)
#undef X
    te_context_destroy(contexts[1]);
    te_context_destroy(contexts[0]);
    return failures > 0;
}
