/* SPDX-License-Identifier: Apache-2.0
 *
 * value.c - what the checks of nodes ask of values.
 */
#include "core/status.h"
#include "core/tensor.h"
#include "layer/build.h"

te_status te_check_parameter(const te_graph_desc *graph, int32_t value, const char *what,
                             int64_t rows, int64_t columns)
{
    const te_value_desc *desc;
    const te_extent *shape;
    int matrix = rows > 0;
    if (value < 0) return TE_OK;
    desc = &graph->values[value];
    shape = desc->shape;
    if ((desc->flags & TE_VALUE_PARAMETER) != 0 && desc->ndim == 1 + matrix &&
        shape[0].symbol == TE_SYMBOL_NONE && shape[matrix].symbol == TE_SYMBOL_NONE &&
        shape[matrix].add == columns && (!matrix || shape[0].add == rows)) {
        return TE_OK;
    }
    return TE_FAIL(TE_ERROR_INVALID, "%s: %s is no parameter of %lld x %lld", what, desc->name,
                   (long long)(matrix ? rows : 1), (long long)columns);
}

int te_pair_fits(const te_graph_desc *graph, int32_t value, int wanted)
{
    const te_value_desc *pair = value < 0 ? NULL : &graph->values[value];
    if (pair == NULL || !wanted) return wanted == (pair != NULL);
    return pair->flags == TE_VALUE_INPUT && pair->dtype == TE_DTYPE_I64 && pair->ndim == 1 &&
           pair->shape[0].add == 2;
}

te_status te_check_pair(const te_graph_desc *graph, int32_t n, int i, int wanted)
{
    if (te_pair_fits(graph, graph->nodes[n].inputs[i], wanted)) return TE_OK;
    return TE_FAIL(TE_ERROR_INVALID, "graph: node %d: inputs[%d] = %d, expected %s", n, i,
                   graph->nodes[n].inputs[i],
                   wanted ? "an input i64 [2] {seed, offset} for its dropout"
                          : "none, for nothing is dropped");
}

/* A number of rows, or a constant. */
static int is_rows(const te_extent *extent)
{
    return extent->symbol == TE_SYMBOL_NONE || extent->symbol == TE_SYMBOL_ROWS ||
           extent->symbol == TE_SYMBOL_SOURCE_ROWS;
}

static int rows_fit(const te_extent *in, const te_extent *out, int64_t ranks)
{
    const int constant = in->symbol == TE_SYMBOL_NONE;
    const int64_t from = constant ? in->add : in->multiply,
                  to = constant ? out->add : out->multiply;
    if (ranks != TE_ANY_RANKS) return from * ranks == to;
    return from % to == 0 || to % from == 0;
}

te_status te_check_rows(const te_graph_desc *graph, int32_t n, const char *what, int64_t ranks)
{
    const te_node_desc *node = &graph->nodes[n];
    const te_value_desc *x = &graph->values[node->inputs[0]], *y = &graph->values[node->output];
    const te_extent *in = x->shape, *out = y->shape;
    TE_FAIL_IF(!te_dtype_is_high_precision((te_dtype)x->dtype) ||
                   !te_dtype_is_high_precision((te_dtype)y->dtype),
               TE_ERROR_TYPE, "%s: from %s to %s, expected f32, f16 or bf16", what,
               te_dtype_name((te_dtype)x->dtype), te_dtype_name((te_dtype)y->dtype));
    TE_FAIL_IF(x->ndim != 2 || y->ndim != 2 || in[1].symbol != TE_SYMBOL_NONE ||
                   out[1].symbol != TE_SYMBOL_NONE || (x->flags & TE_VALUE_PARAMETER) != 0,
               TE_ERROR_INVALID,
               "%s: from %s of %d dims to %s of %d, expected 2, the last of them constant", what,
               x->name, x->ndim, y->name, y->ndim);
    TE_FAIL_IF(in->symbol != out->symbol || in->align != out->align || !is_rows(in) ||
                   !rows_fit(in, out, ranks),
               TE_ERROR_INVALID, "%s: %s and %s have different numbers of rows", what, x->name,
               y->name);
    return TE_OK;
}

