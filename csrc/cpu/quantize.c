/* SPDX-License-Identifier: Apache-2.0
 *
 * quantize.c - FP8 casts and their inverse, and max|x|.
 *
 * One pass over the input in tiles of 64 rows x 256 columns: a tile's FP8 codes stay in the
 * first-level cache, from where they go out by rows, by columns, or both. Sums and maxima are per
 * tile and joined in the order of the tiles, so that no result depends on the number of threads.
 */
#include <string.h>

#include "core/scaling_math.h"
#include "core/status.h"
#include "cpu/fp8.h"
#include "cpu/isa.h"
#include "cpu/matrix.h"
#include "cpu/ops.h"
#include "cpu/transpose.h"

enum { TILE_ROWS = TE_CPU_BLOCK, TILE_COLUMNS = 4 * TE_CPU_BLOCK, WIDE_COLUMNS = 4096 };

/* One call, as its tiles see it. */
typedef struct quantize_job {
    const te_cpu_kernels *kernels;
    te_cpu_matrix input, rowwise, columnwise; /* the outputs with data NULL: not wanted */
    te_cpu_quantize_row quantize;
    int64_t tile_columns; /* TILE_COLUMNS, or WIDE_COLUMNS where nothing is transposed */
    float scale;
    float *sums; /* [row tiles, columns], or NULL */
} quantize_job;

static int64_t row_tiles(int64_t rows)
{
    return te_ceil_div(rows, TILE_ROWS);
}

static int wants_bias_grad(const te_quantize_args *args)
{
    return args->bias_grad.data != NULL || args->bias_grad.ndim > 0;
}

te_status te_cpu_quantize_workspace(void *self, te_context *context, const void *opaque,
                                    size_t *bytes)
{
    const te_quantize_args *args = opaque;
    te_cpu_matrix input = te_cpu_matrix_of(&args->input);
    (void)self, (void)context;
    *bytes = 0;
    if (wants_bias_grad(args)) {
        *bytes = (size_t)(row_tiles(input.rows) * input.columns) * sizeof(float);
    }
    return TE_OK;
}

/* The column-wise output of the tile at (row, column), from its codes [rows, columns]. */
static void write_columnwise(const te_cpu_matrix *output, int64_t row, int64_t column,
                             const te_cpu_matrix *codes)
{
    uint8_t block[TE_CPU_BLOCK * TE_CPU_BLOCK];
    for (int64_t first = 0; first < codes->columns; first += TE_CPU_BLOCK) {
        int64_t width = te_cpu_least(TE_CPU_BLOCK, codes->columns - first);
        te_cpu_transpose_bytes(te_cpu_at(codes, 0, first), codes->row_stride, block, TE_CPU_BLOCK,
                               codes->rows, width);
        for (int64_t c = 0; c < width; c++) {
            memcpy(te_cpu_at(output, column + first + c, row), block + c * TE_CPU_BLOCK,
                   (size_t)codes->rows);
        }
    }
}

/* Does one tile; returns the bits of its max|x|. */
static int32_t quantize_tile(const quantize_job *job, int64_t row, int64_t column)
{
    uint8_t local[TILE_ROWS * TILE_COLUMNS]; /* where the codes go that no row-wise output takes */
    te_cpu_matrix codes = {.rows = te_cpu_least(TILE_ROWS, job->input.rows - row),
                           .columns = te_cpu_least(job->tile_columns, job->input.columns - column),
                           .column_stride = 1,
                           .bytes = 1};
    float *sums = NULL;
    int32_t amax = 0;
    if (job->rowwise.data != NULL) {
        codes.data = te_cpu_at(&job->rowwise, row, column);
        codes.row_stride = job->rowwise.row_stride;
    } else if (job->columnwise.data != NULL) {
        codes.data = local;
        codes.row_stride = TILE_COLUMNS;
    }
    if (job->sums != NULL) {
        sums = job->sums + row / TILE_ROWS * job->input.columns + column;
        memset(sums, 0, (size_t)codes.columns * sizeof *sums);
    }
    for (int64_t r = 0; r < codes.rows; r++) {
        uint8_t *target = codes.data == NULL ? NULL : te_cpu_at(&codes, r, 0);
        job->quantize(te_cpu_at(&job->input, row + r, column), target, codes.columns, job->scale,
                      &amax, sums);
    }
    if (job->columnwise.data != NULL) write_columnwise(&job->columnwise, row, column, &codes);
    return amax;
}

