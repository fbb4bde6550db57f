# SPDX-License-Identifier: Apache-2.0
"""Activations and their gradients, by autograd; see `builtin.activation`."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from transformer_engine.plugin.builtin import activation as native
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
"""Functions of the first half of the columns, of gated activations."""


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


def _function(kind: str, call: Any) -> Callable[[Tensor], Tensor]:
    """The activation of a call."""
    if kind == "clamped_swiglu":
        return functools.partial(activate_clamped, **native.numbers_of(call))
    return functools.partial(activate, kind)


def _forward(op: str, kind: str, call: Any) -> Any:
    made = _function(kind, call)(exact(op, "input", call.input))
    return quantized(op, made.to(call.input.dtype), call.quantizer)


def _backward(op: str, kind: str, call: Any) -> Any:
    x = checked(op, "fwd_input", call.fwd_input).double()  # powers of large values are finite
    x = x.detach().requires_grad_()
    with torch.enable_grad():
        out = _function(kind, call)(x)
    (made,) = torch.autograd.grad(out, x, checked(op, "grad", call.grad).double())
    cast = quantized(op, made.to(call.fwd_input.dtype), call.quantizer)
    if not op.startswith("dbias_"):
        return cast
    return made.reshape(-1, made.shape[-1]).sum(0).to(call.grad.dtype), cast


native.define_all(globals(), _forward, _backward)
