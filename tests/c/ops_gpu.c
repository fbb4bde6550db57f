/* SPDX-License-Identifier: Apache-2.0
 *
 * ops_gpu.c - every operator on a CUDA device against its twin on the CPU.
 *
 * A case makes buffers in host memory and an args struct over them. The operator runs on the CPU,
 * and twice on the device over copies of the same bytes. Then all bytes of all buffers must agree,
 * written or not, but where a buffer says otherwise (sums in another order, workspaces). Each
 * buffer is a device allocation of its own, so that compute-sanitizer sees a read beyond its end.
 */
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cuda_memory.h"
#include "transformer_engine.h"

#define SKIPPED 77
#define MAX_BUFFERS 16

/* ---- failing ---- */

static int failures;
static char case_name[256];

#define REPORT(...)                                                                                \
    do {                                                                                           \
        (void)fprintf(stderr, "%s: ", case_name);                                                  \
        (void)fprintf(stderr, __VA_ARGS__);                                                        \
        (void)fputc('\n', stderr);                                                                 \
        failures++;                                                                                \
    } while (0)

/* ---- random numbers: splitmix64 ---- */

static uint64_t random_state = 1;

static uint64_t random_bits(void)
{
    uint64_t z = random_state += 0x9e3779b97f4a7c15ULL;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ULL;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebULL;
    return z ^ (z >> 31);
}

static int64_t pick(int64_t count)
{
    return (int64_t)(random_bits() % (uint64_t)count);
}

static float random_number(void) /* about normal */
{
    float sum = 0.0F;
    for (int i = 0; i < 4; i++) sum += (float)(random_bits() >> 40) / 8388608.0F - 1.0F;
    return sum;
}

/* ---- buffers ---- */

typedef enum buffer_kind {
    BITS,     /* the same bytes */
    FLOATS,   /* the same bytes, but any NaN equals any NaN */
    CLOSE,    /* ||device - cpu|| <= bound * ||cpu||, of f32, f16 or bf16; see reference */
    MAXIMUM,  /* the largest float is the same */
    WORKSPACE /* not compared */
} buffer_kind;

typedef struct buffer {
    unsigned char *initial, *cpu, *device[2];
    cuda_address address;
    size_t bytes, size; /* size: of the memory, at least 1 */
    buffer_kind kind;
    te_dtype dtype; /* FLOATS, CLOSE */
    double bound;   /* CLOSE */
    double norm;    /* CLOSE: what the error is compared with; 0: the norm of the CPU's result */
} buffer;

static buffer buffers[MAX_BUFFERS];
static int buffer_count;
static cuda_memory cuda;
static te_context *contexts[2]; /* CPU, CUDA */

static void *must(void *pointer)
{
    if (pointer != NULL) return pointer;
    (void)fprintf(stderr, "no memory\n");
    exit(1);
}

/* A new buffer of random bytes. */
static buffer *new_buffer(size_t bytes, buffer_kind kind)
{
    buffer *b = &buffers[buffer_count++];
    memset(b, 0, sizeof *b);
    b->bytes = bytes;
    b->size = bytes > 0 ? bytes : 1;
    b->kind = kind;
    b->initial = must(malloc(b->size));
    b->cpu = must(malloc(b->size));
    for (int i = 0; i < 2; i++) b->device[i] = must(malloc(b->size));
    for (size_t i = 0; i < b->size; i++) b->initial[i] = (unsigned char)random_bits();
    cuda_memory_check(cuda.alloc(&b->address, b->size), "cuMemAlloc");
    return b;
}

static void free_buffers(void)
{
    for (int i = 0; i < buffer_count; i++) {
        free(buffers[i].initial);
        free(buffers[i].cpu);
        for (int j = 0; j < 2; j++) free(buffers[i].device[j]);
        cuda_memory_check(cuda.release(buffers[i].address), "cuMemFree");
    }
    buffer_count = 0;
}

static void put_number(unsigned char *to, te_dtype dtype, float value)
{
    uint32_t bits;
    uint16_t half;
    memcpy(&bits, &value, sizeof bits);
    if (dtype == TE_DTYPE_F32) {
        memcpy(to, &bits, sizeof bits);
        return;
    }
    half = (uint16_t)(bits >> 16);
    if (dtype ==
        TE_DTYPE_F16) { /* normal numbers near 1, the others become 0; rounded towards zero */
        int exponent = (int)(bits >> 23 & 0xff) - 112;
        half = exponent <= 0 || exponent >= 31
                   ? 0
                   : (uint16_t)((bits >> 16 & 0x8000) | (uint32_t)exponent << 10 |
                                (bits >> 13 & 0x3ff));
    }
    memcpy(to, &half, sizeof half);
}

