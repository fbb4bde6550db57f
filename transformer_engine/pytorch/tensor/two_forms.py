# SPDX-License-Identifier: Apache-2.0
"""Base of formats that have scales of their own for each form: a class of these is a few lines.

Both forms are cast from high precision. A format says by `_mode` how its scales lie
(``_core.SCALING_*``), and by `_turned` whether one form can be made of the other.
"""

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from transformer_engine import _core
from transformer_engine.pytorch.constants import DType
from transformer_engine.pytorch.tensor import casts
from transformer_engine.pytorch.tensor.casts import code_of
from transformer_engine.pytorch.tensor.joints import Joint, joints_of, rows_of
from transformer_engine.pytorch.tensor.quantized_storage import FormatStorage
from transformer_engine.pytorch.tensor.quantized_tensor import FormatTensor
from transformer_engine.pytorch.tensor.quantizer import CodesQuantizer
from transformer_engine.pytorch.tensor.quantizer_arguments import (
    FP8,
    as_bytes,
    checked_shape,
    fitted,
    fp8_type,
)

FORMS = ("rowwise_data", "rowwise_scale_inv", "columnwise_data", "columnwise_scale_inv")
"""Arguments that are the tensors of every such format."""


def _refuse_swizzled(storage: Any, swizzled: Any) -> None:
    if swizzled:
        raise NotImplementedError(
            f"{type(storage).__name__}: with_gemm_swizzled_scales=True: scales are read row after "
            "row here, not in the order of GEMMs: give them like that"
        )


rows_of_scales = property(lambda storage: False, _refuse_swizzled)
"""``_with_gemm_swizzled_scales`` of a format: False, and scales that lie otherwise are refused."""


