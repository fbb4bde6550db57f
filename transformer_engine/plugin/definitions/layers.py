# SPDX-License-Identifier: Apache-2.0
"""Norms, activations, soft caps and dropouts, and their gradients.

The formulas are those of `transformer_engine_ops.h`. They compute in the dtype of their arguments,
which operators give them in fp32. Gradients are written out instead of left to autograd: powers and
exponentials of large numbers overflow in fp32, where a slope has a limit.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from transformer_engine import _core
from transformer_engine.plugin.definitions import casts, philox

# ---- activations ---------------------------------------------------------------------------------


class Function(NamedTuple):
    """A function of one number, and its slope."""

    value: Callable[[Tensor], Tensor]
    slope: Callable[[Tensor], Tensor]


_FAR = 1e4
"""Here the logistic function and its slope are 0 or 1 in every dtype."""
_TWICE = 2.0 * math.sqrt(2.0 / math.pi)


def _logistic_slope(z: Tensor) -> Tensor:
    return torch.sigmoid(z) * torch.sigmoid(-z)  # 1 - s would lose its digits


def _above_minus_inf(x: Tensor) -> Tensor:
    """The lowest finite number for -Inf, which a factor of 0 would turn into NaN."""
    return x.clamp(min=torch.finfo(x.dtype).min)


def _swish(x: Tensor, alpha: float) -> Tensor:
    x = _above_minus_inf(x)
    return x * torch.sigmoid(alpha * x)


def _swish_slope(x: Tensor, alpha: float) -> Tensor:
    z = (alpha * x).clamp(-_FAR, _FAR)
    return torch.sigmoid(z) + z * _logistic_slope(z)


def _gelu(x: Tensor) -> Tensor:
    """Compute x s(2u), which is x (1 + tanh(u)) / 2 and exact where tanh(u) is close to -1."""
    x = _above_minus_inf(x)
    return x * torch.sigmoid(_TWICE * (x * (1.0 + 0.044715 * x * x)))


def _gelu_slope(x: Tensor) -> Tensor:
    x = x.clamp(-16.0, 16.0)  # the slope is 0 or 1 in fp32 long before
    z = _TWICE * x * (1.0 + 0.044715 * x * x)
    return torch.sigmoid(z) + _logistic_slope(z) * _TWICE * x * (1.0 + 0.134145 * x * x)


def _relu(x: Tensor) -> Tensor:
    return torch.where(x <= 0.0, 0.0, x)  # NaN stays, and there is no -0


PLAIN: dict[str, Function] = {
    "gelu": Function(_gelu, _gelu_slope),
    "qgelu": Function(lambda x: _swish(x, 1.702), lambda x: _swish_slope(x, 1.702)),
    "relu": Function(_relu, lambda x: (x > 0.0).to(x.dtype)),
    "srelu": Function(lambda x: _relu(x).square(), lambda x: 2.0 * _relu(x)),
    "silu": Function(lambda x: _swish(x, 1.0), lambda x: _swish_slope(x, 1.0)),
}
"""Activations of one argument, by name."""
GATED: dict[str, Function] = {
    "glu": Function(torch.sigmoid, _logistic_slope),
    "geglu": PLAIN["gelu"],
    "qgeglu": PLAIN["qgelu"],
    "reglu": PLAIN["relu"],
    "sreglu": PLAIN["srelu"],
    "swiglu": PLAIN["silu"],
}
"""Functions of the first half of the columns, of gated activations but for clamped_swiglu."""


def _gate(
    kind: str, x: Tensor, limit: float, alpha: float, linear_offset: float
) -> tuple[Function, Tensor, Tensor, Tensor | float]:
    """Of a gated activation: its function, its first half, what multiplies that, the slope of it.

    The slope is to the second half.
    """
    half = x.shape[-1] // 2
    first, second = x[..., :half], x[..., half:]
    if kind in GATED:
        return GATED[kind], first, second, 1.0
    function = Function(
        lambda a: _swish(a.clamp(max=limit), alpha),
        lambda a: torch.where(a > limit, 0.0, _swish_slope(a.clamp(max=limit), alpha)),
    )
    inside = second.clamp(-limit, limit)
    slope = torch.where(inside == second, 1.0, torch.where(second.isnan(), second, 0.0))
    return function, first, inside + linear_offset, slope


def activate(
    kind: str, x: Tensor, limit: float = 7.0, alpha: float = 1.702, linear_offset: float = 1.0
) -> Tensor:
    """The activation `kind`, a name of `_core.activation_names`, in the dtype of `x`.

    [.., columns], or of a gated one [.., 2 columns] to [.., columns]. The numbers are those of
    clamped_swiglu.
    """
    if kind in PLAIN:
        return PLAIN[kind].value(x)
    function, first, factor, _ = _gate(kind, x, limit, alpha, linear_offset)
    return function.value(first) * factor


def activation_gradient(
    kind: str,
    x: Tensor,
    grad: Tensor,
    limit: float = 7.0,
    alpha: float = 1.702,
    linear_offset: float = 1.0,
) -> Tensor:
    """Gradient of the `x` of `activate`, by `grad`, that of its result."""
    if kind in PLAIN:
        return grad * PLAIN[kind].slope(x)
    function, first, factor, slope = _gate(kind, x, limit, alpha, linear_offset)
    return torch.cat(
        (grad * factor * function.slope(first), grad * function.value(first) * slope), -1
    )


def _activation_of(fields: Mapping[str, Any]) -> tuple[str, dict[str, float]]:
    """Name and numbers of a call's activation."""
    numbers = {name: fields[name] for name in ("limit", "alpha", "linear_offset")}
    return _core.activation_names()[fields["kind"]], numbers


