# SPDX-License-Identifier: Apache-2.0
"""Collectives in plans, ranks being threads of a process: all make together what one makes.

Each rank has a part of the rows, or of a weight; forward and gradients are compared with a graph
without collectives over all of it.
"""

import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import NamedTuple

import pytest
import torch
from comparators import assert_nmse
from tols import E5M2, F32, tol

from transformer_engine import _core
from transformer_engine.common.graphs import RESULT, Graph, LinearFlags, LinearSpec, input_flags
from transformer_engine.common.operand_casts import HIGH_PRECISION, quantization_of
from transformer_engine.common.plans import CallPlans
from transformer_engine.common.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
)

RANKS, IN, OUT, TOKENS = 2, 256, 256, 256
RECIPES = {
    "none": None,
    "delayed": DelayedScaling(),
    "current": Float8CurrentScaling(),
    "block": Float8BlockScaling(),
    "mxfp8": MXFP8BlockScaling(),
}
GATHER, SCATTER = _core.COLLECTIVE_GATHER, _core.COLLECTIVE_REDUCE_SCATTER
ALL_REDUCE, COPY = _core.COLLECTIVE_ALL_REDUCE, _core.COLLECTIVE_COPY
WEIGHT = _core.VALUE_PARAMETER | _core.VALUE_GRADIENT
AMAXES = ("reduce_amax_input", "reduce_amax_grad_output")
"""Amaxes that ranks have in common under current scaling: those of what is gathered."""


# ---- ranks as threads ----------------------------------------------------------------------------


class World:
    """What the ranks exchange."""

    def __init__(self):
        self.barrier = threading.Barrier(RANKS, timeout=60)
        self.given = [None] * RANKS
        self.log = []

    def exchange(self, rank, tensor):
        """The tensors of all ranks."""
        self.given[rank] = tensor.clone()
        self.barrier.wait()
        found = list(self.given)
        self.barrier.wait()
        return found


def run_stage(world, rank, name, buffers, lend):
    """Do what the name of a stage says, over its buffers."""
    if rank == 0:
        world.log.append(name)
    tensors = [lend(number) for number in buffers]
    tensors = [t.view(torch.uint8) if t.element_size() == 1 else t for t in tensors]
    if "gather" in name:
        for part, whole in zip(tensors[::2], tensors[1::2], strict=True):
            dim = int(part.shape[0] == whole.shape[0])
            whole.copy_(torch.cat(world.exchange(rank, part), dim))
    elif "reduce_scatter" in name:
        total = sum(world.exchange(rank, tensors[0]))
        tensors[1].copy_(total.chunk(RANKS)[rank])
    elif "all_reduce" in name:
        tensors[0].copy_(sum(world.exchange(rank, tensors[0])))
    else:
        assert "reduce_amax" in name
        tensors[0].copy_(torch.stack(world.exchange(rank, tensors[0])).amax(0))


def each_rank(function, world):
    """Results of ``function(rank)`` on a thread for each rank; what one raises frees the others."""

    def run(rank):
        try:
            return function(rank)
        except BaseException:
            world.barrier.abort()
            raise

    with ThreadPoolExecutor(RANKS) as pool:
        return [task.result() for task in [pool.submit(run, rank) for rank in range(RANKS)]]


# ---- graphs --------------------------------------------------------------------------------------


class Found(NamedTuple):
    output: torch.Tensor
    grad_input: torch.Tensor
    grad_weight: torch.Tensor


def linear_graph(recipe, kinds=(None, None), *, forms=False, halves=(), recompute=False):
    """A linear layer between two collectives, of the size of a rank's part."""
    before, behind = kinds
    shares = [RANKS if kind is not None else 1 for kind in kinds]
    features = IN // shares[1], OUT // shares[0]
    quantization = HIGH_PRECISION if recipe is None else quantization_of(recipe)
    external = [_core.LINEAR_STAGES.index(n) for n in AMAXES if "current" == name_of(recipe)]
    spec = LinearSpec(
        *features, *[_core.DTYPE_F32] * 5, quantization,
        LinearFlags(input=_core.VALUE_GRADIENT, weight=WEIGHT),
        external=frozenset(external),
    )  # fmt: skip
    graph = Graph(_core.GRAPH_RECOMPUTE if recompute else 0)

    def rows(times):
        return _core.Extent(symbol=_core.SYMBOL_ROWS, multiply=times)

    local = 1 if before == GATHER else RANKS if behind == SCATTER else 1
    inner = RANKS if GATHER in kinds or SCATTER in kinds else 1
    last = 1 if behind == SCATTER else inner
    x = graph.tensor("input", spec.input, (rows(local), features[0]), input_flags(True))
    weight, bias = graph.linear_parameters(spec, "")
    y = graph.value("output", spec.output, (rows(last), features[1]), RESULT)
    if before is not None:
        taken = graph.value("taken", spec.input, (rows(inner), features[0]))
        travels = forms and before == GATHER
        graph.add_collective(before, x, taken, RANKS, "x_", forms=travels, halves=halves)
        x = taken
    made = y
    if behind is not None:
        made = graph.value("made", spec.output, (rows(inner), features[1]))
    graph.add_linear(spec, (x, weight, bias), made, "", 0)
    if behind is not None:
        travels = forms and behind == SCATTER
        graph.add_collective(behind, made, y, RANKS, "y_", forms=travels, halves=halves)
    graph.returns([y])
    return graph


