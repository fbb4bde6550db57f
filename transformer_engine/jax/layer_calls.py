# SPDX-License-Identifier: Apache-2.0
"""The two calls of a layer, forward and backward, and how a mesh cuts them.

Each is a primitive of JAX. On one device, and within `jax.shard_map`, it is the custom calls of its
plan. Over a mesh whose axes XLA spreads arrays along it is one partition of Shardy: each device
runs the plan of its part of the layer, and collectives of XLA put the parts together. A call is
cut in three ways: by rows (data parallel: gradients of parameters are summed), by what the last
dense layer makes (column parallel: gradients of the input are summed), and by what a dense layer
sums over (row parallel: results are summed). What is cut otherwise is gathered first.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.custom_batching import sequential_vmap
from jax.experimental.custom_partitioning import (
    ArrayMapping,
    SdyShardingRule,
    custom_partitioning,
)
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jax.sharding import NamedSharding, PartitionSpec

from transformer_engine import _core
from transformer_engine.common.plan_text import Plan
from transformer_engine.common.plans import shape_of
from transformer_engine.jax.custom_calls import (
    RESULTS,
    PlanResults,
    call_plan,
    dtype_of,
    made_alike,
    make_primitive,
    register,
    result_of,
    summary,
    whole_part,
)
from transformer_engine.jax.definitions import is_spread
from transformer_engine.jax.definitions.scaling_modes import ScalingMode
from transformer_engine.jax.layer_plans import (
    Facts,
    Factors,
    Kernel,
    LayerPlans,
    Ranks,
    layer_plans,
)

RECIPES_CUT = (
    ScalingMode.NO_SCALING,
    ScalingMode.DELAYED_TENSOR_SCALING,
    ScalingMode.CURRENT_TENSOR_SCALING,
)
"""How casts may scale over a mesh: with one scale for a tensor, which all devices agree on."""

# ---- arrays of a call ----------------------------------------------------------------------------


class Direction(NamedTuple):
    """Which call of a layer; static."""

    facts: Facts
    backward: bool
    data: tuple[str, ...]  # axes of the mesh along which only rows are cut

    @property
    def plan(self) -> Plan:
        """The plan of the whole layer."""
        call = layer_plans(self.facts).call
        return call.backward if self.backward else call.forward

    def __repr__(self) -> str:
        return summary(self.plan)


class _Ports(NamedTuple):
    """The arrays of a call, in order, and the factors of their dims."""

    plans: LayerPlans
    plan: Plan
    sizes: dict[str, int]  # of factors
    given: list[_core.Buffer]  # all but the row of amaxes
    made: list[_core.Buffer]

    @property
    def batch(self) -> Factors:
        """Factors of rows."""
        return tuple(factor for factor in self.sizes if factor.startswith("b"))

    @property
    def rows(self) -> int:
        return math.prod(self.sizes[factor] for factor in self.batch)

    def factors(self, buffer: _core.Buffer) -> Factors | None:
        """As `LayerPlans.factors`; None too where rows are padded."""
        for extent in buffer.shape:
            if extent.symbol == _core.SYMBOL_ROWS and self.rows % extent.align:
                return None
        return self.plans.factors(buffer, self.batch)

    def is_sum(self, buffer: _core.Buffer) -> bool:
        """Return whether a result is a sum over rows: the gradient of a parameter."""
        rows = any(extent.symbol == _core.SYMBOL_ROWS for extent in buffer.shape)
        return buffer.role == "output" and not rows

    def flat(self, buffer: _core.Buffer) -> list[int]:
        """Shape of a buffer in the plan."""
        return shape_of(buffer, (None, None), [0, self.rows])

    def shape(self, buffer: _core.Buffer) -> tuple[int, ...]:
        """The same with a dim for each factor."""
        factors = self.factors(buffer)
        return tuple(self.flat(buffer) if factors is None else map(self.sizes.get, factors))


def _sizes(facts: Facts, batch: Sequence[int]) -> dict[str, int]:
    first, last = facts.kernels[0], facts.kernels[-1]
    found = {f"b{n}": size for n, size in enumerate(batch)}
    found |= {f"i{n}": size for n, size in enumerate(first.inside)}
    if len(facts.kernels) > 1:
        found |= dict(zip(("m0", "m1"), first.outside, strict=True))
    return found | {f"o{n}": size for n, size in enumerate(last.outside)}


def _ports_of(direction: Direction, arrays: Sequence) -> _Ports:
    """The ports of a call with arrays of these shapes, of which the first one has rows."""
    facts, plan, shape = direction.facts, direction.plan, arrays[0].shape
    features = facts.kernels[-1].outside if direction.backward else facts.kernels[0].inside
    part, buffers = whole_part(plan), plan.described.buffers
    given = [buffers[n] for n in part.given if buffers[n].link != "history"]
    made = [buffers[n] for n in part.made]
    made = [buffer for role in RESULTS for buffer in made if buffer.role == role]
    sizes = _sizes(facts, shape[: len(shape) - len(features)])
    return _Ports(layer_plans(facts), plan, sizes, given, made)


# ---- cuts ----------------------------------------------------------------------------------------

Axes = tuple[str, ...]
"""Axes of a mesh."""


class _Cut(NamedTuple):
    """How a mesh cuts a layer: the axes of each factor that it cuts."""

    axes: tuple[tuple[str, Axes], ...] = ()
    shape: tuple[tuple[str, int], ...] = ()  # of the mesh
    scattered: tuple[tuple[tuple[int, Axes], ...], ...] = ()
    """Of each result the dims of which a device keeps a part of the sum, and by which axes."""

    def of(self, factors: Sequence[str]) -> Axes:
        """Axes that cut any of these factors, or of those that begin with "b" for the name "b"."""
        return tuple(
            axis
            for factor, axes in self.axes
            if factor in factors or (factor.startswith("b") and "b" in factors)
            for axis in axes
        )

    def parts(self, factors: Sequence[str]) -> int:
        """Into how many parts they cut these factors."""
        sizes = dict(self.shape)
        return math.prod(sizes[axis] for axis in self.of(factors))

    def spec(
        self, factors: Factors | None, ndim: int, more: Sequence[tuple[int, Axes]] = ()
    ) -> PartitionSpec:
        """The partition of an array; by `more` axes are some of its dims cut too."""
        known, others = dict(self.axes), dict(more)
        dims = enumerate((None,) * ndim if factors is None else factors)
        axes = ((*known.get(of, ()), *others.get(dim, ())) for dim, of in dims)
        return PartitionSpec(*(of or None for of in axes))

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
        before = self.parts(plans.outside[0])
        behind = self.parts(plans.inside[-1])
        measured = any(of.x.cast is not None for of in facts.layer.linears)
        ranks = Ranks(before * (before > 1), behind * (behind > 1), measured)
        return facts._replace(kernels=tuple(kernels), ranks=ranks)


def _run(direction: Direction, cut: _Cut, *arrays: Array) -> tuple[Array, ...]:
    """Run a call on what a device has of its arrays."""
    facts = cut.facts(direction.facts)
    ports = _ports_of(direction._replace(facts=facts), arrays)
    given, saved = [], []
    for buffer, array in zip(ports.given, arrays, strict=True):
        if (buffer.link, buffer.of) == ports.plans.added:
            array = _as_product_adds(array, facts)
        if buffer.link == "scale":
            given += [array, jnp.zeros((1, array.shape[0]), jnp.float32)]
        elif buffer.role == "saved":
            saved.append(array.reshape(ports.flat(buffer)))
        else:
            given.append(array.reshape(ports.flat(buffer)))
    outside = functools.partial(_outside, ports, cut)
    made = call_plan(ports.plan, given, saved, outside=outside)
    return _together(ports, cut, made)


def _as_product_adds(bias: Array, facts: Facts) -> Array:
    """A bias that is added behind a sum, as a product in FP8 would add it: of 16 bits."""
    if facts.layer.linears[-1].x.cast is None:
        return bias
    short = jnp.float16 if dtype_of(facts.dtype) == jnp.float16 else jnp.bfloat16
    return bias.astype(short).astype(bias.dtype)


def _outside(ports: _Ports, cut: _Cut, stage: _core.Stage, held: dict[int, Array]) -> dict:
    """A collective of the plan: all of them are in place."""
    node = ports.plan.graph.nodes[stage.node]
    if node.kind == _core.NODE_LINEAR:
        axes = cut.of(ports.plans.operand_factors(stage.step, stage.node))
        if not axes:
            return {}
        return {number: jax.lax.pmax(held[number], axes) for number in stage.buffers}
    column = node.variant == _core.COLLECTIVE_COPY
    axes = cut.of(ports.plans.outside[0] if column else ports.plans.inside[-1])
    return {number: jax.lax.psum(held[number], axes) for number in stage.buffers}


def _together(ports: _Ports, cut: _Cut, made: PlanResults) -> tuple[Array, ...]:
    """What a device has of the results: parameters' gradients are summed, amaxes compared."""
    found = []
    arrays = (*made.outputs, *made.states, *made.saved)
    for at, (buffer, array) in enumerate(zip(ports.made, arrays, strict=True)):
        if buffer.role == "state":
            axes = cut.of([factor for factor, _ in cut.axes])
            found.append(jax.lax.pmax(array, axes) if axes else array)
            continue
        array = array.reshape(ports.shape(buffer))
        if cut.axes and ports.is_sum(buffer):
            array = _sum(array, cut.of(ports.batch), cut.scattered[at])
        found.append(array)
    return tuple(found)


