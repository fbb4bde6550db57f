# SPDX-License-Identifier: Apache-2.0
"""Collectives of plans over process groups: what all ranks make together is what one makes."""

import pytest
from collective_graphs import (
    RECIPES,
    WAYS,
    assert_as_whole,
    has_slices_of_the_whole,
    linear_graph,
    make_problem,
)
from pytorch import plan_collective_programs as programs
from pytorch.ranks import ONE_TOO
from thinning import pairs

from transformer_engine.common.plans import CallPlans

CASES = {
    "recipe": list(RECIPES),
    "way": [way for way in WAYS if way != "alone"],
    "forms": [False, True],
    "halves": [(), (0, 1)],
    "recompute": [False, True],
}


@pytest.mark.parametrize("ranks", ONE_TOO, indirect=True)
@pairs(**CASES)
def test_linear_of_all_ranks(ranks, recipe, way, forms, halves, recompute):
    if not has_slices_of_the_whole(recipe, way):
        pytest.skip("a rank measures its part of each row")
    problem = make_problem(ranks.size)
    parts = ranks.run(programs.linear, recipe, way, forms, halves, recompute, problem)
    assert_as_whole(parts, way, recipe, problem, ranks.size, exact=ranks.device == "cpu")


@pytest.mark.parametrize("recipe", ["current", "nvfp4", "nvfp4-plain"])
def test_amaxes_of_a_cast_are_reduced_at_once(recipe):
    """A form of transformed columns has an amax of its own: both go in one collective."""
    plan = CallPlans(linear_graph(recipe, "column-sp", 2, forms=True)).forward
    handed = [
        [plan.described.buffers[number].name for number in stage.buffers]
        for stage in plan.stages if stage.name == "reduce_amax_input"
    ]  # fmt: skip
    both = ["partials", "column_partials"] if recipe == "nvfp4" else ["partials"]
    assert handed == [both]


def test_a_group_of_another_size(ranks):
    if ranks.size == 1:
        pytest.skip("a group of one rank has no smaller one")
    for said in ranks.run(programs.group_of_another_size):
        assert said == "y_all_reduce: 2 ranks, over a group of 1"


def test_rows_that_are_no_tiles(ranks):
    if ranks.size == 1:
        pytest.skip("one rank has all rows")
    for said in ranks.run(programs.rows_that_are_no_tiles, make_problem(ranks.size)):
        assert "those of all ranks are put together, which takes rows" in said
