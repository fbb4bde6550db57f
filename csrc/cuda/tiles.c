/* SPDX-License-Identifier: Apache-2.0 */
#include "cuda/tiles.h"

#include <string.h>

#include "core/check.h"
#include "core/scales.h"
#include "core/status.h"
#include "cuda/microscale.h"

#define TARGET_BLOCKS                                                                              \
    4096             /* beyond, a block takes several tiles: fastest for quantize at 8192 x 4096 */
#define MAX_DEPTH 16 /* tiles of one block, unless the grid would not hold them */
#define FILL_THREADS 256
#define CLEAR_BLOCKS 64

_Static_assert(TE_CAST_PARTIALS == TE_AMAX_PARTIALS, "two names of one size");

/* How the tiles of a call are distributed. */
typedef struct tiling {
    int64_t columns; /* column tiles */
    int64_t groups;  /* row groups */
    int64_t depth;   /* row tiles of a group */
} tiling;

te_cuda_way te_cuda_way_of(const te_operand *result)
{
    if (!te_tensor_requested(&result->row) && !te_tensor_requested(&result->column)) {
        return TE_CUDA_BY_SCALE;
    }
    if (result->mode == TE_SCALING_MXFP8) return TE_CUDA_MXFP8;
    if (result->mode == TE_SCALING_NVFP4) return TE_CUDA_NVFP4;
    return te_scales_own(result->mode) ? TE_CUDA_BY_TILES : TE_CUDA_BY_SCALE;
}

int64_t te_cuda_tile_side(te_cuda_way way)
{
    return way == TE_CUDA_BY_TILES ? TE_SCALED_SIDE : TE_CUDA_TILE;
}

/* Rows and columns that tiles go over: the padding of either usage, and of scales of groups, is
 * written by the tiles that reach into it. Shapes alone decide: the workspace query reads no
 * pointers. */
static void plan_extent(const te_cuda_tile_request *request, te_cuda_way way, int64_t *rows,
                        int64_t *columns)
{
    const te_operand *to = &request->cast->result;
    const int64_t each = way == TE_CUDA_NVFP4 ? 2 : 1;            /* elements of a byte */
    int64_t *const along = way == TE_CUDA_MXFP8 ? columns : rows; /* a row of the column-wise */
    *rows = request->rows;
    *columns = request->outputs * request->columns;
    if (te_cuda_is_micro(way)) {
        *rows = te_round_up(*rows, TE_SCALES_ROWS);
        *columns = te_round_up(*columns, TE_SCALES_ROWS);
    }
    if (to->row.ndim == 2 && to->row.shape[1] * each > *columns) {
        *columns = to->row.shape[1] * each;
    }
    if (to->column.ndim == 2 && to->column.shape[1] * each > *along) {
        *along = to->column.shape[1] * each;
    }
    *columns -= (request->outputs - 1) * request->columns;
}

static tiling plan_tiles(const te_cuda_tile_request *request)
{
    const te_cuda_way way = te_cuda_way_of(&request->cast->result);
    const int64_t side = te_cuda_tile_side(way);
    int64_t rows, columns, row_tiles, minimum;
    tiling tiles = {.depth = 1};
    plan_extent(request, way, &rows, &columns);
    row_tiles = rows > 0 ? te_ceil_div(rows, side) : 1;
    tiles.columns = columns > 0 ? te_ceil_div(columns, side) : 1;
    if (way == TE_CUDA_BY_SCALE) {
        tiles.depth = row_tiles * tiles.columns / TARGET_BLOCKS;
        if (tiles.depth > MAX_DEPTH) tiles.depth = MAX_DEPTH;
        minimum = te_ceil_div(row_tiles, TE_CUDA_MAX_GRID_Y);
        if (tiles.depth < minimum) tiles.depth = minimum;
    }
    tiles.groups = te_ceil_div(row_tiles, tiles.depth);
    return tiles;
}

static size_t sums_bytes(const te_cuda_tile_request *request, const tiling *tiles)
{
    if (request->bias_grad == NULL || tiles->groups <= 1) return 0;
    return (size_t)(tiles->groups * request->outputs * request->columns) * sizeof(float);
}

size_t te_cuda_tile_workspace(const te_cuda_tile_request *request)
{
    const tiling tiles = plan_tiles(request);
    return sums_bytes(request, &tiles);
}

