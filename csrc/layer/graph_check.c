/* SPDX-License-Identifier: Apache-2.0
 *
 * graph_check.c - what a graph has to be before plans are made of it.
 */
#include <string.h>

#include "core/status.h"
#include "core/tensor.h"
#include "layer/linear_cast.h"

const te_node_rules *const te_rules[TE_NODE_KINDS] = {
    [TE_NODE_LINEAR] = &te_linear_rules,           [TE_NODE_NORM] = &te_norm_rules,
    [TE_NODE_ACTIVATION] = &te_activation_rules,   [TE_NODE_SOFTCAP] = &te_softcap_rules,
    [TE_NODE_ATTENTION] = &te_attention_rules,     [TE_NODE_ROPE] = &te_rope_rules,
    [TE_NODE_DROPOUT_ADD] = &te_dropout_add_rules, [TE_NODE_HEAD_NORM] = &te_head_norm_rules,
    [TE_NODE_FUNCTION] = &te_function_rules,       [TE_NODE_CONVERT] = &te_convert_rules,
    [TE_NODE_COLLECTIVE] = &te_collective_rules,
};

/* What keeps every size of a plan within 64 bits: elements of a value, by row where rows vary. */
#define MOST_IN_ROW ((int64_t)1 << 28)
#define MOST_FIXED ((int64_t)1 << 40)

/* Flags that only the weight of a linear node knows; only operands of one with a recipe. */
#define OF_WEIGHT                                                                                  \
    (uint32_t)(TE_VALUE_ACCUMULATE | TE_VALUE_OVERWRITE | TE_VALUE_DEFER | TE_VALUE_ALSO_WIDE)
#define OF_OPERAND (uint32_t)(TE_VALUE_KEEP_QUANTIZED | TE_VALUE_QUANTIZED)

static int is_given(const te_value_desc *value)
{
    return (value->flags & (uint32_t)(TE_VALUE_INPUT | TE_VALUE_PARAMETER)) != 0;
}

/* Leading dims as rows; of heads as rows, or as the two that there are. */
static int has_leading(const te_value_desc *value)
{
    const te_extent *shape = value->shape;
    const int apart = value->ndim == 4, rows = shape[0].symbol - apart;
    int fits = (rows == TE_SYMBOL_ROWS || rows == TE_SYMBOL_SOURCE_ROWS) && shape[0].align == 1;
    if (!te_is_of_heads(value)) return fits;
    fits &= shape[0].multiply == 1 && shape[value->ndim - 2].symbol == TE_SYMBOL_NONE &&
            shape[value->ndim - 1].symbol == TE_SYMBOL_NONE;
    return fits && (!apart ||
                    (shape[1].symbol == rows + 2 && shape[1].multiply == 1 && shape[1].align == 1));
}

static te_status check_shape(const te_value_desc *value)
{
    int64_t most = MOST_FIXED, elements = 1;
    int free = (value->flags & (uint32_t)(TE_VALUE_INPUT | TE_VALUE_LEADING)) == TE_VALUE_INPUT;
    int apart = te_is_of_heads(value) && value->ndim == 4;
    for (int32_t d = 0; d < value->ndim; d++) {
        const te_extent *e = &value->shape[d];
        int constant = e->symbol == TE_SYMBOL_NONE;
        int64_t length = constant ? e->add : e->multiply;
        if (free && constant && length == TE_ANY_LENGTH) continue;
        if (free && constant && length == 0 && d == value->ndim - 1) continue; /* no elements */
        if (free && e->symbol == TE_SYMBOL_SEQUENCES && e->multiply == 1 && e->align == 1 &&
            e->add == 1) {
            continue; /* offsets: one more than there are sequences */
        }
        TE_FAIL_IF(
            e->symbol < 0 || e->symbol >= TE_SYMBOL_COUNT || e->align < 1 || e->align > INT32_MAX ||
                e->divide > 1 || e->divide < 0 || length < 1 || length >= TE_ANY_LENGTH ||
                (!constant && (e->add != 0 || (!free && !apart && most == MOST_IN_ROW))),
            TE_ERROR_INVALID,
            "graph: %s: dim %d is roundup(%lld * symbol %d, %lld) + %lld, which is no size of "
            "a value",
            value->name, d, (long long)e->multiply, e->symbol, (long long)e->align,
            (long long)e->add);
        if (!constant) most = MOST_IN_ROW;
        elements = length > MOST_FIXED / elements ? MOST_FIXED + 1 : elements * length;
    }
    TE_FAIL_IF(elements > most, TE_ERROR_INVALID,
               "graph: %s: too large: more than 2^40 elements, or 2^28 in a row", value->name);
    TE_FAIL_IF((value->flags & TE_VALUE_LEADING) != 0 && !has_leading(value), TE_ERROR_INVALID,
               "graph: %s: TE_VALUE_LEADING, but its first dims are no number of tokens",
               value->name);
    return TE_OK;
}

