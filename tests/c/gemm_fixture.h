/* SPDX-License-Identifier: Apache-2.0
 *
 * gemm_fixture.h - one te_gemm on CUDA: operands of any dtype and alignment in device memory, the
 * float64 reference made from them, the comparison, and run_case, which does all of it.
 */
#ifndef TE_TESTS_GEMM_FIXTURE_H
#define TE_TESTS_GEMM_FIXTURE_H

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include <transformer_engine.h>

#include "cuda_memory.h"
#include "numbers.h"

#define EXPECT(condition, ...)                                                                     \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            (void)fprintf(stderr, "%s:%d: ", __FILE__, __LINE__);                                  \
            (void)fprintf(stderr, __VA_ARGS__);                                                    \
            (void)fprintf(stderr, "\n  last error: %s\n", te_last_error());                        \
            exit(1);                                                                               \
        }                                                                                          \
    } while (0)

enum { SHOWN_FAILURES = 12 };
static int failures;

enum {
    BIAS = 1,
    GELU = 2,
    AUX = 4,
    ACCUMULATE = 8,
    BIAS_GRAD = 16,
    AMAX = 32,
    FAST = 64,
    TF32 = 128
};

typedef struct test_case {
    te_dtype a, b, d;
    int ta, tb;
    int64_t m, n, k;
    unsigned what;  /* of the above */
    int misaligned; /* rows padded by odd numbers of elements, addresses off by one element */
} test_case;

/* A tensor in host and device memory, with its values as doubles. */
typedef struct operand {
    te_tensor view;
    uint8_t *host;
    size_t bytes;
    device_address address;
    double *values; /* [rows, columns], dense */
} operand;

static cuda_arena arena;
static const te_device device = {TE_DEVICE_CUDA, 0};

/* ---- operands ----------------------------------------------------------------------------- */

/* A random number of magnitude in [2^-4, 2). */
static void encode_random(te_dtype dtype, uint8_t *to)
{
    test_format f = test_format_of(dtype);
    int bias = (1 << (f.exponent_bits - 1)) - 1;
    uint32_t mantissa = test_random() & ((1U << f.mantissa_bits) - 1);
    uint32_t bits = (uint32_t)(bias - (int)(test_random() % 5)) << f.mantissa_bits | mantissa;
    bits |= (test_random() & 1) << (f.exponent_bits + f.mantissa_bits);
    memcpy(to, &bits, te_dtype_bytes(dtype));
}

static int64_t rows_of(const operand *o)
{
    return o->view.ndim == 1 ? 1 : o->view.shape[0];
}

static int64_t columns_of(const operand *o)
{
    return o->view.shape[o->view.ndim - 1];
}

/* Random contents; between and behind rows a pattern that must stay. rows 0 of ndim 1: a vector. */
static operand make(te_dtype dtype, int ndim, int64_t rows, int64_t columns, int misaligned)
{
    operand o;
    size_t element = te_dtype_bytes(dtype), offset = misaligned ? element : 0;
    int64_t stride = columns + (misaligned ? 3 : 0);
    memset(&o, 0, sizeof o);
    o.bytes = (size_t)(rows * stride) * element + 64;
    o.host = malloc(o.bytes);
    o.values = malloc((size_t)(rows * columns + 1) * sizeof(double));
    EXPECT(o.host != NULL && o.values != NULL, "no memory");
    memset(o.host, 0xa5, o.bytes);
    for (int64_t r = 0; r < rows; ++r) {
        for (int64_t c = 0; c < columns; ++c) {
            uint8_t *at = o.host + (size_t)(r * stride + c) * element;
            encode_random(dtype, at);
            o.values[r * columns + c] = test_load(dtype, at);
        }
    }
    o.address = cuda_take(&arena, o.bytes, offset);
    cuda_expect(cuda.upload(o.address, o.host, o.bytes), "upload");
    o.view.data = (void *)(uintptr_t)o.address;
    o.view.dtype = dtype;
    o.view.device = device;
    o.view.ndim = ndim;
    o.view.shape[0] = ndim == 1 ? columns : rows;
    o.view.strides[0] = ndim == 1 ? 1 : stride;
    o.view.shape[1] = ndim == 1 ? 0 : columns;
    o.view.strides[1] = ndim == 1 ? 0 : 1;
    return o;
}

