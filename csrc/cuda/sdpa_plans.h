/* SPDX-License-Identifier: Apache-2.0
 *
 * sdpa_plans.h - the plans of attention of one device, and its handles of cuDNN.
 *
 * A plan takes a third of a second to make, where its kernel is new. What was made is kept by its
 * problem; past a bound those that were not used for longest go, except where a captured CUDA graph
 * may launch them.
 */
#ifndef TE_CUDA_SDPA_PLANS_H
#define TE_CUDA_SDPA_PLANS_H

#include "cuda/driver.h"
#include "cuda/sdpa_graph.h"

typedef struct te_sdpa_plans te_sdpa_plans;

/* The device's state, made at first use; UNSUPPORTED where cuDNN can not be used. Between
 * te_cuda_enter and te_cuda_leave, as all of these. */
te_status te_sdpa_open(te_cuda_state *cuda, te_sdpa_plans **out);
/* NULL is legal; no call may be in flight. */
void te_sdpa_close(te_sdpa_plans *plans);

/* Bytes that cuDNN wants to run a problem. */
te_status te_sdpa_workspace(te_sdpa_plans *plans, const te_sdpa_key *key, size_t *bytes);
/* Runs a problem; INVALID where the workspace has fewer bytes. */
te_status te_sdpa_run(te_sdpa_plans *plans, const te_sdpa_key *key, void *const *places,
                      void *workspace, size_t size, void *stream);

#endif