def _sum(array: Array, axes: Axes, scattered: Sequence[tuple[int, Axes]]) -> Array:
    """The sum over axes of a mesh, of which a device keeps its part of some dims."""
    for dim, of in scattered:
        array = jax.lax.psum_scatter(array, of, scatter_dimension=dim, tiled=True)
        axes = tuple(axis for axis in axes if axis not in of)
    return jax.lax.psum(array, axes) if axes else array


# ---- the rule ------------------------------------------------------------------------------------


def _rule(direction: Direction, _: Any, given: Sequence, __: Sequence) -> SdyShardingRule:
    """Which dims go together."""
    ports = _ports_of(direction, [jax.ShapeDtypeStruct(a.shape, jnp.float32) for a in given])
    unknown = iter(range(10**6))

    def mapping(buffer: _core.Buffer) -> ArrayMapping:
        dims = ports.factors(buffer)
        if dims is None:
            count = len(buffer.shape)
            dims = tuple(f"u{next(unknown)}" for _ in range(count))
        return ArrayMapping(*dims)

    operands, results = (tuple(map(mapping, of)) for of in (ports.given, ports.made))
    known = {factor for array in (*operands, *results) for factor in array}
    whole = () if direction.backward else tuple(sorted(_never_cut(ports.plans) & known))
    return SdyShardingRule(operands, results, need_replication_factors=whole)


