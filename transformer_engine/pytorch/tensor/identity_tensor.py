# SPDX-License-Identifier: Apache-2.0
"""High precision under the names of quantized data, for operands that a recipe does not cast."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from transformer_engine.pytorch.tensor.parts import versions_of
from transformer_engine.pytorch.tensor.quantized_storage import FormatStorage
from transformer_engine.pytorch.tensor.quantized_tensor import (
    FormatTensor,
    QuantizedTensor,
    Quantizer,
)
from transformer_engine.pytorch.tensor.quantizer_arguments import checked_dtype, fitted
from transformer_engine.pytorch.torchside.modes import is_traced_or_faked
from transformer_engine.pytorch.torchside.tensor_kinds import is_quantized


class IdentityTensorStorage(FormatStorage):
    """Values in high precision.

    Parameters
    ----------
    hp_data : Tensor
        The values, in any floating dtype.
    quantizer, fake_dtype
        As of `FormatStorage`; without a quantizer new values get the dtype of these.
    """

    _TENSORS = ("_hp_data",)

    _hp_data: Tensor

    @classmethod
    def _checked(cls, arguments: dict[str, Any], shape: tuple | None = None) -> dict[str, Any]:
        given = cls._given(arguments, "hp_data")
        label, values = f"{cls.__name__}: hp_data", given["hp_data"]
        if not isinstance(values, Tensor) or is_quantized(values):
            raise TypeError(f"{label}: {type(values).__name__}, expected a plain tensor")
        checked_dtype(label, values.dtype)
        if shape is not None:
            values = fitted(label, values, shape)
        return {"_hp_data": values, "_quantizer": given["quantizer"]}

    def _extent(self) -> tuple[int, ...]:
        return tuple(self._hp_data.shape)

    def _decoded(self, dtype: torch.dtype, shape: tuple) -> Tensor:
        return self._hp_data.view(shape).to(dtype, copy=True)

    def _default_quantizer(self) -> Quantizer:
        return IdentityQuantizer(dtype=self._hp_data.dtype)

    def _takes(self, source: Any) -> bool:
        return isinstance(source, IdentityTensorStorage) and self.shape == source.shape

    def _viewed_fields(self, view: Any) -> dict[str, Any] | None:
        return {**self._fields(), "_hp_data": view(self._hp_data)}


class IdentityTensor(FormatTensor, IdentityTensorStorage):
    """A tensor of a nominal dtype over values in another, or the same, high precision.

    So is a *window*, a view of a format that has none of its data: what it keeps, once somebody has
    read it, are values of the whole, which are read again when those have changed. The arguments
    are as of `FormatTensor` and `IdentityTensorStorage`.
    """

    _STORAGE = IdentityTensorStorage
    _PICKLED = ("hp_data", "quantizer", "dtype", "shape")
    _seen: tuple | Tensor | None = None
    """Of a window: the versions of the whole that its values are of; None: unknown. Of a view of
    high precision: the values of that."""

    @classmethod
    def _made(
        cls,
        fields: dict[str, Any],
        dtype: torch.dtype,
        shape: Sequence[int] | None = None,
        requires_grad: bool = False,
        stride: Sequence[int] | None = None,
    ) -> "IdentityTensor":
        """A tensor of these fields, of the strides of its values."""
        values = fields["_hp_data"]
        if stride is None and (shape is None or tuple(shape) == tuple(values.shape)):
            stride = values.stride()
        return super()._made(fields, dtype, shape, requires_grad, stride)

    @classmethod
    def _window_of(cls, whole: Any, view: Callable[[Tensor], Tensor]) -> "IdentityTensor":
        """A view of a quantized tensor in high precision; in its memory, if it is one of these."""
        seen = values = None
        if isinstance(whole, IdentityTensor):
            seen = whole._hp_data
            like = values = view(seen)
        elif _reads_later(whole):
            like = view(torch.empty(whole.shape, dtype=whole.dtype, device="meta"))
        else:
            like = values = view(whole._dequantized(whole.dtype, tuple(whole.shape)))
            seen = versions_of(whole)
        fields = {"_hp_data": values, "whole": whole}
        made = cls._made(fields, like.dtype, like.shape, stride=like.stride())
        made._viewed, made._seen = (whole, view), seen
        return made

    @property
    def _hp_data(self) -> Tensor:
        """The values as they are now."""
        if self._viewed is not None:
            self._read_again()
        return self._values

    @_hp_data.setter
    def _hp_data(self, values: Tensor) -> None:
        self._values = values

    def _default_quantizer(self) -> Quantizer:
        if self._is_window():  # a write reads nothing
            return IdentityQuantizer(dtype=self.dtype)
        return super()._default_quantizer()

    def _viewed_fields(self, view: Any) -> dict[str, Any] | None:
        return None if self._is_window() else super()._viewed_fields(view)

    def _take_view(self, other: QuantizedTensor) -> None:
        super()._take_view(other)
        self._seen = other._seen

    def _is_window(self) -> bool:
        """Return whether it is one, or a view of one."""
        if self._viewed is None:
            return False
        whole, _ = self._viewed
        return not isinstance(whole, IdentityTensor) or whole._is_window()

    def _read_again(self) -> None:
        """Take over values that have changed in the whole of a window."""
        whole, view = self._viewed
        if isinstance(whole, IdentityTensor):
            values = whole._hp_data
            if values is not self._seen:  # these values lie in its memory
                self._values, self._seen = view(values), values
            return
        versions = versions_of(whole)
        if versions is None or versions != self._seen:
            values = view(whole._dequantized(whole.dtype, tuple(whole.shape)))
            lost = self._values is None or (
                self._values.is_inference() and not torch.is_inference_mode_enabled()
            )
            if lost or is_traced_or_faked(values):
                self._values = values  # those before can not be written to
            else:
                self._values.copy_(values)
            self._seen = versions

    def _takes(self, source: Any) -> bool:
        return not self._is_window() and super()._takes(source)

    @classmethod
    def _with_data(cls, fields: dict, data: Tensor) -> dict:
        return {**fields, "_hp_data": data}


def _reads_later(whole: Any) -> bool:
    """Return whether a window of a tensor need not have its values: FSDP2 keeps one of a weight."""
    parts = [part for part in whole.get_data_tensors() if part is not None]
    plain = isinstance(whole, FormatStorage) and not is_traced_or_faked(*parts)
    return plain and whole.is_contiguous()


class IdentityQuantizer(Quantizer):
    """Keeps values in high precision.

    Parameters
    ----------
    dtype : torch.dtype, optional
        Convert to this floating one; None keeps that of the tensor.
    rowwise, columnwise : bool, default True
        Not read: the values serve both.
    """

    TENSOR, STORAGE = IdentityTensor, IdentityTensorStorage
    _ARGUMENTS = ("dtype",)
    _REPEATS = True

    def __init__(
        self, *, dtype: torch.dtype | None = None, rowwise: bool = True, columnwise: bool = True
    ) -> None:
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        if dtype is not None and not dtype.is_floating_point:
            raise TypeError(f"IdentityQuantizer: dtype={dtype}, expected a floating dtype")
        self.dtype = dtype

    def _for_values(self, dtype: torch.dtype) -> "IdentityQuantizer":
        made = self.copy()
        made.dtype = dtype if self.dtype is None else self.dtype
        return made

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
