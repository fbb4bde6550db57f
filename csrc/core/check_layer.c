/* SPDX-License-Identifier: Apache-2.0
 *
 * check_layer.c - argument checks of the operators of a Transformer layer.
 */
#include <math.h>

#include "core/check_helpers.h"
#include "core/tensor.h"

/* ---- arguments ---- */

/* A high-precision matrix of this shape. */
static te_status check_numbers(const te_check_site *site, const char *name, const te_tensor *tensor,
                               int64_t rows, int64_t columns)
{
    TE_TRY(te_check_matrix(site, name, tensor));
    if (tensor->shape[0] != rows || tensor->shape[1] != columns) {
        return FAIL_AT(TE_ERROR_INVALID, site, name, "shape [%lld, %lld], expected [%lld, %lld]",
                       LL(tensor->shape[0]), LL(tensor->shape[1]), LL(rows), LL(columns));
    }
    return te_check_high_precision(site, name, tensor->dtype);
}

static te_status check_optional_numbers(const te_check_site *site, const char *name,
                                        const te_tensor *tensor, int64_t rows, int64_t columns)
{
    if (!te_tensor_present(tensor)) return TE_OK;
    return check_numbers(site, name, tensor, rows, columns);
}

static te_status check_optional_vector(const te_check_site *site, const char *name,
                                       const te_tensor *tensor, int64_t length)
{
    if (!te_tensor_present(tensor)) return TE_OK;
    TE_TRY(te_check_vector(site, name, tensor, length));
    return te_check_high_precision(site, name, tensor->dtype);
}

static te_status expect_dtype(const te_check_site *site, const char *name, te_dtype dtype,
                              te_dtype expected)
{
    if (dtype == expected) return TE_OK;
    return FAIL_AT(TE_ERROR_TYPE, site, name, "dtype %s, expected %s", te_dtype_name(dtype),
                   te_dtype_name(expected));
}

static te_status check_kind(const te_check_site *site, int kind, int count)
{
    if (kind >= 0 && kind < count) return TE_OK;
    return FAIL_AT(TE_ERROR_INVALID, site, "kind", "%d does not exist, expected 0 to %d", kind,
                   count - 1);
}

static te_status check_probability(const te_check_site *site, const char *name, float value)
{
    if (value >= 0.0F && value <= 1.0F) return TE_OK;
    return FAIL_AT(TE_ERROR_INVALID, site, name, "%g is no probability, expected 0 to 1",
                   (double)value);
}

/* Random decisions need a generator's state. */
static te_status check_rng(const te_check_site *site, const int64_t *rng, float first, float second)
{
    if (rng != NULL || (first == 0.0F && second == 0.0F)) return TE_OK;
    return FAIL_AT(TE_ERROR_INVALID, site, "rng",
                   "is NULL with a dropout of %g: give {seed, offset}",
                   (double)(first != 0.0F ? first : second));
}

/* An FP8 form of [rows, columns], which measures its amax only while it casts. */
static te_status check_fused_cast(const te_check_site *site, const te_quantized *quantized,
                                  const float *partials, const float *amax_partials,
                                  const int64_t shape[2])
{
    if (quantized->mode == TE_SCALING_NONE && quantized->amax != NULL) {
        return FAIL_AT(TE_ERROR_INVALID, site, "amax", "scaling mode %s records none: %s", "none",
                       "take amax_partials, or cast");
    }
    if (partials != NULL && partials == amax_partials) {
        return FAIL_AT(TE_ERROR_INVALID, site, "amax_partials", "%s",
                       "it is partials, which this call reads: give another buffer");
    }
    return te_check_cast_to_fp8(site, "quantized", quantized, partials, shape);
}

