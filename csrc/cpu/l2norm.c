/* SPDX-License-Identifier: Apache-2.0
 *
 * l2norm.c - roots of sums of squares over a list of tensors, in the order of l2norm_order.h.
 */
#include "core/update.h"

#include <math.h>
#include <stddef.h>

#include "core/scaling_math.h"
#include "cpu/isa.h"
#include "cpu/matrix.h"
#include "cpu/ops.h"

enum { WARP = 32 };

/* Adds threads up in place, those of a warp halves first, then the warps. */
#define JOIN_THREADS(sums, threads)                                                                \
    do {                                                                                           \
        for (int warp = 0; warp < (threads); warp += WARP) {                                       \
            for (int half = WARP / 2; half > 0; half /= 2) {                                       \
                for (int j = warp; j < warp + half; j++) (sums)[j] += (sums)[j + half];            \
            }                                                                                      \
        }                                                                                          \
        for (int half = (threads) / 2; half >= WARP; half /= 2) {                                  \
            for (int j = 0; j < half; j += WARP) (sums)[j] += (sums)[j + half];                    \
        }                                                                                          \
    } while (0)

/* The sum of a chunk's squares. */
static float sum_chunk(const te_tensor *tensor, int64_t begin, int64_t count, float factor)
{
    const te_cpu_kernels *kernels = te_cpu_kernels_get();
    const size_t bytes = te_dtype_bytes(tensor->dtype);
    const unsigned char *data = (const unsigned char *)tensor->data + (size_t)begin * bytes;
    float sums[TE_L2NORM_LANES] = {0}, row[TE_L2NORM_LANES];
    for (int64_t at = 0; at < count; at += TE_L2NORM_LANES) {
        const int64_t width = te_cpu_min(TE_L2NORM_LANES, count - at);
        kernels->to_f32[tensor->dtype](data + (size_t)at * bytes, row, width);
        kernels->add_squares(sums, row, factor, width);
    }
    for (int t = 0; t < TE_L2NORM_THREADS; t++) {
        const float *group = sums + (ptrdiff_t)t * TE_L2NORM_GROUP;
        sums[t] = (group[0] + group[1]) + (group[2] + group[3]);
    }
    JOIN_THREADS(sums, TE_L2NORM_THREADS);
    return sums[0];
}

static float root_of(const float *sums, int64_t count)
{
    double adders[TE_L2NORM_ADDERS] = {0};
    for (int64_t i = 0; i < count; i++) adders[i % TE_L2NORM_ADDERS] += (double)sums[i];
    JOIN_THREADS(adders, TE_L2NORM_ADDERS);
    return (float)sqrt(adders[0]);
}

te_status te_cpu_l2norm(te_context *context, const te_l2norm_args *args, void *stream)
{
    const float factor = args->factor != NULL ? *args->factor : 1.0F;
    float *sums = args->workspace;
    int64_t chunks = 0;
    (void)context, (void)stream;
    for (int64_t i = 0; i < args->count; i++) {
        const te_tensor *tensor = &args->tensors[i];
        const int64_t count = te_tensor_numel(tensor), more = te_l2norm_chunks(tensor);
        float *own = sums + chunks;
#pragma omp parallel for num_threads(te_cpu_threads(count, 1))
        for (int64_t k = 0; k < more; k++) {
            const int64_t begin = k * TE_L2NORM_CHUNK;
            own[k] = sum_chunk(tensor, begin, te_cpu_min(TE_L2NORM_CHUNK, count - begin), factor);
        }
        if (args->each != NULL) args->each[i] = root_of(own, more);
        chunks += more;
    }
    *args->total = root_of(sums, chunks);
    if (!te_is_finite(*args->total) && args->flag != NULL) *args->flag = 1;
    return TE_OK;
}