def name_of(recipe):
    return next(name for name, known in RECIPES.items() if known is recipe)


def run_rank(plans, world, rank, tensors, grad, scales):
    """Forward and backward of a rank; its scaling state begins with these scales."""
    state = [(scales.clone(), torch.zeros(4, 256)) for _ in range(2)]

    def run(plan, links, of, *given):
        stages = plan.described.stages
        functions = {
            stage.name: partial(run_stage, world, rank, stage.name, stage.buffers)
            for stage in stages
            if stage.external and not stage.name.endswith("_finish")
        }
        functions |= {
            stage.name: lambda lend, started: None
            for stage in stages
            if stage.name.endswith("_finish")
        }
        own = [of[0 if kind == "scale" else 1] for kind, _ in links]
        at = len(given)
        if plan is plans.backward and plans.saves_packed:
            at -= 1
        given = (*given[:at], *own, *given[at:])
        return _core.run_staged(
            plan.native, 0, 0, functions, None, lambda lend, rows, slot: lend, *given
        )

    out = run(plans.forward, plans.forward_state, state[0], *plans.pick_inputs(tensors))
    saved = plans.pick_saved((*out, *tensors))
    packed, saved = saved[: plans.saves_packed], saved[plans.saves_packed :]
    given = (*plans.pick_grads((grad,)), *saved, *packed)
    grads = run(plans.backward, plans.backward_state, state[1], *given)
    found = [grads[at] for at in plans.places if at >= 0]
    return Found(out[0], *found), [pair[1] for pair in state]


def problem():
    scales = torch.full((256,), 8.0)
    x, w, dy = torch.randn(TOKENS, IN), torch.randn(OUT, IN) / 8, torch.randn(TOKENS, OUT)
    return x, w, dy, scales


def run_whole(recipe, x, w, dy, scales):
    """The same by one rank, which has all."""
    quantization = HIGH_PRECISION if recipe is None else quantization_of(recipe)
    graph = Graph()
    spec = LinearSpec(
        IN, OUT, *[_core.DTYPE_F32] * 5, quantization,
        LinearFlags(input=_core.VALUE_GRADIENT, weight=WEIGHT),
    )  # fmt: skip
    rows = _core.Extent(symbol=_core.SYMBOL_ROWS, multiply=1)
    given = graph.tensor("input", spec.input, (rows, IN), input_flags(True))
    weight, bias = graph.linear_parameters(spec, "")
    y = graph.value("output", spec.output, (rows, OUT), RESULT)
    graph.add_linear(spec, (given, weight, bias), y, "", 0)
    graph.returns([y])
    return run_rank(CallPlans(graph), World(), 0, (x, w), dy, scales)[0]


WAYS = {
    "column": (COPY, None),
    "column-sp": (GATHER, None),
    "row": (None, ALL_REDUCE),
    "row-sp": (None, SCATTER),
}


