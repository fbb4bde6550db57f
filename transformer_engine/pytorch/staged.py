# SPDX-License-Identifier: Apache-2.0
"""Runs of plans whose stages are partly Python: a collective, a quantizer, an overridden operator.

A plan made with external stages stops before each of them. `run_staged` then calls the Python
function given for the stage with the plan's buffers as tensors, and resumes. Functions are
arguments of the run, never part of the plan.
"""

import functools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from transformer_engine import _core
from transformer_engine.pytorch import torch_ops

__all__ = ["Observer", "StageBuffers", "external_bits", "run_staged"]


def external_bits(
    stages: Mapping[str, Any] | None, prefixes: tuple[str, ...] = ("",)
) -> tuple[int, ...]:
    """Bits of `LinearSpec.external` of each part for stages by name.

    Parameters
    ----------
    stages : mapping or None
        Keys are stage names, with the prefix of their part.
    prefixes : tuple of str
        Of the parts.

    Returns
    -------
    tuple of int
        One per part.

    Raises
    ------
    ValueError
        A name is none of ``_core.LINEAR_STAGES`` with a prefix.
    """
    known = {
        prefix + name: (part, bit)
        for part, prefix in enumerate(prefixes)
        for bit, name in enumerate(_core.LINEAR_STAGES)
    }
    bits = [0] * len(prefixes)
    for name in stages or ():
        if name not in known:
            raise ValueError(f"stage {name!r} does not exist; there are {tuple(known)}")
        part, bit = known[name]
        bits[part] |= 1 << bit
    return tuple(bits)


class StageBuffers(Mapping[str, Tensor]):
    """The buffers of a running plan by name, as tensors that share its memory.

    FP8 buffers have torch's FP8 dtypes. Quantized data comes as ``<tensor>_row`` [rows, padded
    columns], ``<tensor>_column`` [columns, padded rows] (transposed) and ``<tensor>_pair``
    {1/scale, scale}; padding must be written as zero. ``scale`` and ``history`` are the whole
    chunks.

    Attributes
    ----------
    rows : int
        Product of the leading dims.
    slot : int
        First slot of the module in `scale` and `history`.
    """

    def __init__(self, tensors: dict[str, Tensor], rows: int, slot: int) -> None:
        self._tensors = tensors
        self.rows = rows
        self.slot = slot

    def __getitem__(self, name: str) -> Tensor:
        """Tensor of a buffer; KeyError for one that the plan does not have."""
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        """Names, in plan order."""
        return iter(self._tensors)

    def __len__(self) -> int:
        """Count the buffers."""
        return len(self._tensors)


Observer = Callable[[str, str, StageBuffers, Callable[[], Any]], None]
"""``f(stage, operator, buffers, run)``: looks at a stage, and runs it by calling `run` once."""


def _member(base: Tensor, offset: int, dtype: torch.dtype, shape: list[int]) -> Tensor:
    size = math.prod(shape) * dtype.itemsize
    return base[offset : offset + size].view(dtype).view(shape)


def _gathered_leading(leading: tuple[int, ...], gather: int) -> list[int]:
    return [gather * leading[0], *leading[1:]] if leading else []


def run_staged(
    plan: int,
    slots: tuple[int, int],
    given: list[Tensor],
    packed: Tensor | None,
    stages: Mapping[str, Callable[[StageBuffers], Any]],
    observer: Observer | None = None,
) -> tuple:
    """Run a plan stage range by stage range.

    Parameters
    ----------
    plan : int
        Plan id.
    slots : tuple of int
        First slot of the module in the forward and in the backward chunk.
    given : list of Tensor
        Buffers of role input, parameter and state, in plan order.
    packed : Tensor or None
        Packed saved tensor of the forward, for a plan that reads it.
    stages : mapping of str to callable
        ``f(buffers)`` for each external stage.
    observer : callable, optional
        Is given each stage in turn, and runs it.

    Returns
    -------
    tuple
        As of `torch_ops.run_native`: the outputs, then the packed saved tensor or None.

    Raises
    ------
    RuntimeError
        The plan has an external stage for which there is no function.
    """
    first = given[0]
    device = first.device
    leading = tuple(first.shape[:-1])
    rows = math.prod(leading)
    kind = _core.DEVICE_CUDA if device.type == "cuda" else _core.DEVICE_CPU
    index = device.index or 0
    described = _core.plan_describe(plan)
    saved_bytes, _, offsets = _core.plan_infer(plan, rows)
    makes_saved = described["kind"].endswith("forward") and saved_bytes > 0
    if makes_saved:
        packed = torch.empty(saved_bytes, dtype=torch.uint8, device=device)
    scratch = _core.empty_aligned(_core.plan_scratch(plan, rows, kind, index), kind, index)
    tensors: dict[str, Tensor] = {}
    outputs = []
    direct = []
    inputs = iter(given)
    for (name, role, code, lead, extents, *_), offset in zip(
        described["buffers"], offsets, strict=True
    ):
        dtype = _core.torch_dtype(code)
        if role in ("saved", "scratch"):
            base = packed if role == "saved" else scratch
            shape = [torch_ops.extent_value(extent, rows) for extent in extents]
            tensors[name] = _member(base, offset, dtype, shape)
            continue
        if role == "output":
            shape = [torch_ops.extent_value(extent, rows) for extent in extents]
            if lead:
                shape[:1] = _gathered_leading(leading, extents[0][0])
            tensors[name] = torch.empty(shape, dtype=dtype, device=device)
            outputs.append(tensors[name])
        else:
            tensors[name] = next(inputs)
        direct.append(tensors[name])
    buffers = StageBuffers(tensors, rows, max(slots))
    size = len(described["stages"])

    def advance(at: int, last: int) -> int:
        """Run from a stage on to another one, or to behind the next external one."""
        at = _core.run_range(plan, at, last, *slots, direct, packed, scratch, rows)
        if at == (size if last < 0 else last):
            return at
        name = described["stages"][at][0]
        if name not in stages:
            raise RuntimeError(f"plan {plan}: stage {name} is external and has no function")
        stages[name](buffers)
        return at + 1

    at = 0
    while at < size:
        if observer is None:
            at = advance(at, -1)
        else:
            name, operator = described["stages"][at]
            observer(name, operator, buffers, functools.partial(advance, at, at + 1))
            at += 1
    return (*outputs, packed if makes_saved else None)
