# SPDX-License-Identifier: Apache-2.0
"""Norms of rows and their gradients, by ``_core.norm`` and ``_core.norm_backward``.

Statistics are fp32, [rows] for an input [..., columns]. `sm_margin` is accepted and not needed:
no kernel here waits for others.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from transformer_engine import _core
from transformer_engine.pytorch.cpp_extensions.values import computed, placed, torch_dtype, wide


def _matrix(tensor: Tensor) -> Tensor:
    """[rows, columns] of [..., columns]."""
    if tensor.dim() == 2:
        return tensor
    return tensor.flatten(0, -2) if tensor.dim() > 1 else tensor[None]


def _overlap(one: Tensor, other: Tensor) -> bool:
    """Whether two dense tensors have memory in common."""
    begin, other_begin = one.data_ptr(), other.data_ptr()
    return begin < other_begin + other.nbytes and other_begin < begin + one.nbytes


def _forward(
    op: str, kind: int, tensors: tuple, options: tuple, ln_out: Any, quantizer: Any, out: Any
) -> tuple[Any, Tensor | None, Tensor]:
    input, weight, bias = tensors
    eps, otype, zero_centered = options
    inp, gamma = wide(op, "input", input), wide(op, "weight", weight)
    matrix = _matrix(inp)
    rows = matrix.shape[:1]
    rsigma = placed(out, 2, inp, rows, torch.float32)
    mean = placed(out, 1, inp, rows, torch.float32) if kind == _core.NORM_LAYERNORM else None
    dtype = torch_dtype(op, "otype", otype)
    given = {
        "gamma": gamma,
        "beta": None if bias is None else wide(op, "bias", bias).to(gamma.dtype),
        "mean": mean,
        "rsigma": rsigma,
    }
    run = partial(_core.norm, matrix, kind, **given, eps=eps, zero_centered=zero_centered)
    if type(ln_out) is Tensor and quantizer is None:
        fits = ln_out.dtype == dtype and ln_out.shape == inp.shape and ln_out.is_contiguous()
        if fits and not _overlap(ln_out, inp):
            run(wide=_matrix(ln_out.detach()))
            return ln_out, mean, rsigma
    return computed(op, run, inp, dtype, quantizer, ln_out), mean, rsigma


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
    *,
    out: Sequence[Tensor | None] | None = None,
) -> tuple[Any, Tensor, Tensor]:
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
    del sm_margin
    tensors, options = (input, weight, bias), (eps, otype, zero_centered_gamma)
    kind = _core.NORM_LAYERNORM
    return _forward("layernorm_fwd", kind, tensors, options, ln_out, quantizer, out)


def rmsnorm_fwd(
    input: Tensor,
    weight: Tensor,
    eps: float,
    ln_out: Tensor | None,
    quantizer: Any,
    otype: Any,
    sm_margin: int,
    zero_centered_gamma: bool,
    *,
    out: Sequence[Tensor | None] | None = None,
) -> tuple[Any, Tensor | None, Tensor]:
    """(y, None, rsigma): y = x rsigma weight, rsigma = 1 / sqrt(mean(x²) + eps).

    Arguments as of `layernorm_fwd`.
    """
    del sm_margin
    tensors, options = (input, weight, None), (eps, otype, zero_centered_gamma)
    kind = _core.NORM_RMSNORM
    return _forward("rmsnorm_fwd", kind, tensors, options, ln_out, quantizer, out)


def _backward(
    op: str, kind: int, tensors: tuple, add: Any, zero_centered: bool, out: Any
) -> tuple[Tensor, ...]:
    dy, x, mu, rsigma, gamma = tensors
    grad, inp, gamma = wide(op, "dy", dy), wide(op, "x", x), wide(op, "gamma", gamma)
    made = placed(out, 0, inp, inp.shape), placed(out, 1, gamma, gamma.shape)
    if add is not None:
        add = _matrix(wide(op, "add", add).to(inp.dtype))
    beta_grad = placed(out, 2, gamma, gamma.shape) if kind == _core.NORM_LAYERNORM else None
    _core.norm_backward(
        _matrix(grad),
        _matrix(inp),
        kind,
        wide(op, "rsigma", rsigma).flatten(),
        mean=None if mu is None else wide(op, "mu", mu).flatten(),
        gamma=gamma,
        grad_residual=add,
        grad_input=_matrix(made[0]),
        gamma_grad=made[1],
        beta_grad=beta_grad,
        zero_centered=zero_centered,
    )
    return made if beta_grad is None else (*made, beta_grad)


def layernorm_bwd(
    dy: Tensor,
    x: Tensor,
    mu: Tensor,
    rsigma: Tensor,
    gamma: Tensor,
    sm_margin: int = 0,
    zero_centered_gamma: bool = False,
    *,
    out: Sequence[Tensor | None] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dx, dgamma, dbeta) of `layernorm_fwd`, in the dtypes of x and gamma.

    `mu` and `rsigma` [rows] fp32 are those of the forward; `out`: where results go, see
    `values.placed`. TypeError or ValueError for arguments that do not go together.
    """
    del sm_margin
    tensors = dy, x, mu, rsigma, gamma
    kind = _core.NORM_LAYERNORM
    return _backward("layernorm_bwd", kind, tensors, None, zero_centered_gamma, out)


def rmsnorm_bwd(
    dy: Tensor,
    x: Tensor,
    rsigma: Tensor,
    gamma: Tensor,
    sm_margin: int = 0,
    zero_centered_gamma: bool = False,
    eps: float = 1e-05,
    *,
    out: Sequence[Tensor | None] | None = None,
) -> tuple[Tensor, Tensor]:
    """(dx, dgamma) of `rmsnorm_fwd`; arguments as of `layernorm_bwd`, `eps` is in `rsigma`."""
    del sm_margin, eps
    tensors = dy, x, None, rsigma, gamma
    return _backward("rmsnorm_bwd", _core.NORM_RMSNORM, tensors, None, zero_centered_gamma, out)


def rmsnorm_bwd_add(
    dz: Tensor,
    x: Tensor,
    add: Tensor,
    rsigma: Tensor,
    gamma: Tensor,
    sm_margin: int,
    zero_centered_gamma: bool,
    *,
    out: Sequence[Tensor | None] | None = None,
) -> tuple[Tensor, Tensor]:
    """`rmsnorm_bwd` with `add`, of the shape of `x`, added to dx as it is rounded."""
    del sm_margin
    tensors = dz, x, None, rsigma, gamma
    op, kind = "rmsnorm_bwd_add", _core.NORM_RMSNORM
    return _backward(op, kind, tensors, add, zero_centered_gamma, out)
