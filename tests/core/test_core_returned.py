# SPDX-License-Identifier: Apache-2.0
"""What a linear layer returns quantized, and what arrives row-wise alone."""

import pytest
import torch
from linear_graphs import (
    GRADIENTS,
    ROWS,
    WIDE,
    Flag,
    Flags,
    K,
    N,
    buffers,
    fresh_memory,
    graph_of,
    run_all,
)

from transformer_engine import _core
from transformer_engine.common import graphs
from transformer_engine.common.operand_casts import OperandCast, Quantization

RECIPES = {
    "delayed": (_core.RECIPE_DELAYED, _core.SCALING_TENSOR),
    "current": (_core.RECIPE_CURRENT, _core.SCALING_TENSOR),
    "block": (_core.RECIPE_BLOCK, _core.SCALING_BLOCK_1D),
    "row": (_core.RECIPE_ROW, _core.SCALING_ROW),
    "mxfp8": (_core.RECIPE_MXFP8, _core.SCALING_MXFP8),
}
OUTPUT, GRAD_INPUT = 3, 4  # operands of the one node
SLOT = {OUTPUT: 2, GRAD_INPUT: 1}


def cast_of(wide, memory, operand, recipe):
    """The forms that a cast by itself makes of what is in high precision, by the same settings."""
    kind, mode = RECIPES[recipe]
    of = {form: link for form, link in memory.items() if form[1] == operand and form[0] in FORMS}
    made = {form[0]: torch.empty_like(tensor) for form, tensor in of.items()}
    scales = made.pop("scales", None)
    if scales is not None:
        made["row_scales"] = scales
        if "column" in made:
            made["column_scales"] = scales
    how = {}
    if kind == _core.RECIPE_DELAYED:
        how["scale"] = memory["scale", 0][SLOT[operand] :]
    if kind == _core.RECIPE_CURRENT:
        how["partials"] = torch.empty(_core.AMAX_PARTIALS)
        _core.amax(wide, how["partials"])
    flat = {name: t.flatten(0, -2) if name == "row" else t for name, t in made.items()}
    _core.quantize(wide.flatten(0, -2), mode=mode, **flat, **how)
    made["scales"] = scales
    return of, made


FORMS = ("row", "column", "scales", "row_scales", "column_scales")


