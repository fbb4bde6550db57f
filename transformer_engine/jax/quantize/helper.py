# SPDX-License-Identifier: Apache-2.0
"""The recipe in force, and what helps with the state of delayed scaling.

Recipe and mesh are those of the process, as functions of JAX may be traced by any thread.
"""

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from transformer_engine.common import recipe as recipes
from transformer_engine.jax.definitions.scaling_modes import ScalingMode
from transformer_engine.jax.quantize.recipes import QuantizeConfig, format_dtypes
from transformer_engine.jax.sharding import MeshResource, global_shard_guard

NVTE_FP8_COLLECTION_NAME = "fp8_metas"
"""Collection of a Flax module that has scales and histories."""

_RECIPES = (
    recipes.DelayedScaling,
    recipes.Float8CurrentScaling,
    recipes.Float8BlockScaling,
    recipes.Float8RowScaling,
    recipes.MXFP8BlockScaling,
    recipes.NVFP4BlockScaling,
)
_MODES = tuple(
    mode for mode in ScalingMode if mode is not ScalingMode.NO_SCALING and not mode.is_nvfp4_scaling
)


class _InForce:
    """What the innermost `autocast` says."""

    recipe: recipes.Recipe | None = None


def get_global_quantize_recipe() -> recipes.Recipe | None:
    """Return the recipe in force; None outside of an enabled `autocast`."""
    return _InForce.recipe


def get_quantize_config_with_recipe(fp8_recipe: recipes.Recipe | None) -> QuantizeConfig:
    """Return what a recipe means for the operands of a layer.

    NotImplementedError where it asks for what JAX does not have.
    """
    return QuantizeConfig(fp8_recipe)


def get_quantize_config() -> QuantizeConfig:
    """Return what the recipe in force means for the operands of a layer."""
    return QuantizeConfig(_InForce.recipe)


@contextmanager
def autocast(
    enabled: bool = False,
    recipe: recipes.Recipe | None = None,
    mesh_resource: MeshResource | None = None,
) -> Iterator[None]:
    """Give a recipe to what is traced in the block: ``init``, ``apply`` and the backward.

    Parameters
    ----------
    enabled : bool
        Whether operands are cast; without it they stay in high precision.
    recipe : Recipe, optional
        By default ``DelayedScaling()``.
    mesh_resource : MeshResource, optional
        Names of the axes of the mesh; by default those in force.

    Raises
    ------
    NotImplementedError
        The recipe asks for what JAX does not have.
    """
    chosen = None
    if enabled:
        chosen = recipe or recipes.DelayedScaling()
        QuantizeConfig(chosen)
    before, _InForce.recipe = _InForce.recipe, chosen
    try:
        if mesh_resource is None:
            yield
        else:
            with global_shard_guard(mesh_resource):
                yield
    finally:
        _InForce.recipe = before


@contextmanager
def fp8_autocast(
    enabled: bool = False,
    fp8_recipe: recipes.Recipe | None = None,
    mesh_resource: MeshResource | None = None,
) -> Iterator[None]:
    """Do what `autocast` does, under its older name."""
    warnings.warn(
        "fp8_autocast is the older name of autocast(enabled, recipe, mesh_resource)",
        DeprecationWarning,
        stacklevel=3,
    )
    with autocast(enabled, fp8_recipe, mesh_resource):
        yield


def update_collections(new: Mapping, original: Mapping) -> Mapping:
    """Merge collections of variables, by their names at the top; those of `new` win.

    Returns a dict, or a FrozenDict where `original` is one.
    """
    return type(original)({**original, **new})


def is_fp8_available(
    scaling_mode: ScalingMode = ScalingMode.DELAYED_TENSOR_SCALING, gpu_id: int | None = None
) -> tuple[bool, str]:
    """Return whether casts of a mode are there, on every device, and the reason if not."""
    del gpu_id
    return is_scaling_mode_supported(scaling_mode)


def is_scaling_mode_supported(scaling_mode: ScalingMode) -> tuple[bool, str]:
    """Return whether quantizers of a mode cast by themselves, and the reason if not."""
    if scaling_mode in _MODES or scaling_mode is ScalingMode.NO_SCALING:
        return True, ""
    return False, f"{scaling_mode}: casts are those within custom calls of dense layers"


def get_supported_scaling_modes() -> list[ScalingMode]:
    """Return the modes whose quantizers cast by themselves."""
    return list(_MODES)


def get_supported_quantization_recipes() -> list[recipes.Recipe]:
    """Return a recipe of each class that JAX takes, with its defaults."""
    return [recipe() for recipe in _RECIPES]


def _format2dtypes(fp8_format: recipes.Format) -> tuple[Any, Any]:
    """Element types of forward and backward, under the name that programs import."""
    return format_dtypes(fp8_format)
