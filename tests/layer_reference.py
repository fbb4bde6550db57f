# SPDX-License-Identifier: Apache-2.0
"""Definitions of norms and activations in float64, for autograd, and the terms of their values.

The terms are what rounding errors are relative to where a value is a difference: see "terms" in
tols.py. All take and give float64 tensors on the CPU.
"""

import math

import torch

from transformer_engine import _core

NORMS = {"layernorm": _core.NORM_LAYERNORM, "rmsnorm": _core.NORM_RMSNORM, "l2": _core.NORM_L2}
ACTIVATIONS = {name: number for number, name in enumerate(_core.activation_names())}
PLAIN = ("gelu", "qgelu", "relu", "srelu", "silu")
GATED = {
    "geglu": "gelu",
    "qgeglu": "qgelu",
    "reglu": "relu",
    "sreglu": "srelu",
    "swiglu": "silu",
    "glu": "sigmoid",
    "clamped_swiglu": "clamped",
}


def wide(tensor):
    """A tensor in float64 on the CPU."""
    return tensor.detach().cpu().double()


# ---- norms ---------------------------------------------------------------------------------------


def statistics(kind, x, eps):
    """Mean (0 where the kind has none) and rsigma of the rows, each [rows, 1]."""
    eps = float(torch.tensor(eps, dtype=torch.float32))
    zero = torch.zeros(x.shape[0], 1, dtype=x.dtype)
    if kind == "l2":
        return zero, (x.square().sum(1, keepdim=True) + eps).rsqrt()
    mean = x.mean(1, keepdim=True) if kind == "layernorm" else zero
    return mean, ((x - mean).square().mean(1, keepdim=True) + eps).rsqrt()


def norm(kind, x, weight, beta, eps):
    """Normalize the rows of x; `weight` is the whole factor."""
    mean, rsigma = statistics(kind, x, eps)
    return (x - mean) * rsigma * weight + beta


def _normalized_terms(kind, x, eps):
    """Terms of the normalized input: the mean errs with the magnitudes that it averages."""
    rsigma = statistics(kind, x, eps)[1]
    if kind != "layernorm":
        return x.abs() * rsigma
    return (x.abs() + x.abs().mean(1, keepdim=True)) * rsigma


def norm_terms(kind, x, weight, beta, eps):
    """Terms of each value of `norm`."""
    return _normalized_terms(kind, x, eps) * weight.abs() + beta.abs()


def norm_grad_terms(kind, x, weight, grad, eps):
    """Terms of the gradients: (of x, of gamma, of beta)."""
    rsigma = statistics(kind, x, eps)[1]
    normalized = _normalized_terms(kind, x, eps)
    scaled = (grad * weight).abs()
    along = (scaled * normalized).sum(1, keepdim=True)
    across = scaled.mean(1, keepdim=True) if kind == "layernorm" else 0
    along = along if kind == "l2" else along / x.shape[1]
    terms = rsigma * (scaled + across + normalized * along)
    return terms, (grad.abs() * normalized).sum(0), grad.abs().sum(0)


# ---- activations ---------------------------------------------------------------------------------


def _gelu(x):
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


_PLAIN = {
    "gelu": _gelu,
    "qgelu": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": torch.relu,
    "srelu": lambda x: torch.relu(x).square(),
    "silu": lambda x: x * torch.sigmoid(x),
    "sigmoid": torch.sigmoid,
}

# How fast the argument of the exponential grows with x, which is what its errors are multiplied by.
_SLOPES = {
    "gelu": lambda x: math.sqrt(2 / math.pi) * (1 + 3 * 0.044715 * x.square()),
    "qgelu": lambda x: torch.full_like(x, 1.702),
    "silu": torch.ones_like,
    "sigmoid": torch.ones_like,
}


def clamps(limit=7.0, alpha=1.702, linear_offset=1.0):
    """The numbers of clamped_swiglu as the operator sees them, in fp32."""
    named = {"limit": limit, "alpha": alpha, "linear_offset": linear_offset}
    return {n: float(torch.tensor(v, dtype=torch.float32)) for n, v in named.items()}


def _clamped(a, limit, alpha):
    a = a.clamp(max=limit)
    return a * torch.sigmoid(alpha * a)


def _halves(name, x, numbers):
    """The function of the first half, that half, and the factor that the second half makes."""
    if name in PLAIN:
        return _PLAIN[name], x, torch.ones_like(x)
    a, b = x.chunk(2, dim=1)
    if name != "clamped_swiglu":
        return _PLAIN[GATED[name]], a, b
    b = b.clamp(-numbers["limit"], numbers["limit"]) + numbers["linear_offset"]
    return lambda a: _clamped(a, numbers["limit"], numbers["alpha"]), a, b


def activation(name, x, **numbers):
    """Activate [rows, columns], or the halves of [rows, 2 columns]."""
    function, a, factor = _halves(name, x, clamps(**numbers))
    return function(a) * factor


def _sizes(name, a, numbers):
    """Magnitudes within f(a) and within f'(a).

    1 + tanh and 1 - tanh^2 err by eps whatever they come to, so what counts is what multiplies
    them; the logistic function is no different where it is made of 1 + exp.
    """
    base = GATED.get(name, name)
    if base in ("relu", "srelu"):
        power = 1 if base == "relu" else 2
        return torch.relu(a) ** power, power * torch.relu(a) ** (power - 1)
    if base == "sigmoid":
        return 1 + a.abs(), 1 + a.abs()
    if base == "clamped":
        a = a.clamp(max=numbers["limit"])
        slope = torch.full_like(a, abs(numbers["alpha"]))
    else:
        slope = _SLOPES[base](a)
    return a.abs(), 1 + a.abs() * slope


def activation_terms(name, x, **numbers):
    """Terms of each value of `activation`."""
    numbers = clamps(**numbers)
    _, a, factor = _halves(name, x, numbers)
    if name == "clamped_swiglu":
        factor = factor.abs() + abs(numbers["linear_offset"])
    return _sizes(name, a, numbers)[0] * factor.abs()


def activation_grad_terms(name, x, grad, **numbers):
    """Terms of the gradient of x."""
    numbers = clamps(**numbers)
    _, a, factor = _halves(name, x, numbers)
    value, slope = _sizes(name, a, numbers)
    if name == "clamped_swiglu":
        factor = factor.abs() + abs(numbers["linear_offset"])
    parts = [slope * factor.abs()]
    if name in GATED:
        parts.append(value)
    return torch.cat([grad.abs() * part for part in parts], dim=1)
