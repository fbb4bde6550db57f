# SPDX-License-Identifier: Apache-2.0
"""Writes to parts of quantized tensors, as loaders of checkpoints make them, one after the other.

Rows of the same format are copied, codes and scales, where no scale is of other rows too
(`copy_rows`). All else is cast, and the cast is of the whole tensor: its scales may be of values
outside of the part.

What is written to a part of a weight that ranks share stays in high precision until all of that
part of the rank has been written (`Staged`), or until somebody reads it (`settle`): it is rounded
once. Where ranks share a scale, too, a cast is a collective, and they write different numbers of
pieces.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from transformer_engine.pytorch.tensor.quantizer import plain
from transformer_engine.pytorch.torchside.modes import is_traced_or_faked


class Staged:
    """Values of a tensor some of which have been written through views, and wait for a cast.

    They belong to its data, which its aliases share.
    """

    __slots__ = ("missing", "values")

    def __init__(self, whole: Any) -> None:
        self.values = whole._dequantized(torch.float32, tuple(whole.shape))
        self.missing = torch.ones(whole.shape, dtype=torch.bool)  # on the host: no wait for others
        if whole._own_rows is not None:
            self.missing[whole._own_rows :] = False  # nobody writes what pads a part


def versions_of(tensor: Any) -> tuple | None:
    """Version of the data of a quantized tensor; None: it does not tell."""
    tensors = [part for part in tensor.get_data_tensors() if part is not None]
    if is_traced_or_faked(*tensors):
        return tuple(tensor._counted_writes())
    if any(part.is_inference() for part in tensors):
        return None
    return tuple((part.data_ptr(), part._version) for part in tensors)


def outermost(tensor: Any) -> tuple[Any, Callable[[Tensor], Tensor]]:
    """The tensor that a view of views is of, and what makes that view of its values."""
    views: list[Callable] = []
    while tensor._viewed is not None:
        tensor, view = tensor._viewed
        views.append(view)

    def through(values: Tensor) -> Tensor:
        for view in reversed(views):
            values = view(values)
        return values

    return tensor, through


def on_meta(whole: Any) -> Tensor:
    """A tensor of its shape and strides without values."""
    return torch.empty_strided(whole.shape, whole.stride(), device="meta")


def write(part: Any, source: Tensor, noop: Tensor | None) -> None:
    """Write plain values through a view: the tensor that it is of is cast, by its own quantizer."""
    whole, view = outermost(part)
    data = _first(whole)
    if not is_part(whole) or noop is not None or is_traced_or_faked(data):
        whole, view = part._viewed  # which may be a view, and counts its writes
        values = plain(whole)
        view(values).copy_(source)
        whole._write(values, None, noop)
        return
    staged = data.__dict__.get(_STAGED) or Staged(whole)
    view(staged.values).copy_(source)
    view(staged.missing).fill_(False)
    data.__dict__[_STAGED] = staged
    if not staged.missing.any():
        settle(whole)
    else:
        whole._count_write()  # not in views between, which would have to read it
        whole._changed()


def count_in_wholes(view: Any) -> None:
    """Count a write in what a tensor is a view of: below autograd views have versions apart."""
    while view._viewed is not None:
        view = view._viewed[0]
        view._count_write()
        view._changed()


def settle(whole: Any) -> None:
    """Cast what has been written to a tensor and waits for more, with all ranks that share it."""
    if is_part(whole):
        whole, _ = outermost(whole)
        staged = _first(whole).__dict__.pop(_STAGED, None)
        if staged is not None:
            whole._write(staged.values)


def forget(whole: Any) -> None:
    """Let go what waits for a cast: all of the tensor has been written anew."""
    if is_part(whole):
        _first(whole).__dict__.pop(_STAGED, None)


_STAGED = "_te_staged"


def _first(tensor: Any) -> Tensor:
    """The first tensor of its data that is there."""
    return next(part for part in tensor.get_data_tensors() if part is not None)


def is_part(tensor: Any) -> bool:
    """Return whether it is a rank's part of a weight, or a view of one."""
    quantizer = outermost(tensor)[0]._quantizer
    return quantizer is not None and quantizer._of_part


# ---- rows of codes -------------------------------------------------------------------------------


def copy_rows(into: Any, source: Any) -> bool:
    """Copy codes and scales of some rows of a matrix to those of another one; False: cast them.

    So no rank waits for others. One amax for several matrices is taken to be that of all parts of
    a weight, as loaders and FSDP2 give them one after the other.
    """
    (whole, first), (other, start) = _rows_of(into), _rows_of(source)
    copies = getattr(whole, "_copy_rows", None)
    if copies is None or other is None or is_traced_or_faked():
        return False
    return copies(other, first, start, into.shape[0])


def _rows_of(part: Any) -> tuple[Any, int]:
    """The matrix whose whole rows a view is, and the first one of them; (None, 0): of none."""
    whole, view = outermost(part)
    if whole.dim() != 2 or not whole.is_contiguous():
        return None, 0
    like, columns = view(on_meta(whole)), max(whole.shape[1], 1)
    rows = like.dim() == 2 and like.is_contiguous() and like.shape[1] == whole.shape[1]
    first, rest = divmod(like.storage_offset(), columns)
    return (whole, first) if rows and rest == 0 else (None, 0)
