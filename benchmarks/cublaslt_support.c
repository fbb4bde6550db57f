/* SPDX-License-Identifier: Apache-2.0
 *
 * cublaslt_support.c - asks the cuBLASLt of this machine what it can do, and prints a table.
 *
 * The CUDA GEMM is built on facts that the vendor's manual leaves open: which dtypes an epilogue
 * takes with FP8 operands, which shapes and alignments are refused, whether the amax of an FP8
 * output accumulates. Run this on a new GPU or a new library version and compare. Sizes are in the
 * terms of te_gemm_args: row-major d[m, n] = a[m, k] b[k, n].
 *
 *   cc -std=c11 -O2 -I<cuda headers> benchmarks/cublaslt_support.c -o cublaslt_support -ldl
 *   LD_LIBRARY_PATH=<folder of libcublasLt> ./cublaslt_support
 */
#include "cublaslt_problem.h"

/* ---- what is asked ------------------------------------------------------------------------ */

static const char *type_name(int type)
{
    switch (type) {
    case F32:
        return "f32";
    case F16:
        return "f16";
    case BF16:
        return "bf16";
    case E4M3:
        return "e4m3";
    case E5M2:
        return "e5m2";
    default:
        return "-";
    }
}

static const problem fp8_base = {.m = 256,
                                 .n = 512,
                                 .k = 256,
                                 .a = E4M3,
                                 .b = E4M3,
                                 .d = BF16,
                                 .b_transposed = 1,
                                 .bias = NO_TYPE,
                                 .aux = NO_TYPE};

static void print_outcome(const char *what, const problem *p)
{
    outcome out = try_problem(p);
    if (out.status != CUBLAS_STATUS_SUCCESS) {
        printf("  %-58s no (%s)\n", what, api.p_cublasLtGetStatusName(out.status));
    } else if (p->repeats == 0) {
        printf("  %-58s yes\n", what);
    } else {
        double tera = 2e-9 * (double)p->m * (double)p->n * (double)p->k;
        printf("  %-58s %.4f ms %5.0f TF, best of %d %.4f ms, workspace %zu, host %.1f us\n", what,
               out.milliseconds, tera / out.milliseconds, out.candidates, out.best, out.workspace,
               out.host_us);
    }
}

/* Every output dtype with every bias dtype, without and with GELU and each dtype of aux. */
static void ask_epilogues(problem p, const char *title)
{
    static const int types[] = {NO_TYPE, F32, F16, BF16};
    printf("%s, d = %s: bias dtype -> plain / gelu / gelu with aux of f32, f16, bf16, d%s\n", title,
           type_name(p.d), p.amax ? " (amax)" : "");
    for (int bias = 0; bias < 4; ++bias) {
        p.bias = types[bias];
        printf("  %-5s", type_name(p.bias));
        for (int aux = -2; aux < 4; ++aux) {
            p.gelu = aux > -2;
            p.aux = aux < 0 ? NO_TYPE : aux == 3 ? p.d : types[aux + 1];
            printf(" %-4s", try_problem(&p).status == CUBLAS_STATUS_SUCCESS ? "yes" : ".");
        }
        printf("\n");
    }
}

static void ask_fp8(void)
{
    static const int outputs[] = {F32, F16, BF16, E4M3, E5M2};
    static const int pairs[][2] = {{E4M3, E4M3}, {E4M3, E5M2}, {E5M2, E4M3}, {E5M2, E5M2}};
    for (int pair = 0; pair < 4; ++pair) {
        for (int i = 0; i < 5; ++i) {
            problem p = fp8_base;
            char title[64];
            p.a = pairs[pair][0];
            p.b = pairs[pair][1];
            p.d = outputs[i];
            p.amax = p.d == E4M3 || p.d == E5M2;
            (void)snprintf(title, sizeof title, "%s x %s", type_name(p.a), type_name(p.b));
            ask_epilogues(p, title);
        }
    }
    printf("FP8 accumulating (c = d)\n");
    for (int i = 0; i < 5; ++i) {
        problem p = fp8_base;
        p.d = outputs[i];
        p.accumulate = 1;
        print_outcome(type_name(p.d), &p);
    }
}

