/* SPDX-License-Identifier: Apache-2.0 */
#include "core/counters.h"

#include <stdatomic.h>
#include <stdio.h>

#include "core/fork.h"
#include "core/holders.h"

/* One number per counter: for each type of device its GEMMs by dtypes and by scaling modes, its
 * attentions by dtype and its operators; then fallbacks, and what was multiplied out. */
#define GEMMS (TE_DTYPE_COUNT * TE_DTYPE_COUNT)
#define SCALINGS (TE_SCALING_COUNT * TE_SCALING_COUNT)
#define ATTENTIONS (2 * TE_DTYPE_COUNT)
#define BY_DEVICE (GEMMS + SCALINGS + ATTENTIONS + TE_OP_COUNT)
#define GEMM_AT(device, a, b) ((device)*BY_DEVICE + (a)*TE_DTYPE_COUNT + (b))
#define SCALING_AT(device, a, b) ((device)*BY_DEVICE + GEMMS + (a)*TE_SCALING_COUNT + (b))
#define ATTENTION_AT(device, dtype, backward)                                                      \
    ((device)*BY_DEVICE + GEMMS + SCALINGS + (backward)*TE_DTYPE_COUNT + (dtype))
#define OP_AT(device, op) ((device)*BY_DEVICE + GEMMS + SCALINGS + ATTENTIONS + (op))
#define FALLBACK_AT(reason) (TE_DEVICE_COUNT * BY_DEVICE + (reason))
#define EMULATED_AT(mode) (FALLBACK_AT(TE_FALLBACK_COUNT) + (mode))
#define MIXED_AT EMULATED_AT(TE_SCALING_COUNT) /* operands that no GEMM reads together */
#define COUNTERS (MIXED_AT + 1)
#define NAME_SIZE 48

/* Less what threads had kept of them at the last reset. */
static _Atomic int64_t counts[COUNTERS];

static const char *const fallback_names[] = {
#define X(NAME, name) #name,
    TE_FALLBACKS(X)
#undef X
};
static const char *const scaling_names[] = {
#define X(NAME, name, along, across) #name,
    TE_SCALING_MODES(X)
#undef X
};

static void format_name_of_device(int at, char name[NAME_SIZE])
{
    const char *device = te_device_type_name((te_device_type)(at / BY_DEVICE));
    int rest = at % BY_DEVICE;
    if (rest < GEMMS) {
        (void)snprintf(name, NAME_SIZE, "gemm.%s.%s.%s", device,
                       te_dtype_name((te_dtype)(rest / TE_DTYPE_COUNT)),
                       te_dtype_name((te_dtype)(rest % TE_DTYPE_COUNT)));
    } else if ((rest -= GEMMS) < SCALINGS) {
        (void)snprintf(name, NAME_SIZE, "scaling.%s.%s.%s", device,
                       scaling_names[rest / TE_SCALING_COUNT],
                       scaling_names[rest % TE_SCALING_COUNT]);
    } else if ((rest -= SCALINGS) < ATTENTIONS) {
        (void)snprintf(name, NAME_SIZE, "attention%s.%s.%s",
                       rest < TE_DTYPE_COUNT ? "" : "_backward", device,
                       te_dtype_name((te_dtype)(rest % TE_DTYPE_COUNT)));
    } else {
        (void)snprintf(name, NAME_SIZE, "op.%s.%s", device, te_op_name((te_op)(rest - ATTENTIONS)));
    }
}

static void format_name(int at, char name[NAME_SIZE])
{
    if (at < FALLBACK_AT(0)) {
        format_name_of_device(at, name);
    } else if (at < EMULATED_AT(0)) {
        (void)snprintf(name, NAME_SIZE, "fallback.%s", fallback_names[at - FALLBACK_AT(0)]);
    } else {
        (void)snprintf(name, NAME_SIZE, "emulated.%s",
                       at == MIXED_AT ? "mixed" : scaling_names[at - EMULATED_AT(0)]);
    }
}

TE_PROCESS_LOCK(lock);

/* The same at each call: of a counter that is not 0, so its device is there. */
static const char *name_of(int at)
{
    static char names[COUNTERS][NAME_SIZE];
    (void)pthread_mutex_lock(&lock);
    if (names[at][0] == '\0') format_name(at, names[at]);
    (void)pthread_mutex_unlock(&lock);
    return names[at];
}

static void count(int at)
{
    (void)atomic_fetch_add_explicit(&counts[at], 1, memory_order_relaxed);
}

/* Backends of others tell of what they like. */
static int is_countable(te_device_type device, te_dtype a, te_dtype b)
{
    return te_device_type_dlpack(device) != 0 && te_dtype_bits(a) != 0 && te_dtype_bits(b) != 0;
}

void te_count_gemm(te_device_type device, te_dtype a, te_dtype b)
{
    if (is_countable(device, a, b)) count(GEMM_AT((int)device, (int)a, (int)b));
}

void te_count_scaling(te_device_type device, te_scaling_mode a, te_scaling_mode b)
{
    if (a > TE_SCALING_TENSOR) count(SCALING_AT((int)device, (int)a, (int)b));
}

void te_count_attention(te_device_type device, te_dtype dtype, int backward)
{
    if (is_countable(device, dtype, dtype)) {
        count(ATTENTION_AT((int)device, (int)dtype, backward != 0));
    }
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
    if ((int)mode >= 0 && mode < TE_SCALING_COUNT) count(EMULATED_AT((int)mode));
}

void te_count_mixed(void)
{
    count(MIXED_AT);
}

/* The part of a counter that threads keep: what they have run of an operator. It only grows. */
static int64_t kept_by_threads(int at)
{
    const int device = at / BY_DEVICE, op = at - OP_AT(device, 0);
    int64_t sum = 0;
    if (at >= FALLBACK_AT(0) || op < 0) return 0;
    for (const te_holder *one = te_holders_all(); one != NULL; one = one->next) {
        sum += atomic_load_explicit(&one->ran[device][op], memory_order_relaxed);
    }
    return sum;
}

te_status te_counters_read(te_counter *out, size_t capacity, size_t *found)
{
    *found = 0;
    for (int at = 0; at < COUNTERS; at++) {
        int64_t value = atomic_load_explicit(&counts[at], memory_order_relaxed);
        value += kept_by_threads(at);
        if (value == 0) continue;
        if (out != NULL && *found < capacity) out[*found] = (te_counter){name_of(at), value};
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
