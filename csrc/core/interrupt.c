/* SPDX-License-Identifier: Apache-2.0 */
#define _POSIX_C_SOURCE 200809L /* clock_gettime */
#include "core/interrupt.h"

#include <time.h>

static _Thread_local te_interrupt current;
static _Thread_local int64_t asked; /* when, in nanoseconds */

te_interrupt te_set_interrupt(te_interrupt hook)
{
    te_interrupt old = current;
    current = hook;
    return old;
}

static int64_t now(void)
{
    struct timespec time;
    if (clock_gettime(CLOCK_MONOTONIC, &time) != 0) return 0;
    return (int64_t)time.tv_sec * 1000000000 + time.tv_nsec;
}

void te_interruptible_begin(te_interruptible *call)
{
    call->hook = current;
    atomic_init(&call->stopped, 0);
}

int te_interruptible_ask(te_interruptible *call)
{
    int64_t time;
    if (call->hook.check == NULL || te_interruptible_stopped(call)) {
        return te_interruptible_stopped(call);
    }
    time = now();
    if (time - asked < TE_INTERRUPT_PERIOD) return 0;
    asked = time;
    if (call->hook.check(call->hook.self) == 0) return 0;
    atomic_store_explicit(&call->stopped, 1, memory_order_relaxed);
    return 1;
}

int te_interrupt_asked(void)
{
    return current.check != NULL && current.check(current.self) != 0;
}