@pytest.mark.parametrize("halves", [(), (0, 1)], ids=["whole", "halves"])
@pytest.mark.parametrize("forms", [False, True], ids=["wide", "forms"])
@pytest.mark.parametrize("recompute", [False, True], ids=["saved", "recompute"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_linear_of_all_ranks(recipe, way, recompute, forms, halves):
    """Slices where nothing is summed have the same bits; sums those of fp32 in another order."""
    kinds, use = WAYS[way], RECIPES[recipe]
    x, w, dy, scales = problem()
    whole = run_whole(use, x, w, dy, scales)
    graph = linear_graph(use, kinds, forms=forms, halves=halves, recompute=recompute)
    plans, world = CallPlans(graph), World()
    column = "column" in way

    def of_rank(rank):
        part = w.chunk(RANKS, 0 if column else 1)[rank].contiguous()
        mine = x if column else x.chunk(RANKS, 1)[rank].contiguous()
        grad = dy.chunk(RANKS, 1)[rank].contiguous() if column else dy
        if way == "column-sp":
            mine = x.chunk(RANKS)[rank]
        if way == "row-sp":
            grad = dy.chunk(RANKS)[rank]
        return run_rank(plans, world, rank, (mine, part), grad, scales)[0]

    found = each_rank(of_rank, world)
    outputs, grads, weights = zip(*found, strict=True)
    # Per-tensor amaxes of a slice of the weight, or of the gradient, are those of the slice alone.
    alike = recipe != "current"
    bound = tol("sum", F32, max(IN, OUT)) if alike else 4 * tol("round", E5M2)
    if way == "column":
        check(torch.cat(outputs, 1), whole.output, bound, alike)
        assert_nmse(grads[0], whole.grad_input, bound)
        assert torch.equal(grads[0], grads[1])
        check(torch.cat(weights), whole.grad_weight, bound, alike)
    if way == "column-sp":
        check(torch.cat(outputs, 1), whole.output, bound, alike)
        assert_nmse(torch.cat(grads), whole.grad_input, bound)
        check(torch.cat(weights), whole.grad_weight, bound, alike)
    if way.startswith("row"):
        total = outputs[0] if way == "row" else torch.cat(outputs)
        assert_nmse(total, whole.output, bound)
        check(torch.cat(grads, 1), whole.grad_input, bound, alike)
        check(torch.cat(weights, 1), whole.grad_weight, bound, alike)


def check(found, wanted, bound, alike):
    if alike:
        assert torch.equal(found, wanted)
    else:
        assert_nmse(found, wanted, bound)


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
    use = RECIPES[recipe]
    plans = CallPlans(linear_graph(use, (GATHER, None), forms=use is not None, halves=(0, 1)))
    names, handed = stages_of(plans.backward)
    gather = "x_gather_again" if use is None else "gather_input_again"
    order = [
        gather, "gemm_grad_input", "x_reduce_scatter_grad", f"{gather}_finish", "gemm_grad_weight",
        "x_reduce_scatter_grad_finish",
    ]  # fmt: skip
    assert [name for name in names if name in order] == order
    if use is not None:
        assert _core.DTYPE_F32 not in [d for d, link in handed[gather] if link in ("row", "column")]
    saved = [b for b in plans.forward.described.buffers if b.role == "saved"]
    assert not [b.name for b in saved if "gathered" in b.name or b.name == "taken"]
    assert bool(saved) == (use is not None)


@pytest.mark.parametrize("recipe", ["delayed", "block", "mxfp8"])
def test_what_is_gathered_of_a_gradient(recipe):
    """With one scale for the tensor it is the row-wise form alone, else both and their scales."""
    plans = CallPlans(linear_graph(RECIPES[recipe], (None, SCATTER), forms=True))
    _, handed = stages_of(plans.backward)
    links = [link for _, link in handed["gather_grad_output"][::2]]
    one = ["row"]
    assert links == (
        one if recipe == "delayed" else ["row", "row_scales", "column", "column_scales"]
    )


def test_a_sum_is_made_in_place():
    """Neither a sum over ranks nor that of a gradient takes a copy."""
    for kinds, stage in (((COPY, None), "x_all_reduce_grad"), ((None, ALL_REDUCE), "y_all_reduce")):
        plans = CallPlans(linear_graph(None, kinds))
        names = stages_of(plans.forward)[0] + stages_of(plans.backward)[0]
        assert stage in names
        assert not {"copy_gradient", "add_gradients"} & set(names)


# ---- errors --------------------------------------------------------------------------------------


def changed(graph, kind=_core.NODE_COLLECTIVE, **fields):
    at = next(i for i, node in enumerate(graph.nodes) if node.kind == kind)
    graph.nodes[at] = graph.nodes[at]._replace(**fields)
    return graph


def with_bias(kind):
    """A linear layer with a bias, whose outputs are summed."""
    graph = linear_graph(None, (None, kind))
    values = {value.name: number for number, value in enumerate(graph.values)}
    flags = _core.VALUE_PARAMETER
    bias = graph.tensor("bias", _core.DTYPE_F32, (OUT,), flags)
    inputs = values["input"], values["weight"], bias
    return changed(graph, _core.NODE_LINEAR, inputs=inputs)


def with_result(graph, name):
    at = next(i for i, value in enumerate(graph.values) if value.name == name)
    graph.values[at] = graph.values[at]._replace(flags=graph.values[at].flags | RESULT)
    return graph


ERRORS = {
    "collective: kind 4 of 2 ranks": lambda: changed(linear_graph(None, (GATHER, None)), variant=4),
    "collective: kind 0 of 0 ranks": lambda: changed(linear_graph(None, (GATHER, None)), ranks=0),
    "over 3 ranks: taken is of another": lambda: changed(
        linear_graph(None, (GATHER, None)), ranks=3
    ),
    "over 3 ranks: output is of another": lambda: changed(
        linear_graph(None, (None, SCATTER)), ranks=3
    ),
    "kind 2 gathers nothing, so no forms": lambda: changed(
        linear_graph(None, (None, ALL_REDUCE)), flags=_core.COLLECTIVE_FORMS
    ),
    "made has a bias, which a sum over ranks": lambda: with_bias(SCATTER),
    "made has a bias, which a sum": lambda: with_bias(ALL_REDUCE),
    "taken is a copy, or gathered in quantized forms: only linear nodes": lambda: with_result(
        linear_graph(RECIPES["delayed"], (GATHER, None), forms=True), "taken"
    ),
    "taken is a copy, or gathered in": lambda: with_result(
        linear_graph(None, (COPY, None)), "taken"
    ),
    "gradient of made is gathered in quantized forms: expected a linear node": lambda: with_result(
        linear_graph(RECIPES["delayed"], (None, SCATTER), forms=True), "made"
    ),
}


@pytest.mark.parametrize("message", ERRORS)
def test_errors(message):
    graph = ERRORS[message]()
    with pytest.raises(ValueError, match=message):
        graph.make(_core.DIRECTION_FORWARD)
