/* SPDX-License-Identifier: Apache-2.0
 *
 * isa.c - which table of inner loops this processor runs.
 */
#include <stdatomic.h>

#include "core/status.h"
#include "cpu/isa.h"

static _Atomic(const te_cpu_kernels *) chosen;

/* The table of an instruction set, or NULL where the processor or the build lacks it. */
static const te_cpu_kernels *find(te_cpu_isa isa)
{
    if (isa == TE_CPU_ISA_PORTABLE) return &te_cpu_kernels_portable;
#if defined(TE_CPU_X86)
    __builtin_cpu_init();
    int avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    if (isa == TE_CPU_ISA_AVX2 && avx2) return &te_cpu_kernels_avx2;
    if (isa == TE_CPU_ISA_AVX512 && avx2 && __builtin_cpu_supports("avx512f") &&
        __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512dq")) {
        return &te_cpu_kernels_avx512;
    }
#endif
    return NULL;
}

const te_cpu_kernels *te_cpu_kernels_get(void)
{
    const te_cpu_kernels *kernels = atomic_load_explicit(&chosen, memory_order_acquire);
    /* Threads that meet here first all find the same table. */
    for (int isa = TE_CPU_ISA_COUNT - 1; kernels == NULL; isa--) {
        kernels = find((te_cpu_isa)isa);
        if (kernels != NULL) atomic_store_explicit(&chosen, kernels, memory_order_release);
    }
    return kernels;
}

te_status te_cpu_force_isa(int isa)
{
    const te_cpu_kernels *kernels = NULL;
    TE_FAIL_IF(isa >= TE_CPU_ISA_COUNT, TE_ERROR_INVALID, "instruction set %d is not below %d", isa,
               TE_CPU_ISA_COUNT);
    if (isa >= 0) {
        kernels = find((te_cpu_isa)isa);
        TE_FAIL_IF(kernels == NULL, TE_ERROR_UNSUPPORTED, "this processor lacks instruction set %d",
                   isa);
    }
    atomic_store_explicit(&chosen, kernels, memory_order_release);
    return TE_OK;
}
