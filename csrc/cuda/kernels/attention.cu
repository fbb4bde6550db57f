/* SPDX-License-Identifier: Apache-2.0
 *
 * attention.cu - what attention needs beside cuDNN's kernels: a mask as a bias, zeros, where packed
 * sequences begin, sinks, statistics of rows without keys.
 */
#include "attention.h"
#include "vector.cuh"
#include "view4.cuh"

#define INFINITE __uint_as_float(0x7f800000U)

/* An element of a line whose dtype is known at run time only. */
static __device__ __forceinline__ float load(const unsigned char *line, te_index at, int dtype)
{
    if (dtype == TE_STORE_F32) return ((const float *)line)[at];
    const unsigned short bits = ((const unsigned short *)line)[at];
    return dtype == TE_STORE_F16 ? te_decode<te_f16>(bits) : te_decode<te_bf16>(bits);
}

template <typename T>
static __device__ __forceinline__ void fill_bias(const te_attention_bias_params &p)
{
    const te_index lines = p.shape[0] * p.shape[1] * p.shape[2], keys = p.shape[3];
    const int bytes = p.bias_dtype == TE_STORE_F32 ? 4 : 2;
    for (te_index line = blockIdx.x; line < lines; line += gridDim.x) {
        te_index head, query;
        const te_index rest = te_divide(line, p.shape[2], &query);
        const te_index batch = te_divide(rest, p.shape[1], &head);
        const unsigned char *mask = te_line(p.mask, 1, batch, head, query);
        const unsigned char *bias = te_line(p.bias, bytes, batch, head, query);
        typename T::raw *output = (typename T::raw *)p.output + line * keys;
        for (te_index key = threadIdx.x; key < keys; key += blockDim.x) {
            float value = 0.0F;
            if (mask != nullptr && mask[key * p.mask.strides[3]] != 0) {
                value = __uint_as_float(0xff800000U);
            } else if (bias != nullptr) {
                value = load(bias, key * p.bias.strides[3], p.bias_dtype);
            }
            output[key] = te_encode<T>(value);
        }
    }
}

