# SPDX-License-Identifier: Apache-2.0
"""Slices of master weights on their way into quantized parameters: one class for each way.

A `Slice` is what one rank has of a parameter. It is used in three steps, by all ranks at once:
`measure`, whose numbers are reduced to the largest of all ranks; `share`, whose bytes are, too;
`write`, which is given these.

What has a scale of its own is a *unit* of a form: a tile, a row, a group. A slice cuts units at its
ends. It is cast by the parameter's quantizer, in a matrix that has the unit's reduced amax wherever
another rank has the value: so the operator finds the amaxes of the whole parameter, and the bits
are those of a cast of the whole.
"""

import functools
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from transformer_engine import _core
from transformer_engine.pytorch.tensor import casts
from transformer_engine.pytorch.tensor.casts import code_of
from transformer_engine.pytorch.tensor.float8_tensor import Float8Quantizer, Float8TensorStorage
from transformer_engine.pytorch.tensor.hybrid_tensor import HybridQuantizedTensorStorage
from transformer_engine.pytorch.tensor.identity_tensor import IdentityTensorStorage
from transformer_engine.pytorch.tensor.nvfp4_tensor import NVFP4TensorStorage
from transformer_engine.pytorch.tensor.two_forms import TwoFormStorage

__all__ = ["Shards", "Slice", "row_data_field", "row_storage", "slices_of"]

_ROW_DATA = {
    Float8TensorStorage: "_data",
    TwoFormStorage: "_rowwise_data",
    IdentityTensorStorage: "_hp_data",
}
"""Which field has the row-wise data of a storage."""

_LINES = {
    _core.SCALING_BLOCK_1D: 128,
    _core.SCALING_BLOCK_2D: 128,
    _core.SCALING_MXFP8: 32,
    _core.SCALING_NVFP4: 16,
}
"""How many values along a line have one scale; all of them in other modes."""


def row_storage(weight: Any) -> Any:
    """The storage that has the row-wise data: of a hybrid one its part, None where it has none."""
    return weight._rowwise_storage if isinstance(weight, HybridQuantizedTensorStorage) else weight


def row_data_field(storage: Any) -> str | None:
    """The field of `_ROW_DATA`; None: of another class."""
    return next((name for kind, name in _ROW_DATA.items() if isinstance(storage, kind)), None)


class Shards(NamedTuple):
    """Where to write the bytes of a slice, of each form; None: to the parameter."""

    row: Tensor | None = None
    column: Tensor | None = None


