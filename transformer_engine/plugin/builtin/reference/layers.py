# SPDX-License-Identifier: Apache-2.0
"""Activations, norms, softmax, dropout and products; see `builtin.layers`.

The mask of dropout is bool, of the shape of the input: True is kept.
"""

import functools
from typing import Any

import torch
from torch import Tensor

from transformer_engine import _core
from transformer_engine.plugin.builtin import layers as native
from transformer_engine.plugin.builtin.signatures import define, operator
from transformer_engine.plugin.definitions.layers import (
    activate,
    activation_gradient,
    norm_gradient,
    norm_statistics,
    normalized,
)
from transformer_engine.plugin.definitions.scores import softmax_gradient, weigh
from transformer_engine.pytorch.constants import torch_dtype
from transformer_engine.pytorch.cpp_extensions.values import (
    checked,
    exact,
    quantized,
    refuse,
    written,
)
from transformer_engine.pytorch.torchside.modes import in_own_dtypes


def _numbers(kind: str, call: Any) -> dict[str, float]:
    return {"limit": call.limit, "alpha": call.alpha} if kind == "clamped_swiglu" else {}


def _activated(op: str, kind: str, call: Any) -> Any:
    made = activate(kind, exact(op, "input", call.input), **_numbers(kind, call))
    return quantized(op, made.to(call.input.dtype), call.quantizer)


def _activation_gradient(op: str, kind: str, call: Any) -> Any:
    x, grad = exact(op, "fwd_input", call.fwd_input), exact(op, "grad", call.grad)
    made = activation_gradient(kind, x, grad, **_numbers(kind, call))
    cast = quantized(op, made.to(call.fwd_input.dtype), call.quantizer)
    if not op.startswith("dbias_"):
        return cast
    return made.reshape(-1, made.shape[-1]).sum(0).to(call.grad.dtype), cast


native.define_activations(globals(), _activated, _activation_gradient)


# ---- norms ---------------------------------------------------------------------------------------


def _kind(op: str) -> int:
    return _core.NORM_LAYERNORM if op.startswith("layernorm") else _core.NORM_RMSNORM


def _normed(op: str, call: Any) -> tuple[Any, Tensor | None, Tensor]:
    """(y, mu or None, rsigma) of rows, less their means in a layernorm."""
    x = exact(op, "input", call.input)
    mu, rsigma = norm_statistics(_kind(op), x, call.eps)
    y = normalized(x, mu, rsigma) * (exact(op, "weight", call.weight) + call.zero_centered_gamma)
    bias = getattr(call, "bias", None)
    y = y if bias is None else y + exact(op, "bias", bias)
    y = quantized(op, y.to(torch_dtype(op, "otype", call.otype)), call.quantizer, call.ln_out)
    return y, None if mu is None else mu.flatten(), rsigma.flatten()


def _norm_gradient(op: str, call: Any) -> tuple[Tensor, ...]:
    """(dx with what is added to it, gradients of gamma, of beta in a layernorm)."""
    rows, kind, mu = (*call.x.shape[:-1], 1), _kind(op), None
    grad = exact(op, "dy", call.dz if op == "rmsnorm_bwd_add" else call.dy)
    if kind == _core.NORM_LAYERNORM:
        mu = exact(op, "mu", call.mu).view(rows)
    weight = exact(op, "gamma", call.gamma) + call.zero_centered_gamma
    statistics = mu, exact(op, "rsigma", call.rsigma).view(rows)
    dx, of_gamma = norm_gradient(kind, grad, exact(op, "x", call.x), weight, statistics)
    dx = dx + exact(op, "add", call.add) if op == "rmsnorm_bwd_add" else dx
    of_factors = of_gamma, *((grad,) if mu is not None else ())
    sums = [each.reshape(-1, call.x.shape[-1]).sum(0).to(call.gamma.dtype) for each in of_factors]
    return dx.to(call.x.dtype), *sums


for _op in ("layernorm_fwd", "rmsnorm_fwd", "layernorm_bwd", "rmsnorm_bwd", "rmsnorm_bwd_add"):
    _run = functools.partial(_normed if _op.endswith("_fwd") else _norm_gradient, _op)
    define(globals(), _op, _run, getattr(native, _op).__doc__)


# ---- softmax -------------------------------------------------------------------------------------


