/* SPDX-License-Identifier: Apache-2.0
 *
 * twin.h - runs an operator on the CPU and twice on a CUDA device over the same bytes, and
 * compares.
 *
 * A case makes buffers in host memory and an args struct over them, then calls run_case. All bytes
 * of all buffers must agree afterwards, written or not, but where a buffer says otherwise (sums in
 * another order). Each buffer is a device allocation of its own, so that compute-sanitizer sees a
 * read beyond its end.
 */
#ifndef TE_TESTS_TWIN_H
#define TE_TESTS_TWIN_H

#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cuda_memory.h"
#include "transformer_engine.h"

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
    device_address address;
    size_t bytes, size; /* size: of the memory, at least 1 */
    buffer_kind kind;
    te_dtype dtype; /* FLOATS, CLOSE */
    double bound;   /* CLOSE */
    double norm;    /* CLOSE: what the error is compared with; 0: the norm of the CPU's result */
} buffer;

static buffer buffers[MAX_BUFFERS];
static int buffer_count;
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
    cuda_expect(cuda.allocate(&b->address, b->size), "cuMemAlloc");
    return b;
}

static void free_buffers(void)
{
    for (int i = 0; i < buffer_count; i++) {
        free(buffers[i].initial);
        free(buffers[i].cpu);
        for (int j = 0; j < 2; j++) free(buffers[i].device[j]);
        cuda_expect(cuda.release(buffers[i].address), "cuMemFree");
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
    const int64_t elements =
        rows > 0 && columns > 0 ? where.shift + (rows - 1) * stride + columns : 0;
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
    device_address workspace = 0;
    for (int i = 0; i < buffer_count; i++) {
        cuda_expect(cuda.upload(buffers[i].address, buffers[i].initial, buffers[i].size),
                    "cuMemcpyHtoD");
    }
    call = moved(op, args, 1);
    if (te_op_workspace(contexts[1], op, &call, &bytes) != TE_OK) REPORT("%s", te_last_error());
    if (bytes > 0) cuda_expect(cuda.allocate(&workspace, bytes), "cuMemAlloc");
    set_workspace(op, &call, (void *)(uintptr_t)workspace, bytes);
    if (te_op_run(contexts[1], op, &call, NULL) != TE_OK) REPORT("CUDA: %s", te_last_error());
    cuda_expect(cuda.synchronize(), case_name);
    if (workspace != 0) cuda_expect(cuda.release(workspace), "cuMemFree");
    for (int i = 0; i < buffer_count; i++) {
        cuda_expect(cuda.download(buffers[i].device[which], buffers[i].address, buffers[i].size),
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

#endif
