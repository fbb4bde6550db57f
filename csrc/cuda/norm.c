/* SPDX-License-Identifier: Apache-2.0
 *
 * norm.c - host side of the norms.
 *
 * A kernel on rows makes the statistics and whatever is requested row by row; where FP8 is
 * requested transposed, a kernel on tiles makes both forms of it from these statistics, beginning
 * with the rows that were read last.
 */
#include "cuda/norm.h"

#include "core/check.h"
#include "core/scales.h"
#include "core/status.h"
#include "cuda/ops.h"
#include "cuda/tiles.h"

#define ROW_THREADS 256    /* where a warp has a row of its own */
#define STATIC_SHARED 2048 /* at least what the kernels have besides */
#define NAMED_BARRIERS 15  /* besides that of the whole block */

int te_cuda_plan_row_teams(const te_cuda_row_request *request, te_cuda_row_teams *plan)
{
    const int64_t lanes = te_round_up(te_ceil_div(request->vectors, request->each), 32);
    const int64_t factors = lanes * request->each * (int64_t)request->factors;
    const int64_t row = lanes * request->each * (int64_t)request->piece;
    const int64_t fit = (request->limit - STATIC_SHARED - factors) / row;
    /* Few rows are spread over all blocks. */
    const int64_t enough = request->rows > 0 ? te_ceil_div(request->rows, TE_CUDA_NORM_BLOCKS) : 1;
    int64_t teams = request->threads / lanes;
    if (lanes > 32 && teams > NAMED_BARRIERS) teams = NAMED_BARRIERS;
    if (teams > enough) teams = enough;
    if (teams > fit) teams = fit;
    if (teams < 1) return 0;
    *plan = (te_cuda_row_teams){.lanes = lanes,
                                .threads = teams * lanes,
                                .blocks = te_ceil_div(request->rows, teams),
                                .stages = fit / teams};
    if (plan->stages > request->stages) plan->stages = request->stages;
    if (plan->blocks > TE_CUDA_NORM_BLOCKS) plan->blocks = TE_CUDA_NORM_BLOCKS;
    if (plan->blocks < 1) plan->blocks = 1;
    plan->shared = plan->stages * teams * row + factors;
    return 1;
}

typedef enum row_plan { NARROW, WIDE, ODD, LONG, HEADS, PLANS } row_plan;

/* Nothing but aligned vectors of 8 elements of 16 bits: of fp32, registers alone keep as many bytes
 * in flight as the memory needs, and from there they are faster. */
static int is_whole(const te_norm_params *params, size_t bytes)
{
    const te_view *row = &params->to.row;
    return bytes == 2 && params->input_aligned && params->input.columns % 8 == 0 &&
           (params->output.data == NULL || params->output_aligned) &&
           (row->data == NULL || (params->to.row_aligned && row->columns % 8 == 0));
}

/* How rows of elements of `bytes` are distributed to teams and blocks. */
static row_plan plan_rows(te_norm_params *params, size_t bytes, int64_t limit, te_cuda_dims *dims)
{
    /* The padding of FP8 rows is written by the threads that reach into it. */
    const int64_t width = params->to.row.columns > params->input.columns ? params->to.row.columns
                                                                         : params->input.columns;
    const te_cuda_row_request request = {.rows = params->input.rows,
                                         .vectors = te_ceil_div(width, 8),
                                         .each = TE_NORM_WIDE_VECTORS,
                                         .threads = TE_NORM_WIDE_THREADS,
                                         .stages = TE_NORM_WIDE_STAGES,
                                         .piece = 8 * bytes,
                                         .factors = 2 * 8 * sizeof(float),
                                         .limit = limit};
    /* As many blocks as there are partial maxima; they are read by every block, too. */
    const int64_t max_blocks = params->amax_partials != NULL || params->to.partials != NULL
                                   ? TE_CAST_PARTIALS
                                   : TE_CUDA_NORM_MANY_BLOCKS;
    te_cuda_row_teams teams = {.lanes = 32, .threads = ROW_THREADS};
    row_plan plan = ODD;
    if (request.vectors <= 32) {
        plan = NARROW;
        teams.lanes = 1;
        while (teams.lanes < request.vectors) teams.lanes *= 2;
        teams.blocks =
            te_ceil_div(request.rows, TE_NORM_NARROW_THREADS / teams.lanes * TE_NORM_ROWS);
    } else if (is_whole(params, bytes) && te_cuda_plan_row_teams(&request, &teams)) {
        plan = WIDE;
    } else if (request.vectors > TE_NORM_THREADS * TE_NORM_VECTORS) {
        plan = LONG;
        teams = (te_cuda_row_teams){
            .lanes = TE_NORM_THREADS, .threads = TE_NORM_THREADS, .blocks = request.rows};
    } else {
        if (request.vectors > teams.lanes * TE_NORM_VECTORS)
            teams.lanes = teams.threads =
                te_round_up(te_ceil_div(request.vectors, TE_NORM_VECTORS), 32);
        teams.blocks = te_ceil_div(request.rows, teams.threads / teams.lanes);
    }
    if (teams.blocks > max_blocks) teams.blocks = max_blocks;
    *dims = (te_cuda_dims){.grid_x = teams.blocks > 0 ? (uint32_t)teams.blocks : 1,
                           .grid_y = 1,
                           .grid_z = 1,
                           .block_x = (uint32_t)teams.threads,
                           .block_y = 1,
                           .block_z = 1,
                           .shared_bytes = (uint32_t)teams.shared};
    params->lanes = (int)teams.lanes;
    params->stages = (int)teams.stages;
    return plan;
}

