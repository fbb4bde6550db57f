/* SPDX-License-Identifier: Apache-2.0
 *
 * test_ops_cpu.c - every operator of the CPU backend against its definition.
 */
#include "cpu_device.h"
#include "ops_cases.h"

int main(void)
{
    return test_on_cpu("operators", test_run_ops);
}
