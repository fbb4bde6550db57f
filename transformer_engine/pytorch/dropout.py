# SPDX-License-Identifier: Apache-2.0
"""Bias, dropout, stochastic depth and residual in one pass over memory."""

import torch
from torch import Tensor

from transformer_engine import _core
from transformer_engine.pytorch import torch_ops
from transformer_engine.pytorch.function import run_call
from transformer_engine.pytorch.random import draw_pair

__all__ = ["bias_dropout_add"]


def _forward(
    inp: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    rng: Tensor | None,
    dropout: float,
    drop_path: float,
    samples: int,
) -> Tensor:
    output = torch.empty_like(inp, memory_format=torch.contiguous_format)
    _core.dropout_add(
        inp,
        output,
        bias=bias,
        residual=residual,
        rng=rng,
        dropout=dropout,
        drop_path=drop_path,
        samples=samples,
    )
    return output


def _backward(
    grad: Tensor,
    rng: Tensor | None,
    bias_dtype: torch.dtype | None,
    dropout: float,
    drop_path: float,
    samples: int,
) -> tuple[Tensor, Tensor]:
    grad_input = (
        torch.empty_like(grad, memory_format=torch.contiguous_format) if rng is not None else None
    )
    bias_grad = None
    if bias_dtype is not None:
        bias_grad = torch.empty(grad.shape[-1], dtype=bias_dtype, device=grad.device)
    _core.dropout_backward(
        grad,
        grad_input=grad_input,
        bias_grad=bias_grad,
        rng=rng,
        dropout=dropout,
        drop_path=drop_path,
        samples=samples,
    )
    return grad_input, bias_grad


def _backward_op(
    grad: Tensor,
    rng: Tensor | None,
    bias_dtype: torch.dtype | None,
    dropout: float,
    drop_path: float,
    samples: int,
) -> tuple[Tensor, Tensor]:
    made = _backward(grad, rng, bias_dtype, dropout, drop_path, samples)
    return tuple(grad.new_empty(0) if tensor is None else tensor for tensor in made)


def _backward_fake(
    grad: Tensor,
    rng: Tensor | None,
    bias_dtype: torch.dtype | None,
    *_: object,
) -> tuple[Tensor, Tensor]:
    grad_input = grad.new_empty(0 if rng is None else grad.shape)
    if bias_dtype is None:
        return grad_input, grad.new_empty(0)
    return grad_input, grad.new_empty(grad.shape[-1], dtype=bias_dtype)


torch_ops.define(
    "dropout_add(Tensor input, Tensor? bias, Tensor? residual, Tensor? rng, float dropout, "
    "float drop_path, SymInt samples) -> Tensor",
    _forward,
    lambda inp, *_: torch.empty_like(inp, memory_format=torch.contiguous_format),
)
torch_ops.define(
    "dropout_backward(Tensor grad, Tensor? rng, ScalarType? bias_dtype, float dropout, "
    "float drop_path, SymInt samples) -> (Tensor, Tensor)",
    _backward_op,
    _backward_fake,
)


class _DropoutCall:
    """One call of `bias_dropout_add` (see `function.Call`).

    Attributes
    ----------
    dropout, drop_path : float
        Probabilities.
    samples : int
        Size of the first dim.
    bias_dtype : torch.dtype or None
        dtype of the bias gradient; None: none is wanted.
    has_residual : bool
        There is a residual.
    traced : bool
        Run behind torch operators.
    """

    __slots__ = ("bias_dtype", "drop_path", "dropout", "has_residual", "samples", "traced")
    label = "bias_dropout_add"

    def __init__(
        self,
        dropout: float,
        drop_path: float,
        samples: int,
        bias_dtype: torch.dtype | None,
        has_residual: bool,
        traced: bool,
    ) -> None:
        self.dropout = dropout
        self.drop_path = drop_path
        self.samples = samples
        self.bias_dtype = bias_dtype
        self.has_residual = has_residual
        self.traced = traced

    def run_forward(self, tensors: tuple) -> tuple[Tensor, tuple]:
        """Run the forward over (input, bias or None, residual or None, pair or None)."""
        inp, bias, residual, rng = tensors
        run = torch_ops.choose(_forward, torch.ops.transformer_engine.dropout_add, self.traced)
        out = run(inp, bias, residual, rng, self.dropout, self.drop_path, self.samples)
        return out, () if rng is None else (rng,)

    def run_backward(self, grads: tuple, saved: tuple) -> tuple[Tensor | None, ...]:
        """Run the backward: None, then the gradients of (input, bias, residual, pair)."""
        (grad,) = grads
        rng = saved[0] if saved else None
        grad_residual = grad if self.has_residual else None
        if rng is None and self.bias_dtype is None:
            return None, grad, None, grad_residual, None
        operator = torch.ops.transformer_engine.dropout_backward
        run = torch_ops.choose(_backward, operator, self.traced)
        grad_input, bias_grad = run(
            grad, rng, self.bias_dtype, self.dropout, self.drop_path, self.samples
        )
        return (
            None,
            grad if rng is None else grad_input,
            None if self.bias_dtype is None else bias_grad,
            grad_residual,
            None,
        )


def bias_dropout_add(
    inp: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    dropout: float = 0.0,
    drop_path: float = 0.0,
    training: bool = True,
) -> Tensor:
    """Compute residual + drop_path(dropout(input + bias)) in fp32.

    Parameters
    ----------
    inp : Tensor
        [samples, ..., features] fp32, fp16 or bf16.
    bias : Tensor, optional
        [features]; one of no elements counts as none.
    residual : Tensor, optional
        Shape of `inp`. The result has the common dtype of both.
    dropout : float, default 0
        Probability that an element is dropped; what is kept is multiplied by 1 / (1 - dropout).
    drop_path : float, default 0
        Probability that a whole sample (of the first dim) is dropped, likewise.
    training : bool, default True
        False: nothing is dropped.

    Returns
    -------
    Tensor
        Shape of `inp`.
    """
    if not training:
        dropout = drop_path = 0.0
    if bias is not None and bias.numel() == 0:
        bias = None
    drops = dropout > 0.0 or drop_path > 0.0
    if bias is None and not drops:
        return inp if residual is None else inp + residual
    if residual is not None and residual.dtype is not inp.dtype:
        dtype = torch.promote_types(inp.dtype, residual.dtype)
        inp, residual = inp.to(dtype), residual.to(dtype)
    bias_dtype = bias.dtype if bias is not None and bias.requires_grad else None
    samples = inp.shape[0] if drop_path > 0.0 and inp.shape[0] > 0 else 1
    traced = torch_ops.behind_operators(inp)
    call = _DropoutCall(dropout, drop_path, samples, bias_dtype, residual is not None, traced)
    return run_call(call, inp, bias, residual, draw_pair(inp) if drops else None)