static double get_number(const unsigned char *from, te_dtype dtype)
{
    uint32_t bits = 0;
    uint16_t half;
    float value;
    if (dtype == TE_DTYPE_F32) {
        memcpy(&bits, from, sizeof bits);
    } else {
        memcpy(&half, from, sizeof half);
        if (dtype == TE_DTYPE_BF16) {
            bits = (uint32_t)half << 16;
        } else {
            int exponent = half >> 10 & 31, mantissa = half & 1023;
            double magnitude = exponent == 31  ? (mantissa ? (double)NAN : (double)INFINITY)
                               : exponent == 0 ? ldexp(mantissa, -24)
                                               : ldexp(1024 + mantissa, exponent - 25);
            return half & 0x8000 ? -magnitude : magnitude;
        }
    }
    memcpy(&value, &bits, sizeof value);
    return (double)value;
}

/* Elements of a dtype: some numbers, or where `wild` also NaN, Inf, subnormals and anything else.
 */
static void fill_numbers(buffer *b, size_t offset, te_dtype dtype, int wild)
{
    const size_t element = te_dtype_bytes(dtype);
    for (size_t at = offset; at + element <= b->bytes; at += element) {
        if (element == 1) { /* FP8: no NaN, no Inf */
            b->initial[at] &= dtype == TE_DTYPE_E4M3 ? 0xf7 : 0xbf;
        } else if (!wild || pick(16) != 0) {
            put_number(b->initial + at, dtype, random_number() * (pick(8) == 0 ? 30.0F : 1.0F));
        }
    }
}

/* A matrix in a buffer of its own: rows `gap` elements longer than columns, first one `shift`
 * elements into the buffer. */
typedef struct layout {
    int64_t gap, shift;
} layout;

static te_tensor new_matrix(te_dtype dtype, int64_t rows, int64_t columns, layout where,
                            buffer_kind kind)
{
    const size_t element = te_dtype_bytes(dtype);
    const int64_t stride = columns + where.gap;
    const int64_t elements = rows > 0 ? where.shift + (rows - 1) * stride + columns : 0;
    buffer *b = new_buffer((size_t)elements * element, kind);
    te_tensor tensor = {.data = b->initial + (elements > 0 ? (size_t)where.shift * element : 0),
                        .dtype = dtype,
                        .ndim = 2,
                        .shape = {rows, columns},
                        .strides = {stride, 1}};
    b->dtype = dtype;
    return tensor;
}

static te_tensor new_vector(te_dtype dtype, int64_t length, buffer_kind kind)
{
    te_tensor tensor = new_matrix(dtype, 1, length, (layout){0, 0}, kind);
    tensor.ndim = 1;
    tensor.shape[0] = length;
    tensor.strides[0] = 1;
    return tensor;
}

static float *new_floats(const float *values, int count)
{
    buffer *b = new_buffer((size_t)count * sizeof(float), BITS);
    memcpy(b->initial, values, b->bytes);
    return (float *)(void *)b->initial;
}

/* ---- from host to device, and from the initial bytes to the CPU's copy ---- */

static void move_pointer(const void *where, int to_device)
{
    uintptr_t value, moved;
    memcpy(&value, where, sizeof value);
    if (value == 0) return;
    for (int i = 0; i < buffer_count; i++) {
        uintptr_t start = (uintptr_t)buffers[i].initial;
        if (value < start || value >= start + buffers[i].size) continue;
        moved =
            value - start + (to_device ? (uintptr_t)buffers[i].address : (uintptr_t)buffers[i].cpu);
        memcpy((void *)(uintptr_t)where, &moved, sizeof moved);
        return;
    }
    (void)fprintf(stderr, "%s: a pointer leads to no buffer\n", case_name);
    exit(1);
}

static void move_tensor(te_tensor *tensor, int to_device)
{
    move_pointer(&tensor->data, to_device);
    tensor->device.type = to_device ? TE_DEVICE_CUDA : TE_DEVICE_CPU;
}

static void move_quantized(te_quantized *quantized, int to_device)
{
    move_tensor(&quantized->rowwise, to_device);
    move_tensor(&quantized->columnwise, to_device);
    move_pointer(&quantized->scale_pair, to_device);
    move_pointer(&quantized->scale, to_device);
    move_pointer(&quantized->amax, to_device);
}