/* Of what a node makes and another reads as it is. */
static int is_handed_over(uint32_t flags)
{
    const uint32_t of_call = TE_VALUE_INPUT | TE_VALUE_PARAMETER | TE_VALUE_RESULT;
    const uint32_t wanted = TE_VALUE_QUANTIZED | TE_VALUE_ROW_WISE;
    return (flags & (of_call | OF_OPERAND | wanted)) == wanted;
}

/* Whether flags about quantized forms go together, of a value of this kind. */
static int forms_fit(uint32_t flags, uint32_t kind)
{
    const uint32_t row_wise = TE_VALUE_QUANTIZED | TE_VALUE_RETURN_QUANTIZED;
    const uint32_t gradient = TE_VALUE_INPUT | TE_VALUE_GRADIENT;
    if ((flags & TE_VALUE_ROUNDED) != 0 && kind != 0 && kind != TE_VALUE_RESULT) return 0;
    if ((flags & OF_OPERAND) != 0 && kind == 0 && !is_handed_over(flags)) return 0;
    if ((flags & OF_OPERAND) == OF_OPERAND) return 0;
    if ((flags & TE_VALUE_ROW_WISE) != 0 && (flags & row_wise) == 0) return 0;
    if ((flags & TE_VALUE_ALSO_WIDE) != 0 && (flags & TE_VALUE_QUANTIZED) == 0) return 0;
    return (flags & TE_VALUE_RETURN_QUANTIZED) == 0 || kind == TE_VALUE_RESULT ||
           (flags & gradient) == gradient;
}

static te_status check_value(const te_value_desc *value, int32_t number)
{
    const uint32_t kinds = TE_VALUE_INPUT | TE_VALUE_PARAMETER | TE_VALUE_RESULT;
    uint32_t kind = value->flags & kinds;
    TE_FAIL_IF(memchr(value->name, '\0', sizeof value->name) == NULL || value->ndim < 1 ||
                   value->ndim > TE_MAX_DIMS || (kind & (kind - 1)) != 0 ||
                   value->flags >= (uint32_t)TE_VALUE_ROUNDED << 1 ||
                   ((value->flags & OF_WEIGHT) != 0 && kind != TE_VALUE_PARAMETER) ||
                   !forms_fit(value->flags, kind),
               TE_ERROR_INVALID,
               "graph: value %d: ndim = %d is not 1 to 4, flags = 0x%x do not go together, or "
               "its name has no end",
               number, value->ndim, value->flags);
    if (value->flags == TE_VALUE_INPUT &&
        (value->dtype == TE_DTYPE_U8 || value->dtype == TE_DTYPE_I32 ||
         value->dtype == TE_DTYPE_I64)) {
        return check_shape(value);
    }
    TE_FAIL_IF(!te_dtype_is_high_precision((te_dtype)value->dtype) ||
                   !te_dtype_is_high_precision((te_dtype)value->grad_dtype),
               TE_ERROR_TYPE, "graph: %s: dtype %s, gradient %s, expected f32, f16 or bf16",
               value->name, te_dtype_name((te_dtype)value->dtype),
               te_dtype_name((te_dtype)value->grad_dtype));
    return check_shape(value);
}

/* Whether the forms of a value, or of its gradient, can be given or returned: a linear node with a
 * recipe has it as an operand. */
static te_status check_operand(const te_graph_desc *graph, int32_t n, int32_t value, int role)
{
    const te_node_desc *node = &graph->nodes[n];
    const te_value_desc *desc = &graph->values[value];
    int keeps = (desc->flags & TE_VALUE_KEEP_QUANTIZED) != 0;
    if ((desc->flags & OF_OPERAND) == 0 || is_handed_over(desc->flags)) return TE_OK;
    if (node->kind == TE_NODE_LINEAR && te_is_quantized(&node->quantization) &&
        role < TE_GEMM_OPERANDS && (!keeps || te_has_forms(&node->quantization, role)) &&
        ((desc->flags & TE_VALUE_RESULT) != 0) == (role == TE_GRAD_OPERAND)) {
        return TE_OK;
    }
    return TE_FAIL(
        TE_ERROR_INVALID,
        "graph: node %d: %s has flags 0x%x, but only an input, a weight, or the gradient "
        "of a result that nobody reads has quantized forms, of a linear layer with a "
        "recipe",
        n, desc->name, desc->flags);
}

