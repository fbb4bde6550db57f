# SPDX-License-Identifier: Apache-2.0
"""Wrong graphs: an exception of `make_plan` that names what is wrong, and no crash."""

import re

import native
import pytest
from core.junk import ACCEPTED, JUNK, core
from native import K, N


def junked(item, junk):
    """Every way to put junk into a nested tuple, in place of one item or of the whole."""
    yield junk
    if not isinstance(item, tuple):
        return
    if hasattr(item, "_fields"):
        for name in item._fields:
            for changed in junked(getattr(item, name), junk):
                yield item._replace(**{name: changed})
        yield item._asdict() | {"junk": junk}
        return
    for at, inner in enumerate(item):
        for changed in junked(inner, junk):
            yield (*item[:at], changed, *item[at + 1 :])
    yield item[:-1]
    yield (*item, junk)


NUMBERS = {"-2": -2, "1000": 1000, "2**31": 2**31, "2**32": 2**32, "2**63": 2**63}


@pytest.mark.parametrize("of", ["mlp", "attention"])
@pytest.mark.parametrize("value", [*JUNK, *NUMBERS])
def test_no_graph_crashes(value, of):
    """Each field of each value and node is junk in turn; what is taken has a layout."""
    junk = (JUNK | NUMBERS)[value]
    graph = {"mlp": native.mlp_graph, "attention": native.attention_graph}[of](core)
    lists = {"values": tuple(graph.values), "nodes": tuple(graph.nodes)}
    made = refused = 0
    for name, items in lists.items():
        for at, item in enumerate(items):
            for changed in junked(item, junk):
                graph = lists | {name: (*items[:at], changed, *items[at + 1 :])}
                try:
                    plan = core.make_plan(made % 3, graph)
                except ACCEPTED as error:
                    assert str(error)
                    refused += 1
                    continue
                made += 1
                assert core.plan_describe(plan).direction
                if of == "mlp":
                    assert core.plan_infer(plan, 3)
    assert refused > made


def graph_error(direction=0, flags=0, value=(0, {}), node=(0, {}), **change):
    """What make_plan says of the norm-MLP with some fields of a value and of a node replaced."""
    graph = native.mlp_graph(core)
    values, nodes = graph.values, graph.nodes
    at = [v.name for v in values].index(value[0]) if value[0] else 0
    values[at] = values[at]._replace(**value[1])
    nodes[node[0]] = nodes[node[0]]._replace(**node[1])
    lists = {"flags": flags, "values": tuple(values), "nodes": nodes} | change
    with pytest.raises(ACCEPTED) as raised:
        core.make_plan(direction, lists)
    return raised.value


ROWS_DIM = native.rows_dim(core)
LINEAR = native.mlp_graph(core).nodes[1]
CAST = LINEAR.quantization


def cast_of(*changes, backward=0, recipe=1):
    """Quantization of a node with changes: (operand, field, value), fields as the struct has."""
    dtypes = (core.DTYPE_U8,) * 3 if recipe == core.RECIPE_NVFP4 else [c.dtype for c in CAST.casts]
    casts = [{"recipe": recipe, "dtype": dtype} for dtype in dtypes]
    for role, field, value in changes:
        casts[role][field] = value
    return (1, dict(quantization={"casts": casts, "backward": backward}))


