# SPDX-License-Identifier: Apache-2.0
"""Operations on lists of tensors, by the C library in one pass: products and norms.

An operation is ``op(chunk_size, noop_flag, tensor_lists, *args)``; `multi_tensor_applier` calls it.
It sets the flag, an int32 tensor of one element, to 1 where it meets Inf or NaN, and never clears
it. No operation waits for the device.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from transformer_engine import _core
from transformer_engine.pytorch.execution.overrides import of_lists, operator_of_lists
from transformer_engine.pytorch.optimizers.checks import DTYPES
from transformer_engine.pytorch.optimizers.updates import checked_lists, refuse_others, run_update
from transformer_engine.pytorch.tensor.quantizer_arguments import checked_tensor
from transformer_engine.pytorch.torchside.tensor_kinds import is_quantized


class MultiTensorApply:
    """Calls an operation on lists of tensors.

    `chunk_size` is handed to the operations, which do not need it.
    """

    available = True
    warned = False

    def __init__(self, chunk_size: int) -> None:
        self.chunk_size = chunk_size

    def __call__(
        self, op: Callable, noop_flag_buffer: Tensor, tensor_lists: list[list[Tensor]], *args: Any
    ) -> Any:
        """Call an operation (see above) on the tensors that have elements; None where none has.

        `noop_flag_buffer` is [1] int32, `args` are further arguments of `op`. The lists have one
        length (RuntimeError otherwise), of tensors (TypeError); DTensors stand for local parts.
        """
        try:
            lengths = [len(each) for each in tensor_lists]
            local = [[getattr(t, "_local_tensor", t) for t in each] for each in tensor_lists]
            kept = [i for i, tensor in enumerate(local[0]) if tensor.numel() > 0] if local else []
        except (AttributeError, TypeError):
            refuse_others("multi_tensor_applier", tensor_lists)
            raise
        if len(set(lengths)) > 1:
            raise RuntimeError(
                f"multi_tensor_applier: lists of {lengths} tensors, not of one length"
            )
        if not kept:
            return None
        return op(self.chunk_size, noop_flag_buffer, [[e[i] for i in kept] for e in local], *args)


multi_tensor_applier = MultiTensorApply(65536)


@operator_of_lists
def multi_tensor_scale(
    chunk_size: int, noop_flag: Tensor, tensor_lists: list[list[Tensor]], scale: Any
) -> None:
    """Write ``input * scale``, computed in fp32, into the second list.

    The lists are of inputs and outputs, of fp32, fp16 and bf16; they may be the same tensors.
    `noop_flag`, [1] int32, is set to 1 where an input is not finite, `scale` is one number;
    `chunk_size` is ignored.
    """
    _scale("multi_tensor_scale", noop_flag, tensor_lists, scale)


@operator_of_lists
def multi_tensor_scale_tensor(
    chunk_size: int, noop_flag: Tensor, tensor_lists: list[list[Tensor]], scale: Tensor
) -> None:
    """`multi_tensor_scale` by an fp32 tensor of one element, which is not read on the host."""
    _scale("multi_tensor_scale_tensor", noop_flag, tensor_lists, scale.reshape(()))


def _scale(op: str, flag: Tensor, lists: list[list[Tensor]], scale: Any) -> None:
    inputs, outputs = checked_lists(op, lists, 2)
    lists = [inputs, outputs, None, None, None, None]
    run_update(_core.UPDATE_SCALE, 0, lists, flag, {"grad_scale": scale})


@operator_of_lists
def multi_tensor_l2norm(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: list[list[Tensor]],
    per_tensor: bool | None = False,
) -> tuple[Tensor, Tensor]:
    """The norm of all elements, [1] fp32, and of each tensor, [tensors] (or [0]) fp32.

    Arguments as of `multi_tensor_scale`: the flag is set where the norm is not finite, and there is
    one list of tensors, of any real dtypes, which are read as fp32; a sum of squares beyond fp32 is
    Inf.
    The norms of tensors come with `per_tensor` alone. The same bits in every run. No flag is set
    where it is None. TypeError for what is no tensor of real numbers.
    """
    del chunk_size
    return _norms("multi_tensor_l2norm", noop_flag, tensor_lists, None, bool(per_tensor))


@operator_of_lists
def multi_tensor_unscale_l2norm(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: list[list[Tensor]],
    inv_scale: Tensor,
    per_tensor: bool | None = False,
) -> tuple[Tensor, Tensor]:
    """`multi_tensor_l2norm` of the tensors times `inv_scale`, an fp32 tensor of one element.

    The products are what is squared: scaled values whose squares have no finite sum have a norm.
    TypeError for another `inv_scale` than a tensor, ValueError for one of other than one element.
    """
    del chunk_size
    op = "multi_tensor_unscale_l2norm"
    if not isinstance(inv_scale, Tensor):
        raise TypeError(f"{op}: inv_scale={inv_scale!r}, expected a tensor of one element")
    if inv_scale.numel() != 1:
        raise ValueError(f"{op}: inv_scale of {inv_scale.numel()} elements, expected one")
    return _norms(op, noop_flag, tensor_lists, inv_scale, bool(per_tensor))


def _norms(
    op: str, flag: Tensor | None, lists: list[list[Tensor]], factor: Tensor | None, per_tensor: bool
) -> tuple[Tensor, Tensor]:
    """(norm of all, norms of each) of one list of tensors, wherever they are."""
    (tensors,) = checked_lists(op, lists, 1)
    with torch.no_grad():
        if not tensors:
            device = None if flag is None else flag.device
            return tuple(torch.zeros(n, dtype=torch.float32, device=device) for n in (1, 0))
        try:
            return of_lists("l2norm", tensors[0].device)(tensors, factor, flag, per_tensor)
        except (TypeError, ValueError):  # all is checked before anything is written
            return _norms_by_devices(op, flag, tensors, factor, per_tensor)


def _norms_by_devices(
    op: str, flag: Tensor | None, tensors: list[Tensor], factor: Tensor | None, per_tensor: bool
) -> tuple[Tensor, Tensor]:
    """The same of tensors on several devices, and of other dtypes and classes."""
    for i, tensor in enumerate(tensors):
        if checked_tensor(f"{op}: tensor {i}", tensor).dtype.is_complex:
            raise TypeError(f"{op}: tensor {i} of {tensor.dtype}, expected real numbers")
    first = tensors[0].device
    places: dict[torch.device, list[int]] = {}
    for i, tensor in enumerate(tensors):
        places.setdefault(tensor.device, []).append(i)
    values = [t if t.dtype in DTYPES and not is_quantized(t) else t.float() for t in tensors]
    each = torch.empty(len(tensors), dtype=torch.float32, device=first)
    squares = torch.zeros(1, dtype=torch.float64, device=first)
    for device, chosen in places.items():
        number = None if factor is None else factor.detach().reshape(1).to(device, torch.float32)
        norms_of = of_lists("l2norm", device)
        total, norms = norms_of([values[i] for i in chosen], number, None, True)
        each[chosen] = norms.to(first)
        squares += total.to(first, torch.float64).square()
    norm = squares.sqrt().float()
    if flag is not None:
        flag.masked_fill_(~norm.to(flag.device).isfinite(), 1)
    return norm, each if per_tensor else each.new_empty(0)