def _softmax(op: str, call: Any) -> Tensor:
    """Softmax of scale * input where nothing is masked; 0 in a row where everything is."""
    queries, keys = call.input.shape[-2:]
    masked = torch.zeros(queries, keys, dtype=torch.bool, device=call.input.device)
    if hasattr(call, "mask"):
        masked = call.mask != 0
    elif op != "scaled_softmax_forward":  # keys behind the query: the last of both go together
        masked = (~masked).triu(keys - queries + 1)
    scores = (exact(op, "input", call.input) * call.scale).masked_fill(masked, -torch.inf)
    return weigh(scores).weights.to(call.input.dtype)


def _softmax_gradient(op: str, call: Any) -> Tensor:
    """Compute scale * p * (dp - sum of dp * p over the last dim), whatever was masked."""
    p, grad = exact(op, "softmax_output", call.softmax_output), exact(op, "", call.output_grad)
    made, _ = softmax_gradient(p, grad, call.scale)
    return made.to(call.softmax_output.dtype)


native.define_softmax(globals(), _softmax, _softmax_gradient)


# ---- dropout -------------------------------------------------------------------------------------


@operator
def dropout_fwd(call: Any) -> tuple[Tensor, Tensor]:
    """(result, mask)."""
    op, inp = "dropout_fwd", checked("dropout_fwd", "input", call.input)
    p = native.probability(op, call.dropout_probability)
    mask = torch.rand(inp.shape, dtype=torch.float32, device=inp.device) >= p
    return written(op, "out", _masked(inp, mask, p), call.out), mask


@operator
def dropout_bwd(call: Any) -> Tensor:
    """Gradient of the input of `dropout_fwd`; ValueError for a mask of another implementation."""
    op, mask = "dropout_bwd", call.mask
    grad = checked(op, "grad_output", call.grad_output)
    if mask.dtype != torch.bool or mask.shape != grad.shape:
        raise ValueError(
            f"{op}: mask: {mask.dtype} {tuple(mask.shape)}, expected the bool "
            f"{tuple(grad.shape)} of dropout_fwd of the same implementation"
        )
    p = native.probability(op, call.dropout_probability)
    return written(op, "grad_input", _masked(grad, mask, p), call.grad_input)


def _masked(values: Tensor, mask: Tensor, p: float) -> Tensor:
    factor = 1.0 / (1.0 - p) if p < 1.0 else 0.0
    return (exact("dropout", "", values) * mask * factor).to(values.dtype)


# ---- products ------------------------------------------------------------------------------------


@in_own_dtypes
@operator
def generic_gemm(call: Any) -> tuple[Any, Tensor | None, Tensor | None, Tensor | None]:
    """D = epilogue(alpha op(B) op(A) + beta D + bias), as row-major matrices."""
    op, bias, gelu_in = "generic_gemm", call.bias, call.gelu_in
    refuse(op, **{name: getattr(call, name) for name in native.WAITING})
    left, right = exact(op, "B", call.B), exact(op, "A", call.A).flatten(0, -2)
    right = right.t() if call.transA else right
    left = left.flatten(0, -2).t() if call.transB else left
    total = call.alpha * (left @ right)
    if call.accumulate:
        total = total + (1.0 if call.beta is None else call.beta) * exact(op, "D", call.D)
    wanted = bias is not None and bias.numel() > 0
    if wanted and not call.grad:
        total = total + exact(op, "bias", bias)
    dtype = call.A.dtype if call.D is None else call.D.dtype
    if call.output_dtype is not None:
        dtype = torch_dtype(op, "output_dtype", call.output_dtype)
    before = sums = None
    if call.gelu and call.grad:
        before = gelu_in
        x = exact(op, "gelu_in", gelu_in).view(total.shape)
        total = activation_gradient("gelu", x, total)
        sums = total.flatten(0, -2).sum(0) if wanted else None
    elif call.gelu:
        before = total.to(dtype)
        if gelu_in is not None:
            gelu_in.detach().copy_(before.view(gelu_in.shape))
            before = gelu_in
        total = activate("gelu", total)
    elif call.grad and wanted:
        sums = left.flatten(0, -2).sum(1)
    sums = None if sums is None else sums.to(bias.dtype)
    return quantized(op, total.to(dtype), call.quantizer, call.D), sums, before, None