/* 0 stands for the usual: no bias, no aux, dense rows. */
static const struct {
    const char *what;
    int64_t m, n, k, d_stride, k_stride;
    int d, a_offset, b_offset, d_offset, bias, bias_offset, gelu, aux, aux_offset;
    int64_t aux_stride;
} shape_cases[] = {
    {.what = "m = 1", .m = 1, .n = 512, .k = 256, .d = BF16},
    {.what = "m = 3", .m = 3, .n = 512, .k = 256, .d = BF16},
    {.what = "m = 17", .m = 17, .n = 512, .k = 256, .d = BF16},
    {.what = "m = 17, d f32", .m = 17, .n = 512, .k = 256, .d = F32},
    {.what = "m = 17, d e4m3", .m = 17, .n = 512, .k = 256, .d = E4M3},
    {.what = "m = 1, n = 8", .m = 1, .n = 8, .k = 256, .d = BF16},
    {.what = "m = 1, n = 1, row stride 8", .m = 1, .n = 1, .k = 256, .d = BF16, .d_stride = 8},
    {.what = "k = 16", .m = 64, .n = 64, .k = 16, .d = BF16},
    {.what = "k = 32", .m = 64, .n = 64, .k = 32, .d = BF16},
    {.what = "k = 48", .m = 64, .n = 64, .k = 48, .d = BF16},
    {.what = "k = 16, m = 1, n = 8", .m = 1, .n = 8, .k = 16, .d = BF16},
    {.what = "k = 24 with row stride 32", .m = 64, .n = 64, .k = 24, .d = BF16, .k_stride = 32},
    {.what = "k = 24", .m = 64, .n = 64, .k = 24, .d = BF16},
    {.what = "k = 256 with row stride 264", .m = 64, .n = 64, .k = 256, .d = BF16, .k_stride = 264},
    {.what = "k = 256 with row stride 257", .m = 64, .n = 64, .k = 256, .d = BF16, .k_stride = 257},
    {.what = "n = 4 d f32", .m = 64, .n = 4, .k = 64, .d = F32},
    {.what = "n = 1 d f32, row stride 4", .m = 64, .n = 1, .k = 64, .d = F32, .d_stride = 4},
    {.what = "n = 72 (9 * 8), d bf16", .m = 64, .n = 72, .k = 64, .d = BF16},
    {.what = "n = 509, d bf16", .m = 64, .n = 509, .k = 64, .d = BF16},
    {.what = "n = 509, d bf16, row stride 512",
     .m = 64,
     .n = 509,
     .k = 64,
     .d = BF16,
     .d_stride = 512},
    {.what = "n = 509, d f32", .m = 64, .n = 509, .k = 64, .d = F32},
    {.what = "n = 509, d f32, row stride 512",
     .m = 64,
     .n = 509,
     .k = 64,
     .d = F32,
     .d_stride = 512},
    {.what = "n = 510, d bf16, row stride 516",
     .m = 64,
     .n = 510,
     .k = 64,
     .d = BF16,
     .d_stride = 516},
    {.what = "n = 504, d e4m3 (row stride 504)", .m = 64, .n = 504, .k = 64, .d = E4M3},
    {.what = "n = 504, d e4m3, row stride 512",
     .m = 64,
     .n = 504,
     .k = 64,
     .d = E4M3,
     .d_stride = 512},
    {.what = "n = 509, d e4m3, row stride 512",
     .m = 64,
     .n = 509,
     .k = 64,
     .d = E4M3,
     .d_stride = 512},
    {.what = "a at +1 byte", .m = 64, .n = 512, .k = 64, .d = BF16, .a_offset = 1},
    {.what = "a at +8 bytes", .m = 64, .n = 512, .k = 64, .d = BF16, .a_offset = 8},
    {.what = "b at +8 bytes", .m = 64, .n = 512, .k = 64, .d = BF16, .b_offset = 8},
    {.what = "d at +2 bytes", .m = 64, .n = 512, .k = 64, .d = BF16, .d_offset = 2},
    {.what = "d at +8 bytes", .m = 64, .n = 512, .k = 64, .d = BF16, .d_offset = 8},
    {.what = "bias at +2 bytes",
     .m = 64,
     .n = 512,
     .k = 64,
     .d = BF16,
     .bias = BF16,
     .bias_offset = 2},
    {.what = "n = 509, bias, row stride 512",
     .m = 64,
     .n = 509,
     .k = 64,
     .d = BF16,
     .d_stride = 512,
     .bias = BF16},
    {.what = "gelu, bias, aux stride 520",
     .m = 64,
     .n = 512,
     .k = 64,
     .d = BF16,
     .bias = BF16,
     .gelu = 1,
     .aux = BF16,
     .aux_stride = 520},
    {.what = "gelu, bias, n = 509, d and aux stride 512",
     .m = 64,
     .n = 509,
     .k = 64,
     .d = BF16,
     .d_stride = 512,
     .bias = BF16,
     .gelu = 1,
     .aux = BF16,
     .aux_stride = 512},
};