/* A tensor of `ndim` dims and unit last stride, with data wherever it has elements. */
static te_status check_dims(const te_check_site *site, const char *name, const te_tensor *tensor,
                            int32_t ndim)
{
    int64_t count;
    if (tensor->ndim != ndim) {
        return FAIL_AT(TE_ERROR_INVALID, site, name, "ndim = %d, expected %d", (int)tensor->ndim,
                       (int)ndim);
    }
    for (int32_t i = 0; i < ndim; i++) {
        if (tensor->shape[i] < 0 || (tensor->shape[i] > 1 && tensor->strides[i] < 0)) {
            return FAIL_AT(TE_ERROR_INVALID, site, name,
                           "dim %d: size %lld and stride %lld, expected none negative", (int)i,
                           LL(tensor->shape[i]), LL(tensor->strides[i]));
        }
    }
    if (tensor->shape[ndim - 1] > 1 && tensor->strides[ndim - 1] != 1) {
        return FAIL_AT(TE_ERROR_INVALID, site, name,
                       "last stride %lld, expected 1: make it contiguous",
                       LL(tensor->strides[ndim - 1]));
    }
    count = te_tensor_numel(tensor);
    if (tensor->data == NULL && count > 0) {
        return FAIL_AT(TE_ERROR_INVALID, site, name, "data is NULL for %lld elements", LL(count));
    }
    return te_check_device(site, name, tensor);
}

/* No element is written twice: seen from the smallest stride up, every dim steps over the whole of
 * those before it. */
static te_status check_no_overlap(const te_check_site *site, const char *name,
                                  const te_tensor *tensor)
{
    int64_t extent = 1; /* elements from the first to the last of the dims seen, inclusive */
    uint32_t seen = 0;
    if (te_tensor_numel(tensor) == 0) return TE_OK;
    for (int32_t step = 0; step < tensor->ndim; step++) {
        int32_t next = -1;
        for (int32_t i = 0; i < tensor->ndim; i++) {
            if ((seen >> i & 1U) != 0U || tensor->shape[i] == 1) continue;
            if (next < 0 || tensor->strides[i] < tensor->strides[next]) next = i;
        }
        if (next < 0) return TE_OK;
        if (tensor->strides[next] < extent) {
            return FAIL_AT(
                TE_ERROR_INVALID, site, name,
                "dim %d: stride %lld is less than the %lld elements within: they overlap",
                (int)next, LL(tensor->strides[next]), LL(extent));
        }
        seen |= 1U << next;
        extent += (tensor->shape[next] - 1) * tensor->strides[next];
    }
    return TE_OK;
}

/* A tensor of these sizes. */
static te_status check_sizes(const te_check_site *site, const char *name, const te_tensor *tensor,
                             int32_t ndim, const int64_t *sizes)
{
    TE_TRY(check_dims(site, name, tensor, ndim));
    for (int32_t i = 0; i < ndim; i++) {
        if (tensor->shape[i] != sizes[i]) {
            return FAIL_AT(TE_ERROR_INVALID, site, name, "dim %d: size %lld, expected %lld", (int)i,
                           LL(tensor->shape[i]), LL(sizes[i]));
        }
    }
    return TE_OK;
}

/* Shape and dtype of `like`. */
static te_status check_alike(const te_check_site *site, const char *name, const te_tensor *tensor,
                             const te_tensor *like)
{
    TE_TRY(check_sizes(site, name, tensor, like->ndim, like->shape));
    return expect_dtype(site, name, tensor->dtype, like->dtype);
}

/* The same for what is written. */
static te_status check_result(const te_check_site *site, const char *name, const te_tensor *tensor,
                              const te_tensor *like)
{
    TE_TRY(check_alike(site, name, tensor, like));
    return check_no_overlap(site, name, tensor);
}

/* Each dim is 1 or that of `like`. */
static te_status check_broadcast(const te_check_site *site, const char *name,
                                 const te_tensor *tensor, const te_tensor *like)
{
    TE_TRY(check_dims(site, name, tensor, like->ndim));
    for (int32_t i = 0; i < like->ndim; i++) {
        if (tensor->shape[i] != 1 && tensor->shape[i] != like->shape[i]) {
            return FAIL_AT(TE_ERROR_INVALID, site, name, "dim %d: size %lld, expected 1 or %lld",
                           (int)i, LL(tensor->shape[i]), LL(like->shape[i]));
        }
    }
    return TE_OK;
}

/* ---- norms ---- */

/* Statistics of the rows: [rows] f32. */
static te_status check_statistic(const te_check_site *site, const char *name,
                                 const te_tensor *tensor, int64_t rows, int required)
{
    if (!te_tensor_present(tensor)) {
        if (!required || rows == 0) return TE_OK;
        return FAIL_AT(TE_ERROR_INVALID, site, name, "data is NULL for %lld rows", LL(rows));
    }
    TE_TRY(te_check_vector(site, name, tensor, rows));
    return expect_dtype(site, name, tensor->dtype, TE_DTYPE_F32);
}

