# SPDX-License-Identifier: Apache-2.0
"""Questions to a quantizer about its tensors: their parts, shapes, and what may be done.

All is composed of what a format declares: `_empty`, `_format_settings` and the constructor of its
storage. Whoever makes tensors of parts uses both halves:
``tensor_class(**q.alloc_tensors(shape), **q.create_metadata(shape, dtype=dtype))``.
"""

from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from transformer_engine.pytorch.tensor.quantizer_arguments import checked_shape, checked_tensor


class InnerTensor(NamedTuple):
    """One of the tensors that a quantized tensor consists of.

    Attributes
    ----------
    ctor_kwarg : str
        The argument of the constructor that takes it.
    shape, dtype :
        What that has to be.
    """

    ctor_kwarg: str
    shape: tuple[int, ...] = ()
    dtype: torch.dtype = torch.uint8


class QuantizerParts:
    """The part of `Quantizer` that describes its tensors."""

    _REPEATS: ClassVar[bool] = False
    """True where casting the same values again gives the same bits, and changes no state."""
    _GATHERS_ROWS: ClassVar[bool] = False
    """True where the column-wise form is made of the row-wise one alone."""

    def _format_settings(self, shape: tuple | None) -> dict[str, Any]:
        """Fields of what it makes that are no tensors; those of any shape where that is None."""
        del shape
        return {}

    def _check_shape(self, shape: tuple) -> None:
        """ValueError for a shape that the format has no blocks for."""

    def inner_tensor_specs(self, shape: Sequence[int]) -> list[InnerTensor]:
        """Parts of a tensor of a shape, in the usages that are set."""
        self._check_declared("inner_tensor_specs(shape)")
        return [
            InnerTensor(name, tuple(part.shape), part.dtype)
            for name, part in self.alloc_tensors(shape, device="meta").items()
        ]

    def alloc_tensors(self, shape: Sequence[int], *, device: Any = None) -> dict[str, Tensor]:
        """Allocate what a tensor of a shape consists of, without values.

        By the arguments of the constructor; `device` is as of `make_empty`.
        """
        self._check_declared("alloc_tensors(shape, *, device=None)")
        shape = checked_shape(type(self).__name__, shape)
        if device is None:
            device = "cuda" if torch.cuda.is_available() else "cpu"
        fields = self._empty(shape, torch.device(device), False)
        for name in self._format_settings(shape):
            del fields[name]
        made = self.STORAGE._as_arguments(fields)
        return {name: part for name, part in made.items() if part is not None}

    def storage_metadata(self, fake_dtype: torch.dtype) -> dict[str, Any]:
        """Arguments of the storage's constructor besides these tensors, for a nominal dtype."""
        self._check_declared("storage_metadata(fake_dtype)")
        return {**self._other_arguments(None), "fake_dtype": fake_dtype}

    def create_metadata(
        self, _shape: Sequence[int], *, dtype: torch.dtype, requires_grad: bool = False
    ) -> dict[str, Any]:
        """Arguments of the constructor of what it makes besides `alloc_tensors`.

        That is a tensor, or with `internal` a storage.
        """
        self._check_declared("create_metadata(shape, *, dtype, requires_grad=False)")
        shape = checked_shape(type(self).__name__, _shape)
        made = self._other_arguments(shape)
        if self.internal:
            return {**made, "fake_dtype": dtype}
        return {**made, "shape": shape, "dtype": dtype, "requires_grad": requires_grad}

    def _check_declared(self, method: str) -> None:
        """NotImplementedError for a class of a program, which does not say what it makes."""
        if not hasattr(self, "STORAGE"):
            raise self._undefined(method)

    def _other_arguments(self, shape: tuple | None) -> dict[str, Any]:
        settings = self.STORAGE._as_arguments(self._format_settings(shape))
        return {**settings, "quantizer": self.copy()}

    def is_quantizable(self, inp: Tensor) -> bool:
        """Return whether the format can hold a tensor."""
        checked_tensor(f"{type(self).__name__}: inp", inp)
        try:
            self._check_shape(tuple(inp.shape))
        except ValueError:
            return False
        return inp.is_floating_point()

    def is_requantization_safe(self) -> bool:
        """Return whether a tensor may be cast again where it is read again.

        That gives the same bits then, and changes no state. Of a cast of a program it is not known.
        """
        return self._REPEATS and self._casts_natively and self._writes_natively

    def supports_only_rowwise_all_gather(self) -> bool:
        """Return whether ranks gather row-wise data alone, and make the column-wise ones of it."""
        return self._GATHERS_ROWS

    def get_columnwise_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Shape of the column-wise data of a tensor."""
        return (*shape[-1:], *shape[:-1])

    def get_scale_shape(self, shape: Sequence[int], columnwise: bool = False) -> tuple[int, ...]:
        """Shape of the inverse scales of a tensor's row-wise, or column-wise, data."""
        del shape, columnwise
        return (1,)