static te_status check_reader(const te_graph_desc *graph, int32_t n, int i)
{
    const te_node_desc *node = &graph->nodes[n];
    const te_value_desc *value = &graph->values[node->inputs[i]];
    TE_FAIL_IF(
        (value->flags & OF_WEIGHT) != 0 && (node->kind != TE_NODE_LINEAR || i != TE_WEIGHT_OPERAND),
        TE_ERROR_INVALID, "graph: node %d reads %s, whose flags 0x%x only a linear's weight has", n,
        value->name, value->flags);
    return check_operand(graph, n, node->inputs[i], i < TE_GRAD_OPERAND ? i : TE_GEMM_OPERANDS);
}

/* Lists of steps ascend: each one is there once. */
static te_status check_steps(const te_node_desc *node, int32_t n)
{
    const te_node_rules *of = te_rules[node->kind];
    for (int32_t i = 0; i < node->external_count; i++) {
        int32_t step = node->external[i], before = i == 0 ? -1 : node->external[i - 1];
        if (step > before && step < of->steps) continue;
        return TE_FAIL(TE_ERROR_INVALID,
                       "graph: node %d (%s): step %d is external, expected steps below %d in "
                       "ascending order",
                       n, of->name, step, of->steps);
    }
    for (int32_t i = 0; i < node->halves_count; i++) {
        int32_t step = node->halves[i], before = i == 0 ? -1 : node->halves[i - 1];
        if (step > before && (of->outside ? step < of->steps : te_is_external(node, step))) {
            continue;
        }
        return TE_FAIL(TE_ERROR_INVALID,
                       "graph: node %d (%s): step %d is in two halves, expected external steps in "
                       "ascending order",
                       n, of->name, step);
    }
    return TE_OK;
}

static te_status check_node(const te_graph_desc *graph, int32_t n)
{
    const te_node_desc *node = &graph->nodes[n];
    const te_node_rules *of = te_rules[node->kind];
    TE_FAIL_IF(memchr(node->name, '\0', sizeof node->name) == NULL || node->inputs[0] < 0 ||
                   node->output < 0 || node->output >= graph->value_count,
               TE_ERROR_INVALID,
               "graph: node %d: input 0 = %d or output = %d is no value, or its name has no end", n,
               node->inputs[0], node->output);
    for (int role = 0; role < TE_GEMM_OPERANDS; role++) {
        int32_t recipe = node->quantization.casts[role].recipe;
        if (te_recipe_exists(recipe)) continue;
        return TE_FAIL(TE_ERROR_INVALID, "graph: node %d: recipe = %d does not exist", n, recipe);
    }
    TE_FAIL_IF((node->flags & ~of->flags) != 0 ||
                   (!of->casts && te_is_quantized(&node->quantization)),
               TE_ERROR_INVALID,
               "graph: node %d (%s): flags 0x%x and recipe %d, of which it knows 0x%x and "
               "%s",
               n, of->name, node->flags, node->quantization.casts[0].recipe, of->flags,
               of->casts ? "any" : "none");
    TE_FAIL_IF((node->ranks != 1 || node->rank != 0) && node->kind != TE_NODE_COLLECTIVE,
               TE_ERROR_INVALID, "graph: node %d (%s): %d ranks, which only a collective has", n,
               of->name, node->ranks);
    TE_TRY(check_steps(node, n));
    for (int i = 0; i < node->input_count; i++) {
        TE_FAIL_IF(node->inputs[i] < -1 || node->inputs[i] >= graph->value_count, TE_ERROR_INVALID,
                   "graph: node %d: there is no value %d", n, node->inputs[i]);
        if (node->inputs[i] >= 0) TE_TRY(check_reader(graph, n, i));
    }
    TE_TRY(check_operand(graph, n, node->output, TE_GRAD_OPERAND));
    return of->check(graph, n);
}

/* Whether two slices of a matrix have elements in common. */
static int overlap(const te_slice *a, const te_slice *b)
{
    for (int64_t i = 0, j = 0; i < te_slice_blocks(a) && j < te_slice_blocks(b);) {
        int64_t at = a->offset + i * a->stride, other = b->offset + j * b->stride;
        if (at < other + te_slice_width(b) && other < at + te_slice_width(a)) return 1;
        if (at < other) {
            i++;
        } else {
            j++;
        }
    }
    return 0;
}

/* A matrix that is read by slices is read by nothing else, and each column once: its gradient is
 * that of its slices. */