static void ask_shapes(void)
{
    printf("FP8 shapes and alignment (heuristic told the alignment: yes / not told: yes)\n");
    for (size_t i = 0; i < sizeof shape_cases / sizeof shape_cases[0]; ++i) {
        problem p = fp8_base;
        outcome told, untold;
        p.m = shape_cases[i].m, p.n = shape_cases[i].n, p.k = shape_cases[i].k;
        p.d = shape_cases[i].d, p.d_stride = shape_cases[i].d_stride,
        p.k_stride = shape_cases[i].k_stride;
        p.a_offset = shape_cases[i].a_offset, p.b_offset = shape_cases[i].b_offset,
        p.d_offset = shape_cases[i].d_offset;
        p.bias = shape_cases[i].bias != 0 ? shape_cases[i].bias : NO_TYPE,
        p.bias_offset = shape_cases[i].bias_offset;
        p.gelu = shape_cases[i].gelu,
        p.aux = shape_cases[i].aux != 0 ? shape_cases[i].aux : NO_TYPE;
        p.aux_stride = shape_cases[i].aux_stride, p.aux_offset = shape_cases[i].aux_offset;
        untold = try_problem(&p);
        p.min_alignment = 16;
        if ((p.a_offset | p.b_offset | p.d_offset) != 0)
            p.min_alignment = (uint32_t)((p.a_offset | p.b_offset | p.d_offset) &
                                         -(p.a_offset | p.b_offset | p.d_offset));
        told = try_problem(&p);
        printf("  %-45s %-4s %-4s\n", shape_cases[i].what, told.status == 0 ? "yes" : "no",
               untold.status == 0 ? "yes" : "no");
    }
}

static void ask_scale_alignment(void)
{
    printf("alignment of scale pointers: a and b, d, amax at +4, +8, +16 bytes\n");
    for (int i = 0; i < 18; ++i) {
        problem p = fp8_base;
        char what[64];
        p.fast = i & 1;
        p.d = i >= 6 ? E4M3 : BF16;
        p.amax = i >= 12;
        p.scale_which = 1 << i / 6;
        p.scale_offset = 4 << i % 6 / 2;
        (void)snprintf(what, sizeof what, "which %d, +%d bytes, fast %d", p.scale_which,
                       p.scale_offset, p.fast);
        print_outcome(what, &p);
    }
}