static te_status layernorm_only(const te_check_site *site, const char *name,
                                const te_tensor *tensor, te_norm_kind kind)
{
    if (kind == TE_NORM_LAYERNORM || !te_tensor_present(tensor)) return TE_OK;
    return FAIL_AT(TE_ERROR_INVALID, site, name, "kind %d has none, only layernorm (%d) has",
                   (int)kind, (int)TE_NORM_LAYERNORM);
}

static te_status check_norm_flags(const te_check_site *site, uint32_t flags, uint32_t known)
{
    if ((flags & ~known) == 0U) return TE_OK;
    return FAIL_AT(TE_ERROR_INVALID, site, "flags", "0x%x, expected bits of 0x%x", (unsigned)flags,
                   (unsigned)known);
}

/* Rows that can be normalized. */
static te_status check_norm_input(const te_check_site *site, const te_tensor *input)
{
    TE_TRY(te_check_matrix(site, "input", input));
    TE_TRY(te_check_high_precision(site, "input", input->dtype));
    if (input->shape[1] > 0) return TE_OK;
    return FAIL_AT(TE_ERROR_INVALID, site, "input",
                   "shape [%lld, 0], expected at least one column to normalize over",
                   LL(input->shape[0]));
}

te_status te_check_norm(const te_check_site *site, const te_norm_args *args)
{
    const int64_t *shape = args->input.shape;
    const int given = (args->flags & TE_NORM_STATISTICS_GIVEN) != 0;
    TE_TRY(check_kind(site, (int)args->kind, TE_NORM_L2 + 1));
    TE_TRY(check_norm_flags(site, args->flags, TE_NORM_ZERO_CENTERED | TE_NORM_STATISTICS_GIVEN));
    TE_TRY(check_norm_input(site, &args->input));
    TE_TRY(check_optional_vector(site, "gamma", &args->gamma, shape[1]));
    TE_TRY(check_optional_vector(site, "beta", &args->beta, shape[1]));
    TE_TRY(layernorm_only(site, "beta", &args->beta, args->kind));
    if (te_tensor_present(&args->beta) && te_tensor_present(&args->gamma)) {
        TE_TRY(expect_dtype(site, "beta", args->beta.dtype, args->gamma.dtype));
    }
    TE_TRY(layernorm_only(site, "mean", &args->mean, args->kind));
    TE_TRY(check_statistic(site, "mean", &args->mean, shape[0],
                           given && args->kind == TE_NORM_LAYERNORM));
    TE_TRY(check_statistic(site, "rsigma", &args->rsigma, shape[0], given));
    TE_TRY(check_optional_numbers(site, "output", &args->output, shape[0], shape[1]));
    if (!(args->eps >= 0.0F) || isinf(args->eps)) {
        return FAIL_AT(TE_ERROR_INVALID, site, "eps", "%g, expected a finite number from 0 on",
                       (double)args->eps);
    }
    return check_fused_cast(site, &args->quantized, args->partials, args->amax_partials, shape);
}

te_status te_check_norm_backward(const te_check_site *site, const te_norm_backward_args *args)
{
    const int64_t rows = args->input.shape[0], columns = args->input.shape[1];
    TE_TRY(check_kind(site, (int)args->kind, TE_NORM_L2 + 1));
    TE_TRY(check_norm_flags(site, args->flags, TE_NORM_ZERO_CENTERED));
    TE_TRY(check_norm_input(site, &args->input));
    TE_TRY(check_numbers(site, "grad_output", &args->grad_output, rows, columns));
    TE_TRY(check_optional_numbers(site, "grad_add", &args->grad_add, rows, columns));
    if (te_tensor_present(&args->grad_add)) {
        TE_TRY(expect_dtype(site, "grad_add", args->grad_add.dtype, args->grad_output.dtype));
    }
    TE_TRY(check_optional_vector(site, "gamma", &args->gamma, columns));
    TE_TRY(layernorm_only(site, "mean", &args->mean, args->kind));
    TE_TRY(check_statistic(site, "mean", &args->mean, rows, args->kind == TE_NORM_LAYERNORM));
    TE_TRY(check_statistic(site, "rsigma", &args->rsigma, rows, 1));
    TE_TRY(check_optional_numbers(site, "grad_input", &args->grad_input, rows, columns));
    TE_TRY(check_optional_vector(site, "gamma_grad", &args->gamma_grad, columns));
    TE_TRY(layernorm_only(site, "beta_grad", &args->beta_grad, args->kind));
    return check_optional_vector(site, "beta_grad", &args->beta_grad, columns);
}