static te_status check_slices(const te_graph_desc *graph, int32_t n, int i)
{
    const te_slice *slice = &graph->nodes[n].slices[i];
    int32_t x = graph->nodes[n].inputs[i];
    int64_t columns = 0;
    int whole = (graph->values[x].flags & TE_VALUE_RESULT) == 0;
    for (int32_t k = 0; k < graph->node_count; k++) {
        for (int j = 0; j < graph->nodes[k].input_count; j++) {
            const te_slice *other;
            if (graph->nodes[k].inputs[j] != x) continue;
            whole &= j < te_rules[graph->nodes[k].kind]->slices;
            if (!whole) break;
            other = &graph->nodes[k].slices[j];
            columns += (int64_t)other->heads * other->channels;
            whole &= (k == n && j == i) || !overlap(slice, other);
        }
    }
    if (whole && (te_is_of_heads(&graph->values[x]) || columns == graph->values[x].shape[1].add)) {
        return TE_OK;
    }
    return TE_FAIL(
        TE_ERROR_UNSUPPORTED,
        "graph: node %d: %s is read by slices: expected one slice for each of its columns, "
        "and no other reader",
        n, graph->values[x].name);
}

/* Its gradient is written as a whole: only those of matrices of data are summed. */
static int has_one_reader(const te_value_desc *value)
{
    return (value->flags & TE_VALUE_GRADIENT) != 0 &&
           ((value->flags & TE_VALUE_PARAMETER) != 0 || value->ndim != 2);
}

/* Every value is given or made by one node, before those that read it, and none in vain. */
static te_status check_order(const te_graph_desc *graph, te_value_state *values)
{
    for (int32_t v = 0; v < graph->value_count; v++) values[v].producer = TE_NOBODY;
    for (int32_t n = 0; n < graph->node_count; n++) {
        const te_node_desc *node = &graph->nodes[n];
        int32_t y = node->output;
        for (int i = 0; i < node->input_count; i++) {
            int32_t x = node->inputs[i];
            if (x < 0) continue;
            TE_FAIL_IF(!is_given(&graph->values[x]) && values[x].producer == TE_NOBODY,
                       TE_ERROR_INVALID, "graph: node %d reads %s, which no earlier node makes", n,
                       graph->values[x].name);
            TE_FAIL_IF(
                values[x].readers++ > 0 && has_one_reader(&graph->values[x]), TE_ERROR_UNSUPPORTED,
                "graph: node %d: %s has a gradient and is read twice, which only matrices can be",
                n, graph->values[x].name);
            if (i < node->slice_count) TE_TRY(check_slices(graph, n, i));
        }
        TE_FAIL_IF(is_given(&graph->values[y]) || values[y].producer != TE_NOBODY, TE_ERROR_INVALID,
                   "graph: node %d makes %s, which is given or made by another node", n,
                   graph->values[y].name);
        values[y].producer = n;
    }
    for (int32_t n = 0; n < graph->node_count; n++) {
        int32_t y = graph->nodes[n].output;
        TE_FAIL_IF((graph->flags & TE_GRAPH_RECOMPUTE) != 0 && values[y].readers > 0 &&
                       te_rules[graph->nodes[n].kind]->again == NULL,
                   TE_ERROR_UNSUPPORTED,
                   "graph: node %d (%s) can not be repeated, which TE_GRAPH_RECOMPUTE asks for", n,
                   te_rules[graph->nodes[n].kind]->name);
        if (values[y].readers > 0 || (graph->values[y].flags & TE_VALUE_RESULT) != 0) continue;
        return TE_FAIL(TE_ERROR_INVALID,
                       "graph: node %d makes %s, which is no result and which nobody reads", n,
                       graph->values[y].name);
    }
    for (int32_t v = 0; v < graph->value_count; v++) {
        if ((graph->values[v].flags & TE_VALUE_RESULT) == 0) continue;
        if (values[v].producer != TE_NOBODY) continue;
        return TE_FAIL(TE_ERROR_INVALID, "graph: no node makes the result %s",
                       graph->values[v].name);
    }
    return TE_OK;
}

/* Whether an attention makes a value in FP8 with one scale. */
static int is_made_in_fp8(const te_graph_desc *graph, const te_value_state *state)
{
    const te_node_desc *node = state->producer == TE_NOBODY ? NULL : &graph->nodes[state->producer];
    return node != NULL && node->kind == TE_NODE_ATTENTION && te_is_quantized(&node->quantization);
}

/* What is handed over is made by an attention with a recipe, and read by one linear node that
 * multiplies such inputs. */