class TwoFormStorage(FormatStorage):
    """Data and scales row-wise and column-wise; None for a form that is not there.

    Parameters
    ----------
    rowwise_data, columnwise_data : Tensor, optional
        uint8 [..., columns], and [columns, ...].
    rowwise_scale_inv, columnwise_scale_inv : Tensor, optional
        fp32, as the format has them.
    fp8_dtype : DType
        Of the codes.
    quantizer, fake_dtype
        As of `FormatStorage`.
    """

    _CAST_APART = True
    _TENSORS = tuple(f"_{name}" for name in FORMS)
    _FORMS = _TENSORS[:2], _TENSORS[2:]
    _SETTINGS: tuple[str, ...] = ("_fp8_dtype",)
    _KINDS = FP8
    """Element types that there are."""
    _OTHER_NAMES: ClassVar[dict[str, str]] = {}
    """Of arguments, and those that they stand for."""
    _JOINTS: ClassVar[dict[tuple[str, bool], Joint]] = {}
    """By form, and whether scales are of squares; none where they are of all rows."""
    _GATHERED: ClassVar[dict[tuple[str, bool], Joint]] = {}
    """The same of a format whose parts join where all of them have one amax, or in one form."""

    _rowwise_data: Tensor | None
    _rowwise_scale_inv: Tensor | None
    _columnwise_data: Tensor | None
    _columnwise_scale_inv: Tensor | None
    _fp8_dtype: DType

    @classmethod
    def _checked(cls, arguments: dict[str, Any], shape: tuple | None = None) -> dict[str, Any]:
        arguments = {cls._OTHER_NAMES.get(name, name): value for name, value in arguments.items()}
        given = cls._given(arguments, *(name[1:] for name in (*cls._TENSORS, *cls._SETTINGS)))
        fields = {f"_{name}": value for name, value in given.items()}
        if fields["_rowwise_data"] is None and fields["_columnwise_data"] is None:
            raise ValueError(f"{cls.__name__}: rowwise_data and columnwise_data are None: give one")
        label = f"{cls.__name__}: fp8_dtype"
        fields["_fp8_dtype"] = kind_of = fp8_type(label, fields["_fp8_dtype"], cls._KINDS)
        fields = cls._of_shape(fields, shape)
        _fit(cls, fields, shape)
        for name in ("_rowwise_data", "_columnwise_data") if kind_of in FP8 else ():
            if fields[name] is not None:
                fields[name] = casts.given(fields[name])
        return fields

    # ---- what a format says ----------------------------------------------------------------------

    _MODE: ClassVar[int]
    """``_core.SCALING_*`` of its scales."""

    def _mode(self) -> int:
        return self._MODE

    def _of_layout(self) -> "TwoFormQuantizer":
        """A quantizer that makes tensors of this layout."""
        raise NotImplementedError

    def _shapes(self, shape: tuple) -> dict[str, tuple[int, ...]]:
        """Shapes of its tensors, by the names of fields, for a tensor of this shape."""
        layout = self._of_layout()
        return {
            "_rowwise_data": layout._rowwise_shape(shape),
            "_rowwise_scale_inv": layout.get_scale_shape(shape),
            "_columnwise_data": layout.get_columnwise_shape(shape),
            "_columnwise_scale_inv": layout.get_scale_shape(shape, True),
        }

    def _turned(self) -> tuple[Tensor, Tensor] | None:
        """Column-wise data and scales, made of the row-wise ones; None where they can not be."""
        return None

    def _memory_of_columns(self, fields: dict[str, Any], shape: tuple) -> dict[str, Any]:
        """Fields of the column-wise form of a tensor of other fields and shape, for `_turn`."""
        scales = self._shapes(shape)["_columnwise_scale_inv"]
        device = fields["_rowwise_data"].device
        return {
            "_columnwise_data": self._of_layout()._empty_columns(shape, device, False),
            "_columnwise_scale_inv": self._rowwise_scale_inv.new_empty(scales),
        }

    def _turn(self) -> None:
        """Write the column-wise form that is there, made of the row-wise one."""
        data, scales = self._turned()
        self._columnwise_data.copy_(data)
        self._columnwise_scale_inv.copy_(scales)

    # ---- values ----------------------------------------------------------------------------------

    @classmethod
    def _with_data(cls, fields: dict, data: Tensor) -> dict:
        return {
            **fields,
            "_rowwise_data": data,
            "_columnwise_data": None,
            "_columnwise_scale_inv": None,
        }

    @classmethod
    def _restored(cls, fields: dict[str, Any]) -> dict[str, Any]:
        return {**fields, "_fp8_dtype": fp8_type("_fp8_dtype", fields["_fp8_dtype"], cls._KINDS)}

    def _extent(self) -> tuple[int, ...]:
        if self._rowwise_data is not None:
            return tuple(self._rowwise_data.shape)
        return self._shape_of_columns(self._columnwise_data)

    def _shape_of_columns(self, data: Tensor) -> tuple[int, ...]:
        """Shape of the tensor of its column-wise data."""
        return (*data.shape[1:], data.shape[0])

    def _viewed_columns(self, data: Tensor, shape: Sequence[int]) -> Tensor:
        """Column-wise data of a tensor of a shape that differs in leading dims."""
        return data.view(shape[-1], *shape[:-1])

    def _decoded(self, dtype: torch.dtype, shape: tuple) -> Tensor:
        if self._rowwise_data is None and self._columnwise_data is None:
            raise RuntimeError(f"{type(self).__name__}: it has no data: both forms were dropped")
        data = self.get_data_tensors()
        to_256 = self._scales_to_256()
        return casts.dequantize(data, self._mode(), self._code(), shape, dtype, to_256)

    def _scales_to_256(self) -> bool:
        """Return whether the scales of groups of NVFP4 go up to 256 instead of 448."""
        return False

    def _code(self) -> int:
        """``_core.DTYPE_*`` of the elements of its data."""
        return code_of(self._fp8_dtype)

    def _takes(self, source: Any) -> bool:
        return self._has_format_of(source) and self.shape == source.shape

    def _has_format_of(self, source: Any) -> bool:
        """Return whether codes and scales of another tensor mean here what they mean there."""
        return (
            isinstance(source, TwoFormStorage)
            and source._mode() == self._mode()
            and source._format() == self._format()
            and all(source.get_usages()[form] for form, own in self.get_usages().items() if own)
        )

    def _format(self) -> list:
        """Settings of tensors of any shape."""
        return [getattr(self, name) for name in self._SETTINGS if name != "_logical_shape"]

    def _copy_rows(self, source: Any, first: int, start: int, count: int) -> bool:
        """Copy rows of a matrix from `start` on to those from `first` on: codes and scales.

        False where it has another format, or where these lie together with those of other rows.
        """
        if not (self._has_format_of(source) and self._shares_amax()):
            return False
        forms = [form for form, own in self.get_usages().items() if own]
        lengths = self.shape[0], source.shape[0], first, start, count
        kind = getattr(type(self), "_STORAGE", type(self))
        joints = [joints_of(kind, self._turns(), forms, rows) for rows in lengths]
        if None in joints:
            return False
        self._settle(), source._settle()
        mine, theirs = (
            rows_of(matrix, joints[0], at, count) for matrix, at in ((self, first), (source, start))
        )
        for into, given in zip(mine, theirs, strict=True):
            into.copy_(given)
        return True

    def _shares_amax(self) -> bool:
        """Return whether all parts of a weight have one amax; a format without one has no other."""
        return True

    def _viewed_fields(self, view: Any) -> dict[str, Any] | None:
        """Views of all values that keep the last dim: the scales are those of whole rows."""
        if self._rowwise_data is None:
            return None
        try:
            data = view(self._rowwise_data)
        except RuntimeError:  # padded rows do not lie as the nominal ones
            return None
        old = self._rowwise_data.shape
        if (
            data.dim() == 0
            or data.shape[-1] != old[-1]
            or data.shape[:-1].numel() != old[:-1].numel()
        ):
            return None
        fields = {**self._fields(), "_rowwise_data": data}
        if self._columnwise_data is not None:
            fields["_columnwise_data"] = self._viewed_columns(self._columnwise_data, data.shape)
        return fields

    # ---- forms -----------------------------------------------------------------------------------

    def _make_form(self, form: str) -> None:
        """Make the column-wise one, where it can be made of the row-wise one."""
        rows = form == "columnwise" and self._rowwise_data is not None
        made = self._turned() if rows else None
        if made is None:
            super()._make_form(form)
        self._columnwise_data, self._columnwise_scale_inv = made

    def _shown(self) -> dict[str, Any]:
        return {"fp8_dtype": self._fp8_dtype.name}


