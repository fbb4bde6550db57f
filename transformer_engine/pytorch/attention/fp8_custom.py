# SPDX-License-Identifier: Apache-2.0
"""Attention under a `CustomRecipe`: which of the recipes of attention its quantizers are.

Attention has one scale for queries, keys and values, and one for each of the other tensors, in FP8:
delayed scaling of all of them, or current scaling. Other casts it has none of, so what a function
gives for its roles is one of these two, high precision, or refused by name.
"""

from typing import Any

from transformer_engine.common.recipe import (
    CustomRecipe,
    DelayedScaling,
    DelayedScalingRequest,
    Float8CurrentScaling,
    Format,
    QParams,
    QuantizerRole,
    Recipe,
)
from transformer_engine.pytorch.constants import DType
from transformer_engine.pytorch.module.custom import ask, common_request

__all__ = ["ROLES", "resolve"]

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
