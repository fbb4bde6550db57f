/* SPDX-License-Identifier: Apache-2.0
 *
 * l2norm.cu - roots of sums of squares over lists of tensors, in the order of l2norm_order.h.
 *
 * Bound by memory: a thread has 64 bytes in flight before it squares the first element. A block
 * sums a chunk and writes one number; the second kernel adds these up, a block for a norm.
 * No sum is atomic, no two operations are contracted: the bits are those of the CPU.
 */
#include "l2norm.h"
#include "core/scaling_math.h"
#include "reduce.cuh"
#include "vector.cuh"

/* The entry that a block belongs to: the last one that begins at or before it. */
static __device__ __forceinline__ int find(const te_l2norm_params &p)
{
    int low = 0, high = p.count - 1;
    while (low < high) {
        const int middle = (low + high + 1) / 2;
        if (p.entries[middle].first <= blockIdx.x)
            low = middle;
        else
            high = middle - 1;
    }
    return low;
}

static __device__ __forceinline__ void add_square(float &sum, float value, float factor)
{
    const float product = __fmul_rn(value, factor);
    sum = __fadd_rn(sum, __fmul_rn(product, product));
}

/* This thread's share of a chunk. */
template <typename T>
static __device__ __forceinline__ float sum_share(const te_l2norm_entry &e, te_index begin,
                                                  float factor)
{
    constexpr int N = TE_L2NORM_GROUP, apart = TE_L2NORM_LANES, unroll = 64 / (N * T::bytes);
    const typename T::raw *data = (const typename T::raw *)e.data;
    const te_index end = min(begin + TE_L2NORM_CHUNK, e.count);
    float sum[N] = {};
    te_index at = begin + threadIdx.x * N;
    for (; at + apart * (unroll - 1) + N <= end; at += apart * unroll) {
        te_vector<T, N> group[unroll];
        if (e.aligned) {
#pragma unroll
            for (int i = 0; i < unroll; i++) group[i].load_aligned(data + at + i * apart);
        } else {
#pragma unroll
            for (int i = 0; i < unroll; i++) group[i].load_words(data + at + i * apart);
        }
#pragma unroll
        for (int i = 0; i < unroll; i++)
#pragma unroll
            for (int j = 0; j < N; j++) add_square(sum[j], group[i].value(j), factor);
    }
    for (; at < end; at += apart) { /* 0 times an infinite factor is no 0: what is beyond the end */
        te_vector<T, N> group;
        group.load(data + at, e.aligned != 0, end - at);
#pragma unroll
        for (int j = 0; j < N; j++)
            if (at + j < end) add_square(sum[j], group.value(j), factor);
    }
    return __fadd_rn(__fadd_rn(sum[0], sum[1]), __fadd_rn(sum[2], sum[3]));
}

/* Sum over the block, for its first warp; `scratch` has a place per warp, and is used once. */
template <int THREADS, typename V>
static __device__ __forceinline__ V join_threads(V value, V *scratch)
{
    constexpr int warps = THREADS / 32;
#pragma unroll
    for (int step = 16; step > 0; step >>= 1) value += __shfl_xor_sync(0xffffffffU, value, step);
    if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = value;
    __syncthreads();
    if (threadIdx.x >= 32) return value;
    value = scratch[threadIdx.x % warps];
#pragma unroll
    for (int step = warps / 2; step > 0; step >>= 1)
        value += __shfl_xor_sync(0xffffffffU, value, step);
    return value;
}

static __device__ __forceinline__ void sum_chunk(const te_l2norm_params &p)
{
    __shared__ float scratch[TE_L2NORM_THREADS / 32];
    const te_l2norm_entry &e = p.entries[find(p)];
    const float factor = p.factor != nullptr ? *p.factor : 1.0F;
    const te_index begin = (te_index)(blockIdx.x - e.first) * TE_L2NORM_CHUNK;
    float sum;
    if (e.dtype == TE_STORE_F32)
        sum = sum_share<te_f32>(e, begin, factor);
    else if (e.dtype == TE_STORE_F16)
        sum = sum_share<te_f16>(e, begin, factor);
    else
        sum = sum_share<te_bf16>(e, begin, factor);
    sum = join_threads<TE_L2NORM_THREADS>(sum, scratch);
    if (threadIdx.x == 0) p.sums[blockIdx.x] = sum;
}

static __device__ __forceinline__ void write_root(const te_l2norm_root_params &p)
{
    __shared__ double scratch[TE_L2NORM_ADDERS / 32];
    const te_index end = p.begin[blockIdx.x + 1];
    double sum = 0.0;
#pragma unroll 8
    for (te_index i = p.begin[blockIdx.x] + threadIdx.x; i < end; i += TE_L2NORM_ADDERS)
        sum += (double)p.sums[i];
    sum = join_threads<TE_L2NORM_ADDERS>(sum, scratch);
    if (threadIdx.x != 0) return;
    const float norm = __double2float_rn(__dsqrt_rn(sum));
    p.norms[blockIdx.x] = norm;
    if (p.flag != nullptr && !te_is_finite(norm)) *p.flag = 1;
}

TE_KERNEL(te_l2norm_kernel, te_l2norm_params, (TE_L2NORM_THREADS, 4), sum_chunk(p))
TE_KERNEL(te_l2norm_root_kernel, te_l2norm_root_params, (TE_L2NORM_ADDERS), write_root(p))
