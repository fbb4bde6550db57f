/* SPDX-License-Identifier: Apache-2.0
 *
 * update.c - te_update and te_l2norm: their checks, and the device that runs them.
 */
#include "core/update.h"

#include <math.h>

#include "core/check.h"
#include "core/context.h"
#include "core/status.h"
#include "core/tensor.h"

#define BIT(name) (1U << TE_UPDATE_##name)

static const char *const list_names[TE_UPDATE_LIST_COUNT] = {
#define X(NAME, name) "update: " #name,
    TE_UPDATE_LISTS(X)
#undef X
};

static const struct {
    const char *name;
    unsigned required, allowed;
} kinds[TE_UPDATE_KIND_COUNT] = {
    [TE_UPDATE_ADAM] = {"adam", BIT(GRAD) | BIT(VALUE) | BIT(MEAN) | BIT(SQUARE),
                        (1U << TE_UPDATE_LIST_COUNT) - 1U},
    [TE_UPDATE_SGD] = {"sgd", BIT(GRAD) | BIT(VALUE),
                       BIT(GRAD) | BIT(VALUE) | BIT(MEAN) | BIT(ROUNDED)},
    [TE_UPDATE_SCALE] = {"scale", BIT(GRAD) | BIT(VALUE), BIT(GRAD) | BIT(VALUE)},
    [TE_UPDATE_RESCALE] = {"rescale", BIT(GRAD) | BIT(VALUE) | BIT(MEAN),
                           BIT(GRAD) | BIT(VALUE) | BIT(MEAN)},
};

_Static_assert((int)TE_STEP_DECOUPLED == (int)TE_UPDATE_DECOUPLED &&
                   (int)TE_STEP_CORRECTED == (int)TE_UPDATE_CORRECTED &&
                   (int)TE_STEP_NESTEROV == (int)TE_UPDATE_NESTEROV &&
                   (int)TE_STEP_FIRST == (int)TE_UPDATE_FIRST &&
                   (int)TE_STEP_DECAY_LAST == (int)TE_UPDATE_DECAY_LAST &&
                   (int)TE_STEP_WRITE_GRAD == (int)TE_UPDATE_WRITE_GRAD &&
                   (int)TE_STEP_POWER_2 == (int)TE_UPDATE_POWER_2,
               "flags are the same bits in kernels");

te_update_numbers te_update_numbers_of(const te_update_args *args)
{
    const int corrected = (args->flags & TE_UPDATE_CORRECTED) != 0U && args->step_at == NULL;
    te_update_numbers numbers = {.lr = (float)args->lr,
                                 .beta1 = (float)args->beta1,
                                 .rest1 = (float)(1.0 - args->beta1),
                                 .beta2 = (float)args->beta2,
                                 .rest2 = (float)(1.0 - args->beta2),
                                 .eps = (float)args->eps,
                                 .decay = (float)args->decay,
                                 .grad_scale = (float)args->grad_scale,
                                 .correction1 = 1.0F,
                                 .correction2 = 1.0F,
                                 .momentum = (float)args->momentum,
                                 .taken = (float)(1.0 - args->dampening),
                                 .top = (float)args->top,
                                 .flags = (int)args->flags};
    if (corrected) {
        numbers.correction1 = te_update_correction(args->beta1, args->step);
        numbers.correction2 = te_update_correction(args->beta2, args->step);
    }
    return numbers;
}

/* ---- checks ------------------------------------------------------------------------------- */

#define REFUSED_IF(condition, ...) TE_FAIL_IF(condition, TE_ERROR_INVALID, "update: " __VA_ARGS__)

static te_status check_size(const char *function, const void *args, size_t expected)
{
    const size_t size = args == NULL ? 0 : *(const size_t *)args;
    TE_FAIL_IF(args == NULL, TE_ERROR_INVALID, "%s: args is NULL", function);
    if (size == expected) return TE_OK;
    return TE_FAIL(TE_ERROR_INVALID, "%s: args->size = %zu, expected %zu", function, size,
                   expected);
}

#define LISTED(...) TE_FAIL(TE_ERROR_INVALID, "%s %lld: " __VA_ARGS__)

/* Number `i` of a list, `name` ("update: grad") in texts: dense, on the device, and with memory
 * where it has elements. */