static void restore(const operand *o)
{
    if (o->host != NULL) cuda_expect(cuda.upload(o->address, o->host, o->bytes), "upload");
}

static uint8_t *fetch(const operand *o)
{
    uint8_t *bytes = malloc(o->bytes);
    EXPECT(bytes != NULL, "no memory");
    cuda_expect(cuda.download(bytes, o->address, o->bytes), "download");
    return bytes;
}

static void discard(operand *o)
{
    free(o->host);
    free(o->values);
}

/* ---- one case ----------------------------------------------------------------------------- */

typedef struct fixture {
    const test_case *c;
    operand a, b, d, bias, bias_grad, aux;
    operand
        scales; /* {a inverse, b inverse, d scale, d amax}, `apart` floats from one to the next */
    int64_t apart;
    te_gemm_args args;
    double *before, *after; /* reference [m, n]: before the activation, and the result */
    double *sums, amax;
} fixture;

static const float scales_in[4] = {0.5F, 2.0F, 1.5F, 0.125F};

static int is_fp8_case(const test_case *c)
{
    return te_dtype_is_fp8(c->a);
}

static void make_reference(fixture *x)
{
    const test_case *c = x->c;
    double scale = is_fp8_case(c) ? (double)scales_in[0] * (double)scales_in[1] : 1.0;
    size_t count = (size_t)(c->m * c->n + 1);
    x->before = malloc(count * sizeof(double));
    x->after = malloc(count * sizeof(double));
    x->sums = calloc((size_t)c->m + 1, sizeof(double));
    EXPECT(x->before != NULL && x->after != NULL && x->sums != NULL, "no memory");
    x->amax = (double)scales_in[3];
    for (int64_t i = 0; i < c->m; ++i) {
        for (int64_t l = 0; l < c->k; ++l)
            x->sums[i] += x->a.values[c->ta ? l * c->m + i : i * c->k + l];
        for (int64_t j = 0; j < c->n; ++j) {
            double sum = 0.0, value;
            for (int64_t l = 0; l < c->k; ++l)
                sum += x->a.values[c->ta ? l * c->m + i : i * c->k + l] *
                       x->b.values[c->tb ? j * c->k + l : l * c->n + j];
            value = sum * scale + (c->what & BIAS ? x->bias.values[j] : 0.0);
            value += c->what & ACCUMULATE ? x->d.values[i * c->n + j] : 0.0;
            x->before[i * c->n + j] = value;
            if (c->what & GELU) value = test_gelu(value);
            x->after[i * c->n + j] = value;
            if (fabs(value) > x->amax) x->amax = fabs(value);
        }
    }
}

static te_dtype bias_dtype(const test_case *c)
{
    if (!is_fp8_case(c)) return c->d;
    return c->d == TE_DTYPE_F16 ? TE_DTYPE_F16 : TE_DTYPE_BF16;
}

static fixture set_up(const test_case *c)
{
    fixture x;
    float *scales;
    memset(&x, 0, sizeof x);
    arena.used = 0;
    x.c = c;
    x.a = make(c->a, 2, c->ta ? c->k : c->m, c->ta ? c->m : c->k, c->misaligned);
    x.b = make(c->b, 2, c->tb ? c->n : c->k, c->tb ? c->k : c->n, c->misaligned);
    x.d = make(c->d, 2, c->m, c->n, c->misaligned);
    x.apart = c->misaligned ? 1 : 4;
    x.scales = make(TE_DTYPE_F32, 1, 1, 4 * x.apart, 0);
    for (int i = 0; i < 4; ++i)
        memcpy(x.scales.host + (size_t)(i * x.apart) * sizeof(float), &scales_in[i], sizeof(float));
    restore(&x.scales);
    scales = x.scales.view.data;
    if (c->what & BIAS) x.bias = make(bias_dtype(c), 1, 1, c->n, c->misaligned);
    if (c->what & AUX)
        x.aux = make(te_dtype_is_fp8(c->d) ? TE_DTYPE_BF16 : c->d, 2, c->m, c->n, c->misaligned);
    if (c->what & BIAS_GRAD) x.bias_grad = make(c->a, 1, 1, c->m, c->misaligned);
    make_reference(&x);
    x.args.size = sizeof x.args;
    x.args.a = test_operand(x.a.view, scales, 0);
    x.args.b = test_operand(x.b.view, scales + x.apart, 0);
    x.args.a_transposed = c->ta;
    x.args.b_transposed = c->tb;
    x.args.d = x.d.view;
    x.args.bias = x.bias.view;
    x.args.aux = x.aux.view;
    x.args.bias_grad = x.bias_grad.view;
    if (te_dtype_is_fp8(c->d)) x.args.d_scale = scales + 2 * x.apart;
    if (c->what & AMAX) x.args.d_amax = scales + 3 * x.apart;
    x.args.epilogue = c->what & GELU ? TE_EPILOGUE_GELU : TE_EPILOGUE_NONE;
    x.args.flags = (c->what & ACCUMULATE ? TE_GEMM_ACCUMULATE : 0U) |
                   (c->what & FAST ? TE_GEMM_FAST_ACCUMULATION : 0U) |
                   (c->what & TF32 ? TE_GEMM_ALLOW_TF32 : 0U);
    return x;
}

