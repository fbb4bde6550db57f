# SPDX-License-Identifier: Apache-2.0
"""Networks of several layers whose ranks, threads of a process, split them: all make one whole."""

from functools import partial

import pytest
import torch
from collective_graphs import run_all
from collective_ranks import RANKS, World, each_rank, functions_of
from comparators import assert_nmse
from tols import F32, tol

from transformer_engine import _core
from transformer_engine.common.graphs import (
    RESULT,
    Collective,
    Graph,
    LinearFlags,
    LinearSpec,
    Norm,
    input_flags,
)
from transformer_engine.common.operand_casts import HIGH_PRECISION, Quantization, quantization_of
from transformer_engine.common.plans import CallPlans
from transformer_engine.common.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Float8RowScaling,
    MXFP8BlockScaling,
)

WIDTH, ROWS = 256, 128
GATHER, SCATTER = _core.COLLECTIVE_GATHER, _core.COLLECTIVE_REDUCE_SCATTER
ALL_REDUCE, COPY = _core.COLLECTIVE_ALL_REDUCE, _core.COLLECTIVE_COPY
WANTED = _core.VALUE_PARAMETER | _core.VALUE_GRADIENT


class Network:
    """A graph, of a rank's part or of the whole, whose parameters are cut along a dim.

    `cuts` has by tensor the dim, None for one that each rank has whole, "sum" for one whose
    gradients are summed by the program. `split` is False for the whole.
    """

    def __init__(self, split, quantization, forms=False, flags=0, weight=WANTED, external=()):
        self.split, self.quantization, self.forms = split, quantization, forms
        self.graph, self.weight = Graph(flags), weight
        self.external = frozenset(map(_core.LINEAR_STAGES.index, external))
        self.cuts, self.shapes = {}, {}
        self.layers = self.nodes = self.norms = 0

    def value(self, of_all, cut=False, flags=0):
        """A value of the rows of all ranks or of one; `cut`: of a rank's columns."""
        times = RANKS if of_all or not self.split else 1
        rows = _core.Extent(symbol=_core.SYMBOL_ROWS, multiply=times)
        columns = WIDTH // RANKS if cut and self.split else WIDTH
        self.nodes += 1
        number = self.graph.value(f"v{self.nodes}", _core.DTYPE_F32, (rows, columns), flags)
        return number, of_all, cut

    def input(self, of_all=False, cut=False):
        number, *how = self.value(of_all, cut)
        shape = self.graph.values.pop(number).shape
        number = self.graph.tensor("input", _core.DTYPE_F32, shape, input_flags(True))
        self.cuts["input"], self.shapes["input"] = (1 if cut else None) if of_all else 0, None
        return number, *how

    def norm(self, x):
        norm = Norm(_core.NORM_RMSNORM, _core.DTYPE_F32, 1e-5, gamma=WANTED)
        self.norms += 1
        name = f"norm{self.norms}_"
        parameters = self.graph.norm_parameters(norm, WIDTH, name)
        self.cuts[f"{name}gamma"] = None if x[1] else "sum"
        self.shapes[f"{name}gamma"] = (WIDTH,)
        y = self.value(*x[1:])
        self.graph.add_norm(norm, (x[0], *parameters), y[0], name=name)
        return y

    def gelu(self, x):
        y = self.value(*x[1:])
        how = {"variant": _core.ACTIVATION_GELU, "numbers": (0.0, 0.0, 0.0)}
        self.graph.node(_core.NODE_ACTIVATION, (x[0],), y[0], name=f"act{self.nodes}_", **how)
        return y

    def collective(self, kind, x):
        if not self.split:
            return x[0], kind == GATHER or (kind != SCATTER and x[1]), x[2]
        y = self.value(kind == GATHER or (kind != SCATTER and x[1]), x[2])
        travels = self.forms and kind in (GATHER, SCATTER)
        name = f"c{self.nodes}_"
        self.graph.add_collective(Collective(kind, RANKS, travels, (0, 1)), x[0], y[0], name)
        return y

    def linear(self, x, cut):
        """Split by columns (0: its outputs are cut) or by rows (1: its inputs are)."""
        name, part = f"linear{self.layers}_", RANKS if self.split else 1
        sizes = (WIDTH, WIDTH // part) if cut == 0 else (WIDTH // part, WIDTH)
        flags = LinearFlags(input=_core.VALUE_GRADIENT, weight=self.weight)
        dtypes = [_core.DTYPE_F32] * 5
        spec = LinearSpec(*sizes, *dtypes, self.quantization, flags, external=self.external)
        parameters = self.graph.linear_parameters(spec, name)
        self.cuts[f"{name}weight"], self.shapes[f"{name}weight"] = cut, (WIDTH, WIDTH)
        y = self.value(x[1], cut == 0)
        self.graph.add_linear(spec, (x[0], *parameters), y[0], name, self.layers)
        self.layers += 1
        return y

    def returns(self, y):
        values = self.graph.values
        values[y[0]] = values[y[0]]._replace(flags=values[y[0]].flags | RESULT)
        self.graph.returns([y[0]])
        self.result = 0 if not y[1] else 1 if y[2] else None
        return self


def mlp(net):
    """Columns, an activation, rows, over a sequence of which each rank has a part."""
    x = net.linear(net.collective(GATHER, net.norm(net.input())), 0)
    return net.returns(net.collective(SCATTER, net.linear(net.gelu(x), 1)))


def two_blocks(net):
    """What the first one sums is read by a norm: a value in the middle."""
    x = net.collective(ALL_REDUCE, net.linear(net.input(of_all=True, cut=True), 1))
    x = net.linear(net.collective(COPY, net.norm(x)), 0)
    return net.returns(net.collective(ALL_REDUCE, net.linear(net.gelu(x), 1)))


def rows_alone(net):
    return net.returns(net.collective(SCATTER, net.linear(net.input(of_all=True, cut=True), 1)))


def columns_alone(net):
    return net.returns(net.linear(net.collective(GATHER, net.input()), 0))


def quantizer(lend, numbers):
    """A quantizer of the program: quarters."""
    source, *made = map(lend, numbers)
    for each in made:
        each.copy_((source * 4).round() / 4)


def check(make, quantization, bound, rows=ROWS, **options):
    """Compare the parts of all ranks with the whole."""
    whole = make(Network(False, quantization, **options | {"forms": False}))
    mine, world = make(Network(True, quantization, **options)), World()
    tensors = {
        name: torch.randn(shape or (RANKS * rows, WIDTH)) / (8 if "weight" in name else 1)
        for name, shape in whole.shapes.items()
    }
    grad, scales = torch.randn(RANKS * rows, WIDTH), torch.full((256,), 8.0)
    plans = CallPlans(mine.graph)

    def functions(rank, plan):
        made, *others = functions_of(world, rank, plan)
        for stage in plan.stages:
            if stage.external and "quantize" in stage.name:
                made[stage.name] = partial(quantizer, numbers=stage.buffers)
            elif rank is None:
                made[stage.name] = lambda lend: None
        return made, *others

    def of_rank(rank):
        cut = {n: _cut(t, mine.cuts[n], rank) for n, t in tensors.items()}
        own = _cut(grad, mine.result, rank)
        return run_all(plans, partial(functions, rank), cut, own, scales, rows)

    alone = CallPlans(whole.graph), partial(functions, None)
    expected = run_all(*alone, tensors, grad, scales, rows)
    parts = each_rank(of_rank, world)
    for name, wanted in expected.items():
        dim = mine.result if name == "output" else mine.cuts[name]
        found = [part[name] for part in parts]
        if dim == "sum":
            total = sum(found)
        else:
            total = found[0] if dim is None else torch.cat(found, dim)
        assert_nmse(total, wanted, bound, name)


def _cut(tensor, dim, rank):
    return tensor if dim in (None, "sum") else tensor.chunk(RANKS, dim)[rank].contiguous()


RECIPES = {
    "none": HIGH_PRECISION,
    "delayed": quantization_of(DelayedScaling()),
    "block": quantization_of(Float8BlockScaling()),
    "mxfp8": quantization_of(MXFP8BlockScaling()),
    "block-wide": quantization_of(Float8BlockScaling(backward_override="high_precision")),
    "mxfp8-dequantized": quantization_of(MXFP8BlockScaling(backward_override="dequantized")),
}
OPTIONS = {
    "plain": {},
    "recompute": {"flags": _core.GRAPH_RECOMPUTE},
    "deferred": {"weight": WANTED | _core.VALUE_DEFER},
    "both": {"flags": _core.GRAPH_RECOMPUTE, "weight": WANTED | _core.VALUE_DEFER},
}
BOUND = 64 * tol("sum", F32, WIDTH)
"""Sums over ranks are in another order; three layers, an activation and a norm make more of it."""


@pytest.mark.parametrize("forms", [False, True], ids=["wide", "forms"])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("make", [mlp, two_blocks])
def test_networks(make, recipe, options, forms):
    bound = BOUND
    if make is two_blocks and recipe != "none":  # what is cast was summed: it may round elsewhere
        bound = tol("round", torch.float8_e5m2)
    check(make, RECIPES[recipe], bound, forms=forms, **OPTIONS[options])


@pytest.mark.parametrize("make", [rows_alone, columns_alone])
@pytest.mark.parametrize("options", OPTIONS)
def test_quantizers_of_a_program(make, options):
    """Their stages write high precision, which is gathered as such."""
    cast = _core.OperandCast(recipe=_core.RECIPE_EXTERNAL, dtype=_core.DTYPE_F32)
    stages = ("quantize_input", "quantize_weight", "quantize_grad_output")
    how = Quantization(cast, cast, cast)
    if options in ("recompute", "both"):
        stages += ("requantize_input", "requantize_weight")
    check(make, how, BOUND, forms=True, external=stages, **OPTIONS[options])


@pytest.mark.parametrize(
    "recipe", [MXFP8BlockScaling(), Float8BlockScaling()], ids=["mxfp8", "block"]
)
@pytest.mark.parametrize("rows", [8, 64, 100, 112, 130])
@pytest.mark.parametrize("make", [rows_alone, columns_alone])
def test_forms_of_padded_tiles_do_not_join(make, rows, recipe):
    with pytest.raises(ValueError, match="those of all ranks are put together, which takes rows"):
        check(make, quantization_of(recipe), 0.0, rows=rows, forms=True)


@pytest.mark.parametrize("make", [rows_alone, columns_alone])
def test_scales_that_ranks_do_not_have_together(make):
    with pytest.raises(ValueError, match="gathered in FP8 of a scale that each rank measures"):
        check(make, quantization_of(Float8CurrentScaling()), 0.0, forms=True)
    with pytest.raises(NotImplementedError, match="scales of columns over the rows of one rank"):
        check(make, quantization_of(Float8RowScaling()), 0.0, forms=True)