class Slice:
    """Some elements of a parameter, one after the other, in its nominal dtype; or none.

    `storage` is the parameter, or a part of a hybrid one; `part`, [n], are its elements from number
    `start` on, whose bytes go to `shards`.
    """

    in_order = False
    """True where there are column-wise bytes, in the order of elements."""
    keeps_columns: Any = False
    """True where column-wise bytes go to shards, here or on another rank; read behind `measure`."""

    def __init__(self, storage: Any, part: Tensor, start: int, shards: Shards) -> None:
        self.storage, self.part, self.start, self.shards = storage, part, start, shards
        self.end = start + part.numel()
        shape = storage.shape
        self.rows, self.columns = math.prod(shape[:-1]), shape[-1]
        for shard in shards:  # before anything is written, and others wait for this rank
            if shard is not None:
                self._check_shard(shard)

    def measure(self) -> list[Tensor]:
        """Largest magnitudes of the slice, fp32: to be overwritten with those of all ranks."""
        return []

    def share(self) -> Tensor | None:
        """Bytes to be overwritten with the largest of all ranks; 0 where others have the value."""
        return None

    def write(self, shared: Tensor | None) -> None:
        """Write row-wise bytes of the slice, and scales and column-wise bytes of all.

        `shared` is what `share` gave, of all ranks. Column-wise bytes that go to shards are those
        of the slice.
        """
        raise NotImplementedError

    def _largest(self) -> Tensor:
        """The largest magnitude of the slice, fp32 [1], NaN being none."""
        if self.part.numel() == 0:
            return torch.zeros(1, dtype=torch.float32, device=self.part.device)
        return casts.measure(self.part).amax().reshape(1)

    def _row_data(self) -> Tensor:
        return getattr(self.storage, row_data_field(self.storage))

    def _put(self, made: Tensor) -> None:
        """Write the row-wise data of the slice, [n], to its shard or into the parameter."""
        if self.shards.row is not None:
            _copy_bytes(made, self.shards.row)
            return
        data, mine = self._row_data(), self._span()
        if data.is_contiguous():
            data.view(-1)[mine].copy_(made)
        else:  # rows with padding between them
            whole = data.reshape(-1)
            whole[mine] = made
            data.copy_(whole.view(data.shape))

    def _check_shard(self, shard: Tensor) -> None:
        """ValueError for another size than that of the bytes of the slice."""
        mine, data = self._span(), self._row_data()
        size = (mine.stop - mine.start) * data.element_size()
        if shard.numel() * shard.element_size() != size:
            raise ValueError(
                f"quantize_master_weights: a shard of {shard.numel() * shard.element_size()} bytes "
                f"for a slice of {size} bytes ({self.part.numel()} elements)"
            )

    def _span(self) -> slice:
        """Where the slice lies among the row-wise data. ValueError where it shares a byte."""
        if not isinstance(self.storage, NVFP4TensorStorage) or self.part.numel() == 0:
            return slice(self.start, self.end)
        ends = [divmod(element, self.columns) for element in (self.start, self.end)]
        if any(column % 2 for _, column in ends):
            raise ValueError(
                f"quantize_master_weights: a slice of elements {self.start} to {self.end} of rows "
                f"of {self.columns} cuts a byte, which two values of NVFP4 share: let slices begin "
                "and end at even columns"
            )
        line = -(-self.columns // 16) * 8
        return slice(*(row * line + column // 2 for row, column in ends))


def _copy_bytes(made: Tensor, shard: Tensor) -> None:
    shard.view(torch.uint8).view(-1).copy_(made.reshape(-1).view(torch.uint8))


# ---- one scale -----------------------------------------------------------------------------------


class PerTensorSlice(Slice):
    """Of a tensor with one scale."""

    def measure(self) -> list[Tensor]:
        self.amax = self._largest()
        return [self.amax]

    def write(self, shared: Tensor | None) -> None:
        made = casts.empty_rows(self.part.shape, self.part.device)
        quantizer = self.storage._caster()
        how: dict[str, Any] = {}
        delayed = isinstance(quantizer, Float8Quantizer)
        if not delayed or quantizer.measure_first:
            how["partials"] = casts.partials_of(self.amax)
        if delayed:
            how["scale"] = quantizer.scale.to(made.device)
            largest = torch.maximum(quantizer.amax, self.amax.to(quantizer.amax.device))
            quantizer.amax.copy_(largest)
        else:
            how["amax_epsilon"] = quantizer.amax_epsilon
            how["power_2_scale"] = quantizer.force_pow_2_scales
        forms = {"row": made, "row_scales": self.storage._scales}
        code = code_of(self.storage._fp8_dtype)
        casts.cast(self.part, _core.SCALING_TENSOR, code, **forms, **how)
        if self.part.numel() > 0:
            self._put(made)


# ---- a scale for each unit -----------------------------------------------------------------------


class _Units(NamedTuple):
    """The units of a form: `height` rows by `width` columns each, of a matrix."""

    rows: int
    columns: int
    height: int
    width: int

    @property
    def shape(self) -> tuple[int, int]:
        """How many there are, down and across."""
        return -(-self.rows // self.height), -(-self.columns // self.width)

    def band(self, start: int, end: int) -> tuple[int, int]:
        """First row, and the row after the last one, of the units that elements lie in."""
        first = start // self.columns // self.height * self.height
        rows = -(-end // self.columns)
        return first, min(-(-rows // self.height) * self.height, self.rows)


class UnitSlice(Slice):
    """Of a tensor with a scale for each tile, row or group."""

    def __init__(self, storage: Any, part: Tensor, start: int, shards: Shards) -> None:
        super().__init__(storage, part, start, shards)
        self.quantizer = storage._caster().copy()
        self.quantizer.internal = True
        self.is_fp4 = isinstance(storage, NVFP4TensorStorage)
        self.square = storage._turns()
        mode = storage._mode()
        size = (self.rows, self.columns)
        self.row_units = _Units(
            *size,
            _LINES[mode] if self.square else 1,
            _LINES.get(mode, self.columns),
        )
        self.column_units = None
        if storage._columnwise_data is not None and not self.square:
            self.column_units = _Units(*size, _LINES.get(mode, self.rows), 1)
        # Column-wise codes lie in the order of elements: a rank may have those of a slice.
        self.in_order = mode == _core.SCALING_MXFP8 and storage._columnwise_data is not None
        self._span()  # before others wait for this rank

    def measure(self) -> list[Tensor]:
        self.to_shards = None
        if self.in_order:  # a rank without elements has no shards: the others tell it
            given = float(self.shards.column is not None)
            self.to_shards = self.part.new_full((1,), given, dtype=torch.float32)
        self.amax = self.column_tops = None
        self.row_tops = self._tops(self.row_units)
        if self.column_units is not None:
            self.column_tops = self._tops(self.column_units)
        if self.is_fp4:  # NaN is no largest magnitude of a tensor, but that of a group
            self.amax = self._largest()
        found = self.row_tops, self.column_tops, self.amax, self.to_shards
        return [t for t in found if t is not None]

    @functools.cached_property
    def keeps_columns(self) -> bool:  # waits for the device where the rank has no elements
        if self.part.numel() > 0 or self.to_shards is None:
            return self.shards.column is not None
        return bool(self.to_shards.item())

    def share(self) -> Tensor | None:
        """Column-wise codes, unless each rank has a shard for its own."""
        if self.column_units is None or self.keeps_columns:
            return None
        turned = self.storage._mode() != _core.SCALING_MXFP8
        size = (self.columns, self.rows) if turned else (self.rows, self.columns)
        codes = torch.zeros(size, dtype=torch.uint8, device=self.part.device)
        if self.part.numel() > 0:
            made, first, last = self._cast(self.column_units, self.column_tops, columnwise=True)
            mine = torch.zeros(last - first, self.columns, dtype=torch.uint8, device=codes.device)
            at = first * self.columns
            mine.view(-1)[self.start - at : self.end - at] = 1
            if turned:
                torch.mul(made._columnwise_data, mine.t(), out=codes[:, first:last])
            else:
                torch.mul(made._columnwise_data, mine, out=codes[first:last])
        return codes

    def write(self, shared: Tensor | None) -> None:
        storage = self.storage
        if self.part.numel() > 0:
            made, first, _ = self._cast(self.row_units, self.row_tops, columnwise=False)
            mine, before = self._span(), first * made._rowwise_data.shape[-1]
            codes = made._rowwise_data.reshape(-1)[mine.start - before : mine.stop - before]
            self._put(codes)
            self._put_columns(codes)
        self._write_scales(storage._rowwise_scale_inv, self.row_units, self.row_tops)
        if self.column_units is not None:
            self._write_scales(storage._columnwise_scale_inv, self.column_units, self.column_tops)
        elif self.square and self.keeps_columns:
            storage._columnwise_scale_inv.copy_(storage._turned_scales())
        if shared is not None:
            storage._columnwise_data.copy_(shared.view(storage._columnwise_data.shape))

    def _put_columns(self, codes: Tensor) -> None:
        """Write column-wise codes to a shard, where there is one: those of squares are `codes`."""
        if self.shards.column is None:
            return
        if self.column_units is not None:
            made, first, _ = self._cast(self.column_units, self.column_tops, columnwise=True)
            at = first * self.columns
            codes = made._columnwise_data.reshape(-1)[self.start - at : self.end - at]
        _copy_bytes(codes, self.shards.column)

    def _tops(self, units: _Units) -> Tensor:
        """The largest magnitude that the slice has of each unit, fp32; 0 where it has none."""
        tops = torch.zeros(units.shape, dtype=torch.float32, device=self.part.device)
        if self.part.numel() == 0:
            return tops
        first, last = units.band(self.start, self.end)
        nan = math.nan if self.is_fp4 else 0.0  # which makes a scale of NVFP4 NaN
        down, across = -(-(last - first) // units.height), units.shape[1]
        high, wide = down * units.height, across * units.width
        band = self.part.new_zeros(high * self.columns)
        at = first * self.columns
        band[self.start - at : self.end - at] = self.part.abs().nan_to_num(nan=nan, posinf=math.inf)
        band = torch.nn.functional.pad(band.view(high, -1), (0, wide - self.columns))
        found = band.view(down, units.height, across, units.width).amax((1, 3))
        tops[first // units.height :][:down] = found
        return tops

    def _cast(self, units: _Units, tops: Tensor, columnwise: bool) -> tuple[Any, int, int]:
        """A form of the rows of the slice, and which rows these are."""
        first, last = units.band(self.start, self.end)
        tops = tops[first // units.height : -(-last // units.height)].to(self.part.dtype)
        spread = tops[:, None, :, None].expand(-1, units.height, -1, units.width)
        band = spread.reshape(len(tops) * units.height, -1)
        band = band[: last - first, : self.columns]
        band = band.clone(memory_format=torch.contiguous_format)  # where it is a view of `tops`
        at = first * self.columns
        band.view(-1)[self.start - at : self.end - at] = self.part
        return self._made(self.quantizer, band, columnwise), first, last

    def _made(self, quantizer: Any, values: Tensor, columnwise: bool) -> Any:
        quantizer.set_usage(rowwise=not columnwise, columnwise=columnwise)
        made = quantizer.make_empty(values.shape, dtype=values.dtype, device=values.device)
        quantizer._cast(values, made, None, self.amax)
        return made

    def _write_scales(self, scales: Tensor, units: _Units, tops: Tensor) -> None:
        """Make the scales of all units: those of columns of one value each, which is an amax."""
        mode, count = self.storage._mode(), tops.numel()
        quantizer = self.quantizer.copy()
        if mode == _core.SCALING_BLOCK_2D:
            quantizer.block_scaling_dim = 1
        elif self.square:
            quantizer.with_2d_quantization = False
        if self.is_fp4:
            quantizer.with_rht = False
        made = self._made(quantizer, tops.reshape(1, -1).to(self.part.dtype), True)
        found = made._columnwise_scale_inv
        if self.is_fp4:
            for amax in (self.storage._amax_rowwise, self.storage._amax_columnwise):
                if amax is not None:
                    amax.copy_(made._amax_columnwise)
        if mode == _core.SCALING_ROW:
            scales.copy_(found)
            return
        blocks = mode in (_core.SCALING_BLOCK_1D, _core.SCALING_BLOCK_2D)
        found = (found[:count, 0] if self.is_fp4 else found[0, :count]).view(units.shape)
        if mode == _core.SCALING_BLOCK_1D and units is self.row_units:
            found = found.t()
        elif self.square and not blocks:  # repeated in each row
            found = found.repeat_interleave(units.height, 0)[: self.rows]
        scales.zero_()
        scales[: found.shape[0], : found.shape[1]] = found


# ---- values --------------------------------------------------------------------------------------


class WholeSlice(Slice):
    """Of a tensor whose casts hang on more than amaxes: the values of all ranks are put together.

    Each rank casts the whole, in all forms that there are.
    """

    def share(self) -> Tensor | None:
        whole = self.part.new_zeros(self.rows * self.columns)
        whole[self.start : self.end] = self.part
        return whole.view(torch.uint8)

    def write(self, shared: Tensor | None) -> None:
        self.storage._write(shared.view(self.part.dtype).view(self.storage.shape))
        if self.shards.row is not None and self.part.numel() > 0:
            self._put(self._row_data().reshape(-1)[self._span()])


class IdentitySlice(Slice):
    """Of values in high precision."""

    def write(self, shared: Tensor | None) -> None:
        if self.part.numel() > 0:
            self._put(self.part.to(self.storage._hp_data.dtype))


# ---- which one -----------------------------------------------------------------------------------


def slices_of(weight: Any, part: Tensor, start: int, shards: Shards) -> list[Slice]:
    """The slices of a parameter: one, but of a hybrid one for each part that is written.

    ValueError without row-wise data, for a shard of a class of a program, and for a column-wise
    shard of what has no column-wise bytes in the order of elements.
    """
    storage = row_storage(weight)
    field = row_data_field(storage)
    if storage is not None and field is None:
        if any(shard is not None for shard in shards):
            raise ValueError(
                f"quantize_master_weights: a shard for a {type(storage).__name__}, a class of the "
                "program whose bytes this library does not know: give None, and each rank casts "
                "all of it"
            )
    elif storage is None or getattr(storage, field) is None:
        raise ValueError(
            f"quantize_master_weights: a {type(weight).__name__} without row-wise data, where "
            "ranks write their slices: call update_usage(rowwise_usage=True) before"
        )
    made = [_kind_of(storage)(storage, part, start, shards)]
    if shards.column is not None and (storage is not weight or not made[0].in_order):
        raise ValueError(
            f"quantize_master_weights: a column-wise shard for a {type(weight).__name__} without "
            "column-wise data, or whose column-wise data are not in the order of elements as those "
            "of MXFP8 are: give the row-wise shard alone"
        )
    if storage is weight or weight._columnwise_storage is None:
        return made
    if weight._caster().columnwise_source == "original":
        made.append(WholeSlice(weight._columnwise_storage, part, start, Shards()))
    return made


def _kind_of(storage: Any) -> type[Slice]:
    quantizer = storage._caster()
    natively = quantizer._casts_natively and quantizer._writes_natively
    if not natively or row_data_field(storage) is None:
        return WholeSlice  # a class of a program casts, or reads, by itself
    if isinstance(storage, Float8TensorStorage):
        return PerTensorSlice
    if isinstance(storage, IdentityTensorStorage):
        return IdentitySlice
    if storage.shape.numel() == 0:
        return WholeSlice
    if not isinstance(storage, NVFP4TensorStorage):
        return UnitSlice
    # Errors of whole groups decide between 4 and 6, random numbers belong to places in the whole,
    # and column-wise two ranks share bytes.
    chosen = quantizer.nvfp4_use_4over6 or quantizer.stochastic_rounding
    by_columns = storage._columnwise_data is not None and not storage._is_2D_scaled
    whole = chosen or by_columns or storage._row_scaled_nvfp4
    return WholeSlice if whole else UnitSlice