@pytest.mark.parametrize("recipe", RECIPES)
def test_what_is_returned_is_the_cast_of_what_would_be(recipe):
    kind = RECIPES[recipe][0]
    memory = fresh_memory()
    plain = run_all(graph_of(Flag.NONE, kind), dict(memory))
    amaxes = plain["history", 0].clone()
    memory["history", 0] = torch.zeros(4, 4)
    returned = Flag.RETURN_OUTPUT | Flag.RETURN_GRAD
    found = run_all(graph_of(returned, kind), dict(memory))
    assert ("value", 3) not in found and ("gradient", 0) not in found
    assert torch.equal(found["gradient", 1], plain["gradient", 1])
    for operand, link in ((OUTPUT, ("value", 3)), (GRAD_INPUT, ("gradient", 0))):
        of, made = cast_of(plain[link], found, operand, recipe)
        for (name, _), tensor in of.items():
            assert torch.equal(tensor.view(torch.uint8), made[name].view(torch.uint8)), name
        assert (("column", operand) in of) == (RECIPES[recipe][1] != _core.SCALING_TENSOR)
        assert found["row", operand].shape[:-1] == (2, ROWS // 2)
        if kind == _core.RECIPE_DELAYED:
            amaxes[0, SLOT[operand]] = max(amaxes[0, SLOT[operand]], plain[link].abs().max())
    assert torch.equal(found["history", 0], amaxes)


def test_a_repetition_records_no_amax_of_what_it_returns():
    memory = fresh_memory()
    run_all(graph_of(Flag.RETURN_OUTPUT | Flag.NO_AMAX, wanted=Flag.NONE), memory)
    assert not memory["history", 0].any()


@pytest.mark.parametrize("first", [0.0, 2.0])
def test_what_is_returned_is_measured_where_nothing_is_known_of_it(first):
    memory = fresh_memory()
    memory["scale", 0][SLOT[OUTPUT]] = first
    flags = Flag.RETURN_OUTPUT | Flag.MEASURE_RETURNED
    found = run_all(graph_of(flags, wanted=Flag.NONE), dict(memory))
    wide = run_all(graph_of(Flag.NONE, wanted=Flag.NONE), memory)["value", 3]
    expected = first if first else torch.tensor(448.0) / wide.abs().max()
    assert found["scales", OUTPUT][1] == expected


@pytest.mark.parametrize("recipe", [_core.RECIPE_DELAYED, _core.RECIPE_CURRENT])
@pytest.mark.parametrize("how", [Flag.NONE, Flag.DEFER, Flag.SAVE_INPUT])
@pytest.mark.parametrize("wanted", [Flag.WGRAD, Flag.DGRAD | Flag.WGRAD])
def test_input_and_gradient_that_arrive_row_wise_are_transposed(recipe, how, wanted, monkeypatch):
    """To the bits of a cast in both forms, in the backward, and without a cast of them."""
    monkeypatch.setattr("linear_graphs.N", WIDE)
    kept = Flag.INPUT_KEPT | Flag.GRAD_KEPT
    memory = run_all(graph_of(kept, recipe, wanted, columns=WIDE), fresh_memory(WIDE))
    links = [("value", 3), ("gradient", 1)] + [("gradient", 0)] * bool(wanted & Flag.DGRAD)
    rows = Flag.INPUT_GIVEN | Flag.INPUT_ROWS | Flag.GRAD_GIVEN | Flag.GRAD_ROWS
    graph = graph_of(rows | how, recipe, wanted, columns=WIDE)
    gone = [("column", 0), ("column", 2), ("value", 0), ("gradient", 3), *links]
    own = {link: tensor for link, tensor in memory.items() if link not in gone}
    for of in (0, 2):
        own["row", of] = own["row", of].view(2, ROWS // 2, -1)
    _core.reset_counters()
    found = run_all(graph, own)
    counts = _core.counters()
    assert counts["op.cpu.transpose"] == 2
    assert counts["op.cpu.quantize"] == 1 + bool(wanted & Flag.DGRAD)  # the weight
    assert all(torch.equal(found[link], memory[link]) for link in links)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("wanted", [Flag.NONE, Flag.DGRAD | Flag.WGRAD])
def test_the_bias_gradient_of_one_that_arrives(recipe, wanted):
    """The sum of its values as they arrive."""
    kind, mode = RECIPES[recipe]
    every = Flag.DGRAD | Flag.WGRAD
    memory = run_all(graph_of(Flag.GRAD_KEPT, kind, every), fresh_memory())
    given = {link: tensor for link, tensor in memory.items() if link != ("gradient", 3)}
    given["row", 2] = given["row", 2].view(2, ROWS // 2, -1)
    found = run_all(graph_of(Flag.GRAD_GIVEN, kind, wanted, bias_grad=True), given)
    values = torch.empty(ROWS, N)
    scales = memory["scales" if ("scales", 2) in memory else "row_scales", 2]
    _core.dequantize(values, mode=mode, row=memory["row", 2].flatten(0, -2), row_scales=scales)
    summed = torch.empty(N)
    _core.quantize(values, bias_grad=summed)
    assert torch.equal(found["gradient", 2], summed)


def test_what_can_not_be_returned_quantized():
    message = "is returned quantized .*a linear layer with a recipe"
    with pytest.raises(ValueError, match=f"output {message}"):
        graph_of(Flag.RETURN_OUTPUT, _core.RECIPE_NONE).make(0)
    with pytest.raises(
        ValueError, match="value 0: ndim = 2 is not 1 to 4, flags"
    ):  # it has no gradient
        graph_of(Flag.RETURN_GRAD, wanted=Flag.WGRAD).make(0)
    graph = graph_of(Flag.RETURN_OUTPUT)
    again = graph.value("again", _core.DTYPE_F32, (graphs.ROWS, N), graphs.RESULT)
    graph.node(_core.NODE_SOFTCAP, (3,), again, numbers=(1.0,))
    with pytest.raises(ValueError, match=f"output {message}"):
        graph.make(0)
    rows = Flag.INPUT_GIVEN | Flag.INPUT_ROWS
    with pytest.raises(ValueError, match=rf"input arrives row-wise alone: .*columns \({K}\)"):
        graph_of(rows).make(0)
    with pytest.raises(ValueError, match="input arrives row-wise alone: that takes one scale"):
        graph_of(rows, _core.RECIPE_BLOCK, columns=WIDE).make(0)


def test_both_forms_are_returned_where_the_input_comes_in_both():
    """One flag says both of the value: to return less than there is would be no gain."""
    graph = graph_of(Flag.RETURN_GRAD | Flag.INPUT_GIVEN)
    outputs = buffers(graph.make(_core.DIRECTION_BACKWARD), "output")
    assert {("row", GRAD_INPUT), ("column", GRAD_INPUT), ("scales", GRAD_INPUT)} <= set(outputs)


def nvfp4_graph(flags, stochastic=True):
    """A linear layer in NVFP4."""
    f32 = _core.DTYPE_F32
    grad = _core.CAST_STOCHASTIC if stochastic else 0
    casts = [OperandCast(_core.RECIPE_NVFP4, _core.DTYPE_U8, options=o) for o in (0, 0, grad)]
    flags |= GRADIENTS | Flags(weight=_core.VALUE_PARAMETER)
    part = graphs.LinearSpec(K, N, *(f32,) * 5, Quantization(*casts), flags)
    return graphs.call_graph(graphs.CallSpec((part,)))


@pytest.mark.parametrize("stochastic", [True, False])
@pytest.mark.parametrize("returned", [Flag.NONE, Flag.RETURN_OUTPUT, Flag.RETURN_GRAD])
def test_a_stochastic_gradient_that_is_returned_has_a_random_pair_of_its_own(returned, stochastic):
    graph = nvfp4_graph(returned, stochastic)
    pairs = stochastic * (1 + (returned == Flag.RETURN_GRAD))
    backward = graph.make(_core.DIRECTION_BACKWARD)
    read = [link for link in graph.drawn if link in buffers(backward, "input")]
    assert len(graph.drawn) == len(read) == pairs
    node = graph.nodes[0]
    inputs = node.inputs
    wrong = [(*inputs[:3], -1, *inputs[4:])] if stochastic else [(*inputs, inputs[0])]
    if pairs == 2:
        wrong += [inputs[:4], (*inputs[:4], 0), (*inputs[:4], 1)]
    elif pairs == 1:
        wrong += [(*inputs, inputs[3])]
    else:
        wrong += [(*inputs, -1, 0)]
    for given in wrong:
        graph.nodes[0] = node._replace(inputs=given)
        with pytest.raises(ValueError, match=r"expected an input i64 \[2\] where gradients are"):
            graph.make(_core.DIRECTION_BACKWARD)
