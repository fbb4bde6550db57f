/* SPDX-License-Identifier: Apache-2.0
 *
 * widen.h - inputs of different dtypes: kernels that read several matrices require one dtype, so
 * what is not f32 is copied to f32 in the workspace first, which is exact.
 */
#ifndef TE_CUDA_WIDEN_H
#define TE_CUDA_WIDEN_H

#include "transformer_engine.h"

/* Bytes of workspace for the matrices; 0 where they have one dtype. Absent ones do not count. */
size_t te_cuda_widen_workspace(const te_tensor *const *tensors, int count);

/* Replaces the matrices by f32 copies in the workspace if they differ in dtype. INVALID where the
 * workspace is too small. */
te_status te_cuda_widen(te_context *context, te_tensor *const *tensors, int count, void *workspace,
                        size_t workspace_size, void *stream);

#endif