FP4 = core.RECIPE_NVFP4
RHT, SR, SQUARE = core.CAST_HADAMARD, core.CAST_STOCHASTIC, core.CAST_TILES_2D
OVER = core.CAST_FOUR_OVER_SIX
GRAPH_ERRORS = [
    (dict(direction=3), ValueError, "make_plan: direction: 3 is out of range, expected 0 to 2"),
    (dict(flags=-1), ValueError, "make_plan: flags: -1 is out of range"),
    (dict(flags=2), ValueError, "graph: size .*, or flags = 0x2"),
    (dict(values=()), ValueError, "graph: it has no values"),
    (dict(nodes=()), ValueError, "graph: it has no nodes"),
    (dict(values=(), nodes=()), ValueError, "graph: it has no values"),
    (dict(values={}), TypeError, "make_plan: values: expected a tuple or a list, got <class 'di"),
    (
        dict(values=(3,)),
        TypeError,
        "make_plan: Value: expected a dict, or an object with the attribute name, got <class 'int'",
    ),
    (dict(nodes=(LINEAR,) * 1025), ValueError, "nodes: 1025 items, expected at most 1024"),
    (dict(edges=()), ValueError, "make_plan: Graph: 1 keys of the dict are none of its members"),
    (dict(node=(1, dict(slots=(0, 0, 0)))), ValueError, "make_plan: slots: 3 items, expected 2"),
    (dict(value=("", dict(name="x" * 24))), ValueError, "x{24} has more than 23 characters"),
    (dict(value=("", dict(name="a\0b"))), ValueError, "embedded null"),
    (dict(value=("", dict(flags=2**32))), ValueError, "make_plan: flags: 4294967296 is out of"),
    (
        dict(value=("", dict(flags=1 << 10))),
        ValueError,
        "value 0: ndim = 2 is not 1 to 4, flags = 0x400",
    ),
    (dict(value=("", dict(flags=3))), ValueError, "flags = 0x3"),
    (
        dict(value=("", dict(dtype=core.DTYPE_U8))),
        TypeError,
        "graph: input: dtype u8, gradient f32",
    ),
    (dict(value=("", dict(grad_dtype=99))), TypeError, "gradient invalid, expected f32, f16 or"),
    (dict(value=("", dict(shape=()))), ValueError, "value 0: ndim = 0"),
    (
        dict(value=("", dict(shape=(1,) * 5))),
        ValueError,
        "make_plan: shape: 5 items, expected at most 4",
    ),
    (dict(value=("", dict(shape=(0, K)))), ValueError, "make_plan: shape: 0 is out of range"),
    (
        dict(value=("", dict(shape=({"symbol": 10, "multiply": 1}, K)))),
        ValueError,
        "dim 0 is roundup.1 . symbol 10, 1",
    ),
    (dict(value=("", dict(shape=(2**31 - 1, K)))), ValueError, "graph: input: dim 0 is"),
    (dict(value=("", dict(shape=(ROWS_DIM, 2**30)))), ValueError, "graph: input: too large"),
    (
        dict(value=("", dict(shape=(5, K)))),
        ValueError,
        "input: TE_VALUE_LEADING, but its first dims are no number",
    ),
    (
        dict(value=("fc1_bias", dict(flags=core.VALUE_PARAMETER | core.VALUE_DEFER))),
        ValueError,
        "node 1 reads fc1_bias, whose flags 0x82 only a linear's weight has",
    ),
    (dict(value=("fc1_weight", dict(shape=(N, K + 1)))), ValueError, "fc1_weight is no parameter"),
    (dict(value=("fc1_bias", dict(shape=(N + 1,)))), ValueError, "fc1_bias is no parameter of 1 x"),
    (dict(value=("gamma", dict(shape=(K - 1,)))), ValueError, "norm: gamma: gamma is no parameter"),
    (
        dict(value=("fc2_input", dict(flags=0, shape=(7, N)))),
        ValueError,
        "activation: fc1_output and fc2_input have .*rows",
    ),
    (dict(node=(0, dict(name="x" * 24))), ValueError, "name: x{24} has more than 23 characters"),
    (dict(node=(0, dict(kind=99))), ValueError, "graph: node 0: kind 99 does not exist"),
    (
        dict(node=(1, dict(inputs=(0,) * 300))),
        ValueError,
        "node 1 .gemm.: 300 inputs, 0 numbers, 0 slices and",
    ),
    (dict(node=(2, dict(numbers=(0.0,) * 4))), ValueError, "4 numbers, 0 slices and 0 ext"),
    (dict(node=(1, dict(flags=2 * core.NODE_DETERMINISTIC))), ValueError, "flags 0x800"),
    (
        dict(node=(2, dict(flags=core.NODE_ZERO_CENTERED))),
        ValueError,
        "node 2 .activation.: flags 0x40 and recipe 0, of which it knows 0x0",
    ),
    (dict(node=(0, dict(quantization=CAST))), ValueError, "recipe 1, of which .* 0x40 and none"),
    (dict(node=(0, dict(external=(1,)))), ValueError, "node 0 .norm.: .* 1 external steps, expect"),
    (dict(node=(1, dict(inputs=(99, *LINEAR.inputs[1:])))), ValueError, "there is no value 99"),
    (
        dict(node=(0, dict(inputs=(2, 5, 6)))),
        ValueError,
        "reads norm_output, which no earlier node",
    ),
    (dict(node=(1, dict(inputs=LINEAR.inputs[:1]))), ValueError, "it has no weight"),
    (
        dict(node=(0, dict(output=0))),
        ValueError,
        "node 0 makes input, which is given or made by another node",
    ),
    (dict(node=(0, dict(variant=3))), ValueError, "norm: kind = 3 does not exist"),
    (dict(node=(0, dict(variant=1))), ValueError, "norm: kind 1 with a beta"),
    (dict(node=(0, dict(numbers=(-1.0,)))), ValueError, "eps = -1"),
    (dict(node=(2, dict(variant=99))), ValueError, "activation: kind = 99 does not exist"),
    (
        dict(node=(2, dict(variant=1))),
        ValueError,
        "activation: geglu of 40 f32 columns gives no 40",
    ),
    (dict(node=cast_of((1, "recipe", 9))), ValueError, "recipe = 9 does not exist"),
    (dict(node=cast_of((0, "dtype", 0))), TypeError, "input: recipe 1 does not cast to f32"),
    (dict(node=cast_of((2, "amax_epsilon", -1.0))), ValueError, "gradient: amax_epsilon"),
    (dict(node=cast_of((1, "options", 256))), ValueError, "weight: .*0x100, of which recipe 1 has"),
    (dict(node=cast_of((1, "margin", 1))), ValueError, "margin = 1 of recipe 1"),
    (dict(node=cast_of(backward=3)), ValueError, "backward = 3 with recipe 1"),
    (dict(node=cast_of(backward=1, recipe=0)), ValueError, "backward = 1 with"),
    (dict(node=cast_of((0, "options", RHT))), ValueError, "input: .* 0x4, of which recipe 1 has"),
    (dict(node=cast_of((0, "options", RHT), recipe=FP4)), ValueError, "nvfp4 transforms input and"),
    (dict(node=cast_of((1, "options", RHT), recipe=FP4)), ValueError, "nvfp4 transforms input and"),
    (
        dict(node=cast_of((0, "options", RHT | OVER), (2, "options", RHT), recipe=FP4)),
        ValueError,
        "4 over 6",
    ),
    (
        dict(node=cast_of((0, "options", core.CAST_ROW_SCALED | SQUARE), recipe=FP4)),
        ValueError,
        "scaled rows have no tiles",
    ),
    (
        dict(node=cast_of((0, "options", RHT), (2, "options", RHT | SR), recipe=FP4)),
        ValueError,
        r"inputs\[3\] = -1, inputs\[4\] = -1, expected an input i64",
    ),
    (dict(node=cast_of((2, "recipe", FP4))), TypeError, "gradient: recipe 6 does not cast to e5m2"),
    (dict(node=cast_of((0, "options", SQUARE))), ValueError, "0x2, of which recipe 1 has"),
    (
        dict(node=cast_of((0, "recipe", core.RECIPE_EXTERNAL), (0, "dtype", core.DTYPE_F32))),
        ValueError,
        "operand 0 is the caller's: its stage must be external",
    ),
    (dict(node=(1, dict(slots=(-1, 0)))), ValueError, "slots.0. = -1, expected 0 to 32767"),
    (dict(node=(1, dict(external=(31,)))), ValueError, "step 31 is external, expected"),
    (dict(node=(1, dict(ranks=0))), ValueError, "0 ranks, which only a collective has"),
    (dict(node=(1, dict(ranks=2))), ValueError, "2 ranks, which only a collective has"),
]


