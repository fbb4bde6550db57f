# SPDX-License-Identifier: Apache-2.0
"""A linear layer between collectives, as plans of one rank, and the whole that all ranks make."""

from typing import NamedTuple

import torch

from transformer_engine import _core
from transformer_engine.common.graphs import (
    RESULT,
    Collective,
    Graph,
    LinearFlags,
    LinearSpec,
    input_flags,
)
from transformer_engine.common.operand_casts import HIGH_PRECISION, quantization_of
from transformer_engine.common.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
)

TILE = 128
RECIPES = {
    "none": None,
    "delayed": DelayedScaling(),
    "current": Float8CurrentScaling(),
    "block": Float8BlockScaling(),
    "mxfp8": MXFP8BlockScaling(),
    "nvfp4": NVFP4BlockScaling(disable_stochastic_rounding=True),
    "nvfp4-plain": NVFP4BlockScaling(disable_stochastic_rounding=True, disable_rht=True),
    "nvfp4-rows": NVFP4BlockScaling(
        disable_stochastic_rounding=True, disable_2d_quantization=True, row_scaled_activation=True
    ),
}
MEASURED = [name for name in RECIPES if name == "current" or name.startswith("nvfp4")]
"""Recipes that measure an amax of the tensor, which ranks have in common here."""
WAYS = {  # collectives before and behind the layer
    "column": (_core.COLLECTIVE_COPY, None),
    "column-sp": (_core.COLLECTIVE_GATHER, None),
    "row": (None, _core.COLLECTIVE_ALL_REDUCE),
    "row-sp": (None, _core.COLLECTIVE_REDUCE_SCATTER),
    "alone": (None, None),
}
WEIGHT = _core.VALUE_PARAMETER | _core.VALUE_GRADIENT
AMAXES = ("reduce_amax_input", "reduce_amax_weight", "reduce_amax_grad_output")
"""Modules reduce those of what is gathered, which have to be alike; here all are, so that bits are
those of the whole."""


def has_slices_of_the_whole(recipe, way):
    """Whether quantized parts are those of the whole: not where a rank measures parts of rows."""
    return recipe != "nvfp4-rows" or "column" in way


def sizes(ranks):
    """Features in and out, and tokens: of each rank a multiple of a tile."""
    return ranks * TILE, ranks * TILE, ranks * TILE


def linear_graph(recipe, way, ranks, *, forms=False, halves=(), recompute=False, bias=False):
    """The layer, of the size of a rank's part."""
    before, behind = WAYS[way]
    columns, outputs, _ = sizes(ranks)
    features = columns // (ranks if behind is not None else 1), outputs
    if before is not None:
        features = columns, outputs // ranks
    how = HIGH_PRECISION if RECIPES[recipe] is None else quantization_of(RECIPES[recipe])
    external = AMAXES if recipe in MEASURED and way != "alone" else ()
    flags = LinearFlags(
        input=_core.VALUE_GRADIENT, weight=WEIGHT, bias=_core.VALUE_PARAMETER if bias else 0
    )
    spec = LinearSpec(
        *features, *[_core.DTYPE_F32] * 5, how, flags,
        external=frozenset(_core.LINEAR_STAGES.index(name) for name in external),
    )  # fmt: skip
    graph = Graph(_core.GRAPH_RECOMPUTE if recompute else 0)

    def rows(times):
        return _core.Extent(symbol=_core.SYMBOL_ROWS, multiply=times)

    sequence = way.endswith("-sp")  # the rows of all ranks are so many times those of one
    inner = ranks if sequence else 1
    local = 1 if before is not None else inner
    x = graph.tensor("input", spec.input, (rows(local), features[0]), input_flags(True))
    parameters = graph.linear_parameters(spec, "")
    made_rows = rows(1 if behind is not None else inner)
    y = graph.value("output", spec.output, (made_rows, features[1]), RESULT)
    made = y
    if before is not None:
        taken = graph.value("taken", spec.input, (rows(inner), features[0]))
        graph.add_collective(Collective(before, ranks, forms and sequence, halves), x, taken, "x_")
        x = taken
    if behind is not None:
        made = graph.value("made", spec.output, (rows(inner), features[1]))
    graph.add_linear(spec, (x, *parameters), made, "", 0)
    if behind is not None:
        graph.add_collective(Collective(behind, ranks, forms and sequence, halves), made, y, "y_")
    graph.returns([y])
    return graph


class Problem(NamedTuple):
    """Of all ranks: tensors that a call is given, and the scales that it begins with."""

    input: torch.Tensor
    weight: torch.Tensor
    grad: torch.Tensor
    scales: torch.Tensor