/* Whether a slice is all of a value of heads. */
static int is_all_of(const te_value_desc *heads, const te_slice *slice)
{
    const te_extent *last = &heads->shape[heads->ndim - 2];
    return last[0].add == slice->heads && last[1].add == slice->channels && slice->offset == 0 &&
           slice->stride == slice->channels && te_slice_together(slice) == 1;
}

te_status te_check_slice(const te_graph_desc *graph, int32_t n, int i)
{
    const te_node_desc *node = &graph->nodes[n];
    const te_value_desc *x = &graph->values[node->inputs[i]];
    const te_slice *slice = &node->slices[i];
    const te_extent *rows = &x->shape[0];
    if (te_is_of_heads(x) && node->kind == TE_NODE_ATTENTION && is_all_of(x, slice) &&
        te_dtype_is_high_precision((te_dtype)x->dtype)) {
        return TE_OK;
    }
    TE_FAIL_IF(x->ndim != 2 || !te_dtype_is_high_precision((te_dtype)x->dtype) ||
                   (rows->symbol != TE_SYMBOL_ROWS && rows->symbol != TE_SYMBOL_SOURCE_ROWS) ||
                   rows->multiply < 1 || rows->align != 1 || x->shape[1].symbol != TE_SYMBOL_NONE ||
                   (x->flags & TE_VALUE_PARAMETER) != 0,
               TE_ERROR_INVALID, "graph: node %d: heads of %s, which is no matrix of rows", n,
               x->name);
    TE_FAIL_IF(rows->multiply > 1 && node->kind != TE_NODE_HEAD_NORM &&
                   (node->flags & (uint32_t)(TE_NODE_SEQUENCE_FIRST | TE_NODE_PACKED)) == 0,
               TE_ERROR_INVALID, "graph: node %d: heads of %s, rows of %lld ranks behind the batch",
               n, x->name, (long long)rows->multiply);
    TE_FAIL_IF(
        slice->heads < 1 || slice->channels < 1 || slice->offset < 0 || slice->together < 0 ||
            slice->together > slice->heads || slice->heads % te_slice_together(slice) != 0 ||
            slice->offset > x->shape[1].add || slice->stride < te_slice_width(slice) ||
            slice->stride > x->shape[1].add ||
            slice->offset + (te_slice_blocks(slice) - 1) * slice->stride + te_slice_width(slice) >
                x->shape[1].add,
        TE_ERROR_INVALID,
        "graph: node %d: %d heads of %d channels at %lld + %lld h in the %lld "
        "columns of %s, %lld together",
        n, slice->heads, slice->channels, (long long)slice->offset, (long long)slice->stride,
        (long long)x->shape[1].add, x->name, (long long)slice->together);
    return TE_OK;
}

te_status te_check_output(const te_graph_desc *graph, int32_t n, const char *what, int32_t heads,
                          int32_t channels)
{
    const te_node_desc *node = &graph->nodes[n];
    const te_value_desc *x = &graph->values[node->inputs[0]], *y = &graph->values[node->output];
    if (y->ndim == 2 && y->dtype == x->dtype && y->shape[0].symbol == te_rows_symbol(x) &&
        y->shape[0].multiply == (te_is_of_heads(x) ? 1 : x->shape[0].multiply) &&
        y->shape[0].align == 1 && y->shape[1].add == (int64_t)heads * channels) {
        return TE_OK;
    }
    return TE_FAIL(TE_ERROR_INVALID, "%s: %s is no matrix of %d heads of %d channels", what,
                   y->name, heads, channels);
}

te_status te_check_heads(const te_graph_desc *graph, int32_t n, const char *what)
{
    const te_slice *slice = &graph->nodes[n].slices[0];
    TE_TRY(te_check_slice(graph, n, 0));
    return te_check_output(graph, n, what, slice->heads, slice->channels);
}
