/* SPDX-License-Identifier: Apache-2.0
 *
 * gemm_gpu.c - te_gemm on CUDA against a float64 reference made from the same operands: dtypes,
 * transposes, epilogues, odd and empty shapes, misaligned views, accumulation, bias gradient, FP8
 * output; twice with the same bits; from two threads; captured at first use; tuned.
 */
#include <pthread.h>
#include <time.h>

#include "gemm_fixture.h"

/* ---- the cases ---------------------------------------------------------------------------- */

static const unsigned epilogues[] = {0,           BIAS,       GELU,
                                     GELU | BIAS, GELU | AUX, GELU | AUX | BIAS,
                                     ACCUMULATE,  BIAS_GRAD,  ACCUMULATE | BIAS_GRAD};
#define EPILOGUES (sizeof epilogues / sizeof epilogues[0])

static void test_high_precision(te_context *context)
{
    static const te_dtype dtypes[] = {TE_DTYPE_F32, TE_DTYPE_F16, TE_DTYPE_BF16};
    static const int64_t shapes[][3] = {{67, 136, 160}, {5, 33, 77}, {1, 1, 1}, {3, 129, 1},
                                        {1, 40, 24},    {16, 8, 0},  {0, 8, 8}, {8, 0, 8}};
    for (unsigned i = 0; i < 3 * 3 * 4; ++i) {
        for (size_t e = 0; e < EPILOGUES; ++e) {
            for (unsigned s = 0; s < 16; ++s) {
                test_case c = {.a = dtypes[i % 3], .b = dtypes[i % 3], .what = epilogues[e]};
                c.d = dtypes[i / 3 % 3];
                c.ta = i / 9 & 1;
                c.tb = i / 18 & 1;
                c.m = shapes[s / 2][0], c.n = shapes[s / 2][1], c.k = shapes[s / 2][2];
                c.misaligned = s & 1;
                /* d is made in f32 and cast: what GELU was applied to has another dtype there. */
                if ((c.what & AUX) && c.d != TE_DTYPE_F32 && c.d != c.a) continue;
                if (c.a == TE_DTYPE_F32 && c.d != TE_DTYPE_F32) c.what |= TF32;
                run_case(context, &c);
            }
        }
    }
    /* More elements in a than the fused bias gradient is used for. */
    run_case(context, &(test_case){TE_DTYPE_BF16, TE_DTYPE_BF16, TE_DTYPE_BF16, 1, 0, 1030, 9, 1100,
                                   BIAS_GRAD, 0});
}

static void test_fp8(te_context *context)
{
    static const te_dtype pairs[][2] = {{TE_DTYPE_E4M3, TE_DTYPE_E4M3},
                                        {TE_DTYPE_E4M3, TE_DTYPE_E5M2},
                                        {TE_DTYPE_E5M2, TE_DTYPE_E4M3}};
    static const te_dtype outputs[] = {TE_DTYPE_F32, TE_DTYPE_F16, TE_DTYPE_BF16, TE_DTYPE_E4M3,
                                       TE_DTYPE_E5M2};
    static const int64_t shapes[][3] = {{67, 144, 160}, {1, 8, 16},  {5, 33, 64},
                                        {130, 4, 32},   {1, 1, 16},  {16, 16, 0},
                                        {0, 16, 16},    {16, 0, 16}, {300, 17, 48}};
    for (unsigned i = 0; i < 3 * 5; ++i) {
        for (size_t e = 0; e < EPILOGUES; ++e) {
            for (unsigned s = 0; s < 18; ++s) {
                test_case c = {
                    .a = pairs[i % 3][0], .b = pairs[i % 3][1], .d = outputs[i / 3], .tb = 1};
                c.what = epilogues[e];
                c.m = shapes[s / 2][0], c.n = shapes[s / 2][1], c.k = shapes[s / 2][2];
                c.misaligned = s & 1;
                if (s & 1 || e % 2) c.what |= FAST;
                if (te_dtype_is_fp8(c.d)) c.what |= AMAX;
                if ((c.what & BIAS_GRAD) || ((c.what & ACCUMULATE) && te_dtype_is_fp8(c.d))) {
                    continue;
                }
                run_case(context, &c);
            }
        }
    }
}

/* ---- circumstances ------------------------------------------------------------------------ */

typedef struct worker {
    te_context *context;
    fixture *x;
    int failures;
} worker;

