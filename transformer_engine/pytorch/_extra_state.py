# SPDX-License-Identifier: Apache-2.0
"""Which recipes have state in checkpoints, and what is never loaded from them.

`extra_state` packs and unpacks that state. Nothing here unpickles: the questions about pickles of
other packages have one answer.
"""

from enum import Enum
from typing import Any

from transformer_engine.common.recipe import Recipe

UNSAFE_PICKLE_EXTRA_STATE_ENV = "NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE"
"""Variable by which NVIDIA Transformer Engine loads pickles. It is not read here."""


class CheckpointExtraStatePolicy(Enum):
    """Data of a recipe in a checkpoint, besides the weights."""

    STATELESS = "stateless"  # nothing
    STATEFUL_FP8_DELAYED_SCALING = "stateful_fp8_delayed_scaling"  # scales and amax histories
    DYNAMIC = "dynamic"  # what the quantizers of a custom recipe need


def recipe_extra_state_policy(recipe: Recipe) -> CheckpointExtraStatePolicy:
    """The policy of a recipe. TypeError for what is no recipe."""
    if not isinstance(recipe, Recipe):
        raise TypeError(f"recipe={recipe!r}, expected a Recipe of transformer_engine.common.recipe")
    if recipe.custom():
        return CheckpointExtraStatePolicy.DYNAMIC
    if recipe.delayed():
        return CheckpointExtraStatePolicy.STATEFUL_FP8_DELAYED_SCALING
    return CheckpointExtraStatePolicy.STATELESS


def is_stateless_recipe(recipe: Recipe) -> bool:
    """Return whether checkpoints hold nothing of a recipe."""
    return recipe_extra_state_policy(recipe) is CheckpointExtraStatePolicy.STATELESS


def unsafe_pickle_extra_state_enabled() -> bool:
    """Return whether pickles are loaded: never, whatever the environment says."""
    return False


def should_load_extra_state_pickle(data: bytes, context: str) -> bool:
    """Return whether bytes of a checkpoint are to be unpickled: never."""
    del data, context
    return False


def extra_state_pickle_advisory(context: Any) -> str:
    """Error text for a pickle that is found at a place, say a key of a state dict."""
    return (
        f"{context}: a pickle of another package, which is never loaded. Set TE_EXTRA_STATE=ignore "
        "to load the weights and start with fresh scales"
    )
