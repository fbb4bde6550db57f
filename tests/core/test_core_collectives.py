# SPDX-License-Identifier: Apache-2.0
"""Collectives in plans, ranks being threads of a process: all make together what one makes."""

from functools import partial

import pytest
from collective_graphs import (
    RECIPES,
    WAYS,
    assert_as_whole,
    has_slices_of_the_whole,
    linear_graph,
    make_problem,
    part_of,
    run_plans,
)
from collective_ranks import RANKS, World, each_rank, functions_of
from thinning import pairs

from transformer_engine import _core
from transformer_engine.common.graphs import RESULT
from transformer_engine.common.plans import CallPlans


@pairs(
    recipe=list(RECIPES),
    way=[way for way in WAYS if way != "alone"],
    recompute=[False, True],
    forms=[False, True],
    halves=[(), (0, 1)],
)
def test_linear_of_all_ranks(recipe, way, recompute, forms, halves):
    if not has_slices_of_the_whole(recipe, way):
        pytest.skip("a rank measures its part of each row")
    problem, world = make_problem(RANKS), World()
    options = {"forms": forms, "halves": halves, "recompute": recompute}
    plans = CallPlans(linear_graph(recipe, way, RANKS, **options))

    def of_rank(rank):
        given = part_of(problem, way, RANKS, rank)
        return run_plans(plans, partial(functions_of, world, rank), *given)

    assert_as_whole(each_rank(of_rank, world), way, recipe, problem, RANKS)


# ---- what travels, and when ----------------------------------------------------------------------


def stages_of(plan):
    """Names of its stages, in order, and by name dtypes and shapes of what they are handed."""
    given = plan.described
    handed = {
        stage.name: [(given.buffers[at].dtype, given.buffers[at].link) for at in stage.buffers]
        for stage in given.stages
    }
    return list(handed), handed


@pytest.mark.parametrize("recipe", RECIPES)
def test_work_goes_on_beside_collectives(recipe):
    """The input is gathered beside casts and one GEMM, its gradient is summed beside the other.

    Nothing that was gathered is saved.
    """
    narrow = recipe != "none"
    plans = CallPlans(linear_graph(recipe, "column-sp", RANKS, forms=narrow, halves=(0, 1)))
    names, handed = stages_of(plans.backward)
    gather = "x_gather_again" if not narrow else "gather_input_again"
    order = [
        gather, "gemm_grad_input", "x_reduce_scatter_grad", f"{gather}_finish", "gemm_grad_weight",
        "x_reduce_scatter_grad_finish",
    ]  # fmt: skip
    assert [name for name in names if name in order] == order
    if narrow:
        assert _core.DTYPE_F32 not in [d for d, link in handed[gather] if link in ("row", "column")]
    saved = [b for b in plans.forward.described.buffers if b.role == "saved"]
    assert not [b.name for b in saved if "gathered" in b.name or b.name == "taken"]
    assert bool(saved) == (narrow)


@pytest.mark.parametrize("recipe", ["delayed", "block", "mxfp8"])
def test_what_is_gathered_of_a_gradient(recipe):
    """With one scale for the tensor it is the row-wise form alone, else both and their scales."""
    plans = CallPlans(linear_graph(recipe, "row-sp", RANKS, forms=True))
    _, handed = stages_of(plans.backward)
    links = [link for _, link in handed["gather_grad_output"][::2]]
    one = ["row"]
    assert links == (
        one if recipe == "delayed" else ["row", "row_scales", "column", "column_scales"]
    )


def test_a_sum_is_made_in_place():
    """Neither a sum over ranks nor that of a gradient takes a copy."""
    for way, stage in (("column", "x_all_reduce_grad"), ("row", "y_all_reduce")):
        plans = CallPlans(linear_graph("none", way, RANKS))
        names = stages_of(plans.forward)[0] + stages_of(plans.backward)[0]
        assert stage in names
        assert not {"copy_gradient", "add_gradients"} & set(names)


# ---- errors --------------------------------------------------------------------------------------


def changed(graph, kind=_core.NODE_COLLECTIVE, **fields):
    at = next(i for i, node in enumerate(graph.nodes) if node.kind == kind)
    graph.nodes[at] = graph.nodes[at]._replace(**fields)
    return graph


def with_result(graph, name):
    at = next(i for i, value in enumerate(graph.values) if value.name == name)
    graph.values[at] = graph.values[at]._replace(flags=graph.values[at].flags | RESULT)
    return graph


ERRORS = {
    "collective: kind 4 of 2 ranks": lambda: changed(
        linear_graph("none", "column-sp", RANKS), variant=4
    ),
    "collective: kind 0 of 0 ranks": lambda: changed(
        linear_graph("none", "column-sp", RANKS), ranks=0
    ),
    "over 3 ranks: taken is of another": lambda: changed(
        linear_graph("none", "column-sp", RANKS), ranks=3
    ),
    "over 3 ranks: output is of another": lambda: changed(
        linear_graph("none", "row-sp", RANKS), ranks=3
    ),
    "kind 2 gathers nothing, so no forms": lambda: changed(
        linear_graph("none", "row", RANKS), flags=_core.COLLECTIVE_FORMS
    ),
    "made has a bias, which a sum over ranks": lambda: linear_graph(
        "none", "row-sp", RANKS, bias=True
    ),
    "made has a bias, which a sum": lambda: linear_graph("none", "row", RANKS, bias=True),
    "taken is a copy, or gathered in quantized forms: only linear nodes": lambda: with_result(
        linear_graph("delayed", "column-sp", RANKS, forms=True), "taken"
    ),
    "taken is a copy, or gathered in": lambda: with_result(
        linear_graph("none", "column", RANKS), "taken"
    ),
    "gradient of made is gathered in quantized forms: expected a linear node": lambda: with_result(
        linear_graph("delayed", "row-sp", RANKS, forms=True), "made"
    ),
}


@pytest.mark.parametrize("message", ERRORS)
def test_errors(message):
    graph = ERRORS[message]()
    with pytest.raises(ValueError, match=message):
        graph.make(_core.DIRECTION_FORWARD)
