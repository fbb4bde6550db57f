# SPDX-License-Identifier: Apache-2.0
"""Dropout; see `builtin.dropout`. The mask is bool, of the shape of the input: True is kept."""

import torch
from torch import Tensor

from transformer_engine.plugin.builtin.values import checked, written


def dropout_fwd(
    input: Tensor, dropout_probability: float, out: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(result, mask)."""
    inp = checked("dropout_fwd", "input", input)
    if not 0.0 <= dropout_probability <= 1.0:
        raise ValueError(
            f"dropout_fwd: dropout_probability={dropout_probability}, expected a number from 0 to 1"
        )
    mask = torch.rand(inp.shape, dtype=torch.float32, device=inp.device) >= dropout_probability
    return _masked("dropout_fwd", inp, mask, dropout_probability, out), mask


def dropout_bwd(
    grad_output: Tensor,
    mask: Tensor,
    dropout_probability: float,
    grad_input: Tensor | None = None,
) -> Tensor:
    """Gradient of the input of `dropout_fwd`; ValueError for a mask of another implementation."""
    grad = checked("dropout_bwd", "grad_output", grad_output)
    if mask.dtype != torch.bool or mask.shape != grad.shape:
        raise ValueError(
            f"dropout_bwd: mask: {mask.dtype} {tuple(mask.shape)}, expected the bool "
            f"{tuple(grad.shape)} of dropout_fwd of the same implementation"
        )
    return _masked("dropout_bwd", grad, mask, dropout_probability, grad_input)


def _masked(
    op: str, values: Tensor, mask: Tensor, probability: float, out: Tensor | None
) -> Tensor:
    factor = 1.0 / (1.0 - probability) if probability < 1.0 else 0.0
    made = (values.float() * mask * factor).to(values.dtype)
    return written(op, "out", made, out)
