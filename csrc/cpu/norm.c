/* SPDX-License-Identifier: Apache-2.0
 *
 * norm.c - LayerNorm, RMSNorm and L2 norm, forward (cast to FP8 on the way out) and backward.
 *
 * Threads share the rows in strips of fixed height, small enough that a strip is still in the cache
 * when it is read a second time. Statistics are made of pieces of a row: sums in fp32 within a
 * piece, around the piece's own mean, and joined in double; so a large mean costs no digits and the
 * width of a row does not matter.
 */
#include <math.h>
#include <string.h>

#include "core/check.h"
#include "core/status.h"
#include "cpu/ops.h"
#include "cpu/tiles.h"

enum {
    PIECE = TE_CPU_MADE_COLUMNS, /* elements of a row at a time */
    SHORT_STRIP = 8,             /* rows, where nothing is transposed */
    GRADIENT_PIECE = 4096,       /* rows up to this width are read and converted once */
    GRADIENT_STRIP = 32          /* rows that share one row of column sums */
};

/* Rows wherever they lie, of up to three dims. */
typedef struct norm_rows {
    te_cpu_matrix row; /* without data: not there */
    te_cpu_tensor4 all;
    int64_t count, columns;
    int64_t inner, middle; /* lengths of the last two dims of rows */
} norm_rows;

static norm_rows rows_of(const te_tensor *tensor)
{
    const int32_t last = tensor->ndim - 1;
    norm_rows rows = {.row = te_cpu_matrix_of(tensor),
                      .all = te_cpu_tensor4_of(tensor),
                      .count = 1,
                      .inner = last > 0 ? tensor->shape[last - 1] : 1,
                      .middle = last > 1 ? tensor->shape[last - 2] : 1};
    rows.columns = rows.row.columns;
    rows.row.rows = 1;
    for (int32_t i = 0; i < last; i++) rows.count *= tensor->shape[i];
    return rows;
}

static te_cpu_matrix row_at(const norm_rows *rows, int64_t row)
{
    te_cpu_matrix at = rows->row;
    int64_t lines = row / rows->inner;
    at.data = te_cpu_at4(&rows->all, lines / rows->middle, lines % rows->middle, row % rows->inner);
    return at;
}

/* The factor of each column: gamma, 1 + gamma, or 1 where there is none. */
static void make_weight(const te_cpu_kernels *kernels, const te_tensor *gamma, uint32_t flags,
                        int64_t column, int64_t n, float *weight)
{
    float shift = (flags & TE_NORM_ZERO_CENTERED) != 0 ? 1.0F : 0.0F;
    const te_cpu_matrix source = te_cpu_matrix_of(gamma);
    if (gamma->data == NULL) {
        for (int64_t i = 0; i < n; i++) weight[i] = 1.0F;
        return;
    }
    kernels->to_f32[source.dtype](te_cpu_at(&source, 0, column), weight, n);
    for (int64_t i = 0; i < n; i++) weight[i] += shift;
}

/* ---- forward ------------------------------------------------------------------------------ */

/* Rows of one strip, and the columns of the tile being made. */
typedef struct norm_strip {
    const te_cpu_kernels *kernels;
    const norm_rows *input;
    int64_t first_row;
    float mean[TE_CPU_SCALED_SIDE], rsigma[TE_CPU_SCALED_SIDE]; /* rows of the highest tile */
    float weight[PIECE], bias[PIECE];
} norm_strip;