/* ---- activations ---- */

/* Kind, its numbers and its input; *columns is the width of its output. */
static te_status check_activation_input(const te_check_site *site, te_activation_kind kind,
                                        const te_activation_params *params, const te_tensor *input,
                                        int64_t *columns)
{
    TE_TRY(check_kind(site, (int)kind, TE_ACTIVATION_COUNT));
    TE_TRY(te_check_matrix(site, "input", input));
    TE_TRY(te_check_high_precision(site, "input", input->dtype));
    *columns = input->shape[1];
    if (te_activation_is_gated(kind)) {
        if (input->shape[1] % 2 != 0) {
            return FAIL_AT(TE_ERROR_INVALID, site, "input",
                           "%lld columns, expected an even number for the two halves of %s",
                           LL(input->shape[1]), te_activation_name(kind));
        }
        *columns = input->shape[1] / 2;
    }
    if (kind == TE_ACTIVATION_CLAMPED_SWIGLU && !(params->limit >= 0.0F)) {
        return FAIL_AT(TE_ERROR_INVALID, site, "limit", "%g, expected a number from 0 on",
                       (double)params->limit);
    }
    return TE_OK;
}

te_status te_check_activation(const te_check_site *site, const te_activation_args *args)
{
    int64_t shape[2] = {args->input.shape[0], 0};
    TE_TRY(check_activation_input(site, args->kind, &args->params, &args->input, &shape[1]));
    TE_TRY(check_optional_numbers(site, "output", &args->output, shape[0], shape[1]));
    return check_fused_cast(site, &args->quantized, args->partials, args->amax_partials, shape);
}

te_status te_check_activation_backward(const te_check_site *site,
                                       const te_activation_backward_args *args)
{
    const int64_t *shape = args->input.shape;
    int64_t columns = 0;
    TE_TRY(check_activation_input(site, args->kind, &args->params, &args->input, &columns));
    TE_TRY(check_numbers(site, "grad_output", &args->grad_output, shape[0], columns));
    TE_TRY(check_optional_numbers(site, "grad_input", &args->grad_input, shape[0], shape[1]));
    TE_TRY(check_optional_vector(site, "bias_grad", &args->bias_grad, shape[1]));
    return check_fused_cast(site, &args->quantized, args->partials, args->amax_partials, shape);
}

/* ---- softmax ---- */

enum { ATTENTION_DIMS = 4 }; /* batch, heads, queries, keys */

/* Far beyond any sequence, and sums of a few do not overflow. */
static const int64_t farthest = INT64_C(1) << 60;

static te_status check_window(const te_check_site *site, const char *name, int64_t value)
{
    if (value >= -farthest && value <= farthest) return TE_OK;
    return FAIL_AT(TE_ERROR_INVALID, site, name, "%lld, expected %lld to %lld", LL(value),
                   LL(-farthest), LL(farthest));
}

static te_status check_windows(const te_check_site *site, int64_t left, int64_t right,
                               int64_t diagonal)
{
    TE_TRY(check_window(site, "window_left", left));
    TE_TRY(check_window(site, "window_right", right));
    return check_window(site, "diagonal", diagonal);
}

/* An optional mask and bias of scores. */
static te_status check_limits(const te_check_site *site, const te_tensor *mask,
                              const te_tensor *bias, const te_tensor *scores)
{
    if (te_tensor_present(mask)) {
        TE_TRY(check_broadcast(site, "mask", mask, scores));
        TE_TRY(expect_dtype(site, "mask", mask->dtype, TE_DTYPE_U8));
    }
    if (!te_tensor_present(bias)) return TE_OK;
    TE_TRY(check_broadcast(site, "bias", bias, scores));
    return te_check_high_precision(site, "bias", bias->dtype);
}

