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
from jax.sharding import NamedSharding

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
)
from transformer_engine.jax.definitions import is_spread
from transformer_engine.jax.layer_cuts import (
    Cut,
    Direction,
    Ports,
    cut_of,
    listed,
    never_cut,
    ports_of,
)
from transformer_engine.jax.layer_plans import Dims, Facts, LayerPlans, Side, layer_plans
from transformer_engine.jax.sharding import Axes

# ---- what a device runs --------------------------------------------------------------------------


class _Own(NamedTuple):
    """What one device runs of a call."""

    ports: Ports  # of the whole call
    cut: Cut
    facts: Facts
    plans: LayerPlans
    plan: Plan

    @property
    def rows(self) -> int:
        """Rows of one rank, as the plan counts them."""
        ranks = self.facts.ranks
        parts = max(ranks.before * ranks.gathers, ranks.behind * ranks.scatters, 1)
        return self.ports.rows // self.cut.parts(self.ports.batch) // parts

    def flat(self, buffer: _core.Buffer) -> list[int]:
        """Shape of a buffer in the plan."""
        return shape_of(buffer, (None, None), [0, self.rows])


def _run(direction: Direction, cut: Cut, *arrays: Array) -> tuple[Array, ...]:
    """Run a call on what a device has of its arrays."""
    facts = cut.facts(direction.facts)
    plan = direction._replace(facts=facts).plan
    own = _Own(ports_of(direction, arrays, cut), cut, facts, layer_plans(facts), plan)
    given, saved = [], []
    triples = zip(own.ports.given, listed(plan)[0], arrays, strict=True)
    for whole, buffer, array in triples:
        if (buffer.link, buffer.of) == own.plans.added:
            array = _as_product_adds(array, facts)
        if buffer.link == "scale":
            given += [array, jnp.zeros((1, array.shape[0]), jnp.float32)]
        elif buffer.role == "saved":
            saved.append(_turned(whole, buffer, array.reshape(_matrix(own, whole))))
        elif buffer.dtype == _core.DTYPE_I64:  # a random pair
            given.append(array)
        else:
            given.append(array.reshape(own.flat(buffer)))
    made = call_plan(plan, given, saved, outside=functools.partial(_outside, own))
    return _together(own, made)


def _as_product_adds(bias: Array, facts: Facts) -> Array:
    """A bias that is added behind a sum, as a product in FP8 would add it: of 16 bits."""
    if facts.layer.linears[-1].x.cast is None:
        return bias
    short = jnp.float16 if dtype_of(facts.dtype) == jnp.float16 else jnp.bfloat16
    return bias.astype(short).astype(bias.dtype)


def _matrix(own: _Own, buffer: _core.Buffer) -> tuple[int, ...]:
    """Shape of what a device has of a buffer, as the plan of the whole layer has its dims."""
    dims = own.ports.dims(buffer)
    if dims is None or len(buffer.shape) < 2:
        return (-1,) if dims is not None else tuple(own.flat(buffer))
    lengths, batch = own.cut.lengths(own.ports, dims), len(own.ports.batch)
    first = batch if buffer.shape[0].symbol == _core.SYMBOL_ROWS else len(lengths) - batch
    if not own.ports.has_rows(buffer):
        return tuple(own.flat(buffer))
    return math.prod(lengths[:first]), math.prod(lengths[first:])


def _turned(of: _core.Buffer, wanted: _core.Buffer, matrix: Array) -> Array:
    """A saved form as the other plan has it: rows of one rank are saved row-wise."""
    return matrix if of.link == wanted.link else matrix.T


def _outside(own: _Own, stage: _core.Stage, held: dict[int, Array]) -> dict:
    """A collective of the plan."""
    cut, node = own.cut, own.plan.graph.nodes[stage.node]
    if node.kind == _core.NODE_LINEAR:
        axes = cut.of(*own.plans.measured(stage, own.ports.batch))
        return {n: jax.lax.pmax(held[n], axes) for n in stage.buffers} if axes else {}
    forward = stage.step == _FORWARD
    if node.variant == _core.COLLECTIVE_GATHER:
        return (_gather if forward else _scatter)(own, Side.INPUT, stage.buffers, held)
    if node.variant == _core.COLLECTIVE_REDUCE_SCATTER:
        return (_scatter if forward else _gather)(own, Side.OUTPUT, stage.buffers, held)
    column = node.variant == _core.COLLECTIVE_COPY
    axes = cut.of(own.plans.outside[0] if column else own.plans.inside[-1])
    return {number: jax.lax.psum(held[number], axes) for number in stage.buffers}


_FORWARD = 0  # step of a collective


def _with_rows(own: _Own, array: Array, side: Side) -> Array:
    """A matrix with a dim for each factor of its rows."""
    rows = own.cut.lengths(own.ports, Dims(own.ports.batch, side))
    return array.reshape(*rows, *array.shape[1:])


