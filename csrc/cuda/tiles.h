/* SPDX-License-Identifier: Apache-2.0
 *
 * tiles.h - host side of what device/tile_cast.cuh does: how tiles are distributed, where FP8 goes,
 * and the launches that column sums and partial maxima need before and after. Grids are pure
 * functions of the shape, so that sums are made in the same order on every device.
 */
#ifndef TE_CUDA_TILES_H
#define TE_CUDA_TILES_H

#include "cuda/kernels/activation.h"
#include "cuda/kernels/elementwise.h"
#include "cuda/kernels/norm.h"
#include "cuda/kernels/quantize.h"
#include "cuda/launch.h"

#define TE_CUDA_TILE 64
#define TE_CUDA_TILE_THREADS 128

/* A block per 64 rows, striding over the columns: for a kernel that transposes into `output`. */
static inline te_cuda_dims te_cuda_tile_dims(const te_view *output)
{
    const int64_t tiles = te_ceil_div(output->columns, TE_CUDA_TILE);
    return (te_cuda_dims){.grid_x = (uint32_t)te_ceil_div(output->rows, TE_CUDA_TILE),
                          .grid_y =
                              (uint32_t)(tiles < TE_CUDA_MAX_GRID_Y ? tiles : TE_CUDA_MAX_GRID_Y),
                          .grid_z = 1,
                          .block_x = TE_CUDA_TILE_THREADS,
                          .block_y = 1,
                          .block_z = 1};
}

/* What is requested of the values of a source. */
typedef struct te_cuda_tile_request {
    te_op op;                    /* for errors */
    int outputs;                 /* 1, or 2: halves of what follows side by side */
    te_dtype dtype;              /* that values have; of what is computed F32 */
    int64_t rows, columns;       /* of the values of one output */
    const te_cast_request *cast; /* of [rows, outputs * columns] */
    const te_tensor *bias_grad;  /* [outputs * columns], or NULL */
    const float *noop;           /* 1 float or NULL */
    void *workspace;
    size_t workspace_size;
} te_cuda_tile_request;

/* Which kernel makes a cast. */
typedef enum te_cuda_way {
    TE_CUDA_BY_SCALE, /* one for all of it, or no cast: tile_cast.cuh */
    TE_CUDA_BY_TILES, /* scales of rows or tiles: scaled_cast.cuh */
    TE_CUDA_MXFP8,    /* of small groups: micro_cast.cuh */
    TE_CUDA_NVFP4,
    TE_CUDA_WAYS
} te_cuda_way;

static inline int te_cuda_is_micro(te_cuda_way way)
{
    return way == TE_CUDA_MXFP8 || way == TE_CUDA_NVFP4;
}

/* The launches of one call. */
typedef struct te_cuda_tile_job {
    te_dtype dtype; /* of the bytes; TE_DTYPE_COUNT: nothing is cast */
    te_cuda_dims dims;
    te_fill_params clear;
    te_quantize_sums_params sums;
    int clears, adds; /* whether the launches before and after take place */
    te_cuda_way way;
} te_cuda_tile_job;

/* Parameters of any kernel on tiles. */
typedef union te_cuda_tile_params_copy {
    te_tile_params tile;
    te_quantize_params quantize;
    te_activation_kernel_params activation;
    te_norm_tile_params norm;
} te_cuda_tile_params_copy;

/* What casts a result, and the rows and columns of its tiles. */
te_cuda_way te_cuda_way_of(const te_operand *result);
int64_t te_cuda_tile_side(te_cuda_way way);

/* Bytes of workspace; pointers are not read. */
size_t te_cuda_tile_workspace(const te_cuda_tile_request *request);

/* Fills `tile` and `job`; INVALID where the workspace is too small. */
te_status te_cuda_plan_tile_job(const te_cuda_tile_request *request, te_tile_params *tile,
                                te_cuda_tile_job *job);

/* Runs `before` (or nothing: NULL), then the kernel on tiles, with what clears and adds around it;
 * the grid comes from the job. */
te_status te_cuda_run_tile_job(te_cuda_state *cuda, const te_cuda_tile_job *job,
                               const te_cuda_call *kernel, const te_cuda_call *before,
                               void *stream);

/* The call that adds up lines of column sums. */
te_cuda_call te_cuda_sums_call(const te_quantize_sums_params *sums);

/* Where FP8 goes; *dtype is that of the bytes, TE_DTYPE_COUNT where none are requested. */
te_cast_target te_cuda_cast_target(const te_cuda_tile_request *request, te_dtype *dtype);

#endif