def activation(fields: Mapping[str, Any]) -> None:
    """Run `_core.activation`."""
    kind, numbers = _activation_of(fields)
    casts.put(activate(kind, fields["input"].float(), **numbers), fields)


def activation_backward(fields: Mapping[str, Any]) -> None:
    """Run `_core.activation_backward`."""
    kind, numbers = _activation_of(fields)
    x, grad = fields["input"].float(), fields["grad_output"].float()
    casts.put(activation_gradient(kind, x, grad, **numbers), fields)


def cap_scores(x: Tensor, cap: float) -> tuple[Tensor, Tensor]:
    """Cap tanh(x / cap), and its slope, 1 - tanh(x / cap)^2."""
    u = x / cap
    return cap * torch.tanh(u), 4.0 * _logistic_slope(2.0 * u)


def softcap(fields: Mapping[str, Any]) -> None:
    """Run `_core.softcap`."""
    value, slope = cap_scores(fields["input"].float(), fields["cap"])
    grad = fields["grad_output"]
    casts.put(value if grad is None else grad.float() * slope, fields)


# ---- norms ---------------------------------------------------------------------------------------

_LAYERNORM, _L2 = _core.NORM_LAYERNORM, _core.NORM_L2


def norm_statistics(kind: int, x: Tensor, eps: float) -> tuple[Tensor | None, Tensor]:
    """Mean (None but of a LayerNorm) and rsigma of rows, [.., 1] in the dtype of `x`."""
    mean = None
    if kind == _LAYERNORM:
        mean = x.mean(-1, keepdim=True)
        mean = mean + (x - mean).mean(-1, keepdim=True)  # a large mean costs no digits
        x = x - mean
    squares = x.square()
    squares = squares.sum(-1, keepdim=True) if kind == _L2 else squares.mean(-1, keepdim=True)
    return mean, (squares + eps).rsqrt()


def normalized(x: Tensor, mean: Tensor | None, rsigma: Tensor) -> Tensor:
    """Rows of mean 0 and size 1, by statistics [.., 1]."""
    return (x if mean is None else x - mean) * rsigma


def norm_gradient(
    kind: int, grad: Tensor, x: Tensor, weight: Tensor | float, statistics: tuple
) -> tuple[Tensor, Tensor]:
    """Gradient of the `x` of a norm, and those of the factors of each element.

    `grad` is that of the result, `weight` the factor of each column, `statistics` are mean and
    rsigma [.., 1] of the rows.
    """
    normal = normalized(x, *statistics)
    through = grad * weight
    along = through * normal
    along = along.sum(-1, keepdim=True) if kind == _L2 else along.mean(-1, keepdim=True)
    across = through.mean(-1, keepdim=True) if kind == _LAYERNORM else 0.0
    return statistics[1] * (through - across - normal * along), grad * normal