te_cast_target te_cuda_cast_target(const te_cuda_tile_request *request, te_dtype *dtype)
{
    const te_cast_request *cast = request->cast;
    const te_operand *to = &cast->result;
    const te_tensor *first =
        te_tensor_present(&to->row_scales) ? &to->row_scales : &to->column_scales;
    /* The second half begins where the first ends. */
    const int halves_aligned = request->outputs == 1 || request->columns % 8 == 0;
    const te_cuda_way way = te_cuda_way_of(to);
    te_cast_target target = {.amax = cast->amax};
    *dtype = TE_DTYPE_COUNT;
    if (to->mode == TE_SCALING_NONE) return target;
    if (te_scales_micro(to->mode)) { /* te_cuda_micro_params has all else */
        if (te_cuda_is_micro(way)) *dtype = te_operand_dtype(to);
        target.e5m2 = *dtype == TE_DTYPE_E5M2;
        return target;
    }
    if (!te_scales_own(to->mode)) {
        target.scale = cast->scale;
        target.partials = cast->partials;
        target.scales[0] = first->data;
        if (to->column_scales.data != first->data) target.scales[1] = to->column_scales.data;
    }
    target.epsilon = cast->amax_epsilon;
    target.power_2 = cast->power_2_scale;
    target.partials_aligned = (uintptr_t)cast->partials % 16 == 0;
    if (te_tensor_present(&to->row)) {
        target.row = te_cuda_view(&to->row);
        target.row_aligned = halves_aligned && te_cuda_aligned(&target.row, 1, 8);
    }
    if (te_tensor_present(&to->column)) {
        target.column = te_cuda_view(&to->column);
        target.column_aligned = te_cuda_aligned(&target.column, 1, 16);
    }
    target.fp8_max = te_dtype_max(te_operand_dtype(to));
    if (target.row.data != NULL || target.column.data != NULL || way == TE_CUDA_BY_TILES) {
        *dtype = te_operand_dtype(to);
    }
    target.e5m2 = *dtype == TE_DTYPE_E5M2;
    return target;
}

static te_scaled_form scaled_form(const te_tensor *data, const te_tensor *scales)
{
    te_scaled_form form = {NULL, 0, 0};
    if (!te_tensor_requested(data)) return form; /* scales of no elements are written */
    form.scales = scales->data;
    form.count = scales->shape[0];
    form.stride = scales->shape[1];
    return form;
}

static te_scaled_params plan_scaled(const te_cuda_tile_request *request, const tiling *tiles)
{
    static const int modes[TE_SCALING_COUNT] = {[TE_SCALING_ROW] = TE_SCALED_ROW,
                                                [TE_SCALING_BLOCK_1D] = TE_SCALED_1D,
                                                [TE_SCALING_BLOCK_2D] = TE_SCALED_2D};
    const te_operand *to = &request->cast->result;
    return (te_scaled_params){.row = scaled_form(&to->row, &to->row_scales),
                              .column = scaled_form(&to->column, &to->column_scales),
                              .across = (int)tiles->columns,
                              .top = te_dtype_max(request->dtype),
                              .mode = modes[to->mode]};
}

static te_status plan_sums(const te_cuda_tile_request *request, const tiling *tiles,
                           te_tile_params *tile, te_cuda_tile_job *job)
{
    const size_t needed = sums_bytes(request, tiles);
    const int64_t columns = request->outputs * request->columns;
    tile->bias_dtype = te_cuda_store(request->bias_grad->dtype);
    tile->bias_grad = request->bias_grad->data;
    if (needed == 0) return TE_OK;
    TE_TRY(te_check_workspace(request->op, request->workspace, request->workspace_size, needed));
    tile->sums = request->workspace;
    job->sums = (te_quantize_sums_params){.sums = tile->sums,
                                          .noop = request->noop,
                                          .groups = tiles->groups,
                                          .columns = columns,
                                          .split = columns,
                                          .first = tile->bias_grad,
                                          .first_dtype = tile->bias_dtype};
    job->adds = 1;
    return TE_OK;
}