def _gather(own: _Own, side: Side, buffers: Sequence[int], held: dict[int, Array]) -> dict:
    """Of pairs (part, whole): the rows of all devices."""
    factor, axes = own.cut.at(side)
    made = {}
    for part, whole in zip(buffers[::2], buffers[1::2], strict=True):
        array = held[part]
        short = array.dtype.itemsize == 1
        sent = jax.lax.bitcast_convert_type(array, jnp.uint8) if short else array
        rows = _with_rows(own, sent, side)
        rows = jax.lax.all_gather(rows, axes, axis=own.ports.batch.index(factor), tiled=True)
        rows = rows.reshape(-1, *array.shape[1:])
        made[whole] = jax.lax.bitcast_convert_type(rows, array.dtype) if short else rows
    return made


def _scatter(own: _Own, side: Side, buffers: Sequence[int], held: dict[int, Array]) -> dict:
    """Of (whole, part): the rows that a device has of the sum."""
    factor, axes = own.cut.at(side)
    whole, part = buffers
    dim, rows = own.ports.batch.index(factor), _with_rows(own, held[whole], Side.INNER)
    rows = jax.lax.psum_scatter(rows, axes, scatter_dimension=dim, tiled=True)
    return {part: rows.reshape(-1, *held[whole].shape[1:])}


def _together(own: _Own, made: PlanResults) -> tuple[Array, ...]:
    """What a device has of the results: parameters' gradients are summed, amaxes compared."""
    ports, cut, found = own.ports, own.cut, []
    arrays = (*made.outputs, *made.states, *made.saved)
    triples = zip(ports.made, listed(own.plan)[1], arrays, strict=True)
    for at, (whole, buffer, array) in enumerate(triples):
        dims = ports.dims(whole)
        if buffer.role == "state" and cut.axes:
            array = jax.lax.pmax(array, cut.all_axes())
        if dims is not None:
            array = _turned(whole, buffer, array).reshape(cut.lengths(ports, dims))
        if cut.axes and ports.is_sum(whole) and dims is not None:
            array = _sum(array, cut.of(ports.batch, dims.side), cut.scattered[at])
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
    ports = ports_of(direction, given)
    unknown = iter(range(10**6))

    def name(factor: str, side: Side) -> str:
        apart = direction.names.sequence and factor in ports.batch[1:] and side is not Side.INPUT
        return f"{factor}_{side.value}" if apart else factor

    def mapping(buffer: _core.Buffer) -> ArrayMapping:
        dims = ports.dims(buffer)
        if dims is None:
            return ArrayMapping(*(f"u{next(unknown)}" for _ in buffer.shape))
        return ArrayMapping(*(name(factor, dims.side) for factor in dims.factors))

    operands, results = (tuple(map(mapping, of)) for of in (ports.given, ports.made))
    known = {factor for array in (*operands, *results) for factor in array}
    whole = () if direction.backward else tuple(sorted(never_cut(ports.plans) & known))
    return SdyShardingRule(operands, results, need_replication_factors=whole)


def _partition(direction: Direction, mesh: Any, given: Sequence, made: Sequence) -> tuple:
    """What each device computes, and how arrays are spread for it."""
    if not isinstance(given[0].sharding, NamedSharding):
        raise NotImplementedError(
            "a layer over several devices: no mesh is known: call it within `jax.set_mesh(mesh)`"
        )
    cut, ports = cut_of(direction, mesh, given, made), ports_of(direction, given)

    def shardings(buffers: Sequence, arrays: Sequence, more: Sequence) -> tuple:
        specs = (
            cut.spec(ports.dims(buffer), len(array.shape), axes)
            for buffer, array, axes in zip(buffers, arrays, more, strict=True)
        )
        return tuple(NamedSharding(mesh, spec) for spec in specs)

    results = shardings(ports.made, made, cut.scattered)
    operands = shardings(ports.given, given, ((),) * len(given))
    return mesh, functools.partial(_run, direction, cut), results, operands


layer_p = make_primitive(Primitive("te_layer"))


@layer_p.def_abstract_eval
def _results(*given: Any, direction: Direction) -> list:
    ports = ports_of(direction, given)
    found = []
    for buffer in ports.made:
        dims, shape = ports.dims(buffer), shape_of(buffer, (None, None), [0, ports.rows])
        if buffer.link == "history":
            scales = [a for a, of in zip(given, ports.given, strict=True) if of.link == "scale"]
            shape = (1, *scales[0].shape)
        elif dims is not None:
            shape = Cut().lengths(ports, dims)
        found.append(result_of(given, shape, dtype_of(buffer.dtype)))
    return found


mlir.register_lowering(
    layer_p,
    mlir.lower_fun(
        lambda *arrays, direction: _run(direction, Cut(), *arrays), multiple_results=True
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
    buffers = ports_of(direction, arrays).made
    roles = [(array, of.role) for array, of in zip(made, buffers, strict=True)]
    return PlanResults(*([a for a, of in roles if of == role] for role in RESULTS))
