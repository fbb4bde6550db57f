# SPDX-License-Identifier: Apache-2.0
"""What is defined without a quantizer; see `builtin.quantization`.

Casts themselves are defined by the quantizers, which an operator is given.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from transformer_engine.plugin.builtin.quantization import update_rule, with_newest


def fp8_transpose(input: Tensor, dtype: Any, *, out: Tensor) -> Tensor:
    """Transpose bytes [..., columns] to [columns, ...], into `out` or a new tensor."""
    del dtype
    turned = input.detach().view(torch.uint8).movedim(-1, 0)
    if out is None:
        return turned.contiguous()
    out.view(torch.uint8).copy_(turned)
    return out


def compute_amax(input: Tensor, amax: Tensor) -> None:
    """Write the largest magnitude of a tensor, NaN ignored, into `amax`."""
    found = torch.nan_to_num(input.detach().float().abs(), nan=0.0, posinf=torch.inf)
    amax.detach().copy_(found.max().view(amax.shape) if found.numel() else torch.zeros(amax.shape))


def fused_amax_and_scale_update_after_reduction(
    amax_reduction_buffer: Tensor,
    amax_histories: Sequence[Tensor],
    scales: Sequence[Tensor],
    amax_compute_algo: str,
    fp8_dtype: Any,
    margin: float,
) -> None:
    """Update the state of delayed scaling, in place."""
    op = "fused_amax_and_scale_update_after_reduction"
    largest, most_recent = update_rule(op, amax_compute_algo, fp8_dtype, margin)
    for scale, history in with_newest(op, amax_reduction_buffer, amax_histories, scales):
        used = history[0] != 0
        numbers = history.nan_to_num(nan=0.0, posinf=torch.inf)
        amax = numbers[0] if most_recent else numbers.amax(0)
        made = torch.full_like(amax, largest) / amax
        made = made.clamp(max=torch.finfo(torch.float32).max)
        scale.copy_(torch.where(used & amax.isfinite() & (amax > 0), made, scale))
        moved = history.roll(-1, 0)
        moved[0] = 0
        history.copy_(torch.where(used, moved, history))