static te_status check_handed_over(const te_graph_desc *graph, const te_value_state *values)
{
    for (int32_t n = 0; n < graph->node_count; n++) {
        const te_node_desc *node = &graph->nodes[n], *maker;
        const te_quantization *q = &node->quantization;
        for (int i = 0; i < node->input_count; i++) {
            const int32_t x = node->inputs[i];
            if (x < 0 || !is_handed_over(graph->values[x].flags)) continue;
            maker = &graph->nodes[values[x].producer];
            if (is_made_in_fp8(graph, &values[x]) && values[x].readers == 1 &&
                node->kind == TE_NODE_LINEAR && i == TE_INPUT_OPERAND &&
                te_role_dtype(q, TE_INPUT_OPERAND) ==
                    te_role_dtype(&maker->quantization, TE_INPUT_OPERAND)) {
                continue;
            }
            return TE_FAIL(TE_ERROR_INVALID,
                           "graph: node %d: %s is handed over in FP8 (flags 0x%x): from an "
                           "attention with a recipe to one linear layer whose inputs have the same "
                           "dtype and one scale",
                           n, graph->values[x].name, graph->values[x].flags);
        }
    }
    return TE_OK;
}

/* What is returned quantized is cast by a linear node, or made in FP8 by an attention; a result is
 * nothing else then. */
static te_status check_returned(const te_graph_desc *graph, const te_value_state *values)
{
    for (int32_t v = 0; v < graph->value_count; v++) {
        const te_value_desc *value = &graph->values[v];
        const te_node_desc *node;
        int32_t k;
        if ((value->flags & TE_VALUE_RETURN_QUANTIZED) == 0) continue;
        if ((value->flags & TE_VALUE_ROW_WISE) != 0 && values[v].readers == 0 &&
            is_made_in_fp8(graph, &values[v])) {
            continue;
        }
        k = te_caster_of(graph, v);
        node = k == TE_NOBODY ? NULL : &graph->nodes[k];
        if (node != NULL && te_is_quantized(&node->quantization) &&
            ((value->flags & TE_VALUE_RESULT) == 0 || values[v].readers == 0) &&
            ((value->flags & TE_VALUE_ROW_WISE) == 0 ||
             te_recipe_rule_of(&node->quantization, TE_INPUT_OPERAND)->mode == TE_SCALING_TENSOR)) {
            continue;
        }
        return TE_FAIL(TE_ERROR_INVALID,
                       "graph: %s is returned quantized (flags 0x%x): that takes a linear layer "
                       "with a recipe that makes it, or that it comes to first, "
                       "or an attention in FP8 that makes it row-wise, "
                       "no other reader of a result, and one scale for the tensor where it is "
                       "row-wise alone",
                       value->name, value->flags);
    }
    return TE_OK;
}

static te_status check_count(const char *what, const void *list, int32_t count, int32_t most)
{
    TE_FAIL_IF(count == 0, TE_ERROR_INVALID, "graph: it has no %s", what);
    if (list != NULL && count > 0 && count <= most) return TE_OK;
    return TE_FAIL(TE_ERROR_INVALID, "graph: %d %s%s, expected 1 to %d", count, what,
                   list == NULL ? " at NULL" : "", most);
}

te_status te_check_head(const te_graph_desc *graph, te_direction direction)
{
    TE_FAIL_IF(graph == NULL, TE_ERROR_INVALID, "graph is NULL");
    TE_FAIL_IF(graph->size != sizeof *graph || (graph->flags & ~(uint32_t)TE_GRAPH_RECOMPUTE) != 0,
               TE_ERROR_INVALID,
               "graph: size = %zu, expected %zu, or flags = 0x%x, of which only 1 is known",
               graph->size, sizeof *graph, graph->flags);
    TE_TRY(check_count("values", graph->values, graph->value_count, TE_GRAPH_VALUES));
    TE_TRY(check_count("nodes", graph->nodes, graph->node_count, TE_GRAPH_NODES));
    TE_FAIL_IF((int)direction < 0 || direction >= TE_DIRECTION_COUNT, TE_ERROR_INVALID,
               "graph: direction = %d does not exist", (int)direction);
    return TE_OK;
}

te_status te_check_graph(const te_graph_desc *graph, te_value_state *values)
{
    for (int32_t v = 0; v < graph->value_count; v++) TE_TRY(check_value(&graph->values[v], v));
    for (int32_t n = 0; n < graph->node_count; n++) TE_TRY(check_node(graph, n));
    TE_TRY(check_order(graph, values));
    TE_TRY(check_handed_over(graph, values));
    return check_returned(graph, values);
}
