/* SPDX-License-Identifier: Apache-2.0
 *
 * test_ops_cpu.c - every operator of the CPU backend against its definition.
 */
#include "ops_cases.h"

static int copy(void *target, const void *source, size_t bytes)
{
    memcpy(target, source, bytes);
    return 0;
}

int main(void)
{
    static test_device t = {.device = {TE_DEVICE_CPU, 0},
                            .accumulation_eps = 0x1p-23,
                            .allocate = malloc,
                            .release = free,
                            .upload = copy,
                            .download = copy};
    if (te_context_create(t.device, &t.context) != TE_OK) {
        (void)fprintf(stderr, "%s\n", te_last_error());
        return EXIT_FAILURE;
    }
    int failures = test_run_ops(&t);
    te_context_destroy(t.context);
    if (failures > 0) (void)fprintf(stderr, "%d checks failed\n", failures);
    return failures > 0 ? EXIT_FAILURE : EXIT_SUCCESS;
}
