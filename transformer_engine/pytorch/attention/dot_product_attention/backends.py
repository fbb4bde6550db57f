# SPDX-License-Identifier: Apache-2.0
"""Which backend runs an attention, and why not another one."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from transformer_engine.common import absent
from transformer_engine.pytorch.attention.dot_product_attention import native, sdpa, unfused
from transformer_engine.pytorch.attention.dot_product_attention.limits import Limits, Situation
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

OLDEST_CUDNN = 91900  # as of csrc/cuda/cudnn_library.c
BIAS_TYPES = ("no_bias", "pre_scale_bias", "post_scale_bias", "alibi")


class Choice(NamedTuple):
    """The outcome."""

    backend: str  # a key of `BACKENDS`
    reasons: dict[str, str]  # for each backend that would have been preferred, what it can not do


def _native_lacks(situation: Situation) -> str | None:
    """What keeps the library's own operator from running it; None: nothing."""
    if not situation.switches.fused:
        return "switched off by NVTE_FUSED_ATTN"
    return None if situation.device == "cpu" else _cudnn_lacks(situation)


def _cudnn_lacks(situation: Situation) -> str | None:
    """What keeps cuDNN, which is behind the operator on CUDA, from running it."""
    if situation.capability != 90:
        found = situation.capability / 10
        return f"compute capability {found:.1f}: it was built and tested for 9.0"
    if situation.cudnn < OLDEST_CUDNN:
        return f"cuDNN {situation.cudnn}, expected at least {OLDEST_CUDNN}"
    if situation.dtype is torch.float32:
        return "fp32: cuDNN's kernels take fp16 and bf16"
    if any(n % 8 != 0 or n > 256 for n in situation.channels):
        return f"{situation.channels} channels of a head, which are no multiples of 8 up to 256"
    return situation.unusual or None


def _sdpa_lacks(situation: Situation) -> str | None:
    """What keeps torch's scaled_dot_product_attention from running it; None: nothing."""
    if not (situation.switches.flash or situation.switches.fused):
        return "switched off by NVTE_FLASH_ATTN and NVTE_FUSED_ATTN"
    kind = situation.kind
    if situation.device != "cpu" and not situation.switches.nondeterministic:
        return "NVTE_ALLOW_NONDETERMINISTIC_ALGO=0: its gradients are not repeatable"
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


_TO_HEADS = {"sbhd": (1, 2, 0, 3), "bshd": (0, 2, 1, 3)}
_FROM_HEADS = {"sbhd": (2, 0, 1, 3), "bshd": (0, 2, 1, 3)}
"""Permutations of a format to [batch, heads, length, channels], and back."""


def _by_heads(attend: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A backend from a function of tensors [batch, heads, length, channels]."""

    def run(
        query: Tensor, key: Tensor, value: Tensor, qkv_format: str, *arguments: Limits | float
    ) -> Tensor:
        order = _TO_HEADS[qkv_format]
        out = attend(query.permute(*order), key.permute(*order), value.permute(*order), *arguments)
        return out.permute(*_FROM_HEADS[qkv_format])

    return run


class Backend(NamedTuple):
    """What it lacks for a situation, and how it runs; see `native.attend` for the arguments."""

    lacks: Callable[[Situation], str | None]
    run: Callable[..., Tensor]


BACKENDS = {
    "native": Backend(_native_lacks, native.attend),
    "sdpa": Backend(_sdpa_lacks, _by_heads(sdpa.attend)),
    "unfused": Backend(_unfused_lacks, _by_heads(unfused.attend)),
}
"""By name, in order of preference."""


def choose_backend(situation: Situation) -> Choice:
    """Choose the first backend that lacks nothing, and say why the ones before it were passed over.

    ValueError where none is left: the environment switches off the one that would run it.
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
