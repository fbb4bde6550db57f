# SPDX-License-Identifier: Apache-2.0
"""Functions of independent rows over a mesh: each device computes its rows.

For operators by themselves (norms, activations, softmaxes), which XLA can not cut. What is a sum,
or a maximum, over rows is joined by a collective.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax import Array
from jax.custom_batching import sequential_vmap
from jax.experimental.custom_partitioning import (
    ArrayMapping,
    SdyShardingRule,
    custom_partitioning,
)
from jax.sharding import NamedSharding, PartitionSpec

from transformer_engine.jax.definitions import is_spread
from transformer_engine.jax.layer_cuts import Axes, axes_of

_JOINS = {"sum": jax.lax.psum, "max": jax.lax.pmax}


class Rows(NamedTuple):
    """Which dims of arrays are rows; static."""

    given: tuple[int, ...]  # how many leading dims of each argument; 0: it is whole
    made: tuple[int | str, ...]  # of each result; "sum", "max": it is that over rows


def by_rows(function: Callable[..., tuple], rows: Rows) -> Callable[..., tuple]:
    """Return a function of arrays that computes the same, over a mesh by rows.

    Parameters
    ----------
    function : callable
        Of arrays, for any number of rows; it returns a tuple of arrays. The first leading dims of
        all arrays that have some are alike.
    rows : Rows
        Of its arguments and results.

    Over a mesh whose axes XLA spreads arrays along, each device calls `function` on the rows that
    it has; all else, dims behind the rows too, it has whole. On one device that is `function`.
    """
    if not is_spread():
        return function
    return sequential_vmap(functools.partial(_over_mesh, function, rows))


@functools.partial(custom_partitioning, static_argnums=(0, 1))
def _over_mesh(function: Callable, rows: Rows, *arrays: Array) -> tuple[Array, ...]:
    del rows
    return function(*arrays)


def _counts(of: Sequence[int | str]) -> list[int]:
    """How many dims are rows."""
    return [0 if isinstance(each, str) else each for each in of]


def _rule(_: Callable, rows: Rows, __: Any, given: Sequence, made: Sequence) -> SdyShardingRule:
    """Rows go together; each other dim is by itself, and whole."""
    others: list[str] = []

    def mapping(count: int, array: Any) -> ArrayMapping:
        whole = [f"u{len(others) + n}" for n in range(len(array.shape) - count)]
        others.extend(whole)
        return ArrayMapping(*(f"b{n}" for n in range(count)), *whole)

    operands = tuple(map(mapping, rows.given, given))
    results = tuple(map(mapping, _counts(rows.made), made))
    return SdyShardingRule(operands, results, need_replication_factors=tuple(others))


def _partition(function: Callable, rows: Rows, mesh: Any, given: Sequence, made: Sequence) -> tuple:
    """What each device computes, and how arrays are spread for it."""
    cuts = _cuts(rows, mesh, given)

    def sharding(count: int, array: Any) -> NamedSharding:
        whole = (None,) * (len(array.shape) - count)
        return NamedSharding(mesh, PartitionSpec(*(of or None for of in cuts[:count]), *whole))

    def run(*arrays: Array) -> tuple[Array, ...]:
        axes = tuple(axis for of in cuts for axis in of)
        found = function(*arrays)
        pairs = zip(found, rows.made, strict=True)
        return tuple(_JOINS[of](a, axes) if of in _JOINS and axes else a for a, of in pairs)

    results = tuple(map(sharding, _counts(rows.made), made))
    return mesh, run, results, tuple(map(sharding, rows.given, given))


def _cuts(rows: Rows, mesh: Any, given: Sequence) -> list[Axes]:
    """Axes of each dim of rows, by the first argument that is cut there."""
    found: list[Axes] = [()] * max(rows.given)
    for count, array in zip(rows.given, given, strict=True):
        for dim, axes in enumerate(axes_of(array)[:count]):
            taken = {axis for of in found for axis in of}
            fits = array.shape[dim] % math.prod(mesh.shape[axis] for axis in axes) == 0
            if fits and not found[dim] and not taken & set(axes):
                found[dim] = axes
    return found


_over_mesh.def_partition(partition=_partition, sharding_rule=_rule)