static void ask_high_precision(void)
{
    static const struct {
        const char *name;
        int type, tf32;
    } kinds[] = {{"f32", F32, 0}, {"tf32", F32, 1}, {"f16", F16, 0}, {"bf16", BF16, 0}};
    static const int outputs[] = {F32, F16, BF16};
    for (int kind = 0; kind < 4; ++kind) {
        for (int i = 0; i < 3; ++i) {
            problem p = {.m = 256,
                         .n = 512,
                         .k = 256,
                         .a = kinds[kind].type,
                         .b = kinds[kind].type,
                         .d = outputs[i],
                         .tf32 = kinds[kind].tf32,
                         .b_transposed = 1};
            char title[64];
            (void)snprintf(title, sizeof title, "%s, b transposed", kinds[kind].name);
            ask_epilogues(p, title);
        }
        printf("%s bias gradient: d, its dtype -> nn, nt, tn, tt (a, b transposed), then n = 509 k "
               "= 251 in tn, with tn accumulating\n",
               kinds[kind].name);
        for (int i = 0; i < 6; ++i) {
            problem p = {.m = 256,
                         .n = 512,
                         .k = 256,
                         .a = kinds[kind].type,
                         .b = kinds[kind].type,
                         .d = outputs[i / 2],
                         .tf32 = kinds[kind].tf32,
                         .aux = NO_TYPE,
                         .bias_grad = 1,
                         .bias = i % 2 == 0 ? kinds[kind].type : outputs[i / 2]};
            printf("  %-5s %-5s", type_name(p.d), type_name(p.bias));
            for (int t = 0; t < 6; ++t) {
                p.a_transposed = t >= 4 ? 1 : t >> 1;
                p.b_transposed = t >= 4 ? 0 : t & 1;
                p.accumulate = t == 5;
                p.n = t == 4 ? 509 : 512;
                p.k = t == 4 ? 251 : 256;
                p.min_alignment = 16;
                printf(" %-4s", try_problem(&p).status == CUBLAS_STATUS_SUCCESS ? "yes" : ".");
            }
            printf("\n");
        }
        printf("%s misaligned: offset of a, b and d = one element, n = 509, k = 251: nn nt tn tt, "
               "then with gelu aux bias, with n = 1, with accumulate\n ",
               kinds[kind].name);
        for (int t = 0; t < 7; ++t) {
            problem p = {.m = 77,
                         .n = t == 5 ? 1 : 509,
                         .k = 251,
                         .a = kinds[kind].type,
                         .b = kinds[kind].type,
                         .d = kinds[kind].type,
                         .tf32 = kinds[kind].tf32,
                         .aux = NO_TYPE,
                         .bias = NO_TYPE};
            p.min_alignment = p.a == F32 ? 4 : 2;
            p.a_offset = p.b_offset = p.d_offset = (int)p.min_alignment;
            p.a_transposed = t >= 4 ? 0 : t >> 1;
            p.b_transposed = t >= 4 ? 1 : t & 1;
            p.accumulate = t == 6;
            if (t == 4) p.gelu = 1, p.bias = p.aux = p.a;
            printf(" %-4s", try_problem(&p).status == CUBLAS_STATUS_SUCCESS ? "yes" : ".");
        }
        printf("\n");
    }
}

/* Does the amax of an FP8 output accumulate, and is it that of the value before the output scale?
 */
static void ask_amax(void)
{
    problem p = fp8_base;
    float preset[2] = {1e9F, 0.0F}, seen[2];
    p.d = E4M3;
    p.amax = 1;
    for (int i = 0; i < 2; ++i) {
        check((int)api.p_cuMemcpyHtoD_v2(gpu.amax, &preset[i], sizeof preset[i]), "copy");
        (void)try_problem(&p);
        check((int)api.p_cuMemcpyDtoH_v2(&seen[i], gpu.amax, sizeof seen[i]), "copy");
    }
    printf("amax of d: preset 1e9 -> %g, preset 0 -> %g: it %s\n", (double)seen[0], (double)seen[1],
           seen[0] == seen[1] ? "overwrites" : "accumulates");
}

/* Every value is 16 - 16: an amax other than 0 is that of rows which are not there, where the bias
 * alone reaches the epilogue. */