te_status te_cuda_plan_tile_job(const te_cuda_tile_request *request, te_tile_params *tile,
                                te_cuda_tile_job *job)
{
    const tiling tiles = plan_tiles(request);
    const te_tensor *wide = &request->cast->result.wide;
    const te_cuda_way way = te_cuda_way_of(&request->cast->result);
    const uint32_t threads = way == TE_CUDA_BY_TILES ? TE_SCALED_THREADS : TE_CUDA_TILE_THREADS;
    *job = (te_cuda_tile_job){
        .dims = {(uint32_t)tiles.columns, (uint32_t)tiles.groups, 1, threads, 1, 1, 0}, .way = way};
    *tile = (te_tile_params){.rows = request->rows,
                             .columns = request->columns,
                             .to = te_cuda_cast_target(request, &job->dtype),
                             .noop = request->noop,
                             .amax_partials = request->cast->amax_partials,
                             .depth = (int)tiles.depth,
                             .from_bottom = request->cast->partials != NULL};
    if (way == TE_CUDA_BY_TILES) tile->scaled = plan_scaled(request, &tiles);
    if (te_cuda_is_micro(way))
        tile->micro = te_cuda_micro_params(request->cast, (int)tiles.columns);
    if (way != TE_CUDA_BY_SCALE) { /* a block has one tile */
        job->dims.grid_x = (uint32_t)(tiles.columns * tiles.groups);
        job->dims.grid_y = 1;
    }
    if (te_tensor_present(wide)) {
        const size_t bytes = te_dtype_bytes(wide->dtype);
        tile->output = te_cuda_view(wide);
        tile->output_dtype = te_cuda_store(wide->dtype);
        tile->output_aligned =
            te_cuda_aligned(&tile->output, bytes, 16) &&
            (request->outputs == 1 || (size_t)request->columns * bytes % 16 == 0);
    }
    if (tile->amax_partials != NULL) { /* raised by whatever block comes */
        job->clear.output =
            (te_view){(unsigned char *)tile->amax_partials, 1, TE_CAST_PARTIALS, TE_CAST_PARTIALS};
        job->clears = 1;
    }
    if (request->bias_grad != NULL && te_tensor_present(request->bias_grad) &&
        request->columns > 0) {
        return plan_sums(request, &tiles, tile, job);
    }
    return TE_OK;
}

te_cuda_call te_cuda_sums_call(const te_quantize_sums_params *sums)
{
    const uint32_t blocks = (uint32_t)te_ceil_div(sums->columns, TE_SUMS_COLUMNS);
    return (te_cuda_call){"quantize",
                          "te_quantize_sums",
                          {blocks, 1, 1, TE_SUMS_THREADS, 1, 1, 0},
                          sums,
                          sizeof *sums};
}

/* The measuring launch that scales of rows take before the cast, and what clears their maxima. The
 * cast begins with the rows that were read last. */
typedef struct measuring {
    te_quantize_clear_params clear;
    te_cuda_tile_params_copy first, second;
} measuring;

static void plan_measuring(const te_cuda_call *kernel, measuring *plan)
{
    const te_tile_params *tile = kernel->params; /* first in the parameters of all kernels */
    const te_scaled_form *const forms[] = {&tile->scaled.row, &tile->scaled.column};
    plan->clear = (te_quantize_clear_params){.noop = tile->noop};
    for (int i = 0; i < 2; i++) {
        plan->clear.scales[i] = forms[i]->scales;
        if (forms[i]->scales != NULL) plan->clear.count[i] = forms[i]->count * forms[i]->stride;
    }
    memcpy(&plan->first, kernel->params, kernel->params_size);
    memcpy(&plan->second, kernel->params, kernel->params_size);
    plan->first.tile.scaled.measures = 1;
    plan->second.tile.from_bottom = !tile->from_bottom;
}

te_status te_cuda_run_tile_job(te_cuda_state *cuda, const te_cuda_tile_job *job,
                               const te_cuda_call *kernel, const te_cuda_call *before, void *stream)
{
    te_fill_params clear = job->clear;
    te_cuda_call calls[6];
    measuring rows;
    int count = 0;
    if (before != NULL) calls[count++] = *before;
    if (job->clears) {
        uint32_t blocks;
        clear.walk = te_cuda_plan_walk(1, TE_CAST_PARTIALS, 4, TE_AMAX_PARTIALS, &blocks);
        clear.output_aligned = te_cuda_aligned(&clear.output, sizeof(float), 16);
        calls[count++] = (te_cuda_call){"elementwise",
                                        "te_fill_4",
                                        {blocks, 1, 1, FILL_THREADS, 1, 1, 0},
                                        &clear,
                                        sizeof clear};
    }
    calls[count] = *kernel;
    calls[count].dims = job->dims;
    if (job->way == TE_CUDA_BY_TILES &&
        ((const te_tile_params *)kernel->params)->scaled.mode == TE_SCALED_ROW) {
        plan_measuring(kernel, &rows);
        calls[count + 2] = calls[count + 1] = calls[count];
        calls[count] = (te_cuda_call){"quantize",
                                      "te_quantize_clear",
                                      {CLEAR_BLOCKS, 1, 1, TE_CLEAR_THREADS, 1, 1, 0},
                                      &rows.clear,
                                      sizeof rows.clear};
        calls[count + 1].params = &rows.first;
        calls[count + 2].params = &rows.second;
        count += 2;
    }
    count++;
    if (job->adds) calls[count++] = te_cuda_sums_call(&job->sums);
    return te_cuda_run(cuda, calls, count, stream);
}