/* Zeroes the columns from `first` on. */
static void zero_columns(const te_cpu_matrix *output, int64_t first)
{
    if (output->data == NULL || output->columns <= first) return;
    for (int64_t r = 0; r < output->rows; r++) {
        memset(te_cpu_at(output, r, first), 0, (size_t)(output->columns - first));
    }
}

/* bias_grad = column sums, in the order of the row tiles. */
static void finish_bias_grad(const quantize_job *job, const te_tensor *bias_grad)
{
    float totals[TILE_COLUMNS];
    te_cpu_matrix output = te_cpu_matrix_of(bias_grad);
    int64_t columns = job->input.columns, tiles = row_tiles(job->input.rows);
    for (int64_t first = 0; first < columns; first += TILE_COLUMNS) {
        int64_t width = te_cpu_least(TILE_COLUMNS, columns - first);
        memset(totals, 0, sizeof totals);
        for (int64_t tile = 0; tile < tiles; tile++) {
            job->kernels->add(totals, job->sums + tile * columns + first, width);
        }
        job->kernels->from_f32[output.dtype](totals, te_cpu_at(&output, 0, first), width);
    }
}

static te_dtype output_dtype(const te_quantized *output)
{
    if (output->mode == TE_SCALING_NONE) return TE_DTYPE_F32;
    if (output->rowwise.data != NULL) return output->rowwise.dtype;
    if (output->columnwise.data != NULL) return output->columnwise.dtype;
    return te_dtype_is_fp8(output->rowwise.dtype) ? output->rowwise.dtype
                                                  : output->columnwise.dtype;
}

static float current_scale(const te_quantize_args *args, te_dtype dtype)
{
    float amax = 0.0F;
    if (args->partials == NULL) return 1.0F;
    for (int i = 0; i < TE_AMAX_PARTIALS; i++) {
        amax = te_max_ignoring_nan(amax, args->partials[i]);
    }
    return te_current_scale(amax, te_dtype_max(dtype), args->amax_epsilon, args->power_2_scale);
}

te_status te_cpu_quantize(void *self, te_context *context, const void *opaque, void *stream)
{
    const te_quantize_args *args = opaque;
    const te_quantized *output = &args->output;
    te_dtype dtype = output_dtype(output);
    quantize_job job = {
        .kernels = te_cpu_kernels_get(), .input = te_cpu_matrix_of(&args->input), .scale = 1.0F};
    int with_sums = args->bias_grad.data != NULL;
    size_t needed = 0;
    (void)stream;
    if (with_sums) TE_TRY(te_cpu_quantize_workspace(self, context, args, &needed));
    if (args->workspace_size < needed || (needed > 0 && args->workspace == NULL)) {
        return TE_FAIL(TE_ERROR_INVALID, "quantize: workspace of %zu bytes, needs %zu",
                       args->workspace == NULL ? 0 : args->workspace_size, needed);
    }
    if (args->noop != NULL && *args->noop != 0.0F) return TE_OK;
    if (output->mode != TE_SCALING_NONE) {
        job.scale = output->scale != NULL ? *output->scale : current_scale(args, dtype);
        if (output->rowwise.data != NULL) job.rowwise = te_cpu_matrix_of(&output->rowwise);
        if (output->columnwise.data != NULL) job.columnwise = te_cpu_matrix_of(&output->columnwise);
        if (output->scale_pair != NULL) {
            output->scale_pair[TE_PAIR_INVERSE] = 1.0F / job.scale;
            output->scale_pair[TE_PAIR_SCALE] = job.scale;
        }
    }
    int target = job.rowwise.data != NULL || job.columnwise.data != NULL ? te_cpu_target(dtype) : 0;
    job.quantize = job.kernels->quantize[job.input.dtype][target][with_sums];
    if (with_sums) job.sums = args->workspace;

    job.tile_columns = job.columnwise.data != NULL ? TILE_COLUMNS : WIDE_COLUMNS;
    /* Downwards first: the columns of a tile lie far apart in the column-wise output, and their
     * pages are used again by the next tile. */
    int64_t tiles_down = row_tiles(job.input.rows);
    int64_t tiles = tiles_down * te_ceil_div(job.input.columns, job.tile_columns);
    int threads = te_cpu_threads(job.input.rows * job.input.columns);
    int32_t amax = 0;
#pragma omp parallel for num_threads(threads) reduction(max : amax)
    for (int64_t tile = 0; tile < tiles; tile++) {
        int32_t bits = quantize_tile(&job, tile % tiles_down * TILE_ROWS,
                                     tile / tiles_down * job.tile_columns);
        amax = bits > amax ? bits : amax;
    }
    zero_columns(&job.rowwise, job.input.columns);
    zero_columns(&job.columnwise, job.input.rows);
    if (with_sums) finish_bias_grad(&job, &args->bias_grad);
    if (output->amax != NULL) {
        *output->amax = te_max_ignoring_nan(*output->amax, te_float_of(amax));
    }
    (void)threads;
    return TE_OK;
}

