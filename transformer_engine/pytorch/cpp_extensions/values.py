# SPDX-License-Identifier: Apache-2.0
"""Arguments and results of operators, for the implementations of several groups."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from transformer_engine.pytorch.execution.overrides import native
from transformer_engine.pytorch.tensor import casts
from transformer_engine.pytorch.tensor.float8_blockwise_tensor import Float8BlockQuantizer
from transformer_engine.pytorch.tensor.float8_row_tensor import Float8RowQuantizer
from transformer_engine.pytorch.tensor.float8_tensor import Float8Quantizer
from transformer_engine.pytorch.tensor.mxfp8_tensor import MXFP8Quantizer
from transformer_engine.pytorch.tensor.quantizer import Quantizer
from transformer_engine.pytorch.torchside.device import prepare_device
from transformer_engine.pytorch.torchside.tensor_kinds import expect_tensor


def checked(op: str, name: str, tensor: Any) -> Tensor:
    """An argument that is a tensor, in high precision and without its gradient."""
    if type(tensor) is Tensor:
        return tensor.detach() if tensor.requires_grad else tensor
    if hasattr(type(tensor), "_dequantized"):  # a storage, too
        return tensor.dequantize().detach()
    expect_tensor(f"{op}: {name}", tensor)
    return tensor.detach() if tensor.requires_grad else tensor


def exact(op: str, name: str, tensor: Any) -> Tensor:
    """`checked`, in fp32, or in float64 where it is that.

    Quantized data are what they are, not rounded to their nominal dtype.
    """
    if hasattr(type(tensor), "_dequantized"):
        return tensor.dequantize(dtype=torch.float32).detach()
    found = checked(op, name, tensor)
    return found if found.dtype == torch.float64 else found.float()


def wide(op: str, name: str, tensor: Any) -> Tensor:
    """An argument as native code reads it: [..., columns] with at least one dim, last stride 1."""
    found = checked(op, name, tensor)
    if found.dim() == 0:
        raise ValueError(f"{op}: {name}: shape (), expected [..., columns]")
    prepare_device(found.device)
    return found.contiguous()


def matrix(tensor: Tensor) -> Tensor:
    """[rows, columns] of [..., columns]."""
    if tensor.dim() == 2:
        return tensor
    return tensor.flatten(0, -2) if tensor.dim() > 1 else tensor[None]


def like(op: str, name: str, given: Tensor, shape: tuple, dtype: torch.dtype) -> Tensor:
    """A caller's tensor for a result; ValueError or TypeError for one of another shape, dtype."""
    if tuple(given.shape) != tuple(shape):
        raise ValueError(
            f"{op}: {name}: shape {tuple(given.shape)}, expected that of the result, {tuple(shape)}"
        )
    if given.dtype != dtype:
        raise TypeError(f"{op}: {name}: {given.dtype}, expected {dtype}")
    return given


def written(op: str, name: str, values: Tensor, out: Any) -> Tensor:
    """Values, or the caller's tensor for them: of their shape and dtype."""
    if out is None:
        return values
    like(op, name, out, tuple(values.shape), values.dtype).detach().copy_(values)
    return out


def delivered(op: str, values: Tensor, quantizer: Any, out: Any = None, name: str = "out") -> Any:
    """A result as it is asked for: cast by a quantizer, and where, if that is given.

    Values are rounded to their dtype first: the bits are those that the quantizer makes of them.
    `name` is what errors call `out`.
    """
    if quantizer is not None and not isinstance(quantizer, Quantizer):
        raise TypeError(
            f"{op}: quantizer: {type(quantizer).__name__}, expected a Quantizer or None"
        )
    if hasattr(type(out), "_dequantized"):
        caster = out._caster() if quantizer is None else quantizer
        return caster.update_quantized(values, out)
    if out is not None:
        like(op, name, out, tuple(values.shape), out.dtype).detach().copy_(values)
        return out if quantizer is None else quantizer.quantize(values)
    return values if quantizer is None else quantizer.quantize(values)


quantized = native(delivered)
"""`delivered` of an implementation: a cast asks nobody."""

_FUSED = (Float8Quantizer, Float8BlockQuantizer, Float8RowQuantizer, MXFP8Quantizer)
"""Whose casts need no amax of the whole tensor before, but for a first one of delayed scaling."""


@native
def computed(
    op: str, run: Callable[..., None], like: Tensor, dtype: torch.dtype, quantizer: Any, out: Any
) -> Any:
    """Result of an operator that casts as it computes, in the form asked for: see `quantized`.

    ``run(**fields)`` runs it on matrices, with fields of ``te_cast_request``. `like` is a tensor of
    the shape of the values.
    """
    is_quantized = hasattr(type(out), "_dequantized")
    caster = out._caster() if is_quantized and quantizer is None else quantizer
    whole = is_quantized and getattr(out, "_viewed", None) is None
    casts_directly = (
        isinstance(caster, _FUSED) and caster._casts_computed and (whole or out is None)
    )
    if not casts_directly or dtype != torch.float32 or like.numel() == 0:
        made = torch.empty_like(like, dtype=dtype)
        run(wide=matrix(made))
        return quantized(op, made, quantizer, out)
    if is_quantized and (tuple(out.shape) != tuple(like.shape) or out.device != like.device):
        return quantized(op, torch.empty_like(like, dtype=dtype), quantizer, out)  # which raises
    into = caster.make_empty(like.shape, dtype=dtype, device=like.device) if out is None else out
    into._write(casts.Computed(run, (like.shape[:-1].numel(), like.shape[-1]), like.device), caster)
    return into


def placed(
    out: Any, at: int, like: Tensor, shape: Sequence[int], dtype: torch.dtype | None = None
) -> Tensor:
    """Where a result goes: to its place among `out`, where that is one for it, else a new tensor.

    Places are tensors for the results in their order, as modules give them to implementations with
    a keyword `out`: in the dtypes in which these are wanted, None for what is not. `like`: whose
    device, and where `dtype` is None whose dtype, it has.
    """
    dtype = like.dtype if dtype is None else dtype
    given = None if out is None else out[at]
    if given is None or given.dtype != dtype or not given.is_contiguous():
        return like.new_empty(shape, dtype=dtype)
    if given.shape != tuple(shape) or given.device != like.device:
        return like.new_empty(shape, dtype=dtype)
    return given.detach() if given.requires_grad else given


def refuse(op: str, **given: Any) -> None:
    """NotImplementedError for the first argument that is neither None nor False."""
    for name, value in given.items():
        if value is not None and value is not False:
            raise NotImplementedError(f"{op}: {name}: not built yet; leave it at None")
