/* SPDX-License-Identifier: Apache-2.0
 *
 * update.cu - one pass over lists of tensors: Adam, gradient descent, and products with a number.
 *
 * Bound by memory: a thread has all of its reads, eight elements of each list, in flight before it
 * decodes the first. dtypes are run-time numbers, the same for every thread; they decide the width
 * of an access and how its bits are read, not what is read first. A warp's accesses are contiguous.
 */
#include "update.h"
#include "vector.cuh"

enum { ADAM, SGD, SCALE };
enum { GRAD = 0, VALUE = 4, MEAN = 8, SQUARE = 12, ROUNDED = 16 }; /* bits in `dtypes` */

#define DTYPE(p, list) ((int)((p).dtypes >> (list)) & 15)

typedef te_vector<te_f32, TE_UPDATE_GROUP> te_wide;
typedef te_vector<te_bf16, TE_UPDATE_GROUP> te_half;

/* A group of a list as it lies in memory: 16-bit elements fill half of the words. */
static __device__ __forceinline__ void fetch(te_wide &to, int dtype, const unsigned char *from,
                                             te_index at, te_index count, bool whole)
{
    if (dtype == TE_STORE_F32) {
        to.load((const float *)from + at, whole, count);
    } else {
        te_half half;
        half.load((const unsigned short *)from + at, whole, count);
        to.word[0] = half.word[0], to.word[1] = half.word[1];
    }
}

static __device__ __forceinline__ float number(const te_wide &from, int dtype, int j)
{
    const unsigned short half = (unsigned short)(from.word[j / 2] >> (j % 2 * 16));
    if (dtype == TE_STORE_F32) return __uint_as_float(from.word[j]);
    return dtype == TE_STORE_F16 ? te_decode<te_f16>(half) : te_decode<te_bf16>(half);
}

template <typename T>
static __device__ __forceinline__ void put_as(const float *values, unsigned char *to, te_index at,
                                              te_index count, bool whole)
{
    te_vector<T, TE_UPDATE_GROUP> out;
    out.encode(values);
    out.store((typename T::raw *)to + at, whole, count);
}

static __device__ __forceinline__ void put(const float *values, int dtype, unsigned char *to,
                                           te_index at, te_index count, bool whole)
{
    if (dtype == TE_STORE_F32)
        put_as<te_f32>(values, to, at, count, whole);
    else if (dtype == TE_STORE_F16)
        put_as<te_f16>(values, to, at, count, whole);
    else
        put_as<te_bf16>(values, to, at, count, whole);
}

struct te_group {
    te_wide grad, value, mean, square;
    te_half remainder;
};

