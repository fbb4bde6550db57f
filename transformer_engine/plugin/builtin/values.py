# SPDX-License-Identifier: Apache-2.0
"""What the implementations of several groups do with their arguments and results."""

from typing import Any

import torch
from torch import Tensor

from transformer_engine.pytorch.constants import TE_DType_To_Torch
from transformer_engine.pytorch.device import prepare_device
from transformer_engine.pytorch.plugins import native
from transformer_engine.pytorch.quantizer import Quantizer

__all__ = ["checked", "exact", "like", "quantized", "refuse", "torch_dtype", "wide", "written"]


def torch_dtype(op: str, name: str, value: Any) -> torch.dtype:
    """The torch dtype of an argument, given as that, as a `DType` or as its number."""
    if isinstance(value, torch.dtype):
        return value
    found = TE_DType_To_Torch.get(value)
    if found is None:
        raise TypeError(f"{op}: {name}={value!r}, expected a torch.dtype or a DType")
    return found


def checked(op: str, name: str, tensor: Any) -> Tensor:
    """An argument that is a tensor, in high precision and without its gradient."""
    if hasattr(type(tensor), "_dequantized"):  # a storage, too
        return tensor.dequantize().detach()
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{op}: {name}: {type(tensor).__name__}, expected a tensor")
    return tensor.detach() if tensor.requires_grad else tensor


def exact(op: str, name: str, tensor: Any) -> Tensor:
    """`checked`, in fp32: what quantized data are, not rounded to their nominal dtype."""
    if hasattr(type(tensor), "_dequantized"):
        return tensor.dequantize(dtype=torch.float32).detach()
    return checked(op, name, tensor).float()


def wide(op: str, name: str, tensor: Any) -> Tensor:
    """An argument as native code reads it: [..., columns] with at least one dim, last stride 1."""
    found = checked(op, name, tensor)
    if found.dim() == 0:
        raise ValueError(f"{op}: {name}: shape (), expected [..., columns]")
    if found.is_cuda:
        prepare_device(found.device)
    return found.contiguous()


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


@native
def quantized(op: str, values: Tensor, quantizer: Any, out: Any = None) -> Any:
    """A result as it is asked for: cast by a quantizer, and where, if that is given.

    Values are rounded to their dtype first: the bits are those that the quantizer makes of them.
    """
    if quantizer is not None and not isinstance(quantizer, Quantizer):
        raise TypeError(
            f"{op}: quantizer: {type(quantizer).__name__}, expected a Quantizer or None"
        )
    if hasattr(type(out), "_dequantized"):
        caster = out._caster() if quantizer is None else quantizer
        return caster.update_quantized(values, out)
    if out is not None:
        like(op, "out", out, tuple(values.shape), out.dtype).detach().copy_(values)
        return out if quantizer is None else quantizer.quantize(values)
    return values if quantizer is None else quantizer.quantize(values)


def refuse(op: str, **given: Any) -> None:
    """NotImplementedError for the first argument that is neither None nor False."""
    for name, value in given.items():
        if value is not None and value is not False:
            raise NotImplementedError(f"{op}: {name}: not built yet; leave it at None")
