# SPDX-License-Identifier: Apache-2.0
"""Names of axes: which axis of the mesh a dim of a tensor is spread over.

XLA divides what this package computes among devices, and inserts the collectives; constraints say
which way is wanted, and results are the same without them.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
from jax import Array
from jax.sharding import PartitionSpec

BATCH_AXES = "nvte_batch"
SEQLEN_AXES = "nvte_seqlen"
SEQLEN_TP_AXES = "nvte_seqlen_tp"
SEQLEN_CP_AXES = "nvte_seqlen_cp"
HEAD_AXES = "nvte_head"
HIDDEN_AXES = "nvte_hidden"
HIDDEN_TP_AXES = "nvte_hidden_tp"
JOINED_AXES = "nvte_joined"
W_NO_SHARD_AXES = "nvte_w_no_shard"
W_FSDP_AXES = "nvte_w_fsdp"
W_TP_AXES = "nvte_w_tp"
W_JOINED_AXES = "nvte_w_joined"

Axes = tuple[str, ...]
"""Axes of a mesh."""


@dataclass(frozen=True)
class MeshResource:
    """Names of the axes of a mesh, by what they are for; None: there is none.

    Attributes
    ----------
    dp_resource, fsdp_resource : str or None
        Data parallel: batches are spread; with the second weights are too.
    tp_resource, tpsp_resource : str or None
        Tensor parallel; with the second activations between layers are spread along their
        sequence. Not both may have more than one device.
    pp_resource, cp_resource, ep_resource : str or None
        Pipeline, context and expert parallel.
    """

    dp_resource: str | None = None
    tp_resource: str | None = None
    tpsp_resource: str | None = None
    fsdp_resource: str | None = None
    pp_resource: str | None = None
    cp_resource: str | None = None
    ep_resource: str | None = None


class _InForce:
    """What the innermost `global_shard_guard` says."""

    resource: MeshResource | None = None


def global_mesh_resource() -> MeshResource:
    """Return the names in force; none where there is no guard.

    ValueError where a mesh of several devices has been set and no names were.
    """
    if _InForce.resource is None:
        mesh = jax.sharding.get_abstract_mesh()
        if not mesh.empty and mesh.size > 1:
            raise ValueError(
                f"a mesh with axes {mesh.axis_names} is set, and nothing says what they are for: "
                "pass autocast(mesh_resource=MeshResource(...))"
            )
        return MeshResource()
    return _InForce.resource


class AxesInForce(NamedTuple):
    """What a layer has to know of the names in force; static."""

    data: tuple[str, ...]  # axes along which batches alone are spread, and weights to save memory
    sequence: bool  # tensor parallel layers spread sequences at their ends


def axes_in_force() -> AxesInForce:
    """Return what the names in force say; where there are none, that nothing is said."""
    names = _InForce.resource or MeshResource()
    data = (names.dp_resource, names.fsdp_resource)
    found = tuple(axis for axis in data if axis is not None)
    return AxesInForce(found, names.tpsp_resource is not None)


@contextmanager
def global_shard_guard(resource: MeshResource) -> Iterator[None]:
    """Put names in force in the block."""
    before, _InForce.resource = _InForce.resource, resource
    try:
        yield
    finally:
        _InForce.resource = before


def get_mesh_axis_size(axis: str | None, mesh: jax.sharding.Mesh | None = None) -> int:
    """Return the devices along an axis of a mesh, by default of the one in force; 1 for None."""
    if axis is None:
        return 1
    shape = (mesh or jax.sharding.get_abstract_mesh()).shape
    if axis not in shape:
        raise ValueError(f"the mesh has the axes {tuple(shape)}, and none is {axis!r}")
    return shape[axis]


def get_sharding_map_logic_axis_to_mesh_axis() -> dict[str, str | None]:
    """Return the axis of the mesh by the name of an axis of a tensor, for the names in force.

    ValueError where both kinds of tensor parallelism have more than one device.
    """
    names = global_mesh_resource()
    sizes = {
        name: get_mesh_axis_size(name) if name in jax.sharding.get_abstract_mesh().shape else 1
        for name in (names.tp_resource, names.tpsp_resource, names.fsdp_resource)
    }
    if sizes[names.tp_resource] > 1 and sizes[names.tpsp_resource] > 1:
        raise ValueError(
            f"{names}: tp_resource and tpsp_resource both have more than one device; let one of "
            "them be None"
        )
    is_fsdp, is_tpsp = (sizes[n] > 1 for n in (names.fsdp_resource, names.tpsp_resource))
    tensor = names.tpsp_resource if is_tpsp else names.tp_resource
    return {
        BATCH_AXES: names.fsdp_resource if is_fsdp else names.dp_resource,
        SEQLEN_AXES: None,
        SEQLEN_TP_AXES: names.tpsp_resource,
        SEQLEN_CP_AXES: names.cp_resource,
        HEAD_AXES: tensor,
        HIDDEN_AXES: None,
        HIDDEN_TP_AXES: tensor,
        JOINED_AXES: None,
        W_NO_SHARD_AXES: None,
        W_FSDP_AXES: names.fsdp_resource,
        W_TP_AXES: tensor,
        W_JOINED_AXES: None,
    }


def attention_axes() -> tuple[str | None, str | None, str | None]:
    """Return the axes of the mesh for batches, sequences and heads of attention.

    None where there is none, and for all three where no names are in force.
    """
    if _InForce.resource is None:
        return None, None, None
    found = get_sharding_map_logic_axis_to_mesh_axis()
    return found[BATCH_AXES], found[SEQLEN_CP_AXES], found[HEAD_AXES]


def _rules() -> dict[str, str | tuple[str, ...] | None]:
    """Axes of the mesh by names of axes: those of Flax where a program has set them, and ours."""
    from flax.linen import get_logical_axis_rules

    found = dict(get_sharding_map_logic_axis_to_mesh_axis())
    of_flax: dict[str, str | tuple[str, ...] | None] = {}
    for name, axis in get_logical_axis_rules():
        of_flax.setdefault(name, axis)
    return found | of_flax


def generate_pspec(logical_axis_names: Sequence[str | None]) -> PartitionSpec:
    """Return the partition of a tensor whose dims have these names; a name without a rule: None.

    An axis of the mesh that an earlier dim takes is not given to a later one.
    """
    rules, taken, made = _rules(), set(), []
    for name in logical_axis_names:
        axes = rules.get(name) if name else None
        axes = (axes,) if isinstance(axes, str) else axes or ()
        left = tuple(axis for axis in axes if axis not in taken)
        taken.update(left)
        made.append(left[0] if len(left) == 1 else left or None)
    return PartitionSpec(*made)


def with_sharding_constraint(x: Array, pspec: PartitionSpec) -> Array:
    """Ask for a partition of a tensor on the mesh that is set; without one the tensor itself.

    Axes that are manual, in `jax.shard_map`, are left out, and so are explicit ones, which are part
    of the types of the program's arrays, and those that the mesh lacks.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return x
    usable = frozenset(mesh.auto_axes)
    made = []
    for axes in pspec:
        axes = (axes,) if isinstance(axes, str) else axes or ()
        left = tuple(axis for axis in axes if axis in usable)
        made.append(left or None)
    if not any(made):
        return x
    return jax.lax.with_sharding_constraint(x, PartitionSpec(*made))


def with_sharding_constraint_by_logical_axes(
    x: Array, logical_axis_names: Sequence[str | None] | None
) -> Array:
    """Ask for a partition of a tensor by the names of its dims; None or (): the tensor itself.

    ValueError for another number of names than dims.
    """
    if not logical_axis_names:
        return x
    if len(logical_axis_names) != x.ndim:
        raise ValueError(f"{x.ndim} dims have the names {tuple(logical_axis_names)}")
    return with_sharding_constraint(x, generate_pspec(logical_axis_names))


def axes_of(array: Any) -> list[Axes]:
    """Axes of each dim of an array that has a `NamedSharding`."""
    spec = tuple(array.sharding.spec) + (None,) * (len(array.shape) - len(array.sharding.spec))
    return [(axes,) if isinstance(axes, str) else tuple(axes or ()) for axes in spec]
