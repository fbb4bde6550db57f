/* SPDX-License-Identifier: Apache-2.0
 *
 * l2norm.c - te_l2norm: its checks, and the device that runs it.
 */
#include "core/l2norm.h"

#include "core/context.h"
#include "core/status.h"
#include "core/update.h"

#define REFUSED_IF(condition, ...) TE_FAIL_IF(condition, TE_ERROR_INVALID, "l2norm: " __VA_ARGS__)

static te_status check_args(const te_l2norm_args *args)
{
    REFUSED_IF(args == NULL, "args is NULL");
    REFUSED_IF(args->size != sizeof *args, "args->size = %zu, expected %zu", args->size,
               sizeof *args);
    REFUSED_IF(args->count < 0, "count = %lld is negative", (long long)args->count);
    REFUSED_IF(args->count > 0 && args->tensors == NULL, "tensors: is NULL");
    return TE_OK;
}

static te_status check_tensors(const te_l2norm_args *args, te_device device)
{
    for (int64_t i = 0; i < args->count; i++) {
        TE_TRY(te_check_listed("l2norm: tensors", i, &args->tensors[i], device));
        TE_FAIL_IF(!te_dtype_is_high_precision(args->tensors[i].dtype), TE_ERROR_TYPE,
                   "l2norm: tensors %lld: dtype %s, expected f32, f16 or bf16", (long long)i,
                   te_dtype_name(args->tensors[i].dtype));
    }
    return TE_OK;
}

te_status te_l2norm_workspace(const te_l2norm_args *args, size_t *bytes)
{
    int64_t chunks = 0;
    REFUSED_IF(bytes == NULL, "bytes is NULL");
    *bytes = 0;
    TE_TRY(check_args(args));
    for (int64_t i = 0; i < args->count; i++) chunks += te_l2norm_chunks(&args->tensors[i]);
    *bytes = (size_t)chunks * sizeof(float);
    return TE_OK;
}

te_status te_l2norm(te_context *context, const te_l2norm_args *args, void *stream)
{
    size_t needed;
    TE_TRY(te_context_check(context));
    TE_TRY(check_args(args));
    TE_TRY(check_tensors(args, te_context_device(context)));
    TE_TRY(te_l2norm_workspace(args, &needed));
    REFUSED_IF(args->total == NULL, "total: is NULL");
    REFUSED_IF(args->workspace_size < needed || (args->workspace == NULL && needed > 0),
               "workspace: %zu bytes at %p, expected %zu or more", args->workspace_size,
               args->workspace, needed);
    REFUSED_IF((uintptr_t)args->workspace % sizeof(float) != 0,
               "workspace: %p, expected a multiple of 4", args->workspace);
    return te_context_driver(context)->l2norm(context, args, stream);
}
