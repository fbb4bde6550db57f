# SPDX-License-Identifier: Apache-2.0
"""Tensors in low precision, as pytrees."""

from dataclasses import dataclass
from enum import Enum
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from transformer_engine.common import absent
from transformer_engine.jax.definitions import casts, chosen
from transformer_engine.jax.definitions.scaling_modes import Cast, ScalingMode

__getattr__, __dir__ = absent.attach(globals())


class QuantizeLayout(Enum):
    """Which forms of a tensor a cast makes."""

    ROWWISE = 0
    COLWISE = 1
    ROWWISE_COLWISE = 2

    @property
    def has_rowwise(self) -> bool:
        """Whether the row-wise form is among them."""
        return self is not self.COLWISE

    @property
    def has_colwise(self) -> bool:
        """Whether the column-wise form is among them."""
        return self is not self.ROWWISE


class TensorUsage(Enum):
    """Place of a tensor in a product lhs rhs, whose sum runs along lhs's last, rhs's first dims."""

    LHS = 0
    LHS_TRANS = 1
    RHS = 2
    RHS_TRANS = 3

    @property
    def is_colwise(self) -> bool:
        """Whether the product sums along the first dims of the tensor."""
        return self in (self.LHS_TRANS, self.RHS)


class TensorSource(Enum):
    """What a tensor is to a layer."""

    X = 0
    KERNEL = 1
    DGRAD = 2


def turned(x: Array, first: int) -> Array:
    """A tensor with its `first` dims behind the others."""
    return jnp.moveaxis(x, range(first), range(x.ndim - first, x.ndim))


class _Tensor:
    """A pytree whose leaves are its first fields; the others are static."""

    _LEAVES = 2

    def __init_subclass__(cls) -> None:
        jax.tree_util.register_pytree_node_class(cls)

    def tree_flatten(self) -> tuple[tuple, tuple]:
        """Split into leaves and the rest."""
        values = tuple(vars(self).values())
        return values[: self._LEAVES], values[self._LEAVES :]

    @classmethod
    def tree_unflatten(cls, rest: tuple, leaves: tuple) -> "_Tensor":
        """Undo `tree_flatten`."""
        made = object.__new__(cls)
        names = cls.__dataclass_fields__  # type: ignore[attr-defined]
        vars(made).update(zip(names, (*leaves, *rest), strict=True))
        return made


@dataclass
class NoScaleTensor(_Tensor):
    """A tensor in high precision, where one in low precision could be."""

    data: Array
    amax: Array | None = None  # fp32 [1]

    def dequantize(self) -> Array:
        """Return the data."""
        return self.data

    def get_tensor(self, usage: TensorUsage) -> "NoScaleTensor":
        """Return itself, for any usage."""
        del usage
        return self

    @property
    def ndim(self) -> int:
        """Dims of the data."""
        return self.data.ndim


