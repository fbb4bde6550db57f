# SPDX-License-Identifier: Apache-2.0
"""Activations and their gradients, by autograd; see `builtin.activation`."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from transformer_engine.plugin.builtin.values import checked, quantized

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


def _through(op: str, function: Callable, grad: Any, fwd_input: Any) -> tuple[Tensor, torch.dtype]:
    """Gradient of an activation's input in fp32, and what it is rounded to."""
    source = checked(op, "fwd_input", fwd_input)
    x = source.double().requires_grad_()  # powers of large values are finite
    with torch.enable_grad():
        out = function(x)
    (made,) = torch.autograd.grad(out, x, checked(op, "grad", grad).double())
    return made.float(), source.dtype


def _forward(name: str) -> Callable:
    def run(input: Tensor, quantizer: Any) -> Any:
        x = checked(name, "input", input)
        return quantized(name, activate(name, x.float()).to(x.dtype), quantizer)

    return _named(run, name, f"`{name}` of [..., columns].")


def _gradient(name: str) -> Callable:
    op = f"d{name}"

    def run(grad: Tensor, fwd_input: Tensor, quantizer: Any) -> Any:
        made, dtype = _through(op, lambda x: activate(name, x), grad, fwd_input)
        return quantized(op, made.to(dtype), quantizer)

    return _named(run, op, f"Gradient of the input of `{name}`.")


def _gradient_and_bias(name: str) -> Callable:
    op = f"dbias_d{name}"

    def run(grad: Tensor, fwd_input: Tensor, quantizer: Any) -> tuple[Tensor, Any]:
        made, dtype = _through(op, lambda x: activate(name, x), grad, fwd_input)
        sums = made.reshape(-1, made.shape[-1]).sum(0).to(grad.dtype)
        return sums, quantized(op, made.to(dtype), quantizer)

    return _named(run, op, f"(column sums of `d{name}`, `d{name}`).")


def _named(run: Callable, name: str, doc: str) -> Callable:
    run.__name__ = run.__qualname__ = name
    run.__doc__ = doc
    return run


for _name in (*FORMULAS, *GATED):
    globals()[_name] = _forward(_name)
    globals()[f"d{_name}"] = _gradient(_name)
    if _name in FORMULAS:
        globals()[f"dbias_d{_name}"] = _gradient_and_bias(_name)


def clamped_swiglu(input: Tensor, quantizer: Any, limit: float = 7.0, alpha: float = 1.702) -> Any:
    """Compute a' sigmoid(alpha a') (b' + 1) of [a b], a' = min(a, limit), b' = clamp(b, ±limit)."""
    x = checked("clamped_swiglu", "input", input)
    made = activate_clamped(x.float(), limit, alpha).to(x.dtype)
    return quantized("clamped_swiglu", made, quantizer)


def clamped_dswiglu(
    grad: Tensor, fwd_input: Tensor, quantizer: Any, limit: float = 7.0, alpha: float = 1.702
) -> Any:
    """Gradient of the input of `clamped_swiglu`."""
    op = "clamped_dswiglu"
    made, dtype = _through(op, lambda x: activate_clamped(x, limit, alpha), grad, fwd_input)
    return quantized(op, made.to(dtype), quantizer)
