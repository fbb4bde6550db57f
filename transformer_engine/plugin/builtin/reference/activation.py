# SPDX-License-Identifier: Apache-2.0
"""Activations and their gradients, by autograd; see `builtin.activation`."""

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from transformer_engine.plugin.builtin import activation as native
from transformer_engine.plugin.builtin.reference import defines
from transformer_engine.pytorch.cpp_extensions.values import checked, exact, quantized

FORMULAS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": lambda x: functional.gelu(x, approximate="tanh"),
    "qgelu": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": torch.relu,
    "srelu": lambda x: torch.relu(x).square(),
    "silu": functional.silu,
}
"""Activations of one argument, by name."""
GATED: dict[str, Callable[[Tensor], Tensor]] = {
    "glu": torch.sigmoid,
    "geglu": FORMULAS["gelu"],
    "qgeglu": FORMULAS["qgelu"],
    "reglu": FORMULAS["relu"],
    "sreglu": FORMULAS["srelu"],
    "swiglu": FORMULAS["silu"],
}
"""What the first half of the columns of a gated one goes through."""


def activate(name: str, x: Tensor) -> Tensor:
    """The activation `name`, in the dtype of `x`."""
    if name in FORMULAS:
        return FORMULAS[name](x)
    first, second = x.chunk(2, -1)
    return GATED[name](first) * second


def activate_clamped(x: Tensor, limit: float, alpha: float) -> Tensor:
    """`clamped_swiglu`, in the dtype of `x`."""
    first, second = x.chunk(2, -1)
    first, second = first.clamp(max=limit), second.clamp(-limit, limit)
    return first * torch.sigmoid(alpha * first) * (second + 1)


def _gradient(op: str, function: Callable, call: SimpleNamespace) -> tuple[Tensor, Tensor]:
    """(gradient of an activation's input, its column sums), not rounded."""
    x = checked(op, "fwd_input", call.fwd_input).double()  # powers of large values are finite
    x = x.detach().requires_grad_()
    with torch.enable_grad():
        out = function(x)
    (made,) = torch.autograd.grad(out, x, checked(op, "grad", call.grad).double())
    return made, made.reshape(-1, made.shape[-1]).sum(0)


def _define(name: str, function: Callable[[SimpleNamespace], Callable[[Tensor], Tensor]]) -> None:
    """Define an activation and its gradients; `function(call)` is that of a call's numbers."""
    gradient = "clamped_dswiglu" if name == "clamped_swiglu" else f"d{name}"
    with_sums = f"dbias_{gradient}"

    @defines(getattr(native, name))
    def forward(call: SimpleNamespace) -> Any:
        made = function(call)(exact(name, "input", call.input))
        return quantized(name, made.to(call.input.dtype), call.quantizer)

    @defines(getattr(native, gradient))
    def backward(call: SimpleNamespace) -> Any:
        made, _ = _gradient(gradient, function(call), call)
        return quantized(gradient, made.to(call.fwd_input.dtype), call.quantizer)

    globals().update({name: forward, gradient: backward})
    if not hasattr(native, with_sums):
        return

    @defines(getattr(native, with_sums))
    def backward_with_sums(call: SimpleNamespace) -> tuple[Tensor, Any]:
        made, sums = _gradient(with_sums, function(call), call)
        made = made.to(call.fwd_input.dtype)
        return sums.to(call.grad.dtype), quantized(with_sums, made, call.quantizer)

    globals()[with_sums] = backward_with_sums


for _name in (*FORMULAS, *GATED):
    _define(_name, lambda call, name=_name: functools.partial(activate, name))
_define(
    "clamped_swiglu",
    lambda call: functools.partial(activate_clamped, limit=call.limit, alpha=call.alpha),
)