# ---- rows after rows -----------------------------------------------------------------------------


def _joints_of(tensor: Any) -> dict[str, Joint]:
    """Of the forms of a tensor that are there; KeyError where there is none."""
    forms = [f for f in ("rowwise", "columnwise") if getattr(tensor, f"_{f}_data") is not None]
    return {form: type(tensor)._JOINTS[form, bool(tensor._is_2D_scaled)] for form in forms}


def joins(parts: Sequence[Any]) -> bool:
    """Return whether quantized matrices can be put row after row, with all their codes and scales.

    They are of one format, with the same forms. It asks for attributes alone: a compiler traces it.
    """
    first = parts[0]
    if not getattr(type(first), "_JOINTS", None) or first.dim() != 2:
        return False
    for part in parts[1:]:
        if (
            type(part) is not type(first)
            or (part.dtype, part.device) != (first.dtype, first.device)
            or part.shape[1:] != first.shape[1:]
            or any(getattr(part, name) != getattr(first, name) for name in type(first)._SETTINGS)
            or (part._rowwise_data is None) != (first._rowwise_data is None)
            or (part._columnwise_data is None) != (first._columnwise_data is None)
        ):
            return False
    joints = _joints_of(first).values()
    return not any(part.shape[0] % joint.whole for part in parts[:-1] for joint in joints)