static void move_quantize(te_quantize_args *args, int to_device)
{
    move_tensor(&args->input, to_device);
    move_quantized(&args->output, to_device);
    move_tensor(&args->bias_grad, to_device);
    move_pointer(&args->noop, to_device);
    move_pointer(&args->partials, to_device);
}

static void move_dequantize(te_dequantize_args *args, int to_device)
{
    move_quantized(&args->input, to_device);
    move_tensor(&args->output, to_device);
}

static void move_amax(te_amax_args *args, int to_device)
{
    move_tensor(&args->input, to_device);
    move_pointer(&args->partials, to_device);
}

static void move_transpose(te_transpose_args *args, int to_device)
{
    move_tensor(&args->input, to_device);
    move_tensor(&args->output, to_device);
}

static void move_gemm(te_gemm_args *args, int to_device)
{
    move_tensor(&args->a.data, to_device);
    move_pointer(&args->a.scale_inv, to_device);
    move_tensor(&args->b.data, to_device);
    move_pointer(&args->b.scale_inv, to_device);
    move_tensor(&args->d, to_device);
    move_tensor(&args->bias, to_device);
    move_tensor(&args->bias_grad, to_device);
    move_tensor(&args->aux, to_device);
    move_pointer(&args->d_scale, to_device);
    move_pointer(&args->d_amax, to_device);
}

static void move_scaling_update(te_scaling_update_args *args, int to_device)
{
    move_tensor(&args->scale, to_device);
    move_tensor(&args->history, to_device);
}

static void move_fill(te_fill_args *args, int to_device)
{
    move_tensor(&args->output, to_device);
}

static void move_cast(te_cast_args *args, int to_device)
{
    move_tensor(&args->input, to_device);
    move_tensor(&args->output, to_device);
}

/* ---- running a case ---- */

typedef union any_args {
    size_t size;
#define X(NAME, name) te_##name##_args name;
    TE_OPS(X)
#undef X
} any_args;

/* The args over the CPU's or the device's memory. */
static any_args moved(te_op op, const any_args *args, int to_device)
{
    any_args result = *args;
    switch (op) {
#define X(NAME, name)                                                                              \
    case TE_OP_##NAME:                                                                             \
        move_##name(&result.name, to_device);                                                      \
        break;
        TE_OPS(X)
#undef X
    case TE_OP_COUNT:
        break;
    }
    return result;
}

/* Where an args struct holds its workspace, for the two operators that have one. */
static void set_workspace(te_op op, any_args *args, void *workspace, size_t bytes)
{
    if (op == TE_OP_QUANTIZE) {
        args->quantize.workspace = workspace;
        args->quantize.workspace_size = bytes;
    } else if (op == TE_OP_GEMM) {
        args->gemm.workspace = workspace;
        args->gemm.workspace_size = bytes;
    }
}

static void run_on_cpu(te_op op, const any_args *args)
{
    any_args call;
    size_t bytes = 0;
    void *workspace = NULL;
    for (int i = 0; i < buffer_count; i++)
        memcpy(buffers[i].cpu, buffers[i].initial, buffers[i].size);
    call = moved(op, args, 0);
    if (te_op_workspace(contexts[0], op, &call, &bytes) != TE_OK) REPORT("%s", te_last_error());
    if (bytes > 0) workspace = must(malloc(bytes));
    set_workspace(op, &call, workspace, bytes);
    if (te_op_run(contexts[0], op, &call, NULL) != TE_OK) REPORT("CPU: %s", te_last_error());
    free(workspace);
}

static void run_on_device(te_op op, const any_args *args, int which)
{
    any_args call;
    size_t bytes = 0;
    cuda_address workspace = 0;
    for (int i = 0; i < buffer_count; i++) {
        cuda_memory_check(cuda.to_device(buffers[i].address, buffers[i].initial, buffers[i].size),
                          "cuMemcpyHtoD");
    }
    call = moved(op, args, 1);
    if (te_op_workspace(contexts[1], op, &call, &bytes) != TE_OK) REPORT("%s", te_last_error());
    if (bytes > 0) cuda_memory_check(cuda.alloc(&workspace, bytes), "cuMemAlloc");
    set_workspace(op, &call, (void *)(uintptr_t)workspace, bytes);
    if (te_op_run(contexts[1], op, &call, NULL) != TE_OK) REPORT("CUDA: %s", te_last_error());
    cuda_memory_check(cuda.synchronize(), case_name);
    if (workspace != 0) cuda_memory_check(cuda.release(workspace), "cuMemFree");
    for (int i = 0; i < buffer_count; i++) {
        cuda_memory_check(
            cuda.to_host(buffers[i].device[which], buffers[i].address, buffers[i].size),
            "cuMemcpyDtoH");
    }
}