/* Mean (0 but for LayerNorm) and 1 / sigma of a row. */
static void measure_row(const te_norm_args *args, const norm_strip *strip, int64_t row, float *mean,
                        float *rsigma)
{
    const te_cpu_matrix input = row_at(strip->input, row);
    float buffer[PIECE], moments[2];
    int64_t columns = input.columns;
    int centred = args->kind == TE_NORM_LAYERNORM;
    double total = 0.0, squares = 0.0, seen = 0.0; /* squares: around total / seen if centred */
    for (int64_t first = 0; first < columns; first += PIECE) {
        int64_t width = te_cpu_min(PIECE, columns - first);
        const float *x = te_cpu_numbers(strip->kernels, &input, 0, first, width, buffer);
        double count = (double)width;
        float shift = centred ? strip->kernels->row_sum(x, width) / (float)width : 0.0F;
        strip->kernels->row_moments(x, shift, width, moments);
        if (!centred) {
            squares += (double)moments[1];
            continue;
        }
        /* Of this piece, then joined to those before it (Chan, Golub, LeVeque 1979). */
        double rest = (double)moments[0], sum = count * (double)shift + rest;
        double spread = (double)moments[1] - rest * rest / count;
        if (first > 0) {
            double apart = sum / count - total / seen;
            spread += apart * apart * (seen * count / (seen + count));
        }
        total += sum;
        squares += spread;
        seen += count;
    }
    if (args->kind != TE_NORM_L2) squares /= (double)columns;
    *mean = centred ? (float)(total / (double)columns) : 0.0F;
    *rsigma = (float)(1.0 / sqrt(squares + (double)args->eps));
}

/* Statistics of the strip's rows: made and written, or read. */
static void measure_strip(const te_norm_args *args, norm_strip *strip, int64_t rows)
{
    float *means = args->mean.data, *rsigmas = args->rsigma.data;
    int given = (args->flags & TE_NORM_STATISTICS_GIVEN) != 0;
    for (int64_t r = 0; r < rows; r++) {
        int64_t row = strip->first_row + r;
        if (given) {
            strip->mean[r] = args->kind == TE_NORM_LAYERNORM ? means[row] : 0.0F;
            strip->rsigma[r] = rsigmas[row];
            continue;
        }
        measure_row(args, strip, row, &strip->mean[r], &strip->rsigma[r]);
        if (args->kind == TE_NORM_LAYERNORM && means != NULL) means[row] = strip->mean[r];
        if (rsigmas != NULL) rsigmas[row] = strip->rsigma[r];
    }
}

static const void *normalized_row(const void *self, int64_t row, int64_t column, int64_t n,
                                  float *buffer)
{
    const norm_strip *strip = self;
    const te_cpu_matrix input = row_at(strip->input, row);
    const te_cpu_norm_row values = {.mean = strip->mean[row - strip->first_row],
                                    .rsigma = strip->rsigma[row - strip->first_row],
                                    .weight = strip->weight,
                                    .bias = strip->bias};
    strip->kernels->norm[input.dtype](te_cpu_at(&input, 0, column), &values, buffer, n);
    return buffer;
}

/* The rows from first_row on; bits of their max|x|. */
static int32_t do_strip(const te_norm_args *args, const te_cpu_tiles *tiles, const norm_rows *input,
                        int64_t first_row)
{
    norm_strip strip = {.kernels = tiles->kernels, .input = input, .first_row = first_row};
    const te_cpu_matrix beta = te_cpu_matrix_of(&args->beta);
    int32_t amax = 0;
    measure_strip(args, &strip, te_cpu_min(tiles->tile_rows, input->count - first_row));
    for (int64_t column = 0; column < input->columns; column += tiles->tile_columns) {
        int64_t width = te_cpu_min(tiles->tile_columns, input->columns - column);
        make_weight(tiles->kernels, &args->gamma, args->flags, column, width, strip.weight);
        if (beta.data != NULL) {
            tiles->kernels->to_f32[beta.dtype](te_cpu_at(&beta, 0, column), strip.bias, width);
        }
        int32_t bits = te_cpu_tile(tiles, &strip, first_row, column);
        amax = bits > amax ? bits : amax;
    }
    return amax;
}

static int32_t do_strips(const te_norm_args *args, const te_cpu_tiles *tiles,
                         const norm_rows *input)
{
    int threads = te_cpu_threads(input->count, input->columns);
    int32_t amax = 0;
    (void)threads;
#pragma omp parallel for num_threads(threads) reduction(max : amax)
    for (int64_t row = 0; row < input->count; row += tiles->tile_rows) {
        int32_t bits = do_strip(args, tiles, input, row);
        amax = bits > amax ? bits : amax;
    }
    return amax;
}

