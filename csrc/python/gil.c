/* SPDX-License-Identifier: Apache-2.0
 *
 * gil.c - native calls that run without the GIL, and what stops them: Ctrl-C runs a Python signal
 * handler, which needs the GIL and the main thread. CPython says itself where it is not the main
 * thread.
 */
#include "python/state.h"

/* 1, with the exception set, where a signal handler raised. */
static int run_signal_handlers(void *self)
{
    tepy_without_gil *without = self;
    int raised;
    PyEval_RestoreThread(without->thread);
    raised = PyErr_CheckSignals() != 0;
    without->thread = PyEval_SaveThread();
    return raised;
}

void tepy_leave_gil(tepy_without_gil *without)
{
    without->outer = te_set_interrupt((te_interrupt){run_signal_handlers, without});
    without->thread = PyEval_SaveThread();
}

void tepy_retake_gil(tepy_without_gil *without)
{
    if (without->thread == NULL) return;
    PyEval_RestoreThread(without->thread);
    without->thread = NULL;
    (void)te_set_interrupt(without->outer);
}