te_status te_check_softmax(const te_check_site *site, const te_softmax_args *args)
{
    const te_tensor *input = &args->input;
    TE_TRY(check_dims(site, "input", input, ATTENTION_DIMS));
    TE_TRY(te_check_high_precision(site, "input", input->dtype));
    TE_TRY(check_result(site, "output", &args->output, input));
    if (te_tensor_present(&args->probabilities)) {
        TE_TRY(check_result(site, "probabilities", &args->probabilities, input));
    }
    TE_TRY(check_limits(site, &args->mask, &args->bias, input));
    TE_TRY(check_probability(site, "dropout", args->dropout));
    TE_TRY(check_rng(site, args->rng, args->dropout, 0.0F));
    return check_windows(site, args->window_left, args->window_right, args->diagonal);
}

te_status te_check_softmax_backward(const te_check_site *site, const te_softmax_backward_args *args)
{
    const te_tensor *grad_output = &args->grad_output;
    TE_TRY(check_dims(site, "grad_output", grad_output, ATTENTION_DIMS));
    TE_TRY(te_check_high_precision(site, "grad_output", grad_output->dtype));
    TE_TRY(check_alike(site, "probabilities", &args->probabilities, grad_output));
    TE_TRY(check_result(site, "grad_input", &args->grad_input, grad_output));
    TE_TRY(check_probability(site, "dropout", args->dropout));
    return check_rng(site, args->rng, args->dropout, 0.0F);
}

/* ---- attention ---- */

static te_status check_lengths(const te_check_site *site, const char *name,
                               const te_tensor *lengths, int64_t batch)
{
    if (!te_tensor_present(lengths)) return TE_OK;
    TE_TRY(te_check_vector(site, name, lengths, batch));
    return expect_dtype(site, name, lengths->dtype, TE_DTYPE_I32);
}

/* *scores: a tensor with the sizes of the scores. */
static te_status check_attention_problem(const te_check_site *site, const te_attention_problem *p,
                                         te_tensor *scores)
{
    const int64_t *query = p->query.shape, *key = p->key.shape;
    const te_dtype dtype = p->query.dtype;
    TE_TRY(check_dims(site, "query", &p->query, ATTENTION_DIMS));
    TE_TRY(te_check_high_precision(site, "query", dtype));
    TE_TRY(check_dims(site, "key", &p->key, ATTENTION_DIMS));
    if (key[2] == 0 ? query[2] != 0 : query[2] % key[2] != 0) {
        return FAIL_AT(TE_ERROR_INVALID, site, "key",
                       "%lld heads, expected a number that divides the %lld of query", LL(key[2]),
                       LL(query[2]));
    }
    TE_TRY(check_sizes(site, "key", &p->key, ATTENTION_DIMS,
                       (const int64_t[]){query[0], key[1], key[2], query[3]}));
    TE_TRY(expect_dtype(site, "key", p->key.dtype, dtype));
    TE_TRY(check_sizes(site, "value", &p->value, ATTENTION_DIMS,
                       (const int64_t[]){query[0], key[1], key[2], p->value.shape[3]}));
    TE_TRY(expect_dtype(site, "value", p->value.dtype, dtype));
    *scores = (te_tensor){.ndim = ATTENTION_DIMS, .shape = {query[0], query[2], query[1], key[1]}};
    TE_TRY(check_lengths(site, "query_lengths", &p->query_lengths, query[0]));
    TE_TRY(check_lengths(site, "key_lengths", &p->key_lengths, query[0]));
    TE_TRY(check_limits(site, &p->mask, &p->bias, scores));
    TE_TRY(check_probability(site, "dropout", p->dropout));
    TE_TRY(check_rng(site, p->rng, p->dropout, 0.0F));
    return check_windows(site, p->window_left, p->window_right, p->diagonal);
}

/* What is computed from the values: [batch, queries, heads, d_v] of the problem's dtype. */
static te_status check_attended(const te_check_site *site, const char *name,
                                const te_tensor *tensor, const te_attention_problem *p)
{
    const int64_t *query = p->query.shape;
    TE_TRY(check_sizes(site, name, tensor, ATTENTION_DIMS,
                       (const int64_t[]){query[0], query[1], query[2], p->value.shape[3]}));
    return expect_dtype(site, name, tensor->dtype, p->query.dtype);
}

