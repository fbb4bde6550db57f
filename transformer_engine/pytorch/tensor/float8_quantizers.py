# SPDX-License-Identifier: Apache-2.0
"""Casts to FP8 with one scale for the whole tensor: delayed and current scaling.

The classes of what they make are `float8_tensor.py`'s, which gives them to `PerTensorQuantizer`:
so that file, where programs look for all of these, imports this one, and this one none of it.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from transformer_engine import _core
from transformer_engine.pytorch.constants import DType
from transformer_engine.pytorch.tensor import casts
from transformer_engine.pytorch.tensor.casts import code_of
from transformer_engine.pytorch.tensor.quantizer import Quantizer, ReducesAmax, plain
from transformer_engine.pytorch.tensor.quantizer_arguments import (
    as_bytes,
    checked_dtype,
    checked_tensor,
    fp8_type,
)


def scales_of(scale_inv: Tensor) -> Tensor:
    """{1 / scale, scale} of an inverse scale, of any shape of one element."""
    if checked_tensor("fp8_scale_inv", scale_inv).numel() != 1:
        raise ValueError(f"fp8_scale_inv: shape {tuple(scale_inv.shape)}, expected (1,)")
    inverse = scale_inv.detach().to(torch.float32).reshape(1)
    return torch.cat((inverse, inverse.reciprocal()))


class PerTensorQuantizer(Quantizer):
    """Casts with one scale."""

    _CASTS_COMPUTED = True
    _GATHERS_ROWS = True
    dtype: DType  # of the codes
    _known: tuple[Tensor | None] | None = None
    """Partial maxima of what is cast, where somebody has measured them; (None,): the scale is not
    0, so nobody needs them."""

    def _partials(self, source: Tensor) -> Tensor | None:
        return casts.measure(source) if self._known is None else self._known[0]

    def _empty(self, shape: tuple, device: torch.device, pin_memory: bool) -> dict[str, Any]:
        self._check_usages()
        row = column = None
        if self.rowwise_usage:
            row = casts.empty_rows(shape, device, pin_memory)
        if self.columnwise_usage:
            column = casts.empty_columns(shape, device, pin_memory)
        scales = torch.ones(2, dtype=torch.float32, device=device, pin_memory=pin_memory)
        return {"_data": row, "_transpose": column, "_scales": scales, "_fp8_dtype": self.dtype}

    def _format_settings(self, shape: tuple | None) -> dict[str, Any]:
        del shape
        return {"_fp8_dtype": self.dtype}

    def _settings(self) -> dict[str, Any]:
        return {"dtype": self.dtype.name, **super()._settings()}

    def get_columnwise_shape(self, rowwise_data_shape: Sequence[int]) -> tuple[int, ...]:
        """Shape of the column-wise data of a tensor."""
        return super().get_columnwise_shape(rowwise_data_shape)

    def _of_data(
        self, data: Tensor, scale_inv: Tensor, dtype: torch.dtype, requires_grad: bool, plain: bool
    ) -> Any:
        """A tensor, or where `plain` a storage, of bytes."""
        label = f"{type(self).__name__}.create_tensor_from_data"
        fields = {
            "_data": casts.given(as_bytes(f"{label}: data", data)),
            "_scales": scales_of(scale_inv),
            "_fp8_dtype": self.dtype,
            "_quantizer": self.copy(),
        }
        dtype = checked_dtype(f"{label}: fake_dtype", dtype)
        if plain or self.internal:
            return self.STORAGE._made(fields, dtype)
        return self.TENSOR._made(fields, dtype, None, requires_grad)

    def _write_forms(
        self, source: Tensor, into: Any, noop: Tensor | None, how: dict[str, Any]
    ) -> None:
        if noop is not None and into._transpose_invalid and into._data is not None:
            into._transpose = None  # it may be left as it is, but is of older values
        forms = {"row": into._data, "row_scales": into._scales, "column": into._transpose}
        casts.cast(
            source, _core.SCALING_TENSOR, code_of(into._fp8_dtype), **forms, **how, noop=noop
        )


def _of_slots(name: str) -> property:
    """An attribute that may be a view of a module's slots: read once their scales are made."""

    def read(self: Any) -> Tensor:
        if self._bound is not None:
            self._bound.settle("forward")
        return self.__dict__[name]

    def write(self: Any, value: Tensor) -> None:
        self.__dict__[name] = value

    return property(read, write)


