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

#include "twin_buffers.h"

/* ---- sizes and layouts ---- */

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
    move_args(op, &result, to_device);
    return result;
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
        if (b->kind == FLOATS && isnan(test_load(b->dtype, b->cpu + at)) &&
            isnan(test_load(b->dtype, b->device[0] + at))) {
            continue;
        }
        REPORT("buffer %d, byte %zu of %zu: CPU 0x%02x, device 0x%02x (before: 0x%02x)", index, at,
               b->bytes, b->cpu[at], b->device[0][at], b->initial[at]);
        return;
    }
}

/* Whether one is Inf and the other as close to the largest number as results may differ. */
static int overflows_in_one(const buffer *b, double one, double other)
{
    const double finite = isinf(one) ? other : one, largest = te_dtype_max(b->dtype);
    return !isinf(one) != !isinf(other) && signbit(one) == signbit(other) &&
           fabs(finite) >= (1.0 - b->bound) * largest;
}

static void compare_close(const buffer *b, int index)
{
    const size_t element = te_dtype_bytes(b->dtype);
    double error = 0.0, norm = 0.0;
    for (size_t at = 0; at + element <= b->bytes; at += element) {
        double expected = test_load(b->dtype, b->cpu + at);
        double got = test_load(b->dtype, b->device[0] + at);
        if (memcmp(b->cpu + at, b->device[0] + at, element) == 0) got = expected; /* Inf too */
        if (isnan(expected) && isnan(got)) continue;
        if (overflows_in_one(b, expected, got)) continue;
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

static void compare_maxima(const buffer *b, int index)
{
    const float expected = largest(b->cpu, b->bytes), got = largest(b->device[0], b->bytes);
    if (expected == got || fabsf(expected - got) <= (float)b->bound * expected) return;
    REPORT("buffer %d: maximum %g, on the device %g", index, (double)expected, (double)got);
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
            compare_maxima(b, i);
        } else {
            compare_bits(b, i);
        }
    }
    free_buffers();
}

#endif