static void *work(void *untyped)
{
    worker *w = untyped;
    for (int i = 0; i < 300; ++i) w->failures += te_gemm(w->context, &w->x->args, NULL) != TE_OK;
    return NULL;
}

/* Threads that never had a context current, on one te_context; half of the problems are new to it.
 */
static void test_threads(te_context *context)
{
    static const test_case cases[2] = {
        {TE_DTYPE_E4M3, TE_DTYPE_E4M3, TE_DTYPE_BF16, 0, 1, 64, 96, 128, BIAS, 0},
        {TE_DTYPE_BF16, TE_DTYPE_BF16, TE_DTYPE_BF16, 1, 0, 71, 96, 128, BIAS_GRAD, 0}};
    fixture x[2];
    worker w[2];
    pthread_t thread[2];
    size_t kept = 0;
    for (int i = 0; i < 2; ++i) {
        size_t need = 0;
        x[i] = set_up(&cases[i]);
        EXPECT(te_op_workspace(context, TE_OP_GEMM, &x[i].args, &need) == TE_OK, "workspace");
        x[i].args.workspace = (void *)(uintptr_t)cuda_take(&arena, need + 256, 0);
        x[i].args.workspace_size = need;
        if (i == 0) { /* the second fixture comes behind the first in the arena */
            kept = arena.used;
            arena.base += kept;
            arena.size -= kept;
        }
        w[i] = (worker){context, &x[i], 0};
    }
    for (int i = 0; i < 2; ++i)
        EXPECT(pthread_create(&thread[i], NULL, work, &w[i]) == 0, "thread");
    for (int i = 0; i < 2; ++i) EXPECT(pthread_join(thread[i], NULL) == 0, "thread");
    for (int i = 0; i < 2; ++i)
        EXPECT(w[i].failures == 0, "%d calls failed in a thread", w[i].failures);
    cuda_expect(cuda.synchronize(), "synchronize");
    for (int i = 0; i < 2; ++i) {
        check_results(&x[i]);
        tear_down(&x[i]);
    }
    arena.base -= kept;
    arena.size += kept;
}

/* The first GEMM of a context happens inside a capture, in which another context ends; the graph is
 * run twice on new contents. */
static void test_capture(void)
{
    static const test_case c = {
        TE_DTYPE_E4M3, TE_DTYPE_E4M3, TE_DTYPE_BF16, 0, 1, 48, 80, 144, BIAS, 0};
    te_context *context = NULL, *ending = NULL;
    fixture x = set_up(&c);
    void *stream = NULL, *graph = NULL, *executable = NULL;
    EXPECT(te_context_create(device, &context) == TE_OK, "context");
    EXPECT(te_context_create(device, &ending) == TE_OK, "context");
    cuda_expect(cuda.stream_create(&stream, 1), "stream");
    x.args.workspace = (void *)(uintptr_t)cuda_take(&arena, 1 << 20, 0);
    x.args.workspace_size = 1 << 20;
    EXPECT(te_gemm(ending, &x.args, stream) == TE_OK, "te_gemm");
    cuda_expect(cuda.stream_synchronize(stream), "synchronize");
    cuda_expect(cuda.capture_begin(stream, 0), "begin capture");
    te_context_destroy(ending);
    EXPECT(te_gemm(context, &x.args, stream) == TE_OK, "te_gemm while capturing");
    cuda_expect(cuda.capture_end(stream, &graph), "end capture");
    cuda_expect(cuda.instantiate(&executable, graph, 0), "instantiate");
    for (int i = 0; i < 2; ++i) {
        restore(&x.d);
        cuda_expect(cuda.launch(executable, stream), "launch");
        cuda_expect(cuda.stream_synchronize(stream), "synchronize");
        check_results(&x);
    }
    cuda_expect(cuda.executable_destroy(executable), "destroy");
    cuda_expect(cuda.graph_destroy(graph), "destroy");
    cuda_expect(cuda.stream_destroy(stream), "destroy");
    tear_down(&x);
    te_context_destroy(context);
}

/* Too little workspace is an error that leaves d alone; none at all is enough for an aligned
 * problem. */