class Float8Quantizer(PerTensorQuantizer):
    """Casts with a scale that somebody else sets: delayed scaling.

    Parameters
    ----------
    scale : Tensor
        fp32 [1]: values are multiplied with it; 0 stands for 1.
    amax : Tensor
        fp32 [1]: each cast raises it to the largest magnitude that it met.
    fp8_dtype : DType
        Of the codes.
    rowwise, columnwise : bool, default True
        Which forms to make.
    measure_first : bool, default False
        Where `scale` is 0 cast with that which fits the tensor, as
        ``DelayedScaling(measure_first=True)`` does; each cast measures then.
    """

    def __init__(
        self,
        scale: Tensor,
        amax: Tensor,
        fp8_dtype: Any,
        *,
        rowwise: bool = True,
        columnwise: bool = True,
        measure_first: bool = False,
    ) -> None:
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        self._bound: Any = None  # slots of a module, which have the scale and amax
        for name, given in (("scale", scale), ("amax", amax)):
            checked_tensor(f"Float8Quantizer: {name}", given)
        self.scale, self.amax = scale, amax
        self.dtype = fp8_type("Float8Quantizer: fp8_dtype", fp8_dtype)
        self.measure_first = bool(measure_first)

    scale = _of_slots("scale")
    amax = _of_slots("amax")

    def copy(self) -> "Float8Quantizer":
        """Copy the settings; scale and amax are shared."""
        made = super().copy()
        made._bound = self._bound
        return made

    def __getstate__(self) -> dict:
        """Copy and pickle the values of scale and amax, apart from a module's slots."""
        if self._bound is not None:
            self._bound.settle("forward")
        return {**self.__dict__, "_bound": None}

    def _cast(self, source: Tensor, into: Any, noop: Tensor | None) -> None:
        scale, amax = (t if t.device == source.device else None for t in (self.scale, self.amax))
        if scale is None:
            scale = self.scale.to(source.device)
        # Of scale 0 the scale is that of the partials: 1 of none.
        measured = self.measure_first or self._known is not None
        partials = self._partials(source) if measured else casts.no_partials(source)
        how = {"scale": scale, "amax": amax, "partials": partials}
        self._write_forms(source, into, noop, how)

    def calibrate(self, tensor: Tensor) -> None:
        """Set the amax to the largest magnitude of a tensor, 0 of an empty one."""
        with torch.no_grad():
            values = plain(checked_tensor("Float8Quantizer: tensor", tensor)).detach()
            largest = values.abs().max() if values.numel() > 0 else values.new_zeros(())
            self.amax.copy_(largest.reshape(1))

    def create_tensor_from_data(
        self,
        data: Tensor,
        fake_dtype: torch.dtype = torch.float32,
        requires_grad: bool = False,
        internal: bool = False,
    ) -> Any:
        """Take bytes for data that were cast with this scale."""
        scale = torch.where(self.scale == 0, 1.0, self.scale)
        return self._of_data(data, scale.reciprocal(), fake_dtype, requires_grad, internal)

    def _own_settings(self) -> dict[str, Any]:
        scaling = {"scale": self.scale.detach().clone(), "amax": self.amax.detach().clone()}
        return {**scaling, "fp8_dtype": int(self.dtype), "measure_first": self.measure_first}


class Float8CurrentScalingQuantizer(ReducesAmax, PerTensorQuantizer):
    """Casts with the scale that fits the tensor: measured in a pass of its own.

    Parameters
    ----------
    fp8_dtype : DType
        Of the codes.
    device : torch.device
        Not read: tensors are made where their values are.
    rowwise, columnwise : bool, default True
        Which forms to make.
    with_amax_reduction : bool, default False
        Take the largest amax of the ranks of `amax_reduction_group`.
    amax_reduction_group : ProcessGroup, optional
        All ranks where None.
    force_pow_2_scales : bool, default False
        Round the scale down to a power of two.
    amax_epsilon : float, default 0.0
        Smallest amax.
    use_existing_amax, scale, amax
        Not read.
    """

    _REPEATS = True
    _ARGUMENTS = ("fp8_dtype", "force_pow_2_scales", "amax_epsilon")

    def __init__(
        self,
        fp8_dtype: Any,
        device: Any = None,
        *,
        rowwise: bool = True,
        columnwise: bool = True,
        with_amax_reduction: bool = False,
        amax_reduction_group: Any = None,
        force_pow_2_scales: bool = False,
        amax_epsilon: float = 0.0,
        use_existing_amax: bool = False,
        scale: Tensor | None = None,
        amax: Tensor | None = None,
    ) -> None:
        del use_existing_amax, scale, amax
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        self.dtype = fp8_type("Float8CurrentScalingQuantizer: fp8_dtype", fp8_dtype)
        self.device = device
        self.with_amax_reduction = with_amax_reduction
        self.amax_reduction_group = amax_reduction_group
        self.force_pow_2_scales = bool(force_pow_2_scales)
        self.amax_epsilon = float(amax_epsilon)
        if not 0.0 <= amax_epsilon < math.inf:
            raise ValueError(
                f"Float8CurrentScalingQuantizer: amax_epsilon={amax_epsilon}, expected a finite "
                "number from 0 on"
            )

    def _cast(self, source: Tensor, into: Any, noop: Tensor | None) -> None:
        partials = self._partials(source)
        if self._known is None:
            partials = self._reduced(partials)
        settings = {"amax_epsilon": self.amax_epsilon, "power_2_scale": self.force_pow_2_scales}
        self._write_forms(source, into, noop, {"partials": partials, **settings})

    def create_tensor_from_data(
        self,
        data: Tensor,
        fake_dtype: torch.dtype = torch.float32,
        requires_grad: bool = False,
        internal: bool = False,
    ) -> Any:
        """Take bytes for data of scale 1: set the ``_scale_inv`` of what is returned."""
        one = torch.ones(1, dtype=torch.float32, device=getattr(data, "device", None))
        return self._of_data(data, one, fake_dtype, requires_grad, internal)
