/* SPDX-License-Identifier: Apache-2.0
 *
 * l2norm_order.h - the order in which squares are added up, once for both backends. Read by gcc,
 * nvcc and NVRTC.
 *
 * A tensor is cut into chunks, whose sums are fp32: element i of a chunk is added to sum i % lanes;
 * lanes are then added in groups of neighbours, the groups of 32 threads halves first, and the
 * results of these halves first. What a norm sums up are those of chunks, in fp64: sum i goes to
 * i % adders, and adders are added like threads. A chunk's sum that overflows is Inf.
 */
#ifndef TE_CORE_L2NORM_ORDER_H
#define TE_CORE_L2NORM_ORDER_H

enum {
    TE_L2NORM_GROUP = 4, /* neighbouring elements of a thread: 16 bytes of fp32 */
    TE_L2NORM_THREADS = 256,
    TE_L2NORM_LANES = TE_L2NORM_GROUP * TE_L2NORM_THREADS,
    TE_L2NORM_CHUNK = 16 * TE_L2NORM_LANES,
    TE_L2NORM_ADDERS = 512
};

#endif