static te_status check_statistics(const te_check_site *site, const te_tensor *tensor,
                                  const te_attention_problem *p)
{
    const int64_t *query = p->query.shape;
    const int64_t sizes[] = {query[0], query[2], query[1]};
    int64_t dense = 1;
    TE_TRY(check_sizes(site, "statistics", tensor, 3, sizes));
    for (int i = 2; i >= 0; i--) {
        if (sizes[i] > 1 && tensor->strides[i] != dense && te_tensor_numel(tensor) > 0) {
            return FAIL_AT(TE_ERROR_INVALID, site, "statistics",
                           "dim %d: stride %lld, expected %lld: make it contiguous", i,
                           LL(tensor->strides[i]), LL(dense));
        }
        dense *= sizes[i];
    }
    return expect_dtype(site, "statistics", tensor->dtype, TE_DTYPE_F32);
}

te_status te_check_attention(const te_check_site *site, const te_attention_args *args)
{
    te_tensor scores;
    TE_TRY(check_attention_problem(site, &args->problem, &scores));
    TE_TRY(check_attended(site, "output", &args->output, &args->problem));
    TE_TRY(check_no_overlap(site, "output", &args->output));
    if (!te_tensor_present(&args->statistics)) return TE_OK;
    return check_statistics(site, &args->statistics, &args->problem);
}

te_status te_check_attention_backward(const te_check_site *site,
                                      const te_attention_backward_args *args)
{
    const te_attention_problem *p = &args->problem;
    const struct {
        const char *name;
        const te_tensor *tensor, *like;
    } results[] = {{"grad_query", &args->grad_query, &p->query},
                   {"grad_key", &args->grad_key, &p->key},
                   {"grad_value", &args->grad_value, &p->value}};
    te_tensor scores;
    TE_TRY(check_attention_problem(site, p, &scores));
    TE_TRY(check_attended(site, "grad_output", &args->grad_output, p));
    TE_TRY(check_attended(site, "output", &args->output, p));
    TE_TRY(check_statistics(site, &args->statistics, p));
    for (size_t i = 0; i < sizeof results / sizeof *results; i++) {
        if (!te_tensor_present(results[i].tensor)) continue;
        TE_TRY(check_result(site, results[i].name, results[i].tensor, results[i].like));
    }
    if (!te_tensor_present(&args->grad_bias)) return TE_OK;
    if (!te_tensor_present(&p->bias)) {
        return FAIL_AT(TE_ERROR_INVALID, site, "grad_bias", "%s", "there is no bias");
    }
    TE_TRY(check_sizes(site, "grad_bias", &args->grad_bias, ATTENTION_DIMS, p->bias.shape));
    TE_TRY(te_check_high_precision(site, "grad_bias", args->grad_bias.dtype));
    return check_no_overlap(site, "grad_bias", &args->grad_bias);
}

/* ---- dropout ---- */

static te_status check_drops(const te_check_site *site, float dropout, float drop_path,
                             const int64_t *rng)
{
    TE_TRY(check_probability(site, "dropout", dropout));
    TE_TRY(check_probability(site, "drop_path", drop_path));
    return check_rng(site, rng, dropout, drop_path);
}

static te_status check_samples(const te_check_site *site, int64_t samples, int64_t rows)
{
    if (samples >= 1 && rows % samples == 0) return TE_OK;
    return FAIL_AT(TE_ERROR_INVALID, site, "samples",
                   "%lld, expected a number from 1 on that divides the %lld rows", LL(samples),
                   LL(rows));
}

te_status te_check_dropout_add(const te_check_site *site, const te_dropout_add_args *args)
{
    const te_tensor *input = &args->input;
    const int64_t *shape = input->shape;
    TE_TRY(te_check_matrix(site, "input", input));
    TE_TRY(te_check_high_precision(site, "input", input->dtype));
    TE_TRY(check_optional_vector(site, "bias", &args->bias, shape[1]));
    TE_TRY(check_optional_numbers(site, "residual", &args->residual, shape[0], shape[1]));
    if (te_tensor_present(&args->residual)) {
        TE_TRY(expect_dtype(site, "residual", args->residual.dtype, input->dtype));
    }
    TE_TRY(check_numbers(site, "output", &args->output, shape[0], shape[1]));
    TE_TRY(expect_dtype(site, "output", args->output.dtype, input->dtype));
    TE_TRY(check_drops(site, args->dropout, args->drop_path, args->rng));
    return check_samples(site, args->samples, shape[0]);
}

