# SPDX-License-Identifier: Apache-2.0
"""FP8 with one scale for the whole tensor: delayed and current scaling."""

import weakref
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from transformer_engine import _core
from transformer_engine.pytorch.constants import DType
from transformer_engine.pytorch.tensor import casts
from transformer_engine.pytorch.tensor.casts import code_of
from transformer_engine.pytorch.tensor.float8_quantizers import (
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
    PerTensorQuantizer,
    scales_of,
)
from transformer_engine.pytorch.tensor.quantized_storage import FormatStorage
from transformer_engine.pytorch.tensor.quantized_tensor import FormatTensor, Quantizer
from transformer_engine.pytorch.tensor.quantizer_arguments import (
    as_bytes,
    fitted,
    fp8_type,
)
from transformer_engine.pytorch.torchside.modes import is_traced_or_faked

__all__ = [
    "Float8CurrentScalingQuantizer",
    "Float8Quantizer",
    "Float8Tensor",
    "Float8TensorStorage",
]


class Float8TensorStorage(FormatStorage):
    """FP8 bytes of a matrix, its transpose where that was made, and one scale.

    Parameters
    ----------
    data : Tensor, optional
        uint8, row-wise: [..., columns].
    fp8_scale_inv : Tensor
        fp32 [1]: a value is its code times this.
    fp8_dtype : DType
        Of the codes: ``kFloat8E4M3`` or ``kFloat8E5M2``.
    data_transpose : Tensor, optional
        uint8, column-wise: [columns, ...].
    quantizer : Quantizer, optional
        What new values are cast by; current scaling where None.
    fake_dtype : torch.dtype, default torch.float32
        Nominal dtype.
    transpose_invalid : bool, optional
        True: `data_transpose` is of other data than these, and is not read; it is made again where
        it is needed. Without `data` it is all there is, and counts.
    """

    _TENSORS = ("_data", "_transpose", "_scales")
    _SETTINGS = ("_fp8_dtype", "_transpose_version")
    _ARGUMENTS: ClassVar[dict[str, str]] = {
        "_transpose": "data_transpose",
        "_scales": "fp8_scale_inv",
    }

    _data: Tensor | None
    _transpose: Tensor | None
    _scales: Tensor  # fp32 {1 / scale, scale}
    _fp8_dtype: DType
    _transpose_version: "_Version | None"
    """The data that the transpose was made of, as they were then."""

    def __init__(self, *, transpose_invalid: bool | None = None, **arguments: Any) -> None:
        super().__init__(**arguments)
        if transpose_invalid:
            self._transpose_invalid = True

    # ---- fields ----------------------------------------------------------------------------------

    @property
    def _scale_inv(self) -> Tensor | None:
        """Factor of the codes, fp32 [1]."""
        return None if self._scales is None else self._scales[:1]

    @_scale_inv.setter
    def _scale_inv(self, value: Tensor) -> None:
        self._scales = scales_of(value)

    @property
    def _transpose_invalid(self) -> bool:
        """True where there is no transpose of the data as they are now."""
        if self._transpose is None:
            return True
        return self._data is not None and not _is_of(self._transpose_version, self._data)

    @_transpose_invalid.setter
    def _transpose_invalid(self, value: bool) -> None:
        if value and self._data is not None:
            self._transpose = None
        self._transpose_version = None if self._data is None else _version_of(self._data)

    @classmethod
    def _checked(cls, arguments: dict[str, Any], shape: tuple | None = None) -> dict[str, Any]:
        given = cls._given(arguments, "data", "fp8_scale_inv", "fp8_dtype", "data_transpose")
        label, data, transpose = cls.__name__, given["data"], given["data_transpose"]
        if given["fp8_scale_inv"] is None:
            raise TypeError(f"{label}: fp8_scale_inv: None, expected a tensor of fp32 [1]")
        if data is None and transpose is None:
            raise ValueError(f"{label}: data and data_transpose are None: give one")
        for name in ("data", "data_transpose"):
            if given[name] is not None:
                given[name] = as_bytes(f"{label}: {name}", given[name])
        if shape is None:
            shape = _turned_back(transpose.shape) if data is None else tuple(data.shape)
        fields = {"_quantizer": given["quantizer"], "_scales": scales_of(given["fp8_scale_inv"])}
        fields["_fp8_dtype"] = fp8_type(f"{label}: fp8_dtype", given["fp8_dtype"])
        expected = {"data": shape, "data_transpose": (*shape[-1:], *shape[:-1])}
        for name, field in (("data", "_data"), ("data_transpose", "_transpose")):
            if given[name] is not None:
                fields[field] = casts.given(fitted(f"{label}: {name}", given[name], expected[name]))
        if None not in (data, transpose):
            fields["_transpose_version"] = _version_of(fields["_data"])
        return fields

    @classmethod
    def _with_data(cls, fields: dict, data: Tensor) -> dict:
        return {**fields, "_data": data, "_transpose": None, "_transpose_version": None}

    @classmethod
    def _as_arguments(cls, fields: dict[str, Any]) -> dict[str, Any]:
        made = super()._as_arguments({n: v for n, v in fields.items() if n != "_transpose_version"})
        if made.get("fp8_scale_inv") is not None:
            made["fp8_scale_inv"] = made["fp8_scale_inv"][:1]
        return made

    def _extent(self) -> tuple[int, ...]:
        if self._data is not None:
            return tuple(self._data.shape)
        return _turned_back(self._transpose.shape)

    # ---- values ----------------------------------------------------------------------------------

    def _decoded(self, dtype: torch.dtype, shape: tuple) -> Tensor:
        if self._data is None and self._transpose is None:
            raise RuntimeError(f"{type(self).__name__}: it has no data: they were dropped")
        data = (self._data, self._scales, self._transpose, self._scales)
        return casts.dequantize(data, _core.SCALING_TENSOR, code_of(self._fp8_dtype), shape, dtype)

    def _default_quantizer(self) -> Quantizer:
        return Float8CurrentScalingQuantizer(self._fp8_dtype, self._scales.device)

    def _takes(self, source: Any) -> bool:
        """Return whether bytes of another tensor can be copied: where no scale has to be kept."""
        return (
            isinstance(source, Float8TensorStorage)
            and self._viewed is None
            and source._fp8_dtype == self._fp8_dtype
            and None not in (self._data, source._data)
            and self.shape == source.shape
        )

    def copy_from_storage(self, src: "Float8TensorStorage") -> None:
        """Copy data and scale of another one, in place; a transpose that is there follows."""
        with torch.no_grad():
            self._data.copy_(src._data)
            self._scales.copy_(src._scales)
            if self._transpose is not None:
                self._transpose.copy_(_transposed(self))
        self._count_write()
        self._written()

    def _viewed_fields(self, view: Any) -> dict[str, Any] | None:
        """Views of the row-wise bytes with rows in one piece; the transpose stays behind."""
        if self._data is None:
            return None
        try:
            data = view(self._data)
        except RuntimeError:  # padded rows do not lie as the nominal ones
            return None
        if data.dim() == 0 or data.stride(-1) != 1:
            return None
        cut = data.shape[-1] < self._data.shape[-1]
        if cut and data.dim() > 1 and casts.has_padding(data):  # of values that were cut off
            return None
        return {**self._fields(), "_data": data, "_transpose": None}

    def _written(self) -> None:
        if self._transpose is not None:
            self._transpose_invalid = False

    def _current_fields(self) -> dict[str, Any]:
        """The fields, without a transpose of other data than these: versions are not copied."""
        fields = super()._current_fields()
        if self._data is not None and self._transpose_invalid:
            fields["_transpose"] = fields["_transpose_version"] = None
        return fields

    @classmethod
    def _restored(cls, fields: dict[str, Any]) -> dict[str, Any]:
        return {**fields, "_fp8_dtype": fp8_type("_fp8_dtype", fields["_fp8_dtype"])}

    def _mapped(self, function: Any) -> dict[str, Any]:
        fields = super()._mapped(function)
        if None not in (fields["_data"], fields["_transpose"]):
            fields["_transpose_version"] = _version_of(fields["_data"])
        return fields

    def _state(self) -> dict[str, Any]:
        return {"_transpose_version": None if self._transpose_invalid else 0}

    def _take_state(self, state: dict[str, Any]) -> None:
        if self._transpose is not None and state["_transpose_version"] is not None:
            self._transpose_invalid = False

    def _shown(self) -> dict[str, Any]:
        return {"fp8_dtype": self._fp8_dtype.name, "scale_inv": self._scale_inv.tolist()[0]}

    # ---- forms -----------------------------------------------------------------------------------

    def update_usage(
        self, rowwise_usage: bool | None = None, columnwise_usage: bool | None = None
    ) -> None:
        """Make a form (True), drop it (False) or leave it (None).

        The transpose is made of the row-wise bytes. RuntimeError where these are to be made.
        """
        if rowwise_usage and self._data is None:
            raise RuntimeError(
                f"{type(self).__name__}: the row-wise data were dropped, and are not made of the "
                "transpose: keep them, update_usage(rowwise_usage=True) before"
            )
        if columnwise_usage:
            self._create_transpose()
        if columnwise_usage is False:
            self._transpose = self._transpose_version = None
        if rowwise_usage is False:
            self._data = None

    def get_usages(self) -> dict[str, bool]:
        """Which forms are there, of the values as they are now."""
        return {"rowwise": self._data is not None, "columnwise": not self._transpose_invalid}

    def remove_caches(self) -> None:
        """Drop the transpose, which is made again of the row-wise bytes where there are such."""
        if self._data is not None:
            self.update_usage(columnwise_usage=False)

    def _create_transpose(self) -> None:
        """Make the transpose, unless it is there."""
        if not self._transpose_invalid:
            return
        if self._data is None:
            raise RuntimeError(f"{type(self).__name__}: its row-wise data were dropped")
        self._transpose = _transposed(self)
        self._transpose_invalid = False


