/* SPDX-License-Identifier: Apache-2.0
 *
 * update.cu - one pass over lists of tensors: Adam, gradient descent, products with a number, and
 * scales of amaxes.
 *
 * Bound by memory: a thread has all of its reads, eight elements of each list, in flight before it
 * decodes the first. dtypes are run-time numbers, the same for every thread; they decide the width
 * of an access and how its bits are read, not what is read first. A warp's accesses are contiguous.
 * New values that are cast are a source of tiles (tile_cast.cuh): 32 elements of each list a
 * thread.
 */
#include "update.h"
#include "tile.cuh"
#include "cast.cuh"

enum { ADAM, SGD, SCALE, RESCALE }; /* from SCALE on values are not read */
enum { GRAD = 0, VALUE = 4, MEAN = 8, SQUARE = 12, ROUNDED = 16 }; /* bits in `dtypes` */

#define DTYPE(p, list) ((int)((p).dtypes >> (list)) & 15)

template <int N> using te_wide = te_vector<te_f32, N>;
template <int N> using te_half = te_vector<te_bf16, N>;

/* A group of a list as it lies in memory: 16-bit elements fill half of the words. */
template <int N>
static __device__ __forceinline__ void fetch(te_wide<N> &to, int dtype, const unsigned char *from,
                                             te_index at, te_index count, bool whole)
{
    if (dtype == TE_STORE_F32) {
        to.load((const float *)from + at, whole, count);
    } else {
        te_half<N> half;
        half.load((const unsigned short *)from + at, whole, count);
#pragma unroll
        for (int i = 0; i < N / 2; i++) to.word[i] = half.word[i];
    }
}

template <int N>
static __device__ __forceinline__ float number(const te_wide<N> &from, int dtype, int j)
{
    const unsigned short half = (unsigned short)(from.word[j / 2] >> (j % 2 * 16));
    if (dtype == TE_STORE_F32) return __uint_as_float(from.word[j]);
    return dtype == TE_STORE_F16 ? te_decode<te_f16>(half) : te_decode<te_bf16>(half);
}

/* Writes values rounded to a dtype, and leaves them so. */
template <typename T, int N>
static __device__ __forceinline__ void put_as(float *values, unsigned char *to, te_index at,
                                              te_index count, bool whole)
{
    te_vector<T, N> out;
    out.encode(values);
    out.store((typename T::raw *)to + at, whole, count);
#pragma unroll
    for (int j = 0; j < N; j++) values[j] = out.value(j);
}

template <int N>
static __device__ __forceinline__ void put(float *values, int dtype, unsigned char *to, te_index at,
                                           te_index count, bool whole)
{
    if (dtype == TE_STORE_F32)
        put_as<te_f32, N>(values, to, at, count, whole);
    else if (dtype == TE_STORE_F16)
        put_as<te_f16, N>(values, to, at, count, whole);
    else
        put_as<te_bf16, N>(values, to, at, count, whole);
}

template <int N> struct te_group {
    te_wide<N> grad, value, mean, square;
    te_half<N> remainder;
};

template <int KIND, int N>
static __device__ __forceinline__ void read(te_group<N> &group, const te_update_common &p,
                                            const te_update_entry &e, te_index at, te_index count,
                                            bool whole)
{
    fetch(group.grad, DTYPE(p, GRAD), e.grad, at, count, whole);
    if (KIND >= SCALE) return;
    fetch(group.value, DTYPE(p, VALUE), e.value, at, count, whole);
    if (KIND == ADAM || e.mean != nullptr)
        fetch(group.mean, DTYPE(p, MEAN), e.mean, at, count, whole);
    if (KIND == ADAM) {
        fetch(group.square, DTYPE(p, SQUARE), e.square, at, count, whole);
        if (e.remainder != nullptr)
            group.remainder.load((unsigned short *)e.remainder + at, whole, count);
    }
}

