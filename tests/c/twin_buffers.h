/* SPDX-License-Identifier: Apache-2.0
 *
 * twin_buffers.h - the buffers of a case of twin.h: random bytes and numbers, tensors over them,
 * and args structs moved from host memory to the CPU's copy or to the device.
 */
#ifndef TE_TESTS_TWIN_BUFFERS_H
#define TE_TESTS_TWIN_BUFFERS_H

#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <transformer_engine.h>

#include "cuda_memory.h"
#include "numbers.h"

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
    MAXIMUM,  /* the largest float is the same, or within bound of it */
    WORKSPACE /* not compared */
} buffer_kind;

typedef struct buffer {
    unsigned char *initial, *cpu, *device[2];
    device_address address;
    size_t bytes, size; /* size: of the memory, at least 1 */
    buffer_kind kind;
    te_dtype dtype; /* FLOATS, CLOSE */
    double bound;   /* CLOSE, MAXIMUM */
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

static te_tensor new_scales(const float *values)
{
    return test_scales(new_floats(values, TE_TENSOR_SCALES), (te_device){TE_DEVICE_CPU, 0});
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

/* All pointers of an args struct, found by its list of fields. */
static void move_args(te_op op, void *args, int to_device)
{
    const te_op_info *info = te_op_describe(op);
    for (int32_t i = 0; i < info->field_count; i++) {
        char *member = (char *)args + info->fields[i].offset;
        switch (info->fields[i].kind) {
        case TE_FIELD_TENSOR:
            ((te_tensor *)(void *)member)->device.type =
                to_device ? TE_DEVICE_CUDA : TE_DEVICE_CPU; /* data comes first */
            move_pointer(member, to_device);
            break;
        case TE_FIELD_FLOATS:
        case TE_FIELD_INT64S:
            move_pointer(member, to_device);
            break;
        default:
            break;
        }
    }
}

static void set_workspace(te_op op, void *args, void *workspace, size_t bytes)
{
    const te_op_info *info = te_op_describe(op);
    const te_field *last = &info->fields[info->field_count - 1];
    if (last->kind == TE_FIELD_WORKSPACE) {
        memcpy((char *)args + last->offset, &workspace, sizeof workspace);
        memcpy((char *)args + last->offset + sizeof workspace, &bytes, sizeof bytes);
    } else if (bytes > 0) {
        REPORT("%zu bytes of workspace, and no field for them", bytes);
    }
}

#endif
