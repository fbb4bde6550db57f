# SPDX-License-Identifier: Apache-2.0
"""Which backend runs an attention, and why not another one."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from transformer_engine.common import absent
from transformer_engine.pytorch.attention.dot_product_attention import sdpa, unfused
from transformer_engine.pytorch.attention.dot_product_attention.limits import Situation
from transformer_engine.pytorch.attention.dot_product_attention.masks import (
    CAUSAL_WINDOW,
    NO_WINDOW,
)

__getattr__, __dir__ = absent.attach(globals())
__all__ = [
    "BACKENDS",
    "BIAS_TYPES",
    "Choice",
    "Situation",
    "choose_backend",
    *absent.names_of(__name__),
]

BIAS_TYPES = ("no_bias", "pre_scale_bias", "post_scale_bias", "alibi")


class Choice(NamedTuple):
    """The outcome.

    Attributes
    ----------
    backend : str
        "sdpa" or "unfused".
    reasons : dict of str to str
        For each backend that would have been preferred, what it can not do.
    """

    backend: str
    reasons: dict[str, str]


def _sdpa_lacks(situation: Situation) -> str | None:
    """What keeps torch's scaled_dot_product_attention from running it; None: nothing."""
    if not (situation.switches.flash or situation.switches.fused):
        return "switched off by NVTE_FLASH_ATTN and NVTE_FUSED_ATTN"
    kind = situation.kind
    if kind.padding or kind.name == "arbitrary":
        return f"mask type {kind.name}: it would take a mask of the size of the scores"
    if situation.bias != "no_bias":
        return f"bias type {situation.bias}"
    if situation.window not in (NO_WINDOW, CAUSAL_WINDOW):
        return f"window {situation.window}"
    if kind.causal and situation.bottom_right and not situation.square:
        return "a causal mask whose diagonal does not begin in the top left corner"
    if situation.grouped and situation.dtype is torch.float32:
        return "grouped heads in fp32: none of its fused kernels takes them"
    return None


def _unfused_lacks(situation: Situation) -> str | None:
    """It runs everything."""
    return None if situation.switches.unfused else "switched off by NVTE_UNFUSED_ATTN"


class Backend(NamedTuple):
    """What it lacks for a situation, and how it runs; see `unfused.attend` for the arguments."""

    lacks: Callable[[Situation], str | None]
    attend: Callable[..., Tensor]


BACKENDS = {
    "sdpa": Backend(_sdpa_lacks, sdpa.attend),
    "unfused": Backend(_unfused_lacks, unfused.attend),
}
"""By name, in order of preference."""


def choose_backend(situation: Situation) -> Choice:
    """Choose the first backend that lacks nothing.

    Parameters
    ----------
    situation : Situation
        What is to be run.

    Returns
    -------
    Choice
        The backend, and why the ones before it were passed over.

    Raises
    ------
    ValueError
        None is left: the environment switches off the one that would run it.
    """
    reasons: dict[str, str] = {}
    for name, backend in BACKENDS.items():
        reason = backend.lacks(situation)
        if reason is None:
            return Choice(name, reasons)
        reasons[name] = reason
    found = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
    raise ValueError(
        f"DotProductAttention: no backend is left ({found}). Unset these variables, or set "
        "NVTE_UNFUSED_ATTN=1: that backend runs everything"
    )