def _weight_of(fields: Mapping[str, Any]) -> Tensor | float:
    """The factor of each column, fp32; 1 without gamma."""
    gamma = fields["gamma"]
    return 1.0 if gamma is None else gamma.float() + bool(fields["zero_centered"])


def _rows_of(tensor: Tensor) -> Tensor:
    """The rows of heads as a matrix, fp32."""
    return tensor.reshape(-1, tensor.shape[-1]).float()


def norm(fields: Mapping[str, Any]) -> None:
    """Run `_core.norm`."""
    kind, x = fields["kind"], _rows_of(fields["input"])
    given = fields["mean"], fields["rsigma"]
    if fields["statistics_given"]:
        statistics = given[0] if kind == _LAYERNORM else None, given[1]
        statistics = tuple(None if t is None else t[:, None] for t in statistics)
    else:
        statistics = norm_statistics(kind, x, fields["eps"])
        for wanted, made in zip(given, statistics, strict=True):
            if wanted is not None:
                wanted.copy_(made[:, 0])
    values = normalized(x, *statistics) * _weight_of(fields)
    casts.put(values if fields["beta"] is None else values + fields["beta"].float(), fields)


def norm_backward(fields: Mapping[str, Any]) -> None:
    """Run `_core.norm_backward`."""
    kind, grad, added = fields["kind"], fields["grad_output"].float(), fields["grad_add"]
    grad = grad if added is None else grad + added.float()
    mean = fields["mean"][:, None] if kind == _LAYERNORM else None
    statistics = mean, fields["rsigma"][:, None]
    made, of_factors = norm_gradient(
        kind, grad, _rows_of(fields["input"]), _weight_of(fields), statistics
    )
    for name, terms in (("gamma_grad", of_factors), ("beta_grad", grad)):
        if fields[name] is not None:
            fields[name].copy_(terms.sum(0))
    target, residual = fields["grad_input"], fields["grad_residual"]
    if target is None:
        return
    if residual is not None:
        made = made.to(target.dtype).float() + residual.float()
    target.copy_(made.view(target.shape))


# ---- dropouts ------------------------------------------------------------------------------------


def drop(values: Tensor, rng: Tensor, probability: float, first: int = 0) -> Tensor:
    """Values through a dropout: 0 where dropped, whatever they are.

    The decisions are those of elements `first`, ... of the stream `rng`, in the order of `values`,
    which are contiguous or taken so.
    """
    kept = philox.kept(rng, first, values.numel(), probability).view(values.shape)
    return torch.where(kept, values * philox.keep_factor(probability), 0.0)


def _drop_both(values: Tensor, fields: Mapping[str, Any]) -> Tensor:
    """A matrix through the dropout and the drop path of a call."""
    rows, columns = values.shape
    samples, path = fields["samples"], fields["drop_path"]
    if fields["dropout"] > 0.0:
        values = drop(values, fields["rng"], fields["dropout"])
    if path > 0.0:
        first = (rows * columns + 3) // 4 * 4
        kept = philox.kept(fields["rng"], first, samples, path)
        kept = kept[:, None].expand(samples, rows // samples).reshape(rows, 1)
        values = torch.where(kept, values * philox.keep_factor(path), 0.0)
    return values


def dropout_add(fields: Mapping[str, Any]) -> None:
    """Run `_core.dropout_add`."""
    bias, residual = fields["bias"], fields["residual"]
    values = fields["input"].float()
    values = _drop_both(values if bias is None else values + bias.float(), fields)
    fields["output"].copy_(values if residual is None else values + residual.float())


def dropout_backward(fields: Mapping[str, Any]) -> None:
    """Run `_core.dropout_backward`."""
    values = _drop_both(fields["grad_output"].float(), fields)
    if fields["grad_input"] is not None:
        fields["grad_input"].copy_(values)
    if fields["bias_grad"] is not None:
        fields["bias_grad"].copy_(values.sum(0))