template <int KIND>
static __device__ __forceinline__ void read(te_group &group, const te_update_params &p,
                                            const te_update_entry &e, te_index at, te_index count,
                                            bool whole)
{
    fetch(group.grad, DTYPE(p, GRAD), e.grad, at, count, whole);
    if (KIND == SCALE) return;
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
template <int KIND>
static __device__ __forceinline__ void write_value(const float *values, const te_update_params &p,
                                                   const te_update_entry &e, te_index at,
                                                   te_index count, bool whole)
{
    if (KIND != SCALE && e.rounded != nullptr)
        put(values, DTYPE(p, ROUNDED), e.rounded, at, count, whole);
    if (KIND == ADAM && e.remainder != nullptr) {
        te_half high, low;
        high.clear();
        low.clear();
#pragma unroll
        for (int j = 0; j < TE_UPDATE_GROUP; j++) {
            high.put(j, (unsigned short)te_update_high(values[j]));
            low.put(j, (unsigned short)__float_as_uint(values[j]));
        }
        high.store((unsigned short *)e.value + at, whole, count);
        low.store((unsigned short *)e.remainder + at, whole, count);
        return;
    }
    put(values, DTYPE(p, VALUE), e.value, at, count, whole);
}

/* Whether a gradient is Inf or NaN, where that is asked. */
template <int KIND>
static __device__ __forceinline__ bool step(const te_group &group, const te_update_numbers &n,
                                            const te_update_params &p, const te_update_entry &e,
                                            te_index at, te_index count, bool whole)
{
    float grad[TE_UPDATE_GROUP], value[TE_UPDATE_GROUP], mean[TE_UPDATE_GROUP];
    float square[TE_UPDATE_GROUP];
    bool infinite = false;
    if (count <= 0) return false;
#pragma unroll
    for (int j = 0; j < TE_UPDATE_GROUP; j++) {
        grad[j] = number(group.grad, DTYPE(p, GRAD), j);
        infinite |= !te_is_finite(grad[j]); /* what is beyond the end is 0 */
        grad[j] = __fmul_rn(grad[j], n.grad_scale);
        if (KIND == SCALE) continue;
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
    write_value<KIND>(KIND == SCALE ? grad : value, p, e, at, count, whole);
    if (KIND == ADAM) {
        put(mean, DTYPE(p, MEAN), e.mean, at, count, whole);
        put(square, DTYPE(p, SQUARE), e.square, at, count, whole);
    } else if (KIND == SGD && e.mean != nullptr && n.momentum != 0.0F) {
        put(mean, DTYPE(p, MEAN), e.mean, at, count, whole);
    }
    if (KIND != SCALE && (n.flags & TE_STEP_WRITE_GRAD) != 0)
        put(grad, DTYPE(p, GRAD), e.grad, at, count, whole);
    return infinite;
}

/* The entry that a block belongs to: the last one that begins at or before it. */
static __device__ __forceinline__ int find(const te_update_params &p)
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

template <int KIND> static __device__ __forceinline__ void run(const te_update_params &p)
{
    constexpr int apart = TE_UPDATE_THREADS * TE_UPDATE_GROUP;
    const te_update_entry &e = p.entries[find(p)];
    te_update_numbers n = p.numbers;
    bool infinite = false;
    if (KIND != SCALE && p.flag != nullptr && *p.flag != 0) return;
    if (p.lr_at != nullptr) n.lr = *p.lr_at;
    if (p.grad_scale_at != nullptr) n.grad_scale = *p.grad_scale_at;
    if (KIND == ADAM && p.step_at != nullptr && (n.flags & TE_STEP_CORRECTED) != 0) {
        n.correction1 = te_update_correction(p.beta1, *p.step_at);
        n.correction2 = te_update_correction(p.beta2, *p.step_at);
    }
    const te_index begin = (te_index)(blockIdx.x - e.first) * TE_UPDATE_CHUNK;
    const te_index end = min(begin + TE_UPDATE_CHUNK, e.count);
    for (te_index at = begin + threadIdx.x * TE_UPDATE_GROUP; at < end;
         at += apart * TE_UPDATE_UNROLL) {
        te_group group[TE_UPDATE_UNROLL];
        const bool whole =
            e.aligned && at + apart * (TE_UPDATE_UNROLL - 1) + TE_UPDATE_GROUP <= end;
        if (whole) {
#pragma unroll
            for (int i = 0; i < TE_UPDATE_UNROLL; i++)
                read<KIND>(group[i], p, e, at + i * apart, TE_UPDATE_GROUP, true);
        } else {
#pragma unroll
            for (int i = 0; i < TE_UPDATE_UNROLL; i++)
                read<KIND>(group[i], p, e, at + i * apart, end - at - i * apart, false);
        }
#pragma unroll
        for (int i = 0; i < TE_UPDATE_UNROLL; i++)
            infinite |= step<KIND>(group[i], n, p, e, at + i * apart, end - at - i * apart, whole);
    }
    if (KIND == SCALE && infinite && p.flag != nullptr) *p.flag = 1;
}

TE_KERNEL(te_update_adam_kernel, te_update_params, (TE_UPDATE_THREADS, 3), run<ADAM>(p))
TE_KERNEL(te_update_sgd_kernel, te_update_params, (TE_UPDATE_THREADS, 3), run<SGD>(p))
TE_KERNEL(te_update_scale_kernel, te_update_params, (TE_UPDATE_THREADS, 3), run<SCALE>(p))
