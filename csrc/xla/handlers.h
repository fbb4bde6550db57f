/* SPDX-License-Identifier: Apache-2.0
 *
 * handlers.h - the custom calls of this library, for whoever registers them with XLA.
 */
#ifndef TE_XLA_HANDLERS_H
#define TE_XLA_HANDLERS_H

#include "ffi.h"

/* One function for the stages INSTANTIATE, which checks the attributes, and EXECUTE. */
typedef te_xla_error *(*te_xla_handler)(te_xla_frame *frame);

/* Scratch and workspaces are results of a call that nobody reads, in bytes. They have so many more
 * than what te_plan_scratch or te_op_workspace asks for, since XLA aligns them less. */
#define TE_XLA_SCRATCH_ALIGN 256

/* X(name, platform of XLA, te_device_type): a target is te_<name>, a handler of it
 * te_xla_<name>_<platform>. */
#define TE_XLA_HANDLERS(X)                                                                         \
    X(plan, cpu, TE_DEVICE_CPU)                                                                    \
    X(plan, CUDA, TE_DEVICE_CUDA)                                                                  \
    X(operator, cpu, TE_DEVICE_CPU)                                                                \
    X(operator, CUDA, TE_DEVICE_CUDA)

#define X(name, platform, type) te_xla_error *te_xla_##name##_##platform(te_xla_frame *frame);
TE_XLA_HANDLERS(X)
#undef X

#endif
