# SPDX-License-Identifier: Apache-2.0
"""Graphs whose backward multiplies in high precision: operands that arrive quantized."""

import pytest
import torch
from linear_graphs import Flag, K, N, buffers, fresh_memory, graph_of, run, run_all

from transformer_engine import _core

BACKWARDS = (_core.BACKWARD_HIGH_PRECISION, _core.BACKWARD_DEQUANTIZED)
RECIPES = (_core.RECIPE_CURRENT, _core.RECIPE_BLOCK, _core.RECIPE_ROW, _core.RECIPE_MXFP8)
GRAD = 2  # its operand


def overridden(backward, flags=Flag.NONE, recipe=_core.RECIPE_CURRENT, **options):
    """A linear layer with such a backward."""
    graph = graph_of(flags, recipe, **options)
    at = next(i for i, node in enumerate(graph.nodes) if node.kind == _core.NODE_LINEAR)
    quantization = graph.nodes[at].quantization._replace(backward=backward)
    graph.nodes[at] = graph.nodes[at]._replace(quantization=quantization)
    return graph


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("backward", BACKWARDS)
@pytest.mark.parametrize("defer", [Flag.NONE, Flag.DEFER])
def test_a_gradient_that_arrives_quantized_is_dequantized(recipe, backward, defer):
    memory = fresh_memory()
    plain = run_all(graph_of(Flag.GRAD_KEPT, recipe), dict(memory))
    forms = {link: t for link, t in plain.items() if link[1] == GRAD and link[0] in FORMS}
    given = overridden(backward, Flag.GRAD_GIVEN | defer, recipe, bias_grad=True)
    found = run_all(given, {**memory, **forms})
    wide = torch.empty(plain["gradient", 3].shape)
    mode = {
        _core.RECIPE_CURRENT: _core.SCALING_TENSOR,
        _core.RECIPE_BLOCK: _core.SCALING_BLOCK_1D,
        _core.RECIPE_ROW: _core.SCALING_ROW,
        _core.RECIPE_MXFP8: _core.SCALING_MXFP8,
    }[recipe]
    scales = forms.get(("row_scales", GRAD), forms.get(("scales", GRAD)))
    row = forms["row", GRAD].flatten(0, -2)
    _core.dequantize(wide.view(-1, N), mode=mode, row=row, row_scales=scales)
    expected = run_all(
        overridden(backward, defer, recipe, bias_grad=True), {**memory, ("gradient", 3): wide}
    )
    for link in (("gradient", 0), ("gradient", 1), ("gradient", 2)):
        assert torch.equal(found[link].flatten(), expected[link].flatten()), link


FORMS = ("row", "column", "scales", "row_scales", "column_scales")


@pytest.mark.parametrize("backward", BACKWARDS)
def test_a_weight_that_is_there_besides_is_read_as_it_is(backward):
    memory = fresh_memory()
    expected = run_all(overridden(backward), dict(memory))
    kept = run_all(overridden(backward, Flag.WEIGHT_KEPT), dict(memory))
    assert ("column", 1) not in kept and torch.equal(kept["gradient", 0], expected["gradient", 0])
    for flags in (Flag.WEIGHT_GIVEN, Flag.WEIGHT_CACHED):
        graph = overridden(backward, flags)
        read = buffers(graph.make(_core.DIRECTION_BACKWARD), "parameter")
        as_it_is = flags == Flag.WEIGHT_CACHED and backward == _core.BACKWARD_HIGH_PRECISION
        assert (("value", 1) in read) == as_it_is and (("row", 1) in read) != as_it_is
        found = run_all(graph, dict(kept))
        same = torch.equal(found["gradient", 0], expected["gradient", 0])
        assert same == (as_it_is or backward == _core.BACKWARD_DEQUANTIZED)


def test_what_is_kept_has_forms_that_somebody_reads():
    with pytest.raises(ValueError, match="has quantized forms"):
        overridden(_core.BACKWARD_DEQUANTIZED, Flag.GRAD_KEPT).make(_core.DIRECTION_FORWARD)


@pytest.mark.parametrize("backward", BACKWARDS)
def test_delayed_scaling_records_no_gradient(backward):
    """Nothing of the backward state is read or written."""
    graph = overridden(backward, recipe=_core.RECIPE_DELAYED)
    memory = fresh_memory()
    packed = run(graph.make(_core.DIRECTION_FORWARD), memory)
    recorded = memory["history", 0].clone()
    plan = graph.make(_core.DIRECTION_BACKWARD)
    assert not any(link[0] in ("scale", "history") for link in buffers(plan, "state"))
    run(plan, memory, packed)
    assert torch.equal(memory["history", 0], recorded)
    assert memory["gradient", 1].shape == (N, K)
