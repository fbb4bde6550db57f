# SPDX-License-Identifier: Apache-2.0
"""Activations, norms, softmax, dropout and products, by operators of `_core`.

Statistics of norms are fp32, [rows] for an input [..., columns]; `sm_margin` is accepted and not
needed: no kernel here waits for others. Scores of a softmax are [batch, heads, queries, keys], or
with an upper triangular mask [batch, queries, queries]. The probabilities have their shape and
dtype; a row in which everything is masked is 0. `generic_gemm` is `general_gemm` by other
arguments.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from transformer_engine import _core
from transformer_engine.plugin.builtin import ACTIVATIONS
from transformer_engine.plugin.builtin.signatures import define, operator
from transformer_engine.pytorch.constants import torch_dtype
from transformer_engine.pytorch.cpp_extensions.product import product
from transformer_engine.pytorch.cpp_extensions.values import (
    computed,
    matrix,
    placed,
    quantized,
    refuse,
    wide,
    written,
)
from transformer_engine.pytorch.execution.overrides import native
from transformer_engine.pytorch.execution.random import draw_pair

_KINDS = {name: kind for kind, name in enumerate(_core.activation_names())}
_OF_ROWS = "`{}` of [..., columns]"
_OF_HALVES = f"{_OF_ROWS}; of a gated one, [..., 2 columns]: the first half is activated, the second a factor"  # noqa: E501
_CLAMPED = (
    "Compute a' sigmoid(alpha a') (b' + 1), a' = min(a, limit), b' = clamp(b, ±limit), of [a b]"
)
_FORWARD = """.

In fp32, rounded to the dtype of `input`; cast by `quantizer` where that is not None. `out`: where
the result goes, see `values.placed`. TypeError or ValueError for other arguments.
"""
_GRADIENT = """Gradient of the input of `{}`, of the shape and dtype of `fwd_input`.

`grad` is that of its result; cast by `quantizer` where that is not None.
"""
_WITH_SUMS = """(gradient of the bias before `{0}`, `d{0}`).

