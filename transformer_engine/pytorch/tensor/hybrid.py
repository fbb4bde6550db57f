# SPDX-License-Identifier: Apache-2.0
"""Another format for each form: what one GEMM reads need not be what another one does."""

from typing import Any

import torch
from torch import Tensor

from transformer_engine.pytorch.quantized_tensor import (
    QuantizedTensor,
    QuantizedTensorStorage,
    Quantizer,
)

__all__ = ["HybridQuantizedTensor", "HybridQuantizedTensorStorage", "HybridQuantizer"]

_SOURCES = ("original", "rowwise_dequantized")


class HybridQuantizedTensorStorage(QuantizedTensorStorage):
    """Two storages: one is read row-wise, the other column-wise."""

    _SETTINGS = ("_rowwise_storage", "_columnwise_storage")

    _rowwise_storage: QuantizedTensorStorage | None
    _columnwise_storage: QuantizedTensorStorage | None

    @property
    def _storages(self) -> tuple[QuantizedTensorStorage, ...]:
        both = (self._rowwise_storage, self._columnwise_storage)
        return tuple(storage for storage in both if storage is not None)

    def get_data_tensors(self) -> tuple[Tensor | None, ...]:
        """The tensors of both."""
        return tuple(tensor for part in self._storages for tensor in part.get_data_tensors())

    def _mapped(self, function: Any) -> dict[str, Any]:
        fields = self._fields()
        for name in self._SETTINGS:
            part = fields[name]
            if part is not None:
                fields[name] = type(part)._made(part._mapped(function), part._dtype)
        return fields

    def _extent(self) -> tuple[int, ...]:
        return self._storages[0]._extent()

    def _dequantized(self, dtype: torch.dtype, shape: tuple) -> Tensor:
        if not self._storages:
            raise RuntimeError(f"{type(self).__name__}: it has no data: they were dropped")
        return self._storages[0]._dequantized(dtype, shape)

    def update_usage(
        self, rowwise_usage: bool | None = None, columnwise_usage: bool | None = None
    ) -> None:
        """Drop a form (False); RuntimeError where one is to be made: each is cast by itself."""
        for name, wanted in zip(self._SETTINGS, (rowwise_usage, columnwise_usage), strict=True):
            if wanted and getattr(self, name) is None:
                raise RuntimeError(
                    f"{type(self).__name__}: {name} was dropped, and is not made of the other one"
                )
            if wanted is False:
                setattr(self, name, None)

    def get_usages(self) -> dict[str, bool]:
        """Which forms are there."""
        return {
            "rowwise": self._rowwise_storage is not None,
            "columnwise": self._columnwise_storage is not None,
        }

    def prepare_for_saving(self) -> tuple[list[Tensor | None], "HybridQuantizedTensorStorage"]:
        """Take the tensors out; see `QuantizedTensorStorage`."""
        return [t for part in self._storages for t in part.prepare_for_saving()[0]], self

    def restore_from_saved(self, tensors: list[Tensor | None]) -> list[Tensor | None]:
        """Take the tensors from the front of a list; return the others."""
        for part in self._storages:
            tensors = part.restore_from_saved(tensors)
        return tensors


class HybridQuantizedTensor(QuantizedTensor, HybridQuantizedTensorStorage):
    """A tensor that has another format for each form."""

    _STORAGE = HybridQuantizedTensorStorage

    @classmethod
    def _device_of(cls, fields: dict[str, Any]) -> torch.device:
        return next(f.device for f in map(fields.get, cls._SETTINGS) if f is not None)

    def __tensor_flatten__(self) -> tuple[list[str], dict]:
        """Compilers take tensors of tensors, and these are storages: NotImplementedError."""
        raise NotImplementedError("HybridQuantizedTensor under torch.compile: dequantize() it")

    def __reduce_ex__(self, protocol: Any) -> tuple:
        """Pickle: NotImplementedError, its parts have no pickles of their own."""
        raise NotImplementedError("HybridQuantizedTensor: pickle its dequantize()")


class HybridQuantizer(Quantizer):
    """Casts each form by a quantizer of its own.

    Parameters
    ----------
    rowwise_quantizer, columnwise_quantizer : Quantizer
        For each form.
    columnwise_source : {"original", "rowwise_dequantized"}
        What the column-wise form is cast from: the values, or what the row-wise form makes of them.
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
        self.rowwise_quantizer = rowwise_quantizer
        self.columnwise_quantizer = columnwise_quantizer
        self.columnwise_source = columnwise_source

    def _empty(self, shape: tuple, device: torch.device, pin_memory: bool) -> dict[str, Any]:
        fields: dict[str, Any] = {}
        for name, quantizer, wanted in (
            ("rowwise", self.rowwise_quantizer, self.rowwise_usage),
            ("columnwise", self.columnwise_quantizer, self.columnwise_usage),
        ):
            if wanted:
                part = quantizer.copy()
                part.internal = True
                part.set_usage(rowwise=name == "rowwise", columnwise=name == "columnwise")
                options = {"device": device, "pin_memory": pin_memory}
                fields[f"_{name}_storage"] = part.make_empty(shape, **options)
        if not fields:
            raise ValueError("HybridQuantizer: neither usage is set: set_usage(rowwise=True)")
        return fields

    def _cast(self, source: Tensor, into: Any, noop: Tensor | None) -> None:
        row, column = into._rowwise_storage, into._columnwise_storage
        if row is not None:
            row._write(source, self.rowwise_quantizer, noop)
        if column is None:
            return
        if self.columnwise_source != "original" and row is not None:
            source = row._dequantized(source.dtype, tuple(source.shape))
        column._write(source, self.columnwise_quantizer, noop)

    def _settings(self) -> dict[str, Any]:
        parts = ("rowwise_quantizer", "columnwise_quantizer", "columnwise_source")
        return {name: getattr(self, name) for name in parts}
