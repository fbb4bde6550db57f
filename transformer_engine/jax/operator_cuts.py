# SPDX-License-Identifier: Apache-2.0
"""Operators by themselves over a mesh: each device computes its rows, or its heads.

XLA can not cut a custom call. So a function that calls an operator says of its arrays which dims
are computed apart from each other, by labels; what is a sum, or a maximum, over such dims is joined
by a collective. All other dims each device has whole.
"""

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
from jax import Array
from jax.custom_batching import sequential_vmap
from jax.experimental.custom_partitioning import (
    ArrayMapping,
    CompoundFactor,
    SdyShardingRule,
    custom_partitioning,
)
from jax.sharding import NamedSharding, PartitionSpec

from transformer_engine.jax.definitions import is_spread
from transformer_engine.jax.sharding import Axes, axes_of

_JOINS = {"sum": jax.lax.psum, "max": jax.lax.pmax}

Labels = tuple[str | None, ...]
"""Of the leading dims of an array: those of one label are cut alike; None, and behind: whole."""


class Result(NamedTuple):
    """A result."""

    labels: Labels
    join: str | None = None  # "sum", "max": it is that over the labels that it has not


class Cut(NamedTuple):
    """How a function is cut; static. Of its arguments and results, or of all arrays of them."""

    given: tuple[Labels, ...]
    made: tuple[Result, ...]


def rows(count: int) -> Labels:
    """Labels of so many leading dims that are rows."""
    return tuple(f"row{n}" for n in range(count))


def over_devices(function: Callable[..., tuple], cut: Cut, *given: Any) -> tuple:
    """Call a function, over a mesh in parts.

    Parameters
    ----------
    function : callable
        Of trees of arrays, for any sizes of the dims that have labels; it returns a tuple of such.
        Dims of one label have one size, or sizes that divide each other.
    cut : Cut
        Of its arguments and results, of which all arrays of one have the same labels.
    given
        The arguments.

    Over a mesh whose axes XLA spreads arrays along, each device calls `function` on its parts. On
    one device that is `function`.
    """
    if not is_spread():
        return function(*given)
    arrays, tree = jax.tree.flatten(given)
    made = jax.tree.structure(jax.eval_shape(function, *given))

    def run(*arrays: Array) -> tuple[Array, ...]:
        return tuple(jax.tree.leaves(function(*tree.unflatten(arrays))))

    each = Cut(_of_arrays(cut.given, tree), _of_arrays(cut.made, made))
    found = sequential_vmap(functools.partial(_over_mesh, run, each))(*arrays)
    return made.unflatten(found)


def _of_arrays(said: tuple, tree: Any) -> tuple:
    """What is said of each child of a tree, for each of its arrays."""
    pairs = zip(said, tree.children(), strict=True)
    return tuple(of for of, child in pairs for _ in range(child.num_leaves))


@functools.partial(custom_partitioning, static_argnums=(0, 1))
def _over_mesh(function: Callable, cut: Cut, *arrays: Array) -> tuple[Array, ...]:
    del cut
    return function(*arrays)


def _labelled(labels: Sequence[Labels], arrays: Sequence) -> Iterator[tuple[str, int, int, Any]]:
    """Each dim with a label: (label, size, number of the dim, array)."""
    for of, array in zip(labels, arrays, strict=True):
        for dim, label in enumerate(of):
            if label is not None:
                yield label, array.shape[dim], dim, array


def _rule(_: Callable, cut: Cut, __: Any, given: Sequence, made: Sequence) -> SdyShardingRule:
    """Dims of a label go together, in groups where sizes differ; each other one is whole."""
    labels = [*cut.given, *(of.labels for of in cut.made)]
    sizes: dict[str, set[int]] = {}
    for label, size, *_ in _labelled(labels, [*given, *made]):
        sizes.setdefault(label, set()).add(size)
    whole: list[str] = []
    factors: dict[str, int] = {}

    def factor(label: str | None, size: int) -> str | CompoundFactor:
        if label is None:
            whole.append(f"whole{len(whole)}")
            return whole[-1]
        least = min(sizes[label])
        if size == least:
            return label
        more = f"{label}_{size}"
        factors[more] = size // least
        return CompoundFactor(label, more)

    def mapping(of: Labels, array: Any) -> ArrayMapping:
        full = (*of, *(None,) * (len(array.shape) - len(of)))
        return ArrayMapping(*map(factor, full, array.shape))

    mappings = list(map(mapping, labels, [*given, *made]))
    count = len(given)
    return SdyShardingRule(
        tuple(mappings[:count]),
        tuple(mappings[count:]),
        need_replication_factors=tuple(whole),
        **factors,
    )


def _partition(function: Callable, cut: Cut, mesh: Any, given: Sequence, made: Sequence) -> tuple:
    """What each device computes, and how arrays are spread for it."""
    axes = _axes(cut, mesh, given)

    def sharding(labels: Labels) -> NamedSharding:
        return NamedSharding(mesh, PartitionSpec(*(axes.get(label) or None for label in labels)))

    def joined(array: Array, of: Result) -> Array:
        over = tuple(a for label, each in axes.items() if label not in of.labels for a in each)
        return _JOINS[of.join](array, over) if of.join and over else array

    def run(*arrays: Array) -> tuple[Array, ...]:
        return tuple(map(joined, function(*arrays), cut.made))

    results = tuple(sharding(of.labels) for of in cut.made)
    del made
    return mesh, run, results, tuple(map(sharding, cut.given))


def _axes(cut: Cut, mesh: Any, given: Sequence) -> dict[str, Axes]:
    """Axes of each label: of the first argument that is cut there, if they divide all sizes."""
    found: dict[str, Axes] = {}
    for label, _, dim, array in _labelled(cut.given, given):
        axes = axes_of(array)[dim]
        taken = {axis for of in found.values() for axis in of}
        parts = math.prod(mesh.shape[axis] for axis in axes)
        sizes = [size for name, size, *_ in _labelled(cut.given, given) if name == label]
        if axes and label not in found and not taken & set(axes):
            if all(size % parts == 0 for size in sizes):
                found[label] = axes
    return found


_over_mesh.def_partition(partition=_partition, sharding_rule=_rule)
