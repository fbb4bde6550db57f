/* SPDX-License-Identifier: Apache-2.0
 *
 * tiles.h - where the rows go that an operator reads or makes: high precision, FP8 codes by rows
 * and by columns, column sums and max|x|, in one pass.
 *
 * The pass goes in tiles of 64 rows x 256 columns (wider where nothing is transposed): a tile's
 * codes stay in the first-level cache, from where they go out by rows, by columns, or both. Sums
 * and maxima are per tile and joined in the order of the tiles, so that no result depends on the
 * number of threads.
 */
#ifndef TE_CPU_TILES_H
#define TE_CPU_TILES_H

#include "cpu/isa.h"
#include "cpu/matrix.h"
#include "cpu/microscale.h"
#include "cpu/scaled_tiles.h"
#include "cpu/transpose.h"

enum {
    TE_CPU_TILE_ROWS = TE_CPU_BLOCK,
    TE_CPU_TILE_COLUMNS = 4 * TE_CPU_BLOCK, /* where a column-wise output is requested */
    TE_CPU_MADE_COLUMNS = 1024,             /* rows that are made: fp32 buffers fit in the cache */
    TE_CPU_READ_COLUMNS = 4096              /* rows that are read where they lie */
};

/* Columns [column, column + n) of a row in the dtype of the source: where they lie, or made in
 * `buffer`, which has n floats. */
typedef const void *(*te_cpu_row_source)(const void *self, int64_t row, int64_t column, int64_t n,
                                         float *buffer);

/* What a call asks for. */
typedef struct te_cpu_request {
    const te_cast_request *cast;
    const te_tensor *sums; /* [columns] high precision; NULL, or data NULL: not requested */
    void *workspace;       /* te_cpu_sums_bytes */
    size_t workspace_size;
} te_cpu_request;

/* One call, as its tiles see it. */
typedef struct te_cpu_tiles {
    const te_cpu_kernels *kernels;
    te_cpu_row_source source;
    int64_t rows, columns;
    te_cpu_matrix wide, row, column; /* data NULL: not requested */
    te_cpu_quantize_row quantize;    /* NULL: nothing is cast, measured or summed */
    int64_t tile_rows, tile_columns;
    float scale;
    float *sums;          /* [row tiles, columns], or NULL */
    te_dtype dtype;       /* of the source */
    te_cpu_scaled scaled; /* a cast with scales of rows or tiles, or */
    te_cpu_micro micro;   /* of small groups, in place of `quantize` */
    int passes;           /* over all tiles */
} te_cpu_tiles;

/* Workspace of the column sums of a matrix; 0 where none are requested. */
size_t te_cpu_sums_bytes(const te_tensor *matrix, const te_tensor *sums);
/* Whether the request has it, where there are sums to write. */
te_status te_cpu_check_sums(te_op op, const te_tensor *matrix, const te_cpu_request *request);
/* The workspace query of an operator that sums the columns of its argument `matrix`. */
#define TE_CPU_SUMS_WORKSPACE(op, matrix)                                                          \
    size_t te_cpu_##op##_workspace(const te_##op##_args *args)                                     \
    {                                                                                              \
        return te_cpu_sums_bytes(&args->matrix, &args->bias_grad);                                 \
    }
/* target[c] = sum over i of sums[i][c], in the order of the `count` rows. */
void te_cpu_join_sums(const te_cpu_kernels *kernels, const float *sums, int64_t count,
                      const te_tensor *target);
/* n numbers of a row as fp32: where they lie, or converted in `buffer`. */
const float *te_cpu_numbers(const te_cpu_kernels *kernels, const te_cpu_matrix *matrix, int64_t row,
                            int64_t column, int64_t n, float *buffer);
/* Writes the transpose of `bytes` (up to 64 rows) to columns [row, ...) of `output`, from its row
 * `column` on. */
void te_cpu_write_columns(const te_cpu_matrix *output, int64_t row, int64_t column,
                          const te_cpu_matrix *bytes);

/* Whether the cast sees all values of a tile before it casts one. */
static inline int te_cpu_tiles_hold(const te_cpu_tiles *tiles)
{
    return tiles->scaled.mode != TE_SCALING_NONE || tiles->micro.mode != TE_SCALING_NONE;
}
/* Outputs and scale of a call over [rows, columns] whose source gives numbers of `dtype`; writes
 * the scales. `made`: the source makes its rows. */
te_cpu_tiles te_cpu_tiles_begin(const te_cpu_request *request, int64_t rows, int64_t columns,
                                te_dtype dtype, int made);
/* The same, as they go over the tiles in one of their passes. */
te_cpu_tiles te_cpu_tiles_pass(const te_cpu_tiles *tiles, int pass);
/* The tile at (row, column); bits of its max|x|. */
int32_t te_cpu_tile(const te_cpu_tiles *tiles, const void *self, int64_t row, int64_t column);
/* All tiles, for sources without a state of their own per row. */
int32_t te_cpu_all_tiles(const te_cpu_tiles *tiles, const void *self);
/* What remains once every tile is done: padding, sums, maxima. */
void te_cpu_tiles_end(const te_cpu_tiles *tiles, const te_cpu_request *request, int32_t amax);

#endif