def joined_fields(parts: Sequence[Any]) -> dict[str, Any]:
    """Fields of the tensor of all rows of matrices that `joins` says yes to."""
    fields = parts[0]._fields()
    for form, joint in _joints_of(parts[0]).items():
        fields[f"_{form}_data"] = torch.cat(
            [getattr(p, f"_{form}_data") for p in parts], joint.data
        )
        scales = []
        for part in parts:
            count = -(-part.shape[0] // joint.rows)
            scales.append(getattr(part, f"_{form}_scale_inv").narrow(joint.scales, 0, count))
        made = torch.cat(scales, joint.scales)
        missing = -made.shape[joint.scales] % joint.align
        pads = (0, missing) if joint.scales == 1 else (0, 0, 0, missing)
        fields[f"_{form}_scale_inv"] = torch.nn.functional.pad(made, pads)
    return fields


def _fit(kind: type, fields: dict[str, Any], shape: Sequence[int] | None) -> None:
    """Make the tensors of fields those of a tensor of a shape: uint8 data, of its dims."""
    for name in ("_rowwise_data", "_columnwise_data"):
        if fields.get(name) is not None:
            fields[name] = as_bytes(f"{kind.__name__}: {name[1:]}", fields[name])
    probe = getattr(kind, "_STORAGE", kind)._made(fields, torch.float32)
    if shape is None:
        shape = probe._extent()
    for name, expected in probe._shapes(tuple(shape)).items():
        form = fields.get("_rowwise_data" if "rowwise" in name else "_columnwise_data")
        if form is not None:
            fields[name] = fitted(f"{kind.__name__}: {name[1:]}", fields.get(name), expected)


class TwoFormTensor(FormatTensor):
    """A tensor over such a storage."""

    @staticmethod
    def _joined_fields(parts: Any) -> dict[str, Any] | None:
        return joined_fields(parts) if joins(parts) else None


class TwoFormQuantizer(CodesQuantizer):
    """Casts by scales that are found in the tensor itself; arguments as of `CodesQuantizer`."""

    _REPEATS = True
    _SCALES = torch.float32
    _empty_rows = staticmethod(casts.empty_rows)
    _empty_columns = staticmethod(casts.empty_columns)

    def _mode(self) -> int:
        """``_core.SCALING_*`` of what it makes."""
        return self.STORAGE._MODE

    def _rowwise_shape(self, shape: tuple) -> tuple[int, ...]:
        """Shape of the row-wise data of a tensor."""
        return shape

    def get_columnwise_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Shape of the column-wise data of a tensor; ValueError for one without dims."""
        self._check_shape(tuple(shape))
        return super().get_columnwise_shape(shape)

    def _lines_of(self, shape: Sequence[int]) -> tuple[int, int]:
        """Number of rows of a tensor, and their length."""
        shape = checked_shape(type(self).__name__, shape)
        self._check_shape(shape)
        return math.prod(shape[:-1]), shape[-1]

    def get_scale_shape(self, shape: Sequence[int], columnwise: bool = False) -> tuple[int, ...]:
        """Shape of the scales of a tensor's row-wise, or column-wise, data."""
        return scale_shape(self._mode(), *self._lines_of(shape), columnwise)

    def _empty(self, shape: tuple, device: torch.device, pin_memory: bool) -> dict[str, Any]:
        self._check_shape(shape)
        self._check_usages()
        fields = self._format_settings(shape)
        options = {"dtype": self._SCALES, "device": device, "pin_memory": pin_memory}
        if self.rowwise_usage:
            fields["_rowwise_data"] = self._empty_rows(shape, device, pin_memory)
            fields["_rowwise_scale_inv"] = torch.empty(self.get_scale_shape(shape), **options)
        if self.columnwise_usage:
            fields["_columnwise_data"] = self._empty_columns(shape, device, pin_memory)
            scales = torch.empty(self.get_scale_shape(shape, True), **options)
            fields["_columnwise_scale_inv"] = scales
        return fields

    def _cast(
        self, source: Tensor, into: Any, noop: Tensor | None, amax: Tensor | None = None
    ) -> None:
        """Write the forms that a storage has.

        `amax`, fp32 [1], is the largest magnitude where `source` is a part of what it is cast with.
        """
        names = ("row", "row_scales", "column", "column_scales", "row_amax", "column_amax")
        forms = dict(zip(names, into.get_data_tensors(), strict=False))
        how = self._how(source, into, amax)
        casts.cast(source, into._mode(), into._code(), **forms, **how, noop=noop)

    def _how(self, source: Tensor, into: Any, amax: Tensor | None) -> dict[str, Any]:
        """Further arguments of `casts.cast`; what a storage says of its layout goes before."""
        del source, into, amax
        return {"amax_epsilon": self.amax_epsilon, "power_2_scale": self.force_pow_2_scales}

    def _check_shape(self, shape: tuple) -> None:
        if not shape:
            raise ValueError(
                f"{type(self).__name__}: shape (): its scales are of values along dims, expected "
                "at least one dim: give tensor.reshape(1)"
            )


def scale_shape(mode: int, lines: int, length: int, columnwise: bool = False) -> tuple[int, ...]:
    """Shape of the scales of a form of [lines, length], as TE_SCALING_MODES in the C header."""
    down, across = -(-lines // 128), -(-length // 128)
    if mode == _core.SCALING_MXFP8:  # whose column-wise data are not transposed
        return (4 * down, 128 * across) if columnwise else (128 * down, 4 * across)
    if columnwise:
        lines, length, down, across = length, lines, across, down
    if mode == _core.SCALING_NVFP4:
        return 128 * down, -(-length // 64) * 4
    if mode == _core.SCALING_ROW:
        return 2, lines
    if mode == _core.SCALING_BLOCK_1D:
        return across, -(-lines // 4) * 4
    return down, -(-length // 512) * 4
