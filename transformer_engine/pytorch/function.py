# SPDX-License-Identifier: Apache-2.0
"""The one autograd function of the package."""

from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

__all__ = ["Call", "run_call"]


class Call(Protocol):
    """One call of a module: which plans run, over which state."""

    def run_forward(self, tensors: tuple[Tensor, ...]) -> tuple[Any, tuple[Tensor, ...]]:
        """Run the forward; return the output and what the backward needs."""

    def run_backward(self, grad: Tensor, saved: tuple[Tensor, ...]) -> tuple[Tensor | None, ...]:
        """Run the backward; return one gradient, or None, per tensor of the forward."""


class _PlanFunction(torch.autograd.Function):
    """A module call as a node of the autograd graph."""

    @staticmethod
    def forward(ctx: Any, call: Call, *tensors: Tensor) -> Any:
        output, saved = call.run_forward(tensors)
        ctx.save_for_backward(*saved)
        ctx.call = call
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple:
        if not torch.compiler.is_compiling() and torch.is_grad_enabled():
            return _backward_once(ctx, grad)  # create_graph: differentiating again is an error
        return (None, *ctx.call.run_backward(grad, ctx.saved_tensors))


@once_differentiable
def _backward_once(ctx: Any, grad: Tensor) -> tuple:
    return (None, *ctx.call.run_backward(grad, ctx.saved_tensors))


def run_call(call: Call, *tensors: Tensor) -> Any:
    """Run a module call and record its backward.

    Parameters
    ----------
    call : Call
        What to run.
    *tensors : Tensor
        The differentiable inputs, in the order that `call` expects.

    Returns
    -------
    Any
        The output of ``call.run_forward``.
    """
    return _PlanFunction.apply(call, *tensors)
