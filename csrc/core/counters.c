/* SPDX-License-Identifier: Apache-2.0 */
#include "core/counters.h"

#include <stdatomic.h>

#define GEMM_COUNT (TE_DEVICE_COUNT * TE_DTYPE_COUNT * TE_DTYPE_COUNT)

static _Atomic int64_t gemm_count[TE_DEVICE_COUNT][TE_DTYPE_COUNT][TE_DTYPE_COUNT];
static _Atomic int64_t op_count[TE_DEVICE_COUNT][TE_OP_COUNT];
static _Atomic int64_t fallback_count[TE_FALLBACK_COUNT];

/* Names are made from the same lists as the tables, so none can be missing or wrong. */

static const char *const fallback_name[TE_FALLBACK_COUNT] = {
#define X(NAME, name) [TE_FALLBACK_##NAME] = "fallback." #name,
    TE_FALLBACKS(X)
#undef X
};

static const char *const op_counter_name[TE_DEVICE_COUNT][TE_OP_COUNT] = {
#define X(NAME, name) [TE_OP_##NAME] = "op.cpu." #name,
    [TE_DEVICE_CPU] = {TE_OPS(X)},
#undef X
#define X(NAME, name) [TE_OP_##NAME] = "op.cuda." #name,
    [TE_DEVICE_CUDA] = {TE_OPS(X)},
#undef X
};

/* The pairs of operand dtypes that a GEMM accepts. */
#define GEMM_PAIRS(X, device)                                                                      \
    X(device, F32, f32, F32, f32)                                                                  \
    X(device, F16, f16, F16, f16)                                                                  \
    X(device, BF16, bf16, BF16, bf16)                                                              \
    X(device, E4M3, e4m3, E4M3, e4m3)                                                              \
    X(device, E4M3, e4m3, E5M2, e5m2)                                                              \
    X(device, E5M2, e5m2, E4M3, e4m3)

#define DEVICE_cpu TE_DEVICE_CPU
#define DEVICE_cuda TE_DEVICE_CUDA

static const char *const gemm_counter_name[TE_DEVICE_COUNT][TE_DTYPE_COUNT][TE_DTYPE_COUNT] = {
#define X(device, A, a, B, b)                                                                      \
    [DEVICE_##device][TE_DTYPE_##A][TE_DTYPE_##B] = "gemm." #device "." #a "." #b,
    GEMM_PAIRS(X, cpu) GEMM_PAIRS(X, cuda)
#undef X
};

void te_count_gemm(te_device_type device, te_dtype a, te_dtype b)
{
    (void)atomic_fetch_add_explicit(&gemm_count[device][a][b], 1, memory_order_relaxed);
}

void te_count_op(te_device_type device, te_op op)
{
    (void)atomic_fetch_add_explicit(&op_count[device][op], 1, memory_order_relaxed);
}

void te_count_fallback(te_fallback reason)
{
    (void)atomic_fetch_add_explicit(&fallback_count[reason], 1, memory_order_relaxed);
}

typedef struct counter_sink {
    te_counter *out;
    size_t capacity, count;
} counter_sink;

static void emit(counter_sink *sink, const char *name, _Atomic int64_t *counter)
{
    int64_t value = atomic_load_explicit(counter, memory_order_relaxed);
    if (value == 0 || name == NULL) return;
    if (sink->count < sink->capacity) {
        sink->out[sink->count].name = name;
        sink->out[sink->count].value = value;
    }
    sink->count++;
}

te_status te_counters_read(te_counter *out, size_t capacity, size_t *count)
{
    counter_sink sink = {out, out != NULL ? capacity : 0, 0};
    for (int device = 0; device < TE_DEVICE_COUNT; device++) {
        for (int a = 0; a < TE_DTYPE_COUNT; a++) {
            for (int b = 0; b < TE_DTYPE_COUNT; b++) {
                emit(&sink, gemm_counter_name[device][a][b], &gemm_count[device][a][b]);
            }
        }
        for (int op = 0; op < TE_OP_COUNT; op++) {
            emit(&sink, op_counter_name[device][op], &op_count[device][op]);
        }
    }
    for (int reason = 0; reason < TE_FALLBACK_COUNT; reason++) {
        emit(&sink, fallback_name[reason], &fallback_count[reason]);
    }
    *count = sink.count;
    return TE_OK;
}

void te_counters_reset(void)
{
    for (int i = 0; i < GEMM_COUNT; i++) {
        atomic_store_explicit(&(&gemm_count[0][0][0])[i], 0, memory_order_relaxed);
    }
    for (int device = 0; device < TE_DEVICE_COUNT; device++) {
        for (int op = 0; op < TE_OP_COUNT; op++) {
            atomic_store_explicit(&op_count[device][op], 0, memory_order_relaxed);
        }
    }
    for (int reason = 0; reason < TE_FALLBACK_COUNT; reason++) {
        atomic_store_explicit(&fallback_count[reason], 0, memory_order_relaxed);
    }
}