@pytest.mark.parametrize("at", range(len(GRAPH_ERRORS)))
def test_make_plan_names_what_is_wrong(at):
    change, kind, text = GRAPH_ERRORS[at]
    error = graph_error(**change)
    assert type(error) is kind and re.search(text, str(error)), error


def test_graphs_that_can_not_be():
    graph = native.mlp_graph(core)
    graph.rows("nothing", K, core.VALUE_RESULT)
    with pytest.raises(ValueError, match="no node makes the result nothing"):
        graph.plan(0)
    graph.linear(0, graph.rows("dead", K), "dead_")
    with pytest.raises(ValueError, match="node 4 makes dead, which is no result and which nobody"):
        graph.plan(0)
    graph = native.chain_graph(core, 2)
    first = graph.nodes[0].inputs
    graph.nodes[1] = graph.nodes[1]._replace(inputs=(graph.nodes[1].inputs[0], *first[1:]))
    with pytest.raises(NotImplementedError, match="n0_weight has a gradient and is read twice"):
        graph.plan(0)
    graph = native.chain_graph(core, 1, core.RECIPE_NONE)
    graph.values[0] = graph.values[0]._replace(dtype=core.DTYPE_BF16)
    with pytest.raises(TypeError, match="without a recipe all are one dtype"):
        graph.plan(0)
