/* SPDX-License-Identifier: Apache-2.0
 *
 * testing.h - what the C tests share: checks that count, a device behind four functions, and
 * matrices with a host mirror and guarded gaps.
 */
#ifndef TE_TESTS_TESTING_H
#define TE_TESTS_TESTING_H

#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <transformer_engine.h>

#include "numbers.h"

enum { TEST_SKIPPED = 77, TEST_MAX_BUFFERS = 64, TEST_MAX_SHOWN = 20, TEST_GUARD = 0xa5 };

typedef struct test_buffer {
    unsigned char *host, *device;
    size_t bytes;
} test_buffer;

/* A device under test and the buffers of the running case. */
typedef struct test_device {
    te_device device;
    te_context *context;
    void *stream;
    double accumulation_eps; /* of FP8 products; high precision accumulates in fp32 everywhere */
    void *(*allocate)(size_t bytes);
    void (*release)(void *memory);
    int (*upload)(void *device, const void *host, size_t bytes);   /* 0: done */
    int (*download)(void *host, const void *device, size_t bytes); /* 0: done, after all work */
    test_buffer buffers[TEST_MAX_BUFFERS];
    int buffer_count;
    int failures;
    const char *running; /* the case, for messages */
} test_device;

/* Counts a failure, with a text; later ones than the first twenty are silent. */
#define TEST_CHECK(t, condition, ...)                                                              \
    do {                                                                                           \
        if (!(condition) && (t)->failures++ < TEST_MAX_SHOWN) {                                    \
            (void)fprintf(stderr, "%s:%d: %s: %s: ", __FILE__, __LINE__, (t)->running,             \
                          #condition);                                                             \
            (void)fprintf(stderr, __VA_ARGS__);                                                    \
            (void)fputc('\n', stderr);                                                             \
        }                                                                                          \
    } while (0)
#define TEST_OK(t, expression) TEST_CHECK(t, (expression) == TE_OK, "%s", te_last_error())

/* ---- buffers ------------------------------------------------------------------------------ */

/* Device memory with a host mirror, both filled with the guard byte; NULL for 0 bytes. */
static inline test_buffer *test_allocate(test_device *t, size_t bytes)
{
    test_buffer *buffer = &t->buffers[t->buffer_count];
    if (t->buffer_count == TEST_MAX_BUFFERS) {
        (void)fprintf(stderr, "%s: more than %d buffers\n", t->running, TEST_MAX_BUFFERS);
        exit(EXIT_FAILURE);
    }
    buffer->bytes = bytes;
    buffer->host = malloc(bytes + 1);
    buffer->device = t->allocate(bytes + 1);
    if (buffer->host == NULL || buffer->device == NULL) {
        (void)fprintf(stderr, "%s: no memory for %zu bytes\n", t->running, bytes);
        exit(EXIT_FAILURE);
    }
    t->buffer_count++;
    memset(buffer->host, TEST_GUARD, bytes);
    TEST_CHECK(t, t->upload(buffer->device, buffer->host, bytes) == 0, "upload");
    return buffer;
}

static inline void test_upload(test_device *t, test_buffer *buffer)
{
    TEST_CHECK(t, t->upload(buffer->device, buffer->host, buffer->bytes) == 0, "upload");
}

static inline void test_download(test_device *t, test_buffer *buffer)
{
    TEST_CHECK(t, t->download(buffer->host, buffer->device, buffer->bytes) == 0, "download");
}

/* Frees what the case allocated. */
static inline void test_release(test_device *t)
{
    for (int i = 0; i < t->buffer_count; i++) {
        free(t->buffers[i].host);
        t->release(t->buffers[i].device);
    }
    t->buffer_count = 0;
}

/* Device floats. */
static inline test_buffer *test_floats(test_device *t, const float *values, size_t count)
{
    test_buffer *buffer = test_allocate(t, count * sizeof(float));
    memcpy(buffer->host, values, buffer->bytes);
    test_upload(t, buffer);
    return buffer;
}

static inline test_buffer *test_float(test_device *t, float value)
{
    return test_floats(t, &value, 1);
}

static inline float test_read_float(test_device *t, test_buffer *buffer)
{
    float value;
    test_download(t, buffer);
    memcpy(&value, buffer->host, sizeof value);
    return value;
}

/* ---- matrices ----------------------------------------------------------------------------- */

typedef struct test_matrix {
    test_buffer *buffer;
    te_tensor tensor;
    int64_t rows, columns, stride, offset; /* elements */
    size_t bytes;                          /* of an element */
} test_matrix;

/* `gap` elements before the first element and after every row are guarded. */
static inline test_matrix test_matrix_new(test_device *t, te_dtype dtype, int64_t rows,
                                          int64_t columns, int64_t gap)
{
    test_matrix matrix = {.rows = rows, .columns = columns, .stride = columns + gap, .offset = gap};
    matrix.bytes = te_dtype_bytes(dtype);
    matrix.buffer = test_allocate(t, (size_t)(gap + rows * matrix.stride) * matrix.bytes);
    matrix.tensor = (te_tensor){.data = matrix.buffer->device + (size_t)gap * matrix.bytes,
                                .dtype = dtype,
                                .device = t->device,
                                .ndim = 2,
                                .shape = {rows, columns},
                                .strides = {matrix.stride, 1}};
    return matrix;
}

static inline test_matrix test_vector_new(test_device *t, te_dtype dtype, int64_t length)
{
    test_matrix vector = test_matrix_new(t, dtype, 1, length, 0);
    vector.tensor.ndim = 1;
    vector.tensor.shape[0] = length;
    vector.tensor.strides[0] = 1;
    return vector;
}

static inline unsigned char *test_at(const test_matrix *matrix, int64_t row, int64_t column)
{
    return matrix->buffer->host +
           (size_t)(matrix->offset + row * matrix->stride + column) * matrix->bytes;
}

static inline double test_get(const test_matrix *matrix, int64_t row, int64_t column)
{
    return test_load(matrix->tensor.dtype, test_at(matrix, row, column));
}

static inline void test_set(const test_matrix *matrix, int64_t row, int64_t column, double value)
{
    test_store(matrix->tensor.dtype, test_at(matrix, row, column), value);
}

/* Bits of a one- or two-byte element. */
static inline unsigned test_code(const test_matrix *matrix, int64_t row, int64_t column)
{
    uint16_t half;
    if (matrix->bytes == 1) return *test_at(matrix, row, column);
    memcpy(&half, test_at(matrix, row, column), sizeof half);
    return half;
}

/* Random numbers of that size over a wide range of exponents, and uploads. special: now and then
 * NaN, Inf, zeros and extremes. */
static inline void test_fill_random(test_device *t, test_matrix *matrix, double size, int special)
{
    const double specials[] = {(double)NAN, (double)INFINITY, -(double)INFINITY, 0.0, -0.0, 1e-40,
                               3e38};
    for (int64_t r = 0; r < matrix->rows; r++) {
        for (int64_t c = 0; c < matrix->columns; c++) {
            double value = test_uniform() * size;
            if (special && test_random() % 4 == 0) value = ldexp(value, -(int)(test_random() % 24));
            if (special && test_random() % 16 == 0) value = specials[test_random() % 7];
            test_set(matrix, r, c, value);
        }
    }
    test_upload(t, matrix->buffer);
}

/* Downloads, and checks that nothing was written outside the matrix. */
static inline void test_fetch(test_device *t, test_matrix *matrix)
{
    int64_t gap = matrix->offset, damaged = 0;
    test_download(t, matrix->buffer);
    for (int64_t r = 0; r <= matrix->rows; r++) {
        const unsigned char *start =
            matrix->buffer->host + (size_t)(r * matrix->stride) * matrix->bytes;
        for (size_t i = 0; i < (size_t)gap * matrix->bytes; i++) damaged += start[i] != TEST_GUARD;
    }
    TEST_CHECK(t, damaged == 0, "%lld bytes written outside a matrix [%lld, %lld]",
               (long long)damaged, (long long)matrix->rows, (long long)matrix->columns);
}

/* A workspace of just the size an operator asks for; *bytes receives the size. */
static inline void *test_workspace(test_device *t, te_op op, const void *args, size_t *bytes)
{
    TEST_OK(t, te_op_workspace(t->context, op, args, bytes));
    return *bytes > 0 ? test_allocate(t, *bytes)->device : NULL;
}

#endif
