/* SPDX-License-Identifier: Apache-2.0
 *
 * cpu_device.h - the CPU backend as the device of a program's checks.
 */
#ifndef TE_TESTS_CPU_DEVICE_H
#define TE_TESTS_CPU_DEVICE_H

#include "testing.h"

static inline int test_copy(void *target, const void *source, size_t bytes)
{
    memcpy(target, source, bytes);
    return 0;
}

/* Runs the checks and says how many failed; returns the exit status of the program. `running` is
 * the name in messages, which checks may change. */
static inline int test_on_cpu(const char *running, void (*checks)(test_device *t))
{
    static test_device t = {.device = {TE_DEVICE_CPU, 0},
                            .accumulation_eps = 0x1p-23,
                            .allocate = malloc,
                            .release = free,
                            .upload = test_copy,
                            .download = test_copy};
    t.running = running;
    if (te_context_create(t.device, &t.context) != TE_OK) {
        (void)fprintf(stderr, "%s\n", te_last_error());
        return EXIT_FAILURE;
    }
    checks(&t);
    te_context_destroy(t.context);
    if (t.failures > 0) (void)fprintf(stderr, "%d checks failed\n", t.failures);
    return t.failures > 0 ? EXIT_FAILURE : EXIT_SUCCESS;
}

#endif
