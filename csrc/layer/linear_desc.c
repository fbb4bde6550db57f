/* SPDX-License-Identifier: Apache-2.0 */
#include "layer/linear_desc.h"

#include "core/status.h"

static te_status check_dtypes(const te_linear_desc *d)
{
    const int32_t dtypes[] = {d->input_dtype, d->weight_dtype, d->bias_dtype, d->output_dtype,
                              d->grad_weight_dtype};
    static const char *const names[] = {"input_dtype", "weight_dtype", "bias_dtype", "output_dtype",
                                        "grad_weight_dtype"};
    for (int i = 0; i < 5; i++) {
        if (!te_dtype_is_high_precision((te_dtype)dtypes[i])) {
            return TE_FAIL(TE_ERROR_TYPE, "linear: %s = %s, expected f32, f16 or bf16", names[i],
                           te_dtype_name((te_dtype)dtypes[i]));
        }
    }
    if (d->recipe == TE_RECIPE_NONE) {
        if (d->input_dtype == d->weight_dtype && d->input_dtype == d->output_dtype &&
            ((d->flags & TE_LINEAR_BIAS) == 0 || d->bias_dtype == d->input_dtype)) {
            return TE_OK;
        }
        return TE_FAIL(
            TE_ERROR_TYPE,
            "linear: input %s, weight %s, bias %s, output %s: without a recipe all are one dtype",
            te_dtype_name((te_dtype)d->input_dtype), te_dtype_name((te_dtype)d->weight_dtype),
            te_dtype_name((te_dtype)d->bias_dtype), te_dtype_name((te_dtype)d->output_dtype));
    }
    if (d->forward_fp8 != TE_DTYPE_E4M3 ||
        (d->backward_fp8 != TE_DTYPE_E4M3 && d->backward_fp8 != TE_DTYPE_E5M2)) {
        return TE_FAIL(
            TE_ERROR_TYPE, "linear: FP8 dtypes %s and %s, expected e4m3 and then e4m3 or e5m2",
            te_dtype_name((te_dtype)d->forward_fp8), te_dtype_name((te_dtype)d->backward_fp8));
    }
    return TE_OK;
}

static te_status check_flags(const te_linear_desc *d)
{
    uint32_t cache = d->flags & (TE_LINEAR_CACHE_WRITE | TE_LINEAR_CACHE_READ);
    uint32_t main_grad = d->flags & (TE_LINEAR_ACCUMULATE_WGRAD | TE_LINEAR_OVERWRITE_WGRAD);
    if (cache != 0 &&
        (d->recipe == TE_RECIPE_NONE || cache == (TE_LINEAR_CACHE_WRITE | TE_LINEAR_CACHE_READ) ||
         (d->direction != TE_LINEAR_FORWARD && cache == TE_LINEAR_CACHE_WRITE))) {
        return TE_FAIL(TE_ERROR_INVALID,
                       "linear: flags 0x%x: the weight cache needs a recipe and is written "
                       "(forward only) or read",
                       d->flags);
    }
    if (main_grad == (TE_LINEAR_ACCUMULATE_WGRAD | TE_LINEAR_OVERWRITE_WGRAD) ||
        ((d->flags & TE_LINEAR_ACCUMULATE_WGRAD) != 0 && d->grad_weight_dtype == TE_DTYPE_F16)) {
        return TE_FAIL(TE_ERROR_INVALID,
                       "linear: flags 0x%x with %s main_grad: it is overwritten, or "
                       "accumulated in f32 or bf16",
                       d->flags, te_dtype_name((te_dtype)d->grad_weight_dtype));
    }
    if (d->gather < 1 ||
        (d->gather > 1 && (d->recipe == TE_RECIPE_NONE || d->direction != TE_LINEAR_FORWARD ||
                           (d->external >> TE_LINEAR_STAGE_GATHER_INPUT & 1U) == 0))) {
        return TE_FAIL(TE_ERROR_INVALID,
                       "linear: gather = %d: at least 1; more needs a forward with a recipe "
                       "and the external stage gather_input",
                       d->gather);
    }
    return TE_OK;
}

