/* SPDX-License-Identifier: Apache-2.0
 *
 * attention_supports.c - which attentions cuDNN's fused kernels run, and what keeps them from
 * others.
 */
#include <stdint.h>

#include "core/attention.h"
#include "core/check.h"
#include "core/context.h"
#include "core/status.h"
#include "cuda/attention_packed.h"
#include "cuda/api.h"
#include "cuda/ops.h"

#define VECTOR TE_CUDA_ATTENTION_VECTOR /* what heads are multiples of, and begin at */
#define MAX_CHANNELS 256

#define UNSUPPORTED(...) TE_FAIL(TE_ERROR_UNSUPPORTED, __VA_ARGS__)
#define UNSUPPORTED_IF(condition, ...) TE_FAIL_IF(condition, TE_ERROR_UNSUPPORTED, __VA_ARGS__)

/* Elements of 16 bytes. */
static int64_t vector_of(const te_tensor *heads)
{
    return te_dtype_is_fp8(heads->dtype) ? 2 * VECTOR : VECTOR;
}

static int is_aligned(const te_tensor *heads)
{
    int aligned = (uintptr_t)heads->data % 16 == 0;
    if (te_tensor_numel(heads) == 0) return 1;
    for (int i = 0; i < 3; i++) {
        const int64_t stride = heads->strides[i];
        aligned &= heads->shape[i] <= 1 || (stride > 0 && stride % vector_of(heads) == 0);
    }
    return aligned;
}

static te_status check_aligned(const char *op, const te_tensor *const *tensors, int count)
{
    for (int i = 0; i < count; i++) {
        if (is_aligned(tensors[i])) continue;
        return UNSUPPORTED("%s: heads that begin at no multiple of 16 bytes, or share memory", op);
    }
    return TE_OK;
}

/* Whether the diagonal, from which slopes count, begins in the top left corner of the scores. */
static int is_from_corner(const te_attention_problem *p)
{
    const int has_ends = te_tensor_requested(&p->query_lengths) ||
                         te_tensor_requested(&p->key_lengths) ||
                         te_tensor_requested(&p->query_offsets);
    return p->diagonal == 0 &&
           (!p->bottom_right || (!has_ends && p->query.shape[1] == p->key.shape[1]));
}

/* cuDNN flushes subnormal quotients of scores and a cap to 0: with this one, those of scores below
 * 2^-26, which no weight shows. */
#define LARGEST_CAP 0x1p100F

static te_status check_problem(const char *op, te_context *context, const te_attention_problem *p,
                               float softcap, const te_tensor *statistics)
{
    const int64_t d_k = p->query.shape[3], d_v = p->value.shape[3], vector = vector_of(&p->query);
    const te_tensor *const tensors[] = {&p->query, &p->key, &p->value};
    te_cuda_state *cuda = te_context_state(context);
    UNSUPPORTED_IF(te_cuda_compute_capability(cuda) / 10 != 9,
                   "%s: compute capability %d.%d: built and tested for 9.0", op,
                   cuda->capability_major, cuda->capability_minor);
    UNSUPPORTED_IF(p->query.dtype == TE_DTYPE_F32, "%s: fp32", op);
    UNSUPPORTED_IF(d_k % vector != 0 || d_v % vector != 0 || d_k < 1 || d_v < 1 ||
                       d_k > MAX_CHANNELS || d_v > MAX_CHANNELS,
                   "%s: heads of %lld and %lld channels, which are no multiples of %d up "
                   "to %d",
                   op, (long long)d_k, (long long)d_v, (int)vector, MAX_CHANNELS);
    UNSUPPORTED_IF(te_attention_is_fp8(p) && !te_attention_is_packed(p) && p->query.shape[1] == 1,
                   "%s: one query in FP8", op);
    /* On an H200 cuDNN 9.19 builds both, and they end with an illegal instruction, or address. */
    UNSUPPORTED_IF(te_attention_is_fp8(p) && te_attention_is_packed(p),
                   "%s: packed sequences in FP8", op);
    /* On an H100 cuDNN 9.19 builds it, and computes something else. */
    UNSUPPORTED_IF(te_attention_is_fp8(p) && softcap > 0.0F, "%s: a softcap in FP8", op);
    UNSUPPORTED_IF(softcap > LARGEST_CAP, "%s: a softcap of %g", op, (double)softcap);
    UNSUPPORTED_IF(te_attention_is_fp8(p) && p->dropout > 0.0F, "%s: dropout in FP8", op);
    if (!te_attention_is_packed(p) && p->key.shape[1] == 1 &&
        (te_tensor_requested(&p->mask) || te_tensor_requested(&p->bias) ||
         te_tensor_requested(&p->slopes))) {
        return UNSUPPORTED("%s: a mask or bias over one key",
                           op); /* see place_bias of attention.c */
    }
    UNSUPPORTED_IF(te_tensor_requested(&p->slopes) &&
                       (!is_from_corner(p) || (p->slopes.ndim == 2 && p->slopes.shape[0] > 1)),
                   "%s: slopes of each sequence, or from another diagonal than that of the "
                   "top left corner",
                   op);
    UNSUPPORTED_IF((uintptr_t)statistics->data % 16 != 0,
                   "%s: statistics that begin at no multiple of 16 bytes", op);
    return check_aligned(op, tensors, 3);
}

