/* SPDX-License-Identifier: Apache-2.0 */
#include "cuda/microscale.h"

#include "core/status.h"
#include "cuda/launch.h"
#include "cuda/tiles.h"

/* Tiles of [rows, columns]; at least one. */
static te_cuda_dims tile_grid(int64_t rows, int64_t columns)
{
    const te_view all = {NULL, columns > 0 ? columns : 1, rows > 0 ? rows : 1, 0};
    return te_cuda_tile_dims(&all);
}

static te_micro_form form_of(const te_tensor *data, const te_tensor *scales, const te_tensor *amax,
                             const float *partials, size_t alignment)
{
    te_micro_form form = {
        .partials = partials, .amax = amax->data, .amax_per_row = te_tensor_numel(amax) > 1};
    if (!te_tensor_present(data)) return form;
    form.data = te_cuda_view(data);
    form.scales = te_cuda_view(scales);
    form.aligned = te_cuda_aligned(&form.data, 1, alignment);
    return form;
}

te_cuda_call te_cuda_micro_rows_call(const te_quantize_args *args, te_nvfp4_rows_params *params)
{
    static const char *const kernels[TE_DTYPE_COUNT] = TE_CUDA_NAMES("te_nvfp4_rows_");
    const int64_t rows = args->input.shape[0];
    *params = (te_nvfp4_rows_params){.input = te_cuda_view(&args->input),
                                     .amax = args->cast.result.row_amax.data,
                                     .noop = args->noop};
    params->input_aligned = te_cuda_aligned(&params->input, te_dtype_bytes(args->input.dtype), 16);
    return (te_cuda_call){
        "microscale",
        kernels[args->input.dtype],
        {rows < 65535 ? (uint32_t)rows : 65535, 1, 1, TE_CUDA_TILE_THREADS, 1, 1, 0},
        params,
        sizeof *params};
}

te_micro_params te_cuda_micro_params(const te_cast_request *cast, int across)
{
    const te_operand *to = &cast->result;
    const int fp4 = to->mode == TE_SCALING_NVFP4;
    const float *second = cast->column_partials != NULL ? cast->column_partials : cast->partials;
    te_micro_params params = {
        .row = form_of(&to->row, &to->row_scales, &to->row_amax, cast->partials, fp4 ? 4 : 8),
        .column = form_of(&to->column, &to->column_scales, &to->column_amax, second, fp4 ? 16 : 8),
        .rng = (const te_index *)cast->rng,
        .fp8_max = te_dtype_max(te_operand_dtype(to)),
        .across = across,
        .square = cast->square,
        .hadamard = cast->hadamard != TE_HADAMARD_NONE,
        .signs = te_hadamard_signs(cast->hadamard),
        .margin = cast->margin,
        .four_over_six = cast->four_over_six != TE_FOUR_OVER_SIX_NONE,
        .squared = cast->four_over_six == TE_FOUR_OVER_SIX_MSE,
        .range = te_nvfp4_range(to->scales_to_256)};
    params.row.amax_per_row = cast->row_scaled != 0;
    return params;
}

te_status te_cuda_hadamard_amax(te_cuda_state *cuda, const te_amax_args *args, void *stream)
{
    static const char *const kernels[TE_DTYPE_COUNT] = TE_CUDA_NAMES("te_hadamard_amax_");
    te_hadamard_amax_params params = {.input = te_cuda_view(&args->input),
                                      .partials = args->partials,
                                      .signs = te_hadamard_signs(args->hadamard),
                                      .row_tiles = te_ceil_div(args->input.shape[0], TE_CUDA_TILE),
                                      .column_tiles =
                                          te_ceil_div(args->input.shape[1], TE_CUDA_TILE)};
    const te_index tiles = params.row_tiles * params.column_tiles;
    const uint32_t blocks = (uint32_t)(tiles < 1                  ? 1
                                       : tiles > TE_AMAX_PARTIALS ? TE_AMAX_PARTIALS
                                                                  : tiles);
    te_cuda_call call = {"microscale",
                         kernels[args->input.dtype],
                         {blocks, 1, 1, TE_CUDA_TILE_THREADS, 1, 1, 0},
                         &params,
                         sizeof params};
    params.input_aligned = te_cuda_aligned(&params.input, te_dtype_bytes(args->input.dtype), 16);
    return te_cuda_run(cuda, &call, 1, stream);
}

te_status te_cuda_micro_dequantize(te_cuda_state *cuda, const te_operand *input, int by_rows,
                                   int raw, const te_tensor *output, void *stream)
{
    static const char *const mxfp8[TE_DTYPE_COUNT][TE_DTYPE_COUNT] = {
#define X(O, o, I, i) [TE_DTYPE_##I][TE_DTYPE_##O] = "te_mxfp8_wide_" #i "_" #o,
        TE_MXFP8_INSTANCES(X)
#undef X
    };
    static const char *const nvfp4[2][TE_DTYPE_COUNT] = {TE_CUDA_NAMES("te_nvfp4_wide_transposed_"),
                                                         TE_CUDA_NAMES("te_nvfp4_wide_")};
    const int fp4 = input->mode == TE_SCALING_NVFP4;
    te_micro_wide_params params = {
        .form = by_rows
                    ? form_of(&input->row, &input->row_scales, &input->row_amax, NULL, fp4 ? 4 : 8)
                    : form_of(&input->column, &input->column_scales, &input->column_amax, NULL,
                              fp4 ? 16 : 8),
        .output = te_cuda_view(output),
        .limit = te_dtype_max(output->dtype),
        .range = te_nvfp4_range(input->scales_to_256),
        .by_columns = !by_rows};
    const te_dtype codes = by_rows ? input->row.dtype : input->column.dtype;
    te_cuda_call call = {"microscale",
                         fp4 ? nvfp4[by_rows != 0][output->dtype] : mxfp8[codes][output->dtype],
                         tile_grid(output->shape[0], output->shape[1]), &params, sizeof params};
    if (raw) params.form.amax = NULL;
    params.output_aligned = te_cuda_aligned(&params.output, te_dtype_bytes(output->dtype), 16);
    return te_cuda_run(cuda, &call, 1, stream);
}

te_status te_cuda_nvfp4_alpha(te_cuda_state *cuda, const te_gemm_operand *a,
                              const te_gemm_operand *b, float beta, float *out, void *stream)
{
    const te_nvfp4_alpha_params params = {.a = a->amax->data,
                                          .b = b->amax->data,
                                          .out = out,
                                          .a_range = te_nvfp4_range(a->scales_to_256),
                                          .b_range = te_nvfp4_range(b->scales_to_256),
                                          .beta = beta};
    const te_cuda_call call = {
        "microscale", "te_nvfp4_alpha", {1, 1, 1, 1, 1, 1, 0}, &params, sizeof params};
    return te_cuda_run(cuda, &call, 1, stream);
}
