# SPDX-License-Identifier: Apache-2.0
"""Steps of optimizers over lists of tensors, by the C library in one pass.

An operation takes ``(chunk_size, noop_flag, tensor_lists, ...)``: lists of one length, of grads,
parameters, ...; `chunk_size` is not needed. Where the int32 element of `noop_flag` is not 0 nothing
is written. No operation waits for the device.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from transformer_engine import _core
from transformer_engine.pytorch.constants import DType, torch_dtype
from transformer_engine.pytorch.execution.overrides import operator_of_lists
from transformer_engine.pytorch.optimizers.updates import Lists, checked_lists, run_update
from transformer_engine.pytorch.tensor.mxfp8_tensor import MXFP8Quantizer


def _adam(
    flag: Tensor,
    lists: list,
    lr: Any,
    beta1: float,
    beta2: float,
    eps: float,
    step: Any,
    mode: int,
    bias_correction: int,
    decay: float,
    inv_scale: Tensor | None = None,
    **other: Any,
) -> None:
    """Update gradients, values, means, means of squares and, where they are there, two more lists.

    Those are values that the new ones are rounded into, and remainders. `inv_scale`: gradients are
    left times this. `other`: ``casts`` of `run_update`.
    """
    if mode not in (0, 1):
        raise ValueError(f"multi_tensor_adam: mode={mode!r}, expected 0 (L2) or 1 (AdamW)")
    flags = _core.UPDATE_DECOUPLED if mode else 0
    flags |= _core.UPDATE_CORRECTED if bias_correction else 0
    numbers = {"lr": lr, "betas": (beta1, beta2), "eps": eps, "decay": decay}
    if inv_scale is not None:
        flags |= _core.UPDATE_WRITE_GRAD
        numbers["grad_scale"] = inv_scale
    lists = [*lists, None, None][:6]
    run_update(_core.UPDATE_ADAM, flags, lists, flag, numbers, step, **other)


def _masters_first(lists: list) -> list:
    """Lists whose fifth, where there is one, is updated and rounded into the second."""
    return lists if len(lists) == 4 else [lists[0], lists[4], *lists[2:4], lists[1]]


@operator_of_lists
def multi_tensor_adam(
    chunk_size: int | None = None,
    noop_flag: Tensor | None = None,
    tensor_lists: Lists | None = None,
    lr: float | None = None,
    beta1: float | None = None,
    beta2: float | None = None,
    eps: float | None = None,
    step: int | None = None,
    mode: int | None = None,
    bias_correction: int | None = None,
    weight_decay: float | None = None,
) -> Any:
    """One step of Adam, in fp32; called with nothing, this function itself.

    Parameters
    ----------
    noop_flag : Tensor
        int32 [1].
    tensor_lists : list of list of Tensor
        Gradients, parameters, means, means of squares; then maybe fp32 parameters, which are
        updated in place of the others, and rounded into them. Any floating dtypes.
    lr, beta1, beta2, eps, weight_decay : float
        As of `torch.optim.Adam`.
    step : int
        From 1.
    mode : int
        0: weight decay is added to the gradient; 1: it is apart (AdamW).
    bias_correction : int
        Divide means by 1 - beta^step.

    Raises
    ------
    ValueError
        Lists of other numbers or lengths, another mode.
    """
    if noop_flag is None:
        return multi_tensor_adam
    lists = _masters_first(checked_lists("multi_tensor_adam", tensor_lists, 4, 5))
    rest = mode, bias_correction, weight_decay
    return _adam(noop_flag, lists, lr, beta1, beta2, eps, step, *rest)


def multi_tensor_adam_cast(
    casts: list[dict], chunk_size: int, noop_flag: Tensor, tensor_lists: Lists, *numbers: Any
) -> None:
    """`multi_tensor_adam` of four lists, whose new values are cast.

    `casts` are fields of `_core.quantize` for each of the values; `numbers` as there, or as of
    `multi_tensor_adam_capturable`.
    """
    lists = checked_lists("multi_tensor_adam_cast", tensor_lists, 4)
    _adam(noop_flag, lists, *numbers, casts=casts)


def _capturable(op: str, count: int, doc: str) -> Callable:
    """An operation of so many lists, whose numbers are on the device."""

    def step(
        chunk_size: int,
        noop_flag: Tensor,
        tensor_lists: Lists,
        lr: Tensor,
        beta1: float,
        beta2: float,
        epsilon: float,
        step: Tensor,
        mode: int,
        bias_correction: int,
        weight_decay: float,
        inv_scale: Tensor,
    ) -> None:
        lists = _masters_first(checked_lists(op, tensor_lists, count))
        rest = mode, bias_correction, weight_decay, inv_scale
        _adam(noop_flag, lists, lr, beta1, beta2, epsilon, step, *rest)

    step.__name__ = step.__qualname__ = op
    step.__doc__ = doc
    return operator_of_lists(step)


multi_tensor_adam_capturable = _capturable(
    "multi_tensor_adam_capturable",
    4,
    """`multi_tensor_adam` of four lists, with `lr`, `step` and a factor of gradients on the device.

    `lr` and `inv_scale` are fp32, `step` int32, tensors of one element. Gradients are left times
    `inv_scale`.
    """,
)
multi_tensor_adam_capturable_master = _capturable(
    "multi_tensor_adam_capturable_master",
    5,
    """`multi_tensor_adam_capturable` with fp32 parameters as a fifth list.""",
)


@operator_of_lists
def multi_tensor_adam_fp8(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: Lists,
    lr: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: int,
    mode: int,
    bias_correction: int,
    weight_decay: float,
    fp8_dtype: Any,
) -> None:
    """`multi_tensor_adam` of parameters in FP8, which are cast of fp32 ones by their scale.

    The lists are gradients, codes (uint8), means, means of squares, fp32 parameters, scales, amaxes
    and inverse scales, the last three fp32 of one element each: amaxes are raised, inverse scales
    written.
    """
    op = "multi_tensor_adam_fp8"
    lists = checked_lists(op, tensor_lists, 8)
    grads, codes, means, squares, masters, scales, amaxes, inverses = lists
    dtype = torch_dtype(op, "fp8_dtype", fp8_dtype)
    if dtype not in (torch.float8_e4m3fn, torch.float8_e5m2):
        raise TypeError(f"{op}: fp8_dtype={fp8_dtype!r}, expected an FP8 DType")
    rest = mode, bias_correction, weight_decay
    made = [scale.new_empty(2) for scale in scales]  # inverses, and the scales themselves
    casts = []
    for code, master, pair, scale, amax in zip(codes, masters, made, scales, amaxes, strict=True):
        fields = {"row": code.view(dtype).view(master.shape), "row_scales": pair}
        fields |= {"scale": scale.view(1), "amax": amax.view(1)}
        casts.append({"mode": _core.SCALING_TENSOR, **fields})
    lists = [grads, masters, means, squares]
    _adam(noop_flag, lists, lr, beta1, beta2, epsilon, step, *rest, casts=casts)
    skip = noop_flag.detach().reshape(()) != 0
    for inverse, pair in zip(inverses, made, strict=True):
        inverse.copy_(torch.where(skip.to(inverse.device), inverse, pair[0]))


@operator_of_lists
def multi_tensor_adam_param_remainder(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: Lists,
    lr: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: int,
    mode: int,
    bias_correction: int,
    weight_decay: float,
) -> None:
    """`multi_tensor_adam` of fp32 parameters that are kept as bf16 ones and what these lack.

    The lists are gradients, parameters (bf16), means, means of squares, and the low 16 bits of the
    fp32 parameters (int16). A parameter is the high 16 bits, and one more where the low ones are
    negative: rounded to nearest.
    """
    op = "multi_tensor_adam_param_remainder"
    grads, params, means, squares, rests = checked_lists(op, tensor_lists, 5)
    for param, low in zip(params, rests, strict=True):
        if param.dtype != torch.bfloat16 or low.dtype != torch.int16:
            raise TypeError(
                f"{op}: a parameter of {param.dtype}, low bits of {low.dtype}: expected "
                "torch.bfloat16 and torch.int16"
            )
    bits = [low.view(torch.bfloat16) for low in rests]  # whatever they mean
    lists = [grads, params, means, squares, None, bits]
    rest = mode, bias_correction, weight_decay
    _adam(noop_flag, lists, lr, beta1, beta2, epsilon, step, *rest)


@operator_of_lists
def multi_tensor_sgd(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: Lists,
    wd: float,
    momentum: float,
    dampening: float,
    lr: float,
    nesterov: bool,
    first_run: bool,
    wd_after_momentum: bool,
    scale: float,
) -> None:
    """One step of stochastic gradient descent, in fp32.

    Parameters
    ----------
    noop_flag : Tensor
        int32 [1].
    tensor_lists : list of list of Tensor
        Gradients, parameters, momenta; then maybe parameters that the new ones are rounded into.
    wd, momentum, dampening, lr, nesterov
        As of `torch.optim.SGD`.
    first_run : bool
        The momenta have no values yet: they become the gradients.
    wd_after_momentum : bool
        Weight decay does not go into the momenta.
    scale : float
        Factor of the gradients.
    """
    multi_tensor_sgd_cast(
        None, chunk_size, noop_flag, tensor_lists, wd, momentum, dampening, lr, nesterov,
        first_run, wd_after_momentum, scale,
    )  # fmt: skip


def multi_tensor_sgd_cast(
    casts: list[dict] | None, chunk_size: int, noop_flag: Tensor, tensor_lists: Lists, *numbers: Any
) -> None:
    """`multi_tensor_sgd`, whose new values are cast: `casts` as of `multi_tensor_adam_cast`."""
    del chunk_size
    wd, momentum, dampening, lr, nesterov, first_run, wd_after_momentum, scale = numbers
    grads, params, means, *rounded = checked_lists("multi_tensor_sgd", tensor_lists, 3, 4)
    flags = _core.UPDATE_NESTEROV if nesterov else 0
    flags |= _core.UPDATE_FIRST if first_run else 0
    flags |= _core.UPDATE_DECAY_LAST if wd_after_momentum else 0
    named = {"lr": lr, "decay": wd, "momentum": momentum, "dampening": dampening}
    named["grad_scale"] = scale
    lists = [grads, params, means if momentum != 0.0 else None, None, *(rounded or [None]), None]
    run_update(_core.UPDATE_SGD, flags, lists, noop_flag, named, casts=casts)


@operator_of_lists
def multi_tensor_compute_scale_and_scale_inv(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: Lists,
    max_fp8: float,
    force_pow_2_scales: bool,
    epsilon: float,
) -> None:
    """Scales of amaxes: max_fp8 / max(amax, epsilon), and their inverses.

    The lists are amaxes, scales and inverse scales, fp32. A scale is 1 where max(amax, epsilon) is
    0, Inf or NaN, the largest fp32 where it would be larger, and rounded down to a power of 2 if
    asked.
    """
    del chunk_size
    lists = checked_lists("multi_tensor_compute_scale_and_scale_inv", tensor_lists, 3)
    flags = _core.UPDATE_POWER_2 if force_pow_2_scales else 0
    numbers = {"top": max_fp8, "eps": epsilon}
    run_update(_core.UPDATE_RESCALE, flags, [*lists, None, None, None], noop_flag, numbers)


@operator_of_lists
def multi_tensor_compute_scale_inv_e8m0(
    chunk_size: int, noop_flag: Tensor | None, tensor_lists: Lists
) -> None:
    """Scales of MXFP8 of amaxes: the exponents (uint8) of amax / 448, rounded up.

    0 for an amax of 0, 254 for Inf, 255 for NaN. The lists are amaxes, of fp32, fp16 or bf16, and
    scales: those of a cast to E4M3 of groups with these amaxes. `noop_flag` None: they are always
    written. ValueError for lists of other numbers or lengths.
    """
    op = "multi_tensor_compute_scale_inv_e8m0"
    groups: dict[tuple, list[tuple[Tensor, Tensor]]] = {}
    for amax, scale in zip(*checked_lists(op, tensor_lists, 2), strict=True):
        if scale.dtype != torch.uint8 or scale.numel() != amax.numel():
            raise ValueError(
                f"{op}: {scale.numel()} scales of {scale.dtype} for {amax.numel()} amaxes, "
                "expected as many of torch.uint8"
            )
        if amax.numel() > 0:
            groups.setdefault((amax.device, amax.dtype), []).append((amax, scale))
    quantizer = MXFP8Quantizer(DType.kFloat8E4M3, rowwise=False, columnwise=True)
    quantizer.internal = True
    for pairs in groups.values():  # as columns of one value, which have a scale each
        amaxes = torch.cat([amax.detach().reshape(-1) for amax, _ in pairs])
        found = quantizer(amaxes.view(1, -1))._columnwise_scale_inv[0, : amaxes.numel()]
        found = found.masked_fill(amaxes.isnan(), 0xFF)  # which in a group is no amax
        scales = [scale for _, scale in pairs]
        if noop_flag is not None:
            old = torch.cat([scale.reshape(-1) for scale in scales]).to(found.device)
            found = torch.where(noop_flag.reshape(()).to(found.device) != 0, old, found)
        parts = found.split([scale.numel() for scale in scales])
        made = [part.view(scale.shape) for part, scale in zip(parts, scales, strict=True)]
        torch._foreach_copy_(scales, made)
