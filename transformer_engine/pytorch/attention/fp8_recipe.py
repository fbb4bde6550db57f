# SPDX-License-Identifier: Apache-2.0
"""The recipe of attention: that of its region, or another one that the environment names.

What is made here is attention's own: a region's recipe stays as it is, and scaling state of a
recipe of attention's own is updated with that of the region.
"""

import functools
from typing import Any

from transformer_engine.common.config import AttentionRecipe, attention_recipe
from transformer_engine.common.recipe import (
    DelayedScaling,
    Float8CurrentScaling,
    Format,
    MXFP8BlockScaling,
    Recipe,
)
from transformer_engine.pytorch.module.custom import remembered
from transformer_engine.pytorch.torchside.modes import constant_in_graphs

__all__ = ["asks_for_it", "hands_over", "recipe_of", "unbuilt_name"]

BUILT = (DelayedScaling, Float8CurrentScaling)
"""Recipes that attention runs by: those with one scale of a whole tensor."""

_KINDS = {kind.__name__: kind for kind in (*BUILT, MXFP8BlockScaling)}
_OWN: dict[str, Recipe | None] = {}
"""Recipes of attention's own, by what they print: a graph can read one, but not make one."""


def asks_for_it(recipe: Any) -> bool:
    """Whether a region of a recipe asks for attention in FP8."""
    return recipe is not None and bool(
        getattr(recipe, "fp8_dpa", False) or getattr(recipe, "fp8_mha", False)
    )


def recipe_of(recipe: Any, module: Any) -> Any:
    """The recipe that an attention runs by in a region of `recipe`; None: in high precision.

    A `CustomRecipe` is asked for the quantizers of the module (`fp8_custom.py`).
    ``TE_DPA_FP8_RECIPE`` changes the recipe of those regions that attend in FP8: "F16" to none,
    another name to a recipe with the region's ``fp8_dpa``, ``fp8_mha`` and format (that of
    ``TE_DPA_FP8_FORMAT`` under NVFP4). Delayed scaling then has the history of
    ``TE_DPA_FP8DS_AMAX_HISTLEN`` and its siblings.
    """
    if not asks_for_it(recipe):
        return None
    format_name = "" if recipe.nvfp4() else recipe.fp8_format.name
    own = _own(type(recipe).__name__, format_name, recipe.fp8_dpa, recipe.fp8_mha)
    if own:
        return _OWN[own]
    return _of_quantizers(recipe, module) if recipe.custom() else recipe


def _of_quantizers(recipe: Any, module: Any) -> Any:
    from transformer_engine.pytorch.attention import fp8_custom

    kind = type(module).__name__
    return remembered(module, recipe, lambda: fp8_custom.resolve(recipe, kind, module.name))


def unbuilt_name(recipe: Recipe | None) -> str:
    """Name of a recipe of `recipe_of` that attention has no kernels for; else ""."""
    return "" if recipe is None or isinstance(recipe, BUILT) else type(recipe).__name__


@constant_in_graphs
def hands_over(mha: bool) -> bool:
    """Whether layers hand tensors over in FP8 under a recipe with this ``fp8_mha``.

    A constant in graphs, as `recipe_of` is: ``TE_DPA_FP8_RECIPE_MHA`` says so for attention that
    has a recipe of its own.
    """
    environment = attention_recipe()
    return environment.fp8_mha if environment.name else mha


@constant_in_graphs
def _own(kind: str, format_name: str, dpa: bool, mha: bool) -> str:
    """Key of the recipe in `_OWN`; "": it is the region's, a `kind` with this format.

    A constant in graphs: what the environment said when they were traced.
    """
    environment = attention_recipe()
    if environment.name in ("", kind):
        return ""
    if environment.name == "F16":
        _OWN["F16"] = None
        return "F16"
    return _made(environment, format_name or environment.format, dpa, mha)


@functools.lru_cache(maxsize=64)
def _made(environment: AttentionRecipe, format_name: str, dpa: bool, mha: bool) -> str:
    options: dict[str, Any] = {"fp8_format": Format[format_name], "fp8_dpa": dpa, "fp8_mha": mha}
    if environment.name == "DelayedScaling":
        options["amax_compute_algo"] = environment.amax_compute_algo
        options["amax_history_len"] = environment.amax_history_len
        options["reduce_amax"] = environment.reduce_amax
    recipe = _KINDS[environment.name](**options)
    _OWN.setdefault(repr(recipe), recipe)
    return repr(recipe)
