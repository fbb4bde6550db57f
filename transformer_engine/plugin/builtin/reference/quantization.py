# SPDX-License-Identifier: Apache-2.0
"""Definitions without a quantizer; see `builtin.quantization`.

Casts themselves are defined by the quantizers, which an operator is given.
"""

from typing import Any

import torch
from torch import Tensor

from transformer_engine.plugin.builtin import quantization as native
from transformer_engine.plugin.builtin.signatures import operator
from transformer_engine.plugin.definitions.casts import scaling_update
from transformer_engine.plugin.definitions.scales import largest
from transformer_engine.pytorch.cpp_extensions.values import exact


def fp8_transpose(input: Tensor, dtype: Any, *, out: Tensor) -> Tensor:
    """Transpose bytes [..., columns] to [columns, ...], into `out` or a new tensor."""
    turned = input.detach().view(torch.uint8).movedim(-1, 0)
    if out is None:
        return turned.contiguous()
    out.view(torch.uint8).copy_(turned)
    return out


@operator
def compute_amax(call: Any) -> None:
    """Write the largest magnitude of a tensor, NaN ignored, into `amax`."""
    call.amax.detach().copy_(largest(exact("compute_amax", "input", call.input))[0])


@operator
def fused_amax_and_scale_update_after_reduction(call: Any) -> None:
    """Update the state of delayed scaling, in place.

    NaN counts for nothing; a slot whose amax is Inf keeps its scale, one without a new amax its
    scale and its history.
    """
    fp8_max, algo = native.update_rule(call)
    for scale, history in native.with_newest(call):
        scaling_update({"scale": scale, "history": history, "fp8_max": fp8_max, "algo": int(algo)})
