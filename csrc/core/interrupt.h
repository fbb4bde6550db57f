/* SPDX-License-Identifier: Apache-2.0
 *
 * interrupt.h - how an operator that computes for seconds finds out that it shall stop.
 *
 * The hook belongs to the thread that called (te_set_interrupt) and is asked on that thread only,
 * at most once per TE_INTERRUPT_PERIOD; the threads that help it read a flag.
 */
#ifndef TE_CORE_INTERRUPT_H
#define TE_CORE_INTERRUPT_H

#include <stdatomic.h>

#include "transformer_engine.h"

enum { TE_INTERRUPT_PERIOD = 100000000 }; /* nanoseconds */

/* One call that may be stopped; lives on the calling thread's stack. */
typedef struct te_interruptible {
    te_interrupt hook;
    _Atomic int stopped;
} te_interruptible;

/* Takes the hook of this thread. */
void te_interruptible_begin(te_interruptible *call);
/* Asks the hook where it is time to; for the calling thread alone. Returns whether to stop. */
int te_interruptible_ask(te_interruptible *call);
/* Asks the hook of this thread now; whether to stop. */
int te_interrupt_asked(void);
/* Whether to stop; for every thread. */
static inline int te_interruptible_stopped(te_interruptible *call)
{
    return atomic_load_explicit(&call->stopped, memory_order_relaxed);
}

#endif
