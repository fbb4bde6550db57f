# SPDX-License-Identifier: Apache-2.0
"""Norms of rows and their gradients; see `builtin.normalization`."""

from typing import Any

from torch import Tensor

from transformer_engine.plugin.builtin.signatures import operator
from transformer_engine.pytorch.cpp_extensions.values import exact, quantized, torch_dtype


def _forward(op: str, call: Any, bias: Tensor | None, mu: Any) -> tuple[Any, Tensor]:
    """(y, rsigma) of rows less their means `mu`."""
    centred = exact(op, "input", call.input) - mu
    rsigma = (centred.square().mean(-1, keepdim=True) + call.eps).rsqrt()
    y = centred * rsigma * (exact(op, "weight", call.weight) + call.zero_centered_gamma)
    y = y if bias is None else y + exact(op, "bias", bias)
    y = quantized(op, y.to(torch_dtype(op, "otype", call.otype)), call.quantizer, call.ln_out)
    return y, rsigma.flatten()


@operator
def layernorm_fwd(call: Any) -> tuple[Any, Tensor, Tensor]:
    """(y, mu, rsigma): y = (x - mu) rsigma weight + bias, rsigma = 1 / sqrt(var + eps)."""
    op = "layernorm_fwd"
    mu = exact(op, "input", call.input).mean(-1, keepdim=True)
    y, rsigma = _forward(op, call, call.bias, mu)
    return y, mu.flatten(), rsigma


@operator
def rmsnorm_fwd(call: Any) -> tuple[Any, None, Tensor]:
    """(y, None, rsigma): y = x rsigma weight, rsigma = 1 / sqrt(mean(x²) + eps)."""
    y, rsigma = _forward("rmsnorm_fwd", call, None, 0.0)
    return y, None, rsigma


def _backward(
    op: str, call: Any, dy: Tensor, mu: Tensor | None = None, add: Tensor | None = None
) -> tuple[Tensor, ...]:
    """(dx with what is added to it, gradients of gamma, of beta)."""
    rows = (*call.x.shape[:-1], 1)
    grad, centred = exact(op, "dy", dy), exact(op, "x", call.x)
    rsigma = exact(op, "rsigma", call.rsigma).view(rows)
    if mu is not None:
        centred = centred - exact(op, "mu", mu).view(rows)
    normed = centred * rsigma
    through = grad * (exact(op, "gamma", call.gamma) + call.zero_centered_gamma)
    dx = through - normed * (through * normed).mean(-1, keepdim=True)
    if mu is not None:
        dx = dx - through.mean(-1, keepdim=True)
    dx = dx * rsigma if add is None else dx * rsigma + exact(op, "add", add)
    sums = [each.reshape(-1, call.x.shape[-1]).sum(0) for each in (grad * normed, grad)]
    return dx.to(call.x.dtype), *(each.to(call.gamma.dtype) for each in sums)


@operator
def layernorm_bwd(call: Any) -> tuple[Tensor, ...]:
    """(dx, dgamma, dbeta) of `layernorm_fwd`."""
    return _backward("layernorm_bwd", call, call.dy, call.mu)


@operator
def rmsnorm_bwd(call: Any) -> tuple[Tensor, ...]:
    """(dx, dgamma) of `rmsnorm_fwd`."""
    return _backward("rmsnorm_bwd", call, call.dy)[:2]


@operator
def rmsnorm_bwd_add(call: Any) -> tuple[Tensor, ...]:
    """`rmsnorm_bwd` with `add` added to dx as it is rounded."""
    return _backward("rmsnorm_bwd_add", call, call.dz, add=call.add)[:2]