/* Writes the new values, in both halves where there are remainders. */
template <int KIND, int N>
static __device__ __forceinline__ void write_value(float *values, const te_update_common &p,
                                                   const te_update_entry &e, te_index at,
                                                   te_index count, bool whole)
{
    if (KIND < SCALE && e.rounded != nullptr) {
        float copy[N];
#pragma unroll
        for (int j = 0; j < N; j++) copy[j] = values[j];
        put<N>(copy, DTYPE(p, ROUNDED), e.rounded, at, count, whole);
    }
    if (KIND == ADAM && e.remainder != nullptr) {
        te_half<N> high, low;
        high.clear();
        low.clear();
#pragma unroll
        for (int j = 0; j < N; j++) {
            high.put(j, (unsigned short)te_update_high(values[j]));
            low.put(j, (unsigned short)__float_as_uint(values[j]));
        }
        high.store((unsigned short *)e.value + at, whole, count);
        low.store((unsigned short *)e.remainder + at, whole, count);
        return;
    }
    put<N>(values, DTYPE(p, VALUE), e.value, at, count, whole);
}

/* Leaves the new values, as they are written, in `value`. Whether a gradient is Inf or NaN, where
 * that is asked. */
template <int KIND, int N>
static __device__ __forceinline__ bool step(const te_group<N> &group, const te_update_numbers &n,
                                            const te_update_common &p, const te_update_entry &e,
                                            te_index at, te_index count, bool whole, float value[N])
{
    float grad[N], mean[N], square[N];
    bool infinite = false;
    if (count <= 0) return false;
#pragma unroll
    for (int j = 0; j < N; j++) {
        grad[j] = number(group.grad, DTYPE(p, GRAD), j);
        infinite |= !te_is_finite(grad[j]); /* what is beyond the end is 0 */
        grad[j] = __fmul_rn(grad[j], n.grad_scale);
        if (KIND == RESCALE) grad[j] = te_update_rescale(&n, grad[j], &mean[j]);
        if (KIND >= SCALE) continue;
        value[j] = number(group.value, DTYPE(p, VALUE), j);
        if (KIND == ADAM && e.remainder != nullptr)
            value[j] = te_update_join(group.value.word[j / 2] >> (j % 2 * 16) & 0xffffU,
                                      group.remainder.get(j));
        mean[j] = KIND == ADAM || e.mean != nullptr ? number(group.mean, DTYPE(p, MEAN), j) : 0.0F;
        if (KIND == ADAM) {
            square[j] = number(group.square, DTYPE(p, SQUARE), j);
            value[j] = te_update_adam(&n, grad[j], value[j], &mean[j], &square[j]);
        } else {
            value[j] = te_update_sgd(&n, grad[j], value[j], &mean[j]);
        }
    }
    write_value<KIND, N>(KIND >= SCALE ? grad : value, p, e, at, count, whole);
    if (KIND == ADAM || KIND == RESCALE || (KIND == SGD && e.mean != nullptr && n.momentum != 0.0F))
        put<N>(mean, DTYPE(p, MEAN), e.mean, at, count, whole);
    if (KIND == ADAM) put<N>(square, DTYPE(p, SQUARE), e.square, at, count, whole);
    if (KIND < SCALE && te_update_writes_grad(&n))
        put<N>(grad, DTYPE(p, GRAD), e.grad, at, count, whole);
    return infinite;
}

/* The numbers of the call, those on the device read. */
template <int KIND>
static __device__ __forceinline__ te_update_numbers numbers_of(const te_update_common &p)
{
    te_update_numbers n = p.numbers;
    if (p.lr_at != nullptr) n.lr = *p.lr_at;
    if (p.grad_scale_at != nullptr) n.grad_scale = *p.grad_scale_at;
    if (KIND == ADAM && p.step_at != nullptr && (n.flags & TE_STEP_CORRECTED) != 0) {
        n.correction1 = te_update_correction(p.beta1, *p.step_at);
        n.correction2 = te_update_correction(p.beta2, *p.step_at);
    }
    return n;
}

