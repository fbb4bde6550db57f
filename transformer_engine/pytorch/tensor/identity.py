# SPDX-License-Identifier: Apache-2.0
"""High precision under the names of quantized data, for operands that a recipe does not cast."""

from typing import Any

import torch
from torch import Tensor

from transformer_engine.pytorch.quantized_tensor import (
    QuantizedTensor,
    QuantizedTensorStorage,
    Quantizer,
)

__all__ = ["IdentityQuantizer", "IdentityTensor", "IdentityTensorStorage"]


class IdentityTensorStorage(QuantizedTensorStorage):
    """Values in high precision."""

    _TENSORS = ("_hp_data",)

    _hp_data: Tensor

    def _extent(self) -> tuple[int, ...]:
        return tuple(self._hp_data.shape)

    def _dequantized(self, dtype: torch.dtype, shape: tuple) -> Tensor:
        return self._hp_data.view(shape).to(dtype, copy=True)

    def _default_quantizer(self) -> Quantizer:
        return IdentityQuantizer(dtype=self._hp_data.dtype)

    def _takes(self, source: Any) -> bool:
        return isinstance(source, IdentityTensorStorage) and self.shape == source.shape

    def _viewed_fields(self, view: Any) -> dict[str, Any] | None:
        return {**self._fields(), "_hp_data": view(self._hp_data)}

    def update_usage(
        self, rowwise_usage: bool | None = None, columnwise_usage: bool | None = None
    ) -> None:
        """Nothing: the values serve both."""

    def get_usages(self) -> dict[str, bool]:
        """Both are there."""
        return {"rowwise": True, "columnwise": True}


class IdentityTensor(QuantizedTensor, IdentityTensorStorage):
    """A tensor of a nominal dtype whose values are kept in another, or the same, high precision."""

    _STORAGE = IdentityTensorStorage

    @classmethod
    def _with_data(cls, fields: dict, data: Tensor) -> dict:
        return {**fields, "_hp_data": data}


class IdentityQuantizer(Quantizer):
    """Keeps values in high precision.

    Parameters
    ----------
    dtype : torch.dtype, optional
        Convert to this one; None keeps that of the tensor.
    rowwise, columnwise : bool, default True
        Not read: the values serve both.
    """

    TENSOR, STORAGE = IdentityTensor, IdentityTensorStorage

    def __init__(
        self, *, dtype: torch.dtype | None = None, rowwise: bool = True, columnwise: bool = True
    ) -> None:
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        self.dtype = dtype

    def make_empty(self, shape: Any, *, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
        """Allocate a tensor of a shape and nominal dtype, without values; see `Quantizer`."""
        kept = self.copy()
        kept.dtype = dtype if self.dtype is None else self.dtype
        return super(IdentityQuantizer, kept).make_empty(shape, dtype=dtype, **options)

    def _empty(self, shape: tuple, device: torch.device, pin_memory: bool) -> dict[str, Any]:
        options = {"dtype": self.dtype, "device": device, "pin_memory": pin_memory}
        return {"_hp_data": torch.empty(shape, **options)}

    def _cast(self, source: Tensor, into: Any, noop: Tensor | None) -> None:
        values = source.detach().to(into._hp_data.dtype)
        if noop is not None:
            values = torch.where(noop.reshape(()) != 0, into._hp_data, values)
        into._hp_data.copy_(values)

    def get_columnwise_shape(self, shape: Any) -> tuple[int, ...]:
        """That of the tensor."""
        return tuple(shape)

    def _own_settings(self) -> dict[str, Any]:
        return {"dtype": self.dtype}
