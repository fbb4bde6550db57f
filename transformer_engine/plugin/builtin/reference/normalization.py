# SPDX-License-Identifier: Apache-2.0
"""Norms of rows and their gradients; see `builtin.normalization`."""

from typing import Any

from torch import Tensor

from transformer_engine.plugin.builtin.values import checked, quantized, torch_dtype


def _factor(gamma: Tensor, zero_centered: bool) -> Tensor:
    return gamma.float() + 1 if zero_centered else gamma.float()


def layernorm_fwd(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    ln_out: Tensor | None,
    quantizer: Any,
    otype: Any,
    sm_margin: int,
    zero_centered_gamma: bool,
) -> tuple[Any, Tensor, Tensor]:
    """(y, mu, rsigma): y = (x - mu) rsigma weight + bias, rsigma = 1 / sqrt(var + eps)."""
    op = "layernorm_fwd"
    x = checked(op, "input", input).float()
    mu = x.mean(-1, keepdim=True)
    centred = x - mu
    rsigma = (centred.square().mean(-1, keepdim=True) + eps).rsqrt()
    y = centred * rsigma * _factor(weight.detach(), zero_centered_gamma)
    y = y if bias is None else y + bias.detach().float()
    y = quantized(op, y.to(torch_dtype(op, "otype", otype)), quantizer, ln_out)
    return y, mu.flatten(), rsigma.flatten()


def rmsnorm_fwd(
    input: Tensor,
    weight: Tensor,
    eps: float,
    ln_out: Tensor | None,
    quantizer: Any,
    otype: Any,
    sm_margin: int,
    zero_centered_gamma: bool,
) -> tuple[Any, Tensor | None, Tensor]:
    """(y, None, rsigma): y = x rsigma weight, rsigma = 1 / sqrt(mean(x²) + eps)."""
    op = "rmsnorm_fwd"
    x = checked(op, "input", input).float()
    rsigma = (x.square().mean(-1, keepdim=True) + eps).rsqrt()
    y = x * rsigma * _factor(weight.detach(), zero_centered_gamma)
    y = quantized(op, y.to(torch_dtype(op, "otype", otype)), quantizer, ln_out)
    return y, None, rsigma.flatten()


def _backward(
    dy: Tensor, x: Tensor, mu: Tensor | None, rsigma: Tensor, factor: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """dx, and the sums of rows that are the gradients of gamma and beta, in fp32."""
    grad, rsigma = dy.detach().float(), rsigma.detach().view(*x.shape[:-1], 1)
    centred = x.detach().float()
    if mu is not None:
        centred = centred - mu.detach().view(*x.shape[:-1], 1)
    normed, through = centred * rsigma, grad * factor
    dx = through - normed * (through * normed).mean(-1, keepdim=True)
    if mu is not None:
        dx = dx - through.mean(-1, keepdim=True)
    sums = (each.reshape(-1, x.shape[-1]).sum(0) for each in (grad * normed, grad))
    return dx * rsigma, *sums


def layernorm_bwd(
    dy: Tensor,
    x: Tensor,
    mu: Tensor,
    rsigma: Tensor,
    gamma: Tensor,
    sm_margin: int = 0,
    zero_centered_gamma: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dx, dgamma, dbeta) of `layernorm_fwd`."""
    factor = _factor(gamma.detach(), zero_centered_gamma)
    dx, dgamma, dbeta = _backward(dy, x, mu, rsigma, factor)
    return dx.to(x.dtype), dgamma.to(gamma.dtype), dbeta.to(gamma.dtype)


def rmsnorm_bwd(
    dy: Tensor,
    x: Tensor,
    rsigma: Tensor,
    gamma: Tensor,
    sm_margin: int = 0,
    zero_centered_gamma: bool = False,
    eps: float = 1e-05,
) -> tuple[Tensor, Tensor]:
    """(dx, dgamma) of `rmsnorm_fwd`."""
    factor = _factor(gamma.detach(), zero_centered_gamma)
    dx, dgamma, _ = _backward(dy, x, None, rsigma, factor)
    return dx.to(x.dtype), dgamma.to(gamma.dtype)


def rmsnorm_bwd_add(
    dz: Tensor,
    x: Tensor,
    add: Tensor,
    rsigma: Tensor,
    gamma: Tensor,
    sm_margin: int,
    zero_centered_gamma: bool,
) -> tuple[Tensor, Tensor]:
    """`rmsnorm_bwd` with `add` added to dx as it is rounded."""
    dx, dgamma = rmsnorm_bwd(dz, x, rsigma, gamma, sm_margin, zero_centered_gamma)
    return (dx.float() + add.detach().float()).to(x.dtype), dgamma
