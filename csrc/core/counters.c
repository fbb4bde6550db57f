/* SPDX-License-Identifier: Apache-2.0 */
#include "core/counters.h"

#include <stdatomic.h>

#include "core/holders.h"

/* One number per counter: for each device its GEMMs by dtypes, its attentions by dtype and its
 * operators, for each device its GEMMs by scaling modes, then fallbacks. */
#define GEMMS (TE_DTYPE_COUNT * TE_DTYPE_COUNT)
#define ATTENTIONS (2 * TE_DTYPE_COUNT)
#define GEMM_AT(device, a, b)                                                                      \
    ((device) * (GEMMS + ATTENTIONS + TE_OP_COUNT) + (a)*TE_DTYPE_COUNT + (b))
#define ATTENTION_AT(device, dtype, backward)                                                      \
    (GEMM_AT(device, 0, 0) + GEMMS + (backward)*TE_DTYPE_COUNT + (dtype))
#define OP_AT(device, op) (GEMM_AT(device, 0, 0) + GEMMS + ATTENTIONS + (op))
#define SCALINGS (TE_SCALING_COUNT * TE_SCALING_COUNT)
#define SCALING_AT(device, a, b)                                                                   \
    (GEMM_AT(TE_DEVICE_COUNT, 0, 0) + (device)*SCALINGS + (a)*TE_SCALING_COUNT + (b))
#define FALLBACK_AT(reason) (SCALING_AT(TE_DEVICE_COUNT, 0, 0) + (reason))
#define EMULATED_AT(mode) (FALLBACK_AT(TE_FALLBACK_COUNT) + (mode))
#define MIXED_AT EMULATED_AT(TE_SCALING_COUNT) /* operands that no GEMM reads together */
#define COUNTERS (MIXED_AT + 1)

/* Less what threads had kept of them at the last reset. */
static _Atomic int64_t counts[COUNTERS];

/* The pairs of operand dtypes that a GEMM accepts. */
#define GEMM_PAIRS(X, DEVICE, device)                                                              \
    X(DEVICE, device, F32, f32, F32, f32)                                                          \
    X(DEVICE, device, F16, f16, F16, f16)                                                          \
    X(DEVICE, device, BF16, bf16, BF16, bf16)                                                      \
    X(DEVICE, device, E4M3, e4m3, E4M3, e4m3)                                                      \
    X(DEVICE, device, E4M3, e4m3, E5M2, e5m2)                                                      \
    X(DEVICE, device, E5M2, e5m2, E4M3, e4m3)

/* The pairs of scaling modes that a GEMM accepts besides those per tensor. */
#define SCALING_PAIRS(X, DEVICE, device)                                                           \
    X(DEVICE, device, ROW, row, ROW, row)                                                          \
    X(DEVICE, device, BLOCK_1D, block_1d, BLOCK_1D, block_1d)                                      \
    X(DEVICE, device, BLOCK_1D, block_1d, BLOCK_2D, block_2d)                                      \
    X(DEVICE, device, BLOCK_2D, block_2d, BLOCK_1D, block_1d)

/* The dtypes that an attention accepts. */
#define ATTENTION_DTYPES(X, DEVICE, device)                                                        \
    X(DEVICE, device, F32, f32)                                                                    \
    X(DEVICE, device, F16, f16) X(DEVICE, device, BF16, bf16) X(DEVICE, device, E4M3, e4m3)