def _never_cut(plans: LayerPlans) -> set[str]:
    """Factors that no device has a part of."""
    found: set[str] = set()
    if plans.facts.layer.norm is not None:
        found |= set(plans.inside[0])
    if len(plans.facts.kernels) > 1:
        found |= {"m0", *plans.outside[-1]}
    return found


class _Seen:
    """Where the axes of a mesh lie in the arrays of a call, as XLA would have them."""

    def __init__(self, ports: _Ports, given: Sequence, made: Sequence) -> None:
        self.places: dict[str, set[tuple[str, str]]] = {}  # of each axis: (kind of array, factor)
        pairs = (*zip(ports.given, given, strict=True), *zip(ports.made, made, strict=True))
        for buffer, array in pairs:
            factors = ports.factors(buffer)
            if factors is None:
                continue
            kind = "parameter" if not any(f.startswith("b") for f in factors) else buffer.role
            for factor, axes in zip(factors, _spec(array), strict=True):
                for axis in axes:
                    self.places.setdefault(axis, set()).add((kind, factor))

    def factors(self, axis: str, *kinds: str) -> list[str]:
        """The factors that an axis cuts in arrays of these kinds; all kinds by default."""
        places = sorted(self.places[axis])
        return [factor for kind, factor in places if not kinds or kind in kinds]


def _spec(array: Any) -> list[Axes]:
    """Axes of each dim."""
    spec = tuple(array.sharding.spec) + (None,) * (len(array.shape) - len(array.sharding.spec))
    return [(axes,) if isinstance(axes, str) else tuple(axes or ()) for axes in spec]


def _choose(direction: Direction, ports: _Ports, seen: _Seen, axis: str) -> str | None:
    """The factor that an axis cuts."""
    plans, never = ports.plans, _never_cut(ports.plans)
    results = "input" if direction.backward else "output"  # what has the factors of the result
    rows = [f for f in seen.factors(axis, "input", "output") if f.startswith("b")]
    if axis in direction.data:
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


def _cut_of(direction: Direction, ports: _Ports, mesh: Any, seen: _Seen) -> _Cut:
    found: dict[str, Axes] = {}
    for axis in mesh.axis_names:
        if axis not in seen.places or mesh.shape[axis] == 1:
            continue
        factor = _choose(direction, ports, seen, axis)
        if factor is None:
            continue
        more = {**found, factor: (*found.get(factor, ()), axis)}
        if _fits(ports, _Cut(tuple(more.items()), tuple(mesh.shape.items()))):
            found = more
    return _Cut(tuple(sorted(found.items())), tuple(mesh.shape.items()))