The first are the column sums of the second before its cast, [columns] in the dtype of `grad`.
"""


def define_activations(module: dict[str, Any], forward: Callable, backward: Callable) -> None:
    """Define all activations and their gradients in a module, by its ``globals()``.

    Both functions are given the operator, the activation and what `operator` gives. `backward` is
    one of gradients with column sums, too, those whose names begin with "dbias_".
    """
    for kind, gradients in ACTIVATIONS.items():
        text = _OF_HALVES if kind.endswith("glu") else _OF_ROWS
        text = _CLAMPED if kind == "clamped_swiglu" else text
        runs, docs = (forward, backward, backward), (text + _FORWARD, _GRADIENT, _WITH_SUMS)
        for op, run, doc in zip((kind, *gradients), runs, docs, strict=False):
            define(module, op, partial(run, op, kind), doc.format(kind))


def numbers_of(call: Any) -> dict[str, float]:
    """Further arguments of an activation that has such."""
    return {name: getattr(call, name) for name in ("limit", "alpha") if hasattr(call, name)}


def _activated(op: str, kind: str, call: Any, out: Any) -> Any:
    inp = wide(op, "input", call.input)
    columns = inp.shape[-1]
    if kind.endswith("glu"):
        if columns % 2:
            raise ValueError(f"{op}: input: {columns} columns, expected two halves")
        columns //= 2
    made = placed(out, 0, inp, (*inp.shape[:-1], columns))
    _core.activation(inp, _KINDS[kind], wide=made, **numbers_of(call))
    return quantized(op, made, call.quantizer)


def _activation_gradient(op: str, kind: str, call: Any, out: Any) -> Any:
    inp, grad = wide(op, "fwd_input", call.fwd_input), wide(op, "grad", call.grad)
    sums: Tensor | None = None
    if op.startswith("dbias_"):
        sums = placed(out, 0, inp, inp.shape[-1:], grad.dtype)
    made = placed(out, -1, inp, inp.shape)
    given = {"wide": made, "bias_grad": sums, **numbers_of(call)}
    _core.activation_backward(grad, inp, _KINDS[kind], **given)
    cast = quantized(op, made, call.quantizer)
    return cast if sums is None else (sums, cast)


define_activations(globals(), _activated, _activation_gradient)


# ---- norms ---------------------------------------------------------------------------------------


def _overlap(one: Tensor, other: Tensor) -> bool:
    """Return whether two dense tensors have memory in common."""
    begin, other_begin = one.data_ptr(), other.data_ptr()
    return begin < other_begin + other.nbytes and other_begin < begin + one.nbytes


def _normed(op: str, call: Any, bias: Any, out: Any) -> tuple[Any, Tensor | None, Tensor]:
    kind = _core.NORM_LAYERNORM if op == "layernorm_fwd" else _core.NORM_RMSNORM
    inp, gamma = wide(op, "input", call.input), wide(op, "weight", call.weight)
    flat, ln_out = matrix(inp), call.ln_out
    rows = flat.shape[:1]
    rsigma = placed(out, 2, inp, rows, torch.float32)
    mean = placed(out, 1, inp, rows, torch.float32) if kind == _core.NORM_LAYERNORM else None
    dtype = torch_dtype(op, "otype", call.otype)
    given = {
        "gamma": gamma,
        "beta": None if bias is None else wide(op, "bias", bias).to(gamma.dtype),
        "mean": mean,
        "rsigma": rsigma,
    }
    options = {"eps": call.eps, "zero_centered": call.zero_centered_gamma}
    run = partial(_core.norm, flat, kind, **given, **options)
    if type(ln_out) is Tensor and call.quantizer is None:
        fits = ln_out.dtype == dtype and ln_out.shape == inp.shape and ln_out.is_contiguous()
        if fits and not _overlap(ln_out, inp):
            run(wide=matrix(ln_out.detach()))
            return ln_out, mean, rsigma
    return computed(op, run, inp, dtype, call.quantizer, ln_out), mean, rsigma


@operator
def layernorm_fwd(call: Any, out: Any) -> tuple[Any, Tensor, Tensor]:
    """(y, mu, rsigma): y = (x - mu) rsigma weight + bias, rsigma = 1 / sqrt(var + eps), by rows.

    Parameters
    ----------
    input : Tensor
        [..., columns] fp32, fp16 or bf16.
    weight, bias : Tensor
        [columns]; no bias where None.
    eps : float
        Added to the variance.
    ln_out : Tensor, optional
        To be written, and returned.
    quantizer : Quantizer, optional
        What casts y.
    otype : torch.dtype or DType
        Of y, before its cast.
    sm_margin : int
        Not needed.
    zero_centered_gamma : bool
        The factor is 1 + weight.
    out : sequence of Tensor, optional
        Where y, mu and rsigma go; see `values.placed`. That of y is `ln_out`.

    Raises
    ------
    TypeError, ValueError
        Arguments that do not go together.
    """
    return _normed("layernorm_fwd", call, call.bias, out)


@operator
def rmsnorm_fwd(call: Any, out: Any) -> tuple[Any, Tensor | None, Tensor]:
    """(y, None, rsigma): y = x rsigma weight, rsigma = 1 / sqrt(mean(x²) + eps).

    Arguments as of `layernorm_fwd`.
    """
    return _normed("rmsnorm_fwd", call, None, out)


def _norm_gradient(
    op: str, call: Any, dy: Any, out: Any, mu: Any = None, add: Any = None
) -> tuple[Tensor, ...]:
    kind = _core.NORM_LAYERNORM if op == "layernorm_bwd" else _core.NORM_RMSNORM
    grad, inp, gamma = wide(op, "dy", dy), wide(op, "x", call.x), wide(op, "gamma", call.gamma)
    made = placed(out, 0, inp, inp.shape), placed(out, 1, gamma, gamma.shape)
    if add is not None:
        add = matrix(wide(op, "add", add).to(inp.dtype))
    beta_grad = placed(out, 2, gamma, gamma.shape) if kind == _core.NORM_LAYERNORM else None
    _core.norm_backward(
        matrix(grad),
        matrix(inp),
        kind,
        wide(op, "rsigma", call.rsigma).flatten(),
        mean=None if mu is None else wide(op, "mu", mu).flatten(),
        gamma=gamma,
        grad_residual=add,
        grad_input=matrix(made[0]),
        gamma_grad=made[1],
        beta_grad=beta_grad,
        zero_centered=call.zero_centered_gamma,
    )
    return made if beta_grad is None else (*made, beta_grad)


@operator
def layernorm_bwd(call: Any, out: Any) -> tuple[Tensor, ...]:
    """(dx, dgamma, dbeta) of `layernorm_fwd`, in the dtypes of x and gamma.

    `mu` and `rsigma` [rows] fp32 are those of the forward; `out`: where results go, see
    `values.placed`. TypeError or ValueError for arguments that do not go together.
    """
    return _norm_gradient("layernorm_bwd", call, call.dy, out, call.mu)


@operator
def rmsnorm_bwd(call: Any, out: Any) -> tuple[Tensor, ...]:
    """(dx, dgamma) of `rmsnorm_fwd`; arguments as of `layernorm_bwd`, `eps` is in `rsigma`."""
    return _norm_gradient("rmsnorm_bwd", call, call.dy, out)


@operator
def rmsnorm_bwd_add(call: Any, out: Any) -> tuple[Tensor, ...]:
    """`rmsnorm_bwd` with `add`, of the shape of `x`, added to dx as it is rounded."""
    return _norm_gradient("rmsnorm_bwd_add", call, call.dz, out, add=call.add)


# ---- softmax -------------------------------------------------------------------------------------


_OVER = {
    "": "the last of four dims",
    "masked_": "the last of four where `mask` (bool or uint8, each dim 1 or the input's) is 0",
    "upper_triang_masked_": "the keys up to the query, of [batch, queries, queries]",
    "aligned_causal_masked_": "the keys up to the query; the last of both go together",
}


def define_softmax(module: dict[str, Any], forward: Callable, backward: Callable) -> None:
    """Define all in a module, by its ``globals()``, of functions of an operator and its call."""
    for kind, over in _OVER.items():
        op, gradient = f"scaled_{kind}softmax_forward", f"scaled_{kind}softmax_backward"
        define(module, op, partial(forward, op), f"Softmax of scale * input over {over}.")
        doc = f"Gradient of the input of `{op}`, from its result."
        define(module, gradient, partial(backward, gradient), doc)


def _softmax(op: str, call: Any) -> Tensor:
    scores, limits = wide(op, "input", call.input), {}
    dims = 3 if "triang" in op else 4
    if scores.dim() != dims:
        raise ValueError(f"{op}: input: shape {tuple(scores.shape)}, expected {dims} dims")
    queries, keys = scores.shape[-2:]
    if dims == 3 and queries != keys:
        raise ValueError(f"{op}: input: shape {tuple(scores.shape)}, expected square matrices")
    if hasattr(call, "mask"):
        if call.mask.dtype not in (torch.bool, torch.uint8):
            raise TypeError(f"{op}: mask: {call.mask.dtype}, expected torch.bool or torch.uint8")
        limits = {"mask": call.mask.view(torch.uint8)}
    elif op != "scaled_softmax_forward":
        limits = {"window_right": 0, "diagonal": keys - queries}
    out = torch.empty_like(scores)
    tensors = (t if dims == 4 else t[None] for t in (scores, out))
    _core.softmax(*tensors, scale=call.scale, **limits)
    return out


def _softmax_gradient(op: str, call: Any) -> Tensor:
    grad = wide(op, "output_grad", call.output_grad)
    probabilities = wide(op, "softmax_output", call.softmax_output)
    made = torch.empty_like(probabilities)
    tensors = (t if t.dim() != 3 else t[None] for t in (grad, probabilities, made))
    _core.softmax_backward(*tensors, scale=call.scale)
    return made


define_softmax(globals(), _softmax, _softmax_gradient)


# ---- dropout -------------------------------------------------------------------------------------


@operator
def dropout_fwd(call: Any) -> tuple[Tensor, Tensor]:
    """(result, mask): elements are 0 with a probability, the others multiplied by 1 / (1 - p).

    Parameters
    ----------
    input : Tensor
        fp32, fp16 or bf16, with at least one dim.
    dropout_probability : float
        From 0 to 1; ValueError otherwise.
    out : Tensor, optional
        To be written, and returned.

    Returns
    -------
    (Tensor, Tensor)
        The mask is what `dropout_bwd` of the same implementation reads: here the int64 [2] seed and
        offset of the random decisions, drawn from torch's generator.
    """
    op = "dropout_fwd"
    inp = wide(op, "input", call.input)
    made = torch.empty_like(inp)
    rng = draw_pair(inp)
    _core.dropout_add(inp, made, rng=rng, dropout=probability(op, call.dropout_probability))
    return written(op, "out", made, call.out), rng


@operator
def dropout_bwd(call: Any) -> Tensor:
    """Gradient of the input of `dropout_fwd`; into `grad_input` where that is given.

    `mask` is that of the forward; ValueError for one of another implementation.
    """
    op, mask = "dropout_bwd", call.mask
    grad = wide(op, "grad_output", call.grad_output)
    if mask.dtype != torch.int64 or tuple(mask.shape) != (2,):
        raise ValueError(
            f"{op}: mask: {mask.dtype} {tuple(mask.shape)}, expected the int64 [2] of dropout_fwd "
            "of the same implementation"
        )
    made = torch.empty_like(grad)
    p = probability(op, call.dropout_probability)
    _core.dropout_backward(grad, grad_input=made, rng=mask, dropout=p)
    return written(op, "grad_input", made, call.grad_input)


def probability(op: str, value: float) -> float:
    """A `dropout_probability`; ValueError for none."""
    if not 0.0 <= value <= 1.0:
        raise ValueError(f"{op}: dropout_probability={value}, expected a number from 0 to 1")
    return float(value)


# ---- products ------------------------------------------------------------------------------------


WAITING = ("comm_overlap", "extra_output", "bulk_overlap")
"""Arguments that wait for user buffers."""


@native
@operator
def generic_gemm(call: Any) -> tuple[Any, Tensor | None, Tensor | None, Tensor | None]:
    """D = epilogue(alpha op(B) op(A) + beta D + bias), as row-major matrices.

    op transposes where `transA`, `transB` say so; leading dims of a matrix are flattened. Sums are
    fp32. With alpha and beta at their defaults, a bias in the dtype of the result (of quantized
    operands: bf16, or fp16 where the result is) and operands that one GEMM reads, one native call
    computes all of it; else the product is made in fp32 and the rest is torch's. So is the gradient
    of a bias of quantized operands, or of operands in another dtype than the bias has.

    Parameters
    ----------
    A, B, bias, gelu, gelu_in, grad, accumulate, use_split_accumulator, alpha, beta
        As of `general_gemm`. Row-wise data are read of `A` where `transA`, and of `B` where not
        `transB`; else column-wise ones.
    D, quantizer, output_dtype
        What `out`, `quantization_params` and `out_dtype` are there.
    comm_overlap, extra_output, bulk_overlap
        NotImplementedError unless None or False: they wait for user buffers.
    bias_type, workspace, workspace_size, comm_type
        Not needed.

    Returns
    -------
    tuple
        (result, gradient of the bias or None, what gelu was applied to or None, None). The gradient
        of the bias are the sums of op(B), dequantized, over what the product sums over, or with
        `gelu` the column sums of the result.

    Raises
    ------
    TypeError, ValueError
        Arguments that do not go together.
    """
    op = "generic_gemm"
    refuse(op, **{name: getattr(call, name) for name in WAITING})
    return product(
        op,
        (call.A, call.transA, call.B, call.transB),
        (call.D, call.quantizer, call.output_dtype),
        (call.bias, call.gelu, call.gelu_in, call.grad),
        (call.accumulate, call.alpha, call.beta),
        call.use_split_accumulator,
    )
