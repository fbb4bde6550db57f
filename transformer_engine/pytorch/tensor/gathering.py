# SPDX-License-Identifier: Apache-2.0
"""Gathers of quantized tensors: ranks exchange codes and scales, and no values.

What each rank sends are the codes and the scales without padding. What arrives is put where the
rows of that rank lie in a tensor of all rows: a form may have them along another dim than the
first one.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from transformer_engine.common import absent
from transformer_engine.pytorch.tensor import casts
from transformer_engine.pytorch.tensor.float8_tensor import Float8TensorStorage
from transformer_engine.pytorch.tensor.joints import Joint, joints_of, parts_of
from transformer_engine.pytorch.tensor.quantized_storage import QuantizedTensorStorage
from transformer_engine.pytorch.tensor.quantizer import Quantizer, ReducesAmax, plain
from transformer_engine.pytorch.torchside.collectives import (
    expect_own,
    gather_parts,
    gather_rows,
    ranks_of,
)

_OP = "gather_along_first_dim"
_OF_A_SHAPE = ("_logical_shape", "_transpose_version")
"""Settings in which a tensor of all rows differs from that of some."""


class QuantizedGather:
    """Handle of an asynchronous gather: the tensor has its values once `wait` has returned."""

    def __init__(self, works: list, finish: Callable[[], None]) -> None:
        self._works = works  # None: of one rank
        self._finish: Callable[[], None] | None = finish

    def wait(self) -> None:
        """Wait for what ranks send, and put it in place; on CUDA the current stream waits."""
        finish, self._finish = self._finish, None
        if finish is None:
            return
        for work in self._works:
            if work is not None:
                work.wait()
        finish()


class _Piece(NamedTuple):
    """What a rank sends of one tensor, and where that of all ranks goes."""

    mine: Tensor
    into: Tensor
    dim: int  # along which the rows of ranks lie; what is behind them is padding


def _settings(storage: Any) -> list:
    return [getattr(storage, name) for name in storage._SETTINGS if name not in _OF_A_SHAPE]


def _joints(
    quantizer: Quantizer, shape: tuple, usages: dict[str, bool], size: int
) -> dict[str, Joint] | None:
    """How each wanted form of `size` tensors of a shape joins; None where one does not."""
    kind = getattr(quantizer, "STORAGE", None)
    if kind is None or not (quantizer._casts_natively and quantizer.is_quantizable(_like(shape))):
        return None
    square = bool(quantizer._format_settings(shape).get("_is_2D_scaled", False))
    wanted = [form for form, used in usages.items() if used]
    rows = torch.Size(shape[:-1]).numel() if size > 1 else 0
    return joints_of(kind, square, wanted, rows)


def _like(shape: tuple) -> Tensor:
    return torch.empty(shape, device="meta")


def _pieces(mine: Any, into: Any, joints: dict[str, Joint]) -> list[_Piece]:
    """All that ranks exchange of a format with scales of each form; what they share is copied."""
    parts = list(parts_of(mine, joints))
    exchanged = [part.name for part in parts]
    for form in joints:
        amax = f"_amax_{form}"
        if amax not in exchanged and getattr(mine, amax, None) is not None:
            getattr(into, amax).copy_(getattr(mine, amax))
    return [_Piece(part.tensor, getattr(into, part.name), part.dim) for part in parts]


def _local(inp: Tensor, quantizer: Quantizer, usages: dict[str, bool], group: Any) -> Any:
    """Quantize the part of this rank, with the largest amax of all ranks where it has one scale."""
    caster = quantizer.copy()
    caster.set_usage(**usages)
    if isinstance(caster, ReducesAmax) and ranks_of(_OP, group) > 1:
        caster.with_amax_reduction, caster.amax_reduction_group = True, group
    return caster.quantize(inp.detach())


def _forms_of(given: Any, quantizer: Quantizer, dtype: torch.dtype, shape: tuple) -> dict:
    """Which forms a tensor for a result has, after checks of its class, shape and dtype."""
    kind = getattr(quantizer, "STORAGE", QuantizedTensorStorage)
    if not isinstance(given, kind):
        raise TypeError(
            f"{_OP}: output_tensor: {type(given).__name__}, expected a {kind.__name__}, as the "
            "quantizer makes it"
        )
    if (tuple(given.shape), given.dtype) != (shape, dtype):
        raise ValueError(
            f"{_OP}: output_tensor: shape {tuple(given.shape)}, {given.dtype}, expected {shape}, "
            f"{dtype}"
        )
    if not given._FORMS:
        return given.get_usages()
    there = [getattr(given, names[0]) is not None for names in given._FORMS]
    return dict(zip(("rowwise", "columnwise"), there, strict=True))


def _made(quantizer: Quantizer, inp: Any, shape: tuple, usages: dict[str, bool]) -> Any:
    """A tensor of all rows with these forms, without values."""
    maker = quantizer.copy()
    maker.set_usage(**usages)
    return maker.make_empty(shape, dtype=inp.dtype, device=inp.device)


def _gather_codes(
    out: Any, pieces: list[_Piece], group: Any, done: Callable[[], None]
) -> QuantizedGather:
    """Begin to gather pieces into a tensor; `done` is called once all are in place."""
    started = [gather_parts(piece.mine, piece.into, piece.dim, group) for piece in pieces]

    def finish() -> None:
        with torch.no_grad():
            for _, put in started:
                if put is not None:
                    put()
            out._count_write()
            done()

    return QuantizedGather([work for work, _ in started], finish)


def _gather_quantized(inp: Any, group: Any, quantizer: Quantizer, given: Any) -> tuple[Any, Any]:
    """Tensor of all rows, and a handle to be waited for, or None where it is there."""
    size = ranks_of(_OP, group)
    if len(inp.shape) == 0:
        raise ValueError(f"{_OP}: inp: shape (), expected at least one dim")
    part, shape = tuple(inp.shape), (inp.shape[0] * size, *inp.shape[1:])
    usages = quantizer.get_usages()
    if given is not None:
        usages = _forms_of(given, quantizer, inp.dtype, shape)
    is_quantized = isinstance(inp, QuantizedTensorStorage)
    if size == 1 and given is None:
        made = inp if is_quantized else quantizer.quantize(inp.detach())
        made.update_usage(**{f"{form}_usage": True for form, on in usages.items() if on})
        return made, None
    by_rows = quantizer.supports_only_rowwise_all_gather() and quantizer._casts_natively
    sent = {"rowwise": True, "columnwise": False} if by_rows else usages
    joints = {} if by_rows else _joints(quantizer, part, usages, size)
    if joints is not None:
        mine = inp if is_quantized else _local(inp, quantizer, sent, group)
        out = _made(quantizer, inp, shape, sent) if given is None else given
        if isinstance(mine, quantizer.STORAGE) and _settings(mine) == _settings(out):
            if by_rows:
                return out, _gather_rows_of_one_scale(mine, out, group, usages)
            mine.update_usage(**{f"{form}_usage": True for form in joints})
            pieces = _pieces(mine, out, joints)
            return out, _gather_codes(out, pieces, group, out._written)
    wide, _ = gather_rows(plain(inp).detach(), group)
    if given is None:
        return quantizer.quantize(wide), None
    return quantizer.update_quantized(wide, given), None


def _gather_rows_of_one_scale(
    mine: Float8TensorStorage, out: Float8TensorStorage, group: Any, usages: dict[str, bool]
) -> QuantizedGather:
    """Gather the row-wise bytes; the transpose is made of them where it is wanted."""
    if mine._data is None:
        raise ValueError(f"{_OP}: inp: its row-wise data were dropped, and these are exchanged")
    out._scales.copy_(mine._scales)
    rows = casts.empty_rows(out.shape, out.device) if out._data is None else out._data

    def done() -> None:
        if usages["columnwise"]:
            turned = casts.transpose(rows)
            out._transpose = turned if out._transpose is None else out._transpose.copy_(turned)
            out._transpose_invalid = False
        if not usages["rowwise"]:
            out._data = None

    return _gather_codes(out, [_Piece(mine._data, rows, 0)], group, done)


def gather_along_first_dim(
    inp: Any,
    process_group: Any,
    async_op: bool = False,
    quantizer: Quantizer | None = None,
    output_tensor: Any = None,
    external_coalescing: bool = False,
) -> tuple[Any, Any]:
    """Put the tensors [n, ...] of all ranks, of one shape, one below the other: [ranks * n, ...].

    Parameters
    ----------
    inp : Tensor
        Of this rank; in high precision, or with a quantizer as that makes it.
    process_group : ProcessGroup, optional
        All ranks where None.
    async_op : bool, default False
        Return before the values are there, with a handle whose ``wait()`` is to be called.
    quantizer : Quantizer, optional
        Of the result. Ranks exchange its codes and scales: of formats with one scale for the tensor
        the row-wise ones, of others both forms that are in use. `inp` is quantized first, with the
        largest amax of all ranks where the format measures one for the tensor (current scaling,
        NVFP4). One that is quantized already, or by delayed scaling, must have the scale (NVFP4:
        amax) of all ranks. Where parts do not join (squares or columns that end inside of a block,
        columns of `Float8RowQuantizer`, hybrid formats and those of a program), and where `inp` is
        quantized in another way, values are exchanged, and quantized then, before this returns.
    output_tensor : Tensor, optional
        Is written, in the forms that it has, and returned; as the result, and contiguous.
    external_coalescing : bool, default False
        The caller has begun a coalesced collective, which this becomes a part of; no handle then.

    Returns
    -------
    tuple
        The tensor, and a handle or None.

    Raises
    ------
    TypeError
        `inp` is no tensor of this rank alone (a DTensor), or quantized without a quantizer;
        `quantizer` is none; `output_tensor` is not of its class.
    ValueError
        `output_tensor` has another shape or dtype; this process is not in the group.
    NotImplementedError
        `external_coalescing` with a quantizer.
    """
    if quantizer is None:
        output, handle = gather_rows(inp, process_group, async_op, output_tensor)
        return output, None if external_coalescing else handle
    if not isinstance(quantizer, Quantizer):
        raise TypeError(f"{_OP}: quantizer: {type(quantizer).__name__}, expected a Quantizer")
    if external_coalescing:
        what = "(external_coalescing=True) with a quantizer"
        raise absent.refusal(f"pytorch.distributed.{_OP}", what)
    if not isinstance(inp, QuantizedTensorStorage):
        expect_own(f"{_OP}: inp", inp)
    with torch.no_grad():
        output, handle = _gather_quantized(inp, process_group, quantizer, output_tensor)
    if handle is None or async_op:
        return output, handle
    handle.wait()
    return output, None
