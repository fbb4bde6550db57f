/* SPDX-License-Identifier: Apache-2.0
 *
 * c_plugins_npu.c - a vendor's plug-in for the test device "npu" (tests/devices): fill and RMSNorm
 * in fp32. Pointers of the device are addresses of the host under a tag in bits 52 to 55. Handles
 * of its streams are their numbers, 0 of the default one; the last one of fill is kept for tests.
 */
#include <math.h>

#include <transformer_engine_plugin.h>

enum { DL_EXT_DEV = 12 };

static const te_host_api *host;
static _Thread_local void *filled_on;

TE_API void *chip_filled_on(void);
void *chip_filled_on(void)
{
    return filled_on;
}

static float *memory(const te_tensor *tensor)
{
    return (float *)((uintptr_t)tensor->data & (((uintptr_t)1 << 52) - 1));
}

static te_status supports_fill(void *self, te_context *context, const void *args)
{
    const te_fill_args *a = args;
    (void)self, (void)context;
    return a->output.dtype == TE_DTYPE_F32
               ? TE_OK
               : TE_HOST_FAIL(host, TE_ERROR_UNSUPPORTED, "%s", host->dtype_name(a->output.dtype));
}

static te_status run_fill(void *self, te_context *context, const void *args, void *stream)
{
    const te_fill_args *a = args;
    const te_tensor rows = host->tensor_rows(&a->output);
    (void)self, (void)context;
    filled_on = stream;
    for (int64_t i = 0; i < rows.shape[0]; i++) {
        for (int64_t j = 0; j < rows.shape[1]; j++) {
            memory(&rows)[i * rows.strides[0] + j] = (float)a->value;
        }
    }
    return TE_OK;
}

static te_status supports_norm(void *self, te_context *context, const void *args)
{
    const te_norm_args *a = args;
    const te_tensor *out = &a->cast.result.wide;
    (void)self, (void)context;
    if (a->kind == TE_NORM_RMSNORM && a->flags == 0 && a->input.dtype == TE_DTYPE_F32 &&
        a->gamma.dtype == TE_DTYPE_F32 && a->gamma.data != NULL && out->data != NULL &&
        out->dtype == TE_DTYPE_F32 && a->cast.result.mode == TE_SCALING_NONE &&
        a->cast.amax == NULL && a->cast.amax_partials == NULL &&
        host->tensor_rows(&a->input).strides[0] >= 0 && host->tensor_rows(out).strides[0] >= 0)
        return TE_OK;
    return TE_HOST_FAIL(host, TE_ERROR_UNSUPPORTED, "not the RMSNorm of fp32");
}

static te_status run_norm(void *self, te_context *context, const void *args, void *stream)
{
    const te_norm_args *a = args;
    const te_tensor in = host->tensor_rows(&a->input);
    const te_tensor out = host->tensor_rows(&a->cast.result.wide);
    (void)self, (void)context, (void)stream;
    for (int64_t i = 0; i < in.shape[0]; i++) {
        const float *x = memory(&in) + i * in.strides[0];
        double squares = 0.0;
        float rsigma;
        for (int64_t j = 0; j < in.shape[1]; j++) squares += (double)x[j] * (double)x[j];
        rsigma = (float)(1.0 / sqrt(squares / (double)in.shape[1] + (double)a->eps));
        if (a->rsigma.data != NULL) memory(&a->rsigma)[i] = rsigma;
        for (int64_t j = 0; j < in.shape[1]; j++) {
            memory(&out)[i * out.strides[0] + j] = x[j] * rsigma * memory(&a->gamma)[j];
        }
    }
    return TE_OK;
}

te_status te_plugin_init(const te_host_api *api, uint32_t abi)
{
    const te_plugin_operator operators[] = {
        TE_PLUGIN_OPERATOR(fill, run_fill, supports_fill, NULL, NULL),
        TE_PLUGIN_OPERATOR(norm, run_norm, supports_norm, NULL, NULL)};
    te_plugin_backend backend = {.size = sizeof backend,
                                 .abi = TE_PLUGIN_ABI,
                                 .name = "chip",
                                 .vendor = "chip",
                                 .operators = operators,
                                 .operator_count = 2};
    te_status st;
    TE_PLUGIN_REQUIRE(api, abi);
    host = api;
    if (!TE_HOST_HAS(host, device_type_add))
        return TE_HOST_FAIL(host, TE_ERROR_UNSUPPORTED,
                            "version 1.1 of the interface adds devices");
    st = host->device_type_add("npu", DL_EXT_DEV, &backend.device);
    return st == TE_OK ? host->register_backend(&backend) : st;
}