/* ---- comparing ---- */

static void compare_bits(const buffer *b, int index)
{
    const size_t element = b->kind == FLOATS ? te_dtype_bytes(b->dtype) : 1;
    for (size_t at = 0; at + element <= b->bytes; at += element) {
        if (memcmp(b->cpu + at, b->device[0] + at, element) == 0) continue;
        if (b->kind == FLOATS && isnan(get_number(b->cpu + at, b->dtype)) &&
            isnan(get_number(b->device[0] + at, b->dtype))) {
            continue;
        }
        REPORT("buffer %d, byte %zu of %zu: CPU 0x%02x, device 0x%02x (before: 0x%02x)", index, at,
               b->bytes, b->cpu[at], b->device[0][at], b->initial[at]);
        return;
    }
}

static void compare_close(const buffer *b, int index)
{
    const size_t element = te_dtype_bytes(b->dtype);
    double error = 0.0, norm = 0.0;
    for (size_t at = 0; at + element <= b->bytes; at += element) {
        double expected = get_number(b->cpu + at, b->dtype);
        double got = get_number(b->device[0] + at, b->dtype);
        if (memcmp(b->cpu + at, b->device[0] + at, element) == 0) got = expected; /* Inf too */
        if (isnan(expected) && isnan(got)) continue;
        if (isfinite(expected)) norm += expected * expected;
        error += expected == got ? 0.0 : (expected - got) * (expected - got);
    }
    if (b->norm > 0.0) norm = b->norm * b->norm;
    if (!(sqrt(error) <= b->bound * sqrt(norm))) {
        REPORT("buffer %d: error %g of a norm of %g, bound %g", index, sqrt(error), sqrt(norm),
               b->bound);
    }
}

static float largest(const unsigned char *floats, size_t bytes)
{
    float most = 0.0F, value;
    for (size_t at = 0; at + sizeof value <= bytes; at += sizeof value) {
        memcpy(&value, floats + at, sizeof value);
        most = value > most || isnan(value) ? value : most;
    }
    return most;
}

static void run_case(te_op op, const any_args *args)
{
    run_on_cpu(op, args);
    for (int which = 0; which < 2; which++) run_on_device(op, args, which);
    for (int i = 0; i < buffer_count; i++) {
        const buffer *b = &buffers[i];
        if (b->kind == WORKSPACE) continue;
        if (memcmp(b->device[0], b->device[1], b->bytes) != 0) {
            REPORT("buffer %d: two runs on the device differ", i);
        }
        if (b->kind == CLOSE) {
            compare_close(b, i);
        } else if (b->kind == MAXIMUM) {
            if (largest(b->cpu, b->bytes) != largest(b->device[0], b->bytes)) {
                REPORT("buffer %d: maximum %g, on the device %g", i,
                       (double)largest(b->cpu, b->bytes), (double)largest(b->device[0], b->bytes));
            }
        } else {
            compare_bits(b, i);
        }
    }
    free_buffers();
}

/* ---- cases ---- */

typedef struct extent {
    int64_t rows, columns;
} extent;

static const extent extents[] = {{0, 64},    {64, 0},   {0, 0},    {1, 1},    {1, 200},
                                 {200, 1},   {3, 5},    {16, 16},  {64, 64},  {64, 256},
                                 {65, 63},   {63, 65},  {100, 72}, {128, 48}, {300, 24},
                                 {256, 256}, {7, 1030}, {520, 130}};
#define EXTENTS ((int)(sizeof extents / sizeof *extents))

static const te_dtype high[3] = {TE_DTYPE_F32, TE_DTYPE_F16, TE_DTYPE_BF16};
static const te_dtype fp8[2] = {TE_DTYPE_E4M3, TE_DTYPE_E5M2};

/* Most often what the layers make, aligned rows; else any. */
static layout any_layout(int64_t columns, int64_t multiple)
{
    layout where = {0, 0};
    if (pick(2) == 0) where.gap = (multiple - columns % multiple) % multiple + multiple * pick(2);
    if (pick(4) == 0) where.gap += pick(5);
    if (pick(4) == 0) where.shift = pick(9);
    return where;
}

