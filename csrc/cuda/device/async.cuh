/* SPDX-License-Identifier: Apache-2.0
 *
 * async.cuh - copies from global to shared memory that pass by the registers. A thread waits for
 * its own copies, in groups and in order.
 */
#ifndef TE_DEVICE_ASYNC_CUH
#define TE_DEVICE_ASYNC_CUH

/* 16 bytes; both addresses are multiples of 16. */
__device__ __forceinline__ void te_copy_async(void *to, const void *from)
{
    asm volatile(
        "cp.async.cg.shared.global [%0], [%1], 16;" ::"r"((unsigned)__cvta_generic_to_shared(to)),
        "l"(__cvta_generic_to_global(from))
        : "memory");
}

/* Closes a group of copies, which may be empty. */
__device__ __forceinline__ void te_copy_group()
{
    asm volatile("cp.async.commit_group;" ::: "memory");
}

/* Waits until at most `left` of the groups (0, 1 or 2) are not complete. */
__device__ __forceinline__ void te_copy_wait(int left)
{
    if (left == 2)
        asm volatile("cp.async.wait_group 2;" ::: "memory");
    else if (left == 1)
        asm volatile("cp.async.wait_group 1;" ::: "memory");
    else
        asm volatile("cp.async.wait_group 0;" ::: "memory");
}

#endif