/* Made from the same lists as the numbers, so none can be missing or wrong. */
static const char *const names[COUNTERS] = {
#define X(DEVICE, device, A, a, B, b)                                                              \
    [GEMM_AT(TE_DEVICE_##DEVICE, TE_DTYPE_##A, TE_DTYPE_##B)] = "gemm." #device "." #a "." #b,
    GEMM_PAIRS(X, CPU, cpu) GEMM_PAIRS(X, CUDA, cuda)
#undef X
#define X(DEVICE, device, A, a, B, b)                                                              \
    [SCALING_AT(TE_DEVICE_##DEVICE, TE_SCALING_##A, TE_SCALING_##B)] =                             \
        "scaling." #device "." #a "." #b,
        SCALING_PAIRS(X, CPU, cpu) SCALING_PAIRS(X, CUDA, cuda)
#undef X
#define X(DEVICE, device, A, a)                                                                    \
    [ATTENTION_AT(TE_DEVICE_##DEVICE, TE_DTYPE_##A, 0)] = "attention." #device "." #a,             \
                                                    [ATTENTION_AT(TE_DEVICE_##DEVICE,              \
                                                                  TE_DTYPE_##A, 1)] =              \
                                                        "attention_backward." #device "." #a,
            ATTENTION_DTYPES(X, CPU, cpu) ATTENTION_DTYPES(X, CUDA, cuda)
#undef X
#define X(NAME, name)                                                                              \
    [OP_AT(TE_DEVICE_CPU, TE_OP_##NAME)] = "op.cpu." #name,                                        \
                          [OP_AT(TE_DEVICE_CUDA, TE_OP_##NAME)] = "op.cuda." #name,
                TE_OPS(X)
#undef X
#define X(NAME, name) [FALLBACK_AT(TE_FALLBACK_##NAME)] = "fallback." #name,
                    TE_FALLBACKS(X)
#undef X
#define X(NAME, name, along, across) [EMULATED_AT(TE_SCALING_##NAME)] = "emulated." #name,
                        TE_SCALING_MODES(X)
#undef X
                            [MIXED_AT] = "emulated.mixed",
};

static void count(int at)
{
    (void)atomic_fetch_add_explicit(&counts[at], 1, memory_order_relaxed);
}

void te_count_gemm(te_device_type device, te_dtype a, te_dtype b)
{
    count(GEMM_AT((int)device, (int)a, (int)b));
}

void te_count_scaling(te_device_type device, te_scaling_mode a, te_scaling_mode b)
{
    if (a > TE_SCALING_TENSOR) count(SCALING_AT((int)device, (int)a, (int)b));
}

void te_count_attention(te_device_type device, te_dtype dtype, int backward)
{
    count(ATTENTION_AT((int)device, (int)dtype, backward));
}

void te_count_op(te_device_type device, te_op op)
{
    te_holder *mine = te_holder_of_thread();
    if (mine != NULL) {
        te_holder_count(mine, device, op);
    } else {
        count(OP_AT((int)device, (int)op));
    }
}

void te_count_fallback(te_fallback reason)
{
    count(FALLBACK_AT((int)reason));
}

void te_count_emulated(te_scaling_mode mode)
{
    count(EMULATED_AT((int)mode));
}

void te_count_mixed(void)
{
    count(MIXED_AT);
}

/* The part of a counter that threads keep: what they have run of an operator. It only grows. */
static int64_t kept_by_threads(int at)
{
    int64_t sum = 0;
    for (int device = 0; device < TE_DEVICE_COUNT; device++) {
        const int op = at - OP_AT(device, 0);
        if (op < 0 || op >= TE_OP_COUNT) continue;
        for (const te_holder *one = te_holders_all(); one != NULL; one = one->next) {
            sum += atomic_load_explicit(&one->ran[device][op], memory_order_relaxed);
        }
    }
    return sum;
}

te_status te_counters_read(te_counter *out, size_t capacity, size_t *found)
{
    *found = 0;
    for (int at = 0; at < COUNTERS; at++) {
        int64_t value = atomic_load_explicit(&counts[at], memory_order_relaxed);
        value += kept_by_threads(at);
        if (value == 0 || names[at] == NULL) continue;
        if (out != NULL && *found < capacity) out[*found] = (te_counter){names[at], value};
        ++*found;
    }
    return TE_OK;
}

void te_counters_reset(void)
{
    for (int at = 0; at < COUNTERS; at++) {
        atomic_store_explicit(&counts[at], -kept_by_threads(at), memory_order_relaxed);
    }
}