@dataclass
class ScaledTensor1x(_Tensor):
    """One form of a tensor in low precision.

    Attributes
    ----------
    data : Array
        FP8, shaped as the tensor; where `data_layout` is "T" its dims from `flatten_axis` on come
        first.
    scale_inv : Array
        fp32 [1] of a tensor; else one of each tile of the matrix [lines, depth] that the data is:
        [lines / high, depth / wide], rounded up; of MXFP8 float8_e8m0fnu.
    amax : Array, optional
        fp32 [1], of the tensor before the cast.
    scaling_mode : ScalingMode
        Which elements share a scale.
    dq_dtype : dtype
        What `dequantize` gives.
    is_colwise : bool
        Whether the sum of its product runs along the dims before `flatten_axis`.
    data_layout : {"N", "T"}
        Whether the data is transposed: column-wise data is.
    flatten_axis : int
        The first dim of the second group of dims of the tensor, counted from 0.
    """

    data: Array
    scale_inv: Array
    amax: Array | None
    scaling_mode: ScalingMode
    dq_dtype: Any
    is_colwise: bool
    data_layout: str
    flatten_axis: int

    _LEAVES = 3

    @property
    def ndim(self) -> int:
        """Dims of the data."""
        return self.data.ndim

    @property
    def depth(self) -> int:
        """How many dims of the data come last: those behind its first group."""
        return self.flatten_axis if self.data_layout == "T" else self.ndim - self.flatten_axis

    def lines(self) -> casts.Quantized:
        """Data and scales."""
        return casts.Quantized(self.data, self.scale_inv)

    def dequantize(self) -> Array:
        """Return what it stands for, in `dq_dtype` and the tensor's shape."""
        dequantize = chosen("dequantize")
        values = dequantize(self.lines(), self.scaling_mode, self.dq_dtype, self.depth)
        return turned(values, self.ndim - self.depth) if self.data_layout == "T" else values

    def get_tensor(self, usage: TensorUsage) -> "ScaledTensor1x":
        """Return itself; ValueError where the usage needs the other form."""
        if self.scaling_mode.is_tensor_scaling() or usage.is_colwise == self.is_colwise:
            return self
        have, want = (("column" if c else "row") for c in (self.is_colwise, usage.is_colwise))
        raise ValueError(
            f"{usage}: the tensor has its {have}-wise form, and this needs the {want}-wise one: "
            "quantize it with QuantizeLayout.ROWWISE_COLWISE"
        )


@dataclass
class ScaledTensor2x(_Tensor):
    """Both forms of a tensor in low precision."""

    rowwise_tensor: ScaledTensor1x
    colwise_tensor: ScaledTensor1x

    @property
    def ndim(self) -> int:
        """Dims of the tensor."""
        return self.rowwise_tensor.ndim

    def get_tensor(self, usage: TensorUsage) -> ScaledTensor1x:
        """Return the form that the usage needs."""
        return self.colwise_tensor if usage.is_colwise else self.rowwise_tensor

    def get_rowwise_tensor(self) -> ScaledTensor1x:
        """Return the row-wise form."""
        return self.rowwise_tensor

    def get_colwise_tensor(self) -> ScaledTensor1x:
        """Return the column-wise form."""
        return self.colwise_tensor

    def dequantize(self) -> Array:
        """Return what the row-wise form stands for."""
        return self.rowwise_tensor.dequantize()


ScaledTensor = ScaledTensor1x | ScaledTensor2x


def quantized_form(
    x: Array, cast: Cast, scale: Array | None, is_colwise: bool, flatten_axis: int, dq_dtype: Any
) -> ScaledTensor1x:
    """Cast one form of a tensor; the scale is that of a tensor, fp32 [1]."""
    axis = flatten_axis % x.ndim
    lines, depth = (turned(x, axis), axis) if is_colwise else (x, x.ndim - axis)
    data, scale_inv = chosen("quantize")(lines, cast, scale, depth)
    layout, dtype = "T" if is_colwise else "N", jnp.dtype(dq_dtype)
    return ScaledTensor1x(data, scale_inv, None, cast.mode, dtype, is_colwise, layout, axis)


class ScaledTensorFactory:
    """Makes tensors of data that is in low precision already."""

    @staticmethod
    def create_1x(
        data: Array,
        scale_inv: Array,
        amax: Array | None = None,
        scaling_mode: ScalingMode = ScalingMode.DELAYED_TENSOR_SCALING,
        dq_dtype: Any = jnp.bfloat16,
        is_colwise: bool = False,
        data_layout: str = "N",
        flatten_axis: int = -1,
    ) -> ScaledTensor1x:
        """Make one form; `flatten_axis` is that of the tensor, not of transposed data."""
        axis = flatten_axis % data.ndim
        dtype = jnp.dtype(dq_dtype)
        return ScaledTensor1x(
            data, scale_inv, amax, scaling_mode, dtype, is_colwise, data_layout, axis
        )
