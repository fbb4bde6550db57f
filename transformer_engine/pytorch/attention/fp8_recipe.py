# SPDX-License-Identifier: Apache-2.0
"""By which recipe attention runs in FP8: that of its region, or another one.

The environment may name another one, and a `CustomRecipe` gives quantizers, which have to be those
of a recipe of attention: it has one scale for queries, keys and values, and one for each of the
other tensors, under delayed scaling of all of them or current scaling. Recipes that are made here
are attention's own: a region's recipe stays as it is, and scaling state of a recipe of attention's
own is updated with that of the region.
"""

import functools
from typing import Any

from transformer_engine.common.config import AttentionRecipe, attention_recipe
from transformer_engine.common.recipe import (
    CustomRecipe,
    DelayedScaling,
    DelayedScalingRequest,
    Float8CurrentScaling,
    Format,
    MXFP8BlockScaling,
    QParams,
    QuantizerRole,
    Recipe,
)
from transformer_engine.pytorch.constants import DType
from transformer_engine.pytorch.module.custom import ask, common_request, remembered
from transformer_engine.pytorch.torchside.modes import constant_in_graphs

__all__ = ["ROLES", "asks_for_it", "hands_over", "recipe_of", "resolve", "unbuilt_name"]

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

    A `CustomRecipe` is asked for the quantizers of the module.
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
    kind = type(module).__name__
    return remembered(module, recipe, lambda: resolve(recipe, kind, module.name))


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


# ---- quantizers of a CustomRecipe ----------------------------------------------------------------


ROLES = ("qkv", "s", "do", "dp")
"""Queries, keys and values; weights of softmax; the gradients of the output, and of these weights.

The output, and the gradients of queries, keys and values, are cast as what they are made of.
"""


def resolve(recipe: CustomRecipe, kind: str, name: str | None) -> Recipe | None:
    """The recipe that an attention runs by; None: in high precision.

    NotImplementedError where its quantizers are none of a recipe of attention; else as
    `module.custom.resolve`.
    """
    given = {role: ask(recipe, QuantizerRole("dpa", role, name or ""), kind) for role in ROLES}
    options = {"fp8_dpa": recipe.fp8_dpa, "fp8_mha": recipe.fp8_mha}
    requests = [each for each in given.values() if isinstance(each, DelayedScalingRequest)]
    if len(requests) == len(ROLES):
        return DelayedScaling(**vars(common_request(kind, requests)), **options)
    if all(_keeps(each) for each in given.values()):
        return None
    for role, each in given.items():
        why = _refusal(role, each)
        if why:
            what = each if isinstance(each, DelayedScalingRequest) else type(each).__name__
            raise NotImplementedError(
                f"{kind}: CustomRecipe.qfactory gave {what!r} for {role!r} of attention: {why}"
            )
    return _current(recipe, given, options)


def _keeps(given: Any) -> bool:
    """Whether it leaves a role in high precision."""
    from transformer_engine.pytorch.tensor import IdentityQuantizer

    return type(given) is IdentityQuantizer and given.dtype is None


def _refusal(role: str, given: Any) -> str:
    """Why attention by current scaling has no such cast; "": it has.

    It casts weights of softmax, which are at most 1, with the scale of that, as a delayed scale of
    such weights is; and nothing of its backward, which is in high precision.
    """
    from transformer_engine.pytorch.tensor import Float8CurrentScalingQuantizer

    delayed = isinstance(given, DelayedScalingRequest)
    if role in ("do", "dp") and (delayed or _keeps(given)):
        return ""
    if role == "s" and delayed:
        return ""
    if delayed or _keeps(given):
        return (
            "all four roles are delayed, or in high precision, or 'qkv' is of "
            "Float8CurrentScalingQuantizer"
        )
    if type(given) is not Float8CurrentScalingQuantizer or given.with_amax_reduction:
        return (
            "it casts by Float8CurrentScalingQuantizer of its own tensors, or by a "
            "DelayedScalingRequest for all four roles"
        )
    if role in ("qkv", "s") and given.dtype != DType.kFloat8E4M3:
        return f"it multiplies E4M3, not {given.dtype.name}"
    return ""


def _current(recipe: CustomRecipe, given: dict[str, Any], options: dict[str, bool]) -> Recipe:
    """Current scaling as the quantizer of queries, keys and values has it."""
    heads, gradient = given["qkv"], getattr(given["do"], "dtype", None)
    made = Float8CurrentScaling(
        fp8_format=Format.E4M3 if gradient == DType.kFloat8E4M3 else Format.HYBRID,
        backward_override=recipe.backward_override,
        **options,
    )
    made.fp8_quant_fwd_inp = QParams(
        power_2_scale=heads.force_pow_2_scales, amax_epsilon=heads.amax_epsilon
    )
    return made