static __device__ __forceinline__ unsigned first_of(const te_update_entry &e)
{
    return e.first;
}
static __device__ __forceinline__ unsigned first_of(const te_update_cast_entry &e)
{
    return e.lists.first;
}

/* The entry that a block belongs to: the last one that begins at or before it. */
template <typename P> static __device__ __forceinline__ int find(const P &p)
{
    int low = 0, high = p.count - 1;
    while (low < high) {
        const int middle = (low + high + 1) / 2;
        if (first_of(p.entries[middle]) <= blockIdx.x)
            low = middle;
        else
            high = middle - 1;
    }
    return low;
}

template <int KIND> static __device__ __forceinline__ void run(const te_update_params &p)
{
    constexpr int N = TE_UPDATE_GROUP, apart = TE_UPDATE_THREADS * N;
    const te_update_entry &e = p.entries[find(p)];
    const te_update_common &c = p.common;
    bool infinite = false;
    if (KIND != SCALE && c.flag != nullptr && *c.flag != 0) return;
    const te_update_numbers n = numbers_of<KIND>(c);
    const te_index begin = (te_index)(blockIdx.x - e.first) * TE_UPDATE_CHUNK;
    const te_index end = min(begin + TE_UPDATE_CHUNK, e.count);
    for (te_index at = begin + threadIdx.x * N; at < end; at += apart * TE_UPDATE_UNROLL) {
        te_group<N> group[TE_UPDATE_UNROLL];
        const bool whole = e.aligned && at + apart * (TE_UPDATE_UNROLL - 1) + N <= end;
        if (whole) {
#pragma unroll
            for (int i = 0; i < TE_UPDATE_UNROLL; i++)
                read<KIND, N>(group[i], c, e, at + i * apart, N, true);
        } else {
#pragma unroll
            for (int i = 0; i < TE_UPDATE_UNROLL; i++)
                read<KIND, N>(group[i], c, e, at + i * apart, end - at - i * apart, false);
        }
#pragma unroll
        for (int i = 0; i < TE_UPDATE_UNROLL; i++) {
            float value[N];
            infinite |= step<KIND, N>(group[i], n, c, e, at + i * apart, end - at - i * apart,
                                      whole, value);
        }
    }
    if (KIND == SCALE && infinite && c.flag != nullptr) *c.flag = 1;
}

/* Four new values of a row as bytes, 0 at and beyond `count`; raises the maximum. */
static __device__ __forceinline__ unsigned bytes_of(const float value[4], float scale, int e5m2,
                                                    te_index count, float &amax)
{
    unsigned bytes;
#pragma unroll
    for (int j = 0; j < 4; j++)
        if (j < count) amax = fmaxf(amax, fabsf(value[j]));
    if (e5m2)
        bytes = te_fp8_word<te_e5m2>(value[0] * scale, value[1] * scale, value[2] * scale,
                                     value[3] * scale);
    else
        bytes = te_fp8_word<te_e4m3>(value[0] * scale, value[1] * scale, value[2] * scale,
                                     value[3] * scale);
    if (count >= 4) return bytes;
    return count <= 0 ? 0U : bytes & ((1U << ((int)count * 8)) - 1U);
}

/* The transposed tile, 16 bytes a thread. */
static __device__ __forceinline__ void write_turned(const unsigned *tile, const te_cast_target &to,
                                                    te_index left, te_index top)
{
    const int column = threadIdx.x >> 2, quad = threadIdx.x & 3;
    te_vector<te_e4m3, 16> bytes;
    bytes.load_aligned(tile + te_tile_word(column, quad * 4));
    if (left + column < to.column.rows)
        bytes.store(te_at<te_e4m3>(to.column, left + column, top + quad * 16),
                    to.column_aligned != 0, to.column.columns - top - quad * 16);
}