te_status te_cpu_amax(void *self, te_context *context, const void *opaque, void *stream)
{
    enum { ROWS = 16, COLUMNS = 2048 };
    const te_amax_args *args = opaque;
    const te_cpu_matrix input = te_cpu_matrix_of(&args->input);
    te_cpu_quantize_row measure = te_cpu_kernels_get()->quantize[input.dtype][0][0];
    int64_t tiles_across = te_ceil_div(input.columns, COLUMNS);
    int64_t tiles = te_ceil_div(input.rows, ROWS) * tiles_across;
    int threads = te_cpu_threads(input.rows * input.columns);
    (void)self, (void)context, (void)stream, (void)threads;
#pragma omp parallel for num_threads(threads)
    for (int64_t partial = 0; partial < TE_AMAX_PARTIALS; partial++) {
        int32_t amax = 0;
        for (int64_t tile = partial; tile < tiles; tile += TE_AMAX_PARTIALS) {
            int64_t row = tile / tiles_across * ROWS, column = tile % tiles_across * COLUMNS;
            int64_t width = te_cpu_least(COLUMNS, input.columns - column);
            int64_t end = te_cpu_least(row + ROWS, input.rows);
            for (int64_t r = row; r < end; r++) {
                measure(te_cpu_at(&input, r, column), NULL, width, 1.0F, &amax, NULL);
            }
        }
        args->partials[partial] = te_float_of(amax);
    }
    return TE_OK;
}

/* Codes to numbers of the output's dtype, a piece that fits on the stack at a time. */
static void dequantize_row(const te_cpu_kernels *kernels, const te_cpu_matrix *output, int64_t row,
                           int64_t column, const uint8_t *codes, int64_t n, te_dtype dtype,
                           float scale_inv)
{
    float values[TILE_COLUMNS];
    for (int64_t first = 0; first < n; first += TILE_COLUMNS) {
        int64_t width = te_cpu_least(TILE_COLUMNS, n - first);
        kernels->to_f32[dtype](codes + first, values, width);
        kernels->multiply(values, scale_inv, width);
        kernels->from_f32[output->dtype](values, te_cpu_at(output, row, column + first), width);
    }
}

te_status te_cpu_dequantize(void *self, te_context *context, const void *opaque, void *stream)
{
    const te_dequantize_args *args = opaque;
    const te_cpu_kernels *kernels = te_cpu_kernels_get();
    int by_rows = args->input.rowwise.data != NULL;
    const te_cpu_matrix input =
        te_cpu_matrix_of(by_rows ? &args->input.rowwise : &args->input.columnwise);
    const te_cpu_matrix output = te_cpu_matrix_of(&args->output);
    (void)self, (void)context, (void)stream;
    if (output.rows == 0 || output.columns == 0) return TE_OK;
    float scale_inv = args->input.scale_pair[TE_PAIR_INVERSE];
    int64_t tiles_across = by_rows ? 1 : te_ceil_div(output.columns, TE_CPU_BLOCK);
    int64_t tiles = te_ceil_div(output.rows, TE_CPU_BLOCK) * tiles_across;
    int threads = te_cpu_threads(output.rows * output.columns);
    (void)threads;
#pragma omp parallel for num_threads(threads)
    for (int64_t tile = 0; tile < tiles; tile++) {
        uint8_t block[TE_CPU_BLOCK * TE_CPU_BLOCK];
        int64_t row = tile / tiles_across * TE_CPU_BLOCK;
        int64_t column = tile % tiles_across * TE_CPU_BLOCK;
        int64_t rows = te_cpu_least(TE_CPU_BLOCK, output.rows - row);
        int64_t columns = output.columns;
        if (!by_rows) {
            columns = te_cpu_least(TE_CPU_BLOCK, output.columns - column);
            te_cpu_transpose_bytes(te_cpu_at(&input, column, row), input.row_stride, block,
                                   TE_CPU_BLOCK, columns, rows);
        }
        for (int64_t r = 0; r < rows; r++) {
            const uint8_t *codes =
                by_rows ? te_cpu_at(&input, row + r, 0) : block + r * TE_CPU_BLOCK;
            dequantize_row(kernels, &output, row + r, column, codes, columns, input.dtype,
                           scale_inv);
        }
    }
    return TE_OK;
}