static int needs_tiles(const te_norm_args *args)
{
    const te_operand *to = &args->cast.result;
    if (te_cuda_way_of(to) != TE_CUDA_BY_SCALE) return 1;
    return to->mode != TE_SCALING_NONE && te_tensor_requested(&to->column);
}

/* The kernel on tiles reads statistics, also where the caller does not request them. */
typedef struct statistics {
    float *mean, *rsigma;
    size_t bytes; /* of workspace in use */
} statistics;

static statistics plan_statistics(const te_norm_args *args)
{
    const size_t line = (size_t)args->input.shape[0] * sizeof(float);
    const int lacks_mean = args->kind == TE_NORM_LAYERNORM && !te_tensor_present(&args->mean);
    statistics found = {args->mean.data, args->rsigma.data, 0};
    if (!needs_tiles(args) || (args->flags & TE_NORM_STATISTICS_GIVEN) != 0) return found;
    if (!te_tensor_present(&args->rsigma)) {
        found.rsigma = args->workspace;
        found.bytes += line;
    }
    if (lacks_mean) {
        if (args->workspace != NULL) {
            found.mean = (float *)((unsigned char *)args->workspace + found.bytes);
        }
        found.bytes += line;
    }
    return found;
}

/* The same with the rows of the input as a matrix. */
static te_norm_args by_rows(const te_norm_args *args)
{
    te_norm_args same = *args;
    same.input = te_tensor_rows(&args->input);
    return same;
}

te_status te_cuda_norm_supports(void *self, te_context *context, const void *args_)
{
    const te_norm_args *args = args_;
    (void)self, (void)context;
    return te_cuda_norm_check_heads(TE_OP_NORM, &args->input);
}

te_status te_cuda_norm_workspace(void *self, te_context *context, const void *args_, size_t *bytes)
{
    const te_norm_args args = by_rows(args_);
    (void)self, (void)context;
    *bytes = plan_statistics(&args).bytes;
    return TE_OK;
}

static te_cuda_tile_request cast_request(const te_norm_args *args, const te_cast_request *cast)
{
    return (te_cuda_tile_request){.op = TE_OP_NORM,
                                  .outputs = 1,
                                  .dtype = TE_DTYPE_F32,
                                  .rows = args->input.shape[0],
                                  .columns = args->input.shape[1],
                                  .cast = cast};
}