static te_status check_listed(const char *name, int64_t i, const te_tensor *tensor,
                              te_device device)
{
    int64_t dense = 1;
    if (tensor->ndim < 0 || tensor->ndim > TE_MAX_DIMS) {
        return LISTED("ndim = %d, expected 0 to %d", name, (long long)i, (int)tensor->ndim,
                      TE_MAX_DIMS);
    }
    for (int32_t d = tensor->ndim - 1; d >= 0; d--) {
        if (tensor->shape[d] < 0 || (tensor->shape[d] > 1 && tensor->strides[d] != dense)) {
            return LISTED("dim %d: size %lld and stride %lld, expected a dense tensor", name,
                          (long long)i, (int)d, (long long)tensor->shape[d],
                          (long long)tensor->strides[d]);
        }
        if (tensor->shape[d] > 0 && dense > TE_MOST_ELEMENTS / tensor->shape[d]) {
            return LISTED("more than 2^56 elements", name, (long long)i);
        }
        dense *= tensor->shape[d];
    }
    if (tensor->data == NULL && dense > 0) return LISTED("data is NULL", name, (long long)i);
    if (tensor->device.type != device.type || tensor->device.index != device.index) {
        return LISTED("device (%d, %d) is not the context's (%d, %d): move the tensor", name,
                      (long long)i, (int)tensor->device.type, (int)tensor->device.index,
                      (int)device.type, (int)device.index);
    }
    return TE_OK;
}

static te_status check_tensor(const te_update_args *args, te_device device, int list, int64_t i)
{
    const te_tensor *tensor = &args->lists[list][i];
    const char *name = list_names[list];
    int64_t wanted, elements;
    TE_TRY(check_listed(name, i, tensor, device));
    wanted = te_tensor_numel(&args->lists[TE_UPDATE_GRAD][i]);
    elements = te_tensor_numel(tensor);
    if (elements != wanted) {
        return LISTED("%lld elements, expected the %lld of its gradient", name, (long long)i,
                      (long long)elements, (long long)wanted);
    }
    TE_FAIL_IF(!te_dtype_is_high_precision(tensor->dtype) ||
                   tensor->dtype != args->lists[list][0].dtype,
               TE_ERROR_TYPE, "%s %lld: dtype %s, expected f32, f16 or bf16, one for the list",
               name, (long long)i, te_dtype_name(tensor->dtype));
    return TE_OK;
}

static te_status check_lists(const te_update_args *args, te_device device)
{
    const te_tensor *const *lists = args->lists;
    unsigned given = 0;
    for (int list = 0; list < TE_UPDATE_LIST_COUNT; list++) {
        const unsigned bit = 1U << list;
        if (lists[list] != NULL) given |= bit;
        TE_FAIL_IF(lists[list] == NULL && (kinds[args->kind].required & bit) != 0U,
                   TE_ERROR_INVALID, "%s: is missing: %s needs it", list_names[list],
                   kinds[args->kind].name);
        TE_FAIL_IF(lists[list] != NULL && (kinds[args->kind].allowed & bit) == 0U, TE_ERROR_INVALID,
                   "%s: %s has no such list", list_names[list], kinds[args->kind].name);
    }
    REFUSED_IF(args->kind == TE_UPDATE_SGD && args->momentum != 0.0 &&
                   lists[TE_UPDATE_MEAN] == NULL,
               "mean: is missing: momentum = %g needs it", args->momentum);
    for (int list = 0; list < TE_UPDATE_LIST_COUNT; list++) {
        for (int64_t i = 0; lists[list] != NULL && i < args->count; i++) {
            TE_TRY(check_tensor(args, device, list, i));
        }
    }
    TE_FAIL_IF((given & BIT(REMAINDER)) != 0U &&
                   (lists[TE_UPDATE_VALUE][0].dtype != TE_DTYPE_BF16 ||
                    lists[TE_UPDATE_REMAINDER][0].dtype != TE_DTYPE_BF16),
               TE_ERROR_TYPE,
               "update: remainder: dtype %s beside a value of %s, expected "
               "bf16 and bf16",
               te_dtype_name(lists[TE_UPDATE_REMAINDER][0].dtype),
               te_dtype_name(lists[TE_UPDATE_VALUE][0].dtype));
    return TE_OK;
}

static te_status check_casts(const te_update_args *args, te_device device)
{
    if (args->casts == NULL) return TE_OK;
    REFUSED_IF(args->kind > TE_UPDATE_SGD || args->lists[TE_UPDATE_ROUNDED] != NULL ||
                   args->lists[TE_UPDATE_REMAINDER] != NULL,
               "casts: %s with the lists that are given: values of adam and sgd are cast, "
               "where there is no rounded and no remainder",
               kinds[args->kind].name);
    for (int64_t i = 0; i < args->count; i++) {
        const te_quantize_args *cast = &args->casts[i];
        const te_tensor *value = &args->lists[TE_UPDATE_VALUE][i];
        TE_TRY(te_check_args(TE_OP_QUANTIZE, device, cast));
        REFUSED_IF(cast->input.data != value->data || cast->input.dtype != value->dtype ||
                       te_tensor_numel(&cast->input) != te_tensor_numel(value) ||
                       (cast->input.shape[0] > 1 && cast->input.strides[0] != cast->input.shape[1]),
                   "casts %lld: input is not the value %lld", (long long)i, (long long)i);
        REFUSED_IF(cast->noop != NULL || te_tensor_requested(&cast->bias_grad),
                   "casts %lld: noop or bias_grad is given: `flag` says whether to write, "
                   "and nothing is summed",
                   (long long)i);
    }
    return TE_OK;
}

