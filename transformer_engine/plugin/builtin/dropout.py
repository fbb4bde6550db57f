# SPDX-License-Identifier: Apache-2.0
"""Dropout, by ``_core.dropout_add`` and ``_core.dropout_backward``."""

from typing import Any

import torch
from torch import Tensor

from transformer_engine import _core
from transformer_engine.plugin.builtin.signatures import operator
from transformer_engine.pytorch.cpp_extensions.values import wide, written
from transformer_engine.pytorch.execution.random import draw_pair


@operator
def dropout_fwd(call: Any) -> tuple[Tensor, Tensor]:
    """(result, mask): elements are 0 with a probability, the others multiplied by 1 / (1 - p).

    Parameters
    ----------
    input : Tensor
        fp32, fp16 or bf16, with at least one dim.
    dropout_probability : float
        From 0 to 1; ValueError otherwise.
    out : Tensor, optional
        To be written, and returned.

    Returns
    -------
    (Tensor, Tensor)
        The mask is what `dropout_bwd` of the same implementation reads: here the int64 [2] seed and
        offset of the random decisions, drawn from torch's generator.
    """
    op = "dropout_fwd"
    inp = wide(op, "input", call.input)
    made = torch.empty_like(inp)
    rng = draw_pair(inp)
    _core.dropout_add(inp, made, rng=rng, dropout=probability(op, call.dropout_probability))
    return written(op, "out", made, call.out), rng


@operator
def dropout_bwd(call: Any) -> Tensor:
    """Gradient of the input of `dropout_fwd`; into `grad_input` where that is given.

    `mask` is that of the forward; ValueError for one of another implementation.
    """
    op, mask = "dropout_bwd", call.mask
    grad = wide(op, "grad_output", call.grad_output)
    if mask.dtype != torch.int64 or tuple(mask.shape) != (2,):
        raise ValueError(
            f"{op}: mask: {mask.dtype} {tuple(mask.shape)}, expected the int64 [2] of dropout_fwd "
            "of the same implementation"
        )
    made = torch.empty_like(grad)
    p = probability(op, call.dropout_probability)
    _core.dropout_backward(grad, grad_input=made, rng=mask, dropout=p)
    return written(op, "grad_input", made, call.grad_input)


def probability(op: str, value: float) -> float:
    """A `dropout_probability`; ValueError for none."""
    if not 0.0 <= value <= 1.0:
        raise ValueError(f"{op}: dropout_probability={value}, expected a number from 0 to 1")
    return float(value)