#define FP8_CHANNELS 128
#define FP8_QUERIES 64

/* What of an FP8 gradient cuDNN has no kernel for. */
static te_status check_fp8_backward(const char *op, const te_attention_backward_args *args)
{
    const te_attention_problem *p = &args->problem;
    if (!te_attention_is_fp8(p)) return TE_OK;
    UNSUPPORTED_IF(p->query.shape[3] != FP8_CHANNELS || p->value.shape[3] != FP8_CHANNELS,
                   "%s: heads of %lld and %lld channels in FP8, which has %d", op,
                   (long long)p->query.shape[3], (long long)p->value.shape[3], FP8_CHANNELS);
    UNSUPPORTED_IF(args->deterministic, "%s: repeatable gradients in FP8", op);
    /* On an H200 cuDNN 9.19 makes wrong gradients of the queries behind the last whole block,
     * whatever the layout and the number of keys. */
    UNSUPPORTED_IF(p->query.shape[1] % FP8_QUERIES != 0,
                   "%s: %lld queries in FP8, which are no multiple of %d", op,
                   (long long)p->query.shape[1], FP8_QUERIES);
    return TE_OK;
}

te_status te_cuda_attention_supports(void *self, te_context *context, const void *args_)
{
    const te_attention_args *args = args_;
    const te_tensor *const tensors[] = {&args->output};
    (void)self;
    TE_TRY(check_problem("attention", context, &args->problem, args->softcap, &args->statistics));
    UNSUPPORTED_IF(te_tensor_requested(&args->top),
                   "attention: the largest scores: cuDNN's kernels do not write them");
    return check_aligned("attention", tensors, 1);
}

te_status te_cuda_attention_backward_supports(void *self, te_context *context, const void *args_)
{
    static const char name[] = "attention_backward";
    const te_attention_backward_args *args = args_;
    const te_tensor *const tensors[] = {&args->grad_output, &args->output, &args->grad_query,
                                        &args->grad_key, &args->grad_value};
    const te_tensor *grad = &args->grad_bias;
    int64_t dense = 1;
    (void)self;
    TE_TRY(check_problem(name, context, &args->problem, args->softcap, &args->statistics));
    TE_TRY(check_aligned(name, tensors, sizeof tensors / sizeof *tensors));
    TE_TRY(check_fp8_backward(name, args));
    if (!te_tensor_requested(grad)) return TE_OK;
    UNSUPPORTED_IF(args->softcap > 0.0F, "%s: the gradient of a bias with a softcap", name);
    UNSUPPORTED_IF(grad->dtype != args->problem.query.dtype ||
                       args->problem.bias.dtype != grad->dtype ||
                       grad->shape[2] != args->problem.query.shape[1] ||
                       grad->shape[3] != args->problem.key.shape[1],
                   "%s: the gradient of a bias of another dtype than the queries, or of "
                   "one for all queries or keys",
                   name);
    for (int i = 3; i >= 0; i--) {
        UNSUPPORTED_IF(grad->shape[i] > 1 && grad->strides[i] != dense,
                       "%s: a gradient of the bias that is not contiguous", name);
        dense *= grad->shape[i];
    }
    return TE_OK;
}
