/* SPDX-License-Identifier: Apache-2.0 */
#include "cuda/widen.h"

#include "core/status.h"
#include "core/tensor.h"
#include "cuda/ops.h"

#define ALIGNMENT 256

static size_t copy_bytes(const te_tensor *tensor)
{
    const size_t bytes = (size_t)te_tensor_numel(tensor) * sizeof(float);
    return (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
}

size_t te_cuda_widen_workspace(const te_tensor *const *tensors, int count)
{
    size_t bytes = 0;
    int differ = 0;
    for (int i = 0; i < count; i++) {
        if (!te_tensor_requested(tensors[i])) continue;
        differ |= tensors[i]->dtype != tensors[0]->dtype;
        if (tensors[i]->dtype != TE_DTYPE_F32) bytes += copy_bytes(tensors[i]);
    }
    return differ ? bytes : 0;
}

te_status te_cuda_widen(te_context *context, te_tensor *const *tensors, int count, void *workspace,
                        size_t workspace_size, void *stream)
{
    const size_t needed = te_cuda_widen_workspace((const te_tensor *const *)tensors, count);
    unsigned char *next = workspace;
    if (needed == 0) return TE_OK;
    TE_FAIL_IF(workspace == NULL || workspace_size < needed, TE_ERROR_INVALID,
               "inputs of different dtypes: %zu bytes of workspace are left, %zu are needed",
               workspace != NULL ? workspace_size : 0, needed);
    for (int i = 0; i < count; i++) {
        te_tensor *tensor = tensors[i];
        te_cast_args args = {.size = sizeof args, .input = *tensor};
        if (!te_tensor_present(tensor) || tensor->dtype == TE_DTYPE_F32) continue;
        args.output =
            te_matrix(next, TE_DTYPE_F32, tensor->device, tensor->shape[0], tensor->shape[1]);
        TE_TRY(te_cuda_cast(NULL, context, &args, stream));
        next += copy_bytes(tensor);
        *tensor = args.output;
    }
    return TE_OK;
}
