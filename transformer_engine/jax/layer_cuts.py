# SPDX-License-Identifier: Apache-2.0
"""How a mesh cuts a layer: which axes cut which factors, decided by where XLA has spread arrays.

An axis cuts one factor. Rows are cut by axes of data parallelism. An axis that cuts what a dense
layer makes (column parallel), or what it sums over (row parallel), may cut rows of the layer's
input, or of its result, too (sequence parallel): they are gathered, and scattered, in the plan.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from jax.sharding import PartitionSpec

from transformer_engine import _core
from transformer_engine.common.plan_text import Plan
from transformer_engine.jax.custom_calls import RESULTS, summary, whole_part
from transformer_engine.jax.layer_plans import (
    Dims,
    Factors,
    Facts,
    Kernel,
    LayerPlans,
    Ranks,
    Side,
    layer_plans,
)
from transformer_engine.jax.sharding import Axes, AxesInForce, axes_of

# ---- arrays of a call ----------------------------------------------------------------------------


class Direction(NamedTuple):
    """Which call of a layer; static."""

    facts: Facts
    backward: bool
    names: AxesInForce

    @property
    def plan(self) -> Plan:
        """The plan of the whole layer."""
        call = layer_plans(self.facts).call
        return call.backward if self.backward else call.forward

    def __repr__(self) -> str:
        return summary(self.plan)


def listed(plan: Plan) -> tuple[list[_core.Buffer], list[_core.Buffer]]:
    """What a call is given, all but the row of amaxes, and what it makes, in order."""
    part, buffers = whole_part(plan), plan.described.buffers
    given = [buffers[n] for n in part.given if buffers[n].link != "history"]
    made = [buffers[n] for n in part.made]
    return given, [buffer for role in RESULTS for buffer in made if buffer.role == role]


class Ports(NamedTuple):
    """The arrays of a call, and the factors of their dims."""

    plans: LayerPlans
    sizes: dict[str, int]  # of factors
    given: list[_core.Buffer]
    made: list[_core.Buffer]

    @property
    def batch(self) -> Factors:
        """Factors of rows."""
        return tuple(factor for factor in self.sizes if factor.startswith("b"))

    @property
    def rows(self) -> int:
        """How many there are."""
        return math.prod(self.sizes[factor] for factor in self.batch)

    def dims(self, buffer: _core.Buffer) -> Dims | None:
        """As `LayerPlans.dims`; None too where rows are padded."""
        for extent in buffer.shape:
            if extent.symbol == _core.SYMBOL_ROWS and self.rows % extent.align:
                return None
        return self.plans.dims(buffer, self.batch)

    def has_rows(self, buffer: _core.Buffer) -> bool:
        """Return whether a buffer has a part for each row."""
        return any(extent.symbol == _core.SYMBOL_ROWS for extent in buffer.shape)

    def is_sum(self, buffer: _core.Buffer) -> bool:
        """Return whether a result is a sum over rows: the gradient of a parameter."""
        return buffer.role == "output" and not self.has_rows(buffer)


# ---- cuts ----------------------------------------------------------------------------------------


class Cut(NamedTuple):
    """How a mesh cuts a layer."""

    axes: tuple[tuple[str, Axes], ...] = ()  # of each factor that is cut
    sequence: tuple[tuple[Side, str, Axes], ...] = ()
    """Of an end of the layer: a factor of its rows, and axes that cut it there, behind `axes`."""
    shape: tuple[tuple[str, int], ...] = ()  # of the mesh
    scattered: tuple[tuple[tuple[int, Axes], ...], ...] = ()
    """Of each result the dims of which a device keeps a part of the sum, and by which axes."""

    def of(self, factors: Sequence[str], side: Side = Side.INNER) -> Axes:
        """Axes that cut any of these factors, at a side of the layer."""
        known = dict(self.axes)
        found = [axis for factor in factors for axis in known.get(factor, ())]
        for end, factor, axes in self.sequence:
            found += axes if end == side and factor in factors else ()
        return tuple(dict.fromkeys(found))

    def all_axes(self) -> Axes:
        """Axes that cut anything."""
        return tuple(axis for _, axes in self.axes for axis in axes)

    def parts(self, factors: Sequence[str], side: Side = Side.INNER) -> int:
        """Into how many parts they cut these factors."""
        sizes = dict(self.shape)
        return math.prod(sizes[axis] for axis in self.of(factors, side))

    def spec(
        self, dims: Dims | None, ndim: int, more: Sequence[tuple[int, Axes]] = ()
    ) -> PartitionSpec:
        """The partition of an array; by `more` axes are some of its dims cut too."""
        if dims is None:
            return PartitionSpec(*(None,) * ndim)
        others = dict(more)
        each = ((self.of((f,), dims.side), others.get(n, ())) for n, f in enumerate(dims.factors))
        return PartitionSpec(*((*axes, *added) or None for axes, added in each))

    def lengths(self, ports: Ports, dims: Dims) -> tuple[int, ...]:
        """The dims that a device has of an array."""
        return tuple(ports.sizes[f] // self.parts((f,), dims.side) for f in dims.factors)

    def at(self, side: Side) -> tuple[str, Axes] | None:
        """The factor that is cut at an end alone, and the axes; None: there is none."""
        found = [(factor, axes) for end, factor, axes in self.sequence if end == side]
        return found[0] if found else None

    def facts(self, facts: Facts) -> Facts:
        """What one device has of a layer."""
        if not self.axes:
            return facts
        plans, kernels = layer_plans(facts), []
        for kernel, *factors in zip(facts.kernels, plans.inside, plans.outside, strict=True):
            dims = zip((kernel.inside, kernel.outside), factors, strict=True)
            cut = [
                tuple(size // self.parts((of,)) for size, of in zip(sizes, names, strict=True))
                for sizes, names in dims
            ]
            kernels.append(Kernel(*cut, kernel.dtype))
        before, behind = self.parts(plans.outside[0]), self.parts(plans.inside[-1])
        ranks = Ranks(
            before * (before > 1),
            behind * (behind > 1),
            self.at(Side.INPUT) is not None,
            self.at(Side.OUTPUT) is not None,
            any(of.x.cast is not None for of in facts.layer.linears),
        )
        return facts._replace(kernels=tuple(kernels), ranks=ranks)


def ports_of(direction: Direction, arrays: Sequence, cut: Cut = Cut()) -> Ports:  # noqa: B008
    """The ports of a call whose arrays, or those that a device has of them, have these shapes.

    The first array is the input, or the gradient of the result.
    """
    facts, shape = direction.facts, arrays[0].shape
    first, last = facts.kernels[0], facts.kernels[-1]
    features = last.outside if direction.backward else first.inside
    side = Side.OUTPUT if direction.backward else Side.INPUT
    batch = [f"b{n}" for n in range(len(shape) - len(features))]
    sizes = {f: shape[n] * cut.parts((f,), side) for n, f in enumerate(batch)}
    sizes |= {f"i{n}": size for n, size in enumerate(first.inside)}
    if len(facts.kernels) > 1:
        sizes |= dict(zip(("m0", "m1"), first.outside, strict=True))
    sizes |= {f"o{n}": size for n, size in enumerate(last.outside)}
    return Ports(layer_plans(facts), sizes, *listed(direction.plan))


# ---- what XLA has spread -------------------------------------------------------------------------


def never_cut(plans: LayerPlans) -> set[str]:
    """Factors that no device has a part of."""
    found: set[str] = set()
    if plans.facts.layer.norm is not None:
        found |= set(plans.inside[0])
    if len(plans.facts.kernels) > 1:
        found |= {"m0", *plans.outside[-1]}
    return found


class _Place(NamedTuple):
    """Where an axis lies."""

    kind: str  # role of the buffer, or "parameter" for gradients of parameters too
    side: Side
    factor: str


class _Seen:
    """Where the axes of a mesh lie in the arrays of a call, as XLA would have them."""

    def __init__(self, ports: Ports, given: Sequence, made: Sequence) -> None:
        self.places: dict[str, set[_Place]] = {}
        pairs = (*zip(ports.given, given, strict=True), *zip(ports.made, made, strict=True))
        for buffer, array in pairs:
            dims = ports.dims(buffer)
            if dims is None:
                continue
            kind = buffer.role if ports.has_rows(buffer) else "parameter"
            for factor, axes in zip(dims.factors, axes_of(array), strict=True):
                for axis in axes:
                    self.places.setdefault(axis, set()).add(_Place(kind, dims.side, factor))

    def factors(self, axis: str, *kinds: str) -> list[str]:
        """The factors that an axis cuts in arrays of these kinds; all kinds by default."""
        places = self.places.get(axis, ())
        return sorted({at.factor for at in places if not kinds or at.kind in kinds})

    def rows_at(self, axis: str, side: Side) -> list[str]:
        """The factors of rows that it cuts at a side."""
        places = self.places.get(axis, ())
        return sorted({at.factor for at in places if at.side == side and at.factor[0] == "b"})


# ---- decisions -----------------------------------------------------------------------------------


def _choose(direction: Direction, ports: Ports, seen: _Seen, axis: str) -> str | None:
    """The factor that an axis cuts."""
    plans, never = ports.plans, never_cut(ports.plans)
    results = "input" if direction.backward else "output"  # what has the factors of the result
    rows = [f for f in seen.factors(axis, "input", "output") if f.startswith("b")]
    if axis in direction.names.data:
        return rows[0] if rows else None
    columns = [f for f in seen.factors(axis) if f in plans.outside[0] and f not in never]
    if len(plans.facts.kernels) == 1 and rows:  # else the kernel is spread as its rows are
        columns = [f for f in seen.factors(axis, results) if f in plans.outside[0]]
    if columns:
        return columns[0]
    inside = [f for f in seen.factors(axis) if f in plans.inside[0] and f not in never]
    if rows or not direction.backward:
        kinds = ("output",) if direction.backward else ("input",)
        inside = [f for f in seen.factors(axis, *kinds) if f in plans.inside[0] and f not in never]
    return (inside or rows or [None])[0]


_MULTIPLE = 16
"""Of the dims of a product in FP8."""


def _fits(ports: Ports, cut: Cut) -> bool:
    """Return whether the parts are whole, and what products in FP8 multiply."""
    ends = [(f, side) for side in Side for f in ports.sizes]
    if any(ports.sizes[f] % cut.parts((f,), side) for f, side in ends):
        return False
    forms = (b for b in (*ports.given, *ports.made) if ports.has_rows(b) and ports.dims(b) is None)
    if any(cut.of(ports.batch, side) for side in Side) and any(forms):
        return False  # rows of padded forms
    facts = ports.plans.facts
    if not any(of.x.cast is not None for of in facts.layer.linears):
        return True
    lengths = [ports.rows // cut.parts(ports.batch, side) for side in Side]
    lengths = [length for length in lengths if length != ports.rows]
    for kernel, part in zip(facts.kernels, cut.facts(facts).kernels, strict=True):
        pairs = zip(kernel.matrix, part.matrix, strict=True)
        lengths += [size for size_of_all, size in pairs if size != size_of_all]
    return all(length % _MULTIPLE == 0 for length in lengths)


def cut_of(direction: Direction, mesh: Any, given: Sequence, made: Sequence) -> Cut:
    """How a mesh cuts a call; arrays are shapes with the shardings that XLA would give them."""
    ports = ports_of(direction, given)
    seen = _Seen(ports, given, made)
    cut = Cut(shape=tuple(mesh.shape.items()))
    for axis in mesh.axis_names:
        factor = _choose(direction, ports, seen, axis) if mesh.shape[axis] > 1 else None
        if factor is not None:
            more = dict(cut.axes)
            more[factor] = (*more.get(factor, ()), axis)
            wanted = cut._replace(axes=tuple(sorted(more.items())))
            cut = wanted if _fits(ports, wanted) else cut
    cut = _with_sequence(ports, seen, cut)
    scattered = (_scattered(ports, cut, *pair) for pair in zip(ports.made, made, strict=True))
    return cut._replace(scattered=tuple(scattered))


def _with_sequence(ports: Ports, seen: _Seen, cut: Cut) -> Cut:
    """The same with rows cut at the ends of the layer that XLA has cut there."""
    plans = ports.plans
    if any(of.backward is not None for of in plans.facts.layer.linears):
        return cut  # such a backward reads rows in high precision, which nothing gathers
    for side, factors in ((Side.INPUT, plans.outside[0]), (Side.OUTPUT, plans.inside[-1])):
        axes = cut.of(factors)
        rows = {tuple(seen.rows_at(axis, side)) for axis in axes}
        if len(rows) != 1 or len(*rows) != 1:
            continue
        wanted = cut._replace(sequence=(*cut.sequence, (side, *rows.pop(), axes)))
        alike = len({axes for _, _, axes in wanted.sequence}) == 1
        cut = wanted if alike and _fits(ports, wanted) else cut
    return cut


def _scattered(
    ports: Ports, cut: Cut, buffer: _core.Buffer, array: Any
) -> tuple[tuple[int, Axes], ...]:
    """Dims of a sum of which each device is to have a part, and the axes that cut them."""
    dims, found = ports.dims(buffer), []
    if not ports.is_sum(buffer) or dims is None:
        return ()
    over, sizes = cut.of(ports.batch, dims.side), dict(cut.shape)
    for dim, (factor, axes) in enumerate(zip(dims.factors, axes_of(array), strict=True)):
        axes = tuple(axis for axis in axes if axis in over)
        parts = cut.parts((factor,)) * math.prod(sizes[axis] for axis in axes)
        if axes and ports.sizes[factor] % parts == 0:
            found.append((dim, axes))
    return tuple(found)