/* Columns of an FP8 output: padded to 16, not at all, or by more than a tile. */
static int64_t padded(int64_t columns)
{
    int64_t choice = pick(4);
    if (choice == 0) return columns;
    return (columns + 15) / 16 * 16 + (choice == 1 ? 16 * pick(6) : 0);
}

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
    args->output.mode = casts ? TE_SCALING_TENSOR : TE_SCALING_NONE;
    args->output.rowwise.dtype = args->output.columnwise.dtype = to;
    if (usages & 1) {
        int64_t columns = padded(size.columns);
        args->output.rowwise = new_matrix(to, size.rows, columns, any_layout(columns, 16), BITS);
    }
    if (usages & 2) {
        int64_t columns = padded(size.rows);
        args->output.columnwise =
            new_matrix(to, size.columns, columns, any_layout(columns, 16), BITS);
    }
    if (casts && pick(4) != 0) {
        const float pair[2] = {-1.0F, -1.0F};
        args->output.scale_pair = new_floats(pair, 2);
    }
    if (casts && pick(2) == 0) {
        args->output.scale = new_floats(&scales[pick(4)], 1);
    } else if (casts) {
        float partials[TE_AMAX_PARTIALS] = {0};
        const float amaxes[] = {0.0F, 3.7F, 1e-30F, 1e-42F, INFINITY, 250.0F};
        partials[pick(TE_AMAX_PARTIALS)] = amaxes[pick(6)];
        args->partials = new_floats(partials, TE_AMAX_PARTIALS);
        args->amax_epsilon = pick(2) == 0 ? 0.0F : 0.5F;
        args->power_2_scale = pick(2) == 0;
    }
    if (pick(4) != 0) {
        const float before[] = {0.0F, 2.0F, 1e9F};
        args->output.amax = new_floats(&before[pick(3)], 1);
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
                args->input.rowwise = data;
            } else {
                args->input.columnwise = data;
            }
            args->input.scale_pair = new_floats(pair, 2);
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
static te_gemm_operand new_operand(te_dtype dtype, extent size, int transposed)
{
    te_gemm_operand operand = {.transposed = transposed};
    if (transposed) size = (extent){size.columns, size.rows};
    operand.data =
        new_matrix(dtype, size.rows, size.columns,
                   (layout){te_dtype_is_fp8(dtype) ? 16 * pick(2) : 8 * pick(2), 0}, BITS);
    fill_numbers(&buffers[buffer_count - 1], 0, dtype, 0);
    if (te_dtype_is_fp8(dtype)) {
        const float inverse = 0.01F;
        operand.scale_inv = new_floats(&inverse, 1);
    }
    return operand;
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
    args->a = new_operand(a, (extent){size.m, size.k}, !is_fp8 && variant & 1);
    args->b = new_operand(b, (extent){size.k, size.n}, is_fp8 || variant & 2);
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

static void check_missing_device(void)
{
    te_context *context = NULL;
    const te_device device = {TE_DEVICE_CUDA, 0};
    te_status st = te_context_create(device, &context);
    (void)snprintf(case_name, sizeof case_name, "no device");
    if (st != TE_ERROR_DEVICE && st != TE_ERROR_UNSUPPORTED) REPORT("status %d", (int)st);
    if (context != NULL || te_last_error()[0] == '\0') REPORT("a context, or no text");
}

int main(int argc, char **argv)
{
    const te_device cpu = {TE_DEVICE_CPU, 0}, device = {TE_DEVICE_CUDA, 0};
    if (!cuda_memory_open(&cuda)) {
        check_missing_device();
        (void)printf("no CUDA device\n");
        return failures > 0 ? 1 : SKIPPED;
    }
    if (te_context_create(cpu, &contexts[0]) != TE_OK ||
        te_context_create(device, &contexts[1]) != TE_OK) {
        (void)fprintf(stderr, "%s\n", te_last_error());
        return 1;
    }
#define X(NAME, name)                                                                              \
    if (argc < 2 || strcmp(argv[1], #name) == 0) {                                                 \
        cases_##name();                                                                            \
        (void)printf("%s: %d failures so far\n", #name, failures);                                 \
    }
    TE_OPS(X)
#undef X
    te_context_destroy(contexts[1]);
    te_context_destroy(contexts[0]);
    return failures > 0;
}