te_status te_cpu_norm(const te_norm_args *args)
{
    const norm_rows input = rows_of(&args->input);
    const te_cpu_request request = {.cast = &args->cast};
    te_cpu_tiles tiles = te_cpu_tiles_begin(&request, input.count, input.columns, TE_DTYPE_F32, 1);
    tiles.source = normalized_row;
    if (tiles.column.data == NULL && !te_cpu_tiles_hold(&tiles)) tiles.tile_rows = SHORT_STRIP;
    int32_t amax = 0;
    for (int pass = 0; pass < tiles.passes; pass++) {
        const te_cpu_tiles now = te_cpu_tiles_pass(&tiles, pass);
        amax = do_strips(args, &now, &input);
    }
    te_cpu_tiles_end(&tiles, &request, amax);
    return TE_OK;
}

/* ---- backward ----------------------------------------------------------------------------- */

typedef struct backward_job {
    const te_cpu_kernels *kernels;
    const te_norm_backward_args *args;
    te_cpu_matrix grad_output, grad_add, grad_residual; /* data NULL: none */
    norm_rows input, grad_input;                        /* data NULL: not requested */
    float *sums[2]; /* of gamma and beta: [strips, columns] each, or NULL */
} backward_job;

/* A piece of a row. */
typedef struct backward_piece {
    const float *dz, *x;
    float dz_buffer[GRADIENT_PIECE], x_buffer[GRADIENT_PIECE], weight[GRADIENT_PIECE];
    float discarded[2][GRADIENT_PIECE]; /* column sums that were not requested */
} backward_piece;

static int64_t strips_of(int64_t rows)
{
    return te_ceil_div(rows, GRADIENT_STRIP);
}

size_t te_cpu_norm_backward_workspace(const te_norm_backward_args *args)
{
    const norm_rows input = rows_of(&args->input);
    int sums = te_tensor_requested(&args->gamma_grad) + te_tensor_requested(&args->beta_grad);
    return (size_t)(sums * strips_of(input.count) * input.columns) * sizeof(float);
}

/* dz and x of columns [column, column + n). */
static void load_piece(const backward_job *job, int64_t row, int64_t column, int64_t n,
                       backward_piece *piece)
{
    const te_cpu_matrix input = row_at(&job->input, row);
    float add_buffer[GRADIENT_PIECE];
    piece->x = te_cpu_numbers(job->kernels, &input, 0, column, n, piece->x_buffer);
    if (job->grad_add.data == NULL) {
        piece->dz =
            te_cpu_numbers(job->kernels, &job->grad_output, row, column, n, piece->dz_buffer);
        return;
    }
    job->kernels->to_f32[job->grad_output.dtype](te_cpu_at(&job->grad_output, row, column),
                                                 piece->dz_buffer, n);
    job->kernels->add(piece->dz_buffer,
                      te_cpu_numbers(job->kernels, &job->grad_add, row, column, n, add_buffer), n);
    piece->dz = piece->dz_buffer;
}

/* Adds what the gradient of another reader of the input is, to values as rounded. */
static void join_residual(const backward_job *job, int64_t row, int64_t column, int64_t n,
                          float *values)
{
    const te_dtype dtype = job->grad_input.row.dtype;
    float rounded[GRADIENT_PIECE], residual[GRADIENT_PIECE];
    if (job->grad_residual.data == NULL) return;
    job->kernels->from_f32[dtype](values, rounded, n);
    job->kernels->to_f32[dtype](rounded, values, n);
    job->kernels->add(
        values, te_cpu_numbers(job->kernels, &job->grad_residual, row, column, n, residual), n);
}

/* Where column sums of gamma (0) or beta (1) are added up. */
static float *sums_at(const backward_job *job, int which, int64_t at, backward_piece *piece)
{
    return job->sums[which] != NULL ? job->sums[which] + at : piece->discarded[which];
}

/* One row whose column sums, where requested, are added up from `sums` on. piece->weight holds for
 * the whole row if it has one piece only. */