class _Version(NamedTuple):
    """A tensor as it is, without keeping it: another one has other values at the same version."""

    data: weakref.ref
    count: int  # changes with the values; those of inference mode do not tell
    place: int  # changes where ``data.data`` is assigned, which counts as no change

    def __reduce__(self) -> tuple:
        """Pickle as None: what is read again is another tensor."""
        return type(None), ()


def _version_of(data: Tensor) -> _Version:
    place = 0 if type(data) is not Tensor or is_traced_or_faked() else data.data_ptr()
    return _Version(weakref.ref(data), -1 if data.is_inference() else data._version, place)


def _is_of(version: _Version | None, data: Tensor) -> bool:
    """Return whether a tensor is the one of a version, and has not changed."""
    if not isinstance(version, _Version) or version.data() is not data:
        return False
    return version[1:] == _version_of(data)[1:]


def _transposed(storage: Float8TensorStorage) -> Tensor:
    return casts.transpose(storage._data)


def _turned_back(shape: Sequence[int]) -> tuple[int, ...]:
    """Shape of the tensor of a transpose."""
    return (*shape[1:], *shape[:1])


class Float8Tensor(FormatTensor, Float8TensorStorage):
    """A tensor in FP8 with one scale.

    Parameters
    ----------
    shape : sequence of int
        Of the values.
    dtype : torch.dtype
        Nominal one: of the values where they are read in high precision.
    data, fp8_scale_inv, fp8_dtype, data_transpose, quantizer :
        As of `Float8TensorStorage`.
    requires_grad : bool, default False
        Whether autograd records it.
    """

    _STORAGE = Float8TensorStorage
    _DEFAULTS: ClassVar[dict[str, Any]] = {"fp8_dtype": DType.kFloat8E4M3}
    _PICKLED = ("data", "fp8_dtype", "fp8_scale_inv", "dtype", "shape", "data_transpose")

    @classmethod
    def make_like(
        cls,
        tensor: Any,
        *,
        shape: Sequence[int] | None = None,
        dtype: torch.dtype | None = None,
        requires_grad: bool = False,
        data: Tensor | None = None,
        data_transpose: Tensor | None = None,
    ) -> Any:
        """A tensor with the same scale; see `QuantizedTensor.make_like`.

        `data_transpose` are column-wise bytes to use instead, those of `data` where that is given.
        """
        if data_transpose is None:
            made = super().make_like(
                tensor, shape=shape, dtype=dtype, requires_grad=requires_grad, data=data
            )
            return made
        if shape is None:
            shape = _turned_back(data_transpose.shape) if data is None else data.shape
        options = {**tensor.get_metadata(), "data_transpose": data_transpose}
        options["data"] = data
        dtype = tensor.dtype if dtype is None else dtype
        return cls(shape=shape, dtype=dtype, requires_grad=requires_grad, **options)


PerTensorQuantizer.TENSOR, PerTensorQuantizer.STORAGE = Float8Tensor, Float8TensorStorage
