/* SPDX-License-Identifier: Apache-2.0
 *
 * merge.cu - outputs and statistics of two attentions to different keys as those of one, and plain
 * sums of gradients.
 *
 * The memory decides how long it takes, so dtypes are known at run time alone. All lanes of a row
 * are in one warp: they have read its statistics before one of them writes there.
 */
#include "merge.h"
#include "vector.cuh"
#include "view4.cuh"

enum { N = TE_MERGE_VECTOR };

struct merge_weights {
    float total, step;
};

template <typename T>
static __device__ __forceinline__ void load(const unsigned char *line, te_index channel,
                                            bool aligned, te_index count, float *x)
{
    te_vector<T, N> bits;
    bits.load((const typename T::raw *)line + channel, aligned, count);
#pragma unroll
    for (int i = 0; i < N; i++) x[i] = bits.value(i);
}

template <typename T>
static __device__ __forceinline__ void store(unsigned char *line, te_index channel, bool aligned,
                                             te_index count, const float *x)
{
    te_vector<T, N> bits;
    bits.encode(x);
    bits.store((typename T::raw *)line + channel, aligned, count);
}

static __device__ __forceinline__ void load_any(int dtype, const unsigned char *line,
                                                te_index channel, bool aligned, te_index count,
                                                float *x)
{
    if (dtype == TE_STORE_F32)
        load<te_f32>(line, channel, aligned, count, x);
    else if (dtype == TE_STORE_F16)
        load<te_f16>(line, channel, aligned, count, x);
    else
        load<te_bf16>(line, channel, aligned, count, x);
}

static __device__ __forceinline__ void store_any(int dtype, unsigned char *line, te_index channel,
                                                 bool aligned, te_index count, const float *x)
{
    if (dtype == TE_STORE_F32)
        store<te_f32>(line, channel, aligned, count, x);
    else if (dtype == TE_STORE_F16)
        store<te_f16>(line, channel, aligned, count, x);
    else
        store<te_bf16>(line, channel, aligned, count, x);
}

/* What both parts are multiplied with, and the statistic of both. */
static __device__ __forceinline__ merge_weights weigh(float total, float step, float *merged)
{
    const bool step_is_larger = step > total;
    const float ratio = expf(-fabsf(total - step));
    const float larger = 1.0F / (1.0F + ratio), smaller = ratio / (1.0F + ratio);
    const float none = __uint_as_float(0xff800000U); /* -Inf */
    if (total == none && step == none) {
        *merged = none;
        return {0.0F, 0.0F};
    }
    *merged = (step_is_larger ? step : total) + log1pf(ratio);
    return step_is_larger ? merge_weights{smaller, larger} : merge_weights{larger, smaller};
}

/* The channels of a lane, all that lie `step` apart. */
static __device__ __forceinline__ void merge_row(const te_merge_params &p, te_index batch,
                                                 te_index token, te_index head, te_index channel,
                                                 te_index step, const merge_weights &weights)
{
    const unsigned char *total =
        te_line(p.total.view, p.total.dtype == TE_STORE_F32 ? 4 : 2, batch, token, head);
    const unsigned char *added =
        te_line(p.step.view, p.step.dtype == TE_STORE_F32 ? 4 : 2, batch, token, head);
    unsigned char *output =
        te_line(p.output.view, p.output.dtype == TE_STORE_F32 ? 4 : 2, batch, token, head);
    for (; channel < p.channels; channel += step) {
        const te_index count = p.channels - channel;
        float x[N] = {}, y[N] = {};
        if (weights.total != 0.0F)
            load_any(p.total.dtype, total, channel, p.aligned != 0, count, x);
        if (weights.step != 0.0F) load_any(p.step.dtype, added, channel, p.aligned != 0, count, y);
#pragma unroll
        for (int i = 0; i < N; i++) x[i] = weights.total * x[i] + weights.step * y[i];
        store_any(p.output.dtype, output, channel, p.aligned != 0, count, x);
    }
}

static __device__ __forceinline__ float *statistic(const te_view4 &view, te_index batch,
                                                   te_index token, te_index head)
{
    return (float *)te_line(view, sizeof(float), batch, token, head);
}

static __device__ __forceinline__ void merge(const te_merge_params &p)
{
    const int lane = (int)threadIdx.x & ((1 << p.lanes_log2) - 1);
    const int rows = TE_MERGE_THREADS >> p.lanes_log2, own = (int)threadIdx.x >> p.lanes_log2;
    for (te_index first = (te_index)blockIdx.x * rows; first < p.rows;
         first += (te_index)gridDim.x * rows) {
        const te_index row = first + own;
        te_index head, token;
        merge_weights weights = {1.0F, 1.0F};
        float merged = 0.0F;
        const te_index batch = te_divide(te_divide(row, p.heads, &head), p.tokens, &token);
        if (p.statistics.data != nullptr && row < p.rows) {
            weights = weigh(*statistic(p.total_statistics, batch, token, head),
                            *statistic(p.step_statistics, batch, token, head), &merged);
        }
        __syncwarp();
        if (row >= p.rows) continue;
        if (p.statistics.data != nullptr && lane == 0)
            *statistic(p.statistics, batch, token, head) = merged;
        merge_row(p, batch, token, head, (te_index)lane * N, (te_index)N << p.lanes_log2, weights);
    }
}

TE_KERNEL(te_merge, te_merge_params, (TE_MERGE_THREADS), merge(p))
