/* SPDX-License-Identifier: Apache-2.0
 *
 * testing.h - what the C tests share: checks that count, a device behind four functions, matrices
 * with a host mirror and guarded gaps, and number formats defined once more, slowly and by search.
 */
#ifndef TE_TESTS_TESTING_H
#define TE_TESTS_TESTING_H

#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <transformer_engine.h>

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

/* ---- random numbers ----------------------------------------------------------------------- */

static uint64_t test_seed = 1;

static inline uint32_t test_random(void)
{
    test_seed = test_seed * 6364136223846793005U + 1442695040888963407U;
    return (uint32_t)(test_seed >> 32);
}

/* In (-1, 1). */
static inline double test_uniform(void)
{
    return ((double)test_random() + 0.5) / 2147483648.0 - 1.0;
}

/* ---- formats ------------------------------------------------------------------------------ */

typedef struct test_format {
    int exponent_bits, mantissa_bits;
    unsigned largest; /* code of the largest finite value */
    int saturates;
} test_format;

static inline test_format test_format_of(te_dtype dtype)
{
    switch (dtype) {
    case TE_DTYPE_F16:
        return (test_format){5, 10, 0x7bff, 0};
    case TE_DTYPE_BF16:
        return (test_format){8, 7, 0x7f7f, 0};
    case TE_DTYPE_E4M3:
        return (test_format){4, 3, 0x7e, 1};
    default:
        return (test_format){5, 2, 0x7b, 1};
    }
}

/* Value of a non-negative code, as if there were neither Inf nor NaN. */
static inline double test_code_value(const test_format *format, unsigned code)
{
    int bias = (1 << (format->exponent_bits - 1)) - 1;
    int exponent = (int)(code >> format->mantissa_bits);
    unsigned mantissa = code & ((1U << format->mantissa_bits) - 1);
    if (exponent > 0) mantissa |= 1U << format->mantissa_bits;
    return ldexp((double)mantissa, (exponent > 0 ? exponent : 1) - bias - format->mantissa_bits);
}

/* The nearest code of a narrow float by bisection; ties to the even one. NaN: any NaN code. */
static inline unsigned test_encode(te_dtype dtype, double value)
{
    test_format format = test_format_of(dtype);
    unsigned width = (unsigned)(format.exponent_bits + format.mantissa_bits);
    unsigned sign = signbit(value) ? 1U << width : 0, low = 0, high = format.largest + 1;
    double magnitude = fabs(value);
    if (isnan(value)) return (1U << width) - 1; /* FP8 drops the sign */
    if (magnitude >= test_code_value(&format, high)) {
        return sign | (format.saturates ? format.largest : high);
    }
    while (high - low > 1) {
        unsigned middle = (low + high) / 2;
        if (test_code_value(&format, middle) <= magnitude) {
            low = middle;
        } else {
            high = middle;
        }
    }
    double below = magnitude - test_code_value(&format, low);
    double above = test_code_value(&format, high) - magnitude;
    unsigned code = above < below || (above == below && (high & 1) == 0) ? high : low;
    if (format.saturates && code > format.largest) code = format.largest;
    return sign | code;
}

static inline double test_decode(te_dtype dtype, unsigned code)
{
    test_format format = test_format_of(dtype);
    unsigned width = (unsigned)(format.exponent_bits + format.mantissa_bits);
    unsigned magnitude = code & ((1U << width) - 1);
    double value = test_code_value(&format, magnitude);
    if (magnitude > format.largest) {
        int infinite =
            dtype != TE_DTYPE_E4M3 && (magnitude & ((1U << format.mantissa_bits) - 1)) == 0;
        value = infinite ? (double)INFINITY : (double)NAN;
    }
    return (code >> width) & 1 ? -value : value;
}

/* Half a unit in the last place of 1. */
static inline double test_dtype_eps(te_dtype dtype)
{
    return dtype == TE_DTYPE_F32 ? 0x1p-24 : ldexp(0.5, -test_format_of(dtype).mantissa_bits);
}

/* ---- elements ----------------------------------------------------------------------------- */

static inline double test_load(te_dtype dtype, const void *element)
{
    float single;
    uint16_t half;
    int32_t i32;
    int64_t i64;
    switch (dtype) {
    case TE_DTYPE_F32:
        memcpy(&single, element, sizeof single);
        return (double)single;
    case TE_DTYPE_F16:
    case TE_DTYPE_BF16:
        memcpy(&half, element, sizeof half);
        return test_decode(dtype, half);
    case TE_DTYPE_I32:
        memcpy(&i32, element, sizeof i32);
        return (double)i32;
    case TE_DTYPE_I64:
        memcpy(&i64, element, sizeof i64);
        return (double)i64;
    case TE_DTYPE_U8:
        return *(const unsigned char *)element;
    default:
        return test_decode(dtype, *(const unsigned char *)element);
    }
}

/* Floats and bytes only. */
static inline void test_store(te_dtype dtype, void *element, double value)
{
    float single = (float)value;
    uint16_t half;
    switch (dtype) {
    case TE_DTYPE_F32:
        memcpy(element, &single, sizeof single);
        break;
    case TE_DTYPE_F16:
    case TE_DTYPE_BF16:
        half = (uint16_t)test_encode(dtype, value);
        memcpy(element, &half, sizeof half);
        break;
    case TE_DTYPE_U8:
        *(unsigned char *)element = (unsigned char)value;
        break;
    default:
        *(unsigned char *)element = (unsigned char)test_encode(dtype, value);
    }
}

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
