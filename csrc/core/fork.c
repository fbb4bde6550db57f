/* SPDX-License-Identifier: Apache-2.0 */
#include "core/fork.h"

#include <stdatomic.h>

static _Atomic int32_t generation; /* changes in a child that has one thread yet */

int32_t te_fork_generation(void)
{
    return atomic_load_explicit(&generation, memory_order_relaxed);
}

static void count_fork(void)
{
    (void)atomic_fetch_add_explicit(&generation, 1, memory_order_relaxed);
}

__attribute__((constructor)) static void watch_forks(void)
{
    (void)pthread_atfork(NULL, NULL, count_fork);
}