def _fits(ports: _Ports, cut: _Cut) -> bool:
    """Return whether the parts are whole, and what products in FP8 multiply."""
    if any(ports.sizes[factor] % cut.parts((factor,)) for factor, _ in cut.axes):
        return False
    if not any(of.x.cast is not None for of in ports.plans.facts.layer.linears):
        return True
    facts = ports.plans.facts
    lengths = [ports.rows // cut.parts(ports.batch)] if cut.of(ports.batch) else []
    for kernel, part in zip(facts.kernels, cut.facts(facts).kernels, strict=True):
        pairs = zip(kernel.matrix, part.matrix, strict=True)
        lengths += [size for size_of_all, size in pairs if size != size_of_all]
    return all(length % _MULTIPLE == 0 for length in lengths)


def _partition(direction: Direction, mesh: Any, given: Sequence, made: Sequence) -> tuple:
    """What each device computes, and how arrays are spread for it."""
    ports = _ports_of(direction, given)
    if not isinstance(given[0].sharding, NamedSharding):
        raise NotImplementedError(
            "a layer over several devices: no mesh is known: call it within `jax.set_mesh(mesh)`"
        )
    cut = _cut_of(direction, ports, mesh, _Seen(ports, given, made))
    scattered = (_scattered(ports, cut, *pair) for pair in zip(ports.made, made, strict=True))
    cut = cut._replace(scattered=tuple(scattered))

    def shardings(buffers: Sequence, arrays: Sequence, more: Sequence) -> tuple:
        specs = (
            cut.spec(ports.factors(buffer), len(array.shape), axes)
            for buffer, array, axes in zip(buffers, arrays, more, strict=True)
        )
        return tuple(NamedSharding(mesh, spec) for spec in specs)

    run = functools.partial(_run, direction, cut)
    results = shardings(ports.made, made, cut.scattered)
    return mesh, run, results, shardings(ports.given, given, ((),) * len(given))


def _scattered(
    ports: _Ports, cut: _Cut, buffer: _core.Buffer, array: Any
) -> tuple[tuple[int, Axes], ...]:
    """Dims of a sum of which each device is to have a part, and the axes that cut them."""
    factors, found = ports.factors(buffer), []
    if not ports.is_sum(buffer) or factors is None:
        return ()
    over, sizes = cut.of(ports.batch), dict(cut.shape)
    for dim, (factor, axes) in enumerate(zip(factors, _spec(array), strict=True)):
        axes = tuple(axis for axis in axes if axis in over)
        parts = cut.parts((factor,)) * math.prod(sizes[axis] for axis in axes)
        if axes and ports.sizes[factor] % parts == 0:
            found.append((dim, axes))
    return tuple(found)


layer_p = make_primitive(Primitive("te_layer"))


@layer_p.def_abstract_eval
def _results(*given: Any, direction: Direction) -> list:
    ports = _ports_of(direction, given)
    found = []
    for buffer in ports.made:
        scales = [a for a, of in zip(given, ports.given, strict=True) if of.link == "scale"]
        shape = (1, *scales[0].shape) if buffer.link == "history" else ports.shape(buffer)
        found.append(result_of(given, shape, dtype_of(buffer.dtype)))
    return found


mlir.register_lowering(
    layer_p,
    mlir.lower_fun(
        lambda *arrays, direction: _run(direction, _Cut(), *arrays), multiple_results=True
    ),
)


@functools.partial(custom_partitioning, static_argnums=(0,))
def _over_mesh(direction: Direction, *arrays: Array) -> tuple[Array, ...]:
    return tuple(layer_p.bind(*arrays, direction=direction))


_over_mesh.def_partition(partition=_partition, sharding_rule=_rule)


def call_layer(direction: Direction, arrays: Sequence[Array]) -> PlanResults:
    """Run a call of a layer.

    `arrays` are what its plan is given, in plan order, with dims as the layer has them; of state
    the scales alone, fp32 [slots]. The row of amaxes comes back as the one state.
    """
    register()
    arrays = made_alike(arrays)
    if is_spread():
        made = sequential_vmap(functools.partial(_over_mesh, direction))(*arrays)
    else:
        made = layer_p.bind(*arrays, direction=direction)
    buffers = _ports_of(direction, arrays).made
    roles = [(array, of.role) for array, of in zip(made, buffers, strict=True)]
    return PlanResults(*([a for a, of in roles if of == role] for role in RESULTS))