static void ask_amax_of_ragged_rows(void)
{
    static const int64_t rows[] = {1, 8, 17, 64, 100, 128, 192, 256, 257, 384, 512, 1000, 1024};
    static const int64_t columns[] = {16, 48, 144, 512, 1008};
    static uint8_t ones[1024 * 64];
    static uint16_t bias[1024];
    memset(ones, 0x38, sizeof ones);                 /* 1.0 in e4m3 */
    for (int i = 0; i < 1024; ++i) bias[i] = 0xc180; /* -16 in bf16 */
    check((int)api.p_cuMemcpyHtoD_v2(gpu.a, ones, sizeof ones), "copy");
    check((int)api.p_cuMemcpyHtoD_v2(gpu.b, ones, sizeof ones), "copy");
    check((int)api.p_cuMemcpyHtoD_v2(gpu.bias, bias, sizeof bias), "copy");
    printf("amax of an e4m3 output that is 0, with bias / bias and gelu (right: 0), n across\n  m  "
           "  ");
    for (int j = 0; j < 5; ++j) printf(" %11lld", (long long)columns[j]);
    printf("\n");
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; ++i) {
        printf("  %-5lld", (long long)rows[i]);
        for (int j = 0; j < 10; ++j) {
            problem p = fp8_base;
            float seen = 0.0F;
            p.m = rows[i], p.n = columns[j / 2], p.k = 16;
            p.d = E4M3, p.amax = 1, p.bias = BF16, p.gelu = j & 1;
            (void)try_problem(&p);
            check((int)api.p_cuMemcpyDtoH_v2(&seen, gpu.amax, sizeof seen), "copy");
            printf(j & 1 ? " / %-4g" : " %4g", (double)seen);
        }
        printf("\n");
    }
}

static void ask_speed(void)
{
    problem fp8 = fp8_base, bf16 = fp8_base;
    printf("speed and host time\n");
    fp8.fast = 1;
    fp8.repeats = bf16.repeats = 200;
    print_outcome("fp8 256 x 512 x 256", &fp8);
    bf16.a = bf16.b = BF16;
    print_outcome("bf16 256 x 512 x 256", &bf16);
    bf16.m = 256, bf16.n = 256, bf16.k = 64, bf16.a_transposed = 1, bf16.b_transposed = 0;
    print_outcome("bf16 256 x 256 x 64 wgrad", &bf16);
    bf16.bias_grad = 1, bf16.bias = BF16;
    print_outcome("bf16 256 x 256 x 64 wgrad, bias gradient", &bf16);
    bf16.bias_grad = 0, bf16.bias = NO_TYPE, bf16.a_transposed = 0, bf16.b_transposed = 1;
    fp8.m = bf16.m = 2048, fp8.n = fp8.k = bf16.n = bf16.k = 4096;
    fp8.repeats = bf16.repeats = 50;
    for (int i = 0; i < 6; ++i) {
        static const uint32_t alignments[] = {0, 16, 128};
        uint32_t alignment = alignments[i % 3];
        char what[80];
        fp8.min_alignment = bf16.min_alignment = alignment;
        (void)snprintf(what, sizeof what, "fp8 2048 x 4096 x 4096, alignment %u", alignment);
        print_outcome(what, &fp8);
        (void)snprintf(what, sizeof what, "bf16 2048 x 4096 x 4096, alignment %u", alignment);
        print_outcome(what, &bf16);
    }
    fp8.min_alignment = bf16.min_alignment = 0;
    fp8.d = F32;
    fp8.bias = BF16;
    print_outcome("fp8 2048 x 4096 x 4096, d f32, bias bf16", &fp8);
    fp8.d = F16, fp8.bias = F16;
    print_outcome("fp8 2048 x 4096 x 4096, d f16, bias f16", &fp8);
    fp8.gelu = 1, fp8.aux = F16;
    print_outcome("fp8 2048 x 4096 x 4096, d f16, gelu, bias, aux f16", &fp8);
    bf16.a_transposed = 1, bf16.b_transposed = 0;
    print_outcome("bf16 wgrad", &bf16);
    bf16.bias_grad = 1, bf16.bias = BF16;
    print_outcome("bf16 wgrad with bias gradient", &bf16);
    bf16.a = bf16.b = bf16.d = bf16.bias = F32, bf16.tf32 = 1;
    print_outcome("tf32 wgrad with bias gradient", &bf16);
    bf16.bias_grad = 0, bf16.bias = NO_TYPE;
    print_outcome("tf32 wgrad", &bf16);
}

int main(void)
{
    open_gpu();
    printf("cuBLASLt %zu\n", api.p_cublasLtGetVersion());
    ask_fp8();
    ask_shapes();
    ask_scale_alignment();
    ask_high_precision();
    ask_amax();
    ask_speed();
    ask_amax_of_ragged_rows();
    return 0;
}