class Found(NamedTuple):
    """What a call made."""

    output: torch.Tensor
    grad_input: torch.Tensor
    grad_weight: torch.Tensor


def make_problem(ranks):
    """Random numbers."""
    columns, outputs, tokens = sizes(ranks)
    x, w = torch.randn(tokens, columns), torch.randn(outputs, columns) / 8
    return Problem(x, w, torch.randn(tokens, outputs), torch.full((256,), 8.0))


_CUTS = {  # along which dims input, weight and gradient of the output are cut; None: not at all
    "column": (None, 0, 1),
    "column-sp": (0, 0, 1),
    "row": (1, 1, None),
    "row-sp": (1, 1, 0),
}


def part_of(problem, way, ranks, rank):
    """What a rank has of it."""
    cut = [
        t if dim is None else t.chunk(ranks, dim)[rank].contiguous()
        for t, dim in zip(problem, _CUTS[way], strict=False)
    ]
    return Problem(*cut, problem.scales)


def joined(parts, way):
    """What all ranks found as that of the whole; what each has whole, of the first."""
    output, grad_input, grad_weight = zip(*parts, strict=True)
    outputs = {"column": 1, "column-sp": 1, "row": None, "row-sp": 0}[way]
    grads = {"column": None, "column-sp": 0, "row": 1, "row-sp": 1}[way]

    def join(tensors, dim):
        return tensors[0] if dim is None else torch.cat(tensors, dim)

    weights = join(grad_weight, 0 if "column" in way else 1)
    return Found(join(output, outputs), join(grad_input, grads), weights)


def run_all(plans, functions, tensors, grad, scales, rows=0):
    """Run all plans of a graph over tensors by name: the output and gradients, by name.

    ``functions(plan)`` are arguments of `_core.run_staged`, `scales` those that each direction
    begins with, `rows` those of one rank, for a plan that is given no tensor of rows.
    """
    named = [(i, v.name) for i, v in enumerate(plans.graph.values) if v.name in tensors]
    known = {("value", i): tensors[name] for i, name in named}
    known["gradient", plans.results[0][1]] = grad
    packed = None
    for plan in filter(None, (plans.forward, plans.backward, plans.wgrad)):
        state = {"scale": scales.clone(), "history": scales.new_zeros(4, len(scales))}
        buffers, first = plan.described.buffers, plan is plans.forward
        given = [
            state[b.link] if b.role == "state" else known[b.link, b.of]
            for b in buffers
            if b.role in ("input", "parameter", "state")
        ]
        if not first and any(b.role == "saved" for b in buffers):
            given.append(packed)
        if not any(b.role == "input" and b.leading for b in buffers):
            given.append(rows)
        made = _core.run_staged(plan.native, 0, 0, *functions(plan), *given)
        outputs = [(b.link, b.of) for b in buffers if b.role == "output"]
        known.update(zip(outputs, made, strict=False))
        if first and len(made) > len(outputs):
            packed = made[len(outputs)]
    found = {name: known["gradient", i] for i, name in named if ("gradient", i) in known}
    return found | {"output": known[plans.results[0]]}


def run_plans(plans, functions, x, weight, grad, scales):
    """Forward and backward of a layer; arguments as of `run_all`."""
    found = run_all(plans, functions, {"input": x, "weight": weight}, grad, scales)
    return Found(found["output"], found["input"], found["weight"])


def run_whole(recipe, problem, ranks):
    """The same by one rank, which has all."""
    from transformer_engine.common.plans import CallPlans
    from transformer_engine.pytorch.execution.stages import Staged

    plans = CallPlans(linear_graph(recipe, "alone", ranks))
    return run_plans(plans, Staged({}).of, *problem)


def assert_as_whole(parts, way, recipe, problem, ranks, exact=True):
    """Assert that parts are those of the whole.

    Slices where nothing is summed over ranks have the same bits; sums those of fp32 in another
    order. Devices whose GEMMs add in an order that depends on the size are not `exact`.
    """
    from comparators import assert_nmse
    from tols import F32, tol

    whole, found = run_whole(recipe, problem, ranks), joined(parts, way)
    bound = tol("sum", F32, max(sizes(ranks)))
    if not exact and recipe != "none":
        bound += tol("sum_fast", torch.float8_e4m3fn, max(sizes(ranks)))
    summed = "grad_input" if "column" in way else "output"
    for name, mine, theirs in zip(Found._fields, found, whole, strict=True):
        if name == summed or not exact:
            assert_nmse(mine.cpu(), theirs, bound, name)
        else:
            assert torch.equal(mine, theirs), name
    if not way.endswith("-sp"):  # the sum is the same everywhere
        for part in parts[1:]:
            assert torch.equal(getattr(part, summed), getattr(parts[0], summed))