/* Updates a tile of 64 x 64 and casts its new values. A thread has 4 x 4 elements: 16 neighbours
 * read 256 bytes of a row of fp32, and its bytes are turned in registers. */
template <int KIND> static __device__ __forceinline__ void run_cast(const te_update_cast_params &p)
{
    constexpr int N = 4;
    const te_update_cast_entry &entry = p.entries[find(p)];
    const te_cast_target &to = entry.to;
    const te_update_common &c = p.common;
    __shared__ __align__(16) unsigned tile[TE_TILE_WORDS];
    __shared__ unsigned scratch[TE_UPDATE_THREADS / 32];
    if (c.flag != nullptr && *c.flag != 0) return;
    te_update_entry e = entry.lists;
    e.rounded = e.remainder = nullptr; /* there are none beside a cast */
    const te_update_numbers n = numbers_of<KIND>(c);
    const unsigned at = blockIdx.x - e.first, down = at / entry.across;
    const int lane = threadIdx.x % 16, group = threadIdx.x / 16;
    const te_index left = (te_index)(at - down * entry.across) * TE_TILE;
    const te_index top = (te_index)down * TE_TILE;
    const te_index column = left + lane * N, row = top + group * N;
    const bool whole = e.aligned && row + N <= entry.rows && column + N <= entry.columns;
    float amax = 0.0F;
    te_group<N> in[N];
    unsigned words[N];
#pragma unroll
    for (int i = 0; i < N; i++)
        read<KIND, N>(in[i], c, e, (row + i) * entry.columns + column,
                      row + i < entry.rows ? entry.columns - column : 0, whole);
    /* The loads come before anything waits for the scale. */
    const float scale = te_read_scale<TE_UPDATE_THREADS>(to, scratch);
    if (to.scales[0] != nullptr && (at | threadIdx.x) == 0) te_write_scales(to, scale);
#pragma unroll
    for (int i = 0; i < N; i++) {
        const te_index count = row + i < entry.rows ? entry.columns - column : 0;
        float value[N] = {};
        (void)step<KIND, N>(in[i], n, c, e, (row + i) * entry.columns + column, count, whole,
                            value);
        words[i] = bytes_of(value, scale, to.e5m2, count, amax);
        if (to.row.data != nullptr && row + i < to.row.rows) {
            te_vector<te_e4m3, N> bytes;
            bytes.word[0] = words[i];
            bytes.store(te_at<te_e4m3>(to.row, row + i, column), to.row_aligned != 0,
                        to.row.columns - column);
        }
    }
    if (to.column.data != nullptr) {
        unsigned turned[N];
        te_transpose_4x4(words, turned);
#pragma unroll
        for (int j = 0; j < N; j++) tile[te_tile_word(lane * N + j, group)] = turned[j];
        __syncthreads();
        write_turned(tile, to, left, top);
    }
    if (to.amax != nullptr) {
        amax = te_block_max<TE_UPDATE_THREADS>(amax, scratch);
        if (threadIdx.x == 0) te_raise(to.amax, amax);
    }
}

TE_KERNEL(te_update_adam_kernel, te_update_params, (TE_UPDATE_THREADS, 3), run<ADAM>(p))
TE_KERNEL(te_update_sgd_kernel, te_update_params, (TE_UPDATE_THREADS, 3), run<SGD>(p))
TE_KERNEL(te_update_scale_kernel, te_update_params, (TE_UPDATE_THREADS, 3), run<SCALE>(p))
TE_KERNEL(te_update_rescale_kernel, te_update_params, (TE_UPDATE_THREADS, 3), run<RESCALE>(p))
TE_KERNEL(te_update_adam_cast_kernel, te_update_cast_params, (TE_UPDATE_THREADS, 2),
          run_cast<ADAM>(p))
TE_KERNEL(te_update_sgd_cast_kernel, te_update_cast_params, (TE_UPDATE_THREADS, 2),
          run_cast<SGD>(p))
