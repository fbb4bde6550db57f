/* SPDX-License-Identifier: Apache-2.0
 *
 * check_layer.c - checks of norms and activations that no rule says.
 */
#include "core/check_ops.h"
#include "core/operand.h"
#include "core/status.h"

/* Rows that are normalized. */
static te_status check_normalized(const te_check_site *site, const te_tensor *input)
{
    INVALID_IF(input->ndim < 2, "input", "ndim = %d, expected rows: 2 to 4", (int)input->ndim);
    return TE_OK;
}

te_status te_check_norm(const te_check_site *site, const te_norm_args *args)
{
    const te_cast_request *cast = &args->cast;
    TE_TRY(check_normalized(site, &args->input));
    INVALID_IF(te_tensor_rows(&args->input).strides[0] == TE_NO_STRIDE &&
                   (cast->result.mode != TE_SCALING_NONE || cast->amax_partials != NULL),
               "input", "its rows are those of no matrix: only `wide` is made of them");
    if ((args->flags & TE_NORM_STATISTICS_GIVEN) == 0 || te_tensor_numel(&args->input) == 0) {
        return TE_OK;
    }
    TE_TRY(te_check_missing(site, "rsigma", &args->rsigma, "statistics_given reads it"));
    if (args->kind != TE_NORM_LAYERNORM) return TE_OK;
    return te_check_missing(site, "mean", &args->mean, "statistics_given reads it");
}

te_status te_check_norm_backward(const te_check_site *site, const te_norm_backward_args *args)
{
    const te_tensor *input = &args->input;
    te_tensor rows;
    TE_TRY(check_normalized(site, input));
    rows = te_tensor_rows(input);
    TE_TRY(te_check_sizes(site, "grad_output", &args->grad_output, &rows, 0));
    if (args->kind != TE_NORM_LAYERNORM || te_tensor_numel(input) == 0) return TE_OK;
    return te_check_missing(site, "mean", &args->mean, "the gradient of layernorm reads it");
}

/* *columns is the width of the output. */
static te_status check_activation_input(const te_check_site *site, te_activation_kind kind,
                                        const te_activation_params *params, const te_tensor *input,
                                        int64_t *columns)
{
    const int gated = te_activation_is_gated(kind);
    *columns = gated ? input->shape[1] / 2 : input->shape[1];
    INVALID_IF(gated && input->shape[1] % 2 != 0, "input",
               "%lld columns, expected an even number for the two halves of %s",
               LL(input->shape[1]), te_activation_name(kind));
    if (kind != TE_ACTIVATION_CLAMPED_SWIGLU || params->limit >= 0.0F) return TE_OK;
    return INVALID("limit", "%g, expected a number from 0 on", (double)params->limit);
}

te_status te_check_activation(const te_check_site *site, const te_activation_args *args)
{
    int64_t columns = 0;
    TE_TRY(check_activation_input(site, args->kind, &args->params, &args->input, &columns));
    return te_check_cast_request(site, &args->cast, args->input.shape[0], columns);
}

te_status te_check_activation_backward(const te_check_site *site,
                                       const te_activation_backward_args *args)
{
    te_tensor like = {.ndim = 2, .shape = {args->input.shape[0]}};
    TE_TRY(check_activation_input(site, args->kind, &args->params, &args->input, &like.shape[1]));
    return te_check_sizes(site, "grad_output", &args->grad_output, &like, 0);
}
