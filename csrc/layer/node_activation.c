/* SPDX-License-Identifier: Apache-2.0
 *
 * node_activation.c - an activation, or a softcap, as a node. Who reads its output, or the gradient
 * of its input, lets it cast.
 */
#include "core/status.h"
#include "layer/build.h"
#include "layer/recipe.h"

static int is_softcap(const te_node_desc *node)
{
    return node->kind == TE_NODE_SOFTCAP;
}

static int is_gated(const te_node_desc *node)
{
    return !is_softcap(node) && te_activation_is_gated((te_activation_kind)node->variant);
}

static void set_kind(te_build *build, te_stage *stage, const te_node_desc *node)
{
    if (is_softcap(node)) {
        te_set_number(build, stage, "cap", node->numbers[0]);
        return;
    }
    te_set_number(build, stage, "kind", node->variant);
    te_set_number(build, stage, "limit", node->numbers[0]);
    te_set_number(build, stage, "alpha", node->numbers[1]);
    te_set_number(build, stage, "linear_offset", node->numbers[2]);
}

static te_stage *produce(te_build *build, int32_t n, const char *prefix, const char *name,
                         int again)
{
    const te_node_desc *node = te_node(build, n);
    int32_t input = te_wide(build, node->inputs[0], node->name, "activation_input");
    te_stage *stage =
        te_add(build, n, prefix, name, is_softcap(node) ? TE_OP_SOFTCAP : TE_OP_ACTIVATION);
    (void)again;
    set_kind(build, stage, node);
    te_use_as(build, stage, "input", input);
    return stage;
}

static te_stage *produce_grad(te_build *build, int32_t n, const char *prefix, const char *name)
{
    const te_node_desc *node = te_node(build, n);
    int32_t input = te_wide(build, node->inputs[0], node->name, "activation_input");
    int32_t grad = te_grad(build, node->output);
    te_stage *stage = te_add(build, n, prefix, name,
                             is_softcap(node) ? TE_OP_SOFTCAP : TE_OP_ACTIVATION_BACKWARD);
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

/* Whether who made a value lets the operator of its gradient sum its columns: a softcap can not. */
static int sums_columns(const te_build *build, int32_t maker)
{
    const te_node_desc *node = te_node(build, maker);
    return node->kind == TE_NODE_LINEAR && node->inputs[2] >= 0 &&
           (te_value(build, node->inputs[2])->flags & TE_VALUE_GRADIENT) != 0;
}

static void backward(te_build *build, int32_t n)
{
    const te_node_desc *node = te_node(build, n);
    int32_t x = node->inputs[0];
    int32_t maker = build->values[x].producer;
    int32_t grad;
    if (!build->values[x].needs_grad || !te_has_grad(build, node->output)) return;
    if (maker == TE_NOBODY || te_value_is_shared(build, x) || /* nobody waits for it */
        (is_softcap(node) && sums_columns(build, maker))) {
        te_stage *stage = produce_grad(
            build, n, node->name, is_softcap(node) ? "softcap_backward" : "activation_backward");
        te_cast_to cast = te_cast_nothing();
        cast.wide = te_grad_target(build, x);
        te_ask_cast(build, stage, &cast);
        return;
    }
    build->values[x].grad_pending = n;
    build->values[x].grads++;
    /* In place, where who reads it reads it in high precision. */
    grad = te_grad(build, node->output);
    if (!is_gated(node) && te_grad_is_own(build, node->output, grad) &&
        !te_has_forms(&te_node(build, maker)->quantization, TE_GRAD_OPERAND) &&
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
    TE_FAIL_IF((uint32_t)node->variant >= TE_ACTIVATION_COUNT, TE_ERROR_INVALID,
               "activation: kind = %d does not exist", node->variant);
    if (is_gated(node)) columns *= 2;
    TE_FAIL_IF(is_softcap(node) && !(node->numbers[0] > 0.0), TE_ERROR_INVALID,
               "softcap: cap = %g, expected a positive number", node->numbers[0]);
    if (x->shape[1].add == columns && x->dtype == y->dtype) return TE_OK;
    return TE_FAIL(TE_ERROR_INVALID, "activation: %s of %lld %s columns gives no %lld of %s",
                   te_activation_name((te_activation_kind)node->variant),
                   (long long)x->shape[1].add, te_dtype_name((te_dtype)x->dtype),
                   (long long)y->shape[1].add, te_dtype_name((te_dtype)y->dtype));
}

#define RULES(kind)                                                                                \
    {                                                                                              \
        .name = kind, .inputs = 1, .numbers = 3, .check = check, .forward = forward,               \
        .backward = backward, .again = again, .produce = produce, .produce_grad = produce_grad     \
    }

const te_node_rules te_activation_rules = RULES("activation");
const te_node_rules te_softcap_rules = RULES("softcap");
