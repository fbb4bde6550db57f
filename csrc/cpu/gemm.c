/* SPDX-License-Identifier: Apache-2.0
 *
 * gemm.c - d = epilogue(a b + bias) in fp32 for operands of any float dtype.
 *
 * The rows of a that fit SHARED_BYTES are packed to fp32 once and shared. Then every task takes a
 * strip of columns of b and a range of those rows: it packs its strip into its thread's own buffer
 * and walks down the rows, one block of sums at a time, which goes through the epilogue while it is
 * in the second-level cache. So each operand is converted once (b once per SHARED_BYTES of a), and
 * nothing but the result is written. A sum runs over k in order, in slices of DEPTH, whatever the
 * blocking and the number of threads: results do not depend on them.
 */
#include <string.h>

#include "core/check.h"
#include "core/counters.h"
#include "core/interrupt.h"
#include "core/operand.h"
#include "core/scales.h"
#include "core/status.h"
#include "core/fp8.h"
#include "cpu/isa.h"
#include "cpu/matrix.h"
#include "cpu/microscale.h"
#include "cpu/ops.h"
#include "cpu/pack.h"
#include "cpu/record.h"

enum {
    DEPTH = 256,             /* k per slice: a panel of b of 32 KiB, in the first-level cache */
    BLOCK_ROWS = 192,        /* rows of a block of sums; a multiple of every tile's rows */
    STRIP_COLUMNS = 256,     /* of a block at most; a slice of a, of b and the sums take 640 KiB */
    SHARED_BYTES = 32 << 20, /* packed rows of a at a time, but at least two blocks */
    ALIGNMENT = 64,
    TASKS_PER_THREAD = 4,
    SERIAL_WORK = 64 * 64 * 64, /* multiply-adds below which one thread is faster */
};

typedef struct gemm_job {
    const te_gemm_args *args;
    const te_cpu_kernels *kernels;
    te_cpu_operand a, b;
    te_cpu_matrix d, aux; /* aux.data NULL: not requested */
    int64_t m, n, k;
    int64_t shared_rows; /* rows of packed a at a time */
    int64_t strip;       /* columns of a strip, a multiple of the tile's */
    int64_t strip_depth; /* k of a packed strip: all, or one slice where a single block reads it */
    float alpha;         /* product of the inverse scales */
    float d_scale;
    int threads;
    int64_t shared_stride; /* rows of packed_a in use, a multiple of the tile's */
    te_interruptible *interruptible;
    float *packed_a; /* for each slice [shared_stride / tile_rows][depth][tile_rows] */
    float *buffers;  /* per thread: sums [BLOCK_ROWS][strip], then the strip: for each slice
                        [strip / tile_columns][depth][tile_columns] */
} gemm_job;

/* ---- sizes -------------------------------------------------------------------------------- */

/* Shapes and blocking; nothing of it depends on pointers. */
static gemm_job describe(const te_gemm_args *args)
{
    gemm_job job = {.args = args, .kernels = te_cpu_kernels_get(), .alpha = 1.0F};
    int64_t tile_rows = job.kernels->tile_rows, tile_columns = job.kernels->tile_columns;
    te_gemm_operand a = te_gemm_a(args), b = te_gemm_b(args);
    job.a = te_cpu_operand_of(job.kernels, a.data, !a.transposed, (int)tile_rows);
    job.b = te_cpu_operand_of(job.kernels, b.data, b.transposed, (int)tile_columns);
    job.d = te_cpu_matrix_of(&args->d);
    job.m = job.a.outer;
    job.n = job.b.outer;
    job.k = job.a.depth;
    if (job.m == 0 || job.n == 0) return job;
    job.threads = job.m * job.n * job.k < SERIAL_WORK ? 1 : te_cpu_max_threads();
    int64_t block_bytes = (int64_t)sizeof(float) * BLOCK_ROWS * (job.k > 0 ? job.k : 1);
    int64_t blocks = SHARED_BYTES / block_bytes > 2 ? SHARED_BYTES / block_bytes : 2;
    job.shared_rows = te_cpu_min(blocks * BLOCK_ROWS, te_round_up(job.m, tile_rows));
    blocks = te_ceil_div(job.shared_rows, BLOCK_ROWS);
    job.strip_depth = blocks == 1 ? te_cpu_min(DEPTH, job.k) : job.k;
    /* Wide strips, but enough tasks for all threads. */
    int64_t panels = te_ceil_div(job.n, tile_columns);
    int64_t share = panels * blocks / ((int64_t)job.threads * TASKS_PER_THREAD);
    int64_t strip = te_cpu_min(STRIP_COLUMNS / tile_columns, panels);
    if (job.threads > 1) strip = te_cpu_min(strip, share > 0 ? share : 1);
    job.strip = strip * tile_columns;
    return job;
}

