# SPDX-License-Identifier: Apache-2.0
"""Another format for each form: what one GEMM reads need not be what another one does."""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from transformer_engine.pytorch.tensor.float8_tensor import (
    Float8CurrentScalingQuantizer,
    Float8TensorStorage,
)
from transformer_engine.pytorch.tensor.pickling import (
    pickled_class,
    rebuild_quantizer,
    rebuild_storage,
)
from transformer_engine.pytorch.tensor.quantized_storage import FormatStorage
from transformer_engine.pytorch.tensor.quantized_tensor import (
    FormatTensor,
    InnerTensor,
    QuantizedTensor,
    QuantizedTensorStorage,
    Quantizer,
)

_SOURCES = ("original", "rowwise_dequantized")
_ARGUMENTS = ("rowwise_quantizer", "columnwise_quantizer", "columnwise_source")
_PARTS = ("rowwise_storage", "columnwise_storage")
_OF_COLUMNS = ("_with_rht", "_with_random_sign_mask")
"""Settings of storages that say something of the column-wise form alone."""
_OF_ONE = {*_OF_COLUMNS, "_row_scaled_nvfp4", "_transpose_version"}
"""Those that say something of one form."""


class HybridQuantizedTensorStorage(FormatStorage):
    """Two storages: one is read row-wise, the other column-wise.

    Parameters
    ----------
    rowwise_storage, columnwise_storage : QuantizedTensorStorage, optional
        Of the same shape; one at least.
    quantizer, fake_dtype
        As of `FormatStorage`.
    """

    _CAST_APART = True
    _SETTINGS = tuple(f"_{name}" for name in _PARTS)
    _FORMS = _SETTINGS[:1], _SETTINGS[1:]

    _rowwise_storage: QuantizedTensorStorage | None
    _columnwise_storage: QuantizedTensorStorage | None

    @classmethod
    def _checked(cls, arguments: dict[str, Any], shape: tuple | None = None) -> dict[str, Any]:
        given, label = cls._given(arguments, *_PARTS), cls.__name__
        for name in _PARTS:
            part = given[name]
            if part is None:
                continue
            if not isinstance(part, QuantizedTensorStorage):
                kind = type(part).__name__
                raise TypeError(f"{label}: {name}: {kind}, expected a QuantizedTensorStorage")
            shape = tuple(part.shape) if shape is None else shape
            if tuple(part.shape) != shape:
                raise ValueError(f"{label}: {name}: shape {tuple(part.shape)}, expected {shape}")
        if all(given[name] is None for name in _PARTS):
            raise ValueError(f"{label}: {' and '.join(_PARTS)} are None: give one")
        return {f"_{name}": value for name, value in given.items()}

    @property
    def _storages(self) -> tuple[QuantizedTensorStorage, ...]:
        both = (self._rowwise_storage, self._columnwise_storage)
        return tuple(storage for storage in both if storage is not None)

    rowwise_sub_storage = property(
        lambda self: self._rowwise_storage, doc="What is read row-wise; None where it was dropped."
    )
    columnwise_sub_storage = property(
        lambda self: self._columnwise_storage, doc="What is read column-wise, likewise."
    )

    def get_data_tensors(self) -> tuple[Tensor | None, ...]:
        """The tensors of both."""
        return tuple(tensor for part in self._storages for tensor in part.get_data_tensors())

    def _mapped(self, function: Any) -> dict[str, Any]:
        fields = self._fields()
        for name in self._SETTINGS:
            part = fields[name]
            if part is not None:
                fields[name] = part._like(part._mapped(function))
        return fields

    def _kind(self) -> tuple:
        parts = (getattr(self, name) for name in self._SETTINGS)
        kinds = [None if part is None else (type(part), *part._kind()) for part in parts]
        return *kinds, getattr(self._quantizer, "columnwise_source", None)

    def _as_one(self) -> QuantizedTensorStorage | None:
        """A storage that has both forms, as one cast makes them; None where no format has.

        With one scale for the tensor it is that of the row-wise form: equal quantizers have cast
        the same values.
        """
        if getattr(self._quantizer, "columnwise_source", None) != _SOURCES[0]:
            return None
        parts = [
            part._as_one() if isinstance(part, HybridQuantizedTensorStorage) else part
            for part in self._storages
        ]
        if len(parts) < 2:
            return parts[0] if parts else None
        row, column = parts
        if row is None or type(row) is not type(column) or not _are_alike(row, column):
            return None
        fields, other = row._fields(), column._fields()
        for name in row._TENSORS:
            if fields[name] is None:
                fields[name] = other[name]
        for name in _OF_COLUMNS:
            if name in fields:
                fields[name] = other[name]
        made = type(row)._made(fields, self._dtype)
        made._written()
        return made

    def _takes(self, source: Any) -> bool:
        """Return whether data can be copied: form by form, as each was cast by itself."""
        return (
            isinstance(source, HybridQuantizedTensorStorage)
            and source._kind() == self._kind()
            and source.shape == self.shape
            and _present(source) == _present(self)
        )

    # ---- taken apart -----------------------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        """A tensor of a part, by the name that `_flat` gives it."""
        for own in self._SETTINGS:
            if name.startswith(f"{own}_"):
                return getattr(getattr(self, own), name[len(own) + 1 :])
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def _flat(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        tensors, parts = {}, {}
        for own in self._SETTINGS:
            part = getattr(self, own)
            if part is not None:
                found, rest = part._flat()
                tensors.update({f"{own}_{name}": tensor for name, tensor in found.items()})
                parts[own] = type(part), rest
        about = {"_quantizer": self._quantizer, "_dtype": self._dtype, "_kind": self._kind()}
        return tensors, {**about, "_parts": parts}

    @classmethod
    def _of_flat(
        cls, tensors: dict[str, Tensor], rest: dict[str, Any], shape: Any
    ) -> dict[str, Any]:
        fields = {"_quantizer": rest["_quantizer"]}
        for own, (kind, of_part) in rest["_parts"].items():
            at = len(own) + 1
            found = {name[at:]: t for name, t in tensors.items() if name.startswith(f"{own}_")}
            made = kind._of_flat(found, of_part, shape)
            fields[own] = kind._made(made, of_part["_dtype"], shape)
            fields[own]._take_state(of_part)
        return fields

    def _plain_fields(self) -> tuple[dict[str, Any], tuple | None]:
        fields, recast = super()._plain_fields()
        for own in self._SETTINGS:
            part = fields[own]
            if part is not None and not isinstance(part, Tensor):
                fields[own] = (pickled_class(type(part)), part._dtype, *part._plain_fields())
        return fields, recast

    @classmethod
    def _restored(cls, fields: dict[str, Any]) -> dict[str, Any]:
        """Fields of a pickle: a part of a class of a program is a tensor, pickled by itself."""
        made: dict[str, Any] = {}
        for name, part in fields.items():
            if part is not None and not isinstance(part, QuantizedTensor | tuple):
                raise ValueError(
                    f"a pickled {cls.__name__}: a part is a {type(part).__name__}, expected a "
                    "quantized tensor: the pickle is damaged"
                )
            made[name] = rebuild_storage(*part) if isinstance(part, tuple) else part
        return made

    def copy_from_storage(self, src: "HybridQuantizedTensorStorage") -> None:
        """Copy data and scales of another one with the same formats and forms, in place."""
        if _present(src) != _present(self):
            raise ValueError(
                f"{type(self).__name__}: src lacks a form that this tensor has: give one with the "
                "same forms"
            )
        for mine, other in zip(self._storages, src._storages, strict=True):
            # Not as the formats have it, which would make one form of the other.
            QuantizedTensorStorage.copy_from_storage(mine, other)
        self._written()

    def _extent(self) -> tuple[int, ...]:
        return self._storages[0]._extent()

    def _decoded(self, dtype: torch.dtype, shape: tuple) -> Tensor:
        if not self._storages:
            raise RuntimeError(f"{type(self).__name__}: it has no data: they were dropped")
        return self._storages[0]._dequantized(dtype, shape)

    def _make_form(self, form: str) -> None:
        """Make the column-wise one, where the quantizer casts it of the row-wise one."""
        quantizer, row = self._quantizer, self._rowwise_storage
        source = getattr(quantizer, "columnwise_source", _SOURCES[0])
        if form == "rowwise" or row is None or source == _SOURCES[0]:
            raise RuntimeError(
                f"{type(self).__name__}: _{form}_storage was dropped, and can not be made from the "
                "other form: quantize with both usages"
            )
        shape = tuple(self.shape)
        with torch.no_grad():
            made = quantizer._part("columnwise", shape, self.device)
            made._write(row._dequantized(self._dtype, shape), quantizer.columnwise_quantizer)
        self._columnwise_storage = made

    def prepare_for_saving(self) -> tuple[list[Tensor | None], "HybridQuantizedTensorStorage"]:
        """Take the tensors out; see `QuantizedTensorStorage`."""
        return [t for part in self._storages for t in part.prepare_for_saving()[0]], self

    def restore_from_saved(self, tensors: list[Tensor | None]) -> list[Tensor | None]:
        """Take the tensors from the front of a list; return the others."""
        for part in self._storages:
            tensors = part.restore_from_saved(tensors)
        return tensors


class HybridQuantizedTensor(FormatTensor, HybridQuantizedTensorStorage):
    """A tensor with a format for each form; see `HybridQuantizedTensorStorage`."""

    _STORAGE = HybridQuantizedTensorStorage
    _PICKLED = (*_PARTS, "quantizer", "dtype", "shape")

    def __deepcopy__(self, memo: dict) -> Any:
        """Copy data, attributes, and the quantizers of both parts; a parameter stays one."""
        made = super().__deepcopy__(memo)
        for part in made._storages:
            part._quantizer = copy.deepcopy(part._quantizer, memo)
        return made


def _present(storage: HybridQuantizedTensorStorage) -> list[bool]:
    """Which of its tensors are there."""
    return [tensor is not None for tensor in storage.get_data_tensors()]


def _are_alike(row: Any, column: Any) -> bool:
    """Return whether two storages of a class are of one format, with one scale where that has one.

    What a class of a program has is not known.
    """
    if isinstance(type(row)._TENSORS, property) or any(
        getattr(row, n) != getattr(column, n) for n in row._SETTINGS if n not in _OF_ONE
    ):
        return False
    if not isinstance(row, Float8TensorStorage):
        return True
    one, other = row._quantizer, column._quantizer
    return (
        type(one) is type(other) is Float8CurrentScalingQuantizer
        and one._own_settings() == other._own_settings()
    )


class HybridQuantizer(Quantizer):
    """Casts each form by a quantizer of its own.

    Parameters
    ----------
    rowwise_quantizer, columnwise_quantizer : Quantizer
        For each form.
    columnwise_source : {"original", "rowwise_dequantized"}
        What the column-wise form is cast from: the values, or what the row-wise form makes of them.

    Raises
    ------
    TypeError
        A part is no quantizer.
    ValueError
        `columnwise_source` is none of the two.
    """

    TENSOR, STORAGE = HybridQuantizedTensor, HybridQuantizedTensorStorage

    def __init__(
        self,
        *,
        rowwise_quantizer: Quantizer,
        columnwise_quantizer: Quantizer,
        columnwise_source: str = "original",
    ) -> None:
        super().__init__()
        if columnwise_source not in _SOURCES:
            names = " or ".join(map(repr, _SOURCES))
            raise ValueError(
                f"HybridQuantizer: columnwise_source={columnwise_source!r}, expected {names}"
            )
        for name, given in zip(_ARGUMENTS, (rowwise_quantizer, columnwise_quantizer), strict=False):
            if not isinstance(given, Quantizer):
                raise TypeError(
                    f"HybridQuantizer: {name}: {type(given).__name__}, expected a quantizer such "
                    "as te.MXFP8Quantizer(...)"
                )
        self.rowwise_quantizer = rowwise_quantizer
        self.columnwise_quantizer = columnwise_quantizer
        self.columnwise_source = columnwise_source

    @property
    def _parts(self) -> tuple[Quantizer, Quantizer]:
        return self.rowwise_quantizer, self.columnwise_quantizer

    @property
    def _reducing(self) -> list[Any]:
        """The parts that can reduce their amaxes over ranks."""
        return [part for part in self._parts if hasattr(part, "with_amax_reduction")]

    @property
    def with_amax_reduction(self) -> bool:
        """True where a part takes the largest amax of ranks; set, it is so of all that can."""
        return any(part.with_amax_reduction for part in self._reducing)

    @with_amax_reduction.setter
    def with_amax_reduction(self, value: bool) -> None:
        for part in self._reducing:
            part.with_amax_reduction = value

    @property
    def amax_reduction_group(self) -> Any:
        """The ranks of that: of the first part that names some; set, of all that can."""
        groups = (part.amax_reduction_group for part in self._reducing)
        return next((group for group in groups if group is not None), None)

    @amax_reduction_group.setter
    def amax_reduction_group(self, group: Any) -> None:
        for part in self._reducing:
            part.amax_reduction_group = group

    def is_quantizable(self, inp: Tensor) -> bool:
        """Return whether the formats of both parts can hold a tensor."""
        return all(part.is_quantizable(inp) for part in self._parts)

    def inner_tensor_specs(self, shape: Sequence[int]) -> list[InnerTensor]:
        """Raise NotImplementedError: it consists of two storages, of formats of their own."""
        raise NotImplementedError(
            "HybridQuantizer: inner_tensor_specs: what it makes consists of two storages: ask "
            "rowwise_quantizer and columnwise_quantizer"
        )

    def get_columnwise_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Shape of the data of the column-wise part."""
        return self.columnwise_quantizer.get_columnwise_shape(shape)

    def get_scale_shape(self, shape: Sequence[int], columnwise: bool = False) -> tuple[int, ...]:
        """Shape of the inverse scales of one of the parts."""
        part = self.columnwise_quantizer if columnwise else self.rowwise_quantizer
        return part.get_scale_shape(shape, columnwise)

    def is_requantization_safe(self) -> bool:
        """Return whether a tensor may be cast again where it is read again: by both parts."""
        return all(part.is_requantization_safe() for part in self._parts)

    def supports_only_rowwise_all_gather(self) -> bool:
        """Tell whether ranks gather row-wise data alone, of which each makes the column-wise ones.

        So it is where these are cast of the row-wise form, by a part whose casts repeat: all ranks
        make the same then. A cast of the original needs that, whatever the formats of the parts.
        """
        of_rows = self.columnwise_source != _SOURCES[0]
        return of_rows and self.columnwise_quantizer.is_requantization_safe()

    def _empty(self, shape: tuple, device: torch.device, pin_memory: bool) -> dict[str, Any]:
        self._check_usages()
        fields: dict[str, Any] = {}
        for name, wanted in self.get_usages().items():
            if wanted:
                fields[f"_{name}_storage"] = self._part(name, shape, device, pin_memory)
        return fields

    def _part(self, form: str, shape: tuple, device: torch.device, pin_memory: bool = False) -> Any:
        """The storage of a form, without values."""
        part = getattr(self, f"{form}_quantizer").copy()
        part.internal = True
        part.set_usage(rowwise=form == "rowwise", columnwise=form == "columnwise")
        made = part.make_empty(shape, device=device, pin_memory=pin_memory)
        return part._taken(made, "make_empty")

    def _cast(self, source: Tensor, into: Any, noop: Tensor | None) -> None:
        row, column = into._rowwise_storage, into._columnwise_storage
        if row is not None:
            row._write(source, self.rowwise_quantizer, noop)
        if column is None:
            return
        if self.columnwise_source != "original":
            if row is None:  # nobody keeps it
                row = self._part("rowwise", tuple(source.shape), source.device)
                row._write(source, self.rowwise_quantizer)
            source = row._dequantized(source.dtype, tuple(source.shape))
        column._write(source, self.columnwise_quantizer, noop)

    def copy(self) -> "HybridQuantizer":
        """Copy the settings, and those of both quantizers."""
        made = super().copy()
        made.rowwise_quantizer, made.columnwise_quantizer = (part.copy() for part in self._parts)
        return made

    def _own_settings(self) -> dict[str, Any]:
        parts = (part._as_plain() for part in self._parts)
        return dict(zip(_ARGUMENTS, (*parts, self.columnwise_source), strict=True))

    @classmethod
    def _of_plain(cls, arguments: dict[str, Any]) -> "HybridQuantizer":
        row, column, source = map(arguments.get, _ARGUMENTS)
        parts = rebuild_quantizer(*row), rebuild_quantizer(*column)
        made = cls(**dict(zip(_ARGUMENTS, (*parts, source), strict=True)))
        made.set_usage(rowwise=arguments["rowwise"], columnwise=arguments["columnwise"])
        return made

    def _settings(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in _ARGUMENTS}


def casters_of(quantizer: Quantizer | None) -> tuple[Quantizer, ...]:
    """Quantizers of the forms of its tensors: itself, or those of both; none of None."""
    if isinstance(quantizer, HybridQuantizer):
        row, column = map(casters_of, quantizer._parts)
        return row[:1] + column[-1:]
    return () if quantizer is None else (quantizer,)