static void test_workspace(te_context *context)
{
    test_case odd = {TE_DTYPE_E4M3, TE_DTYPE_E4M3, TE_DTYPE_BF16, 0, 1, 16, 33, 64, 0, 0};
    test_case plain = {TE_DTYPE_E4M3, TE_DTYPE_E4M3, TE_DTYPE_BF16, 0, 1, 64, 4096, 4096, 0, 0};
    fixture x = set_up(&odd);
    uint8_t *bytes;
    EXPECT(te_gemm(context, &x.args, NULL) == TE_ERROR_INVALID, "odd n without workspace");
    EXPECT(strstr(te_last_error(), "workspace") != NULL, "text");
    bytes = fetch(&x.d);
    EXPECT(memcmp(bytes, x.d.host, x.d.bytes) == 0, "d was touched");
    free(bytes);
    tear_down(&x);
    plain.n = 256;
    plain.k = 8192;
    x = set_up(&plain);
    bytes = run_once(context, &x, NULL);
    check_results(&x);
    free(bytes);
    tear_down(&x);
}

/* Winners are right, and a second context reads them from the file. */
static void test_tuner(void)
{
    static const char path[] = "te_gemm_tuner_test.txt";
    static const test_case cases[] = {
        {TE_DTYPE_E4M3, TE_DTYPE_E4M3, TE_DTYPE_BF16, 0, 1, 256, 512, 256, BIAS, 0},
        {TE_DTYPE_BF16, TE_DTYPE_BF16, TE_DTYPE_BF16, 1, 0, 256, 512, 256, 0, 0},
        {TE_DTYPE_BF16, TE_DTYPE_BF16, TE_DTYPE_BF16, 1, 0, 256, 512, 256, ACCUMULATE, 0}};
    int lines = 0, c;
    FILE *file;
    (void)remove(path);
    for (int round = 0; round < 2; ++round) {
        te_context *context = NULL;
        EXPECT(te_context_create(device, &context) == TE_OK, "context");
        EXPECT(te_context_tune_gemm(context, 1, path) == TE_OK, "tune");
        for (int i = 0; i < 3; ++i) run_case(context, &cases[i]);
        te_context_destroy(context);
    }
    file = fopen(path, "r");
    EXPECT(file != NULL, "no file of winners");
    while ((c = fgetc(file)) != EOF) lines += c == '\n';
    (void)fclose(file);
    (void)remove(path);
    EXPECT(lines == 2, "%d winners in the file, expected 2: one per problem that was timed", lines);
}

static void print_host_time(te_context *context)
{
    static const test_case cases[2] = {
        {TE_DTYPE_E4M3, TE_DTYPE_E4M3, TE_DTYPE_BF16, 0, 1, 64, 256, 256, BIAS, 0},
        {TE_DTYPE_BF16, TE_DTYPE_BF16, TE_DTYPE_BF16, 0, 1, 64, 256, 256, BIAS, 0}};
    for (int i = 0; i < 2; ++i) {
        fixture x = set_up(&cases[i]);
        struct timespec from, to;
        free(run_once(context, &x, NULL));
        (void)timespec_get(&from, TIME_UTC);
        for (int n = 0; n < 2000; ++n) (void)te_gemm(context, &x.args, NULL);
        (void)timespec_get(&to, TIME_UTC);
        cuda_expect(cuda.synchronize(), "synchronize");
        (void)printf(
            "te_gemm %s 64 x 256 x 256: %.2f us of host time\n", te_dtype_name(cases[i].a),
            ((double)(to.tv_sec - from.tv_sec) * 1e9 + (double)(to.tv_nsec - from.tv_nsec)) / 2e6);
        tear_down(&x);
    }
}

int main(int argc, char **argv)
{
    te_context *context = NULL;
    static const char *const names[] = {"capture",   "high_precision", "fp8", "threads",
                                        "workspace", "tuner",          "time"};
    cuda_begin();
    arena = cuda_arena_create((size_t)256 << 20);
    EXPECT(te_context_create(device, &context) == TE_OK, "context");
    for (int i = 0; i < 7; ++i) {
        if (argc > 1 && strcmp(argv[1], names[i]) != 0) continue;
        switch (i) {
        case 0:
            test_capture();
            break;
        case 1:
            test_high_precision(context);
            break;
        case 2:
            test_fp8(context);
            break;
        case 3:
            test_threads(context);
            break;
        case 4:
            test_workspace(context);
            break;
        case 5:
            test_tuner();
            break;
        default:
            print_host_time(context);
        }
        (void)printf("%s: passed, %d cases so far\n", names[i], cases_run);
    }
    te_context_destroy(context);
    cuda_arena_destroy(&arena);
    return failures > 0;
}
