# SPDX-License-Identifier: Apache-2.0
"""Operands of a linear layer that arrive quantized: input, weight and gradient by one flag."""

import functools
import itertools
from operator import or_

import pytest
import torch
from linear_graphs import ROWS, WIDE, Flag, K, N, buffers, fresh_memory, graph_of, run_all

from transformer_engine import _core
from transformer_engine.common import graphs
from transformer_engine.common.plan_text import plan_of

GIVEN = (Flag.INPUT_GIVEN, Flag.WEIGHT_GIVEN, Flag.GRAD_GIVEN)
KEPT = Flag.INPUT_KEPT | Flag.WEIGHT_KEPT | Flag.GRAD_KEPT
ALL_GIVEN = functools.reduce(or_, GIVEN)
SUBSETS = [
    functools.reduce(or_, roles)
    for count in (1, 2, 3)
    for roles in itertools.combinations(GIVEN, count)
]  # of operands


def results(memory):
    return [memory[link] for link in (("value", 3), ("gradient", 0), ("gradient", 1))]


@pytest.mark.parametrize("recipe", [_core.RECIPE_DELAYED, _core.RECIPE_CURRENT])
@pytest.mark.parametrize("given", SUBSETS)
@pytest.mark.parametrize("how", [Flag.NONE, Flag.DEFER, Flag.SAVE_INPUT])
def test_operands_that_arrive_have_the_bits_of_a_cast(recipe, given, how):
    memory = run_all(graph_of(KEPT, recipe), fresh_memory())
    expected = results(memory)
    graph = graph_of(given | how, recipe)
    own = {link: x for link, x in memory.items() if link[0] != "gradient" or link[1] == 3}
    del own["value", 3]
    for role, flag in enumerate(GIVEN):  # neither in high precision nor with a scale of its own
        if given & flag:
            del own[("gradient", 3) if role == 2 else ("value", role)]
    for of in (0, 2):  # their rows have the leading dims of the call
        own["row", of] = own["row", of].view(2, ROWS // 2, -1)
    own["history", 0] = torch.zeros(4, 4)
    found = results(run_all(graph, own))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    stages = [
        stage.name
        for direction in range(2 + graph.defers)
        for stage in graph.make(direction).stages
    ]
    for role, name in enumerate(("input", "weight", "grad_output")):
        cast = any(stage in (f"quantize_{name}", f"requantize_{name}") for stage in stages)
        assert cast != bool(given & GIVEN[role])


@pytest.mark.parametrize("wanted", [Flag.DGRAD, Flag.WGRAD])
def test_forms_that_no_gemm_reads_are_no_arguments(wanted):
    graph = graph_of(ALL_GIVEN, wanted=wanted)
    forward = buffers(graph.make(_core.DIRECTION_FORWARD), "input", "parameter")
    assert forward == [("value", 2), ("row", 0), ("row", 1), ("scales", 0), ("scales", 1)]
    backward = buffers(graph.make(_core.DIRECTION_BACKWARD), "input", "parameter", "state")
    first = "row" if wanted == Flag.DGRAD else "column"
    other = 1 if wanted == Flag.DGRAD else 0  # the weight, or the input
    expected = {(first, 2), ("scales", 2), ("column", other), ("scales", other)}
    assert set(backward) == expected and len(backward) == len(expected)


def test_a_missing_or_wrong_form_is_named():
    memory = run_all(graph_of(KEPT), fresh_memory())
    plan = graph_of(ALL_GIVEN).make(_core.DIRECTION_BACKWARD)
    links = buffers(plan, "input", "parameter", "state")
    given = [memory[link] for link in links]
    _core.run(plan.native, 0, 0, *given)
    names = [buffer.name for buffer in plan.described.buffers][: len(given)]
    assert {"input_column", "weight_column", "grad_output_row", "input_scales"} <= set(names)
    with pytest.raises(
        TypeError, match=f"run: expected {len(given)} tensors, got {len(given) - 1}"
    ):
        _core.run(plan.native, 0, 0, *given[:-1])
    for at, name in enumerate(names):
        for wrong, kind in (
            (None, TypeError),
            (given[at].double() if "scales" in name else given[at].float(), TypeError),
            (given[at][..., :-1].contiguous(), ValueError),
        ):
            with pytest.raises(kind, match=f"run: {name}: "):
                _core.run(plan.native, 0, 0, *given[:at], wrong, *given[at + 1 :])


def test_what_has_no_quantized_forms():
    with pytest.raises(ValueError, match="node 0: input has flags 0x219.*layer with a recipe"):
        graph_of(Flag.INPUT_GIVEN, _core.RECIPE_NONE).make(0)
    with pytest.raises(ValueError, match="value 0: ndim = 2 is not 1 to 4, flags = 0x319"):
        graph_of(Flag.INPUT_GIVEN | Flag.INPUT_KEPT).make(0)
    graph = graph_of(Flag.NONE)
    made = graph.value("normed", _core.DTYPE_F32, (graphs.ROWS, K))
    x = graph.values[0]
    graph.values[0] = x._replace(flags=x.flags | _core.VALUE_QUANTIZED)
    graph.add_norm(graphs.Norm(_core.NORM_L2, _core.DTYPE_F32, 0.0, gamma=0), (0,), made)
    with pytest.raises(ValueError, match="node 1: input has flags"):
        graph.make(0)
    graph = graph_of(Flag.GRAD_GIVEN)  # a result that is read: its gradient is a sum
    again = graph.value("again", _core.DTYPE_F32, (graphs.ROWS, N), graphs.RESULT)
    graph.node(_core.NODE_SOFTCAP, (3,), again, numbers=(1.0,))
    with pytest.raises(ValueError, match="gradient of a result that nobody reads"):
        graph.make(0)


def test_the_text_of_a_plan_has_the_flags():
    plan = graph_of(ALL_GIVEN).make(_core.DIRECTION_BACKWARD)
    text, described = plan.text, plan.described
    del plan
    assert plan_of(text).described == described
    with pytest.raises(ValueError, match="damaged"):
        plan_of(text[:-2])


# ---- a weight that arrives row-wise alone --------------------------------------------------------


@pytest.mark.parametrize("recipe", [_core.RECIPE_DELAYED, _core.RECIPE_CURRENT])
@pytest.mark.parametrize("how", [Flag.NONE, Flag.DEFER, Flag.SAVE_INPUT])
def test_a_row_wise_weight_is_transposed_in_the_backward(recipe, how):
    """To the bits of the column-wise form that a cast makes, and without a cast of the weight."""
    memory = run_all(graph_of(KEPT, recipe, columns=WIDE), fresh_memory(WIDE))
    expected = results(memory)
    rows = Flag.WEIGHT_GIVEN | Flag.WEIGHT_ROWS
    graph = graph_of(rows | how, recipe, columns=WIDE)
    plan = graph.make(_core.DIRECTION_BACKWARD)
    assert ("column", 1) not in buffers(plan, "input", "parameter", "state")
    own = {link: x for link, x in memory.items() if link not in (("value", 1), ("column", 1))}
    own["history", 0] = torch.zeros(4, 4)
    _core.reset_counters()
    found = results(run_all(graph, own))
    counts = _core.counters()
    assert counts["op.cpu.transpose"] == 1 and counts["op.cpu.quantize"] == 2 + (
        how == Flag.SAVE_INPUT
    )
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_which_weights_can_arrive_row_wise_alone():
    rows = Flag.WEIGHT_GIVEN | Flag.WEIGHT_ROWS
    with pytest.raises(ValueError, match=rf"weight arrives row-wise alone: .*columns \({K}\)"):
        graph_of(rows).make(0)
    with pytest.raises(ValueError, match="value 1: ndim = 2 is not 1 to 4, flags"):
        graph_of(Flag.WEIGHT_ROWS, columns=WIDE).make(0)
    forward = graph_of(rows, columns=WIDE, wanted=Flag.NONE).make(0)
    assert buffers(forward, "parameter") == [("value", 2), ("row", 1), ("scales", 1)]
