/* SPDX-License-Identifier: Apache-2.0
 *
 * run_py.h - one run of a plan (run_py.c), and the Python functions at its stages (staged_py.c).
 */
#ifndef TE_PYTHON_RUN_PY_H
#define TE_PYTHON_RUN_PY_H

#include "python/dispatch_py.h"
#include "python/plan_py.h"

/* A plan of up to so many buffers, of so many owners, runs without an allocation for them. */
#define TEPY_FEW_BUFFERS 48
#define TEPY_FEW_OWNERS 8

/* One run of a plan and what it holds until it is over. */
typedef struct tepy_run_call {
    tepy_state *state;
    tepy_plan *plan;
    const char *function;
    te_plan_call call;
    te_device device;
    int device_known;
    tepy_context *context;
    tepy_dl_managed *scratch; /* from the exchange allocator */
    PyObject *scratch_object; /* or from torch.empty */
    PyObject *saved;          /* a new tensor, for the result */
    PyObject *saved_given;    /* borrowed: the argument */
    PyObject *outputs;        /* the result */
    PyObject *selection;      /* keeps that of the call */
    int held_count;
    int32_t *slots;  /* two per owner; without owners functions at stages are told 0 */
    PyObject **held; /* what views point into */
    te_tensor *buffers;
    PyObject **plain; /* borrowed: the argument itself, where its view is dense */
    int32_t few_slots[2 * TEPY_FEW_OWNERS];
    te_leading leading[TE_SEQUENCES]; /* from here on what a run begins with is not 0 */
    PyObject *few_held[2 * TEPY_FEW_BUFFERS + 2];
    te_tensor few_buffers[TEPY_FEW_BUFFERS];
    PyObject *few_plain[TEPY_FEW_BUFFERS];
} tepy_run_call;

/* Python functions that take part in a run. */
typedef struct tepy_staged {
    tepy_run_call *run;
    PyObject *functions, *observer, *make_buffers; /* borrowed */
    PyObject *const *given;                        /* arguments of the plan */
    PyObject *buffers;                             /* what make_buffers gave; NULL before */
    PyObject **started; /* what first halves have returned, by number; NULL: there are none */
    PyObject *self;     /* capsule of this struct, of lend() */
    te_tensor *views;   /* all buffers, in a callback */
} tepy_staged;

/* Once the plan is known: checks the functions; -1 with an exception. */
int tepy_staged_begin(tepy_staged *staged, tepy_run_call *run, PyObject *const *args);
void tepy_staged_end(tepy_staged *staged);

#endif
