/* SPDX-License-Identifier: Apache-2.0
 *
 * dispatch.c - what a call of an operator costs a caller in C, part by part: one line
 * "nanoseconds what" each. benchmarks/dispatch.py builds it against the library and runs it.
 *
 * A backend that does nothing stands in front of the built-in one, so what is left of a call is
 * this library's own. Each figure is the least of many turns, and those of one turn follow each
 * other.
 */
#define _POSIX_C_SOURCE 200809L

#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include <transformer_engine.h>

#include "core/backend.h"
#include "core/check.h"
#include "core/counters.h"

typedef struct subject {
    te_context *context;
    te_amax_args args;
    te_fill_args fill;
    te_op_table *table;
    te_op_slot slot;
} subject;

static te_status nothing(void *self, te_context *context, const void *args, void *stream)
{
    (void)self, (void)context, (void)args, (void)stream;
    return TE_OK;
}

/* Takes what the subject has: its kind of element, and whole lines. */
static te_status takes(void *self, te_context *context, const void *args)
{
    const te_tensor *output = &((const te_fill_args *)args)->output;
    (void)self, (void)context;
    return output->dtype == TE_DTYPE_F32 && output->shape[output->ndim - 1] % 4 == 0
               ? TE_OK
               : TE_ERROR_UNSUPPORTED;
}

/* ---- what is measured: `count` times each; what fails is counted ----------------------------- */

#define LOOP(name, ...)                                                                            \
    static long name(const subject *s, long count)                                                 \
    {                                                                                              \
        long failed = 0;                                                                           \
        (void)s;                                                                                   \
        for (long i = 0; i < count; i++) {                                                         \
            __asm__ volatile("" ::: "memory"); /* nothing is carried from one turn to the next */  \
            __VA_ARGS__                                                                            \
        }                                                                                          \
        return failed;                                                                             \
    }

LOOP(loop, )
LOOP(pointer, failed += s->slot.function(s->slot.self, s->context, &s->args, NULL) != TE_OK;)
LOOP(hold, te_op_table_release(te_op_table_acquire(TE_DEVICE_CPU));)
LOOP(check_size, te_any_args whole; const void *args = &s->args;
     failed += te_check_size(TE_OP_AMAX, args, &whole, &args) != TE_OK;)
LOOP(check_args,
     failed += te_check_args(TE_OP_AMAX, te_context_device(s->context), &s->args) != TE_OK;)
LOOP(check_memory, failed += te_check_memory(TE_OP_AMAX, &s->args) != TE_OK;)
LOOP(count_op, te_count_op(TE_DEVICE_CPU, TE_OP_AMAX);)
LOOP(checks, te_any_args whole; const void *args = &s->args;
     failed += te_check_size(TE_OP_AMAX, args, &whole, &args) != TE_OK ||
               te_context_check(s->context) != TE_OK ||
               te_check_args(TE_OP_AMAX, te_context_device(s->context), args) != TE_OK ||
               te_check_memory(TE_OP_AMAX, args) != TE_OK;)
LOOP(run_checked, failed += te_op_run_checked(s->context, TE_OP_AMAX, &s->args, NULL) != TE_OK;)
LOOP(run_asking, failed += te_op_run_checked(s->context, TE_OP_FILL, &s->fill, NULL) != TE_OK;)
LOOP(run_in, failed += te_op_run_in((te_op_candidates){NULL, s->table}, s->context, TE_OP_AMAX,
                                    &s->args, NULL) != TE_OK;)
LOOP(run, failed += te_amax(s->context, &s->args, NULL) != TE_OK;)

static const struct {
    const char *name;
    long (*loop)(const subject *s, long count);
} measures[] = {
    {"loop", loop},
    {"slot through a pointer", pointer},
    {"acquire and release", hold},
    {"check size", check_size},
    {"check args", check_args},
    {"check memory", check_memory},
    {"checks", checks},
    {"count", count_op},
    {"te_op_run_checked", run_checked},
    {"te_op_run_checked with supports", run_asking},
    {"te_op_run_in", run_in},
    {"te_amax", run},
};
enum { MEASURES = sizeof measures / sizeof measures[0] };

static double seconds(void)
{
    struct timespec now;
    (void)clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

int main(int argc, char **argv)
{
    static float input[4], partials[TE_AMAX_PARTIALS];
    const long count = argc > 1 ? strtol(argv[1], NULL, 10) : 100000;
    const long turns = argc > 2 ? strtol(argv[2], NULL, 10) : 50;
    te_backend backend = {.size = sizeof backend, .name = "nothing", .priority = 1};
    double least[MEASURES];
    const te_tensor matrix = {
        .data = input, .dtype = TE_DTYPE_F32, .ndim = 2, .shape = {1, 4}, .strides = {4, 1}};
    subject s = {.slot = {.function = nothing},
                 .args = {.size = sizeof s.args, .input = matrix, .partials = partials},
                 .fill = {.size = sizeof s.fill, .output = matrix}};
    long failed = 0;
    backend.slots[TE_OP_AMAX] = s.slot;
    backend.slots[TE_OP_FILL] = (te_op_slot){.function = nothing, .supports = takes};
    if (te_context_create((te_device){TE_DEVICE_CPU, 0}, &s.context) != TE_OK ||
        te_backend_register(&backend) != TE_OK) {
        (void)fprintf(stderr, "%s\n", te_last_error());
        return EXIT_FAILURE;
    }
    s.table = te_op_table_acquire(TE_DEVICE_CPU);
    for (long turn = 0; turn < turns; turn++) {
        for (int i = 0; i < MEASURES; i++) {
            const double begin = seconds();
            double each;
            failed += measures[i].loop(&s, count);
            each = (seconds() - begin) / (double)count;
            if (turn == 0 || each < least[i]) least[i] = each;
        }
    }
    te_op_table_release(s.table);
    if (failed > 0) (void)fprintf(stderr, "%ld calls failed: %s\n", failed, te_last_error());
    for (int i = 0; i < MEASURES; i++) (void)printf("%.3f %s\n", least[i] * 1e9, measures[i].name);
    te_context_destroy(s.context);
    return failed > 0 ? EXIT_FAILURE : EXIT_SUCCESS;
}
