# SPDX-License-Identifier: Apache-2.0
"""Rotary position embedding of the heads of up to three tensors.

Positions that the angles lack are known on the device alone, as on a GPU: what they turn is NaN.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from transformer_engine.pytorch.attention.rope import Positions, turn

_PARTS = ("", "key", "value")
"""Prefixes of the fields of a part."""


def rope(fields: Mapping[str, Any]) -> None:
    """Run `_core.rope`."""
    positions = Positions(
        "bshd" if fields["cu_seqlens"] is None else "thd",
        fields["start_positions"],
        bool(fields["interleaved"]),
        fields["cu_seqlens"],
        max(fields["cp_size"], 1),
        fields["cp_rank"],
    )
    for name in _PARTS:
        tensor, prefix = fields[name or "input"], name and f"{name}_"
        if tensor is not None:
            made = _turned(tensor, fields[f"{prefix}freqs"], positions, fields)
            fields[f"{prefix}output"].copy_(made)


def _turned(
    tensor: Tensor, freqs: Tensor | None, positions: Positions, fields: Mapping[str, Any]
) -> Tensor:
    """A part, turned by its angles [positions, rotary]; without them as it is."""
    if freqs is None or not tensor.numel():
        return tensor
    heads = tensor.unflatten(-1, (-1, fields["channels"] or tensor.shape[-1]))
    at, inside = positions.of_tokens(tensor)
    count, rotary = freqs.shape
    lacking = torch.full((1, rotary), torch.nan, device=freqs.device)
    at = torch.where((at >= 0) & (at < count), at, count)
    angles = torch.cat((freqs, lacking))[at]
    made = turn(
        heads.flatten(-3, -2), angles[..., None, :], positions.interleaved, bool(fields["backward"])
    )
    made = made.view(tensor.shape)
    return made if inside is None else torch.where(inside[:, None, None], made, tensor)
