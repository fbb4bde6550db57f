# SPDX-License-Identifier: Apache-2.0
"""The one autograd function of the package."""

from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

__all__ = ["Call", "apply_plainly", "run_call"]


class Call(Protocol):
    """One call of a module: which plans run, over which state.

    Attributes
    ----------
    traced : bool
        A graph is being traced.
    """

    traced: bool

    def run_forward(self, tensors: tuple[Tensor, ...]) -> tuple[Any, tuple[Tensor, ...]]:
        """Run the forward; return the output and what the backward needs."""

    def run_backward(
        self, grads: tuple[Tensor, ...], saved: tuple[Tensor, ...]
    ) -> tuple[Tensor | None, ...]:
        """Run the backward; return None, then one gradient or None per tensor of the forward."""


class _PlanFunction(torch.autograd.Function):
    """A module call as a node of the autograd graph."""

    @staticmethod
    def forward(ctx: Any, call: Call, *tensors: Tensor) -> Any:
        output, saved = call.run_forward(tensors)
        ctx.save_for_backward(*saved)
        ctx.call = call
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            # create_graph: to differentiate again is an error, by gradients or by what was saved.
            return _backward_once(ctx, len(grads), *grads, *ctx.saved_tensors)
        return ctx.call.run_backward(grads, ctx.saved_tensors)


@once_differentiable
def _backward_once(ctx: Any, count: int, *tensors: Tensor) -> tuple:
    return ctx.call.run_backward(tensors[:count], tensors[count:])


apply_plainly = super(torch.autograd.Function, _PlanFunction).apply
"""`run_call` where no graph is traced and no function transform is active.

It is the native half of `Function.apply`. The Python half binds default arguments, which there are
none of, and unwraps what function transforms left behind, which costs more than the rest of a call.
"""


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
    if call.traced or torch._C._are_functorch_transforms_active():
        return _PlanFunction.apply(call, *tensors)
    return apply_plainly(call, *tensors)