te_status te_check_dropout_backward(const te_check_site *site, const te_dropout_backward_args *args)
{
    const te_tensor *grad_output = &args->grad_output;
    const int64_t *shape = grad_output->shape;
    TE_TRY(te_check_matrix(site, "grad_output", grad_output));
    TE_TRY(te_check_high_precision(site, "grad_output", grad_output->dtype));
    TE_TRY(check_optional_numbers(site, "grad_input", &args->grad_input, shape[0], shape[1]));
    if (te_tensor_present(&args->grad_input)) {
        TE_TRY(expect_dtype(site, "grad_input", args->grad_input.dtype, grad_output->dtype));
    }
    TE_TRY(check_optional_vector(site, "bias_grad", &args->bias_grad, shape[1]));
    TE_TRY(check_drops(site, args->dropout, args->drop_path, args->rng));
    return check_samples(site, args->samples, shape[0]);
}

/* ---- rotary position embedding ---- */

/* Entries of the batch and tokens of the longest sequence that the shapes admit. */
static te_status check_rope_sequences(const te_check_site *site, const te_rope_args *args,
                                      int64_t *batch)
{
    const te_tensor *input = &args->input;
    const te_tensor *limits = &args->cu_seqlens;
    if (!te_tensor_present(limits)) {
        *batch = input->shape[0];
        return TE_OK;
    }
    if (limits->ndim != 1 || limits->shape[0] < 1 ||
        (limits->shape[0] < 2 && input->shape[0] > 0)) {
        return FAIL_AT(TE_ERROR_INVALID, site, "cu_seqlens",
                       "ndim %d and length %lld, expected a vector of batch + 1 for %lld tokens",
                       (int)limits->ndim, LL(limits->ndim > 0 ? limits->shape[0] : 0),
                       LL(input->shape[0]));
    }
    TE_TRY(te_check_vector(site, "cu_seqlens", limits, limits->shape[0]));
    *batch = limits->shape[0] - 1;
    return expect_dtype(site, "cu_seqlens", limits->dtype, TE_DTYPE_I32);
}

static te_status check_freqs(const te_check_site *site, const te_rope_args *args)
{
    const te_tensor *input = &args->input;
    const te_tensor *freqs = &args->freqs;
    const int64_t dim = input->shape[input->ndim - 1];
    TE_TRY(te_check_matrix(site, "freqs", freqs));
    TE_TRY(expect_dtype(site, "freqs", freqs->dtype, TE_DTYPE_F32));
    if (freqs->shape[1] % 2 != 0 || freqs->shape[1] > dim) {
        return FAIL_AT(TE_ERROR_INVALID, site, "freqs",
                       "%lld rotary channels, expected an even number of at most %lld",
                       LL(freqs->shape[1]), LL(dim));
    }
    if (freqs->shape[0] > 1 && freqs->strides[0] != freqs->shape[1]) {
        return FAIL_AT(TE_ERROR_INVALID, site, "freqs",
                       "row stride %lld, expected %lld: make it contiguous", LL(freqs->strides[0]),
                       LL(freqs->shape[1]));
    }
    /* Lengths and starts on the device are known to the kernel alone. */
    if (!te_tensor_present(&args->cu_seqlens) && freqs->shape[0] < input->shape[1]) {
        return FAIL_AT(TE_ERROR_INVALID, site, "freqs",
                       "%lld positions, expected at least the %lld of the sequence",
                       LL(freqs->shape[0]), LL(input->shape[1]));
    }
    return TE_OK;
}

te_status te_check_rope(const te_check_site *site, const te_rope_args *args)
{
    const te_tensor *input = &args->input;
    int64_t batch = 0;
    TE_TRY(check_dims(site, "input", input, te_tensor_present(&args->cu_seqlens) ? 3 : 4));
    TE_TRY(te_check_high_precision(site, "input", input->dtype));
    TE_TRY(check_result(site, "output", &args->output, input));
    TE_TRY(check_rope_sequences(site, args, &batch));
    if (te_tensor_present(&args->start_positions)) {
        TE_TRY(te_check_vector(site, "start_positions", &args->start_positions, batch));
        TE_TRY(expect_dtype(site, "start_positions", args->start_positions.dtype, TE_DTYPE_I32));
    }
    return check_freqs(site, args);
}
