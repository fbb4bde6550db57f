# SPDX-License-Identifier: Apache-2.0
"""Dropout; see `builtin.dropout`. The mask is bool, of the shape of the input: True is kept."""

from typing import Any

import torch
from torch import Tensor

from transformer_engine.plugin.builtin import dropout as native
from transformer_engine.plugin.builtin.signatures import operator
from transformer_engine.pytorch.cpp_extensions.values import checked, exact, written


@operator
def dropout_fwd(call: Any) -> tuple[Tensor, Tensor]:
    """(result, mask)."""
    op, inp = "dropout_fwd", checked("dropout_fwd", "input", call.input)
    p = native.probability(op, call.dropout_probability)
    mask = torch.rand(inp.shape, dtype=torch.float32, device=inp.device) >= p
    return written(op, "out", _masked(inp, mask, p), call.out), mask


@operator
def dropout_bwd(call: Any) -> Tensor:
    """Gradient of the input of `dropout_fwd`; ValueError for a mask of another implementation."""
    op, mask = "dropout_bwd", call.mask
    grad = checked(op, "grad_output", call.grad_output)
    if mask.dtype != torch.bool or mask.shape != grad.shape:
        raise ValueError(
            f"{op}: mask: {mask.dtype} {tuple(mask.shape)}, expected the bool "
            f"{tuple(grad.shape)} of dropout_fwd of the same implementation"
        )
    p = native.probability(op, call.dropout_probability)
    return written(op, "grad_input", _masked(grad, mask, p), call.grad_input)


def _masked(values: Tensor, mask: Tensor, p: float) -> Tensor:
    factor = 1.0 / (1.0 - p) if p < 1.0 else 0.0
    return (exact("dropout", "", values) * mask * factor).to(values.dtype)
