# SPDX-License-Identifier: Apache-2.0
"""A linear layer whose weight is [in, out] has the numbers of one whose weight is [out, in]."""

import pytest
import torch
from linear_graphs import GRADIENTS, Flag, Flags, N, fresh_memory, graph_of, run_all

from transformer_engine import _core

TRANSPOSED = Flags(_core.LINEAR_WEIGHT_TRANSPOSED)
COLUMNS = 128  # tiles of both forms of the weight then have the same elements
RECIPES = {
    name: getattr(_core, f"RECIPE_{name.upper()}")
    for name in ("none", "delayed", "current", "block", "row", "mxfp8")
}
WAYS = {
    "plain": Flag.NONE,
    "deferred": Flag.DEFER,
    "input cast again": Flag.SAVE_INPUT,
    "weight kept": Flag.WEIGHT_KEPT,
}


CASES = [
    (recipe, way) for recipe in RECIPES for way in WAYS if (recipe, way) != ("none", "weight kept")
]


@pytest.mark.parametrize("bias_grad", [False, True], ids=["", "bias"])
@pytest.mark.parametrize(("recipe", "way"), CASES)
def test_numbers_are_those_of_the_other_layout(recipe, way, bias_grad):
    memory = fresh_memory(COLUMNS)
    turned = dict(memory)
    turned["value", 1] = memory["value", 1].t().contiguous()
    turned["history", 0] = memory["history", 0].clone()
    found = []
    for flags, given in ((WAYS[way], memory), (WAYS[way] | TRANSPOSED, turned)):
        graph = graph_of(flags, RECIPES[recipe], GRADIENTS, bias_grad, COLUMNS)
        found.append(run_all(graph, given))
    plain, other = found
    assert other["gradient", 1].shape == (COLUMNS, N)
    for link in [("value", 3), ("gradient", 0), *[("gradient", 2)] * bias_grad]:
        assert torch.equal(other[link], plain[link]), link
    assert torch.equal(other["gradient", 1], plain["gradient", 1].t())
    if recipe == "delayed":
        assert torch.equal(other["history", 0], plain["history", 0])


def test_it_does_not_arrive_row_wise_alone():
    flags = Flag.WEIGHT_GIVEN | Flag.WEIGHT_ROWS | TRANSPOSED
    with pytest.raises(ValueError, match="a weight that is not transposed"):
        graph_of(flags, columns=COLUMNS).make(_core.DIRECTION_FORWARD)
