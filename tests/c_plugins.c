/* SPDX-License-Identifier: Apache-2.0
 *
 * c_plugins.c - the plug-in of the tests, in the variants that tests/c_plugins.py builds with -D.
 *
 * Its fill writes value + ADDED to fp32 on the CPU. supports refuses what is negative; above 100
 * the function fails in one way or another. With WORKSPACE it asks for value times so many bytes,
 * and writes to all of them.
 */
#include <string.h>

#include <transformer_engine_plugin.h>

#ifndef NAME
#define NAME "mine"
#endif
#ifndef VENDOR
#define VENDOR "acme"
#endif
#ifndef PRIORITY
#define PRIORITY 0
#endif
#ifndef ADDED
#define ADDED 0.5F
#endif
#ifndef ABI
#define ABI TE_PLUGIN_ABI
#endif
#ifndef BACKEND_SIZE
#define BACKEND_SIZE sizeof(te_plugin_backend)
#endif
#ifndef APPENDED
#define APPENDED 0
#endif
#ifndef INIT
#define INIT te_plugin_init
#endif
#ifndef OP
#define OP fill
#endif
#ifndef RESULT
#define RESULT TE_OK
#endif
#ifndef REASON
#define REASON ""
#endif
#ifdef WORKSPACE
#define WORKSPACE_FUNCTION workspace
#else
#define WORKSPACE_FUNCTION NULL
#endif

/* With what OP stands for. */
#define OPERATOR(op, ...) TE_PLUGIN_OPERATOR(op, __VA_ARGS__)

static const te_host_api *host;
static int released;

/* For tests that look into the shared object. */
TE_API int plugin_released(void);
int plugin_released(void)
{
    return released;
}

TE_API te_status plugin_register_late(void);
te_status plugin_register_late(void)
{
    const te_plugin_backend backend = {.size = sizeof backend, .abi = TE_PLUGIN_ABI};
    return host->register_backend(&backend);
}

TE_API te_status INIT(const te_host_api *api, uint32_t abi);

static void release(void *self)
{
    ++*(int *)self;
}

#ifndef ALWAYS_FAILS
static te_status supports(void *self, te_context *context, const void *args)
{
    const te_fill_args *a = args;
    (void)self, (void)context;
    if (a->value < 0.0) {
        return TE_HOST_FAIL(host, TE_ERROR_UNSUPPORTED, "value = %g is negative", a->value);
    }
    return a->output.dtype == TE_DTYPE_F32 ? TE_OK : TE_ERROR_UNSUPPORTED;
}

#ifdef WORKSPACE
static te_status workspace(void *self, te_context *context, const void *args, size_t *bytes)
{
    (void)self, (void)context;
    *bytes = (size_t)(((const te_fill_args *)args)->value * WORKSPACE);
    return TE_OK;
}
#endif

static te_status run(void *self, te_context *context, const void *args, void *stream)
{
    const te_fill_args *a = args;
    const int64_t rows = a->output.shape[0], columns = a->output.shape[1];
    float *row = a->output.data;
    (void)self, (void)context, (void)stream;
#ifdef WORKSPACE
    if (a->workspace_size < (size_t)(a->value * WORKSPACE)) return TE_ERROR_MEMORY;
    if ((uintptr_t)a->workspace % 16 != 0) return TE_ERROR_STATE;
    if (a->workspace != NULL) memset(a->workspace, 0x5A, a->workspace_size);
#endif
    if (a->value > 600.0) return TE_ERROR_CALLBACK; /* and no exception is set */
    if (a->value > 500.0) return TE_HOST_FAIL(host, TE_ERROR_DEVICE, "%s", REASON);
    if (a->value > 400.0) return TE_ERROR_UNSUPPORTED;
    if (a->value > 300.0) return (te_status)77;
    if (a->value > 200.0) return TE_ERROR_DEVICE;
    if (a->value > 100.0) {
        return TE_HOST_FAIL(host, TE_ERROR_DEVICE, "the chip is gone, value = %g", a->value);
    }
    for (int64_t i = 0; i < rows; i++, row += a->output.strides[0]) {
        for (int64_t j = 0; j < columns; j++) row[j] = (float)a->value + ADDED;
    }
    return TE_OK;
}
#else
static te_status run(void *self, te_context *context, const void *args, void *stream)
{
    (void)self, (void)context, (void)args, (void)stream;
    return TE_HOST_FAIL(host, TE_ERROR_DEVICE, "the chip is gone");
}
#define supports NULL
#endif

te_status INIT(const te_host_api *api, uint32_t abi)
{
    const te_plugin_operator operators[] = {OPERATOR(OP, run, supports, WORKSPACE_FUNCTION, NULL)};
    const struct {
        te_plugin_backend backend;
        unsigned char appended[16]; /* by a later version */
    } given = {
        {
            .size = BACKEND_SIZE,
            .abi = ABI,
            .name = NAME,
            .vendor = VENDOR,
            .priority = PRIORITY,
            .operators = operators,
            .operator_count = 1,
            .release = release,
            .self = &released,
        },
        {APPENDED},
    };
    te_status st;
#ifdef BUILT_FOR
    abi = (uint32_t)BUILT_FOR << 16;
#endif
    TE_PLUGIN_REQUIRE(api, abi);
    host = api;
    st = api->register_backend(&given.backend);
    return st == TE_OK ? RESULT : st;
}