static void tear_down(fixture *x)
{
    operand *all[] = {&x->a, &x->b, &x->d, &x->bias, &x->bias_grad, &x->aux, &x->scales};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; ++i) discard(all[i]);
    free(x->before);
    free(x->after);
    free(x->sums);
}

static void describe(const char *what, const test_case *c)
{
    (void)fprintf(stderr,
                  "%s: %s%s x %s%s -> %s, m = %lld, n = %lld, k = %lld, what 0x%x, misaligned %d\n",
                  what, te_dtype_name(c->a), c->ta ? "^T" : "", te_dtype_name(c->b),
                  c->tb ? "^T" : "", te_dtype_name(c->d), (long long)c->m, (long long)c->n,
                  (long long)c->k, c->what, c->misaligned);
}

/* A wrong result of a case: said, and the program goes on to the next for a while. */
#define REPORT(c, ...)                                                                             \
    do {                                                                                           \
        describe("case", (c));                                                                     \
        (void)fprintf(stderr, "  " __VA_ARGS__);                                                   \
        (void)fprintf(stderr, "\n");                                                               \
        if (++failures >= SHOWN_FAILURES) exit(1);                                                 \
    } while (0)

#define LARGEST_PRODUCT 4 /* of two of the numbers that encode_random makes */

/* Normalised error that rounding to the output, and the arithmetic of the operands, allow. */
static double tolerance(const test_case *c, te_dtype out)
{
    double arithmetic = is_fp8_case(c) ? 2e-3 : c->what & TF32 ? 1e-3 : 2e-6;
    /* For a single element cuBLASLt has algorithms that round the product before they add to it. */
    int terms = c->m * c->n == 1 && c->what & (BIAS | ACCUMULATE) ? 1 + LARGEST_PRODUCT : 1;
    return terms * test_dtype_eps(out) + arithmetic;
}

/* What GELU adds to it, as a share of its argument: half the error of the hardware's approximation
 * of tanh, which is up to 2^-10.987. */
#define GELU_TOLERANCE (1.01 * ldexp(1.0, -11))

/* Compares with the reference, times `scale`; padding must be as it was before. `argument`: what
 * the reference is the GELU of, or NULL. */
static void compare(const char *name, const test_case *c, const operand *o, const uint8_t *got,
                    const double *reference, const double *argument, double scale)
{
    double error = 0.0, norm = 0.0, of_argument = 0.0, count, allowed;
    int64_t columns = columns_of(o), stride = o->view.ndim == 1 ? columns : o->view.strides[0];
    size_t element = te_dtype_bytes(o->view.dtype);
    size_t end = (size_t)(rows_of(o) * stride) * element;
    for (int64_t r = 0; r < rows_of(o); ++r) {
        size_t row = (size_t)(r * stride) * element, tail = row + (size_t)columns * element;
        for (int64_t col = 0; col < columns; ++col) {
            double value = test_load(o->view.dtype, got + row + (size_t)col * element);
            double expected = reference[r * columns + col] * scale;
            error += (value - expected) * (value - expected);
            norm += expected * expected;
            if (argument != NULL) of_argument += pow(argument[r * columns + col] * scale, 2.0);
        }
        if (memcmp(got + tail, o->host + tail, (size_t)(stride - columns) * element) != 0) {
            REPORT(c, "%s: wrote between rows, at row %lld", name, (long long)r);
        }
    }
    /* Terms of the sums are of the order of 1: what cancels below that is not held against the
     * result. */
    count = (double)(rows_of(o) * columns) * scale * scale;
    norm = fmax(fmax(norm, count), 1.0);
    error = sqrt(error / norm);
    allowed = tolerance(c, o->view.dtype) + GELU_TOLERANCE * sqrt(of_argument / norm);
    if (!(error <= allowed) || memcmp(got + end, o->host + end, o->bytes - end) != 0) {
        REPORT(c, "%s: normalised error %g, allowed %g (or wrote behind the end)", name, error,
               allowed);
    }
}