static size_t packed_a_bytes(const gemm_job *job)
{
    return (size_t)te_round_up(job->shared_rows * job->k * (int64_t)sizeof(float), ALIGNMENT);
}

/* Of one thread; proportional to the strip, a multiple of ALIGNMENT. */
static size_t buffer_bytes(const gemm_job *job, int64_t strip)
{
    return (size_t)((BLOCK_ROWS + te_round_up(job->strip_depth, 4)) * strip) * sizeof(float);
}

static size_t plain_workspace(const te_gemm_args *args)
{
    gemm_job job = describe(args);
    if (job.m == 0 || job.n == 0) return 0;
    return ALIGNMENT + packed_a_bytes(&job) + (size_t)job.threads * buffer_bytes(&job, job.strip);
}

/* Lays the buffers out in the workspace, with fewer threads or narrower strips where the number of
 * threads was another one at the query. */
static te_status place(gemm_job *job)
{
    const te_gemm_args *args = job->args;
    size_t fixed = ALIGNMENT + packed_a_bytes(job);
    size_t panel = buffer_bytes(job, job->kernels->tile_columns);
    size_t given = args->workspace == NULL ? 0 : args->workspace_size;
    TE_FAIL_IF(given < fixed + panel, TE_ERROR_INVALID,
               "gemm: workspace of %zu bytes, needs at least %zu", given, fixed + panel);
    size_t panels = (given - fixed) / panel, strip = (size_t)job->strip / job->b.width;
    if (strip > panels) strip = panels;
    if ((size_t)job->threads > panels / strip) job->threads = (int)(panels / strip);
    job->strip = (int64_t)strip * job->b.width;
    uintptr_t start = ((uintptr_t)args->workspace + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    unsigned char *base = (unsigned char *)args->workspace + (start - (uintptr_t)args->workspace);
    job->packed_a = (float *)(void *)base;
    job->buffers = (float *)(void *)(base + packed_a_bytes(job));
    return TE_OK;
}

/* ---- epilogue ----------------------------------------------------------------------------- */

/* Sums of row `row`, columns [column, column + n), to d. Returns the new max|value| of FP8 output.
 */
static int32_t finish_row(const gemm_job *job, float *values, const float *bias, int64_t row,
                          int64_t column, int64_t n, int32_t amax)
{
    const te_cpu_kernels *kernels = job->kernels;
    unsigned char *d = te_cpu_at(&job->d, row, column);
    float old[STRIP_COLUMNS];
    if (job->alpha != 1.0F) kernels->multiply(values, job->alpha, n);
    if (bias != NULL) kernels->add(values, bias, n);
    if (job->aux.data != NULL) {
        kernels->from_f32[job->aux.dtype](values, te_cpu_at(&job->aux, row, column), n);
    }
    if (job->args->epilogue == TE_EPILOGUE_GELU) kernels->gelu(values, n);
    if (job->args->flags & TE_GEMM_ACCUMULATE) {
        kernels->to_f32[job->d.dtype](d, old, n);
        kernels->add(values, old, n);
    }
    if (te_dtype_is_fp8(job->d.dtype)) {
        te_cpu_quantize_row quantize =
            kernels->quantize[TE_DTYPE_F32][te_cpu_target(job->d.dtype)][0];
        quantize(values, d, n, job->d_scale, &amax, NULL);
    } else {
        kernels->from_f32[job->d.dtype](values, d, n);
    }
    return amax;
}

/* ---- product ------------------------------------------------------------------------------ */

/* The thread's buffer at work: one strip of columns of b and one block of sums. */
typedef struct gemm_strip {
    int64_t column, columns; /* of d */
    int64_t panels;          /* of b; the last one filled up with zeros */
    float *sums;             /* [BLOCK_ROWS][job->strip] */
    float *packed;
} gemm_strip;

/* Packs slice k of the strip; returns where it is. */
static float *pack_slice(const gemm_job *job, const gemm_strip *strip, int64_t k)
{
    float *slice = strip->packed + (job->strip_depth < job->k ? 0 : k * job->strip);
    te_cpu_operand part = te_cpu_operand_slice(&job->b, k, te_cpu_min(DEPTH, job->k - k));
    te_cpu_pack(&part, strip->column, strip->panels, slice);
    return slice;
}

/* Slice k of the shared rows of a. */
static float *packed_slice(const gemm_job *job, int64_t k)
{
    return job->packed_a + k * job->shared_stride;
}

/* Sums of a block of `rows` rows, from packed row `first` on. fresh: the strip is not packed yet.
 */
static void multiply_block(const gemm_job *job, const gemm_strip *strip, int64_t first,
                           int64_t rows, int fresh)
{
    int64_t tile_rows = job->a.width, tile_columns = job->b.width;
    if (job->k == 0) memset(strip->sums, 0, (size_t)(rows * job->strip) * sizeof(float));
    for (int64_t k = 0; k < job->k; k += DEPTH) {
        int64_t depth = te_cpu_min(DEPTH, job->k - k);
        const float *b = fresh ? pack_slice(job, strip, k) : strip->packed + k * job->strip;
        for (int64_t c = 0; c < strip->panels * tile_columns; c += tile_columns) {
            for (int64_t r = 0; r < rows; r += tile_rows) {
                const float *a = packed_slice(job, k) + (first + r) * depth;
                job->kernels->gemm_tile(depth, a, b + c * depth, strip->sums + r * job->strip + c,
                                        job->strip, k > 0);
            }
        }
    }
}

/* One strip of columns times the packed rows [first, last), whose row 0 is row `base` of d. */
static int32_t run_task(const gemm_job *job, int64_t base, int64_t first, int64_t last,
                        int64_t column)
{
    float bias_values[STRIP_COLUMNS];
    const float *bias = NULL;
    int32_t amax = 0;
    gemm_strip strip = {.column = column, .columns = te_cpu_min(job->strip, job->n - column)};
    strip.panels = te_ceil_div(strip.columns, job->b.width);
    strip.sums =
        job->buffers + (size_t)te_cpu_thread() * buffer_bytes(job, job->strip) / sizeof(float);
    strip.packed = strip.sums + BLOCK_ROWS * job->strip;
    if (job->args->bias.data != NULL) {
        te_cpu_matrix vector = te_cpu_matrix_of(&job->args->bias);
        job->kernels->to_f32[vector.dtype](te_cpu_at(&vector, 0, column), bias_values,
                                           strip.columns);
        bias = bias_values;
    }
    for (int64_t row = first; row < last && !te_cpu_stopped(job->interruptible);
         row += BLOCK_ROWS) {
        int64_t rows = te_cpu_min(BLOCK_ROWS, last - row);
        multiply_block(job, &strip, row, rows, row == first);
        for (int64_t r = 0; r < rows; r++) {
            amax = finish_row(job, strip.sums + r * job->strip, bias, base + row + r, column,
                              strip.columns, amax);
        }
    }
    return amax;
}

/* Sums over k of `rows` packed rows from `first` on to bias_grad, which begins at row `base` of a.
 */
static void sum_rows(const gemm_job *job, int64_t base, int64_t first, int64_t rows)
{
    te_cpu_matrix output = te_cpu_matrix_of(&job->args->bias_grad);
    int width = job->a.width;
    for (int64_t r = first; r < first + rows; r += width) {
        float total[TE_CPU_MAX_TILE_ROWS] = {0};
        for (int64_t k = 0; k < job->k; k += DEPTH) {
            float part[TE_CPU_MAX_TILE_ROWS] = {0};
            int64_t depth = te_cpu_min(DEPTH, job->k - k);
            const float *panel = packed_slice(job, k) + r * depth;
            for (int64_t p = 0; p < depth * width; p += width) {
                for (int i = 0; i < width; i++) part[i] += panel[p + i];
            }
            for (int i = 0; i < width; i++) total[i] += part[i];
        }
        int64_t n = te_cpu_min(width, first + rows - r);
        job->kernels->from_f32[output.dtype](total, te_cpu_at(&output, 0, base + r), n);
    }
}

/* Packs `rows` rows of a from `base` on, and sums them where bias_grad is requested. */
static void pack_rows(const gemm_job *job, int64_t base, int64_t rows)
{
    int64_t group = 8 * (int64_t)job->a.width, groups = te_ceil_div(rows, group);
#pragma omp parallel for num_threads(job->threads) schedule(dynamic, 1)
    for (int64_t g = 0; g < groups; g++) {
        int64_t first = g * group, count = te_cpu_min(group, rows - first);
        for (int64_t k = 0; k < job->k; k += DEPTH) {
            te_cpu_operand slice = te_cpu_operand_slice(&job->a, k, te_cpu_min(DEPTH, job->k - k));
            te_cpu_pack(&slice, base + first, te_ceil_div(count, job->a.width),
                        packed_slice(job, k) + first * slice.depth);
        }
        if (job->args->bias_grad.data != NULL) sum_rows(job, base, first, count);
    }
}

/* The rows [base, base + rows) of d. Returns the bits of max|value| of FP8 output. */
static int32_t run_rows(const gemm_job *job, int64_t base, int64_t rows)
{
    int64_t strips = te_ceil_div(job->n, job->strip), blocks = te_ceil_div(rows, BLOCK_ROWS);
    /* Few strips: the rows are divided as well, and a strip is packed once per range of rows. */
    int64_t ranges = te_ceil_div((int64_t)job->threads * TASKS_PER_THREAD, strips);
    if (job->threads == 1) ranges = 1;
    int64_t range = te_ceil_div(blocks, te_cpu_min(ranges, blocks)) * BLOCK_ROWS;
    ranges = te_ceil_div(rows, range);
    int32_t amax = 0;
    if (job->k > 0) pack_rows(job, base, rows);
#pragma omp parallel for num_threads(job->threads) schedule(dynamic, 1) reduction(max : amax)
    for (int64_t task = 0; task < strips * ranges; task++) {
        int64_t first = task % ranges * range;
        int32_t bits =
            run_task(job, base, first, te_cpu_min(first + range, rows), task / ranges * job->strip);
        amax = bits > amax ? bits : amax;
    }
    return amax;
}

/* `alpha`: besides the scales of the operands. */
static te_status multiply(const te_gemm_args *args, float alpha)
{
    const te_gemm_operand a = te_gemm_a(args), b = te_gemm_b(args);
    gemm_job job = describe(args);
    te_interruptible interruptible;
    int32_t amax = 0;
    if (job.m == 0 || job.n == 0) return TE_OK;
    TE_TRY(place(&job));
    job.alpha = alpha;
    if (te_scales_own(a.mode)) {
        job.a.scales = te_inverse_scales_of(a.mode, a.data, a.scales);
        job.b.scales = te_inverse_scales_of(b.mode, b.data, b.scales);
    } else if (a.scales != NULL) {
        job.alpha = *te_inverse_scale(a.scales) * *te_inverse_scale(b.scales);
    }
    job.d_scale = args->d_scale != NULL ? *args->d_scale : 1.0F;
    if (args->aux.data != NULL) job.aux = te_cpu_matrix_of(&args->aux);
    if (job.k == 0) {
        te_cpu_matrix sums = te_cpu_matrix_of(&args->bias_grad);
        if (sums.data != NULL) memset(sums.data, 0, (size_t)job.m * sums.bytes);
        if (args->flags & TE_GEMM_ACCUMULATE) return TE_OK;
    } else {
        te_count_gemm(TE_DEVICE_CPU, a.data->dtype, b.data->dtype);
        te_count_scaling(TE_DEVICE_CPU, a.mode, b.mode);
    }
    te_interruptible_begin(&interruptible);
    job.interruptible = &interruptible;
    for (int64_t row = 0; row < job.m && !te_interruptible_stopped(&interruptible);
         row += job.shared_rows) {
        int64_t rows = te_cpu_min(job.shared_rows, job.m - row);
        job.shared_stride = te_round_up(rows, job.a.width);
        int32_t bits = run_rows(&job, row, rows);
        amax = bits > amax ? bits : amax;
    }
    TE_FAIL_IF(te_interruptible_stopped(&interruptible), TE_ERROR_INTERRUPTED,
               "gemm: interrupted: d is not complete");
    if (args->d_amax != NULL && te_dtype_is_fp8(job.d.dtype)) {
        te_cpu_record_amax(args->d_amax, te_float_of(amax));
    }
    return TE_OK;
}

/* ---- operands that are multiplied out ------------------------------------------------------ */

/* The operand [rows, columns] in fp32, at `data`; one in high precision as it is. Returns the bytes
 * that it takes. */
static size_t take_wide(const te_operand *operand, int64_t rows, int64_t columns, void *data,
                        te_operand *wide)
{
    if (operand->mode == TE_SCALING_NONE) {
        *wide = *operand;
        return 0;
    }
    *wide = (te_operand){.mode = TE_SCALING_NONE};
    wide->wide = te_matrix(data, TE_DTYPE_F32, (te_device){TE_DEVICE_CPU, 0}, rows, columns);
    return te_dtype_size(TE_DTYPE_F32, rows * columns);
}

/* A call on operands in fp32 in front of the workspace; returns the bytes that they take. */
static size_t wide_args(const te_gemm_args *args, te_gemm_args *wide)
{
    const te_gemm_operand a = te_gemm_a(args), b = te_gemm_b(args);
    const int64_t m = args->d.shape[0], n = args->d.shape[1], k = te_gemm_depth(&a, &b);
    char *front = args->workspace;
    size_t bytes;
    *wide = *args;
    bytes = take_wide(&args->a, args->a_transposed ? k : m, args->a_transposed ? m : k, front,
                      &wide->a);
    bytes += take_wide(&args->b, args->b_transposed ? n : k, args->b_transposed ? k : n,
                       front == NULL ? NULL : front + bytes, &wide->b);
    wide->workspace = front == NULL ? NULL : front + bytes;
    wide->workspace_size = args->workspace_size - bytes;
    return bytes;
}

size_t te_cpu_gemm_workspace(const te_gemm_args *args)
{
    const te_gemm_operand a = te_gemm_a(args), b = te_gemm_b(args);
    te_gemm_args wide;
    size_t bytes;
    if (te_gemm_way_of(&a, &b) == TE_GEMM_AS_IT_IS) return plain_workspace(args);
    bytes = wide_args(args, &wide);
    return bytes + plain_workspace(&wide);
}

/* Writes the numbers that the form stands for. */
static te_status widen(const te_operand *operand, const te_gemm_operand *form,
                       const te_tensor *output)
{
    te_dequantize_args args;
    if (form->mode == TE_SCALING_NONE) return TE_OK;
    args = te_dequantize_of(operand, form, output);
    return te_cpu_dequantize(&args);
}

te_status te_cpu_gemm(const te_gemm_args *args)
{
    const te_gemm_operand a = te_gemm_a(args), b = te_gemm_b(args);
    const te_gemm_way way = te_gemm_way_of(&a, &b);
    te_gemm_args wide;
    float alpha = 1.0F;
    if (way == TE_GEMM_AS_IT_IS) {
        if ((args->flags & TE_GEMM_MULTIPLIED_OUT) != 0) te_count_mixed();
        return multiply(args, 1.0F);
    }
    if (args->d.shape[0] == 0 || args->d.shape[1] == 0) return TE_OK;
    TE_TRY(te_check_workspace(TE_OP_GEMM, args->workspace, args->workspace_size,
                              wide_args(args, &wide)));
    if (way == TE_GEMM_MIXED) {
        TE_TRY(widen(&args->a, &a, &wide.a.wide));
        TE_TRY(widen(&args->b, &b, &wide.b.wide));
        te_count_mixed();
        return multiply(&wide, 1.0F);
    }
    te_cpu_micro_dequantize(&args->a, a.data == &args->a.row, 1, &wide.a.wide);
    te_cpu_micro_dequantize(&args->b, b.data == &args->b.row, 1, &wide.b.wide);
    if (a.mode == TE_SCALING_NVFP4) {
        alpha = te_nvfp4_decode(*(const float *)a.amax->data, te_nvfp4_range(a.scales_to_256)) *
                te_nvfp4_decode(*(const float *)b.amax->data, te_nvfp4_range(b.scales_to_256));
    }
    te_count_emulated(a.mode);
    return multiply(&wide, alpha);
}