static void backward_row(const backward_job *job, int64_t row, int64_t sums, backward_piece *piece)
{
    const te_norm_backward_args *args = job->args;
    float result[GRADIENT_PIECE], part[2];
    const float *means = args->mean.data, *rsigmas = args->rsigma.data;
    te_cpu_norm_row values = {.mean = args->kind == TE_NORM_LAYERNORM ? means[row] : 0.0F,
                              .rsigma = rsigmas[row],
                              .weight = piece->weight};
    int64_t columns = job->input.columns;
    double plain = 0.0, scaled = 0.0, count = (double)columns;
    te_cpu_matrix grad_input;
    for (int64_t first = 0; first < columns; first += GRADIENT_PIECE) {
        int64_t width = te_cpu_min(GRADIENT_PIECE, columns - first);
        values.gamma_sums = sums_at(job, 0, sums + first, piece);
        values.beta_sums = sums_at(job, 1, sums + first, piece);
        load_piece(job, row, first, width, piece);
        if (columns > GRADIENT_PIECE) {
            make_weight(job->kernels, &args->gamma, args->flags, first, width, piece->weight);
        }
        job->kernels->norm_gradient_sums(&values, piece->dz, piece->x, width, part);
        plain += (double)part[0];
        scaled += (double)part[1];
    }
    if (job->grad_input.row.data == NULL) return;
    grad_input = row_at(&job->grad_input, row);
    values.plain = args->kind == TE_NORM_LAYERNORM ? (float)(plain / count) : 0.0F;
    values.scaled = (float)(args->kind == TE_NORM_L2 ? scaled : scaled / count);
    for (int64_t first = 0; first < columns; first += GRADIENT_PIECE) {
        int64_t width = te_cpu_min(GRADIENT_PIECE, columns - first);
        if (columns > GRADIENT_PIECE) {
            load_piece(job, row, first, width, piece);
            make_weight(job->kernels, &args->gamma, args->flags, first, width, piece->weight);
        }
        job->kernels->norm_gradient(&values, piece->dz, piece->x, result, width);
        join_residual(job, row, first, width, result);
        job->kernels->from_f32[grad_input.dtype](result, te_cpu_at(&grad_input, 0, first), width);
    }
}

static void backward_strip(const backward_job *job, int64_t strip)
{
    backward_piece piece;
    int64_t columns = job->input.columns, sums = strip * columns;
    int64_t end = te_cpu_min((strip + 1) * GRADIENT_STRIP, job->input.count);
    size_t bytes = (size_t)columns * sizeof(float);
    for (int i = 0; i < 2; i++) {
        memset(piece.discarded[i], 0, (size_t)te_cpu_min(columns, GRADIENT_PIECE) * sizeof(float));
        if (job->sums[i] != NULL) memset(job->sums[i] + sums, 0, bytes);
    }
    if (columns <= GRADIENT_PIECE) {
        make_weight(job->kernels, &job->args->gamma, job->args->flags, 0, columns, piece.weight);
    }
    for (int64_t row = strip * GRADIENT_STRIP; row < end; row++) {
        backward_row(job, row, sums, &piece);
    }
}

te_status te_cpu_norm_backward(const te_norm_backward_args *args)
{
    backward_job job = {.kernels = te_cpu_kernels_get(),
                        .args = args,
                        .grad_output = te_cpu_matrix_of(&args->grad_output),
                        .grad_add = te_cpu_matrix_of(&args->grad_add),
                        .input = rows_of(&args->input),
                        .grad_input = rows_of(&args->grad_input),
                        .grad_residual = te_cpu_matrix_of(&args->grad_residual)};
    int64_t strips = strips_of(job.input.count), sums = strips * job.input.columns;
    const te_tensor *grads[] = {&args->gamma_grad, &args->beta_grad};
    int requested = (grads[0]->data != NULL) + (grads[1]->data != NULL);
    size_t needed = (size_t)(requested * sums) * sizeof(float);
    TE_TRY(te_check_workspace(TE_OP_NORM_BACKWARD, args->workspace, args->workspace_size, needed));
    if (grads[0]->data != NULL) job.sums[0] = args->workspace;
    if (grads[1]->data != NULL) job.sums[1] = (float *)args->workspace + (requested - 1) * sums;
#pragma omp parallel for num_threads(te_cpu_threads(job.input.count, job.input.columns))
    for (int64_t strip = 0; strip < strips; strip++) backward_strip(&job, strip);
    for (int i = 0; i < 2; i++) {
        if (grads[i]->data == NULL) continue;
        te_cpu_join_sums(job.kernels, job.sums[i], strips, grads[i]);
    }
    return TE_OK;
}
