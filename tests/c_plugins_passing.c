/* SPDX-License-Identifier: Apache-2.0
 *
 * c_plugins_passing.c - a plug-in that has every operator, and runs each by the library's own.
 */
#include <transformer_engine_plugin.h>

static const te_host_api *host;
static te_op numbers[TE_OP_COUNT]; /* in the library, whatever it was built with */

static te_status workspace(void *self, te_context *context, const void *args, size_t *bytes)
{
    return host->op_workspace(context, *(te_op *)self, args, bytes);
}

static te_status run(void *self, te_context *context, const void *args, void *stream)
{
    return host->op_run(context, *(te_op *)self, args, stream);
}

te_status te_plugin_init(const te_host_api *api, uint32_t abi)
{
    const te_plugin_operator operators[] = {
#define X(NAME, name) TE_PLUGIN_OPERATOR(name, run, NULL, workspace, &numbers[TE_OP_##NAME]),
        TE_OPS(X)
#undef X
    };
    const te_plugin_backend backend = {.size = sizeof backend,
                                       .abi = TE_PLUGIN_ABI,
                                       .name = "passing",
                                       .vendor = "acme",
                                       .device = TE_DEVICE_CPU,
                                       .operators = operators,
                                       .operator_count = TE_OP_COUNT};
    TE_PLUGIN_REQUIRE(api, abi);
    host = api;
#define X(NAME, name) numbers[TE_OP_##NAME] = (te_op)api->op_find(#name);
    TE_OPS(X)
#undef X
    return api->register_backend(&backend);
}
