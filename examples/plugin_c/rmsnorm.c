/* SPDX-License-Identifier: Apache-2.0
 *
 * A plug-in with one operator: the forward of RMSNorm on the CPU, in fp32 and bf16.
 */
#include <math.h>

#include <transformer_engine_plugin.h>

static const te_host_api *host; /* valid as long as the process lives */

/* Whether a call is one of ours: by kinds, dtypes and shapes, without a side effect. What is
 * refused here runs by whoever is asked next. */
static te_status supports(void *self, te_context *context, const void *args)
{
    const te_norm_args *a = args;
    const te_cast_request *cast = &a->cast;
    const te_dtype in = a->input.dtype, out = cast->result.wide.dtype;
    (void)self, (void)context;
    if (a->kind != TE_NORM_RMSNORM || (a->flags & ~(uint32_t)TE_NORM_ZERO_CENTERED) != 0) {
        return TE_HOST_FAIL(host, TE_ERROR_UNSUPPORTED, "kind %d, flags %u: not the plain RMSNorm",
                            (int)a->kind, (unsigned)a->flags);
    }
    if (cast->result.mode != TE_SCALING_NONE || cast->result.wide.data == NULL ||
        cast->amax != NULL || cast->amax_partials != NULL) {
        return TE_HOST_FAIL(host, TE_ERROR_UNSUPPORTED, "a cast, or no output");
    }
    if ((in != TE_DTYPE_F32 && in != TE_DTYPE_BF16) ||
        (out != TE_DTYPE_F32 && out != TE_DTYPE_BF16) || a->gamma.data == NULL) {
        return TE_HOST_FAIL(host, TE_ERROR_UNSUPPORTED, "%s to %s, gamma %s", host->dtype_name(in),
                            host->dtype_name(out), a->gamma.data == NULL ? "missing" : "given");
    }
    if (host->tensor_rows(&a->input).strides[0] < 0 ||
        host->tensor_rows(&cast->result.wide).strides[0] < 0) {
        return TE_HOST_FAIL(host, TE_ERROR_UNSUPPORTED, "rows that are no one distance apart");
    }
    return TE_OK;
}

/* The row of a matrix where it lies. */
static char *row_at(const te_tensor *rows, int64_t row)
{
    return (char *)rows->data + row * rows->strides[0] * (int64_t)host->dtype_bytes(rows->dtype);
}

/* Two rows of floats: gamma, and the row that is at hand. The caller allocates them. */
static te_status workspace(void *self, te_context *context, const void *args, size_t *bytes)
{
    const te_tensor *input = &((const te_norm_args *)args)->input;
    (void)self, (void)context;
    *bytes = 2 * sizeof(float) * (size_t)input->shape[input->ndim - 1];
    return TE_OK;
}

static te_status run(void *self, te_context *context, const void *args, void *stream)
{
    const te_norm_args *a = args;
    const te_tensor from = host->tensor_rows(&a->input);
    const te_tensor to = host->tensor_rows(&a->cast.result.wide);
    const int64_t columns = from.shape[1];
    const float shift = (a->flags & TE_NORM_ZERO_CENTERED) != 0 ? 1.0F : 0.0F;
    float *gamma = a->workspace, *x = gamma + columns;
    (void)self, (void)context, (void)stream; /* a device would get its work on the stream */
    (void)host->to_f32(a->gamma.dtype, a->gamma.data, gamma, columns);
    for (int64_t row = 0; row < from.shape[0]; row++) {
        double squares = 0.0;
        float rsigma;
        (void)host->to_f32(from.dtype, row_at(&from, row), x, columns);
        for (int64_t i = 0; i < columns; i++) squares += (double)x[i] * (double)x[i];
        rsigma = (float)(1.0 / sqrt(squares / (double)columns + (double)a->eps));
        if (a->rsigma.data != NULL) ((float *)a->rsigma.data)[row] = rsigma; /* for a backward */
        for (int64_t i = 0; i < columns; i++) x[i] *= rsigma * (gamma[i] + shift);
        (void)host->from_f32(to.dtype, x, row_at(&to, row), columns);
    }
    return TE_OK;
}

te_status te_plugin_init(const te_host_api *api, uint32_t abi)
{
    const te_plugin_operator operators[] = {
        TE_PLUGIN_OPERATOR(norm, run, supports, workspace, NULL)};
    const te_plugin_backend backend = {.size = sizeof backend,
                                       .abi = TE_PLUGIN_ABI,
                                       .name = "example_c",
                                       .vendor = "example",
                                       .device = TE_DEVICE_CPU,
                                       .operators = operators,
                                       .operator_count = 1};
    TE_PLUGIN_REQUIRE(api, abi);
    host = api;
    return api->register_backend(&backend);
}
