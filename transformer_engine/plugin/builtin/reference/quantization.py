# SPDX-License-Identifier: Apache-2.0
"""What is defined without a quantizer; see `builtin.quantization`.

Casts themselves are defined by the quantizers, which an operator is given.
"""

from types import SimpleNamespace

import torch
from torch import Tensor

from transformer_engine.plugin.builtin import quantization as native
from transformer_engine.plugin.builtin.reference import defines
from transformer_engine.pytorch.cpp_extensions.values import exact


@defines(native.fp8_transpose)
def fp8_transpose(call: SimpleNamespace) -> Tensor:
    """Transpose bytes [..., columns] to [columns, ...], into `out` or a new tensor."""
    turned = call.input.detach().view(torch.uint8).movedim(-1, 0)
    if call.out is None:
        return turned.contiguous()
    call.out.view(torch.uint8).copy_(turned)
    return call.out


@defines(native.compute_amax)
def compute_amax(call: SimpleNamespace) -> None:
    """Write the largest magnitude of a tensor, NaN ignored, into `amax`."""
    values = exact("compute_amax", "input", call.input).abs().nan_to_num(nan=0.0, posinf=torch.inf)
    call.amax.detach().copy_(values.max() if values.numel() else values.new_zeros(()))


@defines(native.fused_amax_and_scale_update_after_reduction)
def fused_amax_and_scale_update_after_reduction(call: SimpleNamespace) -> None:
    """Update the state of delayed scaling, in place.

    NaN counts for nothing; a slot whose amax is Inf keeps its scale, one without a new amax its
    scale and its history.
    """
    op = "fused_amax_and_scale_update_after_reduction"
    rule = call.amax_compute_algo, call.fp8_dtype, call.margin
    largest, most_recent = native.update_rule(op, *rule)
    states = call.amax_reduction_buffer, call.amax_histories, call.scales
    for scale, history in native.with_newest(op, *states):
        used = history[0] != 0
        numbers = history.nan_to_num(nan=0.0, posinf=torch.inf)
        amax = numbers[0] if most_recent else numbers.amax(0)
        made = (torch.full_like(amax, largest) / amax).clamp(max=torch.finfo(torch.float32).max)
        scale.copy_(torch.where(used & amax.isfinite() & (amax > 0), made, scale))
        moved = history.roll(-1, 0)
        moved[0] = 0
        history.copy_(torch.where(used, moved, history))
