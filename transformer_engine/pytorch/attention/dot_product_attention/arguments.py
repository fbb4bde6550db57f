# SPDX-License-Identifier: Apache-2.0
"""Arguments of `DotProductAttention`: what is refused, and descriptions of tensors."""

from collections.abc import Sequence
from typing import Any

import torch

from transformer_engine.pytorch.module.parameters import refuse_options

_NAME = "DotProductAttention"

_DEFAULTS = {
    "fp8_output": False,
    "num_splits": 1,
    "score_mod": None,
    "score_mod_bprop": None,
    "score_mod_tensors": None,
    "score_mod_bprop_tensors": None,
}
"""Arguments of the forward that are not built, with their defaults."""


class Described:
    """Stands for a tensor of a call that is asked about and not run."""

    def __init__(
        self, shape: Sequence[int], dtype: torch.dtype, device: Any, requires_grad: bool = False
    ) -> None:
        self.shape, self.dtype, self.device = torch.Size(shape), dtype, torch.device(device)
        self.requires_grad = requires_grad

    def dim(self) -> int:
        """Count the dims."""
        return len(self.shape)


def refuse_unbuilt(**given: Any) -> None:
    """Raise for arguments of the forward that are not built (NotImplementedError)."""
    named = {name: (given[name], default) for name, default in _DEFAULTS.items() if name in given}
    if named.get("num_splits") == (None, 1):
        del named["num_splits"]
    refuse_options(_NAME, **named)


def check_format(qkv_format: str) -> None:
    """Raise for what is no format (ValueError)."""
    if qkv_format not in ("sbhd", "bshd", "thd"):
        raise ValueError(f"{_NAME}: qkv_format={qkv_format!r}, expected 'sbhd', 'bshd' or 'thd'")