/* The launch on rows; without FP8 where the tiles make it. `input` is as it was given. */
static te_cuda_call plan_row_call(const te_cuda_state *cuda, const te_norm_args *args,
                                  const te_tensor *input, const statistics *found,
                                  te_norm_params *params)
{
#define X(I, i) [TE_DTYPE_##I] = "te_norm_wide_" #i,
    static const char *const kernels[PLANS][TE_DTYPE_COUNT] = {
        [NARROW] = TE_CUDA_NAMES("te_norm_narrow_"),
        [WIDE] = {TE_NORM_WIDE_INSTANCES(X)},
        [ODD] = TE_CUDA_NAMES("te_norm_odd_"),
        [LONG] = TE_CUDA_NAMES("te_norm_long_"),
        [HEADS] = TE_CUDA_NAMES("te_norm_heads_")};
#undef X
    const te_cuda_tile_request request = cast_request(args, &args->cast);
    const te_tensor *wide = &args->cast.result.wide;
    te_cuda_call call = {.family = "norm", .params = params, .params_size = sizeof *params};
    te_dtype dtype;
    row_plan plan;
    *params =
        (te_norm_params){.input = te_cuda_view(&args->input),
                         .factors = te_cuda_norm_factors(&args->gamma, &args->beta, args->flags),
                         .mean = found->mean,
                         .rsigma = found->rsigma,
                         .amax_partials = args->cast.amax_partials,
                         .eps = args->eps,
                         .inverse = te_cuda_norm_inverse(args->kind, args->input.shape[1]),
                         .given = (args->flags & TE_NORM_STATISTICS_GIVEN) != 0,
                         .centered = args->kind == TE_NORM_LAYERNORM};
    params->input_aligned = te_cuda_aligned(&params->input, te_dtype_bytes(args->input.dtype), 16);
    if (te_tensor_present(wide)) {
        params->output = te_cuda_view(wide);
        params->output_dtype = te_cuda_store(wide->dtype);
        params->output_aligned = te_cuda_aligned(&params->output, te_dtype_bytes(wide->dtype), 16);
    }
    if (!needs_tiles(args)) params->to = te_cuda_cast_target(&request, &dtype);
    if (te_cuda_norm_is_heads(input)) {
        params->heads = te_cuda_norm_heads(input);
        params->input_aligned = te_cuda_norm_aligned(input, 16);
    }
    plan = plan_rows(params, te_dtype_bytes(args->input.dtype), te_cuda_shared_limit(cuda),
                     &call.dims);
    if (te_cuda_norm_is_heads(input)) plan = HEADS; /* they are narrow */
    call.name = kernels[plan][args->input.dtype];
    return call;
}

te_status te_cuda_norm(void *self, te_context *context, const void *args_, void *stream)
{
    static const char *const tile_kernels[TE_CUDA_WAYS][TE_DTYPE_COUNT] = {
        [TE_CUDA_BY_SCALE] = TE_CUDA_NAMES("te_norm_tile_"),
        [TE_CUDA_BY_TILES] = TE_CUDA_NAMES("te_norm_scaled_"),
        [TE_CUDA_MXFP8] = TE_CUDA_NAMES("te_norm_mxfp8_"),
        [TE_CUDA_NVFP4] = TE_CUDA_NAMES("te_norm_nvfp4_")};
    const te_norm_args rows_args = by_rows(args_), *args = &rows_args;
    te_cast_request cast = args->cast; /* what the tiles do of it */
    const te_cuda_tile_request request = cast_request(args, &cast);
    const statistics found = plan_statistics(args);
    const int given = (args->flags & TE_NORM_STATISTICS_GIVEN) != 0;
    te_cuda_state *cuda = te_context_state(context);
    te_norm_params rows;
    te_norm_tile_params params = {0};
    te_cuda_call row_call =
        plan_row_call(cuda, args, &((const te_norm_args *)args_)->input, &found, &rows);
    te_cuda_call call = {.family = "norm", .params = &params, .params_size = sizeof params};
    te_cuda_tile_job job;
    (void)self;
    if (!needs_tiles(args)) return te_cuda_run(cuda, &row_call, 1, stream);
    TE_TRY(te_check_workspace(TE_OP_NORM, args->workspace, args->workspace_size, found.bytes));
    cast.result.wide.data = NULL; /* by the launch on rows */
    cast.amax_partials = NULL;
    TE_TRY(te_cuda_plan_tile_job(&request, &params.tile, &job));
    call.name = tile_kernels[job.way][args->input.dtype];
    params.input = rows.input;
    params.input_aligned = rows.input_aligned;
    params.factors = rows.factors;
    params.mean = found.mean;
    params.rsigma = found.rsigma;
    if (given && rows.output.data == NULL && rows.amax_partials == NULL) {
        return te_cuda_run_tile_job(cuda, &job, &call, NULL, stream);
    }
    params.tile.from_bottom = 1;
    return te_cuda_run_tile_job(cuda, &job, &call, &row_call, stream);
}