/* A norm before the layer: LayerNorm or RMSNorm, its flags and its dtype. */
static te_status check_norm(const te_linear_desc *d)
{
    const uint32_t flags = TE_LINEAR_ZERO_CENTERED | TE_LINEAR_GRAD_GAMMA | TE_LINEAR_GRAD_BETA |
                           TE_LINEAR_RETURN_NORM;
    if (d->norm == 0) {
        if ((d->flags & flags) == 0 && d->norm_dtype == 0) return TE_OK;
        return TE_FAIL(TE_ERROR_INVALID, "linear: flags 0x%x, norm_dtype %d without a norm",
                       d->flags, d->norm_dtype);
    }
    if (d->norm != 1 + TE_NORM_LAYERNORM && d->norm != 1 + TE_NORM_RMSNORM) {
        return TE_FAIL(TE_ERROR_INVALID, "linear: norm = %d does not exist", d->norm);
    }
    if (d->norm == 1 + TE_NORM_RMSNORM && (d->flags & TE_LINEAR_GRAD_BETA) != 0) {
        return TE_FAIL(TE_ERROR_INVALID, "linear: flags 0x%x: RMSNorm has no beta", d->flags);
    }
    if (!te_dtype_is_high_precision((te_dtype)d->norm_dtype)) {
        return TE_FAIL(TE_ERROR_TYPE, "linear: norm_dtype = %s, expected f32, f16 or bf16",
                       te_dtype_name((te_dtype)d->norm_dtype));
    }
    return TE_OK;
}

te_status te_linear_check(const te_linear_desc *d)
{
    if (d == NULL || d->size != sizeof *d || d->reserved != 0) {
        return TE_FAIL(TE_ERROR_INVALID, "linear: size = %u, expected %zu and no reserved bits",
                       d == NULL ? 0U : d->size, sizeof *d);
    }
    if (d->in_features < 1 || d->out_features < 1) {
        return TE_FAIL(TE_ERROR_INVALID,
                       "linear: in_features = %lld, out_features = %lld, expected at least 1",
                       (long long)d->in_features, (long long)d->out_features);
    }
    if (d->in_features > INT32_MAX || d->out_features > INT32_MAX) {
        return TE_FAIL(TE_ERROR_INVALID,
                       "linear: in_features = %lld, out_features = %lld exceed %d",
                       (long long)d->in_features, (long long)d->out_features, INT32_MAX);
    }
    if (d->direction < TE_LINEAR_FORWARD || d->direction > TE_LINEAR_WGRAD) {
        return TE_FAIL(TE_ERROR_INVALID, "linear: direction = %d does not exist", d->direction);
    }
    if (d->recipe < TE_RECIPE_NONE || d->recipe > TE_RECIPE_CURRENT) {
        return TE_FAIL(TE_ERROR_INVALID, "linear: recipe = %d does not exist", d->recipe);
    }
    TE_TRY(check_dtypes(d));
    TE_TRY(check_norm(d));
    return check_flags(d);
}

te_status te_mlp_check(const te_mlp_desc *d)
{
    int64_t expected;
    if (d == NULL || d->size != sizeof *d || d->reserved != 0) {
        return TE_FAIL(TE_ERROR_INVALID, "mlp: size = %u, expected %zu and no reserved bits",
                       d == NULL ? 0U : d->size, sizeof *d);
    }
    TE_TRY(te_linear_check(&d->fc1));
    TE_TRY(te_linear_check(&d->fc2));
    if ((uint32_t)d->activation >= TE_ACTIVATION_COUNT ||
        (d->flags & ~(uint32_t)TE_MLP_RECOMPUTE)) {
        return TE_FAIL(TE_ERROR_INVALID, "mlp: activation = %d, flags = 0x%x", d->activation,
                       d->flags);
    }
    expected = d->fc2.in_features * (1 + te_activation_is_gated((te_activation_kind)d->activation));
    if (d->fc1.out_features != expected) {
        return TE_FAIL(TE_ERROR_INVALID, "mlp: fc1 has %lld outputs, %s of %lld needs %lld",
                       (long long)d->fc1.out_features,
                       te_activation_name((te_activation_kind)d->activation),
                       (long long)d->fc2.in_features, (long long)expected);
    }
    if (d->fc1.direction != d->direction || d->fc2.direction != d->direction ||
        d->fc1.recipe != d->fc2.recipe || d->fc1.output_dtype != d->fc2.input_dtype ||
        d->fc2.norm != 0 || d->fc1.gather != 1 || d->fc2.gather != 1) {
        return TE_FAIL(TE_ERROR_INVALID,
                       "mlp: fc1 and fc2 differ: directions %d and %d, recipes %d and %d, dtypes "
                       "between them %s and %s, or one has a norm (%d) or a gather (%d, %d)",
                       d->fc1.direction, d->fc2.direction, d->fc1.recipe, d->fc2.recipe,
                       te_dtype_name((te_dtype)d->fc1.output_dtype),
                       te_dtype_name((te_dtype)d->fc2.input_dtype), d->fc2.norm, d->fc1.gather,
                       d->fc2.gather);
    }
    if (d->direction == TE_LINEAR_WGRAD && (d->flags & TE_MLP_RECOMPUTE) != 0) {
        return TE_FAIL(TE_ERROR_UNSUPPORTED,
                       "mlp: a deferred weight gradient with recompute: flags = 0x%x", d->flags);
    }
    return TE_OK;
}
