/* SPDX-License-Identifier: Apache-2.0
 * Operators on their way: deleted line by line as they land. */
#include "core/status.h"
#include "cuda/ops.h"
te_status te_cuda_norm(void *self, te_context *context, const void *args, void *stream)
{
    (void)self, (void)context, (void)args, (void)stream;
    return TE_FAIL(TE_ERROR_UNSUPPORTED, "norm");
}
te_status te_cuda_norm_backward(void *self, te_context *context, const void *args, void *stream)
{
    (void)self, (void)context, (void)args, (void)stream;
    return TE_FAIL(TE_ERROR_UNSUPPORTED, "norm_backward");
}
te_status te_cuda_rope(void *self, te_context *context, const void *args, void *stream)
{
    (void)self, (void)context, (void)args, (void)stream;
    return TE_FAIL(TE_ERROR_UNSUPPORTED, "rope");
}