#define X(I, i, ...)                                                                               \
    TE_KERNEL(te_attention_bias_##i, te_attention_bias_params, (TE_ATTENTION_THREADS),             \
              fill_bias<te_##i>(p))
TE_NUMBERS(X, )
#undef X

/* ---- sequences ---- */

static __device__ __forceinline__ te_index length_of(const te_attention_side &side, te_index batch)
{
    if (side.lengths != nullptr) return side.lengths[batch];
    if (side.offsets == nullptr) return side.longest;
    return (te_index)side.offsets[batch + 1] - side.offsets[batch];
}

static __device__ __forceinline__ bool fits(const te_attention_side &side, te_index batch)
{
    const te_index length = length_of(side, batch);
    te_index first, next;
    if (length < 0 || length > side.longest) return false;
    if (side.offsets == nullptr) return true;
    first = side.offsets[batch];
    next = side.offsets[batch + 1];
    return first >= 0 && first + length <= next && next <= side.tokens;
}

static __device__ __forceinline__ te_index within(te_index value, te_index limit)
{
    return value < 0 ? 0 : value > limit ? limit : value;
}

static __device__ __forceinline__ void begin(const te_attention_begin_params &p)
{
    const te_index step = (te_index)gridDim.x * blockDim.x;
    for (te_index at = (te_index)blockIdx.x * blockDim.x + threadIdx.x; at <= p.entries;
         at += step) {
        const te_index batch = at < p.batch ? at : p.batch;
        const bool is_there = at < p.batch && fits(p.sides[0], at) && fits(p.sides[1], at);
        for (int i = 0; i < 2 && at < p.entries; i++) {
            p.lengths[i][at] = is_there ? (int)length_of(p.sides[i], at) : 0;
        }
        for (int i = 0; i < p.count; i++) {
            const te_attention_starts &of = p.starts[i];
            const te_attention_side &side = p.sides[of.side];
            of.starts[at] = within(side.offsets[batch], side.tokens) * of.stride;
        }
    }
}

TE_KERNEL(te_attention_begin, te_attention_begin_params, (TE_ATTENTION_THREADS), begin(p))

static __device__ __forceinline__ uint4 filling(bool is_wrong)
{
    const unsigned value = is_wrong ? 0x7fff7fffU : 0U; /* NaN in f16 and in bf16 */
    return make_uint4(value, value, value, value);
}

static __device__ __forceinline__ float no_sum(bool is_wrong)
{
    return __uint_as_float(is_wrong ? 0x7fffffffU : 0xff800000U);
}

static __device__ __forceinline__ void clear_entry(const te_attention_clear_params &p,
                                                   te_index batch, bool is_wrong)
{
    const te_index first = (te_index)blockIdx.x * blockDim.x + threadIdx.x;
    const te_index step = (te_index)gridDim.x * blockDim.x;
    if (blockIdx.z == 3) {
        for (te_index at = first; p.statistics != nullptr && at < p.rows; at += step) {
            p.statistics[batch * p.rows + at] = no_sum(is_wrong);
        }
        return;
    }
    const te_attention_heads &heads = p.heads[blockIdx.z];
    const te_index count = heads.tokens * heads.heads * heads.vectors;
    for (te_index at = first; heads.view.data != nullptr && at < count; at += step) {
        te_index vector, head;
        const te_index rest = te_divide(at, heads.vectors, &vector);
        const te_index token = te_divide(rest, heads.heads, &head);
        ((uint4 *)te_line(heads.view, 2, batch, token, head))[vector] = filling(is_wrong);
    }
}

static __device__ __forceinline__ void clear(const te_attention_clear_params &p)
{
    for (te_index batch = blockIdx.y; batch < p.batch; batch += gridDim.y) {
        const bool is_wrong = !p.all && !(fits(p.sides[0], batch) && fits(p.sides[1], batch));
        if (p.all || is_wrong || length_of(p.sides[0], batch) == 0 ||
            length_of(p.sides[1], batch) == 0) {
            clear_entry(p, batch, is_wrong);
        }
    }
}

TE_KERNEL(te_attention_clear, te_attention_clear_params, (TE_ATTENTION_THREADS), clear(p))

/* Fills tokens [first, last) of what blockIdx.z stands for. */
static __device__ __forceinline__ void fill(const te_attention_gaps_params &p, te_index first,
                                            te_index last, bool is_wrong)
{
    const te_index thread = (te_index)blockIdx.x * blockDim.x + threadIdx.x;
    const te_index step = (te_index)gridDim.x * blockDim.x;
    if (blockIdx.z == 3) {
        for (te_index at = first * p.rows + thread; at < last * p.rows; at += step) {
            p.statistics[at] = no_sum(is_wrong);
        }
        return;
    }
    const te_attention_heads &heads = p.heads[blockIdx.z];
    const te_index count = (last - first) * heads.heads * heads.vectors;
    for (te_index at = thread; at < count; at += step) {
        te_index vector, head;
        const te_index rest = te_divide(at, heads.vectors, &vector);
        const te_index token = first + te_divide(rest, heads.heads, &head);
        ((uint4 *)te_line(heads.view, 2, 0, token, head))[vector] = filling(is_wrong);
    }
}

static __device__ __forceinline__ void fill_gaps(const te_attention_gaps_params &p)
{
    const bool is_there =
        blockIdx.z == 3 ? p.statistics != nullptr : p.heads[blockIdx.z].view.data != nullptr;
    const te_attention_side &side = p.sides[blockIdx.z == 3 ? 0 : p.side_of[blockIdx.z]];
    for (te_index batch = blockIdx.y; is_there && batch <= p.batch; batch += gridDim.y) {
        te_index from = 0, to = side.tokens;
        if (batch > 0) from = side.offsets[batch - 1] + length_of(side, batch - 1);
        if (batch < p.batch) to = side.offsets[batch];
        fill(p, within(from, side.tokens), within(to, side.tokens), false);
        if (batch == p.batch) continue;
        const bool is_wrong = !fits(p.sides[0], batch) || !fits(p.sides[1], batch);
        if (is_wrong || length_of(p.sides[0], batch) == 0 || length_of(p.sides[1], batch) == 0) {
            fill(p, within(to, side.tokens), within(to + length_of(side, batch), side.tokens),
                 is_wrong);
        }
    }
}

TE_KERNEL(te_attention_gaps, te_attention_gaps_params, (TE_ATTENTION_THREADS), fill_gaps(p))

/* ---- sinks ---- */

static __device__ __forceinline__ te_index row_at(const te_attention_rows &rows, te_index batch,
                                                  te_index head, te_index query)
{
    const te_index first = rows.starts != nullptr ? rows.starts[batch] : batch * rows.batch;
    return first + head * rows.head + query * rows.query;
}

/* The sum of the weights becomes e^sink more. */
template <typename T>
static __device__ __forceinline__ void join_sink(const te_attention_sink_params &p)
{
    const te_attention_heads &to = p.output;
    const te_index count = p.batch * to.tokens * to.heads * to.vectors;
    const te_index step = (te_index)gridDim.x * blockDim.x;
    for (te_index at = (te_index)blockIdx.x * blockDim.x + threadIdx.x; at < count; at += step) {
        te_index vector, head, token;
        const te_index rest = te_divide(te_divide(at, to.vectors, &vector), to.heads, &head);
        const te_index batch = te_divide(rest, to.tokens, &token);
        const te_index row = row_at(p.statistics, batch, head, token);
        const float statistic = p.statistics.data[row], more = p.sink[head] - statistic;
        const float weight = statistic == -INFINITE ? 0.0F : 1.0F / (1.0F + expf(more));
        uint4 *line = (uint4 *)te_line(to.view, T::bytes, batch, token, head) + vector;
        te_vector<T, 8> values;
        float y[8];
        values.load_aligned(line);
#pragma unroll
        for (int i = 0; i < 8; i++) y[i] = values.value(i) * weight;
        values.encode(y);
        values.store_aligned(line);
        if (vector == 0 && p.joined != nullptr) {
            const float joined = statistic + fmaxf(more, 0.0F) + log1pf(expf(-fabsf(more)));
            p.joined[row] = statistic == -INFINITE ? statistic : joined;
        }
    }
}

TE_KERNEL(te_attention_sink_f16, te_attention_sink_params, (TE_ATTENTION_THREADS),
          join_sink<te_f16>(p))
TE_KERNEL(te_attention_sink_bf16, te_attention_sink_params, (TE_ATTENTION_THREADS),
          join_sink<te_bf16>(p))

/* Each row takes from the sink what its weight has of the row's mean gradient. */
static __device__ __forceinline__ float share_of_sink(const te_attention_sink_grad_params &p,
                                                      te_index batch, te_index query)
{
    const te_index head = blockIdx.x;
    const float statistic = p.statistics.data[row_at(p.statistics, batch, head, query)];
    if (statistic == -INFINITE) return 0.0F;
    return -p.factor * p.rows.data[row_at(p.rows, batch, head, query)] *
           expf(p.sink[head] - statistic);
}

/* All rows of the block's head, in one order. */
static __device__ __forceinline__ void sum_sink(const te_attention_sink_grad_params &p)
{
    __shared__ float of_warps[TE_ATTENTION_HEAD_THREADS / 32];
    const int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32;
    float sum = 0.0F;
    for (te_index batch = 0; batch < p.batch; batch++) {
        te_index end = p.queries;
        if (p.query_lengths != nullptr)
            end = p.key_lengths[batch] == 0 ? 0 : p.query_lengths[batch];
        for (te_index i = threadIdx.x; i < end; i += blockDim.x) sum += share_of_sink(p, batch, i);
    }
#pragma unroll
    for (int step = 16; step > 0; step >>= 1) sum += __shfl_xor_sync(0xffffffffU, sum, step);
    if (lane == 0) of_warps[warp] = sum;
    __syncthreads();
    if (threadIdx.x != 0) return;
    for (int i = 1; i < (int)blockDim.x / 32; i++) sum += of_warps[i];
    p.output[blockIdx.x] = sum;
}

TE_KERNEL(te_attention_sink_grad, te_attention_sink_grad_params, (TE_ATTENTION_HEAD_THREADS),
          sum_sink(p))

#define RAISED 1e30F /* finite in base 2, too */

static __device__ __forceinline__ void raise(const te_attention_raise_params &p)
{
    const te_index step = (te_index)gridDim.x * blockDim.x;
    for (te_index at = (te_index)blockIdx.x * blockDim.x + threadIdx.x; at < p.rows; at += step) {
        const float statistic = p.statistics[at];
        p.output[at] = statistic == -INFINITE ? RAISED : statistic;
    }
}

TE_KERNEL(te_attention_raise, te_attention_raise_params, (TE_ATTENTION_THREADS), raise(p))

static __device__ __forceinline__ void write_scales(const te_attention_fp8_begin_params &p)
{
    const int at = (int)threadIdx.x;
    if (at >= p.count || p.scales[at].pair == nullptr) return;
    const float *source = p.scales[at].source;
    const float scale = source == nullptr ? p.scales[at].factor : *source * p.scales[at].factor;
    p.scales[at].pair[0] = __fdiv_rn(1.0F, scale);
    p.scales[at].pair[1] = scale;
}

TE_KERNEL(te_attention_fp8_begin, te_attention_fp8_begin_params, (TE_ATTENTION_THREADS),
          write_scales(p))

/* The bits of magnitudes are ordered as these are. */
static __device__ __forceinline__ void raise_amaxes(const te_attention_fp8_end_params &p)
{
    const int at = (int)threadIdx.x;
    if (at >= p.count) return;
    const float found = *p.amaxes[at].found;
    if (found > 0.0F) atomicMax((unsigned *)p.amaxes[at].amax, __float_as_uint(found));
}

TE_KERNEL(te_attention_fp8_end, te_attention_fp8_end_params, (TE_ATTENTION_THREADS),
          raise_amaxes(p))
