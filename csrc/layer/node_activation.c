/* SPDX-License-Identifier: Apache-2.0
 *
 * node_activation.c - an activation as a node. Who reads its output, or the gradient of its input,
 * lets it cast.
 */
#include "core/status.h"
#include "layer/build.h"

static void set_kind(te_build *build, te_stage *stage, const te_node_desc *node)
{
    te_set_number(build, stage, "kind", node->variant);
    te_set_number(build, stage, "limit", (double)node->numbers[0]);
    te_set_number(build, stage, "alpha", (double)node->numbers[1]);
    te_set_number(build, stage, "linear_offset", (double)node->numbers[2]);
}

static te_stage *produce(te_build *build, int32_t n, const char *prefix, const char *name,
                         int again)
{
    const te_node_desc *node = te_node(build, n);
    int16_t input = te_wide(build, node->inputs[0], node->name, "activation_input");
    te_stage *stage = te_add(build, n, prefix, name, TE_OP_ACTIVATION);
    (void)again;
    set_kind(build, stage, node);
    te_use_as(build, stage, "input", input);
    return stage;
}

static te_stage *produce_grad(te_build *build, int32_t n, const char *prefix, const char *name)
{
    const te_node_desc *node = te_node(build, n);
    int16_t input = te_wide(build, node->inputs[0], node->name, "activation_input");
    int16_t grad = te_grad(build, node->output);
    te_stage *stage = te_add(build, n, prefix, name, TE_OP_ACTIVATION_BACKWARD);
    set_kind(build, stage, node);
    te_use_as(build, stage, "grad_output", grad);
    te_use_as(build, stage, "input", input);
    return stage;
}

static void forward(te_build *build, int32_t n)
{
    build->values[te_node(build, n)->output].pending = n;
}

static void again(te_build *build, int32_t n)
{
    const te_node_desc *node = te_node(build, n);
    (void)te_wide(build, node->inputs[0], node->name, "activation_input");
    forward(build, n);
}

static void backward(te_build *build, int32_t n)
{
    const te_node_desc *node = te_node(build, n);
    int32_t x = node->inputs[0];
    int gated = te_activation_is_gated((te_activation_kind)node->variant);
    int32_t maker = build->values[x].producer;
    int16_t grad;
    if (!build->values[x].needs_grad || !te_has_grad(build, node->output)) return;
    if (maker == TE_NOBODY || te_value_is_shared(build, x)) { /* nobody waits for it */
        te_stage *stage = produce_grad(build, n, node->name, "activation_backward");
        te_cast_to cast = te_cast_nothing();
        cast.wide = te_grad_target(build, x);
        te_ask_cast(build, stage, &cast);
        return;
    }
    build->values[x].grad_pending = n;
    build->values[x].grads++;
    /* In place, where who reads it reads it in high precision. */
    grad = te_grad(build, node->output);
    if (!gated && build->plan.status == TE_OK &&
        te_node(build, maker)->quantization.recipe == TE_RECIPE_NONE &&
        build->plan.buffers[grad].info.role == TE_ROLE_SCRATCH &&
        !te_links_has(&build->deferred, TE_LINK_GRADIENT, x)) {
        build->values[x].grad_alias = grad;
    }
}

static te_status check(const te_graph_desc *graph, int32_t n)
{
    const te_node_desc *node = &graph->nodes[n];
    const te_value_desc *x = &graph->values[node->inputs[0]], *y = &graph->values[node->output];
    int64_t columns = y->shape[1].add;
    TE_TRY(te_check_rows(graph, n, "activation", 1));
    if ((uint32_t)node->variant >= TE_ACTIVATION_COUNT) {
        return TE_FAIL(TE_ERROR_INVALID, "activation: kind = %d does not exist", node->variant);
    }
    if (te_activation_is_gated((te_activation_kind)node->variant)) columns *= 2;
    if (x->shape[1].add == columns && x->dtype == y->dtype && node->inputs[1] < 0 &&
        node->inputs[2] < 0 && node->inputs[3] < 0) {
        return TE_OK;
    }
    return TE_FAIL(TE_ERROR_INVALID, "activation: %s of %lld %s columns gives no %lld of %s",
                   te_activation_name((te_activation_kind)node->variant),
                   (long long)x->shape[1].add, te_dtype_name((te_dtype)x->dtype),
                   (long long)y->shape[1].add, te_dtype_name((te_dtype)y->dtype));
}

const te_node_rules te_activation_rules = {.name = "activation",
                                           .check = check,
                                           .forward = forward,
                                           .backward = backward,
                                           .again = again,
                                           .produce = produce,
                                           .produce_grad = produce_grad};
