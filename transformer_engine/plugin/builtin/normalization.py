# SPDX-License-Identifier: Apache-2.0
"""Norms of rows and their gradients, by ``_core.norm`` and ``_core.norm_backward``.

Statistics are fp32, [rows] for an input [..., columns]. `sm_margin` is accepted and not needed:
no kernel here waits for others.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from transformer_engine import _core
from transformer_engine.plugin.builtin.signatures import operator
from transformer_engine.pytorch.cpp_extensions.values import computed, placed, torch_dtype, wide


def _matrix(tensor: Tensor) -> Tensor:
    """[rows, columns] of [..., columns]."""
    if tensor.dim() == 2:
        return tensor
    return tensor.flatten(0, -2) if tensor.dim() > 1 else tensor[None]


def _overlap(one: Tensor, other: Tensor) -> bool:
    """Return whether two dense tensors have memory in common."""
    begin, other_begin = one.data_ptr(), other.data_ptr()
    return begin < other_begin + other.nbytes and other_begin < begin + one.nbytes


def _forward(op: str, call: Any, bias: Any, out: Any) -> tuple[Any, Tensor | None, Tensor]:
    kind = _core.NORM_LAYERNORM if op == "layernorm_fwd" else _core.NORM_RMSNORM
    inp, gamma = wide(op, "input", call.input), wide(op, "weight", call.weight)
    matrix, ln_out = _matrix(inp), call.ln_out
    rows = matrix.shape[:1]
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
    run = partial(_core.norm, matrix, kind, **given, **options)
    if type(ln_out) is Tensor and call.quantizer is None:
        fits = ln_out.dtype == dtype and ln_out.shape == inp.shape and ln_out.is_contiguous()
        if fits and not _overlap(ln_out, inp):
            run(wide=_matrix(ln_out.detach()))
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
    return _forward("layernorm_fwd", call, call.bias, out)


@operator
def rmsnorm_fwd(call: Any, out: Any) -> tuple[Any, Tensor | None, Tensor]:
    """(y, None, rsigma): y = x rsigma weight, rsigma = 1 / sqrt(mean(x²) + eps).

    Arguments as of `layernorm_fwd`.
    """
    return _forward("rmsnorm_fwd", call, None, out)


def _backward(
    op: str, call: Any, dy: Any, out: Any, mu: Any = None, add: Any = None
) -> tuple[Tensor, ...]:
    kind = _core.NORM_LAYERNORM if op == "layernorm_bwd" else _core.NORM_RMSNORM
    grad, inp, gamma = wide(op, "dy", dy), wide(op, "x", call.x), wide(op, "gamma", call.gamma)
    made = placed(out, 0, inp, inp.shape), placed(out, 1, gamma, gamma.shape)
    if add is not None:
        add = _matrix(wide(op, "add", add).to(inp.dtype))
    beta_grad = placed(out, 2, gamma, gamma.shape) if kind == _core.NORM_LAYERNORM else None
    _core.norm_backward(
        _matrix(grad),
        _matrix(inp),
        kind,
        wide(op, "rsigma", call.rsigma).flatten(),
        mean=None if mu is None else wide(op, "mu", mu).flatten(),
        gamma=gamma,
        grad_residual=add,
        grad_input=_matrix(made[0]),
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
    return _backward("layernorm_bwd", call, call.dy, out, call.mu)


@operator
def rmsnorm_bwd(call: Any, out: Any) -> tuple[Tensor, ...]:
    """(dx, dgamma) of `rmsnorm_fwd`; arguments as of `layernorm_bwd`, `eps` is in `rsigma`."""
    return _backward("rmsnorm_bwd", call, call.dy, out)


@operator
def rmsnorm_bwd_add(call: Any, out: Any) -> tuple[Tensor, ...]:
    """`rmsnorm_bwd` with `add`, of the shape of `x`, added to dx as it is rounded."""
    return _backward("rmsnorm_bwd_add", call, call.dz, out, add=call.add)