static te_status check_numbers(const te_update_args *args)
{
    const double betas[] = {args->beta1, args->beta2};
    for (int i = 0; i < 2 && args->kind == TE_UPDATE_ADAM; i++) {
        REFUSED_IF(!(betas[i] >= 0.0 && betas[i] <= 1.0), "beta%d = %g, expected 0 to 1", i + 1,
                   betas[i]);
    }
    REFUSED_IF(args->kind == TE_UPDATE_ADAM && args->step_at == NULL && args->step < 1,
               "step = %lld, expected a number from 1 on", (long long)args->step);
    return TE_OK;
}

te_status te_update(te_context *context, const te_update_args *args, void *stream)
{
    te_device device;
    TE_TRY(te_context_check(context));
    TE_TRY(check_size("update", args, sizeof *args));
    REFUSED_IF((unsigned)args->kind >= TE_UPDATE_KIND_COUNT, "kind = %d, expected 0 to %d",
               (int)args->kind, TE_UPDATE_KIND_COUNT - 1);
    REFUSED_IF(args->flags >= 2U * TE_UPDATE_CHECK, "flags = 0x%x, expected bits of 0x%x",
               (unsigned)args->flags, 2U * TE_UPDATE_CHECK - 1U);
    REFUSED_IF(args->count < 0, "count = %lld is negative", (long long)args->count);
    TE_TRY(check_numbers(args));
    if (args->count == 0) return TE_OK;
    device = te_context_device(context);
    TE_TRY(check_lists(args, device));
    TE_TRY(check_casts(args, device));
    if ((args->flags & TE_UPDATE_CHECK) != 0U) return TE_OK;
    TE_FAIL_IF(te_context_driver(context)->update == NULL, TE_ERROR_UNSUPPORTED,
               "update: there is no kernel for %s", te_device_type_name(device.type));
    return te_context_driver(context)->update(context, args, stream);
}

/* ---- l2norm ------------------------------------------------------------------------------- */

#define NORM_REFUSED_IF(condition, ...)                                                            \
    TE_FAIL_IF(condition, TE_ERROR_INVALID, "l2norm: " __VA_ARGS__)

static te_status check_norm_args(const te_l2norm_args *args)
{
    TE_TRY(check_size("l2norm", args, sizeof *args));
    NORM_REFUSED_IF(args->count < 0, "count = %lld is negative", (long long)args->count);
    NORM_REFUSED_IF(args->count > 0 && args->tensors == NULL, "tensors: is NULL");
    return TE_OK;
}

static te_status check_norm_tensors(const te_l2norm_args *args, te_device device)
{
    for (int64_t i = 0; i < args->count; i++) {
        TE_TRY(check_listed("l2norm: tensors", i, &args->tensors[i], device));
        TE_FAIL_IF(!te_dtype_is_high_precision(args->tensors[i].dtype), TE_ERROR_TYPE,
                   "l2norm: tensors %lld: dtype %s, expected f32, f16 or bf16", (long long)i,
                   te_dtype_name(args->tensors[i].dtype));
    }
    return TE_OK;
}

te_status te_l2norm_workspace(const te_l2norm_args *args, size_t *bytes)
{
    int64_t chunks = 0;
    NORM_REFUSED_IF(bytes == NULL, "bytes is NULL");
    *bytes = 0;
    TE_TRY(check_norm_args(args));
    for (int64_t i = 0; i < args->count; i++) chunks += te_l2norm_chunks(&args->tensors[i]);
    *bytes = (size_t)chunks * sizeof(float);
    return TE_OK;
}

te_status te_l2norm(te_context *context, const te_l2norm_args *args, void *stream)
{
    size_t needed;
    TE_TRY(te_context_check(context));
    TE_TRY(check_norm_args(args));
    NORM_REFUSED_IF(args->flags >= 2U * TE_L2NORM_CHECK, "flags = 0x%x, expected bits of 0x%x",
                    (unsigned)args->flags, 2U * TE_L2NORM_CHECK - 1U);
    TE_TRY(check_norm_tensors(args, te_context_device(context)));
    if ((args->flags & TE_L2NORM_CHECK) != 0U) return TE_OK;
    TE_TRY(te_l2norm_workspace(args, &needed));
    NORM_REFUSED_IF(args->total == NULL, "total: is NULL");
    NORM_REFUSED_IF(args->workspace_size < needed || (args->workspace == NULL && needed > 0),
                    "workspace: %zu bytes at %p, expected %zu or more", args->workspace_size,
                    args->workspace, needed);
    NORM_REFUSED_IF((uintptr_t)args->workspace % sizeof(float) != 0,
                    "workspace: %p, expected a multiple of 4", args->workspace);
    TE_FAIL_IF(te_context_driver(context)->l2norm == NULL, TE_ERROR_UNSUPPORTED,
               "l2norm: there is no kernel for %s",
               te_device_type_name(te_context_device(context).type));
    return te_context_driver(context)->l2norm(context, args, stream);
}