static int64_t counter(const char *prefix)
{
    te_counter counters[256];
    size_t count = 0;
    int64_t sum = 0;
    EXPECT(te_counters_read(counters, 256, &count) == TE_OK, "counters");
    for (size_t i = 0; i < count && i < 256; ++i)
        if (strncmp(counters[i].name, prefix, strlen(prefix)) == 0) sum += counters[i].value;
    return sum;
}

/* What cuBLASLt has not got, by benchmarks/cublaslt_support.c. */
static int unsupported(const test_case *c)
{
    if (c->d == TE_DTYPE_E5M2 && c->a == TE_DTYPE_E4M3 && c->b == TE_DTYPE_E4M3) return 1;
    return is_fp8_case(c) && c->d == TE_DTYPE_F32 && (c->what & AUX) && (c->what & BIAS);
}

static void check_results(const fixture *x)
{
    const test_case *c = x->c;
    const operand *outputs[] = {&x->d, &x->aux, &x->bias_grad};
    const double *references[] = {x->after, x->before, x->sums};
    static const char *const names[] = {"d", "aux", "bias_grad"};
    float amax;
    for (int i = 0; i < 3; ++i) {
        uint8_t *got;
        if (outputs[i]->host == NULL || c->n == 0) continue;
        got = fetch(outputs[i]);
        compare(names[i], c, outputs[i], got, references[i],
                i == 0 && c->what & GELU ? x->before : NULL,
                i == 0 && te_dtype_is_fp8(c->d) ? (double)scales_in[2] : 1.0);
        free(got);
    }
    if (!(c->what & AMAX)) return;
    cuda_expect(cuda.download(&amax, (device_address)(uintptr_t)x->args.d_amax, sizeof amax),
                "download");
    if (fabs((double)amax - x->amax) > 4e-3 * x->amax) {
        REPORT(c, "amax %g, expected %g", (double)amax, x->amax);
    }
}

/* Runs a case from its inputs; returns d's bytes. */
static uint8_t *run_once(te_context *context, fixture *x, void *stream)
{
    restore(&x->d);
    restore(&x->aux);
    restore(&x->bias_grad);
    restore(&x->scales);
    if (te_gemm(context, &x->args, stream) != TE_OK) {
        REPORT(x->c, "te_gemm failed: %s", te_last_error());
    }
    cuda_expect(cuda.synchronize(), "synchronize");
    return fetch(&x->d);
}

static int cases_run;

static void run_case(te_context *context, const test_case *c)
{
    fixture x = set_up(c);
    size_t need = 0;
    int64_t gemms = counter("gemm.cuda");
    uint8_t *first, *second;
    te_status st = te_op_workspace(context, TE_OP_GEMM, &x.args, &need);
    if (st == TE_ERROR_UNSUPPORTED && unsupported(c)) {
        tear_down(&x);
        return;
    }
    if (st != TE_OK || unsupported(c)) {
        REPORT(c, "workspace: status %d, %s", (int)st, te_last_error());
    }
    x.args.workspace = need > 0 ? (void *)(uintptr_t)cuda_take(&arena, need, 0) : NULL;
    x.args.workspace_size = need;
    first = run_once(context, &x, NULL);
    gemms = counter("gemm.cuda") - gemms;
    check_results(&x);
    second = run_once(context, &x, NULL);
    if (memcmp(first, second, x.d.bytes) != 0) {
        REPORT(c, "a second run gave other bits");
    }
    if (c->m > 0 && c->n > 0 && c->k > 0 && !(c->what & BIAS_GRAD))
        EXPECT(gemms == 1, "counted %d", (int)gemms);
    if (c->m == 0 || c->n == 0) EXPECT(gemms == 0, "counted %d without output", (int)gemms);
    free(first);
    free(second);
    tear_down(&x);
    ++cases_run;
}

#endif
